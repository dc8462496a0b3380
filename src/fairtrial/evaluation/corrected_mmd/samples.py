"""A noisy sample with its audit, and the signed sample that stands for its truths.

In the feature space of a kernel, mean phi(z) + mean_A [phi(x) - phi(z)] is unbiased for mean phi(x) over simple random
audits A, whatever the noise. It is a weighted sum of features of points, so everything can be computed from kernel
values. Any map g(z) fixed before the audit, and any factor lambda, may stand before phi(z); where they are fitted on
audited rows, those rows count as known and the others correct (cross-fitting).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fairtrial.errors import InputError, MissingExtraError
from fairtrial.evaluation.corrected_mmd.designs import Audit, Design, draw_of, simple_random
from fairtrial.options import checked_count

Array: TypeAlias = "np.ndarray | Tensor"
Proxy: TypeAlias = "Literal['calibrated'] | Callable[[Any], Any] | None"
Strength: TypeAlias = "float | Literal['auto']"

_CROSS_FIT_LEAST = 10  # audited rows, so that every fold keeps a pair
_SUSPICIOUS = 4.0  # standard errors between audited and other rows


class Sample(NamedTuple):
    """Checked tensors: ``noisy`` (N, d), ``truth`` (m, d) of rows ``audited`` (m,), and how these were drawn."""

    noisy: Tensor
    truth: Tensor
    audited: Tensor
    audit: Audit
    simple: bool


class Fold(NamedTuple):
    """One proxy with its strength: ``proxied`` (N, d) is g(z), ``known`` (m,) is 1 where g was fitted, else 0."""

    proxied: Tensor
    known: Tensor
    strength: float
    audit: Audit  # of the rows that are not known, out of all rows that are not known


class SignedSample(NamedTuple):
    """Points (n, d) with weights (n,), some negative, whose weighted mean of features is the corrected embedding."""

    points: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Embedding:
    """The corrected embedding in its two independent parts.

    ``noisy`` (F, N, d) with ``noisy_weights`` (F, N): all measurements. ``audited`` (1 + F, m, d) with
    ``audited_weights`` (1 + F, m): truths first, then the measurements that they correct. F is 1 unless the proxy is
    fitted in folds.
    """

    noisy: Tensor
    noisy_weights: Tensor
    audited: Tensor
    audited_weights: Tensor

    def sample(self) -> SignedSample:
        """Return all points and weights in one."""
        points = torch.cat([self.noisy.flatten(0, 1), self.audited.flatten(0, 1)])
        return SignedSample(points, torch.cat([self.noisy_weights.flatten(), self.audited_weights.flatten()]))


def rows_of(values: Any, name: str, like: Tensor | None = None) -> Tensor:
    """Return finite ``values`` (n,) or (n, d) as a floating tensor (n, d), of the dtype and device of ``like``."""
    if not isinstance(values, Tensor):
        try:
            values = np.asarray(values)
        except ValueError:  # rows of different lengths
            raise InputError(f"{name}: its rows differ in length") from None
        if values.dtype.kind not in "fiub":
            raise InputError(f"{name}: expected real numbers, got dtype {values.dtype}")
        values = torch.from_numpy(np.array(values, dtype=None if values.dtype.kind == "f" else float))
    elif values.is_complex():
        raise InputError(f"{name}: expected real numbers, got dtype {values.dtype}")
    values = values.to(like) if like is not None else values if values.is_floating_point() else values.double()
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim != 2 or not values.numel():
        raise InputError(f"{name}: expected rows of features (n, d), got shape {tuple(values.shape)}")
    finite = torch.isfinite(values.detach()).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise InputError(f"{name}: row {row} is not finite; every given row must be, leave unaudited truths out")
    if like is not None and like.ndim == 2 and values.shape[1] != like.shape[1]:
        raise InputError(f"{name} has {values.shape[1]} features, the noisy sample {like.shape[1]}: they must agree")
    return values


def read_sample(noisy: Any, truth: Any, audited: Any, inclusion: Design = None, *, of: str = "") -> Sample:
    """Check a noisy sample and its audit; ``of`` is put before the names in errors."""
    z = rows_of(noisy, f"{of}noisy")
    try:
        given = audited if isinstance(audited, Tensor) else np.asarray(audited)
    except ValueError:
        raise InputError(f"{of}audited: its rows differ in length") from None
    if not len(given.ravel()):
        raise InputError(f"{of}audited: no row is; correction and its variance need 2 at least")
    x = rows_of(truth, f"{of}truth", z)
    whole = given.dtype.kind in "iu" if isinstance(given, np.ndarray) else _is_whole(given)
    if given.ndim != 1 or not whole:
        raise InputError(f"{of}audited: expected the numbers of the audited rows (m,), such as np.flatnonzero(mask)")
    rows = torch.as_tensor(given).to(z.device, torch.int64)
    n, m = len(z), len(rows)
    if m != len(x):
        raise InputError(f"{of}truth has {len(x)} rows for {m} audited ones: give one truth for each")
    if m < 2:
        raise InputError(f"{of}audited: {m} audited row; correction and its variance need 2 at least")
    if bool(((rows < 0) | (rows >= n)).any()):
        raise InputError(f"{of}audited: row numbers must lie in 0..{n - 1}, got {int(rows.min())}..{int(rows.max())}")
    if len(rows.unique()) < m:
        raise InputError(f"{of}audited: a row is audited twice; give every row once")
    if inclusion is None:
        _warn_unless_random(z, rows, of)
    return Sample(z, x, rows, draw_of(inclusion, rows, n, z.dtype), inclusion is None)


def _is_whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _warn_unless_random(noisy: Tensor, audited: Tensor, of: str) -> None:
    """Warn where audited rows differ from the others in a feature by more than chance lets a random audit differ."""
    n, m = len(noisy), len(audited)
    if m == n:
        return
    deviation = noisy[audited].mean(0) - noisy.mean(0)  # (d,)
    error = noisy.std(0) * ((1 / m - 1 / n) ** 0.5)
    scores = (deviation / error.clamp_min(torch.finfo(noisy.dtype).tiny)).abs()
    if float(scores.max()) > _SUSPICIOUS:
        warnings.warn(
            f"{of}audited rows differ from the others in feature {int(scores.argmax())} by {float(scores.max()):.1f} "
            "standard errors: the correction is unbiased only for an audit drawn at random (or give inclusion=)",
            stacklevel=4,
        )


def generator_of(seed: int | np.random.Generator) -> np.random.Generator:
    """Return a generator of a seed, or the one that is given."""
    return (
        seed if isinstance(seed, np.random.Generator) else np.random.default_rng(checked_count(seed, "seed", least=0))
    )


def fold_numbers(m: int, folds: int, seed: int | np.random.Generator) -> np.ndarray:
    """Return the fold of each of m audited rows, (m,), at random and of sizes that differ by one at most."""
    return np.random.default_rng(seed).permutation(m) % folds


def proxies(
    sample: Sample, given: Any, proxy: Proxy, strength: Strength, folds: int, seed: int | np.random.Generator
) -> list[Fold]:
    """Return the folds with strength 1 where it is still to be chosen; a single one where nothing is fitted.

    ``given`` is the noisy sample as the caller gave it, for a callable proxy.
    """
    fitted = proxy == "calibrated"
    if isinstance(strength, str) and strength != "auto":
        raise InputError(f"strength={strength!r}: give a number or 'auto'")
    if strength != "auto" and (
        isinstance(strength, bool) or not isinstance(strength, Real) or not math.isfinite(strength)
    ):
        raise InputError(f"strength={strength!r}: give a finite number or 'auto'")
    if not (fitted or proxy is None or callable(proxy)):
        raise InputError(f"proxy={proxy!r}: give None, 'calibrated' or a function of the noisy rows")
    m = len(sample.audited)
    proxied = sample.noisy
    if callable(proxy):
        proxied = rows_of(proxy(given), "proxy(noisy)", sample.noisy)
        if proxied.shape != sample.noisy.shape:
            raise InputError(f"proxy(noisy) has {len(proxied)} rows for {len(sample.noisy)} noisy ones")
    if not fitted and strength != "auto":
        return [Fold(proxied, torch.zeros_like(sample.audit.first), float(strength), sample.audit)]
    what = "proxy='calibrated'" if fitted else "strength='auto'"
    if not sample.simple:
        raise InputError(f"{what} is fitted in folds of a simple random audit; with inclusion= give a number or a map")
    folds = checked_count(folds, "folds", least=2)
    if m < max(_CROSS_FIT_LEAST, 2 * folds):
        raise InputError(f"{what} needs {max(_CROSS_FIT_LEAST, 2 * folds)} audited rows, got {m}: audit more")
    return cross_fit(
        sample, proxied, fitted, 1.0 if strength == "auto" else float(strength), fold_numbers(m, folds, seed)
    )


def cross_fit(sample: Sample, proxied: Tensor, fitted: bool, strength: float, number: np.ndarray) -> list[Fold]:
    """Return one fold for each number in ``number`` (m,): its rows correct, the others are known and fit the proxy.

    Given the known rows, those of the fold are a simple random sample of all that are not known.
    """
    made = []
    for fold in range(int(number.max()) + 1):
        known = torch.as_tensor(number != fold, device=sample.noisy.device)
        n, m = len(sample.noisy) - int(known.sum()), int((~known).sum())
        rest = simple_random(m, n, sample.noisy.dtype, sample.noisy.device)
        points = (
            calibrate(sample.noisy[sample.audited[known]], sample.truth[known], sample.noisy) if fitted else proxied
        )
        made.append(Fold(points, known.to(sample.noisy), strength, rest))
    return made


def calibrate(noisy: Tensor, truth: Tensor, at: Tensor) -> Tensor:
    """Regress ``truth`` (k, d) on ``noisy`` (k, d) and predict at ``at`` (n, d).

    One feature: isotonic regression. Several: ridge regression, its penalty by leave-one-out.
    """
    try:
        from sklearn.isotonic import IsotonicRegression
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError:
        raise MissingExtraError("evaluation", "scikit-learn") from None
    z, x, new = (t.detach().cpu().double().numpy() for t in (noisy, truth, at))
    if z.shape[1] == 1:
        z, x, new = z[:, 0], x[:, 0], new[:, 0]
        rising = bool(np.dot(z - z.mean(), x - x.mean()) >= 0)
        predicted = IsotonicRegression(increasing=rising, out_of_bounds="clip").fit(z, x).predict(new)[:, None]
    else:
        model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 7)))
        predicted = model.fit(z, x).predict(new).reshape(new.shape)
    return torch.from_numpy(np.ascontiguousarray(predicted)).to(at)


def embed(sample: Sample, folds: list[Fold]) -> Embedding:
    """Return the corrected embedding, the mean of the folds'."""
    n, m, count = len(sample.noisy), len(sample.audited), len(folds)
    truth_weights = torch.zeros(m, dtype=sample.noisy.dtype, device=sample.noisy.device)
    noisy_weights, proxied_weights = [], []
    for fold in folds:
        correcting = torch.zeros_like(truth_weights)
        correcting[fold.known == 0] = 1 / (n * fold.audit.first)
        truth_weights += (fold.known / n + correcting) / count
        rest = torch.full((n,), 1 / n, dtype=sample.noisy.dtype, device=sample.noisy.device)
        rest[sample.audited] -= fold.known / n
        noisy_weights.append(rest * fold.strength / count)
        proxied_weights.append(-correcting * fold.strength / count)
    points = [fold.proxied for fold in folds]
    if all(p is points[0] for p in points):  # the folds share their proxy and differ in strength alone
        points = points[:1]
        noisy_weights, proxied_weights = ([torch.stack(w).sum(0)] for w in (noisy_weights, proxied_weights))
    return Embedding(
        torch.stack(points),
        torch.stack(noisy_weights),
        torch.stack([sample.truth, *(p[sample.audited] for p in points)]),
        torch.stack([truth_weights, *proxied_weights]),
    )
