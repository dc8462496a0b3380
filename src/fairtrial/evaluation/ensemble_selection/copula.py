"""Why ensembles of similar models saturate: a Gaussian copula on their errors, and the floors it puts under them.

Model j errs where Z_j < t_j, t_j = Phi^-1(e_j), Z ~ N(0, R). With equal errors e < 1/2 and equal correlations r, Z_j =
sqrt(r) U + sqrt(1 - r) W_j: given the item's difficulty U the models err independently with probability
p(U) = Phi((t - sqrt(r) U) / sqrt(1 - r)). With ever more models the share of votes tells p(U) or 1 - p(U); the odds of
the two favour the majority, so that no rule errs less often than

    P(p(U) > 1/2) = Phi(Phi^-1(e) / sqrt(r)).

A fitted copula has its own e_j, by class where the labels are known, and R = L L' + D with one or two factors.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NamedTuple, Self

import numpy as np
from scipy.special import betainc, betaincinv, chdtrc, ndtr, ndtri
from sklearn.exceptions import NotFittedError

from fairtrial import stats
from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection.answers import as_frame, check_rows, classes_of
from fairtrial.evaluation.ensemble_selection.confusion import TINY, Confusion
from fairtrial.evaluation.ensemble_selection.softmax import Floats, Ints, softmax
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import generator

NODES = 64  # Gauss-Hermite, a factor
NOTHING = 1e-10  # weight of a node that is left out
LATTICE = 2**14  # points
DRAWS = 20_000  # of answers, where they cannot be enumerated
ENUMERATED = 20  # models whose 2^M patterns of errors are
CLOSEST = 0.9999  # a tetrachoric correlation
GROUPS = 10  # of items, left out in turn for the interval of the floor
TRUST = 0.01  # p-value of the fit below which the floor is not to be trusted


# ------------------------------------------------------------------------------------------------ equal models, closed


def equicorrelated_floor(error: float, correlation: float) -> float:
    """Return the least error of any rule on any number of models with equal errors and equally correlated errors.

    Parameters
    ----------
    error
        P(a model errs), in [0, 1/2], two classes.
    correlation
        Of the latent Gaussian variables, in [0, 1].

    Returns
    -------
    float
        Phi(Phi^-1(error) / sqrt(correlation)): 0 at correlation 0 (with error < 1/2), ``error`` at 1.

    Examples
    --------
    >>> round(equicorrelated_floor(0.2, 0.5), 6), equicorrelated_floor(0.2, 0.0)
    (0.116978, 0.0)
    """
    _check_equal(error, correlation)
    if error in (0.0, 0.5) or correlation == 1.0:
        return float(error)
    return float(ndtr(ndtri(error) / math.sqrt(correlation))) if correlation > 0 else 0.0


def equicorrelated_information(error: float, correlation: float) -> float:
    """Return the bits that ever more such models tell about a balanced label.

    1 - E h2(1 / (1 + exp(2 sqrt(1 - r) |t| |q| / r))), q = (t - sqrt(r) U) / sqrt(1 - r), t = Phi^-1(error), U normal.
    See :func:`equicorrelated_floor` for the arguments.

    Examples
    --------
    >>> round(equicorrelated_information(0.2, 0.5), 5)
    0.60335
    """
    _check_equal(error, correlation)
    if error == 0.5:
        return 0.0
    if error == 0.0 or correlation == 0.0:
        return 1.0
    if correlation == 1.0:
        return 1 - float(_binary_entropy(np.array(error)))
    t, root = ndtri(error), math.sqrt(correlation)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    kink = float(np.clip(t / root, -10, 10))  # q changes sign there
    total = 0.0
    for low, high in ((-10.0, kink), (kink, 10.0)):
        u = low + (high - low) * (nodes + 1) / 2
        q = (t - root * u) / math.sqrt(1 - correlation)
        odds = 2 * math.sqrt(1 - correlation) * abs(t) * np.abs(q) / correlation
        density = np.exp(-(u**2) / 2) / math.sqrt(2 * math.pi)
        left = _binary_entropy(1 / (1 + np.exp(np.minimum(odds, 700))))
        total += (high - low) / 2 * float(weights @ (density * left))
    return 1 - total


def equicorrelated_majority(error: float, correlation: float, models: float) -> float:
    """Return the error of the majority of ``models`` such models, ties decided by a coin; ``math.inf`` = the floor.

    E_U [P(B > M / 2) + P(B = M / 2) / 2], B binomial with M and p(U): as a binomial tail is a beta distribution, the
    chance that p(U) exceeds the median of M uniform numbers, by quadrature over that median. See
    :func:`equicorrelated_floor` for the arguments.

    Examples
    --------
    >>> [round(equicorrelated_majority(0.2, 0.5, m), 4) for m in (5, 21, 101)]
    [0.147, 0.1253, 0.1188]
    """
    _check_equal(error, correlation)
    half = _half(models) if models != math.inf else math.inf
    if models == math.inf or correlation == 1.0 or error in (0.0, 0.5):
        return equicorrelated_floor(error, correlation)
    if correlation == 0.0:
        return float(_majority_errs(np.array(error), models))
    nodes, weights = np.polynomial.legendre.leggauss(200)
    median = ndtri(betaincinv(half, half, (nodes + 1) / 2))
    exceeds = ndtr((ndtri(error) - math.sqrt(1 - correlation) * median) / math.sqrt(correlation))
    return float(weights @ exceeds / 2)


def _check_equal(error: float, correlation: float) -> None:
    if not 0 <= checked_number(error, "error") <= 0.5:
        raise InputError(f"error {error} is not in [0, 1/2]: of two classes, reverse the answers of a worse model")
    if not 0 <= checked_number(correlation, "correlation") <= 1:
        raise InputError(f"correlation {correlation} is not in [0, 1]: many models cannot all disagree with each other")


def _binary_entropy(p: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return -(np.where(p > 0, p * np.log2(p), 0) + np.where(p < 1, (1 - p) * np.log2(1 - p), 0))


def _majority_errs(p: Floats, models: float) -> Floats:
    """Return P(B > m / 2) + P(B = m / 2) / 2 of binomial B with ``models`` and p: that of m - 1 where m is even."""
    return betainc(_half(models), _half(models), p)


def _half(models: float) -> float:
    """Return (m + 1) / 2, m odd: of an even number one model decides nothing, a coin being fair."""
    number = isinstance(models, Real) and not isinstance(models, bool) and math.isfinite(models)
    if not number or models < 1 or models != int(models):
        raise InputError(f"models={models!r}: give a whole number from 1, or math.inf")
    return (models - (models % 2 == 0) + 1) / 2


# ------------------------------------------------------------------------------------------------------ fitted copula


class Fit(NamedTuple):
    """How well the copula predicts how many models err at once.

    ``observed`` and ``expected`` are (M + 1,) items with 0 .. M errors; ``p_value`` is that of the chi-square test on
    them, cells with fewer than five expected items taken together.
    """

    statistic: float
    df: int
    p_value: float
    observed: Floats
    expected: Floats

    @property
    def trusted(self) -> bool:
        """Whether the fit is not rejected at .01: if it is, the floor is not to be trusted."""
        return self.p_value >= TRUST


class ErrorCopula:
    """A Gaussian copula on the errors of M models, and what follows for their ensembles.

    Thresholds come from the errors' shares (with half an error added where a model never or always errs),
    correlations by maximum likelihood from the 2 x 2 table of each pair (half an item is added to each cell where one
    is empty, and the pair is listed in ``bounded_``), loadings L of R = L L' + D by least squares off the diagonal.

    Attributes
    ----------
    error_ : (M,) share of items each model errs on
    correlation_ : (M, M) tetrachoric correlations of the errors
    loadings_ : (M, factors), rows of norm below 1
    bounded_ : pairs of model indices of which one table cell was empty: their correlation is bounded, not known
    classes_ : the classes, where labels were given, else None

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> errors = 0.7 * rng.normal(size=(2000, 1)) + 0.71 * rng.normal(size=(2000, 5)) < -0.84
    >>> copula = ErrorCopula().fit(errors)
    >>> round(copula.majority_error(), 2), round(copula.majority_error(math.inf), 2)
    (0.15, 0.12)
    """

    def fit(self, errors: Any, factors: int = 1, *, answers: Any = None, y: Any = None) -> Self:
        """Fit the copula.

        Parameters
        ----------
        errors
            (n, M) whether model j errs on item i. Errors, not answers: answers agree because they agree with the label.
        factors
            1 or 2.
        answers, y
            (n, M) answers and (n,) labels, given together. The thresholds are then of each class (a model that favours
            one class errs on the others), and wrong answers are drawn from each model's confusion or, as often as they
            agree beyond chance, are the item's common distractor: what more than two classes, or answers that may be
            missing, need. Left out: two classes, equally frequent, erred on equally often.

        Raises
        ------
        InputError
            Fewer than two models or ten items; not a table of true and false; ``answers`` without ``y``.
        """
        frame = as_frame(errors)
        table = frame.to_numpy()
        if not np.isin(table, (0, 1)).all():
            raise InputError("errors is no table of true and false: compare the answers with the labels")
        table = table.astype(float)
        if table.shape[1] < 2 or len(table) < 10:
            raise InputError(
                f"errors of {table.shape[1]} models to {len(table)} items: give 2 models, 10 items or more"
            )
        factors = checked_count(factors, "factors", most=2)
        if (answers is None) != (y is None):
            raise InputError("answers and y belong together: give both, or errors alone")
        self.factors = factors
        self.names_ = list(frame.columns)
        self._errors, self._answers, self._y = table, answers, y
        self.classes_: np.ndarray | None = None
        self._confusion: Confusion | None = None
        stratum = np.zeros(len(table), dtype=np.int64)
        if y is not None:
            self.classes_, stratum = classes_of(y)
            check_rows(len(table), stratum)
            answers = as_frame(answers)
            if answers.shape != table.shape:
                raise InputError(f"errors {table.shape} and answers {answers.shape}: give tables of one shape")
            self._confusion = Confusion.fit(answers, self.classes_, stratum)
        self._stratum = stratum
        self._fit(table, stratum)
        return self

    def _fit(self, errors: Floats, stratum: Ints) -> None:
        strata = int(stratum.max()) + 1
        inside = np.eye(strata)[stratum]  # (n, K)
        counts, size = inside.T @ errors, inside.sum(0)  # (K, M), (K,)
        self.prior_ = size / size.sum()
        extreme = (counts == 0) | (counts == size[:, None])
        share = np.where(extreme, (counts + 0.5) / (size[:, None] + 1), counts / np.maximum(size[:, None], 1))
        self._threshold = ndtri(share)  # (K, M)
        self.error_ = errors.mean(0)
        self.correlation_, self.bounded_ = _tetrachoric(errors, inside)
        self.loadings_ = _minres(self.correlation_, self.factors)

    def _check_fitted(self) -> None:
        if not hasattr(self, "loadings_"):
            raise NotFittedError("this ErrorCopula is not fitted yet: call fit first")

    def _given(self) -> tuple[Floats, Floats]:
        """Return quadrature weights (Q,) and P(model errs | class, node), (K, Q, M)."""
        self._check_fitted()
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        weights = weights / weights.sum()
        points = nodes[:, None]
        if self.factors == 2:
            points = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
            weights = np.outer(weights, weights).ravel()
        keep = weights > NOTHING
        return weights[keep] / weights[keep].sum(), self._errs(points[keep])

    def _errs(self, points: Floats) -> Floats:
        """Return P(model errs | class, factors), (K, Q, M), at points (Q, F)."""
        own = np.sqrt(1 - (self.loadings_**2).sum(1))
        return ndtr((self._threshold[:, None] - points @ self.loadings_.T) / own)

    # ------------------------------------------------------------------------------------------------------- floors

    def floor(self) -> float:
        """Return the error of the best possible rule on the answers of these models, if the copula is right.

        The posterior of the label given all answers, mixed over the factors by quadrature, is taken for every pattern
        of errors (two classes, up to 20 models) or for 20 000 drawn answers: that is an estimate by Monte Carlo, with a
        standard error below .002, always from the same random numbers.
        """
        weights, p = self._given()
        if self._confusion is None or self._confusion.certain:
            p = np.repeat(p, 2, axis=0) if len(p) == 1 else p
            prior = np.array([0.5, 0.5]) if len(self.prior_) == 1 else self.prior_
            if p.shape[2] <= ENUMERATED:
                return _enumerated_floor(weights, p, prior)
            other = 1 - np.eye(2)
            return _drawn_floor(weights, p, prior, Confusion(np.tile(other, (p.shape[2], 1, 1)), other, 0.0))
        return _drawn_floor(weights, p, self.prior_, self._confusion)

    def floor_interval(self, level: float = 0.95) -> stats.Interval:
        """Return the interval of :meth:`floor` over items, by leaving out each of ten groups of them (jackknife)."""
        self._check_fitted()
        n = len(self._errors)
        group = generator(0, "groups").permutation(n) % min(GROUPS, n // 2)
        whole, count = self.floor(), int(group.max()) + 1
        without = np.array([self._refitted(group != g).floor() for g in range(count)])
        return stats.mean_interval(count * whole - (count - 1) * without, level=level)

    def _refitted(self, rows: np.ndarray) -> ErrorCopula:
        copula = ErrorCopula()
        copula.factors, copula.classes_, copula._confusion = self.factors, self.classes_, self._confusion
        copula._fit(self._errors[rows], self._stratum[rows])
        return copula

    def majority_error(self, models: float | None = None) -> float:
        """Return the error of the plain majority, ties decided by a coin.

        Parameters
        ----------
        models
            How many models like these, each drawn from the fitted ones; ``math.inf`` = what no number of them gets
            below; ``None`` = these models themselves. Of more than two classes, or where answers are missing, these
            models only: their error is drawn, as wrong answers split.
        """
        weights, p = self._given()
        if self._confusion is not None and not self._confusion.certain:
            if models is not None:
                raise InputError(f"models={models}: of more than two classes only the fitted models' majority is known")
            return _drawn_majority(weights, p, self.prior_, self._confusion)
        if models is None:
            counts = _error_counts(p)  # (K, Q, M + 1)
            number = np.arange(counts.shape[2])
            wrong = (2 * number > number[-1]) + 0.5 * (2 * number == number[-1])
            return float(self.prior_ @ (counts @ wrong) @ weights)
        # The majority of many turns sharply where p(U) passes 1/2: an even spread of points, not a few nodes.
        even = (np.arange(LATTICE) + 0.5) / LATTICE
        points = ndtri(np.stack([even, (0.5 + np.arange(LATTICE) * (math.sqrt(5) - 1) / 2) % 1], 1))
        mean = self._errs(points[:, : self.factors]).mean(2)  # (K, Q): a model drawn at random
        return float(self.prior_ @ ((mean > 0.5) if models == math.inf else _majority_errs(mean, models)).mean(1))

    @property
    def equivalent_(self) -> tuple[float, float]:
        """Error and correlation of equal models whose probit of p(U) has the mean and variance of these models'."""
        weights, p = self._given()
        probit = ndtri(np.clip(self.prior_ @ p.mean(2), 1e-12, 1 - 1e-12))
        mean = float(weights @ probit)
        variance = float(weights @ (probit - mean) ** 2)
        return float(ndtr(mean / math.sqrt(1 + variance))), variance / (1 + variance)

    def information_limit(self) -> float:
        """Return the bits that ever more models like these tell about a balanced label of two classes.

        Closed form for equal models, with the error and correlation of ``equivalent_``.
        """
        error, correlation = self.equivalent_
        return equicorrelated_information(min(error, 1 - error), correlation)

    # ------------------------------------------------------------------------------------------------- sample and fit

    def sample(self, n: int, *, seed: int = 0) -> np.ndarray:
        """Return errors of these models on ``n`` new items, (n, M) bool."""
        self._check_fitted()
        n, rng = checked_count(n, "n"), generator(seed, "copula")
        stratum = rng.choice(len(self.prior_), size=n, p=self.prior_)
        common = rng.standard_normal((n, self.factors)) @ self.loadings_.T
        own = np.sqrt(1 - (self.loadings_**2).sum(1)) * rng.standard_normal(common.shape)
        return common + own < self._threshold[stratum]

    def goodness_of_fit(self) -> Fit:
        """Compare how many models err at once with what the copula expects (chi-square).

        Two degrees of freedom are taken for the mean and the spread of that number, which the fit has seen.
        """
        weights, p = self._given()
        n, models = self._errors.shape
        observed = np.bincount(self._errors.sum(1).astype(int), minlength=models + 1).astype(float)
        expected = n * np.einsum("k,q,kqm->m", self.prior_, weights, _error_counts(p))
        cells = _pooled(expected)
        o, e = (np.add.reduceat(side, cells) for side in (observed, expected))
        statistic = float(((o - e) ** 2 / e).sum())
        df = max(1, len(cells) - 3)
        return Fit(statistic, df, float(chdtrc(df, statistic)), observed, expected)


def _pooled(expected: Floats, least: float = 5.0) -> list[int]:
    """Return where cells begin that hold ``least`` expected items each."""
    cells, held = [0], 0.0
    for position, items in enumerate(expected):
        if held >= least and expected[position:].sum() >= least:
            cells.append(position)
            held = 0.0
        held += items
    return cells


def _error_counts(p: Floats) -> Floats:
    """Return the distribution (K, Q, M + 1) of the number of errors, independent with probabilities p (K, Q, M)."""
    counts = np.zeros((*p.shape[:2], p.shape[2] + 1))
    counts[:, :, 0] = 1.0
    for j in range(p.shape[2]):
        q = p[:, :, j, None]
        counts[:, :, 1:] = counts[:, :, 1:] * (1 - q) + counts[:, :, :-1] * q
        counts[:, :, 0] *= 1 - q[:, :, 0]
    return counts


def _enumerated_floor(weights: Floats, p: Floats, prior: Floats) -> float:
    """Return the sum over votes of the lesser joint probability of votes and class, of two classes."""
    first, second = (prior[k] * _chances(weights, p[k]) for k in range(2))
    return float(np.minimum(first, second[::-1]).sum())  # the same votes are the opposite errors


def _drawn_floor(weights: Floats, p: Floats, prior: Floats, confusion: Confusion) -> float:
    """Return the mean of 1 - the largest posterior over drawn answers."""
    answers, _ = _draw(weights, p, prior, confusion)
    posterior = np.empty((len(answers), len(prior)))
    for k in range(len(prior)):
        chance = _chances(weights, p[k], answers != k)
        posterior[:, k] = np.log(prior[k] * np.maximum(chance, TINY)) + confusion.log_likelihood(k, answers)
    return float(1 - softmax(posterior, axis=1)[0].max(1).mean())


def _chances(weights: Floats, p: Floats, errs: np.ndarray | None = None) -> Floats:
    """Return the probability of patterns of errors ``errs`` (D, M), or of all 2^M, mixed over nodes, p being (Q, M).

    Of all patterns bit j of the index is model j's. They split into those of either half of the models, (Q, 2^(M/2)),
    of which one matrix product makes the mixture.
    """
    models = p.shape[1]
    if models <= ENUMERATED:
        low, high = _products(p[:, : models // 2]), _products(p[:, models // 2 :])
        table = ((high * weights[:, None]).T @ low).ravel()  # (2^M,)
        return table if errs is None else table[errs @ (1 << np.arange(models))]
    assert errs is not None
    odds, right = np.log(np.maximum(p, TINY) / np.maximum(1 - p, TINY)), np.log(np.maximum(1 - p, TINY)).sum(1)
    chances = np.empty(len(errs))
    for i in range(0, len(errs), 1000):
        chances[i : i + 1000] = np.exp(errs[i : i + 1000] @ odds.T + right) @ weights
    return chances


def _products(p: Floats) -> Floats:
    """Return the probability of each pattern of independent errors, (Q, 2^m), of p (Q, m)."""
    table = np.ones((len(p), 1))
    for chance in p.T[:, :, None]:
        table = np.concatenate([table * (1 - chance), table * chance], axis=1)
    return table


def _drawn_majority(weights: Floats, p: Floats, prior: Floats, confusion: Confusion) -> float:
    """Return the share of drawn answers whose majority errs, ties decided by a coin."""
    answers, y = _draw(weights, p, prior, confusion)
    votes = np.stack([(answers == k).sum(1) for k in range(len(prior))], axis=1)  # (D, C)
    best = votes == votes.max(1, keepdims=True)
    return float(1 - (best[np.arange(len(y)), y] / best.sum(1)).mean())


def _draw(weights: Floats, p: Floats, prior: Floats, confusion: Confusion) -> tuple[Ints, Ints]:
    """Return drawn answers (D, M) and their classes (D,), the same random numbers every time."""
    rng = generator(0, "answers")
    y = rng.choice(len(prior), size=DRAWS, p=prior)
    node = rng.choice(len(weights), size=DRAWS, p=weights)
    errs = rng.random((DRAWS, p.shape[2])) < p[y, node]
    return np.where(errs, confusion.draw(rng, y), y[:, None]), y


# ----------------------------------------------------------------------------------------------- tetrachoric and minres


def _tetrachoric(errors: Floats, inside: Floats) -> tuple[Floats, list[tuple[int, int]]]:
    """Return correlations (M, M) of largest likelihood, over the strata together, and the pairs with an empty cell."""
    models = errors.shape[1]
    first, second = np.triu_indices(models, 1)
    both = np.einsum("nk,ni,nj->kij", inside, errors, errors)[:, first, second]  # (K, pairs)
    size, counts = inside.sum(0)[:, None], inside.T @ errors
    cells = np.stack([both, counts[:, first] - both, counts[:, second] - both])  # errs both, first, second
    cells = np.concatenate([cells, (size - cells.sum(0))[None]])  # (4, K, pairs)
    empty = (cells.sum(1) == 0).any(0)  # (pairs,)
    constant = [(side == 0) | (side == size) for side in (cells[0] + cells[1], cells[0] + cells[2])]
    cells = cells + 0.5 * (empty | constant[0] | constant[1])  # (4, K, pairs)
    total = cells.sum(0)
    h, k = ndtri((cells[0] + cells[1]) / total), ndtri((cells[0] + cells[2]) / total)
    low, high = np.full(len(first), -CLOSEST), np.full(len(first), CLOSEST)
    rule = np.polynomial.legendre.leggauss(48)
    for _ in range(30):  # the slope of the likelihood falls with the correlation: halve where it changes sign
        r = (low + high) / 2
        p = _both_below(h, k, r, rule)
        p11 = np.clip(p, 1e-12, 1)
        p10, p01 = np.clip(ndtr(h) - p, 1e-12, 1), np.clip(ndtr(k) - p, 1e-12, 1)
        p00 = np.clip(1 - ndtr(h) - ndtr(k) + p, 1e-12, 1)
        slope = (cells[0] / p11 - cells[1] / p10 - cells[2] / p01 + cells[3] / p00) * _density(h, k, r)
        up = slope.sum(0) > 0
        low, high = np.where(up, r, low), np.where(up, high, r)
    correlation = np.eye(models)
    correlation[first, second] = correlation[second, first] = (low + high) / 2
    return correlation, [(int(i), int(j)) for i, j in zip(first[empty], second[empty], strict=True)]


def _both_below(h: Floats, k: Floats, r: Floats, rule: tuple[Floats, Floats]) -> Floats:
    """Return P(Z1 < h, Z2 < k) of correlation r: Phi(h) Phi(k) + the integral of the density over correlations."""
    nodes, weights = rule
    end = np.arcsin(r)
    angle = end[..., None] * (nodes + 1) / 2
    sine, cosine = np.sin(angle), np.cos(angle)
    exponent = -(h[..., None] ** 2 + k[..., None] ** 2 - 2 * h[..., None] * k[..., None] * sine) / (2 * cosine**2)
    return ndtr(h) * ndtr(k) + end / 2 * (np.exp(exponent) @ weights) / (2 * math.pi)


def _density(h: Floats, k: Floats, r: Floats) -> Floats:
    square = 1 - r**2
    return np.exp(-(h**2 + k**2 - 2 * r * h * k) / (2 * square)) / (2 * math.pi * np.sqrt(square))


def _minres(correlation: Floats, factors: int) -> Floats:
    """Return loadings (M, F), rows of norm below 1, with the least squares of R - L L' off the diagonal."""
    from scipy.optimize import minimize

    models = len(correlation)
    off = ~np.eye(models, dtype=bool)
    values, vectors = np.linalg.eigh(correlation)
    begin = vectors[:, -factors:] * np.sqrt(np.maximum(values[-factors:], 0.01))
    begin = begin / np.maximum(1.0, np.linalg.norm(begin, axis=1, keepdims=True) / 0.95)

    def loss(flat: Floats) -> tuple[float, Floats]:
        v = flat.reshape(models, factors)
        scale = np.sqrt(1 + (v**2).sum(1, keepdims=True))
        load = v / scale  # a row's norm is below 1 whatever v
        residual = np.where(off, load @ load.T - correlation, 0.0)
        slope = 2 * residual @ load
        return float((residual**2).sum() / 2), ((slope - load * (slope * load).sum(1, keepdims=True)) / scale).ravel()

    start = begin / np.sqrt(1 - (begin**2).sum(1, keepdims=True))
    found = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", bounds=[(-20, 20)] * start.size)
    v = found.x.reshape(models, factors)
    load = v / np.sqrt(1 + (v**2).sum(1, keepdims=True))
    return load * np.where(load.sum(0) < 0, -1.0, 1.0)
