"""Weights that come to a vLLM engine by broadcast, through shared memory, and while it samples: for real, on a CPU,
with a tiny model.

With the Python of .venv-vllm. Gloo carries the broadcasts; NCCL itself needs GPUs.
"""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlcore import Completion, GenerateRequest, Sampling, WeightsHandle
from rlcore.testing.marks import needs
from rlcore.testing.tiny import write_tiny_model

if TYPE_CHECKING:
    from rlcore_vllm.sampler import VllmSampler

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(330),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

PROMPT = (5, 6, 7)
DOOMED = """
import os, signal, sys
from rlcore.contracts.weight_groups import GroupReceiver
from rlcore.contracts.weight_memory import mapped_weights
from rlcore.types import WeightsHandle
kind, address = sys.argv[1:]
broadcast = WeightsHandle(1, "nccl", address, 2)
weights = mapped_weights(address) if kind == "shm" else GroupReceiver().weights(broadcast)
for number, _ in enumerate(weights):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("case", ["broadcast", "kept"])
def test_a_real_engine(case: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", __file__, case, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=320, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def started(path: Path, *, keeps_cache: bool) -> "VllmSampler":
    from rlcore_vllm.engine import open_engine
    from rlcore_vllm.sampler import VllmSampler

    from rlcore.data.tokenizer import ByteTokens

    arguments = {
        "model": str(path),
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 600,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**26,
        "enable_chunked_prefill": False,
        "weight_transfer_config": {"backend": "rlcore_actor"},
    }
    return VllmSampler(open_engine(arguments, "rollout[0.0]", 1), ByteTokens(), "rollout[0.0]", keeps_cache=keeps_cache)


def models(directory: Path, num: int) -> tuple[Path, list[Any]]:
    """A model directory, and the model with its weights times 1, 1.3, 1.6 and so on."""
    import torch
    from transformers import AutoModelForCausalLM

    path = write_tiny_model(
        directory / "tiny", num_attention_heads=1, intermediate_size=8192, max_position_embeddings=1024
    )
    found = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(num)]
    for number, model in enumerate(found):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.3 * number)
    return path, found


async def sampled(sampler: "VllmSampler", name: str, max_tokens: int, stop: tuple[str, ...] = ()) -> list[Completion]:
    request = GenerateRequest(name, PROMPT, Sampling(max_tokens=max_tokens, stop=stop), 4, 5)
    return [completion async for completion in sampler.generate([request])]


def check(completion: Completion, by_version: Sequence[Any] | Mapping[int, Any]) -> None:
    """Every token has the log-prob that its version gives after the keys and values of those before."""
    import torch

    from rlcore.engines.hf.cache_name import cache_name

    ids = torch.tensor([*PROMPT, *completion.token_ids.tolist()])
    runs, cache, done = completion.versions, None, 0
    ends = [*(offset for offset, _ in runs[1:]), len(completion.token_ids)]
    for (begin, version), end in zip(runs, ends, strict=True):
        model, name = by_version[version], cache_name(by_version[version].base_model)
        with torch.no_grad():
            output = model(ids[None, done : len(PROMPT) + end - 1], use_cache=True, **{name: cache})
        done, cache = len(PROMPT) + end - 1, getattr(output, name)
        logprobs_TV = output.logits[0].log_softmax(-1)[-(end - begin) :]
        found_N = logprobs_TV.gather(1, ids[len(PROMPT) + begin : len(PROMPT) + end, None])[:, 0]
        assert (found_N - torch.tensor(completion.logprobs[begin:end])).abs().max() < 1e-3, (begin, version)


async def broadcast(directory: Path) -> None:
    """A receiver is killed in the middle of a version that the engine takes, too; the next one comes by broadcast."""
    from rlcore.engines.group_server import group_server

    path, by_version = models(directory, 3)
    sampler = started(path, keeps_cache=False)
    with closing(sampler), closing(group_server("127.0.0.1", 1, "gloo", "cpu")) as server:
        address = server.offer(by_version[1].state_dict().items())
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, "nccl", address])
        assert await sampler.load_weights(WeightsHandle(1, "nccl", address, 2)) == 1
        assert doomed.wait(30) == -9
        for completion in await sampled(sampler, "after a loss", 8):
            assert completion.versions == ((0, 1),)
            check(completion, by_version)
        address = server.offer(by_version[2].state_dict().items())
        assert await sampler.load_weights(WeightsHandle(2, "nccl", address, 1)) == 2
        for completion in await sampled(sampler, "alone in a group", 8):
            assert completion.versions == ((0, 2),)
            check(completion, by_version)
        assert await sampler.load_weights(WeightsHandle(2, "nccl", address)) == 2  # alone, from the copy
        await shared(sampler, by_version)


async def shared(sampler: "VllmSampler", by_version: Sequence[Any]) -> None:
    """The same through shared memory: a receiver is killed in the middle, and one takes a version again.

    A later version in the same memory does not change what the engine has.
    """
    from rlcore.engines.memory_server import memory_server

    with closing(memory_server()) as server:
        address = server.offer(by_version[1].state_dict().items())
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, "shm", address])
        for _ in range(2):
            assert await sampler.load_weights(WeightsHandle(3, "shm", address)) == 3
        assert doomed.wait(30) == -9
        server.offer((name, 0 * tensor) for name, tensor in by_version[1].state_dict().items())
        for completion in await sampled(sampler, "from shared memory", 8):
            assert completion.versions == ((0, 3),)
            check(completion, {3: by_version[1]})


async def kept(directory: Path) -> None:
    """Requests continue with their cache: no token is computed again, and each has its version."""
    path, by_version = models(directory, 3)
    sampler = started(path, keeps_cache=True)
    calls: list[str] = []
    generate = sampler._engine.generate

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(arguments[2])
        return generate(*arguments, **more)

    sampler._engine.generate = counted
    with closing(sampler):
        samples = [asyncio.create_task(sampled(sampler, name, 500, stop)) for name, stop in NAMES.items()]
        for version in (1, 2):
            by_version[version].save_pretrained(directory / str(version))
            await asyncio.sleep(1.0)
            await sampler.load_weights(WeightsHandle(version, "directory", str(directory / str(version))))
        found = [completion for task in samples for completion in await task]
        assert len(calls) == len(found) == 8, "none was asked for twice"
        assert any(len(completion.versions) == 3 for completion in found), [c.versions for c in found]
        for completion in found:
            check(completion, by_version)
        for completion in await sampled(sampler, "later", 8):
            assert completion.versions == ((0, 2),)
            check(completion, by_version)


NAMES: dict[str, tuple[str, ...]] = {"whole": (), "token by token": ("~Q", "x")}


if __name__ == "__main__":
    asyncio.run({"broadcast": broadcast, "kept": kept}[sys.argv[1]](Path(sys.argv[2])))
