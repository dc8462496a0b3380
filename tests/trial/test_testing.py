"""check_trial finds each thing that can be wrong with a trial, and passes what is right."""

import threading

import numpy as np
import pytest

from fairtrial import testing
from fairtrial.errors import InputError
from fairtrial.testing import WorkerHere, check_trial
from fairtrial.trial.declare import (
    Candidate,
    Claim,
    Factor,
    Items,
    Metric,
    Trial,
    all_of,
    difference,
    exact,
    for_each,
    level,
    statistic,
)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    """Every fault below is found without a worker process; one test uses them."""
    monkeypatch.setattr(testing, "LastingWorker", WorkerHere)


def test_a_right_trial_passes_with_real_workers_and_returns_its_smoke_result(make_trial, monkeypatch):
    monkeypatch.undo()

    def measure(candidate, cell, params, stages):
        rng = np.random.default_rng([cell["seed"], candidate.label == "mine"])
        return {"score": Items(np.arange(20), rng.normal(size=20)), "time": None}

    result = check_trial(make_trial(measure, metrics=(Metric("score"), Metric("time"))))
    assert result.verdicts[0].id == "C1"
    assert len(result.rows) == 6


def wrong(trial, **options):
    with pytest.raises(AssertionError) as error:
        check_trial(trial, **options)
    first, *lines = str(error.value).splitlines()
    assert first == "trial 'little':"
    return "\n".join(lines)


def test_a_trial_without_smoke_preset(make_trial):
    trial = make_trial()
    assert wrong(Trial(trial.name, trial.params, trial.parts)) == "it has no preset 'smoke'"


def test_a_preset_that_its_parameters_refuse(make_trial):
    trial = make_trial()
    with pytest.raises(InputError, match="shift=7"):
        check_trial(Trial(trial.name, trial.params, trial.parts, presets={"smoke": {}, "full": {"shift": 7}}))


def test_a_trial_without_control(make_trial):
    candidates = (Candidate("mine", "method"), Candidate("base", "baseline"))
    assert wrong(make_trial(candidates=candidates)) == "no part has a candidate whose role is control"


def claim(quantity):
    return Claim("C", "", quantity, above=0)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        (claim(difference("mine", "bass", "score")), "leave out 'bass'"),
        (claim(level("mine", "skore")), "do not measure 'skore'"),
        (claim(level("mine", "score", {"rate": 1})), "no factor 'rate'"),
        (claim(level("mine", "score", {"task": "z"})), "no cell with task=z"),
        (for_each("width", claim(level("mine", "score"))), "there is no setting 'width'"),
        (all_of("A", "", for_each("task", claim(level("him", "score")))), "leave out 'him'"),
    ],
)
def test_a_claim_that_names_what_is_not_there(make_trial, stated, reason):
    factors = (Factor("seed", range(3), kind="replicate"), Factor("task", ("x", "y")))
    found = wrong(make_trial(claims=(stated,), factors=factors))
    assert found.startswith(f"claim {stated.id!r} of part 'main': ")
    assert reason in found


def test_a_claim_that_only_another_preset_measures_is_right(make_trial):
    trial = make_trial()

    def parts(params):
        (part,) = trial.parts(params)
        there = params.seeds > 5
        return (type(part)(**{**part.__dict__, "metrics": (Metric("score"), *([Metric("size")] if there else []))}),)

    def with_size(params):
        (part,) = parts(params)
        measure = part.measure

        def sized(*arguments):
            return measure(*arguments) | ({"size": 1.0} if params.seeds > 5 else {})

        return (type(part)(**{**part.__dict__, "measure": sized, "claims": (claim(level("mine", "size")),)}),)

    presets = {"smoke": {"seeds": 3}, "full": {"seeds": 6}}
    check_trial(Trial("little", trial.params, with_size, presets=presets))
    assert "do not measure 'size'" in wrong(Trial("little", trial.params, with_size, presets={"smoke": {"seeds": 3}}))


def test_a_lost_cell_and_its_reason(make_trial):
    assert "lost: mine at {'seed': 0} of part 'main': measure of part 'main': missing metrics ['score']" in wrong(
        make_trial(lambda *_: {})
    )


@pytest.mark.parametrize(
    "broken", [claim(statistic(lambda f: float(f.speed.mean()))), exact("C", "", lambda f: f.speed)]
)
def test_a_claim_that_cannot_be_computed(make_trial, broken):
    assert "claim 'C': " in wrong(make_trial(claims=(broken,)))


def test_values_that_depend_on_global_state(make_trial):
    found = wrong(make_trial(lambda *arguments: {"score": float(np.random.rand())}))  # noqa: NPY002
    assert "score of mine at {'seed': 0} of part 'main': first 0." in found


def test_timed_values_may_differ(make_trial):
    import time

    check_trial(make_trial(lambda *_: {"score": time.perf_counter()}, metrics=(Metric("score", timed=True),)))


def test_a_smoke_preset_that_takes_too_long(make_trial):
    assert "the smoke preset took" in wrong(make_trial(), seconds=0.0)


def test_code_that_cannot_be_seen(make_trial):
    candidates = (Candidate("mine", "method", uses=("fairtrial.nowhere",)), Candidate("base", "control"))
    assert "there is no module 'fairtrial.nowhere'" in wrong(make_trial(candidates=candidates))


def uses_lock(lock):
    def measure(candidate, cell, params, stages):
        with lock:
            return {"score": 0.0}

    return measure


def test_a_trial_that_cannot_be_pickled(make_trial):
    trial = make_trial(uses_lock(threading.Lock()))
    assert "the trial cannot be pickled: TypeError" in wrong(trial)
