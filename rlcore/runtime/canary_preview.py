"""Calls a run's canary while planning, in children that are killed after a few seconds. Services are never called."""

import ast
import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlcore.cluster.child import ChildProcesses
from rlcore.contracts.components import BuildContext
from rlcore.contracts.requests import Role
from rlcore.contracts.workers import WorkerGroup
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import PlanError
from rlcore.plan import RunPlan
from rlcore.plan.sources import definition, source_file
from rlcore.reward.canary import check_canary
from rlcore.reward.functions import FunctionRewards, build_function_rewards
from rlcore.reward.signature import METHODS
from rlcore.types import Prompt

DEADLINE_S = 5.0
"""Seconds for imports, setup and calls together; a plan must not wait for a slow reward."""
NOT_CALLED = "canary: not called by the plan, but when training starts: "
CLIENTS = (
    "aiohttp", "anthropic", "boto3", "google", "grpc", "http", "httpx", "litellm", "openai", "requests", "socket",
    "urllib", "urllib3", "websockets",
)  # fmt: skip
"""Packages that a file imports to call a service."""


def preview_canary(plan: RunPlan, prompts: Sequence[Prompt]) -> str:
    """A sentence on the canary's score, or on why it is called only when training starts; empty without a canary.

    `prompts`: the first of each training source. RewardError, as in training, if the canary scores too low.
    """
    canary = plan.config.reward.canary
    if not canary:
        return ""
    if reason := "; ".join(_reasons(plan)):
        return f"{NOT_CALLED}{reason}"
    try:
        with TemporaryDirectory(prefix="rlcore-plan-") as directory, _quiet():
            least, called = asyncio.run(_called(plan, prompts, Path(directory)))
    except TimeoutError:
        return f"canary: no score within {DEADLINE_S:g} s, which is as long as a plan waits; training calls it again"
    return f"canary: {called} known-good responses score {least:g} or more; needs {plan.config.reward.canary_min:g}"


def _reasons(plan: RunPlan) -> Iterator[str]:
    """The reasons against calling the canary in a plan."""
    manager = plan.components["reward"]
    if manager.component.build is not build_function_rewards or plan.reward_components:
        yield f"reward manager '{manager.component.name}' may ask services"
    for reward in plan.rewards:
        for target in filter(None, (reward.target, reward.post_process)):
            node = None if reward.is_factory else definition(target)
            if node is None:
                yield f"the source of {target} does not show whether it is async"
            elif _is_async(node):
                yield f"{target} is async, so it would run in the plan's process"
            elif client := _client(target):
                yield f"the file of {target} imports {client}, so it may ask a service"


def _is_async(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return isinstance(node, ast.AsyncFunctionDef)
    return any(isinstance(member, ast.AsyncFunctionDef) and member.name in METHODS for member in node.body)


def _client(target: str) -> str:
    """The first package for calling services that the function's file imports, anywhere in it."""
    path = source_file(target)
    if path is None:
        return ""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            if name.partition(".")[0] in CLIENTS:
                return name
    return ""


async def _called(plan: RunPlan, prompts: Sequence[Prompt], directory: Path) -> tuple[float, int]:
    """The lowest score of the canaries, and their number."""
    config = plan.config
    functions = {name: replace(settings, children=1) for name, settings in config.reward.functions.items()}
    children = ChildProcesses()
    tokens = ByteTokens(config.data.system_prompt)
    manager = FunctionRewards(
        BuildContext(
            config=replace(config, reward=replace(config.reward, functions=functions)),
            section=None,
            workers=_no_workers,
            generator=None,
            reward_functions={reward.name: reward for reward in plan.rewards},
            tokens=tokens,
            children=children,
            run_dir=directory,
            seed=config.train.seed,
            metrics=lambda name, value: None,
        )
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            await manager.start()
            return await check_canary(manager, prompts, config.reward, tokens)
    finally:
        await manager.close()
        await children.close()


def _no_workers(role: Role[Any]) -> WorkerGroup[Any]:
    raise PlanError(f"a plan starts no workers; found a request for those of role '{role.name}'")


@contextmanager
def _quiet() -> Iterator[None]:
    """Context that suppresses log lines; the error says what happened."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
