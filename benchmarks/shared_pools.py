"""Measures the gain of also training on the judges' devices, which a dedicated reward pool leaves idle.

    .venv/bin/python benchmarks/shared_pools.py [--smoke] [--devices 8 16 32 64] [--slots] [--out OUT]

Half of the devices sample, half judge, and each sample is judged as soon as it is finished. `dedicated`: the actor
trains on the devices that sample (a union of one pool), and the reward pool is idle meanwhile. `shared`: the actor
trains on the union of both. It is a production run, with workers that sleep as long as devices would compute
(`device_times.py`). The costs are a hundredth of a published step: 40 s of generation, 198 s of passes and update with
a 7B model on 8 devices for 5120 samples (verl #2854). Judging costs as much as sampling. Servers take 5 s to fall
asleep, and 5 s to wake up. Prints one JSON line. For each number of devices it has the seconds per step (scaled up
again), the busy shares of the pools, the gain, and the gain that follows from the costs alone.

--slots also measures real work on this machine's cores: `examples/ray_vllm` on Ray. One vLLM engine samples from
SmolLM2-135M and another judges, each on a separate CPU. The actor trains with one rank on the sampler's CPU, or with
two ranks on both (`make setup-vllm` first; five to ten minutes). In one command: `make results-shared-pools`.
"""

import argparse
import asyncio
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from live import live
from measure import MODEL, ROOT, conclude, machine, made_by, say, summary

from rlcore.report import metrics
from rlcore.testing import write_prompts

HERE = Path(__file__).resolve().parent
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
EXAMPLE = "examples/ray_vllm/config.yaml"
DEADLINE_S = 1800.0
"""Timeout of one run on slots, including the start of two engines."""
SAMPLES_A_DEVICE = 16
GROUP = 4
PUBLISHED = {"devices": 8, "generate": 40.0, "train": 198.0, "turn": 5.0}
SCALE = 100.0
"""Divisor of the published seconds."""
WARM_STEPS = 1


def device_seconds(phase_s: float, scale: float) -> float:
    """Scaled device seconds per sample of a phase that takes `phase_s` in the published step."""
    devices = float(PUBLISHED["devices"])
    return phase_s / scale * devices / (devices * SAMPLES_A_DEVICE)


def settings(directory: Path, devices: int, shared: bool, scale: float) -> list[str]:
    """Overrides of a run on this number of devices."""
    servers = devices // 2
    samples = devices * SAMPLES_A_DEVICE
    return [
        "model.path=none",
        "model.tokenizer=bytes",
        f"data.sources.all.path={directory / 'prompts.jsonl'}",
        "actor.backend=timed",
        "rollout.backend=timed",
        "rollout.pool=rollout",
        f"rollout.replicas={servers}",
        f"rollout.samples_per_prompt={GROUP}",
        f"train.prompts_per_step={samples // GROUP}",
        "train.max_steps=1000000",
        "train.log_completions_every=0",
        "cluster.train_pool=train",
        f"cluster.pools.train.colocates=[{'rollout,reward' if shared else 'rollout'}]",
        f"plugins.device_times.judges={servers}",
        f"plugins.device_times.train_devices={devices if shared else servers}",
        f"plugins.device_times.generate_s={device_seconds(PUBLISHED['generate'], scale)}",
        f"plugins.device_times.judge_s={device_seconds(PUBLISHED['generate'], scale)}",
        f"plugins.device_times.train_s={device_seconds(PUBLISHED['train'], scale)}",
        f"plugins.device_times.turn_s={PUBLISHED['turn'] / scale}",
    ]


async def measured(directory: Path, devices: int, shared: bool, scale: float, steps: int) -> dict[str, Any]:
    """Seconds of a step at full scale, and the busy shares of the pools."""
    name = f"{devices}-{'shared' if shared else 'dedicated'}"
    run_dir = directory / name
    plugins = [str(HERE / "device_times.py")]
    async with live({}, settings(directory, devices, shared, scale), plugins, run_dir) as trainer:
        for _ in range(WARM_STEPS + steps):
            await trainer.step()
    return read(name, run_dir, scale)


def read(name: str, run_dir: Path, scale: float) -> dict[str, Any]:
    """The recorded metrics of a run's steps, without the first."""
    rows = [row for row in metrics.read(run_dir) if "time/step_s" in row][WARM_STEPS:]
    found = {"step_s": summary([scale * row["time/step_s"] for row in rows])}
    for pool in ("rollout", "reward"):
        found[f"{pool}_busy_frac"] = summary([row[f"time/pool/{pool}/busy_frac"] for row in rows])
    say(f"{name}: {found['step_s']['median']:.1f} s/step, reward pool {found['reward_busy_frac']['median']:.0%} busy")
    return found


def on_slots(directory: Path, shared: bool, prompts: int, steps: int) -> dict[str, Any]:
    """A real run on two CPUs of Ray."""
    name = f"slots-{'shared' if shared else 'dedicated'}"
    settings = {
        "actor.data_parallel": 2 if shared else 1,
        "cluster.train_pool": "train",
        "cluster.pools.train.colocates": f"[{'rollout,reward' if shared else 'rollout'}]",
        "plugins.ray.object_store_gib": 0.2,
        "train.prompts_per_step": prompts,
        "train.max_steps": WARM_STEPS + steps,
        "train.dir": directory,
        "train.name": name,
        "train.log_completions_every": 0,
        "eval.at_start": "false",
        "eval.at_end": "false",
        "checkpoint.at_end": "false",
    }
    command = [str(VLLM_PYTHON), "-m", "rlcore", "train", EXAMPLE, *(f"{key}={it}" for key, it in settings.items())]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=DEADLINE_S, check=False)
    if done.returncode:
        raise SystemExit(f"shared_pools: {name}: rlcore train ended with {done.returncode}")
    return read(name, directory / name, 1.0)


def gain(both: Mapping[str, Any]) -> float:
    """The speed-up of a step."""
    return float(both["dedicated"]["step_s"]["median"] / both["shared"]["step_s"]["median"])


def expected_gain() -> float:
    """The gain by the costs alone: generation on half of the devices hides judging; training is on half or all."""
    generate_s, train_s, turn_s = 2 * PUBLISHED["generate"], PUBLISHED["train"], 2 * PUBLISHED["turn"]
    return (generate_s + 2 * train_s + turn_s) / (generate_s + train_s + turn_s)


async def compared(directory: Path, devices: int, scale: float, steps: int) -> dict[str, Any]:
    """`dedicated` and `shared` on this number of devices."""
    write_prompts(directory / "prompts.jsonl", 4 * devices * SAMPLES_A_DEVICE // GROUP)
    both = {
        "dedicated": await measured(directory, devices, False, scale, steps),
        "shared": await measured(directory, devices, True, scale, steps),
    }
    return {**both, "gain": gain(both)}


def slots(directory: Path, prompts: int, steps: int) -> dict[str, Any]:
    """`dedicated` and `shared` with real engines."""
    for needed in (VLLM_PYTHON, MODEL):
        if not needed.exists():
            raise SystemExit(f"shared_pools: {needed.relative_to(ROOT)} is missing; make setup-vllm model")
    both = {name: on_slots(directory, name == "shared", prompts, steps) for name in ("dedicated", "shared")}
    return {**both, "gain": gain(both), "prompts": prompts}


def report(result: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "# Shared pools: training on the judges' devices",
        "",
        made_by("benchmarks/shared_pools.py", facts),
        "",
        f"Half of the devices sample, half judge. Simulated at 1/{result['scale']:.0f} of a published step; by the "
        f"costs alone a step would be {result['expected_gain']:.2f} times as fast.",
        "",
        "| devices | dedicated, s/step | reward pool busy | shared, s/step | reward pool busy | gain |",
        "|---|---|---|---|---|---|",
    ]
    rows = dict(result["devices"])
    if result["slots"]:
        rows["2 CPUs, real"] = result["slots"]
    for name, both in rows.items():
        cells = [
            f"{both[way]['step_s']['median']:.1f} | {both[way]['reward_busy_frac']['median']:.0%}"
            for way in ("dedicated", "shared")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {both['gain']:.2f} |")
    if result["slots"]:
        num = result["slots"]["shared"]["step_s"]["n"]
        lines += [
            "",
            f"The last line is `{EXAMPLE}` on Ray, vLLM as sampler and as judge, {result['slots']['prompts']} prompts "
            f"a step, the median of {num} steps: one rank of the actor on the sampler's CPU, or two on both.",
        ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="eight devices, one step: does it still run?")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--slots", action="store_true", help="also a real run on two CPUs, with .venv-vllm")
    parser.add_argument("--out", type=Path, help="write OUT.json and OUT.md")
    chosen = parser.parse_args(arguments)
    sizes, scale, steps = ([8], 1000.0, 1) if chosen.smoke else (chosen.devices, SCALE, chosen.steps)
    with tempfile.TemporaryDirectory(prefix="shared-pools-") as scratch:
        found = {str(devices): asyncio.run(compared(Path(scratch), devices, scale, steps)) for devices in sizes}
        real = slots(Path(scratch), 2 if chosen.smoke else 8, steps) if chosen.slots else None
    costs = {"published": PUBLISHED, "scale": scale, "expected_gain": expected_gain()}
    result, facts = {**costs, "devices": found, "slots": real}, machine()
    conclude("shared_pools", result, facts, chosen.out, report(result, facts))


if __name__ == "__main__":
    main()
