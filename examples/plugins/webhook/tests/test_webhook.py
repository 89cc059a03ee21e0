"""The chat is a real HTTP server on this machine."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rlcore_webhook import WebhookSettings, WebhookTracker, rlcore_trackers

from rlcore import TrainResult, train
from rlcore.contracts.tracking import TrackContext
from rlcore.errors import ConfigError
from rlcore.testing import TrackerSuite
from rlcore.testing.packages import write_metadata
from rlcore.testing.runs import run_settings
from rlcore.testing.service import ScriptedService, ServiceAnswer, serving


@pytest.fixture(scope="module")
def service() -> Iterator[ScriptedService]:
    with serving(lambda call: ServiceAnswer({"ok": True})) as started:
        yield started


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin by its name, as after an installation."""
    site = tmp_path_factory.mktemp("site")
    write_metadata(site, Path(__file__).parents[1])
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])


class TestWebhookTracker(TrackerSuite):
    [target] = rlcore_trackers()
    plugins = ("webhook",)

    @pytest.fixture(autouse=True)
    def _address(self, service: ScriptedService) -> None:
        type(self).settings = {"plugins.webhook.url": f"{service.url}/hook"}


def texts(service: ScriptedService, field: str = "text") -> list[str]:
    return [call.json()[field] for call in service.calls if field in call.json()]


def tracker(tmp_path: Path, **settings: object) -> WebhookTracker:
    section = WebhookSettings(**settings)  # type: ignore[arg-type]
    return WebhookTracker(TrackContext("webhook", "sums", "first", tmp_path, section))


def run(directory: Path, url: str, **settings: Any) -> TrainResult:
    """A run on the null policy that the tracker follows."""
    settings = {"track.to": ["webhook"], "plugins.webhook.url": url, **settings}
    return train(run_settings(directory, 4, **settings), plugins=["null", "webhook"])


@pytest.mark.slow
def test_a_run_tells_its_start_its_steps_its_evaluations_and_its_end(service: ScriptedService, tmp_path: Path) -> None:
    service.calls.clear()
    settings = {"plugins.webhook.every_steps": 2, "plugins.webhook.metrics": ["reward/mean"], "train.name": "told"}
    run(tmp_path, f"{service.url}/hook", **settings, **{"train.max_steps": 3})
    begun, second, *_, ended = messages = texts(service)
    assert begun.startswith("told begins: ")
    assert second.startswith("told step 2: reward/mean ")
    assert ended == "told ended after step 3"
    assert not any("step 1:" in text or "step 3:" in text for text in messages if "eval/" not in text)


def test_an_evaluation_is_reported_at_any_step(service: ScriptedService, tmp_path: Path) -> None:
    service.calls.clear()
    chat = tracker(tmp_path, url=service.url, field="content")
    chat.start({})
    chat.log(3, {"reward/mean": 0.5, "eval/held/mean": 0.25})
    chat.close()
    assert texts(service, "content") == [
        "first begins: no model", "first step 3: eval/held/mean 0.25", "first ended after step 3",
    ]  # fmt: skip


@pytest.mark.parametrize("url", ["", "file:///etc/passwd"])
def test_an_address_that_is_none_refuses_the_run(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match=r"plugins\.webhook\.url: needs an http or https address"):
        tracker(tmp_path, url=url).start({})


@pytest.mark.slow
def test_an_address_that_answers_503_refuses_the_run(tmp_path: Path) -> None:
    with (
        serving(lambda call: ServiceAnswer(b"", status=503)) as down,
        pytest.raises(ConfigError, match=r"webhook of plugin .* 503"),
    ):
        run(tmp_path, down.url)


@pytest.mark.slow
def test_a_chat_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    answers = iter([ServiceAnswer({"ok": True})])
    with serving(lambda call: next(answers, ServiceAnswer(b"", status=503))) as leaving:
        result = run(tmp_path, leaving.url, **{"plugins.webhook.every_steps": 1, "train.max_steps": 3})
    assert (result.steps, len(leaving.calls)) == (3, 3)
