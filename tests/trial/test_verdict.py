"""Verdicts against hand-computed oracles: t intervals by scipy, Holm by statsmodels."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import t as student
from statsmodels.stats.multitest import multipletests

from fairtrial import stats
from fairtrial.trial.declare import (
    Candidate,
    Claim,
    Factor,
    Items,
    Metric,
    Part,
    all_of,
    contrast,
    difference,
    exact,
    for_each,
    level,
    report,
    statistic,
)
from fairtrial.trial.store import Row
from fairtrial.trial.table import Table
from fairtrial.trial.verdict import judge

RNG = np.random.default_rng(0)
hundredths = st.integers(-200, 200).map(lambda n: n / 100)


def t_interval(values, confidence=0.95):
    x = np.asarray(values, dtype=float)
    half = student.ppf(0.5 + confidence / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x))
    return x.mean() - half, x.mean() + half


def t_p_value(values, bound):
    x = np.asarray(values, dtype=float)
    return 2 * student.sf(abs(x.mean() - bound) / (x.std(ddof=1) / math.sqrt(len(x))), len(x) - 1)


def verdict(table, **options):
    (only,) = judge({"main": table}, **options)
    return only


def beats(bound=0.0, **options):
    return Claim("C", "a beats b", difference("a", "b", "score", **options), above=bound)


def test_a_difference_is_the_paired_t_interval_and_holds_fails_or_is_undecided_by_it(make_table):
    b = RNG.normal(size=12)
    for shift, state in ((2.0, "HOLDS"), (-2.0, "FAILS"), (0.0, "UNDECIDED")):
        a = b + shift + 0.1 * RNG.normal(size=12)
        a += shift - (a - b).mean()
        found = verdict(make_table({"a": a, "b": b}, (beats(),)))
        assert found.state == state
        assert found.difference == pytest.approx((a - b).mean(), abs=1e-12)
        assert (found.low, found.high) == pytest.approx(t_interval(a - b))
        assert (found.units, found.cells, found.lost) == (12, 12, 0)
        assert found.level == 0.95


def test_lower_is_better_turns_the_difference_in_favour_of_a(make_table):
    a, b = RNG.normal(size=8), 3 + RNG.normal(size=8)
    metric = Metric("score", higher_is_better=False)
    found = verdict(make_table({"a": a, "b": b}, (beats(),), metrics=(metric,)))
    assert found.difference == pytest.approx((b - a).mean())
    assert found.state == "HOLDS"


def test_log_scale_compares_logarithms(make_table):
    a, b = np.exp(RNG.normal(size=8)), np.exp(RNG.normal(size=8))
    found = verdict(make_table({"a": a, "b": b}, (beats(scale="log"),)))
    assert (found.low, found.high) == pytest.approx(t_interval(np.log(a / b)))
    refused = verdict(make_table({"a": -a, "b": b}, (beats(scale="log"),)))
    assert refused.state == "UNDECIDED"
    assert "no logarithm" in refused.reason


@pytest.mark.parametrize(("bounds", "state"), [({"below": 1.5}, "HOLDS"), ({"above": 1.5}, "FAILS")])
def test_level_is_one_candidates_mean(make_table, bounds, state):
    a = 1 + 0.1 * RNG.normal(size=9)
    found = verdict(make_table({"a": a, "b": a}, (Claim("C", "", level("a", "score"), **bounds),)))
    assert (found.low, found.high) == pytest.approx(t_interval(a))
    assert found.state == state


def test_within_is_averaged_before_the_interval_and_where_selects(make_table):
    factors = (
        Factor("seed", range(6), kind="replicate"),
        Factor("rate", (0.1, 0.3)),
        Factor("fold", range(4), kind="within"),
    )
    shape = (6, 2, 4)
    a, b = RNG.normal(size=shape), RNG.normal(size=shape)
    values = {n: {i: float(v) for i, v in np.ndenumerate(x)} for n, x in (("a", a), ("b", b))}
    named = {n: {(i, (0.1, 0.3)[j], k): v for (i, j, k), v in of.items()} for n, of in values.items()}
    claims = (
        Claim("all", "", difference("a", "b", "score"), above=0),
        Claim("one", "", difference("a", "b", "score", {"rate": 0.3}), above=0),
        Claim("both", "", difference("a", "b", "score", {"rate": (0.1, 0.3)}), above=0),
        Claim("fold", "", level("a", "score", {"fold": 2, "rate": 0.1}), above=0),
        Claim(
            "contrast",
            "",
            contrast({("a", "score", (("rate", 0.1),)): 2.0, ("b", "score", (("rate", 0.3),)): -1.0}),
            above=0,
        ),
    )
    found = judge({"main": make_table(named, claims, factors)})
    d = a - b
    oracle = [d.mean((1, 2)), d[:, 1].mean(1), d.mean((1, 2)), a[:, 0, 2], 2 * a[:, 0].mean(1) - b[:, 1].mean(1)]
    for one, units in zip(found, oracle, strict=True):
        assert one.units == 6
        assert one.difference == pytest.approx(units.mean())
        assert (one.low95, one.high95) == pytest.approx(t_interval(units))


def test_holm_decides_as_statsmodels_does_and_intervals_are_at_the_level_of_the_rank(make_table):
    rng = np.random.default_rng(1)
    for _ in range(20):
        columns = {name: rng.normal(0.3 * i, 1, size=10) for i, name in enumerate("abcdef")}
        claims = tuple(Claim(n, "", level(n, "score"), above=0.5) for n in columns)
        found = judge({"main": make_table(columns, claims)})
        p = [t_p_value(x, 0.5) for x in columns.values()]
        rejected = multipletests(p, 0.05, method="holm")[0]
        assert [v.state != "UNDECIDED" for v in found] == list(rejected)
        for one, x in zip(found, columns.values(), strict=True):
            assert (one.low, one.high) == pytest.approx(t_interval(x, one.level))
            agrees(one)
        decided = sum(rejected)
        ranks = sorted(range(6), key=lambda i: p[i])
        for rank, i in enumerate(ranks):
            assert found[i].level == pytest.approx(1 - 0.05 / (6 - min(rank, decided, 5)))


def agrees(one):
    """State and printed interval say the same."""
    ((side, bound),) = one.bound.items()
    above, below = one.low > bound, one.high < bound
    expected = "UNDECIDED" if not (above or below) else "HOLDS" if above == (side == "above") else "FAILS"
    assert one.state == expected, one


@given(
    data=st.lists(st.lists(hundredths, min_size=3, max_size=8), min_size=1, max_size=4),
    losses=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7))),
    bound=st.floats(-1, 1),
    side=st.sampled_from(["above", "below"]),
    peeked=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_interval_and_state_never_disagree_lost_cells_or_not(make_table, lost, data, losses, bound, side, peeked):
    size = min(map(len, data))
    columns = {
        f"c{i}": [lost if (i, j) in losses else x for j, x in enumerate(row[:size])] for i, row in enumerate(data)
    }
    claims = tuple(Claim(n, "", level(n, "score"), **{side: bound}) for n in columns)
    for one in judge({"main": make_table(columns, claims)}, peeked=peeked):
        if not math.isnan(one.low) and one.units > 2:
            agrees(one)
        else:
            assert one.state == "UNDECIDED"


@given(
    a=st.lists(hundredths, min_size=6, max_size=10),
    gone=st.sets(st.integers(0, 5), min_size=1, max_size=3),
    side=st.sampled_from(["above", "below"]),
    variance=st.sampled_from(["independent"]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lost_cells_never_improve_a_verdict(make_table, lost, a, gone, side, variance):
    """The worst that the lost cells could have been, within what was seen, is in the interval."""
    claim = (Claim("C", "", level("a", "score"), **{side: 0.0}),)
    kept = [x for i, x in enumerate(a) if i not in gone]
    found = verdict(make_table({"a": [lost if i in gone else x for i, x in enumerate(a)]}, claim, variance=variance))
    without = verdict(make_table({"a": kept}, claim))
    assert found.lost == len(gone)
    assert "lost" in found.reason
    assert found.low <= without.low
    assert found.high >= without.high
    if found.state == "HOLDS":
        worst = min(kept) if side == "above" else max(kept)
        filled = verdict(make_table({"a": kept + [worst] * len(gone)}, claim))
        assert filled.state == "HOLDS"
        assert without.state == "HOLDS"


def test_a_cell_lost_by_either_side_drops_its_pair(make_table, lost):
    a, b = list(RNG.normal(size=8)), list(RNG.normal(size=8))
    kept = np.array(a[2:]) - np.array(b[2:])
    found = verdict(make_table({"a": [lost, *a[1:]], "b": [b[0], lost, *b[2:]]}, (beats(),)))
    assert found.difference == pytest.approx(kept.mean())
    assert (found.lost, found.units, found.cells) == (2, 6, 6)


def test_all_lost_is_undecided_and_still_counts_for_holm(make_table, lost):
    good = 1 + 0.1 * RNG.normal(size=6)
    claims = tuple(Claim(n, "", level(n, "score"), above=0) for n in ("a", "b"))
    one, two = judge({"main": make_table({"a": good, "b": [lost] * 6}, claims)})
    assert one.level == 0.975
    assert two.state == "UNDECIDED"
    assert "lost" in two.reason


def test_infinite_counts_as_the_worst_finite_value_and_says_so(make_table):
    for better, worst in ((True, -4.0), (False, 7.0)):
        metric = Metric("score", higher_is_better=better)
        columns = {"a": [math.inf, 1.0, 2.0, 1.5], "b": [0.0, 7.0, -4.0, 1.0]}
        found = verdict(make_table(columns, (Claim("C", "", level("a", "score"), above=0),), metrics=(metric,)))
        assert found.difference == pytest.approx(np.mean([worst, 1.0, 2.0, 1.5]))
        assert "diverged in 1 cell" in found.reason
        assert found.lost == 0


def test_none_is_not_applicable_and_its_setting_is_left_out(make_table):
    factors = (Factor("seed", range(4), kind="replicate"), Factor("rate", (0.0, 0.5)))
    values = {(i, r): (None if r == 0.0 else float(i)) for i in range(4) for r in (0.0, 0.5)}
    claims = (
        Claim("all", "", level("a", "score"), above=-1),
        Claim("none", "", level("a", "score", {"rate": 0.0}), above=0),
    )
    one, two = judge({"main": make_table({"a": values}, claims, factors)})
    assert (one.low, one.high) == pytest.approx(t_interval(range(4)))
    assert two.state == "UNDECIDED"
    assert "does not apply" in two.reason


def test_a_setting_that_was_lost_is_not_one_that_does_not_apply(make_table, lost):
    factors = (Factor("seed", range(4), kind="replicate"), Factor("rate", (0.0, 0.5)))
    values = {(i, r): (lost if r == 0.0 else float(i)) for i in range(4) for r in (0.0, 0.5)}
    found = verdict(make_table({"a": values}, (Claim("all", "", level("a", "score"), above=-1),), factors))
    assert found.state == "UNDECIDED"
    assert found.lost == 4


@pytest.mark.parametrize(
    ("quantity", "reason"),
    [
        (difference("a", "nobody", "score"), "leave out 'nobody'"),
        (difference("a", "b", "speed"), "do not measure 'speed'"),
        (difference("a", "b", "score", {"rate": 1}), "no factor 'rate'"),
        (level("a", "score", {"kind": "z"}), "no cell with kind=z"),
    ],
)
def test_a_claim_these_parameters_do_not_measure_is_undecided_with_a_reason(make_table, quantity, reason):
    factors = (Factor("seed", range(6), kind="replicate"), Factor("kind", ("x",)))
    values = {n: {(i, "x"): float(RNG.normal()) + 9 for i in range(6)} for n in "ab"}
    claims = (Claim("C", "", quantity, above=0), Claim("D", "", level("a", "score"), above=0))
    one, two = judge({"main": make_table(values, claims, factors)})
    assert one.state == "UNDECIDED"
    assert reason in one.reason
    assert two.level == 0.95, "what is not asked for does not count for Holm"


def test_all_of_holds_iff_all_hold_and_fails_if_any_fails(make_table):
    n = 10
    columns = {"up": 1 + 0.1 * RNG.normal(size=n), "down": -1 + 0.1 * RNG.normal(size=n), "flat": RNG.normal(size=n)}
    columns["flat"] -= columns["flat"].mean()
    over = {name: Claim(name, "", level(name, "score"), above=0) for name in columns}

    def of(*names):
        return verdict(make_table(columns, (all_of("A", "all", *(over[n] for n in names)),)))

    assert of("up", "up").state == "HOLDS"
    assert of("up", "down").state == "FAILS"
    assert of("up", "flat").state == "UNDECIDED"
    assert of("flat", "down").state == "FAILS"
    for names in (("up", "down"), ("up", "flat"), ("flat", "down")):
        for child in of(*names).claims:
            agrees(child)
    assert [child.state for child in of("up", "down").claims] == ["HOLDS", "FAILS"]


def test_all_of_with_a_child_not_measured_can_fail_and_cannot_hold(make_table):
    columns = {"up": 1 + 0.1 * RNG.normal(size=8), "down": -1 + 0.1 * RNG.normal(size=8)}
    ghost = Claim("G", "", level("ghost", "score"), above=0)
    for name, state in (("up", "UNDECIDED"), ("down", "FAILS")):
        claim = all_of("A", "", Claim(name, "", level(name, "score"), above=0), ghost)
        assert verdict(make_table(columns, (claim,))).state == state


def test_for_each_is_all_of_over_a_setting_and_nests(make_table):
    factors = (Factor("seed", range(8), kind="replicate"), Factor("rate", (1, 2)))
    values = {
        n: {(i, r): k + 0.1 * float(RNG.normal()) for i in range(8) for r in (1, 2)} for n, k in (("a", 1), ("b", 0))
    }
    claims = (all_of("A", "", for_each("rate", beats())), for_each("width", beats()))
    one, two = judge({"main": make_table(values, claims, factors)})
    assert one.state == "HOLDS"
    assert one.claims[0].state == "HOLDS"
    assert [child.id for child in one.claims[0].claims] == ["C[rate=1]", "C[rate=2]"]
    assert all(child.state == "HOLDS" for child in one.claims[0].claims)
    assert two.state == "UNDECIDED"
    assert "no factor 'width'" in two.reason


@given(
    rows=st.lists(st.lists(hundredths, min_size=6, max_size=6), min_size=2, max_size=4),
    nested=st.booleans(),
    bound=st.sampled_from([-1.0, 0.0, 1.0]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_composite_never_disagrees_with_its_parts(make_table, rows, nested, bound):
    columns = {f"c{i}": row for i, row in enumerate(rows)}
    first, *others = (Claim(n, "", level(n, "score"), above=bound) for n in columns)
    children = (first, all_of("B", "", *others)) if nested else (first, *others)

    def check(node):
        if not node.claims:
            return agrees(node)
        states = {child.state for child in node.claims}
        expected = "FAILS" if "FAILS" in states else "HOLDS" if states == {"HOLDS"} else "UNDECIDED"
        assert node.state == expected
        for child in node.claims:
            check(child)

    check(verdict(make_table(columns, (all_of("A", "", *children),))))


def test_exact_has_no_interval_stands_outside_holm_and_needs_every_cell(make_table, lost):
    columns = {"a": np.arange(6.0), "b": np.zeros(6)}
    yes, no = exact("Y", "", lambda f: (f.score >= 0).all()), exact("N", "", lambda f: "cells differ by 5")
    broken = exact("E", "", lambda f: f.nothing)
    found = judge({"main": make_table(columns, (yes, no, broken, Claim("C", "", level("a", "score"), above=-9)))})
    assert [v.state for v in found] == ["HOLDS", "FAILS", "UNDECIDED", "HOLDS"]
    assert found[1].reason == "cells differ by 5"
    assert "AttributeError" in found[2].reason
    assert found[3].level == 0.95
    assert math.isnan(found[0].low)
    one_lost = verdict(make_table({**columns, "b": [lost, *[0.0] * 5]}, (yes,)))
    assert one_lost.state == "UNDECIDED"
    assert "1 cells lost" in one_lost.reason


def test_report_is_shown_without_verdict_and_outside_holm(make_table):
    columns = {"a": 1 + RNG.normal(size=6), "b": RNG.normal(size=6)}
    shown, claimed = judge({"main": make_table(columns, (report("R", "", level("a", "score")), beats()))})
    assert shown.state == "REPORTED"
    assert (shown.low, shown.high) == pytest.approx(t_interval(columns["a"]))
    assert claimed.level == 0.95


def slope(frame):
    return float(np.polyfit(frame["rate"], frame["score"], 1)[0])


def sloped(make_table, n=12, **changed):
    factors = (Factor("seed", range(n), kind="replicate"), Factor("rate", (0.0, 1.0, 2.0)))
    rng = np.random.default_rng(3)
    values = {(i, r): 2 * r + float(rng.normal()) for i in range(n) for r in (0.0, 1.0, 2.0)}
    claim = Claim("S", "the slope is above 1", statistic(slope), above=1)
    return make_table({"a": values | changed}, (claim,), factors)


def test_a_statistic_is_bootstrapped_over_replicates(make_table):
    table = sloped(make_table)
    found = verdict(table)
    assert found.difference == pytest.approx(slope(table.frame()))
    per_seed = table.frame().groupby("seed")[["rate", "score"]].apply(slope)
    low, high = t_interval(per_seed)
    assert found.low == pytest.approx(low, abs=0.5 * (high - low))
    assert found.state == "HOLDS"
    assert found.quantity == {"kind": "statistic", "name": "slope"}


def test_a_statistic_over_items_resamples_items(make_table):
    claim = Claim("C", "", statistic(gap), above=0, over="item")
    table, values = item_table(make_table, 2, 40, "independent", claim)
    found = verdict(table)
    units = np.mean([values["a"][i,]["score"].values - values["b"][i,]["score"].values for i in range(2)], axis=0)
    assert found.difference == pytest.approx(units.mean())
    assert (found.low, found.high) == pytest.approx(t_interval(units), rel=0.1)
    assert found.units == 40


def gap(frame):
    scores = frame.groupby("candidate").score.mean()
    return scores["a"] - scores["b"]


def test_a_bootstrap_with_fewer_than_8_units_is_undecided(make_table):
    found = verdict(sloped(make_table, n=7))
    assert found.state == "UNDECIDED"
    assert "fewer than 8 units" in found.reason


def test_a_statistic_with_a_lost_cell_is_undecided(make_table, lost):
    table = sloped(make_table)
    table.rows[0].status = "failed"
    found = verdict(Table(table.part, table.rows))
    assert found.state == "UNDECIDED"
    assert "1 cells lost" in found.reason


def test_a_statistic_that_cannot_be_computed_is_undecided_and_says_why(make_table):
    claim = Claim("S", "", statistic(lambda frame: float(frame["speed"].mean())), above=0)
    found = verdict(make_table({"a": np.arange(9.0)}, (claim,)))
    assert found.state == "UNDECIDED"
    assert "KeyError" in found.reason


def item_table(make_table, replicates, items, variance, claim, train=False, effect=1.0):
    rng = np.random.default_rng(5)
    hard = rng.normal(size=items)
    ids = np.array([f"q{i:03}" for i in range(items)])
    values = {}
    for name, shift in (("a", effect), ("b", 0.0)):
        values[name] = {
            (i,): {"score": Items(ids, hard + shift + 0.3 * rng.normal(size=items), ids[:3] if train else None)}
            for i in range(replicates)
        }
    return make_table(values, (claim,), variance=variance), values


def test_over_item_lets_items_be_the_units(make_table):
    claim = Claim("C", "", difference("a", "b", "score"), above=0, over="item")
    table, values = item_table(make_table, 2, 30, "independent", claim)
    found = verdict(table)
    units = np.mean([values["a"][i,]["score"].values - values["b"][i,]["score"].values for i in range(2)], axis=0)
    assert (found.low, found.high) == pytest.approx(t_interval(units))
    assert found.units == 30
    assert found.over == "item"
    assert found.paired_gain > 3, "items are hard for both: pairing pays"


def test_over_item_without_item_scores_is_undecided(make_table):
    claim = Claim("C", "", difference("a", "b", "score"), above=0, over="item")
    found = verdict(make_table({"a": np.arange(9.0), "b": np.zeros(9)}, (claim,)))
    assert found.state == "UNDECIDED"
    assert "single items" in found.reason


def test_crossed_parts_use_the_variance_components_of_replicates_and_items(make_table):
    table, values = item_table(make_table, 5, 25, "crossed", beats())
    found = verdict(table)
    rows = [
        (i, item, x - y)
        for i in range(5)
        for item, x, y in zip(
            values["a"][i,]["score"].ids, values["a"][i,]["score"].values, values["b"][i,]["score"].values, strict=True
        )
    ]
    oracle = stats.interval(stats.SplitScores.from_rows(*map(list, zip(*rows, strict=True))), variance="crossed")
    assert (found.low, found.high) == pytest.approx(oracle.at(0.95))
    assert found.units == 5
    assert found.sample_gain >= 1


@pytest.mark.parametrize("side", ["above", "below"])
@pytest.mark.parametrize(("over", "variance"), [("item", "independent"), ("replicate", "crossed")])
def test_lost_replicates_of_items_never_improve_a_verdict(make_table, lost, side, over, variance):
    claim = Claim("C", "", level("a", "score"), over=over, **{side: 0.5})
    whole, values = item_table(make_table, 6, 25, variance, claim)
    kept = {"a": {cell: value for cell, value in values["a"].items() if cell != (2,)}}
    gone = verdict(make_table({"a": values["a"] | {(2,): lost}}, (claim,), variance=variance))
    without = verdict(make_table(kept, (claim,), variance=variance))
    assert gone.lost == 1
    assert gone.difference == pytest.approx(without.difference)
    if side == "above":
        assert gone.low < without.low
        assert gone.high == pytest.approx(without.high)
    else:
        assert gone.low == pytest.approx(without.low)
        assert gone.high > without.high
    assert verdict(whole).lost == 0


def test_nadeau_bengio_parts_take_fold_sizes_from_their_items(make_table):
    rng = np.random.default_rng(2)
    values = {
        n: {(i,): {"score": Items(np.arange(5 * i, 5 * i + 5), rng.normal(size=5), np.arange(20))} for i in range(5)}
        for n in "ab"
    }
    found = verdict(make_table(values, (beats(),), variance="nadeau_bengio"))
    d = np.array([values["a"][i,]["score"].values.mean() - values["b"][i,]["score"].values.mean() for i in range(5)])
    half = student.ppf(0.975, 4) * math.sqrt(d.var(ddof=1) * (1 / 5 + 5 / 20))
    assert (found.low, found.high) == pytest.approx((d.mean() - half, d.mean() + half))


def test_a_metric_constant_below_a_factor_is_counted_once_there(make_table):
    factors = (Factor("seed", range(6), kind="replicate"), Factor("task", ("x", "y")))
    values = {(i, t): {"x": 1.0, "y": 2.0}[t] for i in range(6) for t in ("x", "y")}
    claim = Claim("C", "", level("a", "score"), above=0)
    found = verdict(make_table({"a": values}, (claim,), factors, metrics=(Metric("score", per="task"),)))
    assert found.units == 1
    assert found.state == "UNDECIDED"


def test_one_replicate_has_no_interval_and_two_no_verdict(make_table):
    one = verdict(make_table({"a": [1.0], "b": [0.0]}, (beats(),)))
    assert one.state == "UNDECIDED"
    assert "an interval needs two" in one.reason
    two = verdict(make_table({"a": [1.0, 1.1], "b": [0.0, 0.0]}, (beats(),)))
    assert two.state == "UNDECIDED"
    assert not math.isnan(two.low)


def test_cells_not_run_yet_are_left_out_until_their_replicate_is_complete(make_table, planned):
    a = list(RNG.normal(size=6))
    found = verdict(make_table({"a": [*a, planned], "b": [0.0] * 7}, (beats(),)))
    assert found.units == 6
    assert found.lost == 0


def test_once_peeked_every_interval_is_anytime_and_looks_at_the_declared_order_only(make_table, planned):
    a = 1 + RNG.normal(size=12)
    table = make_table({"a": a, "b": np.zeros(12)}, (beats(),))
    found = verdict(table, peeked=True)
    looks = [stats.mean_interval(a[:k], anytime=True).at(0.95) for k in range(5, 13)]
    assert (found.low, found.high) == pytest.approx((max(x for x, _ in looks), min(x for _, x in looks)))
    fixed = verdict(table)
    assert found.high - found.low > fixed.high - fixed.low
    # Replicates finished out of order are not looked at: the prefix ends at the first that is open.
    gap = make_table({"a": [*a[:8], planned, *a[9:]], "b": np.zeros(12)}, (beats(),))
    assert verdict(gap, peeked=True).units == 8


def test_cost_ratio_is_of_the_two_candidates(make_table):
    table = make_table({"a": np.arange(6.0), "b": np.zeros(6)}, (beats(),))
    assert verdict(table, seconds={table.part.name: {"a": 3.0, "b": 2.0}}).cost_ratio == 1.5
    assert verdict(table, seconds={"another part": {"a": 3.0, "b": 2.0}}).cost_ratio is None
    assert verdict(table).cost_ratio is None


def test_an_all_zero_difference_of_binary_items_is_bounded_on_both_sides(make_table):
    items = Items(list(range(40)), [1.0, 0.0] * 20)
    table = make_table({"a": [items] * 6, "b": [items] * 6}, (beats(-0.001),), variance="crossed")
    found = verdict(table)
    assert found.state == "UNDECIDED"
    assert found.low < -0.001 < 0 < found.high


def test_a_cell_that_diverged_counts_at_least_like_a_lost_one(make_table):
    rng = np.random.default_rng(0)
    good, base = rng.normal(0.1, 0.05, 20), rng.normal(0.0, 0.05, 20)
    assert verdict(make_table({"a": good, "b": base}, (beats(),))).state == "HOLDS"
    diverged = np.where(np.arange(20) < 5, -np.inf, good)
    assert verdict(make_table({"a": diverged, "b": base}, (beats(),))).state == "UNDECIDED"


def test_no_variance_seen_is_undecided_unless_exact_or_six_equal(make_table):
    few = {"a": [1.0] * 5, "b": [0.0] * 5}
    assert verdict(make_table(few, (beats(),))).state == "UNDECIDED"
    assert verdict(make_table(few, (beats(),), metrics=(Metric("score", exact=True),))).state == "HOLDS"
    assert verdict(make_table({"a": [1.0] * 6, "b": [0.0] * 6}, (beats(),))).state == "HOLDS"


def test_factor_values_may_be_lists_and_tuples():
    factors = (Factor("pair", ((0, 1), (1, 2), (2, 3), (3, 4)), kind="replicate"), Factor("shape", ([1], [2])))
    claim = Claim("C", "", level("a", "score", {"shape": [2]}), above=0)
    measure = {"score": 0.0}.copy
    part = Part("main", (Candidate("a", "method"),), (Metric("score"),), factors, "independent", (claim,), measure)
    rows = [
        Row(str(cell), "main", "a", cell, {}, {}, {}, status="done", metrics={"score": float(cell["pair"][0])})
        for cell in part.cells()
    ]
    found = verdict(Table(part, rows))
    assert found.units == 4
    assert found.difference == 1.5
