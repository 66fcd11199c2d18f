"""Chapter 09: the three kernels of the backward, written by the reader; the checker launches them on guarded memory."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong
from flashlib.check.ex_07 import _place, _require_kernel
from flashlib.recompute import delta_of

_SETUP = "from flashlib.device import tl, triton"


# --- how a kernel is launched ----------------------------------------------------------------------------------------


def _launch(kernel, programs, tensors, outputs, others, constexprs):
    """Launch a kernel on one axis; return what it stored, and what it touched outside of its tensors.

    Args:
        tensors: dict, name -> array or (array, strides, dtype) of what it reads, in the order of its arguments.
        outputs: dict, name -> shape of what it writes.
        others: the arguments after the pointers, which may be a function of the placed tensors.
    """
    import contextlib

    import torch

    from flashlib import device
    from flashlib.meter import Meter

    placed = {}
    for name, given in tensors.items():
        x, strides, dtype = given if isinstance(given, tuple) else (given, None, "float32")
        placed[name] = _place(x.shape, strides or _dense(x.shape), dtype, x)
    for name, shape in outputs.items():
        placed[name] = _place(shape, _dense(shape), "float32")
    arenas = [arena for _, arena in placed.values()]
    before = [arena.clone() for arena in arenas]
    meter = Meter(tolerate=arenas) if device.interpreting() else None
    try:
        with meter or contextlib.nullcontext():
            kernel[(programs,)](*(view for view, _ in placed.values()), *others, **constexprs)
    except Exception as error:
        # The interpreter wraps what happened in an error of its own.
        raise (error.__cause__ or error) from None
    result = {name: placed[name][0].double().cpu().numpy() for name in outputs}
    stored = 0
    for (view, arena), old, name in zip(placed.values(), before, placed, strict=True):
        changed = ~torch.isclose(arena, old, rtol=0, atol=0, equal_nan=True)
        if name in outputs:
            # An output's own elements may change; the memory around it may not.
            offset = (view.data_ptr() - arena.data_ptr()) // view.element_size()
            changed.as_strided(view.shape, view.stride(), offset).fill_(False)
        stored += int(changed.sum())
    result["stored_outside"] = stored
    if meter:
        result["loaded_outside"] = meter.outside["load"]
        result["k_bytes"] = meter.loads.get("k", 0)
    return result


def _dense(shape):
    return (shape[1], 1) if len(shape) == 2 else (1,)


def _inputs(seed, seqlen_q, seqlen_k, head_dim, causal=False, scale=0.3):
    """Return dict of q, k, v, dout, lse, delta in float64, from plain NumPy."""
    rng = np.random.default_rng(seed)
    q, dout = rng.standard_normal((2, seqlen_q, head_dim))
    k, v = rng.standard_normal((2, seqlen_k, head_dim))
    s = scale * q @ k.T
    if causal:
        s = np.where(np.arange(seqlen_k) <= np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, s, -np.inf)
    m = s.max(axis=1, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(m), 0, m))
    l = e.sum(axis=1, keepdims=True)
    out = e / np.where(l == 0, 1, l) @ v
    with np.errstate(divide="ignore"):
        lse = (m + np.log(l))[:, 0]
    return {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta_of(out, dout)}


# --- 09.1 ----------------------------------------------------------------------------------------------------------

_DELTA_SOLUTION = """\
@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_out, stride_dout, seqlen_q, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr
):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_m = offs_m < seqlen_q
    out_ptrs = out_ptr + offs_m[:, None] * stride_out[0] + offs_d[None, :] * stride_out[1]
    dout_ptrs = dout_ptr + offs_m[:, None] * stride_dout[0] + offs_d[None, :] * stride_dout[1]
    out = tl.load(out_ptrs, mask=mask_m[:, None], other=0.0).to(tl.float32)
    dout = tl.load(dout_ptrs, mask=mask_m[:, None], other=0.0).to(tl.float32)
    tl.store(delta_ptr + offs_m, tl.sum(out * dout, axis=1), mask=mask_m)
"""

_DELTA_TRANSPOSED = """\
@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_out, stride_dout, seqlen_q, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, HEAD_DIM)[:, None]
    safe = tl.minimum(row, seqlen_q - 1)[None, :]
    a = tl.load(out_ptr + safe * stride_out[0] + col * stride_out[1])
    b = tl.load(dout_ptr + safe * stride_dout[0] + col * stride_dout[1])
    tl.store(delta_ptr + row, tl.sum(a.to(tl.float32) * b, axis=0), mask=row < seqlen_q)
"""


def _cases_delta():
    rng = np.random.default_rng(91)
    out, dout = rng.standard_normal((2, 16, 16)).round(2)
    odd, d_odd = rng.standard_normal((2, 21, 16)).round(2)
    big, d_big = 200 + 100 * rng.random((2, 5, 16)).round(2)
    return [
        Case("one tile of 16 rows", out, dout, 16),
        Case("21 rows in tiles of 16", odd, d_odd, 16),
        Case("21 rows in tiles of 8", odd, d_odd, 8),
        Case("dout with rows further apart", odd, d_odd, 8, (16, 1), (19, 1)),
        Case("out transposed", odd, d_odd, 8, (1, 21), (16, 1)),
        Case("every second column of dout", odd, d_odd, 8, (16, 1), (32, 2)),
        Case("float16, entries near 250", big, d_big, 16, None, None, "float16"),
    ]


def _call_delta(kernel, out, dout, block_m, stride_out=None, stride_dout=None, dtype="float32"):
    _require_kernel(kernel)
    stride_out, stride_dout = stride_out or _dense(out.shape), stride_dout or _dense(dout.shape)
    result = _launch(
        kernel,
        -(-len(out) // block_m),
        {"out": (out, stride_out, dtype), "dout": (dout, stride_dout, dtype)},
        {"delta": (len(out),)},
        (stride_out, stride_dout, len(out)),
        {"HEAD_DIM": out.shape[1], "BLOCK_M": block_m},
    )
    result.pop("k_bytes", None)
    return result


_DELTA = Exercise(
    id="09.1",
    title="The delta kernel",
    level=1,
    task=(
        "Write the kernel that stores delta, one float32 a row. Program `pid` takes the `BLOCK_M` rows from "
        "`pid * BLOCK_M` on; the last of them may lie past `seqlen_q`. `stride_out` and `stride_dout` are pairs (of "
        "the row, of the column) and need not be equal. `HEAD_DIM` is a power of two. The inputs may be float16: their "
        "product may not."
    ),
    name="delta_kernel",
    stub="""\
@triton.jit
def delta_kernel(
    out_ptr, dout_ptr, delta_ptr, stride_out, stride_dout, seqlen_q, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr
):
    raise NotImplementedError
""",
    solution=_DELTA_SOLUTION,
    cases=_cases_delta,
    also_right=(_DELTA_TRANSPOSED,),
    rtol=1e-5,
    atol=1e-5,
    setup=_SETUP,
    call=_call_delta,
    wrong=(
        Wrong(
            "the product is made in float16, which ends at 65504: make both factors float32 first",
            source=_DELTA_SOLUTION.replace(".to(tl.float32)", ""),
        ),
        Wrong("delta is made from out and out: one of the two factors is dout", edit=("out * dout", "out * out")),
        Wrong("the sum runs over the rows: delta is one number a row", edit=("axis=1", "axis=0")),
        Wrong("the sum is divided by head_dim: delta is a sum, no mean", edit=("axis=1)", "axis=1) / HEAD_DIM")),
        Wrong("delta has the wrong sign: it is subtracted later, in dS", edit=("tl.sum(out", "-tl.sum(out")),
        Wrong(
            "every program takes the first rows: pid * BLOCK_M is missing",
            edit=("tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)", "tl.arange(0, BLOCK_M)"),
        ),
        Wrong(
            "the programs' rows overlap: program pid begins at pid * BLOCK_M, not at pid",
            edit=("tl.program_id(0) * BLOCK_M", "tl.program_id(0)"),
        ),
        Wrong(
            "the loads have no mask: the last program reads rows that are not there",
            source=_DELTA_SOLUTION.replace(", mask=mask_m[:, None], other=0.0", ""),
        ),
        Wrong(
            "the store has no mask: the last program writes past the end of delta",
            edit=("axis=1), mask=mask_m)", "axis=1))"),
        ),
        Wrong(
            "the strides of out are used for dout",
            source=_DELTA_SOLUTION.replace("* stride_dout[", "* stride_out["),
        ),
        Wrong(
            "the rows are taken to lie close together: the next one begins stride[0] further, not HEAD_DIM",
            source=_DELTA_SOLUTION.replace("stride_out[0]", "HEAD_DIM").replace("stride_dout[0]", "HEAD_DIM"),
        ),
        Wrong(
            "the stride of the columns is missing",
            source=_DELTA_SOLUTION.replace(" * stride_out[1]", "").replace(" * stride_dout[1]", ""),
        ),
    ),
)


# --- 09.2 ----------------------------------------------------------------------------------------------------------

_DKDV_HEAD = """\
@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, seqlen_q, seqlen_k, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (offs_n < seqlen_k)[:, None]
    keys = offs_n[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    k = tl.load(k_ptr + keys, mask=mask_n, other=0.0)
    v = tl.load(v_ptr + keys, mask=mask_n, other=0.0)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    for first_m in range(0, seqlen_q, BLOCK_M):
"""

_DKDV_TAIL = """\
    tl.store(dk_ptr + keys, dk, mask=mask_n)
    tl.store(dv_ptr + keys, dv, mask=mask_n)
"""

_DKDV_SOLUTION = (
    _DKDV_HEAD
    + """\
        offs_m = first_m + tl.arange(0, BLOCK_M)
        mask_m = offs_m < seqlen_q
        rows = offs_m[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        q = tl.load(q_ptr + rows, mask=mask_m[:, None], other=0.0)
        dout = tl.load(dout_ptr + rows, mask=mask_m[:, None], other=0.0)
        lse = tl.load(lse_ptr + offs_m, mask=mask_m, other=float("inf"))
        delta = tl.load(delta_ptr + offs_m, mask=mask_m, other=0.0)
        s = scale * tl.dot(k, q.T, input_precision="ieee")
        p = tl.exp(s - lse[None, :])
        dv += tl.dot(p, dout, input_precision="ieee")
        dp = tl.dot(v, dout.T, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk += scale * tl.dot(ds, q, input_precision="ieee")
"""
    + _DKDV_TAIL
)

_DKDV_OTHER = (
    _DKDV_HEAD
    + """\
        offs_m = tl.minimum(first_m + tl.arange(0, BLOCK_M), seqlen_q - 1)
        there = first_m + tl.arange(0, BLOCK_M) < seqlen_q
        q = tl.load(q_ptr + offs_m[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :])
        dout = tl.load(dout_ptr + offs_m[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :])
        lse = tl.load(lse_ptr + offs_m)[:, None]
        delta = tl.load(delta_ptr + offs_m)[:, None]
        s = tl.dot(q, k.T, input_precision="ieee")
        p = tl.where(there[:, None], tl.exp2((s * scale - lse) * 1.4426950408889634), 0.0)
        ds = p * (tl.dot(dout, v.T, input_precision="ieee") - delta)
        dv = tl.dot(p.T, dout, dv, input_precision="ieee")
        dk = tl.dot((ds * scale).T, q, dk, input_precision="ieee")
"""
    + _DKDV_TAIL
)


def _cases_dkdv():
    return [
        Case("16 queries, 16 keys: one step", _inputs(1, 16, 16, 16), 16, 16, 0.3),
        Case("48 queries in tiles of 16", _inputs(2, 48, 16, 16), 16, 16, 0.3),
        Case("21 queries, 37 keys: short tiles", _inputs(3, 21, 37, 16, scale=0.5), 16, 16, 0.5),
        Case("tiles of 16 queries by 32 keys", _inputs(4, 40, 40, 16, scale=-0.4), 16, 32, -0.4),
        Case("large scores", _inputs(5, 20, 16, 16, scale=60.0), 16, 16, 60.0),
    ]


def _call_dkdv(kernel, inputs, block_m, block_n, scale):
    _require_kernel(kernel)
    (seqlen_q, head_dim), seqlen_k = inputs["q"].shape, len(inputs["k"])
    result = _launch(
        kernel,
        -(-seqlen_k // block_n),
        inputs,
        {"dk": (seqlen_k, head_dim), "dv": (seqlen_k, head_dim)},
        (seqlen_q, seqlen_k, scale),
        {"HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n},
    )
    result.pop("k_bytes", None)
    return result


_DKDV = Exercise(
    id="09.2",
    title="The inner step of dK and dV",
    level=2,
    task=(
        "The frame of a dK/dV kernel for one head stands: a program owns `BLOCK_N` keys. Write its inner step: load a "
        "tile of queries, of `dout`, `lse` and `delta` (float32, dense rows of `HEAD_DIM`), and add to `dk` and `dv`. "
        'No mask but the lengths. Give every `tl.dot` `input_precision="ieee"`. `seqlen_q` need not be a multiple of '
        "`BLOCK_M`, and `BLOCK_M` need not be `BLOCK_N`."
    ),
    name="dkdv_kernel",
    stub=_DKDV_HEAD + "        raise NotImplementedError\n" + _DKDV_TAIL,
    solution=_DKDV_SOLUTION,
    cases=_cases_dkdv,
    also_right=(_DKDV_OTHER,),
    rtol=2e-4,
    atol=2e-4,
    setup=_SETUP,
    call=_call_dkdv,
    wrong=(
        Wrong(
            "dk lacks the factor scale: S = scale·QKᵀ, so the chain rule multiplies once more",
            edit=("dk += scale * tl.dot", "dk += tl.dot"),
        ),
        Wrong("the scale is applied twice in dk", edit=("dk += scale *", "dk += scale * scale *")),
        Wrong(
            "the scale is left out when S is computed again: the scores must be those of the forward",
            edit=("s = scale * tl.dot", "s = tl.dot"),
        ),
        Wrong("delta is left out of dS", edit=("(dp - delta[None, :])", "dp")),
        Wrong("dS lacks its factor P", edit=("ds = p * (dp - delta[None, :])", "ds = dp - delta[None, :]")),
        Wrong("dk is built with P in place of dS", edit=("tl.dot(ds, q", "tl.dot(p, q")),
        Wrong("delta is added in dS: dS = P·(dP − delta)", edit=("(dp - delta", "(dp + delta")),
        Wrong(
            "dk is built with k in place of q: dK = scale·dSᵀQ sums rows of q",
            source=_DKDV_SOLUTION.replace("tl.dot(ds, q", "tl.dot(ds, k"),
        ),
        Wrong("dP is made with k in place of v: dP = dout·Vᵀ", edit=("tl.dot(v, dout.T", "tl.dot(k, dout.T")),
        Wrong(
            "lse is loaded without a mask: the last tile reads past its end",
            edit=('lse_ptr + offs_m, mask=mask_m, other=float("inf"))', "lse_ptr + offs_m)"),
        ),
        Wrong(
            "dv is built with dP in place of P",
            edit=(
                '        dv += tl.dot(p, dout, input_precision="ieee")\n'
                '        dp = tl.dot(v, dout.T, input_precision="ieee")\n',
                '        dp = tl.dot(v, dout.T, input_precision="ieee")\n'
                '        dv += tl.dot(dp, dout, input_precision="ieee")\n',
            ),
        ),
        Wrong(
            "lse and delta are laid along the keys: each belongs to a query, and here the queries are the columns",
            source=_DKDV_SOLUTION.replace("lse[None, :]", "lse[:, None]").replace("delta[None, :]", "delta[:, None]"),
        ),
        Wrong(
            "the tile of P is used the wrong way round: [BLOCK_N, BLOCK_M] is what dv += P·dout needs, no transpose",
            edit=("dv += tl.dot(p, dout", "dv += tl.dot(p.T, dout"),
        ),
        Wrong(
            "P is the softmax of this tile alone: lse knows the whole row",
            edit=(
                "p = tl.exp(s - lse[None, :])",
                "p = tl.exp(s - tl.max(s, 0)[None, :])\n        p = p / tl.sum(p, 0)[None, :]",
            ),
        ),
        Wrong(
            "the exponential has base 2, and its argument was not multiplied by log2(e)", edit=("tl.exp(", "tl.exp2(")
        ),
        Wrong(
            "P is computed as exp(s) / exp(lse): subtract first, or large scores overflow",
            edit=("tl.exp(s - lse[None, :])", "tl.exp(s) / tl.exp(lse)[None, :]"),
            stumble=11,
        ),
        Wrong(
            "only the last tile of queries counts: each adds to dk and dv",
            source=_DKDV_SOLUTION.replace("dv +=", "dv =").replace("dk +=", "dk ="),
        ),
        Wrong(
            "the same queries are loaded in every step: offs_m must begin at first_m",
            edit=("offs_m = first_m + tl.arange", "offs_m = tl.arange"),
        ),
        Wrong(
            "the rows past seqlen_q are not masked: what lies behind q and dout takes part",
            edit=("mask_m = offs_m < seqlen_q", "mask_m = offs_m < first_m + BLOCK_M"),
        ),
    ),
)


# --- 09.3 ----------------------------------------------------------------------------------------------------------

_DQ_SIGNATURE = """\
@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, seqlen_q, seqlen_k, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
"""

_DQ_SOLUTION = (
    _DQ_SIGNATURE
    + """\
    first_m = tl.program_id(0) * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_m = offs_m < seqlen_q
    rows = offs_m[:, None] * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + rows, mask=mask_m[:, None], other=0.0)
    dout = tl.load(dout_ptr + rows, mask=mask_m[:, None], other=0.0)
    lse = tl.load(lse_ptr + offs_m, mask=mask_m, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.load(delta_ptr + offs_m, mask=mask_m, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = seqlen_k
    if CAUSAL:
        end = tl.minimum(seqlen_k, tl.minimum(first_m + BLOCK_M, seqlen_q) + seqlen_k - seqlen_q)
    for first_n in range(0, end, BLOCK_N):
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < seqlen_k
        keys = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k = tl.load(k_ptr + keys, mask=mask_n[:, None], other=0.0)
        v = tl.load(v_ptr + keys, mask=mask_n[:, None], other=0.0)
        s = scale * tl.dot(q, k.T, input_precision="ieee")
        seen = mask_n[None, :]
        if CAUSAL:
            seen = seen & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
        p = tl.exp(tl.where(seen, s, float("-inf")) - lse[:, None])
        dp = tl.dot(dout, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq += scale * tl.dot(ds, k, input_precision="ieee")
    tl.store(dq_ptr + rows, dq, mask=mask_m[:, None])
"""
)

_DQ_OTHER = (
    _DQ_SIGNATURE
    + """\
    # Keys above, queries across.
    first_m = tl.program_id(0) * BLOCK_M
    i = first_m + tl.arange(0, BLOCK_M)[None, :]
    d = tl.arange(0, HEAD_DIM)
    rows = i.T * HEAD_DIM + d[None, :]
    inside = i.T < seqlen_q
    q = tl.load(q_ptr + rows, mask=inside, other=0.0)
    dout = tl.load(dout_ptr + rows, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + i, mask=i < seqlen_q, other=0.0)
    delta = tl.load(delta_ptr + i, mask=i < seqlen_q, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    last = tl.minimum(first_m + BLOCK_M, seqlen_q) - 1
    end = tl.minimum(seqlen_k, last + 1 + seqlen_k - seqlen_q) if CAUSAL else seqlen_k
    for first_n in range(0, end, BLOCK_N):
        j = first_n + tl.arange(0, BLOCK_N)[:, None]
        k = tl.load(k_ptr + j * HEAD_DIM + d[None, :], mask=j < seqlen_k, other=0.0)
        v = tl.load(v_ptr + j * HEAD_DIM + d[None, :], mask=j < seqlen_k, other=0.0)
        s = tl.dot(k, q.T, input_precision="ieee") * scale
        p = tl.where(lse == float("-inf"), 0.0, tl.exp(s - tl.where(lse == float("-inf"), 0.0, lse)))
        p = tl.where(j < seqlen_k, p, 0.0)
        if CAUSAL:
            p = tl.where(j <= i + seqlen_k - seqlen_q, p, 0.0)
        ds = p * (tl.dot(v, dout.T, input_precision="ieee") - delta)
        dq = tl.dot(ds.T, k, dq, input_precision="ieee")
    tl.store(dq_ptr + rows, dq * scale, mask=inside)
"""
)


def _cases_dq():
    return [
        Case("16 queries, 16 keys", _inputs(11, 16, 16, 16), False, 16, 16, 0.3),
        Case("causal, 16 queries, 16 keys", _inputs(12, 16, 16, 16, True), True, 16, 16, 0.3),
        Case("20 queries, 37 keys", _inputs(13, 20, 37, 16, scale=0.5), False, 16, 16, 0.5),
        Case("causal, 48 queries, 48 keys", _inputs(14, 48, 48, 16, True), True, 16, 16, 0.3),
        Case("causal, 20 queries, 37 keys", _inputs(15, 20, 37, 16, True), True, 16, 16, 0.3),
        Case("causal, 40 queries, 20 keys: 20 rows see no key", _inputs(16, 40, 20, 16, True), True, 16, 16, 0.3),
        Case("tiles of 32 queries by 16 keys", _inputs(17, 40, 40, 16, scale=-0.4), False, 32, 16, -0.4),
    ]


def _call_dq(kernel, inputs, causal, block_m, block_n, scale):
    _require_kernel(kernel)
    (seqlen_q, head_dim), seqlen_k = inputs["q"].shape, len(inputs["k"])
    return _launch(
        kernel,
        -(-seqlen_q // block_m),
        inputs,
        {"dq": (seqlen_q, head_dim)},
        (seqlen_q, seqlen_k, scale),
        {"CAUSAL": causal, "HEAD_DIM": head_dim, "BLOCK_M": block_m, "BLOCK_N": block_n},
    )


_DQ = Exercise(
    id="09.3",
    title="The whole dQ kernel",
    level=3,
    task=(
        "Write the dQ kernel of one head, without a glance at the library's. A program owns `BLOCK_M` queries. All "
        "tensors are float32 with dense rows of `HEAD_DIM`; no length need be a multiple of its tile. With `CAUSAL`, "
        "query `i` sees the keys `j <= i + seqlen_k - seqlen_q`, and tiles of keys that none of the program's queries "
        "sees are not loaded; without it, all keys. A row that sees no key has `lse` = -inf and gets 0. Give every "
        '`tl.dot` `input_precision="ieee"`.'
    ),
    name="dq_kernel",
    stub=_DQ_SIGNATURE + "    raise NotImplementedError\n",
    solution=_DQ_SOLUTION,
    cases=_cases_dq,
    also_right=(_DQ_OTHER,),
    rtol=2e-4,
    atol=2e-4,
    setup=_SETUP,
    call=_call_dq,
    wrong=(
        Wrong(
            "the mask is always causal, whatever CAUSAL says",
            source=_DQ_SOLUTION.replace("if CAUSAL:", "if True:"),
            stumble=5,
        ),
        Wrong(
            "the mask is forgotten: P is computed again, so a score that was masked in the forward is masked again",
            edit=("        if CAUSAL:\n            seen", "        if False:\n            seen"),
            stumble=5,
        ),
        Wrong(
            "the mask is aligned at the top left: with unequal lengths query i sees keys up to i + seqlen_k - seqlen_q",
            source=_DQ_SOLUTION.replace(" + seqlen_k - seqlen_q", ""),
            stumble=12,
        ),
        Wrong(
            "the queries are counted from the start of their tile: the mask needs their place in the whole sequence",
            edit=("<= offs_m[:, None] +", "<= tl.arange(0, BLOCK_M)[:, None] +"),
        ),
        Wrong(
            "a row without a key computes -inf - (-inf), which is NaN: its lse needs a stand-in",
            edit=('tl.where(lse == float("-inf"), float("inf"), lse)', "lse"),
            stumble=13,
        ),
        Wrong(
            "the keys past seqlen_k are not masked: what lies behind k and v is loaded and counts",
            source=_DQ_SOLUTION.replace("mask_n = offs_n < seqlen_k", "mask_n = offs_n < first_n + BLOCK_N"),
        ),
        Wrong(
            "the result is right, but tiles of keys are loaded that no query of the program sees",
            edit=("    if CAUSAL:\n        end =", "    if False:\n        end ="),
        ),
        Wrong(
            "the loop ends where the first query of the tile has seen its keys: the last query of the tile sees more",
            edit=("tl.minimum(first_m + BLOCK_M, seqlen_q) + seqlen_k", "first_m + 1 + seqlen_k"),
        ),
        Wrong(
            "dq lacks the factor scale: S = scale·QKᵀ, so the chain rule multiplies once more",
            edit=("dq += scale * tl.dot", "dq += tl.dot"),
        ),
        Wrong("the scale is left out when S is computed again", edit=("s = scale * tl.dot", "s = tl.dot")),
        Wrong("delta is left out of dS", edit=("(dp - delta[:, None])", "dp")),
        Wrong("dS lacks its factor P", edit=("ds = p * (dp - delta[:, None])", "ds = dp - delta[:, None]")),
        Wrong("dq is built with P in place of dS", edit=("tl.dot(ds, k", "tl.dot(p, k")),
        Wrong("delta is added in dS: dS = P·(dP − delta)", edit=("(dp - delta", "(dp + delta")),
        Wrong("dq is built with v in place of k: dQ = scale·dS·K", edit=("tl.dot(ds, k,", "tl.dot(ds, v,")),
        Wrong(
            "the diagonal is masked too: query i sees its last key, j = i + seqlen_k - seqlen_q",
            edit=("<= offs_m[:, None] +", "< offs_m[:, None] +"),
        ),
        Wrong("dP is made with k in place of v", edit=("tl.dot(dout, v.T", "tl.dot(dout, k.T")),
        Wrong("only the last tile of keys counts: each adds to dq", edit=("dq += scale", "dq = scale")),
        Wrong(
            "the store has no mask: the last program writes past the end of dq",
            edit=("dq, mask=mask_m[:, None])", "dq)"),
        ),
    ),
)

EXERCISES = [_DELTA, _DKDV, _DQ]
