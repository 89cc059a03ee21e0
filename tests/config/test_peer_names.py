"""Keys and values of TRL and verl are answered with the key of the same meaning."""

import re
import tomllib
from importlib.resources import files
from typing import Any

import pytest

from rlcore.config import RunConfig, load_config
from rlcore.config.peer_names import PEERS, names_of, renamed_key, renamed_value
from rlcore.config.schema import entries_of, hints_of, section_of, unknown
from rlcore.errors import ConfigError
from rlcore.plugins import load

TABLE: dict[str, Any] = tomllib.loads(files("rlcore.config").joinpath("peer_names.toml").read_text("utf-8"))
SECTIONS = set(hints_of(RunConfig))
KEY = re.compile(rf"\b(?:{'|'.join(sorted(SECTIONS))})(?:\.(?:<name>|\w+))+")
NAMES = [(peer, name) for peer in PEERS for name in TABLE[peer]]
PLUGINS = ("agent_loop", "critic_engine", "reward_loop", "vllm")


def has_key(key: str) -> bool:
    """True if the configuration, with the plugins of this repository, has the dotted key."""
    parts, hint = key.split("."), RunConfig
    if parts[0] == "plugins":
        sections = {offer.value.name: offer.value.type for offer in load(PLUGINS).config_sections()}
        hint, parts = sections[parts[1]], parts[2:]
    for part in parts:
        section, entries = section_of(hint), entries_of(hint)
        if section is None and entries is None:
            return False
        hint = hints_of(section).get(part) if section is not None else entries
        if hint is None:
            return False
    return True


@pytest.mark.parametrize(("peer", "name"), NAMES)
def test_each_name_of_a_peer_leads_to_keys_that_exist(peer: str, name: str) -> None:
    keys = [key.rstrip(".") for key in KEY.findall(TABLE[peer][name])]
    found = [key for key in keys if not key.endswith((".py", ".md"))]
    assert found or TABLE[peer][name].startswith("- ")
    assert [key for key in found if not has_key(key)] == []


@pytest.mark.parametrize(("peer", "name"), NAMES)
def test_each_name_of_a_peer_is_answered_with_its_meaning(peer: str, name: str) -> None:
    meaning = next(TABLE[peer][name] for peer in PEERS if name in TABLE[peer])
    end = f"has no key here: {meaning[2:]}" if meaning.startswith("- ") else f"is {meaning} here"
    assert renamed_key(f"somewhere.{name}").endswith(f"{name} {end}")


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("actor.learning_rate=1", "TRL's learning_rate is actor.lr here"),
        ("learning_rate=1", "actor.lr here"),
        ("rollout.num_generations=8", "rollout.samples_per_prompt here"),
        ("rollout.n=8", "rollout.samples_per_prompt here"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n: unknown key"),
        ("train.batch_size=8", "train.prompts_per_step here"),
        ("algo.beta=0.1", "algo.kl.coef with algo.kl.placement=loss here"),
        ("algo.clip_ratio=0.2", "algo.clip_low and algo.clip_high here"),
        ("trainer.total_epochs=1", "train.epochs here"),
        ("actor.warmup_ratio=0.1", "actor.warmup_steps (in updates) here"),
        ("cluster.device=gpu", "'gpu' is 'cuda' here; choose from: auto, cpu, cuda"),
        ("actor.dtype=bf16", "'bf16' is 'bfloat16' here"),
        ("algo.kl.estimator=low_var_kl", "'low_var_kl' is 'k3' here"),
    ],
)
def test_a_key_or_value_of_a_peer_is_refused_with_ours(override: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(way_out)):
        load_config([], ["model.path=m", override], [])


def test_what_a_peer_has_and_rlcore_has_not_is_said() -> None:
    assert renamed_key("train.logging_steps") == "TRL's logging_steps has no key here: every step is logged"


def test_values_of_offered_names_are_known_too() -> None:
    assert (
        renamed_value("algo.advantage", "grpo_passk", ("grpo",))
        == "'grpo_passk' is 'pass_at_k' here; choose from: grpo"
    )
    assert renamed_value("algo.advantage", "mine") == ""


def test_a_typing_error_is_not_taken_for_a_peers_name() -> None:
    assert "did you mean 'rollout'?" in unknown("rollut", RunConfig, "test", {"temperature": 1})
    assert names_of("actor.lr")[0] == "learning_rate of TRL"


def test_the_section_before_a_key_does_not_make_keys_alike() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([], ["model.path=m", "rollout.zz=1"], [])
    assert "did you mean" not in str(caught.value)


def test_one_text_is_a_list_of_one() -> None:
    settings = {"model.path": "m", "data.sources.a.path": "a.jsonl", "reward.functions.b.fn": "b.py:b"}
    loaded = load_config([settings], ["track.to=wandb", "rollout.stop=END"], [])
    assert (loaded.config.track.to, loaded.config.rollout.stop) == (("wandb",), ("END",))
