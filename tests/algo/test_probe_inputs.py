"""An algorithm that writes into its inputs is refused: the loss mask and old log-probs serve others, too."""

import pytest

from rlcore.algo.probe import probe
from rlcore.contracts.offers import Algorithm, AlgorithmKind, Scope
from rlcore.errors import PluginError

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
