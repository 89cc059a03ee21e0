"""Makes the modules shared by tests of engines importable; they are in this directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
