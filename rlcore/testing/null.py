"""The plugin `null`: workers without torch, so that a whole run can be tested in milliseconds.

Its policy is one softmax over the byte vocabulary, the same at every position. A plain policy gradient with Adam in
float64 trains it. These are real numbers, so "bitwise equal after resume" is a real test. `SETTINGS` are the overrides
of a run with it. `model.path` is not read: training starts from the uniform distribution.

Shape letters: B rows, T token positions, V vocabulary.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.aio import SleepGate
from rlcore.config.providers import ConfigSection
from rlcore.contracts.actor import ACTOR, ActorWorker
from rlcore.contracts.critic import CriticWorker
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import RewardFunction, WorkerClass
from rlcore.contracts.reference import ReferenceWorker
from rlcore.contracts.rollout import RolloutWorker
from rlcore.contracts.workers import WorkerContext
from rlcore.data.tokenizer import ByteTokens
from rlcore.errors import CheckpointError, WorkerError
from rlcore.testing.null_busy import Busy
from rlcore.testing.null_critic import NullCritic
from rlcore.testing.null_decoding import Float64s, decode, log_softmax
from rlcore.testing.null_settings import NullSection
from rlcore.types import Batch, Completion, Float32s, GenerateRequest, Metrics, TokenScores, WeightsHandle

ADAM_EPSILON = 1e-8


SETTINGS: tuple[str, ...] = (
    "model.path=none",
    "model.tokenizer=bytes",
    f"data.sources.all.path={Path(__file__).with_name('null_prompts.jsonl')}",
    "actor.backend=null",
    "rollout.backend=null",
    "reward.functions.letters.fn=count_letter",
    "reward.functions.letters.children=1",
)
"""Overrides of a run on this plugin, which `--plugin null` enables. rlcore ships its 16 prompts."""


def logprobs_of(logits_V: Float64s, batch: Batch, temperature: float) -> Float32s:
    """(B, T) log-probs of the batch's tokens; 0 at position 0 and at padding."""
    tokens = batch.tokens
    logprobs_BT = log_softmax(logits_V, temperature)[tokens.token_ids_BT]
    counts_BT = tokens.valid_BT.copy()
    counts_BT[:, 0] = False
    return np.where(counts_BT, logprobs_BT, 0.0).astype(np.float32)


def _settings(context: WorkerContext) -> NullSection:
    return NullSection() if context.section is None else context.settings(NullSection)


class NullActor(Busy, ActorWorker):
    """A unigram policy. Its busy time covers updates, log-probs and the sampling of an embedded rollout."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.settings = _settings(context)
        self.logits_V: Float64s = np.zeros(ByteTokens.VOCABULARY)
        self.published_V: Float64s = self.logits_V
        self.moment1_V: Float64s = np.zeros(ByteTokens.VOCABULARY)
        self.moment2_V: Float64s = np.zeros(ByteTokens.VOCABULARY)
        self.num_updates = 0
        self.num_adam_steps = 0
        self.skipped_in_a_row = 0
        self.version = 0

    def setup(self) -> None:
        time.sleep(self.settings.setup_s)

    def logprobs(self, batch: Batch) -> Float32s:
        time.sleep(self.settings.logprobs_s)
        with self.busy():
            return logprobs_of(self.logits_V, batch, self.context.config.rollout.temperature)

    def token_scores(self, batch: Batch) -> TokenScores:
        logprobs_BT = self.logprobs(batch)
        logprobs_V = log_softmax(self.logits_V, self.context.config.rollout.temperature)
        entropy = -float((np.exp(logprobs_V) * logprobs_V).sum())
        return TokenScores(logprobs_BT, np.where(batch.tokens.loss_mask_BT, entropy, 0.0).astype(np.float32))

    def update(self, minibatch: Batch) -> Metrics:
        """One Adam step on -sum_b weights_B[b] * sum_t advantage * log-prob: the policy gradient without clipping."""
        time.sleep(self.settings.update_s)
        with self.busy():
            return self._update(minibatch)

    def _update(self, minibatch: Batch) -> Metrics:
        self.num_updates += 1
        if self.num_updates == self.settings.fail_at_update:
            raise RuntimeError(f"update {self.num_updates} fails, as plugins.null.fail_at_update says")
        if minibatch.weights_B is not None and not minibatch.weights_B.any():
            return {"actor/skipped": 1.0}  # Adam would move the weights even with a gradient of 0
        loss, gradient_V = self._gradient(minibatch)
        if self.num_updates in self.settings.nan_updates:
            gradient_V = gradient_V * np.nan
        norm = float(np.sqrt((gradient_V**2).sum()))
        if not np.isfinite(norm):
            return self._skip()
        self.skipped_in_a_row = 0
        config = self.context.config.actor
        if config.max_grad_norm and norm > config.max_grad_norm:
            gradient_V = gradient_V * (config.max_grad_norm / norm)
        self._adam(gradient_V)
        metrics = {"actor/loss": loss, "actor/grad_norm": norm, "actor/lr": float(config.lr), "actor/skipped": 0.0}
        return metrics | self._of_policy(minibatch)

    def _of_policy(self, minibatch: Batch) -> Metrics:
        """Metrics: entropy, KL from the reference, and the distance of the sampler from the published weights."""
        temperature, tokens = self.context.config.rollout.temperature, minibatch.tokens
        logprobs_V, mask_BT = log_softmax(self.logits_V, temperature), tokens.loss_mask_BT
        metrics = {"policy/entropy": -float((np.exp(logprobs_V) * logprobs_V).sum())}
        if minibatch.reference_logprobs_BT is not None and mask_BT.any():
            kl_BT = logprobs_of(self.logits_V, minibatch, temperature) - minibatch.reference_logprobs_BT
            metrics["policy/kl"] = float(kl_BT[mask_BT].mean())
        if minibatch.same_weights_BT is not None:
            mask_BT = mask_BT & minibatch.same_weights_BT
        if mask_BT.any():
            differ_BT = logprobs_of(self.published_V, minibatch, temperature) - tokens.rollout_logprobs_BT
            metrics["policy/rollout_logprob_diff"] = float(np.abs(differ_BT[mask_BT]).mean())
        return metrics

    def _gradient(self, minibatch: Batch) -> tuple[float, Float64s]:
        temperature = self.context.config.rollout.temperature
        tokens = minibatch.tokens
        weights_B = minibatch.weights_B if minibatch.weights_B is not None else np.ones(len(minibatch))
        if minibatch.advantages_BT is not None:
            advantages_BT = minibatch.advantages_BT
        elif minibatch.advantages_B is not None:
            advantages_BT = np.broadcast_to(minibatch.advantages_B[:, None], tokens.loss_mask_BT.shape)
        else:
            raise WorkerError("the mini-batch has no advantages")
        factors_BT = np.where(tokens.loss_mask_BT, weights_B[:, None] * advantages_BT, 0.0).astype(np.float64)
        logprobs_V = log_softmax(self.logits_V, temperature)
        loss = -float((factors_BT * logprobs_V[tokens.token_ids_BT]).sum())
        pull_V = np.bincount(tokens.token_ids_BT.ravel(), factors_BT.ravel(), minlength=len(self.logits_V))
        gradient_V = -(pull_V - factors_BT.sum() * np.exp(logprobs_V)) / temperature
        return loss, gradient_V

    def _adam(self, gradient_V: Float64s) -> None:
        config = self.context.config.actor
        self.num_adam_steps += 1
        self.moment1_V = config.beta1 * self.moment1_V + (1 - config.beta1) * gradient_V
        self.moment2_V = config.beta2 * self.moment2_V + (1 - config.beta2) * gradient_V**2
        mean_V = self.moment1_V / (1 - config.beta1**self.num_adam_steps)
        square_V = self.moment2_V / (1 - config.beta2**self.num_adam_steps)
        decayed_V = self.logits_V * (1 - config.lr * config.weight_decay)
        self.logits_V = decayed_V - config.lr * mean_V / (np.sqrt(square_V) + ADAM_EPSILON)

    def _skip(self) -> Metrics:
        self.skipped_in_a_row += 1
        limit = self.context.config.actor.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            raise WorkerError(
                f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite; "
                f"actor.max_skipped_updates={limit}"
            )
        return {"actor/skipped": 1.0}

    def publish(self, version: int) -> None:
        self.version, self.published_V = version, self.logits_V

    def weights(self, version: int, directory: Path) -> WeightsHandle:
        directory.mkdir(parents=True)
        np.save(directory / "logits_V.npy", self.logits_V)
        return WeightsHandle(version, "directory", str(directory))

    def save(self, directory: Path) -> None:
        time.sleep(self.settings.save_s)
        _write(directory, self._saved())

    def snapshot(self) -> bool:
        self._copied = self._saved()
        return True

    async def write_snapshot(self, directory: Path) -> None:
        await asyncio.sleep(self.settings.save_s)
        _write(directory, self._copied)

    def _saved(self) -> dict[str, Float64s | dict[str, Any]]:
        """Contents of the files of a checkpoint. Updates replace arrays and never change them."""
        counters = {
            "num_updates": self.num_updates,
            "num_adam_steps": self.num_adam_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "version": self.version,
        }
        return {
            "model/config.json": {"model_type": "null", "vocab_size": len(self.logits_V)},
            "model/logits_V.npy": self.logits_V,
            "moment1_V.npy": self.moment1_V,
            "moment2_V.npy": self.moment2_V,
            "actor.json": counters,
        }

    def restore(self, directory: Path) -> None:
        self.logits_V = self.published_V = _load(directory / "model" / "logits_V.npy")
        self.moment1_V = _load(directory / "moment1_V.npy")
        self.moment2_V = _load(directory / "moment2_V.npy")
        counters = json.loads((directory / "actor.json").read_text())
        self.num_updates, self.num_adam_steps = counters["num_updates"], counters["num_adam_steps"]
        self.skipped_in_a_row, self.version = counters["skipped_in_a_row"], counters["version"]

    def facts(self) -> dict[str, Any]:
        return {"num_parameters": len(self.logits_V), "context_length": None, "vocabulary": len(self.logits_V)}


def _write(directory: Path, files: Mapping[str, Float64s | dict[str, Any]]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            path.write_text(json.dumps(content))
        else:
            np.save(path, content)


def _load(path: Path) -> Float64s:
    array_V = np.load(path, allow_pickle=False)
    if array_V.shape != (ByteTokens.VOCABULARY,) or array_V.dtype != np.float64:
        raise CheckpointError(f"{path}: {array_V.dtype} of shape {array_V.shape}; needs float64 of the vocabulary")
    return np.asarray(array_V)


class NullReference(ReferenceWorker):
    """The initial policy, which is uniform."""

    def setup(self) -> None:
        """Does nothing: the policy needs no files."""

    def logprobs(self, batch: Batch) -> Float32s:
        time.sleep(_settings(self.context).logprobs_s)
        uniform_V = np.zeros(ByteTokens.VOCABULARY)
        return logprobs_of(uniform_V, batch, self.context.config.rollout.temperature)


class NullRollout(RolloutWorker):
    """Samples from the actor that hosts it."""

    def setup(self) -> None:
        if not isinstance(self.context.host, NullActor):
            raise WorkerError("the null rollout is served inside the null actor; set actor.backend=null")
        self._actor = self.context.host

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        decoding = decode(requests, self._actor.settings, self._policy, busy=self._actor.busy)
        async with aclosing(decoding) as completions:
            async for completion in completions:
                yield completion

    def _policy(self) -> tuple[int, int, Float64s]:
        version, forgotten = self._actor.version, self._actor.settings.forget_version
        version = min(version, forgotten - 1) if forgotten else version
        return version, self._actor.num_updates, self._actor.logits_V


class NullReplica(RolloutWorker):
    """Samples in a separate process, with the weights that it loaded last."""

    def setup(self) -> None:
        self._settings = _settings(self.context)
        self._logits_V: Float64s = np.zeros(ByteTokens.VOCABULARY)
        self._version = 0
        self._admission = SleepGate()

    async def sleep(self) -> None:
        await self._admission.close()

    async def wake(self) -> None:
        self._admission.open()

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        decoding = decode(requests, self._settings, lambda: (self._version, 0, self._logits_V), self._die_at)
        async with self._admission.inside(), aclosing(decoding) as completions:
            async for completion in completions:
                yield completion

    async def load_weights(self, handle: WeightsHandle) -> int:
        forgotten = self._settings.forget_version
        if not forgotten or handle.version < forgotten:
            loaded_V = self._logits_V if self._settings.keep_weights else _load(Path(handle.path) / "logits_V.npy")
            self._logits_V, self._version = loaded_V, handle.version
        return handle.version

    def _die_at(self, decoded: int) -> None:
        if not self._settings.die_at_token or decoded < self._settings.die_at_token:
            return
        for death in range(self._settings.num_deaths):
            mark = self.context.run_dir / f"a replica has died {death + 1}"
            with contextlib.suppress(FileExistsError):
                mark.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("null", NullSection)]


@hookimpl
def rlcore_reward_functions() -> Sequence[RewardFunction]:
    return [RewardFunction("count_letter", "rlcore.testing.letters:count_letter")]


@hookimpl
def rlcore_worker_classes() -> Sequence[WorkerClass]:
    return [
        WorkerClass(ActorWorker, "null", NullActor),
        WorkerClass(ReferenceWorker, "null", NullReference),
        WorkerClass(CriticWorker, "null", NullCritic),
        WorkerClass(RolloutWorker, "null", NullRollout, embedded_in=ACTOR, keeps_cache=True),
        WorkerClass(RolloutWorker, "null_replica", NullReplica, isolated=True, keeps_cache=True),
    ]
