import numpy as np
import pytest
import torch

from fairtrial.causal_lm.hidden import hidden_states
from fairtrial.causal_lm.layout import ChainSpec
from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.steering import AnchorSpace, CanonicalDirection, contrastive_direction
from fairtrial.lm.steering.states import layer_at, text_states

POSITIVE, NEGATIVE = ["w2 w7 w9", "w3 w7 w8"], ["w2 w5 w9", "w3 w5 w8"]


@pytest.fixture(scope="module")
def turned():
    """Anchors' states in three models that are rotations of one, with 5 % of noise each."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(50, 16, generator=g, dtype=torch.float64)
    turns = [torch.linalg.qr(torch.randn(16, 16, generator=g, dtype=torch.float64))[0] for _ in range(3)]
    return X, [(X + 0.05 * torch.randn(X.shape, generator=g, dtype=X.dtype)) @ turn for turn in turns], turns


def space_of(states, **how):
    space = AnchorSpace([f"anchor {i}" for i in range(len(states[0]))], **how)
    for name, X in zip("abc", states, strict=False):
        space.add_states(name, X)
    return space


def test_a_direction_is_carried_to_a_model_that_never_saw_a_label(turned):
    X, states, turns = turned
    r = X[0] - X[1]
    space = space_of(states)
    for name, turn in zip("ab", turns, strict=False):
        space.add_direction(name, "axis", r @ turn)
    canonical = space.canonical("axis")
    found = canonical.reconstruct("c", ridge=1e-3).vector
    assert float(found @ (r @ turns[2]) / r.norm()) > 0.95
    assert canonical.alignment.loc["a", "b"] > 0.98
    assert (canonical.leave_one_out > 0.98).all()


def test_one_source_is_its_own_mean_and_swapping_the_sides_flips_the_sign(turned):
    X, states, _ = turned
    space = space_of(states)
    space.add_direction("a", "axis", X[0] - X[1])
    space.add_direction("a", "swapped", X[1] - X[0])
    c = space.canonical("axis").coordinates
    torch.testing.assert_close(c, space.member("a").frame.of_direction(X[0] - X[1]))
    torch.testing.assert_close(space.canonical("swapped").coordinates, -c)
    assert space.canonical("axis").leave_one_out.isna().all()


def test_permuting_anchors_in_all_models_changes_nothing_in_one_model_everything(turned):
    X, states, turns = turned
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    r = X[0] - X[1]

    def carried(permuted):
        space = AnchorSpace([f"anchor {i}" for i in range(50)])
        for name, states_, shuffled in zip("ab", states, permuted, strict=False):
            space.add_states(name, states_[order] if shuffled else states_)
        space.add_direction("a", "axis", r @ turns[0])
        space.add_direction("b", "axis", r @ turns[1])
        return space.canonical("axis", ["a"]).reconstruct("b").vector, space.canonical("axis").alignment.loc["a", "b"]

    plain, both, one = carried((False, False)), carried((True, True)), carried((False, True))
    torch.testing.assert_close(plain[0], both[0], atol=1e-9, rtol=0)
    assert plain[1] == pytest.approx(both[1], abs=1e-9)
    assert abs(one[1]) < 3 / 50**0.5


def test_the_ridge_is_chosen_without_the_target(turned):
    X, states, turns = turned
    space = space_of(states[:2])
    space.add_direction("a", "axis", (X[0] - X[1]) @ turns[0])
    canonical = space.canonical("axis")
    frame = space.member("a").frame
    best = min((0.01, 1.0, 100.0), key=lambda ridge: frame.held_out_error(canonical.coordinates, ridge=ridge))
    assert canonical.choose_ridge((0.01, 1.0, 100.0)) == best


def test_a_model_is_read_at_its_relative_depth(tiny, anchors):
    model, tokenizer = tiny
    assert [layer_at(model, depth) for depth in (0.01, 0.25, 0.6, 1)] == [0, 0, 1, 3]
    space = AnchorSpace(anchors)
    space.add("m", model, tokenizer, pooling="last")
    ids = tokenizer(anchors)["input_ids"]
    torch.testing.assert_close(space.member("m").states, hidden_states(model, ids, [1])[:, 0])


def test_automatic_depth_finds_the_layer_it_was_given(tiny, anchors):
    model, tokenizer = tiny
    for layer in (1, 3):
        space = AnchorSpace(anchors)
        space.add_states("elsewhere", text_states(model, tokenizer, anchors, [layer])[:, 0] * 3 + 1)
        space.add("m", model, tokenizer, depth="auto")
        assert space.member("m").layer == layer


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_padding_and_batches_do_not_change_pooled_states(tiny, pooling):
    model, tokenizer = tiny
    texts = ["w2 w3", "w4 w5 w6 w7 w8 w9 w2", "w9 w8 w7"]
    together = text_states(model, tokenizer, texts, [0, 3], pooling=pooling)
    alone = torch.cat([text_states(model, tokenizer, [text], [0, 3], pooling=pooling) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_a_chat_model_is_read_after_the_header_of_the_assistants_turn(tiny):
    model, tokenizer = tiny
    chat = tiny_causal_lm(layers=4)[1]
    chat.chat_template = (
        "{% for m in messages %}w2 {{ m.content }}{% endfor %}{% if add_generation_prompt %} w3{% endif %}"
    )
    torch.testing.assert_close(
        text_states(model, chat, ["w9 w8"], [1]), text_states(model, tokenizer, ["w2 w9 w8 w3"], [1])
    )


def test_an_encoder_joins_with_the_path_of_its_blocks(tiny, anchors):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    encoder = BertModel(
        BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24)
    ).eval()
    spec = ChainSpec("encoder.layer", None, ())
    space = AnchorSpace(anchors)
    space.add("decoder", *tiny)
    space.add("encoder", encoder, tiny[1], spec=spec)
    space.add_direction("encoder", "axis", contrastive_direction(encoder, tiny[1], POSITIVE, NEGATIVE, spec=spec))
    assert space.member("encoder").pooling == "mean"
    direction = space.canonical("axis").reconstruct("decoder")
    assert direction.score(["w2 w3", "w4 w5"]).shape == (2,)
    with pytest.raises(InputError, match="does not generate"), direction.steer(encoder):
        pass


def test_a_direction_of_another_place_is_refused(tiny, anchors):
    space = AnchorSpace(anchors)
    space.add("m", *tiny)
    for how in ({"depth": 1}, {"pooling": "mean"}):
        with pytest.raises(InputError, match="find both at one place"):
            space.add_direction("m", "axis", contrastive_direction(*tiny, POSITIVE, NEGATIVE, **how))


def test_a_principal_component_points_where_the_mean_does(tiny):
    model, tokenizer = tiny
    mean, first = (contrastive_direction(model, tokenizer, POSITIVE, NEGATIVE, method=m) for m in ("mean", "pca"))
    assert float(mean.vector @ first.vector) > 0
    states = text_states(model, tokenizer, POSITIVE + NEGATIVE, [1])[:, 0].double()
    differences = states[:2] - states[2:]
    assert float((differences @ first.vector).square().sum()) == pytest.approx(
        float(torch.linalg.matrix_norm(differences, 2) ** 2)
    )


def test_a_canonical_direction_is_saved_with_its_anchors(tmp_path, tiny, anchors):
    space = AnchorSpace(anchors, remove_pcs=2)
    space.add("m", *tiny)
    space.add_direction("m", "axis", contrastive_direction(*tiny, POSITIVE, NEGATIVE))
    canonical = space.canonical("axis")
    canonical.save(tmp_path / "c.safetensors")
    loaded = CanonicalDirection.load(tmp_path / "c.safetensors", anchors)
    loaded.space.add("again", *tiny)
    torch.testing.assert_close(loaded.reconstruct("again").vector, canonical.reconstruct("m").vector)
    with pytest.raises(InputError, match="other anchors"):
        CanonicalDirection.load(tmp_path / "c.safetensors", anchors[::-1])
    with pytest.raises(InputError, match="safetensors"):
        canonical.save(tmp_path / "c.npz")
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="not a readable"):
        CanonicalDirection.load(tmp_path / "broken.safetensors", anchors)


def test_bad_inputs_are_refused(tiny, anchors):
    model, tokenizer = tiny
    space = AnchorSpace(anchors)
    space.add("m", model, tokenizer)
    for call, error, word in (
        (lambda: AnchorSpace(anchors[:7]), InputError, "at least 8"),
        (lambda: AnchorSpace([*anchors, anchors[3]]), InputError, "3 and 40"),
        (lambda: AnchorSpace("text"), InputError, "list"),
        (lambda: space.add("n", model, tokenizer, layer=4), InputError, "no layer 4"),
        (lambda: space.add("n", model, tokenizer, depth=0), InputError, "depth"),
        (lambda: space.add("n", model, tokenizer, pooling="first"), UnknownNameError, "pooling"),
        (lambda: AnchorSpace(anchors).add("n", model, tokenizer, depth="auto"), InputError, "auto"),
        (lambda: space.add_states("n", np.zeros((39, 4))), InputError, "for the 40 anchors"),
        (lambda: space.add_direction("x", "axis", torch.ones(32)), UnknownNameError, "model"),
        (lambda: space.add_direction("m", "axis", torch.ones(31)), InputError, "32 dimensions"),
        (lambda: space.canonical("axis"), UnknownNameError, "axis"),
        (lambda: contrastive_direction(model, tokenizer, POSITIVE, NEGATIVE[:1]), InputError, "pairs"),
        (lambda: contrastive_direction(model, tokenizer, POSITIVE, POSITIVE), InputError, "no direction"),
        (lambda: contrastive_direction(model, tokenizer, POSITIVE, NEGATIVE, method="x"), UnknownNameError, "method"),
        (lambda: text_states(model, tokenizer, ["w2", " "], [0]), InputError, "text 1"),
    ):
        with pytest.raises(error, match=word):
            call()
    space.add_direction("m", "axis", torch.ones(32))
    with pytest.raises(UnknownNameError, match="source"):
        space.canonical("axis", ["n"])
