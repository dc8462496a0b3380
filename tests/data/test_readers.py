"""The readers of samples, on the samples themselves: what their authors state about them must come out."""

import numpy as np
import pytest

from fairtrial.data.facts import countries, word_relations
from fairtrial.data.images import FASHION_CLASSES, fashion_mnist, garments, stamps
from fairtrial.data.quiz import mmlu_development
from fairtrial.data.samples import find_sample
from fairtrial.data.text import news_articles
from fairtrial.data.vader import DOMAINS, vader_lexicon, vader_sentences
from fairtrial.data.wordnet import wordnet_glosses
from fairtrial.errors import InputError, UnknownNameError


def needs(sample: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not find_sample(sample).folder.is_dir(), reason=f"the sample {sample} is not fetched")


@needs("vader")
@pytest.mark.parametrize(("domain", "rows"), list(zip(DOMAINS, (4001, 3708, 10605, 5190), strict=True)))
def test_a_sentence_comes_with_the_ratings_its_mean_is_of(domain, rows):
    sentences = vader_sentences(domain)
    assert len(sentences) == rows
    assert sentences["text"].str.len().min() > 0
    ratings = sentences["ratings"]
    np.testing.assert_allclose(sentences["mean"], ratings.map(np.mean))
    assert ratings.map(len).min() >= 15
    assert ratings.map(min).min() >= -4
    assert ratings.map(max).max() <= 4


def test_an_unknown_domain_is_named():
    with pytest.raises(UnknownNameError, match="movies"):
        vader_sentences("movie")


@needs("vader")
def test_the_lexicon_knows_good_from_bad():
    lexicon = vader_lexicon()
    assert lexicon["good"] > 1 > -1 > lexicon["bad"]


@needs("fashion-mnist")
@pytest.mark.parametrize(("split", "n"), [("train", 60_000), ("test", 10_000)])
def test_fashion_mnist_is_balanced(split, n):
    images, labels = fashion_mnist(split)
    assert images.shape == (n, 28, 28)
    assert images.dtype == np.uint8
    assert (np.bincount(labels) == n // len(FASHION_CLASSES)).all()


@needs("fashion-mnist")
def test_garments_are_balanced_standardised_and_drawn_by_their_seed():
    images, labels = garments(205, size=14, seed=1)
    assert images.shape == (205, 1, 14, 14)
    assert sorted(np.bincount(labels)) == [20] * 5 + [21] * 5
    assert np.array_equal(images, garments(205, size=14, seed=1)[0])
    assert not np.array_equal(images, garments(205, size=14, seed=2)[0])
    whole, _ = garments(60_000)
    assert abs(float(whole.mean())) < 1e-4
    assert abs(float(whole.std()) - 1) < 1e-4
    np.testing.assert_allclose(garments(50, size=7)[0].mean((1, 2, 3)), garments(50)[0].mean((1, 2, 3)), atol=1e-5)
    with pytest.raises(InputError, match="size=10"):
        garments(5, size=10)


@needs("stamps")
def test_a_stamp_has_a_caption_of_words():
    pictures = stamps()
    assert len(pictures) == 785
    assert pictures["path"].map(lambda path: path.is_file()).all()
    assert (
        dict(zip(pictures["path"].map(lambda path: path.stem), pictures["caption"], strict=True))["frog"] == "A frog."
    )


@needs("wordnet")
def test_a_gloss_has_its_lexicographers_class():
    nouns = wordnet_glosses("noun")
    assert len(nouns) == 82_115
    assert nouns["category"].nunique() == 26
    assert set(nouns["category"][nouns["lemma"] == "blackbird"]) == {"noun.animal"}
    assert not nouns["gloss"].str.contains('; "').any()
    assert not wordnet_glosses("adj")["lemma"].str.contains("(", regex=False).any()


@needs("mmlu-dev")
def test_a_question_has_four_choices_and_one_answer():
    questions = mmlu_development()
    assert questions.shape == (281, 7)
    assert questions["subject"].nunique() == 57
    assert set(questions["answer"]) == set("ABCD")
    assert questions.map(len).min().min() > 0


@needs("analogies")
def test_word_relations_are_distinct_pairs():
    relations = word_relations()
    assert {name: len(pairs) for name, pairs in relations.items() if not name.startswith("gram")} == {
        "capital-common-countries": 23, "capital-world": 116, "currency": 30, "city-in-state": 68, "family": 23,
    }  # fmt: skip
    assert ("Tripoli", "Libya") in relations["capital-world"]
    assert all(len(set(pairs)) == len(pairs) for pairs in relations.values())


@needs("countries")
def test_countries_have_capitals_and_known_neighbours():
    table = countries().set_index("name")
    assert len(table) == 246
    assert table.index.is_unique
    assert (table.loc["Chad", "capital"], table.loc["Norway", "demonym"]) == ("N'Djamena", "Norwegian")
    assert set(table.loc["Norway", "borders"]) == {"FIN", "SWE", "RUS"}


@needs("news")
def test_news_has_300_articles():
    articles = news_articles()
    assert len(articles) == 300
    assert min(map(len, articles)) > 200
