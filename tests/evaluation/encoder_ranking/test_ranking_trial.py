import itertools
import json
import math

import numpy as np
import pytest
from PIL import Image

from fairtrial.errors import InputError, MissingSampleError, UnknownNameError
from fairtrial.evaluation.encoder_ranking.trial import (
    CANDIDATES,
    RankingParams,
    best_of_some,
    dealings,
    in_two_stages,
    measure_choice,
    measure_cost,
    parts,
    pool_of,
    rank_correlation,
    sample_of,
    scores,
    sets_of,
    task_names,
    trial,
    truth,
    unseen,
)
from fairtrial.testing import check_trial
from fairtrial.trial.params import make_params

SMOKE = make_params(trial, "smoke")


class Direct:
    """Stages without a store; each is computed once."""

    def __init__(self):
        self.memory = {}
        self.asked = []

    def __call__(self, function, *arguments):
        key = (function.__name__, repr(arguments))
        if key not in self.memory:
            self.asked.append(function.__name__)
            wants = function.__code__.co_varnames[:1] == ("stages",)
            self.memory[key] = function(self, *arguments) if wants else function(*arguments)
        return self.memory[key]


@pytest.fixture(scope="module")
def stages():
    return Direct()


def measured(stages, label, params=SMOKE, **cell):
    candidate = next(c for c in CANDIDATES if c.label == label)
    where = {"task": "tiny-a/0", "reference": "pixels", "sample": 0, **cell}
    return measure_choice(candidate, where, params, stages)


def test_the_trial_is_sound():
    check_trial(trial)


def test_the_regret_of_a_random_choice_is_that_of_many_drawn(stages):
    table = stages(truth, "tiny-a", SMOKE.groupings, SMOKE)["accuracy"][:, 0]
    inside = table[pool_of(stages, "tiny-a", SMOKE)["names"] != "pixels"]
    drawn = inside.max() - np.random.default_rng(0).choice(inside, size=100_000)
    found = measured(stages, "random")
    assert found["regret"] == pytest.approx(drawn.mean(), abs=3 * drawn.std() / math.sqrt(len(drawn)))
    assert found["normalised_regret"] == pytest.approx(1)


def test_the_best_of_some_at_random_is_that_of_all_subsets():
    rng = np.random.default_rng(0)
    seen, true = rng.random(7), rng.random(7)
    for some in (1, 3, 7):
        subsets = list(itertools.combinations(range(7), some))
        expected = np.mean([true[max(subset, key=lambda i: seen[i])] for subset in subsets])
        assert best_of_some(seen, true, some) == pytest.approx(expected)


def test_rank_correlation_is_spearmans():
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    one, other = rng.integers(5, size=30), rng.normal(size=30)
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)
    assert rank_correlation(np.ones(30), other) == 0


def test_what_candidates_see_and_where_choices_are_compared_share_no_item():
    hidden = unseen("tiny-a", 240)
    assert hidden.sum() == 120
    for sample in range(3):
        rows = sample_of("tiny-a", sample, 240, 100)
        assert len(set(rows.tolist())) == 100
        assert not hidden[rows].any()


@pytest.mark.parametrize("classes", [2, 3, 4, 10, 26])
def test_groupings_differ_and_the_first_is_the_classes_themselves(classes):
    found = dealings(classes, 12)
    assert found[0].tolist() == list(range(classes))
    assert len(found) == {2: 1, 3: 4, 4: 10}.get(classes, 12)  # few classes have few groupings
    pairs = {tuple((one[:, None] == one).ravel()) for one in found}
    assert len(pairs) == len(found)
    if classes > 4:
        assert [groups.max() + 1 for groups in found[1:6]] == [5, 3, 2, 5, 3]
    assert all(np.array_equal(one, other) for one, other in zip(dealings(classes, 3), found, strict=False))


@pytest.mark.parametrize("label", [c.label for c in CANDIDATES])
def test_every_candidate_chooses(stages, label):
    found = measured(stages, label)
    assert found["regret"] >= 0
    assert 0 <= found["passes"] <= 1
    assert (found["spearman"] is None) == (label in ("two-stage", "prior-first", "bandit", "random-order", "random"))


def test_regret_is_that_of_the_encoder_with_the_highest_score(stages):
    names = pool_of(stages, "tiny-a", SMOKE)["names"]
    inside = names != "pixels"
    accuracy = stages(truth, "tiny-a", SMOKE.groupings, SMOKE)["accuracy"][inside, 1]
    table = stages(scores, "tiny-a", 0, ["pixels"], SMOKE.groupings, SMOKE)
    best = table["pixels: ssr-dagger"][inside].argmax()
    assert measured(stages, "ssr-dagger", task="tiny-a/1")["regret"] == pytest.approx(accuracy.max() - accuracy[best])


def test_two_stages_take_a_share_of_one_stages_passes(stages):
    found = stages(in_two_stages, "tiny-a", 0, "pixels", SMOKE)
    families = pool_of(stages, "tiny-a", SMOKE)["families"].tolist()
    best = families[pool_of(stages, "tiny-a", SMOKE)["names"].tolist().index(found["best"])]
    # the reference and a member of each other family, and the rest of the best one
    assert found["passes"] * len(families) == len(set(families)) + families.count(best) - 1


def test_cost_is_timed_over_the_whole_pool(stages):
    for label in ("ssr-dagger", "rankme"):
        candidate = next(c for c in CANDIDATES if c.label == label)
        assert measure_cost(candidate, {"repeat": 0}, SMOKE, stages)["seconds"] > 0


def test_another_budget_needs_no_features_anew(stages):
    before = stages.asked.count("default_encoders")
    measured(stages, "prior-first", params=SMOKE.model_copy(update={"budget": 2}))
    assert stages.asked.count("default_encoders") == before


def test_data_sets_take_turns_so_that_two_workers_prepare_two_of_them():
    task = next(factor for factor in parts(RankingParams())[0].factors if factor.name == "task")
    assert list(task.values)[:4] == ["fashion/0", "digits/0", "fashion/1", "digits/1"]
    assert task.kind == "replicate"
    text = parts(RankingParams(data="text"))[0]
    assert len(text.replicate.values) == 8


# ----------------------------------------------------------------------------------------------------------- users' own


@pytest.fixture
def mine(tmp_path):
    rng = np.random.default_rng(0)
    for place in ("photos", "scans"):
        folder = tmp_path / "mine" / place
        folder.mkdir(parents=True)
        labels = rng.integers(4, size=140)
        means = rng.normal(size=(4, 10))[labels]
        for name, noise in (("clip", 0.5), ("dino", 1.0), ("vit", 3.0), ("mae", 9.0)):
            np.save(folder / f"{name}.npy", means + noise * rng.normal(size=(140, 10)))
        np.save(folder / "labels.npy", np.array(["cat", "cow", "dog", "hen"])[labels])
        (folder / "families.csv").write_text("encoder,family\nclip,a\ndino,b\nvit,b\nmae,b\n")
    return tmp_path / "mine"


SMALL = {"items": 64, "labels": 40, "rank": 8, "samples": 1, "groupings": 2, "budget": 2}


def test_a_users_feature_files_are_a_trial_of_their_own(mine):
    params = make_params(trial, None, {"data": str(mine), **SMALL})
    trial.check(params)
    assert sets_of(params.data) == ("photos", "scans")
    assert task_names(params, "scans") == ["scans/0", "scans/1"]
    stages = Direct()
    found = measured(stages, "ssr-dagger", params, task="scans/0", reference="clip")
    assert found["regret"] <= measured(stages, "random", params, task="scans/0", reference="clip")["regret"]
    assert pool_of(stages, "scans", params)["families"].tolist() == ["a", "b", "b", "b"]
    alone = make_params(trial, None, {"data": str(mine / "scans"), **SMALL})
    trial.check(alone)
    assert sets_of(alone.data) == ("scans",)


def test_a_users_pictures_are_read_by_the_default_pool(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for place in range(40):
            Image.fromarray(rng.integers(255, size=(9, 7, 3), dtype=np.uint8)).save(tmp_path / kind / f"{place}.png")
    params = make_params(trial, None, {"data": str(tmp_path), **SMALL, "items": 40, "references": ["pixels"]})
    monkeypatch.setattr("fairtrial.evaluation.encoder_ranking.trial.network_weights", lambda: None)
    monkeypatch.setattr("fairtrial.evaluation.encoder_ranking.trial.SIDE", 16)
    assert task_names(params, tmp_path.name) == [f"{tmp_path.name}/0"]
    pool = pool_of(Direct(), tmp_path.name, params)
    assert pool["of pixels"].shape == (80, 16 * 16)


def test_a_users_features_are_refused_before_any_worker_starts(mine):
    params = {"data": str(mine), **SMALL}
    with pytest.raises(UnknownNameError, match="did you mean 'clip'"):
        trial.check(make_params(trial, None, {**params, "references": ["clap"]}))
    np.save(mine / "scans" / "vit.npy", np.zeros((139, 3)))
    with pytest.raises(InputError, match=r"vit has 139 items and labels\.npy 140"):
        trial.check(make_params(trial, None, params))
    for name in ("vit", "mae", "dino"):
        (mine / "photos" / f"{name}.npy").unlink()
    with pytest.raises(InputError, match="1 feature files"):
        trial.check(make_params(trial, None, params))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": "./no-such-folder"}, "or a folder"),
        ({"labels": 200}, "labels=200 exceed items=100"),
        ({"rank": 26}, "items=100 are too few for rank=26"),
        ({"items": 121}, "--set items=120 or fewer"),
        ({"models": ["resnet18"]}, "join a pool of images"),
        ({"models": ["resnet18"], "data": "images"}, "pip install timm"),
    ],
)
def test_bad_values_are_refused_before_any_worker_starts(values, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=message):
        trial.check(make_params(trial, "smoke", values))


def test_a_missing_sample_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("FAIRTRIAL_CACHE", str(tmp_path))
    for data in ("images", "text"):
        with pytest.raises(MissingSampleError, match="fairtrial samples get"):
            trial.check(RankingParams(data=data))


def test_a_reference_that_is_not_in_the_pool_ends_the_run(stages):
    with pytest.raises(UnknownNameError, match="encoder of tiny-a to be the reference 'pixel'") as caught:
        measured(stages, "random", reference="pixel")
    assert caught.value.ends_run


def test_the_claims_keep_the_specifications_margins():
    claims = {claim.id: claim for part in parts(RankingParams()) for claim in part.claims}
    assert claims["C2"].above == 0.05
    assert [claim.above or claim.below for claim in claims["C4"].claims] == [-0.03, 0.4]
    assert json.dumps(sorted(claims)[:6]) == '["C1", "C2", "C3", "C4", "C5", "C6"]'
