"""The sections on operators against the maker's outcomes and records, computed without the page's code."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import numpy as np
import pytest

SUITES = ("multiple_choice", "arithmetic", "code", "perplexity")
TITLES = {"plain": "plain (keep)", "normed": "normed (renorm)"}
RATIOS = {"0.25": "25 %", "0.5": "50 %", "0.75": "75 %"}
MASKS = ("mone", "reap")
HOUSE = {"constant": "constant", "reroute@trained": "trained", "reroute@other": "other"}
FILLS = ("tilt(rank=4)", "tilt(rank=8)", "neurons(tilt_rank=8)", "svd(tilt_rank=8)", "svd-whitened(tilt_rank=8)")
HANDED = ("mora", "conmoe-nearest", "conmoe-functional", "compel", "compel@other")
ALL = (*HOUSE, *FILLS, *HANDED)
TILT, NEURONS, SVD, WHITENED = FILLS[1:]
LARGER = ("neurons(tilt_rank=8, times=4)", "svd(tilt_rank=8, times=4)")
SETTINGS = [(mask, ratio, model) for mask in MASKS for ratio in RATIOS for model in TITLES]


@pytest.fixture(scope="module")
def spec(maker):
    """An arm by the name of its operator on the page."""

    def make(name, model, ratio="0.5", mask="mone", fit=None):
        if name == "one more expert per layer":
            return maker.one_more(model)
        if name in HOUSE:
            return maker.arm(model, ratio, HOUSE[name], mask, fit=fit if name == "constant" else None)
        return maker.operator(name, model, ratio, mask, fit=fit)

    return make


@pytest.fixture(scope="module")
def difference(maker, hand, spec):
    """(value, draws) of one operator minus another."""

    def make(one, other, suite, *setting):
        return hand.difference(maker, *(spec(name, *setting) for name in (one, other)), suite)

    return make


def short(words):
    """A tally in the first table's words."""
    missing = words.count("not measurable")
    words = [word for word in words if word != "not measurable"]
    seen, back = words.count("seen"), words.count("reversed")
    name = "mixed" if seen and back else "not seen"
    if (seen or back) and not (seen and back):
        main = "seen" if seen else "reversed"
        name = main if seen + back == len(words) else f"partly {main}"
    gaps = f", {missing} not measurable" if missing else ""
    return f"**{name}** (seen {seen}{f', reversed {back}' if back else ''} of {len(words)}{gaps})"


def counted(signs, unit):
    """How many are better, worse, neither."""
    words = {1: "better", -1: "worse", 0: "not detectable"}
    parts = [f"{word} on {signs.count(sign)}" for sign, word in words.items() if sign in signs]
    parts[0] += f" of {len(signs)} {unit}"
    return ", ".join(parts)


def test_the_tilt_against_the_constant(sections, hand, difference):
    kinds = set()
    for ratio, shown in RATIOS.items():
        for model, title in TITLES.items():
            for suite, text in zip(SUITES, sections[10][0][shown, title], strict=True):
                value, draws = difference(TILT, "constant", suite, model, ratio)
                word = hand.word(draws, hand.better(suite))
                assert text == f"{hand.text(value, draws, hand.digits(suite))} {word}"
                kinds.add(word)
    assert kinds == {"seen", "reversed", "not detectable"}


def test_gains_by_the_damage_that_the_constant_leaves(sections, maker, hand, spec, difference):
    for mask, row in zip(MASKS, sections[10][1], strict=True):
        damage, gains = [], []
        for ratio in RATIOS:
            for model in TITLES:
                constant = spec("constant", model, ratio, mask)
                damage.append(hand.difference(maker, maker.Spec(model), constant, SUITES[0])[0])
                gains.append(difference(TILT, "constant", SUITES[0], model, ratio, mask))
        ranges = [(10, 1e9), (3, 10), (-1e9, 3)]
        texts = []
        for low, high in ranges:
            own = [hand.side(gain[1]) > 0 for left, gain in zip(damage, gains, strict=True) if low < left < high]
            texts.append(f"{sum(own)} of {len(own)}")
        rho = spearman(damage, [value for value, _ in gains])
        assert row[1:-2] == texts
        assert hand.Same(row[-2]) == f"{rho:+.2f}, n = 6"
        full, small = (tuple(map(int, texts[at].split(" of "))) for at in (0, 2))
        if full[1] and small[1]:
            assert row[-1] == ("seen" if full[0] == full[1] and not small[0] else "not seen")
        else:
            assert row[-1].startswith("not measurable: no model has damage")


def ranked(*sides):
    """Ranks about their mean, of values that are one value if they differ by rounding only."""
    return [
        np.array([sum(round(b - a, 9) > 0 for a in own) + sum(round(b - a, 9) == 0 for a in own) / 2 for b in own])
        - len(own) / 2
        for own in sides
    ]


def spearman(one, other):
    return float(np.corrcoef(*ranked(one, other))[0, 1])


def test_every_operator_against_both_references(sections, hand, difference):
    for suite, table in zip(SUITES, sections[10][2:6], strict=True):
        for row, (mask, ratio, model) in zip(table, SETTINGS, strict=True):
            assert row[:3] == [mask, RATIOS[ratio], TITLES[model]]
            for name, text in zip((*FILLS, *HANDED), row[3:], strict=True):
                parts = []
                for reference in ("constant", "reroute@trained"):
                    value, draws = difference(name, reference, suite, model, ratio, mask)
                    parts.append(f"{round(value, 9) + 0.0:+.{hand.digits(suite)}f}{'*' * abs(hand.side(draws))}")
                assert hand.Same(text) == " / ".join(parts)


@pytest.fixture(scope="module")
def best_of(maker, hand, spec):
    """(best, detectably below, all others) of some operators on the mask of (model, ratio, criterion)."""

    def make(names, suite, *setting):
        arms = {name: spec(name, *setting) for name in names}
        scores = {
            name: round(hand.better(suite) * hand.statistic(maker, arm, suite)[0], 9) for name, arm in arms.items()
        }
        best = [name for name in names if scores[name] == max(scores.values())]
        leads = {name: hand.difference(maker, arms[best[0]], arm, suite)[1] for name, arm in arms.items()}
        below = {name for name, draws in leads.items() if hand.side(draws) * hand.better(suite) > 0}
        return best, below, [name for name in names if name not in best and name not in below]

    return make


def test_the_best_of_all_operators_and_whether_one_is_everywhere(sections, best_of):
    _, everywhere = sections[10][6:8]
    for at, suite in enumerate(SUITES):
        tops, belows = [], []
        for row, (mask, ratio, model) in zip(sections[10][6], SETTINGS, strict=True):
            best, below, near = best_of(ALL, suite, model, ratio, mask)
            name = " = ".join(best) if len(best) <= 3 else f"{len(best)} with one score"
            assert row[3 + at] == (f"{name} (+{len(near)})" if near else name + "*" * bool(below))
            tops.append(best)
            belows.append(below)
        for name, row in zip(ALL, everywhere, strict=False):
            top, low = (sum(name in own for own in kind) for kind in (tops, belows))
            assert row[:1] + row[1 + at : 2 + at] == [name, f"best {top}, below {low} of {len(SETTINGS)}"]
        beaten = sum(any(name in below for below in belows) for name in ALL)
        always = any(all(name in best for best in tops) for name in ALL)
        word = "reversed" if always else "seen" if beaten == len(ALL) else "not detectable"
        assert everywhere[-1][1 + at] == f"**{word}** ({beaten} of {len(ALL)} operators below the best of some setting)"


def test_the_best_of_three_on_both_masks(sections, best_of):
    for model, title in TITLES.items():
        for suite, text in zip(SUITES, sections[10][8]["50 %", title], strict=True):
            found = [best_of(("constant", TILT, "reroute@trained"), suite, model, "0.5", mask) for mask in MASKS]
            leads = [bool(below) and not near for _, below, near in found]
            shown = " / ".join(" = ".join(best) + "*" * lead for (best, _, _), lead in zip(found, leads, strict=True))
            word = "reversed" if all(leads) else "not detectable"
            word = "seen" if set(found[0][0]) & set(found[1][0]) else word
            assert text == f"{shown} {word}"


PAIRS = {
    (NEURONS, TILT): 0,
    (TILT, SVD): 1,
    (TILT, WHITENED): 1,
    (SVD, "constant"): 0,
    (WHITENED, "constant"): 0,
    (TILT, FILLS[0]): 1,
    (LARGER[0], TILT): 1,
    (LARGER[1], "constant"): 0,
    (TILT, "one more expert per layer"): 1,
}


def told(hand, value, draws, suite, claimed):
    """A difference with its verdict, or which is better where nothing is claimed."""
    side = hand.side(draws) * hand.better(suite)
    word = (
        {1: "better", -1: "worse", 0: "not detectable"}[side]
        if not claimed
        else hand.word(draws, claimed * hand.better(suite))
    )
    return hand.text(value, draws, hand.digits(suite)), word, side


def test_what_a_budget_buys_and_stores(sections, maker, hand, spec, difference):
    rows = {(row[0].strip("*"), row[1].strip("*")): row[2:] for row in sections[11][0]}
    for (one, other), claimed in PAIRS.items():
        words = {suite: [] for suite in SUITES}
        for model, title in TITLES.items():
            stored, *cells = rows[f"{one} − {other}", title]
            sizes = [maker.stored(spec(name, model)) for name in (one, other, "constant")]
            assert stored == f"{(sizes[0] - sizes[2]) / 1000:+.1f} / {(sizes[1] - sizes[2]) / 1000:+.1f}"
            for suite, text in zip(SUITES, cells, strict=True):
                value, draws = difference(one, other, suite, model)
                shown, word, _ = told(hand, value, draws, suite, claimed)
                if (one, other) == (NEURONS, TILT):
                    low, high = np.percentile(draws, [5, 95])
                    shown += f" ±{max(abs(low), abs(high)):.{hand.digits(suite)}f}"
                assert hand.Same(text) == f"{shown} {word}"
                words[suite].append(word)
        if claimed:
            assert rows[f"{one} − {other}", "all"][1:] == [hand.tally(words[suite], "models") for suite in SUITES]
        else:
            assert (f"{one} − {other}", "all") not in rows


def test_budgets_on_the_other_masks_and_ratios(sections, hand, difference):
    settings = [(mask, ratio) for ratio in RATIOS for mask in MASKS if (mask, ratio) != ("mone", "0.5")]
    expected = []
    for (one, other), claimed in list(PAIRS.items())[:6]:
        for mask, ratio in settings:
            row = [f"{one} − {other}", mask, RATIOS[ratio]]
            for suite in SUITES:
                cells = [told(hand, *difference(one, other, suite, m, ratio, mask), suite, claimed) for m in TITLES]
                row.append(
                    short([word for _, word, _ in cells]) if claimed else counted([c[2] for c in cells], "models")
                )
            expected.append(row)
    assert sections[11][1] == expected


REFERENCE = dict.fromkeys(HANDED, "reroute@trained") | {"compel@other": "reroute@other"}


def test_survivors_against_rerouting(sections, hand, difference):
    rows = {(row[0].strip("*"), row[1].strip("*")): row[2:] for row in sections[12][0]}
    for one, other in (*REFERENCE.items(), ("conmoe-functional", "conmoe-nearest")):
        claimed = 0 if other == "conmoe-nearest" else -1
        for model, title in TITLES.items():
            for suite, text in zip(SUITES, rows[f"{one} − {other}", title], strict=True):
                value, draws = difference(one, other, suite, model)
                shown, word, _ = told(hand, value, draws, suite, claimed)
                assert hand.Same(text) == f"{shown} {word}"


def test_survivors_counted_against_rerouting_and_the_constant(sections, hand, difference):
    pairs = [*REFERENCE.items(), *((one, "constant") for one in HANDED)]
    expected = []
    for one, other in pairs:
        claimed = -1 if other != "constant" or one.startswith("conmoe") else 0
        for ratio, shown in RATIOS.items():
            row = [shown, f"{one} − {other}"]
            for suite in SUITES:
                cells = [
                    told(hand, *difference(one, other, suite, model, ratio, mask), suite, claimed)
                    for mask in MASKS
                    for model in TITLES
                ]
                row.append(
                    short([word for _, word, _ in cells]) if claimed else counted([c[2] for c in cells], "cases")
                )
            expected.append(row)
    assert sections[12][1] == expected


def test_whom_the_slots_went_to(sections, maker, spec):
    kinds = set()
    for ratio, shown in RATIOS.items():
        for model, title in TITLES.items():
            columns, signs = [[], [], [], [], []], []
            for mask in MASKS:
                arms = [spec(name, model, ratio, mask) for name in ("conmoe-nearest", "conmoe-functional")]
                loads = [
                    [(layer, to) for layer, own in maker.targets(arm).items() for _, to in sorted(own.items())]
                    for arm in arms
                ]
                outcomes = [
                    maker.outcome(arms[1], layer, e) for layer, gone in maker.pruned(arms[1]).items() for e in gone
                ]
                columns[0].append(str(len(loads[0])))
                for at, own in enumerate(loads):
                    columns[1 + at].append(f"{len(set(own))}, {max(map(own.count, own))}")
                columns[3].append(str(sum(a != b for a, b in zip(*loads, strict=True))))
                names = ("functional", "nearest already best", "folds disagree", "empty fold")
                columns[4].append(" · ".join(str(outcomes.count(kind)) for kind in names))
                signs.append(np.sign(len(set(loads[1])) - len(set(loads[0]))))
            word = "seen" if signs == [-1, -1] else "reversed" if signs == [1, 1] else "not detectable"
            assert sections[12][2][shown, title] == [*(" / ".join(own) for own in columns), word]
            kinds.add(word)
    assert {"seen", "reversed"} <= kinds


def test_which_proxies_are_accepted(sections, maker, hand, spec):
    for ratio, shown in RATIOS.items():
        for model, title in TITLES.items():
            parts, shares = [[], [], []], []
            for mask in MASKS:
                rows = [row for own in maker.fit(spec("mora", model, ratio, mask)).values() for row in own.values()]
                known = sorted(row[4] for row in rows if row[4] is not None)
                accepted = sum(value > maker.PROXIES for value in known)
                shares.append(accepted / len(rows))
                places = [share * (len(known) - 1) for share in (0, 0.5, 0.9, 1)]
                cuts = (
                    [
                        known[int(x)] + (x - int(x)) * (known[min(int(x) + 1, len(known) - 1)] - known[int(x)])
                        for x in places
                    ]
                    if known
                    else []
                )
                parts[0].append(f"{accepted} of {len(rows)}")
                parts[1].append(", ".join(f"{cut:.2f}" for cut in cuts) or "none")
                parts[2].append(str(len(rows) - len(known)))
            told, word, quantiles, untested = sections[12][3][shown, title]
            assert (told, untested) == (" / ".join(parts[0]), " / ".join(parts[2]))
            assert quantiles == hand.Same(" / ".join(parts[1]))
            assert word == ("seen" if max(shares) < 0.05 else "not seen")


def shares_of(maker, spec_):
    """By layer (in-sample, weighted, held out) shares of error that are gone, None where nothing has weight."""
    layers = {}
    for layer, own in maker.fit(spec_).items():
        rows = [row for row in own.values() if row[2]]
        left, whole = sum(row[1] for row in rows), sum(row[2] for row in rows)
        gated = sum(row[3] * row[2] for row in rows)
        held = [row for row in rows if row[4] is not None and spec_.operator != "conmoe-functional"]
        layers[layer] = (
            1 - left / whole if rows else None,
            1 - sum(row[3] * row[1] for row in rows) / gated if rows else None,
            sum(row[3] * row[2] * row[4] for row in held) / sum(row[3] * row[2] for row in held) if held else None,
        )
    return layers


def over_layers(layers):
    columns = [[value for value in column if value is not None] for column in zip(*layers.values(), strict=True)]
    return [sum(own) / len(own) if own else None for own in columns]


def in_percent(shares):
    return " / ".join("–" if share is None else f"{round(100 * share, 9) + 0.0:.1f}" for share in shares)


FITTED = (*FILLS, "mora", "conmoe-functional")


def test_fit_shares_by_layer(sections, maker, hand, spec):
    rows = iter(sections[13][0])
    for model, title in TITLES.items():
        for layer in maker.LAYERS:
            row = next(rows)
            expected = [in_percent(shares_of(maker, spec(name, model))[layer]) for name in FITTED]
            assert row[:2] == [title, str(layer)]
            assert [hand.Same(text) for text in row[2:]] == expected


def test_mean_fit_shares_and_what_they_claim(sections, maker, spec):
    for ratio, shown in RATIOS.items():
        for model, title in TITLES.items():
            means = {name: over_layers(shares_of(maker, spec(name, model, ratio))) for name in FITTED}
            row = sections[13][1][shown, title]
            assert row[:7] == [in_percent(means[name]) for name in FITTED]
            by_layer = [own[0] for own in shares_of(maker, spec(TILT, model, ratio)).values()]
            assert row[7] == ("seen" if by_layer[-1] == max(own or 0 for own in by_layer) else "not seen")
            order = [means[name][0] for name in (TILT, NEURONS, WHITENED, SVD)]
            falls = [one > other for one, other in pairwise(order)]
            assert row[8] == ("seen" if all(falls) else "not seen" if any(falls) else "reversed")
            if ratio != "0.5":
                assert row[9] == ""
                continue
            larger = over_layers(shares_of(maker, spec(LARGER[0], model)))[0]
            word = "seen" if larger > means[TILT][0] else "reversed"
            assert row[9] == f"{100 * larger:.1f} against {100 * means[TILT][0]:.1f} {word}"


def test_experts_without_a_fit(sections, maker, spec):
    for ratio, shown in RATIOS.items():
        for model, title in TITLES.items():
            texts = []
            for name in FITTED:
                parts = []
                for mask in MASKS:
                    rows = [r for own in maker.fit(spec(name, model, ratio, mask)).values() for r in own.values()]
                    parts.append(f"{sum(not row[2] for row in rows)} of {len(rows)}")
                texts.append(" / ".join(parts))
            assert sections[13][2][shown, title] == texts


def test_whether_held_out_shares_order_scores(sections, maker, hand, spec):
    cases = [(mask, suite) for suite in ("perplexity", "multiple_choice") for mask in MASKS]
    for ratio, shown in RATIOS.items():
        for model, title in TITLES.items():
            for (mask, suite), text in zip(cases, sections[13][3][shown, title], strict=True):
                names = [*FILLS, *(LARGER if (mask, ratio) == ("mone", "0.5") else ())]
                shares = [over_layers(shares_of(maker, spec(name, model, ratio, mask)))[2] for name in names]
                shares = [0.0, *shares]
                scores = [
                    hand.better(suite) * hand.statistic(maker, spec(name, model, ratio, mask), suite)[0]
                    for name in ("constant", *names)
                ]
                rho = spearman(shares, scores)
                centred = ranked(shares, scores)
                orders = centred[1][np.array(list(permutations(range(len(shares)))))]
                p = float(np.mean(np.abs(orders @ centred[0]) >= abs(centred[1] @ centred[0]) - 1e-9))
                word = "not detectable" if p >= 0.05 else "seen" if rho > 0 else "reversed"
                assert hand.Same(text) == f"{rho + 0.0:+.2f}, n = {len(shares)}, p = {p:.3f} {word}"


def test_effects_on_other_draws_of_the_fit(sections, maker, hand, spec):
    rows = {(row[0].strip("*"), row[1].strip("*")): row[2:] for row in sections[14][0]}
    sizes = {row[0]: row[1:] for row in sections[14][1]}
    kinds = set()
    for name in maker.REFITTED:
        reference = "constant" if name in FILLS else "reroute@trained"
        smaller = {suite: [] for suite in SUITES}
        for model, title in TITLES.items():
            for suite, text in zip(SUITES, rows[f"{name} − {reference}", title], strict=True):
                moves = [
                    hand.difference(
                        maker, *(spec(who, model, fit=("world:general", draw)) for who in (name, reference)), suite
                    )
                    for draw in "ABC"
                ]
                n = hand.digits(suite)
                values = [value for value, _ in moves]
                stars = ["*" * abs(hand.side(draws)) for _, draws in moves]
                rest = [f"{round(v, 9) + 0.0:+.{n}f}{star}" for v, star in zip(values[1:], stars[1:], strict=True)]
                signs = {int(value > 1e-9) - int(value < -1e-9) for value in values}
                word = "not detectable" if 0 in signs else "seen" if len(signs) == 1 else "not seen"
                spread = max(values) - min(values)
                shown = " / ".join([hand.text(*moves[0], n) + stars[0], *rest])
                assert hand.Same(text) == f"{shown}, range {spread:.{n}f} {word}"
                least = min(map(abs, values))
                none = math.isclose(max(map(abs, values)), 0, abs_tol=1e-9)
                smaller[suite].append("not detectable" if none else "seen" if spread < least else "not seen")
                kinds.add(word)
        assert sizes[f"{name} − {reference}"] == [short(smaller[suite]) for suite in SUITES]
    assert {"seen", "not seen"} <= kinds


def test_what_is_measured_is_not_called_out_of_reach(sections):
    limits = " ".join(row[0] for row in sections[15][0])
    for told in ("The tilt beats the constant", "Slot remapping", "equals the tilt at its budget"):
        assert told not in limits
    assert "Fitted gains survive quantization" in limits
