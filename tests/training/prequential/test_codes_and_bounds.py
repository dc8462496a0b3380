import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from fairtrial.cli.app import app
from fairtrial.errors import InputError
from fairtrial.testing import check_trial
from fairtrial.training.prequential import (
    block_code,
    kl_inverse,
    prequential_bound,
    prequential_report,
    prequential_score,
    rank_runs,
)
from fairtrial.training.prequential.runs import correlation, partial_correlation, rank_correlation
from fairtrial.training.prequential.sampler import split_blocks
from fairtrial.training.prequential.trial import PrequentialParams, auroc, check, trial
from fairtrial.training.prequential.trial import settings as settings_of


def one_at_a_time(fit, x, y, k, seed=None):
    return block_code(fit, x, y, num_classes=k, blocks=10**6, first=1, eps=0, seed=seed)


def counts(a):
    """A Bernoulli with pseudocount a on each side."""

    def fit(x, y):
        p = (y.sum() + a) / (len(y) + 2 * a)
        return lambda z: np.tile([1 - p, p], (len(z), 1))

    return fit


def test_laplaces_rule_has_its_closed_form_in_any_order():
    """log (n + 1) binom(n, k): 7.18539 for n = 10, k = 3."""
    y = np.array([1, 0, 0, 1, 0, 0, 0, 1, 0, 0])
    for seed in (None, 0, 1):
        report = one_at_a_time(counts(1.0), np.zeros((10, 1)), y, 2, seed)
        assert report.code_length == pytest.approx(math.log(11 * math.comb(10, 3)))
    assert math.log(1320) == pytest.approx(7.18539, abs=1e-5)


def test_krichevsky_trofimov_has_its_closed_form():
    y = np.array([1, 0, 0, 1, 0, 0, 0])
    code = one_at_a_time(counts(0.5), np.zeros((7, 1)), y, 2).code_length
    beta = math.lgamma(2 + 0.5) + math.lgamma(5 + 0.5) - math.lgamma(8) - math.log(math.pi)
    assert code == pytest.approx(-beta)


def test_bayesian_regression_codes_in_its_marginal_likelihood():
    """The chain rule: predictive densities of any order multiply to the evidence."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 3))
    t = x @ rng.standard_normal(3) + 0.5 * rng.standard_normal(12)
    cov = 0.25 * np.eye(12) + x @ x.T
    evidence = 0.5 * (t @ np.linalg.solve(cov, t) + np.linalg.slogdet(2 * np.pi * cov)[1])
    for order in (np.arange(12), rng.permutation(12)):
        code = 0.0
        for i, now in enumerate(order):
            past = order[:i]
            precision = np.eye(3) + x[past].T @ x[past] / 0.25
            mean = np.linalg.solve(precision, x[past].T @ t[past] / 0.25)
            variance = 0.25 + x[now] @ np.linalg.solve(precision, x[now])
            code += 0.5 * ((t[now] - x[now] @ mean) ** 2 / variance + math.log(2 * math.pi * variance))
        assert code == pytest.approx(evidence, abs=1e-8)


def test_a_cell_of_a_table_code_is_order_invariant_only_for_the_bayesian_learner():
    rng = np.random.default_rng(1)
    x, y = np.zeros((30, 1)), rng.integers(2, size=30)
    lengths = {one_at_a_time(counts(1.0), x, y, 2, s).code_length for s in range(4)}
    assert max(lengths) - min(lengths) < 1e-9

    def last_only(x, y):
        return lambda z: np.tile([0.9, 0.1] if y[-1] == 0 else [0.1, 0.9], (len(z), 1))

    lengths = {one_at_a_time(last_only, x, y, 2, s).code_length for s in range(4)}
    assert max(lengths) - min(lengths) > 1


def test_blocks_never_shrink_and_cover_all_after_the_first():
    for n, first, count in itertools.product((1, 2, 9, 100, 1000), (1, 8), (1, 5, 50)):
        if first >= n:
            continue
        ranges = split_blocks(n, first, count)
        assert ranges[0][0] == first
        assert ranges[-1][1] == n
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        assert len(ranges) <= count


@pytest.mark.parametrize("name", ["GaussianNB", "SGDClassifier", "DecisionTreeClassifier"])
def test_scikit_learn_estimators_are_coded_by_block(name):
    from sklearn.datasets import load_iris
    from sklearn.linear_model import SGDClassifier
    from sklearn.naive_bayes import GaussianNB
    from sklearn.tree import DecisionTreeClassifier

    made = {
        "GaussianNB": GaussianNB(), "SGDClassifier": SGDClassifier(loss="log_loss", random_state=0),
        "DecisionTreeClassifier": DecisionTreeClassifier(max_depth=2, random_state=0),
    }[name]  # fmt: skip
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    report = prequential_score(made, x, names, blocks=8)
    assert report.n == 150
    assert report.code_length < 150 * math.log(1000 * 3)
    assert not hasattr(made, "classes_")
    if name != "SGDClassifier":
        assert report.compression_ratio < 0.6


def test_what_cannot_be_coded_is_refused():
    from sklearn.svm import LinearSVC

    x = np.zeros((10, 2))
    with pytest.raises(InputError, match="single class"):
        prequential_score(LinearSVC(), x, np.zeros(10))
    with pytest.raises(InputError, match="predict_proba"):
        prequential_score(LinearSVC(), x, np.arange(10) % 2)
    with pytest.raises(InputError, match="first=99"):
        block_code(counts(1.0), x, np.zeros(10, int), num_classes=2, first=99)
    with pytest.raises(InputError, match=r"\(10, 3\)"):
        block_code(counts(1.0), x, np.zeros(10, int), num_classes=3, first=10)


# -------------------------------------------------------------------------------------------------------------- bounds


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 0.999), st.floats(0.0, 3.0))
def test_the_inverse_divergence_inverts(p, c):
    q = kl_inverse(p, c)
    assert p <= q <= 1
    if 0 < q < 1 - 1e-6:  # nearer to 1 q itself has too few digits
        kl = (p * math.log(p / q) if p else 0.0) + (1 - p) * math.log((1 - p) / (1 - q))
        assert kl == pytest.approx(c, abs=1e-9)


def test_bounds_have_their_formulas_and_tighten_with_n():
    told = prequential_bound(100.0, 2000, 0.05, num_classes=10)
    assert told.occam == pytest.approx(0.05 + math.sqrt((100 + math.log(20)) / 4000))
    assert told.kl < told.occam
    assert told.realizable is None
    assert not told.vacuous
    assert prequential_bound(100.0, 2000, 0.0, num_classes=10).realizable == pytest.approx((100 + math.log(20)) / 2000)
    assert prequential_bound(200.0, 4000, 0.05, num_classes=10).kl < told.kl
    assert prequential_bound(1e5, 100, 0.0, num_classes=10).vacuous
    assert prequential_bound(-3.0, 100, 0.0, num_classes=2) == prequential_bound(0.0, 100, 0.0, num_classes=2)
    for bad in ({"n": 0}, {"delta": 1.0}):
        with pytest.raises(InputError):
            prequential_bound(**{"description": 1.0, "n": 5, "train_error": 0.0, "num_classes": 2, **bad})
    with pytest.raises(InputError, match="kl_inverse"):
        kl_inverse(1.2, 0.1)


# ---------------------------------------------------------------------------------------------------------------- runs


def test_correlations_equal_scipys_and_intervals_hold_them():
    from scipy import stats

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 40))
    b += a
    assert correlation(a, b) == pytest.approx(stats.pearsonr(a, b)[0])
    assert rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b)[0])
    table = rank_runs({"a": a, "noise": rng.standard_normal(40)}, b, given=rng.integers(3, size=40))
    row = table.iloc[0]
    assert row.pearson_low < row.pearson < row.pearson_high
    assert row.partial_low < row.partial < row.partial_high
    assert math.isnan(correlation(np.ones(5), a[:5]))


def test_a_nuisance_that_drives_both_leaves_no_partial_correlation():
    rng = np.random.default_rng(1)
    noise = np.repeat([0.0, 0.2, 0.4], 60)
    a, b = 5 * noise + 0.1 * rng.standard_normal((2, 180))
    assert correlation(a, b) > 0.9
    assert abs(partial_correlation(a, b, noise)) < 0.2


def test_reports_of_runs_are_ranked_by_regret_and_code_length():
    table = pd.DataFrame({"example": range(4), "loss_first": 1.0, "loss_final": 0.1})
    reports = [prequential_report(table.assign(loss_first=1.0 + i), num_classes=3) for i in range(8)]
    ranked = rank_runs(reports, np.arange(8) ** 2)
    assert ranked["signal"].tolist() == ["regret", "code_length"]
    assert ranked["spearman"].tolist() == pytest.approx([1.0, 1.0])
    with pytest.raises(InputError, match="3 runs"):
        rank_runs(reports[:3], [1, 2, 3])
    with pytest.raises(InputError, match="7 values for 8 runs"):
        rank_runs({"a": range(7)}, range(8))


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"example": [0]}, "loss_final, loss_first"),
        ({"example": [0, 0], "loss_first": [1, 1], "loss_final": [1, 1]}, "example 0 occurs twice"),
        ({"example": [0, 5], "loss_first": [1, math.inf], "loss_final": [1, 1]}, "loss_first of example 5"),
        ({"example": [], "loss_first": [], "loss_final": []}, "no rows"),
    ],
)
def test_a_bad_table_is_named(table, word):
    with pytest.raises(InputError, match=word):
        prequential_report(pd.DataFrame(table), num_classes=2)


# ------------------------------------------------------------------------------------------------------ command, trial


def test_the_command_reads_runs_and_lists_expensive_examples(tmp_path):
    rows = [
        {"run": run, "example": i, "loss_first": 0.5 + (i == 7) * 3, "loss_final": 0.01, "correct": 1}
        for run in ("a", "b") for i in range(20)
    ]  # fmt: skip
    csv, parquet = tmp_path / "runs.csv", tmp_path / "runs.parquet"
    pd.DataFrame(rows).to_csv(csv, index=False)
    pd.DataFrame(rows).to_parquet(parquet)
    out = tmp_path / "told.json"
    for path in (csv, parquet):
        done = CliRunner().invoke(
            app, ["apply", "prequential", str(path), "--classes", "3", "--json", "--out", str(out), "--expensive", "1"]
        )
        assert done.exit_code == 0, done.output
        told = json.loads(done.stdout)
        assert [run["run"] for run in told] == ["a", "b"]
        assert told[0]["regret"] == pytest.approx(20 * 0.49 + 3)
        assert told[0]["expensive"] == [7]
        assert json.loads(out.read_text()) == told
    done = CliRunner().invoke(app, ["apply", "prequential", str(csv), "--classes", "3"])
    assert "code length" in done.stdout


def test_a_table_without_correct_has_no_bound_and_says_so(tmp_path):
    table = pd.DataFrame({"example": range(4), "loss_first": 1.0, "loss_final": 0.01})
    report = prequential_report(table, num_classes=3)
    assert report.to_dict()["bound"] is None
    assert "regret" in str(report)
    with pytest.raises(InputError, match="column correct"):
        report.bound()
    for bad, word in (
        (table.assign(correct=7), "0 and 1"), (table.assign(loss_first="x"), "not numbers"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=word):
            prequential_report(bad, num_classes=3)
    with pytest.raises(InputError, match="num_classes=1"):
        prequential_report(table, num_classes=1)
    table.to_csv(tmp_path / "losses.csv", index=False)
    done = CliRunner().invoke(app, ["apply", "prequential", str(tmp_path / "losses.csv"), "--classes", "3", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)[0]["bound"] is None


def test_labels_for_fewer_rows_are_refused():
    from sklearn.naive_bayes import GaussianNB

    with pytest.raises(InputError, match="20 rows and y 5 labels"):
        prequential_score(GaussianNB(), np.zeros((20, 2)), np.arange(5) % 2)


def test_the_trial_is_sound():
    check_trial(trial)


def test_the_settings_of_runs_are_every_combination_once_and_then_again():
    params = PrequentialParams()
    seen = [tuple(settings_of(run, params).values()) for run in range(96)]
    assert len(set(seen[:48])) == 48
    assert seen[:48] == seen[48:]


def test_auroc_equals_scikit_learns():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    score, positive = rng.integers(5, size=60), rng.random(60) < 0.3
    assert auroc(score, positive) == pytest.approx(roc_auc_score(positive, score))


def test_the_trials_data_are_checked(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        check(PrequentialParams(data=str(tmp_path / "none.npz")))
    np.savez(tmp_path / "bad.npz", x=np.zeros((3, 2)))
    with pytest.raises(InputError, match="arrays x and y"):
        check(PrequentialParams(data=str(tmp_path / "bad.npz")))
