"""Drafting is lossless: what comes out is what the target alone would have written."""

from types import SimpleNamespace

import pytest
import tiny_models
import torch
from scipy.stats import chisquare

from fairtrial.data.tiny import tiny_causal_lm, tiny_texts
from fairtrial.errors import InputError
from fairtrial.lm.drafting import (
    BlockDrafter,
    DPACELoss,
    DrafterTrainer,
    accepted_lengths,
    features_of,
    speculative_generate,
    write,
)
from fairtrial.lm.drafting.speculation import _accept
from fairtrial.lm.drafting.written import blocks_of, loops


@pytest.fixture(scope="module")
def tiny():
    model, tokenizer = tiny_causal_lm(layers=4)
    model.lm_head.weight.data.mul_(30)  # random logits are nearly equal: rounding would choose
    model.generation_config.eos_token_id = None
    return model, tokenizer


class Oracle:
    """Drafts what is known to come."""

    def __init__(self, sequence, V, block=4):
        self.sequence, self.token_ids = sequence, torch.arange(V)
        self.config = SimpleNamespace(layers=[], block_size=block, vocab_size=V)

    def draft(self, features, tokens):
        coming = self.sequence[len(tokens) : len(tokens) + self.config.block_size]
        logits = torch.zeros(self.config.block_size, len(self.token_ids))
        logits[torch.arange(len(coming)), coming] = 9.0
        return logits


def plain(model, ids, new, **how):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, **how
    )


def test_greedy_ids_are_those_of_generate_for_any_drafter(tiny):
    model, _ = tiny
    for prompt in ([[5, 7, 9]], [[3]], [[8] * 20]):
        ids = torch.tensor(prompt)
        whole = plain(model, ids, 21)
        torch.manual_seed(0)
        poor = [BlockDrafter.for_target(model, block_size=5, layers=layers) for layers in ([0, 2], [3])]
        for drafter in (*poor, Oracle(whole[0], 64), Oracle(whole[0].flip(0), 64)):
            out = speculative_generate(model, drafter, ids, max_new_tokens=21)
            assert torch.equal(out.sequences, whole)


def test_an_oracle_is_accepted_whole(tiny):
    model, _ = tiny
    ids = torch.tensor([[5, 7, 9]])
    whole = plain(model, ids, 21)
    out = speculative_generate(model, Oracle(whole[0], 64), ids, max_new_tokens=21)
    assert out.accepted_lengths == [4, 4, 4, 4]  # 1 + 4 x (4 + 1) tokens


def test_a_text_that_ends_stops_at_its_end(tiny):
    model, _ = tiny
    ids = torch.tensor([[5, 7, 9]])
    whole = plain(model, ids, 21)
    end = int(whole[0, 12])
    model.generation_config.eos_token_id = end
    try:
        stopped = plain(model, ids, 21, eos_token_id=end)
        for drafter in (Oracle(whole[0], 64), BlockDrafter.for_target(model, block_size=4)):
            assert torch.equal(speculative_generate(model, drafter, ids, max_new_tokens=21).sequences, stopped)
    finally:
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "phi"])
def test_other_families_decode_losslessly(family):
    model = tiny_models.build(family, layers=4, vocab_size=64, eos_token_id=None)
    ids = torch.tensor([[5, 7, 9]])
    whole = plain(model, ids, 13)
    for drafter in (BlockDrafter.for_target(model, block_size=3), Oracle(whole[0], 64)):
        assert torch.equal(speculative_generate(model, drafter, ids, max_new_tokens=13).sequences, whole)


@pytest.mark.parametrize("good", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sampled_tokens_have_the_targets_law(good):
    """Two tokens of a toy target over five, verified as one block; 4,000 of them."""
    assert law_of_pairs(good, 4_000) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("good", [False, True])
def test_many_sampled_tokens_have_the_targets_law(good):
    assert law_of_pairs(good, 20_000) > 1e-3


def law_of_pairs(good, n):
    """Return the p-value of a chi-square test of n sampled pairs against the target's law."""
    rng = torch.Generator().manual_seed(0)
    p1 = torch.rand(5, generator=rng, dtype=torch.float64).softmax(0)
    p2 = (2 * torch.rand(5, 5, generator=rng, dtype=torch.float64)).softmax(1)
    ids = torch.arange(5) if good else torch.tensor([0, 1, 3])
    q1 = p1 if good else torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    firsts = torch.multinomial(q1, n, replacement=True, generator=rng)
    second = torch.tensor([0.1, 0.1, 0.8], dtype=torch.float64)
    counts = torch.zeros(5, 5)
    for a in firsts:
        q2 = p2[a] if good else second
        picked = torch.stack([a, torch.multinomial(q2, 1, generator=rng)[0]])
        accepted, extra = _accept(torch.stack([p1, p2[ids[a]], p1]), torch.stack([q1, q2]), picked, ids, rng)
        if good:
            assert accepted == 2
        new = [*ids[picked[:accepted]].tolist(), int(extra)][:2]
        if len(new) < 2:  # the first was rejected: the second is the target's own
            new.append(int(torch.multinomial(p2[new[0]], 1, generator=rng)))
        counts[new[0], new[1]] += 1
    return chisquare(counts.flatten().numpy(), (n * p1[:, None] * p2).flatten().numpy()).pvalue


def test_sampling_runs_on_a_model_and_repeats_with_its_generator(tiny):
    model, _ = tiny
    drafter = BlockDrafter.for_target(model, block_size=3, draft_vocab=range(2, 30))
    how = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8}
    one, two, other = (
        speculative_generate(model, drafter, torch.tensor([[5, 7]]), generator=torch.Generator().manual_seed(s), **how)
        for s in (0, 0, 1)
    )
    assert torch.equal(one.sequences, two.sequences)
    assert not torch.equal(one.sequences, other.sequences)


def test_a_trained_drafter_is_accepted_more_and_decoding_agrees_with_the_count(tiny):
    model, tokenizer = tiny
    written = write(model, tokenizer, tiny_texts(documents=12, words=40), prompt_tokens=8, new_tokens=24)
    torch.manual_seed(0)
    drafter = BlockDrafter.for_target(model, block_size=4, context=16, draft_vocab=48)
    features = features_of(model, written, drafter.config.layers)
    trainer = DrafterTrainer(model, drafter, DPACELoss(), anchors=8, batch_size=4, lr=3e-3)
    trainer.fit_written(written, features, steps=1)  # chooses the vocabulary
    before = accepted_lengths(drafter, written, features)[0].float().mean()
    trainer.fit_written(written, features, steps=60)
    lengths, right = accepted_lengths(drafter, written, features)
    assert lengths.float().mean() > before + 0.5
    assert right.shape == (4,)
    assert trainer.history[-1].expected_length > trainer.history[0].expected_length
    assert not any(p.requires_grad and p.grad is not None for p in model.parameters())
    counted = []
    for row, stop in zip(written.tokens, written.stop, strict=True):
        out = speculative_generate(model, drafter, row[None, :8], max_new_tokens=int(stop) - 8)
        assert torch.equal(out.sequences[0], row[:stop])
        counted += out.accepted_lengths
    assert sum(counted) == pytest.approx(int(lengths.sum()), abs=2)  # half-precision features may turn a tie


def test_a_drafter_is_kept_in_a_folder(tiny, tmp_path):
    model, _ = tiny
    drafter = BlockDrafter.for_target(model, block_size=4, draft_vocab=[3, 9, 5]).eval()
    drafter.save_pretrained(tmp_path / "d")
    again = BlockDrafter.from_pretrained(tmp_path / "d", model).eval()
    features, tokens = torch.randn(7, 96), torch.randint(64, (8,))
    assert torch.equal(again.draft(features, tokens), drafter.draft(features, tokens))
    assert again.token_ids.tolist() == [3, 5, 9]
    assert not {"embedding", "head"} & {*drafter.state_dict()}
    wide = tiny_causal_lm()[0]
    wide.resize_token_embeddings(70)
    for folder, target, word in ((tmp_path, model, "no drafter"), (tmp_path / "d", wide, "64 tokens and width 32")):
        with pytest.raises(InputError, match=word):
            BlockDrafter.from_pretrained(folder, target)


def test_a_block_sees_features_before_its_anchor_only_and_not_beyond_its_context(tiny):
    model, _ = tiny
    drafter = BlockDrafter.for_target(model, block_size=4, context=3).eval()
    features, tokens = torch.randn(1, 12, 96), torch.randint(64, (1, 12))
    anchors = torch.tensor([[6]])
    base = drafter(features, tokens, anchors)
    for t in range(12):
        changed = features.clone()
        changed[0, t] += 1
        assert torch.equal(drafter(changed, tokens, anchors), base) == (t not in (3, 4, 5))
    torch.testing.assert_close(drafter.draft(features[0, :6], tokens[0, :7]), base[0, 0], atol=1e-5, rtol=1e-4)


def test_blocks_are_what_follows_the_anchor(tiny):
    model, tokenizer = tiny
    written = write(model, tokenizer, tiny_texts(documents=3, words=20), prompt_tokens=4, new_tokens=6)
    wanted, there = blocks_of(written, torch.tensor([[4, 8]]).expand(len(written), -1), 3, torch.arange(64), 64)
    assert torch.equal(wanted[0, 0], written.tokens[0, 5:8])
    assert there[0].tolist() == [[True] * 3, [True, False, False]]
    assert loops([1, 2, 3, 4] * 4)
    assert not loops([1, 2, 3, 4] * 3)


def test_bad_inputs_are_refused(tiny):
    model, tokenizer = tiny
    drafter = BlockDrafter.for_target(model, block_size=4)
    ids = torch.tensor([[5, 7]])
    for call, word in (
        (lambda: speculative_generate(model, drafter, torch.ones(2, 3, dtype=torch.int64)), "one prompt"),
        (lambda: speculative_generate(model, drafter, ids, torch.tensor([[0, 1]])), "zeros"),
        (lambda: speculative_generate(model, drafter, ids, do_sample=True, temperature=0.0), "temperature=0"),
        (lambda: speculative_generate(model, drafter, ids, max_new_tokens=0), "at least 1"),
        (lambda: speculative_generate(model, drafter, ids, max_new_tokens=600), "window of 512"),
        (lambda: BlockDrafter.for_target(model, block_size=1), "at least 2"),
        (lambda: BlockDrafter.for_target(model, block_size=4.5), "block_size=4.5"),
        (lambda: BlockDrafter.for_target(model, layers=[4]), "layers=4: .* from -4 to 3"),
        (lambda: BlockDrafter.for_target(model, layers=[]), "some of the target"),
        (lambda: BlockDrafter.for_target(model, draft_vocab=65), "from 1 to 64"),
        (lambda: BlockDrafter.for_target(model, draft_vocab=[3.5]), "draft_vocab=3.5"),
        (lambda: BlockDrafter.for_target(model, draft_vocab=[64]), "from 0 to 63"),
        (lambda: drafter(torch.randn(1, 4, 9), torch.ones(1, 4, dtype=torch.int64), ids[:, :1]), "9 wide"),
        (lambda: write(model, tokenizer, ["w3 w4"]), "none of 1 texts"),
        (lambda: write(model, tokenizer, "w3 w4"), "texts: give a list"),
        (lambda: write(model, tokenizer, []), "texts: give a list"),
        (lambda: write(model, tokenizer, ["w3", None]), "text 1 is empty or not a text"),
        (lambda: write(model, tokenizer, ["w3"], new_tokens=2.5), "new_tokens=2.5"),
        (lambda: speculative_generate(model, drafter, ids + 60), "input_ids are torch.int64 from 65 to 67"),
        (lambda: drafter(torch.randn(1, 4, 96), torch.full((1, 4), 64), ids[:, :1] * 0 + 1), "tokens are"),
        (lambda: drafter(torch.randn(1, 4, 96), torch.ones(1, 4).long(), ids[:, :1]), "anchors reach from 5"),
        (lambda: DrafterTrainer(model, drafter, lr=0.0), "lr=0.0"),
        (lambda: DrafterTrainer(model, drafter, anchors=2.5), "anchors=2.5"),
        (lambda: DrafterTrainer(model, drafter).fit(["w3"]), "tokenizer="),
    ):
        with pytest.raises(InputError, match=word):
            call()
    model.generation_config.repetition_penalty = 1.2
    try:
        with pytest.raises(InputError, match="repetition_penalty"):
            speculative_generate(model, drafter, ids)
    finally:
        model.generation_config.repetition_penalty = 1.0
