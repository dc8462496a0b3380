import numpy as np
import pytest

from fairtrial.errors import InputError
from fairtrial.stats import SplitScores, interval


def two_splits(**kwargs):
    return SplitScores.from_arrays([[0, 1], [2, 3]], [[1.0, 2.0], [3.0, 4.0]], **kwargs)


def test_rows_in_any_order_give_the_same_table():
    rng = np.random.default_rng(0)
    split, sample = np.repeat(np.arange(4), 10), np.tile(np.arange(10), 4)
    score, order = rng.normal(size=40), rng.permutation(40)
    a = SplitScores.from_rows(split, sample, score)
    b = SplitScores.from_rows(split[order], sample[order], score[order])
    for name in ("labels", "means", "n_test", "samples", "split", "sample", "score"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_labels_may_be_strings_and_large_or_negative_integers():
    score = [1.0, 2.0, 3.0, 5.0]
    tables = [
        SplitScores.from_rows(split, sample, score)
        for split, sample in (
            (["a", "a", "b", "b"], ["x", "y", "x", "z"]),
            ([0, 0, 1, 1], [-5, 3, -5, 10**12]),
            (np.array([2, 2, 7, 7], dtype=np.uint8), [0.5, 1.5, 0.5, 2.5]),
        )
    ]
    for table in tables:
        np.testing.assert_array_equal(table.sample, [0, 1, 0, 2])
        np.testing.assert_array_equal(table.means, [1.5, 4.0])
        np.testing.assert_array_equal(table.n_train, [1, 1])


def test_train_left_out_is_the_complement_of_the_test_set_among_all_samples_seen():
    test = [[0, 1, 2], [3, 4], [5, 6, 0]]
    scores = [np.sqrt(np.arange(len(t)) + 1.0) for t in test]
    implied = SplitScores.from_arrays(test, scores, n=8)
    named = SplitScores.from_arrays(test, scores, [np.setdiff1d(np.arange(8), t) for t in test])
    np.testing.assert_array_equal(implied.n_train, named.n_train)
    assert interval(implied).variance == pytest.approx(interval(named).variance, rel=1e-12)


def test_from_rows_takes_train_as_sample_labels():
    table = SplitScores.from_rows([0, 0, 1, 1], list("abcd"), [1, 2, 3, 4], train=[["c", "e"], ["a", "b"]])
    assert list(table.samples) == list("abcde")
    assert [list(table.samples[codes]) for codes in table.train] == [["c", "e"], ["a", "b"]]


def test_differences_need_no_common_row_order():
    a = SplitScores.from_rows([0, 0, 1, 1], ["x", "y", "z", "w"], [1.0, 2.0, 3.0, 4.0])
    b = SplitScores.from_rows([1, 0, 1, 0], ["w", "y", "z", "x"], [0.5, 0.25, 1.0, 1.0])
    np.testing.assert_array_equal(a.minus(b).means, [(0.0 + 1.75) / 2, (2.0 + 3.5) / 2])


def test_groups_are_averaged_and_become_the_sample():
    table = two_splits().by_group(["a", "a", "b", "c"])
    np.testing.assert_array_equal(table.score, [1.5, 3.0, 4.0])
    np.testing.assert_array_equal(table.n_train, [2, 1])


def test_grouping_keeps_named_training_sets():
    table = two_splits(train=[[2], [0, 1]]).by_group(["a", "a", "b", "c"])
    assert [list(codes) for codes in table.train] == [[1], [0]]


def test_one_seed_for_all_splits_raises_a_warning():
    with pytest.warns(UserWarning, match="that seed only"):
        two_splits(seeds=[0, 0])
    two_splits(seeds=[0, 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_finite_is_refused_with_its_split_and_sample(bad):
    with pytest.raises(InputError, match=r"split 3, sample b"):
        SplitScores.from_rows([1, 1, 3, 3], ["a", "b", "a", "b"], [1, 1, 1, bad])


def test_a_sample_in_both_train_and_test_is_refused():
    with pytest.raises(InputError, match=r"sample 3 is in both .* of split 1"):
        two_splits(train=[[2, 3], [0, 3]])


def test_a_group_on_both_sides_is_refused():
    with pytest.raises(InputError, match=r"group b is on both sides of split 0"):
        two_splits().by_group(["a", "b", "b", "c"])
    with pytest.raises(InputError, match=r"group b is on both sides of split 0"):
        two_splits(train=[[2, 3], [0, 1]]).by_group(["a", "b", "b", "c"])


def test_candidates_with_unequal_splits_are_refused_naming_the_first():
    a = two_splits()
    with pytest.raises(InputError, match="first at split 1"):
        a.minus(SplitScores.from_arrays([[0, 1], [1, 3]], [[1.0, 2.0], [3.0, 4.0]]))
    with pytest.raises(InputError, match="first at split 2, which only one has"):
        a.minus(SplitScores.from_arrays([[0, 1], [2, 3], [0, 2]], [[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]))
    with pytest.raises(InputError, match="first at split 0"):
        two_splits(train=[[2, 3], [0, 1]]).minus(two_splits(train=[[3], [0, 1]]))
    with pytest.raises(InputError, match="fold sizes differ"):
        SplitScores.from_folds([1, 2], 10, 90).minus(SplitScores.from_folds([1, 2], 20, 80))
    with pytest.raises(InputError, match="only fold means"):
        a.minus(SplitScores.from_folds([1, 2], 10, 90))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SplitScores.from_rows([0, 1], [0], [1.0, 2.0]), "one length"),
        (lambda: SplitScores.from_rows([], [], []), "no rows"),
        (lambda: SplitScores.from_rows([0, 0], [5, 5], [1.0, 2.0]), "sample 5 appears twice in split 0"),
        (lambda: SplitScores.from_arrays([[0, 1]], [[1.0]]), "one score for each"),
        (lambda: SplitScores.from_arrays([[0, 1.5]], [[1.0, 2.0]]), "test of split 0 is float64"),
        (lambda: SplitScores.from_arrays([[True, False]], [[1.0, 2.0]]), "test of split 0 is bool"),
        (lambda: SplitScores.from_arrays([[0, 1]], [[1.0, 2.0]], [["a"]]), "train of split 0 is <U1"),
        (lambda: SplitScores.from_arrays([[[0, 1]]], [[1.0]]), r"of shape \(1, 2\)"),
        (lambda: SplitScores.from_arrays([[0, 9]], [[1.0, 2.0]], n=5), r"sample index 9 is outside range\(5\)"),
        (lambda: SplitScores.from_arrays([[0, -1]], [[1.0, 2.0]]), "sample index -1"),
        (lambda: SplitScores.from_arrays([[0], []], [[1.0], []]), "split 1 has no test scores"),
        (lambda: two_splits(seeds=[1]), "1 entries for 2 splits"),
        (lambda: two_splits(train=[[2]]), "1 index arrays for 2 splits"),
        (lambda: SplitScores.from_folds([1.0, np.nan], 1, 2), "mean of split 1 is nan"),
        (lambda: SplitScores.from_folds([1.0, 2.0], 0, 2), "must be positive"),
        (lambda: SplitScores.from_folds([1.0, 2.0], 1, 2).by_group(["a"]), "per-sample scores"),
        (lambda: two_splits().by_group(["a"]), "1 labels for 4 samples"),
    ],
)
def test_tables_that_make_no_sense_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()
