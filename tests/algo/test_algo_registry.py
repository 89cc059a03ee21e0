"""References become functions, offers are true, and planning imports no torch."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from rlcore.algo.advantage import grpo
from rlcore.algo.aggregation import Mode
from rlcore.algo.core_offers import OFFERS
from rlcore.config.presets import PRESETS
from rlcore.contracts.offers import AlgorithmKind, Need, Scope
from rlcore.errors import PluginError
from rlcore.imports import import_function


def test_every_offer_resolves_to_the_function_of_its_name() -> None:
    assert len({(offer.kind, offer.name) for offer in OFFERS}) == len(OFFERS)
    for offer in OFFERS:
        assert import_function(offer.target).__name__ == offer.name
        if offer.selection:
            assert import_function(offer.selection).__name__ == f"select_{offer.name}"
    assert import_function("rlcore.algo.advantage:grpo") is grpo


def test_offers_state_scope_and_needs() -> None:
    estimators = {offer.name: offer for offer in OFFERS if offer.kind is AlgorithmKind.ADVANTAGE}
    losses = {offer.name: offer for offer in OFFERS if offer.kind is AlgorithmKind.POLICY_LOSS}
    scopes = {scope: {name for name, offer in estimators.items() if offer.scope is scope} for scope in Scope}
    assert scopes == {
        Scope.SAMPLE: {"gae", "remax", "none"},
        Scope.GROUP: {"grpo", "dr_grpo", "rloo", "opo", "pass_at_k", "turn_rloo"},
        Scope.BATCH: {"gpg", "reinforce_pp", "reinforce_pp_baseline", "gdpo"},
    }
    assert {name: set(offer.needs) for name, offer in estimators.items() if offer.needs} == {
        "gae": {Need.VALUES},
        "remax": {Need.GREEDY_BASELINE},
        "gpg": {Need.GROUP},
        "reinforce_pp_baseline": {Need.GROUP},
        "gdpo": {Need.GROUP, Need.FUNCTION_SCORES},
    }
    assert {name for name, offer in estimators.items() if offer.per_token} == {"gae", "reinforce_pp", "turn_rloo"}
    assert set(losses) == {"clip", "gspo", "cispo", "sapo", "gpg", "gmpo", "clip_cov", "kl_cov"}
    picky = {name for name, offer in losses.items() if Need.MINIBATCH_STATISTICS in offer.needs}
    assert picky == {name for name, offer in losses.items() if offer.selection} == {"clip_cov", "kl_cov"}


@pytest.mark.slow
def test_offers_and_registry_import_no_torch() -> None:
    code = "import sys, rlcore.algo.core_offers, rlcore.imports; print([m for m in sys.modules if m == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("grpo", "needs the form 'module:function'"),
        (":grpo", "needs the form 'module:function'"),
        ("rlcore.algo.advantage:gprpo", "has no 'gprpo'; did you mean 'grpo'"),
        ("rlcore.algo.advantage:STD_EPSILON", "'STD_EPSILON' is float; needs a function"),
        ("rlcore.algo.nowhere:f", "importing 'rlcore.algo.nowhere' failed: ModuleNotFoundError"),
        ("plugin.py:f", "needs an absolute path"),
        ("/nowhere/plugin.py:f", "target '/nowhere/plugin.py': the file does not exist"),
    ],
)
def test_a_reference_that_leads_nowhere_says_what_is_wrong_in_one_line(reference: str, message: str) -> None:
    with pytest.raises(PluginError, match=message) as raised:
        import_function(reference)
    assert "\n" not in str(raised.value)


def test_a_bare_file_is_imported_once_with_its_neighbour_and_a_broken_one_can_be_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = tmp_path / "mine.py"
    file.write_text("raise OSError('not yet')\n")
    with pytest.raises(PluginError, match="OSError: not yet"):
        import_function(f"{file}:half")
    (tmp_path / "rlcore_test_share.py").write_text("SHARE = 2\n")
    file.write_text("from rlcore_test_share import SHARE\ndef half(inputs):\n    return inputs / SHARE  # right now\n")
    half = import_function(f"{file}:half")
    assert half(3.0) == 1.5
    assert import_function(f"{file}:half") is half


def test_the_docs_have_a_row_for_every_offer_preset_and_aggregation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for offer in OFFERS:
        title = "## Advantage estimators" if offer.kind is AlgorithmKind.ADVANTAGE else "## Policy loss"
        section = text[text.index(f"\n{title}") :].split("\n## ")[1]
        assert f"\n| `{offer.name}`" in section, f"{offer.kind} {offer.name}"
    names = set(PRESETS) | set(get_args(Mode))
    assert {name for name in names if f"\n| `{name}`" not in text} == set()
    for name, settings in PRESETS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}`"))
        shown = {f"`{settings[key]}`" for key in ("advantage", "policy_loss", "aggregation") if key in settings}
        assert {line for line in shown if line not in row} == set()
        if "clip_high" in settings:
            assert f"| {settings['clip_low']:g} / {settings['clip_high']:g} |" in row
