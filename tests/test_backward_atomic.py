"""backward_atomic.py: right in any order of the programs; the order shows in the bits of dq, and only there."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch
from attention_cases import DEVICE, allowed, error, plain_attention, seen_by

from flashlib import reference
from flashlib.backward_atomic import backward_atomic
from flashlib.forward import flash_attention


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
