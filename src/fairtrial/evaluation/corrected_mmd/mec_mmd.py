"""MEC-MMD: the squared maximum mean discrepancy of a distribution known by noisy measurements and a small audit.

Of N measurements z a random subset A has truths x; y is the sample to compare with. The plain MMD^2 of z and y finds
the measurement's artefacts. Here the mean embedding of x is estimated by

    mu = mean_N phi(z) + mean_A [phi(x) - phi(z)],

unbiased over audits whatever the noise, and from |mu - mean phi(y)|^2 the trace of mu's variance over audits is taken,
which the audit estimates without bias. The result is unbiased for the *oracle*, the MMD^2 computed with all truths. In
Horvitz-Thompson form, which serves every way of drawing the audit,

    T = const + sum_A c_i / (N pi_i) + sum_{i != j in A} G_ij / (N (N - 1) pi_ij),
    c_i = 2 <phi(x_i) - phi(z_i), mean_N phi(z) - mean phi(y)> + D_ii / N,    G = (1 - 1/N) D,
    D_ij = <phi(x_i) - phi(z_i), phi(x_j) - phi(z_j)>;

c and G also give the variance of T over audits (:mod:`.designs`). ``estimator="pairwise"`` corrects pairs of kernel
values instead: G_ij = k(x_i, x_j) - k(z_i, z_j).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from torch import Tensor

from fairtrial.errors import InputError
from fairtrial.evaluation.corrected_mmd.designs import (
    Design,
    VarianceParts,
    exact_parts,
    unbiased_parts,
)
from fairtrial.evaluation.corrected_mmd.kernels import Kernel, kernel_for, kernel_sums, mean_within
from fairtrial.evaluation.corrected_mmd.quadratic import Side, choose_for_embedding, uniform
from fairtrial.evaluation.corrected_mmd.samples import (
    Proxy,
    Sample,
    SignedSample,
    Strength,
    embed,
    generator_of,
    proxies,
    read_sample,
    rows_of,
)
from fairtrial.options import checked_count, checked_number

Estimator = Literal["embedding", "pairwise"]
FormName = Literal["u", "v"]


@dataclass(frozen=True)
class MMDEstimate:
    """An estimate of the oracle MMD^2 and what it is worth.

    Attributes
    ----------
    value : the estimate; negative where the samples are alike, since it is unbiased. A float, or a tensor () with a
        gradient in ``y`` where tensors were given.
    standard_error : of the estimate around the population's MMD^2, the root of the sum of ``variance``. NaN with fewer
        than 4 audited rows.
    variance : ``sampling`` of the N and M rows (first order), and of the audit given these, its ``audit_linear`` and
        ``audit_pairs`` parts. Estimates, the first two not below 0.
    oracle_form : ``"u"`` or ``"v"``, the form of the oracle that the value is unbiased for.
    bias_of_plain, bias_standard_error : the plain MMD^2 of the noisy sample minus ``value``, and its standard error
        over audits. The correction pays where the first exceeds about once the second.
    strength : lambda, averaged over folds.
    rounding : what floating point may add to ``value``: with constant samples that is all there is.
    """

    value: float | Tensor
    standard_error: float
    variance: dict[str, float]
    oracle_form: FormName
    bias_of_plain: float
    bias_standard_error: float
    strength: float
    rounding: float = 0.0

    @property
    def audit_standard_error(self) -> float:
        """The standard error around the oracle, over audits of these N rows."""
        return self.bias_standard_error

    def interval(
        self, level: float = 0.95, *, around: Literal["population", "oracle"] = "population"
    ) -> tuple[float, float]:
        """Return a normal interval for the population's MMD^2, or for the oracle over audits of these rows."""
        if around not in ("population", "oracle"):
            raise InputError(f"around={around!r}: give 'population' or 'oracle'")
        error = self.standard_error if around == "population" else self.audit_standard_error
        half = float(ndtri((1 + checked_number(level, "level", above=0, below=1)) / 2)) * error
        return self._number - half, self._number + half

    @property
    def _number(self) -> float:
        return float(self.value.detach()) if isinstance(self.value, Tensor) else self.value

    def __str__(self) -> str:
        parts = ", ".join(f"{name.replace('_', ' ')} {math.sqrt(v):.2g}" for name, v in self.variance.items())
        return (
            f"MMD^2 {self._number:.5g}, standard error {self.standard_error:.2g} ({parts}); "
            f"the plain one is off by {self.bias_of_plain:.5g} +- {self.bias_standard_error:.2g}"
        )


def mec_mmd2(
    noisy: Any,
    truth: Any,
    audited: Any,
    y: Any,
    *,
    kernel: Kernel | None = None,
    estimator: Estimator = "embedding",
    form: FormName = "u",
    strength: Strength = 1.0,
    proxy: Proxy = None,
    inclusion: Design = None,
    y_truth: Any = None,
    y_audited: Any = None,
    folds: int = 5,
    seed: int | np.random.Generator = 0,
) -> MMDEstimate:
    """Estimate the MMD^2 between the truths behind ``noisy`` and ``y``.

    Parameters
    ----------
    noisy : all measurements, (N, d) or (N,), numpy or torch.
    truth, audited : the truths (m, d) of rows ``audited`` (m,), drawn at random.
    y : the sample to compare with, (M, d); also noisy where ``y_truth`` and ``y_audited``, its own audit, are given.
    kernel : a torch function of (n, d), (k, d) to (n, k). Left out: the mean of Gaussians with half, once and twice the
        median distance of the audited truths and ``y``, never of the noisy rows.
    estimator : ``"embedding"`` or ``"pairwise"`` (usually of more variance).
    form : ``"u"`` leaves the pairs of a row with itself out of the oracle, ``"v"`` keeps them.
    strength : lambda of lambda * phi(z): 1 is the paper's, 0 the audit alone. ``"auto"`` minimises the estimated
        variance over audits, in folds. A number chosen from the same audit would bias the estimate by O(1/m), however
        small: it is then *not exactly unbiased*; in folds it is.
    proxy : None, a function g of the noisy rows fixed before the audit was seen, or ``"calibrated"``: g regresses truth
        on noisy, in folds, isotonic for one feature and ridge for several. The estimate stays unbiased.
    inclusion : how the audit was drawn where not as a simple random sample: ``Stratified`` or ``Bernoulli``; that of
        ``noisy`` only.
    folds, seed : of ``"auto"`` and ``"calibrated"``.

    Returns
    -------
    MMDEstimate
        Its standard errors are from the jackknife over the audit, on the large side; with strata, folds and two noisy
        samples they are approximate besides.

    Raises
    ------
    InputError
        Shapes that disagree, rows audited twice or out of range, fewer than 2 audited rows (10 for what is fitted),
        values that are not finite, or a zero inclusion probability. An audit that is visibly not random warns.

    Notes
    -----
    After MEC-MMD (kernel evaluations debiased by an audited subset). The embedding form, strength and proxy are ours,
    the latter as in prediction-powered inference.

    Examples
    --------
    The sensor adds .5; the simulator is right, and the plain MMD^2 does not see it:

    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=400); noisy = x + 0.5 + 0.3 * rng.normal(size=400)
    >>> audited = rng.choice(400, 60, replace=False)
    >>> estimate = mec_mmd2(noisy, x[audited], audited, rng.normal(size=400))
    >>> abs(estimate.value) < 2 * estimate.standard_error, estimate.bias_of_plain > 5 * estimate.bias_standard_error
    (True, True)
    """
    if (y_truth is None) != (y_audited is None):
        raise InputError("y_truth and y_audited go together: give both where y is noisy, or neither")
    _check_forms(form, estimator)
    rng = generator_of(seed)
    sample = read_sample(noisy, truth, audited, inclusion)
    points_y = rows_of(y, "y", sample.noisy)
    if len(points_y) < 2:
        raise InputError("y has 1 row: the MMD needs 2 at least")
    clean = points_y if y_truth is None else rows_of(y_truth, "y_truth", sample.noisy)
    kernel = kernel_for(kernel, sample.truth, clean)
    x = Side(sample, kernel, estimator == "embedding", form == "u")
    plain_x, plain_y = uniform(sample.noisy), uniform(points_y)
    within_y, rows_y = mean_within(kernel, points_y, form == "u"), len(points_y)

    auto = strength == "auto"
    folds_x = x.choose(proxies(sample, noisy, proxy, strength, folds, rng), plain_y, auto)
    mu_x = embed(sample, folds_x).sample()
    if y_truth is None:
        mu_y = plain_y
        value, *parts = x.correct(folds_x, mu_y)
        value = value + within_y
    else:
        sample_y = read_sample(y, y_truth, y_audited, of="y_")
        other = Side(sample_y, kernel, x.embedding, x.unbiased)
        folds_y = other.choose(proxies(sample_y, y, proxy, strength, folds, rng), plain_x, auto)
        mu_y = embed(sample_y, folds_y).sample()
        value, *parts = x.correct(folds_x, mu_y)
        value_y, *parts_y = other.correct(folds_y, mu_x)
        cross = mu_y.weights @ kernel_sums(kernel, mu_y.points, mu_x.points, mu_x.weights)
        value = value + value_y + 2 * cross  # both sides have taken the cross term off
        parts = [one + two for one, two in zip(parts, parts_y, strict=True)]
    within_x = x.within(sample.noisy).mean(len(sample.noisy), x.unbiased)
    between = kernel_sums(kernel, sample.noisy, plain_y.points, plain_y.weights).mean()
    plain = within_x + within_y - 2 * between
    with torch.no_grad():
        witness = [
            kernel_sums(kernel, at, mu_x.points, mu_x.weights) - kernel_sums(kernel, at, mu_y.points, mu_y.weights)
            for at in (sample.truth, clean)
        ]
    sampling = 4 * (_variance(witness[0], sample.audit.first) / len(sample.noisy) + float(witness[1].var()) / rows_y)
    linear, pairs = (max(part, 0.0) for part in parts)  # NaN, of fewer than 4 audited rows, stays NaN
    tensors = isinstance(noisy, Tensor) or isinstance(y, Tensor)
    return MMDEstimate(
        value=value if tensors else float(value),
        standard_error=math.sqrt(sampling + linear + pairs),
        variance={"sampling": sampling, "audit_linear": linear, "audit_pairs": pairs},
        oracle_form=form,
        bias_of_plain=float((plain - value).detach()),
        bias_standard_error=math.sqrt(linear + pairs),
        strength=sum(fold.strength for fold in folds_x) / len(folds_x),
        rounding=64 * torch.finfo(plain.dtype).eps * sum(float(abs(v.detach())) for v in (within_x, within_y, between)),
    )


@dataclass(frozen=True)
class TestResult:
    """A one-sided test that two distributions are equal.

    Attributes
    ----------
    p_value : of the estimate under equality; ``reject`` where it is below ``level``.
    statistic : the estimate over its standard error, or the estimate itself where units were permuted.
    interval : normal, for the population's MMD^2, of confidence 1 - ``level``.
    estimate : the estimate in full.
    """

    __test__ = False  # not for pytest to collect

    p_value: float
    reject: bool
    statistic: float
    interval: tuple[float, float]
    level: float
    estimate: MMDEstimate


def mec_mmd_test(
    noisy: Any, truth: Any, audited: Any, y: Any, *, permutations: int = 0, level: float = 0.05, **options: Any
) -> TestResult:
    """Test that the truths behind ``noisy`` and ``y`` have one distribution.

    Without permutations the estimate over its standard error is compared with a normal distribution. Where the samples
    are alike that error is on the large side, and this rejects more seldom than ``level``.

    Parameters
    ----------
    noisy, truth, audited, y, **options : as in :func:`mec_mmd2`, with ``form="u"``.
    permutations : 0, or a number where ``y`` is noisy too, of the same instrument: rows are then exchanged between the
        samples, audited with audited. There is no such null between noisy rows and clean ones, which differ in law
        even where the truths do not.
    level : of the test, in (0, 1).

    Raises
    ------
    InputError
        Permutations of a clean ``y``, a level out of range, fewer than 4 audited rows, or the input of ``mec_mmd2``.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=300); audited = rng.choice(300, 60, replace=False)
    >>> mec_mmd_test(x + rng.normal(size=300), x[audited], audited, rng.normal(2.0, 1.0, size=300)).reject
    True
    """
    level = checked_number(level, "level", above=0, below=1)
    permutations = checked_count(permutations, "permutations", least=0)
    noisy_y = options.get("y_truth") is not None
    if permutations and not noisy_y:
        raise InputError(
            "permutations: a clean y cannot be exchanged with noisy rows; give none, or the audit of y as well"
        )
    estimate = mec_mmd2(noisy, truth, audited, y, **options)
    if math.isnan(estimate.standard_error):
        raise InputError(
            "audited: a test needs a standard error, and that 4 audited rows at least"
            if len(np.atleast_1d(audited)) < 4
            else "the estimate is not finite: rescale values this large, or give a finite strength"
        )
    value = estimate._number
    if permutations:
        null = _permuted(noisy, truth, audited, y, permutations, options)
        statistic, p_value = value, (1 + sum(v >= value for v in null)) / (1 + permutations)
    else:
        if abs(value) <= estimate.rounding:  # constant samples: both value and error are rounding
            statistic = 0.0
        else:
            statistic = value / estimate.standard_error if estimate.standard_error else math.copysign(math.inf, value)
        p_value = float(ndtr(-statistic))
    return TestResult(p_value, p_value < level, statistic, estimate.interval(1 - level), level, estimate)


def plan_audit(
    noisy: Any,
    truth: Any,
    audited: Any,
    y: Any,
    target_se: float,
    *,
    kernel: Kernel | None = None,
    estimator: Estimator = "embedding",
    form: FormName = "u",
    strength: float = 1.0,
    proxy: Callable[[Any], Any] | None = None,
) -> int:
    """Return how many rows to audit for a standard error of ``target_se``, judged from a pilot audit.

    Parameters
    ----------
    noisy, truth, audited, y : the pilot, as in :func:`mec_mmd2`: a simple random audit of 4 rows at least.
    target_se : the standard error wanted, around the population's MMD^2.
    kernel, estimator, form, strength, proxy : as in :func:`mec_mmd2`, with nothing that is fitted.

    Raises
    ------
    InputError
        Where the error of sampling alone exceeds ``target_se``: no audit of these rows is enough.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=500); pilot = rng.choice(500, 40, replace=False)
    >>> sample = x + 0.5 * rng.normal(size=500), x[pilot], pilot, rng.normal(1.0, 1.0, size=500)
    >>> mec_mmd2(*sample).standard_error > 0.03, 40 < plan_audit(*sample, 0.03) < 500
    (True, True)
    """
    target_se = checked_number(target_se, "target_se", above=0)
    options: dict[str, Any] = {
        "kernel": kernel, "estimator": estimator, "form": form, "strength": strength, "proxy": proxy,
    }  # fmt: skip
    estimate = mec_mmd2(noisy, truth, audited, y, **options)
    parts = audit_parts(noisy, truth, audited, y, **options)
    sampling = estimate.variance["sampling"]
    if sampling >= target_se**2:
        raise InputError(
            f"target_se={target_se:g}: sampling these rows alone leaves {math.sqrt(sampling):.3g}; collect more rows"
        )

    def enough(m: int) -> bool:
        return sampling + sum(max(part, 0.0) for part in parts.at(m)) <= target_se**2

    low, high = 2, parts.population  # the variance falls with m and is 0 for m = N
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def audit_parts(
    noisy: Any,
    truth: Any,
    audited: Any,
    y: Any,
    *,
    kernel: Kernel | None = None,
    estimator: Estimator = "embedding",
    form: FormName = "u",
    strength: float = 1.0,
    proxy: Callable[[Any], Any] | None = None,
) -> VarianceParts:
    """Return the parts of the variance over simple random audits: exact with all truths, else estimated without bias.

    ``parts.at(m)`` are the linear and the pair part for an audit of m rows. Options as in :func:`plan_audit`.
    """
    _check_forms(form, estimator)
    sample = read_sample(noisy, truth, audited)
    points_y = rows_of(y, "y", sample.noisy)
    if len(points_y) < 2:
        raise InputError("y has 1 row: the MMD needs 2 at least")
    side = Side(sample, kernel_for(kernel, sample.truth, points_y), estimator == "embedding", form == "u")
    folds = proxies(sample, noisy, proxy, strength, 5, 0)
    if len(folds) > 1 or len(sample.audited) < 4:
        raise InputError("a plan needs a pilot of 4 audited rows, strength= a number and proxy= None or a function")
    made = side.form(folds[0], side.toward(folds[0].proxied, uniform(points_y)))
    if len(sample.audited) == len(sample.noisy):
        return exact_parts(made.linear, made.pairs)
    return unbiased_parts(made.linear, made.pairs, len(sample.noisy))


def _check_forms(form: str, estimator: str) -> None:
    if form not in ("u", "v") or estimator not in ("embedding", "pairwise"):
        raise InputError(f"form={form!r}, estimator={estimator!r}: give 'u' or 'v', and 'embedding' or 'pairwise'")


def corrected_sample(
    noisy: Any,
    truth: Any,
    audited: Any,
    *,
    kernel: Kernel | None = None,
    strength: Strength = 1.0,
    proxy: Proxy = None,
    inclusion: Design = None,
    folds: int = 5,
    seed: int | np.random.Generator = 0,
) -> SignedSample:
    """Return points (n, d) and weights (n,), some negative, whose weighted mean embedding is unbiased for the truths'.

    What any kernel method needs of a sample, by :func:`mec_mmd2`'s correction; parameters as there, but that ``"auto"``
    minimises the variance of the embedding, there being no ``y``. ``kernel`` matters to ``"auto"`` only.

    Examples
    --------
    >>> points, weights = corrected_sample([0.0, 0.0, 0.0, 0.0], [1.0, 3.0], [0, 1])
    >>> float(weights @ points[:, 0])  # a mean corrected by the audit
    2.0
    """
    sample = read_sample(noisy, truth, audited, inclusion)
    made = proxies(sample, noisy, proxy, strength, folds, generator_of(seed))
    return embed(sample, choose_for_embedding(sample, made, kernel, strength)).sample()


def _variance(values: Tensor, inclusion: Tensor) -> float:
    """Return the population's variance of ``values`` (m,) of rows included with probability ``inclusion`` (m,)."""
    share = (1 / inclusion) / (1 / inclusion).sum()
    return float(share @ (values - share @ values).square()) * len(values) / (len(values) - 1)


def _permuted(noisy: Any, truth: Any, audited: Any, y: Any, permutations: int, options: dict[str, Any]) -> list[float]:
    """Return the estimates after rows changed sides, audited ones with audited and others with others."""
    options = dict(options)
    one = read_sample(noisy, truth, audited)
    two = read_sample(y, options.pop("y_truth"), options.pop("y_audited"), of="y_")
    rng = generator_of(options.get("seed", 0))
    kernel = kernel_for(options.pop("kernel", None), one.truth, two.truth)
    truths = torch.cat([one.truth, two.truth])
    z_audited = torch.cat([s.noisy[s.audited] for s in (one, two)])
    others = torch.cat([s.noisy[_complement(s)] for s in (one, two)])
    m, rest = len(one.truth), len(one.noisy) - len(one.truth)
    estimates = []
    for _ in range(permutations):
        a, b = (torch.from_numpy(rng.permutation(len(t))).to(t.device) for t in (truths, others))
        sides = []
        for mine, rows in ((a[:m], b[:rest]), (a[m:], b[rest:])):
            sides.append((torch.cat([z_audited[mine], others[rows]]), truths[mine], torch.arange(len(mine))))
        (z, x, at), (z_y, x_y, at_y) = sides
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the audits were checked as they came
            made = mec_mmd2(z, x, at, z_y, kernel=kernel, y_truth=x_y, y_audited=at_y, **options)
        estimates.append(made._number)
    return estimates


def _complement(sample: Sample) -> Tensor:
    rest = torch.ones(len(sample.noisy), dtype=torch.bool, device=sample.noisy.device)
    rest[sample.audited] = False
    return rest
