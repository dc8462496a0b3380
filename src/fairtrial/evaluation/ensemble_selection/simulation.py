"""Simulated pools of models with known errors: blocks of models whose errors share a latent cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from fairtrial.evaluation.ensemble_selection.softmax import Ints


@dataclass(frozen=True)
class Block:
    """Some models whose errors share one latent variable.

    Attributes
    ----------
    models : how many
    errors : (lowest, highest) error, each model's uniform between
    correlation : of the latent variables of two models
    """

    models: int
    errors: tuple[float, float]
    correlation: float


DISTRACTED = 0.7  # share of wrong answers that fall on the item's own distractor, as language models err alike
TWO_FAMILIES = (Block(6, (0.20, 0.24), 0.85), Block(6, (0.28, 0.33), 0.20))


def simulate(
    rng: np.random.Generator, items: int, classes: int, blocks: Sequence[Block] = TWO_FAMILIES
) -> tuple[Ints, Ints]:
    """Return answers (items, M) and labels (items,), classes equally likely.

    Model j of a block errs where sqrt(r) U + sqrt(1 - r) W_j < Phi^-1(e_j), U the block's. A wrong answer is a class
    that the item's models share with chance .7, else any wrong class.

    Examples
    --------
    >>> answers, labels = simulate(np.random.default_rng(0), 4000, 2)
    >>> answers.shape, bool((answers[:, :6] != labels[:, None]).mean() < 0.24)
    ((4000, 12), True)
    """
    y = rng.integers(classes, size=items)
    errs = []
    for block in blocks:
        threshold = ndtri(rng.uniform(*block.errors, size=block.models))
        common = np.sqrt(block.correlation) * rng.standard_normal((items, 1))
        own = np.sqrt(1 - block.correlation) * rng.standard_normal((items, block.models))
        errs.append(common + own < threshold)
    wrong = np.concatenate(errs, axis=1)
    shift = rng.integers(1, classes, size=wrong.shape)
    distractor = rng.integers(1, classes, size=(items, 1))
    shift = np.where(rng.random(wrong.shape) < DISTRACTED, distractor, shift)
    return np.where(wrong, (y[:, None] + shift) % classes, y[:, None]), y
