import sys

import pytest
import tiny_models
import torch

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import FairtrialError, InputError, MissingExtraError
from fairtrial.lm.steering import (
    AnchorSpace,
    Direction,
    contrastive_direction,
    read_control_vector,
    score_axes,
    write_control_vector,
)

POSITIVE, NEGATIVE = ["w2 w7 w9", "w3 w7 w8"], ["w2 w5 w9", "w3 w5 w8"]
IDS = torch.tensor([[3, 9, 12, 4], [8, 2, 2, 5]])


@pytest.fixture(scope="module")
def direction(tiny, anchors):
    space = AnchorSpace(anchors)
    space.add("m", *tiny)
    space.add_direction("m", "axis", contrastive_direction(*tiny, POSITIVE, NEGATIVE))
    return space.canonical("axis").reconstruct("m")


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_scores_are_standardised_over_the_anchors_and_find_the_sides(direction, anchors):
    usual = direction.score(anchors)
    assert float(usual.mean()) == pytest.approx(0, abs=1e-5)
    assert float(usual.std()) == pytest.approx(1, abs=1e-5)
    assert float(direction.score(POSITIVE).min()) > float(direction.score(NEGATIVE).max())
    table = score_axes({"axis": direction, "other": direction}, POSITIVE)
    torch.testing.assert_close(torch.tensor(table["axis"]), direction.score(POSITIVE))


def test_steering_moves_states_by_a_share_of_their_length(direction, tiny):
    model, _ = tiny
    from fairtrial.causal_lm.hidden import token_hidden_states

    before = token_hidden_states(model, IDS, [direction.layer])[0][:, 0].double()
    with direction.steer(model, 0.3):
        after = token_hidden_states(model, IDS, [direction.layer])[0][:, 0].double()
    moved = (after - before) @ direction.vector
    torch.testing.assert_close(moved, torch.full_like(moved, 0.3 * direction.scale), atol=1e-4, rtol=0)
    with direction.steer(model, how="ablate"):
        ablated = token_hidden_states(model, IDS, [direction.layer])[0][:, 0].double()
    torch.testing.assert_close(ablated @ direction.vector, torch.zeros(4, dtype=torch.float64), atol=1e-5, rtol=0)


def test_no_strength_leaves_logits_bitwise_equal_and_nested_steers_add(direction, tiny):
    model, _ = tiny
    plain = logits(model)
    with direction.steer(model, 0):
        assert torch.equal(logits(model), plain)
    with direction.steer(model, 0.2), direction.steer(model, 0.1):
        twice = logits(model)
    with direction.steer(model, 0.3):
        torch.testing.assert_close(logits(model), twice, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(twice, plain, atol=1e-3)


def test_hooks_are_removed_when_the_body_raises(direction, tiny):
    model, _ = tiny
    plain = logits(model)
    with pytest.raises(RuntimeError, match="mine"), direction.steer(model, 1):
        raise RuntimeError("mine")
    assert torch.equal(logits(model), plain)


def test_steering_generated_tokens_leaves_the_prompt_alone(direction, tiny):
    model, _ = tiny
    with direction.steer(model, 1, generated_only=True):
        steered = logits(model)
        out = model.generate(IDS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(steered, logits(model))
    assert not torch.equal(out, model.generate(IDS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi"])
def test_any_known_family_can_be_steered(family):
    model, tokenizer = tiny_models.build(family, layers=3, vocab_size=64), tiny_causal_lm()[1]
    space = AnchorSpace([f"w{i} w{63 - i}" for i in range(2, 22)])
    space.add("m", model, tokenizer)
    space.add_direction("m", "axis", contrastive_direction(model, tokenizer, POSITIVE, NEGATIVE))
    found = space.canonical("axis").reconstruct("m")
    with found.steer(model, 0.5):
        steered = logits(model)
    assert not torch.allclose(steered, logits(model), atol=1e-4)


def test_a_direction_is_saved_and_read_back(tmp_path, direction, tiny):
    direction.save(tmp_path / "d.safetensors")
    again = Direction.load(tmp_path / "d.safetensors", *tiny)
    assert torch.equal(again.score(POSITIVE), direction.score(POSITIVE))
    assert (again.layer, again.scale, again.pooling) == (direction.layer, direction.scale, direction.pooling)
    with pytest.raises(InputError, match="knows no model"):
        Direction.load(tmp_path / "d.safetensors").score(POSITIVE)
    with pytest.raises(InputError, match="ends in"):
        direction.save(tmp_path / "d.bin")


def test_a_control_vector_round_trips_in_llama_cpps_layout(tmp_path, direction):
    import gguf

    direction.save(tmp_path / "d.gguf")
    fields = gguf.GGUFReader(tmp_path / "d.gguf").fields
    assert fields["general.architecture"].contents() == "controlvector"
    assert fields["controlvector.model_hint"].contents() == "llama"
    vectors = read_control_vector(tmp_path / "d.gguf")
    assert [*vectors] == [direction.layer]
    torch.testing.assert_close(vectors[direction.layer].double(), direction.vector * direction.scale, rtol=1e-6, atol=0)
    write_control_vector(tmp_path / "two.gguf", {1: torch.ones(4), 2: torch.zeros(4)})
    assert sorted(read_control_vector(tmp_path / "two.gguf")) == [1, 2]


def test_what_cannot_be_saved_steered_or_read_is_refused(tmp_path, direction, tiny, monkeypatch):
    from dataclasses import replace

    model, _ = tiny
    (tmp_path / "no.gguf").write_bytes(b"no vector at all")
    for call, word in (
        (lambda: replace(direction, layer=0).save(tmp_path / "x.gguf"), "from 1 on"),
        (lambda: read_control_vector(tmp_path / "no.gguf"), "not a readable GGUF"),
        (lambda: read_control_vector(tmp_path / "none.gguf"), "not a readable GGUF"),
        (lambda: replace(direction, layer=None).steer(model).__enter__(), "no layer"),
        (lambda: replace(direction, layer=9).steer(model).__enter__(), "another model"),
        (lambda: direction.steer(model, how="push").__enter__(), "no how"),
        (lambda: direction.score_states(torch.ones(2, 3)), "32"),
        (lambda: score_axes({"a": direction, "b": replace(direction, layer=2)}, POSITIVE), "one by one"),
    ):
        with pytest.raises(FairtrialError, match=word):
            call()
    with pytest.warns(UserWarning, match="strength=3"), direction.steer(model, 3):
        pass
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match="gguf"):
        read_control_vector(tmp_path / "no.gguf")
