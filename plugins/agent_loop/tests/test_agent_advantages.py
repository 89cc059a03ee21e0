"""GAE over what the loop makes: time runs over sampled tokens, across tool answers and parts; hand-computed."""

from pathlib import Path

import pytest
import torch
from rlcore_agent_loop.settings import AgentLoopSettings, EnvironmentSettings, ToolSettings
from rlcore_agent_loop.testing import END, ScriptedPolicy, call, talk

from rlcore.algo.advantage import AdvantageInputs, gae
from rlcore.data.batch import collate
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
