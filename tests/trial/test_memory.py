import time

import numpy as np
import pytest

from fairtrial.trial import memory
from fairtrial.trial.machine import cores, fingerprint, machine
from fairtrial.trial.memory import PeakMemory

MB = 1 << 20


def peak_of(work):
    meter = PeakMemory()
    meter.start()
    work()
    return meter.stop()


def hold(size):
    block = np.ones(size * MB, dtype=np.uint8)
    time.sleep(0.1)
    del block


@pytest.mark.parametrize("exact", [True, False])
def test_the_peak_of_a_stretch_is_its_own_and_says_whether_it_was_sampled(monkeypatch, tmp_path, exact):
    if not exact:
        monkeypatch.setattr(memory, "_RESET", tmp_path / "none" / "clear_refs")
    elif not PeakMemory().exact:
        pytest.skip("this system has no high-water mark to reset")
    high, sampled = peak_of(lambda: hold(200))
    low, _ = peak_of(lambda: hold(1))
    assert sampled is not exact
    assert high - low > 150 * MB


def test_a_fingerprint_tells_threads_apart_and_is_stable():
    assert fingerprint(1) == fingerprint(1) != fingerprint(2)
    assert machine()["cores"] == cores() >= 1
