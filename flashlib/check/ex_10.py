"""The exercises of chapter 10, honest speed."""

import random

from flashlib.bench import read_results
from flashlib.check import Case, Exercise, Wrong

# --- 10.1 TFLOP/s ---------------------------------------------------------------------------------------------------

SPEED_STUB = '''\
def tflops(ms, batch, nheads, seqlen, head_dim, causal, backward):
    """Return the TFLOP/s of one pass that takes ms milliseconds, by the count that everybody uses."""
    raise NotImplementedError
'''

SPEED = '''\
def tflops(ms, batch, nheads, seqlen, head_dim, causal, backward):
    """Return the TFLOP/s of one pass that takes ms milliseconds, by the count that everybody uses."""
    flops = 4 * batch * nheads * seqlen**2 * head_dim
    if causal:
        flops = flops / 2
    if backward:
        flops = flops * 2.5
    return flops / (ms * 1e-3) / 1e12
'''

SPEED_BY_PRODUCTS = """\
def tflops(ms, batch, nheads, seqlen, head_dim, causal, backward):
    products = 5 if backward else 2
    one = 2 * seqlen * seqlen * head_dim * (0.5 if causal else 1.0)
    return products * one * batch * nheads / ms / 1e9
"""


def speed_cases():
    return [
        Case("forward", 1.5, 4, 16, 4096, 128, False, False),
        Case("causal forward", 0.8, 4, 16, 4096, 128, True, False),
        Case("backward", 3.9, 1, 32, 2048, 64, False, True),
        Case("causal backward", 2.1, 2, 8, 1024, 64, True, True),
    ]


# --- 10.2 find the lie ----------------------------------------------------------------------------------------------


def flawed():
    """Return three benchmarks, name -> rows, each made from the recorded forward with one flaw in its method.

    A: the clock is stopped when the launch returns. B: a causal run is credited with the FLOPs of a full one. C: the
    mean of the calls is taken, the first of which compiles.
    """
    noise = random.Random(0)
    recorded = [
        row
        for row in read_results("attention")
        if (row["pass"], row["head_dim"], row["impl"]) == ("fwd", 128, "flashlib_portable")
    ]
    host_us = next(row["us_p50"] for row in read_results("host") if row["impl"] == "flashlib_portable")
    benchmarks = {"A": [], "B": [], "C": []}
    for row in recorded:
        jitter = 1 + 0.01 * noise.random()
        flops = row["tflops"] * row["ms_p50"] * 1e9
        same = {key: row[key] for key in ("causal", "seqlen_q", "batch")}
        # The machine of the files is not the one of the recording: everything takes 4% longer.
        honest = 1.04 * row["ms_p50"] * jitter
        for name, ms, counted in (
            ("A", host_us / 1e3 * jitter, flops),
            ("B", honest, flops * (1 + row["causal"])),
            ("C", honest + (1400 / 20 if row is recorded[0] else 0), flops),
        ):
            benchmarks[name].append({**same, "ms": round(ms, 4), "tflops": round(counted / ms / 1e9, 1)})
    return benchmarks


LIES_STUB = "lies = None\n"

LIES = """\
lies = [1, 5, 3]
"""

# --- 10.3 how many programs fit -------------------------------------------------------------------------------------

FIT_STUB = '''\
def programs(registers, num_warps, shared_bytes):
    """Return how many programs fit on a multiprocessor of an H200."""
    raise NotImplementedError
'''

FIT = '''\
def programs(registers, num_warps, shared_bytes):
    """Return how many programs fit on a multiprocessor of an H200."""
    by_registers = 65536 // (registers * 32 * num_warps)
    by_shared = 233472 // (shared_bytes + 1024)
    by_warps = 64 // num_warps
    return min(by_registers, by_shared, by_warps)
'''

FIT_BY_TRYING = """\
def programs(registers, num_warps, shared_bytes):
    n = 0
    while (
        (n + 1) * registers * 32 * num_warps <= 65536
        and (n + 1) * (shared_bytes + 1024) <= 233472
        and (n + 1) * num_warps <= 64
    ):
        n += 1
    return n
"""


def fit_cases():
    return [
        Case("168 registers, 4 warps, 49 KB", 168, 4, 50176),
        Case("168 registers, 8 warps, 49 KB", 168, 8, 50176),
        Case("64 registers, 4 warps, 100 KB", 64, 4, 102400),
        Case("16 registers, 8 warps, 1 KB", 16, 8, 1024),
        Case("128 registers, 4 warps, exactly 57 KB", 128, 4, 58368),
        Case("255 registers, 2 warps, 1 KB", 255, 2, 1024),
        Case("255 registers, 16 warps: too many", 255, 16, 1024),
    ]


EXERCISES = [
    Exercise(
        id="10.1",
        title="From milliseconds to TFLOP/s",
        level=1,
        task=(
            "Write `tflops(ms, batch, nheads, seqlen, head_dim, causal, backward)`: the speed of a pass over seqlen "
            "queries and as many keys, by the count of 02 and 06: two products forward, five backward, and half of "
            "everything if causal. `causal` and `backward` are booleans; `ms` is in milliseconds."
        ),
        name="tflops",
        stub=SPEED_STUB,
        solution=SPEED,
        cases=speed_cases,
        also_right=(SPEED_BY_PRODUCTS,),
        wrong=(
            Wrong("a causal pass is credited with the FLOPs of a full one", edit=("flops / 2", "flops / 1")),
            Wrong(
                "the backward is counted as two forwards; it has five products to the forward's two", edit=("2.5", "2")
            ),
            Wrong("a product counts its multiplications only, not its additions", edit=("4 * batch", "2 * batch")),
            Wrong("the milliseconds are taken for seconds", edit=("(ms * 1e-3)", "ms")),
            Wrong("the answer is in GFLOP/s", edit=("1e12", "1e9")),
            Wrong("seqlen enters once: the scores are seqlen times seqlen", edit=("seqlen**2", "seqlen")),
        ),
    ),
    Exercise(
        id="10.2",
        title="Find the lie",
        level=2,
        task=(
            'The three tables above each have one flaw of method. Set `lies` to a dict from `"A"`, `"B"`, `"C"` to '
            "one of the five texts of `FLAWS`."
        ),
        name="lies",
        stub=LIES_STUB,
        solution=LIES,
        wrong=(
            Wrong(
                "A is taken for launch time: a launch *added* to each time hides in the long ones, but here they all "
                "take the same, 32 times the arithmetic included",
                edit=("[1, 5, 3]", "[4, 5, 3]"),
            ),
            Wrong(
                "A is taken for cached inputs: a warm cache cannot pass the peak of the matrix units, and A does",
                edit=("[1, 5, 3]", "[2, 5, 3]"),
            ),
            Wrong(
                "B is taken for cached inputs: its full rows are as slow as they should be, only the causal ones shine",
                edit=("[1, 5, 3]", "[1, 2, 3]"),
            ),
            Wrong(
                "B is taken for a missing synchronisation: its times grow with the work",
                edit=("[1, 5, 3]", "[1, 1, 3]"),
            ),
            Wrong(
                "C is taken for launch time: a launch would be in every row, and of C's rows one is far off",
                edit=("[1, 5, 3]", "[1, 5, 4]"),
            ),
        ),
    ),
    Exercise(
        id="10.3",
        title="How many programs fit",
        level=2,
        task=(
            "Write `programs(registers, num_warps, shared_bytes)`: how many programs of a kernel one multiprocessor of "
            "an H200 holds at once. It has 65,536 registers, 233,472 bytes (228 KiB) of shared memory and room for 64 "
            "warps. `registers` is the number a *thread* uses (in the cases a multiple of 8, or 255), a warp has 32 "
            "threads, and each program takes 1,024 bytes of shared memory beyond its own."
        ),
        name="programs",
        stub=FIT_STUB,
        solution=FIT,
        cases=fit_cases,
        also_right=(FIT_BY_TRYING,),
        wrong=(
            Wrong(
                "registers are counted for one warp; a program has num_warps of them",
                edit=("registers * 32 * num_warps", "registers * 32"),
            ),
            Wrong(
                "the shared memory that each program takes beyond its own is left out",
                edit=("(shared_bytes + 1024)", "shared_bytes"),
            ),
            Wrong(
                "the registers are not asked",
                edit=("min(by_registers, by_shared, by_warps)", "min(by_shared, by_warps)"),
            ),
            Wrong(
                "the shared memory is not asked",
                edit=("min(by_registers, by_shared, by_warps)", "min(by_registers, by_warps)"),
            ),
            Wrong(
                "the limit of 64 warps is not asked",
                edit=("min(by_registers, by_shared, by_warps)", "min(by_registers, by_shared)"),
            ),
            Wrong(
                "the largest of the limits is taken: the scarcest thing decides", edit=("return min(", "return max(")
            ),
        ),
    ),
]
