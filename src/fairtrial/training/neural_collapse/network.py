"""The network whose training the spectral flow describes."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator
from fairtrial.training.neural_collapse.modes import Basis, check_modes


def class_basis(num_classes: int, basis: Basis = "hadamard") -> torch.Tensor:
    """Return the orthonormal class modes U (K, K) float64, the constant one first.

    >>> class_basis(2)
    tensor([[ 0.7071,  0.7071],
            [ 0.7071, -0.7071]], dtype=torch.float64)
    """
    k = num_classes
    if basis == "hadamard":
        from scipy.linalg import hadamard

        check_modes(np.ones(k - 1), basis)
        return torch.from_numpy(hadamard(k).astype(float)) / k**0.5
    d = torch.arange(k, dtype=torch.float64)
    angles = 2 * torch.pi * d[:, None] * d / k
    # Mode m by its cosine and K - m by its sine: an orthonormal basis of each conjugate pair.
    return (
        torch.where(d <= k / 2, angles.cos(), angles.sin()) * torch.where((d == 0) | (2 * d == k), 1.0, 2**0.5) / k**0.5
    )


def spectral_network(
    num_classes: int,
    width: int,
    s0: np.ndarray | tuple[np.ndarray, np.ndarray],
    *,
    seed: int = 0,
    basis: Basis = "hadamard",
    n_per_class: int = 1,
    dtype: torch.dtype = torch.float64,
) -> nn.Sequential:
    """Return two bias-free linear layers, spectrally initialized, for inputs in an orthonormal basis.

    Parameters
    ----------
    num_classes : K.
    width : hidden units h; with fewer than the modes that are not 0 the network cannot hold them.
    s0 : (K - 1,) modes, balanced; or (a0, b0) of the two layers.
    seed : of the orthonormal hidden directions R.
    basis : as in :func:`~fairtrial.training.neural_collapse.flow.spectral_flow`.
    n_per_class : the input has ``K n`` coordinates, example i of class j being number ``j n + i``.
    dtype : of the weights.

    Raises
    ------
    InputError
        If there are more modes than hidden units, or they do not suit the basis.

    Examples
    --------
    >>> net = spectral_network(4, 3, np.array([1.0, 2.0, 3.0]))
    >>> z = net(torch.eye(4, dtype=torch.float64)).T.detach()  # logits, a column an example
    >>> torch.linalg.svdvals(z).round(decimals=4)[:3]
    tensor([3., 2., 1.], dtype=torch.float64)
    """
    a, b = (np.asarray(v, float) for v in s0) if isinstance(s0, tuple) else (np.sqrt(np.asarray(s0, float)),) * 2
    if len(a) != num_classes - 1:
        raise InputError(f"{len(a)} modes for {num_classes} classes: one less than classes, the constant left out")
    check_modes(a * b, basis)
    active = np.flatnonzero((a != 0) | (b != 0)) + 1
    if len(active) > width:
        raise InputError(f"{len(active)} modes are not 0 but the width is {width}: set modes to 0 or widen")
    u = class_basis(num_classes, basis)[:, active]  # (K, r)
    noise = torch.randn(width, width, generator=torch_generator(seed, "hidden"), dtype=torch.float64)
    r = torch.linalg.qr(noise).Q[:, : len(active)]  # (h, r)
    inputs = u.repeat_interleave(n_per_class, dim=0) / n_per_class**0.5  # (K n, r)
    net = nn.Sequential(
        nn.Linear(num_classes * n_per_class, width, bias=False), nn.Linear(width, num_classes, bias=False)
    ).to(dtype)
    with torch.no_grad():
        net[0].weight.copy_((r * torch.from_numpy(a[active - 1])) @ inputs.T)
        net[1].weight.copy_((u * torch.from_numpy(b[active - 1])) @ r.T)
    return net
