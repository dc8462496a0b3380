"""Small networks S that stand for what comes after a block: from its output h to the K logits.

The feedback to the block is the vector-Jacobian product of S with the output error. All of them take h (B, *shape) and
return (B, K); the nonlinear ones are position-dependent, so that different places of a map get different feedback.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator
from fairtrial.training.networks import seeded

ON_DEMAND = 64 * 2**20  # bytes above which a fixed matrix is drawn again at each use instead of stored
CHUNK = 2**22  # entries of a fixed matrix drawn at a time
GRID = 3  # places a side that a map is pooled to, after the nonlinearity


class VectorSurrogate(nn.Sequential):
    """d -> rank -> K with GELU, for features (B, d).

    >>> VectorSurrogate(8, 10, rank=4)(torch.ones(2, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, features: int, classes: int, *, rank: int) -> None:
        super().__init__(nn.Linear(features, rank), nn.GELU(), nn.Linear(rank, classes))


class MapSurrogate(nn.Sequential):
    """1 x 1 convolution C -> rank, GELU, means over a 3 x 3 grid, linear to K, for maps (B, C, H, W).

    The nonlinearity comes before the pooling: pooling first would give every place of a cell the same feedback.

    >>> MapSurrogate(8, 10, rank=4)(torch.ones(2, 8, 14, 14)).shape
    torch.Size([2, 10])
    """

    def __init__(self, channels: int, classes: int, *, rank: int) -> None:
        super().__init__(
            nn.Conv2d(channels, rank, 1),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(GRID),
            nn.Flatten(),
            nn.Linear(GRID * GRID * rank, classes),
        )


class TokenSurrogate(nn.Module):
    """Linear d -> rank a token plus a learned position, GELU, weighted mean over tokens, linear to K.

    For tokens (B, T, d). The weights of the mean are a softmax over one learned number a token.

    >>> TokenSurrogate(5, 8, 10, rank=4)(torch.ones(2, 5, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, tokens: int, features: int, classes: int, *, rank: int) -> None:
        super().__init__()
        self.project = nn.Linear(features, rank)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, rank))
        self.pooling = nn.Parameter(torch.zeros(tokens))
        self.out = nn.Linear(rank, classes)

    def forward(self, h: Tensor) -> Tensor:
        """Return (B, K) of ``h`` (B, T, d)."""
        hidden = nn.functional.gelu(self.project(h) + self.position)  # (B, T, r)
        return self.out(torch.einsum("t,btr->br", self.pooling.softmax(0), hidden))


class LinearSurrogate(nn.Sequential):
    """A linear map of all features to K: learned, it is 'learned-linear DFA'.

    >>> LinearSurrogate((8, 7, 7), 10)(torch.ones(2, 8, 7, 7)).shape
    torch.Size([2, 10])
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), classes))


class RandomFeedback(nn.Module):
    """The fixed random matrix of direct feedback alignment (Nokland 2016), which never looks at h.

    Parameters
    ----------
    shape : of the block's output, without the batch.
    classes : K.
    seed : of the entries, uniform in +- 1 / sqrt(dim), as PyTorch initialises a linear layer of ``dim`` inputs.
    device, dtype : of the entries.

    A matrix above 64 MiB is drawn again from its seed at each use, in pieces, and takes no memory.

    >>> fixed = RandomFeedback((2, 3), 4, seed=1)
    >>> torch.equal(fixed.feedback(torch.eye(4)).flatten(1), fixed.matrix())
    True
    """

    weight: Tensor | None

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        seed: int,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shape, self.classes, self.seed = tuple(shape), classes, seed
        self.device, self.dtype = device, dtype
        self.features = math.prod(shape)
        stored = self.features * classes * dtype.itemsize <= ON_DEMAND
        self.register_buffer("weight", self.matrix() if stored else None)

    def matrix(self) -> Tensor:
        """Return the entries, (K, dim)."""
        return torch.cat([rows for _, rows in self._pieces()], dim=1)

    def feedback(self, error: Tensor) -> Tensor:
        """Return error (B, K) times the matrix, (B, *shape)."""
        if self.weight is not None:
            return (error.to(self.weight.dtype) @ self.weight).view(-1, *self.shape)
        out = error.new_empty(len(error), self.features)
        for columns, rows in self._pieces():
            out[:, columns] = error @ rows.to(error)
        return out.view(-1, *self.shape)

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the columns and their entries, (K, width); the same for any memory limit."""
        width = max(1, CHUNK // self.classes)
        bound = 1 / math.sqrt(self.features)
        for i, start in enumerate(range(0, self.features, width)):
            columns = slice(start, min(start + width, self.features))
            g = torch_generator(self.seed, "feedback", i)
            drawn = torch.rand(self.classes, columns.stop - start, generator=g) * (2 * bound) - bound
            yield columns, drawn.to(self.device, self.dtype)


def rank_within(budget: float, shape: Sequence[int], classes: int, rank: int) -> int:
    """Return the largest rank up to ``rank`` whose nonlinear surrogate has at most ``budget`` parameters; at least 1.

    Maps of at most 32 channels take at most half of ``rank``.

    >>> rank_within(5000, (17, 64), 10, 64)  # 64 + 1 + 17 + 10 parameters a unit of rank, and 17 + 10 more
    54
    """
    if len(shape) == 3:
        rank = max(1, rank // 2) if shape[0] <= 32 else rank
        each, fixed = shape[0] + 1 + GRID * GRID * classes, classes
    elif len(shape) == 2:
        each, fixed = shape[1] + 1 + shape[0] + classes, shape[0] + classes
    else:
        each, fixed = shape[0] + 1 + classes, classes
    return max(1, min(rank, int((budget - fixed) // each))) if math.isfinite(budget) else rank


def nonlinear_surrogate(name: str, shape: Sequence[int], classes: int, *, rank: int, seed: int) -> nn.Module:
    """Return the surrogate for outputs of ``shape``: features (d,), tokens (T, d) or maps (C, H, W).

    Raises
    ------
    InputError
        If the shape is none of these.
    """
    if len(shape) == 1:
        return seeded(seed, lambda: VectorSurrogate(shape[0], classes, rank=rank))
    if len(shape) == 2:
        return seeded(seed, lambda: TokenSurrogate(shape[0], shape[1], classes, rank=rank))
    if len(shape) == 3:
        return seeded(seed, lambda: MapSurrogate(shape[0], classes, rank=rank))
    raise InputError(
        f"block {name!r} returns (batch, {', '.join(map(str, shape))}): the built-in surrogates know (d,), (T, d) and "
        "(C, H, W); give surrogate= a function (name, shape, K) -> nn.Module"
    )


def centred(logits: Tensor) -> Tensor:
    """Return logits (B, K) less their mean over classes, which the softmax does not see."""
    return logits - logits.mean(1, keepdim=True)
