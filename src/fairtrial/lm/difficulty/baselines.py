"""What else may tell that a problem is hard: its length, the model's own probabilities, rollouts, labels.

Each returns a score a prompt, higher = harder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fairtrial.causal_lm.likelihood import choice_scores, next_token_log_probs, token_log_likelihoods
from fairtrial.seeds import generator


def prompt_perplexity(model: Any, ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the mean surprise of the model at each prompt, (n,), in nats a token."""
    return np.array([-row.double().mean().item() for row in token_log_likelihoods(model, ids)])


def first_token_entropy(model: Any, ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the entropy of the first answer token, (n,), in nats."""
    log_p = next_token_log_probs(model, ids).double()
    return -(log_p.exp() * log_p).sum(1).cpu().numpy()


def choice_doubt(log_likelihoods: Sequence[Any]) -> np.ndarray:
    """Return one less the probability of the likeliest choice, (n,), from each choice's mean log-likelihood."""
    return np.array([1 - _softmax(row).max() for row in log_likelihoods])


def self_doubt(model: Any, tokenizer: Any, contexts: Sequence[str]) -> np.ndarray:
    """Return how likely the model says No, (n,), to contexts that ask whether an answer of its own is correct."""
    scores = choice_scores(model, tokenizer, contexts, [["No", "Yes"]] * len(contexts), add_special_tokens=False)
    return np.array([_softmax(row.mean)[0] for row in scores])


def rollout_disagreement(log_likelihoods: Sequence[Any], *, samples: int = 8, seed: int = 0) -> np.ndarray:
    """Return one less the share of the commonest of several sampled answers, (n,).

    Answers are drawn from the model's own probabilities of the choices, as a rollout that must choose would.
    """
    rng = generator(seed, "rollouts")
    shares = []
    for row in log_likelihoods:
        p = _softmax(row)
        shares.append(np.bincount(rng.choice(len(p), size=samples, p=p), minlength=len(p)).max() / samples)
    return 1 - np.array(shares)


def trained_probe(states: np.ndarray, wrong: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Return the log-odds (m,) of a logistic regression on labelled states (n, d), its penalty cross-validated."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        {"logisticregression__C": np.logspace(-5, 0, 6)},
        scoring="roc_auc",
    )
    return model.fit(states, wrong).decision_function(test)


def text_regression(texts: Sequence[str], wrong: np.ndarray, test: Sequence[str]) -> np.ndarray:
    """Return what a ridge regression on the prompts' words and characters makes of other prompts, (m,)."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 4)), RidgeCV(np.logspace(-2, 3, 6)))
    return model.fit(list(texts), wrong).predict(list(test))


def _softmax(values: Any) -> np.ndarray:
    x = np.asarray(values, float)
    p = np.exp(x - x.max())
    return p / p.sum()
