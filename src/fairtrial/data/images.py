"""Readers of the sample images: Fashion-MNIST's garments and Tux Paint's stamps."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from fairtrial.data.samples import sample_path

FASHION_CLASSES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
"""What the labels 0 to 9 of Fashion-MNIST mean."""


def fashion_mnist(split: Literal["train", "test"] = "test") -> tuple[np.ndarray, np.ndarray]:
    """Return Fashion-MNIST's images, (n, 28, 28) uint8 with 0 for the background, and labels, (n,) int64 in 0..9.

    Parameters
    ----------
    split : {"train", "test"}
        60,000 or 10,000 images.

    Raises
    ------
    MissingSampleError
        If the sample ``fashion-mnist`` has not been fetched.
    """
    images = _idx(sample_path("fashion-mnist", f"{split}-images.gz"))
    return images, _idx(sample_path("fashion-mnist", f"{split}-labels.gz")).astype(np.int64)


def stamps() -> pd.DataFrame:
    """Return Tux Paint's captioned stamps, colour pictures of things on a transparent ground.

    Returns
    -------
    DataFrame with columns ``path`` (a PNG file), ``caption`` (its English words, "A blackbird.") and ``folder``
    (its kind: "animals/birds"), in the order of the paths.

    Raises
    ------
    MissingSampleError
        If the sample ``stamps`` has not been fetched.
    """
    pictures, captions = sample_path("stamps", "stamps"), sample_path("stamps", "captions")
    rows = []
    for path in sorted(pictures.rglob("*.png")):
        relative = path.relative_to(pictures)
        words = captions / relative.with_suffix(".txt")
        if words.exists():
            # The first line is the English caption; translations follow as "fr.utf8=...".
            rows.append((path, words.read_text(encoding="utf-8", errors="replace").split("\n")[0].strip(),
                         relative.parent.as_posix()))  # fmt: skip
    return pd.DataFrame(rows, columns=["path", "caption", "folder"])


def _idx(path: Path) -> np.ndarray:
    """Read an IDX file of bytes: two zeros, the type, the number of axes, their lengths, then the values."""
    raw = gzip.decompress(path.read_bytes())
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", count=axes, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
