"""Operators are told apart by what was asked of them; fit shares and rank correlations are what plain loops give."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import pytest

from prunebench.loader import content_root, load_method_class


def test_every_operator_is_called_as_the_track_calls_it(findings, maker, evidence):
    for name in maker.OPERATORS:
        found = evidence.find(findings.evidence.pruned("plain", "0.5", name))
        assert found.operator == name
        assert found.identity["operator"]["name"] == maker.OPERATORS[name][0]
        assert name in findings.operators.ANSWERING + findings.operators.LARGER


def test_usual_parameters_are_those_of_the_method_files(findings, maker):
    assert findings.operators.USUAL == maker.USUAL
    for name, usual in findings.operators.USUAL.items():
        kind = load_method_class(str(content_root() / "methods" / f"{name}.py"))
        assert {field.name: field.default for field in dataclasses.fields(kind)} == usual


@pytest.mark.parametrize(
    ("name", "parameters", "scale", "called"),
    [
        ("tilt", {"rank": 32, "ridge": 0.01, "clip": 4.0}, None, "tilt"),
        ("tilt", {"clip": 4.0, "ridge": 0.1, "rank": 8}, None, "tilt(rank=8, ridge=0.1)"),
        ("neurons", {"times": 4, "tilt_rank": 8}, None, "neurons(tilt_rank=8, times=4)"),
        ("compel", {"epsilon": 1e-12, "gamma": 0.1, "scale": "trained"}, "trained", "compel"),
        ("compel", {"epsilon": 1e-12, "gamma": 0.0, "scale": "other"}, None, "compel(gamma=0.0)@other"),
        ("mora", {"scale": "trained", "threshold": 0.4, "ridge": 1e-06, "new": 1}, "keep", "mora(new=1)@keep"),
    ],
)
def test_all_that_is_not_usual_is_named(findings, name, parameters, scale, called):
    assert findings.operators.called(name, parameters, scale) == called


@pytest.fixture
def gather(findings, maker, quick, tmp_path):
    def make(*arms):
        for number, (spec, changes) in enumerate(arms):
            maker.write(tmp_path, spec, name=f"run-{number}", **changes)
        return findings.evidence.gather(tmp_path)

    return make


def test_a_tilt_that_could_only_be_the_constant_is_not_taken_for_it(findings, gather, maker):
    spec = maker.operator("tilt(rank=8)", "plain", "0.5")
    evidence = gather((spec, {"arm": maker.record(spec)["arm"] | {"operator": "constant"}}))
    assert evidence.find(findings.evidence.pruned("plain", "0.5", "tilt(rank=8)"))
    with pytest.raises(findings.evidence.NotMeasurableError, match="no run of"):
        evidence.find(findings.evidence.pruned("plain", "0.5", "constant"))


@pytest.mark.parametrize("field", ["operator_layers", "groups"])
@pytest.mark.parametrize("name", ["tilt(rank=8)", "reroute@trained"])
def test_an_operator_in_some_layers_or_with_other_groups_is_another(findings, gather, maker, name, field):
    spec = maker.operator(name, "plain", "0.5") if "tilt" in name else maker.arm("plain", "0.5", "trained")
    arm = findings.evidence.pruned("plain", "0.5", name)
    evidence = gather((spec, {"identity": {field: "reselect"}}), (spec, {}))
    assert field not in evidence.find(arm).identity


def test_a_fitted_operator_is_found_by_the_draw_of_its_fit_and_others_without(findings, evidence):
    draw = findings.evidence.Draw("world:general", "B")
    for name, told in (("tilt(rank=8)", " fitted on general B"), ("compel", " fitted on general B"), ("mora", None)):
        arm = findings.evidence.pruned("plain", "0.5", name, fit=draw)
        assert evidence.find(arm).draw("fit") == draw
        assert told is None or str(arm).endswith(f"{name}{told}")
    arm = findings.evidence.pruned("plain", "0.5", "conmoe-nearest", fit=draw)
    assert evidence.find(arm).draw("fit") is None
    assert str(arm).endswith("conmoe-nearest")


def by_hand(one, other):
    """Spearman's rho: Pearson's of ranks, where equal values have the mean of the places they take."""
    ranks = []
    for values in (one, other):
        ordered = sorted(values)
        places = [[at for at, value in enumerate(ordered) if value == own] for own in values]
        ranks.append([sum(own) / len(own) for own in places])
    means = [sum(own) / len(own) for own in ranks]
    moments = [
        sum((a - means[i]) * (b - means[j]) for a, b in zip(ranks[i], ranks[j], strict=True))
        for i, j in ((0, 1), (0, 0), (1, 1))
    ]
    return moments[0] / (moments[1] * moments[2]) ** 0.5 if moments[1] * moments[2] else 0.0


@pytest.mark.parametrize(
    ("one", "other", "rho"),
    [
        ((1, 2, 3, 4, 5), (1.5, 7, 8, 8.5, 9), 1),
        ((1, 2, 3, 4, 5), (5, 4, 3, 2, 1), -1),
        ((1, 2, 3, 4), (2, 1, 4, 3), 0.6),
        ((0, 0, 1, 2, 3), (0, 1, 1, 3, 2), None),
        ((1, 1, 1), (1, 2, 3), 0),
    ],
)
def test_rank_correlation_and_its_exact_p(findings, one, other, rho):
    found = findings.ranks.rank_correlation(one, other)
    assert found == pytest.approx(by_hand(one, other) if rho is None else rho, abs=1e-12)
    orders = [abs(by_hand(one, order)) >= abs(found) - 1e-9 for order in permutations(other)]
    assert findings.ranks.exact_p(one, other) == pytest.approx(sum(orders) / len(orders))


def test_five_points_in_one_order_have_p_of_one_in_sixty(findings):
    assert findings.ranks.exact_p(range(5), range(5)) == pytest.approx(2 / 120)


def test_shares_weigh_experts_by_error_and_gate(findings):
    layer = {
        "experts": [1, 4, 6, 7],
        "constant_squared_error": [10.0, 30.0, 0.0, 60.0],
        "squared_error": [5.0, 0.0, 0.0, 60.0],
        "gate_square": [4.0, 1.0, 0.0, 1.0],
        "held_out_share": [0.25, -1.0, None, None],
    }
    shares = findings.fits.Shares.of(layer)
    assert shares.plain == pytest.approx(1 - 65 / 100)
    assert shares.gated == pytest.approx((40 * 0.5 + 30 * 1 + 60 * 0) / 130)
    assert shares.held_out == pytest.approx((40 * 0.25 + 30 * -1) / 70)
    assert str(shares) == "35.0 / 38.5 / -28.6"


def test_a_layer_in_which_nothing_has_weight_has_no_share_and_counts_in_no_mean(findings):
    empty = findings.fits.Shares.of({"experts": [2], "constant_squared_error": [0.0], "squared_error": [0.0]})
    assert str(empty) == "– / – / –"
    half = findings.fits.Shares(0.5, 0.25, None)
    assert findings.fits.Shares.over([empty, half, half]) == half
