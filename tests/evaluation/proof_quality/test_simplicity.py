import numpy as np
import pytest

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.proof_quality.metamath import Metamath
from fairtrial.evaluation.proof_quality.proof import Proof
from fairtrial.evaluation.proof_quality.simplicity import (
    RememberingEncoder,
    Taxonomy,
    cognitive_simplicity,
    default_taxonomy,
    fit_threshold,
)
from fairtrial.evaluation.proof_quality.theorems import bank


def test_the_taxonomy_has_64_techniques_of_levels_one_to_five():
    levels = [technique.level for technique in default_taxonomy()]
    assert len(levels) == 64
    assert set(levels) == {1, 2, 3, 4, 5}


def test_every_technique_of_the_bank_is_in_the_taxonomy():
    for entry in bank():
        for technique in entry.techniques:
            assert default_taxonomy()[technique].id == technique


def test_triggers_find_most_techniques_of_the_bank_and_little_else():
    found = [set().union(*default_taxonomy().tag(entry.proof)) for entry in bank()]
    right = sum(len(tags & entry.techniques) for tags, entry in zip(found, bank(), strict=True))
    total = sum(map(len, found)) + sum(len(entry.techniques) for entry in bank())
    assert 2 * right / total > 0.8


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("By induction on $n$ it holds.", {"induction"}),
        ("We avoid induction here.", set()),
        ("There is no need for generating functions.", set()),
        ("Without using Galois theory, by the pigeonhole principle.", {"pigeonhole"}),
        ("Work modulo $7$.", {"modular-arithmetic"}),
        ("Nothing special happens.", set()),
    ],
)
def test_a_technique_that_is_denied_is_not_used(text, tags):
    assert default_taxonomy().tag(Proof(text, "p")) == [tags]


def test_the_score_is_that_of_the_formula():
    proof = Proof(["By induction, fine.", "By Galois theory, fine.", "Fine, fine, fine."], "p")
    lengths = [step.tokens for step in proof.steps]
    mean = (lengths[0] * 1 + lengths[1] * 5 + lengths[2] * 1) / sum(lengths)
    found = cognitive_simplicity(proof)
    assert found.score == pytest.approx((6 - (0.5 * 5 + 0.5 * mean) - 1) / 4)
    assert (found.highest, found.mean) == (5, mean)
    assert cognitive_simplicity(proof, tags=[set(), set(), set()]).score == 1


def test_an_encoder_adds_what_is_similar():
    def encoder(sentences):  # the second direction is that of descents
        return np.array([[0.0, 1.0] if "smaller" in sentence else [1.0, 0.0] for sentence in sentences])

    proof = Proof("Each such thing leads to a smaller one.", "p")
    assert "infinite-descent" in default_taxonomy().tag(proof, encoder=encoder)[0]
    assert "infinite-descent" not in default_taxonomy().tag(proof)[0]


def test_a_remembering_encoder_asks_for_each_sentence_once():
    asked = []

    def encoder(sentences):
        asked.extend(sentences)
        return np.array([[float(len(sentence))] for sentence in sentences])

    remembering = RememberingEncoder(encoder)
    remembering(["a", "bb", "a"])
    assert remembering(["bb", "ccc"]).tolist() == [[2.0], [3.0]]
    assert asked == ["a", "bb", "ccc"]


def test_the_threshold_is_chosen_by_f1_and_judged_on_other_problems():
    """Steps whose vectors lie at a known cosine from the description of their technique: .8 if used, .4 if not."""
    techniques = [technique.id for technique in default_taxonomy()][:8]
    described = {f"{t.name}: {t.description}": i for i, t in enumerate(default_taxonomy())}
    size = len(described) + 1

    def encoder(sentences):
        vectors = np.zeros((len(sentences), size))
        for row, sentence in enumerate(sentences):
            if sentence in described:
                vectors[row, described[sentence]] = 1
            else:
                number = len(sentence.split()[1])
                vectors[row, number], vectors[row, (number + 1) % 8] = 0.8, 0.4
        return vectors

    proofs = [Proof(f"Take {'z' * i} now.", f"p{i}") for i in range(8) if i]
    threshold, f1 = fit_threshold(proofs, [{techniques[i]} for i in range(1, 8)], encoder)
    assert 0.4 < threshold <= 0.8
    assert f1 == 1


def test_a_taxonomy_of_ones_own_replaces_the_levels(tmp_path):
    file = tmp_path / "mine.toml"
    entry = (
        '[[technique]]\nid = "magic"\nlevel = 4\nname = "magic"\ndescription = "spells"\ntriggers = ["abracadabra"]\n'
    )
    file.write_text(entry)
    assert cognitive_simplicity(Proof("Abracadabra.", "p"), file).highest == 4
    for broken, said in (
        (entry.replace("4", "6"), "level must be"),
        (entry.replace('"abracadabra"', '"("'), "no regular expression"),
        ("[[technique]]\n", "KeyError"),
        ("technique", "no taxonomy"),
    ):
        file.write_text(broken)
        with pytest.raises(InputError, match="mine.toml".replace(".", r"\.")) as raised:
            Taxonomy(file)
        assert said in str(raised.value)


def test_an_unknown_technique_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'induction'"):
        cognitive_simplicity(Proof("Fine.", "p"), tags=[{"inductoin"}])
    with pytest.raises(InputError, match="0 sets of tags for 1 steps"):
        cognitive_simplicity(Proof("Fine.", "p"), tags=[])


def test_a_formal_proof_is_simple_where_it_cites_familiar_lemmas_at_little_depth(tmp_path):
    lines = ["$c |- T $. a $a |- T $. b $a |- T $."]
    lines += [f"t{i} $p |- T $= a $." for i in range(8)] + ["deep $p |- T $= t7 $.", "odd $p |- T $= b $."]
    (tmp_path / "x.mm").write_text("\n".join(lines))
    library = Metamath(tmp_path / "x.mm")
    score = {label: cognitive_simplicity(Proof.from_metamath(library, label)).score for label in ("t0", "deep", "odd")}
    assert score["t0"] == 1  # the most cited statement, and nothing is less deep
    assert score["odd"] == pytest.approx(np.log(2) / np.log(9))
    assert score["deep"] == pytest.approx(np.log(2) / np.log(9) - 0.9)
