"""``upcycle``: a dense base and G fine-tunes of it become one mixture of experts.

Every feed-forward layer is cut into F slices of neurons, the same for all domain models; expert (g, f) is slice f of
domain model g. Everything else is the average of the domain models. Coverage: a bias b[g, (g + l) mod F] makes every
token of layer l start with one slice of each domain, all slices together: if the fine-tunes equal the base, the mixture
is the base.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fairtrial.lm.upcycling.architectures import DenseFeedForward, Place, feed_forwards, read_feed_forward
from fairtrial.lm.upcycling.configuration import DivMoEConfig
from fairtrial.lm.upcycling.experts import DivMoEFeedForward
from fairtrial.lm.upcycling.modeling import DivMoEForCausalLM, new_layer
from fairtrial.lm.upcycling.recipes import Recipe, deal_domains, expert_index, find_recipe, reinitialise
from fairtrial.lm.upcycling.slicing import partition_neurons
from fairtrial.lm.upcycling.sources import (
    as_ids,
    check_base,
    check_distance,
    check_finite,
    check_given,
    check_options,
    check_sizes,
    distance_of,
    domain_model,
    matching,
    opened,
)
from fairtrial.lm.upcycling.start_report import feed_forward_inputs, measure_start
from fairtrial.lm.upcycling.starting import COVERAGE, hidden_gates, start_router
from fairtrial.options import checked_number
from fairtrial.seeds import derive


def upcycle(
    base: Any,
    domains: Mapping[str, Any],
    *,
    granularity: int = 4,
    active: int | None = None,
    recipe: str = "divmoe",
    partition: str = "contiguous",
    rest: str = "average",
    router_init: str = "random",
    texts: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    coverage: float = COVERAGE,
    gumbel: float = 0.0,
    decay: float = 0.1,
    seed: int = 0,
) -> DivMoEForCausalLM:
    """Turn a dense model and its domain fine-tunes into a mixture of experts.

    Parameters
    ----------
    base
        A causal language model of transformers, or the folder (or GGUF file) of one.
    domains
        Name -> fine-tune of ``base``: a model, a PEFT model, or the folder of a model or of adapters. They are read one
        after the other, so that base, one of them and the result are in memory at most. None is changed.
    granularity
        F: slices a feed-forward layer is cut into.
    active
        K: experts a token takes; ``None`` = G, the number of domains. Active feed-forward parameters are K / F of the
        base's.
    recipe
        "divmoe", or a baseline or control of :data:`~fairtrial.lm.upcycling.recipes.RECIPES`.
    partition
        Of the neurons: "contiguous" or "balanced-kmeans".
    rest
        Attention, norms and embeddings: the "average" of the domain models, or the "base"'s.
    router_init
        "random", or "hidden": a row is the mean hidden state of its domain's ``texts``, less the mean of all. Hidden
        gates do not keep the base's function; ``moe.upcycle_report`` has the loss at the start.
    texts
        Domain -> texts (with ``tokenizer``), or token ids (n, T). Needed for hidden gates; with them the report
        measures the start on real text.
    tokenizer
        Of the base; taken from its folder where ``base`` is one.
    coverage
        beta, the bias that coverage starts from.
    gumbel
        Temperature of the noise on the choice within groups in training.
    decay
        Share of the continued training over which the bias falls to 0; tell it by ``moe.set_progress``.
    seed
        Of router, partition and all that a recipe draws.

    Returns
    -------
    DivMoEForCausalLM
        With ``upcycle_report``, a :class:`UpcycleReport`.

    Raises
    ------
    InputError
        Fewer than two domains; K > G; F that does not divide the neurons; models of other shapes, another tokenizer,
        activation or encoding of positions; weights that are quantised or not finite; adapters that leave every
        feed-forward layer as it was; a coverage that is no number; unknown names of options.
    UnknownNameError
        An unknown recipe.

    Warns
    -----
    UserWarning
        A domain model equal to the base, or so far from it that it is probably no fine-tune of it; K = 1, where the
        cross-entropy gives the router no gradient.

    Examples
    --------
    >>> import warnings
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> base, math, code = (tiny_causal_lm(seed=i)[0] for i in range(3))
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")                     # random models are no fine-tunes of another
    ...     moe = upcycle(base, {"math": math, "code": code}, granularity=2)
    >>> moe.config.n_experts, moe.upcycle_report.covered
    (4, True)
    """
    chosen = find_recipe(recipe)
    checked_number(coverage, "coverage", least=0)
    check_options(domains, partition=partition, rest=rest, router_init=router_init, texts=texts)
    for given in (base, *domains.values()):
        check_given(given)
    base, tokenizer = opened(base, tokenizer)
    check_base(base)
    places = feed_forwards(base)
    check_finite(base, "the base")
    dense = [read_feed_forward(place.module, place.name) for place in places]
    config = DivMoEConfig(
        copy.deepcopy(base.config),
        domains=list(domains),
        granularity=granularity,
        active=len(domains) if active is None else active,
        routing=chosen.routing,
        groups="slice" if chosen.groups == "slice" else "domain",
        recipe=recipe,
        gumbel=gumbel,
        decay=decay,
    )
    check_sizes(config, dense)
    ids = {name: as_ids(base, tokenizer, name, texts[name]) for name in domains} if texts is not None else {}

    moe = _shell(base, places, dense, config, seed)
    slices = [
        partition_neurons(layer, granularity, partition=partition, seed=derive(seed, "slices", i))
        for i, layer in enumerate(dense)
    ]
    dealt = [
        deal_domains(chosen, len(domains), granularity, derive(seed, "deal", i)) for i in range(len(dense))
    ]  # fmt: skip
    if chosen.experts == "base":
        for g in range(len(domains)):
            _write_experts(moe, dense, slices, dealt, chosen, g)
    distance = {}
    for g, (name, given) in enumerate(domains.items()):
        model, adapted = domain_model(base, tokenizer, name, given)
        layers = matching(base, places, model, name)
        distance[name] = distance_of(dense, layers)
        check_distance(name, distance[name], adapted)
        if chosen.experts == "domains":
            _write_experts(moe, layers, slices, dealt, chosen, g)
        if rest == "average" and chosen.experts == "domains":
            _average_rest(moe, model, places, g)
            _average_bias(moe, layers, g)
        del model, layers
    for i, layer in enumerate(moe.layers()):
        if chosen.reinitialised:
            reinitialise(layer, chosen.reinitialised, derive(seed, "drop", i))
        if chosen.experts == "random":
            _draw_experts(layer, dense[i], derive(seed, "experts", i))
        start_router(layer, config, chosen, i, coverage, derive(seed, "router", i))
    inputs = feed_forward_inputs(base, places, ids)
    if router_init == "hidden":
        for layer, given in zip(moe.layers(), inputs, strict=True):
            hidden_gates(layer, given, config, chosen)
    moe.eval()
    moe.upcycle_report = measure_start(moe, base, distance, inputs, ids, chosen)
    return moe


@torch.no_grad()
def _shell(
    base: Any, places: list[Place], dense: list[DenseFeedForward], config: DivMoEConfig, seed: int
) -> DivMoEForCausalLM:
    """Return the mixture with all of the base but its feed-forward layers, whose experts are yet to be written."""
    language_model = copy.deepcopy(base, {id(place.module): nn.Identity() for place in places})
    blocks = dict(language_model.named_modules())
    for i, (place, layer) in enumerate(zip(places, dense, strict=True)):
        new = new_layer(layer, config, seed=derive(seed, "router", i)).to(layer.up.device)
        if new.down_bias is not None and layer.down_bias is not None:
            new.down_bias.copy_(layer.down_bias)
        setattr(blocks[place.name.rpartition(".")[0]], place.attribute, new)
    language_model.config = config.text_config
    moe = DivMoEForCausalLM(config, language_model)
    moe.generation_config = copy.deepcopy(base.generation_config)
    return moe


@torch.no_grad()
def _write_experts(
    moe: DivMoEForCausalLM,
    layers: list[DenseFeedForward],
    slices: list[torch.Tensor],
    dealt: list[torch.Tensor],
    recipe: Recipe,
    domain: int,
) -> None:
    """Write the slices of one domain model's layers wherever they were dealt to."""
    for new, dense, neurons, deal in zip(moe.layers(), layers, slices, dealt, strict=True):
        granularity, n_domains = deal.shape
        for slice_, group in (deal == domain).nonzero().tolist():
            e = expert_index(recipe, n_domains, granularity, group, slice_)
            rows = neurons[slice_].to(dense.up.device)
            ups = [dense.up[rows]] if dense.gate is None else [dense.gate[rows], dense.up[rows]]
            new.up_proj[e].copy_(torch.cat(ups))
            new.down_proj[e].copy_(dense.down[:, rows])
            if new.up_bias is not None and dense.up_bias is not None:
                new.up_bias[e].copy_(dense.up_bias[rows])


@torch.no_grad()
def _draw_experts(layer: DivMoEFeedForward, dense: DenseFeedForward, seed: int) -> None:
    """Draw experts with the standard deviation of the base's matrices."""
    g = torch.Generator().manual_seed(seed)
    for new, old in ((layer.up_proj, dense.up), (layer.down_proj, dense.down)):
        new.copy_(float(old.float().std()) * torch.randn(new.shape, generator=g))
    if layer.up_bias is not None:
        layer.up_bias.zero_()


@torch.no_grad()
def _average_rest(moe: DivMoEForCausalLM, model: Any, places: list[Place], seen: int) -> None:
    """Take the next domain model into the running mean of all that is outside the feed-forward layers.

    A running mean of equal models is exactly that model.
    """
    prefixes = tuple(f"{place.name}." for place in places)
    target = dict(moe.language_model.named_parameters())
    for name, value in model.named_parameters():
        if not name.startswith(prefixes):
            _into_mean(target[name], value, seen)


@torch.no_grad()
def _average_bias(moe: DivMoEForCausalLM, layers: list[DenseFeedForward], seen: int) -> None:
    """Take the next domain model's output biases into the running mean."""
    for new, dense in zip(moe.layers(), layers, strict=True):
        if new.down_bias is not None and dense.down_bias is not None:
            _into_mean(new.down_bias, dense.down_bias, seen)


def _into_mean(mean: torch.Tensor, value: torch.Tensor, seen: int) -> None:
    value = value.to(mean.device)
    mean.copy_(value if seen == 0 else mean.float() + (value.float() - mean.float()) / (seen + 1))
