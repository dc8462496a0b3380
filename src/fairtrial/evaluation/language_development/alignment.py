"""How much what is said tells about what is seen: the alignment of any corpus of frames and speech."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairtrial.errors import InputError
from fairtrial.evaluation.language_development.vision import _area, _finite, _flags
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import generator


class Alignment(NamedTuple):
    """Alignment A, the value that shuffled speech gives, and the number of utterances."""

    value: float
    shuffled: float
    utterances: int


def label_alignment(visible: ArrayLike, words: Sequence[str], *, shuffles: int = 20, seed: int = 0) -> Alignment:
    """Return A = I(visible label; word) / H(word), corrected for chance, of frames whose contents are labelled.

    Each utterance is one observation of its word; a frame of m labels spreads it over the pairs with each of them, so
    that several things in view make reference less clear and A smaller. With I0 the mean of I over shuffled speech,
    A = (I - I0) / (H - I0): 0 without alignment and 1 where the view gives the word away.

    Parameters
    ----------
    visible : (U, L) bool, the labels in view when each utterance is made.
    words : (U,) the word each utterance is about.
    shuffles, seed : of the correction.

    Raises
    ------
    InputError
        The lengths differ, or all words are the same.

    Examples
    --------
    >>> view = np.eye(3)[np.arange(90) % 3]
    >>> label_alignment(view, [["dog", "cat", "cow"][i % 3] for i in range(90)]).value
    1.0
    """
    view, shuffles = _flags(visible, "visible").astype(float), checked_count(shuffles, "shuffles")
    if view.ndim != 2 or len(view) != len(words):
        raise InputError(f"views of shape {view.shape} and {len(words)} words: give one view (L,) an utterance")
    kinds, word = np.unique(np.asarray(words), return_inverse=True)
    if len(kinds) < 2:
        raise InputError("all utterances have the same word: its entropy is 0 and alignment is not defined")
    view = np.concatenate([view, view.sum(1, keepdims=True) == 0], axis=1)  # the last label: nothing in view
    view = view / view.sum(1, keepdims=True)
    said = np.eye(len(kinds))[word]  # (U, W)
    share = said.mean(0)
    entropy = float(-(share * np.log(share)).sum())
    rng = generator(seed, "alignment")
    chance = float(np.mean([_information(view[rng.permutation(len(view))], said) for _ in range(shuffles)]))
    value = (_information(view, said) - chance) / (entropy - chance)
    return Alignment(round(float(value), 12), chance / entropy, len(words))


def _information(view: NDArray[np.float64], said: NDArray[np.float64]) -> float:
    """Return I(label; word) in nats of (U, L) shares of labels and (U, W) words."""
    joint = view.T @ said / len(said)
    product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / product[there])).sum())


def retrieval_alignment(
    frames: ArrayLike, texts: ArrayLike, *, folds: int = 5, ridge: float = 1.0, seed: int = 0
) -> Alignment:
    """Return alignment without labels: how far a map from an encoder's frames to its texts lifts retrieval.

    A ridge map from frame to text features is fitted on all blocks of time but one; in the one left out, the
    probability P that an utterance's own frame maps nearer to it than another frame of the block does gives
    A = 2 P - 1: 0 without alignment, 1 where every frame finds its text.

    Parameters
    ----------
    frames : (U, d) features of the frame at each utterance, in order of time.
    texts : (U, e) features of the utterances.
    folds : contiguous blocks of time.
    ridge : penalty, in units of the mean squared standardised feature.
    seed : of the shuffle that ``shuffled`` is made by.

    Raises
    ------
    InputError
        The lengths differ, there are fewer than two blocks, or fewer than two utterances a block.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(200, 4))
    >>> retrieval_alignment(x, x @ rng.normal(size=(4, 3))).value > 0.9
    True
    """
    x, y = _finite(frames, "frames"), _finite(texts, "texts")
    folds, ridge = checked_count(folds, "folds", least=2), checked_number(ridge, "ridge", above=0)
    if x.ndim != 2 or y.ndim != 2:
        raise InputError(f"frames {x.shape}, texts {y.shape}: give (U, d) and (U, e)")
    if len(x) != len(y) or len(x) < 2 * folds:
        raise InputError(f"{len(x)} frames and {len(y)} texts: give as many of both, at least {2 * folds}")
    order = generator(seed, "shuffled").permutation(len(x))
    return Alignment(_lift(x, y, folds, ridge), _lift(x[order], y, folds, ridge), len(x))


def _lift(x: NDArray[np.float64], y: NDArray[np.float64], folds: int, ridge: float) -> float:
    areas = []
    for test in np.array_split(np.arange(len(x)), folds):
        train = np.setdiff1d(np.arange(len(x)), test)
        mean, scale = x[train].mean(0), x[train].std(0) + 1e-9
        a, b = (x[train] - mean) / scale, y[train] - y[train].mean(0)
        weights = np.linalg.solve(a.T @ a + ridge * len(train) / 100 * np.eye(a.shape[1]), a.T @ b)
        predicted, own = (x[test] - mean) / scale @ weights, y[test] - y[train].mean(0)
        cosine = predicted @ own.T
        cosine /= np.linalg.norm(predicted, axis=1)[:, None] * np.linalg.norm(own, axis=1) + 1e-12
        areas += [_area(cosine[:, j], np.arange(len(test)) == j) for j in range(len(test))]
    return float(2 * np.mean(areas) - 1)
