"""Notes of a plan on settings that make learning slow."""

from collections.abc import Mapping

from rlcore_view.update_rules import SMALL_WEIGHT, half_a_step

from rlcore.config import RunConfig
from rlcore.plan.machine_facts import Facts

FITTING_TOKENS: Mapping[str, int] = {"instruct": 512, "thinking": 4096}
"""Tokens that fit most answers, by the result of `rlcore.contracts.model_files.usual_answers`."""


def learning_notes(config: RunConfig, facts: Facts) -> list[str]:
    """Notes on a token budget that truncates answers, on betas of AdamW with which updates grow, and on two effects of
    rounding: a learning rate that half precision rounds away, and recorded log-probs that are not the trainer's."""
    return [*_budget_notes(config, facts), *_betas_notes(config), *_rounding_notes(config), *_behaviour_notes(config)]


def _budget_notes(config: RunConfig, facts: Facts) -> list[str]:
    fitting, budget = FITTING_TOKENS.get(facts.answers, 0), config.rollout.max_tokens
    if budget >= fitting:
        return []
    return [
        f"rollout.max_tokens={budget}: by its chat template model.path is {_kind(facts.answers)}, whose answers often "
        f"take up to {fitting} tokens; one that is cut off usually scores 0: raise it unless prompts ask for short ones"
    ]


def _kind(answers: str) -> str:
    return "a thinking model" if answers == "thinking" else "an instruct model"


def _betas_notes(config: RunConfig) -> list[str]:
    actor = config.actor
    # A step without a gradient multiplies an update, m / sqrt(v), by beta1 / sqrt(beta2).
    if actor.beta1**2 <= actor.beta2 + 1e-6:
        return []
    return [
        f"actor.beta2={actor.beta2:g} with actor.beta1={actor.beta1:g}: in steps without a gradient, such as those "
        "whose rewards are all equal, updates grow instead of fading, until they destroy the weights; choose "
        f"actor.beta2 of at least beta1 squared, {actor.beta1**2:g}"
    ]


def _rounding_notes(config: RunConfig) -> list[str]:
    actor, lost = config.actor, half_a_step(config.actor.dtype)
    if actor.rounding != "nearest" or lost is None or actor.lr >= lost:
        return []
    return [
        f"actor.lr={actor.lr:g} with actor.dtype={actor.dtype} and actor.rounding=nearest: an update moves a weight of "
        f"{SMALL_WEIGHT:g} by less than the {lost:.1g} that is rounded away; choose actor.rounding=stochastic"
    ]


def _behaviour_notes(config: RunConfig) -> list[str]:
    actor, algo = config.actor, config.algo
    if config.schedule.old_logprobs != "behaviour" or actor.repeats_logprobs:
        return []
    setting = f"actor.dtype={actor.dtype}" if actor.is_half else "actor.tf32=true"
    bounds = (
        f"; algo.policy_loss=gspo clips at 1 - {algo.clip_low:g} and 1 + {algo.clip_high:g}, and rounding alone may "
        "move most sequences beyond that"
        if algo.policy_loss == "gspo"
        else ""
    )
    return [
        f"schedule.old_logprobs=behaviour with {setting}: the sampler's log-probs differ from the trainer's by "
        f"rounding, so ratios are not 1 before the first update{bounds}; choose schedule.old_logprobs=recompute"
    ]
