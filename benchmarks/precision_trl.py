"""TRL's side of `precision.py`: the demo's prompts, reward, learning rate and steps, in TRL's mixed precision."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from channel import Side
from measure import ROOT, TRL_PYTHON

HERE = Path(__file__).resolve().parent
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "TRL bfloat16": {"bf16": True},
    "TRL float32": {"bf16": False},
}
"""Weights and optimizer are float32 in both; bf16 is TRL's mixed precision, torch's autocast."""
ANSWER_S = 600.0


def curve_of_trl(kind: str, seed: int, directory: Path, model: Path, steps: int, prompts: int) -> dict[str, Any]:
    """Reward and entropy of each step, and the held-out reward before and after.

    The prompts are those of the demo's run with this seed, in its order.
    """
    spec = {
        **_task(seed, steps * prompts),
        **SETTINGS[kind],
        "model": str(model),
        "dtype": "float32",
        "prompts_per_step": prompts,
        "samples": 8,
        "new_tokens": 16,
        "micro_batch": 8,
        "lr": 2e-5,
        "lr_schedule": "linear",
        "threads": 1,
        "seed": seed,
        "max_steps": steps,
        "reward": "last_number",
        "greedy": True,
        "work_dir": str(directory / "work"),
    }
    with Side(kind, TRL_PYTHON, HERE / "trl_side.py", spec, threads=1) as side:
        side.answer(ANSWER_S)
        before = side.ask({"do": "evaluate"}, ANSWER_S)["reward"]
        taken = [side.ask({"do": "step"}, ANSWER_S) for _ in range(steps)]
        after = side.ask({"do": "evaluate"}, ANSWER_S)["reward"]
    return {
        "reward": [step["reward"] for step in taken],
        "entropy": [step["entropy"] for step in taken],
        "difference": [],
        "heldout": [before, after],
    }


def _task(seed: int, num_prompts: int) -> dict[str, Any]:
    """Training and held-out conversations of the demo, with their answers."""
    from rlcore.config import load_config
    from rlcore.data import load_prompts
    from rlcore.testing.prompts import seeded_prompts

    overrides = [f"train.seed={seed}"]
    config = load_config([ROOT / "examples" / "arithmetic" / "config.yaml"], overrides, []).config
    order = seeded_prompts(load_prompts(config.data.sources, config.data), {}, seed, config.data.shuffle)
    train = [prompt for prompt, _ in order.next_prompts(num_prompts)]
    heldout = load_prompts(config.eval.sources, config.data)["heldout"]
    return {
        "prompts": _conversations(train, config.data.system_prompt),
        "answers": [str(prompt.answer) for prompt in train],
        "heldout": _conversations(heldout, config.data.system_prompt),
        "heldout_answers": [str(prompt.answer) for prompt in heldout],
    }


def _conversations(prompts: Sequence[Any], system_prompt: str) -> list[list[dict[str, str]]]:
    """The messages that the policy reads: the system prompt, then the prompt's own messages."""
    system = [{"role": "system", "content": system_prompt}]
    own = [[{key: message[key] for key in ("role", "content")} for message in prompt.messages] for prompt in prompts]
    return [[*system, *messages] for messages in own]
