"""Shows runs of RL trainers: `read` a directory or file, `write_page` the result. Standard library only."""

from rlcore_view.diagnosis import Finding, diagnose
from rlcore_view.model import Run, Sample, Tokens, ViewError
from rlcore_view.readers import read
from rlcore_view.write_page import write_page

__all__ = ["Finding", "Run", "Sample", "Tokens", "ViewError", "diagnose", "read", "write_page"]
__version__ = "0.1.0"
