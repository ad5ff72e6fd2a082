"""`python -m longstraw` is the command line `longstraw`."""

import sys

from .cli import entry

if __name__ == "__main__":
    sys.exit(entry())
