"""Checks that need a machine with CUDA: `make gpu-check`. Without a device it ends with a one-line error.

Runs the tests marked `gpu`, then a step of each scenario in bfloat16 against transformers' `generate` and an update
that shares nothing (`naive_side.py`), and writes docs/results/gpu.md. One JSON line for each scenario on stdout.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vs_trl
from channel import Side
from measure import MODEL, ROOT, emit, machine
from scenarios import SCENARIOS
from tiny_task import write_tiny_task

MICRO_BATCH = 16


class NaiveComparison(vs_trl.Comparison):
    """Against plain transformers, in this environment."""

    def trl(self, micro_batch: int) -> Side:
        """The other side."""
        program = vs_trl.HERE / "naive_side.py"
        return Side("transformers", Path(sys.executable), program, self.peer_spec(micro_batch), self.threads)


def require(device: str) -> str:
    """The device's name; SystemExit, in one line, when there is none."""
    import torch

    if device == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise SystemExit(f"gpu-check: torch {torch.__version__} finds no CUDA device; it needs a machine with one")
    return str(torch.cuda.get_device_name())


def table(device: str, results: Sequence[dict[str, Any]], facts: dict[str, Any], tests: str) -> str:
    """The results as Markdown."""
    lines = [
        "# GPU checks",
        "",
        f"`make gpu-check` on {device}, commit {facts['commit']}, versions {facts['versions']}.",
        f"Tests marked `gpu`: {tests}.",
        "",
        "bfloat16; medians; ours against transformers' `generate` and an update that shares nothing.",
        "",
        "| scenario | ours, s a step | transformers, s a step | ratio | generation | update | tokens/s generated |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        ratio, ours = result["ratio"], result["ours"]
        lines.append(
            f"| {result['scenario']['name']} | {ours['step_s']['median']:.3g} "
            f"| {result['trl']['step_s']['median']:.3g} | {ratio['step']:.2f} "
            f"| {ratio['generate']:.2f} | {ratio['update']:.2f} | {ours['generated_tokens_per_s']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Test, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "gpu.md")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try this program itself")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and tiny sizes")
    own = parser.parse_args(arguments)
    device = require(own.device)
    tests = "not run"
    if own.device == "cuda":
        call = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", str(ROOT / "tests" / "gpu")]
        done = subprocess.run(call, stdout=subprocess.PIPE, text=True, timeout=1200, check=False)
        sys.stderr.write(done.stdout)
        tests = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
        if done.returncode:
            raise SystemExit(f"gpu-check: the tests marked gpu failed: {tests}")
    options = vs_trl.parse(["--device", own.device, "--dtype", "bfloat16", *(["--smoke"] if own.smoke else [])])
    results = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        directory = Path(scratch)
        model = write_tiny_task(directory / "tiny") if own.smoke else MODEL
        for scenario in [SCENARIOS["E2"]] if own.smoke else SCENARIOS.values():
            comparison = NaiveComparison(vs_trl.sized(scenario, options), model, options, directory)
            micro_batch = vs_trl.trl_micro_batch(comparison, MICRO_BATCH)
            result = vs_trl.compare(comparison, micro_batch, 1 if own.smoke else own.rounds)
            results.append(result)
            emit("gpu_check", {**result, "device": device})
    own.out.parent.mkdir(parents=True, exist_ok=True)
    own.out.write_text(table(device, results, machine(), tests))


if __name__ == "__main__":
    main()
