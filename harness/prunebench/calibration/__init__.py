"""Calibration: which text (`text`), what is measured on it (`statistics`), and the passes that measure.

The score pass (`score`) sees every layer at once, in one plain forward; the fit pass (`stream`) one layer after the
other, as often as needed; the gradient pass (`gradient`) the gradients of every expert, one sequence at a time.
"""

from prunebench.calibration.gradient import Fisher, GradientStatistic, TrueFisher, gradient_pass, split_gradient
from prunebench.calibration.score import ScoreResult, score_pass
from prunebench.calibration.statistics import (
    Count,
    GateNormSum,
    GateSquaredNormSquaredSum,
    GateSum,
    Moments,
    NormSum,
    OutputMoments,
    Statistic,
    by_pass,
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
    "Fisher",
    "FitResult",
    "GateNormSum",
    "GateSquaredNormSquaredSum",
    "GateSum",
    "GradientStatistic",
    "LayerVisit",
    "Moments",
    "NormSum",
    "OutputMoments",
    "ScoreResult",
    "Statistic",
    "StreamResult",
    "TrueFisher",
    "by_pass",
    "fit_pass",
    "gradient_pass",
    "only_experts",
    "score_pass",
    "split_gradient",
    "stream_layers",
    "tokens_of",
]
