"""Whether each score of ProofRank moves with what it is named for, and with nothing else.

Formal proofs of set.mm, where the same statement was proved twice, try conciseness and diversity. The bank's proofs,
made worse in one way at a time, try all four axes against each other; retyped, they must not move. A judge, if there is
one, is tried on known proofs before it is asked anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.errors import InputError
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

    from fairtrial.evaluation.proof_quality.metamath import Metamath
    from fairtrial.evaluation.proof_quality.proof import Proof
    from fairtrial.evaluation.proof_quality.simplicity import Encoder

TARGETS = {
    "pad": "conciseness", "detour": "conciseness", "brute": "ease", "elevate": "simplicity", "copy": "diversity",
}  # fmt: skip
AXES = ("conciseness", "ease", "simplicity", "diversity")
PAIRS = ("same assertion", "same hypotheses too")


class ProofQualityParams(BaseModel):
    """Parameters of the trial ``proof-quality``."""

    model_config = ConfigDict(extra="forbid")

    proofs: Annotated[str, Input()] = Field("bank", description="'bank' (55 proofs of 20 theorems), or a .jsonl file")
    metamath: Annotated[str, Input()] = Field(
        "set-mm", description="a sample, a .mm file, or left empty to leave formal proofs out"
    )
    encoder: Annotated[str, Input()] = Field(
        "minilm", description="a sample or a folder of a sentence encoder; left empty, words are compared"
    )
    judge: Annotated[str, Input()] = Field(
        "smollm2-135m", description="a sample, a model's folder or .gguf file, an endpoint's URL, or left empty"
    )
    judge_model: str = Field("", description="the model's name at the judge's URL")
    judge_proofs: int = Field(8, ge=2, description="proofs whose necessary steps the judge is asked for")
    controls: int = Field(8, ge=6, le=50, description="known proofs that the judge is tried on first")
    language_model: Annotated[str, Input()] = Field(
        "smollm2-135m", description="reads proofs for the baseline perplexity; left empty, that is left out"
    )
    language_model_proofs: int = Field(12, ge=8, description="proofs that the language model reads")
    draws: int = Field(
        1, ge=1, le=40, description="draws of every operator; from 5 on claims generalise over draws",
        json_schema_extra={"scope": "plan"},
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- inputs


@stage(keep=True)
def proofs_of(stages: Any, params: ProofQualityParams) -> list[Proof]:
    """Return the correct proofs, their steps retyped in one style."""
    from fairtrial.evaluation.proof_quality.proof import read_jsonl
    from fairtrial.evaluation.proof_quality.theorems import bank

    if params.proofs == "bank":
        given = [entry.proof for entry in bank()]
    else:
        read = read_jsonl(params.proofs)
        given = [proof for proof in read if proof.correct]
        stages.note(f"{len(given)} of {len(read)} proofs of {params.proofs} are marked as correct and used")
    if len(given) < 8:
        raise InputError(f"proofs={params.proofs}: {len(given)} proofs are marked as correct, 8 or more are needed")
    return [proof.with_steps([step.text for step in proof.steps]) for proof in given]


@stage(keep=True)
def encoder_of(stages: Any, params: ProofQualityParams) -> Encoder | None:
    """Load the sentence encoder, once a worker."""
    from fairtrial.evaluation.proof_quality.simplicity import RememberingEncoder
    from fairtrial.sentences import SentenceEncoder

    if not params.encoder:
        stages.note("no encoder: proofs are compared by their words, techniques by triggers alone")
        return None
    return RememberingEncoder(SentenceEncoder(_path(params.encoder)))


@stage(keep=True)
def database_of(stages: Any, params: ProofQualityParams) -> Metamath:
    """Index the Metamath database, once a worker."""
    from fairtrial.evaluation.proof_quality.metamath import Metamath

    path = _path(params.metamath)
    return Metamath(path / "set.mm" if path.is_dir() else path)


@stage(keep=True)
def judge_of(stages: Any, params: ProofQualityParams) -> Any:
    """Return the judge."""
    from fairtrial.data.samples import cache_folder
    from fairtrial.judges import LocalJudge, OpenAIJudge

    if params.judge.startswith(("http://", "https://")):
        return OpenAIJudge(params.judge, params.judge_model)
    loaded = stages(language_model_of, params.judge, cache_folder().as_posix())
    return LocalJudge(loaded, max_tokens=48)


@stage(keep=True)
def language_model_of(stages: Any, name: str, cache: str) -> tuple[Any, Any]:
    """Load a language model and its tokenizer, once a worker."""
    from fairtrial.causal_lm.loading import load

    return load(_path(name), cache=Path(cache) / "models")


def _path(name: str) -> Path:
    """Return the file or folder of that name, or else the sample's."""
    from fairtrial.data.samples import sample_path

    return Path(name) if Path(name).exists() else sample_path(name)


# -------------------------------------------------------------------------------------------------------- formal proofs


@stage(save="json")
def formal_pairs(stages: Any, params: ProofQualityParams) -> list[dict[str, Any]]:
    """Return the theorems proved twice: {kind: OLD or ALT, label, whole: whether the hypotheses are the same too}.

    A theorem xOLD or xALT whose assertion is that of x; ``whole`` asks that their hypotheses be equal as well, in any
    order and under any name.
    """
    database = stages(database_of, params)
    found = []
    for label in database.theorems():
        kind, new = label[-3:], label[:-3]
        if kind in ("OLD", "ALT") and new in database and database.entries[new].kind == "p":
            if database.statement(label) != database.statement(new):
                continue
            whole = sorted(database.hypotheses(label)) == sorted(database.hypotheses(new))
            found.append({"kind": kind, "label": new, "whole": whole})
    if sum(pair["kind"] == "OLD" for pair in found) < 8 or sum(pair["kind"] == "ALT" for pair in found) < 8:
        raise InputError(f"metamath={params.metamath}: fewer than 8 theorems have an OLD or an ALT proof beside")
    return found


def measure_newer(candidate: Candidate, cell: Cell, params: ProofQualityParams, stages: Any) -> dict[str, Any]:
    """Count in which pairs a score prefers the newer proof; ties are left out, as no preference."""
    from fairtrial.evaluation.proof_quality.baselines import gzip_score, random_score
    from fairtrial.evaluation.proof_quality.concise import used_share
    from fairtrial.evaluation.proof_quality.proof import Proof

    database = stages(database_of, params)
    pairs = [
        p for p in stages(formal_pairs, params) if p["kind"] == "OLD" and (p["whole"] or cell["pairs"] == PAIRS[0])
    ]
    score: dict[str, Callable[[Proof], float]] = {
        "steps": lambda proof: -proof.length,
        "used share": used_share,
        "gzip": gzip_score,
        "random": random_score,
    }
    labels, gains = [pair["label"] for pair in pairs], []
    for label in labels:
        newer, older = (Proof.from_metamath(database, name) for name in (label, f"{label}OLD"))
        gains.append(score[candidate.label](newer) - score[candidate.label](older))
    untied = [(label, float(gain > 0)) for label, gain in zip(labels, gains, strict=True) if gain]
    return {
        "prefers newer": Items(*zip(*untied, strict=True)) if untied else None,
        "tied": 1 - len(untied) / len(labels),
    }


def measure_ideas(candidate: Candidate, cell: Cell, params: ProofQualityParams, stages: Any) -> dict[str, Any]:
    """Tell alternative proofs from replaced ones by how far apart the two proofs of a pair are."""
    import numpy as np

    from fairtrial.evaluation.proof_quality.baselines import random_score, self_bleu, tokens_of
    from fairtrial.evaluation.proof_quality.diverse import distances
    from fairtrial.evaluation.proof_quality.proof import Proof
    from fairtrial.stats import auc_influence

    database = stages(database_of, params)
    pairs = [pair for pair in stages(formal_pairs, params) if pair["whole"] or cell["pairs"] == PAIRS[0]]
    apart = []
    for pair in pairs:
        one = Proof.from_metamath(database, pair["label"])
        other = Proof.from_metamath(database, pair["label"] + pair["kind"])
        if candidate.label == "diversity":
            apart.append(float(distances([one, other])[0, 1]))
        elif candidate.label == "self-BLEU":
            apart.append(1 - self_bleu(tokens_of(one), tokens_of(other)))
        else:
            apart.append(random_score(one))
    alternative = np.array([pair["kind"] == "ALT" for pair in pairs])
    ids = [pair["label"] + pair["kind"] for pair in pairs]
    return {"AUC": Items(ids, auc_influence(alternative, apart))}


# ------------------------------------------------------------------------------------------------------- damaged proofs


@stage(keep=True)
def damaged(stages: Any, draw: int, params: ProofQualityParams) -> dict[str, list[Proof]]:
    """Return the proofs as they are, under "", and as each operator leaves them."""
    from fairtrial.evaluation.proof_quality.operators import DAMAGE, retype

    proofs = stages(proofs_of, params)
    made = {name: [operator(proof, seed=draw) for proof in proofs] for name, operator in DAMAGE.items()}
    return {"": proofs, **made, "retype": [retype(proof, seed=draw) for proof in proofs]}


@stage(save="json")
def scores_of(stages: Any, candidate: Candidate, draw: int, params: ProofQualityParams) -> dict[str, list[float]]:
    """Return a candidate's score of every proof, as it is and as each operator leaves it; NaN where it has none.

    Diversity and self-BLEU are those of a proof with each other proof of its theorem, averaged; a copy takes the
    other's place.
    """
    versions = stages(damaged, draw, params)
    proofs = versions[""]
    others = [[q for q in proofs if q is not p and q.problem == p.problem] for p in proofs]
    shortest = {p.problem: min(q.length for q in proofs if q.problem == p.problem) for p in proofs}
    score = scorer(stages, candidate.label, draw, params, shortest)
    if candidate.label in ("diversity", "self-BLEU"):
        return {
            name: [
                float(sum(score([p, q]) for q in around) / len(around)) if around else math.nan
                for p, around in zip(made, [[p] for p in proofs] if name == "copy" else others, strict=True)
            ]
            for name, made in versions.items()
        }
    if candidate.label == "perplexity":  # a proof of each theorem in turn
        rank = [sum(q.problem == p.problem for q in proofs[:i]) for i, p in enumerate(proofs)]
        read = sorted(sorted(range(len(proofs)), key=lambda i: (rank[i], i))[: params.language_model_proofs])
        texts = {name: made for name, made in versions.items() if name != "retype"}
        scored = {name: dict(zip(read, score([made[i] for i in read]), strict=True)) for name, made in texts.items()}
        return {name: [found.get(i, math.nan) for i in range(len(proofs))] for name, found in scored.items()}
    return {name: list(map(float, score(made))) for name, made in versions.items()}


def scorer(
    stages: Any, label: str, draw: int, params: ProofQualityParams, shortest: dict[str, int]
) -> Callable[[Sequence[Proof]], Any]:
    """Return the function behind a candidate's label: of proofs to a score each, or of a pair to one score."""
    from fairtrial.data.samples import cache_folder
    from fairtrial.evaluation.proof_quality import baselines
    from fairtrial.evaluation.proof_quality.concise import used_share
    from fairtrial.evaluation.proof_quality.diverse import distances, vendi
    from fairtrial.evaluation.proof_quality.ease import computational_ease
    from fairtrial.evaluation.proof_quality.judging import grades
    from fairtrial.evaluation.proof_quality.simplicity import cognitive_simplicity

    match label:
        case "conciseness":
            return lambda proofs: [used_share(proof) for proof in proofs]
        case "ease":
            return lambda proofs: [computational_ease(p, reference_length=shortest[p.problem]).score for p in proofs]
        case "simplicity":
            encoder = stages(encoder_of, params)
            return lambda proofs: [cognitive_simplicity(proof, encoder=encoder).score for proof in proofs]
        case "diversity":
            encoder = stages(encoder_of, params)
            return lambda pair: vendi(1 - distances(pair, encoder=encoder))[0]
        case "tokens":
            return lambda proofs: [baselines.token_score(proof) for proof in proofs]
        case "gzip":
            return lambda proofs: [baselines.gzip_score(proof) for proof in proofs]
        case "self-BLEU":
            return lambda pair: 1 - baselines.self_bleu(*map(baselines.tokens_of, pair))
        case "random":
            return lambda proofs: [baselines.random_score(proof, seed=draw) for proof in proofs]
        case "perplexity":
            model, tokenizer = stages(language_model_of, params.language_model, cache_folder().as_posix())
            return lambda proofs: baselines.fluency_scores(proofs, model, tokenizer)
        case "one grade":
            judge = stages(judge_of, params)
            return lambda proofs: [math.nan if g is None else g for g in grades(judge, proofs, "quality")]
    raise AssertionError(label)


def measure_damage(candidate: Candidate, cell: Cell, params: ProofQualityParams, stages: Any) -> dict[str, Any]:
    """Return by how much an operator moves a score of each proof, in standard deviations over all proofs as given."""
    import numpy as np

    if candidate.label == "one grade" and not stages(judge_tried, params)["usable"]:
        return {"shift": None, "lowered": None}
    scores = {name: np.array(v) for name, v in stages(scores_of, candidate, cell["draw"], params).items()}
    before, after = scores[""], scores[cell["operator"]]
    known = np.flatnonzero(np.isfinite(before) & np.isfinite(after))
    if not len(known):
        return {"shift": None, "lowered": None}
    everything = np.concatenate([scores[name] for name in ("", *TARGETS)])
    spread = float(np.nanstd(everything, ddof=1)) or 1.0
    moved = after[known] - before[known]
    problems = [proof.problem for proof in stages(proofs_of, params)]
    ids = [f"{problems[i]}, {i}" for i in known]
    return {"shift": Items(ids, moved / spread), "lowered": Items(ids, (moved < -1e-9).astype(float))}


def measure_retyped(candidate: Candidate, cell: Cell, params: ProofQualityParams, stages: Any) -> dict[str, Any]:
    """Return the largest change of a score by retyping."""
    import numpy as np

    scores = {name: np.array(v) for name, v in stages(scores_of, candidate, cell["draw"], params).items()}
    return {"largest change": float(np.nanmax(np.abs(scores["retype"] - scores[""])))}


# ---------------------------------------------------------------------------------------------------------------- judge


@stage(save="json")
def judge_tried(stages: Any, params: ProofQualityParams) -> dict[str, Any]:
    """Try the judge on known proofs and their corrupted twins: usable or not, and the share right of each pair."""
    import tempfile

    from fairtrial.evaluation.proof_quality.judging import judge_reliability, judged_correct, known_pairs
    from fairtrial.judges import CachedJudge

    pairs = known_pairs(params.controls)
    with tempfile.TemporaryDirectory() as folder:
        judge = CachedJudge(stages(judge_of, params), folder)  # asked once, read twice
        found = judge_reliability(judge, count=params.controls)
        verdicts = judged_correct(judge, [proof for pair in pairs for proof in pair])
    right = [((one is True) + (other is False)) / 2 for one, other in zip(verdicts[::2], verdicts[1::2], strict=True)]
    refused = "" if found.usable else "; so it is not asked for necessary steps, and C5 has no verdict"
    stages.note(f"{params.judge_model or params.judge}: {found}{refused}")
    return {"usable": bool(found.usable), "pairs": [pair[0].problem for pair in pairs], "right": right}


def measure_judge(candidate: Candidate, cell: Cell, params: ProofQualityParams, stages: Any) -> dict[str, Any]:
    """Compare the steps that a judge finds necessary with those that the conclusion is reached from.

    The proofs were padded and led through a detour, so that both kinds of step are there. A judge that cannot tell
    known proofs from corrupted ones is not asked.
    """
    import numpy as np

    from fairtrial.evaluation.proof_quality.concise import necessary_steps
    from fairtrial.evaluation.proof_quality.dependencies import reached
    from fairtrial.evaluation.proof_quality.judging import judge_verifier
    from fairtrial.evaluation.proof_quality.operators import detour, pad
    from fairtrial.seeds import generator
    from fairtrial.stats import pseudo_values

    verify = right = None
    if candidate.label == "judge":
        tried = stages(judge_tried, params)
        ids = [f"{problem}, {i}" for i, problem in enumerate(tried["pairs"])]
        right = Items(ids, tried["right"])
        if not tried["usable"]:
            return {"kappa": None, "right on known proofs": right}
        verify = judge_verifier(stages(judge_of, params))
    labels = []  # of each proof: (steps, 2) reached, necessary
    for proof in stages(proofs_of, params)[: params.judge_proofs]:
        longer = detour(pad(proof))
        if verify is None:
            kept = np.flatnonzero(generator(0, "random steps", longer.text).random(len(longer)) < 0.5).tolist()
        else:
            kept = necessary_steps(longer, verify)[0] or list(range(len(longer)))
        labels.append(np.stack([reached(longer.steps), np.isin(np.arange(len(longer)), kept)], axis=1))

    def kappa(chosen: np.ndarray) -> float:
        one, other = np.concatenate([labels[i] for i in chosen]).T
        chance = one.mean() * other.mean() + (1 - one.mean()) * (1 - other.mean())
        return float(((one == other).mean() - chance) / (1 - chance)) if chance < 1 else 0.0

    asked = np.arange(len(labels))
    return {"kappa": Items(asked, pseudo_values(kappa, asked)), "right on known proofs": right}


# ---------------------------------------------------------------------------------------------------------------- parts

METHODS = (
    Candidate("conciseness", "method", uses=("concise", "dependencies")),
    Candidate("ease", "method", uses=("ease",)),
    Candidate("simplicity", "method", uses=("simplicity",)),
    Candidate("diversity", "method", uses=("diverse",)),
)
BASELINES = (
    Candidate("tokens", "baseline", uses=("baselines",)),
    Candidate("gzip", "baseline", uses=("baselines",)),
    Candidate("self-BLEU", "baseline", uses=("baselines",)),
    Candidate("perplexity", "baseline", uses=("baselines",)),
    Candidate("one grade", "baseline", uses=("judging",)),
)
RANDOM = Candidate("random", "control", uses=("baselines",))


def parts(params: ProofQualityParams) -> tuple[Part, ...]:
    """Return the parts: pairs of formal proofs, damaged proofs, retyped proofs, the judge."""
    formal = (_newer(), _ideas()) if params.metamath else ()
    judged = (_judge(),) if params.judge else ()
    return (*formal, _damage(params), _retyped(params), *judged)


def _newer() -> Part:
    first, second = ({"pairs": name} for name in PAIRS)
    return Part(
        name="newer",
        candidates=(
            Candidate("steps", "method", uses=("metamath", "proof")),
            Candidate("used share", "method", uses=("metamath", "concise", "dependencies")),
            Candidate("gzip", "baseline", uses=("metamath", "baselines")),
            Candidate("random", "control", uses=("metamath", "baselines")),
        ),
        metrics=(Metric("prefers newer", "of untied pairs"), Metric("tied", "of pairs", higher_is_better=False)),
        factors=(Factor("pairs", PAIRS),),
        variance="independent",
        claims=(
            Claim(
                "C1",
                "the number of steps prefers the newer proof in more than half of the untied pairs, for these pairs "
                "(the assertion is the same; shortening is one reason to replace a proof)",
                level("steps", "prefers newer", first),
                above=0.5,
                over="item",
            ),
            report(
                "R1",
                "the same where the hypotheses are the same too",
                level("steps", "prefers newer", second),
                over="item",
            ),
        ),
        measure=measure_newer,
        group=(),
    )


def _ideas() -> Part:
    first, second = ({"pairs": name} for name in PAIRS)
    return Part(
        name="ideas",
        candidates=(
            Candidate("diversity", "method", uses=("metamath", "diverse")),
            Candidate("self-BLEU", "baseline", uses=("metamath", "baselines")),
            Candidate("random", "control", uses=("metamath", "baselines")),
        ),
        metrics=(Metric("AUC"),),
        factors=(Factor("pairs", PAIRS),),
        variance="independent",
        claims=(
            all_of(
                "C2",
                "the diversity distance tells alternative proofs from replaced ones with an AUC above .8 and better "
                "than self-BLEU, for these pairs (the assertion is the same)",
                Claim("C2-auc", "AUC above .8", level("diversity", "AUC", first), above=0.8, over="item"),
                Claim(
                    "C2-bleu", "better than self-BLEU", difference("diversity", "self-BLEU", "AUC", first),
                    above=0, over="item",
                ),
            ),
            report(
                "R2", "the AUC where the hypotheses are the same too", level("diversity", "AUC", second), over="item"
            ),
            report(
                "R3", "its lead over self-BLEU there", difference("diversity", "self-BLEU", "AUC", second), over="item"
            ),
        ),
        measure=measure_ideas,
        group=(),
    )  # fmt: skip


def _damage(params: ProofQualityParams) -> Part:
    over: Literal["replicate", "item"] = "replicate" if params.draws >= 5 else "item"
    here = (
        "" if over == "replicate" else ", for this draw of the operators" if params.draws == 1 else ", for these draws"
    )
    wanted = {"perplexity": bool(params.language_model), "one grade": params.judge.startswith("http")}
    claims = []
    for operator, target in TARGETS.items():
        where = {"operator": operator}
        claims.append(
            Claim(
                f"C3-{operator}-lowers",
                f"{operator} lowers {target} in over 80 % of proofs{here}",
                level(target, "lowered", where),
                above=0.8,
                over=over,
            )
        )
        for other in AXES:
            if other != target:
                claims += [
                    Claim(
                        f"C3-{operator}-{other}-{'raised' if sign < 0 else 'lowered'}",
                        f"{operator} moves {other} {'up' if sign < 0 else 'down'} by less than half as much{here}",
                        contrast(
                            {
                                (other, "shift", tuple(where.items())): sign,
                                (target, "shift", tuple(where.items())): -0.5,
                            }
                        ),
                        above=0,
                        over=over,
                    )
                    for sign in (1.0, -1.0)
                ]
    return Part(
        name="damage",
        candidates=(*METHODS, *(c for c in BASELINES if wanted.get(c.label, True)), RANDOM),
        metrics=(Metric("shift", "standard deviations"), Metric("lowered", "of the proofs")),
        factors=(
            Factor("draw", range(params.draws), kind="replicate", most=max(12, params.draws)),
            Factor("operator", tuple(TARGETS)),
        ),
        variance="crossed",
        claims=(
            all_of(
                "C3",
                "each way of worsening a proof lowers its own score in over 80 % of proofs, and moves each other score "
                f"by less than half as many standard deviations{here}",
                *claims,
            ),
        ),
        measure=measure_damage,
        group=("draw", "candidate"),
    )


def _retyped(params: ProofQualityParams) -> Part:
    return Part(
        name="retyped",
        candidates=(*METHODS, *(c for c in BASELINES if c.label in ("tokens", "gzip", "self-BLEU")), RANDOM),
        metrics=(Metric("largest change", higher_is_better=False, exact=True),),
        factors=(Factor("draw", range(params.draws), kind="replicate", most=max(12, params.draws)),),
        variance="independent",
        claims=(exact("C4", "retyping moves no score of the method by 1e-9", _unmoved),),
        measure=measure_retyped,
        group=("draw", "candidate"),
    )


def _unmoved(frame: pd.DataFrame) -> bool | str:
    """Whether no score of a method moved."""
    moved = frame[(frame["role"] == "method") & ~(frame["largest change"] < 1e-9)]
    return True if moved.empty else f"{moved.iloc[0]['candidate']} moved by {moved.iloc[0]['largest change']:.3g}"


def _judge() -> Part:
    return Part(
        name="judge",
        candidates=(
            Candidate("judge", "method", uses=("judging", "concise", "dependencies")),
            Candidate("random", "control", uses=("dependencies",)),
        ),
        metrics=(Metric("kappa"), Metric("right on known proofs", "of the verdicts")),
        factors=(),
        variance="independent",
        claims=(
            Claim(
                "C5",
                "a judge's necessary steps agree with the used ones, with a kappa above .4, for these proofs",
                level("judge", "kappa"),
                above=0.4,
                over="item",
            ),
            report(
                "R4",
                "how often the judge tells known proofs from corrupted ones; at a half it is not asked for C5",
                level("judge", "right on known proofs"),
                over="item",
            ),
        ),
        measure=measure_judge,
        group=(),
    )


def check(params: ProofQualityParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import find_sample, sample_path
    from fairtrial.evaluation.proof_quality.proof import read_jsonl

    for name in ("metamath", "encoder", "judge", "language_model"):
        value = getattr(params, name)
        if not value or Path(value).exists() or (name == "judge" and value.startswith("http")):
            continue
        if "/" in value or "." in Path(value).name:
            raise InputError(f"{name}={value}: no such file or folder")
        sample_path(find_sample(value).name)
    if params.judge.startswith("http"):
        from fairtrial.judges import OpenAIJudge

        if not params.judge_model:
            raise InputError(f"judge={params.judge}: name the model it serves: --set judge_model=NAME")
        OpenAIJudge(params.judge, params.judge_model).chat.probe()
    if params.proofs != "bank" and not any(proof.correct for proof in read_jsonl(params.proofs)):
        raise InputError(f"proofs={params.proofs}: no row has correct: true; quality is that of correct proofs")


trial = Trial(
    name="proof-quality",
    params=ProofQualityParams,
    parts=parts,
    presets={
        "smoke": {"metamath": "", "encoder": "", "judge": "", "language_model": ""},
        "full": {"draws": 5, "controls": 40, "judge_proofs": 20, "language_model_proofs": 55},
    },
    check=check,
)
