"""Networks of nodes: graphs, their Metropolis-Hastings mixing matrices, and how fast gossip on them forgets."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np

from fairtrial.errors import InputError
from fairtrial.seeds import generator


class Network:
    """A mixing matrix on a connected graph.

    Parameters
    ----------
    mixing : (n, n) array
        Symmetric, nonnegative, rows and columns sum to 1; the edges are its nonzero entries off the diagonal.

    Attributes
    ----------
    mixing : (n, n) float64 array.

    Raises
    ------
    InputError
        If the matrix is not symmetric and doubly stochastic, or the graph falls into parts (they are listed).

    Examples
    --------
    >>> Network([[0.5, 0.5], [0.5, 0.5]]).rho
    0.0
    """

    def __init__(self, mixing: Any) -> None:
        self.mixing = doubly_stochastic(mixing)
        parts = components(self.mixing)
        if len(parts) > 1:
            raise InputError(f"network: the graph is not connected, its parts are {parts}: add edges between them")

    @property
    def size(self) -> int:
        """Number of nodes n."""
        return len(self.mixing)

    @property
    def rho(self) -> float:
        """The second largest absolute eigenvalue: what is left of disagreement after one exchange, at most."""
        eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(self.mixing)))
        return float(round(eigenvalues[-2], 15)) if self.size > 1 else 0.0


class Ring(Network):
    """Node i talks to i - 1 and i + 1.

    >>> round(Ring(8).rho, 6)
    0.804738
    """

    def __init__(self, n: int) -> None:
        super().__init__(metropolis(n, ((i, (i + 1) % n) for i in range(n))))


class Torus(Network):
    """A grid of rows x columns nodes whose borders are joined; node (r, c) is number r * columns + c."""

    def __init__(self, rows: int, columns: int) -> None:
        at = np.arange(rows * columns).reshape(rows, columns)
        edges = [(at, np.roll(at, 1, axis)) for axis in (0, 1)]
        super().__init__(metropolis(at.size, (e for a, b in edges for e in zip(a.flat, b.flat, strict=True))))


class Complete(Network):
    """All talk to all: with weights 1/n, gossip is the mean and the method is the central one."""

    def __init__(self, n: int) -> None:
        super().__init__(metropolis(n, ((i, j) for i in range(n) for j in range(i))))


class Exponential(Network):
    """Node i talks to i +- 1, i +- 2, i +- 4, ...: about 2 log2 n neighbours, and mixing far faster than a ring's."""

    def __init__(self, n: int) -> None:
        hops = [2**k for k in range(max(n - 1, 1).bit_length())]
        super().__init__(metropolis(n, ((i, (i + hop) % n) for i in range(n) for hop in hops if hop < n)))


class Star(Network):
    """Node 0 talks to all others, which talk to it alone."""

    def __init__(self, n: int) -> None:
        super().__init__(metropolis(n, ((0, i) for i in range(1, n))))


class Erdos(Network):
    """A random graph whose edges each exist with ``probability``, drawn from ``seed`` until it is connected."""

    def __init__(self, n: int, probability: float = 0.5, *, seed: int = 0) -> None:
        for attempt in range(100):
            upper = np.triu(generator(seed, "erdos", attempt).random((n, n)) < probability, 1)
            mixing = metropolis(n, np.argwhere(upper))
            if len(components(mixing)) == 1:
                super().__init__(mixing)
                return
        raise InputError(f"Erdos({n}, {probability}): none of 100 draws was connected: raise probability=")


class Isolated(Network):
    """Nobody talks to anybody, W = I: the control without gossip."""

    def __init__(self, n: int) -> None:
        self.mixing = np.eye(n)


def as_network(network: Any) -> Network:
    """Return a :class:`Network`, itself, of a ``networkx`` graph (its nodes in their order) or of a mixing matrix."""
    if isinstance(network, Network):
        return network
    if hasattr(network, "adj"):
        number = {node: i for i, node in enumerate(network.nodes)}
        return Network(metropolis(len(number), ((number[a], number[b]) for a, b in network.edges)))
    return Network(network)


def metropolis(n: int, edges: Iterable[Any]) -> np.ndarray:
    """Return Metropolis-Hastings weights, W_ij = 1 / (1 + max(degree_i, degree_j)) on edges, the rest on the diagonal.

    Symmetric and doubly stochastic on any graph, from what two neighbours know of each other.

    >>> metropolis(3, [(0, 1), (1, 2)]).round(3).tolist()
    [[0.667, 0.333, 0.0], [0.333, 0.333, 0.333], [0.0, 0.333, 0.667]]
    """
    if not isinstance(n, Integral) or n < 1:
        raise InputError(f"network: {n} nodes: give a whole number from 1")
    joined = np.zeros((n, n), dtype=bool)
    for a, b in edges:
        if a != b:
            joined[a, b] = joined[b, a] = True
    degree = joined.sum(1)
    mixing = np.where(joined, 1 / (1 + np.maximum.outer(degree, degree)), 0.0)
    np.fill_diagonal(mixing, 1 - mixing.sum(1))
    return mixing


def doubly_stochastic(mixing: Any) -> np.ndarray:
    """Return ``mixing`` as float64 if it is square, symmetric, nonnegative and sums to 1 along rows and columns."""
    try:
        w = np.asarray(mixing, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"network: {mixing!r:.60} is no matrix of real numbers") from None
    if w.ndim != 2 or w.shape[0] != w.shape[1] or not w.size:
        raise InputError(f"network: a mixing matrix has shape (n, n), not {w.shape}")
    off = np.abs(w.sum(1) - 1)
    if not off.max() < 1e-9:
        raise InputError(f"network: row {off.argmax()} of the mixing matrix sums to {w[off.argmax()].sum():g}, not 1")
    if w.min() < -1e-12 or np.abs(w - w.T).max() > 1e-9:
        raise InputError("network: the mixing matrix must be symmetric without negative entries: see metropolis()")
    return w


def components(mixing: np.ndarray) -> list[list[int]]:
    """Return the connected parts of the graph as lists of nodes.

    >>> components(np.eye(2))
    [[0], [1]]
    """
    from scipy.sparse.csgraph import connected_components

    count, label = connected_components(mixing > 0, directed=False)
    return [np.flatnonzero(label == part).tolist() for part in range(count)]


def without(mixing: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Return the weights of a step that ``missing`` (n,) nodes miss: they keep what they have, rows sum to 1 again."""
    w = np.where(missing[None, :], 0.0, mixing)
    w = np.divide(w, w.sum(1, keepdims=True), out=np.zeros_like(w), where=w.sum(1, keepdims=True) > 0)
    w[missing] = np.eye(len(w))[missing]
    return w
