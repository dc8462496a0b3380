"""Direct feedback inside transformers' Trainer."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fairtrial.training.feedback_alignment.direct import DirectFeedback


class NDFATrainerMixin:
    """Put before ``Trainer`` in a class's bases: its training step then calls :meth:`DirectFeedback.backward`.

    Set ``feedback_options`` (DirectFeedback's keyword arguments) on the class; ``feedback`` is
    made at the first step. For one process, or with ``feedback.synchronize()`` before the optimizer's step.

        class NDFATrainer(NDFATrainerMixin, Trainer):
            feedback_options = {"surrogate_lr": 3e-4}
    """

    feedback_options: ClassVar[dict[str, Any]] = {}
    feedback: DirectFeedback | None = None

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Make a forward pass and fill gradients; return the loss."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        if self.feedback is None:
            self.feedback = DirectFeedback(self.accelerator.unwrap_model(model), **self.feedback_options)
        with self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is None:
            loss = loss / self.current_gradient_accumulation_steps
        self.feedback.backward(loss, outputs["logits"], labels=inputs.get("labels"))
        return loss.detach()
