"""Does PPO reach what GRPO reaches? Runs both, a control that must not pass for equal, and PPO with an idle critic.

    python examples/ppo_critic/compare.py [--out docs/results/ppo_critic] [--seeds 3] [OVERRIDE...]

Every run has the prompts, the number of samples and the seeds of `config.yaml`. What is compared is the area under the
curve of held-out accuracy, seed by seed: equal within noise is a mean difference of at most 0.05, whose 95 % interval
is printed. The control is PPO whose rewards are dealt out at random within the batch: it must not learn. PPO with its
critic frozen at 0 (its learning rate is 0, and the head starts there) shows what the critic is worth on this task:
whitened advantages and rewards that start near 0 leave little for it to do. It decides nothing. Curves, areas and
verdicts are written to OUT.json and OUT.md; further arguments are overrides of every run. Runs lie below
`runs/ppo_critic/`, and one that is there already and complete is read, not repeated.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from curves import Run, arguments, compared, end, facts, sentence, table, trained, write  # noqa: E402

RUNS_DIR = Path("runs") / "ppo_critic"
SATURATED = 0.95
"""A task that both solve at the end tells little: then the verdict says so."""

INDISTINGUISHABLE = (
    "PPO with its critic frozen at 0 was meant to be a negative control, and it passes: this task does not tell a "
    "critic that learns from one that does nothing, so what is shown here is that PPO trains as well as GRPO does, and "
    "not that its critic helps. That the critic's values and gradients are right is shown by the plugin's tests."
)
ELSEWHERE = (
    "A task on which a frozen critic fails, and late samples with the ratio forced to 1: "
    "[learning_controls.md](learning_controls.md)."
)
CRITIC_LR = 1e-4
PPO = ("--plugin", "critic_engine", "algo.preset=ppo")
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("algo.preset=grpo",),
    "ppo": (*PPO, f"plugins.critic_engine.lr={CRITIC_LR}"),
    "frozen": (*PPO, "plugins.critic_engine.lr=0"),
    "permuted": (
        *PPO,
        f"plugins.critic_engine.lr={CRITIC_LR}",
        f"reward.functions.accuracy.fn={HERE / 'permuted.py'}:permuted",
        "reward.functions.accuracy.scope=batch",
        "reward.canary=",
    ),
}
TITLES = {"grpo": "GRPO", "ppo": "PPO", "frozen": "PPO, critic frozen at 0", "permuted": "PPO, rewards permuted"}


def judged(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Each against GRPO. Passed: PPO is within noise, the control is not, and the task is not saturated."""
    verdicts = {name: compared(runs[name], runs["grpo"]) for name in RUNS if name != "grpo"}
    ends = {name: end(found) for name, found in runs.items()}
    saturated = min(ends["grpo"], ends["ppo"]) > SATURATED
    passed = verdicts["ppo"]["within_noise"] and not verdicts["permuted"]["within_noise"] and not saturated
    return {"verdicts": verdicts, "ends": ends, "saturated": saturated, "passed": passed}


def report(runs: dict[str, list[Run]], judgement: dict[str, Any], made: dict[str, str]) -> list[str]:
    """The result as Markdown."""
    lines = ["# PPO compared with GRPO", ""]
    lines.append(
        f"Made by `examples/ppo_critic/compare.py`, commit {made['commit']}, {made['machine']}, "
        f"{len(runs['grpo'])} seeds."
    )
    lines += ["", "![Held-out accuracy by step](ppo_critic.svg)", ""]
    lines += ["Held-out accuracy (greedy), mean over seeds:", "", *table(runs, TITLES)]
    for name, verdict in judgement["verdicts"].items():
        lines += ["", sentence(f"{TITLES[name]} - GRPO", verdict)]
    if judgement["verdicts"]["frozen"]["within_noise"]:
        lines += ["", INDISTINGUISHABLE]
    lines += ["", ELSEWHERE]
    if judgement["saturated"]:
        lines += ["", f"Both end above {SATURATED}: the task is saturated, and the end of the curves tells little."]
    return lines


def run(name: str, seed: int, overrides: Sequence[str]) -> Run:
    """One of the runs, trained unless done."""
    settings = [*RUNS[name], *overrides, f"train.seed={seed}"]
    return trained(RUNS_DIR / f"{name}_{seed}", [HERE / "config.yaml"], settings, f"{TITLES[name]}, seed {seed}")


def main() -> None:
    """Run the missing ones, compare, print one JSON line."""
    options = arguments(__doc__).parse_args()
    runs = {name: [run(name, seed, options.overrides) for seed in range(options.seeds)] for name in RUNS}
    judgement, made = judged(runs), facts()
    print(json.dumps({"name": "ppo_critic", **judgement, **made}))
    if options.out:
        record = {"runs": runs, **judgement, **made, "overrides": options.overrides}
        write(options.out, record, report(runs, judgement, made))


if __name__ == "__main__":
    main()
