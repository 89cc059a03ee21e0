"""Whole runs whose actor is two processes: the same numbers under `local` and `ray`, and as one process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from rlcore.testing.leaks import descendants, is_running
from rlcore.testing.runs import differing, untimed
from rlcore.testing.tiny import write_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(300), pytest.mark.xdist_group("machine")]

DEADLINE_S = 120.0
RAY = ("plugins.ray.object_store_gib=0.1",)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of a run: three steps of four samples on a tiny model."""
    directory = tmp_path_factory.mktemp("ranks")
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say a, {n}", "answer": "a"}) + "\n" for n in range(8)))
    return {
        "model.path": write_tiny_model(directory / "tiny"),
        "model.tokenizer": "bytes",
        "data.sources.all.path": prompts,
        "rollout.samples_per_prompt": 2,
        "rollout.max_tokens": 8,
        "reward.functions.letters.fn": "count_letter",
        "actor.lr": "1e-3",
        "train.dir": directory / "runs",
        "train.max_steps": 3,
        "train.prompts_per_step": 2,
        "cluster.threads": 1,
    }


def trained(name: str, values: dict[str, Any], *more: str) -> Path:
    """`rlcore train` to its end; the run's directory."""
    command = [sys.executable, "-m", "rlcore", "train", "--plugin", "null", f"train.name={name}", *more]
    command += [f"{key}={value}" for key, value in values.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return Path(values["train.dir"]) / name


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of each step that do not depend on the clock."""
    rows = [untimed(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    varying = ("reward/latency", "reward/wait", "reward/hidden", "reward/service")
    return [{name: value for name, value in row.items() if not name.startswith(varying)} for row in rows]


@pytest.fixture(scope="module")
def alone(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of one process."""
    rows = rows_of(trained("alone", values))
    assert len(rows) == 3
    return rows


def test_two_ranks_under_ray_are_two_ranks_under_local_bit_for_bit_and_one_process_to_1e_5(
    values: dict[str, Any], alone: list[dict[str, Any]]
) -> None:
    before = descendants(1)
    here = trained("here", values, "actor.data_parallel=2")
    there = trained("there", values, "actor.data_parallel=2", *RAY)
    assert differing(here, there) == []
    assert not any(map(is_running, _of_ours(descendants(1) - before, values["train.dir"])))
    for ours, theirs in zip(rows_of(there), alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def shapes_in(directory: Path) -> dict[str, list[int]]:
    """The shapes of all tensors in the files of a model, by name."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return found


def test_a_sharded_actor_samples_trains_and_resumes_on_another_number_of_ranks(
    values: dict[str, Any], alone: list[dict[str, Any]]
) -> None:
    sharded = ("actor.data_parallel=2", "actor.sharding=fsdp2")
    run = trained("run", {**values, "train.max_steps": 2}, *sharded)
    trained("run", values, "--resume")
    for ours, theirs in zip(rows_of(run), alone, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    step_2, step_3 = (run / "checkpoints" / f"step_{step}" for step in (2, 3))
    assert [len(list((step / "trainer_state").iterdir())) for step in (step_2, step_3)] == [2, 1]
    assert shapes_in(step_2 / "model") == shapes_in(step_3 / "model")


def _of_ours(processes: set[int], directory: Path) -> list[int]:
    """Those whose environment or command names the test's directory, or that are an actor of ours."""
    found = []
    for process in processes:
        try:
            command = Path(f"/proc/{process}/cmdline").read_bytes()
        except OSError:
            continue
        if b"ActorHost" in command or str(directory).encode() in command:
            found.append(process)
    return found
