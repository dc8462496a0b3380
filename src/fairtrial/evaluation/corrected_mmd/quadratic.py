"""The estimate as a quadratic form of the audit, from inner products of kernel features alone.

|mu|^2 - 2 <mu, other> is computed without bias for one noisy sample and any other embedding; the clean sample's own
term does not depend on the audit and is added by the caller. Where a proxy or a strength was fitted on audited rows,
these are *known*: the base of the estimate holds their truths, and only the other audited rows correct it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairtrial.evaluation.corrected_mmd.designs import VarianceParts, jackknife_parts, unbiased_parts
from fairtrial.evaluation.corrected_mmd.kernels import Kernel, kernel_for, kernel_sums, own_sums
from fairtrial.evaluation.corrected_mmd.samples import Fold, Sample, SignedSample, Strength


def uniform(points: Tensor) -> SignedSample:
    """Return the points with equal weights that sum to 1."""
    return SignedSample(points, torch.full((len(points),), 1 / len(points), dtype=points.dtype, device=points.device))


class Within(NamedTuple):
    """Inner products of a sample with itself: of audited rows (m, m), (m,), and means over the N proxied rows, ()."""

    xx: Tensor  # (m, m) <phi(x_i), phi(x_j)>
    xz: Tensor  # (m, m) <phi(x_i), phi(z_j)>
    zz: Tensor  # (m, m)
    x_noisy: Tensor  # (m,) <phi(x_i), mean_N phi(z)>
    z_noisy: Tensor  # (m,)
    noisy: Tensor  # () |mean_N phi(z)|^2
    diagonal: Tensor  # () mean_N k(z, z)

    def scaled(self, strength: float) -> Within:
        """Return the same with strength * phi(z) for phi(z)."""
        s, ss = strength, strength**2
        return Within(
            self.xx, s * self.xz, ss * self.zz, s * self.x_noisy, ss * self.z_noisy, ss * self.noisy, ss * self.diagonal
        )

    def of(self, truths: Tensor, rows: Tensor) -> Within:
        """Return the products of an audit that found the truths of ``truths`` (m,) for ``rows`` (m,), both indices."""
        return Within(
            self.xx[truths][:, truths], self.xz[truths][:, rows], self.zz[rows][:, rows], self.x_noisy[truths],
            self.z_noisy[rows], self.noisy, self.diagonal,
        )  # fmt: skip

    def mean(self, n: int, unbiased: bool) -> Tensor:
        """Return the mean of k(z, z) over all pairs of the n rows, or those of different rows."""
        return (n * self.noisy - self.diagonal) / (n - 1) if unbiased else self.noisy


class Toward(NamedTuple):
    """Inner products with the other sample's embedding: of audited rows (m,), and the mean over the N rows ()."""

    x: Tensor
    z: Tensor
    noisy: Tensor

    def scaled(self, strength: float) -> Toward:
        """Return the same with strength * phi(z) for phi(z)."""
        return Toward(self.x, strength * self.z, strength * self.noisy)

    def of(self, truths: Tensor, rows: Tensor) -> Toward:
        """Return the products of an audit, as :meth:`Within.of`."""
        return Toward(self.x[truths], self.z[rows], self.noisy)


class QuadraticForm(NamedTuple):
    """T = constant + sum_A c_i / (n pi_i) + sum_{i != j in A} G_ij / (n (n - 1) pi_ij), over the n rows not known."""

    constant: Tensor
    linear: Tensor
    pairs: Tensor


def quadratic_form(b: Within, to: Toward, known: Tensor, n: int, embedding: bool, unbiased: bool) -> QuadraticForm:
    """Return |mu|^2 - 2 <mu, other> as a function of the audit, of all m rows, those in ``known`` (m,) being exact.

    The base B = (sum_known phi(x) + sum_rest phi(z)) / N is corrected by d = phi(x) - phi(z) of the rest. The pairwise
    estimator corrects a pair of rows that are both not known as a whole, and so has only the known part of B in c.
    """
    x_known, z_known = b.xx @ known, b.xz.T @ known  # N times the inner product with the known part of B
    x_rest, z_rest = n * b.x_noisy - b.xz @ known, n * b.z_noisy - b.zz @ known
    squared = known @ (x_known + 2 * x_rest) + n**2 * b.noisy - known @ (n * b.z_noisy + z_rest)  # N^2 |B|^2
    cross = known @ (to.x - to.z) + n * to.noisy
    diagonal = known @ (b.xx - b.zz).diagonal() + n * b.diagonal
    if embedding:
        pairs, on_base = b.xx - b.xz - b.xz.T + b.zz, x_known + x_rest - z_known - z_rest
    else:
        pairs, on_base = b.xx - b.zz, x_known - z_known
    within = 2 * on_base + pairs.diagonal()  # what a row adds to the sum of k over all N^2 pairs
    norm = n**2
    if unbiased:
        squared, within, norm = squared - diagonal, within - (b.xx - b.zz).diagonal(), n * (n - 1)
    rest = n - float(known.sum())
    return QuadraticForm(
        squared / norm - 2 * cross / n,
        rest / n * (n / norm * within - 2 * (to.x - to.z)),
        rest * (rest - 1) / norm * pairs,
    )


class Side:
    """One noisy sample under a kernel, corrected against any other embedding."""

    def __init__(self, sample: Sample, kernel: Kernel, embedding: bool, unbiased: bool) -> None:
        self.sample, self.kernel, self.embedding, self.unbiased = sample, kernel, embedding, unbiased
        self._last: tuple[Tensor, Within] | None = None  # folds that share their proxy share its N x N values

    def within(self, proxied: Tensor) -> Within:
        """Return the inner products inside the sample for the proxied rows (N, d)."""
        if self._last is None or self._last[0] is not proxied:
            x, z, n = self.sample.truth, proxied[self.sample.audited], len(proxied)
            sums, diagonal = own_sums(self.kernel, proxied)
            x_noisy = kernel_sums(self.kernel, x, proxied, uniform(proxied).weights)
            values = self.kernel(x, x), self.kernel(x, z), self.kernel(z, z), x_noisy, sums[self.sample.audited] / n
            self._last = proxied, Within(*values, sums.sum() / n**2, diagonal.mean())
        return self._last[1]

    def toward(self, proxied: Tensor, other: SignedSample) -> Toward:
        """Return the inner products with another embedding."""
        x, z = (kernel_sums(self.kernel, rows, *other) for rows in (self.sample.truth, proxied))
        return Toward(x, z[self.sample.audited], z.mean())

    def towards(self, folds: list[Fold], other: SignedSample) -> list[Toward]:
        """Return each fold's inner products with another embedding, computed once where folds share their proxy."""
        made: list[Toward] = []
        for i, fold in enumerate(folds):
            shared = i > 0 and fold.proxied is folds[i - 1].proxied
            made.append(made[-1] if shared else self.toward(fold.proxied, other))
        return made

    def form(self, fold: Fold, to: Toward) -> QuadraticForm:
        """Return a fold's estimate as a function of the audit."""
        within, to = self.within(fold.proxied).scaled(fold.strength), to.scaled(fold.strength)
        return quadratic_form(within, to, fold.known, len(self.sample.noisy), self.embedding, self.unbiased)

    def correct(self, folds: list[Fold], other: SignedSample) -> tuple[Tensor, float, float]:
        """Return |mu|^2 - 2 <mu, other> without bias, and the linear and pair part of its variance over audits."""
        values = []
        for fold, to in zip(folds, self.towards(folds, other), strict=True):
            form, rest = self.form(fold, to), fold.known == 0
            values.append(form.constant + fold.audit.total(form.linear[rest], form.pairs[rest][:, rest]))
        if len(folds) == 1:
            return values[0], *folds[0].audit.variance(form.linear, form.pairs)
        pooled = self._pooled(folds, other)
        parts = jackknife_parts(pooled.linear, pooled.pairs, len(self.sample.noisy))
        return torch.stack(values).mean(), *_fold_variance(parts, len(self.sample.audited), len(folds))

    def choose(self, folds: list[Fold], other: SignedSample, auto: bool) -> list[Fold]:
        """Set each fold's strength in [0, 1], where ``auto``, to the least variance over audits.

        The fold's known rows estimate that variance, a polynomial of degree 4 in the strength, at 5 points.
        """
        if not auto:
            return folds
        n, m = len(self.sample.noisy), len(self.sample.audited)
        at, grid = np.linspace(0, 1, 5), np.linspace(0, 1, 101)
        chosen = []
        other = SignedSample(other.points.detach(), other.weights)
        for fold, to in zip(folds, self.towards(folds, other), strict=True):
            known, variances = fold.known > 0, []
            for strength in at:
                form = self.form(fold._replace(strength=float(strength), known=torch.zeros_like(fold.known)), to)
                parts = unbiased_parts(form.linear[known], form.pairs[known][:, known], n)
                variances.append(sum(_fold_variance(parts, m, len(folds))))
            best = grid[np.polyval(np.polyfit(at, variances, 4), grid).argmin()]
            chosen.append(fold._replace(strength=float(best)))
        return chosen

    def _pooled(self, folds: list[Fold], other: SignedSample) -> QuadraticForm:
        """Return c and G of all audited rows, each with the proxy and strength of the fold that it corrects."""
        audited, truth = self.sample.audited, self.sample.truth
        own = torch.stack([fold.known for fold in folds]).argmin(0)  # (m,) the fold that does not know the row
        z = torch.stack([fold.proxied[audited] for fold in folds])[own, torch.arange(len(own), device=own.device)]
        s = torch.tensor([fold.strength for fold in folds], dtype=z.dtype, device=z.device)[own]
        noisy = _proxied_mean(folds)
        zero = torch.zeros((), dtype=z.dtype, device=z.device)
        b = Within(
            self.kernel(truth, truth),
            self.kernel(truth, z) * s,
            self.kernel(z, z) * s[:, None] * s,
            kernel_sums(self.kernel, truth, *noisy),
            kernel_sums(self.kernel, z, *noisy) * s,
            zero,
            zero,
        )
        to = Toward(kernel_sums(self.kernel, truth, *other), kernel_sums(self.kernel, z, *other) * s, zero)
        return quadratic_form(b, to, torch.zeros_like(s), len(self.sample.noisy), self.embedding, self.unbiased)


def _proxied_mean(folds: list[Fold]) -> SignedSample:
    """Return the mean over folds of strength * mean_N phi(g(z)), as a signed sample."""
    first = folds[0].proxied
    if all(fold.proxied is first for fold in folds):
        return SignedSample(first, uniform(first).weights * (sum(fold.strength for fold in folds) / len(folds)))
    weights = [uniform(first).weights * (fold.strength / len(folds)) for fold in folds]
    return SignedSample(torch.cat([fold.proxied for fold in folds]), torch.cat(weights))


def _fold_variance(parts: VarianceParts, m: int, folds: int) -> tuple[float, float]:
    """Return the parts of the variance of the mean over ``folds``.

    Unit effects add up to those of the whole audit, but only pairs inside a fold are corrected.
    """
    left, own = 1 - m / parts.population, m // folds  # a fold's population lacks the rows that are known
    return parts.at(m)[0], parts.at(own)[1] / folds * (left / (1 - own / parts.population)) ** 2


def choose_for_embedding(sample: Sample, folds: list[Fold], kernel: Kernel | None, strength: Strength) -> list[Fold]:
    """Set each fold's strength in [0, 1] to the least variance of the embedding, where it is ``"auto"``.

    The trace of the covariance of phi(x) - lambda phi(g(z)) is quadratic in lambda, least at cov / var of the features.
    """
    if strength != "auto":
        return folds
    kernel = kernel_for(kernel, sample.truth)
    chosen = []
    for fold in folds:
        known = fold.known > 0
        x, z = sample.truth[known], fold.proxied[sample.audited[known]]
        covariance, variance = (_centred_trace(kernel(a, z)) for a in (x, z))
        chosen.append(fold._replace(strength=min(1.0, max(0.0, covariance / variance)) if variance > 0 else 0.0))
    return chosen


def _centred_trace(products: Tensor) -> float:
    """Return the trace of the covariance of two features from their inner products (k, k)."""
    k = len(products)
    return float(products.trace() - products.sum() / k) / (k - 1)
