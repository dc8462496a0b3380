import pickle

import cloudpickle
import pytest

from fairtrial.errors import InputError
from fairtrial.trial.declare import Candidate, Claim, Factor, Metric, Part, contrast, difference, level


def part(**changes):
    plain = {
        "name": "p",
        "candidates": (Candidate("a", "method"), Candidate("b", "control")),
        "metrics": (Metric("score"),),
        "factors": (Factor("seed", range(2), kind="replicate"),),
        "variance": "independent",
        "claims": (),
        "measure": lambda *_: {"score": 0.0},
    }
    return Part(**{**plain, **changes})


def test_cells_are_in_declared_order_with_the_replicate_slowest():
    factors = (
        Factor("rate", (0.1, 0.2)),
        Factor("seed", range(2), kind="replicate", most=9),
        Factor("fold", "xy", kind="within"),
    )
    cells = list(part(factors=factors).cells())
    assert [tuple(cell.values()) for cell in cells[:4]] == [(0, 0.1, "x"), (0, 0.1, "y"), (0, 0.2, "x"), (0, 0.2, "y")]
    assert len(cells) == 8
    grown = list(part(factors=factors).cells(3))
    assert grown[:8] == cells, "a trial that grows keeps the cells it has"
    assert {cell["seed"] for cell in grown} == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": (Candidate("a", "method"), Candidate("a", "control"))}, "candidate 'a' is declared twice"),
        ({"metrics": (Metric("x"), Metric("x"))}, "metric 'x' is declared twice"),
        ({"metrics": (Metric("x"), Metric("t", timed=True))}, "timed and untimed metrics need a part each"),
        ({"metrics": ()}, "needs candidates and metrics"),
        ({"factors": (Factor("s", (0,)), Factor("s", (1,)))}, "factor 's' is declared twice"),
        ({"factors": (Factor("s", ()),)}, "'s' has no values"),
        (
            {"factors": (Factor("s", (0, 1), "replicate"), Factor("d", (0, 1), "replicate"))},
            "one factor of kind 'replicate'",
        ),
        ({"factors": (Factor("s", (3, 4), "replicate", most=9),)}, "only a replicate over range"),
        ({"factors": (Factor("s", range(3), "setting", most=9),)}, "only a replicate over range"),
        ({"claims": (Claim("C", "", level("a", "x"), above=0),) * 2}, "claim 'C' is declared twice"),
        (
            {"candidates": (Candidate("a", "method", grid=({"k": 1},)), Candidate("b", "baseline", grid=({}, {})))},
            "tuned over [1, 2] points",
        ),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(InputError, match="part 'p'") as error:
        part(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize("bounds", [{}, {"above": 0, "below": 1}])
def test_a_claim_has_exactly_one_bound(bounds):
    with pytest.raises(InputError, match="exactly one"):
        Claim("C", "", difference("a", "b", "score"), **bounds)


def test_untuned_candidates_need_no_grid_beside_tuned_ones():
    tuned = Candidate("a", "method", grid=({"k": 1}, {"k": 2}))
    assert part(candidates=(tuned, Candidate("b", "control"))).candidates[0].grid[1] == {"k": 2}


def test_contrast_keys_name_candidate_metric_and_where():
    terms = contrast({("a", "m", (("rate", 0.1),)): 1, ("b", "m", None): -1}).terms
    assert terms == ((("a", "m", {"rate": 0.1}), 1.0), (("b", "m", {}), -1.0))


def test_a_part_with_a_lambda_crosses_to_a_worker():
    assert pickle.loads(cloudpickle.dumps(part())).measure(None, None, None, None) == {"score": 0.0}
