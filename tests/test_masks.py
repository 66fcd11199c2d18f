"""Ready-made masks: each against its definition in NumPy and, in the op, against the oracle; their bounds' promise."""

import numpy as np
import pytest
import torch
from attention_cases import DEVICE, check
from kernel_jobs import job
from test_forward import qkv

from flashlib import masks, tile_map
from flashlib.compiler import compile_many
from flashlib.device import tl, triton
from flashlib.mods import Bounds, Mask

LENGTHS = [(48, 48), (35, 50), (50, 35), (1, 40)]
DOCUMENTS = [[20, 1, 19, 8], [48]]


def places(seqlen_q, seqlen_k):
    return np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)[None, :]


def dense_last(seqlen_q, seqlen_k):
    at, j = places(seqlen_q, seqlen_k)
    return (j <= at) & (at - j < 11)


def dense_prefix(seqlen_q, seqlen_k, size=13):
    at, j = places(seqlen_q, seqlen_k)
    return (j <= at) | (j < size)


def dense_dilated(seqlen_q, seqlen_k):
    at, j = places(seqlen_q, seqlen_k)
    # Not the remainder of a negative number, which languages define differently.
    return np.abs(at - j) % 3 == 0


def dense_documents(lengths):
    name = np.repeat(np.arange(len(lengths)), lengths)
    return name[:, None] == name[None, :]


ANY_LENGTH = {
    "last": (lambda: masks.last(11, DEVICE), dense_last),
    "prefix": (lambda: masks.prefix([13, 13], DEVICE), dense_prefix),
    "dilated": (lambda: masks.dilated(3, DEVICE), dense_dilated),
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ANY_LENGTH)
def test_mask_is_its_definition(name, lengths):
    make, dense = ANY_LENGTH[name]
    assert np.array_equal(tile_map.seen(*lengths, mask=make()), dense(*lengths))


@pytest.mark.parametrize("b", [0, 1])
def test_document_mask_is_its_definition(b):
    mask = masks.documents(DOCUMENTS, DEVICE)
    assert np.array_equal(tile_map.seen(48, 48, mask=mask, b=b), dense_documents(DOCUMENTS[b]))


def test_prefix_of_each_batch():
    mask = masks.prefix([5, 30], DEVICE)
    for b, size in enumerate((5, 30)):
        assert np.array_equal(tile_map.seen(30, 40, mask=mask, b=b), dense_prefix(30, 40, size))


@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (8, 8)])
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", ["last", "prefix"])
def test_bounds_keep_their_promise_and_are_tight(name, lengths, by_keys, tile):
    """No tile is skipped or called full wrongly, and none is visited or tested in vain; tiles of one pair too."""
    make, dense = ANY_LENGTH[name]
    kinds = tile_map.kinds(*lengths, *tile, mask=make(), by_keys=by_keys)
    pairs = dense(*lengths)
    for m, n in np.ndindex(kinds.shape):
        inside = pairs[m * tile[0] : (m + 1) * tile[0], n * tile[1] : (n + 1) * tile[1]]
        short = inside.shape[1] < tile[1]
        best = tile_map.FULL if inside.all() and not short else tile_map.PARTIAL if inside.any() else tile_map.EMPTY
        assert kinds[m, n] == best, (m, n)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("b", [0, 1])
def test_document_bounds_keep_their_promise(b, by_keys):
    mask = masks.documents(DOCUMENTS, DEVICE)
    rules = {"mask": mask, "b": b, "by_keys": by_keys}
    assert not tile_map.broken(48, 48, 8, 8, **rules).any()
    kinds = tile_map.kinds(48, 48, 8, 8, **rules)
    if b == 1:
        assert (kinds == tile_map.FULL).all()
    else:
        # The last document does not meet the first; what is visited lies in one run a row of tiles.
        assert kinds[0, 5] == kinds[5, 0] == tile_map.EMPTY
        assert kinds[0, 0] == kinds[1, 1] == tile_map.FULL


@pytest.mark.parametrize("lengths", [(70, 70), (40, 75), (75, 40)])
@pytest.mark.parametrize("name", ANY_LENGTH)
def test_against_the_oracle(name, lengths):
    make, dense = ANY_LENGTH[name]
    check(*qkv(2, 2, *lengths, 16), mask=make(), dense=torch.from_numpy(dense(*lengths)).to(DEVICE))


@pytest.mark.parametrize("causal", [False, True])
def test_documents_against_the_oracle(causal):
    dense = torch.from_numpy(np.stack([dense_documents(x) for x in DOCUMENTS]))[:, None].to(DEVICE)
    check(*qkv(2, 2, 48, 48, 16), mask=masks.documents(DOCUMENTS, DEVICE), dense=dense, causal=causal)


@triton.jit
def nothing(b, h, first, end, seqlen_q, seqlen_k, aux):
    return 0, 0, 0, tl.minimum(first, 0)


@triton.jit
def everything(b, h, first, end, seqlen_q, seqlen_k, aux):
    return tl.minimum(first, 0), 0, seqlen_k, seqlen_k


def test_broken_tiles_are_those_that_hold_a_pair_or_lack_one():
    pairs = dense_last(48, 48)
    tiles = pairs.reshape(6, 8, 6, 8).swapaxes(1, 2).reshape(6, 6, 64)
    for bound, expected in ((nothing, tiles.any(2)), (everything, ~tiles.all(2))):
        mask = Mask(masks.last_seen, Bounds(bound, masks.last_queries), aux=masks.last(11, DEVICE).aux)
        assert np.array_equal(tile_map.broken(48, 48, 8, 8, mask=mask), expected)


def test_a_broken_promise_is_found():
    loose = Mask(masks.last_seen, Bounds(masks.prefix_keys, masks.last_queries), aux=masks.last(11, DEVICE).aux)
    assert tile_map.broken(48, 48, 8, 8, mask=loose).any()
    assert not tile_map.broken(48, 48, 8, 8, mask=loose, by_keys=True).any()


HOOKS = {
    "last": ("last_keys", "last_queries", 1),
    "prefix": ("prefix_keys", "prefix_queries", 1),
    "document": ("document_range", "document_range", 2),
    "dilated": (None, None, 1),
}


def test_masks_compile_for_a_gpu():
    """The interpreter takes numbers that a compiler does not, such as a bound that is the constant 0."""
    jobs = []
    for name, (keys, queries, n_aux) in HOOKS.items():
        for kernel, bound in (("forward", ("KEYS", keys)), ("dkdv", ("QUERIES", queries))):
            one = job(kernel, "bf16", 64, True, 90)
            one["signature"]["aux"] = ["*i32"] * n_aux
            one["constexprs"]["MASK"] = f"flashlib.masks:{name}_seen"
            one["constexprs"][bound[0]] = f"flashlib.masks:{bound[1]}" if bound[1] else None
            jobs.append(one)
    for given, compiled in zip(jobs, compile_many(jobs), strict=True):
        assert "wgmma" in compiled.ptx, given["constexprs"]["MASK"]
