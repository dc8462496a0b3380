"""Tables of answers, items x models, as integers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection.softmax import Floats, Ints
from fairtrial.tables import read_table

MOST_MISSING = 0.5  # share of the items that a model may leave unanswered


def as_frame(X: Any) -> pd.DataFrame:
    """Return a table of answers, one row an item and one column a model.

    Raises
    ------
    InputError
        Not a table of two dimensions, or of no model.

    Examples
    --------
    >>> as_frame([["a", "b"], ["b", "b"]]).shape
    (2, 2)
    """
    if isinstance(X, pd.DataFrame):
        frame = X
    elif isinstance(X, dict):
        try:
            frame = pd.DataFrame(X)
        except ValueError as error:
            raise InputError(f"the answers are no table: {error}: give every model one answer an item") from None
    else:
        array = np.asarray(X, dtype=None if isinstance(X, np.ndarray) else object)
        if array.ndim != 2:
            raise InputError(f"the answers have {array.ndim} dimensions: give a table of (items, models)")
        frame = pd.DataFrame(array)
    if frame.shape[1] == 0:
        raise InputError("the table of answers has no column: give one a model")
    if twice := frame.columns[frame.columns.duplicated()].tolist():
        raise InputError(f"two models are called {twice[0]!r}: name each column once")
    return frame


def read_answers(path: str | Path, label: str) -> tuple[pd.DataFrame, pd.Series]:
    """Read a table of answers, one row an item, and the labels in its column ``label``.

    CSV and JSON lines are read as text, so that "1" is "1" in every column and only an empty cell is no answer; a
    column called "item" becomes the index. Parquet is read as it is.

    Raises
    ------
    InputError
        No such file, another kind of file, rows of more fields than the header, or no such column.
    """
    file = Path(path).expanduser()
    if file.suffix not in (".csv", ".parquet", ".jsonl") or not file.is_file():
        raise InputError(f"{file}: give a .csv, .parquet or .jsonl table of answers that is there")
    if file.suffix == ".jsonl":
        rows = []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                rows.append(
                    {
                        name: None if value is None or value != value else str(value)
                        for name, value in json.loads(line).items()
                    }
                )
            except (ValueError, AttributeError) as error:
                raise InputError(f"{file}, line {number}: no object of model and answer ({error})") from None
        frame = pd.DataFrame(rows, dtype=object)
    else:
        frame = read_table(file, text=True)
    if label not in frame.columns:
        raise InputError(f"{file} has no column {label!r}: name the labels; its columns are {', '.join(frame.columns)}")
    if "item" in frame.columns:
        frame = frame.set_index("item")
    return frame.drop(columns=label), frame[label]


@dataclass(frozen=True)
class Answers:
    """Answers as codes into one alphabet.

    Attributes
    ----------
    names : the M models
    alphabet : (A,) what an answer may be
    codes : (n, M); ``len(alphabet)`` stands for no answer
    """

    names: list[Any]
    alphabet: np.ndarray
    codes: Ints

    @property
    def symbols(self) -> int:
        """How many codes there are, that of no answer counted where it occurs."""
        return len(self.alphabet) + int((self.codes == len(self.alphabet)).any())

    def one_hot(self, models: Sequence[int], symbols: int) -> Floats:
        """Return indicators (len(models), symbols, n) of the answers of models."""
        return (self.codes[:, models].T[:, None] == np.arange(symbols)[:, None]).astype(float)


def classes_of(y: Any) -> tuple[np.ndarray, Ints]:
    """Return the sorted classes of labels and each label's index.

    Raises
    ------
    InputError
        Labels missing, or all the same.
    """
    labels = pd.Series(y) if isinstance(y, list | tuple | pd.Series) else pd.Series(np.ravel(y))
    if labels.isna().any():
        raise InputError(f"{int(labels.isna().sum())} of {len(labels)} labels are missing: leave those items out")
    try:
        classes, codes = np.unique(labels.to_numpy(), return_inverse=True)
    except TypeError:
        raise InputError("the labels are of several types: give all as text or all as numbers") from None
    if len(classes) < 2:
        known = f"every label is {classes[0]!r}" if len(classes) else "there is no label"
        raise InputError(f"{known}: nothing is to be told apart, give items of two classes or more")
    return classes, codes.astype(np.int64)


def check_rows(items: int, labels: Ints) -> None:
    """Refuse answers and labels of different length."""
    if items != len(labels):
        raise InputError(f"there are answers to {items} items and {len(labels)} labels: give one label an item")


def encode(
    frame: pd.DataFrame,
    alphabet: np.ndarray | None = None,
    *,
    abstain: bool = False,
    most_missing: float = MOST_MISSING,
) -> Answers:
    """Return answers as codes.

    Parameters
    ----------
    frame
        Answers, (n, M). None, NaN and empty text are no answer.
    alphabet
        What may be answered, such as the classes; ``None`` = all that occurs.
    abstain
        Take an answer outside the alphabet for no answer, instead of refusing it.
    most_missing
        The share of items that a model may leave unanswered.

    Raises
    ------
    InputError
        Answers outside the alphabet (listed with their counts); a model that left more items
        unanswered than it may.

    Examples
    --------
    >>> table = pd.DataFrame({"one": ["a", "b", None], "two": ["a", "a", "b"]})
    >>> encode(table, np.array(["a", "b"])).codes.tolist()
    [[0, 0], [1, 0], [2, 1]]
    """
    columns = [frame.iloc[:, j].astype(object).replace("", None) for j in range(frame.shape[1])]
    if alphabet is None:
        seen = {value for column in columns for value in column[column.notna()].unique()}
        alphabet = np.array(sorted(seen, key=lambda value: (str(type(value)), value)), dtype=object)
    index = pd.Index(alphabet)
    codes = np.column_stack([index.get_indexer(column) for column in columns]).astype(np.int64)
    missing = np.column_stack([column.isna() for column in columns])
    strange = (codes < 0) & ~missing
    if strange.any() and not abstain:
        values = pd.concat([column[rows] for column, rows in zip(columns, strange.T, strict=True)])
        counts = values.map(repr).value_counts()
        listed = ", ".join(f"{value} ({count})" for value, count in counts.head(8).items())
        listed += f" and {len(counts) - 8} more" if len(counts) > 8 else ""
        of = ", ".join(str(name) for name, rows in zip(frame.columns, strange.T, strict=True) if rows.any())
        raise InputError(
            f"answers that are no class: {listed}, of {of}; the classes are {', '.join(map(repr, alphabet.tolist()))}: "
            "mend the answers, or give abstain=True to take them for no answer"
        )
    codes[codes < 0] = len(alphabet)
    for name, share in zip(frame.columns, (codes == len(alphabet)).mean(0), strict=True):
        if share > most_missing:
            raise InputError(f"model {name!r} has no answer to {share:.0%} of the items: leave it out or ask it again")
    return Answers(list(frame.columns), alphabet, codes)
