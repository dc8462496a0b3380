"""Whether greedy information chooses better models than accuracy does, and whether the copula knows where they end.

The answers of every model to every item are made once. A cell splits the items, chooses k models on one part, fuses
their answers by the same softmax regression whoever chose them, and reads the accuracy on the other part. Measured and
simulated pools are parts of their own: splits of one data set share items, simulated pools share nothing.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.seeds import generator
from fairtrial.trial.declare import (
    AnyClaim,
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
    exact,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import pandas as pd

    from fairtrial.evaluation.ensemble_selection.pool import Task

MEASURED = ("polarity", "topics", "quiz")
SIMULATED = ("copula-2", "copula-4")
JUDGED = ("polarity", "topics", "answers", *SIMULATED)  # "quiz" is too hard for its pool: shown, no claim
SIZES = (1, 2, 3, 5)
EXAMPLES = 80  # for demonstrations and few-shot classifiers; no item is among them


class EnsembleParams(BaseModel):
    """Parameters of the trial ``ensemble-selection``."""

    model_config = ConfigDict(extra="forbid")

    data: str | list[str] = Field(
        "all",
        description="pools to choose from: all, real, copula, or names out of "
        f"{', '.join((*MEASURED, *SIMULATED))}; with answers=, that table alone",
        json_schema_extra={"scope": "plan"},
    )
    answers: Annotated[str, Input()] = Field(
        "", description="a .csv, .parquet or .jsonl table of your models' answers, one row an item, with the labels"
    )
    label: str = Field("label", description="the column of answers= that holds the labels")
    model: Annotated[str, Input()] = Field(
        "smollm2-135m", description="the language model of the pool: a sample, a save_pretrained folder or a .gguf file"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the language model")
    device: str = Field("cpu", description="a torch device")
    items: int = Field(600, ge=40, description="items of each measured pool, where it has as many")
    train: int = Field(300, ge=40, description="items that models are chosen and fused on; at most half of a table")
    test: int = Field(2000, ge=100, description="items that simulated pools are tested on")
    factors: Literal[1, 2] = Field(2, description="factors of the copula: language model and other kinds err apart")
    splits: int = Field(
        20, ge=2, le=200, description="splits of the items, and draws of simulated pools",
        json_schema_extra={"scope": "plan"},
    )  # fmt: skip
    repeats: int = Field(
        3, ge=2, le=40, description="repetitions of the timed part", json_schema_extra={"scope": "plan"}
    )

    @field_validator("data")
    @classmethod
    def _known(cls, value: str | list[str]) -> str | list[str]:
        for name in [value] if isinstance(value, str) else value:
            if name not in (*MEASURED, *SIMULATED, "all", "real", "copula"):
                raise UnknownNameError("pool", name, (*MEASURED, *SIMULATED, "all", "real", "copula"))
        return value

    def pools(self) -> list[str]:
        """Return the names of the pools, measured ones first."""
        if self.answers:
            return ["answers"]
        sets = {"all": (*MEASURED, *SIMULATED), "real": MEASURED, "copula": SIMULATED}
        names = [self.data] if isinstance(self.data, str) else self.data
        wanted = {pool for name in names for pool in sets.get(name, (name,))}
        return [pool for pool in (*MEASURED, *SIMULATED) if pool in wanted]


CANDIDATES = (
    Candidate("greedy-mi", "method", uses=("selector",)),
    Candidate("greedy-mi-stopping", "method", uses=("selector",)),
    Candidate("top-accuracy", "baseline", uses=("baselines",)),
    Candidate("forward", "baseline", uses=("baselines",)),
    Candidate("mrmr", "baseline", uses=("baselines",)),
    Candidate("double-fault", "baseline", uses=("baselines",)),
    Candidate("medoids", "baseline", uses=("baselines",)),
    Candidate("best-subset", "reference", uses=("baselines",)),
    Candidate("all", "reference"),
    Candidate("random", "control", uses=("baselines",)),
    Candidate("shuffled-labels", "control", uses=("selector",)),
)
FLOORS = (
    Candidate("copula", "method", uses=("copula",)),
    Candidate("errors-shuffled", "control", uses=("copula",)),
)
TIMED = ("greedy-mi", "top-accuracy", "forward", "random")


# ------------------------------------------------------------------------------------------------------ measured pools


def task_of(pool: str, items: int) -> Task:
    """Return the items of a measured pool, the same every time."""
    return {"polarity": _polarity, "topics": _topics, "quiz": _quiz}[pool](items)


def _polarity(items: int) -> Task:
    """Sentences of film reviews and tweets that raters found positive or negative, equally many of each."""
    from fairtrial.data.vader import vader_lexicon, vader_sentences
    from fairtrial.evaluation.ensemble_selection.pool import Task, last_word, lexicon_sum

    groups = []
    for domain in ("movies", "tweets"):
        frame = vader_sentences(domain)
        for label, chosen in (("positive", frame["mean"] > 0.5), ("negative", frame["mean"] < -0.5)):
            groups.append([(text, label) for text in frame.text[chosen]])
    lexicon = vader_lexicon()
    return Task(
        *_split(groups, items, "polarity"),
        templates=("Review: {text}\nSentiment:", "{text}\nPositive or negative? It is"),
        rules={"rule, sum of valences": lexicon_sum(lexicon), "rule, last word": last_word(lexicon)},
    )


def _topics(items: int) -> Task:
    """WordNet's definitions of persons, animals, artifacts and locations, equally many of each."""
    from fairtrial.data.wordnet import wordnet_glosses
    from fairtrial.evaluation.ensemble_selection.pool import Task, keywords

    frame = wordnet_glosses("noun")
    frame = frame[frame.gloss.str.len() <= 120].drop_duplicates("gloss")
    classes = {"person": "person", "animal": "animal", "artifact": "object", "location": "place"}
    groups = [[(text, label) for text in frame.gloss[frame.category == f"noun.{c}"]] for c, label in classes.items()]
    names = {"person": r"\bwho\b", "animal": r"\b(genus|family|species)\b", "place": r"\bin [A-Z]"}
    heads = {
        "person": r"^(an? )?(\w+ )?(\w*man|person|someone|one|worker|member|\w*ist|\w*or)\b",
        "animal": r"\b(bird|fish|mammal|insect|dog|bat|snake|lizard|shell|wings?|tail)\b",
        "place": r"\b(city|town|river|state|capital|country|region|area|district|land|island|province)\b",
    }
    return Task(
        *_split(groups, items, "topics"),
        templates=("Definition: {text}\nPerson, animal, object or place:", "{text} is the definition of a kind of"),
        rules={"rule, function words": keywords(names, "object"), "rule, head words": keywords(heads, "object")},
    )


def _quiz(items: int) -> Task:
    """Questions of many subjects with four choices, those of up to 400 characters."""
    from fairtrial.data.quiz import mmlu_development
    from fairtrial.evaluation.ensemble_selection.pool import Task, longest_choice, shared_words

    frame = mmlu_development()
    choices = frame[["A", "B", "C", "D"]].apply(lambda column: column.str.replace("\n", " "))
    lines = sum((f"\n{letter}. " + choices[letter] for letter in "ABCD"), start=frame.question)
    short = lines.str.len() <= 400
    groups = [
        lines[short & (frame.answer == letter)].map(lambda text, x=letter: (text, x)).tolist() for letter in "ABCD"
    ]
    return Task(
        *_split(groups, items, "quiz", examples=8),
        templates=("Question: {text}\nAnswer:", "{text}\nThe letter of the right choice is"),
        rules={"rule, longest choice": longest_choice, "rule, shared words": shared_words},
    )


def _split(
    groups: list[list[tuple[str, str]]], items: int, name: str, examples: int = EXAMPLES
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Return texts, labels and examples, drawn from the groups in turn."""
    rng = generator(0, name)
    groups = [[group[i] for i in rng.permutation(len(group))] for group in groups]
    each = examples // len(groups)
    shown = [group[i] for i in range(each) for group in groups]
    rest = [pair for group in groups for pair in group[each : each + items // len(groups)]]
    return [text for text, _ in rest], [label for _, label in rest], shown


@stage(save="json")
def language_model_answers(stages: Any, pool: str, params: EnsembleParams) -> dict[str, list[str]]:
    """Return the answers of the language model under eight prompts."""
    from fairtrial.evaluation.ensemble_selection.pool import prompted_answers

    model, tokenizer = stages(language_model, params)
    return prompted_answers(model, tokenizer, task_of(pool, params.items))


@stage(keep=True)
def language_model(params: EnsembleParams) -> tuple[Any, Any]:
    """Return the language model and its tokenizer."""
    import torch

    from fairtrial.causal_lm.loading import load
    from fairtrial.data.samples import cache_folder, list_samples, sample_path

    named = params.model in list_samples() and not Path(params.model).exists()
    path = sample_path(params.model) if named else Path(params.model)
    return load(path, device=params.device, dtype=getattr(torch, params.dtype), cache=cache_folder() / "models")


@stage(save="json")
def other_answers(pool: str, params: EnsembleParams) -> dict[str, list[str]]:
    """Return the answers of few-shot classifiers and rules."""
    from fairtrial.data.samples import sample_path
    from fairtrial.evaluation.ensemble_selection.pool import classical_answers
    from fairtrial.sentences import SentenceEncoder

    return classical_answers(task_of(pool, params.items), SentenceEncoder(sample_path("minilm"), device=params.device))


@stage(keep=True)
def answers_of(stages: Any, pool: str, params: EnsembleParams) -> tuple[pd.DataFrame, Any]:
    """Return the table of answers of a measured pool, and the labels."""
    import numpy as np
    import pandas as pd

    from fairtrial.evaluation.ensemble_selection.answers import read_answers

    if pool == "answers":
        return read_answers(params.answers, params.label)
    asked = stages(language_model_answers, pool, params)
    frame = pd.DataFrame({**asked, **stages(other_answers, pool, params)})
    labels = np.array(task_of(pool, params.items).labels)
    right = frame.eq(labels, axis=0).mean()
    stages.note(f"{pool}: {len(frame)} items, {frame.shape[1]} models right on {right.min():.0%} to {right.max():.0%}")
    return frame, labels


@stage()
def split_of(stages: Any, pool: str, split: int, params: EnsembleParams) -> dict[str, Any]:
    """Return answers and labels of a split: ``codes`` (n, M), ``y`` (n,), ``train`` and ``test`` rows, ``classes``."""
    import numpy as np

    from fairtrial.evaluation.ensemble_selection.answers import classes_of, encode
    from fairtrial.evaluation.ensemble_selection.simulation import simulate

    rng = generator(split, "split", pool)
    if pool in SIMULATED:
        classes = int(pool[-1])
        codes, y = simulate(rng, params.train + params.test, classes)
        order, train = np.arange(len(y)), params.train
    else:
        frame, labels = stages(answers_of, pool, params)
        names, y = classes_of(labels)
        codes, classes = encode(frame, names, abstain=True).codes, len(names)
        order, train = rng.permutation(len(y)), min(params.train, len(y) // 2)
    return {"codes": codes, "y": y, "classes": classes, "train": order[:train], "test": order[train:]}


# ------------------------------------------------------------------------------------------------------------ choosing


def choose(label: str, codes: Any, y: Any, k: int, seed: int) -> list[int] | None:
    """Return the models a candidate chooses from the training answers, or None where it does not apply."""
    import numpy as np

    from fairtrial.evaluation.ensemble_selection import baselines
    from fairtrial.evaluation.ensemble_selection.answers import Answers
    from fairtrial.evaluation.ensemble_selection.information import start

    models = codes.shape[1]
    k = min(k, models)
    match label:
        case "greedy-mi":
            return select(codes, y, k, -math.inf).selected_
        case "all":
            return list(range(models))
        case "random":
            return baselines.random_models(codes, y, k, seed)
        case "best-subset":
            if models > 12 or k > 3:
                return None
            classes = int(y.max()) + 1
            answers = Answers(list(range(models)), np.arange(classes), codes)
            return baselines.best_subset(start("variational", answers, y, classes, 0), models, k)
    way = {
        "top-accuracy": baselines.top_accuracy,
        "forward": baselines.forward_selection,
        "mrmr": baselines.mrmr,
        "double-fault": baselines.double_fault,
        "medoids": baselines.cluster_medoids,
    }[label]
    return way(codes, y, k)


def select(codes: Any, y: Any, k: int, min_gain: float) -> Any:
    """Return the fitted selector; a code that is no class is no answer."""
    from fairtrial.evaluation.ensemble_selection.selector import MutualInformationSelector

    return MutualInformationSelector(budget=k, min_gain=min_gain, abstain=True).fit(codes, y)


@stage()
def nested(stages: Any, candidate: Candidate, pool: str, split: int, params: EnsembleParams) -> dict[str, Any]:
    """Return what a candidate whose choices are prefixes of each other chooses, and what a selector says of it."""
    of = stages(split_of, pool, split, params)
    codes, y = of["codes"][of["train"]], of["y"][of["train"]]
    if candidate.label in SELECTORS:
        if candidate.label == "shuffled-labels":
            y = generator(split, "shuffled").permutation(y)
        fitted = select(codes, y, min(max(SIZES), codes.shape[1]), 0.0 if candidate.label != "greedy-mi" else -math.inf)
        gains = fitted.gains_
        return {
            "order": fitted.selected_,
            "bits": gains.information.tolist(),
            "promised": gains.accuracy.tolist(),
        }
    return {"order": choose(candidate.label, codes, y, max(SIZES), split)}


SELECTORS = ("greedy-mi", "greedy-mi-stopping", "shuffled-labels")
NESTED = (*SELECTORS, "top-accuracy", "forward", "mrmr", "double-fault", "random")


def measure_selection(candidate: Candidate, cell: Cell, params: EnsembleParams, stages: Any) -> dict[str, Any]:
    """Choose k models, fuse their answers and read the test items."""
    import numpy as np

    from fairtrial.evaluation.ensemble_selection.fusion import MajorityVote, SoftmaxFusion

    pool, split, k = cell["data"], cell["split"], cell["k"]
    of = stages(split_of, pool, split, params)
    train, test, y = of["train"], of["test"], of["y"]
    said: dict[str, Any] = {}
    if candidate.label in NESTED:
        said = stages(nested, candidate, pool, split, params)
        chosen = said["order"][:k]
    else:
        chosen = choose(candidate.label, of["codes"][train], y[train], k, split)
    names = ("accuracy", "majority_accuracy", "log_loss", "queries", "bits", "surprise")
    if chosen is None:
        return dict.fromkeys(names)
    answers = of["codes"][:, chosen]
    probability = SoftmaxFusion(abstain=True).fit(answers[train], y[train]).predict_proba(answers[test])
    majority = MajorityVote(abstain=True).fit(answers[train], y[train]).predict(answers[test])
    right = (probability.argmax(1) == y[test]).astype(float)
    count = len(chosen)
    bits = said["bits"][count - 1] if said.get("bits") and count else 0.0
    return {
        "accuracy": Items(test.tolist(), right, train.tolist()) if pool not in SIMULATED else float(right.mean()),
        "majority_accuracy": float((majority == y[test]).mean()),
        "log_loss": float(-np.log(np.maximum(probability[np.arange(len(test)), y[test]], 1e-12)).mean()),
        "queries": float(count),
        "bits": bits if "bits" in said else None,
        "surprise": float(right.mean() - said["promised"][count - 1]) if said.get("promised") and count else None,
    }


def measure_floor(candidate: Candidate, cell: Cell, params: EnsembleParams, stages: Any) -> dict[str, Any]:
    """Fit the copula on the training errors and compare what it says with the test errors of all models."""
    import numpy as np

    from fairtrial.evaluation.ensemble_selection.copula import ErrorCopula
    from fairtrial.evaluation.ensemble_selection.fusion import SoftmaxFusion

    pool, split = cell["data"], cell["split"]
    of = stages(split_of, pool, split, params)
    codes, y, train, test = of["codes"], of["y"], of["train"], of["test"]
    errors = codes[train] != y[train, None]
    if candidate.role == "control":  # the same models, their errors on items drawn anew within each class
        rng = generator(split, "errors", pool)
        for label in range(of["classes"]):
            rows = y[train] == label
            errors[rows] = rng.permuted(errors[rows], axis=0)
    copula = ErrorCopula().fit(errors, params.factors, answers=codes[train], y=y[train])
    floor = copula.floor_interval()
    votes = np.stack([(codes[test] == label).sum(1) for label in range(of["classes"])], axis=1)
    best = votes == votes.max(1, keepdims=True)
    wrong = 1 - best[np.arange(len(test)), y[test]] / best.sum(1)  # ties by a coin, as predicted
    fused = SoftmaxFusion(abstain=True).fit(codes[train], y[train]).predict(codes[test])
    error = min(float((fused != y[test]).mean()), float(wrong.mean()))
    gap = copula.majority_error() - wrong
    return {
        "majority_gap": Items(test.tolist(), gap, train.tolist()) if pool not in SIMULATED else float(gap.mean()),
        "covered": float(floor.low <= error),
        "floor": copula.floor(),
        "error_of_all": error,
        "fits": float(copula.goodness_of_fit().trusted),
    }


def measure_cost(candidate: Candidate, cell: Cell, params: EnsembleParams, stages: Any) -> dict[str, Any]:
    """Time one choice of three from twelve simulated models."""
    import time

    from fairtrial.evaluation.ensemble_selection.simulation import simulate

    codes, y = simulate(generator(cell["repeat"], "cost"), params.train, 4)
    choose(candidate.label, codes[:60], y[:60], 1, 0)  # what the first call of a process costs is nobody's
    began = time.perf_counter()
    choose(candidate.label, codes, y, 3, 0)
    return {"seconds": time.perf_counter() - began}


# --------------------------------------------------------------------------------------------------------------- parts


def parts(params: EnsembleParams) -> tuple[Part, ...]:
    """Return selection and floor, of measured and of simulated pools, and cost."""
    measured = [pool for pool in params.pools() if pool not in SIMULATED]
    simulated = [pool for pool in params.pools() if pool in SIMULATED]
    found: list[Part] = []
    for pools, suffix in ((measured, ""), (simulated, "-copula")):
        if pools:
            found += [_selection(params, pools, suffix), _floor(params, pools, suffix)]
    cost = Part(
        name="cost",
        candidates=tuple(c for c in CANDIDATES if c.label in TIMED),
        metrics=(Metric("seconds", "s", higher_is_better=False, timed=True),),
        factors=(Factor("repeat", range(params.repeats), kind="replicate"),),
        variance="independent",
        claims=(
            report("R5", "seconds to choose 3 of 12 models by greedy information", level("greedy-mi", "seconds")),
            report("R6", "seconds to choose them by forward selection", level("forward", "seconds")),
        ),
        measure=measure_cost,
    )  # fmt: skip
    return (*found, cost)


def _selection(params: EnsembleParams, pools: list[str], suffix: str) -> Part:
    simulated = bool(suffix)
    what = "simulated pools" if simulated else "measured pools"
    judged = [pool for pool in pools if pool in JUDGED]
    margin = 0.01 if simulated else 0.0

    def at(pool: str, *sizes: int) -> dict[str, Any]:
        return {"data": pool, "k": sizes}

    def better(id: str, text: str, other: str, above: float, wheres: list[dict[str, Any]]) -> AnyClaim:
        claims = [
            Claim(
                f"{id}.{number}", f"{where['data']}, k = {' and '.join(map(str, where['k']))}",
                difference("greedy-mi", other, "accuracy", where), above=above,
            )
            for number, where in enumerate(wheres, start=1)
        ]  # fmt: skip
        return all_of(id, f"{text}, {what}", *claims)

    each = [at(pool, k) for pool in judged for k in (3, 5)]
    three, both = [at(pool, 3) for pool in judged], [at(pool, 3, 5) for pool in judged]
    by = f" by more than {margin:g}" if margin else ""
    claims: list[AnyClaim] = [
        better(f"C1{suffix}", f"with 3 and 5 queries greedy information fuses more accurately than the most accurate "
               f"models{by}", "top-accuracy", margin, each),
        better(f"C2{suffix}", "with 3 queries it fuses more accurately than a random subset", "random", 0.0, three),
        better(f"C3{suffix}", "with 3 and 5 queries it is at most .005 less accurate than forward selection", "forward",
               -0.005, both),
    ] if judged else []  # fmt: skip
    for pool in pools:
        claims += [
            report(f"R1-{pool}", f"bits that shuffled labels promise, {pool}",
                   level("shuffled-labels", "bits", at(pool, 5))),
            report(f"R2-{pool}", f"queries of 5 before no further model helps, {pool}",
                   level("greedy-mi-stopping", "queries", at(pool, 5))),
            report(f"R3-{pool}", f"accuracy above what the selector promised at 5, {pool}",
                   level("greedy-mi", "surprise", at(pool, 5))),
        ]  # fmt: skip
    return Part(
        name=f"selection{suffix}",
        candidates=CANDIDATES,
        metrics=(
            Metric("accuracy", "of test items"),
            Metric("majority_accuracy", "of test items"),
            Metric("log_loss", "nats", higher_is_better=False),
            Metric("queries", "an item", higher_is_better=False),
            Metric("bits", "estimated"),
            Metric("surprise", "accuracy"),
        ),
        factors=(
            Factor("split", range(params.splits), kind="replicate", most=max(200, params.splits)),
            Factor("data", pools),
            Factor("k", SIZES),
        ),
        variance="independent" if simulated else "design",
        claims=tuple(claims),
        measure=measure_selection,
        group=("split", "data"),
    )


def _floor(params: EnsembleParams, pools: list[str], suffix: str) -> Part:
    judged = [pool for pool in pools if pool in JUDGED]
    what = "simulated pools" if suffix else "measured pools"

    def mostly_covered(frame: pd.DataFrame) -> bool | str:
        cells = frame[(frame.candidate == "copula") & frame.data.isin(judged)]
        share = float(cells.covered.mean())
        return share >= 0.9 or f"covered in {share:.0%} of {len(cells)} cells"

    gaps: list[Claim] = []
    for pool in judged:
        gap = level("copula", "majority_gap", {"data": pool})
        gaps += [
            Claim(f"C5{suffix}.{len(gaps) + 1}", f"{pool}: predicted less than .02 too high", gap, below=0.02),
            Claim(f"C5{suffix}.{len(gaps) + 2}", f"{pool}: predicted less than .02 too low", gap, above=-0.02),
        ]
    claims: list[AnyClaim] = []
    if judged:
        claims = [
            exact(f"C4{suffix}", "the lower end of the fitted floor's 95% interval is at most the error of all models "
                  f"together in at least 90% of cells, {what}", mostly_covered),
            all_of(f"C5{suffix}", f"the copula's majority error is within .02 of the observed, {what}", *gaps),
        ]  # fmt: skip
    claims += [
        report(f"R4-{pool}", f"the fitted floor, {pool}", level("copula", "floor", {"data": pool})) for pool in pools
    ]
    return Part(
        name=f"floor{suffix}",
        candidates=FLOORS,
        metrics=(
            Metric("majority_gap", "error", higher_is_better=False),
            Metric("covered", "share of cells"),
            Metric("floor", "error"),
            Metric("error_of_all", "error", higher_is_better=False),
            Metric("fits", "share of cells"),
        ),
        factors=(
            Factor("split", range(params.splits), kind="replicate", most=max(200, params.splits)),
            Factor("data", pools),
        ),
        variance="independent" if suffix else "design",
        claims=tuple(claims),
        measure=measure_floor,
        group=("split", "data"),
    )


def check(params: EnsembleParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import find_sample, sample_path

    if params.answers:
        from fairtrial.evaluation.ensemble_selection.answers import classes_of, encode, read_answers
        from fairtrial.evaluation.ensemble_selection.information import check_sizes

        frame, labels = read_answers(params.answers, params.label)
        names, y = classes_of(labels)
        encode(frame, names, abstain=True)
        check_sizes(min(params.train, len(y) // 2), y[: min(params.train, len(y) // 2)], len(names))
        if frame.shape[1] < 2:
            raise InputError(f"answers={params.answers}: it has {frame.shape[1]} models: give two or more")
        return
    pools = params.pools()
    needed = {"polarity": "vader", "topics": "wordnet", "quiz": "mmlu-dev"}
    for name in (sample for pool, sample in needed.items() if pool in pools):
        sample_path(name)
    if set(pools) & set(MEASURED):
        sample_path("minilm")
        from fairtrial.causal_lm.loading import check_device, check_loadable

        if Path(params.model).exists():
            check_loadable(params.model)
        elif "/" in params.model or "." in Path(params.model).name:
            raise InputError(f"model={params.model}: no such file or folder")
        else:
            sample_path(find_sample(params.model).name)
        check_device(params.device)


trial = Trial(
    name="ensemble-selection",
    params=EnsembleParams,
    parts=parts,
    presets={
        "smoke": {"data": "copula-2", "splits": 2, "train": 60, "test": 200, "factors": 1, "repeats": 2},
        "full": {"splits": 60, "repeats": 10},
    },
    check=check,
)
