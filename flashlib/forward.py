"""FlashAttention's forward pass in one Triton kernel.

One program owns a tile of queries and walks over the tiles of keys that it sees, with the running state (m, l, acc) of
chapter 03 in registers: no score ever reaches memory. The exponentials are base 2, with log2(e) folded into the scale.

Source: FlashAttention-2, algorithm 1, https://arxiv.org/abs/2307.08691
"""

import torch

from flashlib import tiles
from flashlib.device import tl, triton
from flashlib.dropout import thinned
from flashlib.mods import changed, key_range, visible
from flashlib.options import NO_CHANGE, call_of
from flashlib.tiles import load_tile, packed_tile, spans, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_out, aux, score_aux,
    left, right, softcap, alibi, bias, dropout, sinks_ptr, packed, nheads, group, seqlen_q, seqlen_k, scale, qk_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, FOLD: tl.constexpr,
    DESCRIPTOR: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    if CAUSAL:
        # The last tiles of queries see the most keys: longest first, so that none is left alone at the end.
        pid_m = tiles_m - 1 - pid_m
    b = pid_bh // nheads
    if packed is not None:
        b, pid_bh, pid_m = packed_tile(packed, 0, seqlen_q, BLOCK_M, LANES)
        if b >= packed[2]:
            return
    h = pid_bh % nheads
    row = pid_bh.to(tl.int64) * seqlen_q
    start_q, seqlen_q, start_k, seqlen_k = spans(packed, b, seqlen_q, seqlen_k)
    row += start_q
    first_m = pid_m * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    ACCURATE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, False, WIDE, start_q)
    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, COLS_V], ACC)
    if sinks_ptr is not None:
        # A state to start from: the sink's score is the maximum so far, its weight 1, its value 0.
        m_i = tl.zeros([BLOCK_M], ACC) + tl.load(sinks_ptr + h).to(ACC) * LOG2_E
        l_i = l_i + 1.0

    h_kv = h // group
    end_m = tl.minimum(first_m + BLOCK_M, seqlen_q)
    lo, lo_full, hi_full, hi = key_range(
        b, h, first_m, end_m, seqlen_q, seqlen_k, left, right, aux, BLOCK_N, CAUSAL, MASK, KEYS)  # fmt: skip
    for first_n in tl.range(lo, hi, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, DESCRIPTOR, WIDE, start_k)
        s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC)  # [BLOCK_M, BLOCK_N]
        offs_n = first_n + tl.arange(0, BLOCK_N)
        i, j = offs_m[:, None], offs_n[None, :]
        if SCORE is not None or softcap is not None or alibi is not None or bias is not None:
            s = changed(
                s, 0.0, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux, SCORE, ACCURATE,
            )  # fmt: skip
        elif not FOLD:
            s = s * qk_scale
        if first_n < lo_full or first_n >= hi_full:
            seen = visible(b, h, i, j, seqlen_q, seqlen_k, left, right, aux, CAUSAL, MASK)
            s = tl.where(seen, s, float("-inf"))
        m_tile = tl.max(s, 1)
        # A positive scale commutes with max: it costs one product a row, and exp2's argument is one FMA an element.
        m_new = tl.maximum(m_i, m_tile * qk_scale if FOLD else m_tile)
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s * qk_scale if FOLD else s) - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(
            v_ptr, stride_v, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, DESCRIPTOR, WIDE, start_k,
        )  # fmt: skip
        # The denominator has all of p: dropout takes away values only.
        p = thinned(p, dropout, b, h, i, j)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=ACC)
        m_i = m_new

    # A row that sees no key has l = 0: out 0 and lse -inf, not 0/0.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc * (1.0 / l_safe)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, WIDE, start_q)
    lse = (m_i + tl.log2(l_safe)) * LN_2
    tl.store(lse_ptr + row + offs_m, lse, mask=offs_m < seqlen_q)


def forward(q, k, v, options):
    """Launch the kernel.

    Args:
        q, k, v: (batch, nheads or nheads_kv, seqlen, head_dim), checked; packed: (1, nheads, total, head_dim).
        options: `mods.Options`.

    Returns:
        out in the order of axes of q; lse (batch, nheads, seqlen_q), float32 (float64 for float64).
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # The interpreter cannot compute in bfloat16: compute in float32, round once.
        out, lse = forward(q.float(), k.float(), v.float(), options)
        return tiles.empty_out(q, v).copy_(out), lse
    out = tiles.empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=tiles.accumulator(q.dtype), device=q.device)
    if lse.numel() == 0:
        return out, lse
    call = call_of(q, k, options)
    plan = tiles.plan("forward", q, v, call.triangular, (k, v), call.lanes)
    arguments = (
        q, *plan.loaded(k, v), out, lse, *call.strides(q, k, v, out), call.aux, call.score_aux,
        *call.window, *call.changes, call.dropout, tiles.pointer(options.sinks), call.packed, *call.sizes,
    )  # fmt: skip
    constants = {
        "CAUSAL": call.causal, "MASK": call.mask[0], "KEYS": call.mask[1], "SCORE": call.score[0],
        "FOLD": options.scale > 0 and call.changes == NO_CHANGE and not options.score,
    }  # fmt: skip
    with tiles.on_device_of(q):
        tiles.launch(
            _forward_kernel,
            call.programs(0, plan.tile.block_m, q.shape[0]),
            arguments,
            constants | call.constants(plan),
        )
        if call.packed is not None:
            tiles.fill_tails(options.cu_q, (out, 0.0), (lse[..., None], float("-inf")))
    return out, lse
