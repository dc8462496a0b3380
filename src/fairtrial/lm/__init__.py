"""Language models: methods that change them, steer them and measure them."""

from __future__ import annotations

from importlib import import_module

_EXPORTS = {
    "FiedlerPrune": "pruning",
    "OneShotPrune": "pruning",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return __all__
