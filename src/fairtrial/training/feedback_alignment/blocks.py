"""Which modules are a network's blocks, and where each of them ends."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from fairtrial.errors import InputError, UnknownNameError

logger = logging.getLogger(__name__)

_FOLLOWS = (  # what may follow a layer and still belongs to its block
    *(getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__ if name != "MultiheadAttention"),
    nn.modules.batchnorm._BatchNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.modules.dropout._DropoutNd,
)


def find_blocks(model: nn.Module) -> list[str]:
    """Return the names of the modules at whose outputs a network can be cut into blocks, in order.

    Every ``nn.Sequential`` and ``nn.ModuleList`` is scored by the number of its children of one type times their share
    of the parameters; containers with the same parent and type of child count as one (the four stages of a ResNet). A
    layer of the best group ends at the last activation, normalisation or dropout behind it. What comes before
    the first block belongs to it, and what comes after the last one is the head; where nothing with parameters follows,
    the last block itself is the head.

    Raises
    ------
    InputError
        If there is no container with two children of one type: name the blocks instead.

    Examples
    --------
    >>> from fairtrial.training.networks import mlp
    >>> find_blocks(mlp([4, 8, 8, 2]))  # Flatten, Linear, Tanh, Linear, Tanh, Linear
    ['2', '4']
    """
    total = sum(p.numel() for p in model.parameters()) or 1
    groups: dict[tuple[str, type], list[tuple[str, nn.Module]]] = {}
    for name, container in model.named_modules():
        if isinstance(container, nn.Sequential | nn.ModuleList):
            for kind in {type(child) for child in container if any(True for _ in child.parameters())}:
                groups.setdefault((name.rpartition(".")[0], kind), []).append((name, container))
    scores = {key: _score(key[1], containers, total) for key, containers in groups.items()}
    best = max(scores, key=scores.__getitem__, default=None)
    if best is None or sum(isinstance(c, best[1]) for _, container in groups[best] for c in container.children()) < 2:
        raise InputError(
            f"{type(model).__name__} has no Sequential or ModuleList of equal blocks: give blocks= their names"
        )
    ends = [end for name, container in groups[best] for end in _ends(name, container, best[1])]
    last = max(i for i, (name, _) in enumerate(model.named_modules()) if name == ends[-1])
    if not any(m._parameters for i, (_, m) in enumerate(model.named_modules())
               if i > last and not _inside(model, ends[-1], m)):  # fmt: skip
        ends = ends[:-1]
    logger.info("blocks of %s: %s", type(model).__name__, ", ".join(ends))
    return ends


def check_blocks(model: nn.Module, blocks: str | Iterable[str]) -> list[str]:
    """Return the names of the blocks: those found for 'auto', otherwise those given.

    Raises
    ------
    InputError
        If the names are not a list of names, or a name comes twice or lies inside another.
    UnknownNameError
        If the model has no such module; the nearest name is suggested.
    """
    if isinstance(blocks, str) and blocks == "auto":
        return find_blocks(model)
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise InputError(f"blocks={blocks!r}: 'auto' or a list of module names")
    names = list(blocks)
    known = dict(model.named_modules())
    known.pop("", None)
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"blocks holds {name!r}: module names are needed")
        if name not in known:
            raise UnknownNameError("module", name, known)
    twice = [name for name, count in Counter(names).items() if count > 1]
    inner = [a for a in names for b in names if a.startswith(b + ".")]
    if twice or inner:
        raise InputError(f"block {(twice + inner)[0]!r} is named twice or lies inside another: name each part once")
    return names


def refuse_what_skips_hooks(model: nn.Module) -> None:
    """Raise InputError for a compiled model and for activation checkpointing, where hooks do not see every forward."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: an nn.Module is needed")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise InputError(f"{name or 'the model'} is compiled, which skips hooks: attach first, then compile blocks")
        if getattr(module, "gradient_checkpointing", False) is True:
            raise InputError(
                f"{name or 'the model'} recomputes its activations: switch gradient (activation) checkpointing off; "
                "cut blocks free theirs one by one anyway"
            )


def _score(kind: type, containers: Sequence[tuple[str, nn.Module]], total: int) -> float:
    children: list[nn.Module] = [c for _, container in containers for c in container.children() if type(c) is kind]
    return len(children) * sum(p.numel() for child in children for p in child.parameters()) / total


def _ends(name: str, container: nn.Module, kind: type) -> list[str]:
    """Return where the blocks of a container end: each child of the type, or the last of what follows it."""
    children = list(container.named_children())
    ends: list[str] = []
    open_block = False
    for child_name, child in children:
        full = f"{name}.{child_name}" if name else child_name
        if type(child) is kind:
            ends.append(full)
            open_block = True
        elif open_block and isinstance(container, nn.Sequential) and isinstance(child, _FOLLOWS):
            ends[-1] = full
        else:
            open_block = False
    return ends


def _inside(model: nn.Module, name: str, module: nn.Module) -> bool:
    return any(m is module for m in model.get_submodule(name).modules())
