"""The errors a person sees: one line that says what happened, where, what was expected and how to fix it.

Every error that prunebench raises on purpose is a `PruneBenchError`; its `exit_code` is the command line's.
Anything else that escapes is a bug of ours and shows its traceback.
"""

from __future__ import annotations

__all__ = ["IntegrityError", "PrerequisiteError", "PruneBenchError", "UsageError"]


class PruneBenchError(Exception):
    """Base of all deliberate errors.

    Args:
        what: what happened, without a final full stop.
        where: the layer, expert, file or option concerned.
        expected: what would have been right.
        fix: what to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", expected: str = "", fix: str = "") -> None:
        self.what, self.where, self.expected, self.fix = what, where, expected, fix
        parts = [what, where and f"in {where}", expected and f"expected {expected}", fix and f"fix: {fix}"]
        super().__init__("; ".join(" ".join(part.split()) for part in parts if part))


class UsageError(PruneBenchError):
    """Bad input: an unknown name, an impossible ratio, a mask for another model, an unwritable output."""


class PrerequisiteError(PruneBenchError):
    """Something that the command needs is missing: a package, a file, a device, an unfinished run."""

    exit_code = 3


class IntegrityError(PruneBenchError):
    """A check that must hold did not: the pruned model is not what it claims to be."""

    exit_code = 1
