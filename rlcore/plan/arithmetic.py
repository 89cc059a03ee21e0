"""Numbers that follow from the configuration: what a step consists of, and the memory it takes at least."""

from collections.abc import Mapping, Sequence

from rlcore.config import RunConfig
from rlcore.errors import PlanError
from rlcore.plan.types import Facts, WorkerPlan


def batch_arithmetic(config: RunConfig) -> dict[str, int]:
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


def memory_estimate(workers: Sequence[WorkerPlan], facts: Facts) -> dict[str, int]:
    """Bytes of one rank of each role, activations left out; empty when the number of parameters is not known.

    A role served inside another has no memory of its own.
    """
    if facts.parameters is None:
        return {}
    return {
        plan.request.role.name: int(plan.request.bytes_per_parameter * facts.parameters)
        for plan in workers
        if plan.request.inside is None and plan.request.bytes_per_parameter > 0
    }


def check_memory(workers: Sequence[WorkerPlan], memory: Mapping[str, int], facts: Facts) -> None:
    """PlanError when the estimate, which is a lower bound, exceeds what there is."""
    on_host = 0
    parts = []
    for plan in workers:
        request, size = plan.request, memory.get(plan.request.role.name, 0)
        if request.gpus and facts.gpu_memory_bytes is not None and size > facts.gpu_memory_bytes:
            raise PlanError(
                f"role '{request.role.name}' needs at least {_gib(size)} GiB a rank, "
                f"a device has {_gib(facts.gpu_memory_bytes)}; needs a smaller model, a smaller dtype or LoRA"
            )
        if size and not request.gpus:
            on_host += size * request.replicas * request.ranks
            parts.append(f"{request.role.name} {_gib(size * request.replicas * request.ranks)}")
    if facts.memory_bytes is not None and on_host > facts.memory_bytes:
        raise PlanError(
            f"memory: the run needs at least {_gib(on_host)} GiB ({', '.join(parts)}), the machine has "
            f"{_gib(facts.memory_bytes)}; needs a smaller model, a smaller dtype or LoRA"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
