"""The checks by group; importing this puts all of them on the list, in this order."""

from prunebench.conformance.checks import interface, purity, selection, metamorphic, edge, answers, limits  # noqa: I001

__all__ = ["answers", "edge", "interface", "limits", "metamorphic", "purity", "selection"]
