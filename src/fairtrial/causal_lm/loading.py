"""Load a causal language model and its tokenizer from a folder or a GGUF file, so that both can be saved again.

Nothing is fetched and nothing is unpickled: files on this machine, weights in safetensors or GGUF. A GGUF model is
dequantised, and what transformers remembers of its quantisation is cleared, without which it refuses to save.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fairtrial.errors import InputError
from fairtrial.quiet import transformers_silent


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    cache: str | Path | None = None,
) -> tuple[Any, Any]:
    """Load a model for evaluation, and its tokenizer.

    Parameters
    ----------
    path
        A folder as ``save_pretrained`` writes it, a ``.gguf`` file, or a folder that holds one.
    device
        Where the model goes; ``None`` = the CPU.
    dtype
        Of the weights; ``None`` = as saved (float32 for GGUF).
    cache
        A folder to keep the dequantised copy of a GGUF model in, four bytes a weight in float32: dequantising takes
        seconds to minutes, the copy a tenth of that. ``None`` = no copy.

    Returns
    -------
    model, tokenizer
        Of transformers, the model in evaluation mode.

    Raises
    ------
    InputError
        Not a model, not a causal one, or incomplete; weights only as a pickle; a quantised checkpoint; adapters alone;
        no tokenizer. The message names the file and the remedy.

    Examples
    --------
    >>> model, tokenizer = load("models/SmolLM2-135M-Instruct.Q4_1.gguf", cache="~/.cache/models")  # doctest: +SKIP
    >>> model.save_pretrained("smollm2"), tokenizer.save_pretrained("smollm2")                      # doctest: +SKIP
    """
    path = Path(path).expanduser()
    check_loadable(path)
    gguf = _gguf_file(path)
    if gguf is None:
        model, tokenizer = _from_pretrained(path, dtype, use_safetensors=True)
    elif cache is None:
        model, tokenizer = _from_gguf(gguf, dtype)
    else:
        folder = _dequantised(gguf, dtype, Path(cache).expanduser())
        model, tokenizer = _from_pretrained(folder, dtype, use_safetensors=True)
    return model.to(device or "cpu").eval(), tokenizer


def check_loadable(path: str | Path) -> None:
    """Refuse, in milliseconds, a path that :func:`load` would refuse for what its files are.

    Raises
    ------
    InputError
        As :func:`load` does.
    """
    if _gguf_file(path := Path(path).expanduser()) is None:
        _check_folder(path)


def check_device(device: str) -> None:
    """Refuse, with one line, a device that torch does not know or this machine does not have.

    >>> check_device("cpu")
    """
    try:
        torch.zeros(1, device=device).item()  # the device "meta" makes tensors and computes nothing
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise InputError(f"device={device}: {reason}: give a device this machine has, such as cpu") from None


def context_length(path: str | Path) -> int | None:
    """Return the most tokens a text of the model in a folder may have, or ``None`` where no config.json says so."""
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    return config.get("max_position_embeddings") or config.get("n_positions")


def stored_as(path: str | Path) -> str | None:
    """Return how a GGUF file, or that of a folder, stores most of its weights, such as "Q4_1"; ``None`` = no GGUF."""
    if (gguf := _gguf_file(Path(path).expanduser())) is None:
        return None
    from gguf import GGUFReader

    weights: Counter[str] = Counter()
    for tensor in GGUFReader(gguf).tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    return weights.most_common(1)[0][0]


def forget_quantization(model: Any) -> None:
    """Clear what a dequantised model of transformers remembers of its quantisation, so that it can be saved.

    ``save_pretrained`` refuses or writes a config that cannot be loaded while ``hf_quantizer``, ``is_quantized``,
    ``quantization_method`` or ``config.quantization_config`` are set.
    """
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    model.config.__dict__.pop("quantization_config", None)


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file ``path`` is or, having no config.json, holds."""
    if path.is_file():
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{path}: not a GGUF file; give a folder written by save_pretrained or a .gguf file")
        return path
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder; models are read from this machine, download it first")
    found = sorted(path.glob("*.gguf"))
    if (path / "config.json").is_file() or not found:
        return None
    if len(found) > 1:
        raise InputError(f"{path}: holds several GGUF files, name one: {', '.join(file.name for file in found)}")
    return found[0]


def _check_folder(path: Path) -> None:
    """Refuse a folder that cannot be loaded before any work starts."""
    if (path / "adapter_config.json").is_file():
        raise InputError(
            f"{path}: holds adapters, not a model: merge them into their base model with PEFT and save that"
        )
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: not a model: it has no config.json; save_pretrained writes one") from None
    except ValueError as error:
        raise InputError(f"{path / 'config.json'}: not JSON: {error}") from error
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise InputError(
            f"{path}: the weights are quantised ({method}): dequantise the model and save it, or load the original"
        )
    if not any(path.glob("*.safetensors")):
        pickles = sorted(file.name for file in path.glob("*.bin"))
        raise InputError(
            f"{path}: no weights in safetensors"
            + (f", only the pickle {pickles[0]}: load it where you trust it and save it again" if pickles else "")
        )
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(
            f"{path}: no tokenizer ({', '.join(_TOKENIZER_FILES)}): save it there with tokenizer.save_pretrained"
        )


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def _from_gguf(gguf: Path, dtype: torch.dtype | None) -> tuple[Any, Any]:
    model, tokenizer = _from_pretrained(gguf.parent, dtype or torch.float32, gguf_file=gguf.name)
    forget_quantization(model)
    return model, tokenizer


def _from_pretrained(folder: Path, dtype: torch.dtype | None, **how: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer_how = {"gguf_file": how["gguf_file"]} if "gguf_file" in how else {}
    try:
        with transformers_silent():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True, **how
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **tokenizer_how)
    except Exception as error:  # a damaged file fails in as many ways as there are readers
        reason = str(error).strip().splitlines()
        raise InputError(
            f"{folder}: transformers cannot load it: {reason[0] if reason else type(error).__name__}"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise InputError(f"{folder}: {len(missing)} weights are missing, {missing[0]} the first: they would be random")
    return model, tokenizer


def _dequantised(gguf: Path, dtype: torch.dtype | None, cache: Path) -> Path:
    """Return the folder of the dequantised copy in ``cache``; one of many processes makes it if it is not there."""
    import transformers
    from filelock import FileLock

    with open(gguf, "rb") as file:
        digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    kind = str(dtype or torch.float32).removeprefix("torch.")
    folder = cache / f"{gguf.stem}-{digest}-{kind}-transformers-{transformers.__version__}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            model, tokenizer = _from_gguf(gguf, dtype)
            work = Path(tempfile.mkdtemp(dir=cache))
            try:
                with transformers_silent():
                    model.save_pretrained(work)
                    tokenizer.save_pretrained(work)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder
