"""A training corpus: utterances with the documents they belong to, as one array of word ids.

Words are runs of letters, in lower case, with English clitics split off: "Don't!" is ``do n't``. Numbers and
punctuation are no words. Everything that counts, bins or searches reads the same array, made in one pass.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import InputError, MissingExtraError, UnknownNameError
from fairtrial.seeds import generator
from fairtrial.tables import read_table

if TYPE_CHECKING:
    import pandas as pd

Ints = NDArray[np.int64]
Unit = Literal["line", "sentence"]
BOUNDARY = 0  # the word id that stands between two utterances

_WORD = re.compile(r"n't\b|'(?:s|d|m|ll|re|ve)\b|[^\W\d_]+", re.IGNORECASE)
_CLITIC = re.compile(r"\b([^\W\d_]+) (n't|'(?:s|d|m|ll|re|ve))\b")
_SENTENCE_END = re.compile(r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z])")
_TEXT_SUFFIXES = (".txt", ".cha")


def tokenise(text: str) -> list[str]:
    """Return the words of a text, in lower case, clitics split.

    >>> tokenise("Mummy's here; don't CRY, 3 times!")
    ['mummy', "'s", 'here', 'do', "n't", 'cry', 'times']
    """
    return [word.lower() for word in _WORD.findall(_spaced(text))]


def _spaced(text: str) -> str:
    return text.replace("’", "'").replace("n't", " n't")


@dataclass(frozen=True, eq=False)
class Corpus:
    r"""Utterances a model learns from.

    Attributes
    ----------
    utterances : tuple of str
        As they are written.
    document : numpy.ndarray
        (U,) int, the document of each utterance.
    times : numpy.ndarray, optional
        (U,) seconds or frame numbers, of a stream.
    frames : pandas.DataFrame, optional
        Columns ``t`` and ``path``, of a stream.

    Examples
    --------
    >>> corpus = Corpus.from_documents(["Look at the dog.\nThe dog sleeps."])
    >>> corpus.utterances, corpus.counts["dog"]
    (('Look at the dog.', 'The dog sleeps.'), 2)
    """

    utterances: tuple[str, ...]
    document: Ints
    times: NDArray[np.float64] | None = None
    frames: pd.DataFrame | None = None

    @classmethod
    def from_documents(cls, texts: Iterable[str], *, unit: Unit = "line") -> Corpus:
        """Return a corpus of texts in memory, one document each.

        Parameters
        ----------
        texts : documents.
        unit : what an utterance is: a ``line``, or a ``sentence`` of running prose whose lines are only wrapped.

        Raises
        ------
        InputError
            There is no word in them.
        """
        if unit not in get_args(Unit):
            raise UnknownNameError("unit", unit, get_args(Unit))
        if isinstance(texts, str):
            raise InputError("texts is one text: give a list of documents")
        utterances: list[str] = []
        document: list[int] = []
        for i, text in enumerate(texts):
            found = _sentences(text) if unit == "sentence" else text.splitlines()
            kept = [" ".join(line.split()) for line in found if _WORD.search(line)]
            utterances += kept
            document += [i] * len(kept)
        if not utterances:
            raise InputError("the corpus has no words: give text, one utterance a line")
        return cls(tuple(utterances), np.array(document, dtype=np.int64))

    @classmethod
    def from_text(cls, paths: str | Path | Sequence[str | Path], *, unit: Unit = "line") -> Corpus:
        """Read text files, one document each.

        Parameters
        ----------
        paths : a file, a folder, a pattern such as ``"transcripts/*.txt"``, or several of these. Files are ``.txt``, or
            ``.cha`` (CHAT transcripts, with pylangacq installed).
        unit : see :meth:`from_documents`.

        Raises
        ------
        InputError
            Nothing there, not UTF-8, or no word in it.
        MissingExtraError
            A ``.cha`` file without pylangacq.
        """
        several = [paths] if isinstance(paths, str | Path) else list(paths)
        files = [file for path in several for file in _files(path)]
        return cls.from_documents((_read(file) for file in files), unit=unit)

    @classmethod
    def from_stream(cls, frames: str | Path | pd.DataFrame, utterances: str | Path | pd.DataFrame) -> Corpus:
        """Read a stream: frames, and utterances with the time each was said.

        Parameters
        ----------
        frames : a CSV or Parquet file (or frame) with the columns ``t`` and ``path``; relative paths start at the
            file's folder. A folder of images named by their time (``12.5.png``) will do.
        utterances : a CSV or Parquet file (or frame) with the columns ``t`` and ``text``.

        Raises
        ------
        InputError
            A column or a time is missing, a listed frame does not exist, an utterance lies outside the frames' times.
        """
        listed = _frames(frames)
        said = _table(utterances, ("t", "text"), "utterances without timestamps cannot be placed in a stream")
        said = said[said.text.notna()]
        said = said[said.text.map(lambda text: bool(_WORD.search(str(text))))].sort_values("t", kind="stable")
        if not len(said):
            raise InputError("the corpus has no words: give utterances")
        step = float(np.median(np.diff(listed.t))) if len(listed) > 1 else 0.0
        outside = said[(said.t < listed.t.min() - step) | (said.t > listed.t.max() + step)]
        if len(outside):
            raise InputError(
                f"{len(outside)} utterances lie outside the frames' times {listed.t.min():g}..{listed.t.max():g}, the "
                f"first at t={outside.t.iloc[0]:g}: give the frames of these times or drop the utterances"
            )
        texts = tuple(" ".join(str(text).split()) for text in said.text)
        return cls(texts, np.zeros(len(texts), dtype=np.int64), said.t.to_numpy(dtype=float), listed)

    def split(self, share: float = 0.1, *, seed: int = 0) -> tuple[Corpus, Corpus]:
        """Return two corpora: to train on, and a random ``share`` of the utterances held out.

        What was said in the same words in both is dropped from the held-out part.
        """
        if not 0 < share < 1:
            raise InputError(f"share={share}: give a share of the utterances, between 0 and 1")
        out = generator(seed, "held out").random(len(self.utterances)) < share
        kept = {" ".join(tokenise(text)) for text, is_out in zip(self.utterances, out, strict=True) if not is_out}
        fresh = out & np.array([" ".join(tokenise(text)) not in kept for text in self.utterances])
        return self._some(~out), self._some(fresh)

    def _some(self, chosen: NDArray[np.bool_]) -> Corpus:
        texts = tuple(text for text, kept in zip(self.utterances, chosen, strict=True) if kept)
        times = None if self.times is None else self.times[chosen]
        return Corpus(texts, self.document[chosen], times, self.frames)

    # ------------------------------------------------------------------------------------------------- word ids

    @cached_property
    def _ids(self) -> tuple[list[str], Ints, NDArray[np.bool_]]:
        """The words, the array of ids and whether each token is capitalised within its utterance."""
        cased: dict[str, int] = {"": BOUNDARY}
        flat: list[int] = [BOUNDARY]
        for text in self.utterances:
            flat += [cased.setdefault(word, len(cased)) for word in _WORD.findall(_spaced(text))]
            flat.append(BOUNDARY)
        lower: dict[str, int] = {}
        to_lower = np.array([lower.setdefault(word.lower(), len(lower)) for word in cased], dtype=np.int64)
        is_upper = np.array([word[:1].isupper() for word in cased])
        tokens = np.array(flat, dtype=np.int64)
        inside = np.concatenate([[False], tokens[:-1] != BOUNDARY])
        return list(lower), to_lower[tokens], is_upper[tokens] & inside

    @property
    def words(self) -> list[str]:
        """The distinct words by id, in order of appearance; id 0 is the boundary, ``""``."""
        return self._ids[0]

    @property
    def tokens(self) -> Ints:
        """(N,) word ids, with a boundary before, between and after utterances."""
        return self._ids[1]

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each word."""
        return {word: i for i, word in enumerate(self.words)}

    @cached_property
    def frequency(self) -> Ints:
        """(V,) how often each word id occurs; the boundary counts 0."""
        frequency = np.bincount(self.tokens, minlength=len(self.words))
        frequency[BOUNDARY] = 0
        return frequency

    @cached_property
    def counts(self) -> dict[str, int]:
        """How often each word occurs."""
        return dict(zip(self.words[1:], self.frequency[1:].tolist(), strict=True))

    @cached_property
    def documents_with(self) -> Ints:
        """(V,) in how many documents each word id occurs."""
        utterance = np.cumsum(self.tokens == BOUNDARY) - 1  # of each token; the last boundary is beyond them all
        document = np.append(self.document, 0)[utterance]
        pairs = np.unique(document * len(self.words) + self.tokens)
        return np.bincount(pairs % len(self.words), minlength=len(self.words))

    @cached_property
    def capitalised(self) -> NDArray[np.float64]:
        """(V,) share of a word's occurrences inside an utterance that are capitalised: near 1 for names."""
        inside = np.concatenate([[False], self.tokens[:-1] != BOUNDARY]) & (self.tokens != BOUNDARY)
        total = np.bincount(self.tokens[inside], minlength=len(self.words))
        upper = np.bincount(self.tokens[self._ids[2]], minlength=len(self.words))
        return upper / np.maximum(total, 1)

    @cached_property
    def _postings(self) -> tuple[Ints, Ints]:
        return np.argsort(self.tokens, kind="stable"), np.append(0, np.bincount(self.tokens)).cumsum()

    def positions(self, word: int) -> Ints:
        """Return where a word id stands in :attr:`tokens`."""
        order, starts = self._postings
        return order[starts[word] : starts[word + 1]]

    def contains(self, words: Sequence[str]) -> bool:
        """Return whether the words occur one after the other within an utterance."""
        wanted = [self.ids.get(word, -1) for word in words]
        if -1 in wanted or not wanted:
            return not wanted
        rarest = min(range(len(wanted)), key=lambda k: self.frequency[wanted[k]])
        starts = self.positions(wanted[rarest]) - rarest
        starts = starts[(starts >= 0) & (starts + len(wanted) <= len(self.tokens))]
        for k, word in enumerate(wanted):
            starts = starts[self.tokens[starts + k] == word]
        return len(starts) > 0

    # ------------------------------------------------------------------------------------------------- writing

    @cached_property
    def _style(self) -> tuple[bool, bool]:
        first = np.mean([text[:1].isupper() for text in self.utterances])
        return bool(first > 0.5), bool(
            np.mean([text.rstrip("\"'").endswith((".", "!", "?")) for text in self.utterances]) > 0.5
        )

    def write(self, words: Sequence[str], *, question: bool = False) -> str:
        r"""Return words as this corpus writes an utterance: clitics joined; capitals and final marks if it has them.

        >>> corpus = Corpus.from_documents(["Look at the dog.\nI sleep."])
        >>> corpus.write(["do", "i", "sleep"], question=True)
        'Do I sleep?'
        """
        capitals, marks = self._style
        text = _CLITIC.sub(r"\1\2", " ".join(words))
        if capitals:
            text = re.sub(r"\bi\b", "I", text[:1].upper() + text[1:])
        return text + ("?" if question else ".") * marks


def _sentences(text: str) -> list[str]:
    r"""Split wrapped prose: paragraphs are set apart by blank lines.

    >>> _sentences("Mr. Knightley smiled. He\nsat down.\n\nCHAPTER II")
    ['Mr. Knightley smiled.', 'He sat down.', 'CHAPTER II']
    """
    paragraphs = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text))
    return [sentence for paragraph in paragraphs if paragraph for sentence in _SENTENCE_END.split(paragraph)]


def _files(path: str | Path) -> list[Path]:
    given = Path(path)
    if given.is_dir():
        found = sorted(file for file in given.iterdir() if file.suffix in _TEXT_SUFFIXES)
    elif given.is_file():
        found = [given]
    else:
        found = sorted(map(Path, glob.glob(str(path))))
    if not found:
        raise InputError(
            f"{path}: no text file there: give a .txt file, a folder of them or a pattern such as 'a/*.txt'"
        )
    return found


def _read(file: Path) -> str:
    if file.suffix == ".cha":
        return _read_chat(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8: {error}: save it as UTF-8") from error


def _read_chat(file: Path) -> str:
    """Return the utterances of a CHAT transcript, one a line; compounds such as ``graham_cracker`` are two words."""
    try:
        from pylangacq import Reader
    except ImportError as error:
        raise MissingExtraError("evaluation", "pylangacq") from error
    said = Reader.from_files([str(file)]).words(by_utterances=True)
    return "\n".join(re.sub(r" ([.,!?])", r"\1", " ".join(words).replace("_", " ")) for words in said)


def _frames(source: str | Path | pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    if isinstance(source, str | Path) and Path(source).is_dir():
        files = sorted(file for file in Path(source).iterdir() if file.suffix in (".png", ".jpg", ".jpeg"))
        try:
            table = pd.DataFrame({"t": [float(file.stem) for file in files], "path": [str(file) for file in files]})
        except ValueError:
            raise InputError(
                f"{source}: name its images by their time, such as 12.5.png, or give a table t,path"
            ) from None
    else:
        table = _table(source, ("t", "path"), "a frame needs its time and its file")
        base = Path(".") if isinstance(source, pd.DataFrame) else Path(source).parent
        table = table.assign(path=[str(base / str(path)) for path in table.path])
    missing = [path for path in table.path if not Path(path).is_file()]
    if missing:
        raise InputError(
            f"{len(missing)} listed frames do not exist, {missing[0]} the first: give them or drop their rows"
        )
    if not len(table):
        raise InputError(f"{source}: no frame in it")
    return table.sort_values("t", kind="stable").reset_index(drop=True)


def _table(source: str | Path | pd.DataFrame, columns: tuple[str, str], why: str) -> pd.DataFrame:
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        table, place = source, "the table"
    else:
        table, place = read_table(source), str(source)
    for column in columns:
        if column not in table:
            raise InputError(f"{place}: no column {column!r}: {why}; give the columns {', '.join(columns)}")
    times: Any = pd.to_numeric(table[columns[0]], errors="coerce")
    if not np.isfinite(times).all():
        row = int((~np.isfinite(times)).to_numpy().argmax())
        raise InputError(f"{place}: row {row} has no time in column 't': {why}")
    return table.assign(t=times.astype(float))[list(columns)]
