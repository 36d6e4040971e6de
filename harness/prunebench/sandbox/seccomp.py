"""The system calls that a box refuses, as a seccomp filter: classic BPF, built by hand, without libseccomp.

A list of what is refused, not of what is allowed: an interpreter needs some eighty calls that differ by its version and
libc. Refused are new processes (threads are allowed: they die with the process and their memory is limited), sockets,
namespaces and mounts, looking into other processes, loading code into the kernel, keys, memory that no limit of the
process counts (System V IPC, message queues, memfd), and calls of another architecture or of x32.
"""

from __future__ import annotations

import platform
import struct
from typing import Final

from prunebench.errors import PrerequisiteError

__all__ = ["REFUSED", "filter_program"]

EPERM, ENOSYS = 1, 38
CLONE_THREAD: Final = 0x10000

# audit.h's AUDIT_ARCH_*; where x32's numbers begin.
_ARCHITECTURE: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32: Final = 0x40000000

# Names with their numbers on x86-64 and arm64 (asm/unistd_64.h, asm-generic/unistd.h); None where there is no such
# call.
REFUSED: Final[dict[str, tuple[int | None, int | None]]] = {
    # processes
    "fork": (57, None),
    "vfork": (58, None),
    # network
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    # the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    # keys
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # memory that is nobody's
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "move_pages": (279, 239),
    "mbind": (237, 235),
}
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_CLONE3: Final = 435

# linux/bpf_common.h and linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16


def filter_program(machine: str | None = None) -> bytes:
    """The filter for `bwrap --seccomp`: an array of `struct sock_filter`.

    Args:
        machine: as `platform.machine` has it; this machine by default.

    Raises:
        PrerequisiteError: for a machine whose numbers are not listed.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURE:
        raise PrerequisiteError(f"no system call filter for {machine}", expected=", ".join(_ARCHITECTURE))
    column = list(_ARCHITECTURE).index(machine)
    refused = sorted(number for numbers in REFUSED.values() if (number := numbers[column]) is not None)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    # A jump reaches 255 instructions, so each call returns where it is recognised.
    for number in refused:
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | EPERM)]
    # clone3 passes its flags in memory, which no filter can read; without it libc falls back to clone.
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    code += [
        (_EQUAL, 0, 3, _CLONE[machine]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_AT),
        (_ANY_BIT, 1, 0, CLONE_THREAD),
        (_RETURN, 0, 0, _ERRNO | EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
