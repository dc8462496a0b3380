import math

import numpy as np
import pytest

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.encoder_ranking.few_labels import FewLabelSelector, evaluation_order
from fairtrial.evaluation.encoder_ranking.probe import RidgeProbe
from fairtrial.evaluation.encoder_ranking.ranking import Ranking

NAMES = tuple("abcdefghij")


def ranking(names=NAMES, families=None):
    return Ranking(tuple(names), {}, {}, {}, len(names), families=families or {})


def correct(accuracy, n=200, seed=0):
    return np.random.default_rng(seed).permutation(np.arange(n) < accuracy * n)


def told(selector, accuracies, n=200):
    asked = []
    while (name := selector.next()) is not None:
        asked.append((name, selector.share))
        selector.tell(name, correct(accuracies[name], math.ceil(selector.share * n), seed=ord(name)))
    return asked


def test_the_prior_goes_first_and_the_budget_ends_it():
    selector = FewLabelSelector(ranking(), budget=3)
    asked = told(selector, {"a": 0.5, "b": 0.9, "c": 0.6})
    assert asked == [("a", 1.0), ("b", 1.0), ("c", 1.0)]
    assert selector.best_ == "b"
    assert selector.regret_bound_ == 0.0


def test_representatives_come_first_where_families_exceed_the_budget():
    families = dict.fromkeys(NAMES, "rest") | {"a": "x", "b": "x", "c": "y", "d": "y", "e": "x"}
    assert evaluation_order(ranking(families=families), 2)[:3] == ["a", "c", "f"]
    assert evaluation_order(ranking(families=families), 3) == list(NAMES)
    assert [
        name for name, _ in told(FewLabelSelector(ranking(families=families), budget=2), dict.fromkeys(NAMES, 0.5))
    ] == [
        "a",
        "c",
    ]


def test_within_noise_the_higher_prior_wins():
    one = correct(0.7, seed=1)
    other = one.copy()
    other[np.flatnonzero(~one)[:2]] = True  # two items of 200 better, and two worse
    other[np.flatnonzero(one)[:1]] = False
    for names, best in ((("a", "b"), "a"), (("b", "a"), "b")):
        selector = FewLabelSelector(ranking(names), budget=2)
        while (name := selector.next()) is not None:
            selector.tell(name, {"a": one, "b": other}[name])
        assert selector.best_ == best
        assert 0 <= selector.regret_bound_ < 0.05


def test_equal_encoders_fall_to_the_prior():
    selector = FewLabelSelector(ranking(), budget=2)
    for name in "ab":
        selector.tell(name, correct(0.7))
    assert selector.best_ == "a"
    assert selector.regret_bound_ == 0.0


def test_a_bandit_halves_on_nested_subsets_for_the_same_labels():
    selector = FewLabelSelector(ranking(), budget=2, strategy="bandit")
    accuracies = {name: 0.9 - place / 20 for place, name in enumerate(NAMES)}
    accuracies["g"] = 1.0
    asked = told(selector, accuracies, n=600)
    sizes = [share for _, share in asked]
    assert sizes == sorted(sizes)
    counts = [sizes.count(share) for share in dict.fromkeys(sizes)]
    assert counts == [8, 4, 2]
    assert sum(sizes) == pytest.approx(2)
    assert selector.best_ == "g"


def test_a_bandit_with_budget_for_all_evaluates_all():
    asked = told(FewLabelSelector(ranking("abc"), budget=5, strategy="bandit"), dict.fromkeys("abc", 0.5))
    assert asked == [(name, 1.0) for name in "abc"]


@pytest.mark.parametrize("strategy", ["prior", "bandit"])
def test_fit_evaluates_with_the_probe(strategy):
    rng = np.random.default_rng(0)
    labels = np.array(["cat", "dog", "eel"])[np.arange(150) % 3]
    signal = (labels[:, None] == np.unique(labels)).astype(float)
    asked = []

    def features(name, noise):
        def give():
            asked.append(name)
            return signal + noise * rng.normal(size=(150, 3))

        return give

    pool = {name: features(name, noise) for name, noise in zip("abcd", (3.0, 2.0, 0.1, 1.0), strict=True)}
    selector = FewLabelSelector(ranking("abcd"), budget=3, strategy=strategy).fit(pool, labels)
    assert selector.best_ == "c"
    assert selector.observed["c"].mean() > 0.9
    assert set(asked) == set("abc" if strategy == "prior" else "abcd")


def test_the_regret_bound_holds_for_all_encoders_together():
    rng = np.random.default_rng(0)
    accuracies = dict(zip("abcde", (0.70, 0.72, 0.74, 0.70, 0.75), strict=True))
    held = []
    for _ in range(80):
        selector = FewLabelSelector(ranking("abcde"), budget=5)
        for name in "abcde":
            selector.tell(name, rng.random(200) < accuracies[name])
        held.append(selector.regret_bound_ >= 0.75 - accuracies[selector.best_])
    assert np.mean(held) > 0.93


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s: s.tell("b", [1, 0]), "told of 'b' while 'a' was to be evaluated"),
        (lambda s: s.tell("a", [1, 2]), "a vector of 0 and 1"),
        (lambda s: s.tell("a", [[1, 0]]), "a vector of 0 and 1"),
        (lambda s: (s.tell("a", [1, 0, 1]), s.tell("b", [1, 0])), "b: 2 items, and 3 of a"),
        (lambda s: s.best_, "nothing was told yet"),
        (lambda s: s.fit({}, [0, 1, 2, 3, 4]), "5 labels of 5 classes"),
        (lambda s: s.fit({}, [0, 0, 1, 1]), "no encoder 'a'"),
        (lambda s: s.fit({"a": np.eye(5)}, [0, 0, 1, 1]), "a has 5 items and there are 4 labels"),
        (lambda s: FewLabelSelector(ranking(), budget=0), "budget=0"),
        (lambda s: FewLabelSelector(ranking(), budget=1.5), "budget=1.5"),
        (lambda s: RidgeProbe(strengths=()), "strengths is empty"),
        (lambda s: RidgeProbe(strengths=(1.0, -1.0)), "strengths=-1.0"),
        (lambda s: RidgeProbe(holdout=1.0), "holdout=1.0"),
        (lambda s: FewLabelSelector(ranking(), strategy="greedy"), "no strategy 'greedy'"),
    ],
)
def test_what_cannot_be_right_is_refused(wrong, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        wrong(FewLabelSelector(ranking(), budget=2))
