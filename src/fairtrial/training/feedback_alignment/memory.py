"""The bytes a step holds for its backward pass, counted on any device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairtrial.errors import InputError


def held_bytes(step: Callable[[], Any], *, keep: tuple[Tensor, ...] = ()) -> int:
    """Return the most bytes of tensors that autograd held at once during ``step()``.

    Each storage counts once however often it is saved, until the last graph that saved it is freed.

    Parameters
    ----------
    step : callable
        A forward and backward pass.
    keep : tensors that are there anyway, parameters and inputs, and do not count.

    Examples
    --------
    >>> w = torch.ones(1000, requires_grad=True)
    >>> held_bytes(lambda: (w * w).sin().sum().backward(), keep=(w,))
    4000
    """
    if not callable(step):
        raise InputError(f"step is {type(step).__name__}: a callable that runs one step is needed")
    apart = {t.untyped_storage().data_ptr() for t in keep}
    uses: Counter[int] = Counter()
    now = most = 0

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def drop(pointer: int, size: int) -> None:
        nonlocal now
        uses[pointer] -= 1
        if not uses[pointer]:
            now -= size

    def pack(tensor: Tensor) -> Held:
        nonlocal now, most
        held = Held(tensor)
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer not in apart:
            if not uses[pointer]:
                now += size
            uses[pointer] += 1
            most = max(most, now)
            weakref.finalize(held, drop, pointer, size)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        step()
    return most
