"""What models say where they err: wrong answers of several models fall on the same one more often than by chance."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fairtrial.evaluation.ensemble_selection.answers import as_frame, encode
from fairtrial.evaluation.ensemble_selection.softmax import Floats, Ints

TINY = 1e-300


class Confusion(NamedTuple):
    """Given the class, an item has a distractor; a model that errs says it with probability ``shared``.

    Otherwise the model draws from its own confusion.

    Attributes
    ----------
    own : (M, C, A) P(answer of model j | class, it errs); A = C, or C + 1 where answers are missing
    common : (C, A) P(distractor | class)
    shared : rho; rho^2 is by how much two wrong answers agree more often than by chance
    """

    own: Floats
    common: Floats
    shared: float

    @classmethod
    def fit(cls, answers: Any, classes: np.ndarray, y: Ints) -> Confusion:
        """Estimate the confusion from answers (n, M) and the classes' codes y (n,); one is added to counts."""
        coded = encode(as_frame(answers), classes, abstain=True, most_missing=1.0)
        said = coded.one_hot(range(coded.codes.shape[1]), coded.symbols)  # (M, A, n)
        said[:, y, np.arange(len(y))] = 0.0  # only errors
        counts = (said @ np.eye(len(classes))[y]).transpose(0, 2, 1) + 1.0  # (M, C, A)
        counts[:, range(len(classes)), range(len(classes))] = 0.0
        own = counts / counts.sum(2, keepdims=True)
        common = counts.sum(0) / counts.sum((0, 2))[:, None]
        # Pairs of models that err on an item: how many agree, and how many would by chance.
        votes, wrong = said.sum(0), said.sum(1)  # (A, n), (M, n)
        agree, pairs = (
            (votes * (votes - 1)).sum() / 2,
            (wrong.sum(0) * (wrong.sum(0) - 1)).sum() / 2,
        )
        of_item = own[:, y] * wrong[:, :, None]  # (M, n, A)
        chance = ((of_item.sum(0) ** 2).sum() - (of_item**2).sum()) / 2
        excess = (agree - chance) / (pairs - chance) if pairs - chance > 1e-9 else 0.0
        return cls(own, common, float(np.sqrt(np.clip(excess, 0.0, 0.999))))

    @property
    def certain(self) -> bool:
        """Whether there is one wrong answer only: two classes and no answer missing."""
        return self.own.shape[2] == 2

    def log_likelihood(self, k: int, answers: Ints) -> Floats:
        """Return log P(the wrong answers | class ``k``, which models err), (D,), of answers (D, M)."""
        errs = answers != k
        own = np.log(
            np.maximum(
                (1 - self.shared) * self.own[np.arange(answers.shape[1]), k, answers],
                TINY,
            )
        )
        boost = np.log1p(self.shared * np.exp(-own)) * errs  # an answer that is the distractor is likelier by that
        symbols = range(self.own.shape[2])
        by_symbol = np.stack([(boost * (answers == symbol)).sum(1) for symbol in symbols], axis=1)  # (D, A)
        mixed = by_symbol + np.log(np.maximum(self.common[k], TINY))
        top = mixed.max(1)
        return (own * errs).sum(1) + top + np.log(np.exp(mixed - top[:, None]).sum(1))

    def draw(self, rng: np.random.Generator, y: Ints) -> Ints:
        """Return what each model says to items of classes y (D,) if it errs, (D, M)."""
        distractor = _choice(rng, self.common[y])  # (D,)
        own = np.stack([_choice(rng, one[y]) for one in self.own], axis=1)
        return np.where(rng.random(own.shape) < self.shared, distractor[:, None], own)


def _choice(rng: np.random.Generator, probability: Floats) -> Ints:
    """Return one draw a row of probabilities (D, A)."""
    steps = probability.cumsum(1)
    return (rng.random((len(steps), 1)) * steps[:, -1:] >= steps).sum(1)
