"""Tables of scores from files."""

import numpy as np
import pandas as pd
import pytest

from fairtrial.errors import InputError
from fairtrial.evaluation.sample_gain.score_table import read_scores, scores_of_frame
from fairtrial.stats import SplitScores

ROWS = pd.DataFrame(
    {
        "candidate": ["b", "b", "b", "a", "a", "a"],
        "split": [0, 0, 1, 0, 0, 1],
        "sample": ["x", "y", "z", "y", "x", "z"],
        "score": [1, 0, 1, 0.5, 1, 0],
        "remark": "ignored",
    }
)
FOLDS = pd.DataFrame({"candidate": "a", "split": [1, 0, 2], "score": [0.8, 0.9, 0.7], "n_test": 20, "n_train": 80})


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_rows_become_one_table_a_candidate_in_the_order_of_the_file(tmp_path, ending):
    file = tmp_path / f"scores.{ending}"
    ROWS.to_csv(file, index=False) if ending == "csv" else ROWS.to_parquet(file)
    tables = read_scores(file)
    assert list(tables) == ["b", "a"]
    expected = SplitScores.from_rows([0, 0, 1], ["x", "y", "z"], [1, 0, 1])
    assert np.array_equal(tables["b"].score, expected.score)
    assert np.array_equal(tables["b"].n_train, [1, 2])
    np.testing.assert_allclose(tables["b"].minus(tables["a"]).score, [0, -0.5, 1])


def test_fold_means_are_read_in_the_order_of_their_splits():
    table = scores_of_frame(FOLDS)["a"]
    assert table.score is None
    assert table.means.tolist() == [0.9, 0.8, 0.7]
    assert table.n_test.tolist() == [20, 20, 20]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="score"), "has no column score: give candidate, split, sample, score; or, where"),
        (lambda f: f.drop(columns="sample"), "has no column n_test, n_train"),
        (lambda f: f.iloc[:0], "has no rows"),
        (lambda f: f.assign(score="good"), "column score holds .*, not numbers"),
        (lambda f: f.assign(score=[1, None, 1, 1, 1, 1]), "column score is empty or not a number in data row 2"),
        (lambda f: f.assign(candidate=["b", None, "b", "a", "a", "a"]), "column candidate is empty"),
        (lambda f: f.assign(score=[1, np.inf, 1, 1, 1, 1]), "score inf at split 0, sample y"),
        (lambda f: f.assign(sample="x"), "sample x appears twice in split 0"),
        (lambda _: pd.concat([FOLDS, FOLDS]), "a has split 1 twice"),
        (lambda _: pd.concat([FOLDS, FOLDS.iloc[:2].assign(candidate="b")]), "only one of a and b has split 2"),
    ],
)
def test_a_table_that_cannot_be_used_says_why(change, message):
    with pytest.raises(InputError, match=message):
        scores_of_frame(change(ROWS))


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_scores(tmp_path / "scores.csv")
    (tmp_path / "scores.txt").touch()
    with pytest.raises(InputError, match=r"give a \.csv or \.parquet file"):
        read_scores(tmp_path / "scores.txt")
    for name in ("empty.csv", "broken.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(InputError, match=f"{name} cannot be read"):
            read_scores(tmp_path / name)
