"""Defaults that depend on the machine: planned from facts about machines that are not there."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu_machines import GIB, H100, QWEN, SETTINGS, chosen, loaded, machine, planned

import rlcore.plugins
from rlcore.cli import main
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, PlanError
from rlcore.plan import OldLogprobs, catalog, plan_to_json
from rlcore.plan.device_defaults import ON_CUDA
from rlcore.plugins import configure, planning
from rlcore.testing import write_prompts

EMBEDDED = {
    "actor.dtype": "bfloat16",
    "actor.compile": True,
    "actor.gradient_checkpointing": True,
    "actor.micro_batch_tokens": 16384,
    "rollout.backend": "hf",
    "rollout.max_rows": 256,
}


def values(config: RunConfig) -> dict[str, Any]:
    return {
        "actor.dtype": config.actor.dtype,
        "actor.compile": config.actor.compile,
        "actor.gradient_checkpointing": config.actor.gradient_checkpointing,
        "actor.micro_batch_tokens": config.actor.micro_batch_tokens,
        "rollout.backend": config.rollout.backend,
        "rollout.max_rows": config.rollout.max_rows,
    }


def test_without_a_gpu_the_defaults_are_those_of_the_sections() -> None:
    found = loaded(facts=machine(0))
    assert values(found.config) == values(RunConfig())
    assert found.config == loaded("cluster.device=cpu", facts=machine(0)).config
    assert [(choice.key, choice.value, choice.reason) for choice in found.choices] == [
        ("cluster.device", "cpu", "this machine has no GPU")
    ]
    assert found.saved["cluster"]["device"] == "cpu"
    assert found.origins["actor.dtype"] == "default"


BFLOAT16_CPU = machine(0, cpu_bfloat16="avx512_bf16")


def test_a_cpu_that_multiplies_bfloat16_trains_in_it() -> None:
    found = loaded(facts=BFLOAT16_CPU)
    assert chosen(found) == {"actor.dtype": "bfloat16"}
    assert values(found.config) == {**values(RunConfig()), "actor.dtype": "bfloat16"}
    assert found.config.actor.rounding == "stochastic"
    assert found.origins["actor.dtype"] == "default of the machine"
    assert "avx512_bf16" in next(choice.reason for choice in found.choices if choice.key == "actor.dtype")
    again = configure([found.saved], [], machine=machine(0))[1]
    assert again.config == found.config, "a run that resumes on another machine is the same run"
    with_gpu = loaded(facts=machine(1, cpu_bfloat16="avx512_bf16"))
    assert chosen(with_gpu) == chosen(loaded())


@pytest.mark.parametrize(
    "override",
    [
        "actor.dtype=float32",
        "actor.backend=null",
        "rollout.backend=null",
    ],
)
def test_float32_stays_where_it_is_set_or_others_sample_or_train(override: str) -> None:
    found = configure([], [*SETTINGS, override], ["null"], machine=BFLOAT16_CPU)[1]
    assert (found.config.actor.dtype, chosen(found)) == ("float32", {})


def test_a_set_format_is_listed_where_another_would_have_been_chosen() -> None:
    for facts, keys in ((BFLOAT16_CPU, ["cluster.device", "actor.dtype"]), (machine(0), ["cluster.device"])):
        found = loaded("actor.dtype=float32", facts=facts)
        assert [choice.key for choice in found.choices] == keys


def test_with_a_gpu_they_are_those_of_the_table() -> None:
    found = loaded()
    assert found.config.cluster.device == "cuda"
    assert chosen(found) == values(found.config) == EMBEDDED
    assert found.origins["actor.dtype"] == "default of the machine"
    assert found.saved["cluster"]["device"] == "cuda", "a run that resumes elsewhere says what it needs"
    again = configure([found.saved], [], machine=machine(0))[1]
    assert again.config == found.config, "saved values are the user's"
    assert {choice.key for choice in found.choices} == {"cluster.device", *EMBEDDED}


def test_asking_for_cuda_gives_the_same_defaults() -> None:
    assert loaded("cluster.device=cuda").config == loaded().config
    assert loaded("cluster.device=auto").config == loaded().config
    cuda = loaded("cluster.device=cuda").choices[0]
    assert (cuda.key, cuda.value, cuda.reason, cuda.set_by) == (
        "cluster.device", "cuda", "", "override 'cluster.device=cuda'",
    )  # fmt: skip
    assert values(loaded("cluster.device=cpu").config) == values(RunConfig())


@pytest.mark.parametrize("text", ["'13.0'", "None"])
def test_auto_is_cpu_where_torch_is_not_built_for_it(text: str) -> None:
    problem = "" if text != "None" else "torch 2.13.0+cpu is built without CUDA"
    facts = machine(1, gpu_problem=problem)
    assert loaded(facts=facts).config.cluster.device == ("cpu" if problem else "cuda")
    if problem:
        plan = planned(facts=facts)
        assert f"cluster.device=cpu: 1 GPU of this machine lie idle ({problem})" in plan.notes
        with pytest.raises(PlanError, match=r"^cluster\.device=cuda: torch 2\.13\.0\+cpu is built without CUDA; needs"):
            planned("cluster.device=cuda", facts=facts)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("actor.dtype=float16", "actor.dtype", "float16"),
        ("actor.compile=false", "actor.compile", False),
        ("actor.gradient_checkpointing=false", "actor.gradient_checkpointing", False),
        ("actor.micro_batch_tokens=100", "actor.micro_batch_tokens", 100),
        ("rollout.max_rows=7", "rollout.max_rows", 7),
        ("rollout.backend=hf", "rollout.backend", "hf"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_what_is_set_is_never_changed_and_said_to_be_set(override: str, key: str, value: object) -> None:
    found = loaded(override, facts=machine(8))
    assert values(found.config)[key] == value
    choice = next(choice for choice in found.choices if choice.key == key)
    assert (choice.value, choice.reason, choice.set_by) == (value, "", f"override '{override}'")


def test_a_preset_or_a_plugin_sets_too(tmp_path: Any) -> None:
    file = tmp_path / "sets_rows.py"
    file.write_text(
        "from rlcore import ConfigSection, hookimpl\nfrom dataclasses import dataclass\nRLCORE_API = '1'\n"
        "@dataclass(frozen=True)\nclass Settings:\n    pass\n"
        "@hookimpl\ndef rlcore_config_sections():\n"
        "    return [ConfigSection('sets_rows', Settings, {'rollout.max_rows': 3})]\n"
    )
    _, found = configure([], SETTINGS, [str(file)], machine=H100)
    assert found.config.rollout.max_rows == 3
    assert next(c.set_by for c in found.choices if c.key == "rollout.max_rows") == "plugin 'sets_rows'"


def test_layers_are_not_compiled_without_something_that_builds_kernels() -> None:
    found = loaded(facts=machine(1, compile_problem="triton is not installed"))
    assert not found.config.actor.compile
    why = next(choice.reason for choice in found.choices if choice.key == "actor.compile")
    assert why == "torch.compile has nothing to build kernels with: triton is not installed"
    with pytest.raises(ConfigError, match=r"^actor\.compile: "):
        loaded("actor.compile=true", facts=machine(0))


def test_replicas_of_a_sampler_that_was_not_chosen_by_the_user_are_refused_with_the_reason_for_it() -> None:
    with pytest.raises(PlanError) as caught:
        planned("rollout.replicas=2")
    why = next(choice.reason for choice in loaded().choices if choice.key == "rollout.backend")
    assert str(caught.value).endswith(
        f"(1 x 1); rollout.backend=hf was chosen because {why}; set rollout.backend, or leave the replicas out"
    )
    with pytest.raises(PlanError, match=r" has as many replicas and ranks \(1 x 1\)$"):
        planned("rollout.replicas=2", "rollout.backend=hf")


def test_tf32_is_for_float32_and_makes_log_probs_of_the_sampler_others() -> None:
    assert "actor.tf32" not in chosen(loaded())
    found = loaded("actor.dtype=float32")
    assert (chosen(found)["actor.tf32"], found.config.actor.tf32) == (True, True)
    several = ("actor.dtype=float32", "actor.epochs=2")
    plan = planned(*several)
    assert plan.schedule.old_logprobs is OldLogprobs.PASS
    assert any(note.startswith("actor.tf32=true: recorded log-probs differ") for note in plan.notes)
    exact = planned(*several, "actor.tf32=false")
    assert exact.schedule.old_logprobs is OldLogprobs.SAMPLED
    assert not any("recorded log-probs differ" in note for note in exact.notes)
    with pytest.raises(ConfigError, match=r"actor\.tf32.*used only when cluster\.device == 'cuda'"):
        loaded("actor.tf32=true", facts=machine(0))


@pytest.mark.parametrize(
    ("gpus", "ranks", "backend", "why"),
    [
        (1, 1, "vllm", "it is installed, and fits next to the actor; it pages"),
        (2, 1, "vllm", "it is installed"),
        (2, 2, "hf", "'vllm' needs devices in addition to the actor's 2; there are 2"),
        (8, 4, "vllm", "it is installed"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_an_installed_backend_for_gpus_is_taken_where_it_has_devices(
    gpus: int, ranks: int, backend: str, why: str
) -> None:
    plan = planned(f"actor.data_parallel={ranks}", facts=machine(gpus))
    assert plan.config.rollout.backend == backend
    assert ("vllm" in plan.config.plugins) is (backend == "vllm"), "its plugin is enabled with it"
    choice = next(choice for choice in plan.choices if choice.key == "rollout.backend")
    assert choice.reason.startswith(why)
    assert ("vllm" in plan.loaded.saved.get("plugins", {})) is (backend == "vllm")


@pytest.mark.usefixtures("vllm")
def test_a_backend_for_gpus_is_not_taken_on_a_cpu_nor_for_what_it_cannot_sample() -> None:
    assert loaded(facts=machine(0)).config.rollout.backend == "hf"
    assert loaded("cluster.device=cpu", facts=machine(8)).config.plugins == {}
    found = loaded("actor.dtype=float64", facts=machine(8))
    assert found.config.rollout.backend == "hf"
    assert "does not sample for actor.backend=hf, actor.dtype=float64" in found.choices[-2].reason
    assert found.choices[-2].key == "rollout.backend"


def test_without_a_backend_for_gpus_the_plan_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "find_spec", lambda _: None)
    choice = next(choice for choice in loaded(facts=machine(8)).choices if choice.key == "rollout.backend")
    assert choice.value == "hf"
    assert choice.reason.startswith(
        "no engine for GPUs is enabled: 'vllm' comes with `pip install './plugins/vllm[engine]'`"
    )


def test_a_backend_is_installed_when_its_plugin_and_its_library_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert rlcore.plugins._installed_for_gpus() == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: sys)
    assert rlcore.plugins._installed_for_gpus() == [("vllm", "vllm")]
    monkeypatch.setattr(rlcore.plugins, "installed", lambda: ())
    assert rlcore.plugins._installed_for_gpus() == []


@pytest.mark.slow
def test_a_micro_batch_fills_part_of_what_is_free_and_no_more() -> None:
    def tokens(free: float, **more: Any) -> int:
        facts = machine(1, **more)
        return loaded(facts=replace(facts, gpu_free_bytes=int(free * GIB))).config.actor.micro_batch_tokens

    default = RunConfig().actor.micro_batch_tokens
    assert tokens(79) == 16384, "no more than pays"
    assert default < tokens(38.0) < 16384
    assert tokens(38.0) % 1024 == 0
    assert tokens(37.0) < tokens(38.0) < tokens(39.0)
    assert tokens(30) == default, "less than the default is for the user to ask for"
    assert tokens(79, parameters=None, shape=QWEN) == default
    assert tokens(79, shape=None) == default
    unknown = replace(H100, gpu_memory_bytes=None, gpu_free_bytes=None)
    assert loaded(facts=unknown).config.actor.micro_batch_tokens == default
    for free in (34.0, 37.0, 38.0, 40.0, 79.0):
        facts = replace(H100, gpu_free_bytes=int(free * GIB))
        plan = planned("data.max_prompt_tokens=1024", "rollout.max_tokens=1024", facts=facts)
        assert plan.memory_bytes["actor"] <= free * GIB, "what is chosen is not refused"


def test_more_rows_are_decoded_where_their_keys_and_values_fit() -> None:
    def rows(free: float, tokens: int, *more: str) -> int:
        facts = replace(machine(2), gpu_free_bytes=int(free * GIB))
        return loaded(f"rollout.max_tokens={tokens}", *more, facts=facts).config.rollout.max_rows

    assert [rows(79, tokens) for tokens in (1024, 6000, 12000, 24000)] == [256, 256, 128, 64]
    assert rows(36, 1024) == 128
    plan = planned("rollout.max_tokens=12000")
    assert plan.config.rollout.max_rows == 128
    assert "rollout.max_rows" not in chosen(loaded("rollout.max_tokens=24000"))
    assert loaded(facts=replace(H100, shape=None)).config.rollout.max_rows == 256


@pytest.mark.usefixtures("vllm")
def test_replicas_page_their_keys_and_values_so_memory_does_not_bound_their_rows() -> None:
    assert loaded("rollout.max_tokens=24000", facts=machine(2)).config.rollout.max_rows == 256


@pytest.mark.parametrize(
    ("gpus", "overrides", "note"),
    [
        (1, (), ""),
        (2, (), "2 GPUs, 1 used: raise actor.data_parallel or rollout.replicas"),
        (2, ("actor.data_parallel=2",), ""),
        (8, ("actor.data_parallel=2",), "8 GPUs, 2 used"),
        (8, ("cluster.device=cpu",), "cluster.device=cpu: 8 GPUs of this machine lie idle"),
        (0, (), ""),
    ],
)
def test_idle_gpus_are_noted(gpus: int, overrides: tuple[str, ...], note: str) -> None:
    found = [line for line in planned(*overrides, facts=machine(gpus)).notes if "GPU" in line]
    assert [line.startswith(note) for line in found] == [True] * bool(note)


def test_memory_that_others_have_taken_is_not_counted_with() -> None:
    notes = planned(facts=replace(H100, gpu_free_bytes=50 * GIB)).notes
    assert "30.0 of the 80.0 GiB of a device are taken by other processes: the plan counts with the 50.0 GiB that" in (
        " ".join(notes)
    )
    assert not any("taken by other" in note for note in planned().notes)
    small = replace(H100, gpu_free_bytes=20 * GIB)
    with pytest.raises(PlanError, match=r"role 'actor' needs about .* a device has 20\.0 free of 80\.0; set actor"):
        planned(facts=small)
    shared = replace(H100, gpu_free_bytes=32 * GIB)
    with pytest.raises(PlanError, match=r"memory: device 0 needs about .*, it has 32\.0 free of 80\.0"):
        planned("algo.kl.placement=loss", facts=shared)


def test_cuda_where_there_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*SETTINGS, "cluster.device=cuda"]
    assert main(["plan", *overrides]) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    assert "cluster.device=cuda: this machine has no NVIDIA GPU; needs a GPU" in line
    assert line.endswith("or choose cluster.device=cpu")


def test_a_rule_that_a_choice_fulfils_is_checked_with_it() -> None:
    assert loaded("model.attention=flash_attention_2").config.actor.dtype == "bfloat16"
    assert loaded("actor.rounding=nearest").config.actor.rounding == "nearest"
    with pytest.raises(ConfigError, match=r"flash_attention_2 needs cluster\.device=cuda"):
        loaded("model.attention=flash_attention_2", facts=machine(0))


@pytest.mark.usefixtures("vllm")
def test_the_plan_shows_every_choice_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    facts = machine(2)
    plan = planned("rollout.max_rows=7", facts=facts)
    shown = plan_to_json(plan)["choices"]
    assert json.loads(json.dumps(shown)) == shown
    assert shown["rollout.max_rows"] == {"value": 7, "reason": "", "set_by": "override 'rollout.max_rows=7'"}
    assert shown["actor.dtype"]["value"] == "bfloat16"
    assert set(shown) == {"cluster.device", "cluster.threads", "rollout.weight_sync", *EMBEDDED}
    monkeypatch.setattr(rlcore.plugins, "machine_facts", lambda: facts)
    monkeypatch.setattr(planning, "gather_facts", lambda config, machine: facts)
    write_prompts(tmp_path / "prompts.jsonl", 2)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *SETTINGS, "rollout.max_rows=7"]) == 0
    text = capsys.readouterr().out
    for row in ON_CUDA:
        assert (row.key in text) is (row.key in shown), row.key
    assert "set by override 'rollout.max_rows=7'" in " ".join(text.split())


def test_the_page_has_the_rows_of_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows == [row.key for row in ON_CUDA] + ["rollout.weight_sync", "cluster.threads"]
