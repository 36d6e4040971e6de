"""What an arm is asked to be: model x mask x operator x scale and all else, as plain data; and its folder's name."""

from __future__ import annotations

import contextlib
import hashlib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import Any

from prunebench.calibration import CalibrationSpec
from prunebench.errors import UsageError
from prunebench.evaluate import Sampling
from prunebench.quantize import setting_of

__all__ = ["DEFAULT_SUITES", "FIT_FIELDS", "QUANT_FIELDS", "ArmSpec"]

DEFAULT_SUITES = ("multiple_choice", "arithmetic", "code", "perplexity")
FIT_FIELDS = ("fit_text", "fit_blocks", "fit_length", "fit_draw")
QUANT_FIELDS = ("quant_text", "quant_blocks", "quant_length", "quant_draw")
LONGEST_NAME = 160  # bytes of a folder's name; file systems take 255, and unfinished writes need some for themselves


@dataclass(frozen=True)
class ArmSpec:
    """One arm as asked for; JSON data, so that it can be sent to a worker process.

    Args:
        model: zoo name, folder or hub id.
        method: criterion by name or path; without one and without `mask`, the arm is the dense model.
        parameters: `name=value` texts of the method's fields.
        mask: a mask file, or the folder of a run whose mask is taken, in place of the method's `select`.
        operator: name or path of the file that gives `replace` and `route`; the method's own by default.
        operator_parameters: `name=value` texts of the operator's fields.
        operator_layers: indices, such as `0,15`, of the only layers where the operator stands; in the others the
            constant answers (2610.41366 App. B.4).
        scale: gate scale where slots are refilled; the operator's own by default.
        groups: who chooses the groups of a group-limited router: `frozen` (the unpruned router) or `reselect` (its
            rule, anew among the survivors).
        ratio: share of experts pruned per layer, as typed.
        keep: experts kept per layer.
        scope: what the budget counts over: `layer`, `group` (router groups) or `global`.
        protect: experts that may not be pruned, others going in their place: `LAYER:EXPERT,…`, or `super` or
            `super-relative`, the super experts found on the calibration text.
        spare: the same with nobody going in their place, so that the mask is smaller.
        text: calibration text that the mask is chosen on, and operators are fitted on if no `fit_text` is given.
        blocks: calibration blocks per draw.
        length: tokens per block.
        draw: A, B or C.
        fit_text: another text for the operator's fit, the mask held; None for the mask's, as for the next three.
        fit_blocks: another number of blocks.
        fit_length: another length of a block.
        fit_draw: another draw.
        quantize: how the decoder's linears are quantized once all else is done: a name such as `w4` or `e3a4`.
        quant_text: another text for the quantizer; None for the mask's, as for the next three.
        quant_blocks: another number of blocks.
        quant_length: another length of a block.
        quant_draw: another draw.
        suites: by name or path; `name=source` for data that are not shipped.
        limit: only the first items of each task; makes the run partial.
        seed: of everything random.
        device: where the model runs.
        dtype: of the weights.
        device_map: `auto`, or None.
        experts_implementation: of transformers, or None for the device's default.
        batch_tokens: padded tokens per forward.
        unsafe_local: run generated programs without the sandbox; such a run never reaches the board.
        sampling: how generations are drawn (`Sampling.parse`); greedily if None.
        truncate: cut the beginning of prompts that do not fit, instead of refusing them.
        chat_template: put prompts into the tokenizer's chat template.
        scorer: `batched` or `prefix` for all suites; None for each one's own.
    """

    model: str
    method: str | None = None
    parameters: tuple[str, ...] = ()
    mask: str | None = None
    operator: str | None = None
    operator_parameters: tuple[str, ...] = ()
    operator_layers: str | None = None
    scale: str | None = None
    groups: str = "frozen"
    ratio: str | None = None
    keep: int | None = None
    scope: str = "layer"
    protect: str | None = None
    spare: str | None = None
    text: str = "world:general"
    blocks: int = 256
    length: int = 128
    draw: str = "A"
    fit_text: str | None = None
    fit_blocks: int | None = None
    fit_length: int | None = None
    fit_draw: str | None = None
    quantize: str | None = None
    quant_text: str | None = None
    quant_blocks: int | None = None
    quant_length: int | None = None
    quant_draw: str | None = None
    suites: tuple[str, ...] = DEFAULT_SUITES
    limit: int | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    device_map: str | None = None
    experts_implementation: str | None = None
    batch_tokens: int = 8192
    unsafe_local: bool = False
    sampling: str | None = None
    truncate: bool = False
    chat_template: bool = False
    scorer: str | None = None

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            if not _is_a(getattr(self, name), hint):
                raise UsageError(f"{name} is {getattr(self, name)!r}", expected=_in_words(hint))
        if self.ratio is not None:
            with contextlib.suppress(InvalidOperation):  # what is no number is refused where the budget is made
                # 0.5, .5 and 0.50 are one ratio, so one arm.
                object.__setattr__(self, "ratio", f"{Decimal(self.ratio).normalize():f}")
        if self.operator_layers is not None:
            object.__setattr__(self, "operator_layers", ",".join(str(index) for index in self.only_in))
        if self.quantize is not None:
            object.__setattr__(self, "quantize", setting_of(self.quantize).text)
        for name in (*FIT_FIELDS, *QUANT_FIELDS):
            if getattr(self, name) == getattr(self, name.partition("_")[2]):
                # What is said twice is one request, so one arm.
                object.__setattr__(self, name, None)

    @property
    def calibration(self) -> CalibrationSpec:
        """What a mask is chosen on."""
        return CalibrationSpec(self.text, self.blocks, self.length, self.draw)

    @property
    def fit_calibration(self) -> CalibrationSpec:
        """What an operator is fitted on: the mask's calibration, but for what was asked otherwise."""
        return self._calibrated(FIT_FIELDS)

    @property
    def quant_calibration(self) -> CalibrationSpec:
        """What the quantizer sees: the mask's calibration, but for what was asked otherwise."""
        return self._calibrated(QUANT_FIELDS)

    def _calibrated(self, fields: tuple[str, ...]) -> CalibrationSpec:
        own = {name.partition("_")[2]: getattr(self, name) for name in fields}
        return replace(self.calibration, **{name: value for name, value in own.items() if value is not None})

    @property
    def only_in(self) -> tuple[int, ...]:
        """`operator_layers` as numbers, increasing; none if the operator stands everywhere."""
        if self.operator_layers is None:
            return ()
        parts = [part.strip() for part in self.operator_layers.split(",")]
        if not all(part.isdecimal() for part in parts):
            raise UsageError(f"operator layers {self.operator_layers!r}", expected="indices such as 15, or 0,8,15")
        return tuple(sorted({int(part) for part in parts}))

    @property
    def drawn(self) -> Sampling | None:
        """How generations are drawn; None if greedily."""
        return None if self.sampling is None else Sampling.parse(self.sampling)

    @property
    def dense(self) -> bool:
        """Whether nothing is pruned."""
        return self.method is None and self.mask is None

    @property
    def folder(self) -> str:
        """A readable folder for the arm's run, `model/arm`; `read_track` refuses arms that would share one."""
        if self.dense:
            # An unpruned model has a calibration only if it is quantized.
            own = (self.text.replace("/", "_"), self.draw) if self.quantize is not None else ()
            usual_own = (ArmSpec.text, ArmSpec.draw)
            name = "-".join(["dense", *(part for part, plain in zip(own, usual_own, strict=False) if part != plain)])
        else:
            amount = f"keep{self.keep}" if self.keep is not None else f"ratio{self.ratio}" if self.ratio else ""
            operator = self.operator and Path(self.operator).stem
            parts = [
                self._mask_part if self.mask else Path(str(self.method)).stem,
                *self.parameters,
                amount,
                None if self.scope == ArmSpec.scope else self.scope,
                f"protect={self.protect}" if self.protect else None,
                f"spare={self.spare}" if self.spare else None,
                operator,
                *self.operator_parameters,
                f"layers={self.operator_layers}" if self.operator_layers else None,
                self.scale,
                None if self.groups == ArmSpec.groups else self.groups,
                None if self.text == ArmSpec.text else self.text.replace("/", "_"),
                self.draw,
                self._own_part("fit", FIT_FIELDS),
                f"seed{self.seed}" if self.seed else None,
            ]
            name = "-".join(part for part in parts if part)
        quantized = (self.quantize, self._own_part("quant", QUANT_FIELDS))
        name = "-".join([name, *(part for part in quantized if part is not None)])
        for value, usual in ((self.dtype, ArmSpec.dtype), (self.experts_implementation, None)):
            if value != usual:
                name += f"-{value}"
        if self.limit is not None:
            name += f"-limit{self.limit}"
        for suffix in ("unsafe_local", "truncate", "chat_template"):
            if getattr(self, suffix):
                name += f"-{suffix}"
        if self.scorer is not None:
            name += f"-{self.scorer}"
        if self.drawn is not None:
            name += f"-sampling={','.join(f'{key}={value}' for key, value in self.drawn.to_json().items())}"
        # Resolved, so that "." and ".." are folders with names, and never parts of the path.
        model = Path(self.model).resolve().name if Path(self.model).is_dir() else self.model.replace("/", "--")
        return f"{_file_name(model)}/{_file_name(name)}"

    @property
    def _mask_part(self) -> str:
        """The mask in the folder's name: that of its file, or of the run it is taken from."""
        path = Path(str(self.mask))
        return f"mask={path.resolve().name if path.is_dir() else path.stem}"

    def _own_part(self, word: str, fields: tuple[str, ...]) -> str | None:
        """Another calibration in the folder's name: all that differs from the mask's."""
        own = [getattr(self, name) for name in fields]
        return f"{word}=" + "-".join(str(value) for value in own if value is not None) if any(own) else None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ArmSpec:
        """Back from plain data."""
        fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
        return cls(**fields)


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(ArmSpec)


def _is_a(value: object, hint: Any) -> bool:
    """Whether a value is of a field's type; True is no number."""
    if isinstance(hint, types.UnionType):
        return any(_is_a(value, member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    return type(value) is hint


def _in_words(hint: Any) -> str:
    words = {int: "a whole number", str: "a text", bool: "true or false", types.NoneType: "None"}
    if isinstance(hint, types.UnionType):
        return " or ".join(words[member] for member in typing.get_args(hint))
    return words.get(hint, "a tuple of texts")


def _file_name(text: str) -> str:
    """A text as the name of one folder: no separators, not hidden, and not too long."""
    name = re.sub(r"[^\w.=+-]+", "_", text).lstrip(".") or "_"
    if len(name.encode()) > LONGEST_NAME:
        name = f"{name.encode()[:LONGEST_NAME].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name
