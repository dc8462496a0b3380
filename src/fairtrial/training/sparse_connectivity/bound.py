"""A bound on the generalisation gap with every term shown, assembled from known parts.

Neurons with g_k >= q are *interior*: the inequality bounds their path norm by S / q, and with it the Rademacher
complexity of their class (Neyshabur, Tomioka and Srebro 2015; averaging over places does not raise it). The others are
charged by how often a fresh example meets them at all, estimated on inputs without labels. With predictions clipped to
the range of the targets, |f - y| <= B,

    gap <= 4 B 2 A (R + |t|max) / sqrt(n)  +  B^2 (p_fresh + p_train)  +  3 B^2 sqrt(log(2 / delta') / 2n)

A is S / q rounded up to a power of two; delta' is shared out over 20 levels q and 61 powers, since both depend on the
sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.stats.intervals import Binomial
from fairtrial.training.sparse_connectivity.certificate import neuron_statistics
from fairtrial.training.sparse_connectivity.patches import PatchNetwork, as_patches, tensors_for

LEVELS = 20  # of q
POWERS = range(-10, 51)  # of two, for S / q


@dataclass(frozen=True)
class GeneralizationBound:
    """The best of the bounds over q.

    Attributes
    ----------
    total, interior, boundary, deviation : float
        The bound on test less training mean squared error, and its three terms.
    q : float
        The level that gives it.
    interior_share : float
        Share of the path norm in interior neurons.
    vacuous : bool
        Whether the bound is at least B^2, the largest squared error there is.
    terms : DataFrame
        A row a level.
    """

    total: float
    interior: float
    boundary: float
    deviation: float
    q: float
    interior_share: float
    vacuous: bool
    terms: pd.DataFrame = field(repr=False)


def generalization_bound(
    module: nn.Module,
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    x_unlabeled: Tensor | np.ndarray,
    *,
    delta: float = 0.05,
) -> GeneralizationBound:
    """Bound the gap of mean squared errors of a trained two-layer network, predictions clipped to the targets' range.

    Parameters
    ----------
    module, x, y
        As in :func:`~fairtrial.training.sparse_connectivity.certificate.stability_certificate`.
    x_unlabeled : fresh inputs, shaped like ``x``
    delta : the chance that it fails, in (0, 1).

    Raises
    ------
    InputError
        If the module has another form, or delta is outside (0, 1).

    Examples
    --------
    >>> import torch
    >>> module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    >>> x = torch.randn(40, 3, dtype=torch.float64)
    >>> bool(generalization_bound(module, x[:20], torch.randn(20), x[20:]).total > 0)
    True
    """
    if not 0 < delta < 1:
        raise InputError(f"delta={delta}: in (0, 1)")
    x, y, fresh = tensors_for(module, inputs=x, targets=y, x_unlabeled=x_unlabeled)
    if len(x) != len(y) or y.dim() != 1:
        raise InputError(f"inputs {tuple(x.shape)} and targets {tuple(y.shape)} do not match: (n, ...) and (n,)")
    seen, new = as_patches(module, x), as_patches(module, fresh)
    table, _ = neuron_statistics(seen)
    g, path = table["g"].to_numpy(), table["path"].to_numpy()
    s, n = float(table["spent"].sum()), len(x)
    b = 2 * float(y.abs().max())
    reach = max(seen.radius, new.radius) + float(table["threshold"].abs().max())
    share = delta / (2 * LEVELS * len(POWERS))
    active_train, active_fresh = _active(seen), _active(new)  # (n, k)
    rows = []
    for q in np.geomspace(max(g.max(), 1e-12) * 1e-4, max(g.max(), 1e-12), LEVELS):
        interior = np.asarray(g >= q)
        power = max(math.ceil(math.log2(max(s, 1e-300) / q)), POWERS[0])
        a = 2.0**power if power <= POWERS[-1] else math.inf
        met = np.asarray(active_fresh[:, ~interior].any(1))
        p_fresh = Binomial(int(met.sum()), len(met)).bounds(2 * delta / (2 * LEVELS))[1]
        p_train = float(active_train[:, ~interior].any(1).mean())
        rows.append(
            {
                "q": q,
                "interior": 8 * b * a * reach / math.sqrt(n),
                "boundary": b**2 * (p_fresh + p_train) if not interior.all() else 0.0,
                "deviation": 3 * b**2 * math.sqrt(math.log(2 / share) / (2 * n)),
                "interior_share": float(path[interior].sum() / path.sum()) if path.sum() else 1.0,
            }
        )
    terms = pd.DataFrame(rows)
    terms.insert(1, "total", terms["interior"] + terms["boundary"] + terms["deviation"])
    best = terms.iloc[int(terms["total"].to_numpy().argmin())]
    return GeneralizationBound(
        total=float(best["total"]), interior=float(best["interior"]), boundary=float(best["boundary"]),
        deviation=float(best["deviation"]), q=float(best["q"]), interior_share=float(best["interior_share"]),
        vacuous=bool(best["total"] >= b**2), terms=terms,
    )  # fmt: skip


def _active(network: PatchNetwork) -> np.ndarray:
    """Return whether any patch of an example activates a neuron, (n, k)."""
    n = network.patches.shape[0]
    _, z = network.seen(slice(None))
    return (z > 0).reshape(n, -1, z.shape[1]).any(1).cpu().numpy()
