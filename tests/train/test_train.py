"""Whole runs on the null model: what a run writes, how it resumes, and what its settings do."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from rlcore.errors import CheckpointError, ConfigError, RewardError, WorkerError
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.train import Start, Stopped, TrainResult, checkpoint, run_training, train

REWARDS = """
def fails_for_two(completions, **columns):
    return [float("nan") if "a" in completion else 0.0 for completion in completions]

def constant(completions, **columns):
    return [0.5] * len(completions)

def vowels(completions, **columns):
    return [float(sum(letter in "aeiou" for letter in completion)) for completion in completions]
"""
STOPS_THE_RUN = """
import os, signal
from pathlib import Path

async def length(completions, calls, stop_at, block="", **columns):
    with Path(calls).open("a") as file:
        file.write(".")
    if Path(calls).stat().st_size == stop_at:
        if block:
            Path(block).write_text("no directory")
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(len(completion)) for completion in completions]
"""
STOPPABLE = ("eval.every_steps=2", "checkpoint.every_steps=3")
TELLS_ITS_KEY = """
import logging

async def score(completions, api_key, **columns):
    logging.getLogger("rlcore.mine").warning("calling with %s", api_key)
    raise ConnectionError(f"401 for {api_key}")
"""


def settings_in(directory: Path) -> dict[str, Any]:
    (directory / "rewards.py").write_text(REWARDS)
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(write_prompts(directory / "prompts.jsonl", 30))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"letters": {"fn": "count_letter", "children": 1}}},
        "actor": {"backend": "null", "lr": 0.1},
        "train": {"prompts_per_step": 4, "max_steps": 4, "dir": str(directory / "runs"), "name": "run"},
        "checkpoint": {"every_steps": 2},
    }


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return settings_in(tmp_path)


def run(config: dict[str, Any], *overrides: str, **more: Any) -> TrainResult:
    return train(config, *overrides, plugins=["null"], **more)


def heldout(tmp_path: Path) -> str:
    return f"eval.sources.heldout.path={write_prompts(tmp_path / 'heldout.jsonl', 3, 'Held out {index}.')}"


def test_a_run_leaves_configuration_plan_metrics_trajectories_checkpoints_and_rewards(
    config: dict[str, Any], tmp_path: Path
) -> None:
    result = run(config, heldout(tmp_path))
    names = {path.name for path in result.run_dir.iterdir()}
    assert {"config.yaml", "plan.json", "metrics.jsonl", "trajectories", "checkpoints", "log.txt"} <= names
    assert {"rewards.json", "tokens"} <= names
    steps = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert {"reward/letters/mean", "actor/grad_norm", "completion/length_mean", "time/step_s"} <= steps[0].keys()
    assert [step for step, _ in result.evaluations] == [0, 4]
    assert len(metrics.read_trajectories(result.run_dir, 1)) == 16
    assert result.checkpoint is not None
    assert checkpoint.load(result.checkpoint).state["step"] == 4


def test_the_tokens_on_disk_spell_the_trajectories_with_their_advantages(
    config: dict[str, Any], tmp_path: Path
) -> None:
    directory = run(config, heldout(tmp_path), "train.max_steps=1").run_dir
    entries = [json.loads(line) for line in (directory / "tokens" / "vocabulary.jsonl").read_text().splitlines()]
    piece = {
        entry["id"]: bytes.fromhex(entry["bytes"]) if "bytes" in entry else entry["text"].encode() for entry in entries
    }
    rows = metrics.read_trajectories(directory, 1)
    for lane in ("train", "eval"):
        arrays = load_file(directory / "tokens" / f"step_000001.{lane}.safetensors")
        starts = arrays["row_start"].tolist()
        recorded = [row for row in rows if row["lane"] == lane]
        assert len(recorded) == len(starts) - 1
        for row, begin, end in zip(recorded, starts, starts[1:], strict=False):
            text = b"".join(piece[id_] for id_ in arrays["token_id"][begin:end].tolist()).decode(errors="replace")
            assert text.removesuffix("<|end|>") == row["completion"]
            assert end - begin == row["num_sampled"]
            if lane == "train":
                assert arrays["advantage"][begin:end] == pytest.approx([row["advantage"]] * (end - begin))


def test_a_run_records_no_tokens_if_so_configured(config: dict[str, Any]) -> None:
    assert not (run(config, "train.record_tokens=none").run_dir / "tokens").exists()


@pytest.mark.slow
def test_the_reward_rises(config: dict[str, Any]) -> None:
    result = run(config, "train.max_steps=30", "checkpoint.every_steps=0")
    means = [row["reward/mean"] for row in metrics.read(result.run_dir)]
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.1


@pytest.mark.slow
def test_two_runs_with_one_seed_are_equal_and_with_another_are_not(config: dict[str, Any]) -> None:
    one, other, third = (
        run(config, f"train.name={n}", f"train.seed={s}").run_dir for n, s in (("a", 0), ("b", 0), ("c", 1))
    )
    assert differing(one, other) == []
    assert differing(one, third) != []


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_never_interrupted(config: dict[str, Any], tmp_path: Path) -> None:
    kl = ("algo.kl.placement=reward", "algo.kl.controller=adaptive", "reference.backend='null'")
    evaluation = (heldout(tmp_path), "eval.every_steps=2", *kl)
    whole = run(config, *evaluation).run_dir
    with pytest.raises(WorkerError, match="update 4 fails"):
        run(config, "train.name=broken", "plugins.null.fail_at_update=4", *evaluation)
    result = run(config, "train.name=broken", *evaluation, resume=True)
    assert result.steps == 4
    assert differing(whole, result.run_dir) == []


def stopping(config: dict[str, Any], tmp_path: Path, at: int, **kwargs: str) -> None:
    """Let the reward's call number `at` send SIGTERM."""
    (tmp_path / "stops.py").write_text(STOPS_THE_RUN)
    kwargs["calls"] = str(tmp_path / f"calls-{at}")
    config["reward"]["functions"] = {
        "length": {"fn": f"{tmp_path}/stops.py:length", "kwargs": kwargs | {"stop_at": at}}
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the run that no signal ends."""
    directory = tmp_path_factory.mktemp("whole")
    config = settings_in(directory)
    stopping(config, directory, 10**6)
    return run(config, heldout(directory), *STOPPABLE).run_dir


@pytest.mark.fault
@pytest.mark.parametrize(
    ("call", "step"), [(2, 0), (3 + 5, 0), (3 + 16 + 5, 1), (3 + 2 * 16 + 2, 2), (3 + 2 * 16 + 3 + 5, 2)]
)
def test_a_run_ended_by_a_signal_during_or_after_an_evaluation_resumes_bit_for_bit(
    config: dict[str, Any], tmp_path: Path, call: int, step: int, whole: Path
) -> None:
    settings = (heldout(tmp_path), *STOPPABLE)
    stopping(config, tmp_path, call)
    with pytest.raises(Stopped, match="SIGTERM: saved; the last checkpoint is") as stopped:
        run(config, "train.name=stopped", *settings)
    assert stopped.value.exit_code == 143
    newest = checkpoint.latest(tmp_path / "runs" / "stopped")
    assert newest is not None
    assert checkpoint.step_of(newest) == step
    assert differing(whole, run(config, "train.name=stopped", *settings, resume=True).run_dir) == []


def test_a_signal_ends_the_run_also_when_the_save_fails(config: dict[str, Any], tmp_path: Path) -> None:
    stopping(config, tmp_path, 20, block=str(tmp_path / "runs" / "run" / "checkpoints"))
    with pytest.raises(
        Stopped,
        match=r"the save failed: .*; no checkpoint was saved; start over with --resume --from-start",
    ):
        run(config)


@pytest.mark.slow
def test_a_secret_from_the_environment_is_in_nothing_that_a_run_shows_or_saves(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLCORE_TEST_KEY", "a-very-secret-value")
    (tmp_path / "mine.py").write_text(TELLS_ITS_KEY)
    config["reward"]["functions"]["mine"] = {
        "fn": f"{tmp_path}/mine.py:score",
        "kwargs": {"api_key": "${oc.env:RLCORE_TEST_KEY}"},
    }
    run_dir = run(config, heldout(tmp_path), "reward.error_budget_frac=1", "train.log_completions_every=1").run_dir
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert [path for path in files if b"a-very-secret-value" in path.read_bytes()] == []
    assert "401 for ${oc.env:RLCORE_TEST_KEY}" in (run_dir / "trajectories" / "step_000001.jsonl").read_text()
    assert "calling with ${oc.env:RLCORE_TEST_KEY}" in (run_dir / "log.txt").read_text()
    with pytest.raises(RewardError):
        run(config, "train.name=strict")
    shown = capfd.readouterr()
    assert "a-very-secret-value" not in shown.out + shown.err


@pytest.mark.slow
def test_a_canary_that_scores_badly_refuses_to_train(config: dict[str, Any], tmp_path: Path) -> None:
    """Scorecard case 19."""
    config["reward"]["functions"] = {"vowels": {"fn": f"{tmp_path}/rewards.py:vowels"}}
    with pytest.raises(
        RewardError, match=r"the known-good response 'z.*' to prompt .* scored 0 .*so nothing is trained"
    ):
        run(config, "reward.canary=z{answer}")
    assert metrics.read(Path(config["train"]["dir"]) / "run") == []
    assert run(config, "train.max_steps=1").steps == 1  # of the refused run nothing is left that its name would protect


def test_a_run_that_begins_with_a_checkpoint_says_what_differs_from_it(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(config, "train.max_steps=2").run_dir
    plan = plan_run([config], ["actor.lr=0.2", "train.name=next"], ["null"])
    result = run_training(plan, Start(checkpoint=first))
    assert (result.run_dir.name, result.steps) == ("next", 4)
    assert "actor.lr: 0.1 -> 0.2" in capsys.readouterr().out


def test_resume_says_what_changed_since(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(config, "train.max_steps=2")
    result = run(config, "actor.lr=0.2", resume=True)
    assert "actor.lr: 0.1 -> 0.2" in capsys.readouterr().out
    assert result.steps == 4


def test_a_directory_that_exists_is_refused(config: dict[str, Any]) -> None:
    run(config, "train.max_steps=1")
    with pytest.raises(ConfigError, match="exists; choose"):
        run(config)


def test_resume_with_other_prompts_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    run(config, "train.max_steps=2")
    write_prompts(tmp_path / "prompts.jsonl", 31)
    saved = Path(config["train"]["dir"]) / "run" / "plan.json"
    before = saved.read_text()
    with pytest.raises(CheckpointError, match="source 'train'"):
        run(config, "actor.lr=0.2", resume=True)
    assert saved.read_text() == before, "the next attempt must still see the change"


def test_training_works_while_an_event_loop_runs_as_in_a_notebook(config: dict[str, Any]) -> None:
    async def cell() -> TrainResult:
        return run(config, "train.max_steps=1")

    assert asyncio.run(cell()).steps == 1


def test_heldout_questions_that_occur_in_training_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held-out questions occur in training"):
        run(config, f"eval.sources.heldout.path={tmp_path / 'prompts.jsonl'}")
    assert not (tmp_path / "runs" / "run" / "checkpoints").exists()


@pytest.mark.fault
def test_a_sample_whose_reward_fails_is_left_out_and_the_budget_stops_the_run(
    config: dict[str, Any], tmp_path: Path
) -> None:
    functions = (f"reward.functions.bad.fn={tmp_path / 'rewards.py'}:fails_for_two",)
    result = run(config, *functions, "reward.error_budget_frac=1.0")
    rows = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    failed = sum(row["reward/failed"] for row in rows)
    assert failed > 0
    assert failed == sum(row["reward/dropped_samples"] for row in rows)
    failures = [row for row in metrics.read_trajectories(result.run_dir, 1) if row["status"] == "failed"]
    assert all(row["advantage"] is None for row in failures)
    with pytest.raises(RewardError, match="error_budget_frac=0"):
        run(config, "train.name=strict", *functions, "reward.error_budget_frac=0.0", "train.max_steps=20")


@pytest.mark.slow
def test_equal_rewards_warn_and_dynamic_sampling_replaces_such_groups_within_its_limit(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["reward"]["functions"] = {"same": {"fn": f"{tmp_path / 'rewards.py'}:constant"}}
    result = run(config, "algo.dynamic_sampling=true", "algo.max_resample_rounds=2")
    rows = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [row["data/resample_rounds"] for row in rows] == [2.0] * 4
    assert [row["data/equal_groups"] for row in rows] == [12.0] * 4
    assert rows[-1]["reward/equal_steps"] == 4.0
    assert "all rewards of every group were equal" in capsys.readouterr().out
    assert checkpoint.load(result.checkpoint).state["order"]["position"]["issued"]["train"] == 4 * 12


@pytest.mark.slow
def test_a_step_with_dynamic_sampling_trains_on_groups_that_differ(config: dict[str, Any], tmp_path: Path) -> None:
    wide = ("rollout.max_tokens=32", "algo.max_resample_rounds=40")
    config["reward"]["functions"] = {"vowels": {"fn": f"{tmp_path / 'rewards.py'}:vowels"}}
    result = run(config, "algo.dynamic_sampling=true", "rollout.samples_per_prompt=2", *wide)
    for step in range(1, 5):
        rows = metrics.read_trajectories(result.run_dir, step)
        trained = [row for row in rows if row["advantage"] is not None]
        assert len(trained) == 8
        assert all(row["advantage"] != 0.0 for row in trained)


@pytest.mark.slow
def test_the_soft_length_penalty_lowers_the_advantage_of_long_responses(config: dict[str, Any], tmp_path: Path) -> None:
    config["reward"]["functions"] = {"same": {"fn": f"{tmp_path / 'rewards.py'}:constant"}}
    penalty = ("algo.overlong=penalty", "algo.overlong_buffer=8", "train.max_steps=20", "rollout.max_tokens=64")
    result = run(config, *penalty, "rollout.stop=[a]")
    for step in range(1, 21):
        for row in metrics.read_trajectories(result.run_dir, step):
            assert row["advantage"] <= 0.0 or row["num_sampled"] < 64


# An estimator sees no KL but the one in the reward.
@pytest.mark.parametrize(
    ("estimator", "placement"),
    [("grpo", "none"), ("grpo", "loss"), *((text, "reward") for text in ("grpo", "dr_grpo", "rloo", "reinforce_pp"))],
)
def test_every_estimator_trains_with_kl_in_any_place(config: dict[str, Any], estimator: str, placement: str) -> None:
    kl = () if placement == "none" else (f"algo.kl.placement={placement}", "reference.backend='null'")
    result = run(config, f"algo.advantage={estimator}", "actor.minibatch_prompts=2", "train.max_steps=2", *kl)
    rows = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    assert ("policy/kl_coef" in rows[0]) == (placement == "reward")


def test_policy_kl_is_that_of_the_penalty_where_it_is_part_of_the_reward(config: dict[str, Any]) -> None:
    kl = ("algo.kl.placement=reward", "algo.kl.estimator=k1", "reference.backend='null'")
    result = run(config, *kl, "rollout.max_tokens=1", "actor.minibatch_prompts=1", "actor.lr=1")
    rows = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    by_token, by_sample = ([row[name] for row in rows] for name in ("policy/kl", "policy/kl_per_sample"))
    assert by_token == by_sample, "each sample is one token"
    assert by_token[-1] != 0.0


@pytest.mark.fault
def test_gradients_that_are_not_finite_are_skipped_and_three_in_a_row_stop_the_run(config: dict[str, Any]) -> None:
    result = run(config, "plugins.null.nan_updates=[2]")
    rows = [row for row in metrics.read(result.run_dir) if "reward/mean" in row]
    assert [row["actor/skipped"] for row in rows] == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(WorkerError, match="3 updates in a row"):
        run(config, "train.name=hopeless", "plugins.null.nan_updates=[1, 2, 3]")


def test_too_few_prompts_for_one_step_are_refused(config: dict[str, Any]) -> None:
    del config["train"]["max_steps"]
    with pytest.raises(ConfigError, match=r"the sources hold 30 prompts .*; needs 64 for one step"):
        run(config, "train.prompts_per_step=64")


def test_epochs_say_how_many_steps_there_are(config: dict[str, Any]) -> None:
    del config["train"]["max_steps"]
    result = run(config, "train.epochs=2", "checkpoint.every_steps=0")
    assert result.steps == 2 * 30 // 4


def test_a_refused_start_leaves_no_directory(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no file"):
        run(config, f"data.sources.train.path={tmp_path}/prmpts.jsonl")
    assert list((tmp_path / "runs").iterdir()) == []
