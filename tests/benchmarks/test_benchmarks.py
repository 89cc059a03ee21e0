"""The benchmarks' own arithmetic and plumbing; that each one still runs at its smallest is a `slow` test."""

import json
import re
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

from rlcore.config.sections import ModelConfig
from rlcore.data.tokenizer import load_tokens

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
ECHO = """
from channel import Channel
channel = Channel()
print("what a library prints")
channel.send(channel.receive())
while (question := channel.receive()) is not None:
    if question["do"] == "die":
        raise SystemExit(3)
    if question["do"] == "answer":
        channel.send({"heard": question["text"]})
"""


@dataclass(frozen=True)
class Modules:
    """The benchmarks import each other by their bare names, as scripts of one folder do."""

    measure: Any
    channel: Any
    scenarios: Any
    vs_trl: Any
    learning: Any
    run_all: Any
    trend: Any


@pytest.fixture(scope="module")
def bench() -> Iterator[Modules]:
    sys.path.insert(0, str(BENCHMARKS))
    before = set(sys.modules)
    try:
        names = ("measure", "channel", "scenarios", "vs_trl", "learning_vs_trl", "run_all", "trend")
        yield Modules(*(import_module(name) for name in names))
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]


def test_a_summary_is_the_median_with_its_spread(bench: Modules) -> None:
    assert bench.measure.summary([4.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 4.0, "spread": 1.5, "n": 3}
    with pytest.raises(ValueError, match="no value"):
        bench.measure.summary([])


def test_a_trend_is_the_line_of_least_squares_with_an_interval_for_values_that_resemble_their_neighbours(
    bench: Modules,
) -> None:
    values = [3.0, 5.0, 4.0, 8.0, 7.0, 9.0]
    xs = range(len(values))
    slope = sum((x - 2.5) * y for x, y in zip(xs, values, strict=True)) / sum((x - 2.5) ** 2 for x in xs)
    found = bench.trend.trend(values)
    assert found.slope == pytest.approx(slope) == pytest.approx(statistics.linear_regression(xs, values).slope)
    residuals = [y - 6.0 - slope * (x - 2.5) for x, y in zip(xs, values, strict=True)]
    assert sum(a * b for a, b in pairwise(residuals)) < 0  # no resemblance: six values count as six
    error = (sum(residual**2 for residual in residuals) / 4 / 17.5) ** 0.5
    assert (found.low, found.high) == pytest.approx((slope - 2.776 * error, slope + 2.776 * error))
    lumps = [float(index // 8 % 2) for index in range(64)]  # eight and eight alike
    apart = [float(index % 2) for index in range(64)]
    assert bench.trend.trend(lumps).high > 2 * bench.trend.trend(apart).high
    assert bench.trend.trend([7.0] * 5) == bench.trend.Trend(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="needs at least three"):
        bench.trend.trend([1.0, 2.0])


def test_a_record_is_kept_next_to_its_text(bench: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"commit": "abc", "cores": 2, "cpu": "a CPU", "memory_bytes": 2**31, "load_average": [0.5]}
    bench.measure.conclude("x", {"value": 1 / 3}, facts, tmp_path / "new" / "x", "# Words\n")
    assert json.loads(capsys.readouterr().out) == {"benchmark": "x", "value": 0.33333, "machine": facts}
    assert json.loads((tmp_path / "new" / "x.json").read_text()) == {"value": 0.33333, "machine": facts}
    assert (tmp_path / "new" / "x.md").read_text() == "# Words\n"
    message = bench.measure.made_by("benchmarks/x.py", facts)
    assert message.startswith("Made by `benchmarks/x.py`, commit abc, 2 cores of a CPU, 2 GiB")


def test_the_controller_at_scale_is_judged_by_its_own_figures(bench: Modules) -> None:
    flat = bench.trend.judged([4.0] * 40, [3.0] * 40, [10**9 + index % 3 for index in range(40)])
    assert (flat["share_of_60_s"], flat["cheap"], flat["flat"], flat["steps"]) == (4.0 / 60, True, True, 40)
    lump = bench.trend.judged([4.0] * 40, [3.0] * 40, [10**9 + 8 * 2**20 * (index > 30) for index in range(40)])
    assert lump["flat"]
    growing = bench.trend.judged([4.0] * 40, [7.0] * 40, [10**9 + 200_000 * index for index in range(40)])
    assert (growing["cheap"], growing["flat"]) == (False, False)
    assert growing["growth_bytes_a_step"]["slope"] == pytest.approx(200_000)


def test_a_line_is_json_with_machine_and_five_digits(bench: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    bench.measure.emit("x", {"value": 0.123456789, "many": (1, 2.00000001)})
    line = json.loads(capsys.readouterr().out)
    assert (line["benchmark"], line["value"], line["many"]) == ("x", 0.12346, [1, 2.0])
    assert line["machine"]["versions"]["python"]
    assert line["machine"]["cores"] >= 1


def test_peak_memory_counts_this_process_and_its_children(bench: Modules) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        own = bench.measure.peak_rss_bytes(child.pid)
        both = bench.measure.peak_rss_of_tree(bench.measure.os.getpid())
        child.communicate(b"\n", timeout=20)
    assert own > 0
    assert both >= bench.measure.peak_rss_bytes() + own


def test_a_side_answers_dies_and_is_waited_for(bench: Modules, tmp_path: Path) -> None:
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    (tmp_path / "channel.py").symlink_to(BENCHMARKS / "channel.py")
    with bench.channel.Side("echo", Path(sys.executable), program, {"spec": 1}, threads=1) as side:
        assert side.answer(20) == {"spec": 1}, "what libraries print must not be taken for an answer"
        assert side.ask({"do": "answer", "text": "é\n"}, 20) == {"heard": "é\n"}
        with pytest.raises(bench.channel.SideError, match=r"echo: no answer within 0\.1 s"):
            side.ask({"do": "nothing"}, 0.1)
        with pytest.raises(bench.channel.SideError, match="ended with code 3"):
            side.ask({"do": "die"}, 20)


def test_lengths_are_the_same_in_every_call_and_average_a_third(bench: Modules) -> None:
    fixed, varying = bench.scenarios.SCENARIOS["E1"], bench.scenarios.SCENARIOS["E2"]
    lengths = varying.lengths()
    assert fixed.lengths() == [64] * 64
    assert lengths == varying.lengths()
    assert len(lengths) == 64
    assert min(lengths) >= 1
    assert max(lengths) == 64
    assert sum(lengths) / 64 == pytest.approx(64 / 3, rel=0.05)


def test_flops_count_a_prompt_once_for_its_group(bench: Modules) -> None:
    sizes = bench.scenarios.Sizes(body=1000, head=100)
    scenario = bench.scenarios.Scenario("x", prompt_tokens=5, new_tokens=3, prompts=2, samples=4)
    # 2 prompts of 5 tokens, 8 rows of 3
    assert bench.scenarios.update_flops(scenario, sizes) == 6 * (1000 * (10 + 24) + 100 * 24)
    assert bench.scenarios.generation_flops(scenario, sizes) == 2 * (1000 * (10 + 24) + 100 * 24)


def test_a_tied_embedding_is_counted_once(bench: Modules, tmp_path: Path) -> None:
    config = {"vocab_size": 10, "hidden_size": 4, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert bench.scenarios.Sizes.of(tmp_path, 100) == bench.scenarios.Sizes(body=60, head=40)
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert bench.scenarios.Sizes.of(tmp_path, 100) == bench.scenarios.Sizes(body=20, head=40)


def test_ratios_are_of_medians_and_above_one_where_ours_is_faster(bench: Modules) -> None:
    def rows(*seconds: float) -> list[dict[str, float]]:
        return [{"step_s": duration, "generate_s": duration / 2, "update_s": duration / 4} for duration in seconds]

    found = bench.vs_trl.ratios({"ours": rows(1, 2, 9), "trl": rows(5, 6, 7)})
    assert found == {"step": 3.0, "generate": 3.0, "update": 3.0}


def test_a_micro_batch_that_memory_cannot_hold_is_foreseen(bench: Modules) -> None:
    results = {8: {"step_s": 9.0, "peak_rss_bytes": 5e9}, 16: {"step_s": 7.0, "peak_rss_bytes": 8e9}}
    assert bench.vs_trl.predicted_peak({}, 8) == 0
    assert bench.vs_trl.predicted_peak(results, 32) == pytest.approx(14e9)
    assert bench.vs_trl.fastest(results | {32: {"left_out": "too large"}}) == 16


def test_long_prompts_take_fewer_rows_in_a_micro_batch_of_the_peer(bench: Modules) -> None:
    def chosen(name: str, size: int) -> int:
        scenario = bench.scenarios.SCENARIOS[name]
        return int(bench.vs_trl.trl_micro_batch(Namespace(scenario=scenario), size))

    assert [chosen("E1", size) for size in (8, 16, 64)] == [8, 16, 64]
    assert [chosen("E3", size) for size in (8, 16, 64)] == [8, 8, 8]


def test_curves_within_noise_pass_and_a_control_fails(bench: Modules) -> None:
    area, paired = bench.learning.area, bench.learning.paired
    assert area([0.0, 1.0, 1.0]) == pytest.approx(0.75)
    # differences 0.01 and 0.03: mean 0.02, deviation 0.01414, t(1) = 12.706, half width 12.706 * 0.01
    close = paired([[0.51, 0.51], [0.53, 0.53]], [[0.5, 0.5], [0.5, 0.5]])
    assert close["mean_difference"] == pytest.approx(0.02)
    assert close["interval_95"] == pytest.approx([0.02 - 0.12706, 0.02 + 0.12706])
    assert close["within_noise"]
    assert not paired([[0.44, 0.44]], [[0.5, 0.5]])["within_noise"]


@pytest.mark.parametrize(("control", "end", "passed"), [(0.1, 0.6, True), (0.58, 0.6, False), (0.1, 0.97, False)])
def test_learning_passes_only_with_a_failing_control_below_saturation(
    bench: Modules, control: float, end: float, passed: bool
) -> None:
    curves = [{"ours": [0.1, end], "trl": [0.1, end - 0.01], "control": [0.1, control]}] * 2
    result = bench.learning.judged(curves)
    assert result["passed"] is passed
    text = bench.learning.report(result, bench.learning.Task(seeds=2, every=5))
    assert f"| 5 | {end:.3f} | {end - 0.01:.3f} | {control:.3f} |" in text


def test_the_run_of_everything_hands_the_peers_peaks_on(bench: Modules) -> None:
    run_all = bench.run_all
    lines = [
        {"scenario": {"name": name, "prompts": 8}, "peak_rss_bytes": {"trl": 7}, "trl_micro_batch": 32}
        for name in ("E2", "E1")
    ]
    once = run_all.e1(lines)
    assert once is lines[1]
    assert run_all.e1(lines[:1]) is None
    again = bench.vs_trl.parse(run_all.larger(once))
    assert (again.scenario, again.prompts, again.rounds, again.micro_batch) == (["E1"], 32, 2, 32)
    assert again.skip_sweep
    several = {**once, "peak_rss_bytes": {"trl": 9}}
    assert run_all.trl_peaks(once, several) == ["--trl-bytes", "7", "9"]
    assert run_all.trl_peaks(once, None) == ["--trl-bytes", "7"]
    assert run_all.trl_peaks(None, several) == [], "the first figure is that of one time the batch"


def test_run_all_continues_after_a_benchmark_that_fails(
    bench: Modules, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in */bad.py) exit 1;; esac\necho noise\necho \'{"said": "\'"$2"\'"}\'\n')
    python.chmod(0o755)
    everything = bench.run_all.Everything(tmp_path / "lines.jsonl", smoke=True)
    assert everything.run("good.py", "small", python=str(python)) == [{"said": "small"}]
    assert everything.run("bad.py", python=str(python)) == []
    assert everything.run("good.py", python=str(python)) == [{"said": "--smoke"}]
    assert everything.failed == ["bad.py"]
    printed = capsys.readouterr().out
    assert printed == '{"said": "small"}\n{"said": "--smoke"}\n' == (tmp_path / "lines.jsonl").read_text()


def test_the_run_of_everything_leaves_out_only_what_has_a_separate_command(bench: Modules) -> None:
    prints = re.compile(r"^\s+(emit|conclude)\((\"|$)", re.M)
    printing = {path.name for path in BENCHMARKS.glob("*.py") if prints.search(path.read_text())}
    text = (BENCHMARKS / "run_all.py").read_text()
    left_out = {name for name in printing if f'"{name}"' not in text and not name.startswith("learning_")}
    assert left_out == {"gpu_check.py", "precision.py", "several_rewards.py", "vs_commit.py"}


def test_every_program_and_module_of_the_readme_exists() -> None:
    named = set(re.findall(r"`(\w+\.py)`", (BENCHMARKS / "README.md").read_text()))
    assert len(named) > 10
    assert named == {path.name for path in BENCHMARKS.glob("*.py")}


def test_what_ends_an_endless_model_is_a_free_id_or_a_special_token_without_a_use(bench: Modules) -> None:
    names = ["<s>", "<|end|>", "<|repo|>", "<|file|>"]
    added = {id_: AddedToken(name, special=True) for id_, name in enumerate(names)}

    class Full:
        bos_token, eos_token, pad_token, unk_token = "<s>", "<|end|>", "<|end|>", None
        added_tokens_decoder = added

        def __len__(self) -> int:
            return 100

    never = bench.scenarios.hardly_ever
    assert never(Full(), "", 101) == bench.scenarios.NEVER
    assert never(Full(), "", 100) == "<|file|>"
    assert never(Full(), "<|file|>{{ messages }}", 100) == "<|repo|>"
    with pytest.raises(ValueError, match="no special token without a use"):
        never(Full(), "<|file|><|repo|>", 100)


@pytest.mark.real
def test_a_comparisons_model_has_an_end_that_rlcore_accepts(bench: Modules, tmp_path: Path) -> None:
    if not bench.measure.MODEL.is_dir():
        pytest.skip("the model is missing; make model makes it")
    endless = bench.scenarios.write_endless_model(bench.measure.MODEL, tmp_path / "endless")
    as_it_is = load_tokens(ModelConfig(path=str(bench.measure.MODEL)), "")
    tokens = load_tokens(ModelConfig(path=str(endless)), "")
    message = [{"role": "user", "content": "river stone"}]
    assert tokens.encode_prompt(message) == as_it_is.encode_prompt(message)
    assert tokens.eos_ids
    assert not tokens.eos_ids & {*as_it_is.eos_ids, *tokens.encode_prompt(message)}


SMOKE = {
    "overhead": [],
    "memory": [],
    "vs_commit": [str(ROOT), "--scenario", "E2", "--overhead-rounds", "1"],
    "vs_trl": ["--scenario", "E2", "--skip-sweep", "--micro-batch", "8"],
    "learning_vs_trl": [],
    "learning_controls": ["--runs", "ppo_frozen", "four_late_ratio_1"],
    "several_rewards": [],
    "precision": [],
    "gpu_check": ["--device", "cpu"],
    "scale": [],
    "miniature": [],
    "transfer": [],
    "batches": ["--pipe"],
    "sharding": [],
    "saving": [],
    "compiled": [],
    "weight_sync": [],
    "cached_prefixes": [],
    "shared_pools": [],
    "shared_cores": [],
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SMOKE)
def test_a_benchmark_runs_at_its_smallest(name: str, tmp_path: Path) -> None:
    if name in ("vs_trl", "learning_vs_trl") and not (ROOT / ".venv-trl" / "stamp").exists():
        pytest.skip("TRL's environment is missing; make bench makes it")
    arguments = [*SMOKE[name], "--smoke"]
    if name == "gpu_check":
        arguments += ["--out", str(tmp_path / "gpu")]
    call = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines
    assert all(line["benchmark"] == name and line["machine"]["versions"]["rlcore"] for line in lines)
    if name == "gpu_check":
        check_gpu_record(lines[0], tmp_path)
    if name == "miniature":
        assert lines[0]["departures"]["replicas_lost"] > 0
        assert lines[0]["holds"], lines[0]
    if name == "compiled":
        assert lines[0]["logprob_abs_max"] < 1e-3
    if name == "sharding":
        check_shares(lines[0]["rows"])


def check_shares(rows: list[dict[str, Any]]) -> None:
    """A rank holds its share of weights, masters and moments; tensors of few rows are not divisible by 64."""
    for row, slack in zip(rows, (1.01, 1.02), strict=True):
        share = 14 * row["parameters"] / row["ranks"]
        assert share * 0.99 < row["held"] < share * slack, row
        assert row["on the host"] == 2 * row["parameters"]


def check_gpu_record(line: dict[str, Any], directory: Path) -> None:
    """Every part has measured something, and page and record have it."""
    parts = ("tests", "attention", "runs", "compiled", "head_chunks", "beside_peer")
    assert all("failed" not in line[part] for part in parts), {part: line[part] for part in parts}
    assert {"tiny hf 8", "tiny hf 16"} <= {name for name, found in line["runs"].items() if "tokens_per_s" in found}
    assert len(line["runs"]["tiny hf 8"]["timeline"]) > 1
    assert [row["length"] for row in line["attention"]["rows"]] == [64, 128, 64, 128]
    assert set(json.loads((directory / "gpu.json").read_text())) >= {*parts, "machine", "device"}
    page = (directory / "gpu.md").read_text()
    assert all(f"## {part.replace('_', ' ')}" in page for part in parts)
    assert "| tiny | ours |" in page


@pytest.mark.slow
def test_the_gpu_check_refuses_a_machine_without_a_device_in_one_line() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import gpu_check; gpu_check.require('cuda')"
    call = [sys.executable, "-c", program, str(BENCHMARKS)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "finds no CUDA device" in done.stderr
