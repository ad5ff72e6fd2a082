"""`python -m longstraw` is the command line `longstraw`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
