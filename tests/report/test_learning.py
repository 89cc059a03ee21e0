"""Reasons why nothing is learned: runs with a fault name it once, and the viewer says the same of their files."""

from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
from rlcore_view import diagnose, read
from rlcore_view.cli import main as view

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.null import NullActor
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

pytestmark = pytest.mark.usefixtures("rewards_in_process")

REWARDS = """
import random

STEP = [0]

def wrong(completions, **columns):
    return [0.0] * len(completions)

def right(completions, **columns):
    return [1.0] * len(completions)

def half(completions, **columns):
    return [0.5] * len(completions)

def letters(completions, **columns):
    return [sum(letter.isascii() for letter in text) / 8 for text in completions]

def against_letters(completions, **columns):
    return [-score for score in letters(completions)]

def of_prompt(prompts, completions, **columns):
    return [float(str(prompt)[-2].isdigit() and int(str(prompt)[-2]) % 2) for prompt in prompts]

def fails_mostly(completions, **columns):
    return [float("nan") if len(text) % 4 else 1.0 for text in completions]

def fails_at_times(completions, **columns):
    return [float("nan") if text[:1] < "D" else float(len(text)) for text in completions]

def noise(completions, **columns):
    return [random.Random(text).random() for text in completions]
"""
ENDS = list(ascii_letters + "0123456789")
"""Stop strings after which nearly every response ends on its own."""


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARDS)
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 24, "say {index}."))}}},
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 40, "stop": ENDS},
        "reward": {"functions": {"score": {"fn": f"{tmp_path / 'rewards.py'}:letters", "children": 1}}},
        "actor": {"backend": "null", "lr": 0.05},
        "train": {"prompts_per_step": 4, "max_steps": 4, "dir": str(tmp_path / "runs"), "name": "run"},
        "checkpoint": {"at_end": False},
    }


def reward_of(name: str) -> Callable[[dict[str, Any]], list[str]]:
    def change(config: dict[str, Any]) -> list[str]:
        score = config["reward"]["functions"]["score"]
        score["fn"] = score["fn"].replace(":letters", f":{name}")
        return ["reward.error_budget_frac=1.0"]

    return change


def settings(*overrides: str) -> Callable[[dict[str, Any]], list[str]]:
    return lambda config: list(overrides)


def cancelling(config: dict[str, Any]) -> list[str]:
    functions = config["reward"]["functions"]
    functions["other"] = {**functions["score"], "fn": functions["score"]["fn"].replace(":letters", ":against_letters")}
    return []


def dropping(config: dict[str, Any]) -> list[str]:
    config["reward"]["functions"]["score"]["on_failure"] = "drop_group"
    return reward_of("fails_at_times")(config)


def cut_off(config: dict[str, Any]) -> list[str]:
    del config["rollout"]["stop"]
    return ["rollout.max_tokens=8"]


def answerless(config: dict[str, Any]) -> list[str]:
    config["reward"]["functions"] = {"score": {"fn": "gsm8k"}}
    return []


def masked(config: dict[str, Any]) -> list[str]:
    return [*cut_off(config), "rollout.max_tokens=2", "algo.overlong=mask"]


FAULTS: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]], int]] = {
    "most rewards fail": ("rewards fail", reward_of("fails_mostly"), 1),
    "groups are dropped": ("samples are dropped", dropping, 2),
    "a budget that no response fits": ("responses are cut off", cut_off, 1),
    "no response has an answer": ("answers are not found", answerless, 1),
    "all are wrong": ("all rewards are equal", reward_of("wrong"), 3),
    "all are right": ("all rewards are equal", reward_of("right"), 3),
    "all have half a point": ("all rewards are equal", reward_of("half"), 3),
    "components cancel out": ("rewards cancel out", cancelling, 3),
    "rewards follow the prompt": ("groups have equal rewards", reward_of("of_prompt"), 3),
    "a norm that leaves nothing": ("gradients are clipped to nothing", settings("actor.max_grad_norm=1e-6"), 3),
    "gradients are not finite": (
        "updates are skipped",
        settings("plugins.null.nan_updates=[1,2,3,4]", "actor.max_skipped_updates=9"),
        3,
    ),
    "all rows are masked": ("updates are skipped", masked, 3),
}


def run(config: dict[str, Any], *overrides: str) -> Path:
    return train(config, *overrides, plugins=["null"]).run_dir


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_with_a_fault_names_it_once_and_the_viewer_says_the_same(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    name, change, first = FAULTS[fault]
    directory = run(config, *change(config))
    check_words(directory, capsys, name, first)


def check_words(directory: Path, capsys: pytest.CaptureFixture[str], name: str, first: int | None = None) -> list[str]:
    """The run has warned of `name` once and repeated it at its end; `rlcore view diagnose` prints the same lines."""
    printed = capsys.readouterr().out.splitlines()
    warned = [line for line in printed if line.startswith("warning: step ") and f": {name}: " in line]
    assert len(warned) == 1, printed
    if first is not None:
        assert warned[0].startswith(f"warning: step {first}: ")
    assert view(["diagnose", str(directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    ending = printed[[line.startswith("trained ") for line in printed].index(True) + 1 :]
    assert ending[: len(lines)] == lines
    assert any(line.startswith(f"{name} in ") for line in lines)
    return lines


def found(directory: Path) -> list[str]:
    return sorted(finding.name for finding in diagnose(read(directory)))


STALE = ("rollout.backend=null_replica", "actor.lr=0.3", "rollout.check_weights_every=0")
"""Replicas with a copy of the weights that are not asked whether they follow: what steps measure has to show it."""


@pytest.mark.slow
def test_replicas_that_keep_their_first_weights_are_found(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    stale = (*STALE, "train.max_steps=14", "rollout.warn_logprob_diff=50")
    directory = run(config, *stale, "plugins.null.keep_weights=true")
    check_words(directory, capsys, "weights do not reach the sampler")
    assert "weights do not reach the sampler" not in found(run(config, *stale, "train.name=healthy"))


@pytest.mark.slow
def test_a_sampler_that_differs_is_reported_once(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    check_words(run(config, *STALE, "plugins.null.keep_weights=true"), capsys, "sampler and trainer differ")


@pytest.mark.slow
def test_a_learning_rate_that_destroys_the_policy_is_found(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config["rollout"]["stop"] = []
    kl = ("algo.kl.placement=reward", "algo.kl.coef=0.0001", "reference.backend='null'")
    directory = run(config, *reward_of("noise")(config), *kl, "actor.lr=8", "train.max_steps=14")
    check_words(directory, capsys, "the policy left its reference")


PLUGIN = """
import torch

from rlcore.algo.loss import PolicyLossOutput
from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Scope

RLCORE_API = "1"


def nothing(inputs):
    return torch.zeros_like(inputs.rewards_B)


def flat(inputs):
    return PolicyLossOutput(torch.where(inputs.mask_BT, 0.0 * inputs.logprobs_BT, 0.0))


@hookimpl
def rlcore_algorithms():
    return [
        Algorithm("nothing", AlgorithmKind.ADVANTAGE, f"{__file__}:nothing", Scope.GROUP),
        Algorithm("flat", AlgorithmKind.POLICY_LOSS, f"{__file__}:flat", Scope.SAMPLE),
    ]
"""


@pytest.mark.slow
def test_an_estimator_of_a_plugin_that_gives_nothing_is_found(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faulty.py").write_text(PLUGIN)
    plugins = ["null", str(tmp_path / "faulty.py")]
    check_words(train(config, "algo.advantage=nothing", plugins=plugins).run_dir, capsys, "advantages are zero", 3)


@pytest.mark.slow
def test_a_loss_of_a_plugin_without_a_slope_is_found(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faulty.py").write_text(PLUGIN)
    config["rollout"]["stop"] = []
    tiny = [*tiny_model(tmp_path), *reward_of("noise")(config), "algo.policy_loss=flat"]
    directory = train(config, *tiny, plugins=[str(tmp_path / "faulty.py")]).run_dir
    check_words(directory, capsys, "no gradient", 3)


@pytest.mark.slow
def test_a_policy_that_collapsed_is_found_when_the_reward_goes(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward pays for short responses, in 24 steps well and from then on hardly."""
    (tmp_path / "rewards.py").write_text(
        "CALLS = [0]\n"
        "def letters(completions, **columns):\n"
        "    CALLS[0] += len(completions)\n"
        "    pay = 1.0 if CALLS[0] <= 24 * 16 else 0.01\n"
        "    return [pay / (1 + len(text)) for text in completions]\n"
    )
    config["rollout"]["stop"] = [chr(number) for number in range(40, 48)]
    lines = check_words(run(config, "actor.lr=0.5", "train.max_steps=32"), capsys, "entropy collapsed")
    assert any(line.startswith("responses have become empty in ") for line in lines)
    assert lines[0].startswith("learning: the reward fell: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ratios explode", ("actor.lr=0.05", "algo.clip_high=100", "algo.clip_low=0.99")),
        (
            "the loss is clipped to nothing",
            ("actor.lr=0.01", "algo.clip_high=1e-6", "algo.clip_low=1e-6", "actor.epochs=16"),
        ),
    ],
)
def test_updates_that_move_too_far_are_found(
    name: str, settings: tuple[str, ...], config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config["rollout"]["stop"] = []
    tiny = [*tiny_model(tmp_path), *reward_of("noise")(config), "actor.epochs=8", "train.max_steps=4"]
    check_words(train(config, *tiny, *settings).run_dir, capsys, name)
    healthy = train(config, *tiny, "actor.lr=0.0003", "train.name=healthy").run_dir
    assert found(healthy) == ["responses are cut off"]


def tiny_model(directory: Path) -> list[str]:
    return [
        f"model.path={write_tiny_model(directory / 'tiny')}",
        "actor.backend=hf",
        "rollout.backend=hf",
        "rollout.max_tokens=12",
        "cluster.threads=1",
    ]


@pytest.mark.real
def test_rounding_to_nearest_that_keeps_weights_is_found(config: dict[str, Any], tmp_path: Path) -> None:
    half = [*tiny_model(tmp_path), "actor.dtype=bfloat16", "actor.lr=1e-8", "train.max_steps=12", "train.seed=1"]
    assert "rounding keeps the weights where they are" in found(train(config, *half, "actor.rounding=nearest").run_dir)
    assert found(train(config, *half, "train.name=stochastic").run_dir) == []


@pytest.mark.slow
def test_a_run_that_learns_says_so_and_warns_of_nothing(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = run(config, "train.max_steps=20")
    printed = capsys.readouterr().out
    assert "warning" not in printed
    assert "learning: the reward rose: " in printed
    assert found(directory) == []


@pytest.mark.slow
def test_a_resumed_run_counts_from_its_start(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config["checkpoint"] = {"every_steps": 1}
    overrides = [*cut_off(config), "train.max_steps=6"]
    with pytest.raises(Exception, match="update 5 fails"):
        run(config, *overrides, "plugins.null.fail_at_update=5")
    assert "responses are cut off: " in capsys.readouterr().out
    directory = train(config, *overrides, plugins=["null"], resume=True).run_dir
    printed = capsys.readouterr().out
    assert "warning: " not in printed
    [line] = [line for line in printed.splitlines() if line.startswith("responses are cut off in ")]
    assert " of 6 steps (steps 1 to 6): " in line
    assert view(["diagnose", str(directory)]) == 0
    assert capsys.readouterr().out in printed


@pytest.mark.slow
def test_a_step_logs_the_largest_maximum_and_its_tokens_per_second(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = NullActor.update
    monkeypatch.setattr(
        NullActor,
        "update",
        lambda self, batch: update(self, batch) | {"policy/ratio_max": float(self.num_updates % 4)},
    )
    rows = [row for row in metrics.read(run(config, "actor.minibatch_prompts=1")) if "reward/mean" in row]
    assert [row["policy/ratio_max"] for row in rows] == [3.0] * 4
    num_tokens = rows[0]["completion/length_mean"] * 16
    assert rows[0]["time/tokens_per_s"] == pytest.approx(num_tokens / rows[0]["time/step_s"])
