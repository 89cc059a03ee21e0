"""`--resume` of a run directory in which links, pipes and other checkpoints are in the place of its files."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forked_runs import fork_run

from rlcore.cli import main
from rlcore.testing import write_prompts
from rlcore.testing.runs import differing

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

CONFIG = """
model: {{path: "", tokenizer: bytes}}
data: {{sources: {{train: {{path: {prompts}}}}}}}
rollout: {{backend: "null", samples_per_prompt: 2, max_tokens: 8}}
reward: {{functions: {{letters: {{fn: count_letter, children: 1}}}}}}
actor: {{backend: "null", lr: 0.1}}
train: {{prompts_per_step: 2, max_steps: 4, dir: {runs}}}
checkpoint: {{every_steps: 1}}
"""


def arguments(origin: Path, name: str, *more: str) -> list[str]:
    return ["train", str(origin / "run.yaml"), "--plugin", "null", f"train.name={name}", *more]


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of four steps, and one that was stopped after three."""
    root = tmp_path_factory.mktemp("origin")
    text = CONFIG.format(prompts=write_prompts(root / "prompts.jsonl", 20), runs=root / "runs")
    (root / "run.yaml").write_text(text)
    assert main(arguments(root, "whole")) == 0
    assert main(arguments(root, "three", "train.max_steps=3")) == 0
    return root


def moved_away(path: Path) -> None:
    path.rename(path.with_name(f"{path.name}.was"))


def in_place(make: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    """Move `name` away and make something else in its place."""

    def attack(run: Path) -> None:
        path = run / name
        moved_away(path) if path.exists() else path.parent.mkdir(parents=True, exist_ok=True)
        make(path)

    return attack


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def newer(run: Path) -> None:
    """State of a version that does not exist, with sums that agree."""
    state = json.loads((run / "checkpoints" / "step_3" / "state.json").read_text())
    rewritten(run, "state.json", json.dumps({**state, "format": 999, "version": 999}))


def other_model(run: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.zeros(7))
    rewritten(run, "model/logits_V.npy", file.getvalue())


def rewritten(run: Path, name: str, content: str | bytes) -> None:
    directory = run / "checkpoints" / "step_3"
    data = content.encode() if isinstance(content, str) else content
    (directory / name).write_bytes(data)
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def huge(path: Path) -> None:
    """A terabyte of nothing."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def copied_twice(run: Path) -> None:
    for name in ("step_99999999999999999999", "step_-1", "step_1e3", "step_\u0664", "step_03"):
        shutil.copytree(run / "checkpoints" / "step_3", run / "checkpoints" / name)


def of_another_user(run: Path) -> None:
    for path in (run / "checkpoints" / "step_3").rglob("*"):
        path.chmod(0)


def outside(path: Path) -> None:
    """A link to a file that is not the run's."""
    target = path.parents[1] / f"precious {path.name}"
    target.write_text("precious")
    path.symlink_to(target)


ATTACKS: dict[str, Callable[[Path], object]] = {
    "checkpoints is a file": in_place(Path.touch, "checkpoints"),
    "checkpoints is a link to itself": in_place(loop, "checkpoints"),
    "checkpoints is a pipe": in_place(os.mkfifo, "checkpoints"),
    "checkpoints leads elsewhere": in_place(lambda path: path.symlink_to("checkpoints.was"), "checkpoints"),
    "the newest is a file": in_place(Path.touch, "checkpoints/step_3"),
    "the newest is a link to itself": in_place(loop, "checkpoints/step_3"),
    "the newest leads to the one before": in_place(lambda path: path.symlink_to("step_2"), "checkpoints/step_3"),
    "the pointer is a directory": in_place(Path.mkdir, "checkpoints/latest"),
    "the pointer is a pipe": in_place(os.mkfifo, "checkpoints/latest"),
    "the pointer leads out": in_place(
        lambda path: path.write_text("../../whole/checkpoints/step_4"), "checkpoints/latest"
    ),
    "the pointer is huge": in_place(huge, "checkpoints/latest"),
    "the manifest is a pipe": in_place(os.mkfifo, "checkpoints/step_3/manifest.json"),
    "the manifest is huge": in_place(huge, "checkpoints/step_3/manifest.json"),
    "the model is a pipe": in_place(os.mkfifo, "checkpoints/step_3/model/logits_V.npy"),
    "the model is huge": in_place(huge, "checkpoints/step_3/model/logits_V.npy"),
    "a model of another shape": other_model,
    "a newer format": newer,
    "names that are nearly steps": copied_twice,
    "nothing may be read": of_another_user,
    "metrics is a pipe": in_place(os.mkfifo, "metrics.jsonl"),
    "metrics is a directory": in_place(Path.mkdir, "metrics.jsonl"),
    "metrics is precious": in_place(outside, "metrics.jsonl"),
    "trajectories is a file": in_place(Path.touch, "trajectories"),
    "trajectories is a link to itself": in_place(loop, "trajectories"),
    "a trajectory file is a pipe": in_place(os.mkfifo, "trajectories/step_000003.jsonl"),
    "a later trajectory file is precious": in_place(outside, "trajectories/step_000004.jsonl"),
    "the log is a pipe": in_place(os.mkfifo, "log.txt"),
    "the log is a directory": in_place(Path.mkdir, "log.txt"),
    "the configuration is a pipe": in_place(os.mkfifo, "config.yaml"),
    "the configuration is a link to itself": in_place(loop, "config.yaml"),
    "the plan is a pipe": in_place(os.mkfifo, "plan.json"),
    "the lock is a pipe": in_place(os.mkfifo, ".lock"),
    "the lock is a directory": in_place(Path.mkdir, ".lock"),
    "the lock is a link to itself": in_place(loop, ".lock"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_prepared_run_directory_is_resumed_or_refused_in_one_line(
    name: str, origin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(origin / "runs" / "three", tmp_path / "runs" / "three", symlinks=True)
    ATTACKS[name](tmp_path / "runs" / "three")
    code = main(arguments(origin, "three", "--resume", f"train.dir={tmp_path / 'runs'}"))
    output = capsys.readouterr().err
    assert code in (0, 2), (code, output[-2000:])
    assert "Traceback" not in output
    for path in tmp_path.rglob("precious *"):
        assert path.read_text() == "precious"
    if code == 0:
        assert differing(origin / "runs" / "whole", tmp_path / "runs" / "three") == []
    else:
        assert len(output.strip().splitlines()[-1]) < 1000


@pytest.mark.usefixtures("forked_runs")
def test_of_two_resumes_at_once_one_is_refused(origin: Path, tmp_path: Path) -> None:
    shutil.copytree(origin / "runs" / "three", tmp_path / "runs" / "three")
    more = ("--resume", f"train.dir={tmp_path / 'runs'}", "plugins.null.update_s=3")
    outputs = [tmp_path / f"output-{number}" for number in range(3)]
    processes = [fork_run(arguments(origin, "three", *more), output) for output in outputs]
    results = [(process.wait(timeout=120), out.read_text()) for process, out in zip(processes, outputs, strict=True)]
    assert sorted(code for code, _ in results) == [0, 2, 2], results
    assert all("another process is training" in message for code, message in results if code)
    assert differing(origin / "runs" / "whole", tmp_path / "runs" / "three") == []
