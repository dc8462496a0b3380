"""Second moments of what each linear of a block is given, in one pass per block.

For a linear y = W x over tokens t, :func:`second_moments` accumulates ``x_norm``_j = sqrt(sum_t x_tj^2) and, on
request, ``hessian`` = sum_t x_t x_t^T (half the Hessian of the squared output error in a row of W), in float32.
Linears that read the same input (q, k and v; gate and up) share one object.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fairtrial.causal_lm.capture import BlockInputs
from fairtrial.causal_lm.layout import BlockLayout, LinearView, MLPLayout
from fairtrial.errors import InputError


@dataclass(eq=False)
class LinearStatistics:
    """Second moments of a linear's inputs.

    Attributes
    ----------
    x_square
        (in,) float32: sum over tokens of the squared input.
    hessian
        (in, in) float32: sum over tokens of x x^T; ``None`` unless asked for.
    n_tokens
        Number of tokens seen; of an expert, those routed to it, possibly 0.
    """

    x_square: torch.Tensor
    hessian: torch.Tensor | None
    n_tokens: int = 0

    @property
    def x_norm(self) -> torch.Tensor:
        """Euclidean norm over tokens of every input channel, (in,) float32."""
        return self.x_square.sqrt()

    def add(self, x: torch.Tensor) -> None:
        """Add the inputs ``x`` (n, in) of n tokens."""
        x = x.float()
        self.x_square += x.square().sum(0)
        if self.hessian is not None:
            self.hessian.addmm_(x.T, x)
        self.n_tokens += len(x)


def second_moments(
    layout: BlockLayout, inputs: BlockInputs, *, hessian: bool = False, keep: bool = False
) -> dict[str, LinearStatistics]:
    """Run a block over its inputs once and return the second moments of every linear's inputs.

    Parameters
    ----------
    layout, inputs
        A pair that :func:`~fairtrial.causal_lm.capture.propagate` yields.
    hessian
        Also accumulate x x^T, (in, in) for each distinct input.
    keep
        Let the next block see what this block gives now, before it is modified: one pass per block instead of two.

    Returns
    -------
    dict of str to LinearStatistics
        By the name of the :class:`~fairtrial.causal_lm.layout.LinearView`, on the device of its weight. Padding is
        left out.

    Raises
    ------
    InputError
        An input that is not finite; the message names the layer and the text (counted from 0 over all batches).

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> from fairtrial.causal_lm.capture import propagate
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> for layout, inputs in propagate(model, [torch.arange(16).view(2, 8)]):
    ...     statistics = second_moments(layout, inputs, hessian=True)
    >>> statistics["mlp.down_proj"].n_tokens, tuple(statistics["mlp.down_proj"].hessian.shape)
    (16, (12, 12))
    >>> statistics["self_attn.q_proj"] is statistics["self_attn.k_proj"]
    True
    """
    statistics: dict[str, LinearStatistics] = {}
    for views in _views_by_input(layout):
        weight = views[0].weight
        shared = LinearStatistics(
            x_square=torch.zeros(views[0].in_features, device=weight.device),
            hessian=torch.zeros(2 * (views[0].in_features,), device=weight.device) if hessian else None,
        )
        statistics |= dict.fromkeys((view.name for view in views), shared)
    place = _Place(layout.name)
    with _collecting(layout, statistics, place):
        outputs = inputs.run(keep=keep)
        for hidden, mask in zip(inputs.hidden, inputs.masks, strict=True):
            place.shape, place.mask = hidden.shape[:2], mask
            next(outputs)
            place.texts_before += len(hidden)
        next(outputs, None)  # lets run() finish
    return statistics


def _views_by_input(layout: BlockLayout) -> Iterator[tuple[LinearView, ...]]:
    """Group the views of a block by the input they share."""
    if (attention := layout.attention) is not None:
        yield attention.q, attention.k, attention.v
        yield (attention.o,)
    for mlp in layout.mlps:
        yield (mlp.up,) if mlp.gate is None else (mlp.gate, mlp.up)
        yield (mlp.down,)


@dataclass
class _Place:
    """Where in the texts the pass is."""

    block: str
    shape: torch.Size = field(default_factory=torch.Size)  # (B, T) of the current batch
    mask: torch.Tensor | None = None  # (B, T)
    texts_before: int = 0

    def flatten(self, name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs (n, in) of the batch's n real tokens and their positions in the flat batch, checked."""
        x = x.reshape(-1, x.shape[-1])  # (B*T, in)
        tokens = torch.arange(len(x), device=x.device)
        if len(x) != self.shape.numel():  # the share of one expert, which of the tokens is not known
            if self.mask is not None:
                raise InputError(f"{self.block}.{name} is given some tokens only: use texts without padding")
            tokens.zero_()  # an error names the batch's first text
        elif self.mask is not None:
            real = self.mask.reshape(-1).to(x.device)
            x, tokens = x[real], tokens[real]
        self.check(name, x, tokens)
        return x, tokens

    def check(self, name: str, x: torch.Tensor, tokens: torch.Tensor) -> None:
        """Refuse inputs that are not finite; ``tokens`` (n,) are the positions of ``x`` (n, in) in the flat batch."""
        if not torch.isfinite(x.sum()):  # one pass without a mask of the size of x; a sum of finite terms may overflow:
            finite = torch.isfinite(x).all(1)
            if not bool(finite.all()):
                text = self.texts_before + int(tokens[~finite][0]) // self.shape[1]
                raise InputError(
                    f"{self.block}.{name}: its input is not finite in text {text}: is the model loaded in a dtype it "
                    "overflows in (float16), or are its weights damaged?"
                )


@contextmanager
def _collecting(layout: BlockLayout, statistics: dict[str, LinearStatistics], place: _Place) -> Iterator[None]:
    """Feed ``statistics`` from every distinct input of the block while the context lasts."""
    hooks = []
    experts: dict[nn.Module, list[MLPLayout]] = {}
    for mlp in layout.mlps:
        if mlp.up.expert is not None:
            experts.setdefault(mlp.up.module, []).append(mlp)
    try:
        for views in _views_by_input(layout):
            if views[0].expert is None:
                hook = _linear_hook(views[0].name, statistics[views[0].name], place)
                hooks.append(views[0].module.register_forward_pre_hook(hook))
        for module, mlps in experts.items():
            hooks.append(module.register_forward_pre_hook(_experts_hook(mlps, statistics, place)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _linear_hook(name: str, statistics: LinearStatistics, place: _Place) -> Any:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        statistics.add(place.flatten(name, args[0])[0])

    return hook


def _experts_hook(mlps: list[MLPLayout], statistics: dict[str, LinearStatistics], place: _Place) -> Any:
    """Collect for stacked experts, whose linears are no modules: compute what each expert's linears are given."""

    def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        hidden, chosen = args[:2]  # (B*T, d), (B*T, experts per token)
        x, tokens = place.flatten(mlps[0].up.name, hidden)
        chosen = chosen[tokens]
        for mlp in mlps:
            routed = (chosen == mlp.up.expert).any(1)
            if not bool(routed.any()):
                continue
            x_e = x[routed]
            statistics[mlp.up.name].add(x_e)
            z = F.linear(x_e, mlp.up.weight)
            z = module.act_fn(z) if mlp.gate is None else module.act_fn(F.linear(x_e, mlp.gate.weight)) * z
            place.check(mlp.down.name, z, tokens[routed])
            statistics[mlp.down.name].add(z)

    return hook
