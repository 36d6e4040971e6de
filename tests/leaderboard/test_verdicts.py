"""Verdicts follow their stated rules, at the edges too."""

from __future__ import annotations

import numpy as np
import pytest

from prunebench.analysis.bootstrap import Sampled
from prunebench.mask import LayerMask, Mask


def sampled(low, high):
    """A statistic whose 95 % interval is [low, high]."""
    draws = np.concatenate([np.full(5000, float(low)), np.full(5000, float(high))])
    return Sampled((low + high) / 2, draws, 10)


@pytest.mark.parametrize(
    ("low", "high", "claimed", "verdict"),
    [
        (1, 2, 1, "seen"),
        (1, 2, -1, "reversed"),
        (-2, -1, 1, "reversed"),
        (-2, -1, -1, "seen"),
        (-1, 2, 1, "not detectable"),
        (0, 2, 1, "not detectable"),
        (-2, 0, 1, "not detectable"),
        (0, 0, 1, "not detectable"),
        (1e-12, 2, 1, "not detectable"),
    ],
)
def test_a_case_is_on_the_claimed_side_on_the_other_or_not_detectable(findings, low, high, claimed, verdict):
    cell = findings.verdicts.judged(sampled(low, high), claimed=claimed)
    assert cell.verdict == verdict
    assert str(cell).endswith(f"] {verdict}")
    assert cell.contrasts == 1


def test_a_number_that_rounds_to_zero_has_no_minus(findings):
    assert findings.verdicts.shown(sampled(-0.001, -0.001), 2) == "+0.00 [+0.00, +0.00]"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((1, 2, 0.1), "seen"),
        ((-1, -2, -3), "reversed"),
        ((1, 2, -0.1), "not detectable"),
        ((1, 2, 0), "not detectable"),
        ((0, 0, 0), "not detectable"),
    ],
)
def test_one_sign_on_every_draw(findings, values, verdict):
    assert findings.verdicts.on_every_draw(values, claimed=1) == verdict
    mirrored = {"seen": "reversed", "reversed": "seen"}.get(verdict, verdict)
    assert findings.verdicts.on_every_draw(values, claimed=-1) == mirrored


@pytest.mark.parametrize(
    ("kinds", "word", "counts", "short"),
    [
        ("ss", "seen", "seen on 2 of 2 models", "seen 2 of 2"),
        ("so", "partly seen", "seen on 1 of 2 models, not detectable on 1", "seen 1 of 2"),
        ("sa", "partly seen", "seen on 1 of 2 models, not seen on 1", "seen 1 of 2"),
        ("sro", "mixed", "seen on 1 of 3 models, reversed on 1, not detectable on 1", "seen 1, reversed 1 of 3"),
        ("rr", "reversed", "reversed on 2 of 2 models", "seen 0, reversed 2 of 2"),
        ("ro", "partly reversed", "reversed on 1 of 2 models, not detectable on 1", "seen 0, reversed 1 of 2"),
        ("oo", "not seen", "not detectable on 2 of 2 models", "seen 0 of 2"),
        ("ao", "not seen", "not seen on 1 of 2 models, not detectable on 1", "seen 0 of 2"),
        ("sm", "seen", "seen on 1 of 1 models, not measurable on 1", "seen 1 of 1, 1 not measurable"),
        ("mm", "not measurable", None, None),
        ("", "not measurable", None, None),
    ],
)
def test_a_finding_is_the_count_of_its_cases(findings, kinds, word, counts, short):
    verdict = findings.verdicts.Verdict
    names = {"s": verdict.SEEN, "r": verdict.REVERSED, "a": verdict.ABSENT, "o": verdict.OPEN, "m": verdict.MISSING}
    cells = [findings.verdicts.Cell("", names[kind]) for kind in kinds] + [findings.verdicts.Cell("no claim")]
    tally = findings.verdicts.Tally.of(cells)
    assert str(tally) == f"**{word}**" + (f" ({counts})" if counts else "")
    assert tally.short == f"**{word}**" + (f" ({short})" if short else "")


def test_cases_without_a_claim_are_counted_apart(findings):
    cell = findings.verdicts.Cell
    cells = [cell("", side=1), cell("", side=1), cell("", side=-1), cell("gone", findings.verdicts.Verdict.MISSING)]
    assert findings.verdicts.sides(cells, "cases") == "better on 2 of 3 cases, worse on 1"
    assert findings.verdicts.sides(cells[3:]) == "**not measurable**"


def mask(*pruned):
    return Mask("1:6x2 2:6x2", tuple(LayerMask(index + 1, 6, tuple(ids)) for index, ids in enumerate(pruned)))


def test_a_mask_differs_by_the_share_of_its_experts_that_the_other_keeps(findings):
    one, other = mask((0, 1), (2, 3)), mask((0, 2), (2, 3))
    assert findings.drift.share_differing(one, other) == 1 / 4
    assert findings.drift.share_differing(one, other, 1) == 1 / 2
    assert findings.drift.share_differing(one, other, 2) == 0


@pytest.mark.parametrize(
    "other", [mask((0,), (2, 3)), Mask("1:6x3 2:6x3", mask((0, 1), (2, 3)).layers), mask((), ())], ids=str
)
def test_masks_that_cannot_be_compared_are_a_gap(findings, other):
    with pytest.raises(findings.evidence.NotMeasurableError, match=r"masks (of different shapes|prune|of)|the masks"):
        findings.drift.share_differing(other, mask((0, 1), (2, 3)) if other.pruned_count else other)


@pytest.mark.parametrize(
    ("first", "second", "verdict", "splits"),
    [
        # One expert of the second domain differs from all of the first: 9 of 9 pairs across, none within.
        ([(0, 1)] * 3, [(0, 2)] * 3, "seen", (1, 10)),
        # No difference anywhere: every split is as far apart.
        ([(0, 1)] * 3, [(0, 1)] * 3, "not detectable", (10, 10)),
        # Domains alike, draws apart. Of the splits, those that set equal masks together have the larger excess.
        ([(0, 1), (2, 3), (4, 5)], [(0, 1), (2, 3), (4, 5)], "not detectable", (10, 10)),
    ],
)
def test_domains_are_apart_if_every_pair_across_is(findings, first, second, verdict, splits):
    groups = [[mask(ids, (0, 1)) for ids in group] for group in (first, second)]
    assert findings.drift.Drifts.of(*groups).verdict == verdict
    assert findings.drift.splits_as_far(*groups) == splits


def test_domains_nearer_than_draws_are_reversed(findings):
    # Within a group all three pairs share nothing; across, each pair shares one expert of two.
    first = [mask((0, 1), ()), mask((2, 3), ()), mask((4, 5), ())]
    drifts = findings.drift.Drifts
    assert drifts.of(first[:2], [mask((0, 2), ()), mask((1, 3), ())]).verdict == "reversed"


def test_groups_of_unequal_size_are_split_in_every_way(findings):
    groups = [mask((0, 1), ())] * 3, [mask((2, 3), ())] * 2
    assert findings.drift.splits_as_far(*groups) == (1, 10)
