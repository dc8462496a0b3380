"""What one part measured, as arrays: the view of the store that verdicts are read from."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fairtrial.errors import FairtrialError
from fairtrial.trial.declare import Curve, Items, Part
from fairtrial.trial.store import Row

if TYPE_CHECKING:
    import pandas as pd


FRAME_ROWS = 2**16  # rows of resampled frames that are looked up together


class CannotJudgeError(FairtrialError):
    """A claim cannot be judged on what was measured; the message is the verdict's reason."""


class Table:
    """What one part measured: for each candidate and metric an array (replicates, settings, within cells).

    ``replicates`` may be restricted to a prefix in declared order, which is what a look before the end sees.
    """

    def __init__(self, part: Part, rows: Iterable[Row]) -> None:
        self.part = part
        self.rows = list(rows)
        name = part.replicate.name if part.replicate else None
        self.settings = [f for f in part.factors if f.kind == "setting"]
        self.withins = [f for f in part.factors if f.kind == "within"]
        # by their repr: a factor's values may be lists
        replicates = {repr(row.factors[name]) if name else "": row.factors[name] if name else None for row in self.rows}
        self.replicates = list(replicates.values())
        at = {value: i for i, value in enumerate(replicates)}
        self.combos = _combinations(self.settings)
        self.inner = _combinations(self.withins)
        where = {_frozen(c): i for i, c in enumerate(self.combos)}
        inside = {_frozen(c): i for i, c in enumerate(self.inner)}
        shape = (len(self.replicates), len(self.combos), len(self.inner))
        self.grid: dict[str, np.ndarray] = {c.label: np.full(shape, None, dtype=object) for c in part.candidates}
        for row in self.rows:
            index = (
                at[repr(row.factors[name]) if name else ""],
                where[_frozen({f.name: row.factors[f.name] for f in self.settings})],
                inside[_frozen({f.name: row.factors[f.name] for f in self.withins})],
            )
            self.grid[row.candidate][index] = row
        self._worst: dict[str, float] = {}

    def prefix(self, count: int) -> Table:
        """Return the table of the first ``count`` replicates."""
        name = self.part.replicate.name if self.part.replicate else None
        kept = self.replicates[:count]
        return Table(self.part, [row for row in self.rows if (row.factors[name] if name else None) in kept])

    def complete_prefix(self) -> int:
        """Return how many leading replicates are finished for all candidates."""
        for count in range(len(self.replicates)):
            if any(row.status == "planned" for grid in self.grid.values() for row in grid[count].flat):
                return count
        return len(self.replicates)

    def select(self, where: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Return the indices of the settings and of the inner cells that ``where`` admits."""
        known = {f.name for f in (*self.settings, *self.withins)}
        for name in where:
            if name not in known:
                raise CannotJudgeError(f"these parameters have no factor {name!r}")
        settings = [i for i, combo in enumerate(self.combos) if _admits(where, combo)]
        inner = [i for i, combo in enumerate(self.inner) if _admits(where, combo)]
        if not settings or not inner:
            raise CannotJudgeError(f"these parameters have no cell with {_in_words(where)}")
        return settings, inner

    def cells(self, candidate: str, where: Mapping[str, Any]) -> np.ndarray:
        """Return the rows (replicates, settings, inner) of one candidate."""
        if candidate not in self.grid:
            raise CannotJudgeError(f"these parameters leave out {candidate!r}")
        settings, inner = self.select(where)
        return self.grid[candidate][:, settings][:, :, inner]

    def numbers(self, candidate: str, metric: str, where: Mapping[str, Any]) -> np.ndarray:
        """Return a metric as floats (replicates, settings, inner): the mean of Items; NaN where there is none."""
        if metric not in {m.name for m in self.part.metrics}:
            raise CannotJudgeError(f"these parameters do not measure {metric!r}")
        values = _vectorized(lambda row: _number(row, metric), self.cells(candidate, where))
        infinite = np.isinf(values)
        if infinite.any():
            values[infinite] = self.worst(metric)
        return values

    def lost(self, candidate: str, where: Mapping[str, Any]) -> np.ndarray:
        """Return which cells of a candidate were lost."""
        return _vectorized(lambda row: row is not None and row.status == "failed", self.cells(candidate, where), bool)

    def worst(self, metric: str) -> float:
        """Return the worst finite value that ``metric`` took: what 'diverged' counts as."""
        if metric not in self._worst:
            values = [_number(row, metric) for row in self.rows]
            finite = [v for v in values if math.isfinite(v)]
            pick = min if self.part.metric(metric).higher_is_better else max
            self._worst[metric] = pick(finite) if finite else 0.0
        return self._worst[metric]

    def diverged(self, candidate: str, metric: str, where: Mapping[str, Any]) -> np.ndarray:
        """Return 1 or -1 for the cells of a candidate whose metric is infinite, with its sign, and 0 for the others."""
        values = _vectorized(lambda row: _number(row, metric), self.cells(candidate, where))
        return np.where(np.isinf(values), np.sign(values), 0.0)

    def units(self, candidate: str, metric: str, where: Mapping[str, Any], log: bool) -> np.ndarray:
        """Return the metric of each cell, logarithms where ``log``; refuses logs of what is not positive."""
        values = self.numbers(candidate, metric, where)
        if not log:
            return values
        if np.nanmin(values, initial=np.inf) <= 0:
            raise CannotJudgeError(f"{metric} of {candidate} is not positive everywhere: it has no logarithm")
        return np.log(values)

    def applies(self, candidate: str, metric: str, where: Mapping[str, Any]) -> np.ndarray:
        """Return at which settings a metric applies: those where it is not None in all cells."""
        rows = self.cells(candidate, where)
        absent = _vectorized(lambda r: r is not None and r.status == "done" and r.metrics[metric] is None, rows, bool)
        return np.logical_not(np.all(absent, axis=(0, 2)))

    def has_items(self, metric: str) -> bool:
        """Whether scores of single items were measured."""
        return any(isinstance(row.metrics.get(metric), Items) for row in self.rows)

    def whole_replicates(self) -> list[int]:
        """Return the indices of the replicates that are done for all candidates."""
        grids = self.grid.values()
        indices = range(len(self.replicates))
        return [i for i in indices if all(row and row.status == "done" for grid in grids for row in grid[i].flat)]

    def frame(self, items: np.ndarray | None = None) -> pd.DataFrame:
        """Return the finished cells as a frame: candidate, role, draw, factors, metrics (Items by their mean).

        ``items`` (indices into :attr:`items`, repeated as drawn) resamples it for a bootstrap.
        """
        frame = self._cells.copy()
        if items is not None:
            for name, scores in self._scores.items():
                chosen = scores[:, items]  # (cells, drawn items), NaN where a cell lacks the item
                there = ~np.isnan(chosen)
                count = there.sum(axis=1)
                mean = np.where(count, np.where(there, chosen, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)
                frame[name] = np.where(np.isnan(scores).all(axis=1), frame[name], mean)
        return frame

    def frames(self, draws: np.ndarray) -> Iterator[pd.DataFrame]:
        """Yield the frame of each draw of replicates: (draws, n) indices, repeated as drawn.

        The column ``draw`` tells apart the copies of a replicate.
        """
        numbered = "draw" not in {factor.name for factor in self.part.factors}
        most = max(1, FRAME_ROWS // max(1, len(self._cells)))
        for start in range(0, len(draws), most):  # one look-up for many frames, which are slices of it
            chosen = draws[start : start + most]
            places = [[self._places[index] for index in draw] for draw in chosen.tolist()]
            rows = [np.concatenate(found) for found in places]
            whole = self._cells.take(np.concatenate(rows))
            if numbered:
                counts = [len(copy) for found in places for copy in found]
                whole = whole.assign(draw=np.repeat(np.tile(np.arange(chosen.shape[1]), len(chosen)), counts))
            whole = whole.copy()  # in one block a type, which is quick to slice
            ends = np.cumsum([len(found) for found in rows]).tolist()
            for first, last in zip([0, *ends], ends, strict=False):
                yield whole.iloc[first:last].reset_index(drop=True)

    @functools.cached_property
    def _done(self) -> list[tuple[int, Row]]:
        """The finished cells with the index of their replicate, in declared order."""
        rows = [(i, row) for i in range(len(self.replicates)) for grid in self.grid.values() for row in grid[i].flat]
        return [(i, row) for i, row in rows if row and row.status == "done"]

    @functools.cached_property
    def _cells(self) -> pd.DataFrame:
        import pandas as pd

        roles = {c.label: c.role for c in self.part.candidates}
        return pd.DataFrame.from_records(
            [
                {"candidate": row.candidate, "role": roles[row.candidate], "draw": index, **row.factors}
                | {name: scalar(value) for name, value in row.metrics.items()}
                for index, row in self._done
            ]
        )

    @functools.cached_property
    def _places(self) -> list[np.ndarray]:
        """The rows of the frame that belong to each replicate."""
        of = np.array([index for index, _ in self._done], dtype=int)
        return [np.flatnonzero(of == index) for index in range(len(self.replicates))]

    @functools.cached_property
    def items(self) -> list[Any]:
        """The ids of all items that were scored."""
        scored = [v for _, row in self._done for v in row.metrics.values() if isinstance(v, Items)]
        return sorted({item for value in scored for item in np.asarray(value.ids).tolist()}, key=repr)

    @functools.cached_property
    def _scores(self) -> dict[str, np.ndarray]:
        """The item scores of each metric that has them: (finished cells, items), NaN where a cell lacks the item."""
        at = {item: i for i, item in enumerate(self.items)}
        scores: dict[str, np.ndarray] = {}
        for place, (_, row) in enumerate(self._done):
            for name, value in row.metrics.items():
                if isinstance(value, Items):
                    table = scores.setdefault(name, np.full((len(self._done), len(at)), np.nan))
                    where = [at[item] for item in np.asarray(value.ids).tolist()]
                    count = np.bincount(where, minlength=len(at))  # an item may come more than once: its mean counts
                    total = np.bincount(where, weights=np.asarray(value.values, dtype=float), minlength=len(at))
                    table[place, count > 0] = total[count > 0] / count[count > 0]
        return scores


def _combinations(factors: Sequence[Any]) -> list[dict[str, Any]]:
    combos: list[dict[str, Any]] = [{}]
    for factor in factors:
        combos = [{**combo, factor.name: value} for combo in combos for value in factor.values]
    return combos


def _frozen(combo: Mapping[str, Any]) -> str:
    return repr(sorted(combo.items()))


def _admits(where: Mapping[str, Any], combo: Mapping[str, Any]) -> bool:
    return all(
        name not in combo or combo[name] == wanted or (isinstance(wanted, tuple | list) and combo[name] in wanted)
        for name, wanted in where.items()
    )


def _in_words(where: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in where.items())


def _number(row: Row | None, metric: str) -> float:
    value = scalar(row.metrics.get(metric)) if row is not None and row.status == "done" else None
    return math.nan if value is None else value


def scalar(value: Any) -> float | None:
    """Return a metric's value as one number: the mean of Items, the end of a Curve."""
    if isinstance(value, Items):
        return float(np.mean(value.values))
    if isinstance(value, Curve):
        return float(np.asarray(value.y)[-1])
    return value


def _vectorized(fn: Any, rows: np.ndarray, dtype: type = float) -> np.ndarray:
    return np.array([fn(row) for row in rows.flat], dtype=dtype).reshape(rows.shape)


def mean_over(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the mean over the finite entries of an axis, NaN where there is none (and no warning)."""
    finite = np.isfinite(values)
    count = finite.sum(axis=axis)
    total = np.where(finite, values, 0.0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
