"""Every shipped operator of the fit pass against float64 arithmetic of the test's own, and where it falls back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from prunebench import (
    Constant,
    InputOutputMoments,
    LayerView,
    Mask,
    Method,
    OutputMoments,
    Replacements,
    Statistic,
    load_method,
)
from prunebench.calibration import CalibrationSpec, CalibrationTokens, by_pass, score_pass
from prunebench.errors import UsageError
from prunebench.fit import model_size, stored_per_expert
from prunebench.install import programs_of
from prunebench.moe import Instrument
from prunebench.plan import fit_plan, layer_views, make_plan
from prunebench.testing import opened_model, random_ids

PRUNED = (1, 4, 6, 9)
RANK = 4
COPIES = ("neurons", "svd", "svd-whitened")
OPERATORS = {"tilt": {"rank": RANK}, **{name: {"tilt_rank": RANK} for name in COPIES}}
FAMILIES = ["olmoe", "deepseek_v3", "granitemoe"]


@pytest.fixture(scope="module", params=FAMILIES)
def moe(request):
    return opened_model(request.param)


@pytest.fixture(scope="module")
def tokens():
    ids_BL = random_ids(24, 32)
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


@pytest.fixture(scope="module")
def rows(moe, tokens, oracle):
    """(layer, expert) -> inputs and outputs in float64, past every hook of prunebench."""
    found = {}
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace:
        moe.model(input_ids=tokens.ids_BL)
    for layer in moe.layers:
        index_TK, x_TD = oracle.array(trace.router[layer.index][0][2]), oracle.array(trace.inputs[layer.index][0])
        for e in PRUNED:
            x_SD = x_TD[(index_TK == e).any(1)]
            found[layer.index, e] = x_SD, oracle.expert(layer.experts, e, x_SD)
    return found


def mask_of(moe, pruned=PRUNED) -> Mask:
    return Mask.for_shapes(moe.shapes, {layer.index: pruned for layer in moe.layers})


def fitted(moe, name, tokens, **parameters):
    return fit_plan(moe, mask_of(moe), load_method(name, {**OPERATORS[name], **parameters}), None, tokens)


# ------------------------------------------------------------------------------------------------------ the oracles


def silu(x):
    return x / (1 + np.exp(-x))


def truncated(weight_OI, rank):
    left, singular, right = np.linalg.svd(weight_OI, full_matrices=False)
    return (left[:, :rank] * singular[:rank]) @ right[:rank]


def whitened(weight_OI, moment_II, rank):
    """With the Cholesky root, where the code takes the symmetric one."""
    damped_II = moment_II + 1e-6 * np.trace(moment_II) / len(moment_II) * np.eye(len(moment_II))
    root_II = np.linalg.cholesky(damped_II)
    return truncated(weight_OI @ root_II, rank) @ np.linalg.inv(root_II)


def tilt(x_SD, y_SD, _weights):
    centre_D, mean_D = x_SD.mean(0), y_SD.mean(0)
    covariance_DD = np.cov(x_SD.T, bias=True)
    cross_DO = (x_SD - centre_D).T @ (y_SD - mean_D) / len(x_SD)
    map_DO = np.linalg.solve(covariance_DD + 1e-2 * np.diag(np.diag(covariance_DD)), cross_DO)
    best_OR = np.linalg.eigh(cross_DO.T @ map_DO)[1][:, ::-1][:, :RANK]
    directions_DR = map_DO @ best_OR
    limit_R = 4 * (x_SD @ directions_DR).std(0)
    return lambda x: mean_D + np.clip((x - centre_D) @ directions_DR, -limit_R, limit_R) @ best_OR.T


def with_bias(x_SD, y_SD, gate, up, down):
    def copy(x):
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    bias_D = (y_SD - copy(x_SD)).mean(0)
    return lambda x: copy(x) + bias_D


def neurons(x_SD, y_SD, weights):
    gate, up, down = weights
    energy_F = (silu(x_SD @ gate.T) * (x_SD @ up.T)).__pow__(2).mean(0) * (down**2).sum(0)
    best = np.sort(np.argsort(-energy_F)[: 2 * RANK // 3])
    return with_bias(x_SD, y_SD, gate[best], up[best], down[:, best])


def svd(x_SD, y_SD, weights):
    rank = 2 * RANK * 32 // (3 * (32 + 16))
    return with_bias(x_SD, y_SD, *(truncated(weight, rank) for weight in weights))


def svd_whitened(x_SD, y_SD, weights):
    rank = 2 * RANK * 32 // (3 * (32 + 16))
    gate, up, down = weights
    h_SF = silu(x_SD @ gate.T) * (x_SD @ up.T)
    input_DD, hidden_FF = x_SD.T @ x_SD / len(x_SD), h_SF.T @ h_SF / len(x_SD)
    return with_bias(
        x_SD, y_SD, whitened(gate, input_DD, rank), whitened(up, input_DD, rank), whitened(down, hidden_FF, rank)
    )


ORACLES = {"tilt": tilt, "neurons": neurons, "svd": svd, "svd-whitened": svd_whitened}


# -------------------------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_installed_answers_as_float64_arithmetic_of_the_tests_own_says(name, moe, tokens, rows, oracle):
    result = fitted(moe, name, tokens)
    programs = programs_of(result.plan)
    for layer in moe.layers:
        for e in PRUNED:
            x_SD, y_SD = rows[layer.index, e]
            gate, up = np.split(oracle.array(layer.experts.gate_up_proj)[e], 2)
            wanted = ORACLES[name](x_SD, y_SD, (gate, up, oracle.array(layer.experts.down_proj)[e]))(x_SD)
            got = programs[layer.index].fills[e](torch.from_numpy(x_SD).float()).double().numpy()
            assert np.linalg.norm(got - wanted) < 1e-4 * np.linalg.norm(wanted)
            if name == "tilt":
                assert np.square(y_SD - got).sum() < np.square(y_SD - y_SD.mean(0)).sum(), "better than the constant"
            row = result.coverage[layer.index][e]
            assert (row["tokens"], row["fallback"]) == (len(x_SD), "")
            assert row["constant_squared_error"] == pytest.approx(np.square(y_SD - y_SD.mean(0)).sum(), rel=1e-4)
            slack = 0.02 if name == "tilt" else 1e-4  # the clip
            assert row["squared_error"] == pytest.approx(np.square(y_SD - wanted).sum(), rel=slack)
            assert row["fit_share"] == pytest.approx(1 - row["squared_error"] / row["constant_squared_error"])


@pytest.mark.parametrize("name", OPERATORS)
def test_values_stored_are_those_of_the_count(name, moe, tokens):
    plan = fitted(moe, name, tokens).plan
    each = stored_per_expert(model_size(moe.model), name, rank=RANK)
    assert set(plan.declared.values()) == {each}
    assert plan.values_stored == each * len(PRUNED) * len(moe.layers)
    groups = [group for layer in plan.manifest().values() for group in layer]
    listed = [
        len(group["experts"]) * np.prod(tensor["shape"]) for group in groups for tensor in group["tensors"].values()
    ]
    assert sum(listed) == plan.values_stored


@pytest.mark.parametrize("name", OPERATORS)
def test_a_held_out_share_is_fitted_on_even_blocks_and_scored_on_odd_ones(name, moe, tokens):
    coverage = fitted(moe, name, tokens).coverage
    even, odd = (replace(tokens, ids_BL=tokens.ids_BL[start::2]) for start in (0, 1))
    of_even = programs_of(fitted(moe, name, even, **({"clip": 1e6} if name == "tilt" else {})).plan)
    layer = moe.layers[0]

    def rows_of(part):
        rows = {e: [] for e in PRUNED}

        def see(_layer, batch):
            for e in PRUNED:
                mine_S = batch.expert_S == e
                rows[e].append((batch.x_TD[batch.token_S[mine_S]], batch.outputs_SD[mine_S].clone()))

        with torch.inference_mode(), Instrument(replace(moe, layers=(layer,)), observer=see):
            moe.model(input_ids=part.ids_BL)
        return {e: [torch.cat(part) for part in zip(*found, strict=True)] for e, found in rows.items()}

    fitted_on, scored_on = rows_of(even), rows_of(odd)
    for e in PRUNED:
        x_SD, y_SD = scored_on[e]
        mean_D = fitted_on[e][1].double().mean(0)
        answers = (of_even[layer.index].fills[e](x_SD), mean_D)
        errors = [float((y_SD.double() - answer).square().sum()) for answer in answers]
        assert coverage[layer.index][e]["held_out_share"] == pytest.approx(1 - errors[0] / errors[1], abs=1e-4)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_layers_fit_shares_weigh_experts_by_error_and_by_gate_and_error(name, moe, tokens, rows, oracle):
    result = fitted(moe, name, tokens)
    with torch.inference_mode(), oracle.Trace(moe.layers) as trace:
        moe.model(input_ids=tokens.ids_BL)
    for index, said in result.to_json()["layers"].items():
        _, gates_TK, index_TK = (oracle.array(part) for part in trace.router[int(index)][0])
        told = [result.coverage[int(index)][e] for e in PRUNED]
        squares = [np.mean(gates_TK[index_TK == e] ** 2) for e in PRUNED]
        errors = [np.square(y - y.mean(0)).sum() for y in (rows[int(index), e][1] for e in PRUNED)]
        both = np.multiply(squares, errors)
        shares, held_out = ([row[key] for row in told] for key in ("fit_share", "held_out_share"))
        np.testing.assert_allclose(said["gate_square"], squares, rtol=1e-4)
        assert said["fit_share"] == pytest.approx(np.average(shares, weights=errors), rel=1e-4)
        assert said["weighted_fit_share"] == pytest.approx(np.average(shares, weights=both), rel=1e-4)
        assert said["weighted_held_out_share"] == pytest.approx(np.average(held_out, weights=both), rel=1e-4)
        assert said["fallbacks"] == {}
        assert "outcome" not in said


@pytest.mark.parametrize("name", ["tilt", "neurons"])
def test_what_is_said_of_a_fit_has_a_column_of_each_number_of_its_experts(name, moe, tokens):
    result = fitted(moe, name, tokens)
    for index, said in result.to_json()["layers"].items():
        rows = result.coverage[int(index)]
        assert said["experts"] == sorted(rows) == list(PRUNED)
        assert said["tokens"] == [rows[e]["tokens"] for e in PRUNED]
        for key in ("squared_error", "constant_squared_error", "held_out_share"):
            np.testing.assert_allclose(said[key], [rows[e][key] for e in PRUNED], rtol=1e-8)


@pytest.mark.parametrize("name", COPIES)
def test_four_times_the_budget_takes_the_size_of_its_count(name, moe, tokens):
    each = stored_per_expert(model_size(moe.model), name, rank=RANK, times=4)
    assert set(fitted(moe, name, tokens, times=4).plan.declared.values()) == {each}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_expert_that_is_never_routed_to_answers_zero(name, tokens):
    moe = opened_model("deepseek_v3")
    for layer in moe.layers:
        layer.router.e_score_correction_bias[PRUNED[0]] = -10.0
    result = fitted(moe, name, tokens)
    reason = "no routed tokens" if name in COPIES else "0 routed tokens, at most 4·4"
    for layer in moe.layers:
        fill = programs_of(result.plan)[layer.index].fills[PRUNED[0]]
        assert isinstance(fill, Constant)
        assert not fill.mean_D.any()
        row = result.coverage[layer.index][PRUNED[0]]
        assert (row["tokens"], row["fallback"], row["fit_share"]) == (0, reason, 0.0)
        assert not any(result.coverage[layer.index][e]["fallback"] for e in PRUNED[1:])


def test_a_tilt_of_few_tokens_is_the_constant(moe, tokens, rows):
    count = {key: len(x_SD) for key, (x_SD, _) in rows.items()}
    rank = min(32, sorted(count.values())[len(count) // 2] // 4)
    plan = fitted(moe, "tilt", tokens, rank=rank).plan
    kinds = {(layer.index, e): fill.kind for layer in plan.layers for e, fill in layer.fills.items()}
    assert kinds == {key: "Constant" if count[key] <= 4 * rank else "Tilt" for key in count}
    assert len(set(kinds.values())) == 2
    for key in (key for key, kind in kinds.items() if kind == "Constant"):
        mean_D = programs_of(plan)[key[0]].fills[key[1]].mean_D
        np.testing.assert_allclose(mean_D, rows[key][1].mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("tilt", {"rank": 0}, r"rank 0 is no tilt.*operator constant"),
        *((name, {"tilt_rank": 0}, r"1 times a tilt of rank 0.*operator constant") for name in COPIES),
        *((name, {"times": 0}, r"0 times a tilt of rank 32") for name in COPIES),
    ],
)
def test_no_rank_is_refused_by_name(name, parameters, says):
    with pytest.raises(UsageError, match=says):
        load_method(name, parameters)


def test_a_budget_below_one_rank_is_refused_by_name(moe, tokens):
    with pytest.raises(UsageError, match=r"a svd copy of rank 0; in a budget of 64 values; expected at least 144"):
        fitted(moe, "svd", tokens, tilt_rank=1)


@pytest.mark.parametrize("family", ["deepseek_v4", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("name", COPIES)
def test_experts_that_are_no_gated_mlp_have_tilts_and_no_copies(name, family, tokens):
    moe = opened_model(family)
    with pytest.raises(UsageError, match=r"such as constant (and|or) tilt"):
        fitted(moe, name, tokens)
    assert fitted(moe, "tilt", tokens).plan.keeps_slots


def test_a_fit_pass_measures_what_a_score_pass_does(moe, tokens):
    operator = load_method("tilt", {"rank": RANK})
    scores = score_pass(moe, tokens, operator.replace_needs())
    one, other = make_plan(moe, mask_of(moe), operator, scores), fitted(moe, "tilt", tokens).plan
    assert one.manifest() == other.manifest()


def test_layers_without_pruned_experts_are_passed_over(moe, tokens):
    last = moe.layers[-1].index
    result = fit_plan(
        moe, Mask.for_shapes(moe.shapes, {last: PRUNED}), load_method("neurons", OPERATORS["neurons"]), None, tokens
    )
    assert set(result.coverage) == {last}
    assert result.plan.manifest() == {str(last): fitted(moe, "neurons", tokens).plan.manifest()[str(last)]}


# ------------------------------------------------------------------------------------------- what a method may declare


@dataclass(frozen=True)
class Looks(Method):
    """Reads rows without having said so."""

    name = "looks"

    def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
        counts = layer.accumulate(pruned, lambda rows: len(rows.x_SD))
        return Replacements({e: Constant.of(torch.full((layer.width,), float(counts.get(e, 0)))) for e in pruned})


@dataclass(frozen=True)
class Visits(Looks):
    """And having said so."""

    visits: ClassVar[bool] = True


class Follows(OutputMoments):
    """Comes after a statistic of a score pass, which then is of the fit pass too."""

    name = "follows"
    after = ("output_moments",)


def test_rows_are_shown_to_those_who_said_so(moe, tokens, rows):
    for plan in (make_plan, lambda *a: fit_plan(*a, tokens)):
        with pytest.raises(UsageError, match=r"the text is not at hand.*visits = True"):
            plan(moe, mask_of(moe), Looks(), None)
    result = fit_plan(moe, mask_of(moe), Visits(), None, tokens, batch_tokens=64)
    for (index, e), (x_SD, _) in rows.items():
        assert programs_of(result.plan)[index].fills[e].mean_D[0] == len(x_SD)
    assert result.tokens == tokens.ids_BL.numel()
    assert result.coverage == {}, "a fill that is no Fitted says nothing of its fit"


def test_of_a_layer_nothing_but_its_fills_is_left_when_the_next_one_comes(moe, tokens):
    left = []

    @dataclass(frozen=True)
    class Watches(Method):
        name = "watches"

        def replace_needs(self) -> tuple[Statistic, ...]:
            return (InputOutputMoments(),)

        def replace(self, layer: LayerView, pruned: tuple[int, ...]) -> Replacements:
            assert all(gone() is None for gone in left)
            moments = layer.stats["input_output_moments"]
            left.extend(weakref.ref(tensor) for tensor in moments.state.values())
            return Replacements({e: Constant.of(moments.all(e).mean_y_O) for e in pruned})

    fit_plan(moe, mask_of(moe), Watches(), None, tokens)
    assert len(left) > len(moe.layers) * len(PRUNED)


def test_each_statistic_has_its_pass_and_takes_along_what_it_follows():
    moments, large, follows = OutputMoments(), InputOutputMoments(), Follows()
    assert by_pass((moments, large)) == ((moments,), (large,), ())
    assert by_pass((moments, follows)) == ((), (moments, follows), ())
    assert by_pass(()) == ((), (), ())
    assert [load_method(name).in_fit_pass() for name in (*OPERATORS, "constant", "reroute")] == [True] * 4 + [False] * 2


def test_what_a_fit_pass_measured_is_read_as_it_is_and_shared_statistics_are_copied(moe, tokens):
    statistics: tuple[Statistic, ...] = (OutputMoments(), InputOutputMoments())
    scores = score_pass(moe, tokens, statistics)
    names = tuple(one.name for one in statistics)
    [view, *_] = layer_views(moe, scores, names, "x")
    own = {"input_output_moments": scores.layers[view.index]["input_output_moments"]}
    fit_view = view.in_fit(own, 7, None)
    kept = own["input_output_moments"].state["count_GE"]
    assert fit_view.stats["input_output_moments"].count_GE is kept
    assert view.stats["input_output_moments"].count_GE is not kept
    assert fit_view.stats["output_moments"].mean_ED is not fit_view.stats["output_moments"].mean_ED
    assert (fit_view.tokens, replace(view).tokens) == (7, tokens.ids_BL.numel())
