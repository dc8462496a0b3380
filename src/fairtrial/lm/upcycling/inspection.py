"""What the router does with texts of each domain: who is taken, how evenly, and whether experts differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pandas as pd
import torch
from torch.nn import functional as F

from fairtrial.causal_lm.batching import as_rows
from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.errors import InputError
from fairtrial.lm.upcycling.experts import DivMoEFeedForward
from fairtrial.lm.upcycling.modeling import DivMoEForCausalLM
from fairtrial.lm.upcycling.router import Routing


def routing_report(moe: DivMoEForCausalLM, tokenizer: Any, texts: Mapping[str, Any]) -> pd.DataFrame:
    """Measure the routing of a mixture on texts.

    Parameters
    ----------
    moe
        Of :func:`~fairtrial.lm.upcycling.upcycle`.
    tokenizer
        Of the base; ``None`` where token ids are given.
    texts
        Domain -> list of texts, or of token ids (n, T).

    Returns
    -------
    DataFrame
        A row a layer, group and expert. ``load``: share of tokens that take the expert. ``load_DOMAIN``: the same on
        one domain's texts. ``affinity``: the domain whose texts take it most. ``entropy``: of the load within its
        group, 1 = even, 0 = always the same expert. ``diversity``: of its layer, the mean pairwise cosine of expert
        outputs, low where experts differ. ``attrs["co_occurrence"]`` has, for each layer, the share of tokens that take
        both of two groups (G x G), ``attrs["collapsed"]`` the share of tokens that take two experts of one group. A
        group is a domain, except in the control of slices.

    Raises
    ------
    InputError
        No texts.

    Examples
    --------
    >>> routing_report(moe, tokenizer, {"math": math_texts, "code": code_texts})  # doctest: +SKIP
    """
    if not texts:
        raise InputError("texts: give {'math': [...], ...}")
    config = moe.config
    g, f = len(config.domains), config.granularity
    names = config.domains if config.groups == "domain" else [f"slice {i}" for i in range(f)]
    shape = (g, f) if config.groups == "domain" else (f, g)
    loads: dict[str, torch.Tensor] = {}  # domain -> (layers, E): shares of tokens
    tokens: dict[str, int] = {}
    together = torch.zeros(len(moe.layers()), shape[0], shape[0])
    collapsed, samples = 0.0, [[] for _ in moe.layers()]  # type: ignore[var-annotated]
    for name, given in texts.items():
        rows = as_rows(moe, given if tokenizer is None else tokenizer(list(given))["input_ids"])
        counts = torch.zeros(len(moe.layers()), config.n_experts)
        tokens[name] = sum(map(len, rows))
        with recording(moe) as seen:
            run(moe, rows)
        for i, parts in enumerate(seen):
            for x, routing in parts:
                experts = routing.experts.cpu()
                counts[i] += torch.bincount(experts.flatten(), minlength=config.n_experts)
                taken = F.one_hot(experts // shape[1], shape[0]).sum(1)  # (N, groups): how often each is taken
                present = (taken > 0).float()
                together[i] += present.T @ present
                collapsed += float((present.sum(1) < config.active).sum())
                samples[i].append(x[:32])
        loads[name] = counts / tokens[name]
    total = sum(tokens.values())
    load = sum(loads[name] * tokens[name] for name in texts) / total  # (layers, E)
    assert isinstance(load, torch.Tensor)
    grouped = load.view(-1, *shape)
    entropy = usage_entropy(grouped)
    stacked = torch.stack([loads[name] for name in texts])  # (domains, layers, E)
    best = stacked.argmax(0)
    diversity = [_cosine(layer, torch.cat(x)) for layer, x in zip(moe.layers(), samples, strict=True)]
    table = [
        {
            "layer": i,
            "group": names[e // shape[1]],
            "expert": e % shape[1],
            "load": float(load[i, e]),
            **{f"load_{name}": float(loads[name][i, e]) for name in texts},
            "affinity": [*texts][int(best[i, e])],
            "entropy": float(entropy[i, e // shape[1]]),
            "diversity": diversity[i],
        }
        for i in range(len(load))
        for e in range(config.n_experts)
    ]
    frame = pd.DataFrame(table)
    frame.attrs["co_occurrence"] = (together / total).tolist()
    frame.attrs["collapsed"] = collapsed / total / len(load)
    return frame


def usage_entropy(load: torch.Tensor) -> torch.Tensor:
    """Return the entropy of loads (..., F) over the last axis as a share of log F, (...); 1 for F = 1.

    >>> usage_entropy(torch.tensor([[1.0, 1.0], [1.0, 0.0]])).tolist()
    [1.0, 0.0]
    """
    if load.shape[-1] == 1:
        return torch.ones(load.shape[:-1])
    share = load / load.sum(-1, keepdim=True).clamp_min(1e-30)
    return torch.special.entr(share).sum(-1) / torch.tensor(float(load.shape[-1])).log()


@contextmanager
def recording(moe: DivMoEForCausalLM) -> Iterator[list[list[tuple[torch.Tensor, Routing]]]]:
    """Record, a layer, the tokens (N, d) and their routing of every forward."""
    seen: list[list[tuple[torch.Tensor, Routing]]] = [[] for _ in moe.layers()]

    def hook(into: list[tuple[torch.Tensor, Routing]]) -> Any:
        return lambda module, args, routing: into.append((args[0].detach(), routing))

    handles = [layer.router.register_forward_hook(hook(into)) for layer, into in zip(moe.layers(), seen, strict=True)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def run(moe: DivMoEForCausalLM, rows: list[torch.Tensor]) -> None:
    """Run the model on texts of token ids, without padding: equal lengths together."""
    by_length: dict[int, list[torch.Tensor]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    with torch.inference_mode(), evaluation_mode(moe):
        for length, same in by_length.items():
            for batch in torch.stack(same).split(max(1, 4096 // length)):
                moe(input_ids=batch.to(moe.device), use_cache=False)


def _cosine(layer: DivMoEFeedForward, x: torch.Tensor) -> float:
    """Return the mean cosine of the outputs of two experts, over tokens (N, d) and pairs."""
    with torch.inference_mode():
        out = F.normalize(layer.expert_outputs(x[:256].to(layer.up_proj)).float(), dim=-1)  # (E, N, d)
    e = len(out)
    if e < 2:
        return 1.0
    whole = out.sum(0).square().sum(-1)  # (N,): all pairs, each with itself too
    return float(((whole - out.square().sum((0, 2))) / (e * (e - 1))).mean())
