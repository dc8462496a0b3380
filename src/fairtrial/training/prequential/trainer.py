"""The meter inside transformers' Trainer."""

from __future__ import annotations

from typing import Any

from fairtrial.errors import InputError, MissingExtraError
from fairtrial.training.prequential.meter import PrequentialMeter


def prequential_trainer(meter: PrequentialMeter, *args: Any, **kwargs: Any) -> Any:
    """Return a ``transformers.Trainer`` that codes every batch before its step.

    Parameters
    ----------
    meter : PrequentialMeter
    *args, **kwargs
        Of ``Trainer``. Items of the training set need their number under ``"index"``, and the arguments
        ``remove_unused_columns=False``. Labels of a causal language model are shifted as the model does.

    Raises
    ------
    MissingExtraError
        If transformers is not installed.
    """
    try:
        from transformers import Trainer
    except ImportError as error:
        raise MissingExtraError("lm", "transformers") from error

    class PrequentialTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            if not model.training:
                inputs.pop("index", None)
                return super().compute_loss(model, inputs, return_outputs=return_outputs, **more)
            if "index" not in inputs:
                raise InputError("items of the training set lack 'index': add it, and remove_unused_columns=False")
            index, labels = inputs.pop("index"), inputs["labels"]
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
            logits = outputs["logits"]
            if logits.dim() == 3 and "ForCausalLM" in type(model).__name__:
                logits, labels = logits[:, :-1], labels[:, 1:]
            meter.update(index, logits, labels)
            return (loss, outputs) if return_outputs else loss

    return PrequentialTrainer(*args, **kwargs)
