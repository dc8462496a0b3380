"""Gossip between nodes: in memory, or over ``torch.distributed`` between processes of one node each.

All of them move the same things, in the same order, at the same point of a step: communication happens in ``step`` and
nowhere else. What a node sends is its variables and its part of the tracker, packed into one buffer a neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairtrial.errors import FairtrialError, InputError
from fairtrial.training.decentralized_bilevel.network import Network, as_network, doubly_stochastic

Message = tuple[Tensor, Tensor]
"""Shared variables (rows, P) in the model's dtype and part of the tracker (rows, P) float64."""

TURNS = 64  # exchanges a step, at most: a message's tag is step * TURNS + exchange


class GossipError(FairtrialError, RuntimeError):
    """A message between processes did not come: the run ends, and goes on from its last checkpoint."""


class Mixing:
    """The mixing matrix of a step: always the same, or a callable of the step."""

    def __init__(self, network: Any) -> None:
        self._at: Callable[[int], Any] | None = None
        if callable(network):
            self._at, self.size = network, 0
            self.size = len(self.matrix(0))
        else:
            self._fixed = as_network(network).mixing
            self.size = len(self._fixed)

    def matrix(self, t: int) -> np.ndarray:
        """Return W (n, n) of step ``t``. One graph of a changing network need not be connected by itself."""
        if self._at is None:
            return self._fixed
        given = self._at(t)
        w = given.mixing if isinstance(given, Network) else doubly_stochastic(given)
        if self.size not in (0, len(w)):
            raise InputError(f"network: {len(w)} nodes at step {t}, {self.size} at first: their number stays the same")
        return w


class Stacked:
    """All nodes as rows of one tensor: an exchange is a product with W."""

    def __init__(self, mixing: Mixing) -> None:
        self.size, self.nodes = mixing.size, list(range(mixing.size))

    def expect(self, w: np.ndarray, variables: Tensor, step: int, turn: int = 0) -> None:
        """Nothing to prepare."""

    def exchange(self, w: np.ndarray, message: Message, step: int, turn: int = 0) -> Message:
        """Return the messages (n, P) mixed by ``w`` (n, n)."""
        variables, tracker = message
        mixing = torch.from_numpy(w).to(tracker)
        return mixing.to(variables) @ variables, mixing @ tracker

    def all_rows(self, rows: Tensor, step: int) -> Tensor:
        """Return (n, ...) of the rows (n, ...) that this process holds."""
        return rows

    def start(self, w: Tensor) -> Tensor:
        """Return the first node's variables as everybody's."""
        return w[:1].expand_as(w).clone()


class OneByOne(Stacked):
    """All nodes in one process, summed neighbour by neighbour in the order of their ranks: bitwise as processes do."""

    def exchange(self, w: np.ndarray, message: Message, step: int, turn: int = 0) -> Message:
        """Return the messages (n, P) mixed by ``w`` (n, n)."""
        rows: dict[int, Message] = {j: (message[0][j : j + 1], message[1][j : j + 1]) for j in range(self.size)}
        mixed = [weighted(weights, rows) for weights in w]
        return torch.cat([m[0] for m in mixed]), torch.cat([m[1] for m in mixed])


class ProcessGroup(Stacked):
    """One node a process, joined by the ``gloo`` backend.

    Parameters
    ----------
    network : Network, graph, mixing matrix, or a callable of the step
        Of as many nodes as there are processes; node i is rank i.
    group : torch.distributed process group, optional
        By default all processes.
    timeout : float
        Seconds to wait for a message before the run ends with an error that names edge and step.

    Raises
    ------
    InputError
        If ``torch.distributed`` has not been started, or world and graph differ in size.
    """

    def __init__(self, network: Any, *, group: Any = None, timeout: float = 60.0) -> None:
        import torch.distributed as dist

        if group is None and not (dist.is_available() and dist.is_initialized()):
            raise InputError("ProcessGroup: call torch.distributed.init_process_group('gloo') first, under torchrun")
        self.mixing = Mixing(network)
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size, self.nodes = self.group.rank(), self.mixing.size, [self.group.rank()]
        if self.group.size() != self.size:
            raise InputError(f"ProcessGroup: {self.group.size()} processes for a graph of {self.size} nodes")
        self.timeout = timedelta(seconds=timeout)
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # of a neighbour: received, sent
        self._expected: dict[int, Any] = {}

    def _neighbours(self, w: np.ndarray) -> list[int]:
        return [j for j in np.flatnonzero(w[self.rank]).tolist() if j != self.rank]

    def expect(self, w: np.ndarray, variables: Tensor, step: int, turn: int = 0) -> None:
        """Post the receives of a step before its gradients are computed, for ``variables`` (1, P) and their tracker."""
        size = variables.numel() * (variables.element_size() + 8)
        for j in self._neighbours(w):
            if j not in self._buffers:
                self._buffers[j] = (torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8))
            self._expected[j] = self.group.recv([self._buffers[j][0]], j, step * TURNS + turn)

    def exchange(self, w: np.ndarray, message: Message, step: int, turn: int = 0) -> Message:
        """Send ``message`` (1, P) to every neighbour, wait for theirs and for what was sent, and return the mix."""
        neighbours = self._neighbours(w)
        sent = []
        for j in neighbours:  # edges in one order, receives were posted before: nobody waits for a send
            _, out = self._buffers[j]
            for part, place in zip(message, _split(out, message), strict=True):
                place.copy_(part)
            sent.append((j, self.group.send([out], j, step * TURNS + turn)))
        for what, works in (("from", [(j, self._expected.pop(j)) for j in neighbours]), ("to", sent)):
            for j, work in works:
                try:
                    work.wait(self.timeout)
                except RuntimeError as error:
                    raise self._lost(f"no message {what} rank {j} ({self._edge(j)})", step, error) from error
        self._expected.clear()  # of a node that misses the step
        rows: dict[int, Message] = {self.rank: message}
        for j in neighbours:
            variables, tracker = _split(self._buffers[j][0], message)
            rows[j] = (variables, tracker)
        return weighted(w[self.rank], rows)

    def all_rows(self, rows: Tensor, step: int) -> Tensor:
        """Return the rows (1, ...) of all processes, (n, ...), on every process."""
        gathered = [torch.empty_like(rows) for _ in range(self.size)]
        try:
            self.group.allgather([gathered], [rows.contiguous()]).wait(self.timeout)
        except RuntimeError as error:
            raise self._lost("ranks do not answer" + self._closed(), step, error) from error
        return torch.cat(gathered)

    def start(self, w: Tensor) -> Tensor:
        """Return the variables (1, P) of rank 0."""
        return self.all_rows(w, 0)[:1].clone()

    def smallest(self, value: float) -> float:
        """Return the smallest of all processes' values."""
        return float(self.all_rows(torch.tensor([value], dtype=torch.float64), 0).min())

    def _closed(self) -> str:
        """Say which neighbours' connections are known to be broken: receives from them have failed already."""
        closed = []
        for j, work in self._expected.items():
            try:
                work.wait(timedelta(milliseconds=50))
            except RuntimeError as error:
                if "connection" in str(error).lower():  # closed or reset, and not just late
                    closed.append(f"the connection to rank {j} ({self._edge(j)}) is closed")
        return ": " + ", ".join(closed) if closed else ""

    def _edge(self, j: int) -> str:
        return f"edge {min(j, self.rank)}-{max(j, self.rank)}"

    def _lost(self, what: str, step: int, error: Exception) -> GossipError:
        why = str(error).splitlines()[0][:200]
        return GossipError(
            f"rank {self.rank}, step {step}: {what} within {self.timeout.total_seconds():g} s; start all processes "
            f"again from their last checkpoint ({why})"
        )


def weighted(weights: np.ndarray, rows: dict[int, Message]) -> Message:
    """Return the weighted sum of messages, added up in the order of ranks."""
    total: list[Tensor] | None = None
    for j in np.flatnonzero(weights).tolist():
        scaled = [part * float(weights[j]) for part in rows[j]]
        total = scaled if total is None else [a.add_(b) for a, b in zip(total, scaled, strict=True)]
    assert total is not None, "a row of W sums to 1"
    return total[0], total[1]


def _split(buffer: Tensor, like: Message) -> tuple[Tensor, Tensor]:
    """Return views of a byte buffer: variables, and the float64 tracker, which comes first for its alignment."""
    variables, tracker = like
    at = tracker.numel() * 8
    return buffer[at:].view(variables.dtype).view(variables.shape), buffer[:at].view(torch.float64).view(tracker.shape)
