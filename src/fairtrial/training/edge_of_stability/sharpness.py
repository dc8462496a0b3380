"""Sharpness, its gradient and its alignment with the parameters, on a fixed probe.

Sharpness S is the largest eigenvalue of the Hessian of the unregularised mean loss over the probe; weight decay lambda
stays outside and lowers the edge instead. S = u'Hu at its unit eigenvector u, and where S is simple its gradient is
that of u'Hu with u held fixed. How S answers to a uniform shrinking of the parameters theta is A = theta . grad S, and
kappa = A / S is the local degree of homogeneity of the sharpness: 2 (depth - 1) for the Gauss-Newton sharpness of a
bias-free ReLU network, -2 for a scale-invariant one, whose decay *raises* sharpness.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fairtrial.errors import FairtrialError, InputError
from fairtrial.training.curvature import (
    Eigenpairs,
    Hessian,
    flatten,
    scalar,
    spectral_density,
    top_eigenpairs,
    unflatten,
)

DEGENERATE = 1e-3
"""Relative gap of the two largest eigenvalues below which neither has a gradient of its own."""


@dataclass(frozen=True)
class SharpnessMeasurement:
    """What one measurement found.

    Attributes
    ----------
    value, residual : float
        The sharpness S; an eigenvalue of the Hessian lies within ``residual`` of it.
    vector : (P,) tensor
        Its unit eigenvector u.
    loss : float
        The mean loss of the probe, without weight decay.
    loss_gradient : (P,) tensor
        grad L.
    grad_along : float
        ``u . grad L``.
    products : int
        Hessian-vector products spent.
    seconds : float
    gradient : (P,) tensor or None
        grad S; of the mean of the two largest eigenvalues where they are ``degenerate``.
    degenerate : bool
        Whether the two largest eigenvalues are closer than 1e-3 of the largest.
    A, cos, kappa : float
        ``theta . grad S``, its cosine, and ``A / S``; nan without a gradient.
    alpha, beta : float
        Progressive sharpening ``-(P grad L) . grad S`` and self-stabilisation ``|P grad S|^2``, P the projection that
        takes u away; nan without a gradient.
    layers : DataFrame or None
        A row a parameter tensor: ``norm``, shares of A and of ``|grad S|^2``, and ``kappa``.
    """

    value: float
    residual: float
    vector: Tensor = field(repr=False)
    loss: float
    loss_gradient: Tensor = field(repr=False)
    grad_along: float
    products: int
    seconds: float
    gradient: Tensor | None = field(default=None, repr=False)
    degenerate: bool = False
    A: float = float("nan")
    cos: float = float("nan")
    kappa: float = float("nan")
    alpha: float = float("nan")
    beta: float = float("nan")
    layers: pd.DataFrame | None = field(default=None, repr=False)


class Sharpness:
    """A meter of the sharpness of a model on a fixed probe. Measuring changes nothing of the model or of random state.

    Parameters
    ----------
    model : nn.Module
        Twice differentiable. BatchNorm must be in evaluation mode, and dropout too unless ``freeze_rng``.
    loss_fn : callable
        ``loss_fn(model, batch)`` returns the *mean* loss of a batch, without weight decay.
    batches : sequence
        The probe: tensors or tuples of tensors with an example a row, in parts that fit into memory. The result does
        not depend on how it is parted.
    params : sequence of tensors, optional
        Restricts the Hessian to some parameters; by default all that require a gradient.
    freeze_rng : bool
        Draw the same dropout masks in every pass, from a fixed seed.
    tol, max_products
        Stop when the residual is within ``tol`` of the value, or give up after so many products.

    Raises
    ------
    InputError
        If the loss is no scalar, dropout or BatchNorm is active, or a second derivative is missing. A loss that looks
        like a sum over examples is warned about: its sharpness grows with the probe.

    Examples
    --------
    >>> a, b = (torch.nn.Parameter(torch.tensor(v)) for v in (2.0, 0.5))
    >>> model = torch.nn.ParameterList([a, b])
    >>> probe = Sharpness(model, lambda m, x: (0.5 * (m[0] * m[1] * x - 1) ** 2).mean(), [torch.ones(1)])
    >>> round(probe.measure().value, 4)  # S = a^2 + b^2 where a b = 1
    4.25
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        batches: Sequence[Any],
        *,
        params: Sequence[Tensor] | None = None,
        freeze_rng: bool = False,
        tol: float = 1e-3,
        max_products: int = 40,
    ) -> None:
        self.model, self.loss_fn, self.freeze_rng = model, loss_fn, freeze_rng
        self.tol, self.max_products = tol, max_products
        chosen = list(model.parameters() if params is None else params)
        self.hessian = Hessian(self._loss, chosen, batches)
        self.parameters = self.hessian.parameters
        names = {id(p): name for name, p in model.named_parameters()}
        self.names = [names.get(id(p), f"parameter {i}") for i, p in enumerate(self.parameters)]
        self._previous: Tensor | None = None
        self._check_mean(self.hessian.batches[0])

    def hvp(self, vector: Tensor) -> Tensor:
        """Return the Hessian-vector product (P,) of ``vector`` (P,)."""
        if vector.shape != (self.hessian.size,):
            raise InputError(f"the vector has shape {tuple(vector.shape)}: give ({self.hessian.size},)")
        with self._untouched():
            return self.hessian.product(vector[None])[0]

    def top_eigenpairs(self, k: int = 1, *, precondition: Tensor | None = None) -> Eigenpairs:
        """Return the ``k`` largest eigenpairs of the Hessian, started at the ones found before.

        ``precondition`` (P,), positive: of ``D^-1/2 H D^-1/2``, similar to ``D^-1 H``.
        """
        size = self.hessian.size
        if precondition is not None and (precondition.shape != (size,) or not bool((precondition > 0).all())):
            raise InputError(
                f"precondition: {size} positive numbers are needed, one for each of the parameters' entries"
            )
        scale = None if precondition is None else precondition.rsqrt()
        with self._untouched(), self.hessian.held() as product:

            def scaled(v: Tensor) -> Tensor:
                return product(v) if scale is None else scale * product(scale * v)

            like = self.parameters[0]
            pairs = top_eigenpairs(
                scaled, self.hessian.size, k, start=self._previous, tol=self.tol, max_products=self.max_products,
                dtype=like.dtype, device=like.device,
                generator=torch.Generator(device=like.device).manual_seed(0),
            )  # fmt: skip
        self._previous = pairs.vectors
        return pairs

    def spectrum_density(self, draws: int = 4, steps: int = 30) -> tuple[np.ndarray, np.ndarray]:
        """Return nodes and weights of the Hessian's spectrum by stochastic Lanczos quadrature."""
        like = self.parameters[0]
        with self._untouched(), self.hessian.held() as product:
            return spectral_density(
                product, self.hessian.size, draws=draws, steps=steps, dtype=like.dtype, device=like.device
            )

    def measure(self, gradient: bool = False, *, precondition: Tensor | None = None) -> SharpnessMeasurement:
        """Measure the sharpness, and with ``gradient`` also its gradient and alignment.

        Parameters
        ----------
        gradient : bool
            Costs a third-order pass, about three gradients, and the second eigenvalue.
        precondition : (P,) tensor, optional
            The optimizer's preconditioner D: the sharpness is then the largest eigenvalue of ``D^-1 H``. Not together
            with ``gradient``.

        Raises
        ------
        FairtrialError
            If the loss or a product is not finite.
        """
        if gradient and precondition is not None:
            raise InputError("the gradient of a preconditioned sharpness is not defined here: leave one of them out")
        began = time.perf_counter()
        with self._untouched(), self.hessian.held():
            loss, slope = self.hessian.value_and_gradient()
            if not np.isfinite(loss):
                raise FairtrialError(f"the probe's loss is {loss}: nothing can be measured any more")
            pairs = self.top_eigenpairs(min(2, self.hessian.size) if gradient else 1, precondition=precondition)
            u = pairs.vectors[0]
            found: dict[str, Any] = {}
            if gradient:
                found = self._gradient(pairs, slope)
        return SharpnessMeasurement(
            value=float(pairs.values[0]),
            residual=float(pairs.residuals[0]),
            vector=u,
            loss=loss,
            loss_gradient=slope,
            grad_along=float(u @ slope),
            products=pairs.products,
            seconds=time.perf_counter() - began,
            **found,
        )

    def _gradient(self, pairs: Eigenpairs, slope: Tensor) -> dict[str, Any]:
        values, u = pairs.values, pairs.vectors[0]
        degenerate = len(values) > 1 and values[0] - values[1] < DEGENERATE * abs(values[0])
        cluster = pairs.vectors[: 2 if degenerate else 1]
        rows = torch.stack([self.hessian.form_and_gradient(v)[1] for v in cluster])
        grad = rows.mean(0)
        theta = flatten([p.detach() for p in self.parameters])
        aligned = float(theta @ grad)
        across = slope - (u @ slope) * u
        return {
            "gradient": grad,
            "degenerate": bool(degenerate),
            "A": aligned,
            "cos": aligned / max(float(theta.norm() * grad.norm()), 1e-30),
            "kappa": aligned / float(values[0]) if values[0] else float("nan"),
            "alpha": -float(across @ grad),
            "beta": float((grad - (u @ grad) * u).square().sum()),
            "layers": self._layers(theta, grad, float(values[0])),
        }

    def _layers(self, theta: Tensor, grad: Tensor, value: float) -> pd.DataFrame:
        parts = list(zip(unflatten(theta, self.parameters), unflatten(grad, self.parameters), strict=True))
        aligned = np.array([float((t * g).sum()) for t, g in parts])
        squared = np.array([float(g.square().sum()) for _, g in parts])
        return pd.DataFrame(
            {
                "layer": self.names,
                "norm": [float(t.norm()) for t, _ in parts],
                "share_of_A": aligned / aligned.sum() if aligned.sum() else np.nan,
                "share_of_gradient": squared / squared.sum() if squared.sum() else np.nan,
                "kappa": aligned / value if value else np.nan,
            }
        )

    # -------------------------------------------------------------------------------------------------------- safety

    def _loss(self, batch: Any) -> Tensor:
        if self.freeze_rng:
            devices = {p.device for p in self.parameters if p.device.type == "cuda"}
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(0)
                return self.loss_fn(self.model, batch)
        return self.loss_fn(self.model, batch)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Refuse what would make the probe noisy or change the model, and say what a missing derivative needs."""
        for name, module in self.model.named_modules():
            if not module.training:
                continue
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                raise InputError(f"{name}: BatchNorm in training mode depends on the batch: put it in eval() mode")
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and not self.freeze_rng:
                raise InputError(
                    f"{name}: dropout is active and would be measured as noise: eval() it, or freeze_rng=True"
                )
        try:
            with torch.enable_grad():
                yield
        except torch.OutOfMemoryError as error:
            raise InputError(
                "a batch of the probe does not fit into memory: give it in more and smaller batches"
            ) from error
        except RuntimeError as error:
            if "derivative" in str(error) and "not implemented" in str(error):
                raise InputError(
                    f"the model has no second derivative ({error}): switch fused attention off, by "
                    'attn_implementation="eager" or torch.nn.attention.sdpa_kernel(SDPBackend.MATH)'
                ) from error
            raise

    def _check_mean(self, batch: Any) -> None:
        """Warn where a batch given twice has another loss: that of a mean is the same."""
        tensors = (batch,) if isinstance(batch, Tensor) else tuple(batch)
        if not all(isinstance(t, Tensor) and t.dim() for t in tensors):
            return
        doubled = [torch.cat([t, t]) for t in tensors]
        with self._untouched(), torch.no_grad():
            once = float(scalar(self._loss(batch)))
            twice = float(self._loss(doubled[0] if isinstance(batch, Tensor) else type(batch)(doubled)))
        if not self.freeze_rng and np.isfinite(once) and abs(twice - once) > 0.01 * max(abs(once), 1e-12):
            warnings.warn(
                f"the loss of a batch given twice is {twice:.3g} instead of {once:.3g}: it is no mean over examples, "
                "and its sharpness grows with the probe",
                stacklevel=3,
            )
