"""Each step of chapter 08 against the oracle on what it can do, and the last against the library's kernel."""

import math

import pytest
import torch
from attention_cases import DEVICE, ON_GPU, allowed, error, plain_attention, seen_by, tensor

from flashlib import forward_steps, reference, tiles
from flashlib.attention import flash_attention
from flashlib.forward_steps import STEPS, has
from flashlib.show import MAX_LINES, source_of

ALL = list(STEPS)
LOOPS = ALL[1:]
RAGGED = [step for step in ALL if has(step, "tail")]


def inputs(seqlen_q, seqlen_k, head_dim=32, dtype=torch.float32, layouts=("contiguous", "transposed", "sliced")):
    return [
        tensor((2, 2, seqlen, head_dim), dtype, layout, seed)
        for seed, (seqlen, layout) in enumerate(zip((seqlen_q, seqlen_k, seqlen_k), layouts, strict=True))
    ]


def check(step, seqlen_q, seqlen_k, causal=False, scale=None, dtype=torch.float32, **options):
    q, k, v = inputs(seqlen_q, seqlen_k, dtype=dtype)
    result = forward_steps.forward(
        q, k, v, step=step, causal=causal, scale=scale, return_lse=has(step, "lse"), **options
    )
    want = reference.attention(q.double(), k.double(), v.double(), causal=causal, scale=scale, return_lse=True)
    seen = seen_by(seqlen_q, seqlen_k, causal)
    plain = plain_attention(q, k, v, seen, 32**-0.5 if scale is None else scale)
    result = result if has(step, "lse") else (result,)
    some = seen.any(-1)
    for got, exact, near in zip(result, want, plain, strict=False):
        assert error(got[:, :, some], exact[:, :, some]) <= allowed(near[:, :, some], exact[:, :, some], dtype)
    assert (result[0][:, :, ~some] == 0).all()
    if has(step, "lse"):
        assert (result[1][:, :, ~some] == -math.inf).all()


@pytest.mark.parametrize("step", ALL)
def test_one_tile(step):
    check(step, 16, 16, block_m=16, block_n=16)


@pytest.mark.parametrize("step", LOOPS)
def test_whole_tiles(step):
    check(step, 32, 48, dtype=torch.float16, block_m=16, block_n=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("step", ["two_loops", "skip"])
def test_dtypes(step, dtype):
    check(step, 32, 48, dtype=dtype, block_m=32, block_n=16)


@pytest.mark.parametrize("step", RAGGED)
def test_ragged_lengths(step):
    check(step, 21, 37, block_m=16, block_n=16)
    check(step, 33, 5, scale=1.0, block_m=32, block_n=16)


@pytest.mark.parametrize("lengths", [(21, 37), (37, 21), (1, 33)], ids=str)
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("step", ["causal", "skip"])
def test_causal(step, blocks, lengths):
    check(step, *lengths, causal=True, block_m=blocks[0], block_n=blocks[1])


@pytest.mark.parametrize("step", ["one_tile", "parallel"])
def test_before_the_tail_a_missing_key_counts_as_a_key_with_score_0(step):
    q, k, v = inputs(16, 10)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 6)) for x in (k, v)]
    got = forward_steps.forward(q, k, v, step=step, block_m=16, block_n=16)
    assert error(got, reference.attention(q.double(), *(x.double() for x in padded))) < 1e-5
    assert error(got, reference.attention(q.double(), k.double(), v.double())) > 0.01


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(50, 75), (75, 50)], ids=str)
def test_the_last_step_is_the_library(lengths, causal):
    q, k, v = inputs(*lengths)
    tile = tiles.tile_for("forward", tiles.architecture_of(q.device), 4, 32, causal)
    options = {"block_m": tile.block_m, "block_n": tile.block_n, "causal": causal, "return_lse": True}
    for ours, library in zip(
        forward_steps.forward(q, k, v, **options),
        flash_attention(q, k, v, causal=causal, return_lse=True),
        strict=True,
    ):
        if ON_GPU:
            torch.testing.assert_close(ours, library, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(ours, library)


def test_no_keys_and_no_queries():
    q, k, v = inputs(5, 0, layouts=("contiguous",) * 3)
    out, lse = forward_steps.forward(q, k, v, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert forward_steps.forward(q[:, :, :0], k, v).shape == (2, 2, 0, 32)


def test_a_step_fits_on_a_page():
    # The library's kernel is longer; the steps are what a reader reads.
    assert all(source_of(kernel).count("\n") < MAX_LINES for kernel in STEPS.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "sip"}, "step must be one of .* got 'sip'"),
        ({"step": "one_tile", "block_m": 16}, "block_m must be at least 20 in the step one_tile, got 16"),
        ({"step": "lse", "causal": True}, "causal must be False in the step lse"),
        ({"step": "tail", "return_lse": True}, "return_lse must be False in the step tail"),
        ({"scale": -1.0}, "scale must be positive in the step skip, got -1.0"),
        ({"scale": float("nan")}, "scale must be a finite number or None, got nan"),
        ({"block_n": 24}, "block_n must be a power of two of at least 16, got 24"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors(options, message):
    q, k, v = (torch.zeros(1, 1, 20, 16, device=DEVICE) for _ in range(3))
    with pytest.raises(ValueError, match=message):
        forward_steps.forward(q, k, v, **options)


def test_shapes_are_checked():
    x = torch.zeros(1, 1, 20, 16, device=DEVICE)
    for q, k, v in [
        (x, x.tolist(), x),
        (x, x, x[:, :, :5]),
        (x, x[..., :8], x),
        (x, x.half(), x),
        (x[..., :12],) * 3,
        (x[0],) * 3,
    ]:
        with pytest.raises(ValueError, match=" must "):
            forward_steps.forward(q, k, v)
