"""What the commands print of a result."""

import io

import pytest
from rich.console import Console

from fairtrial.cli import show
from fairtrial.report.read import Document


@pytest.fixture
def printed(make):
    document = Document.model_validate(make.document(make.cells(draws=2), make.SIX + make.MORE))

    def lines(width):
        console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
        show._verdicts(console, document)
        return console.file.getvalue().splitlines()

    return lines


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_longer_than_the_terminal(printed, width):
    assert max(map(len, printed(width))) <= width


def test_a_claim_stands_above_its_verdict_and_numbers(printed):
    lines = printed(80)
    at = next(i for i, line in enumerate(lines) if line.startswith("C2 "))
    assert lines[at : at + 3] == [
        "C2  FiedlerPrune finds the right answer more often than magnitude pruning, by at",
        "    least 0.02.",
        "    FAILS           -0.031  [-0.049, -0.013]  > 0.02",
    ]


def test_a_difference_of_logarithms_is_printed_as_a_ratio(printed):
    assert any(line.split() == ["HOLDS", "1.82", "x", "[1.63,", "2.03]", "<", "3", "x"] for line in printed(80))


def test_what_is_not_measured_is_said_so_with_the_reason(printed):
    lines = printed(80)
    at = next(i for i, line in enumerate(lines) if line.startswith("C10"))
    assert [line.strip() for line in lines[at + 1 : at + 3]] == [
        "not measured",
        "these parameters leave out 'SparseGPT'",
    ]


def test_units_are_printed_where_there_is_room(printed):
    assert any(line.endswith("5 replicates") for line in printed(120))
    assert not any(line.endswith("5 replicates") for line in printed(80))


def test_the_level_of_the_intervals_is_said_once(printed):
    said = "intervals at the level of each claim's rank (Holm); together they keep 95 %"
    assert printed(80).count(said) == 1
    assert printed(80)[-1] == said
