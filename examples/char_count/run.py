"""The whole recipe: data, warm-up, GRPO and PPO from the same start, and their curves side by side.

    python examples/char_count/run.py [--out docs/results/char_count] [OVERRIDE...]
    python examples/char_count/run.py --full --device cuda --out docs/results/char_count_full

Without --full: words of 3 to 5 letters, for a CPU. Every step is a process whose command is printed; one that
is already done below --dir is not repeated. Curves are the greedy accuracy on held-out words; step 0 is the model after
the warm-up. They are written to OUT.json and OUT.md; further arguments are overrides of both runs.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from curves import Run, compared, end, ending_first, facts, sentence, table, trained, write  # noqa: E402

MODEL = ".models/smollm2-135m-instruct"
BAR = 0.30
"""The score that the full recipe should reach; the published result of GRPO is about 0.36."""
TITLES = {"grpo": "GRPO", "ppo": "PPO"}


@dataclass(frozen=True)
class Recipe:
    """A size of the task."""

    title: str
    data: str
    """Directory of the data."""
    sft: str
    """Directory of the warm-up's model."""
    data_arguments: tuple[str, ...]
    sft_arguments: tuple[str, ...]
    files: tuple[Path, ...]
    ppo: tuple[str, ...]
    """Settings that PPO needs in addition to the files."""


PPO = ("--plugin", "critic_engine", "algo.preset=ppo")
FULL = Recipe(
    "words of 5 to 20 letters",
    "data",
    "sft",
    (),
    ("--dtype", "bfloat16", "--micro-batch-tokens", "32768"),
    (HERE / "config.yaml",),
    PPO,
)
SMALL = Recipe(
    "words of 3 to 5 letters",
    "small",
    "small_sft",
    ("--shortest", "3", "--longest", "5", "--items", "4000"),
    ("--batch", "8", "--lr", "5e-5", "--max-updates", "24", "--micro-batch-tokens", "1024"),
    (HERE / "config.yaml", HERE / "small.yaml"),
    (*PPO, "plugins.critic_engine.lr=1e-4"),
)


def printed(command: Sequence[str]) -> str:
    """The command's output, shown as it comes; SystemExit when it fails."""
    print("$", shlex.join(command), file=sys.stderr, flush=True)
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ending_first(process):
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line)
    if process.returncode:
        sys.exit(f"char_count: {shlex.join(command)} ended with {process.returncode}")
    return "".join(lines)


def warmed_up(recipe: Recipe, directory: Path, model: str, device: str, updates: int) -> dict[str, Any]:
    """Make data and warm-up unless they exist. Returns the losses that the warm-up printed."""
    data, target = directory / recipe.data, directory / recipe.sft
    if not (data / "heldout.jsonl").exists():
        printed([sys.executable, str(HERE / "make_data.py"), str(data), *recipe.data_arguments])
    command = [str(HERE / "sft.py"), model, str(data), str(target), *recipe.sft_arguments, "--device", device]
    if updates:
        command += ["--max-updates", str(updates)]
    done = target / "done.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        if found["command"] != command[1:]:
            sys.exit(f"{target} was made by another command, {found['command']}; remove it")
        return found
    output = printed([sys.executable, *command])
    steps = re.findall(r"^update \d+/\d+  loss (\S+)  (\d+) s$", output, re.MULTILINE)
    found = {"command": command[1:], "losses": [float(loss) for loss, _ in steps], "seconds": int(steps[-1][1])}
    done.write_text(json.dumps(found))
    return found


def constant_guess(directory: Path) -> tuple[float, int]:
    """The accuracy of always giving the most frequent answer of the words that a run evaluates, and their number."""
    first = min(directory.glob("trajectories/step_*.jsonl"))
    samples = [json.loads(line) for line in first.read_text().splitlines()]
    answers = Counter(sample["answer"] for sample in samples if sample["lane"] == "eval")
    return max(answers.values()) / answers.total(), answers.total()


def report(recipe: Recipe, record: dict[str, Any]) -> list[str]:
    """The result as Markdown."""
    runs: dict[str, list[Run]] = record["runs"]
    losses, num = record["sft"]["losses"], len(record["runs"]["grpo"])
    lines = [f"# char_count, {recipe.title}", ""]
    lines.append(
        f"Made by `examples/char_count/run.py`, commit {record['commit']}, {record['machine']}, {num} "
        f"seed{'s' if num > 1 else ''}. {len(losses)} updates of warm-up ({record['sft']['seconds']} s): the loss per "
        f"token fell from {losses[0]:.2f} to {losses[-1]:.2f}."
    )
    if recipe is SMALL:
        lines += ["", "![Held-out accuracy by step](char_count.svg)", ""]
    lines += ["Held-out accuracy (greedy), mean over seeds; step 0 is the model after the warm-up:", ""]
    lines += [*table(runs, TITLES), ""]
    guess, words = record["constant_guess"], record["num_evaluated"]
    more = ", ".join(f"{TITLES[name]} {(end(found) - guess) * words:+.1f}" for name, found in runs.items())
    lines.append(f"Always giving the most frequent answer of these {words} words is right {guess:.3f} of the time.")
    lines += [f"Words that are right at the end in addition to that: {more}.", ""]
    lines.append(sentence("PPO - GRPO", record["verdict"]))
    if recipe is FULL:
        reached = ", ".join(f"{TITLES[name]} {end(found):.3f}" for name, found in runs.items())
        lines += ["", f"At the end: {reached}; the bar is {BAR:.2f}, the published GRPO result about 0.36."]
    return lines


def main() -> None:
    """Run the missing parts and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="words of 5 to 20 letters: for a GPU")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default=MODEL, help="model directory or hub name")
    parser.add_argument("--dir", type=Path, default=Path("runs") / "char_count", help="where everything is kept")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sft-updates", type=int, default=0, help="of the warm-up; 0: as many as the recipe says")
    parser.add_argument("overrides", nargs="*", help="overrides of both runs")
    options = parser.parse_args()
    recipe = FULL if options.full else SMALL
    sft = warmed_up(recipe, options.dir, options.model, options.device, options.sft_updates)
    data = options.dir / recipe.data
    common = [
        f"model.path={options.dir / recipe.sft / 'model'}",
        f"data.sources.train.path={data / 'train.jsonl'}",
        f"eval.sources.heldout.path={data / 'heldout.jsonl'}",
        f"cluster.device={options.device}",
        *options.overrides,
    ]
    runs: dict[str, list[Run]] = {name: [] for name in TITLES}
    for seed in range(options.seeds):
        for name, found in runs.items():
            settings = [*(recipe.ppo if name == "ppo" else ()), *common, f"train.seed={seed}"]
            directory = options.dir / f"{recipe.sft.removesuffix('sft')}{name}_{seed}"
            found.append(trained(directory, recipe.files, settings, f"{TITLES[name]}, seed {seed}"))
    guess, num_evaluated = constant_guess(options.dir / f"{recipe.sft.removesuffix('sft')}grpo_0")
    record = {
        "recipe": recipe.title,
        "runs": runs,
        "verdict": compared(runs["ppo"], runs["grpo"]),
        "ends": {name: end(found) for name, found in runs.items()},
        "sft": sft,
        "constant_guess": guess,
        "num_evaluated": num_evaluated,
        "overrides": options.overrides,
        **facts(),
    }
    print(json.dumps({"name": "char_count", **{key: record[key] for key in ("recipe", "ends", "verdict", "commit")}}))
    if options.out:
        write(options.out, record, report(recipe, record))


if __name__ == "__main__":
    main()
