"""FlashAttention's forward pass for Hopper GPUs, in Gluon: the copy engine, the matrix unit and the softmax work at once.

A program is three or four groups of warps. One of a single warp asks the copy engine (TMA) for tiles; each of the others,
a warpgroup of four warps, owns 64 queries and does for them what `forward._forward_kernel` does for a tile. They share
the tiles of K and V, and tell each other through barriers in shared memory what is there and what is free.

Source: FlashAttention-3, https://arxiv.org/abs/2407.08608; NVIDIA's PTX reference (wgmma, mbarrier, cp.async.bulk.tensor)
"""

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib import tiles

LOG2_E = 1.4426950408889634
LN_2 = gl.constexpr(0.6931471805599453)
# Queries of a warpgroup: the rows of one wgmma.
ROWS = gl.constexpr(64)
# For `_counters`: device and stream -> tensor.
_COUNTERS = {}
# Triton 3.9 renamed the two.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Options(NamedTuple):
    """What the compiled code depends on, a constant inside the kernel.

    causal; negative: the scale is below 0; warpgroups: 2 or 3, of 64 queries each; block_n: keys of a tile; stages_k,
    stages_v: tiles of K and of V that fit in shared memory; turns: the warpgroups take turns at the matrix unit; hold:
    the wait for P V is held behind the maximum ("max"), behind the exponentials ("exp") or is where the assembler puts
    it ("").
    """

    causal: bool
    negative: bool
    warpgroups: int
    block_n: int
    stages_k: int
    stages_v: int
    turns: bool
    hold: str


# --- schedule: which tile of queries comes next ----------------------------------------------------------------------


@gluon.jit
def _place(tile, work, OPTIONS: gl.constexpr):
    """Return (b, h, head of K and V, first query, tiles of keys) of a tile of queries; no tiles of keys: past the end."""
    nheads, group, tiles_m, section, total, seqlen_q, seqlen_k = work
    BLOCK_M: gl.constexpr = ROWS * OPTIONS.warpgroups
    if OPTIONS.causal:
        # Longest first, so that no long one is left alone at the end; among the heads of a section, whose K and V fit
        # in the L2 together.
        start = tile // (section * tiles_m) * section
        heads = gl.minimum(section, total // tiles_m - start)
        left = tile - start * tiles_m
        pid_bh = start + left % heads
        first_m = (tiles_m - 1 - left // heads) * BLOCK_M
        end_n = gl.minimum(seqlen_k, first_m + BLOCK_M + seqlen_k - seqlen_q)
    else:
        pid_bh = tile // tiles_m
        first_m = tile % tiles_m * BLOCK_M
        end_n = seqlen_k
    # One tile, all of it masked, where no query sees a key: the rest need not know of that case.
    tiles_n = gl.where(tile < total, gl.maximum(gl.cdiv(end_n, OPTIONS.block_n), 1), 0)
    h = pid_bh % nheads
    return pid_bh // nheads, h, h // group, first_m, tiles_n


@gluon.jit
def _draw(tile, counter_ptr, OPTIONS: gl.constexpr):
    """Return the number of the tile after `tile` in this program.

    Tiles of equal length go round in turns. Causal ones are drawn from a counter in memory by whoever is first done;
    which program computes a tile changes no bit of it.
    """
    if OPTIONS.causal:
        following = gl.atomic_add(counter_ptr, 1) + gl.num_programs(0)
    else:
        following = tile + gl.num_programs(0)
    return following


@gluon.jit
def _tell(n, b, h, first_m, tiles_n, told_s, told, heard):
    """Tell the warpgroups where their n-th tile is: the divisions that find it are made once, beside their work."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(heard.index(n % 2), (n // 2 & 1) ^ 1)
    told_s.index(n % 2 * 4).store(gl.full([1], b, gl.int32, L))
    told_s.index(n % 2 * 4 + 1).store(gl.full([1], h, gl.int32, L))
    told_s.index(n % 2 * 4 + 2).store(gl.full([1], first_m, gl.int32, L))
    told_s.index(n % 2 * 4 + 3).store(gl.full([1], tiles_n, gl.int32, L))
    mbarrier.arrive(told.index(n % 2), count=1)


@gluon.jit
def _hear(n, told_s, told, heard):
    """Return what `_tell` told about the n-th tile: (b, h, first query, tiles of keys)."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(told.index(n % 2), n // 2 & 1)
    b = gl.max(told_s.index(n % 2 * 4).load(L), 0)
    h = gl.max(told_s.index(n % 2 * 4 + 1).load(L), 0)
    first_m = gl.max(told_s.index(n % 2 * 4 + 2).load(L), 0)
    tiles_n = gl.max(told_s.index(n % 2 * 4 + 3).load(L), 0)
    mbarrier.arrive(heard.index(n % 2), count=1)
    return b, h, first_m, tiles_n


# --- load ------------------------------------------------------------------------------------------------------------


@gluon.jit
def _fetch(desc, b, h, first, full, tile_s):
    """Let the copy engine fetch rows first … of desc[b, h]; `full` flips when all bytes are there.

    Rows and columns past the end arrive as zeros, and count.
    """
    mbarrier.expect(full, desc.block_type.nbytes)
    _tma_load(desc, [b, h, first, 0], full, tile_s)


@gluon.jit
def _fetch_q(n, b, h, first_m, tiles_n, desc_q, q_s, q_full, q_empty, OPTIONS: gl.constexpr):
    """Fetch Q of the n-th tile for each warpgroup, if there is an n-th tile."""
    W: gl.constexpr = OPTIONS.warpgroups
    if tiles_n > 0:
        for w in gl.static_range(W):
            mbarrier.wait(q_empty.index(w), n & 1 ^ 1)
            _fetch(desc_q, b, h, first_m + w * ROWS, q_full.index(w), q_s.index(w))


@gluon.jit
def _load(counter_ptr, given, OPTIONS: gl.constexpr):
    """Fetch Q once and K and V tile by tile, for one tile of queries after the other, as far ahead as there is room.

    A barrier counts its flips from 0, and `wait` names the flip by its lowest bit. The u-th use of a buffer needs that
    u - 1 uses were over, which is flip u - 1 of `empty`: for u = 0 that is odd, and a new barrier counts as flipped
    there.
    """
    descs, buffers, barriers, _, _, work = given
    desc_q, desc_k, desc_v, _ = descs
    q_s, k_s, v_s, _, told_s = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, told, heard = barriers
    tile = gl.program_id(0)
    n = 0
    use = 0
    b, h, h_kv, first_m, tiles_n = _place(tile, work, OPTIONS)
    _tell(n, b, h, first_m, tiles_n, told_s, told, heard)
    _fetch_q(n, b, h, first_m, tiles_n, desc_q, q_s, q_full, q_empty, OPTIONS)
    while tiles_n > 0:
        here = b, h_kv, tiles_n
        for t in range(here[2] + 1):
            if t == here[2] - 1:
                # Here, because the waits below take longer than the counter and the divisions do.
                tile = _draw(tile, counter_ptr, OPTIONS)
                b, h, h_kv, first_m, tiles_n = _place(tile, work, OPTIONS)
                _tell(n + 1, b, h, first_m, tiles_n, told_s, told, heard)
                if OPTIONS.warpgroups == 2:
                    _fetch_q(n + 1, b, h, first_m, tiles_n, desc_q, q_s, q_full, q_empty, OPTIONS)
            # In the order of use: K of tile t, then V of tile t - 1. From the last keys to the first: a causal tile
            # begins with the part that needs a mask.
            first_n = (here[2] - 1 - t) * OPTIONS.block_n
            if t < here[2]:
                stage = (use + t) % OPTIONS.stages_k
                mbarrier.wait(k_empty.index(stage), (use + t) // OPTIONS.stages_k & 1 ^ 1)
                _fetch(desc_k, here[0], here[1], first_n, k_full.index(stage), k_s.index(stage))
            if t > 0:
                stage = (use + t - 1) % OPTIONS.stages_v
                mbarrier.wait(v_empty.index(stage), (use + t - 1) // OPTIONS.stages_v & 1 ^ 1)
                _fetch(desc_v, here[0], here[1], first_n + OPTIONS.block_n, v_full.index(stage), v_s.index(stage))
        use += here[2]
        n += 1
        if OPTIONS.warpgroups != 2:
            # Three warpgroups keep Q in shared memory to the end of their tile.
            _fetch_q(n, b, h, first_m, tiles_n, desc_q, q_s, q_full, q_empty, OPTIONS)
    if OPTIONS.causal and gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1:
        # The last program to end leaves the counters as the next launch expects them.
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)


# --- one tile of scores: mask and softmax ------------------------------------------------------------------------------


@gluon.jit
def _mask(s, first_m, first_n, seqlen_q, seqlen_k, OPTIONS: gl.constexpr):
    """Put the worst score where a query does not see a key. [ROWS, BLOCK_N]

    Column 8 a + 2 c + e: a and e number the registers of a thread and are constants of the code, c is its place among
    four. Compared apart, a score costs a comparison and a selection and no register for its column.
    """
    parts = s.reshape([ROWS, OPTIONS.block_n // 8, 4, 2])
    L: gl.constexpr = parts.type.layout
    i = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    a = gl.arange(0, OPTIONS.block_n // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    last = gl.full([ROWS], seqlen_k - 1, gl.int32, i.type.layout)
    if OPTIONS.causal:
        last = gl.minimum(last, i + seqlen_k - seqlen_q)
    # An instruction that LLVM must not run unasked: without it, it would mask every tile instead of branching.
    last = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [last - first_n], gl.int32, False, 1)
    seen = last[:, None, None, None] - 2 * c[None, None, :, None] >= 8 * a[None, :, None, None] + e[None, None, None, :]
    worst = float("inf") if OPTIONS.negative else float("-inf")
    return gl.convert_layout(gl.where(seen, parts, worst).reshape(s.shape), s.type.layout)


@gluon.jit
def _thread_sums(p):
    """Sum each row over the columns that one thread holds, without asking the other three. [ROWS, 4]"""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _hold(x):
    """Keep later waits behind the work that x comes from, and return x. [ROWS] or [ROWS, 4]

    NVIDIA's assembler moves a wait for the matrix unit up, in front of work that does not need it, but not over a store
    to shared memory. This one depends on x and never happens: no arithmetic gives this NaN.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never; .reg .b32 somewhere;
        mov.b32 somewhere, 0;
        setp.eq.u32 never, $2, 0x7FC0DEAD;
        setp.eq.or.u32 never, $3, 0x7FC0DEAD, never;
        @never st.volatile.shared.b32 [somewhere], $2;
        mov.b32 $0, $2; mov.b32 $1, $3;
        }""",
        "=r,=r,r,r",
        [x],
        gl.float32,
        False,
        2,
    )


@gluon.jit
def _softmax(s, m_i, l_i, qk_scale, SAFE: gl.constexpr, OPTIONS: gl.constexpr):
    """Return (p, new m_i, new l_i, alpha) of the online softmax, base 2; SAFE: a row may have seen no key yet.

    m_i is the best score before the scale, the least if that is negative. l_i is a sum per thread: the four that share a
    row add theirs up at the end.
    """
    if OPTIONS.negative:
        m_new = gl.minimum(m_i, gl.min(s, 1))
    else:
        m_new = gl.maximum(m_i, gl.max(s, 1))
    if OPTIONS.hold == "max":
        m_new = _hold(m_new)
    m_safe = m_new
    if SAFE:
        m_safe = gl.where(gl.abs(m_new) == float("inf"), 0.0, m_new)
    # One multiply-add and one exp2 a score.
    p = gl.exp2(s * qk_scale - (m_safe * qk_scale)[:, None])
    alpha = gl.exp2((m_i - m_safe) * qk_scale)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + _thread_sums(p)
    return p, m_new, l_i, alpha


# --- the matrix unit -----------------------------------------------------------------------------------------------------


@gluon.jit
def _scores(q, k_s, k_full, use, OPTIONS: gl.constexpr):
    """Begin S = Q Kᵀ for the K of this use, once it is there. [ROWS, BLOCK_N]"""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.block_n, 16])
    stage = use % OPTIONS.stages_k
    mbarrier.wait(k_full.index(stage), use // OPTIONS.stages_k & 1)
    k = k_s.index(stage).reshape([OPTIONS.block_n, k_s.shape[4]]).permute([1, 0])
    nothing = gl.full([ROWS, OPTIONS.block_n], 0.0, gl.float32, S)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _weigh(p, v_s, v_full, use, acc, OPTIONS: gl.constexpr):
    """Begin acc += P V for the V of this use, once it is there. [ROWS, HEAD_DIM_V]"""
    stage = use % OPTIONS.stages_v
    mbarrier.wait(v_full.index(stage), use // OPTIONS.stages_v & 1)
    return warpgroup_mma(p, v_s.index(stage).reshape([OPTIONS.block_n, v_s.shape[4]]), acc, is_async=True)


@gluon.jit
def _await_turn(w: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait until the warpgroup before this one has handed over; barriers 10 … 12 are not Triton's."""
    if OPTIONS.turns:
        gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [10 + w], gl.int32, False, 1)


@gluon.jit
def _pass_turn(w: gl.constexpr, OPTIONS: gl.constexpr):
    """Hand over to the next warpgroup: 128 threads arrive, and its 128 wait for them."""
    if OPTIONS.turns:
        to: gl.constexpr = 10 + (w + 1) % OPTIONS.warpgroups
        gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [to], gl.int32, False, 1)


@gluon.jit
def _step(w: gl.constexpr, t, use, state, q, rows, buffers, barriers, qk_scale, OPTIONS: gl.constexpr):
    """Go one tile of keys further: S of tile t and P V of tile t - 1 are begun, and the softmax of t runs beside P V."""
    p, acc, m_i, l_i = state
    first_m, tiles_n, masked, seqlen_q, seqlen_k = rows
    _, k_s, v_s, _, _ = buffers
    _, _, k_full, k_empty, v_full, v_empty, _, _ = barriers
    _await_turn(w, OPTIONS)
    s = _scores(q, k_s, k_full, use, OPTIONS)
    acc = _weigh(p, v_s, v_full, use - 1, acc, OPTIONS)
    _pass_turn(w, OPTIONS)
    # All but one of what was begun is done, in the order it was begun: S is, P V may not be.
    s = warpgroup_mma_wait(1, deps=[s])
    if OPTIONS.causal:
        if t < masked:
            s = _mask(s, first_m, (tiles_n - 1 - t) * OPTIONS.block_n, seqlen_q, seqlen_k, OPTIONS)
    # Behind the branch: an arrival waits for the four warps, and the softmax fills that time.
    mbarrier.arrive(k_empty.index(use % OPTIONS.stages_k), count=1)
    p_tile, m_i, l_i, alpha = _softmax(s, m_i, l_i, qk_scale, OPTIONS.causal, OPTIONS)
    if OPTIONS.hold == "exp":
        l_i = _hold(l_i)
    # P is not named here: the assembler keeps the registers that the matrix unit reads, and a 16-bit tensor that comes out
    # of a wait takes a register for each half.
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index((use - 1) % OPTIONS.stages_v), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(p_tile.to(p.dtype), p.type.layout), acc, m_i, l_i


# --- a warpgroup -----------------------------------------------------------------------------------------------------------


@gluon.jit
def _skip(w: gl.constexpr, use, count, barriers, OPTIONS: gl.constexpr):
    """Let `count` tiles of K and V pass that no query of this warpgroup sees; the loader waits for everybody."""
    _, _, k_full, k_empty, v_full, v_empty, _, _ = barriers
    for t in range(count):
        k_stage = (use + t) % OPTIONS.stages_k
        v_stage = (use + t) % OPTIONS.stages_v
        _await_turn(w, OPTIONS)
        _pass_turn(w, OPTIONS)
        mbarrier.wait(k_full.index(k_stage), (use + t) // OPTIONS.stages_k & 1)
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        mbarrier.wait(v_full.index(v_stage), (use + t) // OPTIONS.stages_v & 1)
        mbarrier.arrive(v_empty.index(v_stage), count=1)


@gluon.jit
def _tile(w: gl.constexpr, n, use, q_s, rows, skipped, buffers, barriers, qk_scale, P: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute (acc, m_i, l_i) of the 64 queries of a warpgroup over all keys that they see."""
    first_m, tiles_n, masked, seqlen_q, seqlen_k = rows
    _, k_s, v_s, _, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, _ = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.block_n, 16])
    # Q in registers: the matrix unit then reads half as much shared memory, and the copy engine may fetch the next Q.
    mbarrier.wait(q_full.index(w), n & 1)
    q = q_s.index(w).reshape([ROWS, q_s.shape[4]])
    if OPTIONS.warpgroups == 2:
        q = q.load(gl.DotOperandLayout(0, S, 2))
        mbarrier.arrive(q_empty.index(w), count=1)

    _skip(w, use, skipped, barriers, OPTIONS)
    first = use + skipped
    s = _scores(q, k_s, k_full, first, OPTIONS)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(first % OPTIONS.stages_k), count=1)
    if skipped < masked:
        s = _mask(s, first_m, (tiles_n - 1 - skipped) * OPTIONS.block_n, seqlen_q, seqlen_k, OPTIONS)
    m_i = gl.full([ROWS], float("inf") if OPTIONS.negative else float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l_i = gl.full([ROWS, 4], 0.0, gl.float32, _thread_sums(s).type.layout)
    acc = gl.full([ROWS, v_s.shape[4]], 0.0, gl.float32, P.parent)
    p_tile, m_i, l_i, alpha = _softmax(s, m_i, l_i, qk_scale, True, OPTIONS)
    state = gl.convert_layout(p_tile.to(q_s.dtype), P), acc, m_i, l_i
    for t in range(skipped + 1, tiles_n):
        state = _step(w, t, use + t, state, q, rows, buffers, barriers, qk_scale, OPTIONS)
    p, acc, m_i, l_i = state
    if OPTIONS.warpgroups != 2:
        mbarrier.arrive(q_empty.index(w), count=1)
    last = use + tiles_n - 1
    acc = _weigh(p, v_s, v_full, last, acc, OPTIONS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(last % OPTIONS.stages_v), count=1)
    return acc, m_i, l_i


@gluon.jit
def _store(acc, m_i, l_i, desc_out, out_s, lse_ptr, b, h, nheads, first_m, seqlen_q, qk_scale):
    """Write out and lse of 64 queries; rows past the end are left out by the copy engine and by the mask."""
    l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    # A row that sees no key has l = 0: out 0 and lse -inf, not 0/0.
    l_safe = gl.where(l_i == 0.0, 1.0, l_i)
    offs_m = first_m + gl.arange(0, ROWS, m_i.type.layout)
    lse = (m_i * qk_scale + gl.log2(l_safe)) * LN_2
    gl.store(lse_ptr + (b * nheads + h).to(gl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)
    out = acc * gl.convert_layout(1.0 / l_safe, gl.SliceLayout(1, acc.type.layout))[:, None]
    # The copy engine may still be reading what the tile before left here.
    tma.store_wait(0)
    out_s.reshape(acc.shape).store(out.to(out_s.dtype))
    # What threads wrote is seen by the copy engine only behind this fence.
    fence_async_shared()
    _tma_store(desc_out, [b, h, first_m, 0], out_s)


@gluon.jit
def _attend(w: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Be warpgroup w: attend with its 64 queries of one tile after the other."""
    descs, buffers, barriers, lse_ptr, qk_scale, work = given
    q_s, _, v_s, out_s, told_s = buffers
    _, _, _, _, _, _, told, heard = barriers
    nheads, _, _, _, _, seqlen_q, seqlen_k = work
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v_s.shape[4], 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    n = 0
    use = 0
    if w == OPTIONS.warpgroups - 1:
        _pass_turn(w, OPTIONS)
    b, h, first_m, tiles_n = _hear(n, told_s, told, heard)
    while tiles_n > 0:
        own_m = first_m + w * ROWS
        # Of the tiles of keys, last first: `skipped` that none of the 64 queries sees, then those that need a mask.
        full = seqlen_k // OPTIONS.block_n
        skipped = 0
        if OPTIONS.causal:
            seen = own_m + 1 + seqlen_k - seqlen_q
            full = gl.minimum(full, gl.maximum(seen, 0) // OPTIONS.block_n)
            skipped = gl.maximum(tiles_n - 1 - gl.maximum(seen + ROWS - 2, 0) // OPTIONS.block_n, 0)
        rows = own_m, tiles_n, tiles_n - gl.minimum(full, tiles_n), seqlen_q, seqlen_k
        acc, m_i, l_i = _tile(w, n, use, q_s, rows, skipped, buffers, barriers, qk_scale, P, OPTIONS)
        _store(acc, m_i, l_i, descs[3], out_s.index(w), lse_ptr, b, h, nheads, own_m, seqlen_q, qk_scale)
        use += tiles_n
        n += 1
        b, h, first_m, tiles_n = _hear(n, told_s, told, heard)
    tma.store_wait(0)
    if w == 0:
        _await_turn(w, OPTIONS)


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Make barriers that flip when COUNT threads have arrived and the bytes that were announced are there."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["nheads", "group", "tiles_m", "section", "total", "seqlen_q", "seqlen_k"])
def _forward_kernel(
    desc_q, desc_k, desc_v, desc_out, lse_ptr, counter_ptr, qk_scale,
    nheads, group, tiles_m, section, total, seqlen_q, seqlen_k,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = OPTIONS.warpgroups
    K: gl.constexpr = OPTIONS.stages_k
    V: gl.constexpr = OPTIONS.stages_v
    q_s = gl.allocate_shared_memory(desc_q.dtype, [W] + desc_q.block_type.shape, desc_q.layout)
    out_s = gl.allocate_shared_memory(desc_q.dtype, [W] + desc_out.block_type.shape, desc_out.layout)
    k_s = gl.allocate_shared_memory(desc_q.dtype, [K] + desc_k.block_type.shape, desc_k.layout)
    v_s = gl.allocate_shared_memory(desc_q.dtype, [V] + desc_v.block_type.shape, desc_v.layout)
    told_s = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # full: the copy engine is done (the loader arrives, then the bytes). empty: every warpgroup that reads is done.
    barriers = (
        _barriers(W, 1), _barriers(W, 1), _barriers(K, 1), _barriers(K, W),
        _barriers(V, 1), _barriers(V, W), _barriers(2, 1), _barriers(2, W),
    )  # fmt: skip
    fence_async_shared()
    descs = desc_q, desc_k, desc_v, desc_out
    buffers = q_s, k_s, v_s, out_s, told_s
    work = nheads, group, tiles_m, section, total, seqlen_q, seqlen_k
    given = descs, buffers, barriers, lse_ptr, qk_scale, work
    # 65536 registers: 2 · 128 · 240 or 3 · 128 · 160, and few for the loader, which takes those of four warps.
    if W == 2:
        gl.warp_specialize(
            [(_attend, (0, given, OPTIONS)), (_attend, (1, given, OPTIONS)), (_load, (counter_ptr, given, OPTIONS))],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, given, OPTIONS)),
                (_attend, (1, given, OPTIONS)),
                (_attend, (2, given, OPTIONS)),
                (_load, (counter_ptr, given, OPTIONS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


# --- host ------------------------------------------------------------------------------------------------------------------


def applies(q, k, v):
    """Say why this kernel cannot compute attention for q, k and v, or return None if it can.

    Args:
        q, k, v: as in `forward`.
    """
    architecture = tiles.architecture_of(q.device)
    if architecture != 90:
        return f"needs a Hopper GPU (compute capability 9.0), got {architecture / 10 if architecture else q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, got {q.dtype}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[3] % 8 or not 8 <= x.shape[3] <= 128:
            return f"needs a head_dim that is a multiple of 8 up to 128, got {x.shape[3]} for {name}"
        if x.numel() and not tiles.describable(x, architecture):
            return (
                f"needs a last stride of 1 and the others and the start multiples of 16 bytes, got strides {x.stride()} "
                f"for {name}"
            )
    if q.shape[1] % k.shape[1]:
        return f"needs nheads that is a multiple of nheads_kv, got {q.shape[1]} and {k.shape[1]}"
    return None


def forward(q, k, v, causal, scale, options=None):
    """Compute out = softmax(scale·QKᵀ)V and the logarithm of each row's sum of exponentials.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), float16 or bfloat16, on a Hopper GPU.
        k: (batch, nheads_kv, seqlen_k, head_dim); head h of q goes with head h // (nheads // nheads_kv).
        v: (batch, nheads_kv, seqlen_k, head_dim_v). Both head_dims are multiples of 8 up to 128, and run at the next of
            64 and 128; a last stride of 1, the others multiples of 16 bytes.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        scale: float, 0.0 and negative values too.
        options: `Options` to launch with; None for those that were measured best.

    Returns:
        (out, lse): out (batch, nheads, seqlen_q, head_dim_v) in the dtype of q, lse (batch, nheads, seqlen_q) float32,
        natural. A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: the kernel does not apply; the message says why.
    """
    reason = applies(q, k, v)
    if reason:
        raise ValueError(f"q, k, v must be inputs of the Hopper kernel, which {reason}")
    out = tiles.empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if lse.numel() == 0:
        return out, lse
    options = options or options_for(q.shape, v.shape, causal, scale < 0)
    batch, nheads, seqlen_q, _ = q.shape
    block_m = ROWS.value * options.warpgroups
    tiles_m = -(-seqlen_q // block_m)
    total = tiles_m * batch * nheads
    group = nheads // k.shape[1]
    with tiles.on_device_of(q):
        arguments = (
            _descriptor(q, ROWS.value), _descriptor(k, options.block_n), _descriptor(v, options.block_n),
            _descriptor(out, ROWS.value), lse,
            _counters(q.device) if causal else None,
            # 2⁻¹²⁶ for 0: the products vanish, but a masked score stays infinite, where 0 times it would be NaN.
            (scale or 2.0**-126) * LOG2_E,
            nheads, group, tiles_m, _section(k, v) * group, total, seqlen_q, k.shape[2],
        )  # fmt: skip
        programs = min(total, _multiprocessors(q.device))
        tiles.launch(_forward_kernel, programs, arguments, {"OPTIONS": options, "num_warps": 4})
    return out, lse


def options_for(shape_q, shape_v, causal, negative):
    """Return the Options that were measured best for these shapes."""
    wide = max(shape_q[3], shape_v[3]) > 64
    warpgroups = 2 if wide or shape_q[2] <= 1024 else 3
    return Options(causal, negative, warpgroups, 128, 2 if wide else 3, 3, True, "exp" if wide and causal else "")


def _section(k, v):
    """Return how many heads of K and V may be in the L2 together: 16 MiB of them, 32 for the narrow ones."""
    head_bytes = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return max(1, 2 ** (24 if max(k.shape[3], v.shape[3]) > 64 else 25) // head_bytes)


def _counters(device):
    """Return two zeros that no launch running at the same time uses, and that a launch leaves as zeros.

    Launches of a stream follow each other and can share them. A graph may be replayed anywhere and gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _COUNTERS[key]


@functools.cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(rows, columns, dtype):
    """Return how a tile lies in shared memory; dtype is "float16" or "bfloat16"."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], getattr(gl, dtype))


def _descriptor(x, rows):
    """Describe x to the copy engine: it moves [1, 1, rows, columns] and knows where the rows of a head end."""
    plain = tiles.descriptor(x, rows, 64 if x.shape[3] <= 64 else 128)
    return TensorDescriptor(x, plain.shape, plain.strides, plain.block_shape, _layout(*plain.block_shape[2:], str(x.dtype).removeprefix("torch.")))
