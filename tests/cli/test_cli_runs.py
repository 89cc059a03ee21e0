"""Commands on a run that exists: resume, chat, eval, export."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlcore
from rlcore.cli import main
from rlcore.config.layers import from_mapping
from rlcore.testing.leaks import descendants
from rlcore.testing.runs import run_settings
from rlcore.train import exported, find_checkpoint
from rlcore.train.run_dir import locked


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    heldout = directory / "heldout.jsonl"
    heldout.write_text('{"prompt": "held out"}\n')
    settings: dict[str, Any] = {"eval.sources.heldout.path": str(heldout), "train.name": "run"}
    return rlcore.train(run_settings(directory, 20, **settings), plugins="null").run_dir


def failing(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("rlcore: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("command", ["resume", "chat"])
def test_what_is_no_run_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run: found no config.yaml in it" in failing(capsys, command, str(tmp_path))
    assert "is not a run: found no such directory" in failing(capsys, command, str(tmp_path / "nothing"))


@pytest.mark.parametrize("temperature", ["nan", "inf", "-1"])
def test_a_temperature_that_no_chat_can_have_is_one_line(temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chat", "run", f"--temperature={temperature}"])
    err = capsys.readouterr().err
    assert err.startswith(f"rlcore: --temperature: found {temperature}; needs a finite number, 0 or more; see ")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_a_chat_on_a_run_without_a_checkpoint_is_one_line(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes((run_dir / "config.yaml").read_bytes())
    assert "no checkpoint is there" in failing(capsys, "chat", str(tmp_path / "run"))


@pytest.mark.real
def test_a_chat_answers_each_line_of_a_pipe(run_dir: Path) -> None:
    command = [sys.executable, "-m", "rlcore", "chat", str(run_dir), "--temperature", "0", "--max-tokens", "4"]
    lines = "hello\n\n/reset\nhello\nhello\n/exit\nnever\n"
    done = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    answers = done.stdout.decode().split("(the conversation begins again)\n")
    first = answers[0]
    assert first.strip()
    assert answers[1].startswith(first), "after /reset the answer is that of the first line"
    assert len(answers) == 2


def test_a_chat_starts_the_actor_and_the_rollout_and_no_process_for_rewards(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    kept = descendants(os.getpid())
    threads: list[str] = []
    processes: list[int] = []
    lines = ["hello\n", ""]

    def read() -> str:
        if len(lines) == 1:  # the first line was answered
            threads.extend(thread.name for thread in threading.enumerate() if thread.ident not in before)
            processes.extend(descendants(os.getpid()) - kept)
        return lines.pop(0)

    monkeypatch.setattr("rlcore.cli.chat._read", read)
    assert main(["chat", str(run_dir), "algo.kl.placement=loss", "algo.kl.coef=0.1"]) == 0
    assert capsys.readouterr().out
    assert processes == []
    assert [name for name in threads if name.endswith("]")] == ["actor[0]"], "the rollout samples in it"


@pytest.mark.slow
def test_resume_reads_the_runs_own_configuration(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = run_dir / "checkpoints" / "step_1"
    assert f"name the run, or begin another one here: rlcore train ... --resume-from {named}" in failing(
        capsys, "resume", str(named), "train.max_steps=3"
    )
    assert main(["resume", str(run_dir), "train.max_steps=3"]) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    assert (run_dir / "checkpoints" / "step_3").is_dir()


def files_below(directory: Path) -> dict[Path, tuple[int, int]]:
    found = ((path, path.stat()) for path in directory.rglob("*"))
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found}


@pytest.mark.slow
def test_a_dry_run_refuses_what_the_run_would_refuse_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = run_settings(tmp_path, 20, **{"train.name": "run"})
    run_dir = rlcore.train(settings, plugins="null").run_dir
    same = ["train", str(run_dir / "config.yaml")]
    before = files_below(tmp_path)
    refused = [
        (["train.name=run"], "run' exists; choose another name"),
        (["--resume", "train.name=gone"], "found no run '"),
        (["--resume", "train.seed=9"], "train.seed was 0, now it is 9"),
        (["--resume", "data.sources.more.task=chain_sum"], "source 'more' is new"),
        (["--resume-from", str(tmp_path / "gone"), "train.name=new"], "no checkpoint is there"),
        (["--resume-from", str(run_dir), "train.name=new", "train.seed=9"], "train.seed was 0, now it is 9"),
    ]
    capsys.readouterr()
    for arguments, words in refused:
        assert words in failing(capsys, *same, "--dry-run", *arguments)
        assert files_below(tmp_path) == before
    with locked(run_dir):
        assert "another process is training in" in failing(capsys, *same, "--dry-run", "--resume")
    for arguments in (
        ["--resume"],
        ["train.name=new"],
        ["train.name="],
        ["--resume-from", str(run_dir), "train.name="],
    ):
        before = files_below(tmp_path)
        assert main([*same, "--dry-run", *arguments]) == 0
        assert files_below(tmp_path) == before


@pytest.mark.slow
def test_a_resume_switches_features_off(tmp_path: Path) -> None:
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "held out"}\n')
    settings = run_settings(tmp_path, 20, **{"eval.sources.heldout.path": str(tmp_path / "heldout.jsonl")})
    settings |= {"train.stop.metric": "reward/mean", "checkpoint.best": "eval/heldout/mean", "eval.every_steps": 1}
    del settings["train.max_steps"]
    run = str(rlcore.train(settings, {"train.name": "run"}, plugins="null", stop_when=lambda step, _: True).run_dir)
    assert main(["resume", run, "train.max_steps=2", "train.stop.metric=", "checkpoint.best=", "track.to=[]"]) == 0
    assert main(["resume", run, "train.max_steps=3"]) == 0


@pytest.mark.slow
def test_a_run_of_relative_paths_is_continued_evaluated_and_talked_to_from_any_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tmp_path / "task"
    task.mkdir()
    (task / "heldout.jsonl").write_text('{"prompt": "held out"}\n')
    (task / "mine.py").write_text("def score(completions, **columns):\n    return [0.5] * len(completions)\n")
    settings = run_settings(task, 20, **{"data.sources.all.path": "prompts.jsonl"})
    settings |= {"train.dir": "runs", "train.name": "run", "eval.sources.heldout.path": "heldout.jsonl"}
    settings |= {"reward.functions.letters.fn": "mine.py:score"}
    (task / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(from_mapping(settings).values)))
    monkeypatch.chdir(tmp_path)
    assert main(["train", "task/config.yaml", "--plugin", "null"]) == 0
    run_dir = str(tmp_path / "runs" / "run")
    for place, step in ((tmp_path, 3), (task, 4), (Path("/"), 5)):
        monkeypatch.chdir(place)
        capsys.readouterr()
        assert main(["resume", run_dir, f"train.max_steps={step}"]) == 0
        changed = [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]
        assert changed[0] == f"changed since the last start: config.train.max_steps: {step - 1} -> {step}"
        assert [line for line in changed[1:] if "max_steps" not in line] == []
    assert main(["eval", "--checkpoint", run_dir]) == 0
    assert main(["eval", run_dir]) == 0
    for file in ("mine.py", "prompts.jsonl", "heldout.jsonl"):
        (task / file).unlink()
    monkeypatch.setattr("rlcore.cli.chat._read", str)
    assert main(["chat", run_dir]) == 0, "it needs neither rewards nor data"


@pytest.mark.slow
def test_eval_of_a_run_keeps_its_samples(run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["eval", "--checkpoint", str(run_dir)]) == 0
    path = Path(capsys.readouterr().out.rpartition("samples: ")[2].strip())
    assert path.parent == run_dir / "evaluations"
    assert len(path.read_text().splitlines()) == 1
    assert main(["eval", "--checkpoint", str(run_dir), "--samples", str(tmp_path / "s.jsonl")]) == 0
    assert (tmp_path / "s.jsonl").read_bytes() == path.read_bytes()


def test_samples_that_cannot_be_kept_are_refused_before_the_evaluation(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["rlcore.train"], "evaluate_async", None)
    for samples in (run_dir / "config.yaml" / "s.jsonl", run_dir):
        words = f"--samples: '{samples}' cannot be written ("
        assert words in failing(capsys, "eval", "--checkpoint", str(run_dir), "--samples", str(samples))
    monkeypatch.setattr(sys.modules["rlcore.train.api"], "samples_path", lambda *_: Path("/proc/self/none/s.jsonl"))
    assert "in a directory that can be written to; choose another" in failing(
        capsys, "eval", "--checkpoint", str(run_dir)
    )


def test_an_export_among_the_checkpoints_of_a_run_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "export_model", lambda _, out, form: out.mkdir())
    step = find_checkpoint(run_dir)
    for out, found in (
        (step / "exported", f"is in the checkpoint '{step}'; choose another directory"),
        (step / "model" / "exported", f"is in the checkpoint '{step}'; choose another directory"),
        (step.parent / "exported", "is among the checkpoints of a run; choose another directory"),
    ):
        assert f"export: '{out}' {found}" in failing(capsys, "export", str(run_dir), str(out))
        assert not out.exists()


def test_a_push_without_a_token_or_with_a_wrong_name_writes_nothing(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    out = tmp_path / "out"
    assert "no token for the Hub" in failing(capsys, "export", str(run_dir), str(out), "--push", "me/model")
    assert "cannot be a name" in failing(capsys, "export", str(run_dir), str(out), "--push", "../model")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "huggingface_hub is not installed" in failing(capsys, "export", str(run_dir), str(out), "--push", "me/model")
    assert not out.exists()


def test_a_push_uploads_the_directory_that_was_written(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Any]] = []

    class Hub:
        def create_repo(self, name: str, **settings: Any) -> str:
            calls.append((name, settings))
            return f"https://hub/{name}"

        def upload_folder(self, **settings: Any) -> None:
            calls.append(("upload", settings))
            if settings["folder_path"].endswith("fails"):
                raise OSError("no route")

    def write(source: Path, out: Path, form: str) -> Path:
        out.mkdir()
        return out

    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(exported, "export_model", write)
    assert main(["export", str(run_dir), str(tmp_path / "out"), "--push", "me/model"]) == 0
    assert "uploaded it to https://hub/me/model" in capsys.readouterr().out
    assert calls[0] == ("me/model", {"private": True, "exist_ok": True})
    assert (calls[1][1]["repo_id"], calls[1][1]["folder_path"]) == ("me/model", str(tmp_path / "out"))
    err = failing(capsys, "export", str(run_dir), str(tmp_path / "fails"), "--push", "me/model")
    assert "is written, the upload to 'me/model' failed: OSError: no route" in err
