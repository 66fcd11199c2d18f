"""FlashAttention's forward pass for Hopper GPUs, in Gluon: copy engine, matrix unit and softmax work at the same time.

A program is three or four groups of warps. One of a single warp asks the copy engine for tiles (`hopper_load`); each of
the others, a warpgroup of four warps, owns 64 queries and goes with them from tile to tile of the keys (`hopper_tile`).
They share the tiles of K and V, and tell each other through barriers in shared memory what is there and what is free.

Source: FlashAttention-3, https://arxiv.org/abs/2407.08608
"""

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashlib import tiles
from flashlib.hopper_load import ROWS, _hear, _load
from flashlib.hopper_tile import _await_turn, _mask, _pass_turn, _scores, _softmax, _step, _thread_sums, _weigh

LOG2_E = 1.4426950408889634
LN_2 = gl.constexpr(0.6931471805599453)
# Triton 3.9 renamed it.
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# For `_counters`: device and stream -> tensor.
_COUNTERS = {}


class Options(NamedTuple):
    """What the compiled code depends on, a constant inside the kernel.

    causal; negative: the scale is below 0; warpgroups: 2 or 3, of 64 queries each; block_n: keys of a tile; stages_k,
    stages_v: tiles of K and of V that fit in shared memory; turns: the warpgroups take turns at the matrix unit; hold:
    the wait for P V is held behind the maximum of the scores.
    """

    causal: bool
    negative: bool
    warpgroups: int
    block_n: int
    stages_k: int
    stages_v: int
    turns: bool
    hold: bool


# --- a warpgroup -----------------------------------------------------------------------------------------------------


@gluon.jit
def _skip(w: gl.constexpr, use, count, barriers, OPTIONS: gl.constexpr):
    """Let `count` tiles of K and V pass that no query of this warpgroup sees; the loader waits for everybody."""
    _, _, k_full, k_empty, v_full, v_empty, _, _ = barriers
    for t in range(count):
        k_stage = (use + t) % OPTIONS.stages_k
        v_stage = (use + t) % OPTIONS.stages_v
        _await_turn(w, OPTIONS)
        _pass_turn(w, OPTIONS)
        mbarrier.wait(k_full.index(k_stage), (use + t) // OPTIONS.stages_k & 1)
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        mbarrier.wait(v_full.index(v_stage), (use + t) // OPTIONS.stages_v & 1)
        mbarrier.arrive(v_empty.index(v_stage), count=1)


@gluon.jit
def _tile(
    w: gl.constexpr, n, use, q_s, rows, skipped, buffers, barriers, qk_scale, P: gl.constexpr, OPTIONS: gl.constexpr
):
    """Compute (acc, m_i, l_i) of the 64 queries of a warpgroup over all keys that they see."""
    first_m, tiles_n, masked, seqlen_q, seqlen_k = rows
    _, k_s, v_s, _, _ = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _, _ = barriers
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.block_n, 16])
    # Q in registers: the matrix unit then reads half as much shared memory, and the copy engine may fetch the next Q.
    mbarrier.wait(q_full.index(w), n & 1)
    q = q_s.index(w).reshape([ROWS, q_s.shape[4]])
    if OPTIONS.warpgroups == 2:
        q = q.load(gl.DotOperandLayout(0, S, 2))
        mbarrier.arrive(q_empty.index(w), count=1)

    _skip(w, use, skipped, barriers, OPTIONS)
    first = use + skipped
    s = _scores(q, k_s, k_full, first, OPTIONS)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(first % OPTIONS.stages_k), count=1)
    if skipped < masked:
        s = _mask(s, first_m, (tiles_n - 1 - skipped) * OPTIONS.block_n, seqlen_q, seqlen_k, OPTIONS)
    m_i = gl.full([ROWS], float("inf") if OPTIONS.negative else float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l_i = gl.full([ROWS, 4], 0.0, gl.float32, _thread_sums(s).type.layout)
    acc = gl.full([ROWS, v_s.shape[4]], 0.0, gl.float32, P.parent)
    p_tile, m_i, l_i, _ = _softmax(s, m_i, l_i, qk_scale, True, OPTIONS)
    state = gl.convert_layout(p_tile.to(q_s.dtype), P), acc, m_i, l_i
    for t in range(skipped + 1, tiles_n):
        state = _step(w, t, use + t, state, q, rows, buffers, barriers, qk_scale, OPTIONS)
    p, acc, m_i, l_i = state
    if OPTIONS.warpgroups != 2:
        mbarrier.arrive(q_empty.index(w), count=1)
    last = use + tiles_n - 1
    acc = _weigh(p, v_s, v_full, last, acc, OPTIONS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(last % OPTIONS.stages_v), count=1)
    return acc, m_i, l_i


@gluon.jit
def _store(acc, m_i, l_i, desc_out, out_s, lse_ptr, b, h, nheads, first_m, seqlen_q, qk_scale):
    """Write out and lse of 64 queries; rows past the end are left out by the copy engine and by the mask."""
    l_i = gl.convert_layout(gl.sum(l_i, 1), m_i.type.layout)
    # A row that sees no key has l = 0: out 0 and lse -inf, not 0/0.
    l_safe = gl.where(l_i == 0.0, 1.0, l_i)
    offs_m = first_m + gl.arange(0, ROWS, m_i.type.layout)
    lse = (m_i * qk_scale + gl.log2(l_safe)) * LN_2
    gl.store(lse_ptr + (b * nheads + h).to(gl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)
    out = acc * gl.convert_layout(1.0 / l_safe, gl.SliceLayout(1, acc.type.layout))[:, None]
    # The copy engine may still be reading what the tile before left here.
    tma.store_wait(0)
    out_s.reshape(acc.shape).store(out.to(out_s.dtype))
    # What threads wrote is seen by the copy engine only behind this fence.
    fence_async_shared()
    _tma_store(desc_out, [b, h, first_m, 0], out_s)


@gluon.jit
def _attend(w: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Be warpgroup w: attend with its 64 queries of one tile after the other."""
    descs, buffers, barriers, lse_ptr, qk_scale, work = given
    q_s, _, v_s, out_s, told_s = buffers
    _, _, _, _, _, _, told, heard = barriers
    nheads, _, _, _, _, seqlen_q, seqlen_k = work
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, v_s.shape[4], 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    n = 0
    use = 0
    if w == OPTIONS.warpgroups - 1:
        _pass_turn(w, OPTIONS)
    b, h, first_m, tiles_n = _hear(n, told_s, told, heard)
    while tiles_n > 0:
        own_m = first_m + w * ROWS
        # Of the tiles of keys, last first: `skipped` that none of the 64 queries sees, then those that need a mask.
        full = seqlen_k // OPTIONS.block_n
        skipped = 0
        if OPTIONS.causal:
            seen = own_m + 1 + seqlen_k - seqlen_q
            full = gl.minimum(full, gl.maximum(seen, 0) // OPTIONS.block_n)
            skipped = gl.maximum(tiles_n - 1 - gl.maximum(seen + ROWS - 2, 0) // OPTIONS.block_n, 0)
        rows = own_m, tiles_n, tiles_n - gl.minimum(full, tiles_n), seqlen_q, seqlen_k
        acc, m_i, l_i = _tile(w, n, use, q_s, rows, skipped, buffers, barriers, qk_scale, P, OPTIONS)
        _store(acc, m_i, l_i, descs[3], out_s.index(w), lse_ptr, b, h, nheads, own_m, seqlen_q, qk_scale)
        use += tiles_n
        n += 1
        b, h, first_m, tiles_n = _hear(n, told_s, told, heard)
    tma.store_wait(0)
    if w == 0:
        _await_turn(w, OPTIONS)


# --- the kernel ------------------------------------------------------------------------------------------------------


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Make barriers that flip when COUNT threads have arrived and the bytes that were announced are there."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["nheads", "group", "tiles_m", "section", "total", "seqlen_q", "seqlen_k"])
def _forward_kernel(
    desc_q, desc_k, desc_v, desc_out, lse_ptr, counter_ptr, qk_scale,
    nheads, group, tiles_m, section, total, seqlen_q, seqlen_k,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = OPTIONS.warpgroups
    K: gl.constexpr = OPTIONS.stages_k
    V: gl.constexpr = OPTIONS.stages_v
    # Gluon knows no [*lists].
    q_s = gl.allocate_shared_memory(desc_q.dtype, [W] + desc_q.block_type.shape, desc_q.layout)  # noqa: RUF005
    out_s = gl.allocate_shared_memory(desc_q.dtype, [W] + desc_out.block_type.shape, desc_out.layout)  # noqa: RUF005
    k_s = gl.allocate_shared_memory(desc_q.dtype, [K] + desc_k.block_type.shape, desc_k.layout)  # noqa: RUF005
    v_s = gl.allocate_shared_memory(desc_q.dtype, [V] + desc_v.block_type.shape, desc_v.layout)  # noqa: RUF005
    told_s = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # full: the copy engine is done (the loader arrives, then the bytes). empty: every warpgroup that reads is done.
    barriers = (
        _barriers(W, 1), _barriers(W, 1), _barriers(K, 1), _barriers(K, W),
        _barriers(V, 1), _barriers(V, W), _barriers(2, 1), _barriers(2, W),
    )  # fmt: skip
    fence_async_shared()
    descs = desc_q, desc_k, desc_v, desc_out
    buffers = q_s, k_s, v_s, out_s, told_s
    work = nheads, group, tiles_m, section, total, seqlen_q, seqlen_k
    given = descs, buffers, barriers, lse_ptr, qk_scale, work
    # 65536 registers: 2 · 128 · 240 or 3 · 128 · 160, and few for the loader, which takes those of four warps.
    if W == 2:
        gl.warp_specialize(
            [(_attend, (0, given, OPTIONS)), (_attend, (1, given, OPTIONS)), (_load, (counter_ptr, given, OPTIONS))],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (0, given, OPTIONS)),
                (_attend, (1, given, OPTIONS)),
                (_attend, (2, given, OPTIONS)),
                (_load, (counter_ptr, given, OPTIONS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


# --- host ------------------------------------------------------------------------------------------------------------


def applies(q, k, v):
    """Say why this kernel cannot compute attention for q, k and v, or return None if it can.

    Args:
        q, k, v: as in `forward`.
    """
    architecture = tiles.architecture_of(q.device)
    if architecture != 90:
        return (
            f"needs a Hopper GPU (compute capability 9.0), got {architecture / 10 if architecture else q.device.type}"
        )
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, got {q.dtype}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[3] % 8 or not 8 <= x.shape[3] <= 128:
            return f"needs a head_dim that is a multiple of 8 up to 128, got {x.shape[3]} for {name}"
        if x.numel() and not tiles.describable(x, architecture):
            said = "needs a last stride of 1 and the start and the other strides in multiples of 16 bytes"
            return f"{said}, got strides {x.stride()} for {name}"
    if q.shape[1] % k.shape[1]:
        return f"needs nheads that is a multiple of nheads_kv, got {q.shape[1]} and {k.shape[1]}"
    return None


def forward(q, k, v, causal, scale, options=None):
    """Compute out = softmax(scale·QKᵀ)V and the logarithm of each row's sum of exponentials.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), float16 or bfloat16, on a Hopper GPU.
        k: (batch, nheads_kv, seqlen_k, head_dim); head h of q goes with h // (nheads // nheads_kv).
        v: (batch, nheads_kv, seqlen_k, head_dim_v). Both head_dims are multiples of 8 up to 128, and run at the next of
            64 and 128; a last stride of 1, the others multiples of 16 bytes.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q.
        scale: float, 0.0 and negative values too.
        options: `Options` to launch with; None for those that were measured best.

    Returns:
        (out, lse): out (batch, nheads, seqlen_q, head_dim_v) in the dtype of q, lse (batch, nheads, seqlen_q) float32,
        natural. A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: the kernel does not apply; the message says why.
    """
    reason = applies(q, k, v)
    if reason:
        raise ValueError(f"q, k, v must be inputs of the Hopper kernel, which {reason}")
    out = tiles.empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if lse.numel() == 0:
        return out, lse
    options = options or options_for(q.shape, v.shape, causal, scale < 0)
    batch, nheads, seqlen_q, _ = q.shape
    block_m = ROWS.value * options.warpgroups
    tiles_m = -(-seqlen_q // block_m)
    total = tiles_m * batch * nheads
    group = nheads // k.shape[1]
    with tiles.on_device_of(q):
        arguments = (
            _descriptor(q, ROWS.value), _descriptor(k, options.block_n), _descriptor(v, options.block_n),
            _descriptor(out, ROWS.value), lse,
            _counters(q.device) if causal else None,
            # 2⁻¹²⁶ for 0: the products vanish, but a masked score stays infinite, where 0 times it would be NaN.
            (scale or 2.0**-126) * LOG2_E,
            nheads, group, tiles_m, _section(k, v) * group, total, seqlen_q, k.shape[2],
        )  # fmt: skip
        programs = min(total, _multiprocessors(q.device))
        tiles.launch(_forward_kernel, programs, arguments, {"OPTIONS": options, "num_warps": 4})
    return out, lse


def options_for(shape_q, shape_v, causal, negative):
    """Return the Options that were measured best for these shapes."""
    wide = max(shape_q[3], shape_v[3]) > 64
    # Three warpgroups share each tile of K and V; they have too few registers for wide rows, and short sequences leave
    # too many of their 192 rows empty.
    warpgroups = 2 if wide or shape_q[2] <= 1024 else 3
    hold = causal or warpgroups == 3
    return Options(causal, negative, warpgroups, 128, 2 if wide else 3, 3, True, hold)


def _section(k, v):
    """Return how many heads of K and V may be in the L2 together: 16 MiB of them, 32 for the narrow ones."""
    head_bytes = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return max(1, 2 ** (24 if max(k.shape[3], v.shape[3]) > 64 else 25) // head_bytes)


def _counters(device):
    """Return two zeros that no launch running at the same time uses, and that a launch leaves as zeros.

    Launches of a stream follow each other and can share them. A graph may be replayed anywhere and gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _COUNTERS[key]


@functools.cache
def _multiprocessors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _layout(rows, columns, dtype):
    """Return how a tile lies in shared memory; dtype is "float16" or "bfloat16"."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], getattr(gl, dtype))


def _descriptor(x, rows):
    """Describe x to the copy engine: it moves [1, 1, rows, columns] and knows where the rows of a head end."""
    plain = tiles.descriptor(x, rows, 64 if x.shape[3] <= 64 else 128)
    return TensorDescriptor(
        x,
        plain.shape,
        plain.strides,
        plain.block_shape,
        _layout(*plain.block_shape[2:], str(x.dtype).removeprefix("torch.")),
    )
