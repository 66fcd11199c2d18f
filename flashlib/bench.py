"""Measurements: every timing on a page comes from a CSV that names its machine and versions; this module makes them.

The files are `benchmarks/results/<gpu>/<subject>.csv`. `python -m flashlib.bench attention` times this library's
kernels beside those of others that are found on your GPU (`flashlib.peers`), in one run, in turns, writes such a file
and draws it; `python -m flashlib.bench host` times what a small call costs the host; `python -m flashlib.bench chart`
draws a file that is there.

Source: ours.
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

from flashlib import cost

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
FIELDS = [
    *("pass", "head_dim", "causal", "seqlen_q", "seqlen_k", "batch", "nheads", "nheads_kv", "dtype", "impl"),
    *("ms_p20", "ms_p50", "ms_p80", "tflops"),
]
MACHINE = ["gpu", "driver", "torch", "triton", "commit", "date"]
_TEXT = {"kernel", "pass", "dtype", "impl", "tensor", "unit", "source", "feature", *MACHINE}
# Blocks of 1 GiB that are overwritten before each timed run.
OVERWRITTEN = 4
# Line, marker and colour of a chart: ours in the course's colour, each of the others in grey tones of its own.
_LINES = {
    "flashlib_hopper": ("#0072B2", "-", "D", "flashlib, Hopper"),
    "flashlib_portable": ("#0072B2", "-", "o", "flashlib, portable"),
    "fa2": ("#999999", "--", "s", "FlashAttention-2 (PyTorch)"),
    "flex": ("#999999", ":", "^", "FlexAttention"),
    "cudnn": ("#444444", "-.", "v", "cuDNN"),
    "fa3": ("#444444", "--", "x", "FlashAttention-3"),
    "fa4": ("#444444", ":", "+", "FlashAttention-4"),
    "mem_efficient": ("#999999", "--", "s", "memory-efficient (PyTorch)"),
}


# --- what was recorded -----------------------------------------------------------------------------------------------


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


def write_results(path, rows, fields):
    """Write one benchmark: `fields` and the machine's columns, floats with five digits.

    Args:
        path: the CSV; its folder is made if it is not there.
        rows: dicts; what a row lacks stays empty.
        fields: the columns before gpu, driver, torch, triton, commit, date.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*fields, *MACHINE], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()})


def machine(commit=None):
    """Return the columns that say where and when: gpu, driver, torch, triton, commit, date.

    Args:
        commit: the commit to record; by default what git says about this copy, empty where it says nothing.
    """
    import torch

    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = ""
    cuda = torch.cuda.is_available()
    driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if cuda else ""
    if commit is None:
        commit = _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD")
    return {
        "gpu": torch.cuda.get_device_name() if cuda else "cpu",
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def _first_line(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def results_path(subject, gpu):
    """Return where a benchmark of `subject` on a GPU of this name is recorded."""
    folder = gpu.lower().replace("nvidia ", "").replace(" ", "_")
    return RESULTS / folder / f"{subject}.csv"


def doubts(rows, gpu="H200"):
    """Name what in the rows of an attention benchmark cannot be, or is so unlikely that it must be looked at again.

    Args:
        rows: dicts with FIELDS, as `read_results` returns them, in the order they were measured; or with impl and
            gb_per_s, for kernels that memory limits.
        gpu: a name of `cost.GPUS`, whose peak and bandwidth no result can pass.

    Returns:
        list of str, one for each doubt; empty where there is none.

    Raises:
        ValueError: gpu is not known.
    """
    if gpu not in cost.GPUS:
        raise ValueError(f"gpu must be one of {', '.join(cost.GPUS)}, got {gpu!r}")
    peak, bandwidth = cost.GPUS[gpu].peak_tflops, cost.GPUS[gpu].bandwidth_gb_s
    found, series = [], {}
    for row in rows:
        if row.get("gb_per_s") is not None:
            if row["gb_per_s"] > bandwidth:
                found.append(f"{row['impl']}: {row['gb_per_s']:.0f} GB/s is above the memory's {bandwidth} GB/s")
            continue
        d, n, ms, speed = row["head_dim"], row["seqlen_q"], row["ms_p50"], row["tflops"]
        name = f"{row['impl']} {row['pass']}, head_dim {d}, causal {row['causal']}, seqlen {n}"
        # No number, NaN, zero: nothing that follows would mean anything.
        if not all(isinstance(x, (int, float)) and x > 0 for x in (row["ms_p20"], ms, row["ms_p80"], speed)):
            found.append(f"{name}: a time or a speed is missing, or not above 0")
            continue
        flops = attention_flops(row["pass"] == "bwd", row["batch"], row["nheads"], n, d, row["causal"])
        sizes = {"batch": row["batch"], "nheads": row["nheads"], "itemsize": 4 if row["dtype"] == "fp32" else 2}
        moved = cost.compulsory_bytes(n, n, d, **sizes)
        if speed > peak:
            found.append(f"{name}: {speed:.0f} TFLOP/s is above the peak, {peak} TFLOP/s")
        if abs(flops / ms / 1e9 / speed - 1) > 0.01:
            found.append(f"{name}: the usual FLOPs in {ms} ms are {flops / ms / 1e9:.0f} TFLOP/s, not {speed:.0f}")
        if moved / ms / 1e6 > bandwidth:
            found.append(f"{name}: its inputs and outputs alone make {moved / ms / 1e6:.0f} GB/s, memory {bandwidth}")
        if not row["ms_p20"] <= ms <= row["ms_p80"]:
            found.append(f"{name}: the percentiles are out of order")
        kind = (row["impl"], row["pass"], row["dtype"], d)
        series.setdefault((*kind, row["causal"]), []).append((name, flops, ms, n))
    for (*kind, causal), line in series.items():
        by_length = sorted(line, key=lambda one: one[3])
        for (_, flops, ms, _), (name, more, longer, _) in itertools.pairwise(by_length):
            if more >= 1.5 * flops and longer < 1.15 * ms:
                found.append(
                    f"{name}: {more / flops:.0f} times the work of the shorter row in {longer / ms:.2f} of its time"
                )
        if len(line) > 1 and line[0][2] / line[0][1] > 3 * line[1][2] / line[1][1]:
            found.append(f"{line[0][0]}: for a FLOP the first row takes over 3 times as long as the next")
        full = {n: ms for _, _, ms, n in series.get((*kind, 0), [])} if causal else {}
        for name, _, ms, n in line:
            if n >= 2048 and ms > 0.85 * full.get(n, float("inf")):
                found.append(f"{name}: causal takes {ms / full[n]:.2f} of the time without")
    return found


# --- measuring -------------------------------------------------------------------------------------------------------


def percentiles(values):
    """Return the 20th, 50th and 80th percentile of some times.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("values must hold one time at least, got none")
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[1], statistics.median(values), tenths[7]


def time_in_turns(functions, rounds=20, warmups=3):
    """Return dict, name -> list of times in ms, one a round; each round runs every function once.

    Events on the GPU's own clock, because a launch returns before the kernel has run. Before each run 1 GiB is
    overwritten several times: that takes other data into the L2, and it keeps the GPU busy until the host has queued
    the run. Without a GPU the host's clock is read and nothing is overwritten.

    Raises:
        ValueError: rounds is below 1, or warmups below 0.
    """
    import torch

    if rounds < 1 or warmups < 0:
        raise ValueError(f"rounds must be at least 1 and warmups at least 0, got {rounds} and {warmups}")

    cuda = torch.cuda.is_available()
    other = torch.empty(2**30, dtype=torch.int8, device="cuda") if cuda else None
    times = {name: [] for name in functions}
    for round_ in range(-warmups, rounds):
        for name, function in functions.items():
            ms = _time_on_gpu(function, other) if cuda else _time_on_host(function)
            if round_ >= 0:
                times[name].append(ms)
    return times


def _time_on_gpu(function, other):
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(OVERWRITTEN):
        other.zero_()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _time_on_host(function):
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


def attention_flops(backward, batch, nheads, seqlen, head_dim, causal):
    """Return the FLOPs of a pass by the usual count: two products forward, five backward, half of them if causal."""
    return (2.5 if backward else 1) * 4 * batch * nheads * seqlen**2 * head_dim / (2 if causal else 1)


# --- showing ---------------------------------------------------------------------------------------------------------


def table(rows):
    """Return text with the TFLOP/s of `rows`, in any order: a line a shape and dtype, a column an implementation."""
    widths = {row["impl"]: max(8, len(row["impl"]) + 2) for row in rows}
    lines = ["dtype pass  d   causal seqlen " + "".join(f"{name:>{width}}" for name, width in widths.items())]
    speeds = {}
    for row in rows:
        shape = (row["dtype"], *(row[field] for field in FIELDS[:4]))
        speeds.setdefault(shape, {})[row["impl"]] = "-" if row["tflops"] is None else f"{row['tflops']:.0f}"
    for (dtype, pass_, d, causal, seqlen), found in speeds.items():
        cells = "".join(f"{found.get(name, '-'):>{width}}" for name, width in widths.items())
        lines.append(f"{dtype:<6}{pass_:<5}{d:<5}{causal:<6}{seqlen:>7} {cells}")
    return "\n".join(lines)


def chart(rows, passes=None):
    """Draw the TFLOP/s of `rows` over seqlen: a row of panels a pass, a panel a head_dim and causal or not.

    Args:
        rows: as `read_results("attention")` returns them, in any order, of one machine and one dtype; a row without a
            speed is left out.
        passes: which of "fwd" and "bwd" are drawn; by default those that were measured.

    Returns:
        matplotlib Figure; its caption names machine, versions and commit.

    Raises:
        ValueError: no row has a speed of a kernel that has a line here, or the rows have more than one dtype.
    """
    import matplotlib.pyplot as plt

    rows = sorted((r for r in rows if r["tflops"] is not None and r["impl"] in _LINES), key=lambda r: r["seqlen_q"])
    dtypes = sorted({row["dtype"] for row in rows})
    if len(dtypes) != 1:
        raise ValueError(f"rows must hold speeds of one dtype, of kernels among {', '.join(_LINES)}, got {dtypes}")
    passes = passes or [pass_ for pass_ in ("fwd", "bwd") if any(row["pass"] == pass_ for row in rows)]
    panels = sorted({(row["head_dim"], row["causal"]) for row in rows})
    size = {"figsize": (3.6 * len(panels), 2.4 * len(passes) + 1.1)}
    shared = {"sharex": True, "sharey": "row", "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(passes), len(panels), **shared, **size)
    for (pass_, line), (column, panel) in itertools.product(zip(passes, axes, strict=True), enumerate(panels)):
        ax = line[column]
        for name, (colour, dash, marker, label) in _LINES.items():
            mine = [r for r in rows if (r["pass"], r["head_dim"], r["causal"], r["impl"]) == (pass_, *panel, name)]
            x, y = [r["seqlen_q"] for r in mine], [r["tflops"] for r in mine]
            if mine:
                ax.plot(x, y, dash, color=colour, marker=marker, markersize=5, linewidth=1.4, label=label)
        ax.set_xscale("log", base=2)
        lengths = sorted({r["seqlen_q"] for r in rows})
        ax.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        title = {"fwd": "forward", "bwd": "backward"}[pass_]
        ax.set_title(f"{title}, head_dim {panel[0]}, {'causal' if panel[1] else 'full'}", fontsize=9)
        if pass_ == passes[-1]:
            ax.set_xlabel("seqlen (tokens)")
        if column == 0:
            ax.set_ylabel("TFLOP/s")
            ax.set_ylim(0, 1.05 * max((r["tflops"] for r in rows if r["pass"] == pass_), default=1))
    handles = {}
    for ax in axes.flat:
        handles |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=3 if len(panels) < 3 else 7,
        frameon=False,
        fontsize=9,
    )
    where = rows[0]
    tokens = sorted({row["batch"] * row["seqlen_q"] for row in rows})
    caption = (
        f"{where['gpu']}, driver {where['driver']}, PyTorch {where['torch']}, Triton {where['triton']}, "
        f"commit {where['commit']}\n{where['dtype']}, batch × seqlen = {' or '.join(map(str, tokens))} tokens"
    )
    figure.suptitle(caption, fontsize=8)
    return figure


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m flashlib.bench", description=__doc__.splitlines()[0])
    parser.add_argument("subject", choices=["attention", "host", "chart"])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--causal", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--seqlens", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"])
    parser.add_argument("--impls", nargs="+", default=None, help="only these; by default all that are found")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit", default=None, help="the commit to record; by default what git says")
    parser.add_argument("--gpu", default="h200", help="of `chart`: the folder of the recorded results")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(arguments)
    if args.subject == "chart":
        _save_chart(read_results("attention", args.gpu), args.out or Path("attention.svg"))
        return
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    import torch

    from flashlib import peers

    if not torch.cuda.is_available():
        raise SystemExit("nothing is timed without a GPU; `python -m flashlib.bench chart` draws what was recorded")
    where = machine(args.commit)
    out = args.out or results_path(args.subject, where["gpu"])
    if args.subject == "host":
        rows = [{"impl": name, "us_p50": us, **where} for name, us in peers.host_microseconds().items()]
        write_results(out, rows, ["impl", "us_p50"])
        for row in rows:
            print(f"{row['impl']:<26}{row['us_p50']:8.1f} µs a call on the host")
        return
    rows = []
    shapes = list(itertools.product(args.dtypes, args.head_dims, map(bool, args.causal), args.seqlens))
    for done, (dtype, head_dim, causal, seqlen) in enumerate(shapes):
        bar = "#" * (30 * done // len(shapes))
        print(f"\r[{bar:<30}] {done + 1}/{len(shapes)}", end="", file=sys.stderr, flush=True)
        found = peers.attention_rows(head_dim, causal, seqlen, dtype, args.rounds, args.impls)
        rows += [row | where for row in found]
        # After each shape, so that what was measured is there if the run is cut off.
        write_results(out, rows, FIELDS)
    print(file=sys.stderr)
    if not rows:
        raise SystemExit(f"nothing was timed: no kernel is left; {out} is empty")
    rows.sort(key=lambda row: (row["dtype"], row["pass"] == "bwd", row["head_dim"], row["causal"], row["seqlen_q"]))
    print(table(rows))
    card = next((name for name in cost.GPUS if name in where["gpu"]), None)
    for doubt in doubts(rows, card) if card else []:
        print(f"look at this again: {doubt}")
    print(f"written to {out}")
    for dtype in args.dtypes:
        suffix = ".svg" if len(args.dtypes) == 1 else f".{dtype}.svg"
        if any(row["dtype"] == dtype for row in rows):
            _save_chart([row for row in rows if row["dtype"] == dtype], out.with_suffix(suffix))


def _save_chart(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    # The same rows give the same file: no date, no random names in it.
    matplotlib.rcParams["svg.hashsalt"] = "flashlib"
    chart(rows).savefig(path, metadata={"Date": None})
    print(f"drawn in {path}")


if __name__ == "__main__":
    main()
