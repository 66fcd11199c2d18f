"""Benchmarks with a flaw, for the exercises of chapter 10: recorded times, spoilt by the mechanism of a known mistake.

Nothing in them is typed: speeds come from `attention.csv`, the host's time from `host.csv`, the memory's speed from
`cost.csv`; what each mistake does to them is a line of code below. The same seed gives the same table.
"""

import random

from flashlib import bench, cost

FLAWS = ("counted", "idle", "no_wait", "compile", "flag", "cached")
# Speed of the L2 of a Hopper GPU: FlashAttention-3, table 1 (of an H100, which has the same chip).
L2_GB_S = 12_000.0
COMPILE_MS, CALLS = 1900.0, 20


def flawed(flaw):
    """Return a benchmark with this flaw.

    Args:
        flaw: "counted" (the FLOPs of a causal mask in full), "idle" (many calls between two events, and the GPU waits
            for the host), "no_wait" (the clock is stopped before the GPU has run), "compile" (the mean of 20 calls, the
            first of which compiles), "flag" (the causal flag is ignored), "cached" (a copy whose arrays are still in
            the L2).

    Returns:
        list of dict, as `bench.read_results` returns them.
    """
    if flaw not in FLAWS:
        raise ValueError(f"flaw must be one of {FLAWS}, got {flaw!r}")
    noise = random.Random(f"chapter 10, {flaw}")
    if flaw == "cached":
        return [_copied(mib, noise) for mib in (8, 16, 24, 64, 256, 1024, 4096)]
    ours = [r for r in bench.read_results("attention") if (r["impl"], r["pass"]) == ("flashlib_portable", "fwd")]
    # The host takes as long for eight heads as for eighty, so the flaw shows where there is little to do.
    wanted = [row for row in ours if row["head_dim"] == 128 and (flaw != "idle" or not row["causal"])]
    host_ms = next(r["us_p50"] for r in bench.read_results("host") if r["impl"] == "flashlib_portable") / 1e3
    full = {row["seqlen_q"]: row["ms_p50"] for row in wanted if not row["causal"]}
    rows = []
    for row in wanted:
        row = dict(row, impl="new_kernel", batch=1, nheads=8) if flaw == "idle" else dict(row, impl="new_kernel")
        sizes = (row["batch"], row["nheads"], row["seqlen_q"], row["head_dim"])
        flops = bench.attention_flops(False, *sizes, row["causal"])
        ms = flops / row["tflops"] / 1e9
        if flaw == "idle":
            ms = max(ms, host_ms)
        elif flaw == "no_wait":
            ms = host_ms
        elif flaw == "compile" and row["seqlen_q"] == min(full):
            ms += COMPILE_MS / CALLS
        elif flaw == "flag":
            ms = full[row["seqlen_q"]]
        ms *= noise.uniform(0.99, 1.01)
        if flaw == "counted" and row["causal"]:
            flops *= 2
        rows.append(row | {"ms_p20": 0.995 * ms, "ms_p50": ms, "ms_p80": 1.005 * ms, "tflops": flops / ms / 1e9})
    return rows


def _copied(mib, noise):
    """Time a copy that runs again and again on the same `mib` MiB: a launch's 2 µs, and what memory or L2 take."""
    memory = next(r["gb_per_s"] for r in bench.read_results("cost") if r["impl"] == "ceiling_copy")
    moved = 2 * mib * 2**20
    speed = L2_GB_S if moved <= cost.GPUS["H200"].l2_mib * 2**20 else memory
    ms = (2e-3 + moved / speed / 1e6) * noise.uniform(0.99, 1.01)
    return {"impl": "new_copy", "mib": mib, "ms_p50": ms, "gb_per_s": moved / ms / 1e6}


def text(flaw):
    """Return the columns of a flawed benchmark that an exercise shows, as a table."""
    rows = flawed(flaw)
    if flaw == "cached":
        lines = [f"{'MiB copied':>10} {'ms_p50':>9} {'GB/s':>6}"]
        return "\n".join(lines + [f"{r['mib']:>10} {r['ms_p50']:>9.4f} {r['gb_per_s']:>6.0f}" for r in rows])
    lines = ["head_dim causal batch nheads seqlen    ms_p50  TFLOP/s"]
    for r in rows:
        sizes = f"{r['head_dim']:>8} {r['causal']:>6} {r['batch']:>5} {r['nheads']:>6} {r['seqlen_q']:>6}"
        lines.append(f"{sizes} {r['ms_p50']:>9.4f} {r['tflops']:>8.1f}")
    return "\n".join(lines)
