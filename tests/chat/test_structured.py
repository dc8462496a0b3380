from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fairtrial.chat.structured import instructed, parse
from fairtrial.errors import InputError


class Grade(BaseModel):
    score: int
    why: str = ""


prose = st.text(alphabet=st.characters(exclude_characters='{}[]"'), max_size=40)


@given(prose, prose, st.integers(), st.text(max_size=30), st.sampled_from([None, 2]))
def test_an_object_is_found_whatever_is_around_it(before, after, score, why, indent):
    text = json.dumps({"score": score, "why": why}, indent=indent)
    assert parse(f"{before}{text}{after}", Grade) == Grade(score=score, why=why)
    assert parse(f"{before}\n```json\n{text}\n```\n{after}", Grade) == Grade(score=score, why=why)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('<think>{"score": 1}?</think> {"score": 2}', 2),
        ('By [1] and \\frac{1}{2}: {"score": 3}', 3),
        ('{"score": 4} (see {x})', 4),
        ('{"better": "A"} {"score": 5} [1, 2]', 5),
        ('{oops {"score": 6}', 6),
    ],
)
def test_the_last_object_that_matches_counts(text, score):
    assert parse(text, Grade).score == score


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no JSON value in it"),
        ("I would give it a 4.", "there is no JSON value in it"),
        ('{"score": "high"}', "score: Input should be a valid integer"),
        ('{"why": "good"}', "score: Field required"),
        ('{"score": 4, "why": "go', "not JSON: Unterminated string"),
        ("{'score': 4}", "not JSON: Expecting property name"),
        ('{"a": {"score": 1}, oops}', "not JSON: Expecting property name"),
        ("[" * 5000, "there is no JSON value in it"),
        ('{"a":' * 5000, "there is no JSON value in it"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, problem):
    with pytest.raises(InputError, match=problem) as caught:
        parse(text, Grade)
    assert "\n" not in str(caught.value)


def test_lists_are_objects_too():
    from pydantic import RootModel

    assert parse("Here: [1, 2, 3].", RootModel[list[int]]).root == [1, 2, 3]


def test_the_schema_is_asked_for_in_the_last_message():
    messages = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Rate."}]
    system, user = instructed(messages, Grade)
    assert system == messages[0]
    assert user["content"].startswith("Rate.\n\nReply with one JSON value")
    parts = instructed([{"role": "user", "content": [{"type": "image_url"}]}], Grade)[0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]
