"""`prunebench check` and `new-method`: methods and their rules."""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from prunebench.cli.shared import Progress, Result
from prunebench.errors import UsageError
from prunebench.mask import write_atomically

__all__ = ["add_check", "add_new_method", "run_check", "run_new_method"]


def add_check(check: argparse.ArgumentParser) -> None:
    """Options of `prunebench check`."""
    check.add_argument("methods", nargs="+", metavar="FILE", help="method by path or name")
    check.add_argument("--param", action="append", default=[], metavar="NAME=VALUE", help="parameter of the method")
    check.add_argument("--only", action="append", default=[], metavar="CHECK", help="only this check (may be repeated)")
    check.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="CHECK=REASON",
        help="a check that fails, and why that is right",
    )
    check.add_argument("--markdown", action="store_true", help="print the method's card, to paste into a pull request")
    check.add_argument(
        "--cards", type=Path, metavar="FOLDER", help="write the card of each method there, and of several an index"
    )


def add_new_method(new: argparse.ArgumentParser) -> None:
    """Options of `prunebench new-method`."""
    new.add_argument("name", metavar="NAME", help="small letters, digits and hyphens")
    new.add_argument("--folder", type=Path, help="where to (default: methods, if it is here, else here)")


def run_check(options: argparse.Namespace) -> Result:
    """Each method's report; exit 1 if a check of one failed."""
    from prunebench.conformance import card, index
    from prunebench.conformance.apart import report_apart, try_loading
    from prunebench.loader import load_method, load_method_class
    from prunebench.moe import quiet_libraries
    from prunebench.parameters import parse_parameters

    quiet_libraries()
    expected = _expectations(options.expect)
    # Whatever is wrong with the request is said before minutes of checks.
    for name in options.methods:
        try_loading(name, options.param)
    methods = [load_method(name, parse_parameters(load_method_class(name), options.param)) for name in options.methods]
    names = [type(method).name for method in methods]
    _check_cards(options, names)
    reports = []
    with Progress() as progress:
        for given, method in zip(options.methods, methods, strict=True):
            settings = {"expected_failures": expected, "only": options.only, "progress": progress.step}
            reports.append(report_apart(given, method, options.param, **settings))
    found = list(zip(methods, reports, strict=True))
    cards = [card(*one) for one in found]
    if options.cards is not None:
        for name, text in zip(names, cards, strict=True):
            write_atomically(options.cards / f"{name}.md", text.encode())
        if len(found) > 1:  # one method's card is no index
            write_atomically(options.cards / "README.md", index(found).encode())
    data = [report.to_json() for report in reports]
    texts = cards if options.markdown else [report.to_text() for report in reports]
    code = 0 if all(report.ok for report in reports) else 1
    return code, data[0] if len(data) == 1 else data, "\n".join(texts)


def _expectations(texts: Sequence[str]) -> dict[str, str]:
    """Reasons by check, as typed: CHECK=REASON."""
    expected: dict[str, str] = {}
    for text in texts:
        name, _, reason = text.partition("=")
        if not reason.strip():
            raise UsageError(f"--expect {text} gives no reason", expected="CHECK=REASON: why it is right that it fails")
        if name in expected:
            raise UsageError(f"two reasons are given for {name}", expected="one --expect for each check")
        expected[name] = reason
    return expected


def _check_cards(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise unless every method gets a whole card and a file of its own."""
    if options.cards is None:
        return
    if options.only:
        raise UsageError("--cards with --only", expected="cards of all checks", fix="leave --only out")
    for name in names:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
            raise UsageError(f"method name {name!r}", expected='name = "my-method": a card is named after it')
        if names.count(name) > 1:
            raise UsageError(f"two methods are named {name}", expected="a card each", fix="write them to two folders")
    try:
        options.cards.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=options.cards):
            pass
    except OSError as error:
        raise UsageError(
            "cannot write cards", where=str(options.cards), expected="a writable folder", fix=str(error)
        ) from error


def run_new_method(options: argparse.Namespace) -> Result:
    """Write a method to start from."""
    from prunebench.conformance.new import write_template
    from prunebench.loader import available

    if options.name in available("methods"):
        raise UsageError(f"method {options.name!r} is there already", fix="choose another name")
    folder = options.folder or (Path("methods") if Path("methods").is_dir() else Path())
    path = write_template(options.name, folder)
    return 0, {"file": str(path)}, f"{path}\nnext: prunebench check {path}"
