"""What the method is compared with: the same pieces and gossip, other estimates and other steps.

Each follows the schedule of its own theory for noise of finite p-th moment (p = 2 where its theory knows no other).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fairtrial.training.decentralized_bilevel.recursion import Combine, Recursion


class PlainSGD(Recursion):
    """Decentralized stochastic bilevel descent: w <- W w - eta G, eta ~ (t+1)^(-1/2) (Chen, Huang and Ma 2022)."""

    evaluations = 1
    tracks = False

    def decay(self, t: int) -> float:
        """Return eta_t / eta_0."""
        return (t + 1) ** -0.5

    def mixing_in(self, t: int) -> float:
        """Return 1: every estimate is the latest sample."""
        return 1.0

    def updated(self, m: Tensor, now: Tensor, before: Tensor, a: float) -> Tensor:
        """Return the average of samples."""
        return now if a == 1 else torch.lerp(m, now, a)

    def direction(self, s: Tensor) -> Tensor:
        """Return the estimate itself."""
        return s


class Momentum(PlainSGD):
    """The same with a moving average of gradients, of weight 0.1 (as MA-DSBO)."""

    def mixing_in(self, t: int) -> float:
        """Return the weight of the new sample."""
        return 0.1


class ClippedSGD(PlainSGD):
    """The same with each block's gradient clipped to the length ``threshold``."""

    def __init__(
        self,
        w: Tensor,
        sizes: Sequence[int],
        rates: Sequence[Any],
        combine: Combine,
        p: float = 1.5,
        *,
        threshold: Any = 5.0,
    ) -> None:
        super().__init__(w, sizes, rates, combine, p)
        self.threshold = threshold

    def direction(self, s: Tensor) -> Tensor:
        """Return the clipped gradient of a block."""
        return s * (self.threshold / s.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)


class UnnormalisedVR(Recursion):
    """Variance reduction and tracking as in the method, without normalisation (STORM: eta ~ t^(-1/3), a ~ t^(-2/3))."""

    def decay(self, t: int) -> float:
        """Return eta_t / eta_0."""
        return (t + 1) ** (-1 / 3)

    def mixing_in(self, t: int) -> float:
        """Return a_t."""
        return (t + 1) ** (-2 / 3)

    def direction(self, s: Tensor) -> Tensor:
        """Return the tracker itself."""
        return s


class NormalisedMomentum(Recursion):
    """Normalised and tracked as the method, with a moving average instead of variance reduction.

    a ~ t^(-p/(3p-2)), eta ~ t^(-(2p-1)/(3p-2)), for which the gradient falls as T^(-(p-1)/(3p-2)).
    """

    evaluations = 1

    def decay(self, t: int) -> float:
        """Return eta_t / eta_0."""
        return (t + 1) ** (-(2 * self.p - 1) / (3 * self.p - 2))

    def mixing_in(self, t: int) -> float:
        """Return a_t."""
        return (t + 1) ** (-self.p / (3 * self.p - 2))

    def updated(self, m: Tensor, now: Tensor, before: Tensor, a: float) -> Tensor:
        """Return the moving average of samples."""
        return torch.lerp(m, now, a)
