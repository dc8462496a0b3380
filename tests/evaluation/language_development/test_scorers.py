import numpy as np
import pytest
import tiny_models
import torch
from transformers import PreTrainedTokenizerFast

from fairtrial.errors import InputError
from fairtrial.evaluation.language_development import (
    CausalScorer,
    Corpus,
    KneserNey,
    MaskedScorer,
    SimilarityScorer,
    build_devbench,
    evaluate,
    fit_acquisition,
    train_small_lm,
)
from fairtrial.evaluation.language_development.evaluation import share_correct
from fairtrial.evaluation.language_development.scorers import shared_prefixes


@pytest.fixture(scope="module")
def tokenizer():
    return words_tokenizer({f"w{i}": i for i in range(3, 40)} | {"<s>": 0, "<mask>": 1, "?": 2})


def words_tokenizer(vocabulary, **special):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = special or {"bos_token": "<s>", "mask_token": "<mask>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **special)


def texts_of(n, seed=0):
    rng = np.random.default_rng(seed)
    shared = [" ".join(f"w{i}" for i in rng.integers(3, 40, rng.integers(1, 9))) for _ in range(n // 2)]
    return [f"{text} {tail}".strip() for text in shared for tail in (f"w{rng.integers(3, 40)}", "w4 w5", "")]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_log_probability_is_the_sum_of_token_log_softmax(kind, tokenizer):
    model = tiny_models.build(kind)
    texts = texts_of(16)
    by_hand = []
    for text in texts:
        ids = torch.tensor([[0, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            log_p = model(ids).logits[0].log_softmax(-1)
        by_hand.append(sum(log_p[t, ids[0, t + 1]].item() for t in range(ids.shape[1] - 1)))
    for budget in (None, 16, 64):  # whatever stands in a batch beside it
        got = CausalScorer(model, tokenizer, batch_tokens=budget)(texts)
        np.testing.assert_allclose(got, by_hand, atol=1e-4)
    alone = np.array([CausalScorer(model, tokenizer)([text])[0] for text in texts])
    np.testing.assert_allclose(alone, by_hand, atol=1e-4)


def test_prefixes_are_shared_where_that_reads_fewer_tokens():
    rng = np.random.default_rng(0)
    rows = sorted({(0, *rng.integers(0, 3, rng.integers(1, 7)).tolist()) for _ in range(60)})
    groups = shared_prefixes([torch.tensor(row) for row in rows])
    assert [i for _, group in groups for i in group] == list(range(len(rows)))
    read = 0
    for length, group in groups:
        assert len({rows[i][:length] for i in group}) == 1
        read += length + sum(len(rows[i]) - length for i in group)
    assert read < 0.8 * sum(map(len, rows))


def test_unknown_tokens_give_nan_and_are_left_out_of_the_report(tokenizer, bench):
    scorer = CausalScorer(tiny_models.build("llama"), tokenizer)
    scores = scorer(["w3 w4", "w3 blick"])
    assert np.isfinite(scores[0])
    assert np.isnan(scores[1])
    with pytest.raises(InputError, match="scored no item"):
        evaluate(bench, scorer)


def test_pseudo_words_that_a_tokenizer_does_not_know_are_reported(bench, speech):
    known = {word: i + 3 for i, word in enumerate(sorted({w for t in bench.items.good for w in t.split()}))}
    everything = words_tokenizer(known | {"<s>": 0, "?": 1}, bos_token="<s>")
    model = tiny_models.build("llama", vocab_size=len(known) + 3)
    bench = part_of(bench, "pseudo_word", "negation")
    report = evaluate(bench, CausalScorer(model, everything))
    assert any("unknown tokens" in note and "pseudo_word" in note for note in report.notes)
    assert "pseudo_word" not in set(report.cells.phenomenon)


def test_a_model_without_bos_is_refused_or_takes_a_start(tokenizer):
    model = tiny_models.build("llama")
    bare = words_tokenizer({"w3": 3, "?": 2}, pad_token="?")
    with pytest.raises(InputError, match="no bos and no eos token: give start="):
        CausalScorer(model, bare)
    assert CausalScorer(model, bare, start=0)(["w3"]).shape == (1,)
    with pytest.raises(InputError, match="no mask token"):
        MaskedScorer(model, bare)
    with pytest.raises(InputError, match="text 0 has no tokens"):
        CausalScorer(model, tokenizer)([""])


def test_pseudo_log_likelihood_is_the_sum_over_masked_tokens(tokenizer):
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForMaskedLM(config).eval()
    texts = texts_of(8)
    by_hand = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        total = 0.0
        for place in range(len(ids)):
            masked = torch.tensor([ids])
            masked[0, place] = 1
            with torch.no_grad():
                total += model(masked).logits[0, place].log_softmax(-1)[ids[place]].item()
        by_hand.append(total)
    np.testing.assert_allclose(MaskedScorer(model, tokenizer)(texts), by_hand, atol=1e-4)


def test_an_oracle_gets_one_its_negation_none_and_a_constant_half(bench):
    bench = part_of(bench, "pseudo_word", "negation", "agreement_adjacent")
    good = set(bench.items.good)

    def oracle(texts):
        return np.array([1.0 if text in good else 0.0 for text in texts])

    assert evaluate(bench, oracle).items.correct.eq(1).all()
    assert evaluate(bench, lambda texts: -oracle(texts)).items.correct.eq(0).all()
    constant = evaluate(bench, lambda texts: np.zeros(len(texts)))
    assert constant.items.correct.eq(0.5).all()
    assert constant.cells.corrected.eq(0).all()


def part_of(bench, *phenomena):
    items = bench.items[bench.items.phenomenon.isin(phenomena)].reset_index(drop=True)
    return type(bench)(items, bench.per_cell, bench.chance_margin, bench.seed)


def test_swapping_good_and_bad_flips_accuracy(bench):
    def checksum(texts):
        return np.array([sum(ord(c) * (i + 1) for i, c in enumerate(text)) % 97 for text in texts])

    bench = part_of(bench, "word_in_context", "agreement_attractor")
    swapped = bench.items.assign(good=[bad[0] for bad in bench.items.bad], bad=[[good] for good in bench.items.good])
    other = type(bench)(swapped, bench.per_cell, bench.chance_margin, bench.seed)
    one, two = evaluate(bench, checksum), evaluate(other, checksum)
    np.testing.assert_allclose(two.cells.accuracy, 1 - one.cells.accuracy, atol=1e-12)


@pytest.mark.parametrize("m", [2, 4])
def test_ties_share_what_is_right(m):
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 3, (200, m)).astype(float)
    brute = [(row[0] == max(row)) / list(row).count(max(row)) for row in scores]
    np.testing.assert_allclose(share_correct(scores), brute)


def test_the_report_knows_power_intervals_and_curves(speech):
    made = build_devbench(speech, tasks=["negation", "agreement_adjacent"], per_cell=40, chance_margin=0.3)
    rng = np.random.default_rng(0)
    report = evaluate(made, lambda texts: rng.random(len(texts)))
    cells = report.cells
    assert ((cells.low <= cells.accuracy) & (cells.accuracy <= cells.high))[cells.words > 1].all()
    assert report.macro == pytest.approx(cells[cells.enough].corrected.mean())
    assert cells.enough.any()
    assert "all" in set(report.curve.phenomenon)
    figure = report.plot_curve()
    assert figure.axes[0].get_xscale() == "log"
    assert '"macro"' in report.to_json()


def test_a_callable_of_the_wrong_shape_and_a_bench_of_another_kind_are_refused(bench):
    with pytest.raises(InputError, match="one number a text"):
        evaluate(bench, lambda texts: 1.0)
    with pytest.raises(InputError, match="no L4 items"):
        evaluate(bench, SimilarityScorer(lambda images: images, lambda texts: texts))


def test_a_similarity_scorer_answers_both_directions_of_l4(words):
    import pandas as pd

    nouns = sorted(noun.s for noun in words.nouns)
    pictures = pd.DataFrame({"image": range(len(nouns)), "word": nouns, "category": "thing"})
    made = build_devbench(words, tasks=["L4"], pictures=pictures, per_cell=20)
    eye = np.eye(len(nouns))
    scorer = SimilarityScorer(lambda images: eye[images], lambda texts: eye[[nouns.index(t) for t in texts]])
    report = evaluate(made, scorer)
    assert set(report.cells.phenomenon) == {"picture_of_word", "word_of_picture"}
    assert report.items.correct.eq(1).all()
    assert report.cells.per_character.isna().all()


# -------------------------------------------------------------------------------------------------- counting models


def brute_kneser_ney(stream, order, size):
    """p(w | h) by the definition, on a ring of words."""
    n = len(stream)
    grams = {k: [tuple(stream[(i + j) % n] for j in range(k)) for i in range(n)] for k in range(1, order + 2)}

    def count(gram):
        if len(gram) == order:
            return grams[order].count(gram)
        return len({g for g in grams[len(gram) + 1] if g[1:] == gram})

    kinds = {k: set(grams[k]) for k in range(1, order + 1)}
    discounts = {}
    for k in range(1, order + 1):
        counts = [count(gram) for gram in kinds[k]]
        once, twice = counts.count(1), counts.count(2)
        discounts[k] = once / (once + 2 * twice) if once else 0.5

    def p(history, word):
        lower = p(history[1:], word) if history else 1 / size
        k = len(history) + 1
        after = [gram for gram in kinds[k] if gram[:-1] == history]
        if not after:
            return lower
        total = sum(count(gram) for gram in after)
        here = count((*history, word)) if (*history, word) in kinds[k] else 0
        return max(here - discounts[k], 0) / total + discounts[k] * len(after) / total * lower

    return p


@pytest.mark.parametrize("order", [1, 2, 3])
def test_kneser_ney_is_its_definition_and_sums_to_one(order):
    rng = np.random.default_rng(order)
    lines = [" ".join(rng.choice(list("abcd"), rng.integers(1, 6))) for _ in range(12)]
    corpus = Corpus.from_documents(["\n".join(lines)])
    model = KneserNey(corpus, order=order)
    p = brute_kneser_ney(corpus.tokens[1:].tolist(), order, model.size)
    for _ in range(10):
        history = rng.integers(0, model.size, order - 1)
        grams = np.array([[*history, word] for word in range(model.size)])
        got = model.probabilities(grams)
        assert got.sum() == pytest.approx(1)
        np.testing.assert_allclose(got, [p(tuple(history.tolist()), word) for word in range(model.size)])


def test_an_order_of_none_is_refused():
    with pytest.raises(InputError, match="order=0"):
        KneserNey(Corpus.from_documents(["a b"]), order=0)


# ----------------------------------------------------------------------------------------------- curves and training


def test_the_acquisition_fit_recovers_threshold_and_slope():
    rng = np.random.default_rng(1)
    for t, s, chance in ((30.0, 1.5, 0.5), (200.0, 0.8, 0.25)):
        f = np.exp(rng.uniform(0, 9, 600)).round().clip(1)
        p = chance + (1 - chance) / (1 + np.exp(-s * (np.log(f) - np.log(t))))
        fit = fit_acquisition(f, rng.binomial(12, p), np.full(600, 12), chance, draws=200)
        assert fit.t_low < t < fit.t_high
        assert fit.s_low < s < fit.s_high
        assert abs(np.log(fit.t / t)) < 0.3
        assert fit.accuracy(fit.t) == pytest.approx((1 + chance) / 2)


def test_a_curve_needs_two_frequencies():
    with pytest.raises(InputError, match="two frequencies"):
        fit_acquisition([3, 3], [1, 0], [1, 1], 0.5)


def test_the_small_language_model_learns_and_repeats_itself(speech):
    how = {"width": 16, "layers": 1, "vocabulary": 300, "epochs": 1.0}
    one, tokenizer = train_small_lm(speech.utterances[:300], seed=1, **how)
    two, _ = train_small_lm(speech.utterances[:300], seed=1, **how)
    assert all((a == b).all() for a, b in zip(one.parameters(), two.parameters(), strict=True))
    untrained, _ = train_small_lm(speech.utterances[:300], seed=1, **{**how, "epochs": 0})
    heard = list(speech.utterances[:50])
    assert CausalScorer(one, tokenizer)(heard).mean() > CausalScorer(untrained, tokenizer)(heard).mean()
    with pytest.raises(InputError, match="fewer than one window"):
        train_small_lm(["a b"], **how)


def test_a_clip_checkpoint_scores_pictures(tmp_path):
    from PIL import Image
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 40, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 4},
        vision_config={**sizes, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        CLIPModel(config).save_pretrained(tmp_path)
    words = words_tokenizer({"dog": 3, "cat": 5, "</s>": 4, "?": 2}, eos_token="</s>", pad_token="</s>")
    words.save_pretrained(tmp_path)
    for name, color in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGBA", (20, 30), color).save(tmp_path / name)
    table = SimilarityScorer.from_pretrained(tmp_path).similarity(
        [tmp_path / "a.png", tmp_path / "b.png"], ["dog", "cat", "dog cat"]
    )
    assert table.shape == (2, 3)
    assert (np.abs(table) <= 1).all()
    assert not np.allclose(table[0], table[1])
    with pytest.raises(InputError, match="it has no config"):
        SimilarityScorer.from_pretrained(tmp_path / "none")
