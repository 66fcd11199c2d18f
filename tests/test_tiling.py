"""Tiling: both forms against plain softmax in float64, edges, recorded steps, and no N×N array anywhere."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib import tiling

FORMS = [tiling.forward, tiling.forward_article]


def plain(q, k, v, causal=False, scale=None):
    """Attention in float64 with the whole score matrix: out and lse."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale = 1 / np.sqrt(q.shape[1]) if scale is None else scale
    s = scale * (q @ k.T)
    if causal:
        rows, keys = np.indices(s.shape)
        s = np.where(keys <= rows + len(k) - len(q), s, -np.inf)
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(m), 0, m))
    l = p.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return p @ v / np.where(l == 0, 1, l), (np.where(l == 0, -np.inf, m + np.log(l)))[:, 0]


def arrays(seqlen_q, seqlen_k, head_dim=4, head_dim_v=None, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v or head_dim)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


sizes = st.integers(1, 33)
blocks = st.integers(1, 40)
scales = st.sampled_from([None, 0, 0.0, -0.7, 2])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(sizes, sizes, blocks, blocks, st.integers(1, 9), st.integers(1, 9), st.booleans(), scales, st.integers(0, 99))
def test_equals_plain_attention(form, seqlen_q, seqlen_k, block_m, block_n, d, d_v, causal, scale, seed):
    q, k, v = arrays(seqlen_q, seqlen_k, d, d_v, seed=seed)
    out, lse = form(q, k, v, block_m=block_m, block_n=block_n, causal=causal, scale=scale, return_lse=True)
    want, want_lse = plain(q, k, v, causal, scale)
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-12, atol=1e-13)
    # A row without a key: exactly 0 and exactly -inf.
    blind = max(seqlen_q - seqlen_k, 0) if causal else 0
    assert (out[:blind] == 0).all()
    assert np.isneginf(lse[:blind]).all()
    assert np.isfinite(lse[blind:]).all()


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, blocks, blocks, st.booleans(), scales)
def test_trace_is_the_forward(seqlen_q, seqlen_k, block_m, block_n, causal, scale):
    q, k, v = arrays(seqlen_q, seqlen_k, 3, 5)
    options = {"block_m": block_m, "block_n": block_n, "causal": causal, "scale": scale}
    out, lse = tiling.forward(q, k, v, **options, return_lse=True)
    record = tiling.trace(q, k, v, **options)
    np.testing.assert_allclose(record.out, out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(record.lse, lse, rtol=1e-12, atol=1e-13)
    tiles_q, tiles_k = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    assert [(step.i, step.j) for step in record.steps] == [(i, j) for i in range(tiles_q) for j in range(tiles_k)]
    for step in record.steps:
        assert (step.s is None) == (step.kind == "empty")
        assert step.m.shape == step.l.shape == (step.rows[1] - step.rows[0],)
        assert step.acc.shape == (step.rows[1] - step.rows[0], 5)
        if step.s is not None:
            assert step.s.shape == (step.rows[1] - step.rows[0], step.keys[1] - step.keys[0])
    loads = [step.bytes_so_far for step in record.steps]
    assert loads == sorted(loads)


@settings(max_examples=100, deadline=None)
@given(sizes, sizes, blocks, blocks, st.booleans())
def test_tile_kind_says_what_the_mask_is(seqlen_q, seqlen_k, block_m, block_n, causal):
    mask = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        mask = np.tril(mask, seqlen_k - seqlen_q)
    offset = seqlen_k - seqlen_q
    for rows in tiling.tiles(seqlen_q, block_m):
        for keys in tiling.tiles(seqlen_k, block_n):
            tile = mask[rows, keys]
            want = "full" if tile.all() else "diagonal" if tile.any() else "empty"
            assert tiling.tile_kind(rows, keys, offset, causal) == want
            if causal:
                np.testing.assert_array_equal(tiling.visible(rows, keys, offset), tile)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_no_quadratic_array_exists(form, causal):
    n, block = 2048, 32
    q, k, v = arrays(n, n, 8, dtype=np.float32)
    tracemalloc.start()
    try:
        form(q, k, v, block_m=block, block_n=block, causal=causal, return_lse=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Everything alive at once: out, lse, and less than 20 tiles of scores. One N×N array has 16 MiB.
    assert peak < 4 * n * (8 + 1) + 20 * 4 * block * block + 100_000


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes(form, dtype):
    q, k, v = arrays(37, 21, 8, dtype=dtype)
    out, lse = form(q, k, v, block_m=8, block_n=5, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    want, want_lse = plain(q, k, v)
    # float16: one rounding of the result; the arithmetic is float32's.
    tolerance = 2 * np.finfo(dtype).eps
    assert np.abs(out - want).max() <= tolerance * np.abs(want).max() + 1e-6 * (dtype != np.float64)
    assert np.abs(lse - want_lse).max() <= 1e-6


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e4, 1e18])
def test_large_scores_neither_overflow_nor_warn(form, size):
    q, k, v = arrays(9, 9, dtype=np.float32)
    out = form(q * np.float32(size), k * np.float32(size), v, block_m=4, block_n=2)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_left_alone_and_views_work(form):
    q, k, v = (np.asfortranarray(x)[::-1] for x in arrays(10, 12, 6))
    copies = [x.copy() for x in (q, k, v)]
    out = form(q, k, v, block_m=3, block_n=5)
    np.testing.assert_allclose(out, plain(q, k, v)[0], rtol=1e-12)
    for before, after in zip(copies, (q, k, v), strict=True):
        np.testing.assert_array_equal(before, after)


Q, K, V = arrays(4, 4)


@pytest.mark.parametrize("function", [*FORMS, tiling.trace])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Q[None]}, "q must have shape"),
        ({"q": Q[:0]}, "q must have shape"),
        ({"q": Q.tolist()}, "q must be a NumPy array .* got list"),
        ({"q": Q.astype(int)}, "q must be a NumPy array .* got an array of int64"),
        ({"k": K.astype(np.float32)}, "k must have the dtype of q, float64, got float32"),
        ({"k": K[:, :3]}, "k must have the head_dim of q, 4, got 3"),
        ({"v": V[:3]}, "v must have the seqlen of k, 4, got 3"),
        ({"v": V[:, :0]}, "v must have shape"),
        ({"block_m": 0}, "block_m must be a whole number"),
        ({"block_n": 2.0}, "block_n must be a whole number .* got 2.0"),
        ({"block_n": True}, "block_n must be a whole number"),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"scale": np.nan}, "scale must be None or a finite number, got nan"),
        ({"scale": True}, "scale must be None or a finite number, got True"),
        ({"scale": 10**400}, "scale must be None or a finite number, got 1000"),
        ({"scale": "1"}, "scale must be None or a finite number, got '1'"),
    ],
)
def test_bad_input_is_named(function, changed, message):
    with pytest.raises(ValueError, match=message):
        function(**({"q": Q, "k": K, "v": V, "block_m": 2, "block_n": 2} | changed))
