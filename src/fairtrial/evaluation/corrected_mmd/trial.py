"""Whether MEC-MMD is unbiased, and whether what is fitted by it is nearer the truth than what is fitted without.

*audits* draws many audits of populations whose truths are all known, simulated and real, and compares each estimate
with the MMD^2 computed with all truths. *fit* fits a location-scale model to what three sensors saw, *g-and-k* a
simulator without a density, *label shift* the shares of classes among blurred images. Every candidate sees the same
noisy rows and the same audit; nothing is tuned.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.seeds import derive, generator
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
    difference,
    exact,
    for_each,
    level,
    report,
    stage,
    statistic,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

TENTH = 0.1  # the audit that claims are about
DOMAINS = ("tweets", "amazon", "movies", "nyt")
BETWEEN = "amazon/movies"
SENSORS = ("linear bias", "saturation", "heteroscedastic")
_PLAN: dict[str, Any] = {"scope": "plan"}


class Params(BaseModel):
    """Parameters of the trial ``corrected_mmd``."""

    model_config = ConfigDict(extra="forbid")

    rows: int = Field(1000, ge=60, description="noisy rows of a simulated sample")
    shares: list[float] = Field(
        [0.03, 0.1, 0.3], min_length=1, description="shares audited in simulations", json_schema_extra=_PLAN
    )
    populations: int = Field(5, ge=2, description="simulated populations to audit", json_schema_extra=_PLAN)
    audits: int = Field(200, ge=4, description="audits of each simulated population")
    seeds: int = Field(40, ge=2, description="samples to fit a location and a scale to", json_schema_extra=_PLAN)
    steps: int = Field(300, ge=1, description="steps of Adam that fit g-and-k")
    simulators: int = Field(6, ge=2, description="samples to fit g-and-k to", json_schema_extra=_PLAN)
    measured: list[str] = Field(
        [*DOMAINS, BETWEEN, "diabetes"],
        description=f"real populations: {', '.join(DOMAINS)} (halves of a domain), {BETWEEN}, diabetes",
        json_schema_extra=_PLAN,
    )
    data: Annotated[str, Input()] = Field(
        "", description="a CSV file with all truths, to audit instead: halves of each of its groups"
    )
    truth: list[str] = Field(["truth"], min_length=1, description="columns of data that hold the truth")
    noisy: list[str] = Field(["noisy"], min_length=1, description="columns of data that hold the measurement")
    group: str = Field("", description="column of data that names groups; left out, the file is one")
    half: int = Field(1500, ge=30, description="rows of a real population, at most half of what there is")
    measured_shares: list[float] = Field(
        [0.05, 0.1, 0.3], min_length=1, description="shares audited of real populations", json_schema_extra=_PLAN
    )
    splits: int = Field(10, ge=2, description="random halves of each real population", json_schema_extra=_PLAN)
    split_audits: int = Field(30, ge=4, description="audits of each half")
    images: int = Field(
        20, ge=0, description="mixtures of images to estimate class shares of; 0 = none", json_schema_extra=_PLAN
    )
    repeats: int = Field(3, ge=1, description="repetitions of the timed part", json_schema_extra=_PLAN)

    @field_validator("measured")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        known = (*DOMAINS, BETWEEN, "diabetes")
        for name in names:
            if name not in known:
                raise UnknownNameError("population", name, known)
        return names

    @field_validator("shares", "measured_shares")
    @classmethod
    def _shares(cls, shares: list[float]) -> list[float]:
        if not all(0 < share <= 1 for share in shares):
            raise InputError(f"shares must lie in (0, 1], got {shares}")
        return shares


METHOD = ("mec_mmd", "simulation")
BASELINE = ("baselines", "simulation")

# ------------------------------------------------------------------------------------------------------------- audits


@stage()
def simulated(sensor: str, draw: int, params: Params) -> Any:
    """Return a simulated population: truths N(1, .8), compared with a sample that is shifted by half of that."""
    import torch

    from fairtrial.evaluation.corrected_mmd import simulation
    from fairtrial.evaluation.corrected_mmd.kernels import median_kernel

    rng = generator(draw, "population", sensor)
    x, y = (rng.normal(at, simulation.SCALE, (params.rows, 1)) for at in (1.0, 1.4))
    z = simulation.SENSORS[sensor][0](x, rng)
    x, z, y = (torch.from_numpy(values) for values in (x, z, y))
    return simulation.Population(x, z, y, median_kernel(x, y))


@stage()
def real(name: str, draw: int, params: Params) -> Any:
    """Return random halves of a real population: noisy rows of one, against the truths of the other."""
    import torch

    from fairtrial.evaluation.corrected_mmd.kernels import GaussianKernel, median_kernel
    from fairtrial.evaluation.corrected_mmd.simulation import Population

    rng = generator(draw, "half", name)
    x, z, y = halves(name, rng, params)
    x, z, y = (torch.from_numpy(values) for values in (x, z, y))
    rated = not params.data and name != "diabetes"
    return Population(x, z, y, GaussianKernel(1.0) if rated else median_kernel(x, y))  # 1 on a scale of -4 to 4


def halves(name: str, rng: np.random.Generator, params: Params) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return truths, measurements and truths to compare with, each (n, d), n at most ``params.half``."""
    import numpy as np

    if name == BETWEEN and not params.data:
        (x, z), (y, _) = (rated(domain, rng) for domain in name.split("/"))
        rows, others = rng.permutation(len(x)), rng.permutation(len(y))
        half = min(params.half, len(x), len(y))
        return x[rows[:half]], z[rows[:half]], y[others[:half]]
    if params.data:
        x, z = own_rows(params, name)
    elif name == "diabetes":
        x, z = diabetes()
    else:
        x, z = rated(name, rng)
    rows = rng.permutation(len(x))
    half = min(params.half, len(x) // 2)
    x, z, y = x[rows[:half]], z[rows[:half]], x[rows[half : 2 * half]]
    return np.ascontiguousarray(x), np.ascontiguousarray(z), np.ascontiguousarray(y)


def rated(domain: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return each sentence's mean rating without one rater, and that one's, both (n, 1)."""
    import numpy as np

    from fairtrial.data.vader import vader_sentences

    sentences = vader_sentences(domain)
    held = [ratings[rng.integers(len(ratings))] for ratings in sentences.ratings]
    means = [(sum(r) - one) / (len(r) - 1) for r, one in zip(sentences.ratings, held, strict=True)]
    return np.array(means)[:, None], np.array(held, dtype=float)[:, None]


def diabetes() -> tuple[np.ndarray, np.ndarray]:
    """Return three standardised columns of scikit-learn's diabetes data, and what a poor instrument makes of them."""
    from sklearn.datasets import load_diabetes

    from fairtrial.evaluation.corrected_mmd.simulation import clinic

    x = load_diabetes(as_frame=True).data[["bmi", "bp", "s5"]].to_numpy()
    x = (x - x.mean(0)) / x.std(0)
    return x, clinic(x, generator(0, "clinic"))


def own_rows(params: Params, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return truths and measurements of a group of the user's file."""
    frame = own_frame(params)
    if params.group:
        frame = frame[frame[params.group].astype(str) == name]
    return frame[params.truth].to_numpy(float), frame[params.noisy].to_numpy(float)


def own_frame(params: Params) -> pd.DataFrame:
    """Return the user's file, its columns checked."""
    import numpy as np
    import pandas as pd

    from fairtrial.tables import read_table

    frame = read_table(params.data)
    columns = [*params.truth, *params.noisy, *([params.group] if params.group else [])]
    if missing := [column for column in columns if column not in frame]:
        raise InputError(f"data={params.data}: no column {missing[0]!r}; set truth=, noisy= and group= to its columns")
    if len(params.truth) != len(params.noisy):
        raise InputError(f"truth= has {len(params.truth)} columns and noisy= {len(params.noisy)}: give as many")
    for column in (*params.truth, *params.noisy):
        if not pd.api.types.is_numeric_dtype(frame[column]) or not np.isfinite(frame[column]).all():
            raise InputError(
                f"data={params.data}: column {column!r} must hold a number in every row to know the oracle"
            )
    return frame


def names_of(params: Params) -> list[str]:
    """Return the real populations: those of ``measured``, or the groups of the user's file."""
    if not params.data:
        return list(params.measured)
    return sorted(own_frame(params)[params.group].astype(str).unique()) if params.group else ["all"]


def measure_simulated(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float | None]:
    """Audit a simulated population many times."""
    population = stages(simulated, cell["sensor"], cell["population"], params)
    return audited(
        candidate, population, cell["share"], params.audits, generator(cell["population"], "audits", *cell.values())
    )


def measure_real(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float | None]:
    """Audit halves of a real population many times."""
    population = stages(real, cell["sample"], cell["split"], params)
    rng = generator(cell["split"], "audits", *cell.values())
    return audited(candidate, population, cell["share"], params.split_audits, rng)


HOW: dict[str, dict[str, Any]] = {
    "mec": {"strength": 1.0, "embedding": True},
    "mec-half": {"strength": 0.5, "embedding": True},
    "mec-pairwise": {"strength": 1.0, "embedding": False},
    "audit-only": {"strength": 0.0, "embedding": True},
    "mispaired": {"strength": 1.0, "embedding": True},
}


def audited(
    candidate: Candidate, population: Any, share: float, count: int, rng: np.random.Generator
) -> dict[str, float | None]:
    """Return the errors of a candidate's estimates over audits, the same audits for all candidates."""
    import numpy as np

    m = max(4, round(share * population.n))
    if candidate.label == "plain":
        off = population.plain - population.oracle
        return {"bias": off, "squared error": off**2, "Monte Carlo error": 0.0, "coverage": None, "variance": None}
    how = HOW[candidate.label]
    pairs = population.audits(m, count, rng, **how, mispaired=candidate.label == "mispaired")
    values, errors = np.array(list(pairs)).T
    off = values - population.oracle
    return {
        "bias": float(off.mean()),
        "squared error": float((off**2).mean()),
        "Monte Carlo error": float(off.std(ddof=1) / math.sqrt(count)),
        "coverage": float((np.abs(off) <= 1.959964 * errors).mean()),
        "variance": None if candidate.role == "control" else population.design_variance(m, **how),
    }


AUDITED_METRICS = (
    Metric("bias", "MMD^2", higher_is_better=False),
    Metric("squared error", "MMD^4", higher_is_better=False),
    Metric("Monte Carlo error", "MMD^2", higher_is_better=False),
    Metric("coverage", "share of audits"),
    Metric("variance", "MMD^4", higher_is_better=False),
)
AUDITED = {
    "mec": Candidate("mec", "method", uses=METHOD),
    "mec-half": Candidate("mec-half", "method", uses=METHOD),
    "mec-pairwise": Candidate("mec-pairwise", "method", uses=METHOD),
    "plain": Candidate("plain", "baseline", uses=BASELINE),
    "audit-only": Candidate("audit-only", "baseline", uses=METHOD),
    "mispaired": Candidate("mispaired", "control", uses=METHOD),
}


def unbiased(frame: pd.DataFrame) -> bool | str:
    """Whether, at each sensor, mec's bias is within 3 Monte Carlo errors of 0 and plain's exceeds 10 of them."""
    for sensor, cells in frame[frame.share == TENTH].groupby("sensor"):
        mec, plain = (cells[cells.candidate == label] for label in ("mec", "plain"))
        error = math.sqrt((mec["Monte Carlo error"] ** 2).sum()) / len(mec)
        ours, theirs = abs(mec["bias"].mean()) / error, abs(plain["bias"].mean()) / error
        if ours > 3 or theirs <= 10:
            return f"{sensor}: bias of mec {ours:.1f} and of plain {theirs:.1f} Monte Carlo errors"
    return True


# --------------------------------------------------------------------------------------------------------------- fits


def embedding_of(label: str, z: Any, x: Any, audited: Any, kernel: Any, rng: np.random.Generator) -> Any:
    """Return the signed sample that a candidate has for the truths, or the five of multiple imputation."""
    import torch

    from fairtrial.evaluation.corrected_mmd import baselines
    from fairtrial.evaluation.corrected_mmd.mec_mmd import corrected_sample

    known = x[audited]
    match label:
        case "oracle":
            return baselines.equally_weighted(x)
        case "mec":
            return corrected_sample(z, known, audited)
        case "mec-auto":
            return corrected_sample(z, known, audited, kernel=kernel, strength="auto", seed=rng)
        case "mec-calibrated":
            return corrected_sample(z, known, audited, proxy="calibrated", seed=rng)
        case "plain" | "deconvolution":
            return baselines.equally_weighted(z)
        case "audit-only":
            return baselines.equally_weighted(known)
        case "plug-in":
            return baselines.equally_weighted(baselines.plug_in(z, known, audited))
        case "imputation":
            return [baselines.equally_weighted(s) for s in baselines.imputations(z, known, audited, rng)]
        case "mispaired":
            return corrected_sample(z, known, torch.from_numpy(rng.permutation(len(z))[: len(audited)]))
    raise AssertionError(label)


FITTED = {
    "oracle": Candidate("oracle", "reference", uses=BASELINE),
    "mec": Candidate("mec", "method", uses=METHOD),
    "mec-auto": Candidate("mec-auto", "method", uses=METHOD),
    "mec-calibrated": Candidate("mec-calibrated", "method", uses=METHOD),
    "plain": Candidate("plain", "baseline", uses=BASELINE),
    "audit-only": Candidate("audit-only", "baseline", uses=BASELINE),
    "plug-in": Candidate("plug-in", "baseline", uses=BASELINE),
    "imputation": Candidate("imputation", "baseline", uses=BASELINE),
    "deconvolution": Candidate("deconvolution", "baseline", uses=BASELINE),
    "mispaired": Candidate("mispaired", "control", uses=METHOD),
}


def measure_fit(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float]:
    """Fit a location and a scale in closed form; nothing but the embedding differs between candidates."""
    import numpy as np
    import torch

    from fairtrial.evaluation.corrected_mmd import simulation
    from fairtrial.evaluation.corrected_mmd.kernels import median_kernel

    sensor, noise = simulation.SENSORS[cell["sensor"]]
    rng = generator(cell["seed"], "fit", cell["sensor"])
    x = rng.normal(simulation.LOCATION, simulation.SCALE, (params.rows, 1))
    z = torch.from_numpy(sensor(x, rng))
    audited = torch.from_numpy(rng.permutation(params.rows)[: max(10, round(cell["share"] * params.rows))])
    x = torch.from_numpy(x)
    known = x[audited]
    kernel, start = median_kernel(known), (known.mean().item(), known.std().item())
    own = generator(cell["seed"], "fit", *cell.values(), candidate.label)
    samples = embedding_of(candidate.label, z, x, audited, kernel, own)
    told = noise if candidate.label == "deconvolution" else 0.0
    samples = samples if isinstance(samples, list) else [samples]
    fits = [simulation.fit_location_scale(sample, kernel, start, told) for sample in samples]
    location, scale = np.mean(fits, axis=0)
    return {
        "location error": (location - simulation.LOCATION) ** 2,
        "scale error": (scale - simulation.SCALE) ** 2,
    }


def measure_g_and_k(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float]:
    """Fit a g-and-k simulator by its samples alone, seen by the saturating sensor, a tenth audited."""
    import torch

    from fairtrial.evaluation.corrected_mmd import simulation
    from fairtrial.evaluation.corrected_mmd.kernels import median_kernel
    from fairtrial.evaluation.corrected_mmd.loss import CorrectedMMDLoss

    rng = generator(cell["seed"], "g-and-k")
    rows = params.rows // 2
    x = simulation.g_and_k(simulation.G_AND_K, rng.standard_normal((rows, 1)))
    z = torch.from_numpy(simulation.saturation(x, rng))
    audited = torch.from_numpy(rng.permutation(rows)[: max(10, round(TENTH * rows))])
    x = torch.from_numpy(x)
    known = x[audited]
    kernel = median_kernel(known)
    own = generator(cell["seed"], "g-and-k", candidate.label)
    if candidate.role == "method":
        strength = "auto" if candidate.label == "mec-auto" else 1.0
        loss: Any = CorrectedMMDLoss(z, known, audited, kernel=kernel, strength=strength, fit_only=True, seed=own)  # type: ignore[arg-type]
    else:
        loss = simulation.SignedLoss(embedding_of(candidate.label, z, x, audited, kernel, own), kernel)
    start = known.median().item(), known.std().item()
    found = simulation.fit_g_and_k(loss, start, params.steps, 256, derive(cell["seed"], "simulator"))
    names = ("location error", "scale error", "skewness error", "tail error")
    return dict(zip(names, ((found - simulation.G_AND_K) ** 2).tolist(), strict=True))


@stage(save="npz")
def source_images(params: Params) -> dict[str, Any]:
    """Return sharp, labelled images to mix, in principal components: features, labels, centre and components."""
    import numpy as np

    from fairtrial.data.images import fashion_mnist

    images, labels = fashion_mnist("train")
    rng = generator(0, "source")
    rows = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[:150] for c in range(10)])
    pixels = images[rows].reshape(len(rows), -1) / 255.0
    centre = pixels.mean(0)
    components = np.linalg.svd(pixels - centre, full_matrices=False)[2][:20].T  # (784, 20)
    return {"features": (pixels - centre) @ components, "labels": labels[rows], "centre": centre, "to": components}


@stage(keep=True)
def target_images() -> Any:
    """Return test images sharp and degraded, both (n, 28, 28), and labels."""
    import numpy as np

    from fairtrial.data.images import fashion_mnist

    images, labels = fashion_mnist("test")
    small = images.reshape(-1, 7, 4, 7, 4).mean((2, 4))  # downscaled to 7 x 7, and blurred in going back
    large = np.repeat(np.repeat(small, 4, axis=1), 4, axis=2)
    return images, large, labels


def measure_shares(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float]:
    """Estimate the shares of classes among images seen degraded, a tenth of them also sharp, none labelled."""
    import numpy as np
    import torch

    from fairtrial.evaluation.corrected_mmd import simulation
    from fairtrial.evaluation.corrected_mmd.kernels import median_kernel

    source = stages(source_images, params)
    sharp, degraded, labels = stages(target_images)
    rng = generator(cell["mixture"], "mixture")
    wanted = rng.choice(10, params.rows, p=rng.dirichlet(np.ones(10)))
    rows = np.concatenate([rng.permutation(np.flatnonzero(labels == c))[: (wanted == c).sum()] for c in range(10)])
    x, z = (
        torch.from_numpy((pixels[rows].reshape(len(rows), -1) / 255.0 - source["centre"]) @ source["to"])
        for pixels in (sharp, degraded)
    )
    audited = torch.from_numpy(rng.permutation(len(rows))[: max(10, round(TENTH * len(rows)))])
    features = torch.from_numpy(source["features"])
    kernel = median_kernel(features)
    own = generator(cell["mixture"], "mixture", candidate.label)
    sample = embedding_of(candidate.label, z, x, audited, kernel, own)
    found = simulation.class_shares(sample, features, source["labels"], kernel)
    shares = np.bincount(labels[rows], minlength=10) / len(rows)
    return {"share error": float(((found - shares) ** 2).sum())}


def measure_cost(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float]:
    """Time one estimate of 2 ``rows`` noisy rows, a tenth audited, against ``rows`` others."""
    import time

    import torch

    from fairtrial.evaluation.corrected_mmd.baselines import plain_mmd2
    from fairtrial.evaluation.corrected_mmd.kernels import median_kernel
    from fairtrial.evaluation.corrected_mmd.mec_mmd import mec_mmd2
    from fairtrial.evaluation.corrected_mmd.simulation import saturation

    rng = generator(cell["repeat"], "cost")
    x, y = rng.normal(size=(2 * params.rows, 1)), torch.from_numpy(rng.normal(size=(params.rows, 1)))
    z, audited = torch.from_numpy(saturation(x, rng)), torch.arange(params.rows // 5)
    known = torch.from_numpy(x[: len(audited)])
    kernel = median_kernel(known)
    began = time.perf_counter()
    if candidate.role == "method":
        mec_mmd2(z, known, audited, y, kernel=kernel)
    else:
        plain_mmd2(z, y, kernel)
    return {"seconds": time.perf_counter() - began}


# -------------------------------------------------------------------------------------------------------------- parts


def parts(params: Params) -> tuple[Part, ...]:
    """Return the parts that the parameters ask for."""
    return (
        _simulated(params),
        *([_real(params)] if names_of(params) else []),
        _fit(params),
        _g_and_k(params),
        *([_label_shift(params)] if params.images else []),
        _cost(params),
    )


def _simulated(params: Params) -> Part:
    return Part(
        name="audits",
        candidates=tuple(AUDITED[c] for c in ("mec", "mec-pairwise", "plain", "audit-only", "mispaired")),
        metrics=AUDITED_METRICS,
        factors=(
            Factor("population", range(params.populations), kind="replicate", most=max(40, params.populations)),
            Factor("sensor", SENSORS),
            Factor("share", params.shares),
        ),
        variance="independent",
        claims=(
            exact("C1", "With a tenth audited, the bias of mec is within 3 Monte Carlo standard errors of 0 at every "
                  "sensor, where that of plain exceeds 10", unbiased),
            for_each("sensor", Claim("C3", "Correcting embeddings (mec) has less variance over audits than correcting "
                     "pairs of kernel values, at every sensor",
                     difference("mec", "mec-pairwise", "variance", scale="log"), above=0)),
            all_of("C4", "The 95% interval of mec covers the full-truth value in 92% to 98% of audits",
                   Claim("C4-low", "in more than 92%", level("mec", "coverage"), above=0.92),
                   Claim("C4-high", "in fewer than 98%", level("mec", "coverage"), below=0.98)),
            *(
                report(f"R1-{share:g}", f"coverage of mec's 95% interval with {share:.0%} audited",
                       level("mec", "coverage", {"share": share}))
                for share in params.shares
            ),
        ),
        measure=measure_simulated,
        group=("population", "sensor"),
    )  # fmt: skip


def _real(params: Params) -> Part:
    names = names_of(params)
    alike = [name for name in names if name != BETWEEN or params.data]
    rated = [name for name in alike if name in DOMAINS] if not params.data else alike
    shares = params.measured_shares
    within = [
        Claim(f"C5-{name}", f"{name}: mec-half errs less than plain between halves, a tenth audited",
              difference("mec-half", "plain", "squared error", {"sample": name, "share": TENTH}), above=0)
        for name in rated if TENTH in shares
    ]  # fmt: skip
    between = [
        Claim(f"C5-{share:g}", f"{BETWEEN}, {share:.0%} audited: mec-half errs less than audit-only",
              difference("mec-half", "audit-only", "squared error", {"sample": BETWEEN, "share": share}), above=0)
        for share in shares if BETWEEN in names and not params.data
    ]  # fmt: skip
    text = "In mean squared error against the full-truth value, mec-half beats plain between halves of every group"
    if between:
        text += ", and audit-only between two domains at every audit"
    return Part(
        name="measured",
        candidates=tuple(AUDITED[c] for c in ("mec-half", "mec", "plain", "audit-only", "mispaired")),
        metrics=AUDITED_METRICS,
        factors=(
            Factor("split", range(params.splits), kind="replicate", most=max(40, params.splits)),
            Factor("sample", names),
            Factor("share", shares),
        ),
        variance="independent",  # new halves and audits of the same sentences
        claims=(
            *([all_of("C5", text, *within, *between)] if within or between else []),
            *(
                report(f"R2-{name}", f"{name}: by how much mec-half errs less than plain, a tenth audited",
                       difference("mec-half", "plain", "squared error", {"sample": name, "share": TENTH}))
                for name in names if name not in rated and TENTH in shares
            ),
        ),
        measure=measure_real,
        group=("split", "sample"),
    )  # fmt: skip


def _fit(params: Params) -> Part:
    tenth = {"share": TENTH}

    def better(id: str, text: str, other: str, metric: str) -> Claim:
        return Claim(id, text, difference("mec-auto", other, metric, tenth), above=0)

    return Part(
        name="fit",
        candidates=tuple(FITTED.values()),
        metrics=(
            Metric("location error", "squared", higher_is_better=False),
            Metric("scale error", "squared", higher_is_better=False),
        ),
        factors=(
            Factor("seed", range(params.seeds), kind="replicate", most=max(200, params.seeds)),
            Factor("sensor", SENSORS),
            Factor("share", params.shares),
        ),
        variance="independent",
        claims=(
            all_of("C2", "With a tenth audited, the squared error in location of mec-auto is below that of the audit "
                   "alone and of plain",
                   better("C2-audit", "mec-auto errs less than audit-only", "audit-only", "location error"),
                   better("C2-plain", "mec-auto errs less than plain", "plain", "location error")),
            better("C6", "With a tenth audited, the squared error in scale of mec-auto is below the audit's alone",
                   "audit-only", "scale error"),
            *(
                report(f"R3-{label}", f"root mean squared error in location, a tenth audited: {label} over the oracle",
                       statistic(RootRatio(label, "location error")))
                for label in ("mec", "mec-auto", "mec-calibrated", "audit-only", "plain")
            ),
        ),
        measure=measure_fit,
    )  # fmt: skip


class RootRatio:
    """The root mean squared error of a candidate over that of the oracle, a tenth audited."""

    def __init__(self, label: str, metric: str) -> None:
        self.label, self.metric = label, metric

    def __call__(self, frame: pd.DataFrame) -> float:
        """Return the ratio of a part's frame."""
        means = frame[frame.share == TENTH].groupby("candidate")[self.metric].mean()
        return math.sqrt(means[self.label] / means["oracle"])


def _g_and_k(params: Params) -> Part:
    return Part(
        name="g-and-k",
        candidates=tuple(
            FITTED[c] for c in ("oracle", "mec", "mec-auto", "plain", "audit-only", "plug-in", "mispaired")
        ),
        metrics=tuple(
            Metric(f"{name} error", "squared", higher_is_better=False)
            for name in ("location", "scale", "skewness", "tail")
        ),
        factors=(Factor("seed", range(params.simulators), kind="replicate", most=max(40, params.simulators)),),
        variance="independent",
        claims=(
            report("R4", "g-and-k: by how much the squared error in location of mec-auto is below plain's",
                   difference("mec-auto", "plain", "location error")),
            report("R5", "g-and-k: by how much the squared error in location of mec-auto is below audit-only's",
                   difference("mec-auto", "audit-only", "location error")),
        ),
        measure=measure_g_and_k,
    )  # fmt: skip


def _label_shift(params: Params) -> Part:
    return Part(
        name="label shift",
        candidates=tuple(
            FITTED[c]
            for c in ("oracle", "mec", "mec-auto", "mec-calibrated", "plain", "audit-only", "plug-in", "mispaired")
        ),
        metrics=(Metric("share error", "squared, over classes", higher_is_better=False),),
        factors=(Factor("mixture", range(params.images), kind="replicate", most=max(100, params.images)),),
        variance="independent",
        claims=(
            report("R6", "shares of classes: by how much the squared error of mec-auto is below plain's",
                   difference("mec-auto", "plain", "share error")),
            report("R7", "shares of classes: by how much the squared error of mec-auto is below audit-only's",
                   difference("mec-auto", "audit-only", "share error")),
        ),
        measure=measure_shares,
    )  # fmt: skip


def _cost(params: Params) -> Part:
    return Part(
        name="cost",
        candidates=(AUDITED["mec"], AUDITED["plain"]),
        metrics=(Metric("seconds", "s", higher_is_better=False, timed=True),),
        factors=(Factor("repeat", range(params.repeats), kind="replicate"),),
        variance="independent",
        claims=(
            report("R8", "seconds of mec over those of plain, a tenth audited",
                   difference("mec", "plain", "seconds", scale="log")),
        ),
        measure=measure_cost,
    )  # fmt: skip


def check(params: Params) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import sample_path

    if params.data:
        for name in names_of(params):
            if len(own_rows(params, name)[0]) < 60:
                raise InputError(f"data={params.data}: group {name!r} has fewer than 60 rows; merge groups")
    elif set(params.measured) & {*DOMAINS, BETWEEN}:
        sample_path("vader")
    if params.images:
        sample_path("fashion-mnist")


trial = Trial(
    name="corrected_mmd",
    params=Params,
    parts=parts,
    presets={
        "smoke": {
            "rows": 100, "populations": 2, "audits": 8, "seeds": 2, "steps": 2, "simulators": 2, "shares": [TENTH],
            "measured": ["diabetes"], "measured_shares": [TENTH], "splits": 2, "split_audits": 4, "half": 60,
            "images": 0, "repeats": 1,
        },
        "full": {"populations": 20, "seeds": 200, "simulators": 20, "splits": 40, "images": 100, "repeats": 5},
    },
    check=check,
)  # fmt: skip
