"""Softmax cross-entropy as a loss of one number an example, its margin, and what that does to its curvature.

For logits z in R^K with the true class y and p = softmax(z), let q be p among the competitors alone (q_y = 0) and

    m = z_y - logsumexp of the other logits,    loss = softplus(-m),    p_y = sigmoid(m),    grad m = e_y - q.

The Hessian by the logits then splits into the curvature along the margin, of rank one, and the covariance among the
competitors, of rank K - 2, both positive semidefinite:

    diag(p) - p p' = s (e_y - q)(e_y - q)' + (1 - p_y)(diag(q) - q q'),    s = p_y (1 - p_y).

Fast Gauss-Newton keeps the first term.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fairtrial.errors import InputError

INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


class Margins(NamedTuple):
    """The margin form of N examples.

    Attributes
    ----------
    margin : (N,)
        m, in nats: positive where the true class has more than half of the probability.
    slope : (N, K)
        The gradient e_y - q of the margin by the logits.
    """

    margin: Tensor
    slope: Tensor

    @property
    def weight(self) -> Tensor:
        """(N,) s = p_y (1 - p_y), the curvature of the loss along the margin, at most 1/4."""
        return torch.sigmoid(self.margin) * torch.sigmoid(-self.margin)

    @property
    def residual(self) -> Tensor:
        """(N,) -(1 - p_y), the derivative of the loss by the margin."""
        return -torch.sigmoid(-self.margin)


def margins(logits: Tensor, labels: Tensor) -> Margins:
    """Return the margins of ``logits`` (N, K) for the true classes ``labels`` (N,), and their slopes; differentiable.

    Source: Fast Gauss-Newton, the exact scalar-margin form of softmax cross-entropy. 1 - p_y is never formed by a
    subtraction, so that margins of either sign and any size keep their digits.

    >>> m, slope = margins(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0]))
    >>> m, slope
    (tensor([0.5924]), tensor([[ 1.0000, -0.6652, -0.2447, -0.0900]]))
    """
    true = labels[:, None]
    competitors = logits.scatter(1, true, -torch.inf)
    slope = -competitors.softmax(1)
    one = torch.ones_like(true, dtype=logits.dtype)
    return Margins(logits.gather(1, true)[:, 0] - competitors.logsumexp(1), slope.scatter(1, true, one))


def split_softmax_hessian(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of the softmax Hessian that Fast Gauss-Newton keeps, and the part that it drops.

    Parameters
    ----------
    logits : (N, K) tensor
    labels : (N,) tensor of integers in 0..K-1

    Returns
    -------
    kept, dropped : (N, K, K) each
        Their sum is ``diag(p) - p p'``. Kept has rank 1 and trace ``s (1 + |q|^2)``, dropped has rank K - 2 and trace
        ``(1 - p_y)(1 - |q|^2)``. Differentiable, in the dtype of the logits.

    Raises
    ------
    InputError
        If shapes or labels do not fit, or there is one class only.

    Notes
    -----
    Source: Fast Gauss-Newton, the decomposition of the softmax covariance into a true-versus-rest term and the
    covariance among competitors.

    Examples
    --------
    >>> kept, dropped = split_softmax_hessian(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0]))
    >>> kept[0].trace(), dropped[0].trace()
    (tensor(0.3464), tensor(0.1743))
    """
    if not (torch.is_tensor(logits) and torch.is_tensor(labels)):
        raise InputError("the logits and labels are no tensors: give torch.as_tensor of them")
    if logits.dim() != 2:
        raise InputError(f"the logits have shape {tuple(logits.shape)}: give (N, K), N examples of K classes")
    check_labels(labels, logits)
    check_finite(logits)
    labels = labels.long()
    found = margins(logits, labels)
    c = found.slope
    kept = found.weight[:, None, None] * c[:, :, None] * c[:, None, :]
    q = -c.scatter(1, labels[:, None], 0.0)
    dropped = -found.residual[:, None, None] * (torch.diag_embed(q) - q[:, :, None] * q[:, None, :])
    return kept, dropped


def check_labels(labels: Tensor, logits: Tensor, ignore_index: int | None = None) -> None:
    """Refuse labels that name no single true class for each row of the logits (..., K)."""
    classes = logits.shape[-1] if logits.dim() else 0
    if classes < 2:
        raise InputError(f"the logits have shape {tuple(logits.shape)}: the last axis is the classes, at least two")
    if not logits.is_floating_point():
        raise InputError(f"the logits are {logits.dtype}: give floating-point numbers")
    if labels.dtype not in INTEGERS or labels.shape == logits.shape:
        raise InputError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}: Fast Gauss-Newton needs the single true "
            "class of each example as an integer; soft targets, mixup and label smoothing have none"
        )
    if labels.shape != logits.shape[:-1]:
        raise InputError(
            f"the labels have shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}: give labels of "
            f"shape {tuple(logits.shape[:-1])}"
        )
    if labels.device != logits.device:
        raise InputError(f"the labels are on {labels.device}, the logits on {logits.device}: put them on one device")
    wrong = (labels < 0) | (labels >= classes)
    if ignore_index is not None:
        wrong &= labels != ignore_index
    if bool(wrong.any()):
        raise InputError(
            f"label {int(labels[wrong][0])} is none of the classes 0..{classes - 1}"
            + ("" if ignore_index is None else f" nor ignore_index={ignore_index}")
        )


def check_finite(logits: Tensor) -> None:
    """Refuse logits (N, K) of which some are not finite."""
    finite = torch.isfinite(logits.detach()).all(1)
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        raise InputError(
            f"the logits of example {first} are not finite: check the input, or restore an earlier state and raise "
            "damping"
        )
