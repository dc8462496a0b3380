"""What 4-bit training costs nGPT and a usual transformer, and where the signal of their dot products comes from.

Both are trained from the same seed on the same batches, in float32 and in NVFP4; the gap between the two is the price.
Learning rates are chosen for each architecture in float32, never for a precision. Coherence is read on the models
trained in float32, where it is a property of the architecture and not of what noise did to it.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.errors import InputError
from fairtrial.seeds import derive
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
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

FOLDS = 3
TUNING = -1  # the seed on which learning rates are chosen
READING = ("q", "k", "v", "up", "gate")  # the layers that read the residual stream
KINDS = (*READING, "o", "down")
WIDTHS = (64, 128, 256, 512)
PRECISIONS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "nvfp4": {"recipe": "nvfp4"},
    "nvfp4-usual": {"recipe": "nvfp4", "tensor_scale": "tensor", "grad_scale": "tensor", "hadamard": True},
    "int4": {"recipe": "int4"},
}
SOURCES = ("wikipedia-articles", "news", "tiny")


class LowPrecisionParams(BaseModel):
    """Parameters of the trial ``low_precision``."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Input()] = Field(
        "wikipedia-articles",
        description="a sample (wikipedia-articles, news), 'tiny' (for tests), a .txt or .jsonl file, a folder of "
        "these, or a .bin of token ids",
    )
    tokenizer: Annotated[str, Input()] = Field(
        "", description="a folder of a tokenizer or 'smollm2-135m'; left out, tokens are bytes"
    )
    dtype: str = Field("uint16", pattern="^uint(16|32)$", description="of the ids in a .bin file: uint16 or uint32")
    width: int = Field(128, ge=16, description="of the hidden states")
    layers: int = Field(2, ge=1, description="blocks")
    heads: int = Field(4, ge=1, description="attention heads")
    steps: int = Field(100, ge=1, description="steps of training")
    batch: int = Field(8, ge=1, description="sequences a step")
    length: int = Field(96, ge=8, description="tokens a sequence")
    validation: int = Field(32, ge=1, description="sequences of a validation fold")
    rates: tuple[float, ...] = Field(
        (1e-3, 3e-3, 1e-2, 3e-2), min_length=1, description="learning rates to choose from"
    )
    widths: tuple[int, ...] = Field((), description="further widths at which coherence is measured")
    seeds: int = Field(5, ge=1, le=40, description="independent trainings", json_schema_extra={"scope": "plan"})
    noise_draws: int = Field(8, ge=2, description="draws of the weight noise that flatness is measured by")
    timing_steps: int = Field(5, ge=2, description="steps of a timing")
    device: str = Field("cpu", description="a torch device")


# ---------------------------------------------------------------------------------------------------------------- texts


def ids_of(params: LowPrecisionParams) -> tuple[np.ndarray, int]:
    """Return all token ids (n,) and the size of the vocabulary."""
    from fairtrial.lm.low_precision.tokens import read_tokens

    tokenizer, size = None, 256
    if params.tokenizer and not params.text.endswith(".bin"):
        tokenizer = tokenizer_of(params.tokenizer)
        size = len(tokenizer)
    ids = read_tokens(texts(params), tokenizer, dtype=params.dtype)
    if params.text.endswith(".bin"):
        size = int(ids.max()) + 1
    return ids, size


def tokenizer_of(name: str) -> Any:
    """Return the tokenizer of a folder or of the sample model."""
    if not Path(name).exists():
        from fairtrial.causal_lm.loading import load
        from fairtrial.data.samples import cache_folder, sample_path

        return load(sample_path(name), cache=cache_folder() / "models")[1]
    from transformers import AutoTokenizer

    from fairtrial.quiet import transformers_silent

    with transformers_silent():
        return AutoTokenizer.from_pretrained(name, local_files_only=True)


def texts(params: LowPrecisionParams) -> Any:
    """Return the texts, or the path they are read from."""
    from fairtrial.data.text import news_articles, wikipedia_articles
    from fairtrial.data.tiny import tiny_texts

    if params.text == "tiny":
        return tiny_texts(documents=8)
    if params.text in SOURCES:
        return wikipedia_articles() if params.text == "wikipedia-articles" else news_articles()
    return params.text


@stage(keep=True)
def tokens(stages: Any, params: LowPrecisionParams) -> dict[str, Any]:
    """Return ``train`` ids (n,), ``folds`` of sequences (validation, length), and ``size`` of the vocabulary.

    The last tenth of the text, or as much as the folds need, is held out.
    """
    import numpy as np
    import torch

    ids, size = ids_of(params)
    need = FOLDS * params.validation * params.length
    held = max(need, len(ids) // 10)
    if len(ids) - held < params.batch * params.length:
        raise InputError(
            f"text={params.text}: {len(ids)} tokens; {held} are held out, and what is left is less than one batch of "
            f"{params.batch} x {params.length}: give more text, or less validation="
        )
    starts = np.linspace(len(ids) - held, len(ids) - params.length, FOLDS * params.validation).astype(int)
    sequences = torch.from_numpy(ids[starts[:, None] + np.arange(params.length)].astype(np.int64))
    folds = [sequences[i::FOLDS].to(params.device) for i in range(FOLDS)]
    return {"train": ids[: len(ids) - held], "folds": folds, "size": size}


# ------------------------------------------------------------------------------------------------------------- training


def build(architecture: str, precision: str, width: int, seed: int, size: int, params: LowPrecisionParams) -> nn.Module:
    """Return a model of one architecture, its linear layers converted to a precision."""
    from fairtrial.lm.low_precision.gpt import GPT
    from fairtrial.lm.low_precision.linear import convert_linears
    from fairtrial.lm.low_precision.ngpt import NGPT, NGPTConfig
    from fairtrial.lm.low_precision.transformer import TransformerConfig

    shape: dict[str, Any] = {"vocab_size": size, "width": width, "layers": params.layers, "heads": params.heads}
    model = (
        NGPT(NGPTConfig(**shape), seed=seed) if architecture == "ngpt" else GPT(TransformerConfig(**shape), seed=seed)
    )
    model.to(params.device)
    if (options := PRECISIONS[precision]) is not None:
        convert_linears(model, **options, seed=derive(seed, "rounding"))
    return model


def optimizer_of(architecture: str, model: nn.Module, rate: float, steps: int) -> tuple[Any, Any]:
    """Return AdamW and its schedule: a cosine to zero, for GPT after warm-up over a twentieth and with weight decay."""
    import torch

    from fairtrial.lm.low_precision.sphere import HypersphereHook

    usual = architecture == "gpt"
    decay = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": decay, "weight_decay": 0.1 if usual else 0.0}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
    if not usual:
        HypersphereHook(model).attach(optimizer)
    warm = max(1, steps // 20) if usual else 0

    def share(step: int) -> float:
        return (
            (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
        )

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def train_step(model: nn.Module, ids: torch.Tensor, optimizer: Any, schedule: Any, clip: bool) -> torch.Tensor:
    """Take one step and return the loss before it."""
    import torch

    optimizer.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss.detach()


@stage(save="json")
def trained(
    stages: Any, architecture: str, precision: str, width: int, seed: int, rate: float, params: LowPrecisionParams
) -> dict[str, Any]:
    """Train one model and return its validation losses, its dot products, and how its loss answers to noise.

    ``losses`` is None where training diverged.
    """
    import torch

    from fairtrial.lm.low_precision.flatness import loss_rise
    from fairtrial.lm.low_precision.snr import dot_product_snr
    from fairtrial.lm.low_precision.tokens import token_batches

    data = stages(tokens, params)
    model = build(architecture, precision, width, seed, data["size"], params)
    optimizer, schedule = optimizer_of(architecture, model, rate, params.steps)
    batches = token_batches(
        data["train"], batch=params.batch, length=params.length, steps=params.steps, seed=derive(seed, "batches")
    )
    for ids in batches:
        loss = train_step(model, ids.to(params.device), optimizer, schedule, clip=architecture == "gpt")
    if not math.isfinite(float(loss)):
        return {"losses": None, "layers": [], "shuffled": [], "rise": None}
    model.eval()
    with torch.no_grad():
        losses = [float(model(fold, labels=fold).loss) for fold in data["folds"]]
    fold = data["folds"][0]
    rise = loss_rise(model, fold[:8], sigmas=(0.1,), draws=params.noise_draws)
    read, shuffled = (dot_product_snr(model, fold, shuffle_seed=shuffle) for shuffle in (None, seed))
    return {
        "losses": losses,
        "layers": read.to_dict("records"),
        "shuffled": shuffled.to_dict("records"),
        "rise": float(rise["rise"][0]),
    }


@stage(save="json")
def tuned(stages: Any, architecture: str, rates: tuple[float, ...], params: LowPrecisionParams) -> float:
    """Return the learning rate with the least validation loss in float32, on a seed no cell has."""
    losses = {}
    for rate in rates:
        told = stages(trained, architecture, "fp32", params.width, TUNING, rate, params)["losses"]
        losses[rate] = math.inf if told is None else sum(told)
    return min(losses, key=losses.__getitem__)


def result_of(
    stages: Any, candidate: Candidate, precision: str, width: int, seed: int, params: LowPrecisionParams
) -> dict[str, Any]:
    """Return what :func:`trained` says of a candidate's architecture in some precision, at its tuned rate."""
    architecture = candidate.label.partition("-")[0]
    assert candidate.grid is not None
    rate = stages(tuned, architecture, tuple(point["lr"] for point in candidate.grid), params)
    return stages(trained, architecture, precision, width, seed, rate, params)


# ------------------------------------------------------------------------------------------------------------- measures


def measure_training(candidate: Candidate, cell: Cell, params: LowPrecisionParams, stages: Any) -> dict[str, Any]:
    """Compare one architecture in one precision with itself in float32, on one fold."""
    precision = candidate.label.partition("-")[2]
    found = result_of(stages, candidate, precision, params.width, cell["seed"], params)
    whole = result_of(stages, candidate, "fp32", params.width, cell["seed"], params)
    if found["losses"] is None or whole["losses"] is None:
        return {
            "val_loss": math.inf,
            "gap": math.inf,
            "loss_rise": math.inf,
            "snr_db": None,
            "kappa": None,
            "rho": None,
        }
    loss = found["losses"][cell["fold"]]
    layers = found["layers"]
    return {
        "val_loss": loss,
        "gap": None if precision == "fp32" else loss - whole["losses"][cell["fold"]],
        "loss_rise": found["rise"],
        "snr_db": mean(10 * math.log10(row["snr"]) for row in layers),
        "kappa": mean(row["kappa_signal"] for row in layers),
        "rho": mean(row["rho"] for row in layers),
    }


def measure_coherence(candidate: Candidate, cell: Cell, params: LowPrecisionParams, stages: Any) -> dict[str, Any]:
    """Read the dot products of one kind of layer in a model trained in float32, mean over its blocks."""
    found = result_of(stages, candidate, "fp32", cell["width"], cell["seed"], params)
    rows = found["shuffled" if candidate.role == "control" else "layers"]
    mine = [row for row in rows if row["layer"].rpartition(".")[2] == cell["kind"]]
    if not mine:
        return dict.fromkeys(("kappa_signal", "kappa_noise", "rho", "rho_noise", "snr_db", "snr_elem_db"))
    told = {name: mean(row[name] for row in mine) for name in ("kappa_signal", "kappa_noise", "rho", "rho_noise")}
    decibel = {f"{name}_db": mean(10 * math.log10(row[name]) for row in mine) for name in ("snr", "snr_elem")}
    return told | decibel


def mean(values: Any) -> float:
    """Return the mean of some numbers."""
    values = list(values)
    return sum(values) / len(values)


def measure_time(candidate: Candidate, cell: Cell, params: LowPrecisionParams, stages: Any) -> dict[str, Any]:
    """Time steps of training, emulation included; the median."""
    import torch

    from fairtrial.lm.low_precision.tokens import token_batches

    data = stages(tokens, params)
    architecture, _, precision = candidate.label.partition("-")
    model = build(architecture, precision, params.width, 0, data["size"], params)
    optimizer, schedule = optimizer_of(architecture, model, 1e-3, params.timing_steps + 1)
    batches = token_batches(
        data["train"], batch=params.batch, length=params.length, steps=params.timing_steps + 1, seed=cell["repeat"]
    )
    taken = []
    for ids in batches:
        start = time.perf_counter()
        train_step(model, ids.to(params.device), optimizer, schedule, clip=architecture == "gpt")
        if params.device.startswith("cuda"):
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return {"step_seconds": sorted(taken[1:])[params.timing_steps // 2]}


# ---------------------------------------------------------------------------------------------------------------- parts

USES = {"ngpt": ("ngpt", "sphere"), "gpt": ("gpt",)}


def slope(widths: tuple[int, ...]) -> Any:
    """Return the slope of nGPT's coherence, mean over reading layers, per doubling of the width."""
    logs = [math.log2(width) for width in widths]
    centre = sum(logs) / len(logs)
    spread = sum((log - centre) ** 2 for log in logs)
    return contrast({
        ("ngpt", "kappa_signal", (("kind", READING), ("width", width))): (log - centre) / spread
        for width, log in zip(widths, logs, strict=True)
    })  # fmt: skip


def parts(params: LowPrecisionParams) -> tuple[Part, ...]:
    """Return the parts: the price of 4 bits, coherence by kind of layer, and time."""
    grid = tuple({"lr": rate} for rate in params.rates)
    seed = Factor("seed", range(params.seeds), kind="replicate", most=40)

    def candidate(label: str, role: Any) -> Candidate:
        return Candidate(label, role, uses=USES[label.partition("-")[0]], grid=grid)

    training = Part(
        name="training",
        candidates=(
            candidate("ngpt-nvfp4", "method"),
            candidate("gpt-nvfp4", "baseline"),
            candidate("gpt-nvfp4-usual", "baseline"),
            candidate("ngpt-fp32", "reference"),
            candidate("gpt-fp32", "reference"),
            candidate("ngpt-int4", "control"),
        ),
        metrics=(
            Metric("val_loss", "nats a token", higher_is_better=False),
            Metric("gap", "nats to float32", higher_is_better=False),
            Metric("loss_rise", "nats at 10 % weight noise", higher_is_better=False, per="seed"),
            Metric("snr_db", "dB, mean over layers", per="seed"),
            Metric("kappa", "mean over layers", per="seed"),
            Metric("rho", "mean over layers", per="seed"),
        ),
        factors=(seed, Factor("fold", range(FOLDS), kind="within")),
        variance="independent",
        claims=(
            Claim(
                "C1",
                "Going from float32 to NVFP4 costs nGPT less validation loss than it costs a plain GPT.",
                difference("ngpt-nvfp4", "gpt-nvfp4", "gap"),
                above=0,
            ),
            all_of(
                "C2",
                "It changes nGPT's loss by less than 0.05 nats.",
                Claim("C2-rise", "It rises by less.", level("ngpt-nvfp4", "gap"), below=0.05),
                Claim("C2-fall", "It falls by less.", level("ngpt-nvfp4", "gap"), above=-0.05),
            ),
            report("R1", "gap of GPT with tensor scales and Hadamard rotation", level("gpt-nvfp4-usual", "gap")),
            report("R2", "by how much nGPT's gap is less", difference("ngpt-nvfp4", "gpt-nvfp4-usual", "gap")),
            report("R3", "gap of nGPT in INT4 with one scale a tensor", level("ngpt-int4", "gap")),
            report("R4", "loss in NVFP4, GPT's less nGPT's", difference("ngpt-nvfp4", "gpt-nvfp4", "val_loss")),
            report("R5", "loss in float32, GPT's less nGPT's", difference("ngpt-fp32", "gpt-fp32", "val_loss")),
            report("R6", "rise of the loss under weight noise, GPT's less nGPT's",
                   difference("ngpt-fp32", "gpt-fp32", "loss_rise")),
        ),
        measure=measure_training,
    )  # fmt: skip
    widths = (params.width, *(width for width in params.widths if width != params.width))
    here = {"width": params.width}
    coherence = Part(
        name="coherence",
        candidates=(
            candidate("ngpt", "method"),
            candidate("gpt", "baseline"),
            candidate("ngpt-shuffled", "control"),
            candidate("gpt-shuffled", "control"),
        ),
        metrics=(
            Metric("kappa_signal", "power of the sum over that of its terms"),
            Metric("kappa_noise", "", higher_is_better=False),
            Metric("rho", "correlation of products"),
            Metric("rho_noise", "", higher_is_better=False),
            Metric("snr_db", "dB"),
            Metric("snr_elem_db", "dB"),
        ),
        factors=(seed, Factor("kind", KINDS), Factor("width", widths)),
        variance="independent",
        claims=(
            all_of(
                "C3",
                "In every kind of layer that reads the residual stream, nGPT's products are more coherent than GPT's.",
                *(
                    Claim(
                        f"C3-{kind}",
                        f"In layer {kind}.",
                        difference("ngpt", "gpt", "kappa_signal", {"kind": kind, **here}),
                        above=0,
                    )
                    for kind in READING
                ),
            ),
            Claim(
                "C4",
                "nGPT's coherence grows with the width.",
                slope(tuple(sorted(widths)) if len(widths) > 1 else WIDTHS),
                above=0,
            ),
            *(
                report(f"R7-{kind}", f"coherence in layer {kind}, nGPT's less GPT's",
                       difference("ngpt", "gpt", "kappa_signal", {"kind": kind, **here}))
                for kind in ("o", "down")
            ),
            report("R8", "coherence of nGPT with shuffled inputs, reading layers",
                   level("ngpt-shuffled", "kappa_signal", {"kind": READING, **here})),
            report("R9", "coherence of nGPT's noise", level("ngpt", "kappa_noise", here)),
            report("R10", "coherence of GPT's noise", level("gpt", "kappa_noise", here)),
            report("R11", "signal-to-noise ratio, nGPT's less GPT's, dB", difference("ngpt", "gpt", "snr_db", here)),
        ),
        measure=measure_coherence,
    )  # fmt: skip
    cost = Part(
        name="cost",
        candidates=tuple(
            Candidate(label, role, uses=USES[label.partition("-")[0]])  # type: ignore[arg-type]
            for label, role in (("ngpt-nvfp4", "method"), ("gpt-nvfp4", "baseline"), ("gpt-nvfp4-usual", "baseline"),
                                ("ngpt-fp32", "reference"), ("gpt-fp32", "reference"))
        ),
        metrics=(Metric("step_seconds", "s", higher_is_better=False, timed=True),),
        factors=(Factor("repeat", range(3), kind="replicate"),),
        variance="independent",
        claims=(
            report("R12", "time of a float32 step over that of an emulated one, nGPT",
                   times_as_long("ngpt-fp32", "ngpt-nvfp4")),
            report("R13", "the same for GPT", times_as_long("gpt-fp32", "gpt-nvfp4")),
        ),
        measure=measure_time,
        group=("repeat",),
    )  # fmt: skip
    return training, coherence, cost


def times_as_long(fast: str, slow: str) -> Any:
    """Return by how much, in logarithms, a step of ``fast`` is shorter than one of ``slow``."""
    return difference(fast, slow, "step_seconds", scale="log")


def check(params: LowPrecisionParams) -> None:
    """Refuse what cannot be read or trained before any worker starts."""
    from fairtrial.causal_lm.loading import check_device
    from fairtrial.data.samples import sample_path
    from fairtrial.lm.low_precision.transformer import TransformerConfig

    check_device(params.device)
    for width in (params.width, *params.widths):
        TransformerConfig(vocab_size=2, width=width, layers=params.layers, heads=params.heads)
    if any(not 0 < rate < math.inf for rate in params.rates):
        raise InputError(f"rates={params.rates}: give positive learning rates")
    if params.text in ("wikipedia-articles", "news"):
        sample_path(params.text)
    elif params.text != "tiny" and not Path(params.text).exists():
        raise InputError(f"text={params.text}: no such file or folder, nor one of {', '.join(SOURCES)}")
    if params.tokenizer and not Path(params.tokenizer).exists():
        if params.tokenizer != "smollm2-135m":
            raise InputError(f"tokenizer={params.tokenizer}: no such folder, nor the sample smollm2-135m")
        sample_path(params.tokenizer)
    tokens(lambda *_: None, params)


trial = Trial(
    name="low_precision",
    params=LowPrecisionParams,
    parts=parts,
    presets={
        "smoke": {
            "text": "tiny", "width": 32, "layers": 1, "heads": 2, "steps": 1, "batch": 2, "length": 16, "validation": 2,
            "rates": (1e-2,), "seeds": 2, "noise_draws": 2, "timing_steps": 2,
        },
        "full": {
            "width": 512, "layers": 8, "heads": 8, "steps": 4000, "batch": 32, "length": 256, "widths": WIDTHS[:-1],
        },
    },
    check=check,
)  # fmt: skip
