"""The code of README and docs is run: a Python block alone, unless the paragraph before it says that it continues the
one above; ``fairtrial`` lines run in between.

A block marked ``no-run <reason>`` (a GPU, an endpoint, a user's model) is only compiled, and its commands must exist.
"""

import functools
import linecache
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)[ \t]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FAIRTRIAL = Path(sys.executable).with_name("fairtrial")


class Block(NamedTuple):
    language: str
    runs: bool
    code: str
    line: int
    continues: bool


def blocks(file: Path) -> Iterator[Block]:
    text = file.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        language, mark, code = match.groups()
        assert not mark or re.fullmatch(r"no-run \S.*", mark), f"{file.name}: say why: ```{language} no-run <reason>"
        before = text[: match.start()].rstrip().rpartition("\n\n")[2]
        line = text.count("\n", 0, match.start(3))
        yield Block(language, not mark, code, line, "continues the one above" in before)


def commands(code: str) -> list[list[str]]:
    """Return the ``fairtrial`` lines of a shell block as words, continued lines joined."""
    lines = code.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("fairtrial ")]


@functools.cache  # a line that several files show is run once
def run(*words: str) -> None:
    ran = subprocess.run([FAIRTRIAL, *words[1:]], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{shlex.join(words)}\n{ran.stdout}{ran.stderr}"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A reader's folder: a model and a text of their own, and candidates in files."""
    from fairtrial.data.tiny import tiny_causal_lm, tiny_texts

    folder = tmp_path_factory.mktemp("reader")
    for part in tiny_causal_lm():
        part.save_pretrained(folder / "my-llama")
    (folder / "my-corpus.txt").write_text("\n".join(tiny_texts()))
    for name, accuracy in (("mine", 0.8), ("base", 0.7)):
        code = f"def accuracy(cell):\n    return {{'accuracy': {accuracy} + cell % 3 / 100}}\n"
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_code_of(file, reader, monkeypatch):
    monkeypatch.chdir(reader)
    monkeypatch.setitem(os.environ, "COLUMNS", "120")
    namespace: dict = {}
    for block in blocks(file):
        if block.language == "python":
            name = f"<{file.name}, line {block.line}>"
            code = compile("\n" * block.line + block.code, name, "exec")
            if block.runs:
                if not block.continues:
                    namespace = {"__name__": "__docs__"}
                # The engine reads the source of candidates, as it would from a file.
                lines = ["\n"] * block.line + block.code.splitlines(keepends=True)
                linecache.cache[name] = (0, None, lines, name)
                exec(code, namespace)
        elif block.language == "bash":
            for words in commands(block.code):
                if not block.runs:
                    run(*words[:2], "--help")
                elif words[1] == "run" and "--preset" not in words:
                    run(*words, "--preset", "smoke")
                else:
                    run(*words)


def test_a_block_that_does_not_run_says_why(tmp_path):
    file = tmp_path / "page.md"
    file.write_text("```python no-run\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="say why"):
        list(blocks(file))


def test_continued_lines_and_comments_are_read_as_a_shell_would():
    assert commands("pip install x\nfairtrial run pruning \\\n  --set a=1  # why\n") == [
        ["fairtrial", "run", "pruning", "--set", "a=1"]
    ]
