"""Whether anchoring solved values to the original model's norm keeps a model usable over a stream of edits.

A replicate is a set of facts of its own, with its own order and its own wrong answers; the stream starts from the
unedited model in each.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
    all_of,
    difference,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    from fairtrial.lm.editing.edits import Edit

KNOWN = 0.05  # probability above which the model is taken to know a neighbour
NEIGHBOURS = 2  # an edit
SINGLE = 8  # edits of a block also made alone
READ = 512  # tokens that perplexity is read on
PROMPT = "The city of {} is the capital of"
PARAPHRASES = ("{} is the capital city of the country of", "The country whose capital is {} is")
WIDTH, CLAMP, WRITES = 64, 0.75, 128  # of the linear memory


class EditingParams(BaseModel):
    """Parameters of the trial ``editing``."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Input()] = Field("smollm2-135m", description=DESCRIPTION)
    edits: Annotated[str, Input()] = Field(
        "capitals",
        description="'capitals' (to a wrong country), 'tiny', or a .json or .jsonl file of edits, of CounterFact or "
        "of zsRE, which the blocks share out",
    )
    text: Annotated[str, Input()] = Field(
        "wikipedia", description="'wikipedia', 'tiny', or a file or folder of text: covariance and perplexity"
    )
    editor: Literal["memit", "rome", "alphaedit"] = Field("memit", description="what anchoring is added to")
    layers: list[int] = Field([5], description="blocks to write to")
    n_edits: int = Field(60, ge=2, description="edits of a block")
    batch_size: int = Field(8, ge=1, description="edits solved and written together")
    v_steps: int = Field(10, ge=1, description="steps of the value solve")
    clamp: float = Field(4.0, gt=0, description="greatest increment, in lengths of the output")
    covariance_weight: float = Field(2.0, ge=0, description="of MEMIT")
    blocks: int = Field(4, ge=2, le=40, description="sets of facts")
    rivals: bool = Field(
        False, description="also an anchor on the current norm, clamped increments, decay to the original, fine-tuning"
    )
    device: str = Field("cpu", description="a torch device")


# --------------------------------------------------------------------------------------------------------------- stages


@stage(keep=True)
def loaded(stages: Any, params: EditingParams) -> tuple[Any, Any]:
    """Load the model and its tokenizer, once a worker."""
    return load_named(params.model, device=params.device, tiny_layers=3)


def texts_of(params: EditingParams) -> Any:
    """Return the text of the covariance and of perplexity."""
    from fairtrial.data.text import wikipedia_articles
    from fairtrial.data.tiny import tiny_texts

    if params.text == "wikipedia":
        return wikipedia_articles()[:12]
    return tiny_texts(documents=8) if params.text == "tiny" else params.text


@stage(save="npz")
def covariance(stages: Any, params: EditingParams) -> dict[str, Any]:
    """Return E[k k'] of each layer, by its number."""
    from fairtrial.lm.editing.covariance import key_covariance

    model, tokenizer = stages(loaded, params)
    found = key_covariance(model, tokenizer, texts_of(params), params.layers)
    return {str(layer): C.numpy() for layer, C in found.items()}


def facts(params: EditingParams) -> list[tuple[str, str]]:
    """Return the built-in facts as (subject, true answer)."""
    if params.edits == "tiny":
        return [(f"w{i}", f"w{63 - i}") for i in range(2, 32)]
    from fairtrial.data.facts import countries

    table = countries()
    return [*zip(table["capital"], table["name"], strict=True)]


@stage(save="npz")
def known(stages: Any, params: EditingParams) -> dict[str, Any]:
    """Return the probability the model gives each fact's true answer, a token's on average, (n,)."""
    import numpy as np

    from fairtrial.causal_lm.likelihood import choice_scores

    model, tokenizer = stages(loaded, params)
    told = facts(params)
    prompts = [prompt_of(params).replace("{}", subject) for subject, _ in told]
    scores = choice_scores(model, tokenizer, prompts, [[f" {answer}"] for _, answer in told])
    return {"p": np.exp([float(score.mean[0]) for score in scores])}


def prompt_of(params: EditingParams) -> str:
    """Return the question of the built-in facts."""
    return "w4 {} w5" if params.edits == "tiny" else PROMPT


@stage()
def block_of(stages: Any, block: int, params: EditingParams) -> list[Edit]:
    """Return the edits of a block: facts of no other block, wrong answers, neighbours the model knows."""
    from fairtrial.lm.editing.edits import Edit, read_edits

    if params.edits not in ("capitals", "tiny"):
        given = read_edits(params.edits)
        order = generator(0, "blocks").permutation(len(given))[block :: params.blocks][: params.n_edits]
        return [given[i] for i in order]
    told = facts(params)
    order = generator(0, "blocks").permutation(len(told))
    mine = order[block :: params.blocks][: params.n_edits]
    rng = generator(block, "wrong answers")
    answers = sorted({answer for _, answer in told})
    p = stages(known, params)["p"]
    elsewhere = [told[i] for i in order if i not in set(mine)]
    sure = [told[i] for i in order if i not in set(mine) and p[i] > KNOWN] or elsewhere
    ask = prompt_of(params)
    edits = []
    for i in mine:
        subject, true = told[i]
        target = str(rng.choice([answer for answer in answers if answer != true]))
        near = [sure[j] for j in rng.permutation(len(sure))[:NEIGHBOURS]]
        neighbours = tuple((ask.replace("{}", other), answer) for other, answer in near)
        paraphrases = ("w8 {} w5",) if params.edits == "tiny" else PARAPHRASES
        edits.append(Edit(ask, subject, target, paraphrases, neighbours))
    return edits


@stage(save="npz")
def unedited(stages: Any, block: int, params: EditingParams) -> dict[str, Any]:
    """Solve the first edits of a block on the unedited model: outputs and values (n, d), and the anchor."""
    import torch

    from fairtrial.lm.editing.hooks import DROPPED

    edits = stages(block_of, block, params)[: 2 * SINGLE]
    editor = editor_of("plain", block, params, stages, rho=0.0)
    solved = [editor.solve(edits[i : i + params.batch_size]) for i in range(0, len(edits), params.batch_size)]
    h, v = (torch.cat(parts).cpu() for parts in zip(*solved, strict=True))
    norms = v.norm(dim=1).sort().values
    return {
        "outputs": h.numpy(),
        "values": v.numpy(),
        "rho": norms[: max(1, round(len(norms) * (1 - DROPPED)))].mean().numpy(),
    }


def editor_of(label: str, block: int, params: EditingParams, stages: Any, *, rho: float) -> Any:
    """Return a fresh editor on the unedited model, with a candidate's hooks."""
    import torch

    from fairtrial.lm.editing import editors, hooks
    from fairtrial.lm.editing.solving import Solver

    model, tokenizer = stages(loaded, params)
    solver = Solver(steps=params.v_steps, clamp=params.clamp, prefixes=("",))
    kind: Any = {"memit": editors.MEMIT, "rome": editors.ROME, "alphaedit": editors.AlphaEdit}[params.editor]
    how: dict[str, Any] = {"covariance_weight": params.covariance_weight} if params.editor == "memit" else {}
    if label == "anchored":
        how["hooks"] = [hooks.NormAnchor(rho=rho)]
    elif label == "current-anchor":
        how["hooks"] = [hooks.CurrentAnchor()]
    elif label == "random-value":
        how["hooks"] = [hooks.RandomValue(hooks.NormAnchor(rho=rho), seed=block)]
        solver = replace(solver, steps=1)  # what is solved is thrown away
    elif label == "clamped":
        how["hooks"] = [hooks.ClampIncrement(1.0)]
    elif label == "decayed":
        how["decay"] = 0.02
    elif label == "fine-tuning":
        kind, how = editors.FineTune, {}
    known = {int(layer): torch.from_numpy(C) for layer, C in stages(covariance, params).items()}
    return kind(model, tokenizer, layers=params.layers, covariance=known, text=texts_of(params), solver=solver, **how)


# ------------------------------------------------------------------------------------------------------------- measures


def measure(candidate: Candidate, cell: Cell, params: EditingParams, stages: Any) -> dict[str, Any]:
    """Run one candidate over one block's stream, and leave the model as it was."""
    import torch

    from fairtrial.lm.editing.scoring import answered, harmonic, score
    from fairtrial.lm.editing.stream import EditCollapse, EditStream

    label, block = candidate.label, cell["block"]
    edits = stages(block_of, block, params)
    solved = stages(unedited, block, params)
    rho = float(solved["rho"])
    model, tokenizer = stages(loaded, params)
    editor = editor_of(label, block, params, stages, rho=rho)
    single = []
    if label != "fine-tuning":
        for i, edit in enumerate(edits[:SINGLE]):
            h, v = (torch.from_numpy(solved[name][i : i + 1]) for name in ("outputs", "values"))
            editor.write([edit], editor.hooked([edit], h.to(params.device), v.to(params.device)))
            single.append(float(answered(model, tokenizer, [(edit.question, edit.target_new)])[0]))
            editor.replay([])
        editor = editor_of(label, block, params, stages, rho=rho)  # hooks remember what they have seen
    every = 2 * params.batch_size
    stream = EditStream(editor, batch_size=params.batch_size, check_every=every, tokens=READ)
    horizon: float | None = None
    try:
        for start in range(0, len(edits), every):
            stream.apply(edits[start : start + every])
            asked = [(edit.question, edit.target_new) for edit in edits[: start + every]]
            if horizon is None and answered(model, tokenizer, asked).mean() < 0.5:
                horizon = float(start)
    except EditCollapse as collapse:
        horizon = min(collapse.edits, horizon if horizon is not None else collapse.edits)
    told = score(model, tokenizer, edits)
    found = {
        "harmonic": harmonic([told.efficacy, told.paraphrase, told.specificity]),
        "efficacy_old": told.efficacy,
        "paraphrase": told.paraphrase,
        "specificity": told.specificity,
        "weight_ratio": editor.weight_ratio(),
        "value_norm": float(stream.history["value_norm"].iloc[-1] / rho),
        "ppl_ratio": stream._perplexity() / stream._healthy,
        "single_efficacy": sum(single) / len(single) if single else None,
        "log_horizon": horizon_of(horizon, label, params),
    }
    editor.replay([])
    return {name: value if value is None or value == value else None for name, value in found.items()}


def horizon_of(broke: float | None, label: str, params: EditingParams) -> float | None:
    """Return the log of the edits until a stream broke.

    One that did not break is good for all of them at least, which says nothing of how often more that is than a plain
    editor that did not break either.
    """
    if broke is None:
        return None if label == "plain" else math.log(params.n_edits)
    return math.log(max(broke, 1.0))


def measure_law(candidate: Candidate, cell: Cell, params: EditingParams, stages: Any) -> dict[str, Any]:
    """Grow one linear memory."""
    from fairtrial.lm.editing.memory import simulate

    return {"growth": simulate(WIDTH, CLAMP, WRITES, anchored=candidate.label == "anchored", seed=cell["memory"])}


# ---------------------------------------------------------------------------------------------------------------- parts


def parts(params: EditingParams) -> tuple[Part, ...]:
    """Return the parts: streams of edits, and the law of a linear memory."""
    from fairtrial.lm.editing.memory import expected_growth

    uses = ("editors", "hooks", "solving", "stream")
    rivals = (
        Candidate("clamped", "baseline", uses=uses),
        Candidate("decayed", "baseline", uses=uses),
        Candidate("fine-tuning", "baseline", uses=uses),
        Candidate("current-anchor", "control", uses=uses),
    )
    editor = {"memit": "MEMIT", "rome": "ROME", "alphaedit": "AlphaEdit"}[params.editor]
    stream = Part(
        name="stream",
        candidates=(
            Candidate("anchored", "method", uses=uses),
            Candidate("plain", "baseline", uses=uses),
            *(rivals if params.rivals else ()),
            Candidate("random-value", "control", uses=uses),
        ),
        metrics=(
            Metric("harmonic", "of efficacy, paraphrase and specificity"),
            Metric("efficacy_old", "of all edits at the end"),
            Metric("paraphrase", ""),
            Metric("specificity", ""),
            Metric("weight_ratio", "|W| / |W0|", higher_is_better=False),
            Metric("value_norm", "|v| of the last batch / rho", higher_is_better=False),
            Metric("ppl_ratio", "perplexity / unedited", higher_is_better=False),
            Metric("single_efficacy", "of edits made alone"),
            Metric("log_horizon", "log of the edits until it breaks"),
        ),
        factors=(Factor("block", range(params.blocks), kind="replicate"),),
        variance="independent",
        claims=(
            Claim(
                "C1",
                f"After {params.n_edits} edits {editor} with anchoring has a higher harmonic mean of efficacy, "
                f"paraphrase and specificity than {editor} alone.",
                difference("anchored", "plain", "harmonic"),
                above=0,
            ),
            Claim(
                "C2",
                "Its edited weights have grown less in norm.",
                difference("anchored", "plain", "weight_ratio"),
                above=0,
            ),
            all_of(
                "C3",
                "The efficacy of edits made alone differs by at most 0.05.",
                Claim("C3a", "It is not lower.", difference("anchored", "plain", "single_efficacy"), above=-0.05),
                Claim("C3b", "It is not higher.", difference("anchored", "plain", "single_efficacy"), below=0.05),
            ),
            Claim(
                "C4",
                "It stays usable for at least 1.5 times as many edits.",
                difference("anchored", "plain", "log_horizon"),
                above=math.log(1.5),
            ),
            report("R1", "efficacy of all edits, anchored", level("anchored", "efficacy_old")),
            report("R2", "efficacy of all edits, plain", level("plain", "efficacy_old")),
            report("R3", "perplexity over unedited, anchored", level("anchored", "ppl_ratio")),
            report("R4", "perplexity over unedited, plain", level("plain", "ppl_ratio")),
            report("R5", "norm of the last values over the anchor, plain", level("plain", "value_norm")),
            *(
                [
                    report(
                        "R6",
                        "harmonic mean above that of an anchor on the current norm",
                        difference("anchored", "current-anchor", "harmonic"),
                    )
                ]
                if params.rivals
                else []
            ),
        ),
        measure=measure,
        group=("block",),
    )
    expected = expected_growth(WIDTH, CLAMP, WRITES)
    law = Part(
        name="law",
        candidates=(Candidate("anchored", "method"), Candidate("plain", "control")),
        metrics=(Metric("growth", "|W|^2 after / before", higher_is_better=False),),
        factors=(Factor("memory", range(40), kind="replicate"),),
        variance="independent",
        claims=(
            all_of(
                "L1",
                "Without anchoring |W|^2 of a linear memory grows by (1 + c^2/d)^T, within a tenth.",
                Claim("L1a", "Not less.", level("plain", "growth"), above=0.9 * expected),
                Claim("L1b", "Not more.", level("plain", "growth"), below=1.1 * expected),
            ),
            all_of(
                "L2",
                "With anchoring it stays, within a twentieth.",
                Claim("L2a", "Not less.", level("anchored", "growth"), above=0.95),
                Claim("L2b", "Not more.", level("anchored", "growth"), below=1.05),
            ),
        ),
        measure=measure_law,
    )
    return stream, law


def check(params: EditingParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import sample_path
    from fairtrial.lm.editing.edits import check_edits, read_edits

    check_named(params.model, device=params.device)
    check_text_named(params.text)
    if params.edits in ("capitals", "tiny"):
        if params.edits == "capitals":
            sample_path("countries")
        there = len(facts(params))
    else:
        given = read_edits(params.edits)
        check_edits(given)
        there = len(given)
    if there // params.blocks < params.n_edits:
        raise InputError(
            f"{there} edits make {params.blocks} blocks of {there // params.blocks}, not of {params.n_edits}: lower "
            "n_edits or blocks"
        )


trial = Trial(
    name="editing",
    params=EditingParams,
    parts=parts,
    presets={
        "smoke": {
            "model": "tiny", "edits": "tiny", "text": "tiny", "layers": [1], "n_edits": 4, "batch_size": 2,
            "v_steps": 2, "blocks": 2,
        },
        "full": {"n_edits": 120, "blocks": 2, "rivals": True},
    },
    check=check,
)  # fmt: skip
