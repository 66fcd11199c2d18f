"""The public op `flash_attention`: its checks, its gradient, and what PyTorch has to know about it.

The kernels are in `forward`, `backward` and `bias`. PyTorch cannot look into a kernel, so a custom op tells it shapes
(for torch.compile) and an `autograd.Function` tells it the gradient.

Source: FlashAttention-2, https://arxiv.org/abs/2307.08691
"""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from flashlib import backward, bias, forward, tiles
from flashlib.options import SCHEMA, Options, call_of, check_tensors, options_of

# The shortest sequence of queries at which the Hopper kernel was timed against the portable one.
HOPPER_FROM = 1024

# --- the op --------------------------------------------------------------------------------------------------------


def _forward(q, k, v, *options):
    options = Options(*options)
    if options.backend != "portable":
        reason = _not_hopper(q, k, v, options)
        if reason is None:
            from flashlib import hopper

            return hopper.forward(q, k, v, options.right == 0, options.scale)
        if options.backend == "hopper":
            raise ValueError(f'backend must be None or "portable" for this call, got "hopper", which {reason}')
    return forward.forward(q, k, v, options)


def _not_hopper(q, k, v, options):
    """Say why the Hopper kernel does not compute this call, or return None if it does."""
    if tiles.architecture_of(q.device) != 90:
        return "needs a Hopper GPU (compute capability 9.0)"
    asked = options.left, options.softcap, options.slopes, options.bias, options.sinks, options.cu_q
    if any(x is not None for x in asked) or options.right or options.dropout_p or options.mask or options.score:
        return "knows no window, softcap, ALiBi, bias, sinks, dropout, mask, score or packed sequences"
    narrow = max(q.shape[3], v.shape[3]) <= 32
    if options.backend != "hopper" and (narrow or q.shape[2] < HOPPER_FROM):
        return "was not measured to be faster here"
    from flashlib import hopper

    return hopper.applies(q, k, v)


def _forward_fake(q, k, v, *options):
    return tiles.empty_out(q, v), q.new_empty(q.shape[:3], dtype=tiles.accumulator(q.dtype))


def _backward(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, wants_bias, wants_sinks, *options):
    options = Options(*options)
    narrow = q.device.type == "cpu" and q.dtype == torch.bfloat16
    if narrow:
        # The interpreter cannot compute in bfloat16: compute in float32, round once.
        q, k, v, out, dout = (x.float() for x in (q, k, v, out, dout))
    *grads, delta = backward.gradients(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, options)
    if narrow:
        grads = [x.bfloat16() for x in grads]
    dbias = torch.empty_like(options.bias) if wants_bias else q.new_empty(0)
    dsinks = _sink_gradient(options.sinks, lse, delta) if wants_sinks else q.new_empty(0)
    if wants_bias and q.numel():
        bias.gradient(q, k, v, dout, lse, delta, dbias, call_of(q, k, options))
    return *grads, dbias, dsinks


def _sink_gradient(sinks, lse, delta):
    """Return the gradient of the sinks: the weight of one is p = exp(sink - lse), its value 0."""
    p = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
    return -torch.where(lse == -torch.inf, 0.0, p * delta).sum((0, 2)).to(sinks.dtype)


def _backward_fake(q, k, v, out, lse, dout, dlse, wants_q, wants_kv, wants_bias, wants_sinks, *options):
    options = Options(*options)
    dbias = torch.empty_like(options.bias) if wants_bias else q.new_empty(0)
    dsinks = torch.empty_like(options.sinks) if wants_sinks else q.new_empty(0)
    return *backward.empty_gradients(q, k, v, wants_q, wants_kv), dbias, dsinks


# Defined by hand rather than by torch.library.custom_op: that wrapper costs 10 to 15 µs a call on the host.
_LIBRARY = torch.library.Library("flashlib", "DEF")
for _name, _schema, _real, _fake in (
    ("forward", f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake),
    (
        "backward",
        f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool wants_q, "
        f"bool wants_kv, bool wants_bias, bool wants_sinks, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _backward,
        _backward_fake,
    ),
):
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashlib::{_name}", _fake, lib=_LIBRARY)


class _Attention(torch.autograd.Function):
    """out and lse with their gradient; `setup_context` apart from `forward`, as torch.func wants it."""

    @staticmethod
    def forward(q, k, v, bias, sinks, *options):
        # The other 13 options of the op, and the tensors of hooks, which the op takes as a list.
        return torch.ops.flashlib.forward(q, k, v, bias, sinks, *options[:13], options[13:])

    @staticmethod
    def setup_context(ctx, inputs, output):
        # Nine numbers and names stand between the tensors.
        ctx.numbers = inputs[5:14]
        ctx.save_for_backward(*output, *inputs[:5], *inputs[14:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        out, lse, q, k, v, bias, sinks, *tensors = ctx.saved_tensors
        if dout is None:
            # Only lse was used: a zero that is read everywhere and stored once.
            dout = out.new_zeros(()).expand(out.shape)
        needs = ctx.needs_input_grad
        wanted = needs[0], needs[1] or needs[2], needs[3], needs[4]
        arguments = q, k, v, out, lse, dout, dlse, *wanted, bias, sinks, *ctx.numbers, *tensors
        # torch.compile refuses a double backward itself, and cannot trace a Function inside a backward.
        grads = (_gradients if torch.compiler.is_compiling() else _AttentionGrad.apply)(*arguments)
        grads = [grad if need else None for grad, need in zip(grads, needs, strict=False)]
        return *grads, *([None] * (len(needs) - 5))


def _gradients(*arguments):
    # What follows the 26 arguments that are always there are the tensors of hooks.
    return torch.ops.flashlib.backward(*arguments[:26], arguments[26:])


class _AttentionGrad(torch.autograd.Function):
    """The gradients of _Attention; asked for their own gradient, it refuses instead of leaving a term out."""

    @staticmethod
    def forward(*arguments):
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("flash_attention cannot be differentiated twice: use flashlib.reference.attention for that")


# --- the public function -------------------------------------------------------------------------------------------


def flash_attention(
    q, k, v, *, causal=False, window=None, scale=None, softcap=None, alibi_slopes=None, bias=None, sinks=None,
    dropout_p=0.0, dropout_seed=None, mask=None, score=None, return_lse=False, deterministic=True, backend=None,
):  # fmt: skip
    """Compute softmax(scale·QKᵀ)V exactly, without storing scores, in one kernel; differentiable.

    The scores pass, in this order: scale, softcap, ALiBi and bias, `score`; then a key counts if causality, the window
    and `mask` all let the query see it.

    Args:
        q: (batch, nheads, seqlen_q, head_dim), float16, bfloat16 or float32 (float64 in the interpreter only), any
            strides.
        k: (batch, nheads_kv, seqlen_k, head_dim), dtype and device of q. nheads is a multiple of nheads_kv: each head
            of k and v serves nheads / nheads_kv neighbouring heads of q, and nothing is copied.
        v: (batch, nheads_kv, seqlen_k, head_dim_v). Both head_dims are multiples of 8 from 16 to 256.
        causal: query i sees the keys j <= i + seqlen_k - seqlen_q (aligned at the bottom right).
        window: (left, right): query i sees the keys from i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q +
            right, both included; None in place of a number, or of the pair, for no limit.
        scale: what a dot product is multiplied with; None means 1/sqrt(head_dim). 0.0 and negative values are honoured.
        softcap: a positive number: scores s become softcap·tanh(s/softcap). None for none.
        alibi_slopes: (nheads,) or (batch, nheads), float32, no gradient: -slope·|i + seqlen_k - seqlen_q - j| is added.
        bias: floats that broadcast to (batch, nheads, seqlen_q, seqlen_k), any strides, added to the scores; -inf hides
            a key, as does anything below -1e8. Its gradient takes no memory but its own.
        sinks: (nheads,) floats: a logit of each head that joins every row's denominator, with value 0.
        dropout_p: share of the weights that is dropped, in [0, 1); those kept are scaled by 1/(1 - dropout_p). lse is
            that of all weights.
        dropout_seed: (2,), int64, on the device of q: seed and offset, which decide with batch, head, query and key
            what is dropped; None draws them from PyTorch's generator, so that `torch.manual_seed` repeats them.
        mask: `mods.Mask`, which keys a query sees; None for all.
        score: `mods.Score`, a change of the scores; None for none.
        return_lse: also return the natural logarithm of each row's sum of exponentials, the maximum included.
        deterministic: gradients have the same bits every run. False would allow a backend to be faster; this one is
            deterministic either way.
        backend: who computes the forward: "portable", "hopper" (a ValueError where it cannot), or None for the best one
            here; `attention.backend_of` tells which that is. The backward is always the portable one.

    Returns:
        out (batch, nheads, seqlen_q, head_dim_v), dtype of q (under autocast, the autocast dtype); or (out, lse), lse
        (batch, nheads, seqlen_q) float32 (float64 for float64) and differentiable. A row that sees no key has out
        exactly 0, lse exactly -inf (with sinks, the sink) and gradients exactly 0. A NaN in k at a key that is masked
        never shows; a NaN in v there (in the backward also in k or dout) may reach rows whose tile holds both that key
        and a key that they see.

    Raises:
        ValueError: a shape, dtype, device or option is not as above.
        RuntimeError: kernels cannot run on these tensors here; differentiated twice.
        NotImplementedError: differentiated in forward mode.

    Source: "FlashAttention-2", https://arxiv.org/abs/2307.08691
    """
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v)
    options = options_of(
        q, (*q.shape[:3], k.shape[2]), causal, window, scale, softcap, alibi_slopes, bias, sinks,
        dropout_p, dropout_seed, mask, score, deterministic, backend,
    )  # fmt: skip
    out, lse = attend(q, k, v, options)
    return (out, lse) if return_lse else out


def attend(q, k, v, options):
    """Return out and lse of checked inputs, with a graph where a gradient may be asked for."""
    inputs = q, k, v, options.bias, options.sinks
    # _Attention has no forward-mode derivative and says so; the bare op would drop the tangent in silence.
    if (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)) or _dual(*inputs):
        return _Attention.apply(q, k, v, *options[:-1], *options.aux)
    return torch.ops.flashlib.forward(q, k, v, *options)


def backend_of(q, k, v, **options):
    """Return which backend computes the forward of `flash_attention(q, k, v, **options)`: "portable" or "hopper"."""
    q, k, v = autocast(q, k, v)
    check_tensors(q, k, v)
    names = ("causal", "window", "scale", "softcap", "alibi_slopes", "bias", "sinks", "dropout_p", "dropout_seed")
    names += ("mask", "score", "deterministic", "backend")
    given = {"causal": False, "dropout_p": 0.0, "deterministic": True} | options
    asked = options_of(q, (*q.shape[:3], k.shape[2]), *map(given.get, names))
    return "hopper" if asked.backend != "portable" and _not_hopper(q, k, v, asked) is None else "portable"


def _dual(*tensors):
    """Tell whether a tensor carries a tangent of forward-mode differentiation."""
    return not torch.compiler.is_compiling() and any(
        x is not None and unpack_dual(x).tangent is not None for x in tensors
    )


def autocast(*tensors):
    """Return the tensors in autocast's dtype where autocast is on, as PyTorch's own matrix products do."""
    kind = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    )
