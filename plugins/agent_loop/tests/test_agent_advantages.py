"""Advantages over what the loop makes: time runs over sampled tokens, across tool answers and parts; hand-computed."""

from pathlib import Path

import pytest
import torch
from rlcore_agent_loop.rewards import environment, environment_by_turn
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, talk

from rlcore.algo.advantage import AdvantageInputs, gae, rloo, turn_rloo
from rlcore.algo.kl import FixedKl
from rlcore.algo.step import with_advantages
from rlcore.config import AlgoConfig
from rlcore.data.batch import collate
from rlcore.errors import RewardError
from rlcore.types import Batch, Reward, ScoredTrajectory, Trajectory

GAMMA, LAM = 0.9, 0.5
MINE = """
from rlcore_agent_loop.conversation.environments import Environment, Step

def look():
    return "7"

class Forgets(Environment):
    def step(self, messages):
        if messages[0]["content"] == "again":
            return Step(done=True, reward=1.0)
        return Step([{"role": "user", "content": "again"}], restart=True)

class Counts(Environment):
    # Rewards the letters of each turn; a turn with a z is the last.

    def step(self, messages):
        said = messages[-1]["content"]
        return Step([{"role": "user", "content": "more"}], done="z" in said, reward=float(len(said)))
"""


def batch_of(trajectories: list[Trajectory], reward: float) -> Batch:
    return collate([[ScoredTrajectory(trajectory, Reward(reward)) for trajectory in trajectories]], pad_id=END)


def gae_of(batch: Batch, values_BT: torch.Tensor) -> torch.Tensor:
    return gae(
        AdvantageInputs(
            rewards_B=torch.tensor(batch.rewards_B),
            group_B=torch.tensor(batch.group_B),
            sample_B=torch.tensor(batch.sample_B),
            lengths_B=torch.tensor(batch.num_sampled_B),
            loss_mask_BT=torch.tensor(batch.tokens.loss_mask_BT),
            values_BT=values_BT,
            gamma=GAMMA,
            lam=LAM,
        )
    )


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_gae_passes_over_a_tools_answer_without_discount(mine: Path) -> None:
    settings = AgentLoopSettings(tools={"look": ToolSettings(f"{mine}:look")}, describe_tools="never", children=1)
    policy = ScriptedPolicy(lambda sample, turn, ids: call("look").encode() if turn == 1 else [END])
    batch = batch_of([talk(policy, settings).only], reward=1.0)
    [sampled] = [row.nonzero()[0].tolist() for row in batch.tokens.loss_mask_BT]
    before, last = sampled[-2], sampled[-1]
    assert last - before > 10  # the tool's answer and the opening of the next turn lie between them
    values_BT = torch.full(batch.tokens.loss_mask_BT.shape, 99.0)
    values_BT[0, sampled] = 0.5
    advantages_T = gae_of(batch, values_BT)[0]
    at_last = 1.0 - 0.5
    at_before = (GAMMA * 0.5 - 0.5) + GAMMA * LAM * at_last
    assert advantages_T[last].item() == pytest.approx(at_last)
    assert advantages_T[before].item() == pytest.approx(at_before)
    assert advantages_T[before] == pytest.approx(-0.05 + 0.225)
    assert advantages_T[before + 1 : last].tolist() == [0.0] * (last - before - 1)


def test_gae_passes_from_one_part_of_a_sample_to_the_next(mine: Path) -> None:
    settings = AgentLoopSettings(environment=EnvironmentSettings(f"{mine}:Forgets"), children=1)
    parts = talk(ScriptedPolicy(lambda sample, turn, ids: [65, END]), settings).trajectories
    batch = batch_of(parts, reward=1.0)
    assert batch.sample_B.tolist() == [0, 0]
    mask_BT = torch.tensor(batch.tokens.loss_mask_BT)
    values_BT = torch.full(mask_BT.shape, 99.0)
    values_BT[mask_BT] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    fourth = 1.0 - 0.4
    third = (0.9 * 0.4 - 0.3) + 0.45 * fourth
    second = (0.9 * 0.3 - 0.2) + 0.45 * third
    first = (0.9 * 0.2 - 0.1) + 0.45 * second
    torch.testing.assert_close(gae_of(batch, values_BT)[mask_BT], torch.tensor([first, second, third, fourth]))


def counted(mine: Path, *samples: str) -> list[Trajectory]:
    """One sample per text, with a turn for each word of it."""
    settings = AgentLoopSettings(
        tools={"look": ToolSettings(f"{mine}:look")},
        environment=EnvironmentSettings(f"{mine}:Counts"),
        describe_tools="never",
        children=1,
    )

    def turns(sample: int, turn: int, ids: list[int]) -> list[int]:
        word = samples[sample].split()[turn - 1]
        return list(call("look").encode() if word == "CALL" else word.encode()) + [END] * (word != "-")

    return talk(ScriptedPolicy(turns), settings, num_samples=len(samples)).trajectories


def test_each_turn_gets_the_reward_of_the_step_that_answered_it(mine: Path) -> None:
    [found] = counted(mine, "a CALL bcd yz")
    reward = environment_by_turn(found)
    assert reward.score == environment(found) == 6.0
    assert reward.token_scores is not None
    at = reward.token_scores.nonzero()[0]
    ends = [turn["start"] + turn["num_tokens"] - 1 for turn in found.info["turns"]]
    assert at.tolist() == [ends[0], *ends[2:]]
    assert reward.token_scores[at].tolist() == [1.0, 3.0, -4.0], "the last turn keeps 2 of the sum"
    assert found.loss_mask[at].all()
    assert ["reward" in turn for turn in found.info["turns"]] == [True, False, True, True]


def test_turns_of_an_environment_are_compared_with_those_of_other_samples(mine: Path) -> None:
    samples = counted(mine, "a yz", "bcd efgz", "z")
    batch = collate([[ScoredTrajectory(found, environment_by_turn(found)) for found in samples]], pad_id=END)
    found, _ = with_advantages(batch, turn_rloo, True, AlgoConfig(advantage="turn_rloo"), 99, FixedKl(0.0))
    assert found.advantages_BT is not None
    mask_BT = batch.tokens.loss_mask_BT
    # returns from the turns on: 3, 2 | 7, 4 | 1
    first, second, third = ([*dict.fromkeys(row[mask])] for row, mask in zip(found.advantages_BT, mask_BT, strict=True))
    assert (first, second, third) == ([-1.0, -2.0], [5.0, 2.0], [-4.0])
    # An estimator of whole samples trains as if the sum were the reward.
    of_samples, _ = with_advantages(batch, rloo, False, AlgoConfig(), 99, FixedKl(0.0))
    assert of_samples.advantages_B is not None
    assert of_samples.advantages_B.tolist() == pytest.approx([-1.0, 5.0, -4.0])


def test_a_turn_without_tokens_leaves_its_reward_to_the_end_of_the_sample(mine: Path) -> None:
    settings = AgentLoopSettings(environment=EnvironmentSettings(f"{mine}:Always"), children=1, max_turns=2)
    mine.write_text(MINE.replace("float(len(said))", "2.5").replace("Counts", "Always"))
    policy = ScriptedPolicy(lambda sample, turn, ids: [[65, END], []][turn - 1])
    found = talk(policy, settings).only
    assert [turn["num_tokens"] for turn in found.info["turns"]] == [2, 0]
    reward = environment_by_turn(found)
    assert reward.score == 5.0
    assert reward.token_scores is not None
    assert not reward.token_scores.any(), "both rewards are on the last token"


def test_a_sample_of_several_parts_has_no_reward_for_each_turn(mine: Path) -> None:
    settings = AgentLoopSettings(environment=EnvironmentSettings(f"{mine}:Forgets"), children=1)
    parts = talk(ScriptedPolicy(lambda sample, turn, ids: [65, END]), settings).trajectories
    with pytest.raises(RewardError, match="has 2 segments; needs 1 to reward each turn, so a step without restart"):
        environment_by_turn(parts[-1])
