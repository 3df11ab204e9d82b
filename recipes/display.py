"""What a person sees: a banner, live progress on a terminal and plain lines elsewhere, and tables."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table


class Display:
    """Progress of something with a number of steps; use it as a context.

    Args:
        title: stands at the beginning of the line.
        steps: how many there are.
        main: False shows nothing: on all processes but the main one.
    """

    def __init__(self, title: str, steps: int, *, main: bool = True) -> None:
        self.title, self.steps, self.main = title, steps, main
        self.console = make_console(main)
        self.count, self.printed = 0, time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self.main and self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                console=self.console,
            )
            self._task = self._progress.add_task(self.title, total=self.steps, numbers="")
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def report(self, row: dict[str, float]) -> None:
        """Show a row of `fit`: step, loss, images/s and the time left."""
        step = int(row["step"])
        text = f"loss {row['loss']:.4f}"
        if "accuracy" in row:
            text += f"  accuracy {row['accuracy']:.3f}"
        text += f"  {row['images_per_second']:,.0f} images/s  {clock(row['seconds_left'])} left"
        if row["data_wait"] > 0.1 and step > 1:
            text += f"  waiting for data {row['data_wait']:.0%} (more train.workers?)"
        self._show(step, text)

    def warn(self, line: str) -> None:
        """One line about something that went wrong, above the progress."""
        self.console.print(f"warning: {line}", markup=False)

    def advance(self, text: str) -> None:
        """One more of the things that are counted is done."""
        self.count += 1
        self._show(self.count, text)

    def _show(self, done: int, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=done, numbers=text)
        elif self.main and (done == self.steps or time.monotonic() - self.printed > 5):
            # Not a terminal: a line every few seconds is enough for a log file.
            self.printed = time.monotonic()
            self.console.print(f"{self.title}  {done}/{self.steps}  {text}", markup=False)


def warn(line: str) -> None:
    """One line about something that went wrong."""
    make_console().print(f"warning: {line}", markup=False)


def make_console(main: bool = True) -> Console:
    """A console on standard output that never wraps numbers in a log file; quiet unless `main`."""
    width = None if sys.stdout.isatty() else 160
    return Console(quiet=not main, highlight=False, soft_wrap=not sys.stdout.isatty(), width=width)


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def banner(console: Console, title: str, **lines: Any) -> None:
    """What is about to run, a line a fact."""
    console.print(f"[bold]{title}[/bold]")
    width = max(map(len, lines), default=0)
    for name, value in lines.items():
        if value not in (None, ""):
            console.print(f"  {name:<{width}}  {value}", markup=False)


def results_table(rows: list[dict[str, Any]], *, num_test: int | None = None) -> Table:
    """The rows of results.json for people: one line for each protocol, number of labels and encoder."""
    title = (
        "Accuracy on the test split"
        + (f" ({num_test:,} images)" if num_test else "")
        + ", mean ± standard deviation over draws of labels"
    )
    table = Table(title=title, title_style="bold", title_justify="left")
    for heading in ("protocol", "labels a class", "encoder", "accuracy", "seeds", "chosen on held-out training images"):
        table.add_column(heading, justify="right" if heading in ("labels a class", "accuracy", "seeds") else "left")
    before = None
    for row in rows:
        group = (row["protocol"] == "finetune", row["labels"])
        if before is not None and group != before:
            table.add_section()
        before = group
        spread = f"{row['mean']:.3f} ± {row['std']:.3f}" if row["std"] is not None else f"{row['mean']:.3f}"
        style = "bold" if row["init"] == "mpp" else None
        labels = "all" if row["labels"] is None else str(row["labels"])
        table.add_row(
            row["protocol"], labels, row["init"], spread, str(row["seeds"]), row.get("chosen", ""), style=style
        )
    return table
