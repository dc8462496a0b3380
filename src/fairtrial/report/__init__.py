"""The page of a trial, or of many: one HTML file that needs no network, no scripts and nothing beside it.

It is made of results only (``result.json``, ``cells.parquet``, ``items.parquet``), never of the trial that gave them,
so that the page of an old result can be written again at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fairtrial.cards import Card

__all__ = ["write_report"]


def write_report(folders: Sequence[Path], out: Path, *, card_lookup: Callable[[str], Card] | None = None) -> Path:
    """Write the page of the trials whose results are in ``folders`` to ``out`` and return ``out``.

    One folder gives the page of that trial; several give one page with a table of all verdicts and a section a trial.
    The page is smaller than 500 kB: where results are larger it says what it leaves out and where that is.

    Parameters
    ----------
    folders : each with a ``result.json``; ``cells.parquet`` and ``items.parquet`` are used where they are there.
    out : the HTML file; its folder is made if need be, an old file is replaced.
    card_lookup : finds a trial's card by its name, as :func:`fairtrial.cards.find` does; with it the page says when
        to use a method. A trial that has no card is shown without.

    Raises
    ------
    InputError
        If there is no folder, one has no readable results, or ``out`` cannot be written.

    Examples
    --------
    >>> write_report([Path("runs/nowhere")], Path("report.html"))
    Traceback (most recent call last):
    fairtrial.errors.InputError: runs/nowhere/result.json cannot be read: give a folder that ...
    """
    from fairtrial.report.page import write

    return write(folders, out, card_lookup)
