"""Egocentric streams with a narrator and a dial for how well speech matches sight.

A frame is what an agent in a BabyAI room sees in front of it. Now and then the narrator names a thing: with probability
alpha one in view; otherwise one of another time, of a little earlier, or one that is not there.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairtrial.errors import InputError, MissingExtraError, UnknownNameError
from fairtrial.options import checked_count, checked_number
from fairtrial.seeds import derive, generator

try:
    import gymnasium
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT
except ImportError as error:
    raise MissingExtraError("evaluation", "minigrid") from error

Mode = Literal["unrelated", "lag", "absent"]
MODES = ("unrelated", "lag", "absent")
_KINDS = {i: name for i, name in IDX_TO_OBJECT.items() if name in ("key", "ball", "box")}
THINGS = tuple(f"{color} {kind}" for kind in _KINDS.values() for color in IDX_TO_COLOR.values())
_PHRASES = ("look at the {}", "there is a {}", "the {}", "see the {}", "a {} is here", "that is a {}")
_ACTIONS = 3  # left, right, forward: a walk that moves nothing
_TRIES = 20  # draws of a lag until something was in view then


class Speech(NamedTuple):
    """What the narrator says, and the thing it names."""

    text: str
    referent: str


class Narrator:
    """Speaks about what is, or is not, in view.

    It speaks only while something is in view, so that the share of aligned speech is alpha whatever the mode.

    Parameters
    ----------
    alpha : probability in [0, 1] that speech names something in view.
    mode : what it names otherwise: a thing of a random frame of another episode (``unrelated``: silent until there is
        one), of the frame a geometrically distributed time earlier (``lag``), or one not in view (``absent``).
    rate : probability of speech a frame.
    mean_lag : frames.
    most_in_view : speak only while at most this many things are in view: 1 makes reference clear.
    seed : of all it draws.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.5,
        mode: Mode = "lag",
        rate: float = 0.35,
        mean_lag: float = 8.0,
        most_in_view: int | None = None,
        seed: int = 0,
    ) -> None:
        if mode not in MODES:
            raise UnknownNameError("mode", mode, MODES)
        self.mode, self.alpha = mode, checked_number(alpha, "alpha", least=0, most=1)
        self.rate = checked_number(rate, "rate", above=0, most=1)
        self.mean_lag = checked_number(mean_lag, "mean_lag", least=1)
        self.most_in_view = None if most_in_view is None else checked_count(most_in_view, "most_in_view")
        self.rng = generator(seed, "narrator")
        self.past: list[list[str]] = []  # what was in view at each time
        self.before = 0  # the time this episode began

    def new_episode(self) -> None:
        """Note that what comes next is another room."""
        self.before = len(self.past)

    def hear(self, view: list[str]) -> Speech | None:
        """Return what is said while ``view`` is in view, or ``None``."""
        rng, now = self.rng, len(self.past)
        self.past.append(view)
        speaks, aligned = rng.random(2) < (self.rate, self.alpha)
        if not speaks or not view or (self.most_in_view is not None and len(view) > self.most_in_view):
            return None
        if self.alpha < 1 and self.mode == "unrelated" and not any(self.past[: self.before]):
            return None
        named = view if aligned else self._other(now, view)
        if not named:
            return None
        referent = named[int(rng.integers(len(named)))]
        return Speech(_PHRASES[int(rng.integers(len(_PHRASES)))].format(referent), referent)

    def _other(self, now: int, view: list[str]) -> list[str]:
        """Return the things that misaligned speech may name."""
        if self.mode == "absent":
            return [thing for thing in THINGS if thing not in view]
        for _ in range(_TRIES):
            lag = int(self.rng.geometric(1 / self.mean_lag))
            when = int(self.rng.integers(self.before)) if self.mode == "unrelated" else now - lag
            if when >= 0 and self.past[when]:
                return self.past[when]
        return []


@dataclass(frozen=True, eq=False)
class Recording:
    """A stretch of a stream.

    Attributes
    ----------
    frames : numpy.ndarray
        (N, ...) what the environment showed; of BabyAI (N, 7, 7, 3) codes of object, colour and state.
    visible : numpy.ndarray
        (N, 18) bool, which of :data:`THINGS` is in view.
    times : numpy.ndarray
        (U,) frame of each utterance.
    texts, referents : list of str
        (U,) what was said, and the thing it names.
    """

    frames: NDArray[Any]
    visible: NDArray[np.bool_]
    times: NDArray[np.int64]
    texts: list[str]
    referents: list[str]

    @property
    def aligned(self) -> NDArray[np.bool_]:
        """(U,) whether the thing named is in view."""
        at = np.array([THINGS.index(thing) for thing in self.referents], dtype=np.int64)
        return self.visible[self.times, at]


class EgoStream(gymnasium.Wrapper):
    """A BabyAI environment with a narrator, and a stream of its frames under a random walk.

    As a wrapper, ``reset`` and ``step`` put ``utterance`` and ``referent`` (or ``None``) into ``info``. As an iterable
    it yields (frame, utterance or None, t) without end, from a new room every ``episode`` frames.

    Parameters
    ----------
    env : an environment of minigrid or its name; with a wrapper that renders, frames are pixels.
    alpha, mode, rate, mean_lag, most_in_view : see :class:`Narrator`.
    episode : frames in one room.
    seed : of rooms, walk and narrator; the rooms and the walk do not depend on how the narrator speaks.

    Raises
    ------
    InputError
        Not an environment of minigrid.

    Examples
    --------
    >>> stream = EgoStream(alpha=1.0, seed=1)
    >>> recording = stream.record(200)
    >>> recording.frames.shape, bool(recording.aligned.all())
    ((200, 7, 7, 3), True)
    """

    def __init__(
        self,
        env: str | gymnasium.Env = "BabyAI-PickupLoc-v0",
        *,
        alpha: float = 0.5,
        mode: Mode = "lag",
        rate: float = 0.35,
        mean_lag: float = 8.0,
        most_in_view: int | None = None,
        episode: int = 16,
        seed: int = 0,
    ) -> None:
        self.narrator = Narrator(
            alpha=alpha, mode=mode, rate=rate, mean_lag=mean_lag, most_in_view=most_in_view, seed=seed
        )
        if isinstance(env, str):
            import minigrid  # noqa: F401  # registers its environments

            try:
                env = gymnasium.make(env)
            except gymnasium.error.Error as error:
                raise InputError(f"env={env!r}: {error}") from error
        if not hasattr(env.unwrapped, "gen_obs"):
            raise InputError(f"{env}: not an environment of minigrid, whose view the narrator reads")
        super().__init__(env)
        self.episode, self.seed = checked_count(episode, "episode"), seed

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Enter a new room."""
        with contextlib.redirect_stdout(io.StringIO()):  # level generation prints each layout it rejects
            observation, info = self.env.reset(seed=seed, options=options)
        self.narrator.new_episode()
        return observation, {**info, **self._said()}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Act, and listen."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, **self._said()}

    def __iter__(self) -> Iterator[tuple[NDArray[Any], str | None, int]]:
        """Yield (frame, utterance or None, t)."""
        for t, (frame, _, speech) in enumerate(self._walk()):
            yield frame, speech.text if speech else None, t

    def record(self, frames: int) -> Recording:
        """Return the stream's first ``frames`` frames; each call goes on with new rooms of the same narrator."""
        frames = checked_count(frames, "frames")
        shown, visible, times, said = [], np.zeros((frames, len(THINGS)), dtype=bool), [], []
        for t, (frame, view, speech) in zip(range(frames), self._walk(), strict=False):
            shown.append(frame)
            visible[t, [THINGS.index(thing) for thing in view]] = True
            if speech:
                times.append(t)
                said.append(speech)
        texts, referents = [speech.text for speech in said], [speech.referent for speech in said]
        return Recording(np.stack(shown), visible, np.array(times, dtype=np.int64), texts, referents)

    def to_parquet(self, path: str | Path, frames: int) -> Path:
        """Write ``frames`` frames: columns t, frame (flat list), shape, utterance, referent and visible (names)."""
        import pandas as pd

        one = self.record(frames)
        said = {int(t): (text, thing) for t, text, thing in zip(one.times, one.texts, one.referents, strict=True)}
        table = pd.DataFrame(
            {
                "t": range(frames),
                "frame": [frame.ravel() for frame in one.frames],
                "shape": [list(one.frames.shape[1:])] * frames,
                "utterance": [said[t][0] if t in said else None for t in range(frames)],
                "referent": [said[t][1] if t in said else None for t in range(frames)],
                "visible": [[THINGS[i] for i in np.flatnonzero(row)] for row in one.visible],
            }
        )
        table.to_parquet(path, index=False)
        return Path(path)

    def _walk(self) -> Iterator[tuple[NDArray[Any], list[str], Speech | None]]:
        rng = generator(self.seed, "walk")
        for room in range(10**9):
            observation, info = self.reset(seed=derive(self.seed, "room", room) % 2**31)
            for k in range(self.episode):
                if k:
                    observation, _, _, _, info = self.step(int(rng.integers(_ACTIONS)))
                speech = Speech(info["utterance"], info["referent"]) if info["utterance"] else None
                frame = observation["image"] if isinstance(observation, dict) else observation  # ImgObsWrapper
                yield frame, self.narrator.past[-1], speech

    def _said(self) -> dict[str, Any]:
        speech = self.narrator.hear(things_in_view(self.env.unwrapped.gen_obs()["image"]))  # type: ignore[attr-defined]
        return {"utterance": speech.text if speech else None, "referent": speech.referent if speech else None}


def things_in_view(image: NDArray[np.uint8]) -> list[str]:
    """Return the things that a view (7, 7, 3) of codes shows, in the order of :data:`THINGS`.

    >>> view = np.zeros((7, 7, 3), dtype=np.uint8)
    >>> view[2, 3] = 6, 0, 0
    >>> things_in_view(view)
    ['red ball']
    """
    codes = {(int(o), int(c)) for o, c in image[..., :2].reshape(-1, 2) if int(o) in _KINDS}
    names = {f"{IDX_TO_COLOR[color]} {_KINDS[kind]}" for kind, color in codes}
    return [thing for thing in THINGS if thing in names]


def symbolic_features(frames: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return one-hot objects and colours of BabyAI views: (N, 7, 7, 3) codes to (N, 49, 17), cells by features.

    >>> symbolic_features(np.zeros((2, 7, 7, 3), dtype=np.uint8)).shape
    (2, 49, 17)
    """
    objects, colors = np.eye(len(IDX_TO_OBJECT), dtype=np.float32), np.eye(len(IDX_TO_COLOR), dtype=np.float32)
    cells = frames.reshape(len(frames), -1, 3)
    return np.concatenate([objects[cells[..., 0]], colors[cells[..., 1]]], axis=-1)
