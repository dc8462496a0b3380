"""Whether nonlinear surrogates close the gap between direct feedback alignment and backpropagation on small images.

A residual network and a vision transformer are trained from scratch by every rule, each at the learning rate that does
best for it on held-out images. The same draws of weights and batches make a replicate. A part of its own times one
backward pass, split into the jobs that could run side by side.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.data.arrays import check_examples, read_labelled
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
    for_each,
    report,
    stage,
    statistic,
)
from fairtrial.trial.tuning import best_point

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

    from fairtrial.training.feedback_alignment.direct import DirectFeedback

RATES = (3e-4, 1e-3, 3e-3)
ALIGNED = 200  # test images on which feedback is compared
TUNING = 10**6  # added to seeds for tuning


class FeedbackParams(BaseModel):
    """Parameters of the trial ``feedback-alignment``."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Input()] = Field(
        "fashion-mnist",
        description="a sample, 'digits' (scikit-learn's), 'tiny' (random, for tests), an .npz file with x (n, h, w) or "
        "(n, channels, h, w) and y (n,), or a folder with a folder of pictures for each class",
    )
    size: int = Field(28, ge=4, description="pixels a side, a multiple of 4; pictures of a folder are scaled to it")
    architectures: tuple[Literal["resnet8", "vit4"], ...] = Field(
        ("resnet8", "vit4"), min_length=1, description="networks", json_schema_extra={"scope": "plan"}
    )
    examples: int = Field(8000, ge=20, description="training images")
    held_out: int = Field(1000, ge=20, description="images the learning rate is chosen on")
    test_examples: int = Field(2000, ge=20, description="test images")
    epochs: int = Field(2, ge=1, description="passes over the training images")
    batch: int = Field(64, ge=2, description="images of a step")
    stride: Literal[1, 2, 4] = Field(4, description="of the residual network's first convolution")
    blocks: int = Field(8, ge=2, description="residual blocks, an even number")
    layers: int = Field(4, ge=1, description="transformer layers")
    timed_steps: int = Field(15, ge=1, description="backward passes of which the median time is taken")
    seeds: int = Field(3, ge=1, description="draws of weights and batches", json_schema_extra={"scope": "plan"})


# ----------------------------------------------------------------------------------------------------------------- data


@stage(keep=True)
def images(stages: Any, params: FeedbackParams) -> dict[str, torch.Tensor]:
    """Return standardised images (n, C, size, size) and labels of the sets 'train', 'held_out' and 'test'."""
    import torch

    counts = {"train": params.examples, "held_out": params.held_out, "test": params.test_examples}
    if params.data == "fashion-mnist":
        from fairtrial.data.images import garments

        x, y = garments(params.examples + params.held_out, size=params.size)
        test_x, test_y = garments(params.test_examples, split="test", size=params.size)
        x, y = torch.cat([x, test_x]), torch.cat([y, test_y])
    else:
        raw, labels = read_images(params)
        if len(labels) < sum(counts.values()):
            raise InputError(
                f"data={params.data}: {len(labels)} images for examples=, held_out= and test_examples= of {counts}: "
                "ask for fewer"
            )
        order = generator(0, "split").permutation(len(labels))[: sum(counts.values())]
        x, y = torch.from_numpy(raw[order]).float(), torch.from_numpy(labels[order]).long()
        x = (x - x.mean()) / x.std().clamp_min(1e-6)
    sizes = list(counts.values())
    parts = {f"{name}_x": part for name, part in zip(counts, x.split(sizes), strict=True)}
    return parts | {f"{name}_y": part for name, part in zip(counts, y.split(sizes), strict=True)}


def read_images(params: FeedbackParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the user's or the small images (n, C, h, w) and class numbers (n,)."""
    import numpy as np

    if params.data == "tiny":
        rng = generator(0, "tiny images")
        y = np.arange(params.examples + params.held_out + params.test_examples) % 3
        patterns = rng.standard_normal((3, 1, params.size, params.size))
        return 2 * patterns[y] + rng.standard_normal((len(y), 1, params.size, params.size)), y
    if params.data == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return x.reshape(-1, 1, 8, 8), y
    path = Path(params.data)
    return read_folder(path, params.size) if path.is_dir() else read_file(params.data)


def read_file(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (n, C, h, w) and labels of an .npz file, checked."""
    arrays = read_labelled(path)
    x, y = arrays["x"], arrays["y"]
    x = x[:, None] if x.ndim == 3 else x
    if x.ndim != 4 or x.shape[2] != x.shape[3] or x.shape[1] > x.shape[2]:
        raise InputError(f"{path}: x must be square images (n, h, h) or (n, channels, h, h), not {arrays['x'].shape}")
    return x, y


def read_folder(path: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return colour images (n, 3, size, size) of a folder that holds a folder of pictures for each class."""
    import numpy as np
    from PIL import Image

    kinds = sorted(folder for folder in path.iterdir() if folder.is_dir())
    files = [(file, k) for k, folder in enumerate(kinds) for file in sorted(folder.iterdir()) if file.is_file()]
    if len(kinds) < 2 or not files:
        raise InputError(f"{path}: a folder of pictures for each of two classes or more is needed")
    x = np.empty((len(files), 3, size, size), dtype=np.float32)
    for i, (file, _) in enumerate(files):
        try:
            with Image.open(file) as picture:
                x[i] = np.asarray(picture.convert("RGB").resize((size, size))).transpose(2, 0, 1)
        except OSError as error:
            raise InputError(f"{file}: cannot be read as a picture: {error}") from error
    return x, np.array([k for _, k in files])


# ------------------------------------------------------------------------------------------------------------- training

OPTIONS: dict[str, dict[str, Any]] = {  # of DirectFeedback
    "ndfa": {},
    "dfa": {"method": "dfa"},
    "learned-linear": {"surrogate": "linear"},
    "frozen-ndfa": {"learn": False},
    "drtp": {"method": "drtp"},
    "local": {"method": "local"},
    "permuted-feedback": {},
}


def network(architecture: str, data: dict[str, torch.Tensor], params: FeedbackParams, seed: int) -> torch.nn.Module:
    """Return the network for these images, its weights drawn from ``seed``."""
    from fairtrial.training.feedback_alignment.networks import resnet8, vit4

    channels, size = data["train_x"].shape[1], data["train_x"].shape[-1]
    classes = 1 + max(int(data[f"{name}_y"].max()) for name in ("train", "held_out", "test"))
    if architecture == "resnet8":
        return resnet8(channels, classes, blocks=params.blocks, stride=params.stride, seed=seed)
    return vit4(channels, size, classes, patch=size // 4, layers=params.layers, seed=seed)


def attached(label: str, model: torch.nn.Module, seed: int, rate: float = 1e-3) -> DirectFeedback | None:
    """Return the candidate's direct feedback, surrogates learning at the network's rate; None for other rules."""
    from fairtrial.training.feedback_alignment.baselines import PermutedFeedback
    from fairtrial.training.feedback_alignment.direct import DirectFeedback

    if label not in OPTIONS:
        return None
    made = PermutedFeedback if label == "permuted-feedback" else DirectFeedback
    return made(model, seed=seed, surrogate_lr=rate, **OPTIONS[label])


@stage(save="json")
def trained(
    stages: Any, candidate: Candidate, architecture: str, rate: float, seed: int, on: str, params: FeedbackParams
) -> dict[str, float | None]:
    """Train one network and return what it reaches on the set ``on``, how its feedback aligns, and what was added."""
    import torch
    from torch.nn import functional as F

    from fairtrial.training.feedback_alignment.baselines import feedback_alignment

    data = stages(images, params)
    x, y = data["train_x"], data["train_y"]
    model = network(architecture, data, params, derive(seed, "weights"))
    if candidate.label == "frozen-trunk":
        model.requires_grad_(False)
        list(model.modules())[-1].requires_grad_(True)  # the last linear layer
    feedback = attached(candidate.label, model, derive(seed, "feedback"), rate)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    g = torch_generator(seed, "batches")
    layerwise = candidate.label == "feedback-alignment"
    losses: list[float] = []
    with feedback_alignment(model, seed=derive(seed, "fixed")) if layerwise else nullcontext():
        for _ in range(params.epochs):
            losses = []
            for rows in torch.randperm(len(y), generator=g).split(params.batch):
                logits = model(x[rows])
                loss = F.cross_entropy(logits, y[rows])
                optimizer.zero_grad()
                if feedback is None:
                    loss.backward()
                else:
                    feedback.backward(loss, logits, labels=y[rows])
                optimizer.step()
                losses.append(loss.item())
    last = losses[-max(1, len(losses) // 10) :]
    if not all(map(math.isfinite, last)):
        return {"accuracy": None, "train_loss": None, "cosine": None, "gradient_cosine": None, "added": None}
    with torch.no_grad():
        accuracy = float((model(data[f"{on}_x"]).argmax(1) == data[f"{on}_y"]).float().mean())
    told: dict[str, float | None] = {"accuracy": accuracy, "train_loss": statistics.fmean(last), "cosine": None,
                                     "gradient_cosine": None, "added": 0.0}  # fmt: skip
    if on == "test":
        batch = data["test_x"][:ALIGNED], data["test_y"][:ALIGNED]
        if feedback is not None:
            blocks = feedback.alignment(*batch).values()
            told["cosine"] = statistics.fmean(block.cosine for block in blocks)
            told["gradient_cosine"] = statistics.fmean(block.gradient_cosine for block in blocks)
            made = [t for s in feedback.surrogates.values() for t in (*s.parameters(), *s.buffers())]
            told["added"] = sum(t.numel() for t in made) / sum(p.numel() for p in model.parameters())
        elif layerwise:
            told["cosine"] = layerwise_cosine(model, *batch, seed=derive(seed, "fixed"))
            told["added"] = 1.0
    return told


def layerwise_cosine(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, *, seed: int) -> float:
    """Return the mean cosine between feedback alignment's and backpropagation's feedback to the blocks."""
    from torch.nn import functional as F

    from fairtrial.training.feedback_alignment.alignments import block_feedback
    from fairtrial.training.feedback_alignment.baselines import feedback_alignment
    from fairtrial.training.feedback_alignment.blocks import find_blocks
    from fairtrial.training.feedback_alignment.direct import default_logits

    blocks = find_blocks(model)
    true, _, _ = block_feedback(model, blocks, x, y, logits=default_logits)
    with feedback_alignment(model, seed=seed):
        sent, _, _ = block_feedback(model, blocks, x, y, logits=default_logits)
    return statistics.fmean(
        float(F.cosine_similarity(a.flatten(1), b.flatten(1), eps=1e-30).mean())
        for a, b in zip(sent, true, strict=True)
    )


@stage(save="json")
def tuned(stages: Any, candidate: Candidate, architecture: str, params: FeedbackParams) -> float:
    """Return the learning rate with the best accuracy on the held-out images, from a draw no cell uses."""
    losses = []
    for point in candidate.grid or ():
        accuracy = stages(trained, candidate, architecture, point["rate"], TUNING, "held_out", params)["accuracy"]
        losses.append(math.inf if accuracy is None else 1 - accuracy)
    return best_point(stages, candidate, losses)["rate"]


def measure(candidate: Candidate, cell: Cell, params: FeedbackParams, stages: Any) -> dict[str, Any]:
    """Train at the candidate's own learning rate and look at the test set."""
    rate = stages(tuned, candidate, cell["architecture"], params)
    told = stages(trained, candidate, cell["architecture"], rate, cell["seed"], "test", params)
    if told["accuracy"] is None:
        return {"accuracy": math.inf, "train_loss": math.inf, "cosine": None, "gradient_cosine": None, "added": None}
    return told


def measure_backward(candidate: Candidate, cell: Cell, params: FeedbackParams, stages: Any) -> dict[str, Any]:
    """Time backward passes of one batch: the median sum of all jobs, and the median critical path."""
    from torch.nn import functional as F

    data = stages(images, params)
    model = network("resnet8", data, params, derive(cell["seed"], "weights"))
    feedback = attached(candidate.label, model, cell["seed"])
    rows = torch_rows(cell["seed"], len(data["train_y"]), params.batch)
    x, y = data["train_x"][rows], data["train_y"][rows]
    serial, critical = [], []
    for _ in range(params.timed_steps + 2):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        model.zero_grad()
        if feedback is None:
            began = time.perf_counter()
            loss.backward()
            serial.append(time.perf_counter() - began)
            critical.append(serial[-1])
        else:
            feedback.backward(loss, logits)
            timing = feedback.timing()
            serial.append(timing.serial)
            critical.append(timing.critical_path)
    return {"serial": statistics.median(serial[2:]), "critical_path": statistics.median(critical[2:])}


def torch_rows(seed: int, n: int, count: int) -> torch.Tensor:
    """Return ``count`` row numbers below ``n``."""
    import torch

    return torch.randperm(n, generator=torch_generator(seed, "timed"))[:count]


# ---------------------------------------------------------------------------------------------------------------- parts

GRID = tuple({"rate": rate} for rate in RATES)
DIRECT = ("direct", "graph", "jobs", "blocks", "surrogates", "alignments", "networks")
CANDIDATES = (
    Candidate("ndfa", "method", uses=DIRECT, grid=GRID),
    Candidate("backpropagation", "baseline", uses=("networks",), grid=GRID),
    Candidate("feedback-alignment", "baseline", uses=("baselines", "alignments", "networks"), grid=GRID),
    Candidate("dfa", "baseline", uses=DIRECT, grid=GRID),
    Candidate("drtp", "baseline", uses=DIRECT, grid=GRID),
    Candidate("learned-linear", "baseline", uses=DIRECT, grid=GRID),
    Candidate("frozen-ndfa", "baseline", uses=DIRECT, grid=GRID),
    Candidate("local", "baseline", uses=DIRECT, grid=GRID),
    Candidate("frozen-trunk", "control", uses=("networks",), grid=GRID),
    Candidate("permuted-feedback", "control", uses=("baselines", *DIRECT), grid=GRID),
)


def gap_closed(frame: pd.DataFrame) -> float:
    """Return the share of the gap between DFA and backpropagation that NDFA closes on the residual network."""
    rows = frame[frame["architecture"] == "resnet8"]
    ndfa, dfa, bp = (
        rows.loc[rows["candidate"] == label, "accuracy"].mean() for label in ("ndfa", "dfa", "backpropagation")
    )
    return float((ndfa - dfa) / (bp - dfa)) if bp > dfa else 0.0


def parts(params: FeedbackParams) -> tuple[Part, ...]:
    """Return the parts: training, and the time of a backward pass."""
    if params.blocks % 2 or params.size % 4:
        raise InputError(f"blocks={params.blocks}, size={params.size}: an even number, and a multiple of 4")
    seed = Factor("seed", range(params.seeds), kind="replicate", most=max(40, params.seeds))
    resnet = (("architecture", "resnet8"),)
    claims: list[Any] = [
        for_each(
            "architecture",
            Claim("C1", "NDFA's test accuracy exceeds DFA's on both architectures.",
                  difference("ndfa", "dfa", "accuracy"), above=0),
        ),
        all_of(
            "C3",
            "NDFA's feedback aligns with the true one better than learned linear feedback's, and that better than "
            "DFA's, by 0.02.",
            for_each("architecture", Claim("C3-learned", "NDFA's than learned linear feedback's",
                                           difference("ndfa", "learned-linear", "cosine"), above=0.02)),
            for_each("architecture", Claim("C3-fixed", "learned linear feedback's than DFA's",
                                           difference("learned-linear", "dfa", "cosine"), above=0.02)),
        ),
        for_each(
            "architecture",
            Claim("C4", "Training the blocks is worth at least a point over a frozen trunk.",
                  difference("ndfa", "frozen-trunk", "accuracy"), above=0.01),
        ),
        report("R2", "NDFA's test accuracy less backpropagation's", difference("ndfa", "backpropagation", "accuracy")),
        report("R3", "less that of surrogates which never learn", difference("ndfa", "frozen-ndfa", "accuracy")),
        report("R4", "less that of local losses", difference("ndfa", "local", "accuracy")),
        report("R5", "less that of feedback from another example's error",
               difference("ndfa", "permuted-feedback", "accuracy")),
        report("R6", "less that of feedback alignment layer by layer",
               difference("ndfa", "feedback-alignment", "accuracy")),
        report("R7", "alignment of the blocks' gradients, less that of learned linear feedback's",
               difference("ndfa", "learned-linear", "gradient_cosine")),
    ]  # fmt: skip
    if "resnet8" in params.architectures:
        claims[1:1] = [
            Claim(
                "C2",
                "On the residual network NDFA closes over 0.3 of the gap between DFA and backpropagation.",
                contrast({
                    ("ndfa", "accuracy", resnet): 1.0,
                    ("dfa", "accuracy", resnet): -0.7,
                    ("backpropagation", "accuracy", resnet): -0.3,
                }),
                above=0,
            ),
            report("R1", "the share of that gap", statistic(gap_closed)),
        ]  # fmt: skip
    training = Part(
        name="training",
        candidates=CANDIDATES,
        metrics=(
            Metric("accuracy", "on test images"),
            Metric("train_loss", "nats, last tenth of the steps", higher_is_better=False),
            Metric("cosine", "of the blocks' feedback with the true one"),
            Metric("gradient_cosine", "of the blocks' gradients with the true ones"),
            Metric("added", "of the network's parameters", higher_is_better=False),
        ),
        factors=(Factor("architecture", params.architectures), seed),
        variance="independent",
        claims=tuple(claims),
        measure=measure,
        group=("architecture", "seed"),
    )
    backward = Part(
        name="backward",
        candidates=(
            Candidate("ndfa", "method", uses=DIRECT),
            Candidate("backpropagation", "baseline", uses=("networks",)),
            Candidate("dfa", "baseline", uses=DIRECT),
        ),
        metrics=(
            Metric("serial", "s, all jobs", higher_is_better=False, timed=True),
            Metric("critical_path", "s, the longest job", higher_is_better=False, timed=True),
        ),
        factors=(Factor("seed", range(max(5, params.seeds)), kind="replicate", most=max(40, params.seeds)),),
        variance="independent",
        claims=(
            Claim(
                "C5",
                "With eight blocks the critical path is at most half of the serial backward pass.",
                difference("ndfa", "backpropagation", "critical_path", scale="log"),
                above=math.log(2),
            ),
            report("R8", "the logarithm of backpropagation's backward seconds over NDFA's, all jobs in turn",
                   difference("ndfa", "backpropagation", "serial", scale="log")),
        ),
        measure=measure_backward,
        group=("seed",),
    )  # fmt: skip
    return training, backward


def check(params: FeedbackParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    if Path(params.data).is_dir():
        read_folder(Path(params.data), 4)
    elif params.data != "digits":
        check_examples("data", params.data, read_file)


trial = Trial(
    name="feedback_alignment",
    params=FeedbackParams,
    parts=parts,
    presets={
        "smoke": {
            "data": "tiny", "size": 8, "examples": 20, "held_out": 20, "test_examples": 20,
            "epochs": 1, "batch": 20, "stride": 2, "blocks": 2, "layers": 2, "timed_steps": 1, "seeds": 2,
            "architectures": ("resnet8",),
        },
        "full": {
            "examples": 10_000, "held_out": 2000, "test_examples": 10_000, "epochs": 4, "stride": 1, "seeds": 5,
        },
    },
    check=check,
)  # fmt: skip
