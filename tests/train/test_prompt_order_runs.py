"""Runs whose prompt order uses results: the results it gets under each schedule, and bit-for-bit resumption."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import DataConfig
from rlcore.contracts.prompt_orders import OrderContext
from rlcore.plugins.planning import plan_run
from rlcore.report.metrics import read_trajectories
from rlcore.runtime.data_preview import preview_data
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing
from rlcore.train import Start, train
from rlcore.train.start_check import check_start

pytestmark = pytest.mark.usefixtures("rewards_in_process")

PLUGIN = """
import json
from rlcore import PromptOrderOffer, RewardFunction, hookimpl
from rlcore.testing import LeastSeen

RLCORE_API = "1"


def odd(completions, answer):
    return [float(len(text) % 2 == 1 and int(row) % 3 > 0) for text, row in zip(completions, answer)]


class BestFirst(LeastSeen):
    def next(self, n, results):
        worth = {row: found.groups - found.mean_reward for row, found in results.items()}
        rows = sorted(self._rows, key=lambda row: worth.get(row, 0))
        with open(NOTES, "a") as file:
            told = {row: found.version for row, found in results.items()}
            file.write(json.dumps([n, rows[:n], max(told.values(), default=None), len(told)]) + chr(10))
        self._issued += n
        return rows[:n]


@hookimpl
def rlcore_prompt_orders():
    return [PromptOrderOffer("best_first", BestFirst)]


@hookimpl
def rlcore_reward_functions():
    return [RewardFunction("odd", f"{__file__}:odd")]
"""
SCHEDULES = {
    "synchronous": {},
    "streamed": {"stream_minibatches": True},
    "one step off": {"max_staleness": 1},
    "resampled": {},
}


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN.replace("NOTES", repr(str(tmp_path / "notes.jsonl"))))
    return path


def settings(tmp_path: Path, schedule: str) -> dict[str, Any]:
    """Six steps of the null policy with a checkpoint after each."""
    return {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {
            "sources": {"train": {"path": str(write_prompts(tmp_path / "prompts.jsonl", 12))}},
            "order": "best_first",
        },
        "rollout": {"backend": "null", "samples_per_prompt": 4, "max_tokens": 8},
        "reward": {"functions": {"odd": {"fn": "odd", "children": 1}}},
        "actor": {"backend": "null", "lr": 0.1, "minibatch_prompts": 2},
        "algo": {"dynamic_sampling": True} if schedule == "resampled" else {},
        "schedule": SCHEDULES[schedule],
        "train": {"prompts_per_step": 4, "max_steps": 6, "dir": str(tmp_path / "runs")},
        "checkpoint": {"every_steps": 1, "keep": 0},
    }


def damage(checkpoint: Path) -> None:
    """So that the one before is resumed."""
    (checkpoint / "state.json").write_text("{}")


def trained(run_dir: Path) -> list[tuple[str, int]]:
    """Prompt and epoch of every group, in the order of steps."""
    found = []
    for step in range(1, 7):
        rows = read_trajectories(run_dir, step)
        found += sorted({(row["id"]["prompt"], row["id"]["epoch"]) for row in rows})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_resumed_run_issues_what_an_uninterrupted_one_does(plugin: Path, tmp_path: Path, schedule: str) -> None:
    config, plugins = settings(tmp_path, schedule), ["null", str(plugin)]
    whole = train(config, "train.name=whole", plugins=plugins).run_dir
    calls = (tmp_path / "notes.jsonl").read_text().splitlines()
    cut = train(config, "train.name=cut", plugins=plugins).run_dir
    for step in (4, 5, 6):
        damage(cut / "checkpoints" / f"step_{step}")
    (tmp_path / "notes.jsonl").unlink()
    resumed = train(config, "train.name=cut", plugins=plugins, resume=True).run_dir
    again = (tmp_path / "notes.jsonl").read_text().splitlines()
    if schedule == "one step off":  # what was in flight and not scored is sampled again, so later results may differ
        assert again[0] == calls[4]
        assert len(set(trained(resumed))) == len(trained(resumed)) == 24
        assert trained(resumed)[: 5 * 4] == trained(whole)[: 5 * 4]
        return
    assert differing(whole, resumed) == []
    assert again == calls[len(calls) - len(again) :]
    assert 0 < len(again) < len(calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "known"), [("synchronous", [None, 0, 1, 2, 3, 4]), ("one step off", [None, None, 0, 0, 1, 2])]
)
def test_an_order_knows_the_results_of_published_steps(
    plugin: Path, tmp_path: Path, schedule: str, known: list[int | None]
) -> None:
    train(settings(tmp_path, schedule), plugins=["null", str(plugin)])
    calls = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert [newest for _, _, newest, _ in calls] == known


def test_wrong_rows_end_the_run_in_one_line(plugin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin.write_text(plugin.read_text().replace("return rows[:n]", "return rows[: n - 1]"))
    with pytest.raises(
        Exception, match=r"plugin 'mine' .*: prompt order 'best_first': next\(4\) returned 3 rows; needs 4"
    ):
        train(settings(tmp_path, "synchronous"), plugins=["null", str(plugin)])


def test_a_source_of_weight_0_is_left_out_of_the_plan_the_run_and_its_resumption(
    tmp_path: Path, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, "synchronous")
    config["data"]["sources"]["off"] = {"path": str(tmp_path / "gone.jsonl"), "weight": 0}
    seen: list[list[str]] = []

    def context(name: str, prompts: Any, data: DataConfig, *more: Any) -> OrderContext:
        seen.append(list(data.sources))
        return OrderContext(name, prompts, data, *more)

    monkeypatch.setattr("rlcore.data.issued.OrderContext", context)
    for order in ("seeded", "best_first"):
        words = [f"data.order={order}", f"train.name={order}"]
        plan = plan_run([config], words, ["null", str(plugin)])
        assert [source.key for source in preview_data(plan).sources] == ["data.sources.train"]
        run_dir = train(config, *words, "train.max_steps=1", plugins=["null", str(plugin)]).run_dir
        check_start(plan, Start(resume=True))
        train(config, *words, "train.max_steps=2", plugins=["null", str(plugin)], resume=True)
        assert len(read_trajectories(run_dir, 2)) == 16
    assert seen == [["train"]] * 4, "an order may look up the rows of each source"
