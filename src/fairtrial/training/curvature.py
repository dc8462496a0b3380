"""Curvature of a loss without its matrix: products with vectors, extreme eigenpairs, spectra and the tangent kernel.

Everything is exact over *fixed* batches: the mean over all their examples, in parts that fit into memory, so that a
product is the same function of its vector every time and an iteration on it can settle. Vectors are flat, in the order
of the parameters, with their dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairtrial.errors import FairtrialError, InputError

Product = Callable[[Tensor], Tensor]
"""Maps vectors (b, P), one a row, to their products with a symmetric matrix, (b, P)."""


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the entries of ``tensors`` as one vector (P,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of ``vector`` (..., P) in the shapes of ``like``, leading dimensions kept.

    >>> [tuple(part.shape) for part in unflatten(torch.arange(5.0), [torch.zeros(2, 2), torch.zeros(1)])]
    [(2, 2), (1,)]
    """
    parts = vector.split([tensor.numel() for tensor in like], dim=-1)
    return [part.reshape((*vector.shape[:-1], *t.shape)) for part, t in zip(parts, like, strict=True)]


# ------------------------------------------------------------------------------------------------------------- products


class Hessian:
    """The Hessian of a mean loss over fixed batches, (P, P), through its products.

    Parameters
    ----------
    loss : callable
        ``loss(batch)`` returns the *mean* loss of a batch, a scalar that depends on the parameters.
    parameters : sequence of tensors
        What the loss is differentiated by; those without ``requires_grad`` are left out.
    batches : sequence
        The batches, tensors or tuples whose first tensor has an example a row.

    Examples
    --------
    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> hessian = Hessian(lambda x: 0.5 * (x @ w).square().mean(), [w], [torch.eye(2), torch.eye(2)])
    >>> hessian.product(torch.tensor([[2.0, 0.0]]))
    tensor([[1., 0.]])
    """

    def __init__(self, loss: Callable[[Any], Tensor], parameters: Sequence[Tensor], batches: Sequence[Any]) -> None:
        self.loss = loss
        self.parameters, self.batches, self.shares = _checked(parameters, batches)
        self._held: tuple[float, tuple[Tensor, ...]] | None = None

    @property
    def size(self) -> int:
        """Number of parameters, P."""
        return sum(p.numel() for p in self.parameters)

    def value_and_gradient(self) -> tuple[float, Tensor]:
        """Return the mean loss and its gradient (P,)."""
        value, gradient = 0.0, torch.zeros(self.size, dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        for batch, share in zip(self.batches, self.shares, strict=True):
            loss, slopes = self._slopes(batch, create_graph=False)
            gradient.add_(flatten([slope.detach() for slope in slopes]), alpha=share)
            value += share * loss
        return value, gradient

    def product(self, vectors: Tensor) -> Tensor:
        """Return the products (b, P) of the Hessian with ``vectors`` (b, P): one graph a batch, b passes through it."""
        total = torch.zeros_like(vectors)
        for batch, share in zip(self.batches, self.shares, strict=True):
            _, gradient = self._slopes(batch)
            for row, v in zip(total, vectors, strict=True):
                product = _vjp(gradient, self.parameters, unflatten(v, self.parameters), retain=True)
                row.add_(flatten(product), alpha=share)
        return total

    def form_and_gradient(self, vector: Tensor) -> tuple[float, Tensor]:
        """Return ``vector . H vector`` and its gradient (P,) by the parameters, ``vector`` (P,) held fixed.

        At a simple eigenvalue's unit eigenvector this is the eigenvalue and its gradient.
        """
        parts = unflatten(vector, self.parameters)
        value, gradient = 0.0, torch.zeros_like(vector)
        for batch, share in zip(self.batches, self.shares, strict=True):
            _, slopes = self._slopes(batch)
            along = sum(((g * v).sum() for g, v in zip(slopes, parts, strict=True)), start=vector.new_zeros(()))
            if not along.requires_grad:  # a loss linear in the parameters
                continue
            second = torch.autograd.grad(along, self.parameters, create_graph=True, materialize_grads=True)
            form = sum(((s * v).sum() for s, v in zip(second, parts, strict=True)), start=vector.new_zeros(()))
            value += share * float(form.detach())
            if form.requires_grad:
                third = torch.autograd.grad(form, self.parameters, retain_graph=True, materialize_grads=True)
                gradient.add_(flatten(third), alpha=share)
        return value, gradient

    @contextmanager
    def held(self) -> Iterator[Product]:
        """Yield the product for use while the parameters stand still: a single batch's graph is built only once."""
        outermost = self._held is None
        if outermost and len(self.batches) == 1:
            self._held = self._slopes(self.batches[0])
        try:
            yield self.product
        finally:
            if outermost:
                self._held = None

    def _slopes(self, batch: Any, *, create_graph: bool = True) -> tuple[float, tuple[Tensor, ...]]:
        """Return the loss of a batch and its gradient, which can be differentiated again."""
        if self._held is not None:
            return self._held
        loss = scalar(self.loss(batch))
        slopes = _slopes_of(loss, self.parameters, torch.ones_like(loss), create_graph=create_graph)
        return float(loss.detach()), slopes


class GaussNewton:
    """The generalized Gauss-Newton matrix J' H_loss J / n of a mean loss over fixed batches, through its products.

    Parameters
    ----------
    outputs : callable
        ``outputs(batch)`` returns what the loss is a convex function of (logits, predictions), of any shape.
    criterion : callable
        ``criterion(outputs, batch)`` returns the *mean* loss of the batch.
    parameters, batches
        As in :class:`Hessian`.
    """

    def __init__(
        self,
        outputs: Callable[[Any], Tensor],
        criterion: Callable[[Tensor, Any], Tensor],
        parameters: Sequence[Tensor],
        batches: Sequence[Any],
    ) -> None:
        self.outputs, self.criterion = outputs, criterion
        self.parameters, self.batches, self.shares = _checked(parameters, batches)
        self._held: Any = None

    @property
    def size(self) -> int:
        """Number of parameters, P."""
        return sum(p.numel() for p in self.parameters)

    def product(self, vectors: Tensor) -> Tensor:
        """Return the products (b, P) of the matrix with ``vectors`` (b, P)."""
        total = torch.zeros_like(vectors)
        for batch, share in zip(self.batches, self.shares, strict=True):
            z, pulled, cotangent, gradient, at = self._held if self._held is not None else self._graphs(batch)
            for row, v in zip(total, vectors, strict=True):
                # J v: the pull-back J' c is linear in its cotangent c, and differentiating it by c pushes v forward.
                pushed = _vjp(pulled, [cotangent], unflatten(v, self.parameters), retain=True)
                curved = _vjp([gradient], [at], pushed, retain=True)
                row.add_(flatten(_vjp([z], self.parameters, curved, retain=True)), alpha=share)
        return total

    @contextmanager
    def held(self) -> Iterator[Product]:
        """Yield the product for use while the parameters stand still: a single batch's graph is built only once."""
        if len(self.batches) == 1:
            self._held = self._graphs(self.batches[0])
        try:
            yield self.product
        finally:
            self._held = None

    def _graphs(self, batch: Any) -> tuple[Tensor, tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        z = self.outputs(batch)
        cotangent = torch.zeros_like(z, requires_grad=True)
        pulled = _slopes_of(z, self.parameters, cotangent, create_graph=True)
        at = z.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(scalar(self.criterion(at, batch)), at, create_graph=True)
        return z, pulled, cotangent, gradient, at


def _vjp(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor], *, retain: bool) -> Any:
    """Differentiate the outputs that depend on anything; the others (of a linear loss) contribute nothing."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(p) for p in inputs]
    depending, theirs = zip(*pairs, strict=True)
    return torch.autograd.grad(depending, inputs, theirs, retain_graph=retain, materialize_grads=True)


def _slopes_of(z: Tensor, parameters: Sequence[Tensor], cotangent: Tensor, *, create_graph: bool) -> tuple[Tensor, ...]:
    """Return the gradients of ``cotangent . z``, of which at least one parameter must be a cause."""
    found: tuple[Tensor | None, ...] = ()
    if z.requires_grad:
        found = torch.autograd.grad(
            z, parameters, cotangent, create_graph=create_graph, retain_graph=create_graph, allow_unused=True
        )
    if all(slope is None for slope in found):
        raise InputError("the loss depends on none of the parameters: give those that the model computes with")
    return tuple(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True))


def scalar(loss: Tensor) -> Tensor:
    """Return a loss that is one number, and refuse any other."""
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the loss is {what}: return the mean loss of the batch, a scalar tensor")
    return loss


def _checked(parameters: Sequence[Tensor], batches: Sequence[Any]) -> tuple[list[Tensor], list[Any], list[float]]:
    """Return trainable parameters, batches, and each batch's share of all examples."""
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        raise InputError("no parameter requires a gradient: curvature is taken with respect to those that do")
    for p in trainable:
        if p.dtype not in (torch.float32, torch.float64):
            raise InputError(f"a parameter of shape {tuple(p.shape)} is {p.dtype}: curvature needs float32 or float64")
    batches = list(batches)
    if not batches:
        raise InputError("no batches: give at least one, a tensor or a tuple of tensors")
    try:
        counts = [len(batch if isinstance(batch, Tensor) else batch[0]) for batch in batches]
    except (TypeError, KeyError, IndexError):
        raise InputError("batches: give tensors, or tuples whose first tensor has an example a row") from None
    if not sum(counts):
        raise InputError("the batches have no examples")
    return trainable, batches, [count / sum(counts) for count in counts]


# ---------------------------------------------------------------------------------------------------------- eigenvalues


@dataclass(frozen=True)
class Eigenpairs:
    """The algebraically largest eigenpairs found.

    Attributes
    ----------
    values : (k,) float64, descending.
    vectors : (k, P), orthonormal.
    residuals : (k,) float64
        ``|A v - value v|``: an eigenvalue of A lies within it of the value.
    products : int
        Products with A that were spent.
    converged : bool
        Whether every residual is within the tolerance.
    """

    values: np.ndarray
    vectors: Tensor
    residuals: np.ndarray
    products: int
    converged: bool


def top_eigenpairs(
    product: Product,
    size: int,
    k: int = 1,
    *,
    start: Tensor | None = None,
    tol: float = 1e-3,
    max_products: int = 40,
    basis: int | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """Return the ``k`` algebraically largest eigenpairs of a symmetric matrix given by its products.

    Thick-restart block Lanczos with full orthogonalisation, twice a step. The block has two vectors where ``k > 1``, so
    that a twofold eigenvalue is found twice; a large negative eigenvalue is never taken for the top.

    Parameters
    ----------
    product : callable
        Maps vectors (b, P) to products (b, P).
    size : int
        P.
    k : int
        From 1 to P.
    start : (j, P) tensor, optional
        Guesses, such as the vectors of an earlier measurement; a tenth of noise is mixed in, so that a direction they
        lack can enter.
    tol : float
        Stop when every residual is at most ``tol * |value|``.
    max_products : int
        Give up after so many products and return what there is.
    basis : int, optional
        Vectors kept at most, memory of ``basis x P``; by default ``max(20, 2 k + 10)``.
    generator : torch.Generator, optional
        Draws the start; by default one of seed 0.
    dtype, device
        Of the vectors.

    Examples
    --------
    >>> a = torch.diag(torch.tensor([-9.0, 1.0, 3.0]))
    >>> top_eigenpairs(lambda v: v @ a, 3).values.round(4)
    array([3.])
    """
    if not 1 <= k <= size:
        raise InputError(f"k={k}: from 1 to the number of parameters, {size}")
    if not (tol >= 0 and max_products >= 1):
        raise InputError(f"tol={tol}, max_products={max_products}: at least 0 and 1")
    width = min(2 if k > 1 else 1, size)
    cap = min(size, max(basis or max(20, 2 * k + 10), k + 2 * width))
    generator = generator or torch.Generator(device=device).manual_seed(0)

    def noise(rows: int) -> Tensor:
        draw = torch.randn(rows, size, generator=generator, dtype=dtype, device=device)
        return draw / draw.norm(dim=1, keepdim=True)

    first = noise(width)
    if start is not None:
        given = start[:width].to(device, dtype)
        first[: len(given)] = given / given.norm(dim=1, keepdim=True) + 0.1 * first[: len(given)]

    v = torch.zeros(cap, size, dtype=dtype, device=device)  # rows: an orthonormal basis
    projected = np.zeros((cap, cap))  # V A V'
    used = 0  # rows of v whose products are known
    block = _extend(v[:0], first, noise)
    products = 0
    while True:
        new = slice(used, used + len(block))
        v[new] = block
        w = product(block)
        if not bool(w.isfinite().all()):
            raise FairtrialError("a product with the matrix is not finite: nothing can be measured any more")
        products += len(block)
        used += len(block)
        coefficients = v[:used] @ w.T
        w = w - coefficients.T @ v[:used]
        again = v[:used] @ w.T
        w -= again.T @ v[:used]
        projected[:used, new] = (coefficients + again).double().cpu().numpy()
        projected[new, :used] = projected[:used, new].T
        values, s = np.linalg.eigh((projected[:used, :used] + projected[:used, :used].T) / 2)
        values, s = values[::-1], s[:, ::-1]
        # A (V' s) - value V' s = W' s[new]: what the basis does not hold of the last block's products.
        gram = (w @ w.T).double().cpu().numpy()
        last = s[new, :k]
        residuals = np.sqrt(np.maximum(np.einsum("ij,ik,kj->j", last, gram, last), 0))
        enough = used >= k
        converged = bool(enough and (residuals <= tol * np.abs(values[:k])).all())
        if (enough and (converged or products >= max_products)) or used >= size:
            rotation = torch.as_tensor(s[:, :k].T.copy(), dtype=dtype, device=device)
            return Eigenpairs(values[:k].copy(), rotation @ v[:used], residuals, products, converged)
        if used + width > cap:  # restart from the best Ritz vectors, whose products with A are known
            keep = min(k + width, cap - width)
            rotation = torch.as_tensor(s[:, :keep].T.copy(), dtype=dtype, device=device)
            v[:keep] = rotation @ v[:used]
            projected[:] = 0
            projected[range(keep), range(keep)] = values[:keep]
            used = keep
        block = _extend(v[:used], w[: min(width, cap - used)], noise)


def _extend(v: Tensor, w: Tensor, noise: Callable[[int], Tensor]) -> Tensor:
    """Return rows spanning those of ``w``, orthonormal and orthogonal to ``v``; a dependent row is drawn anew."""
    rows = w[:0]
    for row in w:
        while True:
            row = row / row.norm()
            for _ in range(2):
                row = row - (v @ row) @ v - (rows @ row) @ rows
            if row.norm() > 1e-3:  # False for nan too: a row of zeros
                break
            row = noise(1)[0]
        rows = torch.cat([rows, row[None] / row.norm()])
    return rows


def spectral_density(
    product: Product,
    size: int,
    *,
    draws: int = 4,
    steps: int = 30,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights, both (draws x steps,), of the eigenvalue distribution of a symmetric matrix.

    Stochastic Lanczos quadrature (Golub and Meurant 2010; Ubaru, Chen and Saad 2017): ``sum weights * f(nodes)``
    estimates ``trace f(A) / P`` without bias from random start vectors; the weights sum to 1.

    Parameters
    ----------
    product, size, generator, dtype, device
        As in :func:`top_eigenpairs`.
    draws : int
        Random start vectors; the error of a trace falls as ``1 / sqrt(draws P)``.
    steps : int
        Lanczos steps a draw; polynomials up to degree ``2 steps - 1`` are integrated exactly.

    Examples
    --------
    >>> a = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
    >>> nodes, weights = spectral_density(lambda v: v @ a, 3, draws=1, steps=3)
    >>> nodes.round(4), round(float(weights.sum()), 6)
    (array([1., 2., 3.]), 1.0)
    """
    if draws < 1 or steps < 1:
        raise InputError(f"draws={draws}, steps={steps}: at least 1")
    generator = generator or torch.Generator(device=device).manual_seed(0)
    steps = min(steps, size)
    nodes, weights = [], []
    for _ in range(draws):
        start = torch.randn(1, size, generator=generator, dtype=dtype, device=device)
        v = torch.zeros(steps, size, dtype=dtype, device=device)
        alpha, beta = np.zeros(steps), np.zeros(max(steps - 1, 0))
        v[0] = start[0] / start.norm()
        for j in range(steps):
            w = product(v[j : j + 1])[0]
            alpha[j] = float(w @ v[j])
            for _ in range(2):
                w = w - (v[: j + 1] @ w) @ v[: j + 1]
            if j + 1 == steps:
                break
            beta[j] = float(w.norm())
            if beta[j] < 1e-6 * max(1e-30, np.abs(alpha[: j + 1]).max()):  # an invariant subspace: the rule is exact
                alpha, beta = alpha[: j + 1], beta[:j]
                break
            v[j + 1] = w / beta[j]
        theta, s = np.linalg.eigh(np.diag(alpha) + np.diag(beta, 1) + np.diag(beta, -1))
        nodes.append(theta)
        weights.append(s[0] ** 2 / draws)
    return np.concatenate(nodes), np.concatenate(weights)


# ------------------------------------------------------------------------------------------------ neural tangent kernel


def tangent_kernel(
    model: nn.Module, x: Tensor, *, projection: Tensor | None = None, max_entries: float = 2e8
) -> Tensor:
    """Return the empirical neural tangent kernel J J' of a model on probe examples.

    The Jacobian is taken for as many parameter tensors at a time as fit, and only their share of the kernel is kept.

    Parameters
    ----------
    model : nn.Module
        Maps (m, ...) to (m, C) or (m,), each example by itself; put BatchNorm and dropout in evaluation mode.
    x : (m, ...) tensor
        Probe examples.
    projection : (C,) tensor, optional
        Takes the kernel of ``outputs @ projection``, (m, m); left out, of all outputs, (m, C, m, C).
    max_entries : float
        Jacobian entries held at once.

    Raises
    ------
    InputError
        If the model has no trainable parameter, or its outputs are not one row an example.

    Examples
    --------
    >>> model = nn.Linear(2, 1, bias=False)
    >>> tangent_kernel(model, torch.eye(2)).reshape(2, 2)
    tensor([[1., 0.],
            [0., 1.]])
    """
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError("the model has no trainable parameter: the tangent kernel is of those")
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    fixed |= dict(model.named_buffers())
    with torch.no_grad():
        shape = model(x).shape
    if len(shape) > 2 or shape[0] != len(x):
        raise InputError(f"the model returns shape {tuple(shape)}: the tangent kernel needs (m, C) or (m,) outputs")
    outputs = 1 if projection is not None or len(shape) == 1 else shape[1]

    def one(trained: dict[str, Tensor], rest: dict[str, Tensor], example: Tensor) -> Tensor:
        z = torch.func.functional_call(model, {**trained, **rest}, (example[None],)).reshape(-1)
        return z @ projection.to(z) if projection is not None else z

    kernel: Tensor | None = None
    for names in _groups(parameters, len(x) * outputs, max_entries):
        trained = {name: parameters[name] for name in names}
        rest = fixed | {name: p for name, p in parameters.items() if name not in trained}
        rows = torch.func.vmap(torch.func.jacrev(one), in_dims=(None, None, 0))(trained, rest, x)
        for jacobian in rows.values():
            flat = jacobian.reshape(len(x) * outputs, -1)  # (m C, numel)
            kernel = flat @ flat.T if kernel is None else kernel.addmm_(flat, flat.T)
    assert kernel is not None
    if projection is not None:
        return kernel
    return kernel.reshape(len(x), outputs, len(x), outputs)


def _groups(parameters: dict[str, Tensor], rows: int, max_entries: float) -> Iterator[list[str]]:
    """Yield names of parameter tensors whose Jacobians together stay below ``max_entries``, at least one at a time."""
    names: list[str] = []
    entries = 0
    for name, p in parameters.items():
        if names and (entries + p.numel()) * rows > max_entries:
            yield names
            names, entries = [], 0
        names.append(name)
        entries += p.numel()
    yield names
