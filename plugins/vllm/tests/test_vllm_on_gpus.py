"""Decisions of the plugin for an engine on a GPU: its length, and the allocator's settings."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rlcore_vllm import engine
from rlcore_vllm.engine import rollout_arguments

from rlcore import WorkerError
from rlcore.plan import RunPlan

Planned = Callable[..., RunPlan]
SAMPLES = "rollout.backend=vllm"


def engine_arguments(plan: RunPlan, device: str) -> dict[str, Any]:
    """The arguments that the engine of the rollout gets."""
    return rollout_arguments(plan.config, plan.config.plugins["vllm"], device)


@pytest.mark.parametrize(
    ("more", "device", "length"),
    [
        ((), "cuda", 1024 + 512),
        ((), "cpu", None),
        (("plugins.vllm.max_model_len=99",), "cuda", 99),
        (("plugins.vllm.max_model_len=99",), "cpu", 99),
        (("eval.sources.held.path=prompts.jsonl", "eval.max_tokens=700"), "cuda", 1024 + 700),
        (("eval.sources.held.path=prompts.jsonl",), "cuda", 1024 + 512),
        (("rollout.max_tokens=3071",), "cuda", 4095),
        (("rollout.max_tokens=3072",), "cuda", None),
        (("rollout.agent=agent_loop", "plugins.agent_loop.agent.fn=json:dumps"), "cuda", None),
    ],
)
def test_on_a_gpu_an_engine_has_room_for_the_longest_prompt_and_response(
    planned: Planned, tmp_path: Path, more: tuple[str, ...], device: str, length: int | None
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 4096}')
    plan = planned(SAMPLES, f"model.path={tmp_path / 'model'}", *more, device=device)
    assert engine_arguments(plan, "cuda:0" if device == "cuda" else "cpu").get("max_model_len") == length
    is_noted = any(f"plugins.vllm.max_model_len is {length}," in note for note in plan.notes)
    assert is_noted is (length is not None and not any("max_model_len" in override for override in more))


@pytest.mark.parametrize("text", ["", "{}", '{"max_position_embeddings": "many"}'])
def test_a_model_that_does_not_say_its_window_is_asked_for_what_is_needed(
    planned: Planned, tmp_path: Path, text: str
) -> None:
    (tmp_path / "model").mkdir()
    if text:
        (tmp_path / "model" / "config.json").write_text(text)
    plan = planned(SAMPLES, f"model.path={tmp_path / 'model'}")
    assert engine_arguments(plan, "cuda:0")["max_model_len"] == 1024 + 512


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_kept_for_trainers_and_removed_for_an_engine_that_sleeps(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert not any("expandable" in note for note in planned(SAMPLES).notes)
    monkeypatch.setenv(name, "expandable_segments:True,max_split_size_mb:64")
    assert any(f"expandable_segments of {name} is kept for trainers" in note for note in planned(SAMPLES).notes)
    monkeypatch.setattr(engine, "check_installed", refuse)
    with pytest.raises(WorkerError, match="stop here"):
        engine.open_engine({}, "rollout[0]")
    assert os.environ[name] == "max_split_size_mb:64"
    assert set(os.environ) & {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} == {name}


@pytest.mark.parametrize(("device", "threads"), [("cpu", "8"), ("cuda:0", None)])
def test_an_engine_on_a_gpu_takes_its_own_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, device: str, threads: str | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # as the worker's process has it
    monkeypatch.setattr(engine, "check_installed", refuse)
    with pytest.raises(WorkerError, match="stop here"):
        engine.open_engine({}, "rollout[0]", engine.engine_threads(device, 8))
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_variable_of_which_nothing_is_left_does_not_hide_the_other(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "expandable_segments:True")
    monkeypatch.setattr(engine, "check_installed", refuse)
    with pytest.raises(WorkerError, match="stop here"):
        engine.open_engine({}, "rollout[0]")
    assert variable not in os.environ


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_an_engine_on_a_gpu_computes_as_many_tokens_at_a_time_as_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]

    contexts: list[Any] = []

    class Parsed:
        def create_engine_config(self, usage_context: Any) -> None:
            contexts.append(usage_context)
            raise WorkerError("stop here")

    monkeypatch.setattr(engine, "engine_arguments", lambda *arguments: Parsed())
    for device in ("cpu", "cuda:0"):
        with pytest.raises(WorkerError, match="stop here"):
            engine.open_engine({"model": "m"} | engine.device_arguments(device, 1.0, 0.5), "rollout[0]")
    assert contexts[0] is None
    assert contexts[1] in EngineArgs.get_batch_defaults(1)[0]


def refuse(who: str) -> None:
    raise WorkerError(f"{who}: stop here")
