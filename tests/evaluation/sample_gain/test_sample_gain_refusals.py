"""What cannot be compared is refused by name, and constant scores are worth nothing."""

import math

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier

from fairtrial.errors import FairtrialError, InputError
from fairtrial.evaluation.sample_gain import (
    SplitScores,
    compare_estimators,
    compare_scores,
    cross_validate,
    five_by_two_f_test,
    nested_cross_validation,
    sign_test,
    stratified_bootstrap,
    two_on_single,
)

NAN = [0.1, math.nan, 0.2, 0.1, 0.3]
TABLES = {
    name: SplitScores.from_folds(means, n_test=20, n_train=80)
    for name, means in {"mine": [0.9, 0.8, 0.9, 0.8, 0.9], "base": [0.7, 0.8, 0.7, 0.6, 0.7]}.items()
}
X, Y = np.arange(40.0)[:, None], np.arange(40) % 2


def nested(splits):
    return [[math.nan] * len(test) for _, test in splits]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: compare_scores(TABLES, baseline="base", margin=math.nan), "margin=nan"),
        (lambda: compare_scores(TABLES, baseline="base", margin="0.1"), "margin='0.1'"),
        (lambda: compare_scores(TABLES, baseline="base", rope=math.nan), "rope=nan"),
        (lambda: compare_scores(TABLES, baseline="base", rope=-0.1), "rope=-0.1"),
        (lambda: compare_scores({**TABLES, "list": [0.9, 0.8]}, baseline="base"), "list: give a SplitScores"),
        (lambda: compare_scores(TABLES, baseline=["base"]), r"baseline=\['base'\] is none of 'mine', 'base'"),
        (lambda: compare_scores(dict(enumerate(TABLES.values())), baseline="1"), "baseline='1' is none of 0, 1"),
        (lambda: compare_estimators({"a": 1, "b": 2}, X, Y, baseline="a", margin=math.nan), "margin=nan"),
        (lambda: cross_validate(DummyClassifier(), X, None), "y is None"),
        (lambda: cross_validate(DummyClassifier(), X, Y, groups=[0] * 39 + [None]), "none for sample 39"),
        (lambda: nested_cross_validation(nested, 20, folds=4, repeats=1), r"scores of folds \(0, 0\): number 0"),
        (lambda: nested_cross_validation(nested, 20, folds=2.5), "folds=2.5"),
        (lambda: nested_cross_validation(nested, 5, folds=4), "n=5"),
        (lambda: two_on_single(NAN, [0.1] * 5), "method: number 1 is not finite"),
        (lambda: two_on_single([0.1] * 5, [0.1] * 4), "as many of both"),
        (lambda: sign_test(NAN), "differences: number 1 is not finite"),
        (lambda: sign_test(["better"]), "real numbers"),
        (lambda: stratified_bootstrap([NAN]), "scores: number 1 is not finite"),
        (lambda: five_by_two_f_test(np.ones((5, 2)) * 1j), "real numbers"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, word):
    with pytest.raises(FairtrialError, match=word):
        call()


def test_constant_scores_tell_nothing_of_their_error():
    one = nested_cross_validation(lambda splits: [[1.0] * len(test) for _, test in splits], 20, folds=4, repeats=2)
    assert (one.mean, one.low, one.high) == (1.0, -math.inf, math.inf)
    assert "all scores are the same" in one.notes[0]


def test_a_scorer_may_return_an_array_of_one_number():
    out = cross_validate(DummyClassifier(), X, Y, cv=4, scoring=lambda model, x, y: np.array(0.5))
    assert out["test_score"].tolist() == [0.5] * 4
    with pytest.raises(InputError, match="a scorer of one number"):
        cross_validate(DummyClassifier(), X, Y, cv=4, scoring=lambda model, x, y: np.array([0.5]))
