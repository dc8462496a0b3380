"""One thread for the whole suite: tests state facts, and two threads a process wait for a busy neighbour."""

import os
import signal

import threadpoolctl
from hypothesis import settings

# A slow machine fails nobody.
settings.register_profile("fairtrial", deadline=None)
settings.load_profile("fairtrial")

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
threadpoolctl.threadpool_limits(1)  # the libraries that a plugin of pytest had loaded before (zarr's loads NumPy)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: tests press Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
