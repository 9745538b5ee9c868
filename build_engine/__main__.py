"""`python -m build_engine`."""

import sys

from build_engine.cli import main

sys.exit(main())
