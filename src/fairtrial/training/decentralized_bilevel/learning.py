"""Problems of real data for many runs at once: the cleaning of flipped labels, and next tokens on frozen features.

Both fit a linear classifier without bias, of which the gradients have a closed form; seeds and rates are leading
dimensions, as in :mod:`.study`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.seeds import generator, torch_generator
from fairtrial.training.decentralized_bilevel.problem import combined
from fairtrial.training.decentralized_bilevel.recursion import Recursion, first_estimate
from fairtrial.training.decentralized_bilevel.study import FIRST, NORMALISED, march, start, steps_of

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs (S, n, b, d), labels (S, n, b) and the indices of the examples (S, n, b)."""
Pieces = Callable[[Tensor, Batch, Batch], Tensor]
"""Of points (K, R, S, n, P), an upper and a lower batch, the gradient pieces (K, R, S, n, Q)."""


@dataclass(frozen=True)
class Shards:
    """Examples of S seeds spread over n nodes, and a test set for all."""

    x: Tensor  # (S, n, M, d)
    y: Tensor  # (S, n, M)
    valid_x: Tensor  # (S, n, V, d)
    valid_y: Tensor
    test_x: Tensor  # (T, d)
    test_y: Tensor  # (T,)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(max(v.max() for v in (self.y, self.valid_y, self.test_y))) + 1

    def models(self, seeds: Sequence[int]) -> Tensor:
        """Return a small random model a seed, the same on all nodes, (S, n, classes * d)."""
        d = self.x.shape[-1]
        drawn = [torch.randn(self.classes, d, generator=torch_generator(seed, "weights")) for seed in seeds]
        return (0.5 / d**0.5 * torch.stack(drawn)).flatten(1)[:, None].expand(-1, self.x.shape[1], -1)

    def logits(self, models: Tensor) -> Tensor:
        """Return those of the test set (..., T, classes) by models (..., classes * d)."""
        return torch.einsum("td,...cd->...tc", self.test_x, models.unflatten(-1, (self.classes, -1)))

    def accuracy(self, models: Tensor) -> np.ndarray:
        """Return the share of right answers on the test set; of a model that has diverged, 0."""
        logits = self.logits(models)
        right = (logits.argmax(-1) == self.test_y) & logits.isfinite().all(-1)
        return right.double().mean(-1).numpy()

    def loss(self, models: Tensor) -> np.ndarray:
        """Return nats an example of the test set; of a model that has diverged, inf."""
        logits = self.logits(models)
        log_p = logits.log_softmax(-1).gather(-1, self.test_y[:, None].expand(*logits.shape[:-1], 1))[..., 0]
        return -log_p.double().mean(-1).nan_to_num(nan=-torch.inf).numpy()


def run(
    label: str,
    data: Shards,
    pieces: Pieces,
    w: Tensor,
    scales: Sequence[float],
    mixing: np.ndarray,
    seeds: Sequence[int],
    rates: Tensor,
    clips: Tensor,
    *,
    evaluations: int,
    batch: int,
    p: float,
    private: int = 0,
) -> Recursion:
    """Run a candidate from ``w`` (S, n, P) at rates and clips (R,), which times ``scales`` are those of the blocks.

    Returns
    -------
    The rule, whose variables w are (R, S, n, P) at the end: x, then y and z, each (classes * d).
    """
    py = data.classes * data.x.shape[-1]
    px = w.shape[-1] - 2 * py
    sizes = [px, py, py]
    w = w.expand(len(rates), *w.shape)
    combine = partial(combined, sizes=sizes)
    rule = start(label, w, sizes, scales, combine, p, *(v.to(w)[:, None, None, None] for v in (rates, clips)))
    sources = [torch_generator(seed, "batches") for seed in seeds]

    def batch_of(inputs: Tensor, labels: Tensor) -> Batch:
        n, d = inputs.shape[1], inputs.shape[-1]
        index = torch.stack([torch.randint(inputs.shape[2], (n, batch), generator=g) for g in sources])  # (S, n, b)
        return inputs.gather(2, index[..., None].expand(-1, -1, -1, d)), labels.gather(2, index), index

    def sample(*points: Tensor) -> tuple[Tensor, ...]:
        return tuple(pieces(torch.stack(points), batch_of(data.valid_x, data.valid_y), batch_of(data.x, data.y)))

    def pair(w: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return sample(w, before) if rule.evaluations == 2 else sample(w) * 2

    first = first_estimate(torch.stack([sample(w)[0] for _ in range(FIRST)]), [px, px, py, py, py], p)
    steps = steps_of(label, evaluations)
    march(label, rule, torch.from_numpy(mixing), first, pair, steps, lambda made, rule: None, private=private)
    return rule


def apart(models: Tensor) -> np.ndarray:
    """Return the root mean square distance of the nodes' models (..., n, P) from their mean; diverged, inf."""
    squares = (models - models.mean(-2, keepdim=True)).square().sum(-1).mean(-1)
    return squares.sqrt().nan_to_num(nan=torch.inf).numpy()


def errors(inputs: Tensor, labels: Tensor, models: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses (K, R, S, n, e, b), and their slopes in the outputs (..., b, classes), of models (..., e, c, d)."""
    log_p = torch.einsum("snbd,krsnecd->krsnebc", inputs, models).log_softmax(-1)
    hot = F.one_hot(labels, models.shape[-2]).to(log_p)[:, :, None]
    return -(log_p * hot).sum(-1), log_p.exp() - hot


def slopes(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the gradients of models (..., e, c, d) from those of their outputs (..., e, b, c)."""
    return torch.einsum("krsnebc,snbd->krsnecd", outputs, inputs)


def upper_slope(points: Tensor, upper: Batch) -> Tensor:
    """Return the gradient (K, R, S, n, P_y) of the mean validation loss in the models (K, R, S, n, c, d)."""
    inputs, labels, _ = upper
    _, slope = errors(inputs, labels, points[..., None, :, :])
    return slopes(inputs, slope / inputs.shape[-2]).flatten(-3)


# ------------------------------------------------------------------------------------------------------------- cleaning


@dataclass(frozen=True)
class Flipped(Shards):
    """Shards of whose training labels some are wrong, (S, n, M)."""

    wrong: Tensor


def shard(
    x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], seeds: Sequence[int], *, n: int, train: int, valid: int,
    concentration: float, flipped: float,
) -> Flipped:  # fmt: skip
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
    return Flipped(
        inputs[:, :, :train], given[:, :, :train], inputs[:, :, train:], given[:, :, train:], *test, bad[:, :, :train]
    )


def run_cleaning(
    label: str, data: Flipped, mixing: np.ndarray, seeds: Sequence[int], rates: Tensor, clips: Tensor, *,
    evaluations: int, batch: int, p: float,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Run a candidate on data cleaning at rates and clips (R,), seeds (S,) those of the shards.

    Returns
    -------
    ``accuracy`` of the averaged model, ``node_accuracy`` (mean over the nodes' own), ``auc`` of the weights for flipped
    labels, ``consensus``: (R, S) each.
    """
    m, y0 = data.x.shape[2], data.models(seeds)
    w = torch.cat([torch.zeros(*y0.shape[:2], m), y0, y0], -1)
    # A weight is one of m in a mean: plain steps along x are m times longer, or weights would hardly move.
    length = float(y0[:, 0].norm(dim=-1).mean())
    scales = [m**0.5, length, length] if label in NORMALISED else [float(m), 1.0, 1.0]
    rule = run(label, data, partial(cleaning_pieces, classes=data.classes), w, scales, mixing, seeds, rates, clips,
               evaluations=evaluations, batch=batch, p=p, private=m)  # fmt: skip
    nodes = rule.w[..., m : m + y0.shape[-1]]  # (R, S, n, Py)
    return {
        "accuracy": data.accuracy(nodes.mean(2)), "auc": _auc(rule.w[..., :m], data.wrong),
        "node_accuracy": data.accuracy(nodes).mean(2), "consensus": apart(nodes),
    }  # fmt: skip


def cleaning_pieces(points: Tensor, upper: Batch, lower: Batch, classes: int, *, decay: float = 1e-3) -> Tensor:
    """Return the pieces of ``Problem.hyper_cleaning`` with a linear classifier without bias.

    Parameters
    ----------
    points : (K, R, S, n, P)
        Variables, x (M,) and two (classes, d) matrices a node.
    """
    low_x, low_y, index = lower
    d, b = low_x.shape[-1], low_x.shape[-2]
    m = points.shape[-1] - 2 * classes * d
    x, yz = points[..., :m], points[..., m:].unflatten(-1, (2, classes, d))
    loss, slope = errors(low_x, low_y, yz)
    at = index.expand(*x.shape[:-1], b)
    weight = x.gather(-1, at).sigmoid()
    gain = weight * (1 - weight) * (loss[..., 0, :] - loss[..., 1, :]) / b
    gx = torch.zeros_like(x).scatter_add(-1, at, gain)
    gyz = slopes(low_x, slope * (weight / b)[..., None, :, None]) + 2 * decay * yz
    return torch.cat([torch.zeros_like(x), gx, upper_slope(yz[..., 0, :, :], upper), gyz.flatten(-3)], -1)


def _auc(x: Tensor, wrong: Tensor) -> np.ndarray:
    """Return, for weights (R, S, n, M) of which ``wrong`` (S, n, M) should be low, the chance that one is lower."""
    from scipy.stats import rankdata

    scores = -x.flatten(2).nan_to_num().double().numpy()  # (R, S, n M)
    positive = wrong.flatten(1).numpy()[None]
    ranks = rankdata(scores, axis=-1)
    count = positive.sum(-1)
    return ((ranks * positive).sum(-1) - count * (count + 1) / 2) / (count * (positive.shape[-1] - count))


# ------------------------------------------------------------------------------------------------------------- language


def deal(x: Tensor, y: Tensor, test: tuple[Tensor, Tensor], seeds: Sequence[int], *, n: int) -> Shards:
    """Deal N whole texts of T tokens, (N, T, d) and (N, T), out to nodes; of each node's a quarter validates.

    Raises
    ------
    InputError
        Fewer than two texts a node.
    """
    each = len(y) // n
    if each < 2:
        raise InputError(f"{len(y)} texts are too few for {n} nodes: give {2 * n} or more besides those that test")
    valid = max(each // 4, 1)
    order = [generator(seed, "texts").permutation(len(y))[: n * each] for seed in seeds]
    at = torch.from_numpy(np.stack(order)).unflatten(1, (n, each))  # (S, n, texts)
    held, train = at[..., :valid], at[..., valid:]
    return Shards(x[train].flatten(2, 3), y[train].flatten(2), x[held].flatten(2, 3), y[held].flatten(2), *test)


def run_language(
    label: str, data: Shards, groups: Tensor, mixing: np.ndarray, seeds: Sequence[int], rates: Tensor, clips: Tensor, *,
    evaluations: int, batch: int, p: float,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Run a candidate on next tokens, with a penalty exp(x_g) for each group of classes, at rates and clips (R,).

    Parameters
    ----------
    groups : (classes,)
        The group of each class, 0, 1, ...

    Returns
    -------
    ``loss`` and ``accuracy`` of the averaged model on the test texts, ``node_loss`` (mean over the nodes' own),
    ``consensus``: (R, S) each.
    """
    count, y0 = int(groups.max()) + 1, data.models(seeds)
    w = torch.cat([torch.full((*y0.shape[:2], count), START), y0, y0], -1)
    length = float(y0[:, 0].norm(dim=-1).mean())
    scales = [count**0.5, length, length] if label in NORMALISED else [1.0, 1.0, 1.0]
    rule = run(label, data, partial(language_pieces, groups=groups), w, scales, mixing, seeds, rates, clips,
               evaluations=evaluations, batch=batch, p=p)  # fmt: skip
    nodes = rule.w[..., count : count + y0.shape[-1]]
    mean = nodes.mean(2)
    return {
        "loss": data.loss(mean), "accuracy": data.accuracy(mean), "node_loss": data.loss(nodes).mean(2),
        "consensus": apart(nodes),
    }  # fmt: skip


START = -6.0  # penalties begin at exp(-6), about 1/400


def language_pieces(points: Tensor, upper: Batch, lower: Batch, groups: Tensor) -> Tensor:
    """Return the pieces of cross-entropy with half the sum of exp(x_g) |W_c|^2 over classes c of groups g below.

    Parameters
    ----------
    points : (K, R, S, n, P)
        Variables, x (G,) and two (classes, d) matrices a node.
    """
    low_x, low_y, _ = lower
    d, b = low_x.shape[-1], low_x.shape[-2]
    count = points.shape[-1] - 2 * len(groups) * d
    x, yz = points[..., :count], points[..., count:].unflatten(-1, (2, len(groups), d))
    _, slope = errors(low_x, low_y, yz)
    penalty = x.exp()[..., groups]  # (K, R, S, n, c)
    squares = yz.square().sum(-1)  # (K, R, S, n, 2, c)
    each = 0.5 * penalty * (squares[..., 0, :] - squares[..., 1, :])
    gx = torch.zeros_like(x).index_add(-1, groups, each)
    gyz = slopes(low_x, slope / b) + penalty[..., None, :, None] * yz
    return torch.cat([torch.zeros_like(x), gx, upper_slope(yz[..., 0, :, :], upper), gyz.flatten(-3)], -1)


def gradient_noise(data: Shards, seed: int, *, tokens: int, draws: int) -> np.ndarray:
    """Return the lengths (draws,) of what gradients of ``tokens`` drawn at random differ from their mean.

    Those of the mean loss of a random model over all training examples of the first draw.
    """
    inputs, labels = data.x[0].flatten(0, 1), data.y[0].flatten()
    model = data.models([seed])[0, 0].unflatten(0, (data.classes, -1))
    outputs = (inputs @ model.T).softmax(-1) - F.one_hot(labels, data.classes)
    mean = outputs.T @ inputs / len(labels)
    index = torch.randint(len(labels), (draws, tokens), generator=torch_generator(seed, "tails"))
    chunks = [outputs[at].transpose(1, 2) @ inputs[at] / tokens - mean for at in index.split(500)]
    return torch.cat([chunk.flatten(1).norm(dim=-1) for chunk in chunks]).double().numpy()
