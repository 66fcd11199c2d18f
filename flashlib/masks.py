"""Ready-made masks, each of three lines, with bounds where its visible keys are one run: made to be read and changed.

A query's place among the keys is `at = i + seqlen_k - seqlen_q`: the last query stands at the last key. Numbers that a
mask needs, a width or lengths, come in `aux`, so one compiled kernel serves them all.

Source: the prefix mask is that of T5, https://arxiv.org/abs/1910.10683 (section 3.2.1); the dilated one that of Sparse
Transformers, https://arxiv.org/abs/1904.10509 (section 4.2).
"""

import torch

from flashlib.device import tl, triton
from flashlib.mods import Bounds, Mask

# --- the last keys ---------------------------------------------------------------------------------------------------


@triton.jit
def last_seen(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See the last aux[0] keys, one's own place included, and no later one."""
    at = i + seqlen_k - seqlen_q
    return (j <= at) & (j > at - tl.load(aux[0]))


@triton.jit
def last_keys(b, h, first, end, seqlen_q, seqlen_k, aux):
    shift = seqlen_k - seqlen_q
    size = tl.load(aux[0])
    return first + shift - size + 1, end + shift - size, first + shift + 1, end + shift


@triton.jit
def last_queries(b, h, first, end, seqlen_q, seqlen_k, aux):
    shift = seqlen_k - seqlen_q
    size = tl.load(aux[0])
    return first - shift, end - 1 - shift, first - shift + size, end - 1 - shift + size


def last(size, device="cpu"):
    """Return a Mask: each query sees the last `size` keys, its own place included; `window=(size - 1, 0)` as a hook."""
    return Mask(last_seen, Bounds(last_keys, last_queries), aux=[_int32([size], device)])


# --- a prefix that sees itself both ways -----------------------------------------------------------------------------


@triton.jit
def prefix_seen(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See the first aux[0][b] keys and every earlier one."""
    at = i + seqlen_k - seqlen_q
    return (j <= at) | (j < tl.load(aux[0] + b))


@triton.jit
def prefix_keys(b, h, first, end, seqlen_q, seqlen_k, aux):
    shift = seqlen_k - seqlen_q
    size = tl.load(aux[0] + b)
    return 0, 0, tl.maximum(first + shift + 1, size), tl.maximum(end + shift, size)


@triton.jit
def prefix_queries(b, h, first, end, seqlen_q, seqlen_k, aux):
    shift = seqlen_k - seqlen_q
    size = tl.load(aux[0] + b)
    return tl.where(first < size, 0, first - shift), tl.where(end <= size, 0, end - 1 - shift), seqlen_q, seqlen_q


def prefix(lengths, device="cpu"):
    """Return a Mask: causal, but the first lengths[b] keys of batch b are seen by all, also by each other."""
    return Mask(prefix_seen, Bounds(prefix_keys, prefix_queries), aux=[_int32(lengths, device)])


# --- documents side by side in one sequence --------------------------------------------------------------------------


@triton.jit
def document_seen(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See the keys from where one's document starts, aux[0], to where it ends, aux[1]."""
    row = b * seqlen_q + i
    return (j >= tl.load(aux[0] + row)) & (j < tl.load(aux[1] + row))


@triton.jit
def document_range(b, h, first, end, seqlen_q, seqlen_k, aux):
    """Serve keys and queries alike: a document sees itself."""
    row = b * seqlen_q
    return (
        tl.load(aux[0] + row + first),
        tl.load(aux[0] + row + end - 1),
        tl.load(aux[1] + row + first),
        tl.load(aux[1] + row + end - 1),
    )


def documents(lengths, device="cpu"):
    """Return a Mask: a position sees its own document only, for as many queries as keys.

    Args:
        lengths: for each batch the lengths of its documents, which stand side by side; each adds up to the seqlen.
    """
    starts, ends = [], []
    for sizes in lengths:
        sizes = torch.tensor(sizes)
        end = sizes.cumsum(0)
        starts.append((end - sizes).repeat_interleave(sizes))
        ends.append(end.repeat_interleave(sizes))
    aux = [_int32(torch.stack(x), device) for x in (starts, ends)]
    return Mask(document_seen, Bounds(document_range, document_range), aux=aux)


# --- every other key: no bounds --------------------------------------------------------------------------------------


@triton.jit
def dilated_seen(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See every aux[0]-th key, counted from one's own place."""
    at = i + seqlen_k - seqlen_q
    return (at - j) % tl.load(aux[0]) == 0


def dilated(step, device="cpu"):
    """Return a Mask without bounds: each query sees every step-th key, counted from its place; meant with `causal`."""
    return Mask(dilated_seen, aux=[_int32([step], device)])


def _int32(x, device):
    return torch.as_tensor(x, dtype=torch.int32, device=device).contiguous()
