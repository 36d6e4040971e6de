"""Fits of everything that may answer a pruned slot, as pure functions in float64: no model, no pass.

A pass collects rows or moments (`moments`, `statistics`); a fit turns them, and where it must the expert's weights,
into a fill of `prunebench.replacement` (`tilt`, `copies`), or into a choice or an edit of survivors (`affine`, `remap`,
`compel`); `share` says how good it is and `counts` what it stores.
"""

from prunebench.fit.affine import PairMoments, Proxy, affine_maps, best_proxy, held_out_r2
from prunebench.fit.compel import absorbed_shares, compensated
from prunebench.fit.copies import (
    CopyErrors,
    CopyPair,
    RoutedGrams,
    check_copy_budget,
    copy_errors,
    copy_size,
    low_rank_factors,
    neuron_energy,
    plain_svd,
    top_neurons,
    whitened_factors,
    whitened_svd,
    with_residual_bias,
)
from prunebench.fit.counts import OPERATORS, ModelSize, OperatorCost, cost, extra_experts, model_size, stored_per_expert
from prunebench.fit.folds import Folds
from prunebench.fit.interactions import ResidualProducts, Subset, quadratic_subset, subset_cost
from prunebench.fit.moments import Gram, JointMoments, Spread, pooled
from prunebench.fit.remap import (
    Remap,
    RemapSummary,
    functional_remap,
    nearest_survivors,
    parameter_distances,
    remap_summary,
    slot_cost,
)
from prunebench.fit.result import Fitted
from prunebench.fit.share import fit_share, weighted_fit_share
from prunebench.fit.statistics import ExpertMoments, InputOutputMoments, RoutedSamples, RoutedStates
from prunebench.fit.subset import SubsetErrors
from prunebench.fit.tilt import LinearMap, constant_error, fit_tilt, held_out_share, reduced_rank, squared_error

__all__ = [
    "OPERATORS",
    "CopyErrors",
    "CopyPair",
    "ExpertMoments",
    "Fitted",
    "Folds",
    "Gram",
    "InputOutputMoments",
    "JointMoments",
    "LinearMap",
    "ModelSize",
    "OperatorCost",
    "PairMoments",
    "Proxy",
    "Remap",
    "RemapSummary",
    "ResidualProducts",
    "RoutedGrams",
    "RoutedSamples",
    "RoutedStates",
    "Spread",
    "Subset",
    "SubsetErrors",
    "absorbed_shares",
    "affine_maps",
    "best_proxy",
    "check_copy_budget",
    "compensated",
    "constant_error",
    "copy_errors",
    "copy_size",
    "cost",
    "extra_experts",
    "fit_share",
    "fit_tilt",
    "functional_remap",
    "held_out_r2",
    "held_out_share",
    "low_rank_factors",
    "model_size",
    "nearest_survivors",
    "neuron_energy",
    "parameter_distances",
    "plain_svd",
    "pooled",
    "quadratic_subset",
    "reduced_rank",
    "remap_summary",
    "slot_cost",
    "squared_error",
    "stored_per_expert",
    "subset_cost",
    "top_neurons",
    "weighted_fit_share",
    "whitened_factors",
    "whitened_svd",
    "with_residual_bias",
]
