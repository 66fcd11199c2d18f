"""Inputs in awkward memory, and the rule by which a result is right, for every test of the attention kernels."""

import contextlib
import math
import os

import torch

from flashlib import device, reference
from flashlib.forward import flash_attention

DEVICE = device.kernel_device()
ON_GPU = DEVICE == "cuda"
TENSORS = ("out", "lse", "dq", "dk", "dv")


def tensor(shape, dtype, layout="contiguous", seed=0, std=1.0, place=DEVICE):
    """Return random data of (batch, nheads, seqlen, head_dim) in a buffer whose every other element is NaN.

    Layouts: "contiguous"; "transposed", from (batch, seqlen, nheads, head_dim); "sliced", a part of every axis of a
        larger buffer; "strided", every second column; "turned", head_dim first in memory; "expanded", one head shown
        as all (stride 0).
    """
    b, h, s, d = shape
    generator = torch.Generator(place).manual_seed(1000 * seed + 100 * b + 10 * h + s + d)

    def nan(*sizes):
        return torch.full(sizes, math.nan, dtype=dtype, device=place)

    view = {
        "contiguous": lambda: nan(b * h * s * d + 64)[32 : 32 + b * h * s * d].view(shape),
        "transposed": lambda: nan(b, s + 3, h, d)[:, :s].transpose(1, 2),
        "sliced": lambda: nan(b + 1, h + 2, s + 5, d + 8)[:b, 1 : h + 1, 3 : s + 3, :d],
        "strided": lambda: nan(b, h, s + 1, 2 * d)[:, :, :s, ::2],
        "turned": lambda: nan(b, h, d, s + 3)[..., :s].transpose(2, 3),
        "expanded": lambda: nan(b, 1, s + 2, d)[:, :, :s].expand(shape),
    }[layout]()
    data = torch.randn(shape, generator=generator, dtype=torch.float32, device=place) * std
    if layout == "expanded":
        view[:, :1].copy_(data[:, :1])
    else:
        view.copy_(data)
    return view


@contextlib.contextmanager
def poisoned():
    """Fill fresh memory with NaN: what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def plain_attention(q, k, v, seen, scale):
    """Compute (out, lse) as plain PyTorch does: matmul, softmax, matmul, each rounded to the dtype."""
    s = (q @ k.transpose(-1, -2)) * scale
    s = s.masked_fill(~seen, -math.inf)
    some = seen.any(-1, keepdim=True)
    s = torch.where(some, s, 0.0)
    p = torch.where(some, torch.softmax(s, -1), 0.0)
    return p @ v, torch.logsumexp(s, -1)


def gradients(function, tensors, dout, dlse, chosen):
    """Return (out, lse, dq, dk, dv); rows whose lse is not finite send nothing back through it."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    sent = (out * dout).sum() + (lse[chosen] * dlse[chosen].to(lse.dtype)).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(sent, leaves)


def seen_by(seqlen_q, seqlen_k, causal, mask=None, place=DEVICE):
    """Return the pairs that count, [seqlen_q, seqlen_k] or broadcast with `mask`."""
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=place)
    if causal:
        seen = seen.tril(seqlen_k - seqlen_q)
    return seen if mask is None else seen & mask


def check(
    q, k, v, *, causal=False, scale=None, dense=None, bias=None, backward=True, layout_dout="contiguous", **hooks
):
    """Run flash_attention against the float64 oracle and hold every tensor's error against plain PyTorch's.

    Args:
        q, k, v: inputs. causal, scale: as in the op. hooks: mask= and score= for the op.
        dense: the same mask as booleans for the oracle; bias: the same score as a number added.
        backward: also compare gradients, through out and lse.

    Returns:
        dict, tensor -> error / allowed error.
    """
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    value = q.shape[3] ** -0.5 if scale is None else scale
    seen = seen_by(seqlen_q, seqlen_k, causal, dense, q.device).expand(*q.shape[:2], seqlen_q, seqlen_k)
    finite = seen.any(-1)
    dout = tensor((*q.shape[:3], v.shape[3]), q.dtype, layout_dout, seed=9, place=q.device)
    dlse = torch.randn(q.shape[:3], dtype=torch.float32, device=q.device)

    def oracle(*qkv):
        return reference.attention(*qkv, causal=causal, scale=scale, mask=dense, bias=bias, return_lse=True)

    def plain(q, k, v):
        if bias is not None:
            s = (q @ k.transpose(-1, -2)) * value + bias.to(q.dtype)
            s = s.masked_fill(~seen, -math.inf)
            return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)
        return plain_attention(q, k, v, seen, value)

    def ours(*qkv):
        return flash_attention(*qkv, causal=causal, scale=scale, return_lse=True, **hooks)

    if backward:
        want = gradients(oracle, [x.double() for x in (q, k, v)], dout.double(), dlse, finite)
        base = gradients(plain, (q, k, v), dout, dlse, finite)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with poisoned():
            out, lse = ours(*leaves)
            # Rows with no key: whatever comes back through their lse must not count.
            got = (out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse)))
    else:
        with torch.no_grad():
            want, base = oracle(q.double(), k.double(), v.double()), plain(q, k, v)
            with poisoned():
                got = ours(q, k, v)

    ratios = {}
    for name, ours_, plain_, exact in zip(TENSORS, got, base, want, strict=False):
        assert ours_.shape == exact.shape, name
        if name == "lse":
            assert ours_.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
            assert (ours_[~finite] == -math.inf).all(), "lse of a row with no key"
            ours_, plain_, exact = ours_[finite], plain_[finite], exact[finite]
        else:
            assert ours_.dtype == q.dtype, name
        if name in ("out", "dq"):
            assert (ours_[~finite] == 0).all(), f"{name} of a row with no key"
        assert ours_.isfinite().all(), f"{name} has a value that is not finite"
        if exact.numel():
            ratios[name] = error(ours_, exact) / allowed(plain_, exact, q.dtype)
    if os.environ.get("FLASHLIB_ERRORS"):
        # Asked for by pytest's --errors; one short line a write, so that processes can share the file.
        with open(os.environ["FLASHLIB_ERRORS"], "a") as file:
            file.write("".join(f"{q.dtype},{name},{ratio}\n" for name, ratio in ratios.items()))
    worst = max(ratios, key=ratios.get, default=None)
    assert worst is None or ratios[worst] <= 1, f"{worst}: {ratios[worst]:.2f} times the allowed error; {ratios}"
    return ratios


def error(x, exact):
    """Return the largest absolute error."""
    return (x.double() - exact).abs().max().item()


def allowed(plain, exact, dtype):
    """Return the error that is allowed: twice plain PyTorch's, and a last bit of the largest value."""
    return 2 * error(plain, exact) + torch.finfo(dtype).eps * exact.abs().max().item() + 1e-5
