"""The tangent local polynomial as a transformer whose weights are written down.

One network finds the geometry around the query (stage 1), one small network a chart solves the local least squares in
the chart's coordinates (stage 2), and gates fixed by the chart centres choose among the charts. Both are instances of
the ordinary :class:`LinearAttentionTransformer`; nothing is trained, and everything can be.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.training.incontext_regression.construction import (
    DOUBLINGS,
    OFF,
    WEIGHED,
    chart_solver,
    enough_weight,
    geometric_preconditioner,
    geometry_slots,
    local_degree,
    local_weights,
    weight_slots,
)
from fairtrial.training.incontext_regression.mixture import Chart, Prompt
from fairtrial.training.incontext_regression.polynomial import fit_local
from fairtrial.training.incontext_regression.transformer import GATE, newton_schulz, tokens

TOKENS = 16_384  # computed at once: a stream that stays in the processor's cache


@dataclass(frozen=True)
class Trace:
    """What happens to a batch of B prompts, layer by layer.

    Attributes
    ----------
    preconditioner : (L1 + 1, B) root mean square of z over that of the offsets, weighted: falls from 1 to what is
        normal to the tangent space.
    normal : (B,) largest eigenvalue that survives stage 1, ``(1 - gamma lambda)^L1`` of the leading direction.
    newton : (newton + 1, B) Frobenius norm of ``I - Gamma A`` of the chart that counts most.
    predictions : (L2, B) after each layer of stage 2.
    """

    preconditioner: Tensor
    normal: Tensor
    newton: Tensor
    predictions: Tensor


class ConstructedRegressor(nn.Module):
    """Local-polynomial regression in context, by a transformer with written-down weights.

    Parameters
    ----------
    atlas : sequence of Chart
        Of one ambient dimension; see ``ManifoldMixture.atlas``.
    layers1 : int
        Layers of the geometric preconditioner; 0 leaves it out, and coordinates are those of the frame.
    layers2 : int
        Layers of each chart's solver.
    newton : int
        Newton-Schulz steps that whiten its normal matrix.
    gamma : "trace" or sequence of float
        Step of the preconditioner: one over the trace of the local second moments, found in context and always stable,
        or a constant for each chart.
    outside : {"warn", "nearest", "nan"}
        What a query gets that lies in no chart: the nearest chart's prediction, with a warning or without, or NaN.

    Raises
    ------
    InputError
        If the atlas is empty or its charts do not fit together, or a number is out of range.

    Notes
    -----
    "Tangent local polynomials in context": a geometric preconditioner, then reduced local-polynomial solvers for all
    charts. A solver runs only for queries whose gate for its chart is open: the others would be multiplied by 0.

    Examples
    --------
    >>> from fairtrial.training.incontext_regression import ManifoldMixture
    >>> tasks = ManifoldMixture(ambient=8, dims=(1,), charts=2)
    >>> prompt = tasks.sample(batch=4, n=200)
    >>> model = ConstructedRegressor(tasks.atlas(k=6, n=200))
    >>> bool(((model(prompt.x, prompt.y, prompt.query) - prompt.target).abs() < 0.5).all())
    True
    """

    centers: Tensor
    radii: Tensor
    bandwidths: Tensor
    steps: Tensor

    def __init__(
        self,
        atlas: Sequence[Chart],
        *,
        layers1: int = 8,
        layers2: int = 4,
        newton: int = 10,
        gamma: Literal["trace"] | Sequence[float] = "trace",
        outside: Literal["warn", "nearest", "nan"] = "warn",
    ) -> None:
        super().__init__()
        _check(atlas)
        fixed = not isinstance(gamma, str)
        if layers1 < 0 or layers2 < 1 or newton < 1 or outside not in ("warn", "nearest", "nan"):
            raise InputError(
                f"layers1={layers1}, layers2={layers2}, newton={newton}, outside={outside!r}: out of range"
            )
        if not (gamma == "trace" if isinstance(gamma, str) else len(gamma) == len(atlas) and min(gamma) > 0):
            raise InputError(f"gamma={gamma!r}: 'trace', or a positive number for each of {len(atlas)} charts")
        self.layers1, self.layers2, self.newton, self.fixed, self.outside = layers1, layers2, newton, fixed, outside
        self.dims = tuple(chart.dim for chart in atlas)
        for name, values in (
            ("centers", np.stack([chart.center for chart in atlas])),  # (H, D)
            ("radii", [chart.radius for chart in atlas]),
            ("bandwidths", [chart.bandwidth for chart in atlas]),
            ("steps", gamma if fixed else np.ones(len(atlas))),
        ):
            self.register_buffer(name, torch.as_tensor(np.asarray(values, dtype=float)))
        self.enough = enough_weight(atlas)
        self.weights = local_weights(len(atlas[0].center), self.enough)
        self.geometry = geometric_preconditioner(len(atlas[0].center), layers1, by_trace=not fixed)
        self.solvers = nn.ModuleList(chart_solver(chart, layers2, newton) for chart in atlas)
        self.requires_grad_(False)

    # ------------------------------------------------------------------------------------------------------- forward

    def forward(self, x: Tensor, y: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return predictions (B,) for contexts x (B, n, D), y (B, n) and queries (B, D); ``mask`` False is padding.

        Raises
        ------
        InputError
            If shapes do not match, a value is not finite, or a fixed gamma makes stage 1 diverge.
        """
        query = query.to(self.centers)
        gates, inside = self.gates(query)
        step = max(1, TOKENS // max(x.shape[1], 1))
        predicted = torch.cat([
            self._predict(x[part], y[part], query[part], None if mask is None else mask[part], gates[part])
            for part in (slice(i, i + step) for i in range(0, len(query), step))
        ])  # fmt: skip
        return torch.where(inside, predicted, torch.nan) if self.outside == "nan" else predicted

    def _predict(self, x: Tensor, y: Tensor, query: Tensor, mask: Tensor | None, gates: Tensor) -> Tensor:
        states, attended = self._geometry(x, y, query, mask, gates)
        stream = states[-1]
        columns = []
        for gate, solver in zip(gates.T, self.solvers, strict=True):
            rows = gate > 0
            column = torch.zeros_like(gate)
            if rows.any():
                *_, (_, solved) = solver.states(stream[rows] @ solver.read_in.T, attended[rows])
                column = column.index_put((rows,), solved[:, 0] @ solver.read_out)
            columns.append(column)
        return (gates * torch.stack(columns, dim=1)).sum(1)

    def gates(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much each chart counts for queries (B, D), (B, H) of row sum 1, and which queries lie in a chart.

        ``relu(1 - |x_0 - c|^2 / r^2)``, normalised; a query in no chart goes to the one nearest for its radius.
        """
        if query.ndim != 2 or query.shape[1] != self.centers.shape[1]:
            raise InputError(f"query {tuple(query.shape)}: (B, {self.centers.shape[1]}), as the charts")
        ratio = torch.cdist(query, self.centers, compute_mode="donot_use_mm_for_euclid_dist") / self.radii  # (B, H)
        opened = torch.relu(1 - ratio**2)
        inside = opened.sum(1) > GATE
        if not inside.all() and self.outside == "warn":
            row = int((~inside).nonzero()[0])
            warnings.warn(
                f"{int((~inside).sum())} of {len(query)} queries, number {row} the first, lie in no chart: they get "
                "the nearest one's prediction; outside='nan' marks them",
                stacklevel=3,
            )
        nearest = nn.functional.one_hot(ratio.argmin(1), len(self.radii)).to(opened)
        opened = torch.where(inside[:, None], opened, nearest)
        return opened / opened.sum(1, keepdim=True), inside

    def _geometry(
        self, x: Tensor, y: Tensor, query: Tensor, mask: Tensor | None, gates: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return stage 1's stream after its opening and each layer, then at its end, and which tokens are attended to.

        Once the weights are known at every radius, tokens without weight at the one that will be chosen are left
        behind: they would add zeros to all sums from there on.
        """
        parts, attended = tokens(x.to(query), y.to(query), query, mask)
        # The query's token also carries what its charts say: inverse squared bandwidth and inverse step.
        carried = torch.zeros_like(parts[..., :2])
        carried[:, 0, 0], carried[:, 0, 1] = gates @ self.bandwidths**-2, gates @ (1 / self.steps)
        stream = torch.cat([parts, carried], dim=2) @ self.weights.read_in.T
        blocks = iter(self.weights.blocks)
        for block in itertools.islice(blocks, WEIGHED):
            stream = block(stream, attended)
        stream, attended = self._within_reach(stream, attended)
        for block in blocks:
            stream = block(stream, attended)
        states = [
            state
            for stage, state in self.geometry.states(stream @ self.geometry.read_in.T, attended)
            if stage <= 1 or stage == len(self.geometry.repeats) - 1
        ]
        if self.fixed:
            self._refuse_divergence(states[0], gates)
        return states, attended

    def _within_reach(self, stream: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of weight at the narrowest radius that has enough, first the query, padded to one T."""
        at = stream[..., weight_slots(self.centers.shape[1])["w_t"]].detach()  # (B, T, radii)
        wide = at.sum(1) < self.enough  # (B, radii), of which the widest is the last resort
        chosen = wide[:, :-1].int().cumprod(1).sum(1)  # (B,)
        weighty = at.gather(2, chosen[:, None, None].expand(-1, at.shape[1], 1))[..., 0] > 0
        weighty[:, 0] = True
        kept = weighty.byte().argsort(dim=1, descending=True, stable=True)[:, : int(weighty.sum(1).max())]
        return stream.gather(1, kept[..., None].expand(-1, -1, stream.shape[2])), attended.gather(1, kept)

    def _refuse_divergence(self, state: Tensor, gates: Tensor) -> None:
        largest = torch.linalg.eigvalsh(self._moments(state))[:, -1]
        step = 1 / (gates @ (1 / self.steps))
        worst = int((step * largest).argmax())
        if step[worst] * largest[worst] >= 2:
            raise InputError(
                f"prompt {worst}: gamma={float(step[worst]):.3g} times {float(largest[worst]):.3g}, the largest "
                "eigenvalue of the local second moments is 2 or more, and stage 1 diverges: use gamma='trace'"
            )

    def _moments(self, state: Tensor) -> Tensor:
        """Return the weighted second moments (B, D, D) of the offsets."""
        slots = geometry_slots(self.centers.shape[1])
        delta, w = state[..., slots["delta"]], state[..., slots["w"]]
        return delta.transpose(1, 2) @ (w * delta) / w.sum(1, keepdim=True).clamp_min(GATE)

    # ------------------------------------------------------------------------------------------------- opening it up

    def trace(self, prompt: Prompt) -> Trace:
        """Return what each layer does to a batch of prompts."""
        query = prompt.query.to(self.centers)
        gates, _ = self.gates(query)
        states, attended = self._geometry(prompt.x, prompt.y, query, None, gates)
        slots = geometry_slots(query.shape[1])
        first, stream = states[0], states[-1]
        w = first[..., slots["w"]][..., 0]  # (B, T)
        offsets = (w * first[..., slots["delta"]].square().sum(2)).sum(1)
        sizes = [(w * state[..., slots["z"]].square().sum(2)).sum(1) for state in states[:-1]]
        moments = self._moments(first)
        step = 1 / (gates @ (1 / self.steps)) if self.fixed else 1 / moments.diagonal(dim1=1, dim2=2).sum(1)
        leading = torch.linalg.eigvalsh(moments)[:, -1]
        predictions = torch.zeros(self.layers2, len(query), dtype=query.dtype)
        residuals = torch.zeros(self.newton + 1, len(query), dtype=query.dtype)
        for h, (gate, solver) in enumerate(zip(gates.T, self.solvers, strict=True)):
            rows = gate > 0
            if not rows.any():
                continue
            solved = list(solver.states(stream[rows] @ solver.read_in.T, attended[rows]))
            last = len(solver.repeats) - 1
            predictions[:, rows] += gate[rows] * torch.stack(
                [s[:, 0] @ solver.read_out for at, s in solved if at == last]
            )
            a = solver.blocks[last - 1].attention.state(solved[last - 2][1], attended[rows])[:, 0]
            identity = torch.eye(a.shape[-1], dtype=a.dtype)
            found = torch.stack([(identity - a @ g).flatten(1).norm(dim=1) for g in newton_schulz(a, self.newton)])
            most = gates[rows].argmax(1) == h
            residuals[:, rows.nonzero()[most, 0]] = found[:, most]
        return Trace((torch.stack(sizes) / offsets.clamp_min(GATE)).sqrt(), (1 - step * leading).abs() ** self.layers1,
                     residuals, predictions)  # fmt: skip

    def explain(self, prompt: Prompt) -> str:
        """Return the layer budget in words, with the residuals that a batch of prompts really has."""
        told = self.trace(prompt)
        query = prompt.query.to(self.centers)
        gates, _ = self.gates(query)
        first = self._geometry(prompt.x, prompt.y, query, None, gates)[0][0]
        values = torch.linalg.eigvalsh(self._moments(first)).flip(1)  # (B, D) descending
        dims = torch.tensor(self.dims)[gates.argmax(1)]
        smallest = values.gather(1, dims[:, None] - 1)[:, 0]
        step = 1 / (gates @ (1 / self.steps)) if self.fixed else 1 / values.sum(1)
        kept = float((1 - step * smallest).clamp(0, 1 - 1e-9).median())
        needed = ceil(log(1e-2) / log(kept)) if kept > 0 else 1
        steps = (told.predictions[1:] - told.predictions[:-1]).abs()
        opened = float((gates > 0).sum(1).double().mean())
        lines = [
            f"stage 1: {self.layers1} layers, one head, step by {'constants' if self.fixed else 'the trace'}; the "
            f"weakest tangent direction keeps {kept:.2g} a layer (median), so that 1 % is left after {needed}",
            f"  z falls from 1 to {float(told.preconditioner[-1].median()):.2g} of the offsets (median)",
            f"whitening: {self.newton} Newton-Schulz steps, |I - Gamma A| from {float(told.newton[0].max()):.2g} to "
            f"{float(told.newton[-1].max()):.2g} (worst)",
            f"stage 2: {self.layers2} layers, {len(self.radii)} charts, {opened:.1f} open a query; "
            f"the last layer moves predictions by "
            f"{float(steps[-1].max()) if len(steps) else float('nan'):.2g} (worst)",
        ]
        return "\n".join(lines)


def frame_estimate(
    atlas: Sequence[Chart], x: np.ndarray, y: np.ndarray, query: np.ndarray, *, layers1: int = 8, layers2: int = 4
) -> float:
    """Return what :class:`ConstructedRegressor` computes for one prompt, by solving each step exactly.

    Parameters
    ----------
    atlas : charts.
    x, y, query : (n, D), (n,) and (D,).
    layers1 : power of the preconditioner; 0 leaves it out.
    layers2 : layers of the solvers: all but the first refine what the ridge keeps from the least squares.

    Notes
    -----
    The same radius, weights, preconditioner and gates, as matrix algebra; least squares by a solver.
    """
    centers, radii = np.stack([c.center for c in atlas]), np.array([c.radius for c in atlas])
    ratio = np.linalg.norm(query - centers, axis=1) / radii
    gates = np.maximum(1 - ratio**2, 0)
    if gates.sum() <= GATE:
        gates = (np.arange(len(atlas)) == ratio.argmin()).astype(float)
    gates /= gates.sum()
    s = float(gates @ np.array([c.bandwidth for c in atlas]) ** -2.0)
    delta = x - query
    square = (delta**2).sum(1)
    w, scale = np.maximum(1 - square * s / 4**DOUBLINGS, 0), s / 4**DOUBLINGS
    for t in range(DOUBLINGS - 1, -1, -1):
        narrower = np.maximum(1 - square * s / 4**t, 0)
        share = min(narrower.sum() / enough_weight(atlas), 1.0)
        w, scale = w + share * (narrower - w), scale + share * (s / 4**t - scale)
    z = np.zeros_like(delta)
    if layers1:
        moments = delta.T @ (w[:, None] * delta) / max(float(w @ square), GATE)
        z = delta @ np.linalg.matrix_power(np.eye(len(query)) - moments, layers1)
        w = w * np.maximum(1 - (z**2).sum(1) * scale**2 / OFF**2, 0)
    if w.sum() <= GATE:
        return 0.0
    predicted = 0.0
    for gate, chart in zip(gates, atlas, strict=True):
        if gate > 0:
            u = (delta - z) @ chart.frame / chart.bandwidth
            fitted = fit_local(u[None], w[None], local_degree(chart), refinements=layers2 - 1)
            predicted += gate * float(fitted.weights[0] @ y)
    return predicted


def _check(atlas: Sequence[Chart]) -> None:
    if not atlas:
        raise InputError("the atlas has no chart")
    ambient = len(atlas[0].center)
    for m, chart in enumerate(atlas):
        if chart.center.shape != (ambient,) or chart.frame.shape != (ambient, chart.dim) or chart.dim < 1:
            raise InputError(
                f"chart {m}: center {chart.center.shape} and frame {chart.frame.shape} of dim={chart.dim}: "
                f"({ambient},) and ({ambient}, dim), dim at most {ambient}"
            )
        if min(chart.smoothness, chart.bandwidth, chart.radius) <= 0:
            raise InputError(f"chart {m}: smoothness, bandwidth and radius must be positive")
        if not (np.isfinite(chart.center).all() and np.isfinite(chart.frame).all()):
            raise InputError(f"chart {m}: center and frame must be finite")
        if np.linalg.matrix_rank(chart.frame) < chart.dim:
            raise InputError(f"chart {m}: the columns of its frame are linearly dependent")
