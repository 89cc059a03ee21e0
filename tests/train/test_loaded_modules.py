"""The modules that the processes of a run load: imports are most of what a short process costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.testing.runs import run_settings
from rlcore.train import train

FOR_MODELS = (
    *("transformers", "accelerate", "datasets", "peft", "sympy", "torch.distributed.tensor"),
    "rlcore.engines.hf.train",
)
RUN = f"""
import sys
from pathlib import Path

from rlcore.testing.runs import run_settings
from rlcore.train import train

train(run_settings(Path(sys.argv[1]), 4), plugins="null")
print([name for name in {FOR_MODELS!r} if name in sys.modules])
"""


@pytest.mark.slow
def test_a_run_without_a_model_loads_nothing_that_only_models_need(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


FOR_LOADING = ("omegaconf", "yaml", "antlr4", "rlcore.config.load")
PLUGIN = f"""
import sys
from pathlib import Path

from rlcore.contracts.hooks import hookimpl
from rlcore.contracts.offers import RewardFunction, WorkerClass
from rlcore.contracts.rollout import RolloutWorker
from rlcore.testing.null import NullReplica

RLCORE_API = "1"


def note(name):
    loaded = [module for module in {("torch", *FOR_LOADING)!r} if module in sys.modules]
    Path(__file__).with_name(name).write_text(repr(loaded))


class Noted(NullReplica):
    def setup(self):
        super().setup()
        note("worker")


def noted(completions, **columns):
    note("reward")
    return [0.0 for _ in completions]


@hookimpl
def rlcore_reward_functions():
    return [RewardFunction("noted", __file__ + ":noted")]


@hookimpl
def rlcore_worker_classes():
    return [WorkerClass(RolloutWorker, "noted", Noted, isolated=True)]
"""


@pytest.mark.slow
def test_the_processes_of_workers_and_rewards_load_nothing_that_only_loading_a_configuration_needs(
    tmp_path: Path,
) -> None:
    (tmp_path / "noting.py").write_text(PLUGIN)
    settings = run_settings(tmp_path, 4, **{"rollout.backend": "noted", "reward.functions.letters.fn": "noted"})
    train(settings, plugins=["null", str(tmp_path / "noting.py")])
    assert {name: (tmp_path / name).read_text() for name in ("worker", "reward")} == {"worker": "[]", "reward": "[]"}
