"""A plan is data: what is installed is built from its saved form, and from nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from prunebench import Constant, Mask, Method, Replacements, Routing, load_method
from prunebench.calibration import CalibrationSpec, CalibrationTokens, OutputMoments, score_pass
from prunebench.errors import PrerequisiteError, UsageError
from prunebench.fit import Fitted
from prunebench.install import programs_of
from prunebench.moe import open_model
from prunebench.plan import Plan, make_plan
from prunebench.routing import Scale
from prunebench.testing import random_ids, random_model

PRUNED = {0: (1, 2, 5), 1: (0, 15)}

AFFINE = '''
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from prunebench import Fill, LayerView, Method, Replacements, Routing


class Affine(Fill):
    """a ⊙ x + b·s: a parameter, a buffer, and a number without a dimension."""

    def __init__(self, width: int, power: float = 1.0) -> None:
        super().__init__()
        self.width, self.power = width, power
        self.a = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.register_buffer("b", torch.zeros(width, dtype=torch.float64))
        self.s = nn.Parameter(torch.tensor(0.0), requires_grad=False)

    def forward(self, x_SD):
        return x_SD * self.a**self.power + (self.b * self.s).to(x_SD.dtype)

    def to_json(self):
        return {"width": self.width, "power": self.power}


@dataclass(frozen=True)
class Mine(Method):
    name = "mine"

    power: float = 2.0

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        fills = {}
        for expert in pruned[::2]:
            fill = Affine(layer.width, self.power)
            fill.a.fill_(expert + 1)
            fill.b.fill_(0.5)
            fill.s.fill_(3.0)
            fills[expert] = fill
        return Replacements(fills)

    def route(self, layer: LayerView, pruned: tuple[int, ...]) -> Routing:
        return Routing("interp:0.00001")
'''


@pytest.fixture(scope="module")
def moe():
    return open_model(random_model("olmoe"))


@pytest.fixture(scope="module")
def mask(moe):
    return Mask.for_shapes(moe.shapes, PRUNED)


@pytest.fixture(scope="module")
def scores(moe):
    tokens = CalibrationTokens(CalibrationSpec("file:x", 4, 16), random_ids(4, 16), "test")
    return score_pass(moe, tokens, [OutputMoments()])


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(AFFINE)
    return path


def equal(first: Plan, second: Plan) -> bool:
    same = first.tensors.keys() == second.tensors.keys()
    return (
        same
        and all(
            torch.equal(t, second.tensors[n]) and t.dtype == second.tensors[n].dtype for n, t in first.tensors.items()
        )
        and first.to_json() == second.to_json()
        and first.manifest() == second.manifest()
    )


@pytest.mark.parametrize("name", ["constant", "zero", "reroute", "mone", "reap"])
def test_a_plan_is_the_same_after_it_was_saved_and_loaded(moe, mask, scores, tmp_path, name):
    plan = make_plan(moe, mask, load_method(name), scores)
    plan.save(tmp_path / "a" / "plan.safetensors")
    loaded = Plan.load(tmp_path / "a" / "plan.safetensors")
    assert equal(plan, loaded)
    assert loaded.mask == mask
    assert loaded.layers == plan.layers
    assert (loaded.keeps_slots, loaded.fills_nothing, loaded.scales) == (
        plan.keeps_slots,
        plan.fills_nothing,
        plan.scales,
    )


def test_the_constant_stores_the_measured_means_and_says_so(moe, mask, scores):
    plan = make_plan(moe, mask, load_method("constant"), scores)
    assert plan.keeps_slots
    assert not plan.fills_nothing
    assert plan.scales == ()
    assert plan.values_stored == 5 * 32
    assert plan.declared == {f"{i}/{e}": 32 for i, ids in PRUNED.items() for e in ids}
    for index, ids in PRUNED.items():
        mean_ED = scores.layers[index]["output_moments"].value().mean_ED
        for e in ids:
            np.testing.assert_array_equal(plan.state_of(index, e)["mean_D"].numpy(), mean_ED[e].astype(np.float32))


def test_states_of_experts_whose_numbers_begin_alike_are_told_apart(moe, scores):
    plan = make_plan(moe, Mask.for_shapes(moe.shapes, {1: (1, 10, 11)}), load_method("constant"), scores)
    assert [list(plan.state_of(1, e)) for e in (1, 10, 11, 0)] == [["mean_D"], ["mean_D"], ["mean_D"], []]


def test_zero_stores_nothing_and_reroute_fills_nothing(moe, mask):
    zero, reroute = (make_plan(moe, mask, load_method(name), None) for name in ("zero", "reroute"))
    assert (zero.values_stored, zero.keeps_slots, zero.scales) == (0, True, ())
    assert (reroute.values_stored, reroute.fills_nothing, reroute.scales) == (0, True, ("keep",))


@pytest.mark.parametrize(
    ("family", "asked", "resolved"),
    [
        ("olmoe", "trained", "keep"),
        ("olmoe", "other", "renorm"),
        ("qwen3_moe", "trained", "renorm"),
        ("qwen3_moe", "other", "keep"),
        ("deepseek_v3", "interp:0.5", "interp:0.5"),
        ("granitemoe", "ref:8", "ref:8"),
    ],
)
def test_scales_are_resolved_against_the_router(family, asked, resolved):
    moe = open_model(random_model(family))
    mask = Mask.for_shapes(moe.shapes, {1: (1, 2)})
    assert make_plan(moe, mask, load_method("reroute", {"scale": asked}), None).scales == (resolved,)
    assert make_plan(moe, mask, load_method("reroute"), None, scale=Scale.parse(asked)).scales == (resolved,)


def test_the_manifest_names_shapes_types_and_the_hash_of_the_bytes_of_a_layers_fills(moe, mask, mine):
    found = make_plan(moe, mask, load_method(str(mine)), None).manifest()
    assert set(found) == {"0", "1"}
    filled = {"0": [1, 5], "1": [0]}
    for index, experts in filled.items():
        # Expert by expert: a, b, s.
        each = [(np.full(32, e + 1, np.float32), np.full(32, 0.5), np.float32(3)) for e in experts]
        stored = b"".join(tensor.tobytes() for tensors in each for tensor in tensors)
        assert found[index] == [
            {
                "experts": experts,
                "fill": "Affine",
                "tensors": {
                    "a": {"dtype": "float32", "shape": [32]},
                    "b": {"dtype": "float64", "shape": [32]},
                    "s": {"dtype": "float32", "shape": []},
                },
                "sha256": hashlib.sha256(stored).hexdigest(),
            }
        ]


MIXED = """
from dataclasses import dataclass

import torch

from prunebench import Constant, Fill, Method, Replacements, Routing, Zero


class Rows(Fill):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.register_buffer("table_RD", torch.zeros(rows, 32))

    def forward(self, x_SD):
        return self.table_RD.sum(0).expand_as(x_SD)

    def values_stored(self):
        return self.rows * 32

    def to_json(self):
        return {"rows": self.rows}


@dataclass(frozen=True)
class Mixed(Method):
    name = "mixed"

    def replace(self, layer, pruned):
        fills = {10: Constant.of(torch.full((32,), 10.0)), 9: Rows(2), 2: Rows(2), 1: Rows(3), 0: Zero(32)}
        fills[9].table_RD += 9
        fills[2].table_RD += 2
        return Replacements({e: fills[e] for e in pruned if e in fills})

    def route(self, layer, pruned):
        return Routing()
"""


def test_the_manifest_groups_fills_of_one_class_and_of_tensors_alike(moe, tmp_path):
    (tmp_path / "mixed.py").write_text(MIXED)
    mask = Mask.for_shapes(moe.shapes, {1: (0, 1, 2, 3, 9, 10)})
    plan = make_plan(moe, mask, load_method(str(tmp_path / "mixed.py")), None)
    found = plan.manifest()
    assert list(found) == ["1"]
    told = [(entry["experts"], entry["fill"], entry["tensors"]) for entry in found["1"]]
    table = {name: {"table_RD": {"dtype": "float32", "shape": [name, 32]}} for name in (2, 3)}
    mean = {"mean_D": {"dtype": "float32", "shape": [32]}}
    assert told == [([1], "Rows", table[3]), ([2, 9], "Rows", table[2]), ([10], "Constant", mean)]
    stored = np.concatenate([np.full(64, 2, np.float32), np.full(64, 9, np.float32)]).tobytes()
    assert found["1"][1]["sha256"] == hashlib.sha256(stored).hexdigest()
    changed = Plan(plan.mask, plan.layers, {**plan.tensors, "1/9/table_RD": torch.zeros(2, 32)}, plan.declared)
    differing = [one != other for one, other in zip(found["1"], changed.manifest()["1"], strict=True)]
    assert differing == [False, True, False]


def test_what_is_installed_is_built_from_the_saved_state_only(moe, mask):
    returned = {}

    @dataclass(frozen=True)
    class Sneaky(Method):
        name = "sneaky"

        def replace(self, layer, pruned):
            returned[layer.index] = {e: Constant.of(torch.full((layer.width,), float(e))) for e in pruned}
            return Replacements(returned[layer.index])

    plan = make_plan(moe, mask, Sneaky(), None)
    for fills in returned.values():
        for fill in fills.values():
            fill.mean_D.fill_(1e9)
            fill.forward = lambda x: x * 0 + 7
    x_SD = torch.zeros(2, 32)
    for program in programs_of(plan).values():
        for e, fill in program.fills.items():
            assert fill is not returned.get(0, {}).get(e)
            assert torch.equal(fill(x_SD), torch.full((2, 32), float(e)))


def test_two_installations_share_no_state(moe, mask, scores):
    plan = make_plan(moe, mask, load_method("constant"), scores)
    first, second = programs_of(plan), programs_of(plan)
    first[0].fills[1].mean_D.zero_()
    assert second[0].fills[1].mean_D.any()
    assert plan.state_of(0, 1)["mean_D"].any()


def test_a_fill_of_a_methods_own_file_makes_the_round_trip(moe, mask, mine, tmp_path):
    plan = make_plan(moe, mask, load_method(str(mine), {"power": 3.0}), None)
    plan.save(tmp_path / "plan.safetensors")
    loaded = Plan.load(tmp_path / "plan.safetensors")
    assert equal(plan, loaded)
    assert loaded.values_stored == 3 * 65
    programs = programs_of(loaded)
    assert {i: sorted(p.fills) for i, p in programs.items()} == {0: [1, 5], 1: [0]}
    assert programs[0].blocked == (2,)
    assert programs[0].scale == Scale("interp", alpha=1e-5)
    x_SD = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(programs[0].fills[5](x_SD), x_SD * 6.0**3 + 1.5)


def test_a_plan_whose_method_file_has_changed_is_refused(moe, mask, mine):
    plan = make_plan(moe, mask, load_method(str(mine)), None)
    mine.write_text(AFFINE.replace("+ (self.b", "- (self.b"))
    with pytest.raises(
        PrerequisiteError, match=r"the method file has changed since the plan was made; in layer 0, expert 1, .*mine.py"
    ) as info:
        programs_of(plan)
    assert "\n" not in str(info.value)


def test_a_plan_whose_method_file_is_gone_is_refused(moe, mask, mine):
    plan = make_plan(moe, mask, load_method(str(mine)), None)
    mine.unlink()
    with pytest.raises(UsageError, match="no such method file"):
        programs_of(plan)


def operator(replace, scale: str = "trained") -> Method:
    kind = type("Odd", (Method,), {"name": "odd", "replace": replace, "route": lambda *_: Routing(scale)})
    return kind()


def refused(moe, mask, method, **options) -> str:
    with pytest.raises(UsageError) as info:
        make_plan(moe, mask, method, None, **options)
    assert "\n" not in str(info.value)
    return str(info.value)


@pytest.mark.parametrize("name", ["zero", "constant", "mone"])
def test_a_scale_on_an_operator_that_keeps_its_slots_is_refused(moe, mask, scores, name):
    with pytest.raises(
        UsageError, match=f"scale keep has no meaning for {name}; expected an operator that refills slots"
    ):
        make_plan(moe, mask, load_method(name), scores, scale=Scale("keep"))


def test_a_fill_for_a_survivor_is_refused(moe, mask):
    text = refused(moe, mask, operator(lambda _s, layer, pruned: Replacements({3: Constant(layer.width)})))
    assert "a fill for expert 3, which is not pruned; in odd.replace, layer 0; expected (1, 2, 5)" in text


def test_something_that_is_no_fill_is_refused(moe, mask):
    text = refused(moe, mask, operator(lambda _s, layer, pruned: Replacements({pruned[0]: nn.Identity()})))
    assert "the fill is a Identity; in odd.replace, layer 0, expert 1; expected a prunebench.Fill" in text


def test_a_fill_class_from_elsewhere_is_refused(moe, mask):
    elsewhere = type("Elsewhere", (Constant,), {"__module__": "somewhere.else"})
    text = refused(moe, mask, operator(lambda _s, layer, pruned: Replacements({pruned[0]: elsewhere(layer.width)})))
    assert "fill class Elsewhere is from somewhere.else" in text


def test_a_fill_whose_arguments_json_cannot_hold_is_refused(moe, mask, mine):
    mine.write_text(AFFINE.replace('"power": self.power', '"power": torch.tensor(self.power)'))
    assert "Affine.to_json gives what JSON cannot hold" in refused(moe, mask, load_method(str(mine)))


@pytest.mark.parametrize("change", [('"power": self.power', '"strength": 1'), ('"width": self.width', '"width": 3')])
def test_a_fill_that_its_own_saved_form_cannot_rebuild_is_refused(moe, mask, mine, change):
    mine.write_text(AFFINE.replace(*change))
    plan = make_plan(moe, mask, load_method(str(mine)), None)
    with pytest.raises(
        UsageError, match=r"Affine cannot be rebuilt from its saved form: .*; in layer 0, expert 1"
    ) as info:
        programs_of(plan)
    assert "\n" not in str(info.value)


def test_a_mask_for_another_model_is_refused(mask):
    other = open_model(random_model("olmoe", experts=8))
    with pytest.raises(UsageError, match="the mask is for another model"):
        make_plan(other, mask, load_method("zero"), None)


def test_an_operator_without_its_statistics_is_one_clear_line(moe, mask):
    assert "statistic 'output_moments' was not measured; in constant.replace_needs" in refused(
        moe, mask, load_method("constant")
    )


def test_an_unknown_scale_of_a_method_is_refused(moe, mask):
    assert "unknown scale 'loud'" in refused(moe, mask, operator(lambda *_: Replacements(), "loud"))


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "garbage", "no metadata", "not json", "no layers", "wrong layers"]
)
def test_what_is_no_saved_plan_is_refused(moe, mask, tmp_path, damage):
    path = tmp_path / "plan.safetensors"
    tensors, data = (
        {"0/1/mean_D": torch.zeros(2)},
        {"no layers": "{}", "wrong layers": '{"layers": 3}', "not json": "{"},
    )
    if damage in data:
        save_file(tensors, path, metadata={"plan": data[damage]})
    elif damage == "no metadata":
        save_file(tensors, path)
    elif damage != "missing":
        path.write_bytes(b"" if damage == "empty" else b"\x00" * 50)
    with pytest.raises(UsageError, match=r"not a saved plan; in .*plan.safetensors") as info:
        Plan.load(Path(path))
    assert "\n" not in str(info.value)


def test_a_reference_set_larger_than_the_survivors_is_refused():
    moe = open_model(random_model("qwen3_moe"))
    mask = Mask.for_shapes(moe.shapes, {shape.index: range(8) for shape in moe.shapes})
    with pytest.raises(UsageError, match=r"scale ref:9 needs 9 survivors; in layer 0 with 8"):
        make_plan(moe, mask, load_method("reroute", {"scale": "ref:9"}), None)


@pytest.mark.parametrize("left_out", [True, False], ids=["left out", "fitted to nothing"])
def test_an_operator_that_keeps_slots_and_forgets_one_is_refused(moe, mask, left_out):
    class Forgets(Method):
        name = "forgets"

        def replace(self, layer, pruned):
            first = {} if left_out else {pruned[0]: Fitted(None, 3, "nothing found")}
            return Replacements(first | {e: Constant(layer.width) for e in pruned[1:]})

    first = next(layer for layer in mask.layers if layer.pruned)
    says = (
        rf"no fill for pruned expert {first.pruned[0]}; in forgets.replace, layer {first.index}; .*define `route` too"
    )
    with pytest.raises(UsageError, match=says):
        make_plan(moe, mask, Forgets(), None)
