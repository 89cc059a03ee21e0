"""The critic's numbers with tiny real models: values, gradients, micro-batches, and what a restart keeps.

Letters as in `rlcore.types`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from rlcore_critic_engine.settings import CriticSettings
from rlcore_critic_engine.worker import HfCritic

from rlcore.config import ClusterConfig, EngineConfig, LoraConfig, ModelConfig, RunConfig
from rlcore.contracts.workers import Worker, WorkerContext
from rlcore.data.batch import micro_batches
from rlcore.engines.hf.worker import HfActor
from rlcore.errors import CheckpointError
from rlcore.testing.tiny import random_batch, write_tiny_model
from rlcore.types import Batch, SharedPrefix

LORA = LoraConfig(enabled=True, rank=2)
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "adapters": {"lora": LORA},
    "head on the actor": {"trunk": "actor"},
    "adapters on the actor": {"trunk": "actor", "lora": LORA},
}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


def context(path: Path, role: str, section: Any, host: Worker | None, **settings: Any) -> WorkerContext:
    actor = EngineConfig(dtype=settings.pop("dtype", "float32"), lora=settings.pop("lora", LoraConfig()), lr=1e-2)
    model = ModelConfig(path=str(path), tokenizer="bytes", attention=settings.pop("attention", "sdpa"))
    return WorkerContext(
        role=role,
        replica=0,
        rank=0,
        num_ranks=1,
        config=RunConfig(model=model, actor=actor, cluster=ClusterConfig(peak_tflops=0.5)),
        section=section,
        targets={"value_loss": "rlcore_critic_engine.loss:ValueLoss", "policy_loss": "rlcore.algo.loss:clip"},
        run_dir=path,
        seed=3,
        threads=1,
        device="cpu",
        host=host,
    )


def critic(path: Path, actor: dict[str, Any] | None = None, **settings: Any) -> HfCritic:
    """A critic that is set up; with trunk=actor inside an actor with the settings `actor`."""
    settings = {"lr": 1e-2, "value_clip": 0.0} | settings
    attention, dtype = settings.pop("attention", "sdpa"), settings.get("dtype", "float32")
    host: HfActor | None = None
    if settings.get("trunk") == "actor":
        host = HfActor(context(path, "actor", None, None, dtype=dtype, **(actor or {})))
        host.setup()
    worker = HfCritic(context(path, "critic", CriticSettings(**settings), host, attention=attention))
    worker.setup()
    return worker


def shaken(worker: HfCritic, seed: int = 1) -> HfCritic:
    """The critic with a random head, and adapters that add something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in worker.engine.model.named_parameters():
            if parameter.requires_grad and not parameter.any():
                size = 0.3 if name.startswith("value_head") else 0.02
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return worker


def with_targets(batch: Batch, seed: int = 0) -> Batch:
    """The batch with random values of the step's start and random returns, both 0 outside the loss mask."""
    rng, mask_BT = np.random.default_rng(seed), batch.tokens.loss_mask_BT
    values_BT = np.where(mask_BT, rng.standard_normal(mask_BT.shape), 0).astype(np.float32)
    returns_BT = np.where(mask_BT, rng.standard_normal(mask_BT.shape), 0).astype(np.float32)
    return replace(batch, values_BT=values_BT, returns_BT=returns_BT)


def trained(worker: HfCritic) -> list[torch.Tensor]:
    return [parameter for parameter in worker.engine.model.parameters() if parameter.requires_grad]


def gradient_of(worker: HfCritic, batch: Batch) -> list[npt.NDArray[np.float64]]:
    """The gradient of an update, as it is before it is clipped, by trained parameter."""
    sums: dict[int, torch.Tensor] = {}

    def keep(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            sums[id(parameter)] = parameter.grad.clone()

    hooks = [tensor.register_post_accumulate_grad_hook(keep) for tensor in trained(worker)]
    worker.update(batch)
    for hook in hooks:
        hook.remove()
    return [sums[id(tensor)].double().numpy() for tensor in trained(worker)]


def plain_values(path: Path, head: torch.nn.Linear, batch: Batch, attention: str) -> npt.NDArray[np.float64]:
    """(B, T) values by one transformers forward a row: the head on the last hidden state before each loss token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    tokens = batch.tokens
    values_BT = np.zeros(tokens.loss_mask_BT.shape)
    for row, length in enumerate(batch.lengths_B.tolist()):
        ids = torch.tensor(tokens.token_ids_BT[row, :length], dtype=torch.int64)[None]
        with torch.no_grad():
            hidden_TH = model(ids, output_hidden_states=True).hidden_states[-1][0]
            for t in np.flatnonzero(tokens.loss_mask_BT[row]):
                values_BT[row, t] = float(head.weight[0] @ hidden_TH[t - 1] + head.bias[0])
    return values_BT


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["whole", "head on the actor"])
def test_values_are_those_of_a_plain_transformers_forward(model_directory: Path, kind: str, attention: str) -> None:
    worker, batch = shaken(critic(model_directory, attention=attention, **KINDS[kind])), random_batch()
    expected_BT = plain_values(model_directory, worker.engine.model.value_head, batch, attention)  # type: ignore[arg-type]
    assert np.abs(expected_BT).max() > 0.1
    assert worker.values(batch) == pytest.approx(expected_BT, abs=1e-5)


def loss_at(worker: HfCritic, batch: Batch) -> float:
    """The value loss by a plain loop over tokens, in float64."""
    assert batch.returns_BT is not None
    assert batch.weights_B is not None
    values_BT, returns_BT = exact_values(worker, batch), batch.returns_BT
    total = 0.0
    for b, t in zip(*np.nonzero(batch.tokens.loss_mask_BT), strict=True):
        total += float(batch.weights_B[b]) * 0.5 * (values_BT[b, t] - float(returns_BT[b, t])) ** 2
    return total


def exact_values(worker: HfCritic, batch: Batch) -> npt.NDArray[np.float64]:
    """The model's values in float64; `values` hands out float32."""
    from rlcore.engines.hf import MicroBatch

    micro = MicroBatch(batch, torch.device("cpu"))
    with torch.no_grad():
        scores_N, _ = worker.engine.model(micro, 1.0, False)
    return micro.spread(scores_N).numpy()


@pytest.mark.fault
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_finite_differences(model_directory: Path, kind: str) -> None:
    worker = shaken(critic(model_directory, **KINDS[kind], dtype="float64", lr=0.0))
    batch, step = with_targets(random_batch(num_groups=2)), 1e-4
    gradients = [torch.tensor(gradient) for gradient in gradient_of(worker, batch)]
    norm = float(torch.sqrt(sum((gradient**2).sum() for gradient in gradients)))  # type: ignore[arg-type]
    losses = []
    for distance in (step, -2 * step):  # along the gradient, where the slope is its norm
        with torch.no_grad():
            for parameter, gradient in zip(trained(worker), gradients, strict=True):
                parameter.add_(distance / norm * gradient)
        losses.append(loss_at(worker, batch))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(norm, rel=1e-2)


def effective_weights(worker: HfCritic) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each adapter by the name of its layer, B scaled."""
    tensors, found = dict(worker.engine.model.named_parameters()), {}
    scale = LORA.alpha / LORA.rank
    for name, b in tensors.items():
        if name.endswith("lora_B.default.weight"):
            layer = name.removeprefix("transformer.").removesuffix(".lora_B.default.weight")
            found[layer] = (tensors[name.replace("lora_B", "lora_A")], scale * b)
        elif name.startswith("adapters.") and name.endswith(".b.weight"):
            layer = name.removeprefix("adapters.").removesuffix(".b.weight").replace("/", ".")
            found[layer] = (tensors[name.replace(".b.weight", ".a.weight")], scale * b)
    return {layer: (a.detach().clone(), b.detach()) for layer, (a, b) in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_a_plain_model(model_directory: Path, kind: str) -> None:
    """Second implementation: transformers' own model with the adapters added to its weights, a row at a time."""
    from transformers import AutoModel

    worker = shaken(critic(model_directory, **KINDS[kind], dtype="float64"))
    batch, adapters = with_targets(random_batch(num_groups=2)), effective_weights(worker)
    assert bool(adapters) is ("adapters" in kind)
    model = AutoModel.from_pretrained(model_directory, dtype=torch.float64)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for layer, (a, b) in adapters.items():
            weights[f"{layer}.weight"].add_(b @ a)
    head: Any = worker.engine.model.value_head
    vector, bias = (tensor.detach().clone().requires_grad_() for tensor in (head.weight, head.bias))
    tokens = batch.tokens
    assert batch.weights_B is not None
    assert batch.returns_BT is not None
    for row, length in enumerate(batch.lengths_B.tolist()):
        hidden_TH = model(torch.tensor(tokens.token_ids_BT[row, :length], dtype=torch.int64)[None])[0][0]
        for t in np.flatnonzero(tokens.loss_mask_BT[row]):
            value = vector[0] @ hidden_TH[t - 1] + bias[0]
            loss = float(batch.weights_B[row]) * 0.5 * (value - float(batch.returns_BT[row, t])) ** 2
            loss.backward(retain_graph=True)
    names = [name for name, parameter in worker.engine.model.named_parameters() if parameter.requires_grad]
    found = dict(zip(names, gradient_of(worker, batch), strict=True))
    assert found.pop("value_head.weight") == pytest.approx(vector.grad.numpy(), rel=1e-4, abs=1e-7)
    assert found.pop("value_head.bias") == pytest.approx(bias.grad.numpy(), rel=1e-4, abs=1e-7)
    for name, gradient in found.items():
        key = name.removeprefix("transformer.").removeprefix("adapters.").replace("/", ".")
        layer = re.sub(r"\.(lora_[AB]\.default|[ab])\.weight$", "", key)
        if layer in adapters:
            a, b = adapters[layer]
            whole = weights[f"{layer}.weight"].grad
            scale = LORA.alpha / LORA.rank
            expected = b.T @ whole if re.search(r"\.(lora_A\.default|a)\.weight$", key) else scale * whole @ a.T
        else:
            expected = weights[key].grad
        assert gradient == pytest.approx(expected.numpy(), rel=1e-3, abs=1e-5 * max(1.0, float(expected.abs().max())))


def budget(batch: Batch, num: int) -> int:
    """A token budget with which the batch is divided into `num` micro-batches."""
    longest = int(batch.lengths_B.max())
    return next(n for n in range(longest, 99 * longest) if len(micro_batches(batch.lengths_B, n)) == num)


@pytest.mark.parametrize("kind", KINDS)
def test_one_two_and_four_micro_batches_are_the_same_update(model_directory: Path, kind: str) -> None:
    batch = with_targets(random_batch(num_groups=4, samples=2))
    results = []
    for tokens in (budget(batch, num) for num in (1, 2, 4)):
        worker = shaken(critic(model_directory, dtype="float64", micro_batch_tokens=tokens, **KINDS[kind]))
        metrics = worker.update(batch)
        results.append((metrics["critic/loss"], metrics["critic/grad_norm"], worker.values(batch)))
    for loss, norm, values_BT in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-9)
        assert norm == pytest.approx(results[0][1], rel=1e-9)
        assert values_BT == pytest.approx(results[0][2], abs=1e-6)


@pytest.mark.fault
@pytest.mark.parametrize("way", [SharedPrefix.TREE, SharedPrefix.CACHE])
@pytest.mark.parametrize("kind", KINDS)
def test_with_shared_prompts_values_and_gradients_are_the_same(
    model_directory: Path, kind: str, way: SharedPrefix
) -> None:
    batch = with_targets(random_batch(num_groups=3, samples=3))
    found = []
    for shared_prefix in (SharedPrefix.NONE, way):
        worker = shaken(critic(model_directory, dtype="float64", **KINDS[kind]))
        worker.engine.shared_prefix = shared_prefix
        found.append((worker.values(batch), gradient_of(worker, batch)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-5)
    for left, right in zip(found[1][1], found[0][1], strict=True):
        assert left == pytest.approx(right, rel=1e-3, abs=1e-5 * max(1.0, float(np.abs(right).max())))


def test_the_loss_of_an_update_is_that_of_a_plain_loop_over_the_minibatch(model_directory: Path) -> None:
    worker = shaken(critic(model_directory, dtype="float64", micro_batch_tokens=30))
    batch = with_targets(random_batch(num_groups=4))
    expected = loss_at(worker, batch)
    assert worker.update(batch)["critic/loss"] == pytest.approx(expected, abs=1e-6)


def test_checkpointed_gradients_are_the_same(model_directory: Path) -> None:
    batch = with_targets(random_batch())
    plain, again = (
        gradient_of(shaken(critic(model_directory, dtype="float64", gradient_checkpointing=on)), batch)
        for on in (False, True)
    )
    for left, right in zip(plain, again, strict=True):
        assert right == pytest.approx(left, rel=1e-9, abs=1e-12)


@pytest.mark.fault
@pytest.mark.parametrize("kind", KINDS)
def test_values_begin_at_zero_and_updates_bring_them_to_the_returns(model_directory: Path, kind: str) -> None:
    worker = critic(model_directory, **KINDS[kind])
    batch = random_batch(num_groups=2)
    mask_BT = batch.tokens.loss_mask_BT
    start_BT = worker.values(batch)
    assert not start_BT.any()
    batch = replace(batch, values_BT=start_BT, returns_BT=np.where(mask_BT, 0.7, 0).astype(np.float32))
    errors = [worker.update(batch)["critic/squared_error"] for _ in range(40)]
    assert errors[0] == pytest.approx(0.49)
    assert errors[-1] < 0.1
    assert not worker.values(batch)[~mask_BT].any()


def test_with_a_rate_of_zero_the_critic_stays_at_zero(model_directory: Path) -> None:
    worker, batch = critic(model_directory, lr=0.0, weight_decay=0.1), with_targets(random_batch())
    assert worker.update(batch)["critic/grad_norm"] > 0
    assert not worker.values(batch).any()


def test_metrics_of_an_update(model_directory: Path) -> None:
    batch = with_targets(random_batch(num_groups=4))
    metrics = critic(model_directory, value_clip=0.2, lr=1e-3).update(batch)
    assert metrics["critic/lr"] == 1e-3
    assert 0 < metrics["critic/clip_frac"] < 1
    assert metrics["critic/skipped"] == 0.0
    assert 0 < metrics["time/mfu/critic"] == pytest.approx(metrics["time/tflops/critic"] / 0.5)


def state_of(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("actor", [{}, {"lora": LORA}], ids=["whole", "adapters"])
@pytest.mark.parametrize("kind", ["head on the actor", "adapters on the actor"])
def test_a_critic_on_the_actors_trunk_leaves_the_actor_as_it_was(
    model_directory: Path, kind: str, actor: dict[str, Any]
) -> None:
    worker, batch = shaken(critic(model_directory, actor=actor, **KINDS[kind])), with_targets(random_batch())
    host: Any = worker.context.host
    before = state_of(list(host.engine.model.parameters()))
    flags = [parameter.requires_grad for parameter in host.engine.model.parameters()]
    logprobs_BT = host.logprobs(batch)
    worker.values(batch)
    worker.update(batch)
    assert state_of(list(host.engine.model.parameters())) == before
    assert [parameter.requires_grad for parameter in host.engine.model.parameters()] == flags
    assert all(parameter.grad is None for parameter in host.engine.model.parameters())
    assert np.array_equal(host.logprobs(batch), logprobs_BT)
    own = sum(parameter.numel() for parameter in worker.engine.model.parameters())
    assert own < 0.3 * sum(parameter.numel() for parameter in host.engine.model.parameters())


def test_on_a_whole_actor_the_critic_sees_the_weights_of_the_moment_and_on_adapters_the_frozen_base(
    model_directory: Path,
) -> None:
    for actor, moves in (({}, True), ({"lora": LORA}, False)):
        worker, batch = shaken(critic(model_directory, actor=actor, trunk="actor")), random_batch()
        before_BT = worker.values(batch)
        host: Any = worker.context.host
        host.update(batch)
        assert np.array_equal(worker.values(batch), before_BT) is not moves


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_critic_continues_bit_for_bit(model_directory: Path, tmp_path: Path, kind: str) -> None:
    settings = KINDS[kind] | {"lr_schedule": "linear", "warmup_steps": 1}
    batch, make = with_targets(random_batch()), _maker(model_directory, settings)
    worker, other = make(), make()
    worker.update(batch)
    worker.save(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    for value in (worker, other):
        assert value.update(batch)["critic/lr"] == pytest.approx(1e-2)
    assert np.array_equal(worker.values(batch), other.values(batch))
    assert (tmp_path / "saved" / "model" / "config.json").exists() is (kind == "whole")


def test_another_alpha_of_adapters_on_the_actor_is_refused(model_directory: Path, tmp_path: Path) -> None:
    critic(model_directory, trunk="actor", lora=replace(LORA, alpha=8.0)).save(tmp_path)
    other = critic(model_directory, trunk="actor", lora=replace(LORA, alpha=64.0))
    before = [parameter.clone() for parameter in trained(other)]
    message = r"trained with plugins\.critic_engine\.lora\.alpha=8, and this critic's is 64; needs .*alpha=8, or"
    with pytest.raises(CheckpointError, match=message) as caught:
        other.restore(tmp_path)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(*pair) for pair in zip(before, trained(other), strict=True))


def _maker(model_directory: Path, settings: dict[str, Any]) -> Callable[[], HfCritic]:
    def make() -> HfCritic:
        worker = critic(model_directory, **settings)
        worker.expect(4)
        return worker

    return make
