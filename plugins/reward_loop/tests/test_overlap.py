"""Whole runs on the null model in which a service is asked while earlier steps train, and what a resume asks again."""

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.service import NEVER, ScriptedService, ServiceAnswer, ServiceCall, serving
from rlcore.train import Stopped, TrainResult, checkpoint, train
from rlcore.train.saved_samples import read_scored
from rlcore.types import Prompt

SECRET = "sk-a-token-of-a-service"
STEPS, PROMPTS, SAMPLES = 4, 2, 4
STEP_SAMPLES = PROMPTS * SAMPLES


class Scorer:
    """Scores the samples of two steps differently and all later ones 5; holds back the last of each later group.

    When all that can be asked has been asked, it ends the run; after that nothing is held back.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ended = False

    async def __call__(self, call: ServiceCall) -> ServiceAnswer:
        self.calls.append(call.json()["id"])
        number, sample = len(self.calls), self.calls[-1].rsplit("/", 1)[1]
        if self.ended:
            return ServiceAnswer({"score": 5.0})
        if number == STEPS * STEP_SAMPLES:
            self.ended = True
            await asyncio.sleep(0.2)  # until what was answered has arrived
            os.kill(os.getpid(), signal.SIGTERM)
        if number > 2 * STEP_SAMPLES and sample == str(SAMPLES - 1):
            return NEVER
        return ServiceAnswer({"score": float(number) if number <= 2 * STEP_SAMPLES else 5.0})


@pytest.fixture
def scorer() -> Iterator[tuple[Scorer, ScriptedService]]:
    script = Scorer()
    with serving(script) as service:
        yield script, service


def run(directory: Path, url: str, reward: dict[str, Any], resume: bool = False) -> TrainResult:
    prompts = directory / "prompts.jsonl"
    config = {
        "model": {"path": "", "tokenizer": "bytes"},
        "data": {"sources": {"train": {"path": str(prompts if resume else write_prompts(prompts, 16))}}},
        "rollout": {"backend": "null", "samples_per_prompt": SAMPLES, "max_tokens": 8},
        "actor": {"backend": "null", "minibatch_prompts": 1},
        "schedule": {"max_staleness": 1},
        "checkpoint": {"every_steps": 0},
        "train": {"prompts_per_step": PROMPTS, "max_steps": STEPS, "dir": str(directory), "name": "run"},
        "plugins": {
            "null": {},
            "reward_loop": {
                "rewards": {"liked": {"served_by": "scorer", **reward}},
                "services": {"scorer": {"urls": [url], "token": "${oc.env:REWARD_LOOP_TEST_TOKEN}"}},
            },
        },
    }
    return train(config, resume=resume)


@pytest.mark.fault
@pytest.mark.parametrize("normalise", [False, True], ids=["samples", "groups"])
def test_a_run_one_step_off_resumes_with_half_of_its_groups_scored(
    normalise: bool, tmp_path: Path, scorer: tuple[Scorer, ScriptedService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards of single samples are not asked for again; where the group counts, all of it is."""
    monkeypatch.setenv("REWARD_LOOP_TEST_TOKEN", SECRET)
    script, service = scorer
    with pytest.raises(Stopped, match="SIGTERM"):
        run(tmp_path, service.url, {"normalise": normalise})
    newest = checkpoint.latest(tmp_path / "run")
    assert newest is not None
    assert len(checkpoint.load(newest).state["in_flight"]) == 2 * PROMPTS
    kept = [
        sample.trajectory.id for sample in read_scored(newest / "in_flight", lambda id: Prompt(id, (), None, "train"))
    ]
    assert len(kept) == 2 * PROMPTS * (SAMPLES - 1)

    script.calls.clear()
    result = run(tmp_path, service.url, {"normalise": normalise}, resume=True)
    again = set(script.calls)
    assert len(again) == len(script.calls)
    already_scored = {f"{trajectory.prompt}/{trajectory.epoch}/{trajectory.sample}" for trajectory in kept}
    assert already_scored & again == (already_scored if normalise else set())
    assert len(again) == 2 * PROMPTS * (SAMPLES if normalise else 1)

    assert result.steps == STEPS
    groups: dict[tuple[int, str], list[float]] = defaultdict(list)
    for step in range(1, STEPS + 1):
        for row in metrics.read_trajectories(result.run_dir, step):
            groups[step, row["id"]["prompt"]].append(row["score"])
    assert len(groups) == len({prompt for _, prompt in groups}) == STEPS * PROMPTS
    assert [len(scores) for scores in groups.values()] == [SAMPLES] * STEPS * PROMPTS
    for (step, _), scores in groups.items():
        assert len(set(scores)) == (1 if step > 2 else SAMPLES), "equal scores of a group stay equal"
    rows = [row for row in metrics.read(result.run_dir) if "schedule/staleness_max" in row]
    # What is asked about again as a whole was sampled again, too, by the weights of the resume.
    assert [row["schedule/staleness_max"] for row in rows] == [0, 1, 0 if normalise else 1, 1]
    if normalise:
        statistics = checkpoint.load(result.checkpoint).state["reward"]["liked"] if result.checkpoint else {}
        assert statistics["count"] == STEPS * STEP_SAMPLES, "each sample counts once"

    files = [path for path in result.run_dir.rglob("*") if path.is_file()]
    assert {"config.yaml", "plan.json", "reward_calls.jsonl"} <= {file.name for file in files}
    assert [file.name for file in files if SECRET.encode() in file.read_bytes()] == []
