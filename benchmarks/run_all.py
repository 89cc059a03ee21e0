"""Every benchmark, one after the other: `make bench`. Their JSON lines go to stdout; with --out into a file as well.

    .venv/bin/python benchmarks/run_all.py [--out lines.jsonl] [--smoke]

`memory.py` is given TRL's peak of the run before it. A benchmark that fails is named at the end; the others still run.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import say

HERE = Path(__file__).resolve().parent
DEADLINE_S = 3600.0


def lines_of(program: str, arguments: Sequence[str]) -> list[str] | None:
    """The JSON lines that a benchmark prints; None when it fails."""
    say(f"=== {program} {' '.join(arguments)}")
    call = [sys.executable, str(HERE / program), *arguments]
    try:
        done = subprocess.run(call, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        say(f"{program}: {error}")
        return None
    return [line for line in done.stdout.splitlines() if line.startswith("{")]


def trl_peaks(lines: Sequence[str]) -> list[str]:
    """The argument of memory.py: TRL's peak in E1."""
    parsed = [json.loads(line) for line in lines]
    peaks = [str(each["peak_rss_bytes"]["trl"]) for each in parsed if each["scenario"]["name"] == "E1"]
    return ["--trl-bytes", *peaks] if peaks else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run them all; exit code 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the JSON lines")
    parser.add_argument("--smoke", action="store_true", help="every benchmark at its smallest")
    options = parser.parse_args(arguments)
    size = ["--smoke"] if options.smoke else []
    failed, printed = [], []
    peaks: list[str] = []
    for program in ("overhead.py", "generation.py", "vs_trl.py", "memory.py"):
        lines = lines_of(program, [*size, *(peaks if program == "memory.py" else [])])
        if lines is None:
            failed.append(program)
            continue
        if program == "vs_trl.py":
            peaks = trl_peaks(lines)
        printed += lines
        print("\n".join(lines), flush=True)
        if options.out:
            options.out.write_text("\n".join(printed) + "\n")
    if failed:
        raise SystemExit(f"run_all: {', '.join(failed)} failed; see above")


if __name__ == "__main__":
    main()
