"""Evaluate a scorer on a bench: accuracy of each cell with its interval, acquisition curves, one macro score."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fairtrial import stats
from fairtrial.errors import InputError
from fairtrial.evaluation.language_development.acquisition import Acquisition, fit_acquisition
from fairtrial.evaluation.language_development.devbench import DevBench, chance_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from fairtrial.evaluation.language_development.scorers import Scorer, SimilarityScorer

_CELL = ["task", "phenomenon", "bin"]


@dataclass(frozen=True, eq=False)
class DevReport:
    """What a scorer got right.

    Attributes
    ----------
    cells : pandas.DataFrame
        One row a phenomenon and bin: task, phenomenon, bin, items, words, accuracy with low and high (95 %, over
        words and frames), chance, corrected = (accuracy - chance) / (1 - chance), enough (whether the cell has the
        power that the bench was made for), per_character (accuracy when scores are divided by length; nan for L4).
    curve : pandas.DataFrame
        One row a phenomenon, and "all" for each task: the fitted :class:`~.acquisition.Acquisition`.
    macro : float
        Mean corrected accuracy over the cells with enough power; nan where none has.
    items : pandas.DataFrame
        id, word, count and ``correct`` of each item answered (1, 0, or one over the number of ties).
    convention : str
        How texts were scored.
    notes : tuple of str
        What was left out and why.
    """

    cells: pd.DataFrame
    curve: pd.DataFrame
    macro: float
    items: pd.DataFrame
    convention: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return cells, curve and macro as JSON; what is not known is null."""
        tables = {name: json.loads(getattr(self, name).to_json(orient="records")) for name in ("cells", "curve")}
        macro = None if math.isnan(self.macro) else self.macro
        about = {"macro": macro, "convention": self.convention, "notes": list(self.notes), **tables}
        return json.dumps(about, ensure_ascii=False, indent=1)

    def plot_curve(self) -> Figure:
        """Return a figure: corrected accuracy of each task by frequency, with its fitted curve."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        whole = self.curve[self.curve.phenomenon == "all"]
        for k, (task, cells) in enumerate(self.cells.groupby("task", sort=False)):
            x = 2 * 4.0**cells.bin  # the middle of a bin on the logarithmic axis
            points = axes.scatter(x * 1.06**k, cells.corrected, s=cells["items"] / 6 + 4, alpha=0.6, label=str(task))
            for row in whole[whole.task == task].to_dict(orient="records"):
                fit = Acquisition(**{field.name: row[field.name] for field in fields(Acquisition)})
                f = np.geomspace(1, x.max() * 2, 200)
                curve = (fit.accuracy(f) - fit.chance) / (1 - fit.chance)
                axes.plot(f, curve, color=points.get_facecolor()[0][:3], linewidth=1.5)
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set(xscale="log", xlabel="occurrences of the word in the corpus", ylabel="accuracy above chance")
        axes.set_ylim(-0.3, 1.03)
        axes.legend(frameon=False, title="task; size: items")
        return figure


def evaluate(bench: DevBench, scorer: Scorer | SimilarityScorer, *, seed: int = 0) -> DevReport:
    """Score a bench.

    Parameters
    ----------
    bench : items.
    scorer : a callable from texts to numbers (larger is better), such as :class:`~.scorers.CausalScorer`, for all tasks
        but L4; or a :class:`~.scorers.SimilarityScorer` for L4.
    seed : of the bootstrap of the acquisition curves.

    Returns
    -------
    DevReport

    Raises
    ------
    InputError
        The bench has no item for such a scorer, the scorer returns another number of scores, or it scores none.

    Examples
    --------
    >>> from fairtrial.evaluation.language_development import Corpus, build_devbench, child_directed_speech
    >>> bench = build_devbench(Corpus.from_documents(child_directed_speech(300)), tasks=["negation"], per_cell=20)
    >>> report = evaluate(bench, lambda texts: [-len(text) for text in texts])
    >>> set(report.cells.accuracy)  # the same words, so the same length
    {0.5}
    """
    import pandas as pd

    from fairtrial.evaluation.language_development.scorers import SimilarityScorer

    pictured = scorer if isinstance(scorer, SimilarityScorer) else None
    items = bench.items[(bench.items.task == "L4") == (pictured is not None)]
    if not len(items):
        needs = "L4 items: build it with pictures=" if pictured else "items of text: L4 takes a SimilarityScorer"
        raise InputError(f"the bench has no {needs}")
    if pictured:
        scores, lengths = _picture_scores(items, pictured), None
    else:
        scores, lengths = _text_scores(items, scorer)  # type: ignore[arg-type]
    known = np.isfinite(scores).all(axis=1)
    if not known.any():
        raise InputError(
            "the scorer scored no item: its scores are nan, as of a tokenizer that does not know the words"
        )
    notes = list(bench.notes)
    if not known.all():
        of = ", ".join(sorted(items[~known].phenomenon.unique()))
        notes.append(f"{(~known).sum()} items not scored, of unknown tokens or without a finite score ({of})")
    answered = items[known].assign(
        correct=share_correct(scores[known]),
        per_character=np.nan if lengths is None else share_correct(scores[known] / lengths[known]),
        chance=[chance_of(item) for item in items[known].itertuples()],
    )
    power = bench.power()
    needed: dict[Any, int] = dict(zip(zip(power.phenomenon, power.bin, strict=True), power.needed, strict=True))
    cells = pd.DataFrame(
        [
            {**dict(zip(_CELL, key, strict=True)), **_cell(cell, needed[key[1], key[2]])}
            for key, cell in answered.groupby(_CELL, sort=False)
        ]
    )
    powered = cells[cells.enough]
    macro = float(powered.corrected.mean()) if len(powered) else math.nan
    if not len(powered):
        notes.append("no cell has the power that was asked for: there is no macro score")
    convention = str(getattr(scorer, "convention", "scores of the callable"))
    kept = answered[["id", *_CELL, "word", "count", "correct"]].reset_index(drop=True)
    return DevReport(cells, _curves(answered, seed), macro, kept, convention, tuple(notes))


def share_correct(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (n,) whether the first of each row's scores (n, m) is the highest; of k that tie for it, 1 / k.

    >>> share_correct(np.array([[2.0, 1.0], [1.0, 1.0], [0.0, 1.0]])).tolist()
    [1.0, 0.5, 0.0]
    """
    best = scores.max(axis=1, keepdims=True)
    tied = scores == best
    return tied[:, 0] / tied.sum(axis=1)


def _text_scores(items: pd.DataFrame, scorer: Scorer) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return scores and lengths (n, 2) of the good and the bad text of each item."""
    texts = [text for good, bad in zip(items.good, items.bad, strict=True) for text in (good, *bad)]
    told = scorer(texts)
    try:
        scores = np.asarray(told, dtype=float)
    except (TypeError, ValueError):
        raise InputError(f"the scorer returned {type(told).__name__} of no numbers: return one number a text") from None
    if scores.shape != (len(texts),):
        raise InputError(f"the scorer returned shape {scores.shape} for {len(texts)} texts: return one number a text")
    return scores.reshape(len(items), -1), np.array([len(text) for text in texts], dtype=float).reshape(len(items), -1)


def _picture_scores(items: pd.DataFrame, scorer: SimilarityScorer) -> NDArray[np.float64]:
    """Return similarities (n, 4) of each item's word with its images, or of its image with its words."""
    images = list(dict.fromkeys(image for row in items.images for image in row))
    texts = list(dict.fromkeys(text for good, bad in zip(items.good, items.bad, strict=True) for text in (good, *bad)))
    table = scorer.similarity(images, texts)
    image_at, text_at = ({key: i for i, key in enumerate(keys)} for keys in (images, texts))
    rows = []
    for shown, good, bad in zip(items.images, items.good, items.bad, strict=True):
        pairs = [(image, text) for image in shown for text in (good, *bad)]
        rows.append([table[image_at[image], text_at[text]] for image, text in pairs])
    return np.array(rows)


def _cell(cell: pd.DataFrame, needed: int) -> dict[str, Any]:
    accuracy, chance = float(cell.correct.mean()), float(cell.chance.iloc[0])
    low, high = _interval(cell, accuracy)
    return {
        "items": len(cell),
        "words": cell.word.nunique(),
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "chance": chance,
        "corrected": (accuracy - chance) / (1 - chance),
        "enough": len(cell) >= needed,
        "per_character": float(cell.per_character.mean()),
    }


def _interval(cell: pd.DataFrame, accuracy: float) -> tuple[float, float]:
    """Return the 95 % interval of a cell's accuracy, words and frames both random and crossed, within [0, 1]."""
    means = cell.groupby(["word", "frame"], sort=False).correct.mean().reset_index()
    if means.word.nunique() < 2:
        return math.nan, math.nan
    if means.frame.nunique() < 2:
        found = stats.mean_interval(means.correct)
    else:
        table = stats.SplitScores.from_rows(means.word.to_numpy(), means.frame.to_numpy(), means.correct.to_numpy())
        found = stats.interval(table, variance="crossed")
    shift = accuracy - found.mean  # the table weighs words alike, the cell items
    return max(0.0, found.low + shift), min(1.0, found.high + shift)


def _curves(answered: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return the acquisition curve of each phenomenon, and of each task as a whole ("all")."""
    import pandas as pd

    rows = []
    groups: Sequence[Any] = [
        *answered.groupby(["task", "phenomenon"], sort=False),
        *(((task, "all"), group) for task, group in answered.groupby("task", sort=False)),
    ]
    for (task, phenomenon), group in groups:
        by_word = group.groupby("word").agg(count=("count", "first"), correct=("correct", "sum"), n=("correct", "size"))
        if by_word["count"].nunique() > 1:
            fit = fit_acquisition(by_word["count"], by_word.correct, by_word.n, float(group.chance.iloc[0]), seed=seed)
            rows.append({"task": task, "phenomenon": phenomenon, **vars(fit)})
    columns = ["task", "phenomenon", "t", "t_low", "t_high", "s", "s_low", "s_high", "words", "chance"]
    return pd.DataFrame(rows, columns=columns)
