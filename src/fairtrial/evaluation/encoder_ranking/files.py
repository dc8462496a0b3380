"""Reading features from files: .npy, .npz and .safetensors, and the tables beside them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fairtrial.errors import InputError

Array = np.ndarray
SUFFIXES = (".npy", ".npz", ".safetensors")


def read_features(paths: Iterable[str | Path]) -> dict[str, Array]:
    """Return the arrays of feature files by name, .npy as memory maps.

    An encoder is called by its file's stem; where a file holds several arrays, by stem and key, ``pool/clip``.

    Raises
    ------
    InputError
        A file that is not there, cannot be read as what its suffix says, or whose encoder's name is taken already.
    """
    found: dict[str, Array] = {}
    for path in map(Path, paths):
        arrays = _arrays(path)
        for key, values in arrays.items():
            name = path.stem if len(arrays) == 1 else f"{path.stem}/{key}"
            if name in found:
                raise InputError(f"{path}: a file before it is called {name} too: rename one")
            found[name] = values
    return found


def _arrays(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        if path.suffix == ".npy":
            return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False)}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        if path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            return load_file(path)
    except Exception as error:
        raise InputError(f"{path} cannot be read as {path.suffix}: {error}") from error
    raise InputError(f"{path}: features are read from {', '.join(SUFFIXES)}")


def read_vector(path: Path) -> Array:
    """Return the one array of a file: labels or rows (n,), none of them missing."""
    arrays = _arrays(path)
    if len(arrays) != 1:
        raise InputError(f"{path} has {len(arrays)} arrays: labels are one")
    values = next(iter(arrays.values()))
    if values.ndim != 1 or not len(values):
        raise InputError(f"{path} has shape {values.shape}: a vector of labels (n,) is needed")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise InputError(
            f"{path}: label {int(np.argmin(np.isfinite(values)))} is missing: give --labelled rows instead"
        )
    return values


def read_families(path: Path) -> dict[str, str]:
    """Return the family of each encoder from a CSV file with the columns encoder and family."""
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            table = csv.DictReader(stream)
            if not {"encoder", "family"} <= set(table.fieldnames or ()):
                raise InputError(f"{path}: its first line must name the columns encoder and family")
            rows = [(row["encoder"], row["family"]) for row in table]
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8: {error}") from None
    for number, (encoder, family) in enumerate(rows, start=2):
        if not encoder or not family:
            raise InputError(f"{path}, line {number}: an encoder and its family are needed")
    if len(dict(rows)) < len(rows):
        raise InputError(f"{path}: an encoder occurs twice")
    return dict(rows)
