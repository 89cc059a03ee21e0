"""A whole run: directory, data, launch, resume, steps, evaluations, checkpoints, final messages."""

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

from rlcore.algo.kl import kl_controller
from rlcore.contracts.activity import Activity, current_activity
from rlcore.contracts.actor import ActorWorker
from rlcore.contracts.clusters import Deadlines
from rlcore.data import IssuedPrompts
from rlcore.errors import CheckpointError, ConfigError, PluginError, RewardError, WorkerError, counted
from rlcore.plan import RunPlan
from rlcore.report.advice import advice
from rlcore.report.foreign_output import foreign_output
from rlcore.report.metrics import MetricsLog, TrajectoryLog, read
from rlcore.report.open_telemetry import SpanExport
from rlcore.report.terminal import Terminal
from rlcore.report.token_log import TokenLog
from rlcore.report.trace import TraceLog
from rlcore.report.tracker_packages import require_trackers
from rlcore.report.trackers import Trackers
from rlcore.reward.canary import NUM_EXAMPLES, check_canary
from rlcore.runtime.data_check import check_data
from rlcore.runtime.launch import Runtime, launch
from rlcore.train.best import StopRule, check_named
from rlcore.train.callbacks import Callbacks, StepCallbacks
from rlcore.train.checkpoint import set_aside
from rlcore.train.last_words import how_to_load, never_updated, summary, way_on
from rlcore.train.observed import observed
from rlcore.train.origin import Origin, Start, changes_since, check_remains, differences_from, find_origin
from rlcore.train.result import TrainResult
from rlcore.train.run_dir import (
    is_unused,
    locked,
    logging_to,
    open_directory,
    removed_without_results,
    write_plan,
    write_rewards,
)
from rlcore.train.run_prompts import RunPrompts, fitting, load_data
from rlcore.train.saving import Saver
from rlcore.train.signals import Stopped, StopRequest, name_of
from rlcore.train.trainer import Progress, Sinks, Trainer

logger = logging.getLogger(__name__)

CLOSE_S = 1.5
"""A worker that is busy when a run is cut short is left behind after this long: a signal ends the run within 10 s."""


async def train_async(plan: RunPlan, run_dir: Path, start: Start, callbacks: Callbacks) -> TrainResult:
    """Train as planned in `run_dir`. Stopped when a signal ended it, RlcoreError when something is wrong."""
    stop = StopRequest(finish_step=plan.config.checkpoint.on_signal == "finish_step")
    reason = "before the first step, so nothing is saved; start it again"
    made = is_unused(run_dir)
    activity, terminal = Activity(plan.config.train.record_trace), Terminal()
    with (
        foreign_output(),
        stop.installed(),
        locked(check_remains(open_directory(run_dir, start.resume), start)),
        removed_without_results(run_dir, made),
        logging_to(run_dir, plan.plugins, terminal.warn),
        terminal.showing(),
        observed(run_dir, activity, terminal),
    ):
        try:
            activity.enter("loading data")
            require_trackers(plan)
            prompts = load_data(plan.config)
            for note in check_data(plan, prompts.train, prompts.heldout):
                terminal.warn(note)
            origin = find_origin(run_dir, start)
            if not origin.resumed and origin.checkpoint is None:
                write_plan(run_dir, plan)
            activity.enter("loading libraries and the tokenizer")
            limits = Deadlines(plan.config.cluster.start_s, close_s=CLOSE_S)
            async with launch(plan, run_dir, limits) as run:
                logger.info("launched: %s", ", ".join(worker.request.role.name for worker in plan.workers))
                session = Session(plan, run_dir, run, await fitting(run, prompts, terminal), stop, callbacks, terminal)
                try:
                    result = await session.train(origin)
                    reason = "every step was taken; continue with --resume"
                    logger.info("every step was taken: %d", result.steps)
                    return result
                except (CheckpointError, PluginError, RewardError, WorkerError) as error:
                    last = session.saver.last
                    if last is None or _names_a_way(error, session.took_steps):
                        raise
                    raise type(error)(f"{error}; {way_on(last, session.took_steps)}") from error
                except asyncio.CancelledError:
                    if stop.signum is None:
                        raise
                    _uncancel()
                    reason = await session.saver.save_on_signal()
                    raise
        except asyncio.CancelledError:
            if stop.signum is None:
                raise
            _uncancel()
            logger.info("stopped by %s: %s", name_of(stop.signum), reason)
        raise Stopped(stop.signum, f"stopped by {name_of(stop.signum)}: {reason}")


def _names_a_way(error: Exception, took_steps: bool) -> bool:
    """True if the error of a checkpoint says how to continue: what cannot be restored names another checkpoint."""
    return isinstance(error, CheckpointError) and (not took_steps or "--resume" in str(error))


def _uncancel() -> None:
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


class Session:
    """One run in one process, from the first step it takes to the last."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: Path,
        run: Runtime,
        prompts: RunPrompts,
        stop: StopRequest,
        callbacks: Callbacks,
        terminal: Terminal | None = None,
    ) -> None:
        self._config, self._run_dir, self._run, self._stop = plan.config, run_dir, run, stop
        self._terminal = terminal or Terminal()
        self._prompts = prompts
        order = IssuedPrompts(prompts.train, plan.prompt_order, plan.config.data, plan.config.train.seed)
        self.total_steps = plan.config.train.max_steps or (
            plan.config.train.epochs * order.num_prompts // plan.config.train.prompts_per_step
        )
        if self.total_steps < 1:
            raise ConfigError(
                f"train.prompts_per_step: the sources hold {counted(order.num_prompts, 'prompt')} in train.epochs="
                f"{plan.config.train.epochs}; needs {plan.config.train.prompts_per_step} for one step; lower it or set "
                "train.max_steps"
            )
        is_exported = plan.config.track.open_telemetry
        self._spans = SpanExport(run_dir.name) if is_exported else None
        self._sinks = Sinks(
            MetricsLog(run_dir),
            TrajectoryLog(run_dir),
            TokenLog(run_dir, plan.config.train.record_tokens, run.tokens),
            TraceLog(run_dir, current_activity().unix_offset, self._spans.export if self._spans else None),
            Trackers(plan.trackers, plan.config.track.project, run_dir, plan.loaded.yaml),
            self._terminal,
        )
        activity = current_activity()
        activity.total_steps, activity.num_updates = self.total_steps, plan.batch_sizes["updates"]
        progress = Progress(0, order, kl_controller(plan.config.algo.kl))
        self._trainer = Trainer(run, progress, self.total_steps, prompts.heldout, self._sinks)
        self.saver = Saver(self._trainer, run_dir)
        stop.remains = self.saver.remains
        self._callbacks = StepCallbacks(callbacks)
        self._rule = StopRule(plan.config.train.stop)
        self._stopped = ""
        self._began_after = self.total_steps
        """The step after which this process takes its first one; until it is known, the last one."""

    @property
    def took_steps(self) -> bool:
        """This process has finished a step."""
        return self._trainer.progress.step > self._began_after

    async def train(self, origin: Origin) -> TrainResult:
        """Take the remaining steps."""
        trainer = self._trainer
        self.saver.last = origin.checkpoint if origin.resumed else None
        if not origin.resumed:
            self._sinks.trace.cut_back(-1)  # written by a start under this name that failed before its first step
        async with AsyncExitStack() as stack:
            stack.callback(self._sinks.trackers.close)
            await self._sinks.trackers.start()
            if self._spans is not None:
                stack.callback(self._spans.close)
                self._spans.start()
            stack.push_async_exit(trainer.close)
            stack.push_async_exit(self.saver.let_end)
            trainer.start()
            await self._run.agent.check(self._prompts.together)
            num_updates = self.total_steps * self._run.plan.batch_sizes["updates"]
            num_updates = await self._run.critic.expect(num_updates)
            await trainer.actor.call(ActorWorker.expect, num_updates)
            await self._continue(origin)
            write_rewards(self._run_dir, self._run.plan)
            self._began_after = trainer.progress.step
            self._terminal.begin(self.total_steps, self._began_after)
            await self._prepare_first_step()
            await self._finish_step()
            self._stopped = self._rule.reason
            while trainer.progress.step < self.total_steps and not self._stop.pending and not self._stopped:
                await trainer.step()
                await self._finish_step()
                self._stopped = await self._ends_early()
            if self._stop.pending:
                raise asyncio.CancelledError
            await self._finish_run()
        self._terminal.end()
        evaluations = tuple(trainer.evaluations)
        result = TrainResult(
            self._run_dir, trainer.progress.step, self.saver.last, evaluations, self.saver.best, self._stopped
        )
        self._last_words(result)
        return result

    async def _finish_step(self) -> None:
        """The evaluation and the checkpoint after the last step, also if a signal prevented them."""
        trainer, evaluation, saving = self._trainer, self._config.eval, self._config.checkpoint
        step = trainer.progress.step
        self.saver.check()
        if not 0 < step < self.total_steps or self._stop.pending:
            return
        if evaluation.every_steps and step % evaluation.every_steps == 0 and not trainer.evaluated(step):
            await self._evaluate()
        is_due = saving.every_steps and step % saving.every_steps == 0
        if (is_due or self.saver.best_step == step) and not self.saver.is_saved:
            await self.saver.save()

    async def _evaluate(self) -> None:
        """Evaluate; ConfigError where `checkpoint.best` or `train.stop` names what evaluations do not have."""
        trainer = self._trainer
        await trainer.evaluate()
        step, metrics = trainer.evaluations[-1]
        found, k = [metrics for _, metrics in trainer.evaluations], self._config.eval.samples_per_prompt
        check_named("checkpoint.best", self._config.checkpoint.best, found, k)
        check_named("train.stop.metric", self._config.train.stop.metric, found, k)
        self._rule.add(step, metrics)

    async def _ends_early(self) -> str:
        """Reason why `train.stop` or a callback ends the run after this step; empty when it continues.

        ConfigError where `train.stop` names what steps do not have, or a callback raised.
        """
        if self._stop.pending:
            return ""
        trainer = self._trainer
        step, metrics = trainer.progress.step, trainer.history[-1]
        self._rule.add(step, metrics)
        found = dict(trainer.evaluations).get(step, {})
        try:
            if step == self._began_after + 1:
                self._rule.check_recorded(metrics, [reward.name for reward in self._run.plan.reward_components])
            stops = await self._callbacks.after_step(step, metrics | found)
        except ConfigError as error:
            saved = await self.saver.saved()
            raise ConfigError(f"{error}; the run ended after step {step}: {saved}, continue with --resume") from error
        return "stop_when was true" if stops else self._rule.reason

    async def _finish_run(self) -> None:
        """The evaluation and the checkpoint after the last step."""
        trainer = self._trainer
        step = trainer.progress.step
        if self._stopped:
            self._terminal.say(f"step {step}: {self._stopped}")
        if trainer.heldout and self._config.eval.at_end and not trainer.evaluated(step):
            await self._evaluate()
        wanted = self._config.checkpoint.at_end or step in (self.saver.best_step, self.saver.saved_step)
        if wanted and not self.saver.is_saved:  # the checkpoint of a step that ended early is older than its evaluation
            await self.saver.save()
        await self.saver.finish()

    async def _continue(self, origin: Origin) -> None:
        """Restore the state to continue from.

        The saved plan is replaced only after everything is restored, so a failing resume changes nothing.
        """
        plan, path = self._run.plan, origin.checkpoint
        for problem in origin.passed_over:
            self._terminal.warn(f"passed over: {problem}")
        if path is not None:
            for change in changes_since(self._run_dir if origin.resumed else None, path, plan):
                self._terminal.say(change)
            await self.saver.restore(path)
            records, progress = read(self._run_dir) if origin.resumed else None, self._trainer.progress
            for note in differences_from(progress.step, progress.order.changed, records):
                self._terminal.warn(note)
            self._rule.add_all(records or ())
            self._terminal.say(f"continuing after step {progress.step} from {path}")
        elif origin.resumed:
            self._sinks.cut_back(-1)
            await asyncio.to_thread(set_aside, self._run_dir, 0)
            self._terminal.say("no checkpoint to continue from: beginning with step 1")
        if origin.resumed or path is not None:
            write_plan(self._run_dir, plan)
        self.saver.ready = True

    async def _prepare_first_step(self) -> None:
        """Run the checks and the evaluation before training: the reward canary and the held-out prompts."""
        if self._trainer.progress.step > 0:
            return
        if self._run.check is not None:
            await self._run.check.sample(0)
        examples = [prompt for prompts in self._prompts.train.values() for prompt in prompts[:NUM_EXAMPLES]]
        if self._config.reward.canary:
            await check_canary(self._run.reward, examples, self._config.reward, self._run.tokens)
            self._run.take_metrics()
        if self._trainer.heldout and self._config.eval.at_start and not self._trainer.evaluated(0):
            await self._evaluate()

    def _last_words(self, result: TrainResult) -> None:
        say = self._terminal.say
        for line in summary(result, self._began_after, self._config.train):
            say(line)
        for line in never_updated(self._config.critic.engine, self._trainer.allowed):
            self._terminal.warn(line)
        for line in self._trainer.watch.last_words():
            say(line)
        plan, may_stream = self._run.plan, not self._config.algo.dynamic_sampling
        for line in advice(list(self._trainer.history), plan.schedule, plan.batch_sizes["minibatches"], may_stream):
            say(line)
        if result.checkpoint is not None:
            say(f"checkpoint: {result.checkpoint}")
            for line in how_to_load(result.checkpoint):
                say(line)
