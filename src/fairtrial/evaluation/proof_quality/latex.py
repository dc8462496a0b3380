r"""LaTeX as tokens that do not depend on how it was typed: the ground every score of a proof stands on.

A text becomes *pieces*: words of prose, and formulas as tuples of mathematical tokens. Spacing, the size of brackets,
the choice between ``$..$`` and ``\(..\)``, between ``\le`` and ``\leq``, and the macros a document defines for itself
are typography and are gone after this; what is left is what a reader reads.

>>> pieces(r"Let \(x\leq 2\).") == pieces(r"\newcommand{\two}{2} Let  $x \le \two$.")
True
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fairtrial.errors import InputError

FORMULA = "∗"  # stands for a formula in prose
DISPLAYED = "\f"  # after a display without a stop: a sentence may end there


def words(listed: str) -> frozenset[str]:
    """Return the words of a list that is written as text."""
    return frozenset(listed.split())


_SYNONYMS = {
    rf"\{name}": rf"\{canonical}"
    for canonical, names in {
        "le": "leq leqslant",
        "ge": "geq geqslant",
        "ne": "neq",
        "frac": "dfrac tfrac cfrac",
        "binom": "dbinom tbinom",
        "dots": "cdots ldots dotsc dotsb dotsm",
        "to": "rightarrow",
        "wedge": "land",
        "vee": "lor",
        "iff": "Leftrightarrow",
        "implies": "Rightarrow",
        "emptyset": "varnothing",
        "|": "lVert rVert Vert",
    }.items()
    for name in names.split()
} | {r"\lvert": "|", r"\rvert": "|", r"\vert": "|", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\colon": ":"}
_TYPOGRAPHY = words(
    r"\left \right \middle \big \Big \bigg \Bigg \bigl \bigr \Bigl \Bigr \biggl \biggr \, \; \: \! \> \quad \qquad "
    r"\\ & ~ \displaystyle \textstyle \limits \nolimits \nonumber \notag \qed \qedhere \square \blacksquare \hfill "
    r"\noindent \par \smallskip \medskip \bigskip \mathstrut"
) | {"\\ "}
_MATH = "equation|align|gather|multline|eqnarray|displaymath|math|flalign|alignat"
_DELIMITER = re.compile(rf"\\\\|\\\$|\\\(|\\\)|\\\[|\\\]|\$\$|\$|\\(begin|end)\{{((?:{_MATH})\*?)\}}")
_COMMENT = re.compile(r"(?<!\\)%[^\n]*")
_DEFINITION = re.compile(
    r"\\(?:(?:re)?newcommand\*?|providecommand\*?|def)\s*\{?\s*(\\[A-Za-z]+)\s*\}?\s*(?:\[(\d)\])?(?=\s*\{)"
)
_MATH_TOKEN = re.compile(
    r"\\(?:text|textrm|mbox|mathrm|operatorname)\s*\{([^{}]*)\}|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|[^\s]", re.DOTALL
)
_WORD = re.compile(
    r"[\ue000\ue002\ue003][^\ue001]*\ue001|(?:e\.g|i\.e|w\.l\.o\.g|resp|cf|etc|Eq|Fig|Thm)\.|\\[A-Za-z]+\*?|\\."
    r"|[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+(?:\.\d+)?|[^\s{}]",
    re.DOTALL,
)
_LABEL = re.compile(r"\\(?:label|tag\*?)\s*\{([^{}]*)\}")
_HEADED = re.compile(r"^(?=[ \t]*(?:\*\*|\\textbf\{|\\emph\{)?\s*(?:Step|Case|Lemma|Claim)\s+\d)", re.MULTILINE)


class Piece(NamedTuple):
    """One of: a word or mark of prose, a formula's tokens, a label, a reference.

    As words, a new line ends a paragraph, and :data:`DISPLAYED` follows a display that has no stop.
    """

    word: str = ""
    math: tuple[str, ...] = ()
    label: str = ""
    ref: str = ""


def pieces(text: str, where: str = "") -> list[Piece]:
    r"""Return the words and formulas of a LaTeX text, free of typography.

    Parameters
    ----------
    text : LaTeX; macros it defines by ``\newcommand`` or ``\def`` are expanded.
    where : named in errors, such as ``"row 3: "``.

    Raises
    ------
    InputError
        Math or braces that open and do not close, or close and were not opened, with their line and column.
    """
    prose, formulas = _split(_expanded(_Source(_COMMENT.sub(_blank, text), where)))
    found: list[Piece] = []
    for word in _words(prose):
        match word[0]:
            case "\ue002":
                found.append(Piece(label=word[1:-1]))
            case "\ue003":
                found.append(Piece(ref=word[1:-1]))
            case "\ue000":
                tokens = formulas[int(word[2:-1])]
                # A stop at the end of a display belongs to the sentence around it.
                stop = tokens[-1] if tokens and tokens[-1] in (".", ",", ";") else ""
                if math := tokens[:-1] if stop else tokens:
                    found.append(Piece(math=math))
                if stop or word[1] == "d":
                    found.append(Piece(stop or DISPLAYED))
            case _:
                found.append(Piece(word))
    return found


def _blank(match: re.Match[str]) -> str:
    """Return as much white space as was matched, so that what follows keeps its place."""
    return " " * len(match[0])


class _Source:
    """A text whose macros are being expanded, and where each of its characters was written."""

    def __init__(self, text: str, where: str = "") -> None:
        self.text = self.written = text
        self.where = where
        self.origin: Sequence[int] = range(len(text))

    def place(self, at: int) -> str:
        """Return the line and column, from 1, where the character ``at`` was written: of a macro, where it is used."""
        at = self.origin[at]
        return f"line {self.written.count(chr(10), 0, at) + 1}, column {at - self.written.rfind(chr(10), 0, at)}"

    def put(self, start: int, end: int, text: str) -> None:
        """Replace a part of the text."""
        origin = self.origin
        self.origin = [*origin[:start], *[origin[start]] * len(text), *origin[end:]]
        self.text = self.text[:start] + text + self.text[end:]


def _expanded(source: _Source) -> _Source:
    """Expand the macros that the text defines, innermost uses included."""
    macros: dict[str, tuple[int, str]] = {}
    while match := _DEFINITION.search(source.text):
        body, end = _group(source, match.end())
        macros[match[1]] = int(match[2] or 0), body
        source.put(match.start(), end, "")
    if not macros:
        return source
    use = re.compile("|".join(rf"{re.escape(name)}(?![A-Za-z])" for name in macros))
    for _ in range(10_000):  # a macro that calls itself would never end
        match = use.search(source.text)
        if match is None:
            return source
        count, body = macros[match[0]]
        end = match.end()
        for i in range(count):
            argument, end = _group(source, end)
            body = body.replace(f"#{i + 1}", argument)
        source.put(match.start(), end, body)
    raise InputError(f"{source.where}the macros {', '.join(macros)} call each other without end: expand them first")


def _group(source: _Source, at: int) -> tuple[str, int]:
    """Return the argument that begins at ``at``, a braced group or one token, and where it ends."""
    text = source.text
    while at < len(text) and text[at].isspace():
        at += 1
    if at == len(text):
        raise InputError(f"{source.where}the text ends where a macro's argument is missing: give it")
    if text[at] != "{":
        token = _MATH_TOKEN.match(text, at)
        assert token is not None
        return token[0], token.end()
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[at + 1 : i], i + 1
    raise InputError(f"{source.where}unbalanced brace: opened at {source.place(at)} and never closed: close it")


def _split(source: _Source) -> tuple[str, list[tuple[str, ...]]]:
    """Return the prose, with a numbered mark for each formula, and the formulas."""
    text, where = source.text, source.where
    prose: list[str] = []
    formulas: list[tuple[str, ...]] = []
    closing, opened, at, inner = "", 0, 0, False  # inner: between the $ of a \text{..} inside a display
    for match in _DELIMITER.finditer(text):
        sign = match[0]
        if sign in (r"\\", r"\$"):
            continue
        if not closing:
            if sign in (r"\)", r"\]") or match[1] == "end":
                place = source.place(match.start())
                raise InputError(f"{where}unbalanced math: {sign!r} at {place} closes what was not opened: open it")
            prose.append(text[at : match.start()])
            ends = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
            closing, opened, at = ends.get(sign, rf"\end{{{match[2]}}}"), match.start(), match.end()
        elif sign == closing:
            formula = text[at : match.start()]
            prose += [f"\ue002{label.strip('()')}\ue001" for label in _LABEL.findall(formula)]
            kind = "i" if closing in ("$", r"\)") else "d"  # inline or displayed
            prose.append(f"\ue000{kind}{len(formulas)}\ue001")
            formulas.append(math_tokens(_LABEL.sub(_blank, formula), source, at))
            closing, at = "", match.end()
        elif sign == "$" and closing != "$":
            inner = not inner
        else:
            raise InputError(
                f"{where}unbalanced math: {sign!r} at {source.place(match.start())} while the math opened at "
                f"{source.place(opened)} is still open; add {closing!r} between"
            )
    if closing:
        raise InputError(f"{where}unbalanced math: opened at {source.place(opened)} and never closed; add {closing!r}")
    prose.append(text[at:])
    return "".join(prose), formulas


def math_tokens(formula: str, source: _Source | None = None, at: int = 0) -> tuple[str, ...]:
    r"""Return the tokens of a formula: commands, letters one by one, numbers, signs, and braces round several tokens.

    ``source`` is the text that holds the formula at ``at``, for the place in errors.

    >>> math_tokens(r"x^{2} \leq \left( 2ab \right)")
    ('x', '^', '2', '\\le', '(', '2', 'a', 'b', ')')
    """
    source = source or _Source(formula)
    tokens: list[str] = []
    opened: list[tuple[int, int]] = []  # how many tokens came before an open brace, and its place
    for match in _MATH_TOKEN.finditer(formula):
        token = match[0]
        if match[1] is not None:
            tokens += [f'"{word}' for word in re.findall(r"[^\s$]+", match[1])]  # words inside a formula
        elif token == "{":
            opened.append((len(tokens), match.start()))
            tokens.append(token)
        elif token == "}":
            if not opened:
                place = source.place(at + match.start())
                raise InputError(f"{source.where}unbalanced brace: '}}' at {place} closes none: remove it")
            start, _ = opened.pop()
            if len(tokens) - start <= 2:  # braces round nothing or a single token
                del tokens[start]
            else:
                tokens.append(token)
        elif token not in _TYPOGRAPHY and token != "$":
            tokens.append(_SYNONYMS.get(token, token))
    if opened:
        place = source.place(at + opened[-1][1])
        raise InputError(f"{source.where}unbalanced brace: opened at {place} and never closed: close it")
    return tuple(tokens)


def _words(prose: str) -> Iterator[str]:
    """Yield words, marks and formula marks of prose; commands that only set type are dropped, their text is kept."""
    prose = _HEADED.sub("\n\n", prose)
    prose = re.sub(r"\\(?:begin|end)\s*\{[^{}]*\}(?:\[[^\]]*\])?|\\item\b", " \n\n ", prose)
    prose = re.sub(r"\\(?:eq)?ref\s*\{([^{}]*)\}", "\ue003\\1\ue001", prose)
    prose = _LABEL.sub("\ue002\\1\ue001", prose)
    paragraphs = re.split(r"\n\s*\n", prose)
    for i, paragraph in enumerate(paragraphs):
        if i:
            yield "\n"
        for match in _WORD.finditer(paragraph):
            if match[0][0] not in '\\~`"*#_':
                yield match[0]
