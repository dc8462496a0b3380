"""What weight decay does to the sharpness of full-batch gradient descent, and whether the reduced model foretells it.

A cell is one training run. Runs of one network and seed start from the same weights and differ in their decay only;
what compares a run with the one without decay (its slowing, the transition) is measured in the cell that needs it,
from runs shared as stages.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.data.arrays import check_examples, read_labelled
from fairtrial.errors import InputError
from fairtrial.seeds import torch_generator
from fairtrial.trial.declare import (
    Candidate,
    Cell,
    Claim,
    Curve,
    Factor,
    Input,
    Metric,
    Part,
    Trial,
    all_of,
    exact,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch


class EdgeParams(BaseModel):
    """Parameters of the trial ``edge-of-stability``."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Input()] = Field(
        "fashion-mnist", description="a sample, 'tiny' (random, for tests), or an .npz file with x (n, ...) and y (n,)"
    )
    networks: tuple[str, ...] = Field(
        ("mlp", "cnn"),
        min_length=1,
        description="'mlp', 'cnn', or your own as module:function, called with (shape of an example, classes, seed)",
        json_schema_extra={"scope": "plan"},
    )
    decays: tuple[float, ...] = Field(
        (0.0, 0.001, 0.01, 0.015, 0.03, 0.1),
        description="weight decays, 0 among them",
        json_schema_extra={"scope": "plan"},
    )
    claimed: float = Field(0.03, gt=0, description="the decay that claims 1 and 6 speak of, one of decays")
    rates: tuple[float, ...] = Field(
        (0.1,), min_length=1, description="learning rates", json_schema_extra={"scope": "plan"}
    )
    images: int = Field(200, ge=8, description="examples, all of them in every step")
    steps: int = Field(1200, ge=100, description="steps of gradient descent")
    every: int = Field(20, ge=1, description="steps between measurements of the sharpness")
    loss: Literal["mse", "cross-entropy"] = Field(
        "mse", description="half the squared error summed over one-hot classes, or cross-entropy"
    )
    activation: Literal["tanh", "relu"] = Field("tanh", description="of mlp and cnn")
    seeds: int = Field(5, ge=1, description="initialisations", json_schema_extra={"scope": "plan"})
    device: str = Field("cpu", description="a torch device")


# --------------------------------------------------------------------------------------------------------------- stages


@stage(keep=True)
def examples(stages: Any, params: EdgeParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the examples, (n, ...) float32, and their labels (n,) int64."""
    import numpy as np
    import torch

    if Path(params.data).exists():
        arrays = read_own(params.data)
        x, y = torch.from_numpy(arrays["x"][: params.images]).float(), torch.from_numpy(arrays["y"][: params.images])
        x = (x - x.mean()) / x.std().clamp_min(1e-12)
        return x.to(params.device), y.long().to(params.device)
    if params.data == "tiny":
        g = torch_generator(0, "tiny images")
        x, y = torch.randn(params.images, 1, 14, 14, generator=g), torch.from_numpy(np.arange(params.images) % 10)
    else:
        from fairtrial.data.images import garments

        x, y = garments(params.images, size=14)
    return x.to(params.device), y.to(params.device)


def read_own(path: str) -> dict[str, np.ndarray]:
    """Return x and y of an .npz file, checked."""
    import numpy as np

    arrays = read_labelled(path)
    if not np.isfinite(arrays["x"]).all():
        raise InputError(f"{path}: row {int(np.argwhere(~np.isfinite(arrays['x']))[0][0])} of x is not finite")
    return arrays


def network(name: str, params: EdgeParams, shape: tuple[int, ...], classes: int, seed: int) -> torch.nn.Module:
    """Return a network by its name."""
    from torch import nn

    from fairtrial.training.networks import cnn, mlp

    activation = nn.Tanh if params.activation == "tanh" else nn.ReLU
    if name == "mlp":
        return mlp([math.prod(shape), 64, 64, classes], activation=activation, seed=seed)
    if name == "scale-invariant":
        return scale_invariant([math.prod(shape), 64, 64, classes], activation, seed)
    if name == "cnn":
        return cnn(size=shape[-1], classes=classes, activation=activation, seed=seed)
    return factory(name)(shape, classes, seed)


def scale_invariant(sizes: list[int], activation: type[torch.nn.Module], seed: int) -> torch.nn.Module:
    """Return a perceptron whose layers divide by the norm of their weights: no layer's scale matters."""
    from torch import nn

    from fairtrial.training.networks import mlp

    class Direction(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * (weight.shape[0] ** 0.5 / weight.norm())

    model = mlp(sizes, activation=activation, bias=False, seed=seed)
    for layer in model:
        if isinstance(layer, nn.Linear):
            # unsafe: the parametrization has no right inverse; the weights start as they are.
            nn.utils.parametrize.register_parametrization(layer, "weight", Direction(), unsafe=True)
    return model


def factory(name: str) -> Callable[[tuple[int, ...], int, int], torch.nn.Module]:
    """Import what ``module:function`` names."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(f"networks: {name!r} is neither 'mlp', 'cnn' nor module:function")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"networks: cannot import {name!r}: {error}") from error


@stage(save="json")
def run(
    stages: Any, candidate: Candidate, net: str, decay: float, rate: float, seed: int, params: EdgeParams
) -> list[dict[Any, Any]]:
    """Train once by full-batch gradient descent and return the monitor's table, a row a measurement."""
    import torch
    from torch.nn import functional as F

    from fairtrial.training.edge_of_stability.monitor import StabilityMonitor
    from fairtrial.training.edge_of_stability.sharpness import Sharpness

    x, y = stages(examples, params)
    classes = int(y.max()) + 1
    name = "scale-invariant" if candidate.label == "scale-invariant" else net
    model = network(name, params, tuple(x.shape[1:]), classes, seed).to(params.device)

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if params.loss == "mse":
            return 0.5 * (model(batch[0]) - F.one_hot(batch[1], classes)).square().sum(1).mean()
        return F.cross_entropy(model(batch[0]), batch[1])

    at_random = candidate.label == "random-direction"
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=0.0 if at_random else decay)
    monitor = StabilityMonitor(
        Sharpness(model, loss, [(x, y)]), optimizer=optimizer, every=params.every, ntk_probe=x[:64]
    )
    parameters = list(model.parameters())
    g = torch_generator(seed, "direction")
    for step in range(params.steps):
        optimizer.zero_grad()
        loss(model, (x, y)).backward()
        if at_random:
            shrink_at_random(parameters, rate * decay, g)
        optimizer.step()
        monitor.after_step(step)
    return monitor.frame.astype(object).where(monitor.frame.notna(), None).to_dict("records")


def shrink_at_random(parameters: list[torch.Tensor], amount: float, g: torch.Generator) -> None:
    """Move the parameters by ``amount`` of their norm, as decay would, in a random direction."""
    import torch

    with torch.no_grad():
        drawn = [torch.randn(p.shape, generator=g).to(p) for p in parameters]
        norm = sum(float(p.square().sum()) for p in parameters) ** 0.5
        length = sum(float(d.square().sum()) for d in drawn) ** 0.5
        for p, d in zip(parameters, drawn, strict=True):
            p.sub_(d, alpha=amount * norm / length)


# ------------------------------------------------------------------------------------------------------------- measures


def table(stages: Any, label: str, net: str, decay: float, rate: float, seed: int, params: EdgeParams) -> pd.DataFrame:
    """Return a run's table of measurements."""
    import pandas as pd

    candidate = next(c for c in CANDIDATES if c.label == label)
    return pd.DataFrame(stages(run, candidate, net, decay, rate, seed, params)).astype(float)


def measure_run(candidate: Candidate, cell: Cell, params: EdgeParams, stages: Any) -> dict[str, Any]:
    """Read one run beside the same seed's run without decay."""
    from fairtrial.training.edge_of_stability.monitor import read

    if candidate.label == "random-direction" and cell["decay"] != params.claimed:
        return dict.fromkeys(metric.name for metric in RUN_METRICS)
    where = cell["network"], cell["decay"], cell["rate"], cell["seed"], params
    own = table(stages, candidate.label, *where)
    without = table(stages, "weight-decay", cell["network"], 0.0, *where[2:])
    told = read(own)
    fallen = own["loss"].iloc[0] - own["loss"].iloc[-1]
    return {
        "slowing": 1 - early_slope(own, without) / early_slope(without, without) if cell["decay"] else None,
        "plateau_ratio": told.plateau_ratio,
        "oscillation": told.oscillation,
        "lowest_cos": float(own["cos"].min()),
        "last_cos": float(own["cos"].dropna().iloc[-1]),
        "kappa": float(own["kappa"].dropna().iloc[-1]),
        "ntk_velocity": late_velocity(own),
        "ntk_drift": float(own["ntk_drift"].dropna().iloc[-1] / max(fallen, 1e-9)),
        "final_loss": float(own["loss"].iloc[-1]),
        "unrest": told.unrest,
        "sharpness_over_edge": Curve(own["step"].tolist(), own["ratio"].tolist()),
    }


def measure_transition(candidate: Candidate, cell: Cell, params: EdgeParams, stages: Any) -> dict[str, Any]:
    """Read what happens along the grid of decays, from one seed's runs."""
    import numpy as np

    from fairtrial.training.edge_of_stability.monitor import read

    grid = cell["decays"]
    tables = {
        lam: table(stages, candidate.label, cell["network"], lam, cell["rate"], cell["seed"], params) for lam in grid
    }
    told = {lam: read(frame) for lam, frame in tables.items()}
    predicted = told[0.0].prediction.lambda_c
    below = [lam for lam in grid if lam > 0 and told[lam].plateau_ratio < 0.9]
    kept = [lam for lam in grid if lam > 0 and told[lam].plateau_ratio > 0.95]
    miss = damping = None
    if np.isfinite(predicted):
        miss = abs(math.log(below[0] / predicted)) if below and predicted > 0 else math.inf
    if kept:
        damping = math.log(told[kept[-1]].oscillation / told[0.0].oscillation)
    return {
        "critical_decay": predicted if np.isfinite(predicted) else None,
        "transition": below[0] if below else math.inf,
        "miss": miss,
        "damping": damping,
        "ntk_trend": float(np.polyfit(grid, [math.log(late_velocity(frame)) for frame in tables.values()], 1)[0]),
    }


def measure_control(candidate: Candidate, cell: Cell, params: EdgeParams, stages: Any) -> dict[str, Any]:
    """Read a run whose outcome is known: decay must raise the sharpness, or the edge stay out of reach."""
    from fairtrial.training.edge_of_stability.monitor import read

    flow = candidate.label == "gradient-flow"
    rate, decay = (params.rates[0] / 100, 0.0) if flow else (params.rates[0], params.claimed)
    rows = table(stages, candidate.label, "mlp", decay, rate, cell["seed"], params)
    return {
        "kappa": float(rows["kappa"].dropna().iloc[-1]),
        "last_cos": float(rows["cos"].dropna().iloc[-1]),
        "plateau_ratio": read(rows).plateau_ratio,
    }


def early_slope(own: pd.DataFrame, without: pd.DataFrame) -> float:
    """Return the slope of the sharpness a step, over the steps in which the run without decay approached the edge."""
    from scipy.stats import theilslopes

    reached = without["step"][without["ratio"] >= 0.95]
    end = reached.iloc[0] if len(reached) else without["step"].iloc[-1]
    rows = own[own["step"] <= max(end, own["step"].iloc[min(3, len(own) - 1)])]
    return float(theilslopes(rows["sharpness"], rows["step"])[0])


def late_velocity(frame: pd.DataFrame) -> float:
    """Return the mean velocity of the tangent kernel over the later half of its measurements."""
    velocity = frame["ntk_velocity"].dropna()
    return float(velocity.iloc[len(velocity) // 2 :].mean())


# ---------------------------------------------------------------------------------------------------------------- parts

USES = ("sharpness", "monitor", "reduced")
CANDIDATES = (
    Candidate("weight-decay", "method", uses=USES),
    Candidate("random-direction", "control", uses=USES),
    Candidate("scale-invariant", "control", uses=USES),
    Candidate("gradient-flow", "control", uses=USES),
)
RUN_METRICS = (
    Metric("slowing", "of the slope without decay"),
    Metric("plateau_ratio", "of the edge", higher_is_better=False),
    Metric("oscillation", "of the sharpness", higher_is_better=False),
    Metric("lowest_cos", ""),
    Metric("last_cos", ""),
    Metric("kappa", ""),
    Metric("ntk_velocity", "a step", higher_is_better=False),
    Metric("ntk_drift", "a unit of loss", higher_is_better=False),
    Metric("final_loss", "", higher_is_better=False),
    Metric("unrest", "", higher_is_better=False),
    Metric("sharpness_over_edge", ""),
)


def parts(params: EdgeParams) -> tuple[Part, ...]:
    """Return the parts: single runs, the transition along the grid of decays, and runs whose outcome is known."""
    decays = sorted(set(params.decays))
    if decays[0] != 0 or params.claimed not in decays:
        raise InputError(f"decays={list(params.decays)}: 0 and claimed={params.claimed:g} must be among them")
    seed = Factor("seed", range(params.seeds), kind="replicate", most=max(40, params.seeds))
    network_, rate = Factor("network", params.networks), Factor("rate", params.rates)
    both: list[str] = [name for name in ("mlp", "cnn") if name in params.networks] or list(params.networks)

    def by_network(id: str, text: str, claim: Callable[[str], Claim]) -> Any:
        return all_of(id, text, *(claim(name) for name in both))

    runs = Part(
        name="runs",
        candidates=CANDIDATES[:2],
        metrics=RUN_METRICS,
        factors=(network_, rate, Factor("decay", decays), seed),
        variance="independent",
        claims=(
            by_network(
                "C1",
                f"A weight decay of {params.claimed:g} slows the sharpening on the way to the edge.",
                lambda name: Claim(
                    f"C1-{name}", f"in {name}",
                    level("weight-decay", "slowing", {"network": name, "decay": params.claimed}), above=0,
                ),
            ),
            exact(
                "C4",
                "Parameters and the gradient of the sharpness are positively aligned at every measurement.",
                aligned,
            ),
            by_network(
                "C6",
                "Decay in a random direction, of the same length, slows sharpening by less than a tenth (the control).",
                lambda name: Claim(
                    f"C6-{name}", f"in {name}",
                    level("random-direction", "slowing", {"network": name, "decay": params.claimed}), below=0.1,
                ),
            ),
            *(
                report(f"R1-{name}", f"cosine of parameters and grad S at the end, without decay, in {name}",
                       level("weight-decay", "last_cos", {"network": name, "decay": 0.0}))
                for name in params.networks
            ),
            *(
                report(f"R2-{name}", f"sharpness over edge in the last third, at {params.claimed:g}, in {name}",
                       level("weight-decay", "plateau_ratio", {"network": name, "decay": params.claimed}))
                for name in params.networks
            ),
        ),
        measure=measure_run,
        group=("network", "rate", "seed"),
    )  # fmt: skip
    transition = Part(
        name="transition",
        candidates=CANDIDATES[:1],
        metrics=(
            Metric("critical_decay", "predicted from the run without decay"),
            Metric("transition", "smallest decay with sharpness below 0.9 of the edge", higher_is_better=False),
            Metric("miss", "|log| of transition over prediction", higher_is_better=False),
            Metric("damping", "log of the oscillation over that without decay", higher_is_better=False),
            Metric("ntk_trend", "slope of the log of its late velocity on the decay", higher_is_better=False),
        ),
        factors=(network_, rate, Factor("decays", [decays]), seed),
        variance="independent",
        claims=(
            Claim(
                "C2",
                "In perceptrons sharpness settles below 0.9 of the edge at some weight decay of the grid, and the "
                "smallest such is within a factor of 3 of the one predicted from the run without decay.",
                level("weight-decay", "miss", {"network": "mlp"}),
                below=math.log(3),
            ),
            Claim(
                "C3",
                "In convolutional networks the largest decay that stays at the edge cuts the oscillation of the "
                "sharpness below 0.7 times that without decay.",
                level("weight-decay", "damping", {"network": "cnn"}),
                below=math.log(0.7),
            ),
            by_network(
                "C5",
                "The tangent kernel moves more slowly the larger the weight decay.",
                lambda name: Claim(
                    f"C5-{name}", f"in {name}", level("weight-decay", "ntk_trend", {"network": name}), below=0
                ),
            ),
            *(
                report(f"R3-{name}", f"critical decay predicted for {name}",
                       level("weight-decay", "critical_decay", {"network": name}))
                for name in params.networks
            ),
        ),
        measure=measure_transition,
        group=("network", "rate", "seed"),
    )  # fmt: skip
    known = Part(
        name="controls",
        candidates=CANDIDATES[0:1] + CANDIDATES[2:],
        metrics=(
            Metric("kappa", ""),
            Metric("last_cos", ""),
            Metric("plateau_ratio", "of the edge", higher_is_better=False),
        ),
        factors=(seed,),
        variance="independent",
        claims=(
            report("R4", "kappa of a scale-invariant network, -2 by theory", level("scale-invariant", "kappa")),
            report("R5", "sharpness over edge of gradient descent with a hundredth of the step",
                   level("gradient-flow", "plateau_ratio")),
        ),
        measure=measure_control,
        group=("seed",),
    )  # fmt: skip
    return runs, transition, known


def aligned(frame: pd.DataFrame) -> bool | str:
    """Return whether every run's lowest cosine is positive, or which is not."""
    lowest = frame.loc[frame["candidate"] == "weight-decay"].sort_values("lowest_cos").iloc[0]
    if lowest["lowest_cos"] > 0:
        return True
    return f"{lowest['network']}, decay {lowest['decay']:g}, seed {lowest['seed']}: cosine {lowest['lowest_cos']:.3g}"


def check(params: EdgeParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    check_examples("data", params.data, read_own)
    for name in params.networks:
        if name not in ("mlp", "cnn"):
            factory(name)


trial = Trial(
    name="edge_of_stability",
    params=EdgeParams,
    parts=parts,
    presets={
        "smoke": {
            "data": "tiny", "networks": ("mlp",), "decays": (0.0, 0.03), "images": 12, "steps": 100, "every": 8,
            "seeds": 2,
        },
        "full": {
            "decays": (0.0, 0.001, 0.01, 0.015, 0.02, 0.03, 0.1), "rates": (0.05, 0.1), "images": 400, "steps": 3000,
            "seeds": 8,
        },
    },
    check=check,
)  # fmt: skip
