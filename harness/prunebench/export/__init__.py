"""Exporting a pruned model into a folder that other tools load, or a clear no; loading it again; proving it the same.

One file per format (`native`, `hf`, `vllm_mone`, `ct`), one table of what each cannot hold (`refusals`), one writer of
folders that are whole or not there (`folder`). A format never approximates: what it cannot hold it refuses, by name,
before anything is written.
"""

from prunebench.export.pruned import PrunedModel, Settings
from prunebench.export.quantized import Scheme
from prunebench.export.reading import Verification, load, verify
from prunebench.export.refusals import FORMATS
from prunebench.export.writing import Exported, export_run, write_export

__all__ = [
    "FORMATS",
    "Exported",
    "PrunedModel",
    "Scheme",
    "Settings",
    "Verification",
    "export_run",
    "load",
    "verify",
    "write_export",
]
