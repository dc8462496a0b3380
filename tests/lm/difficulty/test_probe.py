import warnings

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.difficulty import DifficultyProbe, NoSignal, concordance
from fairtrial.lm.difficulty.probe import _direction, _kernel, _project

METHODS = ["direction", "kernel", "shrinkage"]


def planted(strength, seed, n=16, test=200, d=64, layers=1):
    """Hard states lie ``strength`` along a direction of their own, noise has deviation 1."""
    rng = np.random.default_rng(seed)
    u = rng.standard_normal((layers, d))
    u *= strength / np.linalg.norm(u, axis=1, keepdims=True)
    y = np.r_[np.arange(n) % 2, np.arange(test) % 2]
    H = y[:, None, None] * u + rng.standard_normal((n + test, layers, d))
    return H[:n], y[:n], H[n:], y[n:]


def quiet_fit(*args, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoSignal)
        return DifficultyProbe.from_states(*args, **how)


@pytest.mark.parametrize("method", METHODS)
def test_a_planted_direction_is_found_from_sixteen_references(method):
    aurocs = []
    for seed in range(5):
        H, y, T, truth = planted(3.0, seed, layers=4)  # one layer alone reaches .87: 16 references are few
        aurocs.append(concordance(truth, quiet_fit(H, y, method=method, unlabelled=T).predict(T)))
    assert np.mean(aurocs) > 0.95


def test_without_a_signal_weights_vanish_and_ranking_is_chance():
    weights, aurocs = [], []
    for seed in range(50):
        H, y, T, truth = planted(0.0, seed)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", NoSignal)
            probe = DifficultyProbe.from_states(H, y, unlabelled=T)
        weights.append(0.0 if told else probe.weights_.sum())
        aurocs.append(concordance(truth, probe.predict(T)))
    assert np.mean(weights) < 0.2
    assert abs(np.mean(aurocs) - 0.5) < 0.05


@given(st.integers(0, 500))
def test_a_shift_and_a_rotation_of_all_states_change_no_score(seed):
    H, y, T, _ = planted(3.0, seed, test=12, d=16, layers=2)
    Q = np.linalg.qr(np.random.default_rng(seed + 1).standard_normal((16, 16)))[0]
    shift = np.random.default_rng(seed + 2).standard_normal(16)
    ours = quiet_fit(H, y, standardize="layer").predict(T)
    np.testing.assert_allclose(quiet_fit(H @ Q + shift, y, standardize="layer").predict(T @ Q + shift), ours, atol=1e-8)
    shifted = quiet_fit(H + shift, y).predict(T + shift)
    np.testing.assert_allclose(shifted, quiet_fit(H, y).predict(T), atol=1e-8)


@given(st.integers(0, 500))
def test_kernel_scores_are_difficulties(seed):
    H, _, T, _ = planted(1.0, seed, test=20, d=8, layers=3)
    d = np.random.default_rng(seed).uniform(0.2, 0.7, len(H))
    probe = quiet_fit(H, d, method="kernel")
    for scores in (probe._layer_scores(torch.tensor(T), None), probe.predict(T)):
        assert d.min() <= scores.min() <= scores.max() <= d.max()


@pytest.mark.parametrize("method", METHODS)
def test_leaving_out_by_downdate_equals_fitting_again(method):
    H, _, _, _ = planted(2.0, 0, n=9, d=12, layers=3)
    d = np.random.default_rng(1).uniform(size=9)
    probe = quiet_fit(H, d, method=method)
    Z, t = probe._references, torch.tensor(d)
    for r in range(9):
        kept = [s for s in range(9) if s != r]
        if method == "kernel":
            again = _kernel(Z[r : r + 1], Z[kept], t[kept])[0]
        else:
            again = _project(Z[r : r + 1], _direction(Z[kept], t[kept], method))[0]
        np.testing.assert_allclose(probe._left_out_scores()[r], again, atol=1e-8)


def test_the_shrunk_discriminant_is_the_dense_one():
    Z = torch.randn(7, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    d = torch.tensor([0.0, 1, 0, 1, 1, 0, 1], dtype=torch.float64)
    for layer in range(2):
        z = Z[:, layer]
        hard, easy = z[d == 1] - z[d == 1].mean(0), z[d == 0] - z[d == 0].mean(0)
        S = (hard.T @ hard + easy.T @ easy) / 7
        w = ((d - d.mean())[:, None] * z).sum(0)
        dense = torch.linalg.solve(S + 0.5 * S.trace() / 5 * torch.eye(5, dtype=S.dtype), w)
        torch.testing.assert_close(_direction(Z, d, "shrinkage")[layer], dense)


def test_two_references_rank_themselves():
    H = np.random.default_rng(0).standard_normal((2, 3, 8))
    probe = DifficultyProbe.from_states(H, [0, 1])
    easy, hard = probe.predict(H)
    assert hard > easy


@pytest.mark.parametrize("method", ["direction", "shrinkage"])
def test_scores_of_the_fit_do_not_depend_on_length(method):
    H, y, T, _ = planted(2.0, 3, test=30)
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 200, len(H) + len(T))
    grown = np.concatenate([H, T]) + np.log(lengths)[:, None, None]
    n = len(H)
    probe = quiet_fit(
        grown[:n], y, lengths=lengths[:n], unlabelled=grown[n:], unlabelled_lengths=lengths[n:], method=method
    )
    assert abs(np.corrcoef(probe.pool_scores_, np.log(lengths))[0, 1]) < 1e-10
    with pytest.raises(InputError, match="lengths="):
        probe.predict(T)


def test_reversing_difficulties_negates_the_score():
    H, _, T, _ = planted(2.0, 4)
    d = np.random.default_rng(0).uniform(size=len(H))
    one, other = (quiet_fit(H, x, unlabelled=T).predict(T) for x in (d, 1 - d))
    np.testing.assert_allclose(one, -other, atol=1e-12)


def test_calibration_is_monotone_and_wants_thirty():
    rng = np.random.default_rng(0)
    s = rng.standard_normal(200)
    wrong = rng.uniform(size=200) < 1 / (1 + np.exp(-2 * s))
    probe = quiet_fit(rng.standard_normal((4, 3)), [0, 0, 1, 1]).calibrate(s, wrong)
    p = probe._isotonic.predict(np.linspace(-2, 2, 50))
    assert (np.diff(p) >= 0).all()
    assert abs(np.interp(0, np.linspace(-2, 2, 50), p) - 0.5) < 0.2
    with pytest.raises(InputError, match="at least 30"):
        probe.calibrate(s[:29], wrong[:29])


@pytest.fixture(scope="module")
def tiny():
    return tiny_causal_lm(layers=6)


EASY, HARD = [f"w{i} w2" for i in range(20, 28)], [f"w{i} w9" for i in range(20, 28)]


def test_prompts_are_ranked_as_their_kin_among_the_references(tiny):
    probe = DifficultyProbe(*tiny).fit(EASY + HARD, [0] * 8 + [1] * 8)
    assert probe.layers_ == [2, 3, 4]
    assert probe.transform(["w40 w2"]).shape == (1, 3)
    easy, hard = probe.predict(["w40 w2", "w40 w9"])
    assert hard > easy


def test_batches_and_padding_do_not_change_scores(tiny):
    probe = DifficultyProbe(*tiny, remove_length=False).fit(EASY + HARD, [0] * 8 + [1] * 8)
    prompts = ["w40 w2", "w30 w31 w32 w33 w34 w35 w9", "w3"]
    alone = [probe.predict([prompt])[0] for prompt in prompts]
    np.testing.assert_allclose(probe.predict(prompts), alone, atol=1e-4)


def test_a_probe_is_saved_with_its_model(tmp_path, tiny):
    probe = DifficultyProbe(*tiny).fit(EASY + HARD, [0] * 8 + [1] * 8)
    probe.save(tmp_path / "p.safetensors")
    again = DifficultyProbe.load(tmp_path / "p.safetensors", *tiny)
    np.testing.assert_array_equal(again.predict(["w40 w2", "w9"]), probe.predict(["w40 w2", "w9"]))
    with pytest.raises(InputError, match="another model"):
        DifficultyProbe.load(tmp_path / "p.safetensors", *tiny_causal_lm(layers=6, seed=1))
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="not a readable"):
        DifficultyProbe.load(tmp_path / "broken.safetensors")


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi"])
def test_any_known_family_is_read(family):
    probe = DifficultyProbe(tiny_models.build(family, layers=4, vocab_size=64), tiny_causal_lm()[1])
    easy, hard = probe.fit(EASY + HARD, [0] * 8 + [1] * 8).predict(["w40 w2", "w40 w9"])
    assert hard > easy


def test_bad_inputs_are_refused(tiny):
    H = np.random.default_rng(0).standard_normal((6, 2, 4))
    probe = quiet_fit(H, [0, 0, 0, 1, 1, 1])
    nan = H.copy()
    nan[2] = np.nan
    for call, word in (
        (lambda: DifficultyProbe(method="guess"), "no method"),
        (lambda: DifficultyProbe(standardize="no"), "no standardize"),
        (lambda: DifficultyProbe.from_states(H, [0.5] * 6), "equally difficult"),
        (lambda: DifficultyProbe.from_states(H, [1, 2, 3, 4, 5, 5]), "scale them"),
        (lambda: DifficultyProbe.from_states(H, [0, 1, np.nan, 0, 1, 1]), "finite"),
        (lambda: DifficultyProbe.from_states(H, [0, 1]), "each of the 6"),
        (lambda: DifficultyProbe.from_states(H, ["a"] * 6), "each of the 6"),
        (lambda: DifficultyProbe.from_states(H, None), "each of the 6"),
        (lambda: DifficultyProbe.from_states(H.astype(str), [0, 0, 0, 1, 1, 1]), "array of numbers"),
        (lambda: DifficultyProbe.from_states(H + 1j, [0, 0, 0, 1, 1, 1]), "complex"),
        (lambda: DifficultyProbe.from_states(H[:0], []), "at least one prompt"),
        (lambda: DifficultyProbe.from_states(H, [0, 0, 0, 1, 1, 1], unlabelled=H[:, :1]), "unlabelled"),
        (lambda: DifficultyProbe.from_states(H, [0, 0, 0, 1, 1, 1], lengths=[1, 2]), "lengths="),
        (lambda: DifficultyProbe.from_states(H, [0, 0, 0, 1, 1, 1], lengths=[1] * 6, unlabelled=H), "lengths="),
        (lambda: probe.predict(nan), "prompt 2"),
        (lambda: probe.calibrate([1] * 30, [2] * 30), "0 or 1"),
        (lambda: probe.predict(H[:, :1]), "L, d"),
        (lambda: DifficultyProbe().predict(H), "not fitted"),
        (lambda: DifficultyProbe().save("x.safetensors"), "not fitted"),
        (lambda: probe.save("x.bin"), "ends in"),
        (lambda: probe.predict(["a"]), "no model"),
        (lambda: probe.probability_wrong(["a"]), "not calibrated"),
        (lambda: DifficultyProbe(*tiny).fit(["w2 w3", "w4", "w2 w3"], [0, 1, 1]), "0 and 2"),
        (lambda: DifficultyProbe(*tiny).fit(["w2", "w3", "w4", "w5"], [0, 0, 1, 1], unlabelled=["w2"]), "0 and 4"),
        (lambda: DifficultyProbe(*tiny).fit(["w2 " * 600, "w3"], [0, 1]), "600 tokens"),
        (lambda: DifficultyProbe(*tiny).fit("w2 w3", [0, 1]), "list of at least one"),
        (lambda: DifficultyProbe(*tiny).fit([], []), "list of at least one"),
        (lambda: DifficultyProbe(*tiny).fit(["w2", None], [0, 1]), "prompt 1 is empty"),
        (lambda: DifficultyProbe(*tiny).predict([]), "list of at least one"),
        (lambda: concordance([1, 1], [0, 1]), "equally difficult"),
        (lambda: concordance([1, 0], [0]), "of both"),
        (lambda: concordance([1, 0], [0, np.nan]), "of both"),
    ):
        with pytest.raises(FairtrialError, match=word):
            call()
