"""Which tile of queries comes next, and how its tiles of Q, K and V come into shared memory: the loading warp's part.

The copy engine (TMA) moves a tile when one thread asks it to, and counts the bytes at a barrier (mbarrier) in shared
memory. The barriers come in pairs: at one the loader says that a buffer is full, at the other those who read it say
that it is empty again.

Source: NVIDIA's PTX reference (mbarrier, cp.async.bulk.tensor); FlashAttention-3, https://arxiv.org/abs/2407.08608
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Queries of a warpgroup: the rows of one wgmma.
ROWS = gl.constexpr(64)
# Triton 3.9 renamed it.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


# --- schedule: which tile of queries comes next ----------------------------------------------------------------------


@gluon.jit
def _place(tile, work, OPTIONS: gl.constexpr):
    """Return (b, h, head of K and V, first query, tiles of keys) of a tile; after the last, no tiles of keys."""
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
    return (gl.atomic_add(counter_ptr, 1) if OPTIONS.causal else tile) + gl.num_programs(0)


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
