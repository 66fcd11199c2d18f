"""The exercises of chapter 02, what attention costs."""

from flashlib.check import Case, Exercise, Wrong

# --- 02.1 a number --------------------------------------------------------------------------------------------------

BYTES_STUB = "moved_bytes = None\n"

BYTES = """\
square, narrow = 2048 * 2048, 2048 * 128
read = (narrow + narrow) + square + (square + narrow)
written = square + square + narrow
moved_bytes = (read + written) * 2
"""

# --- 02.2 the least time --------------------------------------------------------------------------------------------

LEAST_STUB = '''\
def least_ms(flops, moved_bytes, peak_tflops, bandwidth_gb_s):
    """Return the least time in milliseconds that a kernel with these counts can take."""
    raise NotImplementedError
'''

LEAST = '''\
def least_ms(flops, moved_bytes, peak_tflops, bandwidth_gb_s):
    """Return the least time in milliseconds that a kernel with these counts can take."""
    compute_s = flops / (peak_tflops * 1e12)
    memory_s = moved_bytes / (bandwidth_gb_s * 1e9)
    return max(compute_s, memory_s) * 1e3
'''

LEAST_BY_SPEED = """\
def least_ms(flops, moved_bytes, peak_tflops, bandwidth_gb_s):
    ridge = 1e3 * peak_tflops / bandwidth_gb_s
    if flops > ridge * moved_bytes:
        return flops / peak_tflops / 1e9
    return moved_bytes / bandwidth_gb_s / 1e6
"""


LEAST_WITHOUT_UNITS = """\
def least_ms(flops, moved_bytes, peak_tflops, bandwidth_gb_s):
    return max(flops / peak_tflops, moved_bytes / bandwidth_gb_s)
"""


def least_cases():
    return [
        Case("a kernel that memory limits", 5e8, 8e9, 989.4, 4800.0),
        Case("a kernel that arithmetic limits", 5e12, 1e9, 989.4, 4800.0),
        Case("a T4", 1e12, 4e9, 65.0, 320.0),
    ]


# --- 02.3 all bytes -------------------------------------------------------------------------------------------------

NAIVE_STUB = '''\
def naive_bytes(seqlen_q, seqlen_k, head_dim, itemsize, mask=False, dropout=False):
    """Return the bytes that all passes of the naive form move, for one head."""
    raise NotImplementedError
'''

NAIVE = '''\
def naive_bytes(seqlen_q, seqlen_k, head_dim, itemsize, mask=False, dropout=False):
    """Return the bytes that all passes of the naive form move, for one head."""
    square = seqlen_q * seqlen_k
    squares = 4 + 2 * mask + 2 * dropout
    narrow = (2 * seqlen_q + 2 * seqlen_k) * head_dim
    return (squares * square + narrow) * itemsize
'''

NAIVE_BY_PASSES = """\
def naive_bytes(seqlen_q, seqlen_k, head_dim, itemsize, mask=False, dropout=False):
    q = out = seqlen_q * head_dim * itemsize
    k = v = seqlen_k * head_dim * itemsize
    s = p = seqlen_q * seqlen_k * itemsize
    passes = [q + k + s, s + p, p + v + out]
    if mask:
        passes.append(s + s)
    if dropout:
        passes.append(p + p)
    return sum(passes)
"""


def naive_cases():
    return [
        Case("16 queries, 40 keys", 16, 40, 8, 2),
        Case("with a mask", 16, 40, 8, 2, True),
        Case("with a mask and dropout, float32", 16, 40, 8, 4, True, True),
        Case("with dropout", 24, 16, 8, 2, False, True),
    ]


EXERCISES = [
    Exercise(
        id="02.1",
        title="Bytes by hand",
        level=1,
        task=(
            "One head with 2048 queries, 2048 keys and `head_dim` 128, in 16-bit numbers, no mask, no dropout. How "
            "many bytes do the three passes of the naive form move, reads and writes together? Set `moved_bytes`; an "
            "expression such as `2 * 2048 * 128` is fine."
        ),
        name="moved_bytes",
        stub=BYTES_STUB,
        solution=BYTES,
        wrong=(
            Wrong("the elements are counted, not their bytes", edit=("(read + written) * 2", "read + written")),
            Wrong("the numbers have 4 bytes; 16 bits are 2 bytes", edit=("* 2\n", "* 4\n")),
            Wrong("bits are counted, not bytes", edit=("* 2\n", "* 16\n")),
            Wrong("the answer is in MB (10**6 bytes), not in bytes", edit=("* 2\n", "* 2 / 1e6\n")),
            Wrong("the answer is in MiB (2**20 bytes), not in bytes", edit=("* 2\n", "* 2 / 2**20\n")),
            Wrong("S is written, but the softmax does not read it back", edit=("+ square + (", "+ (")),
            Wrong("only what is written is counted", edit=("(read + written)", "written")),
            Wrong("only what is read is counted", edit=("(read + written)", "read")),
            Wrong(
                "each of Q, K, V, S, P and the output is counted once: S and P are written and read back",
                source="square, narrow = 2048 * 2048, 2048 * 128\nmoved_bytes = (2 * square + 4 * narrow) * 2\n",
            ),
            Wrong(
                "only S and P are counted, and Q, K, V and the output are left out",
                source="moved_bytes = 4 * 2048 * 2048 * 2\n",
            ),
        ),
        rtol=1e-12,
    ),
    Exercise(
        id="02.2",
        title="The least time",
        level=2,
        task=(
            "Write `least_ms(flops, moved_bytes, peak_tflops, bandwidth_gb_s)`: the least time in milliseconds that a "
            "kernel can take that does `flops` operations and moves `moved_bytes` bytes, on a GPU with this peak "
            "(TFLOP/s, $10^{12}$) and bandwidth (GB/s, $10^9$). Arithmetic and memory work at the same time."
        ),
        name="least_ms",
        stub=LEAST_STUB,
        solution=LEAST,
        cases=least_cases,
        also_right=(LEAST_BY_SPEED,),
        wrong=(
            Wrong(
                "the shorter of the two times is taken: the kernel has to wait for the longer one", edit=("max", "min")
            ),
            Wrong(
                "the two times are added, though arithmetic and memory work at the same time",
                edit=("max(compute_s, memory_s)", "(compute_s + memory_s)"),
            ),
            Wrong("the time is in seconds", edit=(" * 1e3", "")),
            Wrong("the time is in microseconds", edit=(" * 1e3", " * 1e6")),
            Wrong(
                "the units are left as they are: TFLOP/s are 10**12 a second, GB/s are 10**9",
                source=LEAST_WITHOUT_UNITS,
            ),
            Wrong("only the arithmetic is looked at", edit=("max(compute_s, memory_s)", "compute_s")),
            Wrong("only the bytes are looked at", edit=("max(compute_s, memory_s)", "memory_s")),
            Wrong("GB/s is taken for TB/s: the bandwidth is 1000 times too high", edit=("1e9", "1e12")),
            Wrong("GB/s is taken for MB/s: the bandwidth is 1000 times too low", edit=("1e9", "1e6")),
            Wrong("TFLOP/s is taken for GFLOP/s: the peak is 1000 times too low", edit=("1e12", "1e9")),
            Wrong(
                "the mean of the two times is taken: the kernel has to wait for the longer one",
                edit=("max(compute_s, memory_s)", "(compute_s + memory_s) / 2"),
            ),
        ),
    ),
    Exercise(
        id="02.3",
        title="All bytes of the naive form",
        level=2,
        task=(
            "Write `naive_bytes(seqlen_q, seqlen_k, head_dim, itemsize, mask, dropout)`: the bytes that all passes of "
            "the naive form move for one head, with a pass each for mask and dropout where asked. V is as wide as K. "
            "The mask itself and the random bits are taken as free."
        ),
        name="naive_bytes",
        stub=NAIVE_STUB,
        solution=NAIVE,
        cases=naive_cases,
        also_right=(NAIVE_BY_PASSES,),
        wrong=(
            Wrong(
                "S is taken to be seqlen_q by seqlen_q; it is seqlen_q by seqlen_k",
                edit=("seqlen_q * seqlen_k", "seqlen_q**2"),
            ),
            Wrong(
                "a mask and dropout cost one read only; what they change is written back",
                edit=("4 + 2 * mask + 2 * dropout", "4 + mask + dropout"),
            ),
            Wrong(
                "mask and dropout together are counted as one pass",
                edit=("4 + 2 * mask + 2 * dropout", "4 + 2 * (mask or dropout)"),
            ),
            Wrong(
                "all four narrow arrays are counted with seqlen_q; K and V have seqlen_k rows",
                edit=("2 * seqlen_q + 2 * seqlen_k", "4 * seqlen_q"),
            ),
            Wrong("a mask and dropout are taken as free", edit=("4 + 2 * mask + 2 * dropout", "4")),
            Wrong("S and P are written and never read back", edit=("4 + 2 * mask + 2 * dropout", "2 + mask + dropout")),
            Wrong("the output is not written", edit=("2 * seqlen_q + 2 * seqlen_k", "seqlen_q + 2 * seqlen_k")),
            Wrong("elements are counted, not bytes", edit=(" * itemsize\n", "\n")),
            Wrong("an element always has 2 bytes, whatever `itemsize` is", edit=(" * itemsize\n", " * 2\n")),
            Wrong("only S and P are counted", edit=("(squares * square + narrow)", "squares * square")),
            Wrong(
                "all four narrow arrays are counted with seqlen_k; Q and the output have seqlen_q rows",
                edit=("2 * seqlen_q + 2 * seqlen_k", "4 * seqlen_k"),
            ),
        ),
    ),
]
