"""Decentralized bilevel optimization under heavy-tailed noise: normalised, variance-reduced, tracked, never clipped.

Node i of n samples only its own f_i and g_i. All minimise the mean of f_i(x, y*(x)) with y*(x) a minimiser of the mean
of g_i(x, .). The lower problem need not be strongly convex: it enters as a penalty lam (g(x,y) - g(x,z)), z following
the minimiser, which takes first-order gradients only. :class:`~.recursion.Recursion` is what a node computes,
:mod:`~.processes` how nodes talk; this file puts the two together, in one process or in many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator
from fairtrial.training.decentralized_bilevel.network import without
from fairtrial.training.decentralized_bilevel.problem import Loss, Pieces, Variable, listed
from fairtrial.training.decentralized_bilevel.processes import TURNS, Mixing, OneByOne, ProcessGroup, Stacked
from fairtrial.training.decentralized_bilevel.recursion import RESET_EVERY, Recursion, first_estimate
from fairtrial.training.decentralized_bilevel.tails import clamped, hill

STATISTICS_EVERY = 50  # steps between consensus statistics
BLOCKS = ("x", "y", "z")
FINE, SPIKES, MISSES, BROKEN = 0.0, 1.0, 2.0, 3.0  # what a node tells the others about its step


@dataclass(frozen=True)
class StepInfo:
    """What a step did, for the nodes of this process (n of them, or one).

    Attributes
    ----------
    step : number of the step, from 0; -1 while samples for the first estimate are gathered.
    upper, lower : (nodes,) losses of the batches, nan of a node that misses the step.
    norms : {"x", "y", "z"}, (nodes,) lengths of the trackers.
    consensus : root mean square distance of the nodes' shared variables from their mean; None but every 50 steps.
    bytes : sent by these nodes.
    tracking : whether the mean of the trackers is the mean of the estimates: False from a step that a node misses to
        the next new start of the trackers.
    """

    step: int
    upper: Tensor
    lower: Tensor
    norms: dict[str, Tensor]
    consensus: float | None
    bytes: int
    tracking: bool


class DecentralizedBilevel:
    """Normalised stochastic variance-reduced bilevel gradient over a network, after the method of that name.

    Every local move of a block has the length ``eta_t``, whatever a sample looks like: a single sample cannot throw the
    run, though a huge one does turn its direction until it is averaged out.

    Parameters
    ----------
    upper, lower : callables
        ``f(x, y, batch)`` and ``g(x, y, batch)``, scalars: means over a node's batch. x and y arrive as they were
        given: tensors, dicts of tensors, or modules that are called.
    x, y : tensor, dict of tensors, or nn.Module
        The variables' start, float32 or float64, the same for all nodes (rank 0's).
    network : Network, ``networkx`` graph, (n, n) mixing matrix, callable of the step, or ProcessGroup
        The nodes in this process; or, with a :class:`~.processes.ProcessGroup`, this process as one of them.
    p : float or "auto"
        Moment of the noise that is finite, in (1, 2]. "auto": the Hill index of the noise at the start, less 0.1 and
        clamped to [1.1, 2], from at least 200 differences of samples.
    lr : three floats
        Length of the first step of x, y and z, each times the norm of its block (of a zero block: the root of its
        length). Step t has (t+1)^(-p/(2p-1)) of it.
    penalty : float or callable
        lam_0, grown as lam_0 (1+t)^(1/4); or a callable of the step. The bias of the solution is about 1/lam.
    hypergradient : {"penalty", "implicit"}
        "implicit" solves with the Hessian of a strongly convex lower loss, one product a step, and refuses a singular
        one.
    private_upper : bool
        x belongs to each node alone (weights of its own examples) and takes no part in gossip.
    inner_steps : int
        x moves at every so many steps only.
    gossip_rounds : int
        Exchanges a step: disagreement shrinks by rho to that power.
    init_batches : int
        Calls of ``step`` at the start whose samples make the first estimate: their mean; for p < 1.5, of each piece the
        sample of (lower) median norm.
    exact : bool
        In one process, compute node by node in the order of ranks: bitwise what processes compute.
    seed : int
        Of :meth:`generator`.

    Raises
    ------
    InputError
        On half precision, p outside (1, 2], a disconnected graph, a matrix that is not doubly stochastic, a loss that
        is no scalar, a singular lower Hessian with "implicit", a loss that is not finite (node and step are named).
    GossipError
        If a message of another process does not come (edge and step are named).

    Examples
    --------
    Four nodes agree on the upper variable that brings y*(x) = x to the mean of their targets, 3.

    >>> from fairtrial.training.decentralized_bilevel import Ring
    >>> target = torch.tensor([[1.0], [2.0], [3.0], [6.0]])
    >>> opt = DecentralizedBilevel(
    ...     upper=lambda x, y, t: 0.5 * (y - t).square().sum(), lower=lambda x, y, t: 0.5 * (y - x).square().sum(),
    ...     x=torch.zeros(1), y=torch.zeros(1), network=Ring(4), p=2.0, lr=(0.5, 1.5, 1.5), init_batches=1)
    >>> for step in range(150):
    ...     info = opt.step(target, target)
    >>> x_bar, y_bar = opt.consensus()
    >>> 2 < float(x_bar) < 4, info.tracking
    (True, True)
    """

    def __init__(
        self,
        upper: Loss,
        lower: Loss,
        x: Any,
        y: Any,
        *,
        network: Any,
        p: float | Literal["auto"] = 1.5,
        lr: Sequence[float] = (0.1, 0.1, 0.1),
        penalty: float | Callable[[int], float] = 10.0,
        hypergradient: Literal["penalty", "implicit"] = "penalty",
        private_upper: bool = False,
        inner_steps: int = 1,
        gossip_rounds: int = 1,
        init_batches: int = 8,
        exact: bool = False,
        seed: int = 0,
    ) -> None:
        counts = gossip_rounds, inner_steps, init_batches
        if not all(isinstance(count, Integral) and count >= 1 for count in counts) or gossip_rounds > TURNS:
            raise InputError(
                f"gossip_rounds={gossip_rounds} (1 to {TURNS}), inner_steps={inner_steps}, init_batches={init_batches}"
                ": whole numbers from 1"
            )
        if not isinstance(lr, Sequence) or len(lr) != 3 or not all(0 <= rate < math.inf for rate in lr):
            raise InputError(f"lr={lr}: three step lengths, of x, y and z, none negative")
        if not callable(penalty) and not 0 < penalty < math.inf:
            raise InputError(f"penalty={penalty}: a positive number, or a callable of the step")
        if p != "auto" and not isinstance(p, (int, float)):
            raise InputError(f"p={p!r}: a number in (1, 2], or 'auto'")
        self._x, self._y = Variable(x, "x"), Variable(y, "y")
        if self._x.flat.dtype != self._y.flat.dtype:
            raise InputError(f"x is {self._x.flat.dtype}, y is {self._y.flat.dtype}: give both in one precision")
        if self._x.flat.device != self._y.flat.device:
            raise InputError(f"x is on {self._x.flat.device}, y on {self._y.flat.device}: put both on one device")
        self.pieces = Pieces(upper, lower, self._x, self._y, hypergradient)
        self._implicit, self._exact = hypergradient == "implicit", exact
        self.gossip: Stacked
        if isinstance(network, ProcessGroup):
            self._mixing, self.gossip = network.mixing, network
        else:
            self._mixing = Mixing(network)
            self.gossip = (OneByOne if exact else Stacked)(self._mixing)
        self.nodes = self.gossip.nodes
        self.penalty = penalty if callable(penalty) else lambda t: penalty * (1 + t) ** 0.25
        self._shared = len(self._x.flat) if private_upper else 0  # first column that takes part in gossip
        self.private_upper, self.inner_steps, self.gossip_rounds = private_upper, inner_steps, gossip_rounds
        self._auto, self.seed = p == "auto", seed
        # Pairs of samples give 200 differences over all nodes.
        self.init_batches = max(init_batches, 2 * math.ceil(200 / self._mixing.size)) if self._auto else init_batches
        self._keep = init_batches

        z = torch.zeros_like(self._y.flat) if self._implicit else self._y.flat
        w = self.gossip.start(torch.cat([self._x.flat, self._y.flat, z]).repeat(len(self.nodes), 1))  # (nodes, P)
        norms = [block.norm() for block in w[0].split(self.pieces.sizes)]
        rates = [
            rate * (float(norm) or math.sqrt(size))
            for rate, norm, size in zip(lr, norms, self.pieces.sizes, strict=True)
        ]
        self._recursions = [
            Recursion(rows, self.pieces.sizes, rates, self.pieces.combine, 1.5 if self._auto else float(p))
            for rows in (w.split(1) if exact else [w])
        ]
        self.t = 0
        self._tracking = True
        self._gathered = 0  # calls of step at the start
        self._samples: list[Tensor] = []  # pieces (nodes, Q) gathered for the first estimate
        self._last: Tensor | None = None
        self._differences: list[Tensor] = []  # (nodes,) norms

    @property
    def p(self) -> float:
        """The moment of the noise that is taken to be finite."""
        return self._recursions[0].p

    @property
    def variables(self) -> dict[str, Tensor]:
        """The blocks x, y, z of these nodes, (nodes, P_b) each."""
        return dict(zip(BLOCKS, self._all("w").split(self.pieces.sizes, -1), strict=True))

    def generator(self, node: int) -> torch.Generator:
        """Return the source of a node's randomness in the coming step: the same in one process and in many."""
        return torch_generator(self.seed, "node", node, self.t, self._gathered)

    # --------------------------------------------------------------------------------------------------------- one step

    def step(self, upper_batch: Any, lower_batch: Any) -> StepInfo:
        """Take one sample of each loss at every node of this process, talk, and move.

        Parameters
        ----------
        upper_batch, lower_batch
            In one process: a list of one batch a node, or tensors (or dicts of them) with a first axis of nodes. As one
            of many processes: its own batch. A node whose batch is None misses the step: it keeps its state and sends
            nothing.
        """
        uppers, lowers = self._listed(upper_batch), self._listed(lower_batch)
        absent = [i for b in (uppers, lowers) if isinstance(b, list) for i, batch in enumerate(b) if batch is None]
        misses = torch.zeros(len(self.nodes), dtype=torch.bool)
        misses[absent] = True
        if self._recursions[0].m is None:
            return self._gather(uppers, lowers, misses)
        t = self.t
        mixing = self._mixing.matrix(t)
        if not misses.all():
            self.gossip.expect(mixing, self._all("w")[:, self._shared :], t)
        kept = [r.state_dict() for r in self._recursions]
        losses = self._estimate(uppers, lowers, misses)
        try:
            gradients = torch.cat([r.norms[-1] for r in self._recursions])
            told = self._tell(torch.cat([losses, gradients], 1), misses, t)
        except InputError:  # what the broken sample left in the estimates goes with it
            self._restore(kept, torch.ones_like(misses))
            raise
        missing = told == MISSES
        if missing.any():
            mixing = without(mixing, missing)
        reset = bool(t % RESET_EVERY == 0 or (told == SPIKES).any())
        self._tracking = not missing.any() and (self._tracking or reset)
        sent = 0
        if not misses.all():
            sent = self._talk_and_move(mixing, reset, t)
        self._restore(kept, misses)
        self.t += 1
        return StepInfo(t, losses[:, 0], losses[:, 1], self._norms(), self._consensus_error(t), sent, self._tracking)

    def _talk_and_move(self, mixing: np.ndarray, reset: bool, t: int) -> int:
        w, s = self._all("w"), _joined([r.offer(reset) for r in self._recursions])
        message = w[:, self._shared :], s[:, self._shared :]
        sent = 0
        for turn in range(self.gossip_rounds):
            if turn:
                self.gossip.expect(mixing, message[0], t, turn)
            message = self.gossip.exchange(mixing, message, t, turn)
            edges = sum(np.count_nonzero(mixing[i]) - (mixing[i, i] != 0) for i in self.nodes)
            sent += int(edges) * sum(part[0].numel() * part.element_size() for part in message)
        if self._shared:
            message = torch.cat([w[:, : self._shared], message[0]], 1), torch.cat([s[:, : self._shared], message[1]], 1)
        still = () if (t + 1) % self.inner_steps == 0 else (0,)
        for recursion, w_rows, s_rows in zip(self._recursions, *map(self._by_recursion, message), strict=True):
            recursion.move(w_rows, s_rows, t, still)
        return sent

    def _estimate(self, uppers: Any, lowers: Any, misses: Tensor) -> Tensor:
        """Update the estimates and return the losses (nodes, 2) at the variables."""
        if misses.all():
            return torch.full((len(misses), 2), math.nan)
        if misses.any():  # what a missing node computes is thrown away
            present = int((~misses).nonzero()[0])
            each = [listed(b, len(misses)) for b in (uppers, lowers)]
            uppers, lowers = ([b[present if m else i] for i, m in enumerate(misses)] for b in each)
        (now, losses), (before, _) = self._evaluate((self._all("w"), self._all("before")), uppers, lowers)
        for recursion, a, b in zip(self._recursions, self._by_recursion(now), self._by_recursion(before), strict=True):
            recursion.estimate(a, b, self.t, self.penalty(self.t))
        return torch.where(misses[:, None], math.nan, losses)

    def _evaluate(self, points: Sequence[Tensor], uppers: Any, lowers: Any) -> list[tuple[Tensor, Tensor]]:
        alone = self._exact or len(self.nodes) == 1
        return (self.pieces.loop if alone else self.pieces.rows)(points, uppers, lowers)

    def _tell(self, values: Tensor, misses: Tensor, step: int) -> np.ndarray:
        """Tell all nodes how losses and gradients (nodes, k) are here, and return what all told, (n,)."""
        spikes = torch.cat([r.spikes()[:, 0] for r in self._recursions]) if self._recursions[0].norms else misses
        own = torch.where(misses, MISSES, torch.where(~values.isfinite().all(1), BROKEN, spikes * SPIKES))
        told = self.gossip.all_rows(own.double(), step).numpy()
        if (told == BROKEN).any():
            node = int(np.flatnonzero(told == BROKEN)[0])
            raise InputError(
                f"rank {node}, step {step}: its loss is not finite or its gradient: look at its batch, or lower lr"
            )
        return told

    # --------------------------------------------------------------------------------------------------- the first step

    def _gather(self, uppers: Any, lowers: Any, misses: Tensor) -> StepInfo:
        """Take a sample at the start; the last one makes the first estimate and moves."""
        if misses.any():
            raise InputError(f"no node can miss the first {self.init_batches} calls: they make the first estimate")
        w = self._all("w")
        if not self._gathered:
            self._check(w, uppers, lowers)
        ((pieces, losses),) = self._evaluate((w,), uppers, lowers)
        self._tell(torch.cat([losses, pieces], 1), misses, 0)
        if len(self._samples) < self._keep:
            self._samples.append(pieces)
        if self._auto:
            self._pair(pieces)
        self._gathered += 1
        norms = {name: torch.full((len(self.nodes),), math.nan) for name in BLOCKS}
        if self._gathered < self.init_batches:
            return StepInfo(-1, losses[:, 0], losses[:, 1], norms, None, 0, True)
        if self._auto:
            self._choose_p()
        m = first_estimate(torch.stack(self._samples), self.pieces.lengths, self.p)
        self._samples = []
        for recursion, rows in zip(self._recursions, self._by_recursion(m), strict=True):
            recursion.estimate(rows, rows, 0, self.penalty(0))
        mixing = self._mixing.matrix(0)
        self.gossip.expect(mixing, w[:, self._shared :], 0)
        sent = self._talk_and_move(mixing, True, 0)
        self.t = 1
        return StepInfo(0, losses[:, 0], losses[:, 1], self._norms(), self._consensus_error(0), sent, True)

    def _check(self, w: Tensor, uppers: Any, lowers: Any) -> None:
        n = len(self.nodes)
        self.pieces.check(w[0], listed(uppers, n)[0], listed(lowers, n)[0])
        if self._implicit:
            self._check_curvature(w, lowers)

    def _check_curvature(self, w: Tensor, lowers: Any) -> None:
        """Refuse a lower loss whose mean Hessian at the start is singular or indefinite."""
        from fairtrial.training.curvature import top_eigenpairs

        x, y, _ = w[0].split(self.pieces.sizes)
        batches = listed(lowers, len(self.nodes))

        def mean_loss(y: Tensor) -> Tensor:
            return torch.stack([self.pieces.lower(x, y, batch) for batch in batches]).mean()

        def product(v: Tensor) -> Tensor:  # (b, Py)
            # The Hessian is symmetric: its product is the vector-Jacobian product of the gradient.
            back = torch.func.vjp(torch.func.grad(mean_loss), y)[1]
            rows = torch.stack([back(row)[0] for row in v])
            return self.gossip.all_rows(rows.repeat(len(self.nodes), 1, 1), 0).mean(0).to(rows)

        size, dtype = len(y), y.dtype
        largest = float(top_eigenpairs(product, size, dtype=dtype, max_products=100).values[0])
        gap = top_eigenpairs(lambda v: abs(largest) * v - product(v), size, dtype=dtype, tol=1e-6, max_products=200)
        smallest = abs(largest) - float(gap.values[0])
        if not smallest > 1e-6 * largest:
            raise InputError(
                f"hypergradient='implicit': the lower loss is not strongly convex in y, its curvature at the start is "
                f"from {smallest:.2g} to {largest:.2g}: take hypergradient='penalty'"
            )

    def _pair(self, pieces: Tensor) -> None:
        """Note the length of the difference of every second sample to the one before: noise without its mean."""
        g = self.pieces.combine(pieces, self.penalty(0))
        if self._last is None:
            self._last = g
        else:
            self._differences.append((g - self._last).double().norm(dim=-1))
            self._last = None

    def _choose_p(self) -> None:
        lengths = self.gossip.all_rows(torch.stack(self._differences, 1), 0)  # (n, draws)
        lengths = lengths / lengths.median(1, keepdim=True).values.clamp_min(1e-300)  # nodes differ in scale
        p = clamped(hill(lengths.flatten().numpy()))
        for recursion in self._recursions:
            recursion.p = p

    # ------------------------------------------------------------------------------------------- looking at and keeping

    def consensus(self) -> tuple[Any, Any]:
        """Return x and y averaged over all nodes, as they were given; of a module a state dict that it loads.

        With ``private_upper`` x is (nodes, ...), the nodes' own.
        """
        w = self.gossip.all_rows(self._all("w"), self.t)
        x, y, _ = w.split(self.pieces.sizes, -1)
        shown = self.variables["x"] if self.private_upper else x.mean(0)
        return self._x.result(shown), self._y.result(y.mean(0))

    def state_dict(self) -> dict[str, Any]:
        """Return all that :meth:`load_state_dict` needs to go on, bitwise as if nothing had happened.

        ``torch.save`` writes it; as one of many processes every rank keeps its own.
        """
        names = ("t", "_tracking", "_gathered", "_samples", "_last", "_differences")
        own = {name: getattr(self, name) for name in names}
        own |= {name: list(value) for name, value in own.items() if isinstance(value, list)}  # lists grow
        return {**own, "recursions": [recursion.state_dict() for recursion in self._recursions]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, of the same variables, nodes and ``exact``."""
        if missing := self.state_dict().keys() - state.keys():
            raise InputError(f"the state lacks {sorted(missing)}: give what state_dict() returned")
        shapes = [tuple(part["w"].shape) for part in state["recursions"]]
        if shapes != [tuple(r.w.shape) for r in self._recursions]:
            raise InputError(f"the state has variables of shapes {shapes}: they are of other nodes or another problem")
        for recursion, part in zip(self._recursions, state["recursions"], strict=True):
            recursion.load_state_dict(part)
        for name in state.keys() - {"recursions"}:
            value = state[name]
            setattr(self, name, list(value) if isinstance(value, list) else value)

    # ---------------------------------------------------------------------------------------------------------- details

    def _all(self, name: str) -> Tensor:
        """Return what the recursions hold as rows (nodes, ...)."""
        return _joined([getattr(recursion, name) for recursion in self._recursions])

    def _by_recursion(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(1) if self._exact else (rows,)

    def _listed(self, batch: Any) -> Any:
        """Return a list of one batch a node, or what is stacked along a first axis of nodes."""
        if isinstance(self.gossip, ProcessGroup):
            return [batch]
        n = len(self.nodes)
        if isinstance(batch, (list, tuple)):
            if len(batch) != n:
                raise InputError(f"{len(batch)} batches for {n} nodes: give a list of one a node")
            return list(batch)
        for leaf in tree_leaves(batch):
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                raise InputError(f"a batch with {type(leaf).__name__}: give a list of one a node, or tensors of all")
            if len(leaf) != n:
                raise InputError(f"a batch of {len(leaf)} rows for {n} nodes: its first axis is the node")
        return batch

    def _restore(self, kept: list[dict[str, Any]], misses: Tensor) -> None:
        """Give nodes that missed the step their state back."""
        if not misses.any():
            return
        for recursion, old, rows in zip(self._recursions, kept, self._by_recursion(misses[:, None]), strict=True):
            now = recursion.state_dict()
            same = {k: torch.where(rows, old[k], now[k]) for k in ("w", "before", "m", "g", "s")}
            recursion.load_state_dict(now | same)

    def _norms(self) -> dict[str, Tensor]:
        blocks = self._all("s").split(self.pieces.sizes, -1)
        return {name: block.norm(dim=-1) for name, block in zip(BLOCKS, blocks, strict=True)}

    def _consensus_error(self, t: int) -> float | None:
        if t % STATISTICS_EVERY:
            return None
        w = self.gossip.all_rows(self._all("w")[:, self._shared :], t).double()
        return float((w - w.mean(0)).square().sum(1).mean().sqrt())


def _joined(rows: list[Tensor]) -> Tensor:
    """Return rows (nodes, ...) below each other; of a single tensor, itself."""
    return rows[0] if len(rows) == 1 else torch.cat(rows)
