"""Extra arguments of an estimator and a policy loss reach the functions that train."""

from pathlib import Path

import pytest

from rlcore.report import metrics
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

PLUGIN = """
from rlcore import Algorithm, AlgorithmKind, Scope, hookimpl

RLCORE_API = "1"


def constant(inputs, value=0.0):
    return inputs.rewards_B * 0.0 + value


def counted(inputs, factor=1.0):
    import torch
    from rlcore.algo.loss import PolicyLossOutput

    loss_BT = torch.where(inputs.mask_BT, -inputs.logprobs_BT * inputs.advantages_BT * factor, 0.0)
    used_BT = torch.where(inputs.mask_BT, inputs.advantages_BT * factor, 0.0)
    return PolicyLossOutput(loss_BT, {"used": used_BT.detach()})


@hookimpl
def rlcore_algorithms():
    return [
        Algorithm("constant", AlgorithmKind.ADVANTAGE, f"{__name__}:constant", Scope.SAMPLE),
        Algorithm("counted", AlgorithmKind.POLICY_LOSS, f"{__name__}:counted", Scope.SAMPLE),
    ]
"""


@pytest.mark.slow
def test_the_arguments_of_the_configuration_are_those_of_estimator_and_loss(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    more = {
        "model.path": str(write_tiny_model(tmp_path / "model")),
        "actor.backend": "hf",
        "rollout.backend": "hf",
        "algo.advantage": "constant",
        "algo.advantage_kwargs.value": 0.5,
        "algo.policy_loss": "counted",
        "algo.policy_loss_kwargs.factor": 3.0,
        "train.max_steps": 1,
    }
    settings = run_settings(tmp_path, 4, **more)
    directory = train(settings, plugins=["null", str(tmp_path / "mine.py")]).run_dir
    assert [record["policy/used"] for record in metrics.read(directory)] == [1.5]
