"""Examples from the .npz files of users, and what trials on images take in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.errors import InputError

if TYPE_CHECKING:
    import numpy as np


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """Return the arrays ``x`` and ``y`` of an .npz file.

    Raises
    ------
    InputError
        If it cannot be read or lacks one of them.
    """
    import numpy as np

    try:
        arrays = np.load(path, allow_pickle=False)
        return {"x": arrays["x"], "y": arrays["y"]}
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: an .npz file with arrays x and y is needed: {error}") from error


def read_labelled(path: str) -> dict[str, np.ndarray]:
    """Return examples ``x`` (n, ...) and class numbers ``y`` (n,) of an .npz file.

    Raises
    ------
    InputError
        As :func:`read_arrays`, or if ``y`` does not hold a whole number from 0 for each row of ``x``.
    """
    import numpy as np

    arrays = read_arrays(path)
    x, y = arrays["x"], arrays["y"]
    if len(x) != len(y) or y.ndim != 1 or not np.issubdtype(y.dtype, np.integer) or y.min() < 0:
        raise InputError(f"{path}: y must hold one whole number from 0 for each of the {len(x)} rows of x")
    return arrays


def check_examples(parameter: str, value: str, read: Callable[[str], Any]) -> None:
    """Refuse a parameter that names neither a file ``read`` takes, nor 'tiny', nor the fetched sample fashion-mnist."""
    if Path(value).exists():
        read(value)
    elif value != "tiny":
        if "/" in value or value.endswith(".npz"):
            raise InputError(f"{parameter}={value}: no such file")
        if value != "fashion-mnist":
            raise InputError(f"{parameter}={value}: 'fashion-mnist' or an .npz file")
        from fairtrial.data.samples import sample_path

        sample_path(value)
