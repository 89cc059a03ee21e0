"""An actor in a process, as on a GPU, with the sampler embedded in it: the same run as in a thread."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.cluster import local
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

REWARD = """
async def vowels(trajectory):
    return sum(letter in "aeiou" for letter in trajectory.text()) / 12
"""


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARD)
    return {
        "model": {"path": str(write_tiny_model(tmp_path / "tiny")), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 20, "{index}"))}}},
        "rollout": {"samples_per_prompt": 3, "max_tokens": 12},
        "reward": {"functions": {"vowels": {"fn": f"{tmp_path / 'rewards.py'}:vowels"}}},
        "actor": {"lr": 0.003, "minibatch_prompts": 2},
        "train": {"prompts_per_step": 4, "max_steps": 2, "dir": str(tmp_path / "runs")},
        "cluster": {"threads": 1},
    }


@pytest.mark.real
def test_an_actor_in_a_process_trains_as_one_in_a_thread(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = train(config, "train.name=thread")
    launched: list[str] = []
    launch = local.LocalCluster.launch

    async def noted(cluster: local.LocalCluster, worker: Any, index: int) -> Any:
        launched.append(worker.request.role.name)
        return await launch(cluster, worker, index)

    monkeypatch.setattr(local, "needs_process", lambda request, config: request.embedded_in is None)
    monkeypatch.setattr(local.LocalCluster, "launch", noted)
    process = train(config, "train.name=process")
    assert launched == ["actor"]
    assert len([row for row in metrics.read(process.run_dir) if "reward/mean" in row]) == 2
    assert differing(thread.run_dir, process.run_dir) == []
