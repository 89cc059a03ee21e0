"""The comparison of `gpu_check.py`: steps of ours, then of TRL with colocated vLLM, or of plain transformers.

One side at a time, because a device does not have room for both. On CUDA the other side has the settings that its
documentation recommends there, and the micro-batch with which its step is fastest.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import vs_trl
from channel import Side, SideError
from measure import TRL_PYTHON, summary

MICRO_BATCH = 4
"""Rows at a time on a CPU, and of our warm-up."""
ON_CUDA = (1, 2, 4)
"""Micro-batches of the other side that are tried on CUDA. A row has 9216 tokens, so few fit."""
TRL_ON_CUDA = {"dtype": "float32", "bf16": True, "gradient_checkpointing": True}
"""TRL's defaults on CUDA: masters in float32 under autocast to bfloat16, and checkpointed activations."""
FIGURES = ("step_s", "generate_s", "update_s", "new_tokens")


class Peer(vs_trl.Comparison):
    """A comparison with TRL with colocated vLLM, or with plain transformers if TRL is not set up."""

    start_s = 600.0
    """Seconds until a side is ready: vLLM compiles and captures graphs when it starts."""

    @property
    def on_cuda(self) -> bool:
        """True if both sides compute on CUDA."""
        return bool(self._options.device == "cuda")

    def trl(self, micro_batch: int) -> Side:
        """The other side."""
        if not TRL_PYTHON.exists():
            program = vs_trl.HERE / "naive_side.py"
            return Side("transformers", Path(sys.executable), program, self.peer_spec(micro_batch), self.threads)
        spec = self.trl_spec(micro_batch)
        name = "TRL without vLLM" if self.on_cuda and not spec["vllm"] else "TRL"
        return Side(name, TRL_PYTHON, vs_trl.HERE / "trl_side.py", spec, self.threads)

    def trl_spec(self, micro_batch: int) -> dict[str, Any]:
        """The specification for TRL; on a CPU with the settings of every other comparison.

        It samples with vLLM on a GPU if its environment has it: `make bench` installs TRL alone.
        """
        spec = self.peer_spec(micro_batch) | {
            "vllm": self.on_cuda and _has_vllm(),
            "model": str(self._endless),
            "lengths": None,
        }
        return spec | TRL_ON_CUDA if self.on_cuda else spec


def _has_vllm() -> bool:
    """True if TRL's environment has vLLM."""
    code = "import sys, importlib.util as util; sys.exit(util.find_spec('vllm') is None)"
    return subprocess.run([str(TRL_PYTHON), "-c", code], check=False).returncode == 0


def compared(comparison: Peer, rounds: int) -> dict[str, Any]:
    """Figures of ours and of the other side, by name."""
    ours = comparison.ours()
    found = {ours.name: _steps(comparison, ours, MICRO_BATCH, rounds)}
    name, other = _fastest(comparison, rounds)
    return found | {name: other}


def _fastest(comparison: Peer, rounds: int) -> tuple[str, dict[str, Any]]:
    """Name and figures of the other side, with its fastest micro-batch and one step of each that was tried.

    A micro-batch that exhausts the memory ends the search: larger ones need more.
    """
    tried: dict[str, Any] = {}
    sizes = ON_CUDA if comparison.on_cuda else (MICRO_BATCH,)
    once = 1 if len(sizes) > 1 else rounds
    for size in sizes:
        side = comparison.trl(size)
        try:
            tried[str(size)] = _steps(comparison, side, size, once)
        except SideError as error:
            tried[str(size)] = {"failed": str(error)}
            break
    seconds = {size: found["step_s"]["median"] for size, found in tried.items() if "failed" not in found}
    if not seconds:
        return side.name, {"failed": "; ".join(found["failed"] for found in tried.values()), "tried": tried}
    best = min(seconds, key=lambda size: seconds[size])
    figures = tried[best]
    if rounds > once:
        figures = _steps(comparison, comparison.trl(int(best)), int(best), rounds)
    return side.name, {**figures, "micro_batch": int(best), "tried": tried}


def _steps(comparison: Peer, side: Side, micro_batch: int, rounds: int) -> dict[str, Any]:
    """Summaries of some steps of a side after its warm-up; it is closed then."""
    with side:
        comparison.ready(side)
        vs_trl.warm(comparison, side, micro_batch)
        steps = [side.ask({"do": "step"}, vs_trl.STEP_S) for _ in range(rounds)]
    return {name: summary([step[name] for step in steps]) for name in FIGURES}


def table(result: Mapping[str, Any]) -> Iterator[str]:
    """The comparison as Markdown."""
    yield from ("| model | side | rows at a time | step, s | generation, s | update, s |", "|---|---|---|---|---|---|")
    for shape, sides in result.items():
        for side, found in sides.items():
            for size, once in found.get("tried", {}).items() if len(found.get("tried", {})) > 1 else ():
                yield f"| {shape} | {side}, one step | {size} | {_medians(once)} |"
            yield f"| {shape} | {side} | {found.get('micro_batch', '-')} | {_medians(found)} |"


def _medians(found: Mapping[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']} | | "
    return " | ".join(f"{found[name]['median']:.3g}" for name in FIGURES[:3])
