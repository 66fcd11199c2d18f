"""Chapter 12: which K/V head a query head reads, a packed batch, and the gradient of a shared head."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong

# --- 12.1 ----------------------------------------------------------------------------------------------------------

_HEAD_SOLUTION = """\
def kv_head(h, nheads, nheads_kv):
    return h // (nheads // nheads_kv)
"""

_HEAD_OTHER = """\
def kv_head(h, nheads, nheads_kv):
    return h * nheads_kv // nheads
"""


def _head_cases():
    shapes = ((8, 2), (32, 8), (6, 6), (4, 1), (12, 3))
    return [
        Case(f"query head {h} of {nheads}, {nheads_kv} K/V heads", h, nheads, nheads_kv)
        for nheads, nheads_kv in shapes
        for h in sorted({1, nheads // 2 - 1, nheads - 2})
    ]


_HEAD = Exercise(
    id="12.1",
    title="The head map",
    level=1,
    task=(
        "Write which K/V head the query head `h` reads. `nheads` is a multiple of `nheads_kv`; neighbouring query "
        "heads share a K/V head."
    ),
    name="kv_head",
    stub='''\
def kv_head(h, nheads, nheads_kv):
    """Return the number of the K/V head, an int."""
    raise NotImplementedError
''',
    solution=_HEAD_SOLUTION,
    cases=_head_cases,
    also_right=(_HEAD_OTHER,),
    wrong=(
        Wrong(
            "the heads are dealt out like cards, `h % nheads_kv`: neighbours must share, and weights trained with one "
            "map make nonsense with the other",
            edit=("h // (nheads // nheads_kv)", "h % nheads_kv"),
        ),
        Wrong(
            "h is divided by the number of K/V heads: divide by the size of a group, nheads // nheads_kv",
            edit=("h // (nheads // nheads_kv)", "h // nheads_kv"),
        ),
        Wrong(
            "this is the place within the group, `h % group`: the group's number is asked for",
            edit=("h // (nheads // nheads_kv)", "h % (nheads // nheads_kv)"),
        ),
        Wrong("h itself is taken: there are only nheads_kv heads of keys", edit=("h // (nheads // nheads_kv)", "h")),
    ),
)

# --- 12.2 ----------------------------------------------------------------------------------------------------------

_PACK_SOLUTION = """\
def pack(x, lengths):
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = np.concatenate([x[b, :, :n].swapaxes(0, 1) for b, n in enumerate(lengths)])
    return packed, cu_seqlens
"""

_PACK_OTHER = """\
def pack(x, lengths):
    batch, nheads, seqlen, head_dim = x.shape
    cu_seqlens = [0]
    for n in lengths:
        cu_seqlens.append(cu_seqlens[-1] + int(n))
    packed = np.zeros((cu_seqlens[-1], nheads, head_dim))
    for b in range(batch):
        for h in range(nheads):
            packed[cu_seqlens[b] : cu_seqlens[b + 1], h] = x[b, h, : lengths[b]]
    return packed, np.array(cu_seqlens, np.int32)
"""


def _pack_cases():
    rng = np.random.default_rng(122)

    def case(label, nheads, lengths, seqlen=6):
        x = rng.standard_normal((len(lengths), nheads, seqlen, 3)).round(2)
        return Case(label, x, lengths)

    return [
        case("lengths 4, 2, 5", 2, [4, 2, 5]),
        case("an empty sequence in the middle", 2, [3, 0, 6]),
        case("one sequence", 3, [5]),
        case("an empty sequence first", 1, [0, 4]),
        case("no padding at all", 2, [6, 6]),
    ]


_PACK = Exercise(
    id="12.2",
    title="Pack a padded batch",
    level=2,
    task=(
        "Write `pack`: `x` is a padded batch (batch, nheads, seqlen, head_dim), of which sequence `b` uses the first "
        "`lengths[b]` positions. Return the packed tensor (total, nheads, head_dim), sequences one behind the other, "
        "and `cu_seqlens` of shape (batch + 1,): sequence `b` is rows `cu_seqlens[b]` … `cu_seqlens[b + 1] - 1`. A "
        "sequence may be empty."
    ),
    name="pack",
    stub='''\
def pack(x, lengths):
    """Return (packed, cu_seqlens); x: (batch, nheads, seqlen, head_dim), lengths: a list of batch ints."""
    raise NotImplementedError
''',
    solution=_PACK_SOLUTION,
    cases=_pack_cases,
    also_right=(_PACK_OTHER,),
    wrong=(
        Wrong(
            "cu_seqlens lacks the 0 in front: it has one number for each sequence, the ends; batch + 1 are needed",
            edit=("np.concatenate([[0], np.cumsum(lengths)])", "np.cumsum(lengths)"),
        ),
        Wrong(
            "cu_seqlens holds the lengths, and not where the sequences begin: they must be summed up",
            edit=("np.concatenate([[0], np.cumsum(lengths)])", "np.concatenate([[0], lengths])"),
        ),
        Wrong(
            "cu_seqlens counts the padding: it steps by the length of the padded batch",
            edit=("np.cumsum(lengths)", "np.cumsum([x.shape[2] for _ in lengths])"),
        ),
        Wrong(
            "the padding is still in the packed tensor",
            edit=("x[b, :, :n].swapaxes(0, 1)", "x[b].swapaxes(0, 1)"),
        ),
        Wrong(
            "the last token of each sequence is left out",
            edit=("x[b, :, :n]", "x[b, :, : max(n - 1, 0)]"),
        ),
        Wrong(
            "the sequences' *last* positions are taken: padding stands behind the tokens",
            edit=("x[b, :, :n]", "x[b, :, x.shape[2] - n :]"),
        ),
        Wrong(
            "the axes have been reshaped and not exchanged: heads and positions get mixed",
            edit=("x[b, :, :n].swapaxes(0, 1)", "x[b, :, :n].reshape(n, x.shape[1], x.shape[3])"),
        ),
    ),
)

# --- 12.3 ----------------------------------------------------------------------------------------------------------

_SUM_SOLUTION = """\
def shared_gradient(dk_copies, nheads_kv):
    batch, nheads, seqlen, head_dim = dk_copies.shape
    return dk_copies.reshape(batch, nheads_kv, nheads // nheads_kv, seqlen, head_dim).sum(2)
"""

_SUM_OTHER = """\
def shared_gradient(dk_copies, nheads_kv):
    group = dk_copies.shape[1] // nheads_kv
    return np.stack([dk_copies[:, h * group : (h + 1) * group].sum(1) for h in range(nheads_kv)], 1)
"""


def _sum_cases():
    rng = np.random.default_rng(123)

    def case(label, batch, nheads, nheads_kv):
        return Case(label, rng.standard_normal((batch, nheads, 3, 2)).round(2), nheads_kv)

    return [
        case("8 heads on 2", 1, 8, 2),
        case("6 heads on 3, batch 2", 2, 6, 3),
        case("MQA: 4 heads on 1", 2, 4, 1),
        case("as many K/V heads as heads", 1, 3, 3),
    ]


_SUM = Exercise(
    id="12.3",
    title="The gradient of a shared head",
    level=1,
    task=(
        "With the K/V heads copied, each query head has a `dk` of its own: `dk_copies`, (batch, nheads, seqlen, "
        "head_dim). Write what the gradient of the `nheads_kv` heads is that were copied."
    ),
    name="shared_gradient",
    stub='''\
def shared_gradient(dk_copies, nheads_kv):
    """Return dk, (batch, nheads_kv, seqlen, head_dim)."""
    raise NotImplementedError
''',
    solution=_SUM_SOLUTION,
    cases=_sum_cases,
    also_right=(_SUM_OTHER,),
    wrong=(
        Wrong(
            "the copies' gradients are averaged: what is used several times gets the sum",
            edit=(".sum(2)", ".mean(2)"),
        ),
        Wrong(
            "the groups are `h % nheads_kv`: the reshape puts the group's size first, and sums heads that do not share",
            edit=(
                "reshape(batch, nheads_kv, nheads // nheads_kv, seqlen, head_dim).sum(2)",
                "reshape(batch, nheads // nheads_kv, nheads_kv, seqlen, head_dim).sum(1)",
            ),
        ),
        Wrong(
            "only the first head of each group counts",
            edit=(".sum(2)", "[:, :, 0]"),
        ),
        Wrong(
            "only the last head of each group counts: each store overwrote the one before",
            edit=(".sum(2)", "[:, :, -1]"),
        ),
        Wrong(
            "the sum runs over the batch too: batches do not share their keys",
            edit=(".sum(2)", ".sum(2).sum(0, keepdims=True).repeat(batch, 0)"),
        ),
    ),
)

EXERCISES = [_HEAD, _PACK, _SUM]
