"""`rlcore config KEY` says of each key what the reference says, and what else sets it."""

from pathlib import Path

import pytest
import yaml

from rlcore.cli import main
from rlcore.config.explain import KEYS_THAT_MATTER, explain, summary
from rlcore.config.layers import leaves
from rlcore.errors import ConfigError

REFERENCE = Path(__file__).parents[2] / "examples" / "reference.yaml"
KEYS = [key for key, _ in leaves(yaml.safe_load(REFERENCE.read_text()))]


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_the_reference_is_explained(key: str) -> None:
    first, *facts = explain(key, {})
    assert first.startswith(f"{key}: ")
    assert len(first) > len(key) + 2
    assert facts


def test_an_explanation_has_type_bounds_default_condition_presets_and_peers_names() -> None:
    text = "\n".join(explain("algo.clip_low", {}, {"algo.clip_low": "override 'x'"}))
    for part in (
        "takes: a number", "must be: at least 0 and at most 1", "default: 0.2", "used when: policy_loss not in",
        "gspo (0.0003)", "clip_ratio_low of verl", "set by: override 'x'",
    ):  # fmt: skip
        assert part in text
    assert "set by" not in "\n".join(explain("train.seed", {}))


def test_a_section_lists_its_keys_and_names_below_it_may_be_any() -> None:
    assert "  train.max_steps=0  # Steps; 0: `train.epochs` decides" in explain("train", {})
    assert explain("data.sources.mine.weight", {})[0].startswith("data.sources.mine.weight: Share")
    assert any(line.startswith("  reward.functions.<name>.fn=required") for line in explain("reward.functions", {}))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("actor.learning_rate", "actor.lr here"),
        ("actr.lr", "did you mean 'actor'"),
        ("train.max_step", "did you mean 'train.max_steps'"),
        ("plugins.vllm.lora", "enable it: --plugin vllm"),
    ],
)
def test_a_key_that_does_not_exist_is_refused_with_the_way_out(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        explain(key, {})


def test_the_command_explains_keys_of_plugins_and_says_what_sets_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "plugins.null.update_s", "--plugin", "null"]) == 0
    assert "Seconds that an update takes" in capsys.readouterr().out
    settings = ["model.path=m", "data.sources.a.path=a", "reward.functions.b.fn=b.py:b", "actor.lr=2e-5"]
    assert main(["config", "actor.lr", *settings]) == 0
    assert "set by: override 'actor.lr=2e-5', to 2e-05" in capsys.readouterr().out


def test_the_help_of_train_names_the_keys_that_matter_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for key in KEYS_THAT_MATTER:
        assert f"  {key}={summary(key)[0]} " in text
