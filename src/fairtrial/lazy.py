"""Names that a package exports without importing the modules they live in (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's ``__getattr__``, ``__dir__`` and ``__all__``.

    ``homes`` says in which module each name lives: absolute, or relative to the package where it begins with a dot.

    >>> __getattr__, __dir__, __all__ = exports("fairtrial", {"derive": ".seeds"})
    >>> __getattr__("derive").__module__, __all__
    ('fairtrial.seeds', ['derive'])
    """
    names = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name], package), name)

    return get, lambda: names, names
