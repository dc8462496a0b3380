import numpy as np
import pytest

from fairtrial.errors import InputError, MissingSampleError
from fairtrial.testing import check_trial
from fairtrial.training.gauss_newton.trial import (
    ADAM,
    FGN,
    GaussNewtonParams,
    batches,
    features,
    head_data,
    parts,
    trial,
)
from fairtrial.trial.params import make_params

TRIAL = "fairtrial.training.gauss_newton.trial:trial"


def test_the_trial_is_sound():
    check_trial(TRIAL)


class Direct:
    """Stages without a store."""

    def note(self, text):
        pass

    def __call__(self, function, *arguments):
        wants = function.__code__.co_varnames[:1] == ("stages",)
        return function(self, *arguments) if wants else function(*arguments)


@pytest.fixture
def arrays(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(6, size=400)
    x = np.eye(6)[y] + 0.3 * rng.standard_normal((400, 6))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    return {"features": str(tmp_path / "x.npy"), "labels": str(tmp_path / "y.npy")}


def test_a_users_arrays_are_the_features_and_their_last_quarter_is_the_test(arrays):
    params = make_params(trial, "smoke", {**arrays, "classes": (3, 6)})
    trial.check(params)
    found = features(Direct(), params)
    np.testing.assert_allclose(np.linalg.norm(found["x"], axis=1), 1, rtol=1e-5)
    data = head_data(Direct(), 6, params)
    assert len(data["y_train"]) == 300
    assert len(data["y_test"]) == 100
    few = head_data(Direct(), 3, params)
    assert set(few["y_train"].tolist()) == {0, 1, 2}
    assert len(few["y_train"]) < 300


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"labels": ""}, "need --set labels=y.npy"),
        ({"classes": (2, 9)}, r"give --set classes=\[6\]"),
        ({"features": "nowhere.npy"}, "not a .npy file of numbers"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_any_worker_starts(arrays, values, message):
    with pytest.raises(InputError, match=message):
        trial.check(make_params(trial, "smoke", {**arrays, "classes": (3, 6), **values}))


def test_other_bad_input_is_refused(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="ascending"):
        make_params(trial, "smoke", {"classes": (10, 3)})
    with pytest.raises(InputError, match="no such file"):
        trial.check(make_params(trial, "smoke", {"features": "tokens", "text": "./nowhere.txt"}))
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    with pytest.raises(MissingSampleError, match="fairtrial samples get"):
        trial.check(GaussNewtonParams())


def test_batches_pass_over_all_examples_in_new_orders():
    stream = batches(10, 4, np.random.default_rng(0))
    first, second = (sorted(np.concatenate([next(stream).numpy() for _ in range(2)]).tolist()) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 8


def test_all_tuned_candidates_have_as_many_points_and_second_order_ones_none():
    grids = {c.label: len(c.grid or ()) for part in parts(GaussNewtonParams()) for c in part.candidates}
    assert {label for label, n in grids.items() if n} == {"adam", "sgd"}
    assert grids["adam"] == grids["sgd"] == 6
    assert FGN.grid is None
    assert ADAM.grid is not None
