"""FlashAttention's forward pass in one Triton kernel, and the public op around it.

One program owns a tile of queries and walks over the tiles of keys that it sees, with the running state (m, l, acc) of
chapter 03 in registers: no score ever reaches memory. The exponentials are base 2, with log2(e) folded into the scale.

Source: FlashAttention-2, algorithm 1, https://arxiv.org/abs/2307.08691
"""

import math

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from flashlib import backward, tiles
from flashlib.device import tl, triton
from flashlib.mods import Mask, Score, key_range, registered, visible
from flashlib.tiles import load_tile, store_tile

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Shapes, dtypes and devices of calls that were found right.
_SEEN = set()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, stride_q, stride_k, stride_v, stride_out, aux, score_aux,
    nheads, seqlen_q, seqlen_k, scale, qk_scale,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr, SCORE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLS: tl.constexpr, COLS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, FOLD: tl.constexpr,
    DESCRIPTOR: tl.constexpr, WIDE: tl.constexpr,
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
    ACC: tl.constexpr = lse_ptr.dtype.element_ty

    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM, False, WIDE)
    m_i = tl.full([BLOCK_M], float("-inf"), ACC)
    l_i = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, COLS_V], ACC)

    end_m = tl.minimum(first_m + BLOCK_M, seqlen_q)
    lo, lo_full, hi_full, hi = key_range(b, h, first_m, end_m, seqlen_q, seqlen_k, aux, BLOCK_N, CAUSAL, MASK, KEYS)
    for first_n in tl.range(lo, hi, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, DESCRIPTOR, WIDE)
        s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC)  # [BLOCK_M, BLOCK_N]
        offs_n = first_n + tl.arange(0, BLOCK_N)
        if SCORE is not None:
            i = tl.minimum(offs_m, seqlen_q - 1)
            j = tl.minimum(offs_n, seqlen_k - 1)
            s = SCORE(s * scale, b, h, i[:, None], j[None, :], score_aux) * LOG2_E
        elif not FOLD:
            s = s * qk_scale
        if first_n < lo_full or first_n >= hi_full:
            seen = visible(b, h, offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, aux, CAUSAL, MASK)
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
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, COLS_V, HEAD_DIM_V, DESCRIPTOR, WIDE)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=ACC)
        m_i = m_new

    # A row that sees no key has l = 0: out 0 and lse -inf, not 0/0.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc * (1.0 / l_safe)[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, COLS_V, HEAD_DIM_V, WIDE)
    lse = (m_i + tl.log2(l_safe)) * LN_2
    tl.store(lse_ptr + pid_bh.to(tl.int64) * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)


def _forward(q, k, v, causal, scale, mask, score, n_mask, aux):
    """Launch the kernel: out like q, lse (batch, nheads, seqlen_q) float32."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # The interpreter cannot compute in bfloat16: compute in float32, round once.
        out, lse = _forward(q.float(), k.float(), v.float(), causal, scale, mask, score, n_mask, aux)
        return tiles.empty_out(q, v).copy_(out), lse
    out = tiles.empty_out(q, v)
    lse = torch.empty(q.shape[:3], dtype=tiles.accumulator(q.dtype), device=q.device)
    if lse.numel() == 0:
        return out, lse
    plan = tiles.plan("forward", q, v, causal, loaded=(k, v))
    fn, keys, _ = registered(mask, 3)
    score_fn, _ = registered(score, 2)
    programs = -(-q.shape[2] // plan.tile.block_m) * q.shape[0] * q.shape[1]
    arguments = (
        q, *plan.loaded(k, v), out, lse, q.stride(), k.stride(), v.stride(), out.stride(),
        tiles.pointers(aux[:n_mask]), tiles.pointers(aux[n_mask:]),
        q.shape[1], q.shape[2], k.shape[2], scale, scale * LOG2_E.value,
    )  # fmt: skip
    constants = {"CAUSAL": causal, "MASK": fn, "KEYS": keys, "SCORE": score_fn, "FOLD": scale > 0 and not score}
    with tiles.on_device_of(q):
        tiles.launch(_forward_kernel, programs, arguments, constants | plan.constants)
    return out, lse


def _forward_fake(q, k, v, causal, scale, mask, score, n_mask, aux):
    return tiles.empty_out(q, v), q.new_empty(q.shape[:3], dtype=tiles.accumulator(q.dtype))


def _backward(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, causal, scale, mask, score, n_mask, aux):
    return backward.gradients(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, causal, scale, mask, score, n_mask, aux)


def _backward_fake(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, causal, scale, mask, score, n_mask, aux):
    return backward.empty_gradients(q, k, v, wants_q, wants_kv)


# Defined by hand rather than by torch.library.custom_op: that wrapper costs 10 to 15 µs a call on the host.
_LIBRARY = torch.library.Library("flashlib", "DEF")
_OPTIONS = "bool causal, float scale, str mask, str score, int n_mask, Tensor[] aux"
for _name, _schema, _real, _fake in (
    ("forward", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _forward_fake),
    (
        "backward",
        f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, "
        f"bool wants_q, bool wants_kv, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        _backward,
        _backward_fake,
    ),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashlib::{_name}", _fake, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    """out and lse with their gradient; `setup_context` apart from `forward`, as torch.func wants it."""

    @staticmethod
    def forward(q, k, v, causal, scale, mask, score, n_mask, *aux):
        return torch.ops.flashlib.forward(q, k, v, causal, scale, mask, score, n_mask, aux)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *ctx.options = inputs[:8]
        ctx.save_for_backward(q, k, v, *output, *inputs[8:])
        ctx.set_materialize_grads(False)
        ctx.n_inputs = len(inputs)

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse, *aux = ctx.saved_tensors
        if dout is None:
            # Only lse was used: a zero that is read everywhere and stored once.
            dout = out.new_zeros(()).expand(out.shape)
        wants_q, wants_k, wants_v = ctx.needs_input_grad[:3]
        arguments = q, k, v, out, lse, dout, dlse, wants_q, wants_k or wants_v, *ctx.options
        if torch.compiler.is_compiling():
            # torch.compile refuses a double backward itself, and cannot trace a Function inside a backward.
            grads = torch.ops.flashlib.backward(*arguments, aux)
        else:
            grads = _AttentionGrad.apply(*arguments, *aux)
        wanted = (g if wants else None for g, wants in zip(grads, (wants_q, wants_k, wants_v), strict=True))
        return *wanted, *([None] * (ctx.n_inputs - 3))


class _AttentionGrad(torch.autograd.Function):
    """The gradients of q, k and v; asked for their own gradient, it refuses instead of leaving a term out."""

    @staticmethod
    def forward(*arguments):
        # Three tensors of the inputs' shapes; aux is whatever follows the 14 arguments that are always there.
        return torch.ops.flashlib.backward(*arguments[:14], arguments[14:])

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("flash_attention cannot be differentiated twice: use flashlib.reference.attention for that")


def flash_attention(q, k, v, *, causal=False, scale=None, mask=None, score=None, return_lse=False):
    """Compute softmax(scale·QKᵀ)V exactly, without storing scores, in one kernel; differentiable.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), float16, bfloat16 or float32 (float64 in the interpreter only), any
            strides.
        k: (batch, nheads, seqlen_k, head_dim), dtype and device of q.
        v: (batch, nheads, seqlen_k, head_dim_v). Both head_dims are multiples of 8 from 16 to 256.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (aligned at the bottom right).
        scale: what a dot product is multiplied with; None means 1/sqrt(head_dim). 0.0 and negative values are honoured.
        mask: `mods.Mask`, which keys a query sees, ANDed with causal; None for all.
        score: `mods.Score`, a change of scale·qk before the mask; None for none.
        return_lse: also return the natural logarithm of each row's sum of exponentials, the maximum included.

    Returns:
        out (batch, nheads, seqlen_q, head_dim_v), dtype of q (under autocast, the autocast dtype); or (out, lse), lse
        (batch, nheads, seqlen_q) float32 (float64 for float64) and differentiable. A row that sees no key has out
        exactly 0, lse exactly -inf and gradients exactly 0. A NaN in k at a key that is masked never shows; a NaN in
        v there (in the backward also in k or dout) may reach rows whose tile holds both that key and a key that they
        see.

    Raises:
        ValueError: a shape, dtype, device or option is not as above.
        RuntimeError: kernels cannot run on these tensors here; differentiated twice.
        NotImplementedError: differentiated in forward mode.

    Source: "FlashAttention-2", https://arxiv.org/abs/2307.08691
    """
    q, k, v = _autocast(q, k, v)
    _check(q, k, v, causal, scale, mask, score)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options = causal, scale, mask.key if mask else "", score.key if score else "", len(mask.aux) if mask else 0
    aux = [*(mask.aux if mask else ()), *(score.aux if score else ())]
    # _Attention has no forward-mode derivative and says so; the bare op would drop the tangent in silence.
    if (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)) or _dual(q, k, v):
        out, lse = _Attention.apply(q, k, v, *options, *aux)
    else:
        out, lse = torch.ops.flashlib.forward(q, k, v, *options, aux)
    return (out, lse) if return_lse else out


def _dual(*tensors):
    """Tell whether a tensor carries a tangent of forward-mode differentiation."""
    return not torch.compiler.is_compiling() and any(unpack_dual(x).tangent is not None for x in tensors)


def _autocast(*tensors):
    """Return the tensors in autocast's dtype where autocast is on, as PyTorch's own matrix products do."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )


def _check(q, k, v, causal, scale, mask, score):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    facts = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    # Most calls are like the last one: what was found right once is not looked at again.
    if torch.compiler.is_compiling() or facts not in _SEEN:
        _check_tensors(q, k, v)
        if not torch.compiler.is_compiling():
            _SEEN.add(facts)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"mask must be a flashlib.mods.Mask or None, got {type(mask).__name__}")
    if score is not None and not isinstance(score, Score):
        raise ValueError(f"score must be a flashlib.mods.Score or None, got {type(score).__name__}")


def _check_tensors(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 axes (batch, nheads, seqlen, head_dim), got shape {tuple(x.shape)}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} must have dtype float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(f"{name} must have batch and nheads of q, {tuple(q.shape[:2])}, got {tuple(x.shape[:2])}")
        if x.shape[3] % 8 or not 16 <= x.shape[3] <= 256:
            raise ValueError(f"{name} must have a head_dim that is a multiple of 8 from 16 to 256, got {x.shape[3]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[3]}, got {k.shape[3]}")
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v must have the seqlen of k, {k.shape[2]}, got {v.shape[2]}")
    tiles.check_device(q)
