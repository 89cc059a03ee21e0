"""Runs every benchmark except for learning curves, one after another: `make bench`. JSON lines go to stdout, with --out
also into a file.

    .venv/bin/python benchmarks/run_all.py [--out lines.jsonl] [--smoke]

`generation.py` runs a second time in .venv-vllm if `make setup-vllm` has made it. `memory.py` gets TRL's peaks at one
and four times the batch of E1. A benchmark that fails is named at the end; the others still run.
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import ROOT, say

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
DEADLINE_S = 3 * 3600.0
"""Timeout of one program. TRL's steps with prompts of 512 tokens, or with four times the batch, take minutes each."""
TIMES = 4
"""Factor of E1's prompts in the second comparison of memory."""
OTHERS = (
    ("scale.py",),
    ("miniature.py",),
    ("transfer.py",),
    ("batches.py",),
    ("sharding.py",),
    ("saving.py",),
    ("compiled.py",),
    ("weight_sync.py", "--smoke"),
    ("cached_prefixes.py", "--smoke"),
    ("shared_pools.py",),
    ("shared_cores.py",),
    ("overlap.py", "small"),
    ("reward_service.py",),
    ("agent_loop.py",),
)


class Everything:
    """The benchmarks that have run, and those that failed."""

    def __init__(self, out: Path | None, smoke: bool) -> None:
        self.failed: list[str] = []
        self._out, self._size = out, ["--smoke"] if smoke else []
        self._printed: list[str] = []

    def run(self, program: str, *arguments: str, python: str = sys.executable) -> list[dict[str, Any]]:
        """Run a benchmark and pass its JSON lines on; returns them, or none if it failed."""
        arguments = (*arguments, *self._size)
        call = [python, str(HERE / program), *arguments]
        say(f"=== {program} {' '.join(arguments)}" + ("" if python == sys.executable else f" ({python})"))
        try:
            done = subprocess.run(call, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            say(f"{program}: {error}")
            self.failed.append(program)
            return []
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        self._printed += lines
        print("\n".join(lines), flush=True)
        if self._out:
            self._out.write_text("\n".join(self._printed) + "\n")
        return [json.loads(line) for line in lines]


def e1(lines: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The line of scenario E1."""
    return next((line for line in lines if line["scenario"]["name"] == "E1"), None)


def larger(line: dict[str, Any]) -> list[str]:
    """The arguments of vs_trl.py for the same comparison with `TIMES` times as many prompts.

    Each side takes two steps, so that Adam's moments exist in the second, as in `memory.py`.
    """
    prompts, micro_batch = TIMES * line["scenario"]["prompts"], line["trl_micro_batch"]
    sizes = ["--prompts", str(prompts), "--rounds", "2", "--skip-sweep", "--micro-batch", str(micro_batch)]
    return ["--scenario", "E1", *sizes]


def trl_peaks(*lines: dict[str, Any] | None) -> list[str]:
    """The argument of memory.py: the measured peaks of TRL at one and at four times the batch."""
    measured = list(itertools.takewhile(lambda line: line is not None, lines))
    peaks = [str(line["peak_rss_bytes"]["trl"]) for line in measured if line is not None]
    return ["--trl-bytes", *peaks] if peaks else []


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all benchmarks; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file for the JSON lines")
    parser.add_argument("--smoke", action="store_true", help="every benchmark at its smallest")
    options = parser.parse_args(arguments)
    everything = Everything(options.out, options.smoke)
    everything.run("overhead.py")
    everything.run("generation.py")
    if VLLM_PYTHON.exists():
        everything.run("generation.py", python=str(VLLM_PYTHON))
    once = e1(everything.run("vs_trl.py"))
    several = None if once is None else e1(everything.run("vs_trl.py", *larger(once)))
    everything.run("memory.py", *trl_peaks(once, several))
    for program, *more in OTHERS:
        everything.run(program, *more)
    if everything.failed:
        raise SystemExit(f"run_all: {', '.join(everything.failed)} failed; see above")


if __name__ == "__main__":
    main()
