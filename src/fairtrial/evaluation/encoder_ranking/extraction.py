"""Features of an encoder for a loader's items: any torch module, transformers model, timm name or callable.

Preprocessing belongs to the encoder, so :func:`extract` takes each model's own transform, and a cached file says beside
it which model, layer, pooling and transform it came from.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import cloudpickle
import numpy as np
import torch
from torch import nn

from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.errors import InputError, UnknownNameError

Array = np.ndarray
Pool = Literal["mean", "first"]


@overload
def extract(
    model: Any,
    loader: Iterable[Any],
    layer: str = ...,
    pool: Pool = ...,
    *,
    transform: Callable[[Any], Any] | None = ...,
    device: str | torch.device = ...,
    cache: str | Path | None = ...,
) -> Array: ...
@overload
def extract(
    model: Any,
    loader: Iterable[Any],
    layer: list[str],
    pool: Pool = ...,
    *,
    transform: Callable[[Any], Any] | None = ...,
    device: str | torch.device = ...,
    cache: str | Path | None = ...,
) -> dict[str, Array]: ...
def extract(
    model: Any,
    loader: Iterable[Any],
    layer: str | list[str] = "penultimate",
    pool: Pool = "mean",
    *,
    transform: Callable[[Any], Any] | None = None,
    device: str | torch.device = "cpu",
    cache: str | Path | None = None,
) -> Array | dict[str, Array]:
    """Return the features of all items of a loader, float32 (n, d), computed in evaluation mode without gradients.

    Parameters
    ----------
    model : a ``torch.nn.Module``, a model of transformers, the name of a timm model (its pretrained weights and its own
        transform are taken), or a callable from a batch to (b, d)
    loader : batches in a fixed order: tensors, mappings of tensors, lists of texts or images for ``transform``, or
        (inputs, targets) of which the inputs are taken
    layer : ``"penultimate"``: what enters the last linear layer, or the final hidden state of a transformers model;
        ``"output"``: what the model returns; or the name of any module inside. A list of names gives a mapping,
        from one pass.
    pool : how (b, tokens, d) and (b, d, height, width) become (b, d): ``"mean"``, over unmasked tokens where the batch
        has an ``attention_mask``, or the ``"first"`` token
    transform : applied to each batch before the model: a tokenizer, an image processor
    device : where to compute
    cache : a folder; features are written there as they come and returned as a read-only memory map. The file's name is
        a digest of the weights, the way of reading them and the data, so that neither is ever mistaken.

    Raises
    ------
    InputError
        timm is asked for and not installed; a layer without a pooled form; a loader that is empty, or whose order
        changes between two passes; features that are not finite.
    UnknownNameError
        A layer that the model does not have.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> images = torch.zeros(7, 3).split(4)
    >>> extract(model, images).shape, extract(model, images, "0").shape
    ((7, 5), (7, 5))
    >>> extract(lambda batch: batch.mean(dim=1, keepdim=True), images).shape
    (7, 1)
    """
    if pool not in ("mean", "first"):
        raise UnknownNameError("pool", pool, ["mean", "first"])
    layers = [layer] if isinstance(layer, str) else list(layer)
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):
        model, transform = _timm(model, transform)
        layers = ["output" if one == "penultimate" else one for one in layers]  # it is built without its head
    read = _reader(model, layers, pool, transform, torch.device(device))
    with torch.inference_mode():
        if cache is None:
            found = _gathered(read, loader)
        else:
            how = {"model": name, "pool": pool, "transform": repr(transform), "weights": _digest_of_model(model)}
            found = _mapped(read, loader, layers, how, transform, Path(cache))
    return found[layers[0]] if isinstance(layer, str) else dict(zip(layer, (found[one] for one in layers), strict=True))


def _gathered(read: Callable[[Any], dict[str, Array]], loader: Iterable[Any]) -> dict[str, Array]:
    batches = [read(batch) for batch in loader]
    if not batches:
        raise InputError("the loader has no batch: give items to extract features of")
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _mapped(
    read: Callable[[Any], dict[str, Array]],
    loader: Iterable[Any],
    layers: Sequence[str],
    how: dict[str, Any],
    transform: Any,
    cache: Path,
) -> dict[str, Array]:
    """Return memory maps of the layers' features, written batch by batch unless the cache has them."""
    data, items = _digest_of_data(loader)
    digest = hashlib.sha256(json.dumps(how | {"data": data, "code": _source(transform)}, sort_keys=True).encode())
    cache.mkdir(parents=True, exist_ok=True)
    files = {}
    for layer in layers:
        key = digest.copy()
        key.update(layer.encode())
        files[layer] = cache / f"{key.hexdigest()[:32]}.npy"
    if not all(file.exists() for file in files.values()):
        parts = {layer: file.with_suffix(f".{os.getpid()}.part") for layer, file in files.items()}
        try:
            maps: dict[str, np.memmap] = {}
            seen, at = hashlib.sha256(), 0
            for batch in loader:
                _update(seen, _inputs(batch))
                features = read(batch)
                for layer, rows in features.items():
                    if layer not in maps:
                        maps[layer] = np.lib.format.open_memmap(
                            parts[layer], mode="w+", dtype=np.float32, shape=(items, rows.shape[1])
                        )
                    maps[layer][at : at + len(rows)] = rows
                at += len(next(iter(features.values())))
            if seen.hexdigest() != data:
                raise InputError("the loader gave its items in another order the second time: make it shuffle=False")
            for layer, file in files.items():
                maps[layer].flush()
                note = how | {"layer": layer, "items": items, "data": data}
                file.with_suffix(".json").write_text(json.dumps(note, indent=1))
                os.replace(parts[layer], file)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)
    return {layer: np.load(file, mmap_mode="r") for layer, file in files.items()}


# ------------------------------------------------------------------------------------------------------------- models


def _timm(name: str, transform: Callable[[Any], Any] | None) -> tuple[nn.Module, Callable[[Any], Any]]:
    try:
        import timm
    except ImportError:
        raise InputError(
            f"{name!r} would be a model of timm, which is not installed: run  pip install timm  or give a torch module"
        ) from None
    if not timm.is_model(name):
        raise UnknownNameError("timm model", name, timm.list_models())
    model = timm.create_model(name, pretrained=True, num_classes=0)
    if transform is None:
        each = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)

        def transform(batch: Any) -> torch.Tensor:
            return torch.stack([each(image) for image in batch])

    return model, transform


def _reader(
    model: Any, layers: Sequence[str], pool: Pool, transform: Callable[[Any], Any] | None, device: torch.device
) -> Callable[[Any], dict[str, Array]]:
    """Return what maps a batch to the features of each layer."""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise InputError(f"{type(model).__name__} is no encoder: give a torch module, a timm name or a callable")

        def called(batch: Any) -> dict[str, Array]:
            inputs = _inputs(batch)
            features = _checked(
                torch.as_tensor(model(transform(inputs) if transform else inputs)), None, pool, "output"
            )
            return dict.fromkeys(layers, features)

        return called

    model = model.to(device)
    is_transformer = hasattr(model, "base_model_prefix") and hasattr(model, "config")
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    modules = dict(model.named_modules())
    for name in layers:
        if name not in modules and name not in ("penultimate", "output"):
            raise UnknownNameError("layer", name, [name for name in modules if name])

    def run(batch: Any) -> dict[str, Array]:
        inputs = _moved(transform(_inputs(batch)) if transform else _inputs(batch), device)
        seen: dict[str, Any] = {}
        hooks = []
        for name in layers:
            if name == "penultimate" and not is_transformer and linear:
                hooks.append(linear[-1].register_forward_pre_hook(lambda _, args: seen.update(penultimate=args[0])))
            elif name in modules and name:
                hooks.append(
                    modules[name].register_forward_hook(lambda _, args, output, name=name: seen.update({name: output}))
                )
        try:
            with evaluation_mode(model):
                runs = model.base_model if is_transformer and layers == ["penultimate"] else model
                output = runs(**inputs) if isinstance(inputs, Mapping) else runs(inputs)
        finally:
            for hook in hooks:
                hook.remove()
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        return {name: _checked(seen.get(name, output), mask, pool, name) for name in layers}

    return run


def _checked(output: Any, mask: torch.Tensor | None, pool: Pool, name: str) -> Array:
    """Return a layer's output as finite float32 (b, d)."""
    if hasattr(output, "last_hidden_state"):
        output = output.last_hidden_state
    elif isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, torch.Tensor) or output.ndim not in (2, 3, 4) or (pool == "first" and output.ndim == 4):
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(f"layer {name}: {shape} cannot be pooled by {pool!r} to (items, features): name another layer")
    x = output.float()
    if x.ndim == 3:  # (b, tokens, d)
        if pool == "first":
            x = x[:, 0]
        elif mask is None:
            x = x.mean(dim=1)
        else:
            weights = mask.to(x).unsqueeze(-1)  # (b, tokens, 1)
            x = (x * weights).sum(dim=1) / weights.sum(dim=1).clamp_min(1)
    elif x.ndim == 4:  # (b, d, height, width)
        x = x.mean(dim=(2, 3))
    if not torch.isfinite(x).all():
        raise InputError(f"layer {name}: the features are not finite: the model or its transform is broken")
    return x.cpu().numpy()


def _moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _moved(value, device) for name, value in inputs.items()}
    return inputs.to(device) if isinstance(inputs, torch.Tensor) else inputs


def _inputs(batch: Any) -> Any:
    """Return the inputs of a batch that may carry targets: a tuple whose first part is a tensor or mapping."""
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], torch.Tensor | Mapping):
        return batch[0]
    return batch


# ------------------------------------------------------------------------------------------------------------ digests


def _digest_of_model(model: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(model, nn.Module):
        digest.update(repr(model).encode())
        _update(digest, model.state_dict())
    else:
        digest.update(cloudpickle.dumps(model))
    digest.update(_source(type(model) if isinstance(model, nn.Module) else model).encode())
    return digest.hexdigest()


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (TypeError, OSError):
        return repr(type(thing))


def _digest_of_data(loader: Iterable[Any]) -> tuple[str, int]:
    """Return the digest of a loader's inputs and how many items they are."""
    digest, items = hashlib.sha256(), 0
    for batch in loader:
        inputs = _inputs(batch)
        _update(digest, inputs)
        items += len(next(iter(inputs.values())) if isinstance(inputs, Mapping) else inputs)
    if not items:
        raise InputError("the loader has no batch: give items to extract features of")
    return digest.hexdigest(), items


def _update(digest: Any, value: Any) -> None:
    for part in _bytes_of(value):
        digest.update(part)


def _bytes_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name in value:
            yield str(name).encode()
            yield from _bytes_of(value[name])
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        # Bytes, since numpy has no bfloat16.
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).data
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _bytes_of(part)
    elif hasattr(value, "tobytes"):  # an image of PIL
        yield f"{getattr(value, 'mode', '')}{getattr(value, 'size', '')}".encode()
        yield value.tobytes()
    else:
        yield repr(value).encode() + b"\0"
