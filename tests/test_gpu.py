"""What only a GPU shows: all dtypes and head_dims, large shapes, 64-bit offsets, memory, graphs, streams, devices.

Most of the time goes into compiling, and a kernel is compiled anew for each dtype, head_dim, causal, and for what
Triton knows of its numbers: which lengths and strides are 1 or multiples of 16. The cases are chosen so that many runs
share few kernels.
"""

import gc
import math
import random
import time

import pytest
import torch
from attention_cases import ON_GPU, allowed, check, error, plain_attention, run, seen_by, tensor
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_forward import LAYOUTS, qkv

from flashlib import reference, tiles
from flashlib.attention import flash_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EVERY_HEAD_DIM = range(16, 257, 8)
# Lengths for which tiles are read through pointers, and, from tiles.DESCRIPTOR_FROM on, through descriptors.
SHORT = [(127, 129), (129, 65), (33, 257), (301, 499)]
LONG = [(1025, 1025), (601, 1003), (1003, 601)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", EVERY_HEAD_DIM)
def test_forward_at_every_head_dim(dtype, head_dim):
    causal, short = head_dim // 8 % 2 == 0, head_dim // 16 % 2 == 0
    for seqlen_q, seqlen_k in SHORT[:3] if short else LONG[1:]:
        check(*qkv(1, 2, seqlen_q, seqlen_k, head_dim, dtype=dtype), causal=causal, backward=False)


# Both ways to read, with and without causal, at 64; elsewhere some of the four.
MATRIX = [(64, causal, lengths) for causal in (False, True) for lengths in (SHORT, LONG)]
MATRIX += [(128, False, SHORT), (128, True, LONG), (16, True, SHORT), (40, False, LONG), (96, False, SHORT)]
MATRIX += [(192, True, SHORT), (256, False, LONG)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "causal", "lengths"), MATRIX, ids=str)
def test_backward_matrix(dtype, head_dim, causal, lengths):
    for seqlen_q, seqlen_k in lengths:
        check(*qkv(1, 2, seqlen_q, seqlen_k, head_dim, dtype=dtype), causal=causal)


FEW = [(1, 1), (1, 257), (5, 64), (64, 3), (64, 64), (512, 1024)]


@pytest.mark.parametrize(("dtype", "lengths"), list(zip(DTYPES * 2, FEW, strict=True)), ids=str)
def test_a_few_rows_and_whole_tiles(dtype, lengths):
    check(*qkv(32 if min(lengths) < 8 else 1, 2, *lengths, 64, dtype=dtype), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (64, 128), (128, 64), (256, 16), (104, 200)], ids=str)
def test_head_dims_that_differ(dtype, shape):
    for lengths in [(33, 97), (301, 499), (499, 301)]:
        check(*qkv(2, 2, *lengths, *shape, dtype=dtype), causal=True)


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("lengths", [(97, 301), (601, 703)], ids=str)
def test_layouts(lengths, turn):
    layouts = LAYOUTS[turn:] + LAYOUTS[:turn]
    check(*qkv(2, 3, *lengths, 64, dtype=torch.bfloat16, layouts=layouts[:3]), causal=True, layout_dout=layouts[3])


# --- fuzz: a part fixes what a kernel is compiled for, hypothesis draws the rest -------------------------------------

FUZZ = settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate)
)


@pytest.mark.parametrize("part", range(24))
@FUZZ
@given(data=st.data())
def test_fuzz(part, data):
    dice = random.Random(part)
    dtype = DTYPES[part % 3]
    head_dim = dice.choice((16, 40, 64, 72, 128) if dtype == torch.float32 else (16, 24, 64, 88, 128, 136))
    head_dim_v = dice.choice((head_dim, head_dim, 24, 64, 104))
    layouts = [dice.choice(LAYOUTS) for _ in range(4)]
    causal, long, whole = dice.random() < 0.6, dice.random() < 0.3, dice.random() < 0.3
    sign = dice.choice((1, 1, 0, -1))

    def length(least):
        n = data.draw(st.integers(520, 900) if long else st.integers(least, 500))
        # A multiple of 16 is another kernel; so is 1.
        return max(16, n // 16 * 16) if whole else n + 2 * (n > 0 and n % 16 == 0) + (n == 1)

    seqlen_q, seqlen_k = length(1), length(0)
    scale = sign * data.draw(st.floats(0.01, 0.6)) if sign < 1 else data.draw(st.sampled_from([None, 0.07, 0.5]))
    batch = 32 if seqlen_q < 8 else data.draw(st.integers(1, 2))
    inputs = qkv(batch, data.draw(st.integers(2, 4)), seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, layouts[:3])
    check(*inputs, causal=causal, scale=scale, layout_dout=layouts[3])


@pytest.mark.parametrize("part", range(6))
@settings(FUZZ, max_examples=4)
@given(data=st.data())
def test_fuzz_everything(part, data):
    draw = data.draw
    head_dim, head_dim_v = draw(st.sampled_from([16, 48, 64, 104])), draw(st.sampled_from([16, 64, 72]))
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(4)]
    seqlen_q, seqlen_k = draw(st.integers(1, 900)), draw(st.integers(0, 900))
    scale = draw(st.sampled_from([None, None, 0.0, 0.3, -0.2]))
    batch = 32 if seqlen_q < 8 else draw(st.integers(1, 2))
    inputs = qkv(batch, 3, seqlen_q, seqlen_k, head_dim, head_dim_v, DTYPES[part % 3], layouts[:3])
    check(*inputs, causal=draw(st.booleans()), scale=scale, layout_dout=layouts[3])


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_a_real_size(causal):
    """Shapes at which others read past their memory; three of the 96 heads against the oracle."""
    inputs = qkv(3, 32, 4096, 4096, 128, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in inputs]
    dout = tensor((3, 32, 4096, 128), torch.bfloat16, seed=9)
    out, lse = flash_attention(*leaves, causal=causal, return_lse=True)
    got = (out, lse, *torch.autograd.grad(out, leaves, dout))
    seen = seen_by(4096, 4096, causal)
    for b, h in ((0, 0), (1, 17), (2, 31)):
        head = [x.detach()[b : b + 1, h : h + 1] for x in inputs]
        gone = torch.zeros(1, 1, 4096, device="cuda"), seen.any(-1)[None, None]

        def oracle(*qkv):
            return reference.attention(*qkv, causal=causal, return_lse=True)

        def plain(*qkv):
            return plain_attention(*qkv, seen, 128**-0.5)

        want = run(oracle, [x.double() for x in head], dout[b : b + 1, h : h + 1].double(), *gone)
        base = run(plain, head, dout[b : b + 1, h : h + 1], *gone)
        for x, near, exact in zip(got, base, want, strict=True):
            assert error(x.detach()[b : b + 1, h : h + 1], exact) <= allowed(near, exact, torch.bfloat16)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_float32_is_not_tf32(head_dim):
    """TF32 rounds to 11 bits: relative errors of 1e-4 to 1e-3, where float32's are below 1e-6."""
    inputs = [x.requires_grad_() for x in qkv(1, 2, 128, 128, head_dim)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for function, leaves in ((flash_attention, inputs), (reference.attention, exact)):
        out = function(*leaves, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert (x - y).norm() <= 3e-6 * y.norm()


def test_the_last_partial_tile_is_as_good_as_the_others():
    q, k, v = qkv(1, 4, 137, 137, 64, dtype=torch.float16)
    exact = flash_attention(q.float(), k.float(), v.float(), causal=True)
    got = flash_attention(q, k, v, causal=True)
    assert error(got[:, :, 128:], exact[:, :, 128:].double()) <= 2 * error(got[:, :, :128], exact[:, :, :128].double())


def test_more_heads_than_a_grid_axis_holds():
    leaves = [torch.randn(70000, 1, 4, 16, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    few = [x.detach()[-5:].requires_grad_() for x in leaves]
    out, want = flash_attention(*leaves), flash_attention(*few)
    assert torch.equal(out[-5:], want)
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    for x, y in zip(grads, torch.autograd.grad(want.float().square().sum(), few), strict=True):
        assert torch.equal(x[-5:], y)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "turned"])
def test_offsets_past_32_bits(layout):
    shape = {"contiguous": (2, 2, 2**19 + 64, 1040), "transposed": (1, 2, 2**19 + 64, 2080)}.get(layout)
    if layout == "turned":
        # head_dim is the axis with the large stride: 16 columns of 2**27 + 64 rows, of which the last are used.
        whole = [torch.randn(16, 2**27 + 64, device="cuda", dtype=torch.float16) for _ in range(3)]
        q, k, v = (x.T[None, None, -300:] for x in whole)
        assert tiles.wide(q.stride()[2:])
    else:
        whole = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3)]
        q, k, v = (x[:, :, -300:, -64:] for x in whole)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    copies = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    got, want = flash_attention(*leaves, causal=True), flash_attention(*copies, causal=True)
    dout = torch.randn_like(want)
    torch.testing.assert_close(got, want)
    for a, b in zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, copies, dout), strict=True):
        torch.testing.assert_close(a, b)


def settled(allocated):
    """Wait until no more memory than `allocated` is held: autograd's thread lets go of a graph a moment late."""
    gc.collect()
    for _ in range(500):
        if torch.cuda.memory_allocated() == allocated:
            break
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == allocated
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize("seqlen", [1024, 65536])
def test_memory(seqlen):
    q, k, v = (torch.randn(1, 2, seqlen, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 2, seqlen, 64, device="cuda", dtype=torch.bfloat16)
    gc.collect()
    # What an earlier test left to autograd's thread.
    time.sleep(0.3)
    start = torch.cuda.memory_allocated()
    torch.autograd.grad(flash_attention(q, k, v), (q, k, v), dout)
    tensor_bytes, row_bytes = q.numel() * 2, 2 * seqlen * 4
    settled(start)
    out = flash_attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - start == tensor_bytes + row_bytes
    settled(start + tensor_bytes + row_bytes)
    torch.autograd.grad(out, (q, k, v), dout)
    assert torch.cuda.max_memory_allocated() - start == 4 * tensor_bytes + 2 * row_bytes


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 128), (torch.float32, 40)], ids=str
)
def test_the_same_bits_and_no_fresh_memory_shows(dtype, head_dim):
    inputs = [x.requires_grad_() for x in qkv(2, 4, 701, 903, head_dim, dtype=dtype)]
    first = None
    for i in range(30):
        torch.full((2**24,), [0.0, math.nan][i % 2], device="cuda")
        out, lse = flash_attention(*inputs, causal=True, return_lse=True)
        got = (out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sin()[..., 1:].sum(), inputs))
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))


def test_cuda_graph():
    inputs = [x.requires_grad_() for x in qkv(1, 2, 700, 700, 64, dtype=torch.bfloat16)]
    dout = tensor((1, 2, 700, 64), torch.bfloat16, seed=9)

    def both():
        out = flash_attention(*inputs, causal=True)
        return out, *torch.autograd.grad(out, inputs, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    with torch.no_grad():
        inputs[0].mul_(2)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, both(), strict=True))


def test_a_stream_that_is_not_the_current_one():
    leaves = [x.requires_grad_() for x in qkv(1, 2, 701, 701, 64, dtype=torch.bfloat16)]
    dout = tensor((1, 2, 701, 64), torch.bfloat16, seed=9)
    out = flash_attention(*leaves, causal=True)
    want = (out, *torch.autograd.grad(out, leaves, dout))
    late = [torch.full_like(x, math.nan).requires_grad_() for x in leaves]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # What stands behind 50 ms of waiting in this stream is not there yet for any other.
        torch.cuda._sleep(10**8)
        with torch.no_grad():
            for x, y in zip(late, leaves, strict=True):
                x.copy_(y)
        out = flash_attention(*late, causal=True)
        got = (out, *torch.autograd.grad(out, late, dout))
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    q, k, v = (x.to("cuda:1").requires_grad_() for x in qkv(1, 2, 600, 600, 64, dtype=torch.bfloat16))
    out = flash_attention(q, k, v)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert out.device.index == 1
    assert torch.cuda.current_device() == 0


def test_float64_is_refused():
    x = torch.zeros(1, 1, 8, 16, device="cuda", dtype=torch.float64)
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match=r"q must have dtype .* on a GPU, got torch.float64"):
        flash_attention(x, x, x)
    assert torch.cuda.memory_allocated() == before


ROWS = sorted({(size, columns) for (_, family, size), rows in tiles.TILES.items() if family == 90 for columns in rows})
# Rows that give a pair of tiles are launched with causal and without.
ROWS = [(*row, columns % 3 == 1) for row in ROWS for columns in row[1:]] + [(2, 64, False)]


@pytest.mark.parametrize(("itemsize", "columns", "causal"), ROWS)
def test_every_tile_of_the_table(itemsize, columns, causal, monkeypatch):
    """Each row of this family's table is launched, for each of the three kernels, and is right."""
    if tiles.architecture_of(torch.device("cuda", 0)) != 90:
        pytest.skip("the rows of compute capability 9.0")
    asked = {}

    def spy(kernel, *facts):
        asked[kernel, *facts[1:]] = find(kernel, *facts)
        return asked[kernel, *facts[1:]]

    find = tiles.tile_for
    monkeypatch.setattr(tiles, "tile_for", spy)
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    check(*qkv(1, 2, 601, 703, columns, dtype=dtype), causal=causal)
    for kernel in ("forward", "dkdv", "dq"):
        row = tiles.TILES[kernel, 90, itemsize]
        wanted = row[min(wider for wider in row if wider >= columns)]
        wanted = wanted[causal] if isinstance(wanted[0], tuple) else wanted
        assert asked[kernel, itemsize, columns, causal] == tiles.Tile(*wanted)


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("warps", [4, 8])
def test_any_tile(block_m, block_n, warps, monkeypatch):
    monkeypatch.setattr(tiles, "tile_for", lambda *_: tiles.Tile(block_m, block_n, warps, 2))
    causal = (block_m + block_n) // 16 % 2 == warps // 8
    check(*qkv(1, 2, 301, 333, 64, dtype=torch.bfloat16), causal=causal)


@pytest.mark.parametrize("tile", [(16, 32, False), (64, 128, False), (128, 64, True)])
def test_dropout_decides_as_its_twin_in_numpy(tile):
    from test_dropout import SEED, decided

    from flashlib import dropout

    want = dropout.keep_mask(*SEED, 0.3, 2, 3, 137, 200)
    assert (decided(SEED, 0.3, 2, 3, 137, 200, *tile) == want).all()
