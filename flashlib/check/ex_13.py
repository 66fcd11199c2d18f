"""Exercises of chapter 13: rows of dropped attention, a decision from a place, a dropped tile's gradients, Philox."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong

# --- 13.1 ----------------------------------------------------------------------------------------------------------


def _cases_rows():
    rng = np.random.default_rng(130)
    worked = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[10.0], [20.0], [30.0], [40.0]])
    return [
        Case("scores 1 2 3 4, the second key dropped", *worked, np.array([[True, False, True, True]]), 0.25),
        Case(
            "5 queries, 7 keys, dropout_p 0.4",
            rng.standard_normal((5, 7)),
            rng.standard_normal((7, 3)),
            rng.random((5, 7)) >= 0.4,
            0.4,
        ),
        Case(
            "every key of a row dropped",
            rng.standard_normal((2, 4)),
            rng.standard_normal((4, 2)),
            np.array([[False] * 4, [True, True, False, True]]),
            0.6,
        ),
        Case(
            "scores near 1000",
            1000 + rng.standard_normal((3, 4)),
            rng.standard_normal((4, 2)),
            rng.random((3, 4)) >= 0.2,
            0.2,
        ),
    ]


ROWS = Exercise(
    id="13.1",
    title="What dropping leaves alone",
    level=1,
    task=(
        "Write `dropped_rows(s, v, keep, dropout_p)`: attention with dropout for a few rows at once. `s` are finite "
        "scores, `(rows, keys)`; `v` is `(keys, head_dim_v)`; `keep` is True where a weight is kept. Return `out` and "
        "`lse`, the natural log of each row's sum of exponentials. Scores may be near 1000, and every key of a row may "
        "be dropped."
    ),
    name="dropped_rows",
    stub='''def dropped_rows(s, v, keep, dropout_p):
    """Return (out, lse), (rows, head_dim_v) and (rows,)."""
    raise NotImplementedError
''',
    solution='''def dropped_rows(s, v, keep, dropout_p):
    """Return (out, lse), (rows, head_dim_v) and (rows,)."""
    m = s.max(axis=1)
    p = np.exp(s - m[:, None])
    l = p.sum(axis=1)
    kept = p * keep / (1 - dropout_p)
    return kept @ v / l[:, None], m + np.log(l)
''',
    cases=_cases_rows,
    also_right=(
        """def dropped_rows(s, v, keep, dropout_p):
    lse = np.logaddexp.reduce(s, axis=1)
    p = np.where(keep, np.exp(s - lse[:, None]), 0.0)
    return p @ v / (1 - dropout_p), lse
""",
    ),
    wrong=(
        Wrong(
            "p is dropped before its row is summed: l, and lse with it, keep all of p",
            edit=("    l = p.sum(axis=1)", "    l = (p * keep).sum(axis=1)"),
        ),
        Wrong(
            "what is kept is not scaled up: without 1/(1 - dropout_p) the output shrinks on average",
            edit=(" / (1 - dropout_p)", ""),
        ),
        Wrong(
            "what is kept is scaled down: the factor is 1/(1 - dropout_p), not 1 - dropout_p",
            edit=("/ (1 - dropout_p)", "* (1 - dropout_p)"),
        ),
        Wrong(
            "the factor is 1/dropout_p: a share of 1 - dropout_p is kept, and that share is divided by",
            edit=("/ (1 - dropout_p)", "/ dropout_p"),
        ),
        Wrong("what should be dropped is kept, and the other way round", edit=("p * keep", "p * ~keep")),
        Wrong(
            "the scaled and dropped weights are summed for l: the row sum comes first, from all of p",
            edit=("    l = p.sum(axis=1)", "    l = (p * keep / (1 - dropout_p)).sum(axis=1)"),
        ),
        Wrong(
            "the scale is in l too: lse is moved by log(1 - dropout_p), and out is scaled once more than it should be",
            edit=("    l = p.sum(axis=1)", "    l = p.sum(axis=1) * (1 - dropout_p)"),
        ),
        Wrong(
            "lse has lost the maximum that was subtracted from the scores",
            edit=("m + np.log(l)", "np.log(l)"),
        ),
        Wrong(
            "the scores are dropped (set to 0) in place of the weights: a score of 0 still has a weight",
            edit=("    m = s.max(axis=1)", "    s = s * keep\n    m = s.max(axis=1)"),
        ),
    ),
)


# --- 13.2 ----------------------------------------------------------------------------------------------------------


def _cases_decision():
    key = (0x12345678, 0x9ABCDEF0)
    start = np.arange(8)
    return [
        Case("head 2 of sequence 3, rows 8 to 15, keys 24 to 31", key, 0.5, 3, 2, 8 + start, 24 + start),
        Case("the same place, another head", key, 0.5, 3, 5, 8 + start, 24 + start),
        Case("the same place, another sequence", key, 0.5, 4, 2, 8 + start, 24 + start),
        Case("dropout_p 0.1, a tile of 4 by 16", key, 0.1, 0, 1, np.arange(4), 16 + np.arange(16)),
        Case("dropout_p 0", key, 0.0, 0, 1, np.arange(4), np.arange(4)),
    ]


DECISION = Exercise(
    id="13.2",
    title="A decision from a place",
    level=2,
    task=(
        "Write `keep_of(key, dropout_p, b, h, rows, keys)`: which weights of one tile are kept, `(len(rows), "
        "len(keys))`, bool. `rows` and `keys` hold the *positions* of the tile's rows and keys in the sequence. Use "
        "one call of `dropout.philox_numpy(counter, key)` for each weight, with the counter `(i, j, h, b)`, and the "
        "first of its four numbers: a weight is kept where that number is at least `dropout_p` of the way from 0 to "
        "`2**32`."
    ),
    name="keep_of",
    stub='''def keep_of(key, dropout_p, b, h, rows, keys):
    """Return which weights of a tile are kept."""
    raise NotImplementedError
''',
    solution='''def keep_of(key, dropout_p, b, h, rows, keys):
    """Return which weights of a tile are kept."""
    i, j = rows[:, None], keys[None, :]
    first = dropout.philox_numpy((i, j, h, b), key)[0]
    return first >= round(dropout_p * 2**32)
''',
    cases=_cases_decision,
    also_right=(
        """def keep_of(key, dropout_p, b, h, rows, keys):
    out = np.zeros((len(rows), len(keys)), dtype=bool)
    for r, i in enumerate(rows):
        for c, j in enumerate(keys):
            out[r, c] = int(dropout.philox_numpy((i, j, h, b), key)[0]) / 2**32 >= dropout_p
    return out
""",
    ),
    setup="import numpy as np\n\nfrom flashlib import dropout",
    wrong=(
        Wrong("all heads share one mask: h is not in the counter", edit=("(i, j, h, b)", "(i, j, 0, b)")),
        Wrong("all sequences share one mask: b is not in the counter", edit=("(i, j, h, b)", "(i, j, h, 0)")),
        Wrong(
            "positions are counted from the corner of the tile: every tile gets the same mask, and another tile size "
            "another one",
            edit=("i, j = rows[:, None], keys[None, :]", "i, j = (rows - rows[0])[:, None], (keys - keys[0])[None, :]"),
        ),
        Wrong(
            "row and key are swapped in the counter: the backward would have to swap them too",
            edit=("(i, j, h, b)", "(j, i, h, b)"),
        ),
        Wrong(
            "sequence and head are swapped in the counter: the order is (i, j, h, b)",
            edit=("(i, j, h, b)", "(i, j, b, h)"),
        ),
        Wrong("what should be dropped is kept, and the other way round", edit=("first >=", "first <")),
        Wrong(
            "the threshold is half as large as it should be: the numbers go up to 2**32, not 2**31",
            edit=("2**32", "2**31"),
        ),
        Wrong(
            "the second of the four numbers decides, not the first",
            edit=("key)[0]", "key)[1]"),
        ),
        Wrong(
            "the key is not used: every seed would give the same mask",
            edit=("(i, j, h, b), key)", "(i, j, h, b), (0, 0))"),
        ),
        Wrong(
            "one number decides for a whole row: j is not in the counter",
            edit=("(i, j, h, b)", "(i, 0 * j, h, b)"),
        ),
    ),
)


# --- 13.3 ----------------------------------------------------------------------------------------------------------


def _cases_gradient():
    rng = np.random.default_rng(133)
    cases = []
    for rows, keys, d, dropout_p in ((4, 4, 4, 0.5), (3, 6, 2, 0.3), (5, 2, 3, 0.1)):
        p = np.exp(rng.standard_normal((rows, keys)))
        p /= p.sum(axis=1, keepdims=True)
        v, dout = rng.standard_normal((keys, d)), rng.standard_normal((rows, d))
        keep = rng.random((rows, keys)) >= dropout_p
        keep[0, 0], keep[-1, -1] = False, True
        cases.append(Case(f"{rows} queries, {keys} keys, dropout_p {dropout_p}", p, v, keep, dropout_p, dout))
    return cases


GRADIENT = Exercise(
    id="13.3",
    title="The backward, replayed",
    level=2,
    task=(
        "Write `dropped_gradients(p, v, keep, dropout_p, dout)`: return `(dv, ds)` for a few whole rows. `p` is the "
        "softmax of the scores, all of it, `(rows, keys)`; `keep` says which weights the forward kept; `dout` is the "
        "gradient of the forward's output. `ds` is the gradient of the scores. The row number delta is not given: make "
        "it from the output, as the kernels do."
    ),
    name="dropped_gradients",
    stub='''def dropped_gradients(p, v, keep, dropout_p, dout):
    """Return (dv, ds), shaped as v and p."""
    raise NotImplementedError
''',
    solution='''def dropped_gradients(p, v, keep, dropout_p, dout):
    """Return (dv, ds), shaped as v and p."""
    factor = keep / (1 - dropout_p)
    thin = p * factor
    delta = (dout * (thin @ v)).sum(axis=1)
    dv = thin.T @ dout
    dp = dout @ v.T * factor
    return dv, p * (dp - delta[:, None])
''',
    cases=_cases_gradient,
    also_right=(
        """def dropped_gradients(p, v, keep, dropout_p, dout):
    factor = np.where(keep, 1 / (1 - dropout_p), 0.0)
    dp = (dout @ v.T) * factor
    return (p * factor).T @ dout, p * (dp - np.sum(p * dp, axis=1, keepdims=True))
""",
    ),
    wrong=(
        Wrong(
            "the backward does not replay the mask in dp: a weight that met no value sends a gradient to its score",
            edit=("dout @ v.T * factor", "dout @ v.T"),
        ),
        Wrong(
            "dv is made from all of p: a value gets a gradient from weights that never met it",
            edit=("thin.T @ dout", "p.T @ dout"),
        ),
        Wrong(
            "nothing in the backward knows the mask: dv and dp are those of attention without dropout",
            source="""def dropped_gradients(p, v, keep, dropout_p, dout):
    delta = (dout * (p * keep / (1 - dropout_p) @ v)).sum(axis=1)
    return p.T @ dout, p * (dout @ v.T - delta[:, None])
""",
        ),
        Wrong(
            "dp is dropped but not scaled up: 1/(1 - dropout_p) belongs to dp as to p",
            edit=("dout @ v.T * factor", "dout @ v.T * keep"),
        ),
        Wrong(
            "dv is made from weights that are dropped but not scaled up",
            edit=("thin.T @ dout", "(p * keep).T @ dout"),
        ),
        Wrong(
            "1/(1 - dropout_p) is missing everywhere: the gradients belong to a forward without it",
            edit=("keep / (1 - dropout_p)", "keep * 1.0"),
        ),
        Wrong(
            "ds is made from the thinned p: the softmax has all of p, and a dropped weight still takes part in l",
            edit=("return dv, p * (", "return dv, thin * ("),
        ),
        Wrong(
            "delta is made from an output without dropout: it is dout times the output that the forward returned",
            edit=("(dout * (thin @ v))", "(dout * (p @ v))"),
        ),
        Wrong(
            "the mask and the scale are laid on dp - delta: delta belongs to every key of the row, kept or not",
            edit=(
                "    dp = dout @ v.T * factor\n    return dv, p * (dp - delta[:, None])",
                "    dp = dout @ v.T\n    return dv, p * (dp - delta[:, None]) * factor",
            ),
        ),
        Wrong("delta is missing from ds", edit=("(dp - delta[:, None])", "dp")),
        Wrong(
            "the replayed mask is the other one: dropped weights get the gradients of kept ones",
            edit=("factor = keep /", "factor = ~keep /"),
        ),
    ),
)

# --- 13.4 ----------------------------------------------------------------------------------------------------------


def _cases_philox():
    return [
        # The answers after ten rounds are published: Random123, tests/kat_vectors, philox2x32 10.
        Case("counter 0 0, key 0, one round", (0, 0), 0, 1),
        Case("counter 1 2, key 3, one round", (1, 2), 3, 1),
        Case("counter 5 6, key 7, two rounds", (5, 6), 7, 2),
        Case("counter 0 0, key 0, ten rounds", (0, 0), 0, 10),
        Case("all bits set, ten rounds", (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, 10),
        Case("digits of pi, ten rounds", (0x243F6A88, 0x85A308D3), 0x13198A2E, 10),
    ]


PHILOX = Exercise(
    id="13.4",
    title="Philox's small sibling",
    level=1,
    task=(
        "Philox-2x32 has a counter of two 32-bit words and a key of one. A round makes one product of 64 bits, `c0` "
        "times `M`. The new `c0` is its high half, exclusive or the key, exclusive or `c1`; the new `c1` is its low "
        "half. Before each further round the key grows by `STEP`, modulo `2**32`. Write "
        "`philox_2x32(counter, key, rounds)` with Python's whole numbers; return the two words."
    ),
    name="philox_2x32",
    stub="""M, STEP = 0xD256D193, 0x9E3779B9


def philox_2x32(counter, key, rounds):
    \"\"\"Return two integers from 0 to 2**32 - 1.\"\"\"
    raise NotImplementedError
""",
    solution="""M, STEP = 0xD256D193, 0x9E3779B9


def philox_2x32(counter, key, rounds):
    \"\"\"Return two integers from 0 to 2**32 - 1.\"\"\"
    c0, c1 = counter
    for step in range(rounds):
        k = (key + step * STEP) % 2**32
        high, low = divmod(c0 * M, 2**32)
        c0, c1 = high ^ k ^ c1, low
    return c0, c1
""",
    cases=_cases_philox,
    also_right=(
        """def philox_2x32(counter, key, rounds):
    c = list(counter)
    for _ in range(rounds):
        product = c[0] * 0xD256D193
        c = [(product >> 32) ^ key ^ c[1], product & 0xFFFFFFFF]
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return tuple(c)
""",
    ),
    wrong=(
        Wrong("the key is not moved on: every round uses the same one", edit=("(key + step * STEP)", "key")),
        Wrong(
            "the high and the low half of the product are swapped: the high half is mixed, the low one handed on",
            edit=("high, low =", "low, high ="),
        ),
        Wrong(
            "the key is moved on before the first round: that one uses the key as it is given",
            edit=("key + step * STEP", "key + (step + 1) * STEP"),
        ),
        Wrong(
            "the key grows past 32 bits: its sum is taken modulo 2**32",
            edit=("(key + step * STEP) % 2**32", "key + step * STEP"),
        ),
        Wrong("the high half of the product is lost", edit=("divmod(c0 * M, 2**32)", "0, c0 * M % 2**32")),
        Wrong("the key is not mixed in: every seed would give the same numbers", edit=("high ^ k ^", "high ^")),
        Wrong("c1 is not mixed in: a round forgets half of the counter", edit=(" ^ k ^ c1", " ^ k")),
        Wrong("the two new words are swapped", edit=("c0, c1 = high ^ k ^ c1, low", "c1, c0 = high ^ k ^ c1, low")),
        Wrong(
            "c1 is multiplied: the product is of c0, and c1 is mixed into its high half",
            edit=("c0, c1 = high ^ k ^ c1, low", "c0, c1 = c1 * M // 2**32 ^ k ^ c0, c1 * M % 2**32"),
        ),
        Wrong("there is one round too few", edit=("range(rounds)", "range(rounds - 1)")),
        Wrong("the key grows by the multiplier, not by STEP", edit=("step * STEP", "step * M")),
    ),
)

EXERCISES = [ROWS, DECISION, GRADIENT, PHILOX]
