"""The engine: which cells a trial needs, which of them are missing, and the run that makes them.

The order of a run: check parameters and inputs; open the store; plan the rows and skip those known; hand groups of
cells to workers in declared order; write each answer in a transaction; run timed parts last and alone.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import cloudpickle
from pydantic import BaseModel

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.trial.code import digest
from fairtrial.trial.declare import Part, Trial
from fairtrial.trial.machine import fingerprint
from fairtrial.trial.params import input_digests, key_of
from fairtrial.trial.pool import ENGINES, Pool
from fairtrial.trial.stages import codes_of_parts
from fairtrial.trial.store import Row, Store, as_json
from fairtrial.trial.worker import Opening, load_trial, package_of

Until = Literal["flat", "decided"]


class InterruptedRunError(KeyboardInterrupt):
    """A run was ended by Ctrl-C or SIGTERM; its folder resumes. Like any interrupt it passes ``except Exception``."""


class Watcher(Protocol):
    """Is told how a run goes: the progress bar."""

    def planned(self, total: int, known: int) -> None:
        """Be told that ``total`` cells are wanted, of which ``known`` are stored."""

    def finished(self, row: Row) -> None:
        """Be told that a cell was measured or lost."""

    def waiting(self, cells: int) -> None:
        """Be told that another process computes the last ``cells`` cells."""


@dataclass
class Run:
    """A trial opened on a folder: what is planned and what is known.

    Parameters
    ----------
    trial : a :class:`Trial`, or ``"package.module:name"`` of one.
    params : its checked parameters.
    folder : the output folder.
    jobs, threads : workers, and threads of each; jobs x threads should not exceed the cores.
    engine : ``local`` or ``ray``.
    time_limit : seconds after which a cell is lost, or None.
    version : replaces the digest of a measure whose source cannot be seen.
    """

    trial: Trial | str
    params: BaseModel
    folder: Path
    jobs: int = 1
    threads: int = 1
    engine: str = "local"
    time_limit: float | None = None
    version: str | None = None
    watcher: Watcher | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UnknownNameError("engine", self.engine, ENGINES)
        if self.jobs < 1 or self.threads < 1:
            raise InputError(f"jobs={self.jobs}, threads={self.threads}: both must be at least 1")
        self.declaration = load_trial(self.trial) if isinstance(self.trial, str) else self.trial
        self.payload: str | bytes = self.trial if isinstance(self.trial, str) else cloudpickle.dumps(self.trial)
        self.parts = self.declaration.parts(self.params)
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names):
            raise InputError(f"trial {self.declaration.name!r}: two parts have one name")
        self.inputs = input_digests(self.params)
        self.key_params = key_of(self.params)
        self.codes, self.notes = codes_of_parts(self.parts, package_of(self.declaration), self.version)
        self.store = Store(self.folder, self.declaration.name)
        self.pool: Pool | None = None

    # planning -------------------------------------------------------------------------------------------------------

    def plan(self, part: Part, replicates: int | None = None) -> list[Row]:
        """Return the rows of a part in declared order; timed rows alternate their candidates and keep their machine."""
        machine = fingerprint(self.threads)
        heads = {
            c.label: digest(
                self.declaration.name, part.name, c.label, as_json(self.key_params), as_json(self.inputs),
                as_json(self.codes[part.name][c.label]), as_json(c.grid), machine if part.timed else "",
            )
            for c in part.candidates
        }  # fmt: skip
        rows = []
        for index, cell in enumerate(part.cells(replicates)):
            forward = not (part.timed and index % 2)
            factors = as_json(cell)
            for candidate in part.candidates if forward else reversed(part.candidates):
                label = candidate.label
                key = digest(heads[label], factors)
                code = self.codes[part.name][label]
                rows.append(Row(key, part.name, label, cell, self.key_params, self.inputs, code, machine))
        return rows

    def rows(self, replicates: int | None = None) -> list[Row]:
        """Return the rows of all parts: as many replicates as declared, or ``replicates`` where a part may grow."""
        return [row for part in self.parts for row in self.plan(part, self._count(part, replicates))]

    @staticmethod
    def _count(part: Part, replicates: int | None) -> int | None:
        factor = part.replicate
        if factor is None or replicates is None:
            return None
        return min(replicates, max(factor.most or 0, len(factor.values)))

    def most_replicates(self) -> int:
        """Return how far the part that may grow furthest may grow."""
        counts = [max(f.most or 0, len(f.values)) for part in self.parts if (f := part.replicate)]
        return max(counts, default=1)

    def known(self, rows: Iterable[Row]) -> list[Row]:
        """Return the rows with what the store holds of them; those it lacks stay ``planned``."""
        rows = list(rows)
        stored = self.store.load(row.key for row in rows)
        # JSON turned tuples into lists: the factors as declared are what claims and frames name.
        return [replace(stored[row.key], factors=row.factors) if row.key in stored else row for row in rows]

    def explain_missing(self, rows: list[Row]) -> list[str]:
        """Return why stored cells are computed again: ``'24 cells run again: fiedler.py changed'``."""
        states = self.store.states(row.key for row in rows)
        counts: dict[str, int] = {}
        for row in rows:
            if row.key not in states and (changes := self.store.changes(row)):
                reason = ", ".join(changes[:3]) + (f" and {len(changes) - 3} more" if len(changes) > 3 else "")
                counts[reason] = counts.get(reason, 0) + 1
        return [f"{count} cell{'s' * (count > 1)} run again: {reason}" for reason, count in counts.items()]

    # running --------------------------------------------------------------------------------------------------------

    def execute(self, rows: list[Row]) -> None:
        """Measure the rows that the store lacks: untimed parts first, then each timed part alone."""
        finished = self.store.states(row.key for row in rows)
        missing = [row for row in rows if row.key not in finished]
        if self.watcher:
            self.watcher.planned(len(rows), len(rows) - len(missing))
        timed = {part.name for part in self.parts if part.timed}
        with _interruptible():
            self._work([row for row in missing if row.part not in timed], self.jobs)
            for part in self.parts:
                if part.timed:
                    self._work([row for row in missing if row.part == part.name], 1)

    def _work(self, rows: list[Row], at_once: int) -> None:
        """Hand groups of rows to workers and write what they answer, until all are finished by whatever process.

        At most ``at_once`` workers work at a time: one, where times are measured.
        """
        groups = deque(self._groups(rows))
        if not groups:
            return
        pool = self._workers()
        idle = deque(range(at_once))
        held: list[list[Row]] = []  # groups that another process was computing when we came to them
        beat = time.monotonic()
        busy = 0
        try:
            while groups or busy or held:
                while idle and groups:
                    group = groups.popleft()
                    taken = set(self.store.claim([row.key for row in group]))
                    if mine := [row for row in group if row.key in taken]:
                        pool.give(idle.popleft(), mine)
                        busy += 1
                    if others := [row for row in group if row.key not in taken]:
                        held.append(others)
                if busy:
                    busy -= self._take(pool, idle)
                elif held and not groups:
                    held, groups = self._await_others(held)
                if time.monotonic() - beat > 5:
                    beat = time.monotonic()
                    self.store.beat()
        finally:
            with contextlib.suppress(InputError):
                self.store.release()

    def _workers(self) -> Pool:
        """Return the workers: they live as long as the run, so that what they loaded stays loaded."""
        if self.pool is None:
            params = cloudpickle.dumps(self.params)
            opening = Opening(self.payload, params, self.inputs, self.codes, self.folder.absolute(), sys.path)
            self.pool = Pool(self.engine, self.jobs, self.threads, opening, self.time_limit)
        return self.pool

    def _take(self, pool: Pool, idle: deque[int]) -> int:
        """Write what workers report, waiting a second at most; return how many groups ended."""
        try:
            report = pool.reports.get(timeout=1)
        except queue.Empty:
            return 0
        if report.row is None or report.answer is None:
            idle.append(report.worker)
            return 1
        row, answer = report.row, report.answer
        if answer.costs:
            self.store.save_stages(answer.costs)
        if answer.status == "fatal":
            raise InputError(answer.reason or "a worker failed")
        row.status, row.reason, row.metrics = answer.status, answer.reason, dict(answer.metrics)
        row.seconds, row.peak, row.peak_sampled = answer.seconds, answer.peak, answer.peak_sampled
        row.stages = answer.stages
        self.store.save(row)
        if self.watcher:
            self.watcher.finished(row)
        row.metrics = {}  # the store has them
        return 0

    def _await_others(self, held: list[list[Row]]) -> tuple[list[list[Row]], deque[list[Row]]]:
        """Wait a moment for other processes; return the groups still held and those to claim anew."""
        finished = self.store.states(row.key for group in held for row in group)
        left = [rest for group in held if (rest := [row for row in group if row.key not in finished])]
        if not left:
            return [], deque()
        if self.watcher:
            self.watcher.waiting(sum(map(len, left)))
        time.sleep(0.5)
        return [], deque(left)

    def _groups(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Yield the rows that belong on one worker together, in declared order."""
        parts = {part.name: part for part in self.parts}
        groups: dict[tuple, list[Row]] = {}
        for row in rows:
            part = parts[row.part]
            names = [name for name in part.group if name in row.factors or name == "candidate"]
            if not names and part.replicate:
                names = [part.replicate.name]
            values = {**row.factors, "candidate": row.candidate}
            groups.setdefault((row.part, *(repr(values[name]) for name in names)), []).append(row)
        yield from groups.values()

    def close(self) -> None:
        """End the workers and close the store."""
        if self.pool is not None:
            self.pool.close()
        self.store.close()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGTERM into the KeyboardInterrupt that Ctrl-C is, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
