"""Random numbers that need no memory: whether a weight is dropped is computed from where it stands.

Philox turns a key and a counter into four random numbers and keeps no state. The key and half of the counter come from
the seed, the offset and the head, the other half from the row and the column: so any kernel, with tiles of any size, in
any order, finds the same decision for the same weight, and the backward replays what the forward dropped.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3 (Philox-4x32-10),
https://doi.org/10.1145/2063384.2063405
"""

import numpy as np
import torch

from flashlib.device import tl, triton

ROUNDS = 10
# The two multipliers, and what the two halves of the key grow by in each round (the paper's table 2 and section 3.3).
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_ROUNDS = tl.constexpr(ROUNDS)
_MULTIPLIER_0 = tl.constexpr(MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(MULTIPLIERS[1])
_KEY_STEP_0 = tl.constexpr(KEY_STEPS[0])
_KEY_STEP_1 = tl.constexpr(KEY_STEPS[1])


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return four tiles of 32 random bits, int32, for counters c0 … c3 and the key k0, k1, 32-bit integers."""
    c0 = c0.to(tl.uint32, bitcast=True)
    c1 = c1.to(tl.uint32, bitcast=True)
    c2 = c2.to(tl.uint32, bitcast=True)
    c3 = c3.to(tl.uint32, bitcast=True)
    k0 = k0.to(tl.uint32, bitcast=True)
    k1 = k1.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(_ROUNDS):
        # Of each product of 64 bits the high half is mixed and the low half handed on.
        high_0 = tl.umulhi(c0, _MULTIPLIER_0)
        high_1 = tl.umulhi(c2, _MULTIPLIER_1)
        low_0 = tl.mul(c0, _MULTIPLIER_0, sanitize_overflow=False)
        low_1 = tl.mul(c2, _MULTIPLIER_1, sanitize_overflow=False)
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = tl.add(k0, _KEY_STEP_0, sanitize_overflow=False)
        k1 = tl.add(k1, _KEY_STEP_1, sanitize_overflow=False)
    return (
        c0.to(tl.int32, bitcast=True), c1.to(tl.int32, bitcast=True), c2.to(tl.int32, bitcast=True),
        c3.to(tl.int32, bitcast=True),
    )  # fmt: skip


@triton.jit
def keep_tile(seed, offset, b, h, i, j, threshold):
    """Return which weights of a tile are kept: a boolean tile of the shape that i and j broadcast to.

    seed, offset: int64 numbers. b, h: int32 numbers. i: rows, j: keys, int32, [rows, 1] and [1, keys] or transposed.
    threshold: as `threshold_of` gives it.
    """
    # One call for the head. Philox is a bijection of the counter: no two (offset, b, h) give the same four numbers.
    c2, c3, k0, k1 = philox(
        offset.to(tl.int32), (offset >> 32).to(tl.int32), b.to(tl.int32), h.to(tl.int32),
        seed.to(tl.int32), (seed >> 32).to(tl.int32),
    )  # fmt: skip
    # One call for four weights, 8 rows and 8 keys apart. A thread holds all four in its part of a product of matrices,
    # transposed or not (PTX ISA, the accumulators of mma.m16n8 and wgmma): so the compiler keeps one call of the four.
    zero = (i & 0) + (j & 0)
    r0, r1, r2, r3 = philox((i & ~8) + zero, (j & ~8) + zero, c2 + zero, c3 + zero, k0, k1)
    r = tl.where((i & 8) == 0, tl.where((j & 8) == 0, r0, r1), tl.where((j & 8) == 0, r2, r3))
    return r >= threshold


@triton.jit
def thinned(x, dropout, b, h, i, j):
    """Return a tile, 0 where it is dropped, else scaled up; dropout: (seed and offset, threshold, scale), or None."""
    if dropout is not None:
        keep = keep_tile(tl.load(dropout[0]), tl.load(dropout[0] + 1), b, h, i, j, dropout[1])
        x = tl.where(keep, x * dropout[2], 0.0)
    return x


def threshold_of(dropout_p):
    """Return the int32 that a random int32 reaches with probability 1 - dropout_p, rounded to 2**-32.

    Args:
        dropout_p: a number from 0 up to, but not, 1.
    """
    return min(round(dropout_p * 2**32), 2**32 - 1) - 2**31


def seed_for(dropout_seed, device):
    """Return seed and offset as a tensor on the device, drawn from PyTorch's generator of that device if None is given.

    Args:
        dropout_seed: int64 tensor (2,) on `device`, or None: then `torch.manual_seed` repeats what is drawn, two calls
            differ, and so do two replays of a CUDA graph.
        device: torch.device of q.

    Returns:
        int64 tensor (2,), detached.

    Raises:
        ValueError: dropout_seed is no such tensor.
    """
    if dropout_seed is None:
        return torch.empty(2, dtype=torch.int64, device=device).random_()
    if not isinstance(dropout_seed, torch.Tensor):
        raise ValueError(f"dropout_seed must be an int64 tensor of two numbers or None, got {dropout_seed!r}")
    if dropout_seed.dtype != torch.int64:
        raise ValueError(f"dropout_seed must have dtype torch.int64, got {dropout_seed.dtype}")
    if tuple(dropout_seed.shape) != (2,):
        raise ValueError(f"dropout_seed must have shape (2,), seed and offset, got {tuple(dropout_seed.shape)}")
    if dropout_seed.device != torch.device(device):
        raise ValueError(f"dropout_seed must be on the device of q, {device}, got {dropout_seed.device}")
    return dropout_seed.contiguous()


def philox_numpy(counter, key):
    """Compute Philox-4x32-10 in NumPy.

    Args:
        counter: four integers or arrays of integers from 0 to 2**32 - 1, which broadcast with one another.
        key: two of the same.

    Returns:
        list of four uint32 arrays.
    """
    x = [np.asarray(c, dtype=np.uint64) for c in counter]
    low = np.uint64(0xFFFFFFFF)
    for step in range(ROUNDS):
        keys = [
            (np.asarray(k, np.uint64) + np.uint64(step * w & 0xFFFFFFFF)) & low
            for k, w in zip(key, KEY_STEPS, strict=True)
        ]
        a, b = (c * np.uint64(m) for c, m in zip(x[::2], MULTIPLIERS, strict=True))
        x = [(b >> np.uint64(32)) ^ x[1] ^ keys[0], b & low, (a >> np.uint64(32)) ^ x[3] ^ keys[1], a & low]
    return [np.asarray(c).astype(np.uint32) for c in np.broadcast_arrays(*x)]


def keep_mask(seed, offset, dropout_p, batch, nheads, seqlen_q, seqlen_k):
    """Compute in NumPy which weights are kept: what `keep_tile` decides, for the oracle.

    Args:
        seed, offset: integers of 64 bits, signed or not.
        dropout_p: share that is dropped, in [0, 1).
        batch, nheads, seqlen_q, seqlen_k: sizes; an entry does not depend on them.

    Returns:
        boolean array (batch, nheads, seqlen_q, seqlen_k), True where a weight is kept.
    """
    halves = [(int(x) >> shift) & 0xFFFFFFFF for x in (seed, offset) for shift in (0, 32)]
    b, h, i, j = np.ogrid[:batch, :nheads, :seqlen_q, :seqlen_k]
    head = philox_numpy((*halves[2:], b, h), halves[:2])
    group = philox_numpy((i - (i & 8), j - (j & 8), head[0], head[1]), head[2:])
    which = ((i >> 3) & 1) * 2 + ((j >> 3) & 1)
    r = np.choose(np.broadcast_to(which, group[0].shape), group)
    # The same 32 bits as a signed number.
    return r.view(np.int32) >= np.int32(threshold_of(dropout_p))
