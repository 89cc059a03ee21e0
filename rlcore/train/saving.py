"""A run's checkpoints: saved between steps, restored, and saved quickly on a signal."""

import asyncio
import copy
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rlcore.config import CheckpointConfig
from rlcore.contracts.activity import current_activity
from rlcore.contracts.actor import ActorWorker
from rlcore.errors import CheckpointError, PluginError, RlcoreError, boundary
from rlcore.report.metrics import has_results
from rlcore.runtime.launch import owner_of
from rlcore.train import checkpoint
from rlcore.train.best import best_step
from rlcore.train.run_dir import plan_files
from rlcore.train.same_model import check_same_models, model_digests
from rlcore.train.saved_samples import read_scored, write_scored
from rlcore.train.trainer import Trainer

CRITIC = "critic"
"""Directory of the critic engine, with arbitrary contents; missing if it wrote nothing."""
UNFINISHED_CRITIC = ".critic"
"""Its name while it is written, so that an actor's directory of that name is noticed."""
IN_FLIGHT = "in_flight"
"""Directory of the scored trajectories that no step was trained on yet."""
OURS = (checkpoint.STATE, checkpoint.MANIFEST, "config.yaml", "plan.json", CRITIC, IN_FLIGHT)
"""Files in addition to the actor's."""
BYTES_PER_PARAMETER = 16
"""Weights and two Adam moments in fp32, and the model directory."""
BYTES_PER_SECOND = 200e6
"""Writing with fsync and hashing, on a slow disk; used until a save of this run was timed."""

logger = logging.getLogger(__name__)


class Saver:
    """Writes and restores the checkpoints of one run.

    Training waits while workers copy their state, and continues while the copies are written. At most one checkpoint is
    being written: the next one waits for it.
    """

    def __init__(self, trainer: Trainer, run_dir: Path) -> None:
        self._trainer, self._run_dir = trainer, run_dir
        self._config: CheckpointConfig = trainer.config.checkpoint
        self._saving: asyncio.Task[None] | None = None
        self._step_saving = 0
        self._activity = current_activity()
        self._save_s: float | None = None
        self._models: dict[str, str] = {}
        self._num_kept = 0
        """Scored trajectories in flight of the newest checkpoint."""
        self._num_evaluations = 0
        """Evaluations in the state of the newest checkpoint, also of one that is being written."""
        self.ready = False
        """True after the state to continue from was restored; before that there is nothing to save."""
        self.last: Path | None = None
        """The newest checkpoint of the run that verifies."""

    @property
    def best_step(self) -> int | None:
        """The step with the best evaluation, as `checkpoint.best` says; None without that setting or an evaluation."""
        metric, mode = self._config.best, self._config.best_mode
        return best_step(self._trainer.evaluations, metric, mode) if metric else None

    @property
    def best(self) -> Path | None:
        """The checkpoint of `best_step`, if it was saved."""
        path = self._run_dir / "checkpoints" / f"step_{self.best_step}"
        return path if path.is_dir() else None

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint, also of one that is being written."""
        if self._saving is not None:
            return self._step_saving
        return None if self.last is None else checkpoint.step_of(self.last)

    @property
    def is_saved(self) -> bool:
        """True if that checkpoint is of the published step, and has all of its evaluations."""
        trainer = self._trainer
        return self.saved_step == trainer.progress.step and self._num_evaluations == len(trainer.evaluations)

    async def save(self) -> None:
        """Begin to save the published step; returns when training may continue.

        Waits for the checkpoint before; an error of either is raised. A call that is cancelled leaves its save running,
        for `finish`.
        """
        began = time.monotonic()
        self._activity.enter("saving a checkpoint")
        await self.finish()
        copied = asyncio.Event()
        self._step_saving = self._trainer.progress.step
        self._saving = asyncio.create_task(self._save(copied), name="save checkpoint")
        self._saving.add_done_callback(lambda _: copied.set())
        await copied.wait()
        self.check()
        self._trainer.run.sink.record("time/save_blocked_s", time.monotonic() - began)
        self._activity.enter("between steps")

    def check(self) -> None:
        """Raise the error of a save that has failed, once."""
        if self._saving is not None and self._saving.done():
            ended, self._saving = self._saving, None
            ended.result()

    async def finish(self) -> None:
        """Return when no checkpoint is being written; the error of one that failed is raised, once."""
        if self._saving is not None:
            await asyncio.wait({self._saving})
            self.check()

    async def saved(self) -> Path | None:
        """The checkpoint of the published step, written now if necessary."""
        if not self.is_saved:
            await self.save()
        await self.finish()
        return self.last

    async def let_end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Behind an error of the run: wait for a checkpoint that is being written; its error is logged.

        Signals are handled by `save_on_signal`.
        """
        if error is None or isinstance(error, Exception):
            try:
                await self.finish()
            except RlcoreError as problem:
                logger.warning("%s", problem)

    async def _save(self, copied: asyncio.Event) -> None:
        """Save the published step; `copied` is set when training may continue."""
        began, trainer, models = time.monotonic(), self._trainer, await self._model_digests()
        step, (state, in_flight) = trainer.progress.step, trainer.snapshot()
        state, best = copy.deepcopy(state) | models, self.best_step
        self._num_evaluations = len(state["evaluations"])
        logger.info("saving step %d", step)
        self._check_states(state)
        await trainer.written()
        staging = await asyncio.to_thread(checkpoint.staging, self._run_dir, step)
        what = f"checkpoint of step {step} was not saved, what was published before stands"
        with checkpoint.reported(what, staging):
            await self._save_workers(staging, copied)
            await asyncio.to_thread(trainer.run.tokens.save, staging / "model")
            await asyncio.to_thread(write_scored, staging / IN_FLIGHT, in_flight)
            for name, content in plan_files(trainer.run.plan).items():
                (staging / name).write_bytes(content)
        publish = partial(checkpoint.publish, keep=self._config.keep, best=best)
        self.last = await asyncio.to_thread(publish, staging, self._run_dir, step, state)
        self._num_kept = len(in_flight)
        self._save_s = time.monotonic() - began
        logger.info("saved %s in %.1f s", self.last, self._save_s)

    async def _save_workers(self, staging: Path, copied: asyncio.Event) -> None:
        """Actor and critic: what they copy is written behind `copied`, what they cannot copy before."""
        actor, critic, directory = self._trainer.actor, self._trainer.run.critic, staging / UNFINISHED_CRITIC
        await asyncio.to_thread(directory.mkdir)
        copies = self._trainer.run.plan.saves_copies
        later: list[Callable[[], Awaitable[None]]] = []
        if copies and await actor.call(ActorWorker.snapshot):
            later.append(partial(actor.call, ActorWorker.write_snapshot, staging))
        else:
            await actor.call(ActorWorker.save, staging)
        if copies and await critic.snapshot():
            later.append(partial(critic.write_snapshot, directory))
        else:
            await critic.save(directory)
        copied.set()
        for write in later:
            await write()
        await asyncio.to_thread(_check_actor, staging)
        if any(directory.iterdir()):
            await asyncio.to_thread(directory.rename, staging / CRITIC)
        else:
            await asyncio.to_thread(directory.rmdir)

    def _check_states(self, state: Mapping[str, Any]) -> None:
        """PluginError naming the component whose state is not JSON."""
        for slot in ("agent", "reward", "critic"):
            with boundary(f"{owner_of(self._trainer.run.plan.components[slot])}: state()", PluginError):
                json.dumps(state[slot], allow_nan=False)

    async def save_on_signal(self) -> str:
        """Save the published step if that is still possible in time; what was done, in a few words.

        A checkpoint that is being written is waited for first. If that fails, the published step is saved once more,
        also without the records of a step that could not be written: weights that are lost cost more.
        """
        limit = self._config.shutdown_s
        if not self.ready:
            return self._stands("before the first step")
        was_saving = self._saving is not None
        try:
            async with asyncio.timeout(limit):
                try:
                    await self.finish()
                except RlcoreError as problem:
                    logger.warning("%s", problem)
                return self._stands(await self._save_now(limit, "saved" if was_saving else "already saved"))
        except TimeoutError:
            return self._stands(f"the save did not end within checkpoint.shutdown_s={limit:g}")
        except RlcoreError as error:
            return self._stands(f"the save failed: {error}")

    async def _save_now(self, limit: float, is_saved: str) -> str:
        """Save the published step unless it `is_saved` or that takes longer than `limit`; what was done, in words."""
        trainer = self._trainer
        if self.is_saved and len(trainer.snapshot()[1]) <= self._num_kept:
            return is_saved
        if trainer.updating:
            return "the current step is lost"
        expected = await self._expected_s()
        if expected > limit and trainer.progress.step == 0:
            return "in the first step"
        if expected > limit:
            return f"a save takes about {expected:.0f} s, checkpoint.shutdown_s is {limit:g}"
        await self.save()
        await self.finish()
        return "saved"

    async def _model_digests(self) -> dict[str, str]:
        self._models = self._models or await asyncio.to_thread(model_digests, self._trainer.run.plan.config)
        return self._models

    async def _expected_s(self) -> float:
        if self._save_s is not None:
            return self._save_s
        facts = await self._trainer.actor.call(ActorWorker.facts)
        return float(facts["num_parameters"]) * BYTES_PER_PARAMETER / BYTES_PER_SECOND

    def remains(self) -> str:
        """Names what a run that ends immediately leaves; reads no file."""
        if self.last is None:
            return "no checkpoint was saved"
        return f"the last checkpoint is {self.last}; continue with --resume"

    def _stands(self, why: str) -> str:
        if self.last is None and not has_results(self._run_dir):
            return f"{why}, so nothing is saved; start it again"
        if self.last is None:
            forced = " --from-start" if self._trainer.progress.step else ""
            return f"{why}; {self.remains()}; start over with --resume{forced}"
        return f"{why}; {self.remains()}"

    async def restore(self, path: Path) -> None:
        """Continue from the checkpoint at `path`, bit for bit."""
        loaded = await asyncio.to_thread(checkpoint.load, path)
        if path.is_relative_to(self._run_dir):  # another run's checkpoint may be combined with another reference
            check_same_models(self._trainer.run.plan, path, loaded.state, await self._model_digests())
        await self._trainer.run.lease.train()  # until its weights are with the servers
        await self._trainer.actor.call(ActorWorker.restore, loaded.path)
        await self._trainer.run.critic.restore(loaded.path / CRITIC)
        prompt = self._trainer.progress.order.prompt
        in_flight = await asyncio.to_thread(read_scored, loaded.path / IN_FLIGHT, prompt)
        with boundary(f"checkpoint '{path}': its state cannot be restored", CheckpointError):
            self._trainer.restore(dict(loaded.state), in_flight)
        if self._trainer.progress.step != loaded.step:
            raise CheckpointError(
                f"checkpoint '{path}': its state is that of step {self._trainer.progress.step}; use another checkpoint"
            )
        self._num_kept = len(in_flight)
        await self._trainer.run.publish(loaded.step)
        self._num_evaluations = len(self._trainer.evaluations)
        self._trainer.sinks.cut_back(loaded.step, self._trainer.evaluated(loaded.step))
        if path.is_relative_to(self._run_dir):
            await asyncio.to_thread(checkpoint.set_aside, self._run_dir, loaded.step)
            settle = partial(checkpoint.settle, self._run_dir, loaded.step, self._config.keep, best=self.best_step)
            self.last = await asyncio.to_thread(settle)


def _check_actor(staging: Path) -> None:
    """CheckpointError unless the actor has written its files, and only those, where the manifest is going to be."""
    weights = (staging / "model", staging / "adapter")
    if not any(weight.is_dir() and any(weight.iterdir()) for weight in weights):
        raise CheckpointError(
            f"'{weights[0]}': the actor has saved, and nothing is there; workers on other nodes need the run directory "
            "on a filesystem that all nodes share, set train.dir to one"
        )
    if taken := [name for name in OURS if (staging / name).exists()]:
        raise CheckpointError(
            f"actor: it saved '{taken[0]}', which the checkpoint writes itself; its training state needs another name "
            f"than {', '.join(OURS)}"
        )
