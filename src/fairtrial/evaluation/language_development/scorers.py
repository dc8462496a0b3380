"""Scorers: what turns sentences, or sentences and images, into numbers that a bench compares.

Any callable from a list of N texts to N numbers is a scorer. The two here return log p(text) in nats, of the whole
text and not a token's mean, which would favour words that split into many tokens. Both record their convention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from fairtrial.causal_lm.batching import as_rows, default_batch_tokens, length_batches, pad_right
from fairtrial.causal_lm.capture import evaluation_mode
from fairtrial.causal_lm.likelihood import cache_name
from fairtrial.errors import InputError

Scores = NDArray[np.float64]
Scorer = Callable[[list[str]], Any]
_WORTHWHILE = 2  # tokens that sharing a prefix must save


class CausalScorer:
    """log p(text) under a causal language model, what texts have in common at their beginning read once.

    Parameters
    ----------
    model, tokenizer
        Of transformers.
    start : int, optional
        The token every text begins after. Left out: the tokenizer's bos, or else its eos token.
    batch_tokens : int, optional
        Tokens a batch; left out, by device and vocabulary.

    Raises
    ------
    InputError
        There is no bos and no eos token and no ``start``: the first token would have no probability.

    Notes
    -----
    Called with N texts it returns (N,) float64: the sum of the log-probabilities of all their tokens after ``start``,
    nan where a text has tokens unknown to the tokenizer. No end token is scored.

    Examples
    --------
    >>> scorer = CausalScorer.from_pretrained("./my-babylm")                      # doctest: +SKIP
    >>> good, bad = scorer(["The dogs sleep.", "The dogs sleeps."])               # doctest: +SKIP
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, start: int | None = None, batch_tokens: int | None = None
    ) -> None:
        first = start if start is not None else tokenizer.bos_token_id
        if first is None:
            first = tokenizer.eos_token_id
        if first is None:
            raise InputError("the tokenizer has no bos and no eos token: give start=, the id that texts begin after")
        self.model, self.tokenizer, self.start = model, tokenizer, int(first)
        self.batch_tokens = batch_tokens or default_batch_tokens(model, logits=True)
        self.convention = (
            f"sum of log-probabilities of all tokens after {tokenizer.convert_ids_to_tokens(self.start)!r}"
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, *, device: str = "cpu") -> CausalScorer:
        """Load a model that :func:`fairtrial.causal_lm.loading.load` can load."""
        from fairtrial.causal_lm.loading import load

        return cls(*load(path, device=device))

    def __call__(self, texts: Sequence[str]) -> Scores:
        """Return log p of each text."""
        encoded = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        scores = np.full(len(texts), np.nan)
        places: dict[tuple[int, ...], list[int]] = {}
        for i, ids in enumerate(encoded):
            if not ids:
                raise InputError(f"text {i} has no tokens: give non-empty texts")
            if self.tokenizer.unk_token_id is None or self.tokenizer.unk_token_id not in ids:
                places.setdefault((self.start, *ids), []).append(i)
        distinct = sorted(places)
        if distinct:
            rows = as_rows(self.model, [list(ids) for ids in distinct], least=2)
            for ids, value in zip(distinct, self._log_likelihoods(rows), strict=True):
                scores[places[ids]] = value
        return scores

    def _log_likelihoods(self, rows: list[torch.Tensor]) -> list[float]:
        """Return log p of rows of ids in lexical order, each after its first."""
        results = [0.0] * len(rows)
        with torch.inference_mode(), evaluation_mode(self.model):
            for batch in _prefix_batches(shared_prefixes(rows), rows, self.batch_tokens):
                prefix = torch.stack([rows[group[0]][:length] for length, group in batch])  # (G, P)
                share = [(g, i) for g, (_, group) in enumerate(batch) for i in group]
                tails = [rows[i][prefix.shape[1] :] for _, i in share]
                more = max(map(len, tails)) > 1  # the prefix predicts each tail's first token
                output = self._forward(prefix, use_cache=more)
                log_p = output.logits.float().log_softmax(-1)  # (G, P, V)
                head = _taken(log_p[:, :-1], prefix[:, 1:])  # (G,)
                owner = torch.tensor([g for g, _ in share])
                first = log_p[owner, -1, [int(tail[0]) if len(tail) else 0 for tail in tails]].cpu()  # (B,)
                total = head[owner] + torch.where(torch.tensor([len(t) > 0 for t in tails]), first, 0.0)
                if more:
                    name = cache_name(self.model)
                    cache = getattr(output, name)
                    cache.batch_select_indices(owner.to(prefix.device))
                    padded = pad_right([tail if len(tail) else prefix[0, :1] for tail in tails])  # (B, T)
                    logits = self._forward(padded[:, :-1], **{name: cache}).logits  # (B, T - 1, V)
                    lengths = torch.tensor([max(len(tail), 1) for tail in tails])
                    live = torch.arange(1, padded.shape[1]) < lengths[:, None]
                    total = total + _taken(logits.float().log_softmax(-1), padded[:, 1:], live)
                for (_, i), value in zip(share, total.double().tolist(), strict=True):
                    results[i] = value
        if not np.isfinite(results).all():
            raise InputError("a likelihood is not finite: the model overflows its dtype or is damaged")
        return results

    def _forward(self, ids: torch.Tensor, **how: Any) -> Any:
        return self.model(ids.to(self.model.get_input_embeddings().weight.device), **{"use_cache": True, **how})


def _taken(log_p: torch.Tensor, targets: torch.Tensor, live: torch.Tensor | None = None) -> torch.Tensor:
    """Return (B,) the sum over positions of log_p (B, T, V) at ``targets`` (B, T), where ``live``; on the CPU."""
    taken = log_p.gather(-1, targets.to(log_p.device)[..., None])[..., 0].cpu()
    return taken.sum(1) if live is None else torch.where(live, taken, 0.0).sum(1)


def shared_prefixes(rows: Sequence[torch.Tensor]) -> list[tuple[int, list[int]]]:
    """Group rows in lexical order by what they begin with: (length shared, indices), where that saves tokens.

    A group of k rows that share P tokens reads (k - 1) P tokens fewer; a row joins as long as that grows.

    >>> rows = [torch.tensor(row) for row in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 7])]
    >>> shared_prefixes(rows)
    [(4, [0, 1]), (2, [2])]
    """
    groups: list[tuple[int, list[int]]] = []
    length, group = 0, [0]
    for i in range(1, len(rows) + 1):
        if i < len(rows):
            n = min(len(rows[i - 1]), len(rows[i]))
            differs = (rows[i - 1][:n] != rows[i][:n]).nonzero()
            common = int(differs[0]) if len(differs) else n
            shared = min(length, common) if len(group) > 1 else common
            saved = (len(group) - 1) * length
            if len(group) * shared >= saved + _WORTHWHILE:
                length = shared
                group.append(i)
                continue
        groups.append((length if len(group) > 1 else len(rows[group[0]]), group))
        group, length = [i], 0
    return groups


def _prefix_batches(
    groups: list[tuple[int, list[int]]], rows: Sequence[torch.Tensor], budget: int
) -> Iterator[list[tuple[int, list[int]]]]:
    """Yield groups of one prefix length batch by batch, of similar tails, within ``budget`` tokens with padding."""

    def tail(group: tuple[int, list[int]]) -> int:
        return max(len(rows[i]) for i in group[1]) - group[0]

    batch: list[tuple[int, list[int]]] = []
    widest = members = 0
    for group in sorted(groups, key=lambda group: (group[0], tail(group), group[1])):
        widest, members = max(widest, tail(group)), members + len(group[1])
        if batch and (group[0] != batch[0][0] or group[0] * (len(batch) + 1) + widest * members > budget):
            yield batch
            batch, widest, members = [], tail(group), len(group[1])
        batch.append(group)
    if batch:
        yield batch


class MaskedScorer:
    """Pseudo-log-likelihood of texts under a masked language model (Salazar et al. 2020).

    The sum over a text's tokens of log p(token | the other tokens), where the later tokens of the same word are masked
    too (Kauf and Ivanova 2023): otherwise the pieces of a rare or made-up word give each other away. Special tokens are
    not scored. Parameters and errors as for :class:`CausalScorer`; the tokenizer must be a fast one with a mask token.

    Called with N texts it returns (N,) float64, nan where a text has tokens unknown to the tokenizer.
    """

    convention = "sum of log-probabilities of each token masked together with the later tokens of its word"

    def __init__(self, model: Any, tokenizer: Any, *, batch_tokens: int | None = None) -> None:
        if tokenizer.mask_token_id is None:
            raise InputError("the tokenizer has no mask token: a causal model takes CausalScorer")
        self.model, self.tokenizer = model, tokenizer
        self.batch_tokens = batch_tokens or default_batch_tokens(model, logits=True)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, device: str = "cpu") -> MaskedScorer:
        """Load a folder as ``save_pretrained`` writes it; nothing is fetched."""
        from transformers import AutoModelForMaskedLM, AutoTokenizer

        if not (Path(path) / "config.json").is_file():
            raise InputError(f"{path}: not a model: it has no config.json; save_pretrained writes one")
        model = AutoModelForMaskedLM.from_pretrained(path, local_files_only=True, use_safetensors=True)
        return cls(model.to(device).eval(), AutoTokenizer.from_pretrained(path, local_files_only=True))

    def __call__(self, texts: Sequence[str]) -> Scores:
        """Return the pseudo-log-likelihood of each text."""
        encoding = self.tokenizer(list(texts), return_special_tokens_mask=True, verbose=False)
        scores = np.zeros(len(texts))
        rows: list[torch.Tensor] = []
        asked: list[tuple[int, int, int]] = []  # of each row its text, place and token
        for i, ids in enumerate(encoding["input_ids"]):
            if self.tokenizer.unk_token_id is not None and self.tokenizer.unk_token_id in ids:
                scores[i] = np.nan
                continue
            words, special = encoding.word_ids(i), encoding["special_tokens_mask"][i]
            for place in (k for k in range(len(ids)) if not special[k]):
                row = torch.tensor(ids)
                same = [k for k in range(place, len(ids)) if words[k] == words[place]]
                row[same] = self.tokenizer.mask_token_id
                rows.append(row)
                asked.append((i, place, ids[place]))
        device = self.model.get_input_embeddings().weight.device
        with torch.inference_mode(), evaluation_mode(self.model):
            for batch in length_batches([len(row) for row in rows], self.batch_tokens):
                padded = pad_right([rows[j] for j in batch])
                there = torch.arange(padded.shape[1]) < torch.tensor([len(rows[j]) for j in batch])[:, None]
                logits = self.model(padded.to(device), attention_mask=there.long().to(device)).logits
                places = torch.tensor([asked[j][1] for j in batch])
                at = logits[torch.arange(len(batch)), places].float()  # (B, V)
                tokens = torch.tensor([asked[j][2] for j in batch], device=at.device)
                for j, value in zip(batch, (-F.cross_entropy(at, tokens, reduction="none")).tolist(), strict=True):
                    scores[asked[j][0]] += value
        return scores


class SimilarityScorer:
    """Cosine similarity of images and texts in a common space, for L4.

    Parameters
    ----------
    image_fn : maps a list of n images (as the bench's ``images`` hold them) to (n, d).
    text_fn : maps n texts to (n, d).

    Examples
    --------
    >>> scorer = SimilarityScorer(lambda images: np.eye(2)[images], lambda texts: np.eye(2)[[len(t) for t in texts]])
    >>> scorer.similarity([0, 1], ["a"]).tolist()
    [[0.0], [1.0]]
    """

    def __init__(
        self, image_fn: Callable[[list[Any]], Any], text_fn: Callable[[list[str]], Any], *, convention: str = "cosine"
    ) -> None:
        self.image_fn, self.text_fn, self.convention = image_fn, text_fn, convention

    def similarity(self, images: Sequence[Any], texts: Sequence[str]) -> Scores:
        """Return the (images, texts) cosines."""
        return unit_rows(self.image_fn(list(images))) @ unit_rows(self.text_fn(list(texts))).T

    @classmethod
    def from_pretrained(cls, path: str | Path, *, device: str = "cpu") -> SimilarityScorer:
        """Load a CLIP checkpoint from a folder as ``save_pretrained`` writes it; images are paths of picture files."""
        from transformers import AutoTokenizer, CLIPModel

        if not (Path(path) / "config.json").is_file():
            raise InputError(f"{path}: not a model: it has no config.json; save_pretrained writes one")
        model = CLIPModel.from_pretrained(path, local_files_only=True, use_safetensors=True).to(device).eval()
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        size = model.config.vision_config.image_size

        def image_fn(images: list[Any]) -> Any:
            with torch.inference_mode():
                pixels = torch.stack([_clip_pixels(path, size) for path in images]).to(device)
                return model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output).cpu()

        def text_fn(texts: list[str]) -> Any:
            with torch.inference_mode():
                encoding = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
                return model.text_projection(model.text_model(**encoding).pooler_output).cpu()

        return cls(image_fn, text_fn, convention="cosine of CLIP's projected embeddings")


_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def _clip_pixels(path: Any, size: int) -> torch.Tensor:
    """Return (3, size, size): a picture file on white, its shorter side scaled to ``size``, the middle, normalised."""
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    scale = size / min(picture.size)
    width, height = (max(size, round(side * scale)) for side in picture.size)
    left, top = (width - size) // 2, (height - size) // 2
    picture = picture.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
    pixels = torch.from_numpy(np.array(picture, dtype=np.float32)).permute(2, 0, 1) / 255
    return (pixels - torch.tensor(_CLIP_MEAN)[:, None, None]) / torch.tensor(_CLIP_STD)[:, None, None]


def unit_rows(rows: Any) -> Scores:
    """Return rows (n, d) scaled to length 1; a zero row stays zero."""
    array = np.asarray(rows, dtype=np.float64)
    return array / np.maximum(np.linalg.norm(array, axis=-1, keepdims=True), 1e-12)
