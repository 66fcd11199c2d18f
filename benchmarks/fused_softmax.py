"""Time the softmax of each row as one kernel, in pieces and as four kernels, beside PyTorch's, on the same inputs.

Needs PyTorch, Triton and a GPU. The whole run takes well under half a minute; the recorded file is made with

    PYTHONPATH=. python benchmarks/fused_softmax.py --commit $(git rev-parse --short HEAD)

    --out FILE     the CSV to write; default results/<gpu>/fused_softmax.csv beside this script
    --commit TEXT  the commit to record; default: what git says, or empty where git is not there
    --rounds N     timed rounds of each shape (default 30): one round runs every implementation once, in turn
    --smoke        tiny shapes where kernels are interpreted: exercises the code, measures nothing of interest

The long format of the course: seqlen_q rows of seqlen_k scores in bf16. gb_per_s counts the compulsory bytes for all of
them, each score read once and each weight written once, so that it compares speeds and not traffic.

    fused        flashlib's softmax: one kernel, a row is one block
    pieces       the same with blocks of 1024: a row is read twice
    unfused      flashlib's softmax_unfused: four kernels
    torch        torch.softmax, PyTorch's own fused kernel
    torch_ops    the formula in PyTorch: amax, subtract, exp, sum, divide, a kernel each
    copy         one read and one write of the same bytes: the ceiling
"""

import argparse
import sys
import time
from pathlib import Path

# Before PyTorch: where there is no GPU it switches Triton's interpreter on, before anything else imports Triton.
from flashlib import device  # isort: skip

import torch

from flashlib import bench
from flashlib.fused_softmax import softmax, softmax_unfused

# 2^28 scores, 512 MiB in bf16: larger than any L2. The last shape fits in the 50 MB of an H200's.
SHAPES = [(2**20, 256), (2**18, 1024), (2**16, 4096), (2**15, 8192), (2**12, 1024)]
FIELDS = [
    *("pass", "head_dim", "causal", "seqlen_q", "seqlen_k", "batch", "nheads", "nheads_kv", "dtype", "impl"),
    *("ms_p20", "ms_p50", "ms_p80", "tflops", "gb_per_s"),
]


def torch_ops(s):
    e = torch.exp(s - s.amax(dim=1, keepdim=True))
    return e / e.sum(dim=1, keepdim=True)


def implementations(s):
    target = torch.empty_like(s)
    # Worked out here: what Python does inside of a timed call may be timed with it.
    piece = min(1024, device.triton.next_power_of_2(s.shape[1]) // 2)
    return {
        "fused": lambda: softmax(s),
        "pieces": lambda: softmax(s, block=piece),
        "unfused": lambda: softmax_unfused(s),
        "torch": lambda: torch.softmax(s, dim=1),
        "torch_ops": lambda: torch_ops(s),
        "copy": lambda: target.copy_(s),
    }


def check(name, p, exact):
    """Raise unless the first rows are as near as bfloat16 allows.

    Two roundings of 2^-9 each, of the exponential and of the weight; of PyTorch's operations four, the difference
    s - m, which may be 16, among them: 16 times 2^-9 in the exponent.
    """
    error = float((p[: len(exact)].double() - exact).norm() / exact.norm())
    limit = 0.05 if name == "torch_ops" else 0.01
    if not error <= limit:
        raise RuntimeError(f"{name} must be within {limit:.0%} of float64, got {error:.2%}")


def run_shape(rows, columns, rounds):
    torch.manual_seed(0)
    s = 2 * torch.randn(rows, columns, device=device.kernel_device(), dtype=torch.float32).to(torch.bfloat16)
    calls = implementations(s)
    exact = torch.softmax(s[:64].double(), dim=1)
    for name, function in calls.items():
        if name != "copy":
            check(name, function(), exact)
    out = []
    for name, ms in bench.time_in_turns(calls, rounds).items():
        p20, p50, p80 = bench.percentiles(ms)
        row = {"pass": "fwd", "seqlen_q": rows, "seqlen_k": columns, "dtype": "bf16", "impl": name}
        row |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "gb_per_s": 2 * s.numel() * s.element_size() / p50 / 1e6}
        out.append(row)
    return out


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    if not options.smoke and device.interpreting():
        raise RuntimeError("this benchmark needs a GPU; --smoke runs tiny shapes on the CPU")
    shapes, rounds = ([(5, 12), (3, 40)], 1) if options.smoke else (SHAPES, options.rounds)
    names = bench.machine(options.commit)
    started, rows = time.perf_counter(), []
    for shape in shapes:
        rows += run_shape(*shape, rounds)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(f"{shape[0]} rows of {shape[1]}: done after {time.perf_counter() - started:.0f} s", file=sys.stderr)
    out = options.out or bench.results_path("fused_softmax", names["gpu"])
    bench.write_results(out, [{**row, **names} for row in rows], FIELDS)
    print(out)


if __name__ == "__main__":
    main()
