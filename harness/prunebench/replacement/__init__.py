"""What answers a pruned slot: small modules that say how many values they store.

A fill is installed from its saved form, (class, JSON config, state dict), never from the object a method returned, so
what is counted is what runs. A new functional form is one class here or in a method's own file. How fills are fitted is
`prunebench.fit`'s business.
"""

from prunebench.replacement.constant import Constant, Zero
from prunebench.replacement.copies import GatedCopy, GatedWeights, LowRankExpert, SmallExpert
from prunebench.replacement.fill import Fill
from prunebench.replacement.survivor import AffineSurvivor, Survivor
from prunebench.replacement.tilt import Tilt

__all__ = [
    "AffineSurvivor",
    "Constant",
    "Fill",
    "GatedCopy",
    "GatedWeights",
    "LowRankExpert",
    "SmallExpert",
    "Survivor",
    "Tilt",
    "Zero",
]
