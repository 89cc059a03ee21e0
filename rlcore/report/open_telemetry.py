"""Sends the spans of `trace.json` to an OpenTelemetry collector, with the SDK's exporter for OTLP over HTTP.

It runs in a separate thread, with at most one step in flight. A slow or missing collector costs spans, which a warning
counts, but never delays the run.
"""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlcore.contracts.activity import STEP, Span
from rlcore.errors import ConfigError, RlcoreError, boundary
from rlcore.errors.redaction import redact
from rlcore.report.trackers import DaemonThread

CLOSE_S = 5.0
"""Seconds that the last export may take when the run ends."""
AT_A_TIME = 512
"""Most spans of one request."""
NEEDED = "opentelemetry.exporter.otlp.proto.http"

logger = logging.getLogger(__name__)


class SpanExport:
    """Exports spans, a step at a time; nothing runs before `start`."""

    def __init__(
        self,
        run_name: str,
        *,
        warn: Callable[[str], None] = logger.warning,
        make: "Callable[[], Any] | None" = None,
        find: Callable[[str], object | None] = importlib.util.find_spec,
    ) -> None:
        """`make` returns the SpanExporter; by default the one that the variables OTEL_EXPORTER_OTLP_* describe."""
        self._run_name, self._warn, self._make, self._find = run_name, warn, make or _otlp_exporter, find
        self._thread: DaemonThread | None = None
        self._pending: Future[Any] | None = None
        self._exporter: Any = None
        self._provider: Any = None
        self._has_warned = False

    def start(self) -> None:
        """Make the exporter; ConfigError if its package is not installed or its settings are wrong."""
        require_installed(self._find)
        with boundary("track.open_telemetry", ConfigError):
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider

            self._exporter = self._make()
            resource = Resource.create({"rlcore.run": redact(self._run_name)})
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._thread = DaemonThread("export of spans")
        self._thread.start()

    def export(self, step: int, spans: Sequence[Span], unix_offset: float) -> None:
        """Hand over spans, with the offset of their times from seconds since 1970; returns immediately."""
        if self._thread is None or not spans:
            return
        if self._pending is not None and not self._pending.done():
            self._warn_once(f"{len(spans)} spans of step {step} are left out: those before are still being sent")
            return
        self._pending = self._thread.submit(lambda: self._export(step, spans, unix_offset))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Send the spans in flight, but wait at most `limit_s`; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None and not thread.end(self._shut_down, limit_s):
            self._warn(f"track.open_telemetry: not finished within {limit_s:g} s; left behind")

    def _export(self, step: int, spans: Sequence[Span], unix_offset: float) -> None:
        try:
            with boundary("track.open_telemetry", RlcoreError):
                found = _sdk_spans(self._provider, step, spans, unix_offset)
                parts = [found[begin : begin + AT_A_TIME] for begin in range(0, len(found), AT_A_TIME)]
                failed = sum(len(part) for part in parts if self._exporter.export(part).name != "SUCCESS")
            if failed:
                self._warn_once(f"{failed} of {len(found)} spans of step {step} were not taken by the collector")
        except RlcoreError as problem:
            self._warn_once(str(problem))

    def _shut_down(self) -> None:
        try:
            with boundary("track.open_telemetry", RlcoreError):
                self._exporter.shutdown()
        except RlcoreError as problem:
            self._warn_once(str(problem))

    def _warn_once(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"track.open_telemetry: {problem}; trace.json has everything; this warning is not repeated")


def require_installed(find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """ConfigError with the install line if the SDK or its exporter is missing."""
    try:
        is_there = find("opentelemetry.sdk") is not None and find(NEEDED) is not None
    except ModuleNotFoundError:  # a parent package is missing
        is_there = False
    if not is_there:
        raise ConfigError(
            "track.open_telemetry: the OpenTelemetry SDK is not installed; install it with: pip install "
            "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        )


def _otlp_exporter() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _sdk_spans(provider: Any, step: int, spans: Sequence[Span], unix_offset: float) -> list[Any]:
    """The spans as spans of the SDK: one trace, whose root is the step, or the work after it."""
    from opentelemetry.trace import set_span_in_context

    tracer = provider.get_tracer("rlcore")

    def begun(name: str, began: float, context: Any = None, **attributes: Any) -> Any:
        kept = {f"rlcore.{key}": value for key, value in attributes.items() if value not in (None, "")}
        return tracer.start_span(redact(name), context, attributes=kept, start_time=_ns(began + unix_offset))

    def ended(span: Any, at: float) -> Any:
        span.end(end_time=_ns(at + unix_offset))
        return span

    first, last = min(span.work.began for span in spans), max(span.ended for span in spans)
    steps = [span for span in spans if span.work.kind == STEP]
    name, began, end = (steps[0].work.who, steps[0].work.began, steps[0].ended) if steps else ("after", first, last)
    root = begun(name, began, step=step)
    context = set_span_in_context(root)
    found = [ended(root, end)]
    for span in spans:
        work = span.work
        if work.kind == STEP:
            continue
        sample = work.sample
        about: dict[str, Any] = {"kind": work.kind, "who": redact(work.who)}
        if sample is not None:
            about |= {"prompt": redact(sample.prompt), "sample": sample.sample}
        found.append(ended(begun(work.what or work.who, work.began, context, step=step, **about), span.ended))
    return [span for span in found if hasattr(span, "end_time")]  # a sampler may leave some out


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
