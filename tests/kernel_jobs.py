"""Jobs for `flashlib.compiler.compile_many`: what a launch of each attention kernel would compile, without a GPU."""

from flashlib import tiles

STRIDES = ["i32", "i32", "i32", 1]
NAMES = {
    "forward": ("q_ptr k_ptr v_ptr out_ptr", "k_ptr v_ptr", "stride_q stride_k stride_v stride_out"),
    "dkdv": (
        "q_ptr k_ptr v_ptr dout_ptr dk_ptr dv_ptr",
        "q_ptr dout_ptr",
        "stride_q stride_k stride_v stride_dout stride_dk stride_dv",
    ),
    "dq": ("q_ptr k_ptr v_ptr dout_ptr dq_ptr", "k_ptr v_ptr", "stride_q stride_k stride_v stride_dout stride_dq"),
}


# Arguments that turn features of the kernels on; types as in a launch.
FEATURES = {
    "window": {"left": "i32"},
    "both sides": {"left": "i32", "right": "i32"},
    "softcap": {"softcap": "fp32"},
    "alibi": {"alibi": ["*fp32", 0, 1]},
    "bias": {"bias": ["*fp32", "i32", "i32", "i32", 1]},
    "dropout": {"dropout": ["*i64", "i32", "fp32"]},
    "sinks": {"sinks_ptr": "*fp32"},
    "gqa": {"group": "i32"},
    "packed": {"packed": ["*i32", "*i32", "i32"]},
}


def job(kernel, dtype, head_dim, causal, capability, tile=None, descriptors=None, feature=None):
    """Return a job: `kernel` "forward", "dkdv" or "dq", `dtype` "fp16", "bf16" or "fp32"; the tile from the table."""
    itemsize = 4 if dtype == "fp32" else 2
    columns = tiles.padded(head_dim)
    tile = tiles.tile_for(kernel, capability, itemsize, columns, causal) if tile is None else tile
    descriptors = capability >= 90 if descriptors is None else descriptors
    tensors, loaded, strides = (names.split() for names in NAMES[kernel])
    rows = tile.block_m if kernel == "dkdv" else tile.block_n
    signature = dict.fromkeys(tensors, f"*{dtype}")
    if descriptors:
        ones = "1,1,1" if feature == "packed" else "1,1"
        signature |= dict.fromkeys(loaded, f"tensordesc<{dtype}[{ones},{rows},{columns}]>")
    signature |= {"lse_ptr": "*fp32"} | ({"delta_ptr": "*fp32"} if kernel != "forward" else {})
    signature |= dict.fromkeys(strides, STRIDES)
    signature |= {"aux": [], "score_aux": [], "nheads": "i32", "group": 1, "seqlen_q": "i32", "seqlen_k": "i32"}
    signature |= {"scale": "fp32", "qk_scale": "fp32"}
    constants = {
        "CAUSAL": causal,
        "MASK": None,
        "SCORE": None,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim,
        "COLS": columns,
        "COLS_V": columns,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "PRECISION": "tf32x3" if capability >= 80 else "ieee",
        "DESCRIPTOR": descriptors * (2 if feature == "packed" else 1),
        "WIDE": False,
        "LANES": 64 if feature == "packed" else None,
        **dict.fromkeys(("left", "right", "softcap", "alibi", "bias", "dropout", "packed")),
    }
    constants |= {"FOLD": True, "sinks_ptr": None} if kernel == "forward" else {"GRAD": None}
    constants |= {"QUERIES": None} if kernel == "dkdv" else {"KEYS": None}
    given = FEATURES.get(feature, {})
    signature |= given
    constants = {name: value for name, value in constants.items() if name not in given}
    if given.keys() & {"softcap", "alibi", "bias"} and kernel == "forward":
        constants["FOLD"] = False
    return {
        "kernel": f"flashlib.{'forward:_forward' if kernel == 'forward' else f'backward:_{kernel}'}_kernel",
        "signature": signature,
        "constexprs": constants,
        "capability": capability,
        "options": {
            "num_warps": tile.num_warps,
            "num_stages": 1 if feature == "bias" else tile.num_stages,
            "maxnreg": tile.max_registers,
        },
        "divisible": [*strides, "seqlen_q", "seqlen_k"],
    }
