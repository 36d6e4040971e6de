"""What is missing, doubled, unfit or unlike is named, and nothing is put in its place."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from prunebench.errors import PrerequisiteError, UsageError
from prunebench.mask import LayerMask, Mask
from prunebench.packing import pack

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gather(findings, maker, quick, tmp_path):
    """Write arms, each a spec or (spec, changes of the record), and read them back."""

    def make(*arms):
        for number, entry in enumerate(arms):
            spec, changes = entry if isinstance(entry[-1], dict) else (entry, {})
            maker.write(tmp_path, spec, name=f"run-{number}", **changes)
        return findings.evidence.gather(tmp_path)

    return make


@pytest.fixture
def without(findings, evidence):
    """The whole track without the runs of some arms."""
    runs = [*evidence._dense, *(run for runs in evidence._pruned.values() for run in runs)]

    def make(*arms):
        gone = [evidence.find(arm) for arm in arms]
        assert len(gone) == len(arms)
        return findings.evidence.Evidence([run for run in runs if run not in gone], (), len(runs) - len(gone))

    return make


def test_a_missing_arm_is_a_named_gap_in_every_cell_that_needs_it_and_in_no_other(findings, without, evidence):
    arm = findings.evidence.pruned("plain", "0.25", findings.evidence.OTHER)
    whole, page = (findings.page.results_page(one) for one in (evidence, without(arm)))
    name = "plain mone (general A) 25 % reroute@other"
    gaps = [line for line in page.splitlines() if "not measurable: no run of" in line and name in line]
    assert page.count(f"not measurable: no run of {name}") > 10
    assert all(line.startswith(("| 25 % | plain", "| plain", "| normed")) or "25 %" in line for line in gaps)
    unchanged = [line for line in whole.splitlines() if line.startswith("| 50 % | normed")]
    assert unchanged == [line for line in page.splitlines() if line.startswith("| 50 % | normed")]
    assert "not measurable on 1" in page
    assert name not in whole


def test_a_missing_operator_is_a_gap_of_its_setting_and_leaves_the_counts_of_others(findings, without):
    arm = findings.evidence.pruned("plain", "0.25", "tilt(rank=8)")
    page = findings.page.results_page(without(arm))
    gap = "not measurable: no run of plain mone (general A) 25 % tilt(rank=8)"
    best = page.split("The best of all 13 operators")[1].split("## 11. ")[0]
    assert f"| mone | 25 % | plain (keep) | {' | '.join([gap] * 4)} |" in best
    assert len(re.findall(r"below \d+ of 11", best)) == 13 * 4
    assert best.count("operators below the best of some setting, 1 not measurable)") == 4
    fits = page.split("## 13. ")[1].split("## 14. ")[0]
    assert fits.count(gap) > 3
    assert all("| 25 % | plain" in line for line in fits.splitlines() if gap in line)


def test_a_run_that_does_not_say_how_its_fit_went_has_no_shares(findings, gather, maker):
    spec = maker.operator("tilt(rank=8)", "plain", "0.5")
    evidence = gather(spec, maker.arm("plain", "0.5", "constant"))
    tilt, constant = (findings.evidence.pruned("plain", "0.5", name) for name in ("tilt(rank=8)", "constant"))
    assert evidence.part(tilt, "fit") == maker.record(spec)["fit"]
    with pytest.raises(findings.evidence.NotMeasurableError, match=r"^no fit in the run of plain mone .* constant$"):
        evidence.part(constant, "fit")


def test_one_more_expert_kept_is_one_in_every_layer(findings, gather, maker, evidence):
    more, setting = findings.budgets.one_more_kept, findings.settings.Setting
    (plain,) = (model for model in evidence.models if model.name == "plain")
    assert evidence.find(more(evidence, setting(plain))).arm["keep"] == maker.EXPERTS // 2 + 1
    held, spec = maker.arm("plain", "0.5", "constant"), maker.one_more("plain")
    uneven = Mask(maker.SHAPE, tuple(LayerMask(layer, maker.EXPERTS, range(n)) for layer, n in ((1, 2), (2, 4))))
    record = maker.record(spec)
    changes = {
        "mask": uneven.to_json(),
        "identity": {"mask": {"digest": uneven.digest, "source": "mone"}, "budget": {}},
        "arm": record["arm"] | {"keep": None},
    }
    with pytest.raises(findings.evidence.NotMeasurableError, match="does not keep one more expert in every layer"):
        more(gather(held, (spec, changes)), setting(plain))


def test_without_a_dense_run_shares_are_gaps_and_differences_are_not(findings, without):
    page = findings.page.results_page(without(findings.evidence.dense("plain")))
    assert "not measurable: no run of plain dense" in page
    row = next(line for line in page.splitlines() if line.startswith("| 25 % | plain (keep) |"))
    assert "not measurable" not in row


def test_a_missing_draw_is_a_gap_of_the_masks_that_need_it(findings, without):
    draw = findings.evidence.Draw("world:arithmetic", "C")
    page = findings.page.results_page(without(findings.evidence.pruned("plain", "0.5", "constant", mask=draw)))
    gap = "not measurable: no mask of plain mone (arithmetic C) 50 %"
    drift = page.split("## 4. ")[1].split("## 5. ")[0]
    (row,) = (line.split(" | ") for line in drift.splitlines() if line.startswith("| 50 % | plain"))
    assert gap not in row[2]
    assert all(cell.startswith(gap) for cell in (*row[3:-1], row[-1].rstrip(" |")))


def test_a_column_that_judges_no_claim_has_no_count_for_its_gaps(findings, without):
    page = findings.page.results_page(without(findings.evidence.dense("plain")))
    shares = page.split("## 3. ")[1].split("Shares subtracted")[0]
    assert "| 25 % | plain (keep) | not measurable: no run of plain dense |" in shares
    assert "**all**" not in shares


def test_two_runs_of_one_arm_are_named_with_what_tells_them_apart(findings, gather, maker):
    arm = maker.arm("plain", "0.5", "constant")
    evidence = gather(arm, (arm, {"identity": {"seed": 7, "batch_tokens": 5}}))
    wanted = findings.evidence.pruned("plain", "0.5", "constant")
    with pytest.raises(findings.evidence.NotMeasurableError, match=r"^2 runs of plain mone .* in batch_tokens, seed$"):
        evidence.find(wanted)


def test_the_houses_constant_is_meant_where_a_method_brings_its_own(findings, gather, maker):
    arm = maker.arm("plain", "0.5", "constant")
    own = {"name": "mone", "version": 1, "file_sha256": "00", "parameters": {}, "scale": None}
    evidence = gather((arm, {"identity": {"operator": own}}), arm)
    found = evidence.find(findings.evidence.pruned("plain", "0.5", "constant"))
    assert found.identity["operator"]["name"] == "constant"


def test_a_given_mask_is_the_one_whose_experts_it_has(findings, gather, maker):
    chosen = maker.arm("plain", "0.5", "trained")
    held = maker.record(maker.arm("plain", "0.5", "constant", fit=("world:general", "B")))["identity"]
    given = held | {
        "mask": held["mask"] | {"source": "file"},
        "calibration": held["calibration"] | {"mask": None},
        "method": None,
        "budget": None,
    }
    spec = maker.arm("plain", "0.5", "constant", fit=("world:general", "B"))
    evidence = gather(chosen, (spec, {"identity": given}))
    draw = findings.evidence.Draw
    found = evidence.find(findings.evidence.pruned("plain", "0.5", "constant", fit=draw("world:general", "B")))
    assert found.given_mask
    for wrong in ({"mask": draw("world:general", "B"), "fit": draw("world:general", "B")}, {"criterion": "reap"}):
        with pytest.raises(findings.evidence.NotMeasurableError, match="no run of"):
            evidence.find(findings.evidence.pruned("plain", "0.5", "constant", **wrong))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"identity": {"limit": 3}}, "partial: made with a limit of 3 items"),
        ({"integrity": [{"check": "k slots", "status": "fail", "detail": ""}]}, "failed: k slots"),
    ],
)
def test_an_unfit_run_is_left_out_and_listed(findings, gather, maker, changes, reason):
    evidence = gather(maker.Spec("plain"), (maker.arm("plain", "0.5", "constant"), changes))
    assert [str(one) for one in evidence.left_out] == [f"plain/run-1: {reason}"]
    assert evidence.read == 1
    assert f"| plain/run-1 | {reason} |" in findings.page.results_page(evidence)


def test_a_scale_that_is_not_what_it_is_called_is_left_out(gather, maker):
    spec = maker.arm("plain", "0.5", "trained")
    arm = maker.record(spec)["arm"] | {"resolved_scale": "renorm"}
    (left,) = gather((spec, {"arm": arm})).left_out
    assert left.reason == "trained scale resolved to renorm, on a router with softmax, no renorm"


def test_the_same_run_twice_counts_once(gather, maker):
    evidence = gather(maker.Spec("plain"), maker.Spec("plain"))
    assert [one.reason for one in evidence.left_out] == ["the same run as plain/run-0"]


def test_runs_on_other_items_are_not_subtracted(findings, maker, quick, tmp_path):
    specs = [maker.arm("plain", "0.5", operator) for operator in ("trained", "other")]
    maker.write(tmp_path, specs[0])
    own = [replace(i, prompt_hash=i.prompt_hash ^ 1) if i.suite == "code" else i for i in maker.items(specs[1])]
    maker.write(tmp_path, specs[1], own)
    evidence = findings.evidence.gather(tmp_path)
    arms = [findings.evidence.pruned("plain", "0.5", operator) for operator in ("reroute@trained", "reroute@other")]
    suites = {suite.name: suite for suite in findings.evidence.SUITES}
    assert evidence.contrast(*arms, suites["arithmetic"])
    with pytest.raises(findings.evidence.NotMeasurableError, match=r"plain .* and plain .* differ in items"):
        evidence.contrast(*arms, suites["code"])


@pytest.mark.parametrize("field", ["dtype", "experts_implementation", "engine"])
def test_runs_made_under_other_conditions_are_not_subtracted(findings, gather, maker, field):
    specs = [maker.arm("plain", "0.5", operator) for operator in ("trained", "other")]
    value = 2 if field == "engine" else "another"
    evidence = gather(specs[0], (specs[1], {"identity": {field: value}}))
    arms = [findings.evidence.pruned("plain", "0.5", operator) for operator in ("reroute@trained", "reroute@other")]
    with pytest.raises(findings.evidence.NotMeasurableError, match=f"differ in {field}$"):
        evidence.contrast(*arms, findings.evidence.ARITHMETIC)


def test_choices_that_the_items_do_not_state_leave_chance_unknown(findings, maker, quick, tmp_path):
    for spec in (maker.Spec("plain"), maker.arm("plain", "0.5", "constant")):
        maker.write(tmp_path, spec, [replace(item, detail="{}") for item in maker.items(spec)])
    evidence = findings.evidence.gather(tmp_path)
    arm = findings.evidence.pruned("plain", "0.5", "constant")
    suite = findings.evidence.MULTIPLE_CHOICE
    assert findings.generation.share_kept(evidence, arm, suite).value > 0
    with pytest.raises(findings.evidence.NotMeasurableError, match="between how many choices"):
        findings.generation.share_kept(evidence, arm, suite, above_chance=True)


def test_no_share_is_kept_of_nothing(findings, maker, quick, tmp_path):
    for spec in (maker.Spec("plain"), maker.arm("plain", "0.5", "constant")):
        maker.write(tmp_path, spec, [replace(i, value=0.0) if i.suite == "code" else i for i in maker.items(spec)])
    evidence = findings.evidence.gather(tmp_path)
    arm = findings.evidence.pruned("plain", "0.5", "constant")
    with pytest.raises(findings.evidence.NotMeasurableError, match="plain dense has nothing to keep on code"):
        findings.generation.share_kept(evidence, arm, findings.evidence.CODE)


def test_a_perplexity_without_bound_is_a_gap(findings, maker, quick, tmp_path):
    spec = maker.Spec("plain")
    maker.write(tmp_path, spec, [replace(i, value=1e6) if i.metric == "nll" else i for i in maker.items(spec)])
    with pytest.raises(findings.evidence.NotMeasurableError, match="perplexity of plain dense is not finite"):
        findings.evidence.gather(tmp_path).score(findings.evidence.dense("plain"), findings.evidence.PERPLEXITY)


def test_draws_of_another_size_are_no_resampling(findings, gather, maker):
    specs = [maker.arm("plain", "0.5", "constant", mask=("world:general", draw)) for draw in "ABC"]
    one = maker.calibration(("world:general", "B")) | {"blocks": 9}
    evidence = gather(specs[0], (specs[1], {"identity": {"calibration": {"mask": one, "fit": one}}}), specs[2])
    page = findings.page.results_page(evidence)
    assert "not measurable: plain general B has 9 × 8 tokens, others 4 × 8" in page


def test_a_draw_of_the_same_text_is_no_draw(findings, gather, maker):
    specs = [maker.arm("plain", "0.5", "constant", mask=("world:general", draw)) for draw in "ABC"]
    one = maker.calibration(("world:general", "A"))
    twice = {"identity": {"calibration": {"mask": one | {"draw": "B"}, "fit": one | {"draw": "B"}}}}
    evidence = gather(specs[0], (specs[1], twice), specs[2])
    assert "not measurable: plain general B is the same text as another draw" in findings.page.results_page(evidence)


def test_names_from_records_cannot_break_the_page(findings, gather, maker, monkeypatch):
    monkeypatch.setitem(maker.MODELS, "a|b<i>", maker.KEEP)
    page = findings.page.results_page(gather(maker.Spec("a|b<i>")))
    assert "a\\|b&lt;i&gt; (keep)" in page
    assert "<i>" not in page
    for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_the_same_records_give_the_same_bytes_wherever_they_are(findings, records, tmp_path):
    chosen = sorted(records.glob("*/*"))[::5]
    pages = []
    for place, paths in (("here", chosen), ("there", chosen[::-1])):
        for number, path in enumerate(paths):
            shutil.copytree(path, tmp_path / place / f"{number:03d}")
        written = findings.page.write_results(tmp_path / place, tmp_path / f"{place}.md")
        assert written.runs == len(chosen)
        pages.append(written.path.read_bytes())
    assert pages[0] == pages[1]
    assert str(tmp_path).encode() not in pages[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "here.md", "there", "there.md"]


def test_packed_runs_give_the_page_that_they_gave_before(findings, records, tmp_path):
    chosen = sorted(records.glob("*/*"))[::7]
    for path in chosen:
        shutil.copytree(path, tmp_path / "runs" / path.parent.name / path.name)
    pages = [findings.page.write_results(tmp_path / "runs", tmp_path / "before.md").path.read_bytes()]
    assert pack(tmp_path / "runs").changed == len(chosen)
    pages.append(findings.page.write_results(tmp_path / "runs", tmp_path / "after.md").path.read_bytes())
    assert pages[0] == pages[1]


def test_the_command_writes_the_page_and_answers_with_exit_codes(findings, maker, quick, tmp_path, capsys):
    main = findings.__main__.main
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "page.md")]) == UsageError.exit_code
    (tmp_path / "records").mkdir()
    assert main([str(tmp_path / "records"), "--out", str(tmp_path / "page.md")]) == PrerequisiteError.exit_code
    assert "no complete run to read" in capsys.readouterr().err
    maker.write(tmp_path / "records", maker.Spec("plain"))
    assert main([str(tmp_path / "records"), "--out", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    gaps = page.count("not measurable: ")
    assert capsys.readouterr().out == f"{tmp_path / 'page.md'}: 1 runs, {gaps} cells not measurable\n"
    assert "**not measurable**" in page


def test_torch_is_not_needed(records):
    code = "import sys, leaderboard.findings; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    path = f"{ROOT}{':' if sys.platform != 'win32' else ';'}{ROOT / 'harness'}"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0
