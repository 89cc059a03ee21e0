"""Shows a run on the terminal: a progress bar, tables of completions, and the last words."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rlcore.errors.redaction import displayable
from rlcore.report.foreign_output import UNWRITABLE, beside, discard
from rlcore.types import Metrics, ScoredTrajectory, Trajectory

COLUMNS_OF_TEXT = 400
"""Characters of a prompt or completion that a table shows at most."""


class Terminal:
    """The display of one run, without secrets; on anything but a terminal one line a step instead of a bar."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=cast(IO[str], _LastingOutput()))
        self._total = 0
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[line]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            redirect_stdout=False,  # rich would pass secrets on; `foreign_output` does it
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("train", line="")
        self._last_step = ""

    @contextmanager
    def progress(self, total_steps: int, done_steps: int) -> Iterator[None]:
        """Show the bar."""
        self._total = total_steps
        self._bar.update(self._task, total=total_steps, completed=done_steps)
        with self._bar, beside(self._console):
            yield

    def phase(self, text: str) -> None:
        """Say what goes on before or beside the steps."""
        self._bar.update(self._task, line=displayable(text))
        if not self._console.is_terminal:
            self.say(text)

    def step(self, step: int, metrics: Metrics) -> None:
        """Advance to `step`."""
        line = (
            f"reward {metrics.get('reward/mean', float('nan')):.3f}"
            f"  length {metrics.get('completion/length_mean', 0):.0f}"
            f"  {metrics['time/step_s']:.1f} s/step"
        )
        self._last_step = line
        self._bar.update(self._task, completed=step, line=line)
        if not self._console.is_terminal:
            self.say(f"step {step}/{self._total}  {line}")

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """One line for each source that was evaluated."""
        self._bar.update(self._task, line=self._last_step)
        for name in sorted(name for name in metrics if name.endswith("/mean") and name.startswith("eval/")):
            source = name.removeprefix("eval/").removesuffix("/mean")
            count = int(metrics.get(f"eval/{source}/num", 0))
            self.say(f"step {step}  held-out '{source}': mean reward {metrics[name]:.3f} over {count} prompts")

    def completions(self, step: int, rows: Sequence[tuple[ScoredTrajectory, float | None]]) -> None:
        """A table of (prompt, completion, reward parts, advantage or None for a sample that is not trained on)."""
        table = Table(title=f"completions of step {step}", title_justify="left", show_lines=True)
        parts = sorted({name for scored, _ in rows for name in scored.reward.components})
        for name in ("prompt", "completion"):
            table.add_column(name, overflow="fold", ratio=2)
        for name in (*parts, "reward", "advantage"):
            table.add_column(_clip(name), justify="right", no_wrap=True)
        for scored, advantage in rows:
            prompt = str(scored.trajectory.prompt.messages[-1].get("content", ""))
            cells = [_clip(prompt), _dialogue(scored.trajectory)]
            scores = [scored.reward.components.get(name) for name in parts]
            numbers = ["-" if score is None else f"{score:.2f}" for score in scores]
            gained = "-" if advantage is None else f"{advantage:+.2f}"
            table.add_row(*cells, *numbers, f"{scored.reward.score:.2f}", gained)
        self._console.print(table)

    def say(self, text: str) -> None:
        """A separate line, never taken for markup."""
        if self._console.is_terminal:
            self._console.print(Text(displayable(text)), soft_wrap=True)
        else:  # a step's one line, for which rich would take longer than for the step's metrics
            self._console.file.write(f"{displayable(text)}\n")
            self._console.file.flush()

    def warn(self, text: str) -> None:
        """A line that should not be missed."""
        self._console.print(Text(displayable(f"warning: {text}"), style="bold yellow"), soft_wrap=True)


def _dialogue(trajectory: Trajectory) -> Text:
    """The completion; of a conversation every message under its role, those of the policy as they are."""
    if isinstance(trajectory.completion, str):
        return _clip(trajectory.completion)
    shown = Text()
    for message in trajectory.completion:
        role, style = str(message.get("role")), "bold" if message.get("role") == "assistant" else "dim italic"
        label = _clip(f"{role}: ")
        label.stylize(style)
        shown.append_text(label).append_text(_clip(str(message.get("content") or message.get("tool_calls") or "")))
        shown.append("\n")
    shown.rstrip()
    return shown


def _clip(text: str) -> Text:
    """Foreign text in a table, cut where it is long."""
    text = displayable(text)
    return Text(text if len(text) <= COLUMNS_OF_TEXT else text[:COLUMNS_OF_TEXT] + " ...")


class _LastingOutput:
    """Standard output that a run outlives: when its reader goes (`| head`), the rest is discarded; the log says so."""

    def __init__(self) -> None:
        # Others' prints are shown through the console, so the console itself writes to what is behind the proxy; it is
        # looked up once, because others' code may replace sys.stdout.
        self._file: TextIO | None = getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def write(self, text: str) -> int:
        if self._file is not None:
            try:
                self._file.write(text)
            except UNWRITABLE as cause:
                self._discard(self._file, cause)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except UNWRITABLE as cause:
                self._discard(self._file, cause)

    def _discard(self, file: TextIO, cause: Exception) -> None:
        discard(file, cause)
        self._file = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
