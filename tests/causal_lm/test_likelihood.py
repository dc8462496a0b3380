from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fairtrial.causal_lm.batching import length_batches
from fairtrial.causal_lm.likelihood import (
    choice_scores,
    mean_nll,
    next_token_log_probs,
    perplexity,
    token_log_likelihoods,
)
from fairtrial.errors import InputError


def texts(seed: int, lengths: list[int], vocabulary: int = 300) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocabulary, (length,), generator=draw).tolist() for length in lengths]


def one_by_one(model, ids: list[int]) -> torch.Tensor:
    """log p of every token given those before it, (T - 1,), of one text alone, without any of our batching."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return F.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].float()


def test_batched_equals_single_scoring(model):
    ids = texts(0, [9, 2, 5, 9, 13, 4])
    for batch_tokens in (None, 20, 1):
        found = token_log_likelihoods(model, ids, batch_tokens=batch_tokens)
        for row, text in zip(found, ids, strict=True):
            torch.testing.assert_close(row, one_by_one(model, text), rtol=0, atol=1e-4)


def test_mean_nll_is_the_mean_over_tokens_and_perplexity_its_exponential(llama):
    ids = texts(1, [3, 8, 20])
    tokens = torch.cat([one_by_one(llama, text) for text in ids])
    assert mean_nll(llama, ids) == pytest.approx(-tokens.mean().item(), rel=1e-6)
    assert perplexity(llama, ids) == pytest.approx(math.exp(-tokens.mean().item()), rel=1e-5)


def test_a_tensor_of_windows_is_a_list_of_rows(llama, ids):
    rows = token_log_likelihoods(llama, ids)
    assert torch.equal(torch.stack(rows), torch.stack(token_log_likelihoods(llama, ids.tolist())))


def test_probabilities_of_all_next_tokens_sum_to_one_and_agree_with_the_likelihoods(model):
    ids = texts(2, [1, 6, 3, 11])
    found = next_token_log_probs(model, ids)
    assert found.shape == (4, 300)
    torch.testing.assert_close(found.exp().sum(1), torch.ones(4))
    for row, text in zip(found, ids, strict=True):
        for token in (2, 77):
            torch.testing.assert_close(row[token], one_by_one(model, [*text, token])[-1], rtol=0, atol=1e-4)


def test_softmax_is_taken_in_float32_for_half_precision_models(llama):
    rows = token_log_likelihoods(llama.bfloat16(), texts(3, [6, 4]))
    assert all(row.dtype == torch.float32 for row in rows)


def test_results_are_ordinary_tensors(llama, tokenizer):
    results = [*token_log_likelihoods(llama, texts(3, [6])), next_token_log_probs(llama, texts(3, [6]))]
    results.append(choice_scores(llama, tokenizer, ["ab"], [["c"]])[0].total)
    assert not any(result.is_inference() or result.requires_grad for result in results)


def test_the_model_is_evaluated_and_left_training(tiny):
    model = tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    ids = texts(4, [8])
    assert mean_nll(model, ids) == mean_nll(model, ids)
    assert model.training


# ---------------------------------------------------------------- choices

CONTEXTS = ["abc def", "abc", "hij def gg", "j"]
CHOICES = [[" ab", " abc def", "c"], [" j"], ["f", " f", "ff gh", " hhh"], [" a", "a"]]


def test_choices_score_as_whole_texts_do(model, tokenizer):
    for batch_tokens in (None, 12):
        found = choice_scores(model, tokenizer, CONTEXTS, CHOICES, batch_tokens=batch_tokens)
        for context, options, scores in zip(CONTEXTS, CHOICES, found, strict=True):
            wholes = [tokenizer(context + option)["input_ids"] for option in options]
            alone = tokenizer(context)["input_ids"]
            # Tokens common to the context and all wholes, by brute force.
            shared = max(
                (k for k in range(1, len(alone) + 1) if all(whole[:k] == alone[:k] for whole in wholes)), default=0
            )
            assert scores.n_tokens.tolist() == [len(whole) - shared for whole in wholes]
            expected = torch.stack([one_by_one(model, whole)[shared - 1 :].sum() for whole in wholes])
            torch.testing.assert_close(scores.total, expected, rtol=0, atol=1e-4)
            torch.testing.assert_close(scores.mean, expected / scores.n_tokens, rtol=0, atol=1e-4)


def test_permuting_choices_permutes_their_scores(llama, tokenizer):
    forward, backward = (
        choice_scores(llama, tokenizer, CONTEXTS[:1], [c])[0].total for c in (CHOICES[0], CHOICES[0][::-1])
    )
    torch.testing.assert_close(forward, backward.flip(0))


def test_a_choice_that_merges_with_its_context_is_scored_on_the_same_ground(llama, tokenizer):
    """Where "ab" is one token, "a" + "b" must not be read as the token "a" and then "b"."""
    merged = next(t for t in tokenizer.get_vocab() if len(t) == 2 and t.isalpha())
    (scores,) = choice_scores(llama, tokenizer, ["j j " + merged[0]], [[merged[1], " j"]])
    whole = [tokenizer("j j " + merged[0] + option)["input_ids"] for option in (merged[1], " j")]
    shared = [len(row) - n for row, n in zip(whole, scores.n_tokens.tolist(), strict=True)]
    assert shared[0] == shared[1] == sum(a == b for a, b in zip(*whole, strict=False))


def test_a_shared_context_is_read_once(llama, tokenizer):
    tokens = []
    llama.model.register_forward_pre_hook(lambda m, a, kw: tokens.append(kw["input_ids"].numel()), with_kwargs=True)
    context = "abc def ghij " * 4
    choices = [f" {a}{b}" for a in "abcdefghij" for b in "abcd"]
    choice_scores(llama, tokenizer, [context], [choices])
    assert sum(tokens) * 5 <= sum(len(tokenizer(context + c)["input_ids"]) for c in choices)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no text"),
        ([[3, 4], [5]], r"text 1 has shape \(1,\)"),
        ([[3, 4], [5, 300]], r"text 1 has token ids outside 0\.\.299"),
        ([[3, -1]], "text 0 has token ids outside"),
        ([[3] * 65], "text 0 has 65 tokens, the model's window is 64"),
        (None, "token ids=None"),
        ("3 4", "token ids='3 4'"),
        ([[3, 4], "w4"], "text 1 is 'w4'"),
        ([[3, 4], None], "text 1 is None"),
        ([[3, 4.5]], "text 0 has torch.float32"),
        ([[True, False]], "text 0 has torch.bool"),
    ],
)
def test_ids_the_model_cannot_take_name_the_text(llama, ids, message):
    with pytest.raises(InputError, match=message):
        mean_nll(llama, ids)


def test_likelihoods_that_are_not_finite_name_the_text(llama, tokenizer):
    llama.get_input_embeddings().weight.data[7] = torch.nan
    with pytest.raises(InputError, match="text 1 is not finite"):
        mean_nll(llama, [[3, 4], [7, 5], [4, 4]])
    with pytest.raises(InputError, match="text 0 is not finite"):
        next_token_log_probs(llama, [[7, 5]])


@pytest.mark.parametrize(
    ("contexts", "choices", "message"),
    [
        (["a"], [], "1 contexts and 0 lists"),
        (["a", "b"], [["c"], []], "context 1 has no choices"),
        (["a"], [["c", ""]], "context 0 has an empty choice"),
        ([""], [["c", "d"]], "context 0 has no token before its choices"),
        (["a b c d " * 20], [["e"]], "the model's window is 64"),
    ],
)
def test_choices_that_cannot_be_scored_are_refused(llama, tokenizer, contexts, choices, message):
    with pytest.raises(InputError, match=message):
        choice_scores(llama, tokenizer, contexts, choices)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_batches_hold_every_text_once_within_the_budget(lengths, budget):
    batches = list(length_batches(lengths, budget))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
