"""``check_trial``: what every trial must fulfil, in one call for its test."""

from __future__ import annotations

import math
import os
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import cloudpickle
import numpy as np

from fairtrial.trial.declare import AllOf, AnyClaim, Exact, ForEach, Part, Statistic, Trial
from fairtrial.trial.engine import Run
from fairtrial.trial.evidence import terms_of
from fairtrial.trial.machine import cores
from fairtrial.trial.params import make_params
from fairtrial.trial.pool import ENGINES, LocalWorker
from fairtrial.trial.progress import Silent
from fairtrial.trial.result import Result, collect
from fairtrial.trial.store import Row
from fairtrial.trial.table import CannotJudgeError, Table
from fairtrial.trial.worker import Answer, Opening, Session, Task, load_trial

ROUNDING = 1e-9  # relative; a draw without a seed differs by far more


def check_trial(trial: str | Trial, *, seconds: float = 60.0) -> Result:
    """Check a trial and return the result of its smoke preset.

    * There is a control, and every claim names candidates, metrics, factors and values that its defaults or a preset
      have.
    * Trial and parameters can be pickled, and the code of everything measured can be seen.
    * The smoke preset takes less than ``seconds``, loses no cell, and its claims can be computed.
    * Killed half-way, it goes on with the unfinished cells only, and writes its results.
    * Measured again in another process and folder, the first replicate of untimed parts gives the same values, but for
      rounding.

    Parameters
    ----------
    trial : a :class:`~fairtrial.trial.declare.Trial`, or a card's ``"package.module:name"`` of one.
    seconds : what the smoke preset may take, on the clock or of the processor, whichever is less. It should take under
        ten; the default leaves room for a slow or busy machine, and fails what is far too slow on any.

    Raises
    ------
    AssertionError
        Naming all that is wrong, one a line.

    Examples
    --------
    >>> check_trial("fairtrial.verdicts.trial:trial").verdicts[0].id  # doctest: +SKIP
    'C1'
    """
    declaration = load_trial(trial) if isinstance(trial, str) else trial
    wrong = list(_declared_wrong(declaration))
    _refuse(declaration, wrong)
    params = make_params(declaration, "smoke")
    if declaration.check:
        declaration.check(params)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(ENGINES, {"here": WorkerHere, "lasting": LastingWorker}),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # as in a worker process
        began = _clocks()
        one, two = Path(folder, "one"), Path(folder, "two")
        half = _run_half(trial, params, one)
        run = Run(trial, params, one, threads=_threads(), engine="here", watcher=Ran())
        try:
            wrong += run.notes
            run.execute(run.rows())
            took = min(now - then for now, then in zip(_clocks(), began, strict=True))
            result = collect(run)
            result.save()
            wrong += _run_wrong(run, half, result)
            if took > seconds:
                wrong.append(f"the smoke preset took {took:.1f} s of {seconds:g} s")
            if not wrong:
                again = _measured_again(run, two)
                wrong += _different(result.rows, again)
        finally:
            run.close()
    _refuse(declaration, wrong)
    return result


class WorkerHere:
    """The worker protocol in this process."""

    def __init__(self, threads: int) -> None:
        self.session: Session | None = None

    def ask(self, request: Opening | Task, limit: float | None) -> Answer:
        """Open a session or measure a cell; ``limit`` cannot be kept here."""
        if isinstance(request, Opening):
            self.session = Session(request)
            return Answer("done")
        assert self.session is not None, "the opening comes first"
        return self.session.run(request)

    def stop(self) -> None:
        """Forget what was loaded."""
        self.session = None


class LastingWorker:
    """A worker process that later trials are opened in too: what it imported, it imported for all of them."""

    process: ClassVar[LocalWorker | None] = None
    threads: ClassVar[int] = 0

    def __init__(self, threads: int) -> None:
        if LastingWorker.process is None or LastingWorker.threads != threads:
            self._end()
            LastingWorker.process, LastingWorker.threads = LocalWorker(threads), threads
        self.busy = False

    def ask(self, request: Opening | Task, limit: float | None) -> Answer:
        """Ask the process."""
        assert self.process is not None
        self.busy = True
        answer = self.process.ask(request, limit)
        self.busy = False
        return answer

    def stop(self) -> None:
        """Leave the process for the next trial, unless it was interrupted or died."""
        if self.busy:
            self._end()

    @staticmethod
    def _end() -> None:
        if LastingWorker.process is not None:
            LastingWorker.process.stop()
            LastingWorker.process = None


class Ran(Silent):
    """Notes which cells were measured, and ends the run after ``most`` of them."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self.keys: set[str] = set()

    def finished(self, row: Row) -> None:
        """Note a cell."""
        self.keys.add(row.key)
        if len(self.keys) >= self.most:
            raise _KilledError


class _KilledError(Exception):
    """Ends a run between two cells, as a kill would."""


def _run_half(trial: str | Trial, params: Any, folder: Path) -> set[str]:
    """Run half of the cells and return their keys."""
    run = Run(trial, params, folder, threads=_threads(), engine="here")
    run.watcher = watcher = Ran(most=max(1, len(run.rows()) // 2))
    try:
        run.execute(run.rows())
    except _KilledError:
        pass
    finally:
        run.close()
    return watcher.keys


def _measured_again(run: Run, folder: Path) -> list[Row]:
    """Return the first replicate of untimed parts, measured anew in another process."""
    again = Run(run.trial, run.params, folder, threads=run.threads, engine="lasting")
    rows = [row for part in again.parts if not part.timed for row in again.plan(part, 1)]
    try:
        again.execute(rows)
        return again.known(rows)
    finally:
        again.close()


def _clocks() -> tuple[float, float]:
    """Return seconds on the clock, and of the processor by this process and its children that ended."""
    return time.monotonic(), sum(os.times()[:4])


def _threads() -> int:
    """Return the threads this process computes with: rounding must be the same in a worker."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else int(os.environ.get("OMP_NUM_THREADS") or cores())


def _refuse(declaration: Trial, wrong: list[str]) -> None:
    if wrong:
        raise AssertionError("\n".join([f"trial {declaration.name!r}:", *wrong]))


# ------------------------------------------------------------------------------------------------------ what is wrong


def _declared_wrong(declaration: Trial) -> Iterator[str]:
    if "smoke" not in declaration.presets:
        yield "it has no preset 'smoke'"
        return
    required = any(field.is_required() for field in declaration.params.model_fields.values())
    presets = [*declaration.presets, *([] if required else [None])]
    chosen = [make_params(declaration, preset) for preset in presets]
    parts = [part for params in chosen for part in declaration.parts(params)]
    if not any(candidate.role == "control" for part in parts for candidate in part.candidates):
        yield "no part has a candidate whose role is control"
    ids = [claim.id for part in declaration.parts(chosen[-1]) for claim in part.claims]
    yield from (f"two claims have the id {name!r}" for name in sorted({name for name in ids if ids.count(name) > 1}))
    # A preset may leave out what a claim is about; something has to measure it.
    unmeasured = [set(_unknown_of(declaration.parts(params))) for params in chosen]
    yield from sorted(set.intersection(*unmeasured))
    for thing, name in ((declaration, "the trial"), (chosen[-1], "its parameters")):
        try:
            pickle.loads(cloudpickle.dumps(thing))
        except Exception as error:
            yield f"{name} cannot be pickled: {type(error).__name__}: {error}"


def _unknown_of(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        for claim in part.claims:
            yield from (f"claim {claim.id!r} of part {part.name!r}: {reason}" for reason in _unknown(part, claim))


def _unknown(part: Part, claim: AnyClaim) -> Iterator[str]:
    """Yield what a claim names and the part does not have."""
    if isinstance(claim, AllOf):
        for child in claim.claims:
            yield from _unknown(part, child)
    elif isinstance(claim, ForEach):
        if claim.factor not in {factor.name for factor in part.factors if factor.kind == "setting"}:
            yield f"there is no setting {claim.factor!r}"
        yield from _unknown(part, claim.claim)
    elif not isinstance(claim, Exact) and not isinstance(claim.quantity, Statistic):
        for _, candidate, metric, where in terms_of(part, claim.quantity)[0]:
            try:
                Table(part, []).numbers(candidate, metric, where)
            except CannotJudgeError as error:
                yield str(error)


def _run_wrong(run: Run, half: set[str], result: Result) -> Iterator[str]:
    watcher = run.watcher
    assert isinstance(watcher, Ran)
    if twice := watcher.keys & half:
        yield f"resumed after a kill, it measured {len(twice)} finished cells again"
    if len(watcher.keys | half) < len({row.key for row in result.rows}):
        yield "resumed after a kill, it left cells out"
    for row in result.rows:
        if row.status == "failed":
            yield f"lost: {row.candidate} at {row.factors} of part {row.part!r}: {row.reason}"
    for verdict in result.verdicts:
        if "cannot be computed" in (verdict.reason or ""):
            yield f"claim {verdict.id!r}: {verdict.reason}"


def _different(rows: Iterable[Row], again: Iterable[Row]) -> Iterator[str]:
    known = {row.key: row for row in rows}
    for row in again:
        if row.key not in known:
            yield f"{row.candidate} at {row.factors} of part {row.part!r} has another key the second time"
            continue
        for name in _unequal(known[row.key].metrics, row.metrics):
            first, then = known[row.key].metrics.get(name), row.metrics.get(name)
            yield f"{name} of {row.candidate} at {row.factors} of part {row.part!r}: first {first}, then {then}"


def _unequal(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    for name in {*one, *two}:
        a, b = one.get(name), two.get(name)
        if isinstance(a, tuple) and isinstance(b, tuple):  # Items, Curve
            same = all(_equal(x, y) for x, y in zip(a, b, strict=True))
        else:
            same = a == b or (isinstance(a, float) and isinstance(b, float) and _equal(a, b))
        if not same:
            yield name


def _equal(a: Any, b: Any) -> bool:
    """Return whether values are equal but for rounding, which depends on where in memory arrays happen to lie."""
    x, y = np.asarray(a), np.asarray(b)
    if np.issubdtype(x.dtype, np.floating) and np.issubdtype(y.dtype, np.floating):
        return x.shape == y.shape and np.allclose(x, y, rtol=ROUNDING, atol=0, equal_nan=True)
    return np.array_equal(x, y)
