import numpy as np
import pytest
import torch

from fairtrial.data.tiny import tiny_causal_lm
from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection.pool import (
    Task,
    classical_answers,
    keywords,
    label_word_answers,
    last_word,
    lexicon_sum,
    longest_choice,
    prompted_answers,
    shared_words,
)

LABELS = ["w3", "w7", "w9"]


@pytest.fixture(scope="module")
def tiny():
    return tiny_causal_lm(layers=3)


@pytest.mark.parametrize("prefix", ["", "w1 w2 w3 "])
def test_answers_are_those_of_the_whole_prompt_read_alone(tiny, prefix):
    model, tokenizer = tiny
    rng = np.random.default_rng(0)
    bodies = [" ".join(f"w{i}" for i in rng.integers(64, size=length)) for length in rng.integers(1, 12, size=30)]
    (found,) = label_word_answers(model, tokenizer, prefix, bodies, LABELS, [3], batch_tokens=40)
    with torch.inference_mode():
        for body, answer in zip(bodies, found, strict=True):
            logits = model(torch.tensor([tokenizer(prefix + body)["input_ids"]])).logits[0, -1, [3, 7, 9]]
            assert answer == LABELS[int(logits.argmax())]


def test_a_shallow_answer_is_that_of_the_model_cut_short(tiny):
    model, tokenizer = tiny
    bodies = [f"w{i} w{i + 1}" for i in range(20)]
    deep, shallow = label_word_answers(model, tokenizer, "w5 ", bodies, LABELS, [3, 1])
    blocks = model.model.layers
    try:
        model.model.layers = blocks[:1]
        assert label_word_answers(model, tokenizer, "w5 ", bodies, LABELS, [1]) == [shallow]
    finally:
        model.model.layers = blocks
    assert label_word_answers(model, tokenizer, "w5 ", bodies, LABELS, [1, 3]) == [shallow, deep]
    assert not blocks[0]._forward_hooks


def test_labels_that_begin_alike_are_refused(tiny):
    with pytest.raises(InputError, match="begin with the same token"):
        label_word_answers(*tiny, "", ["w1"], ["w3", "w3 w4"], [3])


def task():
    texts = ["a good film", "an awful film", "so good", "not good, awful"] * 6
    labels = ["positive", "negative", "positive", "negative"] * 6
    return Task(texts, labels, list(zip(texts, labels, strict=True))[:8], ("{text}\nIt is", "{text}:"))


def test_eight_prompts_answer_every_item(tiny):
    model, tokenizer = tiny
    words = task()
    named = Task(
        words.texts,
        ["w3", "w7"] * 12,
        [(text, f"w{3 + 4 * (i % 2)}") for i, (text, _) in enumerate(words.examples)],
        words.templates,
    )
    answers = prompted_answers(model, tokenizer, named, skipped=2)
    assert len(answers) == 8
    assert {len(said) for said in answers.values()} == {24}
    assert set().union(*answers.values()) <= {"w3", "w7"}


def test_few_shot_classifiers_learn_their_examples():
    words, rng = task(), np.random.default_rng(0)

    def encoder(texts):
        meaning = [[float("good" in text), float("awful" in text)] for text in texts]
        return np.array(meaning) + 0.1 * rng.standard_normal((len(texts), 2))

    answers = classical_answers(words, encoder)
    for name in ("embedding, centroid", "embedding, logistic", "words, naive Bayes", "letters, ridge"):
        assert np.mean(np.array(answers[name]) == words.labels) > 0.9
    assert "embedding, centroid" not in classical_answers(words, None)


def test_rules():
    lexicon = {"good": 1.9, "awful": -2.0}
    assert lexicon_sum(lexicon)("Good film") == "positive"
    assert lexicon_sum(lexicon)("nothing known") == "positive"
    assert last_word(lexicon)("awful, but in the end good") == "positive"
    assert last_word(lexicon)("this is not a good film") == "negative"
    assert last_word(lexicon)("nothing known") == "positive"
    assert keywords({"person": "who"}, "object")("a thing") == "object"
    question = "What is a crow?\nA. a bird\nB. a fish of deep water\nC. is a crow\nD. x"
    assert longest_choice(question) == "B"
    assert shared_words(question) == "C"
