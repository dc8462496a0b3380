import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from fairtrial.errors import InputError
from fairtrial.training.gauss_newton import FGNClassifier


@pytest.mark.filterwarnings(
    "ignore::sklearn.exceptions.ConvergenceWarning", "ignore::sklearn.exceptions.SkipTestWarning"
)
@parametrize_with_checks([FGNClassifier(max_iter=8)])
def test_it_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def objective(model, x, y, c):
    index = np.searchsorted(model.classes_, y)
    return -c * model.predict_log_proba(x)[np.arange(len(y)), index].sum() + (model.coef_**2).sum() / 2


@pytest.mark.parametrize("c", [0.01, 1.0])
def test_it_reaches_the_optimum_of_logistic_regression(c):
    x, y = load_iris(return_X_y=True)
    x = x / x.std()
    ours = FGNClassifier(C=c, max_iter=1000, tol=1e-7).fit(x, y)
    theirs = LogisticRegression(C=c, max_iter=5000, tol=1e-10).fit(x, y)
    assert objective(ours, x, y, c) == pytest.approx(objective(theirs, x, y, c), rel=1e-5)
    np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=0.01)


def test_batches_and_conjugate_gradients_come_near(monkeypatch):
    x, y = load_iris(return_X_y=True)
    x = x / x.std()
    best = objective(FGNClassifier(max_iter=1000, tol=1e-7).fit(x, y), x, y, 1.0)
    monkeypatch.setattr("fairtrial.training.gauss_newton.classifier.LARGEST_FACTORISED", 10)
    by_cg = FGNClassifier(max_iter=300, tol=1e-5).fit(x, y)
    assert objective(by_cg, x, y, 1.0) < 1.02 * best
    by_batches = FGNClassifier(batch_size=50, max_iter=40, tol=1e-2, random_state=0).fit(x, y)
    assert by_batches.score(x, y) > 0.9


def test_float32_stays_float32_and_labels_may_be_words():
    x, y = load_iris(return_X_y=True)
    names = np.array(["a", "b", "c"])[y]
    model = FGNClassifier(max_iter=200, tol=1e-4).fit(x.astype(np.float32), names)
    assert model.coef_.dtype == np.float32
    assert set(model.predict(x)) <= set(names)


def test_it_says_when_it_has_not_settled_and_refuses_a_single_class():
    x, y = load_iris(return_X_y=True)
    with pytest.warns(ConvergenceWarning, match="did not settle"):
        FGNClassifier(max_iter=2).fit(x, y)
    with pytest.raises(InputError, match="1 class"):
        FGNClassifier().fit(x, np.zeros(len(x)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features_of_any_scale_are_fitted(dtype):
    x, y = load_iris(return_X_y=True)
    with pytest.warns(ConvergenceWarning):
        model = FGNClassifier(max_iter=40, tol=0).fit((1e5 * x[::5]).astype(dtype), y[::5])
    assert model.score(1e5 * x, y) > 0.9
