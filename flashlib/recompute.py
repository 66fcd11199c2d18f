"""FlashAttention's backward in NumPy: P is not kept from the forward, each tile of it is computed again when needed.

Two numbers a row are enough for that: lse makes P = exp(S - lse) without a second softmax, and delta, the sum of
dout * out, stands in for the only sum over a whole row that the softmax's derivative asks for.

Source: FlashAttention (Dao et al. 2022), section 3.1 and appendix B.4, https://arxiv.org/abs/2205.14135;
FlashAttention-2 (Dao 2023), Algorithm 2, https://arxiv.org/abs/2307.08691.
"""

import numpy as np

from flashlib.tiling import check_inputs, tile_kind, tiles, visible


def backward_naive(q, k, v, dout, *, causal=False, scale=None):
    """Compute the gradients of attention the plain way: S, P, dP and dS each exist as a whole.

    Args:
        q, k, v, causal, scale: as for `backward`.
        dout: gradient of the output, (seqlen_q, head_dim_v), dtype of q.

    Returns:
        (dq, dk, dv), shaped as q, k, v, in float32, or float64 for float64 inputs.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.
    """
    scale, dtype = check_inputs(q, k, v, 1, 1, scale, causal)
    _check_rows(q, (q.shape[0], v.shape[1]), dout=dout)
    q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
    s = scale * (q @ k.T)  # [seqlen_q, seqlen_k], and so are p, dp, ds
    if causal:
        s = np.where(visible(slice(0, len(q)), slice(0, len(k)), len(k) - len(q)), s, -np.inf)
    m = s.max(axis=1, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(m), 0, m))
    p /= np.maximum(p.sum(axis=1, keepdims=True), np.finfo(dtype).tiny)
    dv = p.T @ dout
    dp = dout @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    return scale * (ds @ k), scale * (ds.T @ q), dv


def delta_of(out, dout, dlse=None):
    """Compute what the softmax's derivative subtracts from dP: one number a row, the sum over keys of P * dP.

    Args:
        out, dout: output and its gradient, (rows, head_dim_v).
        dlse: gradient of lse, (rows,), or None. As d lse / dS = P, it only shifts delta.

    Returns:
        (rows,): rowsum(dout * out), less dlse.

    Source: FlashAttention-2, Algorithm 2, line 4 (there called D).
    """
    delta = (out * dout).sum(axis=-1)
    return delta if dlse is None else delta - dlse


def p_of(q, k, lse, scale, seen=None):
    """Compute one tile of P again.

    Args:
        q, k: the tile's rows of Q and K, (rows, head_dim) and (keys, head_dim).
        lse: log-sum-exp of the whole rows, (rows,).
        scale: factor of the scores.
        seen: bool (rows, keys), where a query sees a key; None for everywhere.

    Returns:
        (rows, keys); a row that sees no key anywhere (lse = -inf) is 0.
    """
    s = scale * (q @ k.T)
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    # With +inf in place of -inf the exponential is 0, and no -inf is subtracted from another.
    return np.exp(s - np.where(np.isneginf(lse), np.inf, lse)[:, None])


def ds_of(p, dp, delta):
    """Compute one tile of dS, the gradient of the scaled scores.

    Args:
        p, dp: the tiles of P and of its gradient, (rows, keys).
        delta: (rows,), from `delta_of`.

    Returns:
        (rows, keys); 0 where p is 0, so masked scores need no test of their own.
    """
    return p * (dp - delta[:, None])


def dk_dv(q, k, v, dout, lse, delta, *, block_m, block_n, causal, scale, dtype):
    """Compute dk and dv: a tile of keys stays, the tiles of queries stream past it.

    Args:
        q, k, v, dout, lse, block_m, block_n, causal: as for `backward`.
        delta: (seqlen_q,), from `delta_of`.
        scale: factor of the scores, a float.
        dtype: what to compute in.

    Returns:
        (dk, dv), shaped as k and v, in their dtype.
    """
    dk, dv = np.empty_like(k), np.empty_like(v)
    offset = k.shape[0] - q.shape[0]
    for keys in tiles(k.shape[0], block_n):
        k_j, v_j = k[keys].astype(dtype), v[keys].astype(dtype)
        dk_j, dv_j = np.zeros_like(k_j), np.zeros_like(v_j)
        for rows in tiles(q.shape[0], block_m):
            kind = tile_kind(rows, keys, offset, causal)
            if kind == "empty":
                continue
            q_i, dout_i = q[rows].astype(dtype), dout[rows].astype(dtype)
            seen = visible(rows, keys, offset) if kind == "diagonal" else None
            p = p_of(q_i, k_j, lse[rows], scale, seen)
            dv_j += p.T @ dout_i
            ds = ds_of(p, dout_i @ v_j.T, delta[rows])
            dk_j += ds.T @ q_i
        dk[keys], dv[keys] = scale * dk_j, dv_j
    return dk, dv


def dq_only(q, k, v, dout, lse, delta, *, block_m, block_n, causal, scale, dtype):
    """Compute dq: a tile of queries stays, the tiles of keys stream past it, as in the forward.

    Args:
        q, k, v, dout, lse, delta, block_m, block_n, causal, scale, dtype: as for `dk_dv`.

    Returns:
        dq, shaped as q, in its dtype.
    """
    dq = np.empty_like(q)
    offset = k.shape[0] - q.shape[0]
    for rows in tiles(q.shape[0], block_m):
        q_i, dout_i = q[rows].astype(dtype), dout[rows].astype(dtype)
        lse_i, delta_i = lse[rows], delta[rows]
        dq_i = np.zeros_like(q_i)
        for keys in tiles(k.shape[0], block_n):
            kind = tile_kind(rows, keys, offset, causal)
            if kind == "empty":
                continue
            k_j, v_j = k[keys].astype(dtype), v[keys].astype(dtype)
            seen = visible(rows, keys, offset) if kind == "diagonal" else None
            p = p_of(q_i, k_j, lse_i, scale, seen)
            ds = ds_of(p, dout_i @ v_j.T, delta_i)
            dq_i += ds @ k_j
        dq[rows] = scale * dq_i
    return dq


def backward(q, k, v, out, dout, lse, *, block_m, block_n, causal=False, scale=None, dlse=None):
    """Compute the gradients of attention tile by tile; beside the inputs, only lse and delta are stored.

    Three passes, as the kernels of chapter 09 have them: delta; dk and dv over tiles of keys; dq over tiles of queries.
    One loop could do both, with five products a tile instead of seven, but then every tile of dq would be read and
    written once for each tile of keys, and on a GPU many programs would add to it in no fixed order.

    Args:
        q: queries, (seqlen_q, head_dim), floating point.
        k: keys, (seqlen_k, head_dim), dtype of q.
        v: values, (seqlen_k, head_dim_v), dtype of q.
        out: output of the forward, (seqlen_q, head_dim_v), dtype of q.
        dout: gradient of the output, (seqlen_q, head_dim_v), dtype of q.
        lse: log-sum-exp of each row from the forward, (seqlen_q,), natural log, float32 or float64.
        block_m, block_n: queries and keys in a tile; neither has to divide its length.
        causal: query r sees the keys c <= r + seqlen_k - seqlen_q.
        scale: factor of the scores; None for 1/sqrt(head_dim).
        dlse: gradient of lse where lse was used too, (seqlen_q,); None for zero.

    Returns:
        (dq, dk, dv), shaped as q, k, v, in their dtype. A row that sees no key has dq exactly 0 and adds nothing to
        dk and dv.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    Source:
        FlashAttention-2 (Dao 2023), Algorithm 2, https://arxiv.org/abs/2307.08691, its one loop taken apart.
    """
    scale, dtype = check_inputs(q, k, v, block_m, block_n, scale, causal)
    _check_rows(q, (q.shape[0], v.shape[1]), out=out, dout=dout)
    _check_numbers_a_row(q.shape[0], lse=lse, dlse=dlse)
    delta = np.empty_like(q, shape=(q.shape[0],), dtype=dtype)
    for rows in tiles(q.shape[0], block_m):
        # A row that sees no key has no lse to push: its dlse may be infinite (a loss of lse**2), and must go nowhere.
        dlse_i = None if dlse is None else np.where(np.isneginf(lse[rows]), 0, dlse[rows]).astype(dtype)
        delta[rows] = delta_of(out[rows].astype(dtype), dout[rows].astype(dtype), dlse_i)
    options = {"block_m": block_m, "block_n": block_n, "causal": causal, "scale": scale, "dtype": dtype}
    dk, dv = dk_dv(q, k, v, dout, lse, delta, **options)
    dq = dq_only(q, k, v, dout, lse, delta, **options)
    return dq, dk, dv


# --- input checks --------------------------------------------------------------------------------------------------


def _check_rows(q, shape, **arrays):
    for name, x in arrays.items():
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise ValueError(f"{name} must be a NumPy array, got {type(x).__name__}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.shape != shape:
            raise ValueError(f"{name} must have shape (seqlen_q, head_dim of v) = {shape}, got {x.shape}")


def _check_numbers_a_row(seqlen_q, **arrays):
    for name, x in arrays.items():
        if x is None and name == "dlse":
            continue
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise ValueError(f"{name} must be a NumPy array, got {type(x).__name__}")
        if x.dtype not in (np.float32, np.float64):
            raise ValueError(f"{name} must be float32 or float64, got {x.dtype}")
        if x.shape != (seqlen_q,):
            raise ValueError(f"{name} must have shape (seqlen_q,) = {(seqlen_q,)}, got {x.shape}")
