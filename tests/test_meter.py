"""The meter of interpreted kernels: equal to the formula to the byte, per tensor, and strict about addresses."""

import pytest
import torch

from flashlib import cost, device, flash_attention, meter, tiles

if device.kernel_problem():
    pytest.skip(device.kernel_problem(), allow_module_level=True)

from flashlib.device import tl, triton
from flashlib.fused_softmax import _softmax_kernel, add, scores, softmax, softmax_unfused
from flashlib.meter import Meter

interpreted = pytest.mark.skipif(not device.interpreting(), reason="the meter works in Triton's interpreter")
# It replaces functions of the language; the interpreter must find them. After a change of Triton run this file, then
# add the version to the list.
VERSIONS = ("3.7.1", "3.8.0", "3.9.0")


def test_triton_is_a_release_that_was_tried():
    assert VERSIONS == meter.CHECKED_TRITON
    assert triton.__version__.partition("+")[0] in VERSIONS


@triton.jit
def _copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask=offs < n), mask=offs < n)


@triton.jit
def _forms_kernel(x_ptr, out_ptr, flag, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    # No mask, a mask of one column, one that a number decides, a constant one, a scalar pointer.
    a = tl.load(x_ptr + rows * BLOCK + columns)
    b = tl.load(x_ptr + rows * BLOCK + columns, mask=rows < 2, other=0.0)
    c = tl.load(x_ptr + rows, mask=rows < BLOCK * flag, other=0.0)
    d = tl.load(x_ptr + rows, mask=False, other=0.0)
    e = tl.load(x_ptr)
    tl.store(out_ptr + rows * BLOCK + columns, a + b + c + d + e, mask=columns < 1)


@triton.jit
def _three_kernel(q_ptr, k_ptr, v_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    q = tl.load(q_ptr + offs * stride)
    k = tl.load(k_ptr + offs * stride, mask=offs < 3, other=0.0)
    v = tl.load(v_ptr + offs * stride, mask=offs < 1, other=0.0)
    tl.store(out_ptr + offs, q + k + v)


@triton.jit
def _inner(x_ptr):
    return tl.load(x_ptr)


@triton.jit
def _outer_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, _inner(x_ptr))


@triton.jit
def _atomic_kernel(x_ptr):
    tl.atomic_add(x_ptr, 1.0)


@interpreted
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 8), (5, 13), (7, 100)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_softmax_bytes_equal_the_formula(rows, columns, dtype):
    s = torch.randn(rows, columns).to(dtype)
    one = rows * columns * s.element_size()
    with Meter() as fused:
        softmax(s.T.contiguous().T)
    assert fused.count() == {"loads": {"s": one}, "stores": {"p": one}, "total": 2 * one}
    with Meter() as pieces:
        softmax(s, block=4)
    assert pieces.loads == {"s": one * (2 if columns > 4 else 1)}
    with Meter() as unfused:
        softmax_unfused(s)
    numbers = 4 * rows
    assert unfused.loads == {"s": 2 * one, "e": 2 * one, "m": numbers, "l": numbers}
    assert unfused.stores == {"m": numbers, "e": one, "l": numbers, "p": one}
    assert unfused.kernels == ["_row_max_kernel", "_exp_kernel", "_row_sum_kernel", "_divide_kernel"]
    assert unfused.outside == {"load": 0, "store": 0}
    # Chapter 02's pass "softmax" is the fused one: S read once, P written once.
    passes = {step.name: step for step in cost.naive_passes(rows, columns, 1, itemsize=s.element_size())}
    assert fused.total in {step.moved_bytes for step in passes.values()}


@interpreted
def test_scores_bytes_equal_the_formula():
    with Meter() as counted:
        scores(torch.randn(20, 24), torch.randn(37, 24), block_m=16, block_n=16)
    assert counted.count() == {
        "loads": {"q": 3 * 20 * 24 * 4, "k": 2 * 37 * 24 * 4},
        "stores": {"s": 20 * 37 * 4},
        "total": 4 * (3 * 20 * 24 + 2 * 37 * 24 + 20 * 37),
    }


def attention_inputs(seqlen_q, seqlen_k, head_dim, head_dim_v, dtype):
    shapes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)
    return [torch.randn(1, 2, *shape).to(dtype).requires_grad_() for shape in shapes]


ATTENTION = [(70, 50, 24, 16), (33, 97, 16, 40), (64, 64, 16, 16), (5, 3, 16, 16)]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", ATTENTION, ids=str)
def test_bytes_of_the_forward_equal_the_formula(sizes, causal, dtype):
    inputs = attention_inputs(*sizes, dtype)
    tile = tiles.tile_for("forward", 0, dtype.itemsize, 64, causal)
    with Meter() as counted:
        flash_attention(*inputs, causal=causal)
    want = cost.requested_bytes(
        *sizes[:3], block_m=tile.block_m, block_n=tile.block_n, itemsize=dtype.itemsize, causal=causal,
        head_dim_v=sizes[3],
    )  # fmt: skip
    for side, got in (("loads", counted.loads), ("stores", counted.stores)):
        assert got == {name: 2 * nbytes for name, nbytes in want[side].items()}
    assert counted.outside == {"load": 0, "store": 0}


@interpreted
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", ATTENTION, ids=str)
def test_bytes_of_the_backward_are_those_of_its_loops(sizes, causal):
    seqlen_q, seqlen_k, head_dim, head_dim_v = sizes
    q, k, v = attention_inputs(*sizes, torch.float32)
    out = flash_attention(q, k, v, causal=causal)
    dout = torch.randn_like(out)
    with Meter() as counted:
        torch.autograd.grad(out, (q, k, v), dout)
    # dK and dV: a tile of keys visits the tiles of queries that see one of its keys; dQ: the other way round.
    tile_q, tile_k = tiles.tile_for("dq", 0, 4, 64, causal), tiles.tile_for("dkdv", 0, 4, 64, causal)
    shift = seqlen_k - seqlen_q
    keys = sum(
        min(tile_q.block_n, seqlen_k - j)
        for i in range(0, seqlen_q, tile_q.block_m)
        for j in range(0, seqlen_k, tile_q.block_n)
        if not causal or j <= min(i + tile_q.block_m, seqlen_q) - 1 + shift
    )
    rows = sum(
        min(tile_k.block_m, seqlen_q - i)
        for j in range(0, seqlen_k, tile_k.block_n)
        for i in range(0, seqlen_q, tile_k.block_m)
        if not causal or j <= i + tile_k.block_m - 1 + shift
    )
    loads = {
        "q": (rows + seqlen_q) * head_dim, "k": (keys + seqlen_k) * head_dim, "v": (keys + seqlen_k) * head_dim_v,
        "out": seqlen_q * head_dim_v, "dout": (rows + 2 * seqlen_q) * head_dim_v,
        "lse": rows + seqlen_q, "delta": rows + seqlen_q,
    }  # fmt: skip
    stores = {
        "delta": seqlen_q, "dq": seqlen_q * head_dim, "dk": seqlen_k * head_dim, "dv": seqlen_k * head_dim_v,
    }  # fmt: skip
    assert counted.loads == {name: 2 * 4 * elements for name, elements in loads.items()}
    assert counted.stores == {name: 2 * 4 * elements for name, elements in stores.items()}


@interpreted
def test_bfloat16_counts_two_bytes():
    s = torch.randn(3, 5).bfloat16()
    with Meter(itemsize={"p": 2}) as counted:
        softmax(s)
    assert counted.count() == {"loads": {"s": 30}, "stores": {"p": 30}, "total": 60}


@interpreted
@pytest.mark.parametrize("flag", [0, 1])
def test_every_form_of_mask(flag):
    x, out = torch.zeros(16), torch.zeros(16)
    with Meter() as counted:
        _forms_kernel[(2,)](x, out, flag, BLOCK=4)
    assert counted.loads == {"x": 2 * 4 * (16 + 8 + 4 * flag + 0 + 1)}
    assert counted.stores == {"out": 2 * 4 * 4}


@interpreted
def test_views_into_one_packed_tensor_are_told_apart():
    packed, out = torch.randn(4, 3), torch.empty(4)
    with Meter() as counted:
        _three_kernel[(1,)](*packed.unbind(1), out, 3, BLOCK=4)
    assert counted.loads == {"q": 16, "k": 12, "v": 4}
    torch.testing.assert_close(out[0], packed[0].sum())


@interpreted
def test_repeated_and_reversed_layouts():
    with Meter() as counted:
        softmax(torch.randn(1, 6).expand(4, 6))
        add(torch.randn(1).expand(5), torch.randn(10)[::2], block=4)
    assert counted.loads == {"s": 4 * 6 * 4, "x": 20, "y": 20}


@interpreted
def test_helpers_and_keyword_arguments_are_counted():
    x, out = torch.ones(1), torch.zeros(1)
    with Meter() as counted:
        _outer_kernel[(1,)](x, out_ptr=out)
    assert counted.count() == {"loads": {"x": 4}, "stores": {"out": 4}, "total": 8}
    assert out.item() == 1


@interpreted
def test_results_are_the_same_bits():
    s = torch.randn(5, 13)
    plain = softmax(s, block=4)
    with Meter():
        assert torch.equal(softmax(s, block=4), plain)
    assert torch.equal(softmax(s, block=4), plain)


@interpreted
def test_a_lane_outside_of_every_tensor_is_refused_before_memory_is_touched():
    memory, target = torch.ones(12), torch.zeros(12)
    with Meter() as counted, pytest.raises(IndexError, match=r"load 2 elements outside .* near x"):
        _copy_kernel[(1,)](memory[:6], target[:6], 8, BLOCK=8)
    assert counted.loads == {"x": 24}
    assert not target.any()
    # Rows with a gap: the gap belongs to no tensor.
    wide = torch.zeros(2, 8)
    with Meter(), pytest.raises(IndexError, match="_softmax_kernel wants to load 2 elements outside"):
        _softmax_kernel[(2,)](wide[:, :3], wide[:, :3], (8, 1), (8, 1), 5, BLOCK_N=8)


@interpreted
def test_memory_that_lanes_may_touch_is_counted_apart():
    memory, target = torch.ones(12), torch.zeros(12)
    with Meter(tolerate=[memory, target]) as counted:
        _copy_kernel[(1,)](memory[:6], target[:6], 8, BLOCK=8)
    assert counted.outside == {"load": 2, "store": 2}
    assert counted.count() == {"loads": {"x": 24}, "stores": {"out": 24}, "total": 48}
    assert target.sum() == 8


@interpreted
def test_what_it_cannot_count_it_refuses():
    with Meter(), pytest.raises(NotImplementedError, match=r"this kernel uses tl\.atomic_add"):
        _atomic_kernel[(1,)](torch.zeros(1))


@interpreted
def test_everything_is_put_back():
    before = tl.load, tl.store, tl.atomic_add, type(tl.sum).run
    with Meter(), pytest.raises(IndexError, match="outside"):
        _copy_kernel[(1,)](torch.ones(2), torch.zeros(2), 4, BLOCK=4)
    with Meter() as first, Meter() as second:
        add(torch.ones(3), torch.ones(3))
    assert first.count() == second.count()
    assert (tl.load, tl.store, tl.atomic_add, type(tl.sum).run) == before
    x = torch.zeros(1)
    _atomic_kernel[(1,)](x)
    assert x.item() == 1


def test_counts_from_a_process_of_its_own():
    inputs = {"q": (20, 24), "k": (37, 24)}
    first, second, third = meter.count_many(
        [
            {"program": "flashlib.fused_softmax:softmax", "inputs": {"s": (3, 10)}, "dtype": "float16"},
            {"program": "flashlib.fused_softmax:scores", "inputs": inputs, "options": {"block_m": 16, "block_n": 32}},
            {
                "program": "flashlib.fused_softmax:softmax",
                "inputs": {"s": (3, 10)},
                "dtype": "bfloat16",
                "itemsize": {"p": 2},
            },
        ]
    )
    assert first == third == {"loads": {"s": 60}, "stores": {"p": 60}, "total": 120}
    assert second["loads"] == {"q": 2 * 20 * 24 * 4, "k": 2 * 37 * 24 * 4}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("flashlib.fused_softmax:nothing", "nothing"),
        ("flashlib.fused_softmax:add", "x must be a tensor of 1 dimension"),
    ],
)
def test_a_bad_job_is_named(program, message):
    inputs = {"x": (2, 3), "y": (2, 3)}
    with pytest.raises(ValueError, match=message):
        meter.count(program, inputs)


def test_the_meter_says_where_it_works(monkeypatch):
    monkeypatch.setattr(device, "interpreting", lambda: False)
    with pytest.raises(RuntimeError, match=r"use meter\.count"):
        Meter().__enter__()
