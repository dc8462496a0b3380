import re
from collections import Counter

import pandas as pd
import pytest

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.language_development import (
    Corpus,
    DevBench,
    Unigram,
    build_devbench,
    evaluate,
    items_needed,
    vocabulary,
)
from fairtrial.evaluation.language_development.corpus import tokenise
from fairtrial.evaluation.language_development.dealing import MOST, attainable, deal
from fairtrial.evaluation.language_development.lexicon import frequency_bin
from fairtrial.evaluation.language_development.pseudowords import PseudoWords
from fairtrial.evaluation.language_development.templates import PHENOMENA, TEMPLATES
from fairtrial.seeds import generator

ORDERS = (
    "word_order_phrase",
    "word_order_clause",
    "negation",
    "auxiliary",
    "wh_inversion",
    "wh_movement",
    "pronoun_case",
)


def pairs(bench, task="grammar"):
    for item in bench.items[bench.items.task == task].itertuples():
        yield item, tokenise(item.good), tokenise(item.bad[0])


def test_power_numbers():
    assert items_needed(0.55, 0.5) == 783
    assert items_needed(0.6, 0.5) == 194
    assert items_needed(0.35, 0.25) == 157


def test_every_word_of_every_item_is_in_the_corpus_and_the_target_in_its_bin(bench, words):
    for item in bench.items.itertuples():
        assert item.bin == frequency_bin(words.counts[item.word])
        assert item.count == words.counts[item.word]
        assert all(word in words.counts for word in tokenise(item.good))
        if item.phenomenon != "pseudo_word":
            assert all(word in words.counts for word in tokenise(item.bad[0]))


def test_the_target_is_in_a_member_of_its_item(bench):
    for item, good, bad in pairs(bench):
        twin = bench.items[(bench.items.frame == item.frame) & (bench.items.word == item.word)]
        assert item.word in good + bad or any(item.word in tokenise(text) for text in twin.good)


def test_no_item_occurs_verbatim_in_the_corpus(speech):
    training, held_out = speech.split(0.2)
    made = build_devbench(training, per_cell=20, contexts=held_out)
    said = [" ".join(tokenise(text)) for text in training.utterances]
    text = "|".join(f" {line} " for line in said)
    for item in made.items.itertuples():
        for member in (item.good, *item.bad):
            assert f" {' '.join(tokenise(member))} " not in text
    assert not made.items.seen.any()


def test_contexts_of_the_corpus_itself_are_marked_seen(bench):
    of_l2 = bench.items.phenomenon == "word_in_context"
    assert bench.items.seen[of_l2].all()
    assert not bench.items.seen[~of_l2].any()


def test_items_of_word_order_have_the_same_words(bench):
    seen = set()
    for item, good, bad in pairs(bench):
        if item.phenomenon in ORDERS:
            assert Counter(good) == Counter(bad)
            seen.add(item.phenomenon)
    assert len(seen) >= 6


def test_each_word_is_as_often_in_the_good_as_in_the_bad_member_of_a_grammatical_cell(bench):
    cells = {}
    for item, good, bad in pairs(bench):
        balance = cells.setdefault((item.phenomenon, item.bin), Counter())
        balance.update(good)
        balance.subtract(bad)
    assert cells
    assert all(not any(balance.values()) for balance in cells.values())


@pytest.mark.slow
def test_the_unigram_scorer_is_at_chance(bench, speech):
    cells = evaluate(bench, Unigram(speech)).cells
    grammar = cells[cells.task == "grammar"]
    orders = grammar[grammar.phenomenon.isin(ORDERS)]
    assert (orders.accuracy == 0.5).all()
    assert (abs(grammar.accuracy - 0.5) <= 2 * (0.25 / grammar["items"]) ** 0.5).all()


def test_no_word_has_over_a_twentieth_of_a_cell(bench):
    for (_, phenomenon, _), cell in bench.items.groupby(["task", "phenomenon", "bin"]):
        halves = max((len(t.halves) for t in TEMPLATES if t.phenomenon == phenomenon), default=1)
        halves = 2 if phenomenon == "odd_one_out" else halves
        if phenomenon not in ("preposition", "odd_one_out"):  # there a twin is about two words
            units = len(cell) // halves
            assert cell.word.value_counts().max() / halves <= max(1, units / MOST)


def test_pseudo_words_have_the_length_and_are_an_edit_or_more_away_from_every_word(bench, words):
    for item in bench.items[bench.items.phenomenon == "pseudo_word"].itertuples():
        left, right = item.context.split("___")
        pseudo = item.bad[0][len(left) : len(item.bad[0]) - len(right)].lower()
        assert len(pseudo) == len(item.word)
        assert pseudo not in words.counts
        assert min(edits(pseudo, word) for word in words.counts) > 1


def edits(a, b):
    """Levenshtein's distance, by the book."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row, last = [i], row
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
    return row[-1]


def test_a_chain_that_only_makes_its_own_words_makes_none():
    makes = PseudoWords(["aaa", "bbb"], ["aaa", "bbb"], generator(0))
    assert makes.draw(3) is None
    assert makes.draw(3) is None


def test_the_same_seed_gives_the_same_bytes(words, tmp_path):
    files = []
    for name in ("one", "two"):
        folder = build_devbench(vocabulary(words.corpus), per_cell=20, seed=3).save(tmp_path / name)
        files.append([(folder / file).read_bytes() for file in ("items.jsonl", "bench.json")])
    assert files[0] == files[1]
    other = build_devbench(words, per_cell=20, seed=4).save(tmp_path / "three")
    assert (other / "items.jsonl").read_bytes() != files[0][0]


def test_a_bench_is_loaded_as_it_was_saved(bench, tmp_path):
    again = DevBench.load(bench.save(tmp_path))
    pd.testing.assert_frame_equal(again.items, bench.items)
    assert (again.per_cell, again.chance_margin, again.seed, again.notes) == (24, 0.1, 0, bench.notes)
    lines = (tmp_path / "items.jsonl").read_text().splitlines()
    for damaged in (lines[2].replace('"good"', '"best"'), "[1]"):
        (tmp_path / "items.jsonl").write_text("\n".join([*lines[:2], damaged, *lines[3:]]))
        with pytest.raises(InputError, match=r"items.jsonl, line 3: not an item"):
            DevBench.load(tmp_path)
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(InputError, match="not of format"):
        DevBench.load(tmp_path)
    with pytest.raises(InputError, match="not a bench"):
        DevBench.load(tmp_path / "nowhere")


def test_cells_that_cannot_reach_the_power_are_reported_and_not_padded(bench):
    power = bench.power()
    assert (power.enough == (power["items"] >= 194)).all()
    assert (power["items"] <= 24).all()
    assert not power.enough.any()
    texts = bench.items[bench.items.task == "grammar"].good
    assert texts.groupby(bench.items.phenomenon).apply(lambda t: t.is_unique).all()


@pytest.mark.parametrize("n", [1, 19, 20, 21, 25, 97, 194])
def test_dealing_reaches_what_is_attainable_and_no_more(n):
    words = {f"w{i}": [None] for i in range(n)}
    units = deal(words, 97, lambda word, _: word, generator(0))
    assert len(units) == attainable(n, 97)
    assert max(Counter(word for word, _ in units).values()) <= max(1, len(units) // MOST)


def test_a_word_that_fails_leaves_a_smaller_cell():
    words = {f"w{i}": [None] for i in range(30)}
    units = deal(words, 97, lambda word, _: word if word < "w2" else None, generator(0))
    assert 0 < len(units) <= 12
    assert max(Counter(word for word, _ in units).values()) == 1


def test_halves_of_a_template_use_the_same_words():
    for template in TEMPLATES:
        balance = Counter()
        for half in template.halves:
            balance.update(half.good.split())
            balance.subtract(half.bad.split())
        assert not any(balance.values()), template
        assert set(re.findall(r"\{(\w)", template.halves[0].good)) & {"n", "v"}
    assert len(PHENOMENA) == 15


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_tiny_corpus_says_which_phenomena_remain():
    tiny = Corpus.from_documents(
        ["the dog is here\nthe dogs are here\nlook at a dog\nhe saw the dog there\nit is good"]
    )
    with pytest.raises(InputError, match=r"only 14 distinct words: of the phenomena remain: none"):
        build_devbench(tiny, tasks=["past_regular"])
    made = build_devbench(tiny, per_cell=2)
    assert re.match(r"the corpus has only 14 distinct words: of the phenomena remain: .+", made.notes[0])


def test_without_english_the_grammar_is_off_and_the_lexical_tasks_stand(speech):
    strange = str.maketrans("abcdefghiklmnoprstuvwy", "bacedgfihlknmportsuwvy")
    other = Corpus.from_documents(["\n".join(text.lower().translate(strange) for text in speech.utterances)])
    made = build_devbench(other, per_cell=20)
    assert set(made.items.task) == {"L1", "L2"}
    assert any("not English" in note for note in made.notes)


def test_an_unknown_task_and_a_cell_of_one_are_refused(words):
    with pytest.raises(UnknownNameError, match="negation"):
        build_devbench(words, tasks=["negations"])
    with pytest.raises(InputError, match="per_cell=1"):
        build_devbench(words, per_cell=1)
    with pytest.raises(InputError, match="needs pictures"):
        build_devbench(words, tasks=["L4"])


# ---------------------------------------------------------------------------------------------------------- pictures


def album(words, per_word=2):
    nouns = sorted(noun.s for noun in words.nouns)
    rows = [(f"{w}-{k}", w, "thing") for w in nouns for k in range(per_word)]
    rows.append(("dog-0", "cat", "thing"))  # one picture shows two
    return pd.DataFrame(rows, columns=["image", "word", "category"])


def test_foils_of_a_picture_are_of_the_same_bin_and_category_and_do_not_show_the_word(words):
    pictures = album(words)
    shown = pictures.groupby("image").word.apply(set)
    made = build_devbench(words, tasks=["L4"], pictures=pictures, per_cell=30)
    assert set(made.items.phenomenon) == {"picture_of_word", "word_of_picture"}
    for item in made.items.itertuples():
        assert item.word in shown[item.images[0]]
        assert len({*item.images}) == len(item.images)
        others = [w for image in item.images[1:] for w in shown[image]] + item.bad
        assert item.word not in others
        assert all(words.bins[w] == item.bin for w in item.bad)
        assert len(item.images) + len(item.bad) == 4
    assert set(made.power().chance) == {0.25}
    assert set(made.power().needed) == {157}


def test_fewer_than_four_pictured_words_in_a_bin_are_reported(words):
    few = album(words)[lambda t: t.word.isin(["dog", "ball", "cat"])]
    with pytest.raises(InputError, match="no category has four words with pictures in bin"):
        build_devbench(words, tasks=["L4"], pictures=few)


def test_pictures_need_their_columns_and_a_known_word(words):
    with pytest.raises(InputError, match="no column 'category'"):
        build_devbench(words, tasks=["L4"], pictures=album(words).drop(columns="category"))
    with pytest.raises(InputError, match="no picture shows a word"):
        build_devbench(words, tasks=["L4"], pictures=album(words).assign(word="zzz"))


def test_stamps_and_garments_make_pictures(words):
    from fairtrial.data.samples import find_sample

    if not find_sample("stamps").folder.is_dir():
        pytest.skip("the sample stamps is not fetched")
    from fairtrial.data.images import stamps

    table = stamps()
    captions = table.caption.str.lower().map(tokenise)
    rows = [
        (str(row.path), word, "stamp")
        for row, caption in zip(table.itertuples(), captions, strict=True)
        for word in set(caption) & words.counts.keys()
        if words.pos[word] == "NN"
    ]
    made = build_devbench(words, tasks=["L4"], pictures=pd.DataFrame(rows, columns=["image", "word", "category"]))
    assert len(made.items) > 20
