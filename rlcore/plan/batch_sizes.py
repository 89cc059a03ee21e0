"""Batch arithmetic: the prompts, samples, mini-batches and updates of a step."""

from rlcore.config import RunConfig
from rlcore.errors import PlanError


def batch_sizes(config: RunConfig) -> dict[str, int]:
    """Prompts, samples, mini-batches and updates of a step; PlanError for numbers that do not divide or fit."""
    prompts = config.train.prompts_per_step
    per_prompt = config.rollout.samples_per_prompt
    epochs = config.actor.epochs
    size = config.actor.minibatch_prompts or prompts
    if size > prompts:
        raise PlanError(
            f"actor.minibatch_prompts={size}: a step has train.prompts_per_step={prompts}; needs 1 to {prompts}, "
            f"or 0 for all of them"
        )
    if prompts % size:
        divisors = ", ".join(str(n) for n in range(1, prompts + 1) if prompts % n == 0)
        raise PlanError(
            f"actor.minibatch_prompts={size} does not divide train.prompts_per_step={prompts}; choose from: {divisors}"
        )
    minibatches = prompts // size
    return {
        "prompts": prompts,
        "samples_per_prompt": per_prompt,
        "samples": prompts * per_prompt,
        "minibatch_prompts": size,
        "minibatch_samples": size * per_prompt,
        "minibatches": minibatches,
        "epochs": epochs,
        "updates": minibatches * epochs,
    }
