"""Makes the checkout's `models`, which is not installed, and `nano_toy` importable."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[3]), str(Path(__file__).parent)]
