"""The format hf: pruned experts physically removed, as an ordinary checkpoint that plain transformers loads.

Nothing of it is ours: the config counts fewer experts, experts are renumbered in order, routers have fewer rows. It
holds rerouting at a scale that such a router computes by itself, with one number of survivors in all layers.
"""

from __future__ import annotations

from pathlib import Path

from prunebench.export.pruned import Anatomy, PrunedModel
from prunebench.export.shards import TensorFiles, write_shards
from prunebench.export.weights import copy_small_files, sliced, write_config

__all__ = ["write"]


def write(pruned: PrunedModel, anatomy: Anatomy, folder: Path, limit: int) -> None:
    """Write config, weights and tokenizer; `refuse` has been asked."""
    kept = len(pruned.plan.mask.layers[0].survivors)
    write_config(pruned.folder, folder, {}, of_text=anatomy.counts(kept))
    with TensorFiles(pruned.folder) as files:
        write_shards(folder, sliced(pruned, anatomy, files), limit)
    copy_small_files(pruned.folder, folder)
