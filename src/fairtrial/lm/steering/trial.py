"""Whether a direction carried by anchors detects and steers a behaviour in a model that gave no labels.

Every model of the trial is the target in turn, the others are its sources. A replicate is a behavioural axis: what is
claimed generalises over behaviours. Directions are extracted from some wordings of an axis and tested on others.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.errors import InputError
from fairtrial.seeds import generator
from fairtrial.trial.declare import (
    Candidate,
    Cell,
    Claim,
    Factor,
    Input,
    Metric,
    Part,
    Trial,
    difference,
    level,
    report,
    stage,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from fairtrial.lm.steering.direction import Direction
    from fairtrial.lm.steering.space import AnchorSpace

SAMPLES = ("smollm2-135m", "minilm")
TINY_AXES = 5
ENCODERS = {"bert": "encoder.layer", "roberta": "encoder.layer", "xlm-roberta": "encoder.layer"}  # path of the blocks


class SteeringParams(BaseModel):
    """Parameters of the trial ``steering``."""

    model_config = ConfigDict(extra="forbid")

    first: Annotated[str, Input()] = Field(
        "smollm2-135m", description="a sample, 'tiny-0' or 'tiny-1' (random, for tests), a folder or a .gguf file"
    )
    second: Annotated[str, Input()] = Field("minilm", description="another model; an encoder may be one")
    third: Annotated[str, Input()] = Field("", description="one more; with it, directions of one source are shown too")
    axes: Annotated[str, Input()] = Field(
        "templates",
        description="'templates' (ten axes), 'tiny', or a folder of .jsonl files, one an axis, whose rows have 'text', "
        "'label' (1 or 0) and perhaps 'split' (extract or test)",
    )
    anchors: Annotated[str, Input()] = Field(
        "samples", description="'samples' (encyclopaedia and news), or a .txt (one a line) or .jsonl file"
    )
    n_anchors: int = Field(250, ge=8, description="anchors taken from there")
    topics: int = Field(20, ge=4, le=24, description="topics of the templates, of which three fifths extract")
    splits: int = Field(
        3, ge=1, le=6, description="ways of dividing an axis's wordings", json_schema_extra={"scope": "plan"}
    )
    depth: float = Field(0.6, gt=0, le=1, description="share of the blocks after which states are taken")
    pooling: str = Field("mean", pattern="^(auto|last|mean)$", description="auto, last or mean")
    frame: str = Field("cosine", pattern="^(cosine|whitened)$", description="cosine or whitened")
    strength: float = Field(0.4, gt=0, le=2, description="of steering, in units of the states' length")
    steered: int = Field(8, ge=2, description="sentences of each side that steering is read on")
    device: str = Field("cpu", description="a torch device")


# --------------------------------------------------------------------------------------------------- texts and models


@dataclass(frozen=True)
class Split:
    """One division of an axis: texts that directions are extracted from, and texts that they are tested on."""

    positive: list[str]
    negative: list[str]
    test_positive: list[str]
    test_negative: list[str]


def axis_names(params: SteeringParams) -> list[str]:
    """Return the names of the axes."""
    from fairtrial.lm.steering.axes import AXES

    if params.axes == "templates":
        return [*AXES]
    if params.axes == "tiny":
        return [f"tiny-{i}" for i in range(TINY_AXES)]
    return sorted(path.stem for path in Path(params.axes).glob("*.jsonl"))


def split_of(axis: str, split: int, params: SteeringParams) -> Split:
    """Return the ``split``-th division of an axis."""
    from fairtrial.lm.steering.axes import AXES, TOPICS, sentences

    if params.axes not in ("templates", "tiny"):
        return read_axis(Path(params.axes) / f"{axis}.jsonl", split)
    rng = generator(split, "split of", axis)
    if params.axes == "tiny":
        sides = [
            [" ".join(f"w{i}" for i in [mark, *rng.integers(20, 64, 4), mark]) for _ in range(2 * params.topics)]
            for mark in (2 * int(axis[5:]), 2 * int(axis[5:]) + 1)
        ]
        n = params.topics
        return Split(sides[0][:n], sides[1][:n], sides[0][n:], sides[1][n:])
    pairs = rng.permutation(len(AXES[axis]))
    topics = [TOPICS[i] for i in rng.permutation(len(TOPICS))[: params.topics]]
    cut = len(topics) * 3 // 5
    parts: list[list[str]] = []
    for chosen, about in ((pairs[: len(pairs) // 2], topics[:cut]), (pairs[len(pairs) // 2 :], topics[cut:])):
        both = [sentences(axis, int(pair), about) for pair in chosen]
        parts += [
            [text for positive, _ in both for text in positive],
            [text for _, negative in both for text in negative],
        ]
    return Split(*parts)


def read_axis(path: Path, split: int) -> Split:
    """Return a division of the user's texts: as their 'split' says, or halves drawn by the number of the division."""
    rows: list[tuple[str, bool, str | None]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text, label, where = row["text"], row["label"], row.get("split")
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path}, line {number}: not a JSON object with 'text' and 'label'") from error
        if (
            not isinstance(text, str)
            or not text.strip()
            or label not in (0, 1)
            or where not in (None, "extract", "test")
        ):
            raise InputError(
                f"{path}, line {number}: 'text' must be a text, 'label' 1 or 0, 'split' extract, test or left out"
            )
        rows.append((text, bool(label), where))
    rng = generator(split, "halves of", path.stem)
    parts = []
    for side in (True, False):
        mine = [(text, where) for text, label, where in rows if label is side]
        if len({where is None for _, where in mine}) > 1:
            raise InputError(f"{path}: some rows have a 'split' and others none: give it to all or to none")
        if mine and mine[0][1] is not None:
            halves = tuple([text for text, where in mine if where == half] for half in ("extract", "test"))
        else:
            order = rng.permutation(len(mine))
            halves = tuple([mine[i][0] for i in part] for part in (order[: len(mine) // 2], order[len(mine) // 2 :]))
        parts.append(halves)
    (positive, test_positive), (negative, test_negative) = parts
    n = min(len(positive), len(negative))
    if n < 2 or min(len(test_positive), len(test_negative)) < 2:
        raise InputError(f"{path}: give at least two texts of each label to extract from and two to test on")
    return Split(positive[:n], negative[:n], test_positive, test_negative)


def anchor_texts(params: SteeringParams) -> list[str]:
    """Return the anchors."""
    from fairtrial.data.tiny import tiny_texts
    from fairtrial.lm.steering.command import read_anchors

    if params.anchors == "tiny":
        return [" ".join(text.split()[:8]) for text in tiny_texts(documents=params.n_anchors, words=12)]
    if params.anchors != "samples":
        texts = [*dict.fromkeys(read_anchors(Path(params.anchors)))]
        if len(texts) < 8:
            raise InputError(f"anchors={params.anchors}: {len(texts)} different texts: give at least 8")
        return texts[: params.n_anchors]
    from fairtrial.data.text import news_articles, wikipedia_articles

    def first_sentences(articles: list[str], count: int, of: str) -> list[str]:
        found = dict.fromkeys(
            sentence + "."
            for article in articles
            for line in article.split("\n")
            for sentence in line.split(". ")[:-1]
            if 40 <= len(sentence) <= 160
        )
        texts = [*found]
        return [texts[i] for i in sorted(generator(0, "anchors", of).permutation(len(texts))[:count])]

    wiki = params.n_anchors * 3 // 5
    return first_sentences(wikipedia_articles(), wiki, "wikipedia") + first_sentences(
        news_articles(), params.n_anchors - wiki, "news"
    )


def model_names(params: SteeringParams) -> dict[str, str]:
    """Return the models by the name they go by in the cells."""
    given = [name for name in (params.first, params.second, params.third) if name]
    short = [Path(name).stem if Path(name).exists() else name for name in given]
    if len(set(short)) < len(short):
        raise InputError(f"models {', '.join(short)}: two go by one name")
    return dict(zip(short, given, strict=True))


def blocks_of(model: Any) -> Any:
    """Return how to find the blocks of an encoder; ``None`` for causal models, which are known."""
    from fairtrial.causal_lm.layout import ChainSpec

    path = ENCODERS.get(model.config.model_type)
    return ChainSpec(path, None, ()) if path else None


@stage(keep=True)
def loaded(stages: Any, name: str, params: SteeringParams) -> tuple[Any, Any]:
    """Load a model and its tokenizer, once a worker."""
    from fairtrial.causal_lm.loading import load
    from fairtrial.data.samples import cache_folder, sample_path
    from fairtrial.data.tiny import tiny_causal_lm

    where = model_names(params)[name]
    if where.startswith("tiny-") and not Path(where).exists():
        return tiny_causal_lm(seed=int(where[5:]))
    path = Path(where) if Path(where).exists() else sample_path(where)
    if is_encoder(path):
        from transformers import AutoModel, AutoTokenizer

        from fairtrial.quiet import transformers_silent

        with transformers_silent():
            model = AutoModel.from_pretrained(path, local_files_only=True, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        return model.to(params.device).eval(), tokenizer
    return load(path, device=params.device, cache=cache_folder() / "models")


def is_encoder(path: Path) -> bool:
    """Return whether a folder holds an encoder."""
    config = path / "config.json"
    return config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") in ENCODERS


# --------------------------------------------------------------------------------------------------------------- stages


@stage(save="npz")
def states_of(stages: Any, name: str, split: int, params: SteeringParams) -> dict[str, Any]:
    """Return a model's states (n, d) of the anchors and of all texts of a split, by what they are."""
    from fairtrial.lm.steering.states import layer_at, text_states

    model, tokenizer = stages(loaded, name, params)
    spec = blocks_of(model)
    texts = {"anchors": anchor_texts(params)} if split < 0 else {}
    if split >= 0:
        for axis in axis_names(params):
            for side, found in vars(split_of(axis, split, params)).items():
                texts[f"{axis}/{side}"] = found
    flat = [text for found in texts.values() for text in found]
    layer = layer_at(model, params.depth, spec)
    states = text_states(model, tokenizer, flat, [layer], pooling=params.pooling, spec=spec)[:, 0]  # type: ignore[arg-type]
    pieces = states.split([len(found) for found in texts.values()])
    return {what: piece.numpy() for what, piece in zip(texts, pieces, strict=True)}


@stage(keep=True)
def spaces(stages: Any, split: int, params: SteeringParams) -> AnchorSpace:
    """Return the space of all models, in which every model knows its own direction of every axis."""
    from fairtrial.lm.steering.space import AnchorSpace

    space = AnchorSpace(anchor_texts(params), frame=params.frame)  # type: ignore[arg-type]
    for name in model_names(params):
        space.add_states(name, stages(states_of, name, -1, params)["anchors"])
        found = stages(states_of, name, split, params)
        for axis in axis_names(params):
            space.add_direction(name, axis, native(found, axis))
    return space


def native(states: Any, axis: str) -> torch.Tensor:
    """Return the difference of a model's mean states on the extraction texts of an axis, (d,)."""
    import torch

    positive, negative = (torch.from_numpy(states[f"{axis}/{side}"]).double() for side in ("positive", "negative"))
    return positive.mean(0) - negative.mean(0)


@stage()
def directions(stages: Any, label: str, target: str, split: int, params: SteeringParams) -> dict[str, Direction]:
    """Return a candidate's direction of every axis in the target model."""
    import torch

    from fairtrial.lm.steering.baselines import procrustes_map, ridge_map
    from fairtrial.lm.steering.frames import AnchorFrame

    space = stages(spaces, split, params)
    sources = [name for name in space.names if name != target]
    member = space.member(target)
    found: dict[str, Direction] = {}
    for axis in axis_names(params):
        canonical = space.canonical(axis, sources[:1] if label == "acs-1" else sources)
        rebuilt = canonical.reconstruct(target)
        if label in ("acs", "acs-1"):
            found[axis] = rebuilt
            continue
        if label == "shuffled-anchors":
            order = torch.from_numpy(generator(split, "shuffled", target).permutation(len(member.states)))
            vector, probe, _ = AnchorFrame(member.states[order], frame=params.frame).reconstruct(canonical.coordinates)  # type: ignore[arg-type]
        elif label in ("ridge-map", "procrustes"):
            carry = ridge_map if label == "ridge-map" else procrustes_map
            carried = [
                carry(space.member(name).states, member.states, space.member(name).directions[axis]) for name in sources
            ]
            vector = probe = unit(torch.stack(carried).mean(0))
        elif label == "native":
            vector = probe = unit(member.directions[axis])
        else:
            drawn = generator(split, "random", target, axis).standard_normal(member.states.shape[1])
            vector = probe = unit(torch.from_numpy(drawn))
        found[axis] = along(rebuilt, member.states, vector, probe)
    return found


def unit(vector: torch.Tensor) -> torch.Tensor:
    """Return a vector at length 1."""
    return vector / vector.norm()


def along(like: Direction, anchors: torch.Tensor, vector: torch.Tensor, probe: torch.Tensor) -> Direction:
    """Return ``like`` with another vector, its scores standardised by the same anchors."""
    spread = float(((anchors.double() - like.mean) @ probe).std())
    return replace(like, vector=vector, probe=probe, spread=spread, fit_residual=math.nan)


@stage()
def text_scores(stages: Any, split: int, params: SteeringParams) -> dict[str, dict[str, np.ndarray]]:
    """Return what a classifier of words makes of the test texts: axis tested -> "axis/side" -> standardised scores."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    splits = {axis: split_of(axis, split, params) for axis in axis_names(params)}
    anchors = anchor_texts(params)
    scores: dict[str, dict[str, np.ndarray]] = {}
    for axis, own in splits.items():
        vectorizer = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\S+")
        x = vectorizer.fit_transform(own.positive + own.negative)
        classifier = LogisticRegression().fit(x, [1] * len(own.positive) + [0] * len(own.negative))
        usual = classifier.decision_function(vectorizer.transform(anchors))

        def standardised(texts: list[str], c: Any = classifier, v: Any = vectorizer, u: Any = usual) -> np.ndarray:
            return (c.decision_function(v.transform(texts)) - u.mean()) / max(u.std(), 1e-9)

        scores[axis] = {
            f"{other}/{side}": standardised(getattr(texts, side))
            for other, texts in splits.items()
            for side in ("test_positive", "test_negative")
        }
    return scores


# ------------------------------------------------------------------------------------------------------------- measures


def measure_detection(candidate: Candidate, cell: Cell, params: SteeringParams, stages: Any) -> dict[str, Any]:
    """Score one axis's test texts in one target."""
    import numpy as np
    from sklearn.metrics import roc_auc_score

    axis, target, split = cell["axis"], cell["target"], cell["split"]
    if candidate.label == "words":
        table = stages(text_scores, split, params)
        scores = {name: table[name] for name in table}
        ours: Direction | None = None
    else:
        found = stages(directions, candidate.label, target, split, params)
        states = stages(states_of, target, split, params)
        scores = {
            name: {
                f"{axis}/{side}": direction.score_states(states[f"{axis}/{side}"]).numpy()
                for side in ("test_positive", "test_negative")
            }
            for name, direction in found.items()
        }
        ours = found[axis]
    positive, negative = (scores[axis][f"{axis}/{side}"] for side in ("test_positive", "test_negative"))
    truth = np.r_[np.ones(len(positive)), np.zeros(len(negative))]
    all_axes = np.stack([scores[name][f"{axis}/test_positive"] for name in axis_names(params)])  # (axes, n)
    chosen = np.asarray(axis_names(params))[all_axes.argmax(0)]
    space = stages(spaces, split, params)
    own = unit(space.member(target).directions[axis])
    own_coordinates = space.member(target).frame.of_direction(own)
    return {
        "auroc": float(roc_auc_score(truth, np.r_[positive, negative])),
        "ten_way": float((chosen == axis).mean()),
        "direction_cosine": None if ours is None else float(ours.vector @ own),
        "fit_residual": None if ours is None or math.isnan(ours.fit_residual) else ours.fit_residual,
        "alignment": float(own_coordinates @ space.canonical(axis, [n for n in space.names if n != target]).coordinates)
        if candidate.label == "acs"
        else None,
    }


def measure_steering(candidate: Candidate, cell: Cell, params: SteeringParams, stages: Any) -> dict[str, Any]:
    """Read test texts under steering to either side."""
    from fairtrial.causal_lm.likelihood import mean_nll
    from fairtrial.lm.steering.states import layer_at

    axis, target = cell["axis"], cell["target"]
    model, tokenizer = stages(loaded, target, params)
    found = stages(directions, candidate.label, target, 0, params)[axis]
    direction = replace(found, layer=layer_at(model, params.depth))
    own = split_of(axis, 0, params)

    def ids(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts)["input_ids"]

    positive, negative = ids(own.test_positive[: params.steered]), ids(own.test_negative[: params.steered])
    neutral = ids(anchor_texts(params)[-params.steered :])
    preference = {}
    for sign in (1, -1):
        with direction.steer(model, sign * params.strength):
            preference[sign] = mean_nll(model, negative) - mean_nll(model, positive)
            if sign == 1:
                steered = mean_nll(model, neutral)
    return {
        "nll_shift": preference[1] - preference[-1],
        "fluency": math.exp(min(steered - stages(neutral_nll, target, params), 50.0)),
    }


@stage(save="json")
def neutral_nll(stages: Any, target: str, params: SteeringParams) -> float:
    """Return the unsteered model's loss on the anchors that fluency is read on."""
    from fairtrial.causal_lm.likelihood import mean_nll

    model, tokenizer = stages(loaded, target, params)
    return mean_nll(model, tokenizer(anchor_texts(params)[-params.steered :])["input_ids"])


# ---------------------------------------------------------------------------------------------------------------- parts

CANDIDATES = (
    Candidate("acs", "method", uses=("frames", "space")),
    Candidate("acs-1", "method", uses=("frames", "space")),
    Candidate("ridge-map", "baseline", uses=("baselines",)),
    Candidate("procrustes", "baseline", uses=("baselines",)),
    Candidate("native", "reference"),
    Candidate("shuffled-anchors", "control", uses=("frames",)),
    Candidate("random", "control"),
    Candidate("words", "control"),
)


def parts(params: SteeringParams) -> tuple[Part, ...]:
    """Return the parts: detection, and steering of the causal models."""
    names = model_names(params)
    axes = axis_names(params)
    causal = [name for name, where in names.items() if not encoder_named(where)]
    axis = Factor("axis", axes, kind="replicate")
    candidates = tuple(c for c in CANDIDATES if c.label != "acs-1" or len(names) > 2)
    chance = 1 / len(axes)
    detection = Part(
        name="detection",
        candidates=candidates,
        metrics=(
            Metric("auroc", ""),
            Metric("ten_way", "of its texts"),
            Metric("direction_cosine", "to the native direction"),
            Metric("fit_residual", "", higher_is_better=False),
            Metric("alignment", "cosine of coordinates"),
        ),
        factors=(Factor("target", [*names]), axis, Factor("split", range(params.splits), kind="within")),
        variance="independent",
        claims=(
            Claim(
                "C1",
                "Carried by anchors, a direction tells an axis's two sides apart better than with the anchors of the "
                "target shuffled, by at least 0.15 AUROC.",
                difference("acs", "shuffled-anchors", "auroc"),
                above=0.15,
            ),
            Claim(
                "C2",
                "Its AUROC is at most 0.02 below that of a ridge map between the models' states.",
                difference("acs", "ridge-map", "auroc"),
                above=-0.02,
            ),
            Claim(
                "C3",
                f"Among all axes it names the right one at least 0.2 more often than chance ({chance:.2g}).",
                level("acs", "ten_way"),
                above=chance + 0.2,
            ),
            *(report(f"R1-{name}", f"AUROC in {name}", level("acs", "auroc", {"target": name})) for name in names),
            report("R2", "AUROC of the words alone", level("words", "auroc")),
            report("R3", "share of texts whose axis the ridge map names", level("ridge-map", "ten_way")),
            report("R4", "cosine to the native direction", level("acs", "direction_cosine")),
            report("R5", "cosine of the target's own coordinates to the canonical ones", level("acs", "alignment")),
        ),
        measure=measure_detection,
        group=("target", "split"),
    )
    if not causal:
        return (detection,)
    steering = Part(
        name="steering",
        candidates=tuple(
            c for c in candidates if c.label in ("acs", "ridge-map", "native", "shuffled-anchors", "random")
        ),
        metrics=(Metric("nll_shift", "nats a token"), Metric("fluency", "perplexity ratio", higher_is_better=False)),
        factors=(Factor("target", causal), axis),
        variance="independent",
        claims=(
            Claim(
                "C4",
                "Steering along it shifts the model's preference to the positive side more than a random direction.",
                difference("acs", "random", "nll_shift"),
                above=0,
            ),
            report("R6", "perplexity of neutral text, steered over unsteered", level("acs", "fluency")),
            report("R7", "its shift less that of the native direction", difference("acs", "native", "nll_shift")),
        ),
        measure=measure_steering,
        group=("target",),
    )
    return detection, steering


def encoder_named(where: str) -> bool:
    """Return whether a parameter names an encoder."""
    return where == "minilm" or is_encoder(Path(where))


def check(params: SteeringParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.causal_lm.loading import check_device, check_loadable
    from fairtrial.data.samples import find_sample, sample_path

    check_device(params.device)
    names = model_names(params)
    if len(names) < 2:
        raise InputError("a direction is carried between models: give first= and second=")
    for where in names.values():
        if where in ("tiny-0", "tiny-1", "tiny-2"):
            continue
        if Path(where).exists():
            if not is_encoder(Path(where)):
                check_loadable(where)
        elif where in SAMPLES:
            sample_path(find_sample(where).name)
        else:
            raise InputError(f"{where}: no such folder or file, nor a sample of {', '.join(SAMPLES)}")
    if params.axes not in ("templates", "tiny"):
        if len(axis_names(params)) < 2:
            raise InputError(f"axes={params.axes}: give a folder with at least two .jsonl files, one an axis")
        for axis in axis_names(params):
            split_of(axis, 0, params)
    if params.anchors not in ("samples", "tiny") and not Path(params.anchors).is_file():
        raise InputError(f"anchors={params.anchors}: no such file")
    anchor_texts(params)


trial = Trial(
    name="steering",
    params=SteeringParams,
    parts=parts,
    presets={
        "smoke": {
            "first": "tiny-0", "second": "tiny-1", "axes": "tiny", "anchors": "tiny", "n_anchors": 24, "topics": 4,
            "splits": 1, "steered": 3, "pooling": "mean",
        },
        "full": {"n_anchors": 1000, "topics": 24, "splits": 6, "steered": 20},
    },
    check=check,
)  # fmt: skip
