"""Traffic: the meter equals the formula to the byte, and metered code computes what it computes unmetered."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib import cost, tiling, traffic
from flashlib.traffic import HBM

sizes = st.integers(1, 40)
blocks = st.integers(1, 45)
dims = st.integers(1, 9)
dtypes = st.sampled_from([np.float16, np.float32, np.float64])

PROGRAMS = {
    "i-outer": (tiling.forward, ("out", "lse")),
    "j-outer": (traffic.forward_keys_outer, ("out", "l", "m")),
    "naive": (traffic.naive, ("s", "p", "out")),
}


def arrays(seqlen_q, seqlen_k, head_dim, head_dim_v, dtype):
    rng = np.random.default_rng(seqlen_q * 41 + seqlen_k)
    shapes = {"q": (seqlen_q, head_dim), "k": (seqlen_k, head_dim), "v": (seqlen_k, head_dim_v)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("order", PROGRAMS)
@settings(max_examples=120, deadline=None)
@given(sizes, sizes, dims, dims, blocks, blocks, st.booleans(), dtypes)
def test_meter_equals_formula(order, seqlen_q, seqlen_k, d, d_v, block_m, block_n, causal, dtype):
    program, makes = PROGRAMS[order]
    options = {"block_m": block_m, "block_n": block_n}
    if order != "naive":
        options["causal"] = causal
    given_arrays = arrays(seqlen_q, seqlen_k, d, d_v, dtype)
    hbm = HBM(makes)
    out = program(*hbm.put(**given_arrays), **options)
    want = cost.requested_bytes(
        seqlen_q, seqlen_k, d, **options, itemsize=np.dtype(dtype).itemsize, order=order, head_dim_v=d_v
    )
    got = hbm.count()
    # A tensor that no tile touches is not in the meter's books at all.
    for side in ("loads", "stores"):
        assert {name: nbytes for name, nbytes in want[side].items() if nbytes} == got[side]
    assert got["total"] == want["total"] == sum(entry[-1] for entry in hbm.log)
    reference = tiling.forward(*given_arrays.values(), **options)
    tolerance = 1e-5 if dtype == np.float64 else 1e-4 if dtype == np.float32 else 0.05
    np.testing.assert_allclose(out.value.astype(float), reference.astype(float), atol=tolerance, rtol=tolerance)


def test_metered_forward_gives_the_same_bits():
    given_arrays = arrays(37, 29, 8, 8, np.float32)
    hbm = HBM()
    out, lse = tiling.forward(*hbm.put(**given_arrays), block_m=8, block_n=16, causal=True, return_lse=True)
    want, want_lse = tiling.forward(*given_arrays.values(), block_m=8, block_n=16, causal=True, return_lse=True)
    np.testing.assert_array_equal(out.value, want)
    np.testing.assert_array_equal(lse.value, want_lse)


@settings(max_examples=60, deadline=None)
@given(sizes, sizes, dims, dims, blocks, blocks, st.booleans(), dtypes)
def test_trace_counts_the_same_bytes(seqlen_q, seqlen_k, d, d_v, block_m, block_n, causal, dtype):
    options = {"block_m": block_m, "block_n": block_n, "causal": causal}
    record = tiling.trace(*arrays(seqlen_q, seqlen_k, d, d_v, dtype).values(), **options)
    itemsize = np.dtype(dtype).itemsize
    want = cost.requested_bytes(seqlen_q, seqlen_k, d, **options, itemsize=itemsize, head_dim_v=d_v)
    assert record.steps[-1].bytes_so_far == want["total"]
    visited = sum(step.kind != "empty" for step in record.steps)
    assert cost.visited_tiles(seqlen_q, seqlen_k, **options) == visited


def test_flash_requests_what_naive_does_less_four_passes():
    for seqlen_q, seqlen_k in [(64, 64), (100, 37), (5, 130)]:
        options = {"block_m": 16, "block_n": 8, "itemsize": 2}
        flash = cost.requested_bytes(seqlen_q, seqlen_k, 8, **options)
        naive = cost.requested_bytes(seqlen_q, seqlen_k, 8, **options, order="naive")
        assert naive["total"] - flash["total"] == 4 * seqlen_q * seqlen_k * 2 - 4 * seqlen_q


def test_tiles_that_hold_everything_request_each_tensor_once():
    sizes = {"seqlen_q": 33, "seqlen_k": 20, "head_dim": 8}
    options = {"block_m": 64, "block_n": 32, "itemsize": 2}
    flash = cost.requested_bytes(**sizes, **options)["total"]
    assert flash == cost.compulsory_bytes(**sizes, itemsize=2) + cost.flash_extra_bytes(33)
    naive = cost.requested_bytes(**sizes, **options, order="naive")["total"]
    assert naive == sum(step.moved_bytes for step in cost.naive_passes(**sizes, itemsize=2))


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k", "head_dim", "block_m", "block_n", "itemsize"])
def test_sizes_are_checked(name):
    sizes = dict.fromkeys(("seqlen_q", "seqlen_k", "head_dim", "block_m", "block_n", "itemsize"), 2)
    with pytest.raises(ValueError, match=f"{name} must be an int of at least 1, got 0"):
        cost.requested_bytes(**sizes | {name: 0})


def test_what_lies_in_hbm_is_only_loaded_and_stored():
    hbm = HBM(makes=("new",))
    x, y = hbm.put(x=np.ones((4, 2)), y=np.ones((4, 2)))
    for touch in [
        lambda: x + 1,
        lambda: 1 + x,
        lambda: np.exp(x),
        lambda: x @ y,
        lambda: np.asarray(x),
        lambda: np.concatenate([x, y]),
        lambda: list(x),
        lambda: x[0],
        lambda: x[::2],
        lambda: x[[0, 1]],
        lambda: x.__setitem__(0, 1),
    ]:
        with pytest.raises(TypeError):
            touch()
    assert hbm.total == 0
    part = x[1:3]
    part += 5
    assert (x.value == 1).all()
    x[1:3] = part
    assert x.value[1, 0] == 6
    assert hbm.count() == {"loads": {"x": 32}, "stores": {"x": 32}, "total": 64}
    assert [entry[0] for entry in hbm.log] == ["load", "store"]
    new = np.empty_like(x, shape=(3,), dtype=np.float32)
    assert (new.shape, new.dtype) == ((3,), np.float32)
    with pytest.raises(ValueError, match="makes must name every array"):
        np.empty_like(x)
    with pytest.raises(ValueError, match="x must be a new name"):
        hbm.put(x=np.ones(3))
    with pytest.raises(ValueError, match="z must be a NumPy array, got list"):
        hbm.put(z=[1.0])


@pytest.mark.parametrize("function", [traffic.forward_keys_outer, traffic.naive])
def test_bad_input_is_named(function):
    x = np.ones((3, 2))
    with pytest.raises(ValueError, match="v must have the seqlen of k"):
        function(x, x, x[:2], block_m=1, block_n=1)


@pytest.mark.parametrize("function", [traffic.windowed, traffic.top_k, traffic.low_rank])
@pytest.mark.parametrize("kept", [0, 2.0, True, None])
def test_what_is_kept_is_checked(function, kept):
    x = np.ones((3, 2))
    with pytest.raises(ValueError, match=f"(width|count|rank) must be a whole number, 1 or more, got {kept}"):
        function(x, x, x, kept)


def test_order_is_checked():
    options = {"block_m": 2, "block_n": 2, "itemsize": 2}
    with pytest.raises(ValueError, match='order must be "i-outer", "j-outer" or "naive", got \'outer\''):
        cost.requested_bytes(4, 4, 2, **options, order="outer")
    with pytest.raises(ValueError, match="head_dim_v must be an int of at least 1, got 0"):
        cost.requested_bytes(4, 4, 2, **options, head_dim_v=0)
    with pytest.raises(ValueError, match="causal must be False"):
        cost.requested_bytes(4, 4, 2, **options, order="naive", causal=True)


@pytest.mark.parametrize("form", ["naive", "flash"])
@pytest.mark.parametrize("memory", [0, 10_000, 16e9])
def test_longest_seqlen_fits_and_one_more_does_not(form, memory):
    options = {"head_dim": 64, "nheads": 3, "batch": 2, "form": form}
    longest = cost.longest_seqlen(memory, **options)
    assert longest == 0 if memory == 0 else cost.attention_memory_bytes(longest, **options) <= memory
    assert cost.attention_memory_bytes(longest + 1, **options) > memory
    # What fills a memory to the last byte fits.
    assert cost.longest_seqlen(cost.attention_memory_bytes(77, **options), **options) == 77
    with pytest.raises(ValueError, match="form must be"):
        cost.attention_memory_bytes(4, 4, nheads=1, form="fast")


@pytest.mark.parametrize("memory", [np.inf, np.nan, "16 GB", None])
def test_memory_is_checked(memory):
    with pytest.raises(ValueError, match="memory_bytes must be a finite number, got"):
        cost.longest_seqlen(memory, 64, nheads=1)


def test_other_attention_is_exact_where_it_keeps_everything():
    q, k, v = arrays(12, 12, 4, 4, np.float64).values()
    exact = tiling.forward(q, k, v, block_m=12, block_n=12)
    for approximation in (traffic.windowed, traffic.top_k, traffic.low_rank):
        np.testing.assert_allclose(approximation(q, k, v, 12), exact, rtol=1e-10, atol=1e-12)
        assert np.abs(approximation(q, k, v, 2) - exact).max() > 1e-3
    # With q = 0 every key weighs the same, and phi(0) = 1 says so too.
    np.testing.assert_allclose(traffic.linear(0 * q, 0 * k, v), np.tile(v.mean(axis=0), (12, 1)))


def softmax(s):
    e = np.exp(s - s.max())
    return e / e.sum()


def test_other_attention_keeps_what_it_says():
    q, k, v = arrays(12, 12, 4, 4, np.float64).values()
    s = q @ k.T / 2
    near, large = traffic.windowed(q, k, v, 3), traffic.top_k(q, k, v, 3)
    for i in range(1, 11):
        np.testing.assert_allclose(near[i], softmax(s[i, i - 1 : i + 2]) @ v[i - 1 : i + 2])
        best = np.argsort(s[i])[-3:]
        np.testing.assert_allclose(large[i], softmax(s[i, best]) @ v[best])
    # Of equally far keys the left one comes first.
    np.testing.assert_allclose(traffic.windowed(q, k, v, 2)[5], softmax(s[5, 4:6]) @ v[4:6])
    # With the identity as v the output is P itself; what is left out are P's smallest singular values.
    p, kept = traffic.low_rank(q, k, np.eye(12), 12), traffic.low_rank(q, k, np.eye(12), 3)
    sizes = np.linalg.svd(p, compute_uv=False)
    assert np.linalg.matrix_rank(kept) == 3
    np.testing.assert_allclose(np.linalg.norm(p - kept), np.linalg.norm(sizes[3:]))
    # More queries than keys, more rank than there is: P itself.
    np.testing.assert_allclose(traffic.low_rank(q, k[:5], np.eye(5), 9).sum(axis=1), np.ones(12))
    # Linear attention, its weights written out: elu(x) + 1 is x + 1 above 0 and exp(x) below.
    phi_q, phi_k = (np.array([[x + 1 if x > 0 else np.exp(x) for x in row] for row in rows]) for rows in (q, k))
    weights = phi_q @ phi_k.T
    np.testing.assert_allclose(traffic.linear(q, k, v), weights / weights.sum(axis=1, keepdims=True) @ v)
