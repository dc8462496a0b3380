"""What contexts do to a model's answers: a diagnosis of each, and a report of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fairtrial.causal_lm.prompts import checked_texts, prompt_texts
from fairtrial.errors import InputError, UnknownNameError
from fairtrial.lm.context.answers import (
    answer_vectors,
    checked_choices,
    checked_start,
    choice_of,
    generated_choices,
    joined,
)
from fairtrial.lm.context.geometry import TAU, VERDICTS, corrections
from fairtrial.options import checked_number

if TYPE_CHECKING:
    import pandas as pd

Space = Literal["choices", "hidden", "generate"]


class CorrectionMeter:
    """Measures whether contexts correct a model too little, properly or too much.

    Parameters
    ----------
    model, tokenizer
        A causal language model of transformers.
    space
        Where answers are compared. "choices": probabilities over given choices; the squared error is the Brier score.
        "generate": the choices are what the model itself answers. "hidden": the last hidden state at the answer's
        position, against the mean of such states over contexts that state the answer; for analysis only.
    tau
        See :func:`~fairtrial.lm.context.geometry.corrections`.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> meter = CorrectionMeter(*tiny_causal_lm())
    >>> told = meter.diagnose("w4 w5", ["w7 w9", "w2 w2 w2"], choices=["w8", "w9", "w11"], answer="w9")
    >>> told[["source", "verdict"]].shape
    (2, 2)
    """

    def __init__(self, model: Any, tokenizer: Any, *, space: Space = "choices", tau: float = TAU) -> None:
        if space not in ("choices", "hidden", "generate"):
            raise UnknownNameError("space", space, ["choices", "hidden", "generate"])
        self.model, self.tokenizer, self.space = model, tokenizer, space
        self.tau = checked_number(tau, "tau", least=0, below=1)

    def diagnose(
        self,
        query: str,
        contexts: Sequence[str],
        *,
        answer: str,
        choices: Sequence[str] | None = None,
        sources: Sequence[str] | None = None,
        start: str = "",
        attention: bool = True,
    ) -> pd.DataFrame:
        """Return one row a context.

        Parameters
        ----------
        query
            The question.
        contexts
            n texts that may come before it.
        answer
            The true one; one of the choices.
        choices
            For ``space="choices"``.
        sources
            n names, such as "retrieved"; ``None`` = all "context".
        start
            What the answer begins with, before any choice, such as "The capital of Chad is": a chat model seldom
            begins with the choice itself.
        attention
            Also measure attention, one more pass a context.

        Returns
        -------
        DataFrame with columns ``source``, ``cos``, ``rho``, ``verdict``, ``error_before``, ``error_after``,
        ``efficiency``, ``harmful``, and with ``attention`` ``attention_mass`` and ``complementarity``.

        Raises
        ------
        InputError
            No context, an empty one, an answer that is no choice, a prompt beyond the window.
        """
        import pandas as pd

        contexts, start = checked_texts(contexts, "context"), checked_start(start)
        if not isinstance(answer, str) or not answer.strip():
            raise InputError(f"answer={answer!r}: give a text")
        if (choices is None) == (self.space == "choices"):
            raise InputError('choices= is for space="choices", which needs it: give both or neither')
        if sources is not None and len(checked_texts(sources, "source")) != len(contexts):
            raise InputError(f"{len(sources)} sources for {len(contexts)} contexts: give one each")
        y, truth = self._answers(query, contexts, answer, choices, start)
        found = corrections(y[0], y[1:], truth, tau=self.tau)
        table = pd.DataFrame(
            {
                "source": [*sources] if sources is not None else ["context"] * len(contexts),
                "cos": found.cos,
                "rho": found.rho,
                "verdict": found.verdict,
                "error_before": found.error_before,
                "error_after": found.error_after,
                "efficiency": found.efficiency,
                "harmful": found.harmful,
            }
        )
        if attention:
            seen = [attention_features(self.model, self.tokenizer, query, context, start) for context in contexts]
            table["attention_mass"] = [one[0] for one in seen]
            table["complementarity"] = [one[1] for one in seen]
        return table

    def _answers(
        self, query: str, contexts: list[str], answer: str, choices: Sequence[str] | None, start: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return answers without and with contexts (1 + n, C), and the truth (C,)."""
        prompts = [query, *(joined(query, context) for context in contexts)]
        if self.space == "hidden":
            from fairtrial.causal_lm.hidden import hidden_states
            from fairtrial.causal_lm.layout import find_blocks

            last = len(find_blocks(self.model)[1]) - 1
            stated = [joined(query, f"{lead} {answer}.") for lead in ("The answer is", "It is", "Surely it is")]
            texts = prompt_texts(self.tokenizer, [*prompts, *stated], start=start)
            ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            H = hidden_states(self.model, ids, [last], pooling="last")[:, 0].double().cpu().numpy()
            return H[: len(prompts)], H[len(prompts) :].mean(0)
        if self.space == "generate":
            choices = generated_choices(self.model, self.tokenizer, prompts, start=start, also=[answer])
        names = checked_choices(choices or ())
        truth = np.eye(len(names))[choice_of(answer, names)]
        return answer_vectors(self.model, self.tokenizer, prompts, names, start=start), truth

    def report(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return shares of verdicts and of harm by source, and the share taken of all squared error, of diagnoses.

        The columns ``cos`` and ``rho`` of the rows are the figure: contexts below the line rho = 2 cos help.
        """
        import pandas as pd

        if not isinstance(rows, pd.DataFrame):
            raise InputError("rows: give one table of what diagnose returns, such as pandas.concat of several")
        missing = {"source", "verdict", "harmful", "error_before", "error_after"} - set(rows)
        if missing:
            raise InputError(f"rows: no column {sorted(missing)[0]!r}: give what diagnose returns")
        shares = pd.crosstab(rows["source"], rows["verdict"], normalize="index").reindex(
            columns=[*VERDICTS], fill_value=0.0
        )
        grouped = rows.groupby("source")
        return shares.assign(
            harmful=grouped["harmful"].mean(),
            efficiency=1 - grouped["error_after"].sum() / grouped["error_before"].sum(),
            n=grouped.size(),
        ).rename_axis(columns=None)


def attention_features(model: Any, tokenizer: Any, query: str, context: str, start: str) -> tuple[float, float]:
    """Return attention mass on a context and its complementarity; see :mod:`fairtrial.lm.context.attention`."""
    from fairtrial.lm.context.attention import attention_to

    ids, span = context_span(tokenizer, query, context, start)
    found, _ = attention_to(model, ids, span)
    return found.mass, found.complementarity


def context_span(tokenizer: Any, query: str, context: str, start: str = "") -> tuple[list[int], tuple[int, int]]:
    """Return the tokens of a prompt, and where in it the context's begin and end."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("attention needs a fast tokenizer, which says where in a text its tokens are")
    asked = joined(query, context).strip()  # as a whole: a chat template may hold the words of a short context itself
    (text,) = prompt_texts(tokenizer, [asked], start=start)
    begin = text.index(asked)
    end = begin + len(context.strip())
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [i for i, (a, b) in enumerate(found["offset_mapping"]) if a < end and b > begin and b > a]
    return found["input_ids"], (inside[0], inside[-1] + 1)
