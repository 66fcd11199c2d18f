"""Chapter 08: two parts of the forward kernel, and then the whole of it."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong
from flashlib.check.ex_07 import _AROUND, _GUARD, _place, _require_kernel

_SETUP = "from flashlib.device import tl, triton\nfrom flashlib.tiles import load_tile, store_tile"
_LOG2_E = 1.4426950408889634


def _run_kernel(launch):
    try:
        launch()
    except Exception as error:
        # The interpreter wraps what happened in an error of its own.
        raise (error.__cause__ or error) from None


def _to_device(array, dtype="float32"):
    import torch

    from flashlib import device

    return torch.from_numpy(np.ascontiguousarray(array)).to(device.kernel_device(), getattr(torch, dtype))


# --- 08.1 ----------------------------------------------------------------------------------------------------------

_HIDE_SOLUTION = """\
@triton.jit
def hide(s, first_m, first_n, seqlen_q, seqlen_k, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    seen = offs_n[None, :] < seqlen_k
    if CAUSAL:
        seen = seen & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
    return tl.where(seen, s, float("-inf"))
"""

_HIDE_BY_END = """\
@triton.jit
def hide(s, first_m, first_n, seqlen_q, seqlen_k, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.arange(0, BLOCK_M)[:, None] + first_m
    j = tl.arange(0, BLOCK_N)[None, :] + first_n
    # Counted from the end: the last query sees the last key.
    if CAUSAL:
        s = tl.where(seqlen_q - 1 - i <= seqlen_k - 1 - j, s, float("-inf"))
    return tl.where(j >= seqlen_k, float("-inf"), s)
"""


def _hide_cases():
    rng = np.random.default_rng(81)

    def case(label, first_m, first_n, seqlen_q, seqlen_k, causal):
        return Case(label, rng.standard_normal((4, 8)).round(2), first_m, first_n, seqlen_q, seqlen_k, causal)

    return [
        case("a full tile", 4, 8, 12, 24, False),
        case("the last tile of keys", 4, 8, 12, 13, False),
        case("causal, as many keys as queries", 4, 0, 8, 8, True),
        case("causal, more keys than queries", 4, 8, 8, 15, True),
        case("causal, fewer keys than queries", 4, 0, 12, 7, True),
        case("causal, a tile that no query sees", 0, 16, 24, 24, True),
        case("causal, a tile that every query sees", 8, 0, 24, 24, True),
    ]


def _call_hide(hide, s, first_m, first_n, seqlen_q, seqlen_k, causal):
    _require_kernel(hide)
    import torch

    from flashlib.check.parts_08 import hide_kernel

    source = _to_device(s)
    out = torch.empty_like(source)
    sizes = {"BLOCK_M": s.shape[0], "BLOCK_N": s.shape[1]}
    _run_kernel(
        lambda: hide_kernel[(1,)](source, out, first_m, first_n, seqlen_q, seqlen_k, HIDE=hide, CAUSAL=causal, **sizes)
    )
    # Rows past the end are never stored: what happens to them is free.
    return {"s": out[: seqlen_q - first_m].double().cpu().numpy()}


_HIDE = Exercise(
    id="08.1",
    title="Hide the keys that do not count",
    level=1,
    task=(
        "Write the mask of one tile: `s` holds the scores of the queries from `first_m` on (`BLOCK_M` of them) with "
        "the keys from `first_n` on (`BLOCK_N`). Return `s` with -inf at every key past `seqlen_k`, and where `CAUSAL` "
        "also at every key that its query does not see (bottom-right: `j <= i + seqlen_k - seqlen_q`)."
    ),
    name="hide",
    stub="""\
@triton.jit
def hide(s, first_m, first_n, seqlen_q, seqlen_k, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    raise NotImplementedError
""",
    solution=_HIDE_SOLUTION,
    cases=_hide_cases,
    also_right=(_HIDE_BY_END,),
    setup=_SETUP,
    call=_call_hide,
    wrong=(
        Wrong(
            "the keys past the end are not masked: they keep the score 0 and count",
            edit=("offs_n[None, :] < seqlen_k", "offs_n[None, :] < first_n + BLOCK_N"),
        ),
        Wrong(
            "the hidden scores are set to 0 and not to -inf: a hidden key still adds exp(0 - m)",
            edit=('float("-inf")', "0.0"),
        ),
        Wrong(
            "the mask is aligned at the top left: query i sees the keys 0 to i, whatever the lengths",
            edit=(" + seqlen_k - seqlen_q", ""),
            stumble=12,
        ),
        Wrong("the offset has the wrong sign", edit=("+ seqlen_k - seqlen_q", "- seqlen_k + seqlen_q")),
        Wrong(
            "a query does not see the key of its own position: `<` instead of `<=`",
            edit=("(offs_n[None, :] <=", "(offs_n[None, :] <"),
        ),
        Wrong(
            "the tile's first key is forgotten: positions are counted from the start of the tile",
            edit=("first_n + tl.arange", "tl.arange"),
        ),
        Wrong(
            "the tile's first query is forgotten: every tile of queries is masked like the first",
            edit=("first_m + tl.arange", "tl.arange"),
        ),
        Wrong(
            "the mask is upside down: each query sees the later keys",
            edit=("(offs_n[None, :] <=", "(offs_n[None, :] >="),
        ),
        Wrong("the last key is hidden too", edit=("< seqlen_k\n", "< seqlen_k - 1\n")),
    ),
)

# --- 08.2 ----------------------------------------------------------------------------------------------------------

_UPDATE_SOLUTION = """\
@triton.jit
def update(m_i, l_i, acc, s, v, qk_scale):
    m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(s * qk_scale - m_safe[:, None])
    alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
    return m_new, l_i, acc
"""

_UPDATE_SCALED_FIRST = """\
@triton.jit
def update(m_i, l_i, acc, s, v, qk_scale):
    s = s * qk_scale
    m_tile = tl.max(s, axis=1)
    m_new = tl.where(m_tile > m_i, m_tile, m_i)
    m_finite = tl.maximum(m_new, -1e30)
    alpha = tl.exp2(m_i - m_finite)
    p = tl.exp2(s - m_finite[:, None])
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None])
    return m_new, alpha * l_i + tl.sum(p, axis=1), acc
"""


def _update_cases():
    rng = np.random.default_rng(82)
    x = rng.standard_normal

    def state(fresh=False):
        if fresh:
            return np.full(16, -np.inf), np.zeros(16), np.zeros((16, 16))
        return x(16).round(2), rng.uniform(1, 3, 16).round(2), x((16, 16)).round(2)

    def tile(spread=2.0):
        return (spread * x((16, 16))).round(2), x((16, 16)).round(1)

    hidden, half = tile(), tile()
    hidden[0][:] = -np.inf
    half[0][:, 8:] = -np.inf
    half[0][3:6] = -np.inf
    scale = 0.5 * _LOG2_E
    lower = (np.full(16, 12.0), *state()[1:])
    return [
        Case("the first tile of a row", *state(fresh=True), *tile(), scale),
        Case("a tile in the middle", *state(), *tile(), scale),
        Case("the tile's scores are all below the running maximum", *lower, *tile(), scale),
        Case("half of the keys hidden, three rows see none of them", *state(), *half, scale),
        Case("no key seen so far, and none in this tile", *state(fresh=True), *hidden, scale),
    ]


def _call_update(update, m_i, l_i, acc, s, v, qk_scale):
    _require_kernel(update)
    import torch

    from flashlib.check.parts_08 import update_kernel

    # float16 values: a product with them is exact enough, so a GPU's TF32 plays no part.
    inputs = [_to_device(x) for x in (m_i, l_i, acc, s)] + [_to_device(v, "float16")]
    outputs = [torch.empty_like(x) for x in inputs[:3]]
    _run_kernel(lambda: update_kernel[(1,)](*inputs, *outputs, qk_scale, UPDATE=update, SIDE=len(s)))
    return {name: x.double().cpu().numpy() for name, x in zip(("m", "l", "acc"), outputs, strict=True)}


_UPDATE = Exercise(
    id="08.2",
    title="The step of the loop, in base 2",
    level=2,
    task=(
        "Write the body of the loop: bring the state of a tile of rows up to date with one tile of keys. `s` are the "
        "bare products of q and k, -inf where a key is hidden; `qk_scale` is scale · log2(e), positive. `m_i` is the "
        "largest `s * qk_scale` so far, and `l_i` and `acc` are sums of powers of 2 relative to it. Return the new "
        "`m_i, l_i, acc`. `v` is float16, so p has to become float16 for `tl.dot`. A row that has seen no key keeps "
        "-inf, 0 and 0."
    ),
    name="update",
    stub='''\
@triton.jit
def update(m_i, l_i, acc, s, v, qk_scale):
    """m_i, l_i: [BLOCK_M]; acc: [BLOCK_M, HEAD_DIM]; s: [BLOCK_M, BLOCK_N]; v: [BLOCK_N, HEAD_DIM]."""
    raise NotImplementedError
''',
    solution=_UPDATE_SOLUTION,
    cases=_update_cases,
    also_right=(_UPDATE_SCALED_FIRST,),
    rtol=5e-3,
    atol=5e-3,
    setup=_SETUP,
    call=_call_update,
    wrong=(
        Wrong(
            "acc is not rescaled when the maximum moves: alpha is missing",
            edit=("acc * alpha[:, None] + tl.dot", "acc + tl.dot"),
        ),
        Wrong(
            "l is not rescaled when the maximum moves: alpha is missing", edit=("l_i * alpha + tl.sum", "l_i + tl.sum")
        ),
        Wrong(
            "the exponentials are natural ones, but qk_scale was made for base 2: exponents are 1.44 times too large",
            source=_UPDATE_SOLUTION.replace("tl.exp2(", "tl.exp("),
        ),
        Wrong(
            "only alpha is a natural exponential; p and alpha must have the same base",
            edit=("tl.exp2(m_i - m_safe)", "tl.exp(m_i - m_safe)"),
        ),
        Wrong(
            "the maximum of the bare products is compared with m_i, which is scaled",
            edit=("tl.max(s, 1) * qk_scale", "tl.max(s, 1)"),
        ),
        Wrong("the scores are not scaled in the exponent", edit=("s * qk_scale - m_safe", "s - m_safe")),
        Wrong(
            "the tile's own maximum replaces the running one",
            edit=("tl.maximum(m_i, tl.max(s, 1) * qk_scale)", "tl.max(s, 1) * qk_scale"),
        ),
        Wrong(
            "the old maximum is returned, and not the new one",
            edit=("return m_new, l_i, acc", "return m_i, l_i, acc"),
        ),
        Wrong("alpha is upside down, 2^(m_new - m_i)", edit=("tl.exp2(m_i - m_safe)", "tl.exp2(m_safe - m_i)")),
        Wrong(
            "-inf is subtracted from -inf: a row without a key becomes NaN",
            edit=('tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new"),
            stumble=13,
        ),
        Wrong("the sum runs over the queries, axis 0, and not over the keys", edit=("tl.sum(p, 1)", "tl.sum(p, 0)")),
        Wrong(
            "acc is divided by l inside the loop",
            edit=("return m_new, l_i, acc", "return m_new, l_i, acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]"),
        ),
    ),
)

# --- 08.3 ----------------------------------------------------------------------------------------------------------

_HEAD = """\
@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_out,
    nheads,
    seqlen_q,
    seqlen_k,
    scale,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
"""

_FORWARD_SOLUTION = (
    _HEAD
    + """\
    pid_m = tl.program_id(0)
    pid_bh = tl.program_id(1)
    b = pid_bh // nheads
    h = pid_bh % nheads
    first_m = pid_m * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)
    qk_scale = scale * 1.4426950408889634
    q = load_tile(q_ptr, stride_q, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False, False)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    hi = seqlen_k
    if CAUSAL:
        hi = tl.minimum(hi, tl.minimum(first_m + BLOCK_M, seqlen_q) + seqlen_k - seqlen_q)
    for first_n in range(0, hi, BLOCK_N):
        k = load_tile(k_ptr, stride_k, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        s = tl.dot(q, k.T)
        offs_n = first_n + tl.arange(0, BLOCK_N)
        seen = offs_n[None, :] < seqlen_k
        if CAUSAL:
            seen = seen & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * qk_scale - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_tile(v_ptr, stride_v, b, h, first_n, seqlen_k, BLOCK_N, HEAD_DIM, HEAD_DIM, False, False)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    out = acc / l_safe[:, None]
    store_tile(out_ptr, stride_out, out, b, h, first_m, seqlen_q, BLOCK_M, HEAD_DIM, HEAD_DIM, False)
    lse = (m_i + tl.log2(l_safe)) * 0.6931471805599453
    tl.store(lse_ptr + pid_bh * seqlen_q + offs_m, lse, mask=offs_m < seqlen_q)
"""
)

_FORWARD_BY_HAND = (
    _HEAD
    + """\
    bh = tl.program_id(1)
    b, h = bh // nheads, bh % nheads
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    rows = i < seqlen_q
    q_at = q_ptr + b * stride_q[0] + h * stride_q[1] + i[:, None] * stride_q[2] + d[None, :] * stride_q[3]
    q = tl.load(q_at, mask=rows[:, None], other=0.0)
    k_at = k_ptr + b * stride_k[0] + h * stride_k[1] + d[:, None] * stride_k[3]
    v_at = v_ptr + b * stride_v[0] + h * stride_v[1] + d[None, :] * stride_v[3]
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = seqlen_k
    if CAUSAL:
        last = tl.minimum(tl.program_id(0) * BLOCK_M + BLOCK_M, seqlen_q) - 1
        end = tl.minimum(end, last + 1 + seqlen_k - seqlen_q)
    for start in range(0, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_at + j[None, :] * stride_k[2], mask=(j < seqlen_k)[None, :], other=0.0)
        v = tl.load(v_at + j[:, None] * stride_v[2], mask=(j < seqlen_k)[:, None], other=0.0)
        s = tl.dot(q, k) * scale
        keep = (j < seqlen_k)[None, :]
        if CAUSAL:
            keep = keep & (j[None, :] - seqlen_k <= i[:, None] - seqlen_q)
        s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    some = l > 0
    l = tl.where(some, l, 1.0)
    out_at = out_ptr + b * stride_out[0] + h * stride_out[1] + i[:, None] * stride_out[2] + d[None, :] * stride_out[3]
    tl.store(out_at, (acc / l[:, None]).to(out_ptr.dtype.element_ty), mask=rows[:, None])
    tl.store(lse_ptr + bh * seqlen_q + i, tl.where(some, m + tl.log(l), float("-inf")), mask=rows)
"""
)


def _forward_cases():
    rng = np.random.default_rng(83)

    def case(label, batch, nheads, seqlen_q, seqlen_k, causal, scale=0.5, block_n=16):
        shapes = [(batch, nheads, n, 16) for n in (seqlen_q, seqlen_k, seqlen_k)]
        return Case(label, *(rng.standard_normal(shape).round(1) for shape in shapes), scale, causal, block_n)

    return [
        case("one head, whole tiles", 1, 1, 16, 32, False),
        case("two batches of two heads", 2, 2, 16, 16, False, 0.25),
        case("ragged lengths", 1, 1, 17, 21, False),
        case("causal, as many keys as queries", 1, 1, 32, 32, True),
        case("causal, more keys than queries", 1, 1, 18, 45, True, 0.25, 32),
        case("causal, fewer keys than queries", 1, 1, 37, 20, True),
    ]


def _strides(shape, gap, transposed):
    """Return strides with a gap behind each row; transposed: heads inside of positions, as models lay them out."""
    _, nheads, seqlen, head_dim = shape
    row = head_dim + gap
    if transposed:
        return seqlen * nheads * row, row, nheads * row, 1
    return nheads * seqlen * row, seqlen * row, row, 1


def _call_forward(kernel, q, k, v, scale, causal, block_n):
    _require_kernel(kernel)
    import contextlib

    import torch

    from flashlib import device
    from flashlib.meter import Meter

    batch, nheads, seqlen_q, head_dim = q.shape
    # A layout of its own for each: a stride taken from the wrong tensor shows.
    places = [
        _place(x.shape, _strides(x.shape, gap, turned), "float16", x)
        for x, gap, turned in ((q, 3, False), (k, 5, True), (v, 0, False))
    ]
    out = _place(q.shape, _strides(q.shape, 1, True), "float16")
    lse = _place(q.shape[:3], (nheads * seqlen_q, seqlen_q, 1), "float32")
    tensors = [place[0] for place in (*places, out)]
    arenas = [place[1] for place in (*places, out, lse)]
    meter = Meter(tolerate=arenas) if device.interpreting() else None
    sizes = {"CAUSAL": causal, "HEAD_DIM": head_dim, "BLOCK_M": 16, "BLOCK_N": block_n}
    with meter or contextlib.nullcontext():
        _run_kernel(
            lambda: kernel[(-(-seqlen_q // 16), batch * nheads)](
                *tensors, lse[0], *(x.stride() for x in tensors), nheads, seqlen_q, k.shape[2], scale, **sizes
            )
        )
    result = {"out": out[0].double().cpu().numpy(), "lse": lse[0].double().cpu().numpy(), "stored_outside": 0}
    for view, arena in (out, lse):
        around = torch.ones_like(arena, dtype=torch.bool)
        around.as_strided(view.shape, view.stride(), _GUARD).fill_(False)
        result["stored_outside"] += int((arena[around] != _AROUND).sum())
    if meter:
        result |= {"loaded_outside": meter.outside["load"]}
        # Rows of K: the tiles that no query sees must not be loaded.
        result |= {"rows_of_k_loaded": meter.loads.get("k", 0) / (2 * head_dim)}
    return result


_TASK = (
    "Write the whole forward. Program (`pid_m`, `pid_bh`) = (`tl.program_id(0)`, `tl.program_id(1)`) takes one tile of "
    "queries of head `pid_bh % nheads` of batch `pid_bh // nheads`. All tensors are (batch, nheads, seqlen, HEAD_DIM) "
    "float16, each with its own four strides; `lse` is float32, (batch, nheads, seqlen_q), contiguous: the natural "
    "log-sum-exp. Any lengths; `scale` is positive; `CAUSAL` is bottom-right, and tiles that no query sees are not "
    "loaded. A row without a key: out 0, lse -inf. `load_tile` and `store_tile` may be used."
)

_FORWARD = Exercise(
    id="08.3",
    title="The whole forward",
    level=3,
    task=_TASK,
    name="forward_kernel",
    stub=_HEAD + "    raise NotImplementedError\n",
    solution=_FORWARD_SOLUTION,
    cases=_forward_cases,
    also_right=(_FORWARD_BY_HAND,),
    rtol=5e-3,
    atol=5e-3,
    setup=_SETUP,
    call=_call_forward,
    wrong=(
        Wrong(
            "the keys past the end are not masked: the loaded zeros count as keys with score 0",
            edit=("seen = offs_n[None, :] < seqlen_k", "seen = offs_n[None, :] < first_n + BLOCK_N"),
        ),
        Wrong(
            "hidden scores are set to 0 and not to -inf",
            edit=('tl.where(seen, s, float("-inf"))', "tl.where(seen, s, 0.0)"),
        ),
        Wrong(
            "the exponent of exp2 lacks the factor log2(e)",
            edit=("scale * 1.4426950408889634", "scale"),
        ),
        Wrong("acc is not rescaled: alpha is missing", edit=("acc = acc * alpha[:, None]\n", "acc = acc\n")),
        Wrong("l is not rescaled: alpha is missing", edit=("l_i * alpha + tl.sum", "l_i + tl.sum")),
        Wrong("lse is left in base 2", edit=(" * 0.6931471805599453", ""), stumble=14),
        Wrong("lse lacks the maximum", edit=("(m_i + tl.log2(l_safe))", "tl.log2(l_safe)"), stumble=14),
        Wrong(
            "the causal mask is aligned at the top left",
            source=_FORWARD_SOLUTION.replace(" + seqlen_k - seqlen_q", ""),
            stumble=12,
        ),
        Wrong(
            "the loop ends before the diagonal tile",
            edit=("tl.minimum(first_m + BLOCK_M, seqlen_q) + seqlen_k - seqlen_q", "first_m + seqlen_k - seqlen_q"),
        ),
        Wrong(
            "the tiles that no query sees are loaded and computed, though they change nothing",
            edit=(
                "hi = tl.minimum(hi, tl.minimum(first_m + BLOCK_M, seqlen_q) + seqlen_k - seqlen_q)",
                "hi = seqlen_k",
            ),
        ),
        Wrong("V is read with the strides of K", edit=("v_ptr, stride_v", "v_ptr, stride_k")),
        Wrong("K is read with the strides of Q", edit=("k_ptr, stride_k", "k_ptr, stride_q")),
        Wrong("out is stored with the strides of Q", edit=("out_ptr, stride_out", "out_ptr, stride_q")),
        Wrong(
            "batch and head are exchanged",
            edit=("b = pid_bh // nheads\n    h = pid_bh % nheads", "h = pid_bh // nheads\n    b = pid_bh % nheads"),
        ),
        Wrong(
            "a row that sees no key divides 0 by 0, or takes -inf from -inf: NaN",
            source=_FORWARD_SOLUTION.replace('tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new").replace(
                "tl.where(l_i == 0.0, 1.0, l_i)", "l_i"
            ),
            stumble=13,
        ),
        Wrong("out is not divided by l", edit=("acc / l_safe[:, None]", "acc")),
        Wrong("every head stores its lse at the place of the first", edit=("lse_ptr + pid_bh * seqlen_q", "lse_ptr")),
        Wrong(
            "lse forgets the batch: the heads of every batch store theirs at the place of the first batch's",
            edit=("lse_ptr + pid_bh * seqlen_q", "lse_ptr + h * seqlen_q"),
        ),
        Wrong(
            "lse is stored without a mask: the rows past the last query overwrite the next head's",
            edit=(", mask=offs_m < seqlen_q", ""),
        ),
        Wrong(
            "the loop ends where it should (bottom right), but the mask of the last tiles is aligned at the top left",
            edit=("(offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)", "(offs_n[None, :] <= offs_m[:, None])"),
            stumble=12,
        ),
        Wrong(
            "V begins at row 0 in every step of the loop",
            edit=("v_ptr, stride_v, b, h, first_n", "v_ptr, stride_v, b, h, 0"),
        ),
    ),
)

EXERCISES = [_HIDE, _UPDATE, _FORWARD]
