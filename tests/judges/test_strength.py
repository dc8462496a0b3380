from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.judges import bradley_terry

NAMES = "abcde"
OUTCOMES = ("first", "tie", "second")


def play(strength, tie, games, seed):
    """Games between random pairs under the model."""
    rng = np.random.default_rng(seed)
    i, j = rng.permuted(np.tile(np.arange(len(strength)), (games, 1)), axis=1)[:, :2].T
    logits = np.stack([strength[i], np.log(tie) + (strength[i] + strength[j]) / 2, strength[j]], axis=1)
    outcome = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return [(NAMES[a], NAMES[b], OUTCOMES[k]) for a, b, k in zip(i, j, outcome, strict=True)]


def test_known_strengths_are_recovered():
    strength, tie = np.array([1.5, 0.5, 0.0, -0.5, -1.5]), 0.7
    fit = bradley_terry(play(strength, tie, 4000, 0))
    error = np.sqrt(np.diag(fit.covariance))
    assert (np.abs(fit.strength - strength) < 3 * error).all()
    assert (error < 0.1).all()
    assert fit.tie == pytest.approx(tie, rel=0.1)
    assert fit.names == tuple(NAMES)
    assert fit.to_frame()["name"].tolist() == list(NAMES)


def test_intervals_cover_the_strengths():
    strength = np.array([1.0, 0.3, 0.0, -0.3, -1.0])
    inside = []
    for seed in range(30):
        frame = bradley_terry(play(strength, 0.5, 120, seed)).to_frame().set_index("name").loc[list(NAMES)]
        inside.append((frame["low"] <= strength) & (strength <= frame["high"]))
    assert np.mean(inside) > 0.9


def test_the_fit_is_the_maximum_of_the_posterior():
    games = play(np.array([1.0, 0, 0, -1, 0]), 0.5, 40, 1)
    fit = bradley_terry(games, spread=2.0)

    def loss(x):
        value = (x @ x) / 8
        for first, second, outcome in games:
            s, t = x[NAMES.index(first)], x[NAMES.index(second)]
            logits = {"first": s, "tie": x[5] + (s + t) / 2, "second": t}
            value -= logits[outcome] - np.log(sum(map(np.exp, logits.values())))
        return value

    best = minimize(loss, np.zeros(6), tol=1e-10).x
    np.testing.assert_allclose(fit.strength, best[:5], atol=1e-4)
    assert np.log(fit.tie) == pytest.approx(best[5], abs=1e-4)


def test_it_does_not_matter_who_is_named_first():
    games = play(np.array([1.0, 0.5, 0, -0.5, -1.0]), 0.5, 60, 2)
    swapped = [(b, a, {"first": "second", "second": "first", "tie": "tie"}[outcome]) for a, b, outcome in games]
    one, other = bradley_terry(games), bradley_terry(swapped)
    np.testing.assert_allclose(one.strength, other.strength, atol=1e-9)
    np.testing.assert_allclose(one.covariance, other.covariance, atol=1e-9)
    assert one.tie == pytest.approx(other.tie)


def test_an_undefeated_one_is_finite_and_first():
    fit = bradley_terry([("a", "b", "first")] * 200 + [("b", "c", "first"), ("c", "b", "first")])
    assert np.isfinite(fit.strength).all()
    assert fit.to_frame()["name"][0] == "a"
    assert fit.strength.sum() == pytest.approx(0)
    assert 0 < fit.tie < 0.2  # no tie in 202 games


def test_probabilities_are_those_of_the_games():
    games = [("a", "b", "first")] * 500 + [("a", "b", "tie")] * 300 + [("a", "b", "second")] * 200
    fit = bradley_terry(games)
    np.testing.assert_allclose(fit.probabilities("a", "b"), (0.5, 0.3, 0.2), atol=0.003)
    np.testing.assert_allclose(fit.probabilities("b", "a"), (0.2, 0.3, 0.5), atol=0.003)
    difference, error = fit.difference("a", "b")
    assert difference == pytest.approx(np.log(2.5), abs=0.01)
    assert error == pytest.approx(np.sqrt(1 / 500 + 1 / 200), rel=0.05)


def test_only_ties_are_equal_strengths():
    fit = bradley_terry([("a", "b", "tie")] * 10)
    np.testing.assert_allclose(fit.strength, 0, atol=1e-9)
    assert fit.tie > 1


def test_the_unconnected_are_compared_by_the_prior():
    fit = bradley_terry([("a", "b", "first"), ("c", "d", "first")] * 20, spread=3.0)
    assert 2.5 < fit.difference("a", "c")[1] < 4


def test_bad_comparisons_are_named():
    with pytest.raises(InputError, match=r"comparison 1 is \('a', 'a', 'first'\)"):
        bradley_terry([("a", "b", "tie"), ("a", "a", "first")])
    with pytest.raises(InputError, match="comparison 0"):
        bradley_terry([("a", "b", "A")])
    with pytest.raises(InputError, match="need comparisons"):
        bradley_terry([])
    with pytest.raises(UnknownNameError, match="'z'"):
        bradley_terry([("a", "b", "tie")]).difference("a", "z")
