"""Every number and verdict of the page against the maker's outcomes, computed without the page's code."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

SUITES = ("multiple_choice", "arithmetic", "code", "perplexity")
OPERATORS = ("constant", "trained", "other")
NAMES = {"constant": "constant", "trained": "reroute@trained", "other": "reroute@other"}
GENERAL, OWN = ("world:general", "A"), ("world:arithmetic", "A")
TITLES = {"plain": "plain (keep)", "normed": "normed (renorm)"}
RATIOS = {"0.25": "25 %", "0.5": "50 %", "0.75": "75 %"}
GRID = [(ratio, model, suite) for ratio in RATIOS for model in TITLES for suite in SUITES]


def cell(table, ratio, row, suite):
    return table[RATIOS[ratio], row][SUITES.index(suite)]


def judged(maker, hand, arms, suite, claimed):
    one, other = arms
    value, draws = hand.difference(maker, one, other, suite)
    return f"{hand.text(value, draws, hand.digits(suite))} {hand.word(draws, claimed * hand.better(suite))}"


def test_the_trained_scale_against_the_other_on_mones_mask(sections, maker, hand):
    words = {}
    for ratio, model, suite in GRID:
        arms = [maker.arm(model, ratio, operator) for operator in ("trained", "other")]
        expected = judged(maker, hand, arms, suite, 1)
        assert cell(sections[1][0], ratio, TITLES[model], suite) == expected
        words.setdefault((ratio, suite), []).append(expected.rpartition("] ")[2])
    assert {word for cells in words.values() for word in cells} == {"seen", "reversed", "not detectable"}
    for (ratio, suite), cells in words.items():
        assert cell(sections[1][0], ratio, "all", suite) == hand.tally(cells, "models")


def test_the_trained_scale_on_the_mean_of_the_other_masks(sections, maker, hand):
    for ratio, model, suite in GRID:
        single = [
            hand.difference(maker, *(maker.arm(model, ratio, o, criterion) for o in ("trained", "other")), suite)
            for criterion in ("reap", "sge", "frequency", "random")
        ]
        value, draws = hand.mean([one[0] for one in single]), hand.mean([one[1] for one in single])
        signs = [hand.side(one[1]) * hand.better(suite) for one in single]
        counts = " / ".join(str(signs.count(sign)) for sign in (1, -1, 0))
        text = f"{hand.text(value, draws, hand.digits(suite))} ({counts}) {hand.word(draws, hand.better(suite))}"
        assert cell(sections[1][1], ratio, TITLES[model], suite) == text


def test_reroute_against_constant_and_what_the_scale_turns(sections, maker, hand):
    kinds = set()
    for ratio, model, suite in GRID:
        constant = maker.arm(model, ratio, "constant")
        signs = []
        for table, (operator, claimed) in enumerate((("trained", 1), ("other", -1))):
            one = maker.arm(model, ratio, operator)
            expected = judged(maker, hand, (one, constant), suite, claimed)
            assert cell(sections[2][table], ratio, TITLES[model], suite) == expected
            signs.append(hand.side(hand.difference(maker, one, constant, suite)[1]) * hand.better(suite))
        kind = "not detectable" if 0 in signs else "not seen" if signs[0] == signs[1] else None
        kind = kind or ("seen" if signs == [1, -1] else "reversed")
        kinds.add(kind)
        words = " / ".join({1: "better", -1: "worse", 0: "?"}[sign] for sign in signs)
        assert cell(sections[2][2], ratio, TITLES[model], suite) == f"{words} {kind}"
    assert kinds >= {"not detectable", "not seen"}


def test_the_best_operator_on_each_mask(sections, maker, hand):
    rows = {(row[0], row[1]): row[2:] for row in sections[2][3]}
    for model in TITLES:
        for suite in SUITES:
            title = "ln perplexity ↓" if suite == "perplexity" else suite.replace("_", " ")
            *shown, verdict = rows[TITLES[model], title]
            best, leading = [], []
            for criterion, text in zip(maker.CRITERIA, shown, strict=True):
                arms = [maker.arm(model, "0.5", operator, criterion) for operator in OPERATORS]
                scores = [round(hand.better(suite) * hand.statistic(maker, one, suite)[0], 9) for one in arms]
                first = sorted(range(3), key=lambda at: -scores[at])[:2]
                lead = hand.side(hand.difference(maker, *(arms[at] for at in first), suite)[1]) * hand.better(suite) > 0
                names = [NAMES[o] for o, score in zip(OPERATORS, scores, strict=True) if score == max(scores)]
                assert text == " = ".join(names) + "*" * lead
                if criterion != "random":
                    best.append(set(names))
                    leading += [tuple(names)] * lead
            kind = "seen" if set.intersection(*best) else "reversed" if len(set(leading)) > 1 else "not detectable"
            assert verdict == f"{len(leading)} of 4 leads detectable {kind}"


def test_shares_of_the_dense_score_and_what_multiple_choice_hides(sections, maker, hand):
    chance = 100 * (1 / 4 + 1 / 2) / 2
    for ratio in ("0.25", "0.5"):
        for model in TITLES:
            kept = {}
            for name, suite, floor in (
                ("raw", "multiple_choice", 0),
                ("above", "multiple_choice", chance),
                ("arithmetic", "arithmetic", 0),
                ("code", "code", 0),
            ):
                arm, dense = (
                    hand.statistic(maker, one, suite)
                    for one in (maker.arm(model, ratio, "constant"), maker.Spec(model))
                )
                kept[name] = tuple(100 * (a - floor) / (d - floor) for a, d in zip(arm, dense, strict=True))
            for text, (value, draws) in zip(sections[3][0][RATIOS[ratio], TITLES[model]], kept.values(), strict=True):
                low, high = hand.interval(draws)
                assert text == f"{value:.1f} [{low:.1f}, {high:.1f}]"
            pairs = [(one, other) for one in ("raw", "above") for other in ("arithmetic", "code")]
            for text, (one, other) in zip(sections[3][1][RATIOS[ratio], TITLES[model]], pairs, strict=True):
                value, draws = (a - b for a, b in zip(kept[one], kept[other], strict=True))
                assert text == f"{hand.text(value, draws, 1)} {hand.word(draws, 1)}"


def test_mask_drift_across_domains_and_between_draws(sections, maker, hand):
    kinds = set()
    for ratio in RATIOS:
        for model in TITLES:
            groups = [
                [maker.pruned(maker.arm(model, ratio, "constant", mask=(text, draw))) for draw in "ABC"]
                for text in ("world:general", "world:arithmetic")
            ]
            parts = hand.drifts(*groups)
            texts = [f"{100 * hand.mean(p):.1f} ({100 * min(p):.1f} to {100 * max(p):.1f})" for p in parts]
            within = parts[0] + parts[1]
            apart, near = min(parts[2]) > max(within) + 1e-9, max(parts[2]) < min(within) - 1e-9
            kind = "seen" if apart else "reversed" if near else "not detectable"
            times = f"{hand.mean(parts[2]) / hand.mean(parts[0]):.1f} ×" if sum(parts[0]) else None

            def excess(one, other):
                own = hand.drifts(one, other)
                return hand.mean(own[2]) - hand.mean(own[0] + own[1])

            masks = groups[0] + groups[1]
            splits = [group for group in combinations(range(6), 3) if 0 in group]
            far = [
                excess([masks[at] for at in group], [masks[at] for at in range(6) if at not in group])
                >= excess(*groups) - 1e-9
                for group in splits
            ]
            row = sections[4][0][RATIOS[ratio], TITLES[model]]
            assert row == [*texts, times or "no drift between general draws", f"{sum(far)} of {len(far)}", kind]
            assert len(far) == 10
            kinds.add(kind)
    assert "seen" in kinds


def test_mask_drift_by_layer(sections, maker, hand):
    for (row,), model in zip(((row,) for row in sections[4][1]), ("plain", "normed"), strict=True):
        groups = [
            [maker.pruned(maker.arm(model, "0.5", "constant", mask=(text, draw))) for draw in "ABC"]
            for text in ("world:general", "world:arithmetic")
        ]
        parts = []
        for layer in maker.LAYERS:
            own = [[{layer: mask[layer]} for mask in group] for group in groups]
            general, _, across = hand.drifts(*own)
            parts.append(f"layer {layer}: {100 * hand.mean(across):.0f} / {100 * hand.mean(general):.0f}")
        assert row == [TITLES[model], ", ".join(parts)]


def test_in_domain_calibration_its_gain_its_share_and_its_price(sections, maker, hand):
    for ratio in RATIOS:
        for model in TITLES:
            for operator in OPERATORS:
                own, general = (maker.arm(model, ratio, operator, mask=mask) for mask in (OWN, GENERAL))
                shares = []
                for one in (general, own):
                    (a, draws_a), (d, draws_d) = (
                        hand.statistic(maker, spec, "arithmetic") for spec in (one, maker.Spec(model))
                    )
                    low, high = hand.interval(100 * draws_a / draws_d)
                    shares.append(f"{100 * a / d:.1f} [{low:.1f}, {high:.1f}]")
                assert sections[5][0][RATIOS[ratio], f"{TITLES[model]}, {NAMES[operator]}"] == [
                    judged(maker, hand, (own, general), "arithmetic", 1),
                    " → ".join(shares),
                    judged(maker, hand, (own, general), "multiple_choice", -1),
                ]


def test_in_domain_gain_of_the_constant_on_every_draw(sections, maker, hand):
    for ratio in RATIOS:
        for model in TITLES:
            texts, values = [], []
            for draw in "ABC":
                arms = (maker.arm(model, ratio, "constant", mask=(text, draw)) for text in (OWN[0], GENERAL[0]))
                value, draws = hand.difference(maker, *arms, "arithmetic")
                word = {1: "better", -1: "worse", 0: "not detectable"}[hand.side(draws)]
                texts.append(f"{hand.text(value, draws, 2)} {word}")
                values.append(value)
            up, down = all(v > 1e-9 for v in values), all(v < -1e-9 for v in values)
            word = "seen" if up else "reversed" if down else "not detectable"
            assert sections[5][1][RATIOS[ratio], TITLES[model]] == [*texts, word]


def test_mask_and_fit_crossed(sections, maker, hand):
    effects = {
        "fit, on the general mask": ((GENERAL, OWN), (GENERAL, GENERAL), -1),
        "fit, on the arithmetic mask": ((OWN, OWN), (OWN, GENERAL), -1),
        "mask, with the general fit": ((OWN, GENERAL), (GENERAL, GENERAL), 1),
        "mask, with the arithmetic fit": ((OWN, OWN), (GENERAL, OWN), 1),
        "mask alone − fit alone": ((OWN, GENERAL), (GENERAL, OWN), 0),
    }
    for model, title in TITLES.items():
        for effect, (*cells, claimed) in effects.items():
            for suite in SUITES:
                one, other = (maker.arm(model, "0.5", "constant", mask=mask, fit=fit) for mask, fit in cells)
                value, draws = hand.difference(maker, one, other, suite)
                word = {1: "better", -1: "worse", 0: "not detectable"}[hand.side(draws) * hand.better(suite)]
                if suite == "multiple_choice" and claimed:
                    word = hand.word(draws, claimed)
                expected = f"{hand.text(value, draws, hand.digits(suite))} {word}"
                assert cell(sections[6][0], "0.5", f"{title}: {effect}", suite) == expected


def test_calibration_noise_of_the_fit_and_of_the_whole_method(sections, maker, hand):
    refits, signs, whole, larger = sections[7]
    for model, title in TITLES.items():
        for suite in SUITES:
            n = hand.digits(suite)
            arms = [maker.arm(model, "0.5", "constant", fit=("world:general", draw)) for draw in "ABC"]
            values = [hand.statistic(maker, one, suite)[0] for one in arms]
            found = sum(hand.side(hand.difference(maker, one, arms[0], suite)[1]) != 0 for one in arms[1:])
            listed = " / ".join(f"{value:.{n}f}" for value in values)
            spread = max(values) - min(values)
            assert cell(refits, "0.5", title, suite) == f"{listed}, spread {spread:.{n}f} ({found} of 2)"
            for operator in ("trained", "other"):
                moves = [hand.difference(maker, maker.arm(model, "0.5", operator), one, suite) for one in arms]
                rest = " / ".join(f"{round(value, 9) + 0.0:+.{n}f}" for value, _ in moves[1:])
                kinds = {int(value > 1e-9) - int(value < -1e-9) for value, _ in moves}
                word = "not detectable" if 0 in kinds else "seen" if len(kinds) == 1 else "not seen"
                star = "*" * abs(hand.side(moves[0][1]))
                expected = f"{hand.text(*moves[0], n)}{star} / {rest} {word}"
                assert cell(signs, "0.5", f"{title}, {NAMES[operator]}", suite) == expected
            for ratio in RATIOS:
                for text in ("general", "arithmetic"):
                    drawn = [maker.arm(model, ratio, "constant", mask=(f"world:{text}", draw)) for draw in "ABC"]
                    scores = [hand.statistic(maker, one, suite)[0] for one in drawn]
                    listed = " / ".join(f"{score:.{n}f}" for score in scores)
                    expected = f"{listed}, spread {max(scores) - min(scores):.{n}f}"
                    assert cell(whole, ratio, f"{title}, {text}", suite) == expected
                    if (ratio, text) == ("0.5", "general"):
                        more = round(max(scores) - min(scores) - spread, 9) + 0.0
                        word = "seen" if more > 0 else "reversed" if more < 0 else "not detectable"
                        assert cell(larger, "0.5", title, suite) == f"{more:+.{n}f} {word}"


def orders(pairs):
    """(opposite, alike, one, neither) of pairs of signs."""
    counts = [0, 0, 0, 0]
    for a, b in pairs:
        counts[3 if a == b == 0 else 2 if 0 in (a, b) else 1 if a == b else 0] += 1
    return counts


def test_how_suites_order_operators(sections, maker, hand):
    kinds = set()
    for ratio, shown in RATIOS.items():
        for model, title in TITLES.items():
            arms = {(c, o): maker.arm(model, ratio, o, c) for c in maker.CRITERIA for o in OPERATORS}

            def sign(suite, criterion, one, other, arms=arms):
                difference = hand.difference(maker, arms[criterion, one], arms[criterion, other], suite)
                return hand.side(difference[1]) * hand.better(suite)

            row = sections[8][0][shown, title]
            cases = [(masks, suite) for masks in (["mone"], maker.CRITERIA) for suite in ("arithmetic", "code")]
            for text, (masks, suite) in zip(row, cases, strict=True):
                counts = orders(
                    [
                        tuple(sign(s, c, *pair) for s in ("multiple_choice", suite))
                        for c in masks
                        for pair in combinations(OPERATORS, 2)
                    ]
                )
                word = "seen" if counts[0] else "not seen" if counts[1] else "not detectable"
                assert text == f"{' / '.join(map(str, counts))} {word}"

            *row, moving = sections[8][1][shown, title]
            for text, suite in zip(row, ("multiple_choice", "arithmetic", "code"), strict=True):
                counts = orders(
                    [
                        tuple(sign(s, c, o, "constant") for s in ("perplexity", suite))
                        for c in maker.CRITERIA
                        for o in ("trained", "other")
                    ]
                )
                word = "seen" if counts[0] else "not seen" if counts[1] else "not detectable"
                assert text == f"{' / '.join(map(str, counts))} {word}"
            alike = []
            for criterion in maker.CRITERIA:
                sides = {sign(s, criterion, o, "constant") for s in ("perplexity", SUITES[0]) for o in OPERATORS[1:]}
                if len(sides) == 1 and 0 not in sides:
                    alike.append(tuple(sign(s, criterion, "trained", "other") for s in ("perplexity", SUITES[0])))
            counts = orders(alike)
            word = "reversed" if counts[0] else "seen" if counts[1] else "not detectable"
            none = f"not measurable: on no mask of {model} at {shown} did both reroutes move alike"
            assert moving == (f"{' / '.join(map(str, counts))} {word}" if alike else none)
            kinds |= {word} if alike else {"not measurable"}
    assert kinds >= {"seen", "reversed", "not measurable"}


def test_what_rerouting_did_to_the_gates(sections, maker):
    _, shown, trends = sections[9]
    for ratio in RATIOS:
        for model, title in TITLES.items():
            for criterion, mask in [(c, GENERAL) for c in maker.CRITERIA] + [("mone", OWN)]:
                columns = [[], [], [], []]
                for scale in ("trained", "other"):
                    counts = maker.routing(maker.arm(model, ratio, scale, criterion, mask=mask)).values()
                    calls, displaced, total, above = (sum(column) for column in zip(*counts, strict=True))
                    columns[0].append(f"{100 * displaced / calls:.1f}")
                    columns[1].append(f"{total / displaced:.3f}")
                    columns[2].append(f"{(total + calls - displaced) / calls:.3f}")
                    columns[3].append(f"{100 * above / calls:.1f}")
                text = f"{criterion} ({mask[0].removeprefix('world:')} A)"
                row = [" / ".join(column) for column in columns]
                if model == "plain":
                    row[2] = "keep is trained"
                assert shown[RATIOS[ratio], f"{title}, {text}"] == row
    for shown_title, *words in trends:
        model = {title: model for model, title in TITLES.items()}[shown_title]
        series = []
        for ratio in RATIOS:
            counts = maker.routing(maker.arm(model, ratio, "other")).values()
            calls, displaced, total, above = (sum(column) for column in zip(*counts, strict=True))
            mass = (total + calls - displaced) / calls if model == "normed" else total / displaced
            series.append((displaced / calls, -mass, above))
        first, second, third = zip(*series, strict=True)
        holds = [all(a < b for a, b in pairwise(one)) for one in (first, second)] + [min(third) > 0]
        assert words == ["seen" if one else "not seen" for one in holds]


def test_the_first_table_repeats_the_counts_of_the_sections(page, maker, hand, reading):
    summary = reading.tables(page)[0]
    assert summary[0] == ["section", "finding", "in the paper", "here"]
    line = next(row for row in summary if "was trained with (MoNE's mask)" in row[1])[3].split("<br>")[0]
    parts = []
    for ratio, shown in RATIOS.items():
        pairs = [[maker.arm(model, ratio, operator) for operator in ("trained", "other")] for model in TITLES]
        words = [judged(maker, hand, pair, SUITES[0], 1).rpartition("] ")[2] for pair in pairs]
        name = hand.tally(words, "models").split(" (")[0]
        reversals = f", reversed {words.count('reversed')}" if "reversed" in words else ""
        parts.append(f"{shown} {name} (seen {words.count('seen')}{reversals} of 2)")
    assert line == f"multiple choice: {', '.join(parts)}"


def test_the_page_says_how_often_it_looked_and_that_it_corrects_nothing(page):
    assert re.search(r"holds intervals against zero [\d,]+ times", page)
    assert "They cover the choice of test items only" in page
    assert "not measurable: no run of" not in page.replace(
        "outlasts a new mask: not measurable: no run of plain mone (general B) 50 % reroute@trained", ""
    )
