"""The gradient of a bias that is added to the scores, in one kernel, without a matrix of scores beyond the result.

A bias may be the same for all batches, heads, queries or keys; its gradient is then a sum over them. A program owns a
tile of the result and walks over all that shares it, so the sum has one owner and one order: the same bits every run.

Source: FlashAttention-2, algorithm 2 (the gradient of the scores), https://arxiv.org/abs/2307.08691
"""

import torch

from flashlib import tiles
from flashlib.backward import load_delta, load_lse, recompute_p
from flashlib.device import tl, triton
from flashlib.dropout import thinned
from flashlib.mods import hook_gradient, key_range
from flashlib.tiles import load_tile, spans


@triton.jit
def _bias_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dbias_ptr,
    stride_q, stride_k, stride_v, stride_dout, stride_dbias, shape, batch, aux, score_aux,
    left, right, softcap, alibi, bias, dropout, packed, nheads, group, rows_q, rows_k, scale, qk_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr, GRAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # shape is that of the result: what has length 1 there belongs to one program, else every tile has its own.
    tiles_n = tl.cdiv(shape[3], BLOCK_N)
    tiles_m = tl.cdiv(shape[2], BLOCK_M)
    own_n = tl.program_id(0) % tiles_n * BLOCK_N
    own_m = tl.program_id(0) // tiles_n % tiles_m * BLOCK_M
    own_h = tl.program_id(0) // (tiles_n * tiles_m) % shape[1]
    own_b = tl.program_id(0) // (tiles_n * tiles_m) // shape[1]
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    dbias = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for step_b in tl.range(0, batch if shape[0] == 1 else 1):
        b = own_b + step_b
        start_q, seqlen_q, start_k, seqlen_k = spans(packed, b, rows_q, rows_k)
        for step_h in tl.range(0, nheads if shape[1] == 1 else 1):
            h = own_h + step_h
            h_kv = h // group
            row = (h if packed is not None else b * nheads + h).to(tl.int64) * rows_q + start_q
            end = seqlen_q if shape[2] == 1 else tl.minimum(own_m + BLOCK_M, seqlen_q)
            for first_m in tl.range(own_m, end, BLOCK_M):
                offs_m = first_m + tl.arange(0, BLOCK_M)
                q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, False, WIDE, start_q)
                dout = load_tile(
                    dout_ptr, stride_dout, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, False, WIDE, start_q
                )
                lse = load_lse(lse_ptr, row, offs_m, seqlen_q)[:, None]
                delta = load_delta(delta_ptr, row, offs_m, seqlen_q)[:, None]
                end_m = tl.minimum(first_m + BLOCK_M, seqlen_q)
                lo, _, _, hi = key_range(
                    b, h, first_m, end_m, seqlen_q, seqlen_k, left, right, aux, BLOCK_N, CAUSAL, MASK, KEYS
                )
                lo = tl.maximum(lo, own_n)
                hi = hi if shape[3] == 1 else tl.minimum(hi, own_n + BLOCK_N)
                for first_n in tl.range(lo, hi, BLOCK_N):
                    offs_n = first_n + tl.arange(0, BLOCK_N)
                    i, j = offs_m[:, None], offs_n[None, :]
                    k = load_tile(
                        k_ptr, stride_k, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, False, WIDE, start_k
                    )
                    v = load_tile(
                        v_ptr, stride_v, b, h_kv, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, False, WIDE, start_k
                    )
                    s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC)
                    dp = tl.dot(dout, v.T, input_precision=PRECISION, out_dtype=ACC)
                    p = recompute_p(
                        s, lse, b, h, i, j, seqlen_q, seqlen_k, left, right, aux, softcap, alibi, bias,
                        score_aux, scale, qk_scale, True, CAUSAL, MASK, SCORE, q.dtype == tl.float32,
                    )  # fmt: skip
                    dbias += hook_gradient(
                        p * (thinned(dp, dropout, b, h, i, j) - delta), s, b, h, i, j, seqlen_q, seqlen_k, scale,
                        softcap, alibi, bias, score_aux, GRAD, q.dtype == tl.float32,
                    )  # fmt: skip

    offs_m = own_m + tl.arange(0, BLOCK_M)
    offs_n = own_n + tl.arange(0, BLOCK_N)
    if shape[2] == 1:
        dbias = tl.where(offs_m[:, None] == 0, tl.sum(dbias, 0)[None, :], 0.0)
    if shape[3] == 1:
        dbias = tl.where(offs_n[None, :] == 0, tl.sum(dbias, 1)[:, None], 0.0)
    ptrs = dbias_ptr + own_b.to(tl.int64) * stride_dbias[0] + own_h.to(tl.int64) * stride_dbias[1]
    ptrs = ptrs + offs_m.to(tl.int64)[:, None] * stride_dbias[2] + offs_n.to(tl.int64)[None, :] * stride_dbias[3]
    inside = (offs_m < shape[2])[:, None] & (offs_n < shape[3])[None, :]
    tl.store(ptrs, dbias.to(dbias_ptr.dtype.element_ty), mask=inside)


def gradient(q, k, v, dout, lse, delta, dbias, call):
    """Fill dbias, (batch, nheads, seqlen_q, seqlen_k) or 1 in place of any of them, from what the backward pass has.

    Args:
        q, k, v, dout, lse, delta: as in `backward.gradients`; delta is that of its first kernel.
        dbias: where the gradient goes; any strides.
        call: `options.Call`.
    """
    if not dbias.numel():
        return
    architecture = tiles.architecture_of(q.device)
    columns = tiles.columns_of(q.shape[3], v.shape[3], q.element_size())
    block = 64 if architecture >= 80 and q.element_size() == 2 and max(columns) <= 128 else 32
    strides = q.stride()[2:] + k.stride()[2:] + v.stride()[2:] + dout.stride()[2:]
    # The interpreter stores bfloat16 wrongly: it gets float32 to write to.
    into = torch.empty_like(dbias, dtype=lse.dtype) if tiles.pointer(dbias) is not dbias else dbias
    batch = q.shape[0] if call.packed is None else call.packed[2]
    programs = dbias.shape[0] * dbias.shape[1] * -(-dbias.shape[2] // block) * -(-dbias.shape[3] // block)
    arguments = (
        q, k, v, dout, lse, delta, into, *call.strides(q, k, v, dout), into.stride(),
        tuple(dbias.shape), batch, call.aux, call.score_aux, *call.window, *call.changes,
        call.dropout, call.packed, *call.sizes,
    )  # fmt: skip
    constants = {
        "CAUSAL": call.causal, "MASK": call.mask[0], "KEYS": call.mask[1], "SCORE": call.score[0],
        "GRAD": call.score[1], "HEAD_DIM": q.shape[3], "HEAD_DIM_V": v.shape[3], "COLS": columns[0],
        "COLS_V": columns[1], "BLOCK_M": block, "BLOCK_N": block,
        "PRECISION": "tf32x3" if architecture >= 80 else "ieee", "WIDE": tiles.wide(strides),
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    tiles.launch(_bias_gradient_kernel, programs, arguments, constants)
    if into is not dbias:
        dbias.copy_(into)
