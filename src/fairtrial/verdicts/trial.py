"""The trial of the verdicts themselves: how often a HOLDS or a FAILS is wrong, and what is found.

A cell simulates many trials of one scenario and judges each; a replicate is a block of them with seeds of its own. The
bounds were written down before the first run: 2.5% on each side by theory, half as often again allowed where theory is
exact; twice as often, and coverage of .90, where the statistics are approximate (crossed runs, splits of one data set);
seven times for skewed differences, as the note on such verdicts says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, field_validator

from fairtrial.errors import UnknownNameError
from fairtrial.seeds import generator
from fairtrial.trial.declare import (
    AllOf,
    Candidate,
    Cell,
    Claim,
    Factor,
    Metric,
    Part,
    Trial,
    all_of,
    difference,
    level,
    report,
)
from fairtrial.verdicts import judging
from fairtrial.verdicts.scoring import Score
from fairtrial.verdicts.simulation import POWER, SCENARIOS

NOMINAL = 0.025
EXACT, ROUGH, SKEWED = 1.5 * NOMINAL, 2 * NOMINAL, 7 * NOMINAL

GAUSSIAN = ("3 replicates", "5 replicates", "10 replicates", "30 replicates")
FOLDS = ("8 folds of 2 fits", "8 folds of 5 fits")
SHARED = (
    "5 runs on the same items",
    "new items for 3 models",
    "10 splits of one data set",
    "10 splits known by means",
)
LOSSES = (
    "losses at random",
    "losses where it is worst",
    "losses where it is worst (claim below)",
    "losses where it is worst (same items)",
)
PEEKING = ("peeking at 5 to 20 replicates", "peeking at 5 to 15 folds of one data set")
SEVERAL = ("3 claims", "10 claims", "all of 3 settings")

WAYS: Mapping[str, judging.Way] = {
    "fairtrial": judging.by_fairtrial,
    "plain t": judging.by_plain_t,
    "bootstrap": judging.by_bootstrap,
    "larger mean": judging.by_larger_mean,
    "coin": judging.by_coin,
}
TABLE = "fairtrial.trial.table"
CANDIDATES = (
    Candidate("fairtrial", "method", uses=(TABLE, "fairtrial.trial.evidence", "fairtrial.trial.verdict")),
    Candidate("plain t", "baseline", uses=(TABLE,)),
    Candidate("bootstrap", "baseline", uses=(TABLE,)),
    Candidate("larger mean", "baseline", uses=(TABLE,)),
    Candidate("coin", "control"),
)


class Params(BaseModel):
    """How much to simulate."""

    blocks: int = Field(20, ge=3, description="blocks of simulated trials", json_schema_extra={"scope": "plan"})
    trials: int = Field(300, ge=10, description="simulated trials a block, of each scenario that is cheap to judge")
    seed: int = Field(0, ge=0, description="seed of all blocks")
    scenarios: list[str] = Field(
        list(SCENARIOS), min_length=1, description="which scenarios to simulate", json_schema_extra={"scope": "plan"}
    )

    @field_validator("scenarios")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in SCENARIOS:
                raise UnknownNameError("scenario", name, SCENARIOS)
        return names


def _simulate(candidate: Candidate, cell: Cell, params: Params, *, true: bool) -> Score:
    """Judge a block of trials of one scenario, with its effect or without; all candidates the same trials."""
    scenario = SCENARIOS[cell["scenario"]]
    judge = WAYS[candidate.label]
    names = (scenario.name, true, cell["block"])
    cells = generator(params.seed, *names)
    own = generator(params.seed, *names, candidate.label)
    rare = candidate.role == "method" and not true  # only the rates of its errors take so many trials to tell
    score = Score()
    for _ in range(max(1, round(scenario.share * params.trials * (1 if rare else 0.25)))):
        draw = scenario.draw(cells, scenario.effect if true else 0.0)
        score.add(scenario.part.claims, judge(scenario.table(draw), scenario.peeked, own), draw.truth)
    return score


def measure_null(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float | None]:
    """Return the rates of wrong verdicts where nothing is to be found."""
    score = _simulate(candidate, cell, params, true=False)
    return {
        "false holds": score.false_holds / score.trials,
        "false fails": score.false_fails / score.trials,
        "coverage": Score.mean(score.covered),
        "length": Score.mean(score.length),
    }


def measure_effect(candidate: Candidate, cell: Cell, params: Params, stages: Any) -> dict[str, float | None]:
    """Return the rate of true claims found, and of wrong verdicts, with the scenario's effect."""
    score = _simulate(candidate, cell, params, true=True)
    return {
        "power": Score.mean(score.found),
        "false fails": score.false_fails / score.trials,
        "coverage": Score.mean(score.covered),
    }


def _at(name: str) -> dict[str, str]:
    return {"scenario": name}


def _rare(
    id: str,
    text: str,
    scenarios: Iterable[str],
    bound: float,
    metrics: tuple[str, ...] = ("false holds", "false fails"),
) -> AllOf:
    """Claim that fairtrial's rates of wrong verdicts lie below a bound in every scenario."""
    return _all(id, text, [(name, metric, {"below": bound}) for name in scenarios for metric in metrics])


def _within(id: str, text: str, scenarios: Iterable[str], metric: str, *bounds: dict[str, Any]) -> AllOf:
    """Claim that one of fairtrial's rates keeps its bounds in every scenario."""
    return _all(id, text, [(name, metric, bound) for name in scenarios for bound in bounds])


def _all(id: str, text: str, claims: Sequence[tuple[str, str, dict[str, Any]]]) -> AllOf:
    return all_of(
        id, text,
        *(
            Claim(f"{id}.{number}", f"{name}: {metric}", level("fairtrial", metric, _at(name)), **bound)
            for number, (name, metric, bound) in enumerate(claims, start=1)
        ),
    )  # fmt: skip


def parts(params: Params) -> tuple[Part, ...]:
    """Return the trials without and with an effect."""
    factors = (
        Factor("block", range(params.blocks), kind="replicate", most=max(200, params.blocks)),
        Factor("scenario", params.scenarios),
    )
    worse = [
        Claim(f"V13.{number}", name, difference("fairtrial", "plain t", "false holds", _at(name)), above=NOMINAL)
        for number, name in enumerate(
            ("8 folds of 5 fits", "losses where it is worst", "peeking at 5 to 20 replicates", "10 claims"), start=1
        )
    ]
    null = Part(
        name="no effect",
        candidates=CANDIDATES,
        metrics=(
            Metric("false holds", "share of trials", higher_is_better=False),
            Metric("false fails", "share of trials", higher_is_better=False),
            Metric("coverage", "share of intervals"),
            Metric("length", "standard deviations", higher_is_better=False),
        ),
        factors=factors,
        variance="independent",
        claims=(
            _rare("V1", f"With 3 to 30 independent replicates fewer than {EXACT:.2%} of trials HOLD wrongly, and fewer "
                  "FAIL wrongly (2.5% by theory)", GAUSSIAN, EXACT),
            _within("V2", "Their 95% interval covers the truth in 93% to 97% of trials", GAUSSIAN, "coverage",
                    {"above": 0.93}, {"below": 0.97}),
            _rare("V3", f"With 8 folds of 2 or of 5 fits fewer than {EXACT:.2%} are wrong on either side",
                  FOLDS, EXACT),
            _rare("V4", f"Where replicates share items or data fewer than {ROUGH:.0%} are wrong on either side",
                  SHARED, ROUGH),
            _within("V5", "Their interval covers the truth in more than 90% of trials", SHARED, "coverage",
                    {"above": 0.90}),
            _rare("V6", f"With 10 differences of skewness 3 fewer than {SKEWED:.1%} are wrong on either side",
                  ("skewed differences",), SKEWED),
            _rare("V7", "With skewed scores compared as logarithms, and with few distinct values, fewer than "
                  f"{EXACT:.2%} are wrong on either side", ("logs of skewed scores", "few distinct values"), EXACT),
            _rare("V8", f"With 15% of the method's cells lost at random fewer than {EXACT:.2%} HOLD wrongly",
                  LOSSES[:1], EXACT, ("false holds",)),
            _rare("V9", f"With the worst fifth of the method's cells lost fewer than {EXACT:.2%} HOLD wrongly",
                  LOSSES[1:], EXACT, ("false holds",)),
            _rare("V10", f"When verdicts are looked at after every replicate fewer than {NOMINAL:.1%} are wrong on "
                  "either side", PEEKING, NOMINAL),
            _within("V11", "The intervals of all looks together cover the truth in more than 95% of trials",
                    PEEKING, "coverage", {"above": 0.95}),
            _rare("V12", f"With several claims any of them is wrong in fewer than {EXACT:.2%} of trials on either "
                  "side", SEVERAL, EXACT),
            all_of("V13", f"A plain t interval lets at least {NOMINAL:.1%} more trials HOLD wrongly where folds count "
                   "as replicates, losses are dropped, verdicts are looked at, and ten claims are made", *worse),
        ),
        measure=measure_null,
        group=("block",),
    )  # fmt: skip
    effect = Part(
        name="effect",
        candidates=CANDIDATES,
        metrics=(
            Metric("power", "share of true claims"),
            Metric("false fails", "share of trials", higher_is_better=False),
            Metric("coverage", "share of intervals"),
        ),
        factors=factors,
        variance="independent",
        claims=(
            _within("V14", f"An effect that the exact t test finds in {POWER:.0%} of trials is found in 75% to 85%",
                    GAUSSIAN, "power", {"above": 0.75}, {"below": 0.85}),
            _rare("V15", "A true claim FAILS in fewer than 1% of trials", (*GAUSSIAN, *SHARED, *PEEKING), 0.01,
                  ("false fails",)),
            Claim("V16", "The share of true claims it finds exceeds that of a coin that errs as rarely by at least 50 "
                  "points",
                  difference("fairtrial", "coin", "power", _at("10 replicates")), above=0.5),
            *(
                report(f"V17.{number}", f"{name}: power", level("fairtrial", "power", _at(name)))
                for number, name in enumerate((*PEEKING, *LOSSES, "10 claims"), start=1)
            ),
        ),
        measure=measure_effect,
        group=("block",),
    )  # fmt: skip
    return (null, effect)


trial = Trial(
    name="verdicts",
    params=Params,
    parts=parts,
    presets={
        "smoke": {"blocks": 3, "trials": 10, "scenarios": ["3 replicates", PEEKING[0], LOSSES[0], "3 claims"]},
        "full": {"trials": 3000},
    },
)
