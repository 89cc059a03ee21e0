"""Makes the plugin that tests of starts and ends share importable; it is in this directory."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
