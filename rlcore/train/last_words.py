"""The messages with which a run ends, well or by an error."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlcore.config import TrainConfig
from rlcore.errors import counted
from rlcore.train.result import TrainResult


def summary(result: TrainResult, began_after: int, train: TrainConfig) -> Iterator[str]:
    """The number of steps, the directory, and the change of each held-out reward.

    `began_after`: the step after which this process began. A resumed run may have no step left.
    """
    steps, place = result.steps, f"everything is in {result.run_dir}"
    if steps > began_after:
        yield f"trained {counted(steps, 'step')}; {place}"
    elif result.stopped:
        yield f"no step was taken: the run had ended after step {steps} already; {place}"
    else:
        key = "train.max_steps" if train.max_steps else "train.epochs"
        yield f"no step was taken: all {steps} steps had been taken already; for more of them raise {key}; {place}"
    if len(result.evaluations) > 1:
        (first, before), (last, after) = result.evaluations[0], result.evaluations[-1]
        for name in sorted(name for name in after if name.endswith("/mean")):
            source = name.removeprefix("eval/").removesuffix("/mean")
            if name in before:
                yield f"held-out '{source}': {before[name]:.3f} at step {first} -> {after[name]:.3f} at step {last}"


def never_updated(engine: str, allowed: Mapping[bool, int]) -> Iterator[str]:
    """A line if the critic let the actor update on none of this process's mini-batches, which `allowed` counts."""
    if allowed.get(False) and not allowed.get(True):
        yield (
            f"the policy has not changed: critic.engine={engine} kept the actor from all {allowed[False]} updates, "
            "because its actor_may_update() was never True; shorten the critic's warm-up, or train for more steps"
        )


def way_on(last: Path, took_steps: bool) -> str:
    """The advice after an error of a run whose newest checkpoint is `last`.

    A resume that failed before its first step would fail in the same way again.
    """
    if took_steps:
        return f"last checkpoint: {last}, continue with --resume"
    return f"no step was taken after the last checkpoint, {last}; correct the cause, then continue with --resume"


def how_to_load(path: Path) -> list[str]:
    """Programs that open the model of a checkpoint; empty where it is not one of transformers.

    Such a model has weights in safetensors. Engines of other models may write a config.json, too.
    """
    if (path / "model" / "config.json").is_file() and any((path / "model").glob("*.safetensors")):
        return [f'load it with: AutoModelForCausalLM.from_pretrained("{path / "model"}")']
    if (path / "adapter").is_dir():
        return [
            f"write the whole model with: rlcore export {path} DIRECTORY",
            f'load the adapter with: peft.AutoPeftModelForCausalLM.from_pretrained("{path / "adapter"}")',
        ]
    return []
