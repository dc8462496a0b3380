import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fairtrial.evaluation.ensemble_selection import softmax as batched
from fairtrial.evaluation.ensemble_selection.softmax import extend, fit, softmax


def problem(seed=0, n=120, classes=3, models=6):
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=n)
    said = np.where(
        rng.random((n, models)) < rng.uniform(0.1, 0.5, models), rng.integers(classes, size=(n, models)), y[:, None]
    )
    hot = (said.T[:, None] == np.arange(classes)[:, None]).astype(float)  # (M, C, n)
    return y, hot


def objective(design, y, weights):
    logits = design @ weights
    loss = (softmax(logits, axis=1)[1] - logits[np.arange(len(y)), y]).sum()
    return loss + 0.5 * (weights[1:] ** 2).sum()


@pytest.mark.parametrize(("classes", "strength"), [(2, 2.0), (3, 1.0), (5, 1.0)])
def test_a_fit_is_that_of_scikit_learn(classes, strength):
    # With two classes scikit-learn penalises the difference of the two columns: half as much at the same C.
    y, hot = problem(classes=classes)
    design = np.concatenate([np.ones((len(y), 1)), *(h.T for h in hot[:3])], axis=1)
    weights, _ = fit(design, y, classes)
    peer = LogisticRegression(C=strength, tol=1e-8, max_iter=1000).fit(design[:, 1:], y)
    np.testing.assert_allclose(softmax(design @ weights, axis=1)[0], peer.predict_proba(design[:, 1:]), atol=2e-4)


def test_the_hessian_is_the_slope_of_the_gradient():
    y, hot = problem()
    design = np.concatenate([np.ones((len(y), 1)), hot[0].T], axis=1)
    weights, hessian = fit(design, y, 3)

    def gradient(flat):
        w = flat.reshape(3, -1).T
        ridge = np.r_[batched.FREE, np.ones(design.shape[1] - 1)][:, None]
        return (design.T @ (softmax(design @ w, axis=1)[0] - np.eye(3)[y]) + ridge * w).T.ravel()

    flat, h = weights.T.ravel(), 1e-5
    numeric = np.stack([(gradient(flat + h * e) - gradient(flat - h * e)) / (2 * h) for e in np.eye(len(flat))])
    np.testing.assert_allclose(hessian, numeric, atol=1e-5)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("chosen", [0, 2])
def test_extending_all_candidates_at_once_fits_each_as_alone(classes, chosen):
    y, hot = problem(classes=classes, models=7)
    shared = np.concatenate([np.ones((len(y), 1)), *(h.T for h in hot[:chosen])], axis=1)
    weights, hessian = fit(shared, y, classes)
    of_shared, of_own = extend(shared, hot[chosen:], y, weights, hessian)
    for own, a, b in zip(hot[chosen:], of_shared, of_own, strict=True):
        design = np.concatenate([shared, own.T], axis=1)
        best = objective(design, y, fit(design, y, classes)[0])
        assert objective(design, y, np.concatenate([a, b], axis=1).T) <= best + 2e-3 * len(y) * np.log(2)


def test_a_chunk_of_candidates_gives_what_all_give(monkeypatch):
    y, hot = problem()
    shared = np.ones((len(y), 1))
    weights, hessian = fit(shared, y, 3)
    whole = extend(shared, hot, y, weights, hessian)
    monkeypatch.setattr(batched, "CHUNK", 1)
    for one, other in zip(whole, extend(shared, hot, y, weights, hessian), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
