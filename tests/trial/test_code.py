"""Digests of the user's own callables: they change with what they depend on, and with nothing else."""

import functools
import os
import re
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from fairtrial.trial.code import NoSourceError, code_of, digest_value

# ruff: noqa: E501  (pairs of little scripts, a line each)


def compiled(text, **names):
    """Return f of a script: as in a notebook without files, only bytecode can be seen."""
    scope = {"__name__": "__main__", **names}
    exec(textwrap.dedent(text), scope)
    return scope["f"]


def same(one, two):
    return code_of(one) == code_of(two)


def test_bytecode_stands_in_where_there_is_no_source():
    assert same(compiled("def f(x): return x + 1"), compiled("def f(x):\n    # a comment\n    return x + 1"))
    assert not same(compiled("def f(x): return x + 1"), compiled("def f(x): return x + 2"))
    assert not same(compiled("f = lambda x: x.mean()"), compiled("f = lambda x: x.sum()"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("K = 1\ndef f(x): return x + K", "K = 2\ndef f(x): return x + K"),
        ("def g(x): return x\ndef f(x): return g(x)", "def g(x): return -x\ndef f(x): return g(x)"),
        ("def f(x, k=1): return x + k", "def f(x, k=2): return x + k"),
        ("def f(x, *, k=1): return x + k", "def f(x, *, k=2): return x + k"),
        ("def outer(k):\n    return lambda x: x + k\nf = outer(1)", "def outer(k):\n    return lambda x: x + k\nf = outer(2)"),
        ("G = {'a': lambda x: 1, 'b': lambda x: 2}\ndef f(x): return G", "G = {'a': lambda x: 3, 'b': lambda x: 2}\ndef f(x): return G"),
        ("import functools\n@functools.cache\ndef g(x): return x\ndef f(x): return g(x)",
         "import functools\n@functools.cache\ndef g(x): return -x\ndef f(x): return g(x)"),
        ("class C:\n    def m(self): return 1\ndef f(x): return C().m()", "class C:\n    def m(self): return 2\ndef f(x): return C().m()"),
        ("class C:\n    @staticmethod\n    def m(): return 1\ndef f(x): return C.m()",
         "class C:\n    @staticmethod\n    def m(): return 2\ndef f(x): return C.m()"),
        ("class C:\n    @property\n    def m(self): return 1\ndef f(x): return C().m",
         "class C:\n    @property\n    def m(self): return 2\ndef f(x): return C().m"),
        ("class B:\n    def m(self): return 1\nclass C(B): pass\ndef f(x): return C().m()",
         "class B:\n    def m(self): return 2\nclass C(B): pass\ndef f(x): return C().m()"),
        ("class C:\n    def __call__(self, x): return 1\nf = C()", "class C:\n    def __call__(self, x): return 2\nf = C()"),
        ("class C:\n    def __init__(self, k): self.k = k\n    def __call__(self, x): return self.k\nf = C(1)",
         "class C:\n    def __init__(self, k): self.k = k\n    def __call__(self, x): return self.k\nf = C(2)"),
        ("import functools\ndef g(k, x): return k\nf = functools.partial(g, 1)", "import functools\ndef g(k, x): return k\nf = functools.partial(g, 2)"),
        ("def f(x): return [y for y in x if y > 1]", "def f(x): return [y for y in x if y > 2]"),
    ],
)  # fmt: skip
def test_a_change_anywhere_in_what_a_callable_reaches_is_seen(before, after):
    assert same(compiled(before), compiled(before))
    assert not same(compiled(before), compiled(after))


def test_names_that_are_not_used_do_not_count():
    assert same(compiled("K = 1\ndef f(x): return x"), compiled("K = 2\ndef f(x): return x"))


def test_a_registry_that_holds_the_function_itself_ends():
    assert code_of(compiled("R = {}\ndef f(x): return R\nR['f'] = f"))


def test_loggers_patterns_and_arrays_have_digests():
    text = "import logging, re\nL = logging.getLogger('x')\nP = re.compile('a+')\ndef f(x): L.info(P.match(x)); return A.sum()"
    one = compiled(text, A=np.arange(3))
    assert same(one, compiled(text, A=np.arange(3)))
    assert not same(one, compiled(text, A=np.arange(4)))


def test_what_cannot_be_digested_says_so():
    with pytest.raises(NoSourceError, match="LOCK has no digest"):
        code_of(compiled("def f(x): return LOCK", LOCK=threading.Lock()))
    with pytest.raises(NoSourceError):
        code_of("text".upper)


@pytest.mark.parametrize(
    ("one", "two"), [(np.mean, np.median), (str.upper, str.lower), (len, abs), (np.add, np.subtract)]
)
def test_functions_of_others_are_told_apart_by_name(one, two):
    assert code_of(one) == code_of(one) != code_of(two)
    assert code_of(functools.partial(map, one)) != code_of(functools.partial(map, two))


def test_versions_of_what_functions_import_are_components():
    found = code_of(compiled("def f(x):\n    return np.mean(x)", np=np))
    assert found["numpy"] == np.__version__


def test_an_estimators_parameters_and_its_own_class_count():
    text = """
    class Mine:
        def __init__(self, k): self.k = k
        def get_params(self, deep=True): return {"k": self.k}
        def fit(self, X): return ONE
    ONE = 1
    E = Mine(3)
    def f(x): return E
    """
    assert same(compiled(text), compiled(text))
    assert not same(compiled(text), compiled(text.replace("Mine(3)", "Mine(4)")))
    assert not same(compiled(text), compiled(text.replace("ONE = 1", "ONE = 2")))


@dataclass
class Point:
    x: float
    tags: set


@pytest.mark.parametrize(
    "value",
    [3, 2.5, "x", b"x", None, True, [1, "a"], {"b": 1, "a": {3, 1}}, Path("x"), np.arange(4.0), Point(1.0, {"p", "q"}),
     {frozenset({"s", "t"})}, re.compile("z"), functools.reduce, np.random.default_rng(3)],
)  # fmt: skip
def test_digests_of_values_know_content(value):
    assert digest_value(value) == digest_value(value)
    assert digest_value(value) != digest_value([value, value])


def test_digests_tell_types_and_shapes_apart():
    values = [1, 1.0, "1", True, [1], (1,), {1}, {1: 1}, np.array([1]), np.array([[1]]), np.array([1.0]), None]
    assert len({digest_value(v) for v in values}) == len(values)


SCRIPT = """
from fairtrial.trial.code import code_of, digest_value
class C:
    def __init__(self): self.names = {"a", "b", "c", "d"}
    def __call__(self, x): return x in {"u", "v", "w"}
K = {"p", "q", "r"}
print(code_of(C(), lambda x: x in {"k", "l", "m"}, lambda x: K), digest_value(C()))
"""


def test_digests_are_the_same_in_every_process(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    outputs = {
        subprocess.run(
            [sys.executable, str(file)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_a_local_package_is_followed_into_its_modules(tmp_path, monkeypatch):
    package = tmp_path / "mypkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("K = 1\n")
    (tmp_path / "myscript.py").write_text("from mypkg import inner\n\ndef f(x):\n    return inner.K\n")
    monkeypatch.syspath_prepend(tmp_path)
    import myscript

    found = code_of(myscript.f)
    assert {"myscript:f", "mypkg.inner"} <= found.keys()
    (package / "inner.py").write_text("K = 22\n")
    assert code_of(myscript.f)["mypkg.inner"] != found["mypkg.inner"]
