"""Count the bytes that the forward kernel moves to and from device memory, with NVIDIA's Nsight Compute (ncu).

Beside them stand the two counts of the course: the bytes that the kernel requests (every load and store, no cache) and
the compulsory ones (each tensor once). What a profiler sees lies between: the rest is what the L2 served.

    python benchmarks/profile_bytes.py --out benchmarks/results/h200/profile.csv --commit $(git rev-parse --short HEAD)

ncu empties the L2 before each run of a kernel and leaves the clocks alone here (--clock-control none); no time is
recorded, since a profiled kernel runs several times. `tensor_pct` is the part of cycles in which the tensor cores'
pipe was active. Needs an NVIDIA GPU, ncu, and the right to read hardware counters.
"""

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashlib import bench, cost, tiles
from flashlib.attention import flash_attention

NHEADS = 16
SHAPES = [(seqlen, 128, causal) for causal in (False, True) for seqlen in (4096, 8192, 16384)]
BYTES = ["dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum"]
# The tensor pipe's name differs from one generation of GPUs to the next: the first that ncu knows is taken.
TENSOR = ["sm__pipe_tensor_cycles_active", "sm__inst_executed_pipe_tensor", "sm__pipe_tensor_op_hmma_cycles_active"]
PERCENT = ".avg.pct_of_peak_sustained_active"
FIELDS = ["kernel", "batch", "nheads", "seqlen", "head_dim", "causal", "dtype", "block_m", "block_n"]
FIELDS += ["requested_bytes", "compulsory_bytes", "dram_read_bytes", "dram_write_bytes", "l2_bytes", "tensor_pct"]


def launch(shapes):
    """Run the forward once for each shape: what ncu watches."""
    for seqlen, head_dim, causal in shapes:
        q, k, v = (torch.randn(1, NHEADS, seqlen, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        with torch.no_grad():
            flash_attention(q, k, v, causal=causal)
    torch.cuda.synchronize()


def counted(shape):
    """Return the columns that need no profiler."""
    seqlen, head_dim, causal = shape
    tile = tiles.tile_for("forward", tiles.architecture_of(torch.device("cuda", 0)), 2, tiles.padded(head_dim), causal)
    sizes = {"block_m": tile.block_m, "block_n": tile.block_n}
    requested = cost.requested_bytes(seqlen, seqlen, head_dim, **sizes, itemsize=2, causal=causal)["total"]
    compulsory = cost.compulsory_bytes(seqlen, seqlen, head_dim, nheads=NHEADS)
    return {
        **dict(zip(FIELDS, ["_forward_kernel", 1, NHEADS, seqlen, head_dim, int(causal), "bf16"], strict=False)),
        **sizes,
        "requested_bytes": requested * NHEADS,
        "compulsory_bytes": compulsory,
    }


def tensor_metric(ncu):
    """Return the name of the metric for the tensor pipe that this ncu knows on this GPU, or None."""
    known = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True).stdout.split()
    return next((name for name in TENSOR if name in known), None)


def profile(ncu, metrics):
    """Run this script under ncu; return, for each launch of the kernel, dict metric -> number."""
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--kernel-name", "_forward_kernel", "--metrics", ",".join(metrics)]
    done = subprocess.run([*command, sys.executable, __file__, "--launch"], capture_output=True, text=True)
    table = "\n".join(line for line in done.stdout.splitlines() if line.startswith('"'))
    rows = [row for row in csv.DictReader(io.StringIO(table)) if row.get("ID")]
    if done.returncode or len(rows) != len(SHAPES):
        said = done.stdout[-3000:] + done.stderr[-2000:]
        raise SystemExit(f"ncu found {len(rows)} of {len(SHAPES)} launches (exit code {done.returncode}):\n{said}")
    return [{name: float(row[name].replace(",", "")) for name in metrics} for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("profile.csv"))
    parser.add_argument("--commit", default=None, help="the commit to record; by default what git says")
    parser.add_argument("--ncu", default="ncu", help="the program, if it is not on the PATH")
    parser.add_argument("--launch", action="store_true", help="only run the kernels: what ncu is asked to watch")
    args = parser.parse_args()
    if args.launch:
        launch(SHAPES)
        return
    pipe = tensor_metric(args.ncu)
    rows = profile(args.ncu, BYTES + [pipe + PERCENT] * (pipe is not None))
    where = bench.machine(args.commit)
    table = []
    for shape, found in zip(SHAPES, rows, strict=True):
        seen = dict(zip(FIELDS[-4:-1], (int(found[name]) for name in BYTES), strict=True))
        percent = {"tensor_pct": found[pipe + PERCENT] if pipe else ""}
        table.append(counted(shape) | seen | percent | where)
        print(*table[-1].values())
    bench.write_results(args.out, table, FIELDS)


if __name__ == "__main__":
    main()
