"""The trained twin: the same kind of transformer, with its weights learned from prompts instead of written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.training.incontext_regression.mixture import ManifoldMixture, Prompt
from fairtrial.training.incontext_regression.transformer import LinearAttentionTransformer


def train_twin(
    tasks: ManifoldMixture,
    *,
    steps: int = 2000,
    batch: int = 16,
    lengths: tuple[int, int] = (32, 256),
    width: int = 64,
    heads: int = 4,
    layers: Sequence[int] = (4, 4),
    attention: Literal["linear", "softmax"] = "linear",
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> LinearAttentionTransformer:
    """Train a transformer on fresh prompts of a mixture.

    Parameters
    ----------
    tasks : where prompts come from.
    steps, batch : of AdamW, with a batch of new prompts each.
    lengths : shortest and longest context; every prompt of a batch has a length of its own, so that each prefix of a
        prompt is learned from as often.
    width, heads, layers, attention : of the transformer, as ``LinearAttentionTransformer.untrained`` takes them.
    learning_rate : of AdamW, falling to 0 by a cosine.
    seed : of the weights and the prompts.

    Notes
    -----
    The first half of the steps is a curriculum: queries and contexts of one manifold, then of more. The loss is the
    squared error on the noisy value at the query.

    Raises
    ------
    InputError
        If a number is out of range.
    """
    if steps < 1 or batch < 1 or not 1 <= lengths[0] <= lengths[1] or learning_rate <= 0:
        raise InputError(
            f"steps={steps}, batch={batch}, lengths={lengths}, learning_rate={learning_rate}: out of range"
        )
    model = LinearAttentionTransformer.untrained(
        tasks.ambient, width=width, heads=heads, layers=layers, attention=attention, seed=seed
    )
    rng = generator(seed, "prompts of training")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        # M grows from 1 to all of them over the first half
        among = min(tasks.charts, 1 + 2 * step * tasks.charts // steps)
        prompt = noisy(tasks.sample(batch, lengths[1], seed=rng, among=among), tasks.noise, int(rng.integers(2**31)))
        length = torch.from_numpy(rng.integers(lengths[0], lengths[1] + 1, size=(batch, 1)))
        mask = torch.arange(lengths[1]) < length
        loss = (model(prompt.x, prompt.y, prompt.query, mask) - prompt.target.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def noisy(prompt: Prompt, noise: float, seed: int) -> Prompt:
    """Return the prompt with the noise of an observation on its target."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(prompt.target.shape, generator=random, dtype=prompt.target.dtype)
    return replace(prompt, target=prompt.target + noise * drawn)


def risk(model: Callable[..., torch.Tensor], prompt: Prompt) -> float:
    """Return the mean squared error at the queries of a batch of prompts.

    The gap of an approximate empirical risk minimiser is this, on the prompts it was trained on, less that of the
    constructed network, which its class contains.
    """
    with torch.no_grad():
        return float((model(prompt.x, prompt.y, prompt.query) - prompt.target).square().mean())
