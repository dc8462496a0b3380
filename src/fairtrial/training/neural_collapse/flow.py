"""Gradient flow of a two-layer linear network under cross-entropy, exact in its modes, far beyond the range of floats.

Spectral initialization W1 = R diag(a) U', W2 = U diag(b) R' keeps its form along the flow, with s = a b,

    da_m/dt = (1/K) b_m (1 - pi_m(s)),    db_m/dt = (1/K) a_m (1 - pi_m(s)),

so that a + b grows and a - b shrinks by the same factor exp(theta_m). As p_0 -> 1 time explodes: the integration runs
in tau with dt = dtau / (1 - p_0), where dtheta_m/dtau = (1/K) (1 - E_q[chi_m]), q the softmax over the wrong classes,
and log t is summed up afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fairtrial.errors import InputError
from fairtrial.training.neural_collapse.modes import (
    Basis,
    ce_mode_rates,
    characters_sum,
    check_modes,
    cross_entropy,
    logit_vector,
    logsumexp,
    lyapunov,
    softmax,
)

INTERVALS = 64  # of tau a chunk, each integrated by 4 Gauss-Legendre nodes
RECORDED = 8  # every so many intervals, and at each chunk's end


@dataclass(frozen=True)
class SpectralFlow:
    """A trajectory.

    Attributes
    ----------
    log_time : (T,)
        Natural logarithm of t, -inf at the start.
    s : (T, K - 1)
        The modes, without the constant one.
    lyapunov : (T,)
        V, inf where a mode is 0 or negative.
    loss : (T,)
        Mean cross-entropy (or half squared error), in nats.
    lyapunov_rate, lyapunov_bound : (T,)
        dV/dt, and the certified ``-(2 / (M mean s)) (L(s) - L(mean s))`` that it never exceeds; of cross-entropy with
        balanced positive modes, otherwise nan.
    loss_bound : (T,)
        Certificate of the loss by the regret of mirror descent, ``min_c L(c 1) + D(c 1, s(0)) / (2 t)``.
    basis : {"hadamard", "fourier"}
    """

    log_time: np.ndarray
    s: np.ndarray
    lyapunov: np.ndarray
    loss: np.ndarray
    lyapunov_rate: np.ndarray
    lyapunov_bound: np.ndarray
    loss_bound: np.ndarray
    basis: Basis = "hadamard"

    def at(self, log_time: np.ndarray | float) -> np.ndarray:
        """Return the modes at given logarithms of time, (..., K - 1), between the records by interpolation in s."""
        grid = self.log_time[1:]
        x = np.clip(np.asarray(log_time, dtype=float), -np.inf, grid[-1])
        columns = [np.interp(x, grid, column[1:], left=column[0]) for column in self.s.T]
        return np.stack(columns, axis=-1)


def spectral_flow(
    s0: np.ndarray | tuple[np.ndarray, np.ndarray],
    *,
    loss: Literal["ce", "squared"] = "ce",
    t_max: float = 1e30,
    basis: Basis = "hadamard",
    n_per_class: int = 1,
) -> SpectralFlow:
    """Follow the modes of a spectrally initialized two-layer linear network on orthonormal inputs.

    Parameters
    ----------
    s0 : (K - 1,) array, or two of them
        The modes at the start, positive (balanced layers), or (a0, b0) of the two layers.
    loss : {"ce", "squared"}
        Cross-entropy; or half the squared error to the one-hot labels, in the closed form of Saxe et al. (2013), for
        balanced layers and one example a class.
    t_max : float
        Time to follow until; 1e30 is ordinary. The last record is the first one at or after it: ``at`` reads it off.
    basis : {"hadamard", "fourier"}
        ``hadamard`` for K a power of 2; ``fourier`` for any K with equal conjugate pairs.
    n_per_class : int
        Examples of a class: logits see ``s / sqrt(n)``.

    Raises
    ------
    InputError
        If K does not suit the basis, balanced modes are not positive, or conjugate pairs differ.

    Examples
    --------
    >>> flow = spectral_flow(np.array([0.1, 0.1, 0.4]), t_max=1e6)
    >>> bool((np.diff(flow.lyapunov) <= 1e-12).all()), bool(flow.loss[-1] < 1e-4)
    (True, True)
    """
    if n_per_class < 1 or not t_max > 0:
        raise InputError(f"n_per_class={n_per_class}, t_max={t_max}: at least 1, and a positive time, are needed")
    if isinstance(s0, tuple):
        a, b = (np.asarray(v, dtype=float) for v in s0)
        if a.shape != b.shape:
            raise InputError(f"a0 has shape {a.shape} and b0 {b.shape}: one of each a mode")
    else:
        s0 = np.asarray(s0, dtype=float)
        if not (s0 >= 0).all():
            raise InputError(f"mode {int(np.argmin(s0)) + 1} is {s0.min():g}: balanced modes are positive (0 for none)")
        a = b = np.sqrt(s0)
    k = check_modes(a * b, basis)
    check_modes(a, basis)
    if loss == "squared":
        if n_per_class > 1 or not np.array_equal(a, b):
            raise InputError('loss="squared" has its closed form for balanced layers and one example a class')
        return _squared(a * b, k, t_max, basis)
    if loss != "ce":
        raise InputError(f"loss={loss!r}: 'ce' or 'squared'")
    root = math.sqrt(n_per_class)
    log_time, sigma = _integrate(a + b, a - b, k, math.log(t_max / root), basis, root)
    balanced = bool(np.array_equal(a, b))
    return _recorded(log_time + math.log(root), sigma * root, sigma, basis, certified=balanced, root=root)


def _integrate(
    plus: np.ndarray, minus: np.ndarray, k: int, log_end: float, basis: Basis, root: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return log t (T,) and sigma = s / root (T, K - 1), until log t passes ``log_end``."""
    from scipy.integrate import solve_ivp

    active = (plus != 0) | (minus != 0)  # a mode that is not there never comes

    def modes(theta: np.ndarray) -> np.ndarray:
        return ((plus * np.exp(theta)) ** 2 - (minus * np.exp(-theta)) ** 2) / (4 * root)

    def slope(_: float, theta: np.ndarray) -> np.ndarray:
        wrong = logit_vector(modes(theta), basis)[1:]
        q = np.concatenate([[0.0], softmax(wrong)])
        return active * (1 - characters_sum(q, basis)[1:]) / k

    def log_dt(theta: np.ndarray) -> np.ndarray:
        """-log(1 - p_0) of states (..., K - 1)."""
        z = logit_vector(modes(theta), basis)
        wrong = logsumexp(z[..., 1:])
        return np.logaddexp(z[..., 0], wrong) - wrong

    nodes, weights = np.polynomial.legendre.leggauss(4)
    chunk = k / 8  # of tau: the fastest mode grows by a factor of about e^(1/4)
    theta = np.zeros(k - 1)
    log_time, states = [-np.inf], [theta]
    while log_time[-1] < log_end:
        solved = solve_ivp(slope, (0, chunk), theta, method="LSODA", rtol=1e-9, atol=1e-12, dense_output=True)
        if not solved.success:
            raise InputError(f"the flow could not be followed beyond t = e^{log_time[-1]:.1f}: {solved.message}")
        edges = np.linspace(0, chunk, INTERVALS + 1)
        half = chunk / INTERVALS / 2
        inside = (edges[:-1, None] + half * (1 + nodes)).reshape(-1)
        logs = log_dt(solved.sol(inside).T).reshape(INTERVALS, 4)
        steps = logsumexp(logs + np.log(weights * half))  # log of the time each interval takes
        passed = np.logaddexp.accumulate(np.concatenate([[log_time[-1]], steps]))[1:]
        at = np.arange(RECORDED - 1, INTERVALS, RECORDED)
        if passed[-1] >= log_end:  # end on the record after log_end
            last = int(np.argmax(passed >= log_end))
            at = np.unique([*at[at < last], last])
        log_time += passed[at].tolist()
        states += list(solved.sol(edges[1:][at]).T)
        grown = float((solved.y[:, -1] - theta).max())
        theta = solved.y[:, -1]
        chunk *= min(4.0, max(0.5, 0.125 / max(grown, 1e-300)))  # a flow that stands still is followed in long strides
    return np.array(log_time), modes(np.array(states))


def _squared(s0: np.ndarray, k: int, t_max: float, basis: Basis) -> SpectralFlow:
    """ds/dt = (2/K) s (1 - s): s = s0 / (s0 + (1 - s0) e^{-2t/K})."""
    log_time = np.concatenate([[-np.inf], np.linspace(min(-3.0, math.log(t_max) - 1), math.log(t_max), 400)])
    shrunk = np.exp(-2 / k * np.exp(log_time))[:, None]
    s = s0 / (s0 + (1 - s0) * shrunk)
    nothing = np.full(len(log_time), np.nan)
    loss = 0.5 * ((1 - s) ** 2).sum(1) / k
    return SpectralFlow(log_time, s, lyapunov(s), loss, nothing, nothing, nothing, basis)


def _recorded(
    log_time: np.ndarray, s: np.ndarray, sigma: np.ndarray, basis: Basis, *, certified: bool, root: float
) -> SpectralFlow:
    loss = cross_entropy(sigma, basis)
    positive = (sigma > 0).all(1)
    v = np.full(len(s), np.inf)
    v[positive] = lyapunov(sigma[positive])
    rate, bound, loss_bound = (np.full(len(s), np.nan) for _ in range(3))
    if certified and positive.all():
        mean = sigma.mean(1, keepdims=True)
        speed = ce_mode_rates(sigma, basis) / root
        rate = (speed / mean).mean(1) - (speed / sigma).mean(1)
        bound = (
            -2
            / (sigma.shape[1] * mean[:, 0] * root)
            * (loss - cross_entropy(np.broadcast_to(mean, sigma.shape), basis))
        )
        loss_bound = _mirror_descent_bound(sigma[0], log_time - math.log(root), basis)
    return SpectralFlow(log_time, s, v, loss, rate, bound, loss_bound, basis)


def _mirror_descent_bound(start: np.ndarray, log_time: np.ndarray, basis: Basis) -> np.ndarray:
    """Return min over c of L(c 1) + D(c 1, start) / (2 t), D(u, s) = sum u log(u / s) - u + s, at every time."""
    c = np.geomspace(1e-2, 1e3, 2000)
    level = cross_entropy(np.repeat(c[:, None], len(start), axis=1), basis)  # (2000,)
    apart = (c[:, None] * np.log(c[:, None] / start) - c[:, None] + start).sum(1)
    with np.errstate(over="ignore"):
        return np.min(level + apart * np.exp(-log_time[:, None]) / 2, axis=1)


def time_to_collapse(s0: np.ndarray, eps: float, *, basis: Basis = "hadamard", t_max: float = 1e300) -> float:
    """Return the natural logarithm of the time at which V first falls below ``eps``; inf if not by ``t_max``.

    >>> round(time_to_collapse(np.array([0.2, 0.2, 0.1]), 0.01) / math.log(10), 1)
    1.2
    """
    if not eps > 0:
        raise InputError(f"eps={eps}: positive; V reaches 0 only in the limit")
    v0 = float(lyapunov(np.asarray(s0, dtype=float)))
    if v0 < eps:
        return -math.inf
    if math.isinf(v0):  # a mode that is not there never comes
        return math.inf
    end = min(t_max, 1e3)
    while True:
        flow = spectral_flow(s0, t_max=end, basis=basis)
        below = np.flatnonzero(flow.lyapunov < eps)
        if len(below):
            i = int(below[0])
            if i == 1:
                return float(flow.log_time[1])
            v, t = np.log(flow.lyapunov[i - 1 : i + 1]), flow.log_time[i - 1 : i + 1]
            return float(np.interp(-math.log(eps), -v, t))
        if end >= t_max:
            return math.inf
        end = t_max if end > t_max**0.5 else end**2
