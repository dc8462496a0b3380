"""Readers of the sample images: Fashion-MNIST's garments and Tux Paint's stamps."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from fairtrial.data.samples import sample_path
from fairtrial.errors import InputError
from fairtrial.seeds import generator

if TYPE_CHECKING:
    import torch

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


def garments(
    n: int, *, split: Literal["train", "test"] = "train", size: int = 28, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``n`` images of Fashion-MNIST for training, as many of each class as can be.

    Parameters
    ----------
    n : int
        Images, at most the split's.
    split : {"train", "test"}
    size : {28, 14, 7}
        Pixels a side; smaller images are block means.
    seed : int
        Chooses and orders the images.

    Returns
    -------
    Images (n, 1, size, size) float32 with the mean 0 and the standard deviation 1 of all training images, and labels
    (n,) int64.

    Raises
    ------
    InputError
        If there are fewer images, or the size does not divide 28.
    MissingSampleError
        If the sample ``fashion-mnist`` has not been fetched.
    """
    import torch

    images, labels = fashion_mnist(split)
    if not 0 < n <= len(images) or size not in (28, 14, 7):
        raise InputError(f"n={n}, size={size}: from 1 to {len(images)} images of 28, 14 or 7 pixels a side")
    rng = generator(seed, "garments", split)
    shuffled = rng.permutation(len(labels))
    # The first of every class, then the second of every class, ...
    order = np.empty(len(labels), dtype=np.int64)
    for c in range(len(FASHION_CLASSES)):
        of_class = np.flatnonzero(labels[shuffled] == c)
        order[of_class] = np.arange(len(of_class)) * len(FASHION_CLASSES) + c
    chosen = rng.permutation(shuffled[np.argsort(order)][:n])
    k = 28 // size
    blocks = images[chosen].reshape(n, size, k, size, k).mean((2, 4), dtype=np.float32)
    # 72.94 and 90.02 of 255: the mean and standard deviation of the training images' pixels.
    scaled = torch.from_numpy((blocks - np.float32(72.9403522)) / np.float32(90.0211830))
    return scaled[:, None], torch.from_numpy(labels[chosen])


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
