"""Softmax regression with an L2 penalty, and many one-model extensions of a fitted one at once.

Every fit minimises

    sum_i -log softmax(x_i W)[y_i]  +  1/2 sum of squares of W but for its first row,

which over n items is the mean loss with a penalty of 1/n. A greedy step asks what each of M candidate models adds to a
fitted design of p columns: M further regressions of p + q columns that share p of them. :func:`extend` runs L-BFGS on
all of them together, started from the fitted weights and preconditioned by the Hessian there: its large part is the
same for all candidates and inverted once, and the rest is a few products of large matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

FREE = 1e-4  # the penalty of the intercept: enough to make the Hessian definite, too little to move a probability
STEPS = 6  # of L-BFGS: what is left of the error of an estimate is below .001 bits
CHUNK = 2**22  # numbers in the largest array of a chunk of candidates


def softmax(logits: Floats, axis: int) -> tuple[Floats, Floats]:
    """Return probabilities and log-sum-exp over ``axis`` of logits.

    >>> softmax(np.zeros((2, 3)), axis=0)[0].tolist()
    [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]]
    """
    top = logits.max(axis, keepdims=True)
    raised = np.exp(logits - top)
    total = raised.sum(axis, keepdims=True)
    raised /= total
    return raised, np.squeeze(top + np.log(total), axis)


def fit(
    design: Floats, y: Ints, classes: int, start: Floats | None = None, *, tolerance: float = 1e-5
) -> tuple[Floats, Floats]:
    """Fit one regression by Newton's method with step halving.

    Parameters
    ----------
    design : (n, p), the first column all ones.
    y : (n,) class of each item, 0 .. classes - 1.
    start : (p, classes) weights to begin from.
    tolerance : largest entry of the gradient, in items, at which to stop.

    Returns
    -------
    weights : (p, classes)
    hessian : (classes p, classes p), class by class, at the weights

    Examples
    --------
    >>> weights, _ = fit(np.ones((4, 1)), np.array([0, 0, 0, 1]), classes=2)
    >>> softmax(weights, axis=1)[0].round(3).tolist()
    [[0.75, 0.25]]
    """
    p = design.shape[1]
    truth = np.eye(classes)[y]  # (n, C)
    ridge = np.r_[FREE, np.ones(p - 1)][:, None]
    weights = np.zeros((p, classes)) if start is None else start

    def evaluate(weights: Floats) -> tuple[float, Floats]:
        logits = design @ weights
        q, total = softmax(logits, axis=1)
        return float(total.sum() - (logits * truth).sum() + 0.5 * (ridge * weights**2).sum()), q

    value, q = evaluate(weights)
    while True:
        gradient = design.T @ (q - truth) + ridge * weights  # (p, C)
        hessian = _curvature(design.T, design.T, q.T) + np.diag(np.tile(ridge[:, 0], classes))
        if np.abs(gradient).max() < tolerance:
            return weights, hessian
        move = np.linalg.solve(hessian, gradient.T.ravel()).reshape(classes, p).T
        new_value, new_q = evaluate(weights - move)
        while new_value > value and np.abs(move).max() > 1e-9:
            move = move / 2
            new_value, new_q = evaluate(weights - move)
        if new_value >= value:  # flat to rounding
            return weights, hessian
        weights, value, q = weights - move, new_value, new_q


def _curvature(left: Floats, right: Floats, q: Floats) -> Floats:
    """Return sum_i (q_ai [a = b] - q_ai q_bi) left_i right_i', (C l, C r), of left (l, n), right (r, n), q (C, n)."""
    classes = range(len(q))
    blocks = {(a, b): (left * (q[a] * ((a == b) - q[b]))) @ right.T for a in classes for b in classes if a <= b}
    return np.block([[blocks[min(a, b), max(a, b)] for b in classes] for a in classes])


def extend(design: Floats, own: Floats, y: Ints, weights: Floats, hessian: Floats) -> tuple[Floats, Floats]:
    """Fit, for each of M candidates, the regression on ``design`` and the candidate's own columns together.

    With H = [[A, B], [B', D]] the Hessian at the fitted weights, A shared by all candidates, the preconditioner solves
    the Schur complement D - B' A^-1 B of a candidate's own columns. A step that would raise the objective of a
    candidate is shortened for it.

    Parameters
    ----------
    design : (n, p), the first column all ones.
    own : (M, q, n) further columns of each candidate.
    y : (n,) class of each item, 0 .. C - 1.
    weights, hessian : (p, C) and (C p, C p), of :func:`fit` on ``design``.

    Returns
    -------
    shared : (M, C, p) weights of the design's columns
    added : (M, C, q) weights of the candidates' own columns
    """
    p, classes = weights.shape
    columns = own.shape[1]
    size = max(1, CHUNK // (classes**2 * columns * p + (classes + columns**2) * len(y)))
    points = [_extend(design, own[i : i + size], y, weights, hessian) for i in range(0, len(own), size)]
    point = np.concatenate(points)
    return point[:, :, :p], point[:, :, p:]


def _extend(design: Floats, own: Floats, y: Ints, weights: Floats, hessian: Floats) -> Floats:
    """Return the weights (M, C, p + q) of one chunk of candidates."""
    (p, classes), (candidates, columns, n) = weights.shape, own.shape
    truth = np.eye(classes)[y].T  # (C, n)
    penalty = np.r_[FREE, np.ones(p - 1 + columns)]
    own_rows = np.ascontiguousarray(own.transpose(0, 2, 1))  # (M, n, q)

    def evaluate(point: Floats) -> tuple[Floats, Floats]:
        logits = (point[:, :, :p].reshape(-1, p) @ design.T).reshape(candidates, classes, n)
        logits += point[:, :, p:] @ own
        q, total = softmax(logits, axis=1)
        value = (total - logits[:, y, np.arange(n)]).sum(1) + 0.5 * (penalty * point**2).sum((1, 2))
        q -= truth
        shared = (q.reshape(-1, n) @ design).reshape(candidates, classes, p)
        return value, np.concatenate([shared, q @ own_rows], 2) + penalty * point

    precondition = _schur_solver(design, own, weights, hessian)
    added = np.zeros((candidates, classes, columns))
    point = np.concatenate([np.broadcast_to(weights.T, (candidates, classes, p)), added], 2)
    value, slope = evaluate(point)
    history: list[tuple[Floats, Floats, Floats]] = []  # steps, changes of slope, 1 / their products
    for _ in range(STEPS):
        move, along = slope, []
        for step, change, inverse in reversed(history):
            along.append(inverse * (step * move).sum((1, 2), keepdims=True))
            move = move - along[-1] * change
        move = precondition(move)
        for step, change, inverse in history:
            move = move + (along.pop() - inverse * (change * move).sum((1, 2), keepdims=True)) * step
        length = np.ones((candidates, 1, 1))
        for shorter in (0.2, 0.2, 0.0, 0.0):
            new = point - length * move
            new_value, new_slope = evaluate(new)
            worse = new_value > value
            if not worse.any():
                break
            length[worse] *= shorter
        step, change = new - point, new_slope - slope
        product = (step * change).sum((1, 2), keepdims=True)
        history.append((step, change, np.divide(1, product, out=np.zeros_like(product), where=product > 1e-12)))
        point, value, slope = new, new_value, new_slope
    return point


def _schur_solver(design: Floats, own: Floats, weights: Floats, hessian: Floats) -> Callable[[Floats], Floats]:
    """Return the function that maps slopes (M, C, p + q) to Newton moves with the Hessian at ``weights``."""
    (p, classes), (candidates, columns, n) = weights.shape, own.shape
    q = softmax(design @ weights, axis=1)[0].T  # (C, n)
    inverse = np.linalg.inv(hessian)  # A^-1, (C p, C p)
    cross = _curvature(design.T, own.reshape(-1, n), q)  # (C p, C M q)
    cross = cross.reshape(classes * p, classes, candidates, columns).transpose(2, 0, 1, 3)
    cross = cross.reshape(candidates, classes * p, classes * columns)  # B of each candidate
    lifted = inverse @ cross  # A^-1 B
    products = (own[:, :, None] * own[:, None]).reshape(-1, n)  # (M q q, n)
    spread = (q[:, None] * (np.eye(classes)[:, :, None] - q)).reshape(-1, n)  # (C C, n)
    corner = (products @ spread.T).reshape(candidates, columns, columns, classes, classes).transpose(0, 3, 1, 4, 2)
    corner = corner.reshape(candidates, classes * columns, classes * columns) + np.eye(classes * columns)  # D
    schur = np.linalg.inv(corner - cross.transpose(0, 2, 1) @ lifted)

    def solve(slope: Floats) -> Floats:
        shared = slope[:, :, :p].reshape(candidates, -1, 1)
        added = slope[:, :, p:].reshape(candidates, -1, 1)
        added = schur @ (added - lifted.transpose(0, 2, 1) @ shared)
        shared = inverse @ shared - lifted @ added
        return np.concatenate(
            [shared.reshape(candidates, classes, p), added.reshape(candidates, classes, columns)], axis=2
        )

    return solve
