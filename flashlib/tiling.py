"""FlashAttention's forward in NumPy, tile by tile.

A tile of queries stays, tiles of keys and values stream past it, and the state (m, l, acc) of every row is merged with
each of them: the scores exist one tile at a time, never as a whole. `forward_article` merges as chapter 03 does, with
both sides rescaled; `forward` is FlashAttention-2's form, where the tile's exponentials use the new maximum at once.

Source: FlashAttention (Dao et al. 2022), Algorithm 1, https://arxiv.org/abs/2205.14135; FlashAttention-2 (Dao 2023),
Algorithm 1, https://arxiv.org/abs/2307.08691.
"""

import dataclasses
import math
import numbers
import sys

import numpy as np

from flashlib.online_softmax import State, exp_minus, finish, identity, lse_of, merge, state_of


@dataclasses.dataclass
class Step:
    """One tile of scores and the state of its rows after it.

    Args:
        i, j: number of the query tile and of the key tile.
        rows, keys: (start, stop) of the queries and of the keys.
        kind: "full", "diagonal" or "empty".
        s: scores after masking, (rows, keys); None where the tile was skipped.
        m, l, acc: the state after this step: (rows,), (rows,), (rows, head_dim of v).
        bytes_so_far: bytes requested until here, the stores of finished rows included.
    """

    i: int
    j: int
    rows: tuple
    keys: tuple
    kind: str
    s: np.ndarray | None
    m: np.ndarray
    l: np.ndarray
    acc: np.ndarray
    bytes_so_far: int


@dataclasses.dataclass
class Trace:
    """A recorded forward pass: its inputs, its results and every `Step` in order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    block_m: int
    block_n: int
    causal: bool
    scale: float
    steps: list


def tiles(length, block):
    """Return the slices that cut `length` rows into tiles of `block`; the last one is shorter where it must be.

    Args:
        length: rows to cut.
        block: rows of a tile.

    Returns:
        list of slice.
    """
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def tile_kind(rows, keys, offset, causal):
    """Say whether a tile of scores is skipped, needs no mask, or is masked element by element.

    Args:
        rows, keys: slices of the queries and of the keys, from `tiles`.
        offset: seqlen_k - seqlen_q; the mask is aligned at the bottom right.
        causal: query r sees the keys c <= r + offset; if False, every key.

    Returns:
        str: "empty", "full" or "diagonal".
    """
    first_row, last_row = rows.start, rows.stop - 1
    first_key, last_key = keys.start, keys.stop - 1
    if not causal or last_key <= first_row + offset:
        return "full"
    if first_key > last_row + offset:
        return "empty"
    return "diagonal"


def visible(rows, keys, offset):
    """Return which keys each query of a causal tile sees.

    Args:
        rows, keys: slices of the queries and of the keys.
        offset: seqlen_k - seqlen_q.

    Returns:
        bool array (rows, keys).
    """
    return np.arange(keys.start, keys.stop) <= np.arange(rows.start, rows.stop)[:, None] + offset


def forward_article(q, k, v, *, block_m, block_n, causal=False, scale=None, return_lse=False):
    """Compute attention tile by tile, merging each tile's own state into the state of its rows.

    Args:
        q: queries, (seqlen_q, head_dim), floating point.
        k: keys, (seqlen_k, head_dim), dtype of q.
        v: values, (seqlen_k, head_dim_v), dtype of q.
        block_m, block_n: queries and keys in a tile; neither has to divide its length.
        causal: query r sees the keys c <= r + seqlen_k - seqlen_q.
        scale: factor of the scores; None for 1/sqrt(head_dim).
        return_lse: also return the log-sum-exp of each row.

    Returns:
        out, (seqlen_q, head_dim_v), dtype of q; with return_lse also lse, (seqlen_q,), natural log, at least float32.
        A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    Source:
        The article's section on the forward pass; the names m_tile, p_tile, l_tile stand for its m̃, P̃, l̃.
    """
    scale, dtype = check_inputs(q, k, v, block_m, block_n, scale, causal)
    seqlen_q, seqlen_k, head_dim_v = q.shape[0], k.shape[0], v.shape[1]
    offset = seqlen_k - seqlen_q
    out = np.empty_like(q, shape=(seqlen_q, head_dim_v))
    lse = np.empty_like(q, shape=(seqlen_q,), dtype=dtype)
    for rows in tiles(seqlen_q, block_m):
        q_i = q[rows].astype(dtype)
        m_i = np.full(len(q_i), -np.inf, dtype)
        l_i = np.zeros(len(q_i), dtype)
        acc = np.zeros((len(q_i), head_dim_v), dtype)
        for keys in tiles(seqlen_k, block_n):
            kind = tile_kind(rows, keys, offset, causal)
            if kind == "empty":
                continue
            k_j, v_j = k[keys].astype(dtype), v[keys].astype(dtype)
            s = scale * (q_i @ k_j.T)
            if kind == "diagonal":
                s = np.where(visible(rows, keys, offset), s, -np.inf)
            m_tile = s.max(axis=1)
            p_tile = exp_minus(s, m_tile[:, None])
            l_tile = p_tile.sum(axis=1)
            m_new = np.maximum(m_i, m_tile)
            alpha = exp_minus(m_i, m_new)
            beta = exp_minus(m_tile, m_new)
            l_i = alpha * l_i + beta * l_tile
            acc = alpha[:, None] * acc + beta[:, None] * (p_tile @ v_j)
            m_i = m_new
        state = State(m_i, l_i, acc)
        out[rows], lse[rows] = finish(state), lse_of(state)
    return (out, lse) if return_lse else out


def forward(q, k, v, *, block_m, block_n, causal=False, scale=None, return_lse=False):
    """Compute attention tile by tile in FlashAttention-2's form: the new maximum first, then one rescale.

    Args:
        q: queries, (seqlen_q, head_dim), floating point.
        k: keys, (seqlen_k, head_dim), dtype of q.
        v: values, (seqlen_k, head_dim_v), dtype of q.
        block_m, block_n: queries and keys in a tile; neither has to divide its length.
        causal: query r sees the keys c <= r + seqlen_k - seqlen_q.
        scale: factor of the scores; None for 1/sqrt(head_dim).
        return_lse: also return the log-sum-exp of each row.

    Returns:
        out, (seqlen_q, head_dim_v), dtype of q; with return_lse also lse, (seqlen_q,), natural log, at least float32.
        A row that sees no key has out 0 and lse -inf.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    Source:
        FlashAttention-2 (Dao 2023), Algorithm 1, https://arxiv.org/abs/2307.08691.
    """
    scale, dtype = check_inputs(q, k, v, block_m, block_n, scale, causal)
    seqlen_q, seqlen_k, head_dim_v = q.shape[0], k.shape[0], v.shape[1]
    offset = seqlen_k - seqlen_q
    out = np.empty_like(q, shape=(seqlen_q, head_dim_v))
    lse = np.empty_like(q, shape=(seqlen_q,), dtype=dtype)
    for rows in tiles(seqlen_q, block_m):
        q_i = q[rows].astype(dtype)
        m_i = np.full(len(q_i), -np.inf, dtype)
        l_i = np.zeros(len(q_i), dtype)
        acc = np.zeros((len(q_i), head_dim_v), dtype)
        for keys in tiles(seqlen_k, block_n):
            kind = tile_kind(rows, keys, offset, causal)
            if kind == "empty":
                continue
            k_j, v_j = k[keys].astype(dtype), v[keys].astype(dtype)
            s = scale * (q_i @ k_j.T)
            if kind == "diagonal":
                s = np.where(visible(rows, keys, offset), s, -np.inf)
            m_new = np.maximum(m_i, s.max(axis=1))
            alpha = exp_minus(m_i, m_new)
            p = exp_minus(s, m_new[:, None])
            l_i = alpha * l_i + p.sum(axis=1)
            acc = alpha[:, None] * acc + p @ v_j
            m_i = m_new
        state = State(m_i, l_i, acc)
        out[rows], lse[rows] = finish(state), lse_of(state)
    return (out, lse) if return_lse else out


def trace(q, k, v, *, block_m, block_n, causal=False, scale=None):
    """Record a forward pass step by step, built from chapter 03's `merge` and nothing else.

    Args:
        q, k, v, block_m, block_n, causal, scale: as for `forward`.

    Returns:
        Trace: inputs, results and all steps; skipped tiles are steps too, of kind "empty".

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.
    """
    scale, dtype = check_inputs(q, k, v, block_m, block_n, scale, causal)
    seqlen_q, seqlen_k, head_dim_v = q.shape[0], k.shape[0], v.shape[1]
    offset = seqlen_k - seqlen_q
    out, lse = np.empty((seqlen_q, head_dim_v), q.dtype), np.empty(seqlen_q, dtype)
    steps, bytes_so_far = [], 0
    for i, rows in enumerate(tiles(seqlen_q, block_m)):
        q_i = q[rows].astype(dtype)
        bytes_so_far += q[rows].nbytes
        state = identity(head_dim_v, (len(q_i),), dtype)
        for j, keys in enumerate(tiles(seqlen_k, block_n)):
            kind = tile_kind(rows, keys, offset, causal)
            s = None
            if kind != "empty":
                s = scale * (q_i @ k[keys].astype(dtype).T)
                if kind == "diagonal":
                    s = np.where(visible(rows, keys, offset), s, -np.inf)
                state = merge(state, state_of(s, v[keys].astype(dtype)))
                bytes_so_far += k[keys].nbytes + v[keys].nbytes
            spans = (rows.start, rows.stop), (keys.start, keys.stop)
            steps.append(Step(i, j, *spans, kind, s, state.m, state.l, state.acc, bytes_so_far))
        out[rows], lse[rows] = finish(state), lse_of(state)
        bytes_so_far += out[rows].nbytes + lse[rows].nbytes
        steps[-1].bytes_so_far = bytes_so_far
    return Trace(q, k, v, out, lse, block_m, block_n, causal, scale, steps)


def check_inputs(q, k, v, block_m, block_n, scale, causal=False):
    """Return the scale as a float and the dtype to compute in, or say which argument is wrong.

    Args:
        q, k, v, block_m, block_n, scale, causal: as for `forward`.

    Returns:
        (float, numpy dtype): float64 for float64 inputs, float32 for all others.

    Raises:
        ValueError: names the argument, what it must be and what it was.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(getattr(x, "dtype", None), np.dtype) or x.dtype.kind != "f":
            raise ValueError(f"{name} must be a NumPy array of floating point numbers, got {_kind_of(x)}")
        if len(x.shape) != 2 or 0 in x.shape:
            raise ValueError(f"{name} must have shape (seqlen, head_dim), neither of them 0, got {x.shape}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    if k.shape[1] != q.shape[1]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[1]}, got {k.shape[1]}")
    if v.shape[0] != k.shape[0]:
        raise ValueError(f"v must have the seqlen of k, {k.shape[0]}, got {v.shape[0]}")
    for name, block in (("block_m", block_m), ("block_n", block_n)):
        if not isinstance(block, numbers.Integral) or isinstance(block, bool) or block < 1:
            raise ValueError(f"{name} must be a whole number of rows, 1 or more, got {block!r}")
    if not isinstance(causal, (bool, np.bool_)):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    if scale is None:
        scale = 1 / math.sqrt(q.shape[1])
    # An int that no float can hold is no scale either; comparing it is exact.
    finite = isinstance(scale, numbers.Real) and not isinstance(scale, bool) and abs(scale) < math.inf
    if not finite or (isinstance(scale, numbers.Integral) and abs(scale) > sys.float_info.max):
        raise ValueError(f"scale must be None or a finite number, got {scale!r}")
    return float(scale), np.dtype(np.float64 if q.dtype == np.float64 else np.float32)


def _kind_of(x):
    return f"an array of {x.dtype}" if hasattr(x, "dtype") else type(x).__name__
