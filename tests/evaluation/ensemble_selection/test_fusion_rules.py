import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection import MajorityVote, NaiveBayesFusion, SoftmaxFusion, WeightedVote

RULES = (SoftmaxFusion, NaiveBayesFusion, WeightedVote, MajorityVote)


def table(seed=0, n=300, errors=(0.1, 0.25, 0.3), classes=3):
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % classes)
    wrong = rng.random((n, len(errors))) < errors
    return np.where(wrong, (y[:, None] + rng.integers(1, classes, size=wrong.shape)) % classes, y[:, None]), y


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_probabilities_and_beats_the_worst_member(rule):
    X, y = table()
    fused = rule().fit(X, y)
    probability = fused.predict_proba(X)
    np.testing.assert_allclose(probability.sum(1), 1)
    assert (fused.predict(X) == probability.argmax(1)).all()
    assert fused.score(X, y) > (X[:, 2] == y).mean()


def test_naive_bayes_is_bayes_rule_on_smoothed_shares():
    X, y = table()
    fused = NaiveBayesFusion().fit(X, y)
    row = X[0]
    joint = [
        (y == k).mean() * np.prod([((X[y == k, j] == row[j]).sum() + 1) / ((y == k).sum() + 4) for j in range(3)])
        for k in range(3)
    ]
    np.testing.assert_allclose(fused.predict_proba(X[:1])[0], np.array(joint) / sum(joint))


def test_the_weighted_vote_weighs_by_log_odds_of_accuracy():
    X, y = table()
    fused = WeightedVote().fit(X, y)
    right = (y[:, None] == X).sum(0)
    np.testing.assert_allclose(fused.weights_, np.log(2 * (right + 0.5) / (300 - right + 0.5)))


def test_a_tied_majority_follows_the_most_accurate_of_the_tied_models():
    X, y = table()  # models in the order of accuracy
    vote = MajorityVote().fit(X, y)
    said = [[0, 1, 2], [0, 1, 1], [2, 1, 0], [None, 1, 2], [None, None, 2]]
    assert vote.predict(np.array(said, dtype=object)).tolist() == [0, 1, 2, 1, 2]


@pytest.mark.parametrize("rule", [WeightedVote, MajorityVote])
def test_without_any_vote_the_prior_decides(rule):
    X, y = table()
    y = np.where(np.arange(300) < 200, 1, y)
    silent = np.full((1, 3), None)
    np.testing.assert_allclose(rule().fit(X, y).predict_proba(silent)[0], np.bincount(y) / 300, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_model_that_falls_silent_after_fitting_is_no_error(rule):
    X, y = table()
    later = X.astype(object)
    later[:, 1] = None
    assert rule().fit(X, y).score(later, y) > 0.6


def test_no_model_at_all_is_the_prior():
    X, y = table()
    fused = SoftmaxFusion().fit(X[:, :0], y)
    np.testing.assert_allclose(fused.predict_proba(X[:5, :0]), np.tile(np.bincount(y) / 300, (5, 1)), atol=1e-4)


def test_another_number_of_models_is_refused():
    X, y = table()
    with pytest.raises(InputError, match="answers of 2 models: the rule was fitted on 3"):
        MajorityVote().fit(X, y).predict(X[:, :2])


def test_answers_and_labels_are_of_the_same_items():
    with pytest.raises(InputError, match="4 items and 3 labels"):
        MajorityVote().fit([["a"], ["b"], ["a"], ["b"]], ["a", "b", "a"])
