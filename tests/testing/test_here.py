"""Stand-ins for child processes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster.child import ChildProcesses
from rlcore.testing.here import letters_here, rewards_here
from rlcore.testing.runs import run_settings
from rlcore.train import train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stand_ins", "settings", "processes"),
    [
        (letters_here, {}, 0),
        (letters_here, {"reward.functions.letters.memory_gib": 4}, 1),
        (letters_here, {"reward.functions.letters.fn": "{}/mine.py:score"}, 1),
        (rewards_here, {"reward.functions.letters.fn": "{}/mine.py:score"}, 0),
    ],
    ids=["letters", "a limit of memory", "another function", "every function"],
)
def test_a_run_under_test_starts_no_process_for_functions_with_a_stand_in(
    stand_ins: Callable[[], AbstractContextManager[None]],
    settings: dict[str, Any],
    processes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    start = ChildProcesses.start

    async def counted(children: ChildProcesses, target: str, *args: Any, **named: Any) -> Any:
        started.append(target)
        return await start(children, target, *args, **named)

    monkeypatch.setattr(ChildProcesses, "start", counted)
    (tmp_path / "mine.py").write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    more = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in settings.items()}
    with stand_ins():
        train(run_settings(tmp_path, 4, **more), plugins="null")
    assert len(started) == processes
