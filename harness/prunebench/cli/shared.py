"""What the verbs share: the shape of a result, progress, and options of how arms are evaluated."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, Self, TypeAlias

Result: TypeAlias = tuple[int, object, str]
"""Of a verb: its exit code, its result as JSON data, and as text."""

Step: TypeAlias = Callable[[str, int, int], None]
"""Told (what, done, total)."""


__all__ = ["Progress", "Result", "Step", "add_evaluation", "evaluation_of", "watched"]


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Options of how arms are evaluated."""
    parser.add_argument("--limit", type=int, help="only the first N items of each task; the run is marked partial")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16 (default %(default)s)")
    parser.add_argument("--device-map", choices=["auto"], help="spread the model over devices (needs accelerate)")
    parser.add_argument(
        "--experts-implementation", help="of transformers: eager (default on cpu), grouped_mm (elsewhere) or batched_mm"
    )
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens per forward (default %(default)s)")
    parser.add_argument(
        "--unsafe-local",
        action="store_true",
        help="run generated programs without the sandbox; recorded, and never on the board",
    )
    parser.add_argument(
        "--sampling",
        metavar="NAME=VALUE,…",
        help="draw generations: temperature=0.7,top_p=0.95,top_k=20,n=16,seed=0, any of them (default: greedy)",
    )
    parser.add_argument(
        "--truncate", action="store_true", help="cut prompts that do not fit; counted (default: an error)"
    )
    parser.add_argument("--chat-template", action="store_true", help="put prompts into the tokenizer's chat template")
    parser.add_argument(
        "--scorer",
        choices=["batched", "prefix"],
        help="batched: each request on its own; prefix: what requests begin with once (default: each suite's own)",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything and say what would run")


def evaluation_of(options: argparse.Namespace) -> dict[str, Any]:
    """Those options, as fields of an arm."""
    names = (
        *("limit", "device", "dtype", "device_map", "experts_implementation", "batch_tokens", "unsafe_local"),
        *("sampling", "truncate", "chat_template", "scorer"),
    )
    return {name: getattr(options, name) for name in names}


class Progress:
    """Progress bars on a terminal; silence elsewhere, where lines per arm must do."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: Any = None
        self._what = ""

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def step(self, what: str, done: int, total: int) -> None:
        """Move the bar of `what`."""
        if self._task is None or what != self._what:
            if self._task is not None:
                self._bars.remove_task(self._task)
            self._task, self._what = self._bars.add_task(what, total=total), what
        self._bars.update(self._task, completed=done, total=total)

    def say(self, line: str) -> None:
        """One line above the bars."""
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


def watched(run: Callable[[argparse.Namespace, Step], Result]) -> Callable[[argparse.Namespace], Result]:
    """A verb that says how far it is, under progress bars."""

    @functools.wraps(run)
    def under_bars(options: argparse.Namespace) -> Result:
        with Progress() as progress:
            return run(options, progress.step)

    return under_bars
