"""The mixture as a causal language model of transformers: trains, generates, saves and loads like any other.

It is the dense architecture with each feed-forward layer replaced; importing this module registers it with the Auto
classes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from fairtrial.causal_lm.likelihood import cache_name
from fairtrial.errors import InputError
from fairtrial.lm.upcycling.architectures import DenseFeedForward, feed_forwards, read_feed_forward
from fairtrial.lm.upcycling.configuration import DivMoEConfig
from fairtrial.lm.upcycling.experts import DivMoEFeedForward
from fairtrial.lm.upcycling.router import GroupTopRouter


class DivMoEForCausalLM(PreTrainedModel, GenerationMixin):
    """A dense causal language model whose feed-forward layers are :class:`DivMoEFeedForward`.

    Made by :func:`~fairtrial.lm.upcycling.upcycle`; a bare config gives random weights, as transformers does.

    ``loss`` (with ``labels``) is the cross-entropy plus ``aux_loss``: the balance within groups, the balance across
    groups where K is below their number, and the z-loss, each times its coefficient and averaged over layers. Padding
    that ``attention_mask`` (B, T) hides counts in none of them.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> dense = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                     num_attention_heads=2, num_key_value_heads=2)
    >>> moe = DivMoEForCausalLM(DivMoEConfig(dense, domains=["math", "code"], granularity=2, active=2))
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> out = moe(ids, labels=ids)
    >>> out.logits.shape, bool(out.loss > out.aux_loss)
    (torch.Size([1, 3, 16]), True)
    """

    config_class = DivMoEConfig
    base_model_prefix = "language_model"
    accepts_loss_kwargs = False  # Trainer then averages losses over accumulated batches: aux_loss too
    _keep_in_fp32_modules_strict = ("router",)
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DivMoEConfig, language_model: Any = None) -> None:
        super().__init__(config)
        if language_model is None:
            language_model = AutoModelForCausalLM.from_config(config.text_config)
            for i, place in enumerate(feed_forwards(language_model)):
                dense = read_feed_forward(place.module, place.name)
                setattr(place.block, place.attribute, new_layer(dense, config, seed=i))
        else:
            for module in language_model.modules():
                module._is_hf_initialized = True  # its weights are there: post_init must not draw them anew
        self.language_model = language_model
        self.post_init()

    def layers(self) -> list[DivMoEFeedForward]:
        """Return the feed-forward layers, in order of depth."""
        return [module for module in self.language_model.modules() if isinstance(module, DivMoEFeedForward)]

    def set_progress(self, fraction: float) -> None:
        """Say which share of the continued training is done: the coverage bias and the noise fall with it.

        It is saved with the model. :class:`~fairtrial.lm.upcycling.CoverageDecay` does it in a Trainer.
        """
        if not 0 <= fraction <= 1:
            raise InputError(f"fraction={fraction}: give the share of the steps that are done, in [0, 1]")
        for layer in self.layers():
            layer.router.progress.fill_(fraction)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_router_logits: bool = False,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return logits (B, T, vocabulary), with ``labels`` the loss, and in training or with labels ``aux_loss``."""
        name = cache_name(self.language_model)
        if cache is not None:
            kwargs[name] = cache
        out = self.language_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            return_dict=True,
            **kwargs,
        )
        loss, aux_loss = out.loss, None
        if labels is not None or self.training:
            aux_loss = self._aux_loss(attention_mask)
            loss = None if loss is None else loss + aux_loss.to(loss.dtype)
        told = MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=out.logits,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            router_logits=self._router_logits() if output_router_logits else None,
            **{name: getattr(out, name)},
        )
        for layer in self.layers():
            layer.routing = None  # it holds the graph
        return told if return_dict is None or return_dict else told.to_tuple()

    def _aux_loss(self, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted balance and z-losses, averaged over layers."""
        config = self.config
        total = torch.zeros((), device=self.device)
        for layer in self.layers():
            routing = layer.routing
            assert routing is not None, "the layer has not run"
            n = len(routing.choice)
            mask = None
            if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.numel() == n:
                mask = attention_mask.flatten().bool().to(routing.choice.device)
            balance = routing.within_balance(mask) if config.routing == "group" else torch.zeros((), device=self.device)
            if config.active < config.router_shape[0]:
                balance = balance.to(self.device) + routing.across_balance(mask).to(self.device)
            total = total + config.balance_coefficient * balance.to(self.device)
            total = total + config.z_coefficient * routing.z_loss(mask).to(self.device)
        return total / len(self.layers())

    def _router_logits(self) -> tuple[torch.Tensor, ...]:
        return tuple(layer.routing.logits.flatten(1) for layer in self.layers() if layer.routing is not None)

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what a step of generation is given: as the dense architecture has it."""
        return self.language_model.prepare_inputs_for_generation(*args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings."""
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.language_model.set_output_embeddings(new_embeddings)


def new_layer(dense: DenseFeedForward, config: DivMoEConfig, *, seed: int) -> DivMoEFeedForward:
    """Return a layer of experts in the place of ``dense``, its expert weights yet to be written."""
    m, d = dense.size
    n_groups, n_slices = config.router_shape
    router = GroupTopRouter(
        d, n_groups=n_groups, n_slices=n_slices, n_active=config.active, gumbel=config.gumbel, decay=config.decay,
        seed=seed,
    )  # fmt: skip
    return DivMoEFeedForward(
        d,
        m,
        router,
        granularity=config.granularity,
        activation=dense.activation,
        gated=dense.gate is not None,
        bias=dense.up_bias is not None,
        dropout=dense.dropout,
        dtype=dense.up.dtype,
    )


AutoConfig.register("divmoe", cast(Any, DivMoEConfig), exist_ok=True)
AutoModelForCausalLM.register(cast(Any, DivMoEConfig), DivMoEForCausalLM, exist_ok=True)
