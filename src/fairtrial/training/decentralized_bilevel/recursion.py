"""The recursion of a node: variance-reduced estimate, tracker, normalised step. No problem and no network in here.

All tensors are (..., P): any leading dimensions, nodes among them, then the entries of the blocks x, y, z side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairtrial.errors import InputError

RESET_EVERY = 200  # steps after which the tracker starts anew from the estimates, against rounding
SPIKE = 1e6  # an estimate this many times its running median lets the tracker start anew at once
MEMORY = 64  # steps of the running median

Combine = Callable[[Tensor, float], Tensor]
"""Maps estimated pieces (..., Q) and the penalty to the gradients of the blocks (..., P)."""


class Recursion:
    """Normalised variance-reduced steps with gradient tracking, over nodes that somebody else lets talk.

    With pieces G (..., Q) of the gradient at the *same* sample before and after the last step,

        m_t = G(w_t) + (1 - a_t) (m_{t-1} - G(w_{t-1}))                               (STORM)
        s_t = W (s_{t-1} + C(m_t) - C(m_{t-1})),     w_{t+1} = W w_t - eta_t s_t / |s_t|,  block by block,

    where C combines the pieces into gradients with the penalty of the step, and a_t = (t+1)^(-p/(2p-1)),
    eta_t = eta_0 a_t. The caller multiplies by W.

    Parameters
    ----------
    w : (..., P) tensor
        The variables at the start.
    sizes : three ints
        Lengths of the blocks x, y, z; their sum is P.
    rates : three floats
        eta_0 of each block: the length of the first step.
    combine : callable
        C above.
    p : float
        Moment of the noise that is finite, in (1, 2].
    """

    evaluations = 2
    """Gradient evaluations of a step."""
    tracks = True
    """Whether what is stepped along is exchanged."""

    def __init__(self, w: Tensor, sizes: Sequence[int], rates: Sequence[Any], combine: Combine, p: float = 1.5) -> None:
        if not 1 < p <= 2:
            raise InputError(f"p={p:g}: the finite moment of the noise lies in (1, 2]")
        self.w, self.before = w, w
        self.sizes, self.rates, self.combine, self.p = list(sizes), list(rates), combine, p
        self.m: Tensor | None = None  # estimated pieces (..., Q)
        self.g = torch.zeros_like(w, dtype=torch.float64)  # C(m): the tracker is float64 whatever the model
        self.change = self.g  # C(m_t) - C(m_{t-1})
        self.s = self.g
        self.norms: list[Tensor] = []  # of the latest estimates, (..., 1)
        self.least = torch.full_like(w[..., :1], torch.inf, dtype=torch.float64)  # of all norms: below any median

    def decay(self, t: int) -> float:
        """Return a_t, which is eta_t / eta_0 as well."""
        return (t + 1) ** (-self.p / (2 * self.p - 1))

    def mixing_in(self, t: int) -> float:
        """Return a_t, the weight of the new sample."""
        return self.decay(t)

    def estimate(self, now: Tensor, before: Tensor, t: int, penalty: float) -> None:
        """Take the pieces (..., Q) of one sample at the variables and at those of the step before."""
        self.m = now if self.m is None else self.updated(self.m, now, before, self.mixing_in(t))
        g = self.combine(self.m, penalty).double()
        self.change, self.g = g - self.g, g
        norm = g.norm(dim=-1, keepdim=True)
        self.norms = [*self.norms[1 - MEMORY :], norm]
        self.least = torch.minimum(self.least, norm)

    def updated(self, m: Tensor, now: Tensor, before: Tensor, a: float) -> Tensor:
        """Return the new estimate of the pieces."""
        return (m - before).mul_(1 - a).add_(now)

    def spikes(self) -> Tensor:
        """Return which nodes' estimates exceed a million times their running median, (..., 1) bool."""
        suspects = self.norms[-1] > SPIKE * self.least
        if not suspects.any():
            return suspects
        return self.norms[-1] > SPIKE * torch.cat(self.norms, -1).median(-1, keepdim=True).values

    def offer(self, reset: bool | Tensor) -> Tensor:
        """Return what the node gives to the mixing that makes the tracker, (..., P) float64."""
        if reset is True:
            return self.g
        offered = self.s + self.change
        return offered if reset is False else torch.where(reset, self.g, offered)

    def move(self, w: Tensor, s: Tensor, t: int, still: Sequence[int] = ()) -> None:
        """Step from the mixed variables ``w`` along the mixed tracker ``s``; the blocks ``still`` do not move."""
        self.before, self.s = self.w, s
        scale = self.decay(t)
        self.w = w.clone()
        for b, (rows, block) in enumerate(zip(*(v.split(self.sizes, -1) for v in (self.w, s)), strict=True)):
            if b not in still:
                rows.sub_((self.direction(block) * (scale * self.rates[b])).to(w.dtype))

    def direction(self, s: Tensor) -> Tensor:
        """Return the direction (..., P_b) of a block."""
        return s / (s.norm(dim=-1, keepdim=True) + 1e-12)

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` needs to go on from here."""
        return {name: getattr(self, name) for name in ("w", "before", "m", "g", "s", "norms", "least", "rates", "p")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        for name, value in state.items():
            setattr(self, name, value)
        self.change = torch.zeros_like(self.g)


def first_estimate(samples: Tensor, lengths: Sequence[int], p: float) -> Tensor:
    """Return the first estimate (..., Q) of K samples (K, ..., Q): their mean, for p < 1.5 that of median norm."""
    return lower_median(samples, lengths) if p < 1.5 else samples.mean(0)


def lower_median(samples: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return of K samples (K, ..., Q) the one of median norm, node by node and piece by piece, (..., Q).

    >>> lower_median(torch.tensor([[[1.0]], [[-9.0]], [[2.0]], [[5.0]]]), [1])
    tensor([[2.]])
    """
    chosen = []
    for piece in samples.split(list(lengths), -1):
        norm = piece.norm(dim=-1, keepdim=True)  # (K, ..., 1)
        at = norm.median(0, keepdim=True).indices  # of an even number, the lower of the two in the middle
        chosen.append(piece.gather(0, at.expand(1, *piece.shape[1:]))[0])
    return torch.cat(chosen, -1)
