"""How each role that computes log-probs or values shares the prompt of a group among its samples."""

from collections.abc import Sequence
from dataclasses import replace

from rlcore.errors import PlanError
from rlcore.plan.types import Facts, ModelShape, WorkerPlan
from rlcore.types import SharedPrefix

TREE_TYPES = frozenset(
    [
        "apertus",
        "arcee",
        "cohere",
        "ernie4_5",
        "exaone4",
        "gemma",
        "glm",
        "glm4",
        "gpt2",
        "gpt_neox",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "llama",
        "mistral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    ]
)
"""Values of `model_type` whose attention goes through transformers' AttentionInterface, with its keyword arguments."""
CACHE_TYPES = frozenset({"gptj", "codegen"})
"""Those with attention code of their own, but an ordinary cache."""


def plan_shared_prefixes(workers: Sequence[WorkerPlan], facts: Facts) -> tuple[tuple[WorkerPlan, ...], tuple[str, ...]]:
    """The workers with the way each shares prefixes, and notes on those that do not; PlanError for a pair that cannot
    work. The engine checks the choice against the loaded model before the first step."""
    planned, notes = [], []
    for plan in workers:
        way, why_not = _choose(plan, facts.shape)
        planned.append(replace(plan, shared_prefix=way))
        if why_not:
            notes.append(f"{plan.request.role.name}: prompts are computed once for each sample, because {why_not}")
    return tuple(planned), tuple(notes)


def _choose(plan: WorkerPlan, shape: ModelShape | None) -> tuple[SharedPrefix, str]:
    """The way, and why it is none although the settings left it to the planner."""
    request, engine = plan.request, plan.request.engine
    checkpointing = engine is not None and engine.gradient_checkpointing
    if request.shared_prefix != "planned":
        way = SharedPrefix(request.shared_prefix)
        if way is SharedPrefix.CACHE and checkpointing:
            name = request.role.name
            raise PlanError(
                f"{name}.shared_prefix=cache: with {name}.gradient_checkpointing=true transformers drops the cache; "
                "choose tree or none, or gradient_checkpointing=false"
            )
        return way, ""
    if shape is None:
        return SharedPrefix.NONE, "the architecture of its model is not known"
    if not shape.full_attention:
        return SharedPrefix.NONE, f"not every layer of '{shape.model_type}' sees all tokens before"
    if shape.model_type in TREE_TYPES:
        return SharedPrefix.TREE, ""
    if shape.model_type in CACHE_TYPES and not checkpointing:
        return SharedPrefix.CACHE, ""
    return SharedPrefix.NONE, f"'{shape.model_type}' is not known to share them (shared_prefix=tree or cache tries it)"
