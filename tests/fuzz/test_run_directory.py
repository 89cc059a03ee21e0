"""Files of a run directory that say anything: `--resume` ends as the whole run did, or with an error of one line."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.errors import RlcoreError
from rlcore.errors.redaction import displayable
from rlcore.report import metrics
from rlcore.testing import write_prompts
from rlcore.testing.hostile import changed, damaged, encoded, settings_of_fuzz
from rlcore.train import checkpoint, train

pytestmark = [pytest.mark.fault, pytest.mark.timeout(540)]

STEPS = 3
JSON_FILES = ("plan.json", "rewards.json", "checkpoints/step_2/state.json", "checkpoints/step_2/manifest.json")
FILES = (*JSON_FILES, "config.yaml", "metrics.jsonl", "log.txt", "checkpoints/latest", "trajectories/step_000002.jsonl")
IN_CHECKPOINT = ("actor.json", "model/config.json", "model/logits_V.npy", "moment1_V.npy", "plan.json", "config.yaml")
EVERYTHING = (*FILES, *(f"checkpoints/step_2/{name}" for name in IN_CHECKPOINT))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of two steps and one of three."""
    root = tmp_path_factory.mktemp("whole")
    write_prompts(root / "prompts.jsonl", 8)
    run(root, "train.name=two", "train.max_steps=2")
    run(root, "train.name=three")
    return root


def run(root: Path, *overrides: str, resume: bool = False) -> Path:
    """Train the null model with a reward on the run's own loop, which needs no child."""
    (root / "reward.py").write_text("async def low(trajectory):\n    return sum(map(ord, trajectory.completion)) % 7\n")
    config: Mapping[str, Any] = {
        "model": {"path": "none", "tokenizer": "bytes"},
        "data": {"sources": {"all": {"path": str(root / "prompts.jsonl")}}},
        "rollout": {"backend": "null", "samples_per_prompt": 2, "max_tokens": 8},
        "reward": {"functions": {"low": {"fn": f"{root / 'reward.py'}:low"}}},
        "actor": {"backend": "null", "lr": 0.1},
        "train": {"prompts_per_step": 2, "max_steps": STEPS, "dir": str(root / "runs"), "log_completions_every": 0},
        "checkpoint": {"every_steps": 1, "keep": 0},
    }
    return train(config, *overrides, plugins=["null"], resume=resume).run_dir


def one_line(error: RlcoreError) -> None:
    """Fails when the command line would print more than a line of it."""
    assert len(displayable(str(error)).splitlines()) == 1, f"{type(error).__name__}: {error}"


def weights(run_dir: Path) -> str:
    """Of the last step."""
    files = sorted((run_dir / "checkpoints" / f"step_{STEPS}").rglob("*.npy"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def resumed(whole: Path, name: str, data: bytes) -> None:
    """Continue the run of two steps with this in place of that file."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        shutil.copy(whole / "prompts.jsonl", root)
        shutil.copytree(whole / "runs" / "two", root / "runs" / "two")
        (root / "runs" / "two" / name).write_bytes(data)
        try:
            found = run(root, "train.name=two", resume=True)
        except RlcoreError as error:
            one_line(error)
            return
        assert weights(found) == weights(whole / "runs" / "three")
        assert checkpoint.step_of(checkpoint.latest(found) or Path("step_0")) == STEPS
        assert [row["step"] for row in metrics.read(found)][-1] == STEPS


@settings_of_fuzz(10)
@given(st.data())
def test_a_damaged_file_of_a_run_never_ends_its_resume_in_a_traceback(whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(EVERYTHING))
    resumed(whole, name, data.draw(damaged((whole / "runs" / "two" / name).read_bytes())))


@settings_of_fuzz(10)
@given(st.data())
def test_json_with_anything_in_it_never_ends_a_resume_in_a_traceback(whole: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from((*JSON_FILES, "metrics.jsonl")))
    text = (whole / "runs" / "two" / name).read_bytes()
    if name == "metrics.jsonl":
        rows = data.draw(changed([json.loads(line) for line in text.splitlines()]))
        resumed(whole, name, b"".join(encoded(row) + b"\n" for row in rows))
    else:
        resumed(whole, name, encoded(data.draw(changed(json.loads(text)))))


@settings_of_fuzz(10)
@given(st.data())
def test_a_checkpoint_with_anything_in_it_and_sums_that_agree_never_ends_in_a_traceback(
    whole: Path, data: st.DataObject
) -> None:
    """Written by another version, or by hand: the manifest's sums cannot tell."""
    name = data.draw(st.sampled_from(("state.json", "actor.json")))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        shutil.copy(whole / "prompts.jsonl", root)
        shutil.copytree(whole / "runs" / "two", root / "runs" / "two")
        place = root / "runs" / "two" / "checkpoints" / "step_2"
        content = encoded(data.draw(changed(json.loads((place / name).read_bytes()))))
        (place / name).write_bytes(content)
        manifest = json.loads((place / "manifest.json").read_bytes())
        text = json.dumps(manifest)
        before = (whole / "runs" / "two" / "checkpoints" / "step_2" / name).read_bytes()
        text = text.replace(hashlib.sha256(before).hexdigest(), hashlib.sha256(content).hexdigest())
        (place / "manifest.json").write_text(text.replace(f": {len(before)}", f": {len(content)}"))
        try:
            run(root, "train.name=two", resume=True)
        except RlcoreError as error:
            one_line(error)
