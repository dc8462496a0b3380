"""A worker: measures the cells its parent names, one after another, over a pipe.

``python -m fairtrial.trial.worker`` reads requests from its standard input and answers on its standard output, each a
frame of 8 bytes of length and a pickle. It imports nobody's ``__main__``, so scripts need no guard and notebooks and
lambdas work. It ends when the pipe closes, whatever it is doing. Ray's workers hold the same :class:`Session`.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import cloudpickle
import numpy as np

from fairtrial import cards
from fairtrial.errors import FairtrialError, MissingExtraError
from fairtrial.trial.declare import Candidate, Curve, Items, Part, Trial
from fairtrial.trial.memory import PeakMemory
from fairtrial.trial.stages import Codes, Stages, codes_of_parts, disk_is_full, modules_of
from fairtrial.trial.store import StageCost


@dataclass(frozen=True)
class Opening:
    """What a worker is told first."""

    trial: str | bytes  # "package.module:name", or the trial pickled by cloudpickle
    params: bytes
    inputs: Mapping[str, str]
    codes: Codes
    folder: Path
    path: list[str]


@dataclass(frozen=True)
class Task:
    """One cell of one candidate; ``last`` ends its group."""

    part: str
    candidate: str
    cell: Mapping[str, Any]
    last: bool


@dataclass(frozen=True)
class Answer:
    """What came of a task. ``fatal`` ends the run: a full disk, a missing extra."""

    status: Literal["done", "failed", "expired", "fatal"]
    reason: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    costs: list[StageCost] = field(default_factory=list)
    seconds: float = 0.0
    peak: int | None = None
    peak_sampled: bool = False


class Session:
    """A trial opened in this process."""

    def __init__(self, opening: Opening) -> None:
        sys.path[:] = [*opening.path, *(p for p in sys.path if p not in opening.path)]
        self.trial = load_trial(opening.trial)
        self.params = pickle.loads(opening.params)
        self.parts: dict[str, Part] = {part.name: part for part in self.trial.parts(self.params)}
        package = package_of(self.trial)
        codes, unseen = codes_of_parts(tuple(self.parts.values()), package)
        if isinstance(opening.trial, str) and not unseen and codes != opening.codes:
            raise FairtrialError("the code was edited since the run began: run the same command again")
        used = {name for part in self.parts.values() for c in part.candidates for name in modules_of(c, package)}
        self.stages = Stages(opening.folder / "stages", opening.inputs, package, frozenset(used))
        self.memory = PeakMemory()
        self.card = next((card for card in cards.cards().values() if card.trial == opening.trial), None)

    def run(self, task: Task) -> Answer:
        """Measure one cell."""
        part = self.parts[task.part]
        candidate: Candidate = next(c for c in part.candidates if c.label == task.candidate)
        self.memory.start()
        try:
            with self.stages.cell() as spent:
                metrics = checked(part, part.measure(candidate, dict(task.cell), self.params, self.stages))
                seconds, used = spent()
            peak, sampled = self.memory.stop()
            return Answer("done", None, metrics, used, self.stages.take_costs(), seconds, peak, sampled)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self.memory.stop()
            costs = self.stages.take_costs()
            if disk_is_full(error):
                return Answer("fatal", "the disk is full: free some space and run the same command again", costs=costs)
            if isinstance(error, ModuleNotFoundError):
                error = missing_extra(self.card, error) or error
            if isinstance(error, FairtrialError):
                return Answer("fatal" if error.ends_run else "failed", str(error), costs=costs)
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            sys.stderr.write(traceback.format_exc())
            return Answer("failed", reason, costs=costs)
        finally:
            if task.last:
                self.stages.end_group()


def load_trial(trial: str | bytes) -> Trial:
    """Return a trial from ``"package.module:name"`` or from its pickle."""
    if isinstance(trial, bytes):
        return pickle.loads(trial)
    module, _, name = trial.partition(":")
    return getattr(importlib.import_module(module), name)


def missing_extra(card: cards.Card | None, error: ImportError) -> MissingExtraError | None:
    """Return which of a card's extras to install where ``error`` is for the lack of one, else None."""
    if card is None or not card.extras or (error.name or "").startswith("fairtrial"):
        return None
    return MissingExtraError(",".join(card.extras), error.name)


def package_of(trial: Trial) -> str:
    """Return the package that holds a trial's ``trial.py``, where the modules its candidates use are looked for."""
    return getattr(trial.parts, "__module__", "").rpartition(".")[0]


def checked(part: Part, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a measure returned as plain floats and arrays, refusing what the part does not declare."""
    if not isinstance(metrics, Mapping):
        raise FairtrialError(
            f"measure of part {part.name!r} returned {type(metrics).__name__}, not a mapping of metrics"
        )
    declared = {metric.name for metric in part.metrics}
    if set(metrics) != declared:
        missing, extra = sorted(declared - set(metrics)), sorted(set(metrics) - declared)
        raise FairtrialError(f"measure of part {part.name!r}: missing metrics {missing}, undeclared metrics {extra}")
    return {name: _plain(name, value) for name, value in metrics.items()}


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, Items):
        ids, scores = _labels(value.ids), np.asarray(value.values, dtype=float)
        if ids.shape[:1] != scores.shape or not scores.size:
            raise FairtrialError(f"metric {name!r}: Items needs as many ids as values, and some")
        if np.isnan(scores).any():
            raise FairtrialError(
                f"metric {name!r} is NaN for item {ids[np.isnan(scores)][0]}: return inf if it diverged"
            )
        return Items(ids, scores, None if value.train_ids is None else _labels(value.train_ids))
    if isinstance(value, Curve):
        return Curve(np.asarray(value.x, dtype=float), np.asarray(value.y, dtype=float))
    number = float(value)
    if math.isnan(number):
        raise FairtrialError(f"metric {name!r} is NaN: return inf if it diverged, None if it does not apply")
    return number


def _labels(values: Any) -> np.ndarray:
    labels = np.asarray(values)
    return labels.astype(str) if labels.dtype.hasobject else labels


# --------------------------------------------------------------------------------------------------------------- pipes


def send(stream: BinaryIO, thing: Any) -> None:
    """Write one frame."""
    raw = cloudpickle.dumps(thing)
    stream.write(len(raw).to_bytes(8, "big") + raw)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one frame; EOFError if the other side is gone."""
    head = _read(stream, 8)
    return pickle.loads(_read(stream, int.from_bytes(head, "big")))


def _read(stream: BinaryIO, size: int) -> bytes:
    raw = stream.read(size)
    if len(raw) < size:
        raise EOFError
    return raw


def main() -> None:
    """Serve the parent until it closes the pipe."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a measure prints goes to standard error, not into the protocol,
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # and what it reads does not come out of it
    inbox: list[Any] = []
    arrived = threading.Condition()

    def listen() -> None:
        try:
            while True:
                request = receive(requests)
                with arrived:
                    inbox.append(request)
                    arrived.notify()
        except (EOFError, OSError):
            os._exit(0)  # the parent is gone: nobody wants what is being computed

    threading.Thread(target=listen, daemon=True).start()
    session: Session | None = None
    while True:
        with arrived:
            arrived.wait_for(lambda: inbox)
            request = inbox.pop(0)
        if isinstance(request, Opening):
            try:
                session = Session(request)
                answer = Answer("done")
            except Exception as error:
                traceback.print_exc()
                reason = str(error) if isinstance(error, FairtrialError) else f"{type(error).__name__}: {error}"
                answer = Answer("fatal", f"a worker could not start: {reason}")
        else:
            assert session is not None, "the parent opens a session first"
            answer = session.run(request)
        send(answers, answer)


if __name__ == "__main__":
    from fairtrial.trial import worker  # the parent's frames name the classes of this module, not of __main__

    worker.main()
