"""The simulator against closed forms: what it draws, how it is judged, how judgements are scored."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as oracle

from fairtrial.seeds import generator
from fairtrial.verdicts import judging
from fairtrial.verdicts.judging import Judgement
from fairtrial.verdicts.scoring import Score
from fairtrial.verdicts.simulation import POWER, SCENARIOS, Draw, Scenario, detectable, skewed


def differences(scenario: Scenario, effect: float, trials: int, log: bool = False) -> np.ndarray:
    """Return method minus baseline of every cell: (trials, cells)."""
    rng = generator(0, scenario.name, effect)
    metric = scenario.part.metrics[0].name
    rows = []
    for _ in range(trials):
        table = scenario.table(scenario.draw(rng, effect))
        rows.append(np.subtract(*(table.units(c, metric, {}, log).ravel() for c in ("method", "baseline"))))
    return np.array(rows)


def score(name: str, way: judging.Way, trials: int, true: bool) -> Score:
    scenario, counts = SCENARIOS[name], Score()
    rng, own = generator(1, name, true), generator(2, name, true)
    for _ in range(trials):
        draw = scenario.draw(rng, scenario.effect if true else 0.0)
        counts.add(scenario.part.claims, way(scenario.table(draw), scenario.peeked, own), draw.truth)
    return counts


@pytest.mark.parametrize("replicates", [3, 5, 10, 30])
def test_the_stated_effect_is_found_with_the_stated_power_of_the_noncentral_t(replicates):
    df, noncentrality = replicates - 1, detectable(replicates) * np.sqrt(replicates)
    assert oracle.nct.sf(oracle.t.ppf(0.975, df), df, noncentrality) == pytest.approx(POWER, abs=1e-6)


@pytest.mark.parametrize("effect", [0.0, 0.4, 0.996])
def test_rate_of_holds_of_ten_gaussian_cells_is_that_of_the_noncentral_t(effect):
    scenario, rng, trials = SCENARIOS["10 replicates"], generator(3, effect), 600
    states = [
        judging.by_fairtrial(scenario.table(scenario.draw(rng, effect)), False, rng)[0].state for _ in range(trials)
    ]
    expected = oracle.nct.sf(oracle.t.ppf(0.975, 9), 9, effect * np.sqrt(10))
    assert states.count("HOLDS") / trials == pytest.approx(expected, abs=4 * np.sqrt(expected / trials))


def test_skewed_noise_is_centred_scaled_and_as_skewed_as_the_lognormal():
    x = skewed(generator(0), (400_000,))
    assert x.mean() == pytest.approx(0, abs=0.01)
    assert x.std() == pytest.approx(1, abs=0.02)
    assert oracle.skew(x) == pytest.approx(oracle.lognorm(0.75).stats("s"), rel=0.2)


def test_folds_of_one_fit_share_half_of_their_variance():
    d = differences(SCENARIOS["8 folds of 5 fits"], 0.0, 400).reshape(-1, 8)  # (fits, folds)
    off = np.cov(d.T)[~np.eye(8, dtype=bool)]
    assert off.mean() == pytest.approx(0.5, abs=0.06)
    assert d.var() == pytest.approx(1.0, abs=0.08)


def test_folds_of_one_data_set_correlate_by_the_share_they_test():
    d = differences(SCENARIOS["peeking at 5 to 15 folds of one data set"], 0.0, 600)
    off = np.cov(d.T)[~np.eye(15, dtype=bool)]
    assert off.mean() == pytest.approx(0.2, abs=0.06)
    assert d.var() == pytest.approx(1.0, abs=0.08)


def test_logs_of_skewed_scores_differ_by_the_effect():
    d = differences(SCENARIOS["logs of skewed scores"], 0.7, 500, log=True)
    assert d.mean() == pytest.approx(0.7, abs=4 / np.sqrt(d.size))


@pytest.mark.parametrize("effect", [0.0, 1.0])
def test_expected_loss_of_a_regression_has_its_closed_form(effect):
    scenario = SCENARIOS["10 splits of one data set"]
    means = -differences(scenario, effect, 600).mean(axis=1)  # losses: baseline - method
    assert means.mean() == pytest.approx(effect, abs=4 * means.std() / np.sqrt(len(means)))


def test_the_worst_fifth_of_the_methods_cells_is_lost():
    d = differences(SCENARIOS["losses where it is worst"], 0.0, 400)
    assert np.isnan(d).mean() == pytest.approx(0.2, abs=0.03)
    assert np.nanmin(d) >= -0.8416


def test_fixed_models_are_the_population_and_their_own_luck_cancels():
    d = differences(SCENARIOS["new items for 3 models"], 0.3, 400)  # (trials, models), means over items
    assert d.mean() == pytest.approx(0.3, abs=0.03)
    assert d.mean(axis=1).var() == pytest.approx((1 + 1 / 3) / 100, rel=0.35)


def test_plain_t_is_scipys():
    scenario = SCENARIOS["5 replicates"]
    draw = scenario.draw(generator(4), 0.5)
    table = scenario.table(draw)
    d = np.subtract(*(table.numbers(c, "score", {}).ravel() for c in ("method", "baseline")))
    one = judging.by_plain_t(table, False, generator(0))[0]
    assert (one.low, one.high) == pytest.approx(oracle.t.interval(0.95, 4, d.mean(), oracle.sem(d)))


@pytest.mark.parametrize("name", ["3 replicates", "10 replicates", "few distinct values", "logs of skewed scores"])
def test_fairtrial_is_the_plain_t_where_nothing_is_shared_lost_looked_at_or_claimed_besides(name):
    ours, plain = (score(name, way, 60, True) for way in (judging.by_fairtrial, judging.by_plain_t))
    assert (ours.found, ours.covered) == (plain.found, plain.covered)
    assert ours.length == pytest.approx(plain.length)


def test_a_peek_stops_the_plain_t_at_its_first_decision():
    scenario = SCENARIOS["peeking at 5 to 20 replicates"]
    rng = generator(5)
    peeked = [judging.by_plain_t(scenario.table(scenario.draw(rng, 0.0)), True, rng)[0].state for _ in range(300)]
    rng = generator(5)
    at_end = [judging.by_plain_t(scenario.table(scenario.draw(rng, 0.0)), False, rng)[0].state for _ in range(300)]
    assert peeked.count("UNDECIDED") < at_end.count("UNDECIDED")
    assert at_end.count("UNDECIDED") / 300 == pytest.approx(0.95, abs=0.05)


def test_a_coin_errs_as_often_as_allowed_and_finds_as_little():
    counts = score("10 replicates", judging.by_coin, 2000, True)
    assert np.mean(counts.found) == pytest.approx(0.025, abs=0.014)
    assert counts.false_fails / 2000 == pytest.approx(0.025, abs=0.014)
    assert counts.covered == []


def test_the_larger_mean_is_wrong_in_half_of_the_null_trials():
    counts = score("5 replicates", judging.by_larger_mean, 400, False)
    assert counts.false_holds + counts.false_fails == 400
    assert counts.false_holds / 400 == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("state", "truth", "wrong"),
    [("HOLDS", 0.0, (1, 0)), ("FAILS", 0.0, (0, 1)), ("UNDECIDED", 0.0, (0, 0)), ("HOLDS", 1.0, (0, 0)),
     ("FAILS", 1.0, (0, 1)), ("HOLDS", -1.0, (1, 0)), ("FAILS", -1.0, (0, 0))],
)  # fmt: skip
def test_a_verdict_is_wrong_where_the_truth_is_on_the_bound_or_beyond(state, truth, wrong):
    counts = Score()
    counts.add(SCENARIOS["3 replicates"].part.claims, [Judgement(state, -0.5, 0.5)], [truth])
    assert (counts.false_holds, counts.false_fails) == wrong
    assert counts.covered == [truth == 0]
    assert counts.found == ([state == "HOLDS"] if truth > 0 else [])


def test_a_claim_below_a_bound_is_true_where_the_quantity_is():
    counts = Score()
    counts.add(SCENARIOS["losses where it is worst (claim below)"].part.claims, [Judgement("HOLDS", -3, -1)], [-2.0])
    assert (counts.false_holds, counts.found, counts.covered) == (0, [True], [True])


def test_a_claim_of_all_settings_is_as_true_as_its_worst():
    claims = SCENARIOS["all of 3 settings"].part.claims
    parts = (Judgement("HOLDS", 1.0, 3.0),) * 3
    counts = Score()
    counts.add(claims, [Judgement("HOLDS", parts=parts)], [0.0, 2.0, 2.0])
    assert (counts.false_holds, counts.covered) == (1, [False, True, True])
    counts.add(claims, [Judgement("HOLDS")], [1.0, 2.0, 2.0])  # a way without intervals
    assert (counts.false_holds, counts.found, len(counts.covered)) == (1, [True], 3)


def test_several_claims_are_wrong_if_any_is():
    claims = SCENARIOS["3 claims"].part.claims
    counts = Score()
    counts.add(claims, [Judgement(s) for s in ("HOLDS", "HOLDS", "UNDECIDED")], [1.0, 0.0, 1.0])
    assert (counts.trials, counts.false_holds, counts.false_fails, counts.found) == (1, 1, 0, [True, False])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_judged_by_every_way(name):
    scenario = SCENARIOS[name]
    draw = scenario.draw(generator(6, name), scenario.effect)
    table = scenario.table(draw)
    for way in (
        judging.by_fairtrial,
        judging.by_plain_t,
        judging.by_bootstrap,
        judging.by_larger_mean,
        judging.by_coin,
    ):
        judgements = way(table, scenario.peeked, generator(7))
        assert len(judgements) == len(scenario.part.claims)
        assert {j.state for j in judgements} <= {"HOLDS", "FAILS", "UNDECIDED"}
        Score().add(scenario.part.claims, judgements, draw.truth)


def test_losses_weigh_alike_on_a_claim_above_and_its_mirror_below():
    above, below = SCENARIOS["losses where it is worst"], SCENARIOS["losses where it is worst (claim below)"]
    for seed in range(30):
        one, mirror = (
            judging.by_fairtrial(s.table(s.draw(generator(8, seed), 0.8)), False, generator(0))[0]
            for s in (above, below)
        )
        assert one.state == mirror.state
        assert (one.low, one.high) == pytest.approx((-mirror.high, -mirror.low))


def test_lost_runs_on_the_same_items_count_as_a_deviation_beyond_the_farthest_run():
    scenario = SCENARIOS["losses where it is worst (same items)"]
    method, baseline, truth = scenario.draw(generator(10), 0.5)
    lost = sum(cell is None for cell in method)
    assert 0 < lost < 6
    absent = Draw([{"score": None} if cell is None else cell for cell in method], baseline, truth)  # not applicable
    with_losses, without = (
        judging.by_fairtrial(scenario.table(draw), False, generator(0))[0]
        for draw in (Draw(method, baseline, truth), absent)
    )
    runs = np.array(
        [np.mean(m["score"].values - b["score"].values) for m, b in zip(method, baseline, strict=True) if m is not None]
    )
    beyond = np.abs(runs - runs.mean()).max() + runs.std(ddof=1)
    assert with_losses.low == pytest.approx(without.low - lost / 8 * beyond)
    assert with_losses.high == pytest.approx(without.high)
