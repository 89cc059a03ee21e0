"""The other side of `make gpu-check`: TRL's settings on CUDA and on a CPU, and the micro-batch that it is given."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SPEC = {
    "model": "m",
    "dtype": "bfloat16",
    "prompts": ["p"],
    "prompts_per_step": 2,
    "samples": 16,
    "new_tokens": 8,
    "micro_batch": 1,
    "lr": 1e-6,
    "threads": 1,
    "seed": 0,
    "reward": "letter_share",
    "work_dir": "w",
}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the benchmarks, with fakes for libraries of TRL's environment."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    trl, datasets = ModuleType("trl"), ModuleType("datasets")
    trl.__dict__.update(GRPOConfig=lambda **settings: SimpleNamespace(**settings), GRPOTrainer=FakeTrainer)
    datasets.__dict__.update(Dataset=SimpleNamespace(from_list=list))
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    yield import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
            del sys.modules[name]


class FakeTrainer:
    """Stands for TRL's: it keeps its settings."""

    def __init__(self, args: Any = None, **others: Any) -> None:
        self.args = args


class FakePeer:
    """A comparison whose sides take these seconds per step, by micro-batch; a text is the reason of a failure."""

    def __init__(self, on_cuda: bool, steps: dict[int, float | str]) -> None:
        self.on_cuda, self.steps, self.started = on_cuda, steps, list[int]()

    def trl(self, micro_batch: int) -> Any:
        self.started.append(micro_batch)
        return SimpleNamespace(name="TRL")


def settings_in(modules: Any, spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    side = modules("trl_side")
    monkeypatch.setattr(side, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *of, **how: None))
    monkeypatch.setattr(side.torch, "set_num_threads", lambda number: None)
    return side.TrlSide(None, spec).trainer.args


@pytest.mark.slow
def test_trl_has_its_own_mixed_precision_and_checkpoints_on_cuda_and_neither_on_a_cpu(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = modules("gpu_peer")
    monkeypatch.setattr(peer, "_has_vllm", lambda: True)
    found = {}
    for device in ("cpu", "cuda"):
        comparison = object.__new__(peer.Peer)
        comparison._options, comparison._endless = SimpleNamespace(device=device), Path("endless")
        monkeypatch.setattr(peer.Peer, "peer_spec", lambda self, rows: {**SPEC, "bf16": False, "micro_batch": rows})
        found[device] = comparison.trl_spec(2)
    assert found["cpu"] == {**SPEC, "bf16": False, "micro_batch": 2, "vllm": False, "model": "endless", "lengths": None}
    on_cpu = settings_in(modules, found["cpu"], monkeypatch)
    assert (on_cpu.bf16, on_cpu.gradient_checkpointing) == (False, False)
    assert on_cpu.model_init_kwargs == {"dtype": "bfloat16"}
    on_cuda = settings_in(modules, {**found["cuda"], "device": "cuda"}, monkeypatch)
    assert (on_cuda.bf16, on_cuda.gradient_checkpointing) == (True, True)
    assert on_cuda.model_init_kwargs == {"dtype": "float32"}, "masters; autocast computes in bfloat16"
    assert on_cuda.vllm_mode == "colocate"
    assert on_cuda.per_device_train_batch_size * on_cuda.gradient_accumulation_steps == 32


@pytest.mark.parametrize(("has_vllm", "name"), [(True, "TRL"), (False, "TRL without vLLM")])
def test_trl_whose_environment_has_no_vllm_samples_without_it_and_says_so(
    modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_vllm: bool, name: str
) -> None:
    peer = modules("gpu_peer")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexit {int(not has_vllm)}\n")
    python.chmod(0o755)
    monkeypatch.setattr(peer, "TRL_PYTHON", python)
    monkeypatch.setattr(peer, "Side", lambda name, python, program, spec, threads: (name, spec))
    monkeypatch.setattr(peer.Peer, "peer_spec", lambda self, rows: dict(SPEC))
    monkeypatch.setattr(peer.Peer, "threads", 1, raising=False)
    comparison = object.__new__(peer.Peer)
    comparison._options, comparison._endless = SimpleNamespace(device="cuda"), Path("endless")
    found, spec = comparison.trl(2)
    assert (found, spec["vllm"]) == (name, has_vllm)


@pytest.mark.slow
def test_settings_of_other_comparisons_are_what_their_results_were_made_with(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings_in(modules, SPEC, monkeypatch)
    assert (found.bf16, found.gradient_checkpointing, found.use_cpu) == (False, False, True)
    assert "use_vllm" not in vars(found)


@pytest.mark.parametrize(
    ("on_cuda", "steps", "started", "best", "lines"),
    [
        (True, {1: 9.0, 2: 5.0, 4: 7.0}, [1, 2, 4, 2], 2, ["1 | 9 |", "2 | 5 |", "4 | 7 |", "2 | 5 |"]),
        (True, {1: 9.0, 2: "no memory"}, [1, 2, 1], 1, ["1 | 9 |", "2 | failed: no memory |", "1 | 9 |"]),
        (True, {1: "no memory"}, [1], None, ["- | failed: no memory |"]),
        (False, {4: 3.0}, [4], 4, ["4 | 3 |"]),
    ],
    ids=["fastest", "memory", "none", "cpu"],
)
def test_the_fastest_micro_batch_is_taken_and_one_that_does_not_fit_is_a_line(
    on_cuda: bool,
    steps: dict[int, float | str],
    started: list[int],
    best: int | None,
    lines: list[str],
    modules: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = modules("gpu_peer")

    def measured(comparison: FakePeer, side: Any, micro_batch: int, rounds: int) -> dict[str, Any]:
        taken = comparison.steps[micro_batch]
        if isinstance(taken, str):
            raise peer.SideError(taken)
        return {name: {"median": taken, "n": rounds} for name in peer.FIGURES}

    monkeypatch.setattr(peer, "_steps", measured)
    comparison = FakePeer(on_cuda, steps)
    name, found = peer._fastest(comparison, 3)
    assert (name, found.get("micro_batch"), comparison.started) == ("TRL", best, started)
    assert best is None or found["step_s"]["n"] == 3
    rows = [line for line in peer.table({"1.5B": {"TRL": found}}) if "TRL" in line]
    assert len(rows) == len(lines)
    for row, text in zip(rows, lines, strict=True):
        assert f" {text}" in row, rows
        assert row.count("|") == 7, row


@pytest.mark.slow
def test_a_side_without_memory_says_so_before_it_ends(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, channel = modules("trl_side"), modules("channel")
    sent: list[Any] = []

    class Full:
        def __init__(self, *of: Any) -> None:
            raise side.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB. GPU 0 has ...")

    monkeypatch.setattr(side, "TrlSide", Full)
    monkeypatch.setattr(side, "Channel", lambda: SimpleNamespace(receive=lambda: SPEC, send=sent.append))
    side.main()
    assert sent == [{"out_of_memory": "CUDA out of memory"}]
    program = tmp_path / "full.py"
    program.write_text(f"input()\nprint({json.dumps(json.dumps(sent[0]))}, flush=True)\ninput()\n")
    with (
        channel.Side("TRL", Path(sys.executable), program, {}, 1) as full,
        pytest.raises(channel.SideError, match="TRL: CUDA out of memory"),
    ):
        full.answer(30)
