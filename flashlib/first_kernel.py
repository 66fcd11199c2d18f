"""A first kernel, as small as a kernel can be: each program doubles one block of an array.

It is the form of every kernel of this course: find which block is mine, load it with a mask, compute, store it with the
same mask. It shows that Triton runs on a machine, and `device.compile_for` compiles it for machines that are not here.

Source: ours.
"""

import torch

from flashlib import device
from flashlib.device import tl, triton

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    # The last block may reach past the end: those lanes neither load nor store.
    mask = offs < n
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, 2 * x, mask=mask)


def double(x, block=256):
    """Compute 2·x with a Triton kernel: on the GPU, or in Triton's interpreter.

    Args:
        x: tensor (n,) of float16, bfloat16 or float32, on the device where kernels run (`device.kernel_device()`).
        block: elements of one program, a power of two up to 2**20 (Triton's limit).

    Returns:
        tensor (n,), dtype and device of x. Doubling is exact: only the exponent changes.

    Raises:
        ValueError: x is not one-dimensional, has another dtype or 2**31 - block elements or more (positions are 32-bit
            numbers); block is not a power of two up to 2**20.
        RuntimeError: x lies where no kernel can run on it.
    """
    if not isinstance(x, torch.Tensor) or x.ndim != 1:
        got = f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"x must be a tensor of one dimension, got {got}")
    if x.dtype not in _DTYPES:
        raise ValueError(f"x must have dtype float16, bfloat16 or float32, got {x.dtype}")
    if not isinstance(block, int) or not 1 <= block <= 2**20 or block & (block - 1):
        raise ValueError(f"block must be a power of two up to 2**20, got {block!r}")
    if x.numel() >= 2**31 - block:
        raise ValueError(f"x must have fewer than 2**31 - block elements, got {x.numel()}")
    device.check_launch(x, "x")
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        with torch.cuda.device_of(x):
            _double_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out
