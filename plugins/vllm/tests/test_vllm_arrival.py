"""Weights that come to a vLLM engine by broadcast, through shared memory, while it samples and while it sleeps: for
real, on a CPU, with a tiny model. All cases share one engine, for its start takes longer than they do.

With the Python of .venv-vllm. Gloo carries the broadcasts; NCCL itself needs GPUs.
"""

import asyncio
import json
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator, Sequence
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
    pytest.mark.xdist_group("arrival"),
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

PROMPT = (5, 6, 7)
DOOMED = """
import os, signal, sys
from rlcore.contracts.weight_groups import GroupReceiver
from rlcore.contracts.weights import weights_of
from rlcore.types import WeightsHandle
kind, address = sys.argv[1:]
handle = WeightsHandle(1, kind, address, 2)
weights = GroupReceiver().weights(handle) if kind == "nccl" else weights_of(handle, borrowed=True)
for number, _ in enumerate(weights):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
"""


CASES = ("kept", "broadcast", "shared", "slept", "over_ipc")
"""In this order, because the weights of each differ from those of the one before."""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The error of each case; empty if it has none."""
    here = tmp_path_factory.mktemp("arrival")
    command = [sys.executable, "-W", "ignore", __file__, str(here)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=320, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads((here / "errors.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_real_engine(case: str, errors: dict[str, str]) -> None:
    assert not errors[case], errors[case]


def started(path: Path) -> Any:
    from rlcore_vllm.engine import open_engine

    arguments = {
        "model": str(path),
        "skip_tokenizer_init": True,
        "logprobs_mode": "processed_logprobs",
        "dtype": "float32",
        "max_num_seqs": 12,
        "max_model_len": 600,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**26,
        "enable_chunked_prefill": False,
        "weight_transfer_config": {"backend": "rlcore_actor"},
    }
    return open_engine(arguments, "rollout[0.0]", 1)


def sampler_of(engine: Any, *, keeps_cache: bool = False) -> "VllmSampler":
    from rlcore_vllm.sampler import VllmSampler

    from rlcore.data.tokenizer import ByteTokens

    return VllmSampler(engine, ByteTokens(), "rollout[0.0]", keeps_cache=keeps_cache)


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


def check(completion: Completion, by_version: Sequence[Any], most: float = 1e-3) -> None:
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
        assert (found_N - torch.tensor(completion.logprobs[begin:end])).abs().max() < most, (begin, version)


async def broadcast(engine: Any, by_version: Sequence[Any], directory: Path) -> None:
    """A receiver is killed in the middle of a version that the engine takes, too; the next one comes by broadcast."""
    from rlcore.engines.group_server import group_server

    sampler = sampler_of(engine)
    with closing(group_server("127.0.0.1", 1, "gloo", "cpu")) as server:
        address = server.offer(by_version[3].state_dict().items())
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, "nccl", address])
        assert await sampler.load_weights(WeightsHandle(3, "nccl", address, 2)) == 3
        assert doomed.wait(30) == -9
        for completion in await sampled(sampler, "after a loss", 8):
            assert completion.versions == ((0, 3),)
            check(completion, by_version)
        address = server.offer(by_version[4].state_dict().items())
        assert await sampler.load_weights(WeightsHandle(4, "nccl", address, 1)) == 4
        for completion in await sampled(sampler, "alone in a group", 8):
            assert completion.versions == ((0, 4),)
            check(completion, by_version)
        assert await sampler.load_weights(WeightsHandle(4, "nccl", address)) == 4  # alone, from the copy


async def shared(engine: Any, by_version: Sequence[Any], directory: Path) -> None:
    """The same through shared memory: a receiver is killed in the middle, and one takes a version again.

    A later version in the same memory does not change what the engine has.
    """
    from rlcore.engines.memory_server import memory_server

    sampler = sampler_of(engine)
    with closing(memory_server()) as server:
        address = server.offer(by_version[5].state_dict().items())
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, "shm", address])
        for _ in range(2):
            assert await sampler.load_weights(WeightsHandle(5, "shm", address)) == 5
        assert doomed.wait(30) == -9
        server.offer((name, 0 * tensor) for name, tensor in by_version[5].state_dict().items())
        for completion in await sampled(sampler, "from shared memory", 8):
            assert completion.versions == ((0, 5),)
            check(completion, by_version)


async def over_ipc(engine: Any, by_version: Sequence[Any], directory: Path) -> None:
    """The same through buckets that the actor fills: a receiver is killed in the middle, and the engine takes the
    version again, asleep, as one that was restarted."""
    from rlcore.engines.ipc_server import IpcServer

    sampler, weights = sampler_of(engine), by_version[7].state_dict().items()
    with closing(IpcServer("cpu", 1)) as server:
        address = server.offer()
        doomed = subprocess.Popen([sys.executable, "-c", DOOMED, "ipc", address])
        for members in (2, 1):
            if members == 1:
                await sampler.sleep(release=True)
            sending = asyncio.create_task(asyncio.to_thread(server.send, members, weights))
            assert await sampler.load_weights(WeightsHandle(7, "ipc", address, members)) == 7
            await sending
        await sampler.wake()
        assert doomed.wait(30) == -9
        for completion in await sampled(sampler, "over IPC", 8):
            assert completion.versions == ((0, 7),)
            check(completion, by_version)


async def slept(engine: Any, by_version: Sequence[Any], directory: Path) -> None:
    """vLLM takes the levels and tags, and samples with what it was given in its sleep.

    On a CPU no memory moves; the engine keeps book of who sleeps, and schedules when nothing does.
    """
    sampler = sampler_of(engine)
    by_version[6].save_pretrained(directory / "6")
    await sampler.sleep(release=True)
    assert await engine.is_sleeping()
    asking = asyncio.create_task(sampled(sampler, "asked in its sleep", 8))
    await sampler.load_weights(WeightsHandle(6, "directory", str(directory / "6")))
    assert await engine.is_sleeping(), "the cache of keys and values sleeps"
    done, _ = await asyncio.wait({asking}, timeout=1.0)
    assert not done, "nothing is sampled before it wakes"
    await sampler.wake()
    assert not await engine.is_sleeping()
    for completion in await asking:
        assert completion.versions == ((0, 6),)
        check(completion, by_version, most=1e-4)


async def kept(engine: Any, by_version: Sequence[Any], directory: Path) -> None:
    """Requests continue with their cache: no token is computed again, and each has its version."""
    sampler = sampler_of(engine, keeps_cache=True)
    calls: list[str] = []
    num_streamed, generate = 0, engine.generate

    async def counted(*arguments: Any, **more: Any) -> AsyncIterator[Any]:
        nonlocal num_streamed
        calls.append(arguments[2])
        async for output in generate(*arguments, **more):
            num_streamed += not output.finished
            yield output

    engine.generate = counted
    for version in (1, 2):
        by_version[version].save_pretrained(directory / str(version))
    samples = [asyncio.create_task(sampled(sampler, name, 500, stop)) for name, stop in NAMES.items()]
    for version in (1, 2):
        enough = num_streamed + 40
        while num_streamed < enough:
            await asyncio.sleep(0.01)
        await sampler.load_weights(WeightsHandle(version, "directory", str(directory / str(version))))
    engine.generate = generate
    found = [completion for task in samples for completion in await task]
    assert len(calls) == len(found) == 12, "none was asked for twice"
    assert sum(len(completion.versions) == 3 for completion in found) >= 4, [c.versions for c in found]
    for completion in found:
        check(completion, by_version)
    for completion in await sampled(sampler, "later", 8):
        assert completion.versions == ((0, 2),)
        check(completion, by_version)


NAMES: dict[str, tuple[str, ...]] = {"whole": (), "token by token": ("~Q",), "until it ends": ("x",)}


async def all_cases(directory: Path) -> dict[str, str]:
    """The errors of each."""
    path, (first, second, third) = models(directory, 3)
    by_version = [first, second, third, second, third, second, third, second]
    engine, errors = started(path), dict[str, str]()
    try:
        for case in (kept, broadcast, shared, slept, over_ipc):
            [error] = await asyncio.gather(case(engine, by_version, directory), return_exceptions=True)
            errors[case.__name__] = "".join(traceback.format_exception(error)) if error else ""
    finally:
        engine.shutdown()
    return errors


if __name__ == "__main__":
    (Path(sys.argv[1]) / "errors.json").write_text(json.dumps(asyncio.run(all_cases(Path(sys.argv[1])))))
