"""The stability inequality: what neurons do to typical patches is bounded by the sharpness of the loss.

For squared loss, g_k = P(u.p > t)^2 E[u.p - t | u.p > t] sqrt(1 + |E[p | u.p > t]|^2) of each neuron's direction
u = w / |w| and threshold t = b / |w| over the patches it sees,

    S = sum_k |v_k| |w_k| g_k  <=  (lmax(GN) - 1) / 2,      lmax(GN) <= lmax(H) + sqrt(1 + R^2) mean |r|

(GN the Gauss-Newton matrix, H the Hessian, r the residuals, R the largest patch norm; without an output bias
lmax(GN) / 2). Where gradient descent with step eta is linearly stable, lmax(H) <= 2 / eta.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from fairtrial.errors import InputError
from fairtrial.training.curvature import GaussNewton, Hessian, top_eigenpairs
from fairtrial.training.sparse_connectivity.patches import PatchNetwork, as_patches, tensors_for

CHUNK = 2**23  # entries of pre-activations held at once


@dataclass(frozen=True)
class StabilityCertificate:
    """Both sides of the inequality, measured.

    Attributes
    ----------
    weighted_path_norm : float
        S.
    budget, budget_hessian : float
        (lmax(GN) - 1) / 2, and the same from the Hessian and the residuals.
    slack, slack_hessian : float
        Budget less S, at least 0 where the network is differentiable.
    sharpness, gauss_newton : float
        lmax(H), lmax(GN).
    residual_term : float
        sqrt(1 + R^2) mean |r|.
    path_norm : float
        sum_k |v_k| |w_k|, which stability bounds only through g.
    shattering_share : float
        Share of the path norm in neurons that are active on fewer than two patches.
    dead_share : float
        Share of neurons active on none.
    kinks : int
        Pairs of neuron and patch exactly at a threshold: there the loss has no Hessian.
    per_neuron : DataFrame
        A row a neuron, largest path first: ``path`` |v||w|, ``activation`` P, ``g``, ``threshold`` t, ``spent`` path g.
    """

    weighted_path_norm: float
    budget: float
    budget_hessian: float
    sharpness: float
    gauss_newton: float
    residual_term: float
    path_norm: float
    shattering_share: float
    dead_share: float
    kinks: int
    per_neuron: pd.DataFrame = field(repr=False)

    @property
    def slack(self) -> float:
        """How far below its budget S lies."""
        return self.budget - self.weighted_path_norm

    @property
    def slack_hessian(self) -> float:
        """How far below the Hessian's budget S lies."""
        return self.budget_hessian - self.weighted_path_norm


def stability_certificate(
    module: nn.Module, x: Tensor | np.ndarray, y: Tensor | np.ndarray, *, tol: float = 1e-6, max_products: int = 500
) -> StabilityCertificate:
    """Evaluate the inequality on a trained network and its training data.

    Parameters
    ----------
    module : nn.Sequential
        Two layers with ReLU between them; see :data:`~fairtrial.training.sparse_connectivity.patches.FORMS`.
    x : (n, d) vectors, or (n, h, w) or (n, C, h, w) images, as the module takes them
    y : (n,) targets of squared loss
    tol, max_products : of the eigenvalues, relative; their residuals are added to the budgets.

    Raises
    ------
    InputError
        If the module has another form, data do not match, or something is not finite.

    Examples
    --------
    >>> module = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    >>> x = torch.randn(20, 3, dtype=torch.float64)
    >>> stability_certificate(module, x, torch.randn(20)).slack > 0
    True
    """
    x, y = tensors_for(module, inputs=x, targets=y)
    if len(x) != len(y) or y.dim() != 1:
        raise InputError(f"inputs {tuple(x.shape)} and targets {tuple(y.shape)} do not match: (n, ...) and (n,)")
    network = as_patches(module, x)
    table, kinks = neuron_statistics(network)
    with torch.no_grad():
        residuals = module(x).reshape(-1) - y
    gauss_newton = GaussNewton(lambda b: module(b[0]).reshape(-1), _half_squared, list(module.parameters()), [(x, y)])
    hessian = Hessian(lambda b: _half_squared(module(b[0]).reshape(-1), b), list(module.parameters()), [(x, y)])
    tops = []
    for matrix in (gauss_newton, hessian):
        with matrix.held() as product:
            top = top_eigenpairs(
                product, matrix.size, tol=tol, max_products=max_products, dtype=x.dtype, device=x.device
            )
        tops.append(float(top.values[0] + top.residuals[0]))
    residual_term = float((1 + network.radius**2) ** 0.5 * residuals.abs().mean())
    less = 1.0 if network.c is not None else 0.0
    path = table["path"].sum()
    return StabilityCertificate(
        weighted_path_norm=float(table["spent"].sum()),
        budget=(tops[0] - less) / 2,
        budget_hessian=(tops[1] + residual_term - less) / 2,
        sharpness=tops[1],
        gauss_newton=tops[0],
        residual_term=residual_term,
        path_norm=float(path),
        shattering_share=float(table["path"][table["activation"] < 2 / network.points].sum() / path) if path else 0.0,
        dead_share=float((table["activation"] == 0).mean()),
        kinks=kinks,
        per_neuron=table.sort_values("path", ascending=False, ignore_index=True),
    )


def _half_squared(z: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 0.5 * (z - batch[1]).square().mean()


def neuron_statistics(network: PatchNetwork) -> tuple[pd.DataFrame, int]:
    """Return a row a neuron, and the number of pairs exactly at a threshold."""
    norms = network.w.norm(dim=1)
    k = len(norms)
    step = max(1, CHUNK // network.points)
    share, excess, centre = (torch.zeros(k).to(norms) for _ in range(3))
    kinks = 0
    for start in range(0, k, step):
        rows = slice(start, start + step)
        patches, z = network.seen(rows)
        on = (z > 0).to(z)  # (N, k')
        kinks += int(((z == 0) & (norms[rows] > 0)).sum())
        count = on.sum(0)
        mean = on.T @ patches if network.shared else torch.einsum("nk,nkm->km", on, patches)
        mean = mean / count.clamp_min(1)[:, None]
        share[rows] = count / len(z)
        excess[rows] = (z * on).sum(0) / count.clamp_min(1) / norms[rows].clamp_min(1e-300)
        centre[rows] = mean.norm(dim=1)
    g = share.square() * excess * (1 + centre.square()).sqrt()
    path = network.v.abs() * norms
    columns = {
        "path": path, "activation": share, "g": g, "threshold": network.b / norms.clamp_min(1e-300), "spent": path * g,
    }  # fmt: skip
    return pd.DataFrame({name: column.double().cpu().numpy() for name, column in columns.items()}), kinks
