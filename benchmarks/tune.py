"""Search for the fastest tile of each attention kernel on this GPU, and print the table that `flashlib/tiles.py` holds.

Every candidate is compiled in a pool of processes first, so that Triton's cache on disk is warm; then all candidates
of one case are timed in turns, several rounds over, and the median decides. A candidate that the card cannot hold, or
that spills so much that it fails, is left out.

    python benchmarks/tune.py --kernels forward dkdv dq --head-dims 64 128 --dtypes bf16 --out tune.csv
"""

import argparse
import csv
import itertools
import multiprocessing
import statistics
import sys
import time

import torch

from flashlib import backward, bench, forward, tiles
from flashlib.options import Options
from flashlib.tiles import Tile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = 16384
WIDTH = 2048


def candidates(kernel, columns, itemsize, limit_bytes):
    """Return the tiles worth trying: those whose operands fit into shared memory and whose sums fit into registers."""
    # Each kernel keeps one side in registers and streams the other.
    sides = ((64, 128, 256), (64, 128)) if kernel != "dkdv" else ((32, 64, 128), (64, 128))
    if itemsize == 4 or columns > 128:
        sides = ((32, 64, 128), (32, 64)) if kernel != "dkdv" else ((32, 64), (32, 64, 128))
    found = []
    for block_m, block_n, warps, stages in itertools.product(*sides, (4, 8), (1, 2, 3)):
        kept, streamed = (block_m, block_n) if kernel != "dkdv" else (block_n, block_m)
        held = 1 if kernel == "forward" else 2
        shared = itemsize * columns * (held * kept + 2 * stages * streamed)
        sums = columns * kept * (2 if kernel == "dkdv" else 1) + kept * streamed * (1 if kernel == "forward" else 2)
        registers = sums / (32 * warps)
        if shared > limit_bytes or not 24 <= registers <= 230 or kept < 8 * warps:
            continue
        found.append(Tile(block_m, block_n, warps, stages))
        # A cap on registers lets one more program onto a multiprocessor, as long as its shared memory fits too.
        for programs in range(2, 7):
            cap = 65536 // (32 * warps * programs) // 8 * 8
            if itemsize == 2 and shared * programs <= limit_bytes and registers + 8 <= cap <= registers + 72:
                found.append(Tile(block_m, block_n, warps, stages, min(cap, 248)))
    return found


def inputs(head_dim, dtype, seqlen, tokens=TOKENS):
    """Return q, k, v, dout of `tokens` tokens and WIDTH columns over all heads."""
    shape = (max(1, tokens // seqlen), max(1, WIDTH // head_dim), seqlen, head_dim)
    return [torch.randn(shape, device="cuda", dtype=DTYPES[dtype]) for _ in range(4)]


def runner(kernel, tile, descriptors, tensors, causal):
    """Return a function that runs one kernel with one tile (for dkdv and dq the delta kernel too)."""
    q, k, v, dout = tensors
    options = Options(right=0 if causal else None, scale=q.shape[3] ** -0.5)
    # A true lse needs a forward pass; a large one keeps every p small, which no kernel's time depends on.
    lse = torch.full(q.shape[:3], 10.0, device=q.device)

    def run():
        tiles.tile_for, tiles.DESCRIPTOR_FROM = lambda *_: tile, 0 if descriptors else 2**40
        if kernel == "forward":
            forward.forward(q, k, v, options)
        else:
            backward.gradients(q, k, v, dout, lse, dout, None, kernel == "dq", kernel == "dkdv", options)

    return run


def compile_one(job):
    """Compile one candidate by running it on a small input; return None, or why it does not work."""
    kernel, head_dim, dtype, causal, tile, descriptors = job
    try:
        runner(kernel, tile, descriptors, inputs(head_dim, dtype, 256, tokens=256), causal)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", default=["forward", "dkdv", "dq"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--causal", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--pointers", action="store_true", help="also try without descriptors")
    parser.add_argument("--tiles", nargs="+", help="only these: block_m,block_n,num_warps,num_stages[,max_registers]")
    parser.add_argument("--commit", default=None, help="the commit to record; by default what git says")
    parser.add_argument("--out", default="tune.csv")
    args = parser.parse_args()

    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    chosen = [Tile(*map(int, text.split(","))) for text in args.tiles or ()]
    cases = list(itertools.product(args.kernels, args.head_dims, args.dtypes, map(bool, args.causal)))
    jobs = [
        (*case, tile, descriptors)
        for case in cases
        for tile in chosen or candidates(case[0], tiles.padded(case[1]), DTYPES[case[2]].itemsize, limit)
        for descriptors in ((True, False) if args.pointers else (True,))
    ]
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        failed = pool.map(compile_one, jobs, chunksize=1)
    print(f"{len(jobs)} candidates compiled in {time.time() - began:.0f} s", file=sys.stderr, flush=True)

    where = bench.machine(args.commit)
    with open(args.out, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kernel", "head_dim", "dtype", "causal", *Tile._fields, "descriptor", "ms", *where])
        for case in cases:
            mine = [(job, why) for job, why in zip(jobs, failed, strict=True) if job[:4] == case]
            tensors = inputs(case[1], case[2], args.seqlen)
            runs = {job: runner(case[0], job[4], job[5], tensors, case[3]) for job, why in mine if why is None}
            times = bench.time_in_turns(runs, args.rounds, warmups=1)
            ranked = sorted(((statistics.median(ms), job) for job, ms in times.items()), key=lambda pair: pair[0])
            for ms, job in ranked:
                writer.writerow([*case[:3], int(case[3]), *job[4], int(job[5]), f"{ms:.4f}", *where.values()])
            file.flush()
            for job, why in mine:
                if why:
                    print(*case, tuple(job[4]), "left out:", why, file=sys.stderr)
            for ms, job in ranked[:5]:
                print(*case, tuple(job[4]), "descriptors" if job[5] else "pointers", f"{ms:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
