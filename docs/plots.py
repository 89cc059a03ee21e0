"""Draws the pictures of docs/results from the JSON files there: `make plots`.

    python docs/plots.py [--check]

Writes docs/results/<name>.svg; with --check it compares instead, and its exit code is 1 if a picture is not that of its
results. The same results give the same bytes.
"""

import io
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "rlcore",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "legend.frameon": False,
    }
)
from matplotlib import pyplot as plt  # noqa: E402 - the backend comes first

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = ("#3f51b5", "#e07b39", "#7a7a7a", "#2e8b57")

PPO = {"grpo": "GRPO", "ppo": "PPO", "permuted": "rewards permuted"}
TURNS = {"turns": "credit for each turn", "sum": "one reward for all turns"}
DISTILLED = {"distilled": "distillation", "grpo": "GRPO"}
LATE = {"synchronous": "synchronous", "one_step_off": "one step off-policy"}

Curves = Mapping[str, Sequence[Mapping[int, float]]]
"""By label, the curve of each seed: step to value."""


def main(check: bool) -> int:
    """Write every picture, or compare it with the file; 1 if one differs."""
    pictures = {
        "vs_trl_learning": drawn("Held-out reward, five seeds", _learning_of_both()),
        "precision": drawn("Training reward of the demo's task", _precision()),
        "ppo_critic": drawn("Held-out accuracy, three seeds", _runs("ppo_critic", PPO)),
        "tool_agent": drawn("Held-out success of a tool agent", _agent("tool_agent")),
        "openai_agent": drawn("Held-out success of an agent with the openai client", _agent("openai_agent")),
        "words_by_turn": drawn("Held-out answers, two seeds", _runs("words_by_turn", TURNS)),
        "distillation": drawn("Held-out sums, two seeds", _runs("distillation", DISTILLED)),
        "char_count": drawn(
            "Held-out accuracy, words of 3 to 5 letters", _runs("char_count", {"grpo": "GRPO", "ppo": "PPO"})
        ),
        "slow_reward": drawn("Held-out accuracy, three seeds", _runs("slow_reward", LATE)),
        "learning_controls": drawn("Held-out reward, five seeds", _tiny_task("learning_controls", CONTROLS)),
        "several_rewards": drawn("Held-out reward, five seeds", _tiny_task("several_rewards", SEVERAL)),
    }
    files = {RESULTS / f"{name}.svg": picture for name, picture in pictures.items()}
    if not check:
        for file, picture in files.items():
            file.write_bytes(picture)
        return 0
    stale = [file.name for file, picture in files.items() if not file.exists() or file.read_bytes() != picture]
    if stale:
        print(f"plots: {', '.join(stale)} differ from their results; make plots", file=sys.stderr)
    return 1 if stale else 0


def drawn(title: str, curves: Curves) -> bytes:
    """A picture of the means, with the band between the lowest and the highest seed."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for colour, (label, seeds) in zip(COLOURS, curves.items(), strict=False):
        steps = sorted(set.intersection(*(set(curve) for curve in seeds)))
        values = [[curve[step] for curve in seeds] for step in steps]
        axes.plot(steps, [statistics.mean(row) for row in values], color=colour, label=label, linewidth=2)
        if len(seeds) > 1:
            axes.fill_between(
                steps, [min(row) for row in values], [max(row) for row in values], color=colour, alpha=0.15
            )
    axes.set(title=title, xlabel="step", ylim=(0, None))
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, metadata={"Date": None})
    plt.close(figure)
    return picture.getvalue()


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def _learning_of_both() -> Curves:
    result = _read("vs_trl_learning")
    every = result["task"]["every"]
    titles = {"ours": "rlcore", "trl": "TRL 1.16", "control": "rewards permuted"}
    return {
        title: [{every * place: value for place, value in enumerate(seed)} for seed in result["curves"][key]]
        for key, title in titles.items()
    }


def _precision() -> Curves:
    curves = _read("precision")["curves"]["sums"]
    return {
        label: [dict(enumerate(seed["reward"], start=1)) for seed in seeds.values()] for label, seeds in curves.items()
    }


def _runs(name: str, titles: Mapping[str, str]) -> Curves:
    """The curves of the runs that `titles` names; results of `examples/curves.py` have them by step."""
    runs = _read(name)["runs"]
    return {
        title: [{int(step): value for step, value in run["curve"].items()} for run in runs[key]]
        for key, title in titles.items()
    }


CONTROLS = {"grpo": "GRPO", "ppo": "PPO", "ppo_frozen": "PPO, critic frozen", "four_late": "GRPO, at most 4 late"}
SEVERAL = {"alone": "GRPO, the task's reward alone", "gdpo": "gdpo, two rewards", "sum": "GRPO, their sum"}


def _tiny_task(name: str, titles: Mapping[str, str]) -> Curves:
    result = _read(name)
    every = result["task"]["every"]
    return {
        title: [{every * place: value for place, value in enumerate(seed)} for seed in result["curves"][key]]
        for key, title in titles.items()
    }


def _agent(name: str) -> Curves:
    rows = _read(name)["steps"]
    return {"held out": [{row["step"]: row["heldout"] for row in rows if "heldout" in row}]}


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
