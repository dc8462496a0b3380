from __future__ import annotations

import itertools

import pytest
from pydantic import BaseModel, Field

from fairtrial.chat import ChatError, EndpointError
from fairtrial.errors import InputError
from fairtrial.judges import CachedJudge, LocalJudge, OpenAIJudge, ask, prefer, prefer_many, rate, rate_many, votes
from fairtrial.judges.asking import BatchJudge, votes_many


class Grade(BaseModel):
    score: int = Field(ge=1, le=5)


class Batched:
    """A judge that is asked in batches, and remembers them."""

    def __init__(self, reply):
        self.reply, self.batches = reply, []

    def __call__(self, prompt):
        return self.many([prompt])[0]

    def many(self, prompts):
        self.batches.append(list(prompts))
        return [self.reply(prompt) for prompt in prompts]


def scripted(*replies):
    """A judge that says one thing after another."""
    left = iter(replies)

    def judge(prompt):
        asked.append(prompt)
        reply = next(left)
        if isinstance(reply, Exception):
            raise reply
        return reply

    asked: list[str] = []
    return judge, asked


# Ratings


def test_a_rating_shows_the_schema_and_returns_its_object():
    judge, asked = scripted('The proof is clear. {"score": 4}')
    assert rate(judge, "How clear?", Grade) == Grade(score=4)
    assert asked[0].startswith("How clear?\n\nReply with one JSON value")


def test_a_rating_is_repaired_once_and_told_why():
    judge, asked = scripted('{"score": 9}', '{"score": 5}')
    assert rate(judge, "How clear?", Grade) == Grade(score=5)
    assert '{"score": 9}' in asked[1]
    assert "less than or equal to 5" in asked[1]
    judge, asked = scripted("four", "still four")
    with pytest.raises(ChatError, match="Grade at neither attempt") as caught:
        rate(judge, "How clear?", Grade)
    assert caught.value.raw == "still four"
    assert len(asked) == 2


def test_a_lost_rating_costs_the_others_nothing():
    judge, _ = scripted('{"score": 1}', ChatError("gone"), "?", '{"score": 2}', EndpointError("no endpoint"))
    one, lost, unrepaired, two = rate_many(judge, list("abcd"), Grade)
    assert (one, two) == (Grade(score=1), Grade(score=2))
    assert str(lost) == "gone"
    assert isinstance(unrepaired, EndpointError)
    assert unrepaired.raw == "?"


def test_a_judge_that_can_is_asked_in_two_batches():
    judge = Batched(lambda prompt: '{"score": 3}' if "You replied" in prompt else "hm")
    assert isinstance(judge, BatchJudge)
    assert not isinstance(str.upper, BatchJudge)
    assert rate_many(judge, ["a"] * 5, Grade) == [Grade(score=3)] * 5
    assert [len(batch) for batch in judge.batches] == [5, 5]


def test_a_judge_whose_endpoint_is_gone_is_not_asked_again():
    judge, asked = scripted("fine", ChatError("lost"), EndpointError("gone"))
    assert [str(reply) for reply in ask(judge, list("abcdef"))] == ["fine", "lost", "gone", "gone", "gone", "gone"]
    assert asked == list("abc")


def test_only_lost_replies_are_caught():
    def broken(prompt):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask(broken, ["a"])


# Votes


def test_votes_are_the_median_or_the_most_frequent():
    judge, _ = scripted(*(f'{{"score": {score}}}' for score in (5, 1, 4)))
    poll = votes(judge, "?", Grade, "score")
    assert (poll.value, poll.cast, poll.lost) == (4, (5, 1, 4), 0)

    class Answer(BaseModel):
        good: bool

    judge, _ = scripted(*(f'{{"good": {word}}}' for word in ("true", "false", "true")))
    poll = votes(judge, "?", Answer, "good")
    assert poll.value is True
    assert poll.consistency == pytest.approx(1 / 3)
    judge, _ = scripted(*(f'{{"good": {word}}}' for word in ("true", "false")))
    assert votes(judge, "?", Answer, "good", n=2).value is None


def test_lost_votes_are_counted():
    judge, _ = scripted(*['{"score": 2}', ChatError("gone"), ChatError("gone")] * 2)
    first, second = votes_many(judge, ["a", "b"], Grade, "score")
    assert first == second
    assert (first.value, first.lost, first.consistency) == (2, 2, None)
    judge, _ = scripted(*[ChatError("gone")] * 3)
    assert votes(judge, "a", Grade, "score").value is None
    with pytest.raises(InputError, match="field"):
        votes(judge, "a", Grade, "grade")


# Preferences


def by_length(prompt):
    a, b = prompt.split("Text A:\n")[1].split("\n\nText B:\n")
    b = b.split("\n\nSay which")[0]
    return f'{{"better": "{"A" if len(a) > len(b) else "B" if len(a) < len(b) else "tie"}"}}'


@pytest.mark.parametrize(
    ("first", "second", "winner"), [("aaa", "b", "first"), ("a", "bbb", "second"), ("a", "b", "tie")]
)
def test_a_preference_is_asked_in_both_orders_and_symmetric(first, second, winner):
    forward, backward = prefer(by_length, "Longer?", first, second), prefer(by_length, "Longer?", second, first)
    assert forward.winner == winner
    assert forward.consistent
    assert backward.winner == {"first": "second", "second": "first", "tie": "tie"}[winner]


@pytest.mark.parametrize("always", ["A", "B"])
def test_a_judge_that_goes_by_the_order_prefers_nothing(always):
    preference = prefer(lambda prompt: f'{{"better": "{always}"}}', "Better?", "x", "y")
    assert preference.winner == "tie"
    assert not preference.consistent


def test_a_preference_without_a_reply_in_one_order_is_lost():
    def silent_backward(prompt):
        return '{"better": "A"}' if "Text A:\nfirst" in prompt else "?"

    with pytest.raises(ChatError, match="one order"):
        prefer(silent_backward, "Which?", "first", "second")


def test_preferences_are_asked_in_one_batch_with_votes():
    judge = Batched(by_length)
    preferences = prefer_many(judge, "Longer?", [("aa", "b"), ("a", "bb")], n=3)
    assert [one.winner for one in preferences] == ["first", "second"]
    assert [len(batch) for batch in judge.batches] == [12]


# Judges that are models


def test_a_local_judge_samples_votes_of_its_own():
    from fairtrial.data.tiny import tiny_causal_lm

    tiny = tiny_causal_lm()
    judge = LocalJudge(tiny, temperature=1.0, max_tokens=6, seed=1)
    first, second = judge.many(["w3", "w3"])
    assert first != second
    assert judge.many(["w3", "w3"]) == [first, second]
    assert judge("w3") == first
    assert judge.usage.requests == 5
    same = LocalJudge(tiny, max_tokens=6).many(["w3", "w3"])
    assert same[0] == same[1]


def test_an_unreachable_judge_is_one_line():
    judge = OpenAIJudge("http://127.0.0.1:9/v1", "m", "JUDGE_KEY")
    for call in (judge.chat.probe, lambda: judge("a"), lambda: rate_many(judge, ["a"], Grade)):
        with pytest.raises(EndpointError, match=r"http://127\.0\.0\.1:9/v1.*JUDGE_KEY"):
            call()


def test_a_cached_judge_is_asked_once_and_keeps_what_came(tmp_path):
    calls = []

    def judge(prompt):
        calls.append(prompt)
        if len(calls) == 3:
            raise KeyboardInterrupt  # as when the run is killed
        return prompt.upper()

    cached = CachedJudge(judge, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cached.many(list("abcd"))
    assert CachedJudge(judge, tmp_path).many(list("abcd")) == list("ABCD")
    assert calls == list("abccd")
    assert CachedJudge(judge, tmp_path)("a") == "A"
    assert len(calls) == 5


def test_a_cached_judge_keeps_votes_apart_and_no_failures(tmp_path):
    numbers = itertools.count()
    judge = CachedJudge(lambda prompt: str(next(numbers)), tmp_path / "votes")
    assert judge.many(["a", "a", "b"]) == ["0", "1", "2"]
    assert judge.many(["b", "a", "a", "a"]) == ["2", "0", "1", "3"]
    failing, _ = scripted(ChatError("gone"), "back")
    cached = CachedJudge(failing, tmp_path / "failing")
    with pytest.raises(ChatError, match="gone"):
        cached("a")
    assert cached("a") == "back"
