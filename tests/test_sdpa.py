"""The drop-in against PyTorch's function: forward and gradients, over drawn shapes, masks and options."""

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib.sdpa import scaled_dot_product_attention as ours

theirs = torch.nn.functional.scaled_dot_product_attention


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def compare(tensors, mask=None, **options):
    """Hold ours to PyTorch's in float64: at most twice the error of PyTorch's own in float32, plus rounding."""
    given = [*tensors] + ([mask] if mask is not None and mask.is_floating_point() else [])
    dout, results = None, []
    for function, dtype in ((ours, torch.float32), (theirs, torch.float32), (theirs, torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in given]
        attn_mask = leaves[3] if len(leaves) == 4 else mask
        out = function(*leaves[:3], attn_mask, **options)
        dout = randn(*out.shape, seed=9) if dout is None else dout
        results.append((out, *torch.autograd.grad(out, leaves, dout.to(dtype))))
    for got, plain, want in zip(*results, strict=True):
        assert got.shape == want.shape
        top = want.abs().max().item() if want.numel() else 0.0
        bound = 2 * (plain - want).abs().amax() + torch.finfo(torch.float32).eps * top + 1e-5 if want.numel() else 0
        assert ((got - want).abs() <= bound).all()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    leading=st.sampled_from([(), (3,), (2, 2), (2, 1, 2)]),
    seqlen_q=st.integers(1, 20),
    seqlen_k=st.integers(1, 20),
    head_dims=st.sampled_from([(16, 16), (24, 16), (16, 32)]),
    kind=st.sampled_from(["none", "causal", "bool", "float", "empty row"]),
    spread=st.sampled_from(["full", "keys", "one head"]),
    scale=st.sampled_from([None, 0.3, -0.2]),
)
def test_fuzzed_against_pytorch(leading, seqlen_q, seqlen_k, head_dims, kind, spread, scale):
    q, k = (randn(*leading, s, head_dims[0], seed=s) for s in (seqlen_q, seqlen_k))
    v = randn(*leading, seqlen_k, head_dims[1], seed=3)
    shape = {"full": (*leading, seqlen_q, seqlen_k), "keys": (1, seqlen_k), "one head": (seqlen_q, seqlen_k)}[spread]
    mask = None
    if kind not in ("none", "causal"):
        mask = randn(*shape, seed=4)
        if kind != "float":
            # One key that every row sees, but in the row that shall see none.
            mask = mask > 0
            mask[..., 0] = True
        if kind == "empty row":
            mask[..., -1, :] = False
    compare((q, k, v), mask, is_causal=kind == "causal", scale=scale)


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7)])
def test_causal_is_aligned_at_the_top_left(lengths):
    q, k, v = (randn(1, 1, s, 16, seed=s) for s in (lengths[0], lengths[1], lengths[1]))
    seen = torch.ones(*lengths, dtype=torch.bool, device=DEVICE).tril()
    out = ours(q, k, v, is_causal=True)
    assert torch.allclose(out, theirs(q, k, v, seen), atol=1e-5)
    assert torch.allclose(out[0, 0, 0], v[0, 0, 0], atol=1e-6)


def test_leading_axes_broadcast():
    compare((randn(2, 3, 5, 16), randn(1, 3, 7, 16, seed=1), randn(3, 7, 16, seed=2)))


def test_grouped_heads():
    for causal in (False, True):
        k, v = (randn(2, 2, 9, 16, seed=s) for s in (1, 2))
        compare((randn(2, 4, 5, 16), k, v), is_causal=causal, enable_gqa=True)


def test_a_row_without_a_key_is_zero():
    q, k, v = (randn(1, 2, 4, 16, seed=s).requires_grad_() for s in range(3))
    seen = torch.ones(4, 4, dtype=torch.bool, device=DEVICE)
    seen[2] = False
    out = ours(q, k, v, seen)
    assert (out[:, :, 2] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (grads[0][:, :, 2] == 0).all()
    assert all(g.isfinite().all() for g in grads)


def bad(**changed):
    x = randn(1, 2, 4, 16)
    return {"query": x, "key": x, "value": x} | changed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (bad(query=None), "query must be a tensor of at least 2 axes"),
        (bad(key=randn(16)), "key must be a tensor of at least 2 axes"),
        (bad(key=randn(1, 3, 4, 16)), "leading axes of query, key and value must broadcast"),
        (bad(query=randn(1, 3, 4, 16), enable_gqa=True), "heads that divides query's"),
        (bad(attn_mask=1.0), "attn_mask must be a tensor"),
        (bad(attn_mask=torch.ones(4, 4).double()), "attn_mask must have dtype bool or query's"),
        (bad(attn_mask=torch.ones(3, 4)), "attn_mask must broadcast"),
        (bad(query=randn(1, 2, 4, 12), key=randn(1, 2, 4, 12)), "multiple of 8"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ours(**arguments)


def test_mask_and_causal_together_are_refused():
    # PyTorch's documentation says that it refuses too; of 2.13's kernels, the CPU's flash takes both.
    with pytest.raises(RuntimeError, match="attn_mask must be None where is_causal is True"):
        ours(**bad(attn_mask=torch.ones(4, 4, dtype=torch.bool, device=DEVICE), is_causal=True))
