"""A monitor that measures a training run's stability from a callback, and reads its regime.

Schedule: sharpness every ``every`` steps; its gradient and alignment every ``gradient_every``, and at every measurement
while the run first approaches the edge, since that is where the critical weight decay is read; the tangent kernel every
``ntk_every``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.optim import Optimizer

from fairtrial.errors import FairtrialError, InputError
from fairtrial.stats import mean_interval
from fairtrial.training.curvature import flatten, tangent_kernel
from fairtrial.training.edge_of_stability.kernel import direction
from fairtrial.training.edge_of_stability.reduced import APPROACH, Prediction, predict_regime
from fairtrial.training.edge_of_stability.sharpness import Sharpness, SharpnessMeasurement

logger = logging.getLogger(__name__)

COLUMNS = (
    "step", "loss", "sharpness", "residual", "edge", "ratio", "cos", "A", "kappa", "alpha", "beta", "grad_along",
    "unrest", "ntk_drift", "ntk_velocity", "ntk_top", "flip", "products", "seconds",
)  # fmt: skip
DENSE_ABOVE, DENSE_EVERY = 0.75, 5
"""Above this share of the edge, until it is reached, every fifth step is measured."""
RUNNING_MEDIAN = 51  # measurements


@dataclass(frozen=True)
class Edge:
    """Where stability ends, by the optimizer's own settings.

    Attributes
    ----------
    value : float
        What the (preconditioned) sharpness of the unregularised loss must stay below.
    decay : float
        The weight decay lambda.
    precondition : (P,) tensor or None
        The preconditioner D of an adaptive optimizer.
    """

    value: float
    decay: float = 0.0
    precondition: Tensor | None = None


def edge_of(optimizer: Optimizer) -> Edge:
    """Return the edge of a full-batch optimizer: ``2 / eta - lambda`` for gradient descent.

    With heavy-ball momentum b it is ``(2 + 2 b) / eta - lambda``, with Nesterov's ``(2 + 2 b) / ((1 + 2 b) eta) -
    lambda``; with Adam ``(2 + 2 b1) / ((1 - b1) eta)`` for the sharpness preconditioned by the second moments (Cohen et
    al. 2021, 2022), less lambda where the decay is decoupled. A learning rate of 0 has an infinite edge.

    Raises
    ------
    InputError
        If the optimizer has no known edge, or groups of different settings.

    >>> edge_of(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.5)).value
    30.0
    """
    group = optimizer.param_groups[0]
    for name in ("lr", "weight_decay", "momentum", "betas", "dampening", "nesterov", "eps", "amsgrad", "maximize"):
        if any(other.get(name) != group.get(name) for other in optimizer.param_groups):
            raise InputError(f"parameter groups differ in {name}: one edge needs one setting; pass edge= instead")
    if "lr" not in group:
        raise InputError(f"{type(optimizer).__name__} has no learning rate in its groups: pass edge= instead")
    if group.get("maximize"):
        raise InputError("an optimizer that maximizes has no edge: minimize the negative, or pass edge= instead")
    eta, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    if isinstance(optimizer, torch.optim.SGD):
        b = float(group["momentum"])
        if group["nesterov"]:
            return Edge(_over(2 + 2 * b, (1 + 2 * b) * eta) - decay, decay)
        return Edge(_over(2 + 2 * b, eta * (1 - group["dampening"] if b else 1)) - decay, decay)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay", False)
        if decay and not decoupled:
            raise InputError("Adam with L2 decay divides it by its preconditioner: use AdamW, or pass edge= instead")
        b1, b2 = group["betas"]
        moments = []
        for p in (p for g in optimizer.param_groups for p in g["params"] if p.requires_grad):
            state = optimizer.state.get(p)
            if not state:
                raise InputError("Adam has taken no step yet: its preconditioner is known after the first")
            squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            corrected = squares / (1 - b2 ** float(state["step"]))
            moments.append((corrected.sqrt() + group["eps"]).reshape(-1))
        return Edge(_over(2 + 2 * b1, (1 - b1) * eta) - decay, decay, torch.cat(moments))
    raise InputError(f"the edge of {type(optimizer).__name__} is not known here: pass edge=, a number or a callable")


def _over(a: float, step: float) -> float:
    """Return ``a / step``, inf for a step of zero, as schedulers take it: what does not move is stable."""
    return a / step if step else math.inf


@dataclass(frozen=True)
class StabilityReport:
    """What a run's measurements say.

    Attributes
    ----------
    regime : {"sharpening", "edge", "damped edge", "below edge"}
        Over the last third: sharpness within 0.95 to 1.1 of the edge (``edge``; ``damped edge`` where the oscillation
        along the top eigenvector has fallen below half of what it was on arrival), below 0.9 of it and level
        (``below edge``), or still rising (``sharpening``).
    plateau_ratio, plateau_low, plateau_high : float
        Mean sharpness over edge in the last third, and its interval over four consecutive blocks.
    oscillation : float
        Standard deviation of the sharpness about its running median in the last third.
    amplitude : float
        Mean ``|u . grad L|`` in the last third.
    steps_to_edge : int or None
        The first step at 0.95 of the edge.
    sharpening_rate, rate_low, rate_high : float
        Theil-Sen slope of the sharpness a step before 0.95 of the edge, and its 95 % interval.
    unrest : float
        Mean ``|grad L + lambda theta| / |grad L|`` in the last third, 0 at rest. A plateau at rest has alpha = lambda A
        by necessity, which is no evidence for the model.
    loss_falls : float
        By how much of itself the loss fell over the last third: a plateau while it still falls is none.
    prediction : Prediction
        The critical weight decay.
    """

    regime: Literal["sharpening", "edge", "damped edge", "below edge"]
    plateau_ratio: float
    plateau_low: float
    plateau_high: float
    oscillation: float
    amplitude: float
    steps_to_edge: int | None
    sharpening_rate: float
    rate_low: float
    rate_high: float
    unrest: float
    loss_falls: float
    prediction: Prediction

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as nested plain values."""
        return asdict(self)


class StabilityMonitor:
    """Measures a run after its steps and keeps a table; the run itself is not touched.

    Parameters
    ----------
    probe : Sharpness
    optimizer : torch.optim.Optimizer, optional
        Its learning rate, momentum, decay and second moments give the edge.
    edge : float or callable, optional
        The edge, instead: a number, or ``edge()``.
    every, gradient_every, ntk_every : int
        Steps between measurements.
    ntk_probe : (m, ...) tensor, optional
        Inputs for the tangent kernel, 64 or so; left out, none is measured.

    Raises
    ------
    InputError
        If there is neither an optimizer with a known edge nor ``edge``.

    Examples
    --------
    >>> from fairtrial.training.networks import mlp
    >>> model, x, y = mlp([2, 4, 1]), torch.ones(8, 2), torch.ones(8, 1)
    >>> loss = lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1])
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> monitor = StabilityMonitor(Sharpness(model, loss, [(x, y)]), optimizer=optimizer, every=10)
    >>> for step in range(30):
    ...     optimizer.zero_grad(); loss(model, (x, y)).backward(); optimizer.step()
    ...     monitor.after_step(step)
    >>> list(monitor.frame.step)
    [0, 10, 20]
    """

    def __init__(
        self,
        probe: Sharpness,
        *,
        optimizer: Optimizer | None = None,
        edge: float | Callable[[], float] | None = None,
        every: int = 20,
        gradient_every: int = 100,
        ntk_every: int = 200,
        ntk_probe: Tensor | None = None,
    ) -> None:
        if (optimizer is None) == (edge is None):
            raise InputError("give either the optimizer or edge=")
        if min(every, gradient_every, ntk_every) < 1:
            raise InputError("every, gradient_every and ntk_every are steps, at least 1")
        self.probe, self.optimizer, self._edge = probe, optimizer, edge
        self.every, self.gradient_every, self.ntk_every = every, gradient_every, ntk_every
        if ntk_probe is not None and not len(ntk_probe):
            raise InputError("ntk_probe has no examples: give 64 or so, or leave it out")
        self.ntk_probe = ntk_probe
        self.ended: str | None = None
        """Why monitoring ended early, such as a loss that is no number."""
        self._rows: list[dict[str, float]] = []
        self._arrived = False
        self._kernels: dict[str, Tensor] = {}
        self._outputs: list[Tensor] = []

    def after_step(self, step: int) -> None:
        """Measure, if this step is due. A run that diverges ends the monitoring and keeps the table."""
        if self.ended is not None:
            return
        last = self._rows[-1] if self._rows else None
        near = last is not None and not self._arrived and last["ratio"] > DENSE_ABOVE
        if step % self.every and not (near and step % DENSE_EVERY == 0):
            self._follow_kernel(step)
            return
        try:
            edge = self._current_edge()
            gradient = edge.precondition is None and (near or step % self.gradient_every == 0)
            m = self.probe.measure(gradient, precondition=edge.precondition)
        except InputError:
            raise
        except FairtrialError as error:
            self.ended = f"step {step}: {error}"
            logger.warning("monitoring ended at %s", self.ended)
            return
        row = dict.fromkeys(COLUMNS, float("nan"))
        row |= {
            "step": step, "loss": m.loss, "sharpness": m.value, "residual": m.residual, "edge": edge.value,
            "ratio": m.value / edge.value, "cos": m.cos, "A": m.A, "kappa": m.kappa, "alpha": m.alpha, "beta": m.beta,
            "grad_along": m.grad_along, "unrest": self._unrest(m, edge.decay), "products": m.products,
            "seconds": m.seconds,
        }  # fmt: skip
        self._rows.append(row)
        self._arrived |= row["ratio"] >= APPROACH[1]
        self._follow_kernel(step)

    @property
    def frame(self) -> pd.DataFrame:
        """A row a measurement, columns as :data:`COLUMNS`; what was not due is nan."""
        frame = pd.DataFrame(self._rows, columns=list(COLUMNS))
        return frame.astype({"step": int})

    def report(self) -> StabilityReport:
        """Read regime, plateau, oscillation, rate and critical decay off the table.

        Raises
        ------
        InputError
            With fewer than 12 measurements.
        """
        return read(self.frame)

    def _current_edge(self) -> Edge:
        if self.optimizer is not None:
            edge = edge_of(self.optimizer)
        else:
            edge = Edge(float(self._edge() if callable(self._edge) else self._edge))  # type: ignore[arg-type]
        if not edge.value > 0:
            raise InputError(f"the edge is {edge.value:.4g}: it must be positive, or decay alone is unstable")
        if edge.precondition is not None:
            given = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]  # type: ignore[union-attr]
            if list(map(id, given)) != list(map(id, self.probe.parameters)):
                raise InputError("the probe and Adam have other parameters, or in another order: give both the same")
        return edge

    def _unrest(self, m: SharpnessMeasurement, decay: float) -> float:
        theta = flatten([p.detach() for p in self.probe.parameters])
        return float((m.loss_gradient + decay * theta).norm() / m.loss_gradient.norm().clamp_min(1e-30))

    def _follow_kernel(self, step: int) -> None:
        """Measure the tangent kernel every ``ntk_every`` steps, and at the two steps after it what has moved."""
        if self.ntk_probe is None:
            return
        since = step % self.ntk_every
        if since > 2 or not self._rows:
            return
        model = self.probe.model
        with torch.no_grad():
            outputs = model(self.ntk_probe).reshape(len(self.ntk_probe), -1)
        along = direction(outputs.shape[1]).to(outputs)
        self._outputs = [*self._outputs, outputs @ along] if since else [outputs @ along]
        if since == 2:
            if len(self._outputs) == 3:
                before, now = (b - a for a, b in zip(self._outputs, self._outputs[1:], strict=False))
                top = self._kernels["eigenvector"]
                self._rows[-1]["flip"] = float(torch.sign(before @ top) != torch.sign(now @ top))
            return
        kernel = tangent_kernel(model, self.ntk_probe, projection=along)
        if since == 0:
            first = self._kernels.setdefault("first", kernel)
            self._kernels["now"] = kernel
            values, vectors = torch.linalg.eigh(kernel)
            self._kernels["eigenvector"] = vectors[:, -1]
            self._rows[-1]["ntk_drift"] = float((kernel - first).norm() / first.norm())
            self._rows[-1]["ntk_top"] = float(values[-1]) / len(kernel)
        elif "now" in self._kernels:
            now = self._kernels["now"]
            self._rows[-1]["ntk_velocity"] = float((kernel - now).norm() / now.norm())


def read(frame: pd.DataFrame) -> StabilityReport:
    """Return the report of a monitor's table.

    Raises
    ------
    InputError
        With fewer than 12 measurements.
    """
    if len(frame) < 12:
        raise InputError(f"{len(frame)} measurements: a report needs at least 12; train longer or measure more often")
    from scipy.stats import theilslopes

    ratio = frame["ratio"]
    reached = np.flatnonzero(ratio >= 0.95)
    before = frame.iloc[: max(reached[0], 2)] if len(reached) else frame
    slope, _, slope_low, slope_high = theilslopes(before["sharpness"], before["step"])
    start = frame["step"].iloc[0] + (frame["step"].iloc[-1] - frame["step"].iloc[0]) * 2 / 3
    late = frame[frame["step"] >= start]
    blocks = np.array([block.mean() for block in np.array_split(late["ratio"].to_numpy(), 4) if len(block)])
    plateau = mean_interval(blocks)
    window = min(RUNNING_MEDIAN, len(late))
    detrended = late["sharpness"] - late["sharpness"].rolling(window, center=True, min_periods=1).median()
    swing = frame["grad_along"].abs()
    amplitude = float(swing[late.index].mean())
    rising = len(late) > 2 and theilslopes(late["ratio"], late["step"])[0] * np.ptp(late["step"]) > 0.02
    mean = float(late["ratio"].mean())
    if mean >= 0.9 and len(reached):
        arrival = swing.iloc[reached[0] : reached[0] + max(5, len(late) // 2)].mean()
        regime: Any = "edge" if mean >= 0.95 and amplitude > arrival / 2 else "damped edge"
    else:
        regime = "sharpening" if rising else "below edge"
    first_loss, last_loss = late["loss"].iloc[0], late["loss"].iloc[-1]
    return StabilityReport(
        regime=regime,
        plateau_ratio=mean,
        plateau_low=plateau.low,
        plateau_high=plateau.high,
        oscillation=float(detrended.std()),
        amplitude=amplitude,
        steps_to_edge=int(frame["step"].iloc[reached[0]]) if len(reached) else None,
        sharpening_rate=float(slope),
        rate_low=float(slope_low),
        rate_high=float(slope_high),
        unrest=float(late["unrest"].mean()),
        loss_falls=float((first_loss - last_loss) / max(first_loss, 1e-30)),
        prediction=predict_regime(frame),
    )
