"""Readers of the sample texts: Wikipedia articles as clean prose, news, and Jane Austen's novels."""

from __future__ import annotations

import bz2
import gzip
import html
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from fairtrial.data.samples import sample_path
from fairtrial.errors import MissingExtraError

SHORTEST_ARTICLE = 2000
"""Characters of prose an article must have; what is shorter is a stub."""


def wikipedia_articles() -> list[str]:
    """Return the prose of the 89 English articles of the sample ``wikipedia-articles``, in the dump's order.

    Redirects, disambiguation pages, lists and articles under 2000 characters of prose are left out. A paragraph or
    list item is a line.

    Raises
    ------
    MissingSampleError
        If the sample has not been fetched.
    """
    with bz2.open(sample_path("wikipedia-articles", "articles.xml.bz2")) as file:
        root = ElementTree.parse(file).getroot()
    namespace = {"w": root.tag[1:].partition("}")[0]}
    articles = []
    for page in root.iterfind("w:page", namespace):
        markup = page.findtext("w:revision/w:text", "", namespace)
        is_list = page.findtext("w:title", "", namespace).startswith("List of ")
        if is_list or page.find("w:redirect", namespace) is not None or _DISAMBIGUATION.search(markup):
            continue
        prose = wiki_prose(markup)
        if len(prose) >= SHORTEST_ARTICLE:
            articles.append(prose)
    return articles


_DISAMBIGUATION = re.compile(r"\{\{\s*(disambig|disambiguation|geodis|hndis|surname|given name)\b", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LONE_REFERENCE = re.compile(r"<ref\b[^<>]*/>", re.IGNORECASE)
_ELEMENT = re.compile(  # what such an element holds is no prose
    r"<(ref|math|gallery|timeline|score|source|syntaxhighlight|pre|imagemap|table|chem|hiero)\b[^<>]*>.*?</\1\s*>",
    re.DOTALL | re.IGNORECASE,
)
_WEB_LINK = re.compile(r"\[(?:https?:|ftp:)?//[^\s\]]+\s*([^\]]*)\]")
# The innermost template, {{name|arguments}}, or link, [[target|label]]: neither holds another of either.
_INNER = r"((?:(?!\{\{|\}\}|\[\[|\]\]).)*)"
_TEMPLATE_OR_LINK = re.compile(rf"\{{\{{{_INNER}\}}\}}|\[\[{_INNER}\]\]", re.DOTALL)
_NAMESPACE = re.compile(r"\s*(file|image|media|category|[a-z]{2,3}(-[a-z]+)?):", re.IGNORECASE)  # or a language's code
_TABLE = re.compile(r"^[ :]*\{\|(?:(?!^[ :]*\{\|).)*?^\s*\|\}", re.DOTALL | re.MULTILINE)  # innermost
_SECTION = re.compile(r"^==([^=].*?)==\s*$", re.MULTILINE)
_HEADING = re.compile(r"^=+.*?=+\s*$", re.MULTILINE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|__[A-Z]+__")
_LINE_MARKS = re.compile(r"^[*#:;\s]+", re.MULTILINE)
# Marks left behind by what was removed: empty brackets, marks after an opening and before a closing one.
_TIDY = (
    (re.compile(r"\([,;:\s]*\)|\[\s*\]"), ""),
    (re.compile(r"\([,;:\s]+"), "("),
    (re.compile(r"[,;:\s]+\)"), ")"),
    (re.compile(r"[ \t]+([,.;:!?])"), r"\1"),
)
# Templates that are words of their sentence: their last argument is kept; all others are removed.
_WORDS = frozenset(
    ["lang", "transl", "nowrap", "small", "smaller", "angbr", "math", "mvar", "val", "var", "sup", "sub"]
)
_APPENDICES = frozenset([
    "see also", "references", "notes", "external links", "further reading", "bibliography", "footnotes", "citations",
    "sources", "notes and references", "references and notes", "works cited", "gallery", "discography", "filmography",
    "publications",
])  # fmt: skip


def news_articles() -> list[str]:
    """Return the 300 news articles of the sample ``news``, each a line of some 200 words, in the file's order.

    Raises
    ------
    MissingSampleError
        If the sample has not been fetched.
    """
    lines = sample_path("news", "lee_background.cor").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]


def wiki_prose(markup: str) -> str:
    """Return the prose of an article in wiki markup, one paragraph or list item a line.

    Tables, templates, references, files, headings and the appendices (see also, references, ...) are removed;
    links and formatting leave their words.

    >>> wiki_prose("'''Albedo''' ({{IPAc-en|...}}) is the [[reflectance|reflecting power]] of a surface.<ref>A.</ref>")
    'Albedo is the reflecting power of a surface.'
    """
    text = _COMMENT.sub("", markup)
    text = _LONE_REFERENCE.sub("", text)
    text = _ELEMENT.sub("", text)
    text = _WEB_LINK.sub(r"\1", text)
    text = _innermost_first(_TEMPLATE_OR_LINK, _words, text)
    text = _innermost_first(_TABLE, lambda match: "", text)
    lead, *rest = _SECTION.split(text)
    bodies = [
        body for title, body in zip(rest[::2], rest[1::2], strict=True) if title.strip().lower() not in _APPENDICES
    ]
    text = _HEADING.sub("", "\n".join([lead, *bodies]))
    text = _TAG.sub("", text)
    text = re.sub(r"'{2,}", "", text)  # bold and italics
    text = html.unescape(html.unescape(text)).replace("\xa0", " ")  # "&amp;nbsp;" occurs
    text = _LINE_MARKS.sub("", text)
    for pattern, words in _TIDY:
        text = pattern.sub(words, text)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if any(c.isalpha() for c in line))


def _innermost_first(pattern: re.Pattern[str], words: Callable[[re.Match[str]], str], text: str) -> str:
    """Replace matches until none is left; each pass opens the next level outwards."""
    changed = 1
    while changed:
        text, changed = pattern.subn(words, text)
    return text


def _words(match: re.Match[str]) -> str:
    """Return the words a template or link leaves in its sentence."""
    template, link = match.groups()
    if template is not None:
        name, *arguments = (part.strip() for part in template.split("|"))
        if name.lower() in ("convert", "cvt"):  # {{convert|8|km|mi}}: as the source states it
            return " ".join(arguments[:2])
        return arguments[-1] if arguments and name.lower() in _WORDS else ""
    target, *label = link.split("|")
    if _NAMESPACE.match(target):
        return ""
    return label[-1] if label else target.lstrip(":")


def austen_novels() -> dict[str, str]:
    """Return Jane Austen's six completed novels by title, from the sample ``austen``.

    Raises
    ------
    MissingSampleError
        If the sample has not been fetched.
    MissingExtraError
        If rdata is not installed.
    """
    lines = _r_objects(sample_path("austen", "Rdata"))
    return {title: "\n".join(map(str, lines[name])) for name, title in _NOVELS.items()}


_NOVELS = {
    "sensesensibility": "Sense and Sensibility",
    "prideprejudice": "Pride and Prejudice",
    "mansfieldpark": "Mansfield Park",
    "emma": "Emma",
    "northangerabbey": "Northanger Abbey",
    "persuasion": "Persuasion",
}


def _r_objects(base: Path) -> dict[str, Any]:
    """Read the objects of an R package's data: ``base.rdx`` says where each lies in ``base.rdb``, compressed alone."""
    try:
        import rdata
    except ImportError as error:
        raise MissingExtraError("lm", "rdata") from error

    def decode(raw: bytes) -> Any:
        return rdata.conversion.convert(rdata.parser.parse_data(raw, extension=".rds"))

    index = decode(gzip.decompress(base.with_suffix(".rdx").read_bytes()))
    stored = base.with_suffix(".rdb").read_bytes()
    # Each object is preceded by its length in 4 bytes.
    return {
        str(name): decode(zlib.decompress(stored[offset + 4 : offset + length]))
        for name, (offset, length) in index["variables"].items()
    }
