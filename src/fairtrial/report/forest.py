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
    relative: str = ""
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
    """A tick of a group's axis: position in per cent, number, and the same as a ratio where logarithms are shown."""

    at: float
    label: str
    ratio: str


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
    log = first.quantity.scale == "log"
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
    positions = [v for v in ticks(low, high) if EDGE - 1 <= at(v) <= 101 - EDGE]
    if max(map(len, tick_labels(positions)), default=0) > 8:  # five such labels are wider than a phone
        positions = positions[::2]
    labels = tick_labels(positions)
    ratios = [words.relative(v, metric.higher_is_better) if log else "" for v in positions]
    group.ticks = [Tick(at(v), label, ratio) for v, label, ratio in zip(positions, labels, ratios, strict=True)]
    for claim, parent in members:
        if claim.claims:
            group.rows.append(Row(claim, parent))
            continue
        limit = next(iter(claim.bound.items()), None)
        claimed = None
        if limit is not None:
            edge = at(limit[1])
            claimed = (edge, round(100 - edge, 2)) if limit[0] == "above" else (0.0, edge)
        numbers, lower, upper = words.estimate(claim.difference, claim.low, claim.high)
        group.rows.append(
            Row(
                claim,
                parent,
                numbers=numbers,
                interval="" if math.isnan(claim.low) else f"{lower} to {upper}",
                relative=_relative(claim, metric.higher_is_better),
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
            f"Difference in log {metric}",
            f"Positive favours the first; {better} is better. "
            "Below each number, the first’s value relative to the second’s.",
        )
    if kind == "difference":
        return f"Difference in {metric}", f"Positive favours the first; {better} is better."
    if kind == "level":
        return f"Mean {metric}", f"As measured; {better} is better."
    if kind == "contrast":
        metrics = words.join(list(dict.fromkeys(words.spoken(term.metric) for term in claim.quantity.terms)))
        return f"Contrast of {metrics}", "A weighted sum of means."
    return f"Statistic: {words.quantity(claim)}", ""


def _relative(claim: Claim, higher_is_better: bool) -> str:
    """Return a difference of logarithms as the ratio it means: ``'log perplexity' 0.11 -> '−10.4 %'``."""
    q = claim.quantity
    if q.kind != "difference" or q.scale != "log" or not math.isfinite(claim.difference):
        return ""
    return words.relative(claim.difference, higher_is_better)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between ``low`` and ``high``."""
    from matplotlib.ticker import MaxNLocator

    return [float(v) for v in MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= v <= high]


def tick_labels(positions: list[float]) -> list[str]:
    """Return ticks with the fewest decimals that tell them apart exactly."""
    for places in range(8):
        if all(math.isclose(round(v, places), v, rel_tol=1e-9, abs_tol=1e-12) for v in positions):
            if positions and max(map(abs, positions)) < 1e7:
                return [words.fixed(v, places) for v in positions]
            break
    return [words.number(v) for v in positions]
