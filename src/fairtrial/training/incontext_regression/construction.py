"""The weights of the constructed transformer, written down: three small networks of ordinary layers.

Their streams have named slots. A feed-forward layer multiplies slots and bends them at 0, attention sums over tokens;
every weight is 0 but for a few that say which slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor

from fairtrial.training.incontext_regression.mixture import Chart
from fairtrial.training.incontext_regression.polynomial import exponents
from fairtrial.training.incontext_regression.transformer import (
    Block,
    GatedFeedForward,
    LinearAttention,
    LinearAttentionTransformer,
)

DOUBLINGS = 3  # of a radius without points
WEIGHED = 3  # blocks of stage 0 after which weights at every radius are known
OFF = 3.0  # a point may lie this many squared bandwidths off the tangent space


class Slots:
    """Names for the places of a stream."""

    def __init__(self, **sizes: int) -> None:
        self.places: dict[str, range] = {}
        self.width = 0
        for name, size in sizes.items():
            self.places[name] = range(self.width, self.width + size)
            self.width += size

    def __getitem__(self, name: str) -> slice:
        return slice(self.places[name].start, self.places[name].stop)

    def at(self, name: str, i: int = 0) -> int:
        """Return the place of the slot's ``i``-th number."""
        return self.places[name][i]

    def select(self, *names: str) -> Tensor:
        """Return the map (W, k) that reads the slots ``names``."""
        chosen = [place for name in names for place in self.places[name]]
        return torch.eye(self.width, dtype=torch.float64)[:, chosen]

    def reading(self, other: Slots, **sources: str) -> Tensor:
        """Return the map (W, W of ``other``) that fills each slot from the one it is said to come from in ``other``."""
        read_in = torch.zeros(self.width, other.width, dtype=torch.float64)
        for name, source in sources.items():
            read_in[self[name], other[source]] = torch.eye(len(self.places[name]), dtype=torch.float64)
        return read_in


def local_weights(dim: int, enough: float) -> LinearAttentionTransformer:
    """Return stage 0: offsets from the query, and weights ``(1 - r^2 / h^2)_+`` at a radius that holds points.

    Tokens come as [x | y | flag | valid | s_query | g_query]: flag marks the query, valid the context, ``s`` is one
    over the squared bandwidth and ``g`` one over the preconditioner's step, both told by the query's token. The first
    slots of the stream are the token's; ``delta`` replaces x. A radius whose weights sum to less than ``enough`` gives
    way to its double, in proportion, up to three times.
    """
    at = weight_slots(dim)
    one, s, w, scale = (at.at(name) for name in ("one", "s", "w", "scale"))
    radii = range(DOUBLINGS + 1)
    read_in = torch.zeros(at.width, dim + 5, dtype=torch.float64)
    read_in[: dim + 5] = torch.eye(dim + 5, dtype=torch.float64)
    # Every token is the query or of the context, and padding is not attended to: flag + valid is 1.
    read_in[one, dim + 1] = read_in[one, dim + 2] = 1.0
    told = torch.cat([-at.select("delta"), at.select("s", "g")], dim=1).T
    broadcast = _attention(at, "one", "flag", ("delta", "s_query", "g_query"), told)
    sums = _attention(at, "one", "one", ("w_t",), at.select("total").T)
    blocks = [
        Block(broadcast, _layer(at, [(at.at("delta", k), at.at("delta", k), at.at("r2"), 1.0) for k in range(dim)])),
        Block(None, _layer(at, [(at.at("r2"), s, at.at("r2s"), 1.0)])),
        # relu(1 - r^2 / h^2) of the context, and nothing of the query, at h, 2 h, 4 h, 8 h
        Block(None, _layer(at, kinks=[({at.at("valid"): 1.0, at.at("r2s"): -(4.0**-t)}, 0.0, at.at("w_t", t), 1.0)
                                      for t in radii])),
        # min(sum w / enough, 1) at every radius
        Block(sums, _layer(at, kinks=[({at.at("total", t): 1 / enough}, -shift, at.at("enough", t), 1 - 2 * shift)
                                      for t in radii for shift in (0.0, 1.0)])),
        Block(None, _layer(at, [(at.at("w_t", DOUBLINGS), one, w, 1.0), (s, one, scale, 4.0**-DOUBLINGS)])),
        # From the widest radius on, each narrower one replaces it as far as it has points.
        *(
            Block(None, _layer(at, [
                (at.at("enough", t), at.at("w_t", t), w, 1.0), (at.at("enough", t), w, w, -1.0),
                (at.at("enough", t), s, scale, 4.0**-t), (at.at("enough", t), scale, scale, -1.0),
            ]))
            for t in reversed(range(DOUBLINGS))
        ),
    ]  # fmt: skip
    return LinearAttentionTransformer(
        read_in, [(block, 1) for block in blocks], torch.zeros(at.width, dtype=torch.float64)
    )


def weight_slots(dim: int) -> Slots:
    """Name the slots of stage 0's stream: ``w_t``, ``total``, ``enough`` are for the radius and its doublings."""
    return Slots(
        delta=dim, y=1, flag=1, valid=1, s_query=1, g_query=1, one=1, s=1, g=1, r2=1, r2s=1, w_t=DOUBLINGS + 1,
        total=DOUBLINGS + 1, enough=DOUBLINGS + 1, w=1, scale=1,
    )  # fmt: skip


def geometric_preconditioner(dim: int, layers: int, *, by_trace: bool) -> LinearAttentionTransformer:
    """Return stage 1: ``z <- z - gamma sum_j w_j delta_j (delta_j . z)``, ``layers`` times from ``z = delta``.

    What remains of z is normal to the tangent space, and ``delta - z`` tangent. Then the points of other sheets, whose
    z is long, lose their weight. Without layers z is 0: nothing is known to be normal.
    """
    at, before = geometry_slots(dim), weight_slots(dim)
    w, z2, bend, off, keep = (at.at(name) for name in ("w", "z2", "bend", "off", "keep"))
    z = {"z": "delta"} if layers else {}
    read_in = at.reading(before, delta="delta", y="y", w="w", scale="scale", one="one", size="r2" if by_trace else "g",
                         **z)  # fmt: skip
    opening = _layer(at, [
        *((w, at.at("delta", k), at.at("wdelta", k), 1.0) for k in range(dim)),
        (w, at.at("size"), at.at("norm"), 1.0),
    ])  # fmt: skip
    step = _attention(at, "z", "delta", ("wdelta",), -at.select("z").T, over=at.at("norm"))
    closing = [
        _layer(at, [(at.at("z", k), at.at("z", k), z2, 1.0) for k in range(dim)]),
        _layer(at, [(z2, at.at("scale"), bend, 1.0)]),
        _layer(at, [(bend, at.at("scale"), off, 1.0)]),
        # relu(1 - |z|^2 / (3 h^2)^2): a crossing sheet's points are farther off
        _layer(at, kinks=[({at.at("one"): 1.0, off: -(OFF**-2)}, 0.0, keep, 1.0)]),
        _layer(at, [(w, keep, at.at("weight"), 1.0)]),
    ]
    stages = [(Block(None, opening), 1), (Block(step, None), layers), *((Block(None, layer), 1) for layer in closing)]
    return LinearAttentionTransformer(read_in, stages, torch.zeros(at.width, dtype=torch.float64))


def geometry_slots(dim: int) -> Slots:
    """Name the slots of stage 1's stream; ``weight`` is what is left of ``w``."""
    return Slots(
        delta=dim, y=1, w=1, scale=1, one=1, size=1, wdelta=dim, z=dim, norm=1, z2=1, bend=1, off=1, keep=1, weight=1
    )


def chart_solver(chart: Chart, layers: int, newton: int) -> LinearAttentionTransformer:
    """Return stage 2 for one chart: monomials of ``B^T u / h``, whitening, and preconditioned least-squares descent."""
    made = exponents(chart.dim, local_degree(chart))
    q = len(made) + 1
    at, before = Slots(c=chart.dim, phi=q, wphi=q, gphi=q, p=1, e=1, w=1, y=1, one=1), geometry_slots(len(chart.center))
    w, y, p, e, one = (at.at(name) for name in ("w", "y", "p", "e", "one"))
    read_in = at.reading(before, w="weight", y="y", one="one")
    frame = torch.as_tensor(np.asarray(chart.frame).T / chart.bandwidth)
    read_in[at["c"], before["delta"]], read_in[at["c"], before["z"]] = frame, -frame  # u = delta - z
    # A monomial is its parent times a coordinate: one layer a degree, the first on the constant's.
    degrees = [0]
    for parent, _ in made:
        degrees.append(degrees[parent] + 1)
    expanding = [
        [(at.at("phi", parent), at.at("c", k), at.at("phi", i), 1.0)
         for i, (parent, k) in enumerate(made, start=1) if degrees[i] == degree]
        for degree in range(1, max(degrees) + 1)
    ]  # fmt: skip
    weighting = [*((w, at.at("phi", i), at.at("wphi", i), 1.0) for i in range(q)), (w, y, e, -1.0)]
    whitening = _attention(at, "phi", "phi", ("wphi",), at.select("gphi").T, over=w, newton=newton)
    descent = _attention(at, "gphi", "phi", ("e",), -at.select("p").T, over=w)
    # e = w (p - y) is written anew after each step
    renewal = _layer(at, [(w, p, e, 1.0), (w, y, e, -1.0), (one, e, e, -1.0)])
    stages = [
        *((Block(None, _layer(at, terms)), 1) for terms in [[(one, one, at.at("phi"), 1.0)], *expanding, weighting]),
        (Block(whitening, None), 1),
        (Block(descent, renewal), layers),
    ]
    return LinearAttentionTransformer(read_in, stages, at.select("p")[:, 0].clone())


def enough_weight(atlas: Sequence[Chart]) -> float:
    """Return the sum of weights that a local fit needs: one more than it has coefficients, at most over charts."""
    return 2.0 + max(len(exponents(chart.dim, local_degree(chart))) for chart in atlas)


def local_degree(chart: Chart) -> int:
    """Return the degree that the chart's smoothness asks for."""
    return max(ceil(chart.smoothness) - 1, 0)


def _attention(
    at: Slots, query: str, key: str, value: tuple[str, ...], out: Tensor, *, over: int | None = None, newton: int = 0
) -> LinearAttention:
    """Return one head that reads the named slots and writes by ``out`` (v, W)."""
    reading = at.select(query)[None], at.select(key)[None], at.select(*value)[None]
    return LinearAttention(*reading, out[None], over=over, newton=newton)


def _layer(
    at: Slots,
    products: Sequence[tuple[int, int, int, float]] = (),
    kinks: Sequence[tuple[Mapping[int, float], float, int, float]] = (),
) -> GatedFeedForward:
    """Return the layer that adds ``factor * h[left] * h[right]`` and ``factor * relu(sum c h[slot] + bias)`` to slots.

    ``products``: (left, right, written, factor); ``kinks``: ({slot: coefficient}, bias, written, factor).
    """
    left, right, out = (torch.zeros(len(products), at.width, dtype=torch.float64) for _ in range(3))
    for f, (a, b, written, factor) in enumerate(products):
        left[f, a], right[f, b], out[f, written] = 1.0, 1.0, factor
    hidden, relu_out = (torch.zeros(len(kinks), at.width, dtype=torch.float64) for _ in range(2))
    bias = torch.zeros(len(kinks), dtype=torch.float64)
    for g, (read, shift, written, factor) in enumerate(kinks):
        for slot, coefficient in read.items():
            hidden[g, slot] = coefficient
        bias[g], relu_out[g, written] = shift, factor
    return GatedFeedForward(left, right, out.T.contiguous(), hidden, bias, relu_out.T.contiguous())
