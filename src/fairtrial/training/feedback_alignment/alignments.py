"""How close direct feedback comes to what backpropagation would have sent, block by block."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.seeds import derive
from fairtrial.training.feedback_alignment.graph import Cut, check_graph, first_tensor, no_trace

if TYPE_CHECKING:
    from fairtrial.training.feedback_alignment.direct import DirectFeedback

NO_PAIR = torch.zeros(1), torch.zeros(1)  # of a block without parameters: its cosine is 0


@dataclass(frozen=True)
class BlockAlignment:
    """Direct feedback to one block against backpropagation's.

    ``cosine`` between the two at the block's output, mean over examples; ``norm_ratio`` of direct to true feedback over
    the batch; ``gradient_cosine`` between the gradients of the block's parameters that they lead to.
    """

    cosine: float
    norm_ratio: float
    gradient_cosine: float


def block_feedback(
    model: nn.Module,
    blocks: Sequence[str],
    x: Any,
    y: Tensor,
    *,
    logits: Callable[[Any], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> tuple[list[Tensor], list[Tensor | None], float]:
    """Return the derivatives of the loss by the blocks' outputs and by the model's parameters, and the seconds taken.

    Parameters
    ----------
    model : nn.Module
        Run as it is, by autograd as its layers define it.
    blocks : names of modules whose outputs to look at, in the order of their calls.
    x, y : the model's input (a mapping holds keyword arguments) and the labels.
    logits : finds the logits in the model's output.
    loss : callable (logits, y) -> Tensor ()

    Returns
    -------
    One tensor for each call of a block, one (or None) for each of ``model.parameters()``, and seconds.
    """
    outputs: list[Tensor] = []

    def note(name: str, _: nn.Module, __: Any, output: Any) -> None:
        outputs.append(first_tensor(name, output))

    names = dict.fromkeys(blocks)
    handles = [model.get_submodule(name).register_forward_hook(partial(note, name)) for name in names]
    try:
        value = loss(logits(run(model, x)), y)
    finally:
        for handle in handles:
            handle.remove()
    parameters = list(model.parameters())
    wanted = [t for t in (*outputs, *parameters) if t.requires_grad]
    began = time.perf_counter()
    found = dict(zip(map(id, wanted), torch.autograd.grad(value, wanted, allow_unused=True), strict=True))
    if value.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    deltas = [found.get(id(h)) for h in outputs]
    return (
        [torch.zeros_like(h) if d is None else d for h, d in zip(outputs, deltas, strict=True)],
        [found.get(id(p)) for p in parameters],
        seconds,
    )


def alignment(
    feedback: DirectFeedback, x: Any, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, BlockAlignment]:
    """Return the alignment of every block on one batch: one ordinary pass, and one cut pass with the same draws."""
    if not feedback._handles:
        raise InputError("alignment compares blocks of an attached model: there are none")
    model, seed = feedback.model, derive(feedback.seed, "alignment")
    with torch.enable_grad():
        with feedback.switched_off(), no_trace(model, seed):
            true, gradients, feedback._backpropagation = block_feedback(
                model, feedback._modules, x, y, logits=feedback.logits, loss=loss
            )
        with no_trace(model, seed):
            cuts, sent = _sent(feedback, x, y, loss)
            direct = [_gradients(cut, delta) for cut, delta in zip(cuts, sent, strict=True)]
    of = dict(zip(map(id, model.parameters()), gradients, strict=True))
    told = {}
    for cut, delta, bp, own in zip(cuts, sent, true, direct, strict=True):
        pairs = [(d, of[i]) for i, d in own.items() if d is not None and of.get(i) is not None]
        a, b = (torch.cat([t.flatten() for t in side]) for side in zip(*pairs, strict=True)) if pairs else NO_PAIR
        told[cut.name] = BlockAlignment(
            cosine=float(F.cosine_similarity(delta.flatten(1), bp.flatten(1), eps=1e-30).mean()),
            norm_ratio=float(delta.norm() / bp.norm().clamp_min(1e-30)),
            gradient_cosine=float(F.cosine_similarity(a, b, dim=0, eps=1e-30)),
        )
    return told


def _sent(
    feedback: DirectFeedback, x: Any, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[list[Cut], list[Tensor]]:
    """Return the cuts of one pass, with their parameters, and the direct feedback to each."""
    probe, feedback._probe = feedback._probe, True
    try:
        logits = feedback.logits(run(feedback.model, x))
    finally:
        feedback._probe = probe
    cuts = feedback._take(logits)
    value = loss(logits, y)
    check_graph(feedback.model, cuts, logits, value)
    if not feedback.surrogates:
        feedback._build(cuts, logits)
    error, labels = feedback._error_of(value, logits), feedback._checked_labels(y, logits)
    return cuts, [
        feedback._feedback(feedback.surrogates[cut.name], cut.root.detach(), error, labels, keep=False)[0]
        for cut in cuts
    ]


def _gradients(cut: Cut, delta: Tensor) -> dict[int, Tensor | None]:
    """Return the gradients of a block's parameters, by their ids, that the feedback leads to."""
    if not cut.parameters:
        return {}
    found = torch.autograd.grad(cut.root, cut.parameters, delta, allow_unused=True)
    return dict(zip(map(id, cut.parameters), found, strict=True))


def run(model: nn.Module, x: Any) -> Any:
    """Return the model's output for ``x``, keyword arguments where it is a mapping."""
    return model(**x) if isinstance(x, Mapping) else model(x)
