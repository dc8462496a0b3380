"""The forest plot: one strip a claim, claims of one unit on one scale, laid out by the page so that it fits any width.

Positions are percentages of a strip's width. The page draws each strip as an SVG of lines in percentages beside the
claim's sentence, so that on a phone the strip moves below the sentence and nothing is scaled down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from fairtrial.report import words
from fairtrial.report.read import Claim, Document

EDGE = 4.0  # per cent of a strip kept free at either end, so that ends and arrows show
SAME_SCALE = 8.0  # claims of one unit share an axis while the largest is at most this many times the smallest

Entry: TypeAlias = tuple[Claim, Claim | None]  # a claim and the composite one that it is a part of


@dataclass(frozen=True)
class Row:
    """One claim with its strip; ``parent`` is the composite claim that it is a part of.

    ``point``, ``low``, ``high``, ``bound`` and ``zero`` are percentages or None; ``claimed`` is the shaded stretch
    (start, width) in which the claim says the value lies; ``beyond_low`` and ``beyond_high`` say that an interval goes
    on outside.
    """

    claim: Claim
    parent: Claim | None
    numbers: str = ""
    interval: str = ""
    said: str = ""
    point: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    zero: float | None = None
    claimed: tuple[float, float] | None = None
    beyond_low: bool = False
    beyond_high: bool = False

    @property
    def drawn(self) -> bool:
        """Whether there is anything on its strip."""
        return self.point is not None or self.low is not None


@dataclass(frozen=True)
class Tick:
    """A tick of a group's axis: position in per cent, and number."""

    at: float
    label: str


@dataclass
class Group:
    """Claims on one scale; without ticks they have no interval to draw."""

    title: str
    note: str = ""
    rows: list[Row] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)


def groups(document: Document, most_parts: int = 24) -> list[Group]:
    """Return the claims of a trial, ``most_parts`` of each composite one, grouped by what their numbers are."""
    entries = [entry for claim in document.claims for entry in _entries(claim, None, most_parts)]
    keyed: dict[tuple, list[Entry]] = {}
    pending: list[Entry] = []  # composite claims wait for their first part and go where it goes
    for claim, parent in entries:
        if claim.claims and most_parts:
            pending.append((claim, parent))
            continue
        keyed.setdefault(_unit(claim), []).extend([*pending, (claim, parent)])
        pending = []
    out: list[Group] = []
    for unit, members in keyed.items():
        if unit == ():
            out.append(Group("Without an interval", rows=[Row(c, parent) for c, parent in members]))
        else:
            for number, cluster in enumerate(_clusters(members)):
                out.append(_group(document, cluster))
                out[-1].title += ", on another scale" if number else ""
    return sorted(out, key=lambda group: not group.ticks)  # stable: what has no interval comes last


def _entries(claim: Claim, parent: Claim | None, most_parts: int) -> Iterator[Entry]:
    yield claim, parent
    for child in claim.claims[:most_parts]:
        yield from _entries(child, claim, most_parts)


def _unit(claim: Claim) -> tuple:
    """Return what two claims must share to be drawn on one scale; () where there is nothing to draw."""
    q = claim.quantity
    if not any(math.isfinite(v) for v in (claim.difference, claim.low, claim.high)):
        return ()
    if q.kind == "difference":
        return ("difference", q.metric, q.scale)
    if q.kind == "level":
        return ("level", q.metric)
    if q.kind == "contrast" and q.terms and len({term.metric for term in q.terms}) == 1:
        return ("contrast", q.terms[0].metric)
    return (q.kind, claim.id)


def _finite(claim: Claim) -> list[float]:
    shown = (claim.difference, claim.low, claim.high, *claim.bound.values())
    return [v for v in shown if math.isfinite(v)]


def _clusters(members: list[Entry]) -> Iterable[list[Entry]]:
    """Split claims of one unit where one scale would squash the small beside the large."""
    sizes = {id(c): max(map(abs, _finite(c))) for c, _ in members if not c.claims}
    cluster_of: dict[int, int] = {}
    start, cluster = None, 0
    for key, size in sorted(sizes.items(), key=lambda pair: pair[1]):
        if start is None or (size > SAME_SCALE * start and size > 0):
            start, cluster = size or None, cluster + 1
        cluster_of[key] = cluster
    out: dict[int, list[Entry]] = {}
    parents: list[Entry] = []
    for claim, parent in members:
        if claim.claims:
            parents.append((claim, parent))
            continue
        out.setdefault(cluster_of[id(claim)], []).extend([*parents, (claim, parent)])
        parents = []
    return out.values()


def _group(document: Document, members: list[Entry]) -> Group:
    """Return claims of one unit with their common axis."""
    first = next(claim for claim, _ in members if not claim.claims)
    metric = document.part(first.part).metric(first.quantity.metric)
    difference = first.quantity.kind == "difference"
    finite = [v for claim, _ in members if not claim.claims for v in _finite(claim)]
    low, high = min(finite), max(finite)
    if difference:
        low, high = min(low, 0.0), max(high, 0.0)
    span = (high - low) or abs(high) or 1.0
    low, high = low - span * EDGE / 100, high + span * EDGE / 100

    def at(value: float) -> float:
        return round(min(max((value - low) / (high - low) * 100, 0.0), 100.0), 2)

    group = Group(*_heading(first, words.metric_name(metric), metric.higher_is_better))
    if words.is_ratio(first):
        sign = 1 if metric.higher_is_better else -1
        marks = [(sign * math.log(v), v) for v in ratio_ticks(*sorted((sign * low, sign * high)))]
    else:
        marks = [(v, v) for v in ticks(low, high)]
    marks = [(place, v) for place, v in marks if EDGE - 1 <= at(place) <= 101 - EDGE]
    if max(map(len, tick_labels([v for _, v in marks])), default=0) > 8:  # five such labels are wider than a phone
        marks = marks[::2]
    unit = words.TIMES if words.is_ratio(first) else ""
    labels = tick_labels([v for _, v in marks])
    group.ticks = [Tick(at(place), label + unit) for (place, _), label in zip(marks, labels, strict=True)]
    for claim, parent in members:
        if claim.claims:
            group.rows.append(Row(claim, parent))
            continue
        limit = next(iter(claim.bound.items()), None)
        claimed = None
        if limit is not None:
            edge = at(limit[1])
            claimed = (edge, round(100 - edge, 2)) if limit[0] == "above" else (0.0, edge)
        seen = words.as_ratio(claim, document.part(claim.part))
        estimate = words.estimated_ratio if words.is_ratio(claim) else words.estimate
        numbers, lower, upper = estimate(seen.difference, seen.low, seen.high)
        group.rows.append(
            Row(
                claim,
                parent,
                numbers=numbers + unit,
                interval="" if math.isnan(claim.low) else f"{lower} to {upper}{unit}",
                said=words.outcome(claim, document.part(claim.part)),
                point=at(claim.difference) if math.isfinite(claim.difference) else None,
                low=None if math.isnan(claim.low) else at(claim.low),
                high=None if math.isnan(claim.high) else at(claim.high),
                bound=at(limit[1]) if limit is not None else None,
                zero=at(0.0) if difference else None,
                claimed=claimed,
                beyond_low=claim.low < low,
                beyond_high=claim.high > high,
            )
        )
    return group


def _heading(claim: Claim, metric: str, higher_is_better: bool) -> tuple[str, str]:
    """Return a group's title and a note on how to read its numbers."""
    better = "higher" if higher_is_better else "lower"
    kind = claim.quantity.kind
    if kind == "difference" and claim.quantity.scale == "log":
        return (
            f"Ratio of {metric}",
            f"The first’s value over the second’s; {better} is better, further right favours the first.",
        )
    if kind == "difference":
        return f"Difference in {metric}", f"Positive favours the first; {better} is better."
    if kind == "level":
        return f"Mean {metric}", f"As measured; {better} is better."
    if kind == "contrast":
        metrics = words.join(list(dict.fromkeys(words.spoken(term.metric) for term in claim.quantity.terms)))
        return f"Contrast of {metrics}", "A weighted sum of means."
    return f"Statistic: {words.quantity(claim)}", ""


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between ``low`` and ``high``."""
    from matplotlib.ticker import MaxNLocator

    return [float(v) for v in MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= v <= high]


def ratio_ticks(low: float, high: float) -> list[float]:
    """Return round ratios whose logarithms lie between ``low`` and ``high``."""
    low, high = max(low, -700.0), min(high, 700.0)
    if high - low < math.log(4):
        return [v for v in ticks(math.exp(low), math.exp(high)) if v > 0]
    return log_ticks(low / math.log(10), high / math.log(10))


def log_ticks(low: float, high: float) -> list[float]:
    """Return at most six round numbers between two powers of ten."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**e for e in exponents for f in factors if low <= math.log10(f * 10.0**e) <= high]
        if len(found) <= 6:
            return found
    return found[:: math.ceil(len(found) / 6)]


def tick_labels(positions: list[float]) -> list[str]:
    """Return ticks with the fewest decimals that tell them apart exactly."""
    for places in range(8):
        if all(math.isclose(round(v, places), v, rel_tol=1e-9, abs_tol=1e-12) for v in positions):
            if positions and max(map(abs, positions)) < 1e7:
                return [words.fixed(v, places) for v in positions]
            break
    digits = next((d for d in range(3, 17) if len({words.number(v, d) for v in positions}) == len(positions)), 3)
    return [words.number(v, digits) for v in positions]
