"""The forward kernel and the public op: values, edge rows, layouts, errors."""

import math

import pytest
import torch
from attention_cases import DEVICE, ON_GPU, check, error, tensor

from flashlib import reference, tiles
from flashlib.attention import flash_attention

DTYPES = [torch.float16, torch.bfloat16, torch.float32] + ([] if ON_GPU else [torch.float64])


def qkv(batch, nheads, seqlen_q, seqlen_k, head_dim, head_dim_v=None, dtype=torch.float32, layouts=("contiguous",) * 3):
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v))
    return [
        tensor((batch, nheads, *size), dtype, layout, seed)
        for seed, (size, layout) in enumerate(zip(sizes, layouts, strict=True))
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 100, 100, 64), (2, 2, 33, 97, 40, 24), (1, 2, 97, 33, 16, 32)], ids=str)
def test_matches_the_oracle(shape, causal, dtype):
    check(*qkv(*shape, dtype=dtype), causal=causal, backward=False)


# Many heads, so that chance does not decide.
FEW_ROWS = [((16, 4, 1, 65, 32), False, torch.float16), ((32, 2, 5, 3, 16), True, torch.float32)]


@pytest.mark.parametrize(("shape", "causal", "dtype"), FEW_ROWS, ids=str)
def test_a_few_rows(shape, causal, dtype):
    check(*qkv(*shape, dtype=dtype), causal=causal, backward=False)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5])
def test_scale_is_honoured(scale):
    check(*qkv(1, 2, 40, 70, 40), causal=True, scale=scale, backward=False)


def test_large_scores_do_not_overflow():
    q, k, v = (torch.full((1, 1, 20, 64), 200.0, dtype=torch.float16, device=DEVICE) for _ in range(3))
    # p is 1 but for the rounding of s·scale, which is of size 2e5 here, and then p is rounded to float16.
    assert (flash_attention(q, k, v) - 200).abs().max() <= 0.25
    for sign in (1, -1):
        out, lse = flash_attention(sign * q.float(), k.float(), v.float(), return_lse=True)
        torch.testing.assert_close(out, torch.full_like(out, 200))
        torch.testing.assert_close(lse, torch.full_like(lse, sign * 200 * 200 * 8 + math.log(20)))


LAYOUTS = ["contiguous", "transposed", "sliced", "strided", "turned", "expanded"]


@pytest.mark.parametrize("layouts", [LAYOUTS[i:] + LAYOUTS[:i] for i in range(6)], ids=lambda x: "-".join(x[:3]))
def test_any_layout(layouts):
    check(*qkv(1, 2, 37, 45, 24, layouts=layouts[:3]), causal=True, backward=False)


@pytest.mark.parametrize("views", range(1, 8))
def test_a_view_gives_the_same_bits_as_its_copy(views):
    inputs = qkv(1, 2, 33, 33, 64, layouts=["transposed" if views >> i & 1 else "contiguous" for i in range(3)])
    copies = [x.contiguous() for x in inputs]
    assert torch.equal(flash_attention(*inputs, causal=True), flash_attention(*copies, causal=True))


def test_wide_offsets_give_the_same_bits(monkeypatch):
    inputs = qkv(1, 2, 40, 50, 24)
    narrow = flash_attention(*inputs, causal=True)
    monkeypatch.setattr(tiles, "wide", lambda strides: True)
    tiles._constants.cache_clear()
    try:
        assert torch.equal(narrow, flash_attention(*inputs, causal=True))
    finally:
        tiles._constants.cache_clear()


def test_descriptors_give_the_same_bits_as_pointers(monkeypatch):
    q, k, v = qkv(1, 2, 50, 70, 40, 16, layouts=("contiguous", "sliced", "transposed"))
    pointers = flash_attention(q, k, v, causal=True)
    monkeypatch.setattr(tiles, "DESCRIPTOR_FROM", 0)
    if not ON_GPU:
        monkeypatch.setattr(tiles, "describable", lambda x, architecture: True)
    assert torch.equal(pointers, flash_attention(q, k, v, causal=True))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5, 16), (2, 0, 5, 5, 16), (2, 2, 0, 5, 16), (2, 2, 4, 0, 16)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_inputs(shape, causal):
    q, k, v = qkv(*shape)
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_two_halves_merge_by_their_lse():
    q, k, v = qkv(1, 2, 20, 64, 32)
    whole = flash_attention(q, k, v)
    parts = [flash_attention(q, k[:, :, s], v[:, :, s], return_lse=True) for s in (slice(0, 40), slice(40, 64))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]
    torch.testing.assert_close(sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), whole)


def test_nan_in_a_masked_key_never_shows():
    q, k, v = qkv(1, 1, 40, 40, 16)
    want = flash_attention(q, k, v, causal=True)
    k[:, :, 30:] = math.nan
    assert torch.equal(flash_attention(q, k, v, causal=True)[:, :, :30], want[:, :, :30])


def test_rows_do_not_depend_on_the_batch():
    q, k, v = qkv(3, 2, 40, 40, 32)
    alone = flash_attention(q[1:2], k[1:2], v[1:2], causal=True)
    assert torch.equal(flash_attention(q, k, v, causal=True)[1:2], alone)


def test_every_part_of_head_dim_counts():
    q, k, v = qkv(1, 1, 32, 32, 128)
    changed = q.clone()
    changed[..., 64:] = 0
    assert error(flash_attention(q, k, v), flash_attention(changed, k, v)) > 0.01


def test_causal_is_aligned_at_the_bottom_right():
    q, k, v = qkv(1, 1, 2, 5, 16)
    out = flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(out[0, 0, 0], reference.naive_attention(q[0, 0, :1], k[0, 0, :4], v[0, 0, :4])[0])


def test_out_has_the_order_of_axes_of_q():
    q, k, v = qkv(2, 3, 8, 8, 16, layouts=("transposed",) * 3)
    assert flash_attention(q, k, v).transpose(1, 2).is_contiguous()


def test_autocast_casts():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 16, 16, 16))
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = flash_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert {g.dtype for g in torch.autograd.grad(out.sum(), (q, k, v))} == {torch.float32}


def _wrong(**changes):
    x = {name: torch.zeros(1, 2, 8, 16, device=DEVICE) for name in "qkv"}
    return {**x, **{name: change(x[name]) if callable(change) else change for name, change in changes.items()}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_wrong(q=lambda q: q.cpu().numpy()), "q must be a tensor, got ndarray"),
        (_wrong(q=lambda q: q[0]), r"q must have 4 axes .* got shape \(2, 8, 16\)"),
        (_wrong(q=lambda q: q.int()), "q must have dtype float16, .* got torch.int32"),
        (_wrong(k=lambda k: k.half()), "k must have the dtype of q, torch.float32, got torch.float16"),
        (_wrong(v=lambda v: v.to("meta")), "v must be on the device of q, .* got meta"),
        (_wrong(k=lambda k: k.repeat(2, 1, 1, 1)), "k must have the batch of q, 1, got 2"),
        (_wrong(k=lambda k: k[:, [0, 1, 1]]), "k must have a number of heads that divides that of q, 2, got 3"),
        (_wrong(k=lambda k: k[:, :0]), "k must have a number of heads that divides that of q, 2, got 0"),
        (_wrong(k=lambda k: k[:, :1]), "v must have the number of heads of k, 1, got 2"),
        (_wrong(q=lambda q: q[..., :8], k=lambda k: k[..., :8]), "q must have a head_dim .* from 16 to 256, got 8"),
        (_wrong(v=lambda v: v.repeat(1, 1, 1, 17)), "v must have a head_dim .* from 16 to 256, got 272"),
        (_wrong(k=lambda k: k.repeat(1, 1, 1, 2)), "k must have the head_dim of q, 16, got 32"),
        (_wrong(v=lambda v: v[:, :, :4]), "v must have the seqlen of k, 8, got 4"),
        (_wrong(causal=1), "causal must be True or False, got 1"),
        (_wrong(scale=math.nan), "scale must be a finite number or None, got nan"),
        (_wrong(mask=torch.ones(8, 8)), "mask must be a flashlib.mods.Mask or None, got Tensor"),
        (_wrong(score="x"), "score must be a flashlib.mods.Score or None, got str"),
    ],
)
def test_errors_name_argument_rule_and_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(**arguments)
