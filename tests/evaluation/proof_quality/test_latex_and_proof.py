import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairtrial.errors import InputError
from fairtrial.evaluation.proof_quality.latex import math_tokens, pieces
from fairtrial.evaluation.proof_quality.operators import retype
from fairtrial.evaluation.proof_quality.proof import Proof, read_jsonl
from fairtrial.evaluation.proof_quality.theorems import bank


def texts(proof):
    return [step.text for step in proof.steps]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"$x \leq 2$", r"\(x\le2\)"),
        (r"\[x^{2}\]", r"$$ x^2 $$"),
        (r"$\left(\dfrac{a}{b}\right)$", r"$(\frac{a}{b})$"),
        (r"\newcommand{\R}{\mathbb{R}} $\R$", r"$\mathbb R$"),
        (r"\newcommand{\abs}[1]{|#1|} $\abs{x+1}$", r"$|x+1|$"),
        (r"\def\half{\frac12} $\half$", r"$\frac 12$"),
        ("$a$ % a remark\nholds", "$a$ holds"),
        (r"\begin{align*} a &= b \\ &= c \end{align*}", r"\[a = b = c\]"),
        (r"\emph{every} $x$", "every $x$"),
    ],
)
def test_typography_does_not_show(one, other):
    assert pieces(one) == pieces(other)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["x", "+", "{", "}", "2", r"\alpha", "(", ")"]), max_size=12))
def test_tokens_of_a_formula_do_not_depend_on_white_space(parts):
    depths = [parts[:i].count("{") - parts[:i].count("}") for i in range(len(parts) + 1)]
    if min(depths) < 0 or depths[-1]:
        with pytest.raises(InputError, match="unbalanced brace"):
            math_tokens(" ".join(parts))
        return
    tight = math_tokens(" ".join(parts))
    assert tight == math_tokens("  ".join(parts) + " ")
    assert tight.count("{") == tight.count("}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Let $x = 1. Then.", "opened at line 1, column 5 and never closed"),
        (r"Let x\) = 1", "at line 1, column 6 closes what was not opened"),
        (r"\[ x \begin{align} y \end{align} \]", "column 6 while the math opened at line 1, column 1 is still open"),
        (r"$\frac{1{2}$", "problem 'p': unbalanced brace: opened at line 1, column 7 and never closed"),
        ("Let\n$x}$", "unbalanced brace: '}' at line 2, column 3 closes none"),
        ("% {\n$a \\label{eq} x}$", "unbalanced brace: '}' at line 2, column 16 closes none"),
        (r"\newcommand{\R}{\mathbb{R}} $\R + \R x}$", "unbalanced brace: '}' at line 1, column 39 closes none"),
        (r"\newcommand{\R}{\mathbb{R} $\R$", "unbalanced brace: opened at line 1, column 16 and never closed"),
        (r"\newcommand{\R}[1]{#1} $x$ and \R", "where a macro's argument is missing"),
        (["Fine.", "Let\n$x"], "step 2: unbalanced math: opened at line 2, column 1 and never closed"),
        (r"\newcommand{\a}{\b}\newcommand{\b}{\a} $\a$", "call each other without end"),
    ],
)
def test_unbalanced_mathematics_is_named_with_its_position(text, said):
    with pytest.raises(InputError, match=r"problem 'p'") as raised:
        Proof(text, "p")
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["", "   ", "\n\n", []])
def test_an_empty_proof_is_refused(text):
    with pytest.raises(InputError, match="empty"):
        Proof(text, "p")


def test_steps_are_sentences_with_their_displays():
    proof = Proof(
        r"Let $n = 2.5$, i.e. not an integer. Then \[ n^2 = 6.25. \] It follows that $n < 3$."
        "\n\nStep 1. Write $n = 5/2$.\nCase 2: nothing. Lemma 3. For all $x$ we are done",
        "p",
    )
    assert texts(proof) == [
        "Let $n = 2.5$, i.e. not an integer.",
        "Then $n ^ 2 = 6.25$.",
        "It follows that $n < 3$.",
        "Step 1. Write $n = 5 / 2$.",
        "Case 2: nothing.",
        "Lemma 3. For all $x$ we are done",
    ]
    assert [step.heading for step in proof.steps] == ["", "", "", "step 1", "case 2", "lemma 3"]


def test_labels_and_references_are_read():
    proof = Proof(r"We have \begin{equation} a = b \label{eq:one} \end{equation} By \eqref{eq:one}, $b = a$.", "p")
    assert proof.steps[0].labels == ("eq:one",)
    assert proof.steps[1].refs == ("eq:one",)


def test_tokens_are_words_numbers_marks_and_symbols():
    assert Proof(r"Hence $x_{12} \le \frac{a}{b}$.", "p").length == len(
        ["Hence", "x", "_", "12", "le", "frac", "a", "b", "."]
    )


@pytest.mark.parametrize("entry", bank(), ids=lambda entry: entry.proof.problem)
def test_steps_read_again_are_the_same(entry):
    again = entry.proof.with_steps(texts(entry.proof))
    assert [(s.prose, s.formulas, s.tokens) for s in again.steps] == [
        (s.prose, s.formulas, s.tokens) for s in entry.proof.steps
    ]
    assert [s.formulas for s in retype(entry.proof).steps] == [s.formulas for s in entry.proof.steps]


# ------------------------------------------------------------------------------------------------------------- files


def written(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_rows_are_read_with_what_is_known_of_them(tmp_path):
    row = {"problem_id": 7, "proof": "Clear.", "model": "m", "correct": 1, "technique_requested": "parity"}
    one, two = read_jsonl(
        written(tmp_path / "p.jsonl", row, "", {"problem_id": "a", "proof": ["Let $x = 1$.", "Done."]})
    )
    assert (one.problem, one.model, one.correct, one.requested) == ("7", "m", True, "parity")
    assert (two.correct, two.model, len(two)) == (None, None, 2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{"], "row 1: not JSON"),
        ([{"proof": "x"}], "row 1: needs the keys"),
        ([{"problem_id": 1, "proof": "Fine."}, {"problem_id": 2, "proof": "Let $x"}], "row 2: problem '2': unbalanced"),
        ([{"problem_id": 1, "proof": ""}], "row 1: problem '1': the proof is empty"),
        ([{"problem_id": 1, "proof": 3}], "row 1: proof must be text"),
        ([{"problem_id": 1, "proof": "Fine.", "correct": "yes"}], "row 1: proof must be text"),
        ([""], "holds no proof"),
    ],
)
def test_a_bad_row_is_named(tmp_path, rows, said):
    with pytest.raises(InputError, match=r"p\.jsonl") as raised:
        read_jsonl(written(tmp_path / "p.jsonl", *rows))
    assert said in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_jsonl(tmp_path / "none.jsonl")
