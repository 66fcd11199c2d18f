"""What a call of attention asks for besides q, k and v, and how that becomes arguments of the kernels.

A custom op takes numbers, strings and tensors, one by one: `Options` names them. A kernel takes None for what was not
asked for, so that its code holds nothing of it: `Call` are its arguments.

Source: ours.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashlib import tiles
from flashlib.device import triton
from flashlib.dropout import seed_for, threshold_of
from flashlib.mods import LOG2_E, Mask, Score, registered

# Who computes the forward: None is the best one here.
BACKENDS = (None, "portable", "hopper")
# `Call.changes` of scores that stay as they are.
NO_CHANGE = (None, None, None)
# Shapes, dtypes and devices of calls that were found right.
_SEEN = set()
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# How a custom op declares Options.
SCHEMA = (
    "Tensor? bias, Tensor? sinks, SymInt? left, SymInt? right, float scale, float? softcap, float dropout_p, str mask, "
    "str score, int n_mask, str backend, Tensor? slopes, Tensor? seed, Tensor? cu_q, Tensor? cu_k, Tensor[] aux"
)


class Options(NamedTuple):
    """What a call asks for, in the order of the op's arguments; None where it asks for nothing.

    bias: (batch, nheads, seqlen_q, seqlen_k), 1 where it is the same for all. sinks: (nheads,). left, right: the
    window; causal is right = 0. scale, softcap, dropout_p: numbers. mask, score: keys of hooks, "" for none; n_mask:
    how many tensors of aux are the mask's. backend: who computes the forward, "" for the best one. slopes: (nheads,)
    or (batch, nheads). seed: of the dropout. cu_q, cu_k: where packed sequences begin. aux: the tensors of the hooks.
    """

    bias: object = None
    sinks: object = None
    left: int | None = None
    right: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    dropout_p: float = 0.0
    mask: str = ""
    score: str = ""
    n_mask: int = 0
    backend: str = ""
    slopes: object = None
    seed: object = None
    cu_q: object = None
    cu_k: object = None
    aux: tuple = ()


class Call(NamedTuple):
    """The arguments and constants that all kernels of one call share.

    causal, window: which keys a query's place lets it see, window as (left, right). mask: (fn, keys, queries); score:
    (fn, grad). changes: softcap, and slopes and bias each with its strides. dropout: seed and
    offset, threshold, scale. packed: (cu_q, cu_k, batch). sizes: the
    kernels' last arguments, from nheads to qk_scale.
    lanes: lanes that hold the batch of a packed call.
    """

    causal: bool
    window: tuple
    mask: tuple
    score: tuple
    aux: tuple
    score_aux: tuple
    changes: tuple
    dropout: tuple | None
    packed: tuple | None
    sizes: tuple
    lanes: int | None

    @property
    def triangular(self):
        """Whether tiles of queries see different numbers of keys."""
        return self.causal or self.window != (None, None)

    def constants(self, plan):
        """Return a plan's constants; tiles of a bias are large, and not loaded ahead into shared memory."""
        return plan.constants if self.changes[2] is None else plan.constants | {"num_stages": 1}

    def strides(self, *tensors):
        """Return the strides of tensors, one tuple each; all packed sequences lie in one batch."""
        if self.packed is None:
            return tuple(x.stride() for x in tensors)
        return tuple((0, *x.stride()[1:]) for x in tensors)

    def programs(self, axis, block, batch):
        """Return how many programs own a tile each: of queries of each head, axis 0, or of keys of each KV head, 1."""
        nheads, group, *lengths = self.sizes[:4]
        heads = nheads // group if axis else nheads
        if self.packed is None:
            return -(-lengths[axis] // block) * batch * heads
        return (lengths[axis] // block + self.packed[2]) * heads


def call_of(q, k, options):
    """Return the Call for tensors (batch, nheads, seqlen, head_dim), or packed ones (1, nheads, total, head_dim)."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    causal, window = positions(options.left, options.right, seqlen_q, seqlen_k)
    packed = lanes = dropout = None
    if options.dropout_p:
        dropout = options.seed, threshold_of(options.dropout_p), 1 / (1 - options.dropout_p)
    changes = options.softcap, _with_strides(options.slopes, 2), _with_strides(options.bias, 4)
    if options.cu_q is not None:
        packed = options.cu_q, options.cu_k, options.cu_q.shape[0] - 1
        lanes = triton.next_power_of_2(max(1, packed[2]))
    mask_aux, score_aux = options.aux[: options.n_mask], options.aux[options.n_mask :]
    sizes = q.shape[1], q.shape[1] // k.shape[1], seqlen_q, seqlen_k, options.scale, options.scale * LOG2_E.value
    return Call(
        causal, window, registered(options.mask, 3), registered(options.score, 2),
        tiles.pointers(mask_aux), tiles.pointers(score_aux), changes, dropout, packed, sizes, lanes,
    )  # fmt: skip


def positions(left, right, seqlen_q, seqlen_k):
    """Return (causal, window): a side that hides nothing is left out, and right = 0 is causal, which has its code."""
    if left is not None and left >= seqlen_k - 1:
        left = None
    if right is not None and right >= max(1, seqlen_q - 1):
        right = None
    if right == 0:
        return True, (left, None)
    return False, (left, right)


def _with_strides(x, axes):
    """Return a tensor for a kernel, followed by its strides, 0 on axes that it lacks or has once for all."""
    if x is None:
        return None
    strides = tuple(0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return tiles.pointer(x), *((0,) * (axes - x.ndim)), *strides


# --- input checks ----------------------------------------------------------------------------------------------------


def check_tensors(q, k, v):
    """Raise a ValueError unless q, k and v are what `flash_attention` takes."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    facts = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    # Most calls are like the last one: what was found right once is not looked at again.
    if torch.compiler.is_compiling():
        _check_tensors(q, k, v)
    elif facts not in _SEEN:
        _check_tensors(q, k, v)
        _SEEN.add(facts)


def _check_tensors(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 axes (batch, nheads, seqlen, head_dim), got shape {tuple(x.shape)}")
        check_kind(name, x, q)
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the batch of q, {q.shape[0]}, got {x.shape[0]}")
    check_heads(q, k, v, 1)
    if v.shape[2] != k.shape[2]:
        raise ValueError(f"v must have the seqlen of k, {k.shape[2]}, got {v.shape[2]}")
    tiles.check_device(q)


def check_kind(name, x, q):
    """Raise a ValueError unless x has a dtype that kernels take, and that and the device of q."""
    if x.dtype not in _DTYPES:
        raise ValueError(f"{name} must have dtype float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.dtype != q.dtype:
        raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def check_heads(q, k, v, axis):
    """Raise a ValueError unless the numbers of heads, on `axis`, and the head_dims, on the last, go together."""
    nheads, nheads_kv = q.shape[axis], k.shape[axis]
    if nheads != nheads_kv and (nheads_kv == 0 or nheads % nheads_kv):
        raise ValueError(f"k must have a number of heads that divides that of q, {nheads}, got {nheads_kv}")
    if v.shape[axis] != nheads_kv:
        raise ValueError(f"v must have the number of heads of k, {nheads_kv}, got {v.shape[axis]}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[-1] % 8 or not 16 <= x.shape[-1] <= 256:
            raise ValueError(f"{name} must have a head_dim that is a multiple of 8 from 16 to 256, got {x.shape[-1]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have the head_dim of q, {q.shape[-1]}, got {k.shape[-1]}")


def options_of(
    q, shape, causal, window, scale, softcap, alibi_slopes, bias, sinks, dropout_p, dropout_seed, mask, score,
    deterministic, backend, cu_q=None, cu_k=None,
):  # fmt: skip
    """Check the options of a call, and return them as the op takes them.

    Args:
        q: the queries. shape: (batch, nheads, seqlen_q, seqlen_k), what a bias broadcasts to.
        cu_q, cu_k: where packed sequences begin, checked; None for dense ones.
        the others: as in `flash_attention`.

    Returns:
        Options.

    Raises:
        ValueError: an option is not as `flash_attention` says.
    """
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {causal!r}")
    if not isinstance(deterministic, bool):
        raise ValueError(f"deterministic must be True or False, got {deterministic!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if scale is not None and not _is_number(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    left, right = (None, None) if window is None else _checked_window(window)
    if softcap is not None and not (_is_number(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive number or None, got {softcap!r}")
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q, shape)
    if bias is not None:
        bias = _checked_bias(bias, q, shape)
    if sinks is not None:
        _check_sinks(sinks, q, shape)
    if not (_is_number(dropout_p) and 0 <= dropout_p < 1) or isinstance(dropout_p, bool):
        raise ValueError(f"dropout_p must be a number in [0, 1), got {dropout_p!r}")
    # Without dropout a seed is checked all the same, and none is drawn.
    seed = seed_for(dropout_seed, q.device) if dropout_p or dropout_seed is not None else None
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(f"mask must be a flashlib.mods.Mask or None, got {type(mask).__name__}")
    if score is not None and not isinstance(score, Score):
        raise ValueError(f"score must be a flashlib.mods.Score or None, got {type(score).__name__}")
    # Causal is a window that ends at one's own place.
    return Options(
        bias, sinks, left, 0 if causal else right, q.shape[-1] ** -0.5 if scale is None else float(scale),
        None if softcap is None else float(softcap), float(dropout_p),
        mask.key if mask else "", score.key if score else "",
        len(mask.aux) if mask else 0, backend or "", alibi_slopes, seed if dropout_p else None, cu_q, cu_k,
        [*(mask.aux if mask else ()), *(score.aux if score else ())],
    )  # fmt: skip


def _is_number(x):
    return isinstance(x, (int, float)) and math.isfinite(x)


def _checked_window(window):
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(f"window must be a pair (left, right) or None, got {window!r}")
    for name, side in zip(("left", "right"), window, strict=True):
        if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
            raise ValueError(f"window must have a {name} that is an int of at least 0 or None, got {side!r}")
    return window


def _check_slopes(slopes, q, shape):
    batch, nheads = shape[:2]
    if not isinstance(slopes, Tensor):
        raise ValueError(f"alibi_slopes must be a tensor or None, got {type(slopes).__name__}")
    if slopes.dtype != torch.float32:
        raise ValueError(f"alibi_slopes must have dtype float32, got {slopes.dtype}")
    if tuple(slopes.shape) not in ((nheads,), (batch, nheads)):
        raise ValueError(f"alibi_slopes must have shape ({nheads},) or ({batch}, {nheads}), got {tuple(slopes.shape)}")
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes must be on the device of q, {q.device}, got {slopes.device}")
    if slopes.requires_grad:
        raise ValueError("alibi_slopes must not require grad: they get no gradient (a bias does)")


def _checked_bias(bias, q, shape):
    if not isinstance(bias, Tensor) or bias.dtype not in _DTYPES:
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias must be a tensor of floats or None, got {kind}")
    if bias.device != q.device:
        raise ValueError(f"bias must be on the device of q, {q.device}, got {bias.device}")
    sizes = (1,) * (4 - bias.ndim) + tuple(bias.shape)
    if len(sizes) != 4 or any(size not in (1, full) for size, full in zip(sizes, shape, strict=True)):
        raise ValueError(f"bias must broadcast to {tuple(shape)}, got shape {tuple(bias.shape)}")
    return bias[(None,) * (4 - bias.ndim)]


def _check_sinks(sinks, q, shape):
    if not isinstance(sinks, Tensor) or sinks.dtype not in _DTYPES:
        kind = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(f"sinks must be a tensor of floats or None, got {kind}")
    if tuple(sinks.shape) != (shape[1],):
        raise ValueError(f"sinks must have shape ({shape[1]},), got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}, got {sinks.device}")
