"""Whole runs with a rollout or an agent loop that gives tokens versions of weights that do not exist yet."""

from pathlib import Path

import pytest

import rlcore
from rlcore.errors import PluginError, RlcoreError, WorkerError
from rlcore.testing.runs import run_settings

PLUGIN = """
RLCORE_API = "1"
from dataclasses import replace
from rlcore import Component, RolloutWorker, WorkerClass, hookimpl
from rlcore.agents.single_turn import SingleTurn
from rlcore.testing.null import NullReplica


class Early(NullReplica):
    async def generate(self, requests):
        async for completion in super().generate(requests):
            yield replace(completion, version=completion.version + 1, versions=())


class Ahead(SingleTurn):
    async def rollout(self, tasks, sampling, lane):
        async for row in super().rollout(tasks, sampling, lane):
            yield replace(row, versions=((row.versions[0][0], row.versions[0][1] + 1),))


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "early", Early, isolated=True)]


@hookimpl
def rlcore_agent_loops():
    return [Component("ahead", lambda context: Ahead(context.generator, context.tokens))]
"""


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("rollout.backend", WorkerError, r"rollout\[0\]\.generate\(\): .*: version 1 of the weights; the newest is 0"),
        ("rollout.agent", PluginError, r"agent 'ahead' of .*version 1 of the weights, the newest is 0; needs the ver"),
    ],
)
def test_versions_of_weights_to_come_end_the_run_with_the_name_of_the_class(
    tmp_path: Path, wrong: str, error: type[RlcoreError], message: str, staleness: int
) -> None:
    file = tmp_path / "wrong_versions.py"
    file.write_text(PLUGIN)
    chosen = {"rollout.backend": "early"} if wrong == "rollout.backend" else {"rollout.agent": "ahead"}
    settings = run_settings(tmp_path, 8, **{"schedule.max_staleness": staleness, **chosen})
    with pytest.raises(error, match=message):
        rlcore.train(settings, plugins=["null", str(file)])
