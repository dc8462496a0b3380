"""What a run shows while it goes: a bar, the time left, and the verdicts so far."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from fairtrial.trial.table import Table
from fairtrial.trial.verdict import ClaimResult, judge

if TYPE_CHECKING:
    from fairtrial.trial.engine import Run
    from fairtrial.trial.store import Row

STYLES = {"HOLDS": "green", "FAILS": "red", "UNDECIDED": "yellow", "REPORTED": "cyan"}


def time_left(task: Task) -> str:
    """Return how long the rest takes, h:mm:ss, if it goes as all that was measured so far; "" before 2 % were.

    Cells that share a stage come in bursts, which a rate of the last half minute would take for the pace, and of
    thousands of cells the first may hold a stage of minutes that all others share.
    """
    measured = task.completed - task.fields["known"]
    if task.total is None or task.elapsed is None or not measured or measured < task.total / 50:
        return ""
    return str(timedelta(seconds=round(task.elapsed / measured * (task.total - task.completed))))


class TimeLeft(ProgressColumn):
    """The time left."""

    def render(self, task: Task) -> Text:
        """Return it."""
        return Text(time_left(task) or "-:--:--", style="progress.remaining")


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def describe(self, run: Run, level: float) -> None:
        """Be told what runs."""

    def planned(self, total: int, known: int) -> None:
        """Be told how many cells are wanted and known."""

    def finished(self, row: Row) -> None:
        """Be told of a finished cell."""

    def waiting(self, cells: int) -> None:
        """Be told that another process computes the rest."""


class Progress(Silent):
    """A live bar on a terminal; elsewhere a line at every tenth of the work. Writes to standard error."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeft(),
            console=self.console,
            expand=True,
        )
        self.task = self.bar.add_task("", total=None, known=0)
        self.so_far = Text()
        self.live = Live(self._view(), console=self.console, refresh_per_second=4)
        self.run: Run | None = None
        self.level = 0.95
        self.lost = 0
        self.next_look = 0.0
        self.tenth = -1

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.live.stop()

    def describe(self, run: Run, level: float) -> None:
        """Show the notes of a run and remember it for the verdicts so far."""
        self.run, self.level = run, level
        for note in run.notes:
            self.console.print(Text(note, style="dim"))

    def planned(self, total: int, known: int) -> None:
        """Show how much is wanted and how much of it is there."""
        first = self.bar.tasks[0].total is None
        self.bar.update(self.task, description="cells", total=total, completed=known, known=known)
        if first and self.run is not None:
            names = ", ".join(f"{part.name} ({len(part.candidates)} candidates)" for part in self.run.parts)
            there = f", {known} of them already done" if known else ""
            self.console.print(f"[bold]{self.run.declaration.name}[/]: {total} cells in {names}{there}")

    def finished(self, row: Row) -> None:
        """Advance the bar."""
        if row.status == "failed":
            self.lost += 1
            cell = ", ".join(f"{k}={v}" for k, v in row.factors.items())
            self.console.print(Text(f"lost: {row.candidate} at {cell}: {row.reason}", style="red"))
        self.bar.update(self.task, advance=1, description=f"{row.part}: {row.candidate}")
        task = self.bar.tasks[0]
        if self.console.is_terminal:
            self._look()
        elif task.total and (tenth := int(10 * task.completed / task.total)) != self.tenth:
            self.tenth = tenth
            rest = time_left(task) if task.remaining else ""
            left = f", about {rest} left" if rest else ""
            self.console.print(f"{task.completed:.0f} of {task.total:.0f} cells{left}", highlight=False)

    def waiting(self, cells: int) -> None:
        """Show that the rest is another process's."""
        self.bar.update(self.task, description=f"waiting for another process ({cells} cells)")

    def _look(self) -> None:
        """Judge what is there, seldom enough not to slow the run."""
        began = time.monotonic()
        if self.run is None or began < self.next_look:
            return
        rows = self.run.known(self.run.rows())
        tables = {p.name: Table(p, [row for row in rows if row.part == p.name]) for p in self.run.parts}
        self.so_far = _so_far(judge(tables, level=self.level))
        self.live.update(self._view())
        self.next_look = time.monotonic() + max(2.0, 30 * (time.monotonic() - began))

    def _view(self) -> Any:
        return Group(self.bar, self.so_far)


def _so_far(verdicts: list[ClaimResult]) -> Text:
    """Return the verdicts so far in one line: not to be acted on, since they were looked at before the end."""
    line = Text("so far  ", style="dim")
    for verdict in verdicts:
        mark = {"HOLDS": "holds", "FAILS": "fails", "UNDECIDED": "open"}.get(verdict.state, "")
        line.append(f"{verdict.id} ")
        line.append(f"{mark}   ", style=STYLES[verdict.state])
    return line
