"""`python -m server`, the same as the console script `deltaflash`."""

import sys

from server.cli import main

if __name__ == "__main__":
    sys.exit(main())
