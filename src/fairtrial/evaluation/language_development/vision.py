"""What a model sees and whether its words hold on to it: probes, retrieval, binding, temporal grounding.

Similarities are matrices (frames, texts), of any scorer or learner; what is shown is a boolean matrix of the same axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairtrial.errors import InputError
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import generator

Floats = NDArray[np.float64]


def _numbers(values: ArrayLike, name: str) -> Floats:
    """Return an array of real numbers; refuse a nan, which every comparison would count as a miss."""
    try:
        found = np.asarray(values)
        if found.dtype.kind == "c":
            raise TypeError("complex")
        found = found.astype(float)
    except (TypeError, ValueError):
        raise InputError(f"{name}: give an array of real numbers") from None
    if np.isnan(found).any():
        raise InputError(f"{name} is nan at {tuple(map(int, np.argwhere(np.isnan(found))[0]))}")
    return found


def _finite(values: ArrayLike, name: str) -> Floats:
    """Return an array of finite numbers, as a linear map needs."""
    found = _numbers(values, name)
    if not np.isfinite(found).all():
        raise InputError(f"{name}: give finite numbers")
    return found


def _flags(values: ArrayLike, name: str = "shown") -> NDArray[np.bool_]:
    """Return an array of booleans given as such or as 0 and 1."""
    found = np.asarray(values)
    if found.dtype != bool and not (found.dtype.kind in "iuf" and np.isin(found, (0, 1)).all()):
        raise InputError(f"{name}: give an array of booleans")
    return found.astype(bool)


def linear_probe(features: ArrayLike, shown: ArrayLike, *, folds: int = 5, ridge: float = 1.0) -> Floats:
    """Return how well each label is read off frozen features by a linear map, as the area under the ROC curve.

    Parameters
    ----------
    features : (N, ...) one row a frame, in order of time.
    shown : (N, L) bool, which labels (objects, colours) a frame shows.
    folds : contiguous blocks of time, each predicted from the others: neighbouring frames look alike.
    ridge : penalty, in units of the mean squared standardised feature.

    Returns
    -------
    numpy.ndarray
        (L,) in [0, 1], .5 is chance; nan for a label that always or never shows.

    Raises
    ------
    InputError
        The numbers of rows differ, or are fewer than folds; features that are not numbers, labels not booleans.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> shown = rng.random((200, 2)) < 0.5
    >>> linear_probe(np.c_[shown[:, 0] + 0.1 * rng.normal(size=200), rng.normal(size=200)], shown).round(1)
    array([1. , 0.5])
    """
    x, y = _finite(features, "features"), _flags(shown).astype(float)
    folds, ridge = checked_count(folds, "folds", least=2), checked_number(ridge, "ridge", above=0)
    if x.ndim < 2 or y.ndim != 2:
        raise InputError(f"features {x.shape}, shown {y.shape}: give (N, ...) and (N, L)")
    x = x.reshape(len(x), -1)
    if len(x) != len(y) or len(x) < folds:
        raise InputError(f"{len(x)} rows of features and {len(y)} of labels: give as many of both, at least {folds}")
    predicted = np.empty_like(y)
    for test in np.array_split(np.arange(len(x)), folds):
        train = np.setdiff1d(np.arange(len(x)), test)
        mean, scale = x[train].mean(0), x[train].std(0) + 1e-6
        a, b = (x[train] - mean) / scale, y[train] - y[train].mean(0)
        weights = np.linalg.solve(a.T @ a + ridge * len(train) / 100 * np.eye(a.shape[1]), a.T @ b)
        predicted[test] = (x[test] - mean) / scale @ weights + y[train].mean(0)
    return np.array([_area(predicted[:, j], y[:, j] > 0) for j in range(y.shape[1])])


def _area(score: Floats, positive: NDArray[np.bool_]) -> float:
    """Return the probability that a positive outscores a negative, ties counting half."""
    n, m = int(positive.sum()), int((~positive).sum())
    if not n or not m:
        return float("nan")
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]  # mean ranks from 1
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * m))


class Retrieval(NamedTuple):
    """Share of queries that find something right among their first k, and what chance finds."""

    recall: float
    chance: float
    queries: int


def retrieval(similarity: ArrayLike, shown: ArrayLike, k: int = 1) -> Retrieval:
    """Find frames by texts; all frames that show what a text names are equally right (exchangeable positives).

    Parameters
    ----------
    similarity : (N, T) of frames and texts.
    shown : (N, T) bool.
    k : how many frames a text retrieves. Of frames that tie, the expectation over their order counts.

    Returns
    -------
    Retrieval
        Over the texts that some frame shows; ``chance`` is that of k frames drawn at random.

    Examples
    --------
    >>> shown = np.array([[True, False], [True, False], [False, True]])
    >>> retrieval(np.array([[1.0, 0.9], [0.9, 0.0], [0.0, 0.5]]), shown, k=1)
    Retrieval(recall=0.5, chance=0.5, queries=2)
    """
    scores, right = _numbers(similarity, "similarity"), _flags(shown)
    if scores.ndim != 2 or scores.shape != right.shape:
        raise InputError(f"similarity {scores.shape}, shown {right.shape}: give matrices of one shape")
    k = checked_count(k, "k", most=len(scores))
    asked = right.any(0)
    if not asked.any():
        raise InputError("no text names what a frame shows: there is nothing to retrieve")
    found = [_misses(scores[:, j], right[:, j], k) for j in np.flatnonzero(asked)]
    luck = [_no_right(len(scores), int(right[:, j].sum()), k) for j in np.flatnonzero(asked)]
    return Retrieval(float(1 - np.mean(found)), float(1 - np.mean(luck)), int(asked.sum()))


def _misses(score: Floats, right: NDArray[np.bool_], k: int) -> float:
    """Return the probability that the first k, ties in random order, hold nothing right."""
    last = np.sort(score)[-k]  # the k-th highest
    if (right & (score > last)).any():
        return 0.0
    tied = score == last
    return _no_right(int(tied.sum()), int((right & tied).sum()), k - int((score > last).sum()))


def _no_right(n: int, right: int, k: int) -> float:
    """Return the probability that k of n, drawn without replacement, are none of the ``right`` ones."""
    return float(np.prod([(n - right - i) / (n - i) for i in range(k)])) if n - right >= k else 0.0


class Binding(NamedTuple):
    """Winoground's three scores; guessing gets 1/4, 1/4 and 1/6."""

    text: float
    image: float
    group: float


def binding(similarity: ArrayLike) -> Binding:
    """Tell "a red ball and a blue box" from "a blue ball and a red box" (Winoground; Thrush et al. 2022).

    Parameters
    ----------
    similarity : (n, 2, 2) of images and texts: image i of a pair shows what text i says.

    Returns
    -------
    Binding
        Share of pairs in which each image prefers its text, each text its image, and both. A model that reads texts as
        bags of words ties and gets 0.

    Examples
    --------
    >>> binding([[[0.9, 0.1], [0.2, 0.8]], [[0.9, 0.1], [0.8, 0.7]]])
    Binding(text=0.5, image=1.0, group=0.5)
    """
    s = _numbers(similarity, "similarity")
    if s.ndim != 3 or s.shape[1:] != (2, 2) or not len(s):
        raise InputError(f"similarity has shape {s.shape}: give (pairs, 2 images, 2 texts)")
    text = (s[:, 0, 0] > s[:, 0, 1]) & (s[:, 1, 1] > s[:, 1, 0])
    image = (s[:, 0, 0] > s[:, 1, 0]) & (s[:, 1, 1] > s[:, 0, 1])
    return Binding(float(text.mean()), float(image.mean()), float((text & image).mean()))


def binding_pairs(
    frames: NDArray[np.uint8], *, most: int = 200, seed: int = 0
) -> tuple[NDArray[np.uint8], list[tuple[str, str]]]:
    """Make pairs of BabyAI views that differ only in which of two things has which colour.

    Returns
    -------
    images : (n, 2, 7, 7, 3), a view with two things of different kind and colour, and the same with colours swapped.
    texts : n pairs, what the first and what the second shows.

    Examples
    --------
    >>> view = np.zeros((1, 7, 7, 3), dtype=np.uint8)
    >>> view[0, 1, 1], view[0, 2, 2] = (6, 0, 0), (7, 2, 0)
    >>> binding_pairs(view)[1]
    [('red ball and blue box', 'blue ball and red box')]
    """
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    rng = generator(seed, "binding")
    images: list[NDArray[np.uint8]] = []
    texts: list[tuple[str, str]] = []
    for i in rng.permutation(len(frames)):
        view = frames[i]
        cells = [(x, y) for x, y in np.argwhere(np.isin(view[..., 0], (5, 6, 7)))]
        if len(cells) != 2 or len(texts) == most:
            continue
        one, two = (view[cell] for cell in map(tuple, cells))
        if one[0] == two[0] or one[1] == two[1]:
            continue
        swapped = view.copy()
        swapped[(*cells[0], 1)], swapped[(*cells[1], 1)] = two[1], one[1]
        kinds = [IDX_TO_OBJECT[int(thing[0])] for thing in (one, two)]
        colors = [IDX_TO_COLOR[int(thing[1])] for thing in (one, two)]
        images.append(np.stack([view, swapped]))
        first, second = (f"{a} {kinds[0]} and {b} {kinds[1]}" for a, b in (colors, colors[::-1]))
        texts.append((first, second))
    return np.stack(images) if images else np.zeros((0, 2, *frames.shape[1:]), frames.dtype), texts


class Grounding(NamedTuple):
    """Share of utterances whose best frame shows what they name, and of all frames in their windows that do."""

    hit: float
    base: float
    utterances: int


def temporal_grounding(similarity: ArrayLike, shown: ArrayLike, times: Sequence[int], window: int = 8) -> Grounding:
    """Look for what an utterance names in the frames around it.

    Parameters
    ----------
    similarity : (N, U) of all frames and the utterances.
    shown : (N, U) bool, whether a frame shows what an utterance names.
    times : (U,) the frame at which each is said.
    window : frames before and after that are searched. Frames that tie for the best share the hit.

    Returns
    -------
    Grounding
        Over the utterances that some frame of their window shows, and some does not.

    Examples
    --------
    >>> shown = np.array([[False], [True], [False]])
    >>> temporal_grounding([[0.1], [0.9], [0.2]], shown, [2], window=2).hit
    1.0
    """
    scores, right = _numbers(similarity, "similarity"), _flags(shown)
    if scores.ndim != 2 or scores.shape != right.shape or scores.shape[1] != len(times):
        raise InputError(
            f"similarity {scores.shape}, shown {right.shape}, {len(times)} times: give (N, U), (N, U) and (U,)"
        )
    window = checked_count(window, "window")
    hits, base = [], []
    for u, time in enumerate(times):
        t = checked_count(time, f"times[{u}]", least=0, most=len(scores) - 1)
        around = slice(max(0, t - window), t + window + 1)
        s, r = scores[around, u], right[around, u]
        if r.any() and not r.all():
            hits.append(r[s == s.max()].mean())
            base.append(r.mean())
    if not hits:
        raise InputError("no utterance has frames with and without what it names around it: widen the window")
    return Grounding(float(np.mean(hits)), float(np.mean(base)), len(hits))
