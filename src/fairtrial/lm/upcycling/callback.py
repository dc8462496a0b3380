"""Tell a DivMoE model how far its continued training is, in a Trainer of transformers or TRL."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from fairtrial.errors import InputError
from fairtrial.lm.upcycling.modeling import DivMoEForCausalLM


class CoverageDecay(TrainerCallback):
    """Let the coverage bias and the Gumbel noise fall with the steps of the run.

    Examples
    --------
    >>> trainer = Trainer(moe, arguments, train_dataset=data, callbacks=[CoverageDecay()])  # doctest: +SKIP
    """

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the progress of the model, whatever wraps it."""
        found = next((m for m in model.modules() if isinstance(m, DivMoEForCausalLM)), None)
        if found is None:
            raise InputError(f"CoverageDecay is for a DivMoEForCausalLM, this is a {type(model).__name__}")
        found.set_progress(min(1.0, state.global_step / max(1, state.max_steps)))
