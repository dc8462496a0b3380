"""Control vectors in llama.cpp's files: a tensor ``direction.<layer>`` a steered layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fairtrial.errors import InputError, MissingExtraError


def write_control_vector(path: str | Path, vectors: dict[int, torch.Tensor], *, model_hint: str = "unknown") -> None:
    """Write vectors by layer, each (d,), as a control vector of llama.cpp: tensors ``direction.<layer>``."""
    gguf = _gguf()
    writer = gguf.GGUFWriter(str(path), "controlvector")
    writer.add_string("controlvector.model_hint", model_hint)
    writer.add_uint32("controlvector.layer_count", len(vectors))
    for layer, vector in sorted(vectors.items()):
        writer.add_tensor(f"direction.{layer}", vector.detach().to("cpu", torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_control_vector(path: str | Path) -> dict[int, torch.Tensor]:
    """Return the vectors of a control-vector file of llama.cpp or repeng, by layer, each (d,) float32.

    Raises
    ------
    InputError
        Not such a file.
    """
    gguf = _gguf()
    try:
        tensors = gguf.GGUFReader(str(path)).tensors
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable GGUF file: {error}") from error
    vectors = {
        int(tensor.name.partition(".")[2]): torch.from_numpy(tensor.data.astype("float32", copy=True))
        for tensor in tensors
        if tensor.name.startswith("direction.")
    }
    if not vectors:
        raise InputError(f"{path}: no tensor named direction.<layer> in it: not a control vector")
    return vectors


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError("lm", "gguf") from error
    return gguf
