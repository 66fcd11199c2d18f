"""The small model: the same logits and gradients whoever attends; packed, alone or in a batch."""

import pytest
import torch
from attention_cases import DEVICE

from flashlib.tiny_model import TinyModel, flash, packed, rotate, sdpa


def model(**options):
    torch.manual_seed(0)
    return TinyModel(**options).to(DEVICE)


def tokens(batch, seqlen, vocabulary=101):
    return torch.randint(vocabulary, (batch, seqlen), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def near(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("nheads_kv", [1, 2, 4])
def test_logits_and_gradients_do_not_depend_on_who_attends(nheads_kv):
    results = []
    for attend in (sdpa, flash):
        net = model(nheads_kv=nheads_kv)
        x = tokens(2, 21)
        logits = net(x, attend)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        results.append([logits, *(p.grad for p in net.parameters())])
    assert all(near(a, b) for a, b in zip(*results, strict=True))
    # And they depend on the attention: without it they are others.
    assert not near(results[0][0], model(nheads_kv=nheads_kv)(tokens(2, 21), lambda q, k, v: torch.zeros_like(q)))


def test_no_logit_sees_a_later_token():
    net, x = model(), tokens(1, 20)
    other = x.clone()
    other[:, 12:] = (other[:, 12:] + 1) % 101
    a, b = net(x), net(other)
    assert near(a[:, :12], b[:, :12])
    assert not near(a[:, 12:], b[:, 12:])


@torch.no_grad()
def test_packed_sequences_get_the_logits_they_get_alone():
    net, lengths = model(), [7, 1, 18]
    x = tokens(1, sum(lengths))
    cu_seqlens = torch.tensor([0, 7, 8, 26], dtype=torch.int32, device=DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths]).to(DEVICE)
    together = net(x, packed(cu_seqlens, 18), positions)
    alone = [net(x[:, first:last], sdpa) for first, last in ((0, 7), (7, 8), (8, 26))]
    assert near(together, torch.cat(alone, 1))
    # Without restarting positions the third sequence would be rotated otherwise; alone it must not matter.
    assert near(net(x[:, 8:], sdpa, torch.arange(8, 26, device=DEVICE)), alone[2])


def test_rope_knows_distances_only():
    q, k = torch.randn(2, 1, 1, 1, 16).double().to(DEVICE).unbind()
    at = torch.tensor([3.0, 11.0, 40.0], device=DEVICE).double()

    def product(shift):
        return torch.stack([(rotate(q, a[None] + shift) * rotate(k, a[None] - 2 + shift)).sum() for a in at])

    assert torch.allclose(product(0), product(100))
    assert torch.allclose(product(0), product(0)[:1].expand(3))
    assert not torch.allclose(product(0)[0], (q * k).sum())
    assert torch.allclose(rotate(q, at[:1]).norm(), q.norm())


def test_what_a_block_adds_is_added():
    net, x = model(), tokens(1, 9)
    for block in net.blocks:
        torch.nn.init.zeros_(block.gate.weight)
    nothing = net(x, lambda q, k, v: torch.zeros_like(q))
    assert near(nothing, net.to_logits(net.norm(net.embedding(x))))


def test_keys_have_fewer_heads():
    net = model(nheads=4, nheads_kv=1)
    assert net.blocks[0].attention.to_k.weight.shape == (16, 64)
    assert net.blocks[0].attention.to_q.weight.shape == (64, 64)
