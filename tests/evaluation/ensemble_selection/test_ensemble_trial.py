import numpy as np
import pandas as pd
import pytest

from fairtrial.data.samples import find_sample, sample_path
from fairtrial.errors import InputError, MissingSampleError, UnknownNameError
from fairtrial.evaluation.ensemble_selection.simulation import simulate
from fairtrial.evaluation.ensemble_selection.trial import (
    CANDIDATES,
    FLOORS,
    MEASURED,
    SIMULATED,
    EnsembleParams,
    choose,
    measure_floor,
    measure_selection,
    parts,
    split_of,
    task_of,
    trial,
)
from fairtrial.testing import check_trial
from fairtrial.trial.declare import leaves
from fairtrial.trial.params import make_params


class Direct:
    """Stages without a store."""

    def note(self, text):
        pass

    def __call__(self, function, *arguments):
        wants = function.__code__.co_varnames[:1] == ("stages",)
        return function(self, *arguments) if wants else function(*arguments)


def test_the_trial_is_sound():
    check_trial(trial)


@pytest.fixture(scope="module")
def own_table(tmp_path_factory):
    """A reader's table: five models, text answers, one of them silent now and then."""
    codes, y = simulate(np.random.default_rng(0), 160, 2)
    names = np.array(["no", "yes"])
    frame = pd.DataFrame(names[codes[:, 4:9]], columns=[f"m{i}" for i in range(5)])
    frame.loc[:9, "m0"] = None
    file = tmp_path_factory.mktemp("own") / "answers.csv"
    frame.assign(truth=names[y]).to_csv(file, index_label="item")
    return file


def test_a_readers_table_is_a_pool_of_its_own(own_table):
    params = make_params(trial, "smoke", {"answers": str(own_table), "label": "truth"})
    trial.check(params)
    assert params.pools() == ["answers"]
    assert [part.name for part in parts(params)] == ["selection", "floor", "cost"]
    stages, cell = Direct(), {"split": 0, "data": "answers", "k": 3}
    for candidate in CANDIDATES[:1] + CANDIDATES[6:9]:
        measured = measure_selection(candidate, cell, params, stages)
        of = stages(split_of, "answers", 0, params)
        assert len(measured["accuracy"].values) == len(of["test"]) == 100
        assert not set(measured["accuracy"].ids) & set(measured["accuracy"].train_ids)
        assert measured["queries"] == (5 if candidate.label == "all" else measured["queries"]) <= 5
    for candidate in FLOORS:
        measured = measure_floor(candidate, cell, params, stages)
        assert 0 <= measured["floor"] <= 0.5
        assert measured["covered"] in (0.0, 1.0)


def test_every_candidate_chooses_k_models_or_does_not_apply():
    codes, y = simulate(np.random.default_rng(1), 120, 2)
    for candidate in CANDIDATES:
        if candidate.label in ("all", "greedy-mi-stopping", "shuffled-labels"):
            continue
        assert len(set(choose(candidate.label, codes, y, 2, 0))) == 2
    assert choose("best-subset", codes, y, 5, 0) is None
    assert choose("best-subset", np.tile(codes, 2), y, 3, 0) is None


def test_splits_are_disjoint_and_repeat():
    params = make_params(trial, "smoke")
    one, again = (split_of(Direct(), "copula-2", 3, params) for _ in range(2))
    assert (one["codes"] == again["codes"]).all()
    assert not set(one["train"]) & set(one["test"])
    assert (one["codes"] != split_of(Direct(), "copula-2", 4, params)["codes"]).any()


def test_simulated_pools_are_independent_and_measured_ones_a_design():
    by_name = {part.name: part for part in parts(EnsembleParams())}
    assert by_name["selection"].variance == by_name["floor"].variance == "design"
    assert by_name["selection-copula"].variance == by_name["floor-copula"].variance == "independent"
    assert [f.values for f in by_name["selection"].factors if f.name == "data"] == [list(MEASURED)]


def test_margins_are_those_of_the_specification():
    claims = {leaf.id: leaf for part in parts(EnsembleParams()) for claim in part.claims for leaf in leaves(claim)}
    above = {id: leaf.above for id, leaf in claims.items() if getattr(leaf, "above", None) is not None}
    assert {v for id, v in above.items() if id.startswith("C1.")} == {0.0}
    assert {v for id, v in above.items() if id.startswith("C1-copula.")} == {0.01}
    assert {v for id, v in above.items() if id.startswith("C3")} == {-0.005}
    assert not any("quiz" in leaf.text for id, leaf in claims.items() if id.startswith("C"))


def test_the_pools_are_named_by_sets_or_singly():
    assert EnsembleParams(data="copula").pools() == list(SIMULATED)
    assert EnsembleParams(data=["quiz", "copula-4"]).pools() == ["quiz", "copula-4"]
    with pytest.raises(UnknownNameError, match="no pool 'agnews'"):
        make_params(trial, None, {"data": "agnews"})


@pytest.mark.parametrize(
    ("content", "values", "message"),
    [
        ("a,b\n1,2\n", {}, "no column 'label'"),
        ("a,label\n" + "x,x\nx,y\n" * 60, {}, "1 models"),
        ("a,b,label\n" + "x,x,x\nx,x,y\n" * 10, {}, "10 items are too few for 2 classes"),
        ("a,b,label\n" + "x,x,x\n" * 90, {}, "every label is 'x'"),
    ],
)
def test_bad_tables_are_refused_before_any_worker_starts(tmp_path, content, values, message):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(InputError, match=message):
        trial.check(make_params(trial, None, {"answers": str(tmp_path / "t.csv"), **values}))


@pytest.mark.parametrize("name", ["t.txt", "none.csv"])
def test_what_is_no_table_is_refused(tmp_path, name):
    (tmp_path / "t.txt").write_text("x")
    with pytest.raises(InputError, match=r"give a \.csv"):
        trial.check(make_params(trial, None, {"answers": str(tmp_path / name)}))


def test_a_missing_sample_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    with pytest.raises(MissingSampleError, match="fairtrial samples get"):
        trial.check(EnsembleParams())


def fetched(name):
    try:
        return sample_path(find_sample(name).name)
    except MissingSampleError:
        pytest.skip(f"the sample {name} is not here")


@pytest.mark.parametrize(
    ("pool", "sample", "classes"),
    [
        pytest.param("polarity", "vader", 2, marks=pytest.mark.slow),
        pytest.param("topics", "wordnet", 4, marks=pytest.mark.slow),
        ("quiz", "mmlu-dev", 4),
    ],
)
def test_items_are_balanced_and_no_example_is_among_them(pool, sample, classes):
    fetched(sample)
    task = task_of(pool, 80)
    assert len(task.classes) == classes
    assert len(set(task.texts)) == len(task.texts) == len(task.labels) == 80
    assert not {text for text, _ in task.examples} & set(task.texts)
    assert np.ptp([task.labels.count(name) for name in task.classes]) == 0
    assert [label for _, label in task.examples[:classes]] != [task.examples[0][1]] * classes
    assert all(rule(text) in task.classes for rule in task.rules.values() for text in task.texts[:5])
    assert task_of(pool, 80).texts == task.texts
