"""A pool of models that differ in prompt, depth and kind: what the trial's default chooses from.

One language model under eight prompts answers by the log-probability of the label words; beside it stand classifiers
on sentence embeddings and on words, trained on a few examples, and rules. Each is a function from texts to answers, as
:func:`~fairtrial.evaluation.ensemble_selection.collect` wants them.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fairtrial.errors import InputError

Model = Callable[[list[str]], list[str]]


@dataclass(frozen=True)
class Task:
    """Texts to classify, what their classes are called, and examples that no item is among.

    Attributes
    ----------
    texts, labels : n items
    examples : (text, label) pairs, balanced, for demonstrations and few-shot classifiers
    templates : prompts with a place for {text}; the label word follows them after a space
    rules : by name, functions of one text
    """

    texts: list[str]
    labels: list[str]
    examples: list[tuple[str, str]]
    templates: tuple[str, str]
    rules: Mapping[str, Callable[[str], str]] = field(default_factory=dict)

    @property
    def classes(self) -> list[str]:
        """The class names, sorted."""
        return sorted(set(self.labels) | {label for _, label in self.examples})


def prompted_answers(model: Any, tokenizer: Any, task: Task, *, skipped: int = 4) -> dict[str, list[str]]:
    """Return the answers of one causal language model under eight prompts.

    Two templates, each without demonstrations, with two different sets of four (the task's first eight examples), and
    with the first set but answered ``skipped`` blocks before the last.

    Returns
    -------
    dict
        By name, one answer an item.
    """
    from fairtrial.causal_lm.layout import find_blocks

    whole = len(find_blocks(model)[1])
    answers = {}
    for number, template in enumerate(task.templates, start=1):
        bodies = [template.format(text=text) for text in task.texts]
        for way, shots in (("zero-shot", []), ("shots A", task.examples[:4]), ("shots B", task.examples[4:8])):
            depths = (whole, max(1, whole - skipped)) if way == "shots A" else (whole,)
            prefix = "".join(f"{template.format(text=text)} {label}\n\n" for text, label in shots)
            said = label_word_answers(model, tokenizer, prefix, bodies, task.classes, depths)
            for depth, answer in zip(("", ", shallow"), said, strict=False):
                answers[f"prompt {number}, {way}{depth}"] = answer
    return answers


def label_word_answers(
    model: Any,
    tokenizer: Any,
    prefix: str,
    bodies: Sequence[str],
    labels: Sequence[str],
    depths: Sequence[int],
    *,
    batch_tokens: int = 1024,
) -> list[list[str]]:
    """Return for each body the label whose word a language model finds most likely after prefix and body.

    The prefix is read once and its keys and values shared by all bodies, which are read in batches of similar length.

    Parameters
    ----------
    model, tokenizer
        A causal language model of transformers and its tokenizer.
    prefix
        What all prompts begin with; may be empty.
    bodies
        n texts; a label follows each after a space.
    labels
        The answers to choose from, compared by their first tokens.
    depths
        After how many blocks to answer: the final norm and the head are put on what that block gives.

    Returns
    -------
    list of list
        n labels, for each depth.

    Raises
    ------
    InputError
        Two labels begin with the same token: they cannot be told apart by it.
    """
    import torch

    from fairtrial.causal_lm.batching import length_batches, pad_right
    from fairtrial.causal_lm.layout import find_blocks

    firsts = [tokenizer(f" {label}", add_special_tokens=False)["input_ids"][0] for label in labels]
    if len(set(firsts)) < len(firsts):
        raise InputError(f"of the labels {list(labels)} two begin with the same token: give other label words")
    begin = tokenizer(prefix)["input_ids"] if prefix else []
    rows = [torch.tensor(tokenizer(body, add_special_tokens=not prefix)["input_ids"]) for body in bodies]
    name, blocks = find_blocks(model)
    parent = model.get_submodule(name.rpartition(".")[0])
    norm = [child for child in parent.children() if "norm" in type(child).__name__.lower()][-1]
    head = model.get_output_embeddings()
    device = head.weight.device
    base = model.base_model
    known = "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
    states: list[Any] = []
    best = np.empty((len(depths), len(rows)), dtype=np.int64)
    hooks = [
        blocks[depth - 1].register_forward_hook(lambda _, __, out: states.append(out[0] if type(out) is tuple else out))
        for depth in depths
    ]
    try:
        with torch.inference_mode():
            cache = getattr(base(torch.tensor([begin], device=device), use_cache=True), known) if begin else None
            for batch in length_batches([len(row) for row in rows], batch_tokens):
                shared = {}
                if cache is not None:
                    shared = {known: copy.deepcopy(cache)}
                    shared[known].batch_repeat_interleave(len(batch))
                states.clear()
                base(pad_right([rows[i] for i in batch]).to(device), use_cache=cache is not None, **shared)
                last = torch.tensor([len(rows[i]) - 1 for i in batch], device=device)
                # Blocks report in the order of depth, whatever the order asked for.
                for which, state in zip(np.argsort(depths), states, strict=True):  # (B, T, d)
                    logits = head(norm(state[torch.arange(len(batch), device=device), last]))  # (B, V)
                    best[which, batch] = logits[:, firsts].argmax(-1).cpu().numpy()
    finally:
        for hook in hooks:
            hook.remove()
    return [[labels[i] for i in row] for row in best]


def classical_answers(task: Task, encoder: Callable[[list[str]], np.ndarray] | None) -> dict[str, list[str]]:
    """Return the answers of few-shot classifiers trained on the task's examples, and of its rules.

    ``encoder`` maps texts to embeddings (n, d); ``None`` leaves out the classifiers on these.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, RidgeClassifier
    from sklearn.naive_bayes import MultinomialNB
    from sklearn.neighbors import NearestCentroid
    from sklearn.pipeline import make_pipeline

    texts, labels = [text for text, _ in task.examples], [label for _, label in task.examples]
    answers = {}
    if encoder is not None:
        train, test = encoder(texts), encoder(task.texts)
        answers["embedding, centroid"] = NearestCentroid().fit(train, labels).predict(test).tolist()
        answers["embedding, logistic"] = LogisticRegression().fit(train, labels).predict(test).tolist()
    words = make_pipeline(TfidfVectorizer(), MultinomialNB())
    letters = make_pipeline(TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4)), RidgeClassifier())
    answers["words, naive Bayes"] = words.fit(texts, labels).predict(task.texts).tolist()
    answers["letters, ridge"] = letters.fit(texts, labels).predict(task.texts).tolist()
    for name, rule in task.rules.items():
        answers[name] = [rule(text) for text in task.texts]
    return answers


# ---------------------------------------------------------------------------------------------------------------- rules

_NEGATIONS = frozenset(
    (
        "no",
        "not",
        "never",
        "none",
        "nothing",
        "without",
        "ain't",
        "isn't",
        "wasn't",
        "don't",
        "doesn't",
        "can't",
        "won't",
    )
)


def lexicon_sum(lexicon: Mapping[str, float]) -> Callable[[str], str]:
    """Return the rule "positive" unless the valences of the words in a text add up to less than 0.

    >>> lexicon_sum({"good": 1.9, "awful": -2.0})("an awful, awful, good film")
    'negative'
    """
    return lambda text: "negative" if sum(lexicon.get(word, 0.0) for word in _words(text)) < 0 else "positive"


def last_word(lexicon: Mapping[str, float]) -> Callable[[str], str]:
    """Return the rule that believes the last word with a valence, reversed after a negation among the three before it.

    >>> last_word({"good": 1.9, "awful": -2.0})("awful? it was not that awful")
    'positive'
    """

    def rule(text: str) -> str:
        words = _words(text)
        for i in reversed(range(len(words))):
            if valence := lexicon.get(words[i], 0.0):
                reverse = any(word in _NEGATIONS for word in words[max(0, i - 3) : i])
                return "negative" if (valence < 0) != reverse else "positive"
        return "positive"

    return rule


def keywords(patterns: Mapping[str, str], otherwise: str) -> Callable[[str], str]:
    """Return the rule that gives the first label whose regular expression is found in a text.

    >>> keywords({"person": r"someone|who", "animal": r"genus"}, "object")("a bird of the genus Corvus")
    'animal'
    """
    compiled = {label: re.compile(pattern) for label, pattern in patterns.items()}
    return lambda text: next((label for label, pattern in compiled.items() if pattern.search(text)), otherwise)


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def longest_choice(text: str) -> str:
    r"""Return the letter of the longest of four choices, the last four lines of a question.

    >>> longest_choice("Which?\nA. one\nB. seventeen\nC. two\nD. ten")
    'B'
    """
    return max(text.split("\n")[-4:], key=len)[0]


def shared_words(text: str) -> str:
    """Return the letter of the choice that shares most words with the question above it."""
    *question, a, b, c, d = text.split("\n")
    asked = set(_words(" ".join(question)))
    return max((a, b, c, d), key=lambda choice: len(asked & set(_words(choice[2:]))))[0]
