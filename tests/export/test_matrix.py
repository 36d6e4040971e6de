"""Operator, scale, count shape, format: each cell is exported and equal, or refused with its reason.

What a format holds is said here once more, from what the formats are, not from the table under test.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from export_material import (
    KEEPING,
    PER_LAYER,
    REFILLING,
    SCALES,
    UNIFORM,
    evaluated,
    logits,
    open_base,
    plan_for,
    pruned_model,
)
from transformers import AutoModelForCausalLM
from vllm_reader import read_model

from prunebench.errors import UsageError
from prunebench.export import Scheme, load, verify, write_export
from prunebench.install import remove_experts
from prunebench.storage import measured, pruned_bytes, read_headers
from prunebench.testing import random_ids

CELLS = [
    *itertools.product(KEEPING, [None], [UNIFORM, PER_LAYER]),
    *itertools.product(REFILLING, SCALES, [UNIFORM, PER_LAYER]),
]
Cell = tuple[str, str | None, str]
FORMATS = ("native", "hf", "vllm-mone", "ct")
NAMES = {
    "constant": "Constant",
    "zero": "Zero",
    "tilt": "Tilt",
    "neurons": "SmallExpert",
    "survivor": "Survivor",
    "affine survivor": "AffineSurvivor",
    "edited constant": "Constant",
    "half": "Constant",
}


def reason(cell: Cell, form: str, *, stacked: bool = False) -> str | None:
    """Why a cell is impossible for a softmax router, in words of the error; None if it is possible."""
    operator, scale, shape = cell
    found: list[str] = []
    if form in {"hf", "ct"}:
        found += [f"pruned experts are answered by {NAMES.get(operator)}"] * (operator in NAMES)
        found += [f"scale {scale} of this router"] * (scale not in {None, "renorm"})
        found += [r"layers keep different numbers of experts \(3, 4\)"] * (shape == PER_LAYER)
    if form == "ct":
        found += ["the files stack the experts"] * stacked
    if form == "vllm-mone":
        found += ["slots of pruned experts are refilled"] * (scale is not None)
        fine = operator in {"constant", "zero", "edited constant"} or operator not in NAMES
        found += [] if fine else [f"pruned experts are answered by {NAMES.get(operator)}"]
        found += ["the files stack the experts"] * stacked
    return found[0] if found else None


def check_cell(base, cell: Cell, form: str, out, *, stacked: bool = False) -> bool:
    """Whether the cell was exported; it is asserted that it had to be, and equals what was evaluated."""
    folder, moe = base
    plan = plan_for(moe, *cell)
    pruned = pruned_model(folder, plan)
    why = reason(cell, form, stacked=stacked)
    if why is not None:
        with pytest.raises(UsageError, match=f"^{form} cannot hold this model: {why}"):
            write_export(pruned, form, out)
        assert not list(out.parent.iterdir())
        return False
    wanted = evaluated(moe, plan)
    written = write_export(pruned, form, out, scheme=Scheme(group_size=16) if form == "ct" else None)
    if form == "ct":
        # Equal to the model that is cut and rounded; tests of the format itself unpack it by hand.
        assert verify(out, ids_BL=random_ids(2, 16)).exact
        assert measured(read_headers(out)) == written.stored
        return True
    assert torch.equal(logits(load(out)), wanted) or form == "hf"
    if form == "hf":
        check_plain(moe, plan, out, wanted)
    if form == "vllm-mone":
        torch.testing.assert_close(logits(read_model(out)), wanted, rtol=0, atol=2e-5)
    if form != "native":
        slots_kept = form == "vllm-mone"
        vectors = 4 * sum(moe.layer(x.index).width * len(x.pruned) for x in plan.mask.layers)
        predicted = pruned_bytes(
            folder, plan.mask, fill_values_bytes=vectors if slots_kept else 0, keep_router_rows=slots_kept
        )
        assert measured(read_headers(out)) == predicted == written.stored
    return True


def check_plain(moe, plan, out, wanted) -> None:
    """A plain checkpoint, loaded by transformers alone: the model with the experts cut out, bit for bit."""
    model, info = AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, experts_implementation="eager", dtype=torch.float32
    )
    assert not any(info.values()), info
    assert getattr(model.config, "quantization_config", None) is None
    assert not hasattr(model.config, "approximate_experts")
    counted = {vars(model.config).get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")}
    assert counted - {None} == {len(plan.mask.layers[0].survivors)}
    smaller = copy.deepcopy(moe)
    assert not remove_experts(smaller, plan)
    assert torch.equal(logits(model), logits(smaller.model))
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def olmoe(bases):
    folder = bases("olmoe")
    return folder, open_base(folder)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_every_cell_is_exported_and_equal_or_refused(cell, form, olmoe, tmp_path):
    check_cell(olmoe, cell, form, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "deepseek_v2", "qwen2_moe"])
def test_every_cell_of_other_families(family, form, bases, tmp_path):
    folder = bases(family)
    base = folder, open_base(folder)
    stacked = family == "granitemoe"
    done = 0
    for number, cell in enumerate(CELLS):
        (tmp_path / str(number)).mkdir()
        done += check_cell(base, cell, form, tmp_path / str(number) / "out", stacked=stacked)
    assert done == {"native": len(CELLS), "hf": 2, "vllm-mone": 0 if stacked else 6, "ct": 0 if stacked else 2}[form]
