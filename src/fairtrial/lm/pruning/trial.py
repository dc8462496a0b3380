"""Whether FiedlerPrune beats the metric it is built on, and whether it is the graph that does it.

Every candidate prunes the same dense model from the same calibration windows and is read by its log-likelihood on the
same evaluation windows, of documents that no calibration saw. Quality and cost are two parts: times are measured last,
alone, in turn.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.trial.declare import (
    Candidate,
    Cell,
    Claim,
    Factor,
    Input,
    Items,
    Metric,
    Part,
    Trial,
    all_of,
    difference,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from fairtrial.lm.pruning.oneshot import OneShotPrune

FOLDS = 4  # groups of evaluation documents


class PruningParams(BaseModel):
    """Parameters of the trial ``pruning``."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Input()] = Field(
        "smollm2-135m", description="a sample, 'tiny' (random, for tests), a save_pretrained folder or a .gguf file"
    )
    text: Annotated[str, Input()] = Field(
        "wikipedia-articles", description="a sample, a .txt or .jsonl file, or a folder of these"
    )
    calibration_text: Annotated[str, Input()] = Field(
        "", description="calibrate on another text; left out, on the first two thirds of the documents of text"
    )
    sparsity: float = Field(0.5, ge=0, lt=1, description="share of zeros in the pruned matrices, in [0, 1)")
    pattern: str | None = Field(None, description="'N:M' instead of a sparsity: N of every M inputs are kept")
    alpha: float | Literal["auto"] | None = Field(None, description="weight of the graph; left out, its default")
    calibration_tokens: int = Field(4096, ge=8, description="tokens that statistics are taken from")
    window: int = Field(384, ge=8, description="tokens of a window")
    eval_windows: int = Field(12, ge=8, description="evaluation windows, of as many documents as there are")
    sparsegpt: bool = Field(
        True, description="measure SparseGPT too, whose update takes a while", json_schema_extra={"scope": "plan"}
    )
    device: str = Field("cpu", description="a torch device")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the model")
    draws: int = Field(
        1, ge=1, le=40, description="calibration draws; from 5 on claims generalise over draws",
        json_schema_extra={"scope": "plan"},
    )  # fmt: skip
    thorough: bool = Field(
        False, description="measure the control degree-intra too", json_schema_extra={"scope": "plan"}
    )
    repeats: int = Field(
        3, ge=1, le=40, description="repetitions of the timed part", json_schema_extra={"scope": "plan"}
    )

    @field_validator("pattern")
    @classmethod
    def _pattern(cls, value: str | None) -> str | None:
        if value is None:
            return None
        n, colon, m = value.partition(":")
        if not (colon and n.isdigit() and m.isdigit() and 0 < int(n) < int(m)):
            raise InputError(f"{value!r} is no pattern: write N:M with 0 < N < M, such as 2:4")
        return value


# ----------------------------------------------------------------------------------------------------------- candidates


def method(label: str, params: PruningParams, *, connectivity: bool = False) -> OneShotPrune:
    """Return the pruning method behind a candidate's label; ``connectivity`` also reports lambda_2 before and after."""
    from fairtrial.lm.pruning.baselines import RIA, Magnitude, Random, RowScaled, SparseGPT, Wanda
    from fairtrial.lm.pruning.controls import FiedlerPermuted
    from fairtrial.lm.pruning.fiedler import FiedlerPrune
    from fairtrial.lm.pruning.oneshot import OneShotPrune

    how: dict[str, Any] = {"sparsity": params.sparsity, "pattern": params.pattern, "connectivity": connectivity}
    whole: dict[str, Any] = {**how, "modes": "all", "combine": "power", "group": "row"}
    match label:
        case "fiedler+wanda":
            return FiedlerPrune(Wanda(), **how, alpha=params.alpha)
        case "connectivity+wanda":
            return FiedlerPrune(Wanda(), **whole)
        case "connectivity+magnitude":
            # Edges match the base metric: with those of activations the degrees would hold what magnitude ignores.
            return FiedlerPrune(Magnitude(), **whole, edge="magnitude")
        case "wanda":
            return OneShotPrune(Wanda(), **how)
        case "magnitude":
            return OneShotPrune(Magnitude(), **how)
        case "ria":
            return OneShotPrune(RIA(), **how)
        case "sparsegpt":
            return OneShotPrune(SparseGPT(), **how)
        case "fiedler-permuted":
            alpha = None if params.alpha == "auto" else params.alpha
            return FiedlerPermuted(RowScaled(Wanda()), **how, alpha=alpha)
        case "block-norow":
            return OneShotPrune(RowScaled(Wanda()), **how, group="block")
        case "degree-intra":
            return OneShotPrune(RIA(exponent=1.0), **how)
        case "random":
            return OneShotPrune(Random(), **how)
    raise AssertionError(label)


CANDIDATES = (
    Candidate("dense", "reference"),
    Candidate("fiedler+wanda", "method", uses=("fiedler",)),
    Candidate("connectivity+wanda", "method", uses=("fiedler",)),
    Candidate("connectivity+magnitude", "method", uses=("fiedler",)),
    Candidate("wanda", "baseline", uses=("oneshot", "baselines")),
    Candidate("ria", "baseline", uses=("oneshot", "baselines")),
    Candidate("sparsegpt", "baseline", uses=("oneshot", "baselines")),
    Candidate("magnitude", "baseline", uses=("oneshot", "baselines")),
    Candidate("fiedler-permuted", "control", uses=("controls",)),
    Candidate("block-norow", "control", uses=("oneshot", "baselines")),
    Candidate("degree-intra", "control", uses=("oneshot", "baselines")),
    Candidate("random", "control", uses=("oneshot", "baselines")),
)
MEASURED_FOR_CONNECTIVITY = ("fiedler+wanda", "wanda")  # two more eigenproblems a graph, and a second pruning


# --------------------------------------------------------------------------------------------------------------- stages


@stage(keep=True)
def dense_model(stages: Any, params: PruningParams) -> tuple[Any, Any]:
    """Load the model and its tokenizer, once a worker."""
    import torch

    from fairtrial.causal_lm.loading import load, stored_as
    from fairtrial.data.samples import cache_folder, sample_path
    from fairtrial.data.tiny import tiny_causal_lm

    if params.model == "tiny" and not Path("tiny").exists():
        model, tokenizer = tiny_causal_lm()
        return model.to(params.device, getattr(torch, params.dtype)), tokenizer
    path = Path(params.model) if Path(params.model).exists() else sample_path(params.model)
    if stored := stored_as(path):
        bits = re.match(r"I?Q(\d+)", stored)
        how = f"in {bits[1]} bits ({stored}) and dequantised" if bits else f"as {stored}"
        stages.note(f"the model's weights were stored {how}")
    dtype = getattr(torch, params.dtype)
    return load(path, device=params.device, dtype=dtype, cache=cache_folder() / "models")


@stage(keep=True)
def windows_of_text(stages: Any, params: PruningParams) -> dict[str, torch.Tensor]:
    """Return ``calibration`` (n, window), ``evaluation`` (m, window) and ``documents`` (m,), the items of evaluation.

    The first two thirds of the documents calibrate. Evaluation takes a window of each of the others in turn, so that as
    many documents as possible speak. Where these are fewer than two a fold, the items are windows, spread over the
    text; a text of one or two documents is divided by windows too.
    """
    import torch

    from fairtrial.causal_lm.windows import windows

    _, tokenizer = stages(dense_model, params)
    texts = documents_of(params.text)
    if params.calibration_text:
        calibration = windows(tokenizer, documents_of(params.calibration_text), params.window).ids
        ids, documents = windows(tokenizer, texts, params.window, merge=False)
    elif len(texts) < 3:
        ids = windows(tokenizer, texts, params.window).ids
        cut = math.ceil(len(ids) * 2 / 3)
        calibration, ids = ids[:cut], ids[cut:]
        documents = torch.zeros(len(ids), dtype=torch.int64)
    else:
        cut = math.ceil(len(texts) * 2 / 3)
        calibration = windows(tokenizer, texts[:cut], params.window).ids
        ids, documents = windows(tokenizer, texts[cut:], params.window, merge=False)
    wanted = max(1, params.calibration_tokens // params.window)
    if len(calibration) < wanted or len(ids) < 2 * FOLDS:
        raise InputError(
            f"text={params.text}: it gives {len(calibration)} windows of {params.window} tokens to calibrate and "
            f"{len(ids)} to evaluate; {wanted} and {2 * FOLDS} are needed: give more text, a smaller window= or fewer "
            "calibration_tokens="
        )
    stages.note(f"calibrated on {wanted} windows of {params.window} tokens, {wanted * params.window} in all")
    counts = documents.unique_consecutive(return_counts=True)[1]
    if len(counts) < 2 * FOLDS:
        documents = torch.arange(len(ids))
        count = min(params.eval_windows, len(ids))
        chosen = torch.arange(count) * len(ids) // count
        stages.note("the evaluation text has few documents: items are windows, several of one document")
    else:
        rank = torch.cat([torch.arange(int(n)) for n in counts])
        # every document's first, second, ...
        chosen = torch.argsort(rank, stable=True)[: params.eval_windows].sort().values
    return {"calibration": calibration, "evaluation": ids[chosen], "documents": documents[chosen]}


def documents_of(text: str) -> list[str]:
    """Return the documents that a parameter names: a sample's, 'tiny', or those of files."""
    from fairtrial.causal_lm.windows import read_texts
    from fairtrial.data import text as samples
    from fairtrial.data.tiny import tiny_texts

    if Path(text).exists():
        return read_texts(text)
    if text == "austen":
        return list(samples.austen_novels().values())
    return tiny_texts() if text == "tiny" else samples.wikipedia_articles()


@stage(save="npz")
def dense_nll(stages: Any, fold: int, params: PruningParams) -> dict[str, Any]:
    """Return the dense model's mean loss on each evaluation window of a fold."""
    model, _ = stages(dense_model, params)
    return {"nll": losses(model, fold_of(stages(windows_of_text, params), fold)[0])}


@stage()
def pruned(stages: Any, candidate: Candidate, draw: int, params: PruningParams) -> tuple[Any, float]:
    """Prune a copy of the dense model; return it, and its packed size over the dense one."""
    from fairtrial.lm.pruning.packing import packed_bytes

    dense, _ = stages(dense_model, params)
    if candidate.label == "dense":
        return dense, 1.0
    calibration = calibration_windows(stages, draw, params)
    model = copy.deepcopy(dense)
    outcome = method(candidate.label, params).prune(model, None, calibration)
    if candidate.label == "fiedler+wanda":
        stages.note(f"fiedler+wanda: alpha={outcome.frame.alpha.iloc[0]:g}")
    weights = {p.data_ptr(): p for p in model.parameters()}.values()
    return model, sum(map(packed_bytes, weights)) / sum(p.numel() * p.element_size() for p in weights)


@stage()
def kept_connectivity(stages: Any, label: str, draw: int, params: PruningParams) -> pd.DataFrame:
    """Prune once more and return the report's frame with every graph's lambda_2 before and after.

    What that costs is the trial's and no candidate's, so the stage is asked for by label.
    """
    dense, _ = stages(dense_model, params)
    calibration = calibration_windows(stages, draw, params)
    return method(label, params, connectivity=True).prune(copy.deepcopy(dense), None, calibration).frame


@stage(keep=True)
def warm_up(stages: Any, params: PruningParams) -> None:
    """Prune once from one window, so that no candidate pays for what the first call of a process costs."""
    dense, _ = stages(dense_model, params)
    method("fiedler+wanda", params).prune(copy.deepcopy(dense), None, calibration_windows(stages, 0, params)[:1])


def calibration_windows(stages: Any, draw: int, params: PruningParams) -> torch.Tensor:
    """Return the calibration windows of a draw, (n, window), without replacement."""
    ids = stages(windows_of_text, params)["calibration"]
    count = max(1, params.calibration_tokens // params.window)
    return ids[generator(draw, "calibration").permutation(len(ids))[:count].tolist()]


def fold_of(text: dict[str, torch.Tensor], fold: int) -> tuple[torch.Tensor, list[int]]:
    """Return the evaluation windows of a fold and their documents; all windows of a document lie in one fold."""
    order = {document: i for i, document in enumerate(dict.fromkeys(text["documents"].tolist()))}
    chosen = [i for i, document in enumerate(text["documents"].tolist()) if order[document] % FOLDS == fold]
    return text["evaluation"][chosen], text["documents"][chosen].tolist()


def losses(model: Any, ids: torch.Tensor) -> Any:
    """Return the mean loss on each window, (n,) float64, in nats a token."""
    import numpy as np

    from fairtrial.causal_lm.likelihood import token_log_likelihoods

    return np.array([-row.double().mean().item() for row in token_log_likelihoods(model, ids)])


def connectivity_of(frame: pd.DataFrame) -> dict[str, Items | None]:
    """Return of every graph lambda_2 after over before, isolated channels dropped, and whether any channel is isolated.

    A graph that was disconnected before, as in a model that is sparse already, has no ratio and is left out.
    """
    frame = frame.assign(graph=frame.layer.astype(str) + "/" + frame.graph)
    connected = frame[frame.lambda2_before > 0]
    ratio = connected.lambda2_after / connected.lambda2_before
    return {
        "lambda2_retained": Items(connected.graph.tolist(), ratio.tolist()) if len(connected) else None,
        "isolated_graphs": Items(frame.graph.tolist(), (frame.isolated > 0).astype(float).tolist()),
    }


# ------------------------------------------------------------------------------------------------------------- measures


def measure_quality(candidate: Candidate, cell: Cell, params: PruningParams, stages: Any) -> dict[str, Any]:
    """Prune (once a draw) and read one fold of the evaluation text."""
    model, size = stages(pruned, candidate, cell["draw"], params)
    ids, documents = fold_of(stages(windows_of_text, params), cell["fold"])
    dense = stages(dense_nll, cell["fold"], params)["nll"]
    nll = dense if candidate.label == "dense" else losses(model, ids)
    connectivity: dict[str, Items | None] = {"lambda2_retained": None, "isolated_graphs": None}
    if candidate.label in MEASURED_FOR_CONNECTIVITY:
        connectivity = connectivity_of(stages(kept_connectivity, candidate.label, cell["draw"], params))
    return {
        "log_perplexity_ratio": Items(documents, nll - dense),
        "perplexity": math.exp(nll.mean()),
        "bytes_ratio": size,
        **connectivity,
    }


def measure_cost(candidate: Candidate, cell: Cell, params: PruningParams, stages: Any) -> dict[str, Any]:
    """Time one pruning, and generation by the method's sparse model against the dense one."""
    import time

    from fairtrial.lm.pruning.packing import measure_sparse

    dense, _ = stages(dense_model, params)
    calibration = calibration_windows(stages, 0, params)
    stages(warm_up, params)
    model = copy.deepcopy(dense)
    began = time.perf_counter()
    method(candidate.label, params).prune(model, None, calibration)
    seconds = time.perf_counter() - began
    speed = measure_sparse(model, new_tokens=8).speedup if candidate.role == "method" else None
    return {"prune_seconds": seconds, "tokens_per_second_ratio": speed}


# ---------------------------------------------------------------------------------------------------------------- parts


def parts(params: PruningParams) -> tuple[Part, ...]:
    """Return the parts: quality, and cost."""
    over: Literal["replicate", "item"] = "replicate" if params.draws >= 5 else "item"
    here = "" if over == "replicate" else ", for this calibration draw" if params.draws == 1 else ", for these draws"
    ratio = "log_perplexity_ratio"
    blockwise = params.pattern is None  # a pattern compares within a row: block-norow then is Wanda itself
    optional = {"sparsegpt": params.sparsegpt, "degree-intra": params.thorough, "block-norow": blockwise}
    left_out = {label for label, wanted in optional.items() if not wanted}

    def better(id: str, a: str, b: str, margin: float = 0.0) -> Claim:
        more = f" by more than {margin:g} nats a token" if margin else ""
        return Claim(id, f"{a} loses less than {b}{more}{here}", difference(a, b, ratio), above=margin, over=over)

    quality = Part(
        name="quality",
        candidates=tuple(c for c in CANDIDATES if c.label not in left_out),
        metrics=(
            Metric(ratio, "nats a token", higher_is_better=False),
            Metric("perplexity", "", higher_is_better=False),
            Metric("lambda2_retained", "of the dense value", per="draw"),
            Metric("isolated_graphs", "of the graphs", higher_is_better=False, per="draw"),
            Metric("bytes_ratio", "of the dense size", higher_is_better=False, per="draw", exact=True),
        ),
        factors=(
            Factor("draw", range(params.draws), kind="replicate", most=max(12, params.draws)),
            Factor("fold", range(FOLDS), kind="within"),
        ),
        variance="crossed",
        claims=(
            better("C1a", "fiedler+wanda", "wanda"),
            better("C1b", "connectivity+wanda", "wanda"),
            better("C2", "connectivity+magnitude", "magnitude"),
            all_of(
                "C3",
                f"it is the graph: fiedler+wanda loses less than {'either' if blockwise else 'the'} control without "
                f"it{here}",
                better("C3-permuted", "fiedler+wanda", "fiedler-permuted"),
                *([better("C3-norow", "fiedler+wanda", "block-norow")] if blockwise else []),
            ),
            better("C3b", "connectivity+wanda", "degree-intra"),
            Claim(
                "C4",
                f"fiedler+wanda keeps more of the graphs' lambda_2 than wanda, isolated channels dropped{here}",
                difference("fiedler+wanda", "wanda", "lambda2_retained"),
                above=0,
                over=over,
            ),
            better("C6", "wanda", "random", margin=1.0),
            report("R1", "fiedler+wanda against sparsegpt", difference("fiedler+wanda", "sparsegpt", ratio), over),
            report("R2", "bytes of fiedler+wanda, packed, over dense", level("fiedler+wanda", "bytes_ratio")),
            report(
                "R4",
                "graphs with an isolated channel, fewer of fiedler+wanda than of wanda",
                difference("fiedler+wanda", "wanda", "isolated_graphs"),
                over,
            ),
        ),
        measure=measure_quality,
        group=("draw", "candidate"),
    )
    cost = Part(
        name="cost",
        candidates=tuple(c for c in CANDIDATES if c.label in ("fiedler+wanda", "wanda")),
        metrics=(
            Metric("prune_seconds", "s", higher_is_better=False, timed=True),
            Metric("tokens_per_second_ratio", "sparse over dense", timed=True),
        ),
        factors=(Factor("repeat", range(params.repeats), kind="replicate"),),
        variance="independent",
        claims=(
            Claim(
                "C5",
                "fiedler+wanda prunes in at most three times the seconds of wanda, on this machine",
                difference("fiedler+wanda", "wanda", "prune_seconds", scale="log"),
                above=-math.log(3),
            ),
            report("R3", "tokens a second of fiedler+wanda, sparse over dense, on this device",
                   level("fiedler+wanda", "tokens_per_second_ratio")),
        ),
        measure=measure_cost,
    )  # fmt: skip
    return quality, cost


def check(params: PruningParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import find_sample, sample_path

    for name in ("model", "text", "calibration_text"):
        value = getattr(params, name)
        if not value or value == "tiny" or Path(value).exists():
            continue
        if "/" in value or "." in Path(value).name:
            raise InputError(f"{name}={value}: no such file or folder")
        sample_path(find_sample(value).name)
    if params.device != "cpu":
        from fairtrial.causal_lm.loading import check_device

        check_device(params.device)
    if params.model != "tiny" and Path(params.model).exists():
        from fairtrial.causal_lm.loading import check_loadable, context_length

        check_loadable(params.model)
        context = context_length(params.model)
        if context is not None and params.window > context:
            raise InputError(f"window={params.window} exceeds the model's context: give --set window={context}")
    for name in ("text", "calibration_text"):
        if getattr(params, name) and Path(getattr(params, name)).exists():
            documents_of(getattr(params, name))


trial = Trial(
    name="pruning",
    params=PruningParams,
    parts=parts,
    presets={
        "smoke": {
            "model": "tiny", "text": "tiny", "window": 32, "calibration_tokens": 128, "eval_windows": 8, "repeats": 2,
        },
        "full": {"draws": 5, "eval_windows": 48, "repeats": 5, "thorough": True},
    },
    check=check,
)  # fmt: skip
