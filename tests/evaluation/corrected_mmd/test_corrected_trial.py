import math

import numpy as np
import pandas as pd
import pytest
import torch

from fairtrial.data.samples import sample_path
from fairtrial.errors import InputError, MissingSampleError, UnknownNameError
from fairtrial.evaluation.corrected_mmd import GaussianKernel, corrected_sample, mec_mmd2, median_kernel, plain_mmd2
from fairtrial.evaluation.corrected_mmd import simulation as sim
from fairtrial.evaluation.corrected_mmd.baselines import equally_weighted, imputations, plug_in
from fairtrial.evaluation.corrected_mmd.trial import (
    DOMAINS,
    FITTED,
    Params,
    halves,
    measure_fit,
    measure_g_and_k,
    names_of,
    own_rows,
    parts,
    rated,
    trial,
    unbiased,
)
from fairtrial.seeds import generator
from fairtrial.testing import check_trial
from fairtrial.trial.declare import leaves
from fairtrial.trial.params import make_params


def fetched(name):
    try:
        sample_path(name)
    except MissingSampleError:
        return pytest.mark.skip(reason=f"fairtrial samples get {name}")
    return pytest.mark.filterwarnings("error")


def test_the_trial_is_sound():
    check_trial(trial)


def test_an_audit_read_from_a_population_is_the_estimate_of_that_audit():
    rng = np.random.default_rng(0)
    x, y = rng.normal(1, 0.8, (80, 1)), torch.from_numpy(rng.normal(size=(30, 1)))
    z, x = torch.from_numpy(sim.saturation(x, rng)), torch.from_numpy(x)
    kernel = GaussianKernel(1.0)
    population = sim.Population(x, z, y, kernel)
    for how in ({"strength": 0.5, "embedding": True}, {"strength": 1.0, "embedding": False}):
        (value, error), *_ = population.audits(20, 1, np.random.default_rng(3), **how)
        rows = torch.from_numpy(np.random.default_rng(3).choice(80, 20, replace=False))
        estimator = "embedding" if how["embedding"] else "pairwise"
        one = mec_mmd2(z, x[rows], rows, y, kernel=kernel, strength=how["strength"], estimator=estimator)
        assert value == pytest.approx(float(one.value))
        assert error == pytest.approx(one.audit_standard_error)
    assert population.oracle == pytest.approx(float(plain_mmd2(x, y, kernel)))
    assert population.design_variance(80, 1.0, True) == 0


def test_the_closed_form_is_the_limit_of_many_simulated_rows_and_its_gradient_leads_to_the_minimum():
    rng = np.random.default_rng(0)
    kernel, x = GaussianKernel(0.5, 1.0), torch.from_numpy(rng.normal(1, 0.8, (400, 1)))
    location, scale = sim.fit_location_scale(equally_weighted(x), kernel, (0.0, 1.0))
    y = np.quantile(rng.normal(size=200_000), (np.arange(1500) + 0.5) / 1500)[:, None]

    def distance(at):
        return float(plain_mmd2(x, torch.from_numpy(at[0] + at[1] * y), kernel, "v"))

    best = distance((location, scale))
    for off in ((0.05, 0), (-0.05, 0), (0, 0.05), (0, -0.05)):
        assert distance((location + off[0], scale + off[1])) > best


def test_a_model_told_of_the_noise_takes_it_off_the_scale():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(1, 0.8, (4000, 1)) + 0.6 * rng.normal(size=(4000, 1)))
    found = sim.fit_location_scale(equally_weighted(x), GaussianKernel(1.0), (0.0, 1.0), noise=0.6)
    assert found == pytest.approx([1, 0.8], abs=0.06)


def test_the_stated_noise_of_the_sensors_is_theirs():
    rng = np.random.default_rng(0)
    x = rng.normal(sim.LOCATION, sim.SCALE, 200_000)
    noise = sim.heteroscedastic(x, rng) - x
    assert noise.std() == pytest.approx(sim.SENSORS["heteroscedastic"][1], rel=0.01)
    assert all((sensor(x, rng) - x).std() < x.std() for sensor, _ in sim.SENSORS.values())


def test_class_shares_of_a_known_mixture_are_found():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 60)
    source = torch.from_numpy(rng.normal(size=(180, 2)) + 4 * np.eye(3, 2)[labels])
    target = torch.from_numpy(rng.normal(size=(400, 2)) + 4 * np.eye(3, 2)[np.repeat([0, 1, 2], [80, 80, 240])])
    shares = sim.class_shares(equally_weighted(target), source, labels, GaussianKernel(1.0, 3.0))
    assert shares.sum() == pytest.approx(1, abs=1e-4)
    assert shares == pytest.approx([0.2, 0.2, 0.6], abs=0.06)


def test_g_and_k_without_skew_and_tails_is_normal():
    normal = np.linspace(-2, 2, 9)
    np.testing.assert_allclose(sim.g_and_k((1.0, 2.0, 0.0, 0.0), normal), 1 + 2 * normal)
    np.testing.assert_allclose(
        sim.g_and_k(sim.G_AND_K, torch.from_numpy(normal)).numpy(), sim.g_and_k(sim.G_AND_K, normal)
    )


def test_the_plug_in_keeps_audited_truths_and_imputations_differ_beyond_them():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 1))
    z, audited = torch.from_numpy(2 * x + rng.normal(size=(200, 1))), torch.arange(50)
    x = torch.from_numpy(x)
    filled = plug_in(z, x[audited], audited)
    torch.testing.assert_close(filled[:50], x[:50])
    assert filled.std() < x.std()  # regression shrinks: why a plug-in misses the scale
    draws = imputations(z, x[audited], audited, rng)
    assert len(draws) == 5
    assert all((draw[:50] == x[:50]).all() for draw in draws)
    assert (draws[0][50:] != draws[1][50:]).any()
    assert torch.stack(draws).std(1).mean() == pytest.approx(float(x.std()), rel=0.15)


def test_strength_0_fits_what_the_audit_alone_does():
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(60, 1)), torch.from_numpy(rng.normal(size=(60, 1)))
    known, rows = torch.from_numpy(x[:20]), torch.arange(20)
    alone = sim.fit_location_scale(equally_weighted(known), GaussianKernel(1.0), (0.0, 1.0))
    zero = sim.fit_location_scale(corrected_sample(z, known, rows, strength=0.0), GaussianKernel(1.0), (0.0, 1.0))
    np.testing.assert_allclose(alone, zero, atol=1e-8)


def test_permuting_truths_inside_the_audit_moves_no_embedding_so_the_control_draws_other_rows():
    rng = np.random.default_rng(0)
    x, z = (torch.from_numpy(rng.normal(size=(40, 1))) for _ in range(2))
    rows, order = torch.arange(12), torch.from_numpy(rng.permutation(12))
    one, two = (corrected_sample(z, x[rows][o], rows) for o in (rows, order))
    kernel, at = median_kernel(x), torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None]
    torch.testing.assert_close(kernel(at, one.points) @ one.weights, kernel(at, two.points) @ two.weights)


@pytest.mark.parametrize("label", FITTED)
def test_every_candidate_fits(label):
    params = Params(rows=120)
    measured = measure_fit(FITTED[label], {"seed": 0, "sensor": "saturation", "share": 0.1}, params, None)
    assert all(math.isfinite(value) for value in measured.values())


def test_g_and_k_is_fitted_by_the_loss_itself():
    params = Params(rows=120, steps=3)
    measured = measure_g_and_k(FITTED["mec"], {"seed": 0}, params, None)
    assert len(measured) == 4


def test_the_first_claim_is_read_from_the_pooled_bias_of_each_sensor():
    def frame(mec, plain):
        rows = [("mec", mec, 0.01)] * 4 + [("plain", plain, 0.0)] * 4
        cells = pd.DataFrame(rows, columns=["candidate", "bias", "Monte Carlo error"])
        return cells.assign(sensor="linear bias", share=0.1)

    assert unbiased(frame(0.01, 0.06)) is True  # 2 and 12 errors of .005
    assert "mec 4.0" in unbiased(frame(0.02, 0.06))
    assert "plain 8.0" in unbiased(frame(0.0, 0.04))


def test_claims_that_nothing_measures_are_not_made():
    ids = {claim.id for part in parts(Params(measured=["diabetes"], images=0)) for claim in part.claims}
    assert "C5" not in ids
    assert "R2-diabetes" in ids
    fifth = next(claim for part in parts(Params()) for claim in part.claims if claim.id == "C5")
    assert [leaf.id for leaf in leaves(fifth)] == [*(f"C5-{d}" for d in DOMAINS), "C5-0.05", "C5-0.1", "C5-0.3"]


@pytest.mark.parametrize("name", [pytest.param("vader", marks=fetched("vader"))])
def test_the_held_out_rating_is_not_in_the_mean_it_is_noise_of(name):
    x, z = rated("nyt", generator(0))
    assert len(x) == len(z) > 5000
    assert 0.5 < np.corrcoef(x[:, 0], z[:, 0])[0, 1] < 0.95
    x, z, y = halves("nyt", generator(1), Params())
    assert x.shape == z.shape == y.shape == (1500, 1)


@pytest.fixture
def csv(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 2))
    frame = pd.DataFrame(np.c_[x, x + rng.normal(size=(160, 2))], columns=["a", "b", "za", "zb"])
    frame["site"] = ["north", "south"] * 80
    frame.to_csv(tmp_path / "mine.csv", index=False)
    return {"data": str(tmp_path / "mine.csv"), "truth": ["a", "b"], "noisy": ["za", "zb"], "images": 0}


def test_the_users_own_data_are_audited_in_halves_of_their_groups(csv):
    params = Params(**csv, group="site")
    assert names_of(params) == ["north", "south"]
    assert names_of(Params(**csv)) == ["all"]
    assert own_rows(params, "north")[0].shape == (80, 2)
    x, z, y = halves("south", generator(0), params)
    assert x.shape == z.shape == y.shape == (40, 2)
    measured = next(part for part in parts(params) if part.name == "measured")
    assert [leaf.id for leaf in leaves(measured.claims[0])] == ["C5-north", "C5-south"]
    trial.check(params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "no/such.csv"}, "no such file"),
        ({"truth": ["c", "b"]}, "no column 'c'"),
        ({"truth": ["a"]}, "truth= has 1 columns and noisy= 2"),
        ({"truth": ["site", "b"]}, "column 'site' must hold a number"),
        ({"group": "a"}, "has fewer than 60 rows"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_any_worker_starts(csv, changes, message):
    with pytest.raises(InputError, match=message):
        trial.check(make_params(trial, None, {**csv, **changes}))


def test_unknown_populations_and_shares_are_refused():
    with pytest.raises(UnknownNameError, match="amazon"):
        make_params(trial, "smoke", {"measured": ["amazone"]})
    with pytest.raises(InputError, match="shares must lie"):
        make_params(trial, "smoke", {"shares": [0.0]})


def test_a_missing_sample_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    with pytest.raises(MissingSampleError, match="fairtrial samples get"):
        trial.check(Params())
