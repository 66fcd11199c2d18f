"""The backward in one pass, to compare with `backward.py`: five products a tile and not seven, dQ by atomic additions.

A program owns a tile of keys, as in the library's dK/dV kernel, and adds its share of dQ to memory on its way. Many
programs add to the same numbers, in an order that a GPU does not fix, and floating-point sums depend on the order.

Source: FlashAttention-2, algorithm 2, and section 3.2 (atomic additions for dQ), https://arxiv.org/abs/2307.08691
"""

import torch

from flashlib import tiles
from flashlib.backward import DELTA_ROWS, _delta_kernel
from flashlib.device import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
_HEAD_DIMS = (16, 32, 64, 128)


@triton.jit
def _one_pass_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, order_ptr, seqlen_q, seqlen_k, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(seqlen_k, BLOCK_N)
    pid_bh = (tl.program_id(0) // tiles_n).to(tl.int64)
    # Stands for what a GPU does not promise: which tile of keys comes first.
    first_n = tl.load(order_ptr + tl.program_id(0) % tiles_n) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    keys = pid_bh * seqlen_k * HEAD_DIM + offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    inside_n = (offs_n < seqlen_k)[:, None]
    k = tl.load(k_ptr + keys, mask=inside_n, other=0.0)
    v = tl.load(v_ptr + keys, mask=inside_n, other=0.0)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)

    lo = tl.maximum(0, first_n + seqlen_q - seqlen_k) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for first_m in tl.range(lo, seqlen_q, BLOCK_M):
        offs_m = first_m + tl.arange(0, BLOCK_M)
        queries = pid_bh * seqlen_q * HEAD_DIM + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
        inside_m = offs_m < seqlen_q
        q = tl.load(q_ptr + queries, mask=inside_m[:, None], other=0.0)
        dout = tl.load(dout_ptr + queries, mask=inside_m[:, None], other=0.0)
        lse = tl.load(lse_ptr + pid_bh * seqlen_q + offs_m, mask=inside_m, other=float("inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
        delta = tl.load(delta_ptr + pid_bh * seqlen_q + offs_m, mask=inside_m, other=0.0)
        s = tl.dot(k, q.T, input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        p = tl.exp2((s * scale - lse[None, :]) * LOG2_E)
        seen = inside_n
        if CAUSAL:
            seen = seen & (offs_n[:, None] <= offs_m[None, :] + seqlen_k - seqlen_q)
        p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, dout.T, input_precision=PRECISION)
        ds = (p * (dp - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        dq = tl.dot(ds.T, k, input_precision=PRECISION)
        tl.atomic_add(dq_ptr + queries, dq * scale, mask=inside_m[:, None], sem="relaxed")

    tl.store(dk_ptr + keys, (dk * scale).to(k.dtype), mask=inside_n)
    tl.store(dv_ptr + keys, dv.to(v.dtype), mask=inside_n)


def backward_atomic(q, k, v, out, lse, dout, *, causal=False, scale=None, order=None, tile=None):
    """Compute the gradients of attention in one pass over the tiles, dq by atomic additions.

    Args:
        q, k, v, out, dout: (batch, nheads, seqlen, head_dim), contiguous, of one dtype: float16, bfloat16 or float32;
            head_dim 16, 32, 64 or 128, the same for all. bfloat16 needs a GPU.
        lse: (batch, nheads, seqlen_q), float32, from the forward pass.
        causal, scale: as in `flash_attention`.
        order: the tiles of keys in the order in which programs take them; None for 0, 1, 2, …. A GPU still runs many
            at once; the interpreter runs one after the other.
        tile: `tiles.Tile`; None for 32 queries by 32 keys.

    Returns:
        (dq, dk, dv) in the dtype of q. On a GPU the bits of dq may differ from run to run.

    Raises:
        ValueError: a tensor or the order is not as above.

    Source: FlashAttention-2, algorithm 2, https://arxiv.org/abs/2307.08691
    """
    tile = tiles.Tile(32, 32, 4, 1) if tile is None else tile
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out), ("dout", dout)):
        if not x.is_contiguous() or x.shape[3] != q.shape[3] or x.dtype != q.dtype:
            raise ValueError(
                f"{name} must be contiguous, with the head_dim and dtype of q, got {tuple(x.shape)}, {x.dtype}"
            )
    if q.shape[3] not in _HEAD_DIMS:
        raise ValueError(f"q must have a head_dim of {_HEAD_DIMS}, got {q.shape[3]}")
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        raise ValueError("q must not be bfloat16 on the CPU: the interpreter cannot compute in it")
    (batch, nheads, seqlen_q, head_dim), seqlen_k = q.shape, k.shape[2]
    tiles_n = triton.cdiv(seqlen_k, tile.block_n)
    order = list(range(tiles_n)) if order is None else list(order)
    if sorted(order) != list(range(tiles_n)):
        raise ValueError(f"order must hold each of the {tiles_n} tiles of keys once, got {order}")
    # The sum needs float32 and a start at zero; dk and dv are written once and need neither.
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk, dv, delta = torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
    with tiles.on_device_of(q):
        _delta_kernel[(triton.cdiv(seqlen_q, DELTA_ROWS) * batch * nheads,)](
            out, dout, None, None, delta, out.stride(), dout.stride(), (0, 0, 0), nheads, seqlen_q,
            HEAD_DIM_V=head_dim, COLS_V=head_dim, BLOCK_M=DELTA_ROWS, WIDE=False,
        )  # fmt: skip
        _one_pass_kernel[(tiles_n * batch * nheads,)](
            q, k, v, dout, lse, delta, dq, dk, dv, torch.tensor(order, dtype=torch.int32, device=q.device),
            seqlen_q, seqlen_k, head_dim**-0.5 if scale is None else float(scale),
            CAUSAL=causal, HEAD_DIM=head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            # Accuracy of float32 in the matrix units, as in the library.
            PRECISION="tf32x3" if q.is_cuda else "ieee",
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return dq.to(q.dtype), dk, dv
