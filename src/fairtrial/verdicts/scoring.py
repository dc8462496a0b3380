"""Judgements against the truth: what was decided wrongly, what was found, and what intervals covered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fairtrial.trial.declare import AllOf, AnyClaim, Claim
from fairtrial.verdicts.judging import Judgement


@dataclass
class Score:
    """Counts over simulated trials.

    ``false_holds`` and ``false_fails`` count trials in which *any* claim was decided wrongly (a claim whose quantity
    equals its bound is neither true nor refuted: both verdicts on it are wrong); ``found`` true claims that hold;
    ``covered`` and ``length`` are of single claims' intervals, those without end left out of the length.
    """

    trials: int = 0
    false_holds: int = 0
    false_fails: int = 0
    found: list[bool] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)
    length: list[float] = field(default_factory=list)

    def add(self, claims: Sequence[AnyClaim], judgements: Sequence[Judgement], truth: Sequence[float]) -> None:
        """Count one trial."""
        values = iter(truth)
        wrong = set()
        for claim, judgement in zip(claims, judgements, strict=True):
            margin = self._claim(claim, judgement, values)
            wrong |= {judgement.state} & {"HOLDS" if margin <= 0 else "", "FAILS" if margin >= 0 else ""}
            if margin > 0:
                self.found.append(judgement.state == "HOLDS")
        self.trials += 1
        self.false_holds += "HOLDS" in wrong
        self.false_fails += "FAILS" in wrong

    def _claim(self, claim: AnyClaim, judgement: Judgement, values: Iterator[float]) -> float:
        """Return by how much a claim is true, and count what its interval covers."""
        if isinstance(claim, AllOf):
            parts = judgement.parts or (Judgement(judgement.state),) * len(claim.claims)
            return min(self._claim(c, part, values) for c, part in zip(claim.claims, parts, strict=True))
        assert isinstance(claim, Claim)
        value = next(values)
        if judgement.low is not None and judgement.high is not None:
            self.covered.append(judgement.low <= value <= judgement.high)
            if np.isfinite(judgement.high - judgement.low):
                self.length.append(judgement.high - judgement.low)
        return value - claim.above if claim.above is not None else (claim.below or 0.0) - value

    @staticmethod
    def mean(values: Sequence[float]) -> float | None:
        """Return the mean, None of nothing."""
        return float(np.mean(values)) if values else None
