"""Sentence embeddings from a transformers encoder on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fairtrial.errors import InputError, MissingExtraError
from fairtrial.quiet import transformers_silent

if TYPE_CHECKING:
    import torch


class SentenceEncoder:
    """Mean-pooled, L2-normalised token states of an encoder: the sentence-transformers convention.

    Parameters
    ----------
    folder : path
        What ``save_pretrained`` of an encoder and its tokenizer wrote.
    device : str or torch.device
    batch_size : int
        Sentences at once; batches are of similar length, so that little is padding.
    max_length : int
        Tokens of a sentence that are read.

    Raises
    ------
    InputError
        If the folder holds no such model.
    MissingExtraError
        If transformers is not installed.
    """

    def __init__(
        self, folder: str | Path, *, device: str | torch.device = "cpu", batch_size: int = 64, max_length: int = 128
    ) -> None:
        try:
            from transformers import AutoModel, AutoTokenizer
        except ImportError as error:
            raise MissingExtraError("lm", "transformers") from error
        if not (Path(folder) / "config.json").is_file():
            raise InputError(f"{folder}: no config.json: give the folder of an encoder saved by save_pretrained")
        with transformers_silent():
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        self.model = model.to(device).eval()
        self.batch_size = batch_size
        self.max_length = max_length

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return the embeddings of ``texts``, (n, d) float32 of length 1, in their order."""
        import torch

        if isinstance(texts, str):
            raise InputError("texts is one string: give a list of strings")
        embeddings = np.zeros((len(texts), self.model.config.hidden_size), dtype=np.float32)
        by_length = np.argsort([len(text) for text in texts], kind="stable")
        for start in range(0, len(texts), self.batch_size):
            rows = by_length[start : start + self.batch_size]
            batch = self.tokenizer(
                [texts[i] for i in rows], padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
            ).to(self.model.device)
            with torch.inference_mode():
                states = self.model(**batch).last_hidden_state.float()  # (b, t, d)
            real = batch["attention_mask"][..., None]
            mean = (states * real).sum(1) / real.sum(1)
            embeddings[rows] = torch.nn.functional.normalize(mean, dim=1).cpu().numpy()
        return embeddings
