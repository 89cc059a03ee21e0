"""Refusals of `rlcore plan --on` that lead on: what they advise is accepted."""

import json
import re
from pathlib import Path

import pytest
from planned_machines import GIB, QWEN_14B, QWEN_32B, planned, refused, settings_of_7b


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    return settings_of_7b(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [(), ("--plugin", "vllm", "rollout.backend=vllm")])
def test_a_model_that_needs_several_devices_is_planned_in_two_steps_by_what_the_errors_say(
    backend: tuple[str, ...], settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_14B))
    line = refused(capsys, *settings, *backend, "--on", "8xH100-80GB")
    found = re.search(r"role 'actor' needs about 279\.\d GiB .* shard it over devices \(([^)]*)\), or", line)
    assert found, line
    advised = found[1].split()
    assert "actor.sharding=fsdp2" in advised
    memory = planned(capsys, *settings, *backend, "--plugin", "vllm", *advised, "--on", "8xH100-80GB")["on"]["memory"]
    assert all(size < 78.4 * GIB for size in memory["main"].values()), memory


@pytest.mark.slow
def test_of_an_embedded_sampler_no_shards_help_and_the_error_says_what_does(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_14B))
    sharded = ("actor.data_parallel=8", "actor.sharding=fsdp2", "rollout.backend=hf")
    line = refused(capsys, *settings, *sharded, "--on", "8xH100-80GB")
    assert "shard it over devices" not in line
    assert "choose a rollout.backend that is not embedded (ranks that sample hold all weights" in line
    assert "with rollout.replicas=8 replicas share the actor's devices)" in line


@pytest.mark.slow
def test_offload_is_advised_where_a_role_fits_with_it_and_not_where_it_does_not(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_32B))
    sharded = ("actor.data_parallel=8", "actor.sharding=fsdp2", "--plugin", "vllm", "rollout.backend=vllm")
    apart = (*sharded, "rollout.replicas=2", "plugins.vllm.tensor_parallel=4", "rollout.max_tokens=2048")
    line = refused(capsys, *settings, *apart, "--on", "16xH100-80GB")
    assert line.startswith("rlcore: role 'actor' needs about 89.1 GiB a rank, a device has 78.4")
    assert "set actor.lora.enabled=true or actor.offload=true, " in line
    on = planned(capsys, *settings, *apart, "actor.offload=true", "--on", "16xH100-80GB")["on"]
    assert 76 * GIB < on["memory"]["main"]["update"] < 78.4 * GIB
    taking_turns = (*sharded, "rollout.replicas=8", "rollout.max_tokens=2048")
    line = refused(capsys, *settings, *taking_turns, "--on", "8xH100-80GB")
    assert "offload" not in line, "what a sleeping engine keeps leaves no room for it"
    line = refused(capsys, *settings, "--plugin", "vllm", "--on", "1xH100-80GB")
    assert "offload" not in line, "weights and gradients alone are too large"


@pytest.mark.slow
def test_replicas_of_a_sampler_that_was_chosen_to_be_embedded_are_refused_with_the_reason_for_the_choice(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_32B))
    counts = ("actor.data_parallel=8", "actor.sharding=fsdp2", "rollout.replicas=8", "--plugin", "vllm")
    line = refused(capsys, *settings, *counts, "--on", "8xH100-80GB")
    assert "is served inside 'actor'" in line
    assert (
        "; rollout.backend=hf was chosen because 'vllm' needs devices in addition to the actor's 8; there are 8: "
        in line
    )
    assert line.endswith("; set rollout.backend, or leave the replicas out")
    named = refused(capsys, *settings, *counts, "rollout.backend=hf", "--on", "8xH100-80GB")
    assert named.endswith("has as many replicas and ranks (1 x 8)")
