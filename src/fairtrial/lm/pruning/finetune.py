"""Train a pruned model without losing its zeros: frozen masks for any training loop, low-rank adapters under them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from fairtrial.causal_lm.layout import ChainSpec, block_layouts
from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator


def freeze_masks(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, spec: ChainSpec | None = None
) -> list[RemovableHandle]:
    """Keep the zeros of a pruned model exactly zero in any training loop.

    Gradients are masked as they arrive, the moments an optimizer already holds are masked now, and zeros are written
    again after every step, whatever the optimizer does (decay, momentum, noise).

    Parameters
    ----------
    model
        A pruned causal language model; the zeros of its block matrices are the mask.
    optimizer
        Any optimizer over its parameters.

    Returns
    -------
    list of RemovableHandle
        ``handle.remove()`` of each lifts the masks.

    Raises
    ------
    InputError
        No matrix of the blocks has a zero: prune first.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> from fairtrial.lm.pruning import OneShotPrune
    >>> _ = OneShotPrune("magnitude").prune(model, None, torch.arange(16).view(2, 8))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> handles = freeze_masks(model, optimizer)
    >>> ids = torch.arange(16).view(2, 8)
    >>> _ = model(ids, labels=ids).loss.backward(), optimizer.step()
    >>> (model.model.layers[0].mlp.up_proj.weight == 0).sum().item()      # half of 12 x 8
    48
    """
    masks = {
        p: p.detach() != 0
        for p in dict.fromkeys(view.parameter for block in block_layouts(model, spec) for view in block)
    }
    masks = {parameter: keep for parameter, keep in masks.items() if not keep.all()}
    if not masks:
        raise InputError("no block matrix of this model has a zero: prune it first, then freeze its masks")

    def reassert(*_: object) -> None:
        for parameter, keep in masks.items():
            parameter.detach().mul_(keep)

    for parameter, keep in masks.items():
        for moment in optimizer.state.get(parameter, {}).values():
            if isinstance(moment, Tensor) and moment.shape == keep.shape:
                moment.mul_(keep)
    handles = [parameter.register_hook(_masked(keep)) for parameter, keep in masks.items() if parameter.requires_grad]
    return [*handles, optimizer.register_step_post_hook(reassert)]


def _masked(keep: Tensor):  # type: ignore[no-untyped-def]
    return lambda gradient: gradient * keep


class MaskedLowRank(nn.Module):
    """The parametrisation W -> W + M * (B A) scale, with M = (W != 0): an adapter that cannot fill a pruned weight.

    W is (..., rows, columns) and stays frozen; A is (..., rank, columns), B (..., rows, rank) starts at zero.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        *lead, rows, columns = weight.shape
        a = torch.randn(*lead, rank, columns, generator=generator) / columns**0.5
        self.a = nn.Parameter(a.to(weight))
        self.b = nn.Parameter(weight.new_zeros(*lead, rows, rank))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight, zero where ``weight`` is."""
        return weight + (weight != 0) * (self.b @ self.a) * self.scale


def add_masked_lora(
    model: nn.Module, *, rank: int = 8, alpha: float = 16.0, seed: int = 0, spec: ChainSpec | None = None
) -> list[nn.Parameter]:
    """Put a masked low-rank adapter on every matrix of the decoder blocks, freeze the rest, return what is trainable.

    Parameters
    ----------
    model
        A pruned causal language model.
    rank
        Rank of each adapter.
    alpha
        The adapters are scaled by alpha / rank.
    seed
        Of the initial A; B starts at zero, so the model computes what it did before.

    Returns
    -------
    list of Parameter
        Give these to an optimizer; afterwards :func:`merge_masked_lora`.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> from fairtrial.lm.pruning import OneShotPrune
    >>> _ = OneShotPrune("magnitude").prune(model, None, torch.arange(16).view(2, 8))
    >>> optimizer = torch.optim.AdamW(add_masked_lora(model, rank=2))     # train with it, then:
    >>> merge_masked_lora(model)
    >>> (model.model.layers[0].mlp.up_proj.weight == 0).sum().item()
    48
    """
    if rank < 1:
        raise InputError(f"rank must be positive, got {rank}")
    slots = dict.fromkeys(_slots(model, spec))
    model.requires_grad_(False)
    generator = torch_generator(seed, "masked-lora")
    trainable = []
    for module, name in slots:
        adapter = MaskedLowRank(getattr(module, name), rank, alpha / rank, generator)
        parametrize.register_parametrization(module, name, adapter)
        trainable += [adapter.a, adapter.b]
    return trainable


def merge_masked_lora(model: nn.Module) -> None:
    """Write every adapter of :func:`add_masked_lora` into its weight, in place; zeros stay exactly zero."""
    for module in model.modules():
        for name, parametrizations in list(getattr(module, "parametrizations", {}).items()):
            if any(isinstance(p, MaskedLowRank) for p in parametrizations):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)


def _slots(model: nn.Module, spec: ChainSpec | None) -> Iterator[tuple[nn.Module, str]]:
    for layout in block_layouts(model, spec):
        for view in layout:
            yield view.module, next(n for n, p in view.module.named_parameters() if p is view.parameter)
