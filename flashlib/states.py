"""The state (m, l, acc) of chapter 03 on a GPU: its merge, and the kernel that puts the states of many splits together.

The same three numbers a row as in `online_softmax.State`, in base 2 and with m rounded up to a whole number: then every
factor is a power of two and rounds nothing, and it makes no difference to any bit who merges the parts of a row.

Source: Milakov and Gimelshein, section 3.1, https://arxiv.org/abs/1805.02867; Flash-Decoding,
https://pytorch.org/blog/flash-decoding/
"""

import functools

from flashlib import tiles
from flashlib.device import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Splits of a group; two groups are a pair. States are added up split by split, group by group, pair by pair.
GROUP = tl.constexpr(8)


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
def nothing(ROWS: tl.constexpr, COLS: tl.constexpr, ACC: tl.constexpr):
    """Return the state (m, l, acc) of rows that have seen nothing."""
    return tl.full([ROWS], float("-inf"), ACC), tl.zeros([ROWS], ACC), tl.zeros([ROWS, COLS], ACC)


@triton.jit
def finished(m, l, acc, sink_ptr, head, inside):
    """Return (out, lse) of whole rows from their states; what has seen nothing has out 0, lse -inf or its sink."""
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
def _combine_kernel(
    states_ptr, out_ptr, lse_ptr, length_ptr, sink_ptr, stride_out,
    nheads, seqlen_q, capacity, appended, left, part, n_parts, n_states,
    HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PAIRS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
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
    pair = tl.arange(0, PAIRS) * GROUPS * STEPS
    start = row.to(tl.int64) * n_parts
    if EARLY:
        # The lengths were there before the first kernel began; its states are there only now.
        tl.extra.cuda.gdc_wait()

    m = tl.full([PAIRS], float("-inf"), ACC)
    for n in tl.static_range(GROUPS * STEPS):
        live = (pair + n >= first_part) & (pair + n < end_part)
        m = tl.maximum(m, tl.load(states_ptr + start + pair + n, mask=live, other=float("-inf")))
    # Factors are powers of two: with the largest m known first, additions give the bits of one merge after the other.
    m_row = tl.max(m, 0, keep_dims=True)
    m_safe = tl.where(m_row == float("-inf"), 0.0, m_row)
    l = tl.zeros([PAIRS], ACC)
    acc = tl.zeros([PAIRS, BLOCK_D], ACC)
    for group in tl.static_range(GROUPS):
        l_group = tl.zeros([PAIRS], ACC)
        acc_group = tl.zeros([PAIRS, BLOCK_D], ACC)
        for step in tl.static_range(STEPS):
            at = pair + group * STEPS + step
            live = (at >= first_part) & (at < end_part)
            at = start + at
            weight = tl.exp2(tl.load(states_ptr + at, mask=live, other=float("-inf")) - m_safe)
            l_group += weight * tl.load(states_ptr + n_states + at, mask=live, other=0.0)
            acc_ptrs = states_ptr + 2 * n_states + at[:, None] * HEAD_DIM_V + offs_v[None, :]
            mask = live[:, None] & (offs_v < HEAD_DIM_V)[None, :]
            acc_group += weight[:, None] * tl.load(acc_ptrs, mask=mask, other=0.0)
        l += l_group
        acc += acc_group
    l_row = tl.sum(l, 0, keep_dims=True)
    acc_row = tl.sum(acc, 0, keep_dims=True)  # [1, BLOCK_D]
    one = tl.arange(0, 1)
    out, lse = finished(m_row, l_row, acc_row, sink_ptr, head + one, one == 0)
    out_ptrs = out_ptr + b.to(tl.int64) * stride_out[0] + head.to(tl.int64) * stride_out[1] + i * stride_out[2]
    out_ptrs = out_ptrs + (offs_v * stride_out[3])[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(offs_v < HEAD_DIM_V)[None, :])
    tl.store(lse_ptr + row + one, lse)


@functools.cache
def combine_constants(n_splits, walk, head_dim_v, block_n, early):
    """Return (programs a row, constants of _combine_kernel)."""
    group = GROUP.value
    pairs = triton.next_power_of_2(-(-n_splits // (2 * group)))
    block_d = min(tiles.padded(head_dim_v), max(32, 128 // pairs))
    return -(-head_dim_v // block_d), {
        "HEAD_DIM_V": head_dim_v, "BLOCK_N": block_n, "BLOCK_D": block_d, "PAIRS": pairs,
        "GROUPS": 1 if walk > group else 2, "STEPS": group if walk == 1 else 1,
        "num_warps": min(4, max(1, pairs * block_d // 128)), **launched_early(early),
    }  # fmt: skip


def launched_early(early):
    """Return what lets a kernel be brought to the GPU while the one in front of it still runs (Hopper and newer)."""
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
