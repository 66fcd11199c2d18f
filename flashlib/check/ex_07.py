"""Chapter 07: three kernels that the reader writes; the checker launches them on memory with guards around it."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong

_SETUP = "from flashlib.device import tl, triton"
# What lies around a tensor: numbers that change a result when they are read, and enough of them for the known mistakes.
_AROUND, _GUARD = 7.0, 4096


# --- how a kernel is launched ----------------------------------------------------------------------------------------


def _require_kernel(kernel):
    import inspect

    if not (hasattr(kernel, "fn") and hasattr(kernel, "run")):
        raise TypeError("the answer must be a kernel: is @triton.jit missing above it?")
    if "raise NotImplementedError" in inspect.getsource(kernel.fn):
        raise NotImplementedError


def _place(shape, strides, dtype, values=None):
    """Return (view, arena): a tensor with these strides in the middle of memory that is full of one number."""
    import torch

    from flashlib import device

    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    arena = torch.full((span + 2 * _GUARD,), _AROUND, dtype=getattr(torch, dtype), device=device.kernel_device())
    view = arena.as_strided(shape, strides, _GUARD)
    if values is not None:
        view.copy_(torch.from_numpy(values))
    return view, arena


def _launch(kernel, grid, arguments, constexprs, inputs, out):
    """Launch a kernel; return what it stored, and what it touched outside of its tensors.

    Args:
        inputs: the (view, arena) pairs of what it reads.
        out: the (view, arena) pair of what it writes.
    """
    import contextlib

    import torch

    from flashlib import device
    from flashlib.meter import Meter

    view, arena = out
    # Addresses can be watched in the interpreter only; there a kernel cannot touch memory far outside either.
    meter = Meter(tolerate=[part for _, part in (*inputs, out)]) if device.interpreting() else None
    try:
        with meter or contextlib.nullcontext():
            kernel[grid](*arguments, **constexprs)
    except Exception as error:
        # The interpreter wraps what happened in an error of its own.
        raise (error.__cause__ or error) from None
    around = torch.ones_like(arena, dtype=torch.bool)
    around.as_strided(view.shape, view.stride(), _GUARD).fill_(False)
    result = {"out": view.double().cpu().numpy(), "stored_outside": int((arena[around] != _AROUND).sum())}
    if meter:
        loaded = sum(meter.loads.values()) / sum(x.numel() * x.element_size() for x, _ in inputs)
        result |= {"loaded_outside": meter.outside["load"], "times_loaded": loaded}
    return result


def _two_strides(shape, strides):
    return strides or (shape[1], 1)


# --- 07.1 ----------------------------------------------------------------------------------------------------------

_SPREAD_SOLUTION = """\
@triton.jit
def spread_kernel(x_ptr, out_ptr, stride_row, stride_col, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    x = tl.load(x_ptr + row * stride_row + offs * stride_col, mask=mask, other=0.0)
    largest = tl.max(tl.where(mask, x, float("-inf")), axis=0)
    smallest = tl.min(tl.where(mask, x, float("inf")), axis=0)
    tl.store(out_ptr + row, largest - smallest)
"""

_SPREAD_TWO_LOADS = """\
@triton.jit
def spread_kernel(x_ptr, out_ptr, stride_row, stride_col, columns, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    pointers = x_ptr + pid * stride_row + offs * stride_col
    high = tl.load(pointers, mask=offs < columns, other=float("-inf"))
    low = tl.load(pointers, mask=offs < columns, other=float("inf"))
    tl.store(out_ptr + pid, tl.max(high, axis=0) - tl.min(low, axis=0))
"""

_SPREAD_CLAMPED = """\
@triton.jit
def spread_kernel(x_ptr, out_ptr, stride_row, stride_col, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    # A lane past the end takes the row's last number, which changes neither the largest nor the smallest.
    offs = tl.minimum(tl.arange(0, BLOCK), columns - 1)
    x = tl.load(x_ptr + row * stride_row + offs * stride_col)
    tl.store(out_ptr + row, tl.max(x, axis=0) + tl.max(-x, axis=0))
"""


def _spread_cases():
    rng = np.random.default_rng(71)
    x = rng.standard_normal((3, 5)).round(2)
    return [
        Case("rows as long as the block", rng.standard_normal((2, 8)).round(2), 8),
        Case("rows shorter than the block", x, 8),
        Case("every number positive", np.abs(x) + 1, 8),
        Case("every number negative", -np.abs(x) - 1, 8),
        Case("rows with a gap behind them", x, 8, (11, 1)),
        Case("every second column of an array", x, 8, (10, 2)),
        Case("a transposed array", x, 16, (1, 3)),
    ]


def _call_spread(kernel, x, block, strides=None):
    _require_kernel(kernel)
    source = _place(x.shape, _two_strides(x.shape, strides), "float32", x)
    out = _place(x.shape[:1], (1,), "float32")
    arguments = source[0], out[0], *source[0].stride(), x.shape[1]
    result = _launch(kernel, (len(x),), arguments, {"BLOCK": block}, [source], out)
    # How often x is loaded is free here.
    result.pop("times_loaded", None)
    return result


_SPREAD = Exercise(
    id="07.1",
    title="The spread of a row",
    level=1,
    task=(
        "Write a kernel that stores, for each row of `x`, the largest number minus the smallest. One program takes one "
        "row: program `row` reads the `columns` numbers of its row and stores one number at `out_ptr + row`. "
        "`stride_row` and `stride_col` are the strides of `x`; `BLOCK` is a power of two, at least `columns`. Mind the "
        "lanes past the end: what must stand in them for the maximum, and what for the minimum?"
    ),
    name="spread_kernel",
    stub="""\
@triton.jit
def spread_kernel(x_ptr, out_ptr, stride_row, stride_col, columns, BLOCK: tl.constexpr):
    raise NotImplementedError
""",
    solution=_SPREAD_SOLUTION,
    cases=_spread_cases,
    also_right=(_SPREAD_TWO_LOADS, _SPREAD_CLAMPED),
    rtol=1e-5,
    atol=1e-6,
    setup=_SETUP,
    call=_call_spread,
    wrong=(
        Wrong(
            "there is no mask: the lanes past the end of the row read what lies behind it in memory",
            source=_SPREAD_SOLUTION.replace(", mask=mask, other=0.0", "").replace("offs < columns", "offs < BLOCK"),
        ),
        Wrong(
            "the masked lanes hold 0, and 0 takes part in the maximum and the minimum",
            source=_SPREAD_SOLUTION.replace('tl.where(mask, x, float("-inf"))', "x").replace(
                'tl.where(mask, x, float("inf"))', "x"
            ),
        ),
        Wrong(
            "the masked lanes hold the same infinity for the maximum and the minimum: one filling cannot serve both",
            edit=('float("inf")', 'float("-inf")'),
        ),
        Wrong("the masked lanes hold 0 for the minimum", edit=('tl.where(mask, x, float("inf"))', "x")),
        Wrong("the masked lanes hold 0 for the maximum", edit=('tl.where(mask, x, float("-inf"))', "x")),
        Wrong(
            "the offset of the row is missing: every program reads row 0", edit=("x_ptr + row * stride_row", "x_ptr")
        ),
        Wrong(
            "the rows are taken to lie close together: the next one begins `stride_row` further, not `columns`",
            edit=("row * stride_row", "row * columns"),
        ),
        Wrong(
            "both strides are left out: the numbers are taken to lie one after the other, row by row",
            edit=("row * stride_row + offs * stride_col", "row * columns + offs"),
        ),
        Wrong("the stride of the columns is missing", edit=("offs * stride_col", "offs")),
        Wrong(
            "the two strides are exchanged",
            edit=("row * stride_row + offs * stride_col", "row * stride_col + offs * stride_row"),
        ),
        Wrong("the mask lets one number too many in: `<=` instead of `<`", edit=("offs < columns", "offs <= columns")),
        Wrong("every program stores at the same place: `+ row` is missing", edit=("out_ptr + row", "out_ptr")),
        Wrong(
            "nothing is stored: the 7 was there before",
            source=_SPREAD_SOLUTION[: _SPREAD_SOLUTION.index("    tl.store")],
        ),
        Wrong("the smallest is not subtracted", edit=("largest - smallest", "largest")),
        Wrong("it is the smallest minus the largest", edit=("largest - smallest", "smallest - largest")),
    ),
)

# --- 07.2 ----------------------------------------------------------------------------------------------------------

_SOFTMAX_SOLUTION = """\
@triton.jit
def softmax_kernel(s_ptr, p_ptr, stride_s, stride_p, seqlen_k, BLOCK_N: tl.constexpr):
    row = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < seqlen_k
    s = tl.load(s_ptr + row * stride_s[0] + offs_n * stride_s[1], mask=mask_n, other=float("-inf")).to(tl.float32)
    m = tl.max(s, axis=0)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    e = tl.exp(s - m_safe)
    l = tl.sum(e, axis=0)
    p = e / tl.where(l == 0.0, 1.0, l)
    tl.store(p_ptr + row * stride_p[0] + offs_n * stride_p[1], p, mask=mask_n)
"""

_SOFTMAX_OTHER_FORM = """\
@triton.jit
def softmax_kernel(s_ptr, p_ptr, stride_s, stride_p, seqlen_k, BLOCK_N: tl.constexpr):
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK_N)
    inside = offs < seqlen_k
    s = tl.load(s_ptr + pid * stride_s[0] + offs * stride_s[1], mask=inside, other=0.0).to(tl.float32)
    s = tl.where(inside, s, float("-inf"))
    m = tl.maximum(tl.max(s, axis=0), -1e30)
    e = tl.exp2((s - m) * 1.4426950408889634)
    l = tl.maximum(tl.sum(e, axis=0), 1e-30)
    tl.store(p_ptr + pid * stride_p[0] + offs * stride_p[1], e * (1.0 / l), mask=inside)
"""

_SOFTMAX_LOAD = 'tl.load(s_ptr + row * stride_s[0] + offs_n * stride_s[1], mask=mask_n, other=float("-inf"))'


def _softmax_cases():
    rng = np.random.default_rng(72)
    s = rng.standard_normal((3, 6)).round(2)
    hidden = s.copy()
    hidden[1] = -np.inf
    hidden[2, :4] = -np.inf
    return [
        Case("rows shorter than the block", s, 8),
        Case("rows as long as the block", rng.standard_normal((2, 8)).round(2), 8),
        Case("scores around 200", s + 200, 8),
        Case("scores around -200", s - 200, 8),
        Case("a row of -inf, and one that is -inf in front", hidden, 8),
        Case("every second column of an array", s, 8, (13, 2)),
        Case("a transposed array", s, 16, (1, 3)),
        Case("scores in float16, weights in float32", s, 8, None, (19, 1), "float16"),
        Case("one key", s[:, :1], 8),
    ]


def _call_softmax(kernel, s, block, strides=None, strides_p=(19, 1), dtype="float32"):
    _require_kernel(kernel)
    source = _place(s.shape, _two_strides(s.shape, strides), dtype, s)
    out = _place(s.shape, strides_p, "float32")
    arguments = source[0], out[0], source[0].stride(), out[0].stride(), s.shape[1]
    return _launch(kernel, (len(s),), arguments, {"BLOCK_N": block}, [source], out)


_SOFTMAX = Exercise(
    id="07.2",
    title="The softmax of a row, fused",
    level=2,
    task=(
        "Write the softmax of each row of `s` as one kernel, without looking at the one above. One program takes one "
        "row and loads each of its numbers **once**. `stride_s` and `stride_p` are pairs (of the row, of the column); "
        "`BLOCK_N` is a power of two, at least `seqlen_k`. `s` may be float16; compute in float32. Scores may be "
        "large, and a row of -inf only gives 0. Nothing outside of `p` may be written."
    ),
    name="softmax_kernel",
    stub="""\
@triton.jit
def softmax_kernel(s_ptr, p_ptr, stride_s, stride_p, seqlen_k, BLOCK_N: tl.constexpr):
    raise NotImplementedError
""",
    solution=_SOFTMAX_SOLUTION,
    cases=_softmax_cases,
    also_right=(_SOFTMAX_OTHER_FORM,),
    rtol=1e-4,
    atol=1e-7,
    setup=_SETUP,
    call=_call_softmax,
    wrong=(
        Wrong(
            "the maximum is not subtracted: large scores overflow", edit=("tl.exp(s - m_safe)", "tl.exp(s)"), stumble=11
        ),
        Wrong(
            "the masked lanes hold 0 instead of -inf: each of them adds to the sum",
            edit=('other=float("-inf")', "other=0.0"),
        ),
        Wrong(
            "the load has no mask: what lies behind the row counts as scores",
            edit=(', mask=mask_n, other=float("-inf")', ""),
        ),
        Wrong("the store has no mask: the lanes past the end write behind the row", edit=(", p, mask=mask_n", ", p")),
        Wrong("it is divided by the maximum, not by the sum", edit=("tl.where(l == 0.0, 1.0, l)", "m")),
        Wrong(
            "nothing is stored: the 7 was there before",
            source=_SOFTMAX_SOLUTION[: _SOFTMAX_SOLUTION.index("    tl.store")],
        ),
        Wrong("it is not divided by the sum", edit=("p = e / tl.where(l == 0.0, 1.0, l)", "p = e")),
        Wrong(
            "the sum is taken over the scores, not over their exponentials",
            edit=("tl.sum(e, axis=0)", "tl.sum(s, axis=0)"),
        ),
        Wrong(
            "a row of -inf only becomes NaN: -inf minus -inf, or a division by its sum, 0",
            edit=('tl.where(m == float("-inf"), 0.0, m)', "m"),
            stumble=13,
        ),
        Wrong(
            "the offset of the row is missing in the load: every program reads row 0",
            edit=("s_ptr + row * stride_s[0]", "s_ptr"),
        ),
        Wrong(
            "the offset of the row is missing in the store: every program writes row 0",
            edit=("p_ptr + row * stride_p[0]", "p_ptr"),
        ),
        Wrong("the strides of s are used for p", source=_SOFTMAX_SOLUTION.replace("stride_p[", "stride_s[")),
        Wrong(
            "the two strides of s are exchanged",
            edit=("row * stride_s[0] + offs_n * stride_s[1]", "row * stride_s[1] + offs_n * stride_s[0]"),
        ),
        Wrong("the rows of s are taken to lie close together", edit=("row * stride_s[0]", "row * seqlen_k")),
        Wrong("the stride of the columns of s is missing", edit=("offs_n * stride_s[1]", "offs_n")),
        Wrong(
            "the exponential has base 2, and the scores were not multiplied by log2(e)", edit=("tl.exp(", "tl.exp2(")
        ),
        Wrong(
            "s is loaded twice: the second load costs as many bytes as the first",
            source=_SOFTMAX_SOLUTION.replace("    l = ", f"    s = {_SOFTMAX_LOAD}\n    l = "),
        ),
    ),
)

# --- 07.3 ----------------------------------------------------------------------------------------------------------

_SCORES_SOLUTION = """\
@triton.jit
def scores_kernel(q_ptr, k_ptr, s_ptr, stride_q, stride_k, stride_s, seqlen_q, seqlen_k, scale,
                  HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_m = offs_m < seqlen_q
    mask_n = offs_n < seqlen_k
    q = tl.load(q_ptr + offs_m[:, None] * stride_q[0] + offs_d[None, :] * stride_q[1], mask=mask_m[:, None], other=0.0)
    k = tl.load(k_ptr + offs_n[None, :] * stride_k[0] + offs_d[:, None] * stride_k[1], mask=mask_n[None, :], other=0.0)
    s = tl.dot(q, k) * scale
    tl.store(s_ptr + offs_m[:, None] * stride_s[0] + offs_n[None, :] * stride_s[1], s,
             mask=mask_m[:, None] & mask_n[None, :])
"""

_K_LOAD = (
    "tl.load(k_ptr + offs_n[None, :] * stride_k[0] + offs_d[:, None] * stride_k[1], mask=mask_n[None, :], other=0.0)"
)
_K_LOAD_ROWS = (
    "tl.load(k_ptr + offs_n[:, None] * stride_k[0] + offs_d[None, :] * stride_k[1], mask=mask_n[:, None], other=0.0)"
)

_SCORES_TRANS = """\
@triton.jit
def scores_kernel(q_ptr, k_ptr, s_ptr, stride_q, stride_k, stride_s, seqlen_q, seqlen_k, scale,
                  HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * BLOCK_N
    m = first_m + tl.arange(0, BLOCK_M)[:, None]
    n = first_n + tl.arange(0, BLOCK_N)[:, None]
    d = tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(q_ptr + m * stride_q[0] + d * stride_q[1], mask=m < seqlen_q, other=0.0)
    k = tl.load(k_ptr + n * stride_k[0] + d * stride_k[1], mask=n < seqlen_k, other=0.0)
    s = scale * tl.dot(q, tl.trans(k))
    n = tl.trans(n)
    tl.store(s_ptr + m * stride_s[0] + n * stride_s[1], s, mask=(m < seqlen_q) & (n < seqlen_k))
"""


def _scores_cases():
    rng = np.random.default_rng(73)

    def pair(seqlen_q, seqlen_k, head_dim):
        return tuple(rng.standard_normal((n, head_dim)).round(1) for n in (seqlen_q, seqlen_k))

    square = pair(16, 16, 16)
    return [
        Case("one full tile", *square, 0.25, 16, 16),
        Case("ragged lengths, several tiles both ways", *pair(20, 37, 16), 0.25, 16, 16),
        Case("tiles that are not square", *pair(20, 40, 16), 0.5, 16, 32),
        Case("K is a transposed view", *square, 1.0, 16, 16, (16, 1), (1, 19)),
        Case("Q has a gap behind each row, K another one", *pair(18, 17, 32), 1.0, 16, 16, (40, 1), (33, 1)),
        Case("the columns of S have a stride", *pair(17, 18, 16), 1.0, 16, 16, (16, 1), (16, 1), (2, 50)),
    ]


def _call_scores(kernel, q, k, scale, block_m, block_n, strides_q=None, strides_k=None, strides_s=(101, 1)):
    _require_kernel(kernel)
    # float16 in, float32 out: a product of two float16 numbers is exact, so the GPU's TF32 plays no part.
    q_place = _place(q.shape, _two_strides(q.shape, strides_q), "float16", q)
    k_place = _place(k.shape, _two_strides(k.shape, strides_k), "float16", k)
    out = _place((len(q), len(k)), strides_s, "float32")
    tensors = q_place[0], k_place[0], out[0]
    constexprs = {"HEAD_DIM": q.shape[1], "BLOCK_M": block_m, "BLOCK_N": block_n}
    arguments = *tensors, *(x.stride() for x in tensors), len(q), len(k), scale
    grid = -(-len(q) // block_m), -(-len(k) // block_n)
    result = _launch(kernel, grid, arguments, constexprs, [q_place, k_place], out)
    result.pop("times_loaded", None)
    return result


_SCORES = Exercise(
    id="07.3",
    title="A tile of QKᵀ",
    level=3,
    task=(
        "Write the kernel of one tile of scores, `scale` · QKᵀ. Program (`pid_m`, `pid_n`) computes the `BLOCK_M` × "
        "`BLOCK_N` tile whose first row is `pid_m * BLOCK_M` and whose first column is `pid_n * BLOCK_N`. `q` is "
        "(seqlen_q, HEAD_DIM), `k` (seqlen_k, HEAD_DIM), `s` (seqlen_q, seqlen_k); each has its own pair of strides. "
        "`HEAD_DIM` is a power of two of at least 16, the lengths may be anything. Nothing outside of q and k may be "
        "read, nothing outside of s written."
    ),
    name="scores_kernel",
    stub="""\
@triton.jit
def scores_kernel(
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
):
    raise NotImplementedError
""",
    solution=_SCORES_SOLUTION,
    cases=_scores_cases,
    also_right=(_SCORES_TRANS,),
    rtol=1e-4,
    atol=1e-4,
    setup=_SETUP,
    call=_call_scores,
    wrong=(
        Wrong(
            "the first column of the tile is missing: every program takes the first keys",
            edit=("pid_n * BLOCK_N + tl.arange", "tl.arange"),
        ),
        Wrong(
            "the first row of the tile is missing: every program takes the first queries",
            edit=("pid_m * BLOCK_M + tl.arange", "tl.arange"),
        ),
        Wrong(
            "the tile begins at `pid`, not at `pid` times its side",
            source=_SCORES_SOLUTION.replace("pid_m * BLOCK_M", "pid_m").replace("pid_n * BLOCK_N", "pid_n"),
        ),
        Wrong(
            "the two program numbers are exchanged: axis 0 counts the query tiles, axis 1 the key tiles",
            source=_SCORES_SOLUTION.replace("program_id(0)", "program_id(2)")
            .replace("program_id(1)", "program_id(0)")
            .replace("program_id(2)", "program_id(1)"),
        ),
        Wrong(
            "the two strides of K are exchanged",
            edit=(
                "offs_n[None, :] * stride_k[0] + offs_d[:, None] * stride_k[1]",
                "offs_n[None, :] * stride_k[1] + offs_d[:, None] * stride_k[0]",
            ),
        ),
        Wrong(
            "the two strides of Q are exchanged",
            edit=(
                "offs_m[:, None] * stride_q[0] + offs_d[None, :] * stride_q[1]",
                "offs_m[:, None] * stride_q[1] + offs_d[None, :] * stride_q[0]",
            ),
        ),
        Wrong("K is read with the strides of Q", source=_SCORES_SOLUTION.replace("stride_k[", "stride_q[")),
        Wrong(
            "the tile is stored transposed: the strides of S are exchanged",
            edit=(
                "offs_m[:, None] * stride_s[0] + offs_n[None, :] * stride_s[1]",
                "offs_m[:, None] * stride_s[1] + offs_n[None, :] * stride_s[0]",
            ),
        ),
        Wrong("the scale is missing", edit=(" * scale", "")),
        Wrong(
            "the scale is always 1/√HEAD_DIM, and not the `scale` that is given",
            edit=(" * scale", " * (1.0 / HEAD_DIM**0.5)"),
        ),
        Wrong(
            "Q is multiplied with K, not with Kᵀ: the block of K must have d down and the keys across",
            edit=(_K_LOAD, _K_LOAD_ROWS),
        ),
        Wrong(
            "nothing is stored: the 7 was there before",
            source=_SCORES_SOLUTION[: _SCORES_SOLUTION.index("    tl.store")],
        ),
        Wrong("the store tests the rows only", edit=("mask=mask_m[:, None] & mask_n[None, :]", "mask=mask_m[:, None]")),
        Wrong(
            "the store tests the columns only", edit=("mask=mask_m[:, None] & mask_n[None, :]", "mask=mask_n[None, :]")
        ),
        Wrong("the store has no mask", edit=(", s,\n             mask=mask_m[:, None] & mask_n[None, :]", ", s")),
        Wrong(
            "the mask of the keys compares with the number of queries", edit=("offs_n < seqlen_k", "offs_n < seqlen_q")
        ),
    ),
)

EXERCISES = [_SPREAD, _SOFTMAX, _SCORES]
