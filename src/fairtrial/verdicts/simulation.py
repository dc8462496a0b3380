"""Simulated trials whose truth is known, so that a verdict on them is right or wrong.

A scenario declares a part as any ``trial.py`` does and draws what its cells would have measured: the baseline's score
``b`` and the method's ``b + effect + noise``. The rows are those a store would hold; from there on everything is the
engine's own code, which is what is put to trial.

Unless a scenario says otherwise the noise of a difference has mean 0 and variance 1 and the stated effect is the one
that the exact t test finds in :data:`POWER` of all trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from scipy.special import nctdtrinc, stdtrit

from fairtrial.trial.declare import AllOf, Candidate, Claim, Factor, Items, Metric, Part, all_of, difference
from fairtrial.trial.store import Row
from fairtrial.trial.table import Table

Rng: TypeAlias = np.random.Generator
Noise: TypeAlias = Callable[[Rng, tuple[int, ...]], np.ndarray]
Loss: TypeAlias = Callable[[Rng, np.ndarray], np.ndarray]  # which cells are lost, by their noise
Cells: TypeAlias = "Sequence[Mapping[str, Any] | None]"  # the metrics of each cell in declared order; None: lost

POWER = 0.8
SKEW = 0.75  # sigma of the lognormal noise: skewness 3.3


class Draw(NamedTuple):
    """What one simulated trial measured, and the true value of each single claim's quantity (composites in order)."""

    method: Cells
    baseline: Cells
    truth: list[float]


@dataclass(frozen=True)
class Scenario:
    """A kind of trial: its part as declared, and how its cells come about.

    ``effect`` is the stated effect (the null has 0); ``peeked`` says that verdicts are looked at from the fifth
    replicate on; ``share`` is the share of the usual number of trials that its cost allows.
    """

    name: str
    part: Part
    draw: Callable[[Rng, float], Draw]
    effect: float
    peeked: bool = False
    share: float = 1.0

    @cached_property
    def cells(self) -> list[dict[str, Any]]:
        """The part's cells in declared order."""
        return list(self.part.cells())

    def table(self, draw: Draw) -> Table:
        """Return a draw as the table of a finished run."""
        sides = (("method", draw.method), ("baseline", draw.baseline))
        return Table(
            self.part, [self._row(c, f, m) for c, side in sides for f, m in zip(self.cells, side, strict=True)]
        )

    def _row(self, candidate: str, factors: dict[str, Any], metrics: Mapping[str, Any] | None) -> Row:
        status = "failed" if metrics is None else "done"
        return Row("", self.part.name, candidate, factors, {}, {}, {}, status=status, metrics=dict(metrics or {}))


def detectable(replicates: int, power: float = POWER) -> float:
    """Return the effect, in standard deviations, that a two-sided 5% t test of n cells puts above 0 in ``power``.

    The noncentrality c with P(T(n - 1, c) > t_.975) = power, over sqrt(n).

    >>> round(detectable(10), 3)
    0.996
    """
    df = replicates - 1
    return float(nctdtrinc(df, 1 - power, stdtrit(df, 0.975)) / np.sqrt(replicates))


# ------------------------------------------------------------------------------------------------- how cells come about


def normal(rng: Rng, shape: tuple[int, ...]) -> np.ndarray:
    """Draw standard normal noise."""
    return rng.normal(size=shape)


def skewed(rng: Rng, shape: tuple[int, ...]) -> np.ndarray:
    """Draw lognormal noise, centred and scaled to mean 0 and variance 1."""
    mean = np.exp(SKEW**2 / 2)
    return (rng.lognormal(0.0, SKEW, shape) - mean) / (mean * np.sqrt(np.expm1(SKEW**2)))


def at_random(rng: Rng, noise: np.ndarray) -> np.ndarray:
    """Lose 15% of the method's cells whatever they hold."""
    return rng.random(noise.shape) < 0.15


def where_worst(rng: Rng, noise: np.ndarray) -> np.ndarray:
    """Lose the worst fifth of the method's cells: it fails exactly where it does badly."""
    return noise < -0.8416  # the normal quantile of 0.2


def pairs(
    rng: Rng,
    effect: float,
    *,
    replicates: int,
    folds: int = 1,
    common: float = 1.0,
    noise: Noise = normal,
    lose: Loss | None = None,
    log: bool = False,
    sign: int = 1,
) -> Draw:
    """Measure one score a cell; the folds of one fit share ``common`` of the difference's variance."""
    shape = (replicates, folds)
    d = np.sqrt(common) * noise(rng, (replicates, 1)) + np.sqrt(1 - common) * noise(rng, shape)
    base = rng.normal(size=shape)
    scores = np.stack([base + effect + d, base])
    method, baseline = ([{"score": float(x)} for x in side.flat] for side in (np.exp(scores) if log else scores))
    lost = np.zeros(shape, dtype=bool) if lose is None else lose(rng, d)
    return Draw(
        [None if gone else cell for gone, cell in zip(lost.flat, method, strict=True)], baseline, [sign * effect]
    )


def proportions(rng: Rng, effect: float, *, replicates: int, items: int, rate: float) -> Draw:
    """Measure accuracies on few items: many differences are equal."""
    hits = rng.binomial(items, [[rate + effect], [rate]], size=(2, replicates)) / items
    method, baseline = ([{"score": float(x)} for x in side] for side in hits)
    return Draw(method, baseline, [effect])


def several(rng: Rng, effect: float, *, replicates: int, claims: int) -> Draw:
    """Measure one metric a claim, correlated .5 between claims; with an effect, every other claim is true."""
    d = np.sqrt(0.5) * (rng.normal(size=(replicates, 1)) + rng.normal(size=(replicates, claims)))
    base = rng.normal(size=(replicates, claims))
    truth = effect * (np.arange(claims) % 2 == 0)
    names = [f"score{i}" for i in range(claims)]
    method, baseline = ([dict(zip(names, row, strict=True)) for row in s.tolist()] for s in (base + truth + d, base))
    return Draw(method, baseline, truth.tolist())


def settings(rng: Rng, effect: float, *, replicates: int, count: int, large: float) -> Draw:
    """Measure every setting; all but the first have a ``large`` effect: the hardest null of 'in all of them'."""
    truth = np.array([effect, *[large] * (count - 1)])
    base = rng.normal(size=(replicates, count))
    scores = (base + truth + rng.normal(size=(replicates, count)), base)
    method, baseline = ([{"score": float(x)} for x in side.flat] for side in scores)
    return Draw(method, baseline, truth.tolist())


def runs_on_items(
    rng: Rng,
    effect: float,
    *,
    runs: int,
    items: int,
    run: float,
    item: float,
    residual: float,
    fixed: bool = False,
    lose: Loss | None = None,
) -> Draw:
    """Let every run answer the same items; variances of runs, items and the rest. ``fixed`` runs are the population."""
    luck = np.sqrt(run) * rng.normal(size=(runs, 1))
    if fixed:
        luck -= luck.mean()
    own = luck + np.sqrt(residual) * rng.normal(size=(runs, items))
    d = own + np.sqrt(item) * rng.normal(size=items)
    base = rng.normal(size=(runs, items))
    ids = np.arange(items)
    method, baseline = ([{"score": Items(ids, row)} for row in side] for side in (base + effect + d, base))
    standardized = own.mean(axis=1) / np.sqrt(run + residual / items)
    lost = np.zeros(runs, dtype=bool) if lose is None else lose(rng, standardized)
    return Draw([None if gone else cell for gone, cell in zip(lost, method, strict=True)], baseline, [effect])


def regressions(rng: Rng, effect: float, *, splits: int, n: int, test: int) -> Draw:
    """Split one data set at random: each candidate regresses y on a feature of its own, without intercept.

    y = beta x_method + x_baseline + noise, all standard normal. A fit on m samples has the expected squared error
    (Var(y) - its coefficient squared) (1 + 1 / (m - 2)) on fresh ones, which gives beta for an ``effect``.
    """
    inflation = 1 + 1 / (n - test - 2)
    beta = np.sqrt(1 + effect / inflation)
    x = rng.normal(size=(2, n))
    y = beta * x[0] + x[1] + rng.normal(size=n)
    sides: tuple[list, list] = ([], [])
    for _ in range(splits):
        order = rng.permutation(n)
        tested, trained = np.sort(order[:test]), np.sort(order[test:])
        for side, feature in zip(sides, x, strict=True):
            slope = feature[trained] @ y[trained] / (feature[trained] @ feature[trained])
            side.append({"loss": Items(tested, (y[tested] - slope * feature[tested]) ** 2, trained)})
    return Draw(*sides, [effect])


def equicorrelated(rng: Rng, effect: float, *, splits: int, n: int, test: int) -> Draw:
    """Draw the means of folds of one data set: correlated by the share of the data they test (Nadeau and Bengio)."""
    correlation = test / n
    d = np.sqrt(correlation) * rng.normal() + np.sqrt(1 - correlation) * rng.normal(size=splits)
    base = rng.normal(size=splits)
    ids, rest = np.arange(test), np.arange(test, n)  # only their numbers count
    method, baseline = (
        [{"score": Items(ids, np.full(test, x), rest)} for x in side] for side in (base + effect + d, base)
    )
    return Draw(method, baseline, [effect])


# ----------------------------------------------------------------------------------------------------------- scenarios


def _measure(*_: Any) -> dict[str, float]:
    return {}  # never asked: a scenario draws its cells


def _part(
    replicates: int,
    claims: tuple[Claim | AllOf, ...],
    *factors: Factor,
    metrics: tuple[Metric, ...] = (Metric("score"),),
    variance: Any = "independent",
) -> Part:
    sides = (Candidate("method", "method"), Candidate("baseline", "baseline"))
    replicate = Factor("seed", range(replicates), kind="replicate")
    return Part("simulated", sides, metrics, (replicate, *factors), variance, claims, _measure)


def _better(metric: str = "score", over: Any = "replicate", **where: Any) -> Claim:
    name = "".join([metric, *map(str, where.values())])
    return Claim(name, "the method is better", difference("method", "baseline", metric, where), above=0, over=over)


def _cells(name: str, replicates: int, *, claim: Claim | None = None, **how: Any) -> Scenario:
    """Pairs of one score: the commonest trial, and its variations."""
    peeked, share = how.pop("peeked", False), how.pop("share", 1.0)
    folds, common = how.get("folds", 1), how.get("common", 1.0)
    factors = (Factor("fold", range(folds), kind="within"),) if folds > 1 else ()
    deviation = np.sqrt(common + (1 - common) / folds)  # of a replicate's mean
    part = _part(replicates, (claim or _better(),), *factors)
    draw = partial(pairs, replicates=replicates, **how)
    return Scenario(name, part, draw, deviation * detectable(replicates), peeked, share)


def _scenarios() -> list[Scenario]:
    logs = Claim("score", "the method is better", difference("method", "baseline", "score", scale="log"), above=0)
    below = Claim("score", "the baseline is worse", difference("baseline", "method", "score"), below=0)
    scores = [tuple(Metric(f"score{i}") for i in range(count)) for count in (3, 10)]
    of_all = all_of("all", "better in every setting", *(_better(setting=value) for value in range(3)))
    loss = (Metric("loss", higher_is_better=False),)
    crossed: dict[str, Any] = {"run": 0.05, "item": 1.0, "residual": 1.0}
    splits: dict[str, Any] = {"splits": 10, "n": 100, "test": 20}
    # Deviations of the mean difference, for effects of the usual size.
    items_deviation = np.sqrt(crossed["run"] / 5 + crossed["item"] / 40 + crossed["residual"] / 200)
    fold_deviation = np.sqrt(0.2 + 0.8 / 15)
    effect = {n: detectable(n) for n in (10, 15, 100)}
    return [
        _cells("3 replicates", 3),
        _cells("5 replicates", 5),
        _cells("10 replicates", 10),
        _cells("30 replicates", 30),
        _cells("8 folds of 2 fits", 2, folds=8, common=0.5),
        _cells("8 folds of 5 fits", 5, folds=8, common=0.5),
        Scenario(
            "5 runs on the same items", _part(5, (_better(),), variance="crossed"),
            partial(runs_on_items, runs=5, items=40, **crossed), 2.8 * items_deviation, share=0.5,
        ),
        Scenario(
            "new items for 3 models", _part(3, (_better(over="item"),), variance="crossed"),
            partial(runs_on_items, runs=3, items=100, **crossed, fixed=True),
            effect[100] * np.sqrt(crossed["item"] + crossed["residual"] / 3), share=0.5,
        ),
        Scenario(
            "10 splits of one data set", _part(10, (_better("loss"),), metrics=loss, variance="design"),
            partial(regressions, **splits), 1.0, share=0.5,
        ),
        Scenario(
            "10 splits known by means", _part(10, (_better("loss"),), metrics=loss, variance="nadeau_bengio"),
            partial(regressions, **splits), 1.0, share=0.5,
        ),
        _cells("skewed differences", 10, noise=skewed),
        _cells("logs of skewed scores", 10, claim=logs, log=True),
        Scenario("few distinct values", _part(6, (_better(),)), partial(proportions, replicates=6, items=5, rate=0.5),
                 0.4),
        _cells("losses at random", 10, lose=at_random),
        _cells("losses where it is worst", 10, lose=where_worst),
        _cells("losses where it is worst (claim below)", 10, lose=where_worst, claim=below, sign=-1),
        Scenario(
            "losses where it is worst (same items)", _part(8, (_better(),), variance="crossed"),
            partial(runs_on_items, runs=8, items=40, **crossed | {"run": 0.5}, lose=where_worst),
            2.8 * np.sqrt(0.5 / 8 + 1 / 40 + 1 / 320), share=0.5,
        ),
        _cells("peeking at 5 to 20 replicates", 20, peeked=True, share=0.3),
        Scenario(
            "peeking at 5 to 15 folds of one data set", _part(15, (_better(),), variance="nadeau_bengio"),
            partial(equicorrelated, splits=15, n=100, test=20), effect[15] * np.sqrt(15) * fold_deviation, True, 0.3,
        ),
        Scenario("3 claims", _part(10, tuple(_better(m.name) for m in scores[0]), metrics=scores[0]),
                 partial(several, replicates=10, claims=3), effect[10]),
        Scenario("10 claims", _part(10, tuple(_better(m.name) for m in scores[1]), metrics=scores[1]),
                 partial(several, replicates=10, claims=10), effect[10], share=0.5),
        Scenario("all of 3 settings", _part(10, (of_all,), Factor("setting", range(3))),
                 partial(settings, replicates=10, count=3, large=2 * effect[10]), effect[10]),
    ]  # fmt: skip


SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _scenarios()}
