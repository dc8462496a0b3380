"""The feed-forward layer of experts: tokens sorted by expert, one matrix product a segment.

With shares p of the K experts of a token and F experts a dense FFN, y = F * sum_s p_s E_s(x) + b. The mass F makes all
granularities alike: K = F experts of equal share sum up with weight 1, as the slices of a dense FFN do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.lm.upcycling.router import GroupTopRouter, Routing


class DivMoEFeedForward(nn.Module):
    """A mixture of fine-grained experts in the place of a dense FFN.

    Expert e computes ``down_e (act(gate_e x) * up_e x)``, or ``down_e act(up_e x + c_e)`` where not gated.

    Parameters
    ----------
    hidden_size
        d.
    intermediate_size
        m, the neurons of the dense FFN; an expert has s = m / F of them.
    router
        Its G * F experts are those of the layer.
    granularity
        F, the number of experts one dense FFN was cut into.
    activation
        Of the neurons, elementwise.
    gated
        Whether there are gates.
    bias
        Whether there is an input bias a neuron and an output bias (plain layers only).
    dropout
        Of the output.

    Attributes
    ----------
    up_proj
        (E, 2 s, d), gate rows first; (E, s, d) where not gated.
    down_proj
        (E, d, s).
    up_bias, down_bias
        (E, s) and (d,), or ``None``. The output bias is added once, not once an expert.
    routing
        The last :class:`Routing`; ``None`` before the first forward.

    Raises
    ------
    InputError
        m is no multiple of F, sizes below 1, or a gated layer with biases.

    Examples
    --------
    >>> router = GroupTopRouter(8, n_groups=2, n_slices=2, n_active=2)
    >>> layer = DivMoEFeedForward(8, 12, router, granularity=2)
    >>> layer(torch.randn(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        router: GroupTopRouter,
        *,
        granularity: int,
        activation: nn.Module | None = None,
        gated: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_granularity(intermediate_size, granularity)
        if gated and bias:
            raise InputError("bias=True: a gated layer carries no biases here; give gated=False or bias=False")
        self.router = router
        self.granularity, self.gated = granularity, gated
        self.activation = activation or nn.SiLU()
        self.dropout = nn.Dropout(dropout)
        width = intermediate_size // granularity
        n_experts = router.n_groups * router.n_slices
        self.up_proj = nn.Parameter(torch.empty(n_experts, (1 + gated) * width, hidden_size, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(n_experts, hidden_size, width, dtype=dtype))
        self.up_bias = nn.Parameter(torch.zeros(n_experts, width, dtype=dtype)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype)) if bias else None
        for weight in (self.up_proj, self.down_proj):
            if not weight.is_meta:
                nn.init.uniform_(weight, -(weight.shape[2] ** -0.5), weight.shape[2] ** -0.5)
        self.routing: Routing | None = None

    @property
    def n_experts(self) -> int:
        """E = G * F."""
        return self.up_proj.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixture's output, of the shape and dtype of ``x`` (..., d)."""
        tokens = x.reshape(-1, x.shape[-1])  # (N, d)
        routing = self.routing = self.router(tokens)
        n, k = routing.experts.shape
        order = routing.experts.flatten().argsort(stable=True)  # (N K,): slots by expert
        ends = torch.bincount(routing.experts.flatten(), minlength=self.n_experts).cumsum(0)  # (E,)
        token = order.div(k, rounding_mode="floor")
        segments = Segments(ends, tokens)
        h = segments.linear(tokens.index_select(0, token), self.up_proj)
        if self.up_bias is not None:
            h = h + self.up_bias.index_select(0, routing.experts.flatten().index_select(0, order)).to(h.dtype)
        share = self.granularity * routing.weights.flatten().index_select(0, order)[:, None]  # (N K, 1)
        h = self._neurons(h) * share.to(h.dtype)
        out = segments.linear(h, self.down_proj)  # (N K, d)
        y = torch.zeros(n, out.shape[1], dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        y = y.index_add(0, token, out.to(y.dtype))
        if self.down_bias is not None:
            y = y + self.down_bias
        return self.dropout(y.to(x.dtype).view(x.shape))

    def expert_outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return what every expert makes of every token (N, d), unweighted and without output bias, (E, N, d).

        With shares this is the layer by its definition; it costs E experts a token.
        """
        h = x @ self.up_proj.transpose(1, 2)  # (E, N, .)
        if self.up_bias is not None:
            h = h + self.up_bias[:, None]
        return self._neurons(h) @ self.down_proj.transpose(1, 2)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last routing out of copies: it belongs to a graph."""
        return {**self.__dict__, "routing": None}

    def _neurons(self, h: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            return self.activation(h)
        gate, up = h.chunk(2, dim=-1)
        return self.activation(gate) * up

    def extra_repr(self) -> str:
        """Return the sizes, for print."""
        e, d, s = self.down_proj.shape
        return f"experts={e}, hidden_size={d}, neurons={s}, granularity={self.granularity}"


def check_granularity(m: int, granularity: int) -> None:
    """Refuse a granularity that does not divide the neurons.

    >>> check_granularity(512, 4)
    """
    if not isinstance(granularity, int) or isinstance(granularity, bool) or granularity < 1 or m % granularity:
        valid = [f for f in range(1, min(m, 64) + 1) if m % f == 0]
        raise InputError(
            f"granularity={granularity!r} does not divide the {m} neurons of a feed-forward layer: give one of "
            f"{', '.join(map(str, valid))}"
        )


# ------------------------------------------------------------------------------------------------------------- segments


class Segments:
    """Rows in segments, one an expert, and their product with a stack of matrices.

    ``ends`` (E,) are where the segments end; ``like`` says on which device and in which dtype they will be.
    """

    def __init__(self, ends: torch.Tensor, like: torch.Tensor) -> None:
        self.ends = ends
        self.dtype = torch.get_autocast_dtype(like.device.type) if _autocasts(like) else like.dtype
        grouped = hasattr(F, "grouped_mm") and like.is_cuda and self.dtype == torch.bfloat16
        self.bounds: list[int] | None = None if grouped else [0, *ends.tolist()]

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``weight[e] x`` for each row of ``x`` (n, in) in segment e; ``weight`` (E, out, in), result (n, out).

        On a GPU in bfloat16 torch's grouped matrix product does it in one kernel.
        """
        x, weight = x.to(self.dtype), weight.to(self.dtype)
        with torch.autocast(x.device.type, enabled=False):
            if self.bounds is None:
                return F.grouped_mm(x, weight.transpose(1, 2), offs=self.ends.int())
            return _SegmentLinear.apply(x, weight, self.bounds)


def _autocasts(like: torch.Tensor) -> bool:
    return torch.is_autocast_enabled(like.device.type)


class _SegmentLinear(torch.autograd.Function):
    """One product a segment, written where it belongs.

    Autograd through ``weight[e]`` would allocate a gradient of the whole stack for every expert; here each product of
    the backward is written into its part of one gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bounds: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bounds = bounds
        y = x.new_empty(x.shape[0], weight.shape[1])
        for e, rows in _filled(bounds):
            torch.mm(x[rows], weight[e].T, out=y[rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        grad = grad.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for e, rows in _filled(ctx.bounds):
            if grad_x is not None:
                torch.mm(grad[rows], weight[e], out=grad_x[rows])
            if grad_weight is not None:
                torch.mm(grad[rows].T, x[rows], out=grad_weight[e])
        return grad_x, grad_weight, None


def _filled(bounds: list[int]) -> list[tuple[int, slice]]:
    """Return the experts that have rows, and their rows."""
    pairs = pairwise(bounds)
    return [(e, slice(start, stop)) for e, (start, stop) in enumerate(pairs) if stop > start]
