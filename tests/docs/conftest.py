"""The browser of rlcore-view's tests, for the pages of the site."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "view" / "tests"))
