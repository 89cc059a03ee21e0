"""The prompts of a run are counted without holding up the rest of its event loop."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.data.tokenizer import ByteTokens
from rlcore.plugins.planning import plan_run
from rlcore.report.terminal import Terminal
from rlcore.testing.null import SETTINGS
from rlcore.testing.rewards import make_prompt
from rlcore.train import run_prompts
from rlcore.train.run_prompts import RunPrompts, fitting
from rlcore.types import Prompt


class Agent:
    """Shows a tool with every prompt of the source `test`."""

    async def tool_schemas(self, prompts: Sequence[Prompt]) -> Sequence[Sequence[dict[str, Any]]]:
        return [[{"name": "add"}] if prompt.source == "test" else [] for prompt in prompts]


def test_the_event_loop_runs_while_prompts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a signal ends the run, and workers are heard."""
    monkeypatch.setattr(run_prompts, "COUNTED_TOGETHER", 4)
    plan = plan_run([], SETTINGS, ["null"])
    run: Any = SimpleNamespace(plan=plan, agent=Agent(), tokens=ByteTokens(), context_length=None)
    prompts = RunPrompts({"test": [make_prompt(index) for index in range(17)]}, {"held": [make_prompt(20)]})

    async def main() -> tuple[RunPrompts, int]:
        turns, counting = 0, asyncio.create_task(fitting(run, prompts, Terminal()))
        while not counting.done():
            turns += 1
            await asyncio.sleep(0)
        return await counting, turns

    found, turns = asyncio.run(main())
    assert found == prompts
    assert turns >= 5


def test_prompts_that_are_left_out_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_run([], [*SETTINGS, "data.max_prompt_tokens=100"], ["null"])
    run: Any = SimpleNamespace(plan=plan, agent=Agent(), tokens=ByteTokens(), context_length=None)
    texts = ("short", "x" * 200, "short", "y" * 300)
    held = [
        Prompt(f"held/{index}", ({"role": "user", "content": text},), "", "held") for index, text in enumerate(texts)
    ]
    found = asyncio.run(fitting(run, RunPrompts({}, {"held": held}), Terminal()))
    assert found.heldout == {"held": [held[0], held[2]]}
    assert "source 'held': 2 of 4 prompts are longer than 100 tokens: left out" in capsys.readouterr().out
