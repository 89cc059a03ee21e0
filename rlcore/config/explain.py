"""Explains one key of the configuration: type, default, meaning, conditions, and other sources of its value."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from rlcore.config.key_reference import docs_of
from rlcore.config.options import needed
from rlcore.config.peer_names import names_of
from rlcore.config.presets import PRESETS
from rlcore.config.schema import entries_of, hints_of, section_of, unknown, wanted
from rlcore.config.sections import RunConfig
from rlcore.errors import ConfigError
from rlcore.types import FrozenDict

KEYS_THAT_MATTER = (
    "model.path", "data.sources.<name>.path", "reward.functions.<name>.fn", "eval.sources.<name>.path",
    "actor.lr", "actor.lora.enabled", "rollout.samples_per_prompt", "rollout.max_tokens", "rollout.temperature",
    "train.prompts_per_step", "train.max_steps", "train.epochs", "train.name", "algo.preset", "cluster.device",
)  # fmt: skip
"""Keys that matter for a first run."""


def explain(key: str, plugins: Mapping[str, type[Any]], origins: Mapping[str, str] = FrozenDict()) -> list[str]:
    """The explanation of a key or section, in lines; ConfigError for a key that does not exist.

    `plugins`: the section types of the enabled plugins. The name of an entry, such as a source of `data.sources`, is
    any name or '<name>'. `origins`: the origins of the values in a configuration.
    """
    spec, owner, hint = _find(key, plugins)
    doc = docs_of(owner).get(spec.name, "")
    section, entry = section_of(hint), section_of(entries_of(hint))
    if section is not None:
        return [f"{key}: {doc}", *_summaries(key, section)]
    if entry is not None:
        return [f"{key}: {doc}", *_summaries(f"{key}.<name>", entry)]
    set_by = [f"set by: {origins[key]}"] if key in origins else []
    return [f"{key}: {doc}", *_facts(key, spec, hint), *set_by]


def summary(key: str) -> tuple[str, str]:
    """(default, first sentence of the meaning) of a key."""
    spec, owner, _ = _find(key, {})
    return _default(spec), docs_of(owner).get(spec.name, "").split(". ")[0].rstrip(".")


def _find(key: str, plugins: Mapping[str, type[Any]]) -> "tuple[Field[Any], type[Any], Any]":
    parts = key.split(".")
    owner: type[Any] = RunConfig
    if parts[0] == "plugins" and len(parts) > 2:
        if parts[1] not in plugins:
            raise ConfigError(f"{key}: the plugin is not enabled, or has no settings; enable it: --plugin {parts[1]}")
        owner, parts = plugins[parts[1]], parts[2:]
    prefix = key[: len(key) - len(".".join(parts))].rstrip(".")
    while True:
        name, *parts = parts
        prefix = f"{prefix}.{name}" if prefix else name
        specs = {spec.name: spec for spec in fields(owner)}
        if name not in specs:
            raise ConfigError(unknown(prefix, owner, "rlcore config"))
        hint = hints_of(owner)[name]
        below = section_of(hint)
        if below is None and parts and (entry := section_of(entries_of(hint))) is not None:
            prefix, parts, below = f"{prefix}.{parts[0]}", parts[1:], entry
            if not parts:
                return specs[name], owner, entry
        if not parts or below is None:
            return specs[name], owner, hint
        owner = below


def _summaries(key: str, section: type[Any]) -> Iterator[str]:
    docs = docs_of(section)
    for spec in fields(section):
        doc = docs.get(spec.name, "").split(". ")[0].rstrip(".")
        below = section_of(hints_of(section)[spec.name]) is not None
        yield f"  {key}.{spec.name}{'' if below else f'={_default(spec)}'}  # {doc}"


def _facts(key: str, spec: "Field[Any]", hint: Any) -> Iterator[str]:
    yield f"takes: {wanted(hint)}"
    if bounds := needed(spec.metadata):
        yield f"must be: {bounds}"
    yield f"default: {_default(spec)}"
    if condition := spec.metadata.get("used_when"):
        yield f"used when: {condition}"
    name = key.removeprefix("algo.")
    presets = [f"{preset} ({values[name]})" for preset, values in PRESETS.items() if key != name and name in values]
    if presets:
        yield f"set by algo.preset: {', '.join(presets)}"
    if names := names_of(key):
        yield f"called elsewhere: {', '.join(names)}"
    yield f"set it: {key}=... on the command line, or in a file; all keys: examples/reference.yaml"


def _default(spec: "Field[Any]") -> str:
    value = spec.default if spec.default_factory is MISSING else spec.default_factory()
    if value == "???":
        return "required"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "''" if value == "" else f"{value}"
