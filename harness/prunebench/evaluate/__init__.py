"""Asking a model the suites' questions: our scoring engine over lm-eval's task definitions.

`Evaluation` scores, generates, turns one lm-eval task into answers (`ask`) and runs generated programs in the sandbox;
`code` and `extract` say which programs, and what they are held against.
lm-eval itself is imported only when a task is read: it takes seconds.
"""

from __future__ import annotations

from prunebench.evaluate.engine import (
    ENGINE_VERSION,
    Divergence,
    Evaluation,
    Generation,
    Pair,
    Passage,
    PassageScore,
    Prompt,
    Sampling,
    Score,
    bos_policy,
    end_tokens,
)
from prunebench.evaluate.tasks import Answer
from prunebench.sandbox import Verdict

__all__ = [
    "ENGINE_VERSION",
    "Answer",
    "Divergence",
    "Evaluation",
    "Generation",
    "Pair",
    "Passage",
    "PassageScore",
    "Prompt",
    "Sampling",
    "Score",
    "Verdict",
    "bos_policy",
    "end_tokens",
]
