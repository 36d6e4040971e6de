"""Calibration: which text (`text`), what is measured on it (`statistics`), and the passes that measure.

The score pass (`score`) sees every layer at once, in one plain forward; the fit pass (`stream`) one layer after the
other, as often as needed; the gradient pass (`gradient`) the gradients of every expert, one sequence at a time.
"""

from prunebench.calibration.base import Statistic, by_pass
from prunebench.calibration.gradient import (
    Fisher,
    GradientStatistic,
    SlopeProducts,
    TrueFisher,
    gradient_pass,
    split_gradient,
)
from prunebench.calibration.massive import (
    SuperExperts,
    find_super_experts,
    forming_layers,
    same_layer_control,
    super_experts,
)
from prunebench.calibration.residuals import Deletion, FrozenRefillSums, RefillSums, ResidualSums
from prunebench.calibration.score import ScoreResult, score_pass
from prunebench.calibration.statistics import (
    Count,
    GateNormSum,
    GateSquaredNormSquaredSum,
    GateSum,
    Moments,
    NormSquaredSum,
    NormSum,
    OutputMax,
    OutputMoments,
    ReleasedMoments,
    ScoreSum,
    ScoreTotal,
)
from prunebench.calibration.stream import (
    Checkpoint,
    FitResult,
    LayerVisit,
    StreamResult,
    fit_pass,
    only_experts,
    stream_layers,
)
from prunebench.calibration.text import CalibrationSpec, CalibrationTokens, tokens_of

__all__ = [
    "CalibrationSpec",
    "CalibrationTokens",
    "Checkpoint",
    "Count",
    "Deletion",
    "Fisher",
    "FitResult",
    "FrozenRefillSums",
    "GateNormSum",
    "GateSquaredNormSquaredSum",
    "GateSum",
    "GradientStatistic",
    "LayerVisit",
    "Moments",
    "NormSquaredSum",
    "NormSum",
    "OutputMax",
    "OutputMoments",
    "RefillSums",
    "ReleasedMoments",
    "ResidualSums",
    "ScoreResult",
    "ScoreSum",
    "ScoreTotal",
    "SlopeProducts",
    "Statistic",
    "StreamResult",
    "SuperExperts",
    "TrueFisher",
    "by_pass",
    "find_super_experts",
    "fit_pass",
    "forming_layers",
    "gradient_pass",
    "only_experts",
    "same_layer_control",
    "score_pass",
    "split_gradient",
    "stream_layers",
    "super_experts",
    "tokens_of",
]
