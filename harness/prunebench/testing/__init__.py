"""For tests of methods and of prunebench itself: random tiny models of every supported router convention."""

from prunebench.testing.models import CORE, FAMILIES, Family, random_ids, random_model

__all__ = ["CORE", "FAMILIES", "Family", "random_ids", "random_model"]
