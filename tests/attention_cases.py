"""Inputs in awkward memory, and the rule by which a result is right, for every test of the attention kernels."""

import contextlib
import math
import os

import torch

from flashlib import device, reference
from flashlib.attention import flash_attention
from flashlib.dropout import keep_mask

DEVICE = device.kernel_device()
ON_GPU = DEVICE == "cuda"
TENSORS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


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


def plain_attention(
    q, k, v, seen, scale, *, softcap=None, alibi_slopes=None, bias=None, sinks=None, added=None, keep=None
):
    """Compute (out, lse) as plain PyTorch does: matmul, softmax, matmul, each rounded to the dtype."""
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    s = (q @ k.transpose(-1, -2)) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    for more in (None if alibi_slopes is None else alibi(alibi_slopes, *s.shape[2:]), bias, added):
        if more is not None:
            s = s + more.to(s.dtype)
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
        return kept(torch.softmax(s, -1)[..., :-1], keep) @ v, torch.logsumexp(s, -1)
    some = seen.any(-1, keepdim=True)
    s = torch.where(some, s, 0.0)
    p = torch.where(some, torch.softmax(s, -1), 0.0)
    return kept(p, keep) @ v, torch.logsumexp(s, -1)


def kept(p, keep):
    """Return the weights after dropout; keep: (which are kept, dropout_p), or None."""
    return p if keep is None else torch.where(keep[0], p / (1 - keep[1]), 0.0)


def alibi(slopes, seqlen_q, seqlen_k):
    """Return what ALiBi adds, (nheads or batch and nheads, seqlen_q, seqlen_k)."""
    i = torch.arange(seqlen_q, device=slopes.device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=slopes.device)[None, :]
    return -slopes[..., None, None] * (i - j).abs()


def seen_by(seqlen_q, seqlen_k, causal, mask=None, place=DEVICE, window=None):
    """Return the pairs that count, [seqlen_q, seqlen_k] or broadcast with `mask`."""
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=place)
    left, right = window or (None, None)
    right = 0 if causal else right
    if right is not None:
        seen = seen.tril(min(seqlen_k - seqlen_q + right, seqlen_q + seqlen_k))
    if left is not None:
        seen = seen.triu(max(seqlen_k - seqlen_q - left, -seqlen_q - seqlen_k))
    return seen if mask is None else seen & mask


def run(function, tensors, dout, dlse, chosen=None):
    """Return (out, lse, and the gradients of the tensors that are not None); only chosen rows send back through lse."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    given = [x for x in leaves if x is not None]
    if chosen is None:
        return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), given, (dout, dlse))
    sent = (out * dout).sum() + (lse[chosen] * dlse[chosen].to(lse.dtype)).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(sent, given)


def check(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None, bias=None, sinks=None,
    dropout_p=0.0, dropout_seed=None, dense=None, added=None, backward=True, layout_dout="contiguous", **hooks,
):  # fmt: skip
    """Run flash_attention against the float64 oracle and hold every tensor's error against plain PyTorch's.

    Args:
        q, k, v: inputs. causal to sinks: as in the op. hooks: mask= and score= for the op.
        dense: the same mask as booleans for the oracle; added: the same score as a number added.
        backward: also compare gradients, through out and lse.

    Returns:
        dict, tensor -> error / allowed error.
    """
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    value = q.shape[3] ** -0.5 if scale is None else scale
    seen = seen_by(seqlen_q, seqlen_k, causal, dense, q.device, window)
    if bias is not None:
        seen = seen & (bias != -math.inf)
    seen = seen.expand(*q.shape[:2], seqlen_q, seqlen_k)
    some = seen.any(-1)
    finite = some if sinks is None else torch.ones_like(some)
    dout = tensor((*q.shape[:3], v.shape[3]), q.dtype, layout_dout, seed=9, place=q.device)
    dlse = torch.randn(q.shape[:3], dtype=torch.float32, device=q.device)
    numbers = {"scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "dropout_p": dropout_p}
    keep = None
    if dropout_p:
        mask = keep_mask(*dropout_seed.tolist(), dropout_p, *q.shape[:3], seqlen_k)
        keep = torch.from_numpy(mask).to(q.device)

    def oracle(q, k, v, bias, sinks):
        if added is not None:
            bias = added.double()
        return reference.attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            mask=dense,
            bias=bias,
            sinks=sinks,
            keep=keep,
            return_lse=True,
            **numbers,
        )

    def plain(q, k, v, bias, sinks):
        # Where a key is hidden by the bias, 0 stands for -inf, which `seen` has already.
        bias = None if bias is None else torch.where(bias == -math.inf, 0.0, bias)
        return plain_attention(
            q,
            k,
            v,
            seen,
            value,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            bias=bias,
            sinks=sinks,
            added=added,
            keep=None if keep is None else (keep, dropout_p),
        )

    def ours(q, k, v, bias, sinks):
        return flash_attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            bias=bias,
            sinks=sinks,
            dropout_seed=dropout_seed,
            return_lse=True,
            **numbers,
            **hooks,
        )

    inputs = q, k, v, bias, sinks
    wide = [None if x is None else x.double() for x in inputs]
    if backward:
        want = run(oracle, wide, dout.double(), dlse, finite)
        base = run(plain, inputs, dout, dlse, finite)
        with poisoned():
            # Rows with no key: whatever comes back through their lse must not count.
            got = run(ours, inputs, dout, dlse.to(want[1].dtype if q.dtype == torch.float64 else torch.float32))
    else:
        with torch.no_grad():
            want, base = oracle(*wide), plain(*inputs)
            with poisoned():
                got = ours(*inputs)

    ratios = {}
    names = [name for name, x in zip(TENSORS, ("out", "lse", *inputs), strict=True) if x is not None]
    for name, ours_, plain_, exact in zip(names, got, base, want, strict=False):
        assert ours_.shape == exact.shape, name
        if name == "lse":
            assert ours_.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
            assert (ours_[~finite] == -math.inf).all(), "lse of a row with no key"
            ours_, plain_, exact = ours_[finite], plain_[finite], exact[finite]
        else:
            kind = {"dbias": bias, "dsinks": sinks}.get(name, q).dtype
            assert ours_.dtype == kind, name
        if name in ("out", "dq"):
            assert (ours_[~some] == 0).all(), f"{name} of a row with no key"
        assert ours_.isfinite().all(), f"{name} has a value that is not finite"
        if exact.numel():
            ratios[name] = error(ours_, exact) / allowed(plain_, exact, ours_.dtype if name != "lse" else q.dtype)
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
