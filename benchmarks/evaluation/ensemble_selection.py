"""Seconds of a greedy selection: all candidates of a step at once, against scikit-learn in a loop. One thread.

The peer asks the same question, the cross-fitted log-likelihood of a softmax regression of the chosen models' answers
and one candidate's, by LogisticRegression and cross_val_predict on the same folds for one candidate after another; it
is given the models chosen here. mlxtend's SequentialFeatureSelector, where installed, does that loop by itself.

python benchmarks/evaluation/ensemble_selection.py
"""

from __future__ import annotations

import importlib.util
import math
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from fairtrial.evaluation.ensemble_selection import MutualInformationSelector
from fairtrial.evaluation.ensemble_selection.answers import Answers
from fairtrial.evaluation.ensemble_selection.information import Variational, columns_of, folds_of
from fairtrial.evaluation.ensemble_selection.simulation import Block, simulate

BLOCKS = (Block(25, (0.20, 0.24), 0.85), Block(25, (0.28, 0.33), 0.20))


def peer_step(design: np.ndarray, own: np.ndarray, y: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """Return the mean log2-likelihood with each candidate's columns (q, n) added, by scikit-learn in a loop."""
    found = []
    for columns in own:
        features = np.concatenate([design, columns.T], axis=1)
        q = cross_val_predict(LogisticRegression(), features, y, cv=PredefinedSplit(fold), method="predict_proba")
        found.append(np.log2(q[np.arange(len(y)), y]).mean())
    return np.array(found)


def main() -> None:
    n, k, classes = 1000, 8, 4
    codes, y = simulate(np.random.default_rng(0), n, classes, BLOCKS)
    models = codes.shape[1]
    answers = Answers(list(range(models)), np.arange(classes), codes)
    hot = answers.one_hot(range(models), classes)
    fold = folds_of(y, 0)
    Variational(answers, y, classes, fold).with_each([0, 1])  # what a first call costs

    print(f"M = {models}, n = {n}, C = {classes}, k = {k}: seconds of a step")
    print(f"{'models chosen':>14}{'batched':>10}{'loop':>10}{'ratio':>8}{'largest difference, bits':>28}")
    state, chosen = Variational(answers, y, classes, fold), []
    ours = theirs = 0.0
    base = np.log2(np.bincount(y) / n)[y].mean()
    for step in range(k):
        candidates = [j for j in range(models) if j not in chosen]
        design, own = state.design[:, 1:], columns_of(answers, state.chosen, candidates, classes, state.paired)
        began = time.perf_counter()
        bits = state.with_each(candidates).mean(1)
        chosen.append(candidates[int(bits.argmax())])
        state = state.add(chosen[-1])
        batched = time.perf_counter() - began
        began = time.perf_counter()
        peer = peer_step(design, own, y, fold) - base
        loop = time.perf_counter() - began
        apart = np.abs(peer - bits).max()
        print(f"{step:>14}{batched:>10.3f}{loop:>10.3f}{loop / batched:>8.1f}{apart:>28.4f}")
        ours, theirs = ours + batched, theirs + loop
    print(f"{'all steps':>14}{ours:>10.3f}{theirs:>10.3f}{theirs / ours:>8.1f}")
    began = time.perf_counter()
    MutualInformationSelector(budget=k, min_gain=-math.inf).fit(codes, y)
    took = time.perf_counter() - began
    print(f"MutualInformationSelector.fit, with prefixes, Fano's bound and rule: {took:.3f}")

    if importlib.util.find_spec("mlxtend"):
        from mlxtend.feature_selection import SequentialFeatureSelector

        design = hot.reshape(-1, n).T
        groups = [list(range(j * classes, (j + 1) * classes)) for j in range(models)]
        peer = SequentialFeatureSelector(
            LogisticRegression(),
            k,
            scoring="neg_log_loss",
            cv=list(PredefinedSplit(fold).split()),
            feature_groups=groups,
        )
        began = time.perf_counter()
        peer.fit(design, y)
        took = time.perf_counter() - began
        print(f"mlxtend SequentialFeatureSelector: {took:.3f}, {took / ours:.1f} times all steps")


if __name__ == "__main__":
    main()
