"""Tables from the files of users, read once and checked."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairtrial.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def read_table(path: str | Path, *, text: bool = False) -> pd.DataFrame:
    """Read a CSV or Parquet file.

    Parameters
    ----------
    path
        The file.
    text
        Leave the fields of a CSV as they are written: "1" is no number, and only an empty field is missing.

    Raises
    ------
    InputError
        There is no such file, its name ends otherwise, it cannot be read, it has no rows, rows of a CSV have more
        fields than its header, which would shift every column by one, or two of its columns have one name.
    """
    import pandas as pd

    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    if file.suffix not in (".csv", ".parquet"):
        raise InputError(f"{file}: give a .csv or .parquet file")
    try:
        plain: dict[str, Any] = {"dtype": str, "keep_default_na": False, "na_values": [""]} if text else {}
        frame = pd.read_csv(file, **plain) if file.suffix == ".csv" else pd.read_parquet(file)
    except (ValueError, OSError) as error:  # pandas' and pyarrow's own errors are of these
        raise InputError(f"{file} cannot be read: {str(error).splitlines()[0]}") from None
    if file.suffix == ".csv" and not isinstance(frame.index, pd.RangeIndex):
        raise InputError(f"{file}: rows have more fields than the header: name every column")
    if file.suffix == ".csv":
        with file.open(newline="", encoding="utf-8-sig") as stream:
            header = next(csv.reader(stream))
        if twice := [name for name, count in Counter(header).items() if count > 1]:
            raise InputError(f"{file}: two columns are called {twice[0]!r}: name each once")
    if frame.empty:
        raise InputError(f"{file} has no rows")
    return frame
