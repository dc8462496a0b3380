"""Whether design-aware intervals keep their promise, and whether stopping by sample gain loses little.

A cell is one fresh subsample of a large set, cross-validated by one learner; its truth, the expected score of that
learner trained on as many samples, comes from the rest of the set. A subsample of n of N samples errs less than one of
fresh samples would, by sqrt(1 - n / N), so that errors are divided by it.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.seeds import derive, generator
from fairtrial.trial.declare import (
    AnyClaim,
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
    statistic,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from fairtrial.stats import Interval, SplitScores

DATA = ("synthetic", "breast_cancer", "wine", "digits", "sentences")
OWN = "table"  # what the data are called when the user gives a table
FOLDS = 5  # test share 1 / 5
FIRST_LOOK = 6  # splits from which gains are predicted: one pass and one more
SYNTHETIC = 20_000  # samples of the synthetic set
REST = 4000  # samples of the rest that the truth is measured on, at most
TUNING = 3  # data sets a setting that the coin's mean cost comes from, drawn apart from the cells'
NOMINAL = 0.95
PLAN: Any = {"scope": "plan"}


class SampleGainParams(BaseModel):
    """Parameters of the trial ``sample-gain``."""

    model_config = ConfigDict(extra="forbid")

    data: list[str] = Field(
        ["synthetic", "breast_cancer", "wine", "digits"], min_length=1,
        description=f"sets to draw from: {', '.join(DATA)}", json_schema_extra=PLAN,
    )  # fmt: skip
    table: Annotated[str, Input()] = Field(
        "", description="draw from your own .csv or .parquet file of numbers instead of data"
    )
    target: str = Field("target", description="the column of your table that is predicted")
    learners: list[str] = Field(
        ["ridge", "noisy ridge", "tree", "centroid"], min_length=1,
        description="learners by name, or module:attribute of your own scikit-learn estimator", json_schema_extra=PLAN,
    )  # fmt: skip
    scoring: str = Field("accuracy", description="scorer of your own estimators, with per-sample scores")
    n: int = Field(200, ge=20, description="samples of a data set; at most a third of the set it is drawn from")
    design: Literal["k-fold", "random"] = Field("k-fold", description="passes of 5-fold, or random splits of a fifth")
    splits: int = Field(30, ge=10, multiple_of=5, description="splits of a data set, K_max")
    data_sets: int = Field(100, ge=3, description="data sets of each kind", json_schema_extra=PLAN)
    truth: int = Field(300, ge=5, description="training sets that the truth is averaged over")
    aso: bool = Field(
        False, description="compare pairs by deepsig's almost stochastic order too: seconds a cell",
        json_schema_extra=PLAN,
    )  # fmt: skip

    @field_validator("data")
    @classmethod
    def _known_data(cls, names: list[str]) -> list[str]:
        return _checked(names, "data set", DATA)

    @field_validator("learners")
    @classmethod
    def _known_learners(cls, names: list[str]) -> list[str]:
        from fairtrial.evaluation.sample_gain.learners import CLASSIFIERS, is_own

        return _checked(names, "learner", (*CLASSIFIERS, *filter(is_own, names)))

    @property
    def sets(self) -> list[str]:
        """Names of the sets to draw from."""
        return [OWN] if self.table else self.data


def _checked(names: list[str], kind: str, known: tuple[str, ...]) -> list[str]:
    for name in names:
        if name not in known:
            raise UnknownNameError(kind, name, known)
    if len(set(names)) < len(names):
        raise InputError(f"a {kind} is named twice in {names}")
    return names


# ----------------------------------------------------------------------------------------------------------------- data


@stage(save="npz")
def embedded_sentences() -> dict[str, Any]:
    """Return MiniLM's embeddings of sentences of film reviews, and whether people found them positive."""
    from fairtrial.data.samples import sample_path
    from fairtrial.data.vader import vader_sentences
    from fairtrial.sentences import SentenceEncoder

    frame = vader_sentences("movies")
    frame = frame[frame["mean"] != 0].sample(5000, random_state=0)
    encoder = SentenceEncoder(sample_path("minilm"))
    return {"X": encoder(frame["text"].tolist()).astype(float), "y": (frame["mean"] > 0).to_numpy(dtype=int)}


@stage(keep=True)
def population(stages: Any, data: str, params: SampleGainParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the set that data sets are drawn from: X (N, p) and y (N,), classes as 0, 1, ..."""
    import numpy as np

    if data == OWN:
        return read_table(params.table, params.target)
    if data == "sentences":
        found = stages(embedded_sentences)
        return found["X"], found["y"]
    if data == "synthetic":
        rng = generator(0, "synthetic")
        y = rng.integers(0, 2, SYNTHETIC)
        X = rng.normal(size=(SYNTHETIC, 20))
        X[:, :5] += 0.45 * (2 * y[:, None] - 1)
        return X, y
    from sklearn import datasets

    X, y = getattr(datasets, f"load_{data}")(return_X_y=True)
    return np.asarray(X, dtype=float), np.asarray(y)


def read_table(path: str, target: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and the target of a table; a target of fractions is regressed, any other is a class."""
    import numpy as np
    import pandas as pd

    from fairtrial.tables import read_table as read_file

    frame = read_file(path)
    if target not in frame.columns:
        raise InputError(f"table={path} has no column {target!r}: give --set target=COLUMN")
    y = frame.pop(target)
    for name, column in [(target, y), *frame.items()]:
        if column.isna().any():
            raise InputError(f"table={path}: column {name!r} is empty in {column.isna().sum()} rows: fill or drop them")
    words = [name for name, column in frame.items() if not pd.api.types.is_numeric_dtype(column)]
    if words or not len(frame.columns):
        raise InputError(f"table={path}: column {words[0]!r} holds no numbers: encode or drop it" if words else
                         f"table={path} has no column beside {target!r}")  # fmt: skip
    X, labels = frame.to_numpy(dtype=float), y.to_numpy()
    if not np.isfinite(X).all():
        raise InputError(f"table={path}: column {frame.columns[np.argwhere(~np.isfinite(X))[0][1]]!r} is not finite")
    if pd.api.types.is_float_dtype(y) and (labels != np.round(labels)).any():
        return X, labels
    return X, np.unique(labels.astype(str) if labels.dtype.hasobject else labels, return_inverse=True)[1]


def size_of(params: SampleGainParams, available: int) -> int:
    """Return how many samples a data set has: ``n``, at most a third of those available."""
    return min(params.n, available // 3)


def held_out(rng: np.random.Generator, n: int, params: SampleGainParams) -> list[np.ndarray]:
    """Return the test sets of the splits, in order."""
    import numpy as np

    if params.design == "random":
        return [np.sort(rng.permutation(n)[: n // FOLDS]) for _ in range(params.splits)]
    return [np.sort(f) for _ in range(params.splits // FOLDS) for f in np.array_split(rng.permutation(n), FOLDS)]


def complements(tests: list[np.ndarray], n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (train, test) pairs that train on all they do not test."""
    import numpy as np

    return [(np.delete(np.arange(n), test), test) for test in tests]


# --------------------------------------------------------------------------------------------------------------- stages


def scores_on(
    stages: Any, data_set: int, data: str, learner: str, splits: Any, params: SampleGainParams, kind: str
) -> list[np.ndarray]:
    """Fit and score a learner on splits of one data set; ``kind`` keeps the seeds of different uses apart."""
    from fairtrial.evaluation.sample_gain.learners import learner as learner_of

    X, y = stages(population, data, params)
    chosen = generator(data_set, "data set", data).choice(len(y), size_of(params, len(y)), replace=False)
    X, y = X[chosen], y[chosen]
    score, rng = learner_of(learner, params.scoring), generator(data_set, "fits", kind, data, learner)
    return [score(X[train], y[train], X[test], y[test], rng) for train, test in splits]


@stage(save="npz")
def cross_validated(
    stages: Any, data_set: int, data: str, learner: str, code: str, params: SampleGainParams
) -> dict[str, Any]:
    """Cross-validate one data set; ``code`` is the digest of the user's own learner."""
    import numpy as np

    n = size_of(params, len(stages(population, data, params)[1]))
    tests = held_out(generator(data_set, "splits", data), n, params)
    scores = scores_on(stages, data_set, data, learner, complements(tests, n), params, "splits")
    sizes = [len(test) for test in tests]
    return {"test": np.concatenate(tests).astype(np.int32), "score": np.concatenate(scores), "size": np.array(sizes)}


@stage()
def table(stages: Any, data_set: int, data: str, learner: str, params: SampleGainParams) -> SplitScores:
    """Return the scores of one data set as a table."""
    import numpy as np

    from fairtrial.evaluation.sample_gain.learners import source_digest
    from fairtrial.stats import SplitScores

    found = stages(cross_validated, data_set, data, learner, source_digest(learner), params)
    ends = np.cumsum(found["size"])[:-1]
    return SplitScores.from_arrays(np.split(found["test"], ends), np.split(found["score"], ends))


@stage(save="npz")
def truth(stages: Any, data: str, learner: str, code: str, params: SampleGainParams) -> dict[str, Any]:
    """Return of fresh training sets, the same for all learners, the mean score on the rest and its variance by sample.

    ``mean`` and ``variance`` have an entry for each training set.
    """
    import numpy as np

    from fairtrial.evaluation.sample_gain.learners import learner as learner_of

    X, y = stages(population, data, params)
    n = size_of(params, len(y))
    score, size = learner_of(learner, params.scoring), n - n // FOLDS
    means, variances = [], []
    for number in range(params.truth):
        order = generator(number, "truth", data).permutation(len(y))
        train, rest = order[:size], order[size : size + REST]
        rows = score(X[train], y[train], X[rest], y[rest], generator(number, "truth", data, learner))
        means.append(rows.mean())
        variances.append(rows.var(ddof=1))
    return {"mean": np.array(means), "variance": np.array(variances)}


def truth_of(stages: Any, data: str, learner: str, params: SampleGainParams) -> dict[str, Any]:
    """Return :func:`truth` of a learner."""
    from fairtrial.evaluation.sample_gain.learners import source_digest

    return stages(truth, data, learner, source_digest(learner), params)


@stage()
def halves(stages: Any, data_set: int, data: str, learner: str, params: SampleGainParams) -> list[list[float]]:
    """Return the fold means of five halvings by two folds."""
    import numpy as np

    n = size_of(params, len(stages(population, data, params)[1]))
    rng = generator(data_set, "halves", data)
    tests = [np.sort(half) for _ in range(5) for half in np.array_split(rng.permutation(n), 2)]
    rows = scores_on(stages, data_set, data, learner, complements(tests, n), params, "halves")
    return np.reshape([row.mean() for row in rows], (5, 2)).tolist()


def splits_until(rule: Any, scores: SplitScores) -> int:
    """Return after how many splits a rule stops."""
    for k, (train, test) in enumerate(complements([scores.test(k) for k in range(scores.n_splits)], _n(scores))):
        if rule.update(train, test, scores.score[scores.starts[k] : scores.starts[k + 1]]):  # type: ignore[index]
            return k + 1
    return scores.n_splits


def _n(scores: SplitScores) -> int:
    assert scores.samples is not None
    return len(scores.samples)


def flat_rule(scores: SplitScores, params: SampleGainParams) -> Any:
    """Return the stopping rule with the splits as its plan, as ``cross_validate`` makes it."""
    from fairtrial.stats import StopWhenFlat

    plan = complements([scores.test(k) for k in range(scores.n_splits)], _n(scores))
    return StopWhenFlat(min_splits=FIRST_LOOK, max_splits=params.splits, plan=plan)


@stage(save="json")
def usual_cost(stages: Any, sets: list[str], learners: list[str], codes: list[str], params: SampleGainParams) -> float:
    """Return the mean number of splits that the rule spends, on data sets apart from the cells'."""
    import numpy as np

    spent = []
    for data, learner, number in itertools.product(sets, learners, range(TUNING)):
        scores = table(stages, derive(number, "tuning"), data, learner, params)
        spent.append(splits_until(flat_rule(scores, params), scores))
    return float(np.mean(spent))


@stage()
def pair_stop(stages: Any, data_set: int, data: str, pair: str, params: SampleGainParams) -> int:
    """Return after how many splits the rule stops that looks at a pair's differences."""
    a, b = pair.split(VERSUS)
    scores = stages(table, data_set, data, a, params).minus(stages(table, data_set, data, b, params))
    return splits_until(flat_rule(scores, params), scores)


# ------------------------------------------------------------------------------------------------------------- measures

VERSUS = " against "


def measure_intervals(candidate: Candidate, cell: Cell, params: SampleGainParams, stages: Any) -> dict[str, Any]:
    """Return at 5 and at all splits whether the interval covers the truth, its length and its variance.

    Variances and squared errors are in units of one split's variance over fresh data sets.
    """
    scores = stages(table, cell["data_set"], cell["data"], cell["learner"], params)
    mean, unit, shrink = yardstick(stages, cell, params)
    found: dict[str, Any] = {}
    for name, splits in (("5", FOLDS), ("all", params.splits)):
        one = interval_by(candidate.label, scores.take(range(splits)), cell, params, stages)
        found[f"covered at {name}"] = found[f"length at {name}"] = found[f"variance at {name}"] = None
        if one is None:
            continue
        estimate, low, high, variance = one
        truth_there = estimate + (mean - estimate) / shrink
        found[f"covered at {name}"] = float(low <= truth_there <= high)
        found[f"length at {name}"] = high - low
        found[f"variance at {name}"] = None if variance is None else variance / unit
    found["squared error"] = (float(scores.means.mean()) - mean) ** 2 / shrink**2 / unit
    return found


def yardstick(stages: Any, cell: Cell, params: SampleGainParams) -> tuple[float, float, float]:
    """Return the truth, the variance of one split's mean, and sqrt(1 - n / N)."""
    available = len(stages(population, cell["data"], params)[1])
    n = size_of(params, available)
    known = truth_of(stages, cell["data"], cell["learner"], params)
    unit = float(known["variance"].mean() / (n // FOLDS) + known["mean"].var(ddof=1))
    return float(known["mean"].mean()), unit, math.sqrt(1 - n / available)


def interval_by(
    label: str, scores: SplitScores, cell: Cell, params: SampleGainParams, stages: Any
) -> tuple[float, float, float, float | None] | None:
    """Return (estimate, low, high, variance) of a candidate's interval from some splits; None where it has none."""
    from fairtrial.evaluation.sample_gain import baselines
    from fairtrial.evaluation.sample_gain.controls import single_split
    from fairtrial.stats import interval

    one: Interval
    if label == "fold bootstrap":
        low, high = baselines.stratified_bootstrap(scores.means[:, None], seed=cell["data_set"])
        return float(scores.means.mean()), low, high, None
    if label == "nested CV":
        repeats = scores.n_splits // (FOLDS * (FOLDS + 1) // 2)  # as many fits as the others
        if not repeats:
            return None
        one = baselines.nested_cross_validation(
            lambda splits: scores_on(
                stages, cell["data_set"], cell["data"], cell["learner"], splits, params, "nested"
            ),
            _n(scores), folds=FOLDS, repeats=repeats, seed=cell["data_set"],
        )  # fmt: skip
    elif label == "single split":
        one = single_split(scores)
    else:
        one = interval(scores, variance=VARIANCES[label])  # type: ignore[arg-type]
    return one.mean, one.low, one.high, one.variance


VARIANCES = {"design": "design", "nadeau-bengio": "nadeau_bengio", "naive t": "independent"}


def measure_stopping(candidate: Candidate, cell: Cell, params: SampleGainParams, stages: Any) -> dict[str, Any]:
    """Return what a stopping rule spends and how far its mean is from the truth."""
    from fairtrial.evaluation.sample_gain.controls import RandomCoin
    from fairtrial.evaluation.sample_gain.learners import source_digest
    from fairtrial.stats import sample_gain

    scores = stages(table, cell["data_set"], cell["data"], cell["learner"], params)
    predicted = gain_error = None
    if candidate.label == "all splits":
        spent = params.splits
    elif candidate.label == "coin":
        codes = [source_digest(name) for name in params.learners]
        cost = stages(usual_cost, params.sets, params.learners, codes, params)
        coin = RandomCoin(cost, FIRST_LOOK, params.splits, seed=derive(cell["data_set"], cell["data"], cell["learner"]))
        spent = splits_until(coin, scores)
    else:
        spent = splits_until(flat_rule(scores, params), scores)
        ahead = params.splits - FIRST_LOOK
        first, last = sample_gain(scores.take(range(FIRST_LOOK)), ahead=(ahead,)), sample_gain(scores)
        if first.variance > 0 and last.variance > 0:
            gain = first.value * (1 + first.ahead[ahead])
            predicted, gain_error = 1 / gain, abs(gain - last.value)
    mean, unit, shrink = yardstick(stages, cell, params)
    error = float(scores.means[:spent].mean()) - mean
    return {
        "splits": spent,
        "share of splits": spent / params.splits,
        "squared error": (error / shrink) ** 2 / unit,
        "predicted squared error": predicted,
        "gain error": gain_error,
    }


def measure_pairs(candidate: Candidate, cell: Cell, params: SampleGainParams, stages: Any) -> dict[str, Any]:
    """Return whether a test decides a pair of learners, and whether rightly."""
    import numpy as np

    from fairtrial.evaluation.sample_gain import baselines
    from fairtrial.evaluation.sample_gain.controls import sign_test
    from fairtrial.stats import compare

    data_set, data = cell["data_set"], cell["data"]
    a, b = cell["pair"].split(VERSUS)
    of_a, of_b = (stages(table, data_set, data, name, params) for name in (a, b))
    known = truth_of(stages, data, a, params)["mean"] - truth_of(stages, data, b, params)["mean"]
    true = float(known.mean())
    resolved = abs(true) > 3 * float(known.std(ddof=1)) / math.sqrt(len(known))
    covered = None
    sides: Any
    if candidate.label == "single split":
        fits = 1
        sides = of_a.take([0]), of_b.take([0])
        sign = float(np.sign(sides[0].means[0] - sides[1].means[0]))
        decided = sign_test(sides[0].score - sides[1].score) < 1 - NOMINAL  # type: ignore[operator]
    elif candidate.label == "5x2cv F":
        fits = 10
        sides = tuple(np.array(stages(halves, data_set, data, name, params)) for name in (a, b))
        test = baselines.five_by_two_f_test(sides[0] - sides[1])
        sign, decided = float(np.sign(test.difference)), test.p_value < 1 - NOMINAL
    else:
        fits = stages(pair_stop, data_set, data, cell["pair"], params)
        if candidate.label in ("two_on_single", "aso"):
            fits = fits // FOLDS * FOLDS  # whole passes
        sides = of_a.take(range(fits)), of_b.take(range(fits))
        sign = float(np.sign(sides[0].means.mean() - sides[1].means.mean()))
        if candidate.label == "two_on_single":
            posterior = baselines.two_on_single(sides[0].means, sides[1].means, runs=fits // FOLDS)
            decided = max(posterior) > (1 + NOMINAL) / 2
        elif candidate.label == "aso":
            better, worse = sides if sign >= 0 else sides[::-1]
            bound = baselines.almost_stochastic_order(better.means, worse.means, level=(1 + NOMINAL) / 2, seed=data_set)
            decided = bound < 0.5
        else:
            verdict = compare(*sides, higher_is_better=True, variance=VARIANCES[candidate.label])  # type: ignore[arg-type]
            decided = verdict.state != "UNDECIDED"
            available = len(stages(population, data, params)[1])
            shrink = math.sqrt(1 - size_of(params, available) / available)
            there = verdict.difference + (true - verdict.difference) / shrink
            covered = float(verdict.low <= there <= verdict.high)
    right = decided and sign == np.sign(true)
    return {
        "right": float(right) if resolved else None,
        "wrong": float(decided and not right) if resolved else None,
        "covered": covered,
        "splits": fits,
    }


# ---------------------------------------------------------------------------------------------------------------- parts


def farther_from_nominal(metric: str) -> Any:
    """Return a statistic: how much farther Nadeau and Bengio's coverage is from 95% than the design's."""

    def distance(frame: pd.DataFrame) -> float:
        values = frame[metric].to_numpy(dtype=float)
        label = frame["candidate"].to_numpy()
        design, other = (abs(values[label == name].mean() - NOMINAL) for name in ("design", "nadeau-bengio"))
        return float(other - design)

    return statistic(distance)


INTERVALS = (
    Candidate("design", "method", uses=("fairtrial.stats.intervals",)),
    Candidate("nadeau-bengio", "baseline", uses=("fairtrial.stats.intervals",)),
    Candidate("naive t", "baseline", uses=("fairtrial.stats.intervals",)),
    Candidate("fold bootstrap", "baseline", uses=("baselines",)),
    Candidate("nested CV", "baseline", uses=("baselines",)),
    Candidate("single split", "control", uses=("controls",)),
)
RULES = (
    Candidate("flat", "method", uses=("fairtrial.stats.gain",)),
    Candidate("all splits", "baseline"),
    Candidate("coin", "control", uses=("controls",)),
)
TESTS = (
    Candidate("design", "method", uses=("fairtrial.stats.comparison",)),
    Candidate("nadeau-bengio", "baseline", uses=("fairtrial.stats.comparison",)),
    Candidate("naive t", "baseline", uses=("fairtrial.stats.comparison",)),
    Candidate("two_on_single", "baseline", uses=("baselines",)),
    Candidate("5x2cv F", "baseline", uses=("baselines",)),
    Candidate("aso", "baseline", uses=("baselines",)),
    Candidate("single split", "control", uses=("controls",)),
)


def parts(params: SampleGainParams) -> tuple[Part, ...]:
    """Return the parts: intervals, stopping, and pairs where there are two learners."""
    from fairtrial.evaluation.sample_gain.learners import STOCHASTIC, is_own, own_estimator

    own = tuple(own_estimator(name).fit for name in params.learners if is_own(name))  # its class and its parameters
    steady = {"learner": tuple(name for name in params.learners if name not in STOCHASTIC)}
    data_sets = Factor("data_set", range(params.data_sets), kind="replicate", most=max(1000, params.data_sets))
    sets, learners = Factor("data", params.sets), Factor("learner", params.learners)
    pairs = [VERSUS.join(pair) for pair in itertools.combinations(params.learners, 2)]

    def part(
        name: str,
        candidates: tuple[Candidate, ...],
        metrics: tuple[Metric, ...],
        setting: Factor,
        claims: tuple[AnyClaim, ...],
        measure: Any,
    ) -> Part:
        return Part(
            name=name,
            candidates=tuple(Candidate(c.label, c.role, uses=(*c.uses, *own)) for c in candidates),
            metrics=metrics,
            factors=(data_sets, sets, setting),
            variance="independent",
            claims=claims,
            measure=measure,
            group=("data_set", "data"),
        )

    intervals = part(
        "intervals",
        INTERVALS,
        (
            *(Metric(f"covered at {k}", "share of intervals") for k in ("5", "all")),
            *(Metric(f"length at {k}", "score", higher_is_better=False) for k in ("5", "all")),
            *(Metric(f"variance at {k}", "of one split's", higher_is_better=False) for k in ("5", "all")),
            Metric("squared error", "of one split's variance", higher_is_better=False),
        ),
        learners,
        (
            all_of(
                "C1",
                f"on deterministic learners{' and yours' if own else ''} the design-aware interval covers the truth in "
                f"92 to 99% of data sets at {params.splits} splits, where the naive one covers it in fewer than 85%",
                Claim("C1.1", "design covers more than 92%", level("design", "covered at all", steady), above=0.92),
                Claim("C1.2", "design covers fewer than 99%", level("design", "covered at all", steady), below=0.99),
                Claim("C1.3", "naive t covers fewer than 85%", level("naive t", "covered at all", steady), below=0.85),
            ),
            all_of(
                "C2",
                f"it is shorter than Nadeau and Bengio's at 5 and at {params.splits} splits, and its coverage at most "
                "a point farther from 95%",
                *(
                    Claim(
                        f"C2.{i}", f"shorter at {k}", difference("design", "nadeau-bengio", f"length at {k}"), above=0
                    )
                    for i, k in ((1, "5"), (2, "all"))
                ),
                *(
                    Claim(f"C2.{i}", f"as near to 95% at {k}", farther_from_nominal(f"covered at {k}"), above=-0.01)
                    for i, k in ((3, "5"), (4, "all"))
                ),
            ),
            *(
                report(
                    f"R1.{i}",
                    f"{label}: variance it states, less the squared error there is",
                    contrast({(label, "variance at all", None): 1.0, (label, "squared error", None): -1.0}),
                )
                for i, label in enumerate(("design", "nadeau-bengio", "naive t", "nested CV"), start=1)
            ),
        ),
        measure_intervals,
    )
    stopping = part(
        "stopping",
        RULES,
        (
            Metric("splits", "", higher_is_better=False),
            Metric("share of splits", f"of {params.splits}", higher_is_better=False),
            Metric("squared error", "of one split's variance", higher_is_better=False),
            Metric("predicted squared error", "of one split's variance", higher_is_better=False),
            Metric("gain error", "sample gain", higher_is_better=False),
        ),
        learners,
        (
            all_of(
                "C3",
                f"stopping by sample gain spends at most 60% of {params.splits} splits and loses at most 10% of their "
                "gain",
                Claim("C3.1", "share of the splits spent", level("flat", "share of splits"), below=0.6),
                Claim(
                    "C3.2",
                    "squared error with all splits, less 90% of that at the stop",
                    contrast({("all splits", "squared error", None): 1.0, ("flat", "squared error", None): -0.9}),
                    above=0,
                ),
            ),
            report("R2", "squared error at the stop, less than at the coin's",
                   difference("flat", "coin", "squared error")),
            report(
                "R3",
                f"squared error with all splits as predicted from {FIRST_LOOK}, less what it is",
                contrast({("flat", "predicted squared error", None): 1.0, ("all splits", "squared error", None): -1.0}),
            ),
            report("R4", f"gain predicted from {FIRST_LOOK} splits and gain estimated from all: distance",
                   level("flat", "gain error")),
        ),
        measure_stopping,
    )  # fmt: skip
    if not pairs:
        return intervals, stopping
    tests = part(
        "pairs",
        tuple(c for c in TESTS if c.label != "aso" or params.aso),
        (
            Metric("right", "share of pairs"),
            Metric("wrong", "share of pairs", higher_is_better=False),
            Metric("covered", "share of intervals"),
            Metric("splits", "", higher_is_better=False),
        ),
        Factor("pair", pairs),
        (
            Claim(
                "C4",
                "at the stop at least twice as many pairs are rightly decided as by a single split: the share of pairs "
                "less twice the other's",
                contrast({("design", "right", None): 1.0, ("single split", "right", None): -2.0}),
                above=0,
            ),
            report("R5", "intervals of differences that cover, design", level("design", "covered")),
            report("R6", "intervals of differences that cover, naive t", level("naive t", "covered")),
            report("R7", "pairs rightly decided, more than by Nadeau and Bengio",
                   difference("design", "nadeau-bengio", "right")),
            report("R8", "pairs wrongly decided", level("design", "wrong")),
        ),
        measure_pairs,
    )  # fmt: skip
    return intervals, stopping, tests


def check(params: SampleGainParams) -> None:
    """Refuse what cannot be read or learned before any worker starts."""
    from importlib.util import find_spec
    from pathlib import Path

    from fairtrial.data.samples import sample_path
    from fairtrial.errors import MissingExtraError
    from fairtrial.evaluation.sample_gain.learners import is_own, own_estimator

    for module in ("sklearn", "baycomp"):
        if find_spec(module) is None:
            raise MissingExtraError("evaluation", module)
    if params.aso and find_spec("deepsig") is None:
        raise InputError("aso=true needs deepsig: run  pip install deepsig  (its licence is the GPL)")
    own = [name for name in params.learners if is_own(name)]
    for name in own:
        own_estimator(name)
    if own:
        from fairtrial.evaluation.sample_gain.cross_validation import check_scoring

        check_scoring(params.scoring)
    if params.scoring != "accuracy" and len(own) < len(params.learners):
        raise InputError(f"scoring={params.scoring}: built-in learners are scored by accuracy: name only your own")
    if params.table:
        if not Path(params.table).is_file():
            raise InputError(f"table={params.table}: no such file")
        y = read_table(params.table, params.target)[1]
        if size_of(params, len(y)) < 20:
            raise InputError(f"table={params.table} has {len(y)} rows: a third of them must be 20 or more")
        if y.dtype.kind == "f" and len(own) < len(params.learners):
            raise InputError(f"table={params.table}: {params.target!r} is no class: name only learners that regress")
    elif "sentences" in params.data:
        sample_path("vader")
        sample_path("minilm")


trial = Trial(
    name="sample-gain",
    params=SampleGainParams,
    parts=parts,
    presets={
        "smoke": {
            "data": ["synthetic"], "learners": ["ridge", "noisy ridge"], "n": 60, "splits": 10, "data_sets": 3,
            "truth": 10,
        },
        "full": {
            "data": list(DATA), "learners": ["ridge", "noisy ridge", "tree", "centroid", "logistic", "forest", "mlp"],
            "n": 1000, "data_sets": 400,
        },
    },
    check=check,
)  # fmt: skip
