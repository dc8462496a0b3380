"""How the router starts: with every slice taken once a token, or with the hidden states of each domain."""

from __future__ import annotations

import torch

from fairtrial.lm.upcycling.configuration import DivMoEConfig
from fairtrial.lm.upcycling.experts import DivMoEFeedForward
from fairtrial.lm.upcycling.recipes import Recipe, expert_index

COVERAGE = 10.0


def coverage_of(layer: int, n_groups: int, n_slices: int, beta: float = COVERAGE) -> torch.Tensor:
    """Return the bias (G, F) by which every group starts with one slice and all slices are covered.

    Group g of layer l starts with slice sigma = (g + l) mod F, at beta - log c, where c groups share that slice: their
    shares of it sum to 1 / F.

    >>> [[round(bias, 2) for bias in group] for group in coverage_of(1, 4, 2, beta=10.0).tolist()]
    [[0.0, 9.31], [9.31, 0.0], [0.0, 9.31], [9.31, 0.0]]
    """
    slices = (torch.arange(n_groups) + layer) % n_slices
    bias = torch.zeros(n_groups, n_slices)
    bias[torch.arange(n_groups), slices] = beta - torch.bincount(slices, minlength=n_slices)[slices].log()
    return bias


@torch.no_grad()
def start_router(
    layer: DivMoEFeedForward, config: DivMoEConfig, recipe: Recipe, index: int, beta: float, seed: int
) -> None:
    """Draw the router's rows and set its coverage bias; free routing has the bias of the groups it does without."""
    router = layer.router
    g = torch.Generator().manual_seed(seed)
    router.weight.copy_(recipe.router_std * torch.randn(router.weight.shape, generator=g))
    if recipe.coverage:
        shape = (len(config.domains), config.granularity)
        if config.routing == "group":
            shape = config.router_shape
        router.coverage_bias.copy_(coverage_of(index, *shape, beta).flatten())


@torch.no_grad()
def hidden_gates(layer: DivMoEFeedForward, inputs: list[torch.Tensor], config: DivMoEConfig, recipe: Recipe) -> None:
    """Add to the router's rows the mean input of their domain less that of all, at unit variance of the logits."""
    means = torch.stack([x.float().mean(0) for x in inputs])  # (G, d)
    rows = means - means.mean(0)
    rows = rows / (torch.cat(inputs).float() @ rows.T).std().clamp_min(1e-12)
    g, f = len(config.domains), config.granularity
    for group in range(g):
        for slice_ in range(f):
            layer.router.weight[expert_index(recipe, g, f, group, slice_)] += rows[group].to(layer.router.weight)
