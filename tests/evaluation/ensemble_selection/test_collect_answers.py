from types import SimpleNamespace

import pandas as pd
import pytest

from fairtrial.errors import InputError
from fairtrial.evaluation.ensemble_selection import collect, label_parser


class Counting:
    """A model that says the length of a prompt and counts what it was asked."""

    def __init__(self, stop_after=None):
        self.asked = []
        self.stop_after = stop_after

    def __call__(self, prompts):
        if self.stop_after is not None and len(self.asked) + len(prompts) > self.stop_after:
            raise RuntimeError("the line is dead")
        self.asked += prompts
        return [f" {len(prompt)} " for prompt in prompts]


def test_answers_come_as_a_table_in_the_order_of_items():
    table = collect({"one": Counting(), "two": lambda p: [None] * len(p)}, pd.Series(["a", "bb"], index=["x", "y"]))
    assert table.to_dict("list") == {"one": ["1", "2"], "two": [None, None]}
    assert table.index.tolist() == ["x", "y"]


def test_an_item_given_twice_is_asked_once():
    model = Counting()
    assert collect({"m": model}, ["a", "bb", "a"]).m.tolist() == ["1", "2", "1"]
    assert model.asked == ["a", "bb"]


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    items = [str(i) for i in range(10)]
    with pytest.raises(RuntimeError):
        collect({"m": Counting(stop_after=5)}, items, cache=tmp_path, batch_size=2)
    again = Counting()
    table = collect({"m": again}, items, cache=tmp_path, batch_size=2)
    assert again.asked == items[4:]
    assert table.m.tolist() == ["1"] * 10
    other = Counting()
    collect({"m": other, "new": other}, items, cache=tmp_path)
    assert other.asked == items  # the new model's


def test_an_unfinished_last_line_is_cut_off(tmp_path):
    collect({"m": Counting()}, ["a", "b"], cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text(encoding="utf-8")[:-4])
    again = Counting()
    collect({"m": again}, ["a", "b"], cache=tmp_path)
    assert again.asked == ["b"]


def test_a_damaged_cache_is_named(tmp_path):
    collect({"m": Counting()}, ["a"], cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("nonsense\n")
    with pytest.raises(InputError, match="line 1: no answer of this cache"):
        collect({"m": Counting()}, ["a"], cache=tmp_path)


def test_another_parser_costs_no_query(tmp_path):
    model = Counting()
    collect({"m": model}, ["a"], cache=tmp_path)
    assert collect({"m": model}, ["a"], cache=tmp_path, parse=lambda text: f"<{text}>").m.tolist() == ["< 1 >"]
    assert model.asked == ["a"]


def test_names_that_look_alike_have_caches_of_their_own(tmp_path):
    collect({"a/b": Counting(), "a-b": Counting()}, ["x"], cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_chat_models_failures_are_asked_again(tmp_path):
    class Chat:
        asked = 0
        broken = True

        def complete_many(self, prompts):
            self.asked += len(prompts)
            failed = [prompt == "b" and self.broken for prompt in prompts]
            return [
                ValueError("no") if bad else SimpleNamespace(text=p) for bad, p in zip(failed, prompts, strict=True)
            ]

    chat = Chat()
    assert collect({"m": chat}, ["a", "b"], cache=tmp_path).m.tolist() == ["a", None]
    chat.broken = False
    assert collect({"m": chat}, ["a", "b"], cache=tmp_path).m.tolist() == ["a", "b"]
    assert chat.asked == 3


def test_a_model_that_answers_nothing_says_why(tmp_path):
    def dead(prompts):
        return [ValueError("the window is 512 tokens")] * len(prompts)

    with pytest.raises(InputError, match="'m' answered none of 2 prompts: the window is 512 tokens"):
        collect({"m": dead}, ["a", "b"], cache=tmp_path)


def test_another_number_of_answers_is_refused():
    with pytest.raises(InputError, match="'m' gave 1 answers to 2 prompts"):
        collect({"m": lambda prompts: prompts[:1]}, ["a", "b"])


def test_labels_are_found_as_words_whatever_their_case():
    parse = label_parser(["A", "B", "not B"])
    assert [parse(text) for text in ("The answer is b.", "It is NOT B", "Bad", "(A)")] == ["B", "not B", None, "A"]


def test_what_cannot_be_is_refused_before_a_model_is_asked(tmp_path):
    (tmp_path / "file").touch()
    for options, message in (({"batch_size": 0}, "batch_size=0"), ({"cache": tmp_path / "file"}, "give a folder")):
        with pytest.raises(InputError, match=message):
            collect({"m": None}, ["a"], **options)
    for labels in ([], [""], ["a", ""], ["a", "A"], ["a", None], [1, 2]):
        with pytest.raises(InputError, match="labels="):
            label_parser(labels)
