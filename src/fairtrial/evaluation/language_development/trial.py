"""Whether items from a model's own words measure what they claim, and whether learning words hinges on alignment.

Text: scorers answer a bench generated from the corpus they read. Streams: learners of words hear speech that matches
sight to a graded degree, and choose among four words for a frame they have not seen. All models are small and all
speech of the streams is generated: the findings are about these, never about large models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fairtrial import stats
from fairtrial.errors import InputError, MissingExtraError, UnknownNameError
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
    contrast,
    exact,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import pandas as pd

    from fairtrial.evaluation.language_development.corpus import Corpus
    from fairtrial.evaluation.language_development.devbench import DevBench
    from fairtrial.evaluation.language_development.egostream import Recording

LEXICAL = ("pseudo_word", "word_in_context", "odd_one_out")
GRAMMAR = (
    "determiner_noun_number", "agreement_adjacent", "agreement_attractor", "past_regular", "past_irregular",
    "word_order_phrase", "word_order_clause", "negation", "auxiliary", "wh_inversion", "wh_movement", "pronoun_case",
    "reflexive_number", "anaphor_gender", "preposition",
)  # fmt: skip
CHANCE = 0.25  # of four words
TEST_SEED = 10_000  # of the stream that is asked about: no learner hears it
HELD_OUT = 0.05  # of the utterances: contexts for L1 and L2


class DevelopmentParams(BaseModel):
    """Parameters of the trial ``language-development``."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Input()] = Field(
        "austen",
        description="the training corpus: 'austen' (six novels and generated child-directed speech), 'speech' (only "
        "generated), 'eve' (CHILDES Brown/Eve, with pylangacq 0.19.1 installed), or a .txt or .cha file or a folder",
    )
    unit: Literal["line", "sentence"] = Field("line", description="what an utterance of your files is")
    foreign_text: Annotated[str, Input()] = Field(
        "wikipedia-articles", description="where words unknown to the corpus come from, likewise; empty: leave A3 out"
    )
    model: Annotated[str, Input()] = Field(
        "smollm2-135m", description="a causal model to score too: a sample, a folder or .gguf file; empty: none"
    )
    model_items: int = Field(160, ge=0, description="items that model is asked, spread over the cells; 0 = all")
    utterances: int = Field(3000, ge=100, description="utterances of generated child-directed speech")
    per_cell: int = Field(48, ge=20, description="items wanted in each cell of phenomenon and frequency bin")
    bins: int = Field(6, ge=2, le=12, description="frequency bins from the first", json_schema_extra={"scope": "plan"})
    lm_epochs: float = Field(0.5, gt=0, description="passes over the corpus of the small language model")
    lm_width: int = Field(128, ge=16, multiple_of=16, description="width of the small language model")
    lm_seeds: int = Field(2, ge=2, le=40, description="trainings of it", json_schema_extra={"scope": "plan"})
    env: str = Field("BabyAI-PickupLoc-v0", description="the environment of the streams, of minigrid")
    frames: int = Field(9000, ge=200, description="frames of a stream")
    questions: int = Field(600, ge=50, description="four-way questions about unseen frames")
    epochs: int = Field(12, ge=1, description="passes over the utterances, of both contrastive learners")
    stream_seeds: int = Field(
        3, ge=2, le=40, description="streams and trainings; from 5 on claims generalise over them",
        json_schema_extra={"scope": "plan"},
    )  # fmt: skip
    repeats: int = Field(
        2, ge=2, le=40, description="repetitions of the timed part", json_schema_extra={"scope": "plan"}
    )
    phenomena: tuple[str, ...] = Field((), description="phenomena to ask about; left out, all of them")
    alphas: tuple[float, ...] = Field(
        (1.0, 0.5, 0.25, 0.1, 0.0), description="alignments of the streams", json_schema_extra={"scope": "plan"}
    )


# ----------------------------------------------------------------------------------------------------------------- text


def corpus_of(text: str, params: DevelopmentParams) -> Corpus:
    """Return the corpus that a parameter names."""
    from fairtrial.data.text import austen_novels, wikipedia_articles
    from fairtrial.evaluation.language_development.child_directed import child_directed_speech
    from fairtrial.evaluation.language_development.corpus import Corpus

    if Path(text).exists():
        return Corpus.from_text(text, unit=params.unit)
    speech = child_directed_speech(params.utterances)
    if text == "austen":
        novels = [novel.replace("_", "") for novel in austen_novels().values()]  # _emphasis_
        written = Corpus.from_documents(novels, unit="sentence")
        parts = [written.utterances[start : start + 2000] for start in range(0, len(written.utterances), 2000)]
        return Corpus.from_documents(["\n".join(part) for part in (*parts, speech)])
    if text == "eve":
        return Corpus.from_text(eve_file())
    if text == "speech":
        return Corpus.from_documents(["\n".join(speech)])
    return Corpus.from_documents(wikipedia_articles(), unit="sentence")


def eve_file() -> Path:
    """Return the transcript of Eve inside the installed package pylangacq."""
    import importlib.util

    found = importlib.util.find_spec("pylangacq")
    file = Path(found.origin).parent / "tests" / "eve.cha" if found and found.origin else None
    if file is None or not file.is_file():
        raise MissingExtraError("evaluation", "pylangacq 0.19.1, which holds Eve's transcript,")
    return file


@stage(keep=True)
def benches(stages: Any, params: DevelopmentParams) -> dict[str, Any]:
    """Return the training corpus, its bench, and the matched benches of its own and of foreign words."""
    from fairtrial.evaluation.language_development.devbench import build_devbench
    from fairtrial.evaluation.language_development.lexicon import vocabulary
    from fairtrial.evaluation.language_development.mismatch import matched_benches

    training, held_out = corpus_of(params.text, params).split(HELD_OUT)
    words = vocabulary(training)
    bench = build_devbench(words, tasks=params.phenomena or "all", per_cell=params.per_cell, contexts=held_out)
    for note in bench.notes:
        stages.note(note)
    made: dict[str, Any] = {"training": training, "bench": bench, "grounded": None, "foreign": None}
    made["cells"] = bench.items.groupby(["phenomenon", "bin"]).indices
    if params.foreign_text:
        foreign = vocabulary(corpus_of(params.foreign_text, params))
        made["grounded"], made["foreign"] = matched_benches(words, foreign, per_cell=params.per_cell)
    return made


@stage(save="npz")
def answers(stages: Any, candidate: Candidate, seed: int, params: DevelopmentParams) -> dict[str, Any]:
    """Return how right a scorer is on each item of the three benches, nan where it is not asked."""
    made = stages(benches, params)
    scorer = scorer_of(stages, candidate.label, seed, made["training"], params)
    found = {name: made[name] for name in ("bench", "grounded", "foreign") if made[name] is not None}
    if candidate.label == "model":
        asked = _spread(made["bench"], params.model_items)
        right = np.full(len(made["bench"].items), np.nan)
        right[asked] = _answers(made["bench"].items.iloc[asked], scorer)
        return {"bench": right}
    return {name: _answers(bench.items, scorer) for name, bench in found.items()}


def scorer_of(stages: Any, label: str, seed: int, training: Corpus, params: DevelopmentParams) -> Any:
    """Return the scorer behind a candidate's label."""
    from fairtrial.evaluation.language_development.ngrams import KneserNey, Unigram
    from fairtrial.evaluation.language_development.scorers import CausalScorer
    from fairtrial.evaluation.language_development.small_lm import train_small_lm

    if label == "unigram":
        return Unigram(training)
    if label == "5-gram":
        return KneserNey(training, order=5)
    if label == "model":
        from fairtrial.causal_lm.named import load_named

        stages.note("the corpus that 'model' was trained on is not known to be this one: the mismatched case")
        return CausalScorer(*load_named(params.model))
    epochs = params.lm_epochs if label == "small-lm" else 0.0
    return CausalScorer(*train_small_lm(training.utterances, width=params.lm_width, epochs=epochs, seed=seed))


def _answers(items: pd.DataFrame, scorer: Any) -> Any:
    from fairtrial.evaluation.language_development.evaluation import share_correct

    texts = [text for good, bad in zip(items.good, items.bad, strict=True) for text in (good, *bad)]
    return share_correct(np.asarray(scorer(texts), dtype=float).reshape(len(items), 2))


def _spread(bench: DevBench, wanted: int) -> Any:
    """Return the places of ``wanted`` items, as many of each cell; 0 = all."""
    rank = bench.items.groupby(["phenomenon", "bin"]).cumcount().to_numpy()
    order = np.argsort(rank, kind="stable")
    return np.sort(order[: wanted or len(order)])


TEXT = (
    Candidate("small-lm", "method", uses=("small_lm", "scorers")),
    Candidate("5-gram", "baseline", uses=("ngrams",)),
    Candidate("unigram", "control", uses=("ngrams",)),
    Candidate("untrained", "control", uses=("small_lm", "scorers")),
    Candidate("model", "reference", uses=("scorers",)),
    Candidate("parse", "reference"),
)
_SEEDED = ("small-lm", "untrained")


def right_of(candidate: Candidate, seed: int, params: DevelopmentParams, stages: Any, bench: str = "bench") -> Any:
    """Return how right a candidate is on each item of a bench."""
    if candidate.label == "parse":  # the generator's own parse: it knows which member it made wrong
        return np.ones(len(stages(benches, params)[bench].items))
    return stages(answers, candidate, seed if candidate.label in _SEEDED else 0, params)[bench]


def measure_text(candidate: Candidate, cell: Cell, params: DevelopmentParams, stages: Any) -> dict[str, Any]:
    """Read the answers of one cell."""
    made = stages(benches, params)
    here = made["cells"].get((cell["phenomenon"], cell["bin"]), np.zeros(0, dtype=int))
    right = right_of(candidate, cell["seed"], params, stages)[here]
    here, right = here[np.isfinite(right)], right[np.isfinite(right)]
    if not len(right):
        return {"accuracy": None, "corrected": None, "leak": None}
    leak = abs(right.mean() - 0.5) / (0.5 / np.sqrt(len(right))) if candidate.label == "unigram" else None
    ids = made["bench"].items.id.to_numpy()[here].tolist()
    return {"accuracy": Items(ids, right), "corrected": 2 * right.mean() - 1, "leak": leak}


def measure_growth(candidate: Candidate, cell: Cell, params: DevelopmentParams, stages: Any) -> dict[str, Any]:
    """Return how a task's accuracy rises with frequency: a bin, and by its acquisition curve."""
    from fairtrial.evaluation.language_development.acquisition import fit_acquisition

    items = stages(benches, params)["bench"].items
    right = right_of(candidate, cell["seed"], params, stages)
    here = (items.task == cell["task"]).to_numpy() & np.isfinite(right)
    chosen = items[here].assign(right=right[here])
    if chosen.bin.nunique() < 2:
        return {"rise": None, "threshold": None, "slope": None}
    table = chosen.groupby("word").agg(count=("count", "first"), right=("right", "sum"), n=("right", "size"))
    fit = fit_acquisition(table["count"], table.right, table.n, 0.5, draws=8)
    rise = slope_by_item(chosen.bin.to_numpy(dtype=float), chosen.right.to_numpy())
    return {"rise": Items(chosen.id.tolist(), rise), "threshold": fit.t, "slope": fit.s}


def slope_by_item(x: Any, y: Any) -> Any:
    """Return (n,) numbers whose mean is the least-squares slope of y on x, and which vary as it would over items.

    The slope plus each item's influence on it, n (x - mean x) (residual) / sum (x - mean x)^2: the variance of their
    mean is the heteroscedasticity-consistent one of the slope (White 1980).
    """
    centred = x - x.mean()
    slope = centred @ y / (centred @ centred)
    residual = y - y.mean() - slope * centred
    return slope + len(x) * centred * residual / (centred @ centred)


def measure_mismatch(candidate: Candidate, cell: Cell, params: DevelopmentParams, stages: Any) -> dict[str, Any]:
    """Read the answers to grammatical items of own or of foreign words."""
    items = stages(benches, params)[cell["words"]].items
    return {"accuracy": Items(items.id.tolist(), right_of(candidate, cell["seed"], params, stages, cell["words"]))}


def leaks_nothing(frame: pd.DataFrame) -> bool | str:
    """Whether the unigram model is within two standard errors of chance in every grammatical cell."""
    cells = frame[(frame.candidate == "unigram") & frame.phenomenon.isin(GRAMMAR) & frame.leak.notna()]
    worst = cells.iloc[int(cells.leak.to_numpy(dtype=float).argmax())]
    if worst.leak < 2:
        return True
    return f"{worst.phenomenon}, bin {worst.bin}: {worst.leak:.1f} standard errors from chance"


# -------------------------------------------------------------------------------------------------------------- streams

LEARNERS = (
    Candidate("mil-nce", "method", uses=("learners",)),
    Candidate("infonce", "baseline", uses=("learners",)),
    Candidate("counting", "baseline", uses=("learners",)),
    Candidate("untrained", "control", uses=("learners",)),
    Candidate("shuffled-images", "control", uses=("learners",)),
    Candidate("image-blind", "control"),
)
_ONLY_ALIGNED = ("untrained", "shuffled-images", "image-blind")  # controls are run once, where learning is easiest


@stage()
def stream(alpha: float, mode: str, rate: float, seed: int, params: DevelopmentParams) -> Recording:
    """Return a stream to learn from."""
    from fairtrial.evaluation.language_development.egostream import EgoStream

    return EgoStream(params.env, alpha=alpha, mode=mode, rate=rate, seed=seed).record(params.frames)  # type: ignore[arg-type]


@stage(keep=True)
def exam(params: DevelopmentParams) -> dict[str, Any]:
    """Return an unseen stream, questions (a frame, a thing in view and three that are not) and pairs for binding."""
    from fairtrial.evaluation.language_development.egostream import EgoStream
    from fairtrial.evaluation.language_development.vision import binding_pairs

    unseen = EgoStream(params.env, alpha=1.0, seed=TEST_SEED).record(params.questions * 3)
    rng = generator(TEST_SEED, "questions")
    frames = np.flatnonzero(unseen.visible.any(1) & ((~unseen.visible).sum(1) >= 3))
    chosen = rng.choice(frames, params.questions, replace=len(frames) < params.questions)
    words = [
        [rng.choice(np.flatnonzero(view)), *rng.choice(np.flatnonzero(~view), 3, replace=False)]
        for view in unseen.visible[chosen]
    ]
    images, texts = binding_pairs(unseen.frames)
    sentences = list(dict.fromkeys(text for pair in texts for text in pair))
    return {
        "stream": unseen,
        "frames": chosen,
        "words": np.array(words),
        "images": images.reshape(-1, *images.shape[2:]),
        "sentences": sentences,
        "pairs": np.array([[sentences.index(text) for text in pair] for pair in texts], dtype=int),  # (n, 2)
    }


@stage()
def learner(
    stages: Any, candidate: Candidate, alpha: float, mode: str, rate: float, seed: int, params: DevelopmentParams
) -> Any:
    """Return a learner that has heard a stream."""
    from fairtrial.evaluation.language_development.egostream import symbolic_features
    from fairtrial.evaluation.language_development.learners import MILNCE, Counting, InfoNCE

    heard = stages(stream, alpha, mode, rate, seed, params)
    features = symbolic_features(heard.frames)
    if candidate.label == "shuffled-images":
        features = features[generator(seed, "shuffled images").permutation(len(features))]
    if candidate.label == "counting":
        return Counting(seed=seed).fit(features, heard.times, heard.texts)
    how = {"epochs": 0 if candidate.label == "untrained" else params.epochs, "seed": seed}
    one = MILNCE(**how) if candidate.label == "mil-nce" else InfoNCE(**how)
    return one.fit(features, heard.times, heard.texts)


def similarities(stages: Any, candidate: Candidate, cell: Cell, params: DevelopmentParams) -> Callable[[Any, Any], Any]:
    """Return what scores frames (n, 7, 7, 3) and texts, (n, texts), for a candidate trained as a cell says."""
    from fairtrial.evaluation.language_development.egostream import symbolic_features

    mode = "unrelated" if cell["alpha"] == 1 else cell["mode"]  # with no misaligned speech the modes are one
    where = (cell["alpha"], mode, cell["rate"], cell["seed"], params)
    if candidate.label == "image-blind":  # says what was said most, whatever it sees
        said = stages(stream, *where).texts
        return lambda frames, texts: np.tile([float(sum(text in s for s in said)) for text in texts], (len(frames), 1))
    trained = stages(learner, candidate, *where)
    return lambda frames, texts: trained.score(symbolic_features(frames), texts)


def measure_stream(candidate: Candidate, cell: Cell, params: DevelopmentParams, stages: Any) -> dict[str, Any]:
    """Train on a stream and answer questions about another."""
    from fairtrial.evaluation.language_development.alignment import label_alignment
    from fairtrial.evaluation.language_development.egostream import THINGS
    from fairtrial.evaluation.language_development.evaluation import share_correct
    from fairtrial.evaluation.language_development.vision import binding, retrieval, temporal_grounding

    names = ("accuracy", "corrected", "retrieval", "binding", "grounding", "alignment")
    if candidate.label in _ONLY_ALIGNED and (cell["alpha"] != 1 or cell["mode"] != "unrelated"):
        return dict.fromkeys(names)
    asked = stages(exam, params)
    unseen = asked["stream"]
    score = similarities(stages, candidate, cell, params)
    table = score(unseen.frames, THINGS)  # (N, 18)
    right = share_correct(table[asked["frames"][:, None], asked["words"]])
    found = retrieval(table, unseen.visible)
    at = [THINGS.index(thing) for thing in unseen.referents]
    grounded = temporal_grounding(table[:, at], unseen.visible[:, at], unseen.times.tolist())
    mode = "unrelated" if cell["alpha"] == 1 else cell["mode"]
    heard = stages(stream, cell["alpha"], mode, cell["rate"], cell["seed"], params)
    bound = None
    if len(asked["pairs"]):
        each = score(asked["images"], asked["sentences"]).reshape(len(asked["pairs"]), 2, -1)
        bound = binding(np.take_along_axis(each, asked["pairs"][:, None], axis=2)).group
    return {
        "accuracy": Items(list(range(len(right))), right),
        "corrected": (right.mean() - CHANCE) / (1 - CHANCE),
        "retrieval": found.recall - found.chance,
        "binding": bound,
        "grounding": grounded.hit - grounded.base,
        "alignment": label_alignment(heard.visible[heard.times], heard.referents).value,
    }


def measure_cost(candidate: Candidate, cell: Cell, params: DevelopmentParams, stages: Any) -> dict[str, Any]:
    """Time one training on a stream of alpha .5."""
    import time

    from fairtrial.evaluation.language_development.egostream import symbolic_features
    from fairtrial.evaluation.language_development.learners import MILNCE, Counting, InfoNCE

    heard = stages(stream, 0.5, "unrelated", 0.35, cell["repeat"], params)
    features = symbolic_features(heard.frames)
    how = {"epochs": params.epochs}
    made: dict[str, Any] = {"infonce": InfoNCE(**how), "mil-nce": MILNCE(**how), "counting": Counting()}
    one = made[candidate.label]
    began = time.perf_counter()
    one.fit(features, heard.times, heard.texts)
    return {"seconds": time.perf_counter() - began}


def chance_without_alignment(frame: pd.DataFrame) -> bool | str:
    """Whether the 95 % interval over trainings of each learner's accuracy at alpha = 0 contains chance."""
    off = []
    for label in ("infonce", "mil-nce", "counting"):
        rows = frame[(frame.candidate == label) & (frame.alpha == 0) & (frame["mode"] == "unrelated")]
        one = stats.mean_interval(rows.accuracy.to_numpy(dtype=float))
        if not one.low <= CHANCE <= one.high:
            off.append(f"{label}: [{one.low:.3f}, {one.high:.3f}]")
    return "; ".join(off) or True


# ---------------------------------------------------------------------------------------------------------------- parts


def parts(params: DevelopmentParams) -> tuple[Part, ...]:
    """Return the parts: text, growth, mismatch; streams, speech_rate, cost."""
    text = tuple(c for c in TEXT if c.label != "model" or params.model)
    phenomena = tuple(p for p in (*LEXICAL, *GRAMMAR) if p in params.phenomena or not params.phenomena)
    grammar = {"phenomenon": tuple(p for p in phenomena if p in GRAMMAR)}
    own = tuple(c for c in TEXT if c.label in ("small-lm", "5-gram", "untrained"))
    over: Literal["replicate", "item"] = "replicate" if params.lm_seeds >= 5 else "item"
    these = "" if over == "replicate" else ", for these trained models"
    seeds = Factor("seed", range(params.lm_seeds), kind="replicate", most=max(12, params.lm_seeds))
    bins = Factor("bin", range(params.bins))
    accuracy = Metric("accuracy", "of items")
    found = [
        Part(
            name="text",
            candidates=text,
            metrics=(
                accuracy,
                Metric("corrected", "above guessing, of 1"),
                Metric("leak", "standard errors from chance", higher_is_better=False),
            ),
            factors=(Factor("phenomenon", phenomena), bins, seeds),
            variance="crossed",
            claims=(
                exact("A1", "the unigram model is within 2 standard errors of chance in every grammatical cell",
                      leaks_nothing),
                report("R1", "small-lm on grammar", level("small-lm", "accuracy", grammar), over),
                report("R2", "5-gram on grammar", level("5-gram", "accuracy", grammar), "item"),
                *([report("R3", "model on grammar, whose own training corpus is unknown",
                          level("model", "accuracy", grammar), "item")] if params.model else []),
            ),
            measure=measure_text,
            group=("seed", "candidate"),
        ),
        Part(
            name="growth",
            candidates=own,
            metrics=(
                Metric("rise", "accuracy a bin"),
                Metric("threshold", "occurrences at half performance", higher_is_better=False),
                Metric("slope", "logits a log occurrence"),
            ),
            factors=(Factor("task", ("L1", "L2", "grammar")), seeds),
            variance="crossed",
            claims=(
                all_of(
                    "A2",
                    f"small-lm's accuracy rises with frequency bin in L1 and in L2{these}",
                    *(Claim(f"A2-{task}", f"it rises in {task}{these}", level("small-lm", "rise", {"task": task}),
                            above=0, over=over) for task in ("L1", "L2")),
                ),
                report("R4", "occurrences at half performance of small-lm in L2",
                       level("small-lm", "threshold", {"task": "L2"})),
            ),
            measure=measure_growth,
            group=("seed", "candidate"),
        ),
    ]  # fmt: skip
    if params.foreign_text:
        found.append(
            Part(
                name="mismatch",
                candidates=own,
                metrics=(accuracy,),
                factors=(Factor("words", ("grounded", "foreign")), seeds),
                variance="crossed",
                claims=(
                    Claim(
                        "A3",
                        f"small-lm is more accurate on items of its own words than on the same of foreign words{these}",
                        contrast(
                            {
                                ("small-lm", "accuracy", (("words", "grounded"),)): 1.0,
                                ("small-lm", "accuracy", (("words", "foreign"),)): -1.0,
                            }
                        ),
                        above=0,
                        over=over,
                    ),
                ),
                measure=measure_mismatch,
                group=("seed", "candidate"),
            )
        )
    return (*found, *stream_parts(params))


def stream_parts(params: DevelopmentParams) -> tuple[Part, ...]:
    """Return the parts about streams."""
    over: Literal["replicate", "item"] = "replicate" if params.stream_seeds >= 5 else "item"
    these = "" if over == "replicate" else ", for these trained models"
    seeds = Factor("seed", range(params.stream_seeds), kind="replicate", most=max(12, params.stream_seeds))
    metrics = (
        Metric("accuracy", "of four-way questions"),
        Metric("corrected", "above guessing, of 1"),
        Metric("retrieval", "R@1 above chance"),
        Metric("binding", "Winoground group score"),
        Metric("grounding", "hits above base rate"),
        Metric("alignment", "of the stream"),
    )

    def at(label: str, **where: Any) -> tuple[str, str, Any]:
        return label, "accuracy", tuple(where.items())

    lagged = {"alpha": tuple(alpha for alpha in params.alphas if alpha < 1), "mode": "lag"}
    streams = Part(
        name="streams",
        candidates=LEARNERS,
        metrics=metrics,
        factors=(
            Factor("alpha", params.alphas),
            Factor("mode", ("unrelated", "lag")),
            Factor("rate", (0.35,)),
            seeds,
        ),
        variance="crossed",
        claims=(
            Claim(
                "B1",
                f"infonce is more accurate at alpha = 1 than at .1, unrelated, by more than .05{these}",
                contrast(
                    {
                        at("infonce", alpha=1.0, mode="unrelated"): 1.0,
                        at("infonce", alpha=0.1, mode="unrelated"): -1.0,
                    }
                ),
                above=0.05,
                over=over,
            ),
            Claim(
                "B2",
                f"mil-nce loses less accuracy than infonce from alpha = 1 to streams where speech lags{these}",
                contrast(
                    {
                        at("infonce", alpha=1.0): 1.0,
                        at("infonce", **lagged): -1.0,
                        at("mil-nce", alpha=1.0): -1.0,
                        at("mil-nce", **lagged): 1.0,
                    }
                ),
                above=0,
                over=over,
            ),
            exact("B3", "at alpha = 0, unrelated, the interval over trainings of each learner contains chance",
                  chance_without_alignment),
            report("R5", "mil-nce above infonce where all speech lags",
                   contrast({at("mil-nce", alpha=0.0, mode="lag"): 1.0, at("infonce", alpha=0.0, mode="lag"): -1.0}),
                   over),
        ),
        measure=measure_stream,
        group=("seed", "alpha", "mode"),
    )  # fmt: skip
    rates = Part(
        name="speech_rate",
        candidates=tuple(c for c in LEARNERS if c.label in ("infonce", "image-blind")),
        metrics=metrics,
        factors=(Factor("alpha", (1.0, 0.1)), Factor("mode", ("unrelated",)), Factor("rate", (0.35, 0.05)), seeds),
        variance="crossed",
        claims=tuple(
            report(
                f"R{6 + i}",
                f"what infonce loses from alpha = 1 to .1 with speech at {rate:g} of the frames",
                contrast({at("infonce", alpha=1.0, rate=rate): 1.0, at("infonce", alpha=0.1, rate=rate): -1.0}),
                over,
            )
            for i, rate in enumerate((0.35, 0.05))
        ),
        measure=measure_stream,
        group=("seed", "alpha", "rate"),
    )
    cost = Part(
        name="cost",
        candidates=LEARNERS[:3],
        metrics=(Metric("seconds", "s", higher_is_better=False, timed=True),),
        factors=(Factor("repeat", range(params.repeats), kind="replicate"),),
        variance="independent",
        claims=(report("R8", "seconds that infonce trains on a stream", level("infonce", "seconds")),),
        measure=measure_cost,
    )
    return streams, rates, cost


_TEXTS = ("austen", "speech", "eve", "wikipedia-articles")


def check(params: DevelopmentParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.causal_lm.named import check_named
    from fairtrial.data.samples import sample_path

    try:
        import lemminflect  # noqa: F401
        import minigrid  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("evaluation", error.name) from error
    from fairtrial.evaluation.language_development.egostream import EgoStream, Narrator

    EgoStream(params.env).close()  # refuses what no worker could make
    for alpha in params.alphas:
        Narrator(alpha=alpha)
    known = (*LEXICAL, *GRAMMAR)
    for name in params.phenomena:
        if name not in known:
            raise UnknownNameError("phenomenon", name, known)
    for name in ("text", "foreign_text"):
        value = getattr(params, name)
        if not value or Path(value).exists():
            continue
        if value not in _TEXTS:
            raise InputError(f"{name}={value}: no such file or folder, and none of {', '.join(_TEXTS)}")
        if value == "eve":
            eve_file()
        elif value != "speech":
            sample_path(value)
    if params.model:
        check_named(params.model)


trial = Trial(
    name="language_development",
    params=DevelopmentParams,
    parts=parts,
    presets={
        "smoke": {
            "text": "speech", "foreign_text": "", "model": "", "utterances": 300, "per_cell": 20, "bins": 2,
            "phenomena": ["pseudo_word", "agreement_adjacent"], "alphas": [1.0, 0.0],
            "lm_epochs": 0.05, "lm_width": 16, "frames": 200, "questions": 50, "epochs": 1, "stream_seeds": 2,
        },
        "full": {"per_cell": 194, "lm_epochs": 2, "lm_seeds": 5, "stream_seeds": 12, "model_items": 2000, "repeats": 5},
    },
    check=check,
)  # fmt: skip
