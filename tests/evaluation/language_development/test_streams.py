import contextlib
import io

import numpy as np
import pandas as pd
import pytest
import torch

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.language_development.alignment import label_alignment, retrieval_alignment
from fairtrial.evaluation.language_development.egostream import THINGS, EgoStream, Narrator, things_in_view
from fairtrial.evaluation.language_development.learners import MILNCE, Counting, InfoNCE
from fairtrial.evaluation.language_development.vision import (
    _area,
    binding,
    binding_pairs,
    linear_probe,
    retrieval,
    temporal_grounding,
)


def test_with_alpha_one_every_referent_is_in_view():
    for mode in ("unrelated", "lag", "absent"):
        assert EgoStream(alpha=1.0, mode=mode, seed=2).record(100).aligned.all()


@pytest.mark.slow
def test_with_alpha_half_the_share_in_view_is_half_and_half_of_the_base_rate():
    base = EgoStream(alpha=0.0, mode="unrelated", rate=1.0, seed=5).record(600).aligned
    half = EgoStream(alpha=0.5, mode="unrelated", rate=1.0, seed=6).record(600).aligned
    expected = 0.5 + 0.5 * base.mean()
    assert abs(half.mean() - expected) < 3 * (0.25 / len(half) + 0.25 * 0.25 / len(base)) ** 0.5


def test_absent_things_are_never_in_view_and_lag_names_what_was():
    assert not EgoStream(alpha=0.0, mode="absent", seed=3).record(200).aligned.any()
    narrator = Narrator(alpha=0.0, mode="lag", rate=1.0, mean_lag=2.0, seed=0)
    views = [[THINGS[t % 18]] for t in range(400)]
    said = [narrator.hear(view) for view in views]
    lags = [(t - THINGS.index(s.referent)) % 18 for t, s in enumerate(said) if s]
    assert min(lags) >= 1
    assert np.mean([lag == 1 for lag in lags]) == pytest.approx(0.5, abs=0.1)
    assert Narrator(alpha=0.0, mode="unrelated", rate=1.0).hear(["red ball"]) is None  # there is no other time yet


def test_the_rate_and_clarity_of_speech_are_as_asked():
    clear = EgoStream(alpha=1.0, rate=1.0, most_in_view=1, seed=1).record(100)
    assert (clear.visible[clear.times].sum(1) == 1).all()
    some = EgoStream(alpha=1.0, rate=0.35, seed=1).record(500)
    views = some.visible.any(1).sum()
    assert len(some.times) / views == pytest.approx(0.35, abs=3 * (0.35 * 0.65 / views) ** 0.5)


def test_the_rooms_do_not_depend_on_what_is_said():
    one, two = (EgoStream(alpha=a, mode=m, seed=4).record(100) for a, m in ((1.0, "lag"), (0.1, "absent")))
    assert (one.frames == two.frames).all()
    again = EgoStream(alpha=1.0, mode="lag", seed=4).record(100)
    assert again.texts == one.texts


def test_a_stream_is_silent_iterable_and_a_gymnasium_wrapper():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        stream = EgoStream(seed=0)
        for frame, utterance, t in stream:
            assert frame.shape == (7, 7, 3)
            assert utterance is None or any(thing in utterance for thing in THINGS)
            if t == 60:
                break
    assert out.getvalue() == ""
    observation, info = stream.reset(seed=1)
    assert {"utterance", "referent"} <= info.keys()
    *_, info = stream.step(2)
    assert {"utterance", "referent"} <= info.keys()
    assert things_in_view(observation["image"]) == stream.narrator.past[-2]


def test_a_stream_is_written_to_parquet(tmp_path):
    table = pd.read_parquet(EgoStream(alpha=1.0, seed=0).to_parquet(tmp_path / "stream.parquet", 50))
    assert len(table) == 50
    said = table[table.utterance.notna()]
    assert all(row.referent in row.visible for row in said.itertuples())
    assert np.array(table.frame[0]).reshape(table["shape"][0]).shape == (7, 7, 3)


def test_pixels_come_from_a_wrapped_environment():
    import gymnasium
    import minigrid

    env = minigrid.wrappers.RGBImgPartialObsWrapper(gymnasium.make("BabyAI-PickupLoc-v0"))
    recording = EgoStream(env, alpha=1.0).record(20)
    assert recording.frames.shape == (20, 56, 56, 3)
    assert recording.aligned.all()


def test_bad_streams_are_refused():
    import gymnasium

    with pytest.raises(InputError, match="alpha=2"):
        EgoStream(alpha=2.0)
    with pytest.raises(UnknownNameError, match="unrelated"):
        EgoStream(mode="late")
    with pytest.raises(InputError, match="BabyAI-Nowhere"):
        EgoStream("BabyAI-Nowhere-v0")
    with pytest.raises(InputError, match="not an environment of minigrid"):
        EgoStream(gymnasium.make("CartPole-v1"))


# -------------------------------------------------------------------------------------------------------- learners


def lagging(n=600, lag=2, seed=0):
    """Frames that show one of four things each, and speech that names what was shown ``lag`` frames ago."""
    rng = np.random.default_rng(seed)
    shown = rng.integers(0, 4, n)
    times = np.arange(lag, n, 3)
    return np.eye(4)[shown] + 0.05 * rng.normal(size=(n, 4)), times, ["abcd"[shown[t - lag]] * 2 for t in times]


def test_only_the_bag_of_frames_learns_from_speech_that_lags():
    frames, times, texts = lagging()
    words = ["aa", "bb", "cc", "dd"]
    mil = MILNCE(window=2, epochs=30).fit(frames, times, texts).score(np.eye(4), words)
    plain = InfoNCE(epochs=30).fit(frames, times, texts).score(np.eye(4), words)
    assert (mil.argmax(1) == np.arange(4)).all()
    assert np.trace(mil) - mil.sum() / 4 > np.trace(plain) - plain.sum() / 4


def test_the_mil_nce_loss_is_its_formula():
    frames, times, texts = lagging(60)
    learner = MILNCE(window=2, epochs=0).fit(frames, times, texts)
    x, said = torch.as_tensor(frames, dtype=torch.float32), torch.as_tensor(times)
    text = learner.towers.text(learner._bags(texts))
    vectors = learner.towers.frame(x)
    bags = [[min(max(t + k, 0), 59) for k in range(-2, 3)] for t in times]
    e = lambda i, j: sum(torch.exp(vectors[f] @ text[j] / 0.1) for f in bags[i])  # noqa: E731
    losses = []
    for i in range(len(times)):
        others = sum(e(j, i) + e(i, j) for j in range(len(times)) if j != i)
        losses.append(-torch.log(e(i, i) / (e(i, i) + others)))
    assert learner._loss(x, said, text).item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)


def test_counting_is_the_logarithm_of_observed_over_expected():
    rng = np.random.default_rng(0)
    views = rng.random((50, 3)) < 0.5
    texts = [str(rng.choice(["a", "b"])) for _ in range(50)]
    parts = np.where(views[:, :, None], np.eye(3), 0.0)  # a part shows its thing, or nothing
    learner = Counting(smoothing=0.5).fit(parts, np.arange(50), texts)
    thing = int(np.flatnonzero((learner.means == [0, 1, 0]).all(1))[0])
    both = sum(text == "a" and view[1] for text, view in zip(texts, views, strict=True))
    expected = texts.count("a") * views[:, 1].sum() / 50
    assert learner.pmi[learner.ids["a"], thing] == pytest.approx(np.log((both + 0.5) / (expected + 0.5)))


def test_options_of_learners_that_cannot_be_are_named():
    for made, options in (
        (InfoNCE, [{"width": 0}, {"epochs": -1}, {"batch": 2.5}, {"temperature": 0}, {"learning_rate": "1"}]),
        (MILNCE, [{"window": -1}, {"hidden": True}]),
        (Counting, [{"clusters": 0}, {"smoothing": 0.0}]),
    ):
        for how in options:
            with pytest.raises(InputError, match=f"{next(iter(how))}="):
                made(**how)


@pytest.mark.parametrize("learner", [InfoNCE(epochs=1), MILNCE(epochs=1), Counting(clusters=3)])
def test_learners_repeat_themselves_and_ignore_unknown_words(learner):
    frames, times, texts = lagging(80)
    one = learner.fit(frames, times, texts).score(frames[:5], ["aa", "zz"])
    two = learner.fit(frames, times, texts).score(frames[:5], ["aa", "zz"])
    assert (one == two).all()
    assert (one[:, 1] == 0).all()
    with pytest.raises(InputError, match="said at frame 200 of 80"):
        learner.fit(frames, [0, 200], ["aa", "bb"])
    with pytest.raises(InputError, match="two or more"):
        learner.fit(frames, [0], ["aa", "bb"])


# ---------------------------------------------------------------------------------------------------------- vision


def test_the_area_is_the_share_of_pairs_in_order():
    rng = np.random.default_rng(0)
    score, positive = rng.integers(0, 5, 40).astype(float), rng.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in score[positive] for b in score[~positive]]
    assert _area(score, positive) == pytest.approx(np.mean(pairs))


def test_retrieval_counts_every_frame_that_shows_the_word_and_averages_over_ties():
    rng = np.random.default_rng(0)
    shown = rng.random((12, 5)) < 0.3
    scores = rng.integers(0, 3, (12, 5)).astype(float)
    for k in (1, 3):
        found = retrieval(scores, shown, k)
        draws = []
        for _ in range(3000):
            order = np.lexsort((rng.random((12, 5)), -scores), axis=0)[:k]
            draws.append(np.take_along_axis(shown, order, 0).any(0)[shown.any(0)].mean())
        assert found.recall == pytest.approx(np.mean(draws), abs=0.02)
    blind = retrieval(np.zeros((12, 5)), shown, 2)
    assert blind.recall == pytest.approx(blind.chance)


def test_a_bag_of_words_binds_nothing_and_an_oracle_everything():
    frames = EgoStream(alpha=1.0, seed=0).record(300).frames
    images, texts = binding_pairs(frames)
    assert len(texts) > 3
    for pair, (first, second) in zip(images, texts, strict=True):
        assert sorted(first.split()) == sorted(second.split())
        assert (pair[0] != pair[1]).sum() == 2  # two colours
        assert set(things_in_view(pair[0])) == set(first.split(" and "))
        assert set(things_in_view(pair[1])) == set(second.split(" and "))
    assert binding(np.ones((3, 2, 2))) == (0, 0, 0)
    assert binding(np.tile(np.eye(2), (3, 1, 1))) == (1, 1, 1)


def test_guessing_gets_a_quarter_a_quarter_and_a_sixth():
    guesses = np.random.default_rng(0).random((20000, 2, 2))
    np.testing.assert_allclose(binding(guesses), (1 / 4, 1 / 4, 1 / 6), atol=0.01)


def test_grounding_finds_the_frame_and_a_constant_only_the_base_rate():
    rng = np.random.default_rng(0)
    shown = rng.random((60, 20)) < 0.2
    times = rng.integers(0, 60, 20).tolist()
    assert temporal_grounding(shown.astype(float), shown, times, 4).hit == 1
    blind = temporal_grounding(np.zeros((60, 20)), shown, times, 4)
    assert blind.hit == pytest.approx(blind.base)


def test_a_probe_reads_what_is_there_and_not_what_is_not():
    recording = EgoStream(alpha=1.0, seed=0).record(300)
    features = recording.visible + 0.3 * np.random.default_rng(0).normal(size=recording.visible.shape)
    read = linear_probe(features, recording.visible)
    assert np.nanmean(read) > 0.95
    assert np.nanmean(linear_probe(np.random.default_rng(1).normal(size=(300, 5)), recording.visible)) < 0.6


@pytest.mark.parametrize(
    "call",
    [
        lambda: retrieval(np.zeros((2, 2)), np.zeros((2, 2)), 1),
        lambda: retrieval(np.zeros((2, 2)), np.ones((2, 3)), 1),
        lambda: binding(np.zeros((2, 3, 2))),
        lambda: temporal_grounding(np.zeros((2, 1)), np.zeros((2, 1)), [0], 1),
        lambda: linear_probe(np.zeros((3, 2)), np.zeros((4, 2))),
        lambda: label_alignment(np.ones((2, 2)), ["a", "a"]),
        lambda: retrieval_alignment(np.ones((4, 2)), np.ones((4, 2))),
    ],
)
def test_impossible_questions_are_refused(call):
    with pytest.raises(InputError):
        call()


# ------------------------------------------------------------------------------------------------------- alignment


def test_measured_alignment_falls_with_alpha_to_nothing():
    found = []
    for alpha in (1.0, 0.5, 0.0):
        one = EgoStream(alpha=alpha, mode="unrelated", rate=1.0, seed=1).record(400)
        found.append(label_alignment(one.visible[one.times], one.referents))
    values = [one.value for one in found]
    assert values[0] > values[1] > values[2]
    assert abs(values[2]) < 0.02


def test_alignment_without_labels_is_near_one_for_a_map_and_none_for_noise():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 5))
    same = retrieval_alignment(x, x @ rng.normal(size=(5, 4)) + 0.01 * rng.normal(size=(150, 4)))
    assert same.value > 0.9
    assert abs(same.shuffled) < 0.2
    assert abs(retrieval_alignment(x, rng.normal(size=(150, 4))).value) < 0.2
