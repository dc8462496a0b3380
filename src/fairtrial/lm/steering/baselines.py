"""What anchor coordinates are compared with: linear maps between two models' states of the same anchors."""

from __future__ import annotations

import torch


def ridge_map(
    source: torch.Tensor, target: torch.Tensor, direction: torch.Tensor, *, ridge: float = 0.1
) -> torch.Tensor:
    """Carry a direction by the ridge regression of the source's states on the target's.

    Parameters
    ----------
    source, target
        (N, d_s) and (N, d_t): states of the anchors.
    direction
        (d_s,).
    ridge
        In units of the mean squared length of the target's centred states.

    Returns
    -------
    torch.Tensor
        (d_t,) float64 of length 1: a state's product with it is that of its image with ``direction``.
    """
    x, y = (states.double() - states.double().mean(0) for states in (target, source))
    gram = x @ x.T  # (N, N)
    weights = torch.linalg.solve(
        gram + ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype), y @ direction.double()
    )
    carried = x.T @ weights
    return carried / carried.norm()


def procrustes_map(source: torch.Tensor, target: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Carry a direction by the best rotation of the target's states onto the source's; see :func:`ridge_map`."""
    x, y = (states.double() - states.double().mean(0) for states in (target, source))
    left, _, right = torch.linalg.svd(x.T @ y, full_matrices=False)  # (d_t, k), (k, d_s)
    carried = left @ (right @ direction.double())
    return carried / carried.norm()
