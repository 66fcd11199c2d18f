"""One tile of keys for the 64 queries of a warpgroup: scores, mask, softmax, and the sum with V.

The matrix unit (WGMMA) reads K and V from shared memory and Q and P from registers or shared memory, and works on after
the instruction has been issued: what was begun is waited for where its result is needed.

Source: NVIDIA's PTX reference (wgmma); FlashAttention-3, section 3.2, https://arxiv.org/abs/2407.08608
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from flashlib.hopper_load import ROWS

# --- one tile of scores: mask and softmax ----------------------------------------------------------------------------


@gluon.jit
def _mask(s, first_m, first_n, seqlen_q, seqlen_k, OPTIONS: gl.constexpr):
    """Put the worst score where a query does not see a key. [ROWS, BLOCK_N]

    Column 8 a + 2 c + e: a and e number the registers of a thread and are constants of the code, c is its place among
    four. Compared apart, a score costs a comparison and a selection and no register for its column.
    """
    parts = s.reshape([ROWS, OPTIONS.block_n // 8, 4, 2])
    L: gl.constexpr = parts.type.layout
    i = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    a = gl.arange(0, OPTIONS.block_n // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    e = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    last = gl.full([ROWS], seqlen_k - 1, gl.int32, i.type.layout)
    if OPTIONS.causal:
        last = gl.minimum(last, i + seqlen_k - seqlen_q)
    # An instruction that LLVM must not run unasked: without it, it would mask every tile instead of branching.
    last = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [last - first_n], gl.int32, False, 1)
    seen = last[:, None, None, None] - 2 * c[None, None, :, None] >= 8 * a[None, :, None, None] + e[None, None, None, :]
    worst = float("inf") if OPTIONS.negative else float("-inf")
    return gl.convert_layout(gl.where(seen, parts, worst).reshape(s.shape), s.type.layout)


@gluon.jit
def _thread_sums(p):
    """Sum each row over the columns that one thread holds, without asking the other three. [ROWS, 4]"""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _hold(x):
    """Keep later waits behind the work that x comes from, and return x. [ROWS]

    NVIDIA's assembler moves a wait for the matrix unit up, in front of work that does not need it, but not over a store
    to shared memory. This one depends on x and never happens: no arithmetic gives this NaN.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never; .reg .b32 somewhere;
        mov.b32 somewhere, 0;
        setp.eq.u32 never, $2, 0x7FC0DEAD;
        setp.eq.or.u32 never, $3, 0x7FC0DEAD, never;
        @never st.volatile.shared.b32 [somewhere], $2;
        mov.b32 $0, $2; mov.b32 $1, $3;
        }""",
        "=r,=r,r,r",
        [x],
        gl.float32,
        False,
        2,
    )


@gluon.jit
def _softmax(s, m_i, l_i, qk_scale, SAFE: gl.constexpr, OPTIONS: gl.constexpr):
    """Return (p, new m_i, new l_i, alpha) of the online softmax, base 2; SAFE: a row may have seen no key yet.

    m_i is the best score before the scale, the least if that is negative. l_i is a sum per thread: the four that share
    a row add theirs up at the end.
    """
    m_new = gl.minimum(m_i, gl.min(s, 1)) if OPTIONS.negative else gl.maximum(m_i, gl.max(s, 1))
    if OPTIONS.hold:
        m_new = _hold(m_new)
    m_safe = m_new
    if SAFE:
        m_safe = gl.where(gl.abs(m_new) == float("inf"), 0.0, m_new)
    # One multiply-add and one exp2 a score.
    p = gl.exp2(s * qk_scale - (m_safe * qk_scale)[:, None])
    alpha = gl.exp2((m_i - m_safe) * qk_scale)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, l_i.type.layout))[:, None] + _thread_sums(p)
    return p, m_new, l_i, alpha


# --- the matrix unit -------------------------------------------------------------------------------------------------


@gluon.jit
def _scores(q, k_s, k_full, use, OPTIONS: gl.constexpr):
    """Begin S = Q Kᵀ for the K of this use, once it is there. [ROWS, BLOCK_N]"""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.block_n, 16])
    stage = use % OPTIONS.stages_k
    mbarrier.wait(k_full.index(stage), use // OPTIONS.stages_k & 1)
    k = k_s.index(stage).reshape([OPTIONS.block_n, k_s.shape[4]]).permute([1, 0])
    nothing = gl.full([ROWS, OPTIONS.block_n], 0.0, gl.float32, S)
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _weigh(p, v_s, v_full, use, acc, OPTIONS: gl.constexpr):
    """Begin acc += P V for the V of this use, once it is there. [ROWS, HEAD_DIM_V]"""
    stage = use % OPTIONS.stages_v
    mbarrier.wait(v_full.index(stage), use // OPTIONS.stages_v & 1)
    return warpgroup_mma(p, v_s.index(stage).reshape([OPTIONS.block_n, v_s.shape[4]]), acc, is_async=True)


@gluon.jit
def _await_turn(w: gl.constexpr, OPTIONS: gl.constexpr):
    """Wait until the warpgroup before this one has handed over; barriers 10 … 12 are not Triton's."""
    if OPTIONS.turns:
        gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [10 + w], gl.int32, False, 1)


@gluon.jit
def _pass_turn(w: gl.constexpr, OPTIONS: gl.constexpr):
    """Hand over to the next warpgroup: 128 threads arrive, and its 128 wait for them."""
    if OPTIONS.turns:
        to: gl.constexpr = 10 + (w + 1) % OPTIONS.warpgroups
        gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [to], gl.int32, False, 1)


@gluon.jit
def _step(w: gl.constexpr, t, use, state, q, rows, buffers, barriers, qk_scale, OPTIONS: gl.constexpr):
    """Go one tile of keys further: begin S of tile t and P V of tile t - 1; the softmax of t runs beside P V."""
    p, acc, m_i, l_i = state
    first_m, tiles_n, masked, seqlen_q, seqlen_k = rows
    _, k_s, v_s, _, _ = buffers
    _, _, k_full, k_empty, v_full, v_empty, _, _ = barriers
    _await_turn(w, OPTIONS)
    s = _scores(q, k_s, k_full, use, OPTIONS)
    acc = _weigh(p, v_s, v_full, use - 1, acc, OPTIONS)
    _pass_turn(w, OPTIONS)
    # All but one of what was begun is done, in the order it was begun: S is, P V may not be.
    s = warpgroup_mma_wait(1, deps=[s])
    if OPTIONS.causal and t < masked:
        s = _mask(s, first_m, (tiles_n - 1 - t) * OPTIONS.block_n, seqlen_q, seqlen_k, OPTIONS)
    # Behind the branch: an arrival waits for the four warps, and the softmax fills that time.
    mbarrier.arrive(k_empty.index(use % OPTIONS.stages_k), count=1)
    p_tile, m_i, l_i, alpha = _softmax(s, m_i, l_i, qk_scale, OPTIONS.causal, OPTIONS)
    # P is not named here: the assembler keeps the registers that the matrix unit reads, and a 16-bit tensor that comes
    # out of a wait takes a register for each half.
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index((use - 1) % OPTIONS.stages_v), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.convert_layout(p_tile.to(p.dtype), p.type.layout), acc, m_i, l_i
