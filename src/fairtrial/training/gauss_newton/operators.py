"""The margins of a batch as a linear map of the parameters, for those who bring their own solver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.training.curvature import flatten, unflatten
from fairtrial.training.gauss_newton.linearised import Closure, Linearised, Products

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class MarginMap:
    """The derivative M of the margins of a batch by the parameters, (B, P), through its products.

    Parameters
    ----------
    closure : callable
        Returns ``(logits (..., K), labels (...))``, as for
        :class:`~fairtrial.training.gauss_newton.optimizer.FastGaussNewton`.
    parameters : sequence of tensors
        In the order of the flat vectors; those without ``requires_grad`` are left out.
    products, model
        As for the optimizer.

    Attributes
    ----------
    shape : (B, P)
    margins : (B,)
    weights : (B,)
        s / B: the Fast Gauss-Newton matrix is ``M' diag(weights) M``.

    Examples
    --------
    >>> model = nn.Linear(2, 3, bias=False)
    >>> m = MarginMap(lambda: (model(torch.eye(2)), torch.tensor([0, 2])), model.parameters())
    >>> v, u = torch.ones(6), torch.ones(2)
    >>> m.shape, bool(torch.isclose(m.jvp(v) @ u, v @ m.vjp(u), atol=1e-6))
    ((2, 6), True)

    In SciPy's hands, with the matrix of Fast Gauss-Newton made of its parts:

    >>> from scipy.sparse import diags
    >>> from scipy.sparse.linalg import aslinearoperator, eigsh
    >>> s = m.to_scipy()
    >>> fgn = s.T @ aslinearoperator(diags(m.weights.numpy())) @ s
    >>> eigsh(fgn, k=1, return_eigenvectors=False).shape
    (1,)
    """

    def __init__(
        self,
        closure: Closure,
        parameters: Sequence[Tensor],
        *,
        products: Products = "double-backward",
        model: nn.Module | None = None,
        ignore_index: int = -100,
    ) -> None:
        if products not in get_args(Products):
            raise UnknownNameError("kind of products", products, get_args(Products))
        if products == "forward" and model is None:
            raise InputError("products='forward' calls the model itself: give model=")
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise InputError("no parameter requires a gradient: margins are differentiated by those that do")
        with torch.enable_grad():
            self._batch = Linearised(
                [closure], self.parameters, products=products, model=model, ignore_index=ignore_index
            )
        found = self._batch.margins
        self.margins, self._slope = found.margin, found.slope
        self.weights = found.weight / self._batch.total
        self.shape = self._batch.total, sum(p.numel() for p in self.parameters)

    def jvp(self, vector: Tensor) -> Tensor:
        """Return M v, (B,), for a flat vector (P,)."""
        if vector.shape != (self.shape[1],):
            raise InputError(f"the vector has shape {tuple(vector.shape)}: give ({self.shape[1]},)")
        return torch.linalg.vecdot(self._slope, self._batch.push(unflatten(vector, self.parameters)))

    def vjp(self, cotangent: Tensor) -> Tensor:
        """Return M' u, flat (P,), for (B,)."""
        if cotangent.shape != (self.shape[0],):
            raise InputError(f"the cotangent has shape {tuple(cotangent.shape)}: give ({self.shape[0]},)")
        return flatten(self._batch.pull(self._slope * cotangent[:, None]))

    def fgn_matvec(self, vector: Tensor) -> Tensor:
        """Return the product (P,) of the Fast Gauss-Newton matrix of the mean loss with a flat vector (P,)."""
        return self.vjp(self.weights * self.jvp(vector))

    def to_scipy(self) -> LinearOperator:
        """Return M as SciPy's (B, P) operator with its adjoint; arrays go to the parameters' device and back."""
        from scipy.sparse.linalg import LinearOperator

        like = self.margins

        def there(function: object) -> object:
            def product(array: object) -> object:
                return function(torch.as_tensor(array).reshape(-1).to(like)).cpu().numpy()  # type: ignore[operator]

            return product

        dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
        return LinearOperator(self.shape, matvec=there(self.jvp), rmatvec=there(self.vjp), dtype=dtype)
