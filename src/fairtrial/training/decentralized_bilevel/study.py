"""Many runs at once: seeds, graphs and rates as leading dimensions of the same tensors, on a problem with an answer.

What runs is :class:`~.recursion.Recursion`, or a baseline of its interface, on the gradient pieces of the quadratic
oracle; only the loop over steps is a loop. Problems of real data are in :mod:`.learning`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairtrial.seeds import torch_generator
from fairtrial.training.decentralized_bilevel.baselines import (
    ClippedSGD,
    Momentum,
    NormalisedMomentum,
    PlainSGD,
    UnnormalisedVR,
)
from fairtrial.training.decentralized_bilevel.oracle import QuadraticOracle, student
from fairtrial.training.decentralized_bilevel.problem import combined
from fairtrial.training.decentralized_bilevel.recursion import RESET_EVERY, Recursion, first_estimate

RULES: dict[str, type[Recursion]] = {
    "normalised-vr": Recursion,
    "sgd": PlainSGD,
    "momentum": Momentum,
    "unnormalised-vr": UnnormalisedVR,
    "clipped-sgd": ClippedSGD,
    "normalised-momentum": NormalisedMomentum,
    "no-gossip": Recursion,
    "frozen-x": Recursion,
}
NORMALISED = {"normalised-vr", "normalised-momentum", "no-gossip", "frozen-x"}
FIRST = 8  # samples of the first estimate
CHUNK = 50  # steps whose noise is drawn at once


def steps_of(label: str, evaluations: int) -> int:
    """Return the steps that ``evaluations`` gradient evaluations pay for, the first estimate among them."""
    return (evaluations - FIRST) // RULES[label].evaluations


def start(
    label: str, w: Tensor, sizes: Sequence[int], scales: Sequence[float], combine: Any, p: float, rate: Any, clip: Any
) -> Recursion:
    """Return a candidate's rule at ``w`` (..., n, P) whose rates of the blocks are ``rate`` times ``scales``."""
    rates = [rate * scale for scale in scales]
    if label == "clipped-sgd":
        return ClippedSGD(w, sizes, rates, combine, p, threshold=clip)
    return RULES[label](w, sizes, rates, combine, p)


def march(
    label: str,
    rule: Recursion,
    mixing: Tensor,
    first: Tensor,
    sample: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    steps: int,
    watch: Callable[[int, Recursion], None],
    private: int = 0,
) -> None:
    """Take ``steps`` steps.

    Parameters
    ----------
    label : the candidate, for the two controls that differ from the method in the loop alone.
    rule : with variables (..., n, P).
    mixing : (..., n, n), broadcast over the leading dimensions.
    first : (..., n, Q), the first estimate of the pieces.
    sample : ``sample(w, before)`` returns the pieces of the next sample at the variables and at those before.
    watch : called after every step with the number of steps made.
    private : so many first columns take no part in gossip.
    """
    still = (0,) if label == "frozen-x" else ()
    if label == "no-gossip":
        mixing = torch.eye(mixing.shape[-1], dtype=mixing.dtype)

    def mix(v: Tensor) -> Tensor:
        mixed = mixing.to(v) @ v[..., private:]
        return torch.cat([v[..., :private], mixed], -1) if private else mixed

    for t in range(steps):
        now, before = sample(rule.w, rule.before) if t else (first, first)
        rule.estimate(now, before, t, 10.0 * (1 + t) ** 0.25)
        s = rule.g
        if rule.tracks:
            s = mix(rule.offer(True if t % RESET_EVERY == 0 else rule.spikes().any(-2, keepdim=True)))
        rule.move(mix(rule.w), s, t, still)
        watch(t + 1, rule)


# ------------------------------------------------------------------------------------------------- the quadratic oracle


@dataclass(frozen=True)
class Noise:
    """Student-t noise of ``df`` degrees of freedom (inf: normal) on the oracle's gradients, times ``scale``.

    ``shared``: g(x, y) and g(x, z) see one sample, as in the method, and additive noise leaves their difference.
    """

    df: float
    scale: float
    shared: bool

    def pieces(self, sizes: Sequence[int], seeds: Sequence[int], n: int, names: Sequence[object]) -> Iterator[Tensor]:
        """Yield the noise of one step after the other, (seeds, n, 2 dx + 3 dy)."""
        dx, dy = sizes[:2]
        parts = [dx, dy, dy] if self.shared else [dx, dx, dx, dy, dy, dy]
        sources = [torch_generator(seed, "oracle noise", *names) for seed in seeds]
        zero = torch.zeros(len(seeds), n, dx, dtype=torch.float64)
        while True:
            chunk = torch.stack([student((CHUNK, n, sum(parts)), self.df, g) for g in sources], 1)
            for draws in chunk * self.scale:
                if self.shared:
                    fx, fy, gy = draws.split(parts, -1)
                    yield torch.cat([fx, zero, fy, gy, gy], -1)
                else:
                    fx, gx, zx, fy, gy, zy = draws.split(parts, -1)
                    yield torch.cat([fx, gx - zx, fy, gy, zy], -1)


def run_oracle(
    label: str,
    mixings: Sequence[np.ndarray],
    noise: Noise,
    seeds: Sequence[int],
    rates: Tensor,
    clips: Tensor,
    *,
    evaluations: int,
    p: float,
    role: str,
) -> dict[str, np.ndarray]:
    """Run a candidate on the quadratic oracle.

    Parameters
    ----------
    label : one of RULES.
    mixings : G matrices (n, n).
    seeds : S seeds of the noise; ``role`` ("tune", "run") keeps their streams apart.
    rates, clips : (R,)
        Rates and thresholds to run with.

    Returns
    -------
    ``gap``, ``slope``, ``consensus`` (G, R, S) at the end (inf: diverged), where slope is the gradient's norm;
    along the way ``evaluations`` (C,), ``gaps`` and ``slopes`` (C, G, R, S); ``megabytes`` sent by all nodes (G,).
    """
    n = len(mixings[0])
    oracle = QuadraticOracle(n)
    dx = oracle.sizes[0]
    w = torch.zeros(len(mixings), len(rates), len(seeds), n, sum(oracle.sizes), dtype=torch.float64)
    # Blocks start at zero, so a normalised step is a share of the root of their length.
    scales = [size**0.5 for size in oracle.sizes] if label in NORMALISED else [1.0] * 3
    combine = partial(combined, sizes=oracle.sizes)
    rule = start(label, w, oracle.sizes, scales, combine, p, *(v.to(w)[:, None, None, None] for v in (rates, clips)))
    steps = steps_of(label, evaluations)
    source = noise.pieces(oracle.sizes, seeds, n, (role, noise.df, noise.shared))
    exact = oracle.pieces(w)
    lengths = [dx, dx, *oracle.sizes[1:], oracle.sizes[1]]
    first = exact + first_estimate(torch.stack([next(source) for _ in range(FIRST)]), lengths, p)
    seen = set(np.unique(np.geomspace(min(20, steps), steps, 24).astype(int)).tolist())
    rows: list[tuple[int, Tensor, Tensor]] = []

    def sample(w: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        # The noise is additive: what was computed at the point before is computed again there.
        nonlocal exact
        old, exact = exact, oracle.pieces(w)
        draw = next(source)
        return exact + draw, old + draw

    def watch(made: int, rule: Recursion) -> None:
        if made in seen:
            x = rule.w[..., :dx].mean(-2)
            rows.append(
                (FIRST + made * rule.evaluations, oracle.value(x) - oracle.f_star, oracle.gradient(x).norm(dim=-1))
            )

    mixing = torch.from_numpy(np.stack(mixings))[:, None, None]
    march(label, rule, mixing, first, sample, steps, watch)
    apart = (rule.w - rule.w.mean(-2, keepdim=True)).square().sum(-1).mean(-1).sqrt()
    gaps, slopes = (torch.stack([row[k] for row in rows]).nan_to_num(nan=torch.inf).numpy() for k in (1, 2))
    edges = [0 if label == "no-gossip" else np.count_nonzero(a) - np.count_nonzero(np.diag(a)) for a in mixings]
    return {
        "gap": gaps[-1], "slope": slopes[-1], "consensus": apart.nan_to_num(nan=torch.inf).numpy(),
        "evaluations": np.array([row[0] for row in rows]), "gaps": gaps, "slopes": slopes,
        "megabytes": np.array(edges) * 8 * sum(oracle.sizes) * (1 + rule.tracks) * steps / 1e6,
    }  # fmt: skip
