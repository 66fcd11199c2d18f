"""The backward from tiles: against finite differences, against float64 autograd, edges, no N×N array."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib import recompute, reference, tiling
from flashlib.traffic import HBM

sizes = st.integers(1, 25)
blocks = st.integers(1, 30)
scales = st.sampled_from([None, 0, 0.0, -0.7, 2])


def arrays(seqlen_q, seqlen_k, head_dim=4, head_dim_v=None, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    d_v = head_dim_v or head_dim
    shapes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, d_v), (seqlen_q, d_v), (seqlen_q,)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def run(q, k, v, dout, dlse=None, *, block_m=5, block_n=3, causal=False, scale=None):
    options = {"block_m": block_m, "block_n": block_n, "causal": causal, "scale": scale}
    out, lse = tiling.forward(q, k, v, **options, return_lse=True)
    return recompute.backward(q, k, v, out, dout, lse, **options, dlse=dlse)


def autograd(q, k, v, dout, dlse=None, **options):
    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v)]
    out, lse = reference.attention(*tensors, **options, return_lse=True)
    loss = (out * torch.tensor(dout)).sum()
    if dlse is not None:
        loss = loss + torch.where(lse.isfinite(), lse * torch.tensor(dlse), 0.0).sum()
    return [g.numpy() for g in torch.autograd.grad(loss, tensors)]


@settings(max_examples=80, deadline=None)
@given(
    *(sizes, sizes, blocks, blocks, st.integers(1, 6), st.integers(1, 6)),
    *(st.booleans(), st.booleans(), scales, st.integers(0, 99)),
)
def test_equals_autograd_in_float64(seqlen_q, seqlen_k, block_m, block_n, d, d_v, causal, with_lse, scale, seed):
    q, k, v, dout, dlse = arrays(seqlen_q, seqlen_k, d, d_v, seed=seed)
    dlse = dlse if with_lse else None
    got = run(q, k, v, dout, dlse, block_m=block_m, block_n=block_n, causal=causal, scale=scale)
    want = autograd(q, k, v, dout, dlse, causal=causal, scale=scale)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)
    # Queries before the first visible key, and keys that no query sees, do not exist for the gradients.
    blind = max(seqlen_q - seqlen_k, 0) if causal else 0
    assert (got[0][:blind] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_lse", [False, True])
def test_equals_finite_differences(causal, with_lse):
    q, k, v, dout, dlse = arrays(5, 4, 3, 2)
    dlse = dlse if with_lse else None

    def loss(q, k, v):
        out, lse = tiling.forward(q, k, v, block_m=5, block_n=4, causal=causal, return_lse=True)
        return (out * dout).sum() + (0 if dlse is None else (np.where(np.isneginf(lse), 0, lse) * dlse).sum())

    for position, gradient in enumerate(run(q, k, v, dout, dlse, block_m=2, block_n=3, causal=causal)):
        inputs = [q, k, v]
        for index in np.ndindex(gradient.shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [x.copy() for x in inputs]
                moved[position][index] += step
                sides.append(loss(*moved))
            assert (sides[0] - sides[1]) / 2e-6 == pytest.approx(gradient[index], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(7, 7), (9, 4), (4, 9)])
def test_naive_form_is_the_same(causal, seqlen_q, seqlen_k):
    q, k, v, dout, _ = arrays(seqlen_q, seqlen_k, 4, 3)
    for a, b in zip(
        recompute.backward_naive(q, k, v, dout, causal=causal, scale=0.3),
        autograd(q, k, v, dout, causal=causal, scale=0.3),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_pieces_are_the_whole():
    q, k, v, dout, dlse = arrays(6, 8, 4, 3)
    out, lse = tiling.forward(q, k, v, block_m=6, block_n=8, return_lse=True)
    p = recompute.p_of(q, k, lse, 0.5)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    np.testing.assert_allclose(p @ v, out)
    dp = dout @ v.T
    delta = recompute.delta_of(out, dout)
    np.testing.assert_allclose(delta, (p * dp).sum(axis=1))
    np.testing.assert_allclose(recompute.delta_of(out, dout, dlse), delta - dlse)
    np.testing.assert_allclose(recompute.ds_of(p, dp, delta).sum(axis=1), 0, atol=1e-14)
    seen = np.tri(6, 8, dtype=bool)
    assert (recompute.p_of(q, k, lse, 0.5, seen)[~seen] == 0).all()
    for seen in (None, np.zeros((6, 8), bool)):
        assert (recompute.p_of(q, k, np.full(6, -np.inf), 0.5, seen) == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_and_rounding(dtype):
    q, k, v, dout, _ = arrays(37, 21, 8, dtype=dtype)
    got = run(q, k, v, dout, block_m=8, block_n=5)
    want = autograd(*(x.astype(np.float64) for x in (q, k, v, dout)))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        # Plain rounding of inputs' size; out comes back from the forward rounded to the dtype, and delta is made of it.
        assert np.abs(a - b).max() <= 4 * np.finfo(dtype).eps * np.abs(b).max() + 2e-6 * (dtype != np.float64)


def test_float16_is_only_a_way_to_store():
    q, k, v, dout, _ = arrays(23, 19, 8, 6, dtype=np.float16)
    options = {"block_m": 4, "block_n": 5, "causal": True}
    out, lse = tiling.forward(q, k, v, **options, return_lse=True)
    got = recompute.backward(q, k, v, out, dout, lse, **options)
    # The same numbers as float32 give the same sums: nothing but the results is rounded to 16 bits.
    wide = recompute.backward(*(x.astype(np.float32) for x in (q, k, v, out, dout)), lse, **options)
    for a, b in zip(got, wide, strict=True):
        np.testing.assert_array_equal(a, b.astype(np.float16))


def test_large_scores_do_not_overflow():
    q, k, v, dout, _ = arrays(9, 9)
    for a, b in zip(run(300 * q, k, v, dout), autograd(300 * q, k, v, dout), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [False, True])
def test_no_quadratic_array_exists(causal):
    n, d, block = 2048, 8, 32
    q, k, v, dout, _ = arrays(n, n, d, dtype=np.float32)
    options = {"block_m": block, "block_n": block, "causal": causal}
    out, lse = tiling.forward(q, k, v, **options, return_lse=True)
    tracemalloc.start()
    try:
        recompute.backward(q, k, v, out, dout, lse, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Alive at once: three gradients, delta, and less than 20 tiles of scores. One N×N array has 16 MiB.
    assert peak < 4 * n * (3 * d + 1) + 20 * 4 * block * block + 100_000


def test_bytes_are_counted_as_the_loops_say():
    n, d, block_m, block_n = 24, 4, 6, 8
    q, k, v, dout, _ = arrays(n, n, d, dtype=np.float32)
    out, lse = tiling.forward(q, k, v, block_m=block_m, block_n=block_n, return_lse=True)
    hbm = HBM(makes=("delta", "dk", "dv", "dq"))
    placed = hbm.put(q=q, k=k, v=v, out=out, dout=dout, lse=lse)
    recompute.backward(*placed, block_m=block_m, block_n=block_n)
    square, row = 4 * n * d, 4 * n
    tiles_q, tiles_k = n // block_m, n // block_n
    count = hbm.count()
    assert count["loads"] == {
        "q": (tiles_k + 1) * square,
        "dout": (1 + tiles_k + 1) * square,
        "k": (1 + tiles_q) * square,
        "v": (1 + tiles_q) * square,
        "out": square,
        "lse": (tiles_k + 1) * row,
        "delta": (tiles_k + 1) * row,
    }
    assert count["stores"] == {"delta": row, "dk": square, "dv": square, "dq": square}


BAD = [
    ("q", np.zeros(3), r"q must have shape \(seqlen, head_dim\)"),
    ("k", np.zeros((4, 2)), "k must have the head_dim of q, 3, got 2"),
    ("v", np.zeros((5, 2)), "v must have the seqlen of k, 4, got 5"),
    ("out", np.zeros((5, 3)), r"out must have shape \(seqlen_q, head_dim of v\) = \(5, 2\), got \(5, 3\)"),
    ("dout", np.zeros((5, 2), np.float32), "dout must have the dtype of q, float64, got float32"),
    ("dout", [[0.0]], "dout must be a NumPy array, got list"),
    ("lse", np.zeros((5, 1)), r"lse must have shape \(seqlen_q,\) = \(5,\), got \(5, 1\)"),
    ("lse", np.zeros(5, int), "lse must be float32 or float64, got int64"),
    ("lse", None, "lse must be a NumPy array, got NoneType"),
    ("dlse", np.zeros(4), r"dlse must have shape \(seqlen_q,\) = \(5,\), got \(4,\)"),
    ("block_m", 0, "block_m must be a whole number of rows, 1 or more, got 0"),
    ("block_n", 2.5, "block_n must be a whole number"),
    ("scale", np.nan, "scale must be None or a finite number, got nan"),
    ("causal", "no", "causal must be True or False, got 'no'"),
    ("causal", np.array([True, False]), "causal must be True or False, got array"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_input_is_named(name, value, message):
    q, k, v, dout, dlse = arrays(5, 4, 3, 2)
    given = {"q": q, "k": k, "v": v, "out": dout, "dout": dout, "lse": dlse, "block_m": 2, "block_n": 2}
    with pytest.raises(ValueError, match=message):
        recompute.backward(**(given | {name: value}))


@pytest.mark.parametrize("dlse_there", [-np.inf, np.inf, np.nan])
def test_infinite_dlse_of_a_row_without_a_key_goes_nowhere(dlse_there):
    q, k, v, dout, dlse = arrays(5, 2, 3, 2)
    # Causal at the bottom right: the first three of five queries see none of the two keys.
    want = run(q, k, v, dout, np.where(np.arange(5) < 3, 0.0, dlse), causal=True)
    got = run(q, k, v, dout, np.where(np.arange(5) < 3, dlse_there, dlse), causal=True)
    for a, b in zip(got, want, strict=True):
        assert np.array_equal(a, b)
