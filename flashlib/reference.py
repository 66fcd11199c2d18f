"""Attention written out, twice: the lesson in a few lines, and the oracle that every kernel is held against.

Attention compares each query with every key (the scores S), turns each row of scores into weights that sum to one (P),
and averages the values with these weights. Both functions store S and P in full; the oracle does it in float64.

Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1, https://arxiv.org/abs/1706.03762
"""

import math
import sys

import numpy as np
import torch


def naive_attention(q, k, v, scale=None):
    """Compute softmax(scale·QKᵀ)V as three steps, with S and P stored in full, in the dtype of the inputs.

    Args:
        q: numpy array or torch tensor, (..., seqlen_q, head_dim).
        k: the same, (..., seqlen_k, head_dim).
        v: the same, (..., seqlen_k, head_dim_v).
        scale: what a dot product is multiplied with; None means 1/sqrt(head_dim).

    Returns:
        (..., seqlen_q, head_dim_v), of the inputs' kind and dtype. There is no mask, so every row sees all keys.

    Source: "Attention Is All You Need", equation 1.
    """
    xp = torch if isinstance(q, torch.Tensor) else np
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    # Scores: [seqlen_q, seqlen_k]
    s = scale * (q @ k.swapaxes(-1, -2))
    # Subtracting the row's maximum changes no weight and keeps exp from overflowing.
    s = s - xp.amax(s, -1)[..., None]
    p = xp.exp(s)
    p = p / p.sum(-1)[..., None]
    # A weighted mean of the values: [seqlen_q, head_dim_v]
    return p @ v


def attention(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None, bias=None, sinks=None,
    mask=None, dropout_p=0.0, keep=None, return_lse=False,
):  # fmt: skip
    """Compute attention in float64, with every row's edge cases defined: the oracle of every test.

    The order: scale·QKᵀ, softcap, ALiBi and bias, masks, softmax (with the sink), dropout.

    Args:
        q: numpy array or torch tensor of floats, (..., seqlen_q, head_dim); (batch, nheads, …) where heads matter.
        k: (..., seqlen_k, head_dim), the leading axes of q, but that of 4 axes the second may be nheads_kv: nheads is a
            multiple of it, and query head h uses the KV head h // (nheads / nheads_kv).
        v: (..., seqlen_k, head_dim_v), the leading axes of k.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (aligned at the bottom right).
        window: (left, right), how many keys a query sees before and after its own position, both inclusive; None means
            no limit on that side. The position of query i among the keys is i + seqlen_k - seqlen_q.
        scale: what a dot product is multiplied with; None means 1/sqrt(head_dim). 0.0 and negative values are honoured.
        softcap: a positive number c: scores become c·tanh(s/c).
        alibi_slopes: (nheads,) or (batch, nheads): -slope·|i + seqlen_k - seqlen_q - j| is added.
        bias: floats that broadcast to (..., seqlen_q, seqlen_k), added to the scores; -inf hides a key.
        sinks: (nheads,), one more score in every row's softmax, with no value behind it.
        mask: booleans that broadcast to (..., seqlen_q, seqlen_k), True where a query sees a key; ANDed with the rest.
        dropout_p: share of the weights that is dropped, in [0, 1); those kept are multiplied with 1/(1 - dropout_p).
        keep: booleans that broadcast to (..., seqlen_q, seqlen_k), True where a weight is kept; needed for dropout_p.
        return_lse: also return the natural logarithm of each row's sum of exponentials, the maximum and the sink
            included. Dropout leaves it as it is.

    Returns:
        out, or (out, lse): float64, (..., seqlen_q, head_dim_v) and (..., seqlen_q), numpy if q is, otherwise torch and
        differentiable. A row that sees no key has out exactly 0, lse exactly -inf (with sinks: the sink), gradients
        exactly 0. What a masked key or value holds, NaN or infinite, never shows.

    Raises:
        ValueError: an argument's kind, dtype or shape is not as above.

    Source: "Attention Is All You Need", section 3.2; alignment and rows without a key are this course's definition.
    """
    _check_tensors(q, k, v)
    _check_options(q, k, causal, window, scale, softcap, mask, bias, dropout_p, keep)
    _check_heads(q, alibi_slopes, sinks)
    wants_numpy = isinstance(q, np.ndarray)
    q, k, v = (_double(x, None) for x in (q, k, v))
    k, v = (_each_head(x, q) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)

    seen = _seen_by_position(seqlen_q, seqlen_k, causal, window, q.device)
    if mask is not None:
        seen = seen & torch.as_tensor(mask, device=q.device)
    if bias is not None:
        bias = _double(bias, q.device)
        seen = seen & (bias != -math.inf)
    seen = seen.expand(*q.shape[:-2], seqlen_q, seqlen_k)

    s = _scores(q, k, scale, seen)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        i = torch.arange(seqlen_q, device=q.device)[:, None] + seqlen_k - seqlen_q
        j = torch.arange(seqlen_k, device=q.device)[None, :]
        s = s - _double(alibi_slopes, q.device)[..., None, None] * (i - j).abs()
    if bias is not None:
        s = s + torch.where(seen, bias, 0.0)
    sinks = None if sinks is None else _double(sinks, q.device)[:, None].expand(q.shape[:-1])
    p, lse = _softmax(s.masked_fill(~seen, -math.inf), seen, sinks)
    if dropout_p:
        p = torch.where(torch.as_tensor(keep, device=q.device), p / (1 - dropout_p), 0.0)
    out = _weighted_mean(p, v, seen)
    if wants_numpy:
        out, lse = out.numpy(), lse.numpy()
    return (out, lse) if return_lse else out


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, return_lse=False, **options):
    """Compute `attention` for each sequence of a packed batch, one after the other.

    Args:
        q: torch tensor (total_q, nheads, head_dim); k, v: (total_k, nheads_kv, head_dim), (total_k, nheads_kv,
            head_dim_v).
        cu_seqlens_q, cu_seqlens_k: integers (batch + 1,): sequence b has the rows cu_seqlens[b] to cu_seqlens[b+1] - 1.
        options: as in `attention`, for every sequence alike; alibi_slopes of shape (batch, nheads) are taken apart, and
            so are `mask`, `bias` and `keep` if they are lists with one tensor, or None, a sequence.

    Returns:
        out (total_q, nheads, head_dim_v), or (out, lse), lse (nheads, total_q); float64. Rows past the last sequence
        have out 0 and lse -inf.

    Source: a definition of this course.
    """
    starts_q, starts_k = (torch.as_tensor(x).tolist() for x in (cu_seqlens_q, cu_seqlens_k))
    # Rows before the first and after the last sequence belong to none.
    outs = [q.new_zeros((starts_q[0], q.shape[1], v.shape[2]), dtype=torch.float64)]
    lses = [q.new_full((q.shape[1], starts_q[0]), -math.inf, dtype=torch.float64)]
    for b in range(len(starts_q) - 1):
        own = {key: x[b] if isinstance(x, list) else x for key, x in options.items()}
        slopes = own.get("alibi_slopes")
        if slopes is not None and slopes.ndim == 2:
            own["alibi_slopes"] = slopes[b]
        rows_q, rows_k = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        one = (x.transpose(0, 1)[None] for x in (q[rows_q], k[rows_k], v[rows_k]))
        out, lse = attention(*one, return_lse=True, **own)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    left = q.shape[0] - starts_q[-1]
    outs.append(outs[0].new_zeros((left, *outs[0].shape[1:])))
    lses.append(lses[0].new_full((q.shape[1], left), -math.inf))
    out, lse = torch.cat(outs), torch.cat(lses, 1)
    return (out, lse) if return_lse else out


def _seen_by_position(seqlen_q, seqlen_k, causal, window, device):
    """Return which keys each query sees by causality and window alone, [seqlen_q, seqlen_k]."""
    i = torch.arange(seqlen_q, device=device)[:, None] + seqlen_k - seqlen_q
    j = torch.arange(seqlen_k, device=device)[None, :]
    # No distance between two positions exceeds the two lengths together; a larger int would not fit into int64.
    left, right = (None if side is None else min(side, seqlen_q + seqlen_k) for side in window or (None, None))
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        seen &= j <= i
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def _scores(q, k, scale, seen):
    """Return scale·QKᵀ, where nothing that is not finite reaches a gradient but through a score that is seen."""
    finite_q, finite_k = q.isfinite().all(-1), k.isfinite().all(-1)
    s = scale * (_zero_unless(finite_q, q) @ _zero_unless(finite_k, k).transpose(-1, -2))
    if finite_q.all() and finite_k.all():
        return s
    finite = finite_q[..., :, None] & finite_k[..., None, :]
    with torch.no_grad():
        raw = scale * (q @ k.transpose(-1, -2))
    return torch.where(seen & ~finite, raw, s)


def _each_head(x, q):
    """Return a tensor of nheads_kv heads as one of q's heads: query head h uses the KV head h // group."""
    if x.shape[:-2] == q.shape[:-2]:
        return x
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _softmax(s, seen, sinks):
    """Return the weights, 0 in a row that sees no key, and the log-sum-exp, -inf in such a row or its sink."""
    no_key = ~seen.any(-1)
    if sinks is not None:
        # One more score in each row, whose weight meets no value.
        everything = torch.cat([s, sinks[..., None]], -1)
        p, lse = _softmax(everything, everything != -math.inf, None)
        return p[..., :-1], lse
    # The maximum cancels in exact arithmetic, so no gradient needs to pass through it.
    m = s.detach().amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    m = torch.where(no_key, 0.0, m)
    p = torch.exp(s - m[..., None])
    l = torch.where(no_key, 1.0, p.sum(-1))
    return p / l[..., None], torch.where(no_key, -math.inf, m + l.log())


def _weighted_mean(p, v, seen):
    """Return PV, where a value that is not finite reaches the rows that see it and no other."""
    # The choice at the end is what keeps the gradient of a row without a key at 0, whatever is sent back into it.
    out = torch.where(seen.any(-1, keepdim=True), p @ torch.where(v.isfinite(), v, 0.0), 0.0)
    if not v.isfinite().all():
        for special, where in [(math.inf, v == math.inf), (-math.inf, v == -math.inf), (math.nan, v.isnan())]:
            reached = seen.double() @ where.double() > 0
            out = torch.where(reached, out + special, out)
    return out


def _zero_unless(condition, x):
    return torch.where(condition[..., None], x, 0.0)


def _double(x, device):
    if isinstance(x, np.ndarray):
        # A copy: the result must never share memory with the input.
        x = torch.from_numpy(np.array(x, dtype=np.float64))
    return x.to(device=device, dtype=torch.float64)


# --- input checks --------------------------------------------------------------------------------------------------


def _check_tensors(q, k, v):
    kind, kind_name = (np.ndarray, "numpy array") if isinstance(q, np.ndarray) else (torch.Tensor, "torch tensor")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, (np.ndarray, torch.Tensor)):
            raise ValueError(f"{name} must be a numpy array or a torch tensor, got {type(x).__name__}")
        if not isinstance(x, kind):
            raise ValueError(f"{name} must be a {kind_name} as q is, got {type(x).__name__}")
        if not _is_float(x):
            raise ValueError(f"{name} must have a floating-point dtype, got {x.dtype}")
        if x.ndim < 2:
            raise ValueError(f"{name} must have at least 2 axes (..., seqlen, head_dim), got shape {tuple(x.shape)}")
        if x.shape[:-2] != q.shape[:-2] and not _shares_heads(q, x):
            raise ValueError(
                f"{name} must have the leading axes of q, {tuple(q.shape[:-2])}, got {tuple(x.shape[:-2])} "
                "(of 4 axes the second may also divide that of q)"
            )
        if x.shape[-1] == 0:
            raise ValueError(f"{name} must have a head_dim of at least 1, got shape {tuple(x.shape)}")
        if kind is torch.Tensor and x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"v must have the leading axes of k, {tuple(k.shape[:-2])}, got {tuple(v.shape[:-2])}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v must have the seqlen of k, {k.shape[-2]}, got {v.shape[-2]}")


def _shares_heads(q, x):
    return q.ndim == x.ndim == 4 and q.shape[0] == x.shape[0] and x.shape[1] > 0 and q.shape[1] % x.shape[1] == 0


def _check_options(q, k, causal, window, scale, softcap, mask, bias, dropout_p, keep):
    if not (isinstance(causal, (bool, np.bool_, int)) and causal in (0, 1)):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    if window is not None:
        if not (isinstance(window, (tuple, list)) and len(window) == 2):
            raise ValueError(f"window must be a pair (left, right) or None, got {window!r}")
        for side, size in zip(("left", "right"), window, strict=True):
            if size is not None and (isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0):
                raise ValueError(f"window {side} must be an int of at least 0 or None, got {size!r}")
    if scale is not None and not _is_finite_number(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    if softcap is not None and not (_is_finite_number(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    if not (_is_finite_number(dropout_p) and 0 <= dropout_p < 1):
        raise ValueError(f"dropout_p must be a number from 0 up to, but not, 1, got {dropout_p!r}")
    if dropout_p and keep is None:
        raise ValueError(f"keep must say which weights are kept where dropout_p is not 0, got dropout_p {dropout_p!r}")
    shape = (*q.shape[:-2], q.shape[-2], k.shape[-2])
    for name, x in (("mask", mask), ("bias", bias), ("keep", keep)):
        if x is None:
            continue
        if not isinstance(x, (np.ndarray, torch.Tensor)):
            raise ValueError(f"{name} must be a numpy array or a torch tensor, got {type(x).__name__}")
        if name != "bias" and x.dtype not in (np.dtype(bool), torch.bool):
            meaning = "a query sees a key" if name == "mask" else "a weight is kept"
            raise ValueError(f"{name} must have dtype bool, True where {meaning}, got {x.dtype}")
        if name == "bias" and not _is_float(x):
            raise ValueError(f"bias must have a floating-point dtype, got {x.dtype}")
        if not _broadcasts(x.shape, shape):
            raise ValueError(f"{name} must broadcast to {tuple(shape)}, got shape {tuple(x.shape)}")


def _check_heads(q, alibi_slopes, sinks):
    for name, x, shapes in (
        ("alibi_slopes", alibi_slopes, (q.shape[1:2], q.shape[:2])),
        ("sinks", sinks, (q.shape[1:2],)),
    ):
        if x is None:
            continue
        if not isinstance(x, (np.ndarray, torch.Tensor)):
            raise ValueError(f"{name} must be a numpy array or a torch tensor, got {type(x).__name__}")
        if q.ndim != 4:
            raise ValueError(f"q must have 4 axes (batch, nheads, seqlen, head_dim) for {name}, got {tuple(q.shape)}")
        if not _is_float(x):
            raise ValueError(f"{name} must have a floating-point dtype, got {x.dtype}")
        if tuple(x.shape) not in [tuple(shape) for shape in shapes]:
            wanted = " or ".join(str(tuple(shape)) for shape in shapes)
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")


def _is_finite_number(x):
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        return False
    # An int may be too large for a float; comparing it is exact all the same. NumPy would compare in the type of x.
    return abs(x.item() if isinstance(x, np.generic) else x) <= sys.float_info.max


def _is_float(x):
    return x.dtype.kind == "f" if isinstance(x, np.ndarray) else x.dtype.is_floating_point


def _broadcasts(shape, target):
    return len(shape) <= len(target) and all(
        a in (1, b) for a, b in zip(reversed(shape), reversed(target), strict=False)
    )
