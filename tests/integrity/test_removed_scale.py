"""Check 6 holds for right plans however large the router's logits are, and fails for wrong ones."""

import numpy as np
import pytest
import torch

from prunebench.integrity import check_before_evaluation
from prunebench.loader import load_method
from prunebench.mask import Mask
from prunebench.moe import open_model
from prunebench.plan import make_plan
from prunebench.routing import Scale
from prunebench.testing import CORE, random_ids, random_model


@pytest.mark.parametrize("family", [name for name in CORE if not name.endswith("groups")])
@pytest.mark.parametrize(("factor", "dtype"), [(1, torch.bfloat16), (4, torch.float32), (8, torch.float32)])
def test_right_plans_pass_at_any_logit_scale(family, factor, dtype):
    for seed in range(4):
        model = random_model(family, seed=seed, dtype=dtype)
        for name, parameter in model.named_parameters():
            if name.endswith((".gate.weight", ".router.weight")):
                parameter.data.mul_(factor)
        moe = open_model(model)
        rng = np.random.default_rng(seed)
        pruned = {s.index: rng.choice(s.experts, s.experts // 2, replace=False) for s in moe.shapes}
        mask = Mask.for_shapes(moe.shapes, pruned)
        plan = make_plan(moe, mask, load_method("reroute"), None, scale=Scale("renorm"))
        for check in check_before_evaluation(moe, plan, random_ids(8, 32, seed=seed)):
            assert check.status in ("pass", "not applicable"), check
