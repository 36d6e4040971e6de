"""What arms of one mask cost to run, beside the dense model (2610.41366 App. F.1): bytes, prefill, decode.

These are eager timings of this harness: the dense model is transformers' own, pruned arms are that model under the
hooks that evaluate them, which also count slots. They compare arms within one run; they are not serving times.

Arms are timed in turn, round by round, each round beginning with another arm, and every time is divided by the dense
one of its own round. So what makes the machine slow for a while does so to both, and cancels. Two executions never
give the same times, so none of this is a record: a record's numbers are functions of its identity.
"""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from statistics import median
from typing import Any, Final, Literal

import torch
from torch import Tensor

from prunebench.errors import UsageError
from prunebench.install import installed
from prunebench.mask import GroupPolicy
from prunebench.moe import MoEModel
from prunebench.plan import Plan
from prunebench.run.arm import PreparedArm
from prunebench.run.recording import git_state, provenance, storage_of
from prunebench.run.session import Progress, Session

__all__ = [
    "CONSTANT",
    "DENSE",
    "LABEL",
    "CostSettings",
    "Timing",
    "interleaved",
    "measure_cost",
    "share_kept",
    "timings",
]

DENSE: Final = "dense"
CONSTANT: Final = "constant"
LABEL: Final = "eager timings of this harness, relative to dense in the same round; not serving times"

_WARM: Final = 8  # tokens of the forward that is run before a time is taken

Clock = Callable[[], float]
_CLOCKS: Final[Mapping[str, Clock]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class CostSettings:
    """What is timed.

    Args:
        batches: prefill batch sizes.
        prompt: tokens of each prompt.
        decode: tokens that are decoded one by one, at batch 1.
        repeats: rounds that count.
        warmup: rounds before them that do not.
        clock: `wall`, or `cpu`: this process's own time, which other processes' load hardly moves; not for a GPU.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt: int = 512
    decode: int = 64
    repeats: int = 5
    warmup: int = 1
    clock: Literal["wall", "cpu"] = "wall"

    def __post_init__(self) -> None:
        if not self.batches or min(*self.batches, self.prompt, self.decode, self.repeats) < 1 or self.warmup < 0:
            raise UsageError(
                f"batches {list(self.batches)}, prompt {self.prompt}, decode {self.decode}, repeats {self.repeats} and"
                f" warmup {self.warmup}",
                expected="each at least 1, warmup at least 0",
            )

    def check(self, *, positions: int, tokens: int, device: str = "cpu") -> None:
        """Refuse what the model has no room for, or the text no tokens.

        Args:
            device: that the model runs on.
            positions: that the model takes.
            tokens: of the text.
        """
        if self.clock == "cpu" and device != "cpu":
            raise UsageError(f"the CPU's clock for work on {device}", expected="--clock wall")
        if self.prompt + self.decode > positions:
            raise UsageError(
                f"{self.prompt} tokens of prompt and {self.decode} decoded",
                expected=f"at most {positions} together, the model's context",
                fix="lower --prompt or --decode",
            )
        wanted = max(max(self.batches) * self.prompt, self.prompt + self.decode)
        if wanted > tokens:
            raise UsageError(
                f"the text has {tokens} tokens",
                expected=f"{wanted}, for a batch of {max(self.batches)} prompts of {self.prompt}",
                fix="raise --blocks, or lower --prompt or --batch",
            )


@dataclass(frozen=True)
class Timing:
    """One arm's time for one piece of work.

    Args:
        seconds: median over rounds.
        ratio: median over rounds of the arm's time by the dense model's in the same round.
        low: the least of these ratios.
        high: the largest.
    """

    seconds: float
    ratio: float
    low: float
    high: float


def interleaved(
    arms: Sequence[str], measure: Callable[[str], float], *, repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Times of arms taken in turn, arm -> seconds of each round that counts; each round begins with the next arm.

    Args:
        arms: names, each once.
        measure: runs an arm's work once and returns its seconds.
        repeats: rounds that count.
        warmup: rounds before them.
    """
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(warmup + repeats):
        first = number % len(arms)
        for arm in (*arms[first:], *arms[:first]):
            taken = measure(arm)
            if number >= warmup:
                seconds[arm].append(taken)
    return seconds


def timings(seconds: Mapping[str, Sequence[float]], *, base: str = DENSE) -> dict[str, Timing]:
    """Medians over rounds, and ratios to the base's time of the same round.

    Args:
        seconds: `interleaved`'s result.
        base: the arm that others are compared with.
    """
    result = {}
    for arm, times in seconds.items():
        ratios = [own / other for own, other in zip(times, seconds[base], strict=True)]
        result[arm] = Timing(median(times), median(ratios), min(ratios), max(ratios))
    return result


def share_kept(arm: Timing, constant: Timing) -> float | None:
    """The share of the constant's saving that an arm keeps (2610.41366 Table 16), (1 − ρ) / (1 − ρ_constant).

    None where the constant did not save time in every round: there is nothing that could be kept. Above 1 if the arm
    saves more, below 0 if it is slower than the dense model.
    """
    return None if constant.high >= 1 else (1 - arm.ratio) / (1 - constant.ratio)


def timed(work: Callable[[], object], *, clock: Clock = time.perf_counter, finish: Callable[[], object]) -> float:
    """Seconds that `work` takes; `finish` waits for a device, before and after."""
    finish()
    started = clock()
    work()
    finish()
    return clock() - started


@dataclass(frozen=True)
class _Workload:
    """Pieces of work on one model, whatever is installed on it."""

    moe: MoEModel
    ids: Tensor
    settings: CostSettings
    clock: Clock

    @property
    def names(self) -> tuple[str, ...]:
        return (*(f"prefill {batch}" for batch in self.settings.batches), "decode")

    def seconds(self, name: str) -> float:
        """One piece of work, after a few tokens that are not timed; of decode per token."""
        with torch.inference_mode():
            self._forward(self.ids[None, :_WARM])
            if name == "decode":
                return self._decode()
            prompts_BL = self._prompts(int(name.removeprefix("prefill ")))
            return timed(lambda: self._forward(prompts_BL), clock=self.clock, finish=self._finish)

    def _prompts(self, batch: int) -> Tensor:
        return self.ids[: batch * self.settings.prompt].view(batch, self.settings.prompt)

    def _decode(self) -> float:
        """Every arm reads on in the same text, so that all run the same tokens."""
        start, count = self.settings.prompt, self.settings.decode
        cache = getattr(self._forward(self.ids[None, :start]), self._cache)
        rest_L = self.ids[start : start + count]

        def read_on() -> None:
            for at in range(count):
                self._forward(rest_L[None, at : at + 1], **{self._cache: cache})

        return timed(read_on, clock=self.clock, finish=self._finish) / count

    @cached_property
    def _cache(self) -> str:
        """What the model calls its cache; the longer name is the older one."""
        return "cache" if "cache" in inspect.signature(self.moe.model.forward).parameters else "past_key_values"

    def _forward(self, ids_BL: Tensor, **more: Any) -> Any:
        return self.moe.model(input_ids=ids_BL, use_cache=True, logits_to_keep=1, **more)

    def _finish(self) -> None:
        if self.ids.device.type == "cuda":
            torch.cuda.synchronize(self.ids.device)


def measure_cost(
    session: Session,
    arms: Mapping[str, PreparedArm],
    settings: CostSettings,
    *,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Bytes and times of arms that prune the same experts, as JSON data.

    Args:
        session: plans them; every arm passes the checks that come before an evaluation.
        arms: name -> arm; one is `DENSE` and one `CONSTANT`.
        settings: what is timed; `check` has passed.
        progress: called with (what, done, total).
        clock: seconds, in place of the settings' clock.

    Raises:
        UsageError: arms of different masks.
        IntegrityError: a check failed.
    """
    started = datetime.now(UTC)
    plans: dict[str, Plan | None] = {}
    for name, arm in arms.items():
        loaded, plans[name], ids_BL = session.planned(arm)
    digests = {plan.mask.digest for plan in plans.values() if plan is not None}
    if len(digests) != 1:
        raise UsageError("arms of different masks", expected="one mask for all", fix="give it by --mask")
    work = _Workload(
        loaded.moe, ids_BL.reshape(-1).to(loaded.moe.input_device), settings, clock or _CLOCKS[settings.clock]
    )
    rounds: dict[str, dict[str, list[float]]] = {}
    steps = _steps(progress, len(work.names) * len(arms) * (settings.warmup + settings.repeats))
    for piece in work.names:

        def measure(name: str, piece: str = piece) -> float:
            next(steps)
            with _context(loaded.moe, plans[name], arms[name].policy):
                return work.seconds(piece)

        rounds[piece] = interleaved(list(arms), measure, repeats=settings.repeats, warmup=settings.warmup)
    dense = arms[DENSE]
    return {
        "label": LABEL,
        "model": dense.known["model"],
        "mask": digests.pop(),
        "settings": {**vars(settings), "batches": list(settings.batches)},
        **{name: dense.known[name] for name in ("device", "dtype", "experts_implementation")},
        "arms": _arms(arms, plans, rounds),
        "rounds": rounds,
        "provenance": provenance(),
        "volatile": {
            "started": started.isoformat(timespec="seconds"),
            "host": platform.node(),
            "processor": _processor(work.ids.device),
            "threads": torch.get_num_threads(),
            "git": git_state(),
        },
    }


def _context(moe: MoEModel, plan: Plan | None, policy: GroupPolicy) -> Any:
    return nullcontext() if plan is None else installed(moe, plan, policy=policy)


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def _steps(progress: Progress | None, total: int) -> Iterator[None]:
    for done in range(total):
        if progress is not None:
            progress("timing", done, total)
        yield


def _arms(
    arms: Mapping[str, PreparedArm], plans: Mapping[str, Plan | None], rounds: Mapping[str, Mapping[str, list[float]]]
) -> list[dict[str, Any]]:
    found = {piece: timings(seconds) for piece, seconds in rounds.items()}
    stored = {name: storage_of(arm.folder, plans[name], arm.convention) for name, arm in arms.items()}
    return [
        {
            "arm": name,
            "stored": stored[name],
            "stored_of_dense": stored[name]["total"] / stored[DENSE]["total"],
            "times": {
                piece: {
                    **vars(own[name]),
                    "kept": share_kept(own[name], own[CONSTANT])
                    if piece.startswith("prefill") and name not in (DENSE, CONSTANT)
                    else None,
                }
                for piece, own in found.items()
            },
        }
        for name in arms
    ]
