"""The backward kernels and the op under autograd: gradients, transforms, refusals."""

import pytest
import torch
from attention_cases import DEVICE, ON_GPU, check, error, tensor
from test_forward import DTYPES, FEW_ROWS, LAYOUTS, qkv

from flashlib import reference, tiles
from flashlib.attention import flash_attention
from flashlib.options import Options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 70, 70, 64), (1, 2, 33, 97, 40, 24), (1, 1, 97, 33, 16, 32)], ids=str)
def test_matches_the_oracle(shape, causal, dtype):
    check(*qkv(*shape, dtype=dtype), causal=causal)


@pytest.mark.parametrize(("shape", "causal", "dtype"), FEW_ROWS, ids=str)
def test_a_few_rows(shape, causal, dtype):
    check(*qkv(*shape, dtype=dtype), causal=causal)


@pytest.mark.skipif(ON_GPU, reason="float64, where chance decides nothing, runs interpreted only")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [1, 2, 7, 8])
def test_tiny_lengths(seqlen, causal):
    check(*qkv(1, 2, seqlen, seqlen, 64, dtype=torch.float64), causal=causal)


@pytest.mark.parametrize("head_dim", range(16, 257, 8))
def test_every_head_dim(head_dim):
    check(*qkv(1, 1, 20, 30, head_dim), causal=True)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.5])
def test_scale_is_honoured(scale):
    check(*qkv(1, 2, 40, 70, 40), causal=True, scale=scale)


@pytest.mark.parametrize("shift", range(6))
def test_any_layout(shift):
    layouts = LAYOUTS[shift:] + LAYOUTS[:shift]
    check(*qkv(1, 2, 37, 45, 24, layouts=layouts[:3]), causal=True, layout_dout=layouts[3])


@pytest.mark.parametrize("tile", [(16, 64, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1)])
def test_tiles_need_not_be_square(tile, monkeypatch):
    monkeypatch.setattr(tiles, "tile_for", lambda *_: tiles.Tile(*tile))
    check(*qkv(1, 1, 70, 90, 16), causal=True)
    check(*qkv(1, 1, 90, 70, 16), causal=True)


def test_descriptors_give_the_same_bits_as_pointers(monkeypatch):
    inputs = [x.requires_grad_() for x in qkv(1, 2, 50, 70, 40, 16, layouts=("contiguous", "sliced", "transposed"))]
    dout = tensor((1, 2, 50, 16), torch.float32)
    pointers = torch.autograd.grad(flash_attention(*inputs, causal=True), inputs, dout)
    monkeypatch.setattr(tiles, "DESCRIPTOR_FROM", 0)
    if not ON_GPU:
        monkeypatch.setattr(tiles, "describable", lambda x, architecture: True)
    described = torch.autograd.grad(flash_attention(*inputs, causal=True), inputs, dout)
    assert all(torch.equal(a, b) for a, b in zip(pointers, described, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 5, 5, 16), (2, 0, 5, 5, 16), (2, 2, 0, 5, 16), (2, 2, 4, 0, 16)], ids=str)
def test_empty_inputs(shape):
    inputs = [x.requires_grad_() for x in qkv(*shape)]
    grads = torch.autograd.grad(flash_attention(*inputs, causal=True).sum(), inputs)
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, inputs, strict=True))


def test_one_head_expanded_gets_the_sum_over_heads():
    q, k, v = qkv(1, 4, 20, 30, 16)
    one = k[:, :1].detach().requires_grad_()
    (got,) = torch.autograd.grad(flash_attention(q, one.expand_as(k), v).sum(), one)
    each = k[:, :1].detach().repeat(1, 4, 1, 1).requires_grad_()
    (want,) = torch.autograd.grad(flash_attention(q, each, v).sum(), each)
    torch.testing.assert_close(got, want.sum(1, keepdim=True))


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
def test_any_subset_of_the_inputs(wanted):
    inputs = dict(zip("qkv", qkv(1, 2, 20, 30, 16), strict=True))
    leaves = [inputs[name].requires_grad_() for name in wanted]
    got = torch.autograd.grad(flash_attention(**inputs, causal=True).square().sum(), leaves)
    exact = {name: x.detach().double().requires_grad_(name in wanted) for name, x in inputs.items()}
    want = torch.autograd.grad(
        reference.attention(**exact, causal=True).square().sum(), [exact[name] for name in wanted]
    )
    assert all(error(a, b) < 1e-5 for a, b in zip(got, want, strict=True))


def test_the_gradient_of_lse_alone():
    inputs = [x.requires_grad_() for x in qkv(1, 2, 20, 30, 16)]
    _, lse = flash_attention(*inputs, return_lse=True)
    got = torch.autograd.grad(lse.sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    _, lse = reference.attention(*exact, return_lse=True)
    want = torch.autograd.grad(lse.sum(), exact[:2])
    assert all(error(a, b) < 1e-5 for a, b in zip(got[:2], want, strict=True))
    assert (got[2] == 0).all()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("of_lse", [torch.square, torch.exp])
def test_a_row_without_a_key_sends_nothing_through_its_lse(of_lse):
    inputs = qkv(1, 2, 40, 20, 16)

    def gradients(attention, leaves):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, lse = attention(*leaves, causal=True, return_lse=True)
        return torch.autograd.grad(out.sum() + of_lse(lse).sum(), leaves)

    got = gradients(flash_attention, inputs)
    want = gradients(reference.attention, [x.double() for x in inputs])
    assert not got[0][:, :, :20].any()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_forward_mode_is_refused():
    q, k, v = qkv(1, 1, 5, 7, 16)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: flash_attention(x, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match="jvp"), torch.autograd.forward_ad.dual_level():
        flash_attention(q, k, torch.autograd.forward_ad.make_dual(v, v))


def test_the_same_bits_every_run():
    inputs = [x.requires_grad_() for x in qkv(2, 2, 70, 90, 32)]
    runs = [torch.autograd.grad(flash_attention(*inputs, causal=True).square().sum(), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.skipif(ON_GPU, reason="float64 runs interpreted only")
def test_gradcheck():
    inputs = [x.requires_grad_() for x in qkv(1, 1, 5, 7, 16, dtype=torch.float64)]
    assert torch.autograd.gradcheck(
        lambda *x: flash_attention(*x, causal=True, return_lse=True), inputs, fast_mode=True
    )


def test_differentiating_twice_is_refused():
    inputs = [x.requires_grad_() for x in qkv(1, 1, 8, 8, 16)]
    (grad,) = torch.autograd.grad(flash_attention(*inputs).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        (grad.sum() + inputs[0].square().sum()).backward()


def test_torch_func_grad():
    q, k, v = qkv(1, 2, 20, 30, 16)
    got = torch.func.grad(lambda q: flash_attention(q, k, v, causal=True).square().sum())(q)
    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(flash_attention(leaf, k, v, causal=True).square().sum(), leaf)
    assert torch.equal(got, want)


@pytest.mark.parametrize("wants_grad", [False, True])
def test_vmap_is_refused(wants_grad):
    inputs = [x[:, None].requires_grad_(wants_grad) for x in qkv(2, 1, 5, 7, 16)]
    with pytest.raises(RuntimeError, match="Batching rule not implemented for flashlib::forward"):
        torch.vmap(flash_attention)(*inputs)


def test_torch_compile_without_a_graph_break():
    inputs = [x.requires_grad_() for x in qkv(1, 2, 20, 30, 16)]

    def loss(q, k, v):
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")
    got, want = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, loss))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_opcheck():
    q, k, v = qkv(1, 1, 8, 8, 16)
    bias, sinks = torch.randn(1, 1, 1, 8, device=DEVICE), torch.randn(1, device=DEVICE)
    for options in (Options(right=0, scale=0.25, aux=[]), Options(bias, sinks, 3, None, 0.25, softcap=2.0, aux=[])):
        torch.library.opcheck(torch.ops.flashlib.forward.default, (q, k, v, *options))
        out, lse = torch.ops.flashlib.forward(q, k, v, *options)
        wants = True, True, options.bias is not None, options.sinks is not None
        arguments = q, k, v, out, lse, out, None, *wants, *options
        torch.library.opcheck(torch.ops.flashlib.backward.default, arguments)


def test_no_graph_is_kept_without_grad():
    q, k, v = qkv(1, 1, 8, 8, 16)
    q.requires_grad_()
    with torch.no_grad():
        assert flash_attention(q, k, v).grad_fn is None
    assert flash_attention(q.detach(), k, v).grad_fn is None
    assert flash_attention(q, k, v).device.type == DEVICE
