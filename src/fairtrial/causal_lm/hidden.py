"""Hidden states of chosen layers, pooled or token by token, and a cache of them on disk.

*Layer l* is the residual stream after block l, counted from 0, before any final norm.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fairtrial.causal_lm.batching import Ids, as_rows, default_batch_tokens, length_batches, pad_right
from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.layout import ChainSpec, find_blocks
from fairtrial.errors import InputError, UnknownNameError

Pooling = Literal["last", "mean"]


def as_states(states: Any, name: str = "states", *, dtype: torch.dtype | None = torch.float64) -> torch.Tensor:
    """Return a caller's states or directions as a tensor on the CPU, detached; ``dtype=None`` leaves theirs.

    Raises
    ------
    InputError
        No array of real numbers.
    """
    try:
        X = torch.as_tensor(states)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}: give an array of numbers, not {type(states).__name__} of something else") from None
    if X.is_complex():
        raise InputError(f"{name} are complex: give real numbers")
    return X.detach().to("cpu", dtype)


def hidden_states(
    model: Any,
    ids: Ids,
    layers: Sequence[int],
    *,
    pooling: Pooling = "last",
    ignore_ids: Collection[int] = (),
    spec: ChainSpec | None = None,
    batch_tokens: int | None = None,
) -> torch.Tensor:
    """Return one state a text and layer.

    Only the pooled states of the wanted layers are kept, and the pass ends after the deepest of them.

    Parameters
    ----------
    model
        A model of transformers with a sequence of blocks; an encoder needs a ``spec``.
    ids
        Token ids of N texts, (N, T) or N sequences.
    layers
        L layers in the order wanted; negative ones count from the last.
    pooling
        "last": the state at the last token. "mean": over all tokens but the first, which in causal models is an
        attention sink of no meaning, and but those in ``ignore_ids``; a text of which nothing is left is an error.
    ignore_ids
        Tokens the mean leaves out, such as ``tokenizer.all_special_ids``.
    spec
        For an architecture :data:`~fairtrial.causal_lm.layout.SPECS` lacks; its ``blocks`` are enough.
    batch_tokens
        Tokens a batch, padding included; ``None`` = 1024 on a CPU, 8192 elsewhere.

    Returns
    -------
    torch.Tensor
        (N, L, d), on the model's device and in its dtype.

    Raises
    ------
    InputError
        A layer that does not exist; a text the model cannot take (see
        :func:`~fairtrial.causal_lm.batching.as_rows`); states that are not finite.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=3,
    ...                      num_attention_heads=2, bos_token_id=0, eos_token_id=1)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> tuple(hidden_states(model, [[3, 1, 4], [1, 5]], layers=[0, 1]).shape)
    (2, 2, 8)
    """
    if pooling not in ("last", "mean"):
        raise UnknownNameError("pooling", pooling, ["last", "mean"])
    ignored = torch.tensor(sorted(ignore_ids), dtype=torch.int64)

    def pool(i: int, row: torch.Tensor, states: torch.Tensor) -> torch.Tensor:  # states (L, T_i, d)
        if pooling == "last":
            return states[:, -1]
        kept = ~torch.isin(row, ignored)
        kept[0] = False
        if not bool(kept.any()):
            raise InputError(f"text {i} has no token to take the mean of besides its first and the ignored ones")
        return states[:, kept.to(states.device)].float().mean(1).to(states.dtype)

    return torch.stack(_collect(model, as_rows(model, ids), layers, pool, spec, batch_tokens))


def token_hidden_states(
    model: Any, ids: Ids, layers: Sequence[int], *, spec: ChainSpec | None = None, batch_tokens: int | None = None
) -> list[torch.Tensor]:
    """Return the states of every token: N tensors (T_i, L, d).

    See :func:`hidden_states` for the arguments and errors.
    """

    def every(i: int, row: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return states.transpose(0, 1).contiguous()

    return _collect(model, as_rows(model, ids), layers, every, spec, batch_tokens)


class _DeepestLayerReached(Exception):
    """Ends a forward pass whose remainder nobody needs."""


def _collect(
    model: Any,
    rows: list[torch.Tensor],
    layers: Sequence[int],
    pool: Any,
    spec: ChainSpec | None,
    batch_tokens: int | None,
) -> list[torch.Tensor]:
    """Run the texts in batches and return ``pool(i, row, states (L, T_i, d))`` of each, in their order."""
    _, blocks = find_blocks(model, spec)
    n = len(blocks)
    if wrong := [layer for layer in layers if not -n <= layer < n]:
        raise InputError(f"there is no layer {wrong[0]}: the model has {n}, counted 0..{n - 1}")
    if not len(layers):
        raise InputError("no layer is asked for: give at least one")
    wanted = [layer % n for layer in layers]
    states: dict[int, torch.Tensor] = {}  # layer -> (B, T, d), of the current batch

    def record(layer: int) -> Any:
        def hook(block: nn.Module, args: tuple, output: Any) -> None:
            states[layer] = output[0] if isinstance(output, tuple) else output
            if layer == max(wanted):
                raise _DeepestLayerReached

        return hook

    results: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    device = model.get_input_embeddings().weight.device
    hooks = [blocks[layer].register_forward_hook(record(layer)) for layer in set(wanted)]
    try:
        with torch.no_grad(), evaluation_mode(model):
            budget = batch_tokens or default_batch_tokens(model, logits=False)
            for batch in length_batches([len(row) for row in rows], budget):
                ids = pad_right([rows[i] for i in batch]).to(device)
                lengths = torch.tensor([len(rows[i]) for i in batch], device=device)
                mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]  # (B, T); encoders need it
                with suppress(_DeepestLayerReached):
                    model(ids, attention_mask=None if bool(mask.all()) else mask.long())
                for b, i in enumerate(batch):
                    text = torch.stack([states[layer][b, : len(rows[i])].to(device) for layer in wanted])  # (L, T_i, d)
                    results[i] = pool(i, rows[i], text).clone()
                    if not bool(torch.isfinite(results[i]).all()):
                        raise InputError(f"the hidden states of text {i} are not finite: is the model damaged?")
    finally:
        for hook in hooks:
            hook.remove()
    return results


def cached_hidden_states(
    folder: str | Path,
    model: Any,
    ids: Ids,
    layers: Sequence[int],
    *,
    pooling: Pooling = "last",
    ignore_ids: Collection[int] = (),
    spec: ChainSpec | None = None,
    digest: str | None = None,
) -> torch.Tensor:
    """Return :func:`hidden_states`, from ``folder`` if they were computed before.

    The key is the model's weights, the token ids, the layers and the pooling, so an edited model or another text is
    never answered with old states. Two processes that ask at once compute once. Files are safetensors and may be
    deleted at any time.

    Parameters
    ----------
    folder
        Where the states are kept; made if it is not there.
    model, ids, layers, pooling, ignore_ids, spec
        As for :func:`hidden_states`.
    digest
        :func:`model_digest` of the model where the caller has it already: it reads every weight.
    """
    from filelock import FileLock
    from safetensors.torch import load_file, save_file

    rows = as_rows(model, ids)
    key = hashlib.blake2b(digest_size=16)
    request = [digest or model_digest(model), list(layers), pooling, sorted(ignore_ids), [len(row) for row in rows]]
    key.update(json.dumps(request).encode())
    for row in rows:
        key.update(row.numpy().tobytes())
    file = Path(folder).expanduser() / f"{key.hexdigest()}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    device = model.get_input_embeddings().weight.device
    with FileLock(f"{file}.lock"):
        if file.is_file():
            return load_file(file)["states"].to(device)
        states = hidden_states(model, rows, layers, pooling=pooling, ignore_ids=ignore_ids, spec=spec)
        handle, work = tempfile.mkstemp(dir=file.parent)
        os.close(handle)
        save_file({"states": states.cpu()}, work)
        os.replace(work, file)  # whole or not at all, whenever the process dies
    return states


def model_digest(model: Any) -> str:
    """Return 32 hexadecimal digits that depend on a model's class, configuration and every weight, and on nothing else.

    Where the model was loaded from, its device and the version of transformers do not matter.
    """
    digest = hashlib.blake2b(type(model).__name__.encode(), digest_size=16)
    config = model.config.to_dict()
    for name in [*config]:  # what saving and loading write into a config
        if name.startswith("_") or name in ("architectures", "dtype", "transformers_version"):
            del config[name]
    digest.update(json.dumps(config, default=str, sort_keys=True).encode())
    seen = set()
    for name, tensor in model.state_dict().items():
        if (place := (tensor.data_ptr(), tensor.shape)) in seen:  # tied
            continue
        seen.add(place)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
