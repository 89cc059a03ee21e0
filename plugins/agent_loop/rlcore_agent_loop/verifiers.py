"""Environments of the package verifiers, unchanged: each runs its own samples, as a client of the policy.

    python -m rlcore_agent_loop.verifiers ENVIRONMENT train.jsonl [--eval] [--arguments '{"gym": "leg_counting"}']

writes an environment's dataset as a source; each row includes the environment's input.
"""

import argparse
import asyncio
import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from rlcore.errors import CALLED, ChildError, ConfigError, boundary, describe, shown
from rlcore.imports import import_target
from rlcore_agent_loop.tools.calls import LARGEST

COLUMN = "verifiers"
"""Column with an environment's input, as JSON."""


class Verifiers:
    """The agent of `agent.fn`: made once per child process, called once per sample. Returns the reward."""

    def __init__(self, environment: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._who = f"environment '{environment}'"
        self._environment = loaded(environment, arguments or {})
        with boundary(self._who, ConfigError, CALLED):
            check_environment(self._who, self._environment)
        # one loop for all samples: an environment may keep locks, clients and sessions
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True).start()

    def __call__(self, base_url: str, api_key: str, model: str, columns: Mapping[str, Any]) -> float:
        """The sample's reward; ChildError when the environment fails."""
        if COLUMN not in columns:
            raise ChildError(
                f"the row has no column '{COLUMN}'; python -m rlcore_agent_loop.verifiers writes rows with it"
            )
        rollout_input = row_of(columns[COLUMN])
        return asyncio.run_coroutine_threadsafe(self._run(rollout_input, base_url, api_key, model), self._loop).result()

    async def _run(self, rollout_input: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
        # an exit or interrupt that escaped would end the loop, and with it all samples of this process
        with boundary(f"{self._who}: run_rollout()", ChildError, BaseException):
            from openai import AsyncOpenAI
            from verifiers.legacy.clients import OpenAIChatCompletionsClient

            async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as openai:
                client = OpenAIChatCompletionsClient(openai)
                running = self._environment.run_rollout(rollout_input, client, model, {})
                if not inspect.isawaitable(running):
                    raise ChildError(
                        f"{self._who}: run_rollout() returned {type(running).__name__} at once; needs an async def"
                    )
                return reward_of(f"{self._who}: run_rollout()", await running)


def check_environment(who: str, environment: Any) -> None:
    """ConfigError unless it runs single samples like an environment of verifiers."""
    run = getattr(environment, "run_rollout", None)
    if not callable(run) or not hasattr(environment, "requires_group_rollouts"):
        raise ConfigError(
            f"{who}: found {type(environment).__name__}; needs an environment of verifiers, with run_rollout()"
        )
    try:
        inspect.signature(run).bind({}, None, "", {})
    except TypeError as cause:
        raise ConfigError(
            f"{who}: run_rollout() takes other arguments ({cause}); needs (row, client, model, sampling)"
        ) from cause
    if environment.requires_group_rollouts:
        raise ConfigError(f"{who}: its rubric judges the samples of a prompt together; needs rewards of single samples")


def row_of(text: Any) -> dict[str, Any]:
    """The row to pass to an environment; ChildError if the column does not contain a JSON object."""
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as cause:
        found = cause
    if not isinstance(found, dict):
        raise ChildError(
            f"the column '{COLUMN}' holds {shown(text)}; needs a JSON object, as python -m rlcore_agent_loop.verifiers "
            "writes it"
        )
    return found


def reward_of(who: str, done: Any) -> float:
    """The reward in the state of a rollout that has ended; ChildError for one that failed or has none."""
    if not isinstance(done, Mapping) or not {"error", "reward"} <= done.keys():
        raise ChildError(f"{who} gave {type(done).__name__}; needs a state with error and reward")
    error, reward = done["error"], done["reward"]
    if error is not None:
        raise ChildError(f"{who} failed: {describe(error) if isinstance(error, BaseException) else shown(error)}")
    if not isinstance(reward, Real) or not abs(done["reward"]) <= LARGEST:
        raise ChildError(f"{who} gave the reward {shown(reward)}; needs a finite number")
    return float(reward)


def loaded(environment: str, arguments: Mapping[str, Any]) -> Any:
    """The environment: from `verifiers.load_environment` by its name, or made by `module:attr` or `file.py:attr`."""
    try:
        import verifiers
    except ImportError as cause:
        raise ConfigError(
            f"environment '{environment}': the package verifiers is not installed; pip install verifiers"
        ) from cause
    with boundary(f"environment '{environment}'", ConfigError):
        make = import_target(environment) if ":" in environment else None
        return make(**arguments) if make else verifiers.load_environment(environment, **arguments)


def rows(environment: Any, evaluation: bool = False) -> list[dict[str, Any]]:
    """The environment's training or evaluation dataset: prompt, answer, and the row itself as JSON."""
    dataset = environment.get_eval_dataset() if evaluation else environment.get_dataset()
    return [
        {"prompt": row["prompt"], "answer": row.get("answer", ""), COLUMN: json.dumps(row, default=str)}
        for row in dataset.to_list()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the rows."""
    parser = argparse.ArgumentParser(prog="python -m rlcore_agent_loop.verifiers", description=__doc__)
    parser.add_argument("environment", help="its name, or module:name or file.py:name of a callable that makes it")
    parser.add_argument("path", type=Path, help="JSON Lines file to write")
    parser.add_argument("--eval", action="store_true", help="write its evaluation dataset")
    parser.add_argument("--arguments", type=json.loads, default={}, help="environment arguments, a JSON object")
    options = parser.parse_args(arguments)
    found = rows(loaded(options.environment, options.arguments), options.eval)
    options.path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
