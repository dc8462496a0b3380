"""Which signal of a training run tells how it generalises, over runs of different width, step, decay and label noise.

A cell is one run; all candidates read the same run, but for the codes that need a training of their own. Regret and
the gap between test and training error both contain minus the training loss, so that a correlation over runs that fit
differently says little by itself: the partial correlations at a given label noise, among runs that interpolate, stand
beside it.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.data.arrays import check_examples, read_labelled
from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.trial.declare import (
    Candidate,
    Cell,
    Claim,
    Factor,
    Input,
    Metric,
    Part,
    Trial,
    all_of,
    level,
    report,
    stage,
    statistic,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

MOST = 960  # runs a trial may grow to


class PrequentialParams(BaseModel):
    """Parameters of the trial ``prequential``."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Input()] = Field(
        "fashion-mnist", description="a sample, 'tiny' (random, for tests), or an .npz file with x (n, ...) and y (n,)"
    )
    examples: int = Field(1000, ge=40, description="training examples of a run")
    test_examples: int = Field(2000, ge=40, description="test examples")
    widths: tuple[int, ...] = Field((16, 64, 256), description="hidden units")
    rates: tuple[float, ...] = Field((0.01, 0.03), description="learning rates of SGD with momentum 0.9")
    decays: tuple[float, ...] = Field((0.0, 1e-3), description="weight decays")
    noises: tuple[float, ...] = Field((0.0, 0.2, 0.4, 0.6), description="shares of flipped labels")
    epochs: int = Field(25, ge=2, description="epochs of a run")
    batch: int = Field(50, ge=2, description="examples of a step")
    runs: int = Field(
        48, ge=8, le=MOST, description="runs; 48 are every combination once", json_schema_extra={"scope": "plan"}
    )


def settings(run: int, params: PrequentialParams) -> dict[str, Any]:
    """Return the settings of a run: all combinations in turn, then all again from other seeds."""
    grid = list(itertools.product(params.noises, params.widths, params.rates, params.decays))
    noise, width, rate, decay = grid[run % len(grid)]
    return {"noise": noise, "width": width, "rate": rate, "decay": decay}


# --------------------------------------------------------------------------------------------------------------- stages


@stage(keep=True)
def examples(stages: Any, params: PrequentialParams) -> dict[str, torch.Tensor]:
    """Return ``x`` and ``y`` of the training pool and ``test_x``, ``test_y``."""
    import torch

    if params.data == "tiny":
        rng = generator(0, "tiny examples")
        x = torch.from_numpy(rng.standard_normal((4 * params.examples, 12))).float()
        y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        return {"x": x[: -len(x) // 2], "y": y[: -len(y) // 2], "test_x": x[len(x) // 2 :], "test_y": y[len(y) // 2 :]}
    if Path(params.data).exists():
        arrays = read_labelled(params.data)
        order = generator(0, "split").permutation(len(arrays["y"]))
        x = torch.from_numpy(arrays["x"][order]).float().flatten(1)
        x, y = (x - x.mean(0)) / x.std(0).clamp_min(1e-6), torch.from_numpy(arrays["y"][order]).long()
        held = min(params.test_examples, len(y) // 2)
        if len(y) - held < params.examples:
            raise InputError(f"data={params.data}: {len(y)} rows leave {len(y) - held} to train on: fewer examples=")
        return {"x": x[held:], "y": y[held:], "test_x": x[:held], "test_y": y[:held]}
    from fairtrial.data.images import garments

    x, y = garments(max(4000, params.examples))
    test_x, test_y = garments(params.test_examples, split="test")
    return {"x": x.flatten(1), "y": y, "test_x": test_x.flatten(1), "test_y": test_y}


def data_of(stages: Any, run: int, params: PrequentialParams) -> dict[str, Any]:
    """Return a run's training examples with their noisy labels, and the test set with labels of the same noise."""
    import torch

    pool = stages(examples, params)
    noise, classes = settings(run, params)["noise"], int(pool["y"].max()) + 1
    rng = generator(run, "data")
    chosen = torch.from_numpy(rng.permutation(len(pool["y"]))[: params.examples])

    def flipped(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wrong = torch.from_numpy(rng.random(len(y)) < noise)
        other = (y + torch.from_numpy(rng.integers(1, classes, size=len(y)))) % classes
        return torch.where(wrong, other, y), wrong

    y, wrong = flipped(pool["y"][chosen])
    test_y, _ = flipped(pool["test_y"])
    return {"x": pool["x"][chosen], "y": y, "wrong": wrong, "test_x": pool["test_x"], "test_y": test_y,
            "clean_y": pool["test_y"], "classes": classes}  # fmt: skip


@stage(save="json")
def trained(stages: Any, how: str, run: int, params: PrequentialParams) -> dict[str, float | None]:
    """Train one network and return every signal that can be read off this training.

    ``how``: ``replay`` releases the examples gradually; ``plain`` shuffles them every epoch; ``held-out`` is plain on
    nine tenths; ``shuffled`` replays labels in random order.
    """
    import numpy as np
    import torch
    from torch.nn import functional as F

    from fairtrial.training.networks import mlp
    from fairtrial.training.prequential.meter import PrequentialMeter
    from fairtrial.training.prequential.sampler import PrequentialSampler

    chosen, data = settings(run, params), data_of(stages, run, params)
    x, y, classes = data["x"], data["y"], data["classes"]
    if how == "shuffled":
        y = y[torch.from_numpy(generator(run, "shuffled").permutation(len(y)))]
    held = len(y) // 10 if how == "held-out" else 0
    valid_x, valid_y, x, y = x[:held], y[:held], x[held:], y[held:]
    n = len(y)
    steps = params.epochs * math.ceil(n / params.batch)
    model = mlp([x.shape[1], chosen["width"], classes], activation=torch.nn.ReLU, seed=run)
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=chosen["rate"], momentum=0.9, weight_decay=chosen["decay"])
    meter = PrequentialMeter(n, classes, trajectory=True)
    replay = PrequentialSampler(n, steps, params.batch, seed=run)
    rng = generator(run, "batches")
    epoch: list[Any] = []
    for step, batch in enumerate(replay):
        if how in ("replay", "shuffled"):
            indices = torch.tensor(batch)
            block = torch.from_numpy(replay.arrivals(step).copy())
            fresh = block[~torch.isin(block, indices)]
            if len(fresh):  # more arrive than fit into the batch
                with torch.no_grad():
                    meter.code(fresh, model(x[fresh]), y[fresh])
        else:
            epoch = epoch or list(torch.from_numpy(rng.permutation(n)).split(params.batch))
            indices = epoch.pop()
        logits = model(x[indices])
        meter.update(indices, logits, y[indices])
        optimizer.zero_grad()
        F.cross_entropy(logits, y[indices]).backward()
        optimizer.step()
    told = meter.finish(model, [(torch.arange(n), x, y)])

    def error(inputs: torch.Tensor, labels: torch.Tensor) -> float:
        return float((model(inputs).argmax(1) != labels).float().mean())

    with torch.no_grad():
        end = torch.cat([p.reshape(-1) for p in model.parameters()])
        test_loss = float(F.cross_entropy(model(data["test_x"]), data["test_y"]))
        values: dict[str, float | None] = {
            "regret": told.regret / n,
            "code_length": told.code_length / n,
            "trajectory": told.trajectory,
            "sum_of_losses": told.sum_of_losses,
            "final_loss": told.mean_final_loss,
            "norm": float(end.square().sum()),
            "distance": float((end - start).norm()),
            "path_norm": path_norm(model),
            "train_error": told.train_error,
            "gap": error(data["test_x"], data["test_y"]) - told.train_error,
            "loss_gap": test_loss - told.mean_final_loss,
            "test_error": error(data["test_x"], data["clean_y"]),
            "validation": error(valid_x, valid_y) - told.train_error if held else None,
            "auroc": None,
            "sharpness": None,
        }
    if how in ("replay", "plain") and chosen["noise"] > 0:
        table = told.per_example.sort_values("example")
        values["auroc"] = auroc(table["loss_first"].to_numpy(), np.asarray(data["wrong"]))
    if how == "replay":
        values["sharpness"] = sharpness(model, x, y)
    return values


def path_norm(model: torch.nn.Sequential) -> float:
    """Return the sum over paths of the product of absolute weights, by a pass of ones through absolute weights."""
    import torch

    flow = None
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            weight = layer.weight.abs()
            flow = weight.sum(1) if flow is None else weight @ flow
    assert flow is not None
    return float(flow.sum())


def auroc(score: np.ndarray, positive: np.ndarray) -> float:
    """Return the chance that a positive example has the higher score."""
    from scipy.stats import rankdata

    ranks, count = rankdata(score), int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(score) - count)))


def sharpness(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the largest eigenvalue of the Hessian of the training loss, on 500 examples."""
    from torch.nn import functional as F

    from fairtrial.training.curvature import Hessian, top_eigenpairs

    hessian = Hessian(lambda b: F.cross_entropy(model(b[0]), b[1]), list(model.parameters()), [(x[:500], y[:500])])
    with hessian.held() as product:
        return float(top_eigenpairs(product, hessian.size, tol=0.01).values[0])


@stage(save="json")
def retrained(stages: Any, candidate: Candidate, run: int, params: PrequentialParams) -> float:
    """Return the code length an example by retraining on prefixes."""
    import torch
    from torch.nn import functional as F

    from fairtrial.training.networks import mlp
    from fairtrial.training.prequential.blocks import block_code

    chosen, data = settings(run, params), data_of(stages, run, params)

    def fit(x: Any, y: Any) -> Any:
        model = mlp([x.shape[1], chosen["width"], data["classes"]], activation=torch.nn.ReLU, seed=run)
        optimizer = torch.optim.SGD(model.parameters(), lr=chosen["rate"], momentum=0.9, weight_decay=chosen["decay"])
        rng = generator(run, "prefix", len(y))
        labels = torch.from_numpy(y)
        for _ in range(params.epochs):
            for rows in torch.from_numpy(rng.permutation(len(y))).split(params.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), labels[rows]).backward()
                optimizer.step()

        def predict(x: Any) -> Any:
            with torch.no_grad():
                return model(x).softmax(1).double().numpy()

        return predict

    x, y = data["x"], data["y"].numpy()
    return block_code(fit, x, y, num_classes=data["classes"], blocks=4, seed=run).regret / len(y)


# ------------------------------------------------------------------------------------------------------------- measures

SIGNALS = {  # candidate: the training it is read off, and the value
    "replay": ("replay", "regret"),
    "replay-code": ("replay", "code_length"),
    "first-pass": ("plain", "regret"),
    "trajectory": ("replay", "trajectory"),
    "sum-of-losses": ("replay", "sum_of_losses"),
    "final-loss": ("replay", "final_loss"),
    "parameter-norm": ("replay", "norm"),
    "distance": ("replay", "distance"),
    "path-norm": ("replay", "path_norm"),
    "sharpness": ("replay", "sharpness"),
    "validation": ("held-out", "validation"),
    "shuffled-labels": ("shuffled", "regret"),
}


def measure(candidate: Candidate, cell: Cell, params: PrequentialParams, stages: Any) -> dict[str, Any]:
    """Return the signal of a run, and what it should tell of the run it was read off."""
    run = cell["run"]
    chosen = settings(run, params)
    if candidate.label == "noise-rate":
        how, signal = "replay", chosen["noise"]
    elif candidate.label == "blocks":
        how, signal = "plain", stages(retrained, candidate, run, params)
    else:
        how, name = SIGNALS[candidate.label]
        signal = stages(trained, how, run, params)[name]
    # The held-out labels and the shuffled ones foretell the run on all the true ones.
    of = stages(trained, how if how in ("replay", "plain") else "replay", run, params)
    coded = candidate.label in ("replay", "first-pass")
    return {
        "signal": signal,
        "gap": of["gap"],
        "loss_gap": of["loss_gap"],
        "test_error": of["test_error"],
        "final_loss": of["final_loss"],
        "noise": chosen["noise"],
        "auroc": of["auroc"] if coded and chosen["noise"] == 0.2 else None,
    }


# ----------------------------------------------------------------------------------------------------------- quantities


def columns(frame: pd.DataFrame, label: str, *names: str) -> list[np.ndarray]:
    """Return columns of a candidate's rows, (runs,) floats each."""
    mine = frame["candidate"].to_numpy() == label
    return [frame[name].to_numpy()[mine].astype(float) for name in names]


def pooled(label: str, target: str = "gap") -> Any:
    """Return the correlation of a candidate's signal with a target over all runs."""

    def fn(frame: pd.DataFrame) -> float:
        from fairtrial.training.prequential.runs import correlation

        return correlation(*columns(frame, label, "signal", target))

    return statistic(fn)


def advantage(label: str, other: str) -> Any:
    """Return how much more a candidate's signal correlates with the gap than another's, in absolute value."""
    first, second = pooled(label).fn, pooled(other).fn
    return statistic(lambda frame: abs(first(frame)) - abs(second(frame)))


def among_interpolating(label: str, target: str) -> Any:
    """Return the partial correlation given label noise, over the runs whose mean final loss is below 0.05.

    It is 0, no evidence, where fewer than three runs interpolate or their signals do not differ.
    """

    def fn(frame: pd.DataFrame) -> float:
        from fairtrial.training.prequential.runs import partial_correlation

        *values, final = columns(frame, label, "signal", target, "noise", "final_loss")
        fits = final < 0.05
        if fits.sum() < 3:
            return 0.0
        found = partial_correlation(*(value[fits] for value in values))
        return found if math.isfinite(found) else 0.0

    return statistic(fn)


def within_noise(label: str, target: str) -> Any:
    """Return the partial correlation given label noise over all runs."""

    def fn(frame: pd.DataFrame) -> float:
        from fairtrial.training.prequential.runs import partial_correlation

        return partial_correlation(*columns(frame, label, "signal", target, "noise"))

    return statistic(fn)


# ---------------------------------------------------------------------------------------------------------------- parts

CANDIDATES = (
    Candidate("replay", "method", uses=("meter", "report", "sampler")),
    Candidate("replay-code", "method", uses=("meter", "report", "sampler")),
    Candidate("first-pass", "method", uses=("meter", "report")),
    Candidate("blocks", "baseline", uses=("blocks",)),
    Candidate("trajectory", "baseline", uses=("meter",)),
    Candidate("sum-of-losses", "baseline", uses=("meter",)),
    Candidate("final-loss", "baseline"),
    Candidate("parameter-norm", "baseline"),
    Candidate("distance", "baseline"),
    Candidate("path-norm", "baseline"),
    Candidate("sharpness", "baseline"),
    Candidate("validation", "baseline"),
    Candidate("noise-rate", "control"),
    Candidate("shuffled-labels", "control", uses=("meter", "report", "sampler")),
)


def parts(params: PrequentialParams) -> tuple[Part, ...]:
    """Return the one part."""
    return (
        Part(
            name="runs",
            candidates=CANDIDATES,
            metrics=(
                Metric("signal", "", higher_is_better=False),
                Metric("gap", "test less training error", higher_is_better=False),
                Metric("loss_gap", "nats", higher_is_better=False),
                Metric("test_error", "on clean labels", higher_is_better=False),
                Metric("final_loss", "nats", higher_is_better=False),
                Metric("noise", "of the labels", higher_is_better=False),
                Metric("auroc", "of flipped labels, at noise 0.2"),
            ),
            factors=(Factor("run", range(params.runs), kind="replicate", most=MOST),),
            variance="independent",
            claims=(
                Claim(
                    "C1",
                    "Over all runs, regret by replay correlates above 0.9 with the gap between training and test "
                    "error.",
                    pooled("replay"),
                    above=0.9,
                ),
                Claim(
                    "C2",
                    "Among interpolating runs it correlates over 0.3 with test error at a given label noise.",
                    among_interpolating("replay", "test_error"),
                    above=0.3,
                ),
                all_of(
                    "C3",
                    "It correlates with the gap better than the parameter norm and the final loss.",
                    Claim("C3-norm", "than the parameter norm", advantage("replay", "parameter-norm"), above=0),
                    Claim("C3-loss", "than the final loss", advantage("replay", "final-loss"), above=0),
                ),
                report("C4", "Its correlation less that of a held-out validation signal (a tenth is little).",
                       advantage("replay", "validation")),
                Claim(
                    "C5",
                    "The code length of an example finds flipped labels with an AUROC over 0.75 at 20 % noise.",
                    level("replay", "auroc"),
                    above=0.75,
                ),
                report("R1", "correlation of first-pass regret with the gap", pooled("first-pass")),
                report("R2", "correlation of regret by retraining on prefixes with the gap", pooled("blocks")),
                report("R3", "correlation of the label-noise rate itself with the gap", pooled("noise-rate")),
                report("R4", "correlation of the trajectory's sum with the gap", pooled("trajectory")),
                report("R5", "correlation of regret by replay with test error on clean labels",
                       pooled("replay", "test_error")),
                report("R6", "partial correlation of regret with the gap, given label noise",
                       within_noise("replay", "gap")),
                report("R7", "partial correlation of code length with test error, given label noise, among "
                       "interpolating runs", among_interpolating("replay-code", "test_error")),
                report("R8", "correlation of regret on shuffled labels with the gap", pooled("shuffled-labels")),
            ),
            measure=measure,
            group=("run",),
        ),
    )  # fmt: skip


def check(params: PrequentialParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    check_examples("data", params.data, read_labelled)


trial = Trial(
    name="prequential",
    params=PrequentialParams,
    parts=parts,
    presets={
        "smoke": {
            "data": "tiny", "examples": 40, "test_examples": 40, "widths": (4, 8), "rates": (0.1,), "decays": (0.0,),
            "noises": (0.0, 0.2), "epochs": 2, "batch": 10, "runs": 8,
        },
        "full": {"examples": 4000, "test_examples": 10_000, "epochs": 60, "batch": 50, "runs": 144},
    },
    check=check,
)  # fmt: skip
