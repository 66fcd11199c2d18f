"""A tile: how it is addressed, how it is loaded and stored, and how large it is on each GPU.

A tensor is a pointer and a tuple of strides, or, where the layout allows it, a descriptor that the copy engine of newer
GPUs reads; the kernels see neither, they ask for a tile. Tile sizes come from a table that `benchmarks/tune.py` found.

Source: FlashAttention-2, section 3.3 (tile sizes), https://arxiv.org/abs/2307.08691
"""

import contextlib
import functools
from typing import NamedTuple

import torch

from flashlib import device
from flashlib.device import tl, triton

INTERPRETED = device.interpreting()

# Compiled code by all that it depends on, for `launch`.
_COMPILED = {}

# Descriptors cost the host some time, which pays from this length on.
DESCRIPTOR_FROM = 512
# Row number of the end of a sequence in the descriptor of a packed tensor.
FAR = tl.constexpr(2**30)


class Tile(NamedTuple):
    """How one kernel is launched: rows of queries and of keys, warps of a program, depth of its pipeline.

    max_registers bounds the registers of a thread, so that more programs fit on a multiprocessor; None leaves them to
    the compiler.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@triton.jit
def load_tile(
    x,
    stride,
    b,
    h,
    first,
    length,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DIM: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
    WIDE: tl.constexpr,
    start=0,
):
    """Load rows first … first + ROWS of x[b, h]; what lies past `length` rows or DIM columns is 0. [ROWS, COLS]

    In a packed tensor the rows of sequence b begin at row `start`. DESCRIPTOR: 0 for pointers, 1 for a descriptor, 2
    for that of `packed_descriptor`.
    """
    if DESCRIPTOR:
        if DESCRIPTOR == 1:
            # Rank 4, so that the copy engine itself knows where this head's rows end.
            tile = x.load([b, h, first, 0]).reshape(ROWS, COLS)
        else:
            # Its last row is this sequence's last.
            tile = x.load([FAR, start + length, h, FAR - length + first, 0]).reshape(ROWS, COLS)
    else:
        inside = (first + tl.arange(0, ROWS) < length)[:, None]
        if DIM < COLS:
            inside = inside & (tl.arange(0, COLS) < DIM)[None, :]
        tile = tl.load(tile_pointers(x, stride, b, h, first, ROWS, COLS, WIDE, start), mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    x, stride, tile, b, h, first, length, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    start=0,
):  # fmt: skip
    """Store a tile [ROWS, COLS] to x[b, h] from row `first` on, but nothing past `length` rows or DIM columns."""
    inside = (first + tl.arange(0, ROWS) < length)[:, None] & (tl.arange(0, COLS) < DIM)[None, :]
    ptrs = tile_pointers(x, stride, b, h, first, ROWS, COLS, WIDE, start)
    tl.store(ptrs, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def tile_pointers(
    x, stride, b, h, first, ROWS: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr, start=0
):  # fmt: skip
    """Return the addresses of x[b, h, first:first + ROWS, :COLS]. [ROWS, COLS]"""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, COLS)
    if WIDE:
        row = row.to(tl.int64)
        col = col.to(tl.int64)
    first = first + start
    # One number a program is 64 bits wide; inside a tile 32 bits reach far enough unless WIDE.
    begin = b.to(tl.int64) * stride[0] + h.to(tl.int64) * stride[1] + tl.cast(first, tl.int64) * stride[2]
    return x + begin + (row * stride[2])[:, None] + (col * stride[3])[None, :]


@triton.jit
def packed_tile(packed, AXIS: tl.constexpr, total, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Return sequence, head and tile of a program over packed sequences; past the last sequence there is nothing to do.

    packed: (cu_q, cu_k, batch); AXIS: 0 for tiles of queries, 1 of keys; total: rows of the packed tensor, which have
    total // BLOCK + batch tiles at most.
    """
    most = total // BLOCK + packed[2]
    number = tl.program_id(0) % most
    lane = tl.arange(0, LANES)
    begin = tl.load(packed[AXIS] + lane, mask=lane < packed[2], other=0)
    end = tl.load(packed[AXIS] + lane + 1, mask=lane < packed[2], other=0)
    tiles = tl.cdiv(end - begin, BLOCK)
    # A sequence lies before this tile if its tiles end there; lanes past the batch are the last to be passed.
    before = tl.cumsum(tiles, 0) <= number
    b = tl.sum(before.to(tl.int32), 0)
    return b, tl.program_id(0) // most, number - tl.sum(tl.where(before, tiles, 0), 0)


@triton.jit
def spans(packed, b, seqlen_q, seqlen_k):
    """Return where sequence b begins and how long it is, in q and in k; a dense one begins at 0."""
    if packed is None:
        return 0, seqlen_q, 0, seqlen_k
    else:
        start_q = tl.load(packed[0] + b)
        start_k = tl.load(packed[1] + b)
        return start_q, tl.load(packed[0] + b + 1) - start_q, start_k, tl.load(packed[1] + b + 1) - start_k


@triton.jit
def _fill_tail_kernel(
    x_ptr, stride, cu_ptr, batch, nheads, total, value, DIM: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    end = tl.load(cu_ptr + batch)
    if tl.program_id(0) * ROWS + ROWS <= end:
        return
    cols = tl.arange(0, COLS)
    inside = ((rows >= end) & (rows < total))[:, None] & (cols < DIM)[None, :]
    for h in tl.range(0, nheads):
        ptrs = x_ptr + tl.cast(h, tl.int64) * stride[1] + rows.to(tl.int64)[:, None] * stride[2]
        ptrs += cols.to(tl.int64)[None, :] * stride[3]
        tl.store(ptrs, tl.full([ROWS, COLS], value, x_ptr.dtype.element_ty), mask=inside)


@functools.cache
def padded(head_dim):
    """Return the number of columns that a tile needs for head_dim: the next power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


@functools.cache
def columns_of(head_dim, head_dim_v, itemsize):
    """Return the columns of tiles of q and k, and of v: padded, and alike up to 128 bytes a row.

    Rows of 128 bytes or more lie in shared memory in one pattern, shorter ones in others. Where K and V share a
    buffer but not the pattern, the assembler of CUDA 12.8 (it comes with Triton 3.6 and 3.7) reads a register that it
    never wrote.
    """
    columns, columns_v = padded(head_dim), padded(head_dim_v)
    full = 128 // itemsize
    return max(columns, min(columns_v, full)), max(columns_v, min(columns, full))


def wide(strides):
    """Return whether an offset inside one tile, 256 rows or columns at most, can pass 32 bits."""
    return any(abs(stride) * 256 >= 2**31 for stride in strides)


def describable(x, architecture):
    """Return whether the copy engine (Hopper and newer) can read x: last stride 1, others multiples of 16 bytes."""
    unit = 16 // x.element_size()
    return (
        architecture >= 90
        and x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and x.numel() > 0
        and all(s % unit == 0 and 0 < s < 2**38 for s, n in zip(x.stride()[:3], x.shape, strict=False) if n > 1)
    )


def descriptor(x, rows, columns):
    """Return a descriptor of x, (batch, nheads, seqlen, head_dim), that loads [1, 1, rows, columns]."""
    # Imported here, so that where Triton is missing `flashlib.device` is the one to say so.
    from triton.tools.tensor_descriptor import TensorDescriptor

    unit = 16 // x.element_size()
    # The stride of an axis of length 1 is never used, but the hardware wants it well formed.
    strides = [s if n > 1 else unit for s, n in zip(x.stride()[:3], x.shape, strict=False)] + [1]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, columns])


def packed_descriptor(x, rows, columns):
    """Return a descriptor of packed x, (1, nheads, total, head_dim), for tiles that stop at their sequence's end.

    The axis of rows is FAR long, and a sequence's row number FAR is its end, so that what follows is out of bounds and
    reads as 0. Row FAR - r is r rows before the end: another axis of the same stride adds the end's place, and a third
    takes FAR rows back. Its stride is 2**34 elements less one row: FAR steps of 2**34 elements are a multiple of 2**64
    bytes, which is 0, because addresses have 64 bits.

    Source: the idea is that of `triton.tools.ragged_tma`.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    stride_h, stride_m = x.stride()[1:3]
    if x.shape[1] == 1:
        stride_h = 16 // x.element_size()
    shape = [2**31 - 2**16, 2**31 - 2**16, x.shape[1], FAR.value, x.shape[3]]
    return TensorDescriptor(x, shape, [2**34 - stride_m, stride_m, stride_h, stride_m, 1], [1, 1, 1, rows, columns])


@functools.cache
def architecture_of(device):
    """Return 10 × major + minor compute capability of a GPU, 0 for the interpreter's CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# (kernel, family, bytes of an element): columns -> (block_m, block_n, num_warps, num_stages), or a pair of those,
# without and with causal. Narrower tiles take the next wider row. Families: compute capability 75, 80, 90, 100, and
# "99" for the cards with 99 KB of shared memory a block (86, 89, 120). 90 was measured at 64 and 128 columns; the
# others are the first of a few candidates that compile without much stack and fit.
TILES = {
    ("forward", 90, 2): {
        16: (128, 64, 4, 3),
        32: (128, 64, 4, 3),
        64: ((64, 128, 4, 1), (64, 128, 4, 2)),
        128: (64, 128, 4, 1),
        256: (128, 64, 8, 2),
    },
    ("dkdv", 90, 2): {
        16: (64, 128, 8, 2),
        32: (64, 128, 8, 2),
        64: (128, 64, 4, 2),
        128: (64, 64, 4, 2),
        256: (32, 64, 8, 2),
    },
    ("dq", 90, 2): {
        16: (128, 64, 8, 2),
        32: (128, 64, 8, 2),
        64: (128, 64, 8, 3),
        128: (128, 64, 8, 3),
        256: (64, 32, 4, 2),
    },
    ("forward", 90, 4): {64: (128, 64, 4, 1), 128: (32, 64, 4, 2), 256: (16, 32, 4, 1)},
    ("dkdv", 90, 4): {64: (64, 32, 4, 1), 128: (64, 32, 4, 1), 256: (32, 16, 4, 1)},
    ("dq", 90, 4): {64: (128, 64, 8, 3), 128: (32, 64, 4, 1), 256: (16, 32, 4, 1)},
    ("forward", 75, 2): {64: (32, 32, 4, 1), 128: (16, 32, 4, 1)},
    ("dkdv", 75, 2): {64: (16, 32, 4, 1), 128: (16, 16, 4, 1)},
    ("dq", 75, 2): {64: (16, 32, 4, 1), 128: (16, 16, 4, 1)},
    ("forward", 75, 4): {64: (32, 32, 4, 1), 128: (16, 32, 4, 1)},
    ("dkdv", 75, 4): {64: (16, 32, 4, 1), 128: (16, 16, 4, 1)},
    ("dq", 75, 4): {64: (32, 16, 4, 1), 128: (16, 16, 4, 1)},
    ("forward", 80, 2): {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
    ("dkdv", 80, 2): {64: (32, 64, 4, 2), 128: (64, 64, 8, 2), 256: (32, 64, 8, 2)},
    ("dq", 80, 2): {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
    ("forward", 80, 4): {64: (64, 32, 4, 2), 128: (32, 32, 4, 1), 256: (16, 16, 4, 1)},
    ("dkdv", 80, 4): {64: (32, 32, 4, 2), 128: (32, 32, 8, 1), 256: (16, 16, 4, 1)},
    ("dq", 80, 4): {64: (32, 32, 4, 2), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)},
    ("forward", "99", 2): {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 4, 2)},
    ("dkdv", "99", 2): {64: (32, 64, 4, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
    ("dq", "99", 2): {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1)},
    ("forward", "99", 4): {64: (64, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 4, 1)},
    ("dkdv", "99", 4): {64: (32, 32, 4, 2), 128: (32, 32, 8, 1), 256: (16, 16, 4, 1)},
    ("dq", "99", 4): {64: (32, 32, 4, 2), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)},
    ("forward", 100, 2): {64: (128, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 2)},
    ("dkdv", 100, 2): {64: (64, 64, 4, 2), 128: (32, 128, 8, 2), 256: (32, 64, 8, 2)},
    ("dq", 100, 2): {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 2)},
    ("forward", 100, 4): {64: (64, 32, 4, 2), 128: (64, 32, 8, 2), 256: (16, 16, 4, 1)},
    ("dkdv", 100, 4): {64: (32, 32, 4, 2), 128: (32, 32, 8, 1), 256: (16, 16, 4, 1)},
    ("dq", 100, 4): {64: (32, 32, 4, 2), 128: (32, 16, 4, 1), 256: (16, 16, 4, 1)},
    # block_m is the most rows, the new tokens of a group of heads, that one program takes.
    ("decode", 90, 2): {64: (64, 128, 4, 4), 128: (64, 64, 4, 4), 256: (64, 32, 4, 4)},
    ("decode", 90, 4): {64: (64, 64, 4, 3), 128: (64, 32, 4, 3), 256: (16, 16, 8, 2)},
    ("decode", 75, 2): {64: (64, 32, 4, 1), 128: (32, 32, 4, 1)},
    ("decode", 75, 4): {64: (32, 32, 4, 1), 128: (16, 32, 4, 1)},
    ("decode", 80, 2): {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 3)},
    ("decode", 80, 4): {64: (32, 32, 4, 3), 128: (32, 32, 4, 2), 256: (16, 16, 8, 2)},
    ("decode", "99", 2): {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)},
    ("decode", "99", 4): {64: (32, 32, 4, 2), 128: (32, 32, 4, 2), 256: (16, 16, 8, 2)},
    ("decode", 100, 2): {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (64, 32, 4, 3)},
    ("decode", 100, 4): {64: (32, 32, 4, 3), 128: (32, 32, 4, 2), 256: (16, 16, 8, 2)},
}


@functools.cache
def tile_for(kernel, architecture, itemsize, columns, causal):
    """Return the Tile of "forward", "dkdv" or "dq" on a GPU for `columns` (padded head_dim) of `itemsize` bytes."""
    if architecture == 0:
        return Tile(32, 32, 4, 1)
    family = architecture if architecture in (75, 80, 90, 100) else "99"
    rows = TILES[kernel, family, itemsize]
    found = [rows[wider] for wider in sorted(rows) if wider >= columns]
    if not found:
        raise RuntimeError(
            f"this GPU has too little shared memory for head_dim {columns} (at most {max(rows)}): use a smaller one, "
            "or restart Python with TRITON_INTERPRET=1"
        )
    return Tile(*(found[0][causal] if isinstance(found[0][0], tuple) else found[0]))


class Plan(NamedTuple):
    """How one kernel is launched on given tensors: its Tile, the rows of a tile that its loop loads, its constants."""

    tile: Tile
    rows: int
    constants: dict

    def loaded(self, *tensors):
        """Return what the kernel takes for the two tensors that its loop loads: descriptors, or the tensors."""
        if not self.constants["DESCRIPTOR"]:
            return tensors
        make = descriptor if self.constants["LANES"] is None else packed_descriptor
        columns = self.constants["COLS"], self.constants["COLS_V"]
        return tuple(make(x, self.rows, n) for x, n in zip(tensors, columns, strict=True))


def plan(kernel, q, v, causal, loaded, lanes=None):
    """Return the Plan of a kernel, "forward", "dkdv" or "dq", whose loop loads `loaded`; lanes if packed."""
    architecture = architecture_of(q.device)
    columns = columns_of(q.shape[3], v.shape[3], q.element_size())
    tile = tile_for(kernel, architecture, q.element_size(), max(columns), causal)
    described = loaded[0].shape[2] >= DESCRIPTOR_FROM and all(describable(x, architecture) for x in loaded)
    strides = q.stride()[2:] + v.stride()[2:] + loaded[0].stride()[2:] + loaded[1].stride()[2:]
    rows = tile.block_m if kernel == "dkdv" else tile.block_n
    shapes = q.shape[3], v.shape[3], columns
    return Plan(tile, rows, _constants(tile, *shapes, architecture, described, strides, lanes))


@functools.lru_cache(maxsize=1024)
def _constants(tile, head_dim, head_dim_v, columns, architecture, described, strides, lanes):
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "COLS": columns[0],
        "COLS_V": columns[1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        # float32 in three TF32 products has float32's accuracy; where there is no TF32, plain float32 arithmetic.
        "PRECISION": "tf32x3" if architecture >= 80 else "ieee",
        "DESCRIPTOR": int(described) * (1 if lanes is None else 2),
        "WIDE": wide(strides),
        "LANES": lanes,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
    }


def fill_tails(cu, *pairs):
    """Set the rows behind the last packed sequence: pairs of a tensor (1, nheads, total, columns) and a value."""
    for x, value in pairs:
        if x.numel():
            arguments = x, x.stride(), cu, cu.shape[0] - 1, x.shape[1], x.shape[2], value
            launch(
                _fill_tail_kernel, -(-x.shape[2] // 128), arguments,
                {"DIM": x.shape[3], "COLS": padded(x.shape[3]), "ROWS": 128},
            )  # fmt: skip


def launch(kernel, programs, arguments, constants):
    """Launch `programs` programs of a kernel, as `kernel[(programs,)](*arguments, **constants)` does, in less time.

    Triton asks each argument which specialised code it needs (is it 1, is it a multiple of 16?) and then looks the
    code up. For
    arguments like those of an earlier launch the code is known: that saves the host a good part of a short call.
    """
    if not programs:
        return
    if INTERPRETED:
        kernel[(programs,)](*arguments, **constants)
        return
    key = kernel, *map(_fact, arguments), *constants.values()
    compiled = _COMPILED.get(key)
    if compiled is None:
        if len(_COMPILED) > 10000:
            _COMPILED.clear()
        _COMPILED[key] = kernel[(programs,)](*arguments, **constants)
    else:
        compiled[programs, 1, 1](*arguments, *map(constants.get, kernel.arg_names[len(arguments) :]))


def _fact(argument):
    """Return what code depends on: a number itself; a tensor's dtype, GPU, alignment; a descriptor's block."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.device, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    if hasattr(argument, "block_shape"):
        return argument.base.dtype, argument.base.device, *argument.block_shape
    if isinstance(argument, tuple) and argument and type(argument[0]) is not int:
        return tuple(map(_fact, argument))
    return argument


def accumulator(dtype):
    """Return the dtype of scores, sums and lse for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_out(q, v):
    """Return memory for out in the order of q's axes, so that what follows finds the layout that came in."""
    return torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty((*q.shape[:3], v.shape[3]))


def pointers(tensors):
    """Return tensors as one argument of a kernel, bfloat16 widened where the interpreter cannot compute in it."""
    return tuple(map(pointer, tensors))


def pointer(x):
    """Return a tensor, or None, as an argument of a kernel, widened likewise."""
    return x.float() if x is not None and x.device.type == "cpu" and x.dtype == torch.bfloat16 else x


def on_device_of(x):
    """Return a context in which kernels are launched on the GPU of x."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def check_device(q):
    """Raise the error that says why kernels cannot run on q, if they cannot."""
    # A traced call has no GPU to ask; the kernel's launch will find out.
    if not torch.compiler.is_compiling():
        device.check_launch(q, "q")
    if q.dtype == torch.float64 and q.device.type != "cpu":
        raise ValueError("q must have dtype float16, bfloat16 or float32 on a GPU, got torch.float64")
