"""Peak memory of a stretch of work: the high-water mark where the system can reset it, sampled elsewhere."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import psutil

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures the peak resident memory of this process, device memory added, between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.exact = _reset_high_water()
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None
        self._highest = 0

    def start(self) -> None:
        """Forget the peak so far."""
        if self.exact:
            _reset_high_water()
        else:
            self._stop.clear()
            self._highest = 0
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        cuda = _cuda()
        if cuda:
            cuda.reset_peak_memory_stats()

    def stop(self) -> tuple[int, bool]:
        """Return (bytes, whether it was sampled)."""
        if self._sampler:
            self._stop.set()
            self._sampler.join()
            self._sampler = None
        peak = _high_water() if self.exact else self._highest
        cuda = _cuda()
        return peak + (cuda.max_memory_allocated() if cuda else 0), not self.exact

    def _sample(self) -> None:
        process = psutil.Process()
        while True:
            self._highest = max(self._highest, process.memory_info().rss)
            if self._stop.wait(0.02):
                return


def _reset_high_water() -> bool:
    try:
        _RESET.write_text("5")
        return _high_water() > 0
    except OSError:
        return False


def _high_water() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _cuda() -> Any:
    """Return ``torch.cuda`` where torch is already loaded and has used a device."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None
