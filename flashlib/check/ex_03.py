"""Exercises of chapter 03: merge two sums, merge two states, one pass in blocks, splits and a sink by their lse."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong
from flashlib.online_softmax import finish, identity, lse_of, state_of

SETUP = "import numpy as np\n\nfrom flashlib.online_softmax import State"


def _piece(seed, n, rows=(), head_dim=2, offset=0.0):
    rng = np.random.default_rng(seed)
    return state_of(rng.normal(size=(*rows, n)) + offset, rng.normal(size=(n, head_dim)))


# --- 03.1 ----------------------------------------------------------------------------------------------------------


def _cases_merge_sums():
    return [
        Case("the article: [1, 2] and [3, 4]", 2.0, 1.3678794411714423, 4.0, 1.3678794411714423),
        Case("the larger maximum comes first", 4.0, 1.5, 1.0, 2.25),
        Case("equal maxima", 3.0, 1.25, 3.0, 2.0),
        Case("scores about 1000", 1000.0, 1.5, 1001.0, 1.25),
        Case("scores about -1000", -1001.0, 1.5, -1000.0, 1.25),
        Case("three rows at once", *(np.array(x) for x in ([1.0, 5, 2], [1.5, 1, 3], [2.0, 3, 2], [1.0, 2, 1.25]))),
    ]


MERGE_SUMS = Exercise(
    id="03.1",
    title="Merge two sums",
    level=1,
    task=(
        "Two pieces of a row are known by their maximum and their sum of `exp(s - maximum)` only. Write `merge_sums`, "
        "which returns the pair `(m, l)` of both pieces together. The arguments are numbers or arrays with one entry "
        "a row; every piece holds at least one finite score."
    ),
    name="merge_sums",
    stub='''def merge_sums(m_a, l_a, m_b, l_b):
    """Return (m, l) of two pieces together."""
    raise NotImplementedError
''',
    solution='''def merge_sums(m_a, l_a, m_b, l_b):
    """Return (m, l) of two pieces together."""
    m = np.maximum(m_a, m_b)
    l = np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b
    return m, l
''',
    cases=_cases_merge_sums,
    wrong=(
        Wrong(
            "l_a and l_b are added as they are, though they count from different maxima: neither is rescaled to m",
            edit=("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "l_a + l_b"),
        ),
        Wrong(
            "only the second piece is rescaled: the first one keeps counting from its old maximum",
            edit=("np.exp(m_a - m) * l_a", "l_a"),
        ),
        Wrong(
            "only the first piece is rescaled: when the larger maximum came first, it is the second that must shrink",
            edit=("np.exp(m_b - m) * l_b", "l_b"),
        ),
        Wrong(
            "the factors are upside down, exp(m - m_a) for exp(m_a - m): a rescale never makes a sum larger",
            edit=("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "np.exp(m - m_a) * l_a + np.exp(m - m_b) * l_b"),
        ),
        Wrong(
            "the sums are taken back to exp(s) with no maximum subtracted: l must count from the new m",
            edit=("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "np.exp(m_a) * l_a + np.exp(m_b) * l_b"),
        ),
        Wrong(
            "exp(m_a) is computed on its own before dividing by exp(m): subtract first, or large scores overflow and "
            "very negative ones become 0/0",
            edit=(
                "np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b",
                "(np.exp(m_a) * l_a + np.exp(m_b) * l_b) / np.exp(m)",
            ),
            stumble=11,
        ),
        Wrong(
            "the factors are powers of 2 while l was summed with powers of e",
            edit=("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "np.exp2(m_a - m) * l_a + np.exp2(m_b - m) * l_b"),
        ),
        Wrong(
            "the second piece's maximum is taken for the maximum of both",
            edit=("m = np.maximum(m_a, m_b)", "m = m_b + 0 * m_a"),
        ),
        Wrong(
            "each l is weighted by its share of the maxima, m_a / (m_a + m_b): the weights are exponentials",
            edit=("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "(m_a * l_a + m_b * l_b) / (m_a + m_b)"),
        ),
        Wrong(
            "Python's max or an if is used on arrays with an entry a row: np.maximum and np.where decide row by row",
            edit=("np.maximum(m_a, m_b)", "max(m_a, m_b)"),
        ),
        Wrong(
            "the pair is returned as (l, m): m comes first",
            edit=("return m, l", "return l, m"),
        ),
        Wrong("the smaller of the two maxima is taken for m", edit=("np.maximum", "np.minimum")),
        Wrong(
            "each piece gets the other one's factor",
            edit=(
                "np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b",
                "np.exp(m_b - m) * l_a + np.exp(m_a - m) * l_b",
            ),
        ),
        Wrong(
            "the second piece is taken to hold the maximum, so the first one's factor is exp(m_a - m_b)",
            edit=("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "np.exp(m_a - m_b) * l_a + l_b"),
        ),
        Wrong(
            "the larger of the two sums is taken: both pieces count, each with its factor",
            edit=("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "np.maximum(l_a, l_b)"),
        ),
        Wrong("the logarithm of l is returned", edit=("return m, l", "return m, np.log(l)")),
    ),
    also_right=(
        """def merge_sums(m_a, l_a, m_b, l_b):
    factor = np.exp(-np.abs(np.subtract(m_a, m_b)))
    first = np.greater_equal(m_a, m_b)
    return np.where(first, m_a, m_b), np.where(first, l_a + factor * l_b, factor * l_a + l_b)
""",
        """def merge_sums(m_a, l_a, m_b, l_b):
    m = np.maximum(m_a, m_b)
    return m, np.exp(np.logaddexp(m_a - m + np.log(l_a), m_b - m + np.log(l_b)))
""",
    ),
)


# --- 03.2 ----------------------------------------------------------------------------------------------------------


def _cases_merge_states():
    v = np.array([[10.0], [20.0], [30.0], [40.0]])
    return [
        Case("the article: [1, 2] and [3, 4]", state_of([1, 2], v[:2]), state_of([3, 4], v[2:])),
        Case("the larger maximum comes first", state_of([4, 3], v[:2]), state_of([2], v[2:3])),
        Case("two rows, three columns", _piece(0, 4, (2,), 3), _piece(1, 5, (2,), 3, 1.5)),
        Case("as many rows as columns", _piece(2, 3, (3,), 3), _piece(3, 4, (3,), 3, -1.0)),
        Case("scores about 1000", _piece(4, 3, (2,), 3, 1000.0), _piece(5, 3, (2,), 3, 1002.0)),
        Case("the first piece has seen nothing", identity(3, (2,)), _piece(6, 3, (2,), 3)),
        Case("neither piece has seen anything", identity(3, (2,)), identity(3, (2,))),
    ]


MERGE_STATES = Exercise(
    id="03.2",
    title="Merge two states",
    level=2,
    task=(
        "Now with the values: write `merge_states`, which merges two states `(m, l, acc)`. `m` and `l` have one "
        "entry a row, `acc` one more axis of length head_dim. A state may have seen nothing (`m = -inf`, `l = 0`, "
        "`acc = 0`): merged with it, the other state must come out unchanged, without a NaN, even if both have seen "
        "nothing."
    ),
    name="merge_states",
    setup=SETUP,
    stub='''def merge_states(a, b):
    """Return the State of two pieces together; a and b have the fields m, l and acc."""
    raise NotImplementedError
''',
    solution='''def merge_states(a, b):
    """Return the State of two pieces together; a and b have the fields m, l and acc."""
    m = np.maximum(a.m, b.m)
    reference = np.where(np.isneginf(m), 0.0, m)
    alpha_a, alpha_b = np.exp(a.m - reference), np.exp(b.m - reference)
    l = alpha_a * a.l + alpha_b * b.l
    acc = alpha_a[..., None] * a.acc + alpha_b[..., None] * b.acc
    return State(m, l, acc)
''',
    cases=_cases_merge_states,
    wrong=(
        Wrong(
            "acc is not rescaled: l counts from the new maximum, acc still from the old ones",
            edit=("alpha_a[..., None] * a.acc + alpha_b[..., None] * b.acc", "a.acc + b.acc"),
        ),
        Wrong(
            "only the second piece's acc is rescaled: the first one needs its factor too when the maximum moves",
            edit=("alpha_a[..., None] * a.acc", "a.acc"),
        ),
        Wrong(
            "only the first piece's acc is rescaled: a new piece whose maximum is below m must shrink as well",
            edit=("alpha_b[..., None] * b.acc", "b.acc"),
        ),
        Wrong(
            "l is not rescaled, only acc is",
            edit=("alpha_a * a.l + alpha_b * b.l", "a.l + b.l"),
        ),
        Wrong(
            "each piece gets the other one's factor",
            edit=(
                "alpha_a, alpha_b = np.exp(a.m - reference), np.exp(b.m - reference)",
                "alpha_b, alpha_a = np.exp(a.m - reference), np.exp(b.m - reference)",
            ),
        ),
        Wrong(
            "the factors are upside down, exp(m - a.m) for exp(a.m - m)",
            edit=(
                "np.exp(a.m - reference), np.exp(b.m - reference)",
                "np.exp(reference - a.m), np.exp(reference - b.m)",
            ),
        ),
        Wrong(
            "each acc is divided by its own l before the merge: the division comes once, after the last merge",
            edit=(
                "alpha_a[..., None] * a.acc + alpha_b[..., None] * b.acc",
                "alpha_a[..., None] * a.acc / a.l[..., None] + alpha_b[..., None] * b.acc / b.l[..., None]",
            ),
        ),
        Wrong(
            "acc is the merged output, divided by l already: a state keeps the undivided sum",
            edit=("return State(m, l, acc)", "return State(m, l, acc / l[..., None])"),
        ),
        Wrong(
            "-inf is subtracted from -inf, which is NaN, where neither piece has seen anything",
            edit=("np.where(np.isneginf(m), 0.0, m)", "m"),
            stumble=13,
        ),
        Wrong(
            "alpha multiplies acc along head_dim instead of along the rows: it needs one more axis, alpha[..., None]",
            edit=("alpha_a[..., None] * a.acc + alpha_b[..., None] * b.acc", "alpha_a * a.acc + alpha_b * b.acc"),
        ),
        Wrong(
            "Python's max or an if is used on arrays with an entry a row: np.maximum and np.where decide row by row",
            edit=("np.maximum(a.m, b.m)", "max(a.m, b.m)"),
        ),
        Wrong("the fields come back in the order (l, m, acc)", edit=("State(m, l, acc)", "State(l, m, acc)")),
    ),
    also_right=(
        """def merge_states(a, b):
    m = np.maximum(a.m, b.m)
    alpha_a = np.where(np.equal(a.m, m), 1.0, np.exp(np.where(np.equal(a.m, m), 0.0, a.m - m)))
    alpha_b = np.where(np.equal(b.m, m), 1.0, np.exp(np.where(np.equal(b.m, m), 0.0, b.m - m)))
    acc = np.expand_dims(alpha_a, -1) * a.acc + np.expand_dims(alpha_b, -1) * b.acc
    return m, alpha_a * a.l + alpha_b * b.l, acc
""",
    ),
)


# --- 03.3 ----------------------------------------------------------------------------------------------------------


def _cases_attend_in_blocks():
    rng = np.random.default_rng(7)
    s, v = rng.normal(size=10), rng.normal(size=(10, 3))
    masked = s.copy()
    masked[[0, 1, 2, 6]] = -np.inf
    falling = np.array([900.0, 899.0, 1.0, 2.0, 0.0, 3.0])
    return [
        Case("[1, 3 | 2, 5 | 4, 6]", np.array([1.0, 3, 2, 5, 4, 6]), np.arange(10.0, 70, 10)[:, None], 2),
        Case("[4, 3 | 2, 1]: the maximum comes first", np.array([4.0, 3, 2, 1]), np.arange(10.0, 50, 10)[:, None], 2),
        Case("ten scores in blocks of four", s, v, 4),
        Case("one block holds the row", s, v, 16),
        Case("scores about 1000", s + 1000, v, 3),
        Case("scores about -1000", s - 1000, v, 3),
        Case("the scores fall by 900", falling, v[:6], 2),
        Case("the first block is masked", masked, v, 3),
        Case("every score is masked", np.full(4, -np.inf), v[:4], 2),
    ]


ATTEND_IN_BLOCKS = Exercise(
    id="03.3",
    title="One pass in blocks",
    level=2,
    task=(
        "Write the loop of FlashAttention for one row. `s` has shape (n,), `v` (n, head_dim). Read both once, `block` "
        "entries at a time (the last block may be shorter), and return `(out, lse)`: the softmax-weighted average of "
        "`v` and the natural logarithm of the sum of `exp(s)`. A masked score is `-inf`; a whole block may be masked. "
        "If every score is, `out` is 0 and `lse` is `-inf`."
    ),
    name="attend_in_blocks",
    stub='''def attend_in_blocks(s, v, block):
    """Return (out, lse) of one row, reading s and v once, block entries at a time."""
    raise NotImplementedError
''',
    solution='''def attend_in_blocks(s, v, block):
    """Return (out, lse) of one row, reading s and v once, block entries at a time."""
    m, l, acc = -np.inf, 0.0, np.zeros(v.shape[1])
    for start in range(0, len(s), block):
        s_tile, v_tile = s[start : start + block], v[start : start + block]
        m_new = max(m, s_tile.max())
        if m_new == -np.inf:
            continue
        alpha = np.exp(m - m_new)
        p_tile = np.exp(s_tile - m_new)
        l = alpha * l + p_tile.sum()
        acc = alpha * acc + p_tile @ v_tile
        m = m_new
    if l == 0:
        return acc, -np.inf
    return acc / l, m + np.log(l)
''',
    cases=_cases_attend_in_blocks,
    wrong=(
        Wrong(
            "acc is not rescaled when the maximum moves",
            edit=("acc = alpha * acc + p_tile", "acc = acc + p_tile"),
        ),
        Wrong(
            "l is not rescaled when the maximum moves",
            edit=("l = alpha * l + p_tile", "l = l + p_tile"),
        ),
        Wrong(
            "neither l nor acc is rescaled when the maximum moves",
            source="""def attend_in_blocks(s, v, block):
    m, l, acc = -np.inf, 0.0, np.zeros(v.shape[1])
    for start in range(0, len(s), block):
        m = max(m, s[start : start + block].max())
        if m == -np.inf:
            continue
        p_tile = np.exp(s[start : start + block] - m)
        l, acc = l + p_tile.sum(), acc + p_tile @ v[start : start + block]
    return (acc, -np.inf) if l == 0 else (acc / l, m + np.log(l))
""",
        ),
        Wrong(
            "alpha is upside down, exp(m_new - m): infinite in the first block, where m is -inf",
            edit=("np.exp(m - m_new)", "np.exp(m_new - m)"),
        ),
        Wrong(
            "m is never set to m_new, so alpha is always exp(-inf) = 0 and only the last block is left",
            edit=("        m = m_new\n    if", "    m = m_new\n    if"),
        ),
        Wrong(
            "the newest block's maximum replaces the running one: where the scores fall far, alpha overflows",
            edit=("max(m, s_tile.max())", "s_tile.max()"),
        ),
        Wrong(
            "no maximum is subtracted: right for small scores, inf/inf for large ones",
            source="""def attend_in_blocks(s, v, block):
    l, acc = 0.0, np.zeros(v.shape[1])
    for start in range(0, len(s), block):
        p_tile = np.exp(s[start : start + block])
        l, acc = l + p_tile.sum(), acc + p_tile @ v[start : start + block]
    return (acc, -np.inf) if l == 0 else (acc / l, np.log(l))
""",
            stumble=11,
        ),
        Wrong(
            "each block's softmax is taken on its own and the outputs are averaged: the blocks' weights are lost",
            source="""def attend_in_blocks(s, v, block):
    outs, lses = [], []
    for start in range(0, len(s), block):
        s_tile = s[start : start + block]
        m = s_tile.max()
        if m == -np.inf:
            continue
        p_tile = np.exp(s_tile - m)
        outs.append(p_tile @ v[start : start + block] / p_tile.sum())
        lses.append(m + np.log(p_tile.sum()))
    if not outs:
        return np.zeros(v.shape[1]), -np.inf
    return np.mean(outs, axis=0), np.logaddexp.reduce(lses)
""",
        ),
        Wrong(
            "acc is divided by l inside the loop, so the next block is added to an output and not to a sum",
            edit=(
                "        acc = alpha * acc + p_tile @ v_tile\n",
                "        acc = (alpha * acc + p_tile @ v_tile) / l\n",
            ),
        ),
        Wrong(
            "acc is returned without the division by l",
            edit=("return acc / l, m + np.log(l)", "return acc, m + np.log(l)"),
        ),
        Wrong(
            "lse is log(l) without the maximum",
            edit=("m + np.log(l)", "np.log(l)"),
            stumble=14,
        ),
        Wrong(
            "lse takes log2 of a sum of powers of e",
            edit=("np.log(l)", "np.log2(l)"),
            stumble=14,
        ),
        Wrong(
            "the last, shorter block is left out",
            edit=("range(0, len(s), block)", "range(0, max(len(s) - block, 0) + 1, block)"),
        ),
        Wrong(
            "-inf is subtracted from -inf where a block is masked and nothing was seen before it",
            edit=("        if m_new == -np.inf:\n            continue\n", ""),
            stumble=13,
        ),
        Wrong(
            "the running maximum starts at 0 and not at -inf: where all scores are far below 0, every exp is 0",
            edit=("m, l, acc = -np.inf, 0.0", "m, l, acc = 0.0, 0.0"),
        ),
        Wrong(
            "the loop ends at the first masked block: later ones may hold scores",
            edit=("            continue\n", "            break\n"),
        ),
        Wrong("l is returned in place of lse", edit=("m + np.log(l)", "l")),
        Wrong("m is returned in place of lse", edit=("m + np.log(l)", "m")),
        Wrong(
            "0 is divided by 0 where every score is masked",
            edit=("    if l == 0:\n        return acc, -np.inf\n", ""),
            stumble=13,
        ),
    ),
    also_right=(
        """def attend_in_blocks(s, v, block):
    lse, out = -np.inf, np.zeros(v.shape[1])
    for start in range(0, len(s), block):
        s_tile, v_tile = s[start : start + block], v[start : start + block]
        keep = s_tile > -np.inf
        if not keep.any():
            continue
        new = np.logaddexp(lse, np.logaddexp.reduce(s_tile[keep]))
        out = np.exp(lse - new) * out + np.exp(s_tile[keep] - new) @ v_tile[keep]
        lse = new
    return out, lse
""",
    ),
)


# --- 03.4 ----------------------------------------------------------------------------------------------------------


def _splits(seed, splits=3, rows=4, head_dim=2, offset=0.0, empty=()):
    """Return (outs, lses) of `splits` pieces of each row; (split, row) pairs in `empty` have no key."""
    rng = np.random.default_rng(seed)
    outs, lses = [], []
    for split in range(splits):
        s = rng.normal(size=(rows, 5)) + offset + split
        s[[row for number, row in empty if number == split]] = -np.inf
        state = state_of(s, rng.normal(size=(5, head_dim)))
        outs.append(finish(state))
        lses.append(lse_of(state))
    return np.array(outs), np.array(lses)


def _cases_combine():
    none = np.full(4, -np.inf)
    sink = np.array([0.5, 4.0, -1.0, 2.0])
    return [
        Case("three splits, no sink", *_splits(0), none),
        Case("three splits and a sink", *_splits(1), sink),
        Case("lse about 1000", *_splits(2, offset=1000.0), sink + 1000),
        Case("lse about -1000", *_splits(3, offset=-1000.0), sink - 1000),
        Case("a sink far above every score", *_splits(4), sink + 1000),
        Case("a split without a key", *_splits(5, empty=[(0, 1), (2, 1), (1, 3)]), sink),
        Case("a row without a key, and its sink", *_splits(6, empty=[(0, 2), (1, 2), (2, 2)]), sink),
        Case("a row without a key or a sink", *_splits(7, empty=[(0, 2), (1, 2), (2, 2)]), none),
    ]


COMBINE = Exercise(
    id="03.4",
    title="Splits and a sink",
    level=3,
    task=(
        "Several workers have each finished some of a row's keys. Write `combine`, which merges their outputs: `outs` "
        "has shape (splits, rows, head_dim), each already divided; `lses` (splits, rows), natural logarithm; a split "
        "without a key for a row has lse `-inf` and output 0. `sink` has shape (rows,): one more score in each row's "
        "sum that has no value; it counts once, `-inf` means none. Return `(out, lse)` of each row, the sink in both. "
        "A row with nothing at all has output 0 and lse `-inf`. No loop over rows, no NaN, no overflow."
    ),
    name="combine",
    stub='''def combine(outs, lses, sink):
    """Return (out, lse) of all splits and the sink together, shapes (rows, head_dim) and (rows,)."""
    raise NotImplementedError
''',
    solution='''def combine(outs, lses, sink):
    """Return (out, lse) of all splits and the sink together, shapes (rows, head_dim) and (rows,)."""
    m = np.maximum(lses.max(axis=0), sink)
    reference = np.where(np.isneginf(m), 0.0, m)
    weights = np.exp(lses - reference)
    total = weights.sum(axis=0) + np.exp(sink - reference)
    safe = np.where(total == 0, 1.0, total)
    out = (weights[..., None] * outs).sum(axis=0) / safe[:, None]
    return out, m + np.log(safe)
''',
    cases=_cases_combine,
    wrong=(
        Wrong(
            "the outputs are averaged with equal weights: each split weighs exp(lse)",
            edit=("(weights[..., None] * outs).sum(axis=0) / safe[:, None]", "outs.mean(axis=0)"),
        ),
        Wrong(
            "exp(lse) is computed with no maximum subtracted: it overflows, or is 0/0 for very negative scores",
            source="""def combine(outs, lses, sink):
    weights = np.exp(lses)
    total = weights.sum(axis=0) + np.exp(sink)
    safe = np.where(np.isneginf(np.maximum(lses.max(axis=0), sink)), 1.0, total)
    return (weights[..., None] * outs).sum(axis=0) / safe[:, None], np.log(total)
""",
            stumble=14,
        ),
        Wrong(
            "the merged lse is the logarithm of the rescaled sum alone: the maximum must be added back",
            edit=("m + np.log(safe)", "np.log(safe)"),
            stumble=14,
        ),
        Wrong(
            "the merged lse is the largest lse alone",
            edit=("m + np.log(safe)", "m"),
            stumble=14,
        ),
        Wrong(
            "the weights are powers of 2, but lse is a natural logarithm",
            edit=(
                "weights = np.exp(lses - reference)\n    total = weights.sum(axis=0) + np.exp(sink - reference)",
                "weights = np.exp2(lses - reference)\n    total = weights.sum(axis=0) + np.exp2(sink - reference)",
            ),
            stumble=14,
        ),
        Wrong(
            "the splits are weighted by lse itself: the weights are exp(lse)",
            edit=(
                "weights = np.exp(lses - reference)\n    total = weights.sum(axis=0) + np.exp(sink - reference)",
                "weights = np.where(np.isneginf(lses), 0, lses)\n"
                "    total = weights.sum(axis=0) + np.where(np.isneginf(sink), 0, sink)",
            ),
            stumble=14,
        ),
        Wrong(
            "the weighted outputs are added but not divided by the sum of the weights",
            edit=(" / safe[:, None]", ""),
        ),
        Wrong(
            "-inf is subtracted from -inf in a row without a key or a sink",
            edit=("np.where(np.isneginf(m), 0.0, m)", "m"),
            stumble=13,
        ),
        Wrong(
            "0 is divided by 0 in a row without a key or a sink",
            edit=("np.where(total == 0, 1.0, total)", "total"),
            stumble=13,
        ),
        Wrong(
            "the sink is added once a split; it belongs to the row and counts once",
            edit=("+ np.exp(sink - reference)", "+ len(lses) * np.exp(sink - reference)"),
        ),
        Wrong(
            "the sink is left out",
            source="""def combine(outs, lses, sink):
    m = lses.max(axis=0)
    weights = np.exp(lses - np.where(np.isneginf(m), 0.0, m))
    safe = np.where(np.isneginf(m), 1.0, weights.sum(axis=0))
    return (weights[..., None] * outs).sum(axis=0) / safe[:, None], m + np.log(safe)
""",
        ),
        Wrong(
            "the output is right but the sink is missing from lse",
            edit=(
                "m + np.log(safe)",
                "m + np.log(np.where(np.isneginf(lses.max(axis=0)), 1.0, weights.sum(axis=0)))",
            ),
        ),
        Wrong(
            "the maximum leaves the sink out, so a large sink overflows and a row without a key loses its lse",
            edit=("np.maximum(lses.max(axis=0), sink)", "lses.max(axis=0)"),
        ),
    ),
    also_right=(
        """def combine(outs, lses, sink):
    lse, out = sink.copy(), np.zeros(outs.shape[1:])
    for out_j, lse_j in zip(outs, lses):
        new = np.logaddexp(lse, lse_j)
        shift = np.where(np.isneginf(new), 0.0, new)
        out = np.exp(lse - shift)[:, None] * out + np.exp(lse_j - shift)[:, None] * out_j
        lse = new
    return out, lse
""",
        """def combine(outs, lses, sink):
    lse = np.logaddexp(np.logaddexp.reduce(lses, axis=0), sink)
    weights = np.exp(lses - np.where(lse == -np.inf, 0, lse))
    return np.einsum("sr,srd->rd", weights, outs), lse
""",
    ),
)

EXERCISES = [MERGE_SUMS, MERGE_STATES, ATTEND_IN_BLOCKS, COMBINE]
