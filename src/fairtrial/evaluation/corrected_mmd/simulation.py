"""What the trial measures on: sensors, populations whose truths are all known, and models to fit to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairtrial.evaluation.corrected_mmd.baselines import plain_mmd2
from fairtrial.evaluation.corrected_mmd.designs import exact_parts, simple_random
from fairtrial.evaluation.corrected_mmd.kernels import GaussianKernel, Kernel, kernel_sums, mean_within
from fairtrial.evaluation.corrected_mmd.quadratic import QuadraticForm, Side, quadratic_form, uniform
from fairtrial.evaluation.corrected_mmd.samples import SignedSample, read_sample

LOCATION, SCALE = 1.0, 0.8
Sensor = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def linear_bias(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return readings with an offset, a gain and noise."""
    return 0.3 + 1.2 * x + 0.4 * rng.standard_normal(x.shape)


def saturation(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return readings of the same sensor where it saturates at 1.6."""
    return linear_bias(np.minimum(x, 1.6), rng)


def heteroscedastic(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return unbiased readings whose noise grows with what is read."""
    return x + (0.2 + 0.4 * np.abs(x)) * rng.standard_normal(x.shape)


SENSORS: Mapping[str, tuple[Sensor, float]] = {  # with the standard deviation of its noise for N(1, .8)
    "linear bias": (linear_bias, 0.4),
    "saturation": (saturation, 0.4),
    "heteroscedastic": (heteroscedastic, 0.69),  # the root of E (.2 + .4 |x|)^2
}


def clinic(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return standardised clinical columns with an offset, a gain below 1, growing noise, rounded to halves."""
    return np.round(2 * (0.2 + 0.9 * x + (0.2 + 0.2 * np.abs(x)) * rng.standard_normal(x.shape))) / 2


# --------------------------------------------------------------------------------------------- populations and audits


class Population:
    """N rows whose truths are all known, against a sample ``y``: any audit is read from inner products made once.

    Parameters
    ----------
    x, z, y : truths (N, d), measurements (N, d) and the sample to compare with (M, d), in double precision.
    kernel : as in ``mec_mmd2``.
    """

    def __init__(self, x: Tensor, z: Tensor, y: Tensor, kernel: Kernel) -> None:
        sample = read_sample(z, x, np.arange(len(x)))
        side = Side(sample, kernel, embedding=True, unbiased=True)
        self.n = len(x)
        self._within, self._toward = side.within(sample.noisy), side.toward(sample.noisy, uniform(y))
        self._within_y = mean_within(kernel, y, unbiased=True)
        self.oracle = float(plain_mmd2(x, y, kernel))
        self.plain = float(plain_mmd2(z, y, kernel))

    def form(self, truths: Tensor, rows: Tensor, strength: float, embedding: bool) -> QuadraticForm:
        """Return the U-form estimate of an audit that found the truths of ``truths`` (m,) for ``rows`` (m,)."""
        within = self._within.of(truths, rows).scaled(strength)
        to = self._toward.of(truths, rows).scaled(strength)
        form = quadratic_form(within, to, torch.zeros_like(within.x_noisy), self.n, embedding, unbiased=True)
        return form._replace(constant=form.constant + self._within_y)

    def design_variance(self, m: int, strength: float, embedding: bool) -> float:
        """Return the exact variance over simple random audits of m rows."""
        rows = torch.arange(self.n)
        form = self.form(rows, rows, strength, embedding)
        return sum(exact_parts(form.linear, form.pairs).at(m))

    def audits(
        self, m: int, count: int, rng: np.random.Generator, *, strength: float, embedding: bool, mispaired: bool = False
    ) -> Iterator[tuple[float, float]]:
        """Yield the estimate and its standard error over audits, of ``count`` simple random audits of m rows.

        ``mispaired`` draws the rows that the truths are assigned to anew. (Permuting them inside the audit would leave
        the corrected embedding as it is, since it only has their sum.)
        """
        audit = simple_random(m, self.n, torch.float64, torch.device("cpu"))
        for _ in range(count):
            truths = torch.from_numpy(rng.choice(self.n, m, replace=False))
            rows = torch.from_numpy(rng.choice(self.n, m, replace=False)) if mispaired else truths
            form = self.form(truths, rows, strength, embedding)
            variance = sum(max(part, 0.0) for part in audit.variance(form.linear, form.pairs))
            yield float(form.constant + audit.total(form.linear, form.pairs)), math.sqrt(variance)


# ------------------------------------------------------------------------------------------------------ models to fit


def fit_location_scale(
    sample: SignedSample, kernel: GaussianKernel, start: tuple[float, float], noise: float = 0.0
) -> np.ndarray:
    """Return the location and scale of the Gaussian nearest to a signed sample, (2,), in closed-form MMD.

    For the kernel of bandwidth h, <phi(p), mean phi> of N(l, s^2) is h / sqrt(v) exp(-(p - l)^2 / (2 v)) with
    v = h^2 + s^2, and the model's own term is h / sqrt(h^2 + 2 s^2). ``noise`` is the standard deviation of Gaussian
    noise that the model is given too, to be compared with a noisy sample.
    """
    from scipy.optimize import minimize

    p, w = sample.points[:, 0].numpy(), sample.weights.numpy()

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        location, s2 = theta[0], math.exp(2 * theta[1])
        value, by_location, by_s2 = 0.0, 0.0, 0.0
        off = p - location
        for h in kernel.bandwidths:
            v, own = h**2 + s2 + noise**2, h**2 + 2 * (s2 + noise**2)
            k = h / math.sqrt(v) * w * np.exp(-0.5 * off**2 / v)
            value += h / math.sqrt(own) - 2 * k.sum()
            by_location -= 2 * (k @ off) / v
            by_s2 -= h * own**-1.5 + (k @ (off**2 / v - 1)) / v
        return value, np.array([by_location, 2 * s2 * by_s2])

    begin = np.array([start[0], math.log(start[1])])
    bounds = [(None, None), (-4.0, 4.0)]
    found = minimize(objective, begin, jac=True, method="L-BFGS-B", bounds=bounds, tol=1e-12).x
    return np.array([found[0], math.exp(found[1])])


G_AND_K = np.array([1.0, 0.6, 1.0, 0.1])  # location, scale, skewness, tail weight


def g_and_k(theta: Any, normal: Any) -> Any:
    """Return the g-and-k distribution's quantiles at those of standard ``normal`` draws, numpy or torch.

    ``theta`` holds location, scale > 0, skewness g and tail weight k >= 0.
    """
    a, b, g, k = theta
    tanh = torch.tanh if isinstance(normal, Tensor) else np.tanh
    return a + b * (1 + 0.8 * tanh(g * normal / 2)) * (1 + normal**2) ** k * normal


def fit_g_and_k(
    loss: Callable[[Tensor], Tensor], start: tuple[float, float], steps: int, rows: int, seed: int
) -> np.ndarray:
    """Return the parameters (4,) that ``steps`` of Adam find for a loss of simulated samples (rows, 1)."""
    noise = torch.Generator().manual_seed(seed)
    theta = torch.nn.Parameter(torch.tensor([start[0], math.log(start[1]), 0.0, math.log(0.2)], dtype=torch.float64))

    def natural() -> tuple[Tensor, ...]:
        return theta[0], theta[1].exp(), theta[2], theta[3].exp()

    optimizer = torch.optim.Adam([theta], 0.05)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(g_and_k(natural(), torch.randn(rows, 1, generator=noise, dtype=torch.float64))).backward()
        optimizer.step()
        rate.step()
    return np.array([parameter.item() for parameter in natural()])


@dataclass(frozen=True)
class SignedLoss:
    """The MMD^2 of a simulator's output with a signed sample, but for a constant: what baselines are fitted by."""

    sample: SignedSample
    kernel: Kernel

    def __call__(self, y: Tensor) -> Tensor:
        """Return the loss () of output ``y`` (M, d)."""
        mean = torch.full((len(y),), 1 / len(y), dtype=y.dtype)
        cross = self.sample.weights @ kernel_sums(self.kernel, self.sample.points, y, mean)
        return mean_within(self.kernel, y, unbiased=True) - 2 * cross


def class_shares(sample: SignedSample, source: Tensor, labels: np.ndarray, kernel: Kernel) -> np.ndarray:
    """Return the shares (classes,) of the mixture of ``source`` (n, d) by class whose embedding is nearest.

    A quadratic programme over the simplex, as least squares with shares >= 0 whose sum is held to 1 by a heavy row.
    """
    from scipy.optimize import nnls

    classes = int(labels.max()) + 1
    member = np.eye(classes)[labels]
    member /= member.sum(0)  # (n, classes): the weights of each class's mean
    values = kernel_sums(kernel, source, *sample).numpy()  # (n,) <phi(source), mu>
    gram = member.T @ kernel_sums(kernel, source, source, torch.from_numpy(member)).numpy()
    root = np.linalg.cholesky(gram + 1e-9 * np.eye(classes))
    heavy = 1e3
    system = np.vstack([root.T, np.full(classes, heavy)])
    return nnls(system, np.r_[np.linalg.solve(root, member.T @ values), heavy])[0]
