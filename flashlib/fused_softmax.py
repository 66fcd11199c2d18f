"""First kernels that matter: a vector sum, the softmax of each row in one kernel and in four, and a tile of QKᵀ.

A program loads a block once, does everything that it can with it on the chip, and stores the result once. That is what
"fused" means: the softmax in four kernels moves three times the bytes of the one that is fused.

Source: Milakov and Gimelshein 2018 (the sum and the maximum of a row in one pass), https://arxiv.org/abs/1805.02867;
Tillet, Kung and Cox 2019 (programs that work on blocks), https://doi.org/10.1145/3315508.3329973.
"""

import math

import torch

from flashlib import device
from flashlib.device import tl, triton

# The interpreter computes wrongly in bfloat16: there kernels turn what they load into float32 at once.
INTERPRETED = tl.constexpr(device.interpreting())
# Longer rows are taken in pieces of this many numbers: a program has only so many registers.
LONGEST_BLOCK = 8192
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_PROGRAMS_Y = 65_535


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, stride_x, stride_y, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    # 64 bits: a position times a stride may pass 2³¹.
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = offs < n
    x = tl.load(x_ptr + offs * stride_x, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs * stride_y, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, x + y, mask=mask)


@triton.jit
def _softmax_kernel(s_ptr, p_ptr, stride_s, stride_p, seqlen_k, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
    mask_n = offs_n < seqlen_k
    s_row = s_ptr + row * stride_s[0] + offs_n * stride_s[1]
    s = tl.load(s_row, mask=mask_n, other=float("-inf")).to(tl.float32)
    m = tl.max(s, axis=0)
    # A row of -inf only: subtract 0, for -inf minus -inf is NaN.
    e = tl.exp(s - tl.where(m == float("-inf"), 0.0, m))
    l = tl.sum(e, axis=0)
    p = e / tl.where(l == 0.0, 1.0, l)
    tl.store(p_ptr + row * stride_p[0] + offs_n * stride_p[1], p, mask=mask_n)


@triton.jit
def _softmax_loop_kernel(s_ptr, p_ptr, stride_s, stride_p, seqlen_k, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s_row, p_row = s_ptr + row * stride_s[0], p_ptr + row * stride_p[0]
    m_i = float("-inf")
    l_i = 0.0
    for start in range(0, seqlen_k, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
        s = tl.load(s_row + offs_n * stride_s[1], mask=offs_n < seqlen_k, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m_i, tl.max(s, axis=0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_i = tl.exp(m_i - m_safe) * l_i + tl.sum(tl.exp(s - m_safe), axis=0)
        m_i = m_new
    m_safe = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    for start in range(0, seqlen_k, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
        s = tl.load(s_row + offs_n * stride_s[1], mask=offs_n < seqlen_k, other=float("-inf")).to(tl.float32)
        tl.store(p_row + offs_n * stride_p[1], tl.exp(s - m_safe) / l_safe, mask=offs_n < seqlen_k)


@triton.jit
def _scores_kernel(
    q_ptr,
    k_ptr,
    s_ptr,
    stride_q,
    stride_k,
    stride_s,
    seqlen_q,
    seqlen_k,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pid_m, pid_n = tl.program_id(0), tl.program_id(1)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # [BLOCK_D]
    mask_m, mask_n, mask_d = offs_m < seqlen_q, offs_n < seqlen_k, offs_d < HEAD_DIM
    # [BLOCK_M, BLOCK_D]
    q_tile = q_ptr + offs_m[:, None] * stride_q[0] + offs_d[None, :] * stride_q[1]
    q = tl.load(q_tile, mask=mask_m[:, None] & mask_d[None, :], other=0.0)
    # [BLOCK_D, BLOCK_N]: the offsets transpose K, nothing is moved for it.
    k_tile = k_ptr + offs_n[None, :] * stride_k[0] + offs_d[:, None] * stride_k[1]
    k = tl.load(k_tile, mask=mask_n[None, :] & mask_d[:, None], other=0.0)
    if INTERPRETED:
        q, k = q.to(tl.float32), k.to(tl.float32)
    s = scale * tl.dot(q, k, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    s_tile = s_ptr + offs_m[:, None] * stride_s[0] + offs_n[None, :] * stride_s[1]
    tl.store(s_tile, s, mask=mask_m[:, None] & mask_n[None, :])


# --- the softmax in four kernels, for comparison ---------------------------------------------------------------------


@triton.jit
def _row_max_kernel(s_ptr, m_ptr, stride_s, seqlen_k, OTHER: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
    s_row = s_ptr + row * stride_s[0] + offs_n * stride_s[1]
    s = tl.load(s_row, mask=offs_n < seqlen_k, other=OTHER).to(tl.float32)
    tl.store(m_ptr + row, tl.max(s, axis=0))


@triton.jit
def _exp_kernel(s_ptr, m_ptr, e_ptr, stride_s, stride_e, seqlen_k, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
    mask_n = offs_n < seqlen_k
    s_row = s_ptr + row * stride_s[0] + offs_n * stride_s[1]
    s = tl.load(s_row, mask=mask_n, other=float("-inf")).to(tl.float32)
    m = tl.load(m_ptr + row)
    e = tl.exp(s - tl.where(m == float("-inf"), 0.0, m))
    tl.store(e_ptr + row * stride_e[0] + offs_n * stride_e[1], e, mask=mask_n)


@triton.jit
def _row_sum_kernel(e_ptr, l_ptr, stride_e, seqlen_k, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
    e_row = e_ptr + row * stride_e[0] + offs_n * stride_e[1]
    e = tl.load(e_row, mask=offs_n < seqlen_k, other=0.0).to(tl.float32)
    tl.store(l_ptr + row, tl.sum(e, axis=0))


@triton.jit
def _divide_kernel(e_ptr, l_ptr, p_ptr, stride_e, stride_p, seqlen_k, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
    mask_n = offs_n < seqlen_k
    e = tl.load(e_ptr + row * stride_e[0] + offs_n * stride_e[1], mask=mask_n, other=0.0).to(tl.float32)
    l = tl.load(l_ptr + row)
    p = e / tl.where(l == 0.0, 1.0, l)
    tl.store(p_ptr + row * stride_p[0] + offs_n * stride_p[1], p, mask=mask_n)


# --- launchers -------------------------------------------------------------------------------------------------------


def add(x, y, *, block=1024):
    """Compute x + y, rounded once, with a Triton kernel.

    Args:
        x, y: tensors (n,) of one dtype, float16, bfloat16 or float32, any stride, where kernels run
            (`device.kernel_device()`).
        block: elements of one program, a power of two.

    Returns:
        tensor (n,), dtype of x.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        RuntimeError: x lies where no kernel can run on it.
    """
    _check(1, x=x, y=y)
    if x.shape != y.shape:
        raise ValueError(f"y must have the shape of x {tuple(x.shape)}, got {tuple(y.shape)}")
    _check_block("block", block)
    out = _new(x.shape, x.dtype, x)
    if len(x):
        with torch.cuda.device_of(x):
            _add_kernel[(triton.cdiv(len(x), block),)](x, y, out, x.stride(0), y.stride(0), len(x), BLOCK=block)
    return out.to(x.dtype)


def softmax(s, *, block=None):
    """Compute the softmax of each row in one kernel: a row is read once if a block holds it, otherwise twice.

    Args:
        s: tensor (seqlen_q, seqlen_k) of float16, bfloat16 or float32, any strides, where kernels run.
        block: numbers that a program holds, a power of two; None takes the row, at most LONGEST_BLOCK.

    Returns:
        tensor (seqlen_q, seqlen_k), dtype of s; computed in float32. A row of -inf only gives 0.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        RuntimeError: s lies where no kernel can run on it.

    Source:
        Milakov and Gimelshein 2018, Algorithm 3, for rows longer than a block.
    """
    _check(2, s=s)
    if block is None:
        block = min(triton.next_power_of_2(max(1, s.shape[1])), LONGEST_BLOCK)
    _check_block("block", block)
    p = _new(s.shape, s.dtype, s)
    if s.numel():
        kernel = _softmax_kernel if s.shape[1] <= block else _softmax_loop_kernel
        with torch.cuda.device_of(s):
            kernel[(len(s),)](s, p, s.stride(), p.stride(), s.shape[1], BLOCK_N=block, num_warps=_warps(block))
    return p.to(s.dtype)


def softmax_unfused(s):
    """Compute the softmax of each row as a chain of four kernels, each of which reads and writes slow memory.

    Args:
        s: tensor (seqlen_q, seqlen_k) of float16, bfloat16 or float32, any strides, where kernels run; its rows must
            fit in a block: seqlen_k is at most LONGEST_BLOCK.

    Returns:
        tensor (seqlen_q, seqlen_k), dtype of s; the exponentials between the kernels are rounded to it too. A row of
        -inf only gives 0.

    Raises:
        ValueError: s has the wrong shape, dtype or device.
        RuntimeError: s lies where no kernel can run on it.
    """
    _check(2, s=s)
    if s.shape[1] > LONGEST_BLOCK:
        raise ValueError(f"s must have rows of at most {LONGEST_BLOCK}, got {s.shape[1]}")
    e, p = _new(s.shape, s.dtype, s), _new(s.shape, s.dtype, s)
    m, l = _new(s.shape[:1], torch.float32, s), _new(s.shape[:1], torch.float32, s)
    if s.numel():
        grid, n, block = (len(s),), s.shape[1], triton.next_power_of_2(s.shape[1])
        options = {"BLOCK_N": block, "num_warps": _warps(block)}
        with torch.cuda.device_of(s):
            _row_max_kernel[grid](s, m, s.stride(), n, OTHER=float("-inf"), **options)
            _exp_kernel[grid](s, m, e, s.stride(), e.stride(), n, **options)
            _row_sum_kernel[grid](e, l, e.stride(), n, **options)
            _divide_kernel[grid](e, l, p, e.stride(), p.stride(), n, **options)
    return p.to(s.dtype)


def scores(q, k, *, scale=None, block_m=None, block_n=None):
    """Compute the scores scale · QKᵀ of one head; each program computes one tile of them.

    Args:
        q, k: tensors (seqlen_q, head_dim) and (seqlen_k, head_dim) of one dtype, float16, bfloat16 or float32, any
            strides, where kernels run; head_dim is 1 to 256.
        scale: number; None means 1/sqrt(head_dim).
        block_m, block_n: rows and columns of a tile, powers of two of at least 16; None means 64, and 32 for float32.

    Returns:
        tensor (seqlen_q, seqlen_k), float32.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value.
        RuntimeError: q lies where no kernel can run on it.
    """
    _check(2, q=q, k=k)
    if q.shape[1] != k.shape[1] or not 1 <= q.shape[1] <= 256:
        raise ValueError(f"q and k must have one head_dim of 1 to 256, got {q.shape[1]} and {k.shape[1]}")
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    # Float32 blocks are twice as large: at 64 rows and head_dim 256 they would not fit in a consumer card's 99 KB.
    side = 32 if q.dtype == torch.float32 else 64
    block_m, block_n = (side if block is None else block for block in (block_m, block_n))
    _check_block("block_m", block_m, least=16)
    _check_block("block_n", block_n, least=16)
    seqlen_q, seqlen_k, head_dim = len(q), len(k), q.shape[1]
    grid = triton.cdiv(seqlen_q, block_m), triton.cdiv(seqlen_k, block_n)
    if grid[1] > _MOST_PROGRAMS_Y:
        raise ValueError(f"k must have at most {_MOST_PROGRAMS_Y} tiles of block_n rows, got {grid[1]}")
    scale = 1 / math.sqrt(head_dim) if scale is None else float(scale)
    # tl.dot multiplies sides that are powers of two, of at least 16.
    block_d = max(16, triton.next_power_of_2(head_dim))
    s = torch.empty(seqlen_q, seqlen_k, dtype=torch.float32, device=q.device)
    if s.numel():
        with torch.cuda.device_of(q):
            _scores_kernel[grid](
                *(q, k, s, q.stride(), k.stride(), s.stride(), seqlen_q, seqlen_k, scale),
                HEAD_DIM=head_dim,
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                BLOCK_D=block_d,
            )
    return s


def _check(ndim, **tensors):
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.ndim != ndim:
            got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of {ndim} dimension{'s' * (ndim > 1)}, got {got}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} must have dtype float16, bfloat16 or float32, got {x.dtype}")
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} must have dtype and device of {first_name} ({first.dtype}, {first.device}), "
                f"got {x.dtype}, {x.device}"
            )
    device.check_launch(first, first_name)


def _check_block(name, block, least=1):
    if not isinstance(block, int) or isinstance(block, bool) or block < least or block & (block - 1):
        bound = f" of at least {least}" if least > 1 else ""
        raise ValueError(f"{name} must be a power of two{bound}, got {block!r}")


def _new(shape, dtype, like):
    # The interpreter cuts bfloat16 off where it should round: there kernels store float32, and PyTorch rounds once.
    if INTERPRETED.value and dtype == torch.bfloat16:
        dtype = torch.float32
    return torch.empty(shape, dtype=dtype, device=like.device)


def _warps(block):
    return min(16, max(1, block // 512))
