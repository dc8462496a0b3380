"""Cutting a network's autograd graph at its blocks, and checking that the pieces hang together as they should."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairtrial.errors import InputError


@dataclass
class Cut:
    """The output of one block in one forward pass.

    ``root`` ends the block's graph; ``passed`` is what the rest of the network got in its place, at version
    ``version``; ``leaf`` takes part in the graph behind the cut, in passes whose graph is checked.
    """

    name: str
    root: Tensor
    passed: Tensor
    version: int
    leaf: Tensor | None = None
    parameters: list[Tensor] = field(default_factory=list)

    def release(self) -> None:
        """Let the tensors go, and with them what is left of the graph."""
        self.root = self.passed = torch.empty(0)
        self.leaf = None


def first_tensor(name: str, output: Any) -> Tensor:
    """Return the hidden states in a block's output: itself, or the first of a tuple or of an ordered mapping."""
    first = output
    if isinstance(output, Mapping) and output:
        first = next(iter(output.values()))
    elif isinstance(output, tuple) and output:
        first = output[0]
    if not isinstance(first, Tensor):
        raise InputError(
            f"block {name!r} returns {type(output).__name__}, not a tensor or a tuple that begins with one: "
            "name another module"
        )
    return first


def with_first(output: Any, tensor: Tensor) -> Any:
    """Return a block's output with ``tensor`` in place of its hidden states."""
    if isinstance(output, Tensor):
        return tensor
    if isinstance(output, tuple):
        made = (tensor, *output[1:])
        return type(output)(*made) if hasattr(output, "_fields") else made
    changed = copy.copy(output)
    changed[next(iter(output))] = tensor
    return changed


def cut_output(name: str, output: Any, *, probe: bool) -> tuple[Cut, Any]:
    """Return the cut of a block's output, and what to pass on.

    ``probe`` puts a leaf that requires a gradient behind the cut, so that the graph shows where the output is used.
    """
    root = first_tensor(name, output)
    leaf = None
    passed = root.detach()
    if probe and root.is_floating_point():
        leaf = passed.requires_grad_()
        passed = leaf.clone()  # so that an in-place operation meets the check below and not a leaf
    return Cut(name, root, passed, passed._version, leaf), with_first(output, passed)


def changed_in_place(cuts: Iterable[Cut]) -> None:
    """Raise InputError if a block's output was overwritten after the cut."""
    for cut in cuts:
        if cut.passed._version != cut.version:
            raise InputError(
                f"the output of block {cut.name!r} is changed in place by what follows (a ReLU with inplace=True?): "
                "set inplace=False there, or cut after it"
            )


def check_graph(model: nn.Module, cuts: Sequence[Cut], logits: Tensor, loss: Tensor | None) -> None:
    """Check the graphs of a probed pass, and note each block's parameters in its cut.

    Raises
    ------
    InputError
        If the logits have no graph; a block cannot be trained; the graph of a block, or the head's, passes by a cut; a
        block's output does not reach the logits; or the loss depends on hidden states other than through the logits.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    if not logits.requires_grad:
        raise InputError("the logits require no gradient: run the forward pass with gradients, and train something")
    leaves = {id(cut.leaf): cut.name for cut in cuts if cut.leaf is not None}
    behind = {cut.passed.grad_fn for cut in cuts}  # any number of pieces may begin at a cut
    owner: dict[Any, str] = {}
    reached: dict[str, set[str]] = {}
    for name, tensor in [("the head", logits), *((cut.name, cut.root) for cut in reversed(cuts))]:
        nodes, variables = walk(tensor)
        for node in nodes:
            if node not in behind and owner.setdefault(node, name) != name:
                parameter = next((names[id(v)] for v in walk_node(node)[1] if id(v) in names), None)
                raise InputError(
                    f"{_spoken(owner[node])} uses {_spoken(name)} by a way around the cut"
                    + (f" (parameter {parameter!r})" if parameter else "")
                    + ": name blocks whose output is all that goes on"
                )
        reached[name] = {leaves[id(v)] for v in variables if id(v) in leaves}
        for cut in cuts:
            if cut.name == name:
                cut.parameters = [v for v in variables if id(v) in names]
    connected = set(reached["the head"])
    for cut in reversed(cuts):
        trainable = any(p.requires_grad for p in _module(model, cut.name).parameters())
        if trainable and not cut.root.requires_grad:
            raise InputError(
                f"the output of block {cut.name!r} has no graph although it has parameters to train: it ran without "
                "gradients, as under reentrant activation checkpointing (use_reentrant=False is fine)"
            )
        if cut.name not in connected:
            raise InputError(f"the output of block {cut.name!r} does not reach the logits: leave it out of blocks=")
        connected |= reached[cut.name]
    if loss is not None:
        _check_loss(loss, logits, owner, leaves)


def walk(tensor: Tensor, *, stop: Tensor | None = None) -> tuple[list[Any], list[Tensor]]:
    """Return the inner nodes of a tensor's graph and the variables at its ends, in order; not beyond ``stop``."""
    if tensor.grad_fn is None:
        return [], [tensor] if tensor.requires_grad else []
    return walk_node(tensor.grad_fn, stop=stop)


def walk_node(start: Any, *, stop: Tensor | None = None) -> tuple[list[Any], list[Tensor]]:
    """As :func:`walk`, from a node."""
    end = None if stop is None else stop.grad_fn
    nodes: dict[Any, None] = {}
    variables: dict[int, Tensor] = {}
    stack = [start]
    while stack:
        node = stack.pop()
        if node is None or node in nodes or node is end:
            continue
        if hasattr(node, "variable"):
            variables.setdefault(id(node.variable), node.variable)
            continue
        nodes[node] = None
        stack.extend(parent for parent, _ in node.next_functions)
    return list(nodes), list(variables.values())


def _check_loss(loss: Tensor, logits: Tensor, owner: Mapping[Any, str], leaves: Mapping[int, str]) -> None:
    """Refuse a loss that meets the network's graphs elsewhere than at the logits."""
    if logits.grad_fn is not None and logits.grad_fn not in walk(loss)[0]:
        raise InputError("the loss does not depend on these logits: pass the logits it was computed from")
    nodes, variables = walk(loss, stop=logits)
    hidden = {owner[node] for node in nodes if node in owner} | {leaves[id(v)] for v in variables if id(v) in leaves}
    if hidden:
        raise InputError(
            f"the loss uses hidden states of {_spoken(min(hidden))}, which no output error can stand for: "
            "keep losses on logits and on parameters"
        )


def _spoken(name: str) -> str:
    return name if name == "the head" else f"block {name!r}"


def _module(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.partition("#")[0])


@contextmanager
def no_trace(model: nn.Module, seed: int) -> Iterator[None]:
    """Put buffers and the global random state back after forward passes that draw from ``seed``."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
