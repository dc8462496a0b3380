"""DivMoE's recipe, and those of what it is compared with: they differ in experts, start and routing alone.

All are built by the same code and are the same kind of model, so that nothing else tells them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fairtrial.errors import UnknownNameError
from fairtrial.lm.upcycling.experts import DivMoEFeedForward


@dataclass(frozen=True)
class Recipe:
    """How a mixture is made of a base and its fine-tunes.

    Parameters
    ----------
    experts
        "domains": slices of the fine-tunes. "base": copies of the base's slices. "random": drawn as a new layer's are.
    routing
        "group": at most one expert a group; "free": the K best of all.
    groups
        What a group holds: the slices of one "domain"; "shuffled": the domains of each slice dealt to the groups anew;
        "slice": the same slice of all domains.
    coverage
        Whether a bias makes every token start with all slices, one a group.
    reinitialised
        Share of each expert's neurons that is drawn anew (drop-upcycling).
    router_std
        Of the router's initial weights.
    """

    experts: Literal["domains", "base", "random"] = "domains"
    routing: Literal["group", "free"] = "group"
    groups: Literal["domain", "shuffled", "slice"] = "domain"
    coverage: bool = True
    reinitialised: float = 0.0
    router_std: float = 1e-3


RECIPES: dict[str, Recipe] = {
    "divmoe": Recipe(),
    # Komatsuzaki et al. 2023, with shares that sum to 1.
    "sparse": Recipe("base", "free", coverage=False, router_std=0.02),
    # Nakamura et al. 2025: half of each expert's neurons are drawn with the mean and deviation of their matrix.
    "drop": Recipe("base", "free", coverage=False, reinitialised=0.5, router_std=0.02),
    # Sukhbaatar et al. 2024 (Branch-Train-MiX), with granularity 1.
    "btx": Recipe("domains", "free", coverage=False, router_std=0.02),
    # Ablations: the experts without the constraint, the constraint without the experts.
    "free-top-k": Recipe(routing="free"),
    "grouped-copies": Recipe("base"),
    # Controls.
    "shuffled-groups": Recipe(groups="shuffled"),
    "slice-groups": Recipe(groups="slice"),
    "random-experts": Recipe("random"),
}


def find_recipe(name: str) -> Recipe:
    """Return a recipe by its name.

    >>> find_recipe("sparse").experts
    'base'
    """
    if name not in RECIPES:
        raise UnknownNameError("recipe", name, RECIPES)
    return RECIPES[name]


def deal_domains(recipe: Recipe, n_domains: int, granularity: int, seed: int) -> torch.Tensor:
    """Return which domain each expert comes from, (F, G): of slice f in group g.

    Under "shuffled" each slice is dealt by a permutation of its own, so that a group still holds one of each slice.
    """
    plain = torch.arange(n_domains).expand(granularity, -1)
    if recipe.groups != "shuffled":
        return plain
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n_domains, generator=g) for _ in range(granularity)])


def expert_index(recipe: Recipe, n_domains: int, granularity: int, group: int, slice_: int) -> int:
    """Return where the router has the slice of a group: group-major, or slice-major where slices are the groups."""
    return slice_ * n_domains + group if recipe.groups == "slice" else group * granularity + slice_


@torch.no_grad()
def reinitialise(layer: DivMoEFeedForward, share: float, seed: int) -> None:
    """Draw ``share`` of the neurons of each expert anew, in all their rows and columns alike.

    The new weights are normal, with mean and standard deviation of what they replace in each expert's matrix.
    """
    g = torch.Generator().manual_seed(seed)
    e, d, s = layer.down_proj.shape
    n = round(share * s)
    for i in range(e if n else 0):
        chosen = torch.randperm(s, generator=g)[:n]
        parts = layer.up_proj[i].view(1 + layer.gated, s, d)
        for rows in (*(part for part in parts), layer.down_proj[i].T):
            old = rows[chosen].float()
            new = old.mean() + old.std() * torch.randn(n, d, generator=g).to(old.device)
            rows[chosen] = new.to(rows.dtype)
