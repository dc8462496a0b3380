"""What Fast Gauss-Newton keeps of the Gauss-Newton step, and what that buys on heads and on networks.

Mechanism: small networks whose competitors are set, against the dense full step. Heads: next-token features, at equal
processor time by mini-batches, and to convergence on one full batch. Networks: garments, at equal steps and equal time.
Every second-order candidate has the same control of damping, mini-batches and first damping; Adam and SGD are tuned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fairtrial.errors import InputError
from fairtrial.seeds import derive, generator, torch_generator
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
    for_each,
    level,
    report,
    stage,
)
from fairtrial.trial.tuning import best_point

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch
    from torch import Tensor, nn

RAISED = (0, 3, 8)  # logits that one competitor is raised by
DAMPINGS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
EXAMPLES = 32

L2 = 1e-4
HEAD_BATCH = 512
CHECKPOINTS = 8
WITHIN = 1e-3  # of the optimum
MOST_STEPS = 100

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)


class GaussNewtonParams(BaseModel):
    """Parameters of the trial ``gauss_newton``."""

    model_config = ConfigDict(extra="forbid")

    competing: tuple[int, ...] = Field((2, 3, 10, 50), description="classes of the small networks of the mechanism")
    features: Annotated[str, Input()] = Field(
        "tokens", description="of the heads: 'tokens' (states of model on text), 'digits', or a .npy file (n, D)"
    )
    labels: Annotated[str, Input()] = Field("", description="with features from a file: a .npy file of n integers")
    model: Annotated[str, Input()] = Field(
        "smollm2-135m", description="a sample, a save_pretrained folder or a .gguf file"
    )
    text: Annotated[str, Input()] = Field("wikipedia-articles", description="a sample, a .txt or .jsonl file, a folder")
    tokens: int = Field(12288, ge=512, description="tokens of text")
    classes: tuple[int, ...] = Field(
        (10, 100, 1000), description="heads are fitted for that many of the most frequent labels"
    )
    examples: int = Field(768, ge=32, description="examples of the full batch, drawn by each seed")
    seconds: float = Field(
        1.5, gt=0, description="processor seconds of a head's fit at 1000 classes; in proportion to their square root"
    )
    images: Literal["fashion-mnist", "digits"] = Field("fashion-mnist", description="of the networks")
    network_examples: int = Field(10000, ge=512, description="training images")
    networks: tuple[Literal["mlp", "cnn"], ...] = Field(("mlp",), description="networks", min_length=1)
    batches: tuple[int, ...] = Field((256, 1024), description="mini-batch sizes of the networks", min_length=1)
    steps: int = Field(60, ge=2, description="steps of a network's training")
    network_seconds: float = Field(1.0, gt=0, description="processor seconds of a network's training at equal time")
    seeds: int = Field(5, ge=2, le=40, description="seeds of every part", json_schema_extra={"scope": "plan"})

    @field_validator("classes", "competing")
    @classmethod
    def _classes(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 2 or list(value) != sorted(set(value)):
            raise InputError(f"{list(value)}: give ascending numbers of classes from 2 on")
        return value


FGN = Candidate("fgn", "method", uses=("optimizer",))
GGN = Candidate("ggn-cg", "baseline", uses=("baselines",))
SAMPLED = Candidate("mc-fisher", "baseline", uses=("baselines",))
EMPIRICAL = Candidate("empirical-fisher", "baseline", uses=("baselines",))
ADAM = Candidate("adam", "baseline", grid=tuple({"lr": rate} for rate in RATES))
SGD = Candidate("sgd", "baseline", grid=tuple({"lr": 10 * rate} for rate in RATES))
LBFGS = Candidate("l-bfgs", "baseline")
SHUFFLED = Candidate("shuffled", "control", uses=("baselines",))
IDENTITY = Candidate("identity", "control", uses=("baselines",))


def second_order(label: str, parameters: Any, seed: int, **how: Any) -> torch.optim.Optimizer:
    """Return the second-order optimizer behind a candidate's label."""
    from fairtrial.training.gauss_newton import baselines
    from fairtrial.training.gauss_newton.optimizer import FastGaussNewton

    match label:
        case "fgn":
            return FastGaussNewton(parameters, **how)
        case "ggn-cg":
            return baselines.GaussNewtonCG(parameters, **{**how, "solver": "cg"})
        case "mc-fisher":
            return baselines.SampledFisher(parameters, generator=torch_generator(seed, label), **how)
        case "empirical-fisher":
            return baselines.EmpiricalFisher(parameters, **how)
        case "shuffled":
            return baselines.ShuffledWeights(parameters, generator=torch_generator(seed, label), **how)
        case "identity":
            return baselines.DampedIdentity(parameters, **how)
    raise AssertionError(label)


def first_order(candidate: Candidate, parameters: Any, rate: float) -> torch.optim.Optimizer:
    """Return Adam, or SGD with momentum .9."""
    import torch

    if candidate.label == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


Step = Callable[["Tensor", "Tensor"], None]


def stepper(
    candidate: Candidate, model: nn.Module, seed: int, *, rate: float | None, l2: float = 0.0, **how: Any
) -> tuple[Step, torch.optim.Optimizer]:
    """Return a function that takes one training step on a batch, and its optimizer; ``rate`` is a tuned one's."""
    import torch

    if rate is None:
        optimizer = second_order(candidate.label, model.parameters(), seed, l2=l2, model=model, **how)

        def step(x: Tensor, y: Tensor) -> None:
            optimizer.step(lambda: (model(x), y))  # type: ignore[arg-type, return-value]

        return step, optimizer
    optimizer = first_order(candidate, model.parameters(), rate)

    def descend(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        penalty = l2 / 2 * sum(p.square().sum() for p in model.parameters()) if l2 else 0.0
        (torch.nn.functional.cross_entropy(model(x), y) + penalty).backward()
        optimizer.step()

    return descend, optimizer


def batches(n: int, size: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Yield the indices of mini-batches, each pass over all examples in a new order, without end."""
    import torch

    size = min(size, n)
    while True:
        order = torch.from_numpy(rng.permutation(n))
        yield from order[: n // size * size].split(size)


# ---------------------------------------------------------------------------------------------------------- mechanism


@stage(save="json")
def mechanism(classes: int, seed: int) -> list[dict[str, Any]]:
    """Return error, cosine and dropped trace of every candidate's damped step against the full one."""
    import torch

    from fairtrial.training.curvature import flatten, unflatten
    from fairtrial.training.gauss_newton.baselines import sampled_slopes
    from fairtrial.training.gauss_newton.margins import margins, split_softmax_hessian
    from fairtrial.training.gauss_newton.solving import ExplicitRows, row_space_direction
    from fairtrial.training.networks import mlp

    draw = torch_generator(seed, "mechanism", classes)
    model = mlp([10, 16, classes], seed=derive(seed, "mechanism", classes)).double()
    parameters, names = list(model.parameters()), [name for name, _ in model.named_parameters()]
    x = torch.randn(EXAMPLES, 10, generator=draw, dtype=torch.float64)
    y = torch.randint(classes, (EXAMPLES,), generator=draw)
    example = torch.arange(EXAMPLES)

    def outputs(flat: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, unflatten(flat, parameters), strict=True)), (x,))

    jacobian = torch.func.jacrev(outputs)(flatten(parameters).detach())  # (B, K, P)
    table = []
    for raised in RAISED:
        z = model(x).detach()
        z[example, (y + 1) % classes] += raised
        z[example, y] -= margins(z, y).margin  # p_y = 1/2
        found, (_, dropped), p = margins(z, y), split_softmax_hessian(z, y), z.softmax(1)
        curved = p[:, :, None] * (jacobian - (p[:, None] @ jacobian))
        full = jacobian.flatten(0, 1).T @ curved.flatten(0, 1) / EXAMPLES  # (P, P)
        gradient = ((found.slope * found.residual[:, None])[:, None] @ jacobian)[:, 0].mean(0)
        slopes = {
            "fgn": found.slope * found.weight.sqrt()[:, None],
            "mc-fisher": sampled_slopes(z, draw),
            "identity": torch.zeros_like(z),
        }
        for damping in DAMPINGS:
            factor = torch.linalg.cholesky(full + damping * torch.eye(len(full), dtype=full.dtype))
            theirs = -torch.cholesky_solve(gradient[:, None], factor)[:, 0]
            for label, slope in slopes.items():
                rows = ExplicitRows([((slope / math.sqrt(EXAMPLES))[:, None] @ jacobian)[:, 0]])
                ours = row_space_direction(rows, [gradient], damping).vector[0]
                table.append(
                    {
                        "candidate": label, "classes": classes, "raised": raised, "damping": damping,
                        "error": float((ours - theirs).norm() / theirs.norm()),
                        "cosine": float(torch.cosine_similarity(ours, theirs, dim=0)),
                        "dropped": max(0.0, float(dropped.diagonal(dim1=1, dim2=2).sum(1).mean())),
                    }
                )  # fmt: skip
    return table


def measure_mechanism(candidate: Candidate, cell: Cell, params: GaussNewtonParams, stages: Any) -> dict[str, Any]:
    """Look one setting up in the table of a seed."""
    (row,) = (
        row
        for row in stages(mechanism, cell["classes"], cell["seed"])
        if row["candidate"] == candidate.label and all(row[name] == cell[name] for name in ("raised", "damping"))
    )
    return {name: row[name] for name in ("error", "cosine", "dropped")}


def measure_order(candidate: Candidate, cell: Cell, params: GaussNewtonParams, stages: Any) -> dict[str, Any]:
    """Return Spearman correlations of the error with what it should follow, all else equal, means over the rest."""
    import pandas as pd

    frame = pd.DataFrame([row for k in params.competing for row in stages(mechanism, k, cell["seed"])])
    frame = frame[frame.candidate == candidate.label]
    several = frame[frame.classes > 2]  # with two nothing is dropped, and the error is rounding
    return {
        "by_concentration": _rank_correlation(several, "raised", ["classes", "damping"]),
        "by_damping": _rank_correlation(several, "damping", ["classes", "raised"]),
        "by_dropped": _rank_correlation(frame, "dropped", ["damping"]),
    }


def _rank_correlation(frame: pd.DataFrame, name: str, fixed: list[str]) -> float:
    """Return the mean over groups of equal ``fixed`` columns of Spearman's correlation of ``name`` and the error."""
    groups = (group for _, group in frame.groupby(fixed))
    correlations = [group[name].corr(group["error"], method="spearman") for group in groups]
    return float(sum(correlations) / len(correlations))


# --------------------------------------------------------------------------------------------------------------- heads


@stage(save="npz")
def features(stages: Any, params: GaussNewtonParams) -> dict[str, np.ndarray]:
    """Return ``x`` (n, D), scaled to unit length, and ``y`` (n,): states of a language model and their next tokens.

    Examples keep their order in the text, so that a split by order is one by documents.
    """
    import numpy as np
    import torch

    if params.features == "digits" and not Path("digits").exists():
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
    elif params.features != "tokens" or Path("tokens").exists():
        x, y = np.load(params.features), np.load(params.labels)
    else:
        from fairtrial.causal_lm.loading import load
        from fairtrial.causal_lm.windows import read_texts, windows
        from fairtrial.data.samples import cache_folder, sample_path
        from fairtrial.data.text import wikipedia_articles

        path = Path(params.model) if Path(params.model).exists() else sample_path(params.model)
        model, tokenizer = load(path, cache=cache_folder() / "models", dtype=torch.float32)
        texts = read_texts(params.text) if Path(params.text).exists() else wikipedia_articles()
        ids = windows(tokenizer, texts, 256).ids
        wanted = max(1, params.tokens // 256)
        if len(ids) < wanted:
            raise InputError(f"text={params.text}: it has {len(ids) * 256} tokens: give more text or --set tokens=")
        ids = ids[[i * len(ids) // wanted for i in range(wanted)]]  # spread over the text
        with torch.no_grad():  # what the model's own head sees: after the final norm
            states = torch.cat([model.base_model(input_ids=part).last_hidden_state for part in ids.split(4)])
        # The first state is an attention sink, the last has no next token.
        x = states[:, 1:-1].reshape(-1, states.shape[-1]).float().numpy()
        y = ids[:, 2:].reshape(-1).numpy()
    x = x.reshape(len(x), -1).astype(np.float32)
    return {"x": x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12), "y": y.astype(np.int64)}


@stage(keep=True)
def head_data(stages: Any, classes: int, params: GaussNewtonParams) -> dict[str, Tensor]:
    """Return training and test examples of the most frequent labels; the last quarter of the text is the test."""
    import numpy as np
    import torch

    data = stages(features, params)
    cut = len(data["y"]) * 3 // 4
    values, counts = np.unique(data["y"][:cut], return_counts=True)
    if len(values) < classes:
        raise InputError(f"the labels have {len(values)} classes: give --set classes=[{len(values)}] or fewer")
    frequent = values[np.argsort(-counts, kind="stable")[:classes]]
    number = {int(value): i for i, value in enumerate(frequent)}
    codes = np.array([number.get(int(value), -1) for value in data["y"]])
    stages.note(f"{classes} classes: {(codes[:cut] >= 0).sum()} training and {(codes[cut:] >= 0).sum()} test examples")
    parts = {}
    for name, where in (("train", slice(None, cut)), ("test", slice(cut, None))):
        known = codes[where] >= 0
        parts[f"x_{name}"] = torch.from_numpy(data["x"][where][known])
        parts[f"y_{name}"] = torch.from_numpy(codes[where][known])
    return parts


def head_of(data: dict[str, Tensor], classes: int) -> nn.Linear:
    """Return a linear head of zeros."""
    import torch

    head = torch.nn.Linear(data["x_train"].shape[1], classes, dtype=data["x_train"].dtype)
    for p in head.parameters():
        torch.nn.init.zeros_(p)
    return head


def objective(head: nn.Module, x: Tensor, y: Tensor, l2: float = L2) -> float:
    """Return the mean cross-entropy plus the penalty, in nats."""
    import torch

    with torch.no_grad():
        penalty = l2 / 2 * sum(float(p.square().sum()) for p in head.parameters()) if l2 else 0.0
        return float(torch.nn.functional.cross_entropy(head(x).double(), y)) + penalty


@stage()
def race(
    stages: Any, candidate: Candidate, classes: int, seed: int, rate: float | None, params: GaussNewtonParams
) -> dict[str, Any]:
    """Fit a head for its processor seconds; return seconds and training objective at checkpoints, and the test loss."""
    data = stages(head_data, classes, params)
    x, y = data["x_train"], data["y_train"]
    head = head_of(data, classes)
    step, _ = stepper(candidate, head, seed, rate=rate, l2=L2, solver="gram", ratio_batch="next")
    probe = slice(None, None, max(1, len(x) // 2048))
    stages(warm_up, candidate.label)
    budget = params.seconds * math.sqrt(classes / 1000)
    spent, steps = 0.0, 0
    seconds: list[float] = []
    losses: list[float] = []
    for chosen in batches(len(x), HEAD_BATCH, generator(seed, "heads", classes)):
        batch, labels = x[chosen], y[chosen]
        began = time.process_time()
        step(batch, labels)
        spent += time.process_time() - began
        steps += 1
        if spent >= budget * (len(seconds) + 1) / CHECKPOINTS:
            seconds.append(spent)
            losses.append(objective(head, x[probe], y[probe]))
        if spent >= budget:
            break
    test = objective(head, data["x_test"], data["y_test"], l2=0.0)
    return {"seconds": seconds, "train": losses, "test": test if math.isfinite(test) else math.inf, "steps": steps}


@stage(keep=True)
def warm_up(label: str) -> None:
    """Take steps on a small head, so that no candidate pays for what the first call of a process costs."""
    import torch

    x = torch.eye(64)
    data = {"x_train": x, "y_train": torch.arange(64)}
    rate = None if label not in ("adam", "sgd") else 1e-3
    step, _ = stepper(Candidate(label, "baseline"), head_of(data, 64), 0, rate=rate, l2=L2, solver="gram")
    for _ in range(3):
        step(x, data["y_train"])


@stage(save="json")
def head_rate(stages: Any, candidate: Candidate, classes: int, params: GaussNewtonParams) -> float:
    """Choose the learning rate by the training objective of a seed that no cell has."""
    losses = [stages(race, candidate, classes, -1, point["lr"], params)["train"][-1] for point in candidate.grid or ()]
    return best_point(stages, candidate, [loss if math.isfinite(loss) else math.inf for loss in losses])["lr"]


def measure_heads(candidate: Candidate, cell: Cell, params: GaussNewtonParams, stages: Any) -> dict[str, Any]:
    """Fit a head for equal time, and find when it reached what the full Gauss-Newton matrix reached in the end."""
    classes, seed = cell["classes"], cell["seed"]
    rate = stages(head_rate, candidate, classes, params) if candidate.grid else None
    mine = stages(race, candidate, classes, seed, rate, params)
    target = stages(race, GGN, classes, seed, None, params)["train"][-1]
    reached = [at for at, loss in zip(mine["seconds"], mine["train"], strict=True) if loss <= target]
    return {
        "train_loss": mine["train"][-1] if math.isfinite(mine["train"][-1]) else math.inf,
        "test_loss": mine["test"],
        "seconds_to_ggn": reached[0] if reached else 2 * mine["seconds"][-1],  # never: twice what was given (PAR2)
        "steps": float(mine["steps"]),
    }


# ---------------------------------------------------------------------------------------------------------- full batch


@stage()
def optimum(stages: Any, classes: int, seed: int, params: GaussNewtonParams) -> dict[str, Any]:
    """Draw a seed's full batch and minimise its objective by L-BFGS; return the batch and what L-BFGS went through."""
    import numpy as np
    import torch
    from scipy.optimize import minimize

    data = stages(head_data, classes, params)
    n = len(data["y_train"])
    chosen = generator(seed, "full").permutation(n)[: min(n, params.examples)].tolist()
    x, y = data["x_train"][chosen], data["y_train"][chosen]
    width = x.shape[1]

    def value(flat: Any) -> tuple[float, Any]:
        theta = torch.from_numpy(flat).to(x.dtype).view(classes, width + 1)
        logits = torch.addmm(theta[:, -1], x, theta[:, :-1].T)
        loss = torch.nn.functional.cross_entropy(logits, y) + L2 / 2 * theta.square().sum()
        c = logits.softmax(1)
        c[torch.arange(len(y)), y] -= 1
        c /= len(y)
        gradient = torch.cat([c.T @ x, c.sum(0)[:, None]], 1) + L2 * theta
        return float(loss), gradient.view(-1).double().numpy()

    losses, seconds, began = [], [], time.process_time()

    def note(intermediate_result: Any) -> None:
        losses.append(float(intermediate_result.fun))
        seconds.append(time.process_time() - began)

    options = {"maxiter": 400, "ftol": 1e-7, "gtol": 0.0}
    minimize(value, np.zeros(classes * (width + 1)), jac=True, method="L-BFGS-B", callback=note, options=options)
    return {"x_train": x, "y_train": y, "losses": losses, "seconds": seconds}


def measure_full(candidate: Candidate, cell: Cell, params: GaussNewtonParams, stages: Any) -> dict[str, Any]:
    """Count iterations and processor seconds until the objective is within 1e-3 of the least."""
    classes, seed = cell["classes"], cell["seed"]
    data = stages(optimum, classes, seed, params)
    target = min(data["losses"]) + WITHIN
    if candidate.label == "l-bfgs":
        first = next(i for i, loss in enumerate(data["losses"]) if loss <= target)
        return {"iterations": first + 1.0, "seconds": data["seconds"][first]}
    step, optimizer = stepper(candidate, head_of(data, classes), seed, rate=None, l2=L2, solver="gram")
    stages(warm_up, candidate.label)
    began = time.process_time()
    for steps in range(1, MOST_STEPS + 1):
        step(data["x_train"], data["y_train"])
        if optimizer.last.new_loss <= target:  # type: ignore[attr-defined]
            return {"iterations": float(steps), "seconds": time.process_time() - began}
    return {"iterations": math.inf, "seconds": time.process_time() - began}  # seconds: at least


# ------------------------------------------------------------------------------------------------------------ networks


@stage(keep=True)
def images(params: GaussNewtonParams) -> tuple[Tensor, Tensor]:
    """Return training images (n, 1, size, size) and labels (n,)."""
    import torch

    if params.images == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return torch.from_numpy(x / 8 - 1).float().view(-1, 1, 8, 8), torch.from_numpy(y)
    from fairtrial.data.images import garments

    return garments(params.network_examples)


def network_of(name: str, size: int, seed: int) -> nn.Module:
    """Return a tanh network with two hidden layers of 64, or a small convolutional one on images of half the size."""
    from torch import nn

    from fairtrial.training.networks import cnn, mlp

    if name == "mlp":
        return mlp([size**2, 64, 64, 10], seed=seed)
    return nn.Sequential(nn.AvgPool2d(2), cnn(size=size // 2, seed=seed))


@stage()
def trained(
    stages: Any, candidate: Candidate, network: str, size: int, seed: int, rate: float | None, seconds: float | None,
    params: GaussNewtonParams,
) -> dict[str, float]:  # fmt: skip
    """Train a network for the trial's steps, or for processor ``seconds``; return its training loss."""
    x, y = stages(images, params)
    model = network_of(network, x.shape[-1], derive(seed, "network"))
    step, optimizer = stepper(candidate, model, seed, rate=rate)
    spent, iterations, steps = 0.0, 0, 0
    for chosen in batches(len(x), size, generator(seed, "network", size)):
        batch, labels = x[chosen], y[chosen]
        began = time.process_time()
        step(batch, labels)
        spent += time.process_time() - began
        steps += 1
        iterations += optimizer.last.cg_iterations if rate is None else 0  # type: ignore[attr-defined]
        if spent >= seconds if seconds else steps == params.steps:
            break
    loss = objective(model, x[:4096], y[:4096], l2=0.0)
    return {"train_loss": loss if math.isfinite(loss) else math.inf, "steps": float(steps), "cg": iterations / steps}


@stage(save="json")
def network_rate(
    stages: Any, candidate: Candidate, network: str, size: int, seconds: float | None, params: GaussNewtonParams
) -> float:
    """Choose the learning rate by the training loss of a seed that no cell has."""
    losses = [
        stages(trained, candidate, network, size, -1, point["lr"], seconds, params)["train_loss"]
        for point in candidate.grid or ()
    ]
    return best_point(stages, candidate, losses)["lr"]


def measure_network(candidate: Candidate, cell: Cell, params: GaussNewtonParams, stages: Any) -> dict[str, Any]:
    """Train for equal steps."""
    which = cell["network"], cell["batch"]
    rate = stages(network_rate, candidate, *which, None, params) if candidate.grid else None
    found = stages(trained, candidate, *which, cell["seed"], rate, None, params)
    solves = candidate.grid is None and candidate.label != "identity"
    return {"train_loss": found["train_loss"], "cg_iterations": found["cg"] if solves else None}


def measure_network_time(candidate: Candidate, cell: Cell, params: GaussNewtonParams, stages: Any) -> dict[str, Any]:
    """Train for equal processor time."""
    which = params.networks[0], cell["batch"]
    rate = stages(network_rate, candidate, *which, params.network_seconds, params) if candidate.grid else None
    found = stages(trained, candidate, *which, cell["seed"], rate, params.network_seconds, params)
    return {"loss_at_time": found["train_loss"], "steps_at_time": found["steps"]}


# ---------------------------------------------------------------------------------------------------------------- parts


def parts(params: GaussNewtonParams) -> tuple[Part, ...]:
    """Return the parts: mechanism, order of errors, heads, full batch, networks at equal steps and at equal time."""
    seed = Factor("seed", range(params.seeds), kind="replicate", most=40)
    few, many = params.classes[0], params.classes[-1]
    moderate = tuple(k for k in params.classes if k <= 100) or params.classes

    def exact_for_two(frame: pd.DataFrame) -> bool | str:
        worst = frame[(frame.candidate == "fgn") & (frame.classes == 2)].error.max()
        return bool(worst < 1e-8) or f"the largest error is {worst:.1e}"

    def below(metric: str, candidate: str, other: str, id: str, text: str, **where: Any) -> Claim:
        return Claim(id, text, difference(candidate, other, metric, where or None), above=0)

    iterations = {("fgn", "iterations", (("classes", k),)): weight for k, weight in ((many, 1.0), (few, -1.5))}
    growth = Claim("B3-iterations", "iterations less 1.5 times those of few classes", contrast(iterations), below=0)

    mechanism_part = Part(
        name="mechanism",
        candidates=(FGN, SAMPLED, IDENTITY),
        metrics=(
            Metric("error", "of the full step", higher_is_better=False),
            Metric("cosine", "with the full step"),
            Metric("dropped", "trace", higher_is_better=False),
        ),
        factors=(seed, Factor("classes", params.competing), Factor("raised", RAISED), Factor("damping", DAMPINGS)),
        variance="independent",
        claims=(exact("A1", "for two classes the step is the full one, to an error below 1e-8", exact_for_two),),
        measure=measure_mechanism,
    )
    order = Part(
        name="order",
        candidates=(FGN, SAMPLED, IDENTITY),
        metrics=(
            Metric("by_concentration", "Spearman", higher_is_better=False),
            # A count of inversions: where it is -1 for every seed, nothing is left to estimate.
            Metric("by_damping", "Spearman", higher_is_better=False, exact=True),
            Metric("by_dropped", "Spearman"),
        ),
        factors=(seed,),
        variance="independent",
        claims=(
            all_of(
                "A2",
                "its error falls with the concentration of competitors and with damping: rank correlations below -0.8",
                Claim("A2-concentration", "with concentration", level("fgn", "by_concentration"), below=-0.8),
                Claim("A2-damping", "with damping", level("fgn", "by_damping"), below=-0.8),
            ),
            Claim(
                "A3",
                "at equal damping its error follows the dropped trace: a rank correlation above 0.7",
                level("fgn", "by_dropped"),
                above=0.7,
            ),
        ),
        measure=measure_order,
    )
    heads = Part(
        name="heads",
        candidates=(FGN, GGN, SAMPLED, ADAM, SHUFFLED),
        metrics=(
            Metric("train_loss", "nats", higher_is_better=False, timed=True),
            Metric("test_loss", "nats", higher_is_better=False, timed=True),
            Metric("seconds_to_ggn", "s", higher_is_better=False, timed=True),
            Metric("steps", "", timed=True),
        ),
        factors=(seed, Factor("classes", params.classes)),
        variance="independent",
        claims=(
            for_each(
                "classes",
                Claim(
                    "B1",
                    "at equal time it reaches the final training loss of ggn-cg sooner, at every number of classes",
                    difference("fgn", "ggn-cg", "seconds_to_ggn", scale="log"),
                    above=0,
                ),
            ),
            all_of(
                "B2",
                f"its test loss is no higher than mc-fisher's, at {' and '.join(map(str, moderate))} classes",
                *(
                    below("test_loss", "fgn", "mc-fisher", f"B2-{k}", f"at {k} classes", classes=k) for k in moderate
                ),
            ),
            report("R1", f"test loss at {many} classes against mc-fisher",
                   difference("fgn", "mc-fisher", "test_loss", {"classes": many})),
            report("R2", "training loss against adam", difference("fgn", "adam", "train_loss")),
        ),
        measure=measure_heads,
        group=("seed", "classes"),
    )  # fmt: skip
    full = Part(
        name="full_batch",
        candidates=(FGN, GGN, LBFGS),
        metrics=(
            Metric("iterations", "", higher_is_better=False, timed=True),
            Metric("seconds", "s", higher_is_better=False, timed=True),
        ),
        factors=(seed, Factor("classes", (few, many) if few < many else (few,))),
        variance="independent",
        claims=(
            all_of(
                "B3",
                f"its iterations to within 1e-3 of the optimum at {many} classes are within 1.5 times those at {few}, "
                "and take less time than ggn-cg's",
                *([growth] if few < many else []),
                Claim("B3-seconds", "processor time",
                      difference("fgn", "ggn-cg", "seconds", {"classes": many}, scale="log"), above=0),
            ),
            report("R3", f"seconds against l-bfgs at {many} classes",
                   difference("fgn", "l-bfgs", "seconds", {"classes": many}, scale="log")),
        ),
        measure=measure_full,
        group=("seed", "classes"),
    )  # fmt: skip
    network = Part(
        name="networks",
        candidates=(FGN, EMPIRICAL, SAMPLED, GGN, ADAM, SGD, SHUFFLED, IDENTITY),
        metrics=(
            Metric("train_loss", "nats", higher_is_better=False),
            Metric("cg_iterations", "a step", higher_is_better=False),
        ),
        factors=(seed, Factor("network", params.networks), Factor("batch", params.batches)),
        variance="independent",
        claims=(
            Claim(
                "C1",
                "at equal steps its training loss is below the empirical Fisher's",
                difference("fgn", "empirical-fisher", "train_loss"),
                above=0,
            ),
            report("R4", "training loss at equal steps against mc-fisher",
                   difference("fgn", "mc-fisher", "train_loss")),
            report("R5", "training loss at equal steps against ggn-cg", difference("fgn", "ggn-cg", "train_loss")),
            report("R6", "training loss at equal steps against adam", difference("fgn", "adam", "train_loss")),
            report("R7", "iterations of conjugate gradients a step against ggn-cg",
                   difference("fgn", "ggn-cg", "cg_iterations", scale="log")),
        ),
        measure=measure_network,
    )  # fmt: skip
    at_time = Part(
        name="network_time",
        candidates=(FGN, GGN, ADAM),
        metrics=(
            Metric("loss_at_time", "nats", higher_is_better=False, timed=True),
            Metric("steps_at_time", "", timed=True),
        ),
        factors=(seed, Factor("batch", params.batches[:1])),
        variance="independent",
        claims=(
            report("R8", "training loss at equal time against adam", difference("fgn", "adam", "loss_at_time")),
            report("R9", "training loss at equal time against ggn-cg", difference("fgn", "ggn-cg", "loss_at_time")),
        ),
        measure=measure_network_time,
    )
    return mechanism_part, order, heads, full, network, at_time


def check(params: GaussNewtonParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import find_sample, sample_path

    def needed(name: str) -> None:
        value = getattr(params, name)
        if Path(value).exists():
            return
        if "/" in value or "." in Path(value).name:
            raise InputError(f"{name}={value}: no such file or folder")
        sample_path(find_sample(value).name)

    if params.images == "fashion-mnist":
        sample_path("fashion-mnist")
    if params.features == "tokens" and not Path("tokens").exists():
        needed("model")
        needed("text")
    elif params.features != "digits" or Path("digits").exists():
        _check_arrays(params.features, params.labels, params.classes[-1])


def _check_arrays(features: str, labels: str, classes: int) -> None:
    import numpy as np

    arrays = {}
    for name, value in (("features", features), ("labels", labels)):
        if not value:
            raise InputError(f"{name}=: features from a file need --set labels=y.npy too")
        try:
            arrays[name] = np.load(value, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{name}={value}: not a .npy file of numbers ({error})") from None
    x, y = arrays["features"], arrays["labels"]
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"features {x.shape} and labels {y.shape} of {y.dtype}: give (n, D) numbers and n integers")
    if not np.isfinite(x).all():
        raise InputError(f"features={features}: some values are not finite")
    if (found := len(np.unique(y[: len(y) * 3 // 4]))) < classes:
        raise InputError(
            f"labels={labels}: the first three quarters have {found} classes: give --set classes=[{found}]"
        )


trial = Trial(
    name="gauss_newton",
    params=GaussNewtonParams,
    parts=parts,
    presets={
        "smoke": {
            "competing": (2, 3), "features": "digits", "classes": (3, 10), "examples": 64, "seconds": 0.02,
            "images": "digits", "networks": ("mlp",), "batches": (64,), "steps": 2, "network_seconds": 0.02, "seeds": 2,
        },
        "full": {
            "seeds": 10, "examples": 1500, "seconds": 4.0, "networks": ("mlp", "cnn"), "steps": 250,
            "network_seconds": 6.0,
        },
    },
    check=check,
)  # fmt: skip
