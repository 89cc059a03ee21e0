"""Plans of reward models on transformers: memory per rank, advice to shard them, and combinations that are refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rlcore.config import EngineConfig
from rlcore.contracts.model_files import model_shape, num_parameters
from rlcore.contracts.requests import ModelFacts
from rlcore.errors import ConfigError, PlanError
from rlcore.plan import Facts, RunPlan
from rlcore.plan.gathered import gathered_bytes
from rlcore.plan.machine_plan import memory_of_phases
from rlcore.plan.memory import CONTEXT_BYTES
from rlcore.plugins.planning import plan_run
from rlcore.testing.tiny import write_tiny_classifier

GIB = 2**30
MODELS = ("plugins", "reward_loop", "models", "reward")
SIZES = {"7B": (28, 3584, 18944, 28), "14B": (48, 5120, 13824, 40), "32B": (64, 5120, 27648, 40)}
"""Layers, hidden size, inner size and heads."""


def written(directory: Path, size: str, architecture: str = "Qwen2ForSequenceClassification", **more: Any) -> Path:
    """A directory with the config.json of a reward model, whose parameters are estimated from it."""
    layers, hidden, inner, heads = SIZES[size]
    values = {
        "model_type": "qwen2",
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "num_labels": 1,
        **more,
    }
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture(name="planned")
def _planned(config_of: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., RunPlan]:
    """The plan of a run with a reward model of this size in bfloat16 and these settings, on so many H100s."""

    def plan(size: str = "14B", *overrides: str, devices: int = 8, path: Path | None = None, **model: Any) -> RunPlan:
        settings = {"path": str(path or written(tmp_path / size, size)), "dtype": "bfloat16", **model}
        config = config_of(rewards={"liked": {"kind": "model", "served_by": "reward"}}, models={"reward": settings})
        small = ModelFacts(135_000_000, model_shape(written(tmp_path / "small", "7B")))
        facts = Facts(
            cpus=64, gpus=devices, gpu_memory_bytes=80 * GIB, memory_bytes=2048 * GIB, parameters=small.parameters,
            shape=small.shape,
        )  # fmt: skip
        with patch("rlcore.plugins.planning.gather_facts", lambda *_: facts):
            return plan_run([config], ["cluster.device=cuda", *overrides])

    return plan


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_memory_per_rank_is_its_shard_gathered_layers_and_the_states_of_a_layer(
    planned: Callable[..., RunPlan], tmp_path: Path, size: str, ranks: int
) -> None:
    sharding: dict[str, Any] = {"data_parallel": ranks, "sharding": "fsdp2"} if ranks > 1 else {}
    plan = planned(size, **sharding)
    parameters, shape = num_parameters(tmp_path / size), model_shape(tmp_path / size)
    assert parameters is not None
    assert shape is not None
    model, engine = ModelFacts(parameters, shape), EngineConfig(dtype="bfloat16", **sharding)
    states = 16384 * (3 * shape.inner_size + 8 * shape.hidden_size) * 2
    gathered = gathered_bytes(engine, model, backward=False) if ranks > 1 else 0
    whole = CONTEXT_BYTES + 2 * parameters // ranks + gathered + states
    assert plan.memory_bytes["reward"] == whole
    phases = memory_of_phases(plan)["reward"]
    assert set(phases.values()) == {whole}


def test_copies_do_not_lower_the_memory_of_a_rank(planned: Callable[..., RunPlan]) -> None:
    two = planned(data_parallel=2, sharding="fsdp2")
    copies = planned(data_parallel=4, sharding="fsdp2", dp_replicate=2)
    whole = planned(data_parallel=2)
    assert copies.memory_bytes["reward"] == two.memory_bytes["reward"] < whole.memory_bytes["reward"]
    [worker] = [worker for worker in copies.workers if worker.request.role.name == "reward"]
    assert (worker.request.replicas, worker.request.ranks, worker.request.gpus) == (1, 4, 1.0)
    assert {pool.name: pool.gpus for pool in copies.pools} == {"main": (0,), "reward": (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("size", "model", "devices", "advice"),
    [
        ("32B", {"dtype": "float32"}, 8, "set {where}.dtype=bfloat16, shard it over devices ({where}.data_parallel=7"),
        (
            "32B",
            {"batch_tokens": 131072},
            8,
            "; shard it over devices ({where}.data_parallel=7 {where}.sharding=fsdp2)",
        ),
        ("32B", {"dtype": "float32"}, 2, "; set {where}.dtype=bfloat16, or take a smaller model"),
        ("32B", {"dtype": "float32", "replicas": 3}, 8, "; set {where}.dtype=bfloat16, or take a smaller model"),
        ("32B", {"batch_tokens": 131072}, 2, "{where}.data_parallel=2"),  # on the device of the actor, too
        ("32B", {"batch_tokens": 131072}, 1, "; take a smaller model"),
    ],
)
def test_a_reward_model_that_does_not_fit_is_refused_with_the_sharding_that_fits(
    planned: Callable[..., RunPlan], size: str, model: dict[str, Any], devices: int, advice: str
) -> None:
    with pytest.raises(PlanError) as raised:
        planned(size, devices=devices, **model)
    message = str(raised.value)
    assert message.startswith("role 'reward' needs about ")
    assert advice.format(where="plugins.reward_loop.models.reward") in message
    assert "\n" not in message
    if found := re.search(r"shard it over devices \(([^)]*)\)", message):
        followed = planned(size, *found[1].split(), devices=devices, **model)
        assert all(sum(phases.values()) > 0 for phases in memory_of_phases(followed).values())
        assert followed.memory_bytes["reward"] < 80 * GIB


def test_the_advice_is_followed_and_fits(planned: Callable[..., RunPlan]) -> None:
    plan = planned("32B", dtype="float32", data_parallel=3, sharding="fsdp2")
    assert plan.memory_bytes["reward"] < 80 * GIB


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "slices that do not divide ranks": (
        {"data_parallel": 4, "context_parallel": 3},
        r"context_parallel=3: .*models\.reward\.data_parallel=4; needs a context_parallel that divides it",
    ),
    "slices of one rank": (
        {"context_parallel": 2},
        r"context_parallel: set to .*, which has no effect: it is used only when .*data_parallel != 1",
    ),
    "slices that do not divide heads": (
        {"data_parallel": 3, "context_parallel": 3},
        r"context_parallel=3: its model has 40 heads of attention; needs a number that divides them",
    ),
    "slices of float32 on GPUs": (
        {"data_parallel": 2, "context_parallel": 2, "dtype": "float32"},
        r"context_parallel=2: slices need the attention of shared_prefix=tree, .*half precision.*its dtype is float32",
    ),
    "shards of one rank": (
        {"sharding": "fsdp2"},
        r"sharding: set to .*, which has no effect: it is used only when .*data_parallel != 1",
    ),
    "ranks of vLLM": (
        {"backend": "vllm", "data_parallel": 2},
        r"data_parallel: set to .*, which has no effect: it is used only when .*backend == 'hf'",
    ),
    "shards of vLLM": (
        {"backend": "vllm", "sharding": "fsdp2"},
        r"sharding: set to .*, which has no effect: it is used only when .*data_parallel != 1",
    ),
    "copies that do not divide ranks": (
        {"data_parallel": 4, "sharding": "fsdp2", "dp_replicate": 3},
        r"dp_replicate=3: .*models\.reward\.data_parallel=4; needs a number that divides it",
    ),
    "copies of one rank": (
        {"data_parallel": 4, "sharding": "fsdp2", "dp_replicate": 4},
        r"dp_replicate=4: .*leaves each copy several ranks",
    ),
    "more ranks than devices": (
        {"data_parallel": 9, "sharding": "fsdp2"},
        r"the pools need 10 GPUs \('main' 1, 'reward' 9\), the machine has 8",
    ),
    "more replicas than devices": (
        {"data_parallel": 4, "sharding": "fsdp2", "replicas": 3},
        r"the pools need 13 GPUs \('main' 1, 'reward' 12\), the machine has 8",
    ),
    "a share of a device for each rank": (
        {"data_parallel": 2, "gpus": 0.5},
        r"reward\.gpus: found 0\.5, and data_parallel=2 ranks .*; needs .*reward\.gpus=1, or data_parallel=1",
    ),
    "an engine over devices": (
        {"gpus": 2},
        r"reward\.gpus: found 2, .*for several devices with .*reward\.data_parallel=2 .*reward\.sharding=fsdp2",
    ),
}


@pytest.mark.parametrize(("model", "message"), WRONG.values(), ids=WRONG)
def test_combinations_that_cannot_work_are_refused_in_one_line(
    planned: Callable[..., RunPlan], model: dict[str, Any], message: str
) -> None:
    with pytest.raises((PlanError, ConfigError), match=message) as raised:
        planned(**model)
    assert "\n" not in str(raised.value)


def test_a_pool_that_is_too_small_for_all_ranks_is_refused(planned: Callable[..., RunPlan]) -> None:
    with pytest.raises(PlanError, match=r"pool 'reward' .* is too small: .* needs 4 GPUs \(2 replicas x 2 ranks x 1\)"):
        planned("14B", "cluster.pools.reward.gpus_per_node=2", data_parallel=2, sharding="fsdp2", replicas=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_without_a_head_that_ranks_compute_is_refused_by_the_plan(
    planned: Callable[..., RunPlan], tmp_path: Path, ranks: int
) -> None:
    generative = written(tmp_path / "writes", "7B", "Qwen2ForCausalLM")
    if ranks == 1:  # a single rank reads what transformers finds, when it starts
        planned(path=generative)
        return
    with pytest.raises(ConfigError, match=r"it is Qwen2ForCausalLM, which has no score head"):
        planned(path=generative, data_parallel=ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        (
            "classifier.weight",
            r"reward\.path: '.*' has a head 'classifier', and several ranks .*reward\.data_parallel=1",
        ),
        ("other.weight", r"its files have no weight 'score\.weight', so its scores would be random"),
    ],
)
def test_files_without_the_head_are_refused_by_the_plan(
    planned: Callable[..., RunPlan], tmp_path: Path, renamed: str, message: str
) -> None:
    from safetensors.torch import load_file, save_file

    path = write_tiny_classifier(tmp_path / "tiny")
    assert planned(path=path, data_parallel=2)
    tensors = load_file(path / "model.safetensors")
    tensors[renamed] = tensors.pop("score.weight")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        planned(path=path, data_parallel=2)


def test_a_mini_batch_with_fewer_samples_than_ranks_of_a_reward_model_is_fine(planned: Callable[..., RunPlan]) -> None:
    plan = planned("7B", "train.prompts_per_step=1", "rollout.samples_per_prompt=2", data_parallel=4)
    assert plan.saves_copies  # its weights are not part of a checkpoint
