"""The drop-in against PyTorch's function: forward and gradients, over drawn shapes, masks and options."""

import math

import pytest
import torch
from attention_cases import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from flashlib import dropout, reference
from flashlib import scaled_dot_product_attention as ours

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


# Leading axes of query, key and value: none, one, equal, broadcast in several ways, grouped heads.
LEADING = [
    ((), (), ()),
    ((2,), (2,), (2,)),
    ((1, 2, 1), (1, 2, 1), (1, 2, 1)),
    ((1, 1), (1, 2), (2,)),
    ((), (2,), (1, 1)),
    ((1, 4), (1, 2), (1, 2)),
    ((1, 2), (1, 1), (1, 1)),
]


@settings(max_examples=14, deadline=None, derandomize=True)
@given(
    leading=st.sampled_from(LEADING),
    seqlen_q=st.integers(1, 20),
    seqlen_k=st.integers(1, 20),
    head_dims=st.sampled_from([(16, 16), (24, 16), (16, 32)]),
    kind=st.sampled_from(["none", "causal", "bool", "float", "empty row"]),
    spread=st.sampled_from(["full", "keys", "one head"]),
    scale=st.sampled_from([None, 0.3, -0.2]),
)
def test_fuzzed_against_pytorch(leading, seqlen_q, seqlen_k, head_dims, kind, spread, scale):
    q = randn(*leading[0], seqlen_q, head_dims[0], seed=seqlen_q)
    k = randn(*leading[1], seqlen_k, head_dims[0], seed=seqlen_k)
    v = randn(*leading[2], seqlen_k, head_dims[1], seed=3)
    # Grouped heads are not broadcast.
    grouped = leading in LEADING[-2:]
    heads = leading[0][-1:] if grouped else ()
    full = (*torch.broadcast_shapes(*(x[:-1] if grouped else x for x in leading)), *heads)
    shape = {"full": (*full, seqlen_q, seqlen_k), "keys": (1, seqlen_k), "one head": (seqlen_q, seqlen_k)}[spread]
    mask = None
    if kind not in ("none", "causal"):
        mask = randn(*shape, seed=4)
        if kind != "float":
            # One key that every row sees, but in the row that shall see none.
            mask = mask > 0
            mask[..., 0] = True
        if kind == "empty row":
            mask[..., -1, :] = False
    compare((q, k, v), mask, is_causal=kind == "causal", scale=scale, enable_gqa=grouped)


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
    k, v = (randn(2, 2, 9, 16, seed=s) for s in (1, 2))
    compare((randn(2, 4, 5, 16), k, v), is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("kind", ["causal", "grouped", "mask"])
def test_dropout_thins_the_weights_that_its_seed_says(kind):
    dropout_p, nheads_kv = 0.4, 1 if kind == "grouped" else 2
    # Two leading axes are folded into the batch that the seed counts in.
    leaves = [randn(2, 1, n, s, 16, seed=n + s).requires_grad_() for n, s in ((2, 9), (nheads_kv, 11), (nheads_kv, 11))]
    mask = randn(9, 11, seed=3).requires_grad_() if kind == "mask" else None
    torch.manual_seed(5)
    seed = dropout.seed_for(None, DEVICE).tolist()
    keep = torch.from_numpy(dropout.keep_mask(*seed, dropout_p, 2, 2, 9, 11)).to(DEVICE)
    torch.manual_seed(5)
    out = ours(*leaves, mask, dropout_p, is_causal=kind == "causal", enable_gqa=kind == "grouped")
    exact = [x.detach().double().flatten(0, 1).requires_grad_() for x in leaves]
    options = {"mask": torch.ones(9, 11, dtype=torch.bool, device=DEVICE).tril()} if kind == "causal" else {}
    if mask is not None:
        leaves, exact = [*leaves, mask], [*exact, mask.detach().double().requires_grad_()]
        options = {"bias": exact[3]}
    want = reference.attention(*exact[:3], dropout_p=dropout_p, keep=keep, **options)
    dout = randn(*want.shape, seed=9)
    got = out.flatten(0, 1), *torch.autograd.grad(out, leaves, dout.view(out.shape))
    for a, b in zip(got, (want, *torch.autograd.grad(want, exact, dout.double())), strict=True):
        assert (a.reshape(b.shape).double() - b).abs().max() <= 1e-5 * b.abs().max()


def test_finfo_min_hides_keys_from_large_scores():
    q, k, v = (randn(1, 2, s, 16, seed=n).requires_grad_() for n, s in enumerate((12, 20, 20)))
    mask = torch.where(randn(12, 20, seed=4) > 0, 0.0, torch.finfo(torch.float32).min)
    assert (mask == 0).any(1).all()
    mask[3] = -math.inf
    compare((q, k, v), mask)
    for factor in (1e3, -1e3):
        found = []
        for hidden in (mask, mask.masked_fill(mask < 0, -math.inf)):
            out = ours(factor * q, k, v, hidden)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert (out[:, :, 3] == 0).all()
        assert all(x.isfinite().all() for x in found[0])


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
