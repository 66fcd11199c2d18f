"""Attention over a packed batch: sequences of different lengths, one behind the other, with no padding between them.

The kernels are those of dense attention. A program finds its sequence in `cu_seqlens`, the places where sequences
begin, and then sees nothing but that sequence; so what a row computes depends neither on its neighbours nor on what
lies behind the last sequence.

Source: the packed layout and `cu_seqlens` are those of FlashAttention-2, https://arxiv.org/abs/2307.08691
"""

import itertools
import os

import torch
from torch import Tensor

from flashlib import tiles
from flashlib.attention import attend, autocast
from flashlib.options import check_heads, check_kind, options_of

# Set to 1, it makes calls on a GPU check what cu_seqlens hold, which makes the host wait for the GPU.
CHECK = "FLASHLIB_CHECK"


def flash_attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, window=None, scale=None,
    softcap=None, alibi_slopes=None, bias=None, sinks=None, dropout_p=0.0, dropout_seed=None, mask=None, score=None,
    return_lse=False, deterministic=True, backend=None,
):  # fmt: skip
    """Compute `flash_attention` of each of several sequences that lie packed one behind the other; differentiable.

    Args:
        q: (total_q, nheads, head_dim), any strides. k, v: (total_k, nheads_kv, head_dim) and (…, head_dim_v). Dtypes,
            heads and head_dims as in `flash_attention`.
        cu_seqlens_q: (batch + 1,), int32, on the device of q: queries cu_seqlens_q[b] … cu_seqlens_q[b + 1] - 1 are
            sequence b. It begins with 0 and does not decrease; a sequence may be empty. What lies behind the last
            number is no part of any sequence.
        cu_seqlens_k: the same for keys and values; a sequence may have other lengths in q and in k.
        max_seqlen_q, max_seqlen_k: at least the longest sequence's lengths; a bias is measured by them.
        causal … backend: as in `flash_attention`, for each sequence by itself. `mask` and `score` get the sequence as b
            and positions within it; alibi_slopes may be (batch, nheads); bias broadcasts to (batch, nheads,
            max_seqlen_q, max_seqlen_k), and of it a sequence uses the first rows and columns.

    Returns:
        out (total_q, nheads, head_dim_v), or (out, lse), lse (nheads, total_q). Behind the last sequence out is 0, lse
        -inf and every gradient exactly 0.

    Raises:
        ValueError: as `flash_attention`, or a length or cu_seqlens is not as above. What cu_seqlens hold is checked on
            the CPU, and on a GPU only if the environment variable FLASHLIB_CHECK is 1, because it makes the host wait;
            unchecked, wrong numbers there mean reads and writes outside of the tensors.
        RuntimeError, NotImplementedError: as `flash_attention`.

    Source: "FlashAttention-2", https://arxiv.org/abs/2307.08691
    """
    q, k, v = autocast(q, k, v)
    _check_tensors(q, k, v)
    for name, cu, x, longest in (
        ("q", cu_seqlens_q, q, max_seqlen_q),
        ("k", cu_seqlens_k, k, max_seqlen_k),
    ):
        _check_lengths(name, cu, x, longest)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        shapes = tuple(cu_seqlens_q.shape), tuple(cu_seqlens_k.shape)
        raise ValueError(f"cu_seqlens_k must have the shape of cu_seqlens_q, {shapes[0]}, got {shapes[1]}")
    shape = cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k
    options = options_of(
        q, shape, causal, window, scale, softcap, alibi_slopes, bias, sinks, dropout_p, dropout_seed, mask, score,
        deterministic, backend, cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(),
    )  # fmt: skip
    # To the kernels it is one batch of long rows: (1, nheads, total, head_dim).
    out, lse = attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), options)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def _check_tensors(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim != 3:
            raise ValueError(f"{name} must have 3 axes (total, nheads, head_dim), got shape {tuple(x.shape)}")
        check_kind(name, x, q)
    check_heads(q, k, v, 1)
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v must have the total of k, {k.shape[0]}, got {v.shape[0]}")
    tiles.check_device(q)


def _check_lengths(name, cu, x, longest):
    if not isinstance(cu, Tensor) or cu.dtype != torch.int32 or cu.ndim != 1 or cu.shape[0] < 1:
        got = f"{cu.dtype}, {tuple(cu.shape)}" if isinstance(cu, Tensor) else type(cu).__name__
        raise ValueError(f"cu_seqlens_{name} must be an int32 tensor of shape (batch + 1,), got {got}")
    if cu.device != x.device:
        raise ValueError(f"cu_seqlens_{name} must be on the device of q, {x.device}, got {cu.device}")
    if not isinstance(longest, (int, torch.SymInt)) or isinstance(longest, bool) or longest < 0:
        raise ValueError(f"max_seqlen_{name} must be an int of at least 0, got {longest!r}")
    if torch.compiler.is_compiling() or not (cu.device.type == "cpu" or os.environ.get(CHECK) == "1"):
        return
    places = cu.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(places)]
    if places[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens_{name} must begin with 0 and not decrease, got {places}")
    if places[-1] > x.shape[0]:
        raise ValueError(
            f"cu_seqlens_{name} must end at {x.shape[0]}, the total of {name}, or before, got {places[-1]}"
        )
    if max(lengths, default=0) > longest:
        raise ValueError(f"max_seqlen_{name} must be at least the longest sequence, {max(lengths)}, got {longest}")
