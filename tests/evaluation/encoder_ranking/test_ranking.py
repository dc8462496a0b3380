import json

import numpy as np
import pytest

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.encoder_ranking.ranking import _Pool, _Scoring, rank_encoders
from fairtrial.evaluation.encoder_ranking.subspace import Features, cka, leave_one_out, rankme, ssr_dagger

FAMILIES = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "b2": "b", "c1": "c"}


def pool(n=160, seed=0):
    """Encoders that see ever fewer of eight directions and ever more noise; the reference sees all."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(n, 8))

    def encoder(seen, width, noise):
        return truth[:, :seen] @ rng.normal(size=(seen, width)) + noise * rng.normal(size=(n, width))

    found = {
        "a1": encoder(8, 20, 0.3), "a2": encoder(8, 40, 0.1), "a3": encoder(8, 60, 0.5),
        "b1": encoder(4, 30, 0.3), "b2": encoder(4, 10, 1.0), "c1": rng.normal(size=(n, 90)),
    }  # fmt: skip
    return found | {"clip": encoder(8, 25, 0.1)}


def rank(features, **how):
    return rank_encoders(features, **{"reference": "clip", "rank": 8, "bootstrap": 0, **how})


def test_the_order_is_that_of_the_score_and_the_reference_is_no_candidate():
    features = pool()
    ranking = rank(features, families=FAMILIES)
    expected = {name: ssr_dagger(features[name], features["clip"], 8) for name in FAMILIES}
    assert ranking.scores == pytest.approx(expected)
    assert list(ranking.order) == sorted(expected, key=lambda name: -expected[name])
    assert ranking.order[0] == "a2"
    assert "c1" in ranking.order[-2:]
    assert ranking.forward_passes == 7
    assert ranking.notes == ("clip: the reference, and so no candidate",)


def test_two_stages_pass_the_representatives_and_the_members_of_the_best_family():
    features = pool()
    asked = []

    def lazily(name):
        def give():
            asked.append(name)
            return features[name]

        return give

    ranking = rank({name: lazily(name) for name in features}, families=FAMILIES, stages=2)
    # Widths of callables are not known: the middle one in order represents.
    assert sorted(asked) == ["a1", "a2", "a3", "b1", "c1", "clip"]
    assert ranking.forward_passes == 6
    assert set(ranking.order[:3]) == {"a1", "a2", "a3"}
    assert ranking.scores["a1"] == pytest.approx(rankme(features["a1"]))
    assert ranking.stages == {"a1": 2, "a2": 2, "a3": 2, "b1": 1, "c1": 1}
    assert set(rank(features, families=FAMILIES, stages=2, keep=2).order[:5]) == set(FAMILIES) - {"c1"}


def test_two_stages_with_one_family_are_the_within_family_score():
    features = pool()
    one = rank(features, families=dict.fromkeys(FAMILIES, "all"), stages=2)
    assert one.order == rank(features, score="rankme").order
    assert any("of one family" in note for note in one.notes)


def test_two_stages_with_families_of_one_are_one_stage():
    features = pool()
    assert rank(features, stages=2).order == rank(features).order
    assert rank(features, stages=2).scores == rank(features).scores


def test_the_representative_is_of_median_width_or_the_users_choice():
    features = pool()
    ranking = rank(features, families=FAMILIES, stages=2, within="ssr_dagger")
    assert ranking.forward_passes == 6
    chosen = rank(features, families=FAMILIES, stages=2, representatives={"b": "b1", "a": "a3"})
    assert chosen.stages["b1"] == 1
    assert "b2" not in chosen.order
    with pytest.raises(UnknownNameError, match="member of family b"):
        rank(features, families=FAMILIES, stages=2, representatives={"b": "a1"})


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pool_of_prepared_features_is_ranked_as_their_arrays(stages):
    features = pool()
    prepared = {name: Features(values) for name, values in features.items()}
    how = {"families": FAMILIES, "stages": stages, "bootstrap": 10}
    assert rank(prepared, **how).to_dict() == rank(features, **how).to_dict()
    assert {one.name for one in prepared.values()} == {"features"}
    with pytest.raises(InputError, match="clip has 160 items and b2 has 159"):
        rank(prepared | {"b2": Features(features["b2"][1:], "clip")})


def test_consensus_is_the_mean_rank_over_references():
    features = pool()
    references = [features["clip"], np.random.default_rng(1).normal(size=(160, 9))]
    candidates = {name: features[name] for name in FAMILIES}
    both = rank(candidates, reference=references)
    ranks = np.zeros(len(FAMILIES))
    for one in references:
        score = np.array([ssr_dagger(candidates[name], one, 8) for name in FAMILIES])
        ranks += (score[:, None] < score).sum(axis=1) + 1
    assert [both.scores[name] for name in FAMILIES] == pytest.approx(-ranks / 2)
    named = rank(features, reference=["clip", "a1"])
    assert set(named.order) == set(FAMILIES) - {"a1"}
    assert named.references == ("clip", "a1")


def test_any_callable_is_a_score():
    features = pool()
    ranking = rank(features, score=lambda z, r: -Features.of(z).width, bootstrap=3)
    assert ranking.order[0] == "b2"
    assert rank(features, score=cka).scores["a1"] == pytest.approx(cka(features["a1"], features["clip"]))
    assert rank(features, score="rankme", reference=None).forward_passes == 7


def test_ties_are_drawn_by_the_seed_and_not_by_the_order_of_a_dictionary():
    features = pool()
    first = {rank(features, score=lambda z, r: 1.0, seed=seed).order[0] for seed in range(20)}
    assert len(first) > 2


@pytest.mark.parametrize("score", ["ssr_dagger", "ssr_z", "cka", "rankme", "ssr"])
def test_intervals_hold_the_score_and_p_best_sums_to_one(score):
    ranking = rank(pool(), score=score, bootstrap=40)
    for name, (low, high) in ranking.intervals.items():
        assert low < ranking.scores[name] < high
    assert sum(ranking.p_best.values()) == pytest.approx(1)
    assert ranking.p_best[ranking.order[0]] == max(ranking.p_best.values())
    again = rank(pool(), score=score, bootstrap=40)
    assert again.intervals == ranking.intervals


@pytest.mark.slow
def test_intervals_cover_the_score_on_other_items():
    """The interval from one sample of items holds the mean score over samples about as often as it says."""
    rng = np.random.default_rng(0)
    mix, other, noise = rng.normal(size=(8, 40)), rng.normal(size=(8, 30)), 2.0

    def sample(n=200):
        truth = rng.normal(size=(n, 8))
        return (
            truth @ mix + noise * rng.normal(size=(n, 40)),
            {"reference": truth @ other + 0.5 * rng.normal(size=(n, 30)), "rank": 8},
        )

    def run(bootstrap):
        z, how = sample()
        return rank_encoders({"z": z, "y": z[:, :20]}, bootstrap=bootstrap, **how)

    mean = np.mean([run(0).scores["z"] for _ in range(400)])
    inside = [low < mean < high for low, high in (run(100).intervals["z"] for _ in range(120))]
    assert 0.85 <= np.mean(inside) <= 1.0


@pytest.mark.parametrize("name", ["a1", "c1"])
def test_resampled_items_are_scored_as_their_rows_would_be(name):
    """What stands for the rows, their coordinates in their own span, gives the scores of the rows themselves."""
    rng = np.random.default_rng(0)
    z, clip = rng.normal(size=(160, 300)) + 1 if name == "c1" else pool()[name], pool()["clip"]
    scoring = _Scoring(_Pool({}, {}), [Features(clip)], rank=8, draws=3, seed=0)
    for function in (rankme, cka):
        drawn = scoring._drawn(function, Features(z))[:, 0]
        assert drawn == pytest.approx([function(z[rows], clip[rows]) for rows, _ in scoring.halves], rel=1e-6)
    drawn = scoring._drawn(ssr_dagger, Features(z))[:, 0]
    there, missed = leave_one_out(z, clip, 8)
    for score, times in zip(drawn, scoring.times, strict=True):
        rows = np.repeat(np.arange(160), times.astype(int))  # an item counts as often as it was drawn
        assert len(rows) == 160
        assert score == pytest.approx(1 - missed[rows].sum() / there[rows].sum())


def test_the_table_and_the_dictionary_say_it_all():
    ranking = rank(pool(), families=FAMILIES, stages=2)
    table = ranking.table()
    assert list(table.index) == list(ranking.order)
    assert list(table.columns) == ["family", "width", "stage", "score", "low", "high", "p_best"]
    assert table.loc["c1", "width"] == 90
    written = json.loads(json.dumps(ranking.to_dict(), allow_nan=False))
    assert written["intervals"]["c1"] == [None, None]
    assert written["forward_passes"] == 6


# ------------------------------------------------------------------------------------------------------------ bad input


def test_different_numbers_of_items_name_both_encoders():
    features = pool()
    with pytest.raises(InputError, match="clip has 160 items and a2 has 150"):
        rank(features | {"a2": features["a2"][:150]})


def test_a_feature_that_is_not_finite_names_encoder_and_row():
    features = pool()
    features["b1"][17, 3] = np.nan
    with pytest.raises(InputError, match="b1: row 17 is not finite"):
        rank(features)


def test_constant_features_name_the_encoder():
    with pytest.raises(InputError, match="b1: the features are the same"):
        rank(pool() | {"b1": np.ones((160, 4))})


def test_too_few_items_for_the_rank_are_refused():
    with pytest.raises(InputError, match="too few for 32 components"):
        rank(pool(n=100), rank=32)


def test_item_ids_must_agree():
    features = pool()
    ids = {name: list(range(160)) for name in features}
    assert rank(features, ids=ids).order == rank(features).order
    ids["b2"] = ids["b2"][::-1]
    with pytest.raises(InputError, match="a1 and b2 have different item ids"):
        rank(features, ids=ids)
    with pytest.raises(InputError, match="clip has 160 items and 159 ids"):
        rank(features, ids=dict.fromkeys(features, range(159)))


def test_items_in_another_order_are_warned_of():
    features = pool()
    rows = np.random.default_rng(0).permutation(160)
    shuffled = {name: values if name == "clip" else values[rows] for name, values in features.items()}
    with pytest.warns(UserWarning, match="are items in one order"):
        ranking = rank(shuffled)
    assert "are items in one order" in ranking.notes[-1]


def test_a_pool_of_one_family_is_told_of_the_within_family_score():
    ranking = rank(pool(), families=dict.fromkeys(FAMILIES, "vit"))
    assert any("within-family score such as rankme" in note for note in ranking.notes)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"reference": "clap"}, "did you mean 'clip'"),
        ({"score": "ssr-dagger"}, "no score 'ssr-dagger'"),
        ({"families": {"a9": "a"}}, "no encoder 'a9'"),
        ({"stages": 3}, "stages=3"),
        ({"stages": 2, "families": FAMILIES, "representatives": {"d": "a1"}}, "no family 'd'"),
        ({"score": lambda features, reference: float("nan")}, "a1: its score is nan"),
        ({"keep": 0}, "keep=0"),
        ({"keep": True}, "keep=True"),
        ({"bootstrap": 2.5}, "bootstrap=2.5"),
        ({"rank": True}, "rank=True"),
        ({"rank": 2.5}, "rank=2.5"),
        ({"ids": {"a9": [1]}}, "no encoder 'a9'"),
        ({"reference": None}, "needs a reference"),
        ({"reference": np.ones((160, 2))}, "the reference: the features are the same"),
    ],
)
def test_what_cannot_be_ranked_is_refused(how, message):
    with pytest.raises((InputError, UnknownNameError), match=message):
        rank(pool(), **how)


def test_one_candidate_is_no_ranking():
    features = pool()
    with pytest.raises(InputError, match="1 candidates besides the reference"):
        rank({"clip": features["clip"], "a1": features["a1"]})
