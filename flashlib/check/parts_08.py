"""Kernels around the parts of a kernel that chapter 08 asks for: they load a tile, call the reader's function, store.

Apart from `ex_08`, because that module has to be importable where there is no Triton.
"""

from flashlib.device import tl, triton


@triton.jit
def hide_kernel(
    s_ptr, out_ptr, first_m, first_n, seqlen_q, seqlen_k,
    HIDE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    s = HIDE(tl.load(s_ptr + tile), first_m, first_n, seqlen_q, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)
    tl.store(out_ptr + tile, s)


@triton.jit
def update_kernel(
    m_ptr, l_ptr, acc_ptr, s_ptr, v_ptr, m_out_ptr, l_out_ptr, acc_out_ptr, qk_scale,
    UPDATE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, SIDE)
    tile = row[:, None] * SIDE + row[None, :]
    m_i = tl.load(m_ptr + row)
    l_i = tl.load(l_ptr + row)
    acc = tl.load(acc_ptr + tile)
    m_i, l_i, acc = UPDATE(m_i, l_i, acc, tl.load(s_ptr + tile), tl.load(v_ptr + tile), qk_scale)
    tl.store(m_out_ptr + row, m_i)
    tl.store(l_out_ptr + row, l_i)
    tl.store(acc_out_ptr + tile, acc)
