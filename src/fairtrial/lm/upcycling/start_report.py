"""What a mixture kept of the models it was made of, measured before any training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fairtrial.causal_lm.likelihood import mean_nll
from fairtrial.lm.upcycling.architectures import Place
from fairtrial.lm.upcycling.configuration import DivMoEConfig
from fairtrial.lm.upcycling.modeling import DivMoEForCausalLM
from fairtrial.lm.upcycling.recipes import Recipe


@dataclass(frozen=True)
class UpcycleReport:
    """What was kept at initialisation.

    Attributes
    ----------
    distance
        Domain -> mean over feed-forward matrices of ||W_domain - W_base|| / ||W_base||.
    covered
        Whether every slice is taken exactly once a token at the start, so that equal models give the base itself.
    layer_error
        Greatest over layers: relative distance of the mixture's output to the average of the G whole FFNs', on inputs
        of the base where texts were given, on standard normal ones otherwise.
    start_loss, base_loss
        Domain -> nats a token of the mixture and of the base on the texts; empty where none were given.
    total_parameters, active_parameters, dense_parameters
        Of the mixture, those a token meets, and of the base.
    """

    distance: dict[str, float]
    covered: bool
    layer_error: float
    total_parameters: int
    active_parameters: int
    dense_parameters: int
    start_loss: dict[str, float] = field(default_factory=dict)
    base_loss: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{self.total_parameters:,} parameters, {self.active_parameters:,} active; the base has "
            f"{self.dense_parameters:,}",
            "distance to the base: " + ", ".join(f"{name} {value:.3f}" for name, value in self.distance.items()),
            ("every slice is taken once at the start" if self.covered else "the start does not cover every slice once")
            + f"; layers differ from the average model's by up to {self.layer_error:.1%}",
        ]
        if self.start_loss:
            lines.append(
                "nats a token at the start (base): "
                + ", ".join(
                    f"{name} {self.start_loss[name]:.3f} ({self.base_loss[name]:.3f})" for name in self.base_loss
                )
            )
        return "\n".join(lines)


@torch.no_grad()
def feed_forward_inputs(
    base: Any, places: list[Place], ids: dict[str, list[torch.Tensor]], most: int = 4096
) -> list[list[torch.Tensor]]:
    """Return, for each layer, the base's feed-forward inputs on each domain's texts, (n, d) each; [] without texts."""
    found: list[list[torch.Tensor]] = [[] for _ in places]
    for rows in ids.values():
        seen: list[list[torch.Tensor]] = [[] for _ in places]
        with _watching(places, seen), torch.inference_mode():
            tokens = 0
            for row in rows:
                base(input_ids=row[None].to(base.device), use_cache=False)
                tokens += len(row)
                if tokens >= most:
                    break
        for layer, parts in zip(found, seen, strict=True):
            layer.append(torch.cat(parts).clone())
    return found


@contextmanager
def _watching(places: list[Place], seen: list[list[torch.Tensor]]) -> Iterator[None]:
    """Keep what each feed-forward layer is given."""

    def hook(into: list[torch.Tensor]) -> Any:
        return lambda module, args: into.append(args[0].detach().flatten(0, -2))

    handles = [place.module.register_forward_pre_hook(hook(into)) for place, into in zip(places, seen, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def measure_start(
    moe: DivMoEForCausalLM,
    base: Any,
    distance: dict[str, float],
    inputs: list[list[torch.Tensor]],
    ids: dict[str, list[torch.Tensor]],
    recipe: Recipe,
) -> UpcycleReport:
    """Measure a new mixture: see :class:`UpcycleReport`."""
    config = moe.config
    layers = moe.layers()
    errors = []
    for layer, given in zip(layers, inputs, strict=True):
        weight = layer.up_proj
        if given:
            x = torch.cat([part[:64] for part in given])
        else:
            x = torch.randn(64, weight.shape[2], generator=torch.Generator().manual_seed(0))
        x = x.to(weight)
        bias = 0 if layer.down_bias is None else layer.down_bias
        whole = layer.expert_outputs(x).sum(0) / len(config.domains) + bias
        errors.append(float((layer(x) - whole).norm() / whole.norm().clamp_min(1e-30)))
        layer.routing = None
    stacks = [(layer.up_proj, layer.down_proj, layer.up_bias) for layer in layers]
    experts = sum(p.numel() for stack in stacks for p in stack if p is not None)
    total = sum(p.numel() for p in moe.parameters())
    return UpcycleReport(
        distance,
        covered=_covered(config, recipe),
        layer_error=max(errors),
        total_parameters=total,
        active_parameters=total - experts + experts * config.active // config.n_experts,
        dense_parameters=sum(p.numel() for p in base.parameters()),
        start_loss={name: mean_nll(moe, rows) for name, rows in ids.items()},
        base_loss={name: mean_nll(base, rows) for name, rows in ids.items()},
    )


def _covered(config: DivMoEConfig, recipe: Recipe) -> bool:
    g, f, k = len(config.domains), config.granularity, config.active
    if f == 1:
        return True
    if recipe.groups == "slice":
        return k == f
    return recipe.coverage and k == g >= f
