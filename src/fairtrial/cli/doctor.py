"""``fairtrial doctor``: what is installed, what is missing, and the one line to install it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from typing import Any

from fairtrial.cards import AREAS, cards


def examine() -> dict[str, Any]:
    """Return Python, and for each extra its distributions with their installed versions or None."""
    extras: dict[str, dict[str, str | None]] = {}
    for line in importlib.metadata.requires("fairtrial") or []:
        found = re.match(r"([A-Za-z0-9_.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if found and found[2] not in ("all", "dev") and found[1].lower() != "fairtrial":
            extras.setdefault(found[2], {})[found[1]] = _version(found[1])
    return {
        "python": platform.python_version(),
        "fairtrial": _version("fairtrial"),
        "extras": extras,
        "samples": _samples(),
    }


def report(*, as_json: bool) -> None:
    """Print the examination."""
    found = examine()
    if as_json:
        print(json.dumps(found))
        return
    print(f"fairtrial {found['fairtrial']}, Python {found['python']}")
    for extra, distributions in found["extras"].items():
        missing = [name for name, version in distributions.items() if version is None]
        about = AREAS.get(extra, "many machines" if extra == "ray" else "")
        if missing:
            print(f"  {extra:<11} {about}: missing {', '.join(missing)}; run  pip install 'fairtrial[{extra}]'")
        else:
            print(f"  {extra:<11} {about}: complete")
    for sample, here in found["samples"].items():
        if not here:
            print(f"  sample {sample} is not here; run  fairtrial samples get {sample}")


def _samples() -> dict[str, bool]:
    from fairtrial.data.samples import find_sample

    return {name: find_sample(name).folder.is_dir() for card in cards().values() for name in card.samples}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
