"""Quality of a proof as a reward for training by reinforcement learning, in the form TRL calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.proof_quality.concise import used_share
from fairtrial.evaluation.proof_quality.ease import computational_ease
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.simplicity import Taxonomy, cognitive_simplicity

Reward = Callable[..., list[float]]


def proof_reward(
    metric: Literal["used_share", "ease", "simplicity"] = "used_share",
    weight: float = 0.2,
    require_correct: Reward | None = None,
    *,
    taxonomy: Taxonomy | str | Path | None = None,
) -> Reward:
    """Return a reward function for TRL's trainers: ``weight`` times a score of each completed proof.

    Parameters
    ----------
    metric : ``used_share``, ``ease`` or ``simplicity``, each from 0 to 1.
    weight : of the reward; small beside that of correctness.
    require_correct : a reward function of the same form, such as the verifier's own; a completion to which it gives
        nothing above 0 earns nothing here. Left out, quality is rewarded whether or not the proof is correct: put
        a reward for correctness of more than ``weight`` beside it, or the hard step will be left out.

    Returns
    -------
    callable
        ``reward(prompts, completions, **columns) -> list[float]``; completions are texts or TRL's lists of messages.
        A completion that cannot be read (empty, unbalanced mathematics) earns 0.

    Raises
    ------
    UnknownNameError
        There is no such metric.

    Examples
    --------
    >>> reward = proof_reward("used_share", weight=0.2)
    >>> reward(["Prove it."], [[{"role": "assistant", "content": "Let $a = 1$. Hence $a > 0$."}]])
    [0.2]
    >>> GRPOTrainer(reward_funcs=[correct, proof_reward(require_correct=correct)], ...)  # doctest: +SKIP
    """
    scores: dict[str, Callable[[Proof], float]] = {
        "used_share": used_share,
        "ease": lambda proof: computational_ease(proof).score,
        "simplicity": lambda proof: cognitive_simplicity(proof, taxonomy).score,
    }
    if metric not in scores:
        raise UnknownNameError("reward metric", metric, scores)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        allowed = [1.0] * len(completions)
        if require_correct is not None:
            allowed = require_correct(prompts=prompts, completions=completions, **columns)
        return [
            weight * _score(scores[metric], completion) if correct is not None and correct > 0 else 0.0
            for completion, correct in zip(completions, allowed, strict=True)
        ]

    reward.__name__ = f"proof_{metric}"  # what TRL logs it under
    return reward


def _score(score: Callable[[Proof], float], completion: Any) -> float:
    text = completion if isinstance(completion, str) else "\n".join(message["content"] for message in completion)
    try:
        return score(Proof(text, "completion"))
    except InputError:
        return 0.0
