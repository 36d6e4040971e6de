"""Calibration: which text (`text`), what is measured on it (`statistics`), and the pass that measures (`score`)."""

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
)
from prunebench.calibration.text import CalibrationSpec, CalibrationTokens, tokens_of

__all__ = [
    "CalibrationSpec",
    "CalibrationTokens",
    "Count",
    "GateNormSum",
    "GateSquaredNormSquaredSum",
    "GateSum",
    "Moments",
    "NormSum",
    "OutputMoments",
    "ScoreResult",
    "Statistic",
    "score_pass",
    "tokens_of",
]
