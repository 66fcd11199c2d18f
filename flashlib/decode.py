"""Attention of one or a few new tokens against a cache of keys and values, split over the whole GPU, pages included.

A new token has one row of queries a head, too few programs to read a long cache at full speed. So the cache is cut into
splits of a fixed size, each program attends to one, and chapter 03's merge puts their states together; a sink is a
state to start from, and a page only says where rows lie.

Source: Flash-Decoding, https://pytorch.org/blog/flash-decoding/; PagedAttention, https://arxiv.org/abs/2309.06180
"""

import functools

import torch

from flashlib import device, kv_cache, states, tiles
from flashlib.device import tl, triton
from flashlib.kv_cache import cache_tile, page_of
from flashlib.states import GROUP, LOG2_E, _combine_kernel, finished, merge, nothing, row_range

# Tokens of a split. A size, not a count: how a row is cut, and so its bits, depends on its own length alone.
SPLIT = 512
_SEEN = set()


# --- kernels -------------------------------------------------------------------------------------------------------


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
    # A part is a split, a group or a pair: WALK splits.
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
        m_i, l_i, acc = nothing(BLOCK_M, COLS_V, ACC)
        if WALK > 1:
            m_group, l_group, acc_group = m_i, l_i, acc
            m_pair, l_pair, acc_pair = m_i, l_i, acc

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
            if WALK > 1:  # noqa: SIM102
                if (first_n + BLOCK_N) % split == 0:
                    m_group, l_group, acc_group = merge(m_group, l_group, acc_group, m_i, l_i, acc)
                    m_i, l_i, acc = nothing(BLOCK_M, COLS_V, ACC)
                    if WALK > GROUP:  # noqa: SIM102
                        if (first_n + BLOCK_N) % (split * GROUP) == 0:
                            m_pair, l_pair, acc_pair = merge(m_pair, l_pair, acc_pair, m_group, l_group, acc_group)
                            m_group, l_group, acc_group = nothing(BLOCK_M, COLS_V, ACC)

        if WALK > 1:
            m_i, l_i, acc = merge(m_group, l_group, acc_group, m_i, l_i, acc)
        if WALK > GROUP:
            m_i, l_i, acc = merge(m_pair, l_pair, acc_pair, m_i, l_i, acc)
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
    page, capacity = kv_cache.page_and_capacity(k, block_table)
    tile, constants = _plan(q, k, v)
    rows = nheads // nheads_kv * seqlen_q
    block_m = min(max(16, triton.next_power_of_2(rows)), tile.block_m)
    programs = -(-rows // block_m) * batch * nheads_kv
    split, n_splits = splits_of(capacity, num_splits, tile.block_n)
    walk = 1
    if num_splits is None:
        # Programs that walk over more than a split write fewer states, if there are enough of them for the GPU.
        enough = enough_programs(q.device)
        walk = next((n for n in (2 * GROUP.value, GROUP.value) if programs * -(-n_splits // n) >= enough), 1)
    walk = walk if n_splits > 1 else 1
    n_parts = -(-n_splits // walk)
    # m, l and acc of every row and part; a multiple of 16 keeps acc aligned.
    n_states = -(-lse.numel() * n_parts // 16) * 16
    memory = lse if n_parts == 1 else torch.empty(n_states * (2 + v.shape[3]), dtype=acc_dtype, device=q.device)
    base_2 = LOG2_E.value if softcap is None else 2 * LOG2_E.value / softcap
    stride_slopes = None if slopes is None else (0, slopes.stride(0)) if slopes.ndim == 1 else slopes.stride()
    sinks, slopes = (x if x is None else tiles.pointers((x,))[0] for x in (sinks, slopes))
    shared = seqlen_q, capacity, appended, left
    arguments = (
        q, k, v, out, lse, memory, cache_seqlens, block_table, sinks, slopes,
        q.stride(), k.stride(), v.stride(), out.stride(), None if block_table is None else block_table.stride(0),
        stride_slopes, nheads_kv, nheads // nheads_kv, *shared, scale * base_2, softcap, split, n_parts, n_states,
    )  # fmt: skip
    changes = {"WALK": walk, "LAST": n_parts == 1, "PAGE": page, "BLOCK_M": block_m}
    with tiles.on_device_of(q):
        tiles.launch(_decode_kernel, programs * n_parts, arguments, constants | changes)
        if n_parts > 1:
            part = walk * split
            arguments = memory, out, lse, cache_seqlens, sinks, out.stride(), nheads, *shared, part, n_parts, n_states
            blocks_d, constants = states.combine_constants(n_splits, walk, v.shape[3], tile.block_n, constants["EARLY"])
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
    """Return how many programs keep a GPU busy; the interpreter never has enough: there too, caches are split."""
    if device.type != "cuda":
        return 2**31
    # Nearly two a multiprocessor: while one computes, the loads of the other are under way.
    return 1.8 * torch.cuda.get_device_properties(device).multi_processor_count


def _plan(q, k, v):
    architecture = tiles.architecture_of(q.device)
    strides = k.stride()[2:] + v.stride()[2:]
    return _tile_and_constants(architecture, q.element_size(), q.shape[3], v.shape[3], tiles.wide(strides))


@functools.cache
def _tile_and_constants(architecture, itemsize, head_dim, head_dim_v, wide):
    columns = tiles.columns_of(head_dim, head_dim_v, itemsize)
    tile = tiles.tile_for("decode", architecture, itemsize, max(columns), False)
    return tile, {
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "COLS": columns[0], "COLS_V": columns[1],
        "BLOCK_N": tile.block_n, "PRECISION": "tf32x3" if architecture >= 80 else "ieee", "WIDE": wide,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages, "maxnreg": tile.max_registers,
        **states.launched_early(architecture >= 90),
    }  # fmt: skip


def _decode_fake(q, k, v, *_):
    return tiles.empty_out(q, v), q.new_empty(q.shape[:3], dtype=tiles.accumulator(q.dtype))


# Defined by hand for a low cost on the host; see forward.py.
_LIBRARY = torch.library.Library("flashlib", "FRAGMENT")
for _schema, _real, _fake in (
    (
        "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table, Tensor? sinks, "
        "Tensor? slopes, SymInt appended, SymInt? left, float scale, float? softcap, int? num_splits) "
        "-> (Tensor, Tensor)",
        _decode, _decode_fake,
    ),
    (
        "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor cache_seqlens, "
        "Tensor? block_table) -> ()",
        kv_cache.append, lambda *_: None,
    ),
):  # fmt: skip
    _LIBRARY.define(_schema)
    _name = _schema.partition("(")[0]
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
    kv_cache.check_kinds(tensors)
    # Most calls are like the last one: what was found right once is not looked at again.
    facts = tuple(None if x is None else (x.shape, x.dtype, x.device, x.stride()) for x in tensors.values())
    if torch.compiler.is_compiling() or facts not in _SEEN:
        kv_cache.check_tensors(**tensors)
        if not torch.compiler.is_compiling():
            _SEEN.add(facts)
    left = kv_cache.check_options(num_splits, window, scale, softcap)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    appended = 0 if k_new is None else q.shape[2]
    if not torch.compiler.is_compiling() and device.checks_values(q):
        kv_cache.check_values(k_cache, cache_seqlens, block_table, appended)
    if k_new is not None:
        torch.ops.flashlib.append(k_cache, v_cache, k_new, v_new, cache_seqlens, block_table)
    out, lse = torch.ops.flashlib.decode(
        q, k_cache, v_cache, cache_seqlens, block_table, sinks, alibi_slopes, appended, left, scale, softcap, num_splits
    )
    return (out, lse) if return_lse else out
