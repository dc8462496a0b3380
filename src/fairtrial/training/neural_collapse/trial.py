"""Whether the exact dynamics describe gradient descent, where cross-entropy slows down, and what real classifiers do.

Parts: ``trajectories`` compares spectral dynamics with gradient descent on the two layers; ``slowdown`` and ``width``
are exact computations without any draw; ``classifier`` trains on real images and watches V beside the classical NC1.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.data.arrays import check_examples, read_labelled
from fairtrial.errors import InputError
from fairtrial.seeds import generator, torch_generator
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
    contrast,
    exact,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

RECORDS = 40  # of a trajectory, on a grid of log time
STEP = 0.05  # of gradient descent


class CollapseParams(BaseModel):
    """Parameters of the trial ``neural-collapse``."""

    model_config = ConfigDict(extra="forbid")

    classes: tuple[int, ...] = Field((4, 8, 16), description="numbers of classes, powers of 2")
    seeds: int = Field(5, ge=1, description="draws of the start", json_schema_extra={"scope": "plan"})
    ratios: tuple[float, ...] = Field((4.0, 8.0, 12.0, 16.0), description="of fast to slow modes, for the slowdown")
    data: Annotated[str, Input()] = Field(
        "fashion-mnist", description="a sample, 'tiny' (random, for tests), or an .npz file with x (n, ...) and y (n,)"
    )
    examples: int = Field(2000, ge=20, description="examples of the classifier")
    epochs: int = Field(20, ge=4, description="epochs of the classifier, measured after each")


# --------------------------------------------------------------------------------------------------------------- stages


@stage()
def descent(stages: Any, k: int, start: str, width: int, seed: int, params: CollapseParams) -> dict[str, Any]:
    """Train W2 W1 by gradient descent; return times, losses and the sorted singular values of the logits.

    Records run from the loss 0.9 log K down to 0.01 on a grid of log time, or to 2e5 steps where the width cannot
    bring the loss down.
    """
    import numpy as np

    from fairtrial.training.neural_collapse.network import spectral_network

    if start == "spectral":
        s0 = np.zeros(k - 1)
        active = generator(seed, "modes", k, width).permutation(k - 1)[: min(width, k - 1)]
        s0[active] = 0.05 * np.exp(0.5 * generator(seed, "spectrum", k, width).standard_normal(len(active)))
        net = spectral_network(k, width, s0, seed=seed)
        w1, w2 = (layer.weight.detach().numpy().copy() for layer in net)
    else:
        s0, rng = None, generator(seed, "start", k, width)
        w1, w2 = (0.05 * rng.standard_normal(shape) for shape in ((width, k), (k, width)))
    times, losses, spectra, largest = [], [], [], 200_000
    grid = iter(np.unique(np.geomspace(1, largest, 1500).astype(int)).tolist())
    due = next(grid)
    identity = np.eye(k)
    for step in range(1, largest + 1):
        z = w2 @ w1
        p = np.exp(z - z.max(0))
        p /= p.sum(0)
        if step == due:
            loss = float(-np.log(p.diagonal()).mean())
            times.append((step - 1) * STEP)
            losses.append(loss)
            spectra.append(np.linalg.svd(z - z.mean(0), compute_uv=False)[: k - 1])
            due = next(grid, largest + 1)
            if loss < 0.01:
                break
        error = STEP / k * (p - identity)
        w1, w2 = w1 - w2.T @ error, w2 - error @ w1.T
    return {"times": np.array(times), "losses": np.array(losses), "spectra": np.array(spectra), "s0": s0}


@stage(save="json")
def classifier(stages: Any, seed: int, params: CollapseParams) -> dict[str, list[float]]:
    """Train a network on real images and return, after each epoch, V, NC1, NC3 and the training loss."""
    import torch
    from torch.nn import functional as F

    from fairtrial.training.networks import mlp
    from fairtrial.training.neural_collapse.tracker import CollapseTracker

    x, y = stages(images, params)
    chosen = torch.from_numpy(generator(seed, "images").permutation(len(y))[: params.examples])
    x, y = x[chosen], y[chosen]
    model = mlp([x[0].numel(), 256, 64, int(y.max()) + 1], activation=torch.nn.ReLU, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    tracker = CollapseTracker(model, head="5", loader=[(x, y)])
    g = torch_generator(seed, "batches")
    losses = []
    for _ in range(params.epochs):
        for rows in torch.randperm(len(y), generator=g).split(50):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        tracker.measure()
        with torch.no_grad():
            losses.append(float(F.cross_entropy(model(x), y)))
    history = tracker.history
    return {
        "v": [r.v_logit for r in history], "nc1": [r.nc1 for r in history], "nc3": [r.nc3 for r in history],
        "angle": [r.nc2_angle for r in history], "loss": losses,
    }  # fmt: skip


@stage(keep=True)
def images(stages: Any, params: CollapseParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pool of images and their labels."""
    import torch

    if params.data == "tiny":
        rng = generator(0, "tiny images")
        y = torch.arange(2 * params.examples) % 3
        return torch.from_numpy(rng.standard_normal((len(y), 6))).float() + 2 * torch.eye(6)[y], y
    if Path(params.data).exists():
        arrays = read_labelled(params.data)
        x = torch.from_numpy(arrays["x"]).float()
        return (x - x.mean()) / x.std().clamp_min(1e-12), torch.from_numpy(arrays["y"]).long()
    from fairtrial.data.images import garments

    return garments(max(10_000, params.examples), size=14)


# ------------------------------------------------------------------------------------------------------------- measures


def measure_trajectory(candidate: Candidate, cell: Cell, params: CollapseParams, stages: Any) -> dict[str, Any]:
    """Follow the spectrum by a candidate's dynamics from where gradient descent is taken over, and compare."""
    import numpy as np

    from fairtrial.training.neural_collapse.modes import lyapunov

    k, start = cell["classes"], cell["start"]
    width = {"narrow": k // 2, "enough": k - 1, "wide": 2 * k}[cell["width"]]
    truth = stages(descent, k, start, width, cell["seed"], params)
    began = 0 if start == "spectral" else int(np.argmax(truth["losses"] <= 0.9 * math.log(k)))
    times, spectra = truth["times"][began:], truth["spectra"][began:]
    since = times - times[0]
    rows = np.unique(np.linspace(1, len(since) - 1, RECORDS).astype(int))
    first = truth["s0"] if start == "spectral" else np.where(spectra[0] > 1e-9 * spectra[0, 0], spectra[0], 0.0)
    followed = follow(candidate.label, first, since[rows], k)
    error = np.sort(followed, axis=1)[:, ::-1] - spectra[rows]
    active = spectra[-1] > 1e-9
    v = lyapunov(spectra[:, : active.sum()]) if active.any() else np.zeros(len(spectra))
    return {
        "error": float(np.sqrt((error**2).mean() / (spectra[rows] ** 2).mean())),
        "rises": float((np.diff(v) > 1e-10).mean()) if candidate.label == "spectral-dynamics" else None,
        "largest_mode": Curve(since[rows].tolist(), followed.max(1).tolist()),
    }


def follow(label: str, s0: np.ndarray, times: np.ndarray, k: int) -> np.ndarray:
    """Return the modes (T, K - 1) at ``times`` (T,)."""
    import numpy as np

    from fairtrial.training.neural_collapse.flow import spectral_flow

    if label == "frozen":
        return np.repeat(s0[None], len(times), axis=0)
    if label == "squared-loss-dynamics":
        shrunk = np.exp(-2 / k * times)[:, None]
        return s0 / (s0 + (1 - s0) * shrunk)
    return spectral_flow(s0, t_max=float(times[-1])).at(np.log(times))


def measure_slowdown(candidate: Candidate, cell: Cell, params: CollapseParams, stages: Any) -> dict[str, Any]:
    """Return log10 of the time until V falls below 0.01, from modes 0.1 (r, r, 1) of four classes."""
    import numpy as np

    from fairtrial.training.neural_collapse.flow import time_to_collapse
    from fairtrial.training.neural_collapse.modes import lyapunov

    s0 = 0.1 * np.array([cell["ratio"], cell["ratio"], 1.0])
    if candidate.label == "spectral-dynamics":
        return {"log10_time": time_to_collapse(s0, 0.01) / math.log(10)}
    grid = np.linspace(-2, 3, 4000)
    modes = follow("squared-loss-dynamics", s0, 10**grid, 4)
    return {"log10_time": float(grid[np.argmax(lyapunov(modes) < 0.01)])}


def measure_width(candidate: Candidate, cell: Cell, params: CollapseParams, stages: Any) -> dict[str, Any]:
    """Follow a network of fewer modes than log2 K, for a long time."""
    import numpy as np

    from fairtrial.training.neural_collapse.flow import spectral_flow
    from fairtrial.training.neural_collapse.modes import logit_vector

    k, width = cell["classes"], cell["modes"]
    s0 = np.zeros(k - 1)
    s0[[2**i - 1 for i in range(width)]] = 0.1 if candidate.label == "spectral-dynamics" else 0.0
    flow = spectral_flow(s0, t_max=1e12 if candidate.label == "spectral-dynamics" else 1.0)
    z = logit_vector(flow.s[-1])
    return {
        "loss": float(flow.loss[-1]),
        "excess": float(flow.loss[-1]) - (math.log(k) - width * math.log(2)),
        "confounded": float((z > z[0] - 1e-6).sum()),
    }


def measure_classifier(candidate: Candidate, cell: Cell, params: CollapseParams, stages: Any) -> dict[str, Any]:
    """Correlate a progress measure with NC1 over the epochs of one training run."""
    import numpy as np
    from scipy.stats import spearmanr

    told = stages(classifier, cell["seed"], params)
    measures = {
        "V": told["v"], "etf-angle": told["angle"],
        "shuffled-epochs": generator(cell["seed"], "shuffled").permutation(told["v"]).tolist(),
    }  # fmt: skip
    values = measures[candidate.label]
    known = np.isfinite(values)
    return {
        "spearman": float(spearmanr(np.array(values)[known], np.array(told["nc1"])[known])[0]),
        "value": Curve(list(range(1, len(values) + 1)), [v if math.isfinite(v) else 0.0 for v in values]),
        "nc1": told["nc1"][-1],
    }


# ---------------------------------------------------------------------------------------------------------------- parts

DYNAMICS = (
    Candidate("spectral-dynamics", "method", uses=("flow", "modes")),
    Candidate("squared-loss-dynamics", "baseline"),
    Candidate("frozen", "control"),
)


def parts(params: CollapseParams) -> tuple[Part, ...]:
    """Return the parts: trajectories, slowdown, width and a real classifier."""
    seed = Factor("seed", range(params.seeds), kind="replicate", most=max(40, params.seeds))

    def followed(id: str, where: dict[str, Any]) -> Claim:
        quantity = level("spectral-dynamics", "error", {"start": "spectral", **where})
        return Claim(id, ", ".join(f"{k} {v}" for k, v in where.items()), quantity, below=0.02)

    trajectories = Part(
        name="trajectories",
        candidates=DYNAMICS,
        metrics=(
            Metric("error", "relative", higher_is_better=False),
            Metric("rises", "of the records", higher_is_better=False),
            Metric("largest_mode", ""),
        ),
        factors=(
            Factor("classes", params.classes), Factor("start", ("spectral", "random")),
            Factor("width", ("narrow", "enough", "wide")), seed,
        ),
        variance="independent",
        claims=(
            all_of(
                "C1a",
                "From a spectral start the exact dynamics follow gradient descent within 2 %.",
                *(followed(f"C1a-{k}", {"classes": k}) for k in params.classes),
            ),
            exact("C1b", "From a spectral start the Lyapunov value never rises.", never_rises),
            Claim(
                "C2",
                "From a small random start their error is at least three times below that of squared-loss dynamics.",
                contrast({
                    ("spectral-dynamics", "error", (("start", "random"),)): -3.0,
                    ("squared-loss-dynamics", "error", (("start", "random"),)): 1.0,
                }),
                above=0,
            ),
            *(
                report(f"R1-{k}", f"records in which V rises from a small random start, {k} classes",
                       level("spectral-dynamics", "rises", {"start": "random", "classes": k}))
                for k in params.classes
            ),
        ),
        measure=measure_trajectory,
        group=("classes", "start", "width", "seed"),
    )  # fmt: skip
    slowdown = Part(
        name="slowdown",
        candidates=DYNAMICS[:2],
        metrics=(Metric("log10_time", "of the flow", higher_is_better=False, exact=True),),
        factors=(Factor("ratio", params.ratios),),
        variance="independent",
        claims=(
            exact(
                "C3",
                "The logarithm of the time to collapse grows by over 0.3 a unit of the ratio of modes under "
                "cross-entropy, and by less than 0.05 under squared loss.",
                slows_down,
            ),
        ),
        measure=measure_slowdown,
    )
    width = Part(
        name="width",
        candidates=(DYNAMICS[0], DYNAMICS[2]),
        metrics=(
            Metric("loss", "nats", higher_is_better=False, exact=True),
            Metric("excess", "over log(K / 2^h)", higher_is_better=False, exact=True),
            Metric("confounded", "classes", higher_is_better=False, exact=True),
        ),
        factors=(Factor("classes", [k for k in params.classes if k > 4] or [8]), Factor("modes", (1, 2))),
        variance="independent",
        claims=(
            exact(
                "C4",
                "h modes, fewer than log2 K, leave the loss above log(K / 2^h) and K / 2^h classes confounded.",
                stays_above,
            ),
        ),
        measure=measure_width,
    )
    real = Part(
        name="classifier",
        candidates=(
            Candidate("V", "method", uses=("report", "tracker", "modes")),
            Candidate("etf-angle", "baseline", uses=("report", "tracker")),
            Candidate("shuffled-epochs", "control", uses=("report", "tracker")),
        ),
        metrics=(
            Metric("spearman", "with NC1 over epochs"), Metric("value", ""), Metric("nc1", "", higher_is_better=False),
        ),
        factors=(seed,),
        variance="independent",
        claims=(
            Claim("C5", "On a real classifier V and NC1 fall together over epochs, by a rank correlation over 0.7.",
                  level("V", "spearman"), above=0.7),
            report("R2", "rank correlation with NC1 of the largest deviation from the simplex's angles",
                   level("etf-angle", "spearman")),
        ),
        measure=measure_classifier,
        group=("seed",),
    )  # fmt: skip
    return trajectories, slowdown, width, real


def never_rises(frame: pd.DataFrame) -> bool | str:
    """Return whether V fell in every record of a spectral start whose modes were all there."""
    rows = frame[
        (frame["candidate"] == "spectral-dynamics") & (frame["start"] == "spectral") & (frame["width"] != "narrow")
    ]
    worst = rows.sort_values("rises").iloc[-1]
    return True if worst["rises"] == 0 else f"it rose in {worst['rises']:.1%} of {worst['classes']} classes' records"


def slows_down(frame: pd.DataFrame) -> bool | str:
    """Return whether the slopes of log time on the ratio are on their sides of the bounds."""
    import numpy as np

    slopes = {
        label: float(np.polyfit(rows["ratio"], rows["log10_time"], 1)[0]) for label, rows in frame.groupby("candidate")
    }
    ce, squared = slopes["spectral-dynamics"], slopes["squared-loss-dynamics"]
    return True if ce > 0.3 and squared < 0.05 else f"slopes {ce:.3f} and {squared:.3f}"


def stays_above(frame: pd.DataFrame) -> bool | str:
    """Return whether the loss stayed above its bound and as many classes as foretold share the largest logit."""
    rows = frame[(frame["candidate"] == "spectral-dynamics") & (2.0 ** frame["modes"] < frame["classes"])]
    bad = rows[(rows["excess"] < -1e-9) | (rows["confounded"] != rows["classes"] / 2.0 ** rows["modes"])]
    return True if bad.empty else f"{int(bad.iloc[0]['classes'])} classes, {int(bad.iloc[0]['modes'])} modes: not so"


def check(params: CollapseParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    for k in params.classes:
        if k < 4 or k & (k - 1):
            raise InputError(f"classes={list(params.classes)}: {k} is no power of 2 from 4 on")
    check_examples("data", params.data, read_labelled)


trial = Trial(
    name="neural_collapse",
    params=CollapseParams,
    parts=parts,
    presets={
        "smoke": {
            "classes": (4,), "seeds": 2, "ratios": (4.0, 8.0), "data": "tiny", "examples": 60, "epochs": 5,
        },
        "full": {"classes": (4, 8, 16, 32), "seeds": 20, "examples": 10_000, "epochs": 60},
    },
    check=check,
)  # fmt: skip
