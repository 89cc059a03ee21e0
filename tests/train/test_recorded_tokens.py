"""Every number that a run records per token, read back from its files: single turns, several turns, PPO."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from rlcore.data.tokenizer import ByteTokens
from rlcore.report import metrics
from rlcore.testing.null import SETTINGS
from rlcore.train import train

STALE = ("schedule.max_staleness=1", "actor.minibatch_prompts=2")
"""Samples may be older than the step, which has two updates: a pass computes pi_old's log-probs."""
REFERENCE = ("algo.kl.placement=loss", "reference.backend=null")
ENVIRONMENT = """
from rlcore_agent_loop.conversation.environments import Environment, Step

class Asks(Environment):
    def step(self, messages):
        turns = sum(message["role"] == "assistant" for message in messages)
        return Step(done=True, reward=1.0) if turns == 3 else Step([{"role": "user", "content": "more"}])

def score(trajectory):
    return len(str(trajectory.completion)) / 1000
"""


@dataclass(frozen=True)
class Recorded:
    """The files of a step."""

    rows: list[dict[str, Any]]
    arrays: dict[str, npt.NDArray[Any]]

    def spans(self) -> list[slice]:
        """The place of each row in the arrays."""
        starts = self.arrays["row_start"].tolist()
        assert len(starts) == len(self.rows) + 1
        return [slice(begin, end) for begin, end in pairwise(starts)]


def recorded(directory: Path, *overrides: str, plugins: tuple[str, ...] = (), step: int = 2) -> Recorded:
    settings = ("rollout.samples_per_prompt=4", "rollout.max_tokens=8", "train.prompts_per_step=4", "actor.lr=0.5")
    place = (f"train.dir={directory}", "train.name=run", f"train.max_steps={step}")
    run_dir = train({}, *SETTINGS, *settings, *place, *overrides, plugins=["null", *plugins]).run_dir
    rows = [row for row in metrics.read_trajectories(run_dir, step) if row["lane"] == "train"]
    return Recorded(rows, load_file(run_dir / "tokens" / f"step_{step:06d}.train.safetensors"))


def check_single_numbers(found: Recorded) -> None:
    """Log-probs are such, pi_old differs from an older sampler, and the null policy has one entropy in all places."""
    arrays = found.arrays
    assert arrays["logprob"].max() <= 0.0
    assert np.isfinite(arrays["old_logprob"]).all()
    assert np.abs(arrays["old_logprob"] - arrays["logprob"]).max() > 1e-3
    entropy = set(arrays["entropy"].tolist())
    assert len(entropy) == 1
    assert 0.0 < entropy.pop() < np.log(ByteTokens.VOCABULARY)


@pytest.mark.slow
def test_a_single_turn_keeps_ids_log_probs_entropy_mask_advantages_and_versions(tmp_path: Path) -> None:
    found = recorded(tmp_path, *STALE, *REFERENCE, "train.record_tokens=all")
    check_single_numbers(
        Recorded(
            found.rows,
            {name: array[found.arrays["sampled"] == 1] for name, array in found.arrays.items() if name != "row_start"},
        )
    )
    for row, span in zip(found.rows, found.spans(), strict=True):
        sampled = found.arrays["sampled"][span] == 1
        assert (len(sampled), int(sampled.sum())) == (row["num_tokens"], row["num_sampled"])
        ids = found.arrays["token_id"][span]
        text = bytes(id_ for id_ in ids[sampled].tolist() if id_ < 256).decode(errors="replace")
        assert text == row["completion"]
        assert found.arrays["advantage"][span][sampled] == pytest.approx(row["advantage"])
        assert not found.arrays["advantage"][span][~sampled].any()
        assert found.arrays["reference_logprob"][span][sampled] == pytest.approx(-np.log(ByteTokens.VOCABULARY))
        [[position, version]] = row["versions"]
        assert position == np.flatnonzero(sampled)[0]
        assert version in (0, 1)


@pytest.mark.slow
def test_several_turns_keep_their_spans(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    agent = json.dumps({"environment": {"fn": f"{tmp_path / 'mine.py'}:Asks"}, "children": 1})
    score = f"reward.functions.letters.fn={tmp_path / 'mine.py'}:score"
    found = recorded(tmp_path, *STALE, f"plugins.agent_loop={agent}", "rollout.max_tokens=1000", score)
    check_single_numbers(found)
    for row, span in zip(found.rows, found.spans(), strict=True):
        position = found.arrays["position"][span]
        assert row["num_sampled"] == len(position)
        assert 1 + int((np.diff(position) > 1).sum()) == row["turns"]
        assert found.arrays["advantage"][span] == pytest.approx(row["advantage"])
        assert row["versions"][0][0] == position[0]
    assert max(row["turns"] for row in found.rows) > 1


@pytest.mark.slow
def test_ppo_keeps_an_advantage_and_a_value_per_token(tmp_path: Path) -> None:
    ppo = ("algo.preset=ppo", "critic.engine=critic_engine", "plugins.critic_engine.backend='null'")
    found = recorded(tmp_path, *STALE, *ppo, plugins=("critic_engine",))
    check_single_numbers(found)
    assert np.isfinite(found.arrays["value"]).all()
    assert found.arrays["value"].any()
    differing = [len(set(found.arrays["advantage"][span].tolist())) > 1 for span in found.spans()]
    assert any(differing)
    for row, span in zip(found.rows, found.spans(), strict=True):
        assert row["advantage"] == pytest.approx(found.arrays["advantage"][span].mean(), abs=1e-5)


@pytest.mark.slow
def test_a_run_without_a_pass_records_no_entropy(tmp_path: Path) -> None:
    assert not {"entropy", "old_logprob"} & recorded(tmp_path).arrays.keys()
