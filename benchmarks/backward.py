"""Run the backward many times on the same inputs: does it give the same bits, and what does that cost?

Needs a GPU, PyTorch and Triton; `flashlib` must be importable. The recorded file was made on one NVIDIA H200:

    python benchmarks/backward.py --out benchmarks/results/h200/backward.csv --commit $(git rev-parse --short HEAD)

    --out FILE     the CSV to write; default results/<gpu>/backward.csv beside this script
    --commit TEXT  the commit to record; default: what git says, or empty where git is not there
    --rounds N     timed rounds of each shape (default 15): one round runs every implementation once, in turn
    --runs N       runs compared bit by bit (default 20)
    --smoke        tiny shapes on the CPU, one round: exercises the code, measures nothing of interest

    flashlib_portable   the library's backward: three kernels, no atomics
    flashlib_atomic     flashlib.backward_atomic: one pass, dq by atomic additions; the fastest of TILES
    fa2                 PyTorch's FlashAttention-2, as it is by default: dq by atomic additions
    fa2_deterministic   the same under torch.use_deterministic_algorithms(True)

The long format of the course, plus, over `runs` runs on the same inputs: differ_dq, differ_dk, differ_dv, the number of
runs whose bits are not those of the first; share_dq, the share of dq's entries that differ in the last run; spread_dq,
the largest difference of an entry of dq between any run and the first, in units of dq's largest entry. FLOPs are
10 b h N N d, halved if causal, whatever an implementation computes.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlib import bench, reference, tiles
from flashlib.attention import flash_attention
from flashlib.backward_atomic import backward_atomic

TOKENS = 16384
WIDTH = 2048
HEAD_DIM = 128
SEQLENS = (1024, 4096, 16384)
# Of the one-pass kernel; the fastest at the middle length is used throughout.
TILES = (tiles.Tile(64, 128, 8, 2), tiles.Tile(64, 64, 4, 2), tiles.Tile(32, 64, 4, 2))
FIELDS = [
    *("pass", "head_dim", "causal", "seqlen_q", "seqlen_k", "batch", "nheads", "nheads_kv", "dtype", "impl"),
    *("ms_p20", "ms_p50", "ms_p80", "tflops", "runs", "differ_dq", "differ_dk", "differ_dv", "share_dq", "spread_dq"),
]


# --- the implementations -------------------------------------------------------------------------------------------


def sdpa(q, k, v, causal):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Deterministic:
    """PyTorch's deterministic mode, without its filling of fresh memory, which would be timed too."""

    def __enter__(self):
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(False)


def calls_of(q, k, v, dout, causal, tile):
    """Return {name: function without arguments that gives (dq, dk, dv)}, the forward done already."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    ours, theirs = flash_attention(*leaves, causal=causal), sdpa(*leaves, causal)
    with torch.no_grad():
        out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)

    def fa2():
        return torch.autograd.grad(theirs, leaves, dout, retain_graph=True)

    def fa2_deterministic():
        with Deterministic():
            return fa2()

    return {
        "flashlib_portable": lambda: torch.autograd.grad(ours, leaves, dout, retain_graph=True),
        "flashlib_atomic": lambda: backward_atomic(q, k, v, out, lse, dout, causal=causal, tile=tile),
        "fa2": fa2,
        "fa2_deterministic": fa2_deterministic,
    }


# --- checks before clocks ------------------------------------------------------------------------------------------


def check(name, grads, exact):
    """Raise unless each gradient is as near as 16-bit inputs and a 16-bit out allow: 2% of the norm (see cost.py)."""
    for tensor, got, want in zip(("dq", "dk", "dv"), grads, exact, strict=True):
        error = (got.double() - want.double()).norm() / want.double().norm()
        if not error <= 0.02:
            raise RuntimeError(f"{name}: {tensor} must be within 2%, got {float(error):.2%}")


def inputs(batch, nheads, n, d, device, dtype):
    return [torch.randn(batch, nheads, n, d, device=device, dtype=dtype) for _ in range(4)]


def check_small(device, dtype, causal, tile):
    """Hold every implementation against the float64 oracle, on lengths that no tile divides."""
    q, k, v, dout = inputs(1, 2, 200, HEAD_DIM, device, dtype)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(reference.attention(*exact, causal=causal), exact, dout.double())
    for name, call in calls_of(q, k, v, dout, causal, tile).items():
        check(name, call(), want)


# --- bits ----------------------------------------------------------------------------------------------------------


def compare_runs(call, runs):
    """Return how the results of further runs differ from the first run's."""
    first, differ, share, spread = call(), [0, 0, 0], 0.0, 0.0
    for _ in range(runs - 1):
        again = call()
        for index, (a, b) in enumerate(zip(first, again, strict=True)):
            differ[index] += not torch.equal(a, b)
        share = float((first[0] != again[0]).float().mean())
        spread = max(spread, float((first[0].float() - again[0].float()).abs().max() / first[0].abs().max()))
    names = {f"differ_{name}": count for name, count in zip(("dq", "dk", "dv"), differ, strict=True)}
    return {"runs": runs, **names, "share_dq": share, "spread_dq": spread}


def best_tile(device, dtype, n, rounds):
    """Return the fastest of TILES at one length, not causal."""
    if device == "cpu":
        return tiles.Tile(32, 32, 4, 1)
    q, k, v, dout = inputs(TOKENS // n, WIDTH // HEAD_DIM, n, HEAD_DIM, device, dtype)
    with torch.no_grad():
        out, lse = flash_attention(q, k, v, return_lse=True)
    calls = {tile: lambda tile=tile: backward_atomic(q, k, v, out, lse, dout, tile=tile) for tile in TILES}
    times = {tile: bench.percentiles(ms)[1] for tile, ms in bench.time_in_turns(calls, rounds).items()}
    for tile, p50 in times.items():
        print(f"one pass, {tile}: {p50:.2f} ms", file=sys.stderr)
    return min(times, key=times.get)


def run_shape(batch, nheads, n, d, causal, device, dtype, tile, rounds, runs):
    q, k, v, dout = inputs(batch, nheads, n, d, device, dtype)
    calls = calls_of(q, k, v, dout, causal, tile)
    want = calls["fa2"]()
    for name, call in calls.items():
        check(name, call(), want)
    flops = 10 * batch * nheads * n * n * d / (2 if causal else 1)
    shape = {"pass": "bwd", "head_dim": d, "causal": int(causal), "seqlen_q": n, "seqlen_k": n, "batch": batch}
    shape |= {"nheads": nheads, "nheads_kv": nheads, "dtype": {torch.bfloat16: "bf16"}.get(dtype, "fp32")}
    rows = []
    for name, ms in bench.time_in_turns(calls, rounds).items():
        p20, p50, p80 = bench.percentiles(ms)
        row = {**shape, "impl": name, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "tflops": flops / p50 / 1e9}
        rows.append(row | compare_runs(calls[name], runs))
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        raise RuntimeError("this benchmark needs a GPU; --smoke runs tiny shapes on the CPU")

    names = bench.machine(options.commit)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    tokens, width, seqlens, rounds, runs = TOKENS, WIDTH, SEQLENS, options.rounds, options.runs
    if options.smoke:
        tokens, width, seqlens, rounds, runs = 64, HEAD_DIM, (64,), 1, 2
    torch.manual_seed(0)
    started = time.perf_counter()
    tile = best_tile(device, dtype, seqlens[len(seqlens) // 2], 5)
    rows = []
    for causal in (False, True):
        check_small(device, dtype, causal, tile)
        for n in seqlens:
            rows += run_shape(tokens // n, width // HEAD_DIM, n, HEAD_DIM, causal, device, dtype, tile, rounds, runs)
            print(f"causal {causal}, seqlen {n}: done after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    out = options.out or bench.results_path("backward", names["gpu"])
    bench.write_results(out, [{**row, **names} for row in rows], FIELDS)
    print(out)


if __name__ == "__main__":
    main()
