"""Encoders that need no download and no training: what a pool of pretrained ones is mixed with.

A pool of one architecture cannot show what goes wrong across architectures, and few pretrained encoders install with a
package. These are classical and random ones of very different width and quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from fairtrial.errors import MissingExtraError
from fairtrial.evaluation.encoder_ranking.extraction import extract
from fairtrial.evaluation.encoder_ranking.subspace import Features
from fairtrial.seeds import derive, generator, torch_generator

Array = np.ndarray
SIDE = 64  # pixels of an image that a network sees


class Encoder(NamedTuple):
    """An encoder of a pool: its features (n, d), its family, how many numbers were learned or drawn for it."""

    features: Array
    family: str
    parameters: int


def principal_components(values: ArrayLike, width: int) -> Array:
    """Return the scores of ``values`` (n, d) on their first ``width`` principal components that vary, (n, <= width).

    >>> principal_components(np.random.default_rng(0).normal(size=(50, 6)), 4).shape
    (50, 4)
    """
    vectors, values = Features(values).components
    return vectors[:, :width] * values[:width]


def random_fourier(values: ArrayLike, width: int, *, bandwidth: float = 1.0, seed: int = 0) -> Array:
    """Return random Fourier features of a Gaussian kernel, sqrt(2 / width) cos(x w + b), (n, width).

    Parameters
    ----------
    values : (n, d)
    bandwidth : of the kernel, in units of the median distance of two items. Far below 1 every item is similar to itself
        only: the widest spectrum there is, and nothing learnable.
    seed : of the frequencies (Rahimi and Recht 2007)

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(40, 3))
    >>> z = random_fourier(x, 2000)
    >>> float(abs((z @ z.T).diagonal() - 1).max()) < 0.1  # the kernel of an item with itself
    True
    """
    x = np.asarray(values, dtype=np.float64)
    rng = generator(seed, "random_fourier", width)
    one, other = rng.integers(len(x), size=(2, 4096))
    distance = np.median(np.linalg.norm(x[one] - x[other], axis=1)[one != other])
    frequencies = rng.normal(size=(x.shape[1], width)) / (bandwidth * distance)
    return np.sqrt(2 / width) * np.cos(x @ frequencies + rng.uniform(0, 2 * np.pi, width))


def random_convolution(images: ArrayLike, width: int, *, seed: int = 0) -> Array:
    """Return one layer of random 3 x 3 filters, rectified and averaged in four quadrants, (n, width).

    Parameters
    ----------
    images : (n, height, width) grey
    width : of the features, four times the number of filters

    Examples
    --------
    >>> random_convolution(np.random.default_rng(0).random((5, 8, 8)), 16).shape
    (5, 16)
    """
    x = torch.as_tensor(np.asarray(images), dtype=torch.float32).unsqueeze(1)  # (n, 1, h, w)
    draw = torch_generator(seed, "random_convolution", width)
    filters = torch.randn(width // 4, 1, 3, 3, generator=draw) / 3
    bias = torch.randn(width // 4, generator=draw) / 3
    pooled = [
        torch.nn.functional.adaptive_avg_pool2d(torch.conv2d(part, filters, bias, padding=1).relu(), 2)
        for part in (x - x.mean()).split(256)
    ]
    return torch.cat(pooled).flatten(1).double().numpy()


def oriented_gradients(images: ArrayLike, cells: int, *, bins: int = 9) -> Array:
    """Return histograms of oriented gradients, (n, (cells - 1)^2 * 4 * bins).

    Each pixel's gradient adds its length to the two nearest of ``bins`` unsigned orientations; these are averaged over
    ``cells`` x ``cells`` cells, and every block of 2 x 2 cells is scaled to length one (Dalal and Triggs 2005).

    Parameters
    ----------
    images : (n, height, width) grey

    Examples
    --------
    >>> oriented_gradients(np.random.default_rng(0).random((5, 8, 8)), 4).shape
    (5, 324)
    """
    x = np.asarray(images, dtype=np.float64)
    down, right = np.gradient(x, axis=(1, 2))
    angle = np.arctan2(down, right) % np.pi * (bins / np.pi)  # (n, h, w) in [0, bins)
    distance = np.abs(angle[:, None] - np.arange(bins)[:, None, None])  # (n, bins, h, w)
    near = np.maximum(0, 1 - np.minimum(distance, bins - distance))
    votes = torch.from_numpy(near * np.hypot(down, right)[:, None])
    grid = torch.nn.functional.adaptive_avg_pool2d(votes, cells).numpy()  # (n, bins, cells, cells)
    blocks = np.stack([grid[:, :, i : cells - 1 + i, j : cells - 1 + j] for i in (0, 1) for j in (0, 1)], axis=1)
    blocks /= np.sqrt((blocks**2).sum(axis=(1, 2), keepdims=True) + 1e-6)  # (n, 4, bins, cells - 1, cells - 1)
    return blocks.reshape(len(x), -1)


def latent_semantics(texts: Sequence[str], width: int, *, seed: int = 0) -> Array:
    """Return truncated SVD scores of tf-idf word counts, (n, width at most).

    >>> latent_semantics(["a red fox", "a red hen", "the blue sea", "the sea"], 2).shape
    (4, 2)
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    counts = TfidfVectorizer(sublinear_tf=True).fit_transform(texts)
    width = min(width, min(counts.shape) - 1)
    return TruncatedSVD(width, random_state=seed).fit_transform(counts)


def random_bags(texts: Sequence[str], width: int, *, seed: int = 0) -> Array:
    """Return the mean over words of random Gaussian word vectors, (n, width).

    >>> random_bags(["a red fox", "a red hen"], 8).shape
    (2, 8)
    """
    from sklearn.feature_extraction.text import CountVectorizer

    counts = CountVectorizer(token_pattern=r"\S+").fit_transform(texts)  # (n, words), sparse
    vectors = generator(seed, "random_bags", width).normal(size=(counts.shape[1], width))
    return (counts @ vectors) / np.asarray(counts.sum(axis=1)).reshape(-1, 1)


# --------------------------------------------------------------------------------------------------------------- pools


def pool_of_images(
    images: Array, weights: Mapping[str, Path] | None, *, models: Sequence[str] = (), device: str = "cpu"
) -> dict[str, Encoder]:
    """Return 33 encoders of images in ten families, most of them of one to four widths or depths.

    Parameters
    ----------
    images : (n, height, width) or (n, height, width, 3), in [0, 1]
    weights : files of EfficientNet-Lite by name, ``lite0`` to ``lite2``; None for a pool of 14 without networks
    models : timm models to add
    device : where networks compute
    """
    grey = images.mean(axis=3) if images.ndim == 4 else images
    flat = grey.reshape(len(grey), -1)
    small = weights is None
    found = {} if weights is None else efficientnets(images, weights, device=device)
    for name in models:
        found[name] = timm_encoder(images, name, device=device)
    found["pixels"] = Encoder(flat, "pixels", 0)
    for width in (4, 16, 32, 64):
        components = principal_components(flat, width)
        found[f"pca/{width}"] = Encoder(components, "pca", flat.shape[1] * components.shape[1])
    for family, bandwidth in (("fourier-smooth", 1.0), ("fourier-sharp", 0.2)):
        for width in (64, 256) if small else (256, 1024, 2048, 4096):
            values = random_fourier(flat, width, bandwidth=bandwidth)
            found[f"{family}/{width}"] = Encoder(values, family, (flat.shape[1] + 1) * width)
    for width in (16, 64, 256) if small else (64, 256, 1024, 4096):
        found[f"convolution/{width}"] = Encoder(random_convolution(grey, width), "convolution", 10 * width // 4)
    for cells in (2, 4) if small else (2, 4, 7):
        found[f"hog/{cells}"] = Encoder(oriented_gradients(grey, cells), "hog", 0)
    return found


def efficientnets(images: Array, weights: Mapping[str, Path], *, device: str = "cpu") -> dict[str, Encoder]:
    """Return EfficientNet-Lite0 to 2, and an untrained one, as encoders of images.

    The pretrained ones at their last layer and after a quarter, half and three quarters of their blocks.

    Parameters
    ----------
    images, weights : as in :func:`pool_of_images`

    Raises
    ------
    MissingExtraError
        The package of the architecture is not installed.
    """
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        raise MissingExtraError("evaluation", "efficientnet_lite_pytorch") from None
    x = torch.as_tensor(images, dtype=torch.float32)
    x = x.permute(0, 3, 1, 2) if x.ndim == 4 else x.unsqueeze(1).expand(-1, 3, -1, -1)
    batches = [
        # As the networks were trained: bytes less 127, over 128.
        (torch.nn.functional.interpolate(part, (SIDE, SIDE), mode="bilinear", antialias=True) * 255 - 127) / 128
        for part in x.split(128)
    ]
    found = {}
    for name in (*weights, "untrained"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(0, name))
            network = EfficientNet.from_name("efficientnet-lite0" if name == "untrained" else f"efficientnet-{name}")
        blocks = len(network._blocks)
        depths = {} if name == "untrained" else {f"depth{q}": blocks * q // 4 for q in (1, 2, 3)}
        if name in weights:
            network.load_state_dict(torch.load(weights[name], weights_only=True))
        features = extract(
            network, batches, ["penultimate", *(f"_blocks.{block}" for block in depths.values())], device=device
        )
        whole = _size(network) - _size(network._fc)
        found[f"{name}/penultimate" if depths else name] = Encoder(features["penultimate"], name, whole)
        for shown, block in depths.items():
            before = _size(network._conv_stem) + _size(network._bn0) + _size(network._blocks[: block + 1])
            found[f"{name}/{shown}"] = Encoder(features[f"_blocks.{block}"], name, before)
    return found


def timm_encoder(images: Array, name: str, *, device: str = "cpu") -> Encoder:
    """Return the features of a timm model by its own transform; what comes before the first ``_`` is its family."""
    from PIL import Image

    pictures = [Image.fromarray(image).convert("RGB") for image in (images * 255).astype(np.uint8)]
    batches = [pictures[at : at + 64] for at in range(0, len(pictures), 64)]
    return Encoder(extract(name, batches, device=device), name.partition("_")[0], 0)


def pool_of_texts(
    texts: Sequence[str], *, sentence: Path, causal: tuple[Any, Any], static: Path, device: str = "cpu"
) -> dict[str, Encoder]:
    """Return 21 encoders of texts in five families.

    Parameters
    ----------
    texts : n
    sentence : folder of a BERT-like sentence encoder of six layers
    causal : a language model of 30 layers and its tokenizer
    static : folder with ``vectors.safetensors`` (words, d), trained so that the first features serve alone, and
        ``tokenizer.json``
    """
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
    from transformers import AutoModel, AutoTokenizer

    from fairtrial.causal_lm.hidden import hidden_states

    found = {}
    tokenizer, encoder = AutoTokenizer.from_pretrained(sentence), AutoModel.from_pretrained(sentence)

    def tokenize(batch: list[str]) -> dict[str, torch.Tensor]:
        return dict(tokenizer(batch, padding=True, truncation=True, max_length=64, return_tensors="pt"))

    layers = [f"encoder.layer.{layer}" for layer in range(6)]
    batches = [list(texts[at : at + 64]) for at in range(0, len(texts), 64)]
    features = extract(encoder, batches, layers, device=device, transform=tokenize)
    for depth, layer in enumerate(layers, 1):
        size = _size(encoder.embeddings) + depth * _size(encoder.encoder.layer[0])
        found[f"minilm/{depth}"] = Encoder(features[layer], "minilm", size)

    model, tokens = causal
    ids = [tokens(text, truncation=True, max_length=64)["input_ids"] for text in texts]
    ids = [row if len(row) > 1 else (row or [0]) * 2 for row in ids]  # the mean leaves the first token out
    depths = (6, 12, 18, 24, 30)
    states = hidden_states(model, ids, [depth - 1 for depth in depths], pooling="mean").float().cpu().numpy()
    for place, depth in enumerate(depths):
        size = _size(model.model.embed_tokens) + depth * _size(model.model.layers[0])
        found[f"smollm2/{depth}"] = Encoder(states[:, place], "smollm2", size)

    vectors = next(iter(load_file(static / "vectors.safetensors").values())).astype(np.float32)  # (words, d)
    words = Tokenizer.from_file(str(static / "tokenizer.json"))
    means = np.stack([vectors[words.encode(text, add_special_tokens=False).ids or [0]].mean(axis=0) for text in texts])
    for width in (64, 256):
        found[f"static/{width}"] = Encoder(means[:, :width], "static", len(vectors) * width)
    for width in (16, 64, 256, 1024):
        found[f"tfidf/{width}"] = Encoder(latent_semantics(texts, width), "tfidf", 0)
    for width in (64, 256, 1024, 4096):
        found[f"bags/{width}"] = Encoder(random_bags(texts, width), "bags", 0)
    return found


def _size(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
