"""Masks and score changes as plug-ins: a few lines of Triton that the forward and the backward kernels call.

A mask says which keys a query sees; a score changes s before the softmax. Both are `@triton.jit` functions on tiles of
indices, held under a string key, because a custom op can take a string but no function. The window, softcap, ALiBi and
the bias, which many models have, are built in beside them.

Source: the idea of score and mask functions is FlexAttention's, https://arxiv.org/abs/2412.05496
"""

import hashlib
import inspect
from typing import NamedTuple

import torch

from flashlib.device import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)
_REGISTERED = {}


class Bounds(NamedTuple):
    """Where a mask has empty, partial and full tiles, as two `@triton.jit` functions.

    `keys(b, h, first, end, seqlen_q, seqlen_k, aux)` answers for the queries first … end - 1: it returns the positions
    (first, first_full, end_full, end) of keys. No query of the tile sees a key outside first … end - 1, and every query
    sees every key of first_full … end_full - 1. `queries(…)` is the transpose: the same about queries, for keys first
    … end - 1.
    """

    keys: object
    queries: object


class Mask:
    """A rule for which keys a query sees.

    Args:
        fn: `@triton.jit` function (b, h, i, j, seqlen_q, seqlen_k, aux) -> boolean tile. b, h are numbers; i (query
            positions) and j (key positions) are int32 tiles that broadcast against each other, [rows, 1] and [1,
            keys] in one kernel, [1, rows] and [keys, 1] in another, always inside the lengths. The result broadcasts
            likewise.
        bounds: Bounds, or None to test every tile.
        aux: tensors the functions may read, passed as a tuple of pointers in this order. They get no gradient.

    Raises:
        ValueError: fn or a bound is no `@triton.jit` function, or aux holds something that is not a tensor without
            gradient.
    """

    def __init__(self, fn, bounds=None, aux=()):
        _check_jit("fn", fn)
        if bounds is not None:
            if not isinstance(bounds, tuple) or len(bounds) != 2:
                raise ValueError(f"bounds must be Bounds(keys, queries) or None, got {bounds!r}")
            bounds = Bounds(*bounds)
            _check_jit("bounds.keys", bounds.keys)
            _check_jit("bounds.queries", bounds.queries)
        self.aux = _checked_aux(aux)
        self.key = _register((fn, *(bounds or (None, None))))


class Score:
    """A change of the scores s = scale·qk before the mask and the softmax.

    Args:
        fn: `@triton.jit` function (s, b, h, i, j, aux) -> new scores, float32; the indices are as in Mask.
        grad: `@triton.jit` function (ds, s, b, h, i, j, aux) -> the gradient of the old scores; ds is that of the new
            ones, s the old scores.
        aux: as in Mask.

    Raises:
        ValueError: fn or grad is no `@triton.jit` function, or aux holds something that is not a tensor without
            gradient.
    """

    def __init__(self, fn, grad, aux=()):
        _check_jit("fn", fn)
        _check_jit("grad", grad)
        self.aux = _checked_aux(aux)
        self.key = _register((fn, grad))


def registered(key, size):
    """Return the functions registered under a key: (fn, keys, queries) of a Mask, (fn, grad) of a Score.

    Args:
        key: `Mask.key` or `Score.key`; "" stands for no hook.
        size: how many functions there are, 3 or 2.

    Returns:
        tuple of `size` functions; all None for the key "".

    Raises:
        RuntimeError: no such hook was made in this process.
    """
    if not key:
        return (None,) * size
    if key not in _REGISTERED:
        raise RuntimeError(
            f"the hook {key!r} is not registered in this process: make the Mask or Score before the call"
        )
    return _REGISTERED[key]


def _check_jit(name, fn):
    # Compiled and interpreted kernels are different classes; both wrap a Python function and can be launched.
    if not (hasattr(fn, "fn") and hasattr(fn, "run")):
        raise ValueError(f"{name} must be a @triton.jit function, got {type(fn).__name__}")


def _checked_aux(aux):
    for x in aux:
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"aux must hold tensors, got {type(x).__name__}")
        if x.requires_grad:
            raise ValueError("aux must hold tensors that do not require grad: only q, k and v get gradients")
    return list(aux)


def _register(functions):
    digest = hashlib.sha256()
    for fn in functions:
        digest.update(_text(fn, set()).encode())
    key = f"{functions[0].fn.__name__}:{digest.hexdigest()[:16]}"
    _REGISTERED[key] = functions
    return key


def _text(fn, seen):
    """Return the source of a jit function and of what it names: helpers and constants decide what it computes."""
    if fn is None or fn in seen:
        return ""
    seen.add(fn)
    python = fn.fn
    text = inspect.getsource(python)
    scope = inspect.getclosurevars(python)
    for name, value in sorted({**scope.globals, **scope.nonlocals}.items()):
        if hasattr(value, "fn") and hasattr(value, "run"):
            text += _text(value, seen)
        elif not inspect.ismodule(value):
            text += f"{name}={value!r}\n"
    return text


# --- what the kernels call ------------------------------------------------------------------------------------------


@triton.jit
def visible(b, h, i, j, seqlen_q, seqlen_k, left, right, aux, CAUSAL: tl.constexpr, MASK: tl.constexpr):
    """Return which of the pairs (query i, key j) count: inside the lengths, causal, in the window, seen by the mask."""
    seen = j < seqlen_k
    if CAUSAL:
        seen = seen & (j <= i + seqlen_k - seqlen_q)
    if left is not None:
        seen = seen & (j >= i + seqlen_k - seqlen_q - left)
    if right is not None:
        seen = seen & (j <= i + seqlen_k - seqlen_q + right)
    if MASK is not None:
        seen = seen & MASK(b, h, tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1), seqlen_q, seqlen_k, aux)
    return seen


@triton.jit
def key_range(
    b, h, first, end, seqlen_q, seqlen_k, left, right, aux,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Return where the tiles that the queries first … end - 1 see begin, begin to be full, cease to be so, and end.

    All but the last are multiples of BLOCK, and they do not decrease.
    """
    lo = 0
    lo_full = 0
    hi_full = seqlen_k
    hi = seqlen_k
    if CAUSAL:
        hi_full = tl.minimum(hi_full, first + 1 + seqlen_k - seqlen_q)
        hi = tl.minimum(hi, end + seqlen_k - seqlen_q)
    if left is not None:
        lo = tl.maximum(lo, first + seqlen_k - seqlen_q - left)
        lo_full = tl.maximum(lo_full, end - 1 + seqlen_k - seqlen_q - left)
    if right is not None:
        hi_full = tl.minimum(hi_full, first + 1 + seqlen_k - seqlen_q + right)
        hi = tl.minimum(hi, end + seqlen_k - seqlen_q + right)
    if MASK is not None:
        if KEYS is None:
            hi_full = 0
        else:
            bounds = KEYS(b, h, first, end, seqlen_q, seqlen_k, aux)
            lo = tl.maximum(lo, bounds[0])
            lo_full = tl.maximum(lo_full, bounds[1])
            hi_full = tl.minimum(hi_full, bounds[2])
            hi = tl.minimum(hi, bounds[3])
    return whole_tiles(lo, lo_full, hi_full, hi, BLOCK)


@triton.jit
def query_range(
    b, h, first, end, seqlen_q, seqlen_k, left, right, aux,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Return the same about the tiles of queries that see the keys first … end - 1; some may lie past seqlen_k."""
    lo = 0
    lo_full = 0
    # A query past seqlen_q has p = 0 by its lse, so the last tile of queries counts as full.
    hi_full = tl.cdiv(seqlen_q, BLOCK) * BLOCK
    hi = seqlen_q
    if CAUSAL:
        lo = tl.maximum(lo, first + seqlen_q - seqlen_k)
        lo_full = tl.maximum(lo_full, end - 1 + seqlen_q - seqlen_k)
    if right is not None:
        lo = tl.maximum(lo, first + seqlen_q - seqlen_k - right)
        lo_full = tl.maximum(lo_full, end - 1 + seqlen_q - seqlen_k - right)
    if left is not None:
        hi = tl.minimum(hi, tl.minimum(end, seqlen_k) + seqlen_q - seqlen_k + left)
        if first + 1 + seqlen_q - seqlen_k + left < seqlen_q:
            hi_full = first + 1 + seqlen_q - seqlen_k + left
    if MASK is not None:
        if QUERIES is None:
            hi_full = 0
        else:
            bounds = QUERIES(b, h, first, tl.minimum(end, seqlen_k), seqlen_q, seqlen_k, aux)
            lo = tl.maximum(lo, bounds[0])
            lo_full = tl.maximum(lo_full, bounds[1])
            hi = tl.minimum(hi, bounds[3])
            if bounds[2] < seqlen_q:
                hi_full = tl.minimum(hi_full, bounds[2])
    # Keys past seqlen_k have to be tested, so the last tile of keys may have no full tile of queries.
    if end > seqlen_k:
        lo_full = seqlen_q
    return whole_tiles(lo, lo_full, hi_full, hi, BLOCK)


@triton.jit
def whole_tiles(lo, lo_full, hi_full, hi, BLOCK: tl.constexpr):
    """Round to whole tiles outwards for what is visible, inwards for what is full."""
    lo = lo // BLOCK * BLOCK
    lo_full = tl.cdiv(lo_full, BLOCK) * BLOCK
    lo_full = tl.maximum(lo_full, lo)
    hi_full = tl.maximum(hi_full, 0) // BLOCK * BLOCK
    hi_full = tl.maximum(hi_full, lo_full)
    return lo, lo_full, hi_full, hi


@triton.jit
def changed(
    s, less, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux,
    SCORE: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Return, less `less`, the scores in base 2 that s = qk becomes: scale, softcap, ALiBi, bias, score hook."""
    if SCORE is None:
        # Base 2 from the start, and the difference part of the first product: that saves two operations an element.
        s = _built_in(s, less, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, LOG2_E, ACCURATE)
    else:
        s = _built_in(s, 0.0, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, 1.0, ACCURATE)
        s = SCORE(s, b, h, tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1), score_aux) * LOG2_E - less
    return s


@triton.jit
def hook_gradient(
    ds, s, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux,
    GRAD: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Return the gradient of what the score hook was given, which is the bias's too, from that of its result."""
    if GRAD is not None:
        s = _built_in(s, 0.0, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, 1.0, ACCURATE)
        ds = GRAD(ds, s, b, h, tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1), score_aux)
    return ds


@triton.jit
def changed_gradient(
    ds, s, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux,
    GRAD: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    """Return the gradient of scale·qk from that of the scores that came out of it; s is qk."""
    ds = hook_gradient(ds, s, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, score_aux, GRAD, ACCURATE)
    if softcap is not None:
        t = tanh(s * (scale / softcap), ACCURATE)
        ds = ds * (1.0 - t * t)
    return ds


@triton.jit
def _built_in(
    s, less, b, h, i, j, seqlen_q, seqlen_k, scale, softcap, alibi, bias, UNIT: tl.constexpr, ACCURATE: tl.constexpr
):  # fmt: skip
    """Return UNIT times the scores after softcap, ALiBi and bias, less `less`."""
    if softcap is None:
        s = s * (scale * UNIT) - less
    else:
        s = tanh(s * (scale / softcap), ACCURATE) * (softcap * UNIT) - less
    if alibi is not None:
        slope = tl.load(alibi[0] + b * alibi[1] + h * alibi[2]) * UNIT
        # float32 holds a position exactly up to 2**24, and converting rows and columns costs less than the tile.
        s -= slope * tl.abs((i + seqlen_k - seqlen_q).to(tl.float32) - j.to(tl.float32))
    if bias is not None:
        s += load_bias(bias, b, h, i, j, seqlen_q, seqlen_k).to(s.dtype) * UNIT
    return s


@triton.jit
def load_bias(bias, b, h, i, j, seqlen_q, seqlen_k):
    """Load a tile of the bias. Beside a number below -1e8 sums are lost in rounding: it hides a key as -inf does."""
    ptrs = bias[0] + b.to(tl.int64) * bias[1] + h.to(tl.int64) * bias[2]
    ptrs = ptrs + i.to(tl.int64) * bias[3] + j.to(tl.int64) * bias[4]
    tile = tl.load(ptrs, mask=(i < seqlen_q) & (j < seqlen_k), other=0.0)
    return tl.where(tile < -1e8, float("-inf"), tile)


@triton.jit
def tanh(x, ACCURATE: tl.constexpr):
    """Return tanh(x) without overflow, to about 1e-7; ACCURATE keeps that error relative where x is small."""
    twice = tl.minimum(x * (2 * LOG2_E), 80.0, propagate_nan=tl.PropagateNan.ALL)
    t = 1.0 - 2.0 / (1.0 + tl.exp2(twice))
    if ACCURATE:
        small = tl.abs(x) < 0.3
        y = tl.where(small, x, 0.0)
        z = y * y
        series = y + y * z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835 - z * (1382 / 155925)))))
        t = tl.where(small, series, t)
    return t
