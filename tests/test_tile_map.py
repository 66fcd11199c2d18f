"""The map of tiles: what it says the kernels visit is what they load, and what it draws is what they test."""

import numpy as np
import pytest
import torch
from attention_cases import DEVICE
from test_forward import qkv

from flashlib import device, flash_attention, masks, tile_map, tiles
from flashlib.compiler import compile_many
from flashlib.meter import Meter

RULES = {
    "every key": {},
    "causal": {"causal": True},
    "window": {"window": (9, 4)},
    "left window, causal": {"window": (21, None), "causal": True},
    "window of everything": {"window": (500, 500)},
}
LENGTHS = [(64, 64), (41, 70), (70, 41), (1, 64)]


def expected(seqlen_q, seqlen_k, causal=False, window=(None, None)):
    at = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = np.arange(seqlen_k)[None, :]
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        seen &= j <= at
    if window[0] is not None:
        seen &= j >= at - window[0]
    if window[1] is not None:
        seen &= j <= at + window[1]
    return seen


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_pairs_are_those_of_the_definition(rule, lengths):
    assert np.array_equal(tile_map.seen(*lengths, **RULES[rule]), expected(*lengths, **RULES[rule]))


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rule", RULES)
def test_every_tile_is_called_what_it_is(rule, lengths, by_keys):
    pairs = expected(*lengths, **RULES[rule])
    kinds = tile_map.kinds(*lengths, 8, 16, by_keys=by_keys, **RULES[rule])
    for m, n in np.ndindex(kinds.shape):
        tile = pairs[8 * m : 8 * m + 8, 16 * n : 16 * n + 16]
        # A tile that reaches past the last key is tested even if all of its keys are seen.
        full = tile.all() and tile.shape[1] == 16
        assert kinds[m, n] == (tile_map.FULL if full else tile_map.PARTIAL if tile.any() else tile_map.EMPTY), (m, n)


def test_a_window_costs_its_own_length():
    counts = [np.sum(tile_map.kinds(n, n, 32, 32, window=(127, 0)) != tile_map.EMPTY) for n in (256, 512, 1024)]
    # 5 tiles of keys for each tile of queries, but for the first four.
    assert counts == [5 * n // 32 - 10 for n in (256, 512, 1024)]


@pytest.mark.skipif(not device.interpreting(), reason="bytes are counted in interpreted kernels")
@pytest.mark.parametrize("rule", ["causal", "window", "prefix"])
def test_the_forward_kernel_loads_the_visited_tiles(rule):
    rules = RULES.get(rule) or {"mask": masks.prefix([40], DEVICE)}
    q, k, v = qkv(1, 1, 160, 160, 16)
    plan = tiles.plan("forward", q, v, rule != "prefix", loaded=(k, v))
    kinds = tile_map.kinds(160, 160, plan.tile.block_m, plan.tile.block_n, **rules)
    with Meter() as meter, torch.no_grad():
        flash_attention(q, k, v, **rules)
    columns = np.minimum(plan.tile.block_n, 160 - plan.tile.block_n * np.arange(kinds.shape[1]))
    assert meter.loads["k"] == ((kinds != tile_map.EMPTY) * columns).sum() * 16 * k.element_size()


def test_broken_promises_are_none_without_a_mask():
    assert not tile_map.broken(41, 70, 8, 16, causal=True).any()
    assert tile_map.broken(41, 70, 8, 16, causal=True).shape == (6, 5)


def test_drawing_shows_each_kind():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots()
    kinds = tile_map.kinds(20, 20, 8, 8, causal=True)
    tile_map.draw(ax, tile_map.seen(20, 20, causal=True), kinds, 8, 8)
    image = ax.images[0].get_array()
    assert len(ax.patches) == kinds.size
    assert sum(patch.get_hatch() is not None for patch in ax.patches) == (kinds == tile_map.PARTIAL).sum()
    # Full, partial and seen, partial and hidden, empty.
    assert len(np.unique(np.asarray(image).reshape(-1, 3), axis=0)) == 4
    plt.close(fig)


def test_the_map_compiles_for_a_gpu():
    """On a GPU the map is made there: its kernels must be more than Python."""
    numbers = dict.fromkeys(("first_b", "first_h", "seqlen_q", "seqlen_k", "left"), "i32")
    jobs = []
    for name, extra in (
        ("ranges", {"BOUND": "prefix_keys", "BY_KEYS": False, "BLOCK_M": 64, "BLOCK_N": 64}),
        ("ranges", {"BOUND": "prefix_queries", "BY_KEYS": True, "BLOCK_M": 64, "BLOCK_N": 64}),
        ("seen", {"BLOCK": 64}),
    ):
        extra |= {"BOUND": f"flashlib.masks:{extra['BOUND']}"} if "BOUND" in extra else {}
        out = {"ranges": {"ranges_ptr": "*i32"}, "seen": {"seen_ptr": "*i8"}}[name]
        jobs.append(
            {
                "kernel": f"flashlib.tile_map:_{name}_kernel",
                "signature": out | numbers | {"aux": ["*i32"]},
                "constexprs": {"right": None, "CAUSAL": True, "MASK": "flashlib.masks:prefix_seen", **extra},
                "capability": 90,
            }
        )
    assert all(compiled.ptx for compiled in compile_many(jobs))
