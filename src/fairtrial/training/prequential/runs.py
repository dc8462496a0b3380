"""Which signal orders a set of runs: correlations with what was to be predicted, and what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.training.prequential.report import PrequentialReport


def rank_runs(
    signals: Sequence[PrequentialReport] | Mapping[str, Sequence[float]],
    target: Sequence[float],
    *,
    given: Sequence[float] | None = None,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Correlate signals of runs with a target such as the gap between test and training error.

    Parameters
    ----------
    signals : reports, or name to (r,) values
        Reports give their regret and code length an example.
    target : (r,)
        One value a run.
    given : (r,), optional
        A nuisance, such as the rate of label noise: the partial correlation takes the means at each of its values out.
    level, draws, seed
        Of the bootstrap over runs.

    Returns
    -------
    DataFrame with a row a signal: ``pearson``, ``spearman``, and ``partial`` where ``given``, each with ``_low`` and
    ``_high``.

    Raises
    ------
    InputError
        With fewer than 8 runs, or lists of different lengths.

    Examples
    --------
    >>> rank_runs({"signal": range(10)}, [v**2 for v in range(10)]).spearman.round(6).tolist()
    [1.0]
    """
    aim = np.asarray(target, dtype=float)
    if isinstance(signals, Mapping):
        table = {name: np.asarray(list(values), dtype=float) for name, values in signals.items()}
    else:
        table = {name: np.array([getattr(r, name) / r.n for r in signals]) for name in ("regret", "code_length")}
    if len(aim) < 8:
        raise InputError(f"{len(aim)} runs: at least 8 are needed for an interval")
    for name, values in table.items():
        if len(values) != len(aim):
            raise InputError(f"{name} has {len(values)} values for {len(aim)} runs")
    kinds: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], float]] = {
        "pearson": lambda a, b, i: correlation(a[i], b[i]),
        "spearman": lambda a, b, i: rank_correlation(a[i], b[i]),
    }
    if given is not None:
        nuisance = np.asarray(given, dtype=float)
        kinds["partial"] = lambda a, b, i: partial_correlation(a[i], b[i], nuisance[i])
    index = generator(seed, "runs").integers(len(aim), size=(draws, len(aim)))
    tail = (1 - level) / 2
    rows = []
    for name, values in table.items():
        row: dict[str, float | str] = {"signal": name}
        for kind, fn in kinds.items():
            row[kind] = fn(values, aim, np.arange(len(aim)))
            drawn = np.array([fn(values, aim, i) for i in index])
            known = drawn[np.isfinite(drawn)]
            row[f"{kind}_low"], row[f"{kind}_high"] = (
                map(float, np.quantile(known, [tail, 1 - tail])) if len(known) else (np.nan, np.nan)
            )
        rows.append(row)
    return pd.DataFrame(rows)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Pearson's correlation, nan where one is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 1e-300 else float("nan")


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's correlation."""
    from scipy.stats import rankdata

    return correlation(rankdata(a), rankdata(b))


def partial_correlation(a: np.ndarray, b: np.ndarray, given: np.ndarray) -> float:
    """Return the correlation of what the means at each value of ``given`` leave of ``a`` and ``b``.

    >>> partial_correlation(np.array([0, 1, 5, 6.0]), np.array([0, 1, 9, 10.0]), np.array([0, 0, 1, 1]))
    1.0
    """
    _, group = np.unique(given, return_inverse=True)
    counts = np.bincount(group)
    left = [v - (np.bincount(group, v) / counts)[group] for v in (a, b)]
    return correlation(*left)
