"""Dropout's random numbers: Philox's published answers, and decisions that depend on nothing but the weight's place."""

import math
import re

import numpy as np
import pytest
import torch
from attention_cases import check, tensor
from dropout_kernels import mask_kernel, philox_kernel
from kernel_jobs import job

from flashlib import device, dropout
from flashlib.attention import flash_attention
from flashlib.device import triton

DEVICE = device.kernel_device()
SEED = [-123456789012345678, 987654321987654321]
# Counter, key, result: Random123, tests/kat_vectors, philox4x32 10 (https://github.com/DEShawResearch/random123).
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def decided(seed, dropout_p, batch, nheads, seqlen_q, seqlen_k, block_m=32, block_n=32, transposed=False, place=DEVICE):
    """Return the kernel's decisions as a boolean array."""
    out = torch.full((batch, nheads, seqlen_q, seqlen_k), 7, dtype=torch.int8, device=place)
    programs = batch * nheads * triton.cdiv(seqlen_q, block_m) * triton.cdiv(seqlen_k, block_n)
    seed = torch.tensor(seed, dtype=torch.int64, device=place)
    mask_kernel[(programs,)](
        out, seed, dropout.threshold_of(dropout_p), nheads, seqlen_q, seqlen_k, block_m, block_n, transposed
    )
    out = out.cpu().numpy()
    assert set(np.unique(out)) <= {0, 1}
    return out.astype(bool)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_answers(counter, key, result):
    assert [int(x) for x in dropout.philox_numpy(counter, key)] == result
    tensors = [torch.from_numpy(np.array(x, dtype=np.uint32).view(np.int32)).to(DEVICE) for x in (counter, key)]
    out = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    philox_kernel[(1,)](*tensors, out)
    assert out.cpu().numpy().view(np.uint32).tolist() == result


@pytest.mark.parametrize(
    ("dropout_p", "tile"),
    [
        (0.5, (16, 32, False)), (0.5, (64, 16, False)), (0.5, (16, 64, True)), (0.5, (64, 64, True)),
        (0.0, (64, 64, False)), (1e-10, (64, 64, True)), (0.1, (64, 64, False)), (1 - 1e-12, (64, 64, True)),
    ],
)  # fmt: skip
def test_any_tile_decides_as_the_twin_in_numpy(dropout_p, tile):
    want = dropout.keep_mask(*SEED, dropout_p, 2, 2, 37, 70)
    assert np.array_equal(decided(SEED, dropout_p, 2, 2, 37, 70, *tile), want)


def test_a_decision_does_not_depend_on_the_sizes():
    small = dropout.keep_mask(*SEED, 0.4, 2, 3, 20, 33)
    assert np.array_equal(dropout.keep_mask(*SEED, 0.4, 3, 5, 50, 64)[:2, :3, :20, :33], small)


@pytest.mark.parametrize("changed", ["seed low", "seed high", "offset low", "offset high"])
def test_every_half_of_seed_and_offset_counts(changed):
    before, after = list(SEED), list(SEED)
    after[changed.startswith("offset")] ^= 1 << (40 if changed.endswith("high") else 3)
    a, b = (dropout.keep_mask(*seed, 0.5, 1, 2, 64, 64) for seed in (before, after))
    # Two independent masks of n entries agree in half of them, give or take 5 standard deviations.
    assert abs((a == b).mean() - 0.5) < 5 * 0.5 / math.sqrt(a.size)
    assert np.array_equal(decided(after, 0.5, 1, 2, 64, 64), b)


def test_heads_rows_and_keys_are_independent():
    keep = dropout.keep_mask(*SEED, 0.5, 3, 4, 64, 64)
    heads = keep.reshape(12, -1)
    bound = 5 * 0.5
    for a in range(12):
        for b in range(a):
            assert abs((heads[a] == heads[b]).mean() - 0.5) < bound / math.sqrt(heads.shape[1])
    # 1 and 8: neighbours of other calls, and the four that share one.
    for step in (1, 8):
        for x, y in [(keep[..., step:, :], keep[..., :-step, :]), (keep[..., step:], keep[..., :-step])]:
            assert abs((x == y).mean() - 0.5) < bound / math.sqrt(x.size)


@pytest.mark.parametrize("dropout_p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_kept_is_binomial(dropout_p):
    keep = dropout.keep_mask(*SEED, dropout_p, 2, 8, 128, 128)
    error = math.sqrt(dropout_p * (1 - dropout_p) / keep.size)
    assert abs(keep.mean() - (1 - dropout_p)) < 5 * error


def test_large_indices_do_not_collide():
    places = [0, 1, 8, 9, 2**16, 2**16 + 8, 2**31 - 9, 2**31 - 1]
    b, h, i, j = np.ix_(*[places] * 4)
    head = dropout.philox_numpy((5, 6, b, h), (7, 8))
    group = dropout.philox_numpy((i & ~8, j & ~8, head[0], head[1]), head[2:])
    which = np.broadcast_to((i >> 3 & 1) * 2 + (j >> 3 & 1), group[0].shape)
    # 4096 numbers of 32 bits: two alike happen by chance once in 500 such tests; with this key, never.
    assert len(np.unique(np.choose(which, group))) == len(places) ** 4


def test_threshold_fits_into_32_bits():
    assert dropout.threshold_of(0.0) == -(2**31)
    assert dropout.threshold_of(0.5) == 0
    assert dropout.threshold_of(1 - 2**-40) == 2**31 - 1


def test_manual_seed_repeats_and_two_calls_differ():
    torch.manual_seed(3)
    first, second = (dropout.seed_for(None, torch.device("cpu")) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(dropout.seed_for(None, torch.device("cpu")), first)
    assert not torch.equal(first, second)
    assert first.dtype == torch.int64
    assert first.shape == (2,)


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (7, "dropout_seed must be an int64 tensor"),
        (torch.zeros(2, dtype=torch.int32), "dropout_seed must have dtype torch.int64"),
        (torch.zeros(1, dtype=torch.int64), r"dropout_seed must have shape \(2,\)"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "dropout_seed must be on the device of q"),
    ],
)
def test_bad_seeds_are_named(seed, message):
    with pytest.raises(ValueError, match=message):
        dropout.seed_for(seed, torch.device("cpu"))


def multiplications(transposed, capability):
    """Return how many 32-bit products a thread computes for each of its 64 weights."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*fp16") | {"out_ptr": "*fp32", "seed_ptr": "*i64"}
    types |= {"threshold": "i32", "seqlen": "i32"}
    constants = {"DROPOUT": True, "TRANSPOSED": transposed, "BLOCK_M": 128, "BLOCK_N": 64, "HEAD_DIM": 64}
    compiled = device.compile_for(
        "tests.dropout_kernels:weighted_kernel", types, constants, capability, {"num_warps": 4}, divisible=["seqlen"]
    )
    assert compiled.stack_bytes in (0, None)
    return len(re.findall(r"\bmul\.(?:hi\.u32|lo\.s32|wide\.u32)", compiled.ptx)) / 64


@pytest.mark.skipif(not device._installed("triton"), reason="needs Triton")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.compile)])
def test_four_weights_share_one_call_in_both_orientations(transposed, capability):
    # A call has 40 products: 10 a weight if four share it, 40 if the compiler did not see that.
    assert multiplications(transposed, capability) < 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("nheads_kv", "seqlen_q", "seqlen_k", "options"),
    [(1, 33, 50, {}), (2, 50, 33, {"causal": True, "window": (20, 0)})],
)
def test_attention_is_exact_given_the_mask(dtype, nheads_kv, seqlen_q, seqlen_k, options):
    q, k, v = (
        tensor((1, heads, seqlen, 16), dtype, seed=seed)
        for seed, (heads, seqlen) in enumerate([(2, seqlen_q), (nheads_kv, seqlen_k), (nheads_kv, seqlen_k)])
    )
    check(q, k, v, dropout_p=0.4, dropout_seed=torch.tensor(SEED, device=DEVICE), **options)


def test_the_offset_is_part_of_the_seed():
    q, k, v = (tensor((1, 1, 20, 16), torch.float32, seed=seed) for seed in range(3))
    outs = [
        flash_attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor([SEED[0], offset], device=DEVICE))
        for offset in (5, 5, 6)
    ]
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.skipif(not device._installed("triton"), reason="needs Triton")
@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
def test_dropout_compiles_for_hopper(kernel):
    with_, without = device.compile_many(
        [job(kernel, "bf16", 128, True, 90, feature=feature) for feature in ("dropout", None)]
    )
    # Philox multiplies; attention without it has no product of 32 bits that is as wide.
    assert with_.ptx.count("mul.hi.u32") > without.ptx.count("mul.hi.u32") + 100
