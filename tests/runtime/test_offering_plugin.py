"""Errors of workers name the plugin that offered their class; others stay what they are."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.errors import PluginError, RewardError, RlcoreError, WorkerError
from rlcore.plan import CORE
from rlcore.runtime.offering_plugin import naming_offers


class Judge:
    """Stands for a worker class."""


def planned(role: str, provided_by: str) -> Any:
    return SimpleNamespace(request=SimpleNamespace(role=SimpleNamespace(name=role)), cls=Judge, provided_by=provided_by)


PLAN: Any = SimpleNamespace(
    workers=[planned("judge", "plugin 'x' (x 1.0)"), planned("actor", f"plugin '{CORE}' (rlcore 1.0)")]
)
NAMED = "; its class is Judge of plugin 'x' (x 1.0)"


@pytest.mark.parametrize("error", [WorkerError, PluginError, RewardError])
@pytest.mark.parametrize(
    "message",
    [
        "judge[0].score() returned None; needs int",
        "judge[3.1]: exit code 1",
        "agent 'a': rollout(): judge[0].ask(): KeyError: 'x'",
    ],
)
def test_an_error_of_a_worker_says_whose_class_it_is(error: type[RlcoreError], message: str) -> None:
    with pytest.raises(error) as caught, naming_offers(PLAN):
        raise error(message)
    assert str(caught.value) == message + NAMED
    assert type(caught.value) is error


@pytest.mark.parametrize(
    "message",
    [
        "actor[0].update() returned None",
        "judge: its pool is too small",
        "critic 'judge[0]' is missing",
        "judges[0].score() returned None",
        "judge[0]: of plugin 'x' (x 1.0), lost",
    ],
)
def test_other_errors_and_those_of_the_core_stay_what_they_are(message: str) -> None:
    with pytest.raises(WorkerError) as caught, naming_offers(PLAN):
        raise WorkerError(message)
    assert str(caught.value) == message
