"""Findings of "why nothing is learned" about the examples' runs: `python benchmarks/findings.py`.

    .venv/bin/python benchmarks/findings.py [--steps N] [--out FILE.md]

Trains each example's ci.yaml as its first lines say, for N steps (12), on the policy without torch. Prints a line per
finding that a run repeats at its end. A person judges whether it is true; docs/results/findings.md has these
judgements. The exit code is 1 if a run fails.
"""

import argparse
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import ROOT

FINDING = re.compile(r"^(?P<name>[a-z][^:]+?) in (?P<num>\d+) of (?P<all>\d+) steps \(.*?\): ", re.MULTILINE)
COMMAND = re.compile(r"^# +rlcore (train .*)$", re.MULTILINE)


def findings_of(example: Path, steps: int, directory: Path) -> list[tuple[str, int, int]]:
    """(finding, steps that showed it, steps) of a run; SystemExit if it fails."""
    [command] = COMMAND.findall(example.read_text("utf-8"))
    settings = [f"train.dir={directory}", f"train.name={example.parent.name}", f"train.max_steps={steps}"]
    arguments = [sys.executable, "-m", "rlcore", *shlex.split(command), *settings]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{example.parent.name}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    diagnose = [sys.executable, "-m", "rlcore", "view", "diagnose", str(directory / example.parent.name)]
    text = subprocess.run(diagnose, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True).stdout
    return [(found["name"], int(found["num"]), int(found["all"])) for found in FINDING.finditer(text)]


def main() -> None:
    """Run every example and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = ["| example | finding | held in steps |", "|---|---|---|"]
    with tempfile.TemporaryDirectory(prefix="rlcore-findings-") as place:
        for example in sorted(ROOT.glob("examples/*/ci.yaml")):
            found = findings_of(example, options.steps, Path(place))
            rows = found or [("none", 0, options.steps)]
            lines += [f"| {example.parent.name} | {name} | {num} of {total} |" for name, num, total in rows]
            print("\n".join(lines[-len(rows) :]), flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
