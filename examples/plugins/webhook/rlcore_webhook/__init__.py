"""A tracker that posts a run's progress to a chat: Slack, Mattermost, Discord, or any address that takes JSON."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore import ConfigSection, hookimpl, option
from rlcore.contracts.tracking import Setting, Tracker, TrackerOffer

EVALUATION = "eval/"


@dataclass(frozen=True)
class WebhookSettings:
    """Address and content of the messages."""

    url: str = ""
    """Address that takes the messages; who has it can post, so name a variable: `${oc.env:WEBHOOK_URL}`."""
    field: str = "text"
    """JSON field of the message: `text` for Slack and Mattermost, `content` for Discord."""
    every_steps: int = option(10, at_least=1)
    """Steps between two messages; evaluations are always posted."""
    metrics: tuple[str, ...] = ("reward/mean", "completion/length_mean", "policy/entropy")
    """Metrics in a message, as far as the step has them."""
    timeout_s: float = option(10.0, above=0)
    """Seconds allowed for an answer."""


class WebhookTracker(Tracker):
    """Posts a message at the start, every `every_steps` steps, at each evaluation, and at the end."""

    def start(self, configuration: Mapping[str, Setting]) -> None:
        """Post the first message; an address that does not take it refuses the run."""
        self._settings = self.context.settings(WebhookSettings)
        self._last = 0
        if not self._settings.url.startswith(("http://", "https://")):
            raise ValueError("plugins.webhook.url: needs an http or https address, such as ${oc.env:WEBHOOK_URL}")
        self._post(f"begins: {configuration.get('model.path') or 'no model'}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Post what `plugins.webhook.metrics` names, and every metric of an evaluation."""
        self._last = max(self._last, step)
        shown = {name: metrics[name] for name in self._settings.metrics if name in metrics}
        if step % self._settings.every_steps:
            shown = {}
        shown |= {name: value for name, value in metrics.items() if name.startswith(EVALUATION)}
        if shown:
            self._post(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in shown.items()))

    def close(self) -> None:
        """Post the last message."""
        self._post(f"ended after step {self._last}")

    def _post(self, text: str) -> None:
        body = json.dumps({self._settings.field: f"{self.context.run_name} {text}"}).encode()
        request = urllib.request.Request(self._settings.url, body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=self._settings.timeout_s).close()
        except urllib.error.HTTPError as refused:
            refused.close()  # it is an answer, too
            raise


@hookimpl
def rlcore_config_sections() -> Sequence[ConfigSection]:
    return [ConfigSection("webhook", WebhookSettings)]


@hookimpl
def rlcore_trackers() -> Sequence[TrackerOffer]:
    return [TrackerOffer("webhook", WebhookTracker)]
