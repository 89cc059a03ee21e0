"""The record of `make gpu-check`."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rlcore.plan.machine_cards import facts_of, machine_of
from rlcore.plugins.planning import plan_run

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def check() -> Iterator[Any]:
    """The module; the benchmarks import each other by their bare names, as scripts of one folder do."""
    sys.path.insert(0, str(BENCHMARKS))
    before = set(sys.modules)
    try:
        yield import_module("gpu_check")
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]


def test_a_gpu_check_adds_parts_to_an_earlier_record(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "gpu"
    assert check.earlier(out) == {}
    own = ["--device", "cpu", "--tiny", "--out", str(out), "--only"]
    check.main([*own, "tests"])
    monkeypatch.setitem(check.PARTS, "head_chunks", lambda of: {"seconds": {"16": 0.5}, "shapes": of.shapes})
    check.main([*own, "head_chunks", "--add"])
    assert set(check.earlier(out)) == {"tests", "head_chunks"}
    assert "| 16 | 0.500 |" in out.with_suffix(".md").read_text()
    check.main([*own, "head_chunks"])
    assert set(check.earlier(out)) == {"head_chunks"}


QWEN_15B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def specs_of(check: Any, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The specifications that a part measures on a machine with CUDA and vLLM, with the shape of 1.5B for a model."""
    specs: list[dict[str, Any]] = []
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_15B))
    monkeypatch.setattr(check, "find_spec", lambda name: name)
    monkeypatch.setattr(check.Check, "model", lambda self, shape: tmp_path / "model")
    monkeypatch.setattr(check.Check, "part", lambda self, name, spec: specs.append(spec) or {})
    own = Namespace(device="cuda", tiny=False, shape=["1.5B"], length=2048)
    check.PARTS[part](check.Check(own, tmp_path))
    return specs


@pytest.mark.parametrize("mib", [0, 500], ids=["free", "used"])
@pytest.mark.parametrize(("card", "total"), [("1xH100-80GB", 81559), ("1xH200-141GB", 143771)])
def test_the_run_in_turns_is_planned_to_sleep(
    card: str, total: int, mib: int, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, on = import_module("gpu_parts"), facts_of(machine_of(card))
    by_driver = replace(on, gpu_memory_bytes=total << 20, gpu_free_bytes=(total - mib) << 20)
    (spec,) = specs_of(check, "in_turns", tmp_path, monkeypatch)
    (rows,) = spec["rows"]
    config, overrides, plugins = parts.run_settings(spec | {"rows": rows, "groups": parts.groups_of(rows)}, tmp_path)
    for facts in (on, by_driver):
        plan = plan_run([config], overrides, plugins, facts)
        assert plan.config.rollout.backend == "vllm"
        assert plan.colocated_roles == ("rollout",)
    assert spec["steps"] > 2, "the first step starts with engines that are awake"


def test_weights_go_by_each_way_to_an_engine_on_the_actors_device(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, on = import_module("gpu_parts"), facts_of(machine_of("1xH100-80GB"))
    specs = specs_of(check, "weight_syncs", tmp_path, monkeypatch)
    plans = []
    for spec in specs:
        (rows,) = spec["rows"]
        settings = parts.run_settings(spec | {"rows": rows, "groups": parts.groups_of(rows)}, tmp_path)
        config, overrides, plugins = settings
        plans.append(plan_run([config], overrides, plugins, on))
    assert [plan.weight_sync for plan in plans] == ["shm", "ipc"]
    assert all(plan.layout.name == "colocated" for plan in plans)


def test_the_run_in_turns_comes_early_and_its_record_has_sleeping_waking_and_memory(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check.PARTS)[:2] == ["tests", "in_turns"], "it has never run, and an hour may be short"
    gib = 2**30
    found = {
        "sleeping": ["rollout"],
        "planned_on_devices": {"main": {"serving": 56 * gib, "training": 31 * gib}},
        "peak_bytes": 57.5 * gib,
        "timeline": [[1.0, 60.1 * gib], [11.0, 57.5 * gib], [11.1, 57.4 * gib], [12.0, 5 * gib], [22.0, 33 * gib]],
        "marks": {"started": 10.0, "step 1": 20.0, "step 2": 30.0},
        "steps": [{"time/sleep_s": 1.25, "time/wake_s": 2.5, "time/generate_s": 7}, {"time/sleep_s": 1}],
    }
    monkeypatch.setitem(check.PARTS, "in_turns", lambda of: {"64": found})
    out = tmp_path / "gpu"
    check.main(["--device", "cpu", "--tiny", "--out", str(out), "--only", "in_turns"])
    text = out.with_suffix(".md").read_text()
    assert "| 1 | 1.25 | 2.50 | 7.00 | - | - | - | 5.00 | 57.50 |" in text
    assert "| 2 | 1.00 | - | - | - | - | - | 33.00 | 33.00 |" in text
    assert "1.0: 60.1, 11.0: 57.5, 12.0: 5.0, 22.0: 33.0" in text, "points that differ by a GiB"
    assert "Roles that sleep while the actor trains: rollout." in text
    found["sleeping"] = []
    check.main(["--device", "cpu", "--tiny", "--out", str(out), "--only", "in_turns"])
    assert "none, so this record has no turns" in out.with_suffix(".md").read_text()
