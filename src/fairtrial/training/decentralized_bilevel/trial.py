"""Whether normalised variance reduction withstands heavy-tailed noise in a network, and what normalisation costs.

Three problems: quadratics whose solution is known, under noise whose tail is chosen; the cleaning of flipped labels of
unevenly spread images; and next tokens on frozen features of a language model, whose tails are measured. Runs of all
graphs and seeds of a candidate are one computation; a cell reads its own. All candidates spend the same number of
gradient evaluations: those without variance reduction take twice the steps. Rates and clip thresholds are tuned on
seeds of their own, for each noise, their grids extended until the best is inside.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.causal_lm.named import DESCRIPTION, check_named, check_text_named, load_named
from fairtrial.data.arrays import check_examples, read_labelled
from fairtrial.errors import InputError, MissingExtraError
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
    difference,
    exact,
    level,
    report,
    stage,
    statistic,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

BLOCK = 20  # seeds of the oracle that run together
CLEANING_BLOCK = 5
GRAPHS = {"ring": "Ring", "exponential": "Exponential", "complete": "Complete", "star": "Star", "erdos": "Erdos"}
METHOD = "normalised-vr"


class BilevelParams(BaseModel):
    """Parameters of the trial ``decentralized-bilevel``."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Input()] = Field(
        "fashion-mnist", description="a sample, 'tiny' (random, for tests), or an .npz file with x (n, ...) and y (n,)"
    )
    graphs: tuple[str, ...] = Field(
        ("ring8", "exponential8", "complete8"),
        min_length=1,
        description="networks of one size: ring, exponential, complete, star or erdos, with the number of nodes",
    )
    noises: tuple[str, ...] = Field(
        ("gaussian", "t1.5", "t1.1", "t1.5-independent"),
        min_length=1,
        description="noise of the oracle: gaussian or t with its degrees of freedom; '-independent': of each gradient "
        "of a step, otherwise g(x,y) and g(x,z) see one sample",
        json_schema_extra={"scope": "plan"},
    )
    gaussian_scale: float = Field(0.5, ge=0, description="scale of Gaussian noise")
    heavy_scale: float = Field(0.1, ge=0, description="scale of Student-t noise")
    evaluations: int = Field(3000, ge=24, description="gradient evaluations of a run on the oracle")
    p: float = Field(1.5, gt=1, le=2, description="moment of the noise that the normalised methods take to be finite")
    seeds: int = Field(20, ge=1, description="noise draws of the oracle", json_schema_extra={"scope": "plan"})
    examples: int = Field(100, ge=4, description="training examples of a node; a quarter as many clean ones")
    batch: int = Field(16, ge=1, description="examples of a sample")
    flipped: float = Field(0.4, ge=0, lt=1, description="share of flipped training labels")
    concentration: float = Field(0.5, gt=0, description="of the Dirichlet draw of a node's classes; small is uneven")
    cleaning_evaluations: int = Field(1200, ge=24, description="gradient evaluations of a run of cleaning")
    cleaning_seeds: int = Field(5, ge=1, description="draws of the cleaning", json_schema_extra={"scope": "plan"})
    model: Annotated[str, Input()] = Field("smollm2-135m", description=f"whose features predict tokens: {DESCRIPTION}")
    text: Annotated[str, Input()] = Field(
        "wikipedia", description="'wikipedia', 'tiny' (for tests), a .txt or .jsonl file, or a folder of these"
    )
    texts: int = Field(64, ge=8, description="texts, dealt out whole to the nodes; an eighth tests, one tunes")
    tokens: int = Field(96, ge=4, description="first tokens of each text")
    classes: int = Field(64, ge=2, description="classes of the next token: the most frequent ones, and all others")
    groups: int = Field(8, ge=1, description="groups of classes by frequency, each with a penalty that is learnt")
    width: int = Field(32, ge=1, description="principal components of the features")
    language_evaluations: int = Field(1200, ge=24, description="gradient evaluations of a run on tokens")
    language_seeds: int = Field(5, ge=0, description="draws on tokens; 0: none", json_schema_extra={"scope": "plan"})
    processes: int = Field(
        4, ge=0, description="real processes compared with the simulator; 0: none", json_schema_extra={"scope": "plan"}
    )


def network(name: str) -> Any:
    """Return the network of a name such as ``ring8``."""
    from fairtrial.training.decentralized_bilevel import network as networks

    match = re.fullmatch(r"([a-z]+)(\d+)", name)
    if not match or match[1] not in GRAPHS or int(match[2]) < 2:
        raise InputError(f"graphs: {name!r} is none of {', '.join(GRAPHS)} with a number of nodes, such as ring8")
    return getattr(networks, GRAPHS[match[1]])(int(match[2]))


def noise_of(name: str, params: BilevelParams) -> Any:
    """Return the noise of a name such as ``t1.5-independent``."""
    from fairtrial.training.decentralized_bilevel.study import Noise

    match = re.fullmatch(r"(?:gaussian|t(\d+(?:\.\d+)?))(-independent)?", name)
    if not match or (match[1] and float(match[1]) <= 0):
        raise InputError(f"noises: {name!r} is neither gaussian nor t with degrees of freedom, such as t1.5")
    if match[1] is None:
        return Noise(math.inf, params.gaussian_scale, not match[2])
    return Noise(float(match[1]), params.heavy_scale, not match[2])


# --------------------------------------------------------------------------------------------------------------- tuning

Score = Callable[["torch.Tensor", "torch.Tensor"], "np.ndarray"]
"""Scores (K,), lower is better, of rates and clip thresholds (K,)."""


def search(label: str, score: Score) -> tuple[float, float]:
    """Return the best rate and clip threshold of six rates (times three thresholds), extended to an inner best."""
    import torch

    from fairtrial.training.decentralized_bilevel.study import NORMALISED

    low = -4 if label in NORMALISED else -5  # in half decades: from 0.01, from 0.003
    grids = [range(low, low + 6), range(3) if label == "clipped-sgd" else range(1)]
    found: dict[tuple[int, int], float] = {}
    for _ in range(6):
        new = [(i, j) for i in grids[0] for j in grids[1] if (i, j) not in found]
        tried = torch.tensor(new, dtype=torch.float64)
        found |= zip(new, score(10 ** (tried[:, 0] / 2), 5.0 ** tried[:, 1]).tolist(), strict=True)
        best = min(found, key=lambda key: found[key])
        edges = [len(grid) > 1 and at in (grid[0], grid[-1]) for grid, at in zip(grids, best, strict=True)]
        if not any(edges):
            break
        grids = [
            range(min(grid[0], at - 1), max(grid[-1], at + 1) + 1) if edge else grid
            for grid, at, edge in zip(grids, best, edges, strict=True)
        ]
    return 10 ** (best[0] / 2), 5.0 ** best[1]


@stage(save="json")
def tuned_oracle(stages: Any, candidate: Candidate, noise: str, params: BilevelParams) -> tuple[float, float]:
    """Return the candidate's rate and threshold, by the median gap of four seeds on the first graph."""
    import numpy as np
    import torch

    from fairtrial.training.decentralized_bilevel.study import run_oracle

    torch.set_num_threads(1)
    mixings = [network(params.graphs[0]).mixing]

    def score(rates: torch.Tensor, clips: torch.Tensor) -> np.ndarray:
        told = run_oracle(candidate.label, mixings, noise_of(noise, params), range(4), rates, clips,
                          evaluations=params.evaluations, p=params.p, role="tune")  # fmt: skip
        return np.median(told["gap"][0], -1)

    return search(candidate.label, score)


@stage(save="npz")
def oracle_runs(
    stages: Any, candidate: Candidate, noise: str, block: int, params: BilevelParams
) -> dict[str, np.ndarray]:
    """Run 20 seeds on all graphs with the tuned rates; (graphs, seeds) arrays, curves with their points in front."""
    import numpy as np
    import torch

    from fairtrial.training.decentralized_bilevel.study import run_oracle

    torch.set_num_threads(1)
    rate, clip = stages(tuned_oracle, candidate, noise, params)
    mixings = [network(name).mixing for name in params.graphs]
    told = run_oracle(
        candidate.label, mixings, noise_of(noise, params), range(block * BLOCK, (block + 1) * BLOCK),
        torch.tensor([rate]), torch.tensor([clip]),
        evaluations=params.evaluations, p=params.p, role="run",
    )  # fmt: skip
    shaped = {name: v if v.ndim == 1 else np.take(v, 0, axis=-2) for name, v in told.items()}
    return shaped | {"rate": np.array(rate)}


# ------------------------------------------------------------------------------------------------------------- cleaning


@stage(keep=True)
def images(stages: Any, params: BilevelParams) -> dict[str, torch.Tensor]:
    """Return inputs with a constant 1, (N, d), and labels: a pool for the nodes, and two test sets."""
    import numpy as np
    import torch

    if params.data == "tiny":
        rng = np.random.default_rng(0)
        x = torch.from_numpy(rng.standard_normal((400, 5))).float()
        y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        sets = {"pool": (x[:200], y[:200]), "tune": (x[200:300], y[200:300]), "test": (x[300:], y[300:])}
    elif Path(params.data).exists():
        arrays = read_own(params.data)
        order = np.random.default_rng(0).permutation(len(arrays["y"]))
        x, y = torch.from_numpy(arrays["x"][order]).float().flatten(1), torch.from_numpy(arrays["y"][order]).long()
        x, fifth = (x - x.mean(0)) / x.std(0).clamp_min(1e-6), len(y) // 5
        sets = {"pool": (x[2 * fifth :], y[2 * fifth :]), "tune": (x[:fifth], y[:fifth]),
                "test": (x[fifth : 2 * fifth], y[fifth : 2 * fifth])}  # fmt: skip
    else:
        from fairtrial.data.images import garments

        x, y = garments(7000, size=14)
        test_x, test_y = garments(2000, split="test", size=14)
        sets = {"pool": (x[1000:], y[1000:]), "tune": (x[:1000], y[:1000]), "test": (test_x, test_y)}
    told = {}
    for name, (inputs, labels) in sets.items():
        told[f"{name}_x"], told[f"{name}_y"] = torch.cat([inputs.flatten(1), torch.ones(len(labels), 1)], 1), labels
    return told


def read_own(path: str) -> dict[str, np.ndarray]:
    """Return x and y of an .npz file, checked."""
    import numpy as np

    arrays = read_labelled(path)
    if len(arrays["y"]) < 10 or not np.isfinite(arrays["x"]).all():
        raise InputError(f"{path}: at least 10 rows are needed, all of them finite")
    return arrays


def clean(stages: Any, label: str, seeds: range, test: str, rates: Any, clips: Any, params: BilevelParams) -> Any:
    """Run a candidate on data cleaning: (rates, seeds) arrays."""
    import torch

    from fairtrial.training.decentralized_bilevel.learning import run_cleaning, shard

    torch.set_num_threads(1)
    sets, net = stages(images, params), network(params.graphs[0])
    data = shard(
        sets["pool_x"], sets["pool_y"], (sets[f"{test}_x"], sets[f"{test}_y"]), seeds, n=net.size,
        train=params.examples, valid=max(params.examples // 4, 1), concentration=params.concentration,
        flipped=params.flipped,
    )  # fmt: skip
    return run_cleaning(label, data, net.mixing, seeds, torch.as_tensor(rates), torch.as_tensor(clips),
                        evaluations=params.cleaning_evaluations, batch=params.batch, p=params.p)  # fmt: skip


@stage(save="json")
def tuned_cleaning(stages: Any, candidate: Candidate, params: BilevelParams) -> tuple[float, float]:
    """Return the candidate's rate and threshold, by the test accuracy of a seed and a test set of their own."""

    def score(rates: torch.Tensor, clips: torch.Tensor) -> np.ndarray:
        told = clean(stages, candidate.label, range(10**6, 10**6 + 1), "tune", rates, clips, params)
        return -told["accuracy"][:, 0]

    return search(candidate.label, score)


@stage(save="npz")
def cleaning_runs(stages: Any, candidate: Candidate, block: int, params: BilevelParams) -> dict[str, np.ndarray]:
    """Run five draws with the tuned rate, (seeds,) arrays."""
    rate, clip = stages(tuned_cleaning, candidate, params)
    seeds = range(block * CLEANING_BLOCK, (block + 1) * CLEANING_BLOCK)
    told = clean(stages, candidate.label, seeds, "test", [rate], [clip], params)
    return {k: v[0] for k, v in told.items()}


# ------------------------------------------------------------------------------------------------------------- language


@stage(save="npz")
def next_tokens(stages: Any, params: BilevelParams) -> dict[str, np.ndarray]:
    """Return features (N, T, d) of tokens of N texts, the classes (N, T) of those that follow, and the classes' groups.

    Features are a constant 1 and the first principal components of the deepest block's output, of unit mean square. A
    text's first token is left out: its output, many times longer than all others, says nothing of the text.
    """
    import torch

    from fairtrial.causal_lm.hidden import token_hidden_states

    model, tokenizer = load_named(params.model)
    ids = token_ids(tokenizer, params)  # (N, T + 1)
    states = torch.stack(token_hidden_states(model, ids[:, :-1], [-1]))[:, 1:, 0].float()
    flat = states.flatten(0, 1) - states.mean((0, 1))
    _, _, axes = torch.linalg.svd(flat, full_matrices=False)
    features = flat @ axes[: params.width].T
    features = torch.cat([features / features.square().mean().sqrt(), torch.ones(len(features), 1)], 1)
    follows = ids[:, 2:]
    counts = torch.bincount(follows.flatten())
    frequent = counts.argsort(descending=True, stable=True)[: params.classes - 1]
    of = torch.full_like(counts, len(frequent))
    of[frequent] = torch.arange(len(frequent))
    classes = of[follows]
    rank = torch.bincount(classes.flatten()).argsort(descending=True, stable=True).argsort()
    groups = rank * min(params.groups, len(rank)) // len(rank)
    return {"features": features.unflatten(0, follows.shape).numpy(), "classes": classes.numpy(),
            "groups": groups.numpy()}  # fmt: skip


def token_ids(tokenizer: Any, params: BilevelParams) -> torch.Tensor:
    """Return the first tokens of the first texts that are long enough, (N, T + 1)."""
    import torch

    from fairtrial.causal_lm.windows import read_texts
    from fairtrial.data.text import wikipedia_articles
    from fairtrial.data.tiny import tiny_texts

    if params.text == "wikipedia":
        texts = wikipedia_articles()
    else:
        texts = tiny_texts(documents=params.texts) if params.text == "tiny" else read_texts(params.text)
    rows: list[list[int]] = []
    for text in texts:
        ids = tokenizer(text)["input_ids"][: params.tokens + 1]
        if len(ids) > params.tokens:
            rows.append(ids)
        if len(rows) == params.texts:
            return torch.tensor(rows)
    raise InputError(
        f"text={params.text}: {len(rows)} texts of {params.tokens + 1} tokens or more, and texts={params.texts}: "
        "give more or longer ones, or lower texts= or tokens="
    )


def language(stages: Any, seeds: range, test: str, params: BilevelParams) -> tuple[Any, torch.Tensor]:
    """Return the texts dealt out by ``seeds``, an eighth apart to test and one to tune, and the groups of classes."""
    import torch

    from fairtrial.training.decentralized_bilevel.learning import deal

    told = {name: torch.from_numpy(value) for name, value in stages(next_tokens, params).items()}
    x, y, eighth = told["features"], told["classes"], params.texts // 8
    held = slice(0, eighth) if test == "test" else slice(eighth, 2 * eighth)
    shards = deal(x[2 * eighth :], y[2 * eighth :], (x[held].flatten(0, 1), y[held].flatten()), seeds,
                  n=network(params.graphs[0]).size)  # fmt: skip
    return shards, told["groups"]


def learn(stages: Any, label: str, seeds: range, test: str, rates: Any, clips: Any, params: BilevelParams) -> Any:
    """Run a candidate on next tokens: (rates, seeds) arrays."""
    import torch

    from fairtrial.training.decentralized_bilevel.learning import run_language

    torch.set_num_threads(1)
    data, groups = language(stages, seeds, test, params)
    return run_language(label, data, groups, network(params.graphs[0]).mixing, seeds, torch.as_tensor(rates),
                        torch.as_tensor(clips), evaluations=params.language_evaluations, batch=params.batch,
                        p=params.p)  # fmt: skip


@stage(save="json")
def tuned_language(stages: Any, candidate: Candidate, params: BilevelParams) -> tuple[float, float]:
    """Return the candidate's rate and threshold, by the mean loss of four draws and on texts of their own."""

    def score(rates: torch.Tensor, clips: torch.Tensor) -> np.ndarray:
        return learn(stages, candidate.label, range(10**6, 10**6 + 4), "tune", rates, clips, params)["loss"].mean(1)

    return search(candidate.label, score)


@stage(save="npz")
def language_runs(stages: Any, candidate: Candidate, block: int, params: BilevelParams) -> dict[str, np.ndarray]:
    """Run five draws with the tuned rate, (seeds,) arrays."""
    rate, clip = stages(tuned_language, candidate, params)
    seeds = range(block * CLEANING_BLOCK, (block + 1) * CLEANING_BLOCK)
    return {k: v[0] for k, v in learn(stages, candidate.label, seeds, "test", [rate], [clip], params).items()}


# ------------------------------------------------------------------------------------------------------------- measures


def measure_oracle(candidate: Candidate, cell: Cell, params: BilevelParams, stages: Any) -> dict[str, Any]:
    """Read one seed on one graph."""
    import numpy as np

    block, at = divmod(cell["seed"], BLOCK)
    told, g = stages(oracle_runs, candidate, cell["noise"], block, params), params.graphs.index(cell["graph"])
    spent, slopes = told["evaluations"], told["slopes"][:, g, at]
    late = spent >= spent[-1] / 10
    return {
        "gap": told["gap"][g, at],
        "gradient": told["slope"][g, at],
        "consensus": told["consensus"][g, at],
        "decay": -float(np.polyfit(np.log(spent[late]), np.log(np.minimum(slopes[late], 1e30)), 1)[0]),
        "megabytes": told["megabytes"][g],
        "rate": float(told["rate"]),
        "gap_over_evaluations": Curve(spent.tolist(), np.minimum(told["gaps"][:, g, at], 1e30).tolist()),
    }


def measure_cleaning(candidate: Candidate, cell: Cell, params: BilevelParams, stages: Any) -> dict[str, Any]:
    """Read one draw."""
    block, at = divmod(cell["seed"], CLEANING_BLOCK)
    told = stages(cleaning_runs, candidate, block, params)
    return {name: float(told[name][at]) for name in ("accuracy", "node_accuracy", "auc", "consensus")}


def measure_language(candidate: Candidate, cell: Cell, params: BilevelParams, stages: Any) -> dict[str, Any]:
    """Read one draw."""
    block, at = divmod(cell["seed"], CLEANING_BLOCK)
    told = stages(language_runs, candidate, block, params)
    return {name: float(told[name][at]) for name in ("loss", "node_loss", "accuracy", "consensus")}


def measure_tails(candidate: Candidate, cell: Cell, params: BilevelParams, stages: Any) -> dict[str, Any]:
    """Estimate the tail index of the loss's gradient at the start, over samples of some tokens."""
    import warnings

    from fairtrial.training.decentralized_bilevel.learning import gradient_noise
    from fairtrial.training.decentralized_bilevel.tails import tail_index

    data, _ = language(stages, range(cell["seed"], cell["seed"] + 1), "test", params)
    lengths = gradient_noise(data, cell["seed"], tokens=cell["sample"], draws=TAIL_DRAWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fewer draws than decide: a smoke run's
        return {"alpha": min(tail_index(lengths).alpha, 1e6)}


def measure_processes(candidate: Candidate, cell: Cell, params: BilevelParams, stages: Any) -> dict[str, Any]:
    """Start processes that compare themselves with the simulator."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "equal.pt"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cell["processes"]),
            "-m", "fairtrial.training.decentralized_bilevel.agreement", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"torchrun ended with {done.returncode}: {done.stderr[-500:]}")
        told = torch.load(out, weights_only=True)
    return {"equal_steps": told["equal"] / told["steps"]}


# ---------------------------------------------------------------------------------------------------------------- parts

USES = ("recursion", "baselines", "study", "learning")
METHODS = (
    Candidate(METHOD, "method", uses=USES),
    Candidate("sgd", "baseline", uses=USES),
    Candidate("momentum", "baseline", uses=USES),
    Candidate("unnormalised-vr", "baseline", uses=USES),
    Candidate("clipped-sgd", "baseline", uses=USES),
    Candidate("normalised-momentum", "baseline", uses=USES),
    Candidate("no-gossip", "control", uses=USES),
)
FROZEN = Candidate("frozen-x", "control", uses=USES)
TAIL_DRAWS = 6000  # samples of gradients: enough to say whether their variance is infinite


def median_ratio(rival: str, noise: str, graph: str) -> Any:
    """Return the logarithm of the rival's median gap over the method's."""
    import numpy as np

    def value(frame: pd.DataFrame) -> float:
        # Arrays, since a bootstrap asks thousands of times.
        gap, candidate = frame["gap"].to_numpy(), frame["candidate"].to_numpy()
        there = (frame["noise"].to_numpy() == noise) & (frame["graph"].to_numpy() == graph)
        mine, other = (np.median(gap[there & (candidate == label)]) for label in (METHOD, rival))
        return float(np.log(min(other, 1e30) / max(mine, 1e-12)))

    return statistic(value)


def worst_beats(rival: str, noise: str) -> Callable[[pd.DataFrame], bool | str]:
    """Return whether the method's worst seed has a smaller gap than the rival's, on every graph."""

    def judge(frame: pd.DataFrame) -> bool | str:
        worst = frame[frame["noise"] == noise].groupby(["graph", "candidate"])["gap"].max().unstack()
        off = worst[worst[METHOD] >= worst[rival]]
        if off.empty:
            return True
        return "; ".join(f"{g}: {row[METHOD]:.3g} against {row[rival]:.3g}" for g, row in off.iterrows())

    return judge


def oracle_claims(params: BilevelParams) -> list[tuple[str, Any]]:
    """Return the claims on the oracle, each with the noise that it speaks of."""
    bound, ring = -math.log(1.15), params.graphs[0]
    medians = [
        Claim(f"C1-{graph}-{rival}", f"{rival}, {graph}", median_ratio(rival, "t1.1", graph), above=0)
        for graph in params.graphs
        for rival in ("sgd", "unnormalised-vr")
    ]
    prices = [
        Claim(f"C3-{graph}", graph, difference(METHOD, "unnormalised-vr", "gap", where, "log"), above=bound)
        for graph in params.graphs
        for where in [{"noise": "gaussian", "graph": graph}]
    ]
    shown = [
        ("clipped-sgd", "t1.1"), ("clipped-sgd", "t1.5"), ("unnormalised-vr", "t1.5"), ("sgd", "t1.5"),
        ("normalised-momentum", "t1.5"), ("no-gossip", "t1.5"), ("unnormalised-vr", "t1.5-independent"),
        ("clipped-sgd", "t1.5-independent"),
    ]  # fmt: skip
    return [
        ("t1.1", all_of(
            "C1",
            "Under Student-t noise of 1.1 degrees of freedom its median gap is below those of unclipped SGD and of "
            "unnormalized variance reduction.",
            *medians,
        )),
        ("t1.5", exact(
            "C2",
            "Under 1.5 degrees of freedom its worst seed beats that of a tuned clip.",
            worst_beats("clipped-sgd", "t1.5"),
        )),
        ("gaussian", all_of(
            "C3", "Under Gaussian noise it is at most 15 % worse than unnormalized variance reduction.", *prices
        )),
        ("t1.5", report(
            "C4",
            "Its gradient norm falls more steeply with the number of steps than normalized momentum's (shown).",
            difference(METHOD, "normalised-momentum", "decay", {"noise": "t1.5"}),
        )),
        *(
            (noise, report(f"R{k}", f"gap over that of {rival}, geometric mean, {noise}, {ring}",
                           difference(METHOD, rival, "gap", {"noise": noise, "graph": ring}, "log")))
            for k, (rival, noise) in enumerate(shown, 1)
        ),
    ]  # fmt: skip


def parts(params: BilevelParams) -> tuple[Part, ...]:
    """Return the oracle, the cleaning, next tokens with their tails, and the comparison with real processes."""
    if len({network(name).size for name in params.graphs}) > 1:
        raise InputError(f"graphs={list(params.graphs)}: all must have the same number of nodes")
    oracle = Part(
        name="oracle",
        candidates=METHODS,
        metrics=(
            Metric("gap", "F(x mean) - F*", higher_is_better=False),
            Metric("gradient", "|grad F(x mean)|", higher_is_better=False),
            Metric("consensus", "root mean square distance from the mean", higher_is_better=False),
            Metric("decay", "slope of -log |grad F| on log evaluations, last tenth on"),
            Metric("megabytes", "MB", higher_is_better=False, exact=True),
            Metric("rate", "tuned"),
            Metric("gap_over_evaluations", ""),
        ),
        factors=(
            Factor("noise", list(dict.fromkeys(params.noises))),
            Factor("graph", params.graphs),
            Factor("seed", range(params.seeds), kind="replicate", most=max(200, params.seeds)),
        ),
        variance="independent",
        claims=tuple(claim for noise, claim in oracle_claims(params) if noise in params.noises),
        measure=measure_oracle,
        group=("noise", "seed"),
    )  # fmt: skip
    cleaning = Part(
        name="cleaning",
        candidates=(*METHODS, FROZEN),
        metrics=(
            Metric("accuracy", "of the averaged model"),
            Metric("node_accuracy", "of the nodes' own models, mean"),
            Metric("auc", "of the weights for flipped labels"),
            Metric("consensus", "root mean square distance from the mean", higher_is_better=False),
        ),
        factors=(Factor("seed", range(params.cleaning_seeds), kind="replicate", most=max(40, params.cleaning_seeds)),),
        variance="independent",
        claims=(
            Claim(
                "C5",
                "Without gossip at least 3 points of accuracy are lost on unevenly spread data.",
                difference(METHOD, "no-gossip", "accuracy"),
                above=0.03,
            ),
            report("R11", "accuracy lost without gossip by the nodes' own models",
                   difference(METHOD, "no-gossip", "node_accuracy")),
            report("R12", "accuracy gained by learning weights", difference(METHOD, "frozen-x", "accuracy")),
            report("R13", "area under the curve of the weights for flipped labels", level(METHOD, "auc")),
            *(
                report(f"R{k}", f"accuracy gained over {rival}", difference(METHOD, rival, "accuracy"))
                for k, rival in enumerate(("sgd", "clipped-sgd", "unnormalised-vr", "normalised-momentum"), 14)
            ),
        ),
        measure=measure_cleaning,
    )  # fmt: skip
    found = [oracle, cleaning]
    draws = Factor("seed", range(params.language_seeds), kind="replicate", most=max(40, params.language_seeds))
    if params.language_seeds:
        tokens = Part(
            name="language",
            candidates=(*METHODS, FROZEN),
            metrics=(
                Metric("loss", "nats a token, of the averaged model", higher_is_better=False),
                Metric("node_loss", "nats a token, of the nodes' own models, mean", higher_is_better=False),
                Metric("accuracy", "of the averaged model"),
                Metric("consensus", "root mean square distance from the mean", higher_is_better=False),
            ),
            factors=(draws,),
            variance="independent",
            claims=tuple(
                report(f"R{k}", f"nats a token below {rival} on next tokens", difference(METHOD, rival, "loss"))
                for k, rival in enumerate([c.label for c in (*METHODS[1:], FROZEN)], 18)
            ),
            measure=measure_language,
        )
        tails = Part(
            name="tails",
            candidates=METHODS[:1],
            metrics=(Metric("alpha", "tail index of the length of gradient noise"),),
            factors=(Factor("sample", tuple(dict.fromkeys((1, params.batch)))), draws),
            variance="independent",
            claims=tuple(
                report(f"R{k}", f"tail index of gradient noise on next tokens, samples of {size}",
                       level(METHOD, "alpha", {"sample": size}))
                for k, size in enumerate(dict.fromkeys((1, params.batch)), 25)
            ),
            measure=measure_tails,
        )  # fmt: skip
        found += [tokens, tails]
    if params.processes:
        found.append(
            Part(
                name="processes",
                candidates=METHODS[:1],
                metrics=(Metric("equal_steps", "share of steps equal to the bit", exact=True),),
                factors=(Factor("processes", [params.processes]),),
                variance="independent",
                claims=(
                    exact(
                        "C6",
                        "Processes over gloo compute bit for bit what the simulator does.",
                        lambda frame: bool((frame["equal_steps"] == 1).all()),
                    ),
                ),
                measure=measure_processes,
                group=(),
            )
        )
    return tuple(found)


def check(params: BilevelParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    for name in params.noises:
        noise_of(name, params)
    check_examples("data", params.data, read_own)
    if params.language_seeds:
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("lm", error.name) from error
        check_named(params.model)
        check_text_named(params.text)


trial = Trial(
    name="decentralized_bilevel",
    params=BilevelParams,
    parts=parts,
    presets={
        "smoke": {
            "data": "tiny", "graphs": ("ring4",), "noises": ("t1.5",), "evaluations": 24, "seeds": 2,
            "examples": 8, "batch": 4, "cleaning_evaluations": 24, "cleaning_seeds": 2, "processes": 0,
            "model": "tiny", "text": "tiny", "texts": 12, "tokens": 8, "classes": 4, "groups": 2, "width": 4,
            "language_evaluations": 24, "language_seeds": 2,
        },
        "full": {
            "noises": ("gaussian", "gaussian-independent", "t1.5", "t1.5-independent", "t1.1", "t1.1-independent"),
            "evaluations": 12_000, "seeds": 60, "cleaning_evaluations": 2400, "cleaning_seeds": 10,
            "language_evaluations": 4800, "language_seeds": 10,
        },
    },
    check=check,
)  # fmt: skip
