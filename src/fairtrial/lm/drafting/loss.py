"""D-PACE: cross-entropy weighted by what each position of a block contributes to the expected accepted length.

Position j is accepted if the drafted tokens 1..j all are what the target emits, so E[L] = sum_m prod_{i<=m} q_i with
q_i the draft's probability of the target's token, and dE[L] / d log q_j = sum_{m>=j} prod_{i<=m} q_i = w_j: the exact
gradient of the expected length is that of a cross-entropy with weights w.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.options import checked_number

Kind = Literal["dpace", "uniform", "exponential", "geometric"]
Component = Literal["full", "reach", "continuation"]
Normalization = Literal["weights", "count", "block", "none"]
Acceptance = Literal["token", "overlap"]

OUTSIDE = -1
"""The target id of a token that is not in the drafter's vocabulary: certainly rejected, never trained on."""


def position_weights(
    confidence: torch.Tensor,
    kind: Kind = "dpace",
    *,
    alpha: float = 0.5,
    gamma: float | None = None,
    component: Component = "full",
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the training weight of each position, (N, B) float32, without gradient.

    Parameters
    ----------
    confidence
        (N, B), the draft's probability of the token that the target emits, in [0, 1].
    kind
        "dpace"; "uniform": 1; "exponential": exp(-(j - 1) / gamma), of DFlash; "geometric": gamma^(j - 1), of Medusa.
    alpha
        Smoothing of "dpace" in [0, 1]: confidences count as (1 - alpha) q + alpha, without which a fresh drafter has
        weight at the first position only. 0 gives the exact gradient of the expected length.
    gamma
        Of "exponential" (default B / 2, within 4 and 7) and "geometric" (default 0.8).
    component
        Of "dpace": w = P V, the reach P_j = prod_{i<=j} q_i times the continuation V_j = 1 + q_{j+1} V_{j+1}; for
        ablation "reach" or "continuation" alone.
    mask
        (N, B) bool, true where a block has a token, without holes; ``None`` = everywhere. Other positions neither cut
        the product nor have a weight.

    Raises
    ------
    InputError
        Shapes that disagree, a mask with a hole, alpha outside [0, 1], a gamma that is not positive.

    Examples
    --------
    >>> position_weights(torch.tensor([[0.5, 0.5, 0.5]]), alpha=0)
    tensor([[0.8750, 0.3750, 0.1250]])
    """
    if kind not in get_args(Kind):
        raise UnknownNameError("kind", kind, get_args(Kind))
    if component not in get_args(Component):
        raise UnknownNameError("component", component, get_args(Component))
    checked_number(alpha, "alpha", least=0, most=1)
    if gamma is not None:
        checked_number(gamma, "gamma", above=0)
    q = checked_confidence(confidence).detach().float()
    there = checked_mask(mask, q)
    n = q.shape[1]
    if kind != "dpace":
        steps = torch.arange(n, device=q.device, dtype=torch.float32)
        decay = {
            "uniform": torch.ones_like(steps),
            "exponential": torch.exp(-steps / (gamma or min(7.0, max(4.0, n / 2)))),
            "geometric": (gamma or 0.8) ** steps,
        }[kind]
        return decay * there
    smooth = torch.where(there, (1 - alpha) * q + alpha, 1.0)
    reach = smooth.cumprod(1) * there
    if component == "reach":
        return reach
    if component == "full":
        return reach.flip(1).cumsum(1).flip(1) * there
    # V_j = sum_{m>=j} prod_{j<i<=m} q_i by its recurrence: dividing w by P would lose what has underflowed.
    value = torch.zeros_like(q[:, 0])
    columns = []
    for j in range(n - 1, -1, -1):
        following = smooth[:, j + 1] * there[:, j + 1] if j + 1 < n else torch.zeros_like(value)
        value = 1 + following * value
        columns.append(value)
    return torch.stack(columns[::-1], 1) * there


def expected_length(confidence: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the expected accepted length of each block, (N,), from confidences (N, B); differentiable.

    >>> expected_length(torch.tensor([[0.5, 0.5, 0.5]]))
    tensor([0.8750])
    """
    there = checked_mask(mask, checked_confidence(confidence))
    return (torch.where(there, confidence, 1.0).cumprod(1) * there).sum(1)


def checked_confidence(q: torch.Tensor) -> torch.Tensor:
    """Return confidences (N, B); refuse another shape, and what cannot be probabilities, such as their logs."""
    if q.ndim != 2:
        raise InputError(f"confidence has shape {tuple(q.shape)}: give (blocks, positions)")
    if bool(((q < 0) | (q > 1 + 1e-3)).any()):  # a sum of probabilities may round to above 1; nan shows itself
        raise InputError(f"confidence reaches from {float(q.min()):g} to {float(q.max()):g}: give probabilities")
    return q


def checked_mask(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return the mask as bool, (N, B); refuse another shape and holes."""
    if mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    if mask.shape != like.shape:
        raise InputError(f"mask has shape {tuple(mask.shape)}, the blocks {tuple(like.shape)}")
    there = mask.bool()
    holes = (there[:, 1:] & ~there[:, :-1]).any(1)
    if bool(holes.any()):
        raise InputError(f"mask of block {int(holes.nonzero()[0])} has a hole: a token after none")
    return there


@dataclass(frozen=True, eq=False)
class Last:
    """What the loss saw last: ``weights`` (N, B), ``confidence`` (N, B), ``expected_length``, the mean over blocks."""

    weights: torch.Tensor
    confidence: torch.Tensor
    mask: torch.Tensor

    @property
    def expected_length(self) -> float:
        """Mean expected accepted length, from the raw confidences."""
        return float(expected_length(self.confidence, self.mask).mean())


class DPACELoss(nn.Module):
    """Position-weighted cross-entropy of drafted blocks; the default weighting is D-PACE.

    Parameters
    ----------
    alpha, kind, gamma, component
        See :func:`position_weights`.
    normalize
        "weights" divides by the sum of all weights, so that the scale depends neither on alpha nor block size nor
        progress; "count" by the number of positions; "block" makes a weighted mean within blocks, then the mean; "none"
        sums.
    acceptance
        "token": q_j is the probability of the target's token. "overlap": with target probabilities, q_j is the chance
        that speculative sampling accepts, sum_x min(p_j(x), q_j(x)), and the term of a position KL(p_j || q_j).

    Attributes
    ----------
    last : :class:`Last`, of the latest call.

    Examples
    --------
    >>> logits = torch.randn(4, 8, 50, requires_grad=True)
    >>> loss = DPACELoss()
    >>> loss(logits, torch.randint(50, (4, 8))).backward()
    >>> loss.last.weights.shape
    torch.Size([4, 8])
    >>> loss
    DPACELoss(kind='dpace', alpha=0.5, component='full', normalize='weights', acceptance='token')
    """

    def __init__(
        self,
        alpha: float = 0.5,
        *,
        kind: Kind = "dpace",
        gamma: float | None = None,
        component: Component = "full",
        normalize: Normalization = "weights",
        acceptance: Acceptance = "token",
    ) -> None:
        super().__init__()
        if normalize not in get_args(Normalization):
            raise UnknownNameError("normalize", normalize, get_args(Normalization))
        if acceptance not in get_args(Acceptance):
            raise UnknownNameError("acceptance", acceptance, get_args(Acceptance))
        self.alpha, self.kind, self.gamma, self.component = alpha, kind, gamma, component
        self.normalize, self.acceptance = normalize, acceptance
        self.last: Last | None = None
        position_weights(torch.zeros(1, 1), kind, alpha=alpha, gamma=gamma, component=component)  # refuses bad ones

    def extra_repr(self) -> str:
        """Return what is chosen."""
        if self.kind == "dpace":
            chosen = f"kind='dpace', alpha={self.alpha}, component={self.component!r}"
        else:
            chosen = f"kind={self.kind!r}" + ("" if self.kind == "uniform" else f", gamma={self.gamma or 'default'}")
        return f"{chosen}, normalize={self.normalize!r}, acceptance={self.acceptance!r}"

    def weights(self, confidence: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the weights (N, B) of confidences; override for weightings of your own."""
        return position_weights(
            confidence, self.kind, alpha=self.alpha, gamma=self.gamma, component=self.component, mask=mask
        )

    def forward(
        self,
        draft_logits: torch.Tensor,
        target_ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        target_probs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the loss, a scalar.

        Parameters
        ----------
        draft_logits
            (N, B, V).
        target_ids
            (N, B) int64, what the target emits; :data:`OUTSIDE` (-1) where that is not in the drafter's vocabulary,
            which certainly is rejected: nothing behind it counts.
        mask
            (N, B) bool, see :func:`position_weights`.
        target_probs
            (N, B, V), for ``acceptance="overlap"``.
        """
        if draft_logits.ndim != 3 or draft_logits.shape[:2] != target_ids.shape:
            raise InputError(
                f"draft_logits {tuple(draft_logits.shape)} and target_ids {tuple(target_ids.shape)} do not fit: give "
                "(N, B, V) and (N, B)"
            )
        there = checked_mask(mask, target_ids)
        wrong = there & ((target_ids < OUTSIDE) | (target_ids >= draft_logits.shape[2]))
        if target_ids.is_floating_point() or bool(wrong.any()):
            told = f"are {target_ids.dtype}" if target_ids.is_floating_point() else f"have {int(target_ids[wrong][0])}"
            raise InputError(
                f"target_ids {told}: give whole numbers from 0 to {draft_logits.shape[2] - 1}, {OUTSIDE} outside the "
                "vocabulary; places that do not count go into the mask"
            )
        inside = there & (target_ids >= 0)
        if self.acceptance == "overlap":
            if target_probs is None or target_probs.shape != draft_logits.shape:
                raise InputError('acceptance="overlap" needs target_probs in the shape of draft_logits')
            log_q = draft_logits.float().log_softmax(-1)
            p = target_probs.float()
            if bool((there & ((p.amin(-1) < 0) | (p.sum(-1) > 1.01))).any()):
                raise InputError("target_probs are below 0 or sum to above 1: give probabilities, not logits")
            term = (torch.special.xlogy(p, p) - p * log_q).sum(-1)  # KL(p || q)
            confidence = torch.minimum(p, log_q.detach().exp()).sum(-1)
        else:
            wanted = torch.where(inside, target_ids, 0).long()
            term = F.cross_entropy(draft_logits.flatten(0, 1).float(), wanted.flatten(), reduction="none")
            term = term.view(target_ids.shape)
            confidence = torch.exp(-term.detach())
        confidence = confidence * (inside | ~there)
        # Beyond a token that is certainly rejected, nothing can be accepted.
        weights = self.weights(confidence, reachable(inside, there)) * inside
        self.last = Last(weights, confidence, there)
        term = torch.where(inside, term, 0.0)
        if self.normalize == "block":
            per_block = (weights * term).sum(1) / weights.sum(1).clamp_min(torch.finfo(torch.float32).tiny)
            return per_block.mean()
        total = (weights * term).sum()
        if self.normalize == "none":
            return total
        divisor = weights.sum() if self.normalize == "weights" else inside.sum()
        return total / divisor.clamp_min(torch.finfo(torch.float32).tiny if self.normalize == "weights" else 1)


def reachable(inside: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return which positions come before any token outside the vocabulary, (N, B) bool."""
    return (inside | ~there).long().cumprod(1).bool() & there


class ShuffledLoss(DPACELoss):
    """A control: the weights of each block in a random order of its positions."""

    def __init__(self, *args: float, seed: int = 0, **how: str) -> None:
        super().__init__(*args, **how)  # type: ignore[arg-type]
        self.generator = torch.Generator().manual_seed(seed)

    def weights(self, confidence: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return permuted weights (N, B), those of masked positions in their place."""
        weights = super().weights(confidence, mask)
        keys = torch.rand(weights.shape, generator=self.generator).to(weights.device)
        keys = torch.where(mask, keys, math.inf)
        order = keys.argsort(1)  # the valid positions first, in a random order
        return weights.gather(1, order)
