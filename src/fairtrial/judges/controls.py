"""Whether a judge can judge: it is shown items whose answer is known before it decides anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from fairtrial.chat.replies import ChatError
from fairtrial.errors import InputError
from fairtrial.judges.asking import Judge, rate_many
from fairtrial.stats import Interval, auc_influence, mean_interval
from fairtrial.stats.intervals import Binomial

LEAST_PAIRS = 6  # six of six right exclude chance at 95%, five of five do not
CHANCE = 0.5


@dataclass(frozen=True, slots=True)
class Control:
    """Two prompts that differ in one thing: the item of the first is correct, that of the second was corrupted."""

    correct: str
    corrupted: str


class Verdict(BaseModel):
    """Whether the item is correct."""

    correct: bool = Field(description="whether the item is correct")
    confidence: float = Field(ge=0, le=1, description="how sure you are of that, from 0 to 1")

    @property
    def probability(self) -> float:
        """Of the item being correct, as the judge sees it."""
        return (1 + self.confidence) / 2 if self.correct else (1 - self.confidence) / 2


@dataclass(frozen=True, slots=True)
class Reliability:
    """What a judge can tell on items whose answer is known; print it beside whatever the judge decides.

    Attributes
    ----------
    accuracy : float
        Share of right verdicts; a lost reply is a wrong one.
    interval : Interval
        Of the accuracy, pairs being the units.
    kappa : float
        Cohen's kappa with the truth, 2 accuracy - 1 as half of the items are correct.
    auc : float
        Chance that a correct item is scored above a corrupted one, ties half; a lost reply is on the wrong side of all.
    lost : int
        Replies that could not be used.
    usable : bool
        Whether the interval lies above chance, 1/2. If not, no verdict may rest on this judge.
    reason : str
        Why it is not usable; empty if it is.
    """

    accuracy: float
    interval: Interval
    kappa: float
    auc: float
    lost: int
    usable: bool
    reason: str

    def __str__(self) -> str:
        share = f"{self.accuracy:.2f} [{self.interval.low:.2f}, {self.interval.high:.2f}]"
        said = "usable" if self.usable else f"not usable: {self.reason}"
        return (
            f"judge right on {share} of known items ({self.interval.n_cells} pairs), kappa {self.kappa:.2f}, "
            f"AUC {self.auc:.2f}, {self.lost} replies lost: {said}"
        )


def reliability(
    judge: Judge,
    controls: Sequence[Control],
    *,
    schema: type[BaseModel] = Verdict,
    correct: Callable[[Any], bool] = lambda verdict: verdict.correct,
    score: Callable[[Any], float] = lambda verdict: verdict.probability,
    level: float = 0.95,
) -> Reliability:
    """Measure a judge on correct items and their corrupted twins.

    Ask as the evaluation itself will ask: the same prompt, schema and judge. The twin should be wrong by what the
    evaluation must notice, and no longer or shorter than the item.

    Parameters
    ----------
    judge
        Any callable from prompt to reply.
    controls
        At least 6 pairs, better 20 or more.
    schema, correct, score
        What is asked for, whether it calls the item correct, and how much it speaks for that: for a rating from 1 to
        5, ``schema=Grade, correct=lambda grade: grade.score > 3, score=lambda grade: grade.score``.
    level
        Of the interval.

    Raises
    ------
    InputError
        No controls.

    Examples
    --------
    >>> controls = [Control(f"Is {n} + 1 = {n + 1}?", f"Is {n} + 1 = {n + 2}?") for n in range(8)]
    >>> print(reliability(lambda prompt: '{"correct": true, "confidence": 0.9}', controls))
    judge right on 0.50 [0.16, 0.84] of known items (8 pairs), kappa 0.00, AUC 0.50, 0 replies lost:
    not usable: the interval of its accuracy does not lie above chance, 0.5
    """
    if not controls:
        raise InputError("a judge's reliability needs controls: give pairs of a correct and a corrupted item")
    prompts = [prompt for control in controls for prompt in (control.correct, control.corrupted)]
    ratings = rate_many(judge, prompts, schema)
    truth = np.tile([True, False], len(controls))  # (2 K,)
    lost = np.array([isinstance(one, ChatError) for one in ratings])
    called = np.array([not isinstance(one, ChatError) and bool(correct(one)) for one in ratings])
    right = ~lost & (called == truth)
    scores = np.array([0.0 if isinstance(one, ChatError) else float(score(one)) for one in ratings])
    scores[lost & truth], scores[lost & ~truth] = scores.min() - 1, scores.max() + 1
    interval = _pair_interval(right.reshape(-1, 2).mean(axis=1), level)
    usable = interval.low > CHANCE and len(controls) >= LEAST_PAIRS
    if usable:
        reason = ""
    elif len(controls) < LEAST_PAIRS:
        reason = f"{len(controls)} pairs of controls cannot exclude chance, give {LEAST_PAIRS} or more"
    else:
        reason = f"the interval of its accuracy does not lie above chance, {CHANCE:g}"
    accuracy = float(right.mean())
    auc = float(auc_influence(truth, scores).mean())
    return Reliability(accuracy, interval, 2 * accuracy - 1, auc, int(lost.sum()), usable, reason)


def _pair_interval(right: np.ndarray, level: float) -> Interval:
    """Interval of the mean over pairs, whose two verdicts may err together; the exact one where all pairs are alike."""
    pairs, mean = len(right), float(right.mean())
    if pairs >= LEAST_PAIRS and np.ptp(right) > 0:
        return mean_interval(right, level=level)
    law = Binomial(int(right.sum()), pairs)
    return Interval(mean, mean * (1 - mean) / pairs, np.inf, pairs, law, level)
