"""A two-layer ReLU regressor trained by full-batch gradient descent at a fixed step: as stable as the step makes it."""

from __future__ import annotations

import re
import warnings
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y, validate_data
from torch import Tensor, nn

from fairtrial.errors import FairtrialError, InputError
from fairtrial.training.curvature import Hessian, top_eigenpairs
from fairtrial.training.sparse_connectivity.patches import LocallyConnected, extract, uncovered

DOUBLE_BELOW = 1e7  # activations up to which the training runs in float64


class StableTwoLayerReLU(RegressorMixin, BaseEstimator):
    """Two layers with ReLU, squared loss, full-batch gradient descent without momentum.

    Parameters
    ----------
    connectivity : {"dense", "local", "conv", "random"}
        What a neuron sees: the input; one patch; every patch, averaged; or as many entries as a patch, at random.
    patch, stride : int
        Entries of a patch (of a vector) or its side (of an image); the stride is the patch, left out.
    width : int
        Hidden neurons.
    learning_rate : float or "edge*r"
        The step; "edge*0.9" is 0.9 times two over the sharpness at the start.
    steps : int
        At most; the descent also ends where the gradient's norm is below 1e-6.
    weight_decay : float
        Decoupled.
    random_state : int, RandomState or None

    Attributes
    ----------
    module_ : nn.Sequential
        For :func:`~fairtrial.training.sparse_connectivity.certificate.stability_certificate`.
    sharpness_, edge_ : float
        At the end; two over the step.
    loss_ : float
        Half the mean squared residual at the end.
    n_iter_ : int

    Examples
    --------
    >>> X = np.random.default_rng(0).standard_normal((40, 8)); y = X[:, 0]
    >>> net = StableTwoLayerReLU(connectivity="conv", patch=4, width=20, learning_rate=0.1, steps=200, random_state=0)
    >>> net.fit(X, y).loss_ < 0.5 * y.var()
    np.True_
    """

    def __init__(
        self,
        connectivity: Literal["dense", "local", "conv", "random"] = "dense",
        *,
        patch: int | None = None,
        stride: int | None = None,
        width: int = 200,
        learning_rate: float | str = 1.0,
        steps: int = 8000,
        weight_decay: float = 0.0,
        random_state: Any = None,
    ) -> None:
        self.connectivity = connectivity
        self.patch = patch
        self.stride = stride
        self.width = width
        self.learning_rate = learning_rate
        self.steps = steps
        self.weight_decay = weight_decay
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> StableTwoLayerReLU:
        """Train on inputs (n, d), or images (n, h, w), and targets (n,).

        Raises
        ------
        InputError
            If a parameter cannot be.
        FairtrialError
            If the descent diverges: the message names the sharpness at the start.
        """
        if isinstance(X, np.ndarray) and X.ndim == 3:
            X, y = check_X_y(X, y, dtype=np.float64, allow_nd=True, y_numeric=True)
            self.n_features_in_ = X[0].size
        else:
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        if self.connectivity not in ("dense", "local", "conv", "random"):
            raise InputError(f"connectivity={self.connectivity!r}: 'dense', 'local', 'conv' or 'random'")
        if self.connectivity != "dense" and self.patch is None:
            raise InputError(f"connectivity={self.connectivity!r} needs patch=")
        counts = self.width, self.steps
        if (
            not all(isinstance(count, Integral) and count >= 1 for count in counts)
            or not 0 <= self.weight_decay < np.inf
        ):
            raise InputError(
                f"width={self.width}, steps={self.steps}, weight_decay={self.weight_decay}: whole numbers from 1, and "
                "a number from 0"
            )
        if self.connectivity != "dense" and (lost := max(uncovered(side, *self._window()) for side in X.shape[1:])):
            warnings.warn(f"{lost} entries of a side lie in no patch: they are never seen", stacklevel=2)
        seed = (
            np.random.RandomState(self.random_state) if not hasattr(self.random_state, "randint") else self.random_state
        )
        g = torch.Generator().manual_seed(int(seed.randint(2**31)))
        self.module_ = self._build(X.shape[1:], g)
        patches = 1 if self.connectivity != "conv" else extract(torch.zeros(1, *X.shape[1:]), *self._window()).shape[1]
        dtype = torch.float64 if len(X) * self.width * patches <= DOUBLE_BELOW else torch.float32
        self.module_ = self.module_.to(dtype)
        x, t = torch.tensor(X, dtype=dtype), torch.tensor(np.asarray(y), dtype=dtype)
        self.edge_ = 2 / self._step(x, t)
        self._descend(x, t, 2 / self.edge_)
        self.sharpness_ = self._sharpness(x, t)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return predictions (n,)."""
        check_is_fitted(self, "module_")
        if isinstance(X, np.ndarray) and X.ndim == 3:
            X = check_array(X, dtype=np.float64, allow_nd=True)
        else:
            X = validate_data(self, X, dtype=np.float64, reset=False)
        if X[0].size != self.n_features_in_:
            raise InputError(f"inputs of shape {X.shape[1:]}: {self.n_features_in_} numbers each were trained on")
        like = next(self.module_.parameters())
        with torch.no_grad():
            return self.module_(torch.tensor(X).to(like)).reshape(-1).double().numpy()

    def _window(self) -> tuple[int, int]:
        assert self.patch is not None
        return self.patch, self.patch if self.stride is None else self.stride

    def _build(self, shape: tuple[int, ...], g: torch.Generator) -> nn.Sequential:
        """Draw w ~ N(0, 1/m) and v ~ N(0, 1/width), with b and c at 0."""
        size = int(np.prod(shape))
        first: nn.Module
        if self.connectivity == "dense":
            first, m = nn.Linear(size, self.width), size
        elif self.connectivity == "conv":
            patch, stride = self._window()
            kind: Any = nn.Conv1d if len(shape) == 1 else nn.Conv2d
            extract(torch.zeros(1, *shape), patch, stride)  # refuses what does not fit
            first, m = kind(1, self.width, patch, stride=stride), patch ** len(shape)
        else:
            numbers = extract(torch.arange(size).reshape(1, *shape), *self._window())[0]  # (J, m)
            m = numbers.shape[1]
            index = numbers[torch.arange(self.width) % len(numbers)]
            if self.connectivity == "random":
                index = torch.stack([torch.randperm(size, generator=g)[:m] for _ in range(self.width)])
            first = LocallyConnected(index)
        last = nn.Linear(self.width, 1)
        weight, bias = first.weight, first.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=g) / m**0.5)
            bias.zero_()
            last.weight.copy_(torch.randn(last.weight.shape, generator=g) / self.width**0.5)
            last.bias.zero_()
        if self.connectivity != "conv":
            return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)
        pool = nn.AdaptiveAvgPool1d(1) if len(shape) == 1 else nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(nn.Unflatten(1, (1, shape[0])), first, nn.ReLU(), pool, nn.Flatten(), last)

    def _loss(self, x: Tensor, t: Tensor) -> Tensor:
        return 0.5 * (self.module_(x).reshape(-1) - t).square().mean()

    def _sharpness(self, x: Tensor, t: Tensor) -> float:
        hessian = Hessian(lambda b: self._loss(*b), list(self.module_.parameters()), [(x, t)])
        with hessian.held() as product:
            return float(top_eigenpairs(product, hessian.size, tol=1e-3, max_products=80, dtype=x.dtype).values[0])

    def _step(self, x: Tensor, t: Tensor) -> float:
        if isinstance(self.learning_rate, str):
            told = re.fullmatch(r"edge\*(\d*\.?\d+)", self.learning_rate)
            if not told or float(told[1]) <= 0:
                raise InputError(f'learning_rate={self.learning_rate!r}: a number, or "edge*0.9"')
            return float(told[1]) * 2 / max(self._sharpness(x, t), 1e-12)
        if not isinstance(self.learning_rate, Real) or not 0 < self.learning_rate < np.inf:
            raise InputError(f'learning_rate={self.learning_rate}: a positive number, or "edge*0.9"')
        return float(self.learning_rate)

    def _descend(self, x: Tensor, t: Tensor, step: float) -> None:
        parameters = list(self.module_.parameters())
        start = float(self._loss(x, t).detach())
        beyond = 0
        for i in range(1, self.steps + 1):
            loss = self._loss(x, t)
            gradient = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                if self.weight_decay:
                    torch._foreach_mul_(parameters, 1 - step * self.weight_decay)
                torch._foreach_add_(parameters, gradient, alpha=-step)
            self.n_iter_ = i
            if i % 20 == 0 or i == self.steps:
                value = float(loss.detach())
                beyond = beyond + 1 if value > 10 * start else 0
                if not np.isfinite(value) or beyond == 2:
                    raise FairtrialError(
                        f"gradient descent diverged at step {i}: the loss is {value:.3g} from {start:.3g} with "
                        f"learning_rate={step:.3g}; two over the step is {2 / step:.3g}: take a smaller one, or "
                        '"edge*0.5"'
                    )
                if sum(float(g.square().sum()) for g in gradient) < 1e-12:
                    break
        self.loss_ = np.float64(self._loss(x, t).detach())
