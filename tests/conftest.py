"""One thread for the whole suite: tests state facts, and two threads a process wait for a busy neighbour."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
