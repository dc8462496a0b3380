"""The exceptions Fairtrial raises on purpose.

Every message says what was wrong, where, and what to do about it, in one line: the command line prints it as it is and
exits with 2 (``--debug`` adds the traceback).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FairtrialError(Exception):
    """Base of all errors that are the caller's to mend.

    ``ends_run`` is set where no cell of a trial can do without what failed: a stage that all candidates share.
    """

    ends_run = False


class InputError(FairtrialError, ValueError):
    """A value, file or folder cannot be used as it is."""


class UnknownNameError(FairtrialError, KeyError):
    """A name is not among those that exist; the message suggests the nearest and lists what is short enough to list.

    >>> str(UnknownNameError("trial", "prunning", ["pruning", "drafting"]))
    "there is no trial 'prunning'; did you mean 'pruning'? Known: drafting, pruning"
    """

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        listed = "" if near and len(names) > 25 else f" Known: {', '.join(names) or 'none'}"
        super().__init__(f"there is no {kind} {str(name)!r}{hint}{listed}")

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0])

    def __reduce__(self) -> tuple:  # crosses a process boundary as its message
        return _unknown_name, (self.args[0],)


def _unknown_name(message: str) -> UnknownNameError:
    error = UnknownNameError.__new__(UnknownNameError)
    error.args = (message,)
    return error


class MissingExtraError(FairtrialError, ImportError):
    """An optional dependency is not installed."""

    ends_run = True

    def __init__(self, extra: str, module: str | None = None) -> None:
        what = f"{module} is not installed" if module else f"the {extra} extra is not installed"
        super().__init__(f"{what}: run  pip install 'fairtrial[{extra}]'")
        self.extra = extra

    def __reduce__(self) -> tuple:
        return _missing_extra, (str(self), self.extra)


def _missing_extra(message: str, extra: str) -> MissingExtraError:
    error = MissingExtraError(extra)
    error.args = (message,)
    return error


class MissingSampleError(FairtrialError, FileNotFoundError):
    """A trial's embedded default has not been fetched."""

    def __init__(self, sample: str, trial: str | None = None) -> None:
        super().__init__(f"the sample {sample!r} is not here: run  fairtrial samples get {trial or sample}")
