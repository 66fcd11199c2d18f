"""Exercises of chapter 14: find a token in its page, put the states of splits and a sink together."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong
from flashlib.online_softmax import state_of

# --- 14.1 ----------------------------------------------------------------------------------------------------------


def _table(seed, batch, max_pages):
    return np.random.default_rng(seed).permutation(3 * batch * max_pages)[: batch * max_pages].reshape(batch, max_pages)


def _cases_find():
    return [
        Case("token 5 of sequence 0, pages of 4", _table(1, 3, 8), 0, 5, 4),
        Case("token 0 of sequence 2", _table(2, 3, 8), 2, 0, 4),
        Case("token 3, the last of its page", _table(3, 3, 8), 1, 3, 4),
        Case("token 7 of sequence 1, pages of 2", _table(4, 3, 8), 1, 7, 2),
        Case("token 6 of sequence 2, pages of 3", _table(5, 3, 8), 2, 6, 3),
    ]


_FIND = Exercise(
    id="14.1",
    title="Find a token in its page",
    level=1,
    task=(
        "Write `find`, which says where token `n` of sequence `b` lies: the pair (page, row in the page). "
        "`block_table[b]` lists the pages of sequence `b` in the order of their tokens, `page_size` tokens a page; "
        "tokens and rows are counted from 0."
    ),
    name="find",
    stub='''def find(block_table, b, n, page_size):
    """Return (page, row) of token n of sequence b."""
    raise NotImplementedError
''',
    solution='''def find(block_table, b, n, page_size):
    """Return (page, row) of token n of sequence b."""
    return block_table[b, n // page_size], n % page_size
''',
    cases=_cases_find,
    wrong=(
        Wrong(
            "the table is asked for token n itself: it has one entry a page, not one a token",
            edit=("block_table[b, n // page_size]", "block_table[b, n]"),
        ),
        Wrong(
            "quotient and remainder are swapped: n // page_size counts the pages before the token, n % page_size the "
            "rows before it in its page",
            edit=("block_table[b, n // page_size], n % page_size", "block_table[b, n % page_size], n // page_size"),
        ),
        Wrong(
            "the table's row of sequence 0 is read, whatever b is: these are another sequence's pages",
            edit=("block_table[b, n // page_size]", "block_table[0, n // page_size]"),
        ),
        Wrong(
            "the number of the page in its sequence is returned, not the number that the block table gives for it",
            edit=("block_table[b, n // page_size]", "n // page_size"),
        ),
        Wrong(
            "the row counts from the start of the sequence: n % page_size is the row in its page",
            edit=("n % page_size", "n"),
        ),
        Wrong(
            "tokens are counted from 1: token 0 is the first, so nothing is to be subtracted",
            edit=(
                "block_table[b, n // page_size], n % page_size",
                "block_table[b, (n - 1) // page_size], (n - 1) % page_size",
            ),
        ),
    ),
    also_right=(
        """def find(block_table, b, n, page_size):
    slot, row = np.divmod(n, page_size)
    return block_table[b][slot], row
""",
    ),
)


# --- 14.2 ----------------------------------------------------------------------------------------------------------


def _states(seed, lengths, nrows=2, head_dim=3, offset=0.0):
    """Return (m, l, acc) of splits, stacked; a split of no key is the identity."""
    rng = np.random.default_rng(seed)
    m, l, acc = [], [], []
    for n in lengths:
        if n:
            state = state_of(offset + 2 * rng.normal(size=(nrows, n)), rng.normal(size=(n, head_dim)))
        else:
            state = np.full(nrows, -np.inf), np.zeros(nrows), np.zeros((nrows, head_dim))
        for parts, part in zip((m, l, acc), state, strict=True):
            parts.append(part)
    return np.stack(m), np.stack(l), np.stack(acc)


def _cases_combine():
    sink = np.array([0.5, 2.0])
    return [
        Case("three splits of 4, 5 and 2 keys", *_states(1, (4, 5, 2)), None),
        Case("one split", *_states(2, (6,)), None),
        Case("the middle split is empty", *_states(3, (4, 0, 3)), None),
        Case("scores near 1000", *_states(4, (4, 3), offset=1000.0), None),
        Case("three splits and a sink", *_states(5, (4, 5, 2)), sink),
        Case("an empty split, and a sink", *_states(6, (3, 0)), sink),
    ]


_COMBINE = Exercise(
    id="14.2",
    title="Put splits and a sink together",
    level=2,
    task=(
        "Write `combine`, what the second kernel of decoding does. The states of the splits come stacked: `m` and `l` "
        "of shape (splits, rows), `acc` of shape (splits, rows, head_dim), each `acc` and `l` counted from its own `m`."
        " A split without keys has `m` = -inf. `sink` is None or one more logit a row, which joins the denominator and "
        "has no value. Return the pair (`out`, `lse`), (rows, head_dim) and (rows,). Every row has seen a key."
    ),
    name="combine",
    stub='''def combine(m, l, acc, sink=None):
    """Return (out, lse) of rows whose keys were cut into splits."""
    raise NotImplementedError
''',
    solution='''def combine(m, l, acc, sink=None):
    """Return (out, lse) of rows whose keys were cut into splits."""
    m_row = m.max(axis=0)
    weight = np.exp(m - m_row)
    l_row = (weight * l).sum(axis=0)
    acc_row = (weight[..., None] * acc).sum(axis=0)
    if sink is not None:
        l_row = l_row + np.exp(sink - m_row)
    return acc_row / l_row[:, None], m_row + np.log(l_row)
''',
    cases=_cases_combine,
    wrong=(
        Wrong(
            "the outputs of the splits are averaged: a split whose keys score low then counts as much as one whose "
            "keys score high",
            source="""def combine(m, l, acc, sink=None):
    safe = np.where(l == 0, 1, l)
    m_row = m.max(axis=0)
    l_row = (np.exp(m - m_row) * l).sum(axis=0)
    if sink is not None:
        l_row = l_row + np.exp(sink - m_row)
    return (acc / safe[..., None]).mean(axis=0), m_row + np.log(l_row)
""",
        ),
        Wrong(
            "acc and l of the splits are added as they are, though each counts from its own maximum: exp(m - m_row) "
            "is missing",
            edit=("weight = np.exp(m - m_row)", "weight = np.ones_like(m)"),
        ),
        Wrong(
            "the sink is counted once a split: it belongs to the row",
            edit=("l_row = l_row + np.exp(sink - m_row)", "l_row = l_row + len(m) * np.exp(sink - m_row)"),
        ),
        Wrong("the sink is left out", edit=("if sink is not None:", "if False:")),
        Wrong(
            "the sink's own value is added to l: what joins is exp(sink - m_row), as for any score",
            edit=("np.exp(sink - m_row)", "sink"),
        ),
        Wrong(
            "exp(sink) joins l_row, which counts from m_row: it must be exp(sink - m_row)",
            edit=("np.exp(sink - m_row)", "np.exp(sink)"),
        ),
        Wrong(
            "lse lacks the maximum: log(l_row) counts from m_row",
            edit=("m_row + np.log(l_row)", "np.log(l_row)"),
        ),
        Wrong(
            "nothing is subtracted before exp: scores near 1000 overflow",
            edit=("m_row = m.max(axis=0)", "m_row = np.zeros(m.shape[1])"),
        ),
    ),
    also_right=(
        """from flashlib.online_softmax import State, finish, identity, lse_of, merge


def combine(m, l, acc, sink=None):
    rows, head_dim = acc.shape[1:]
    state = identity(head_dim, (rows,))
    if sink is not None:
        state = State(sink, np.ones(rows), np.zeros((rows, head_dim)))
    for parts in zip(m, l, acc):
        state = merge(state, State(*parts))
    return finish(state), lse_of(state)
""",
    ),
)

EXERCISES = [_FIND, _COMBINE]
