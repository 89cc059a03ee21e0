"""Shows runs of RL trainers: `read` a directory or file, `write_page` the result. Standard library only."""

from rlcore_view.history import Finding
from rlcore_view.model import Run, Sample, Tokens, ViewError
from rlcore_view.readers import read
from rlcore_view.step_facts import Outcome, StepFacts, facts_of
from rlcore_view.watch import Watch, diagnose
from rlcore_view.write_page import write_page

__all__ = [
    "Finding",
    "Outcome",
    "Run",
    "Sample",
    "StepFacts",
    "Tokens",
    "ViewError",
    "Watch",
    "diagnose",
    "facts_of",
    "read",
    "write_page",
]
__version__ = "0.1.0"
