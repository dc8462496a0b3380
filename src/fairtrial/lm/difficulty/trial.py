"""Whether states before an answer tell how hard a problem is, and whether that saves tokens.

A replicate is a block of problems of its own, read with its own draw of references from outside the block. What is
wrong or right is the model's choice among four answers at the cheapest effort; the true loss is that of the right one.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fairtrial.causal_lm.named import DESCRIPTION, check_named, load_named
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
    statistic,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from fairtrial.lm.difficulty.probe import DifficultyProbe
    from fairtrial.lm.difficulty.problems import Problem

BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way from the cheapest to the dearest level's cost
PERMUTATIONS = 20
ROLLOUTS = 8
LABELS = 200  # that the trained probe and the regression on text get


class DifficultyParams(BaseModel):
    """Parameters of the trial ``difficulty``."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Input()] = Field("smollm2-135m", description=DESCRIPTION)
    problems: Annotated[str, Input()] = Field(
        "families",
        description="'families' (arithmetic, facts, words), 'tiny', or a .jsonl file whose rows have 'prompt', "
        "'choices' and 'answer', or 'prompt' and 'correct', and perhaps 'family'",
    )
    log: Annotated[str, Input()] = Field(
        "",
        description="in place of problems, answers of your own efforts: a .csv or .parquet file with prompt, level, "
        "correct and tokens, every prompt at every level; left out, direct answers and answers after solved examples",
    )
    per_family: int = Field(240, ge=24, description="problems of each family")
    controlled: int = Field(15, ge=4, description="problems of a block that the controller is read on")
    n_ref: int = Field(16, ge=4, description="reference problems, half of them wrong")
    method: Literal["direction", "kernel", "shrinkage"] = Field("direction", description="of the probe's score")
    shots: int = Field(8, ge=1, description="solved examples of the dearer effort")
    blocks: int = Field(8, ge=2, le=40, description="blocks of problems")
    device: str = Field("cpu", description="a torch device")


# --------------------------------------------------------------------------------------------------------------- stages


@stage(keep=True)
def loaded(stages: Any, params: DifficultyParams) -> tuple[Any, Any]:
    """Load the model and its tokenizer, once a worker."""
    return load_named(params.model, device=params.device, tiny_layers=5)


def problems_of_family(family: str, params: DifficultyParams) -> list[Problem]:
    """Return a family's problems, those that are shown as solved examples not among them."""
    return all_problems(params)[family][0 if params.log else params.shots :]


def all_problems(params: DifficultyParams) -> dict[str, list[Problem]]:
    """Return the problems by family, as many more as examples are shown."""
    from fairtrial.lm.difficulty.problems import problems_in_log, problems_of

    if params.log:
        return {"log": problems_in_log(Path(params.log))[0]}
    return problems_of(params.problems, params.per_family + params.shots)


@stage(save="npz")
def read(stages: Any, family: str, params: DifficultyParams) -> dict[str, Any]:
    """Read a family's questions once: states, outcomes, and what the baselines look at.

    Returns states (n, L, d), lengths (n,), loss (n,) of the right answer, wrong (n,), choices (n, C) mean
    log-likelihoods (NaN past a problem's last), answer_tokens (n,), perplexity, entropy and self_doubt (n,).
    """
    import numpy as np

    from fairtrial.causal_lm.likelihood import choice_scores
    from fairtrial.causal_lm.prompts import following, prompt_texts
    from fairtrial.lm.difficulty import baselines
    from fairtrial.lm.difficulty.probe import DifficultyProbe

    model, tokenizer = stages(loaded, params)
    problems = problems_of_family(family, params)
    questions = [problem.question for problem in problems]
    probe = DifficultyProbe(model, tokenizer)
    states, lengths = probe.states(questions)
    ids = probe.token_ids(questions)
    found = {
        "states": states.numpy(),
        "lengths": lengths,
        "perplexity": baselines.prompt_perplexity(model, ids),
        "entropy": baselines.first_token_entropy(model, ids),
    }
    if not problems[0].choices:
        return {**found, "wrong": np.array([not problem.correct for problem in problems], float)}
    contexts = prompt_texts(tokenizer, questions)
    scores = choice_scores(
        model, tokenizer, contexts, [following(tokenizer, p.choices) for p in problems], add_special_tokens=False
    )
    most = max(len(problem.choices) for problem in problems)
    table = np.full((len(problems), most), np.nan)
    for row, score in zip(table, scores, strict=True):
        row[: len(score.total)] = score.mean.double().numpy()
    best = np.nanargmax(table, axis=1)
    asked = [
        f"Question: {p.question}\nAnswer: {p.choices[b]}\nIs this answer correct? Say Yes or No."
        for p, b in zip(problems, best, strict=True)
    ]
    doubt = baselines.self_doubt(model, tokenizer, prompt_texts(tokenizer, asked))
    return {
        **found,
        "choices": table,
        "wrong": (best != 0).astype(float),
        "loss": -table[:, 0],
        "answer_tokens": np.array([float(score.n_tokens.double().mean()) for score in scores]),
        "self_doubt": doubt,
    }


@stage(save="npz")
def logged(stages: Any, family: str, params: DifficultyParams) -> dict[str, Any]:
    """Return correct (n, K) and tokens (n, K) of the first problems of every block, and their indices (n,)."""
    import numpy as np

    from fairtrial.causal_lm.likelihood import choice_scores
    from fairtrial.causal_lm.prompts import following, prompt_texts

    if params.log:
        from fairtrial.lm.difficulty.problems import problems_in_log

        table = problems_in_log(Path(params.log))[1]
        return {
            "rows": np.arange(len(table)),
            "correct": table["correct"].to_numpy(float),
            "tokens": table["tokens"].to_numpy(float),
        }
    model, tokenizer = stages(loaded, params)
    problems = problems_of_family(family, params)
    known = stages(read, family, params)
    rows = np.sort(
        np.concatenate([block_of(b, len(problems), params)[: params.controlled] for b in range(params.blocks)])
    )
    examples = [(p.question, p.choices[0]) for p in all_problems(params)[family][: params.shots]]
    chosen = [problems[i] for i in rows]
    contexts = prompt_texts(tokenizer, [p.question for p in chosen], shots=examples)
    scores = choice_scores(
        model, tokenizer, contexts, [following(tokenizer, p.choices) for p in chosen], add_special_tokens=False
    )
    right = [int(score.mean.argmax()) == 0 for score in scores]
    long = [len(row) for row in tokenizer(contexts, add_special_tokens=False)["input_ids"]]
    answer = known["answer_tokens"][rows]
    return {
        "rows": rows,
        "correct": np.stack([1 - known["wrong"][rows], np.array(right, float)], axis=1),
        "tokens": np.stack([known["lengths"][rows] + answer, np.array(long) + answer], axis=1),
    }


def block_of(block: int, n: int, params: DifficultyParams) -> np.ndarray:
    """Return the problems of a block, each in one."""
    return generator(0, "blocks").permutation(n)[block :: params.blocks]


def references(wrong: np.ndarray, block: int, params: DifficultyParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the references of a block, half of them wrong where there are, and the other problems outside it."""
    import numpy as np

    rng = generator(block, "references")
    outside = rng.permutation(np.setdiff1d(np.arange(len(wrong)), block_of(block, len(wrong), params)))
    sides = [outside[wrong[outside] == side] for side in (1, 0)]
    if min(map(len, sides)) < 2:
        raise InputError("the model gets nearly all problems wrong, or right: give problems of mixed difficulty")
    half = min(params.n_ref // 2, len(sides[0]), params.n_ref - min(params.n_ref // 2, len(sides[1])))
    chosen = np.concatenate([sides[0][:half], sides[1][: params.n_ref - half]])
    return chosen, np.setdiff1d(outside, chosen)


@stage()
def probe_of(stages: Any, family: str, block: int, params: DifficultyParams) -> tuple[DifficultyProbe, np.ndarray]:
    """Fit the probe on a block's references; return it and them."""
    known = stages(read, family, params)
    chosen, others = references(known["wrong"], block, params)
    return fitted(known, chosen, others, known["wrong"][chosen], params), chosen


def fitted(
    known: Any, chosen: np.ndarray, others: np.ndarray, d: np.ndarray, params: DifficultyParams
) -> DifficultyProbe:
    """Return a probe of given references and labels; the other problems outside the block are unlabelled prompts."""
    import warnings

    from fairtrial.lm.difficulty.probe import DifficultyProbe, NoSignal

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoSignal)  # as permuted labels should
        return DifficultyProbe.from_states(
            known["states"][chosen],
            d,
            lengths=known["lengths"][chosen],
            unlabelled=known["states"][others],
            unlabelled_lengths=known["lengths"][others],
            method=params.method,
        )


def scored(probe: DifficultyProbe, known: Any, rows: np.ndarray) -> np.ndarray:
    """Return a probe's scores of problems."""
    return probe.predict(known["states"][rows], known["lengths"][rows])


# ------------------------------------------------------------------------------------------------------------- measures


def measure_probing(candidate: Candidate, cell: Cell, params: DifficultyParams, stages: Any) -> dict[str, Any]:
    """Order one block's problems by a candidate's score."""
    import numpy as np
    from scipy.stats import spearmanr

    known = stages(read, cell["family"], params)
    rows = block_of(cell["block"], len(known["wrong"]), params)
    runs = scores_of(candidate.label, cell, params, stages, known, rows)
    nothing = {"spearman": None, "auroc": None, "auroc_within_length": None}
    wrong = known["wrong"][rows]
    if not runs or len(np.unique(wrong)) < 2:
        return nothing
    lengths = known["lengths"][rows]
    told = []
    for score in runs:
        varies = np.ptp(score) > 0
        told.append(
            (
                float(spearmanr(score, known["loss"][rows]).statistic) if "loss" in known and varies else 0.0,
                pair_order(wrong, score),
                pair_order(wrong, score, lengths),
            )
        )
    rho, auroc, within = (
        None if any(v is None for v in column) else float(np.mean(column)) for column in zip(*told, strict=True)
    )
    return {"spearman": rho if "loss" in known else None, "auroc": auroc, "auroc_within_length": within}


def pair_order(wrong: np.ndarray, score: np.ndarray, lengths: np.ndarray | None = None) -> float | None:
    """Return how often a wrong problem scores above a right one, ties half; with lengths only where they are equal."""
    import numpy as np

    pairs = wrong[:, None] > wrong[None, :]
    if lengths is not None:
        pairs &= lengths[:, None] == lengths[None, :]
    if not pairs.any():
        return None
    return float((np.sign(score[:, None] - score[None, :])[pairs].mean() + 1) / 2)


def scores_of(
    label: str, cell: Cell, params: DifficultyParams, stages: Any, known: Any, rows: np.ndarray
) -> list[np.ndarray]:
    """Return a candidate's scores of a block's problems, one array a repetition; none where it does not apply."""
    import numpy as np
    import torch

    from fairtrial.lm.difficulty import baselines

    family, block = cell["family"], cell["block"]
    if label in ("perplexity", "entropy", "self-doubt"):
        name = label.replace("-", "_")
        return [known[name][rows]] if name in known else []
    if label == "length":
        return [known["lengths"][rows].astype(float)]
    if label in ("choice-doubt", "rollouts"):
        if "choices" not in known:
            return []
        table = [row[~np.isnan(row)] for row in known["choices"][rows]]
        if label == "choice-doubt":
            return [baselines.choice_doubt(table)]
        return [baselines.rollout_disagreement(table, samples=ROLLOUTS, seed=block)]
    probe, chosen = stages(probe_of, family, block, params)
    if label == "rldp":
        return [scored(probe, known, rows)]
    outside = np.setdiff1d(np.arange(len(known["wrong"])), block_of(block, len(known["wrong"]), params))
    rng = generator(block, label, family)
    labelled = rng.permutation(outside)[:LABELS]
    if label == "trained-probe":
        middle = known["states"].shape[1] // 2
        states = known["states"][:, middle]
        return [baselines.trained_probe(states[labelled], known["wrong"][labelled], states[rows])]
    if label == "text":
        questions = [problem.question for problem in problems_of_family(family, params)]
        return [
            baselines.text_regression(
                [questions[i] for i in labelled], known["wrong"][labelled], [questions[i] for i in rows]
            )
        ]
    if label == "shuffled-labels":
        others = np.setdiff1d(outside, chosen)
        d = known["wrong"][chosen]
        shuffled = [fitted(known, chosen, others, rng.permutation(d), params) for _ in range(PERMUTATIONS)]
        return [scored(one, known, rows) for one in shuffled]
    # A random direction in each layer, the layers weighted as the probe weights them.
    twin = copy.copy(probe)
    twin.method = "direction"
    twin._pool_mean, twin._pool_deviation = torch.zeros(()), torch.ones(())
    runs = []
    for _ in range(PERMUTATIONS):
        twin._w = torch.from_numpy(rng.standard_normal(known["states"].shape[1:]))
        runs.append(scored(twin, known, rows))
    return runs


def measure_control(candidate: Candidate, cell: Cell, params: DifficultyParams, stages: Any) -> dict[str, Any]:
    """Spend one block's budget."""
    import warnings

    import numpy as np

    from fairtrial.lm.difficulty import replaying
    from fairtrial.lm.difficulty.switch import AdaSwitch, Effort

    log = stages(logged, cell["family"], params)
    known = stages(read, cell["family"], params)
    probe, chosen = stages(probe_of, cell["family"], cell["block"], params)
    mine = np.isin(log["rows"], block_of(cell["block"], len(known["wrong"]), params))
    train = ~mine & ~np.isin(log["rows"], chosen)
    if candidate.label == "rollout-switch":
        table = [row[~np.isnan(row)] for row in known["choices"][log["rows"]]]
        from fairtrial.lm.difficulty.baselines import rollout_disagreement

        scores = rollout_disagreement(table, samples=ROLLOUTS, seed=cell["block"])
        extra = ROLLOUTS * known["answer_tokens"][log["rows"]]
    else:
        scores = scored(probe, known, log["rows"])
        extra = np.zeros(len(log["rows"]))
    correct, tokens = log["correct"], log["tokens"]
    costs = tokens[train].mean(0)
    levels = [Effort(f"level {k}", tokens=float(cost)) for k, cost in enumerate(costs)]

    def spent(share: float) -> tuple[float, float]:
        switch = AdaSwitch(probe, levels, budget_tokens=float(costs[0] + share * (costs[-1] - costs[0]) + 1e-9))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # curves that rise are part of the result
            switch.fit(as_log(correct[train], tokens[train], scores[train], levels))
        k = switch.choose_index(scores[mine])
        which = np.arange(len(k))
        return float(correct[mine][which, k].mean()), float((tokens[mine][which, k] + extra[mine]).mean())

    accuracy, cost = spent(0.5)
    frontier: dict[str, float | None] = {}
    for share in BUDGETS:
        a, c = spent(share) if candidate.role != "control" and candidate.role != "reference" else (None, None)
        frontier |= {f"accuracy_{share:g}": a, f"tokens_{share:g}": c}
    if candidate.label == "random-mix":
        accuracy = replaying.mixed(tokens[mine].mean(0).tolist(), correct[mine].mean(0).tolist(), cost)
    elif candidate.label.startswith("always"):
        k = 0 if candidate.label.endswith("cheapest") else -1
        accuracy, cost = float(correct[mine][:, k].mean()), float(tokens[mine][:, k].mean())
    elif candidate.label == "oracle":
        accuracy, cost = replaying.oracle(correct[mine], tokens[mine], cost)
    return {"accuracy": accuracy, "tokens": cost, **frontier}


def as_log(correct: np.ndarray, tokens: np.ndarray, scores: np.ndarray, levels: list[Any]) -> pd.DataFrame:
    """Return a log of answers, a row an answer."""
    import numpy as np
    import pandas as pd

    n, K = correct.shape
    return pd.DataFrame(
        {
            "prompt": np.repeat(np.arange(n), K),
            "level": [level.name for level in levels] * n,
            "correct": correct.ravel(),
            "tokens": tokens.ravel(),
            "score": np.repeat(scores, K),
        }
    )


def efficiency(frame: pd.DataFrame) -> float:
    """Return the tokens that rollouts need for AdaSwitch's accuracy, over AdaSwitch's; at most what they ever spend."""
    import numpy as np

    from fairtrial.lm.difficulty.replaying import cost_at

    label = frame["candidate"].to_numpy()
    means = {
        who: {
            f"{what}_{share:g}": frame[f"{what}_{share:g}"].to_numpy(float)[label == who].mean()
            for what in ("accuracy", "tokens")
            for share in BUDGETS
        }
        for who in ("adaswitch", "rollout-switch")
    }
    theirs = means["rollout-switch"]
    costs = [theirs[f"tokens_{share:g}"] for share in BUDGETS]
    accuracies = [theirs[f"accuracy_{share:g}"] for share in BUDGETS]
    ours = means["adaswitch"]
    return float(min(cost_at(costs, accuracies, ours["accuracy_0.5"]), np.max(costs)) / ours["tokens_0.5"])


# ---------------------------------------------------------------------------------------------------------------- parts

PROBING = (
    Candidate("rldp", "method", uses=("probe",)),
    Candidate("length", "baseline", uses=("baselines",)),
    Candidate("perplexity", "baseline", uses=("baselines",)),
    Candidate("entropy", "baseline", uses=("baselines",)),
    Candidate("choice-doubt", "baseline", uses=("baselines",)),
    Candidate("self-doubt", "baseline", uses=("baselines",)),
    Candidate("rollouts", "baseline", uses=("baselines",)),
    Candidate("trained-probe", "baseline", uses=("baselines",)),
    Candidate("text", "baseline", uses=("baselines",)),
    Candidate("shuffled-labels", "control", uses=("probe",)),
    Candidate("random-direction", "control", uses=("probe",)),
)
CONTROL = (
    Candidate("adaswitch", "method", uses=("probe", "switch")),
    Candidate("rollout-switch", "baseline", uses=("switch", "baselines")),
    Candidate("random-mix", "control"),
    Candidate("always-cheapest", "reference"),
    Candidate("always-dearest", "reference"),
    Candidate("oracle", "reference"),
)


def parts(params: DifficultyParams) -> tuple[Part, ...]:
    """Return the parts: probing, and control of the effort."""
    families = [*all_problems(params)]
    family = Factor("family", families)
    block = Factor("block", range(params.blocks), kind="replicate")
    within = "auroc_within_length"
    probing = Part(
        name="probing",
        candidates=PROBING,
        metrics=(Metric("spearman", "with the true loss"), Metric("auroc", ""), Metric(within, "")),
        factors=(family, block),
        variance="independent",
        claims=(
            Claim(
                "C1",
                "Among problems of equal length RLDP tells wrong from right better than with the references' labels "
                "shuffled, by more than 0.05 AUROC.",
                difference("rldp", "shuffled-labels", within),
                above=0.05,
            ),
            Claim(
                "C2", "Its AUROC is above that of the prompt's perplexity.", difference("rldp", "perplexity", "auroc"),
                above=0,
            ),
            Claim(
                "C3",
                f"With {params.n_ref} references its AUROC is at most 0.05 below that of a probe with {LABELS} labels.",
                difference("rldp", "trained-probe", "auroc"),
                above=-0.05,
            ),
            *(report(f"R1-{name}", f"AUROC in {name}", level("rldp", "auroc", {"family": name})) for name in families),
            report("R2", "AUROC of the prompt's length", level("length", "auroc")),
            report("R3", "AUROC of the words and letters alone", level("text", "auroc")),
            report("R4", "AUROC of the choices' own probabilities", level("choice-doubt", "auroc")),
        ),
        measure=measure_probing,
        group=("family", "block"),
    )  # fmt: skip
    if not params.log and not has_choices(params):
        return (probing,)
    rollouts = Claim(
        "C5",
        f"For its accuracy the same controller on the disagreement of {ROLLOUTS} rollouts pays at least 1.34 "
        "times its tokens.",
        statistic(efficiency),
        above=1.34,
    )
    shares = [name for share in BUDGETS for name in (f"accuracy_{share:g}", f"tokens_{share:g}")]
    control = Part(
        name="control",
        candidates=tuple(c for c in CONTROL if c.label != "rollout-switch" or not params.log),
        metrics=(
            Metric("accuracy", ""),
            Metric("tokens", "a prompt", higher_is_better=False),
            *(Metric(name, "", higher_is_better=name.startswith("accuracy")) for name in shares),
        ),
        factors=(family, block),
        variance="independent",
        claims=(
            Claim(
                "C4",
                "AdaSwitch is right more often than a random mix of the efforts at the same cost.",
                difference("adaswitch", "random-mix", "accuracy"),
                above=0,
            ),
            *([] if params.log else [rollouts]),
            report(
                "R5",
                "what an oracle of the same cost is right more often",
                difference("oracle", "adaswitch", "accuracy"),
            ),
            report("R6", "accuracy of the dearest effort always", level("always-dearest", "accuracy")),
            report("R7", "accuracy of the cheapest effort always", level("always-cheapest", "accuracy")),
        ),
        measure=measure_control,
        group=("family", "block"),
    )
    return probing, control


def has_choices(params: DifficultyParams) -> bool:
    """Return whether the user's problems have choices, so that efforts can be measured here."""
    return all(problem.choices for found in all_problems(params).values() for problem in found)


def check(params: DifficultyParams) -> None:
    """Refuse what cannot be read before any worker starts."""
    from fairtrial.data.samples import sample_path

    check_named(params.model, device=params.device)
    if params.log:
        if not Path(params.log).is_file():
            raise InputError(f"log={params.log}: no such file")
    elif params.problems == "families":
        sample_path("analogies")
    elif params.problems != "tiny" and not Path(params.problems).is_file():
        raise InputError(f"problems={params.problems}: no such file")
    for family, found in all_problems(params).items():
        if len({bool(problem.choices) for problem in found}) > 1:
            raise InputError(f"problems={params.problems}: some problems of {family!r} have choices and others none")
        if (few := len(found) - (0 if params.log else params.shots)) < params.blocks * 3 + params.n_ref:
            raise InputError(
                f"family {family!r} has {max(few, 0)} problems beside {params.shots} examples: "
                f"{params.blocks * 3 + params.n_ref} are needed for {params.blocks} blocks: give more, or less blocks="
            )


trial = Trial(
    name="difficulty",
    params=DifficultyParams,
    parts=parts,
    presets={
        "smoke": {
            "model": "tiny", "problems": "tiny", "per_family": 40, "n_ref": 8, "blocks": 2, "shots": 2, "controlled": 6,
        },
        "full": {"blocks": 16, "per_family": 240},
    },
    check=check,
)  # fmt: skip
