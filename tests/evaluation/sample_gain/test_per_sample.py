"""The mean of a scorer's per-sample values is the scorer's own number."""

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import f1_score, get_scorer, make_scorer, roc_auc_score
from sklearn.naive_bayes import GaussianNB
from sklearn.svm import LinearSVC

from fairtrial.evaluation.sample_gain.per_sample import FAST, MEANS, PerSampleScorer, Recorder, Replay
from fairtrial.stats import auc_influence, pseudo_values

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4))
Y = (X[:, 0] + RNG.normal(size=60) > 0).astype(int)
NAMES = np.array(["no", "yes"])
BAYES = GaussianNB().fit(X[:30], Y[:30])
LINE = LinearRegression().fit(*(a[:200] for a in load_diabetes(return_X_y=True)))


def values(scoring, estimator, features, targets, **params):
    scorer = PerSampleScorer(scoring)
    value = scorer(estimator, features, targets, **params)
    assert value == get_scorer(scoring)(estimator, features, targets, **params)
    return value, scorer.rows[0]


@pytest.mark.parametrize(
    "scoring", ["accuracy", "neg_log_loss", "neg_brier_score", "roc_auc", "f1", "balanced_accuracy", "precision"]
)
@pytest.mark.parametrize("labels", [np.arange(2), NAMES], ids=["numbers", "words"])
def test_classification_scores_are_means_of_their_values(scoring, labels):
    if scoring in ("f1", "precision", "neg_brier_score") and labels is NAMES:
        scoring = {"f1": "f1_macro", "precision": "precision_macro"}.get(scoring, "accuracy")
    estimator = GaussianNB().fit(X[:30], labels[Y[:30]])
    value, rows = values(scoring, estimator, X[30:], labels[Y[30:]])
    assert rows.shape == (30,)
    assert rows.mean() == pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize("scoring", ["neg_mean_squared_error", "neg_mean_absolute_error", "r2",
                                     "neg_root_mean_squared_error", "neg_median_absolute_error"])  # fmt: skip
def test_regression_scores_are_means_of_their_values(scoring):
    features, targets = (a[200:240] for a in load_diabetes(return_X_y=True))
    value, rows = values(scoring, LINE, features, targets)
    assert rows.mean() == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("scoring", ["accuracy", "neg_log_loss", "neg_brier_score"])
def test_more_than_two_classes(scoring):
    features, targets = load_iris(return_X_y=True)
    estimator = GaussianNB().fit(features[::2], targets[::2])
    value, rows = values(scoring, estimator, features[1::2], targets[1::2])
    assert rows.mean() == pytest.approx(value, rel=1e-8)


def test_accuracy_and_errors_are_the_single_scores():
    assert np.array_equal(values("accuracy", BAYES, X, Y)[1], BAYES.predict(X) == Y)
    features, targets = load_diabetes(return_X_y=True)
    errors = LINE.predict(features) - targets
    np.testing.assert_array_equal(values("neg_mean_squared_error", LINE, features, targets)[1], -(errors**2))


def test_several_outputs_and_labels():
    both = np.c_[Y, 1 - Y]
    line = LinearRegression().fit(X, both)
    value, rows = values("neg_mean_squared_error", line, X, both)
    assert rows.shape == (60,)
    assert rows.mean() == pytest.approx(value)
    np.testing.assert_allclose(rows, -((line.predict(X) - both) ** 2).mean(axis=1))


def test_the_area_under_the_curve_has_delongs_placements():
    svc = LinearSVC().fit(X[:30], Y[:30])
    for estimator, score in ((svc, svc.decision_function(X)), (BAYES, BAYES.predict_proba(X)[:, 1])):
        np.testing.assert_array_equal(values("roc_auc", estimator, X, Y)[1], auc_influence(Y, score))


@pytest.mark.parametrize("scoring", sorted(FAST))
def test_fast_metrics_are_scikit_learns(scoring):
    if scoring in ("r2", "neg_root_mean_squared_error"):
        estimator, (features, targets) = LINE, (a[200:230] for a in load_diabetes(return_X_y=True))
    else:
        estimator, features, targets = BAYES, X[30:], Y[30:]
    rows = values(scoring, estimator, features, targets)[1]
    recorded = Recorder(estimator)
    recorded.predict(features)
    scorer = get_scorer(scoring)
    slow = pseudo_values(lambda i, y: scorer(Replay(recorded), i, y), np.arange(len(targets)), targets)
    np.testing.assert_allclose(rows, slow, rtol=1e-8, atol=1e-10)


def test_scorers_made_by_scikit_learn_are_taken_apart_too():
    macro = make_scorer(f1_score, average="macro")
    value, rows = values(macro, BAYES, X[30:], Y[30:])
    assert rows.mean() == pytest.approx(value)
    area = make_scorer(roc_auc_score, response_method="predict_proba")
    assert values(area, BAYES, X[30:], Y[30:])[1] is not None


def test_a_weighted_mean_has_the_influence_of_its_samples():
    weight = RNG.exponential(size=60)
    value, rows = values("accuracy", BAYES, X, Y, sample_weight=weight)
    assert rows.mean() == pytest.approx(value)
    right = BAYES.predict(X) == Y
    step = 1e-6
    for i in (0, 17):  # the derivative of the weighted mean by one sample's multiplicity, times m
        more = weight.copy()
        more[i] *= 1 + step
        slope = (np.average(right, weights=more) - np.average(right, weights=weight)) / step
        assert (rows[i] - value) / 60 == pytest.approx(slope, rel=1e-4, abs=1e-9)
    value, rows = values("f1", BAYES, X, Y, sample_weight=weight)
    assert rows.mean() == pytest.approx(value)


def test_a_scorer_of_the_users_has_no_per_sample_values():
    scorer = PerSampleScorer(lambda estimator, features, targets: float(features[:, 0].mean()))
    assert scorer(BAYES, X, Y) == X[:, 0].mean()
    assert scorer.rows == [None]


def test_a_metric_that_needs_one_of_the_samples_has_no_per_sample_values():
    one_positive = np.r_[1, np.zeros(29, dtype=int)]
    for scoring in ("balanced_accuracy", "average_precision"):
        assert values(scoring, BAYES, X[:30], one_positive)[1] is None
    assert values("roc_auc", BAYES, X[:30], one_positive)[1] is not None
    assert values("r2", LINE, *(a[200:202] for a in load_diabetes(return_X_y=True)))[1] is None


def test_the_positive_class_is_scikit_learns():
    from_one = GaussianNB().fit(X[:30], 1 + Y[:30])  # f1's positive label is 1, here the first of two
    value, rows = values("f1", from_one, X[30:], 1 + Y[30:])
    assert rows.mean() == pytest.approx(value)


def test_known_means_are_those_of_the_specification():
    assert set(MEANS) == {
        "accuracy", "neg_log_loss", "neg_brier_score", "neg_mean_squared_error", "neg_mean_absolute_error",
    }  # fmt: skip


def test_a_recorder_is_the_estimator_it_holds():
    regression = LogisticRegression().fit(X, Y)
    recorded = Recorder(regression)
    assert np.array_equal(recorded.classes_, [0, 1])
    assert np.array_equal(recorded.predict(X), regression.predict(X))
    with pytest.raises(AttributeError):
        recorded.nothing  # noqa: B018
