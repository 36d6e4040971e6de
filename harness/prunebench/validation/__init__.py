"""Whether records say what their evidence says: every number again from items, every digest, date, byte and mark.

`checks` looks at one run, `peers` at runs beside each other, `retractions` are runs that are taken back with a reason.
Nothing here imports torch, and nothing is believed because a record says it. What cannot be had without the weights
(whether a fill's bytes are what the manifest hashes) is what `prunebench reproduce` is for.
"""

from prunebench.validation.checks import Finding, record_schema
from prunebench.validation.peers import Validation, validate_records
from prunebench.validation.retractions import RETRACTIONS, Retraction, read_retractions

__all__ = [
    "RETRACTIONS",
    "Finding",
    "Retraction",
    "Validation",
    "read_retractions",
    "record_schema",
    "validate_records",
]
