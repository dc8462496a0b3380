"""The models a mixture is made of: opened, and refused where they do not belong together."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fairtrial.causal_lm.batching import as_rows
from fairtrial.causal_lm.loading import check_loadable, load
from fairtrial.errors import InputError
from fairtrial.lm.upcycling.architectures import DenseFeedForward, Place, feed_forwards, read_feed_forward
from fairtrial.lm.upcycling.configuration import DivMoEConfig
from fairtrial.lm.upcycling.experts import check_granularity
from fairtrial.lm.upcycling.slicing import PARTITIONS

# What a config says of the computation beside weights, buffers and activations.
COMPUTES = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "sliding_window", "layer_types", "attn_logit_softcapping",
    "final_logit_softcapping", "query_pre_attn_scalar",
)  # fmt: skip
FAR = 0.5  # mean relative distance beyond which a model is probably no fine-tune of the base


def check_options(
    domains: Mapping[str, Any], *, partition: str, rest: str, router_init: str, texts: Mapping[str, Any] | None
) -> None:
    """Refuse options of ``upcycle`` that cannot be."""
    if not isinstance(domains, Mapping) or len(domains) < 2:
        raise InputError("domains: give at least two fine-tunes, as {'math': model, 'code': model}")
    for option, given, known in (
        ("rest", rest, ("average", "base")),
        ("router_init", router_init, ("random", "hidden")),
        ("partition", partition, PARTITIONS),
    ):
        if given not in known:
            raise InputError(f"{option}={given!r}: give one of {', '.join(known)}")
    if router_init == "hidden" and texts is None:
        raise InputError("router_init='hidden' reads each domain's texts: give texts={'math': [...], ...}")
    if texts is not None and set(texts) != set(domains):
        raise InputError(f"texts are of {', '.join(texts)}, the domains are {', '.join(domains)}: give texts of each")


def check_given(given: Any) -> None:
    """Refuse, before any work, a path that is no model and no adapters."""
    if isinstance(given, (str, Path)) and not (Path(given).expanduser() / "adapter_config.json").is_file():
        check_loadable(given)
    elif not isinstance(given, (str, Path)) and not isinstance(given, nn.Module):
        raise InputError(f"{type(given).__name__} is no model: give a model of transformers, a PEFT model or a folder")


def check_base(base: Any) -> None:
    """Refuse a base with adapters: it is not clear which of both is meant."""
    if hasattr(base, "peft_config"):
        raise InputError("the base carries PEFT adapters: give base.unload(), and the adapted model as a domain")


def check_sizes(config: DivMoEConfig, dense: Sequence[DenseFeedForward]) -> None:
    """Refuse G, F and K that do not fit the layers or one another; warn of K = 1."""
    for m in {layer.size[0] for layer in dense}:
        check_granularity(m, config.granularity)
    limit, what = config.router_shape[0], "groups" if config.routing == "group" else "experts"
    if not isinstance(config.active, int) or isinstance(config.active, bool) or not 1 <= config.active <= limit:
        raise InputError(f"active={config.active!r} of {limit} {what}: give a whole number from 1 to {limit}")
    if config.active == 1:
        warnings.warn(
            "active=1: the one share is always 1, so that the cross-entropy gives the router no gradient; it learns "
            "from the balance loss alone",
            stacklevel=3,
        )


def opened(given: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer, loaded where ``given`` is a path; ``tokenizer`` where it is a model."""
    if not isinstance(given, (str, Path)):
        return given, tokenizer
    model, own = load(given)
    return model, tokenizer or own


def domain_model(base: Any, tokenizer: Any, name: str, given: Any) -> tuple[Any, bool]:
    """Return a domain's model without adapters, and whether it had any."""
    if isinstance(given, (str, Path)) and (Path(given).expanduser() / "adapter_config.json").is_file():
        from peft import PeftModel

        return PeftModel.from_pretrained(copy.deepcopy(base), str(Path(given).expanduser())).merge_and_unload(), True
    if isinstance(given, (str, Path)):
        model, own = load(given)
        if tokenizer is not None and own.get_vocab() != tokenizer.get_vocab():
            raise InputError(f"domain {name}: its tokenizer has another vocabulary than the base's: it is no fine-tune")
        return model, False
    if hasattr(given, "merge_and_unload"):
        return copy.deepcopy(given).merge_and_unload(), True
    return given, False


def matching(base: Any, places: list[Place], model: Any, name: str) -> list[DenseFeedForward]:
    """Return a domain model's feed-forward layers after checking that it has the base's shapes."""
    ours = {key: tuple(value.shape) for key, value in base.named_parameters()}
    theirs = {key: tuple(value.shape) for key, value in model.named_parameters()}
    if ours != theirs:
        key = next(iter({**ours, **theirs}.items() ^ theirs.items() or ours.items() ^ theirs.items()))[0]
        raise InputError(
            f"domain {name}: {key} is {theirs.get(key, 'not there')}, in the base {ours.get(key, 'not there')}: all "
            "models must have the base's architecture, sizes and vocabulary"
        )
    found = feed_forwards(model)
    if [place.name for place in found] != [place.name for place in places]:
        raise InputError(f"domain {name}: its blocks are not those of the base")
    check_finite(model, f"domain {name}")
    for option in COMPUTES:
        own, its = (getattr(one.config, option, None) for one in (base, model))
        if own != its:
            raise InputError(f"domain {name}: its config has {option}={its!r}, the base's {own!r}: both must be one")
    buffers = dict(model.named_buffers())
    for key, buffer in base.named_buffers():
        if key in buffers:
            one, other = buffer.float().cpu(), buffers[key].float().cpu()
            if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-2, atol=1e-6):  # .half() rounds them
                raise InputError(f"domain {name}: its {key} is not the base's: both must encode positions in one way")
    layers = [read_feed_forward(place.module, f"domain {name}, {place.name}") for place in found]
    for place, layer in zip(places, layers, strict=True):
        own = read_feed_forward(place.module).activation
        if repr(layer.activation) != repr(own):
            raise InputError(f"domain {name}: its activation is {layer.activation!r}, the base's {own!r}")
    return layers


def check_finite(model: Any, what: str) -> None:
    """Refuse a model with a weight that is no finite number."""
    damaged = next((key for key, value in model.named_parameters() if not value.isfinite().all()), None)
    if damaged is not None:
        raise InputError(f"{what}: {damaged} is not finite: the checkpoint is damaged")


def distance_of(dense: list[DenseFeedForward], layers: list[DenseFeedForward]) -> float:
    """Return the mean relative distance of feed-forward matrices."""
    ratios = [
        float((new.float() - old.float()).norm() / old.float().norm().clamp_min(1e-30))
        for ours, theirs in zip(dense, layers, strict=True)
        for old, new in zip(ours.matrices(), theirs.matrices(), strict=True)
    ]
    return sum(ratios) / len(ratios)


def check_distance(name: str, distance: float, adapted: bool) -> None:
    """Refuse adapters that changed nothing here; warn of a domain that is the base, or far from it."""
    if distance == 0 and adapted:
        raise InputError(
            f"domain {name}: its adapters change no feed-forward layer, so that its experts would be copies of the "
            "base: train adapters on the feed-forward linears too, or give the merged model to use it all the same"
        )
    if distance == 0:
        warnings.warn(f"domain {name} has the base's feed-forward layers: its experts add no diversity", stacklevel=3)
    if distance > FAR:
        warnings.warn(
            f"domain {name} is {distance:.2f} from the base, relative to its weights: probably no fine-tune of it, and "
            "slices of unrelated models do not fit together",
            stacklevel=3,
        )


def as_ids(base: Any, tokenizer: Any, name: str, texts: Any) -> list[torch.Tensor]:
    """Return texts of a domain as rows of token ids."""
    if isinstance(texts, Iterable) and not isinstance(texts, str | torch.Tensor):
        texts = list(texts)  # a generator can be read once
    if isinstance(texts, list) and any(isinstance(text, str) for text in texts):
        if tokenizer is None:
            raise InputError(f"texts of {name}: give the tokenizer too, or token ids")
        texts = tokenizer(list(texts))["input_ids"]
        limit = getattr(base.config, "max_position_embeddings", None)
        texts = [row[:limit] for row in texts if len(row) > 1]
    return as_rows(base, texts)
