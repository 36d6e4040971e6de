"""`python -m prunebench.cli`."""

import sys

from prunebench.cli import main

if __name__ == "__main__":
    sys.exit(main())
