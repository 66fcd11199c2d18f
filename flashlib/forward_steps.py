"""The forward kernel, grown in seven steps from one tile to the loop of `flashlib.forward`.

Each step is a whole kernel that differs from the one before by one idea, so that its diff is the lesson and its time is
the price of that idea. Chapter 08 walks through them; the last computes what `flashlib.forward` does without options.

Source: FlashAttention-2, algorithm 1 and section 3.2, https://arxiv.org/abs/2307.08691
"""

import math

import torch

from flashlib import device
from flashlib.device import tl, triton
from flashlib.tiles import load_tile, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEAD_DIMS = (16, 32, 64, 128, 256)


# --- the kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def _one_tile_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stride_q, stride_k, stride_v, stride_out, nheads, seqlen_q, seqlen_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_bh = tl.program_id(0)
    b = pid_bh // nheads
    h = pid_bh % nheads
    q = load_tile(q_ptr, stride_q, b, h, 0, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    k = load_tile(k_ptr, stride_k, b, h, 0, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
    s = tl.dot(q, k.T, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
    m = tl.max(s, 1)
    p = tl.exp(s - m[:, None])
    l = tl.sum(p, 1)
    v = load_tile(v_ptr, stride_v, b, h, 0, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
    acc = tl.dot(p.to(v.dtype), v, input_precision="ieee")  # [BLOCK_M, HEAD_DIM]
    out = acc * (1.0 / l)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, 0, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)


@triton.jit
def _two_loops_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stride_q, stride_k, stride_v, stride_out, nheads, seqlen_q, seqlen_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_bh = tl.program_id(0)
    b = pid_bh // nheads
    h = pid_bh % nheads
    for first_m in tl.range(0, seqlen_q, BLOCK_M):
        q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        for first_n in tl.range(0, seqlen_k, BLOCK_N):
            k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
            s = tl.dot(q, k.T, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
            m_new = tl.maximum(m_i, tl.max(s, 1))
            p = tl.exp(s - m_new[:, None])
            alpha = tl.exp(m_i - m_new)
            l_i = l_i * alpha + tl.sum(p, 1)
            acc = acc * alpha[:, None]
            v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            m_i = m_new
        out = acc * (1.0 / l_i)[:, None]
        store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)


@triton.jit
def _parallel_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stride_q, stride_k, stride_v, stride_out, nheads, seqlen_q, seqlen_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M

    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first_n in tl.range(0, seqlen_k, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        s = tl.dot(q, k.T, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new

    out = acc * (1.0 / l_i)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)


@triton.jit
def _tail_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stride_q, stride_k, stride_v, stride_out, nheads, seqlen_q, seqlen_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M

    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first_n in tl.range(0, seqlen_k, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        s = tl.dot(q, k.T, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        offs_n = first_n + tl.arange(0, BLOCK_N)
        s = tl.where(offs_n[None, :] < seqlen_k, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new

    out = acc * (1.0 / l_i)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)


@triton.jit
def _base2_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stride_q, stride_k, stride_v, stride_out, nheads, seqlen_q, seqlen_k, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M

    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first_n in tl.range(0, seqlen_k, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        offs_n = first_n + tl.arange(0, BLOCK_N)
        s = tl.where(offs_n[None, :] < seqlen_k, s, float("-inf"))
        # A positive scale commutes with max: one product a row, and the exponent is one multiply-add an element.
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
        p = tl.exp2(s * qk_scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new

    out = acc * (1.0 / l_i)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)


@triton.jit
def _lse_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_out,
    nheads, seqlen_q, seqlen_k, qk_scale, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)

    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first_n in tl.range(0, seqlen_k, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        offs_n = first_n + tl.arange(0, BLOCK_N)
        s = tl.where(offs_n[None, :] < seqlen_k, s, float("-inf"))
        # A positive scale commutes with max: one product a row, and the exponent is one multiply-add an element.
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
        p = tl.exp2(s * qk_scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new

    out = acc * (1.0 / l_i)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)
    lse = (m_i + tl.log2(l_i)) * LN_2
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)


@triton.jit
def _causal_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_out,
    nheads, seqlen_q, seqlen_k, qk_scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)

    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first_n in tl.range(0, seqlen_k, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        offs_n = first_n + tl.arange(0, BLOCK_N)
        seen = offs_n[None, :] < seqlen_k
        if CAUSAL:
            seen = seen & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
        s = tl.where(seen, s, float("-inf"))
        # A positive scale commutes with max: one product a row, and the exponent is one multiply-add an element.
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * qk_scale - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new

    # A row that sees no key has l = 0: out 0 and lse -inf, not 0/0.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc * (1.0 / l_safe)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)
    lse = (m_i + tl.log2(l_safe)) * LN_2
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)


@triton.jit
def _skip_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_out,
    nheads, seqlen_q, seqlen_k, qk_scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(seqlen_q, BLOCK_M)
    pid_bh = tl.program_id(0) // tiles_m
    pid_m = tl.program_id(0) % tiles_m
    if CAUSAL:
        # The last tiles of queries see the most keys: longest first, so that none is left alone at the end.
        pid_m = tiles_m - 1 - pid_m
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)

    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)

    # Every query of the tile sees the keys before hi_full, none sees a key from hi on.
    hi_full = seqlen_k
    hi = seqlen_k
    if CAUSAL:
        hi_full = tl.minimum(hi_full, first_m + 1 + seqlen_k - seqlen_q)
        hi = tl.minimum(hi, tl.minimum(first_m + BLOCK_M, seqlen_q) + seqlen_k - seqlen_q)
    hi_full = tl.maximum(hi_full, 0) // BLOCK_N * BLOCK_N
    for first_n in tl.range(0, hi, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        offs_n = first_n + tl.arange(0, BLOCK_N)
        if first_n >= hi_full:
            seen = offs_n[None, :] < seqlen_k
            if CAUSAL:
                seen = seen & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
            s = tl.where(seen, s, float("-inf"))
        # A positive scale commutes with max: one product a row, and the exponent is one multiply-add an element.
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * qk_scale - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new

    # A row that sees no key has l = 0: out 0 and lse -inf, not 0/0.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc * (1.0 / l_safe)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)
    lse = (m_i + tl.log2(l_safe)) * LN_2
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)


# --- one launcher for all ------------------------------------------------------------------------------------------

STEPS = {
    "one_tile": _one_tile_kernel,
    "two_loops": _two_loops_kernel,
    "parallel": _parallel_kernel,
    "tail": _tail_kernel,
    "base2": _base2_kernel,
    "lse": _lse_kernel,
    "causal": _causal_kernel,
    "skip": _skip_kernel,
}
_NAMES = list(STEPS)


def has(step, feature):
    """Tell whether a step is the one called `feature`, or comes after it."""
    return _NAMES.index(step) >= _NAMES.index(feature)


def forward(
    q, k, v, *, step="skip", causal=False, scale=None, return_lse=False,
    block_m=32, block_n=32, num_warps=4, num_stages=1, max_registers=None,
):  # fmt: skip
    """Compute attention with the kernel of one step; what a step does not handle yet comes out wrong, as it should.

    Args:
        q, k, v: (batch, nheads, seqlen, head_dim) of one dtype, float16, bfloat16 or float32, any strides, where
            kernels run; head_dim 16, 32, 64, 128 or 256, the same for all three.
        step: one of STEPS.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q; from the step "causal" on.
        scale: a number, positive from the step "base2" on; None means 1/sqrt(head_dim).
        return_lse: also return the log-sum-exp of each row; from the step "lse" on.
        block_m, block_n: rows of a tile of queries and of keys, powers of two of at least 16.
        num_warps, num_stages: warps of a program, and how many tiles of the loop are in flight.
        max_registers: at most how many registers a thread may use; None leaves that to the compiler. The interpreter
            ignores all three.

    Returns:
        out like q, or (out, lse), lse (batch, nheads, seqlen_q) float32. From the step "causal" on a row that sees no
        key has out 0 and lse -inf. Before the step "tail", what lies past the last key counts as keys with score 0.

    Raises:
        ValueError: an argument is not as above, or the step cannot do it.
        RuntimeError: q lies where no kernel can run on it.
    """
    _check(q, k, v, step, causal, scale, return_lse, block_m, block_n)
    device.check_launch(q, "q")
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # The interpreter cannot compute in bfloat16: compute in float32, round once.
        options = {"step": step, "causal": causal, "scale": scale, "block_m": block_m, "block_n": block_n}
        result = forward(q.float(), k.float(), v.float(), return_lse=return_lse, **options)
        return (result[0].to(q.dtype), result[1]) if return_lse else result.to(q.dtype)
    batch, nheads, seqlen_q, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else float(scale)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if has(step, "lse") else None
    if out.numel() == 0:
        return (out, lse) if return_lse else out
    programs = triton.cdiv(seqlen_q, block_m) if has(step, "parallel") else 1
    tensors = (q, k, v, out) if lse is None else (q, k, v, out, lse)
    constants = {"CAUSAL": causal} if has(step, "causal") else {}
    with torch.cuda.device_of(q):
        STEPS[step][(programs * batch * nheads,)](
            *tensors, q.stride(), k.stride(), v.stride(), out.stride(), nheads, seqlen_q, k.shape[2],
            scale * LOG2_E.value if has(step, "base2") else scale,
            HEAD_DIM=head_dim, BLOCK_M=block_m, BLOCK_N=block_n, **constants,
            num_warps=num_warps, num_stages=num_stages, maxnreg=max_registers,
        )  # fmt: skip
    return (out, lse) if return_lse else out


def _check(q, k, v, step, causal, scale, return_lse, block_m, block_n):
    if step not in STEPS:
        raise ValueError(f"step must be one of {_NAMES}, got {step!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        shape = tuple(x.shape)
        if len(shape) != 4 or shape[:2] != q.shape[:2] or shape[3] != q.shape[3] or shape[3] not in _HEAD_DIMS:
            raise ValueError(f"{name} must be (batch, nheads, seqlen, head_dim), head_dim {_HEAD_DIMS}, got {shape}")
        if x.dtype not in _DTYPES or x.dtype != q.dtype:
            raise ValueError(f"{name} must have dtype float16, bfloat16 or float32, that of q, got {x.dtype}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v must have the seqlen of k, {k.shape[2]}, got {v.shape[2]}")
    for name, block, length in (("block_m", block_m, q.shape[2]), ("block_n", block_n, k.shape[2])):
        if not isinstance(block, int) or block < 16 or block & (block - 1):
            raise ValueError(f"{name} must be a power of two of at least 16, got {block!r}")
        if step == "one_tile" and length > block:
            raise ValueError(f"{name} must be at least {length} in the step one_tile, got {block}")
    if causal and not has(step, "causal"):
        raise ValueError(f"causal must be False in the step {step}, got {causal!r}")
    if return_lse and not has(step, "lse"):
        raise ValueError(f"return_lse must be False in the step {step}, got {return_lse!r}")
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    if scale is not None and scale <= 0 and has(step, "base2"):
        raise ValueError(f"scale must be positive in the step {step}, got {scale!r}")
