"""Whether a mixture made of domain fine-tunes, at most one expert a domain, beats other upcycling at equal tokens.

Read the verdicts with this in mind: DivMoE's experts have seen the domain fine-tuning as well, the copies of sparse and
drop-upcycling have not; tokens are equal in the upcycling alone. Dense training for all the same steps is shown beside
them. All seeds share the base and its fine-tunes: intervals cover the order of the texts and the router's draw.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.seeds import derive, generator
from fairtrial.trial.declare import (
    AllOf,
    Candidate,
    Cell,
    Claim,
    Factor,
    Input,
    Metric,
    Part,
    Role,
    Trial,
    all_of,
    difference,
    level,
    report,
    stage,
)
from fairtrial.trial.tuning import best_point

if TYPE_CHECKING:
    import numpy as np
    import torch

TINY_DOMAINS = ("a", "b", "c", "d")
MIXTURES = {  # label -> recipe, and F and K, or 0 for those of the trial
    "divmoe": ("divmoe", 0, 0),
    "sparse": ("sparse", 1, 1),
    "sparse-fine": ("sparse", 0, 0),
    "drop": ("drop", 1, 1),
    "drop-fine": ("drop", 0, 0),
    "btx": ("btx", 1, 1),
    "btx-twice": ("btx", 1, 2),
    "free-top-k": ("free-top-k", 0, 0),
    "grouped-copies": ("grouped-copies", 0, 0),
    "shuffled-groups": ("shuffled-groups", 0, 0),
    "slice-groups": ("slice-groups", 0, 0),
    "random-experts": ("random-experts", 0, 0),
    "divmoe-half": ("divmoe", 2, 2),
    "free-top-k-half": ("free-top-k", 2, 2),
    "shuffled-groups-half": ("shuffled-groups", 2, 2),
}
ROLES: dict[str, Role] = {
    "divmoe": "method",
    "divmoe-half": "method",
    **dict.fromkeys(("sparse", "sparse-fine", "drop", "drop-fine", "btx", "soup", "dense"), "baseline"),
    **dict.fromkeys(("free-top-k", "grouped-copies", "free-top-k-half"), "baseline"),
    **dict.fromkeys(("dense-all", "btx-twice"), "reference"),
    **dict.fromkeys(("shuffled-groups", "slice-groups", "random-experts", "shuffled-groups-half"), "control"),
}
USES = ("converting", "modeling", "experts", "router", "recipes", "starting")


class UpcyclingParams(BaseModel):
    """Parameters of the trial ``upcycling``."""

    model_config = ConfigDict(extra="forbid")

    base: Annotated[str, Input()] = Field(
        "small",
        description="the dense base: 'small' (a Llama trained here), 'tiny' (for tests), 'smollm2-135m', or a folder",
    )
    fine_tunes: Annotated[str, Input()] = Field(
        "", description="a folder of fine-tunes of the base, each in a folder named as its corpus; '' = made here"
    )
    corpora: Annotated[str, Input()] = Field(
        "samples",
        description="'samples', 'tiny', or a folder with a .txt or .jsonl file for each of four domains or more",
    )
    characters: int = Field(400_000, ge=2000, description="of text of a domain")
    vocabulary: int = Field(4096, ge=64, description="of the small base: the most frequent tokens of SmolLM2")
    width: int = Field(128, ge=16, multiple_of=16, description="of the small base")
    layers: int = Field(3, ge=1, description="of the small base")
    neurons: int = Field(256, ge=16, multiple_of=8, description="of a feed-forward layer of the small base")
    window: int = Field(64, ge=8, description="tokens of a text")
    batch: int = Field(16, ge=4, multiple_of=4, description="texts of a step")
    base_steps: int = Field(250, ge=1, description="of training the small base on all domains")
    domain_steps: int = Field(60, ge=1, description="of fine-tuning on one domain")
    upcycle_steps: int = Field(80, ge=2, description="of continued training on all domains")
    granularity: int = Field(4, ge=1, description="F, slices of a feed-forward layer")
    active: int = Field(4, ge=1, description="K, experts a token takes; equal active parameters where K = F")
    base_rate: float = Field(3e-3, gt=0, description="learning rate of the small base")
    domain_rate: float = Field(1e-3, gt=0, description="learning rate of the fine-tunes")
    rates: tuple[float, ...] = Field(
        (2e-3,), min_length=1, description="learning rates that every candidate is tuned over; one = the same for all"
    )
    validation: int = Field(48, ge=2, description="texts a domain is validated and tuned on, at most")
    candidates: tuple[str, ...] = Field(
        (), description="labels of those to compare, with divmoe; () = all", json_schema_extra={"scope": "plan"}
    )
    repeats: int = Field(3, ge=1, description="of the timed steps", json_schema_extra={"scope": "plan"})
    seeds: int = Field(4, ge=1, description="orders and routers", json_schema_extra={"scope": "plan"})
    device: str = Field("cpu", description="a torch device")


# ----------------------------------------------------------------------------------------------------- texts and models


def domain_names(params: UpcyclingParams) -> list[str]:
    """Return the names of the domains."""
    if params.corpora == "tiny":
        return [*TINY_DOMAINS]
    if params.corpora == "samples":
        return ["math", "code", "science", "news"]
    return sorted(path.stem for path in Path(params.corpora).iterdir() if path.suffix in (".txt", ".jsonl"))


@stage(save="npz")
def texts(stages: Any, params: UpcyclingParams) -> dict[str, np.ndarray]:
    """Return "train/domain", "tune/domain" and "valid/domain": windows of token ids (n, T).

    The small base's ids are the most frequent tokens of the training texts; the last stands for all others.
    """
    import numpy as np

    from fairtrial.causal_lm.windows import read_texts, windows
    from fairtrial.lm.upcycling.corpora import divide, sample_corpora, up_to

    names = domain_names(params)
    if params.corpora == "tiny":
        return {f"{part}/{name}": tiny_windows(part, i, params) for part in ("train", "tune", "valid")
                for i, name in enumerate(names)}  # fmt: skip
    if params.corpora == "samples":
        found = sample_corpora(params.characters)
    else:
        files = {path.stem: path for path in Path(params.corpora).iterdir()}
        found = {name: up_to(read_texts(files[name]), params.characters) for name in names}
    tokenizer = stages(tokenizer_of, params)
    cut = {
        f"{part}/{name}": windows(tokenizer, documents, params.window).ids.numpy()
        for name in names
        for part, documents in divide(found[name]).items()
    }
    cut = {key: ids if key.startswith("train") else ids[: params.validation] for key, ids in cut.items()}
    if params.base == "small":
        counts = sum(np.bincount(ids.ravel(), minlength=len(tokenizer)) for key, ids in cut.items() if "train" in key)
        kept = np.argsort(-np.asarray(counts), kind="stable")[: params.vocabulary - 1]
        new = np.full(len(tokenizer), params.vocabulary - 1)
        new[kept] = np.arange(len(kept))
        cut = {key: new[ids] for key, ids in cut.items()}
    return cut


def tiny_windows(part: str, domain: int, params: UpcyclingParams) -> np.ndarray:
    """Return walks over tokens with steps that are a domain's own."""
    rng = generator(0, "tiny windows", part, domain)
    n = 64 if part == "train" else 8
    steps = rng.choice([1 + domain, 7 + domain], size=(n, params.window), p=[0.8, 0.2])
    return (rng.integers(64, size=(n, 1)) + steps.cumsum(1)) % 64


@stage(keep=True)
def pretrained(stages: Any, params: UpcyclingParams) -> tuple[Any, Any]:
    """Return a base that was not trained here, and its tokenizer."""
    from fairtrial.causal_lm.loading import load
    from fairtrial.data.samples import cache_folder, sample_path

    where = sample_path("smollm2-135m") if params.base in ("small", "smollm2-135m") else params.base
    return load(where, device=params.device, cache=cache_folder() / "models")


@stage(keep=True)
def tokenizer_of(stages: Any, params: UpcyclingParams) -> Any:
    """Return the base's tokenizer; the small base's is SmolLM2's."""
    return stages(pretrained, params)[1]


def small_model(params: UpcyclingParams, seed: int = 0) -> Any:
    """Return a random Llama."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=params.vocabulary,
        hidden_size=params.width,
        intermediate_size=params.neurons,
        num_hidden_layers=params.layers,
        num_attention_heads=params.width // 16,
        num_key_value_heads=params.width // 16,
        max_position_embeddings=params.window,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(params.device)


@stage(save="safetensors")
def base_weights(stages: Any, params: UpcyclingParams) -> dict[str, torch.Tensor]:
    """Train the small base on all domains."""
    model = small_model(params)
    train(model, mixed(stages, params, params.base_steps, 0, "base"), params.base_rate, params)
    return weights_of(model)


@stage(save="safetensors")
def domain_weights(stages: Any, name: str, params: UpcyclingParams) -> dict[str, torch.Tensor]:
    """Fine-tune the base on one domain: all its weights, or LoRA adapters of a base that was not trained here."""
    model = stages(base_model, params)
    ids = stages(texts, params)[f"train/{name}"]
    batches = [ids[rows] for rows in orders(len(ids), params.batch, params.domain_steps, 0, f"domain {name}")]
    if params.base in ("small", "tiny"):
        model = copied(model)
        train(model, batches, params.domain_rate, params)
        return weights_of(model)
    from peft import LoraConfig, get_peft_model

    from fairtrial.lm.upcycling.architectures import feed_forwards

    linears = {name for place in feed_forwards(model) for name, _ in place.module.named_children() if "act" not in name}
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=sorted(linears), task_type="CAUSAL_LM")
    adapted = get_peft_model(copied(model), lora)
    train(adapted, batches, params.domain_rate, params)
    return weights_of(adapted.merge_and_unload())


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's parameters, on the CPU, tied ones once."""
    return {name: value.detach().cpu().contiguous() for name, value in model.named_parameters()}


@stage(keep=True)
def base_model(stages: Any, params: UpcyclingParams) -> Any:
    """Return the dense base."""
    if params.base in ("small", "tiny"):
        return filled(small_model(params), stages(base_weights, params))
    return stages(pretrained, params)[0]


@stage(keep=True)
def domain_models(stages: Any, params: UpcyclingParams) -> dict[str, Any]:
    """Return the fine-tunes: made here, or the user's."""
    from fairtrial.causal_lm.loading import load

    if params.fine_tunes:
        return {name: load(Path(params.fine_tunes) / name, device=params.device)[0] for name in domain_names(params)}
    base = stages(base_model, params)
    return {name: filled(copied(base), stages(domain_weights, name, params)) for name in domain_names(params)}


def copied(model: Any) -> Any:
    """Return a copy of a model."""
    import copy

    return copy.deepcopy(model)


def filled(model: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Return the model with these weights."""
    model.load_state_dict(weights, strict=False)  # tied weights are among them once
    return model.eval()


# ------------------------------------------------------------------------------------------------------------- training


def orders(n: int, batch: int, steps: int, seed: int, name: str) -> list[np.ndarray]:
    """Return rows of ``steps`` batches: every text once before any comes again."""
    import numpy as np

    rng = generator(seed, "order", name)
    need = batch * steps
    rows = np.concatenate([rng.permutation(n) for _ in range(-(-need // n))])[:need]
    return [*rows.reshape(steps, batch)]


def mixed(stages: Any, params: UpcyclingParams, steps: int, seed: int, name: str) -> list[np.ndarray]:
    """Return batches that hold as many texts of every domain."""
    import numpy as np

    found, names = stages(texts, params), domain_names(params)
    each = max(1, params.batch // len(names))
    parts = [
        [
            found[f"train/{domain}"][rows]
            for rows in orders(len(found[f"train/{domain}"]), each, steps, seed, name + domain)
        ]
        for domain in names
    ]
    return [np.concatenate(step) for step in zip(*parts, strict=True)]


def train(model: Any, batches: list[np.ndarray], rate: float, params: UpcyclingParams) -> float:
    """Train by AdamW, the rate rising over a tenth of the steps and falling to 0; return the seconds it took."""
    import torch

    from fairtrial.lm.upcycling.modeling import DivMoEForCausalLM

    steps, warm = len(batches), max(1, len(batches) // 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / max(1, steps - warm))
    )
    model.train()
    began = time.perf_counter()
    for step, batch in enumerate(batches):
        if isinstance(model, DivMoEForCausalLM):
            model.set_progress(step / steps)
        ids = torch.from_numpy(batch).to(params.device)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    if isinstance(model, DivMoEForCausalLM):
        model.set_progress(1.0)
    model.eval()
    return time.perf_counter() - began


def losses(model: Any, stages: Any, params: UpcyclingParams, part: str) -> dict[str, float]:
    """Return nats a token on each domain."""
    import torch

    from fairtrial.causal_lm.likelihood import mean_nll

    found = stages(texts, params)
    return {name: mean_nll(model, torch.from_numpy(found[f"{part}/{name}"])) for name in domain_names(params)}


def built(label: str, seed: int, params: UpcyclingParams, stages: Any) -> Any:
    """Return a candidate's model before its continued training."""
    import warnings

    import torch

    from fairtrial.lm.upcycling.converting import upcycle

    base = stages(base_model, params)
    if label in ("dense", "dense-all"):
        return copied(base)
    domains = stages(domain_models, params)
    if label == "soup":
        soup = copied(base)
        with torch.no_grad():
            for name, value in soup.named_parameters():
                value.copy_(torch.stack([model.get_parameter(name) for model in domains.values()]).mean(0))
        return soup
    recipe, granularity, active = MIXTURES[label]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # K = 1 is what the baselines of whole layers are
        return upcycle(
            base, domains, granularity=granularity or params.granularity, active=active or params.active, recipe=recipe,
            seed=derive(seed, label),
        ).to(params.device)  # fmt: skip


@stage(save="json")
def continued(stages: Any, candidate: Candidate, seed: int, rate: float, params: UpcyclingParams) -> dict[str, Any]:
    """Build a candidate's model, train it, and return what a cell asks for; seed -1 is that of the tuning."""
    from fairtrial.lm.upcycling.inspection import routing_report
    from fairtrial.lm.upcycling.modeling import DivMoEForCausalLM

    label, part = candidate.label, "tune" if seed < 0 else "valid"
    model = built(label, seed, params, stages)
    start = losses(model, stages, params, part)
    steps = params.upcycle_steps
    if label == "dense-all":
        steps += len(domain_names(params)) * params.domain_steps
    seconds = train(model, mixed(stages, params, steps, seed, "upcycling"), rate, params)
    told = {
        "start": start,
        "end": losses(model, stages, params, part),
        "tokens_per_second": steps * params.batch * params.window / seconds,
        "entropy": None,
        "collapsed": None,
    }
    if isinstance(model, DivMoEForCausalLM):
        found = stages(texts, params)
        routed = routing_report(model, None, {name: found[f"{part}/{name}"].tolist() for name in domain_names(params)})
        told |= {"entropy": float(routed.entropy.mean()), "collapsed": routed.attrs["collapsed"]}
    return told


@stage(save="json")
def tuned_rate(stages: Any, candidate: Candidate, params: UpcyclingParams) -> float:
    """Choose a candidate's learning rate by an order and texts that no cell has."""
    grid = candidate.grid or ()
    if len(grid) == 1:
        return float(grid[0]["lr"])
    ends = [sum(stages(continued, candidate, -1, point["lr"], params)["end"].values()) for point in grid]
    return float(best_point(stages, candidate, ends)["lr"])


def measure(candidate: Candidate, cell: Cell, params: UpcyclingParams, stages: Any) -> dict[str, Any]:
    """Return the losses on one domain's validation texts."""
    rate = stages(tuned_rate, candidate, params)
    told = stages(continued, candidate, cell["seed"], rate, params)
    return {
        "val_loss": told["end"][cell["domain"]],
        "initial_loss": told["start"][cell["domain"]],
        "usage_entropy": told["entropy"],
        "routing_collapse": told["collapsed"],
        "rate": rate,
    }


def measure_speed(candidate: Candidate, cell: Cell, params: UpcyclingParams, stages: Any) -> dict[str, Any]:
    """Train a few steps and return tokens a second."""
    steps = min(10, params.upcycle_steps)
    model = built(candidate.label, cell["repeat"], params, stages)
    batches = mixed(stages, params, steps + 2, cell["repeat"], "speed")
    train(model, batches[:2], 1e-4, params)
    return {"tokens_per_second": steps * params.batch * params.window / train(model, batches[2:], 1e-4, params)}


# ---------------------------------------------------------------------------------------------------------------- parts


def parts(params: UpcyclingParams) -> tuple[Part, ...]:
    """Return the parts: the losses of all candidates, and the speed of some."""
    grid = tuple({"lr": rate} for rate in params.rates)
    chosen = {"divmoe", *(params.candidates or ROLES)}
    candidates = tuple(
        Candidate(label, role, uses=USES if label in MIXTURES else (), grid=grid)
        for label, role in ROLES.items()
        if label in chosen
    )

    def told(claims: Iterable[Any]) -> tuple[Any, ...]:
        """Return the claims about candidates that are there."""
        return tuple(claim for claim in claims if named_in(claim) <= chosen)

    def lower(id: str, other: str, text: str, metric: str = "val_loss", margin: float = 0.0) -> Claim:
        return Claim(id, text, difference("divmoe", other, metric), above=margin)

    quality = Part(
        name="quality",
        candidates=candidates,
        metrics=(
            Metric("val_loss", "nats a token", higher_is_better=False),
            Metric("initial_loss", "nats a token", higher_is_better=False),
            Metric("usage_entropy", "1 = even", per="seed"),
            Metric("routing_collapse", "of tokens", higher_is_better=False, per="seed"),
            Metric("rate", "", per="seed"),
        ),
        factors=(
            Factor("seed", range(params.seeds), kind="replicate", most=max(20, params.seeds)),
            Factor("domain", domain_names(params)),
        ),
        variance="independent",
        claims=told((
            all_of(
                "C1",
                "After equal upcycling tokens at equal active parameters DivMoE's mean loss is below that of sparse "
                "upcycling, which has not seen the domain fine-tuning.",
                lower("C1-whole", "sparse", "copies of whole layers"),
                lower("C1-fine", "sparse-fine", "copies of slices"),
            ),
            all_of(
                "C2",
                "It is below that of drop-upcycling, which has not seen it either.",
                lower("C2-whole", "drop", "whole layers"),
                lower("C2-fine", "drop-fine", "slices"),
            ),
            lower("C3", "free-top-k", "It is below that of the same experts under unconstrained top-K routing."),
            all_of(
                "C4",
                "Before any training its loss is at least 0.05 below that of drop-upcycling.",
                lower("C4-whole", "drop", "whole layers", "initial_loss", 0.05),
                lower("C4-fine", "drop-fine", "slices", "initial_loss", 0.05),
            ),
            lower("C5", "shuffled-groups", "It is below that of experts dealt to the groups at random."),
            report("R0", "tokens with two experts of a domain under DivMoE", level("divmoe", "routing_collapse")),
            *(
                report(f"R-{other}", f"loss of {other} less DivMoE's", difference("divmoe", other, "val_loss"))
                for other in ("soup", "dense", "dense-all", "btx", "btx-twice", "grouped-copies", "slice-groups",
                              "random-experts")
            ),
            report("R-start-dense", "initial loss of the base less DivMoE's",
                   difference("divmoe", "dense", "initial_loss")),
            report("R-start-soup", "initial loss of the soup less DivMoE's",
                   difference("divmoe", "soup", "initial_loss")),
            report("R-collapse", "tokens with two experts of a domain under free top-K",
                   level("free-top-k", "routing_collapse")),
            report("R-half-free", "K = 2 < G: loss of free top-K less DivMoE's",
                   difference("divmoe-half", "free-top-k-half", "val_loss")),
            report("R-half-shuffled", "K = 2 < G: loss of shuffled groups less DivMoE's",
                   difference("divmoe-half", "shuffled-groups-half", "val_loss")),
            report("R-half", "loss of K = F = 2 less that of K = F = 4",
                   difference("divmoe", "divmoe-half", "val_loss")),
        )),
        measure=measure,
        group=("seed",),
    )  # fmt: skip
    speed = Part(
        name="speed",
        candidates=tuple(
            Candidate(c.label, c.role, c.uses)
            for c in candidates
            if c.label in ("divmoe", "sparse", "btx-twice", "dense", "random-experts")
        ),
        metrics=(Metric("tokens_per_second", "in training", timed=True),),
        factors=(Factor("repeat", range(params.repeats), kind="replicate"),),
        variance="independent",
        claims=told((
            report("R-speed", "log of DivMoE's tokens a second in training over the dense model's",
                   difference("divmoe", "dense", "tokens_per_second", scale="log")),
        )),
        measure=measure_speed,
        group=("repeat",),
    )  # fmt: skip
    return (quality, speed) if "dense" in chosen else (quality,)


def named_in(claim: Any) -> set[str]:
    """Return the labels of the candidates that a claim is about."""
    if isinstance(claim, AllOf):
        return {label for part in claim.claims for label in named_in(part)}
    quantity = getattr(claim, "quantity", None)
    return {label for label in (getattr(quantity, "a", None), getattr(quantity, "b", None)) if label}


def check(params: UpcyclingParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.causal_lm.loading import check_device, check_loadable
    from fairtrial.data.samples import sample_path

    check_device(params.device)
    if params.corpora == "samples":
        for sample in ("wikipedia-articles", "news"):
            sample_path(sample)
    elif params.corpora != "tiny" and not Path(params.corpora).is_dir():
        raise InputError(f"corpora={params.corpora}: no such folder: give one with a .txt or .jsonl file a domain")
    if (params.base == "tiny") != (params.corpora == "tiny"):
        raise InputError("base=tiny and corpora=tiny go together")
    for label in params.candidates:
        if label not in ROLES:
            raise InputError(str(UnknownNameError("candidate", label, ROLES)))
    names = domain_names(params)
    if len(names) < 4:
        raise InputError(f"corpora={params.corpora}: {len(names)} domains: give at least four files, one a domain")
    if params.batch % len(names):
        raise InputError(f"batch={params.batch} is no multiple of the {len(names)} domains: a step has texts of each")
    if params.active > min(len(names), params.granularity):
        raise InputError(
            f"active={params.active}: give {min(len(names), params.granularity)} or less, the lesser of domains and F"
        )
    if params.base in ("small", "smollm2-135m"):
        sample_path("smollm2-135m")
    elif params.base != "tiny":
        check_loadable(params.base)
    if params.base in ("small", "tiny") and params.neurons % params.granularity:
        raise InputError(f"granularity={params.granularity} does not divide neurons={params.neurons}: give a divisor")
    if params.fine_tunes:
        if params.base in ("small", "tiny"):
            raise InputError("fine_tunes: name the model they were made of too, base=./my-base")
        for name in names:
            check_loadable(Path(params.fine_tunes) / name)


trial = Trial(
    name="upcycling",
    params=UpcyclingParams,
    parts=parts,
    presets={
        "smoke": {
            "base": "tiny", "corpora": "tiny", "vocabulary": 64, "width": 16, "layers": 1, "neurons": 16, "window": 12,
            "batch": 4, "base_steps": 4, "domain_steps": 2, "upcycle_steps": 2, "validation": 2,
            "seeds": 2,
            "candidates": ("drop", "drop-fine", "shuffled-groups"),
        },
        "full": {
            "base": "smollm2-135m", "characters": 1_000_000, "window": 128, "domain_steps": 200, "upcycle_steps": 300,
            "domain_rate": 2e-4, "validation": 100, "rates": (2e-5, 5e-5, 1e-4),
        },
    },
    check=check,
)  # fmt: skip
