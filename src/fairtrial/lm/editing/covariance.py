"""The uncentred covariance of an MLP's keys, which tells what a write should leave alone."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from fairtrial.causal_lm.capture import propagate
from fairtrial.causal_lm.layout import ChainSpec, find_blocks
from fairtrial.causal_lm.statistics import second_moments
from fairtrial.causal_lm.windows import windows
from fairtrial.errors import InputError
from fairtrial.options import checked_count

WINDOW = 256  # tokens a window of text


def key_covariance(
    model: Any,
    tokenizer: Any,
    text: Any,
    layers: Sequence[int],
    *,
    tokens: int = 20_000,
    spec: ChainSpec | None = None,
    batch: int = 4,
) -> dict[int, torch.Tensor]:
    """Return E[k k'] of each layer's MLP, (m, m) float32 on the CPU.

    Parameters
    ----------
    model, tokenizer
        The model before any edit.
    text
        See :func:`~fairtrial.causal_lm.windows.windows`.
    layers
        Blocks, counted from 0.
    tokens
        How many of the text are read; several times m.
    spec
        For an architecture that :mod:`fairtrial.causal_lm.layout` does not know.
    batch
        Windows a pass.

    Warns
    -----
    UserWarning
        There are fewer tokens than keys have entries: most of what is written then rests on the ridge.
    """
    layers = checked_layers(layers, len(find_blocks(model, spec)[1]))
    tokens, batch = checked_count(tokens, "tokens"), checked_count(batch, "batch")
    window = min(WINDOW, getattr(model.config, "max_position_embeddings", None) or WINDOW)
    device = model.get_input_embeddings().weight.device
    ids = windows(tokenizer, text, window).ids[: max(1, tokens // window)]
    batches = ids.to(device).split(batch)
    found = {}
    for depth, (layout, inputs) in enumerate(propagate(model, batches, spec)):
        if depth in layers:
            moments = second_moments(layout, inputs, hessian=True, keep=True)[layout.mlps[0].down.name]
            assert moments.hessian is not None
            found[depth] = (moments.hessian / moments.n_tokens).cpu()
            if moments.n_tokens < (m := len(found[depth])):
                warnings.warn(
                    f"layer {depth}: {moments.n_tokens} tokens tell little of a covariance ({m}, {m}): give more text",
                    stacklevel=2,
                )
        if depth == max(layers):
            break
    return found


def checked_layers(layers: Sequence[int], n: int) -> list[int]:
    """Return numbers of some of n blocks in order, negative ones counted from the last.

    Raises
    ------
    InputError
        No list of whole numbers, or blocks that the model lacks.
    """
    whole = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not whole or not all(isinstance(layer, Integral) and not isinstance(layer, bool) for layer in layers):
        raise InputError(f"layers={layers!r}: give a list of whole numbers, such as [4, 5]")
    found = sorted({int(layer) + n if -n <= layer < 0 else int(layer) for layer in layers})
    if not found or found[0] < 0 or found[-1] >= n:
        raise InputError(f"layers={list(layers)}: the model has blocks 0..{n - 1}")
    return found


def save_covariance(path: str | Path, covariances: Mapping[int, torch.Tensor]) -> None:
    """Write covariances (m, m) by layer to a ``.safetensors`` file."""
    from safetensors.torch import save_file

    if Path(path).suffix != ".safetensors":
        raise InputError(f"{path}: give a name that ends in .safetensors")
    save_file({f"layer.{layer}": C.contiguous() for layer, C in covariances.items()}, path)


def read_covariance(
    source: str | Path | Mapping[int, torch.Tensor], sizes: Mapping[int, int]
) -> dict[int, torch.Tensor]:
    """Return covariances of given sizes m by layer, from a file or as :func:`key_covariance` returns them.

    Raises
    ------
    InputError
        Not such a file, a layer it lacks, or a matrix that is not (m, m), symmetric and finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if isinstance(source, Mapping):
        name, stored = "covariance", {f"layer.{layer}": torch.as_tensor(C) for layer, C in source.items()}
    elif not isinstance(source, str | Path):
        raise InputError(f"covariance={source!r}: give what key_covariance returned, or a file of save_covariance")
    else:
        name = str(source)
        try:
            stored = load_file(source)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{name}: not a readable safetensors file: {error}") from None
    found = {}
    for layer, m in sizes.items():
        C = stored.get(f"layer.{layer}")
        if C is None:
            raise InputError(f"{name}: no layer {layer}; it has {', '.join(sorted(stored)) or 'nothing'}")
        real = C.shape == (m, m) and not C.is_complex() and bool(torch.isfinite(C).all())
        if not real or not torch.allclose(C, C.T, rtol=1e-3):
            raise InputError(
                f"{name}: layer {layer} is {tuple(C.shape)}, not a symmetric finite matrix ({m}, {m}) of this model"
            )
        found[layer] = C.float()
    return found
