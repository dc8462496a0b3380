"""Checks of the numbers that many objects take as options, where a wrong one would only show as a wrong result.

>>> checked_count(3, "folds", least=2)
3
>>> checked_number(float("nan"), "margin", least=0)
Traceback (most recent call last):
    ...
fairtrial.errors.InputError: margin=nan: give a finite number of at least 0
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from fairtrial.errors import InputError


def checked_count(value: Any, name: str, *, least: int = 1, most: int | None = None) -> int:
    """Return a whole number between ``least`` and ``most``, both included; refuse booleans and fractions.

    Raises
    ------
    InputError
        Naming the option, its value and what to give.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= least and (most is None or number <= most):
            return number
    span = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InputError(f"{name}={value!r}: give a whole number {span}")


def checked_number(
    value: Any,
    name: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """Return a finite number within bounds, ``least`` and ``most`` included, ``above`` and ``below`` not.

    Raises
    ------
    InputError
        Naming the option, its value and what to give; booleans, text, nan and infinities are none.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(number := float(value)):
        low = (least is None or number >= least) and (above is None or number > above)
        if low and (most is None or number <= most) and (below is None or number < below):
            return number
    said = {"of at least": least, "above": above, "of at most": most, "below": below}
    span = " and ".join(f"{words} {bound:g}" for words, bound in said.items() if bound is not None)
    raise InputError(f"{name}={value!r}: give a finite number {span}".rstrip())
