import pytest

from fairtrial.errors import FairtrialError
from fairtrial.trial.adhoc import NoParams
from fairtrial.trial.declare import Candidate, Claim, Factor, Metric, Part, Trial, difference, stage
from fairtrial.trial.runner import run
from fairtrial.trial.tuning import best_point

RATES = tuple({"rate": rate} for rate in (0.1, 0.2, 0.3))


@stage(save="json")
def tune(stages, candidate):
    target = {"middle": 0.2, "edge": 0.9}[candidate.label]
    return dict(best_point(stages, candidate, [abs(point["rate"] - target) for point in candidate.grid]))


def measure(candidate, cell, params, stages):
    return {"rate": stages(tune, candidate)["rate"] + 0.01 * cell["seed"]}


def parts(params):
    return (
        Part(
            "tuned",
            (Candidate("middle", "method", grid=RATES), Candidate("edge", "control", grid=RATES)),
            (Metric("rate"),),
            (Factor("seed", range(3), kind="replicate"),),
            "independent",
            (Claim("C", "c", difference("edge", "middle", "rate"), above=0),),
            measure,
        ),
    )


def test_the_winner_at_the_edge_of_its_grid_is_noted_also_when_resumed(tmp_path, inline):
    trial = Trial("tuned", NoParams, parts)
    for _ in range(2):
        notes = run(trial, out=tmp_path, jobs=1, engine=inline).document["notes"]
        assert notes == ["edge: tuning chose rate=0.3, an end of its grid; a better one may lie beyond"]


def test_the_cost_of_tuning_is_its_candidates(tmp_path, inline):
    result = run(Trial("tuned", NoParams, parts), out=tmp_path, jobs=1, engine=inline)
    assert {cost["candidate"] for cost in result.document["costs"] if "tune" in cost["stages"]} == {"middle", "edge"}


@pytest.mark.parametrize("losses", [[1.0, 2.0], [1.0, 2.0, float("nan")], [float("inf")] * 3])
def test_losses_that_choose_nothing_are_refused(losses):
    with pytest.raises(FairtrialError, match="tuning a"):
        best_point(None, Candidate("a", "method", grid=RATES), losses)
