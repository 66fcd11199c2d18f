"""Measurements: every timing on a page comes from a CSV that names its machine and versions; this module makes them.

The files are `benchmarks/results/<gpu>/<subject>.csv`. `python -m flashlib.bench attention` times this library's
kernels beside those of others that are found on your GPU, in one run, in turns, and writes such a file; `python -m
flashlib.bench host` times what a small call costs the host.
"""

import argparse
import csv
import datetime
import itertools
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
TOKENS = 16384
WIDTH = 2048
FIELDS = [
    "pass",
    "head_dim",
    "causal",
    "seqlen_q",
    "seqlen_k",
    "batch",
    "nheads",
    "nheads_kv",
    "dtype",
    "impl",
    "ms_p20",
    "ms_p50",
    "ms_p80",
    "tflops",
    "gpu",
    "driver",
    "torch",
    "triton",
    "commit",
    "date",
]
_TEXT = {"feature", "kernel", "pass", "dtype", "tensor", "impl", "unit", "source", *FIELDS[-6:]}


def read_results(subject, gpu="h200"):
    """Read one recorded benchmark.

    Args:
        subject: the file's name without `.csv`, such as "cost".
        gpu: the machine's folder under `benchmarks/results`.

    Returns:
        list of dict, one a row: numbers as int or float, an empty field as None, names as str.

    Raises:
        ValueError: there is no such file; the message lists those there are.
    """
    path = RESULTS / gpu / f"{subject}.csv"
    if not path.is_file():
        known = sorted(p.relative_to(RESULTS).with_suffix("").as_posix() for p in RESULTS.glob("*/*.csv"))
        raise ValueError(f"subject must name a recorded result (there are {known}), got {gpu}/{subject}")
    with path.open(newline="") as file:
        return [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(key, text):
    if text == "":
        return None
    if key in _TEXT:
        return text
    try:
        return int(text)
    except ValueError:
        return float(text)


# --- what is compared ------------------------------------------------------------------------------------------------


def implementations(dtype, causal, seqlen):
    """Return what can be timed here: dict, name -> function (q, k, v) -> out, all in (batch, nheads, seqlen, head_dim).

    Those that take another layout get a view of it: a transpose copies nothing.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from flashlib.attention import flash_attention

    def sdpa(backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return run

    found = {"flashlib_portable": lambda q, k, v: flash_attention(q, k, v, causal=causal)}
    if dtype == "fp32":
        return found | {"mem_efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION)}
    found |= {"fa2": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    found["flex"] = _flex(torch, causal, seqlen)
    for name, module in (("fa3", "fa3_fwd_interface"), ("fa4", "flash_attn.cute.interface")):
        try:
            function = __import__(module, fromlist=["flash_attn_func"]).flash_attn_func
        except Exception:
            # Not installed, or not for this GPU: the table says so by leaving it out.
            continue
        found[name] = _other_layout(function, causal)
    return found


def _flex(torch, causal, seqlen):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A fresh compilation for each shape: after eight recompilations it would fall back to an unfused path.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device="cuda") if causal else None
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _other_layout(function, causal):
    def run(q, k, v):
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


# --- measuring -------------------------------------------------------------------------------------------------------


def check_results(results, q, k, v, dout, causal, tolerance):
    """Return the names whose results agree with float32 attention in the last head, and the errors of the others.

    Args:
        results: dict, name -> tuple of tensors (out, dq, dk, dv), or (out,).
        q, k, v, dout: inputs; causal as in attention; tolerance: of the norm of the error over the norm of the result.
    """
    import torch

    leaves = [x[-1, -1].detach().float().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].T * q.shape[3] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(s, -1) @ leaves[2]
    exact = (out.detach(), *torch.autograd.grad(out, leaves, dout[-1, -1].float()))
    good, bad = [], {}
    for name, tensors in results.items():
        errors = [((x[-1, -1].float() - y).norm() / y.norm()).item() for x, y in zip(tensors, exact, strict=False)]
        if all(error <= tolerance for error in errors):
            good.append(name)
        else:
            bad[name] = errors
    return good, bad


def time_in_turns(functions, rounds=20, warmups=3):
    """Return dict, name -> list of times in ms, one a round; each round runs every function once.

    Events on the GPU's own clock, because a launch returns before the kernel has run. Before each run 1 GiB is
    overwritten
    several times: that takes other data into the L2, and it keeps the GPU busy until the host has queued the run.
    """
    import torch

    other = torch.empty(2**30, dtype=torch.int8, device="cuda")
    times = {name: [] for name in functions}
    for round_ in range(-warmups, rounds):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(4):
                other.zero_()
            start.record()
            function()
            end.record()
            end.synchronize()
            if round_ >= 0:
                times[name].append(start.elapsed_time(end))
    return times


def attention_flops(backward, batch, nheads, seqlen, head_dim, causal):
    """Return the FLOPs of a pass by the usual count: two products forward, five backward, half of them if causal."""
    return (2.5 if backward else 1) * 4 * batch * nheads * seqlen**2 * head_dim / (2 if causal else 1)


def attention_rows(head_dim, causal, seqlen, dtype, rounds=20, only=None):
    """Time forward and backward of one shape; yields rows of the CSV as dicts, without the machine's columns."""
    import torch

    torch.manual_seed(0)
    batch, nheads = max(1, TOKENS // seqlen), WIDTH // head_dim
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    q, k, v, dout = (torch.randn(batch, nheads, seqlen, head_dim, device="cuda", dtype=kind) for _ in range(4))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    forwards, backwards, results = {}, {}, {}
    for name, function in implementations(dtype, causal, seqlen).items():
        if only and name not in only:
            continue
        try:
            results[name] = (function(q, k, v).detach(),)
            forwards[name] = lambda function=function: function(q, k, v)
            if name != "fa3":
                out = function(*leaves)
                backwards[name] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
                results[name] = (out.detach(), *backwards[name]())
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
            backwards.pop(name, None)
    good, bad = check_results(results, q, k, v, dout, causal, 1e-4 if dtype == "fp32" else 2e-2)
    del results
    for name, errors in bad.items():
        print(f"{name} is not timed: its results are wrong, relative errors {errors}", file=sys.stderr)
    for pass_, functions in (("fwd", forwards), ("bwd", backwards)):
        times = time_in_turns({name: f for name, f in functions.items() if name in good}, rounds)
        flops = attention_flops(pass_ == "bwd", batch, nheads, seqlen, head_dim, causal)
        for name, ms in times.items():
            p20, p50, p80 = (sorted(ms)[int(part * (len(ms) - 1))] for part in (0.2, 0.5, 0.8))
            yield dict(
                zip(
                    FIELDS,
                    [pass_, head_dim, int(causal), seqlen, seqlen, batch, nheads, nheads, dtype, name]
                    + [f"{x:.4f}" for x in (p20, p50, p80)]
                    + [f"{flops / p50 / 1e9:.1f}"],
                    strict=False,
                )
            )


def host_microseconds(calls=2000):
    """Return dict, name -> µs of the host's time for a small forward call: batch 1, nheads 8, seqlen 128, no grad.

    The queue to the GPU is emptied between blocks of calls, so that the host never waits for it.
    """
    import torch

    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    functions = implementations("bf16", False, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for function in functions.values():
            function(q, k, v)
        with torch.cuda.graph(graph):
            functions["flashlib_portable"](q, k, v)
        functions["flashlib_portable_graph"] = lambda *_: graph.replay()
        blocks = {name: [] for name in functions}
        for _ in range(calls // 50):
            for name, function in functions.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    function(q, k, v)
                blocks[name].append((time.perf_counter() - start) / 50 * 1e6)
    return {name: statistics.median(times) for name, times in blocks.items()}


def machine():
    """Return the columns that say where and when: gpu, driver, torch, triton, commit, date."""
    import torch
    import triton

    def first_line(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return ""

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
    }


def _table(rows):
    """Print TFLOP/s, a line a shape, a column an implementation."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    print("pass  d   causal seqlen " + "".join(f"{name[:11]:>12}" for name in names))
    for key, group in itertools.groupby(rows, lambda row: tuple(row[f] for f in FIELDS[:4])):
        speeds = {row["impl"]: row["tflops"] for row in group}
        print(f"{key[0]:<5}{key[1]:<5}{key[2]:<6}{key[3]:>7} " + "".join(f"{speeds.get(n, '-'):>12}" for n in names))


def main():
    parser = argparse.ArgumentParser(prog="python -m flashlib.bench", description=__doc__.splitlines()[0])
    parser.add_argument("subject", choices=["attention", "host"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--causal", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--impls", nargs="+", default=None, help="only these; by default all that are found")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit", default=None, help="the commit to record; by default what git says")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    where = machine() | ({"commit": args.commit} if args.commit else {})
    out = args.out or RESULTS / where["gpu"].lower().replace("nvidia ", "").replace(" ", "_") / f"{args.subject}.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        if args.subject == "host":
            writer = csv.DictWriter(file, ["impl", "us_p50", *where])
            writer.writeheader()
            for name, us in host_microseconds().items():
                writer.writerow({"impl": name, "us_p50": f"{us:.1f}", **where})
                print(f"{name:<26}{us:8.1f} µs a call on the host")
            return
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        rows = []
        shapes = list(itertools.product(args.dtypes, args.head_dims, map(bool, args.causal), args.seqlens))
        for i, (dtype, head_dim, causal, seqlen) in enumerate(shapes):
            bar = "#" * (30 * i // len(shapes))
            print(f"\r[{bar:<30}] {i + 1}/{len(shapes)}", end="", file=sys.stderr, flush=True)
            for row in attention_rows(head_dim, causal, seqlen, dtype, args.rounds, args.impls):
                rows.append(row)
                writer.writerow(row | where)
            file.flush()
    print(file=sys.stderr)
    rows.sort(key=lambda row: (row["dtype"], row["pass"] == "bwd", row["head_dim"], row["causal"], row["seqlen_q"]))
    _table(rows)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
