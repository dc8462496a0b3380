"""Whether tangent local polynomials adapt to sheets of any dimension, and whether the written-down network is one.

Parts: ``mixtures`` crosses context length, dimension and number of sheets; ``others`` adds regressors of other kinds
and two controls; ``spheres`` shows where ambient local linear regression wins; ``rows`` is real data, or the user's;
``trained`` (with ``train_steps``) trains the network's twins. Intervals are over draws of sheets, functions and points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.data.arrays import read_arrays
from fairtrial.errors import InputError
from fairtrial.seeds import derive, generator
from fairtrial.trial.declare import (
    Candidate,
    Cell,
    Claim,
    Contrast,
    Factor,
    Input,
    Metric,
    Part,
    Trial,
    all_of,
    contrast,
    difference,
    exact,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

    from fairtrial.training.incontext_regression.mixture import Chart, ManifoldMixture, Prompt

Shape: TypeAlias = Literal["generic", "sphere"]

AMBIENT = 20
SCALES = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0)  # constants of the oracle's bandwidth
CHARTS = 6  # of a sheet, a dimension
COMPARED = 30  # queries of a cell at which the network is compared with the estimator it computes
CONTROLLED = 800  # the longest context on which the network is also measured without its first stage
ENOUGH = 800  # points from which on it claims to reach the oracle
SMOOTHNESS = 2.0


class InContextParams(BaseModel):
    """Parameters of the trial ``incontext-regression``."""

    model_config = ConfigDict(extra="forbid")

    lengths: tuple[int, ...] = Field((200, 800, 3200), description="context lengths n")
    dims: tuple[int, ...] = Field((1, 2), description="dimensions of the sheets, one a cell")
    manifolds: tuple[int, ...] = Field((1, 4, 16), description="numbers of sheets M")
    queries: int = Field(60, ge=10, description="queries of a context")
    seeds: int = Field(5, ge=2, description="draws of sheets, functions and points",
                       json_schema_extra={"scope": "plan"})  # fmt: skip
    data: Annotated[str, Input()] = Field(
        "pose", description="'pose' (rotated images), 'diabetes', or an .npz file with x (n, D) and y (n,) or (n, T)"
    )
    images: int = Field(40, ge=2, description="images that are rotated for 'pose'")
    rotations: int = Field(72, ge=8, description="angles of each")
    others: tuple[Literal["gaussian-process", "random-forest", "kernel-ridge"], ...] = Field(
        ("gaussian-process", "random-forest", "kernel-ridge"), description="regressors of other kinds"
    )
    train_steps: int = Field(0, ge=0, description="steps of training of the twins; 0 trains none")
    train_length: int = Field(256, ge=32, description="longest context of the twins, and that of their test")


# --------------------------------------------------------------------------------------------------------------- stages


def mixture(shape: Shape, dim: int, manifolds: int, seed: int) -> ManifoldMixture:
    """Return the sheets of a cell."""
    from fairtrial.training.incontext_regression.mixture import ManifoldMixture

    return ManifoldMixture(
        AMBIENT, (dim,), manifolds, shape=shape, smoothness=SMOOTHNESS, seed=derive(seed, "sheets", dim, manifolds)
    )


@stage()
def task(stages: Any, shape: Shape, n: int, dim: int, manifolds: int, seed: int, queries: int) -> Prompt:
    """Return one context of a cell and its queries, as prompts that share it."""
    return mixture(shape, dim, manifolds, seed).ask(queries, n, seed=derive(seed, "points", n))


@stage(save="json")
def oracle_scale(stages: Any, shape: Shape, n: int, dim: int, manifolds: int) -> float:
    """Return the constant of the oracle's bandwidth with the least error on two tasks that no cell uses."""
    import numpy as np

    from fairtrial.training.incontext_regression.mixture import oracle_estimate

    errors = np.zeros(len(SCALES))
    for seed in (1_000_001, 1_000_002):
        tasks = mixture(shape, dim, manifolds, seed)
        prompt = tasks.ask(100, n, seed=derive(seed, "points", n))
        for i, scale in enumerate(SCALES):
            errors[i] += np.square(oracle_estimate(tasks, prompt, scale=scale) - prompt.target.numpy()).mean()
    return SCALES[int(errors.argmin())]


@stage(keep=True)
def poses(stages: Any, images: int, rotations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rotated images (n, 196) of garments, n = images x rotations, and sine and cosine (n, 2) of the angles."""
    import numpy as np
    from scipy.ndimage import rotate

    from fairtrial.data.images import garments

    chosen = garments(2000, size=28)[0][generator(seed, "images").permutation(2000)[:images], 0].numpy()
    ground = chosen.min()
    angles = 360 * np.arange(rotations) / rotations
    turned = [rotate(chosen, angle, axes=(1, 2), reshape=False, order=1, cval=ground) for angle in angles]
    x = np.stack(turned, axis=1).reshape(images * rotations, 14, 2, 14, 2).mean((2, 4))
    y = np.stack([np.sin(np.deg2rad(angles)), np.cos(np.deg2rad(angles))], axis=1)
    return x.reshape(len(x), -1).astype(float), np.tile(y, (images, 1))


@stage(keep=True)
def rows(stages: Any, data: str, images: int, rotations: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return X (n, D) and y (n, T) of a data set, in standard deviations of the targets."""
    if data == "pose":
        x, y = stages(poses, images, rotations, seed)
    elif data == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True)
    else:
        arrays = read_arrays(data)
        x, y = arrays["x"].astype(float), arrays["y"].astype(float)
    y = y.reshape(len(y), -1)
    return x, (y - y.mean(0)) / y.std(0)


@stage(save="json")
def twin(
    stages: Any, attention: Literal["linear", "softmax"], steps: int, length: int, prompts: int, seed: int
) -> dict[str, list[float]]:
    """Train a twin, and return its squared errors on test prompts and on prompts of its training."""
    import torch

    from fairtrial.training.incontext_regression.twin import train_twin

    tasks, test, seen = trained_on(seed, length, prompts)
    model = train_twin(tasks, steps=steps, lengths=(32, length), attention=attention, seed=seed)
    with torch.no_grad():
        return {
            name: (model(prompt.x, prompt.y, prompt.query) - prompt.target).square().tolist()
            for name, prompt in (("test", test), ("seen", seen))
        }


def trained_on(seed: int, length: int, prompts: int) -> tuple[ManifoldMixture, Prompt, Prompt]:
    """Return the tasks of the twins, prompts to test them on, and as many as they are trained on."""
    from fairtrial.training.incontext_regression.mixture import ManifoldMixture

    tasks = ManifoldMixture(8, (1, 2), 4, smoothness=SMOOTHNESS, seed=derive(seed, "twins"))
    test, seen = (tasks.sample(prompts, length, seed=derive(seed, name)) for name in ("test", "seen"))
    return tasks, test, seen


# ------------------------------------------------------------------------------------------------------------- measures


def predictions(label: str, x: np.ndarray, y: np.ndarray, queries: np.ndarray, dim: int | None = None) -> np.ndarray:
    """Return a regressor's predictions at queries (Q, D) from rows x (n, D), y (n,) or (n, T)."""
    from fairtrial.training.incontext_regression import baselines
    from fairtrial.training.incontext_regression.regressor import TangentLocalPolynomial

    models = {
        "tangent-local-polynomial": lambda: TangentLocalPolynomial(outside="nearest"),
        "k-nearest-neighbours": baselines.TunedNeighbors,
        "nadaraya-watson": lambda: TangentLocalPolynomial(degree=0, outside="nearest"),
        "ambient-local-linear": lambda: TangentLocalPolynomial(dim=x.shape[1], outside="nearest"),
        "gaussian-process": baselines.TunedProcess,
        "random-forest": baselines.TunedForest,
        "kernel-ridge": baselines.TunedKernelRidge,
        "random-tangent": lambda: baselines.RandomTangent(dim=dim or 1, outside="nearest"),
        "shuffled-targets": lambda: baselines.ShuffledTargets(outside="nearest"),
    }
    return models[label]().fit(x, y).predict(queries)


def atlas_of(tasks: ManifoldMixture, n: int, scale: float) -> tuple[Chart, ...]:
    """Return charts that cover the sheets finely enough for their frames to be near all tangent spaces."""
    return tasks.atlas(CHARTS ** max(tasks.dims), n=n, scale=scale)


def measure_mixture(candidate: Candidate, cell: Cell, params: InContextParams, stages: Any) -> dict[str, Any]:
    """Predict the queries of one context and compare with the regression function there."""
    import numpy as np

    from fairtrial.training.incontext_regression.constructed import ConstructedRegressor, frame_estimate
    from fairtrial.training.incontext_regression.mixture import oracle_estimate

    n, dim, manifolds, shape = cell["n"], cell["d"], cell["manifolds"], cell.get("shape", "generic")
    prompt = stages(task, shape, n, dim, manifolds, cell["seed"], params.queries)
    x, y, queries = (part.numpy() for part in (prompt.x[0], prompt.y[0], prompt.query))
    apart = None
    if candidate.label in ("oracle", "constructed", "without-stage-1"):
        tasks = mixture(shape, dim, manifolds, cell["seed"])
        scale = stages(oracle_scale, shape, n, dim, manifolds)
        if candidate.label == "oracle":
            predicted = oracle_estimate(tasks, prompt, scale=scale)
        elif candidate.label == "without-stage-1" and n > CONTROLLED:
            return {"mse": None, "log_mse": None, "apart": None}
        else:
            atlas = atlas_of(tasks, n, scale)
            layers1 = 8 if candidate.label == "constructed" else 0
            model = ConstructedRegressor(atlas, newton=12, layers1=layers1, outside="nearest")
            predicted = model(prompt.x, prompt.y, prompt.query).numpy()
            solved = [frame_estimate(atlas, x, y, query, layers1=layers1) for query in queries[:COMPARED]]
            apart = float(np.abs(predicted[:COMPARED] - solved).max())
    else:
        predicted = predictions(candidate.label, x, y, queries, dim)
    mse = float(np.square(predicted - prompt.target.numpy()).mean())
    return {"mse": mse, "log_mse": math.log(mse), "apart": apart}


def measure_error(candidate: Candidate, cell: Cell, params: InContextParams, stages: Any) -> dict[str, Any]:
    """Return the mean squared error alone, where nothing else is asked."""
    return {"mse": measure_mixture(candidate, cell, params, stages)["mse"]}


def measure_rows(candidate: Candidate, cell: Cell, params: InContextParams, stages: Any) -> dict[str, Any]:
    """Fit to one half of the rows of a data set and predict the other half."""
    import numpy as np

    x, y = stages(rows, cell["data"], params.images, params.rotations, cell["seed"])
    order = generator(cell["seed"], "halves", cell["data"]).permutation(len(x))
    train, test = order[: len(x) // 2], order[len(x) // 2 :]
    predicted = predictions(candidate.label, x[train], y[train], x[test]).reshape(y[test].shape)
    return {"mse": float(np.square(predicted - y[test]).mean())}


def measure_trained(candidate: Candidate, cell: Cell, params: InContextParams, stages: Any) -> dict[str, Any]:
    """Test a twin, the constructed network, or the mean of the context, on the same prompts."""
    import numpy as np

    from fairtrial.training.incontext_regression.constructed import ConstructedRegressor

    tasks, test, seen = trained_on(cell["seed"], params.train_length, params.queries)
    model = ConstructedRegressor(atlas_of(tasks, params.train_length, 1.0), outside="nearest")

    def constructed(prompt: Prompt) -> torch.Tensor:
        return (model(prompt.x, prompt.y, prompt.query) - prompt.target).square()

    if candidate.label == "constructed":
        return {"mse": float(constructed(test).mean()), "gap": 0.0}
    if candidate.label == "context-mean":
        return {"mse": float((test.y.mean(1) - test.target).square().mean()), "gap": None}
    attention = candidate.label.removesuffix("-twin")
    told = stages(twin, attention, params.train_steps, params.train_length, params.queries, cell["seed"])
    mse, gap = float(np.mean(told["test"])), float(np.mean(told["seen"]) - constructed(seen).mean())
    return {"mse": mse if math.isfinite(mse) else math.inf, "gap": gap if math.isfinite(gap) else math.inf}


# ---------------------------------------------------------------------------------------------------------------- parts

METHOD = Candidate("tangent-local-polynomial", "method", uses=("regressor",))
ORACLE = Candidate("oracle", "reference", uses=("mixture",))
CONSTRUCTED = Candidate("constructed", "method", uses=("constructed",))
STAGELESS = Candidate("without-stage-1", "control", uses=("constructed",))
RIVALS = (
    Candidate("k-nearest-neighbours", "baseline", uses=("baselines",)),
    Candidate("nadaraya-watson", "baseline", uses=("regressor",)),
    Candidate("ambient-local-linear", "baseline", uses=("regressor",)),
)
CONTROLS = tuple(Candidate(label, "control", uses=("baselines",)) for label in ("random-tangent", "shuffled-targets"))
MSE = Metric("mse", "of the function's variance", higher_is_better=False)


def parts(params: InContextParams) -> tuple[Part, ...]:
    """Return the parts: mixtures, other regressors, spheres, rows and, where asked for, trained twins."""
    seed = Factor("seed", range(params.seeds), kind="replicate", most=max(40, params.seeds))
    dims, longest = Factor("d", params.dims), max(params.lengths)
    others = tuple(Candidate(label, "baseline", uses=("baselines",)) for label in params.others)
    middle = Factor("manifolds", (sorted(params.manifolds)[len(params.manifolds) // 2],))
    shorter = [n for n in params.lengths if n <= CONTROLLED] or [longest]
    longer = tuple(n for n in params.lengths if n >= ENOUGH) or (longest,)
    mixtures = Part(
        name="mixtures",
        candidates=(METHOD, CONSTRUCTED, *RIVALS, STAGELESS, ORACLE),
        metrics=(
            MSE,
            Metric("log_mse", "nats", higher_is_better=False),
            Metric("apart", "largest difference from the estimator", higher_is_better=False),
        ),
        factors=(Factor("n", params.lengths), dims, Factor("manifolds", params.manifolds), seed),
        variance="independent",
        claims=(
            exact(
                "C1a",
                f"The constructed transformer equals the estimator it computes to 1e-6 from {min(longer)} points on.",
                lambda frame: equal(frame, longer),
            ),
            every_dim("C1b", "Its error is within 5 % of the oracle's there.", params.dims,
                      ("constructed", "oracle", {"n": longer}), above=-math.log(1.05)),
            every_dim("C2", "With geometry found from data it is within 10 % of the oracle's there.", params.dims,
                      ("tangent-local-polynomial", "oracle", {"n": longer}), above=-math.log(1.10)),
            all_of(
                "C3",
                f"It beats tuned nearest neighbours, kernel regression and ambient local linear at {longest} points.",
                *(
                    Claim(f"C3-{dim}-{rival.label}", f"{rival.label}, d = {dim}",
                          difference(METHOD.label, rival.label, "mse", {"n": longest, "d": dim}, "log"), above=0)
                    for dim in params.dims
                    for rival in RIVALS
                ),
            ),
            all_of(
                "C4",
                "Its error falls with the context at least as steeply as the minimax rate, to 0.15.",
                *(
                    Claim(f"C4-{dim}", f"slope, d = {dim}", slope(METHOD.label, dim, params.lengths[-3:]),
                          below=-2 * SMOOTHNESS / (2 * SMOOTHNESS + dim) + 0.15)
                    for dim in params.dims
                ),
            ),
            every_dim("C5", f"Without its first stage the network's error is larger, to {max(shorter)} points.",
                      params.dims, ("constructed", "without-stage-1", {"n": tuple(shorter)}), above=0),
            *(
                report(f"R1-{dim}", f"slope of the oracle, d = {dim}", slope("oracle", dim, params.lengths[-3:]))
                for dim in params.dims
            ),
        ),
        measure=measure_mixture,
        group=("n", "d", "manifolds", "seed"),
    )  # fmt: skip
    kinds = Part(
        name="others",
        candidates=(METHOD, *others, *CONTROLS),
        metrics=(MSE,),
        factors=(Factor("n", (max(shorter),)), dims, middle, seed),
        variance="independent",
        claims=tuple(
            report(f"R2-{rival.label}", f"log error of {rival.label} over the method's, {max(shorter)} points",
                   difference(METHOD.label, rival.label, "mse", {"n": max(shorter)}, "log"))
            for rival in (*others, *CONTROLS)
        ),
        measure=measure_error,
        group=("n", "d", "manifolds", "seed"),
    )  # fmt: skip
    spheres = Part(
        name="spheres",
        candidates=(METHOD, *RIVALS, ORACLE),
        metrics=(MSE,),
        factors=(Factor("shape", ("sphere",)), Factor("n", (max(shorter),)), dims, middle, seed),
        variance="independent",
        claims=tuple(
            report(f"R3-{dim}", f"on spheres, log error of ambient local linear over the method's, d = {dim}",
                   difference(METHOD.label, "ambient-local-linear", "mse", {"d": dim}, "log"))
            for dim in params.dims
        ),
        measure=measure_error,
        group=("n", "d", "manifolds", "seed"),
    )  # fmt: skip
    data = tuple(dict.fromkeys((params.data, "diabetes")))
    real = Part(
        name="rows",
        candidates=(METHOD, *RIVALS[:2], *others, CONTROLS[1]),
        metrics=(Metric("mse", "of the targets' variance", higher_is_better=False),),
        factors=(Factor("data", data), seed),
        variance="independent",
        claims=tuple(
            report(f"R4-{name}-{rival.label}", f"{name}: log error of {rival.label} over the method's",
                   difference(METHOD.label, rival.label, "mse", {"data": value}, "log"))
            for value, name in zip(data, ("data", "diabetes"), strict=False)
            for rival in (*RIVALS[:2], *others)
        ),
        measure=measure_rows,
        group=("data", "seed"),
    )  # fmt: skip
    if not params.train_steps:
        return mixtures, kinds, spheres, real
    trained = Part(
        name="trained",
        candidates=(
            Candidate("linear-twin", "method", uses=("twin",)),
            Candidate("softmax-twin", "baseline", uses=("twin",)),
            Candidate("context-mean", "control"),
            Candidate("constructed", "reference", uses=("constructed",)),
        ),
        metrics=(MSE, Metric("gap", "over the constructed network on prompts of training", higher_is_better=False)),
        factors=(seed,),
        variance="independent",
        claims=(
            report("C6", "log error of a softmax transformer over that of the trained twin, at equal budget",
                   difference("linear-twin", "softmax-twin", "mse", scale="log")),
            report("R5", "gap of the trained twin's empirical risk", level("linear-twin", "gap")),
        ),
        measure=measure_trained,
        group=("seed",),
    )  # fmt: skip
    return mixtures, kinds, spheres, real, trained


def every_dim(id: str, text: str, dims: Sequence[int], compared: tuple[str, str, dict[str, Any]], above: float) -> Any:
    """Return the claim that at every dimension the log error of one candidate is below that of another, to a margin."""
    a, b, where = compared
    return all_of(
        id,
        text,
        *(
            Claim(f"{id}-{dim}", f"d = {dim}", difference(a, b, "mse", {**where, "d": dim}, "log"), above=above)
            for dim in dims
        ),
    )


def slope(label: str, dim: int, lengths: Sequence[int]) -> Contrast:
    """Return the least-squares slope of the log error over log n, as the contrast of levels that it is."""
    import numpy as np

    log_n = np.log(lengths)
    centred = log_n - log_n.mean()
    weights = centred / max(float(centred @ centred), 1e-12)
    return contrast({
        (label, "log_mse", (("d", dim), ("n", n))): float(w) for n, w in zip(lengths, weights, strict=True)
    })  # fmt: skip


def equal(frame: pd.DataFrame, longer: Sequence[int]) -> bool | str:
    """Return whether the constructed network was within 1e-6 of its estimator in every cell."""
    found = frame[(frame["candidate"] == "constructed") & frame["n"].isin(longer)]
    worst = found.sort_values("apart").iloc[-1]
    if worst["apart"] < 1e-6:
        return True
    share = float((found["apart"] >= 1e-6).mean())
    return f"{share:.0%} of cells differ by more, by {worst['apart']:.2g} at most (n = {worst['n']}, d = {worst['d']})"


def check(params: InContextParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    import numpy as np

    if min(params.lengths) < 20 or len(set(params.lengths)) != len(params.lengths):
        raise InputError(f"lengths={list(params.lengths)}: different numbers from 20 on")
    if min(params.dims) < 1 or max(params.dims) > 4 or min(params.manifolds) < 1:
        raise InputError(f"dims={list(params.dims)}, manifolds={list(params.manifolds)}: from 1 to 4, and from 1")
    if params.data == "pose":
        from fairtrial.data.samples import sample_path

        sample_path("fashion-mnist", "train-images.gz")
    elif params.data != "diabetes":
        if not Path(params.data).exists():
            raise InputError(f"data={params.data}: 'pose', 'diabetes' or an .npz file")
        arrays = read_arrays(params.data)
        x, y = arrays["x"], arrays["y"]
        if x.ndim != 2 or len(x) != len(y) or y.ndim not in (1, 2) or len(x) < 20:
            raise InputError(f"{params.data}: x {x.shape}, y {y.shape}: (n, D), and (n,) or (n, T), n at least 20")
        if not all(np.issubdtype(a.dtype, np.number) and np.isfinite(a).all() for a in (x, y)):
            raise InputError(f"{params.data}: x and y must be finite numbers")
        if (y.reshape(len(y), -1).std(0) == 0).any():
            raise InputError(f"{params.data}: a column of y is constant")


trial = Trial(
    name="incontext_regression",
    params=InContextParams,
    parts=parts,
    presets={
        "smoke": {
            "lengths": (50, 100), "dims": (1,), "manifolds": (1,), "queries": 10, "seeds": 2, "data": "diabetes",
            "others": ("kernel-ridge",), "train_steps": 1, "train_length": 32,
        },
        "full": {
            "lengths": (200, 800, 3200, 12_800), "queries": 300, "seeds": 20, "train_steps": 20_000,
        },
    },
    check=check,
)  # fmt: skip
