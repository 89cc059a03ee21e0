"""Schedules in whole runs on the null model: what they refuse, what they keep, and how they resume after a stop."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.errors import ConfigError, PlanError, RewardError, WorkerError
from rlcore.plan import OldLogprobs
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.null import SETTINGS
from rlcore.testing.runs import differing
from rlcore.train import Stopped, TrainResult, checkpoint, train
from rlcore.train.saved_samples import read_scored, write_scored
from rlcore.types import (
    FinishReason,
    Float32s,
    FrozenDict,
    Message,
    Prompt,
    Reward,
    RewardStatus,
    ScoredTrajectory,
    Trajectory,
    TrajectoryId,
)

REWARDS = """
import asyncio, os, signal, zlib
from pathlib import Path

def chance(trajectory):
    return zlib.crc32(repr(trajectory.id).encode()) / 2**32

async def slow(trajectory):
    await asyncio.sleep(0.05 * chance(trajectory))
    return chance(trajectory)

asked = [0]

async def late(trajectory):
    # Until three steps' worth of others were asked for, or no more are to come.
    asked[0] += 1
    before, mine = 0, asked[0]
    while chance(trajectory) < 0.05 and before < asked[0] < mine + 24:
        before = asked[0]
        await asyncio.sleep(0.3)
    return chance(trajectory)

async def fails(trajectory):
    if chance(trajectory) < 0.1:
        raise ValueError("as asked")
    return chance(trajectory)

async def counted(trajectory, calls, stop_at):
    await asyncio.sleep(0.02 * chance(trajectory))
    with Path(calls).open("a") as file:
        file.write(f"{trajectory.id.prompt}/{trajectory.id.epoch}/{trajectory.id.sample}\\n")
    if len(Path(calls).read_text().splitlines()) == stop_at:
        os.kill(os.getpid(), signal.SIGTERM)
    return chance(trajectory)

async def held(trajectory, calls, hold):
    asked[0] += 1
    if asked[0] == hold and not Path(calls + ".held").exists():
        Path(calls + ".held").touch()
        asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60)
    with Path(calls).open("a") as file:
        file.write(f"{trajectory.id.prompt}/{trajectory.id.epoch}/{trajectory.id.sample}\\n")
    return chance(trajectory)
"""
MODES = {
    "pipeline": ("schedule.stream_minibatches=true",),
    "one step off": ("schedule.max_staleness=1",),
    "one step off, pipeline": ("schedule.max_staleness=1", "schedule.stream_minibatches=true"),
    "three": ("schedule.max_staleness=3", "schedule.stream_minibatches=true"),
}


def settings_in(directory: Path) -> dict[str, Any]:
    (directory / "rewards.py").write_text(REWARDS)
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 30))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 2, "max_tokens": 8},
        "reward": {"functions": {"score": {"fn": f"{directory}/rewards.py:slow"}}},
        "actor": {"backend": "null", "lr": 0.1, "minibatch_prompts": 2},
        "train": {"prompts_per_step": 4, "max_steps": 6, "dir": str(directory / "runs"), "name": "run"},
        "checkpoint": {"every_steps": 2},
    }


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return settings_in(tmp_path)


@pytest.fixture(scope="module")
def in_order(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """The samples that six synchronous steps train on."""
    return trained(run(settings_in(tmp_path_factory.mktemp("synchronous"))).run_dir, 6)


def run(config: dict[str, Any], *overrides: str, **more: Any) -> TrainResult:
    return train(config, *overrides, plugins=["null"], **more)


def step_rows(result: TrainResult) -> list[dict[str, float]]:
    return [row for row in metrics.read(result.run_dir) if "reward/mean" in row]


def trained(run_dir: Path, steps: int) -> list[tuple[str, int]]:
    """Prompt and epoch of every group of every step, in the order of steps."""
    found = []
    for step in range(1, steps + 1):
        rows = metrics.read_trajectories(run_dir, step)
        found += sorted({(row["id"]["prompt"], row["id"]["epoch"]) for row in rows})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_schedule_trains_each_prompt_once_within_the_bound(
    config: dict[str, Any], mode: str, in_order: list[tuple[str, int]]
) -> None:
    result = run(config, *MODES[mode], "plugins.null.token_s=0.0005")
    rows = step_rows(result)
    bound = int(MODES[mode][0][-1]) if "max_staleness" in MODES[mode][0] else 0
    assert [row["schedule/staleness_max"] for row in rows] == [min(bound, step) for step in range(6)]
    assert all(row["time/step_s"] >= row["time/ideal_s"] - 1e-6 for row in rows)
    assert all(0.0 <= row["time/reward_hidden_frac"] <= 1.0 for row in rows)
    assert trained(result.run_dir, 6) == in_order
    state = checkpoint.load(result.checkpoint).state if result.checkpoint else {}
    assert (state["in_flight"], state["retired"], state["order"]["position"]["issued"]["train"]) == ([], 24, 24)


@pytest.mark.slow
def test_one_step_off_repeats_bit_for_bit(config: dict[str, Any]) -> None:
    settings = ("schedule.max_staleness=1", "actor.epochs=2")
    one, other = (run(config, *settings, f"train.name={name}").run_dir for name in "ab")
    assert differing(one, other) == []


@pytest.mark.slow
def test_later_epochs_use_every_minibatch_again(config: dict[str, Any]) -> None:
    result = run(config, *MODES["pipeline"], "actor.epochs=3", "train.max_steps=2")
    assert result.checkpoint is not None
    updates = json.loads((result.checkpoint / "actor.json").read_text())["num_updates"]
    assert updates == 2 * 2 * 3


@pytest.mark.slow
def test_late_samples_are_discarded_and_counted(config: dict[str, Any]) -> None:
    drop = ("schedule.max_staleness=1", "schedule.on_stale=drop", "schedule.stream_minibatches=true")
    config["reward"]["functions"]["score"]["fn"] = config["reward"]["functions"]["score"]["fn"].replace("slow", "late")
    settings = (*drop, "schedule.old_logprobs=behaviour")
    result = run(config, *settings, "train.max_steps=12")
    rows = step_rows(result)
    assert max(row["schedule/staleness_max"] for row in rows) <= 1
    discarded = rows[-1]["data/given_up"]
    groups = trained(result.run_dir, 12)
    assert len(set(groups)) == len(groups) == 48
    state = checkpoint.load(result.checkpoint).state if result.checkpoint else {}
    assert discarded > 0
    assert state["retired"] == 48 + discarded
    assert state["retired"] + len(state["in_flight"]) == state["order"]["position"]["issued"]["train"]
    resumed = step_rows(run(config, *settings, "train.max_steps=13", resume=True))
    assert resumed[-1]["data/given_up"] >= discarded


@pytest.mark.fault
@pytest.mark.parametrize(("mode", "stop_at"), [("one step off", 21), ("three", 36), ("one step off, pipeline", 18)])
def test_after_a_signal_each_prompt_is_trained_once_and_no_judgement_is_bought_twice(
    config: dict[str, Any], tmp_path: Path, mode: str, stop_at: int, in_order: list[tuple[str, int]]
) -> None:
    calls = tmp_path / "calls"
    fn = f"reward.functions.score.fn={tmp_path}/rewards.py:counted"
    kwargs = f"reward.functions.score.kwargs={{calls: {calls}, stop_at: {stop_at}}}"
    config["checkpoint"]["every_steps"] = 1
    with pytest.raises(Stopped, match="SIGTERM"):
        run(config, *MODES[mode], fn, kwargs, "plugins.null.update_s=0.02")
    newest = checkpoint.latest(tmp_path / "runs" / "run")
    assert newest is not None
    saved = checkpoint.load(newest)
    assert len(saved.state["in_flight"]) >= 4
    already_scored = read_scored(newest / "in_flight", lambda name: Prompt(name, (), None, "train"))
    before = Counter(calls.read_text().splitlines())
    result = run(config, *MODES[mode], fn, kwargs, resume=True)
    assert result.steps == 6
    assert sorted(trained(result.run_dir, 6)) == sorted(in_order)
    after = Counter(calls.read_text().splitlines()) - before
    kept = {
        f"{sample.trajectory.id.prompt}/{sample.trajectory.id.epoch}/{sample.trajectory.id.sample}"
        for sample in already_scored
    }
    assert kept
    assert not kept & after.keys()


@pytest.mark.slow
def test_rewards_that_came_after_a_steps_checkpoint_are_kept_when_a_signal_ends_the_run_in_the_next_step(
    config: dict[str, Any], tmp_path: Path, in_order: list[tuple[str, int]]
) -> None:
    calls = tmp_path / "calls"
    config["reward"]["functions"]["score"] = {"fn": f"{tmp_path}/rewards.py:held", "kwargs": {"calls": str(calls)}}
    config["checkpoint"]["every_steps"] = 1
    # The twentieth reward is one of step 3, which waits for it; meanwhile all of step 4 are given.
    settings = (*MODES["one step off"], "reward.functions.score.kwargs.hold=20")
    with pytest.raises(Stopped, match="SIGTERM"):
        run(config, *settings)
    before = calls.read_text().splitlines()
    assert len(before) == 4 * 8 - 1
    run(config, *settings, resume=True)
    assert Counter(calls.read_text().splitlines()).most_common(1)[0][1] == 1, "no reward is asked for twice"
    assert trained(tmp_path / "runs" / "run", 6) == in_order


@pytest.mark.fault
def test_a_crash_loses_what_was_not_saved_and_trains_each_prompt_once(
    config: dict[str, Any], in_order: list[tuple[str, int]]
) -> None:
    settings = ("schedule.max_staleness=2", "checkpoint.every_steps=2")
    with pytest.raises(WorkerError, match="update 8 fails"):
        run(config, *settings, "plugins.null.fail_at_update=8")
    result = run(config, *settings, resume=True)
    assert trained(result.run_dir, 6) == in_order


@pytest.mark.slow
def test_failures_are_dropped_and_counted_group_by_group_and_the_budget_holds(config: dict[str, Any]) -> None:
    fn = config["reward"]["functions"]["score"]["fn"].replace("slow", "fails")
    settings = (*MODES["pipeline"], f"reward.functions.score.fn={fn}", "train.max_steps=10")
    rows = step_rows(run(config, *settings, "reward.error_budget_frac=1"))
    assert sum(row["reward/failed"] for row in rows) == sum(row["reward/dropped_samples"] for row in rows) > 0
    with pytest.raises(RewardError, match="error_budget_frac=0"):
        run(config, *settings, "reward.error_budget_frac=0", "train.name=strict")


@pytest.mark.slow
def test_weights_that_were_not_handed_over_are_noticed_before_the_update(config: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match=r"sampled with version 1 of the weights, the step begins with version 2"):
        run(config, "plugins.null.forget_version=2")
    rows = metrics.read(Path(config["train"]["dir"]) / "run")
    assert [row["step"] for row in rows] == [1, 2]


def plan(*overrides: str) -> Any:
    return plan_run([], [*SETTINGS, "actor.minibatch_prompts=2", *overrides], ["null"]).schedule


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_what_the_sampler_recorded_is_not_pi_old_and_the_plan_says_what_is(dtype: str) -> None:
    assert plan("actor.dtype=float64").old_logprobs is OldLogprobs.SAMPLED
    several = plan(f"actor.dtype={dtype}")
    assert (several.old_logprobs, several.passes) == (OldLogprobs.PASS, ("old log-probs",))
    assert plan(f"actor.dtype={dtype}", "actor.minibatch_prompts=0").old_logprobs is OldLogprobs.DETACHED
    assert plan(f"actor.dtype={dtype}", "schedule.old_logprobs=behaviour").old_logprobs is OldLogprobs.SAMPLED
    for size, source in ((2, "a forward pass"), (0, "the update itself")):
        settings = [*SETTINGS, f"actor.minibatch_prompts={size}", f"actor.dtype={dtype}"]
        notes = [note for note in plan_run([], settings, ["null"]).notes if note.startswith(f"actor.dtype={dtype}: ")]
        assert len(notes) == 2
        assert "weights are rounded stochastically" in notes[0]
        assert f"pi_old is {source} and the loss has the factor pi_old / mu" in notes[1]
    nearest = plan_run([], [*SETTINGS, f"actor.dtype={dtype}", "actor.rounding=nearest"], ["null"]).notes
    assert any("rounded to nearest" in note and "actor.rounding=stochastic" in note for note in nearest)
    assert not any("actor.dtype" in note for note in plan_run([], list(SETTINGS), ["null"]).notes)


def test_the_plan_says_which_passes_a_schedule_needs() -> None:
    kl = ("algo.kl.placement=loss", "reference.backend='null'")
    assert plan().old_logprobs is OldLogprobs.SAMPLED
    assert plan("actor.minibatch_prompts=0", "schedule.max_staleness=1").old_logprobs is OldLogprobs.DETACHED
    assert plan("schedule.max_staleness=1", *kl).passes == ("reference", "old log-probs")
    behaviour = plan("schedule.max_staleness=1", "schedule.old_logprobs=behaviour")
    assert (behaviour.passes, behaviour.name) == ((), "one-step off-policy")
    assert plan("schedule.stream_minibatches=true").name == "mini-batch pipeline"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("schedule.stream_minibatches=true", "algo.preset=reinforce_pp"), "advantage 'reinforce_pp' of"),
        (("schedule.stream_minibatches=true", "reward.functions.letters.scope=batch"), "reward 'letters' of"),
        (("schedule.stream_minibatches=true", "algo.dynamic_sampling=true"), "algo.dynamic_sampling=true"),
        (("schedule.max_staleness=1", "schedule.on_stale=drop", "reward.functions.letters.scope=batch"), "'letters'"),
        (
            ("schedule.max_staleness=1", "schedule.on_stale=drop", "schedule.stream_minibatches=true"),
            "old log-probs need a pass",
        ),
    ],
)
def test_what_a_schedule_cannot_be_combined_with_is_a_plan_error_that_names_it(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(*overrides)


def test_a_negative_staleness_and_a_setting_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.max_staleness"):
        plan("schedule.max_staleness=-1")
    with pytest.raises(ConfigError, match=r"schedule\.on_stale"):
        plan("schedule.on_stale=drop")


def scored(
    prompt: Prompt, sample: int, length: int, completion: str | tuple[Message, ...], token_scores: Float32s | None
) -> ScoredTrajectory:
    trajectory = Trajectory(
        id=TrajectoryId(prompt.id, 2, sample, 1),
        prompt=prompt,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.arange(length) > 1,
        logprobs=np.linspace(-1, 0, length, dtype=np.float32),
        completion=completion,
        finish=FinishReason.STOP,
        versions=((1, 0), (3, 2)),
        turns=2,
        num_segments=2,
        info=FrozenDict({"tool": "a"}),
    )
    parts, info = FrozenDict({"x": 0.25}), FrozenDict({"answer": "\ud800"})
    return ScoredTrajectory(trajectory, Reward(0.1, parts, RewardStatus.OK, token_scores, 1.5, info))


def test_scored_trajectories_come_back_as_they_were_saved(tmp_path: Path) -> None:
    prompt = Prompt("train/1", ({"role": "user", "content": "x"},), "4", "train")
    messages = (FrozenDict[str, Any]({"role": "assistant", "content": "hi"}),)
    rows = [
        scored(prompt, 0, 4, "text", None),
        scored(prompt, 1, 3, messages, np.array([0, 0, 1], np.float32)),
        scored(prompt, 2, 5, "", np.arange(5, dtype=np.float32)),
    ]
    opening = (FrozenDict({"role": "user", "content": "a new game"}),)
    rows[1] = replace(rows[1], trajectory=replace(rows[1].trajectory, opening=opening))
    write_scored(tmp_path / "rows", rows)
    found = read_scored(tmp_path / "rows", {"train/1": prompt}.__getitem__)
    for left, right in zip(rows, found, strict=True):
        for name in ("id", "prompt", "completion", "finish", "versions", "turns", "num_segments", "opening"):
            assert getattr(left.trajectory, name) == getattr(right.trajectory, name)
        for name in ("token_ids", "loss_mask", "logprobs"):
            assert np.array_equal(getattr(left.trajectory, name), getattr(right.trajectory, name))
        assert (left.reward.score, dict(left.reward.components)) == (right.reward.score, dict(right.reward.components))
        if left.reward.token_scores is not None and right.reward.token_scores is not None:
            assert np.array_equal(left.reward.token_scores, right.reward.token_scores)
        assert (left.reward.token_scores is None) == (right.reward.token_scores is None)
    assert dict(found[0].reward.info) == {"answer": "\ud800"}
    assert read_scored(tmp_path / "none", {"train/1": prompt}.__getitem__) == []
