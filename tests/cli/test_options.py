"""The command line's options are listed here, so that a change of them is meant."""

from __future__ import annotations

import argparse

import pytest

from prunebench import cli

MACHINE = {
    "--limit",
    "--device",
    "--dtype",
    "--device-map",
    "--experts-implementation",
    "--batch-tokens",
    "--unsafe-local",
    "--sampling",
    "--truncate",
    "--chat-template",
    "--scorer",
    "--dry-run",
}

SELECTION = {"--model", "--method", "--param", "--ratio", "--keep", "--scope", "--protect", "--spare"}
CALIBRATION = {"--text", "--blocks", "--length", "--draw", "--seed"}
STUDY = {"--json", "--model", "--criteria", "--out", "--device", "--dtype", "--batch-tokens"}
AMOUNT = {"--ratio", "--keep", "--scope"}

OPTIONS = {
    "list": {"--json"},
    "inspect": {"--json", "MODEL", "--config-only", "--device", "--dtype"},
    "run": {
        "--json",
        "--mask",
        "--operator",
        "--operator-param",
        "--operator-layers",
        "--scale",
        "--groups",
        "--fit-text",
        "--fit-blocks",
        "--fit-length",
        "--fit-draw",
        "--quantize",
        "--match",
        "--quant-text",
        "--quant-blocks",
        "--quant-length",
        "--quant-draw",
        "--suite",
        "--out",
    }
    | SELECTION
    | CALIBRATION
    | MACHINE,
    "grid": {"--json", "TRACK", "--out", "--jobs"} | MACHINE,
    "mask compute": {"--json", "--out", "--device", "--dtype", "--batch-tokens"} | SELECTION | CALIBRATION,
    "mask show": {"--json", "MASK"},
    "mask overlap": {"--json", "MASK"},
    "mask diff": {"--json", "A", "B"},
    "mask validate": {"--json", "MASK", "--model"},
    "mask validity": {
        *("--retest-draw", "--held-out", "--held-out-draw", "--held-out-blocks", "--experts", "--layers"),
        *("--operator", "--operator-param", "--scale", "--resamples"),
    }
    | STUDY
    | CALIBRATION,
    "mask agreement": {"--shards", "--orderings"} | AMOUNT | STUDY | CALIBRATION,
    "mask drift": {"--texts", "--blocks", "--length", "--draws", "--seed"} | AMOUNT | STUDY,
    "params": {"--json", "MODEL", "--ratio", "--keep", "--operator", "--rank", "--times"},
    "bytes": {
        *("--json", "SOURCE", "--arm", "--ratio", "--keep", "--operator", "--rank", "--slice-router", "--zeros"),
        *("--group", "--match", "--tolerance", "--config-only"),
    },
    "cost": {
        *("--json", "--mask", "--operator", "--batch", "--prompt", "--decode", "--repeats", "--warmup", "--out"),
        *("--device", "--dtype", "--experts-implementation", "--batch-tokens", "--clock"),
    }
    | SELECTION
    | CALIBRATION,
    "compare": {
        *("--json", "RUN_A", "RUN_B", "--suite", "--families", "--plot"),
        *("--robustness", "--few-shot", "--fixed-answer"),
    },
    "board": {"--json", "RECORDS", "--out", "--track", "--data", "--update", "--check"},
    "submission": {"--json", "BASE", "--reproduce", "--checkout"},
    "reproduce": {"--json", "RUN", "--model", "--suite", "--device", "--out", "--against"},
    "nightly": {"--json", "TRACK", "--out", "--board", "--jobs"} | MACHINE,
    "validate": {"--json", "PATH"},
    "pack": {"--json", "RECORDS", "--unpack"},
    "recompute": {"--json", "RUN"},
    "check": {"--cards", "--expect", "--json", "--markdown", "--only", "--param", "FILE"},
    "new-method": {"--folder", "--json", "NAME"},
    "export": {
        *("--json", "RUN", "--format", "--out", "--max-shard-size", "--model", "--operator"),
        *("--bits", "--attention-bits", "--group-size", "--asymmetric"),
    },
    "verify": {"--json", "DIR", "--base", "--device"},
    "check-env": {"--json"},
}


def verbs(parser: argparse.ArgumentParser | None = None, before: str = "") -> dict[str, argparse.ArgumentParser]:
    """Every verb, those below another one by both names."""
    found = {}
    for action in (parser or cli.parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found |= verbs(sub, f"{before}{name} ") or {f"{before}{name}": sub}
    return found


def test_the_options_of_every_verb():
    found = {
        name: {o for a in parser._actions if a.dest != "help" for o in (a.option_strings or [a.metavar])}
        for name, parser in verbs().items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize("verb", OPTIONS)
def test_every_verb_and_every_option_explains_itself(verb, capsys):
    assert cli.main([*verb.split(), "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for option in OPTIONS[verb]:
        assert option in shown.out
    assert all(action.help for action in verbs()[verb]._actions)


def test_an_arm_can_be_asked_for_by_every_field_of_its_spec():
    from prunebench.run import ArmSpec

    asked = {option.removeprefix("--").replace("-", "_") for option in OPTIONS["run"]} - {
        "json",
        "out",
        "dry_run",
        "match",
    }
    renamed = {"param": "parameters", "operator_param": "operator_parameters", "suite": "suites"}
    assert {renamed.get(name, name) for name in asked} == set(ArmSpec.__dataclass_fields__)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: VERB"),
        (["prune"], "invalid choice"),
        (["run"], "--model"),
        (["run", "--model", "m", "--keep", "many"], "--keep"),
        (["run", "--model", "m", "--limit", "1.5"], "--limit"),
        (["run", "--model", "m", "--nonsense"], "--nonsense"),
        (["run", "--model", "m", "--device-map", "manual"], "--device-map"),
        (["grid"], "TRACK"),
        (["grid", "t", "--jobs", "x"], "--jobs"),
        (["compare", "a"], "RUN_B"),
        (["board", "a"], "--out"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_is_one_line_and_exit_code_2(arguments, says, capsys):
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert says in shown.err


def test_the_version_is_the_packages(capsys):
    import prunebench

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"prunebench {prunebench.__version__}\n"
