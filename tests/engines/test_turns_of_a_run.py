"""The finished turns that a run's embedded rollout keeps: how many the plan has room for, and when they are freed."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.cluster.worker_context import cluster_context, context_of
from rlcore.contracts.clusters import Deadlines
from rlcore.contracts.workers import Worker
from rlcore.plan import RunPlan
from rlcore.plugins.planning import plan_run
from rlcore.testing import write_prompts
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Completion, GenerateRequest, Sampling

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

CRITIC = ("algo.preset=ppo", "plugins.critic_engine.trunk=actor")
LORA = ("actor.lora.enabled=true", "actor.lora.rank=4", "algo.kl.placement=loss", "algo.kl.coef=0.1")


def plan(tmp_path: Path, *settings: str, plugins: tuple[str, ...] = ()) -> RunPlan:
    config = {
        "model": {"path": str(write_tiny_model(tmp_path / "tiny", num_key_value_heads=2)), "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 20))}}},
        "rollout": {"samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"exact_match": {"fn": "exact_match"}}},
        "cluster": {"threads": 1},
        "train": {"dir": str(tmp_path / "runs"), "prompts_per_step": 2},
    }
    return plan_run([config], settings, plugins)


class Workers:
    """The workers of a plan in this process, with the contexts that clusters give them."""

    def __init__(self, found: RunPlan, run_dir: Path) -> None:
        cluster, self.of = cluster_context(found, run_dir, Deadlines()), dict[str, Any]()
        for worker in sorted(found.workers, key=lambda worker: worker.request.embedded_in is not None):
            inside = worker.request.embedded_in
            host = None if inside is None else self.of[inside.name]
            made: Worker = worker.cls(context_of(cluster, worker, 0, device="cpu", host=host))
            made.setup()
            self.of[worker.request.role.name] = made

    @property
    def num_kept(self) -> int:
        return len(self.of["rollout"]._sampler._decoder.kept._turns)

    def sample(self) -> None:
        """First turns of two conversations."""
        request = GenerateRequest("g", tuple(range(40, 50)), Sampling(max_tokens=8), 2, 0, conversation="g")

        async def completions() -> list[Completion]:
            return [completion async for completion in self.of["rollout"].generate([request])]

        assert len(asyncio.run(completions())) == 2
        assert self.num_kept == 2


def test_the_rollout_keeps_as_many_tokens_as_the_plan_has_room_for(tmp_path: Path) -> None:
    found = plan(tmp_path)
    workers = Workers(found, tmp_path / "run")
    (planned,) = (worker.request.cached_tokens for worker in found.workers if worker.request.role.name == "rollout")
    memory = workers.of["rollout"].context.memory
    assert workers.of["rollout"]._sampler._decoder.kept._most == memory.cached_tokens >= planned > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "work", ["logprobs", "token_scores", "update", "save", "snapshot", "reference", "values", "value_update"]
)
def test_turns_are_freed_before_a_worker_of_the_process_computes_or_saves(tmp_path: Path, work: str) -> None:
    settings = {"reference": LORA, "values": CRITIC, "value_update": CRITIC}.get(work, ())
    found = plan(tmp_path, *settings, plugins=("critic_engine",) if settings == CRITIC else ())
    workers = Workers(found, tmp_path / "run")
    actor, batch = workers.of["actor"], random_batch()
    zeros_BT = np.zeros(batch.tokens.loss_mask_BT.shape, dtype=np.float32)
    workers.sample()
    during, embeddings = list[int](), actor.engine.model.transformer.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda *_: during.append(workers.num_kept))
    gathering = actor.engine._offload.gathering

    def saving() -> Any:
        during.append(workers.num_kept)
        return gathering()

    actor.engine._offload.gathering = saving
    {
        "save": lambda: actor.save(tmp_path / "saved"),
        "snapshot": actor.snapshot,
        "reference": lambda: workers.of["reference"].logprobs(batch),
        "values": lambda: workers.of["critic"].values(batch),
        "value_update": lambda: workers.of["critic"].update(replace(batch, values_BT=zeros_BT, returns_BT=zeros_BT)),
    }.get(work, lambda: getattr(actor, work)(batch))()
    assert workers.num_kept == 0
    assert during
    assert not any(during)
