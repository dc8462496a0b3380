"""Whether weights by expected accepted length train a better drafter than fixed weights, and what drafting saves.

The target writes texts; a replicate is a set of texts of its own, on most of which drafters are trained from the same
start, and on the rest of which it is counted how many of their tokens the target would have accepted.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.causal_lm.named import DESCRIPTION, check_named, check_text_named, load_named
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
    difference,
    exact,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from fairtrial.lm.drafting.drafter import BlockDrafter
    from fairtrial.lm.drafting.loss import DPACELoss
    from fairtrial.lm.drafting.written import Written

HELD_OUT = 0.2  # of a set's texts
STEP = (512, 16, 4096)  # blocks, positions and tokens of the timed step


class DraftingParams(BaseModel):
    """Parameters of the trial ``drafting``."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Input()] = Field("smollm2-135m", description=DESCRIPTION)
    text: Annotated[str, Input()] = Field(
        "wikipedia",
        description="'wikipedia', 'tiny', or a file or folder of text: prompts are its paragraphs' beginnings",
    )
    n_prompts: int = Field(240, ge=8, description="prompts the target goes on from, over all sets")
    prompt_tokens: int = Field(32, ge=2, description="tokens of a prompt")
    new_tokens: int = Field(64, ge=4, description="tokens the target writes after each")
    block_size: int = Field(8, ge=2, description="tokens a block")
    steps: int = Field(100, ge=2, description="steps of training")
    anchors: int = Field(16, ge=1, description="blocks of a text in a step")
    batch_size: int = Field(2, ge=1, description="texts of a step")
    draft_vocab: int = Field(4096, ge=2, description="the commonest tokens, which can be drafted")
    sets: int = Field(4, ge=2, le=20, description="sets of texts")
    decoded: int = Field(4, ge=2, description="held-out prompts that are decoded against the clock")
    ablations: bool = Field(False, description="also without smoothing, and reach or continuation alone")
    device: str = Field("cpu", description="a torch device")


# --------------------------------------------------------------------------------------------------------------- stages


@stage(keep=True)
def loaded(stages: Any, params: DraftingParams) -> tuple[Any, Any]:
    """Load the model and its tokenizer, once a worker."""
    return load_named(params.model, device=params.device, tiny_layers=4)


def paragraphs(params: DraftingParams) -> list[str]:
    """Return the texts whose beginnings are prompts."""
    from fairtrial.causal_lm.windows import read_texts
    from fairtrial.data.text import wikipedia_articles
    from fairtrial.data.tiny import tiny_texts

    if params.text == "tiny":
        return tiny_texts(documents=params.n_prompts, words=params.prompt_tokens)
    texts = wikipedia_articles() if params.text == "wikipedia" else read_texts(params.text)
    return [paragraph.strip() for text in texts for paragraph in text.split("\n") if paragraph.strip()]


@stage(save="npz")
def written(stages: Any, params: DraftingParams) -> dict[str, Any]:
    """Let the target go on from all prompts: tokens (S, T) and where each text ends, (S,)."""
    import numpy as np

    from fairtrial.lm.drafting.written import write

    model, tokenizer = stages(loaded, params)
    texts = paragraphs(params)
    least = 4 * params.prompt_tokens  # characters; whoever has fewer tokens is left out below
    texts = [text for text in texts if len(text) >= least] if params.text != "tiny" else texts
    order = generator(0, "prompts").permutation(len(texts))[: params.n_prompts]
    found = write(
        model, tokenizer, [texts[i] for i in order], prompt_tokens=params.prompt_tokens, new_tokens=params.new_tokens
    )
    return {"tokens": found.tokens.numpy(), "stop": found.stop.numpy(), "prompt": np.array(found.prompt)}


@stage(keep=True)
def set_of(stages: Any, number: int, params: DraftingParams) -> tuple[Written, torch.Tensor, int]:
    """Return the texts of a set, the target's features in them, and how many are for training."""
    import torch

    from fairtrial.lm.drafting.written import Written, features_of

    model, _ = stages(loaded, params)
    told = stages(written, params)
    rows = torch.arange(len(told["tokens"]))[number :: params.sets]
    texts = Written(torch.from_numpy(told["tokens"])[rows], int(told["prompt"]), torch.from_numpy(told["stop"])[rows])
    held_out = max(2, round(HELD_OUT * len(texts)))
    if len(texts) - held_out < params.batch_size:
        raise InputError(
            f"set {number} has {len(texts)} texts that do not loop: raise n_prompts={params.n_prompts} or lower sets"
        )
    return texts, features_of(model, texts, fresh(params, stages, number).config.layers), len(texts) - held_out


def fresh(params: DraftingParams, stages: Any, number: int) -> BlockDrafter:
    """Return the untrained drafter of a set, the same for all candidates."""
    import torch

    from fairtrial.lm.drafting.drafter import BlockDrafter

    model, _ = stages(loaded, params)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        size = min(params.draft_vocab, model.get_output_embeddings().weight.shape[0])
        return BlockDrafter.for_target(model, block_size=params.block_size, draft_vocab=size)


def loss_of(label: str, number: int) -> DPACELoss:
    """Return a candidate's loss."""
    from fairtrial.lm.drafting.loss import DPACELoss, ShuffledLoss

    return {
        "dpace": lambda: DPACELoss(),
        "uniform": lambda: DPACELoss(kind="uniform"),
        "exponential": lambda: DPACELoss(kind="exponential"),
        "geometric": lambda: DPACELoss(kind="geometric"),
        "unsmoothed": lambda: DPACELoss(0.0),
        "reach": lambda: DPACELoss(component="reach"),
        "continuation": lambda: DPACELoss(component="continuation"),
        "shuffled": lambda: ShuffledLoss(seed=number),
    }[label]()


def trained(label: str, number: int, params: DraftingParams, stages: Any) -> BlockDrafter:
    """Return a set's drafter, trained with a candidate's loss."""
    from fairtrial.lm.drafting.training import DrafterTrainer

    model, _ = stages(loaded, params)
    texts, features, n = stages(set_of, number, params)
    drafter = fresh(params, stages, number)
    trainer = DrafterTrainer(
        model, drafter, loss_of(label, number), anchors=params.anchors, batch_size=params.batch_size, seed=number
    )
    trainer.fit_written(texts[slice(n)], features[:n], steps=params.steps)
    return drafter


# ------------------------------------------------------------------------------------------------------------- measures


def measure(candidate: Candidate, cell: Cell, params: DraftingParams, stages: Any) -> dict[str, Any]:
    """Train one drafter on a set and count what the target accepts on the texts held out."""
    from fairtrial.lm.drafting.training import accepted_lengths

    texts, features, n = stages(set_of, cell["set"], params)
    drafter = trained(candidate.label, cell["set"], params, stages)
    lengths, right = accepted_lengths(drafter, texts[slice(n, None)], features[n:])
    return {
        "accepted_length": float(lengths.double().mean()),
        **{f"right_{j}": float(right[j - 1]) for j in (1, 2, params.block_size)},
    }


def measure_step(candidate: Candidate, cell: Cell, params: DraftingParams, stages: Any) -> dict[str, Any]:
    """Time a loss and its gradient, beside plain cross-entropy on the same logits."""
    import torch
    from torch.nn import functional as F

    rng = torch.Generator().manual_seed(cell["repeat"])
    N, B, V = STEP if params.model != "tiny" else (8, 4, 64)
    logits = torch.randn(N, B, V, generator=rng).requires_grad_()
    ids = torch.randint(V, (N, B), generator=rng)
    loss = loss_of(candidate.label, 0)

    def once(ours: bool) -> float:
        start = time.perf_counter()
        value = loss(logits, ids) if ours else F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        torch.autograd.grad(value, [logits])
        return time.perf_counter() - start

    once(True)
    pairs = [(once(True), once(False)) for _ in range(5)]
    ours, plain = (min(column) for column in zip(*pairs, strict=True))
    return {"ratio": ours / plain}


def measure_speed(candidate: Candidate, cell: Cell, params: DraftingParams, stages: Any) -> dict[str, Any]:
    """Decode a held-out prompt of the first set, beside plain greedy decoding."""
    import torch

    from fairtrial.lm.drafting.speculation import speculative_generate

    model, _ = stages(loaded, params)
    texts, _, n = stages(set_of, 0, params)
    row = n + cell["prompt"] % (len(texts) - n)
    prompt, stop = texts.tokens[row : row + 1, : texts.prompt].to(params.device), int(texts.stop[row])
    new = stop - texts.prompt
    mask = torch.ones_like(prompt)
    drafter: Any = stages(timed_drafter, params)
    if candidate.label == "oracle":
        drafter = Known(texts.tokens[row, :stop], params.block_size, drafter.config.vocab_size)

    def plain() -> torch.Tensor:
        return model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)

    def ours() -> tuple[torch.Tensor, float | None]:
        if candidate.label == "prompt-lookup":
            found = model.generate(
                prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0,
                prompt_lookup_num_tokens=params.block_size,
            )  # fmt: skip
            return found, None
        out = speculative_generate(model, drafter, prompt, max_new_tokens=new)
        return out.sequences, sum(out.accepted_lengths) / max(1, len(out.accepted_lengths))

    def timed(run: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        return run(), time.perf_counter() - start

    timed(lambda: model(prompt))  # warm
    (whole, usual), ((found, accepted), took) = timed(plain), timed(ours)
    return {
        "speedup": usual / took,
        "accepted": accepted,
        "same": float(torch.equal(whole, found)),
    }


@stage(keep=True)
def timed_drafter(stages: Any, params: DraftingParams) -> BlockDrafter:
    """Train the drafter that is decoded with."""
    return trained("dpace", 0, params, stages)


class Known:
    """A drafter that knows the text: what drafting could save at most."""

    def __init__(self, tokens: torch.Tensor, block_size: int, vocab_size: int) -> None:
        import torch

        self.tokens = tokens
        self.token_ids = torch.arange(vocab_size)
        self.config = SimpleNamespace(layers=(), block_size=block_size, vocab_size=vocab_size)

    def draft(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (B, V) that name the tokens to come."""
        import torch

        coming = self.tokens[len(tokens) : len(tokens) + self.config.block_size].to(tokens.device)
        logits = torch.zeros(self.config.block_size, len(self.token_ids), device=tokens.device)
        logits[torch.arange(len(coming)), coming] = 1.0
        return logits


def all_the_same(frame: pd.DataFrame) -> bool | str:
    """Return whether drafted texts are those of plain decoding, or which are not."""
    drafted = frame[frame["candidate"].isin(["dpace", "oracle"])]
    wrong = drafted[drafted["same"] != 1]
    return (
        True
        if wrong.empty
        else f"{len(wrong)} of {len(drafted)} texts differ, the first of prompt {wrong['prompt'].iloc[0]}"
    )


# ---------------------------------------------------------------------------------------------------------------- parts


def parts(params: DraftingParams) -> tuple[Part, ...]:
    """Return the parts: training, the cost of a step, and decoding."""
    uses = ("loss", "drafter", "training", "written")
    ablations = [
        Candidate(name, "baseline", uses=uses) for name in ("geometric", "unsmoothed", "reach", "continuation")
    ]
    positions = sorted({1, 2, params.block_size})
    training = Part(
        name="training",
        candidates=(
            Candidate("dpace", "method", uses=uses),
            Candidate("uniform", "baseline", uses=uses),
            Candidate("exponential", "baseline", uses=uses),
            *(ablations if params.ablations else ()),
            Candidate("shuffled", "control", uses=uses),
        ),
        metrics=(
            Metric("accepted_length", "tokens a verification, without the target's own"),
            *(Metric(f"right_{j}", f"how often position {j} is right") for j in positions),
        ),
        factors=(Factor("set", range(params.sets), kind="replicate"),),
        variance="independent",
        claims=(
            Claim(
                "C1",
                "D-PACE gets more tokens accepted a verification than uniform position weights.",
                difference("dpace", "uniform", "accepted_length"),
                above=0,
            ),
            Claim(
                "C2",
                "It gets more accepted than exponentially decaying weights.",
                difference("dpace", "exponential", "accepted_length"),
                above=0,
            ),
            Claim(
                "C3",
                "It gets more accepted than its own weights shuffled over positions, by more than 0.05.",
                difference("dpace", "shuffled", "accepted_length"),
                above=0.05,
            ),
            report("R1", "tokens accepted a verification", level("dpace", "accepted_length")),
            report(
                "R2", "position 1 right more often than by uniform weights", difference("dpace", "uniform", "right_1")
            ),
        ),
        measure=measure,
        group=("set",),
    )
    step = Part(
        name="step",
        candidates=(
            Candidate("dpace", "method", uses=("loss",)),
            Candidate("uniform", "baseline", uses=("loss",)),
        ),
        metrics=(Metric("ratio", "seconds of loss and gradient / cross-entropy", higher_is_better=False, timed=True),),
        factors=(Factor("repeat", range(6), kind="replicate"),),
        variance="independent",
        claims=(
            Claim(
                "C4",
                "Loss and gradient cost less than 3 % more than cross-entropy.",
                level("dpace", "ratio"),
                below=1.03,
            ),
        ),
        measure=measure_step,
    )
    speed = Part(
        name="decoding",
        candidates=(
            Candidate("dpace", "method", uses=("speculation", *uses)),
            Candidate("prompt-lookup", "baseline"),
            Candidate("oracle", "reference", uses=("speculation",)),
        ),
        metrics=(
            Metric("speedup", "plain seconds / seconds", timed=True),
            Metric("accepted", "tokens a verification", timed=True),
            Metric("same", "whether the text is that of plain decoding", timed=True),
        ),
        factors=(Factor("prompt", range(params.decoded), kind="replicate"),),
        variance="independent",
        claims=(
            exact("C5", "Drafted texts are exactly those of plain greedy decoding, on every prompt.", all_the_same),
            report("R3", "times plain decoding's speed, drafter trained here", level("dpace", "speedup")),
            report("R4", "the same of a drafter that knows the text", level("oracle", "speedup")),
            report("R5", "the same of transformers' prompt lookup", level("prompt-lookup", "speedup")),
        ),
        measure=measure_speed,
    )
    return training, step, speed


def check(params: DraftingParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    check_named(params.model, device=params.device)
    check_text_named(params.text)
    if params.n_prompts < 4 * params.sets:
        raise InputError(f"n_prompts={params.n_prompts}: give at least four a set, {4 * params.sets}")


trial = Trial(
    name="drafting",
    params=DraftingParams,
    parts=parts,
    presets={
        "smoke": {
            "model": "tiny", "text": "tiny", "n_prompts": 16, "prompt_tokens": 4, "new_tokens": 12, "block_size": 4,
            "steps": 2, "anchors": 2, "batch_size": 2, "draft_vocab": 32, "sets": 2, "decoded": 2,
        },
        "full": {"n_prompts": 2000, "block_size": 16, "steps": 2000, "anchors": 64, "batch_size": 4, "ablations": True},
    },
    check=check,
)  # fmt: skip
