"""The gradient pass: Fisher against autograd's own gradients of whole tensors, and the model left as it was."""

from __future__ import annotations

import copy
import weakref

import numpy as np
import pytest
import torch

from prunebench import Count, Fisher, GradientStatistic, Statistic, TrueFisher
from prunebench.calibration import CalibrationSpec, CalibrationTokens, ScoreResult, by_pass, gradient_pass, score_pass
from prunebench.calibration.score import distinct
from prunebench.errors import IntegrityError, UsageError
from prunebench.moe import Instrument, LayerProgram, open_model
from prunebench.moe.experts import ExpertsRow
from prunebench.testing import CORE, FAMILIES, random_ids, random_model, score

# Routers that keep float32 gates in any dtype are refused in float64.
FLOAT32_ONLY = {"gemma4"}
LAYOUTS = ("gpt_oss", "nemotron_h", "longcat_flash", "llama4")


def opened(family="olmoe", dtype=None, **options):
    dtype = dtype or (torch.float32 if family in FLOAT32_ONLY else torch.float64)
    return open_model(random_model(family, dtype=dtype, **options), probe_tokens=64)


def tokens(ids_BL):
    return CalibrationTokens(CalibrationSpec("file:x", *ids_BL.shape), ids_BL, "test")


def fisher(moe, ids_BL, *, kind=None, **options):
    """layer -> F_e."""
    statistic = kind or Fisher()
    result = gradient_pass(moe, tokens(ids_BL), [statistic], **options)
    return {index: members[statistic.name].value() for index, members in result.layers.items()}


def loss_of(moe, ids_L, labels_L=None):
    """Mean next-token loss, written out."""
    logits_LV = moe.model(input_ids=ids_L[None], use_cache=False).logits[0, :-1]
    labels_L = ids_L[1:] if labels_L is None else labels_L
    return -logits_LV.log_softmax(-1)[torch.arange(len(labels_L)), labels_L].mean()


def plain_gradients(moe, ids_L):
    """layer -> tensor name -> gradient, of the untouched model by torch alone."""
    named = {(layer.index, name): getattr(layer.experts, name) for layer in moe.layers for name in layer.layout.tensors}
    try:
        for tensor in named.values():
            tensor.requires_grad_()
        found = torch.autograd.grad(loss_of(moe, ids_L), list(named.values()))
    finally:
        for tensor in named.values():
            tensor.requires_grad_(requires_grad=False)
    result: dict[int, dict[str, torch.Tensor]] = {}
    for (index, name), gradient in zip(named, found, strict=True):
        result.setdefault(index, {})[name] = gradient
    return result


def reference(moe, ids_BL):
    """layer -> F_e by a loop over sequences, experts and tensors."""
    total = {layer.index: np.zeros(layer.expert_count) for layer in moe.layers}
    for ids_L in ids_BL:
        gradients = plain_gradients(moe, ids_L)
        for layer in moe.layers:
            for expert in range(layer.expert_count):
                for gradient in gradients[layer.index].values():
                    total[layer.index][expert] += float((gradient[expert].double() ** 2).sum()) / len(ids_BL)
    return total


def assert_equal(found, wanted, rtol):
    assert found.keys() == wanted.keys()
    for index, want_E in wanted.items():
        np.testing.assert_allclose(found[index], want_E, rtol=rtol, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_squared_norm_of_each_experts_gradient_by_plain_autograd(family):
    moe, ids_BL = opened(family), random_ids(2, 12)
    found = fisher(moe, ids_BL)
    # Where gates or recurrences run in float32 whatever the model's dtype, so do their gradients.
    assert_equal(found, reference(moe, ids_BL), 1e-11 if moe.model.dtype == torch.float64 and family in CORE else 1e-5)
    assert any((value > 0).any() for value in found.values())


@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3.groups"])
def test_other_kernels_run_forward_and_give_the_same(family, kernel):
    moe = opened(family, torch.float32, experts_implementation=kernel)
    assert_equal(fisher(moe, random_ids(2, 12)), reference(moe, random_ids(2, 12)), 1e-5)


def test_bfloat16_is_near_its_own_weights_float32():
    moe = opened("olmoe", torch.bfloat16, hidden_size=64)
    exact = open_model(copy.deepcopy(moe.model).float(), probe_tokens=64)
    found, wanted = fisher(moe, random_ids(4, 16)), fisher(exact, random_ids(4, 16))
    for index in found:
        assert np.corrcoef(found[index], wanted[index])[0, 1] > 0.99


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v2", *LAYOUTS])
def test_shown_gradients_agree_with_finite_differences(family):
    class Entry(GradientStatistic):
        """The largest gradient entry of each tensor of each expert of the last sequence."""

        name = "entry"

        def start(self, experts, width, device):
            self.state, self.seen = {}, {}

        def add(self, expert, gradients):
            self.seen[expert] = {name: g.clone() for name, g in gradients.items()}

        def value(self):
            return self.seen

    moe, ids_BL = opened(family), random_ids(1, 10)
    layer = moe.layers[0]
    seen = gradient_pass(moe, tokens(ids_BL), [Entry()]).layers[layer.index]["entry"].value()
    for name in layer.layout.tensors:
        expert = max(seen, key=lambda e: float(seen[e][name].abs().max()))
        gradient = seen[expert][name].flatten()
        at = int(gradient.abs().argmax())
        flat = getattr(layer.experts, name)[expert].view(-1)
        before, losses = float(flat[at]), []
        # Norms and routers compute in float32 in any dtype, so a smaller step drowns in their rounding.
        step = 1e-3
        with torch.no_grad():
            for sign in (1, -1):
                flat[at] = before + sign * step
                losses.append(float(loss_of(moe, ids_BL[0])))
            flat[at] = before
        assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(gradient[at]), rel=1e-2)


@pytest.mark.parametrize("family", CORE)
def test_exactly_the_routed_experts_have_some(family):
    moe, ids_BL = opened(family), random_ids(1, 4)
    # Nothing is predicted at the last token, and nothing before it sees it.
    counts = score(moe, [Count()], ids_BL=ids_BL[:, :-1])
    for index, value_E in fisher(moe, ids_BL).items():
        np.testing.assert_array_equal(value_E > 0, counts.layers[index]["count"].value() > 0)
        assert (value_E == 0).any()


def test_a_sequence_that_passes_an_expert_by_counts_as_zero():
    moe = opened()
    ids_BL = random_ids(6, 3)
    alone = [fisher(moe, ids_BL[b : b + 1]) for b in range(6)]
    together = fisher(moe, ids_BL)
    assert_equal(together, {index: np.mean([one[index] for one in alone], axis=0) for index in together}, 1e-13)
    assert any((one[0] == 0).any() and (together[0] > 0)[one[0] == 0].any() for one in alone)


def test_sequences_do_not_depend_on_each_other_and_streams_merge():
    moe, ids_BL = opened(), random_ids(7, 12)
    whole = gradient_pass(moe, tokens(ids_BL), [Fisher(), TrueFisher()]).layers
    for cut in (1, 3):
        parts = [
            gradient_pass(moe, tokens(part), [Fisher(), TrueFisher()]).layers for part in ids_BL.tensor_split([cut])
        ]
        for index, members in whole.items():
            for name, one in members.items():
                merged = copy.deepcopy(parts[0][index][name])
                merged.merge(parts[1][index][name])
                assert int(merged.state["sequences"]) == int(one.state["sequences"]) == 7
                np.testing.assert_allclose(merged.value(), one.value(), rtol=1e-12)
    again = fisher(moe, ids_BL[torch.randperm(7, generator=torch.Generator().manual_seed(0))])
    assert_equal(again, {index: members["fisher"].value() for index, members in whole.items()}, 1e-12)


def test_streams_of_other_lengths_do_not_merge():
    moe = opened()
    short, long = (gradient_pass(moe, tokens(random_ids(2, n)), [Fisher()]).layers[0]["fisher"] for n in (8, 9))
    empty = Fisher()
    empty.start(16, 32, torch.device("cpu"))
    assert (empty.value() == 0).all()
    before = short.value()
    short.merge(empty)
    np.testing.assert_array_equal(short.value(), before)
    with pytest.raises(UsageError, match="a sequence of 9 tokens among those of 8"):
        short.merge(long)


def test_scaling_the_loss_leaves_the_ratios(monkeypatch):
    from prunebench.calibration import gradient

    moe, ids_BL = opened(), random_ids(3, 12)
    before = fisher(moe, ids_BL)
    plain = gradient._mean_loss
    monkeypatch.setattr(gradient, "_mean_loss", lambda *args: 4 * plain(*args))
    assert_equal(fisher(moe, ids_BL), {index: 16 * value_E for index, value_E in before.items()}, 1e-12)


class Halves(GradientStatistic):
    """Squared norms of the gradients of gate, up and down, [3, E]."""

    name = "halves"

    def start(self, experts, width, device):
        self.state = {"sum_PE": torch.zeros(3, experts, dtype=torch.float64)}

    def add(self, expert, gradients):
        gate_FD, up_FD = gradients["gate_up_proj"].chunk(2)
        for row, part in enumerate((gate_FD, up_FD, gradients["down_proj"])):
            self.state["sum_PE"][row, expert] += part.square().sum()

    def value(self):
        return self.state["sum_PE"].numpy()


def test_up_times_c_and_down_over_c_is_the_same_function_with_another_fisher():
    moe, ids_BL, c = opened(), random_ids(3, 12), 4.0
    before = gradient_pass(moe, tokens(ids_BL), [Halves(), Fisher()]).layers
    with torch.no_grad():
        logits = moe.model(input_ids=ids_BL).logits
        for layer in moe.layers:
            up_EFD = layer.experts.gate_up_proj.chunk(2, dim=1)[1]
            up_EFD.mul_(c)
            layer.experts.down_proj.div_(c)
        assert torch.allclose(moe.model(input_ids=ids_BL).logits, logits, rtol=1e-10)
    after = gradient_pass(moe, tokens(ids_BL), [Halves(), Fisher()]).layers
    for index, members in before.items():
        gate_E, up_E, down_E = members["halves"].value()
        np.testing.assert_allclose(after[index]["halves"].value(), [gate_E, up_E / c**2, down_E * c**2], rtol=1e-9)
        wanted_E = (gate_E + up_E / c**2 + down_E * c**2) / len(ids_BL)
        np.testing.assert_allclose(after[index]["fisher"].value(), wanted_E, rtol=1e-9)
        assert not np.allclose(after[index]["fisher"].value(), members["fisher"].value(), rtol=0.1)


# ------------------------------------------------------------------------------------------------ sampled labels


def test_sampled_labels_follow_the_models_distribution():
    from prunebench.calibration.gradient import _drawn

    p_V = torch.tensor([0.0, 0.5, 0.1, 0.0, 0.4])
    logits_LV = p_V.log().expand(20_000, -1)
    counts_V = torch.bincount(_drawn(logits_LV, np.random.default_rng(0)), minlength=5)
    assert counts_V[0] == counts_V[3] == 0
    np.testing.assert_allclose(counts_V / 20_000, p_V, atol=0.015)


def test_the_true_fisher_is_that_of_its_own_labels_and_repeats_by_seed():
    """A model whose every next token is all but certain draws these; then both kinds see the same labels."""
    moe, ids_BL = opened(), random_ids(3, 12)
    first, same, other = (fisher(moe, ids_BL, kind=TrueFisher(seed)) for seed in (0, 0, 1))
    empirical = fisher(moe, ids_BL)
    for index, value_E in first.items():
        np.testing.assert_array_equal(value_E, same[index])
        assert not np.allclose(value_E, other[index], rtol=0.01)
        assert not np.allclose(value_E, empirical[index], rtol=0.01)
    with torch.no_grad():
        moe.model.lm_head.weight.mul_(1e4)
        logits_BLV = moe.model(input_ids=ids_BL).logits
    found = fisher(moe, ids_BL[:1], kind=TrueFisher())
    assert logits_BLV[0, :-1].softmax(-1).amax(-1).min() > 0.999
    named = {layer.index: layer.experts.down_proj.requires_grad_() for layer in moe.layers}
    loss = loss_of(moe, ids_BL[0], logits_BLV[0, :-1].argmax(-1))
    torch.autograd.backward(loss)
    for index, parameter in named.items():
        assert found[index].sum() >= float(parameter.grad.square().sum()) * 0.999


def test_the_expected_gradient_under_the_models_own_labels_is_zero():
    """So the true Fisher is a variance: the mean gradient over many draws is small beside the root of F."""

    class Mean(TrueFisher):
        name = "mean"

        def start(self, experts, width, device):
            super().start(experts, width, device)
            self.mean = {}

        def add(self, expert, gradients):
            super().add(expert, gradients)
            self.mean[expert] = self.mean.get(expert, 0) + gradients["down_proj"]

    moe, ids_BL, draws = opened(num_hidden_layers=1), random_ids(1, 16), 64
    runs = [gradient_pass(moe, tokens(ids_BL), [Mean(seed)]).layers[0]["mean"] for seed in range(draws)]
    squares = np.mean([one.value() for one in runs], axis=0)
    for expert in range(16):
        if squares[expert]:
            mean = sum(one.mean[expert] for one in runs) / draws
            assert float(mean.square().sum()) < 3 * squares[expert] / draws


# ------------------------------------------------------------------------------------------- the model afterwards


def fingerprint(moe):
    return (
        {name: tensor.clone() for name, tensor in moe.model.state_dict().items()},
        {name: parameter.requires_grad for name, parameter in moe.model.named_parameters()},
        {name: (parameter.grad, id(parameter), parameter._version) for name, parameter in moe.model.named_parameters()},
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in moe.model.modules()],
        {name: sorted(vars(m)) for name, m in moe.model.named_modules()},
        torch.is_grad_enabled(),
        moe.model.training,
    )


def assert_untouched(moe, before):
    after = fingerprint(moe)
    assert all(torch.equal(after[0][name], tensor) for name, tensor in before[0].items())
    assert after[1:] == before[1:]


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", *LAYOUTS])
def test_the_model_is_left_as_it_was(family):
    moe = opened(family)
    # As a model from elsewhere may come: some parameters require gradients, and one has a gradient already.
    kept = moe.model.get_input_embeddings().weight.requires_grad_()
    moe.layers[0].experts.down_proj.requires_grad_()
    kept.grad = torch.ones_like(kept)
    before = fingerprint(moe)
    with torch.inference_mode():
        logits = moe.model(input_ids=random_ids()).logits
    fisher(moe, random_ids(2, 12))
    assert_untouched(moe, before)
    assert (kept.grad == 1).all()
    with torch.inference_mode():
        assert torch.equal(moe.model(input_ids=random_ids()).logits, logits)


class Stop(Exception):  # noqa: N818
    """Ctrl-C, or whatever comes."""


class Stopping(Fisher):
    """A statistic that gives up."""

    name = "stopping"

    def add(self, expert, gradients):
        raise Stop


@pytest.mark.parametrize("where", ["forward", "backward", "progress"])
def test_it_is_left_so_after_an_error_too_and_the_next_pass_is_right(where):
    moe, ids_BL = opened(), random_ids(2, 12)
    wanted = fisher(moe, ids_BL)
    before = fingerprint(moe)

    def stop(*_):
        raise Stop

    handle = moe.layers[1].block.register_forward_hook(stop) if where == "forward" else None
    with pytest.raises(Stop):
        gradient_pass(
            moe,
            tokens(ids_BL),
            [Stopping() if where == "backward" else Fisher()],
            progress=stop if where == "progress" else None,
        )
    if handle is not None:
        handle.remove()
    assert_untouched(moe, before)
    assert_equal(fisher(moe, ids_BL), wanted, 0)


def test_it_works_within_inference_mode_and_without_gradients():
    moe, ids_BL = opened(), random_ids(2, 12)
    wanted = fisher(moe, ids_BL)
    with torch.inference_mode():
        made_there = random_ids(2, 12).clone()
        assert_equal(fisher(moe, made_there), wanted, 0)
        assert torch.is_inference_mode_enabled()
    with torch.no_grad():
        assert_equal(fisher(moe, ids_BL), wanted, 0)
        assert not torch.is_grad_enabled()


def test_nothing_as_large_as_a_layers_tensor_is_differentiated(monkeypatch):
    moe, sizes = opened(), []
    plain = torch.autograd.grad

    def watched(*args, **kwargs):
        found = plain(*args, **kwargs)
        sizes.extend(g.numel() for g in found)
        return found

    monkeypatch.setattr(torch.autograd, "grad", watched)
    fisher(moe, random_ids(1, 12))
    assert max(sizes) == moe.layers[0].experts.gate_up_proj[0].numel()


def test_the_graph_and_the_gradients_are_let_go_of(monkeypatch):
    from prunebench.calibration import gradient

    kept = []
    plain = gradient._mean_loss

    def watched(*args):
        loss = plain(*args)
        kept.append(weakref.ref(loss))
        return loss

    class Watching(Fisher):
        name = "watching"

        def add(self, expert, gradients):
            assert sum(one() is not None for one in kept) == 1, "the last sequence's graph is still there"
            assert not any(one() is not None for one in seen), "another expert's gradient is still there"
            seen[:] = [weakref.ref(gradients["down_proj"])]

    seen: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(gradient, "_mean_loss", watched)
    gradient_pass(opened(), tokens(random_ids(3, 8)), [Watching()])
    assert len(kept) == 3
    assert not any(one() is not None for one in (*kept, *seen))


# ----------------------------------------------------------------------------------------------------- refusals


def test_a_kernel_without_a_backward_is_refused_by_name():
    moe = opened()
    library = torch.library.custom_op(
        "prunebench_tests::twice", lambda x: 2 * x, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    handle = moe.layers[1].block.register_forward_hook(lambda _m, _a, y: library(y))
    with pytest.raises(
        UsageError, match=r"OlmoeForCausalLM cannot be differentiated: .*; fix: load it with others"
    ) as info:
        fisher(moe, random_ids(1, 8))
    assert "\n" not in str(info.value)
    handle.remove()
    fisher(moe, random_ids(1, 8))


def test_a_layer_that_no_gradient_reaches_is_refused_by_name():
    moe = opened()
    handle = moe.model.model.layers[1].register_forward_pre_hook(lambda _m, args: (args[0].detach(), *args[1:]))
    with pytest.raises(UsageError, match=r"no gradient reaches the experts; in model\.layers\.0"):
        fisher(moe, random_ids(1, 8))
    handle.remove()


def test_weights_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = random_model("olmoe")
    with pytest.raises(UsageError, match=r"made in inference mode.*fix: load the model outside"):
        fisher(open_model(model, probe_tokens=64), random_ids(1, 8))


def test_float16_is_refused():
    moe = open_model(random_model("olmoe", dtype=torch.float16), probe_tokens=64)
    with pytest.raises(UsageError, match="gradients vanish in float16"):
        fisher(moe, random_ids(1, 8))


def test_an_instrument_is_refused():
    moe = opened()
    with (
        Instrument(moe, {0: LayerProgram((1,))}),
        pytest.raises(UsageError, match="something is installed on the layer"),
    ):
        fisher(moe, random_ids(1, 8))


def test_gradients_that_are_not_finite_are_refused():
    moe = opened("olmoe", torch.float32)
    moe.model.model.norm.register_full_backward_hook(lambda _m, grads, _of: (grads[0] * torch.inf,))
    with pytest.raises(UsageError, match=r"gradients are not finite \(statistic 'fisher'\); in model\.layers\.0"):
        fisher(moe, random_ids(1, 8))


@pytest.mark.parametrize("kind", [Fisher, TrueFisher])
def test_logits_that_are_not_finite_are_refused(kind):
    moe = opened("olmoe", torch.float32)
    with torch.no_grad():
        moe.model.lm_head.weight.fill_(3e38)
    with pytest.raises(UsageError, match="the model's logits are not finite; in a gradient pass"):
        fisher(moe, random_ids(1, 8), kind=kind())


def test_single_experts_that_add_up_to_something_else_are_an_error():
    moe = opened()
    # As if the table had the wrong row: the module itself reads its weights from elsewhere.
    experts = moe.layers[0].experts
    handle = experts.register_forward_hook(lambda _m, _a, y: 1.01 * y)
    with pytest.raises(IntegrityError, match=r"single experts add up to something else .*model\.layers\.0"):
        fisher(moe, random_ids(1, 8))
    handle.remove()
    assert isinstance(moe.layers[0].layout, ExpertsRow)


class NoAdd(Statistic):
    """Says gradient, and is not."""

    name = "no_add"
    measured_in = "gradient"

    def start(self, experts, width, device):
        """Nothing."""

    def update(self, batch):
        """Nothing."""

    def value(self):
        return None


class After(Fisher):
    """Another order."""

    name = "late"
    after = ("count",)


def test_statistics_of_other_passes_are_refused_in_words():
    moe, ids_BL = opened(), random_ids(1, 8)
    with pytest.raises(UsageError, match="statistic 'count' is not of gradients"):
        gradient_pass(moe, tokens(ids_BL), [Count()])
    with pytest.raises(UsageError, match="statistic 'fisher' is of gradients"):
        score_pass(moe, tokens(ids_BL), [Fisher()])
    with pytest.raises(UsageError, match="statistic 'fisher' is of gradients"):
        Fisher().update(None)
    with pytest.raises(UsageError, match=r"'no_add' cannot be shown gradients.*GradientStatistic"):
        gradient_pass(moe, tokens(ids_BL), [NoAdd()])
    with pytest.raises(UsageError, match="'late' comes after count"):
        gradient_pass(moe, tokens(ids_BL), [After()])
    with pytest.raises(UsageError, match="seed -1 is impossible"):
        TrueFisher(-1)
    with pytest.raises(UsageError, match="two statistics named 'true_fisher' have different settings"):
        distinct((TrueFisher(0), TrueFisher(1)))


def test_needs_are_told_apart_by_pass():
    needs = (Count(), Fisher())
    assert by_pass(needs) == ((needs[0],), (), (needs[1],))
    follower = type("Follower", (Count,), {"name": "follower", "after": ("fisher",)})()
    with pytest.raises(UsageError, match="'follower' comes after fisher, which is of another pass"):
        by_pass((*needs, follower))


# -------------------------------------------------------------------------------------------- progress and cache


def test_progress_counts_blocks():
    seen = []
    gradient_pass(opened(), tokens(random_ids(3, 6)), [Fisher(), TrueFisher()], progress=lambda *now: seen.append(now))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_saved_pass_comes_back_bit_for_bit(tmp_path):
    result = gradient_pass(opened(), tokens(random_ids(3, 6)), [Fisher(), TrueFisher(3)])
    result.save(tmp_path / "g.safetensors", "key")
    back = ScoreResult.load(tmp_path / "g.safetensors", "key", [Fisher(), TrueFisher(3)])
    assert back is not None
    assert back.tokens == 18
    for index, members in result.layers.items():
        for name, one in members.items():
            assert type(back.layers[index][name]) is type(one)
            np.testing.assert_array_equal(back.layers[index][name].value(), one.value())
            assert int(back.layers[index][name].state["length"]) == 6
            assert int(back.layers[index][name].state["sequences"]) == 3
