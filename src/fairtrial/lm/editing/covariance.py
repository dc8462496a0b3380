"""The uncentred covariance of an MLP's keys, which tells what a write should leave alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fairtrial.causal_lm.capture import propagate
from fairtrial.causal_lm.layout import ChainSpec
from fairtrial.causal_lm.statistics import second_moments
from fairtrial.causal_lm.windows import windows
from fairtrial.errors import InputError

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
    """
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
        if depth == max(layers):
            break
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
        name, stored = "covariance", {f"layer.{layer}": C for layer, C in source.items()}
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
        if C.shape != (m, m) or not bool(torch.isfinite(C).all()) or not torch.allclose(C, C.T, rtol=1e-3):
            raise InputError(
                f"{name}: layer {layer} is {tuple(C.shape)}, not a symmetric finite matrix ({m}, {m}) of this model"
            )
        found[layer] = C.float()
    return found
