"""Patches of inputs, and two-layer ReLU networks read as weights on patches.

    f(x) = c + sum_k v_k mean_{j in J_k} relu(w_k . p_j(x) - b_k)

A dense layer sees one patch, the whole input; a locally connected neuron sees one place; a convolution with mean
pooling sees all places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairtrial.errors import InputError


def places(size: int, patch: int, stride: int) -> int:
    """Return how many patches of ``patch`` fit into ``size``.

    Raises
    ------
    InputError
        If not even one does.
    """
    if not (isinstance(patch, Integral) and isinstance(stride, Integral) and 1 <= patch <= size and stride >= 1):
        raise InputError(f"patch={patch}, stride={stride}: a patch from 1 to {size} and a stride from 1 are needed")
    return (size - patch) // stride + 1


def uncovered(size: int, patch: int, stride: int) -> int:
    """Return how many of ``size`` entries lie in no patch.

    >>> uncovered(10, 3, 3), uncovered(10, 2, 4)
    (1, 4)
    """
    starts = range(0, places(size, patch, stride) * stride, stride)
    return size - len({entry for start in starts for entry in range(start, start + patch)})


def extract(x: Tensor, patch: int, stride: int) -> Tensor:
    """Return the patches (n, J, m) of vectors (n, d), windows of ``patch`` entries, or of images (n, h, w), squares.

    >>> extract(torch.arange(6.0)[None], 2, 2)[0].tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    for size in x.shape[1:]:
        places(size, patch, stride)
    if x.dim() == 2:
        return x.unfold(1, patch, stride)
    if x.dim() == 3:
        return x.unfold(1, patch, stride).unfold(2, patch, stride).flatten(3).flatten(1, 2)
    raise InputError(f"inputs of shape {tuple(x.shape)}: vectors (n, d) or images (n, h, w) are needed")


class LocallyConnected(nn.Module):
    """Neurons of one patch each, without shared weights: (n, d) to (n, k).

    Parameters
    ----------
    index : (k, m) integers
        Which entries of the input each neuron sees.

    >>> LocallyConnected(torch.tensor([[0, 1], [2, 3]]))(torch.ones(5, 4)).shape
    torch.Size([5, 2])
    """

    index: Tensor

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.register_buffer("index", index)
        self.weight = nn.Parameter(torch.zeros(index.shape))
        self.bias = nn.Parameter(torch.zeros(len(index)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the pre-activations of inputs (n, ...), flattened."""
        return (x.flatten(1)[:, self.index] * self.weight).sum(2) + self.bias


@dataclass(frozen=True)
class PatchNetwork:
    """A two-layer network on given inputs, as weights and patches.

    Attributes
    ----------
    w : (k, m), b : (k,), v : (k,), c : () or None
        ``relu(w . p - b)``, outer weights, and the output bias where there is one.
    patches : (n, J, m)
        Of the inputs; for locally connected neurons (n, k, m), a neuron its own.
    shared : bool
        Whether every neuron sees all J patches (dense: the one).
    """

    w: Tensor
    b: Tensor
    v: Tensor
    c: Tensor | None
    patches: Tensor
    shared: bool

    def seen(self, neurons: slice) -> tuple[Tensor, Tensor]:
        """Return the patches and pre-activations of some neurons: (N, m) or (N, k', m), and (N, k')."""
        if self.shared:
            flat = self.patches.reshape(-1, self.patches.shape[2])
            return flat, flat @ self.w[neurons].T - self.b[neurons]
        own = self.patches[:, neurons]
        return own, (own * self.w[neurons]).sum(2) - self.b[neurons]

    def outputs(self) -> Tensor:
        """Return what the network computes, (n,)."""
        hidden = self.seen(slice(None))[1].relu()  # (N, k)
        means = hidden.unflatten(0, (len(self.patches), -1)).mean(1)  # over the places of a neuron
        return means @ self.v + (0 if self.c is None else self.c)

    @property
    def radius(self) -> float:
        """The largest norm of a patch."""
        return float(self.patches.norm(dim=2).max())

    @property
    def points(self) -> int:
        """Patches that a neuron sees in all inputs together."""
        return self.patches.shape[0] * (self.patches.shape[1] if self.shared else 1)


FORMS = (
    "Sequential(Linear, ReLU, Linear), Sequential(Conv1d or Conv2d, ReLU, AdaptiveAvgPool or AvgPool to one place, "
    "Flatten, Linear), or Sequential(LocallyConnected, ReLU, Linear), with one output"
)


def tensors_for(module: nn.Module, **arrays: Any) -> list[Tensor]:
    """Return arrays as tensors like the module's parameters.

    Raises
    ------
    InputError
        If the module has no parameters in float32 or float64, or anything is not finite: it is named.
    """
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    if not parameters or parameters[0].dtype not in (torch.float32, torch.float64):
        raise InputError(f"{type(module).__name__} is no module in float32 or float64: {FORMS} are needed")
    tensors = []
    for name, array in arrays.items():
        try:
            given = array if isinstance(array, Tensor) else torch.as_tensor(np.asarray(array))
        except (TypeError, ValueError):
            raise InputError(f"{name} is no array of numbers") from None
        if given.is_complex() or not given.dim() or not len(given) or not given.isfinite().all():
            raise InputError(f"{name}: some values are not finite real numbers, or there are none")
        tensors.append(given.to(parameters[0]))
    if not all(p.isfinite().all() for p in parameters):
        raise InputError("the module has parameters that are not finite")
    return tensors


def as_patches(module: nn.Module, x: Tensor) -> PatchNetwork:
    """Read a module on inputs ``x`` as weights on patches.

    Raises
    ------
    InputError
        If it is not of a form the algebra holds for: the message lists them.
    """
    network = _read(module, x)
    with torch.no_grad():
        theirs = module(x[:8]).reshape(-1)
    ours = replace(network, patches=network.patches[:8]).outputs()
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max() + network.v.abs().sum())):
        raise InputError(f"the module is not the mean over all its patches, as by pooling over some alone: {FORMS}")
    return network


def _read(module: nn.Module, x: Tensor) -> PatchNetwork:
    layers = (
        [layer for layer in module if not isinstance(layer, nn.Flatten | nn.Unflatten)]
        if isinstance(module, nn.Sequential)
        else []
    )
    kinds = tuple(type(layer).__name__ for layer in layers)
    first = layers[0] if layers else None
    pooled = isinstance(first, nn.Conv1d | nn.Conv2d)
    ends = layers[-1] if layers else None
    fits = (
        len(layers) == 3 + pooled
        and isinstance(first, nn.Linear | nn.Conv1d | nn.Conv2d | LocallyConnected)
        and isinstance(layers[1], nn.ReLU)
        and isinstance(ends, nn.Linear)
        and ends.out_features == 1
    )
    if not fits or first is None or not isinstance(ends, nn.Linear):
        raise InputError(f"{type(module).__name__}{kinds or ''} is none of the forms this holds for: {FORMS}")
    v = ends.weight.detach()[0]
    c = None if ends.bias is None else ends.bias.detach()[0]
    try:
        with torch.no_grad():
            module(x[:1])
    except (RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"the module does not take inputs of shape {tuple(x.shape[1:])}: {reason}") from error
    bias = getattr(first, "bias", None)
    if isinstance(first, LocallyConnected):
        w, patches = first.weight.detach(), x.flatten(1)[:, first.index]
    elif isinstance(first, nn.Linear):
        w, patches = first.weight.detach(), x.flatten(1)[:, None]
    else:
        w, patches = _convolved(first, layers[2], x)
    if v.numel() != len(w):
        raise InputError(
            f"the last layer reads {v.numel()} numbers of {len(w)} neurons: pool to one place, then Flatten"
        )
    b = torch.zeros(len(w)).to(w) if bias is None else -bias.detach()
    return PatchNetwork(w, b, v, c, patches, shared=not isinstance(first, LocallyConnected))


def _convolved(layer: nn.Module, pool: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    padding = layer.padding if isinstance(layer.padding, str) else set(layer.padding) != {0}
    if layer.groups != 1 or set(layer.dilation) != {1} or (padding and padding != "valid"):
        raise InputError("the convolution is grouped, dilated or padded: its patches are not those of the inputs")
    if not isinstance(pool, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AvgPool1d | nn.AvgPool2d):
        raise InputError(f"{type(pool).__name__} after the ReLU: only mean pooling to one place keeps the inequality")
    if isinstance(layer, nn.Conv1d):
        shaped = x.reshape(len(x), layer.in_channels, -1)
        patches = shaped.unfold(2, layer.kernel_size[0], layer.stride[0])  # (n, C, J, m)
        return layer.weight.detach().flatten(1), patches.transpose(1, 2).flatten(2)
    shaped = x[:, None] if x.dim() == 3 else x
    columns = F.unfold(shaped, layer.kernel_size, stride=layer.stride)  # (n, C m, J)
    return layer.weight.detach().flatten(1), columns.transpose(1, 2)
