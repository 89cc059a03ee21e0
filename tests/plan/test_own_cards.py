"""Plans on a machine whose GPUs the driver names: the estimates that `--on` gives, without naming the machine."""

import json
import re
from pathlib import Path

import pytest
from planned_machines import GIB, QWEN_7B, planned, refused, settings_of_7b

from rlcore.cli import main
from rlcore.plan.machine_cards import CARDS, DRIVER_NAMES, card_in_all
from rlcore.runtime.gpus import Gpu, Gpus

Capture = pytest.CaptureFixture[str]
H100 = "NVIDIA H100 80GB HBM3"
SIZE = int(0.98 * 80 * GIB)
"""The memory that `--on` assumes for a card of 80 GB."""
ON_ONE = ("rollout.backend=hf", "rollout.max_tokens=256")


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """A run of a small model that one device holds."""
    found = settings_of_7b(tmp_path)
    _write_model(tmp_path, {"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864})
    return found


def _write_model(tmp_path: Path, sizes: dict[str, int]) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_7B | sizes))


def _machine(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = Gpus(tuple(Gpu(f"GPU-{index}", SIZE, SIZE, name) for index, name in enumerate(names)))
    monkeypatch.setattr("rlcore.runtime.machine.find_gpus", lambda: found)


@pytest.mark.parametrize(
    ("name", "mib", "card"),
    [
        (H100, 81559, "H100-80GB"),
        ("H100 80GB HBM3", 81559, "H100-80GB"),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIE-80GB"),
        ("NVIDIA H100 NVL", 95830, "H100-NVL-94GB"),
        ("NVIDIA H200", 143771, "H200-141GB"),
        ("NVIDIA A100-SXM4-80GB", 81920, "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100-PCIE-80GB"),
        ("NVIDIA B200", 183359, "B200-180GB"),
        ("NVIDIA GH200 480GB", 97871, "GH200-96GB"),
        ("NVIDIA L40S", 46068, "L40S-48GB"),
        ("NVIDIA L4", 23034, "L4-24GB"),
        ("NVIDIA GeForce RTX 4090", 24564, "RTX4090-24GB"),
        ("NVIDIA GeForce RTX 4090", 49140, ""),
        ("NVIDIA GeForce RTX 4090 D", 24564, ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, ""),
        ("NVIDIA A10G", 23028, ""),
        ("NVIDIA H200 NVL", 143771, ""),
        ("NVIDIA H20-3e", 143771, ""),
        ("NVIDIA GH200 144G HBM3e", 146831, ""),
        ("NVIDIA H100", 97871, ""),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984, ""),
        (H100, 9984, ""),
        ("", 81559, ""),
    ],
)
def test_a_card_is_known_by_the_whole_name_that_the_driver_reports_and_by_its_memory(
    name: str, mib: int, card: str
) -> None:
    assert card_in_all([(name, mib * 2**20)] * 2) == card
    assert card_in_all([(name, None)]) == ""


def test_every_card_has_a_name_of_the_driver_and_different_cards_have_no_name_together() -> None:
    assert set(DRIVER_NAMES.values()) == set(CARDS)
    assert card_in_all([]) == card_in_all([(H100, 80 * GIB), ("NVIDIA H200", 140 * GIB)]) == ""


def test_a_plan_on_known_cards_has_the_estimates_of_the_same_machine_elsewhere(
    settings: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, H100, H100)
    lengths = ("--prompt-tokens", "100", "--response-tokens", "200")
    here = planned(capsys, *settings, *ON_ONE, *lengths)["on"]
    there = planned(capsys, *settings, *ON_ONE, *lengths, "--on", "2xH100-80GB")["on"]
    assert here["machine"] == "2xH100-80GB"
    for key in ("phases", "memory", "step_s", "assumptions"):
        assert here[key] == there[key], key
    assert here["settings"], "one of two cards is used"
    assert planned(capsys, *settings, *ON_ONE)["on"]["step_s"] != here["step_s"], "lengths count without --on"


def test_the_tables_have_the_phases_and_one_time_of_a_step(
    settings: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _machine(monkeypatch, H100)
    assert main(["plan", *settings, *ON_ONE]) == 0
    shown = capsys.readouterr().out
    for words in ("seconds of a step on 1xH100-80GB", "bound by", "assumed: H100-80GB: 989 TFLOP/s"):
        assert words in shown
    step = re.search(r"a step takes about (\d+) s on 1xH100-80GB", shown)
    assert step, shown
    assert re.search(rf"time of a step +about {step[1]} s: the phases are below", shown)
    assert "15 TFLOP/s" not in shown
    assert main(["train", "--dry-run", *settings, *ON_ONE]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("names", "more"),
    [
        (("NVIDIA H100 80GB HBM3e",), ()),
        ((H100, "NVIDIA H200"), ()),
        (("",), ()),
        ((H100,), ("cluster.device=cpu", "actor.lora.enabled=true")),
        ((H100,), ("--plugin", "ray", "plugins.ray.address=auto", "cluster.backend=ray")),
    ],
    ids=["unknown", "different", "unnamed", "cpu", "elsewhere"],
)
def test_other_devices_get_no_estimate(
    names: tuple[str, ...],
    more: tuple[str, ...],
    settings: list[str],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _machine(monkeypatch, *names)
    found = planned(capsys, *settings, *ON_ONE, *more)
    assert found["pools"]
    assert "on" not in found


def test_an_error_says_the_seconds_of_the_settings_that_it_advises_for_known_cards(
    settings: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_model(tmp_path, {})
    _machine(monkeypatch, *[H100] * 8)
    engine = ("--plugin", "vllm", "rollout.backend=vllm")
    line = refused(capsys, *settings, *engine)
    found = re.search(r"shard it over devices \(([^)]*)\), or", line)
    assert found, line
    plan = planned(capsys, *settings, *engine, *found[1].split())
    assert line.endswith(f"; with these shards a step takes about {plan['on']['step_s']:,.0f} s")
    _machine(monkeypatch, *["NVIDIA H100 80GB HBM3e"] * 8)
    assert refused(capsys, *settings, *engine).endswith("or take a smaller model")
