"""Exercises of chapter 05, Traffic."""

from flashlib.check import Case, Exercise, Wrong

# --- 05.1 ----------------------------------------------------------------------------------------------------------

_DOUBLING = Exercise(
    id="05.1",
    title="Twice as long",
    level=1,
    task=(
        "A sequence of 16,384 tokens becomes one of 32,768. Head_dim 64, tiles of 128 × 128, no mask. By what factor "
        "does each of these grow, to one digit? `factors = (flops, requested, extra, compulsory)`: the FLOPs of the "
        "tiled form; the bytes it requests; the memory it needs beside q, k, v and out; its compulsory bytes."
    ),
    name="factors",
    stub="factors = None",
    solution="# Every score is computed; every query tile loads all keys: both grow as N².\nfactors = (4, 4, 2, 2)\n",
    rtol=0.03,
    wrong=(
        Wrong(
            "the requested bytes are taken to be linear: the working set is, the traffic is not",
            source="factors = (4, 2, 2, 2)",
            stumble=6,
        ),
        Wrong(
            "the arithmetic and the requested bytes are taken to be linear, as if attention itself were",
            source="factors = (2, 2, 2, 2)",
            stumble=6,
        ),
        Wrong("the arithmetic is taken to be linear", source="factors = (2, 4, 2, 2)"),
        Wrong("S and P are still held: the extra memory of the naive form", source="factors = (4, 4, 4, 2)"),
        Wrong(
            "S and P are still stored, and the compulsory bytes are not told from the requested ones",
            source="factors = (4, 4, 4, 4)",
        ),
        Wrong(
            "compulsory bytes are not told from requested ones: each tensor once is linear",
            source="factors = (4, 4, 2, 4)",
        ),
    ),
)

# --- 05.2 ----------------------------------------------------------------------------------------------------------

_CAP = Exercise(
    id="05.2",
    title="The cap of another card",
    level=1,
    task=(
        "An H100 reads 3,350 GB/s. The tiled forward runs with query tiles of **64** rows, in 16 bit, on a very long "
        "sequence. If every requested byte came from HBM, how many TFLOP/s could it reach at most? Give `cap` as a "
        "number of TFLOP/s."
    ),
    name="cap",
    stub="cap = None",
    solution=(
        "# One key tile: 4·64·block_n·d FLOPs for 2·block_n·d elements of 2 bytes, so 64 FLOP a byte.\n"
        "cap = 64 * 3350 / 1000\n"
    ),
    rtol=5e-3,
    wrong=(
        Wrong(
            "the bytes are half of what they are: V is not counted beside K, or an element as 1 byte",
            source="cap = 128 * 3350 / 1000",
        ),
        Wrong(
            "the FLOPs are half of what they are (one product, or a multiply-add as one), or an element has 4 bytes",
            source="cap = 32 * 3350 / 1000",
        ),
        Wrong("the bandwidth of an H200 is used", source="cap = 64 * 4800 / 1000"),
        Wrong("the answer is in GFLOP/s", source="cap = 64 * 3350"),
        Wrong("the answer is in FLOP per byte, not yet multiplied by the bandwidth", source="cap = 64"),
    ),
)

# --- 05.3 ----------------------------------------------------------------------------------------------------------

_REQUESTED_SOLUTION = """\
def requested(seqlen_q, seqlen_k, head_dim, block_m, itemsize):
    tiles_q = -(-seqlen_q // block_m)
    loads = seqlen_q * head_dim + tiles_q * 2 * seqlen_k * head_dim
    stores = seqlen_q * head_dim
    return (loads + stores) * itemsize + seqlen_q * 4
"""

_REQUESTED_LOOP = """\
def requested(seqlen_q, seqlen_k, head_dim, block_m, itemsize):
    total = 0
    for start in range(0, seqlen_q, block_m):
        rows = min(block_m, seqlen_q - start)
        total += 2 * rows * head_dim * itemsize + 4 * rows
        total += 2 * seqlen_k * head_dim * itemsize
    return total
"""


def _requested_cases():
    sizes = [
        ("one tile holds all queries", 50, 130, 32, 64, 2),
        ("tiles that divide the length", 256, 256, 64, 64, 2),
        ("a ragged length", 300, 200, 64, 128, 2),
        ("float32", 300, 200, 64, 128, 4),
        ("one query, as in decoding", 1, 5000, 128, 128, 2),
        ("a long sequence", 100_000, 100_000, 128, 128, 2),
    ]
    return [Case(label, *size) for label, *size in sizes]


_REQUESTED = Exercise(
    id="05.3",
    title="Count it yourself",
    level=2,
    task=(
        "Write `requested(seqlen_q, seqlen_k, head_dim, block_m, itemsize)`: all bytes that `tiling.forward` loads and "
        "stores for one head, without a mask, when nothing is cached. q, k, v, out have `itemsize` bytes an element; "
        "one float32 lse is stored for each row. Lengths need not be multiples of the tile."
    ),
    name="requested",
    stub="""\
def requested(seqlen_q, seqlen_k, head_dim, block_m, itemsize):
    raise NotImplementedError
""",
    solution=_REQUESTED_SOLUTION,
    cases=_requested_cases,
    also_right=(_REQUESTED_LOOP,),
    wrong=(
        Wrong(
            "K and V are loaded once: these are the compulsory bytes, and linear in N",
            edit=("tiles_q * 2 * seqlen_k", "2 * seqlen_k"),
            stumble=6,
        ),
        Wrong(
            "the short last query tile is forgotten (division rounded down)",
            edit=("-(-seqlen_q // block_m)", "seqlen_q // block_m"),
        ),
        Wrong("the number of tiles is left a fraction", edit=("-(-seqlen_q // block_m)", "seqlen_q / block_m")),
        Wrong(
            "K and V are loaded once for every query, not once for every query tile",
            edit=("tiles_q = -(-seqlen_q // block_m)", "tiles_q = seqlen_q"),
        ),
        Wrong(
            "K and V are taken to have seqlen_q rows; they have seqlen_k",
            edit=("tiles_q * 2 * seqlen_k", "tiles_q * 2 * seqlen_q"),
        ),
        Wrong("V is not loaded", edit=("tiles_q * 2 * seqlen_k", "tiles_q * seqlen_k")),
        Wrong("the lse is not stored", edit=(" + seqlen_q * 4", "")),
        Wrong("the lse has the itemsize of q, not float32's 4 bytes", edit=("seqlen_q * 4", "seqlen_q * itemsize")),
        Wrong("the output is not stored, or Q is not loaded", edit=("stores = seqlen_q * head_dim", "stores = 0")),
        Wrong(
            "elements are counted, not bytes",
            edit=("(loads + stores) * itemsize + seqlen_q * 4", "loads + stores + seqlen_q"),
        ),
        Wrong(
            "S and P are still stored and read back",
            edit=("stores = seqlen_q * head_dim", "stores = seqlen_q * head_dim + 4 * seqlen_q * seqlen_k"),
        ),
        Wrong(
            "Q is loaded again for every key tile (of block_m keys), as in the other loop order",
            edit=("loads = seqlen_q * head_dim", "loads = -(-seqlen_k // block_m) * seqlen_q * head_dim"),
        ),
    ),
)

# --- 05.4 ----------------------------------------------------------------------------------------------------------

_BEST_SOLUTION = """\
def best_tiles(memory, head_dim, seqlen):
    best = None
    for block_m in range(16, 257, 16):
        for block_n in range(16, 257, 16):
            on_chip = 2 * block_m * head_dim + 2 * block_n * head_dim + block_m * block_n
            if on_chip > memory:
                continue
            traffic = -(-seqlen // block_m) * 2 * seqlen * head_dim
            rank = (traffic, -block_n, -block_m)
            if best is None or rank < best:
                best = rank
    return -best[2], -best[1]
"""

_BEST_SORTED = """\
def best_tiles(memory, head_dim, seqlen):
    sides = range(16, 257, 16)
    fit = [(m, n) for m in sides for n in sides if 2 * (m + n) * head_dim + m * n <= memory]
    fewest = min(-(-seqlen // m) for m, n in fit)
    return max((pair for pair in fit if -(-seqlen // pair[0]) == fewest), key=lambda pair: (pair[1], pair[0]))
"""


def _best_cases():
    # Elements of 16 bit in the shared memory of one block: T4, A100, H100; and two toys.
    sizes = [
        ("64 KiB, head_dim 64", 32_768, 64, 4096),
        ("163 KiB, head_dim 64", 83_456, 64, 65_536),
        ("163 KiB, head_dim 128", 83_456, 128, 65_536),
        ("227 KiB, head_dim 128", 116_224, 128, 8192),
        ("227 KiB, head_dim 256", 116_224, 256, 8192),
        ("a short sequence, which one query tile can hold", 83_456, 64, 128),
        ("memory for 64 × 64 tiles of head_dim 16, and not one element more", 8_192, 16, 4096),
    ]
    return [Case(label, *size) for label, *size in sizes]


_BEST = Exercise(
    id="05.4",
    title="The best tiles",
    level=3,
    task=(
        "On chip one step holds a tile each of Q, K, V and S, and `acc`, all counted as 16-bit elements. Write "
        "`best_tiles(memory, head_dim, seqlen)`: among `block_m` and `block_n` in 16, 32, …, 256 that fit in `memory` "
        "**elements**, the pair `(block_m, block_n)` that requests the fewest bytes (i-outer, no mask, seqlen queries "
        "and keys). Of equals take the largest `block_n` (fewest steps), then the largest `block_m`."
    ),
    name="best_tiles",
    stub='''\
def best_tiles(memory, head_dim, seqlen):
    """Return (block_m, block_n)."""
    raise NotImplementedError
''',
    solution=_BEST_SOLUTION,
    cases=_best_cases,
    also_right=(_BEST_SORTED,),
    wrong=(
        Wrong("acc is left out of what lies on chip", edit=("2 * block_m * head_dim + 2", "block_m * head_dim + 2")),
        Wrong("V is left out of what lies on chip", edit=("2 * block_n * head_dim", "block_n * head_dim")),
        Wrong("the tile of scores is left out of what lies on chip", edit=(" + block_m * block_n", "")),
        Wrong("`memory` is taken as bytes, not elements", edit=("if on_chip > memory", "if 2 * on_chip > memory")),
        Wrong(
            "block_n is made large where block_m should be: the traffic depends on the query tile only",
            edit=("-(-seqlen // block_m) * 2", "-(-seqlen // block_n) * 2"),
        ),
        Wrong(
            "the tile is made as large as possible, block_m × block_n, whatever it requests",
            edit=("rank = (traffic,", "rank = (-block_m * block_n,"),
        ),
        Wrong(
            "only square tiles are tried", edit=("if on_chip > memory:", "if on_chip > memory or block_m != block_n:")
        ),
        Wrong(
            "the number of query tiles is rounded down, so that a sequence shorter than a tile seems free",
            edit=("-(-seqlen // block_m) * 2", "seqlen // block_m * 2"),
        ),
        Wrong(
            "the number of query tiles is left a fraction: a tile longer than the sequence saves nothing",
            edit=("-(-seqlen // block_m) * 2", "seqlen / block_m * 2"),
        ),
        Wrong(
            "tiles that fill the memory to the last element are left out: they fit",
            edit=("on_chip > memory", "on_chip >= memory"),
        ),
        Wrong(
            "only powers of two are tried",
            edit=("in range(16, 257, 16):\n        for", "in (16, 32, 64, 128, 256):\n        for"),
        ),
        Wrong("256 is left out: range(16, 256, 16) ends at 240", source=_BEST_SOLUTION.replace("257", "256")),
        Wrong("the pair is returned as (block_n, block_m)", edit=("-best[2], -best[1]", "-best[1], -best[2]")),
        Wrong(
            "of equals the smallest block_n is taken",
            edit=("(traffic, -block_n, -block_m)", "(traffic, block_n, -block_m)"),
        ),
    ),
)

EXERCISES = [_DOUBLING, _CAP, _REQUESTED, _BEST]
