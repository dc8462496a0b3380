"""The exact condition, the attention identity, answer vectors."""

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.causal_lm.layout import block_layouts
from fairtrial.causal_lm.likelihood import next_token_log_probs
from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError
from fairtrial.lm.context import attention_to, corrections, tempered_logits
from fairtrial.lm.context.answers import answer_vectors, first_tokens, joined, normalised, softmax
from fairtrial.lm.context.attention import split_attention
from fairtrial.lm.context.meter import context_span


@given(st.integers(0, 500))
def test_the_error_changes_as_the_law_says(seed):
    rng = np.random.default_rng(seed)
    y0, truth, y = rng.standard_normal(5), rng.standard_normal(5), rng.standard_normal((20, 5))
    found = corrections(y0, y, truth)
    change = found.error_before * (found.rho**2 - 2 * found.rho * found.cos)
    np.testing.assert_allclose(found.error_after - found.error_before, change, atol=1e-6)
    np.testing.assert_array_equal(found.harmful, found.error_after >= found.error_before)
    assert (found.efficiency <= found.cos**2 + 1e-9).all()
    helps = (found.rho > 0) & (found.rho < 2 * found.cos)
    np.testing.assert_array_equal(helps, found.error_after < found.error_before)


def test_verdicts_along_the_way_back():
    y0, truth = np.array([0.7, 0.3]), np.array([1.0, 0.0])
    e0 = y0 - truth
    steps = np.array([0, 0.5, 1, 1.2, 1.5, 2, 3, -0.5])
    found = corrections(y0, y0 - steps[:, None] * e0, truth)
    assert found.verdict.tolist() == ["UNDER", "UNDER", "PROPER", "PROPER", "OVERSHOOT", "OVER", "OVER", "MISDIRECTED"]
    assert np.isnan(found.cos[0])
    assert found.rho[0] == 0
    np.testing.assert_allclose(found.rho[1:], np.abs(steps[1:]))
    assert found.efficiency[2] == pytest.approx(1)
    assert found.error_after[5] == pytest.approx(found.error_before[5])


def test_an_answer_that_is_right_already_can_only_be_harmed():
    found = corrections([1.0, 0.0], [[0.5, 0.5], [1.0, 0.0]], [1.0, 0.0])
    assert found.verdict.tolist() == ["MISDIRECTED", "UNDER"]
    np.testing.assert_array_equal(found.efficiency, [-np.inf, 0])
    np.testing.assert_array_equal(found.rho, [np.inf, 0])


def test_bad_answer_vectors_are_refused():
    for before, after, truth, tau in (
        (np.ones(2), np.ones(2), np.ones(2), 0.25),
        (np.ones(2), np.ones((1, 2)), np.ones(2), float("nan")),
        (np.ones(2) + 1j, np.ones((1, 2)), np.ones(2), 0.25),
        (np.ones(2), [["a", "b"]], np.ones(2), 0.25),
        (np.ones(3), np.ones((1, 2)), np.ones(2), 0.25),
        (np.ones(2), np.full((1, 2), np.nan), np.ones(2), 0.25),
        (np.ones(2), np.ones((1, 2)), np.ones(2), 1.0),
    ):
        with pytest.raises(InputError):
            corrections(before, after, truth, tau=tau)


@given(st.integers(0, 200), st.floats(0.05, 20))
def test_attention_splits_into_context_and_query(seed, g):
    rng = torch.Generator().manual_seed(seed)
    H, T, e = 3, 9, 4
    q, k, v = (torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((H, e), (H, T, e), (H, T, e)))
    context = torch.arange(T) < 5
    scores = torch.einsum("he,hte->ht", q, k) * 0.5
    whole = torch.einsum("ht,hte->he", scores.softmax(1), v)
    pi, inside, outside = split_attention(q, k, v, context, scale=0.5)
    torch.testing.assert_close((1 - pi)[:, None] * outside + pi[:, None] * inside, whole, atol=1e-12, rtol=0)
    tempered, _, _ = split_attention(q, k, v, context, scale=0.5, temper=g)
    torch.testing.assert_close(tempered, g * pi / (1 - pi + g * pi), atol=1e-12, rtol=0)


def dense_attention(model, ids, start, stop):
    """Mass and complementarity by whole attention maps, and values read where each block computes them."""
    layouts = block_layouts(model)
    shape = layouts[0].attention
    values = {}
    hooks = [
        layout.attention.v.module.register_forward_hook(
            lambda module, args, out, layout=layout: values.update(
                {layout.name: out[0] if layout.attention.v.rows is None else out[0][:, layout.attention.v.rows]}
            )
        )
        for layout in layouts
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(torch.tensor([ids]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    masses, sizes = [], []
    for layout, layer in list(zip(layouts, maps, strict=True))[len(maps) // 4 : 3 * len(maps) // 4]:
        W = layout.attention.o.weight.view(-1, shape.n_heads, shape.head_dim)
        for h in range(shape.n_heads):
            p = layer[0, h, -1]
            v = values[layout.name].view(len(ids), shape.n_kv_heads, -1)[:, h * shape.n_kv_heads // shape.n_heads]
            pi, whole, part = p[start:stop].sum(), p @ v, p[start:stop] @ v[start:stop]
            masses.append(pi)
            sizes.append((W[:, h] @ (part / pi - (whole - part) / (1 - pi))).norm())
    return float(torch.stack(masses).mean()), float(torch.stack(sizes).mean())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen2", {}), ("gpt2", {}), ("phi", {}), ("mistral", {"sliding_window": 6}), ("gemma2", {})],
)
def test_attention_is_what_whole_maps_say(family, changes, eager):
    if family == "gemma2":  # scores with a bound, which it attends to eagerly only
        changes = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model, ids, span = tiny_models.build(family, layers=4, **changes), [5, 6, 7, 8, 9, 10, 11], (0, 4)
    if eager:
        model.set_attn_implementation("eager")
    found, logits = attention_to(model, ids, span)
    with torch.no_grad():
        plain = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
    assert torch.equal(logits, plain)  # a temper of 1 changes no bit
    mass, complementarity = dense_attention(model, ids, *span)
    assert found.mass == pytest.approx(mass, abs=1e-5)
    assert found.complementarity == pytest.approx(complementarity, rel=1e-4)
    down, up = (attention_to(model, ids, span, temper=g)[0].mass for g in (0.1, 10.0))
    assert down < found.mass < up
    torch.testing.assert_close(tempered_logits(model, ids, span, 1 + 1e-9), plain, atol=1e-5, rtol=1e-4)


def test_a_context_beyond_a_layers_window_corrects_nothing_there():
    found, _ = attention_to(tiny_models.build("mistral", sliding_window=2), [5, 6, 7, 8, 9, 10], (0, 3))
    assert (found.mass, found.complementarity) == (0, 0)


def test_a_context_that_is_turned_off_is_as_if_masked():
    model, _ = tiny_causal_lm(layers=3)
    ids, span = [5, 6, 7, 8, 9, 10], (0, 3)
    off = tempered_logits(model, ids, span, 1e-30)
    mask = torch.full((6, 6), float("-inf")).triu(1)
    mask[3:, :3] = float("-inf")
    with torch.no_grad():
        masked = model(torch.tensor([ids]), attention_mask=mask[None, None]).logits[0, -1]
    torch.testing.assert_close(off, masked, atol=1e-5, rtol=1e-4)
    for context, temper, word in (
        ((0, 0), 1.0, "end of the context=0"),
        ((0, 6), 1.0, "give a part"),
        ((4, 9), 1.0, "end of the context=9"),
        ((0.5, 2), 1.0, "start of the context=0.5"),
        ((0, 3), 0.0, "temper=0"),
        ((0, 3), float("inf"), "temper=inf"),
    ):
        with pytest.raises(InputError, match=word):
            attention_to(model, ids, context, temper=temper)
    with pytest.raises(InputError, match="another tokenizer"):
        attention_to(model, [5, 600], (0, 1))


def test_the_contexts_tokens_are_found():
    _, tokenizer = tiny_causal_lm()
    ids, span = context_span(tokenizer, "w4 w5", "w7 w8 w9")
    assert ids[span[0] : span[1]] == [7, 8, 9]
    tokenizer.chat_template = "w7 w8 {{ messages[0]['content'] }} w3"  # which holds the context's words itself
    ids, span = context_span(tokenizer, "w4 w5", " w7 w8")
    assert (ids, span) == ([7, 8, 7, 8, 4, 5, 3], (2, 4))


def test_answers_by_first_token_and_by_whole_choices():
    model, tokenizer = tiny_causal_lm()
    prompts = ["w4 w5", "w9 w2 w7"]
    y = answer_vectors(model, tokenizer, prompts, ["w7", "w8 w3", "w9"])
    log_p = next_token_log_probs(model, [tokenizer(p)["input_ids"] for p in prompts])[:, [7, 8, 9]]
    np.testing.assert_allclose(y, log_p.double().softmax(1).numpy(), atol=1e-6)
    np.testing.assert_allclose(y.sum(1), 1)
    again = answer_vectors(model, tokenizer, prompts, ["w9", "w7", "w8 w3"])
    np.testing.assert_allclose(again, y[:, [2, 0, 1]], atol=1e-6)
    alone = np.concatenate([answer_vectors(model, tokenizer, [p], ["w7", "w8 w3", "w9"]) for p in prompts])
    np.testing.assert_allclose(alone, y, atol=1e-4)
    assert first_tokens(tokenizer, ["w7 w8", "w7 w9"]) is None
    collided = answer_vectors(model, tokenizer, prompts, ["w7 w8", "w7 w9"])
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("w4 w5 w7")["input_ids"]])).logits[0, -1].log_softmax(-1)
    np.testing.assert_allclose(collided[0], softmax(logits[None, [8, 9]].double().numpy() / 2)[0], atol=1e-5)


def test_choices_that_are_none_are_refused():
    model, tokenizer = tiny_causal_lm()
    for choices, word in (
        (["w7"], "at least two"),
        ("w7 w8", "at least two"),
        (["w7", " "], "at least two"),
        (["w7.", "W7"], "the same"),
        (7, "at least two"),
        (["never", "seen"], "the same to the tokenizer"),
    ):
        with pytest.raises(InputError, match=word):
            answer_vectors(model, tokenizer, ["w4"], choices)
    with pytest.raises(InputError, match="prompt 1 has 600 tokens"):
        answer_vectors(model, tokenizer, ["w4", " ".join(["w4"] * 600)], ["w7", "w8"])
    for one, other in (("-5", "5"), ("1.5", "15"), ("C++", "C#"), ("+", "-"), ("?", "!")):
        assert normalised(one) != normalised(other)
    y = answer_vectors(model, tokenizer, ["w4"], ["w7", "w8"], start="w3 w5")
    np.testing.assert_array_equal(answer_vectors(model, tokenizer, ["w4"], ["w7", "w8"], start="w3 w5 "), y)
    with pytest.raises(InputError, match="start=None"):
        answer_vectors(model, tokenizer, ["w4"], ["w7", "w8"], start=None)
    assert joined("q", None) == "q"
    scores = np.log([[0.1, 0.2, 0.7]])
    np.testing.assert_allclose(softmax(scores + 3), softmax(scores))
    uniform = np.full((1, 5), 0.2)
    assert corrections(uniform[0], uniform, np.eye(5)[0]).error_before[0] == pytest.approx(1 - 1 / 5)
