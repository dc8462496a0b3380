import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.errors import InputError, MissingExtraError
from fairtrial.evaluation.language_development import Corpus, vocabulary
from fairtrial.evaluation.language_development.corpus import tokenise
from fairtrial.evaluation.language_development.lexicon import frequency_bin


@given(st.integers(1, 10**12))
def test_a_bin_is_the_floor_of_the_logarithm_to_base_four(count):
    b = frequency_bin(count)
    assert 4**b <= count < 4 ** (b + 1)


@given(st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=6), min_size=1, max_size=8), st.data())
def test_contains_is_what_a_search_of_every_utterance_finds(utterances, data):
    corpus = Corpus.from_documents(["\n".join(" ".join(words) for words in utterances)])
    wanted = data.draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4))
    n = len(wanted)
    found = any(words[i : i + n] == wanted for words in utterances for i in range(len(words)))
    assert corpus.contains(wanted) == found


def test_counts_documents_and_capitals_are_those_of_the_text():
    corpus = Corpus.from_documents(["See Emma run.\nEmma isn't here!", "The dog saw Emma; the DOG's big."])
    assert corpus.counts["emma"] == 3
    assert corpus.counts["n't"] == corpus.counts["'s"] == 1
    assert corpus.documents_with[corpus.ids["emma"]] == 2
    assert corpus.capitalised[corpus.ids["emma"]] == 1
    assert corpus.capitalised[corpus.ids["here"]] == 0


@pytest.mark.parametrize(
    ("text", "words"), [("Ça va, où?", ["ça", "va", "où"]), ("can’t", ["ca", "n't"]), ("A1 b_c", ["a", "b", "c"])]
)
def test_words_are_runs_of_letters_with_clitics_split(text, words):
    assert tokenise(text) == words


def test_sentences_of_a_corpus_are_written_as_it_writes():
    formal = Corpus.from_documents(["I see.\nYou saw it."])
    plain = Corpus.from_documents(["you see\nyou saw it"])
    words = ["do", "n't", "i", "see"]
    assert formal.write(words, question=True) == "Don't I see?"
    assert plain.write(words) == "don't i see"


def test_held_out_utterances_are_not_said_in_training(speech):
    training, held_out = speech.split(0.3, seed=1)
    kept = {tuple(tokenise(text)) for text in training.utterances}
    assert held_out.utterances
    assert not any(tuple(tokenise(text)) in kept for text in held_out.utterances)


def test_files_folders_and_patterns_are_read(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"look at {name[0]}\n\nthe dog", encoding="utf-8")
    for source in (tmp_path, str(tmp_path / "*.txt"), [tmp_path / "a.txt", tmp_path / "b.txt"]):
        corpus = Corpus.from_text(source)
        assert corpus.utterances == ("look at a", "the dog", "look at b", "the dog")
        assert corpus.document.tolist() == [0, 0, 1, 1]


def test_the_transcript_of_eve_is_read_where_pylangacq_is_installed():
    pytest.importorskip("pylangacq")
    from fairtrial.evaluation.language_development.trial import eve_file

    try:
        corpus = Corpus.from_text(eve_file())
    except MissingExtraError:
        pytest.skip("this pylangacq has no transcript of Eve")
    assert len(corpus.utterances) > 1400
    assert corpus.utterances[0] == "more cookie."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: Corpus.from_documents(["123 ..."]), "no words"),
        (lambda path: Corpus.from_text(path / "none.txt"), "no text file there"),
        (lambda path: Corpus.from_text(path / "latin.txt"), "not UTF-8"),
        (lambda path: Corpus.from_stream(path / "frames.csv", path / "untimed.csv"), "without timestamps"),
        (lambda path: Corpus.from_stream(path / "frames.csv", path / "blank.csv"), "row 1 has no time"),
        (lambda path: Corpus.from_stream(path / "lost.csv", path / "said.csv"), "1 listed frames do not exist"),
        (lambda path: Corpus.from_stream(path / "frames.csv", path / "late.csv"), "outside the frames' times"),
        (lambda path: Corpus.from_stream(path / "pictures", path / "said.csv"), "name its images by their time"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, make, message):
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "pictures").mkdir()
    for name in ("0.png", "1.png", "pictures/first.png"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "frames.csv").write_text("t,path\n0,0.png\n1,1.png\n")
    (tmp_path / "lost.csv").write_text("t,path\n0,0.png\n1,2.png\n")
    (tmp_path / "said.csv").write_text("t,text\n0.5,hello there\n")
    (tmp_path / "untimed.csv").write_text("text\nhello\n")
    (tmp_path / "blank.csv").write_text("t,text\n0,hello\n,you\n")
    (tmp_path / "late.csv").write_text("t,text\n9,hello\n")
    with pytest.raises(InputError, match=message) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_stream_keeps_times_and_frames(tmp_path):
    for t in (0, 1, 2):
        (tmp_path / f"{t}.png").write_bytes(b"")
    said = pd.DataFrame({"t": [1.2, 0.1], "text": ["a dog", "look"]})
    corpus = Corpus.from_stream(tmp_path, said)
    assert corpus.utterances == ("look", "a dog")
    assert corpus.times.tolist() == [0.1, 1.2]
    assert corpus.frames.t.tolist() == [0, 1, 2]


def test_tags_come_from_neighbours_lexicon_and_suffixes(words):
    assert {words.pos[w] for w in ("dog", "ball")} == {"NN"}
    assert words.pos["dogs"] == "NNS"
    assert words.pos["saw"] == "VBD"  # not the tool
    assert words.pos["the"] == "DETERMINER"
    assert ("dog", "dogs") in words.nouns
    assert {verb.base: verb.past for verb in words.verbs}["see"] == "saw"


def test_a_user_tagger_replaces_the_rules(speech):
    tagged = vocabulary(speech, tagger=lambda words: ["NN"] * len(words))
    assert set(tagged.pos.values()) == {"NN"}


def test_the_dispersion_filter_drops_words_of_one_document():
    corpus = Corpus.from_documents(["the dog and the cat", "the dog"])
    assert set(vocabulary(corpus, min_documents=2).counts) == {"the", "dog"}


def test_an_unseen_sentence_of_old_words_changes_only_bins_whose_count_crosses_a_power_of_four(speech, words):
    line = "the dog can see the ball"
    assert line.split() not in [tokenise(text) for text in speech.utterances]
    more = vocabulary(Corpus.from_documents(["\n".join(speech.utterances), line]))
    for word, count in more.counts.items():
        crossed = frequency_bin(words.counts[word]) != frequency_bin(count)
        assert (more.bins[word] != words.bins[word]) == crossed
    assert np.sum([more.counts[w] != words.counts[w] for w in words.counts]) == 5
