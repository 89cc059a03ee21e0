"""Finds out which trainer wrote a path, and reads it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rlcore_view.file_memory import FileMemory
from rlcore_view.model import Run, ViewError
from rlcore_view.readers import inspect_eval, messages, open_instruct, rlcore_run, tinker, trl, verifiers, verl

READERS: Sequence[tuple[str, Callable[[Path], bool], Callable[[Path], Run]]] = (
    ("rlcore", rlcore_run.recognises, rlcore_run.read),
    ("TRL", trl.recognises, trl.read),
    ("verl", verl.recognises, verl.read),
    ("verifiers or prime-rl", verifiers.recognises, verifiers.read),
    ("tinker-cookbook", tinker.recognises, tinker.read),
    ("open-instruct", open_instruct.recognises, open_instruct.read),
    ("inspect", inspect_eval.recognises, inspect_eval.read),
    ("messages", messages.recognises, messages.read),
)
"""Name, test by content, reader; the first that recognises a path reads it."""


def read(path: Path, memory: FileMemory | None = None) -> Run:
    """The run at the path; ViewError when no reader recognises it.

    With the memory of an earlier call, only the new parts of an rlcore run are read.
    """
    if not path.exists():
        raise ViewError(f"'{path}': there is no such file or directory")
    for _, recognises, reader in READERS:
        if recognises(path):
            return rlcore_run.read(path, memory) if reader is rlcore_run.read else reader(path)
    raise ViewError(
        f"'{path}': this is not a run that rlcore-view knows; needs an rlcore run directory, TRL's "
        "completions_*.parquet, verl's rollout_data_dir, traces.jsonl of verifiers or prime-rl, tinker-cookbook's "
        "rollout summaries, open-instruct's rollouts, inspect's .eval, or a JSONL file whose lines have 'messages'"
    )
