"""Fixtures that the tests of this plugin share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.plan import Facts, RunPlan, make_plan
from rlcore.plugins import configure
from rlcore.testing import write_prompts
from rlcore.testing.leaks import leaks


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with leaks():
        yield


@pytest.fixture
def planned(tmp_path: Path) -> Callable[..., RunPlan]:
    """Plans a run of the plugin on a machine with 16 GPUs; `plugins` are the sections of the configuration."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 8)

    def make(*overrides: str, plugins: dict[str, Any] | None = None, device: str = "cuda") -> RunPlan:
        config = {
            "model": {"path": "some-model", "tokenizer": "bytes"},
            "data": {"sources": {"train": {"path": str(prompts)}}},
            "reward": {"functions": {"letters": {"fn": "exact_match"}}},
            "train": {"dir": str(tmp_path)},
            "cluster": {"device": device},
            "plugins": {"vllm": {}} if plugins is None else plugins,
        }
        hooks, loaded = configure([config], overrides, [])
        return make_plan(loaded, hooks, Facts(cpus=8, gpus=16))

    return make
