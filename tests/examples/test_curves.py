"""Areas, intervals and verdicts of curves, checked by hand."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rlcore.testing.runs import run_settings

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def path() -> Iterator[None]:
    """The scripts put the directory of the examples on the path."""
    before = list(sys.path)
    yield
    sys.path[:] = before


def run(*heights: float) -> dict[str, object]:
    return {"curve": {4 * i: height for i, height in enumerate(heights)}, "step_s": 1.0, "explained_variance": []}


@pytest.mark.slow
def test_a_run_that_was_killed_before_a_checkpoint_is_trained_by_the_next_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained, directory = script("curves").trained, tmp_path / "runs" / "short"
    settings = [
        f"{key}={json.dumps(value)}" for key, value in run_settings(tmp_path, 4).items() if not key.startswith("train.")
    ]
    settings += ["--plugin", "null", "train.prompts_per_step=2"]
    trained(directory, [], [*settings, "train.max_steps=1"], "first")
    (directory / "done.json").unlink()
    settings.append("train.max_steps=2")
    trained(directory, [], settings, "second")
    metrics = (directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics if "time/step_s" in line] == [1, 2]
    assert json.loads((directory / "wall_s.json").read_text()) is None, "the time before the stop is unknown"
    (directory / "done.json").unlink()
    with pytest.raises(SystemExit, match=r"^third: .* train\.max_steps=none .* ended with 2; call this script again"):
        trained(directory, [], [*settings[:-1], "train.max_steps=none"], "third")
    assert "train.max_steps" in capfd.readouterr().err


SAVES = """
import signal, sys, threading, time
from pathlib import Path

def save(signum, frame):
    time.sleep(1)  # longer than subprocess.run waits before it kills
    Path(sys.argv[1]).touch()
    sys.exit(128 + signum)

for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, save)
print("ready", file=sys.stderr, flush=True)
threading.Event().wait(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_run_save_and_is_no_traceback(tmp_path: Path, signum: signal.Signals) -> None:
    saved = tmp_path / "saved"
    code = "import sys; sys.path.insert(0, sys.argv[1]); import curves; sys.exit(curves.ended(sys.argv[2:]))"
    command = [sys.executable, "-c", code, str(EXAMPLES), sys.executable, "-c", SAVES, str(saved)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"ready\n"
        os.killpg(process.pid, signum) if signum == signal.SIGINT else process.send_signal(signum)
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 128 + signum
    assert saved.exists()


def test_the_area_of_a_curve_by_hand() -> None:
    curves = script("curves")
    assert curves.area({0: 0.0, 10: 1.0, 30: 0.5}) == pytest.approx((5 + 15) / 30)
    assert curves.area({0: 0.25, 4: 0.25}) == 0.25


def test_a_comparison_by_hand_is_paired_and_has_students_interval() -> None:
    compared = script("curves").compared
    found = compared([run(0.2, 0.4), run(0.4, 0.6), run(0.3, 0.5)], [run(0.2, 0.2), run(0.4, 0.4), run(0.3, 0.2)])
    # differences of areas 0.1, 0.1, 0.15: mean 0.35 / 3, deviation 0.05 / sqrt(3), t of 2 degrees of freedom 4.303
    assert found["difference"] == pytest.approx(0.35 / 3)
    assert found["interval_95"] == pytest.approx([0.35 / 3 - 4.303 * 0.05 / 3, 0.35 / 3 + 4.303 * 0.05 / 3])
    assert not found["within_noise"]
    alone = compared([run(0.2, 0.38)], [run(0.2, 0.3)])
    assert alone["within_noise"]
    assert alone["interval_95"] is None


@pytest.mark.parametrize(
    ("ppo", "frozen", "permuted", "passed", "saturated"),
    [
        (0.8, 0.4, 0.2, True, False),
        (0.6, 0.4, 0.2, False, False),  # PPO falls short
        (0.8, 0.78, 0.2, True, False),  # the idle critic decides nothing
        (0.8, 0.4, 0.78, False, False),  # the control passes for equal
        (0.98, 0.4, 0.2, False, True),
    ],
)
def test_ppo_passes_when_it_is_within_noise_and_the_control_is_not(
    ppo: float, frozen: float, permuted: float, passed: bool, saturated: bool
) -> None:
    compare = script("ppo_critic/compare")
    ends = {"grpo": 0.98 if saturated else 0.8, "ppo": ppo, "frozen": frozen, "permuted": permuted}
    runs = {name: [run(0.1, height), run(0.1, height)] for name, height in ends.items()}
    judgement = compare.judged(runs)
    assert (judgement["passed"], judgement["saturated"]) == (passed, saturated)
    lines = "\n".join(compare.report(runs, judgement, {"commit": "c", "machine": "m"}))
    assert f"| 4 | {ends['grpo']:.3f} | {ppo:.3f} | {frozen:.3f} | {permuted:.3f} |" in lines
    assert ("saturated" in lines) is saturated


def test_credit_for_each_turn_is_reported_against_one_reward_for_all() -> None:
    compare = script("words_by_turn/compare")
    runs = {"turns": [run(0.4, 0.8), run(0.4, 0.9)], "sum": [run(0.4, 0.6), run(0.4, 0.6)]}
    verdict = compare.compared(runs["turns"], runs["sum"])
    lines = "\n".join(compare.report(runs, verdict, {"commit": "c", "machine": "m"}))
    assert "| 4 | 0.850 | 0.600 |" in lines
    assert "Area, credit for each turn - one reward for all turns: +0.125" in lines
    assert "s/step" not in lines
    assert compare.SAME_SKILL not in lines
    verdict = compare.compared(runs["sum"], runs["sum"])
    assert compare.SAME_SKILL in compare.report(runs, verdict, {"commit": "c", "machine": "m"})


def test_distillation_is_reported_against_grpo_without_times_of_machines() -> None:
    compare = script("distillation/compare")
    runs = {"distilled": [run(0.5, 0.9), run(0.5, 1.0)], "grpo": [run(0.5, 0.7), run(0.5, 0.7)]}
    verdict = compare.compared(runs["distilled"], runs["grpo"])
    lines = "\n".join(compare.report(runs, verdict, {"commit": "c", "machine": "m"}))
    assert "| step | distillation | GRPO |" in lines
    assert "| 4 | 0.950 | 0.700 |" in lines
    assert "Area, distillation - GRPO: +0.125" in lines
    assert "s/step" not in lines
    assert compare.QUICK_TASK not in lines
    verdict = compare.compared(runs["grpo"], runs["grpo"])
    assert compare.QUICK_TASK in compare.report(runs, verdict, {"commit": "c", "machine": "m"})


def test_the_constant_guess_of_char_count_is_of_the_words_that_the_curves_are_of(tmp_path: Path) -> None:
    recipe = script("char_count/run")
    (tmp_path / "trajectories").mkdir()
    for step, answers in (("000000", "1121"), ("000002", "3333")):
        lines = [f'{{"lane": "eval", "answer": "{answer}"}}' for answer in answers] + ['{"lane": "train", "answer": 9}']
        (tmp_path / "trajectories" / f"step_{step}.jsonl").write_text("\n".join(lines))
    assert recipe.constant_guess(tmp_path) == (0.75, 4)
    record = {
        **{"runs": {"grpo": [run(0.5, 1.0)], "ppo": [run(0.5, 0.25)]}, "constant_guess": 0.75, "num_evaluated": 4},
        **{"sft": {"losses": [2.0, 1.0], "seconds": 1}, "commit": "c", "machine": "m"},
        "verdict": {"difference": -0.4, "interval_95": None, "within_noise": False},
    }
    lines = recipe.report(recipe.SMALL, record)
    assert "Words that are right at the end in addition to that: GRPO +1.0, PPO -2.0." in lines


def test_the_record_of_char_count_is_of_the_words_that_its_recipe_evaluates() -> None:
    rows = script("char_count/make_data").items(4000, 3, 5, 0)[:64]  # limit in small.yaml
    answers = [row["answer"] for row in rows]
    record = json.loads((EXAMPLES.parent / "docs" / "results" / "char_count.json").read_text())
    assert record["num_evaluated"] == 64
    assert record["constant_guess"] == max(map(answers.count, answers)) / 64
    for seed_run in (seed_run for found in record["runs"].values() for seed_run in found):
        seed_run["curve"] = {int(step): height for step, height in seed_run["curve"].items()}
    recipe = script("char_count/run")
    page = (EXAMPLES.parent / "docs" / "results" / "char_count.md").read_text().splitlines()
    assert page == recipe.report(recipe.SMALL, record)
