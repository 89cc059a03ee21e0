"""The run of MLflow that a resumed run continues: accelerate's tracker before a server that is a dictionary."""

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.contracts.tracking import TrackContext
from rlcore.report.core_trackers import MLflow


class Refused(Exception):
    """MLflow's exception."""


class Server:
    """The runs of MLflow and their parameters."""

    def __init__(self) -> None:
        self.__spec__ = ModuleSpec("mlflow", None)  # accelerate asks whether the module is installed
        self.runs: dict[str, Any] = {}
        self.active: Any = None
        self.exceptions = SimpleNamespace(MlflowException=Refused)
        self.utils = SimpleNamespace(
            validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
        )

    def search_experiments(self, filter_string: str) -> list[Any]:
        return [SimpleNamespace(experiment_id="1")]

    def start_run(self, run_id: str | None, **settings: Any) -> Any:
        run_id = run_id or f"run-{len(self.runs)}"
        info = SimpleNamespace(run_id=run_id, lifecycle_stage="active", status="RUNNING")
        self.active = self.runs.setdefault(run_id, SimpleNamespace(info=info, data=SimpleNamespace(params={})))
        self.active.info.status = "RUNNING"
        return self.active

    def get_run(self, run_id: str) -> Any:
        if run_id not in self.runs:
            raise Refused(f"Run '{run_id}' not found")
        return self.runs[run_id]

    def active_run(self) -> Any:
        return self.active

    def log_params(self, params: Mapping[str, Any]) -> None:
        known = self.active.data.params
        if any(name in known and known[name] != str(value) for name, value in params.items()):
            raise Refused("Changing param values is not allowed")
        known.update({name: str(value) for name, value in params.items()})

    def end_run(self) -> None:
        self.active.info.status = "FINISHED"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TAGS", "MLFLOW_NESTED_RUN"):
        monkeypatch.delenv(name, raising=False)
    made = Server()
    monkeypatch.setitem(sys.modules, "mlflow", made)
    return made


def started(directory: Path, settings: dict[str, Any]) -> None:
    """The run of a process that is killed before it ends."""
    MLflow(TrackContext("mlflow", "p", "r", directory)).start(settings)


def test_a_resumed_run_continues_its_run_and_parameters_keep_their_values(tmp_path: Path, server: Server) -> None:
    started(tmp_path, {"actor.lr": 0.1, "train.max_steps": 5})
    started(tmp_path, {"actor.lr": 0.1, "train.max_steps": 9, "eval.every_steps": 2})
    [run] = server.runs.values()
    assert run.data.params == {"actor.lr": "0.1", "train.max_steps": "5", "eval.every_steps": "2"}
    assert (tmp_path / "mlflow_id.txt").read_text() == run.info.run_id


@pytest.mark.parametrize("gone", ["on another server", "deleted", "no id was kept"])
def test_a_run_that_the_server_lacks_is_begun_again(tmp_path: Path, server: Server, gone: str) -> None:
    started(tmp_path, {"actor.lr": 0.1})
    if gone == "deleted":
        server.runs["run-0"].info.lifecycle_stage = "deleted"
    else:
        (tmp_path / "mlflow_id.txt").write_text("elsewhere" if gone == "on another server" else "")
    started(tmp_path, {"actor.lr": 0.2})
    assert [run.data.params for run in server.runs.values()] == [{"actor.lr": "0.1"}, {"actor.lr": "0.2"}]
    assert (tmp_path / "mlflow_id.txt").read_text() == "run-1"
