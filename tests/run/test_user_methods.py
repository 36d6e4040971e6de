"""A method of one's own, by path: it works with parameters and fills; whatever it does wrong is one line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import prunebench
from prunebench.errors import IntegrityError, PruneBenchError, UsageError
from prunebench.evaluate import Evaluation
from prunebench.record import comparable
from prunebench.run import Session
from prunebench.run.arm import prepare

FILL = """
class Scaled(Fill):
    def __init__(self, width, factor):
        super().__init__()
        self.factor = factor
        self.register_buffer("mean_D", torch.zeros(width))

    def forward(self, x_SD):
        return (self.factor * self.mean_D).expand(x_SD.shape[0], -1)

    def to_json(self):
        return {"width": self.mean_D.shape[0], "factor": self.factor}
"""

REPLACE = """
    def replace(self, layer, pruned):
        fills = {}
        for expert in pruned:
            fill = Scaled(layer.width, self.factor)
            fill.mean_D.copy_(torch.from_numpy(layer.stats["output_moments"].mean_ED[expert]))
            fills[expert] = fill
        return Replacements(fills)
"""


def execute(spec, out, path, **changes):
    return Session(out).execute(prepare(spec(**{"method": path, **changes})))


def test_a_method_by_path_with_parameters_and_a_fill_class_of_its_own(spec, material, tmp_path):
    path = material.write_method(tmp_path, above=FILL, fields="factor: float = 1.0", rest=REPLACE)
    plain = execute(spec, tmp_path / "a", path).run
    constant = execute(spec, tmp_path / "b", "frequency", operator="constant").run
    assert [item.detail for item in plain.items.items()] == [item.detail for item in constant.items.items()]
    assert plain.record["mask"] == constant.record["mask"]
    assert plain.record["arm"]["operator"] == "mine"
    assert plain.record["storage"] == constant.record["storage"]
    half = execute(spec, tmp_path / "c", path, parameters=("factor=0.5",)).run
    assert half.record["identity"]["method"]["parameters"] == {"factor": 0.5}
    assert half.record["run_id"] != plain.record["run_id"]
    assert [item.detail for item in half.items.items()] != [item.detail for item in plain.items.items()]


def test_one_byte_more_in_the_method_file_is_another_run(spec, material, tmp_path):
    path = material.write_method(tmp_path)
    before = execute(spec, tmp_path / "a", path).run.record
    Path(path).write_text(Path(path).read_text() + "#")
    with pytest.raises(UsageError, match="holds another run"):
        execute(spec, tmp_path / "a", path)
    after = execute(spec, tmp_path / "b", path).run.record
    assert after["run_id"] != before["run_id"]
    assert after["metrics"] == before["metrics"]


@pytest.fixture
def in_vain(spec, material, tmp_path):
    """Runs a method that must fail; returns what was said. Nothing may have been written."""

    def run(*select, **parts) -> str:
        path = material.write_method(tmp_path, *select, **parts)
        with pytest.raises(PruneBenchError) as caught:
            execute(spec, tmp_path / "out", path)
        assert not list((tmp_path / "out").rglob("record.json"))
        return str(caught.value)

    return run


FOREIGN = "return Mask.for_shapes([type(x.shape)(x.index, 32, 4) for x in layers], {x.index: range(8) for x in layers})"
CHOSEN = "return Mask.for_shapes([x.shape for x in layers], {x.index: %s for x in layers})"


@pytest.mark.parametrize(
    ("select", "says"),
    [
        (CHOSEN % "range(7)", "select pruned 7 experts; in method mine, layer 0; expected 8"),
        (CHOSEN % "range(9)", "select pruned 9 experts"),
        (CHOSEN % "range(14)", "leaves 2 experts"),
        (CHOSEN % "range(9, 17)", "16 does not exist"),
        ("return None", "select returned a NoneType; in method mine; expected a prunebench.Mask"),
        ("return [1, 2, 3]", "select returned a list"),
        (FOREIGN, "the mask is for another model"),
        ("raise ValueError('oh\\nno')", r"ValueError in select: oh; in .*mine\.py:\d+"),
        ("return 1 / 0", r"ZeroDivisionError in select: .*mine\.py:\d+"),
        ("raise SystemExit(7)", r"SystemExit in select: 7; in .*mine\.py:\d+"),
        ("assert False", r"AssertionError in select.*mine\.py:\d+"),
        ("return prune_lowest(layers, budget, lambda layer: layer.stats['norm_sum'])", "'norm_sum' was not declared"),
        ("return prune_lowest(layers, budget, lambda layer: np.full(16, np.nan))", "16 not finite"),
        ("return prune_lowest(layers, budget, lambda layer: [1.0])", r"scores of shape \(1,\)"),
        (
            "return prune_lowest(layers, budget, lambda layer: ['a'] * 16)",
            r"ValueError in <lambda>|ValueError in select",
        ),
        ("return layers[0].expert(0, torch.zeros(3, 5))", r"in select: .*mine\.py:\d+"),
    ],
)
def test_what_select_does_wrong_is_one_line(select, says, in_vain):
    message = in_vain(select)
    assert re.search(says, message)
    assert "\n" not in message


NAN = """
    def replace(self, layer, pruned):
        return Replacements({e: Constant.of(torch.full((layer.width,), float("%s"))) for e in pruned})
"""
TWICE = FILL.replace('return {"width": self.mean_D.shape[0], "factor": self.factor}', "return {}")
LIAR = FILL + "\n    def values_stored(self):\n        return 1\n"
RAISING = FILL.replace("return (self.factor", "raise KeyError('gone')\n        return (self.factor")
SMALL = """
    def replace(self, layer, pruned):
        return Replacements({e: Constant.of(torch.zeros(3)) for e in pruned})
"""
STRAY = """
    def replace(self, layer, pruned):
        return Replacements({e: Constant.of(torch.zeros(layer.width)) for e in range(layer.experts)})
"""
BARE = """
    def replace(self, layer, pruned):
        return Replacements({e: torch.zeros(layer.width) for e in pruned})
"""
NOTHING = """
    def replace(self, layer, pruned):
        return None
"""
ROUTE = """
    def route(self, layer, pruned):
        return Routing("sideways")
"""
RAISE_ROUTE = """
    def route(self, layer, pruned):
        raise RuntimeError("no way")
"""
NEEDS = """
    def replace_needs(self):
        raise RuntimeError("no needs")
"""


@pytest.mark.parametrize(
    ("above", "rest", "says"),
    [
        pytest.param("", NAN % "nan", None, id="nan fill"),
        pytest.param("", NAN % "inf", None, id="inf fill"),
        pytest.param(TWICE, REPLACE, None, id="fill that its JSON cannot rebuild"),
        pytest.param(LIAR, REPLACE, "values|declared", id="fill that declares too little"),
        pytest.param(RAISING, REPLACE, r"KeyError in forward.*mine\.py:\d+", id="fill that raises"),
        pytest.param("", SMALL, None, id="fill of another width"),
        pytest.param("", STRAY, "not pruned", id="fill for a survivor"),
        pytest.param("", BARE, "the fill is a Tensor", id="fill that is a tensor"),
        pytest.param("", NOTHING, "returned a NoneType.*expected prunebench.Replacements", id="no Replacements"),
        pytest.param("", ROUTE, "sideways", id="unknown scale"),
        pytest.param("", RAISE_ROUTE, r"RuntimeError in route: no way; in .*mine\.py:\d+", id="route raises"),
        pytest.param("", NEEDS, r"RuntimeError in replace_needs: no needs; in .*mine\.py:\d+", id="needs raises"),
    ],
)
def test_what_replace_and_route_do_wrong_is_one_line(above, rest, says, in_vain):
    message = in_vain(above=above, fields="factor: float = 1.0", rest=rest)
    assert says is None or re.search(says, message)
    assert "\n" not in message
    assert len(message) < 500


def test_a_fill_that_lies_about_its_size_fails_a_check(spec, material, tmp_path):
    path = material.write_method(tmp_path, above=LIAR, fields="factor: float = 1.0", rest=REPLACE)
    with pytest.raises(IntegrityError):
        execute(spec, tmp_path / "out", path)


def test_a_statistic_of_the_methods_own_that_raises_is_one_line(spec, material, tmp_path):
    above = (
        "from prunebench import GateSum\n\n"
        "class Bad(GateSum):\n    name = 'bad'\n\n    def update(self, batch):\n        raise OSError('no disk')\n"
    )
    path = material.write_method(tmp_path, above=above)
    text = Path(path).read_text().replace("return (Count(), OutputMoments())", "return (Count(), Bad())")
    Path(path).write_text(text)
    with pytest.raises(UsageError, match=r"OSError in update: no disk; in .*mine\.py:\d+"):
        execute(spec, tmp_path / "out", path)


def test_a_method_that_changes_its_statistics_changes_nothing_for_others(spec, material, tmp_path):
    path = material.write_method(
        tmp_path,
        "for layer in layers:\n"
        "            layer.stats['count'][:] = 0\n"
        "            layer.stats['output_moments'].mean_ED[:] = 7\n"
        "        return Mask.for_shapes([x.shape for x in layers], {x.index: range(8) for x in layers})",
    )
    session = Session(tmp_path / "together")
    session.execute(prepare(spec(method=path, operator="constant")))
    after = session.execute(prepare(spec(operator="constant"))).run.record
    alone = Session(tmp_path / "alone").execute(prepare(spec(operator="constant"))).run.record
    assert comparable(after) == comparable(alone)


def test_a_method_that_changes_weights_it_was_shown_changes_nothing(spec, material, tmp_path):
    path = material.write_method(
        tmp_path,
        "for layer in layers:\n"
        "            layer.router_rows_ED.zero_()\n"
        "            [w.zero_() for e in range(layer.experts) for w in layer.weights(e).values()]\n        "
        + material.LOWEST,
    )
    session = Session(tmp_path / "together")
    session.execute(prepare(spec(method=path)))
    after = session.execute(prepare(spec())).run.record
    alone = Session(tmp_path / "alone").execute(prepare(spec())).run.record
    assert comparable(after) == comparable(alone)


def test_a_method_that_sets_torch_up_for_itself_does_not_set_it_up_for_others(spec, material, tmp_path):
    threads = torch.get_num_threads()
    path = material.write_method(
        tmp_path,
        f"torch.set_num_threads({threads + 1}); torch.set_default_dtype(torch.float64)\n        " + material.LOWEST,
    )
    execute(spec, tmp_path / "out", path)
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32


def test_a_random_selection_depends_on_the_runs_seed_alone(spec, tmp_path):
    masks = []
    for number, seed in enumerate((0, 0, 1)):
        np.random.seed(number)  # noqa: NPY002 - the global state that must not matter
        torch.manual_seed(number)
        masks.append(execute(spec, tmp_path / str(number), "random", seed=seed).run.record["mask"]["digest"])
    assert masks[0] == masks[1] != masks[2]


def test_a_suite_that_raises_is_one_line_with_its_own_line(spec, material, tmp_path):
    file = material.write_suite(tmp_path)
    file.write_text(file.read_text().replace("items = []", "items = [][0]"))
    with pytest.raises(UsageError, match=r"IndexError in run: .*quick\.py:\d+"):
        execute(spec, tmp_path / "out", "frequency", suites=(str(file),))


def test_a_bug_of_ours_below_a_suite_keeps_its_traceback(spec, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("ours")

    ours = str(Path(prunebench.__file__).parent / "x.py")
    broken.__code__ = broken.__code__.replace(co_filename=ours)
    monkeypatch.setattr(Evaluation, "loglikelihood", broken)
    with pytest.raises(RuntimeError, match="ours"):
        execute(spec, tmp_path / "out", "frequency")
