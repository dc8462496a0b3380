"""What a saved DivMoE model is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from fairtrial.errors import InputError


class DivMoEConfig(PretrainedConfig):
    """Configuration of a :class:`~fairtrial.lm.upcycling.modeling.DivMoEForCausalLM`.

    Parameters
    ----------
    text_config
        The configuration of the dense model, of any known architecture.
    domains
        Names of the G domain models.
    granularity
        F: experts a dense FFN was cut into.
    active
        K: experts a token takes.
    routing
        "group": at most one expert a group. "free": the K best of all G * F (the baselines).
    groups
        "domain": the F slices of one model. "slice": the same slice of all models (a control).
    recipe
        How it was made, for the record.
    gumbel
        Temperature of the noise on the choice within groups in training, falling to 0 with the progress.
    decay
        Share of the training over which the coverage bias falls to 0.
    balance_coefficient, z_coefficient
        Weights of the balance losses and of the z-loss in ``aux_loss``.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> config = DivMoEConfig(LlamaConfig(num_hidden_layers=2), domains=["code", "math"], granularity=2, active=2)
    >>> config.router_shape, config.active_share
    ((2, 2), 1.0)
    """

    model_type = "divmoe"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 - as transformers declares it
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        text_config: Any = None,
        domains: Sequence[str] = ("a", "b"),
        granularity: int = 1,
        active: int = 1,
        routing: str = "group",
        groups: str = "domain",
        recipe: str = "divmoe",
        gumbel: float = 0.0,
        decay: float = 0.1,
        balance_coefficient: float = 0.01,
        z_coefficient: float = 0.001,
        **kwargs: Any,
    ) -> None:
        if text_config is None:
            text_config = AutoConfig.for_model("llama")
        elif isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        if routing not in ("group", "free"):
            raise InputError(f"routing={routing!r}: give 'group' or 'free'")
        if groups not in ("domain", "slice"):
            raise InputError(f"groups={groups!r}: give 'domain' or 'slice'")
        self.text_config = text_config
        self.domains = list(domains)
        self.granularity = granularity
        self.active = active
        self.routing = routing
        self.groups = groups
        self.recipe = recipe
        self.gumbel = gumbel
        self.decay = decay
        self.balance_coefficient = balance_coefficient
        self.z_coefficient = z_coefficient
        kwargs.setdefault("tie_word_embeddings", getattr(text_config, "tie_word_embeddings", False))
        kwargs.setdefault("attn_implementation", text_config._attn_implementation)  # None here would reset it there
        super().__init__(**kwargs)

    @property
    def n_experts(self) -> int:
        """G * F, a layer."""
        return len(self.domains) * self.granularity

    @property
    def router_shape(self) -> tuple[int, int]:
        """Groups, and experts in each, as the router sees them: free top-K has groups of one."""
        if self.routing == "free":
            return self.n_experts, 1
        shape = len(self.domains), self.granularity
        return shape if self.groups == "domain" else shape[::-1]

    @property
    def active_share(self) -> float:
        """Active parameters of a feed-forward layer relative to the dense one: K / F."""
        return self.active / self.granularity
