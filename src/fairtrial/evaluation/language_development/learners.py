"""Small learners of words from a stream: contrastive with the frame at hand or with frames around, and by counting.

All take features of frames and timed utterances, and score every frame with every text:

    learner.fit(features (N, ...), times (U,), texts) ;  learner.score(features (n, ...), texts) -> (n, len(texts))
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fairtrial.errors import InputError
from fairtrial.evaluation.language_development.corpus import tokenise
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import derive, generator, torch_generator

Floats = NDArray[Any]
_PARTS = 20_000  # parts of frames that are clustered, at most


class _TwoTowers(nn.Module):
    """An encoder of frames and one of bags of words, into one space."""

    def __init__(self, features: int, words: int, hidden: int, width: int) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.words = nn.EmbeddingBag(words + 1, width, mode="mean", padding_idx=words)

    def frame(self, features: Tensor) -> Tensor:
        """Return (B, width) unit vectors of (B, features)."""
        return F.normalize(self.frames(features), dim=-1)

    def text(self, bags: Tensor) -> Tensor:
        """Return (B, width) unit vectors of word numbers (B, words), padded; zero where no word is known."""
        return F.normalize(self.words(bags), dim=-1)


class InfoNCE:
    """CLIP-style contrast of each utterance with the frame it is said at, against the other pairs of the batch.

    The mean of two cross-entropies, of texts given the frame and of frames given the text, over cosines / temperature
    (van den Oord et al. 2018; Radford et al. 2021).

    Parameters
    ----------
    width, hidden : of the common space and of the frame encoder's one hidden layer.
    temperature, learning_rate, batch, epochs : of training by Adam; ``epochs`` = 0 leaves it untrained.
    seed : of weights and batches.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> kind = rng.integers(0, 3, 300)
    >>> frames, texts = np.eye(3)[kind] + 0.1 * rng.normal(size=(300, 3)), [["dog", "cat", "cow"][k] for k in kind]
    >>> learner = InfoNCE(epochs=20).fit(frames, np.arange(300), texts)
    >>> learner.score(np.eye(3), ["dog", "cat", "cow"]).argmax(1).tolist()
    [0, 1, 2]
    """

    def __init__(
        self,
        *,
        width: int = 32,
        hidden: int = 128,
        temperature: float = 0.1,
        learning_rate: float = 3e-3,
        batch: int = 128,
        epochs: int = 12,
        seed: int = 0,
    ) -> None:
        self.width, self.hidden = checked_count(width, "width"), checked_count(hidden, "hidden")
        self.batch, self.epochs, self.seed = (
            checked_count(batch, "batch"),
            checked_count(epochs, "epochs", least=0),
            seed,
        )
        self.temperature = checked_number(temperature, "temperature", above=0)
        self.learning_rate = checked_number(learning_rate, "learning_rate", above=0)

    def fit(self, features: Floats, times: Sequence[int] | NDArray[np.int64], texts: Sequence[str]) -> InfoNCE:
        """Learn from N frames (N, ...) and U texts with the frame each is said at (U,)."""
        frames, said = _as_frames(features), torch.as_tensor(np.asarray(times), dtype=torch.int64)
        _check(len(frames), said, texts)
        self.ids = {word: i for i, word in enumerate(sorted({w for text in texts for w in tokenise(text)}))}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "towers"))
            self.towers = _TwoTowers(frames.shape[1], len(self.ids), self.hidden, self.width)
        bags, draws = self._bags(texts), torch_generator(self.seed, "batches")
        optimizer = torch.optim.Adam(self.towers.parameters(), lr=self.learning_rate)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(texts), generator=draws).split(self.batch):
                if len(batch) < 2:
                    continue
                loss = self._loss(frames, said[batch], self.towers.text(bags[batch]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return self

    def score(self, features: Floats, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the cosine of each frame and text, (n, len(texts)); 0 for a text of unknown words."""
        with torch.no_grad():
            return (self.towers.frame(_as_frames(features)) @ self.towers.text(self._bags(texts)).T).double().numpy()

    def embed(self, features: Floats) -> NDArray[np.float64]:
        """Return the unit vectors (n, width) of frames, for probes."""
        with torch.no_grad():
            return self.towers.frame(_as_frames(features)).double().numpy()

    def _loss(self, frames: Tensor, said: Tensor, text: Tensor) -> Tensor:
        logits = self.towers.frame(frames[said]) @ text.T / self.temperature  # (B frames, B texts)
        own = torch.arange(len(said))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    def _bags(self, texts: Sequence[str]) -> Tensor:
        """Return the numbers of known words (len(texts), most), padded."""
        bags = [[self.ids[word] for word in tokenise(text) if word in self.ids] for text in texts]
        most = max(1, max(map(len, bags), default=1))
        return torch.tensor([bag + [len(self.ids)] * (most - len(bag)) for bag in bags], dtype=torch.int64)


class MILNCE(InfoNCE):
    """Contrast of each utterance with the bag of frames around it (Miech et al. 2020).

    - log sum_P exp(s) / (sum_P exp(s) + sum_N exp(s)): P pairs the text with the frames within ``window`` of it, N with
    the frames of the other bags of the batch, and the bag's frames with the batch's other texts. Which of the frames is
    the right one is left open; speech that lags by less than the window still finds it.

    Parameters
    ----------
    window : frames before and after.
    Others as for :class:`InfoNCE`.
    """

    def __init__(self, *, window: int = 8, **how: Any) -> None:
        super().__init__(**how)
        self.window = checked_count(window, "window", least=0)

    def _loss(self, frames: Tensor, said: Tensor, text: Tensor) -> Tensor:
        bag = (said[:, None] + torch.arange(-self.window, self.window + 1)).clamp(0, len(frames) - 1)  # (B, K)
        distinct, place = bag.unique(return_inverse=True)
        vectors = self.towers.frame(frames[distinct])  # bags overlap: each frame is encoded once
        scores = (vectors @ text.T / self.temperature)[place]  # (B bags, K, B texts)
        by_pair = scores.logsumexp(1)  # (B bags, B texts)
        own = torch.eye(len(by_pair), dtype=torch.bool)
        others = torch.cat([by_pair, by_pair.T.masked_fill(own, -torch.inf)], dim=1)  # (B, 2 B), the positive once
        return (others.logsumexp(1) - by_pair.diagonal()).mean()


class Counting:
    """Cross-situational counting: PMI of a word and a cluster of what is in view.

    Features of parts of frames are clustered by k-means; a word's association with a cluster is the logarithm of how
    much more often the cluster is in view when the word is said than at other utterances. A frame scores a text by the
    mean, over its words, of the largest association with a cluster in view.

    Parameters
    ----------
    clusters : k, at most.
    smoothing : added to each count.
    seed : of the clustering.

    Examples
    --------
    >>> frames = np.eye(3)[np.random.default_rng(0).integers(0, 3, 300)]
    >>> texts = [["dog", "cat", "cow"][k] for k in frames.argmax(1)]
    >>> Counting().fit(frames, np.arange(300), texts).score(np.eye(3), ["dog", "cat", "cow"]).argmax(1).tolist()
    [0, 1, 2]
    """

    def __init__(self, *, clusters: int = 64, smoothing: float = 1.0, seed: int = 0) -> None:
        self.clusters, self.seed = checked_count(clusters, "clusters"), seed
        self.smoothing = checked_number(smoothing, "smoothing", above=0)

    def fit(self, features: Floats, times: Sequence[int] | NDArray[np.int64], texts: Sequence[str]) -> Counting:
        """Learn from N frames, (N, features) or in P parts (N, P, features), and U timed texts."""
        from scipy.cluster.vq import kmeans2

        said = torch.as_tensor(np.asarray(times), dtype=torch.int64)
        _check(len(features), said, texts)
        parts = _as_parts(features)[np.asarray(times)]  # (U, P, F)
        flat = parts.reshape(-1, parts.shape[-1])
        distinct = np.unique(flat[generator(self.seed, "parts").permutation(len(flat))[:_PARTS]], axis=0)
        self.means = distinct  # few different parts, as of symbolic views, are their own clusters
        if len(distinct) > self.clusters:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # an empty cluster does no harm
                self.means = kmeans2(distinct, self.clusters, minit="++", rng=generator(self.seed, "clusters"))[0]
        self.ids = {word: i for i, word in enumerate(sorted({w for text in texts for w in tokenise(text)}))}
        inside = np.zeros((len(texts), len(self.ids)))
        for row, text in zip(inside, texts, strict=True):
            row[[self.ids[word] for word in tokenise(text)]] = 1
        view = self._view(parts)  # (U, k)
        both, u = inside.T @ view + self.smoothing, len(texts)  # (words, k)
        expected = inside.sum(0)[:, None] * view.sum(0) / u + self.smoothing
        self.pmi = np.log(both / expected)
        return self

    def score(self, features: Floats, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return (n, len(texts)) associations; 0 for a text of unknown words."""
        view = self._view(_as_parts(features)) > 0  # (n, k)
        best = np.where(view[:, None], self.pmi, -np.inf).max(-1)  # (n, words)
        columns = [[self.ids[word] for word in tokenise(text) if word in self.ids] for text in texts]
        return np.stack([best[:, ids].mean(1) if ids else np.zeros(len(best)) for ids in columns], axis=1)

    def _view(self, parts: Floats) -> Floats:
        """Return (n, k) whether each cluster is in view."""
        from scipy.cluster.vq import vq

        n, p, width = parts.shape
        labels = vq(parts.reshape(-1, width), self.means)[0].reshape(n, p)
        view = np.zeros((n, len(self.means)))
        view[np.arange(n)[:, None], labels] = 1
        return view


def _as_frames(features: Floats) -> Tensor:
    return torch.as_tensor(np.asarray(features), dtype=torch.float32).flatten(1)


def _as_parts(features: Floats) -> Floats:
    array = np.asarray(features, dtype=np.float32)
    return array[:, None] if array.ndim == 2 else array


def _check(frames: int, said: Tensor, texts: Sequence[str]) -> None:
    if len(said) != len(texts) or len(texts) < 2:
        raise InputError(
            f"{len(texts)} texts and {len(said)} times: give two or more, each with the frame it is said at"
        )
    if int(said.min()) < 0 or int(said.max()) >= frames:
        raise InputError(
            f"an utterance is said at frame {int(said.max())} of {frames}: give the frames of all utterances"
        )
