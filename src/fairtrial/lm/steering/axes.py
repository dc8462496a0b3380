"""Ten behavioural axes, each as pairs of sentence templates about any topic.

An axis has several template pairs, so that a direction is extracted with some and tested with others: a detector that
has only learned the wording fails.
"""

from __future__ import annotations

TOPICS = (
    "gardening", "the election", "chess", "diabetes", "volcanoes", "jazz", "taxes", "whales", "the railway",
    "cooking", "vaccines", "football", "poetry", "robots", "the harbour", "bees", "mountains", "bread", "the museum",
    "physics", "tourism", "rivers", "insurance", "the theatre",
)  # fmt: skip
"""What sentences may be about."""

AXES: dict[str, tuple[tuple[str, str], ...]] = {
    "sentiment": (
        ("I love everything about {t}, it is wonderful.", "I hate everything about {t}, it is awful."),
        ("What a delightful day we had with {t}!", "What a miserable day we had with {t}!"),
        ("The news about {t} made all of us happy.", "The news about {t} made all of us sad."),
        ("{t} has brought me nothing but joy.", "{t} has brought me nothing but trouble."),
    ),
    "tense": (
        ("Yesterday we talked about {t} and wrote a report.", "Tomorrow we will talk about {t} and write a report."),
        ("She had studied {t} before she left.", "She is going to study {t} after she leaves."),
        ("Long ago people cared a lot about {t}.", "In the future people will care a lot about {t}."),
        ("He finished his work on {t} last year.", "He will finish his work on {t} next year."),
    ),
    "question": (
        ("What do you know about {t}?", "Here is what I know about {t}."),
        ("Is there anything new about {t}?", "There is something new about {t}."),
        ("Why do so many people like {t}?", "That is why so many people like {t}."),
        ("Could you say where I can read about {t}?", "You can read about {t} in this place."),
    ),
    "formality": (
        ("We would respectfully request information regarding {t}.", "hey, gimme some info on {t}, will ya"),
        ("Permit me to express my sincere interest in {t}.", "wow {t} is super cool, gotta say"),
        ("The committee shall hereby consider the matter of {t}.", "so yeah, we'll kinda look at {t}, no biggie"),
        ("It is my pleasure to present an overview of {t}.", "ok guys, here's some stuff on {t}, lol"),
    ),
    "certainty": (
        ("It is absolutely certain that {t} will matter.", "It may be that {t} will perhaps matter."),
        ("Without any doubt, {t} explains all of it.", "I am not sure whether {t} explains any of it."),
        ("Everyone knows for a fact that {t} is important.", "Some people guess that {t} might be important."),
        ("The evidence proves that {t} is the cause.", "The evidence hints that {t} could be the cause."),
    ),
    "refusal": (
        ("I'm sorry, but I cannot help you with {t}.", "Sure, I will gladly help you with {t}."),
        ("I am unable to answer this request about {t}.", "Here is the answer to your request about {t}."),
        ("As an assistant, I must decline to discuss {t}.", "As an assistant, I am glad to discuss {t}."),
        ("That is against my rules, so I won't write about {t}.", "That is a fine idea, so I'll write about {t}."),
    ),
    "person": (
        ("I think about {t} when I am alone.", "They think about {t} when they are alone."),
        ("My friends and I spent our evening on {t}.", "His friends and he spent their evening on {t}."),
        ("We told our children about {t}.", "She told her children about {t}."),
        ("I have always wanted to know {t} myself.", "He has always wanted to know {t} himself."),
    ),
    "negation": (
        ("There is no connection between {t} and the weather.", "There is a connection between {t} and the weather."),
        ("She did not mention {t} and never wrote about it.", "She did mention {t} and often wrote about it."),
        ("Nobody in the village has heard of {t}.", "Everybody in the village has heard of {t}."),
        ("The book contains nothing on {t}.", "The book contains something on {t}."),
    ),
    "language": (
        ("Gestern haben wir lange über {t} gesprochen.", "Yesterday we spoke about {t} for a long time."),
        ("Das ist ein kurzer Text, der von {t} handelt.", "This is a short text that deals with {t}."),
        ("Viele Leute wissen nicht viel von {t}.", "Many people do not know much of {t}."),
        ("Wir möchten mehr über {t} lernen.", "We would like to learn more about {t}."),
    ),
    "code": (
        ("def describe():\n    return '{t}'", "The description says {t}."),
        ("for item in ['{t}', 'other']:\n    print(item)", "On the list are {t} and others."),
        ("const name = \"{t}\";\nif (name) {{ run(name); }}", "Its name is {t}, and with that name it runs."),
        ("SELECT * FROM topics WHERE name = '{t}';", "Look up all topics by the name of {t}."),
    ),
}  # fmt: skip
"""Axis to pairs of templates, the positive one first; ``{t}`` is the topic."""


def sentences(axis: str, pair: int, topics: list[str]) -> tuple[list[str], list[str]]:
    """Return the positive and the negative sentences of a template pair, one a topic each."""
    positive, negative = AXES[axis][pair]
    return [positive.format(t=t) for t in topics], [negative.format(t=t) for t in topics]
