"""How many two-way (or m-way) choices tell an accuracy from chance."""

from __future__ import annotations

import math

from scipy.special import ndtri

from fairtrial.errors import InputError


def items_needed(accuracy: float, chance: float, *, level: float = 0.05, power: float = 0.8) -> int:
    """Return how many independent items detect ``accuracy`` over ``chance`` in a two-sided test.

    n = ((z_{1 - level/2} sqrt(c (1 - c)) + z_power sqrt(a (1 - a))) / (a - c))^2, rounded up: the normal
    approximation of a one-sample test of a proportion.

    Raises
    ------
    InputError
        Not 0 < chance < accuracy <= 1, or a level or power outside (0, 1).

    Examples
    --------
    >>> items_needed(0.55, 0.5), items_needed(0.6, 0.5), items_needed(0.35, 0.25)
    (783, 194, 157)
    """
    if not 0 < chance < accuracy <= 1:
        raise InputError(f"accuracy={accuracy} over chance={chance}: give 0 < chance < accuracy <= 1")
    if not (0 < level < 1 and 0 < power < 1):
        raise InputError(f"level={level}, power={power}: give both between 0 and 1")
    spread = ndtri(1 - level / 2) * math.sqrt(chance * (1 - chance))
    spread += ndtri(power) * math.sqrt(accuracy * (1 - accuracy))
    return math.ceil((spread / (accuracy - chance)) ** 2)


def detectable_accuracy(items: int, chance: float, *, level: float = 0.05, power: float = 0.8) -> float:
    """Return the least accuracy that ``items`` items detect over ``chance``, by bisection; 1 where none is.

    >>> round(detectable_accuracy(194, 0.5), 3)
    0.6
    """
    low, high = chance, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        enough = middle > chance and items_needed(middle, chance, level=level, power=power) <= items
        low, high = (low, middle) if enough else (middle, high)
    return high
