"""Extra arguments of an estimator and a policy loss reach the functions that train."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.report import metrics
from rlcore.testing.runs import run_settings
from rlcore.testing.tiny import write_tiny_model
from rlcore.train import train

PLUGIN = """
from rlcore import Algorithm, AlgorithmKind, Scope, hookimpl

RLCORE_API = "1"


def constant(inputs, value=0.0):
    return inputs.rewards_B * 0.0 + value


def open_ended(inputs, *, least=0.0, **more):
    return inputs.rewards_B * 0.0


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
        Algorithm("open_ended", AlgorithmKind.ADVANTAGE, f"{__name__}:open_ended", Scope.SAMPLE),
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


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["algo.advantage=constant", "algo.advantage_kwargs.valu=1"], r"valu: .* of .*mine.* did you mean 'value'"),
        (["algo.advantage=constant", "algo.advantage_kwargs.inputs=1"], "kwargs.inputs: .* no such parameter"),
        (["algo.policy_loss=counted", "algo.policy_loss_kwargs.factors=1"], "kwargs.factors: .* mean 'factor'"),
        (["algo.advantage=constant", "algo.advantage_kwargs.value=1", "algo.policy_loss=counted"], ""),
        (["algo.advantage=open_ended", "algo.advantage_kwargs={least: 1, anything: 2}"], ""),
        (["algo.advantage=grpo", "algo.advantage_kwargs.value=1"], "algo.advantage=grpo of .* no such parameter"),
    ],
)
def test_a_plan_refuses_an_argument_that_the_source_does_not_name(
    tmp_path: Path, overrides: list[str], refused: str
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        assert plan_run([run_settings(tmp_path, 4)], overrides, ["null", str(tmp_path / "mine.py")]).algorithms
