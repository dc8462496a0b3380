"""Machine-DevBench: a benchmark generated from the words of a training corpus.

Items come in cells of a phenomenon and a frequency bin, as many a cell as the wanted power needs; a cell whose words do
not suffice stays small and is reported so, never padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.language_development.corpus import Corpus
from fairtrial.evaluation.language_development.grammar import Grammar
from fairtrial.evaluation.language_development.lexical import (
    Contexts,
    odd_one_out,
    word_in_context,
    word_or_pseudoword,
)
from fairtrial.evaluation.language_development.lexicon import Vocabulary, vocabulary
from fairtrial.evaluation.language_development.pictures import Pictures
from fairtrial.evaluation.language_development.power import detectable_accuracy, items_needed
from fairtrial.evaluation.language_development.templates import PHENOMENA
from fairtrial.options import checked_count, checked_number

if TYPE_CHECKING:
    import pandas as pd

LEXICAL = {"pseudo_word": "L1", "word_in_context": "L2", "odd_one_out": "L3"}
PICTURED = {"picture_of_word": "L4", "word_of_picture": "L4"}
TASK_OF = {**LEXICAL, **PICTURED, **dict.fromkeys(PHENOMENA, "grammar")}
COLUMNS = ("id", "task", "phenomenon", "bin", "word", "count", "good", "bad", "context", "images", "frame", "seen")
FEWEST_TYPES = 50
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class DevBench:
    """Items with what they were made for.

    Attributes
    ----------
    items : pandas.DataFrame
        One row an item: ``id``; ``task`` (L1, L2, L3, L4 or grammar); ``phenomenon``; ``bin`` = floor(log_4 count);
        ``word`` it is about, with its ``count`` in the corpus; ``good``; ``bad``, a list of alternatives; ``context``,
        what good and bad share; ``images``, a list whose first is the right one; ``frame``, what items with other words
        share; ``seen``, whether the context is from the training corpus.
    per_cell : int
        Items that were wanted in a cell.
    chance_margin : float
        The accuracy over chance that a cell should detect.
    seed : int
    notes : tuple of str
        What was left out and why.
    """

    items: pd.DataFrame
    per_cell: int
    chance_margin: float
    seed: int
    notes: tuple[str, ...] = ()

    def power(self) -> pd.DataFrame:
        """Return of each cell its items and words, those needed to detect chance + margin, and what it detects.

        Columns: task, phenomenon, bin, items, words, chance, needed, enough, detectable (the least accuracy that has
        power .8 at level .05).
        """
        import pandas as pd

        rows = []
        for (task, phenomenon, bin), cell in self.items.groupby(["task", "phenomenon", "bin"], sort=False):
            chance = chance_of(cell.iloc[0])
            needed = items_needed(min(1.0, chance + self.chance_margin), chance)
            rows.append(
                {
                    "task": task,
                    "phenomenon": phenomenon,
                    "bin": bin,
                    "items": len(cell),
                    "words": cell.word.nunique(),
                    "chance": chance,
                    "needed": needed,
                    "enough": len(cell) >= needed,
                    "detectable": detectable_accuracy(len(cell), chance),
                }
            )
        return pd.DataFrame(rows)

    def save(self, folder: str | Path) -> Path:
        """Write ``items.jsonl`` and ``bench.json``; the same bench gives the same bytes."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False, default=str) for row in self.items.to_dict(orient="records")]
        (folder / "items.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        about = {
            "format": _FORMAT,
            "per_cell": self.per_cell,
            "chance_margin": self.chance_margin,
            "seed": self.seed,
            "notes": list(self.notes),
        }
        (folder / "bench.json").write_text(json.dumps(about, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> DevBench:
        """Read what :meth:`save` wrote.

        Raises
        ------
        InputError
            The files are missing, damaged, or of another format.
        """
        import pandas as pd

        folder = Path(folder)
        try:
            about = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
            lines = (folder / "items.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise InputError(f"{folder}: not a bench: {error}: give a folder written by DevBench.save") from error
        wanted = {field.name for field in fields(cls)} - {"items"}
        known = isinstance(about, dict) and about.pop("format", None) == _FORMAT and set(about) == wanted
        if not known or not isinstance(about["notes"], list):
            raise InputError(f"{folder / 'bench.json'}: not of format {_FORMAT}: generate the bench again")
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict) or set(row) != set(COLUMNS):
                raise InputError(f"{folder / 'items.jsonl'}, line {number}: not an item of a bench: generate it again")
        return cls(pd.DataFrame(rows, columns=list(COLUMNS)), **{**about, "notes": tuple(about["notes"])})


def chance_of(item: Any) -> float:
    """Return the accuracy of guessing: one over the number of alternatives."""
    return 1 / max(1 + len(item.bad), len(item.images))


def build_devbench(
    corpus: Corpus | Vocabulary,
    *,
    tasks: Literal["all"] | Sequence[str] = "all",
    per_cell: int = 194,
    chance_margin: float = 0.1,
    contexts: Corpus | None = None,
    pictures: pd.DataFrame | None = None,
    seed: int = 0,
) -> DevBench:
    r"""Generate a benchmark of the words of a training corpus.

    Parameters
    ----------
    corpus : what the model was trained on, or its vocabulary (with a tagger or a filter of your own).
    tasks : "all", or tasks (``L1``, ``L2``, ``L3``, ``L4``, ``grammar``) and phenomena by name.
    per_cell : items wanted in each cell of phenomenon and bin; 194 detect .6 over .5 with power .8.
    chance_margin : the accuracy over chance that :meth:`DevBench.power` asks a cell to detect.
    contexts : utterances held out from training (:meth:`Corpus.split`) for L1 and L2; left out, those of the corpus
        itself, and L2 is marked seen.
    pictures : for L4, see :class:`~.pictures.Pictures`.
    seed : the same seed and corpus give the same bench, byte by byte.

    Returns
    -------
    DevBench

    Raises
    ------
    InputError
        Nothing can be generated; the message says why.
    UnknownNameError
        An unknown task.

    Notes
    -----
    After "Machine-DevBench" of the EgoBabyVLM paper: corpus-grounded items in logarithmic frequency bins. Bins, items
    and sampling are ours. Word frequencies solve no item of the grammar: each word is in good and bad members alike.

    Examples
    --------
    >>> from fairtrial.evaluation.language_development import child_directed_speech
    >>> speech = Corpus.from_documents(["\n".join(child_directed_speech(500))])
    >>> bench = build_devbench(speech, tasks=["negation"], per_cell=20)
    >>> bench.items.columns[:3].tolist(), set(bench.items.task)
    (['id', 'task', 'phenomenon'], {'grammar'})
    """
    import pandas as pd

    words = corpus if isinstance(corpus, Vocabulary) else vocabulary(corpus)
    per_cell = checked_count(per_cell, "per_cell", least=2)
    chance_margin = checked_number(chance_margin, "chance_margin", above=0, most=1)
    wanted = _wanted(tasks, pictures)
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    for phenomenon, make in _makers(words, contexts or words.corpus, pictures, per_cell, seed, wanted, notes):
        made = [make(bin) for bin in range(1 + max(words.bins.values(), default=-1))]
        if not any(made):
            notes.append(f"{phenomenon}: the corpus has not the words for it")
        rows += [
            {**item, "count": words.counts[item["word"]], "id": f"{phenomenon}-{bin}-{k}"}
            for bin, items in enumerate(made)
            for k, item in enumerate(items)
        ]
    if len(words.counts) < FEWEST_TYPES:
        remain = ", ".join(dict.fromkeys(row["phenomenon"] for row in rows)) or "none"
        notes.insert(0, f"the corpus has only {len(words.counts)} distinct words: of the phenomena remain: {remain}")
    if not rows:
        raise InputError(f"no item can be made: {'; '.join(notes)}: give more text")
    return DevBench(pd.DataFrame(rows, columns=list(COLUMNS)), per_cell, chance_margin, seed, tuple(notes))


Maker = Callable[[int], list[dict[str, Any]]]


def _makers(
    words: Vocabulary,
    contexts: Corpus,
    pictures: pd.DataFrame | None,
    per_cell: int,
    seed: int,
    wanted: Sequence[str],
    notes: list[str],
) -> Iterator[tuple[str, Maker]]:
    """Yield for each phenomenon what makes the items of a bin."""
    if {"pseudo_word", "word_in_context"} & {*wanted}:
        places = Contexts(words, contexts)
    if {*PHENOMENA} & {*wanted} and words.english:
        grammar = Grammar(words)
    if {*PHENOMENA, "odd_one_out"} & {*wanted} and not words.english:
        notes.append("the corpus is not English: no grammar and no L3, whose templates are; the lexical tasks stand")
    if pictures is not None and {*PICTURED} & {*wanted}:
        shown = Pictures(pictures, words)
        for bin in range(1 + max(words.bins.values())):
            n = sum(words.bins[word] == bin for word in shown.images)
            if n and not shown.groups(bin):
                notes.append(f"L4: no category has four words with pictures in bin {bin} ({n} words in all)")
    for phenomenon in wanted:
        if phenomenon == "pseudo_word":
            yield phenomenon, lambda bin: word_or_pseudoword(places, bin, per_cell, seed)
        elif phenomenon == "word_in_context":
            yield phenomenon, lambda bin: word_in_context(places, bin, per_cell, seed)
        elif phenomenon in PICTURED:
            yield phenomenon, lambda bin, name=phenomenon: shown.items(name, bin, per_cell, seed)  # type: ignore[misc]
        elif words.english and phenomenon == "odd_one_out":
            yield phenomenon, lambda bin: odd_one_out(words, bin, per_cell, seed)
        elif words.english:
            yield phenomenon, lambda bin, name=phenomenon: grammar.items(name, bin, per_cell, seed)  # type: ignore[misc]


def _wanted(tasks: Literal["all"] | Sequence[str], pictures: pd.DataFrame | None) -> list[str]:
    """Return the phenomena that ``tasks`` name, in the order of :data:`TASK_OF`."""
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    for name in names:
        if name not in ("all", *TASK_OF.values(), *TASK_OF):
            raise UnknownNameError("task", name, ["all", *TASK_OF.values(), *TASK_OF])
    named = [p for p, task in TASK_OF.items() if "all" in names or task in names or p in names]
    if pictures is None and names != ["all"] and (left := [p for p in named if p in PICTURED]):
        raise InputError(f"{left[0]} needs pictures: give pictures= with the columns image, word and category")
    return [phenomenon for phenomenon in named if pictures is not None or phenomenon not in PICTURED]
