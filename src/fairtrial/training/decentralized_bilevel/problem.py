"""Bilevel problems: two losses of an upper and a lower variable, the gradient pieces a node needs, and presets."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fairtrial.errors import InputError

Loss = Callable[[Any, Any, Any], Tensor]
"""``loss(x, y, batch)`` returns a scalar; x and y come as they were given, a module as what can be called."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Called:
    """A module at some values of its parameters, as a loss is given it: call it as the module."""

    module: nn.Module
    parameters: dict[str, Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        return functional_call(self.module, self.parameters, args, kwargs)

    def squared_norm(self) -> Tensor:
        """Return the sum of the squares of all parameters."""
        return sum((p.square().sum() for p in self.parameters.values()), start=torch.zeros(()))


class Variable:
    """A tensor, dict of tensors or module, as one flat vector (P,) and back."""

    def __init__(self, value: Any, name: str) -> None:
        if isinstance(value, nn.Module):
            parts = {key: p for key, p in value.named_parameters() if p.requires_grad}
            if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p for m in value.modules()):
                raise InputError(f"{name}: dropout draws anew at the second point of a step: call {name}.eval()")
        else:
            parts = value if isinstance(value, dict) else {"": value}
        for key, part in parts.items():
            if not isinstance(part, Tensor) or part.dtype not in (torch.float32, torch.float64):
                kind = part.dtype if isinstance(part, Tensor) else type(part).__name__
                raise InputError(f"{name}{key and f'[{key!r}]'}: a float32 or float64 tensor is needed, not {kind}")
        if not sum(part.numel() for part in parts.values()):
            raise InputError(f"{name}: it has no trainable parameters")
        if len({(part.dtype, part.device) for part in parts.values()}) > 1:
            raise InputError(f"{name}: its tensors differ in precision or device: give all alike")
        self.value, self.names = value, list(parts)
        self.shapes = [part.shape for part in parts.values()]
        self.flat = torch.cat([part.detach().reshape(-1) for part in parts.values()])

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the tensors in a vector (..., P), leading dimensions kept."""
        pieces = flat.split([shape.numel() for shape in self.shapes], -1)
        return {n: v.reshape(*flat.shape[:-1], *s) for n, v, s in zip(self.names, pieces, self.shapes, strict=True)}

    def build(self, flat: Tensor) -> Any:
        """Return what a loss is given for a vector (P,)."""
        parts = self.parts(flat)
        if isinstance(self.value, nn.Module):
            return Called(self.value, parts)
        return parts if isinstance(self.value, dict) else parts[""]

    def result(self, flat: Tensor) -> Any:
        """Return what a user gets: tensors as they came, of a module a state dict it loads."""
        parts = self.parts(flat)
        if isinstance(self.value, nn.Module):
            return {**self.value.state_dict(), **parts}
        return parts if isinstance(self.value, dict) else parts[""]


class Pieces:
    """The pieces of a node's gradient at one sample, for one node or for rows of nodes.

    ``penalty`` (first order): grad_x f, grad_x g(x,y) - grad_x g(x,z), grad_y f, grad_y g(x,y), grad_y g(x,z), in three
    backward passes. Combined with the penalty lam: G_x = the first + lam x the second, G_y = grad_y f / lam + grad_y g,
    G_z = grad_y g(x,z).

    ``implicit`` (z solves grad_yy g z = grad_y f): G_x = grad_x f - grad_xy g z, G_y = grad_y g,
    G_z = grad_yy g z - grad_y f, with one product of the Hessian.

    Every call returns the pieces (..., Q) and the two losses (..., 2).
    """

    def __init__(self, upper: Loss, lower: Loss, x: Variable, y: Variable, hypergradient: str = "penalty") -> None:
        if hypergradient not in ("penalty", "implicit"):
            raise InputError(f"hypergradient={hypergradient!r}: 'penalty' or 'implicit'")
        self.x, self.y = x, y
        self.sizes = [len(x.flat), len(y.flat), len(y.flat)]
        px, py = self.sizes[:2]
        self.lengths = [px, px, py, py, py] if hypergradient == "penalty" else self.sizes
        self.one = self._penalty if hypergradient == "penalty" else self._implicit
        self.combine = partial(combined, sizes=self.sizes) if hypergradient == "penalty" else (lambda m, penalty: m)
        self._upper, self._lower = upper, lower
        self._rows = vmap(self.one)
        self._vmaps = True

    def upper(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        """Return f at flat x (Px,) and y (Py,)."""
        return self._upper(self.x.build(x), self.y.build(y), batch)

    def lower(self, x: Tensor, y: Tensor, batch: Any) -> Tensor:
        """Return g at flat x (Px,) and y (Py,)."""
        return self._lower(self.x.build(x), self.y.build(y), batch)

    def _penalty(self, w: Tensor, upper_batch: Any, lower_batch: Any) -> tuple[Tensor, Tensor]:
        x, y, z = w.split(self.sizes)
        (fx, fy), f = grad_and_value(self.upper, (0, 1))(x, y, upper_batch)
        (gx, gy), g = grad_and_value(self.lower, (0, 1))(x, y, lower_batch)
        zx, zy = grad(self.lower, (0, 1))(x, z, lower_batch)
        return torch.cat([fx, gx - zx, fy, gy, zy]), torch.stack([f, g])

    def _implicit(self, w: Tensor, upper_batch: Any, lower_batch: Any) -> tuple[Tensor, Tensor]:
        x, y, z = w.split(self.sizes)
        (fx, fy), f = grad_and_value(self.upper, (0, 1))(x, y, upper_batch)

        def along(x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gy, g = grad_and_value(self.lower, 1)(x, y, lower_batch)
            return gy @ z, (gy, g)

        (hx, hy), (gy, g) = grad(along, (0, 1), has_aux=True)(x, y)
        return torch.cat([fx - hx, gy, hy - fy]), torch.stack([f, g])

    def rows(self, points: Sequence[Tensor], uppers: Any, lowers: Any) -> list[tuple[Tensor, Tensor]]:
        """Return, at each of ``points`` (n, P), the pieces (n, Q) and losses (n, 2) of all nodes at once.

        Batches are stacked along a first axis of n, or a list of n; those that cannot be stacked, and losses that
        ``vmap`` cannot take, go through a loop.
        """
        upper, lower = stacked(uppers), stacked(lowers)
        if self._vmaps and upper is not None and lower is not None:
            try:
                return [self._rows(w, upper, lower) for w in points]
            except RuntimeError as error:  # a data-dependent branch, .item(), an operator without a batching rule
                logger.info("the losses cannot be vectorised over nodes, a loop is used: %s", error)
                self._vmaps = False
        return self.loop(points, uppers, lowers)

    def loop(self, points: Sequence[Tensor], uppers: Any, lowers: Any) -> list[tuple[Tensor, Tensor]]:
        """Return what :meth:`rows` does, node by node: bit for bit what a node alone computes."""
        n = len(points[0])
        batches = list(zip(listed(uppers, n), listed(lowers, n), strict=True))
        results = []
        for w in points:
            pieces, losses = zip(*(self.one(row, *b) for row, b in zip(w, batches, strict=True)), strict=True)
            results.append((torch.stack(pieces), torch.stack(losses)))
        return results

    def check(self, w: Tensor, upper_batch: Any, lower_batch: Any) -> None:
        """Refuse losses that are no scalars, and warn where the lower loss does not depend on x."""
        x, y, _ = (part.detach().requires_grad_() for part in w.split(self.sizes))
        for name, loss, batch in (("upper", self.upper, upper_batch), ("lower", self.lower, lower_batch)):
            value = loss(x, y, batch)
            if not isinstance(value, Tensor) or value.ndim:
                kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise InputError(f"{name}(x, y, batch) must return a scalar tensor, not {kind}: take the mean")
        if not value.requires_grad or torch.autograd.grad(value, x, allow_unused=True)[0] is None:
            warnings.warn(
                "lower(x, y, batch) does not depend on x: the hypergradient through y is zero, x follows upper alone",
                stacklevel=4,
            )


def combined(m: Tensor, penalty: float, *, sizes: Sequence[int]) -> Tensor:
    """Return the gradients (..., P) of the blocks from the pieces (..., Q) of the penalty form."""
    px, py = sizes[:2]
    fx, gx, fy, gy, zy = m.split([px, px, py, py, py], -1)
    return torch.cat([fx + penalty * gx, fy / penalty + gy, zy], -1)


def stacked(batches: Any) -> Any:
    """Return batches of all nodes with a first axis of nodes, or None where their shapes differ."""
    if not isinstance(batches, (list, tuple)):
        return batches
    leaves, shapes = zip(*(tree_flatten(batch) for batch in batches), strict=True)
    columns = list(zip(*leaves, strict=False))
    if any(shape != shapes[0] for shape in shapes):
        return None
    if not all(isinstance(v, Tensor) and v.shape == column[0].shape for column in columns for v in column):
        return None
    return tree_unflatten([torch.stack(column) for column in columns], shapes[0])


def listed(batches: Any, n: int) -> list[Any]:
    """Return one batch a node."""
    if isinstance(batches, (list, tuple)):
        return list(batches)
    return [tree_map(lambda leaf, i=i: leaf[i], batches) for i in range(n)]


def batches_of(
    upper_loaders: Sequence[Any], lower_loaders: Sequence[Any], *, network: Any = None
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield lists of one upper and one lower batch a node, until the shortest loader ends.

    Parameters
    ----------
    upper_loaders, lower_loaders : sequences of loaders
        One a node, each with a length. In a real process: its own, ``[loader]``; take ``[0]`` of what is yielded.
    network : ProcessGroup, optional
        In a real process, so that all stop at the shortest loader of all.
    """
    if not upper_loaders or len(upper_loaders) != len(lower_loaders):
        raise InputError(f"{len(upper_loaders)} upper and {len(lower_loaders)} lower loaders: give one of each a node")
    lengths = [len(loader) for loader in (*upper_loaders, *lower_loaders)]
    shortest = min(lengths) if network is None else int(network.smallest(min(lengths)))
    if shortest < max(lengths):
        logger.warning("loaders have from %d to %d batches: %d steps are made", shortest, max(lengths), shortest)
    for _, *drawn in zip(range(shortest), *upper_loaders, *lower_loaders, strict=False):
        yield drawn[: len(upper_loaders)], drawn[len(upper_loaders) :]


# -------------------------------------------------------------------------------------------------------------- presets


@dataclass(frozen=True)
class Problem:
    """Two losses with the variables they start from: what :class:`DecentralizedBilevel` is given by name.

    >>> problem = Problem.hyper_cleaning(nn.Linear(4, 2), nn.functional.cross_entropy, examples=3)
    >>> batch = {"index": torch.tensor([0, 2]), "input": torch.ones(2, 4), "label": torch.tensor([1, 0])}
    >>> Pieces(problem.upper, problem.lower, Variable(problem.x, "x"), Variable(problem.y, "y")).sizes
    [3, 10, 10]
    """

    upper: Loss
    lower: Loss
    x: Any
    y: Any

    @classmethod
    def hyper_cleaning(
        cls, model: nn.Module, loss: Callable[..., Tensor], *, examples: int, decay: float = 1e-3
    ) -> Problem:
        """Weigh a node's training examples by sigmoid(x_j) so that the model fits its clean validation examples.

        Lower: the mean of sigmoid(x_j) loss_j plus ``decay`` times the squared norm of the parameters; upper: the mean
        loss. Batches are dicts with ``input``, ``label`` and, for the lower loss, ``index`` (b,) of the examples.

        Parameters
        ----------
        model : nn.Module
            y, the classifier.
        loss : callable
            Of outputs and labels, with ``reduction="none"``, such as ``torch.nn.functional.cross_entropy``.
        examples : int
            Training examples of a node. Each node has weights of its own: give ``private_upper=True``.
        decay : float
            Keeps the lower minimiser where it is when weights vanish.
        """

        def upper(x: Tensor, y: Any, batch: Any) -> Tensor:
            return loss(y(batch["input"]), batch["label"])

        def lower(x: Tensor, y: Any, batch: Any) -> Tensor:
            each = loss(y(batch["input"]), batch["label"], reduction="none")
            return (x[batch["index"]].sigmoid() * each).mean() + decay * y.squared_norm()

        dtype = next(model.parameters()).dtype
        return cls(upper, lower, torch.zeros(examples, dtype=dtype), model)

    @classmethod
    def ridge_per_feature(cls, features: int) -> Problem:
        """Learn a penalty exp(x_j) on each coefficient y_j of a linear regression, by its validation error.

        Lower: half the mean squared residual plus half the sum of exp(x_j) y_j^2; upper: half the mean squared
        residual. Batches are dicts with ``input`` (b, features) and ``target`` (b,).
        """

        def upper(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            return 0.5 * (batch["input"] @ y - batch["target"]).square().mean()

        def lower(x: Tensor, y: Tensor, batch: Any) -> Tensor:
            return upper(x, y, batch) + 0.5 * (x.exp() * y.square()).sum()

        return cls(upper, lower, torch.full((features,), -2.0), torch.zeros(features))

    @classmethod
    def meta_representation(
        cls, body: nn.Module, head: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], *, decay: float = 1e-3
    ) -> Problem:
        """Learn a representation ``body`` (x) on which a ``head`` (y) fitted to training data does well on others.

        Lower: loss of head(body(input)) plus ``decay`` times the squared norm of the head; upper: the loss. Batches are
        dicts with ``input`` and ``label``.
        """

        def upper(x: Any, y: Any, batch: Any) -> Tensor:
            return loss(y(x(batch["input"])), batch["label"])

        def lower(x: Any, y: Any, batch: Any) -> Tensor:
            return upper(x, y, batch) + decay * y.squared_norm()

        return cls(upper, lower, body, head)
