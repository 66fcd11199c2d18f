"""backward_atomic.py: right in any order of the programs; the order shows in the bits of dq, and only there."""

import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention_cases import DEVICE, allowed, error, plain_attention, seen_by
from kernel_jobs import job

from flashlib import backward, compiler, reference, tiles
from flashlib.attention import _Attention, flash_attention
from flashlib.backward_atomic import backward_atomic
from flashlib.options import Options


def inputs(shape, dtype=torch.float32):
    torch.manual_seed(0)
    batch, nheads, seqlen_q, seqlen_k, head_dim = shape
    lengths = seqlen_q, seqlen_k, seqlen_k, seqlen_q
    return [torch.randn(batch, nheads, n, head_dim, dtype=dtype, device=DEVICE) for n in lengths]


def run(q, k, v, dout, **options):
    causal = options.get("causal", False)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    return backward_atomic(q, k, v, out, lse, dout, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 70, 70, 16), (2, 1, 33, 80, 32), (1, 1, 80, 33, 16)], ids=str)
def test_matches_the_oracle(shape, dtype, causal):
    q, k, v, dout = inputs(shape, dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(reference.attention(*exact, causal=causal), exact, dout.double())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, _ = plain_attention(*leaves, seen_by(shape[2], shape[3], causal), shape[4] ** -0.5)
    plain = torch.autograd.grad(out, leaves, dout)
    for name, got, base, right in zip(("dq", "dk", "dv"), run(q, k, v, dout, causal=causal), plain, want, strict=True):
        assert got.dtype == dtype
        assert error(got, right) <= allowed(base, right, dtype), name


def test_the_order_of_programs_changes_bits_of_dq_only():
    tensors = inputs((1, 1, 64, 160, 16))
    first, other = run(*tensors), run(*tensors, order=[4, 2, 0, 3, 1])
    torch.testing.assert_close(first[0], other[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(first[1], other[1])
    assert torch.equal(first[2], other[2])
    if DEVICE == "cpu":
        # Where programs run one after the other, a fixed order gives fixed bits.
        assert not torch.equal(first[0], other[0])
        assert torch.equal(first[0], run(*tensors)[0])


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [1, 2, 3]])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(ValueError, match="order must hold each of the 3 tiles of keys once"):
        run(*inputs((1, 1, 8, 70, 16)), order=order)


def test_inputs_that_it_cannot_take_are_refused():
    q, k, v, dout = inputs((1, 1, 8, 8, 16))
    out, lse = flash_attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="k must be contiguous"):
        backward_atomic(q, k.mT.contiguous().mT, v, out, lse, dout)
    with pytest.raises(ValueError, match="head_dim of"):
        run(*inputs((1, 1, 8, 8, 24)))


def test_the_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks")
    monkeypatch.delitem(sys.modules, "backward", raising=False)
    script = importlib.import_module("backward")
    monkeypatch.setattr(script, "HEAD_DIM", 16)
    script.main(["--smoke", "--out", str(tmp_path / "b.csv"), "--commit", "abc1234"])
    rows = list(csv.DictReader((tmp_path / "b.csv").open()))
    assert {row["impl"] for row in rows} == {"flashlib_portable", "flashlib_atomic", "fa2", "fa2_deterministic"}
    assert all(row["differ_dq"] == "0" for row in rows if row["impl"] == "flashlib_portable")


# --- what chapter 09 says beside it --------------------------------------------------------------------------------


def one_pass_job(tile, dtype, head_dim):
    floats = ("lse_ptr", "delta_ptr", "dq_ptr")
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "dout_ptr", "dk_ptr", "dv_ptr"), f"*{dtype}")
    signature |= dict.fromkeys(floats, "*fp32") | {"order_ptr": "*i32"}
    signature |= {"seqlen_q": "i32", "seqlen_k": "i32", "scale": "fp32"}
    constants = {"CAUSAL": False, "HEAD_DIM": head_dim, "PRECISION": "ieee"}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    return {
        "kernel": "flashlib.backward_atomic:_one_pass_kernel",
        "signature": signature,
        "constexprs": constants,
        "capability": 80,
        "options": {"num_warps": tile.num_warps, "num_stages": tile.num_stages},
    }


def test_four_and_three_products_a_tile_or_five_in_one_pass():
    tile = tiles.Tile(64, 64, 4, 1)
    jobs = [job(kernel, "fp16", 64, False, 80, tile, descriptors=False) for kernel in ("dkdv", "dq")]
    counts = [built.ptx.count("mma.sync") for built in compiler.compile_many([*jobs, one_pass_job(tile, "fp16", 64)])]
    one = 64**3 // (16 * 16 * 8) // tile.num_warps
    assert counts == [4 * one, 3 * one, 5 * one]


def test_float32_gradients_take_three_passes_of_tf32(monkeypatch):
    q = torch.zeros(1, 1, 64, 32)
    for architecture in (80, 90, 100):
        monkeypatch.setattr(tiles, "architecture_of", lambda device, a=architecture: a)
        for kernel in ("dkdv", "dq"):
            assert tiles.plan(kernel, q, q, False, loaded=(q, q)).constants["PRECISION"] == "tf32x3"
    asked = job("dq", "fp32", 32, False, 80, tiles.Tile(64, 32, 4, 1), descriptors=False)
    plain = asked | {"constexprs": asked["constexprs"] | {"PRECISION": None}}
    three, one = (built.ptx.count(".tf32.tf32") for built in compiler.compile_many([asked, plain]))
    assert one > 0
    assert three == 3 * one


def test_backward_returns_one_gradient_for_each_argument():
    q, k, v, dout = inputs((1, 1, 8, 8, 16))
    out, lse = flash_attention(q, k, v, return_lse=True)
    for aux in ([], [torch.zeros(1, device=DEVICE)]):
        # 18 arguments, and the tensors of hooks.
        bias, sinks, *numbers = Options(scale=0.25, n_mask=len(aux))[:11]
        kept = SimpleNamespace(saved_tensors=(out, lse, q, k, v, bias, sinks, *[None] * 4, *aux), numbers=numbers)
        kept.needs_input_grad = (True, True, True, *[False] * (15 + len(aux)))
        returned = _Attention.backward(kept, dout, None)
        assert [x is not None for x in returned] == [True] * 3 + [False] * (15 + len(aux))


def test_a_backward_that_assumes_causal_is_right_only_where_the_mask_takes_nothing():
    q, k, v, dout = inputs((1, 1, 40, 40, 16))
    out, lse = flash_attention(q, k, v, return_lse=True)
    given = q, k, v, out, lse, dout, None, True, True
    right, wrong = (backward.gradients(*given, Options(right=right, scale=0.25))[:3] for right in (None, 0))
    rows = [
        ((a - b).abs().amax(-1)[0, 0] < 1e-5).nonzero().flatten().tolist() for a, b in zip(wrong, right, strict=True)
    ]
    assert rows == [[39], [0], [0]]
