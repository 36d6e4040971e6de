"""The command line: `prunebench VERB`; `prunebench --help` lists the verbs.

Results go to standard output, progress to standard error; `--json` prints one JSON document instead of text. Exit
codes: 0 done, 1 a check failed, 2 bad input, 3 something that is needed is missing. Each module has some verbs: `add_…`
gives one its options, `run_…` runs it. Heavy imports happen inside the verbs.
"""

from prunebench.cli.command import main, parser

__all__ = ["main", "parser"]
