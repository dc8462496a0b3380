"""Runs in the test's own process: what is measured, in which order, what is lost, when it stops."""

import json
import logging
import math
import os
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fairtrial.errors import InputError, MissingExtraError, UnknownNameError
from fairtrial.trial.declare import (
    Candidate,
    Claim,
    Curve,
    Factor,
    Items,
    Metric,
    Part,
    difference,
    exact,
    level,
    stage,
    statistic,
)
from fairtrial.trial.runner import run_declared


@pytest.fixture
def go(tmp_path, inline, make_trial):
    """Return a runner of a trial made of changes to the little one; logs each measured (candidate, cell)."""

    def run(measure=None, *, params=None, out="out", **options):
        changes = {name: options.pop(name) for name in list(options) if name in Part.__dataclass_fields__}
        trial = make_trial(measure, **changes)
        options = {"engine": inline, "jobs": 1, "threads": 1, **options}
        return run_declared(trial, trial.params(**(params or {})), trial.name, out=tmp_path / out, **options)

    return run


def test_a_run_measures_each_cell_of_each_candidate_and_judges(go):
    result = go()
    frame = result.to_frame()
    assert len(frame) == 10
    assert set(frame.columns) == {"part", "candidate", "role", "seed", "score", "seconds", "peak", "status", "reason"}
    assert (frame.status == "done").all()
    assert result.verdicts[0].difference == pytest.approx(0.5, abs=0.2)
    assert result.verdict("C1").state == "HOLDS"


def test_a_cell_that_raises_is_lost_with_its_reason_and_the_others_go_on(go):
    def measure(candidate, cell, params, stages):
        if cell["seed"] == 1 and candidate.label == "mine":
            raise ZeroDivisionError("seed one")
        return {"score": float(cell["seed"])}

    result = go(measure)
    (lost,) = result.document["lost"]
    assert lost["candidate"] == "mine"
    assert lost["factors"] == {"seed": 1}
    assert lost["reason"].startswith("ZeroDivisionError: seed one (")
    assert result.verdicts[0].lost == 1
    assert (result.to_frame().status == "done").sum() == 9


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ({}, "missing metrics ['score']"),
        ({"score": 1.0, "time": 2.0}, "undeclared metrics ['time']"),
        ({"score": math.nan}, "is NaN: return inf if it diverged"),
        ({"score": "high"}, "could not convert"),
        ({"score": Items(["a"], [1.0, 2.0])}, "as many ids as values"),
        ({"score": Items(["a", "b"], [1.0, math.nan])}, "is NaN for item b"),
        (3.0, "not a mapping of metrics"),
    ],
)
def test_what_a_part_does_not_declare_loses_the_cell(go, returned, reason):
    result = go(lambda *_: returned, params={"seeds": 1})
    assert reason in result.document["lost"][0]["reason"]
    assert len(result.document["lost"]) == 2


def test_lost_cells_are_kept_until_retry(go, tmp_path):
    def measure(candidate, cell, params, stages):
        (tmp_path / "ran").open("a").write("x")
        if not (tmp_path / "mended").exists():
            raise RuntimeError("broken")
        return {"score": 1.0}

    assert len(go(measure, params={"seeds": 2}).document["lost"]) == 4
    (tmp_path / "mended").touch()
    assert len(go(measure, params={"seeds": 2}).document["lost"]) == 4
    assert go(measure, params={"seeds": 2}, retry=True).document["lost"] == []
    assert (tmp_path / "ran").read_text() == "x" * 8


@pytest.mark.parametrize("error", [MissingExtraError("lm", "torch"), OSError(28, "No space left on device")])
def test_a_missing_extra_or_a_full_disk_ends_the_run_and_keeps_what_is_done(go, tmp_path, error):
    def measure(candidate, cell, params, stages):
        if cell["seed"] == 2 and not (tmp_path / "mended").exists():
            raise error
        (tmp_path / "ran").open("a").write("x")
        return {"score": 1.0}

    with pytest.raises(InputError, match=r"pip install|disk is full"):
        go(measure)
    (tmp_path / "mended").touch()
    go(measure)
    assert (tmp_path / "ran").read_text() == "x" * 10


def logging_measure(tmp_path):
    log = str(tmp_path / "log")

    def measure(candidate, cell, params, stages):
        with open(log, "a") as stream:
            stream.write(json.dumps([candidate.label, cell]) + "\n")
        return {"score": 1.0 + cell.get("seed", 0)}

    return measure, lambda: [json.loads(line) for line in Path(log).read_text().splitlines()]


def test_cells_of_a_group_run_consecutively_and_free_their_stages(go, caplog):
    log = logging.getLogger("stages")

    def load(group):
        log.warning("load %s", group)

    @stage(keep=True)
    def model():
        log.warning("model")

    def measure(candidate, cell, params, stages):
        stages(model)
        stages(load, cell["group"])
        return {"score": 0.0}

    factors = (Factor("seed", range(2), kind="replicate"), Factor("group", ("x", "y")))
    go(measure, factors=factors, group=("group",))
    assert caplog.messages == ["model", "load x", "load y"]


def test_timed_parts_run_last_alone_and_alternate_their_candidates(tmp_path, inline):
    from fairtrial.trial.declare import Trial
    from fairtrial.trial.params import BaseModel

    measure, log = logging_measure(tmp_path)

    class Nothing(BaseModel):
        pass

    def part(name, metric):
        candidates = (Candidate("a", "method"), Candidate("b", "control"))
        factors = (Factor("seed", range(3), kind="replicate"), Factor("part", (name,)))
        return Part(name, candidates, (metric,), factors, "independent", (), measure)

    trial = Trial(
        "t", Nothing, lambda params: (part("time", Metric("score", timed=True)), part("plain", Metric("score")))
    )
    result = run_declared(trial, Nothing(), "t", out=tmp_path / "out", engine=inline, jobs=2, threads=1)
    ran = [(cell["part"], candidate, cell["seed"]) for candidate, cell in log()]
    assert {name for name, *_ in ran[:6]} == {"plain"}
    assert [entry[1:] for entry in ran[6:]] == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [part["timed"] for part in result.document["parts"]] == [True, False]


def test_timed_cells_carry_their_machine_and_no_others(go, tmp_path, monkeypatch):
    measure, log = logging_measure(tmp_path)
    for timed, expected in ((False, 10), (True, 30)):
        for machine in ("here", "there"):
            monkeypatch.setattr("fairtrial.trial.engine.fingerprint", lambda threads, machine=machine: machine)
            go(measure, metrics=(Metric("score", timed=timed),), out=f"out-{timed}")
        assert len(log()) == expected


def test_a_cost_ratio_never_crosses_machines(go, monkeypatch):
    def measure(candidate, cell, params, stages):
        time.sleep(0.01 * (1 + 2 * (candidate.label == "mine")))
        return {"score": float(cell["seed"])}

    monkeypatch.setattr("fairtrial.trial.engine.fingerprint", lambda threads: "here")
    assert go(measure).verdicts[0].cost_ratio > 1
    monkeypatch.setattr("fairtrial.trial.engine.fingerprint", lambda threads: "there")
    assert go(measure, params={"seeds": 6}).verdicts[0].cost_ratio is None


def test_stages_cost_their_candidate_or_what_all_shared(go):
    def load(seed):
        time.sleep(0.03)

    def tune(candidate, seed):
        time.sleep(0.06)

    def measure(candidate, cell, params, stages):
        stages(load, cell["seed"])
        if candidate.label == "mine":
            stages(tune, candidate, cell["seed"])
        return {"score": 0.0}

    costs = {entry["candidate"]: entry for entry in go(measure, params={"seeds": 2}).document["costs"]}
    assert costs["mine"]["stages"].keys() == {"tune"}
    assert costs[None]["stages"].keys() == {"load"}
    assert costs["mine"]["seconds"] >= 0.12 > 0.06 > costs["base"]["seconds"]
    assert costs[None]["seconds"] >= 0.06


def test_peak_memory_is_of_the_cell(go):
    def measure(candidate, cell, params, stages):
        if candidate.label == "mine":
            np.ones(30_000_000)  # 240 MB
        return {"score": 0.0}

    costs = {entry["candidate"]: entry for entry in go(measure, params={"seeds": 1}).document["costs"]}
    assert costs["mine"]["peak"] - costs["base"]["peak"] > 200e6


def test_until_decided_stops_early_and_leaves_anytime_intervals_for_good(go):
    few = go(until="decided", params={"seeds": 30})
    assert few.verdicts[0].state == "HOLDS"
    assert 5 <= few.verdicts[0].units < 30
    assert few.document["peeked"]
    assert few.document["until"] == "decided"
    later = go(params={"seeds": 30})
    assert later.document["peeked"], "a later run of the folder knows that it was looked at"
    assert later.verdicts[0].units == 30


def test_until_decided_may_grow_to_most_where_nothing_is_decided(go):
    result = go(until="decided", params={"seeds": 5, "shift": 0.12})
    assert result.verdicts[0].state == "UNDECIDED"
    assert result.verdicts[0].units == 40
    assert result.document["parts"][0]["factors"][0]["values"] == list(range(40))


def test_until_flat_stops_when_replicates_add_little(go):
    def measure(candidate, cell, params, stages):
        return {"score": float(np.random.default_rng([cell["seed"], candidate.label == "mine"]).normal())}

    result = go(measure, until="flat", factors=(Factor("seed", range(200), kind="replicate"),))
    assert 5 < result.verdicts[0].units <= 110, "five more add 5% of 100"


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (Claim("C", "", difference("mine", "base", "score"), above=0, over="item"), "generalises over the items"),
        (Claim("C", "", statistic(lambda frame: 0.0), above=0), "bootstrapped.*valid for one look only"),
    ],
)
def test_until_decided_refuses_claims_whose_intervals_are_valid_for_one_look(go, claim, message):
    with pytest.raises(InputError, match=message):
        go(until="decided", claims=(claim,))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"level": 1.5}, InputError),
        ({"engine": "slurm"}, UnknownNameError),
        ({"jobs": 0}, InputError),
        ({"threads": -1}, InputError),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_written(go, tmp_path, options, error):
    with pytest.raises(error):
        go(**options)
    assert not (tmp_path / "out").exists()


# what a run leaves --------------------------------------------------------------------------------------------------


def test_result_json_has_one_versioned_schema_and_every_claim_its_fields(go, tmp_path):
    result = go()
    document = json.loads((tmp_path / "out" / "result.json").read_text())
    assert document == json.loads(json.dumps(result.document))
    assert document["schema"] == 1
    assert document["trial"] == "little"
    assert document["seeds"] == {"main": [0, 1, 2, 3, 4]}
    wanted = {"id", "text", "verdict", "quantity", "difference", "low", "high", "level", "bound", "cells", "lost"}
    (claim,) = document["claims"]
    assert wanted | {"sample_gain", "cost_ratio", "reason"} <= claim.keys()
    assert claim["verdict"] == "HOLDS"
    assert claim["bound"] == {"above": 0.1}
    assert {"cores", "memory", "python"} <= document["machine"].keys()
    assert document["versions"]["fairtrial"]


def test_numbers_that_json_cannot_say_are_strings_or_null(go, tmp_path):
    go(
        lambda c, cell, *_: {"score": math.inf if cell["seed"] else 1.0},
        claims=(Claim("C", "", level("ghost", "score"), above=0),),
    )
    text = (tmp_path / "out" / "result.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["claims"][0]["difference"] is None


def test_cells_parquet_has_a_row_a_cell_and_items_parquet_a_row_an_item(go, tmp_path):
    def measure(candidate, cell, params, stages):
        return {"score": Items(["p", "q"], [1.0, 2.0]), "loss": Curve([0, 1, 2], [3.0, 2.0, 1.0]), "size": None}

    result = go(measure, metrics=(Metric("score"), Metric("loss"), Metric("size")), params={"seeds": 2})
    cells = pd.read_parquet(tmp_path / "out" / "cells.parquet")
    assert list(cells.score) == [1.5] * 4
    assert list(cells.loss) == [1.0] * 4
    pd.testing.assert_frame_equal(cells, result.to_frame(), check_dtype=False)
    items = pd.read_parquet(tmp_path / "out" / "items.parquet")
    assert len(items) == 4 * (2 + 3)
    assert set(items.kind) == {"items", "curve"}
    assert json.loads(items.cell[0]) == {"seed": 0}
    with pytest.raises(InputError, match="no part 'other': main"):
        result.to_frame("other")


def test_factors_of_any_json_type_survive_the_store_and_parquet(go, tmp_path):
    factors = (
        Factor("seed", range(3), kind="replicate"),
        Factor("shape", ((1, 2), (3, 4))),
        Factor("size", (1, "all", None)),
    )
    claim = Claim("C", "", level("mine", "score", {"shape": [(1, 2)], "size": "all"}), above=-1)
    for _ in range(2):  # measured, then from the store
        result = go(
            lambda c, cell, *_: {"score": float(cell["shape"][0]) + cell["seed"] / 10}, factors=factors, claims=(claim,)
        )
        assert result.verdicts[0].difference == pytest.approx(1.1)
        assert len(pd.read_parquet(tmp_path / "out" / "cells.parquet")) == 36


def test_the_command_reproduces_the_parameters(go):
    assert go(params={"shift": 0.25}).document["command"] == "fairtrial run little --set shift=0.25"
    assert go().document["command"] == "fairtrial run little"


def test_an_exact_claim_sees_the_frame_of_cells(go):
    def mine_wins(frame):
        scores = frame.pivot(index="seed", columns="candidate", values="score")
        return bool((scores.mine > scores.base).all())

    claim = exact("E", "mine wins at every seed", mine_wins)
    assert go(claims=(claim,)).verdicts[0].state == "HOLDS"


def test_a_run_leaves_no_worker_thread_and_no_open_file(go, tmp_path):
    import threading

    go()
    deadline = time.monotonic() + 5
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    assert not any(str(tmp_path) in name for name in held)
