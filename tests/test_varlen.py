"""Packed sequences: the same bits as each sequence by itself, whatever lies beside, between and behind them."""

import math

import pytest
import torch
from attention_cases import DEVICE, ON_GPU, allowed, error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_mods import squash, squash_grad

from flashlib import reference
from flashlib.attention import flash_attention
from flashlib.device import tl, triton  # noqa: F401
from flashlib.dropout import keep_mask
from flashlib.mods import Mask, Score
from flashlib.varlen import flash_attention_varlen

EMPTY = [(5, 9), (0, 7), (40, 70), (1, 0), (33, 33)]


def packed(lengths, nheads=4, nheads_kv=2, head_dim=16, head_dim_v=24, dtype=torch.float32, behind=5, seed=0):
    """Return (q, k, v, cu_q, cu_k); `behind` rows of NaN follow the last sequence."""
    generator = torch.Generator().manual_seed(seed)
    places = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in range(2)]
    sizes = ((0, nheads, head_dim), (1, nheads_kv, head_dim), (1, nheads_kv, head_dim_v))
    tensors = []
    for i, heads, columns in sizes:
        total = int(places[i][-1])
        x = torch.full((total + behind, heads, columns), math.nan)
        x[:total] = torch.randn(total, heads, columns, generator=generator)
        tensors.append(x.to(DEVICE, dtype).requires_grad_())
    return *tensors, places[0].to(DEVICE), places[1].to(DEVICE)


def one(x, cu, b):
    """Return sequence b in the dense layout."""
    return x[cu[b] : cu[b + 1]].transpose(0, 1)[None]


def same(a, b, name):
    """Hold to the bit where kernels are interpreted; compiled, packed and dense code may fuse and round differently."""
    if ON_GPU:
        near = 1e-4 if a.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(a, b, rtol=near, atol=near, msg=lambda text: f"{name}: {text}")
    else:
        assert torch.equal(a, b), name


def compare(lengths, make=lambda b, lengths: {}, dtype=torch.float32, **shape):
    """Hold a packed call against a loop: out, lse, dq, dk, dv as `same` says, the rest to rounding.

    make(None, …) gives the options of the packed call, make(b, …) those of sequence b.
    """
    q, k, v, cu_q, cu_k = packed(lengths, dtype=dtype, **shape)
    longest = [max(pair[i] for pair in lengths) for i in range(2)]
    kw = make(None, lengths)
    shared = [x for x in kw.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    out, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, *longest, return_lse=True, **kw)
    dout = torch.randn_like(out)
    dout[cu_q[-1] :] = math.nan
    dlse = torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v, *shared), (dout, dlse))

    grads = [torch.zeros_like(x) for x in (q, k, v, *shared)]
    for b in range(len(lengths)):
        leaves = [one(x, cu, b).detach().requires_grad_() for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))]
        alone = flash_attention(*leaves, return_lse=True, **make(b, lengths))
        rows = slice(cu_q[b], cu_q[b + 1])
        same(alone[0][0].transpose(0, 1), out[rows], f"out of sequence {b}")
        same(alone[1][0], lse[:, rows], f"lse of sequence {b}")
        sent = one(dout, cu_q, b), dlse[None, :, rows]
        alone = torch.autograd.grad(alone, (*leaves, *shared), sent)
        for grad, x, cu in zip(grads, alone, (cu_q, cu_k, cu_k), strict=False):
            grad[cu[b] : cu[b + 1]] = x[0].transpose(0, 1)
        for grad, x in zip(grads[3:], alone[3:], strict=True):
            grad += x
    for name, a, b in zip("qkv", got, grads, strict=False):
        same(a, b, f"d{name}")
    for a, b in zip(got[3:], grads[3:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert (out[cu_q[-1] :] == 0).all()
    assert (lse[:, cu_q[-1] :] == -math.inf).all()


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


SLOPES, SINKS = drawn(5, 4).abs(), drawn(4).requires_grad_()
BIAS = drawn(5, 1, 40, 70).requires_grad_()


@triton.jit
def even_distance(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See every second key, counted from the end of one's own sequence."""
    return (i + seqlen_k - seqlen_q - j) % 2 == 0


FEATURES = {
    "plain": lambda b, lengths: {},
    "causal": lambda b, lengths: {"causal": True},
    "window and softcap": lambda b, lengths: {"window": (10, 3), "softcap": 2.0},
    "alibi": lambda b, lengths: {"alibi_slopes": SLOPES if b is None else SLOPES[b], "causal": True},
    "sinks": lambda b, lengths: {"sinks": SINKS, "causal": True},
    "bias": lambda b, lengths: {"bias": BIAS if b is None else BIAS[b : b + 1, :, : lengths[b][0], : lengths[b][1]]},
    "mask and score": lambda b, lengths: {"mask": Mask(even_distance), "score": Score(squash, squash_grad)},
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("feature", FEATURES)
def test_each_sequence_as_if_alone(feature):
    compare(EMPTY, FEATURES[feature])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype):
    compare(EMPTY[:3], FEATURES["causal"], dtype=dtype)


@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 3), (0, 0), (1, 5)],
        [(50, 34), (0, 33), (50, 33)],
        [(0, 0), (0, 0), (40, 40), (30, 30), (0, 0)],
        [(0, 5)],
        [(3, 0)],
        [(0, 0)],
        [],
    ],
    ids=str,
)
def test_empty_sequences(lengths):
    if lengths:
        compare(lengths, FEATURES["causal"], nheads=3, nheads_kv=1)
    q, k, v, cu_q, cu_k = packed(lengths)
    out = flash_attention_varlen(q, k, v, cu_q, cu_k, 50, 50)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_against_the_oracle():
    q, k, v, cu_q, cu_k = packed(EMPTY, behind=0)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, 40, 70, causal=True, return_lse=True)
    want, want_lse = reference.attention_varlen(*leaves, cu_q, cu_k, causal=True, return_lse=True)
    assert error(out, want) <= allowed(want.float(), want, torch.float32)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_neighbours_do_not_show():
    q, k, v, cu_q, cu_k = packed(EMPTY)
    out = flash_attention_varlen(q, k, v, cu_q, cu_k, 40, 70)
    with torch.no_grad():
        for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
            x[: cu[2]] = math.nan
            x[cu[4] :] = math.nan
    rows = slice(int(cu_q[2]), int(cu_q[3]))
    assert torch.equal(flash_attention_varlen(q, k, v, cu_q, cu_k, 40, 70)[rows], out[rows])


def test_dropout_of_each_sequence():
    q, k, v, cu_q, cu_k = packed(EMPTY, behind=0)
    seed = torch.tensor([3, 4], device=DEVICE)
    options = {"causal": True, "dropout_p": 0.3}
    out = flash_attention_varlen(q, k, v, cu_q, cu_k, 40, 70, dropout_seed=seed, **options)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keep = torch.from_numpy(keep_mask(3, 4, 0.3, 5, 4, 40, 70)).to(DEVICE)
    parts = []
    for b, (seqlen_q, seqlen_k) in enumerate(EMPTY):
        alone = [one(x, cu, b) for x, cu in zip(leaves, (cu_q, cu_k, cu_k), strict=True)]
        part = reference.attention(*alone, keep=keep[b : b + 1, :, :seqlen_q, :seqlen_k], **options)
        parts.append(part[0].transpose(0, 1))
    want = torch.cat(parts)
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    for a, b in zip(got, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


def test_any_strides():
    q, k, v, cu_q, cu_k = (x.detach() for x in packed(EMPTY, head_dim_v=16, nheads_kv=4))
    one_tensor = torch.zeros(q.shape[0] + k.shape[0], 3, 4, 16, device=DEVICE)
    views = [one_tensor[: x.shape[0], i] for i, x in enumerate((q, k, v))]
    for view, x in zip(views, (q, k, v), strict=True):
        view.copy_(x)
    got = flash_attention_varlen(*views, cu_q, cu_k, 40, 70)
    assert torch.equal(got, flash_attention_varlen(q, k, v, cu_q, cu_k, 40, 70))


def test_many_sequences():
    lengths = [(i % 4, (i + 1) % 3) for i in range(40)]
    q, k, v, cu_q, cu_k = (x.detach() for x in packed(lengths, nheads=1, nheads_kv=1, behind=0))
    want = reference.attention_varlen(q.double(), k.double(), v.double(), cu_q, cu_k)
    torch.testing.assert_close(flash_attention_varlen(q, k, v, cu_q, cu_k, 3, 2).double(), want, rtol=1e-5, atol=1e-5)


def test_compiled():
    q, k, v, cu_q, cu_k = packed(EMPTY, behind=0)

    def loss(q, k, v):
        return flash_attention_varlen(q, k, v, cu_q, cu_k, 40, 70, causal=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    got, want = (torch.autograd.grad(f(q, k, v), (q, k, v)) for f in (compiled, loss))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@settings(
    max_examples=200 if ON_GPU else 4,
    deadline=None,
    derandomize=not ON_GPU,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_fuzz(data):
    longest = 600 if ON_GPU else 60
    lengths = data.draw(st.lists(st.tuples(st.integers(0, longest), st.integers(0, longest)), min_size=1, max_size=6))
    names = ("plain", "causal", "window and softcap", "sinks", "mask and score")
    nheads_kv = data.draw(st.sampled_from([1, 2, 4]))
    feature, behind = data.draw(st.sampled_from(names)), data.draw(st.integers(0, 40))
    compare(lengths, FEATURES[feature], nheads_kv=nheads_kv, behind=behind)


def arguments(**changes):
    x = torch.zeros(10, 2, 16, device=DEVICE)
    cu = torch.tensor([0, 4, 10], dtype=torch.int32, device=DEVICE)
    names = {"q": x, "k": x, "v": x, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 6, "max_seqlen_k": 6}
    return names | changes


def cu(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)


BAD = [
    ({"q": torch.zeros(1, 10, 2, 16)}, "q must have 3 axes"),
    ({"q": [1.0]}, "q must be a tensor, got list"),
    ({"k": torch.zeros(10, 3, 16)}, "k must have a number of heads that divides that of q, 2, got 3"),
    ({"v": torch.zeros(9, 2, 16)}, "v must have the total of k, 10, got 9"),
    ({"k": torch.zeros(10, 2, 16).half()}, "k must have the dtype of q"),
    ({"cu_seqlens_q": [0, 10]}, "cu_seqlens_q must be an int32 tensor .* got list"),
    ({"cu_seqlens_q": cu(0, 4, 10, dtype=torch.int64)}, "cu_seqlens_q must be an int32 tensor .* got torch.int64"),
    ({"cu_seqlens_k": cu(0, 4, 7, 10)}, r"cu_seqlens_k must have the shape of cu_seqlens_q, \(3,\), got \(4,\)"),
    ({"cu_seqlens_k": torch.zeros(3, dtype=torch.int32, device="meta")}, "cu_seqlens_k must be on the device of q"),
    ({"max_seqlen_q": -1}, "max_seqlen_q must be an int of at least 0, got -1"),
    ({"max_seqlen_k": 2.0}, "max_seqlen_k must be an int of at least 0, got 2.0"),
    ({"window": (-1, 0)}, "window must have a left"),
    ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must have shape \(2,\) or \(2, 2\), got \(3,\)"),
    ({"bias": torch.ones(10, 10)}, r"bias must broadcast to \(2, 2, 6, 6\), got shape \(10, 10\)"),
]
UNSEEN = [
    ({"cu_seqlens_q": cu(0, 7, 4)}, "cu_seqlens_q must begin with 0 and not decrease"),
    ({"cu_seqlens_k": cu(1, 4, 10)}, "cu_seqlens_k must begin with 0 and not decrease"),
    ({"cu_seqlens_k": cu(0, 4, 11)}, "cu_seqlens_k must end at 10, the total of k, or before, got 11"),
    ({"max_seqlen_q": 5}, "max_seqlen_q must be at least the longest sequence, 6, got 5"),
]


@pytest.mark.parametrize(("changes", "message"), BAD + UNSEEN, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_errors(changes, message, monkeypatch):
    monkeypatch.setenv("FLASHLIB_CHECK", "1")
    changes = {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) and x.device.type != "meta" else x
        for name, x in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        flash_attention_varlen(**arguments(**changes))
