"""Time what models add to attention, beside FlexAttention with the same mask and score changes.

Needs a GPU, PyTorch and Triton; `flashlib` must be importable. The recorded file was made on one NVIDIA H200:

    python benchmarks/features.py --out benchmarks/results/h200/features.csv --commit $(git rev-parse --short HEAD)

    --out FILE     the CSV to write; default results/<gpu>/features.csv beside this script
    --commit TEXT  the commit to record; default: what git says, or empty where git is not there
    --only NAME …  some of: window softcap alibi document gqa packed
    --rounds N     timed rounds (default 15): one round runs every implementation once, in turn
    --smoke        tiny shapes on the CPU, our kernels only, checked and not timed

    window     causal, the last 1025 keys, seqlen 16384
    softcap    causal, 30·tanh(s/30), seqlen 8192
    alibi      causal, 16 slopes, seqlen 8192
    document   causal within each of about 8 documents, seqlen 8192
    gqa        causal, 32 heads on 8, seqlen 8192; `flashlib_mha` is the same with 32 on 32
    packed     64 sequences of log-uniform length from 64 to 8192, not causal; `flashlib_dense` is a dense batch of
               nearly the same FLOPs in sequences of 8192

The long format of the course, plus `feature`. FLOPs count what is visible: 4·head_dim for each pair of a query and a
key that counts, 2.5 times that backward. seqlen of the packed batch is the total. Every implementation is held
against the float64 oracle on the last heads before anything is timed: 2% of the norm.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch

from flashlib import bench, flash_attention, flash_attention_varlen, reference
from flashlib.device import tl, triton
from flashlib.mods import Bounds, Mask

FIELDS = ["feature", *bench.FIELDS]
HEAD_DIM = 128
CASES = ("window", "softcap", "alibi", "document", "gqa", "packed")
TOLERANCE = 0.02


# --- the document mask ---------------------------------------------------------------------------------------------


@triton.jit
def same_document(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See the keys of one's own document: aux holds where the document of each token begins and ends."""
    begin = tl.load(aux[0] + b * seqlen_q + i)
    end = tl.load(aux[1] + b * seqlen_q + i)
    return (j >= begin) & (j < end)


@triton.jit
def document_range(b, h, first, end, seqlen_q, seqlen_k, aux):
    """Return the keys that tokens first … end - 1 see: any from the first one's document on, all in the common part."""
    row = b * seqlen_q
    last = row + end - 1
    return (
        tl.load(aux[0] + row + first), tl.load(aux[0] + last), tl.load(aux[1] + row + first), tl.load(aux[1] + last)
    )  # fmt: skip


def documents_of(batch, seqlen, device):
    """Return random documents: (number of each token's document, where it begins, where it ends), (batch, seqlen)."""
    cuts = torch.rand(batch, seqlen, generator=torch.Generator().manual_seed(0)) < 8 / seqlen
    cuts[:, 0] = False
    at = torch.arange(seqlen).expand_as(cuts)
    begin = torch.where(cuts, at, 0).cummax(1).values
    following = torch.where(cuts, at, seqlen).roll(-1, 1)
    following[:, -1] = seqlen
    end = following.flip(1).cummin(1).values.flip(1)
    numbers, begin, end = cuts.cumsum(1), begin.int(), end.int()
    return numbers.to(device), begin.to(device), end.to(device)


# --- the cases -----------------------------------------------------------------------------------------------------


def case_of(name, device, small):
    """Return (batch, nheads, nheads_kv, seqlen, our options, the oracle's options, FlexAttention's mods)."""
    seqlen = 96 if small else 16384 if name == "window" else 8192
    batch, nheads, nheads_kv = (1, 4, 2 if name == "gqa" else 4) if small else (2, 16, 16)
    if not small and name == "window":
        batch = 1
    if not small and name == "gqa":
        nheads, nheads_kv = 32, 8
    ours = exact = {"causal": True}
    mask_mod, score_mod = (lambda b, h, i, j: i >= j), None
    if name == "window":
        size = 20 if small else 1024
        ours = exact = {"causal": True, "window": (size, None)}
        mask_mod = lambda b, h, i, j: (i >= j) & (i - j <= size)  # noqa: E731
    if name == "softcap":
        ours = exact = {"causal": True, "softcap": 30.0}
        score_mod = lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0)  # noqa: E731
    if name == "alibi":
        slopes = torch.exp2(-8 / nheads * torch.arange(1, nheads + 1, device=device))
        ours, exact = {"causal": True, "alibi_slopes": slopes}, {"causal": True, "alibi_slopes": slopes[-1:]}
        score_mod = lambda s, b, h, i, j: s - slopes[h] * (i - j)  # noqa: E731
    if name == "document":
        numbers, begin, end = documents_of(batch, seqlen, device)
        ours = {"causal": True, "mask": Mask(same_document, Bounds(document_range, document_range), aux=[begin, end])}
        exact = {"causal": True, "mask": numbers[-1, :, None] == numbers[-1, None, :]}
        mask_mod = lambda b, h, i, j: (i >= j) & (numbers[b, i] == numbers[b, j])  # noqa: E731
    return batch, nheads, nheads_kv, seqlen, ours, exact, (mask_mod, score_mod)


def pairs_of(name, batch, seqlen, exact_options, device, numbers):
    """Return how many pairs of a query and a key count, over the batch, for one head."""
    i = torch.arange(seqlen, device=device)
    if name == "window":
        return batch * int((i.clamp(max=exact_options["window"][0]) + 1).sum())
    if name == "document":
        return int((i + 1 - numbers[1]).sum())
    return batch * seqlen * (seqlen + 1) // 2


def flex(mods, batch, seqlen, gqa):
    """Return FlexAttention, compiled for one shape, with the same mods."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A fresh compilation for each shape: after eight recompilations it would fall back to an unfused path.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(mods[0], batch, None, seqlen, seqlen, device="cuda")
    return lambda q, k, v: compiled(q, k, v, score_mod=mods[1], block_mask=block_mask, enable_gqa=gqa)


def differentiated(function, tensors, dout):
    """Return ((out, dq, dk, dv), a function that runs the forward, one that runs the backward)."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)

    def backward():
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def forward():
        with torch.no_grad():
            return function(*tensors)

    return (out.detach(), *backward()), forward, backward


def wrong(got, want):
    """Return the relative errors of (out, dq, dk, dv), or None if all are small."""
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return None if all(error <= TOLERANCE for error in errors) else errors


def dense_case(name, device, dtype, small):
    """Return ({impl: (forward, backward)}, the row's columns, {impl: FLOPs of the forward})."""
    batch, nheads, nheads_kv, n, ours, exact, mods = case_of(name, device, small)
    heads = (nheads, nheads_kv, nheads_kv, nheads)
    q, k, v, dout = (torch.randn(batch, h, n, HEAD_DIM, device=device, dtype=dtype) for h in heads)
    functions = {"flashlib_portable": lambda q, k, v: flash_attention(q, k, v, **ours)}
    if not small:
        functions["flex"] = flex(mods, batch, n, nheads != nheads_kv)
    group = nheads // nheads_kv
    last = [q[-1:, -group:], k[-1:, -1:], v[-1:, -1:]]
    leaves = [x.double().requires_grad_() for x in last]
    out = reference.attention(*leaves, **exact)
    want = (out.detach(), *torch.autograd.grad(out, leaves, dout[-1:, -group:].double()))
    del out
    calls = {}
    for impl, function in functions.items():
        results, *both = differentiated(function, (q, k, v), dout)
        heads = (group, group, 1, 1)
        errors = wrong([x[-1:, -h:] for x, h in zip(results, heads, strict=True)], want)
        if errors:
            print(f"{name}: {impl} is not timed, its results are wrong by {errors}", file=sys.stderr)
        else:
            calls[impl] = both
    numbers = documents_of(batch, n, device) if name == "document" else None
    flops = 4.0 * HEAD_DIM * nheads * pairs_of(name, batch, n, exact, device, numbers)
    if name == "gqa":
        k_all, v_all = (x.repeat_interleave(group, 1) for x in (k, v))
        calls["flashlib_mha"] = differentiated(functions["flashlib_portable"], (q, k_all, v_all), dout)[1:]
    columns = {"causal": 1, "seqlen_q": n, "seqlen_k": n, "batch": batch, "nheads": nheads, "nheads_kv": nheads_kv}
    return calls, columns, dict.fromkeys(calls, flops)


def packed_case(device, dtype, small):
    """Return the same for the packed batch."""
    count, shortest, longest, nheads = (5, 2, 100, 4) if small else (64, 64, 8192, 16)
    spread = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths = (shortest * torch.exp(spread * math.log(longest / shortest))).int()
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]).to(device)
    total, pairs = int(lengths.sum()), int((lengths.long() ** 2).sum())
    q, k, v, dout = (torch.randn(total, nheads, HEAD_DIM, device=device, dtype=dtype) for _ in range(4))
    results, *packed = differentiated(
        lambda q, k, v: flash_attention_varlen(q, k, v, cu, cu, longest, longest), (q, k, v), dout
    )
    leaves = [x[:, -1:].double().requires_grad_() for x in (q, k, v)]
    out = reference.attention_varlen(*leaves, cu, cu)
    want = (out.detach(), *torch.autograd.grad(out, leaves, dout[:, -1:].double()))
    errors = wrong([x[:, -1:] for x in results], want)
    if errors:
        raise RuntimeError(f"packed: the results are wrong by {errors}")
    batch = max(1, round(pairs / longest**2))
    dense = [torch.randn(batch, nheads, longest, HEAD_DIM, device=device, dtype=dtype) for _ in range(4)]
    calls = {"flashlib_portable": packed}
    calls["flashlib_dense"] = differentiated(lambda q, k, v: flash_attention(q, k, v), dense[:3], dense[3])[1:]
    columns = {"causal": 0, "seqlen_q": total, "seqlen_k": total, "batch": count, "nheads": nheads, "nheads_kv": nheads}
    flops = {"flashlib_portable": 4.0 * HEAD_DIM * nheads * pairs}
    return calls, columns, flops | {"flashlib_dense": 4.0 * HEAD_DIM * nheads * batch * longest**2}


# --- running -------------------------------------------------------------------------------------------------------


def rows_of(name, device, dtype, rounds, small):
    """Yield the rows of one case."""
    torch.manual_seed(0)
    calls, columns, flops = (
        packed_case(device, dtype, small) if name == "packed" else dense_case(name, device, dtype, small)
    )
    if small:
        return
    for index, pass_ in enumerate(("fwd", "bwd")):
        times = bench.time_in_turns({impl: both[index] for impl, both in calls.items()}, rounds)
        speeds = {}
        for impl, ms in times.items():
            p20, p50, p80 = bench.percentiles(ms)
            speeds[impl] = (2.5 if index else 1) * flops[impl] / p50 / 1e9
            row = {"feature": name, "pass": pass_, "head_dim": HEAD_DIM, **columns, "dtype": "bf16", "impl": impl}
            yield row | {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "tflops": speeds[impl]}
        mine = speeds.get("flashlib_portable", math.nan)
        text = ", ".join(f"{speed:.0f} {impl} ({mine / speed:.2f}x)" for impl, speed in speeds.items())
        print(f"{name:9} {pass_}: {text} TFLOP/s", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--only", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.smoke else ("cuda", torch.bfloat16)
    started = time.perf_counter()
    if options.smoke:
        for name in options.only:
            list(rows_of(name, device, dtype, 1, True))
            print(f"{name}: right, {time.perf_counter() - started:.0f} s")
        return
    where = bench.machine(options.commit)
    out, rows = options.out or bench.results_path("features", where["gpu"]), []
    for name in options.only:
        rows += [row | where for row in rows_of(name, device, dtype, options.rounds, False)]
        # After each case, so that what was measured is there if the run is cut off.
        bench.write_results(out, rows, FIELDS)
        torch.cuda.empty_cache()
    print(f"written to {out}")


if __name__ == "__main__":
    main()
