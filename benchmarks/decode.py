"""Time one new token a sequence against a cache of keys and values: this library's decoding, and what others offer.

Needs a GPU, PyTorch and Triton; `flashlib` must be importable. The recorded file was made on one NVIDIA H200:

    python benchmarks/decode.py --out benchmarks/results/h200/decode.csv --commit $(git rev-parse --short HEAD)

    --out FILE     the CSV to write; default results/<gpu>/decode.csv beside this script
    --commit TEXT  the commit to record; default: what git says, or empty where git is not there
    --rounds N     timed rounds of each shape (default 15): one round runs every implementation once, in turn
    --smoke        tiny shapes on the CPU: exercises the code, measures nothing

    flashlib_portable     flashlib.flash_decode, the cache in one piece a sequence
    flashlib_paged_16     the same, the cache in pages of 16 tokens, shuffled; flashlib_paged_64 likewise
    fa3                   FlashAttention-3 with a KV cache (PyPI fa3-fwd), the best of its split counts in SPLITS
    cudnn, fa2            PyTorch's SDPA, CUDNN_ATTENTION and FLASH_ATTENTION, with enable_gqa
    cudnn_rows, fa2_rows  the same, the four query heads of a group given as four queries of one head

Every implementation is captured in a CUDA graph that decodes against several caches one after the other, more than the
L2 holds together; a time is that of one replay over the number of caches. gb_per_s counts K and V once, nothing else.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashlib import bench
from flashlib.decode import flash_decode

NHEADS, NHEADS_KV, HEAD_DIM = 32, 8, 128
# (batch, context)
SHAPES = [(1, 8192), (1, 131072), (8, 32768), (64, 8192)]
PAGES = (16, 64)
SPLITS = (0, 8, 16, 32, 64)
# Bytes of all caches of one graph, at least: several times the L2.
ROTATED_BYTES = 400e6
FIELDS = [
    *("pass", "head_dim", "causal", "seqlen_q", "seqlen_k", "batch", "nheads", "nheads_kv", "dtype", "impl"),
    *("ms_p20", "ms_p50", "ms_p80", "gb_per_s", "gpu", "driver", "torch", "triton", "commit", "date"),
]


class Case:
    """The caches of one shape, each in one piece and in shuffled pages, and the queries that go with them."""

    def __init__(self, batch, context, count, device, dtype):
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
        self.q = [torch.randn(batch, NHEADS, 1, HEAD_DIM, device=device, dtype=dtype) for _ in range(count)]
        self.k, self.v = (
            [torch.randn(batch, NHEADS_KV, context, HEAD_DIM, device=device, dtype=dtype) for _ in range(count)]
            for _ in range(2)
        )
        self.bytes = 2 * self.k[0].numel() * self.k[0].element_size()

    def paged(self, page):
        """Return per cache (k, v, block_table): (num_pages, nheads_kv, page, head_dim), in random order."""
        batch, nheads_kv, context, head_dim = self.k[0].shape
        made = []
        for k, v in zip(self.k, self.v, strict=True):
            order = torch.randperm(batch * context // page, device=k.device)
            table = torch.empty_like(order)
            table[order] = torch.arange(order.numel(), device=k.device)
            pools = []
            for x in (k, v):
                pages = x.view(batch, nheads_kv, context // page, page, head_dim).transpose(1, 2).flatten(0, 1)
                pools.append(pages[order])
            made.append((*pools, table.view(batch, -1).int()))
        return made


def sdpa(backend, rows):
    def run(q, k, v):
        with sdpa_kernel(backend):
            if rows:
                out = F.scaled_dot_product_attention(q.view(q.shape[0], NHEADS_KV, -1, HEAD_DIM), k, v)
                return out.reshape(q.shape)
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def calls_of(case):
    """Return {name: function (i) -> out of cache i}."""
    pages = {page: case.paged(page) for page in PAGES}
    calls = {"flashlib_portable": lambda i: flash_decode(case.q[i], case.k[i], case.v[i], case.lengths)}
    for page in PAGES:

        def paged(i, page=page):
            k, v, table = pages[page][i]
            return flash_decode(case.q[i], k, v, case.lengths, block_table=table)

        calls[f"flashlib_paged_{page}"] = paged
    if not case.q[0].is_cuda:
        return calls
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        for rows in (False, True):
            run = sdpa(backend, rows)
            calls[f"{name}_rows" if rows else name] = lambda i, run=run: run(case.q[i], case.k[i], case.v[i])
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache
    except ImportError:
        return calls
    for splits in SPLITS:

        def fa3(i, splits=splits):
            q, k, v = (x[i].transpose(1, 2) for x in (case.q, case.k, case.v))
            out = flash_attn_with_kvcache(q, k, v, cache_seqlens=case.lengths, causal=True, num_splits=splits)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        calls[f"fa3 {splits}"] = fa3
    return calls


def error_of(case, out, i):
    """Return the relative error of one result against float64, in the first and the last sequence."""
    worst = 0.0
    for b in {0, out.shape[0] - 1}:
        q = case.q[i][b].view(NHEADS_KV, -1, HEAD_DIM).double()
        for h in range(NHEADS_KV):
            p = torch.softmax(q[h] @ case.k[i][b, h].double().T * HEAD_DIM**-0.5, -1)
            want = p @ case.v[i][b, h].double()
            got = out[b].view(NHEADS_KV, -1, HEAD_DIM)[h].double()
            worst = max(worst, ((got - want).norm() / want.norm()).item())
    return worst


def captured(call, count):
    """Return a CUDA graph of a call on each of `count` caches."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    return graph


def run_shape(batch, context, device, dtype, rounds, calls_of=calls_of):
    """Yield rows of the CSV, without the machine's columns."""
    bytes_ = 4 * batch * NHEADS_KV * context * HEAD_DIM
    count = max(2, round(ROTATED_BYTES / bytes_)) if device == "cuda" else 2
    case = Case(batch, context, count, device, dtype)
    times = {}
    graphs = {}
    for name, call in calls_of(case).items():
        try:
            error = max(error_of(case, call(i), i) for i in (0, count - 1))
            if not error <= 0.01:
                raise RuntimeError(f"its results are wrong, relative error {error:.2%}")
            graphs[name] = captured(call, count).replay if device == "cuda" else None
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
    if device == "cuda":
        times = bench.time_in_turns(graphs, rounds)
    times = {name: [ms / count for ms in found] for name, found in times.items()}
    # FlashAttention-3 is given the split count that suits it best.
    tried = [name for name in times if name.startswith("fa3 ")]
    if tried:
        best = min(tried, key=lambda name: statistics.median(times[name]))
        print(f"batch {batch}, context {context}: the best of {tried} is {best}")
        times = {name: found for name, found in times.items() if name not in tried} | {"fa3": times[best]}
    for name, found in times.items():
        p20, p50, p80 = (sorted(found)[int(part * (len(found) - 1))] for part in (0.2, 0.5, 0.8))
        yield {
            "pass": "fwd", "head_dim": HEAD_DIM, "causal": 1, "seqlen_q": 1, "seqlen_k": context, "batch": batch,
            "nheads": NHEADS, "nheads_kv": NHEADS_KV, "dtype": "bf16", "impl": name, "ms_p20": f"{p20:.5f}",
            "ms_p50": f"{p50:.5f}", "ms_p80": f"{p80:.5f}", "gb_per_s": f"{bytes_ / p50 / 1e6:.0f}",
        }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.smoke:
        list(run_shape(2, 192, "cpu", torch.float32, 1))
        print("the results are right; nothing was timed")
        return
    if not torch.cuda.is_available():
        raise RuntimeError("this benchmark needs a GPU; --smoke runs tiny shapes on the CPU")
    where = bench.machine() | ({"commit": options.commit} if options.commit else {})
    folder = "h200" if "H200" in where["gpu"] else where["gpu"].lower().replace(" ", "_")
    out = options.out or bench.RESULTS / folder / "decode.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for batch, context in SHAPES:
            for row in run_shape(batch, context, "cuda", torch.bfloat16, options.rounds):
                writer.writerow(row | where)
                us = float(row["ms_p50"]) * 1e3
                print(f"{batch:>3} {context:>7} {row['impl']:<20} {us:8.1f} µs {row['gb_per_s']:>5} GB/s")
            file.flush()
            torch.cuda.empty_cache()
    print(f"written to {out} after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
