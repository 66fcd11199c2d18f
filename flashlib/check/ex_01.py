"""The exercises of chapter 01, attention written out."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong

# --- 01.1 softmax --------------------------------------------------------------------------------------------------

SOFTMAX_STUB = '''\
def softmax(s):
    """Turn each row of s, (rows, keys), into weights that sum to one."""
    raise NotImplementedError
'''

SOFTMAX = '''\
def softmax(s):
    """Turn each row of s, (rows, keys), into weights that sum to one."""
    m = s.max(-1, keepdims=True)
    e = np.exp(s - m)
    return e / e.sum(-1, keepdims=True)
'''

SOFTMAX_BY_LOGARITHM = """\
def softmax(s):
    s = s - np.max(s, axis=1)[:, None]
    return np.exp(s - np.log(np.exp(s).sum(1))[:, None])
"""

SOFTMAX_DOWN_COLUMNS = """\
def softmax(s):
    e = np.exp(s - s.max(0, keepdims=True))
    return e / e.sum(0, keepdims=True)
"""


def softmax_cases():
    rng = np.random.default_rng(11)
    return [
        Case("a square of small scores", rng.standard_normal((4, 4))),
        Case("3 rows of 5 keys", rng.standard_normal((3, 5))),
        Case("rows of very different size", np.array([[1000.0, 1001.0, 1002.0], [-1000.0, -1001.0, -1002.0]])),
        Case("one key a row", np.array([[3.0], [-7.0]])),
        Case("one score far above the others", np.array([[0.0, 2000.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0]])),
    ]


# --- 01.2 attention ------------------------------------------------------------------------------------------------

ATTENTION_STUB = '''\
def attention(q, k, v):
    """Compute attention of q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v)."""
    raise NotImplementedError
'''

ATTENTION = '''\
def attention(q, k, v):
    """Compute attention of q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v)."""
    scale = 1 / np.sqrt(q.shape[-1])
    s = (q @ k.T) * scale
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return p @ v
'''

ATTENTION_BY_ROWS = """\
def attention(q, k, v):
    rows = []
    for row in q:
        s = (k @ row) / len(row) ** 0.5
        w = np.exp(s - s.max())
        rows.append((w[:, None] * v).sum(0) / w.sum())
    return np.array(rows)
"""

ATTENTION_SCALED_LATE = """\
def attention(q, k, v):
    s = q @ k.T
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return p / np.sqrt(q.shape[-1]) @ v
"""


def attention_cases():
    rng = np.random.default_rng(12)

    def arrays(seqlen_q, seqlen_k, head_dim, head_dim_v):
        shapes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)
        return [rng.standard_normal(shape) for shape in shapes]

    q, k, v = arrays(2, 3, 16, 4)
    return [
        Case("3 queries, 5 keys, head_dim 4", *arrays(3, 5, 4, 2)),
        Case("all sizes equal", *arrays(4, 4, 4, 4)),
        Case("large scores", 4000 * q, k, v),
        Case("6 queries, 7 keys, head_dim 9", *arrays(6, 7, 9, 3)),
    ]


# --- 01.3 causal mask ----------------------------------------------------------------------------------------------

CAUSAL_STUB = '''\
def causal_mask(seqlen_q, seqlen_k):
    """Return booleans (seqlen_q, seqlen_k), True where query i sees key j; the last query sees every key."""
    raise NotImplementedError
'''

CAUSAL = '''\
def causal_mask(seqlen_q, seqlen_k):
    """Return booleans (seqlen_q, seqlen_k), True where query i sees key j; the last query sees every key."""
    i = np.arange(seqlen_q)[:, None]
    j = np.arange(seqlen_k)[None, :]
    return j <= i + seqlen_k - seqlen_q
'''

CAUSAL_BY_LISTS = """\
def causal_mask(seqlen_q, seqlen_k):
    return [[j <= i + seqlen_k - seqlen_q for j in range(seqlen_k)] for i in range(seqlen_q)]
"""

CAUSAL_BY_TRIL = """\
def causal_mask(seqlen_q, seqlen_k):
    return np.tril(np.ones((seqlen_q, seqlen_k), bool), seqlen_k - seqlen_q)
"""


def causal_cases():
    # The widest case comes first: there every mistake looks different.
    return [
        Case("2 queries, 5 keys", 2, 5),
        Case("5 queries, 2 keys", 5, 2),
        Case("4 queries, 4 keys", 4, 4),
        Case("1 query, 3 keys", 1, 3),
    ]


# --- 01.4 masked rows ----------------------------------------------------------------------------------------------

MASKED_STUB = '''\
def masked_attention(s, v, mask):
    """Average v (keys, head_dim) with the weights of the scores s (rows, keys), over the keys where mask is True.

    A row that sees no key gives 0.
    """
    raise NotImplementedError
'''

MASKED = '''\
def masked_attention(s, v, mask):
    """Average v (keys, head_dim) with the weights of the scores s (rows, keys), over the keys where mask is True.

    A row that sees no key gives 0.
    """
    s = np.where(mask, s, -np.inf)
    m = s.max(-1, keepdims=True)
    m = np.where(np.isfinite(m), m, 0)
    p = np.exp(s - m)
    l = p.sum(-1, keepdims=True)
    p = p / np.where(l == 0, 1, l)
    return p @ v
'''

MASKED_ROW_BY_ROW = """\
def masked_attention(s, v, mask):
    out = np.zeros((s.shape[0], v.shape[1]))
    for i in range(s.shape[0]):
        seen = mask[i]
        if seen.any():
            e = np.exp(s[i, seen] - s[i, seen].max())
            out[i] = e @ v[seen] / e.sum()
    return out
"""

MASKED_AFTER = """\
def masked_attention(s, v, mask):
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return np.where(mask, p, 0) @ v
"""

MASKED_ZERO_SCORES = """\
def masked_attention(s, v, mask):
    s = np.where(mask, s, 0)
    p = np.exp(s - s.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    return np.where(mask.any(-1, keepdims=True), p @ v, 0)
"""

MASKED_NAN = """\
def masked_attention(s, v, mask):
    s = np.where(mask, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""

MASKED_FINITE = """\
def masked_attention(s, v, mask):
    s = np.where(mask, s, -1e9)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v
"""

MASKED_NO_MAX = """\
def masked_attention(s, v, mask):
    p = np.where(mask, np.exp(s), 0)
    l = p.sum(-1, keepdims=True)
    return p / np.where(l == 0, 1, l) @ v
"""

MASKED_MAX_OF_ALL = """\
def masked_attention(s, v, mask):
    p = np.where(mask, np.exp(s - s.max(-1, keepdims=True)), 0)
    l = p.sum(-1, keepdims=True)
    return p / np.where(l == 0, 1, l) @ v
"""


def masked_cases():
    rng = np.random.default_rng(14)
    some = np.array([[True, True, False, False], [True, False, True, True], [False, True, False, False]])
    none = some.copy()
    none[1] = False
    far = np.array([[-800.0, -801.0, 900.0, 0.0], [0.0, 1.0, 2.0, 3.0], [1000.0, -500.0, 3.0, 2.0]])
    return [
        Case("every row sees a key", rng.standard_normal((3, 4)), rng.standard_normal((4, 2)), some),
        Case("the second row sees no key", rng.standard_normal((3, 4)), rng.standard_normal((4, 2)), none),
        Case("large scores, seen and hidden", far, rng.standard_normal((4, 2)), none),
        Case("large scores, all seen", far, rng.standard_normal((4, 2)), np.ones((3, 4), bool)),
    ]


EXERCISES = [
    Exercise(
        id="01.1",
        title="A softmax that does not overflow",
        level=1,
        task=(
            "Write `softmax(s)` for an array of scores, shape `(rows, keys)`: every row becomes weights that sum to "
            "one. It must stay right for scores of 1000."
        ),
        name="softmax",
        stub=SOFTMAX_STUB,
        solution=SOFTMAX,
        cases=softmax_cases,
        also_right=(SOFTMAX_BY_LOGARITHM,),
        wrong=(
            Wrong(
                "the row's maximum is not subtracted: exp overflows from about 709 on, and inf / inf is NaN",
                edit=("np.exp(s - m)", "np.exp(s)"),
            ),
            Wrong(
                "the weights sum to one down each column (axis 0), not along each row (axis -1)",
                source=SOFTMAX_DOWN_COLUMNS,
            ),
            Wrong(
                "`keepdims=True` is missing in the sum: row sums then broadcast along the columns",
                edit=("e.sum(-1, keepdims=True)", "e.sum(-1)"),
            ),
            Wrong(
                "not the row's maximum is subtracted but, say, its mean: a score far above still overflows",
                edit=("s.max(-1, keepdims=True)", "s.mean(-1, keepdims=True)"),
            ),
            Wrong(
                "`keepdims=True` is missing in the maximum: row maxima are then subtracted along the columns",
                edit=("s.max(-1, keepdims=True)", "s.max(-1)"),
            ),
            Wrong(
                "the exponentials are not divided by their sum: no row sums to one",
                edit=("e / e.sum(-1, keepdims=True)", "e"),
            ),
            Wrong(
                "the maximum of the whole array is subtracted: a row far below it becomes 0 / 0, NaN",
                edit=("s.max(-1, keepdims=True)", "s.max()"),
            ),
            Wrong(
                "the weights are divided by the sum of the whole array, so all rows together sum to one",
                edit=("e.sum(-1, keepdims=True)", "e.sum()"),
            ),
        ),
    ),
    Exercise(
        id="01.2",
        title="Attention",
        level=2,
        task=(
            "Write `attention(q, k, v)` for two-dimensional arrays: scores scaled with 1/sqrt(head_dim), weights, "
            "weighted mean of the values. Large scores must not overflow."
        ),
        name="attention",
        stub=ATTENTION_STUB,
        solution=ATTENTION,
        cases=attention_cases,
        also_right=(ATTENTION_BY_ROWS,),
        wrong=(
            Wrong("the scores are not scaled", edit=(" * scale", "")),
            Wrong(
                "the scores are divided by head_dim itself: its square root is missing, or the scale is applied twice",
                edit=(" * scale", " * scale * scale"),
            ),
            Wrong(
                "the scores are divided by sqrt(seqlen_q), the number of queries, instead of sqrt(head_dim)",
                edit=("q.shape[-1]", "q.shape[0]"),
            ),
            Wrong(
                "the scores are divided by sqrt(seqlen_k), the number of keys, instead of sqrt(head_dim)",
                edit=("q.shape[-1]", "k.shape[0]"),
            ),
            Wrong(
                "the scores are divided by sqrt(head_dim_v), the width of v, instead of the width of q and k",
                edit=("q.shape[-1]", "v.shape[-1]"),
            ),
            Wrong("the scores are multiplied with sqrt(head_dim) instead of divided by it", edit=("1 / np", "np")),
            Wrong(
                "the scale is applied to the weights, after the softmax",
                source=ATTENTION_SCALED_LATE,
            ),
            Wrong(
                "the softmax runs over the queries (axis 0) instead of over the keys (axis -1)",
                edit=(
                    "    p = np.exp(s - s.max(-1, keepdims=True))\n    p = p / p.sum(-1, keepdims=True)",
                    "    p = np.exp(s - s.max(0, keepdims=True))\n    p = p / p.sum(0, keepdims=True)",
                ),
            ),
            Wrong(
                "the row's maximum is not subtracted: exp overflows, and inf / inf is NaN",
                edit=("np.exp(s - s.max(-1, keepdims=True))", "np.exp(s)"),
            ),
            Wrong(
                "the weights are not divided by their sum: the output is a sum, not a mean",
                edit=("    p = p / p.sum(-1, keepdims=True)\n", ""),
            ),
            Wrong(
                "the maximum of the whole array is subtracted: a row far below it becomes 0 / 0, NaN",
                edit=("s.max(-1, keepdims=True)", "s.max()"),
            ),
            Wrong(
                "the weights are divided by the sum of the whole array, so all rows together sum to one",
                edit=("p.sum(-1, keepdims=True)", "p.sum()"),
            ),
        ),
    ),
    Exercise(
        id="01.3",
        title="The causal mask of unequal lengths",
        level=1,
        task=(
            "Write `causal_mask(seqlen_q, seqlen_k)`: booleans, True where query i sees key j. The queries are the "
            "last `seqlen_q` positions of the sequence of keys, so the last query sees every key."
        ),
        name="causal_mask",
        stub=CAUSAL_STUB,
        solution=CAUSAL,
        cases=causal_cases,
        also_right=(CAUSAL_BY_TRIL, CAUSAL_BY_LISTS),
        wrong=(
            Wrong(
                "the mask is aligned at the top left (j <= i), so that the last query misses the newest keys",
                edit=("j <= i + seqlen_k - seqlen_q", "j <= i"),
                stumble=12,
            ),
            Wrong(
                "the difference of the lengths has the wrong sign",
                edit=("i + seqlen_k - seqlen_q", "i + seqlen_q - seqlen_k"),
                stumble=12,
            ),
            Wrong("a query does not see its own position (< in the place of <=)", edit=("j <= i", "j < i")),
            Wrong("every query sees one key too many", edit=("i + seqlen_k - seqlen_q", "i + seqlen_k - seqlen_q + 1")),
            Wrong("the mask is True where a key is hidden", edit=("j <= i", "j > i")),
            Wrong(
                "the mask holds what is added to the scores, 0 and -inf, and not booleans",
                edit=(
                    "return j <= i + seqlen_k - seqlen_q",
                    "return np.where(j <= i + seqlen_k - seqlen_q, 0, -np.inf)",
                ),
            ),
            Wrong(
                "the mask has a row for each key; it must have a row for each query",
                edit=("return j <= i + seqlen_k - seqlen_q", "return (j <= i + seqlen_k - seqlen_q).T"),
            ),
            Wrong("the triangle is the upper one: queries see what comes after them", edit=("j <= i", "j >= i")),
        ),
    ),
    Exercise(
        id="01.4",
        title="Masked attention, with rows that see nothing",
        level=2,
        task=(
            "Write `masked_attention(s, v, mask)`: `s` are the scaled scores `(rows, keys)`, `v` the values "
            "`(keys, head_dim)`, `mask` booleans `(rows, keys)`, True where a key is seen. A row that sees no key "
            "gives exactly 0."
        ),
        name="masked_attention",
        stub=MASKED_STUB,
        solution=MASKED,
        cases=masked_cases,
        also_right=(MASKED_ROW_BY_ROW,),
        wrong=(
            Wrong(
                "a row that sees no key is not treated apart: -inf - (-inf) is NaN, and so is 0 / 0 later on",
                source=MASKED_NAN,
                stumble=13,
            ),
            Wrong(
                "hidden scores get a large negative number: a row that sees no key then averages all values",
                source=MASKED_FINITE,
                stumble=13,
            ),
            Wrong(
                "the row's maximum is taken over hidden keys too: far below it, all weights that count underflow to 0",
                source=MASKED_MAX_OF_ALL,
            ),
            Wrong(
                "the row's maximum is not subtracted: large scores overflow, very low ones all become 0",
                source=MASKED_NO_MAX,
            ),
            Wrong(
                "the mask is applied after the softmax: the weights that are left do not sum to one",
                source=MASKED_AFTER,
            ),
            Wrong(
                "hidden scores are set to 0, and exp(0) is not 0: a hidden key still gets a weight",
                source=MASKED_ZERO_SCORES,
            ),
            Wrong(
                "the mask is read the wrong way round",
                edit=("np.where(mask, s, -np.inf)", "np.where(mask, -np.inf, s)"),
            ),
        ),
    ),
]
