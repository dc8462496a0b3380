"""From cells to evidence: a claim's estimate, an interval that can be read at any level, p-values that agree with it.

Settled rules, in one place:

* An interval generalises over replicates only; ``within`` factors are averaged first, then settings.
* ``inf`` counts as the worst finite value that the metric took in the part.
* A cell lost by either side drops its pair. A claim with lost pairs, or with cells that diverged against it, holds only
  if it also holds with each of them set a standard deviation beyond the worst value seen. A bootstrapped claim with
  lost cells does not hold at all.
* None is not applicable: a setting where a metric is always None is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fairtrial import stats
from fairtrial.errors import InputError
from fairtrial.stats.moments import Moments, VarianceMode, moments_of, moments_of_cells
from fairtrial.trial.declare import Contrast, Difference, Items, Level, Part, Quantity, Statistic
from fairtrial.trial.table import CannotJudgeError, Table, mean_over

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Evidence:
    """What the cells say about one claim's quantity, before it is judged.

    ``filled`` is the same with every lost pair, and every cell that diverged against it, set beyond the lowest value
    seen; and with each set beyond the highest.
    """

    estimate: float = math.nan
    uncertainty: stats.Interval | None = None
    filled: tuple[stats.Interval, stats.Interval] | None = None
    cells: int = 0
    lost: int = 0
    units: int = 0
    moments: Moments | None = None
    paired_gain: float | None = None
    reason: str | None = None

    def p_values(self, above: float | None, below: float | None) -> tuple[float, float]:
        """Return the one-sided p-values for holding (also with the lost pairs against it) and for failing."""
        if self.uncertainty is None or not self.uncertainty.decidable:
            return 1.0, 1.0
        if above is not None:
            worse = self.filled[0].p_value(above, "greater") if self.filled else 0.0
            return max(worse, self.uncertainty.p_value(above, "greater")), self.uncertainty.p_value(above, "less")
        assert below is not None
        worse = self.filled[1].p_value(below, "less") if self.filled else 0.0
        return max(worse, self.uncertainty.p_value(below, "less")), self.uncertainty.p_value(below, "greater")

    def interval(self, level: float, above: float | None = None, below: float | None = None) -> tuple[float, float]:
        """Return low and high at ``level``, reaching as far against the claim as the lost pairs may."""
        if self.uncertainty is None:
            return math.nan, math.nan
        low, high = self.uncertainty.at(level)
        if self.filled and above is not None:
            low = min(low, self.filled[0].at(level)[0])
        if self.filled and below is not None:
            high = max(high, self.filled[1].at(level)[1])
        return low, high


def gather(table: Table, quantity: Quantity, over: str, anytime: bool) -> Evidence:
    """Return the evidence of a part's cells on a quantity."""
    try:
        if isinstance(quantity, Statistic):
            return _bootstrapped(table, quantity, over)  # one look only: `runner` refuses further ones
        terms, log = terms_of(table.part, quantity)
        if over == "item" or (table.part.variance in ("crossed", "design") and table.has_items(terms[0][2])):
            return _over_items(table, terms, log, over, anytime and over != "item")
        return _over_replicates(table, terms, log, anytime)
    except InputError as error:  # of the statistics: too few cells, no variance to be had
        return Evidence(reason=str(error))
    except CannotJudgeError as error:
        return Evidence(reason=str(error))


Terms = list[tuple[float, str, str, Mapping[str, Any]]]  # (weight, candidate, metric, where)


def summary(table: Table) -> list[dict[str, Any]]:
    """Return mean and 95% interval, not corrected for others, of each candidate, metric and setting of a part.

    An interval that is not known is NaN: of an exact metric, of one that did not vary, of a single replicate. That of a
    timed metric is Student's for the logarithms, and its mean is geometric: times are skewed.
    """
    entries = []
    for candidate in table.part.candidates:
        for metric in table.part.metrics:
            for where in table.combos:
                few = len(table.replicates) < 5 and table.has_items(metric.name)
                found = gather(table, Level(candidate.label, metric.name, where), "item" if few else "replicate", False)
                mean, low, high = found.estimate, math.nan, math.nan
                if found.uncertainty and not metric.exact:
                    low, high = found.uncertainty.at(0.95)
                times = mean_over(table.numbers(candidate.label, metric.name, where)[:, 0], axis=-1)
                if metric.timed and found.uncertainty and np.nanmin(times) > 0:
                    logs = stats.mean_interval(np.log(times[np.isfinite(times)]))
                    mean, low, high = (math.exp(min(x, 700.0)) for x in (logs.mean, *logs.at(0.95)))
                entries.append(
                    {
                        "part": table.part.name,
                        "candidate": candidate.label,
                        "role": candidate.role,
                        "metric": metric.name,
                        "where": where,
                        "mean": mean,
                        "low": low if math.isfinite(low) else math.nan,
                        "high": high if math.isfinite(high) else math.nan,
                        "cells": found.cells,
                        "lost": found.lost,
                    }
                )
    return entries


def terms_of(part: Part, quantity: Quantity) -> tuple[Terms, bool]:
    """Return a quantity as weighted levels, and whether they are of logarithms."""
    if isinstance(quantity, Difference):
        known = {m.name: m for m in part.metrics}
        sign = 1.0 if quantity.metric not in known or known[quantity.metric].higher_is_better else -1.0
        where = quantity.where
        return [(sign, quantity.a, quantity.metric, where), (-sign, quantity.b, quantity.metric, where)], (
            quantity.scale == "log"
        )
    if isinstance(quantity, Level):
        return [(1.0, quantity.a, quantity.metric, quantity.where)], False
    assert isinstance(quantity, Contrast)
    return [(weight, c, m, where) for (c, m, where), weight in quantity.terms], False


def _over_replicates(table: Table, terms: Terms, log: bool, anytime: bool) -> Evidence:
    """Average each term within replicates, and let the replicates be the units."""
    part = table.part
    values = [table.units(c, m, where, log) for _, c, m, where in terms]
    losses = [table.lost(c, where) for _, c, _, where in terms]
    paired = _same_cells(terms)
    if paired:  # a pair whose one side is missing is no pair
        whole = np.all([np.isfinite(v) for v in values], axis=0)
        values = [np.where(whole, v, np.nan) for v in values]
    pair_lost = int(np.any(losses, axis=0).sum() if paired else sum(loss.sum() for loss in losses))
    lost = np.any([loss.any(axis=(1, 2)) for loss in losses], axis=0)
    applies = [table.applies(c, m, where) for _, c, m, where in terms]
    if paired:
        applies = [np.all(applies, axis=0)] * len(terms)
    by_term = [  # a replicate counts if each of its settings was measured, where the metric applies
        weight * mean_over(value[:, there], axis=-1).mean(axis=1)
        for (weight, *_), value, there in zip(terms, values, applies, strict=True)
        if there.any()
    ]
    if len(by_term) < len(terms):
        raise CannotJudgeError("it does not apply to these cells")
    total = np.sum(by_term, axis=0)
    if per := {part.metric(m).per for _, _, m, _ in terms} - {None}:
        total, lost = _counted_once(table, total, lost, per)
    known = np.isfinite(total)
    units = total[known]
    if not len(units):
        reason = f"all its pairs are incomplete: {pair_lost} lost" if pair_lost else "no cell of it is finished"
        return Evidence(reason=reason, lost=pair_lost)
    sizes = _fold_sizes(table, terms) if part.variance == "nadeau_bengio" else {}
    variance: VarianceMode = "nadeau_bengio" if sizes else "independent"
    reasons = _caveats(table, terms)
    if part.variance in ("crossed", "design"):
        reasons.append("it speaks for these items only: their single scores were not measured")
    if pair_lost:
        reasons.append(f"{pair_lost} pair{'s' * (pair_lost > 1)} lost")
    estimate = float(units.mean())
    cells = int(sum(np.isfinite(v).sum() for v in values)) // len(terms)
    paired_gain = None
    if len(terms) == 2 and paired and len(units) > 1:
        a, b = (side[np.isfinite(side)] for side in by_term)
        paired_gain = _ratio(a.var(ddof=1) + b.var(ddof=1), units.var(ddof=1))
    interval = filled = moments = None
    if len(units) > 1:
        exact = all(part.metric(m).exact for _, _, m, _ in terms)
        scale = float(np.nanmax(np.abs(by_term)))

        def mean_interval(values: np.ndarray) -> stats.Interval:
            return stats.mean_interval(values, variance=variance, anytime=anytime, exact=exact, scale=scale, **sizes)

        interval = mean_interval(units)
        moments = moments_of_cells(units, variance, **sizes)
        reasons += interval.notes
        against, for_it = (lost | (cells > 0) for cells in _diverged(table, terms))
        if against.any() or for_it.any():
            reach = _beyond(units)
            low, high = np.where(against, estimate - reach, total), np.where(for_it, estimate + reach, total)
            filled = mean_interval(low[np.isfinite(low)]), mean_interval(high[np.isfinite(high)])
    else:
        reasons.append("one replicate: an interval needs two")
    return Evidence(
        estimate, interval, filled, cells, pair_lost, len(units), moments, paired_gain, "; ".join(reasons) or None
    )


def _over_items(table: Table, terms: Terms, log: bool, over: str, anytime: bool) -> Evidence:
    """Let items be the units (``over="item"``), or replicates that answer items (crossed, design)."""
    scores: dict[tuple[int, Any], list[float]] = {}
    trains: dict[int, Any] = {}
    sides = [_item_scores(table, c, m, where, log) for _, c, m, where in terms]
    shared = set.intersection(*(set(side) for side in sides))
    grids = [table.cells(c, where) for _, c, _, where in terms]
    lost = int(sum(row is not None and row.status == "failed" for grid in grids for row in grid.flat))
    if not shared:
        return Evidence(reason="no item was scored for all its candidates", lost=lost)
    for replicate, item in sorted(shared, key=repr):
        scores[replicate, item] = [
            weight * side[replicate, item] for (weight, *_), side in zip(terms, sides, strict=True)
        ]
    scale = max(abs(score) for side in sides for score in side.values())
    reasons = _caveats(table, terms)
    if lost:
        reasons.append(f"{lost} cell{'s' * (lost > 1)} lost")
    if over == "item":
        items: dict[Any, list[float]] = {}
        for (_, item), parts in scores.items():
            items.setdefault(item, []).append(sum(parts))
        units = np.array([np.mean(v) for v in items.values()])
        interval = stats.mean_interval(units, scale=scale)
        moments, count = None, len(units)
    else:
        for row in (row for grid in grids for row in grid.flat):
            value = row.metrics.get(terms[0][2]) if row is not None and row.status == "done" else None
            if isinstance(value, Items) and value.train_ids is not None and table.part.replicate:
                trains[table.replicates.index(row.factors[table.part.replicate.name])] = value.train_ids
        replicates, answered = zip(*scores, strict=True)
        present = sorted(set(replicates))
        table_of = stats.SplitScores.from_rows(
            np.array(replicates), np.array(answered), np.array([sum(p) for p in scores.values()]),
            train=[trains[r] for r in present] if len(trains) == len(present) else None,
        )  # fmt: skip
        # Differences of 0/1 scores may be all 0 and still be differences: what they can be is not read off them.
        binary = all(score in (0.0, 1.0) for side in sides for score in side.values())
        support = (-1.0, 1.0) if binary and sorted(w for w, *_ in terms) == [-1.0, 1.0] else None
        if len(terms) > 1:
            table_of = replace(table_of, support=support, scale=scale)
        interval = stats.interval(table_of, variance=table.part.variance, anytime=anytime)
        units = table_of.means
        moments, count = moments_of(table_of, table.part.variance), len(present)
    reasons += interval.notes
    estimate = float(units.mean())
    filled = None
    against, for_it = (lost + int(cells.sum()) for cells in _diverged(table, terms))
    if against or for_it:  # that share of each side set beyond the farthest unit, with the variance of what was scored
        size = sum(grid.size for grid in grids) / len(grids)
        low, high = (_beyond(units) * min(1.0, count / size) for count in (against, for_it))
        filled = _shifted(interval, -low), _shifted(interval, high)
    paired_gain = None
    if len(terms) == 2:
        by_item: dict[Any, list[list[float]]] = {}
        for (_, item), parts in scores.items():
            by_item.setdefault(item, []).append(parts)
        pairs = np.array([np.mean(v, axis=0) for v in by_item.values()])
        if len(pairs) > 1:
            paired_gain = _ratio(pairs.var(axis=0, ddof=1).sum(), pairs.sum(axis=1).var(ddof=1))
    cells = sum(row is not None and row.status == "done" for grid in grids for row in grid.flat) // len(grids)
    return Evidence(estimate, interval, filled, cells, lost, count, moments, paired_gain, "; ".join(reasons) or None)


def _beyond(units: np.ndarray) -> float:
    """Return how far from the mean a lost unit is assumed: a standard deviation beyond the farthest one seen.

    Where losses strike the worst fifth of ten cells, the farthest alone let a claim hold wrongly in 7 % of trials.
    """
    return float(np.abs(units - units.mean()).max() + (units.std(ddof=1) if len(units) > 1 else 0.0))


def _shifted(interval: stats.Interval, by: float) -> stats.Interval:
    """Return the interval had its estimate come out larger ``by`` that much."""
    law: Any = interval.law
    moved = replace(law, mean=law.mean + by) if hasattr(law, "mean") else law
    return replace(interval, mean=interval.mean + by, law=moved)


def _item_scores(
    table: Table, candidate: str, metric: str, where: Mapping[str, Any], log: bool
) -> dict[tuple[int, Any], float]:
    """Return the score of each (replicate, item), averaged over settings and inner cells and repeated ids."""
    if metric not in {m.name for m in table.part.metrics}:
        raise CannotJudgeError(f"these parameters do not measure {metric!r}")
    sums: dict[tuple[int, Any], list[float]] = {}
    for (replicate, _, _), row in np.ndenumerate(table.cells(candidate, where)):
        value = row.metrics.get(metric) if row is not None and row.status == "done" else None
        if value is None:
            continue
        if not isinstance(value, Items):
            raise CannotJudgeError(f"{metric} has no scores of single items, which this claim generalises over")
        values = np.asarray(value.values, dtype=float)
        values = np.where(np.isinf(values), _worst_item(table, metric), values)
        if log and values.min() <= 0:
            raise CannotJudgeError(f"{metric} of {candidate} is not positive everywhere: it has no logarithm")
        for item, score in zip(np.asarray(value.ids).tolist(), np.log(values) if log else values, strict=True):
            sums.setdefault((replicate, item), []).append(float(score))
    return {key: math.fsum(v) / len(v) for key, v in sums.items()}


def _worst_item(table: Table, metric: str) -> float:
    values = np.concatenate(
        [
            np.asarray(v.values, dtype=float)
            for row in table.rows
            if row.status == "done" and isinstance(v := row.metrics.get(metric), Items)
        ]
    )
    finite = values[np.isfinite(values)]
    if not len(finite):
        return 0.0
    return float(finite.min() if table.part.metric(metric).higher_is_better else finite.max())


def _bootstrapped(table: Table, quantity: Statistic, over: str) -> Evidence:
    """Resample replicates, or items, and compute the statistic anew on each resample."""
    lost = sum(row.status == "failed" for row in table.rows)
    cells = sum(row.status == "done" for row in table.rows)
    if not cells:
        return Evidence(reason=f"{lost} cells lost" if lost else "no cell of it is finished", lost=lost)
    units = np.arange(len(table.items)) if over == "item" else np.array(table.whole_replicates())

    def frames(draws: np.ndarray) -> Iterable[pd.DataFrame]:
        return map(table.frame, draws) if over == "item" else table.frames(draws)

    try:
        estimate = float(quantity.fn(table.frame()))
        if lost or not len(units):  # what was lost might have changed the statistic in any way
            return Evidence(estimate, None, None, cells, lost, len(units), reason=f"{lost} cells lost")
        resampled = stats.bootstrap(
            units, lambda draws: [quantity.fn(frame) for frame in frames(draws)], vectorized=True
        )
    except Exception as error:  # the trial's own function
        return Evidence(reason=f"the statistic cannot be computed: {type(error).__name__}: {error}", lost=lost)
    notes = "; ".join(resampled.notes) or None
    return Evidence(estimate, resampled, None, cells, lost, len(units), reason=notes)


def _same_cells(terms: Terms) -> bool:
    return all(term[3] == terms[0][3] for term in terms)


def _counted_once(
    table: Table, total: np.ndarray, lost: np.ndarray, per: set[str | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Reduce units over which a metric is constant to one: ``per`` names what it varies with."""
    replicate = table.part.replicate
    if replicate is None or replicate.name in per or any(f.name in per for f in table.withins):
        return total, lost
    finite = total[np.isfinite(total)]
    return finite[:1], lost[:1]


def _fold_sizes(table: Table, terms: Terms) -> dict[str, Any]:
    """Return the fold sizes of a Nadeau-Bengio part from its Items."""
    for row in table.cells(terms[0][1], terms[0][3]).flat:
        value = row.metrics.get(terms[0][2]) if row is not None else None
        if isinstance(value, Items) and value.train_ids is not None:
            return {"n_test": len(value.ids), "n_train": len(value.train_ids)}
    raise CannotJudgeError("folds of one data set need their sizes: return Items with train_ids")


def _diverged(table: Table, terms: Terms) -> tuple[np.ndarray, np.ndarray]:
    """Return in how many cells of each replicate a metric diverged, lowering the sum of the terms and raising it."""
    signs = [weight * table.diverged(c, m, where) for weight, c, m, where in terms]
    lowering, raising = (np.sum([(side * sign > 0).sum(axis=(1, 2)) for sign in signs], axis=0) for side in (-1, 1))
    return lowering, raising


def _caveats(table: Table, terms: Terms) -> list[str]:
    caveats = []
    for _, c, m, where in terms:
        count = int(np.count_nonzero(table.diverged(c, m, where)))
        if count:
            caveats.append(f"{c} diverged in {count} cell{'s' * (count > 1)}, counted as the worst value seen")
    return caveats


def _ratio(a: float, b: float) -> float | None:
    return float(a / b) if b > 0 else None
