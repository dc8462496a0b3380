import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairtrial.errors import FairtrialError, InputError
from fairtrial.lm.steering import AnchorFrame, UnreachableDirection, procrustes_map, ridge_map


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def rotation(d, seed=1):
    return torch.linalg.qr(draw(d, d, seed=seed))[0]


@given(st.integers(0, 1000), st.sampled_from([(20, 6), (12, 30)]), st.integers(0, 2))
def test_coordinates_survive_rotation_scale_and_shift(seed, shape, remove):
    X, Q = draw(*shape, seed=seed), rotation(shape[1])
    ours = AnchorFrame(X, remove_pcs=remove)
    theirs = AnchorFrame(7 * X @ Q + draw(shape[1], seed=2), remove_pcs=remove)
    H, r = draw(5, shape[1], seed=3) + X.mean(0), X[0] - X[1]
    moved = 7 * H @ Q + draw(shape[1], seed=2)
    torch.testing.assert_close(ours.of_states(H), theirs.of_states(moved), atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.of_direction(r), theirs.of_direction(r @ Q), atol=1e-5, rtol=0)
    c = ours.of_direction(r)
    torch.testing.assert_close(ours.reconstruct(c).vector @ Q, theirs.reconstruct(c).vector, atol=1e-5, rtol=0)


def test_only_a_whitened_frame_survives_any_invertible_map():
    X, M, H = draw(80, 6), draw(6, 6, seed=4), draw(30, 6, seed=5)
    r = X[0] - X[1]

    def scores(frame):
        ours, theirs = AnchorFrame(X, frame=frame, eps=1e-12), AnchorFrame(X @ M, frame=frame, eps=1e-12)
        one = ours.reconstruct(ours.of_direction(r))
        other = theirs.reconstruct(ours.of_direction(r))
        pairs = [(H - ours.mean) @ one.probe, (H @ M - theirs.mean) @ other.probe]
        spreads = [((X - ours.mean) @ one.probe).std(), ((X @ M - theirs.mean) @ other.probe).std()]
        return [p / s for p, s in zip(pairs, spreads, strict=True)]

    torch.testing.assert_close(*scores("whitened"), atol=1e-4, rtol=0)
    one, other = scores("cosine")
    assert float((one - other).abs().max()) > 0.1


def test_a_whitened_direction_is_what_moves_its_own_probe():
    X, r = draw(80, 6) @ draw(6, 6, seed=4), draw(6, seed=5)
    frame = AnchorFrame(X, frame="whitened", eps=1e-12)
    found = frame.reconstruct(frame.of_direction(r), ridge=1e-9)
    assert cosine(found.vector, r) > 1 - 1e-6
    assert cosine(found.probe, torch.linalg.solve(torch.cov(X.T, correction=0), r)) > 1 - 1e-6


@pytest.mark.parametrize("n", [9, 40])
def test_a_direction_comes_back_as_its_projection_on_the_anchors_span(n):
    X = draw(n, 20)
    frame = AnchorFrame(X, remove_pcs=0)
    r = draw(20, seed=6)
    basis = torch.linalg.svd(X - X.mean(0), full_matrices=False).Vh[: min(n - 1, 20)]
    back = frame.reconstruct(frame.of_direction(r), ridge=1e-10)
    assert cosine(back.vector, r @ basis.T @ basis) > 1 - 1e-6
    inside = X[0] - X[3]
    assert cosine(frame.reconstruct(frame.of_direction(inside), ridge=1e-10).vector, inside) > 1 - 1e-9
    assert frame.reconstruct(frame.of_direction(inside), ridge=1e-10).fit_residual < 1e-6


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (15, 15)])
def test_primal_and_dual_ridge_agree(shape):
    frame = AnchorFrame(draw(*shape), remove_pcs=0)
    A, c = frame.rows, draw(shape[0], seed=7)
    primal = torch.linalg.solve(A.T @ A + 0.1 * torch.eye(shape[1], dtype=A.dtype), A.T @ c)
    dual = A.T @ torch.linalg.solve(A @ A.T + 0.1 * torch.eye(shape[0], dtype=A.dtype), c)
    torch.testing.assert_close(primal, dual, atol=1e-8, rtol=0)
    found = frame.reconstruct(c, ridge=0.1)
    torch.testing.assert_close(found.vector, primal / primal.norm(), atol=1e-8, rtol=0)
    assert found.fit_residual == pytest.approx(float((A @ primal - c).norm()), abs=1e-9)


def test_held_out_error_is_that_of_leaving_each_anchor_out():
    frame = AnchorFrame(draw(15, 6))
    c = draw(15, seed=8)
    errors = []
    for i in range(15):
        kept = [j for j in range(15) if j != i]
        A = frame.rows[kept]
        r = torch.linalg.solve(A.T @ A + 0.3 * torch.eye(6, dtype=A.dtype), A.T @ c[kept])
        errors.append(float(c[i] - frame.rows[i] @ r))
    assert frame.held_out_error(c, ridge=0.3) == pytest.approx(np.linalg.norm(errors) / float(c.norm()), rel=1e-8)


def test_the_leading_component_is_what_makes_all_cosines_alike():
    g = draw(50, 1)
    X = draw(50, 20) + 30 * g @ draw(1, 20, seed=9)
    dominated, freed = AnchorFrame(X, remove_pcs=0), AnchorFrame(X)
    alike = [float((f.rows @ f.rows.T).abs().mean()) for f in (dominated, freed)]
    assert alike[0] > 0.8
    assert alike[1] < 0.3


def test_a_direction_orthogonal_to_all_anchors_is_unreachable():
    X = torch.cat([draw(20, 5), torch.ones(20, 1, dtype=torch.float64)], 1)  # nothing varies along the last
    frame = AnchorFrame(X)
    for r in (torch.eye(6, dtype=torch.float64)[5], torch.zeros(6)):
        with pytest.raises(UnreachableDirection, match="orthogonal"):
            frame.of_direction(r)
    with pytest.raises(UnreachableDirection, match="express nothing"):
        AnchorFrame(X).reconstruct(torch.linalg.svd(frame.rows).U[:, -1])


@pytest.mark.parametrize(
    ("states", "word"),
    [
        (draw(7, 3), "at least 8"),
        (draw(8), "at least 8"),
        (torch.full((9, 3), torch.nan), "anchor 0 is not finite"),
        (torch.ones(9, 3), "constant"),
        ([["a"] * 3] * 9, "array of numbers"),
        (draw(9, 3) + 1j, "complex"),
        (None, "array of numbers"),
    ],
)
def test_anchors_that_make_no_frame_are_refused(states, word):
    with pytest.raises(InputError, match=word):
        AnchorFrame(states, remove_pcs=0)


def test_other_bad_inputs_are_refused():
    frame = AnchorFrame(draw(9, 4))
    for call, word in (
        (lambda: AnchorFrame(draw(9, 4), frame="round"), "no frame"),
        (lambda: AnchorFrame(draw(9, 4), remove_pcs=4), "remove_pcs"),
        (lambda: AnchorFrame(draw(9, 4), remove_pcs=1.5), "whole number"),
        (lambda: AnchorFrame(draw(9, 4), frame="whitened", eps=-1.0), "eps=-1"),
        (lambda: frame.of_states(draw(2, 5)), "4 dimensions"),
        (lambda: frame.of_states(torch.full((2, 4), torch.inf)), "not finite"),
        (lambda: frame.reconstruct(draw(8)), "9 anchors"),
        (lambda: frame.reconstruct(draw(9), ridge=0), "ridge"),
    ):
        with pytest.raises(FairtrialError, match=word):
            call()


def test_linear_maps_carry_a_direction_between_rotated_models():
    X, Q = draw(60, 8), rotation(8)
    r = draw(8, seed=10)
    assert cosine(procrustes_map(X, X @ Q + 1, r), r @ Q) > 1 - 1e-9
    assert cosine(ridge_map(X, X @ Q + 1, r, ridge=1e-9), r @ Q) > 1 - 1e-6
