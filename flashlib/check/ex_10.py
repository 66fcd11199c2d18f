"""Chapter 10: three benchmarks with a flaw each, and how many programs fit on a multiprocessor."""

from flashlib.check import Case, Exercise, Wrong

CAUSES = {
    1: "the clock was stopped before the GPU had finished",
    2: "the GPU was idle, and the host's launch was timed",
    3: "compiling was timed too",
    4: "the data were still in the L2",
    5: "the FLOPs were counted otherwise",
    6: "the causal flag did nothing",
}

# --- 10.1 to 10.3: which flaw? ---------------------------------------------------------------------------------------

_TASK = "Table {letter} above came from one of the six mistakes. Set `flaw_{low}` to its number in the list."
# What speaks against each of the other causes, in each table.
_AGAINST = {
    "a": {
        1: "a clock that does not wait shows about the same time in every row, and these grow with the length",
        2: "the host's launch gives short kernels one and the same time, and here each length has a time of its own",
        3: "compiling makes the first row of a kernel slow, and none is slow here: speeds only rise with the length",
        4: "Q, K, V and the output of any row are larger than the L2, and attention hardly waits for bytes",
        6: "a flag that did nothing would leave the times as they are, and the causal ones are nearly halved",
    },
    "b": {
        1: "a clock that does not wait shows the same time in all rows, and the last three times grow as the work does",
        3: "compiling makes one row slow, the first; three rows have the same time here",
        4: "cached data make short rows fast, and here the short rows are the slow ones",
        5: "another count of FLOPs changes TFLOP/s and no time, and here the times themselves do not follow the work",
        6: "no row is causal",
    },
    "c": {
        1: "a clock that does not wait shows the same time in all rows, and these grow from the first to the last",
        2: "an idle GPU makes small copies look slow, and here they are faster than the memory is",
        3: "compiling makes the first row slow, and it is faster than the memory here",
        5: "bytes are counted, not FLOPs: what is read and written, over the time, is the GB/s of each row",
        6: "nothing here has a mask",
    },
}


def _which(number, level, letter, right, title):
    name = f"flaw_{letter}"
    return Exercise(
        id=f"10.{number}",
        title=title,
        level=level,
        task=_TASK.format(letter=letter.upper(), low=letter),
        name=name,
        stub=f"{name} = None\n",
        solution=f"{name} = {right}  # {CAUSES[right]}\n",
        wrong=tuple(
            Wrong(f"{CAUSES[cause]!r} is blamed; but {says}", source=f"{name} = {cause}\n")
            for cause, says in _AGAINST[letter].items()
        ),
    )


# --- 10.4: how many programs fit --------------------------------------------------------------------------------------

_STUB = '''\
def programs_per_sm(registers, num_warps, shared_bytes, shared_kib_sm, max_warps):
    """Return how many programs of a kernel fit on one multiprocessor at a time."""
    raise NotImplementedError
'''

_SOLUTION = '''\
def programs_per_sm(registers, num_warps, shared_bytes, shared_kib_sm, max_warps):
    """Return how many programs of a kernel fit on one multiprocessor at a time."""
    registers_of_warp = -(-32 * registers // 256) * 256
    by_registers = 65536 // (registers_of_warp * num_warps)
    by_shared = shared_kib_sm * 1024 // (shared_bytes + 1024)
    by_warps = max_warps // num_warps
    return min(by_registers, by_shared, by_warps)
'''

_BY_COUNTING = """\
def programs_per_sm(registers, num_warps, shared_bytes, shared_kib_sm, max_warps):
    warp = 32 * registers
    while warp % 256:
        warp += 1
    fit = 0
    while (
        (fit + 1) * num_warps * warp <= 65536
        and (fit + 1) * (shared_bytes / 1024 + 1) <= shared_kib_sm
        and (fit + 1) * num_warps <= max_warps
    ):
        fit += 1
    return fit
"""


def _cases():
    return [
        Case("registers decide", 164, 4, 50176, 228, 64),
        Case("shared memory decides", 96, 8, 114688, 164, 64),
        Case("warps decide", 32, 8, 1024, 100, 48),
        Case("registers are given out in lots of 256 a warp", 85, 4, 2048, 228, 64),
        Case("each program takes one KiB more", 64, 4, 57 * 1024, 228, 64),
        Case("shared memory is just enough for two", 64, 4, 49 * 1024, 100, 48),
        Case("the most registers that a thread can have", 255, 4, 2048, 228, 64),
        Case("a program too large for this card", 128, 8, 114688, 100, 48),
    ]


_PROGRAMS = Exercise(
    id="10.4",
    title="How many programs fit",
    level=2,
    task=(
        "Write `programs_per_sm(registers, num_warps, shared_bytes, shared_kib_sm, max_warps)`. A multiprocessor has "
        "65,536 registers. `registers` is what one thread takes; a warp has 32 threads and gets its registers in "
        "lots of 256, rounded up. A program takes `shared_bytes` of shared memory and 1 KiB more, for the system, "
        "out of `shared_kib_sm` KiB. No more than `max_warps` warps can be there at a time."
    ),
    name="programs_per_sm",
    stub=_STUB,
    solution=_SOLUTION,
    cases=_cases,
    also_right=(_BY_COUNTING,),
    wrong=(
        Wrong(
            "registers never limit: they are forgotten, or one thread's are taken for a warp's, which has 32 threads",
            edit=("-(-32 * registers", "-(-registers"),
        ),
        Wrong(
            "the registers of one warp are taken for those of the program",
            edit=("(registers_of_warp * num_warps)", "registers_of_warp"),
        ),
        Wrong(
            "a warp's registers are not rounded up to lots of 256",
            edit=("-(-32 * registers // 256) * 256", "32 * registers"),
        ),
        Wrong("the 1 KiB that each program takes besides is left out", edit=("(shared_bytes + 1024)", "shared_bytes")),
        Wrong("KiB are taken for 1000 bytes", edit=("shared_kib_sm * 1024", "shared_kib_sm * 1000")),
        Wrong("the largest of the limits is taken, and not the smallest", edit=("return min(", "return max(")),
        Wrong("the limit on warps is forgotten", edit=("by_shared, by_warps)", "by_shared)")),
        Wrong("the limit on shared memory is forgotten", edit=("by_registers, by_shared, ", "by_registers, ")),
        Wrong("the limits are not whole programs: // rounds down", source=_SOLUTION.replace(" // (", " / (")),
    ),
)

EXERCISES = [
    _which(1, 1, "a", 5, "What is wrong with table A"),
    _which(2, 1, "b", 2, "What is wrong with table B"),
    _which(3, 1, "c", 4, "What is wrong with table C"),
    _PROGRAMS,
]
