"""Reader of the sample ``mmlu-dev``: multiple-choice questions of 57 subjects."""

from __future__ import annotations

import json
import re

import pandas as pd

from fairtrial.data.samples import sample_path

# Choices follow on one line or on lines of their own.
_QUESTION = re.compile(
    r"(?P<question>.*?)\n\(A\) ?(?P<A>.*?)\s\(B\) ?(?P<B>.*?)\s\(C\) ?(?P<C>.*?)\s\(D\) ?(?P<D>.*?)\n"
    r"A: .*[Tt]he answer is \(?(?P<answer>[ABCD])\)?",
    re.DOTALL,
)


def mmlu_development() -> pd.DataFrame:
    """Return the 281 of MMLU's development questions, shown as examples in its prompts, that have four choices.

    Returns
    -------
    DataFrame with columns ``subject``, ``question``, ``A``, ``B``, ``C``, ``D`` (the choices) and ``answer`` ("A" to
    "D").

    Raises
    ------
    MissingSampleError
        If the sample ``mmlu-dev`` has not been fetched.
    """
    prompts = json.loads(sample_path("mmlu-dev", "cot_prompts.json").read_text(encoding="utf-8"))
    rows = [
        {"subject": subject, **match.groupdict()}
        for subject, prompt in prompts.items()
        for text in re.split(r"^Q: ", prompt, flags=re.MULTILINE)[1:]
        if (match := _QUESTION.match(text)) and "(E)" not in match["D"]
    ]
    return pd.DataFrame(rows)
