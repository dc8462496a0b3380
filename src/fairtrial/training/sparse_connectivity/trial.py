"""Whether patches restrain what gradient descent can memorise, and whether it is stability that does it.

Part ``spheres``: a teacher on uniform spheres with label noise, where dense networks interpolate. Part ``images``: the
same images with their pixels in place and permuted, which changes what patches look like and nothing else.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.data.arrays import check_examples, read_arrays
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

TEST = 2000
TEACHER_PATCH = 4


class SparseParams(BaseModel):
    """Parameters of the trial ``sparse-connectivity``."""

    model_config = ConfigDict(extra="forbid")

    dimension: int = Field(32, ge=8, description="of the sphere, a multiple of the patches")
    patches: tuple[int, ...] = Field((4, 8), description="entries of a receptive field")
    rates: tuple[float, float] = Field((0.3, 0.03), description="the large step and the small one")
    samples: int = Field(400, ge=20, description="training examples")
    noise: float = Field(0.7, gt=0, description="standard deviation of the label noise")
    width: int = Field(120, ge=4, description="hidden neurons")
    steps: int = Field(3000, ge=20, description="of descent at the large step; the small one gets three times as many")
    seeds: int = Field(5, ge=1, description="draws", json_schema_extra={"scope": "plan"})
    images: Annotated[str, Input()] = Field(
        "fashion-mnist", description="a sample, 'tiny' (random, for tests), or an .npz file with x (n, h, w) and y (n,)"
    )
    image_samples: int = Field(200, ge=20, description="training images")
    image_steps: int = Field(1500, ge=20, description="steps of descent on images")
    lp_samples: int = Field(60, ge=10, description="patches tested for isolation")


# --------------------------------------------------------------------------------------------------------------- stages


def sphere(seed: int, params: SparseParams) -> dict[str, np.ndarray]:
    """Return points of the unit sphere with noisy and clean targets: a mean over patches of one ReLU."""
    import numpy as np

    rng = generator(seed, "sphere", params.dimension)
    w = rng.standard_normal(TEACHER_PATCH)
    w *= math.sqrt(params.dimension) / np.linalg.norm(w)

    def draw(n: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((n, params.dimension))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        clean = np.maximum(x.reshape(n, -1, TEACHER_PATCH) @ w, 0).mean(1)
        return x, clean

    (x, clean), (test_x, test_y) = draw(params.samples), draw(TEST)
    scale = 1 / clean.std()
    noise = params.noise * rng.standard_normal(len(x))
    centre = clean.mean()
    return {
        "x": x, "y": SIGNAL * scale * (clean - centre) + noise, "test_x": test_x,
        "test_y": SIGNAL * scale * (test_y - centre),
    }  # fmt: skip


SIGNAL = 0.41  # standard deviation of the clean targets, so that the constant's error is about a third of the noise's


@stage(save="json")
def trained(
    stages: Any, candidate: Candidate, patch: int, rate: float, seed: int, params: SparseParams
) -> dict[str, float]:
    """Train one network on a sphere and certify it."""
    import numpy as np

    from fairtrial.training.sparse_connectivity.certificate import stability_certificate
    from fairtrial.training.sparse_connectivity.network import StableTwoLayerReLU

    data = sphere(seed, params)
    x, y, test_x, test_y = data["x"], data["y"], data["test_x"], data["test_y"]
    if candidate.label == "constant":
        return {
            "train": float(y.var()),
            "test": float(((y.mean() - test_y) ** 2).mean()),
            **dict.fromkeys(CERTIFIED, 0.0),
        }
    kind: Any = {"dense-decay": "dense", "random-fields": "random"}.get(candidate.label, candidate.label)
    decay = best_decay(stages, candidate, rate, params) if candidate.label == "dense-decay" else 0.0
    steps = params.steps * (3 if rate < max(params.rates) else 1)
    net = StableTwoLayerReLU(
        kind, patch=None if kind == "dense" else patch, width=params.width, learning_rate=rate, steps=steps,
        weight_decay=decay, random_state=seed,
    ).fit(x, y)  # fmt: skip
    told = stability_certificate(net.module_, x, y, tol=1e-4)
    return {
        "train": float(((net.predict(x) - y) ** 2).mean()),
        "test": float(((net.predict(test_x) - test_y) ** 2).mean()),
        "slack": min(told.slack, told.slack_hessian),
        "used": told.weighted_path_norm / max(told.budget, 1e-12),
        "at_edge": net.sharpness_ / net.edge_,
        "path_norm": told.path_norm,
        "living": 1 - told.dead_share,
        "activation": float(np.median(told.per_neuron["activation"])),
    }


CERTIFIED = ("slack", "used", "at_edge", "path_norm", "living", "activation")


def best_decay(stages: Any, candidate: Candidate, rate: float, params: SparseParams) -> float:
    """Return the weight decay of the grid that does best on held-out points of a draw no cell uses."""
    return min(DECAYS, key=lambda decay: stages(held_out, candidate, decay, rate, params))


DECAYS = (1e-3, 1e-2, 1e-1)


@stage(save="json")
def held_out(stages: Any, candidate: Candidate, decay: float, rate: float, params: SparseParams) -> float:
    """Return the error of a dense network with decay on held-out noisy points."""
    from fairtrial.training.sparse_connectivity.network import StableTwoLayerReLU

    data = sphere(10_000, params)
    cut = len(data["y"]) * 4 // 5
    steps = params.steps * (3 if rate < max(params.rates) else 1)
    net = StableTwoLayerReLU(
        "dense", width=params.width, learning_rate=rate, steps=steps, weight_decay=decay, random_state=0
    ).fit(data["x"][:cut], data["y"][:cut])
    return float(((net.predict(data["x"][cut:]) - data["y"][cut:]) ** 2).mean())


@stage(save="json")
def isolable(stages: Any, label: str, patch: int, seed: int, params: SparseParams) -> float:
    """Return the share of the patches a candidate's neurons see that can be isolated at margin 0.1."""
    from fairtrial.training.sparse_connectivity.geometry import patch_geometry

    x = sphere(seed, params)["x"]
    if label in ("local", "random-fields"):  # a neuron sees one place of every input
        x, patch = x[:, :patch], patch
    size = params.dimension if label in ("dense", "dense-decay") else patch
    told = patch_geometry(x, size=size, stride=size, samples=params.lp_samples, seed=seed)
    return told.isolable_fraction(0.1)


@stage(keep=True)
def pictures(stages: Any, params: SparseParams) -> tuple[np.ndarray, np.ndarray]:
    """Return images (n, h, w) and targets (n,), of mean 0 and variance 1."""
    import numpy as np

    if params.images == "tiny":
        rng = generator(0, "tiny images")
        x = rng.standard_normal((120, 6, 6)).cumsum(1).cumsum(2)
        y = x.mean((1, 2))
    elif Path(params.images).exists():
        arrays = read_own(params.images)
        x, y = arrays["x"].astype(float), arrays["y"].astype(float)
    else:
        from fairtrial.data.images import garments

        images, labels = garments(3000, size=14)
        x, y = images[:, 0].numpy().astype(float), np.isin(labels.numpy(), (0, 2, 3, 4, 6)).astype(float)
    x = (x - x.mean()) / x.std()
    return x / math.sqrt(x[0].size), (y - y.mean()) / y.std()


def read_own(path: str) -> dict[str, np.ndarray]:
    """Return images x and targets y of an .npz file, checked."""
    import numpy as np

    arrays = read_arrays(path)
    x, y = arrays["x"], arrays["y"]
    if x.ndim != 3 or y.shape != (len(x),) or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError(f"{path}: x must be finite images (n, h, w) and y (n,), not {x.shape} and {y.shape}")
    return arrays


# ------------------------------------------------------------------------------------------------------------- measures


def measure_sphere(candidate: Candidate, cell: Cell, params: SparseParams, stages: Any) -> dict[str, Any]:
    """Train, or take the network from its stage; dense ones are the same for every patch."""
    patch, rate, seed = cell["patch"], cell["rate"], cell["seed"]
    of = params.patches[0] if candidate.label in ("dense", "dense-decay", "constant") else patch
    told = stages(trained, candidate, of, rate, seed, params)
    network = candidate.label != "constant"
    return {
        "test": told["test"],
        "train_over_noise": told["train"] / params.noise**2,
        "gap": told["test"] + params.noise**2 - told["train"],
        "isolable": stages(isolable, candidate.label, of, seed, params) if network else None,
        **{name: told[name] if network else None for name in CERTIFIED},
    }


def measure_order(candidate: Candidate, cell: Cell, params: SparseParams, stages: Any) -> dict[str, Any]:
    """Correlate a property known before training with the gap, over the connectivities of one draw."""
    from scipy.stats import spearmanr

    rate = max(params.rates)
    gaps, shares, counts = [], [], []
    for label in ("dense", "local", "conv"):
        trained_by = next(c for c in CANDIDATES if c.label == label)
        for patch in params.patches if label != "dense" else params.patches[:1]:
            told = stages(trained, trained_by, patch, rate, cell["seed"], params)
            gaps.append(told["test"] + params.noise**2 - told["train"])
            shares.append(stages(isolable, label, patch, cell["seed"], params))
            counts.append(params.width * (params.dimension if label == "dense" else patch))
    values = {
        "isolable-fraction": shares,
        "parameter-count": counts,
        "shuffled": generator(cell["seed"], "shuffled").permutation(shares).tolist(),
    }
    return {"spearman": float(spearmanr(values[candidate.label], gaps)[0])}


def measure_images(candidate: Candidate, cell: Cell, params: SparseParams, stages: Any) -> dict[str, Any]:
    """Train a convolution on images, pixels in place or permuted, and measure their patches."""
    from fairtrial.training.sparse_connectivity.geometry import patch_geometry
    from fairtrial.training.sparse_connectivity.network import StableTwoLayerReLU

    x, y = stages(pictures, params)
    rng = generator(cell["seed"], "images")
    order = rng.permutation(len(y))
    x, y = x[order], y[order]
    if candidate.label == "permuted-pixels":
        x = x.reshape(len(x), -1)[:, rng.permutation(x[0].size)].reshape(x.shape)
    n, size = min(params.image_samples, len(y) // 2), cell["size"]
    told = patch_geometry(x[:n], size=size, samples=params.lp_samples, seed=cell["seed"], most=2000)
    net = StableTwoLayerReLU(
        "conv", patch=size, stride=2, width=params.width // 2, learning_rate=0.3, steps=params.image_steps,
        random_state=cell["seed"],
    ).fit(x[:n], y[:n])  # fmt: skip
    test = slice(n, n + TEST)
    return {
        "isolable": max(told.isolable_fraction(0.1), 1 / (2 * params.lp_samples)),
        "effective_dimension": told.effective_dimension,
        "test": float(((net.predict(x[test]) - y[test]) ** 2).mean()),
    }


# ---------------------------------------------------------------------------------------------------------------- parts

USES = ("network", "certificate", "patches")
CANDIDATES = (
    Candidate("conv", "method", uses=USES),
    Candidate("dense", "baseline", uses=USES),
    Candidate("local", "baseline", uses=USES),
    Candidate("dense-decay", "baseline", uses=USES),
    Candidate("random-fields", "control", uses=USES),
    Candidate("constant", "control"),
)


def parts(params: SparseParams) -> tuple[Part, ...]:
    """Return the parts: spheres, the order of connectivities, and images."""
    large, small = max(params.rates), min(params.rates)
    if large == small or any(params.dimension % patch for patch in (*params.patches, TEACHER_PATCH)):
        raise InputError(
            f"rates={params.rates} must differ, and dimension={params.dimension} be a multiple of {TEACHER_PATCH} and "
            f"of each of patches={params.patches}"
        )
    seed = Factor("seed", range(params.seeds), kind="replicate", most=max(40, params.seeds))
    big, little = (("rate", large),), (("rate", small),)
    spheres = Part(
        name="spheres",
        candidates=CANDIDATES,
        metrics=(
            Metric("test", "clean mean squared error", higher_is_better=False),
            Metric("train_over_noise", "of the noise variance"),
            Metric("gap", "of noisy test less training error", higher_is_better=False),
            Metric("isolable", "of the patches", higher_is_better=False),
            Metric("slack", "of the inequality"),
            Metric("used", "of the budget"),
            Metric("at_edge", "sharpness over edge", higher_is_better=False),
            Metric("path_norm", "", higher_is_better=False),
            Metric("living", "of the neurons"),
            Metric("activation", "of the patches, median neuron"),
        ),
        factors=(Factor("patch", params.patches), Factor("rate", sorted(params.rates, reverse=True)), seed),
        variance="independent",
        claims=(
            exact("C1", "The certified inequality holds on every trained network.", certified),
            all_of(
                "C2",
                "At the large step a dense network fits the noise to 5 % and tests worse than a constant.",
                Claim("C2-fit", "it fits the noise", level("dense", "train_over_noise", {"rate": large}), below=0.05),
                Claim("C2-test", "it tests worse than a constant",
                      difference("constant", "dense", "test", {"rate": large}), above=0),
            ),
            Claim(
                "C3",
                "A larger step lowers the test error of convolutions more than that of dense networks.",
                contrast({
                    ("conv", "test", little): 1.0, ("conv", "test", big): -1.0,
                    ("dense", "test", little): -1.0, ("dense", "test", big): 1.0,
                }),
                above=0,
            ),
            report("R1", "test error of convolutions less than that of dense networks, at the large step",
                   difference("conv", "dense", "test", {"rate": large})),
            report("R2", "the same against random receptive fields of equal size",
                   difference("conv", "random-fields", "test", {"rate": large})),
            report("R3", "the same against dense networks with tuned weight decay",
                   difference("conv", "dense-decay", "test", {"rate": large})),
        ),
        measure=measure_sphere,
        group=("patch", "rate", "seed"),
    )  # fmt: skip
    order = Part(
        name="order",
        candidates=(
            Candidate("isolable-fraction", "method", uses=("geometry", *USES)),
            Candidate("parameter-count", "baseline", uses=USES),
            Candidate("shuffled", "control", uses=("geometry", *USES)),
        ),
        metrics=(Metric("spearman", "with the gap, over connectivities"),),
        factors=(seed,),
        variance="independent",
        claims=(
            Claim(
                "C4",
                "The share of patches that a half-space can isolate orders connectivities by their generalisation gap, "
                "with a rank correlation over 0.6.",
                level("isolable-fraction", "spearman"),
                above=0.6,
            ),
            report("R4", "rank correlation of the parameter count", level("parameter-count", "spearman")),
        ),
        measure=measure_order,
        group=("seed",),
    )
    images = Part(
        name="images",
        candidates=(
            Candidate("pixels-in-place", "method", uses=("geometry", *USES)),
            Candidate("permuted-pixels", "control", uses=("geometry", *USES)),
        ),
        metrics=(
            Metric("isolable", "of the patches", higher_is_better=False),
            Metric("effective_dimension", "", higher_is_better=False),
            Metric("test", "mean squared error", higher_is_better=False),
        ),
        factors=(Factor("size", (3, 5)), seed),
        variance="independent",
        claims=(
            all_of(
                "C5",
                "Permuting pixels at least doubles that share for small patches and raises the convolution's test "
                "error.",
                *(
                    Claim(f"C5-{size}", f"the share, {size} x {size}",
                          difference("pixels-in-place", "permuted-pixels", "isolable", {"size": size}, scale="log"),
                          above=math.log(2))
                    for size in (3, 5)
                ),
                Claim("C5-test", "the test error", difference("pixels-in-place", "permuted-pixels", "test"), above=0),
            ),
        ),
        measure=measure_images,
        group=("size", "seed"),
    )  # fmt: skip
    return spheres, order, images


def certified(frame: pd.DataFrame) -> bool | str:
    """Return whether every trained network's slack is at least 0, but for the eigenvalues' tolerance."""
    rows = frame[frame["candidate"] != "constant"].sort_values("slack")
    worst = rows.iloc[0]
    return (
        True if worst["slack"] >= -1e-6 else f"{worst['candidate']}, seed {worst['seed']}: slack {worst['slack']:.3g}"
    )


def check(params: SparseParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    check_examples("images", params.images, read_own)


trial = Trial(
    name="sparse_connectivity",
    params=SparseParams,
    parts=parts,
    presets={
        "smoke": {
            "dimension": 8, "patches": (4,), "samples": 20, "width": 10, "steps": 20, "seeds": 2, "images": "tiny",
            "image_samples": 20, "image_steps": 20, "lp_samples": 10,
        },
        "full": {
            "dimension": 64, "patches": (4, 8, 16), "samples": 2000, "width": 500, "steps": 8000, "seeds": 5,
            "image_samples": 1000, "image_steps": 6000, "lp_samples": 200,
        },
    },
    check=check,
)  # fmt: skip
