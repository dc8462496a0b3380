"""Whether contexts that should correct properly are better to use than strong, near or random ones.

A replicate is a block of queries of one relation; every candidate chooses one of the same contexts, or none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.causal_lm.named import DESCRIPTION, check_named, load_named
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
    import numpy as np

    from fairtrial.lm.context.sources import Query

RIGHT_WAY = 0.5  # cosine above which a correction counts as pointing the right way


class ContextParams(BaseModel):
    """Parameters of the trial ``context``."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Input()] = Field("smollm2-135m", description=DESCRIPTION)
    queries: Annotated[str, Input()] = Field(
        "relations",
        description="'relations' (capitals, states, nationalities), 'tiny', or a .jsonl file whose rows have query, "
        "contexts, choices, answer, and perhaps start (of the answer) and relation",
    )
    n_queries: int = Field(40, ge=4, description="queries of a relation")
    blocks: int = Field(5, ge=2, le=40, description="blocks of a relation's queries")
    beta: float = Field(0.25, ge=0, description="weight of the answer without context in the consensus")
    gamma: float = Field(2.0, gt=0, description="sharpening of the consensus")
    device: str = Field("cpu", description="a torch device")


# --------------------------------------------------------------------------------------------------------------- stages


@stage(keep=True)
def loaded(stages: Any, params: ContextParams) -> tuple[Any, Any]:
    """Load the model and its tokenizer, once a worker."""
    return load_named(params.model, device=params.device, tiny_layers=3)


def relations(params: ContextParams) -> list[str]:
    """Return the names of the relations."""
    from fairtrial.lm.context.sources import RELATIONS

    if params.queries == "relations":
        return [*RELATIONS]
    return ["tiny"] if params.queries == "tiny" else [*own_queries(params)]


def own_queries(params: ContextParams) -> dict[str, list[tuple[Query, list[str]]]]:
    """Return the user's queries with their choices, by relation."""
    from fairtrial.lm.context.answers import checked_choices
    from fairtrial.lm.context.command import read_queries
    from fairtrial.lm.context.sources import Query

    found: dict[str, list[tuple[Query, list[str]]]] = {}
    for number, row in enumerate(read_queries(Path(params.queries)), start=1):
        if not row.get("answer") or not row.get("choices"):
            raise InputError(f"queries={params.queries}: query {number}: give an answer and choices")
        contexts = tuple(row["contexts"])
        query = Query(row["query"], row["start"], row["answer"], contexts, ("context",) * len(contexts))
        found.setdefault(str(row.get("relation", "own")), []).append((query, checked_choices(row["choices"])))
    return found


def asked(relation: str, params: ContextParams, tokenizer: Any) -> list[tuple[Query, list[str]]]:
    """Return the queries of a relation with their choices."""
    from fairtrial.data.text import wikipedia_articles
    from fairtrial.lm.context.sources import queries_of, sentences, tiny_queries

    if params.queries == "relations":
        found, choices = queries_of(relation, tokenizer, params.n_queries, sentences(wikipedia_articles()))
    elif params.queries == "tiny":
        found, choices = tiny_queries(params.n_queries)
    else:
        return own_queries(params)[relation][: params.n_queries]
    return [(query, choices) for query in found]


@stage(save="npz")
def read(stages: Any, relation: str, params: ContextParams) -> dict[str, Any]:
    """Read a relation's queries once: answers without context, with each, and with all, and how near contexts are.

    Returns before (n, C), after (n, K, C), everything (n, C), truth (n, C), NaN past a query's last choice or context,
    nearness by words and by MiniLM (n, K).
    """
    import numpy as np

    from fairtrial.lm.context.answers import answer_vectors, joined, normalised

    model, tokenizer = stages(loaded, params)
    told = asked(relation, params, tokenizer)
    K = max(len(query.contexts) for query, _ in told)
    C = max(len(choices) for _, choices in told)
    n = len(told)
    before, everything, truth = (np.full((n, C), np.nan) for _ in range(3))
    after = np.full((n, K, C), np.nan)
    for i, (query, choices) in enumerate(told):
        prompts = [query.question, *(joined(query.question, c) for c in query.contexts)]
        prompts.append(joined(query.question, "\n".join(query.contexts)))
        y = answer_vectors(model, tokenizer, prompts, choices, start=query.start)
        c, k = len(choices), len(query.contexts)
        before[i, :c], after[i, :k, :c], everything[i, :c] = y[0], y[1:-1], y[-1]
        truth[i, :c] = [float(normalised(choice) == normalised(query.answer)) for choice in choices]
    by_words, by_meaning = nearness([query for query, _ in told], K, params)
    return {
        "before": before,
        "after": after,
        "everything": everything,
        "truth": truth,
        "by_words": by_words,
        "by_meaning": by_meaning,
    }


def nearness(queries: list[Query], K: int, params: ContextParams) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines of queries and their contexts, (n, K), by words and by MiniLM; -inf past a query's last."""
    import numpy as np
    from sklearn.feature_extraction.text import TfidfVectorizer

    from fairtrial.data.samples import sample_path
    from fairtrial.sentences import SentenceEncoder

    texts = [text for query in queries for text in (query.question, *query.contexts)]
    words = TfidfVectorizer(token_pattern=r"(?u)\b\w+\b").fit(texts)
    tables = []
    for embed in (
        lambda these: words.transform(these).toarray(),
        words.transform if params.queries == "tiny" else SentenceEncoder(sample_path("minilm")),
    ):
        table = np.full((len(queries), K), -np.inf)
        vectors = embed(texts)
        vectors = np.asarray(vectors.todense() if hasattr(vectors, "todense") else vectors)
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        at = 0
        for row, query in zip(table, queries, strict=True):
            k = len(query.contexts)
            row[:k] = vectors[at + 1 : at + 1 + k] @ vectors[at]
            at += 1 + k
        tables.append(table)
    return tables[0], tables[1]


def block_of(block: int, n: int, params: ContextParams) -> np.ndarray:
    """Return the queries of a block, each in one."""
    return generator(0, "blocks").permutation(n)[block :: params.blocks]


# ------------------------------------------------------------------------------------------------------------- measures


def measure(candidate: Candidate, cell: Cell, params: ContextParams, stages: Any) -> dict[str, Any]:
    """Let one candidate choose for a block of queries."""
    import numpy as np

    known = stages(read, cell["relation"], params)
    rows = block_of(cell["block"], len(known["before"]), params)
    answers, harm = [], []
    for i in rows:
        y, chosen = answer_of(candidate.label, int(i), known, cell, params)
        answers.append((y, known["truth"][i][: len(y)]))
        if chosen is not None:
            before, after, truth = vectors(known, int(i))
            harm.append(float(np.square(after[chosen] - truth).sum() >= np.square(before - truth).sum()))
    return {
        "brier": float(np.mean([np.square(y - truth).sum() for y, truth in answers])),
        "accuracy": float(np.mean([y.argmax() == truth.argmax() for y, truth in answers])),
        "harmful_share": float(np.mean(harm)) if harm else None,
        "used_share": len(harm) / len(rows),
    }


def vectors(known: Any, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a query's answers without context (C,), with each (K, C), and the truth (C,)."""
    import numpy as np

    c = int((~np.isnan(known["before"][i])).sum())
    k = int((~np.isnan(known["after"][i][:, 0])).sum())
    return known["before"][i][:c], known["after"][i][:k, :c], known["truth"][i][:c]


def answer_of(label: str, i: int, known: Any, cell: Cell, params: ContextParams) -> tuple[np.ndarray, int | None]:
    """Return the answer (C,) a candidate ends with for query ``i``, and which context it chose, if one."""
    import numpy as np

    from fairtrial.lm.context.selector import consensus, predicted_changes

    before, after, truth = vectors(known, i)
    k = len(after)
    if label == "none":
        return before, None
    if label == "vote":
        return after.mean(0), None
    if label == "everything":
        return known["everything"][i][: len(before)], None
    if label in ("proper", "shuffled"):
        scores = predicted_changes(before, after, consensus(before, after, beta=params.beta, gamma=params.gamma))
        if label == "shuffled":
            scores = scores[generator(cell["block"], "shuffled", i).permutation(k)]
        best = int(scores.argmin())
        return (after[best], best) if scores[best] < 0 else (before, None)
    entropy = -np.where(after > 0, after * np.log(np.where(after > 0, after, 1)), 0).sum(1)
    score = {
        "random": lambda: generator(cell["block"], "random", i).random(k),
        "strongest": lambda: np.square(after - before).sum(1),
        "confident": lambda: after.max(1),
        "informative": lambda: -entropy,
        "words": lambda: known["by_words"][i][:k],
        "minilm": lambda: known["by_meaning"][i][:k],
        "oracle": lambda: -np.square(after - truth).sum(1),
    }[label]()
    best = int(np.argmax(score))
    if label == "oracle" and np.square(after[best] - truth).sum() >= np.square(before - truth).sum():
        return before, None
    return after[best], best


def measure_mechanism(candidate: Candidate, cell: Cell, params: ContextParams, stages: Any) -> dict[str, Any]:
    """Correlate the length of corrections that point the right way with the change of the error, over all relations.

    Few corrections point the right way and are too long, so that blocks of a single relation have too few to rank.
    """
    import numpy as np
    from scipy.stats import spearmanr

    from fairtrial.lm.context.geometry import corrections

    parts: list[tuple[np.ndarray, ...]] = []
    for relation in relations(params):
        known = stages(read, relation, params)
        for i in block_of(cell["block"], len(known["before"]), params):
            before, after, truth = vectors(known, int(i))
            found = corrections(before, after, truth)
            change = found.error_after - found.error_before
            if candidate.label == "shuffled":
                change = change[generator(cell["block"], "shuffled", relation, i).permutation(len(change))]
            parts.append((found.cos, found.rho, np.linalg.norm(after - before, axis=1), change))
    cos, rho, length, change = (np.concatenate(column) for column in zip(*parts, strict=True))

    def rank(chosen: np.ndarray) -> float | None:
        if chosen.sum() < 4 or np.ptp(length[chosen]) == 0 or np.ptp(change[chosen]) == 0:
            return None
        return float(spearmanr(length[chosen], change[chosen]).statistic)

    right = cos > RIGHT_WAY
    return {
        "below": rank(right & (rho < cos)),
        "beyond": rank(right & (rho > cos)),
        "misdirected": float((cos <= 0).mean()),
        "too_long": float(((cos > 0) & (rho >= 2 * cos)).mean()),
    }


# ---------------------------------------------------------------------------------------------------------------- parts


def parts(params: ContextParams) -> tuple[Part, ...]:
    """Return the parts: selection, and the mechanism."""
    relation = Factor("relation", relations(params))
    block = Factor("block", range(params.blocks), kind="replicate")
    selection = Part(
        name="selection",
        candidates=(
            Candidate("proper", "method", uses=("selector", "answers")),
            Candidate("strongest", "baseline"),
            Candidate("minilm", "baseline"),
            Candidate("words", "baseline"),
            Candidate("confident", "baseline"),
            Candidate("informative", "baseline"),
            Candidate("vote", "baseline"),
            Candidate("everything", "baseline"),
            Candidate("random", "control"),
            Candidate("shuffled", "control", uses=("selector",)),
            Candidate("none", "reference"),
            Candidate("oracle", "reference"),
        ),
        metrics=(
            Metric("brier", "squared error of the answer", higher_is_better=False),
            Metric("accuracy", ""),
            Metric("harmful_share", "of the contexts chosen", higher_is_better=False),
            Metric("used_share", "queries for which a context is chosen"),
        ),
        factors=(relation, block),
        variance="independent",
        claims=(
            Claim(
                "C1",
                "Selecting the proper correction gives a lower Brier score than selecting the strongest.",
                difference("proper", "strongest", "brier"),
                above=0,
            ),
            Claim(
                "C2",
                "It gives a lower Brier score than the context nearest by MiniLM.",
                difference("proper", "minilm", "brier"),
                above=0,
            ),
            Claim(
                "C3",
                "It gives a lower Brier score than a random context.",
                difference("proper", "random", "brier"),
                above=0,
            ),
            Claim(
                "C4",
                "At as many passes its Brier score is at most 0.01 above a vote over all contexts.",
                difference("proper", "vote", "brier"),
                above=-0.01,
            ),
            report("R1", "Brier score without context", level("none", "brier")),
            report("R2", "Brier score, proper", level("proper", "brier")),
            report("R3", "Brier score of an oracle", level("oracle", "brier")),
            report("R4", "Brier score lower than by the most confident", difference("proper", "confident", "brier")),
            report("R5", "share of its contexts that harm", level("proper", "harmful_share")),
            report("R6", "share of the strongest contexts that harm", level("strongest", "harmful_share")),
        ),
        measure=measure,
        group=("relation",),
    )
    mechanism = Part(
        name="mechanism",
        candidates=(Candidate("contexts", "method", uses=("geometry",)), Candidate("shuffled", "control")),
        metrics=(
            Metric("below", "rank correlation of length and error change where rho < cos", higher_is_better=False),
            Metric("beyond", "the same where rho > cos"),
            Metric("misdirected", "share of corrections with cos <= 0", higher_is_better=False),
            Metric("too_long", "share of corrections with rho >= 2 cos > 0", higher_is_better=False),
        ),
        factors=(block,),
        variance="independent",
        claims=(
            all_of(
                "C5",
                "Of corrections that point the right way a longer one lowers the error below the best length and "
                "raises it beyond.",
                Claim("C5a", "Below, longer is better.", level("contexts", "below"), below=0),
                Claim("C5b", "Beyond, longer is worse.", level("contexts", "beyond"), above=0),
            ),
            report("R7", "share of contexts that point the wrong way", level("contexts", "misdirected")),
            report("R8", "share of contexts that point the right way and are too long", level("contexts", "too_long")),
        ),
        measure=measure_mechanism,
    )
    return selection, mechanism


def check(params: ContextParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import sample_path

    check_named(params.model, device=params.device)
    if params.n_queries < params.blocks:
        raise InputError(
            f"n_queries={params.n_queries} is less than blocks={params.blocks}: give a query to each block"
        )
    if params.queries == "relations":
        for sample in ("analogies", "wikipedia-articles", "minilm"):
            sample_path(sample)
    elif params.queries != "tiny":
        sample_path("minilm")
        for relation, found in own_queries(params).items():
            if len(found) < params.blocks:
                raise InputError(f"relation {relation!r} has {len(found)} queries, fewer than blocks={params.blocks}")


trial = Trial(
    name="context",
    params=ContextParams,
    parts=parts,
    presets={
        "smoke": {"model": "tiny", "queries": "tiny", "n_queries": 8, "blocks": 2},
        "full": {"n_queries": 100, "blocks": 10},
    },
    check=check,
)
