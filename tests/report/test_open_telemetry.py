"""track.open_telemetry: spans of a run for a collector; a collector that is gone holds nothing up."""

import threading
from pathlib import Path
from typing import Any

import pytest

from rlcore.contracts.activity import CALL, PHASE, REWARD, STEP, BegunWork, Span
from rlcore.errors import ConfigError
from rlcore.report.open_telemetry import SpanExport, require_installed
from rlcore.report.trace import TraceLog
from rlcore.testing.null import SETTINGS
from rlcore.train import train
from rlcore.types import TrajectoryId

ROW = TrajectoryId("all/3", 0, 1)
SPANS = [
    Span(BegunWork(STEP, "step 12", "", None, 1, 1.0), 2.0),
    Span(BegunWork(PHASE, "sampling", "", None, 1, 1.0), 1.5),
    Span(BegunWork(CALL, "actor[0]", "update", None, 1, 1.5), 1.75),
    Span(BegunWork(REWARD, "judge", "", ROW, 2, 1.25), 1.5),
]


def test_without_the_sdk_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"track\.open_telemetry: .* pip install opentelemetry-sdk "):
        require_installed(lambda name: None)


def test_the_trace_hands_its_spans_to_a_second_reader(tmp_path: Path) -> None:
    class Ended:
        num_left_out = 0

        def spans(self) -> list[Span]:
            return SPANS

    read: list[Any] = []
    TraceLog(tmp_path, 1000.0, lambda *arguments: read.append(arguments)).write(12, Ended())  # type: ignore[arg-type]
    [(step, spans, offset)] = read
    assert (step, offset, sorted(spans)) == (12, 1000.0, sorted(SPANS))


class TestWithTheSdk:
    """The spans that an exporter gets."""

    def exported(self, exporter: Any, warnings: list[str]) -> SpanExport:
        export = SpanExport("sums", warn=warnings.append, make=lambda: exporter, find=lambda name: name)
        export.start()
        return export

    def test_a_step_is_one_trace_with_the_times_and_names_of_its_work(self) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter, warnings = InMemorySpanExporter(), list[str]()
        export = self.exported(exporter, warnings)
        export.export(12, SPANS, 1000.0)
        export.close()
        root, *inner = exporter.get_finished_spans()
        assert (root.name, root.start_time, root.end_time) == ("step 12", 1_001_000_000_000, 1_002_000_000_000)
        assert root.resource.attributes["rlcore.run"] == "sums"
        assert [span.name for span in inner] == ["sampling", "update", "judge"]
        assert {span.parent.span_id for span in inner} == {root.context.span_id}
        assert dict(inner[2].attributes) == {
            "rlcore.step": 12,
            "rlcore.kind": "reward",
            "rlcore.who": "judge",
            "rlcore.prompt": "all/3",
            "rlcore.sample": 1,
        }
        assert warnings == []

    def test_a_collector_that_hangs_or_fails_costs_spans_and_one_warning(self) -> None:
        released = threading.Event()

        class Exporter:
            def export(self, spans: Any) -> Any:
                released.wait(10)
                raise ConnectionError("refused")

            def shutdown(self) -> None:
                pass

        warnings = list[str]()
        export = self.exported(Exporter(), warnings)
        for step in (1, 2, 3):
            export.export(step, SPANS, 0.0)
        assert [warning.split(":")[1].strip() for warning in warnings] == ["4 spans of step 2 are left out"]
        released.set()
        export.close()
        assert len(warnings) == 1

    @pytest.mark.slow
    def test_a_run_sends_its_steps(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter = InMemorySpanExporter()
        monkeypatch.setattr("rlcore.report.open_telemetry._otlp_exporter", lambda: exporter)
        more = ("train.max_steps=2", f"train.dir={tmp_path}", "train.name=run", "track.open_telemetry=true")
        train(*SETTINGS, *more, plugins=["null"])
        names = [span.name for span in exporter.get_finished_spans()]
        assert {"step 1", "step 2", "sampling", "update", "letters"} <= {*names}
