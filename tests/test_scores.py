"""Ready-made scores: each against plain float64, values and gradients, and against the built-in that does the same."""

import pytest
import torch
from attention_cases import DEVICE, check
from kernel_jobs import job
from test_forward import qkv

from flashlib import flash_attention, scores
from flashlib.compiler import compile_many

LENGTHS = [(70, 70), (40, 75), (75, 40)]


def distance(seqlen_q, seqlen_k):
    i = torch.arange(seqlen_q, device=DEVICE)[:, None] + seqlen_k - seqlen_q
    return torch.arange(seqlen_k, device=DEVICE)[None, :] - i


def both(q, k, v, first, second):
    """Return (out, lse, dq, dk, dv) for two sets of options."""
    results = []
    for options in (first, second):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attention(*leaves, return_lse=True, **options)
        sent = out.square().sum() + lse[lse.isfinite()].sum()
        results.append((out, lse, *torch.autograd.grad(sent, leaves)))
    return zip(*results, strict=True)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_alibi_against_the_oracle(lengths):
    slopes = torch.tensor([0.5, 0.03], device=DEVICE)
    added = -slopes[:, None, None] * distance(*lengths).abs()
    check(*qkv(2, 2, *lengths, 16), score=scores.alibi(slopes, lengths[1] - lengths[0]), added=added)


@pytest.mark.parametrize("causal", [False, True])
def test_relative_against_the_oracle(causal):
    table = torch.randn(2, 15, device=DEVICE)
    added = table[:, distance(50, 50).clamp(-7, 7) + 7]
    check(*qkv(2, 2, 50, 50, 16), causal=causal, score=scores.relative(table), added=added)


@pytest.mark.parametrize("cap", [0.7, 20.0])
def test_softcap_against_plain_float64(cap):
    leaves = [x.double().requires_grad_() for x in qkv(1, 2, 40, 60, 16)]
    q, k, v = leaves
    p = torch.softmax(cap * torch.tanh(q @ k.transpose(-1, -2) / 4 / cap), -1)
    exact = (p @ v, *torch.autograd.grad((p @ v).square().sum(), leaves))
    mine = [x.detach().float().requires_grad_() for x in leaves]
    out = flash_attention(*mine, score=scores.softcap(cap, DEVICE))
    got = (out, *torch.autograd.grad(out.square().sum(), mine))
    for a, b in zip(got, exact, strict=True):
        assert torch.allclose(a.double(), b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_hooks_equal_the_built_ins(lengths):
    slopes = torch.tensor([0.5, 0.03], device=DEVICE)
    pairs = [
        ({"alibi_slopes": slopes}, {"score": scores.alibi(slopes, lengths[1] - lengths[0])}),
        ({"softcap": 1.5, "causal": True}, {"score": scores.softcap(1.5, DEVICE), "causal": True}),
    ]
    for built_in, hook in pairs:
        for a, b in both(*qkv(1, 2, *lengths, 16), built_in, hook):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_softcap_saturates_without_nan():
    q, k, v = (300 * x for x in qkv(1, 1, 16, 16, 16))
    for x in (q, k, v):
        x.requires_grad_()
    out = flash_attention(q, k, v, score=scores.softcap(2.0, DEVICE))
    for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert x.isfinite().all()


HOOKS = {
    "alibi_score": ("same", ["*fp32", "*i32"]),
    "softcap_score": ("softcap_grad", ["*fp32"]),
    "relative_score": ("same", ["*fp32", "*i32"]),
}


def test_scores_compile_for_a_gpu():
    jobs = []
    for name, (grad, aux) in HOOKS.items():
        one = job("dkdv", "bf16", 64, True, 90)
        one["signature"]["score_aux"] = aux
        one["constexprs"] |= {"SCORE": f"flashlib.scores:{name}", "GRAD": f"flashlib.scores:{grad}"}
        jobs.append(one)
    for given, compiled in zip(jobs, compile_many(jobs), strict=True):
        assert "wgmma" in compiled.ptx, given["constexprs"]["SCORE"]
