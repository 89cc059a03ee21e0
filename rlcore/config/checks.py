"""Checks a merged configuration: bounds, conditions, and the few rules that involve several keys."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from rlcore.config.layers import overlay
from rlcore.config.names import check_name
from rlcore.config.options import condition_of, needed, within
from rlcore.config.sections import RunConfig, SourceConfig
from rlcore.errors import ConfigError, nearest

LARGEST_COUNT = 2**31 - 1
"""The largest number of prompts, samples, tokens or steps. A larger one is a typing error, and the run would
exhaust the memory."""


@dataclass(frozen=True)
class Value:
    """One field of the configuration, in any section."""

    key: str
    section: str
    """Dotted key of its section."""
    value: Any
    metadata: Mapping[str, Any]


def walk(section: Any, prefix: str = "") -> Iterator[Value]:
    """Every field of a section and of the sections below it, including entries of `dict[str, Dataclass]`."""
    for spec in fields(section):
        key = f"{prefix}.{spec.name}" if prefix else spec.name
        value = getattr(section, spec.name)
        yield Value(key, prefix, value, spec.metadata)
        if is_dataclass(value):
            yield from walk(value, key)
        elif isinstance(value, dict):
            for name, entry in value.items():
                if is_dataclass(entry):
                    yield from walk(entry, f"{key}.{name}")


def lookup(config: Any, key: str) -> Any:
    """The value at a dotted key, through dataclasses and dicts; KeyError naming the key if there is none."""
    value = config
    for part in key.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif is_dataclass(value) and hasattr(value, part):
            value = getattr(value, part)
        else:
            raise KeyError(key)
    return value


def has_effect(config: RunConfig, value: Value) -> bool:
    """True if the field's `used_when` holds; True for a field without one."""
    used_when = value.metadata.get("used_when")
    if not used_when:
        return True
    condition = condition_of(used_when, value.section)
    return condition.holds(lookup(config, condition.key))


def values_with_effect(raw: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """The values that have an effect; others would be refused when they are loaded again."""
    saved, gone = overlay({}, raw), set()
    for entry in walk(config):
        used_when = entry.metadata.get("used_when")
        if not has_effect(config, entry) or (used_when and condition_of(used_when, entry.section).key in gone):
            _remove(saved, entry.key.split("."))
            gone.add(entry.key)
    return saved


def _remove(values: dict[str, Any], parts: Sequence[str]) -> None:
    for part in parts[:-1]:
        if part not in values:  # the section around it had no effect, and is gone
            return
        values = values[part]
    values.pop(parts[-1], None)


def check_bounds(config: RunConfig, describe: Callable[[str], str]) -> None:
    """ConfigError for a number out of bounds or not finite; `describe(key)` words the value found and its origin."""
    for entry in walk(config):
        number = entry.value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number):
            raise ConfigError(f"{entry.key}: found {describe(entry.key)}; needs a finite number")
        if not within(number, entry.metadata):
            raise ConfigError(f"{entry.key}: found {describe(entry.key)}; needs {needed(entry.metadata)}")
        counts = isinstance(number, int) and not entry.key.startswith("plugins.") and not entry.key.endswith("seed")
        if counts and abs(number) > LARGEST_COUNT:
            raise ConfigError(f"{entry.key}: found {describe(entry.key)}; needs at most {LARGEST_COUNT}")


def check_effects(config: RunConfig, explicit: Mapping[str, int], describe: Callable[[str], str]) -> None:
    """ConfigError for a key in `explicit` that has no effect in this run, naming the condition.

    A key is explicit if a file or override sets it or anything below it. The number is that of the highest layer that
    does; a condition that a higher layer sets is switched off on purpose.
    """
    for entry in walk(config):
        if entry.key in explicit and not has_effect(config, entry):
            condition = condition_of(entry.metadata["used_when"], entry.section)
            if explicit.get(condition.key, 0) > explicit[entry.key]:
                continue
            raise ConfigError(
                f"{entry.key}: set to {describe(entry.key)}, which has no effect: it is used only when {condition}, "
                f"and {condition.key} is {_shown(lookup(config, condition.key))}; leave it out or change "
                f"{condition.key}"
            )


def _shown(value: Any) -> str:
    return "empty" if value in ((), {}, "") else repr(value)


def check_rules(config: RunConfig) -> None:
    """ConfigError for combinations that cannot be intended."""
    if config.train.name:
        check_name("train.name", config.train.name, "a run", dots=True)
    _check_sources(config)
    _check_watched(config)
    check_sampling(config)
    if "" in config.rollout.stop:
        raise ConfigError("rollout.stop: an empty string, which would end every response; needs text, or leave it out")
    if config.reward.manager == "functions" and not config.reward.functions and config.algo.advantage != "none":
        raise ConfigError(
            "reward.functions: empty, so there is nothing to learn from; needs at least one, such as "
            "reward.functions.accuracy.fn=my_rewards.py:score"
        )
    if config.reward.canary and "{answer}" not in config.reward.canary:
        raise ConfigError(f"reward.canary: found {config.reward.canary!r}; needs {{answer}} where the answer belongs")
    if config.algo.overlong == "penalty" and config.algo.overlong_buffer > config.rollout.max_tokens:
        raise ConfigError(
            f"algo.overlong_buffer: {config.algo.overlong_buffer} tokens do not fit into rollout.max_tokens="
            f"{config.rollout.max_tokens}; needs at most that many"
        )
    if 0.0 < config.algo.dual_clip <= 1.0:
        raise ConfigError(f"algo.dual_clip: found {config.algo.dual_clip:g}; needs more than 1, or 0 for no dual clip")
    if config.algo.advantage == "pass_at_k" and config.algo.pass_k >= config.rollout.samples_per_prompt:
        raise ConfigError(
            f"algo.pass_k: found {config.algo.pass_k}; needs less than rollout.samples_per_prompt="
            f"{config.rollout.samples_per_prompt}, because sets of the whole group are identical"
        )
    if config.eval.sources and config.eval.samples_per_prompt > 1 and config.eval.temperature == 0:
        raise ConfigError(
            f"eval.samples_per_prompt: {config.eval.samples_per_prompt} greedy samples of a prompt are identical; "
            f"needs eval.temperature above 0, or eval.samples_per_prompt=1"
        )
    _check_attention(config)


def check_sampling(config: RunConfig) -> None:
    """ConfigError if training would sample from another distribution than the policy's without a correction."""
    if config.rollout.allow_truncation:
        _check_correction(config)
        return
    for name, whole in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        found = getattr(config.rollout, name)
        if found != whole:
            raise ConfigError(
                f"rollout.{name}: found {found}; training needs {whole}, because the recorded ratio would be biased: "
                f"the truncated distribution is not the policy that is trained; evaluation may truncate: eval.{name}; "
                "rollout.allow_truncation=true corrects for it at the price of a pass"
            )


def _check_correction(config: RunConfig) -> None:
    """ConfigError unless the loss has the factor pi_old / mu, and no other setting treats mu as the policy."""
    what = "rollout.allow_truncation=true"
    if not config.rollout.truncates:
        raise ConfigError(
            f"{what}: it has no effect, because nothing is truncated; leave it out, or set rollout.top_p, top_k or "
            "min_p"
        )
    if config.schedule.old_logprobs == "behaviour":
        raise ConfigError(
            f"{what}: schedule.old_logprobs=behaviour measures the policy against the truncated distribution, so every "
            "ratio would start below 1 and be clipped there; needs schedule.old_logprobs=recompute"
        )
    if config.algo.importance.correction == "none":
        raise ConfigError(
            f"{what}: algo.importance.correction=none would leave the ratio biased; choose from: truncate, mask"
        )
    placement = config.algo.kl.placement
    if placement in ("reward", "advantage"):
        raise ConfigError(
            f"{what}: algo.kl.placement={placement} estimates the KL from the tokens that were drawn, and those are of "
            "the truncated distribution; choose algo.kl.placement=loss, or draw from the whole vocabulary"
        )


def _check_sources(config: RunConfig) -> None:
    if not config.data.sources:
        raise ConfigError(
            "data.sources: empty; needs at least one source of prompts, such as data.sources.train.path=train.jsonl"
        )
    groups: tuple[tuple[str, dict[str, SourceConfig]], ...] = (
        ("data.sources", config.data.sources),
        ("eval.sources", config.eval.sources),
    )
    for key, sources in groups:
        for name, source in sources.items():
            if bool(source.path) == bool(source.task):
                found = f"path={source.path!r} and task={source.task!r}" if source.path else "neither path nor task"
                raise ConfigError(f"{key}.{name}: found {found}; needs exactly one: path (a file or dataset) or task")
    for name, source in config.eval.sources.items():
        if source.weight != 1.0:
            raise ConfigError(
                f"eval.sources.{name}.weight: found {source.weight:g}, which has no effect: a held-out source is not "
                "mixed; leave it out"
            )
    if all(source.weight == 0 for source in config.data.sources.values()):
        raise ConfigError("data.sources: every weight is 0; needs one above 0")


def _check_attention(config: RunConfig) -> None:
    if config.model.attention == "flash_attention_2" and (
        config.cluster.device != "cuda" or config.actor.dtype not in ("bfloat16", "float16")
    ):
        raise ConfigError(
            f"model.attention: flash_attention_2 needs cluster.device=cuda and actor.dtype=bfloat16 or "
            f"float16, found {config.cluster.device} and {config.actor.dtype}; choose from: sdpa, eager"
        )


def _check_watched(config: RunConfig) -> None:
    """Check the metrics that choose the best checkpoint and end the run; the first evaluation shows if they exist."""
    best, stop = config.checkpoint.best, config.train.stop.metric
    if best and not best.startswith("eval/"):
        raise ConfigError(f"checkpoint.best: found '{best}'; needs a metric of evaluations, such as eval/heldout/mean")
    for key, metric in (("checkpoint.best", best), ("train.stop.metric", stop)):
        if not metric.startswith("eval/"):
            continue
        if not config.eval.sources:
            raise ConfigError(f"{key}: found '{metric}', and nothing is evaluated; needs eval.sources")
        if (source := metric.split("/")[1]) not in config.eval.sources:
            raise ConfigError(f"{key}: eval.sources has no '{source}'; {nearest(source, tuple(config.eval.sources))}")
        if not config.eval.every_steps:
            raise ConfigError(f"{key}: found '{metric}', and steps are not evaluated; needs eval.every_steps=...")
