"""A cache of keys and values: in one piece a sequence or in pages, what a call may ask of it, and how it grows.

A page is to the cache what a sequence is: the first index. A block table says which page holds which tokens, so that a
cache needs no room for what is not there yet, and sequences that begin alike can share pages.

Source: "Efficient Memory Management for LLM Serving with PagedAttention", section 4, https://arxiv.org/abs/2309.06180
"""

import math

import torch
from torch import Tensor

from flashlib import tiles
from flashlib.device import tl, triton
from flashlib.tiles import load_tile

MOST_NEW = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# --- where rows lie ------------------------------------------------------------------------------------------------


@triton.jit
def page_of(table_ptr, b, first, length, ROWS: tl.constexpr, PAGE: tl.constexpr):
    """Return where rows first … first + ROWS of sequence b are: one index of the cache's first axis, or one a row."""
    if PAGE is None:
        page = b
    elif PAGE % ROWS == 0:
        # All rows lie in one page. Behind the length the table may hold anything.
        page = tl.load(table_ptr + first // PAGE, mask=first < length, other=0)
    else:
        # Where tiles begin with a page, the places in pages are the same for all: the loop need not compute them.
        start = 0 if ROWS % PAGE == 0 else first % PAGE
        n = start + tl.arange(0, ROWS)
        page = tl.load(table_ptr + first // PAGE + n // PAGE, mask=n < start + length - first, other=0)
    return page


@triton.jit
def cache_tile(
    x, stride, page, h, first, length,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Load the rows first … first + ROWS of head h, found by `page_of`; what lies past `length` is 0. [ROWS, COLS]"""
    if PAGE is None:
        tile = load_tile(x, stride, page, h, first, length, ROWS, COLS, DIM, False, WIDE)
    elif PAGE % ROWS == 0:
        # A page is addressed as a sequence is.
        start = first % PAGE
        tile = load_tile(x, stride, page, h, start, start + length - first, ROWS, COLS, DIM, False, WIDE)
    else:
        start = 0 if ROWS % PAGE == 0 else first % PAGE
        n = start + tl.arange(0, ROWS)
        inside = (n < start + length - first)[:, None]
        if DIM < COLS:
            inside = inside & (tl.arange(0, COLS) < DIM)[None, :]
        tile = tl.load(paged_pointers(x, stride, page, h, n % PAGE, COLS), mask=inside, other=0.0)
    return tile


@triton.jit
def paged_pointers(x, stride, page, h, row, COLS: tl.constexpr):
    """Return the addresses of rows, each in a page of its own, of head h. [rows, COLS]"""
    inner = row.to(tl.int64)[:, None] * stride[2] + (tl.arange(0, COLS).to(tl.int64) * stride[3])[None, :]
    return x + tl.cast(h, tl.int64) * stride[1] + inner + (page.to(tl.int64) * stride[0])[:, None]


# --- appending ---------------------------------------------------------------------------------------------------


@triton.jit
def _append_kernel(
    k_new_ptr, v_new_ptr, k_ptr, v_ptr, length_ptr, table_ptr,
    stride_k_new, stride_v_new, stride_k, stride_v, stride_table, nheads_kv, seqlen_q, capacity,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    COLS: tl.constexpr, COLS_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // nheads_kv
    h = tl.program_id(0) % nheads_kv
    if PAGE is not None:
        table_ptr += b.to(tl.int64) * stride_table
    first = tl.maximum(tl.load(length_ptr + b), 0)
    copy_rows(
        k_new_ptr, stride_k_new, k_ptr, stride_k, table_ptr, b, h, first, seqlen_q, capacity, ROWS, COLS, HEAD_DIM, PAGE
    )
    copy_rows(
        v_new_ptr, stride_v_new, v_ptr, stride_v, table_ptr, b, h, first, seqlen_q, capacity,
        ROWS, COLS_V, HEAD_DIM_V, PAGE
    )  # fmt: skip


@triton.jit
def copy_rows(
    new_ptr, stride_new, cache_ptr, stride, table_ptr, b, h, first, seqlen_q, capacity,
    ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Store the rows of new[b, h] to the cache from position `first` on; what has no place there is left out."""
    n = first + tl.arange(0, ROWS)
    new = load_tile(new_ptr, stride_new, b, h, 0, seqlen_q, ROWS, COLS, DIM, False, True)
    inside = (n < first + seqlen_q) & (n < capacity)
    if PAGE is None:
        ptrs = paged_pointers(cache_ptr, stride, b + 0 * n, h, n, COLS)
    else:
        page = tl.load(table_ptr + n // PAGE, mask=inside, other=0)
        ptrs = paged_pointers(cache_ptr, stride, page, h, n % PAGE, COLS)
    tl.store(ptrs, new, mask=inside[:, None] & (tl.arange(0, COLS) < DIM)[None, :])


def append(k_cache, v_cache, k_new, v_new, cache_seqlens, block_table):
    """Launch the kernel that stores k_new and v_new in the cache, behind each sequence."""
    if k_new.numel() == 0:
        return
    tensors = k_new, v_new, k_cache, v_cache
    if k_new.device.type == "cpu" and k_new.dtype == torch.bfloat16:
        # The interpreter would round what it stores; a copy moves bits.
        tensors = tuple(x.view(torch.int16) for x in tensors)
    page, capacity = page_and_capacity(k_cache, block_table)
    batch, nheads_kv, seqlen_q, head_dim = k_new.shape
    arguments = (
        *tensors, cache_seqlens, block_table, *(x.stride() for x in tensors),
        None if block_table is None else block_table.stride(0), nheads_kv, seqlen_q, capacity,
    )  # fmt: skip
    constants = {
        "PAGE": page, "HEAD_DIM": head_dim, "HEAD_DIM_V": v_new.shape[3], "COLS": tiles.padded(head_dim),
        "COLS_V": tiles.padded(v_new.shape[3]), "ROWS": triton.next_power_of_2(seqlen_q),
    }  # fmt: skip
    with tiles.on_device_of(k_new):
        tiles.launch(_append_kernel, batch * nheads_kv, arguments, constants)


def page_and_capacity(k, block_table):
    """Return (tokens of a page or None, tokens of a sequence that there is room for)."""
    if block_table is None:
        return None, k.shape[2]
    return k.shape[2], block_table.shape[1] * k.shape[2]


# --- input checks --------------------------------------------------------------------------------------------------


def check_kinds(tensors):
    """Raise a ValueError unless each is a tensor without gradient, or None where it may be."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            if x is not None or name in ("q", "k_cache", "v_cache", "cache_seqlens"):
                raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        elif x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require grad, since flash_decode has no gradient, got one that does")
    if (tensors["k_new"] is None) != (tensors["v_new"] is None):
        raise ValueError("k_new and v_new must be given together, got one of them")


def check_tensors(q, k_cache, v_cache, cache_seqlens, block_table, k_new, v_new, sinks, alibi_slopes):
    """Raise a ValueError unless the tensors of `flash_decode` fit together."""

    def must(name, rule, value, fine):
        if not fine:
            raise ValueError(f"{name} must {rule}, got {value}")

    cache = (
        "(batch, nheads_kv, max_seqlen, head_dim)" if block_table is None else "(num_pages, nheads_kv, page_size, …)"
    )
    layouts = {"q": "(batch, nheads, seqlen_q, head_dim)", "k_cache": cache, "v_cache": cache}
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        must(name, f"have 4 axes {layouts[name]}", f"shape {tuple(x.shape)}", x.ndim == 4)
        must(name, "have dtype float16, bfloat16, float32 or float64", x.dtype, x.dtype in _DTYPES)
        must(name, "have a head_dim that is a multiple of 8 from 16 to 256", x.shape[3],
             x.shape[3] % 8 == 0 and 16 <= x.shape[3] <= 256)  # fmt: skip
    batch, nheads, seqlen_q, head_dim = q.shape
    nheads_kv = k_cache.shape[1]
    must("q", f"have 1 to {MOST_NEW} tokens a sequence", seqlen_q, 1 <= seqlen_q <= MOST_NEW)
    must("k_cache", f"have the head_dim of q, {head_dim}", k_cache.shape[3], k_cache.shape[3] == head_dim)
    must("k_cache", f"have a number of heads that divides the {nheads} of q", nheads_kv,
         nheads_kv > 0 and nheads % nheads_kv == 0)  # fmt: skip
    must("v_cache", f"have the shape of k_cache but for head_dim, {tuple(k_cache.shape[:3])}",
         tuple(v_cache.shape[:3]), v_cache.shape[:3] == k_cache.shape[:3])  # fmt: skip
    if block_table is None:
        must("k_cache", f"have the batch of q, {batch}", k_cache.shape[0], k_cache.shape[0] == batch)
    else:
        must("block_table", f"have shape ({batch}, max_pages)", tuple(block_table.shape),
             block_table.ndim == 2 and block_table.shape[0] == batch)  # fmt: skip
        must("k_cache", "have a page_size that is a multiple of 16 from 16 to 256", k_cache.shape[2],
             k_cache.shape[2] % 16 == 0 and 16 <= k_cache.shape[2] <= 256)  # fmt: skip
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        overlaps = any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True))
        must(name, "not show one element in several places where k_new is given", f"strides {x.stride()}",
             k_new is None or not overlaps)  # fmt: skip
    new = batch, nheads_kv, seqlen_q
    shapes = {
        "cache_seqlens": (cache_seqlens, [(batch,)]),
        "k_new": (k_new, [(*new, head_dim)]),
        "v_new": (v_new, [(*new, v_cache.shape[3])]),
        "sinks": (sinks, [(nheads,)]),
        "alibi_slopes": (alibi_slopes, [(nheads,), (batch, nheads)]),
    }
    for name, (x, allowed) in shapes.items():
        if x is not None:
            must(name, f"have shape {' or '.join(map(str, allowed))}", tuple(x.shape), tuple(x.shape) in allowed)
    kinds = {
        "k_cache": (k_cache, [q.dtype]), "v_cache": (v_cache, [q.dtype]), "k_new": (k_new, [q.dtype]),
        "v_new": (v_new, [q.dtype]), "cache_seqlens": (cache_seqlens, [torch.int32]),
        "block_table": (block_table, [torch.int32]), "sinks": (sinks, [q.dtype, torch.float32]),
        "alibi_slopes": (alibi_slopes, [torch.float32]),
    }  # fmt: skip
    for name, (x, dtypes) in kinds.items():
        if x is not None:
            must(name, f"have dtype {' or '.join(map(str, dtypes))}", x.dtype, x.dtype in dtypes)
            must(name, f"be on the device of q, {q.device}", x.device, x.device == q.device)
    tiles.check_device(q)


def check_options(num_splits, window, scale, softcap):
    """Return how many keys before its own a query sees, None for all."""
    if num_splits is not None and (isinstance(num_splits, bool) or not isinstance(num_splits, int) or num_splits < 1):
        raise ValueError(f"num_splits must be an int of at least 1 or None, got {num_splits!r}")
    if window is not None:
        if not (isinstance(window, (tuple, list)) and len(window) == 2):
            raise ValueError(f"window must be a pair (left, right) or None, got {window!r}")
        for side, size in zip(("left", "right"), window, strict=True):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise ValueError(f"window {side} must be an int of at least 0 or None, got {size!r}")
    for name, x in (("scale", scale), ("softcap", softcap)):
        if x is not None and (isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x)):
            raise ValueError(f"{name} must be a finite number or None, got {x!r}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be greater than 0 or None, got {softcap!r}")
    return None if window is None or window[0] is None else min(window[0], 2**30)


def check_values(k_cache, cache_seqlens, block_table, appended):
    """Raise a ValueError unless lengths and pages stay inside the cache; on a GPU the host waits for them."""
    page_size, capacity = page_and_capacity(k_cache, block_table)
    lengths = cache_seqlens.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= capacity - appended:
            raise ValueError(f"cache_seqlens must be from 0 to {capacity - appended}, got {length} for sequence {b}")
        if block_table is not None:
            used = block_table[b, : -(-(length + appended) // page_size)].tolist()
            if any(not 0 <= page < k_cache.shape[0] for page in used):
                raise ValueError(
                    f"block_table must name pages from 0 to {k_cache.shape[0] - 1}, got {used} for sequence {b}"
                )
