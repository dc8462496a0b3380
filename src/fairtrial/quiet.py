"""A library call is silent: what transformers prints on its own is held back."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


@contextmanager
def transformers_silent() -> Iterator[None]:
    """Switch transformers' progress bars and advice off inside.

    Its bar for GGUF knows no switch and goes to whatever ``sys.stderr`` is.
    """
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
