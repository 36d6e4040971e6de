"""Programs that cheat or harm: none passes, none is alive afterwards, nothing of ours is touched, no file is left.

Nothing here is unbounded: what would be a fork bomb tries eight times, and every allocation is of a stated size.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from prunebench.sandbox import Case, run_cases

TESTS = "assert add(1) == 3\nassert add(-4) == -2\nassert add(10) == 12\n"

CHEATS = {
    "always equal": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 3
def add(x): return Equal()
""",
    "always equal int": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __pos__(self): return 3
    def __int__(self): return 3
def add(x): return Equal(99)
""",
    "always equal str": """
class Equal(str):
    def __eq__(self, other): return True
    def __str__(self): return self
    def encode(self, *_): return b'3'
def add(x): return Equal('99')
""",
    "always equal list": """
class Equal(list):
    def __eq__(self, other): return True
    def __iter__(self): return iter([3])
def add(x): return Equal([99])
""",
    "lies about its class": """
class Liar:
    __class__ = int
    def __eq__(self, other): return True
    def __index__(self): return 3
def add(x): return Liar()
""",
    "metaclass": """
class Meta(type):
    def __eq__(self, other): return True
    __hash__ = type.__hash__
class Equal(metaclass=Meta):
    def __eq__(self, other): return True
def add(x): return Equal
""",
    "frame walk": """
import sys
def add(x):
    frame = sys._getframe()
    while frame:
        for space in (frame.f_locals, frame.f_globals):
            for name in list(space):
                if 'expect' in name or 'verdict' in name or 'state' in name or name in ('tests', 'request'):
                    return space[name]
        frame = frame.f_back
    return 'nothing found'
""",
    "garbage walk": """
import gc
def add(x):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and 'tests' in thing: return thing['tests']
        if isinstance(thing, str) and 'assert' + ' add' in thing: return thing
    return 'nothing found'
""",
    "patched builtins, json and math": """
import builtins, json, math, os, operator
class Equal:
    def __eq__(self, other): return True
builtins.AssertionError = KeyError
builtins.len = lambda *a: 0
builtins.isinstance = lambda *a: True
builtins.abs = lambda *a: 0
builtins.compile = builtins.exec = lambda *a, **k: None
json.dumps = json.loads = lambda *a, **k: '{"state": "ok", "reason": ""}'
math.isclose = operator.eq = lambda *a, **k: True
def add(x): return Equal()
""",
    "patched worker": """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith('prunebench'):
        module.pack = lambda *a, **k: b'T'
def add(x): return 99
""",
    "forged reply": """
import os
def add(x):
    for number in range(3, 64):
        for text in (b'0000000aI0x3;', b'00000010U3;I0x1;S2;okY1;T', b'{"state": "ok", "reason": ""}', b'ok'):
            try: os.write(number, text)
            except OSError: pass
    return 99
""",
    "forged replies, well made": """
import os, sys
wire = next(module for name, module in sys.modules.items() if name.endswith('.wire'))
for number in range(3, 64):
    for answer in range(1, 4):
        try: wire.Channel(0, number).send((answer, 'ok', wire.pack(True)))
        except OSError: pass
os._exit(0)
""",
    "forged digest": """
import os, sys
wire = next(module for name, module in sys.modules.items() if name.endswith('.wire'))
class Forged:
    pass
real = wire._pack
def lie(value, keep, put, depth):
    if isinstance(value, Forged): put(b'H32;' + bytes(32))
    else: real(value, keep, put, depth)
wire._pack = lie
def add(x): return Forged()
""",
    "forged object": """
import sys
wire = next(module for name, module in sys.modules.items() if name.endswith('.wire'))
def add(x): return wire.Kept(-1, '__import__("os")')
""",
    "exit 0": "import sys\nsys.exit(0)",
    "exit 0 when called": "import sys\ndef add(x): sys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit at once when called": "import os\ndef add(x): os._exit(0)",
    "stop iteration": "def add(x): raise StopIteration",
    "generator exit": "def add(x): raise GeneratorExit",
    "keyboard interrupt": "def add(x): raise KeyboardInterrupt",
    "exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef add(x): raise SystemExit(0)",
    "closes everything": "import os\nos.closerange(3, 64)\ndef add(x): return 3",
    "trace function": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\nadd = abs",
    "answers once": "seen = []\ndef add(x):\n    seen.append(x)\n    return 3 if len(seen) == 1 else None",
    "empty": "",
    "missing entry point": "def added(x): return x + 2",
}

# {host} is a folder of ours, {here} where we are, {port} a port that we listen on, {pid} our process.
HARMS = {
    "host files": """
import os
for path in ('{host}', '{host}/secret', '{here}', '/etc/passwd', '/proc/self', '/sys/kernel', '/var', '/dev/shm'):
    if os.path.lexists(path): raise RuntimeError('host file ' + path)
if os.listdir('/dev') != ['null']: raise RuntimeError('devices')
""",
    "writes": """
for path in ('{host}/left', '/left', '/usr/left', '/dev/left', '/lib/left', '/tmp/../left'):
    try: open(path, 'w').close()
    except OSError: continue
    raise RuntimeError('wrote ' + path)
""",
    "environment": """
import os
if 'PRUNEBENCH_SECRET' in os.environ or 'HOME' in os.environ or 'PATH' in os.environ: raise RuntimeError('environment')
""",
    "identity": """
import os
if os.getuid() == 0 or os.geteuid() == 0 or os.getpid() > 3: raise RuntimeError('identity')
try: os.setuid(0)
except OSError: pass
else: raise RuntimeError('became root')
""",
    "sockets": """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    try: socket.socket(family, socket.SOCK_DGRAM)
    except OSError: continue
    raise RuntimeError('a socket')
try: socket.create_connection(('127.0.0.1', {port}), 2)
except OSError: pass
else: raise RuntimeError('connected')
""",
    "subprocess": """
import subprocess, os
for start in (lambda: subprocess.run(['/usr/bin/env']), lambda: os.system('true') and 1 / 0,
              lambda: os.popen('true').read(),
              lambda: os.posix_spawn('/usr/bin/env', ['env'], {{}}), os.fork, os.forkpty):
    try: start()
    except (OSError, ZeroDivisionError): continue
    raise RuntimeError('a process')
""",
    "bounded fork loop": """
import os
for _ in range(8):
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: continue
    raise RuntimeError('forked')
""",
    "double fork and setsid": """
import os, time
try:
    os.setsid()
except OSError: pass
try:
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    raise RuntimeError('forked')
except OSError: pass
""",
    "signals to others": """
import os, signal
for pid in ({pid}, os.getppid(), 1):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
for group in (os.killpg,):
    try: group({pid}, signal.SIGKILL)
    except OSError: pass
""",
    "system calls": """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
numbers = {{'ptrace': 101, 'mount': 165, 'unshare': 272, 'bpf': 321, 'keyctl': 250, 'io_uring_setup': 425, 'shmget': 29,
           'memfd_create': 319, 'userfaultfd': 323, 'perf_event_open': 298, 'process_vm_readv': 310, 'clone3': 435,
           'setns': 308, 'chroot': 161, 'pidfd_open': 434, 'x32 getpid': 0x40000000 + 39}}
for name, number in numbers.items() if __import__('platform').machine() == 'x86_64' else ():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        raise RuntimeError(name)
""",
    "threads": """
import threading, time
for _ in range(8): threading.Thread(target=time.sleep, args=(60,)).start()
""",
    "thread bomb": """
import threading, time
try:
    for _ in range(2000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except (RuntimeError, MemoryError): pass
else: raise RuntimeError('no limit on threads')
""",
    "fills its tmpfs": """
import os
written = 0
try:
    for place in range(64):
        with open(f'/tmp/{{place}}', 'wb') as file: written += file.write(bytes(2 ** 19))
except OSError: pass
if written > 17 * 2 ** 20: raise RuntimeError('no limit on files')
""",
    "open files": """
files = []
try:
    for _ in range(200): files.append(open('/dev/null'))
except OSError: pass
else: raise RuntimeError('no limit on open files')
""",
    "planted files": """
for name in ('sitecustomize.py', 'usercustomize.py', 'conftest.py', 'numpy.py', 'json.py', 'program.py'):
    open(name, 'w').write('import os\\nos._exit(0)')
""",
}

SIGNALS = """
import signal
for number in range(1, 65):
    try: signal.signal(number, {})
    except (OSError, ValueError): pass
while True: pass
"""
FLOOD = """
import os
for number in range(3, 64):
    try:
        for _ in range(16): os.write(number, b'f' * 2 ** 20)
    except OSError: pass
"""

# Each is stopped by a limit.
EXHAUSTION = {
    "endless loop": ("while True:\n    try:\n        1 / 0\n    except:\n        pass", "timeout"),
    "signal handlers": (SIGNALS.format("lambda *_: None"), "timeout"),
    "ignored signals": (SIGNALS.format("signal.SIG_IGN"), "timeout"),
    "itertools": ("import itertools\ndef add(x): return list(itertools.product(range(9), repeat=9))", "error timeout"),
    "a power": ("def add(x): return 10 ** 10 ** 8", "timeout error"),
    "a regex": ("import re\ndef add(x): return re.match('(a+)+$', 'a' * 64 + 'b')", "timeout"),
    "5 GB": ("held = bytearray(5 * 2 ** 30)", "error"),
    "memory in small pieces": ("held = []\nwhile True: held.append(bytes(2 ** 20))", "error timeout"),
    "stdout": (
        "import sys\nfor _ in range(1024): sys.stdout.write('x' * 2 ** 20)\ndef add(x): return 99",
        "wrong timeout",
    ),
    "stdout, unbuffered": (
        "import os\nfor _ in range(1024): os.write(1, bytes(2 ** 20))\ndef add(x): return 99",
        "wrong timeout",
    ),
    "a reply too large": ("def add(x): return 'x' * 2 ** 25", "wrong"),
    "a file too large": ("open('f', 'wb').write(bytes(2 ** 24))", "error"),
    "all channels flooded": (FLOOD, "error timeout"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "error"),
    "abort": ("import os\nos.abort()", "error"),
    "deep recursion": ("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", "error timeout"),
    "deep value": ("def add(x):\n    for _ in range(10 ** 5): x = [x]\n    return x", "error"),
    "value of itself": ("def add(x):\n    x = []\n    x.append(x)\n    return x", "error"),
    "deep source": ("x = " + "(" * 10**5, "error"),
    "sleep": ("import time\ntime.sleep(600)", "timeout"),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "colliding keys": ("def add(x): return {i * (2 ** 61 - 1): 0 for i in range(1, 20_000)}", "wrong timeout error"),
}


IDLE = ("sleep", "stopped", "closes everything")
"""They take no CPU time: the wall limit ends them."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """What must not be touched: a folder of ours, a listening port, and what is in the places where things get left."""
    import socket

    folder = tmp_path_factory.mktemp("ours")
    (folder / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRUNEBENCH_SECRET", "1")
        yield {"host": folder, "port": server.getsockname()[1], "pid": os.getpid(), "here": Path.cwd()}


@pytest.fixture(scope="module")
def verdicts(box, ours):
    """All programs in one batch, and what was there before and after."""
    programs = {
        **{("cheat", name): program for name, program in CHEATS.items()},
        **{("harm", name): program.format(**ours) + "def add(x): return x + 2\n" for name, program in HARMS.items()},
        **{("exhaust", name): program for name, (program, _) in EXHAUSTION.items()},
    }
    cases = [
        Case(
            " ".join(name),
            program,
            TESTS,
            {"add": "add"},
            cpu_seconds=1,
            wall_seconds=2.0 if name[1] in IDLE else 120.0,
        )
        for name, program in programs.items()
    ]
    before = left_behind()
    with pytest.MonkeyPatch.context() as patch:
        # That timeouts are tried again is tested elsewhere; here are many.
        patch.setattr("prunebench.sandbox.cases._again", lambda _case, verdict, _box: verdict)
        found = dict(zip(programs, run_cases(cases, box, workers=4), strict=True))
    return found, before, left_behind()


def left_behind():
    """Boxes and interpreters of boxes that are there, and the files in our own places."""
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"prunebench.sandbox.inside" in b" ".join(words) and parent in (str(os.getpid()), "1"):
            commands.append(words[0])
    temporary = Path(tempfile.gettempdir())
    names = ("sitecustomize.py", "usercustomize.py", "conftest.py", "numpy.py", "left", "big", "f", "0")
    return commands, [
        name for name in names for place in (temporary, Path.cwd(), Path("/")) if (place / name).is_file()
    ]


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(verdicts, name):
    verdict = verdicts[0]["cheat", name]
    assert verdict.state in {"wrong", "error"}, verdict


@pytest.mark.parametrize("name", HARMS)
def test_no_harm_is_done(verdicts, name):
    """These programs are right, and fail only if something that they try works."""
    verdict = verdicts[0]["harm", name]
    assert verdict.state == "ok", verdict


@pytest.mark.parametrize("name", EXHAUSTION)
def test_every_limit_holds(verdicts, name):
    verdict = verdicts[0]["exhaust", name]
    assert verdict.state in EXHAUSTION[name][1].split(), verdict


def test_nothing_is_alive_and_no_file_is_left(verdicts, ours):
    _, before, after = verdicts
    assert after == before
    assert after[0] == []
    assert [path.name for path in ours["host"].iterdir()] == ["secret"]
    assert (ours["host"] / "secret").read_text() == "secret"


def test_the_harness_is_unharmed(verdicts, ask):
    assert builtins.len([1]) == 1
    assert json.loads("1") == 1
    assert math.isclose(1, 1 + 1e-12)
    assert ask("def add(x): return x + 2").state == "ok"
    assert ask("import json, math\ndef add(x): return int(json.loads(str(x))) + math.floor(2.5)").state == "ok"


def test_what_a_program_plants_is_gone_for_the_next(ask):
    plant = "open('json.py', 'w').write('1 / 0')\nopen('numpy.py', 'w').close()\ndef add(x): return x + 2"
    look = "import os, json\nassert os.listdir('.') == [] and os.getcwd() == '/tmp'\ndef add(x): return x + 2"
    assert [ask(program).state for program in (plant, look)] == ["ok", "ok"]


def test_a_program_that_passes_while_it_leaves_threads_is_not_waited_for(ask):
    started = time.monotonic()
    program = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(120,)).start()\ndef add(x): return x + 2"
    )
    assert ask(program).state == "ok"
    assert time.monotonic() - started < 60


def test_expected_values_never_enter_the_workers_box(box, tmp_path):
    """All bytes that go to the worker, seen from outside by strace's poor relative: the pipe is read in its place."""
    secret = 7_654_321
    case = Case(
        "s", "def add(x): return 0", f"assert add(5) == {secret}", {"add": "add"}, preamble=f"_expected = {secret}"
    )
    from prunebench.sandbox.inside.judge import judge, prepare
    from prunebench.sandbox.inside.wire import Channel, pack

    replies, calls = os.pipe(), os.pipe()
    try:
        worker = Channel(0, replies[1])
        worker.send("ready")
        worker.send((0, "ok", pack(None)))
        worker.send((1, "ok", pack(0)))
        request = {"program": case.program, "tests": case.tests, "names": dict(case.names), "data": {}}
        request["followed_by"] = ""
        request["preamble"] = case.preamble
        verdict = judge(request, prepare(request), Channel(replies[0], calls[1]))
        sent = os.read(calls[0], 2**16)
    finally:
        for number in (*replies, *calls):
            os.close(number)
    assert verdict["state"] == "wrong"
    assert b"def add" in sent
    assert hex(secret).encode() not in sent
    assert str(secret).encode() not in sent
    assert b"assert" not in sent


def test_the_filter_is_what_libseccomp_would_allow_and_refuse():
    """The classic BPF program, run by hand on every call number of both architectures."""
    import struct

    from prunebench.errors import PrerequisiteError
    from prunebench.sandbox.seccomp import REFUSED, filter_program

    def run(program, architecture, number, argument=0):
        words = {0: number, 4: architecture, 16: argument}
        accumulator, place = 0, 0
        while True:
            code, true, false, value = program[place]
            place += 1
            if code == 0x20:
                accumulator = words[value]
            elif code == 0x06:
                return value
            else:
                holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
                place += true if holds else false

    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    for column, (machine, architecture, clone) in enumerate((("x86_64", 0xC000003E, 56), ("aarch64", 0xC00000B7, 220))):
        program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
        refused = {numbers[column] for numbers in REFUSED.values()}
        for number in range(500):
            wanted = refuse if number in refused | {clone} else unknown if number == 435 else allow
            assert run(program, architecture, number) == wanted, number
        assert run(program, architecture, clone, 0x10000 | 0x100) == allow
        assert run(program, architecture, clone, 0x4000 | 17) == refuse
        assert run(program, 0x40000003, 1) == kill
        if machine == "x86_64":
            assert run(program, architecture, 0x40000000 + 39) == unknown
    with pytest.raises(PrerequisiteError, match="no system call filter for riscv64"):
        filter_program("riscv64")


def test_the_numbers_of_the_filter_are_this_systems():
    import re

    from prunebench.sandbox.seccomp import REFUSED

    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.is_file():
        pytest.skip("the kernel's headers are not installed; the calls themselves are tried above")
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", header.read_text())}
    there = {name: numbers[0] for name, numbers in REFUSED.items() if name in known}
    assert there == {name: known[name] for name in there}
    assert len(there) > 50


def test_the_package_needs_no_torch_and_starts_quickly():
    source = "import prunebench.sandbox, sys; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", source], check=True, env=environment)
