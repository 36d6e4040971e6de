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
    from prunebench.analysis.deciding import UNPARSED as UNPARSED
    from prunebench.analysis.deciding import numeric_answer as numeric_answer
    from prunebench.calibration import CalibrationSpec as CalibrationSpec
    from prunebench.calibration import Count as Count
    from prunebench.calibration import Deletion as Deletion
    from prunebench.calibration import Fisher as Fisher
    from prunebench.calibration import FrozenRefillSums as FrozenRefillSums
    from prunebench.calibration import GateNormSum as GateNormSum
    from prunebench.calibration import GateSquaredNormSquaredSum as GateSquaredNormSquaredSum
    from prunebench.calibration import GateSum as GateSum
    from prunebench.calibration import GradientStatistic as GradientStatistic
    from prunebench.calibration import Moments as Moments
    from prunebench.calibration import NormSquaredSum as NormSquaredSum
    from prunebench.calibration import NormSum as NormSum
    from prunebench.calibration import OutputMax as OutputMax
    from prunebench.calibration import OutputMoments as OutputMoments
    from prunebench.calibration import RefillSums as RefillSums
    from prunebench.calibration import ReleasedMoments as ReleasedMoments
    from prunebench.calibration import ResidualSums as ResidualSums
    from prunebench.calibration import ScoreSum as ScoreSum
    from prunebench.calibration import ScoreTotal as ScoreTotal
    from prunebench.calibration import Statistic as Statistic
    from prunebench.calibration import SuperExperts as SuperExperts
    from prunebench.calibration import TrueFisher as TrueFisher
    from prunebench.calibration import find_super_experts as find_super_experts
    from prunebench.calibration import forming_layers as forming_layers
    from prunebench.calibration import same_layer_control as same_layer_control
    from prunebench.calibration import super_experts as super_experts
    from prunebench.errors import IntegrityError as IntegrityError
    from prunebench.errors import PrerequisiteError as PrerequisiteError
    from prunebench.errors import PruneBenchError as PruneBenchError
    from prunebench.errors import UsageError as UsageError
    from prunebench.evaluate import Answer as Answer
    from prunebench.evaluate import Evaluation as Evaluation
    from prunebench.evaluate import Generation as Generation
    from prunebench.evaluate import PassageScore as PassageScore
    from prunebench.evaluate import Score as Score
    from prunebench.evaluate.choices import ChoiceSuite as ChoiceSuite
    from prunebench.evaluate.choices import choice_items as choice_items
    from prunebench.evaluate.code import assertion_case as assertion_case
    from prunebench.evaluate.code import base_and_plus as base_and_plus
    from prunebench.evaluate.code import check_case as check_case
    from prunebench.evaluate.code import code_item as code_item
    from prunebench.evaluate.code import generation_of as generation_of
    from prunebench.evaluate.code import pass_at_k as pass_at_k
    from prunebench.evaluate.code import required_names as required_names
    from prunebench.evaluate.extract import completed_program as completed_program
    from prunebench.evaluate.extract import first_answer as first_answer
    from prunebench.evaluate.extract import names_function as names_function
    from prunebench.evaluate.extract import whole_program as whole_program
    from prunebench.evaluate.fidelity import PairSuite as PairSuite
    from prunebench.evaluate.fidelity import divergence_items as divergence_items
    from prunebench.evaluate.reading import reading_items as reading_items
    from prunebench.evaluate.sources import TaskSuite as TaskSuite
    from prunebench.evaluate.tasks import common_detail as common_detail
    from prunebench.fit import CopyPair as CopyPair
    from prunebench.fit import ExpertMoments as ExpertMoments
    from prunebench.fit import Fitted as Fitted
    from prunebench.fit import Folds as Folds
    from prunebench.fit import Gram as Gram
    from prunebench.fit import InputOutputMoments as InputOutputMoments
    from prunebench.fit import JointMoments as JointMoments
    from prunebench.fit import PairMoments as PairMoments
    from prunebench.fit import Proxy as Proxy
    from prunebench.fit import Remap as Remap
    from prunebench.fit import ResidualProducts as ResidualProducts
    from prunebench.fit import RoutedGrams as RoutedGrams
    from prunebench.fit import RoutedSamples as RoutedSamples
    from prunebench.fit import RoutedStates as RoutedStates
    from prunebench.fit import Spread as Spread
    from prunebench.fit import Subset as Subset
    from prunebench.fit import SubsetErrors as SubsetErrors
    from prunebench.fit import best_proxy as best_proxy
    from prunebench.fit import check_copy_budget as check_copy_budget
    from prunebench.fit import compensated as compensated
    from prunebench.fit import copy_errors as copy_errors
    from prunebench.fit import copy_size as copy_size
    from prunebench.fit import fit_share as fit_share
    from prunebench.fit import fit_tilt as fit_tilt
    from prunebench.fit import functional_remap as functional_remap
    from prunebench.fit import held_out_share as held_out_share
    from prunebench.fit import nearest_survivors as nearest_survivors
    from prunebench.fit import parameter_distances as parameter_distances
    from prunebench.fit import plain_svd as plain_svd
    from prunebench.fit import pooled as pooled
    from prunebench.fit import quadratic_subset as quadratic_subset
    from prunebench.fit import reduced_rank as reduced_rank
    from prunebench.fit import slot_cost as slot_cost
    from prunebench.fit import squared_error as squared_error
    from prunebench.fit import subset_cost as subset_cost
    from prunebench.fit import top_neurons as top_neurons
    from prunebench.fit import whitened_svd as whitened_svd
    from prunebench.fit import with_residual_bias as with_residual_bias
    from prunebench.loader import load_method as load_method
    from prunebench.loader import load_suite as load_suite
    from prunebench.mask import Budget as Budget
    from prunebench.mask import LayerShape as LayerShape
    from prunebench.mask import Mask as Mask
    from prunebench.method import ExpertRows as ExpertRows
    from prunebench.method import LayerView as LayerView
    from prunebench.method import Method as Method
    from prunebench.method import Replacements as Replacements
    from prunebench.method import Routing as Routing
    from prunebench.method import prune_lowest as prune_lowest
    from prunebench.moe import TokenBatch as TokenBatch
    from prunebench.record import Item as Item
    from prunebench.replacement import AffineSurvivor as AffineSurvivor
    from prunebench.replacement import Constant as Constant
    from prunebench.replacement import Fill as Fill
    from prunebench.replacement import GatedWeights as GatedWeights
    from prunebench.replacement import LowRankExpert as LowRankExpert
    from prunebench.replacement import SmallExpert as SmallExpert
    from prunebench.replacement import Survivor as Survivor
    from prunebench.replacement import Tilt as Tilt
    from prunebench.replacement import Zero as Zero
    from prunebench.routing import Convention as Convention
    from prunebench.routing import Scale as Scale
    from prunebench.run import run as run
    from prunebench.sandbox import Case as Case
    from prunebench.sandbox import Verdict as Verdict
    from prunebench.suite import DataSuite as DataSuite
    from prunebench.suite import Suite as Suite

__version__ = "0.1.0.dev0"

_MODULE_OF = {
    "AffineSurvivor": "replacement",
    "Answer": "evaluate",
    "Budget": "mask",
    "CalibrationSpec": "calibration",
    "Case": "sandbox",
    "ChoiceSuite": "evaluate.choices",
    "Constant": "replacement",
    "Convention": "routing",
    "CopyPair": "fit",
    "Count": "calibration",
    "DataSuite": "suite",
    "Deletion": "calibration",
    "Evaluation": "evaluate",
    "ExpertMoments": "fit",
    "ExpertRows": "method",
    "Fill": "replacement",
    "Fisher": "calibration",
    "Fitted": "fit",
    "Folds": "fit",
    "FrozenRefillSums": "calibration",
    "GatedWeights": "replacement",
    "GateNormSum": "calibration",
    "GateSquaredNormSquaredSum": "calibration",
    "GateSum": "calibration",
    "Generation": "evaluate",
    "GradientStatistic": "calibration",
    "Gram": "fit",
    "InputOutputMoments": "fit",
    "IntegrityError": "errors",
    "Item": "record",
    "JointMoments": "fit",
    "LayerShape": "mask",
    "LayerView": "method",
    "LowRankExpert": "replacement",
    "Mask": "mask",
    "Method": "method",
    "Moments": "calibration",
    "NormSquaredSum": "calibration",
    "NormSum": "calibration",
    "OutputMax": "calibration",
    "OutputMoments": "calibration",
    "PairMoments": "fit",
    "PairSuite": "evaluate.fidelity",
    "PassageScore": "evaluate",
    "PrerequisiteError": "errors",
    "Proxy": "fit",
    "PruneBenchError": "errors",
    "RefillSums": "calibration",
    "ReleasedMoments": "calibration",
    "Remap": "fit",
    "Replacements": "method",
    "ResidualProducts": "fit",
    "ResidualSums": "calibration",
    "RoutedGrams": "fit",
    "RoutedSamples": "fit",
    "RoutedStates": "fit",
    "Routing": "method",
    "Scale": "routing",
    "Score": "evaluate",
    "ScoreSum": "calibration",
    "ScoreTotal": "calibration",
    "SmallExpert": "replacement",
    "Spread": "fit",
    "Statistic": "calibration",
    "Subset": "fit",
    "SubsetErrors": "fit",
    "Suite": "suite",
    "Survivor": "replacement",
    "SuperExperts": "calibration",
    "TaskSuite": "evaluate.sources",
    "Tilt": "replacement",
    "TokenBatch": "moe",
    "TrueFisher": "calibration",
    "UNPARSED": "analysis.deciding",
    "UsageError": "errors",
    "Verdict": "sandbox",
    "Zero": "replacement",
    "assertion_case": "evaluate.code",
    "base_and_plus": "evaluate.code",
    "best_proxy": "fit",
    "check_case": "evaluate.code",
    "check_copy_budget": "fit",
    "choice_items": "evaluate.choices",
    "code_item": "evaluate.code",
    "common_detail": "evaluate.tasks",
    "compensated": "fit",
    "completed_program": "evaluate.extract",
    "copy_errors": "fit",
    "copy_size": "fit",
    "divergence_items": "evaluate.fidelity",
    "find_super_experts": "calibration",
    "first_answer": "evaluate.extract",
    "fit_share": "fit",
    "fit_tilt": "fit",
    "forming_layers": "calibration",
    "functional_remap": "fit",
    "generation_of": "evaluate.code",
    "held_out_share": "fit",
    "load_method": "loader",
    "load_suite": "loader",
    "names_function": "evaluate.extract",
    "nearest_survivors": "fit",
    "numeric_answer": "analysis.deciding",
    "parameter_distances": "fit",
    "pass_at_k": "evaluate.code",
    "plain_svd": "fit",
    "pooled": "fit",
    "prune_lowest": "method",
    "quadratic_subset": "fit",
    "reading_items": "evaluate.reading",
    "reduced_rank": "fit",
    "required_names": "evaluate.code",
    "run": "run",
    "same_layer_control": "calibration",
    "slot_cost": "fit",
    "squared_error": "fit",
    "subset_cost": "fit",
    "super_experts": "calibration",
    "top_neurons": "fit",
    "whitened_svd": "fit",
    "whole_program": "evaluate.extract",
    "with_residual_bias": "fit",
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
