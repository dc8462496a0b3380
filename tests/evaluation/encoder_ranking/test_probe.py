import numpy as np
import pytest
from sklearn.linear_model import Ridge

from fairtrial.errors import InputError
from fairtrial.evaluation.encoder_ranking.probe import RidgeProbe


def drawn(n=60, d=8, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.array(["x", "y", "z"])[rng.integers(classes, size=n)]
    means = {name: rng.normal(size=d) for name in "xyz"}
    return np.stack([means[name] for name in labels]) + 1.5 * rng.normal(size=(n, d)) + 5, labels


def refitted(features, labels, strength, train, test):
    """Classify by scikit-learn's ridge on standardised features; a strength is in units of the kernel's diagonal."""
    a = (features - features.mean(axis=0)) / features.std(axis=0) / np.sqrt(features.shape[1])
    classes = np.unique(labels)
    model = Ridge(alpha=strength).fit(a[train], (labels[train, None] == classes).astype(float))
    return classes[model.predict(a[test]).argmax(axis=1)] == labels[test]


@pytest.mark.parametrize("d", [8, 150])
def test_left_out_items_are_classified_as_by_refits(d):
    features, labels = drawn(d=d)
    probe = RidgeProbe(strengths=(0.03,))
    rest = [np.delete(np.arange(60), i) for i in range(60)]
    expected = [refitted(features, labels, 0.03, rows, [i])[0] for i, rows in enumerate(rest)]
    assert probe(features, labels).tolist() == expected


@pytest.mark.parametrize("d", [8, 150])
def test_held_out_items_are_classified_as_by_a_refit(d):
    features, labels = drawn(d=d)
    train = np.arange(60) % 3 > 0
    got = RidgeProbe(strengths=(0.03,)).test(features, labels, train)
    assert got.tolist() == refitted(features, labels, 0.03, train, ~train).tolist()


def test_several_tasks_cost_one_and_change_nothing():
    features, labels = drawn()
    tasks = np.stack([labels, np.where(labels == "x", "x", "other")], axis=1)
    probe = RidgeProbe()
    assert (probe(features, tasks) == np.stack([probe(features, tasks[:, t]) for t in (0, 1)], axis=1)).all()
    train = np.arange(60) < 40
    assert probe.test(features, tasks, train).shape == (20, 2)


def test_the_strength_is_that_of_the_best_holdout():
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=100)
    features = rng.normal(size=(100, 300))
    features[:, 0] += labels  # one weak feature among noise needs a strong penalty or none: the holdout decides
    one = [RidgeProbe(strengths=(s,))(features, labels).mean() for s in RidgeProbe().strengths]
    assert min(one) <= RidgeProbe()(features, labels).mean() <= max(one)


def test_noise_is_classified_by_chance():
    rng = np.random.default_rng(0)
    assert abs(RidgeProbe()(rng.normal(size=(400, 50)), rng.integers(4, size=400)).mean() - 0.25) < 0.1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.arange(60), "60 labels of 60 classes"),
        (np.zeros(60), "60 labels of 1 classes"),
        (np.arange(59) % 3, "one label an item"),
    ],
)
def test_too_few_labels_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        RidgeProbe()(drawn()[0], labels)
