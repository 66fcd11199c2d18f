"""What attention costs: the arithmetic it does, the bytes it moves, and the time these two allow at best.

A kernel's time is at least its arithmetic at the GPU's peak, and at least its bytes at the memory's bandwidth. Counting
both by hand, pass by pass, shows where the naive form loses.

Sources: Williams, Waterman and Patterson, "Roofline", 2009, https://doi.org/10.1145/1498765.1498785; Dao et al.,
"FlashAttention", 2022, section 2 and Algorithm 0, https://arxiv.org/abs/2205.14135; each GPU's figures name theirs.
"""

import dataclasses
import math
import numbers

import numpy as np

# --- GPUs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU's figures as published, not as reached by any program; decimal units but for the on-chip memories.

    Args:
        name: the exact product.
        bandwidth_gb_s: GB/s between the GPU's own memory and the chip.
        capacity_gb: GB of that memory.
        sms: streaming multiprocessors, the units that compute; each has its own shared memory.
        shared_kib_sm: KiB of shared memory of one SM.
        shared_kib_block: KiB of it that one thread block can have.
        l2_mib: MiB of the cache between the memory and the SMs.
        peak_tflops: TFLOP/s of dense matrix products of 16-bit numbers, summed in 32 bits.
        dtype: the 16-bit format that peak_tflops holds for.
        source: where the figures stand.
    """

    name: str
    bandwidth_gb_s: float
    capacity_gb: float
    sms: int
    shared_kib_sm: int
    shared_kib_block: int
    l2_mib: float
    peak_tflops: float
    dtype: str
    source: str

    @property
    def ridge(self):
        """FLOP per byte at which arithmetic and memory take the same time."""
        return self.peak_tflops * 1e3 / self.bandwidth_gb_s

    @property
    def shared_bytes(self):
        """Bytes of shared memory of all SMs together."""
        return self.sms * self.shared_kib_sm * 1024


# Bandwidth, capacity and peak are figures of data sheets and white papers; where one prints a peak "with sparsity",
# half of it stands here. Shared memory by compute capability (7.5, 8.0, 8.9, 9.0, 9.0, 10.0): "CUDA C++ Programming
# Guide", section "Compute Capabilities", and for 10.0 "Blackwell Tuning Guide", section 1.4.1.1. Two rows hold what a
# driver reports (cuDeviceGetAttribute), as no document gives it: SMs and L2 of the H200, SMs of the B200.
GPUS = {
    "T4": Gpu(
        *("T4 16GB", 320, 16, 40, 64, 64, 4, 65, "fp16"),
        source='NVIDIA, "Turing GPU Architecture" white paper, table of the Tesla T4 (data sheet: 300 GB/s); no bf16',
    ),
    "A100": Gpu(
        *("A100 80GB SXM", 2039, 80, 108, 164, 163, 40, 312, "bf16"),
        source='NVIDIA, "GPU Performance Background User\'s Guide"; peak from the "A100 Tensor Core GPU" data sheet',
    ),
    "RTX 4090": Gpu(
        *("GeForce RTX 4090", 1008, 24, 128, 100, 99, 72, 165.2, "bf16"),
        source='NVIDIA, "Ada GPU Architecture" white paper, V2.02, appendix A, table 2',
    ),
    "H100": Gpu(
        *("H100 80GB SXM", 3350, 80, 132, 228, 227, 50, 989.4, "bf16"),
        source='NVIDIA, "H100 Tensor Core GPU" data sheet; SMs, L2, peak from the "Architecture" white paper',
    ),
    "H200": Gpu(
        *("H200 141GB SXM", 4800, 141, 132, 228, 227, 60, 989.4, "bf16"),
        source='NVIDIA, "H200 Tensor Core GPU" data sheet; SMs and L2 as the driver reports them',
    ),
    "B200": Gpu(
        *("B200 180GB SXM", 7700, 180, 148, 228, 227, 126, 2250, "bf16"),
        source='NVIDIA, "HGX B200" data sheet; L2 from the "Blackwell Tuning Guide", SMs as the driver reports them',
    ),
}


# --- arithmetic ----------------------------------------------------------------------------------------------------


def naive_flops(seqlen_q, seqlen_k, head_dim, *, batch=1, nheads=1):
    """Count the floating-point operations of the two matrix products, which the naive form does in full, masked or not.

    Args:
        seqlen_q, seqlen_k, head_dim, batch, nheads: sizes, int.

    Returns:
        int: 4·batch·nheads·seqlen_q·seqlen_k·head_dim; a multiplication and an addition count one each.

    Raises:
        ValueError: a size is not an int of at least 1.
    """
    seqlen_q, seqlen_k, head_dim, batch, nheads = _check_sizes(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, batch=batch, nheads=nheads
    )
    return 4 * batch * nheads * seqlen_q * seqlen_k * head_dim


def flash_flops(seqlen_q, seqlen_k, head_dim, *, batch=1, nheads=1, causal=False, backward=False):
    """Count the FLOPs by which a fused kernel's speed is quoted, the convention of every benchmark here.

    Args:
        seqlen_q, seqlen_k, head_dim, batch, nheads: sizes, int.
        causal: half the scores are not needed, and by convention exactly half are not counted.
        backward: count the backward pass instead: five products instead of two, 2.5 times the forward.

    Returns:
        float: the forward's 4·batch·nheads·seqlen_q·seqlen_k·head_dim, halved or multiplied as above.

    Raises:
        ValueError: a size is not an int of at least 1.
    """
    flops = naive_flops(seqlen_q, seqlen_k, head_dim, batch=batch, nheads=nheads)
    return flops * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)


# --- bytes ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kernel of the naive form: what it computes, reads and writes.

    Args:
        name: "qk", "mask", "softmax", "dropout" or "pv".
        flops: operations; in a softmax five a score: compare, subtract, exponential, add, divide.
        read_bytes, written_bytes: every input read once and every output written once.
    """

    name: str
    flops: int
    read_bytes: int
    written_bytes: int

    @property
    def moved_bytes(self):
        return self.read_bytes + self.written_bytes

    @property
    def intensity(self):
        """FLOP per byte moved."""
        return self.flops / self.moved_bytes


def naive_passes(seqlen_q, seqlen_k, head_dim, *, batch=1, nheads=1, itemsize=2, mask=False, dropout=False):
    """List the kernels of the naive form, each with its FLOPs and bytes.

    Args:
        seqlen_q, seqlen_k, head_dim, batch, nheads: sizes, int.
        itemsize: bytes of one number, of S and P too.
        mask: a pass of its own that reads S and writes it masked; the mask itself is taken as free.
        dropout: a pass of its own that reads P and writes what is left of it; its random bits are taken as free.

    Returns:
        list of Pass, in the order they run.

    Raises:
        ValueError: a size is not an int of at least 1.
    """
    seqlen_q, seqlen_k, head_dim, batch, nheads, itemsize = _check_sizes(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, batch=batch, nheads=nheads, itemsize=itemsize
    )
    scores = batch * nheads * seqlen_q * seqlen_k
    square = scores * itemsize
    queries = batch * nheads * seqlen_q * head_dim * itemsize
    keys = batch * nheads * seqlen_k * head_dim * itemsize
    passes = [Pass("qk", 2 * scores * head_dim, queries + keys, square)]
    if mask:
        passes.append(Pass("mask", scores, square, square))
    passes.append(Pass("softmax", 5 * scores, square, square))
    if dropout:
        # One comparison decides what is kept, one multiplication makes up for what is not.
        passes.append(Pass("dropout", 2 * scores, square, square))
    passes.append(Pass("pv", 2 * scores * head_dim, square + keys, queries))
    return passes


def compulsory_bytes(seqlen_q, seqlen_k, head_dim, *, batch=1, nheads=1, itemsize=2):
    """Count the bytes that no implementation can avoid: Q, K and V read once, the output written once.

    Args:
        seqlen_q, seqlen_k, head_dim, batch, nheads: sizes, int.
        itemsize: bytes of one number.

    Returns:
        int.

    Raises:
        ValueError: a size is not an int of at least 1.
    """
    seqlen_q, seqlen_k, head_dim, batch, nheads, itemsize = _check_sizes(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, batch=batch, nheads=nheads, itemsize=itemsize
    )
    return 2 * batch * nheads * (seqlen_q + seqlen_k) * head_dim * itemsize


def naive_extra_bytes(seqlen_q, seqlen_k, *, batch=1, nheads=1, itemsize=2):
    """Count the memory that S and P take beside the inputs and the output.

    Args:
        seqlen_q, seqlen_k, batch, nheads: sizes, int.
        itemsize: bytes of one number.

    Returns:
        int: both arrays, alive at the same time while P is computed from S.

    Raises:
        ValueError: a size is not an int of at least 1.
    """
    seqlen_q, seqlen_k, batch, nheads, itemsize = _check_sizes(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, batch=batch, nheads=nheads, itemsize=itemsize
    )
    return 2 * batch * nheads * seqlen_q * seqlen_k * itemsize


def flash_extra_bytes(seqlen_q, *, batch=1, nheads=1):
    """Count the memory a fused kernel takes beside the inputs and the output: one float32, the lse, a row.

    Args:
        seqlen_q, batch, nheads: sizes, int.

    Returns:
        int.

    Raises:
        ValueError: a size is not an int of at least 1.
    """
    seqlen_q, batch, nheads = _check_sizes(seqlen_q=seqlen_q, batch=batch, nheads=nheads)
    return 4 * batch * nheads * seqlen_q


# --- the roofline --------------------------------------------------------------------------------------------------


def roofline(gpu, intensity):
    """Return the speed that a GPU allows at an arithmetic intensity: the lower of its two roofs.

    Args:
        gpu: a `Gpu`, or a name in `GPUS`.
        intensity: FLOP per byte; a number or an array, at least 0.

    Returns:
        TFLOP/s, of intensity's shape.

    Raises:
        ValueError: gpu is not known, or intensity is negative or not a number.
    """
    gpu = _gpu(gpu)
    intensity = _numbers("intensity", intensity)
    if not (intensity >= 0).all():
        raise ValueError(f"intensity must be at least 0 FLOP/byte, got {intensity.min()}")
    return np.minimum(gpu.peak_tflops, gpu.bandwidth_gb_s * intensity / 1e3)[()]


def bound_ms(gpu, flops, moved_bytes):
    """Return the least time that a kernel can take: its arithmetic at the peak or its bytes at the bandwidth.

    Args:
        gpu: a `Gpu`, or a name in `GPUS`.
        flops: operations of the kernel.
        moved_bytes: bytes it reads and writes.

    Returns:
        float, milliseconds: the larger of the two, as both can go on at the same time.

    Raises:
        ValueError: gpu is not known, or a count is negative.
    """
    gpu = _gpu(gpu)
    for name, value in (("flops", flops), ("moved_bytes", moved_bytes)):
        if not (isinstance(value, (int, float, np.integer, np.floating)) and value >= 0):
            raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return max(flops / (gpu.peak_tflops * 1e12), moved_bytes / (gpu.bandwidth_gb_s * 1e9)) * 1e3


def _gpu(gpu):
    if isinstance(gpu, Gpu):
        return gpu
    if not (isinstance(gpu, str) and gpu in GPUS):
        raise ValueError(f"gpu must be a Gpu or one of {', '.join(GPUS)}, got {gpu!r}")
    return GPUS[gpu]


def _numbers(name, values):
    try:
        return np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number or an array of numbers, got {values!r}") from None


def _check_sizes(**sizes):
    """Return the sizes as Python's ints, which never overflow as NumPy's do."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {size!r}")
    return [int(size) for size in sizes.values()]


# --- tiles ---------------------------------------------------------------------------------------------------------


def visited_tiles(seqlen_q, seqlen_k, *, block_m, block_n, causal=False):
    """Count the tiles of scores that are computed.

    Args:
        seqlen_q, seqlen_k: lengths.
        block_m, block_n: queries and keys in a tile.
        causal: tiles above the diagonal, aligned at the bottom right, are skipped.

    Returns:
        int.

    Raises:
        ValueError: a size is not an int of at least 1.
    """
    _check_tiles(seqlen_q, seqlen_k, block_m, block_n)
    return sum(-(-keys // block_n) for _, keys in _rows_and_keys(seqlen_q, seqlen_k, block_m, block_n, causal))


def requested_bytes(
    seqlen_q,
    seqlen_k,
    head_dim,
    *,
    block_m,
    block_n,
    itemsize,
    causal=False,
    order="i-outer",
    head_dim_v=None,
):
    """Count the bytes that a tiled forward loads and stores when nothing is cached, without running it.

    Args:
        seqlen_q, seqlen_k, head_dim: sizes of one head.
        block_m, block_n: queries and keys in a tile.
        itemsize: bytes of one element of q, k, v and out; the statistics lse, m and l have at least 4.
        causal: tiles above the diagonal, aligned at the bottom right, are skipped.
        order: "i-outer", `tiling.forward`; "j-outer", `traffic.forward_keys_outer`; "naive", `traffic.naive`.
        head_dim_v: of v and out; head_dim unless given.

    Returns:
        dict: "loads" and "stores", each a dict of tensor name to bytes, and "total", all bytes; int.

    Raises:
        ValueError: a size is not an int of at least 1, order is none of the three, or it is "naive" and causal.

    Source:
        FlashAttention (Dao et al. 2022), proof of Theorem 2, here with every constant and ragged sizes.
    """
    _check_tiles(seqlen_q, seqlen_k, block_m, block_n)
    _check_sizes(head_dim=head_dim, itemsize=itemsize)
    if order not in ("i-outer", "j-outer", "naive"):
        raise ValueError(f'order must be "i-outer", "j-outer" or "naive", got {order!r}')
    if order == "naive" and causal:
        raise ValueError('causal must be False where order is "naive", got True')
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    _check_sizes(head_dim_v=head_dim_v)
    width, width_v, statistic = head_dim * itemsize, head_dim_v * itemsize, max(itemsize, 4)
    walk = list(_rows_and_keys(seqlen_q, seqlen_k, block_m, block_n, causal))
    keys = sum(keys for _, keys in walk)
    if order == "i-outer":
        loads = {"q": seqlen_q * width, "k": keys * width, "v": keys * width_v}
        stores = {"out": seqlen_q * width_v, "lse": seqlen_q * statistic}
    elif order == "j-outer":
        # A query tile is visited once for every key tile that it sees, its last one cut short included.
        rows = sum(rows * -(-keys // block_n) for rows, keys in walk)
        loads = {"k": seqlen_k * width, "v": seqlen_k * width_v, "q": rows * width}
        loads |= {"out": rows * width_v, "l": rows * statistic, "m": rows * statistic}
        # Before the first step every row is set to the state of no keys.
        rows += seqlen_q
        stores = {"out": rows * width_v, "l": rows * statistic, "m": rows * statistic}
    else:
        scores = seqlen_q * seqlen_k * itemsize
        loads = {"q": seqlen_q * width, "k": keys * width, "s": scores, "p": scores, "v": keys * width_v}
        stores = {"s": scores, "p": scores, "out": seqlen_q * width_v}
    return {"loads": loads, "stores": stores, "total": sum(loads.values()) + sum(stores.values())}


def attention_memory_bytes(seqlen, head_dim, *, nheads, batch=1, itemsize=2, form="flash"):
    """Count the bytes that one attention layer's forward holds in slow memory at its fullest.

    Args:
        seqlen, head_dim, nheads, batch: sizes; as many keys as queries.
        itemsize: bytes of one element.
        form: "flash" holds q, k, v, out and a float32 lse for each row; "naive" holds S and P in place of lse.

    Returns:
        int.

    Raises:
        ValueError: a size is not an int of at least 1, or form is neither.
    """
    if form not in ("flash", "naive"):
        raise ValueError(f'form must be "flash" or "naive", got {form!r}')
    _check_sizes(seqlen=seqlen, head_dim=head_dim, nheads=nheads, batch=batch, itemsize=itemsize)
    if form == "flash":
        extra = flash_extra_bytes(seqlen, batch=batch, nheads=nheads)
    else:
        extra = naive_extra_bytes(seqlen, seqlen, batch=batch, nheads=nheads, itemsize=itemsize)
    # Each tensor once is what q, k, v and out occupy.
    return compulsory_bytes(seqlen, seqlen, head_dim, batch=batch, nheads=nheads, itemsize=itemsize) + extra


def longest_seqlen(memory_bytes, head_dim, *, nheads, batch=1, itemsize=2, form="flash"):
    """Find the longest sequence whose attention layer fits in a memory; 0 where none does.

    Args:
        memory_bytes: bytes to fill.
        head_dim, nheads, batch, itemsize, form: as for `attention_memory_bytes`.

    Returns:
        int: the longest seqlen.

    Raises:
        ValueError: a size is not an int of at least 1, form is neither of the two, or memory_bytes is no finite number.
    """
    if not isinstance(memory_bytes, numbers.Real) or not math.isfinite(memory_bytes):
        raise ValueError(f"memory_bytes must be a finite number, got {memory_bytes!r}")
    sizes = {"head_dim": head_dim, "nheads": nheads, "batch": batch, "itemsize": itemsize, "form": form}
    low, high = 0, 1
    while attention_memory_bytes(high, **sizes) <= memory_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attention_memory_bytes(middle, **sizes) <= memory_bytes else (low, middle)
    return low


def _rows_and_keys(seqlen_q, seqlen_k, block_m, block_n, causal):
    """Yield (rows, keys) for each query tile: its rows, and the keys of all the tiles that it visits."""
    for start in range(0, seqlen_q, block_m):
        stop = min(start + block_m, seqlen_q)
        seen = stop + seqlen_k - seqlen_q if causal else seqlen_k
        yield stop - start, min(-(-max(seen, 0) // block_n) * block_n, seqlen_k)


def _check_tiles(seqlen_q, seqlen_k, block_m, block_n):
    _check_sizes(seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=block_m, block_n=block_n)
