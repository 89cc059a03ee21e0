"""Calls of a sampler to its engine when it sleeps, gets weights and wakes: memory of weights first, the cache last.

The engine is a fake one: only what it is asked, and what fails, counts. A real one is in `test_vllm_arrival.py`. With
the Python of .venv-vllm.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlcore import GenerateRequest, Sampling, WeightsHandle, WorkerError
from rlcore.testing.marks import needs

if TYPE_CHECKING:
    from rlcore_vllm.sampler import VllmSampler

pytestmark = [
    pytest.mark.real,
    needs("vllm", "`make setup-vllm`, then .venv-vllm/bin/python -m pytest -m real"),
]

WEIGHTS, CACHE = 3, 5
"""Sizes on the device of the fake engine's."""


class Engine:
    """An engine with the memory of a device; `faults` are calls that fail."""

    errored = False

    def __init__(self, *faults: str) -> None:
        self.calls: list[str] = []
        self.faults = set(faults)
        self.held = {"weights": WEIGHTS, "kv_cache": CACHE}

    def _ask(self, what: str) -> None:
        self.calls.append(what)
        if what in self.faults:
            self.faults.discard(what)
            raise RuntimeError(f"{what} fails")

    async def sleep(self, level: int) -> None:
        self._ask(f"sleep {level}")
        self.held = {}

    async def is_sleeping(self) -> bool:
        return len(self.held) < 2

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._ask(f"wake {' '.join(tags or ('all',))}")
        sizes = {"weights": WEIGHTS, "kv_cache": CACHE}
        self.held |= {tag: sizes[tag] for tag in tags or sizes}

    async def start_weight_update(self) -> None:
        self._ask("start")

    async def update_weights(self, request: Any) -> None:
        assert self.held.get("weights"), "weights are loaded where they have memory"
        self._ask("load")

    async def finish_weight_update(self, weight_version: str) -> None:
        self._ask(f"finish {weight_version}")

    async def add_lora(self, request: Any) -> bool:
        assert self.held.get("weights"), "an adapter is loaded where it has memory"
        self._ask("adapter")
        return True

    async def update_weight_version(self, version: str) -> None:
        self._ask(f"finish {version}")

    async def reset_prefix_cache(self) -> bool:
        self._ask("reset")
        return True

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._ask(f"pause {mode} {clear_cache}")

    async def resume_generation(self) -> None:
        self._ask("resume")

    async def abort(self, requests: Sequence[str]) -> None:
        self._ask(f"abort {len(requests)}")
        self.on_abort()

    def on_abort(self) -> None:
        """Nothing is in flight."""


@pytest.fixture
def handle(tmp_path: Path) -> WeightsHandle:
    (tmp_path / "model.safetensors").touch()
    return WeightsHandle(1, "directory", str(tmp_path))


def sampler_of(engine: Engine, **how: Any) -> "VllmSampler":
    from rlcore_vllm.sampler import VllmSampler

    from rlcore.data.tokenizer import ByteTokens

    return VllmSampler(engine, ByteTokens(), "rollout[0.0]", **how)


async def refuses_to_sample(sampler: "VllmSampler") -> str:
    request = GenerateRequest("r", (1, 2), Sampling(max_tokens=2), 1, 5)
    sampler._engine.model_config = type("Config", (), {"max_model_len": 16})
    with pytest.raises(WorkerError) as caught:
        async with asyncio.timeout(5):
            [completion async for completion in sampler.generate([request])]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_weights_are_discarded_and_have_memory_again_before_the_cache_of_keys_and_values(handle: WeightsHandle) -> None:
    engine = Engine()

    async def main() -> None:
        sampler = sampler_of(engine)
        await sampler.sleep(release=True)
        assert not engine.held
        assert await sampler.load_weights(handle) == 1
        assert engine.held == {"weights": WEIGHTS}, "the actor's device has no room for the cache yet"
        await sampler.wake()
        assert engine.held == {"weights": WEIGHTS, "kv_cache": CACHE}

    asyncio.run(main())
    assert engine.calls == ["sleep 2", "wake weights", "start", "load", "finish 1", "reset", "wake all"]


def test_an_engine_that_takes_adapters_keeps_its_weights(handle: WeightsHandle) -> None:
    engine = Engine()

    async def main() -> None:
        sampler = sampler_of(engine, takes_adapter=True)
        await sampler.sleep(release=True)
        await sampler.load_weights(WeightsHandle(1, "adapter", handle.path))
        await sampler.wake()

    asyncio.run(main())
    assert engine.calls == ["sleep 1", "wake weights", "adapter", "finish 1", "reset", "wake all"]


def test_a_sampler_that_is_awake_or_on_a_cpu_moves_nothing(handle: WeightsHandle) -> None:
    engine = Engine()

    async def main() -> None:
        sampler = sampler_of(engine)
        await sampler.wake()
        await sampler.load_weights(handle)
        await sampler.sleep(release=False)
        await sampler.load_weights(handle)
        await sampler.wake()

    asyncio.run(main())
    assert engine.calls == ["start", "load", "finish 1", "reset"] * 2


def test_a_request_to_a_sleeping_sampler_waits_for_its_waking() -> None:
    """Also if no weights are loaded in between, which would close it, too."""
    engine = Engine()
    engine.model_config = type("Config", (), {"max_model_len": 16})  # type: ignore[attr-defined]

    async def main() -> None:
        requested = asyncio.Event()

        async def generate(*arguments: object, **more: object) -> AsyncIterator[None]:
            requested.set()
            await asyncio.Event().wait()
            yield

        engine.generate = generate  # type: ignore[attr-defined]
        sampler = sampler_of(engine)
        await sampler.sleep(release=False)
        request = GenerateRequest("r", (1, 2), Sampling(max_tokens=2), 1, 5)
        sampling = asyncio.create_task(anext(aiter(sampler.generate([request]))))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(requested.wait(), 0.3)
        await sampler.wake()
        await asyncio.wait_for(requested.wait(), 5)
        sampling.cancel()
        await asyncio.wait([sampling])

    asyncio.run(main())


CALLS = {
    "sleep": "sleep",
    "wake_up": "wake",
    "start_weight_update": "load",
    "update_weights": "load",
    "finish_weight_update": "load",
    "reset_prefix_cache": "load",
    "add_lora": "adapter",
    "update_weight_version": "adapter",
}
"""Calls of the engine, and what asks for each."""


@pytest.mark.parametrize("call", CALLS)
def test_an_engine_that_dies_during_a_call_is_an_error_and_not_a_wait(
    call: str, handle: WeightsHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reports nothing about a call in flight when the engine dies."""
    from rlcore_vllm import sampler as module

    engine = Engine()

    async def die(*arguments: object, **more: object) -> None:
        engine.errored = True
        await asyncio.Event().wait()

    async def ask() -> None:
        sampler = sampler_of(engine, takes_adapter=CALLS[call] == "adapter")
        if CALLS[call] == "wake":
            await sampler.sleep(release=True)
        setattr(engine, call, die)
        async with asyncio.timeout(20):
            if CALLS[call] == "sleep":
                await sampler.sleep(release=True)
            elif CALLS[call] == "wake":
                await sampler.wake()
            else:
                kind = "adapter" if CALLS[call] == "adapter" else "directory"
                await sampler.load_weights(WeightsHandle(1, kind, handle.path))

    monkeypatch.setattr(module, "LOOK_S", 0.01)
    with pytest.raises(WorkerError, match=r"rollout\[0\.0\]: its engine died during a call$"):
        asyncio.run(ask())


def test_an_engine_that_wakes_without_weights_samples_nothing_until_it_has_some(handle: WeightsHandle) -> None:
    """The state after a step that failed: what is in its memory is not a model."""

    async def main() -> None:
        sampler = sampler_of(engine := Engine())
        await sampler.sleep(release=True)
        await sampler.wake()
        assert len(engine.held) == 2, "nothing sleeps on"
        assert "its weights were discarded in its sleep, and it got none" in await refuses_to_sample(sampler)
        await sampler.load_weights(handle)
        assert not sampler._broken

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["sleep 2", "wake weights", "start", "load", "finish 1", "reset", "wake all"])
def test_what_fails_is_one_line_and_leaves_nothing_asleep(fault: str, handle: WeightsHandle) -> None:
    """In the order of a step, and then as its end: servers are woken."""
    engine = Engine(fault)

    async def main() -> list[str]:
        sampler, errors = sampler_of(engine), list[str]()

        async def attempt(call: Callable[[], Awaitable[Any]]) -> bool:
            try:
                async with asyncio.timeout(5):
                    await call()
            except WorkerError as error:
                errors.append(str(error))
            return not errors

        step: list[Callable[[], Awaitable[Any]]] = [
            lambda: sampler.sleep(release=True),
            lambda: sampler.load_weights(handle),
            sampler.wake,
        ]
        for call in step:
            if not await attempt(call):
                break
        await sampler.wake()
        assert len(engine.held) == 2
        if fault != "wake all":
            assert await refuses_to_sample(sampler), "its weights are not those of a version"
        return errors

    [error] = asyncio.run(main())
    assert f"{fault} fails" in error
    assert "\n" not in error


@pytest.mark.parametrize("fault", ["", "pause keep False", "load", "finish 1", "resume"])
def test_kept_requests_are_paused_and_then_resumed_or_aborted(fault: str, handle: WeightsHandle) -> None:
    engine = Engine(fault)

    async def main() -> str:
        sampler = sampler_of(engine, keeps_cache=True)
        sampler._in_flight.add("r#0.0")
        sampler._idle.clear()

        def ended() -> None:
            sampler._in_flight.clear()
            sampler._idle.set()

        engine.on_abort = ended  # type: ignore[method-assign]
        try:
            assert await sampler.load_weights(handle) == 1
        except WorkerError:
            assert await refuses_to_sample(sampler)
        return sampler._broken

    broken = asyncio.run(main())
    expected = ["pause keep False", "start", "load", "finish 1", "resume"]
    if fault in ("load", "finish 1"):
        expected[expected.index(fault) + 1 :] = ["abort 1", "resume"]
    assert engine.calls == (expected if fault != "pause keep False" else expected[:1])
    assert bool(broken) == bool(fault)
