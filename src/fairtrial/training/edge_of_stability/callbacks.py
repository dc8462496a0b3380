"""A monitor as a callback of training frameworks."""

from __future__ import annotations

from typing import Any

from fairtrial.errors import MissingExtraError
from fairtrial.training.edge_of_stability.monitor import StabilityMonitor


def huggingface_callback(monitor: StabilityMonitor) -> Any:
    """Return a ``transformers.TrainerCallback`` that lets ``monitor`` measure after every optimizer step.

    Raises
    ------
    MissingExtraError
        If transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise MissingExtraError("lm", "transformers") from error

    class StabilityCallback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.after_step(state.global_step)

    return StabilityCallback()


def lightning_callback(monitor: StabilityMonitor) -> Any:
    """Return a ``lightning.pytorch.Callback`` that lets ``monitor`` measure after every training batch.

    Raises
    ------
    MissingExtraError
        If lightning is not installed.
    """
    try:
        from lightning.pytorch.callbacks import Callback
    except ImportError as error:
        raise MissingExtraError("training", "lightning") from error

    class StabilityCallback(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            monitor.after_step(trainer.global_step)

    return StabilityCallback()
