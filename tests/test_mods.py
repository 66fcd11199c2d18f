"""Masks and scores as plug-ins: values and gradients against dense ones, bounds, keys, errors."""

import pytest
import torch
from attention_cases import DEVICE, check
from test_forward import qkv

from flashlib import mods
from flashlib.attention import flash_attention
from flashlib.device import tl, triton
from flashlib.mods import Bounds, Mask, Score

WINDOW = tl.constexpr(20)


@triton.jit
def window(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See the last WINDOW keys up to one's own place, and no later one."""
    at = i + seqlen_k - seqlen_q
    return (j <= at) & (j > at - WINDOW)


@triton.jit
def window_keys(b, h, first, end, seqlen_q, seqlen_k, aux):
    shift = seqlen_k - seqlen_q
    return first + shift - WINDOW + 1, end + shift - WINDOW, first + shift + 1, end + shift


@triton.jit
def window_queries(b, h, first, end, seqlen_q, seqlen_k, aux):
    shift = seqlen_k - seqlen_q
    return first - shift, end - 1 - shift, first - shift + WINDOW, end - 1 - shift + WINDOW


@triton.jit
def same_document(b, h, i, j, seqlen_q, seqlen_k, aux):
    return tl.load(aux[0] + b * seqlen_q + i) == tl.load(aux[1] + b * seqlen_k + j)


@triton.jit
def no_key_for_odd_rows(b, h, i, j, seqlen_q, seqlen_k, aux):
    return (i % 2 == 0) & (j >= 0)


@triton.jit
def slope(s, b, h, i, j, aux):
    return s - tl.load(aux[0] + h) * (i - j).to(tl.float32)


@triton.jit
def slope_grad(ds, s, b, h, i, j, aux):
    return ds


@triton.jit
def squash(s, b, h, i, j, aux):
    """s / (1 + |s|): bounded, and its derivative depends on s."""
    return s / (1 + tl.abs(s))


@triton.jit
def squash_grad(ds, s, b, h, i, j, aux):
    return ds / ((1 + tl.abs(s)) * (1 + tl.abs(s)))


def positions(seqlen_q, seqlen_k):
    return torch.arange(seqlen_q, device=DEVICE)[:, None], torch.arange(seqlen_k, device=DEVICE)[None, :]


def dense_window(seqlen_q, seqlen_k):
    i, j = positions(seqlen_q, seqlen_k)
    at = i + seqlen_k - seqlen_q
    return (j <= at) & (j > at - 20)


@pytest.mark.parametrize("bounds", [None, Bounds(window_keys, window_queries)], ids=["every-tile", "bounds"])
@pytest.mark.parametrize("lengths", [(90, 90), (50, 100), (100, 50)])
def test_window(bounds, lengths):
    check(*qkv(1, 1, *lengths, 16), mask=Mask(window, bounds), dense=dense_window(*lengths))


def test_bounds_change_no_bit():
    q, k, v = qkv(1, 2, 100, 130, 16)
    tested = flash_attention(q, k, v, mask=Mask(window))
    assert torch.equal(tested, flash_attention(q, k, v, mask=Mask(window, Bounds(window_keys, window_queries))))


def test_bounds_skip_tiles():
    q, k, v = qkv(1, 1, 512, 512, 16)
    v[:, :, :128] = float("nan")
    out = flash_attention(q, k, v, mask=Mask(window, Bounds(window_keys, window_queries)))
    assert out[:, :, 384:].isfinite().all()


def test_a_mask_and_causal_are_anded():
    documents = (torch.arange(90, device=DEVICE) // 25).int()[None].repeat(2, 1).contiguous()
    documents[1] = 0
    dense = (documents[:, :, None] == documents[:, None, :])[:, None]
    mask = Mask(same_document, aux=[documents, documents])
    check(*qkv(2, 2, 90, 90, 16), mask=mask, dense=dense)
    check(*qkv(2, 2, 90, 90, 16), mask=mask, dense=dense, causal=True)


def test_rows_that_a_mask_leaves_without_a_key():
    i, j = positions(40, 50)
    check(*qkv(1, 2, 40, 50, 16), mask=Mask(no_key_for_odd_rows), dense=(i % 2 == 0) & (j >= 0))


@pytest.mark.parametrize("causal", [False, True])
def test_a_score_that_reads_aux(causal):
    slopes = torch.tensor([0.1, 0.5], device=DEVICE)
    i, j = positions(70, 70)
    bias = -slopes[:, None, None] * (i - j).float()
    check(*qkv(1, 2, 70, 70, 16), causal=causal, score=Score(slope, slope_grad, aux=[slopes]), added=bias)


@pytest.mark.parametrize("causal", [False, True])
def test_a_score_with_a_gradient(causal):
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 50, 70, 16))
    dout = torch.randn(1, 2, 50, 16, device=DEVICE)
    out = flash_attention(q, k, v, causal=causal, score=Score(squash, squash_grad))
    got = torch.autograd.grad(out, (q, k, v), dout)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    s = exact[0] @ exact[1].transpose(-1, -2) / 4
    s = s / (1 + s.abs())
    if causal:
        i, j = positions(50, 70)
        s = s.masked_fill(j > i + 20, -torch.inf)
    want = torch.autograd.grad(torch.softmax(s, -1) @ exact[2], exact, dout.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-4)


def test_the_key_is_the_name_and_the_code():
    assert Mask(window).key == Mask(window).key
    assert Mask(window).key.startswith("window:")
    assert Mask(window).key != Mask(window, Bounds(window_keys, window_queries)).key
    assert Mask(window).key != Mask(no_key_for_odd_rows).key


def test_the_key_covers_constants(monkeypatch):
    before = Mask(window).key
    monkeypatch.setitem(globals(), "WINDOW", tl.constexpr(21))
    assert Mask(window).key != before


def test_hooks_in_a_compiled_graph():
    mask = Mask(window)
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 40, 40, 16))
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), flash_attention(q, k, v, mask=mask))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask(max), r"fn must be a @triton.jit function, got builtin_function_or_method"),
        (lambda: Mask(window, bounds=window_keys), r"bounds must be Bounds\(keys, queries\) or None, got"),
        (lambda: Mask(window, bounds=(window_keys, 3)), r"bounds.queries must be a @triton.jit function, got int"),
        (lambda: Mask(window, aux=[3]), "aux must hold tensors, got int"),
        (lambda: Score(slope, None), r"grad must be a @triton.jit function, got NoneType"),
        (lambda: Score(slope, slope_grad, [torch.zeros(2, requires_grad=True)]), "aux must hold tensors that do not"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_unknown_key_says_what_to_do():
    with pytest.raises(RuntimeError, match="make the Mask or Score before the call"):
        mods.registered("nobody:0", 3)
