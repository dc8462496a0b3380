import math
import statistics

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.ease import LOAD_PER_TOKEN, computational_ease, formula_load, operators
from fairtrial.evaluation.proof_quality.latex import math_tokens
from fairtrial.evaluation.proof_quality.proof import Proof, Step
from fairtrial.evaluation.proof_quality.theorems import bank

SYMBOLS = [sympy.Symbol(name, positive=True) for name in "abxyn"]
LEAVES = st.one_of(st.sampled_from(SYMBOLS), st.integers(2, 99).map(sympy.Integer))


def combined(children):
    pair = st.tuples(children, children)
    how = {"evaluate": False}
    return st.one_of(
        pair.map(lambda p: (sympy.Add(p[0][0], p[1][0], **how), rf"({p[0][1]}) + ({p[1][1]})")),
        pair.map(lambda p: (sympy.Mul(p[0][0], p[1][0], **how), rf"({p[0][1]})({p[1][1]})")),
        pair.map(lambda p: (sympy.Pow(p[0][0], p[1][0], **how), rf"({p[0][1]})^{{{p[1][1]}}}")),
    )


EXPRESSIONS = st.recursive(LEAVES.map(lambda leaf: (leaf, str(leaf))), combined, max_leaves=6)


@settings(max_examples=50, deadline=None)
@given(EXPRESSIONS)
def test_operators_are_those_that_sympy_counts(case):
    expression, latex = case
    assert operators(math_tokens(latex))[0] == len([e for e in sympy.preorder_traversal(expression) if e.args])


@pytest.mark.parametrize(
    ("latex", "count"),
    [
        ("2ab", 2),
        ("2(x+1)(y)", 3),
        ("f(x) = n!", 1),
        (r"\frac{a}{b}", 1),
        (r"\frac a b + \frac{a+b}{2}", 4),
        (r"\sqrt{2}\,q", 2),
        (r"\sum_{k=0}^{n} \binom{n}{k} x^k", 5),
        (r"a \equiv b \pmod p", 1),
        (r"\log_2 3", 1),
        (r"-x", 1),
        (r"x_1, \dots, x_n", 0),
    ],
)
def test_operators_of_common_formulas(latex, count):
    tokens = math_tokens(latex)
    assert operators(tokens)[0] - tokens.count("^") + latex.count("^") == pytest.approx(count, abs=1)


def test_the_load_adds_long_numbers_and_nesting():
    assert formula_load(math_tokens("12 + 12345")) == 1 + 3
    assert formula_load(math_tokens("((a + b) + [c])")) == 2 + 2


def test_half_is_the_ease_of_the_usual_load():
    proof = Proof("Then $a + b = c + d$.", "p")
    assert computational_ease(proof, load_per_token=2 / proof.length).score == 0.5
    assert computational_ease(Proof("Nothing to compute.", "p")).score == 1


def test_the_chain_the_largest_formula_and_the_cases_are_told():
    ease = computational_ease(Proof("Case 1: $a < b = c \\le d$. Case 2: $a + b + c$. Done.", "p"))
    assert (ease.longest_chain, ease.largest, ease.cases) == (3, 2, 2)


def test_the_default_load_is_the_median_of_the_bank():
    loads = [computational_ease(e.proof).load / e.proof.length for e in bank()]
    assert math.isclose(statistics.median(loads), LOAD_PER_TOKEN, abs_tol=0.005)


def test_formal_proofs_and_parameters_that_are_not_positive_are_refused():
    with pytest.raises(InputError, match="formal"):
        computational_ease(Proof([Step("a", "a", uses=())], "p"))
    with pytest.raises(InputError, match="at least 1"):
        computational_ease(Proof("A.", "p"), reference_length=0)
