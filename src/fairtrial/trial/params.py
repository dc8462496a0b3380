"""Parameters of a trial: checked once, whether they come from ``--set``, a YAML file or Python keywords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from fairtrial.data.samples import list_samples
from fairtrial.errors import FairtrialError, InputError, UnknownNameError
from fairtrial.trial.code import digest_path
from fairtrial.trial.declare import Input, Trial

_EXPONENT = r"(?:[eE][-+]?[0-9]+)"
_FLOAT = rf"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*{_EXPONENT}?|{_EXPONENT})|\.[0-9]+{_EXPONENT}?|\.(?:inf|Inf))|\.nan"


class _Loader(yaml.SafeLoader):
    """YAML without numbers to the base 60 (``2:4`` is a pattern, not 124) and without dates."""


_NUMBERS = {"tag:yaml.org,2002:int": r"[-+]?[0-9][0-9_]*", "tag:yaml.org,2002:float": _FLOAT}
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, re.compile(rf"^(?:{_NUMBERS[tag]})$") if tag in _NUMBERS else pattern)
        for tag, pattern in resolvers
        if tag != "tag:yaml.org,2002:timestamp"
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def make_params(trial: Trial, preset: str | None = None, values: Mapping[str, Any] | None = None) -> BaseModel:
    """Return the trial's parameters: defaults, then the preset, then ``values``.

    Raises
    ------
    UnknownNameError : an unknown preset or parameter (the known ones are listed).
    InputError : a value out of range, with the parameter's name and what is allowed.
    """
    if preset is not None and preset not in trial.presets:
        raise UnknownNameError("preset", preset, trial.presets)
    merged = {**(trial.presets[preset] if preset else {}), **(values or {})}
    for name in merged:
        if name not in trial.params.model_fields:
            raise UnknownNameError(f"parameter of {trial.name}", name, trial.params.model_fields)
    try:
        return trial.params.model_validate(merged)
    except ValidationError as error:
        raise InputError(_explain(trial, error)) from None


def _explain(trial: Trial, error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        name = ".".join(map(str, problem["loc"])) or "parameters"
        if isinstance(cause, FairtrialError):
            lines.append(f"{name}: {cause}")
            continue
        field = trial.params.model_fields.get(str(problem["loc"][0])) if problem["loc"] else None
        about = f" ({field.description})" if field and field.description else ""
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{name}={problem['input']!r}: {message[0].lower()}{message[1:]}{about}")
    return "; ".join(lines)


def parse_settings(settings: list[str], file: Path | None = None) -> dict[str, Any]:
    """Return the values of ``key=value`` strings over those of a YAML file; values are read as YAML.

    >>> parse_settings(["sparsity=0.6", "intra=[wanda, magnitude]", "model=./my-llama"])
    {'sparsity': 0.6, 'intra': ['wanda', 'magnitude'], 'model': './my-llama'}
    >>> parse_settings(["pattern=2:4", "rate=1e-3", "seeds=10", "auto=true"])
    {'pattern': '2:4', 'rate': 0.001, 'seeds': 10, 'auto': True}
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.load(file.read_text(encoding="utf-8"), _Loader)
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{file} is not a YAML file: {str(error).splitlines()[0]}") from None
        if not isinstance(loaded or {}, dict):
            raise InputError(f"{file}: expected 'name: value' lines")
        values.update(loaded or {})
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name.strip():
            raise InputError(f"--set {setting!r}: write it as name=value")
        try:
            values[name.strip()] = yaml.load(text, _Loader) if text.strip() else ""
        except yaml.YAMLError:
            values[name.strip()] = text
    return values


def key_of(params: BaseModel) -> dict[str, Any]:
    """Return the parameters that results depend on: all but those of scope 'plan', inputs as their own names.

    Input files are named by content in the key (see :func:`input_digests`), so where they lie does not count.
    """
    values = params.model_dump(mode="json")
    return {
        name: None if _is_input(field) and _path_of(getattr(params, name)) else values[name]
        for name, field in type(params).model_fields.items()
        if not (isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get("scope") == "plan")
    }


def input_digests(params: BaseModel) -> dict[str, str]:
    """Return the digests of the files, folders and samples that the parameters name."""
    samples = list_samples()
    found = {}
    for name, field in type(params).model_fields.items():
        value = getattr(params, name)
        if not _is_input(field):
            continue
        if path := _path_of(value):
            found[name] = digest_path(path)
        elif value in samples:
            found[name] = samples[value].sha256
    return found


def _is_input(field: Any) -> bool:
    return any(item is Input or isinstance(item, Input) for item in field.metadata)


def _path_of(value: Any) -> Path | None:
    """Return the value as a path if something lies there, else None: the name of a sample."""
    if not value:
        return None
    path = Path(value)
    return path if path.exists() else None
