"""How well edits hold: at their own prompts, at paraphrases, and without touching their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fairtrial.causal_lm.batching import as_rows, default_batch_tokens, length_batches, pad_right
from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.errors import InputError
from fairtrial.lm.editing.edits import Edit, check_edits

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Score:
    """How edits hold.

    Attributes
    ----------
    efficacy : share of edits whose target the model now goes on with, every token the likeliest.
    paraphrase : the same at paraphrases, ``nan`` without any.
    specificity : share of neighbours whose own answer is still the likeliest, ``nan`` without any.
    harmonic : harmonic mean of those three that are there.
    edits : DataFrame with a row an edit: ``efficacy``, ``paraphrase``, ``specificity``.
    """

    efficacy: float
    paraphrase: float
    specificity: float
    harmonic: float
    edits: pd.DataFrame


def score(model: Any, tokenizer: Any, edits: Sequence[Edit]) -> Score:
    """Score edits on a model as it is.

    Examples
    --------
    >>> from fairtrial.data.tiny import tiny_causal_lm
    >>> from fairtrial.lm.editing import Edit, score
    >>> score(*tiny_causal_lm(), [Edit("w4 {} w5", "w9", "w11", paraphrases=("w6 {} w5",))]).edits.shape
    (1, 3)
    """
    import pandas as pd

    check_edits(edits)
    asked, kind, of = [], [], []
    for i, edit in enumerate(edits):
        told = [("efficacy", edit.question, edit.target_new)]
        told += [("paraphrase", text.replace("{}", edit.subject), edit.target_new) for text in edit.paraphrases]
        told += [("specificity", text, answer) for text, answer in edit.neighbours]
        for name, text, answer in told:
            asked.append((text, answer))
            kind.append(name)
            of.append(i)
    right = answered(model, tokenizer, asked)
    frame = pd.DataFrame({"edit": of, "kind": kind, "right": right.astype(float)})
    table = frame.pivot_table(index="edit", columns="kind", values="right").reindex(
        columns=["efficacy", "paraphrase", "specificity"]
    )
    efficacy, paraphrase, specificity = (float(table[name].mean()) for name in table.columns)
    overall = harmonic([efficacy, paraphrase, specificity])
    return Score(efficacy, paraphrase, specificity, overall, table.rename_axis(index=None, columns=None))


def harmonic(values: Sequence[float]) -> float:
    """Return the harmonic mean of the values that are there, 0 where one is 0.

    >>> harmonic([1.0, 0.5, float("nan")])
    0.6666666666666666
    """
    there = [value for value in values if not np.isnan(value)]
    return len(there) / sum(1 / value for value in there) if all(there) else 0.0


def answered(model: Any, tokenizer: Any, asked: Sequence[tuple[str, str]]) -> np.ndarray:
    """Return whether each token of an answer is the likeliest after its prompt, (n,) bool, for (prompt, answer)."""
    whole = [f"{prompt} {answer.strip()}" for prompt, answer in asked]
    found = tokenizer(whole, return_offsets_mapping=True)
    rows = as_rows(model, found["input_ids"], least=2)
    starts = []
    for (prompt, answer), offsets in zip(asked, found["offset_mapping"], strict=True):
        start = next((t for t, (_, end) in enumerate(offsets) if end > len(prompt)), None)
        if not start:
            raise InputError(f"{prompt!r} or its answer {answer!r} has no tokens")
        starts.append(start)
    right = np.zeros(len(rows), bool)
    device = model.get_input_embeddings().weight.device
    with torch.inference_mode(), evaluation_mode(model):
        for batch in length_batches([len(row) for row in rows], default_batch_tokens(model, logits=True)):
            first = min(starts[i] for i in batch)
            ids = pad_right([rows[i] for i in batch])
            logits = model(ids.to(device), use_cache=False, logits_to_keep=ids.shape[1] - first + 1).logits
            likeliest = logits.argmax(2).cpu()  # of places first - 1 ... T - 1
            for b, i in enumerate(batch):
                wanted = rows[i][starts[i] :]
                at = starts[i] - first
                right[i] = torch.equal(likeliest[b, at : at + len(wanted)], wanted)
    return right
