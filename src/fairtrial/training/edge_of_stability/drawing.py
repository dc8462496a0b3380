"""The figure of a monitored run: sharpness against the edge, alignment, and the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from fairtrial.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(frame: pd.DataFrame) -> Figure:
    """Draw a monitor's table: sharpness and edge with the loss, alignment with kappa, and the tangent kernel's motion.

    Parameters
    ----------
    frame : DataFrame
        Of a :class:`~fairtrial.training.edge_of_stability.monitor.StabilityMonitor`.

    Returns
    -------
    A matplotlib figure of its own: ``figure(frame).savefig("run.svg")``.
    """
    from matplotlib.figure import Figure

    if lacking := {"step", "sharpness", "edge", "loss", "cos", "kappa", "ntk_drift"} - set(frame):
        raise InputError(f"the frame lacks {', '.join(sorted(lacking))}: give a StabilityMonitor's")
    with_kernel = frame["ntk_drift"].notna().any()
    drawn = Figure(figsize=(7, 7 if with_kernel else 5), layout="constrained")
    axes = drawn.subplots(3 if with_kernel else 2, 1, sharex=True)
    axes[0].plot(frame["step"], frame["sharpness"], label="sharpness")
    axes[0].plot(frame["step"], frame["edge"], "k--", linewidth=1, label="edge")
    axes[0].set_ylabel("largest eigenvalue")
    losses = axes[0].twinx()
    losses.plot(frame["step"], frame["loss"], color="0.6", linewidth=1)
    losses.set_yscale("log")
    losses.set_ylabel("loss (gray)")
    axes[0].legend(loc="lower right", frameon=False)
    aligned = frame.dropna(subset=["cos"])
    axes[1].axhline(0, color="0.8", linewidth=1)
    axes[1].plot(aligned["step"], aligned["cos"], ".-", label="cosine of parameters and grad S")
    axes[1].plot(aligned["step"], aligned["kappa"] / 10, ".-", label="kappa / 10")
    axes[1].legend(frameon=False)
    if with_kernel:
        moved = frame.dropna(subset=["ntk_drift"])
        axes[2].plot(moved["step"], moved["ntk_drift"], ".-", label="drift of the tangent kernel")
        axes[2].legend(frameon=False)
    axes[-1].set_xlabel("step")
    return drawn
