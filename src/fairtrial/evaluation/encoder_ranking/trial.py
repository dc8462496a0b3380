"""Whether a label-free score picks a good encoder across architectures, and whether it beats choosing at random.

A cell is a task (a data set and a way of grouping its classes), a sample of its unlabelled items and a reference
encoder. Every candidate chooses an encoder from the same pool; its regret is what the best one's linear probe has over
the chosen one's, on items that nobody saw. Scores see the items of a sample without labels; what is labelled are the
first of them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.errors import InputError, UnknownNameError
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

    from fairtrial.evaluation.encoder_ranking.pool import Encoder
    from fairtrial.evaluation.encoder_ranking.ranking import Ranking

SETS = {"images": ("fashion", "digits"), "text": ("wordnet", "vader"), "tiny": ("tiny-a", "tiny-b")}
REFERENCES = {
    "images": ("lite2/penultimate", "pixels"), "text": ("minilm/6", "tfidf/256"), "tiny": ("pixels", "hog/2"),
}  # fmt: skip
CLASSES = {"fashion": 10, "digits": 10, "wordnet": 26, "vader": 3, "tiny-a": 6, "tiny-b": 6}
ITEMS = {"fashion": 2400, "digits": 1797, "wordnet": 2000, "vader": 2000, "tiny-a": 240, "tiny-b": 240}
GROUPS = (5, 3, 2)  # of classes, in the groupings after the first
SIDE = 64  # pixels of a picture that is read
PICTURES = (".png", ".jpg", ".jpeg")


class RankingParams(BaseModel):
    """Parameters of the trial ``encoder_ranking``."""

    model_config = ConfigDict(extra="forbid")

    data: Annotated[str, Input()] = Field(
        "images",
        description="'images', 'text', 'tiny' (for tests); a folder of feature files with labels.npy and perhaps "
        "families.csv, or of such folders, one a data set; or a folder of pictures in one folder a class",
    )
    references: list[str] = Field(
        [],
        max_length=4,
        description="reference encoders; left out, those of the data, or of a folder its first encoder",
        json_schema_extra={"scope": "plan"},
    )
    models: list[str] = Field([], description="timm models that join a pool of images")
    items: int = Field(700, ge=32, description="unlabelled items that scores see")
    labels: int = Field(500, ge=8, description="how many of these have labels, for the candidates that use them")
    budget: int = Field(5, ge=1, description="encoders that are evaluated with labels")
    rank: int = Field(32, ge=1, description="components of the reference")
    groupings: int = Field(4, ge=1, le=40, description="tasks a data set", json_schema_extra={"scope": "plan"})
    samples: int = Field(5, ge=1, description="samples of unlabelled items", json_schema_extra={"scope": "plan"})
    repeats: int = Field(3, ge=2, description="repetitions of the timed part", json_schema_extra={"scope": "plan"})
    device: str = Field("cpu", description="a torch device for networks", json_schema_extra={"scope": "plan"})


# ----------------------------------------------------------------------------------------------------------- candidates

CANDIDATES = (
    # Stages that all share compute the scores, so only what a measure alone uses can be one candidate's.
    Candidate("ssr-dagger", "method"),
    Candidate("ssr-z", "method"),
    Candidate("two-stage", "method"),
    Candidate("prior-first", "method", uses=("few_labels",)),
    Candidate("bandit", "method", uses=("few_labels",)),
    Candidate("rankme", "baseline"),
    Candidate("rankme/width", "baseline"),
    Candidate("stable-rank", "baseline"),
    Candidate("alpha-req", "baseline"),
    Candidate("nesum", "baseline"),
    Candidate("cka", "baseline"),
    Candidate("ssr", "baseline"),
    Candidate("projected-rankme", "baseline"),
    Candidate("random-order", "control"),
    Candidate("random", "control"),
    Candidate("width", "control"),
    Candidate("parameters", "control"),
    Candidate("shuffled-reference", "control"),
    Candidate("logme", "reference"),
    Candidate("h-score", "reference"),
    Candidate("probe-all", "reference"),
)
TIMED = ("ssr-dagger", "ssr-z", "cka", "rankme")


def alone() -> dict[str, Callable[..., float]]:
    """Return the scores that look at the candidate only."""
    from fairtrial.evaluation.encoder_ranking import baselines, subspace

    return {
        "rankme": subspace.rankme,
        "rankme/width": baselines.rankme_per_width,
        "stable-rank": baselines.stable_rank,
        "alpha-req": baselines.alpha_req,
        "nesum": baselines.nesum,
    }


def aligned(rank: int) -> dict[str, Callable[..., float]]:
    """Return the scores that look at a reference too."""
    from functools import partial

    from fairtrial.evaluation.encoder_ranking import subspace

    return {
        "ssr-dagger": partial(subspace.ssr_dagger, rank=rank),
        "ssr-z": partial(subspace.ssr_z, rank=rank),
        "ssr": partial(subspace.ssr, rank=rank),
        "projected-rankme": partial(subspace.projected_rankme, rank=rank),
        "cka": subspace.cka,
    }


# ----------------------------------------------------------------------------------------------------- data sets, pools


def sets_of(data: str) -> tuple[str, ...]:
    """Return the names of the data sets that the parameter ``data`` stands for."""
    if data in SETS:
        return SETS[data]
    folders = sorted(path.parent.name for path in Path(data).glob("*/labels.npy"))
    return tuple(folders) or (Path(data).resolve().name,)


def references_of(params: RankingParams) -> tuple[str, ...]:
    """Return the reference encoders."""
    if params.references:
        return tuple(params.references)
    if params.data in REFERENCES:
        return REFERENCES[params.data]
    if is_pictures(params.data):
        return REFERENCES["images"]
    return (next(iter(user_features(params.data, sets_of(params.data)[0]))),)


def picture_files(data: str) -> list[Path]:
    """Return the pictures of a folder that holds them in one folder a class."""
    return sorted(path for path in Path(data).glob("*/*") if path.suffix.lower() in PICTURES)


def is_pictures(data: str) -> bool:
    """Whether a user's folder holds pictures in one folder a class."""
    return data not in SETS and bool(picture_files(data))


def folder_of(data: str, name: str) -> Path:
    """Return the folder of a user's data set."""
    nested = Path(data) / name
    return nested if (nested / "labels.npy").is_file() else Path(data)


def user_features(data: str, name: str) -> dict[str, np.ndarray]:
    """Return a user's features by encoder."""
    from fairtrial.evaluation.encoder_ranking.files import SUFFIXES, read_features

    folder = folder_of(data, name)
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.name != "labels.npy")
    if len(files) < 3:
        raise InputError(f"data={folder}: {len(files)} feature files: give labels.npy and three encoders or more")
    return read_features(files)


def pictures_of(data: str, name: str) -> np.ndarray:
    """Return the images of a data set, (n, h, w) or (n, h, w, 3), in [0, 1]."""
    import numpy as np

    if name == "fashion":
        from fairtrial.data.images import fashion_mnist

        return fashion_mnist("test")[0][: ITEMS[name]] / 255
    if name == "digits":
        from sklearn.datasets import load_digits

        return load_digits().images / 16
    if data == "tiny":
        rng = generator(0, name)
        kinds, labels = rng.random((CLASSES[name], 8, 8)), labels_of(data, name)
        return np.clip(kinds[labels] + rng.normal(size=(len(labels), 8, 8)) / 2, 0, 1)
    from PIL import Image

    size = (SIDE, SIDE)
    return np.stack([np.array(Image.open(path).convert("RGB").resize(size)) for path in picture_files(data)]) / 255


def texts_of(name: str) -> tuple[list[str], np.ndarray]:
    """Return the texts of a data set and their classes (n,)."""
    import numpy as np
    import pandas as pd

    if name == "wordnet":
        from fairtrial.data.wordnet import wordnet_glosses

        frame = wordnet_glosses("noun").rename(columns={"gloss": "text", "category": "label"})
    else:
        from fairtrial.data.vader import DOMAINS, vader_sentences

        frame = pd.concat([vader_sentences(domain) for domain in DOMAINS])
        # A third of the range on either side of neutral: ratings are whole numbers from -4 to 4.
        frame["label"] = np.digitize(frame["mean"], [-0.5, 0.5])
    frame = frame.iloc[generator(0, name).permutation(len(frame))[: ITEMS[name]]]
    return frame["text"].tolist(), frame["label"].to_numpy()


def labels_of(data: str, name: str) -> np.ndarray:
    """Return the classes of a data set's items, (n,), numbered from 0."""
    import numpy as np

    labels: Any
    if data == "text":
        labels = texts_of(name)[1]
    elif name == "fashion":
        from fairtrial.data.images import fashion_mnist

        labels = fashion_mnist("test")[1][: ITEMS[name]]
    elif name == "digits":
        from sklearn.datasets import load_digits

        labels = load_digits().target
    elif data == "tiny":
        labels = np.arange(ITEMS[name]) % CLASSES[name]
    elif is_pictures(data):
        labels = [path.parent.name for path in picture_files(data)]
    else:
        from fairtrial.evaluation.encoder_ranking.files import read_vector

        labels = read_vector(folder_of(data, name) / "labels.npy")
    return np.unique(labels, return_inverse=True)[1]


def dealings(classes: int, most: int) -> list[np.ndarray]:
    """Return up to ``most`` groupings (classes,): each class alone, then dealt at random into 5, 3, 2, 5, ... groups.

    They depend on the number of classes only. Few classes have few groupings.
    """
    import numpy as np

    found = [np.arange(classes)]
    rng = generator(0, "dealings", classes)
    for _ in range(100 * most):
        if len(found) >= most or classes < 3:
            break
        groups = max(2, min(GROUPS[(len(found) - 1) % len(GROUPS)], classes - 1))
        dealt = rng.permutation(np.arange(classes) % groups)
        dealt = np.unique(dealt, return_index=True)[1].argsort().argsort()[dealt]  # groups in order of appearance
        if not any(np.array_equal(dealt, other) for other in found):
            found.append(dealt)
    return found


def packed(pool: Mapping[str, Encoder]) -> dict[str, Any]:
    """Return a pool as arrays, for a stage that is saved: ``names``, ..., and ``of NAME`` (n, d)."""
    import numpy as np

    return {
        "names": np.array(list(pool)),
        "families": np.array([one.family for one in pool.values()]),
        "parameters": np.array([one.parameters for one in pool.values()]),
        "width": np.array([one.features.shape[1] for one in pool.values()]),
        **{f"of {name}": one.features.astype(np.float32) for name, one in pool.items()},
    }


# --------------------------------------------------------------------------------------------------------------- stages


@stage(save="npz", keep=True)
def default_encoders(name: str, data: str, models: list[str], device: str) -> dict[str, Any]:
    """Return the packed pool of a default data set; no parameter but these makes it anew."""
    from fairtrial.causal_lm.loading import load
    from fairtrial.data.samples import cache_folder, sample_path
    from fairtrial.evaluation.encoder_ranking.pool import pool_of_images, pool_of_texts

    if data == "text":
        causal = load(sample_path("smollm2-135m"), device=device, cache=cache_folder() / "models")
        texts, sentence, static = texts_of(name)[0], sample_path("minilm"), sample_path("wordllama")
        return packed(pool_of_texts(texts, sentence=sentence, causal=causal, static=static, device=device))
    weights = network_weights() if data == "images" else None
    return packed(pool_of_images(pictures_of(data, name), weights, models=models, device=device))


@stage(save="npz", keep=True)
def user_encoders(name: str, params: RankingParams) -> dict[str, Any]:
    """Return the packed pool of a user's data set: the features given, or the default pool on their pictures."""
    from fairtrial.evaluation.encoder_ranking.files import read_families
    from fairtrial.evaluation.encoder_ranking.pool import Encoder, pool_of_images

    if is_pictures(params.data):
        images = pictures_of(params.data, name)
        return packed(pool_of_images(images, network_weights(), models=params.models, device=params.device))
    table = folder_of(params.data, name) / "families.csv"
    families = read_families(table) if table.is_file() else {}
    features = user_features(params.data, name)
    return packed({key: Encoder(values, families.get(key, key), 0) for key, values in features.items()})


def pool_of(stages: Any, name: str, params: RankingParams) -> dict[str, Any]:
    """Return the packed pool of a data set."""
    if params.data in SETS:
        return stages(default_encoders, name, params.data, params.models, params.device)
    return stages(user_encoders, name, params)


def network_weights() -> dict[str, Path]:
    """Return the files of the pretrained networks."""
    from fairtrial.data.samples import sample_path

    return {
        name: sample_path(f"efficientnet-{name}", f"efficientnet-{name}.pth") for name in ("lite0", "lite1", "lite2")
    }


@stage(keep=True)
def tasks_of(name: str, params: RankingParams, groupings: int) -> np.ndarray:
    """Return the class of every item in every task of a data set, (n, t)."""
    import numpy as np

    labels = labels_of(params.data, name)
    return np.stack([dealt[labels] for dealt in dealings(int(labels.max()) + 1, groupings)], axis=1)


def unseen(name: str, items: int) -> np.ndarray:
    """Return which half of the items no candidate sees: there the chosen encoders are compared, (n,) of bool."""
    import numpy as np

    hidden = np.zeros(items, dtype=bool)
    hidden[generator(0, "unseen", name).permutation(items)[: items // 2]] = True
    return hidden


def sample_of(name: str, sample: int, items: int, wanted: int) -> np.ndarray:
    """Return the rows of a sample of items that candidates see; its first ones are labelled."""
    import numpy as np

    seen = np.flatnonzero(~unseen(name, items))
    return generator(sample, "sample", name).permutation(seen)[:wanted]


@stage(save="npz")
def truth(stages: Any, name: str, groupings: int, params: RankingParams) -> dict[str, Any]:
    """Return the ``accuracy`` of a linear probe of each encoder in each task, (encoders, t), fitted on what is seen."""
    import numpy as np

    from fairtrial.evaluation.encoder_ranking.probe import RidgeProbe

    pool, tasks = pool_of(stages, name, params), stages(tasks_of, name, params, groupings)
    train = ~unseen(name, len(tasks))
    return {
        "accuracy": np.array([RidgeProbe().test(pool[f"of {e}"], tasks, train).mean(axis=0) for e in pool["names"]])
    }


@stage(save="npz")
def scores(
    stages: Any, name: str, sample: int, references: list[str], groupings: int, params: RankingParams
) -> dict[str, Any]:
    """Return each score of every encoder, (encoders,): ``rankme``, ``pixels: ssr-dagger``, ``2: logme`` of a task."""
    import numpy as np

    from fairtrial.evaluation.encoder_ranking import baselines
    from fairtrial.evaluation.encoder_ranking.subspace import Features, ssr_dagger

    pool, tasks = pool_of(stages, name, params), stages(tasks_of, name, params, groupings)
    rows = sample_of(name, sample, len(tasks), params.items)
    labelled = rows[: params.labels]
    shuffled = rows[generator(sample, "shuffled", name).permutation(len(rows))]
    prepared = {key: Features(pool[f"of {key}"][rows], key) for key in references}
    unrelated = {key: Features(pool[f"of {key}"][shuffled], key) for key in references}
    found: dict[str, list[float]] = {}
    for encoder in pool["names"]:
        features = Features(pool[f"of {encoder}"][rows], encoder)
        values = {label: score(features) for label, score in alone().items()}
        for key, reference in prepared.items():
            values |= {f"{key}: {label}": score(features, reference) for label, score in aligned(params.rank).items()}
            values[f"{key}: shuffled-reference"] = ssr_dagger(features, unrelated[key], params.rank)
        some = Features(pool[f"of {encoder}"][labelled], encoder)
        for task, labels in enumerate(tasks[labelled].T):
            values[f"{task}: logme"] = baselines.logme(some, labels)
            values[f"{task}: h-score"] = baselines.h_score(some, labels)
        for label, value in values.items():
            found.setdefault(label, []).append(value)
    return {label: np.array(values) for label, values in found.items()}


@stage(save="npz")
def observed(stages: Any, name: str, sample: int, groupings: int, params: RankingParams) -> dict[str, Any]:
    """Return whether labelled items are classified ``correct`` with every encoder, (encoders, labels, t) of bool."""
    import numpy as np

    from fairtrial.evaluation.encoder_ranking.probe import RidgeProbe

    pool, tasks = pool_of(stages, name, params), stages(tasks_of, name, params, groupings)
    rows = sample_of(name, sample, len(tasks), params.items)[: params.labels]
    return {"correct": np.array([RidgeProbe()(pool[f"of {e}"][rows], tasks[rows]) for e in pool["names"]])}


@stage(save="json")
def in_two_stages(stages: Any, name: str, sample: int, reference: str, params: RankingParams) -> dict[str, Any]:
    """Return the encoder that two stages choose, its scores, and the share of one stage's passes that it took."""
    from fairtrial.evaluation.encoder_ranking.ranking import rank_encoders

    pool = pool_of(stages, name, params)
    rows = sample_of(name, sample, len(pool[f"of {reference}"]), params.items)
    families = dict(zip(pool["names"].tolist(), pool["families"].tolist(), strict=True))
    ranking = rank_encoders(
        {encoder: pool[f"of {encoder}"][rows] for encoder in families},
        reference=reference,
        families=families,
        stages=2,
        rank=params.rank,
        bootstrap=0,
        seed=sample,
    )
    return {"best": ranking.order[0], "passes": ranking.forward_passes / len(families)}


# ------------------------------------------------------------------------------------------------------------- measures


def measure_choice(candidate: Candidate, cell: Cell, params: RankingParams, stages: Any) -> dict[str, float | None]:
    """Let the candidate choose an encoder, and compare it with the best of the pool."""
    name, _, number = cell["task"].rpartition("/")
    task, sample, reference, label = int(number), cell["sample"], cell["reference"], candidate.label
    pool = pool_of(stages, name, params)
    if reference not in pool["names"]:
        unknown = UnknownNameError(f"encoder of {name} to be the reference", reference, pool["names"].tolist())
        unknown.ends_run = True  # no candidate can do without it
        raise unknown
    inside = pool["names"] != reference  # (encoders,)
    names = pool["names"][inside].tolist()
    accuracy = stages(truth, name, params.groupings, params)["accuracy"][inside, task]
    budget = min(params.budget, len(names))
    score: np.ndarray | None = None
    passes = 1.0
    if label in ("prior-first", "bandit", "random-order", "probe-all"):
        correct = stages(observed, name, sample, params.groupings, params)["correct"][inside, :, task]
    if label not in ("random", "random-order", "probe-all", "two-stage", "width", "parameters"):
        table = stages(scores, name, sample, list(references_of(params)), params.groupings, params)

    if label == "random":
        expected, passes = accuracy.mean(), 0.0
    elif label == "random-order":
        expected, passes = best_of_some(correct.mean(axis=1), accuracy, budget), budget / (len(names) + 1)
    elif label == "two-stage":
        chosen = stages(in_two_stages, name, sample, reference, params)
        expected, passes = accuracy[names.index(chosen["best"])], chosen["passes"]
    elif label in ("prior-first", "bandit"):
        ranking = ranking_of(table[f"{reference}: ssr-dagger"][inside], names, pool["families"][inside].tolist())
        best = chosen_with_labels(label, ranking, correct, cell, params, stages)
        expected = accuracy[names.index(best)]
    elif label == "probe-all":
        score = correct.mean(axis=1)
    elif label in ("width", "parameters"):
        score, passes = pool[label][inside].astype(float), 0.0
    elif label in ("logme", "h-score"):
        score = table[f"{task}: {label}"][inside]
    else:
        score = table[label if label in table else f"{reference}: {label}"][inside]
    if score is not None:
        order = generator(sample, "ties", cell["task"]).permutation(len(score))
        expected = accuracy[order[score[order].argmax()]]
    regret = float(accuracy.max() - expected)
    return {
        "regret": regret,
        "normalised_regret": regret / float(accuracy.max() - accuracy.mean()),
        "spearman": None if score is None else rank_correlation(score, accuracy),
        "width_dependence": None if score is None else abs(rank_correlation(score, pool["width"][inside])),
        "passes": passes,
    }


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's correlation; 0 where one side is the same for all."""
    from scipy.stats import rankdata

    a, b = (rankdata(values) - (len(values) + 1) / 2 for values in (one, other))
    scale = math.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale else 0.0


def best_of_some(seen: np.ndarray, true: np.ndarray, some: int) -> float:
    """Return the expected true accuracy of the best seen among ``some`` encoders drawn at random, in closed form.

    The i-th best of N is the best of those drawn with probability C(N - i, some - 1) / C(N, some).
    """
    order = seen.argsort(kind="stable")[::-1]
    n = len(seen)
    weights = [math.comb(n - place, some - 1) / math.comb(n, some) for place in range(1, n + 1)]
    return float(true[order] @ weights)


def ranking_of(score: np.ndarray, names: list[str], families: list[str]) -> Ranking:
    """Return scores that are known already as a ranking."""
    from fairtrial.evaluation.encoder_ranking.ranking import Ranking

    return Ranking(
        order=tuple(names[place] for place in (-score).argsort(kind="stable")),
        scores=dict(zip(names, score.tolist(), strict=True)),
        intervals={},
        p_best={},
        forward_passes=len(names),
        families=dict(zip(names, families, strict=True)),
    )


def chosen_with_labels(
    label: str, ranking: Ranking, correct: np.ndarray, cell: Cell, params: RankingParams, stages: Any
) -> str:
    """Return the encoder that the selector chooses; full evaluations are looked up, partial ones are made."""
    from fairtrial.evaluation.encoder_ranking.few_labels import FewLabelSelector

    name, _, task = cell["task"].rpartition("/")
    names = list(ranking.scores)
    budget = min(params.budget, len(names))
    if label == "prior-first":
        selector = FewLabelSelector(ranking, budget=budget)
        while (encoder := selector.next()) is not None:
            selector.tell(encoder, correct[names.index(encoder)])
        return selector.best_
    pool, tasks = pool_of(stages, name, params), stages(tasks_of, name, params, params.groupings)
    rows = sample_of(name, cell["sample"], len(tasks), params.items)[: params.labels]
    features: dict[str, Any] = {encoder: lambda e=encoder: pool[f"of {e}"][rows] for encoder in names}
    selector = FewLabelSelector(ranking, budget=budget, strategy="bandit", seed=cell["sample"])
    return selector.fit(features, tasks[rows, int(task)]).best_


def measure_cost(candidate: Candidate, cell: Cell, params: RankingParams, stages: Any) -> dict[str, float]:
    """Time the scoring of a whole pool from its features, decompositions included."""
    import time

    from fairtrial.evaluation.encoder_ranking.subspace import Features

    name, reference = sets_of(params.data)[0], references_of(params)[0]
    pool = pool_of(stages, name, params)
    rows = sample_of(name, 0, len(pool[f"of {reference}"]), params.items)
    features = [pool[f"of {encoder}"][rows] for encoder in pool["names"]]
    score = (alone() | aligned(params.rank))[candidate.label]
    beside = Features(pool[f"of {reference}"][rows], reference)
    began = time.perf_counter()
    for values in features:
        score(Features(values), beside)
    return {"seconds": (time.perf_counter() - began) / len(features)}


# ---------------------------------------------------------------------------------------------------------------- parts


def task_names(params: RankingParams, name: str) -> list[str]:
    """Return the tasks of a data set."""
    classes = CLASSES[name] if params.data in SETS else int(labels_of(params.data, name).max()) + 1
    return [f"{name}/{task}" for task in range(len(dealings(classes, params.groupings)))]


def parts(params: RankingParams) -> tuple[Part, ...]:
    """Return the parts: choices, and cost."""
    names = [task_names(params, name) for name in sets_of(params.data)]
    # Data sets take turns, so that two workers prepare two of them.
    tasks = [column[place] for place in range(max(map(len, names))) for column in names if place < len(column)]
    here = "over tasks of these data sets"

    def less(id: str, text: str, a: str, b: str, margin: float = 0.0, metric: str = "regret") -> Claim:
        return Claim(id, f"{text}, {here}", difference(a, b, metric), above=margin)

    choice = Part(
        name="choice",
        candidates=CANDIDATES,
        metrics=(
            Metric("regret", "accuracy", higher_is_better=False),
            Metric("normalised_regret", "of a random choice's", higher_is_better=False),
            Metric("spearman", "with accuracy"),
            Metric("width_dependence", "|Spearman| with width", higher_is_better=False),
            Metric("passes", "of all encoders", higher_is_better=False),
        ),
        factors=(
            Factor("task", tasks, kind="replicate"),
            Factor("reference", references_of(params)),
            Factor("sample", range(params.samples), kind="within"),
        ),
        variance="independent",
        claims=(
            less("C1", "a random choice regrets less than rankme", "random", "rankme"),
            less("C2", "ssr-dagger regrets at least 0.05 less than rankme", "ssr-dagger", "rankme", 0.05),
            less("C3", "ssr-dagger regrets less than a random choice", "ssr-dagger", "random"),
            all_of(
                "C4",
                f"two stages regret at most 0.03 more than one, for at most 40 % of its passes, {here}",
                less("C4-regret", "two stages regret at most 0.03 more than one", "two-stage", "ssr-dagger", -0.03),
                Claim("C4-passes", f"two stages take at most 40 % of the passes, {here}",
                      level("two-stage", "passes"), below=0.4),
            ),
            less("C5", f"the best of {params.budget} in the ranking's order regrets less than of as many at random",
                 "prior-first", "random-order"),
            less("C6", "ssr-dagger follows width less than rankme", "ssr-dagger", "rankme", metric="width_dependence"),
            report("R1", "ssr-dagger over width alone, in regret", difference("ssr-dagger", "width", "regret")),
            report("R2", "ssr-dagger over width alone, in rank correlation with accuracy",
                   difference("ssr-dagger", "width", "spearman")),
            report("R3", "ssr-dagger over ssr-z, in regret", difference("ssr-dagger", "ssr-z", "regret")),
            report("R4", "ssr-dagger over cka, in regret", difference("ssr-dagger", "cka", "regret")),
            report("R5", "the shuffled reference over a random choice, in regret",
                   difference("shuffled-reference", "random", "regret")),
        ),
        measure=measure_choice,
        group=("task",),
    )  # fmt: skip
    cost = Part(
        name="cost",
        candidates=tuple(c for c in CANDIDATES if c.label in TIMED),
        metrics=(Metric("seconds", "s an encoder", higher_is_better=False, timed=True),),
        factors=(Factor("repeat", range(params.repeats), kind="replicate"),),
        variance="independent",
        claims=(
            report("R6", "seconds of ssr-dagger over rankme, as a logarithm, on this machine",
                   difference("ssr-dagger", "rankme", "seconds", scale="log")),
        ),
        measure=measure_cost,
    )  # fmt: skip
    return choice, cost


def check(params: RankingParams) -> None:
    """Refuse what cannot work before any worker starts."""
    from fairtrial.data.samples import sample_path

    samples: Mapping[str, Sequence[str]] = {
        "images": ("fashion-mnist", "efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2"),
        "text": ("wordnet", "vader", "minilm", "smollm2-135m", "wordllama"),
    }
    if params.data not in SETS and not Path(params.data).is_dir():
        raise InputError(f"data={params.data}: give {', '.join(map(repr, SETS))} or a folder")
    pictures = params.data == "images" or is_pictures(params.data)
    if params.models and not pictures:
        raise InputError(f"models={params.models}: timm models join a pool of images; data={params.data} has none")
    if params.models and importlib.util.find_spec("timm") is None:
        raise InputError(f"models={params.models}: timm is not installed: run  pip install timm")
    for sample in samples.get("images" if pictures else params.data, ()):
        if sample != "fashion-mnist" or params.data == "images":
            sample_path(sample)
    if params.labels > params.items:
        raise InputError(f"labels={params.labels} exceed items={params.items}: labelled items are among those seen")
    if params.items < 4 * params.rank:
        raise InputError(f"items={params.items} are too few for rank={params.rank}: give {4 * params.rank} or more")
    for name in sets_of(params.data):
        count = ITEMS[name] if params.data in SETS else len(labels_of(params.data, name))
        if params.items > count - count // 2:
            raise InputError(
                f"items={params.items}: of the {count} items of {name} half is kept unseen: "
                f"give --set items={count - count // 2} or fewer"
            )
    if params.data not in SETS and not is_pictures(params.data):
        for name in sets_of(params.data):
            features, items = user_features(params.data, name), len(labels_of(params.data, name))
            for encoder, values in features.items():
                if len(values) != items:
                    raise InputError(f"data={name}: {encoder} has {len(values)} items and labels.npy {items}")
            for reference in references_of(params):
                if reference not in features:
                    raise UnknownNameError(f"encoder of {name} to be the reference", reference, features)


trial = Trial(
    name="encoder_ranking",
    params=RankingParams,
    parts=parts,
    presets={
        "smoke": {
            "data": "tiny", "references": ["pixels"], "items": 100, "labels": 60, "rank": 8, "budget": 3,
            "groupings": 2, "samples": 1, "repeats": 2,
        },
        "full": {"groupings": 12, "samples": 10},
    },
    check=check,
)  # fmt: skip
