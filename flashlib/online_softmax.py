"""Online softmax: what one has seen of a row fits in a state (m, l, acc), and two states merge into one.

m is the largest score, l the sum of exp(s - m), acc the sum of exp(s - m) times the value. The merge is associative
and has an identity, so a row may be cut anywhere and its pieces merged in any order: tiles, splits of a cache, pages,
attention sinks and ring ranks all use this one merge.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", Algorithm 3 and section 3.1,
https://arxiv.org/abs/1805.02867; FlashAttention, section 3.1 and Algorithm 1, https://arxiv.org/abs/2205.14135.
"""

import functools
import math
from typing import NamedTuple

import numpy as np


class State(NamedTuple):
    """What is known of one or many rows after some of their scores.

    Args:
        m: largest score so far, shape (...); -inf where there was none.
        l: sum of exp(s - m), shape (...); 0 where there was none, otherwise between 1 and the number of scores.
        acc: sum of exp(s - m) * v, shape (..., head_dim); not divided by l yet.
    """

    m: np.ndarray
    l: np.ndarray
    acc: np.ndarray


# --- one row, one score at a time: three passes, two, one ----------------------------------------------------------


def three_passes(s, v):
    """Average the values of one row by softmax: find the max, then the sum, then the output.

    Args:
        s: finite scores, a sequence of at least one.
        v: one value (a number or an array) a score.

    Returns:
        output, like one value.

    Raises:
        ValueError: s is empty, or v has another length.
    """
    _check_row(s, v)
    m = -math.inf
    for x in s:
        m = max(m, x)
    l = 0.0
    for x in s:
        l += math.exp(x - m)
    out = 0.0
    for x, value in zip(s, v, strict=True):
        out = out + math.exp(x - m) / l * value
    return out


def two_passes(s, v):
    """Average the values of one row by softmax: max and sum together, then the output.

    Args:
        s: finite scores, a sequence of at least one.
        v: one value (a number or an array) a score.

    Returns:
        output, like one value.

    Raises:
        ValueError: s is empty, or v has another length.

    Source: Milakov and Gimelshein, Algorithm 3, https://arxiv.org/abs/1805.02867.
    """
    _check_row(s, v)
    m, l = -math.inf, 0.0
    for x in s:
        m_new = max(m, x)
        l = math.exp(m - m_new) * l + math.exp(x - m_new)
        m = m_new
    out = 0.0
    for x, value in zip(s, v, strict=True):
        out = out + math.exp(x - m) / l * value
    return out


def one_pass(s, v):
    """Average the values of one row by softmax: each score is read once, the division comes last.

    Args:
        s: finite scores, a sequence of at least one.
        v: one value (a number or an array) a score.

    Returns:
        output, like one value.

    Raises:
        ValueError: s is empty, or v has another length.

    Source: FlashAttention, Algorithm 1, for one row and tiles of one key, https://arxiv.org/abs/2205.14135.
    """
    _check_row(s, v)
    m, l, acc = -math.inf, 0.0, 0.0
    for x, value in zip(s, v, strict=True):
        m_new = max(m, x)
        alpha = math.exp(m - m_new)
        p = math.exp(x - m_new)
        l = alpha * l + p
        acc = alpha * acc + p * value
        m = m_new
    return acc / l


class Counted(list):
    """A list that counts how often its elements are read in a loop, in `reads`."""

    reads = 0

    def __iter__(self):
        for x in super().__iter__():
            self.reads += 1
            yield x


# --- the state and its merge ---------------------------------------------------------------------------------------


def identity(head_dim, shape=(), dtype=np.float64):
    """Make the state of rows that have seen nothing; merged with any state, it changes nothing.

    Args:
        head_dim: length of a value vector.
        shape: of the rows; the default () broadcasts against any.
        dtype: of the three arrays.

    Returns:
        State: m = -inf, l = 0, acc = 0.

    Raises:
        ValueError: head_dim is not a whole number from 0 on, or dtype is not a floating-point one.
    """
    if not isinstance(head_dim, (int, np.integer)) or head_dim < 0:
        raise ValueError(f"head_dim must be a whole number from 0 on, got {head_dim!r}")
    if np.dtype(dtype).kind != "f":
        raise ValueError(f"dtype must be a floating-point one, got {np.dtype(dtype)}")
    return State(np.full(shape, -np.inf, dtype), np.zeros(shape, dtype), np.zeros((*shape, head_dim), dtype))


def state_of(s, v):
    """Summarise one piece: some scores of a row, or of many rows, and their values.

    Args:
        s: scores, shape (..., n); n may be 0. A masked score is -inf.
        v: values, shape (n, head_dim), or (..., n, head_dim) whose leading axes broadcast against those of s.

    Returns:
        State: float32 for float32 inputs, float64 for float64 ones and integers. A piece with no score above -inf
        gives the identity. A score that is NaN or +inf makes its row NaN, as it does in softmax (numpy warns of +inf).

    Raises:
        ValueError: s or v holds no real numbers; s has no axis; v has another number of values than s, or leading axes
            that do not fit.

    Source: the module's, with more than one score at a time.
    """
    s, v = _real("s", s), _real("v", v)
    if s.ndim < 1:
        raise ValueError("s must have shape (..., n), got a single number")
    if v.ndim < 2 or v.shape[-2] != s.shape[-1]:
        raise ValueError(f"v must have shape (..., {s.shape[-1]}, head_dim) to fit s, got {v.shape}")
    if v.ndim > 2:
        _check_rows("v", v.shape[:-2], "s", s.shape[:-1])
    dtype = np.result_type(s, v, np.float32)
    s, v = s.astype(dtype, copy=False), v.astype(dtype, copy=False)
    m = s.max(axis=-1, initial=-np.inf)  # (...)
    p = exp_minus(s, m[..., None])  # (..., n)
    return State(m, p.sum(axis=-1), (p[..., None, :] @ v)[..., 0, :])


def merge(a, b):
    """Merge the states of two pieces into the state of both together.

    Args:
        a, b: State of the same rows (shapes broadcast) and the same head_dim.

    Returns:
        State: as if the pieces had been one, up to rounding.

    Raises:
        ValueError: a or b is no State; b has another head_dim than a, or rows that do not fit.
    """
    _check_states(a, b)
    m = np.maximum(a.m, b.m)
    # The piece that holds the maximum gets 1, the other one shrinks.
    alpha_a, alpha_b = exp_minus(a.m, m), exp_minus(b.m, m)
    l = alpha_a * a.l + alpha_b * b.l
    acc = alpha_a[..., None] * a.acc + alpha_b[..., None] * b.acc  # [..., head_dim]
    return State(m, l, acc)


def finish(state):
    """Divide once, at the very end: the attention output of a state.

    Args:
        state: State of every score of the rows.

    Returns:
        output, shape (..., head_dim); exactly 0 for a row that has seen no score.
    """
    return state.acc / _l_or_one(state)[..., None]


def lse_of(state):
    """Return log(sum(exp(s))) of every score seen: the natural logarithm, with the max in it.

    Args:
        state: State.

    Returns:
        lse, shape (...); exactly -inf for a row that has seen no score.
    """
    return state.m + np.log(_l_or_one(state))


# --- many pieces ---------------------------------------------------------------------------------------------------


def chain(states):
    """Merge states from left to right, as one worker does that walks over a row.

    Args:
        states: State objects, at least one.

    Returns:
        State.

    Raises:
        ValueError: states is empty.
    """
    return functools.reduce(merge, _at_least_one(states))


def tree(states):
    """Merge neighbours in pairs, then the results in pairs, as many workers do; log2 of the count is the depth.

    Args:
        states: State objects, at least one.

    Returns:
        State.

    Raises:
        ValueError: states is empty.
    """
    states = _at_least_one(states)
    while len(states) > 1:
        states = [chain(states[i : i + 2]) for i in range(0, len(states), 2)]
    return states[0]


# --- finished pieces -----------------------------------------------------------------------------------------------


def from_lse(lse, out):
    """Turn a finished output back into a state: its lse is the reference, so l is 1 and acc is the output.

    Args:
        lse: shape (...), natural logarithm, with the max in it; -inf for a row without a key.
        out: shape (..., head_dim), divided already.

    Returns:
        State: the identity for a row whose lse is -inf, whatever out holds there.

    Raises:
        ValueError: lse or out holds no real numbers; out is not shaped like lse with one more axis.
    """
    lse, out = _real("lse", lse), _real("out", out)
    if out.ndim < 1 or out.shape[:-1] != lse.shape:
        raise ValueError(f"out must have shape {lse.shape} + (head_dim,) to fit lse, got {out.shape}")
    dtype = np.result_type(lse, out, np.float32)
    lse, out = lse.astype(dtype, copy=False), out.astype(dtype, copy=False)
    seen = ~np.isneginf(lse)
    return State(lse, seen.astype(dtype), np.where(seen[..., None], out, np.zeros_like(out)))


def merge_lse(lse_a, out_a, lse_b, out_b):
    """Merge two finished outputs over different keys, by their lse.

    Args:
        lse_a, lse_b: shape (...), natural logarithm, with the max in it.
        out_a, out_b: shape (..., head_dim), each divided by its own sum.

    Returns:
        (lse, out) of all the keys together; -inf and 0 for a row without a key.

    Raises:
        ValueError: an out does not fit its lse, or the second pair does not fit the first.

    Source: FlashAttention-2, section 3.1, https://arxiv.org/abs/2307.08691 (the lse it stores); Flash-Decoding.
    """
    both = merge(from_lse(lse_a, out_a), from_lse(lse_b, out_b))
    return lse_of(both), finish(both)


# --- edges ---------------------------------------------------------------------------------------------------------


def exp_minus(x, m):
    """Compute exp(x - m), and 0 where m is -inf.

    Args:
        x: scores or maxima; -inf wherever m is.
        m: the maximum to subtract, of a shape that broadcasts against x.

    Returns:
        array, between 0 and 1 where x <= m; never NaN for a row that has seen no score.
    """
    # Where m is -inf every x is too, and -inf minus -inf is NaN.
    # Subtract 0 there: exp(-inf) is the 0 that is wanted.
    reference = np.where(np.isneginf(m), np.zeros_like(m), m)
    # A difference below the dtype's range becomes -inf, and its exp 0.
    with np.errstate(over="ignore"):
        return np.exp(x - reference)


def _l_or_one(state):
    # Only a row without a score has l = 0; its acc is 0 and its m is -inf, so 1 gives output 0 and lse -inf.
    return np.where(state.l == 0, np.ones_like(state.l), state.l)


def _real(name, x):
    x = np.asarray(x)
    if x.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, got {x.dtype}")
    return x


def _check_row(s, v):
    if len(s) == 0:
        raise ValueError("s must hold at least one score, got none")
    if len(v) != len(s):
        raise ValueError(f"v must hold one value a score, {len(s)}, got {len(v)}")


def _check_states(a, b):
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, State):
            raise ValueError(f"{name} must be a State, got {type(x).__name__}")
        if not np.shape(x.m) == np.shape(x.l) == np.shape(x.acc)[:-1] or np.ndim(x.acc) < 1:
            shapes = ", ".join(str(np.shape(part)) for part in x)
            raise ValueError(f"{name} must have m and l of shape (...) and acc of shape (..., head_dim), got {shapes}")
    if np.shape(a.acc)[-1] != np.shape(b.acc)[-1]:
        raise ValueError(f"b must have the head_dim of a, {np.shape(a.acc)[-1]}, got {np.shape(b.acc)[-1]}")
    _check_rows("b", np.shape(b.m), "a", np.shape(a.m))


def _check_rows(name, shape, other, other_shape):
    for x, y in zip(reversed(shape), reversed(other_shape), strict=False):
        if x != y and 1 not in (x, y):
            raise ValueError(f"{name} must have rows that fit {other}, {other_shape}, got {shape}")


def _at_least_one(states):
    states = list(states)
    if not states:
        raise ValueError("states must hold at least one State, got none; start from identity(head_dim)")
    return states
