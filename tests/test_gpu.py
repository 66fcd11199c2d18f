"""What only a GPU shows: all dtypes and head_dims, large shapes, 64-bit offsets, memory, graphs, devices."""

import itertools
import math

import pytest
import torch
from attention_cases import ON_GPU, check, error, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_forward import LAYOUTS, qkv

from flashlib import tiles
from flashlib.attention import flash_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="needs a GPU")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LENGTHS = [(1, 1), (1, 257), (64, 64), (127, 129), (129, 127), (300, 1000), (1000, 300), (1025, 1025)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 96, 104, 128, 160, 192, 256])
def test_matrix(dtype, head_dim):
    for (seqlen_q, seqlen_k), causal in itertools.product(LENGTHS, [False, True]):
        batch = 32 if seqlen_q < 8 else 1
        check(*qkv(batch, 2, seqlen_q, seqlen_k, head_dim, dtype=dtype), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (64, 128), (128, 64), (256, 16)])
def test_head_dims_that_differ(dtype, shape):
    for lengths, causal in itertools.product([(33, 97), (600, 700)], [False, True]):
        check(*qkv(2, 2, *lengths, *shape, dtype=dtype), causal=causal)


@pytest.mark.parametrize("part", range(10))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_fuzz(part, data):
    draw = data.draw
    # Few head_dims, since each pair is a compilation; test_matrix has the others.
    head_dim = (16, 40, 64, 72, 128)[part % 5]
    head_dim_v = head_dim if part < 5 else draw(st.sampled_from([24, 64, 104]))
    layouts = [draw(st.sampled_from(LAYOUTS)) for _ in range(4)]
    seqlen_q, seqlen_k = draw(st.integers(1, 700)), draw(st.integers(0, 700))
    dtype, causal = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    scale = draw(st.sampled_from([None, None, 0.0, 0.3, -0.2]))
    batch = 32 if seqlen_q < 8 else draw(st.integers(1, 2))
    inputs = qkv(batch, 3, seqlen_q, seqlen_k, head_dim, head_dim_v, dtype, layouts[:3])
    check(*inputs, causal=causal, scale=scale, layout_dout=layouts[3])


def test_the_last_partial_tile_is_as_good_as_the_others():
    q, k, v = qkv(1, 4, 137, 137, 64, dtype=torch.float16)
    exact = flash_attention(q.float(), k.float(), v.float(), causal=True)
    got = flash_attention(q, k, v, causal=True)
    assert error(got[:, :, 128:], exact[:, :, 128:].double()) <= 2 * error(got[:, :, :128], exact[:, :, :128].double())


def test_more_heads_than_a_grid_axis_holds():
    q, k, v = (torch.randn(70000, 1, 4, 16, device="cuda", dtype=torch.float16) for _ in range(3))
    out = flash_attention(q, k, v)
    torch.testing.assert_close(out[-5:], flash_attention(q[-5:], k[-5:], v[-5:]))


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


@pytest.mark.parametrize("seqlen", [1024, 65536])
def test_memory(seqlen):
    q, k, v = (torch.randn(1, 2, seqlen, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 2, seqlen, 64, device="cuda", dtype=torch.bfloat16)
    torch.autograd.grad(flash_attention(q, k, v), (q, k, v), dout)
    tensor_bytes, row_bytes = q.numel() * 2, 2 * seqlen * 4
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    out = flash_attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - start == tensor_bytes + row_bytes
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    torch.autograd.grad(out, (q, k, v), dout)
    assert torch.cuda.max_memory_allocated() - start == 3 * tensor_bytes + row_bytes


def test_the_same_bits_and_no_fresh_memory_shows():
    inputs = [x.requires_grad_() for x in qkv(2, 4, 700, 900, 64, dtype=torch.bfloat16)]
    first = None
    for i in range(30):
        torch.full((2**24,), [0.0, math.nan][i % 2], device="cuda")
        out = flash_attention(*inputs, causal=True)
        got = (out, *torch.autograd.grad(out.float().square().sum(), inputs))
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


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("block_n", [16, 32, 64, 128])
@pytest.mark.parametrize("warps", [4, 8])
def test_every_tile(block_m, block_n, warps, monkeypatch):
    monkeypatch.setattr(tiles, "tile_for", lambda *_: tiles.Tile(block_m, block_n, warps, 2))
    for causal in (False, True):
        check(*qkv(1, 2, 300, 333, 64, dtype=torch.bfloat16), causal=causal)
