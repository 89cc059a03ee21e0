"""Chooses how the samples of a group share their prompt, for each role."""

from collections.abc import Sequence
from dataclasses import replace

from rlcore.config import RunConfig
from rlcore.contracts.clusters import WorkerPlan
from rlcore.contracts.requests import ModelShape
from rlcore.errors import PlanError
from rlcore.plan.activations import EAGER_TYPES, longest_row
from rlcore.plan.machine_facts import Facts
from rlcore.types import SharedPrefix

TREE_TYPES = frozenset(
    {
        *("afmoe", "apertus", "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "deepseek_v2", "deepseek_v3"),
        "dots1",
        *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
        *("flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode"),
        *("gpt_neox", "granite", "granitemoe", "granitemoeshared"),
        *("helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "internlm3", "jais2", "llama"),
        *("minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "nanochat"),
        *("olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
        *("qwen3", "qwen3_moe"),
        *("seed_oss", "smollm3", "solar_open", "starcoder2", "youtu"),
    }
)
"""Values of `model_type` whose attention uses transformers' AttentionInterface and its keyword arguments."""
CACHE_TYPES = frozenset({"gptj", "codegen"})
"""Models with custom attention code but an ordinary cache."""
OWN_ATTENTION = "sdpa"
"""The value of `model.attention` that stands for the attention of `tree`."""


def plan_shared_prefixes(
    workers: Sequence[WorkerPlan], facts: Facts, attention: str, longest: int = 0
) -> tuple[tuple[WorkerPlan, ...], tuple[str, ...]]:
    """The workers with the way in which each shares prefixes, and notes on those that do not; PlanError for
    combinations that cannot work. `attention`: `model.attention`. `longest`: the most tokens of a row; 0: unknown. The
    engine checks the choice against the loaded model before the first step.
    """
    planned, notes = [], []
    for plan in workers:
        shape = facts.model_of(plan.request).shape
        if plan.request.shared_prefix == "planned":
            way, why_not = _choose(plan, shape, attention, longest)
        else:
            way, why_not = _named(plan, shape, attention, longest), ""
        planned.append(replace(plan, shared_prefix=way))
        if why_not:
            notes.append(f"{plan.request.role.name}: prompts are computed once for each sample, because {why_not}")
    return tuple(planned), tuple(notes)


def most_tokens(config: RunConfig) -> int:
    """The most tokens of a row; 0 if an agent of a plugin decides, whose rows may have several turns."""
    return longest_row(config) if config.rollout.agent == RunConfig().rollout.agent else 0


def _named(plan: WorkerPlan, shape: ModelShape | None, attention: str, longest: int) -> SharedPrefix:
    """The way that the settings name; PlanError if it would change gradients or lose them."""
    way = SharedPrefix(plan.request.shared_prefix)
    name = plan.request.settings or plan.request.role.name
    if way is SharedPrefix.CACHE and _checkpoints(plan):
        raise PlanError(
            f"{name}.shared_prefix=cache: with {name}.gradient_checkpointing=true transformers drops the cache; "
            "choose tree or none, or gradient_checkpointing=false"
        )
    # a cache drops what a window has left behind, so it needs models without a window
    seen = 0 if way is SharedPrefix.CACHE else longest
    if way is not SharedPrefix.NONE and shape is not None and not shape.sees_all(seen):
        shorter = way is SharedPrefix.TREE and shape.full_in_window and longest
        raise PlanError(
            f"{name}.shared_prefix={way}: {_partial(shape, seen)}, and a shared prompt is computed as if it did; "
            f"choose {name}.shared_prefix=none{' or fewer tokens' if shorter else ''}"
        )
    if way is SharedPrefix.TREE and attention != OWN_ATTENTION:
        can_change = shape is None or shape.model_type not in EAGER_TYPES
        raise PlanError(
            f"{name}.shared_prefix=tree: it brings its own attention, which would replace model.attention={attention}; "
            f"choose {name}.shared_prefix=cache or none{f', or model.attention={OWN_ATTENTION}' if can_change else ''}"
        )
    if way is SharedPrefix.TREE and (why_not := _no_kernel(plan)):
        raise PlanError(
            f"{name}.shared_prefix=tree: {why_not}; choose {name}.shared_prefix=cache or none, or {name}.dtype=bfloat16"
        )
    return way


def _choose(plan: WorkerPlan, shape: ModelShape | None, attention: str, longest: int) -> tuple[SharedPrefix, str]:
    """The planner's choice, and the reason if it is `none`."""
    if shape is None:
        return SharedPrefix.NONE, "the architecture of its model is not known"
    if not shape.sees_all(longest):
        return SharedPrefix.NONE, _partial(shape, longest)
    if shape.model_type in TREE_TYPES and attention == OWN_ATTENTION:
        why_not = _no_kernel(plan)
        return (SharedPrefix.NONE, why_not) if why_not else (SharedPrefix.TREE, "")
    if shape.model_type in TREE_TYPES:
        return SharedPrefix.NONE, f"sharing them takes model.attention={OWN_ATTENTION}, and it is {attention}"
    if shape.model_type in CACHE_TYPES and shape.full_attention and not _checkpoints(plan):
        return SharedPrefix.CACHE, ""
    return SharedPrefix.NONE, f"'{shape.model_type}' is not known to share them (shared_prefix=tree or cache tries it)"


def _checkpoints(plan: WorkerPlan) -> bool:
    return plan.request.engine is not None and plan.request.engine.gradient_checkpointing


def _no_kernel(plan: WorkerPlan) -> str:
    """Reason why the attention of `tree` does not support the role's dtype; empty if it does."""
    engine = plan.request.engine
    if not plan.request.gpus or engine is None or engine.is_half:
        return ""
    return f"flash attention of GPUs computes in half precision, and its dtype is {engine.dtype}"


def _partial(shape: ModelShape, longest: int) -> str:
    found = f"not every layer of '{shape.model_type}' sees all tokens before"
    if not shape.full_in_window or not longest:
        return found
    return (
        f"{found}: its sliding window has {shape.window} tokens, and a row has up to {longest} "
        "(data.max_prompt_tokens + rollout.max_tokens)"
    )
