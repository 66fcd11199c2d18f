"""Kernels that only ask `flashlib.dropout` what it decides, for tests, interpreted, on a GPU and in compiled form."""

from flashlib.device import tl, triton
from flashlib.dropout import keep_tile, philox


@triton.jit
def philox_kernel(counter_ptr, key_ptr, out_ptr):
    r0, r1, r2, r3 = philox(
        tl.load(counter_ptr), tl.load(counter_ptr + 1), tl.load(counter_ptr + 2), tl.load(counter_ptr + 3),
        tl.load(key_ptr), tl.load(key_ptr + 1),
    )  # fmt: skip
    tl.store(out_ptr, r0)
    tl.store(out_ptr + 1, r1)
    tl.store(out_ptr + 2, r2)
    tl.store(out_ptr + 3, r3)


@triton.jit
def mask_kernel(
    out_ptr, seed_ptr, threshold, nheads, seqlen_q, seqlen_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Write the decisions of one tile of one head, (batch, nheads, seqlen_q, seqlen_k)."""
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    tiles = tl.cdiv(seqlen_q, BLOCK_M) * tiles_n
    pid_bh = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    offs_m = tile // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if TRANSPOSED:
        i, j = offs_m[None, :], offs_n[:, None]
    else:
        i, j = offs_m[:, None], offs_n[None, :]
    kept = keep_tile(
        tl.load(seed_ptr), tl.load(seed_ptr + 1), pid_bh // nheads, pid_bh % nheads, i, j, threshold
    )  # fmt: skip
    ptrs = out_ptr + (pid_bh * seqlen_q + i) * seqlen_k + j
    tl.store(ptrs, kept.to(tl.int8), mask=(i < seqlen_q) & (j < seqlen_k))


@triton.jit
def weighted_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, seed_ptr, threshold, seqlen, DROPOUT: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Sum exp2(s)·v over tiles as attention does, without its softmax: a product of matrices around the decision."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + rows[:, None] * HEAD_DIM + offs_d)
    seed = tl.load(seed_ptr)
    offset = tl.load(seed_ptr + 1)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first in tl.range(0, seqlen, BLOCK_N):
        columns = first + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + columns[:, None] * HEAD_DIM + offs_d)
        v = tl.load(v_ptr + columns[:, None] * HEAD_DIM + offs_d)
        p = tl.exp2(tl.dot(q, k.T))
        if DROPOUT:
            i, j = (columns[None, :], rows[:, None]) if TRANSPOSED else (rows[:, None], columns[None, :])
            p = tl.where(keep_tile(seed, offset, tl.program_id(1), tl.program_id(2), i, j, threshold), p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
    tl.store(out_ptr + rows[:, None] * HEAD_DIM + offs_d, acc)
