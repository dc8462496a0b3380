"""From evidence to verdicts, corrected for each other.

Holm's rule over the trial's claims decides the states, and every interval is printed at the level of its claim's Holm
rank, so that state and interval never disagree. Once a verdict was looked at before the end of a run, every interval of
its folder is anytime-valid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fairtrial import stats
from fairtrial.trial.declare import (
    AllOf,
    AnyClaim,
    Claim,
    Contrast,
    Difference,
    Exact,
    ForEach,
    Level,
    Report,
    Statistic,
)
from fairtrial.trial.evidence import Evidence, gather
from fairtrial.trial.table import Table

FIRST_LOOK = 5  # replicates: no verdict is looked at before
State = Literal["HOLDS", "FAILS", "UNDECIDED", "REPORTED"]


@dataclass(frozen=True)
class ClaimResult:
    """The verdict on one claim.

    Attributes
    ----------
    state : HOLDS, FAILS, UNDECIDED, or REPORTED where nothing is claimed.
    difference, low, high : the estimate of its quantity (a difference is positive where the first candidate is better)
        and its interval at ``level``, the level of the claim's Holm rank.
    low95, high95 : the plain 95% interval, not corrected for other claims.
    cells, lost, units : cells behind the estimate, pairs lost, and units that the interval generalises over.
    sample_gain : how many single replicates' worth of precision the replicates gave.
    paired_gain : Var(unpaired) / Var(paired).
    cost_ratio : seconds of the first candidate over those of the second, stages included.
    """

    id: str
    part: str
    text: str
    state: State
    quantity: dict[str, Any]
    over: str = "replicate"
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    level: float = math.nan
    low95: float = math.nan
    high95: float = math.nan
    bound: dict[str, float] = field(default_factory=dict)
    p_value: float = math.nan
    cells: int = 0
    lost: int = 0
    units: int = 0
    sample_gain: float | None = None
    paired_gain: float | None = None
    cost_ratio: float | None = None
    reason: str | None = None
    claims: tuple[ClaimResult, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the claim's entry of ``result.json``."""
        names = [name for name in self.__dataclass_fields__ if name not in ("state", "claims")]
        entry = {name: getattr(self, name) for name in names}
        entry["verdict"] = self.state
        entry["claims"] = [claim.to_dict() for claim in self.claims]
        return entry

    def __str__(self) -> str:
        interval = f"{self.difference:.4g} [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.state} {self.id}: {self.text}: {interval}"


@dataclass
class _Node:
    """A claim on its way to a verdict: the evidence at each look, and its children."""

    part: str
    claim: AnyClaim
    looks: list[Evidence] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)
    outcome: tuple[State, str | None] = ("UNDECIDED", None)  # of an exact claim, with a reason

    @property
    def judged(self) -> bool:
        """Whether it counts among the claims that Holm corrects for."""
        return not isinstance(self.claim, Exact | Report)

    @property
    def counts(self) -> bool:
        """Whether these parameters ask for its cells: then it counts for Holm, even if all of them were lost."""
        if self.children:
            return any(child.counts for child in self.children)
        return bool(self.looks[-1].lost) or not math.isnan(self.looks[-1].estimate)

    def p_values(self) -> tuple[float, float]:
        """Return the p-values for holding and failing: running minima over the looks, combined over children."""
        if self.children:
            holds, fails = zip(*(child.p_values() for child in self.children), strict=True)
            return max(holds), min(1.0, len(fails) * min(fails))
        if not isinstance(self.claim, Claim):  # for each of no values
            return 1.0, 1.0
        pairs = [look.p_values(self.claim.above, self.claim.below) for look in self.looks]
        return min(p for p, _ in pairs), min(p for _, p in pairs)


def judge(
    tables: Mapping[str, Table],
    *,
    level: float = 0.95,
    peeked: bool = False,
    seconds: Mapping[str, Mapping[str, float]] | None = None,
) -> list[ClaimResult]:
    """Return the verdicts on all claims, in declared order.

    ``peeked`` says that verdicts were looked at before the end: then the looks that could have been taken (each
    complete prefix of at least 5 replicates) are all taken again, with anytime-valid evidence.
    """
    nodes = [node for table in tables.values() for node in _nodes(table, peeked)]
    tested = [node for node in nodes if node.judged and node.counts]
    pairs = [node.p_values() for node in tested]
    rejected, levels = stats.holm([min(1.0, 2 * min(pair)) for pair in pairs], level)
    states: dict[int, tuple[State, float, float]] = {}
    for node, (holds, fails), decided, own_level in zip(tested, pairs, rejected, levels, strict=True):
        state: State = "UNDECIDED" if not decided else "HOLDS" if holds < fails else "FAILS"
        states[id(node)] = (state, own_level, min(1.0, 2 * min(holds, fails)))
    return [_result(node, states.get(id(node)), level, seconds or {}) for node in nodes]


def evidence(table: Table) -> list[Evidence]:
    """Return the evidence on each single claim of a part, composites' children among them."""

    def leaves(node: _Node) -> list[Evidence]:
        return [look for child in node.children for look in leaves(child)] or node.looks[-1:]

    return [look for node in _nodes(table, peeked=False) for look in leaves(node)]


def _nodes(table: Table, peeked: bool) -> list[_Node]:
    if not peeked:
        views = [table]
    else:
        complete = table.complete_prefix()
        views = [table.prefix(count) for count in range(min(FIRST_LOOK, complete), complete + 1)] if complete else []
    return [_node(table, claim, views, peeked) for claim in table.part.claims]


def _node(table: Table, claim: AnyClaim, views: Sequence[Table], anytime: bool) -> _Node:
    node = _Node(table.part.name, claim)
    if isinstance(claim, AllOf):
        node.children = [_node(table, child, views, anytime) for child in claim.claims]
    elif isinstance(claim, ForEach):
        values = [v for f in table.part.factors if f.name == claim.factor for v in f.values]
        node.children = [_node(table, _at(claim.claim, claim.factor, v), views, anytime) for v in values]
        if not values:
            node.looks = [Evidence(reason=f"these parameters have no factor {claim.factor!r}")]
    elif isinstance(claim, Exact):
        node.outcome = _exactly(table, claim)
    else:
        if claim.over == "item" or isinstance(claim.quantity, Statistic):
            views, anytime = views[-1:], False  # never looked at before the end: `runner` refuses to
        node.looks = [gather(view, claim.quantity, claim.over, anytime) for view in views] or [
            Evidence(reason="no replicate is complete yet")
        ]
    return node


def _at(claim: Claim, factor: str, value: Any) -> Claim:
    """Return the claim restricted to one value of a setting."""
    quantity = claim.quantity
    if isinstance(quantity, Difference | Level):
        quantity = replace(quantity, where={**quantity.where, factor: value})
    elif isinstance(quantity, Contrast):
        quantity = Contrast(tuple(((c, m, {**w, factor: value}), x) for (c, m, w), x in quantity.terms))
    else:
        inner = quantity.fn
        quantity = Statistic(functools.wraps(inner)(lambda frame: inner(frame[frame[factor] == value])))
    return replace(claim, id=f"{claim.id}[{factor}={value}]", quantity=quantity)


def _exactly(table: Table, claim: Exact) -> tuple[State, str | None]:
    unfinished = sum(row.status != "done" for row in table.rows)
    if unfinished:
        lost = sum(row.status == "failed" for row in table.rows)
        return "UNDECIDED", f"{lost} cells lost" if lost else f"{unfinished} cells not measured"
    try:
        outcome = claim.fn(table.frame())
    except Exception as error:
        return "UNDECIDED", f"it cannot be computed: {type(error).__name__}: {error}"
    if isinstance(outcome, str):
        return "FAILS", outcome
    return "HOLDS" if outcome else "FAILS", None


def _result(
    node: _Node, verdict: tuple[State, float, float] | None, level: float, seconds: Mapping[str, Mapping[str, float]]
) -> ClaimResult:
    claim = node.claim
    base = ClaimResult(claim.id, node.part, claim.text, "UNDECIDED", _describe(claim), level=level)
    if isinstance(claim, Exact):
        state, reason = node.outcome
        return replace(base, state=state, reason=reason)
    state, own_level, p = verdict or ("UNDECIDED", level, math.nan)
    if node.children:
        children = tuple(_child(child, own_level, len(node.children), seconds) for child in node.children)
        reason = next((c.reason for c in children if c.reason), None) if state == "UNDECIDED" else None
        return replace(base, state=state, level=own_level, p_value=p, claims=children, reason=reason)
    if isinstance(claim, Report):
        return replace(_estimated(base, node, level, seconds), state="REPORTED")
    if isinstance(claim, ForEach):  # over no values
        return replace(base, reason=node.looks[0].reason)
    return replace(_estimated(base, node, own_level, seconds), state=state, p_value=p)


def _child(node: _Node, level: float, siblings: int, seconds: Mapping[str, Mapping[str, float]]) -> ClaimResult:
    """Return a child of a composite claim, with the state its own interval shows.

    To hold, all children must, each at the parent's ``level``; to fail one is enough, so each must fail at a level
    corrected for its ``siblings``.
    """
    holds, fails = node.p_values()
    if fails < holds:
        level = 1 - (1 - level) / siblings
    p = min(1.0, 2 * min(holds, fails))
    state: State = "UNDECIDED" if p > 1 - level else "HOLDS" if holds < fails else "FAILS"
    return _result(node, (state, level, p), level, seconds)


def _estimated(base: ClaimResult, node: _Node, level: float, seconds: Mapping[str, Mapping[str, float]]) -> ClaimResult:
    claim = node.claim
    assert isinstance(claim, Claim | Report)
    last = node.looks[-1]
    bounds = {"above": claim.above, "below": claim.below} if isinstance(claim, Claim) else {}
    bound = {side: value for side, value in bounds.items() if value is not None}
    low, high = _within(node.looks, level, bound)
    low95, high95 = _within(node.looks, 0.95, bound)
    ratio = None
    if isinstance(claim.quantity, Difference):
        a, b = (seconds.get(node.part, {}).get(label) for label in (claim.quantity.a, claim.quantity.b))
        ratio = a / b if a and b else None
    gain = last.moments.gain if last.moments else None
    return replace(
        base, over=claim.over, difference=last.estimate, low=low, high=high, level=level, low95=low95, high95=high95,
        bound=bound, cells=last.cells, lost=last.lost, units=last.units, sample_gain=gain,
        paired_gain=last.paired_gain, cost_ratio=ratio, reason=last.reason,
    )  # fmt: skip


def _within(looks: Sequence[Evidence], level: float, bound: Mapping[str, float]) -> tuple[float, float]:
    """Return the intersection of the intervals of all looks: one for a finished run, a sequence once peeked."""
    seen = [look for look in looks if look.uncertainty is not None]
    if not seen:
        return math.nan, math.nan
    lows, highs = zip(*(look.interval(level, **bound) for look in seen), strict=True)
    if max(lows) <= min(highs):
        return max(lows), min(highs)
    # Two looks contradict each other: the surest decides, as its p-value does.
    above, below = bound.get("above"), bound.get("below")
    surest = min(seen, key=lambda look: min(look.p_values(above, below)) if bound else -look.units)
    return surest.interval(level, **bound)


def _describe(claim: AnyClaim) -> dict[str, Any]:
    """Return a claim's quantity as the schema says it."""
    if isinstance(claim, Exact | AllOf):
        return {"kind": "exact" if isinstance(claim, Exact) else "all_of"}
    if isinstance(claim, ForEach):
        return {"kind": "for_each", "factor": claim.factor}
    quantity = claim.quantity
    if isinstance(quantity, Difference):
        where, scale = dict(quantity.where), quantity.scale
        return {"kind": "difference", "a": quantity.a, "b": quantity.b, "metric": quantity.metric, "where": where,
                "scale": scale}  # fmt: skip
    if isinstance(quantity, Level):
        return {"kind": "level", "a": quantity.a, "metric": quantity.metric, "where": dict(quantity.where)}
    if isinstance(quantity, Contrast):
        terms = [{"candidate": c, "metric": m, "where": w, "weight": x} for (c, m, w), x in quantity.terms]
        return {"kind": "contrast", "terms": terms}
    return {"kind": "statistic", "name": getattr(quantity.fn, "__name__", "statistic")}
