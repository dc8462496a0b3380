"""A transformer with linear attention and bilinear feed-forward layers: one class, whether constructed or trained.

Every layer is written as weights that can be read: attention ``out_i = sum_j (q_i . k_j) v_j``, without softmax, and a
gated feed-forward layer ``out (left h * right h) + relu_out relu(hidden h)`` whose products are exact. A layer costs
O(n) since ``sum_j v_j k_j^T`` is formed first; nothing of size n x n exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator
from fairtrial.training.incontext_regression.polynomial import RIDGE

GATE = 1e-12  # sums of weights below it count as it


class LinearAttention(nn.Module):
    """Heads of ``out_i = sum_j (q_i . k_j) v_j / total``, where each head's sum over tokens has size (k, v).

    Parameters
    ----------
    query, key, value : (H, W, k), (H, W, k) and (H, W, v) from the stream to each head.
    out : (H, v, W) back to the stream.
    over : what the sum is divided by: None for nothing, ``"tokens"`` for their number, or the slot of the stream whose
        sum over tokens it is.
    newton : steps of ``X <- X (2 I - A X)``, which invert the head's sum ``A`` (k = v) before the queries meet it: then
        ``out_i = A^-1 q_i`` in the head. 0 leaves it.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        *,
        over: int | Literal["tokens"] | None = None,
        newton: int = 0,
    ) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Parameter(w) for w in (query, key, value, out))
        self.over, self.newton = over, newton

    def state(self, stream: Tensor, mask: Tensor) -> Tensor:
        """Return each head's ``sum_j k_j v_j^T / total`` (B, H, k, v), from (B, T, W) and which tokens count (B, T)."""
        keys = _to_heads(stream, self.key) * mask[:, None, :, None]
        total = keys.transpose(2, 3) @ _to_heads(stream, self.value)  # (B, H, k, v)
        if self.over is None:
            return total
        by = mask.sum(1) if self.over == "tokens" else (stream[..., self.over] * mask).sum(1)
        return total / by.clamp_min(GATE)[:, None, None, None]

    def forward(self, stream: Tensor, mask: Tensor) -> Tensor:
        """Return what is added to the stream, (B, T, W)."""
        state = self.state(stream, mask)
        if self.newton:
            *_, state = newton_schulz(state, self.newton)
        return _from_heads(_to_heads(stream, self.query) @ state, self.out)


class SoftmaxAttention(nn.Module):
    """The usual attention, of the same weights: what linear attention is compared with."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Parameter(w) for w in (query, key, value, out))

    def forward(self, stream: Tensor, mask: Tensor) -> Tensor:
        """Return what is added to the stream, (B, T, W)."""
        q, k, v = (_to_heads(stream, w) for w in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None].bool())
        return _from_heads(mixed, self.out)


def _to_heads(stream: Tensor, maps: Tensor) -> Tensor:
    """Return ``stream`` (B, T, W) mapped by each head's ``maps`` (H, W, k): (B, H, T, k), by one matrix product."""
    heads, width, size = maps.shape
    return (stream @ maps.transpose(0, 1).reshape(width, heads * size)).unflatten(2, (heads, size)).transpose(1, 2)


def _from_heads(mixed: Tensor, out: Tensor) -> Tensor:
    """Return the sum over heads of ``mixed`` (B, H, T, v) mapped by ``out`` (H, v, W): (B, T, W)."""
    return mixed.transpose(1, 2).flatten(2) @ out.flatten(0, 1)


class GatedFeedForward(nn.Module):
    """``out (left h * right h) + relu_out relu(hidden h + bias)``: squares and kinks are exact.

    Parameters
    ----------
    left, right : (F, W).
    out : (W, F).
    hidden, bias, relu_out : (G, W), (G,) and (W, G).
    """

    def __init__(
        self, left: Tensor, right: Tensor, out: Tensor, hidden: Tensor, bias: Tensor, relu_out: Tensor
    ) -> None:
        super().__init__()
        self.left, self.right, self.out = (nn.Parameter(w) for w in (left, right, out))
        self.hidden, self.bias, self.relu_out = (nn.Parameter(w) for w in (hidden, bias, relu_out))

    def forward(self, stream: Tensor) -> Tensor:
        """Return what is added to the stream, (B, T, W)."""
        products, kinks = len(self.left), len(self.hidden)
        read = stream @ torch.cat([self.left, self.right, self.hidden]).T  # all maps in one product: (B, T, 2 F + G)
        left, right, hidden = read.split((products, products, kinks), dim=2)
        written = torch.cat([left * right, torch.relu(hidden + self.bias)], dim=2)
        return written @ torch.cat([self.out, self.relu_out], dim=1).T


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the stream; either may be missing."""

    def __init__(self, attention: nn.Module | None, feed_forward: GatedFeedForward | None) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, stream: Tensor, mask: Tensor) -> Tensor:
        """Return the stream (B, T, W) after both."""
        if self.attention is not None:
            stream = stream + self.attention(stream, mask)
        if self.feed_forward is not None:
            stream = stream + self.feed_forward(stream)
        return stream


class LinearAttentionTransformer(nn.Module):
    """Stages of blocks over tokens; a stage is one block repeated, so that its layers share their weights.

    Parameters
    ----------
    read_in : (W, S) from a token to the stream.
    stages : (block, repeats) pairs.
    read_out : (W,) from the query's stream to the prediction.

    See :meth:`untrained` for one to train, and ``ConstructedRegressor`` for one whose weights are written down.

    Examples
    --------
    >>> model = LinearAttentionTransformer.untrained(3, width=16, heads=2, layers=(1, 1))
    >>> x, y = torch.zeros(2, 5, 3), torch.zeros(2, 5)
    >>> model(x, y, torch.zeros(2, 3)).shape
    torch.Size([2])
    """

    def __init__(self, read_in: Tensor, stages: Iterable[tuple[Block, int]], read_out: Tensor) -> None:
        super().__init__()
        blocks, repeats = zip(*stages, strict=True)
        self.read_in, self.read_out = nn.Parameter(read_in), nn.Parameter(read_out)
        self.blocks = nn.ModuleList(blocks)
        self.repeats = tuple(repeats)

    @classmethod
    def untrained(
        cls,
        dim: int,
        *,
        width: int = 64,
        heads: int = 4,
        layers: Sequence[int] = (4, 4),
        attention: Literal["linear", "softmax"] = "linear",
        seed: int = 0,
    ) -> LinearAttentionTransformer:
        """Return a transformer with random weights, for inputs of ``dim`` columns, float32.

        Parameters
        ----------
        dim : D.
        width : of the stream, a multiple of ``heads``.
        layers : repeats of each stage; the layers of a stage are tied.
        attention : ``"softmax"`` makes the usual attention of the same size.

        Raises
        ------
        InputError
            If a size is not positive or ``heads`` does not divide ``width``.
        """
        if min(dim, width, heads, *layers) < 1 or width % heads or attention not in ("linear", "softmax"):
            raise InputError(
                f"dim={dim}, width={width}, heads={heads}, layers={tuple(layers)}, attention={attention!r}: positive, "
                "width a multiple of heads, attention 'linear' or 'softmax'"
            )
        random = torch_generator(seed, "transformer", attention)

        def drawn(*shape: int, scale: float) -> Tensor:
            return scale * torch.randn(shape, generator=random)

        def block() -> Block:
            size, across = width // heads, width**-0.5
            # Nothing bounds products of three streams: queries start small, and every layer near the identity.
            q, k, v = (drawn(heads, width, size, scale=across) for _ in range(3))
            q = q / size if attention == "linear" else q  # the usual attention divides by itself
            out = drawn(heads, size, width, scale=0.1 * across)
            linear = attention == "linear"
            attend = LinearAttention(q, k, v, out, over="tokens") if linear else SoftmaxAttention(q, k, v, out)
            forward = GatedFeedForward(
                drawn(width, width, scale=across), drawn(width, width, scale=across),
                drawn(width, width, scale=0.1 * across), drawn(2 * width, width, scale=across), torch.zeros(2 * width),
                drawn(width, 2 * width, scale=0.1 * across),
            )  # fmt: skip
            return Block(attend, forward)

        read_in = drawn(width, dim + 3, scale=(dim + 3) ** -0.5)
        return cls(read_in, [(block(), repeats) for repeats in layers], drawn(width, scale=0.3 * width**-0.5))

    def states(self, stream: Tensor, mask: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of the stage and the stream (B, T, W) after each layer."""
        for stage, (block, repeats) in enumerate(zip(self.blocks, self.repeats, strict=True)):
            for _ in range(repeats):
                stream = block(stream, mask)
                yield stage, stream

    def forward(self, x: Tensor, y: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return predictions (B,) for contexts x (B, n, D), y (B, n) and queries (B, D).

        ``mask`` (B, n) is False where a shorter prompt is padded.
        """
        parts, attended = tokens(x.to(self.read_in), y.to(self.read_in), query.to(self.read_in), mask)
        *_, (_, stream) = self.states(parts @ self.read_in.T, attended)
        return stream[:, 0] @ self.read_out


def tokens(x: Tensor, y: Tensor, query: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return tokens [x | y | is the query | is of the context], (B, n + 1, D + 3), the query first, and their mask.

    Padding is all zeros, whatever stands in its place.

    Raises
    ------
    InputError
        If shapes do not match, a value is not finite, or a prompt has no context.
    """
    if x.ndim != 3 or y.shape != x.shape[:2] or query.shape != (len(x), x.shape[2]):
        raise InputError(
            f"x {tuple(x.shape)}, y {tuple(y.shape)}, query {tuple(query.shape)}: (B, n, D), (B, n), (B, D)"
        )
    valid = torch.ones_like(y, dtype=torch.bool) if mask is None else mask.bool()
    if valid.shape != y.shape or not valid.any(1).all():
        raise InputError(f"mask {tuple(valid.shape)}: (B, n), with a point in every prompt")
    x, y = torch.where(valid[..., None], x, 0), torch.where(valid, y, 0)
    if not (x.isfinite().all() and y.isfinite().all() and query.isfinite().all()):
        raise InputError("a prompt holds a value that is not finite: leave the point out, by mask= or altogether")
    context = torch.cat([x, y[..., None], torch.zeros_like(y)[..., None], valid.to(x)[..., None]], dim=2)
    asked = torch.cat([query, query.new_tensor([0.0, 1.0, 0.0]).expand(len(query), 3)], dim=1)
    seen = torch.cat([torch.ones_like(valid[:, :1]), valid], dim=1)
    return torch.cat([asked[:, None], context], dim=1), seen.to(x)


def newton_schulz(a: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield approximations of the inverse of ``a`` (..., q, q), positive semi-definite, the first ``I / trace``.

    Each of ``steps`` further ones is ``X (2 I - A X)`` and squares the residual ``I - A X``. ``A`` gets the ridge of
    the local fit on all diagonal entries but the first.
    """
    q = a.shape[-1]
    identity = torch.eye(q, dtype=a.dtype, device=a.device)
    trace = a.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None].clamp_min(GATE)
    penalised = identity.clone()
    penalised[0, 0] = 0
    a = a + RIDGE / q * trace * penalised
    inverse = identity / trace
    yield inverse
    for _ in range(steps):
        inverse = inverse @ (2 * identity - a @ inverse)
        yield inverse
