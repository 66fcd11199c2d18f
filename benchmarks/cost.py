"""Time attention as separate kernels against attention as one fused kernel, on the same inputs in the same run.

Needs a GPU, PyTorch and an importable `flashlib`. The recorded file was made on one NVIDIA H200:

    PYTHONPATH=. python benchmarks/cost.py --out benchmarks/results/h200/cost.csv --commit $(git rev-parse --short HEAD)

    --out FILE     the CSV to write; default results/<gpu>/cost.csv beside this script
    --commit TEXT  the commit to record; default: what git says, or empty where git is not there
    --rounds N     timed rounds of each shape (default 20): one round runs every implementation once, in turn
    --smoke        tiny shapes on the CPU, one round: exercises the code, measures nothing of interest

The long format of the course, plus gb_per_s for what memory limits (each N x N array counted once per read and write)
and peak_bytes: the memory allocated at the peak of one call beyond what was allocated before, the output included.

    naive               matmul, softmax, matmul: three kernels (the scale rides along in the first product)
    naive_mask          a boolean causal mask between them, a pass of its own (masked_fill)
    naive_mask_dropout  and a dropout of the probabilities, a pass of its own
    fa2, fa2_mask, fa2_mask_dropout      the same in PyTorch's fused kernel, FlashAttention-2
    pass_qk, pass_scale, pass_mask, pass_softmax, pass_dropout, pass_pv      one pass of the naive form on its own
    ceiling_gemm        an 8192 x 8192 x 8192 product in bf16
    ceiling_copy        a copy of 1 GiB, the bytes read and the bytes written both counted

FLOPs are 4 b h N N d, halved for a causal fused call; the naive form computes all of them, masked or not, and its
tflops counts them all.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlib import bench

TOKENS = 16384
WIDTH = 2048
HEAD_DIMS = (64, 128)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DROPOUT = 0.1
FIELDS = [
    *("pass", "head_dim", "causal", "seqlen_q", "seqlen_k", "batch", "nheads", "nheads_kv", "dtype", "impl"),
    *("ms_p20", "ms_p50", "ms_p80", "tflops", "gb_per_s", "peak_bytes"),
]


# --- the naive form, pass by pass ----------------------------------------------------------------------------------


def qk(q, k, scale):
    """Compute scale·QKᵀ in one kernel: the scale rides along in the product's epilogue."""
    b, h, n, d = q.shape
    empty = q.new_empty(())
    s = torch.baddbmm(empty, q.view(b * h, n, d), k.view(b * h, n, d).transpose(1, 2), beta=0, alpha=scale)
    return s.view(b, h, n, n)


def softmax(s):
    return torch.softmax(s, dim=-1)


def pv(p, v):
    return torch.matmul(p, v)


def mask_scores(s, hidden):
    return s.masked_fill(hidden, float("-inf"))


def dropout(p):
    return F.dropout(p, DROPOUT, training=True)


def naive(q, k, v, scale):
    s = qk(q, k, scale)
    p = softmax(s)
    return pv(p, v)


def naive_mask(q, k, v, scale, hidden):
    s = qk(q, k, scale)
    s = mask_scores(s, hidden)
    p = softmax(s)
    return pv(p, v)


def naive_mask_dropout(q, k, v, scale, hidden):
    s = qk(q, k, scale)
    s = mask_scores(s, hidden)
    p = softmax(s)
    p = dropout(p)
    return pv(p, v)


def fused(q, k, v, scale, causal, dropout_p=0.0):
    backend = SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=causal, scale=scale)


# --- checks before clocks ------------------------------------------------------------------------------------------


def exact(q, k, v, scale, hidden, rows):
    """Compute the first query rows of the first head in float64."""
    q, k, v = q[0, 0, :rows].double(), k[0, 0].double(), v[0, 0].double()
    s = scale * (q @ k.T)
    if hidden is not None:
        s = s.masked_fill(hidden[0, 0, :rows], float("-inf"))
    return torch.softmax(s, dim=-1) @ v


def check(name, out, reference):
    """Raise unless out is as near as bfloat16 allows.

    Scores, probabilities and output are rounded to 8 bits each, by at most 2^-9 of their size. A probability errs by
    as much as its score does, and scores are mostly under 4: six times 2^-9 in all, under 2% of the output's norm.
    """
    error = (out.double() - reference).norm() / reference.norm()
    if not error <= 0.02:
        raise RuntimeError(f"{name} must be within 2% of float64, got {float(error):.2%}")


def check_all(q, k, v, scale, hidden):
    rows = min(128, q.shape[2])
    for name, out, seen in [
        ("naive", naive(q, k, v, scale), None),
        ("fa2", fused(q, k, v, scale, False), None),
        ("naive_mask", naive_mask(q, k, v, scale, hidden), hidden),
        ("fa2_mask", fused(q, k, v, scale, True), hidden),
    ]:
        check(name, out[0, 0, :rows], exact(q, k, v, scale, seen, rows))
    ones = torch.ones_like(v)
    for name, out in [
        ("naive_mask_dropout", naive_mask_dropout(q, k, ones, scale, hidden)),
        ("fa2_mask_dropout", fused(q, k, ones, scale, True, DROPOUT)),
    ]:
        # Kept probabilities are divided by 1 - p: with values of one the outputs average one, and they spread.
        mean, spread = float(out.float().mean()), float(out.float().std())
        if not (abs(mean - 1) < 0.05 and spread > 1e-4):
            raise RuntimeError(f"{name} must average 1 with some spread, got mean {mean:.4f}, spread {spread:.2e}")


# --- memory --------------------------------------------------------------------------------------------------------


def peak_bytes(function):
    """Return the memory one call allocates at its peak, in bytes; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = function()
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated() - before


# --- one shape -----------------------------------------------------------------------------------------------------


def run_shape(batch, nheads, n, d, device, rounds):
    """Return the rows of one shape, without the columns that name the machine."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, nheads, n, d, device=device, dtype=torch.bfloat16) for _ in range(3))
    hidden = torch.ones(n, n, device=device, dtype=torch.bool).triu(1)[None, None]
    scale = d**-0.5
    check_all(q, k, v, scale, hidden)

    whole = {
        "naive": lambda: naive(q, k, v, scale),
        "fa2": lambda: fused(q, k, v, scale, False),
        "naive_mask": lambda: naive_mask(q, k, v, scale, hidden),
        "fa2_mask": lambda: fused(q, k, v, scale, True),
        "naive_mask_dropout": lambda: naive_mask_dropout(q, k, v, scale, hidden),
        "fa2_mask_dropout": lambda: fused(q, k, v, scale, True, DROPOUT),
    }
    peaks = {name: peak_bytes(function) for name, function in whole.items()}
    s = qk(q, k, scale)
    p = softmax(s)
    parts = {
        "qk": lambda: qk(q, k, scale),
        "scale": lambda: s * scale,
        "mask": lambda: mask_scores(s, hidden),
        "softmax": lambda: softmax(s),
        "dropout": lambda: dropout(p),
        "pv": lambda: pv(p, v),
    }
    times = bench.time_in_turns({**whole, **parts}, rounds)

    flops = 4 * batch * nheads * n * n * d
    square, narrow = batch * nheads * n * n * q.itemsize, batch * nheads * n * d * q.itemsize
    moved = {"qk": square + 2 * narrow, "pv": square + 2 * narrow}
    shape = {"pass": "fwd", "head_dim": d, "seqlen_q": n, "seqlen_k": n, "batch": batch, "nheads": nheads}
    shape |= {"nheads_kv": nheads, "dtype": "bf16"}
    rows = []
    for name, ms in times.items():
        p20, p50, p80 = bench.percentiles(ms)
        row = {**shape, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80}
        if name in whole:
            counted = flops / 2 if name.startswith("fa2_") else flops
            row |= {"impl": name, "causal": int("mask" in name), "tflops": counted / p50 / 1e9}
            row["peak_bytes"] = peaks[name]
        else:
            row |= {"impl": f"pass_{name}", "causal": 0, "gb_per_s": moved.get(name, 2 * square) / p50 / 1e6}
            if name in moved:
                row["tflops"] = flops / 2 / p50 / 1e9
        rows.append(row)
    return rows


def run_ceilings(device, rounds, side, elements):
    """Return rows for what this machine reaches at best: a large matrix product and a copy."""
    torch.manual_seed(0)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(elements, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = bench.time_in_turns({"gemm": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds)
    rows = []
    for name, ms in times.items():
        p20, p50, p80 = bench.percentiles(ms)
        row = {"pass": "fwd", "dtype": "bf16", "impl": f"ceiling_{name}"}
        row |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80}
        if name == "gemm":
            row["tflops"] = 2 * side**3 / p50 / 1e9
        else:
            row["gb_per_s"] = 2 * elements * source.itemsize / p50 / 1e6
        rows.append(row)
    return rows


# --- all of it -----------------------------------------------------------------------------------------------------


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        raise RuntimeError("this benchmark needs a GPU; --smoke runs tiny shapes on the CPU")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = bench.machine(options.commit)
    tokens, width, head_dims, seqlens, rounds = TOKENS, WIDTH, HEAD_DIMS, SEQLENS, options.rounds
    side, elements = 8192, 2**29
    if options.smoke:
        tokens, width, head_dims, seqlens, rounds, side, elements = 256, 128, (64,), (64, 128), 1, 64, 4096
    started = time.perf_counter()
    rows = run_ceilings(device, rounds, side, elements)
    for d in head_dims:
        for n in seqlens:
            # Three N x N arrays in bf16, one byte mask and the smaller tensors must fit.
            needed = tokens * n * (width // d) * 8
            if device == "cuda" and needed > torch.cuda.mem_get_info()[0]:
                print(f"head_dim {d}, seqlen {n}: skipped, {needed / 2**30:.0f} GiB do not fit", file=sys.stderr)
                continue
            rows += run_shape(tokens // n, width // d, n, d, device, rounds)
            if device == "cuda":
                torch.cuda.empty_cache()
            print(f"head_dim {d}, seqlen {n}: done after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    out = options.out or bench.results_path("cost", names["gpu"])
    bench.write_results(out, [{**row, **names} for row in rows], FIELDS)
    print(out)


if __name__ == "__main__":
    main()
