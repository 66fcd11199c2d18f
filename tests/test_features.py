"""What models add: window, softcap, ALiBi, bias, sinks, grouped heads; alone, in pairs, fuzzed, and their edges."""

import itertools
import math

import pytest
import torch
from attention_cases import DEVICE, ON_GPU, check, tensor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_forward import qkv
from test_mods import same_document, slope, slope_grad

from flashlib import reference, tiles
from flashlib.attention import flash_attention
from flashlib.meter import Meter
from flashlib.mods import Mask, Score

NAMES = ("causal", "window", "softcap", "alibi", "bias", "sinks", "gqa", "mask", "score", "dropout")


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def options(names, q, seqlen_k):
    """Return what `check` needs to turn the named features on for queries q."""
    batch, nheads, seqlen_q, _ = q.shape
    found = {}
    if "causal" in names:
        found["causal"] = True
    if "window" in names:
        found["window"] = (17, 9)
    if "softcap" in names:
        found["softcap"] = 1.5
    if "alibi" in names:
        found["alibi_slopes"] = 0.3 * random(batch, nheads, seed=1).abs()
    if "bias" in names:
        found["bias"] = random(nheads, seqlen_q, seqlen_k, seed=2)
    if "sinks" in names:
        found["sinks"] = random(nheads, seed=3)
    if "dropout" in names:
        found["dropout_p"], found["dropout_seed"] = 0.3, torch.tensor([2**40 + 7, 5], device=DEVICE)
    if "mask" in names:
        documents = [(torch.arange(n, device=DEVICE) // 25).int().repeat(batch, 1) for n in (seqlen_q, seqlen_k)]
        found["mask"] = Mask(same_document, aux=documents)
        found["dense"] = (documents[0][:, :, None] == documents[1][:, None, :])[:, None]
    if "score" in names:
        i, j = torch.arange(seqlen_q, device=DEVICE)[:, None], torch.arange(seqlen_k, device=DEVICE)[None, :]
        slopes = 0.2 * random(nheads, seed=4)
        found["score"] = Score(slope, slope_grad, aux=[slopes])
        found["added"] = -slopes[:, None, None] * (i - j).float()
    return found


def inputs(names, batch, nheads, seqlen_q, seqlen_k, head_dim=16, **more):
    q, k, v = qkv(batch, nheads, seqlen_q, seqlen_k, head_dim, **more)
    return (q, k[:, : nheads // 2], v[:, : nheads // 2]) if "gqa" in names else (q, k, v)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("lengths", [(33, 70), (70, 33)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_alone(name, lengths):
    q, k, v = inputs([name], 2, 2, *lengths)
    check(q, k, v, **options([name], q, lengths[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_at_once(dtype):
    names = set(NAMES) - {"score"}
    q, k, v = inputs(names, 1, 4, 45, 40, dtype=dtype, layouts=("transposed", "sliced", "strided"))
    check(q, k, v, layout_dout="turned", **options(names, q, 40))


@pytest.mark.parametrize("pair", list(itertools.combinations(NAMES, 2)), ids="-".join)
def test_pairs(pair):
    q, k, v = inputs(pair, 1, 2, 33, 40)
    if set(pair) == {"bias", "score"}:
        # The oracle takes both as one bias; its gradient is that of either.
        found = options(pair, q, 40)
        scored = {"score": found["score"], "bias": found["bias"]}
        out = flash_attention(q, k, v, **scored)
        together = flash_attention(q, k, v, bias=found["bias"] + found["added"])
        torch.testing.assert_close(out, together, rtol=1e-5, atol=1e-5)
        return
    check(q, k, v, **options(pair, q, 40))


@pytest.mark.parametrize("shape", [(2, 2, 33, 40), (1, 2, 33, 40), (2, 1, 33, 1), (33, 40), (40,), (1, 33, 1), ()])
def test_a_bias_of_any_shape(shape):
    q, k, v = qkv(2, 2, 33, 40, 16)
    check(q, k, v, causal=True, bias=random(*shape), scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_bias_has_its_own_dtype(dtype):
    q, k, v = qkv(1, 2, 33, 40, 16)
    check(q, k, v, bias=random(2, 33, 1, dtype=dtype), sinks=random(2, dtype=dtype))


def test_an_expanded_bias_gets_the_sum():
    q, k, v = qkv(2, 2, 20, 30, 16)
    one = random(20, 30).requires_grad_()
    (got,) = torch.autograd.grad(flash_attention(q, k, v, bias=one.expand(2, 2, 20, 30)).square().sum(), one)
    (want,) = torch.autograd.grad(flash_attention(q, k, v, bias=one).square().sum(), one)
    torch.testing.assert_close(got, want)


def test_a_transposed_bias_gives_the_same_bits():
    q, k, v = qkv(1, 2, 20, 20, 16)
    bias = random(2, 20, 20)
    view = bias.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(flash_attention(q, k, v, bias=view), flash_attention(q, k, v, bias=bias))


@pytest.mark.parametrize("nheads_kv", [1, 2, 3, 6])
def test_every_group(nheads_kv):
    q, k, v = qkv(1, 6, 33, 45, 16)
    check(q, k[:, :nheads_kv], v[:, :nheads_kv], causal=True)


def test_grouped_heads_are_neighbours():
    q, k, v = qkv(1, 4, 20, 30, 16)
    few = k[:, :2], v[:, :2]
    many = [x.repeat_interleave(2, 1) for x in few]
    assert torch.equal(flash_attention(q, *few), flash_attention(q, *many))


def test_an_odd_length_with_grouped_heads():
    q, k, v = qkv(1, 4, 77, 77, 64)
    check(q, k[:, :2], v[:, :2], causal=True)


@pytest.mark.parametrize("extra", [{"bias": True}, {"alibi_slopes": True}], ids=str)
def test_a_tile_and_one_row_causal_with_a_bias(extra):
    q, k, v = qkv(1, 1, 129, 129, 16)
    values = {"bias": random(1, 129, 129), "alibi_slopes": random(1).abs()}
    check(q, k, v, causal=True, **{name: values[name] for name in extra})


# --- window ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [(0, 0), (0, None), (None, 0), (3, 40), (31, 1), (200, 2), (2, 10**12)], ids=str)
def test_windows(window):
    check(*qkv(1, 1, 70, 50, 16), window=window)
    check(*qkv(1, 1, 50, 100, 16), window=window)


@pytest.mark.parametrize("left", [95, 96, 10**12, None])
def test_a_window_over_everything_is_causal(left):
    q, k, v = qkv(1, 2, 96, 96, 16)
    want = flash_attention(q, k, v, causal=True)
    assert torch.equal(flash_attention(q, k, v, window=(left, 0)), want)
    assert torch.equal(flash_attention(q, k, v, window=(left, 5), causal=True), want)


def test_a_window_includes_both_ends():
    q, k, v = qkv(1, 1, 8, 8, 16)
    out = flash_attention(q, k, v, window=(2, 0))
    for key, changes in ((2, False), (3, True), (5, True), (6, False)):
        other = v.clone()
        other[:, :, key] = 1e4
        assert bool((flash_attention(q, k, other, window=(2, 0)) != out)[0, 0, 5].any()) == changes


def test_one_query_sees_the_last_keys():
    q, k, v = qkv(1, 1, 1, 250, 16)
    out = flash_attention(q, k, v, causal=True, window=(127, None))
    torch.testing.assert_close(out, flash_attention(q, k[:, :, -128:], v[:, :, -128:]))


def test_a_window_costs_what_it_shows():
    if ON_GPU:
        pytest.skip("tiles are counted in the interpreter")

    def visited(seqlen, backward, **kw):
        q, k, v = (torch.randn(1, 1, seqlen, 16, requires_grad=backward) for _ in range(3))
        with Meter() as meter:
            out = flash_attention(q, k, v, **kw)
            counts = [meter.loads["v"]]
            if backward:
                torch.autograd.grad(out, (q, k, v), torch.ones(1, 1, seqlen, 16))
        # Behind the forward's, each program of dK/dV loads its own tile of v once, and dQ those that it walks over;
        # of q each program of the forward and of dQ loads its own, and dK/dV those that it walks over.
        counts += [meter.loads["v"] - counts[0] - counts_of(v), meter.loads["q"] - 2 * counts_of(q)] if backward else []
        return [count // (32 * 16 * 4) for count in counts]

    def counts_of(x):
        return x.numel() * 4

    # Tiles are 32 by 32. left = 40 reaches from a tile's first row into two tiles before it: 3 a tile, 1 and 2 first.
    assert visited(192, True, window=(40, 0)) == [15, 15, 15]
    assert visited(384, False, window=(40, 0)) == [33]
    # left = 32 reaches into one tile.
    assert visited(192, False, window=(32, 0)) == [11]
    # A bit to both sides: the tile before, one's own, the tile behind.
    assert visited(192, True, window=(1, 1)) == [16, 16, 16]
    assert visited(192, False, causal=True) == [21]
    assert visited(192, False) == [36]


def test_full_tiles_of_a_window_are_not_tested(monkeypatch):
    if ON_GPU:
        pytest.skip("counted in the interpreter")
    from flashlib import forward

    tested = []
    kernel = forward._forward_kernel
    plain = kernel.fn.__globals__["visible"]

    class Counted:
        def __call__(self, *args):
            tested.append(int(args[4].handle.data.flat[0]) // 32)
            return plain(*args)

    monkeypatch.setitem(kernel.fn.__globals__, "visible", Counted())
    q, k, v = (torch.randn(1, 1, 256, 16) for _ in range(3))
    flash_attention(q, k, v, window=(100, 0))
    # Of the 5 tiles that a tile of queries sees (4, 3, … at the start), the diagonal one and the two at the far edge.
    assert len(tested) == 8 + 5 + 4


# --- softcap ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_softcap_of_huge_scores():
    raw = torch.tensor([1.0, 100.0, 4400.0, 5000.0, 10000.0, -10000.0, 1e30, -1e30], device=DEVICE)
    q = torch.zeros(1, 1, 1, 16, device=DEVICE)
    q[..., 0] = 1
    k = torch.zeros(1, 1, 8, 16, device=DEVICE)
    k[0, 0, :, 0] = raw
    v = torch.eye(8, 16, device=DEVICE)[None, None]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attention(*leaves, scale=1.0, softcap=50.0, return_lse=True)
    scores = 50 * torch.tanh(raw / 50)
    torch.testing.assert_close(out[0, 0, 0, :8], torch.softmax(scores, 0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(lse[0, 0, 0], torch.logsumexp(scores, 0))
    dq, dk, _ = torch.autograd.grad(out[..., 2].sum(), leaves)
    assert dq.isfinite().all()
    assert (dk[0, 0, 2:] == 0).all()


def test_softcap_comes_before_the_mask():
    q, k, v = qkv(1, 1, 8, 8, 16)
    out = flash_attention(q, k, v, causal=True, softcap=1.0)
    v[:, :, 5:] = 1e4
    assert torch.equal(flash_attention(q, k, v, causal=True, softcap=1.0)[:, :, :5], out[:, :, :5])


@pytest.mark.parametrize("softcap", [0.1, 30, 1e4, 1e9])
def test_softcap_of_any_size(softcap):
    check(*qkv(1, 2, 33, 40, 16), softcap=softcap, scale=2.0)


# --- ALiBi -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [2, 5])
def test_alibi_counts_from_the_diagonal(causal, seqlen_q):
    q, k, v = (torch.zeros(1, 1, n, 16, device=DEVICE) for n in (seqlen_q, 5, 5))
    _, lse = flash_attention(q, k, v, causal=causal, alibi_slopes=torch.tensor([0.5], device=DEVICE), return_lse=True)
    for i in range(seqlen_q):
        at = i + 5 - seqlen_q
        seen = range(at + 1) if causal else range(5)
        assert float(lse[0, 0, i]) == pytest.approx(math.log(sum(math.exp(-abs(at - j) / 2) for j in seen)), abs=1e-6)


# --- rows with no key, hidden keys -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_row_with_no_key_has_the_sink_as_its_lse():
    q, k, v = qkv(1, 2, 40, 20, 16)
    sinks = random(2)
    out, lse = flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert (out[:, :, :20] == 0).all()
    torch.testing.assert_close(lse[:, :, :20], sinks[None, :, None].expand(1, 2, 20))
    check(q, k, v, causal=True, sinks=sinks)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_no_key_at_all_and_a_sink():
    q, k, v = (x.requires_grad_() for x in qkv(2, 2, 4, 0, 16))
    sinks = random(2).requires_grad_()
    out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(2, 2, 4))
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), sinks)[0], torch.full((2,), 8.0, device=DEVICE))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_sink_of_minus_infinity_is_none():
    q, k, v = qkv(1, 2, 40, 20, 16)
    sinks = torch.full((2,), -math.inf, device=DEVICE).requires_grad_()
    with_sink, without = (flash_attention(q, k, v, causal=True, sinks=x, return_lse=True) for x in (sinks, None))
    for a, b in zip(with_sink, without, strict=True):
        torch.testing.assert_close(a, b)
    assert (torch.autograd.grad(with_sink[0].sum(), sinks)[0] == 0).all()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min, -1e9])
def test_a_bias_hides_keys(hidden):
    q, k, v = qkv(1, 2, 40, 50, 16)
    bias = torch.where(random(2, 40, 50) > 0, 0.0, -math.inf)
    bias[:, 7] = -math.inf
    ratios = check(q, k, v, bias=bias)
    assert ratios["dbias"] <= 1
    out = flash_attention(q, k, v, bias=bias.masked_fill(bias == -math.inf, hidden))
    assert torch.equal(out, flash_attention(q, k, v, bias=bias))
    assert (out[:, :, 7] == 0).all()


def test_a_finite_mask_in_half_precision():
    q, k, v = qkv(1, 2, 40, 50, 16, dtype=torch.float16)
    bias = torch.where(random(2, 40, 50) > 0, 0.0, torch.finfo(torch.float16).min).half()
    check(q * 30, k, v, bias=bias, backward=False)


def test_two_layers_and_a_row_without_keys():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 20, 20, 16))
    bias = torch.zeros(20, 20, device=DEVICE)
    bias[3] = -math.inf
    x = flash_attention(q, k, v, bias=bias)
    out = flash_attention(x, x, x)
    grads = torch.autograd.grad(out[:, :, 5:].square().sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)


# --- gradients and PyTorch -------------------------------------------------------------------------------------------


def everything(q, seqlen_k):
    found = options(("causal", "softcap", "alibi", "bias", "sinks"), q, seqlen_k)
    return {**found, "window": (15, None)}


@pytest.mark.skipif(ON_GPU, reason="float64 runs interpreted only")
def test_gradcheck():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 5, 7, 16, dtype=torch.float64))
    found = everything(q, 7)
    bias, sinks = (found.pop(name).double().requires_grad_() for name in ("bias", "sinks"))
    assert torch.autograd.gradcheck(
        lambda q, k, v, bias, sinks: flash_attention(q, k[:, :1], v[:, :1], bias=bias, sinks=sinks, **found),
        (q, k, v, bias, sinks),
        fast_mode=True,
    )


def test_only_the_bias_and_the_sinks():
    q, k, v = qkv(1, 2, 20, 30, 16)
    bias, sinks = random(20, 30).requires_grad_(), random(2).requires_grad_()
    got = torch.autograd.grad(flash_attention(q, k, v, bias=bias, sinks=sinks).square().sum(), (bias, sinks))
    exact = [x.detach().double().requires_grad_() for x in (bias, sinks)]
    out = reference.attention(q.double(), k.double(), v.double(), bias=exact[0], sinks=exact[1])
    for a, b in zip(got, torch.autograd.grad(out.square().sum(), exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_the_same_bits_every_run():
    leaves = [x.requires_grad_() for x in qkv(2, 2, 40, 50, 16)]
    found = everything(leaves[0], 50)
    leaves += [found["bias"].requires_grad_(), found["sinks"].requires_grad_()]
    runs = [torch.autograd.grad(flash_attention(*leaves[:3], **found).square().sum(), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_rows_do_not_depend_on_the_batch():
    q, k, v = qkv(3, 2, 40, 40, 16)
    found = everything(q, 40) | {"alibi_slopes": random(2).abs()}
    alone = flash_attention(q[1:2], k[1:2], v[1:2], **found)
    assert torch.equal(flash_attention(q, k, v, **found)[1:2], alone)


def test_compiled_differentiated_and_not_twice():
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 20, 30, 16))
    found = everything(q, 30)
    sinks = found["sinks"].requires_grad_()

    def loss(q, k, v, sinks):
        return flash_attention(q, k, v, **{**found, "sinks": sinks}).square().sum()

    want = torch.autograd.grad(loss(q, k, v, sinks), (q, k, v, sinks))
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(q, k, v, sinks), (q, k, v, sinks)), want, strict=True):
        torch.testing.assert_close(a, b)
    plain = [x.detach() for x in (q, k, v, sinks)]
    torch.testing.assert_close(torch.func.grad(loss, 3)(*plain), want[3])
    (grad,) = torch.autograd.grad(loss(q, k, v, sinks), sinks, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_dropout_repeats_with_the_seed_and_differs_without():
    q, k, v = qkv(1, 2, 20, 30, 16)
    torch.manual_seed(0)
    first, second = (flash_attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(flash_attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    _, lse = flash_attention(q, k, v, dropout_p=0.5, return_lse=True)
    assert torch.equal(flash_attention(q, k, v, return_lse=True)[1], lse)


def test_what_is_dropped_does_not_depend_on_tiles(monkeypatch):
    q, k, v = qkv(1, 1, 70, 90, 16)
    seed = torch.tensor([1, 2], device=DEVICE)
    want = flash_attention(q, k, v, dropout_p=0.4, dropout_seed=seed)
    monkeypatch.setattr(tiles, "tile_for", lambda *_: tiles.Tile(64, 16, 4, 1))
    torch.testing.assert_close(flash_attention(q, k, v, dropout_p=0.4, dropout_seed=seed), want, rtol=1e-4, atol=1e-5)


def test_a_backward_may_be_nondeterministic_but_is_not():
    q, k, v = qkv(1, 1, 8, 8, 16)
    assert torch.equal(flash_attention(q, k, v, deterministic=False), flash_attention(q, k, v, backend="portable"))


@pytest.mark.skipif(ON_GPU, reason="descriptors are used there anyway")
def test_features_through_descriptors(monkeypatch):
    q, k, v = (x.requires_grad_() for x in qkv(1, 4, 50, 70, 16))
    found, dout = everything(q, 70), tensor((1, 4, 50, 16), torch.float32)

    def run():
        out = flash_attention(q, k[:, :2], v[:, :2], **found)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    pointers = run()
    monkeypatch.setattr(tiles, "DESCRIPTOR_FROM", 0)
    monkeypatch.setattr(tiles, "describable", lambda x, architecture: True)
    assert all(torch.equal(a, b) for a, b in zip(pointers, run(), strict=True))


# --- fuzz ------------------------------------------------------------------------------------------------------------


@settings(
    max_examples=300 if ON_GPU else 8,
    deadline=None,
    derandomize=not ON_GPU,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_fuzz(data):
    draw = data.draw
    names = draw(st.sets(st.sampled_from(NAMES), max_size=4))
    if {"bias", "score"} <= names:
        names -= {"score"}
    longest = 700 if ON_GPU else 70
    seqlen_q, seqlen_k = draw(st.integers(8, longest)), draw(st.integers(1, longest))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    layouts = [draw(st.sampled_from(["contiguous", "transposed", "sliced"])) for _ in range(3)]
    q, k, v = inputs(names, draw(st.integers(1, 2)), 2, seqlen_q, seqlen_k, 16, dtype=dtype, layouts=layouts)
    found = options(names, q, seqlen_k)
    if "window" in names:
        side = st.one_of(st.none(), st.integers(0, longest))
        found["window"] = draw(side), draw(side)
    check(q, k, v, scale=draw(st.sampled_from([None, 0.4, -0.2])), **found)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": 3}, r"window must be a pair \(left, right\) or None, got 3"),
        ({"window": (1, 2, 3)}, r"window must be a pair \(left, right\) or None"),
        ({"window": (-64, 0)}, "window must have a left that is an int of at least 0 or None, got -64"),
        ({"window": (3, -1)}, "window must have a right that is an int of at least 0 or None, got -1"),
        ({"window": (1.5, 0)}, "window must have a left that is an int"),
        ({"softcap": 0.0}, "softcap must be a positive number or None, got 0.0"),
        ({"softcap": -30}, "softcap must be a positive number or None, got -30"),
        ({"softcap": math.inf}, "softcap must be a positive number or None, got inf"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes must be a tensor or None, got list"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must have shape \(2,\) or \(1, 2\), got \(3,\)"),
        ({"alibi_slopes": torch.ones(2).double()}, "alibi_slopes must have dtype float32, got torch.float64"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, "alibi_slopes must not require grad"),
        ({"alibi_slopes": torch.ones(2, device="meta")}, "alibi_slopes must be on the device of q"),
        ({"bias": 3}, "bias must be a tensor of floats or None, got int"),
        ({"bias": torch.ones(8, 8, dtype=torch.bool)}, "bias must be a tensor of floats or None, got torch.bool"),
        ({"bias": torch.ones(3, 8)}, r"bias must broadcast to \(1, 2, 8, 8\), got shape \(3, 8\)"),
        ({"bias": torch.ones(1, 1, 1, 1, 8)}, "bias must broadcast to"),
        ({"bias": torch.ones(8, device="meta")}, "bias must be on the device of q"),
        ({"sinks": 0.0}, "sinks must be a tensor of floats or None, got float"),
        ({"sinks": torch.ones(1)}, r"sinks must have shape \(2,\), got \(1,\)"),
        ({"sinks": torch.ones(2, device="meta")}, "sinks must be on the device of q"),
        ({"dropout_p": 1.0}, r"dropout_p must be a number in \[0, 1\), got 1.0"),
        ({"dropout_p": -0.1}, r"dropout_p must be a number in \[0, 1\), got -0.1"),
        ({"dropout_p": None}, r"dropout_p must be a number in \[0, 1\), got None"),
        ({"dropout_p": 0.1, "dropout_seed": 3}, "dropout_seed must be an int64 tensor of two numbers or None, got 3"),
        ({"deterministic": 1}, "deterministic must be True or False, got 1"),
        ({"backend": "cudnn"}, "backend must be one of .*'portable'.* got 'cudnn'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors(given, message):
    x = torch.zeros(1, 2, 8, 16, device=DEVICE)
    given = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) and value.device.type != "meta" else value
        for name, value in given.items()
    }
    if "requires" not in message and "require grad" in message:
        given["alibi_slopes"] = given["alibi_slopes"].detach().requires_grad_()
    with pytest.raises(ValueError, match=message):
        flash_attention(x, x, x, **given)


def test_a_bias_of_rows_with_nan_padding_is_read_where_it_is():
    q, k, v = qkv(1, 2, 20, 30, 16)
    bias = tensor((1, 2, 20, 30), torch.float32, "sliced", seed=5)
    assert torch.equal(flash_attention(q, k, v, bias=bias), flash_attention(q, k, v, bias=bias.contiguous()))
