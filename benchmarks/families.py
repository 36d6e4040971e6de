"""Writes docs/families.md: what holds bit for bit, for every family of models, dtype and kernel; minutes on one core.

    python benchmarks/families.py [--out docs/families.md] [FAMILY ...]

Every cell is measured on a random tiny model (`prunebench.testing`); nothing is copied from a list of expectations.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from prunebench.errors import UsageError
from prunebench.install import slice_model
from prunebench.mask import Mask
from prunebench.moe import MoEModel, open_model, quiet_libraries
from prunebench.testing import FAMILIES, random_model
from prunebench.testing.families import (
    KERNELS,
    Finding,
    empty_mask,
    forced,
    half_of,
    logits_of,
    reloaded,
    removed,
    slots,
)

DTYPES = ("float32", "bfloat16")
COLUMNS = ("empty mask", "forced keep", "forced renorm", "forced slots", "removed = masked", "save, load")
TOLERANCE = 2e-6
OUT = Path(__file__).resolve().parents[1] / "docs" / "families.md"

HEAD = """\
# What holds for which family

Written by `python benchmarks/families.py` with transformers {transformers} and torch {torch} on CPU; do not edit. Each
line was measured on a random tiny model of the family. Opening a model replays its routers' own selection and gates
from the table in `routing/convention.py`, bit for bit; a family is in this table because that passed in both dtypes.
`prunebench inspect MODEL` says the same of a model of yours.

- **empty mask**: installed with nothing pruned, the logits are the untouched model's bit for bit.
- **forced keep, forced renorm**: the same with slots and gates rewritten at that scale, one row per slot, although
  nothing is pruned.
- **forced slots**: half of the experts keep their slots and are answered by themselves, as fills.
- **removed = masked**: half of the experts are cut out of the weights, rerouted at renorm (groups chosen anew): a plain
  smaller model is left, whose float32 logits are the masked one's within {tolerance:g}.
- **save, load**: cut, saved, and loaded in a fresh process: the same logits bit for bit, no key missing or left over.

"yes" is bit for bit; "no" and "–" (not defined) have their reason below. Families of one router class that are not
listed are in the table of conventions as well; what is in neither is refused by name when it is opened.
"""


@dataclass(frozen=True)
class Line:
    """Findings of one family in one dtype and kernel, by column."""

    family: str
    convention: str
    dtype: str
    kernel: str
    findings: tuple[Finding, ...]


def kernels_of(family: str) -> tuple[str, ...]:
    """The kernels that transformers can run a family's experts with."""
    model = random_model(family)
    return KERNELS if model._can_set_experts_implementation() else KERNELS[:1]  # noqa: SLF001


def removal(moe: MoEModel, dtype: str) -> Finding:
    """The column `removed = masked`."""
    if dtype != "float32":
        return Finding(None, "compared in float32: a smaller router rounds bfloat16 logits otherwise")
    found, difference = removed(moe)
    if not found.exact:
        return Finding(exact=False, why=f"the router stays whole, and the smaller model needs prunebench: {found.why}")
    return found if difference <= TOLERANCE else Finding(exact=False, why=f"logits differ by up to {difference:.1g}")


def measure(family: str, dtype: str, kernel: str) -> tuple[str, list[Finding]]:
    """All columns but the last."""

    def fresh() -> MoEModel:
        return open_model(random_model(family, dtype=getattr(torch, dtype), experts_implementation=kernel))

    moe = fresh()
    # A removed model is not put together again: it comes last.
    findings = [empty_mask(moe), forced(moe, "keep"), forced(moe, "renorm"), slots(moe), removal(moe, dtype)]
    return moe.convention.describe(), findings


def save_and_load(jobs: Sequence[tuple[str, str, str]]) -> dict[tuple[str, str, str], Finding]:
    """The last column, of all (family, dtype, kernel) at once: one fresh process loads them all."""
    results: dict[tuple[str, str, str], Finding] = {}
    with tempfile.TemporaryDirectory() as name:
        root, before, todo = Path(name), {}, []
        for family, dtype, kernel in jobs:
            folder = root / f"{family}-{dtype}-{kernel}"
            random_model(family).save_pretrained(folder / "whole")
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder / "whole", dtype=getattr(torch, dtype), experts_implementation=kernel
            )
            moe = open_model(model.eval())
            try:
                slice_model(moe, Mask.for_shapes(moe.shapes, {layer.index: half_of(layer) for layer in moe.layers}))
            except UsageError as error:
                results[family, dtype, kernel] = Finding(exact=False, why=str(error))
                continue
            before[family, dtype, kernel] = logits_of(open_model(model))
            model.save_pretrained(folder / "cut")
            todo.append((folder / "cut", dtype, kernel, folder / "out.pt"))
        for key, after in zip(before, reloaded(todo), strict=True):
            same = torch.equal(before[key], after["logits"]) and not after["info"]
            results[key] = Finding(same, "" if same else f"keys: {after['info']}" if after["info"] else "logits differ")
    return results


def lines_of(families: Sequence[str]) -> Iterator[Line]:
    """All lines, measured."""
    jobs = [(family, dtype, kernel) for family in families for dtype in DTYPES for kernel in kernels_of(family)]
    last = save_and_load(jobs)
    for family, dtype, kernel in jobs:
        convention, findings = measure(family, dtype, kernel)
        print(f"{family} {dtype} {kernel}: {' '.join(str(found.exact) for found in findings)}", flush=True)
        yield Line(family, convention, dtype, kernel, (*findings, last[family, dtype, kernel]))


def table(lines: Sequence[Line]) -> str:
    """Markdown; the dtypes and kernels of a family that came out alike share a row, reasons are numbered below."""
    reasons: dict[str, int] = {}

    def cell(found: Finding) -> str:
        if found.exact:
            return "yes"
        number = reasons.setdefault(found.why, len(reasons) + 1)
        return f"{'–' if found.exact is None else 'no'} [{number}]"

    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for line in lines:
        cells = tuple(cell(found) for found in line.findings)
        rows.setdefault((line.family, line.convention, cells), []).append(f"{line.dtype} {line.kernel}")
    text = [
        f"| family | its router | dtype and kernel | {' | '.join(COLUMNS)} |",
        "| --- " * (3 + len(COLUMNS)) + "|",
    ]
    for (family, convention, cells), ways in rows.items():
        text.append(f"| {family} | {convention} | {', '.join(_merged(ways))} | {' | '.join(cells)} |")
    text += ["", *(f"{number}. {why}" for why, number in reasons.items())]
    return "\n".join(text) + "\n"


def _merged(ways: Sequence[str]) -> Iterator[str]:
    """`dtype kernel, …` with the kernels of a dtype together."""
    by_dtype: dict[str, list[str]] = {}
    for way in ways:
        dtype, _, kernel = way.partition(" ")
        by_dtype.setdefault(dtype, []).append(kernel)
    for dtype, kernels in by_dtype.items():
        yield f"{dtype}: {' + '.join(kernels)}"


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="only these (default: all)")
    parser.add_argument("--out", type=Path, default=OUT, help="file to write (default docs/families.md)")
    options = parser.parse_args()
    quiet_libraries()
    lines = list(lines_of(options.families or tuple(FAMILIES)))
    head = HEAD.format(transformers=transformers.__version__, torch=torch.__version__, tolerance=TOLERANCE)
    options.out.write_text(f"{head}\n{table(lines)}", encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
