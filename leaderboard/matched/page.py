"""The page: tables of App. F's shape, each from answers or from scored arms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from leaderboard.findings.text import Table, escaped, percent, prose
from leaderboard.matched.arms import ARITHMETIC, MODELS, OPERATORS, RATIOS, SETTINGS, Arm, arms_of, front

from prunebench.analysis import RESAMPLES, SEED, Answer, Gap, Report, Shelf, answers, read_declaration
from prunebench.analysis.contrasts import runs_of
from prunebench.analysis.report import shown_bound, shown_difference, shown_p
from prunebench.analysis.scores import Scores
from prunebench.mask import write_atomically
from prunebench.storage import Match, gap_text, match

__all__ = ["PAGE", "matched_page", "write_matched"]

PAGE: Final = "matched.md"
CHOICE: Final = "multiple_choice"
ARITHMETIC_SUITE: Final = "arithmetic"
GAINS, AGAINST = "gain under quantization", "pruned against quantized"
IN_DOMAIN, TEXTS = "in-domain arithmetic", "the quantizer's text"
NONE: Final = "—"


def write_matched(records: Path, families: Path, out: Path) -> tuple[Path, str]:
    """Write the page for all whole runs under a folder; its path, and a line on it.

    Raises:
        PrerequisiteError: if there is no whole run.
        UsageError: if there is no such folder, the families cannot be read, or `out` is not writable.
    """
    markdown, summary = matched_page(records, families)
    write_atomically(out / PAGE, markdown.encode())
    return out / PAGE, summary


def matched_page(records: Path, families: Path) -> tuple[str, str]:
    """The page as Markdown, and a line on it."""
    declaration = read_declaration(families)
    shelf = Shelf.of(records)
    general = {model: arms_of(shelf, model) for model in MODELS}
    general = {model: arms for model, arms in general.items() if any(arm.quantize for arm in arms)}
    inside = {model: arms_of(shelf, model, ARITHMETIC) for model in general}
    wanted = runs_of(shelf, declaration.questions)
    every = {arm.run.folder: arm.run for arms in (*general.values(), *inside.values()) for arm in arms}
    for suite in (CHOICE, ARITHMETIC_SUITE):
        known = {run.folder for run in wanted.setdefault(suite, [])}
        wanted[suite] += [
            run for folder, run in every.items() if folder not in known and suite in run.record["headline"]
        ]
    scores = Scores(shelf, wanted)
    found, gaps = answers(shelf, declaration.questions, scores=scores)
    report = Report(declaration, found, gaps)
    d = declaration
    parts = [
        "# Pruning against quantizing at matched storage",
        prose(f"""
            Written by `python -m leaderboard.matched` from the records of the tracks `tiny` and `matched`. Do not edit:
            run it again. Families: `{d.name}`, declared {d.date.isoformat()}, sha256 `{d.sha256}`.
            {escaped(prose(d.note))} Intervals: paired, task-stratified item bootstrap (B = {RESAMPLES:,}, seed {SEED},
            95 %), over test items only: there is one calibration draw, and one quantizer's draw of 64 blocks. \\* the
            interval excludes zero, † survives Holm within its family, ‡ over all. Bytes are without padding, counted as
            [storage.md](../storage.md) says; how weights become integers is in
            [quantization.md](../quantization.md).
        """),
        "## What was found",
        what_was_found(found, gaps, general, inside, scores),
        "## 1. Accuracy against stored size (Table F.2)",
        "Multiple choice, percent (stored MB).",
        _sizes(general, scores).markdown(),
        "## 2. Do the operators' gains survive quantization? (Table F.3)",
        prose("""
            [operator − constant] at 4 or 3 bits minus [operator − constant] at 16 bits, multiple choice, points [95 %],
            on the same resamples of the items of all four runs. The tilt has rank 8.
        """),
        _answered(found, GAINS).markdown(),
        "## 3. Pruned against quantized, general text (Table F.4)",
        prose("""
            Multiple choice, points [95 %]; 25 % pruned at w4 against e3a4 and Mixture-Compressor's mc3a4 (2 to 4 bits
            by expert, 3 on average), and 50 % pruned at w4 against w2 and e2a4. Gap: bytes of the pruned arm over those
            of the other; = within 2 %.
        """),
        _against(found, AGAINST, general).markdown(),
        "## 4. Everything calibrated on arithmetic (Table F.5)",
        prose("""
            Mask, fit and quantizer on world:arithmetic; exact match on arithmetic, percent, and points [95 %] against
            e3a4 and mc3a4. Gap: bytes over those of e3a4; = within 2 %.
        """),
        _in_domain(found, inside, scores).markdown(),
        "The quantizer's text alone: the unpruned model quantized, calibrated on arithmetic minus on general text.",
        _answered(found, TEXTS).markdown(),
        "## 5. Accuracy against bytes, and who is not beaten",
        prose("""
            Multiple choice, percent [95 %]; the unpruned models answer nearly everything, so that perplexity, without
            a test here, tells more of small losses. On the front: no arm of the table stores as little and scores as
            high. Rounded: linears that were rounded to nearest because fewer than 128 tokens reached them, of all that
            were quantized.
        """),
        _front(general, scores).markdown(),
        *_not_measured(gaps),
    ]
    return "\n\n".join(parts) + "\n", report.counts()


def what_was_found(
    found: Sequence[Answer],
    gaps: Sequence[Gap],
    general: dict[str, list[Arm]],
    inside: dict[str, list[Arm]],
    scores: Scores,
) -> str:
    """What the tables come to, in a few lines that count."""
    against = {setting: _opposing(found, AGAINST, setting) for setting in ("e3a4", "mc3a4", "w2", "e2a4")}
    tuned = {setting: _opposing(found, IN_DOMAIN, setting) for setting in ("e3a4", "mc3a4")}
    texts = [one for one in found if one.question.family == TEXTS]
    on_front = [
        arm
        for arms in general.values()
        for arm, kept in zip(arms, front(_points(arms, scores)), strict=True)
        if kept and arm.quantize
    ]
    pruned = sum(arm.ratio is not None for arm in on_front)
    said = (
        f"""At the upper budget, against experts at 3 bits (e3a4), {_sides(against["e3a4"])};
        {_bytes(against["e3a4"], general)}. Against 2 to 4 bits by expert (mc3a4), {_sides(against["mc3a4"])}.""",
        f"""At the lower one, against everything at 2 bits (w2), {_sides(against["w2"])};
        {_bytes(against["w2"], general)}. Against only the experts at 2 bits (e2a4), {_sides(against["e2a4"])};
        {_bytes(against["e2a4"], general)}.""",
        f"""The gain over the constant, at 4 or 3 bits against 16: {_kept(found, "reroute")};
        {_kept(found, "tilt")}.""",
        f"""With mask, fit and quantizer on arithmetic, against e3a4, {_sides(tuned["e3a4"])};
        {_bytes(tuned["e3a4"], inside)}; against mc3a4, {_sides(tuned["mc3a4"])}.""",
        f"""Calibrating the quantizer of the unpruned model on arithmetic instead of general text changes arithmetic by
        {_range(texts)} points.""",
        f"""Of the {len(on_front)} quantized arms that no arm beats in both bytes and accuracy, {pruned} are pruned.""",
        *([f"{len(gaps)} declared contrasts are not measured."] if gaps else []),
    )
    return "\n".join(f"* {prose(one)}" for one in said)


def _opposing(found: Sequence[Answer], family: str, setting: str) -> list[Answer]:
    """A family's contrasts with the unpruned model at one setting."""
    return [one for one in found if one.question.family == family and one.question.terms[1][1].quantize == setting]


def _kept(found: Sequence[Answer], operator: str) -> str:
    """What quantization does to an operator's gain, counted."""
    gains = [one for one in found if one.question.family == GAINS and f"({operator}" in one.question.label]
    less, lost = sum(one.difference.value < 0 for one in gains), sum(one.difference.high < 0 for one in gains)
    more, won = sum(one.difference.value > 0 for one in gains), sum(one.difference.low > 0 for one in gains)
    return (
        f"{operator}'s is smaller in {less} of {len(gains)} settings ({lost} detectably) and larger in {more} "
        f"({won} detectably)"
    )


def _sides(found: Sequence[Answer]) -> str:
    above, below = sum(one.difference.value > 0 for one in found), sum(one.difference.value < 0 for one in found)
    won, lost = sum(one.difference.low > 0 for one in found), sum(one.difference.high < 0 for one in found)
    return (
        f"{above} of {len(found)} pruned arms score above it ({won} detectably) and {below} below ({lost} detectably)"
    )


def _bytes(found: Sequence[Answer], arms: dict[str, list[Arm]]) -> str:
    """How near the bytes of the pairs are."""
    near = [_match(one, arms) for one in found]
    least, most = (gap_text(pick((one.gap for one in near), default=0.0)) for pick in (min, max))
    matched = sum(one.matched for one in near)
    return f"{matched} of these pairs are matched within 2 % of their bytes, and the gaps are {least} to {most}"


def _match(one: Answer, arms: dict[str, list[Arm]]) -> Match[str]:
    """The pruned arm's bytes beside those of the arm that it is held against, which prunes nothing."""
    (_, a), (_, b) = one.question.terms
    own = arms[str(a.model)]
    pruned = next(x for x in own if (x.ratio, x.operator, x.quantize) == (a.ratio, a.operator, a.quantize))
    whole = next(x for x in own if x.ratio is None and x.quantize == b.quantize)
    return match([(pruned.name, pruned.bytes)], whole.bytes)


def _gap(near: Match[str]) -> str:
    return f"{gap_text(near.gap)}{' =' if near.matched else ''}"


def _range(found: Sequence[Answer]) -> str:
    values = sorted(one.difference.value for one in found)
    return f"{values[0]:+.2f} to {values[-1]:+.2f}" if values else NONE


def _points(arms: Sequence[Arm], scores: Scores) -> list[tuple[int, float]]:
    return [(arm.bytes, scores.score(arm.run, CHOICE).value) for arm in arms]


def _sizes(general: dict[str, list[Arm]], scores: Scores) -> Table:
    """A row per model and way of pruning, a column per setting."""
    rows = []
    for model, arms in general.items():
        for ratio, operator in ((None, None), *((r, o) for r in RATIOS for o in OPERATORS)):
            own = {arm.quantize: arm for arm in arms if (arm.ratio, arm.operator) == (ratio, operator)}
            cells = (
                NONE
                if setting not in own
                else f"{scores.score(own[setting].run, CHOICE).value:.2f} ({own[setting].bytes / 1e6:.2f})"
                for setting in SETTINGS
            )
            name = "unpruned" if ratio is None else f"{percent(ratio)} {operator}"
            rows.append((model, name, *cells))
    return Table(("model", "arm", *("16 bits" if one is None else one for one in SETTINGS)), tuple(rows))


def _answered(found: Sequence[Answer], family: str) -> Table:
    rows = [
        (one.question.label, shown_difference(one), shown_p(one.p), shown_bound(one.bound, 2))
        for one in found
        if one.question.family == family
    ]
    return Table(("contrast", "Δ [95 %]", "p", "not ruled out up to"), tuple(rows))


def _against(found: Sequence[Answer], family: str, general: dict[str, list[Arm]]) -> Table:
    rows = []
    for one in found:
        if one.question.family != family:
            continue
        rows.append((one.question.label, shown_difference(one), shown_p(one.p), _gap(_match(one, general))))
    return Table(("contrast", "Δ [95 %]", "p", "gap in bytes"), tuple(rows))


def _in_domain(found: Sequence[Answer], inside: dict[str, list[Arm]], scores: Scores) -> Table:
    tuned = {one.question.label: one for one in found if one.question.family == IN_DOMAIN}
    rows = []
    for model, arms in inside.items():
        for arm in arms:
            if arm.ratio == "0.5":
                continue
            uniform, mixed = (
                tuned.get(f"{model} {arm.ratio} {arm.operator} {arm.quantize} - {other}") for other in ("e3a4", "mc3a4")
            )
            gap = NONE if uniform is None else _gap(_match(uniform, inside))
            against = (NONE if one is None else shown_difference(one) for one in (uniform, mixed))
            score = scores.score(arm.run, ARITHMETIC_SUITE).value
            rows.append((model, arm.name, f"{arm.bytes / 1e6:.2f}", f"{score:.2f}", *against, gap))
    return Table(("model", "arm", "MB", "arithmetic", "against e3a4", "against mc3a4", "gap in bytes"), tuple(rows))


def _front(general: dict[str, list[Arm]], scores: Scores) -> Table:
    rows = []
    for model, arms in general.items():
        kept = front(_points(arms, scores))
        for arm, best in sorted(zip(arms, kept, strict=True), key=lambda pair: pair[0].bytes):
            interval = scores.score(arm.run, CHOICE).interval()
            shown = f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
            loss = f"{arm.run.record['metrics']['perplexity']['value']:.3f}"
            size = f"{arm.bytes / 1e6:.2f}"
            rows.append((model, arm.name, size, shown, "yes" if best else "", loss, _rounded(arm)))
    return Table(("model", "arm", "MB", "multiple choice", "on the front", "perplexity", "rounded"), tuple(rows))


def _rounded(arm: Arm) -> str:
    said = arm.run.record.get("quantization")
    if said is None:
        return ""
    parts = said["parts"].values()
    return f"{sum(part['fallbacks'] for part in parts)} of {sum(part['linears'] for part in parts)}"


def _not_measured(gaps: Sequence[Gap]) -> list[str]:
    if not gaps:
        return []
    rows = tuple((gap.question.family, gap.question.label, gap.reason) for gap in gaps)
    return ["## Declared and not measured", Table(("family", "contrast", "reason"), rows).markdown()]
