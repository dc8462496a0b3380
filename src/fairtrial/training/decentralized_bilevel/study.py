"""Many runs at once: seeds, graphs and rates as leading dimensions of the same tensors, on problems with an answer.

What runs is :class:`~.recursion.Recursion`, or a baseline of its interface, on the gradient pieces of the quadratic
oracle or of data cleaning; only the loop over steps is a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairtrial.seeds import generator, torch_generator
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


# -------------------------------------------------------------------------------------------------------- data cleaning


@dataclass(frozen=True)
class Shards:
    """Examples of S seeds spread over n nodes: inputs (S, n, M, d), labels (S, n, M), which are wrong (S, n, M)."""

    x: Tensor
    y: Tensor
    wrong: Tensor
    valid_x: Tensor
    valid_y: Tensor
    test_x: Tensor  # (T, d)
    test_y: Tensor  # (T,)


def shard(
    x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], seeds: Sequence[int], *, n: int, train: int, valid: int,
    concentration: float, flipped: float,
) -> Shards:  # fmt: skip
    """Deal examples (N, d) out to nodes whose class shares are Dirichlet draws, and flip labels of the training ones.

    Every node gets ``train`` examples with a share ``flipped`` of labels drawn from the other classes, and ``valid``
    clean ones of the same class shares; examples are drawn without replacement while a class lasts.
    """
    classes = int(y.max()) + 1
    size = train + valid
    index, labels, wrong = [], [], []
    for seed in seeds:
        rng = generator(seed, "shards")
        for share in rng.dirichlet(np.full(classes, concentration), n):
            drawn = rng.choice(classes, size, p=share)
            index.append([int(rng.choice(np.flatnonzero(y.numpy() == c))) for c in drawn])
            bad = (np.arange(size) < train) & (rng.random(size) < flipped)
            labels.append(np.where(bad, (drawn + rng.integers(1, classes, size)) % classes, drawn))
            wrong.append(bad)
    shape = (len(seeds), n, size)
    at = torch.tensor(index).reshape(shape)
    given, bad = (torch.from_numpy(np.stack(v)).reshape(shape) for v in (labels, wrong))
    inputs = x[at]
    return Shards(
        inputs[:, :, :train], given[:, :, :train], bad[:, :, :train], inputs[:, :, train:], given[:, :, train:], *test
    )


def run_cleaning(
    label: str,
    data: Shards,
    mixing: np.ndarray,
    seeds: Sequence[int],
    rates: Tensor,
    clips: Tensor,
    *,
    evaluations: int,
    batch: int,
    p: float,
) -> dict[str, np.ndarray]:
    """Run a candidate on data cleaning with a linear classifier.

    Parameters
    ----------
    rates, clips : (R,)
    seeds : S
        Of initial weights and batches.

    Returns
    -------
    ``accuracy`` of the averaged model, ``node_accuracy`` (mean over the nodes' own), ``auc`` of the weights for flipped
    labels, ``consensus``: (R, S) each.
    """
    s, n, m, d = data.x.shape
    classes = int(max(data.test_y.max(), data.y.max())) + 1
    weights = torch.stack([torch.randn(classes, d, generator=torch_generator(seed, "weights")) for seed in seeds])
    y0 = (0.5 / d**0.5 * weights).flatten(1)[None, :, None].expand(len(rates), s, n, -1)
    w = torch.cat([torch.zeros(len(rates), s, n, m), y0, y0], -1)
    py = classes * d
    sizes, lengths = [m, py, py], [m, m, py, py, py]
    # A weight is one of m in a mean: plain steps along x are m times longer, or weights would hardly move.
    length = float(y0[0, :, 0].norm(dim=-1).mean())
    scales = [m**0.5, length, length] if label in NORMALISED else [float(m), 1.0, 1.0]
    combine = partial(combined, sizes=sizes)
    rule = start(label, w, sizes, scales, combine, p, *(v.to(w)[:, None, None, None] for v in (rates, clips)))
    sources = [torch_generator(seed, "batches") for seed in seeds]

    def batch_of(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.stack([torch.randint(inputs.shape[2], (n, batch), generator=g) for g in sources])  # (S, n, b)
        return inputs.gather(2, index[..., None].expand(-1, -1, -1, d)), labels.gather(2, index), index

    def sample(*points: Tensor) -> tuple[Tensor, ...]:
        upper, lower = batch_of(data.valid_x, data.valid_y), batch_of(data.x, data.y)
        return tuple(cleaning_pieces(torch.stack(points), upper, lower, classes))

    def pair(w: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return sample(w, before) if rule.evaluations == 2 else sample(w) * 2

    first = first_estimate(torch.stack([sample(w)[0] for _ in range(FIRST)]), lengths, p)
    steps = steps_of(label, evaluations)
    march(label, rule, torch.from_numpy(mixing), first, pair, steps, lambda made, rule: None, private=m)
    nodes = rule.w[..., m : m + py]  # (R, S, n, Py)
    apart = (nodes - nodes.mean(2, keepdim=True)).square().sum(-1).mean(2).sqrt()
    return {
        "accuracy": _accuracy(nodes.mean(2), data, classes), "auc": _auc(rule.w[..., :m], data.wrong),
        "node_accuracy": _accuracy(nodes, data, classes).mean(2),
        "consensus": apart.nan_to_num(nan=torch.inf).numpy(),
    }  # fmt: skip


def cleaning_pieces(
    points: Tensor, upper: tuple[Tensor, ...], lower: tuple[Tensor, ...], classes: int, *, decay: float = 1e-3
) -> Tensor:
    """Return the pieces of ``Problem.hyper_cleaning`` with a linear classifier without bias, in closed form.

    Parameters
    ----------
    points : (K, R, S, n, P)
        Variables, x (M,) and two (classes, d) matrices a node.
    upper, lower : inputs (S, n, b, d), labels (S, n, b), indices (S, n, b)

    Returns
    -------
    (K, R, S, n, Q).
    """
    (up_x, up_y, _), (low_x, low_y, index) = upper, lower
    d, b = low_x.shape[-1], low_x.shape[-2]
    m = points.shape[-1] - 2 * classes * d
    x, yz = points[..., :m], points[..., m:].unflatten(-1, (2, classes, d))

    def errors(inputs: Tensor, labels: Tensor, model: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses (..., e, b) and their slopes in the outputs (..., e, b, classes) of models (..., e, c, d)."""
        log_p = torch.einsum("snbd,krsnecd->krsnebc", inputs, model).log_softmax(-1)
        hot = F.one_hot(labels, classes).to(log_p)[:, :, None]
        return -(log_p * hot).sum(-1), log_p.exp() - hot

    loss, slope = errors(low_x, low_y, yz)
    at = index.expand(*x.shape[:-1], b)
    weight = x.gather(-1, at).sigmoid()
    gain = weight * (1 - weight) * (loss[..., 0, :] - loss[..., 1, :]) / b
    gx = torch.zeros_like(x).scatter_add(-1, at, gain)
    gyz = torch.einsum("krsnebc,snbd->krsnecd", slope * (weight / b)[..., None, :, None], low_x) + 2 * decay * yz
    _, up_slope = errors(up_x, up_y, yz[..., :1, :, :])
    fy = torch.einsum("krsnebc,snbd->krsnecd", up_slope / up_x.shape[-2], up_x)
    return torch.cat([torch.zeros_like(x), gx, fy.flatten(-3), gyz.flatten(-3)], -1)


def _accuracy(y: Tensor, data: Shards, classes: int) -> np.ndarray:
    """Return the share of right answers of linear models (..., classes * d); of a diverged one, 0."""
    logits = torch.einsum("td,...cd->...tc", data.test_x, y.unflatten(-1, (classes, -1)))
    right = (logits.argmax(-1) == data.test_y) & logits.isfinite().all(-1)
    return right.double().mean(-1).numpy()


def _auc(x: Tensor, wrong: Tensor) -> np.ndarray:
    """Return, for weights (R, S, n, M) of which ``wrong`` (S, n, M) should be low, the chance that one is lower."""
    from scipy.stats import rankdata

    scores = -x.flatten(2).nan_to_num().double().numpy()  # (R, S, n M)
    positive = wrong.flatten(1).numpy()[None]
    ranks = rankdata(scores, axis=-1)
    count = positive.sum(-1)
    return ((ranks * positive).sum(-1) - count * (count + 1) / 2) / (count * (positive.shape[-1] - count))
