"""The mean of the cells, the variance of that mean, and how both would go on with further splits.

One uniform correlation model serves all four variance modes: K splits, each of variance v1 on its own, covary by
``cross`` (two splits inside one K-fold pass by ``within``), so that  K^2 V_K = K v1 + the covariances of all ordered
pairs. The modes differ in where these numbers come from:

    independent     fresh data and seeds        v1 = S^2,          cross = 0
    nadeau_bengio   only fold means and sizes   v1 = S^2 (1 + c),  cross = c S^2,  c = n_test / n_train
    design          index sets and components   V_K exact, cross = (v_s + kappa v_q) / n for further random splits
    crossed         every run, the same items   as design, kappa = 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.stats.components import Components, Overlap, variance_components
from fairtrial.stats.tables import SplitScores

VarianceMode = Literal["design", "nadeau_bengio", "independent", "crossed"]
MODES: dict[VarianceMode, str] = {  # what a user declares by each, in words to print
    "design": "folds of one data set, whose index sets are known",
    "nadeau_bengio": "folds of one data set, of which only means and sizes are known",
    "independent": "no two cells share data, items or seeds",
    "crossed": "every run answers the same items; no training data are shared",
}
ANYTIME_CELLS = 10  # the anytime interval is tightest near this number of cells


@dataclass(frozen=True)
class Moments:
    """Mean, variance and degrees of freedom of a set of cells, and the covariances of further ones.

    Attributes
    ----------
    mean, variance, df : f, V_K, degrees of freedom of V_K
    n_cells : K
    single : v1, the variance of one split (of the average of its seeds, where it was run with several)
    one_run : the variance of one run, where splits are averages of several; otherwise ``single``
    cross, within : covariance of a further split with any other, and with one of its own K-fold pass
    folds : splits in a K-fold pass (1: random splits, runs, or cells)
    """

    mean: float
    variance: float
    df: float
    n_cells: int
    single: float
    cross: float
    within: float = 0.0
    folds: int = 1
    one_run: float | None = None

    @property
    def correlation(self) -> float:
        """Correlation r of  V_K = v1 (r + (1 - r) / K); nan without variance or with one cell."""
        if self.single <= 0 or self.n_cells < 2:
            return np.nan
        return float(np.clip((self.n_cells * self.variance / self.single - 1) / (self.n_cells - 1), 0.0, 1.0))

    @property
    def gain(self) -> float:
        """Sample gain g(K) = v1 / V_K, v1 that of a single run; nan without variance."""
        one = self.single if self.one_run is None else self.one_run
        return one / self.variance if self.variance > 0 else np.nan

    @property
    def design_ratio(self) -> float:
        """V_10 / V_K, by the correlation of the cells."""
        r = self.correlation
        return float((r + (1 - r) / ANYTIME_CELLS) / (r + (1 - r) / self.n_cells))

    def further(self, splits: float) -> float:
        """Return the expected variance after ``splits`` further splits of the same kind (``inf``: the limit)."""
        if np.isinf(splits):
            return self.cross
        k, b = self.n_cells, int(splits)
        same_pass = _pairs_in_passes(k + b, self.folds) - _pairs_in_passes(k, self.folds)  # new ordered pairs
        other = 2 * k * b + b * (b - 1) - same_pass
        return (k**2 * self.variance + b * self.single + other * self.cross + same_pass * self.within) / (k + b) ** 2

    def gain_ahead(self, splits: float) -> float:
        """G_b(K) = g(K + b) / g(K) - 1; ``inf`` for the remaining gain."""
        later = self.further(splits)
        if self.variance <= 0:
            return np.nan
        gain = self.variance / later - 1 if later > 0 else np.inf
        return max(gain, 0.0) if np.isinf(splits) else gain  # all there could be tells no less than what there is


def _pairs_in_passes(splits: int, folds: int) -> int:
    passes, rest = divmod(splits, folds)
    return passes * folds * (folds - 1) + rest * (rest - 1)


def moments_of_cells(
    values: ArrayLike,
    variance: VarianceMode = "independent",
    n_test: ArrayLike | None = None,
    n_train: ArrayLike | None = None,
) -> Moments:
    """Moments of K cell values: independent, or folds of one data set with the sizes of their sets."""
    x = np.asarray(values, dtype=float)
    if x.ndim != 1:
        raise InputError(f"cell values have shape {x.shape}: give a plain vector, one value a cell")
    if not np.isfinite(x).all():
        at = int(np.argmin(np.isfinite(x)))
        raise InputError(f"cell {at} has the value {x[at]}: drop or repair it, or give the metric's worst value")
    if len(x) < 2:
        raise InputError(f"{len(x)} cell: an interval needs at least two, so run another split or seed")
    if variance == "nadeau_bengio":
        if n_test is None or n_train is None:
            raise InputError(
                "Nadeau and Bengio's variance needs the sizes of the folds: add n_test= and n_train= "
                "(SplitScores.from_folds and mean_interval take them), or give per-sample scores"
            )
        if (np.asarray(n_test) <= 0).any() or (np.asarray(n_train) <= 0).any():
            raise InputError("n_test and n_train must be positive: they are numbers of samples")
        ratio = float(np.mean(np.asarray(n_test) / np.asarray(n_train)))
    elif variance == "independent":
        ratio = 0.0
    elif variance in MODES:
        raise InputError(f"variance={variance!r} needs per-sample scores: build the table with SplitScores.from_rows")
    else:
        raise UnknownNameError("variance", variance, MODES)
    k, s2 = len(x), float(x.var(ddof=1))
    return Moments(float(x.mean()), s2 * (1 / k + ratio), k - 1, k, s2 * (1 + ratio), s2 * ratio)


def overlap_of(scores: SplitScores) -> Overlap:
    """Return the running sums of the table's index sets."""
    assert scores.samples is not None
    overlap = Overlap(len(scores.samples))
    for k in range(scores.n_splits):
        overlap.add(scores.test(k), None if scores.train is None else scores.train[k])
    return overlap


def moments_of_design(
    overlap: Overlap, c: Components, kappa: float, mean: float, one_run: Components | None = None
) -> Moments:
    """Moments of splits whose index sets are known; ``one_run`` are the components of single runs of the splits.

    df = V^2 / [ (Pt + Pq)^2 / (K - 1) + (Ps + Ph)^2 / (N - 1) ] with N the distinct samples tested.
    """
    split, sample, interaction, training = overlap.parts(c, kappa)
    variance = split + sample + interaction + training
    k, tested = overlap.splits, int(np.count_nonzero(overlap.tested))
    spread = (split + interaction) ** 2 / (k - 1) + (sample + training) ** 2 / (tested - 1) if k > 1 else 0.0
    n = int(np.count_nonzero((overlap.tested != 0) | (overlap.trained + overlap.base != 0)))
    folds = overlap.folds or 1
    # In one K-fold pass tests are disjoint and two training sets of n - n / F samples share n - 2 n / F.
    within = kappa * c.training * (1 - 2 / folds) / (1 - 1 / folds) ** 2 / n if folds > 1 else 0.0
    single, of_run = (
        None if part is None else part.split + (part.sample + part.interaction) * overlap.inverse_test / k
        for part in (c, one_run)
    )
    assert single is not None
    return Moments(
        mean=mean,
        variance=variance,
        df=variance**2 / spread if spread > 0 else max(k - 1, 0),
        n_cells=k,
        single=single,
        cross=min((c.sample + kappa * c.training) / n, single),  # two splits covary by no more than one varies
        within=min(within, single),
        folds=folds,
        one_run=of_run,
    )


def default_variance(scores: SplitScores | ArrayLike) -> VarianceMode:
    """Return "design" where samples are known, "nadeau_bengio" where fold sizes are, "independent" for cells."""
    if not isinstance(scores, SplitScores):
        return "independent"
    return "nadeau_bengio" if scores.score is None else "design"


def moments_of(scores: SplitScores | ArrayLike, variance: VarianceMode | None = None, kappa: float = 1.0) -> Moments:
    """Moments of a table of scores, or of a plain vector of cells, by the variance mode."""
    mode = variance or default_variance(scores)
    if not isinstance(scores, SplitScores):
        return moments_of_cells(scores, mode)
    if mode not in ("design", "crossed") or scores.score is None:
        return moments_of_cells(scores.means, mode, scores.n_test, scores.n_train)
    if scores.n_splits < 2:
        raise InputError("one split: an interval needs at least two, so run another split or seed")
    if mode == "crossed":
        return moments_of_design(overlap_of(scores), variance_components(scores), 0.0, float(scores.means.mean()))
    if (scores.n_train == 0).any():
        raise InputError(
            f"split {scores.labels[np.argmin(scores.n_train)]} trains on no sample: give train=, "
            "or variance='crossed' where every run answers the same items"
        )
    averaged, single = scores.average_runs()
    if averaged.n_splits < 2:
        raise InputError("all splits have the same two sets: give other splits, or variance='crossed' for runs of one")
    if not 0 <= kappa < np.inf:
        raise InputError(f"kappa={kappa}: at least 0, and 1 unless you have measured it")
    c, one_run = variance_components(averaged), None
    if averaged.n_splits < scores.n_splits:
        runs = [variance_components(run) for run in single]
        split, training = (float(np.mean([getattr(run, name) for run in runs])) for name in ("split", "interaction"))
        c = Components(c.split, c.sample, c.interaction, c.residual_df, c.raw, single_run=training)
        one_run = Components(split, c.sample, training, c.residual_df, c.raw)
    return moments_of_design(overlap_of(averaged), c, kappa, float(averaged.means.mean()), one_run)
