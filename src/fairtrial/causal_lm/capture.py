"""Walk through a model block by block with the inputs each block really gets.

Newer architectures hand their blocks masks, rotary embeddings and caches that no hand-written loop can foresee.
:func:`propagate` therefore captures them: one pass in which every block but the first lets its input through unchanged
records the arguments of every block, and each block is then replayed with its own. Only the hidden states of the
current block are kept, never those of all blocks. What a block is given beside its hidden states must therefore not
depend on what earlier blocks computed, which holds for every architecture known here.

>>> import torch
>>> from transformers import AutoModelForCausalLM, LlamaConfig
>>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
...                      bos_token_id=0, eos_token_id=1)
>>> model = AutoModelForCausalLM.from_config(config)
>>> for layout, inputs in propagate(model, torch.arange(16).view(2, 8).split(1)):
...     layout.attention.o.weight.zero_()      # the next block sees what the modified block gives
...     print(layout.name, [tuple(hidden.shape) for hidden in inputs.hidden])
tensor(...)
model.layers.0 [(1, 8, 8), (1, 8, 8)]
tensor(...)
model.layers.1 [(1, 8, 8), (1, 8, 8)]
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from fairtrial.causal_lm.layout import BlockLayout, ChainSpec, block_layouts
from fairtrial.errors import InputError

Batch: TypeAlias = torch.Tensor | Mapping[str, Any]
"""Token ids (B, T), or the keyword arguments of the model (``input_ids`` and, with padding, ``attention_mask``)."""

Arguments: TypeAlias = tuple[tuple, dict[str, Any]]
"""The (args, kwargs) of a call without the hidden states."""


@dataclass(eq=False)
class BlockInputs:
    """What one block is given: per batch the hidden states and the other arguments of the model's own call.

    Attributes
    ----------
    block
        The block these are the inputs of.
    hidden
        Per batch (B, T, d), on the device and in the dtype of the model.
    arguments
        Per batch the remaining (args, kwargs) of the block.
    masks
        Per batch the padding mask (B, T), true at real tokens, or ``None`` where there is no padding.
    """

    block: nn.Module
    hidden: list[torch.Tensor]
    arguments: list[Arguments]
    masks: list[torch.Tensor | None]
    _next: list[torch.Tensor] | None = field(default=None, repr=False)

    def run(self, *, keep: bool = False) -> Iterator[torch.Tensor]:
        """Run the block as it is now and yield its output (B, T, d) batch by batch, without autograd.

        ``keep=True`` makes these outputs the inputs of the next block, whatever is done to this one afterwards;
        otherwise :func:`propagate` runs the block once more when it moves on.
        """
        kept = []
        for hidden, (args, kwargs) in zip(self.hidden, self.arguments, strict=True):
            with torch.no_grad():
                output = _first(self.block(hidden, *args, **kwargs))
            if keep:
                kept.append(output)
            yield output
        if keep:
            self._next = kept


def propagate(
    model: nn.Module, batches: Iterable[Batch], spec: ChainSpec | None = None
) -> Iterator[tuple[BlockLayout, BlockInputs]]:
    """Yield every block with its inputs, in order of depth; the caller may modify the block before asking for the next.

    Parameters
    ----------
    model
        A causal language model. It is set to evaluation mode while this runs, then back.
    batches
        The texts; see :data:`Batch`. Caches are off.
    spec
        For an architecture :data:`~fairtrial.causal_lm.layout.SPECS` lacks.

    Yields
    ------
    layout : BlockLayout
    inputs : BlockInputs
        Valid until the next block is asked for.

    Raises
    ------
    InputError
        No batch, or a model that cannot be laid out (see :func:`~fairtrial.causal_lm.layout.block_layouts`).
    """
    layouts = block_layouts(model, spec)
    with evaluation_mode(model):
        hidden, arguments, masks = _capture(model, [layout.block for layout in layouts], batches)
        for depth, layout in enumerate(layouts):
            inputs = BlockInputs(layout.block, hidden, [calls[depth] for calls in arguments], masks)
            yield layout, inputs
            if depth + 1 < len(layouts):
                if inputs._next is None:
                    for _ in inputs.run(keep=True):
                        pass
                hidden = inputs._next or []


class _LastBlockReached(Exception):
    """Ends a forward pass whose remainder (final norm, head) nobody needs."""


def _capture(
    model: nn.Module, blocks: list[nn.Module], batches: Iterable[Batch]
) -> tuple[list[torch.Tensor], list[list[Arguments]], list[torch.Tensor | None]]:
    """Return per batch the first block's hidden states, the arguments of every block, and the padding mask.

    A pass costs one block: the first runs, so that the others, which return its output, return what blocks of this
    model return, a tensor or a tuple.
    """
    hidden: list[torch.Tensor] = []
    arguments: list[list[Arguments]] = []
    masks: list[torch.Tensor | None] = []
    calls: list[Arguments] = []
    first_output: list[Any] = []
    skipped = (
        f"{type(model).__name__} does not run its {len(blocks)} blocks one after the other: blocks that are skipped or "
        "repeated (layer dropout, early exit) cannot be replayed"
    )

    def record(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if block is not blocks[len(calls)]:
            raise InputError(skipped)
        kwargs = dict(kwargs)
        states, *rest = args or (kwargs.pop("hidden_states"),)
        if not calls:
            hidden.append(states)
        calls.append((tuple(rest), kwargs))
        if len(calls) == len(blocks):
            raise _LastBlockReached

    def remember(block: nn.Module, args: tuple, output: Any) -> None:
        first_output[:] = [output]

    hooks = [block.register_forward_pre_hook(record, with_kwargs=True) for block in blocks]
    hooks.append(blocks[0].register_forward_hook(remember))
    try:
        with passing_through(blocks[1:], first_output), torch.no_grad():
            for batch in batches:
                calls.clear()
                ids, kwargs = _model_arguments(model, batch)
                mask = kwargs.get("attention_mask")
                masks.append(None if mask is None or bool(mask.all()) else mask.bool())
                try:
                    model(ids, **kwargs)
                except _LastBlockReached:
                    arguments.append(list(calls))
                else:
                    raise InputError(skipped)
    finally:
        for hook in hooks:
            hook.remove()
    if not hidden:
        raise InputError("there is no batch of text to propagate: give at least one window")
    return hidden, arguments, masks


@contextmanager
def passing_through(blocks: list[nn.Module], like: list[Any]) -> Iterator[None]:
    """Let ``blocks`` return the one remembered output instead of running."""
    own = [block.__dict__.get("forward") for block in blocks]  # set where accelerate wraps a block
    try:
        for block in blocks:
            block.forward = lambda *args, **kwargs: like[0]  # type: ignore[method-assign]
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward  # type: ignore[method-assign]


def _model_arguments(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return (ids, keyword arguments) on the model's device, with caches off where the model has them."""
    kwargs: dict[str, Any] = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    device = next(model.parameters()).device
    kwargs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False
    return kwargs.pop("input_ids"), kwargs


def _first(output: Any) -> torch.Tensor:
    """Return the hidden states of a block's output, which some architectures wrap in a tuple."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off inside, and every module back to what it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
