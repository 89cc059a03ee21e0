"""Makes the example plugins importable, whether or not they are installed."""

import sys
from pathlib import Path

# Children of tests get the same path.
sys.path += sorted(str(path.parent) for path in Path(__file__).parent.glob("*/pyproject.toml"))
