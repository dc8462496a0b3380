"""What code a result depends on: a digest of each piece, so that a change explains itself.

``code_of(measure)`` returns ``{"lm/pruning/fiedler.py": "3f0c...", "numpy": "2.4.6", ...}``: the syntax trees
(docstrings and comments dropped) of every ``fairtrial`` module that is reached by imports, and the versions of the
distributions those import. Of the module that holds ``measure`` itself only the definitions that it uses count, so that
rewording a claim there computes nothing again.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import io
import os
import pickle
import site
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fairtrial

PACKAGE = Path(fairtrial.__file__).parent
NOT_COUNTED = ("fairtrial.trial", "fairtrial.report", "fairtrial.cli", "fairtrial.errors", "fairtrial.cards")
STANDARD = frozenset(sys.stdlib_module_names)


class NoSourceError(Exception):
    """A callable's code cannot be seen, so its results cannot be recognised later."""


def digest(*parts: bytes | str) -> str:
    """Return 16 hex digits of BLAKE2b over ``parts``, each delimited by its length."""
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "big"))
        h.update(raw)
    return h.hexdigest()


def code_of(*callables: Callable, uses: Iterable[str] = (), boundary: Collection[str] = ()) -> dict[str, str]:
    """Return the components that the callables and the modules in ``uses`` depend on, name to digest or version.

    Parameters
    ----------
    callables : functions, classes or objects; their defaults, closures and the globals they name are followed.
    uses : ``fairtrial`` modules to follow as wholes, by absolute name.
    boundary : ``fairtrial`` modules not to enter from ``callables``: what other candidates use.

    Raises
    ------
    NoSourceError : a callable has neither source nor bytecode (a builtin, a C function).
    """
    walk = _Walk(frozenset(boundary))
    for function in callables:
        walk.value(function)
    walk.boundary = frozenset()
    for name in uses:
        if not module_file(name):
            raise NoSourceError(f"there is no module {name!r}")
        walk.module(name, used=True)
    return {"python": "{}.{}".format(*sys.version_info), **dict(sorted(walk.found.items()))}


class _Walk:
    """Follows code from objects and modules, each once."""

    def __init__(self, boundary: frozenset[str]) -> None:
        self.boundary = boundary
        self.found: dict[str, str] = {}
        self.seen: set[int] = set()
        self.held: list[Any] = []  # keeps ids in `seen` from being reused

    # modules -----------------------------------------------------------------------------------------------------

    def module(self, name: str, *, used: bool = False) -> None:
        """Follow the module called ``name``: ours and local files as syntax trees, all others as versions.

        The machinery of trials counts only where a candidate names it as ``used``: the study of verdicts does.
        """
        top = name.partition(".")[0]
        if name in self.boundary or top in STANDARD or (name.startswith(NOT_COUNTED) and not used):
            return
        file = module_file(name) if top == "fairtrial" else local_file(name)
        if file is None:
            if top != "fairtrial":
                for distribution, version in distributions(top):
                    self.found[distribution] = version
            return
        key = file.relative_to(PACKAGE).as_posix() if top == "fairtrial" else name
        if key in self.found:
            return
        tree_digest, imports = _parsed(file, file.stat().st_mtime_ns, name, file.name == "__init__.py")
        self.found[key] = tree_digest
        for imported in imports:
            self.module(imported)

    # values ------------------------------------------------------------------------------------------------------

    def value(self, thing: Any, name: str = "") -> None:
        """Follow any object that code refers to as ``name``."""
        if id(thing) in self.seen:
            return
        if isinstance(thing, types.ModuleType):
            self.module(thing.__name__)
        elif isinstance(thing, types.FunctionType):
            self._once(thing)
            self.function(thing)
        elif isinstance(thing, types.MethodType):
            self.value(thing.__func__)
            self.value(thing.__self__, name)
        elif isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self.value(part, name)
        elif callable(wrapped := getattr(thing, "__wrapped__", None)):  # functools.cache, numba.njit
            self.value(wrapped, name)
        elif isinstance(thing, type):
            self._once(thing)
            self.klass(thing)
        elif inspect.isroutine(thing):  # compiled: known by its name and the version of its module
            home = getattr(thing, "__objclass__", thing).__module__
            if home is None:
                raise NoSourceError(f"{thing!r} is compiled: its code cannot be seen")
            self.named(thing, home)
        else:
            try:
                self._add(f"value of {name or type(thing).__name__}", digest_value(thing))
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise NoSourceError(f"{name or type(thing).__name__} has no digest ({error})") from None
            self.inside(thing)

    def inside(self, thing: Any) -> None:
        """Follow the code that a value holds: its class, its functions, the estimators of a pipeline."""
        if id(thing) in self.seen or thing is None or isinstance(thing, bool | int | float | complex | str | bytes):
            return
        if isinstance(thing, type | types.ModuleType | functools.partial) or inspect.isroutine(thing):
            self.value(thing)
            return
        self._once(thing)
        kind = type(thing)
        if kind.__module__ != "builtins":
            self.value(kind)
        if isinstance(thing, list | tuple | set | frozenset):
            parts = list(thing)
        elif isinstance(thing, Mapping):
            parts = list(thing.values())
        elif hasattr(thing, "get_params"):
            parts = list(thing.get_params(deep=False).values())
        elif dataclasses.is_dataclass(thing) or not self.whole(kind.__module__):
            parts = list(getattr(thing, "__dict__", {}).values())
        else:
            parts = []
        for part in parts:
            self.inside(part)

    def _add(self, label: str, value: str) -> None:
        """Note a component; several of one label (the lambdas of a module) are digested together."""
        self.found[label] = digest(self.found[label], value) if label in self.found else value

    def _once(self, thing: Any) -> None:
        self.seen.add(id(thing))
        self.held.append(thing)

    def named(self, thing: Any, module: str) -> None:
        """Note which thing of a module is meant, and follow the module."""
        self.found[f"{module}:{thing.__qualname__}"] = "named"
        self.module(module)

    def function(self, function: types.FunctionType) -> None:
        """Follow a function: by its module where that is not its home, otherwise by itself and what it names."""
        if self.whole(function.__module__):
            self.named(function, function.__module__)
            return
        label = f"{function.__module__}:{function.__qualname__}"
        tree = _source_tree(function)
        self._add(label, digest(ast.dump(tree) if tree else _bytecode(function.__code__)))
        for imported in _imports(tree, function.__module__, False) if tree else ():
            self.module(imported)
        values = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell, free in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            try:
                self.value(cell.cell_contents, f"{label}.{free}")
            except ValueError:  # a cell not yet filled: a recursive local function
                continue
        for value in values:
            self.value(value, f"{label} default")
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:  # else an attribute or a builtin: code objects do not tell them apart
                self.value(function.__globals__[name], f"{function.__module__}.{name}")

    def klass(self, cls: type) -> None:
        """Follow a class: by its module where that is not its home, otherwise by source and methods."""
        if self.whole(cls.__module__):
            self.named(cls, cls.__module__)
            return
        tree = _source_tree(cls)
        if tree is not None:
            self._add(f"{cls.__module__}:{cls.__qualname__}", digest(ast.dump(tree)))
        for member in vars(cls).values():
            for name in ("__func__", "fget", "func"):  # of class methods, properties, cached properties
                member = getattr(member, name, member)
            if isinstance(member, types.FunctionType):
                self.value(member)
        for base in cls.__bases__:
            self.value(base)

    @staticmethod
    def whole(module: str | None) -> bool:
        """Whether things of ``module`` are followed as that whole module: all but trials and users' own scripts."""
        if module is None or module == "__main__":
            return False
        if module.startswith("fairtrial."):
            return not module.endswith((".trial", ".command"))
        top = module.partition(".")[0]
        return local_file(module) is None and (top in STANDARD or bool(distributions(top)))


# ------------------------------------------------------------------------------------------------------------- parsing


@functools.cache
def _parsed(file: Path, _modified: int, name: str, package: bool) -> tuple[str, tuple[str, ...]]:
    tree = _without_docstrings(ast.parse(file.read_text(encoding="utf-8")))
    return digest(ast.dump(tree)), tuple(_imports(tree, name, package))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            node.body
            and isinstance(node.body[0], ast.Expr)
            and isinstance(node.body[0].value, ast.Constant)
            and isinstance(node.body[0].value.value, str)
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def _imports(tree: ast.AST, module: str, package: bool) -> Iterator[str]:
    """Yield the absolute names of modules that ``tree`` imports, wherever in it; typing-only blocks left out."""
    for node in _running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + package]
                base = ".".join([*parents, *filter(None, [base])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                is_module = module_file(submodule) if base.startswith("fairtrial") else submodule in sys.modules
                yield submodule if is_module else base


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node but those of statements that only a type checker reads."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _source_tree(thing: Callable) -> ast.Module | None:
    """Return the syntax tree of a function or class, or None where its source is not a statement of its own."""
    if getattr(thing, "__name__", "") == "<lambda>":
        return None  # the line that holds a lambda holds more than the lambda: its bytecode is exact
    try:
        return _without_docstrings(ast.parse(textwrap.dedent(inspect.getsource(thing))))
    except (OSError, TypeError, SyntaxError):
        return None


def _bytecode(code: types.CodeType) -> str:
    constants = [_bytecode(c) if isinstance(c, types.CodeType) else digest_value(c) for c in code.co_consts]
    return repr((code.co_code, code.co_names, code.co_varnames, constants, sys.version_info[:2]))


def _names(code: types.CodeType) -> set[str]:
    """Return the global names that ``code`` and the functions inside it may refer to."""
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, types.CodeType)), ())


# --------------------------------------------------------------------------------------------------------------- files


@functools.cache
def module_file(name: str) -> Path | None:
    """Return the file of a ``fairtrial`` module without importing it."""
    base = PACKAGE.parent.joinpath(*name.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return file
    return None


@functools.cache
def _installed_roots() -> tuple[Path, ...]:
    roots = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(Path(root).resolve() for root in roots)


def local_file(name: str) -> Path | None:
    """Return the file of a module that is the user's own: neither standard library nor installed."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        top = name.partition(".")[0]
        if top != name and local_file(top) is None:
            return None  # finding a module imports its package: only the user's own may cost that
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        file = spec.origin if spec else None
    if not file or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    return None if any(path.is_relative_to(root) for root in _installed_roots()) else path


@functools.cache
def distributions(top: str) -> tuple[tuple[str, str], ...]:
    """Return (name, version) of the distributions that provide the import package ``top``."""
    try:  # nearly always the distribution is named as the package is
        return ((top, importlib.metadata.version(top)),)
    except importlib.metadata.PackageNotFoundError:
        names = _packages().get(top, ())
        return tuple((name, importlib.metadata.version(name)) for name in sorted(set(names)))


@functools.cache
def _packages() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


# -------------------------------------------------------------------------------------------------------------- values


def digest_value(value: Any) -> str:
    """Return a digest of a value that is the same in every process.

    Numbers, strings, containers, arrays, frames, scikit-learn estimators (``get_params``) and pydantic models are
    digested by content, functions and classes by name (their code is followed apart); anything else by its pickle.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return digest(type(value).__name__, repr(value))
    if isinstance(value, type | types.FunctionType | types.ModuleType):
        return digest(getattr(value, "__module__", ""), getattr(value, "__qualname__", value.__name__))
    if isinstance(value, list | tuple):
        return digest(type(value).__name__, *map(digest_value, value))
    if isinstance(value, set | frozenset):
        return digest("set", *sorted(map(digest_value, value)))
    if isinstance(value, Mapping):
        return digest("map", *(part for k, v in value.items() for part in (digest_value(k), digest_value(v))))
    if isinstance(value, os.PathLike):
        return digest("path", os.fspath(value))
    if hasattr(value, "get_params"):
        return digest(type(value).__qualname__, digest_value(value.get_params(deep=True)))
    if hasattr(value, "model_dump_json"):
        return digest(type(value).__qualname__, value.model_dump_json())
    if hasattr(value, "__array__") and hasattr(value, "dtype") and not value.dtype.hasobject:
        array = value.__array__()
        return digest("array", str(array.dtype), repr(array.shape), array.tobytes())
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return digest(type(value).__qualname__, digest_value(fields))
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=4).dump(value)
    return digest("pickle", buffer.getvalue())


class _Pickler(pickle.Pickler):
    """Pickles what differs from process to process (the user's functions and classes, sets) by its digest."""

    def persistent_id(self, thing: Any) -> str | None:
        """Return the digest that stands for ``thing``, or None to pickle it."""
        if isinstance(thing, type | types.FunctionType | types.ModuleType | set | frozenset):
            return digest_value(thing)
        return None


def digest_path(path: str | os.PathLike[str]) -> str:
    """Return a digest of the content of a file, or of all files of a folder with their names."""
    root = Path(path)
    if root.is_file():
        return _digest_file(root, root.stat().st_mtime_ns, root.stat().st_size)
    files = sorted(file for file in root.rglob("*") if file.is_file())
    return digest(
        *(
            part
            for file in files
            for part in (
                file.relative_to(root).as_posix(),
                _digest_file(file, file.stat().st_mtime_ns, file.stat().st_size),
            )
        )
    )


@functools.cache
def _digest_file(file: Path, _modified: int, _size: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8)).hexdigest()  # type: ignore[arg-type]
