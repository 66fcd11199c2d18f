"""Run each kernel once on a small case, for NVIDIA's compute-sanitizer, and hold the results against float64.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize.py
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool racecheck --error-exitcode 1 python tests/sanitize.py

Without PyTorch's cache of memory each tensor is an allocation of its own, past whose end nothing may be read. Inputs
are made on the CPU and results are compared there, so that few kernels but ours run. Needs a GPU; takes a minute.
"""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from flashlib import fused_softmax, reference
from flashlib.attention import flash_attention
from flashlib.backward_atomic import backward_atomic

# dtype, head_dim, head_dim_v, seqlen_q, seqlen_k, causal: with pointers, and, from 512 on, with descriptors.
CASES = [
    (torch.float16, 40, 24, 37, 75, True),
    (torch.bfloat16, 64, 64, 77, 530, False),
    (torch.bfloat16, 128, 128, 530, 515, True),
    (torch.float32, 64, 64, 65, 70, True),
    (torch.float32, 128, 128, 33, 40, False),
]


def attention(dtype, head_dim, head_dim_v, seqlen_q, seqlen_k, causal):
    """Run forward, delta, dkdv and dq; return the largest relative error of out, dq, dk, dv."""
    sizes = (seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim_v)
    inputs = [torch.randn(1, 2, *size).to(dtype) for size in sizes]
    dout = torch.randn(1, 2, seqlen_q, head_dim_v).to(dtype)
    on_gpu = [x.cuda().requires_grad_() for x in inputs]
    out, lse = flash_attention(*on_gpu, causal=causal, return_lse=True)
    got = (out, *torch.autograd.grad((out, lse), on_gpu, (dout.cuda(), torch.zeros(lse.shape).cuda())))
    exact = [x.double().requires_grad_() for x in inputs]
    want = reference.attention(*exact, causal=causal)
    wanted = (want, *torch.autograd.grad(want, exact, dout.double()))
    return max(((x.detach().cpu() - y).norm() / y.norm()).item() for x, y in zip(got, wanted, strict=True))


def others():
    """Run the kernels of chapter 07 and the backward with atomics; return the largest relative error."""
    q, k, v, dout = (torch.randn(1, 1, 70, 64) for _ in range(4))
    s = fused_softmax.scores(q[0, 0].cuda(), k[0, 0].cuda())
    p = fused_softmax.softmax(s)
    slow = fused_softmax.softmax_unfused(s)
    exact = torch.softmax(q[0, 0].double() @ k[0, 0].double().T / 8, -1)
    errors = [(x.cpu() - exact).norm() / exact.norm() for x in (p, slow)]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(reference.attention(*leaves), leaves, dout.double())
    on_gpu = [x.cuda() for x in (q, k, v)]
    out, lse = flash_attention(*on_gpu, return_lse=True)
    got = backward_atomic(*on_gpu, out, lse, dout.cuda())
    errors += [(x.cpu() - y).norm() / y.norm() for x, y in zip(got, wanted, strict=True)]
    return max(errors).item()


def main():
    torch.manual_seed(0)
    wrong = 0
    for case in [*CASES, None]:
        start = time.time()
        error = attention(*case) if case else others()
        bound = 1e-4 if case is None or case[0] == torch.float32 else 2e-2
        wrong += not error <= bound
        print(
            "kernels of 07 and atomics" if case is None else case, f"error {error:.1e}", f"{time.time() - start:.0f} s"
        )
    sys.exit(wrong)


if __name__ == "__main__":
    main()
