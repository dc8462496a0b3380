"""The small reference networks that studies of training share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Return ``build()`` with its weights drawn from ``seed``; the global random state stays as it was.

    >>> a, b = (seeded(3, lambda: nn.Linear(2, 2)) for _ in range(2))
    >>> torch.equal(a.weight, b.weight)
    True
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        return build()


def mlp(
    sizes: Sequence[int], *, activation: type[nn.Module] = nn.Tanh, bias: bool = True, seed: int = 0
) -> nn.Sequential:
    """Return a fully connected network for inputs (n, ...), flattened, to (n, sizes[-1]).

    Parameters
    ----------
    sizes : widths from input to output, at least two.
    activation : module class between the linear layers.
    bias : whether the linear layers have one.
    seed : of the weights, PyTorch's default distribution.

    >>> mlp([4, 3, 2])(torch.ones(5, 2, 2)).shape
    torch.Size([5, 2])
    """

    def build() -> nn.Sequential:
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
        return nn.Sequential(*layers[:-1])

    return seeded(seed, build)  # type: ignore[return-value]


def cnn(
    *,
    channels: Sequence[int] = (8, 16),
    size: int = 28,
    classes: int = 10,
    activation: type[nn.Module] = nn.ReLU,
    seed: int = 0,
) -> nn.Sequential:
    """Return a convolutional network for gray images (n, 1, size, size) to (n, classes).

    3 x 3 convolutions, each with an activation and 2 x 2 average pooling, then one linear layer.

    Parameters
    ----------
    channels : of the convolutions.
    size : of the images, a multiple of ``2 ** len(channels)`` or rounded down by the pooling.
    classes : outputs.
    activation : module class after each convolution.
    seed : of the weights, PyTorch's default distribution.

    >>> cnn(size=14)(torch.ones(2, 1, 14, 14)).shape
    torch.Size([2, 10])
    """

    def build() -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([1, *channels]):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), activation(), nn.AvgPool2d(2)]
        side = size // 2 ** len(channels)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * side**2, classes))

    return seeded(seed, build)  # type: ignore[return-value]
