"""The learning curve of an agent example: trains it unless done, then writes the curve as JSON and Markdown.

    python examples/agent_curve.py EXAMPLE --out docs/results/EXAMPLE [--run runs/NAME] [OVERRIDE...]

EXAMPLE is tool_agent or openai_agent. Held-out success by step with the minutes of wall time since the first evaluation
ended, what the agent did and the training reward by step, and one conversation of the last step. Prints one JSON line.
The run is in `runs/agent_curve/EXAMPLE`. A complete run there is read, not repeated; --run reads one from elsewhere.
Further arguments are overrides of the run.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from curves import facts, trained, write  # noqa: E402

RUNS_DIR = Path("runs") / "agent_curve"
RISE, MINUTES = 0.3, 15.0
"""The target: held-out success rises by RISE within MINUTES."""
EXAMPLES: dict[str, tuple[str, dict[str, str]]] = {
    "tool_agent": ("The tool agent", {"calls": "agent/num_tool_calls", "errors": "agent/num_tool_errors"}),
    "openai_agent": ("The agent with the `openai` client", {"turns": "agent/turns_mean"}),
}
"""Title of each example, and metrics of its agent by column heading."""
RESULT = {"heldout": "eval/heldout/mean", "reward": "reward/mean"}
FORMS = {"heldout": ".3f", "reward": ".3f", "calls": ".0f", "errors": ".0f", "turns": ".2f"}
"""Of what is not a time."""
HEADINGS = {"heldout": "held out", "step_s": "step s"}


def rows_of(run: Path, columns: Mapping[str, str]) -> list[dict[str, Any]]:
    """By step: the measured `columns`, and the minutes since the first row."""
    found: dict[int, dict[str, Any]] = {}
    began = None
    for line in (run / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        began = logged["time/unix_s"] if began is None else began
        row = found.setdefault(logged["step"], {"step": logged["step"]})
        row["minutes"] = (logged["time/unix_s"] - began) / 60
        row |= {name: logged[key] for name, key in columns.items() if key in logged}
    return [found[step] for step in sorted(found)]


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """From the first to the last held-out success; SystemExit when there are not two."""
    measured = [row for row in rows if "heldout" in row]
    if len(measured) < 2:
        sys.exit(f"curve: {len(measured)} held-out evaluations; needs one before and one after training")
    first, last = measured[0], measured[-1]
    rise, minutes = last["heldout"] - first["heldout"], last["minutes"]
    passed = rise >= RISE and minutes <= MINUTES
    return {"first": first["heldout"], "last": last["heldout"], "rise": rise, "minutes": minutes, "passed": passed}


def conversation(run: Path) -> list[str]:
    """The last training conversation in which the policy got an answer, as lines."""
    for file in sorted((run / "trajectories").iterdir(), reverse=True):
        for line in reversed(file.read_text().splitlines()):
            sample = json.loads(line)
            messages = sample["completion"] if isinstance(sample["completion"], list) else []
            if sample["lane"] == "train" and any(line["role"] != "assistant" for line in messages):
                return [f"{message['role']}: {message['content']}" for message in [*sample["prompt"], *messages]]
    return []


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """Lines of Markdown, a row for each step."""
    names = ["minutes", *columns]
    lines = [f"| step | {' | '.join(HEADINGS.get(name, name) for name in names)} |", f"|---|{'---|' * len(names)}"]
    for row in rows:
        cells = [format(row[name], FORMS.get(name, ".1f")) if name in row else "" for name in names]
        lines.append(f"| {' | '.join([str(row['step']), *cells])} |")
    return lines


def lines_of(name: str, lines: Sequence[str], found: Mapping[str, Any], excerpt: Sequence[str]) -> list[str]:
    """The result of an example as Markdown: `lines` is the table, `excerpt` a conversation."""
    shown = ["", "A conversation near the end of training:", "", "```", *excerpt, "```"] if excerpt else []
    return [
        f"# {EXAMPLES[name][0]}",
        "",
        f"Made by `examples/agent_curve.py`, commit {found['commit']}, {found['machine']}, one run"
        f"{''.join(f', {override}' for override in found['overrides'])}.",
        "",
        f"Held-out success: **{found['first']:.3f} before, {found['last']:.3f} after**, {found['rise']:+.3f} in "
        f"{found['minutes']:.1f} minutes, evaluations between included. Required: +{RISE} in {MINUTES:g} minutes.",
        "",
        f"![Held-out success by step]({name}.svg)",
        "",
        *lines,
        *shown,
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, read the run, write the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(EXAMPLES))
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    parser.add_argument("--run", type=Path, help="directory of a run that has ended")
    parser.add_argument("overrides", nargs="*", help="overrides of the run")
    options = parser.parse_intermixed_args(arguments)  # overrides may be behind options, as make puts them
    title, did = EXAMPLES[options.example]
    made = facts()  # taken before training; others may commit meanwhile
    if options.run is None:
        settings = ["--plugin", "agent_loop", *options.overrides]
        trained(RUNS_DIR / options.example, [HERE / options.example / "config.yaml"], settings, title)
    run = options.run or RUNS_DIR / options.example
    columns = {**RESULT, **did, "step_s": "time/step_s"}
    rows = rows_of(run, columns)
    found = {**verdict(rows), **made, "overrides": options.overrides}
    print(json.dumps({"name": options.example, **found}))
    if options.out:
        record = {"steps": rows, **found}
        write(options.out, record, lines_of(options.example, table(rows, list(columns)), found, conversation(run)))


if __name__ == "__main__":
    main()
