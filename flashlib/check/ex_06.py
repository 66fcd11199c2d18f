"""Exercises of chapter 06: delta, one tile of dS, dk and dv of one key tile, the whole backward."""

import numpy as np

from flashlib import tiling
from flashlib.check import Case, Exercise, Wrong
from flashlib.recompute import delta_of, p_of


def _inputs(seed, seqlen_q, seqlen_k, head_dim, head_dim_v):
    """Return q, k, v, dout of the given sizes."""
    rng = np.random.default_rng(seed)
    shapes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v), (seqlen_q, head_dim_v)
    return [rng.standard_normal(shape) for shape in shapes]


def _forward(q, k, v, causal, scale):
    return tiling.forward(q, k, v, block_m=4, block_n=4, causal=causal, scale=scale, return_lse=True)


# --- 06.1 ----------------------------------------------------------------------------------------------------------


def _cases_delta():
    rng = np.random.default_rng(0)
    return [
        Case("3 rows, head_dim 3", rng.standard_normal((3, 3)), rng.standard_normal((3, 3))),
        Case("5 rows, head_dim 2", rng.standard_normal((5, 2)), rng.standard_normal((5, 2))),
        Case("2 heads of 4 rows", rng.standard_normal((2, 4, 3)), rng.standard_normal((2, 4, 3))),
    ]


DELTA = Exercise(
    id="06.1",
    title="Delta",
    level=1,
    task=(
        "Write `delta_of_rows(out, dout)`: one number a row, computed from the output and its gradient alone. Both "
        "have shape `(..., rows, head_dim_v)`; the result has shape `(..., rows)`."
    ),
    name="delta_of_rows",
    stub='''def delta_of_rows(out, dout):
    """Return delta, one number for each row."""
    raise NotImplementedError
''',
    solution='''def delta_of_rows(out, dout):
    """Return delta, one number for each row."""
    return (out * dout).sum(axis=-1)
''',
    cases=_cases_delta,
    also_right=(
        """def delta_of_rows(out, dout):
    return np.einsum("...rd,...rd->...r", dout, out)
""",
        """def delta_of_rows(out, dout):
    return (dout[..., None, :] @ out[..., :, None])[..., 0, 0]
""",
    ),
    wrong=(
        Wrong(
            "the sum runs over the rows (axis 0), which mixes different queries: delta is one number a row, summed "
            "over the head dimension",
            edit=("axis=-1", "axis=0"),
        ),
        Wrong(
            "axis 1 is summed, which is the head dimension only where nothing stands in front of the rows: axis=-1",
            edit=("axis=-1", "axis=1"),
        ),
        Wrong("everything is summed to one number: each row has its own delta", edit=("axis=-1", "axis=None")),
        Wrong("the mean over the head dimension is taken in place of the sum", edit=(".sum(", ".mean(")),
        Wrong("dout alone is summed: delta is the dot product of dout with out", edit=("(out * dout)", "dout")),
        Wrong(
            "out is multiplied with itself: one of the two factors is the gradient dout",
            edit=("out * dout", "out * out"),
        ),
        Wrong(
            "every row of out is multiplied with every row of dout: only equal rows meet, the diagonal of that product",
            edit=("(out * dout).sum(axis=-1)", "out @ np.swapaxes(dout, -1, -2)"),
        ),
        Wrong(
            "the summed axis is kept: the numbers are right, the shape must be (..., rows)",
            edit=("axis=-1", "axis=-1, keepdims=True"),
        ),
        Wrong("the products are not summed over the head dimension", edit=(".sum(axis=-1)", "")),
    ),
)


# --- 06.2 ----------------------------------------------------------------------------------------------------------


def _tile(seed, seqlen_q, seqlen_k, head_dim_v, rows, keys):
    q, k, v, dout = _inputs(seed, seqlen_q, seqlen_k, 3, head_dim_v)
    out, lse = _forward(q, k, v, False, None)
    p = p_of(q, k, lse, 1 / np.sqrt(3))
    return p[rows, keys], v[keys], dout[rows], delta_of(out, dout)[rows]


def _cases_ds():
    return [
        # Square first: there a wrong axis or a missing transpose gives numbers, not an error, and can be named.
        Case("3 of 7 queries, 3 of 9 keys", *_tile(0, 7, 9, 3, slice(2, 5), slice(3, 6))),
        Case("4 of 6 queries, 2 of 8 keys", *_tile(1, 6, 8, 5, slice(0, 4), slice(6, 8))),
        Case("1 query, 5 of 6 keys", *_tile(2, 2, 6, 2, slice(0, 1), slice(0, 5))),
    ]


DS = Exercise(
    id="06.2",
    title="One tile of dS",
    level=2,
    task=(
        "A tile holds some of the queries and some of the keys. Write `ds_tile(p, v, dout, delta)`, the gradient of "
        "its scaled scores. `p`: the tile of P, `(rows, keys)`. `v`: the tile's values, `(keys, head_dim_v)`. `dout`: "
        "the tile's rows, `(rows, head_dim_v)`. `delta`: `(rows,)`, of the whole rows."
    ),
    name="ds_tile",
    stub='''def ds_tile(p, v, dout, delta):
    """Return the tile of dS, (rows, keys)."""
    raise NotImplementedError
''',
    solution='''def ds_tile(p, v, dout, delta):
    """Return the tile of dS, (rows, keys)."""
    dp = dout @ v.T
    return p * (dp - delta[:, None])
''',
    cases=_cases_ds,
    also_right=(
        """def ds_tile(p, v, dout, delta):
    return np.einsum("rk,rd,kd->rk", p, dout, v) - p * delta.reshape(-1, 1)
""",
    ),
    wrong=(
        Wrong(
            "delta is left out: P∘dP alone forgets that raising one score lowers all other weights of its row",
            edit=("(dp - delta[:, None])", "dp"),
        ),
        Wrong(
            "the factor P is left out: dP - delta must be weighted with P, element by element",
            edit=("p * (dp - delta[:, None])", "dp - delta[:, None]"),
        ),
        Wrong(
            "delta is made again from the tile, sum of P∘dP over its keys: the sum must run over the whole row, which "
            "is why delta is passed in",
            edit=("delta[:, None]", "(p * dp).sum(axis=1, keepdims=True)"),
        ),
        Wrong(
            "delta is laid along the keys: it belongs to the rows, delta[:, None]",
            edit=("delta[:, None]", "delta[None]"),
        ),
        Wrong("delta is added where it must be subtracted", edit=("dp - delta", "dp + delta")),
        Wrong(
            "delta is subtracted after the product with P: P multiplies the whole difference",
            edit=("p * (dp - delta[:, None])", "p * dp - delta[:, None]"),
        ),
        Wrong("dP is transposed: queries down, keys across, dout @ v.T", edit=("dout @ v.T", "v @ dout.T")),
        Wrong("v is not transposed in dP = dout @ v.T", edit=("v.T", "v")),
        Wrong(
            "P is taken for the weights of a sigmoid, p(1 - p): that is the diagonal of the softmax's Jacobian only",
            edit=("p * (dp - delta[:, None])", "p * (1 - p) * dp"),
        ),
    ),
)


# --- 06.3 ----------------------------------------------------------------------------------------------------------


def _key_tile(seed, seqlen_q, seqlen_k, head_dim, head_dim_v, keys, scale, block_m):
    q, k, v, dout = _inputs(seed, seqlen_q, seqlen_k, head_dim, head_dim_v)
    out, lse = _forward(q, k, v, False, scale)
    return q, k[keys], v[keys], dout, lse, delta_of(out, dout), scale, block_m


def _cases_dk_dv():
    return [
        Case("6 queries by 3, 4 of 7 keys", *_key_tile(0, 6, 7, 4, 4, slice(2, 6), 0.5, 3)),
        Case("one tile of queries", *_key_tile(1, 4, 6, 3, 3, slice(0, 3), 0.6, 4)),
        Case("7 queries by 3: the last tile is short", *_key_tile(2, 7, 5, 3, 2, slice(3, 5), 0.7, 3)),
        Case("large scores", *_key_tile(3, 5, 4, 2, 2, slice(0, 2), 4000.0, 2)),
    ]


DK_DV = Exercise(
    id="06.3",
    title="dK and dV of one key tile",
    level=2,
    task=(
        "One tile of keys stays, the queries stream past it in tiles of `block_m` rows; the last one may be short. "
        "Write `key_tile(q, k, v, dout, lse, delta, scale, block_m)`, which returns `(dk, dv)` of this key tile. There "
        "is no mask. `q`, `dout`, `lse`, `delta` have all rows; `k`, `v` are the tile's. Build no array of all scores."
    ),
    name="key_tile",
    stub='''def key_tile(q, k, v, dout, lse, delta, scale, block_m):
    """Return (dk, dv) of one tile of keys."""
    raise NotImplementedError
''',
    solution='''def key_tile(q, k, v, dout, lse, delta, scale, block_m):
    """Return (dk, dv) of one tile of keys."""
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for start in range(0, len(q), block_m):
        rows = slice(start, start + block_m)
        s = scale * (q[rows] @ k.T)
        p = np.exp(s - lse[rows, None])
        dv += p.T @ dout[rows]
        dp = dout[rows] @ v.T
        ds = p * (dp - delta[rows, None])
        dk += scale * (ds.T @ q[rows])
    return dk, dv
''',
    cases=_cases_dk_dv,
    also_right=(
        """def key_tile(q, k, v, dout, lse, delta, scale, block_m):
    p = np.exp(scale * q @ k.T - lse[:, None])
    return scale * (p * (dout @ v.T - delta[:, None])).T @ q, p.T @ dout
""",
    ),
    wrong=(
        Wrong(
            "dk lacks the factor scale: S = scale·QKᵀ, so the chain rule multiplies once more",
            edit=("scale * (ds.T @ q[rows])", "ds.T @ q[rows]"),
        ),
        Wrong(
            "the scale is applied twice in dk: once belongs to dk, and dS must stay without it",
            edit=("scale * (ds.T", "scale * scale * (ds.T"),
        ),
        Wrong(
            "the scale is left out when S is recomputed: the scores must be those of the forward",
            edit=("scale * (q[rows] @ k.T)", "q[rows] @ k.T"),
        ),
        Wrong("dk is built with P in place of dS", edit=("(ds.T @ q[rows])", "(p.T @ q[rows])")),
        Wrong("dk is built with dP in place of dS", edit=("(ds.T @ q[rows])", "(dp.T @ q[rows])")),
        Wrong(
            "dv is built with dP in place of P",
            edit=(
                "        dv += p.T @ dout[rows]\n        dp = dout[rows] @ v.T\n",
                "        dp = dout[rows] @ v.T\n        dv += dp.T @ dout[rows]\n",
            ),
        ),
        Wrong(
            "P is the softmax of this tile alone: its maximum and sum come from these keys, lse knows the whole row",
            edit=(
                "p = np.exp(s - lse[rows, None])",
                "p = np.exp(s - s.max(1, keepdims=True))\n        p = p / p.sum(1, keepdims=True)",
            ),
        ),
        Wrong(
            "P is recomputed with the maximum m and never divided by l: lse = m + log l does both at once",
            edit=("lse[rows, None]", "s.max(1, keepdims=True)"),
        ),
        Wrong(
            "P is computed as exp(s) / exp(lse): subtract first, or large scores overflow",
            edit=("np.exp(s - lse[rows, None])", "np.exp(s) / np.exp(lse[rows, None])"),
            stumble=11,
        ),
        Wrong(
            "only the last tile of queries counts: each adds to dk and dv, += and not =",
            source="""def key_tile(q, k, v, dout, lse, delta, scale, block_m):
    for start in range(0, len(q), block_m):
        rows = slice(start, start + block_m)
        p = np.exp(scale * (q[rows] @ k.T) - lse[rows, None])
        dv = p.T @ dout[rows]
        dk = scale * ((p * (dout[rows] @ v.T - delta[rows, None])).T @ q[rows])
    return dk, dv
""",
        ),
        Wrong(
            "the short last tile of queries is left out",
            edit=("range(0, len(q), block_m)", "range(0, len(q) - block_m + 1, block_m)"),
        ),
        Wrong("delta is left out of dS", edit=("p * (dp - delta[rows, None])", "p * dp")),
        Wrong("delta is added where it must be subtracted", edit=("dp - delta", "dp + delta")),
        Wrong(
            "delta is made again from this tile's keys: it is given, for the whole row",
            edit=("delta[rows, None]", "(p * dp).sum(axis=1, keepdims=True)"),
        ),
        Wrong(
            "1/sqrt(head_dim) is used in place of the argument `scale`",
            edit=("    dk, dv = np.zeros", "    scale = 1 / np.sqrt(k.shape[1])\n    dk, dv = np.zeros"),
        ),
        Wrong(
            "dk and dv divide by the number of tiles: tiles are added, not averaged",
            edit=("return dk, dv", "return dk / -(-len(q) // block_m), dv / -(-len(q) // block_m)"),
        ),
        Wrong("the two results are returned in the other order, (dv, dk)", edit=("return dk, dv", "return dv, dk")),
    ),
)


# --- 06.4 ----------------------------------------------------------------------------------------------------------


def _whole(seed, seqlen_q, seqlen_k, head_dim, head_dim_v, block_m, block_n, causal, scale):
    q, k, v, dout = _inputs(seed, seqlen_q, seqlen_k, head_dim, head_dim_v)
    out, lse = _forward(q, k, v, causal, scale)
    return q, k, v, out, dout, lse, block_m, block_n, causal, scale


def _cases_backward():
    return [
        Case("6 queries, 6 keys, tiles 3 × 2", *_whole(0, 6, 6, 3, 3, 3, 2, False, 0.6)),
        Case("causal, 6 queries, 6 keys", *_whole(1, 6, 6, 4, 4, 2, 3, True, 0.5)),
        Case("short tiles at both ends", *_whole(2, 7, 5, 3, 2, 4, 3, False, 0.8)),
        Case("causal, more keys than queries", *_whole(3, 4, 7, 3, 2, 3, 2, True, 0.6)),
        Case("causal, two queries see no key", *_whole(4, 6, 4, 3, 3, 2, 2, True, 0.6)),
    ]


BACKWARD = Exercise(
    id="06.4",
    title="The whole backward",
    level=3,
    task=(
        "Write `my_backward(q, k, v, out, dout, lse, block_m, block_n, causal, scale)`, which returns `(dq, dk, dv)`, "
        "tile by tile: no array of `(len(q), len(k))`. The last tile on either side may be short. Causal: query `i` "
        "sees the keys `j <= i + len(k) - len(q)`; a row that sees no key has `lse = -inf` and `out = 0`, and its "
        "gradients are 0. (The checker compares numbers; that no array of all scores exists is for you to see.)"
    ),
    name="my_backward",
    stub='''def my_backward(q, k, v, out, dout, lse, block_m, block_n, causal, scale):
    """Return (dq, dk, dv), tile by tile."""
    raise NotImplementedError
''',
    solution='''def my_backward(q, k, v, out, dout, lse, block_m, block_n, causal, scale):
    """Return (dq, dk, dv), tile by tile."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (out * dout).sum(axis=1)
    lse = np.where(lse == -np.inf, np.inf, lse)
    offset = len(k) - len(q)
    for first_key in range(0, len(k), block_n):
        keys = slice(first_key, min(first_key + block_n, len(k)))
        for first_row in range(0, len(q), block_m):
            rows = slice(first_row, min(first_row + block_m, len(q)))
            s = scale * (q[rows] @ k[keys].T)
            if causal:
                i, j = np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)
                s = np.where(j <= i[:, None] + offset, s, -np.inf)
            p = np.exp(s - lse[rows, None])
            dv[keys] += p.T @ dout[rows]
            dp = dout[rows] @ v[keys].T
            ds = p * (dp - delta[rows, None])
            dq[rows] += scale * (ds @ k[keys])
            dk[keys] += scale * (ds.T @ q[rows])
    return dq, dk, dv
''',
    setup="import numpy as np\n\nfrom flashlib import recompute",
    cases=_cases_backward,
    also_right=(
        """def my_backward(q, k, v, out, dout, lse, block_m, block_n, causal, scale):
    return recompute.backward(q, k, v, out, dout, lse, block_m=block_m, block_n=block_n, causal=causal, scale=scale)
""",
        """def my_backward(q, k, v, out, dout, lse, block_m, block_n, causal, scale):
    return recompute.backward_naive(q, k, v, dout, causal=causal, scale=scale)
""",
    ),
    wrong=(
        Wrong(
            "the mask is forgotten in the backward: P is recomputed, so a score that was masked in the forward must be "
            "masked again",
            edit=("if causal:", "if False:"),
            stumble=5,
        ),
        Wrong("the mask is always causal, whatever the argument says", edit=("if causal:", "if True:"), stumble=5),
        Wrong(
            "the mask is aligned at the top left: with unequal lengths query i sees keys up to i + len(k) - len(q)",
            edit=("i[:, None] + offset", "i[:, None]"),
            stumble=12,
        ),
        Wrong(
            "the mask counts rows and keys from the start of their tile: it needs their places in the whole sequence",
            edit=(
                "np.arange(rows.start, rows.stop), np.arange(keys.start, keys.stop)",
                "np.arange(rows.stop - rows.start), np.arange(keys.stop - keys.start)",
            ),
        ),
        Wrong(
            "a row without a key computes -inf - (-inf), which is NaN: its lse needs a stand-in",
            edit=("np.where(lse == -np.inf, np.inf, lse)", "lse"),
            stumble=13,
        ),
        Wrong(
            "dq and dk lack the factor scale: S = scale·QKᵀ, so the chain rule multiplies once more",
            edit=(
                "dq[rows] += scale * (ds @ k[keys])\n            dk[keys] += scale * (ds.T @ q[rows])",
                "dq[rows] += ds @ k[keys]\n            dk[keys] += ds.T @ q[rows]",
            ),
        ),
        Wrong("dq lacks the factor scale, dk has it", edit=("scale * (ds @ k[keys])", "ds @ k[keys]")),
        Wrong("dk lacks the factor scale, dq has it", edit=("scale * (ds.T @ q[rows])", "ds.T @ q[rows]")),
        Wrong(
            "the scale is applied twice in dq and dk: once in dS and once more in the product",
            edit=("ds = p * (dp", "ds = scale * p * (dp"),
        ),
        Wrong(
            "delta is left out of dS: the softmax's derivative subtracts it from dP",
            edit=("(dp - delta[rows, None])", "dp"),
        ),
        Wrong(
            "delta is made from one tile, sum of P∘dP over its keys: the sum must run over the whole row",
            edit=("delta[rows, None]", "(p * dp).sum(axis=1, keepdims=True)"),
        ),
        Wrong(
            "delta is made from out and out: one of the two factors is the gradient dout",
            edit=("(out * dout)", "(out * out)"),
        ),
        Wrong("dS lacks its factor P", edit=("ds = p * (dp - delta[rows, None])", "ds = dp - delta[rows, None]")),
        Wrong("dk is built with P in place of dS", edit=("(ds.T @ q[rows])", "(p.T @ q[rows])")),
        Wrong(
            "dv is built with dS in place of P",
            edit=(
                "dv[keys] += p.T @ dout[rows]\n            dp = dout[rows] @ v[keys].T\n            ds =",
                "dp = dout[rows] @ v[keys].T\n            ds = p * (dp - delta[rows, None])\n"
                "            dv[keys] += ds.T @ dout[rows]\n            ds =",
            ),
        ),
        Wrong(
            "each tile overwrites dq: every tile of keys adds its part to the same rows",
            edit=("dq[rows] +=", "dq[rows] ="),
        ),
        Wrong(
            "each tile overwrites dk: every tile of queries adds its part to the same keys",
            edit=("dk[keys] +=", "dk[keys] ="),
        ),
        Wrong(
            "each tile overwrites dv: every tile of queries adds its part to the same keys",
            edit=("dv[keys] +=", "dv[keys] ="),
        ),
        Wrong(
            "the short last tile of queries is left out",
            edit=("range(0, len(q), block_m)", "range(0, len(q) - block_m + 1, block_m)"),
        ),
        Wrong(
            "the short last tile of keys is left out",
            edit=("range(0, len(k), block_n)", "range(0, len(k) - block_n + 1, block_n)"),
        ),
        Wrong("delta is added where it must be subtracted", edit=("dp - delta", "dp + delta")),
        Wrong(
            "P is the softmax of one tile alone: its maximum and sum come from these keys, lse knows the whole row",
            edit=(
                "p = np.exp(s - lse[rows, None])",
                "e = np.exp(s - np.maximum(s.max(1, keepdims=True), -1e9))\n"
                "            p = e / np.where(e.sum(1, keepdims=True) == 0, 1, e.sum(1, keepdims=True))",
            ),
        ),
        Wrong("a query does not see the key on its own diagonal (< in place of <=)", edit=("j <= i", "j < i")),
        Wrong(
            "the offset has the wrong sign: it is len(k) - len(q)",
            edit=("offset = len(k) - len(q)", "offset = len(q) - len(k)"),
            stumble=12,
        ),
        Wrong("the scale is left out when S is recomputed", edit=("scale * (q[rows]", "(q[rows]")),
        Wrong("the gradients come back in the order (dk, dq, dv)", edit=("return dq, dk, dv", "return dk, dq, dv")),
        Wrong("the gradients come back in the order (dq, dv, dk)", edit=("return dq, dk, dv", "return dq, dv, dk")),
        Wrong(
            "the scale is taken as 1/sqrt(head_dim) in place of the argument",
            edit=("    offset = len(k)", "    scale = 1 / np.sqrt(q.shape[1])\n    offset = len(k)"),
        ),
    ),
)

EXERCISES = [DELTA, DS, DK_DV, BACKWARD]
