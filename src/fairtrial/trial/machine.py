"""What ran a trial: the machine, and the versions of what was imported."""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

from fairtrial.trial.code import digest


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def machine() -> dict[str, Any]:
    """Return processor, cores, memory in bytes, system, Python and, where torch is loaded, the GPU."""
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpu": gpu,
    }


def fingerprint(threads: int) -> str:
    """Return a name of the machine as far as times depend on it."""
    here = machine()
    return digest(here["processor"], str(here["cores"]), str(threads), str(here["gpu"]), platform.node())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
