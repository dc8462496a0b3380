"""Scores of an encoder without labels: RankMe, and the family that Subspace-Corrected Ranking puts in its place.

A score that depends on singular values alone cannot tell Z from O Z Q with orthogonal O and Q: it does not see *which*
items an encoder tells apart, and where noise fills the spectrum it measures the width of the last layer. The
corrections here break the invariance on the side of the items by aligning with one fixed reference encoder R, of which
they use the leading left singular vectors P (n, k):

    SSR         the share of the candidate's energy inside span(P)
    SSR-z       the same in standard deviations from its mean under a random rotation of the items
    SSR-dagger  how much of P can be read linearly from the candidate, on items left out: a linear probe whose labels
                are the reference's leading components

All scores of an encoder share one Gram matrix on its shorter side (:class:`Features`); higher is better for all.

Source: Subspace-Corrected Ranking (NeurIPS 2026). The paper names SSR and SSR-dagger; the formulas are a
reconstruction from its abstract.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from numbers import Real
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from fairtrial.errors import InputError

Array = np.ndarray
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
ROUNDING = 1e-12  # what is smaller than this share of the largest is a rounding error


class EncoderScore(Protocol):
    """What ranks encoders: a number from the features of n items, higher for better encoders."""

    def __call__(self, features: Features | ArrayLike, reference: Features | ArrayLike | None) -> float:
        """Score ``features`` (n, d), where it needs one with the help of a reference encoder's (n, r)."""
        ...


class Features:
    """The features of n items by one encoder, checked, and decomposed once for all scores.

    Every score takes an array or this; give this where several scores are wanted.

    Parameters
    ----------
    values : (n, d) numbers, one row an item
    name : what error messages call them

    Raises
    ------
    InputError
        Not real numbers, not two-dimensional, fewer than four items, not finite (naming the row), or the same for all
        items.

    Examples
    --------
    >>> one = Features(np.random.default_rng(0).normal(size=(100, 8)))
    >>> one.items, one.width, round(rankme(one)), ssr_dagger(one, one, rank=8) > 0.99
    (100, 8, 8, True)
    """

    def __init__(self, values: ArrayLike, name: str = "features") -> None:
        z = numbers(values, name).astype(np.float64, copy=False)
        if z.ndim != 2 or z.shape[0] < 4 or z.shape[1] < 1:
            raise InputError(f"{name}: give an array (items, features) of four items or more, got shape {z.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            finite = bool(np.isfinite(z.sum()))
        if not finite:
            bad = np.flatnonzero(~np.isfinite(z).all(axis=1))
            if len(bad):
                raise InputError(f"{name}: row {bad[0]} is not finite ({len(bad)} such rows): drop or repair the item")
        self.name = name
        self.items, self.width = z.shape
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            self.mean = z.mean(axis=0)  # (d,)
            self.centred = z - self.mean  # (n, d)
            self.deviation = np.sqrt(np.einsum("nd,nd->d", self.centred, self.centred) / self.items)  # (d,)
        if not np.isfinite(self.deviation).all():
            raise InputError(f"{name}: numbers this large overflow when they are squared: scale the features down")
        self.varies = self.deviation > ROUNDING * (np.abs(self.mean) + self.deviation.max())  # (d,)
        if not self.varies.any():
            raise InputError(f"{name}: the features are the same for every item: nothing can be ranked by them")

    @classmethod
    def of(cls, values: Features | ArrayLike, name: str = "features") -> Features:
        """Return ``values`` prepared, unless they are already."""
        return values if isinstance(values, Features) else cls(values, name)

    @property
    def narrow(self) -> bool:
        """Whether the shorter side is that of the features: Gram matrices are (d, d), otherwise (n, n)."""
        return self.width <= self.items

    @cached_property
    def gram(self) -> Array:
        """Zc^T Zc (d, d) or Zc Zc^T (n, n) of the centred features, whichever is smaller."""
        return self.centred.T @ self.centred if self.narrow else self.centred @ self.centred.T

    @cached_property
    def item_gram(self) -> Array:
        """Zc Zc^T (n, n), whichever side is shorter."""
        return self.centred @ self.centred.T if self.narrow else self.gram

    @cached_property
    def uncentred_gram(self) -> Array:
        """The same of the features as they came; adding the mean back loses no digits, subtracting it would."""
        if self.narrow:
            return self.gram + self.items * np.outer(self.mean, self.mean)
        along = self.centred @ self.mean  # (n,)
        return self.gram + along[:, None] + along + self.mean @ self.mean

    @cached_property
    def energy(self) -> float:
        """Squared norm of the centred features: the sum of their squared singular values."""
        return float(np.trace(self.gram))

    @cached_property
    def lengths(self) -> Array:
        """Squared norm of each centred item, (n,)."""
        return np.einsum("nd,nd->n", self.centred, self.centred)

    @cached_property
    def singular_values(self) -> Array:
        """Singular values of the uncentred features, (min(n, d),); what rounding would invent is 0."""
        squares = np.linalg.eigvalsh(self.uncentred_gram)
        return np.sqrt(np.where(squares > ROUNDING * squares[-1], squares, 0.0))

    @cached_property
    def components(self) -> tuple[Array, Array]:
        """Left singular vectors U (n, q) and singular values (q,) of the centred features, largest first."""
        squares, vectors = np.linalg.eigh(self.gram)
        kept = np.flatnonzero(squares > 1e-10 * squares[-1])[::-1]
        values, vectors = np.sqrt(squares[kept]), vectors[:, kept]
        return (self.centred @ vectors / values if self.narrow else vectors), values

    @cached_property
    def standardised(self) -> tuple[Array, Array]:
        """Principal axes of A, the centred features by unit variance over sqrt(d): A V (n, q), squares (q,)."""
        scaled = self.centred[:, self.varies] / (self.deviation[self.varies] * np.sqrt(self.varies.sum()))  # A (n, d)
        if scaled.shape[1] > self.items:
            return _axes(scaled @ scaled.T)
        squares, vectors = np.linalg.eigh(scaled.T @ scaled)
        return scaled @ vectors, np.maximum(squares, 0.0)

    @cached_property
    def scaled_as_one(self) -> tuple[Array, Array]:
        """The same with the total variance instead of each column's: unchanged by rotations of the features."""
        if not self.narrow:
            return _axes(self.gram * (self.items / self.energy))
        squares, vectors = np.linalg.eigh(self.gram * (self.items / self.energy))
        return self.centred @ vectors * np.sqrt(self.items / self.energy), np.maximum(squares, 0.0)

    def leading(self, rank: int | float) -> tuple[Array, Array]:
        """Return the leading left singular vectors P (n, k) and their weights (k,), in proportion to singular values.

        ``rank`` is a number of components, or the share of variance that they reach; at most an eighth of the items,
        and no more than there are.
        """
        if isinstance(rank, bool) or not isinstance(rank, Real) or not 0 < rank < np.inf or (rank > 1 and rank % 1):
            raise InputError(f"rank={rank!r}: give a number of components, or a share of variance between 0 and 1")
        vectors, values = self.components
        if rank < 1:
            share = np.cumsum(values**2) / self.energy
            rank = int(np.searchsorted(share, rank)) + 1
        elif self.items < 4 * rank:
            raise InputError(
                f"{self.items} items are too few for {rank} components of {self.name}: give {4 * rank} items or more, "
                f"or rank={max(1, self.items // 8)}"
            )
        k = min(int(rank), max(1, self.items // 8), len(values))
        return vectors[:, :k], values[:k] / values[:k].sum()


def numbers(values: ArrayLike, name: str) -> Array:
    """Return values as an array of real numbers.

    Raises
    ------
    InputError
        Text, complex numbers, objects, or rows of different lengths.
    """
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged; or a tensor that records gradients
        raise InputError(f"{name} cannot be read as an array: {str(error).splitlines()[0]}") from None
    if found.dtype.kind not in "biuf":
        raise InputError(f"{name} holds {found.dtype}: give real numbers (items, features)")
    return found


def _axes(gram: Array) -> tuple[Array, Array]:
    """Return U diag(s) (n, q) and s^2 (q,) of a Gram matrix U diag(s^2) U^T of items."""
    squares, vectors = np.linalg.eigh(gram)
    squares = np.maximum(squares, 0.0)
    return vectors * np.sqrt(squares), squares


def _pair(features: Features | ArrayLike, reference: Features | ArrayLike | None) -> tuple[Features, Features]:
    if reference is None:
        raise InputError("this score needs a reference: give the features of one encoder for the same items")
    z, r = Features.of(features), Features.of(reference, "reference")
    if z.items != r.items:
        raise InputError(
            f"{z.name} has {z.items} items and {r.name} has {r.items}: features must be of the same items, in one order"
        )
    return z, r


def _spectral_entropy(singular_values: Array) -> float:
    p = singular_values / singular_values.sum() + 1e-7
    return float(np.exp(-(p * np.log(p)).sum()))


def rankme(features: Features | ArrayLike, reference: object = None) -> float:
    """Effective rank of the features: exp of the entropy of their normalised singular values, in [1, min(n, d)].

    p_i = s_i / sum(s) + 1e-7 over the singular values s of the uncentred features; exp(-sum p_i log p_i) (Garrido et
    al. 2023, RankMe). **Compare encoders of one architecture with it and no others**: it was validated inside one
    family. Across families it follows the width, since a noisy spectrum is the wider the more features there are.

    Parameters
    ----------
    features : (n, d)
    reference : ignored, so that it is an :class:`EncoderScore`

    Examples
    --------
    >>> noise = np.random.default_rng(0).normal(size=(700, 2048))
    >>> [round(rankme(noise[:, :d])) for d in (32, 128, 512, 2048)]  # nothing but noise, and ever better
    [32, 125, 450, 667]
    """
    return _spectral_entropy(Features.of(features).singular_values)


def ssr(features: Features | ArrayLike, reference: Features | ArrayLike | None, rank: int | float = 32) -> float:
    """Share of the candidate's energy in the reference's leading subspace, |P^T Zc|^2 / |Zc|^2, in [0, 1].

    A diagnostic and no ranking: it favours tiny encoders, whose few directions are all leading ones. Use
    :func:`ssr_dagger` or :func:`ssr_z`.

    Parameters
    ----------
    features, reference : (n, d) and (n, r), of the same items in one order; both are centred
    rank : components of the reference, or the share of variance they reach; at most n / 8

    Raises
    ------
    InputError
        Different items, fewer than four items a component, or no reference.

    Examples
    --------
    >>> z = np.random.default_rng(0).normal(size=(400, 20))
    >>> round(ssr(z, z, rank=20), 6)
    1.0
    """
    z, r = _pair(features, reference)
    vectors, _ = r.leading(rank)
    return float(((vectors.T @ z.centred) ** 2).sum() / z.energy)


def ssr_z(features: Features | ArrayLike, reference: Features | ArrayLike | None, rank: int | float = 32) -> float:
    """SSR in standard deviations above its mean for randomly rotated items: no width, no breadth is free.

    Under a Haar rotation of the n1 = n - 1 centred dimensions SSR has mean k / n1 and variance
    2 (sum w_i^2 - 1 / n1) (k - k^2 / n1) / ((n1 - 1) (n1 + 2)), with w_i = s_i^2 / sum s^2 of the candidate. Many
    aligned directions shrink that variance: breadth is rewarded.

    Parameters
    ----------
    features, reference, rank : as in :func:`ssr`

    Raises
    ------
    InputError
        As :func:`ssr`.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z, noise = rng.normal(size=(400, 20)), rng.normal(size=(400, 50))
    >>> ssr_z(z, z) > 20 and abs(ssr_z(noise, z)) < 4
    True
    """
    z, r = _pair(features, reference)
    n1, k = z.items - 1, r.leading(rank)[0].shape[1]
    concentration = np.vdot(z.gram, z.gram) / z.energy**2  # sum of w_i^2
    variance = 2 * (concentration - 1 / n1) * (k - k**2 / n1) / ((n1 - 1) * (n1 + 2))
    excess = ssr(z, r, rank) - k / n1
    return float(excess / np.sqrt(variance)) if variance > 0 else 0.0


def ssr_dagger(
    features: Features | ArrayLike,
    reference: Features | ArrayLike | None,
    rank: int | float = 32,
    penalties: Sequence[float] = PENALTIES,
    *,
    standardize: bool = True,
) -> float:
    """How much of the reference's leading subspace can be read linearly from the candidate, on items left out.

    With A = U diag(s) V^T the candidate by unit column variance over sqrt(d), ridge regression of P on A has the hat
    matrix H = U diag(s^2 / (s^2 + l)) U^T + 1 1^T / n and exact leave-one-out errors e = (P - H P) / (1 - diag H). The
    score is the largest over the penalties l of sum_j w_j (1 - |e_j|^2), w_j the reference's singular values over their
    sum. At most 1; at most 0 in expectation, whatever d, for a candidate that knows nothing of the reference. A
    candidate that holds more than the reference is not punished for it.

    It predicts which encoder a *linear probe* would rank first, not what fine-tuning would gain.

    Parameters
    ----------
    features, reference, rank : as in :func:`ssr`
    penalties : positive ridge strengths l, in units where the mean variance of a column is 1 / d
    standardize : divide each column by its own deviation; False divides all by the total, which makes the score
        invariant to rotations of the features instead of to scales of columns

    Raises
    ------
    InputError
        As :func:`ssr`; penalties that are not positive.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(400, 20))
    >>> wider = np.hstack([z, rng.normal(size=(400, 20))])  # all of it, and as much noise
    >>> ssr_dagger(z, z) > 0.99, ssr_dagger(wider, z) > 0.95, ssr_dagger(rng.normal(size=(400, 500)), z) < 0.01
    (True, True, True)
    """
    _, errors = leave_one_out(features, reference, rank, penalties, standardize=standardize)
    return float(1 - errors.sum())


def leave_one_out(
    features: Features | ArrayLike,
    reference: Features | ArrayLike | None,
    rank: int | float = 32,
    penalties: Sequence[float] = PENALTIES,
    *,
    standardize: bool = True,
) -> tuple[Array, Array]:
    """Return what there is of each item to read and what is missed: sum_j w_j P_ij^2 and sum_j w_j e_ij^2, (n,) each.

    SSR-dagger is 1 - missed / there, each summed over the items; the first sums to 1. The penalty is the best one. See
    :func:`ssr_dagger` for the arguments.

    Examples
    --------
    >>> z = np.random.default_rng(0).normal(size=(400, 20))
    >>> there, missed = leave_one_out(z, z)
    >>> round(float(there.sum()), 9), bool(np.isclose(1 - missed.sum(), ssr_dagger(z, z)))
    (1.0, True)
    """
    z, r = _pair(features, reference)
    if not len(penalties) or not all(penalty > 0 for penalty in penalties):
        raise InputError(f"penalties={tuple(penalties)}: give one or more positive numbers")
    targets, weights = r.leading(rank)  # P (n, k), (k,)
    axes, squares = z.standardised if standardize else z.scaled_as_one  # A V (n, q), s^2 (q,)
    coordinates = axes.T @ targets  # (q, k)
    leverages = axes**2  # (n, q)
    missed = []
    for penalty in penalties:
        shrink = 1 / (squares + penalty)  # (q,)
        errors = targets - axes @ (shrink[:, None] * coordinates)  # (n, k); P is centred, so its mean is fitted
        errors /= (1 - 1 / z.items - leverages @ shrink)[:, None]
        missed.append(errors**2 @ weights)
    return targets**2 @ weights, min(missed, key=np.sum)


def cka(features: Features | ArrayLike, reference: Features | ArrayLike | None) -> float:
    """Linear centred kernel alignment with the reference, debiased, in [-1, 1].

    HSIC_1(K, L) / sqrt(HSIC_1(K, K) HSIC_1(L, L)), HSIC_1 the unbiased estimate over pairs of different items (Song et
    al. 2012), K = Z Z^T and L = R R^T.

    Parameters
    ----------
    features, reference : (n, d) and (n, r)

    Raises
    ------
    InputError
        Different items, or no reference.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(300, 10))
    >>> round(cka(z, z), 6), abs(cka(rng.normal(size=(300, 1000)), z)) < 0.05  # the plain form gives .5 here
    (1.0, True)
    """
    z, r = _pair(features, reference)
    return float(_hsic(z, r) / np.sqrt(_hsic(z, z) * _hsic(r, r)))


def _hsic(a: Features, b: Features) -> float:
    """Return n (n - 3) HSIC_1 of two linear kernels; centring lets every sum over K be read off its diagonal."""
    n = a.items
    if a is b:
        shared = np.vdot(a.gram, a.gram)  # tr K L
    elif a.narrow and b.narrow:
        shared = ((a.centred.T @ b.centred) ** 2).sum()
    else:
        shared = np.vdot(a.item_gram, b.item_gram)
    diagonals = a.lengths @ b.lengths
    return float(shared - diagonals * n / (n - 2) + a.energy * b.energy / ((n - 1) * (n - 2)))


def projected_rankme(
    features: Features | ArrayLike, reference: Features | ArrayLike | None, rank: int | float = 32
) -> float:
    """RankMe of the candidate projected on the reference's leading subspace, P^T Zc.

    Here for the record: the obvious correction, and it fails. Width still decides inside the subspace.

    Parameters
    ----------
    features, reference, rank : as in :func:`ssr`

    Examples
    --------
    >>> z = np.random.default_rng(0).normal(size=(400, 20))
    >>> 1 <= projected_rankme(z, z, rank=10) <= 10
    True
    """
    z, r = _pair(features, reference)
    vectors, _ = r.leading(rank)
    return _spectral_entropy(np.linalg.svd(vectors.T @ z.centred, compute_uv=False))


SCORES: dict[str, EncoderScore] = {
    "ssr_dagger": ssr_dagger,
    "ssr_z": ssr_z,
    "cka": cka,
    "rankme": rankme,
    "ssr": ssr,
    "projected_rankme": projected_rankme,
}
"""The scores by name."""
