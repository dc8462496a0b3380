import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.difficulty import AdaSwitch, DifficultyProbe, Effort, read_samples, replay
from fairtrial.lm.difficulty.replaying import cost_at, mixed, oracle

EASY, HARD = [f"w{i} w2" for i in range(20, 28)], [f"w{i} w9" for i in range(20, 28)]


@pytest.fixture(scope="module")
def states_probe():
    return DifficultyProbe.from_states(np.arange(8.0)[:, None], [0, 0, 0, 0, 1, 1, 1, 1])


@pytest.fixture(scope="module")
def text_probe():
    return DifficultyProbe(*tiny_causal_lm(layers=6)).fit(EASY + HARD, [0] * 8 + [1] * 8)


def log_of(scores, correct, tokens):
    n, K = correct.shape
    return pd.DataFrame(
        {
            "prompt": np.repeat(np.arange(n), K),
            "level": [f"l{k}" for k in range(K)] * n,
            "correct": correct.ravel(),
            "tokens": tokens.ravel(),
            "score": np.repeat(scores, K),
        }
    )


def simulated(seed, n=60, K=2):
    """Accuracy falls with the score, less at dearer levels."""
    rng = np.random.default_rng(seed)
    s = rng.standard_normal(n)
    p = 1 / (1 + np.exp(2 * s[:, None] - 1.5 * np.arange(K)))
    return s, (rng.uniform(size=(n, K)) < p).astype(float), np.tile(10.0 * 3.0 ** np.arange(K), (n, 1))


def fitted(probe, s, correct, tokens, budget, **how):
    switch = AdaSwitch(probe, [Effort(f"l{k}") for k in range(correct.shape[1])], budget_tokens=budget, **how)
    return switch.fit(log_of(s, correct, tokens))


@pytest.mark.filterwarnings("ignore:level")
@given(st.integers(0, 300), st.sampled_from([2, 3]), st.floats(0.05, 0.95))
@settings(max_examples=40)
def test_the_expected_cost_is_within_one_prompts_of_the_budget(states_probe, seed, K, share):
    s, correct, tokens = simulated(seed, K=K)
    costs = tokens.mean(0)
    budget = costs[0] + share * (costs[-1] - costs[0])
    switch = fitted(states_probe, s, correct, tokens, budget)
    spent = switch.costs_[switch.choose_index(s)].mean()
    assert spent <= budget + 1e-9
    if switch.price_ > 0:
        assert spent >= budget - np.diff(costs).sum() / len(s) - 1e-9


@pytest.mark.filterwarnings("ignore:level")
@given(st.integers(0, 300))
@settings(max_examples=20)
def test_no_price_buys_the_most_accurate_level_and_any_price_the_cheapest(states_probe, seed):
    s, correct, tokens = simulated(seed, K=3)
    free = fitted(states_probe, s, correct, tokens, 1e9)
    accuracy = free._accuracy(s)
    assert free.price_ == 0
    np.testing.assert_allclose(accuracy[np.arange(len(s)), free.choose_index(s)], accuracy.max(1))
    assert (fitted(states_probe, s, correct, tokens, tokens[0, 0]).choose_index(s) == 0).all()


def test_with_a_score_that_separates_the_policy_is_the_oracle(states_probe):
    s = np.arange(20.0)
    correct = np.stack([s < 12, np.ones(20)], axis=1).astype(float)
    tokens = np.tile([1.0, 10.0], (20, 1))
    switch = fitted(states_probe, s, correct, tokens, 1 + 9 * 8 / 20)
    told = replay(switch, log_of(s, correct, tokens))
    assert told.accuracy == 1
    assert told.tokens == pytest.approx(1 + 9 * 8 / 20)
    frontier = told.frontier.set_index("policy")
    assert frontier.loc["oracle"].tolist() == [told.accuracy, told.tokens]
    assert frontier.loc["random mix", "accuracy"] == pytest.approx(0.6 + 0.4 * 0.4)
    assert "adaswitch" in str(told)


def test_a_policy_beats_a_random_mix_where_scores_tell_difficulty(states_probe):
    gains = []
    for seed in range(20):
        s, correct, tokens = simulated(seed, n=400)
        switch = fitted(states_probe, s[:200], correct[:200], tokens[:200], 20.0)
        told = replay(switch, log_of(s[200:], correct[200:], tokens[200:]))
        gains.append(told.accuracy - told.frontier.set_index("policy").loc["random mix", "accuracy"])
    assert np.mean(gains) > 0.02


def test_without_a_log_the_hardest_share_goes_higher(states_probe):
    levels = [Effort("low", tokens=10), Effort("mid", tokens=30), Effort("high", tokens=100)]
    switch = AdaSwitch(states_probe, levels, budget_tokens=20)
    pool = states_probe.pool_scores_
    assert switch.choose(np.sort(pool)).tolist() == ["low"] * 4 + ["mid"] * 4
    assert set(AdaSwitch(states_probe, levels, budget_tokens=30).choose(pool)) == {"mid"}
    assert set(AdaSwitch(states_probe, levels, budget_tokens=500).choose(pool)) == {"high"}


def test_curves_that_rise_are_reported(states_probe):
    s = np.arange(20.0)
    correct = np.stack([s > 10, np.ones(20)], axis=1).astype(float)
    with pytest.warns(UserWarning, match="'l0' is more often right"):
        fitted(states_probe, s, correct, np.tile([1.0, 2.0], (20, 1)), 1.5)


def test_generation_goes_on_from_the_probes_cache(text_probe):
    model, tokenizer = text_probe.model, text_probe.tokenizer
    switch = AdaSwitch(text_probe, [Effort("a", 6), Effort("b", 12)], budget_tokens=6)
    for prompt in ("w40 w41 w2", "w33 w9"):
        answer = switch.generate(prompt)
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        plain = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
        assert answer.text == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
        assert answer.score == pytest.approx(float(text_probe.predict([prompt])[0]), abs=1e-4)
        assert answer.level == "a"
        assert 1 <= answer.tokens <= 6


def test_efforts_differ_in_instruction_and_in_answers_drawn(text_probe):
    model, tokenizer = text_probe.model, text_probe.tokenizer
    levels = [Effort("plain", 4), Effort("told", 5, system="w50 w51"), Effort("vote", 4, num_return_sequences=3)]
    for budget, name in ((4, "plain"), (5, "told"), (12, "vote")):
        answer = AdaSwitch(text_probe, levels, budget_tokens=budget).generate("w40 w9", seed=3)
        assert answer.level == name
        if name == "told":
            ids = tokenizer("w50 w51 w40 w9", return_tensors="pt").input_ids
            plain = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=1)
            assert answer.text == tokenizer.decode(plain[0, 4:], skip_special_tokens=True)
        if name == "vote":
            assert len(answer.texts) == 3
            assert answer.text in answer.texts
            again = AdaSwitch(text_probe, levels, budget_tokens=budget).generate("w40 w9", seed=3)
            assert again == answer


def test_an_unsure_answer_goes_one_level_up(text_probe):
    levels = [Effort("a", 3), Effort("b", 5), Effort("c", 7)]
    state = torch.random.get_rng_state()
    sure = AdaSwitch(text_probe, levels, budget_tokens=3, escalate=-1e9).generate("w40 w2")
    unsure = AdaSwitch(text_probe, levels, budget_tokens=3, escalate=0.0).generate("w40 w2")
    assert (sure.level, sure.escalated) == ("a", False)
    assert (unsure.level, unsure.escalated) == ("b", True)
    assert unsure.tokens > sure.tokens
    assert torch.equal(state, torch.random.get_rng_state())


def test_bad_logs_levels_and_budgets_are_refused(states_probe):
    s, correct, tokens = simulated(0, n=30)
    good = log_of(s, correct, tokens)
    two = [Effort("l0"), Effort("l1")]
    generous = AdaSwitch(states_probe, two, budget_tokens=99)
    blind = AdaSwitch(states_probe, [Effort("a", tokens=1), Effort("b", tokens=2)], budget_tokens=1)
    for call, word in (
        (lambda: AdaSwitch(states_probe, two[:1], budget_tokens=1), "two efforts"),
        (lambda: AdaSwitch(states_probe, [two[0], two[0]], budget_tokens=1), "different names"),
        (lambda: AdaSwitch(states_probe, two, budget_tokens=9).fit(good), "below the cheapest"),
        (lambda: AdaSwitch(states_probe, two[::-1], budget_tokens=99).fit(good), "cheapest up"),
        (lambda: generous.choose([0.0]), "cheapest up"),
        (lambda: generous.fit(good[good["level"] == "l0"]), "no answer at level 'l1'"),
        (lambda: generous.fit(good.iloc[1:]), "every level"),
        (lambda: generous.fit(good.drop(columns="tokens")), "no column 'tokens'"),
        (lambda: generous.fit(good.assign(tokens=0)), "must be positive"),
        (lambda: generous.fit(good.assign(correct="yes")), "row 0 is 'yes'"),
        (lambda: generous.fit(good.assign(level="x")), "no level 'x'"),
        (lambda: generous.fit(good).choose([np.nan]), "not finite"),
        (lambda: blind.generate("x"), "no model"),
        (lambda: AdaSwitch(states_probe, two, budget_tokens=float("nan")), "budget_tokens=nan"),
        (lambda: generous.fit(None), "DataFrame"),
        (lambda: generous.fit(good.assign(prompt=None)), "row 0 has no prompt"),
        (lambda: Effort("a", max_new_tokens=0), "at least 1"),
        (lambda: Effort("a", num_return_sequences=True), "whole numbers"),
        (lambda: Effort(""), "give a text"),
        (lambda: Effort("a", tokens=-1), "positive"),
    ):
        with pytest.raises(FairtrialError, match=word):
            call()


def test_mixes_oracles_and_frontiers():
    assert mixed([1, 2, 4], [0.0, 0.1, 0.9], 2) == pytest.approx(0.3)
    assert mixed([1, 2, 4], [0.5, 0.1, 0.2], 3) == 0.5
    correct = np.array([[0, 1], [0, 0], [1, 1], [0, 1]], float)
    tokens = np.array([[1, 5], [1, 5], [1, 5], [1, 3]], float)
    assert oracle(correct, tokens, 10) == (0.75, 2.5)
    assert oracle(correct, tokens, 1.5) == (0.5, 1.5)
    assert cost_at([1, 2, 3], [0.2, 0.6, 0.5], 0.4) == 1.5
    assert cost_at([1, 2], [0.2, 0.6], 0.1) == 1
    assert cost_at([1, 2], [0.2, 0.6], 0.7) == np.inf


def test_samples_of_the_evaluation_harness_become_a_log(tmp_path):
    file = tmp_path / "samples.jsonl"
    rows = [
        {"arguments": {"gen_args_0": {"arg_0": "2 + 2 ="}}, "exact_match": 1.0},
        {"arguments": [["3 + 3 =", "6"]], "acc": 0.0, "tokens": 7},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    log = read_samples(file, level="direct", tokens=3)
    assert log.to_dict("list") == {
        "prompt": ["2 + 2 =", "3 + 3 ="], "level": ["direct"] * 2, "correct": [1.0, 0.0], "tokens": [3, 7],
    }  # fmt: skip
    for text, word in (('{"acc": 1}', "line 1"), ("", "no sample")):
        file.write_text(text)
        with pytest.raises(InputError, match=word):
            read_samples(file, level="direct", tokens=3)


def test_references_are_not_their_own_test(text_probe):
    log = pd.DataFrame(
        [{"prompt": p, "level": level, "correct": 1.0, "tokens": cost}
         for p in (EASY[0], "w40 w2", "w41 w9") for level, cost in (("a", 1), ("b", 2))]
    )  # fmt: skip
    with pytest.warns(UserWarning, match="1 prompts of the log"):
        AdaSwitch(text_probe, [Effort("a"), Effort("b")], budget_tokens=2).fit(log)
