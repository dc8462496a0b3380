"""The trial's learners against scikit-learn's."""

import sys

import numpy as np
import pytest
from sklearn.datasets import load_wine
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.sample_gain import learners
from fairtrial.evaluation.sample_gain.learners import CLASSIFIERS, DEPTH, RIDGE, learner, own_estimator, ridge_scores

X, Y = load_wine(return_X_y=True)
TRAIN, TEST = np.arange(0, 178, 2), np.arange(1, 178, 2)
SCALER = StandardScaler().fit(X[TRAIN])
RNG = np.random.default_rng


def scores(name, seed=0, scoring="accuracy"):
    return learner(name, scoring)(X[TRAIN], Y[TRAIN], X[TEST], Y[TEST], RNG(seed))


def test_ridge_is_scikit_learns_on_standardised_features():
    target = np.where(Y[TRAIN, None] == np.arange(3), 1.0, -1.0)
    twin = Ridge(alpha=RIDGE * len(TRAIN)).fit(SCALER.transform(X[TRAIN]), target)
    np.testing.assert_allclose(ridge_scores(X[TRAIN], Y[TRAIN], X[TEST]), twin.predict(SCALER.transform(X[TEST])))


def test_the_centroid_is_scikit_learns_and_never_a_class_without_samples():
    twin = NearestCentroid().fit(SCALER.transform(X[TRAIN]), Y[TRAIN])
    expected = twin.predict(SCALER.transform(X[TEST])) == Y[TEST]
    assert np.array_equal(scores("centroid"), expected)
    some = Y[TRAIN] != 1
    assert 1 not in CLASSIFIERS["centroid"](X[TRAIN][some], Y[TRAIN][some], X[TEST], RNG(0))


def test_constant_features_are_harmless():
    wide = np.c_[X, np.full(178, 7.0)]
    for name in ("ridge", "centroid"):
        assert np.array_equal(CLASSIFIERS[name](wide[TRAIN], Y[TRAIN], wide[TEST], RNG(0)),
                              CLASSIFIERS[name](X[TRAIN], Y[TRAIN], X[TEST], RNG(0)))  # fmt: skip


def test_the_tree_is_the_same_at_every_fit():
    twin = DecisionTreeClassifier(max_depth=DEPTH, random_state=0).fit(X[TRAIN], Y[TRAIN])
    assert np.array_equal(scores("tree"), twin.predict(X[TEST]) == Y[TEST])
    assert np.array_equal(scores("tree", seed=1), scores("tree", seed=2))


@pytest.mark.parametrize("name", sorted(set(CLASSIFIERS) - {"forest", "mlp"}))
def test_stochastic_learners_differ_from_seed_to_seed_and_only_they(name):
    several = {scores(name, seed).tobytes() for seed in range(6)}
    assert (len(several) > 1) == (name in learners.STOCHASTIC)
    assert scores(name).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forest", "mlp"])
def test_the_slow_ones_learn_too(name):
    assert scores(name).mean() > 0.8
    assert np.array_equal(scores(name, 1), scores(name, 1))


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_learners.py").write_text(
        "from sklearn.naive_bayes import GaussianNB\nfrom sklearn.tree import DecisionTreeRegressor\n"
        "bayes = GaussianNB()\nBayes = GaussianNB\ndef tree(): return DecisionTreeRegressor()\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    yield "my_learners"
    sys.modules.pop("my_learners", None)
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


def test_your_own_estimator_is_an_instance_a_class_or_a_function(module):
    names = {type(own_estimator(f"{module}:{name}")).__name__ for name in ("bayes", "Bayes")}
    assert names == {"GaussianNB"}
    assert scores(f"{module}:bayes").mean() > 0.9
    assert scores(f"{module}:tree", scoring="neg_mean_squared_error").max() <= 0
    assert learners.source_digest(f"{module}:bayes") != learners.source_digest("ridge") == ""


def test_what_is_no_learner_is_refused(module):
    with pytest.raises(UnknownNameError, match="did you mean 'ridge'"):
        learner("rigde", "accuracy")
    for name, message in (
        ("no_such_module:x", "No module named"),
        (f"{module}:nothing", "has no attribute"),
        (f"{module}:number", "is no scikit-learn estimator"),
    ):
        with pytest.raises(InputError, match=message):
            own_estimator(name)


def test_a_scoring_without_per_sample_scores_is_refused(module):
    one_of_a_class = np.r_[TEST[Y[TEST] == 0], TEST[Y[TEST] == 1][:1]]
    score = learner(f"{module}:bayes", "balanced_accuracy")
    with pytest.raises(InputError, match="has no per-sample scores by it"):
        score(X[TRAIN], Y[TRAIN], X[one_of_a_class], Y[one_of_a_class], RNG(0))
