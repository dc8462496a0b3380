"""The arrays and frames that verdicts are read from, against what was put in."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student

from fairtrial.trial.declare import Curve, Factor, Items, Metric
from fairtrial.trial.evidence import summary
from fairtrial.trial.table import CannotJudgeError, mean_over

FACTORS = (
    Factor("seed", range(3), kind="replicate"),
    Factor("rate", (0.1, 0.2)),
    Factor("fold", range(2), kind="within"),
)


@pytest.fixture
def table(make_table, lost, planned):
    values = {
        label: {
            (i, r, k): 100 * (label == "b") + 10 * i + r + k for i in range(3) for r in (0.1, 0.2) for k in range(2)
        }
        for label in "ab"
    }
    values["a"][1, 0.2, 1] = lost
    values["b"][2, 0.1, 0] = planned
    return make_table(values, factors=FACTORS)


def test_numbers_are_replicates_by_settings_by_inner_cells(table):
    found = table.numbers("a", "score", {"rate": 0.2})
    assert found.shape == (3, 1, 2)
    np.testing.assert_allclose(found[:, 0], [[0.2, 1.2], [10.2, np.nan], [20.2, 21.2]])
    assert table.lost("a", {}).sum() == 1


def test_a_prefix_is_complete_where_nothing_is_left_to_measure(table):
    assert table.complete_prefix() == 2, "a lost cell is finished, a planned one is not"
    assert table.prefix(2).replicates == [0, 1]
    assert table.whole_replicates() == [0]


def test_the_frame_has_the_finished_cells_in_declared_order(table):
    frame = table.frame()
    assert list(frame.columns) == ["candidate", "role", "draw", "seed", "rate", "fold", "score"]
    assert len(frame) == 24 - 2
    assert list(frame.seed) == sorted(frame.seed)
    frame["score"] = 0.0
    assert (table.frame().score != 0.0).any(), "a claim may change its frame"


def test_resampled_replicates_come_as_often_as_drawn_and_are_told_apart(table):
    once, draws = table.frame(), [[2, 0, 2], [1, 1, 0]]
    frames = list(table.frames(np.array(draws)))
    assert len(frames) == 2
    for frame, seeds in zip(frames, draws, strict=True):
        assert list(frame.groupby("draw").seed.first()) == seeds
        assert list(frame.index) == list(range(len(frame)))
        for draw, seed in enumerate(seeds):
            np.testing.assert_array_equal(frame[frame.draw == draw].score, once[once.seed == seed].score)
    frames[0]["score"] = 0.0
    assert (next(table.frames(np.array(draws))).score != 0.0).any(), "a claim may change its frame"


def test_frames_are_the_same_however_many_are_looked_up_together(table, monkeypatch):
    draws = np.random.default_rng(0).integers(0, 3, (7, 3))
    together = list(table.frames(draws))
    monkeypatch.setattr("fairtrial.trial.table.FRAME_ROWS", 60)
    for one, other in zip(together, table.frames(draws), strict=True):
        pd.testing.assert_frame_equal(one, other)


def test_resampled_items_are_averaged_as_often_as_drawn(make_table):
    ids = {(0,): ["p", "q", "r"], (1,): ["q", "r"], (2,): ["s"]}
    scores = {cell: np.arange(len(names)) + 1.0 + 10 * cell[0] for cell, names in ids.items()}
    values = {"a": {cell: {"score": Items(np.array(ids[cell]), scores[cell]), "size": 3.0} for cell in ids}}
    table = make_table(values, metrics=(Metric("score"), Metric("size")))
    assert table.items == ["p", "q", "r", "s"]
    frame = table.frame(items=np.array([1, 1, 2]))  # q, q, r
    np.testing.assert_allclose(frame.score, [(2 + 2 + 3) / 3, (11 + 11 + 12) / 3, np.nan])
    assert list(frame["size"]) == [3.0] * 3
    np.testing.assert_allclose(table.frame(items=np.arange(4)).score, table.frame().score)


def test_a_curve_counts_by_its_end(make_table):
    table = make_table({"a": [Curve([0, 1], [5.0, 2.0]), Curve([0, 1], [5.0, 4.0])]})
    assert list(table.frame().score) == [2.0, 4.0]


def test_summaries_are_means_with_t_intervals_within_averaged_first(make_table):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 2))
    values = {"a": {(i, (0.1, 0.2)[j], k): v for (i, j, k), v in np.ndenumerate(x)}}
    entries = summary(make_table(values, factors=FACTORS))
    assert [entry["where"] for entry in entries] == [{"rate": 0.1}, {"rate": 0.2}]
    for j, entry in enumerate(entries):
        units = x[:, j].mean(axis=1)
        half = student.ppf(0.975, 2) * units.std(ddof=1) / np.sqrt(3)
        assert (entry["mean"], entry["low"], entry["high"]) == pytest.approx(
            (units.mean(), units.mean() - half, units.mean() + half)
        )
        assert (entry["cells"], entry["lost"]) == (6, 0)


@pytest.mark.parametrize(
    ("where", "reason"),
    [({"width": 1}, "no factor 'width'"), ({"seed": 1}, "no factor 'seed'"), ({"rate": 0.9}, "no cell with rate=0.9")],
)
def test_what_no_cell_has_cannot_be_selected(table, where, reason):
    with pytest.raises(CannotJudgeError, match=reason):
        table.select(where)


def test_means_leave_out_what_is_not_there_without_a_warning():
    found = mean_over(np.array([[1.0, np.nan, 3.0], [np.nan] * 3]), axis=1)
    np.testing.assert_allclose(found, [2.0, np.nan])
