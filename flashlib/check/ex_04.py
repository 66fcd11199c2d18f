"""Exercises of chapter 04, Tiling."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong

# --- 04.1 ----------------------------------------------------------------------------------------------------------

_COUNT = """
def _counts(seqlen_q, seqlen_k, block_m, block_n, offset, ceil=True, strict=0):
    empty = full = diagonal = 0
    tiles_q = -(-seqlen_q // block_m) if ceil else seqlen_q // block_m
    tiles_k = -(-seqlen_k // block_n) if ceil else seqlen_k // block_n
    for i in range(tiles_q):
        for j in range(tiles_k):
            first_row, last_row = i * block_m, min((i + 1) * block_m, seqlen_q) - 1
            first_key, last_key = j * block_n, min((j + 1) * block_n, seqlen_k) - 1
            if first_key + strict > last_row + offset:
                empty += 1
            elif last_key + strict <= first_row + offset:
                full += 1
            else:
                diagonal += 1
    return empty, full, diagonal
"""


def _count_answer(arguments):
    return f"{_COUNT}\n\nkinds = _counts(200, 520, 64, 128, {arguments})\n"


_KINDS = Exercise(
    id="04.1",
    title="How many tiles of each kind?",
    level=1,
    task=(
        "200 queries, 520 keys, causal (bottom-right), tiles of 64 queries by 128 keys. How many tiles of scores are "
        "empty, full, diagonal? Work it out on paper and give the three counts as a tuple, in this order: "
        "`kinds = (empty, full, diagonal)`."
    ),
    name="kinds",
    stub="kinds = None",
    solution="# Query 0 sees keys 0 to 320, each later query one more; 4 × 5 tiles.\nkinds = (4, 12, 4)\n",
    wrong=(
        Wrong(
            "query i is taken to see only keys 0 to i (top-left), whatever the lengths",
            source=_count_answer("0"),
            stumble=12,
        ),
        Wrong("the offset is taken with the wrong sign, seqlen_q - seqlen_k", source=_count_answer("-320")),
        Wrong(
            "every query is taken to see one key too many, as if the offset were 321",
            source=_count_answer("320, strict=-1"),
        ),
        Wrong(
            "the short tiles at the ends are left out (lengths divided downwards)",
            source=_count_answer("320, ceil=False"),
        ),
        Wrong("the tiles are counted as if there were no mask", source="kinds = (0, 20, 0)"),
        Wrong("the order of the three is (full, diagonal, empty)", source="kinds = (12, 4, 4)"),
        Wrong("full and diagonal tiles are counted together as full", source="kinds = (4, 16, 0)"),
    ),
)

# --- 04.2 ----------------------------------------------------------------------------------------------------------

_UPDATE_SOLUTION = """\
def update(m_i, l_i, acc, q_i, k_j, v_j, valid, scale):
    s = scale * (q_i @ k_j.T)
    s[:, valid:] = -np.inf
    m_new = np.maximum(m_i, s.max(axis=1))
    m_safe = np.where(np.isneginf(m_new), 0, m_new)
    alpha = np.exp(m_i - m_safe)
    p = np.exp(s - m_safe[:, None])
    l_new = alpha * l_i + p.sum(axis=1)
    acc_new = alpha[:, None] * acc + p @ v_j
    return m_new, l_new, acc_new
"""

_UPDATE_ARTICLE = """\
def update(m_i, l_i, acc, q_i, k_j, v_j, valid, scale):
    if valid == 0:
        return m_i, l_i, acc
    s = scale * (q_i @ k_j[:valid].T)
    m_tile = s.max(axis=1)
    p_tile = np.exp(s - m_tile[:, None])
    m_new = np.maximum(m_i, m_tile)
    alpha, beta = np.exp(m_i - m_new), np.exp(m_tile - m_new)
    l_new = alpha * l_i + beta * p_tile.sum(axis=1)
    acc_new = alpha[:, None] * acc + beta[:, None] * (p_tile @ v_j[:valid])
    return m_new, l_new, acc_new
"""


def _state(rng, rows, head_dim_v, fresh=False):
    if fresh:
        return np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, head_dim_v))
    return rng.normal(0, 1, rows), rng.uniform(1, 3, rows), rng.normal(0, 2, (rows, head_dim_v))


def _update_cases():
    rng = np.random.default_rng(42)
    x = rng.standard_normal
    full = (*_state(rng, 3, 2), x((3, 4)), x((5, 4)), x((5, 2)), 5, 0.7)
    first = (*_state(rng, 3, 2, fresh=True), x((3, 4)), x((5, 4)), x((5, 2)), 5, 0.5)
    padded = (
        *_state(rng, 3, 2),
        x((3, 4)),
        np.r_[x((2, 4)), np.zeros((3, 4))],
        np.r_[x((2, 2)), np.zeros((3, 2))],
        2,
        0.5,
    )
    garbage = (*_state(rng, 3, 2), x((3, 4)), 9 * x((5, 4)), 9 * x((5, 2)), 3, 0.5)
    nothing = (*_state(rng, 3, 2, fresh=True), x((3, 4)), x((5, 4)), x((5, 2)), 0, 0.5)
    lower = (np.full(3, 30.0), *_state(rng, 3, 2)[1:], x((3, 4)), x((5, 4)), x((5, 2)), 5, 2.0)
    return [
        Case("a tile in the middle of a row", *full),
        Case("the first tile of a row", *first),
        Case("the last tile, padded with zeros", *padded),
        Case("the last tile, with leftovers past its end", *garbage),
        Case("the tile's scores are all far below the running max", *lower),
        Case("no key seen at all", *nothing),
    ]


_UPDATE = Exercise(
    id="04.2",
    title="One tile",
    level=2,
    task=(
        "Write the inner step of the forward: bring the state `(m_i, l_i, acc)` of a tile of rows up to date with one "
        "tile of keys. A kernel's tile has a fixed size, so the last one is padded: only its first `valid` keys count "
        "(`valid` may be 0, and the rows past it may hold anything finite). Return the new `(m_i, l_i, acc)`; `acc` "
        "stays unnormalised. A row that has seen no key keeps m = -inf, l = 0, acc = 0."
    ),
    name="update",
    stub='''\
def update(m_i, l_i, acc, q_i, k_j, v_j, valid, scale):
    """m_i, l_i: (rows,); acc: (rows, d_v); q_i: (rows, d); k_j: (keys, d); v_j: (keys, d_v)."""
    raise NotImplementedError
''',
    solution=_UPDATE_SOLUTION,
    cases=_update_cases,
    also_right=(_UPDATE_ARTICLE,),
    wrong=(
        Wrong(
            "keys past the end of the tile are not masked: padding counts as keys with score 0, leftovers as real keys",
            edit=("    s[:, valid:] = -np.inf\n", ""),
        ),
        Wrong(
            "`valid` is 0 and no score is left: the maximum of nothing has no value",
            source=_UPDATE_ARTICLE.replace("    if valid == 0:\n        return m_i, l_i, acc\n", ""),
        ),
        Wrong(
            "keys past the end are masked only after the maximum was taken: m is not the maximum of the valid keys",
            edit=(
                "    s[:, valid:] = -np.inf\n    m_new = np.maximum(m_i, s.max(axis=1))\n",
                "    m_new = np.maximum(m_i, s.max(axis=1))\n    s[:, valid:] = -np.inf\n",
            ),
        ),
        Wrong(
            "masked scores are a large negative number and not -inf: a row without a key counts them as keys",
            edit=("s[:, valid:] = -np.inf", "s[:, valid:] = -1e9"),
        ),
        Wrong("masked scores are set to 0 and not to -inf", edit=("s[:, valid:] = -np.inf", "s[:, valid:] = 0")),
        Wrong("acc is not rescaled when the maximum moves", edit=("alpha[:, None] * acc + p", "acc + p")),
        Wrong("l is not rescaled when the maximum moves", edit=("alpha * l_i + p", "l_i + p")),
        Wrong(
            "the tile's own maximum replaces the running one",
            edit=("np.maximum(m_i, s.max(axis=1))", "s.max(axis=1)"),
        ),
        Wrong(
            "acc is divided by l inside the loop",
            edit=(
                "p @ v_j\n    return",
                "p @ v_j\n    acc_new = acc_new / np.where(l_new == 0, 1, l_new)[:, None]\n    return",
            ),
        ),
        Wrong("the scores are not scaled", edit=("scale * (q_i @ k_j.T)", "q_i @ k_j.T")),
        Wrong("the scale is applied twice", edit=("scale * (q_i @ k_j.T)", "scale * (scale * q_i @ k_j.T)")),
        Wrong(
            "1/sqrt(d) is used whatever `scale` is",
            edit=("scale * (q_i @ k_j.T)", "q_i @ k_j.T / np.sqrt(q_i.shape[1])"),
        ),
        Wrong(
            "rows are masked in place of keys: keys are the columns, s[:, valid:]",
            edit=("s[:, valid:] = -np.inf", "s[valid:] = -np.inf"),
        ),
        Wrong(
            "the rescale is inverted, exp(m_new - m_i), as FlashAttention-2's Algorithm 1 prints it for acc",
            edit=("alpha[:, None] * acc", "acc / alpha[:, None]"),
        ),
        Wrong(
            "-inf is subtracted from -inf: a row without a key becomes NaN",
            edit=("np.where(np.isneginf(m_new), 0, m_new)", "m_new"),
            stumble=13,
        ),
    ),
)

# --- 04.3 ----------------------------------------------------------------------------------------------------------

_BOUNDS_SOLUTION = """\
def loop_bounds(i, block_m, block_n, seqlen_q, seqlen_k):
    first_row = i * block_m
    last_row = min(first_row + block_m, seqlen_q) - 1
    offset = seqlen_k - seqlen_q
    seen_by_all = min(max(first_row + offset + 1, 0), seqlen_k)
    seen_by_any = min(max(last_row + offset + 1, 0), seqlen_k)
    end = -(-seen_by_any // block_n)
    full = seen_by_all // block_n
    if seen_by_all == seqlen_k:
        full = end
    return full, end
"""

_BOUNDS_BY_MASK = """\
def loop_bounds(i, block_m, block_n, seqlen_q, seqlen_k):
    rows = np.arange(i * block_m, min((i + 1) * block_m, seqlen_q))
    mask = np.arange(seqlen_k) <= rows[:, None] + seqlen_k - seqlen_q
    tiles = [mask[:, start : start + block_n] for start in range(0, seqlen_k, block_n)]
    return sum(bool(tile.all()) for tile in tiles), sum(bool(tile.any()) for tile in tiles)
"""


def _bounds_cases():
    sizes = [
        ("as many keys as queries", 64, 64, 16, 16),
        ("key tiles twice as wide", 64, 64, 16, 32),
        ("more keys than queries", 40, 100, 16, 16),
        ("one query, as in decoding", 1, 100, 16, 16),
        ("more queries than keys: rows without a key", 100, 40, 16, 16),
        ("ragged lengths", 37, 51, 8, 12),
        ("one key less than a tile more than queries", 40, 55, 16, 16),
        ("one key more than queries", 40, 41, 16, 16),
    ]
    return [
        Case(f"{label}, i = {i}", i, block_m, block_n, seqlen_q, seqlen_k)
        for label, seqlen_q, seqlen_k, block_m, block_n in sizes
        for i in range(-(-seqlen_q // block_m))
    ]


_BOUNDS = Exercise(
    id="04.3",
    title="Where the loop ends",
    level=2,
    task=(
        "A kernel does not ask each tile for its kind: it computes two numbers and runs two loops. Write "
        "`loop_bounds(i, block_m, block_n, seqlen_q, seqlen_k)` for a causal mask (bottom-right): return `(full, end)` "
        "so that for query tile `i` the key tiles 0 to full - 1 are full, full to end - 1 are diagonal, and all from "
        "`end` on are empty. Lengths need not be multiples of the tiles; a tile of rows without keys has end = 0."
    ),
    name="loop_bounds",
    stub='''\
def loop_bounds(i, block_m, block_n, seqlen_q, seqlen_k):
    """Return (full, end), two numbers of key tiles."""
    raise NotImplementedError
''',
    solution=_BOUNDS_SOLUTION,
    cases=_bounds_cases,
    also_right=(_BOUNDS_BY_MASK,),
    wrong=(
        Wrong(
            "the mask is aligned at the top left: the offset seqlen_k - seqlen_q is missing",
            edit=("offset = seqlen_k - seqlen_q", "offset = 0"),
            stumble=12,
        ),
        Wrong("the offset has the wrong sign", edit=("offset = seqlen_k - seqlen_q", "offset = seqlen_q - seqlen_k")),
        Wrong(
            "the diagonal is off by one: no query sees the key on its own diagonal",
            source=_BOUNDS_SOLUTION.replace("offset + 1, 0", "offset, 0"),
        ),
        Wrong(
            "the diagonal is off by one: every query sees one key too many",
            source=_BOUNDS_SOLUTION.replace("offset + 1, 0", "offset + 2, 0"),
        ),
        Wrong("the two are returned as (end, full)", edit=("return full, end", "return end, full")),
        Wrong(
            "`end` is one tile too far: it is the first empty tile", edit=("return full, end", "return full, end + 1")
        ),
        Wrong(
            "one diagonal tile is taken for granted, full = end - 1: there can be several, or none",
            edit=("    return full, end", "    full = max(end - 1, 0)\n    return full, end"),
        ),
        Wrong(
            "the last row of the tile is taken one too far",
            edit=("min(first_row + block_m, seqlen_q) - 1", "min(first_row + block_m, seqlen_q)"),
        ),
        Wrong(
            "one tile is added to a division rounded down, also where nothing is left over",
            edit=("-(-seen_by_any // block_n)", "seen_by_any // block_n + 1"),
        ),
        Wrong(
            "the last diagonal tile is skipped (division rounded down)",
            edit=("-(-seen_by_any // block_n)", "seen_by_any // block_n"),
        ),
        Wrong(
            "the short last tile of keys never counts as full, though every query sees all of its keys",
            edit=("    if seen_by_all == seqlen_k:\n        full = end\n", ""),
        ),
        Wrong(
            "the diagonal tile counts as full and is not masked",
            edit=("full = seen_by_all // block_n", "full = -(-seen_by_all // block_n)"),
        ),
        Wrong(
            "rows without a key give negative numbers",
            source=_BOUNDS_SOLUTION.replace(
                "min(max(first_row + offset + 1, 0), seqlen_k)", "min(first_row + offset + 1, seqlen_k)"
            ).replace("min(max(last_row + offset + 1, 0), seqlen_k)", "min(last_row + offset + 1, seqlen_k)"),
        ),
        Wrong(
            "the short last tile of queries is taken at full length, so that the end lies past the keys",
            source=_BOUNDS_SOLUTION.replace(
                "min(first_row + block_m, seqlen_q) - 1", "first_row + block_m - 1"
            ).replace(
                "seen_by_any = min(max(last_row + offset + 1, 0), seqlen_k)",
                "seen_by_any = max(last_row + offset + 1, 0)",
            ),
        ),
    ),
)

# --- 04.4 ----------------------------------------------------------------------------------------------------------

_FORWARD_SOLUTION = """\
def forward(q, k, v, block_m, block_n, causal, scale):
    seqlen_q, seqlen_k = len(q), len(k)
    offset = seqlen_k - seqlen_q
    out = np.zeros((seqlen_q, v.shape[1]))
    for start_m in range(0, seqlen_q, block_m):
        q_i = q[start_m : start_m + block_m]
        rows = np.arange(start_m, start_m + len(q_i))
        m_i = np.full(len(q_i), -np.inf)
        l_i = np.zeros(len(q_i))
        acc = np.zeros((len(q_i), v.shape[1]))
        for start_n in range(0, seqlen_k, block_n):
            if causal and start_n > rows[-1] + offset:
                break
            k_j, v_j = k[start_n : start_n + block_n], v[start_n : start_n + block_n]
            s = scale * (q_i @ k_j.T)
            if causal:
                keys = np.arange(start_n, start_n + len(k_j))
                s = np.where(keys <= rows[:, None] + offset, s, -np.inf)
            m_new = np.maximum(m_i, s.max(axis=1))
            m_safe = np.where(np.isneginf(m_new), 0, m_new)
            alpha = np.exp(m_i - m_safe)
            p = np.exp(s - m_safe[:, None])
            l_i = alpha * l_i + p.sum(axis=1)
            acc = alpha[:, None] * acc + p @ v_j
            m_i = m_new
        l_safe = np.where(l_i == 0, 1, l_i)
        out[start_m : start_m + block_m] = acc / l_safe[:, None]
    return out
"""

_FORWARD_BY_MERGE = """\
from flashlib.online_softmax import finish, identity, merge, state_of


def forward(q, k, v, block_m, block_n, causal, scale):
    # Keys in the outer loop, and every tile merged as in chapter 03.
    state = identity(v.shape[1], (len(q),))
    for start in range(0, len(k), block_n):
        s = scale * q @ k[start : start + block_n].T
        if causal:
            keys = start + np.arange(s.shape[1])
            s[keys > np.arange(len(q))[:, None] + len(k) - len(q)] = -np.inf
        state = merge(state, state_of(s, v[start : start + block_n]))
    return finish(state)
"""


def _forward_cases():
    rng = np.random.default_rng(4)

    def case(label, seqlen_q, seqlen_k, block_m, block_n, causal, scale=0.5, size=1.0):
        q, k, v = (rng.standard_normal(shape) for shape in ((seqlen_q, 4), (seqlen_k, 4), (seqlen_k, 3)))
        return Case(label, size * q, k, v, block_m, block_n, causal, scale)

    x = np.random.default_rng(5).standard_normal

    by_hand = Case(
        "the scores 1, 2, 3, 4 of chapter 03",
        np.array([[1.0]]),
        np.array([[1.0], [2.0], [3.0], [4.0]]),
        np.array([[10.0], [20.0], [30.0], [40.0]]),
        1,
        2,
        False,
        1.0,
    )
    return [
        by_hand,
        case("one tile holds everything", 3, 4, 4, 4, False),
        case("tiles that divide the lengths", 8, 8, 4, 2, False),
        case("ragged lengths", 7, 10, 4, 4, False),
        case("causal, equal lengths", 8, 8, 4, 2, True),
        case("causal, more keys than queries", 5, 11, 2, 4, True),
        case("causal, rows without a key", 9, 4, 2, 3, True),
        case("a negative scale", 6, 6, 4, 4, False, scale=-1.5),
        case("scores in the thousands", 6, 9, 4, 2, False, size=1000.0),
        Case(
            "all scores below -1000", *(np.full((5, 2), -40.0) + x((5, 2)), 30 + x((6, 2)), x((6, 3))), 2, 4, False, 0.5
        ),
    ]


_FORWARD = Exercise(
    id="04.4",
    title="The whole forward",
    level=3,
    task=(
        "Write the forward: attention of `q` (seqlen_q, d), `k` (seqlen_k, d), `v` (seqlen_k, d_v) from tiles of "
        "`block_m` queries and `block_n` keys; lengths need not be multiples. `scale` is a number, used as given. "
        "With `causal`, query i sees the keys j <= i + seqlen_k - seqlen_q; a row that sees none gives 0. Return the "
        "output, (seqlen_q, d_v), float64. No array may have seqlen_q × seqlen_k elements: the checker cannot see "
        "this, you can."
    ),
    name="forward",
    stub="""\
def forward(q, k, v, block_m, block_n, causal, scale):
    raise NotImplementedError
""",
    solution=_FORWARD_SOLUTION,
    cases=_forward_cases,
    also_right=(_FORWARD_BY_MERGE,),
    wrong=(
        Wrong("acc is not rescaled when the maximum moves", edit=("alpha[:, None] * acc + p", "acc + p")),
        Wrong("l is not rescaled when the maximum moves", edit=("alpha * l_i + p", "l_i + p")),
        Wrong(
            "the rescale of acc is inverted, as FlashAttention-2's Algorithm 1 prints it",
            edit=("alpha[:, None] * acc", "acc / np.where(alpha == 0, 1, alpha)[:, None]"),
        ),
        Wrong(
            "the tile's own maximum replaces the running one",
            edit=("np.maximum(m_i, s.max(axis=1))", "s.max(axis=1)"),
        ),
        Wrong("the running maximum is never stored", edit=("            m_i = m_new\n", "")),
        Wrong(
            "acc is divided by l in every step and again at the end",
            edit=("p @ v_j\n", "p @ v_j\n            acc = acc / np.where(l_i == 0, 1, l_i)[:, None]\n"),
        ),
        Wrong("the division by l is missing", edit=("acc / l_safe[:, None]", "acc")),
        Wrong(
            "each tile is given a softmax of its own and the results are added",
            edit=(
                "            acc = alpha[:, None] * acc + p @ v_j\n",
                "            l_tile = np.maximum(p.sum(axis=1), 1e-300)\n"
                "            acc = acc + p @ v_j / l_tile[:, None]\n"
                "            l_i = np.ones(len(q_i))\n",
            ),
        ),
        Wrong(
            "state is not reset for the next tile of queries: m_i, l_i and acc start outside the outer loop",
            source=_FORWARD_SOLUTION.replace(
                "    for start_m in range",
                "    m_all, l_all = np.full(block_m, -np.inf), np.zeros(block_m)\n"
                "    acc_all = np.zeros((block_m, v.shape[1]))\n    for start_m in range",
            )
            .replace("m_i = np.full(len(q_i), -np.inf)", "m_i = m_all[: len(q_i)]")
            .replace("l_i = np.zeros(len(q_i))", "l_i = l_all[: len(q_i)]")
            .replace("acc = np.zeros((len(q_i), v.shape[1]))", "acc = acc_all[: len(q_i)]")
            .replace(
                "            m_i = m_new\n", "            m_i = m_new\n        m_all, l_all, acc_all = m_i, l_i, acc\n"
            ),
        ),
        Wrong(
            "the keys past the last whole tile are left out",
            edit=("range(0, seqlen_k, block_n)", "range(0, seqlen_k - seqlen_k % block_n, block_n)"),
        ),
        Wrong(
            "the last tile is padded with zero keys that are not masked and count as score 0",
            edit=(
                "            k_j, v_j = k[start_n : start_n + block_n], v[start_n : start_n + block_n]\n",
                "            padded = [np.r_[x, np.zeros((-seqlen_k % block_n, x.shape[1]))] for x in (k, v)]\n"
                "            k_j, v_j = (x[start_n : start_n + block_n] for x in padded)\n",
            ),
        ),
        Wrong("the scores are not scaled", edit=("scale * (q_i @ k_j.T)", "q_i @ k_j.T")),
        Wrong("the scale is applied twice", edit=("scale * (q_i @ k_j.T)", "scale * (scale * q_i @ k_j.T)")),
        Wrong(
            "1/sqrt(d) is used whatever `scale` is",
            edit=("scale * (q_i @ k_j.T)", "q_i @ k_j.T / np.sqrt(q.shape[1])"),
        ),
        Wrong(
            "the causal mask is aligned at the top left",
            edit=("offset = seqlen_k - seqlen_q", "offset = 0"),
            stumble=12,
        ),
        Wrong(
            "a query does not see the key on its own diagonal (< in place of <=)", edit=("keys <= rows", "keys < rows")
        ),
        Wrong(
            "the diagonal tile is skipped with the empty ones",
            edit=(
                "start_n > rows[-1] + offset",
                "start_n + len(k[start_n : start_n + block_n]) - 1 > rows[0] + offset",
            ),
        ),
        Wrong("the diagonal tiles are not masked", edit=("            if causal:\n", "            if False:\n")),
        Wrong(
            "a row without a key becomes NaN: -inf is subtracted from -inf, or 0 divided by 0",
            source=_FORWARD_SOLUTION.replace("np.where(np.isneginf(m_new), 0, m_new)", "m_new").replace(
                "start_n > rows[-1] + offset", "False"
            ),
            stumble=13,
        ),
        Wrong(
            "no maximum is subtracted: exp overflows",
            edit=("m_new = np.maximum(m_i, s.max(axis=1))", "m_new = np.zeros(len(q_i))"),
            stumble=11,
        ),
        Wrong(
            "the running maximum starts at 0 and not at -inf: where all scores are far below 0, every exp is 0",
            edit=("m_i = np.full(len(q_i), -np.inf)", "m_i = np.zeros(len(q_i))"),
        ),
        Wrong("the output is transposed", edit=("return out", "return out.T")),
    ),
)

EXERCISES = [_KINDS, _UPDATE, _BOUNDS, _FORWARD]
