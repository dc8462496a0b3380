"""Rank proofs and their authors: every axis apart, correctness apart, models on the problems that both have solved.

A model that solves only easy problems writes shorter proofs. So two models are compared on the problems that both
solved, and each model's mean is also given with weights 1 / P(solved), P from the other models' solve rates and the
weights at most 10: what the mean might be had it solved them all alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from fairtrial import stats
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.proof_quality.adaptive import Adaptivity, adaptivity
from fairtrial.evaluation.proof_quality.concise import MOST_CALLS, Verifier, conciseness
from fairtrial.evaluation.proof_quality.diverse import diversity
from fairtrial.evaluation.proof_quality.ease import computational_ease
from fairtrial.evaluation.proof_quality.judging import (
    AGREES,
    grades,
    judge_reliability,
    judge_verifier,
    judged_correct,
    judged_techniques,
)
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.simplicity import (
    Encoder,
    RememberingEncoder,
    Taxonomy,
    cognitive_simplicity,
    masked,
)
from fairtrial.judges import Judge, Reliability

AXES = ("conciseness", "ease", "simplicity", "diversity", "adaptivity")
LEAST_COMMON = 5  # problems that two models must both have solved to be compared
MOST_WEIGHT = 10.0


@dataclass(frozen=True, eq=False)
class QualityTable:
    """Scores of proofs, and of the models that wrote them.

    Attributes
    ----------
    frame : one row a proof: problem, model, requested, correct, tokens, and for correct proofs brevity (-log2 of the
        length over the shortest), used_share, ease, simplicity; with a usable judge or a verifier also necessary_share,
        and with a judge ease_judged (1-5) and simplicity_judged.
    sets : one row a model and problem with two or more correct proofs: model, problem, proofs, vendi, distinct;
        ``vendi`` is rarefied to the number of ``proofs`` that all these models have.
    adaptivity : of each model that was asked for techniques.
    reliability : of the judge on known proofs; ``None`` without a judge.
    lost : replies of the judge that could not be used.
    """

    frame: pd.DataFrame
    sets: pd.DataFrame
    adaptivity: dict[str, Adaptivity] = field(default_factory=dict)
    reliability: Reliability | None = None
    lost: int = 0

    @property
    def metrics(self) -> list[str]:
        """The scores that were measured, correctness apart."""
        names = ["brevity", "used_share", "necessary_share", "ease", "ease_judged", "simplicity", "simplicity_judged"]
        return [name for name in names if name in self.frame and self.frame[name].notna().any()] + (
            ["vendi"] if len(self.sets) else []
        )

    @property
    def models(self) -> list[str]:
        """The models, sorted."""
        return sorted(self.frame["model"].unique())

    def by_problem(self, metric: str) -> pd.DataFrame:
        """Return a metric's mean over each model's correct proofs of each problem, (problems, models), NaN unsolved.

        ``correct`` gives the share of correct proofs.
        """
        if metric not in (*self.metrics, "correct"):
            raise UnknownNameError("metric", metric, [*self.metrics, "correct"])
        rows = self.sets if metric == "vendi" else self.frame
        return rows.astype({metric: float}).pivot_table(index="problem", columns="model", values=metric, aggfunc="mean")

    def summary(self, *, level: float = 0.95) -> pd.DataFrame:
        """Return one row a model and metric: mean, low, high, problems, and the weighted mean with its interval.

        The interval generalises over problems; it is NaN for a single one.
        """
        solved = self.by_problem("correct")
        rows = []
        for metric in ("correct", *self.metrics):
            values = self.by_problem(metric)
            for model in self.models:
                known = values[model].dropna() if model in values else pd.Series(dtype=float)
                if not len(known):
                    continue
                mean, low, high = _mean(known.to_numpy(), level)
                weighted = (math.nan,) * 3
                others = solved.drop(columns=model)
                if metric != "correct" and others.shape[1]:
                    chance = others.loc[known.index].mean(axis=1).fillna(0).to_numpy()
                    weighted = _weighted_mean(known.to_numpy(), 1 / np.maximum(chance, 1 / MOST_WEIGHT), level)
                rows.append((model, metric, mean, low, high, len(known), *weighted))
        names = ["model", "metric", "mean", "low", "high", "problems", "weighted", "weighted_low", "weighted_high"]
        return pd.DataFrame(rows, columns=names)

    def compare(self, one: str, other: str, *, level: float = 0.95) -> pd.DataFrame:
        """Return the difference of two models, one row a metric: difference (one - other), low, high, problems, state.

        Only problems that both have solved count, paired. ``state`` is "higher", "lower" or "undecided"; metrics are
        not corrected for each other.

        Raises
        ------
        UnknownNameError
            A model that wrote none of the proofs.
        InputError
            Fewer than five common problems.
        """
        for name in (one, other):
            if name not in self.models:
                raise UnknownNameError("model", name, self.models)
        common = self.frame[self.frame["correct"]].groupby("model")["problem"].agg(set)
        shared = common.get(one, set()) & common.get(other, set())
        if len(shared) < LEAST_COMMON:
            raise InputError(
                f"{one} and {other} have both solved {len(shared)} problems: {LEAST_COMMON} are needed for a comparison"
            )
        rows = []
        for metric in self.metrics:
            values = self.by_problem(metric)
            if one not in values or other not in values:
                continue
            difference = (values[one] - values[other]).dropna().to_numpy()
            if len(difference) < LEAST_COMMON:
                continue
            mean, low, high = _mean(difference, level)
            state = "higher" if low > 0 else "lower" if high < 0 else "undecided"
            rows.append((metric, mean, low, high, len(difference), state))
        return pd.DataFrame(rows, columns=["metric", "difference", "low", "high", "problems", "state"])

    def pareto(self, metric: str) -> list[str]:
        """Return the models that no other beats in both correctness and ``metric`` (means, as in :meth:`summary`)."""
        means = self.summary().pivot_table(index="model", columns="metric", values="mean")
        if metric not in means:
            raise UnknownNameError("metric", metric, self.metrics)
        points = means[["correct", metric]].dropna()
        beaten = [
            bool(((points >= row).all(axis=1) & (points > row).any(axis=1)).any()) for _, row in points.iterrows()
        ]
        return [str(model) for model, out in zip(points.index, beaten, strict=True) if not out]

    def composite(self, weights: dict[str, float]) -> pd.Series:
        """Return each model's weighted mean of metrics, only where it is asked for: the axes are not commensurable."""
        means = self.summary().pivot_table(index="model", columns="metric", values="mean")
        for metric in weights:
            if metric not in means:
                raise UnknownNameError("metric", metric, ["correct", *self.metrics])
        shares = pd.Series(weights) / sum(weights.values())
        return means[list(weights)].mul(shares, axis=1).sum(axis=1, skipna=False)

    def __str__(self) -> str:
        lines = [self.summary().to_string(index=False, float_format="{:.3f}".format)]
        for metric in self.metrics:
            lines.append(f"best of correctness and {metric}: {', '.join(self.pareto(metric))}")
        if self.reliability is not None:
            lines.append(str(self.reliability))
            if 2 * self.reliability.accuracy - 1 < AGREES:
                lines.append(f"what the judge decided is not to be relied on (kappa below {AGREES:g})")
        return "\n".join(lines)


def rank_proofs(
    proofs: Iterable[Proof],
    *,
    judge: Judge | None = None,
    metrics: Sequence[str] | Literal["all"] = "all",
    verifier: Verifier | None = None,
    taxonomy: Taxonomy | str | Path | None = None,
    encoder: Encoder | None = None,
    force: bool = False,
    max_calls: int = MOST_CALLS,
    controls: int = 20,
    votes: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> QualityTable:
    """Return the quality of proofs, axis by axis.

    Parameters
    ----------
    judge : asked for correctness where it is not known, necessary steps, ease and techniques, after it has told the
        bank's proofs from corrupted ones; one that cannot is not asked anything, and the table says so.
    metrics : some of conciseness, ease, simplicity, diversity, adaptivity, or all.
    verifier : decides correctness where it is not known, and necessary steps; goes before the judge.
    taxonomy, encoder : as in :func:`.cognitive_simplicity` and :func:`.diversity`.
    force : score proofs whose correctness nobody knows as if they were correct.
    max_calls : of verifier or judge for the necessary steps of one proof.
    controls : known proofs that the judge is tried on.
    votes : replies of the judge to each question: 1 at temperature 0, 3 at 0.7.
    progress : called with proofs done and in all.

    Raises
    ------
    InputError
        No proofs; or correctness is unknown and there is no verifier, no usable judge and no ``force``.
    UnknownNameError
        A metric or a requested technique that does not exist.

    Notes
    -----
    Source: ProofRank names the axes; formulas and comparison are this library's. A wrong proof is not scored and
    changes no other score.

    Examples
    --------
    >>> texts = {"m": "Let $a = 1$. Hence $a > 0$.", "k": "Let $a = 1$. Recall that $7$ is prime. Hence $a > 0$."}
    >>> table = rank_proofs(Proof(text, "x", model=model, correct=True) for model, text in texts.items())
    >>> table.frame.set_index("model")["used_share"].round(2).to_dict(), table.pareto("used_share")
    ({'m': 1.0, 'k': 0.62}, ['m'])
    """
    given = list(proofs)
    if not given:
        raise InputError("there are no proofs to rank: give one or more")
    wanted = set(AXES if metrics == "all" else metrics)
    for name in wanted - set(AXES):
        raise UnknownNameError("metric", name, AXES)
    known = taxonomy if isinstance(taxonomy, Taxonomy) else Taxonomy(taxonomy)
    for requested in {proof.requested for proof in given} - {None} if "adaptivity" in wanted else ():
        known[str(requested)]  # refused before a judge is asked
    remembering = None if encoder is None else RememberingEncoder(encoder)
    if remembering is not None:  # one batch
        remembering([sentence for proof in given if not proof.formal for sentence in masked(proof)])
    reliable = None if judge is None else judge_reliability(judge, count=controls, seed=seed)
    asked = judge if reliable is not None and reliable.usable else None
    given, lost = _with_correctness(given, verifier, asked, reliable, force, votes)
    right = [proof for proof in given if proof.correct]
    judged, lost_ratings = ({}, 0) if asked is None else _ratings(asked, right, wanted, known, votes)
    decide = verifier or (None if asked is None else judge_verifier(asked, votes=votes))

    shortest: dict[str, int] = {}
    for proof in right:
        shortest[proof.problem] = min(proof.length, shortest.get(proof.problem, proof.length))
    rows = []
    for done, proof in enumerate(given, start=1):
        row: dict[str, Any] = {
            "problem": proof.problem,
            "model": proof.model or "unknown",
            "requested": proof.requested,
            "correct": proof.correct,
            "tokens": proof.length,
        }
        if proof.correct:
            reference = shortest[proof.problem]
            if "conciseness" in wanted:
                concise = conciseness(proof, reference_length=reference, verifier=decide, max_calls=max_calls)
                row |= {"brevity": concise.brevity, "used_share": concise.used_share}
                row |= {} if decide is None else {"necessary_share": concise.necessary_share}
            if "ease" in wanted and not proof.formal:
                row["ease"] = computational_ease(proof, reference_length=reference).score
            if "simplicity" in wanted and (not proof.formal or proof.library is not None):
                row["simplicity"] = cognitive_simplicity(proof, known, encoder=remembering).score
            row |= judged.get(id(proof), {})
        rows.append(row)
        if progress is not None:
            progress(done, len(given))
    sets = _sets(right if "diversity" in wanted else [], known, remembering, seed)
    followed = _adaptivities(given, known, remembering) if "adaptivity" in wanted else {}
    return QualityTable(pd.DataFrame(rows), sets, followed, reliable, lost + lost_ratings)


def _with_correctness(
    proofs: Sequence[Proof],
    verifier: Verifier | None,
    judge: Judge | None,
    reliable: Reliability | None,
    force: bool,
    votes: int,
) -> tuple[list[Proof], int]:
    """Return the proofs, each known to be correct or not, and how many replies were lost on the way."""
    unknown = [proof for proof in proofs if proof.correct is None]
    if not unknown:
        return list(proofs), 0
    verdicts: list[bool | None]
    if verifier is not None:
        verdicts = [bool(verifier(proof)) for proof in unknown]
    elif judge is not None:
        verdicts = judged_correct(judge, unknown, votes=votes)
    elif force:
        verdicts = [True] * len(unknown)
    else:
        first, why = unknown[0].problem, f"; judge not usable: {reliable.reason}" if reliable is not None else ""
        raise InputError(
            f"correct is not known of {len(unknown)} of {len(proofs)} proofs, of problem {first!r} first{why}: give it "
            "in the rows, a verifier or a judge, or force=True to take them as correct"
        )
    decided = iter(verdicts)
    marked = [proof.marked(bool(next(decided))) if proof.correct is None else proof for proof in proofs]
    return marked, sum(verdict is None for verdict in verdicts)


def _ratings(
    judge: Judge, right: Sequence[Proof], wanted: set[str], taxonomy: Taxonomy, votes: int
) -> tuple[dict[int, dict[str, float]], int]:
    """Return a judge's scores of proofs by the proof's identity, and how many replies were lost."""
    texts = [proof for proof in right if not proof.formal]
    scores: dict[int, dict[str, float]] = {id(proof): {} for proof in texts}
    lost = 0
    if "ease" in wanted:
        for proof, grade in zip(texts, grades(judge, texts, votes=votes), strict=True):
            scores[id(proof)]["ease_judged"] = math.nan if grade is None else grade
            lost += grade is None
    if "simplicity" in wanted:
        for proof, tags in zip(texts, judged_techniques(judge, texts, taxonomy), strict=True):
            score = math.nan if tags is None else cognitive_simplicity(proof, taxonomy, tags=tags).score
            scores[id(proof)]["simplicity_judged"] = score
            lost += tags is None
    return scores, lost


def _sets(right: Sequence[Proof], taxonomy: Taxonomy, encoder: Encoder | None, seed: int) -> pd.DataFrame:
    """Return the diversity of each model's correct proofs of each problem, rarefied to what all have."""
    groups: dict[str, dict[str, list[Proof]]] = {}
    for proof in right:
        groups.setdefault(proof.problem, {}).setdefault(proof.model or "unknown", []).append(proof)
    rows = []
    for problem, models in groups.items():
        several = {model: found for model, found in models.items() if len(found) > 1}
        size = min(map(len, several.values()), default=0)
        for model, found in several.items():
            score = diversity(found, encoder=encoder, taxonomy=taxonomy, size=size, seed=seed)
            rows.append((model, problem, size, score.vendi, score.distinct))
    return pd.DataFrame(rows, columns=["model", "problem", "proofs", "vendi", "distinct"])


def _adaptivities(proofs: Sequence[Proof], taxonomy: Taxonomy, encoder: Encoder | None) -> dict[str, Adaptivity]:
    """Return the adaptivity of each model whose requests can be judged."""
    found = {}
    for model in sorted({proof.model for proof in proofs if proof.model and proof.requested}):
        asked: dict[str | None, list[Proof]] = {}
        for proof in proofs:
            if proof.model == model:
                asked.setdefault(proof.requested, []).append(proof)
        try:
            found[model] = adaptivity(asked, known=proofs, taxonomy=taxonomy, encoder=encoder)
        except InputError:  # nothing it was asked for is feasible, or nothing was written freely
            continue
    return found


def _mean(values: np.ndarray, level: float) -> tuple[float, float, float]:
    """Return mean, low and high over problems; no interval for one problem."""
    if len(values) < 2:
        return float(values.mean()), math.nan, math.nan
    if np.ptp(values) == 0:  # an interval of no width would claim what was not seen
        return float(values[0]), math.nan, math.nan
    interval = stats.mean_interval(values, level=level)
    return interval.mean, interval.low, interval.high


def _weighted_mean(values: np.ndarray, weights: np.ndarray, level: float) -> tuple[float, float, float]:
    """Return the weighted mean with an interval from its influence, w (x - mean) / mean(w)."""
    mean = float(weights @ values / weights.sum())
    influence = mean + weights * (values - mean) / weights.mean()
    _, low, high = _mean(influence, level)
    return mean, low, high
