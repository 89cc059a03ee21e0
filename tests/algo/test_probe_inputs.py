"""Inputs of an algorithm: it may not write into those that others use, too, and takes the arguments that it has."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlcore.algo.probe import probe
from rlcore.config import AlgoConfig
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Scope
from rlcore.errors import ConfigError, PluginError

CHANGES = "import torch\n\ndef f(i):\n    i.{field}.zero_()\n    return i.{field} * 1.0\n"


@pytest.mark.parametrize(
    ("kind", "field"),
    [(AlgorithmKind.ADVANTAGE, "rewards_B"), (AlgorithmKind.POLICY_LOSS, "mask_BT")],
)
def test_an_algorithm_that_changes_its_inputs_is_refused(tmp_path, kind, field):
    path = tmp_path / "mine.py"
    path.write_text(CHANGES.format(field=field), "utf-8")
    with pytest.raises(PluginError, match=rf"mine of a stranger.* changed {field} in place; needs its inputs left"):
        probe(Algorithm("mine", kind, f"{path}:f", Scope.BATCH), "a stranger")


def test_the_extra_arguments_of_the_run_hold_in_the_probe_and_after_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(inputs, factor=1.0):\n    return inputs.rewards_B / factor\n")
    offer = Algorithm("mine", AlgorithmKind.ADVANTAGE, f"{path}:f", Scope.SAMPLE)
    inputs = SimpleNamespace(rewards_B=torch.tensor([1.0]))
    doubled = replace(AlgoConfig(), advantage_kwargs={"factor": 2.0})
    assert probe(offer, "a stranger", doubled).function(inputs).tolist() == [0.5]
    assert probe(offer, "a stranger").function(inputs).tolist() == [1.0]
    with pytest.raises(PluginError, match=r"returned (inf|nan) for row 0; needs"):
        probe(offer, "a stranger", replace(AlgoConfig(), advantage_kwargs={"factor": 0.0}))


@pytest.mark.parametrize("kind", AlgorithmKind)
def test_an_extra_argument_that_the_function_does_not_take_is_refused(tmp_path, kind):
    path = tmp_path / "mine.py"
    path.write_text("def f(inputs, *, factor=1.0):\n    return None\n")
    config = replace(AlgoConfig(), **{f"{kind.value}_kwargs": {"facto": 2.0}})
    message = rf"^algo\.{kind.value}_kwargs\.facto: algo\.\w+=mine of me has no such parameter; did you mean 'factor'\?"
    with pytest.raises(ConfigError, match=message):
        probe(Algorithm("mine", kind, f"{path}:f", Scope.SAMPLE), "me", config)
