"""How much a weight matters to its own layer: the metrics that one-shot pruning methods are known by.

An intra-layer metric is any object with ``scores(weight, stats) -> Tensor``: weight and scores are (out, in), scores
are non-negative, ``stats`` holds ``x_norm`` (in,), ``n_tokens`` and, if the object's ``needs_hessian`` is true,
``hessian`` (in, in). :class:`SparseGPT` also moves the error of each pruned weight onto the weights still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.seeds import torch_generator

if TYPE_CHECKING:
    from fairtrial.causal_lm.statistics import LinearStatistics


class IntraMetric(Protocol):
    """A local importance of every weight of one matrix."""

    def scores(self, weight: Tensor, stats: LinearStatistics) -> Tensor:
        """Return the importance of every weight, (out, in), non-negative."""
        ...


@dataclass(frozen=True)
class Magnitude:
    """|W|."""

    def scores(self, weight: Tensor, stats: LinearStatistics) -> Tensor:
        """Return |W|, (out, in)."""
        return weight.abs().float()


@dataclass(frozen=True)
class Wanda:
    """|W_ij| ||x_j||_2 (Sun et al., A simple and effective pruning approach for large language models).

    >>> from types import SimpleNamespace
    >>> Wanda().scores(torch.tensor([[1.0, -2.0]]), SimpleNamespace(x_norm=torch.tensor([3.0, 1.0])))
    tensor([[3., 2.]])
    """

    def scores(self, weight: Tensor, stats: LinearStatistics) -> Tensor:
        """Return |W_ij| ||x_j||, (out, in)."""
        return weight.abs().float() * stats.x_norm


@dataclass(frozen=True)
class RIA:
    """(|W| / row sum + |W| / column sum) ||x_j||^exponent: relative importance and activations (Zhang et al.).

    ``exponent`` = 1 is the control *degree-intra* of FiedlerPrune: a weight relative to the degrees of its own layer
    alone, with Wanda's full activation.
    """

    exponent: float = 0.5

    def scores(self, weight: Tensor, stats: LinearStatistics) -> Tensor:
        """Return the relative importance, (out, in)."""
        magnitude = weight.abs().float()
        tiny = torch.finfo(torch.float32).tiny
        row, column = magnitude.sum(1, keepdim=True).clamp(min=tiny), magnitude.sum(0).clamp(min=tiny)
        return (magnitude / row + magnitude / column) * stats.x_norm**self.exponent


@dataclass(frozen=True)
class Random:
    """Uniform scores: the mask any metric must beat. A matrix has its own stream, told apart by its first weights."""

    seed: int = 0

    def scores(self, weight: Tensor, stats: LinearStatistics) -> Tensor:
        """Return uniform draws, (out, in)."""
        generator = torch_generator(self.seed, tuple(weight.shape), weight.flatten()[:8].tolist())
        return torch.rand(weight.shape, generator=generator).to(weight.device)


@dataclass(frozen=True)
class RowScaled:
    """A metric divided by the mean of its row to a power: rows compete on nearly equal terms, without any graph.

    With ``power`` .75 and all matrices of a block under one threshold this is the control *block-norow*.
    """

    metric: IntraMetric
    power: float = 0.75

    def scores(self, weight: Tensor, stats: LinearStatistics) -> Tensor:
        """Return S / mean_j(S)^power, (out, in)."""
        scores = self.metric.scores(weight, stats)
        return scores / scores.mean(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny) ** self.power


@dataclass(frozen=True)
class SparseGPT:
    """W^2 / [H^-1]_jj with the optimal-brain-surgeon update (Frantar and Alistarh, SparseGPT).

    The inputs are visited in blocks of ``width`` columns: the mask of a block is chosen from the weights as updated so
    far, then the error of every zeroed weight is spread over the columns still to come.

    Parameters
    ----------
    damping
        Added to the diagonal of H = X'X, as a share of its mean.
    width
        Columns a mask is chosen for at once.
    """

    damping: float = 0.01
    width: int = 128
    needs_hessian = True

    def scores(self, weight: Tensor, stats: LinearStatistics) -> Tensor:
        """Return W^2 / [H^-1]_jj, (out, in): the loss of zeroing each weight alone, all others free to compensate."""
        return weight.float().square() / self._factor(stats.hessian).square().sum(0)

    def reconstruct(
        self,
        weight: Tensor,
        stats: LinearStatistics,
        choose: Callable[[Tensor, slice], Tensor],
        step: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Prune and update one matrix.

        Parameters
        ----------
        weight
            (out, in).
        stats
            With ``hessian`` (in, in), the sum of x x' over tokens; any positive multiple gives the same result.
        choose
            Called with the scores (out, w) of a block of columns and its slice; returns the mask of weights to keep.
        step
            Columns a choice covers; ``None`` = ``width``. The M of an N:M pattern.

        Returns
        -------
        weight, keep
            The updated weights, float32 (out, in), zero where ``keep`` is false.
        """
        step = step or self.width
        width = step * max(1, self.width // step)  # columns between two updates of all the rest
        factor = self._factor(stats.hessian)  # upper U, H^-1 = U'U: row j holds the update of column j
        weight = weight.float().clone()
        n_in = weight.shape[1]
        keep = torch.ones_like(weight, dtype=torch.bool)
        for start in range(0, n_in, width):
            stop = min(start + width, n_in)
            error = weight.new_zeros(len(weight), stop - start)
            for j in range(start, stop):
                if (j - start) % step == 0:
                    columns = slice(j, min(j + step, stop))
                    saliency = weight[:, columns].square() / factor.diagonal()[columns].square()
                    keep[:, columns] = choose(saliency, columns)
                kept = weight[:, j] * keep[:, j]
                error[:, j - start] = (weight[:, j] - kept) / factor[j, j]
                weight[:, j] = kept
                weight[:, j + 1 : stop].addr_(error[:, j - start], factor[j, j + 1 : stop], alpha=-1)
            weight[:, stop:].addmm_(error, factor[start:stop, stop:], alpha=-1)
        return weight, keep

    def _factor(self, hessian: Tensor) -> Tensor:
        """Return the upper Cholesky factor of (H + damping)^-1; an input that is never active gets a unit diagonal."""
        hessian = hessian.float()
        diagonal = hessian.diagonal()
        dead = diagonal == 0
        mean = diagonal.mean()
        lift = torch.where(dead, mean if mean > 0 else 1.0, self.damping * mean)
        try:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian + torch.diag(lift)))
            return torch.linalg.cholesky(inverse, upper=True)
        except torch.linalg.LinAlgError:
            raise InputError(
                f"the Hessian of {len(hessian)} inputs cannot be inverted with damping={self.damping}: give more "
                "calibration text, or SparseGPT(damping=0.1)"
            ) from None


METRICS: dict[str, IntraMetric] = {
    "magnitude": Magnitude(),
    "wanda": Wanda(),
    "ria": RIA(),
    "sparsegpt": SparseGPT(),
    "random": Random(),
}
"""Metrics by the name ``fairtrial apply`` and ``intra=`` accept."""


def intra_metric(metric: IntraMetric | str) -> IntraMetric:
    """Return the metric of that name, or the metric itself."""
    if not isinstance(metric, str):
        return metric
    if metric not in METRICS:
        raise UnknownNameError("intra metric", metric, METRICS)
    return METRICS[metric]
