"""`python -m retrograde` is the command `retrograde`."""

import sys

from .cli.app import main

if __name__ == "__main__":
    sys.exit(main())
