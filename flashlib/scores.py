"""Ready-made changes of the scores, each of three lines with its derivative: made to be read and changed.

A score sees s = scale·qk of a tile and the positions i, j; its derivative gets the gradient of the new score and the
*old* score. A plain addition has the derivative 1.

Source: ALiBi, https://arxiv.org/abs/2108.12409 (section 3); the softcap of Gemma 2, https://arxiv.org/abs/2408.00118
(section 2); relative positions as in T5, https://arxiv.org/abs/1910.10683 (section 2.1), without its buckets.
"""

import torch

from flashlib.device import tl, triton
from flashlib.mods import Score, tanh


@triton.jit
def same(ds, s, b, h, i, j, aux):
    """Pass the gradient through: what was added to s does not depend on s."""
    return ds


@triton.jit
def alibi_score(s, b, h, i, j, aux):
    """Subtract the head's slope, aux[0][h], for each place between query and key; aux[1] is seqlen_k - seqlen_q."""
    away = tl.abs(i + tl.load(aux[1]) - j)
    return s - tl.load(aux[0] + h) * away


def alibi(slopes, shift=0):
    """Return a Score: s - slopes[h]·|i + shift - j|, with shift = seqlen_k - seqlen_q; `alibi_slopes=` as a hook."""
    slopes = slopes.float().contiguous()
    return Score(alibi_score, same, aux=[slopes, torch.tensor([shift], dtype=torch.int32, device=slopes.device)])


@triton.jit
def softcap_score(s, b, h, i, j, aux):
    """Keep s between -aux[0] and aux[0]."""
    cap = tl.load(aux[0])
    return cap * tanh(s / cap, True)


@triton.jit
def softcap_grad(ds, s, b, h, i, j, aux):
    """The derivative of cap·tanh(s/cap) is 1 - tanh²(s/cap): no factor cap is left."""
    t = tanh(s / tl.load(aux[0]), True)
    return ds * (1 - t * t)


def softcap(cap, device="cpu"):
    """Return a Score: cap·tanh(s / cap); `softcap=` as a hook."""
    return Score(softcap_score, softcap_grad, aux=[torch.tensor([cap], dtype=torch.float32, device=device)])


@triton.jit
def relative_score(s, b, h, i, j, aux):
    """Add the entry of aux[0][h] for the distance j - i, cut at ±aux[1]; a row of aux[0] has 2·aux[1] + 1 entries."""
    far = tl.load(aux[1])
    distance = tl.minimum(tl.maximum(j - i, -far), far)
    return s + tl.load(aux[0] + h * (2 * far + 1) + distance + far)


def relative(table):
    """Return a Score: s + table[h, j - i], distances cut at the table's ends; the table gets no gradient.

    Args:
        table: (nheads, 2·far + 1), the number for distance j - i = 0 in the middle; for as many queries as keys.
    """
    far = torch.tensor([table.shape[1] // 2], dtype=torch.int32, device=table.device)
    return Score(relative_score, same, aux=[table.float().contiguous(), far])
