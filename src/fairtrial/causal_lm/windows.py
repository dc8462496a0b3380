"""Text files as documents, and documents as token windows of one length.

Perplexity and calibration need texts of equal token counts: a model that adds a token at the start of a text
(``<bos>``) finds it at the start of every window, because such models do badly without it.

>>> from tokenizers import Tokenizer, models, pre_tokenizers
>>> from transformers import PreTrainedTokenizerFast
>>> words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
>>> words.pre_tokenizer = pre_tokenizers.Whitespace()
>>> cut = windows(PreTrainedTokenizerFast(tokenizer_object=words), ["a b a b a", "b b"], 3, merge=False)
>>> cut.ids.tolist(), cut.documents.tolist()
([[0, 1, 0]], [0])
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fairtrial.errors import InputError


class Windows(NamedTuple):
    """Token windows of one length.

    Attributes
    ----------
    ids
        (n, window) int64.
    documents
        (n,) int64: the index of the document each window begins in.
    """

    ids: torch.Tensor
    documents: torch.Tensor


def windows(tokenizer: Any, texts: str | Path | Sequence[str], window: int, *, merge: bool = True) -> Windows:
    """Cut texts into consecutive windows of ``window`` tokens; what is left over at the end is dropped.

    Parameters
    ----------
    tokenizer
        Of transformers.
    texts
        Documents, or where :func:`read_texts` finds them.
    window
        Tokens a window, with the token the tokenizer puts at the start of a text, if it does.
    merge
        Pack all documents, separated by a blank line, into one stream; ``False`` cuts each document alone, so that no
        window holds text of two, and drops documents shorter than one window.

    Returns
    -------
    Windows
        In the order of the texts.

    Raises
    ------
    InputError
        A window of fewer than two tokens; texts that make less than one window, or that cannot be read.
    """
    texts = read_texts(texts)
    start = _start_tokens(tokenizer)
    body = window - len(start)
    if window < 2 or body < 1:
        raise InputError(f"window={window} leaves no room for text: take at least {len(start) + 2} tokens")
    if merge:
        texts = [f"{text}\n\n" for text in texts[:-1]] + texts[-1:]
    tokens = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    streams = [[token for document in tokens for token in document]] if merge else tokens
    pieces = [torch.tensor(s[: len(s) // body * body], dtype=torch.int64).view(-1, body) for s in streams]
    ids = torch.cat(pieces)  # (n, body)
    if not len(ids):
        longest = max(map(len, streams))
        raise InputError(
            f"the {'texts together have' if merge else 'longest of the texts has'} {longest} tokens, less than one "
            f"window of {body}: give more text or a smaller window"
        )
    if merge:
        ends = torch.tensor([len(document) for document in tokens]).cumsum(0)
        documents = torch.searchsorted(ends, torch.arange(len(ids)) * body, right=True)
    else:
        documents = torch.repeat_interleave(torch.tensor([len(piece) for piece in pieces]))
    return Windows(torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(ids), -1), ids], dim=1), documents)


def _start_tokens(tokenizer: Any) -> list[int]:
    """Return the ids the tokenizer puts before a text."""
    plain, special = (tokenizer("a", add_special_tokens=add)["input_ids"] for add in (False, True))
    before = next((i for i in range(len(special)) if special[i : i + len(plain)] == plain), 0)
    return special[:before]


def read_texts(source: str | Path | Sequence[str]) -> list[str]:
    """Return the documents of a file or folder, or of a list as it is.

    Parameters
    ----------
    source
        A ``.txt`` file (one document), a ``.jsonl`` file (one object with a "text" field a line), a folder of these
        (in the order of their names), or a list of documents.

    Raises
    ------
    InputError
        Nothing there, no text in it, not UTF-8, or a line that is not such an object; the message names file and line.
    """
    if not isinstance(source, (str, Path)):
        texts, place = list(source), "the list of texts"
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise InputError(f"text {i} is a {type(text).__name__}, not a str: give a list of documents")
    else:
        path, place = Path(source), str(source)
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix in _READERS)
            texts = [text for file in files for text in _READERS[file.suffix](file)]
        elif path.is_file() and path.suffix in _READERS:
            texts = _READERS[path.suffix](path)
        else:
            raise InputError(f"{place}: not a .txt or .jsonl file nor a folder of these; texts themselves go in a list")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise InputError(f"{place}: there is no text in it")
    return texts


def _read_txt(file: Path) -> list[str]:
    try:
        return [file.read_text(encoding="utf-8-sig")]  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 at byte {error.start}: save it as UTF-8") from error


def _read_jsonl(file: Path) -> list[str]:
    texts = []
    for number, line in enumerate(_read_txt(file)[0].split("\n"), start=1):  # U+2028 ends no line
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"{file}, line {number}: not a JSON object with a 'text' field") from error
        if not isinstance(text, str):
            raise InputError(f"{file}, line {number}: 'text' is a {type(text).__name__}, not a string")
        texts.append(text)
    return texts


_READERS = {".txt": _read_txt, ".jsonl": _read_jsonl}
