"""Routing that gives a token at most one expert of each group.

Of every group the expert of the highest logit stands for the group; of the groups, the K of highest score are taken,
and their weights are the softmax over these K scores. Two experts of one group can never meet in a token.

Free top-K over E experts is the same with E groups of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.options import checked_count, checked_number


@dataclass(frozen=True, eq=False)
class Routing:
    """Where N tokens go, of G groups of F experts.

    Attributes
    ----------
    logits
        (N, G, F) float32: of the router, with the coverage bias.
    bias
        (G, F) float32: the coverage bias in it.
    choice
        (N, G) int64: the expert that stands for each group.
    experts
        (N, K) int64: the experts taken, group * F + expert in the group.
    weights
        (N, K) float32: their shares; a row sums to 1.
    """

    logits: torch.Tensor
    bias: torch.Tensor
    choice: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor

    def within_balance(self, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean over groups of F * sum_f load_f * prob_f, scalar.

        The load of an expert is the share of tokens for which it stands for its group, its probability the mean softmax
        over the group's logits. At uniform load this is 1; at most F, where load and probability sit on one expert.
        ``mask`` (N,) bool says which tokens count.
        """
        n_slices = self.logits.shape[2]
        load = _mean(F.one_hot(self.choice, n_slices).float(), mask)  # (G, F)
        prob = _mean(self.logits.softmax(-1), mask)  # (G, F)
        return n_slices * (load * prob).sum(-1).mean()

    def across_balance(self, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return G * sum_g load_g * prob_g, scalar: how evenly groups are taken; constant (1) where all are."""
        n_groups, n_slices = self.logits.shape[1:]
        taken = F.one_hot(self.experts // n_slices, n_groups).float().mean(1)  # (N, G): 1/K where taken
        score = self.logits.gather(-1, self.choice[..., None]).squeeze(-1)  # (N, G)
        return n_groups * (_mean(taken, mask) * _mean(score.softmax(-1), mask)).sum()

    def z_loss(self, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean squared log-sum-exp of the logits without their coverage bias, scalar."""
        return _mean((self.logits - self.bias).flatten(1).logsumexp(-1).square(), mask)


def _mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the mean over tokens (N, ...), of those that count."""
    if mask is None:
        return values.mean(0)
    share = mask.float() / mask.sum().clamp_min(1)
    return torch.tensordot(share, values, dims=1)


class GroupTopRouter(nn.Module):
    """Route each token to the best expert of each of the K best groups.

    Parameters
    ----------
    hidden_size
        d, the width of what is routed.
    n_groups, n_slices
        G groups of F experts each.
    n_active
        K <= G, the experts a token takes.
    gumbel
        Temperature of the Gumbel noise on the choice within a group, in training only; it falls to 0 with the progress.
    decay
        Share of the training over which the coverage bias falls to 0.
    std
        Standard deviation of the initial weights.
    seed
        Of the initial weights.

    Attributes
    ----------
    weight
        (G * F, d), group-major.
    coverage_bias
        (G * F,) buffer, added to the logits while coverage lasts.
    progress
        Scalar buffer in [0, 1]: the share of the continued training that is done.

    Raises
    ------
    InputError
        Sizes below 1, K > G, a negative temperature or decay outside (0, 1].

    Examples
    --------
    >>> router = GroupTopRouter(8, n_groups=3, n_slices=2, n_active=2)
    >>> routing = router(torch.randn(5, 8))
    >>> routing.experts.shape, routing.weights.sum(-1).detach().round(decimals=4).tolist()
    (torch.Size([5, 2]), [1.0, 1.0, 1.0, 1.0, 1.0])
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        n_groups: int,
        n_slices: int,
        n_active: int,
        gumbel: float = 0.0,
        decay: float = 0.1,
        std: float = 1e-3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "n_groups": n_groups, "n_slices": n_slices, "n_active": n_active}
        for name, size in sizes.items():
            checked_count(size, name)
        if n_active > n_groups:
            raise InputError(
                f"n_active={n_active} experts of {n_groups} groups: a token takes at most one a group, so give "
                f"n_active={n_groups} or less"
            )
        checked_number(gumbel, "gumbel", least=0)
        checked_number(std, "std", least=0)
        checked_number(decay, "decay", above=0, most=1)
        self.n_groups, self.n_slices, self.n_active = n_groups, n_slices, n_active
        self.gumbel, self.decay = gumbel, decay
        self.weight = nn.Parameter(torch.empty(n_groups * n_slices, hidden_size, dtype=torch.float32))
        self.register_buffer("coverage_bias", torch.zeros(n_groups * n_slices, dtype=torch.float32))
        self.register_buffer("progress", torch.zeros((), dtype=torch.float32))
        self.coverage_bias: torch.Tensor
        self.progress: torch.Tensor
        if not self.weight.is_meta:
            with torch.no_grad():
                drawn = torch.randn(
                    self.weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu"
                )
                self.weight.copy_(std * drawn)

    def bias(self) -> torch.Tensor:
        """Return the coverage bias as it stands, (G * F,)."""
        return self.coverage_bias.float() * (1 - self.progress.float() / self.decay).clamp(0, 1)

    def forward(self, x: torch.Tensor) -> Routing:
        """Route tokens (N, d); computed in float32, differentiable in the weights of the experts taken."""
        shape = (-1, self.n_groups, self.n_slices)
        bias = self.bias()
        with torch.autocast(x.device.type, enabled=False):
            logits = (F.linear(x.float(), self.weight.float()) + bias).view(shape)  # (N, G, F)
        noisy = logits.detach()
        if self.training and self.gumbel:
            noise = -torch.empty_like(noisy).exponential_().log()
            noisy = noisy + self.gumbel * (1 - self.progress.float()) * noise
        choice = noisy.argmax(-1)  # (N, G)
        score = logits.gather(-1, choice[..., None]).squeeze(-1)  # (N, G), without noise
        if self.n_active < self.n_groups:
            score, groups = score.topk(self.n_active, dim=-1)  # (N, K)
            experts = groups * self.n_slices + choice.gather(-1, groups)
        else:
            experts = choice + self.n_slices * torch.arange(self.n_groups, device=x.device)
        return Routing(logits, bias.view(shape[1:]), choice, experts, score.softmax(-1))

    def extra_repr(self) -> str:
        """Return the sizes, for print."""
        return f"n_groups={self.n_groups}, n_slices={self.n_slices}, n_active={self.n_active}"
