"""The decoder against a naive verifier that substitutes and compares, on a small database and on set.mm."""

import re

import numpy as np
import pytest

from fairtrial.data.samples import sample_path
from fairtrial.errors import InputError, MissingSampleError, UnknownNameError
from fairtrial.evaluation.proof_quality.metamath import Metamath, letter_numbers
from fairtrial.evaluation.proof_quality.proof import Proof

SMALL = r"""
$( A fragment of propositional logic. $)
$c ( ) -> wff |- $.
$v p q r s $.
wp $f wff p $. wq $f wff q $. wr $f wff r $. ws $f wff s $.
wi $a wff ( p -> q ) $.
a1 $a |- ( p -> ( q -> p ) ) $.
a2 $a |- ( ( p -> ( q -> r ) ) -> ( ( p -> q ) -> ( p -> r ) ) ) $.
${ min $e |- p $.  maj $e |- ( p -> q ) $.  mp $a |- q $. $}
${ a1i.1 $e |- p $.  a1i $p |- ( q -> p ) $= wp wq wp wi a1i.1 wp wq a1 mp $. $}
${ mp2.1 $e |- p $.  mp2.2 $e |- q $.  mp2.3 $e |- ( p -> ( q -> r ) ) $.
   mp2 $p |- r $= ( wi mp ) BCEABCGDFHH $. $}
id $p |- ( p -> p ) $= ( wi a1 a2 mp ) AAABZBZFAACAFABBGFBAFCAFADEE $.
${ half.1 $e |- p $.  half $p |- ( q -> p ) $= ? $. $}
${ lost.1 $e |- p $.  lost $p |- ( q -> p ) $= ( nowhere ) D $. $}
"""


@pytest.fixture
def small(tmp_path):
    file = tmp_path / "small.mm"
    file.write_text(SMALL)
    return Metamath(file)


class Naive:
    """A verifier that knows nothing of the index: it reads the whole file and runs proofs by substitution."""

    def __init__(self, text):
        tokens = re.sub(r"\$\(.*?\$\)", " ", text, flags=re.DOTALL).split()
        self.statements, self.variables, self.frames = {}, set(), {}
        scopes, at = [[]], 0
        while at < len(tokens):
            token = tokens[at]
            if token == "${":
                scopes.append([])
            elif token == "$}":
                scopes.pop()
            elif token in ("$c", "$v", "$d"):
                end = tokens.index("$.", at)
                if token == "$v":
                    self.variables |= set(tokens[at + 1 : end])
                at = end
            else:
                end = tokens.index("$.", at)
                label, kind, body = token, tokens[at + 1], tokens[at + 2 : end]
                statement, _, proof = (" ".join(body)).partition(" $= ")
                self.statements[label] = statement.split()
                if kind in ("$e", "$f"):
                    scopes[-1].append((kind, label))
                    self.frames[label] = []
                else:
                    active = [entry for scope in scopes for entry in scope]
                    essential = [name for k, name in active if k == "$e"]
                    spoken = {s for name in (*essential, label) for s in self.statements[name]} & self.variables
                    self.frames[label] = [name for k, name in active if k == "$e" or self.statements[name][1] in spoken]
                    if kind == "$p":
                        self.statements[label, "proof"] = proof.split()
                at = end
            at += 1

    def letters(self, text):
        numbers, current = [], 0
        for letter in text:
            if letter == "Z":
                numbers[-1] = (numbers[-1][0], True)
            elif letter <= "T":
                numbers.append((current * 20 + "ABCDEFGHIJKLMNOPQRST".index(letter) + 1, False))
                current = 0
            else:
                current = current * 5 + "UVWXY".index(letter) + 1
        return numbers

    def run(self, label):
        """Return the number of references of a proof, after checking that it proves its statement."""
        words = self.statements[label, "proof"]
        if words[0] != "(":
            plan = [(word, False) for word in words]
        else:
            close = words.index(")")
            names = [*self.frames[label], *words[1:close]]
            plan = [
                (names[n - 1] if n <= len(names) else n - len(names) - 1, tag)
                for n, tag in self.letters("".join(words[close + 1 :]))
            ]
        stack, saved = [], []
        for name, tag in plan:
            if isinstance(name, int):
                stack.append(saved[name])
            else:
                frame = self.frames[name]
                taken = stack[len(stack) - len(frame) :]
                del stack[len(stack) - len(frame) :]
                swap = {}
                for hypothesis, value in zip(frame, taken, strict=True):
                    stated = self.statements[hypothesis]
                    if len(stated) == 2 and stated[1] in self.variables and stated[0] == value[0]:
                        swap.setdefault(stated[1], value[1:])
                for hypothesis, value in zip(frame, taken, strict=True):
                    assert self.put(self.statements[hypothesis], swap) == value, (label, name)
                stack.append(self.put(self.statements[name], swap))
            if tag:
                saved.append(stack[-1])
        assert stack == [self.statements[label]]
        return len(plan)

    def put(self, statement, swap):
        return [part for symbol in statement for part in swap.get(symbol, [symbol])]


@pytest.mark.parametrize("label", ["a1i", "mp2", "id"])
def test_the_small_proofs_have_as_many_steps_as_a_naive_verifier_makes(small, label):
    naive = Naive(SMALL)
    assert small.size(label) == naive.run(label) == sum(step.tokens for step in small.steps(label))
    assert small.mandatory(label) == naive.frames[label]


def test_the_graph_of_a_formal_proof_is_exact(small):
    proof = Proof.from_metamath(small, "mp2")
    assert {step.text for step in proof.steps} == {"wp", "wq", "wr", "mp2.1", "mp2.2", "mp2.3", "wi", "mp"}
    assert proof.steps[-1].text == "mp"
    assert proof.formal
    assert proof.correct
    assert [step.text for step in proof.steps[:2]] == ["wq", "wr"]  # the order is that of the letters
    made = next(step for step in proof.steps if step.text == "wi")
    assert [proof.steps[i].text for i in made.uses] == ["wq", "wr"]


def test_citations_are_of_the_proofs_own_typecode(small):
    assert small.cites("mp2") == ["mp"]
    assert small.cites("id") == ["a1", "a2", "mp"]
    assert (small.depth("a1"), small.depth("id"), small.cited_by("mp")) == (0, 1, 3)
    assert -1 <= small.simplicity("id") <= 1
    assert small.hypotheses("a1i") == [("|-", "p")]


@pytest.mark.parametrize(
    ("label", "error", "said"),
    [
        ("half", InputError, "incomplete"),
        ("lost", InputError, "cites 'nowhere'"),
        ("mp", InputError, "no proof"),
        ("mp3", UnknownNameError, "did you mean"),
    ],
)
def test_what_cannot_be_decoded_is_named(small, label, error, said):
    with pytest.raises(error, match=re.escape(said)):
        Proof.from_metamath(small, label)


def test_a_file_without_statements_is_refused(tmp_path):
    (tmp_path / "a.mm").write_text("nothing")
    with pytest.raises(InputError, match="no Metamath statement"):
        Metamath(tmp_path / "a.mm")
    with pytest.raises(InputError, match="no such file"):
        Metamath(tmp_path / "b.mm")


def test_the_letter_code_counts_through_all_words():
    """Every word of up to three letters, in the order of its number: 1, 2, 3, ..."""
    last, digits = "ABCDEFGHIJKLMNOPQRST", "UVWXY"
    words = [*last, *(d + z for d in digits for z in last), *(d + e + z for d in digits for e in digits for z in last)]
    assert [number for word in words for number, _ in letter_numbers(word)] == list(range(1, len(words) + 1))
    joined = "".join(word + "Z" * (i % 3 == 0) for i, word in enumerate(words))
    assert list(letter_numbers(joined)) == [(i + 1, i % 3 == 0) for i in range(len(words))]
    assert [(n, z) for n, z in Naive(SMALL).letters(joined)] == list(letter_numbers(joined))


# ------------------------------------------------------------------------------------------------------------ set.mm


@pytest.fixture(scope="module")
def set_mm():
    try:
        path = sample_path("set-mm", "set.mm")
    except MissingSampleError:
        pytest.skip("needs the sample set-mm")
    return Metamath(path)


@pytest.mark.slow
def test_200_random_theorems_of_set_mm_have_the_steps_of_a_naive_verifier(set_mm):
    naive = Naive(set_mm.path.read_text())
    labels = sorted(set_mm.theorems())
    chosen = np.random.default_rng(0).choice(len(labels), 200, replace=False)
    for label in (labels[i] for i in chosen):
        proof = Proof.from_metamath(set_mm, label)
        assert naive.run(label) == set_mm.size(label) == proof.length
        assert set_mm.mandatory(label) == naive.frames[label]


@pytest.mark.slow
def test_the_library_has_the_depths_that_the_prototype_measured(set_mm):
    assert (set_mm.depth("sqrt2irr"), set_mm.depth("infpn")) == (222, 200)
    assert max(map(set_mm.depth, set_mm.theorems())) == 483


@pytest.mark.slow
def test_the_pairs_are_those_that_the_prototype_measured(set_mm):
    """64.8 % shorter, 26.4 % equal, 8.9 % longer of 261 pairs, median ratio .996; 148 alternative proofs."""
    pairs = {"OLD": [], "ALT": []}
    for label in set_mm.theorems():
        kind, new = label[-3:], label[:-3]
        if kind in pairs and new in set_mm and set_mm.statement(label) == set_mm.statement(new):
            pairs[kind].append((set_mm.size(new), set_mm.size(label)))
    new, old = np.array(pairs["OLD"]).T
    assert (len(new), len(pairs["ALT"])) == (261, 148)
    shares = np.array([(new < old).mean(), (new == old).mean(), (new > old).mean()])
    np.testing.assert_allclose(shares, [0.648, 0.264, 0.089], atol=1e-3)
    assert np.median(new / old) == pytest.approx(0.996, abs=5e-4)


@pytest.mark.slow
def test_every_proof_of_set_mm_is_decoded(set_mm):
    for label in set_mm.theorems():
        assert sum(step.tokens for step in set_mm.steps(label)) == set_mm.size(label)
