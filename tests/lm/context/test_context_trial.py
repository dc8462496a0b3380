import json

import numpy as np
import pytest

from fairtrial.data.samples import find_sample
from fairtrial.errors import InputError
from fairtrial.lm.context.answers import normalised
from fairtrial.lm.context.sources import RELATIONS, queries_of, sentences
from fairtrial.lm.context.trial import ContextParams, answer_of, check, own_queries, trial
from fairtrial.testing import check_trial


def test_the_trial_is_sound():
    check_trial(trial)


def test_sentences_are_cut():
    text = (
        "This is a sentence of seven words. Too short! And here is another one, long enough.\nA line is one too, alone"
    )
    assert sentences([text, text]) == [
        "This is a sentence of seven words.",
        "And here is another one, long enough.",
        "A line is one too, alone",
    ]


class ByLetter:
    """A tokenizer of letters: many answers begin alike."""

    def __call__(self, texts, **how):
        return {"input_ids": [[ord(c) for c in text.strip()] for text in texts]}


@pytest.mark.skipif(not find_sample("analogies").folder.is_dir(), reason="needs  fairtrial samples get analogies")
@pytest.mark.parametrize("relation", [*RELATIONS])
def test_contexts_never_state_the_answer(relation):
    pool = [
        f"{['London', 'Paris', 'Texas', 'French'][i % 4]} is named in sentence number {i} of these" for i in range(60)
    ]
    queries, choices = queries_of(relation, ByLetter(), 12, pool)
    assert len({choice[0] for choice in choices}) == len(choices)
    for query in queries:
        assert query.answer in choices
        assert len(query.contexts) == len(query.sources) == 8
        for context in query.contexts:
            assert normalised(query.answer) not in normalised(context)
            assert context.strip()


def test_what_each_candidate_chooses():
    before = np.array([0.5, 0.3, 0.2])
    after = np.array([[0.6, 0.3, 0.1], [0.05, 0.9, 0.05], [0.7, 0.2, 0.1]])
    known = {
        "before": before[None], "after": after[None], "truth": np.array([[1.0, 0, 0]]),
        "everything": np.array([[0.2, 0.2, 0.6]]), "by_words": np.array([[1.0, 2, 0]]),
        "by_meaning": np.array([[0.0, 2, 3]]),
    }  # fmt: skip
    params = ContextParams()

    def chosen(label):
        return answer_of(label, 0, known, {"block": 0}, params)

    assert chosen("none")[1] is None
    assert {label: chosen(label)[1] for label in ("strongest", "confident", "informative", "words")} == dict.fromkeys(
        ("strongest", "confident", "informative", "words"), 1
    )
    assert chosen("minilm")[1] == 2
    assert chosen("oracle")[1] == 2
    assert chosen("proper")[1] in (0, 2)
    np.testing.assert_allclose(chosen("vote")[0], after.mean(0))
    np.testing.assert_allclose(chosen("everything")[0], [0.2, 0.2, 0.6])


def test_queries_of_the_users_are_read_and_checked(tmp_path):
    row = {"query": "w4", "contexts": ["w5", "w6", "w7"], "choices": ["w8", "w9"], "answer": "w9"}
    file = tmp_path / "q.jsonl"
    file.write_text("\n".join(json.dumps({**row, "relation": f"r{i % 2}"}) for i in range(4)))
    found = own_queries(ContextParams(queries=str(file)))
    assert [(name, len(rows)) for name, rows in found.items()] == [("r0", 2), ("r1", 2)]
    for change, word in (
        ({"contexts": ["w5"]}, "at least 3"),
        ({"answer": "w1"}, "not among"),
        ({"choices": ["w8"]}, "at least two"),
        ({"contexts": ["w5", "", "w6"]}, "context 1 is empty"),
        ({"choices": None}, "give an answer and choices"),
        ({"answer": ""}, "give an answer and choices"),
    ):
        file.write_text(json.dumps({**row, **change}))
        with pytest.raises(InputError, match=f" 1: .*{word}"):
            check(ContextParams(model="tiny", queries=str(file)))
    for given, word in (
        ({"model": "./none"}, "no such file"),
        ({"queries": "none.jsonl"}, "no such file"),
        ({"n_queries": 4}, "less than blocks=5"),
    ):
        with pytest.raises(InputError, match=word):
            check(ContextParams(**{"model": "tiny", "queries": "tiny", **given}))
