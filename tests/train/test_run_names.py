"""Directories of runs without a name: each start has another, and a resume finds the newest."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlcore.config import LoadedConfig, RunConfig, TrainConfig, load_config
from rlcore.train.run_dir import choose_directory


def test_starts_in_one_second_have_directories_of_different_names(tmp_path: Path) -> None:
    settings = {"model.path": "m", "data.sources.a.path": "a.jsonl", "reward.functions.b.fn": "b.py:b"}
    loaded = load_config([{**settings, "train.dir": str(tmp_path)}], [], [])
    with ThreadPoolExecutor(8) as threads:
        chosen = list(threads.map(lambda _: choose_directory(loaded, resume=False), range(16)))
    assert len(set(chosen)) == 16
    assert all(path.is_dir() for path in chosen)
    (chosen[-1] / "config.yaml").write_text("{}")
    assert choose_directory(loaded, resume=True) == chosen[-1]


def test_a_resume_without_a_name_takes_the_newest_run_of_this_configuration(tmp_path: Path) -> None:
    older = ("grpo-20261127-120000", "grpo-20261128-120000-2", "grpo-20261128-120000")
    for name in (*older, "grpo-7b-20261129-120000", "grpo-20261128-120000-10", "grpo-2-20261129-120000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
    config = RunConfig(train=TrainConfig(dir=str(tmp_path)))
    loaded = LoadedConfig(config, {}, files=(Path("grpo.yaml"),))
    assert choose_directory(loaded, resume=True).name == "grpo-20261128-120000-10"
