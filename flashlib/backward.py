"""FlashAttention's backward pass in three Triton kernels: delta, then dK and dV, then dQ; the same bits every run.

Each kernel recomputes its tiles of P from q, k and the stored lse. A program of the second owns a tile of keys and
walks over queries; a program of the third owns a tile of queries and walks over keys; so every sum has one owner and
one order.

Source: FlashAttention-2, algorithm 2, https://arxiv.org/abs/2307.08691
"""

import torch

from flashlib import tiles
from flashlib.device import tl, triton
from flashlib.mods import key_range, query_range, registered, visible
from flashlib.tiles import load_tile, store_tile

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
def _load_lse(lse_ptr, pid_bh, offs_m, seqlen_q):
    """Load the lse of some rows, in base 2."""
    lse = tl.load(lse_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
    # lse = +inf makes p = 0: so a row past the end adds nothing, and neither does one that sees no key.
    return tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E


@triton.jit
def _load_delta(delta_ptr, pid_bh, offs_m, seqlen_q):
    """Load the delta of some rows."""
    return tl.load(delta_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, mask=offs_m < seqlen_q, other=0.0)


@triton.jit
def _recompute_p(
    s, lse, b, h, i, j, seqlen_q, seqlen_k, aux, score_aux, scale, qk_scale, tested,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """Return p from s = qk and the lse of its rows; `tested` tells whether some pairs of the tile may not count."""
    if SCORE is not None:
        s = SCORE(s * scale, b, h, tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1), score_aux)
        log_p = s * LOG2_E - lse
    else:
        log_p = s * qk_scale - lse
    if tested:
        seen = visible(b, h, i, j, seqlen_q, seqlen_k, aux, CAUSAL, MASK)
        log_p = tl.where(seen, log_p, float("-inf"))
    return tl.exp2(log_p)


@triton.jit
def _score_grad(ds, s, b, h, i, j, seqlen_q, seqlen_k, score_aux, scale, GRAD: tl.constexpr):
    """Return the gradient of scale·qk from that of the score that came out of it."""
    if GRAD is not None:
        ds = GRAD(ds, s * scale, b, h, tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1), score_aux)
    return ds


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_q, stride_k, stride_v, stride_dout, stride_dk, stride_dv, aux, score_aux,
    nheads, seqlen_q, seqlen_k, scale, qk_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, QUERIES: tl.constexpr, SCORE: tl.constexpr, GRAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    pid_bh = tl.program_id(0) // tiles_n
    first_n = tl.program_id(0) % tiles_n * BLOCK_N
    b = pid_bh // nheads
    h = pid_bh % nheads
    offs_n = first_n + tl.arange(0, BLOCK_N)
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, False, WIDE)
    v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, False, WIDE)
    dk = tl.zeros([BLOCK_N, COLS], ACC)
    dv = tl.zeros([BLOCK_N, COLS_V], ACC)

    lo, lo_full, hi_full, hi = query_range(
        b, h, first_n, first_n + BLOCK_N, seqlen_q, seqlen_k, aux, BLOCK_M, CAUSAL, MASK, QUERIES
    )
    for first_m in tl.range(lo, hi, BLOCK_M):
        offs_m = first_m + tl.arange(0, BLOCK_M)
        q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, DESCRIPTOR, WIDE)
        # Everything transposed, [BLOCK_N, BLOCK_M]: then p and ds are left operands and stay in registers.
        s = tl.dot(k, q.T, input_precision=PRECISION, out_dtype=ACC)
        dout = load_tile(dout_ptr, stride_dout, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, DESCRIPTOR, WIDE)
        dp = tl.dot(v, dout.T, input_precision=PRECISION, out_dtype=ACC)
        lse = _load_lse(lse_ptr, pid_bh, offs_m, seqlen_q)[None, :]
        i, j = offs_m[None, :], offs_n[:, None]
        tested = first_m < lo_full or first_m >= hi_full
        p = _recompute_p(
            s, lse, b, h, i, j, seqlen_q, seqlen_k, aux, score_aux, scale, qk_scale, tested, CAUSAL, MASK, SCORE
        )
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION, out_dtype=ACC)
        # delta is loaded late: 16 registers fewer are in use while p is computed.
        ds = p * (dp - _load_delta(delta_ptr, pid_bh, offs_m, seqlen_q)[None, :])
        ds = _score_grad(ds, s, b, h, i, j, seqlen_q, seqlen_k, score_aux, scale, GRAD)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION, out_dtype=ACC)

    store_tile(dk_ptr, stride_dk, dk * scale, b, h, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, WIDE)
    store_tile(dv_ptr, stride_dv, dv, b, h, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, WIDE)


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_q, stride_k, stride_v, stride_dout, stride_dq, aux, score_aux,
    nheads, seqlen_q, seqlen_k, scale, qk_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr, GRAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, DESCRIPTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    if CAUSAL:
        pid_m = tiles_m - 1 - pid_m
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, False, WIDE)
    dout = load_tile(dout_ptr, stride_dout, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, False, WIDE)
    lse = _load_lse(lse_ptr, pid_bh, offs_m, seqlen_q)[:, None]
    delta = _load_delta(delta_ptr, pid_bh, offs_m, seqlen_q)[:, None]
    dq = tl.zeros([BLOCK_M, COLS], ACC)

    end_m = tl.minimum(first_m + BLOCK_M, seqlen_q)
    lo, lo_full, hi_full, hi = key_range(b, h, first_m, end_m, seqlen_q, seqlen_k, aux, BLOCK_N, CAUSAL, MASK, KEYS)
    for first_n in tl.range(lo, hi, BLOCK_N):
        offs_n = first_n + tl.arange(0, BLOCK_N)
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, DESCRIPTOR, WIDE)
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, DESCRIPTOR, WIDE)
        s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC)
        dp = tl.dot(dout, v.T, input_precision=PRECISION, out_dtype=ACC)
        i, j = offs_m[:, None], offs_n[None, :]
        tested = first_n < lo_full or first_n >= hi_full
        p = _recompute_p(
            s, lse, b, h, i, j, seqlen_q, seqlen_k, aux, score_aux, scale, qk_scale, tested, CAUSAL, MASK, SCORE
        )
        ds = _score_grad(p * (dp - delta), s, b, h, i, j, seqlen_q, seqlen_k, score_aux, scale, GRAD)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION, out_dtype=ACC)

    store_tile(dq_ptr, stride_dq, dq * scale, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, WIDE)


def gradients(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, causal, scale, mask, score, n_mask, aux):
    """Launch the kernels that are wanted.

    Args:
        q, k, v, out, lse: inputs and outputs of the forward pass, (batch, nheads, seqlen, head_dim) and, lse, (…,
            seqlen_q).
        dout, dlse: gradients of out and lse, any strides; dlse may be None.
        causal, scale, mask, score, n_mask, aux: as in the forward pass.
        wants_q, wants_kv: whether dq, and whether dk and dv, are computed.

    Returns:
        (dq, dk, dv), in the dtype and order of axes of q, k, v; what is not wanted is an empty tensor.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # As in the forward pass: the interpreter cannot compute in bfloat16.
        wide = gradients(
            q.float(), k.float(), v.float(), out.float(), lse, dout.float(), dlse,
            wants_q, wants_kv, causal, scale, mask, score, n_mask, aux,
        )  # fmt: skip
        return tuple(x.bfloat16() for x in wide)
    dq, dk, dv = empty_gradients(q, k, v, wants_q, wants_kv)
    (batch, nheads, seqlen_q, _), seqlen_k = q.shape, k.shape[2]
    if lse.numel() == 0:
        # No query: keys and values have no influence.
        return dq, dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    fn, keys, queries = registered(mask, 3)
    score_fn, grad = registered(score, 2)
    hooks = {"CAUSAL": causal, "MASK": fn, "SCORE": score_fn, "GRAD": grad}
    common = (
        tiles.pointers(aux[:n_mask]), tiles.pointers(aux[n_mask:]),
        nheads, seqlen_q, seqlen_k, scale, scale * LOG2_E.value,
    )  # fmt: skip
    strides = q.stride(), k.stride(), v.stride(), dout.stride()
    with tiles.on_device_of(q):
        stride_dlse = dlse.stride() if dlse is not None else (0, 0, 0)
        arguments = out, dout, lse, dlse, delta, out.stride(), dout.stride(), stride_dlse, nheads, seqlen_q
        tiles.launch(
            _delta_kernel, -(-seqlen_q // DELTA_ROWS) * batch * nheads, arguments,
            {
                "HEAD_DIM_V": v.shape[3], "COLS_V": tiles.padded(v.shape[3]), "BLOCK_M": DELTA_ROWS,
                "WIDE": tiles.wide(out.stride()[2:] + dout.stride()[2:]),
            },
        )  # fmt: skip
        if wants_kv and k.numel():
            plan = tiles.plan("dkdv", q, v, causal, loaded=(q, dout))
            q_loaded, dout_loaded = plan.loaded(q, dout)
            arguments = (
                q_loaded, k, v, dout_loaded, lse, delta, dk, dv, *strides, dk.stride(), dv.stride(), *common
            )  # fmt: skip
            programs = -(-seqlen_k // plan.tile.block_n) * batch * nheads
            tiles.launch(_dkdv_kernel, programs, arguments, hooks | {"QUERIES": queries} | plan.constants)
        if wants_q:
            plan = tiles.plan("dq", q, v, causal, loaded=(k, v))
            arguments = q, *plan.loaded(k, v), dout, lse, delta, dq, *strides, dq.stride(), *common
            programs = -(-seqlen_q // plan.tile.block_m) * batch * nheads
            tiles.launch(_dq_kernel, programs, arguments, hooks | {"KEYS": keys} | plan.constants)
    return dq, dk, dv


def empty_gradients(q, k, v, wants_q, wants_kv):
    """Return the memory for dq, dk and dv: empty tensors for those that are not wanted."""
    wanted = ((q, wants_q), (k, wants_kv), (v, wants_kv))
    return tuple(torch.empty_like(x) if wants else x.new_empty(0) for x, wants in wanted)
