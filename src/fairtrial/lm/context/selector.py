"""Selecting contexts without labels: by the error change they would make if the consensus were true."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fairtrial.causal_lm.prompts import checked_texts
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.context.answers import (
    answer_vectors,
    checked_choices,
    checked_start,
    choice_of,
    generated_choices,
    joined,
)
from fairtrial.lm.context.geometry import finite
from fairtrial.lm.context.meter import attention_features
from fairtrial.options import checked_count, checked_number

BETA, GAMMA = 0.25, 2.0
FEWEST = 3  # contexts for a consensus
LABELLED = 50  # queries to fit on
By = Literal["consensus", "window"]


def consensus(before: np.ndarray, after: np.ndarray, *, beta: float = BETA, gamma: float = GAMMA) -> np.ndarray:
    """Return what contexts agree on, (C,): t prop. to (mean_k y(q, z_k) y(q)^beta)^gamma.

    Parameters
    ----------
    before
        (C,) probabilities without context: a prior of weight ``beta``.
    after
        (n, C) probabilities with each context.
    gamma
        Sharpening.

    Raises
    ------
    InputError
        Shapes that do not fit, what are no probabilities, or no answer that is possible with contexts and without.
    """
    before, after = finite(before, "before"), finite(after, "after")
    beta, gamma = checked_number(beta, "beta", least=0), checked_number(gamma, "gamma", above=0)
    if not after.size or after.ndim != 2 or before.shape != after.shape[1:] or min(before.min(), after.min()) < 0:
        raise InputError(
            f"before has shape {before.shape} and after {after.shape}: give probabilities, (answers,) and (contexts, "
            "answers)"
        )
    t = after.mean(0) * before**beta
    if not t.max() > 0:
        raise InputError("contexts leave no answer that is possible without them: give beta=0")
    t = (t / t.max()) ** gamma
    return t / t.sum()


def predicted_changes(before: np.ndarray, after: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return |y(q, z) - t|^2 - |y(q) - t|^2 of each context, (n,): below 0 it helps."""
    return np.square(after - truth).sum(1) - np.square(before - truth).sum()


@dataclass(frozen=True, eq=False)
class Selection:
    """What was selected.

    Attributes
    ----------
    indices : list of int, contexts to use, the best first; empty = better none.
    scores : (n,) predicted change of the squared error, below 0 where a context helps.
    agreement : probability of the answer the contexts agree on most.
    reason : a sentence.
    """

    indices: list[int]
    scores: np.ndarray
    agreement: float
    reason: str


class ProperCorrectionSelector:
    """Chooses the contexts that should correct a model properly, or none.

    Parameters
    ----------
    model, tokenizer
        A causal language model of transformers.
    k
        Contexts to choose at most.
    beta, gamma
        See :func:`consensus`; :meth:`fit` sets them from labelled queries.
    by
        "consensus": by what all candidates agree on. "window": by attention to the context and the length of the
        correction, neither too little nor too much, as :meth:`fit` learnt it.
    deduplicate
        Count contexts of equal text once in the consensus.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> selector = ProperCorrectionSelector(*tiny_causal_lm())
    >>> chosen = selector.select("w4 w5", ["w7 w9", "w2 w2", "w3 w9"], choices=["w8", "w9", "w11"])
    >>> len(chosen.scores)
    3
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        k: int = 1,
        beta: float = BETA,
        gamma: float = GAMMA,
        by: By = "consensus",
        deduplicate: bool = True,
    ) -> None:
        if by not in ("consensus", "window"):
            raise UnknownNameError("by", by, ["consensus", "window"])
        self.model, self.tokenizer, self.k = model, tokenizer, checked_count(k, "k")
        self.beta, self.gamma = checked_number(beta, "beta", least=0), checked_number(gamma, "gamma", above=0)
        self.by, self.deduplicate = by, deduplicate
        self._window: Any = None

    # ----------------------------------------------------------------------------------------------------------- choice

    def select(
        self, query: str, contexts: Sequence[str], *, choices: Sequence[str] | None = None, start: str = ""
    ) -> Selection:
        """Return which contexts to put before a query.

        Parameters
        ----------
        query
            The question.
        contexts
            At least three for a consensus, different ones with ``deduplicate``.
        choices
            Answers it may have; ``None`` = what the model itself answers with and without the contexts.
        start
            What the answer begins with; see :meth:`~fairtrial.lm.context.meter.CorrectionMeter.diagnose`.

        Raises
        ------
        InputError
            Fewer than three contexts, empty ones, choices that are none, prompts beyond the window.
        """
        contexts, start = self._contexts(contexts), checked_start(start)
        before, after, names = self._answers(query, contexts, choices, start)
        t = consensus(before, after[self._counted(contexts)], beta=self.beta, gamma=self.gamma)
        if self.by == "window":
            scores = self._foretell(self._features(query, contexts, start, before, after))
        else:
            scores = predicted_changes(before, after, t)
        order = [int(i) for i in np.argsort(scores, kind="stable") if scores[i] < 0][: self.k]
        best = names[int(t.argmax())]
        if order:
            reason = f"context {order[0]} should lower the squared error by {-scores[order[0]]:.3g}"
        else:
            reason = f"no context should lower the error: the best would change it by {scores.min():+.3g}"
        return Selection(order, scores, float(t.max()), f"{reason} (the contexts agree on {best!r}, {t.max():.2f})")

    def rerank(
        self, query: str, docs: Sequence[Any], *, choices: Sequence[str] | None = None, start: str = ""
    ) -> list[Any]:
        """Return documents in order, the most helpful first; each is a text or has ``page_content`` or ``text``."""
        docs = [docs] if isinstance(docs, str) else [*docs]
        texts = [text_of(doc) for doc in docs]
        scores = self.select(query, texts, choices=choices, start=start).scores
        return [docs[i] for i in np.argsort(scores, kind="stable")]

    def _answers(
        self, query: str, contexts: list[str], choices: Sequence[str] | None, start: str
    ) -> tuple[np.ndarray, np.ndarray, list[str]]:
        prompts = [query, *(joined(query, context) for context in contexts)]
        if choices is None:
            names = generated_choices(self.model, self.tokenizer, prompts, start=start)
        else:
            names = checked_choices(choices)
        y = answer_vectors(self.model, self.tokenizer, prompts, names, start=start)
        return y[0], y[1:], names

    def _contexts(self, contexts: Sequence[str]) -> list[str]:
        """Return contexts, enough for a consensus if there is to be one."""
        contexts = checked_texts(contexts, "context")
        if self.by == "consensus" and len(self._counted(contexts)) < FEWEST:
            raise InputError(
                f"{len(self._counted(contexts))} {'different ' if self.deduplicate else ''}contexts: a consensus needs "
                f"at least {FEWEST}; give more, or by='window'"
            )
        return contexts

    def _counted(self, contexts: list[str]) -> list[int]:
        """Return which contexts count in the consensus."""
        return [i for i, context in enumerate(contexts) if not self.deduplicate or contexts.index(context) == i]

    # -------------------------------------------------------------------------------------------------------------- fit

    def fit(
        self,
        queries: Sequence[str],
        contexts: Sequence[Sequence[str]],
        answers: Sequence[str],
        *,
        choices: Sequence[str] | Sequence[Sequence[str]],
        start: str | Sequence[str] = "",
    ) -> ProperCorrectionSelector:
        """Learn beta and gamma, and with ``by="window"`` the window, from at least 50 labelled queries.

        Parameters
        ----------
        queries, answers
            n questions and their true answers.
        contexts
            n lists.
        choices
            One list for all, or n lists.
        start
            What answers begin with: one text for all, or n.

        Raises
        ------
        InputError
            Fewer queries, or not as many of everything; the rest as :meth:`select`, with the number of the query.
        """
        if isinstance(queries, str) or choices is None or not len(choices):
            raise InputError("give a list of queries, and one list of choices for all or one each")
        n = len(queries)
        each: Any = [choices] * n if isinstance(choices[0], str) else choices
        starts = [start] * n if isinstance(start, str) else start
        given = {"contexts": contexts, "answers": answers, "choices": each, "start": starts}
        counts = {name: len(values) for name, values in given.items()}
        if n < LABELLED or {*counts.values()} != {n}:
            raise InputError(f"{n} queries and {counts}: give as many of each, at least {LABELLED}")
        read = []
        for i, query in enumerate(queries):
            try:
                texts = self._contexts(contexts[i])
                before, after, names = self._answers(query, texts, each[i], checked_start(starts[i]))
                read.append((before, after, np.eye(len(names))[choice_of(answers[i], names)], self._counted(texts)))
            except InputError as error:
                raise InputError(f"query {i}: {error}") from None

        def brier(beta: float, gamma: float) -> float:
            total = 0.0
            for before, after, truth, counted in read:
                t = consensus(before, after[counted], beta=beta, gamma=gamma)
                change = predicted_changes(before, after, t)
                y = after[change.argmin()] if change.min() < 0 else before
                total += float(np.square(y - truth).sum())
            return total / len(read)

        grid = itertools.product((0.0, 0.25, 0.5, 1.0), (1.0, 1.5, 2.0, 3.0, 4.0))
        self.beta, self.gamma = min(grid, key=lambda pair: brier(*pair))
        if self.by == "window":
            from sklearn.linear_model import RidgeCV
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import PolynomialFeatures, StandardScaler

            features = [
                self._features(query, texts, checked_start(begun), before, after)
                for query, texts, begun, (before, after, *_) in zip(queries, contexts, starts, read, strict=True)
            ]
            changes = [predicted_changes(before, after, truth) for before, after, truth, _ in read]
            self._window = make_pipeline(
                StandardScaler(), PolynomialFeatures(2, include_bias=False), RidgeCV(np.logspace(-3, 3, 7))
            ).fit(np.concatenate(features), np.concatenate(changes))
        return self

    def _features(
        self, query: str, contexts: Sequence[str], start: str, before: np.ndarray, after: np.ndarray
    ) -> np.ndarray:
        """Return logs of attention mass, complementarity and length of the correction, (n, 3)."""
        seen = np.array([attention_features(self.model, self.tokenizer, query, context, start) for context in contexts])
        size = np.linalg.norm(after - before, axis=1)
        return np.log(np.column_stack([seen, size]) + 1e-6)

    def _foretell(self, features: np.ndarray) -> np.ndarray:
        if self._window is None:
            raise InputError('by="window" must be fitted first: call fit with labelled queries')
        return self._window.predict(features)


def text_of(doc: Any) -> str:
    """Return a document's text: itself, its ``page_content`` or its ``text``."""
    if isinstance(doc, str):
        return doc
    for name in ("page_content", "text"):
        if isinstance(value := getattr(doc, name, None), str):
            return value
    raise InputError(f"{type(doc).__name__} is no text and has neither page_content nor text")
