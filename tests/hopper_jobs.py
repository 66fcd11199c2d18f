"""Jobs for `flashlib.compiler.compile_many`: what launches of the Hopper kernel would compile, without a GPU.

`hopper_jobs:head_dim_causal` … name `Options`, since a job holds strings and numbers only.
"""

from flashlib import hopper

CONFIGS = [(head_dim, causal, seqlen) for head_dim in (64, 128) for causal in (False, True) for seqlen in (512, 4096)]


def options(head_dim, causal, seqlen, negative=False):
    return hopper.options_for((1, 1, seqlen, head_dim), (1, 1, seqlen, head_dim), causal, negative)


def __getattr__(name):
    if not name.startswith("options_"):
        raise AttributeError(name)
    head_dim, causal, seqlen, negative = (int(part) for part in name.split("_")[1:])
    return options(head_dim, bool(causal), seqlen, bool(negative))


def job(dtype, head_dim, causal, seqlen, negative=False):
    """Return a job: `dtype` "fp16" or "bf16"; head_dim 64 or 128 columns of every tensor."""
    chosen = options(head_dim, causal, seqlen, negative)

    def described(rows):
        layout = hopper._layout(rows, head_dim, {"fp16": "float16", "bf16": "bfloat16"}[dtype])
        return f"tensordesc<{dtype}[1, 1, {rows}, {head_dim}],{layout!r}>"

    q, k = described(64), described(chosen.block_n)
    integers = ("nheads", "group", "tiles_m", "section", "total", "seqlen_q", "seqlen_k")
    signature = {"desc_q": q, "desc_k": k, "desc_v": k, "desc_out": q, "lse_ptr": "*fp32"}
    signature |= {"qk_scale": "fp32"} | dict.fromkeys(integers, "i32") | ({"counter_ptr": "*i32"} if causal else {})
    constants = {"OPTIONS": f"hopper_jobs:options_{head_dim}_{int(causal)}_{seqlen}_{int(negative)}"}
    return {
        "kernel": "flashlib.hopper:_forward_kernel",
        "signature": signature,
        "constexprs": constants if causal else constants | {"counter_ptr": None},
        "capability": 90,
        "options": {"num_warps": 4},
    }
