"""The training engine: a transformers model, its optimizer, and a given loss.

The same engine serves every role that trains: the actor here, a critic in a plugin. It is not a worker; a worker owns
one.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.config import EngineConfig, ModelConfig
from rlcore.data.batch import select
from rlcore.data.dealt import split
from rlcore.data.row_costs import LayerCost
from rlcore.engines.hf.listeners import Listeners
from rlcore.engines.hf.train.context import ContextGroup
from rlcore.engines.hf.train.engine_files import engine_files, part_of
from rlcore.engines.hf.train.flops import update_flops
from rlcore.engines.hf.train.gather import gathered_adapter, weights_by_unit
from rlcore.engines.hf.train.loss_scale import LossScale
from rlcore.engines.hf.train.microbatch import Loss, MetricSums, MicroBatch, Predictions, ReadMetrics
from rlcore.engines.hf.train.model import AnyModel, ModelKind, PolicyModel, ValueModel
from rlcore.engines.hf.train.offload import Offload
from rlcore.engines.hf.train.optimizer import MasterAdamW, check_schedule, learning_rate
from rlcore.engines.hf.train.prefix_trial import check_windows
from rlcore.engines.hf.train.ranks import Ranks
from rlcore.engines.hf.train.score import score
from rlcore.engines.hf.train.shards import idle
from rlcore.engines.hf.train.start import start_model
from rlcore.engines.hf.train.state import load_weights, save_adapter, save_whole
from rlcore.engines.hf.train.state_files import StateCopy, StateFile, write_files
from rlcore.engines.hf.train.training_state import load_training_state
from rlcore.engines.hf.train.unit_files import save_whole_in_units
from rlcore.errors import ConfigError, WorkerError
from rlcore.types import Batch, Bools, Float32s, Int64s, Metrics, SharedPrefix, TokenScores

EMPTY: Int64s = np.zeros(0, dtype=np.int64)


class TrainEngine:
    """Trains one model. `update` is exactly one optimizer step, in as many micro-batches as the token budget needs."""

    def __init__(
        self,
        kind: ModelKind | str,
        model: ModelConfig | AnyModel,
        config: EngineConfig,
        loss: Loss | None,
        *,
        name: str = "actor",
        loss_name: str = "policy/loss",
        temperature: float = 1.0,
        num_updates: int = 0,
        device: str = "cpu",
        seed: int = 0,
        section: str = "",
        path_key: str = "model.path",
        peak_tflops: float = 0.0,
        shared_prefix: SharedPrefix = SharedPrefix.NONE,
        taught_rows: Callable[[Batch], Bools] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the model of `model.path`, or use a loaded one.

        `loss`: each token's loss; None: the engine only scores, and freezes a model that it loads. `ranks`: the
        processes that train this model together. With `sharding` each of them loads and keeps only its shard of
        everything, but a model that was passed in is whole until it is sharded. `name` is the prefix of the engine's
        metrics and of its errors, `loss_name` the metric of the weighted loss. `temperature` is the rollout's:
        log-probs are those of softmax(logits / temperature). `num_updates`: optimizer steps of the whole run, 0 while
        unknown. `section`: the configuration section of the settings, for errors; empty: `name`. `path_key`: the key of
        the model's path. `peak_tflops`: the device's, for 'time/mfu/<name>', which is not logged when it is 0.
        `shared_prefix`: how the prompt of a group is computed once for its samples; ConfigError if the model does not
        support it. `taught_rows`: (B,) True for each row of a mini-batch whose loss may have a gradient; an update
        skips the others. None: it computes all rows that have a weight. A new adapter and its dropout depend only on
        `seed` and the number of the update.
        """
        self.kind, self.config, self.name = ModelKind(kind), config, name
        self._section, self._peak_tflops, self._seed = section or name, peak_tflops, seed
        self.device, self.temperature, self.num_updates = torch.device(device), temperature, num_updates
        self.updates_done = self._skipped_in_a_row = 0
        self._loss, self._loss_name, self._taught_rows = loss, loss_name, taught_rows
        self._scale = LossScale(config.dtype == "float16")
        self.ranks = ranks
        """The processes that train this model together; None: this one alone."""
        self._copy: StateCopy | None = None
        started = start_model(
            self.kind,
            model,
            config,
            ranks,
            self.device,
            self._section,
            path_key,
            shared_prefix,
            self._seeded(),
            trains=loss is not None,
        )
        self.model, self._shards, self.shared_prefix = started.model, started.shards, shared_prefix
        self._optimizer = MasterAdamW(self.model, config, seed, started.masters)
        self.before_work = Listeners()
        """Called before passes, updates and saves, so that samplers free turns that they keep in the same memory."""
        self._cost = LayerCost.of_config(self.model.transformer.config.get_text_config())
        self._offload = Offload(self.model, self._optimizer, self.device, config.offload, self._shards)
        self._offload.end()

    @property
    def _context(self) -> ContextGroup | None:
        """The ranks that hold slices of the same sequences; None: this rank has whole sequences."""
        return None if self.ranks is None else self.ranks.context

    @property
    def policy(self) -> PolicyModel:
        """The model of an engine of kind causal_lm; ConfigError for other kinds."""
        if not isinstance(self.model, PolicyModel):
            raise ConfigError(f"{self.name}: a model of kind {self.kind} has no token probabilities")
        return self.model

    def expect(self, num_updates: int) -> None:
        """Set the number of updates of the whole run; a decaying schedule ends there.

        Its position is that of the mini-batch in the run (`Batch.updates_left`); without one, the steps taken.
        """
        self.num_updates = num_updates

    def whole(self) -> AbstractContextManager[None]:
        """Context in which this rank has all weights; every rank must enter it. No updates inside."""
        return nullcontext() if self._shards is None else self._shards.whole()

    def stay_whole(self) -> None:
        """Keep all weights on this rank between updates from now on; every rank must call this."""
        if self._shards is not None:
            self._offload.stay()
            self._shards.stay_whole = True
            with self._shards.whole():
                pass

    def stay_on_device(self) -> None:
        """Keep the weights on the device between updates, even with `offload`, because something computes with them."""
        self._offload.stay()

    def begin_updates(self) -> None:
        """Load offloaded weights to the device until `end_updates`; a second call does nothing."""
        self._offload.begin()

    def end_updates(self) -> None:
        """Free the allocator's cache; with `offload` also move weights that nothing samples from to host memory."""
        self._offload.end()

    def logprobs(self, batch: Batch) -> Float32s:
        """(B, T) log-probs of the loss tokens under softmax(logits / temperature), 0 elsewhere."""
        return self._score(self.policy, batch, self.config.micro_batch_tokens)

    def token_scores(self, batch: Batch) -> TokenScores:
        """(B, T) as `logprobs`, and the entropy of that distribution in nats, from the same pass."""
        return TokenScores(*self._scores(self.policy, batch, self.config.micro_batch_tokens, True))

    def base_logprobs(self, batch: Batch, micro_batch_tokens: int) -> Float32s:
        """(B, T) as `logprobs`, for the base model of the LoRA adapter; ConfigError without an adapter."""
        if self.model.adapter is None:
            raise ConfigError(f"{self.name}: it has no LoRA adapter, so there is no base to compare with")
        with self.policy.without_adapter():
            return self._score(self.policy, batch, micro_batch_tokens)

    def values(self, batch: Batch) -> Float32s:
        """(B, T) values before each loss token is sampled, 0 elsewhere; ConfigError unless the kind is value."""
        if not isinstance(self.model, ValueModel):
            raise ConfigError(f"{self.name}: a model of kind {self.kind} has no values")
        return self._score(self.model, batch, self.config.micro_batch_tokens)

    def update(self, minibatch: Batch) -> Metrics:
        """One optimizer step on the mini-batch, whose `weights_B` hold the denominators.

        The loss is the sum over rows of weights_B[b] times the sum over masked tokens of the loss, so any split into
        micro-batches gives the same gradient. Metrics are averages over the loss tokens of the computed rows
        (`taught_rows`); with it, '<name>/rows_skipped_frac' is the share of the others. '<name>/shared_tokens_frac' is
        the share of their tokens that another row of the micro-batch had computed. Without any row to compute, the
        optimizer steps with gradients of 0: moments and weights decay, and momentum moves the weights. If loss or
        gradient is not finite, weights and optimizer stay unchanged and '<name>/skipped' is 1; WorkerError after
        `max_skipped_updates` times in a row. In float16 an overflowing gradient is first computed again with a lower
        loss scale. Weights also stay unchanged if every row weight of the mini-batch is 0, as for truncated rows with
        `algo.overlong=mask`: momentum would move them without any gradient.
        """
        check_schedule(self.config, self.num_updates, self._section)
        if minibatch.weights_B is not None and not minibatch.weights_B.any():
            return {f"{self.name}/skipped": 1.0}
        self.before_work()
        began = time.perf_counter()
        alone = self._offload.begin()
        try:
            taught = self._taught(minibatch)
            found, norm = self._gradients(minibatch, taught)
            metrics = {self._loss_name: found.loss, **found.result(), **self._step(found.loss, norm, minibatch)}
        finally:
            self._optimizer.clear_gradients()
            if alone:
                self._offload.end()
        if self._shards is not None and self._shards.stay_whole:
            self.stay_whole()
        if self._taught_rows is not None:
            metrics[f"{self.name}/rows_skipped_frac"] = 1.0 - len(taught) / len(minibatch)
        metrics |= self._performance(taught, time.perf_counter() - began)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def save(self, directory: Path) -> None:
        """Write `model/` (LoRA: `adapter/`) and `trainer_state/` with `trainer_state.json` below `directory`.

        The first rank writes; with sharding each rank writes its part of the training state and some of the files of
        `model/`.
        """
        write_files(self._files(), directory, checked=True)

    def snapshot(self) -> None:
        """Copy into host memory what `save` would write, for `write_snapshot`; all ranks must call this."""
        self._copy = StateCopy(self._files())

    def write_snapshot(self, directory: Path) -> None:
        """Write the state of the last `snapshot` as `save` does, once; on any thread, while training continues."""
        if self._copy is None:
            raise ValueError(f"{self.name}: found no snapshot to write; call snapshot() first")
        copied, self._copy = self._copy, None
        copied.write(directory)

    def _files(self) -> Iterator[StateFile]:
        """The files of a checkpoint, made while it is iterated."""
        self.before_work()
        own = {"updates_done": self.updates_done, "skipped_in_a_row": self._skipped_in_a_row}
        with self._offload.gathering():
            yield from engine_files(self.model, self._optimizer, self._shards, self.ranks, own | self._scale.counters())

    def save_whole(self, directory: Path) -> None:
        """Write the model into `directory` for from_pretrained, with an adapter merged into its base.

        The first rank writes.
        """
        with self._offload.gathering():
            if self._shards is not None and self.ranks is not None:
                save_whole_in_units(self.model, self._shards, self.ranks, directory)
            elif self._is_first:
                save_whole(self.model, directory)

    def named_weights(self, takers: int | None = 1) -> Generator[tuple[str, Tensor]]:
        """Yields the name and the tensor of each weight that `save_whole` would write, on one of the first `takers`
        ranks; None: all of them on every rank.

        All ranks must iterate to the end. A tensor is valid until the next one.
        """
        rank = 0 if self.ranks is None or takers is None else self.ranks.rank
        with self._offload.gathering():
            yield from weights_by_unit(self.model, self._shards, rank=rank, takers=takers or 1)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter of a LoRA model into `directory`, as peft does. The first rank writes."""
        with self._offload.gathering():
            weights = gathered_adapter(self.model, self._shards, here=self._is_first)
        if self._is_first:
            save_adapter(self.model, directory, weights)

    @property
    def _is_first(self) -> bool:
        """True for the rank that writes unsharded state."""
        return self.ranks is None or self.ranks.rank == 0

    def restore(self, directory: Path) -> None:
        """Load what `save` wrote, bit for bit: weights, optimizer, random states.

        CheckpointError if it is missing, damaged, or belongs to another model.
        """
        if self._shards is not None:
            self._shards.scatter()
        load_weights(self.model, directory, self._section)
        counters = load_training_state(directory, self._optimizer, *part_of(self._shards))
        if self._shards is not None and self._shards.stay_whole:
            self.stay_whole()
        self._offload.end()
        self.updates_done = counters["updates_done"]
        self._skipped_in_a_row = counters["skipped_in_a_row"]
        self._scale.restore(counters)

    def facts(self) -> dict[str, Any]:
        """num_parameters, num_trainable, context_length and vocabulary (or None)."""
        return self.model.facts()

    def _score(self, model: AnyModel, batch: Batch, micro_batch_tokens: int) -> Float32s:
        return np.asarray(self._scores(model, batch, micro_batch_tokens)[0])

    def _scores(self, model: AnyModel, batch: Batch, most: int, entropy: bool = False) -> Float32s:
        """(K, B, T) scores as `rlcore.engines.hf.train.score.score`, of the rows of all ranks."""
        self.before_work()
        with self._offload.weights(), nullcontext() if self._shards is None else self._shards.by_layers():
            scores_KBT = score(
                model,
                batch,
                self._dealt(batch, most),
                temperature=self.temperature,
                device=self.device,
                shared_prefix=self.shared_prefix,
                context=self._context,
                with_entropy=entropy,
            )
            return scores_KBT if self.ranks is None else self.ranks.summed(scores_KBT)

    def _dealt(self, batch: Batch, most: int) -> list[Int64s]:
        """The rows of each of this rank's micro-batches, of at most `most` tokens; ConfigError for rows that are longer
        than a sliding window if prompts are shared."""
        check_windows(self.model, self.shared_prefix, batch, self._section)
        if self.ranks is None:
            return split(batch, most, self.shared_prefix) if len(batch) else []
        together = self._shards is not None  # also while weights are whole, where it does not change a bit of any score
        return self.ranks.micro_batches(batch, most, self.shared_prefix, self._cost, together=together)

    def _taught(self, minibatch: Batch) -> Batch:
        """The rows of the mini-batch that an update computes; possibly none.

        A row of weight 0 has no loss token, so it is not in any metric's average either.
        """
        weights_B = minibatch.weights_B
        taught_B = np.ones(len(minibatch), dtype=np.bool_) if weights_B is None else weights_B != 0
        if self._taught_rows is not None:
            taught_B = taught_B & self._taught_rows(minibatch)
        rows = np.flatnonzero(taught_B)
        return minibatch if len(rows) == len(minibatch) else select(minibatch, rows)

    def _gradients(self, minibatch: Batch, taught: Batch) -> tuple[ReadMetrics, float]:
        """Leaves clipped gradients of the whole mini-batch in the masters; returns loss, metrics, and the norm before
        clipping."""
        self._scale.begin()
        while True:
            found = self._accumulate(minibatch, taught)
            self._optimizer.unscale_gradients(self._scale.value)
            norm = self._optimizer.clip_gradients(self.config.max_grad_norm)
            if math.isfinite(norm) or not math.isfinite(found.loss) or not self._scale.lower():
                return found, norm
            self._optimizer.clear_gradients()

    def _accumulate(self, minibatch: Batch, taught: Batch) -> ReadMetrics:
        """Leaves gradients of the whole mini-batch, times the loss scale, in the masters; returns unscaled loss and
        metrics.

        If no row is taught, each rank computes a row of weight 0, so weights that have gradients get zeros. It does not
        wait for the device before all micro-batches are queued.
        """
        if self._loss is None or minibatch.weights_B is None:
            raise ValueError(f"{self.name}: an update needs a loss function and the batch's weights_B")
        sums = MetricSums()
        if self._shards is not None:
            self._shards.scatter()
        rows = self._dealt(taught, self.config.micro_batch_tokens) if len(taught) else [EMPTY]
        apart = 0 if self._context is None else self._context.rank
        parts = [select(taught, part) if len(part) else idle(minibatch) for part in rows]  # of weight 0 without rows
        counts = [len(part) > 0 and not apart for part in rows]
        with self.model.training_mode(), self.model.attending(self.shared_prefix), self._seeded(apart), self._adding():
            for index, part in enumerate(parts):
                if self._shards is not None:
                    self._shards.sum_copies(now=index + 1 == len(parts))
                micro = MicroBatch(part, self.device, self.shared_prefix, self._context)
                scores_N, entropy_N = self.model(micro, self.temperature, True)
                terms = self._loss(micro, Predictions(micro.spread(scores_N), micro.spread(entropy_N)))
                partial = micro.weighted(terms.loss_BT)
                (partial * self._scale.value).backward()  # type: ignore[no-untyped-call]
                self._optimizer.collect_gradients()
                if counts[index]:
                    sums.add(terms, micro.mask_BT, partial)
        counted = list(compress(parts, counts))
        read = sums.read().with_shared_tokens(f"{self.name}/shared_tokens_frac", counted, self.shared_prefix)
        if self.ranks is None:
            return read
        if self._shards is None:
            self.ranks.sum_gradients(self._optimizer.masters)
        return ReadMetrics.merged([ReadMetrics(**numbers) for numbers in self.ranks.gather(asdict(read))])

    def _adding(self) -> AbstractContextManager[None]:
        """Context in which gradients are accumulated in place; without effect if FSDP has to see each of them."""
        return self.model.adding_gradients(self._optimizer.summed_in()) if self._shards is None else nullcontext()

    def _performance(self, minibatch: Batch, seconds: float) -> Metrics:
        """time/tflops/<name>: required operations of all ranks per second of wall time; time/mfu/<name>: the same over
        the peak of their devices."""
        with self.model.training_mode():
            tflops = update_flops(self.model, minibatch, self.shared_prefix) / seconds / 1e12
        peak = self._peak_tflops * (1 if self.ranks is None else self.ranks.num)
        of_peak = {f"time/mfu/{self.name}": tflops / peak} if peak else {}
        return {f"time/tflops/{self.name}": tflops, **of_peak}

    @contextmanager
    def _seeded(self, apart: int = 0) -> Iterator[None]:
        """Context in which torch's random numbers depend on this engine and update; the process's stream continues
        unchanged afterwards.

        Ranks with different `apart` get different numbers, so that slices do not share dropout masks.
        """
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed((self._seed * 1_000_003 + self.updates_done + apart * 2**40) % 2**63)
            yield

    def _step(self, loss: float, norm: float, minibatch: Batch) -> Metrics:
        """Step with the clipped gradients, whose norm was `norm`, or skip; returns the engine's metrics."""
        left = minibatch.updates_left
        position = self.updates_done if left is None else self.num_updates - left
        lr = learning_rate(self.config, self.updates_done, position, self.num_updates)
        metrics = self._scale.metrics(self.name)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            with self._offload.state():
                self._optimizer.step(lr)
                self._optimizer.publish(self.updates_done)
            self.updates_done += 1
            self._skipped_in_a_row = 0
            self._scale.succeeded()
        else:
            self._skipped_in_a_row += 1
            self._scale.failed()
            self._stop_if_hopeless(loss, norm)
        return metrics | {
            f"{self.name}/grad_norm": norm,
            f"{self.name}/lr": lr,
            f"{self.name}/skipped": 0.0 if finite else 1.0,
        }

    def _stop_if_hopeless(self, loss: float, norm: float) -> None:
        if self._skipped_in_a_row >= self.config.max_skipped_updates:
            other_format = f", choose {self._section}.dtype=bfloat16" if self._scale.enabled else ""
            raise WorkerError(
                f"{self.name}: {self._skipped_in_a_row} updates in a row had a loss ({loss}) or gradient norm ({norm}) "
                f"that is not finite, and were skipped; {self._section}.max_skipped_updates="
                f"{self.config.max_skipped_updates}; look at rewards and advantages, lower {self._section}.lr"
                f"{other_format}, or start from the last checkpoint"
            )
