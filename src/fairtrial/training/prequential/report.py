"""What a run's code says: its length, the regret against the final model, and which examples were expensive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from fairtrial.errors import InputError
from fairtrial.training.prequential.bounds import Bound, prequential_bound

INTERPOLATING = 0.05  # nats: the mean final loss below which a run fits its labels


@dataclass(frozen=True)
class PrequentialReport:
    """The code of a run's labels, in nats.

    Attributes
    ----------
    code_length : float
        C, the sum of the losses at which each example was predicted before it was learned from: the length of a code
        of the labels given the inputs (Dawid 1984).
    regret : float
        R = C minus the sum of the final model's losses on the same examples. Near interpolation the description length
        of the trained parameters is at most about the expected regret.
    per_example : DataFrame
        A row an example: ``example``, ``arrival`` (its place in the order), ``loss_first``, ``loss_final``,
        ``correct`` (by the final model); the expensive ones head a search for wrong labels.
    num_classes : int or None
        None for a Gaussian code of real targets.
    mean_final_loss, train_error : float
        Of the final model, unmixed; the error is nan for real targets.
    trajectory : float or None
        Sum over all steps of the batch's mean loss before the step less the same at the final model (a rival called
        training speed; no code after the first epoch).
    sum_of_losses : float or None
        Sum over all steps of the batch's mean loss (Ru et al. 2020).
    entropy : float or None
        Known entropy of a label given its input, in nats: no code can beat it.
    notes : tuple of str
    """

    code_length: float
    regret: float
    per_example: pd.DataFrame = field(repr=False)
    num_classes: int | None
    mean_final_loss: float
    train_error: float
    trajectory: float | None = None
    sum_of_losses: float | None = None
    entropy: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Number of examples coded."""
        return len(self.per_example)

    @property
    def interpolating(self) -> bool:
        """Whether the mean final loss is below 0.05 nats: only then is the regret a description length."""
        return self.mean_final_loss < INTERPOLATING

    @property
    def bits(self) -> float:
        """The code length in bits."""
        return self.code_length / math.log(2)

    @property
    def compression_ratio(self) -> float:
        """Code length over that of the uniform code, ``n log K``; nan for real targets."""
        return self.code_length / (self.n * math.log(self.num_classes)) if self.num_classes else math.nan

    @property
    def beats_entropy_by(self) -> float | None:
        """How far C lies below ``n`` times the known entropy, in standard errors; above 3 something is wrong."""
        if self.entropy is None:
            return None
        spread = float(self.per_example["loss_first"].std(ddof=1)) * math.sqrt(self.n)
        return (self.n * self.entropy - self.code_length) / spread if spread else math.nan

    def bound(self, delta: float = 0.05) -> Bound:
        """Return PAC-MDL bounds with the regret for a description length, or the code length without interpolation.

        Indicative only: the regret of one run is one draw of what bounds through its expectation.
        """
        if self.num_classes is None or math.isnan(self.train_error):
            raise InputError(
                "the bounds are on 0-1 errors: none for real targets, nor for a table without the column correct"
            )
        description = self.regret if self.interpolating else self.code_length
        return prequential_bound(description, self.n, self.train_error, num_classes=self.num_classes, delta=delta)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers, without the table, as plain values."""
        bound = None if self.num_classes is None or math.isnan(self.train_error) else self.bound()
        return {
            "n": self.n, "num_classes": self.num_classes, "code_length": self.code_length, "regret": self.regret,
            "bits": self.bits, "compression_ratio": self.compression_ratio, "mean_final_loss": self.mean_final_loss,
            "train_error": self.train_error, "interpolating": self.interpolating, "trajectory": self.trajectory,
            "sum_of_losses": self.sum_of_losses, "entropy": self.entropy, "notes": list(self.notes),
            "bound": None if bound is None else {
                "occam": bound.occam, "kl": bound.kl, "realizable": bound.realizable, "vacuous": bound.vacuous,
                "delta": bound.delta,
            },
        }  # fmt: skip

    def __str__(self) -> str:
        """Return a paragraph for people."""
        lines = [
            f"{self.n} examples coded in {self.code_length:.1f} nats ({self.code_length / self.n:.3f} each"
            + (f", {self.compression_ratio:.0%} of the uniform code)" if self.num_classes else ")"),
            f"regret {self.regret:.1f} nats; the final model's mean loss is {self.mean_final_loss:.3f}: "
            + (
                "interpolating"
                if self.interpolating
                else "not interpolating, so that C and not R bounds what was learned"
            ),
        ]
        if self.num_classes and not math.isnan(self.train_error):
            bound = self.bound()
            best = min(b for b in (bound.occam, bound.kl, bound.realizable) if b is not None)
            lines.append(f"test error at most {best:.3f} (indicative{', vacuous' if bound.vacuous else ''})")
        if self.entropy is not None:
            lines.append(f"entropy of the labels {self.n * self.entropy:.1f} nats, which no code beats")
        return "\n".join([*lines, *self.notes])


def prequential_report(
    table: pd.DataFrame, *, num_classes: int | None, entropy: float | None = None
) -> PrequentialReport:
    """Return the report of logged losses.

    Parameters
    ----------
    table : DataFrame
        Columns ``example``, ``loss_first`` (before the example was learned from) and ``loss_final`` (of the final
        model), in nats; ``correct`` and ``arrival`` where known.
    num_classes, entropy
        As in :class:`PrequentialReport`.

    Raises
    ------
    InputError
        If a column is missing, an example occurs twice, or a loss is not finite (the example is named).

    Examples
    --------
    >>> table = pd.DataFrame({"example": [0, 1], "loss_first": [0.7, 0.9], "loss_final": [0.1, 0.1]})
    >>> round(prequential_report(table, num_classes=2).regret, 6)
    1.4
    """
    if lacking := {"example", "loss_first", "loss_final"} - set(table):
        raise InputError(f"the table lacks {', '.join(sorted(lacking))}")
    if len(table) == 0:
        raise InputError("the table has no rows: nothing was coded")
    if num_classes is not None and num_classes < 2:
        raise InputError(f"num_classes={num_classes}: at least 2, or None for real targets")
    for name in {"loss_first", "loss_final", "correct"} & set(table):
        if not pd.api.types.is_numeric_dtype(table[name]) and not pd.api.types.is_bool_dtype(table[name]):
            raise InputError(f"the column {name} holds {table[name].dtype}, not numbers")
    if "correct" in table and not table["correct"].dropna().isin([0, 1]).all():
        raise InputError("the column correct holds something else than 0 and 1")
    if (twice := table["example"].duplicated()).any():
        raise InputError(f"example {table['example'][twice].iloc[0]} occurs twice: each is coded once")
    for name in ("loss_first", "loss_final"):
        if not (fine := np.isfinite(table[name].to_numpy(dtype=float))).all():
            example = table["example"].to_numpy()[~fine][0]
            raise InputError(f"{name} of example {example} is not finite: was the training diverging?")
    table = table.reset_index(drop=True)
    if "arrival" not in table:
        table["arrival"] = np.arange(len(table))
    correct = table["correct"].to_numpy(dtype=float) if "correct" in table else np.full(len(table), np.nan)
    final = float(table.get("loss_raw", table["loss_final"]).mean())
    code = float(table["loss_first"].sum())
    return PrequentialReport(
        code_length=code,
        regret=code - float(table["loss_final"].sum()),
        per_example=table.drop(columns="loss_raw", errors="ignore"),
        num_classes=num_classes,
        mean_final_loss=final,
        train_error=float(1 - correct.mean()),
        entropy=entropy,
    )


@dataclass(frozen=True)
class OrderAverage:
    """Mean code length and regret over data orders; differences below the spread are not differences."""

    code_length: float
    code_spread: float
    regret: float
    regret_spread: float
    orders: int


def average_orders(reports: Sequence[PrequentialReport]) -> OrderAverage:
    """Return mean and standard deviation over the reports of runs that differ in data order only.

    Raises
    ------
    InputError
        With fewer than two reports, or reports of different examples.
    """
    if len(reports) < 2 or len({(r.n, r.num_classes) for r in reports}) > 1:
        raise InputError("at least two reports, on the same examples and classes, are needed")
    codes, regrets = (np.array([getattr(r, name) for r in reports]) for name in ("code_length", "regret"))
    return OrderAverage(
        float(codes.mean()), float(codes.std(ddof=1)), float(regrets.mean()), float(regrets.std(ddof=1)), len(reports)
    )
