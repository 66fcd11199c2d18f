"""The attention kernels of others that are found on this machine, checked and timed beside this library's.

Each is a function of (q, k, v), in one layout, so that the same inputs go to all of them in the same run.

Source: PyTorch's SDPA and FlexAttention; FlashAttention-3 and -4, https://github.com/Dao-AILab/flash-attention
"""

import statistics
import sys
import time

from flashlib import bench

TOKENS = 16384
WIDTH = 2048


def implementations(dtype, causal, seqlen):
    """Return what can be timed here: dict, name -> function (q, k, v) -> out, all in (batch, nheads, seqlen, head_dim).

    Those that take another layout get a view of it: a transpose copies nothing.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from flashlib.attention import flash_attention

    def sdpa(backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return run

    found = {"flashlib_portable": lambda q, k, v: flash_attention(q, k, v, causal=causal, backend="portable")}
    if dtype == "fp32":
        return found | {"mem_efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION)}
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        # Its backward is the portable one, so only the forward is its own.
        found["flashlib_hopper"] = lambda q, k, v: flash_attention(q, k, v, causal=causal, backend="hopper")
    found |= {"fa2": sdpa(SDPBackend.FLASH_ATTENTION), "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION)}
    found["flex"] = _flex(torch, causal, seqlen)
    for name, module in (("fa3", "fa3_fwd_interface"), ("fa4", "flash_attn.cute.interface")):
        try:
            function = __import__(module, fromlist=["flash_attn_func"]).flash_attn_func
        except Exception:
            # Not installed, or not for this GPU: the table says so by leaving it out.
            continue
        found[name] = _other_layout(function, causal)
    return found


def _flex(torch, causal, seqlen):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A fresh compilation for each shape: after eight recompilations it would fall back to an unfused path.
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device="cuda") if causal else None
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _other_layout(function, causal):
    def run(q, k, v):
        out = function(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def check_results(results, q, k, v, dout, causal, tolerance):
    """Return the names whose results agree with float32 attention in the last head, and the errors of the others.

    Args:
        results: dict, name -> tuple of tensors (out, dq, dk, dv), or (out,).
        q, k, v, dout: inputs; causal as in attention; tolerance: of the norm of the error over the norm of the result.
    """
    import torch

    leaves = [x[-1, -1].detach().float().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].T * q.shape[3] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(s, -1) @ leaves[2]
    exact = (out.detach(), *torch.autograd.grad(out, leaves, dout[-1, -1].float()))
    good, bad = [], {}
    for name, tensors in results.items():
        errors = [((x[-1, -1].float() - y).norm() / y.norm()).item() for x, y in zip(tensors, exact, strict=False)]
        if all(error <= tolerance for error in errors):
            good.append(name)
        else:
            bad[name] = errors
    return good, bad


def attention_rows(head_dim, causal, seqlen, dtype, rounds=20, only=None):
    """Time forward and backward of one shape; yields rows of the CSV as dicts, without the machine's columns."""
    import torch

    torch.manual_seed(0)
    batch, nheads = max(1, TOKENS // seqlen), WIDTH // head_dim
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    q, k, v, dout = (torch.randn(batch, nheads, seqlen, head_dim, device="cuda", dtype=kind) for _ in range(4))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    forwards, backwards, results = {}, {}, {}
    for name, function in implementations(dtype, causal, seqlen).items():
        if only and name not in only:
            continue
        try:
            results[name] = (function(q, k, v).detach(),)
            forwards[name] = lambda function=function: function(q, k, v)
            if name not in ("fa3", "flashlib_hopper"):
                out = function(*leaves)
                backwards[name] = lambda out=out: torch.autograd.grad(out, leaves, dout, retain_graph=True)
                results[name] = (out.detach(), *backwards[name]())
        except Exception as error:
            # A forward that ran is timed all the same. An error's text may be empty.
            what = f"{name}'s backward" if name in forwards else name
            said = "".join(str(error).splitlines()[:1])[:120]
            print(f"{what} is left out: {type(error).__name__}: {said}", file=sys.stderr)
            backwards.pop(name, None)
    good, bad = check_results(results, q, k, v, dout, causal, 1e-4 if dtype == "fp32" else 2e-2)
    del results
    for name, errors in bad.items():
        print(f"{name} is not timed: its results are wrong, relative errors {errors}", file=sys.stderr)
    for pass_, functions in (("fwd", forwards), ("bwd", backwards)):
        times = bench.time_in_turns({name: f for name, f in functions.items() if name in good}, rounds)
        flops = bench.attention_flops(pass_ == "bwd", batch, nheads, seqlen, head_dim, causal)
        for name, ms in times.items():
            p20, p50, p80 = bench.percentiles(ms)
            yield {
                **{"pass": pass_, "head_dim": head_dim, "causal": int(causal), "seqlen_q": seqlen, "seqlen_k": seqlen},
                **{"batch": batch, "nheads": nheads, "nheads_kv": nheads, "dtype": dtype, "impl": name},
                **{"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "tflops": flops / p50 / 1e9},
            }


def host_microseconds(calls=2000):
    """Return dict, name -> µs of the host's time for a small forward call: batch 1, nheads 8, seqlen 128, no grad.

    The queue to the GPU is emptied between blocks of calls, so that the host never waits for it.
    """
    import torch

    q, k, v = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    functions = implementations("bf16", False, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for function in functions.values():
            function(q, k, v)
        with torch.cuda.graph(graph):
            functions["flashlib_portable"](q, k, v)
        functions["flashlib_portable_graph"] = lambda *_: graph.replay()
        blocks = {name: [] for name in functions}
        for _ in range(calls // 50):
            for name, function in functions.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    function(q, k, v)
                blocks[name].append((time.perf_counter() - start) / 50 * 1e6)
    return {name: statistics.median(times) for name, times in blocks.items()}
