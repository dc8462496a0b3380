"""How the audit was drawn: inclusion probabilities, and the variance they give to a quadratic estimate.

Every estimate here has the Horvitz-Thompson form T = const + sum_A c_i / (N pi_i) + sum_{i != j in A} G_ij / (N (N - 1)
pi_ij). For a simple random audit its variance is known exactly, as a linear and a pair part (Hoeffding's decomposition
over the N units). Both can be estimated without bias from the audit, for planning; standard errors use the jackknife.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from fairtrial.errors import InputError


@dataclass(frozen=True)
class Stratified:
    """An audit drawn at random inside each stratum.

    Parameters
    ----------
    labels : the stratum of each of the N noisy rows, (N,), numbers or text. Every stratum needs two
        audited rows, or all of its rows.
    """

    labels: Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class Bernoulli:
    """An audit that took each row independently.

    Parameters
    ----------
    probabilities : the probability in (0, 1] of each of the N noisy rows, (N,).
    """

    probabilities: Sequence[float] | np.ndarray


Design: TypeAlias = Stratified | Bernoulli | None  # None: a simple random sample without replacement


@dataclass(frozen=True)
class Audit:
    """An audit of m of ``population`` units: ``first`` (m,) and ``joint`` (m, m) inclusion probabilities.

    ``strata`` (m,) numbers the strata of a stratified audit; ``independent`` marks a Bernoulli one.
    """

    population: int
    first: Tensor
    joint: Tensor
    strata: Tensor | None = None
    independent: bool = False

    def total(self, linear: Tensor, pairs: Tensor) -> Tensor:
        """Return sum_A c_i / (N pi_i) + sum_{i != j} G_ij / (N (N - 1) pi_ij)."""
        n = self.population
        return (linear / self.first).sum() / n + off_diagonal(pairs / self.joint).sum() / (n * (n - 1))

    def variance(self, linear: Tensor, pairs: Tensor) -> tuple[float, float]:
        """Return the estimated linear and pair part of the variance of :meth:`total`; NaN from fewer than 4 units.

        The linear part is the delete-one jackknife's, or its like, which holds the pair part too, about twice:
        intervals of small audits need that, as the estimate and its variance err together.
        """
        if len(linear) < 4:
            return float("nan"), float("nan")
        if self.strata is None and not self.independent:
            return jackknife_parts(linear, pairs, self.population).at(len(linear))
        n, p, joint = self.population, self.first.double(), self.joint.double()
        g = off_diagonal(pairs.detach().double())
        unit = linear.detach().double() + 2 / (n - 1) * (g * p[:, None] / joint).sum(
            1
        )  # N times what i adds to the total
        miss = torch.outer(1 - p, 1 - p)
        if self.strata is None:
            first = float(((1 - p) / p**2 * unit.square()).sum()) / n**2
            second = 2 * float((miss / joint**2 * g.square()).sum()) / (n * (n - 1)) ** 2
        else:
            first = sum(_mean_variance(unit[own], float(p[own][0])) for own in _groups(self.strata)) / n**2
            second = 2 * float((miss / joint**2 * _centred(g, self.strata).square()).sum()) / (n * (n - 1)) ** 2
        return first, second


def draw_of(design: Design, audited: Tensor, n: int, dtype: torch.dtype) -> Audit:
    """Return the audit of rows ``audited`` (m,) out of n under a design, checked."""
    device, m = audited.device, len(audited)
    if design is None:
        return simple_random(m, n, dtype, device)
    if isinstance(design, Bernoulli):
        try:
            p = torch.as_tensor(np.asarray(design.probabilities, dtype=float), dtype=dtype, device=device)
        except (TypeError, ValueError):
            raise InputError("inclusion: Bernoulli's probabilities are no list of numbers; give one a row") from None
        if p.shape != (n,):
            raise InputError(f"inclusion: Bernoulli has {p.numel()} probabilities for {n} noisy rows; give one a row")
        if not bool(((p > 0) & (p <= 1)).all()):
            raise InputError("inclusion: a probability is not in (0, 1]; what could not be audited cannot be corrected")
        first = p[audited]
        return Audit(n, first, torch.outer(first, first), independent=True)
    if isinstance(design, Stratified):
        given = pd.Series(design.labels, dtype=object)
        if len(given) != n:
            raise InputError(f"inclusion: Stratified has {len(given)} labels for {n} noisy rows; give one a row")
        if given.isna().any():
            raise InputError(f"inclusion: Stratified has no label for row {int(given.isna().argmax())}")
        labels, names = pd.factorize(given)
        return _stratified(torch.as_tensor(labels, device=device), names, audited, dtype)
    raise InputError(
        f"inclusion={type(design).__name__}: pairs need joint probabilities; say Stratified(labels) or Bernoulli(p)"
    )


def simple_random(m: int, n: int, dtype: torch.dtype, device: torch.device) -> Audit:
    """Return a simple random audit of m out of n."""
    first = torch.full((m,), m / n, dtype=dtype, device=device)
    pair = m * (m - 1) / (n * (n - 1)) if n > 1 else 1.0
    return Audit(n, first, torch.full((m, m), pair, dtype=dtype, device=device))


def _stratified(labels: Tensor, names: pd.Index, audited: Tensor, dtype: torch.dtype) -> Audit:
    n, own = len(labels), labels[audited]
    size = labels.bincount().to(dtype)
    taken = own.bincount(minlength=len(size)).to(dtype)
    if bool(((taken < 2) & (taken < size)).any()):
        short = int(((taken < 2) & (taken < size)).nonzero()[0])
        raise InputError(
            f"inclusion: stratum {names[short]!r} has {int(taken[short])} audited of {int(size[short])} rows; audit "
            "two of each stratum at least, or merge strata"
        )
    if len(size) == 1:
        return simple_random(len(audited), n, dtype, labels.device)
    first = (taken / size)[own]
    inside = (taken * (taken - 1) / (size * (size - 1)).clamp_min(1))[own]  # a lone row has no pair
    joint = torch.where(
        own[:, None] == own, inside[:, None].clamp_min(torch.finfo(dtype).tiny), torch.outer(first, first)
    )
    return Audit(n, first, joint.fill_diagonal_(1), strata=own)


@dataclass(frozen=True)
class VarianceParts:
    """Hoeffding's decomposition of pairs over ``population`` units.

    ``units`` is sum a_i^2 / (N - 1) and ``pairs`` is sum_{i<j} r_ij^2.
    """

    population: int
    units: float
    pairs: float

    def at(self, m: int) -> tuple[float, float]:
        """Return the linear and the pair part of the variance of a simple random audit of ``m`` units."""
        n = self.population
        return 4 * (1 - m / n) / m * self.units, (2 / (m * (m - 1))) ** 2 * self.pairs * _pair_spread(m, n)


def exact_parts(linear: Tensor, pairs: Tensor) -> VarianceParts:
    """Return the parts of a population all of whose N >= 4 units are known: ``linear`` (N,), ``pairs`` (N, N)."""
    a, q = _hoeffding(linear, pairs)
    n = len(linear)
    return VarianceParts(n, a / (n - 1), q)


def jackknife_parts(linear: Tensor, pairs: Tensor, n: int) -> VarianceParts:
    """Estimate, from a simple random audit of m >= 4 units, the parts of their population of ``n``: units too large.

    The linear part is then (1 - m/n) times the delete-one jackknife variance of the total. Pair functions whose rows
    sum to zero fill m (m - 3) / 2 dimensions, so that an audit holds that share of q: its estimate is unbiased.
    """
    a, q = _hoeffding(linear, pairs)
    m = len(linear)
    return VarianceParts(n, a / (m - 1), q * n * (n - 3) / (m * (m - 3)))


def unbiased_parts(linear: Tensor, pairs: Tensor, n: int) -> VarianceParts:
    """Estimate both parts without bias: the jackknife's, less the pairs' noise in its squared unit effects.

    That noise is what remains of the expected squares of r among m units, beside their mean and what keeps summing to
    zero.
    """
    parts, m = jackknife_parts(linear, pairs, n), len(linear)
    left = m * (m - 1) / (n * (n - 1)) - m * (m - 3) / (n * (n - 3)) - 2 / (m * (m - 1)) * _pair_spread(m, n)
    return VarianceParts(n, parts.units - parts.pairs * left / ((m - 1) * (m - 2)), parts.pairs)


def _hoeffding(linear: Tensor, pairs: Tensor) -> tuple[float, float]:
    """Return sum a_i^2 and sum_{i<j} r_ij^2 of g_ij = (c_i + c_j) / 2 + G_ij."""
    n = len(linear)
    linear, pairs = linear.detach().double(), pairs.detach().double()
    g = off_diagonal((linear[:, None] + linear) / 2 + pairs)
    mean = g.sum() / (n * (n - 1))
    a = (g.sum(1) / (n - 1) - mean) * (n - 1) / (n - 2)
    r = off_diagonal(g - mean - a[:, None] - a)
    return float(a.square().sum()), float(r.square().sum()) / 2


def _pair_spread(m: int, n: int) -> float:
    """Return p_2 - 2 p_3 + p_4 with p_t the probability that t given units are all audited."""
    p2 = m * (m - 1) / (n * (n - 1))
    p3 = p2 * (m - 2) / (n - 2)
    return p2 - 2 * p3 + p3 * (m - 3) / (n - 3)


def _groups(strata: Tensor) -> list[Tensor]:
    """Return the places of the rows of each stratum that has more than one."""
    groups = [(strata == h).nonzero()[:, 0] for h in strata.unique()]
    return [own for own in groups if len(own) > 1]


def _mean_variance(unit: Tensor, inclusion: float) -> float:
    """Return the variance of the total of a stratum estimated from its audited rows ``unit`` (k,)."""
    k = len(unit)
    return (1 - inclusion) * (k / inclusion) ** 2 / k * float(unit.var())


def _centred(g: Tensor, strata: Tensor) -> Tensor:
    """Subtract row and column means of each block of strata and add its mean, the diagonal left at 0."""
    one = torch.nn.functional.one_hot(strata).to(g.dtype)
    off = off_diagonal(torch.ones_like(g))
    rows = ((g @ one) / (off @ one).clamp_min(1))[:, strata]  # mean of i's pairs with the stratum of j
    block = ((one.T @ g @ one) / (one.T @ off @ one).clamp_min(1))[strata][:, strata]
    return off_diagonal(g - rows - rows.T + block)


def off_diagonal(matrix: Tensor) -> Tensor:
    """Return a copy of a square matrix with zeros on its diagonal."""
    return matrix - torch.diag(matrix.diagonal())
