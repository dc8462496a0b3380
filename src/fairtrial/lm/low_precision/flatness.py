"""How flat the loss is around a model's weights: what noise of the size of quantization's does to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.errors import InputError
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import torch_generator

if TYPE_CHECKING:
    import pandas as pd


@torch.no_grad()
def loss_rise(
    model: nn.Module,
    ids: torch.Tensor,
    *,
    sigmas: Sequence[float] = (0.01, 0.03, 0.1),
    draws: int = 8,
    skip: Sequence[str] = ("lm_head",),
    seed: int = 0,
) -> pd.DataFrame:
    """Return how much the loss rises under Gaussian noise on the weights of the linear layers.

    Parameters
    ----------
    model
        Called as ``model(ids, labels=ids)``, it returns an object with ``loss``.
    ids
        Token ids (B, T).
    sigmas
        Length of the noise on every row of a weight matrix, as a share of the row's length.
    draws
        Of the noise, the same for all models of one shape and seed.
    skip
        Layers to leave, by whole name or its last part.
    seed
        Of the noise.

    Returns
    -------
    pandas.DataFrame
        ``sigma``, ``rise`` (nats, mean over draws) and ``error`` (its standard error). The weights are bit for bit what
        they were.

    Raises
    ------
    InputError
        No linear layer, no draw, or a sigma below 0.
    """
    import pandas as pd

    checked_count(draws, "draws", least=2)
    if not sigmas:
        raise InputError("sigmas=(): give at least one share")
    for sigma in sigmas:
        checked_number(sigma, "sigmas", least=0)
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    weights = [
        layer.weight
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and not {name, name.rpartition(".")[2]} & {*skip}
    ]
    if not weights:
        raise InputError(f"{type(model).__name__} has no linear layer but for those that are skipped")
    kept = [weight.clone() for weight in weights]
    with evaluation_mode(model):
        start = float(model(ids, labels=ids).loss)
        rows = []
        try:
            for sigma in sigmas:
                rises = []
                for draw in range(draws):
                    generator = torch_generator(seed, "weight noise", draw)
                    for weight, own in zip(weights, kept, strict=True):
                        noise = torch.randn(own.shape, generator=generator).to(own.device, own.dtype)
                        weight.copy_(own + sigma * own.norm(dim=1, keepdim=True) * noise / own.shape[1] ** 0.5)
                    rises.append(float(model(ids, labels=ids).loss) - start)
                found = torch.tensor(rises, dtype=torch.float64)
                rows.append({"sigma": sigma, "rise": float(found.mean()), "error": float(found.std() / draws**0.5)})
        finally:
            for weight, own in zip(weights, kept, strict=True):
                weight.copy_(own)
    return pd.DataFrame(rows)
