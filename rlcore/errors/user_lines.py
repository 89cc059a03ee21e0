"""Finds the line of the user's code at which an exception was raised."""

import os
from types import TracebackType

OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
INSTALLED = "site-packages"
PYTHON = ("<frozen", os.path.dirname(os.path.abspath(os.__file__)) + os.sep)
"""Prefixes of the names of Python's own files."""
LIBRARIES = frozenset(
    [
        "accelerate",
        "aiohttp",
        "datasets",
        "fsspec",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "numpy",
        "omegaconf",
        "peft",
        "pluggy",
        "psutil",
        "pyarrow",
        "rich",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
        "yaml",
    ]
)
"""Packages that call user code, and that rlcore calls itself."""


def line_of(trace: TracebackType | None) -> str:
    """The last line of the user's code in a traceback as 'file.py:7'; empty when there is none.

    The user's code begins with the first frame outside rlcore, Python and the libraries of rlcore. Code that it calls
    in its directory counts; code elsewhere or installed below it does not: for `json.loads(text)` it is that line, not
    one of json.
    """
    own: str | None = None
    found = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if own is None and not _is_known(file):
            own = os.path.dirname(file)
        if own is not None and not file.startswith(OURS) and is_below(file, own):
            found = f"{short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_known(file: str) -> bool:
    """True for a file of rlcore, of Python, or of a library of rlcore."""
    if file.startswith(OURS):
        return True
    before, installed, package = file.rpartition(INSTALLED + os.sep)
    if installed:
        return package.partition(os.sep)[0] in LIBRARIES
    return before == "" and file.startswith(PYTHON)


def is_below(file: str, directory: str) -> bool:
    """True for a file in or below the directory, unless it is installed there, such as in a `.venv`."""
    if not directory:  # of a cell or of `exec`, which has no file
        return not os.path.dirname(file)
    return file.startswith(directory + os.sep) and INSTALLED not in file[len(directory) :]


def short(file: str) -> str:
    """The file name on one line, relative to the working directory where possible."""
    here = os.getcwd() + os.sep
    return " ".join(file.removeprefix(here).split())
