"""Class modes: the basis in which softmax is diagonal, and what cross-entropy does to each mode.

Classes are the elements d of an abelian group, modes its real characters chi_m. A logit matrix Z = U diag(s) U' in
that basis has z_{i - j} for entries, so that all columns share one softmax normalizer and the probabilities are
U diag(pi) U' with pi_m = E_p[chi_m]. For K = 2^k the group is F_2^k and U the Sylvester-Hadamard matrix
(``basis="hadamard"``); for any K the cyclic group serves (``"fourier"``), if the two members of a conjugate pair m and
K - m carry the same s.

Every function here takes numpy arrays or torch tensors, gives back the same kind, and is differentiable in torch.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from fairtrial.errors import InputError

Array: TypeAlias = Any
Basis: TypeAlias = Literal["hadamard", "fourier"]


def walsh_hadamard(x: Array, dim: int = -1) -> Array:
    """Return the orthonormal Walsh-Hadamard transform along ``dim``, in O(K log K); it is its own inverse.

    Raises
    ------
    InputError
        If the length is no power of 2.

    >>> walsh_hadamard(np.array([1.0, 0.0, 0.0, 0.0]))
    array([0.5, 0.5, 0.5, 0.5])
    """
    return _hadamard(x, dim) / x.shape[dim] ** 0.5


def _hadamard(x: Array, dim: int = -1) -> Array:
    k = x.shape[dim]
    if k & (k - 1) or k == 0:
        raise InputError(
            f"{k} is no power of 2, which the Hadamard basis needs: take {1 << k.bit_length()} classes, or "
            'basis="fourier"'
        )
    axis = dim % x.ndim
    shape = tuple(x.shape)
    half = 1
    while half < k:
        y = x.reshape((*shape[:axis], k // (2 * half), 2, half, *shape[axis + 1 :]))
        even, odd = (y[(slice(None),) * (axis + 1) + (i,)] for i in (0, 1))  # (..., k / 2half, half, ...)
        x = _stack(even + odd, even - odd, axis + 1).reshape(shape)
        half *= 2
    return x


def characters_sum(x: Array, basis: Basis) -> Array:
    """Return ``sum_d x_d chi_m(d)`` for every mode m, along the last axis (of a vector even in d, for ``fourier``)."""
    if basis == "hadamard":
        return _hadamard(x)
    if isinstance(x, np.ndarray):
        return np.fft.fft(x).real
    import torch

    return torch.fft.fft(x).real


def logit_vector(s: Array, basis: Basis = "hadamard") -> Array:
    """Return the logits z_d (..., K) of the modes ``s`` (..., K - 1), up to a constant: ``Z_ij = z_{i - j}``."""
    return characters_sum(_pad(s), basis) / (s.shape[-1] + 1)


def ce_mode_rates(s: Array, basis: Basis = "hadamard") -> Array:
    """Return ``ds/dt`` (..., K - 1) of balanced gradient flow on cross-entropy: ``(2 / K) s (1 - pi(s))``.

    >>> ce_mode_rates(np.array([1.0]))  # K = 2: 2 s / (1 + e^s)
    array([0.53788284])
    """
    k = s.shape[-1] + 1
    p = softmax(logit_vector(s, basis))
    return (2 / k) * s * (1 - characters_sum(p, basis)[..., 1:])


def lyapunov(s: Array) -> Array:
    """Return V = log mean s - mean log s (...), the divergence of the uniform distribution from the normalized modes.

    It is 0 at neural collapse and nowhere else, infinite where a mode is 0, and falls along the flow.

    >>> float(lyapunov(np.array([2.0, 2.0, 2.0]))), float(lyapunov(np.array([1.0, 0.0])))
    (0.0, inf)
    """
    if isinstance(s, np.ndarray):
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(s.mean(-1)) - np.log(s).mean(-1), 0.0)
    return (s.mean(-1).log() - s.log().mean(-1)).clamp_min(0.0)


def cross_entropy(s: Array, basis: Basis = "hadamard") -> Array:
    """Return the loss L (...) of the modes ``s`` (..., K - 1): log sum_d exp(z_d - z_0)."""
    z = logit_vector(s, basis)
    return logsumexp(z - z[..., :1])


def softmax(z: Array) -> Array:
    """Return the softmax along the last axis."""
    if isinstance(z, np.ndarray):
        e = np.exp(z - z.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return z.softmax(-1)


def logsumexp(z: Array) -> Array:
    """Return log sum exp along the last axis."""
    if isinstance(z, np.ndarray):
        top = z.max(-1)
        return top + np.log(np.exp(z - top[..., None]).sum(-1))
    return z.logsumexp(-1)


def _pad(s: Array) -> Array:
    """Put the constant mode, which softmax does not see, before the others."""
    if isinstance(s, np.ndarray):
        return np.concatenate([np.zeros_like(s[..., :1]), s], axis=-1)
    import torch

    return torch.cat([torch.zeros_like(s[..., :1]), s], dim=-1)


def _stack(a: Array, b: Array, axis: int) -> Array:
    if isinstance(a, np.ndarray):
        return np.stack([a, b], axis=axis)
    import torch

    return torch.stack([a, b], dim=axis)


def check_modes(modes: np.ndarray, basis: Basis) -> int:
    """Return K for K - 1 modes, and refuse what the basis cannot hold."""
    k = len(modes) + 1
    if modes.ndim != 1 or k < 2 or not np.isfinite(modes).all():
        raise InputError(f"modes of shape {modes.shape}: K - 1 finite numbers are needed, the constant mode left out")
    if basis == "hadamard" and k & (k - 1):
        raise InputError(
            f'{k} classes are no power of 2, which basis="hadamard" needs: take {1 << (k.bit_length() - 1)} or '
            f'{1 << k.bit_length()}, or basis="fourier"'
        )
    if basis == "fourier":
        other = modes[::-1]  # mode m pairs with K - m
        if not np.allclose(modes, other, rtol=1e-9, atol=0):
            m = int(np.argmax(~np.isclose(modes, other, rtol=1e-9, atol=0))) + 1
            raise InputError(
                f"modes {m} and {k - m} are a conjugate pair and must be equal: {modes[m - 1]}, {other[m - 1]}"
            )
    if basis not in ("hadamard", "fourier"):
        raise InputError(f"basis={basis!r}: 'hadamard' or 'fourier'")
    return k
