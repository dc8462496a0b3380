import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.errors import InputError, UnknownNameError
from fairtrial.evaluation.proof_quality.adaptive import adaptivity, techniques_used
from fairtrial.evaluation.proof_quality.diverse import distances, distinct, diversity, rarefied_vendi, vendi
from fairtrial.evaluation.proof_quality.operators import copy
from fairtrial.evaluation.proof_quality.proof import Proof, Step
from fairtrial.evaluation.proof_quality.theorems import bank


def kernel_of(n, seed=0):
    vectors = np.abs(np.random.default_rng(seed).normal(size=(n, 4)))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


@given(st.integers(2, 20))
def test_copies_have_a_vendi_score_of_one_and_orthogonal_proofs_of_n(n):
    assert vendi(np.ones((n, n)))[0] == pytest.approx(1)
    assert vendi(np.eye(n))[0] == pytest.approx(n)


@given(st.floats(0, 0.999))
def test_two_proofs_have_the_eigenvalues_one_plus_and_minus_c_over_two(c):
    high, low = (1 + c) / 2, (1 - c) / 2
    assert vendi(np.array([[1, c], [c, 1]]))[0] == pytest.approx(math.exp(-high * math.log(high) - low * math.log(low)))


def test_at_a_similarity_of_a_half_that_is_1_7548():
    assert vendi(np.array([[1, 0.5], [0.5, 1]]))[0] == pytest.approx(1.7548, abs=5e-5)
    assert math.log(1.7548) == pytest.approx(0.5623, abs=1e-4)


def test_a_kernel_that_is_not_positive_is_clipped_and_told():
    bad = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.9], [0.1, 0.9, 1.0]])
    values = np.linalg.eigvalsh(bad)
    assert values[0] < 0
    score, clipped = vendi(bad)
    share = values[1:] / values[1:].sum()
    assert score == pytest.approx(math.exp(-(share * np.log(share)).sum()))
    assert clipped == pytest.approx(-values[0] / np.abs(values).sum())
    assert vendi(kernel_of(5))[1] == 0


@pytest.mark.parametrize(("n", "size"), [(4, 2), (6, 3), (5, 5)])
def test_rarefaction_is_the_mean_over_all_subsets(n, size):
    kernel = kernel_of(n)
    by_hand = [vendi(kernel[np.ix_(chosen, chosen)])[0] for chosen in itertools.combinations(range(n), size)]
    assert rarefied_vendi(kernel, size) == pytest.approx(np.mean(by_hand))


def test_the_exact_mean_over_subsets_is_that_of_monte_carlo_within_three_standard_errors():
    kernel, size = kernel_of(12, seed=1), 4
    by_subset = [vendi(kernel[np.ix_(c, c)])[0] for c in itertools.combinations(range(12), size)]
    error = np.std(by_subset) / math.sqrt(1000)
    exact, drawn = rarefied_vendi(kernel, size), rarefied_vendi(kernel, size, exact=False, seed=3)
    assert exact == pytest.approx(np.mean(by_subset))
    assert 0 < abs(exact - drawn) < 3 * error
    assert rarefied_vendi(kernel_of(13), 3, seed=1) == rarefied_vendi(kernel_of(13), 3, seed=1)


def test_only_possible_sizes_are_rarefied():
    for size in (1, 5):
        with pytest.raises(InputError, match=r"rarefied to 2\.\.4"):
            rarefied_vendi(kernel_of(4), size)


def test_clusters_hold_proofs_that_are_all_near_each_other():
    apart = np.full((4, 4), 0.9)
    apart[:2, :2] = apart[2:, 2:] = 0.2
    np.fill_diagonal(apart, 0)
    assert distinct(apart) == 2
    assert distinct(np.array([[0, 0.35], [0.35, 0]])) == 2  # nearer than .35, not at it
    chain = np.array([[0, 0.3, 0.6], [0.3, 0, 0.3], [0.6, 0.3, 0]])
    assert distinct(chain) == 2  # complete linkage: the ends are too far apart


def test_distances_are_symmetric_bounded_and_zero_for_a_copy():
    proofs = [entry.proof for entry in bank()[:6]]
    apart = distances([*proofs, proofs[0]])
    assert (apart == apart.T).all()
    assert apart.min() >= 0
    assert apart.max() <= 1
    assert apart[0, 6] == pytest.approx(0, abs=1e-12)


def test_an_encoder_replaces_words():
    def encoder(sentences):
        return np.tile([[1.0, 0.0]], (len(sentences), 1))

    one, two = Proof("By induction, fine.", "p"), Proof("By induction, utterly different words.", "p")
    assert distances([one, two], encoder=encoder)[0, 1] == 0
    assert distances([one, two])[0, 1] > 0.2


def test_formal_proofs_are_compared_by_what_they_cite():
    def formal(*labels):
        return Proof([Step(label, label, uses=()) for label in labels], "p")

    apart = distances([formal("a", "b"), formal("a", "b"), formal("c", "d"), formal("a", "a", "c")])
    assert apart[0, 1] == pytest.approx(0)
    assert apart[0, 2] == 1
    assert apart[0, 3] == pytest.approx((1 - 1 / 3) / 2 + (1 - 2 / math.sqrt(2 * 5)) / 2)
    with pytest.raises(InputError, match="cannot be compared"):
        distances([formal("a"), Proof("Words.", "p")])


def test_a_paraphrase_does_not_raise_diversity_but_another_idea_does():
    for entry, other in zip(bank(), bank()[1:], strict=False):
        if entry.proof.problem == other.proof.problem:
            same = [entry.proof, copy(entry.proof)]
            assert diversity(same).vendi < diversity([entry.proof, other.proof]).vendi


def test_wrong_proofs_do_not_count_and_one_proof_has_no_diversity():
    one, two, wrong = (Proof(t, "p", correct=c) for t, c in (("A b.", True), ("C d.", True), ("E f.", False)))
    assert diversity([one, two, wrong]) == diversity([one, two])
    with pytest.raises(InputError, match="two correct proofs, there are 1"):
        diversity([one, wrong])
    with pytest.raises(InputError, match="correct is not known of 1"):
        diversity([one, two, Proof("G.", "p")])
    with pytest.raises(InputError, match="one problem"):
        diversity([one, Proof("G.", "q", correct=True)])


# -------------------------------------------------------------------------------------------------------- adaptivity

TEXTS = {"induction": "By induction, it holds.", "parity": "The number is even, so it holds."}


def written(problem, technique, correct=True):
    return Proof(TEXTS[technique], problem, correct=correct)


def test_a_model_that_ignores_its_instructions_has_a_lift_of_zero_within_the_interval():
    rng = np.random.default_rng(0)
    asked = {None: [], "induction": [], "parity": []}
    for technique in asked:
        for problem in range(30):
            for _ in range(6):
                asked[technique].append(written(f"p{problem}", rng.choice(["induction", "parity"]), rng.random() < 0.8))
    found = adaptivity(asked)
    assert found.interval.low < 0 < found.interval.high
    assert abs(found.lift) < 0.1
    assert found.rate == pytest.approx(0.4, abs=0.1)


def test_a_model_that_follows_has_the_lift_of_what_it_would_not_have_done():
    problems = [f"p{i}" for i in range(6)]
    asked = {
        None: [written(p, "induction") for p in problems],
        "induction": [written(p, "induction") for p in problems],
        "parity": [written(p, "parity") for p in problems],
    }
    found = adaptivity(asked)
    assert (found.rate, found.lift) == (1.0, 0.5)  # parity: from 0 to 1; induction: it did so anyway
    assert len(found.table) == 12


def test_a_technique_that_no_correct_proof_uses_is_not_feasible():
    asked = {None: [written("p", "induction")], "parity": [written("p", "induction")]}
    with pytest.raises(InputError, match="no request can be judged"):
        adaptivity(asked)
    assert adaptivity(asked, known=[written("p", "parity")]).rate == 0


def test_a_wrong_proof_follows_nothing_and_a_technique_in_passing_is_not_used():
    asked = {None: [written("p", "induction")], "induction": [written("p", "induction", correct=False)]}
    assert adaptivity(asked).rate == 0
    passing = Proof("Let $n = 2k$. Recall that induction is dear to us. Hence $n$ is even.", "p")
    assert techniques_used(passing) == {"parity"}


def test_unknown_techniques_and_unjudged_proofs_are_refused():
    with pytest.raises(UnknownNameError, match="technique"):
        adaptivity({None: [written("p", "parity")], "magic": [written("p", "parity")]})
    with pytest.raises(InputError, match="correct is not known"):
        adaptivity({None: [Proof("A.", "p")], "parity": [written("p", "parity")]})
