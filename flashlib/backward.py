"""FlashAttention's backward pass in three Triton kernels: delta, then dK and dV, then dQ; the same bits every run.

Each kernel recomputes its tiles of P from q, k and the stored lse. A program of the second owns a tile of keys and
walks over queries; a program of the third owns a tile of queries and walks over keys; so every sum has one owner and
one order.

Source: FlashAttention-2, algorithm 2, https://arxiv.org/abs/2307.08691
"""

import torch

from flashlib import tiles
from flashlib.device import tl, triton
from flashlib.dropout import thinned
from flashlib.mods import changed, changed_gradient, key_range, query_range, visible
from flashlib.options import call_of
from flashlib.tiles import load_tile, packed_tile, spans, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)
DELTA_ROWS = 64


@triton.jit
def _delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, stride_out, stride_dout, stride_dlse, nheads, seqlen_q,
    HEAD_DIM_V: tl.constexpr, COLS_V: tl.constexpr, BLOCK_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    first_m = tl.program_id(0) % tiles_m * BLOCK_M
    b = pid_bh // nheads
    h = pid_bh % nheads
    offs_m = first_m + tl.arange(0, BLOCK_M)
    ACC: tl.constexpr = delta_ptr.dtype.element_ty
    out = load_tile(out_ptr, stride_out, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, False, WIDE)
    dout = load_tile(dout_ptr, stride_dout, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, False, WIDE)
    delta = tl.sum(out.to(ACC) * dout.to(ACC), 1)  # [BLOCK_M]
    if dlse_ptr is not None:
        # d lse / d s = p: the gradient of lse enters where delta does, with the other sign.
        ptrs = dlse_ptr + b.to(tl.int64) * stride_dlse[0] + h.to(tl.int64) * stride_dlse[1]
        ptrs += offs_m.to(tl.int64) * stride_dlse[2]
        dlse = tl.load(ptrs, mask=offs_m < seqlen_q, other=0.0)
        # A row that sees no key has lse = -inf, whatever q is: its dlse, infinite for lse² say, goes nowhere.
        lse = tl.load(lse_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, mask=offs_m < seqlen_q, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)
    tl.store(delta_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, delta, mask=offs_m < seqlen_q)


@triton.jit
def load_lse(lse_ptr, row, offs_m, seqlen_q):
    """Load the lse of some rows of a head whose rows begin at `row`, in base 2."""
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
    # lse = +inf makes p = 0: so a row past the end adds nothing, and neither does one that sees no key.
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E


@triton.jit
def load_delta(delta_ptr, row, offs_m, seqlen_q):
    """Load the delta of some rows."""
    return tl.load(delta_ptr + row + offs_m, mask=offs_m < seqlen_q, other=0.0)


@triton.jit
def recompute_p(
    s, lse, b, h, i, j, seqlen_q, seqlen_k, left, right, aux, softcap, alibi, bias, score_aux, scale, qk_scale, tested,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Return p from s = qk and the lse of its rows; `tested` tells whether some pairs of the tile may not count."""
    if SCORE is not None or softcap is not None or alibi is not None or bias is not None:
        log_p = changed(s, lse, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux, SCORE, ACCURATE)
    else:
        log_p = s * qk_scale - lse
    if tested:
        seen = visible(b, h, i, j, seqlen_q, seqlen_k, left, right, aux, CAUSAL, MASK)
        log_p = tl.where(seen, log_p, float("-inf"))
    return tl.exp2(log_p)


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_dout, stride_dk, stride_dv, aux, score_aux,
    left, right, softcap, alibi, bias, dropout, packed, nheads, group, seqlen_q, seqlen_k, scale, qk_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, QUERIES: tl.constexpr, SCORE: tl.constexpr, GRAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    pid_bh, pid_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    b = pid_bh // (nheads // group)
    if packed is not None:
        b, pid_bh, pid_n = packed_tile(packed, 1, seqlen_k, BLOCK_N, LANES)
        if b >= packed[2]:
            return
    h_kv = pid_bh % (nheads // group)
    rows_q = seqlen_q
    start_q, seqlen_q, start_k, seqlen_k = spans(packed, b, seqlen_q, seqlen_k)
    first_n = pid_n * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    ACCURATE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    k = load_tile(k_ptr, stride_k, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, 0, WIDE, start_k)
    v = load_tile(v_ptr, stride_v, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, 0, WIDE, start_k)
    dk = tl.zeros([BLOCK_N, COLS], ACC)
    dv = tl.zeros([BLOCK_N, COLS_V], ACC)
    # The query heads that share this head of keys, one after the other: so their sum has one owner too.
    for g in tl.range(0, group):
        h = h_kv * group + g
        row = (pid_bh * group + g).to(tl.int64) * rows_q + start_q
        lo, lo_full, hi_full, hi = query_range(
            b, h, first_n, first_n + BLOCK_N, seqlen_q, seqlen_k, left, right, aux, BLOCK_M, CAUSAL, MASK, QUERIES,
        )  # fmt: skip
        for first_m in tl.range(lo, hi, BLOCK_M):
            offs_m = first_m + tl.arange(0, BLOCK_M)
            i, j = offs_m[None, :], offs_n[:, None]
            q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, DESCRIPTOR, WIDE, start_q)
            # Everything transposed, [BLOCK_N, BLOCK_M]: then p and ds are left operands and stay in registers.
            s = tl.dot(k, q.T, input_precision=PRECISION, out_dtype=ACC)
            dout = load_tile(
                dout_ptr, stride_dout, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, DESCRIPTOR, WIDE, start_q,
            )  # fmt: skip
            dp = tl.dot(v, dout.T, input_precision=PRECISION, out_dtype=ACC)
            lse = load_lse(lse_ptr, row, offs_m, seqlen_q)[None, :]
            p = recompute_p(
                s, lse, b, h, i, j, seqlen_q, seqlen_k, left, right, aux, softcap, alibi, bias, score_aux, scale,
                qk_scale, first_m < lo_full or first_m >= hi_full, CAUSAL, MASK, SCORE, ACCURATE)  # fmt: skip
            dv = tl.dot(
                thinned(p, dropout, b, h, i, j).to(dout.dtype), dout, dv, input_precision=PRECISION, out_dtype=ACC
            )
            # delta is loaded late: 16 registers fewer are in use while p is computed.
            ds = p * (thinned(dp, dropout, b, h, i, j) - load_delta(delta_ptr, row, offs_m, seqlen_q)[None, :])
            ds = changed_gradient(
                ds, s, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux, GRAD, ACCURATE,
            )  # fmt: skip
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=ACC)

    store_tile(dk_ptr, stride_dk, dk * scale, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, WIDE, start_k)
    store_tile(dv_ptr, stride_dv, dv, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, WIDE, start_k)


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_dout, stride_dq, aux, score_aux,
    left, right, softcap, alibi, bias, dropout, packed, nheads, group, seqlen_q, seqlen_k, scale, qk_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr, GRAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, WIDE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    if CAUSAL:
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
    ACCURATE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, 0, WIDE, start_q)
    dout = load_tile(dout_ptr, stride_dout, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, 0, WIDE, start_q)
    lse = load_lse(lse_ptr, row, offs_m, seqlen_q)[:, None]
    delta = load_delta(delta_ptr, row, offs_m, seqlen_q)[:, None]
    dq = tl.zeros([BLOCK_M, COLS], ACC)

    h_kv = h // group
    end_m = tl.minimum(first_m + BLOCK_M, seqlen_q)
    lo, lo_full, hi_full, hi = key_range(
        b, h, first_m, end_m, seqlen_q, seqlen_k, left, right, aux, BLOCK_N, CAUSAL, MASK, KEYS)  # fmt: skip
    for first_n in tl.range(lo, hi, BLOCK_N):
        offs_n = first_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, DESCRIPTOR, WIDE, start_k)
        v = load_tile(
            v_ptr, stride_v, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, DESCRIPTOR, WIDE, start_k,
        )  # fmt: skip
        s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC)
        dp = tl.dot(dout, v.T, input_precision=PRECISION, out_dtype=ACC)
        i, j = offs_m[:, None], offs_n[None, :]
        p = recompute_p(
            s, lse, b, h, i, j, seqlen_q, seqlen_k, left, right, aux, softcap, alibi, bias, score_aux, scale, qk_scale,
            first_n < lo_full or first_n >= hi_full, CAUSAL, MASK, SCORE, ACCURATE)  # fmt: skip
        ds = p * (thinned(dp, dropout, b, h, i, j) - delta)
        ds = changed_gradient(
            ds, s, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux, GRAD, ACCURATE,
        )  # fmt: skip
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=ACC)

    store_tile(dq_ptr, stride_dq, dq * scale, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, WIDE, start_q)


def gradients(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, options):
    """Launch the kernels that are wanted.

    Args:
        q, k, v, out, lse: inputs and outputs of the forward pass; bfloat16 on a GPU only.
        dout, dlse: gradients of out and lse, any strides; dlse may be None.
        wants_q, wants_kv: whether dq, and whether dk and dv, are computed.
        options: `options.Options`, as in the forward pass.

    Returns:
        (dq, dk, dv, delta): gradients in the dtype and order of axes of q, k, v, an empty tensor for what is not
        wanted; delta like lse, the sum over each row of dout·out, less dlse.
    """
    dq, dk, dv = empty_gradients(q, k, v, wants_q, wants_kv)
    delta = torch.empty_like(lse)
    if lse.numel() == 0:
        # No query: keys and values have no influence.
        return dq, dk.zero_(), dv.zero_(), delta
    batch, nheads, rows_q, _ = q.shape
    call = call_of(q, k, options)
    hooks = {"CAUSAL": call.causal, "MASK": call.mask[0], "SCORE": call.score[0], "GRAD": call.score[1]}
    common = call.aux, call.score_aux, *call.window, *call.changes, call.dropout, call.packed, *call.sizes
    strides = call.strides(q, k, v, dout)
    with tiles.on_device_of(q):
        stride_dlse = dlse.stride() if dlse is not None else (0, 0, 0)
        arguments = out, dout, lse, dlse, delta, out.stride(), dout.stride(), stride_dlse, nheads, rows_q
        tiles.launch(
            _delta_kernel, -(-rows_q // DELTA_ROWS) * batch * nheads, arguments,
            {
                "HEAD_DIM_V": v.shape[3], "COLS_V": tiles.padded(v.shape[3]), "BLOCK_M": DELTA_ROWS,
                "WIDE": tiles.wide(out.stride()[2:] + dout.stride()[2:]),
            },
        )  # fmt: skip
        if wants_kv and k.numel():
            plan = tiles.plan("dkdv", q, v, call.triangular, (q, dout), call.lanes)
            q_loaded, dout_loaded = plan.loaded(q, dout)
            arguments = (
                q_loaded, k, v, dout_loaded, lse, delta, dk, dv, *strides, *call.strides(dk, dv), *common
            )  # fmt: skip
            programs = call.programs(1, plan.tile.block_n, batch)
            tiles.launch(_dkdv_kernel, programs, arguments, hooks | {"QUERIES": call.mask[2]} | call.constants(plan))
        if wants_q:
            plan = tiles.plan("dq", q, v, call.triangular, (k, v), call.lanes)
            arguments = q, *plan.loaded(k, v), dout, lse, delta, dq, *strides, *call.strides(dq), *common
            programs = call.programs(0, plan.tile.block_m, batch)
            tiles.launch(_dq_kernel, programs, arguments, hooks | {"KEYS": call.mask[1]} | call.constants(plan))
        if call.packed is not None:
            tiles.fill_tails(options.cu_q, (dq, 0.0))
            tiles.fill_tails(options.cu_k, (dk, 0.0), (dv, 0.0))
    return dq, dk, dv, delta


def empty_gradients(q, k, v, wants_q, wants_kv):
    """Return the memory for dq, dk and dv: empty tensors for those that are not wanted."""
    wanted = ((q, wants_q), (k, wants_kv), (v, wants_kv))
    return tuple(torch.empty_like(x) if wants else x.new_empty(0) for x, wants in wanted)
