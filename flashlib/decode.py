"""Attention of one or a few new tokens against a cache of keys and values, split over the whole GPU, pages included.

A new token has one row of queries a head, too few programs to read a long cache at full speed. So the cache is cut into
splits of a fixed size, each program attends to one, and chapter 03's merge puts their states together; a sink is a
state to start from, and a page only says where rows lie.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/; PagedAttention, https://arxiv.org/abs/2309.06180
"""

import functools
import math

import torch
from torch import Tensor

from flashlib import device, tiles
from flashlib.device import tl, triton
from flashlib.tiles import load_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Tokens of a split, and splits of a chunk. Sizes, not counts: how a row is cut, and so its bits, depends on its own
# length alone. The splits of a chunk are merged one after the other, wherever that is done.
SPLIT = 512
CHUNK = 16
MOST_NEW = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SEEN = set()


# --- kernels -------------------------------------------------------------------------------------------------------


@triton.jit
def merge(m_a, l_a, acc_a, m_b, l_b, acc_b):
    """Merge two states of the same rows, as `online_softmax.merge` does.

    m is a whole number, not less than the row's maximum (base 2): the factors are powers of two and round nothing, so
    that a merge with an empty state changes no bit, and neither does the order in which maxima come.
    """
    m = tl.maximum(m_a, m_b)
    # Two empty states: -inf minus -inf would be NaN.
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    a = tl.exp2(m_a - m_safe)
    b = tl.exp2(m_b - m_safe)
    return m, l_a * a + l_b * b, acc_a * a[:, None] + acc_b * b[:, None]


@triton.jit
def finished(m, l, acc, sink_ptr, head, inside):
    """Return (out, lse) of whole rows from their states; a row that has seen nothing has out 0, lse -inf or its sink."""
    if sink_ptr is not None:
        # A sink is the state of a row that has seen one more score, with a value of 0.
        sink = tl.load(sink_ptr + head, mask=inside, other=0.0).to(m.dtype) * LOG2_E
        m_sink = tl.ceil(sink)
        l_sink = tl.exp2(sink - tl.where(m_sink == float("-inf"), 0.0, m_sink))
        m, l, acc = merge(m, l, acc, m_sink, l_sink, tl.zeros_like(acc))
    l_safe = tl.where(l == 0.0, 1.0, l)
    return acc * (1.0 / l_safe)[:, None], (m + tl.log2(l_safe)) * LN_2


@triton.jit
def row_range(length_ptr, b, seqlen_q, capacity, appended, left):
    """Return the length of sequence b, what was appended included, and the first key that any new token sees."""
    length = tl.minimum(tl.maximum(tl.load(length_ptr + b), 0) + appended, capacity)
    first = 0
    if left is not None:
        first = tl.maximum(length - seqlen_q - left, 0)
    return length, first


@triton.jit
def page_of(table_ptr, b, first, length, ROWS: tl.constexpr, PAGE: tl.constexpr):
    """Return where the cache's rows first … first + ROWS of sequence b are: an index of its first axis, or one a row."""
    if PAGE is None:
        page = b
    elif PAGE % ROWS == 0:
        # All rows lie in one page. Behind the length the table may hold anything.
        page = tl.load(table_ptr + first // PAGE, mask=first < length, other=0)
    else:
        start = row_in_page(first, ROWS, PAGE)
        n = start + tl.arange(0, ROWS)
        page = tl.load(table_ptr + first // PAGE + n // PAGE, mask=n < start + length - first, other=0)
    return page


@triton.jit
def row_in_page(first, ROWS: tl.constexpr, PAGE: tl.constexpr):
    """Return first % PAGE; a constant where tiles begin with a page, so that the loop need not compute addresses."""
    if ROWS % PAGE == 0:
        start = 0
    else:
        start = first % PAGE
    return start


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
        start = row_in_page(first, ROWS, PAGE)
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


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, states_ptr, length_ptr, table_ptr, sink_ptr, slope_ptr,
    stride_q, stride_k, stride_v, stride_out, stride_table, stride_slope,
    nheads_kv, group, seqlen_q, capacity, appended, left, qk_scale, softcap, split, n_parts, n_states,
    WALK: tl.constexpr, LAST: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    COLS: tl.constexpr, COLS_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        # This kernel came to the multiprocessors before the one in front of it had ended, and so may the next one.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The rows of a program are the new tokens of all query heads that share a head of the cache: each key is read once.
    rows = group * seqlen_q
    pid_part = tl.program_id(0) % n_parts
    pid = tl.program_id(0) // n_parts
    pid_m = pid % tl.cdiv(rows, BLOCK_M)
    pid_bh = pid // tl.cdiv(rows, BLOCK_M)
    b = pid_bh // nheads_kv
    h = pid_bh % nheads_kv
    if PAGE is not None:
        table_ptr += b.to(tl.int64) * stride_table
    length, first_seen = row_range(length_ptr, b, seqlen_q, capacity, appended, left)
    # A part is one split, or the WALK splits of a chunk.
    lo = tl.maximum(pid_part * split * WALK, first_seen // BLOCK_N * BLOCK_N)
    hi = tl.minimum((pid_part + 1) * split * WALK, length)
    # Grids are made for the longest sequence that fits: most parts of a shorter one have nothing to do.
    if LAST or lo < hi:
        ACC: tl.constexpr = states_ptr.dtype.element_ty
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        mask_m = offs_m < rows
        head = h * group + offs_m // seqlen_q
        i = offs_m % seqlen_q
        position = length - seqlen_q + i
        offs_d = tl.arange(0, COLS)
        offs_v = tl.arange(0, COLS_V)
        q_rows = b.to(tl.int64) * stride_q[0] + head.to(tl.int64) * stride_q[1] + i.to(tl.int64) * stride_q[2]
        q_ptrs = q_ptr + q_rows[:, None] + (offs_d.to(tl.int64) * stride_q[3])[None, :]
        q = tl.load(q_ptrs, mask=mask_m[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
        if slope_ptr is not None:
            slope = tl.load(slope_ptr + b * stride_slope[0] + head * stride_slope[1], mask=mask_m, other=0.0) * LOG2_E
        m_i = tl.full([BLOCK_M], float("-inf"), ACC)
        l_i = tl.zeros([BLOCK_M], ACC)
        acc = tl.zeros([BLOCK_M, COLS_V], ACC)
        if WALK > 1:
            m_row = m_i
            l_row = l_i
            acc_row = acc

        page = page_of(table_ptr, b, lo, length, BLOCK_N, PAGE)
        for first_n in tl.range(lo, hi, BLOCK_N):
            k = cache_tile(k_ptr, stride_k, page, h, first_n, length, BLOCK_N, COLS, HEAD_DIM, PAGE, WIDE)
            s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC) * qk_scale  # [BLOCK_M, BLOCK_N]
            if softcap is not None:
                # tanh without overflow; qk_scale holds 2·log2(e)/softcap then.
                e = tl.exp2(-tl.abs(s))
                s = tl.where(s < 0, e - 1.0, 1.0 - e) / (1.0 + e) * (softcap * LOG2_E)
            away = position[:, None] - (first_n + tl.arange(0, BLOCK_N))[None, :]
            if slope_ptr is not None:
                s -= slope[:, None] * away.to(ACC)
            seen = away >= 0
            if left is not None:
                seen = seen & (away <= left)
            s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m_i, tl.ceil(tl.max(s, 1)))
            # A row that has seen no key yet: -inf minus -inf would be NaN.
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - m_safe[:, None])
            alpha = tl.exp2(m_i - m_safe)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            v = cache_tile(v_ptr, stride_v, page, h, first_n, length, BLOCK_N, COLS_V, HEAD_DIM_V, PAGE, WIDE)
            # Looked up a round ahead, so that no load waits for an address.
            page = page_of(table_ptr, b, first_n + BLOCK_N, length, BLOCK_N, PAGE)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=ACC)
            m_i = m_new
            if WALK > 1:
                if (first_n + BLOCK_N) % split == 0:
                    m_row, l_row, acc_row = merge(m_row, l_row, acc_row, m_i, l_i, acc)
                    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
                    l_i = tl.zeros([BLOCK_M], ACC)
                    acc = tl.zeros([BLOCK_M, COLS_V], ACC)

        if WALK > 1:
            m_i, l_i, acc = merge(m_row, l_row, acc_row, m_i, l_i, acc)
        row = pid_bh.to(tl.int64) * rows + offs_m
        mask_v = mask_m[:, None] & (offs_v < HEAD_DIM_V)[None, :]
        if LAST:
            out, lse = finished(m_i, l_i, acc, sink_ptr, head, mask_m)
            out_rows = b.to(tl.int64) * stride_out[0] + head.to(tl.int64) * stride_out[1] + i * stride_out[2]
            out_ptrs = out_ptr + out_rows[:, None] + (offs_v * stride_out[3])[None, :]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_v)
            tl.store(lse_ptr + row, lse, mask=mask_m)
        else:
            at = row * n_parts + pid_part
            tl.store(states_ptr + at, m_i, mask=mask_m)
            tl.store(states_ptr + n_states + at, l_i, mask=mask_m)
            tl.store(states_ptr + 2 * n_states + at[:, None] * HEAD_DIM_V + offs_v[None, :], acc, mask=mask_v)


@triton.jit
def _combine_kernel(
    states_ptr, out_ptr, lse_ptr, length_ptr, sink_ptr, stride_out,
    nheads, seqlen_q, capacity, appended, left, part, n_parts, n_states,
    HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    blocks_d: tl.constexpr = (HEAD_DIM_V + BLOCK_D - 1) // BLOCK_D
    row = tl.program_id(0) // blocks_d
    offs_v = tl.program_id(0) % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    b = row // (nheads * seqlen_q)
    head = row // seqlen_q % nheads
    i = row % seqlen_q
    ACC: tl.constexpr = states_ptr.dtype.element_ty
    length, first_seen = row_range(length_ptr, b, seqlen_q, capacity, appended, left)
    # Parts outside were never written.
    first_part = first_seen // BLOCK_N * BLOCK_N // part
    end_part = tl.cdiv(length, part)

    m = tl.full([CHUNKS], float("-inf"), ACC)
    l = tl.zeros([CHUNKS], ACC)
    acc = tl.zeros([CHUNKS, BLOCK_D], ACC)
    for step in tl.static_range(STEPS):
        at = tl.arange(0, CHUNKS) * STEPS + step
        live = (at >= first_part) & (at < end_part)
        at = row.to(tl.int64) * n_parts + at
        m_part = tl.load(states_ptr + at, mask=live, other=float("-inf"))
        l_part = tl.load(states_ptr + n_states + at, mask=live, other=0.0)
        acc_ptrs = states_ptr + 2 * n_states + at[:, None] * HEAD_DIM_V + offs_v[None, :]
        acc_part = tl.load(acc_ptrs, mask=live[:, None] & (offs_v < HEAD_DIM_V)[None, :], other=0.0)
        m, l, acc = merge(m, l, acc, m_part, l_part, acc_part)

    # All chunks at once: the merge of many states.
    m_row = tl.max(m, 0, keep_dims=True)
    weight = tl.exp2(m - tl.where(m_row == float("-inf"), 0.0, m_row))
    l_row = tl.sum(l * weight, 0, keep_dims=True)
    acc_row = tl.sum(acc * weight[:, None], 0, keep_dims=True)  # [1, BLOCK_D]
    one = tl.arange(0, 1)
    out, lse = finished(m_row, l_row, acc_row, sink_ptr, head + one, one == 0)
    out_ptrs = out_ptr + b.to(tl.int64) * stride_out[0] + head.to(tl.int64) * stride_out[1] + i * stride_out[2]
    out_ptrs = out_ptrs + (offs_v * stride_out[3])[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(offs_v < HEAD_DIM_V)[None, :])
    tl.store(lse_ptr + row + one, lse)


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


# --- launch --------------------------------------------------------------------------------------------------------


def _decode(q, k, v, cache_seqlens, block_table, sinks, slopes, appended, left, scale, softcap, num_splits):
    """Launch the kernels: out like q, lse (batch, nheads, seqlen_q) float32."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # The interpreter cannot compute in bfloat16: compute in float32, round once.
        rest = cache_seqlens, block_table, sinks, slopes, appended, left, scale, softcap, num_splits
        out, lse = _decode(q.float(), k.float(), v.float(), *rest)
        return tiles.empty_out(q, v).copy_(out), lse
    out = tiles.empty_out(q, v)
    acc_dtype = tiles.accumulator(q.dtype)
    lse = torch.empty(q.shape[:3], dtype=acc_dtype, device=q.device)
    if lse.numel() == 0:
        return out, lse
    batch, nheads, seqlen_q, _ = q.shape
    nheads_kv = k.shape[1]
    page, capacity = _page_and_capacity(k, block_table)
    tile, constants = _plan(q, k, v)
    rows = nheads // nheads_kv * seqlen_q
    block_m = min(max(16, triton.next_power_of_2(rows)), tile.block_m)
    programs = -(-rows // block_m) * batch * nheads_kv
    split, n_splits = splits_of(capacity, num_splits, tile.block_n)
    chunks = -(-n_splits // CHUNK)
    # Programs that walk over a whole chunk write fewer states, if there are enough of them for the GPU.
    walk = CHUNK if n_splits > 1 and num_splits is None and programs * chunks >= enough_programs(q.device) else 1
    n_parts = -(-n_splits // walk)
    # m, l and acc of every row and part; a multiple of 16 keeps acc aligned.
    n_states = -(-lse.numel() * n_parts // 16) * 16
    states = lse if n_parts == 1 else torch.empty(n_states * (2 + v.shape[3]), dtype=acc_dtype, device=q.device)
    base_2 = LOG2_E.value if softcap is None else 2 * LOG2_E.value / softcap
    stride_slopes = None if slopes is None else (0, slopes.stride(0)) if slopes.ndim == 1 else slopes.stride()
    sinks, slopes = (x if x is None else tiles.pointers((x,))[0] for x in (sinks, slopes))
    shared = seqlen_q, capacity, appended, left
    arguments = (
        q, k, v, out, lse, states, cache_seqlens, block_table, sinks, slopes,
        q.stride(), k.stride(), v.stride(), out.stride(), None if block_table is None else block_table.stride(0),
        stride_slopes, nheads_kv, nheads // nheads_kv, *shared, scale * base_2, softcap, split, n_parts, n_states,
    )  # fmt: skip
    changes = {"WALK": walk, "LAST": n_parts == 1, "PAGE": page, "BLOCK_M": block_m}
    with tiles.on_device_of(q):
        tiles.launch(_decode_kernel, programs * n_parts, arguments, constants | changes)
        if n_parts > 1:
            part = walk * split
            arguments = states, out, lse, cache_seqlens, sinks, out.stride(), nheads, *shared, part, n_parts, n_states
            blocks_d, constants = _combine_constants(chunks, CHUNK // walk, v.shape[3], tile.block_n, constants["EARLY"])
            tiles.launch(_combine_kernel, lse.numel() * blocks_d, arguments, constants)
    return out, lse


def splits_of(capacity, num_splits, block_n):
    """Return (tokens of a split, number of splits) of a cache that holds `capacity` tokens a sequence."""
    split = SPLIT
    if num_splits is not None:
        split = max(1, -(-capacity // (num_splits * block_n))) * block_n
    return split, max(1, -(-capacity // split))


@functools.cache
def enough_programs(device):
    """Return how many programs keep a GPU busy; the interpreter never has enough, so that small caches are split too."""
    if device.type != "cuda":
        return 2**31
    # Nearly one a multiprocessor: each has enough loads under way to use its share of the bandwidth.
    return 0.9 * torch.cuda.get_device_properties(device).multi_processor_count


def _page_and_capacity(k, block_table):
    """Return (tokens of a page or None, tokens of a sequence that there is room for)."""
    if block_table is None:
        return None, k.shape[2]
    return k.shape[2], block_table.shape[1] * k.shape[2]


def _plan(q, k, v):
    architecture = tiles.architecture_of(q.device)
    strides = k.stride()[2:] + v.stride()[2:]
    return _tile_and_constants(architecture, q.element_size(), q.shape[3], v.shape[3], tiles.wide(strides))


@functools.cache
def _tile_and_constants(architecture, itemsize, head_dim, head_dim_v, wide):
    columns = tiles.columns_of(head_dim, head_dim_v, itemsize)
    tile = tiles.tile_for("decode", architecture, itemsize, max(columns), False)
    return tile, {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "COLS": columns[0],
        "COLS_V": columns[1],
        "BLOCK_N": tile.block_n,
        "PRECISION": "tf32x3" if architecture >= 80 else "ieee",
        "WIDE": wide,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
        **_launched_early(architecture >= 90),
    }


def _launched_early(early):
    """Return what lets a kernel be brought to the GPU while the one in front of it still runs (Hopper and newer)."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@functools.cache
def _combine_constants(chunks, steps, head_dim_v, block_n, early):
    """Return (programs a row, constants of _combine_kernel)."""
    chunks = triton.next_power_of_2(chunks)
    block_d = min(tiles.padded(head_dim_v), max(32, 128 // chunks))
    return -(-head_dim_v // block_d), {
        "HEAD_DIM_V": head_dim_v,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "CHUNKS": chunks,
        "STEPS": steps,
        "num_warps": min(4, max(1, chunks * block_d // 128)),
        **_launched_early(early),
    }


def _decode_fake(q, k, v, *_):
    return tiles.empty_out(q, v), q.new_empty(q.shape[:3], dtype=tiles.accumulator(q.dtype))


def _append(k_cache, v_cache, k_new, v_new, cache_seqlens, block_table):
    """Launch the kernel that stores k_new and v_new in the cache, behind each sequence."""
    if k_new.numel() == 0:
        return
    tensors = k_new, v_new, k_cache, v_cache
    if k_new.device.type == "cpu" and k_new.dtype == torch.bfloat16:
        # The interpreter would round what it stores; a copy moves bits.
        tensors = tuple(x.view(torch.int16) for x in tensors)
    page, capacity = _page_and_capacity(k_cache, block_table)
    batch, nheads_kv, seqlen_q, head_dim = k_new.shape
    arguments = (
        *tensors, cache_seqlens, block_table, *(x.stride() for x in tensors),
        None if block_table is None else block_table.stride(0), nheads_kv, seqlen_q, capacity,
    )  # fmt: skip
    constants = {
        "PAGE": page,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": v_new.shape[3],
        "COLS": tiles.padded(head_dim),
        "COLS_V": tiles.padded(v_new.shape[3]),
        "ROWS": triton.next_power_of_2(seqlen_q),
    }
    with tiles.on_device_of(k_new):
        tiles.launch(_append_kernel, batch * nheads_kv, arguments, constants)


_LIBRARY = torch.library.Library("flashlib", "FRAGMENT")
_PLACE = "Tensor cache_seqlens, Tensor? block_table"
for _name, _schema, _real, _fake in (
    (
        "decode",
        f"(Tensor q, Tensor k_cache, Tensor v_cache, {_PLACE}, Tensor? sinks, Tensor? slopes, SymInt appended, SymInt? left, "
        "float scale, float? softcap, int? num_splits) -> (Tensor, Tensor)",
        _decode,
        _decode_fake,
    ),
    (
        "append",
        f"(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, {_PLACE}) -> ()",
        _append,
        lambda *_: None,
    ),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashlib::{_name}", _fake, lib=_LIBRARY)


# --- the public function -------------------------------------------------------------------------------------------


def flash_decode(
    q, k_cache, v_cache, cache_seqlens, *, block_table=None, num_splits=None, k_new=None, v_new=None, window=None,
    scale=None, softcap=None, sinks=None, alibi_slopes=None, return_lse=False,
):  # fmt: skip
    """Compute attention of a few new tokens a sequence over a cache of keys and values; no gradient.

    The new tokens are the last of their sequence and causal: query i sees the keys j <= i + length - seqlen_q. What the
    cache holds behind a length never shows, NaN or not.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), seqlen_q from 1 to 16, float16, bfloat16 or float32 (float64 in the
            interpreter only), any strides; nheads a multiple of nheads_kv.
        k_cache: (batch, nheads_kv, max_seqlen, head_dim), dtype and device of q, any strides. With block_table:
            (num_pages, nheads_kv, page_size, head_dim), page_size a multiple of 16 from 16 to 256.
        v_cache: the same with head_dim_v. Both head_dims are multiples of 8 from 16 to 256.
        cache_seqlens: (batch,) int32 on q's device, tokens in the cache before the call. Without k_new it counts the
            tokens of q, whose keys are in the cache already. With k_new it does not: they are appended at
            cache_seqlens, and cache_seqlens + seqlen_q tokens are attended. It is not changed.
        block_table: (batch, max_pages) int32: token n of sequence b is row n % page_size of page
            block_table[b, n // page_size]. Entries behind the length are not read. Pages may be shared.
        num_splits: into how many splits the cache is cut, an int of at least 1; None for splits of a fixed size, with
            which a row's bits do not depend on the batch.
        k_new, v_new: (batch, nheads_kv, seqlen_q, head_dim or head_dim_v), stored in the cache, in place; what would
            pass max_seqlen (with pages: the table's width) is dropped. Both or neither.
        window: (left, right) as in flash_attention: a query sees `left` keys before its own; right hides nothing here.
        scale: what a dot product is multiplied with; None means 1/sqrt(head_dim).
        softcap: a positive number c: scores become c·tanh(score/c), before ALiBi and masks. None for none.
        sinks: (nheads,), a logit a head that joins the denominator, once. Dtype of q or float32.
        alibi_slopes: (nheads,) or (batch, nheads) float32: -slope times the distance is added to a score.
        return_lse: also return the natural logarithm of each row's sum of exponentials.

    Returns:
        out (batch, nheads, seqlen_q, head_dim_v), dtype of q; or (out, lse), lse (batch, nheads, seqlen_q) float32
        (float64 for float64). A row that sees no key has out exactly 0 and lse -inf, or its sink.

    Raises:
        ValueError: a shape, dtype, device or option is not as above, or a tensor requires grad. That cache_seqlens and
            block_table stay inside the cache is checked on the CPU always, on a GPU only where the environment says
            FLASHLIB_CHECK=1, since it makes the host wait.
        RuntimeError: kernels cannot run on these tensors here.

    Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/
    """
    tensors = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, "block_table": block_table,
        "k_new": k_new, "v_new": v_new, "sinks": sinks, "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    _check_kinds(tensors)
    # Most calls are like the last one: what was found right once is not looked at again.
    facts = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in tensors.values())
    if torch.compiler.is_compiling() or facts not in _SEEN:
        _check_tensors(**tensors)
        if not torch.compiler.is_compiling():
            _SEEN.add(facts)
    left = _check_options(num_splits, window, scale, softcap)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    appended = 0 if k_new is None else q.shape[2]
    if not torch.compiler.is_compiling() and device.checks_values(q):
        _check_values(k_cache, cache_seqlens, block_table, appended)
    if k_new is not None:
        if any(stride == 0 and n > 1 for x in (k_cache, v_cache) for stride, n in zip(x.stride(), x.shape, strict=True)):
            raise ValueError("k_cache and v_cache must not show one element in several places where k_new is given")
        torch.ops.flashlib.append(k_cache, v_cache, k_new, v_new, cache_seqlens, block_table)
    out, lse = torch.ops.flashlib.decode(
        q, k_cache, v_cache, cache_seqlens, block_table, sinks, alibi_slopes, appended, left, scale, softcap, num_splits
    )
    return (out, lse) if return_lse else out


def _check_kinds(tensors):
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            if x is not None or name in ("q", "k_cache", "v_cache", "cache_seqlens"):
                raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        elif x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require grad, since flash_decode has no gradient, got one that does")
    if (tensors["k_new"] is None) != (tensors["v_new"] is None):
        raise ValueError("k_new and v_new must be given together, got one of them")


def _check_tensors(q, k_cache, v_cache, cache_seqlens, block_table, k_new, v_new, sinks, alibi_slopes):
    def must(name, x, rule, value, fine):
        if not fine:
            raise ValueError(f"{name} must {rule}, got {value}")

    cache = "(batch, nheads_kv, max_seqlen, head_dim)" if block_table is None else "(num_pages, nheads_kv, page_size, …)"
    layouts = {"q": "(batch, nheads, seqlen_q, head_dim)", "k_cache": cache, "v_cache": cache}
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        must(name, x, f"have 4 axes {layouts[name]}", f"shape {tuple(x.shape)}", x.ndim == 4)
        must(name, x, "have dtype float16, bfloat16, float32 or float64", x.dtype, x.dtype in _DTYPES)
        must(name, x, "have a head_dim that is a multiple of 8 from 16 to 256", x.shape[3],
             x.shape[3] % 8 == 0 and 16 <= x.shape[3] <= 256)  # fmt: skip
    batch, nheads, seqlen_q, head_dim = q.shape
    nheads_kv = k_cache.shape[1]
    must("q", q, f"have 1 to {MOST_NEW} tokens a sequence", seqlen_q, 1 <= seqlen_q <= MOST_NEW)
    must("k_cache", k_cache, f"have the head_dim of q, {head_dim}", k_cache.shape[3], k_cache.shape[3] == head_dim)
    must("k_cache", k_cache, f"have a number of heads that divides the {nheads} of q", nheads_kv,
         nheads_kv > 0 and nheads % nheads_kv == 0)  # fmt: skip
    must("v_cache", v_cache, f"have the shape of k_cache but for head_dim, {tuple(k_cache.shape[:3])}",
         tuple(v_cache.shape[:3]), v_cache.shape[:3] == k_cache.shape[:3])  # fmt: skip
    if block_table is None:
        must("k_cache", k_cache, f"have the batch of q, {batch}", k_cache.shape[0], k_cache.shape[0] == batch)
    else:
        must("block_table", block_table, f"have shape ({batch}, max_pages)", tuple(block_table.shape),
             block_table.ndim == 2 and block_table.shape[0] == batch)  # fmt: skip
        must("k_cache", k_cache, "have a page_size that is a multiple of 16 from 16 to 256", k_cache.shape[2],
             k_cache.shape[2] % 16 == 0 and 16 <= k_cache.shape[2] <= 256)  # fmt: skip
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
            must(name, x, f"have shape {' or '.join(map(str, allowed))}", tuple(x.shape), tuple(x.shape) in allowed)
    kinds = {
        "k_cache": (k_cache, [q.dtype]), "v_cache": (v_cache, [q.dtype]), "k_new": (k_new, [q.dtype]),
        "v_new": (v_new, [q.dtype]), "cache_seqlens": (cache_seqlens, [torch.int32]),
        "block_table": (block_table, [torch.int32]), "sinks": (sinks, [q.dtype, torch.float32]),
        "alibi_slopes": (alibi_slopes, [torch.float32]),
    }  # fmt: skip
    for name, (x, dtypes) in kinds.items():
        if x is not None:
            must(name, x, f"have dtype {' or '.join(map(str, dtypes))}", x.dtype, x.dtype in dtypes)
            must(name, x, f"be on the device of q, {q.device}", x.device, x.device == q.device)
    tiles.check_device(q)


def _check_options(num_splits, window, scale, softcap):
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


def _check_values(k_cache, cache_seqlens, block_table, appended):
    page, capacity = _page_and_capacity(k_cache, block_table)
    lengths = cache_seqlens.tolist()
    for b, length in enumerate(lengths):
        if not 0 <= length <= capacity - appended:
            raise ValueError(f"cache_seqlens must be from 0 to {capacity - appended}, got {length} for sequence {b}")
        if block_table is not None:
            used = block_table[b, : -(-(length + appended) // page)].tolist()
            if used and not (0 <= min(used) and max(used) < k_cache.shape[0]):
                raise ValueError(f"block_table must name pages from 0 to {k_cache.shape[0] - 1}, got {used} for sequence {b}")
