"""A plan refuses an extra argument that the source of an estimator or a loss does not name."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from rlcore.errors import ConfigError
from rlcore.plugins.planning import plan_run
from rlcore.testing.runs import run_settings

PLUGIN = """
from rlcore import Algorithm, AlgorithmKind, Scope, hookimpl

RLCORE_API = "1"


def constant(inputs, value=0.0):
    return inputs.rewards_B * 0.0 + value


def positional(inputs, /, value=0.0):
    return inputs.rewards_B * 0.0 + value


def open_ended(inputs, *, least=0.0, **more):
    return inputs.rewards_B * 0.0


def counted(inputs, *, factor=1.0):
    raise NotImplementedError


@hookimpl
def rlcore_algorithms():
    estimators = ("constant", "positional", "open_ended")
    return [
        *(Algorithm(name, AlgorithmKind.ADVANTAGE, f"{__name__}:{name}", Scope.SAMPLE) for name in estimators),
        Algorithm("counted", AlgorithmKind.POLICY_LOSS, f"{__name__}:counted", Scope.SAMPLE),
    ]
"""


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["algo.advantage=constant", "algo.advantage_kwargs.valu=1"], r"valu: .* of .*mine.* did you mean 'value'"),
        (["algo.advantage=constant", "algo.advantage_kwargs.inputs=1"], "kwargs.inputs: .* no such parameter"),
        (["algo.policy_loss=counted", "algo.policy_loss_kwargs.factors=1"], "kwargs.factors: .* mean 'factor'"),
        (["algo.advantage=constant", "algo.advantage_kwargs.value=1", "algo.policy_loss=counted"], ""),
        (["algo.advantage=open_ended", "algo.advantage_kwargs={least: 1, anything: 2}"], ""),
        (["algo.advantage=positional", "algo.advantage_kwargs.value=1"], ""),
        (["algo.advantage=positional", "algo.advantage_kwargs.inputs=1"], "kwargs.inputs: .* no such parameter"),
        (["algo.advantage=grpo", "algo.advantage_kwargs.value=1"], "algo.advantage=grpo of .* no such parameter"),
    ],
)
def test_a_plan_refuses_an_argument_that_the_source_does_not_name(
    tmp_path: Path, overrides: list[str], refused: str
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        assert plan_run([run_settings(tmp_path, 4)], overrides, ["null", str(tmp_path / "mine.py")]).algorithms
