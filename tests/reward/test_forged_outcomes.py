"""A reward function whose process answers nonsense fails its samples, and nothing else."""

from pathlib import Path

import pytest

from rlcore.config import RewardFunctionConfig
from rlcore.testing.rewards import make_trajectory, score_rewards
from rlcore.types import RewardStatus

LYING = """
import rlcore.reward.served as served
from rlcore.contracts.scorer import Outcome
from rlcore.types import RewardStatus

def lie(*args, **kwargs):
    return LIE

def judge(prompts, completions, **columns):
    served.ServedReward.score = lie
    return [1.0] * len(completions)
"""
LIES = {
    "not a list": "7",
    "too few": "[]",
    "no outcomes": "[{'score': 1.0}]",
    "a score that is a text": "[Outcome(RewardStatus.OK, '1')]",
    "a status that is a text": "[Outcome('ok', 1.0)]",
    "an infinite score": "[Outcome(RewardStatus.OK, float('inf'))]",
    "components that are a number": "[Outcome(RewardStatus.OK, 1.0, '', 7)]",
    "token scores that are a text": "[Outcome(RewardStatus.OK, 1.0, token_scores='x')]",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIES)
def test_what_is_no_outcome_fails_the_sample(kind: str, tmp_path: Path) -> None:
    (tmp_path / "lying.py").write_text(LYING.replace("LIE", LIES[kind]))
    functions = {
        "lying": RewardFunctionConfig(f"{tmp_path / 'lying.py'}:judge", children=1),
        "honest": RewardFunctionConfig("rlcore.testing.letters:count_letter", children=1, kwargs={"letter": "a"}),
    }
    trajectories = [make_trajectory(0, sample) for sample in range(2)]
    rewards = score_rewards(functions, trajectories)
    first, second = (rewards[key] for key in sorted(rewards))
    assert RewardStatus.FAILED in (first.status, second.status)
    assert "its process answered" in str(first.info) + str(second.info)
