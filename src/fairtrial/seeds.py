"""One way to seed everything: derive independent streams from a seed and names.

>>> derive(0, "calibration", 3) == derive(0, "calibration", 3)
True
>>> derive(0, "calibration", 3) == derive(0, "evaluation", 3)
False
"""

from __future__ import annotations

import hashlib
import operator
from typing import TYPE_CHECKING

from fairtrial.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive(seed: int, *names: object) -> int:
    """Return a 63-bit seed that depends on ``seed`` and ``names`` and on nothing else (no process state).

    Two different sequences of names give unrelated streams, so a stage may name its draws ("calibration", draw)
    without knowing what other stages drew.

    Raises
    ------
    InputError
        A seed that is no whole number.
    """
    try:
        whole = operator.index(seed)
    except TypeError:
        raise InputError(f"seed={seed!r}: give a whole number") from None
    text = "\x1f".join([str(whole), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *names: object) -> np.random.Generator:
    """Return ``numpy.random.Generator`` seeded by :func:`derive`."""
    import numpy as np

    return np.random.default_rng(derive(seed, *names))


def torch_generator(seed: int, *names: object, device: str | torch.device = "cpu") -> torch.Generator:
    """Return a ``torch.Generator`` on ``device`` seeded by :func:`derive`."""
    import torch

    return torch.Generator(device=device).manual_seed(derive(seed, *names))
