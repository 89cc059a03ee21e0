"""Refusals of `rlcore plan --on` that lead on: what they advise is accepted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from planned_machines import GIB, QWEN_7B, QWEN_14B, QWEN_32B, planned, refused, settings_of_7b

from rlcore.cli import main
from rlcore.plugins import planning

Capture = pytest.CaptureFixture[str]


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
@pytest.mark.parametrize("backend", [(), ("--plugin", "vllm", "rollout.backend=vllm")], ids=["chosen", "vllm"])
@pytest.mark.parametrize("model", ["7B", "14B", "32B"])
@pytest.mark.parametrize("machine", ["8xH100-80GB", "2x8xH100-80GB"])
def test_with_exactly_the_settings_that_an_error_names_the_plan_is_accepted(
    machine: str, model: str, backend: tuple[str, ...], settings: list[str], tmp_path: Path, capsys: Capture
) -> None:
    shape = {"7B": QWEN_7B, "14B": QWEN_14B, "32B": QWEN_32B}[model]
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    cluster = ("--plugin", "ray", "plugins.ray.address=auto") if machine.startswith("2x") else ()
    line = refused(capsys, *settings, *backend, *cluster, "--on", machine)
    found = re.search(r"shard it over devices \(([^)]*)\), or", line)
    assert found, line
    plan = planned(capsys, *settings, *backend, *cluster, *found[1].split(), "--on", machine)
    for sizes in plan["on"]["memory"].values():
        assert max(sizes.values()) < 78.4 * GIB
    assert line.endswith(f"; with these shards a step takes about {plan['on']['step_s']:,.0f} s")
    devices = {gpu for pool in plan["pools"].values() for gpu in pool["gpus"]}
    assert len(devices) == (16 if machine.startswith("2x") else 8), "the fastest layout leaves no card unused"
    if model == "32B":
        assert "plugins.vllm.tensor_parallel=" in found[1]
        assert plan["colocated_roles"] == ["rollout"]


@pytest.mark.slow
def test_an_error_has_the_seconds_for_the_stated_lengths_and_only_a_refusal_of_the_run_itself_seeks_advice(
    settings: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_14B))
    lengths = ("--prompt-tokens", "900", "--response-tokens", "1000", "--on", "8xH100-80GB")
    line = refused(capsys, *settings, *lengths)
    found = re.search(r"shard it over devices \(([^)]*)\), or", line)
    assert found, line
    sought: list[Any] = []
    monkeypatch.setattr(planning, "with_settings_that_fit", lambda *of: sought.append(of) or of[0])
    plan = planned(capsys, *settings, *found[1].split(), *lengths)
    assert line.endswith(f" about {plan['on']['step_s']:,.0f} s")
    assert sought == [], "plans that are compared in a table are refused without advice"
    refused(capsys, *settings, *lengths)
    assert len(sought) == 1


def settings_of_32b(ranks: int, replicas: int, devices: int) -> list[str]:
    counts = [f"actor.data_parallel={ranks}", f"rollout.replicas={replicas}", f"plugins.vllm.tensor_parallel={devices}"]
    return [*counts, "actor.sharding=fsdp2", "--plugin", "vllm", "rollout.backend=vllm"]


@pytest.mark.slow
def test_the_devices_of_a_replica_have_their_part_of_its_weights_in_every_phase(
    settings: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_32B))
    tables = {}
    for devices in (4, 8):
        layout = settings_of_32b(16, 16 // devices, devices)
        tables[devices] = planned(capsys, *settings, *layout, "--on", "2x8xH100-80GB")["on"]["memory"]["main"]
    weights = 2 * 32.76e9
    assert tables[4]["hand-over"] - tables[8]["hand-over"] == pytest.approx(weights / 4 - weights / 8, rel=1e-3)
    assert tables[4]["update"] == tables[8]["update"], "while it sleeps it has none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "why"),
    [
        ((8, 2, 3), "plugins.vllm.tensor_parallel=3: the model has 40 heads of attention; needs a number that divides"),
        ((15, 3, 5), "plugins.vllm.tensor_parallel=5: the model has 8 key heads; needs a number that divides them or"),
        ((16, 1, 16), "plugins.vllm.tensor_parallel=16: the model has 40 heads"),
    ],
)
def test_devices_of_a_replica_that_do_not_divide_the_heads_of_the_model_are_refused(
    counts: tuple[int, int, int], why: str, settings: list[str], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_32B))
    assert why in refused(capsys, *settings, *settings_of_32b(*counts), "--on", "2x8xH100-80GB")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 5])
def test_the_devices_of_a_rank_are_on_one_node(
    devices: int, settings: list[str], tmp_path: Path, capsys: Capture
) -> None:
    shape = QWEN_32B | {"num_attention_heads": 40, "num_key_value_heads": 40}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    line = refused(capsys, *settings, *settings_of_32b(20, 20 // devices, devices), "--on", "5x4xH100-80GB")
    assert f"a rank has {devices} devices, and a node 4" in line
    assert "needs a number that divides 4, and more replicas or ranks, or plugins.vllm.nodes above 1; its" in line


@pytest.mark.slow
def test_an_engine_larger_than_a_node_has_a_rank_on_each_of_several(
    settings: list[str], tmp_path: Path, capsys: Capture
) -> None:
    shape = QWEN_32B | {"num_attention_heads": 48, "num_key_value_heads": 16}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    engine = (*settings, *settings_of_32b(16, 1, 16))
    line = refused(capsys, *engine, "--on", "2x8xH100-80GB")
    assert "a rank has 16 devices, and a node 8" in line
    assert "or plugins.vllm.nodes above 1" in line
    over_two = planned(capsys, *engine, "plugins.vllm.nodes=2", "--on", "2x8xH100-80GB")
    on_one = planned(capsys, *engine, "--on", "16xH100-80GB")
    requests = [plan["workers"]["rollout"] for plan in (over_two, on_one)]
    assert [(request["ranks"], request["gpus"]) for request in requests] == [(2, 8.0), (1, 16.0)]
    memory = [plan["on"]["memory"]["main"]["sample"] for plan in (over_two, on_one)]
    assert memory[0] == memory[1]
    seconds = [plan["on"]["phases"]["sample"]["seconds"] for plan in (over_two, on_one)]
    assert 1.1 * seconds[1] < seconds[0] < 1.5 * seconds[1]


@pytest.mark.slow
def test_no_lengths_are_advised_where_the_weights_alone_are_too_large(
    settings: list[str], tmp_path: Path, capsys: Capture
) -> None:
    shape = QWEN_32B | {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    line = refused(capsys, *settings, "--on", "2x8xH100-80GB")
    assert line.endswith("; set actor.lora.enabled=true, or take a smaller model")
    line = refused(capsys, *settings, "actor.lora.enabled=true", "--on", "2x8xH100-80GB")
    found = re.search(r"shard it over devices \(([^)]*)\), or", line)
    assert found, line
    assert planned(capsys, *settings, "actor.lora.enabled=true", *found[1].split(), "--on", "2x8xH100-80GB")


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


@pytest.mark.parametrize("number", ["-5", "0", "1.5", "many"])
def test_a_length_that_is_not_a_number_of_tokens_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--prompt-tokens", "--response-tokens"):
        with pytest.raises(SystemExit):
            main(["plan", "c.yaml", "--on", "8xH100-80GB", f"{option}={number}"])
        line = f"argument {option}: found '{number}'; needs a number of tokens, 1 or more"
        assert capsys.readouterr().err.startswith(f"rlcore: {line}")
