"""The trial of the verdicts: well made, and its blocks are what they say."""

from __future__ import annotations

import pytest

from fairtrial import cards
from fairtrial.errors import UnknownNameError
from fairtrial.testing import check_trial
from fairtrial.trial.declare import AllOf, Claim, Difference, Level, leaves
from fairtrial.verdicts.simulation import SCENARIOS
from fairtrial.verdicts.trial import CANDIDATES, Params, measure_effect, measure_null, parts

METHOD, PLAIN = CANDIDATES[:2]


def test_the_trial_is_well_made():
    check_trial("fairtrial.verdicts.trial:trial")


def test_an_unknown_scenario_is_named():
    with pytest.raises(UnknownNameError, match="no scenario '10 replicate'; did you mean '10 replicates'"):
        Params(scenarios=["10 replicate"])


def test_every_claim_is_about_scenarios_that_exist():
    for part in parts(Params()):
        for claim in (leaf for whole in part.claims for leaf in leaves(whole)):
            assert isinstance(claim.quantity, Difference | Level)
            assert claim.quantity.where["scenario"] in SCENARIOS


def test_every_composite_claim_is_above_or_below_one_declared_bound():
    for claim in parts(Params())[0].claims:
        assert isinstance(claim, AllOf)
        assert all(isinstance(child, Claim) for child in claim.claims)


def test_the_card_states_the_claims():
    stated = {claim.id for claim in cards.find("verdicts").claims}
    assert stated == {claim.id for part in parts(Params()) for claim in part.claims if isinstance(claim, Claim | AllOf)}


def test_fairtrial_and_a_plain_t_judge_the_same_trials():
    params, cell = Params(trials=40), {"scenario": "10 replicates", "block": 2}
    ours, plain = (measure_effect(candidate, cell, params, None) for candidate in (METHOD, PLAIN))
    assert ours == plain


def test_blocks_differ_and_are_reproducible():
    params = Params(trials=20)
    first, again, other = (
        measure_null(METHOD, {"scenario": "5 replicates", "block": block}, params, None) for block in (0, 0, 1)
    )
    assert first == again
    assert first["length"] != other["length"]


def test_trials_without_a_verdict_are_never_wrong():
    rates = measure_null(METHOD, {"scenario": "8 folds of 2 fits", "block": 0}, Params(trials=20), None)
    assert (rates["false holds"], rates["false fails"]) == (0.0, 0.0)
