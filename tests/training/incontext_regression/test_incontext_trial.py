import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from fairtrial.errors import InputError
from fairtrial.testing import check_trial
from fairtrial.training.incontext_regression.baselines import TunedKernelRidge, TunedNeighbors
from fairtrial.training.incontext_regression.trial import InContextParams, check, equal, rows, slope, trial


def test_the_trial_is_sound():
    check_trial(trial)


def test_slopes_are_those_of_least_squares():
    lengths = (200, 800, 3200)
    values = dict(zip(lengths, (1.0, 0.2, -1.3), strict=True))
    got = sum(weight * values[where["n"]] for (_, _, where), weight in slope("oracle", 1, lengths).terms)
    assert_allclose(got, np.polyfit(np.log(lengths), list(values.values()), 1)[0])


def test_a_single_cell_apart_breaks_the_equality():
    frame = pd.DataFrame({"candidate": "constructed", "n": [800, 3200, 200], "d": 1, "apart": [1e-8, 1e-7, 1.0]})
    assert equal(frame, (800, 3200)) is True
    frame.loc[1, "apart"] = 1e-3
    assert "n = 3200" in equal(frame, (800, 3200))


def test_neighbours_and_kernel_ridge_are_chosen_by_leaving_out():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(60, 2))
    y = np.sin(4 * x[:, 0]) + 0.1 * rng.standard_normal(60)
    for model, tried in (
        (TunedNeighbors, "k"), (TunedKernelRidge, "gamma"),
    ):  # fmt: skip
        left_out = np.mean([(model().fit(np.delete(x, i, 0), np.delete(y, i)).predict(x[i : i + 1])[0] - y[i]) ** 2
                            for i in range(0, 60, 6)])  # fmt: skip
        assert left_out < 0.15, tried


def test_rows_of_the_users_are_read_and_standardised(tmp_path):
    path = tmp_path / "mine.npz"
    rng = np.random.default_rng(1)
    np.savez(path, x=rng.standard_normal((30, 3)), y=5 + 2 * rng.standard_normal(30))
    check(InContextParams(data=str(path)))
    x, y = rows(None, str(path), 2, 8, 0)
    assert x.shape == (30, 3)
    assert y.shape == (30, 1)
    assert_allclose([y.mean(), y.std()], [0, 1], atol=1e-12)
    for arrays, word in (
        ({"x": np.zeros((30, 3))}, "arrays x and y"),
        ({"x": np.zeros((30, 3)), "y": np.zeros(29)}, "n at least 20"),
        ({"x": np.full((30, 3), np.nan), "y": np.arange(30.0)}, "finite"),
        ({"x": np.zeros((30, 3)), "y": np.zeros(30)}, "constant"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(InputError, match=word):
            check(InContextParams(data=str(path)))


@pytest.mark.parametrize("wrong", [{"lengths": (5,)}, {"dims": (0,)}, {"manifolds": (0,)}, {"data": "none.npz"}])
def test_parameters_of_the_trial_out_of_range_are_refused(wrong):
    with pytest.raises(InputError):
        check(InContextParams(**{"data": "diabetes", **wrong}))
