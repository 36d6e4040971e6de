"""Asking a model the suites' questions: our scoring engine over lm-eval's task definitions.

`Evaluation` scores, generates, turns one lm-eval task into answers (`ask`) and runs generated programs in the sandbox;
`code` and `extract` say which programs, and what they are held against.
lm-eval itself is imported only when a task is read: it takes seconds.
"""

from __future__ import annotations

from prunebench.evaluate.engine import (
    ENGINE_VERSION,
    Evaluation,
    Generation,
    Pair,
    Passage,
    PassageScore,
    Prompt,
    Score,
    bos_policy,
)
from prunebench.evaluate.tasks import Answer
from prunebench.sandbox import Verdict

__all__ = [
    "ENGINE_VERSION",
    "Answer",
    "Evaluation",
    "Generation",
    "Pair",
    "Passage",
    "PassageScore",
    "Prompt",
    "Score",
    "Verdict",
    "bos_policy",
]
