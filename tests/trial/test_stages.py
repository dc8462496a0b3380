import json
import logging
import multiprocessing
import threading

import numpy as np
import pytest
from pydantic import BaseModel, Field

from fairtrial.errors import InputError
from fairtrial.trial.declare import Candidate, stage
from fairtrial.trial.stages import Stages

LOG = logging.getLogger("stages")  # a list would change, and with it the digest of every stage that names it


@pytest.fixture
def calls(caplog):
    return lambda: [record.args[0] for record in caplog.records]


@pytest.fixture
def stages(tmp_path):
    return Stages(tmp_path / "stages", {}, "", frozenset())


def square(x):
    LOG.warning("%s", x)
    return x * x


def fourth(stages, x):
    return stages(square, x) ** 2


@stage(keep=True)
def model(name):
    LOG.warning("%s", name)
    return object()


@stage(save="npz")
def arrays(n):
    LOG.warning("%s", n)
    return {"x": np.arange(n), "y": np.ones((n, 2), dtype="float32")}


@stage(save="json")
def facts(n):
    LOG.warning("%s", n)
    return {"n": n, "list": [1, 2.5, None]}


class Params(BaseModel):
    seeds: int = Field(3, json_schema_extra={"scope": "plan"})
    rate: float = 0.1


def test_a_stage_is_computed_once_in_its_group_and_anew_in_the_next(stages, calls):
    assert [stages(square, 3), stages(square, 3), stages(square, 4)] == [9, 9, 16]
    assert calls() == [3, 4]
    stages.end_group()
    stages(square, 3)
    assert calls() == [3, 4, 3]


def test_a_kept_stage_lives_as_long_as_the_worker(stages, calls):
    first = stages(model, "llama")
    stages.end_group()
    assert stages(model, "llama") is first
    assert calls() == ["llama"]


def test_a_stage_may_ask_for_stages_and_each_costs_its_own_time(stages):
    with stages.cell() as spent:
        assert stages(fourth, 3) == 81
        own, used = spent()
    costs = {cost.name: cost for cost in stages.take_costs()}
    assert costs["fourth"].asks == [costs["square"].key]
    assert used == [costs["fourth"].key]
    assert own >= 0
    assert stages.take_costs() == []


@pytest.mark.parametrize("saved", [arrays, facts])
def test_a_saved_stage_is_written_once_and_read_by_other_workers_and_later_runs(stages, tmp_path, saved, calls):
    first = stages(saved, 4)
    other = Stages(tmp_path / "stages", {}, "", frozenset())
    second = other(saved, 4)
    assert calls() == [4]
    assert other.take_costs() == [], "what was read cost nothing"
    np.testing.assert_equal(second, first)
    assert not list((tmp_path / "stages").glob("*.part"))


def test_a_saved_tensor_stage_uses_safetensors(stages, tmp_path):
    torch = pytest.importorskip("torch")

    @stage(save="safetensors")
    def weights(n):
        return {"w": torch.arange(n, dtype=torch.float16).reshape(2, -1).T}

    stages(weights, 6)
    again = Stages(tmp_path / "stages", {}, "", frozenset())(weights, 6)
    assert torch.equal(again["w"], torch.arange(6, dtype=torch.float16).reshape(2, -1).T)


def slow_facts(folder):
    @stage(save="json")
    def slow(n):
        with (folder / "calls").open("a") as log:
            log.write("x")
        threading.Event().wait(0.2)
        return n

    Stages(folder, {}, "", frozenset())(slow, 1)


def test_two_processes_compute_a_saved_stage_once(tmp_path):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=slow_facts, args=(tmp_path,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert (tmp_path / "calls").read_text() == "x"


def key(stages, *arguments):
    candidate = next((a for a in arguments if isinstance(a, Candidate)), None)
    return stages._key(square, candidate, arguments)


def test_keys_tell_arguments_candidates_and_parameters_apart(stages):
    one, two = Candidate("a", "method"), Candidate("b", "method")
    tuned = Candidate("a", "method", grid=({"k": 1},))
    keys = [
        key(stages, *arguments)
        for arguments in (
            (1,),
            (1.5,),
            ("1",),
            ([1],),
            ({"seed": 1},),
            (one,),
            (two,),
            (tuned,),
            (Params(),),
            (Params(rate=1),),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert key(stages, Params(seeds=9)) == key(stages, Params()), "a plan parameter is no part of it"
    assert key(stages, np.int64(1)) == key(stages, 1)
    assert key(stages, (1, 2)) == key(stages, [1, 2])


def test_input_files_are_part_of_a_key_with_the_parameters(tmp_path):
    one, two = (Stages(tmp_path, {"text": digest}, "", frozenset()) for digest in ("a", "b"))
    assert key(one, Params()) != key(two, Params())
    assert key(one, 3) == key(two, 3)


def test_callables_that_a_candidate_uses_are_part_of_its_key(stages):
    one, two = (Candidate("a", "method", uses=(f,)) for f in (lambda x: x + 1, lambda x: x + 2))
    assert key(stages, one) != key(stages, two)


def test_an_argument_that_is_no_json_is_refused_by_name(stages):
    with pytest.raises(InputError, match="square: its arguments must be JSON values"):
        stages(square, object())


def test_a_stage_that_raises_is_not_remembered(stages, tmp_path):
    @stage(save="json")
    def fails(n):
        raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            stages(fails, 1)
    assert not list((tmp_path / "stages").glob("*.json"))
    assert [cost.name for cost in stages.take_costs()] == ["fails", "fails"]


def test_facts_on_disk_are_plain_json(stages, tmp_path):
    stages(facts, 2)
    (file,) = (tmp_path / "stages").glob("*.json")
    assert json.loads(file.read_text()) == {"n": 2, "list": [1, 2.5, None]}
