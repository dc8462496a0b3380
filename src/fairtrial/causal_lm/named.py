"""A causal language model by what a trial's parameter says: a sample, a path, or the tiny random one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairtrial.causal_lm.loading import check_device, check_loadable, load
from fairtrial.data.samples import cache_folder, find_sample, sample_path
from fairtrial.errors import InputError

DESCRIPTION = "a sample, 'tiny' (random, for tests), a save_pretrained folder or a .gguf file"


def load_named(name: str, *, device: str = "cpu", tiny_layers: int = 2) -> tuple[Any, Any]:
    """Return model and tokenizer of a name; "tiny" has ``tiny_layers`` blocks.

    >>> model, tokenizer = load_named("tiny", tiny_layers=3)
    >>> model.config.num_hidden_layers
    3
    """
    from fairtrial.data.tiny import tiny_causal_lm

    if name == "tiny" and not Path(name).exists():
        model, tokenizer = tiny_causal_lm(layers=tiny_layers)
        return model.to(device), tokenizer
    path = Path(name) if Path(name).exists() else sample_path(name)
    return load(path, device=device, cache=cache_folder() / "models")


def check_named(name: str, *, device: str = "cpu") -> None:
    """Refuse, without loading, what :func:`load_named` would.

    Raises
    ------
    InputError
        No such file or folder; one that is no model; a device this machine lacks.
    MissingSampleError, UnknownNameError
        A sample that has not been fetched, or that there is not.
    """
    check_device(device)
    if name == "tiny":
        return
    if Path(name).exists():
        check_loadable(name)
    elif "/" in name or "." in name:
        raise InputError(f"model={name}: no such file or folder")
    else:
        sample_path(find_sample(name).name)


def check_text_named(text: str) -> None:
    """Refuse what is neither "wikipedia" (the sample), "tiny", nor a file or folder.

    Raises
    ------
    InputError
        No such file or folder.
    MissingSampleError
        The sample has not been fetched.
    """
    if text == "wikipedia":
        sample_path("wikipedia-articles")
    elif text != "tiny" and not Path(text).exists():
        raise InputError(f"text={text}: no such file or folder")
