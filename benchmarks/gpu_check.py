"""Measures typical runs on a machine with CUDA: `make gpu-check`. Without a device it ends with a one-line error.

    .venv/bin/python benchmarks/gpu_check.py [--tiny --device cpu] [--only attention] [--out docs/results/gpu]
    .venv/bin/python benchmarks/gpu_check.py --only runs --shape 0.5B --length 512 --add  # a shorter part, added

The parts come in an order for a short hour:

* tests marked `gpu`;
* steps of a run in which actor and vLLM take turns: seconds of sleep and wake, and memory over time;
* hand-overs of weights through shared memory and over CUDA IPC;
* attention's memory by length;
* steps on the embedded sampler and on vLLM at 64 and 256 rows, with their differences of log-probs, their memory over
  time and the plan's estimate;
* updates with compiled layers and without, and chunks of logits;
* a step compared with TRL's with colocated vLLM, or with plain transformers' if TRL's environment is missing.

Models have random weights and the shapes of 0.5B and 1.5B. The record is written after each part, so an hour that ends
early keeps its results. A part that fails is one line. Prints one JSON line on stdout at the end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_peer
import gpu_turns
import vs_trl
from gpu_parts import write_shape
from gpu_peer import Peer, compared
from measure import ROOT, emit, keep, machine, made_by, say
from scenarios import Scenario
from tiny_task import write_byte_tokenizer

from rlcore.errors import RlcoreError, WorkerError, boundary

GIB = 2**30
PART_S = 900.0
WEIGHT_SYNCS = ("shm", "ipc")
PHASES = ("step", "generate", "passes", "update", "weights", "sleep", "wake")
"""Phases that a step logs, in seconds; not every run has all of them."""
OURS = ("actor.micro_batch_tokens=16384",)


class Check:
    """The record of one run of this program, and its settings."""

    def __init__(self, own: argparse.Namespace, scratch: Path) -> None:
        self.own, self.scratch, self.results = own, scratch, dict[str, Any]()
        self.shapes = ("tiny",) if own.tiny else tuple(own.shape or ("0.5B", "1.5B"))

    def spec(self, **more: Any) -> dict[str, Any]:
        """Settings that all parts share: device, format, lengths."""
        device, threads = self.own.device, 1 if self.own.tiny else 0
        dtype = "float32" if self.own.tiny else "bfloat16"
        sizes = {"samples": 4, "prompt": 64, "length": 16} if self.own.tiny else {"samples": 16, "prompt": 1024}
        return {"device": device, "dtype": dtype, "threads": threads, "shape": self.shapes[-1], **sizes, **more}

    def model(self, shape: str) -> Path:
        """A model of this shape with a tokenizer; it is written once."""
        directory = self.scratch / shape
        if not directory.exists():
            write_shape(directory, shape)
            write_byte_tokenizer(directory)
        return directory

    def part(self, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Run a part in a separate process; returns its figures, or {'failed': reason}."""
        call = [sys.executable, str(vs_trl.HERE / "gpu_parts.py"), name, json.dumps(spec)]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=PART_S, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"it took longer than {PART_S:g} s"}
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
        return dict(json.loads(lines[-1]))


def require(device: str) -> str:
    """The device's name; SystemExit with one line if there is none."""
    import torch

    if device == "cpu":
        return "CPU"
    if not torch.cuda.is_available():
        raise SystemExit(f"gpu-check: torch {torch.__version__} finds no CUDA device; it needs a machine with one")
    return str(torch.cuda.get_device_name())


def run_tests(check: Check) -> dict[str, Any]:
    """Run the tests marked `gpu`."""
    if check.own.device == "cpu":
        return {"tests": "not run on a CPU"}
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", str(ROOT / "tests" / "gpu")]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, timeout=1200, check=False)
    sys.stderr.write(done.stdout)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    return {"tests": last, **({"failed": last} if done.returncode else {})}


def attention(check: Check) -> dict[str, Any]:
    """Memory of an update by length, with and without a shared prompt."""
    lengths = [64, 128] if check.own.tiny else [1024, 2048, 4096, 8192]
    return check.part("attention", check.spec(ways=["tree", "none"], lengths=lengths))


def runs(check: Check) -> dict[str, Any]:
    """Steps on each sampler at 64 and 256 rows, for each shape."""
    found = {}
    vllm = bool(find_spec("vllm")) and not check.own.tiny
    for shape in check.shapes:
        for backend in ("hf", "vllm") if vllm else ("hf",):
            length = 16 if check.own.tiny else check.own.length
            spec = check.spec(model=str(check.model(shape)), backend=backend, length=length, steps=2)
            for rows in (
                [(8, 16)] if check.own.tiny else [(64,), (256,)]
            ):  # one process each, because a process starts slowly
                measured = check.part("runs", {**spec, "rows": rows})
                failed = {str(number): measured for number in rows} if "failed" in measured else measured
                found |= {f"{shape} {backend} {number}": result for number, result in failed.items()}
                say(f"gpu-check: {shape} on {backend} with {rows} rows")
    if not vllm:
        found["vllm"] = {"failed": "vLLM is not installed here, or this is the tiny go"}
    return found


def in_turns(check: Check) -> dict[str, Any]:
    """Steps of a run in which vLLM sleeps while the actor trains."""
    if check.own.tiny or not find_spec("vllm"):
        return {"failed": "vLLM is not installed here, or this is the tiny go"}
    more = {"backend": "vllm", "length": check.own.length, "steps": gpu_turns.STEPS, "rows": (64,)}
    model = str(check.model(gpu_turns.SHAPE))
    return check.part("runs", check.spec(model=model, overrides=gpu_turns.overrides(), **more))


def weight_syncs(check: Check) -> dict[str, Any]:
    """Steps of a run with vLLM on the actor's device, by `rollout.weight_sync`."""
    if check.own.tiny or not find_spec("vllm"):
        return {"failed": "vLLM is not installed here, or this is the tiny go"}
    shape, found = check.shapes[-1], {}
    more = {"model": str(check.model(shape)), "backend": "vllm", "length": 256, "steps": 3, "rows": (64,)}
    for way in WEIGHT_SYNCS:
        overrides = [f"rollout.weight_sync={way}", *(["rollout.weights_bucket_mib=256"] if way == "ipc" else [])]
        measured = check.part("runs", check.spec(overrides=overrides, **more))
        found[f"{shape} {way}"] = measured.get("64", measured)  # or the reason why it failed
    return found


def compiled(check: Check) -> dict[str, Any]:
    """Seconds of an update with compiled layers and with torch's own."""
    own = {"backend": "aot_eager", "length": 16} if check.own.tiny else {"backend": "inductor", "length": 1024}
    return check.part("compiled", check.spec(model=str(check.model(check.shapes[-1])), rounds=check.own.rounds, **own))


def head_chunks(check: Check) -> dict[str, Any]:
    """Seconds by the number of rows of logits per chunk."""
    rows = [16, 32] if check.own.tiny else [128, 512, 1024, 2048, 4096, 8192]
    return check.part("head_chunks", check.spec(rows=rows, length=16 if check.own.tiny else 1024))


def compared_with_peer(check: Check) -> dict[str, Any]:
    """Steps of ours and of the peer, for each shape."""
    found = {}
    for shape in check.shapes:
        tiny = check.own.tiny
        scenario = Scenario(
            shape, prompt_tokens=64 if tiny else 1024, new_tokens=8 if tiny else check.own.peer_length, prompts=2
        )
        scenario = replace(scenario, samples=4 if tiny else 16)
        dtype = check.spec()["dtype"]
        arguments = ["--device", check.own.device, "--dtype", dtype, *(f"--ours={value}" for value in OURS)]
        options = vs_trl.parse(arguments)
        comparison = Peer(scenario, check.model(shape), options, Path(tempfile.mkdtemp(dir=check.scratch)))
        found[shape] = compared(comparison, 1 if tiny else check.own.rounds)
    return found


PARTS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "tests": run_tests,
    "in_turns": in_turns,
    "weight_syncs": weight_syncs,
    "attention": attention,
    "runs": runs,
    "compiled": compiled,
    "head_chunks": head_chunks,
    "beside_peer": compared_with_peer,
}
"""The parts, in an order for a short hour."""


def earlier(out: Path) -> dict[str, Any]:
    """The parts that an earlier run recorded; empty without a record."""
    record = out.with_suffix(".json")
    found = json.loads(record.read_text()) if record.exists() else {}
    return {name: result for name, result in found.items() if name in PARTS}


def page(device: str, results: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# GPU checks", "", f"{made_by('make gpu-check', facts)} Device: {device}.", ""]
    for name, result in results.items():
        failed = [f"Failed: {result['failed']}"] if "failed" in result else None
        lines += [f"## {name.replace('_', ' ')}", "", *(failed or TABLES.get(name, _sentence)(result)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _sentence(result: Mapping[str, Any]) -> Iterator[str]:
    yield str(result.get("tests") or json.dumps(result))


def _attention_table(result: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| way | tokens of a response | peak, GiB | s |", "|---|---|---|---|")
    for row in result["rows"]:
        yield f"| {row['way']} | {row['length']} | {row['peak_bytes'] / GIB:.3f} | {row['s']:.3f} |"


def _runs_table(result: Mapping[str, Any]) -> Iterator[str]:
    yield "Peak is that of the device, of a CPU that of the controller's process."
    yield ""
    yield "| run | sampled tokens/s | log-probs differ by, each step | planned, GiB | peak, GiB | seconds of a step |"
    yield "|---|---|---|---|---|---|"
    for name, found in result.items():
        if "failed" in found:
            yield f"| {name} | failed: {found['failed']} | | | | |"
            continue
        phases = [size for pool in found["planned_on_devices"].values() for size in pool.values()]
        planned = max(phases or found["planned_bytes"].values(), default=0)
        step = found["steps"][-1]
        parts = ", ".join(f"{name} {step[f'time/{name}_s']:.2f}" for name in PHASES if f"time/{name}_s" in step)
        differences = ", ".join("-" if value is None else f"{value:.2g}" for value in found["logprob_diff"])
        yield (
            f"| {name} | {found['tokens_per_s']:.0f} | {differences} | {planned / GIB:.2f} "
            f"| {found['peak_bytes'] / GIB:.2f} | {parts} |"
        )


def _head_table(result: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| rows of logits at a time | seconds of an update |", "|---|---|")
    for rows, seconds in result["seconds"].items():
        yield f"| {rows} | {seconds:.3f} |"


def _compiled_table(result: Mapping[str, Any]) -> Iterator[str]:
    yield from ("| layers | first update, s | update, s |", "|---|---|---|")
    for way, seconds in result["first_s"].items():
        yield f"| {way} | {seconds:.2f} | {result['update_s'][way]['median']:.3f} |"
    yield ""
    yield f"Ratio {result['ratio']:.2f}; log-probs differ by at most {result['logprob_abs_max']:.2g}."


TABLES: dict[str, Callable[[Mapping[str, Any]], Iterator[str]]] = {
    "in_turns": gpu_turns.table,
    "weight_syncs": _runs_table,
    "attention": _attention_table,
    "runs": _runs_table,
    "compiled": _compiled_table,
    "head_chunks": _head_table,
    "beside_peer": gpu_peer.table,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure one part after another, and write the record after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "gpu", help="written as .json and .md")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each side")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to try this program itself")
    parser.add_argument("--tiny", "--smoke", action="store_true", help="a tiny random model and tiny sizes")
    parser.add_argument("--shape", action="append", choices=("0.5B", "1.5B"), help="these models; default: both")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a response in `runs`")
    parser.add_argument("--peer-length", type=int, default=8192, help="tokens of a response in `beside_peer`")
    parser.add_argument("--add", action="store_true", help="keep the other parts of the record that exists")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="these parts; default: all")
    own = parser.parse_args(arguments)
    device = require(own.device)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        check = Check(own, Path(scratch))
        check.results |= earlier(own.out) if own.add else {}
        for name in own.only or PARTS:
            try:
                with boundary(name, WorkerError):
                    check.results[name] = PARTS[name](check)
            except RlcoreError as error:  # the later parts are still measured
                check.results[name] = {"failed": str(error)}
            say(f"gpu-check: {name}: {check.results[name].get('failed', 'done')}")
            facts = machine()
            keep({"device": device, **check.results}, facts, own.out, page(device, check.results, facts))
    emit("gpu_check", {"device": device, **check.results}, facts)


if __name__ == "__main__":
    main()
