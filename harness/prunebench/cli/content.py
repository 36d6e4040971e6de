"""`prunebench list`, `inspect`, `params` and `check-env`: what is there, and what a model is made of."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import shutil
import sys

from prunebench.cli.shared import Result
from prunebench.errors import PrerequisiteError, UsageError

__all__ = ["add_inspect", "add_params", "run_check_env", "run_inspect", "run_list", "run_params"]


def add_inspect(inspect: argparse.ArgumentParser) -> None:
    """Options of `prunebench inspect`."""
    inspect.add_argument("model", metavar="MODEL", help="zoo name, folder with config.json, or hub id")
    inspect.add_argument("--config-only", action="store_true", help="read no weights, and make no self-check")
    inspect.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    inspect.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default %(default)s)")


def add_params(params: argparse.ArgumentParser) -> None:
    """Options of `prunebench params`."""
    params.add_argument("model", metavar="MODEL", help="zoo name, folder with config.json, or hub id")
    params.add_argument("--ratio", help="share of each layer's experts to prune, such as 0.5")
    params.add_argument("--keep", type=int, help="experts to keep in each layer, instead of --ratio")
    params.add_argument("--operator", action="append", help="only this operator (may be repeated; default: all)")
    params.add_argument(
        "--rank", type=int, default=32, help="of the tilt, whose 2rd values also set the copies' budget (default 32)"
    )
    params.add_argument("--times", type=int, default=1, help="the copies' budget in tilts, 1 or 4 in the paper")


def run_list(_options: argparse.Namespace) -> Result:
    """What is shipped, and plug-ins."""
    from prunebench.loader import available, load_method_class, plugins

    classes = {name: load_method_class(name) for name in available("methods")}
    for name in plugins():
        try:
            classes[name] = load_method_class(name)
        except UsageError as error:  # somebody else's distribution must not hide what works
            print(f"prunebench list: left out {error}", file=sys.stderr)
    kinds = {name: "criterion" if cls.selects() else "operator" for name, cls in classes.items()}
    data: dict[str, list[str]] = {
        "models": available("models"),
        "criteria": [name for name, kind in kinds.items() if kind == "criterion"],
        "operators": [name for name, kind in kinds.items() if kind == "operator"],
        "suites": available("suites"),
        "tracks": available("tracks"),
    }
    return 0, data, "\n".join(f"{kind:10} {', '.join(names)}" for kind, names in data.items())


def run_inspect(options: argparse.Namespace) -> Result:
    """A model's layers; exit 1 if the self-check fails."""
    from prunebench.loader import resolve_model
    from prunebench.moe import inspect_model, quiet_libraries
    from prunebench.run.sources import ModelFiles

    quiet_libraries()
    folder = ModelFiles.of(resolve_model(options.model)).folder
    report = inspect_model(
        options.model, folder, weights=not options.config_only, device=options.device, dtype=options.dtype
    )
    return 1 if report.self_check == "fail" else 0, report.to_json(), report.to_text()


def run_params(options: argparse.Namespace) -> Result:
    """What operators store."""
    from tabulate import tabulate

    from prunebench.fit import OPERATORS, cost, extra_experts, model_size
    from prunebench.loader import resolve_model
    from prunebench.moe import quiet_libraries
    from prunebench.moe.load import empty_model
    from prunebench.run.arm import budget_of
    from prunebench.run.sources import ModelFiles

    quiet_libraries()
    if (budget := budget_of(options.ratio, options.keep)) is None:
        raise UsageError("nothing says how many experts go", fix="give --ratio, such as 0.5, or --keep")
    for name in ("rank", "times"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name} {getattr(options, name)} is impossible", expected="a whole number from 1 on")
    size = model_size(empty_model(ModelFiles.of(resolve_model(options.model)).folder))
    size.pruned(budget)  # an impossible budget is no operator's fault
    costs, impossible = [], {}
    for name in dict.fromkeys(options.operator or OPERATORS):
        try:
            costs.append(cost(size, budget, name, rank=options.rank, times=options.times))
        except UsageError as error:
            if options.operator:
                raise
            impossible[name] = str(error)
    pruned, constant_model = costs[0].pruned, costs[0].constant_model
    data = {
        "model": options.model,
        "dense": size.total,
        "pruned_experts": pruned,
        "constant_model": constant_model,
        "one_more_expert_per_layer": extra_experts(size),
        "operators": [one.to_json() for one in costs],
        "impossible": impossible,
    }
    rows = [
        [one.operator, one.per_expert, one.stored, one.added, f"{100 * one.added_share:.2f} %", one.total]
        for one in costs
    ]
    headers = ["operator", "per expert", "stored", "added", "of the constant model", "total"]
    experts = f"{pruned} of {size.layers * size.experts} experts pruned"
    text = [
        tabulate(rows, headers=headers, tablefmt="plain", intfmt=","),
        *(f"{name}: {reason}" for name, reason in impossible.items()),
        f"{options.model}: {size.total:,} values; {experts}; the constant model has {constant_model:,}",
        "added: over the constant model, which stores a mean per pruned expert; every router row counted",
        f"one more expert per layer: {extra_experts(size):,} values",
    ]
    return 0, data, "\n".join(text)


def run_check_env(_options: argparse.Namespace) -> Result:
    """Each requirement with its state; exit 3 if a needed one is missing."""
    needed = {
        **{name: name for name in ("torch", "transformers", "datasets", "numpy", "pyarrow", "safetensors")},
        "lm_eval": "lm-eval",
        "huggingface_hub": "huggingface-hub",
        "yaml": "pyyaml",
        **{name: name for name in ("jinja2", "jsonschema", "tabulate", "rich")},
    }
    optional = {
        "evalplus": "extra code",
        "compressed_tensors": "extra ct, for export --format ct",
        "accelerate": "extra gpu, for --device-map",
        "altair": "extra plots, for board and compare --plot",
        "vl_convert": "extra plots, for board and compare --plot",
    }
    distributions = {**needed, "vl_convert": "vl-convert-python", "compressed_tensors": "compressed-tensors"}
    rows: list[dict[str, str]] = [{"what": "python", "state": platform.python_version(), "need": "needed"}]
    missing = []
    for name in (*needed, *optional):
        found = importlib.util.find_spec(name) is not None
        state = importlib.metadata.version(distributions.get(name, name)) if found else "missing"
        rows.append({"what": name, "state": state, "need": "needed" if name in needed else optional[name]})
        if not found and name in needed:
            missing.append(name)
    if "torch" not in missing:
        import torch

        cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        rows.append({"what": "CUDA device", "state": cuda, "need": "optional"})
        rows.append(
            {"what": "torch threads", "state": str(torch.get_num_threads()), "need": "OMP_NUM_THREADS=1 advised"}
        )
    rows.append({"what": "sandbox", "state": _sandbox_state(), "need": "for suites that run programs"})
    rows.append({"what": "chromium", "state": shutil.which("chromium") or "missing", "need": "optional, for tests"})
    text = "\n".join(f"{row['what']:14} {row['state']:24} {row['need']}" for row in rows)
    if not missing:
        return 0, rows, text
    error = PrerequisiteError(f"missing: {', '.join(missing)}", fix="pip install prunebench")
    print(f"prunebench check-env: {error}", file=sys.stderr)
    return error.exit_code, rows, text


def _sandbox_state() -> str:
    """The sandbox's name and versions, or why there is none."""
    from prunebench.sandbox import boxed

    try:
        return boxed().name
    except PrerequisiteError as error:
        return f"missing: {error.what}"
