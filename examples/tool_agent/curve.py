"""The curve of a finished run, as JSON and Markdown.

    python examples/tool_agent/curve.py runs/NAME --out docs/results/tool_agent

Held-out success by step with the minutes of wall time since the first evaluation ended, calls of the tool and training
reward by step, and one conversation of the last step. Prints one JSON line.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from curves import facts, write  # noqa: E402

RISE, MINUTES = 0.3, 15.0
"""What is asked for: held-out success rises by so much in so many minutes."""
COLUMNS = {
    "heldout": "eval/heldout/mean",
    "reward": "reward/mean",
    "calls": "agent/num_tool_calls",
    "errors": "agent/num_tool_errors",
    "step_s": "time/step_s",
}


def rows_of(run: Path) -> list[dict[str, Any]]:
    """By step: what of `COLUMNS` was measured, and the minutes since the first row."""
    found: dict[int, dict[str, Any]] = {}
    began = None
    for line in (run / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        began = logged["time/unix_s"] if began is None else began
        row = found.setdefault(logged["step"], {"step": logged["step"]})
        row["minutes"] = (logged["time/unix_s"] - began) / 60
        row |= {name: logged[key] for name, key in COLUMNS.items() if key in logged}
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
    """The last training conversation that called the tool, in lines."""
    for file in sorted((run / "trajectories").iterdir(), reverse=True):
        for line in reversed(file.read_text().splitlines()):
            sample = json.loads(line)
            said = [*sample["prompt"], *sample["completion"]] if isinstance(sample["completion"], list) else []
            if sample["lane"] == "train" and any(each["role"] == "tool" for each in said):
                return [f"{each['role']}: {each['content']}" for each in said]
    return []


def lines_of(
    rows: Sequence[dict[str, Any]], found: dict[str, Any], told: Sequence[str], about: dict[str, str]
) -> list[str]:
    """The result as Markdown."""
    lines = ["# The tool agent", ""]
    lines += [f"Made by `examples/tool_agent/curve.py`, commit {about['commit']}, {about['machine']}, one run.", ""]
    lines += [
        f"Held-out success: **{found['first']:.3f} before, {found['last']:.3f} after**, {found['rise']:+.3f} in "
        f"{found['minutes']:.1f} minutes, evaluations between included. Asked for: +{RISE} in {MINUTES:g} minutes.",
        "",
        "| step | minutes | held out | reward | calls | errors | step s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{row['step']}", f"{row['minutes']:.1f}"]
        for name, form in (
            ("heldout", ".3f"),
            ("reward", ".3f"),
            ("calls", ".0f"),
            ("errors", ".0f"),
            ("step_s", ".1f"),
        ):
            cells.append(format(row[name], form) if name in row else "")
        lines.append(f"| {' | '.join(cells)} |")
    if told:
        lines += ["", "A conversation near the end of training:", "", "```", *told, "```"]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the run, write the curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    options = parser.parse_args(arguments)
    rows, about = rows_of(options.run), facts()
    found = verdict(rows)
    print(json.dumps({"name": "tool_agent", **found, **about}))
    if options.out:
        record = {"steps": rows, **found, **about}
        write(options.out, record, lines_of(rows, found, conversation(options.run), about))


if __name__ == "__main__":
    main()
