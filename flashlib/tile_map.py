"""Where a mask's tiles are empty, partial or full: the map that the kernels follow, made by running their own code.

`key_range` and `query_range` decide in the kernels which tiles a program visits and which of them it tests. Here a
small kernel asks them for every tile and stores the answer, so a picture of a mask cannot differ from what is computed.

Source: ours.
"""

import numpy as np
import torch

from flashlib import device, style
from flashlib.device import tl, triton
from flashlib.mods import key_range, query_range, registered, visible
from flashlib.options import positions

EMPTY, PARTIAL, FULL = 0, 1, 2


@triton.jit
def _ranges_kernel(
    ranges_ptr, first_b, first_h, seqlen_q, seqlen_k, left, right, aux,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BOUND: tl.constexpr, BY_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = first_b + tl.program_id(1)
    h = first_h + tl.program_id(2)
    pid = tl.program_id(0)
    if BY_KEYS:
        first = pid * BLOCK_N
        lo, lo_full, hi_full, hi = query_range(
            b, h, first, first + BLOCK_N, seqlen_q, seqlen_k, left, right, aux, BLOCK_M, CAUSAL, MASK, BOUND
        )
    else:
        first = pid * BLOCK_M
        end = tl.minimum(first + BLOCK_M, seqlen_q)
        lo, lo_full, hi_full, hi = key_range(
            b, h, first, end, seqlen_q, seqlen_k, left, right, aux, BLOCK_N, CAUSAL, MASK, BOUND
        )
    tl.store(ranges_ptr + 4 * pid, lo)
    tl.store(ranges_ptr + 4 * pid + 1, lo_full)
    tl.store(ranges_ptr + 4 * pid + 2, hi_full)
    tl.store(ranges_ptr + 4 * pid + 3, hi)


@triton.jit
def _seen_kernel(
    seen_ptr, first_b, first_h, seqlen_q, seqlen_k, left, right, aux,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b = first_b + tl.program_id(2)
    h = first_h + tl.program_id(2)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    seen = visible(b, h, i, j, seqlen_q, seqlen_k, left, right, aux, CAUSAL, MASK)
    seen = tl.broadcast_to(seen, [BLOCK, BLOCK])
    tl.store(seen_ptr + i * seqlen_k + j, seen.to(tl.int8), mask=(i < seqlen_q) & (j < seqlen_k))


def ranges(seqlen_q, seqlen_k, block_m, block_n, *, causal=False, window=None, mask=None, by_keys=False, b=0, h=0):
    """Return, for each tile of queries, where the tiles of keys begin, begin to be full, cease to be full, and end.

    Args:
        seqlen_q, seqlen_k: lengths, positive.
        block_m, block_n: sides of a tile, queries and keys.
        causal, window, mask: as in `flash_attention`.
        by_keys: True asks for the tiles of queries of each tile of keys, as the dK/dV kernel does.
        b, h: batch and head that the mask is asked about.

    Returns:
        int64 array, (tiles of queries, 4) or (tiles of keys, 4): lo, lo_full, hi_full, hi, as the kernels compute them.
    """
    causal, window, aux, (fn, keys, queries) = _rules(seqlen_q, seqlen_k, causal, window, mask)
    tiles = -(-seqlen_k // block_n) if by_keys else -(-seqlen_q // block_m)
    found = torch.zeros(tiles, 4, dtype=torch.int32, device=device.kernel_device())
    _ranges_kernel[(tiles, 1, 1)](
        found, b, h, seqlen_q, seqlen_k, *window, aux,
        CAUSAL=causal, MASK=fn, BOUND=queries if by_keys else keys, BY_KEYS=by_keys, BLOCK_M=block_m, BLOCK_N=block_n,
    )  # fmt: skip
    return found.cpu().numpy().astype(np.int64)


def kinds(seqlen_q, seqlen_k, block_m, block_n, *, by_keys=False, **rules):
    """Return what the kernels do with each tile: EMPTY, not visited; PARTIAL, tested; FULL, taken without a test.

    Args:
        as in `ranges`.

    Returns:
        int64 array, (tiles of queries, tiles of keys), for either walk.
    """
    shape = -(-seqlen_q // block_m), -(-seqlen_k // block_n)
    found = np.full(shape[::-1] if by_keys else shape, EMPTY)
    # The walk goes along the keys, or, in dK/dV, along the queries.
    block, length = (block_m, seqlen_q) if by_keys else (block_n, seqlen_k)
    for row, (lo, lo_full, hi_full, hi) in zip(
        found, ranges(seqlen_q, seqlen_k, block_m, block_n, by_keys=by_keys, **rules), strict=True
    ):
        for first in range(lo, min(hi, length), block):
            row[first // block] = FULL if lo_full <= first < hi_full else PARTIAL
    return found.T if by_keys else found


def seen(seqlen_q, seqlen_k, *, causal=False, window=None, mask=None, b=0, h=0):
    """Return which pairs count, by running the kernels' test on each of them.

    Args:
        as in `ranges`.

    Returns:
        bool array, (seqlen_q, seqlen_k).
    """
    causal, window, aux, (fn, _, _) = _rules(seqlen_q, seqlen_k, causal, window, mask)
    found = torch.zeros(seqlen_q, seqlen_k, dtype=torch.int8, device=device.kernel_device())
    grid = -(-seqlen_q // 64), -(-seqlen_k // 64), 1
    _seen_kernel[grid](found, b, h, seqlen_q, seqlen_k, *window, aux, CAUSAL=causal, MASK=fn, BLOCK=64)
    return found.cpu().numpy().astype(bool)


def broken(seqlen_q, seqlen_k, block_m, block_n, **rules):
    """Return which tiles break what the bounds of a mask promise.

    Args:
        as in `ranges`.

    Returns:
        bool array, (tiles of queries, tiles of keys): a tile that is not visited holds a pair that counts, or one that
        is not tested a pair that does not.
    """
    pairs = seen(seqlen_q, seqlen_k, **{key: value for key, value in rules.items() if key != "by_keys"})
    found = kinds(seqlen_q, seqlen_k, block_m, block_n, **rules)
    wrong = np.zeros(found.shape, bool)
    for m, n in np.ndindex(found.shape):
        tile = pairs[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
        wrong[m, n] = (found[m, n] == EMPTY and tile.any()) or (found[m, n] == FULL and not tile.all())
    return wrong


def draw(ax, pairs, tiles, block_m, block_n, at=0):
    """Draw a mask on matplotlib axes: pairs as cells, tiles as frames.

    Args:
        ax: matplotlib axes.
        pairs: what `seen` returns.
        tiles: what `kinds` returns. Full tiles are blue, partial ones orange and hatched, empty ones white.
        block_m, block_n: sides of a tile.
        at: the first query and the first key that are drawn, where several masks lie along a diagonal.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    colours = {EMPTY: style.TILE_EMPTY, PARTIAL: style.TILE_PARTIAL, FULL: style.TILE_FULL}
    seqlen_q, seqlen_k = pairs.shape
    by_pair = np.repeat(np.repeat(tiles, block_m, 0), block_n, 1)[:seqlen_q, :seqlen_k]
    image = np.array([to_rgb(colours[kind]) for kind in (EMPTY, PARTIAL, FULL)])[by_pair]
    # A pair that is visited and hidden: computed for nothing.
    image[(by_pair != EMPTY) & ~pairs] = to_rgb(style.PALE)
    ax.imshow(image, extent=(at, at + seqlen_k, at + seqlen_q, at), interpolation="none", aspect="equal")
    for m, row in enumerate(tiles):
        for n, kind in enumerate(row):
            size = min(block_n, seqlen_k - n * block_n), min(block_m, seqlen_q - m * block_m)
            look = {"fill": False, "edgecolor": style.GREY, "linewidth": 0.7}
            look["hatch"] = "////" if kind == PARTIAL else None
            ax.add_patch(Rectangle((at + n * block_n, at + m * block_m), *size, **look))
    ax.grid(visible=False)
    ax.set(xlabel="key", ylabel="query", xlim=(-0.2, at + seqlen_k + 0.2), ylim=(at + seqlen_q + 0.2, -0.2))


def _rules(seqlen_q, seqlen_k, causal, window, mask):
    """Return causal, window, aux and the mask's functions as the kernels get them."""
    left, right = window or (None, None)
    if causal:
        right = 0
    causal, window = positions(left, right, seqlen_q, seqlen_k)
    return causal, window, tuple(mask.aux) if mask else (), registered(mask.key if mask else "", 3)
