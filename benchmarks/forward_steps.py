"""Time each step of the forward kernel (`flashlib/forward_steps.py`) on the same inputs in the same run.

Needs a GPU; the recorded file was made on one NVIDIA H200, from the repository's root:

    PYTHONPATH=. python benchmarks/forward_steps.py --out benchmarks/results/h200/forward_steps.csv

    --out FILE     the CSV to write; default results/<gpu>/forward_steps.csv beside this script
    --commit TEXT  the commit to record; default: what git says, or empty where git is not there
    --rounds N     timed rounds of each shape (default 15): one round runs every implementation once, in turn
    --smoke        tiny shapes in the interpreter, one round: exercises the code, measures nothing of interest

The long format of the course, plus block_m, block_n, num_warps, num_stages. The values of `impl`:

    step_two_loops … step_skip   the steps, all with the same plain tile: 64 × 64, 4 warps, no pipelining
    step_pipelined               the last step, with three tiles of the loop in flight
    flashlib_portable            flashlib's op (its loop reads through the copy engine where the GPU has one)
    variant                      the last step with one launch option changed at a time, at seqlen 4096, not causal
    fa2                          PyTorch's FlashAttention-2

Beside batch·seqlen = 16384 there are rows with batch 1 for step_two_loops and step_parallel. FLOPs are 4 b h N N d,
halved if causal. Results are held against float64 before anything is timed.
"""

import argparse
import functools
import sys
import time
from pathlib import Path

# Before PyTorch: where there is no GPU it switches Triton's interpreter on, before anything else imports Triton.
from flashlib import device, forward_steps  # isort: skip

import torch
from cost import FIELDS, fused

from flashlib import bench
from flashlib.attention import flash_attention

TOKENS, WIDTH = 16384, 2048
HEAD_DIMS = (64, 128)
SEQLENS = (1024, 4096, 16384)
BATCH_1 = (512, 1024, 2048, 4096, 8192)
PLAIN = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1}
# The first is the base; each of the others changes one thing. A tile of 64 queries is too small for 8 warps.
BASE = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}
CHANGES = (
    {},
    {"num_stages": 1},
    {"num_stages": 2},
    {"num_stages": 4},
    {"num_warps": 4},
    {"block_m": 64, "num_warps": 4},
    {"block_n": 32},
    {"block_n": 128},
)
TILE_FIELDS = ["block_m", "block_n", "num_warps", "num_stages"]
COLUMNS = [*(name for name in FIELDS if name != "peak_bytes"), *TILE_FIELDS]


# --- what is timed -------------------------------------------------------------------------------------------------


def run_step(q, k, v, step, causal, options):
    return forward_steps.forward(q, k, v, step=step, causal=causal, **options)


def run_library(q, k, v, causal):
    with torch.no_grad():
        return flash_attention(q, k, v, causal=causal)


def implementations(q, k, v):
    """Return {(impl, causal): (call, tile options)} of one shape."""
    calls = {}
    for step in list(forward_steps.STEPS)[1:]:
        for causal in (False, True):
            # The last step only knows more than the one before when there is a mask.
            if causal and not forward_steps.has(step, "causal"):
                continue
            calls[f"step_{step}", causal] = functools.partial(run_step, q, k, v, step, causal, PLAIN), PLAIN
    pipelined = PLAIN | {"num_stages": 3}
    for causal in (False, True):
        calls["step_pipelined", causal] = functools.partial(run_step, q, k, v, "skip", causal, pipelined), pipelined
        calls["flashlib_portable", causal] = functools.partial(run_library, q, k, v, causal), {}
        calls["fa2", causal] = functools.partial(fused, q, k, v, q.shape[3] ** -0.5, causal), {}
    return calls


def batch_1(q, k, v):
    return {
        (f"step_{step}", False): (functools.partial(run_step, q, k, v, step, False, PLAIN), PLAIN)
        for step in ("two_loops", "parallel")
    }


def variants(q, k, v):
    """Return {(name, False): (call, tile options)}; one that this GPU cannot hold is left out."""
    calls = {}
    for change in CHANGES:
        options = BASE | change
        call = functools.partial(run_step, q, k, v, "skip", False, options)
        try:
            call()
        except Exception as error:
            print(f"variant {options} left out: {type(error).__name__}", file=sys.stderr)
            continue
        calls["variant " + " ".join(map(str, options.values())), False] = call, options
    return calls


# --- checks before clocks ------------------------------------------------------------------------------------------


def check(name, out, q, k, v, causal):
    """Raise unless out is as near to float64 as bfloat16 allows, in the first and the last head, first and last rows.

    The probabilities and the output are rounded to 8 bits each, by at most 2^-9 of their size: 1% of the output's norm
    leaves room for both.
    """
    rows = min(128, q.shape[2])
    for b, h in ((0, 0), (-1, -1)):
        for first in (0, q.shape[2] - rows):
            s = q.shape[3] ** -0.5 * (q[b, h, first : first + rows].double() @ k[b, h].double().T)
            if causal:
                hidden = torch.ones_like(s, dtype=torch.bool).triu(1 + first + k.shape[2] - q.shape[2])
                s = s.masked_fill(hidden, float("-inf"))
            exact = torch.softmax(s, -1) @ v[b, h].double()
            error = (out[b, h, first : first + rows].double() - exact).norm() / exact.norm()
            if not error <= 0.01:
                raise RuntimeError(f"{name} must be within 1% of float64, got {float(error):.2%}")


# --- one shape -----------------------------------------------------------------------------------------------------


def run_shape(build, batch, nheads, n, d, rounds):
    """Return the rows of one shape, without the columns that name the machine; `build` makes its implementations."""
    torch.manual_seed(0)
    shape = batch, nheads, n, d
    q, k, v = (torch.randn(shape, device=device.kernel_device(), dtype=torch.bfloat16) for _ in range(3))
    calls = build(q, k, v)
    for (name, causal), (call, _) in calls.items():
        check(f"{name}, causal {causal}", call(), q, k, v, causal)
    times = bench.time_in_turns({key: call for key, (call, _) in calls.items()}, rounds)
    flops = 4 * batch * nheads * n * n * d
    rows = []
    for (name, causal), ms in times.items():
        p20, p50, p80 = bench.percentiles(ms)
        row = {"pass": "fwd", "head_dim": d, "causal": int(causal), "seqlen_q": n, "seqlen_k": n, "batch": batch}
        row |= {"nheads": nheads, "nheads_kv": nheads, "dtype": "bf16", "impl": name.split()[0]}
        row |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "tflops": flops / (1 + causal) / p50 / 1e9}
        options = calls[name, causal][1]
        rows.append(row | {field: options.get(field) for field in TILE_FIELDS})
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    on_gpu = device.kernel_device() == "cuda"
    if not options.smoke and not on_gpu:
        raise RuntimeError("this benchmark needs a GPU; --smoke runs tiny shapes in the interpreter")

    names = bench.machine(options.commit)
    tokens, width, rounds = TOKENS, WIDTH, options.rounds
    shapes = [(implementations, tokens // n, n, d) for d in HEAD_DIMS for n in SEQLENS]
    shapes += [(batch_1, 1, n, d) for d in HEAD_DIMS for n in BATCH_1]
    shapes += [(variants, tokens // 4096, 4096, d) for d in HEAD_DIMS]
    if options.smoke:
        tokens, width, rounds = 64, 64, 1
        shapes = [(implementations, 1, 64, 64), (batch_1, 1, 64, 64), (variants, 1, 64, 64)]
    started = time.perf_counter()
    rows = []
    for build, batch, n, d in shapes:
        rows += run_shape(build, batch, width // d, n, d, rounds)
        done = f"{time.perf_counter() - started:.0f} s"
        print(f"{build.__name__}, head_dim {d}, batch {batch}, seqlen {n}: done after {done}", file=sys.stderr)
    out = options.out or bench.results_path("forward_steps", names["gpu"])
    bench.write_results(out, [{**row, **names} for row in rows], COLUMNS)
    print(out)


if __name__ == "__main__":
    main()
