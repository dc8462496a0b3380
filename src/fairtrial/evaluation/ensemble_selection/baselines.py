"""What greedy information is compared with: other ways to choose k of M models from their answers.

Each function takes codes (n, M) of answers, the labels' codes y (n,), where equal codes are equal answers, and k, and
returns k model indices in the order of choice, so that the first of them are the choice for a smaller k, but for
:func:`cluster_medoids` and :func:`best_subset`, whose choices for different k are unrelated.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection.information import Counts, Information
from fairtrial.evaluation.ensemble_selection.softmax import Floats, Ints
from fairtrial.seeds import generator


def top_accuracy(codes: Ints, y: Ints, k: int) -> list[int]:
    """Return the k most accurate models.

    >>> top_accuracy(np.array([[0, 1], [1, 0], [1, 1]]), np.array([0, 1, 0]), 1)
    [0]
    """
    return np.argsort(-(codes == y[:, None]).mean(0), kind="stable")[:k].tolist()


def forward_selection(codes: Ints, y: Ints, k: int) -> list[int]:
    """Return k models, each the one that makes the majority most accurate (Caruana et al. 2004, none taken twice).

    A tied vote counts by the share of tied answers that are right; among equal ensembles the more accurate model wins.
    """
    said = codes[:, :, None] == np.arange(codes.max() + 1)  # (n, M, A)
    single = (codes == y[:, None]).mean(0)
    votes = np.zeros((len(y), said.shape[2]))
    chosen: list[int] = []
    for _ in range(k):
        after = votes[:, None] + said  # (n, M, A)
        best = after == after.max(2, keepdims=True)
        score = (best[np.arange(len(y)), :, y] / best.sum(2)).mean(0) + 1e-9 * single
        score[chosen] = -np.inf
        chosen.append(int(score.argmax()))
        votes = votes + said[:, chosen[-1]]
    return chosen


def mrmr(codes: Ints, y: Ints, k: int) -> list[int]:
    """Return k models by minimum redundancy, maximum relevance: I(Y; X_j) less the mean I(X_j; X_s) over the chosen."""
    models = range(codes.shape[1])
    empty = Counts(codes, y)
    score = empty.with_each(models).mean(1)
    redundancy = np.zeros(len(models))
    chosen: list[int] = []
    for step in range(k):
        value = score - redundancy / max(step, 1)
        value[chosen] = -np.inf
        chosen.append(int(value.argmax()))
        redundancy += Counts(codes, codes[:, chosen[-1]]).with_each(models).mean(1)
    return chosen


def double_fault(codes: Ints, y: Ints, k: int) -> list[int]:
    """Return k models, from the most accurate on each the one that errs least often together with those chosen."""
    errs = (codes != y[:, None]).astype(float)
    together = errs.T @ errs  # (M, M)
    chosen = [int(errs.sum(0).argmin())]
    while len(chosen) < k:
        value = together[:, chosen].mean(1)
        value[chosen] = np.inf
        chosen.append(int(value.argmin()))
    return chosen


def cluster_medoids(codes: Ints, y: Ints, k: int) -> list[int]:
    """Return the most accurate model of each of k clusters of correlated errors (k-medoids on 1 - correlation).

    Medoids begin as the most accurate model and then the farthest from those chosen, and are exchanged while that
    brings models closer to them.
    """
    errs = (codes != y[:, None]).astype(float)
    spread = errs.std(0)
    centred = (errs - errs.mean(0)) / np.where(spread > 0, spread, 1)
    distance = 1 - centred.T @ centred / len(y)
    accuracy = 1 - errs.mean(0)
    medoids = [int(accuracy.argmax())]
    while len(medoids) < k:
        far = distance[:, medoids].min(1)
        far[medoids] = -np.inf
        medoids.append(int(far.argmax()))
    best = distance[:, medoids].min(1).sum()
    improved = True
    while improved:
        improved = False
        for place in range(k):
            for other in set(range(codes.shape[1])) - set(medoids):
                trial = [*medoids[:place], other, *medoids[place + 1 :]]
                cost = distance[:, trial].min(1).sum()
                if cost < best - 1e-12:
                    medoids, best, improved = trial, cost, True
    owner = distance[:, medoids].argmin(1)
    owner[medoids] = np.arange(k)
    winners = [max(np.flatnonzero(owner == cluster), key=lambda j: accuracy[j]) for cluster in range(k)]
    return sorted(map(int, winners), key=lambda j: -accuracy[j])


def random_models(codes: Ints, y: Ints, k: int, seed: int = 0) -> list[int]:
    """Return k models at random."""
    return generator(seed, "random models").permutation(codes.shape[1])[:k].tolist()


def best_subset(empty: Information, models: int, k: int) -> list[int]:
    """Return the k of M <= 12 models with the largest estimated information, all subsets tried."""
    if models > 12:
        raise InputError(f"{models} models have too many subsets: give at most 12")
    states: dict[tuple[int, ...], Information] = {(): empty}
    best, chosen = -np.inf, list(range(k))
    for head in combinations(range(models), k - 1):
        last = head[-1] if head else -1
        if last == models - 1:
            continue
        for size in range(len(head)):
            if head[: size + 1] not in states:
                states[head[: size + 1]] = states[head[:size]].add(head[size])
        value: Floats = states[head].with_each(range(last + 1, models)).mean(1)
        if value.max() > best:
            best, chosen = float(value.max()), [*head, last + 1 + int(value.argmax())]
    return chosen
