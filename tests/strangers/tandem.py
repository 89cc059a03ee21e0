"""An engine that rlcore does not know: each replica samples on two devices with its copy of the weights, and sleeps.

A plugin from public names alone. The policy is that of the plugin `null`: one softmax over bytes.

Shape letter: V vocabulary.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlcore import (
    Completion,
    ConfigError,
    ConfigSection,
    GenerateRequest,
    PoolSpec,
    RolloutWorker,
    RunConfig,
    SampledRow,
    WeightsHandle,
    WorkerClass,
    WorkerRequest,
    hookimpl,
    load_tokens,
    option,
)

NAME = "tandem"
DEVICES = 2
VOCABULARY = 257


@dataclass(frozen=True)
class TandemSettings:
    """Replicas of two devices each."""

    memory_frac: float = option(0.6, used_when="cluster.device == 'cuda'", above=0, at_most=1)
    """Share of each device that a replica reserves while it is awake."""
    broken: str = ""
    """The way in which `complete` is wrong."""


@dataclass(frozen=True)
class Axles:
    """The data that `complete` hands the workers: how a replica is divided."""

    num: int


class Tandem(RolloutWorker):
    """Samples from softmax(logits / temperature), without truncation; notes in the run directory what happens to it."""

    def setup(self) -> None:
        config = self.context.config
        self._tokens = load_tokens(config.model, config.data.system_prompt)
        self._logits_V, self._version = np.zeros(VOCABULARY), 0
        self._awake = asyncio.Event()
        self._awake.set()
        devices = os.environ.get("CUDA_VISIBLE_DEVICES") or "no device"
        axles = self.context.spec.num if self.context.spec else "no"
        self._note(f"set up on {devices} as {self.context.device}, {axles} axles")

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        for request in sorted(requests, key=lambda request: request.id):
            for sample in range(request.n):
                await self._awake.wait()
                yield self._sampled(request, sample)

    def _sampled(self, request: GenerateRequest, sample: int) -> Completion:
        temperature, random = request.sampling.temperature, np.random.default_rng([request.seed, sample])
        scaled_V = self._logits_V / (temperature or 1.0)
        logprobs_V = scaled_V - np.log(np.exp(scaled_V).sum())
        row = SampledRow(request, sample, self._tokens)
        while row.finish is None:
            token = int(random.choice(VOCABULARY, p=np.exp(logprobs_V)) if temperature else scaled_V.argmax())
            row.append(token, float(logprobs_V[token]), self._version)
        return row.completion(generate_s=0.0)

    async def load_weights(self, handle: WeightsHandle) -> int:
        self._logits_V, self._version = np.load(Path(handle.path) / "logits_V.npy"), handle.version
        self._note(f"loaded {handle.version}: {'uniform' if np.ptp(self._logits_V) == 0 else 'trained'}")
        return handle.version

    async def sleep(self) -> None:
        self._awake.clear()
        self._note("asleep")

    async def wake(self) -> None:
        self._awake.set()
        self._note("awake")

    def _note(self, event: str) -> None:
        with (self.context.run_dir / f"tandem_{self.context.replica}.jsonl").open("a") as notes:
            notes.write(json.dumps(event) + "\n")


def complete(config: RunConfig, section: TandemSettings, request: WorkerRequest) -> WorkerRequest:
    """The request with two devices per replica, a pool and a share of their memory."""
    if section.broken == "raises":
        raise RuntimeError("the scales are gone")
    if section.broken == "contradicts":
        return replace(request, pool="elsewhere")
    if section.broken == "refuses":
        raise ConfigError("plugins.tandem.broken: found 'refuses'; needs another value")
    devices = {"": DEVICES, "too many": 64, "half": 1.5}[section.broken] * request.gpus
    frac = section.memory_frac if devices else 0.0
    pool = config.rollout.pool or NAME
    return replace(request, pool=pool, gpus=devices, device_frac=frac, cpus=2.0, spec=Axles(DEVICES))


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection(NAME, TandemSettings, {"rollout.backend": NAME})]


@hookimpl
def rlcore_resource_pools(requests: tuple[WorkerRequest, ...]) -> Sequence[PoolSpec]:
    return [PoolSpec(NAME)] if any(request.pool == NAME for request in requests) else []


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [WorkerClass(RolloutWorker, NAME, Tandem, isolated=True, complete=complete)]
