"""prunebench: a benchmark harness for training-free pruning of Mixture-of-Experts experts.

The names below are the public ones: what methods and suites import, and what a notebook needs. They are loaded on first
use (PEP 562), so `import prunebench` costs next to nothing and takes no torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prunebench.calibration import CalibrationSpec as CalibrationSpec
    from prunebench.calibration import Count as Count
    from prunebench.calibration import GateNormSum as GateNormSum
    from prunebench.calibration import GateSquaredNormSquaredSum as GateSquaredNormSquaredSum
    from prunebench.calibration import GateSum as GateSum
    from prunebench.calibration import Moments as Moments
    from prunebench.calibration import NormSum as NormSum
    from prunebench.calibration import OutputMoments as OutputMoments
    from prunebench.calibration import Statistic as Statistic
    from prunebench.errors import IntegrityError as IntegrityError
    from prunebench.errors import PrerequisiteError as PrerequisiteError
    from prunebench.errors import PruneBenchError as PruneBenchError
    from prunebench.errors import UsageError as UsageError
    from prunebench.evaluate import Answer as Answer
    from prunebench.evaluate import Evaluation as Evaluation
    from prunebench.evaluate import Generation as Generation
    from prunebench.evaluate import PassageScore as PassageScore
    from prunebench.evaluate import Score as Score
    from prunebench.loader import load_method as load_method
    from prunebench.loader import load_suite as load_suite
    from prunebench.mask import Budget as Budget
    from prunebench.mask import Mask as Mask
    from prunebench.method import LayerView as LayerView
    from prunebench.method import Method as Method
    from prunebench.method import Replacements as Replacements
    from prunebench.method import Routing as Routing
    from prunebench.method import prune_lowest as prune_lowest
    from prunebench.moe import TokenBatch as TokenBatch
    from prunebench.record import Item as Item
    from prunebench.replacement import Constant as Constant
    from prunebench.replacement import Fill as Fill
    from prunebench.replacement import Zero as Zero
    from prunebench.routing import Scale as Scale
    from prunebench.run import run as run
    from prunebench.suite import Suite as Suite

__version__ = "0.1.0.dev0"

_MODULE_OF = {
    "Answer": "evaluate",
    "Budget": "mask",
    "CalibrationSpec": "calibration",
    "Constant": "replacement",
    "Count": "calibration",
    "Evaluation": "evaluate",
    "Fill": "replacement",
    "GateNormSum": "calibration",
    "GateSquaredNormSquaredSum": "calibration",
    "GateSum": "calibration",
    "Generation": "evaluate",
    "IntegrityError": "errors",
    "Item": "record",
    "LayerView": "method",
    "Mask": "mask",
    "Method": "method",
    "Moments": "calibration",
    "NormSum": "calibration",
    "OutputMoments": "calibration",
    "PassageScore": "evaluate",
    "PrerequisiteError": "errors",
    "PruneBenchError": "errors",
    "Replacements": "method",
    "Routing": "method",
    "Scale": "routing",
    "Score": "evaluate",
    "Statistic": "calibration",
    "Suite": "suite",
    "TokenBatch": "moe",
    "UsageError": "errors",
    "Zero": "replacement",
    "load_method": "loader",
    "load_suite": "loader",
    "prune_lowest": "method",
    "run": "run",
}

__all__ = sorted([*_MODULE_OF, "__version__"])  # noqa: PLE0605 - the mapping above is the one list


class _Package(ModuleType):
    """This module; a public name wins over the submodule of the same name (`prunebench.run` is the function)."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds each submodule here once it is loaded.
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
