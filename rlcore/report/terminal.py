"""Shows a run on the terminal: a progress bar, the activity inside a step, tables of completions, the last lines."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rlcore.errors import counted
from rlcore.errors.redaction import bounded, displayable
from rlcore.report.foreign_output import UNWRITABLE, above_progress_bar, discard, write_readably
from rlcore.report.standing import duration, progress, sentence
from rlcore.report.status import Status
from rlcore.types import Metrics, ScoredTrajectory, Trajectory

COLUMNS_OF_TEXT = 400
"""Most characters of a prompt or completion in a table."""
LEAST_COLUMNS_OF_TEXT = 10
"""Columns that prompts, and completions, need at least in a table."""
FRAME = 3
"""Columns of a table's frame and padding for each of its columns."""
QUIET_S = 30.0
"""Seconds without a line after which a log reports the activity, because it has no bar."""
MEAN_OF = 20
"""Number of last steps whose mean time is the estimate for the remaining ones."""
SHOWN: Sequence[tuple[str, str]] = (
    ("reward/mean", "reward {:.3f}"),
    ("reward/zero_std_frac", "equal {:.0%}"),
    ("completion/length_mean", "length {:.0f}"),
    ("completion/clipped_frac", "cut {:.0%}"),
    ("policy/entropy", "entropy {:.3g}"),
    ("policy/kl", "KL {:.3g}"),
    ("time/tokens_per_s", "{:.0f} tokens/s"),
    ("time/step_s", "{:.1f} s/step"),
)
"""The metrics of a step's line, without those that the step lacks."""

_Rows = Sequence[tuple[ScoredTrajectory, float | None]]
"""Samples with their advantages."""


class Terminal:
    """Displays one run, without secrets: with a bar on a terminal, with one line per step elsewhere."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(file=cast(IO[str], _LastingOutput()))
        self._clock, self._said_at = clock, clock()
        self._total = self._step = 0
        self._step_s: deque[float] = deque(maxlen=MEAN_OF)
        self._step_ended = self._said_at
        self._bar = _Bar(
            TextColumn("{task.fields[step]}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[line]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
            redirect_stdout=False,  # `foreign_output` does it, without secrets
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("train", total=None, step="", line="starting", left="")

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Show the bar inside the block; until `begin` it shows the progress of the start."""
        with self._bar, above_progress_bar(self._console):
            yield

    def begin(self, total_steps: int, done_steps: int) -> None:
        """Report that the run has started, and that steps after `done_steps` follow."""
        self._total, self._step, self._step_ended = total_steps, done_steps, self._clock()
        self._bar.update(
            self._task, total=total_steps, completed=done_steps, step=f"step {done_steps}/{total_steps}", line=""
        )

    def end(self) -> None:
        """Stop the bar after the last step, and leave it on the screen."""
        self._bar.update(self._task, line="", left="")
        self._bar.stop()

    def phase(self, text: str) -> None:
        """Report activity before or between steps."""
        self._bar.update(self._task, line=displayable(text))
        if not self._console.is_terminal:
            self.say(text)

    def standing(self, status: Status) -> None:
        """Show the activity within a step; in a log only after `QUIET_S` without a line. Any thread may call it."""
        left = self._left()
        if self._console.is_terminal:
            shown = f"{status.phase}  {progress(status)}".strip()
            self._bar.update(self._task, line=displayable(shown), left=left)
        elif self._clock() - self._said_at >= QUIET_S:
            self.say(f"{sentence(status, time.time())}" + (f"; {left}" if left else ""))

    def step(self, step: int, metrics: Metrics) -> None:
        """Advance to `step`."""
        now = self._clock()
        self._step_s.append(max(now - self._step_ended, metrics["time/step_s"] if not self._step_s else 0.0))
        self._step_ended, self._step = now, step
        line = "  ".join(text.format(metrics[name]) for name, text in SHOWN if name in metrics)
        left = self._left()
        self._bar.last_step = f"step {step}  {line}"
        self._bar.update(self._task, completed=step, step=f"step {step}/{self._total}", left=left)
        if not self._console.is_terminal:
            is_long = self._left_s() >= QUIET_S
            self.say(f"step {step}/{self._total}  {line}" + (f"  {left}" if is_long else ""))

    def _left_s(self) -> float:
        """Estimated seconds until the end of the last step, from the last steps' times; 0 before the first."""
        if not self._step_s:
            return 0.0
        mean_s = sum(self._step_s) / len(self._step_s)
        return max(0.0, mean_s * (self._total - self._step) - (self._clock() - self._step_ended))

    def _left(self) -> str:
        return f"{duration(self._left_s())} left" if self._step_s and self._step < self._total else ""

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Print one line per evaluated source."""
        for name in sorted(name for name in metrics if name.endswith("/mean") and name.startswith("eval/")):
            source = name.removeprefix("eval/").removesuffix("/mean")
            count = int(metrics.get(f"eval/{source}/num", 0))
            self.say(
                f"step {step}  held-out '{source}': mean reward {metrics[name]:.3f} over {counted(count, 'prompt')}"
            )

    def completions(self, step: int, rows: _Rows) -> None:
        """Print a table of prompts, completions, reward components and advantages (None: not trained on)."""
        parts = sorted({name for scored, _ in rows for name in scored.reward.components})
        is_wide = self._console.width >= _least_columns(parts, rows)
        self._console.print(_as_table(step, parts, rows) if is_wide else _as_lines(step, parts, rows))

    def say(self, text: str) -> None:
        """Print a separate line, never taken for markup."""
        self._said_at = self._clock()
        if self._console.is_terminal:
            self._console.print(Text(displayable(text)), soft_wrap=True)
        else:  # rich would take longer for this line than the run for the step's metrics
            self._console.file.write(f"{displayable(text)}\n")
            self._console.file.flush()

    def warn(self, text: str) -> None:
        """Print a highlighted line."""
        self._console.print(Text(bounded(f"warning: {text}"), style="bold yellow"), soft_wrap=True)


class _Bar(Progress):
    """Shows the bar, and below it the metrics of the last step."""

    last_step = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """See `rich.progress.Progress.get_renderables`."""
        yield from super().get_renderables()
        if self.last_step:
            yield Text(displayable(self.last_step), style="dim", no_wrap=True, overflow="ellipsis")


def _as_table(step: int, parts: Sequence[str], rows: _Rows) -> Table:
    table = Table(title=f"completions of step {step:d}", title_justify="left", show_lines=True)
    for text in ("prompt", "completion"):
        table.add_column(text, overflow="fold", ratio=2)
    for name in (*parts, "reward", "advantage"):
        table.add_column(_clip(name), justify="right", no_wrap=True)
    for scored, advantage in rows:
        table.add_row(_prompt(scored), _dialogue(scored.trajectory), *_numbers(parts, scored, advantage))
    return table


def _as_lines(step: int, parts: Sequence[str], rows: _Rows) -> Text:
    """The same for a narrow terminal: below the numbers of a sample, its texts."""
    shown = Text(f"completions of step {step:d}", overflow="fold")
    for scored, advantage in rows:
        shown.append("\n\n")
        for name, number in zip((*parts, "reward", "advantage"), _numbers(parts, scored, advantage), strict=True):
            shown.append_text(_clip(name)).append(f" {number}  ")
        shown.rstrip()
        shown.append("\nprompt: ").append_text(_prompt(scored))
        shown.append("\ncompletion: ").append_text(_dialogue(scored.trajectory))
    return shown


def _least_columns(parts: Sequence[str], rows: _Rows) -> int:
    """The width below which a table leaves too little for texts, because it keeps its numbers whole."""
    lines = [_numbers(parts, scored, advantage) for scored, advantage in rows]
    names = [_clip(name).cell_len for name in (*parts, "reward", "advantage")]
    widths = [max([name, *(len(line[at]) for line in lines)]) for at, name in enumerate(names)]
    return sum(widths) + 2 * LEAST_COLUMNS_OF_TEXT + FRAME * (len(widths) + 2) + 1


def _numbers(parts: Sequence[str], scored: ScoredTrajectory, advantage: float | None) -> list[str]:
    """Scores of the components, the reward, and the advantage."""
    scores = [scored.reward.components.get(name) for name in parts]
    return [
        *["-" if score is None else f"{score:.2f}" for score in scores],
        f"{scored.reward.score:.2f}",
        "-" if advantage is None else f"{advantage:+.2f}",
    ]


def _prompt(scored: ScoredTrajectory) -> Text:
    return _clip(str(scored.trajectory.prompt_messages[-1].get("content", "")))


def _dialogue(trajectory: Trajectory) -> Text:
    """The completion; for a conversation every message with its role, the policy's in bold."""
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
    """Foreign text for a table; cuts long text."""
    text = displayable(text)
    return Text(text if len(text) <= COLUMNS_OF_TEXT else text[:COLUMNS_OF_TEXT] + " ...")


class _LastingOutput:
    """Standard output that may end before the run: if its reader goes (`| head`), the rest is discarded, with a log."""

    def __init__(self) -> None:
        # Prints of foreign code go through the console, so the console itself writes to the file behind the proxy. The
        # file is looked up once, because foreign code may replace sys.stdout.
        self._file: TextIO | None = getattr(sys.stdout, "rich_proxied_file", sys.stdout)

    def write(self, text: str) -> int:
        file = self._file  # another thread may find out that it is gone
        if file is not None:
            try:
                write_readably(file, text)
            except UNWRITABLE as cause:
                self._discard(cause)
        return len(text)

    def flush(self) -> None:
        file = self._file
        if file is not None:
            try:
                file.flush()
            except UNWRITABLE as cause:
                self._discard(cause)

    def _discard(self, cause: Exception) -> None:
        file, self._file = self._file, None
        if file is not None:
            discard(file, cause)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
