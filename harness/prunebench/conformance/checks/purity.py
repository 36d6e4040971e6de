"""What a method's code does beside computing: nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from prunebench.conformance.code import ends_processes, looks_around, waits
from prunebench.conformance.fresh import in_fresh_process
from prunebench.conformance.registry import check
from prunebench.conformance.result import Fault, NotApplicable
from prunebench.conformance.subject import Subject, Trial
from prunebench.errors import PruneBenchError
from prunebench.plan import Plan

__all__: list[str] = []


def _ran(subject: Subject) -> Trial:
    """The trial of the plain case, after all of its parts; a fill that does not run is another check's."""
    subject.plan()
    with suppress(PruneBenchError, NotApplicable):
        subject.logits()
    return subject.trial()


def _no_acts(subject: Subject, kind: str, expected: str, fix: str) -> None:
    """Raise at the first act of a kind."""
    for act in _ran(subject).acts:
        if act.kind == kind:
            raise Fault(f"{act.what}", where=f"{subject.source.path.name}:{act.line}", expected=expected, fix=fix)


def _no_mentions(
    subject: Subject, reader: Callable[[ast.Module], Iterator[tuple[int, str]]], what: str, expected: str, fix: str
) -> None:
    """Raise at the first line in which a reader of code finds something."""
    for path, tree in subject.trees.items():
        for line, name in reader(tree):
            raise Fault(f"it {what} {name}", where=f"{path.name}:{line}", expected=expected, fix=fix)


@check("purity")
def check_runs(subject: Subject) -> None:
    """The verbs run on a plain router and return a Mask, Replacements and a Routing."""
    subject.mask()
    subject.plan()


@check("purity", after=("runs",))
def check_inputs_unchanged(subject: Subject) -> None:
    """Statistics, budget and pruned ids come back as they were handed out."""
    for call in (subject.plan(), subject.trial())[1].calls:
        for name in call.changed:
            raise Fault(
                f"{call.verb} changes {name.partition('/')[0]}",
                where=f"{type(subject.method).__name__}.{call.verb}",
                expected="inputs as they were",
                fix="work on a copy: np.array(x), x.clone()",
            )


@check("purity", after=("runs",))
def check_model_unchanged(subject: Subject) -> None:
    """The model's weights stay: what a method changes of survivors it says, by Replacements(edits=…)."""
    if changed := _ran(subject).weights:
        raise Fault(
            f"{changed[0]} has changed" + (f", and {len(changed) - 1} more" if len(changed) > 1 else ""),
            expected="the weights as they were after select and replace",
            fix="return edited survivors as Replacements(edits={expert: {name: weights}})",
        )


@check("purity", after=("runs",))
def check_global_generators(subject: Subject) -> None:
    """The global random generators are neither seeded nor drawn from."""
    if moved := _ran(subject).generators:
        raise Fault(
            f"{moved[0]}'s global generator has moved",
            expected="the rng that select is handed, or a torch.Generator with a seed of your parameters",
            fix="draw from rng; in replace, from np.random.default_rng(self.seed)",
        )


@check("purity", after=("runs",))
def check_global_settings(subject: Subject) -> None:
    """Settings of the whole process are left alone."""
    for act in _ran(subject).acts:
        if act.kind == "environment":
            raise Fault(
                act.what, where=f"{subject.source.path.name}:{act.line}", expected="no such change", fix="leave it out"
            )
    if changed := _ran(subject).settings:
        raise Fault(
            f"{changed[0]} has changed",
            where=f"class {type(subject.method).__name__}, after its verbs",
            expected="threads, dtypes, hooks, streams, environment and the functions of others as they were",
            fix="give dtype= and device= to the calls that need them; use contexts such as torch.enable_grad()",
        )


@check("purity", after=("runs",))
def check_no_files(subject: Subject) -> None:
    """No file is read or written: all that a method may know is what it is handed."""
    _no_acts(subject, "file", "no file", "declare a statistic, or make the numbers parameters")


@check("purity", after=("runs",))
def check_no_sockets(subject: Subject) -> None:
    """No socket is opened."""
    _no_acts(subject, "socket", "no network", "put what it fetches into the method's file, with its source")


@check("purity", after=("runs",))
def check_no_processes(subject: Subject) -> None:
    """No process or thread is started, or ended."""
    expected, fix = "one thread of one process", "use numpy and torch, which thread by themselves"
    _no_acts(subject, "process", expected, fix)
    _no_mentions(subject, ends_processes, "names", expected, "raise an error where there is no going on")


@check("purity", after=("runs",))
def check_no_call_stack(subject: Subject) -> None:
    """Nobody looks who is calling, or how: the model's name is on that stack, and on the command line."""
    expected, fix = "answers that depend on layers only", "use what LayerView shows"
    _no_acts(subject, "stack", expected, fix)
    _no_mentions(subject, looks_around, "reads", expected, fix)


@check("purity", after=("runs",))
def check_no_sleep(subject: Subject) -> None:
    """Nothing waits."""
    expected, fix = "no waiting: costs are measured", "leave it out"
    _no_acts(subject, "sleep", expected, fix)
    if not any(act.kind == "process" for act in subject.trial().acts):  # which waits for what it has started
        _no_acts(subject, "wait", expected, fix)
    _no_mentions(subject, waits, "names", expected, fix)


@check("purity", after=("runs",))
def check_declares_gradients(subject: Subject) -> None:
    """Gradients are taken only by a method that declares a gradient statistic."""
    needs = (*subject.method.select_needs(), *subject.method.replace_needs())
    if not any(one.measured_in == "gradient" for one in needs):
        expected = "a GradientStatistic such as Fisher in select_needs or replace_needs"
        _no_acts(subject, "gradient", expected, "declare one: the board says which methods need gradients")


@check("purity", after=("runs", "global_generators"))
def check_same_seed(subject: Subject) -> None:
    """Asked again with the same seed, a method gives the same mask and the same answers."""
    first, second = subject.mask(), subject.mask(again=1)
    if first != second:
        raise Fault(
            f"mask {first.digest}, and then {second.digest}",
            where=f"{type(subject.method).__name__}.select, seed 0",
            expected="the same mask",
            fix="draw from rng alone; keep nothing in globals; sort sets",
        )
    if difference := _difference(subject.plan(), subject.plan(again=1)):
        raise Fault(difference, where="replace, asked twice", expected="the same answers", fix="seed every generator")


def _difference(one: Plan, other: Plan, *, exact: bool = True) -> str:
    """Where two plans differ; nothing if they do not."""
    if one.to_json() != other.to_json():
        return "other fills, configurations or scales"
    for what, mine, theirs in (("fill", one.tensors, other.tensors), ("edit", one.edits, other.edits)):
        if set(mine) != set(theirs):
            return f"other tensors of {what}s"
        for name, tensor in mine.items():
            rtol, atol = (0.0, 0.0) if exact else (1e-3, 1e-4)
            if not torch.allclose(tensor, theirs[name], rtol=rtol, atol=atol):
                return f"{what} layer/expert/name {name} differs"
    return ""


@check("purity", after=("same_seed", "parameters"))
def check_fresh_process(subject: Subject) -> None:
    """A new process, with other hashes and no history, selects the same mask."""
    found = in_fresh_process(subject)
    if found.mask != subject.mask():
        raise Fault(
            f"mask {subject.mask().digest} here, {found.mask.digest} there",
            expected="the same mask: nothing of a process decides",
            fix="sort before you iterate over a set; do not use hash(), id() or what earlier calls left",
        )


@check("purity", after=("fresh_process",))
def check_verbs_share_nothing(subject: Subject) -> None:
    """replace and route answer the same whether or not select ran before: masks come from files, too."""
    if difference := _difference(subject.plan(), in_fresh_process(subject).plan):
        raise Fault(
            difference,
            where="replace in a process in which select never ran",
            expected="the same answers from the mask and the declared statistics alone",
            fix="declare in replace_needs what replace reads",
        )


@check("purity", after=("fresh_process", "verbs_share_nothing"))
def check_threads(subject: Subject) -> None:
    """The mask is the same on two threads, and so are the answers up to rounding."""
    found = in_fresh_process(subject)
    mask, plan = found.threaded
    if mask != found.mask or _difference(found.plan, plan, exact=False):
        raise Fault(
            f"mask {found.mask.digest} on one thread, {mask.digest} on two, or other answers",
            expected="the same",
            fix="do not ask how many threads there are; sum in float64",
        )


@check("purity", after=("fresh_process",))
def check_import_effects(subject: Subject) -> None:
    """Importing the file only defines things."""
    if effects := in_fresh_process(subject).import_effects:
        raise Fault(
            effects[0],
            where=f"{subject.source.path.name}, while it is imported",
            expected="definitions only",
            fix="move it into the verbs, or leave it out",
        )
