"""Tables of scores from files: one row a tested sample, or one row a fold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fairtrial.errors import InputError
from fairtrial.stats import SplitScores
from fairtrial.tables import read_table

if TYPE_CHECKING:
    import pandas as pd

LARGEST = 1e60  # squares of squares of scores are summed
BY_SAMPLE = ("candidate", "split", "sample", "score")
BY_FOLD = ("candidate", "split", "score", "n_test", "n_train")


def read_scores(path: str | Path) -> dict[str, SplitScores]:
    """Read a CSV or Parquet file of scores.

    Columns ``candidate, split, sample, score`` (what a split is not tested on it was trained on), or, where only fold
    means are known, ``candidate, split, score, n_test, n_train``. Further columns are ignored.

    Parameters
    ----------
    path : a file whose name ends in .csv or .parquet

    Returns
    -------
    dict
        candidate -> table, in the order in which the file names them

    Raises
    ------
    InputError
        No such file, another format, a column that is missing or holds what it cannot, a fold given twice.
    """
    return scores_of_frame(read_table(path), str(path))


def scores_of_frame(frame: pd.DataFrame, name: str = "the table") -> dict[str, SplitScores]:
    """Return the tables of a frame with the columns of :func:`read_scores`; ``name`` is what errors call it.

    Examples
    --------
    >>> import pandas as pd
    >>> folds = {"candidate": "mine", "split": [0, 1], "score": [0.8, 0.9], "n_test": 20, "n_train": 80}
    >>> scores_of_frame(pd.DataFrame(folds))
    {'mine': SplitScores(2 splits)}
    """
    from pandas.api.types import is_numeric_dtype

    needed = BY_SAMPLE if "sample" in frame.columns else BY_FOLD
    missing = [column for column in needed if column not in frame.columns]
    if missing:
        raise InputError(
            f"{name} has no column {', '.join(missing)}: give {', '.join(BY_SAMPLE)}; or, where only fold means are "
            f"known, {', '.join(BY_FOLD)}"
        )
    if frame.empty:
        raise InputError(f"{name} has no rows: give at least one score")
    for column in needed:
        if column not in ("candidate", "split", "sample") and not is_numeric_dtype(frame[column]):
            raise InputError(f"{name}: column {column} holds {frame[column].dtype}, not numbers")
        if (absent := frame[column].isna()).any():
            row = int(np.argmax(absent)) + 1
            raise InputError(f"{name}: column {column} is empty or not a number in data row {row}: fill or drop it")
        if column == "score" and LARGEST < (most := frame[column].abs().max()) < np.inf:
            raise InputError(f"{name}: a score of {most:.3g}: rescale scores above {LARGEST:g}")
    tables = {}
    for label, rows in frame.groupby("candidate", sort=False):
        twice = rows["split"].duplicated()
        if needed == BY_FOLD and twice.any():
            raise InputError(f"{name}: {label} has split {rows['split'][twice].iloc[0]} twice: give one row a fold")
        try:
            if needed == BY_SAMPLE:
                split, sample, score = (rows[column].to_numpy() for column in BY_SAMPLE[1:])
                tables[str(label)] = SplitScores.from_rows(split, sample, score)
            else:
                folds = rows.sort_values("split")
                tables[str(label)] = SplitScores.from_folds(*(folds[column].to_numpy() for column in BY_FOLD[2:]))
        except InputError as error:
            raise InputError(f"{name}: {label}: {error}") from None
    if needed == BY_FOLD:
        _check_same_folds(frame, name)
    return tables


def _check_same_folds(frame: pd.DataFrame, name: str) -> None:
    """Refuse fold means of candidates that name different splits: their tables hold no labels to compare."""
    sets = {label: list(rows.sort_values("split")["split"]) for label, rows in frame.groupby("candidate", sort=False)}
    first, *others = sets.items()
    for label, splits in others:
        if splits != first[1]:
            odd = sorted(set(splits) ^ set(first[1]), key=str)[0]
            raise InputError(f"{name}: only one of {first[0]!s} and {label!s} has split {odd}: give both all splits")
