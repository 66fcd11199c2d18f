"""Mutation: each mistake of `mutants.py`, put into the kernels, is found by a probe; the kernels as they are pass.

A probe is a small case that runs forward and backward and holds every tensor against the float64 oracle, inputs in NaN,
outputs between guards. The oracle is computed once a probe; a mutant meets the probes in turn until one fails.
"""

import contextlib
import functools
import math
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from attention_cases import DEVICE, ON_GPU, allowed, error
from mutants import MUTANTS, applied, source_of

from flashlib import flash_attention, reference, tiles
from flashlib.device import tl, triton
from flashlib.dropout import keep_mask
from flashlib.mods import Bounds, Mask, Score

GUARD = 77.0
# Elements on each side of a tensor; no tile reaches farther past it.
ROOM = 8192
WINDOW, LAG = tl.constexpr(40), tl.constexpr(23)
TENSORS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


# --- masks and scores that tell mistakes apart ----------------------------------------------------------------------


@triton.jit
def window(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See WINDOW keys, the last of them LAG before one's own place: the last LAG keys are seen by nobody."""
    at = i + seqlen_k - seqlen_q - LAG
    return (j <= at) & (j > at - WINDOW)


@triton.jit
def window_keys(b, h, first, end, seqlen_q, seqlen_k, aux):
    tl.store(aux[0], 1.0, mask=end > seqlen_q)
    shift = seqlen_k - seqlen_q - LAG
    return first + shift - WINDOW + 1, end + shift - WINDOW, first + shift + 1, end + shift


@triton.jit
def window_queries(b, h, first, end, seqlen_q, seqlen_k, aux):
    tl.store(aux[0], 1.0, mask=end > seqlen_k)
    shift = seqlen_k - seqlen_q - LAG
    return first - shift, end - 1 - shift, first - shift + WINDOW, end - 1 - shift + WINDOW


@triton.jit
def lopsided(b, h, i, j, seqlen_q, seqlen_k, aux):
    """Depend on everything; write down in aux[1] whether an index was outside."""
    tl.store(aux[1] + i * 0 + j * 0, 1.0, mask=(i >= seqlen_q) | (j >= seqlen_k))
    return (i + 2 * j + 3 * b + 7 * h) % 5 < tl.load(aux[0])


def dense_lopsided(b, h, i, j):
    return (i + 2 * j + 3 * b + 7 * h) % 5 < 3


@triton.jit
def squash(s, b, h, i, j, aux):
    """Depend on everything, s too; write down in aux[1] whether an index was outside."""
    tl.store(aux[1] + i * 0 + j * 0, 1.0, mask=(i >= tl.load(aux[2])) | (j >= tl.load(aux[3])))
    return tl.load(aux[0]) * (1 + i + h) * s / (1 + j + tl.abs(s))


@triton.jit
def squash_grad(ds, s, b, h, i, j, aux):
    tl.store(aux[1] + i * 0 + j * 0, 1.0, mask=(i >= tl.load(aux[2])) | (j >= tl.load(aux[3])))
    return ds * tl.load(aux[0]) * (1 + i + h) * (1 + j) / ((1 + j + tl.abs(s)) * (1 + j + tl.abs(s)))


@triton.jit
def shift(s, b, h, i, j, aux):
    """Raise all scores far, but hide all keys from every third query."""
    return tl.where(i % 3 == 0, float("-inf"), s + tl.load(aux[0]))


@triton.jit
def shift_grad(ds, s, b, h, i, j, aux):
    return ds


def number(x, dtype=torch.float64):
    return torch.tensor([x], dtype=dtype, device=DEVICE)


# --- probes ---------------------------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """A case. `layouts` are of q, k, v, dout; `hooks()` returns (mask, dense mask, score, the same in PyTorch, aux to
    be left at 0); the first and the last `hidden` keys, which nobody sees, are NaN."""

    shape: tuple
    causal: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float64
    layouts: tuple = ("contiguous",) * 4
    std: float = 1.0
    tile: tuple = (32, 32)
    hooks: object = None
    hidden: int = 0
    descriptors: bool = False
    backward: bool = True
    nheads_kv: int | None = None
    window: tuple | None = None
    features: tuple = ()


def no_hooks(positions):
    return None, None, None, None, []


def window_hooks(positions):
    j, at = positions[3], positions[4] - 23
    outside = number(0.0)
    mask = Mask(window, Bounds(window_keys, window_queries), aux=[outside])
    return mask, (j <= at) & (j > at - 40), None, None, [outside]


def mask_hooks(positions):
    outside = number(0.0)
    mask = Mask(lopsided, aux=[number(3, torch.int32), outside])
    return mask, dense_lopsided(*positions[:4]), None, None, [outside]


def score_hooks(positions):
    b, h, i, j, _ = positions
    outside = number(0.0), number(0.0)
    seqlens = number(i.shape[2], torch.int32), number(j.shape[3], torch.int32)
    mask = Mask(lopsided, aux=[number(3, torch.int32), outside[0]])
    score = Score(squash, squash_grad, aux=[number(0.125), outside[1], *seqlens])

    def changed(s):
        return 0.125 * (1 + i + h) * s / (1 + j + s.abs())

    return mask, dense_lopsided(b, h, i, j), score, changed, outside


def shift_hooks(positions):
    i = positions[2]
    score = Score(shift, shift_grad, aux=[number(1000.0)])
    return None, (i[0, 0] % 3 != 0).expand(positions[4].shape), score, lambda s: s + 1000.0, []


HALF, SINGLE = torch.float16, torch.float32
# The first ones find most mistakes. 33 and 30 more keys than queries put the diagonal one past, and one before, the
# border of a tile; 65 and 33 leave one row in the last tile.
PROBES = {
    "one tile of queries": Probe((1, 1, 20, 53, 24, 24), True, layouts=("sliced",) * 4),
    "causal": Probe((1, 1, 40, 73, 24, 24), True, layouts=("sliced",) * 4),
    "layouts": Probe((2, 2, 20, 23, 24, 16), True, layouts=("transposed", "sliced", "strided", "turned")),
    "rows without a key": Probe((1, 2, 40, 7, 16, 16), True),
    "large scores": Probe((1, 1, 20, 70, 16, 16), scale=0.05, dtype=SINGLE, std=40.0, backward=False),
    "a large negative scale": Probe((1, 1, 20, 70, 16, 16), scale=-1.5, dtype=SINGLE, std=4.0, backward=False),
    "one row in the last tile": Probe((1, 1, 65, 33, 16, 24), layouts=("sliced", "strided", "sliced", "transposed")),
    "the diagonal at the border of a tile": Probe((1, 1, 40, 70, 16, 16), True),
    "a score and a mask": Probe((1, 2, 20, 37, 16, 16), True, hooks=score_hooks),
    "a mask without bounds": Probe((1, 1, 35, 40, 16, 16), hooks=mask_hooks),
    "scores far from 0": Probe((1, 1, 38, 40, 16, 16), hooks=shift_hooks),
    "features": Probe((1, 2, 12, 20, 16, 16), features=("softcap", "alibi", "bias", "sinks", "dropout")),
    "grouped heads": Probe((1, 4, 12, 20, 16, 16), nheads_kv=2, features=("bias",)),
    "a window of the op": Probe((1, 1, 34, 51, 16, 16), window=(21, 9), tile=(16, 16), features=("alibi",)),
    "16 bits": Probe((1, 1, 20, 40, 64, 64), dtype=HALF, std=60.0, scale=1e-4, backward=False),
    "descriptors": Probe((1, 2, 20, 40, 24, 16), True, descriptors=True),
    "a window": Probe((1, 1, 32, 122, 16, 16), hooks=window_hooks, tile=(16, 16), hidden=10),
    "a window, more queries": Probe((1, 1, 70, 34, 16, 16), hooks=window_hooks, tile=(16, 16)),
    "no query": Probe((1, 1, 0, 5, 16, 16)),
}


def in_nan(shape, layout, dtype, seed=0):
    """Return a tensor of zeros of (batch, nheads, seqlen, head_dim) with NaN before, after and between its rows."""
    b, h, s, d = shape
    around, view = {
        "contiguous": ((b, h, s, d), lambda x: x),
        "transposed": ((b, s + 40, h, d), lambda x: x[:, :s].transpose(1, 2)),
        "sliced": ((b, h, s + 40, d + 8), lambda x: x[:, :, :s, :d]),
        "strided": ((b, h, s + 40, 2 * d), lambda x: x[:, :, :s, ::2]),
        "turned": ((h, b, d, s + 40), lambda x: x[..., :s].transpose(2, 3).transpose(0, 1)),
    }[layout]
    buffer = torch.full((2 * ROOM + math.prod(around),), math.nan, dtype=dtype, device=DEVICE)
    return view(buffer[ROOM : buffer.numel() - ROOM].view(around))


class Ready(NamedTuple):
    """A probe with its inputs, what is right and how far off a result may be."""

    inputs: list
    sent: tuple
    options: dict
    some: torch.Tensor
    want: tuple
    limits: list
    zeros: list


@functools.cache
def ready(name):
    """Compute what does not depend on the kernels."""
    probe = PROBES[name]
    b, h, m, n, d, d_v = probe.shape
    generator = torch.Generator(DEVICE).manual_seed(len(name))
    tensors = []
    h_kv = probe.nheads_kv or h
    for shape, layout in zip(((h, m, d), (h_kv, n, d), (h_kv, n, d_v), (h, m, d_v)), probe.layouts, strict=True):
        view = in_nan((b, *shape), layout, probe.dtype)
        std = probe.std if len(tensors) < 2 else 1.0
        tensors.append(view.copy_(torch.randn(view.shape, generator=generator, device=DEVICE) * std))
    *inputs, dout = tensors
    accumulator = tiles.accumulator(probe.dtype)
    dlse = in_nan((b, h, m, 1), "sliced", accumulator)[..., 0]
    dlse.copy_(torch.randn(b, h, m, generator=generator, device=DEVICE))

    i, j = torch.arange(m, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)
    positions = torch.arange(b, device=DEVICE)[:, None, None, None], torch.arange(h, device=DEVICE)[:, None, None]
    positions = *positions, i[None, None], j[None, None, None], (i + n - m).expand(m, n)
    mask, dense, score, changed, zeros = (probe.hooks or no_hooks)(positions)
    seen = torch.ones(b, h, m, n, dtype=torch.bool, device=DEVICE)
    seen = seen & (positions[4] >= j if probe.causal else True) & (True if dense is None else dense)
    some = seen.any(-1)
    scale = d**-0.5 if probe.scale is None else probe.scale
    options = {"causal": probe.causal, "scale": scale, "window": probe.window}
    features, extra = {}, {}
    if "softcap" in probe.features:
        options["softcap"] = 1.5
    if "alibi" in probe.features:
        options["alibi_slopes"] = torch.linspace(0.1, 0.4, h, device=DEVICE)
    if "dropout" in probe.features:
        options["dropout_p"], features["dropout_seed"] = 0.3, torch.tensor([3, 2**40 + 7], device=DEVICE)
        extra["keep"] = torch.from_numpy(keep_mask(*features["dropout_seed"].tolist(), 0.3, b, h, m, n))
    for name, shape in (("bias", (1, h, m, n)), ("sinks", (h,))):
        if name in probe.features:
            inputs.append(torch.randn(shape, generator=generator, device=DEVICE).double())

    def oracle(q, k, v, bias=None, sinks=None):
        if changed is not None:
            s = scale * q @ k.transpose(-1, -2)
            bias = changed(s) - s
        return reference.attention(q, k, v, mask=dense, bias=bias, sinks=sinks, return_lse=True, **options, **extra)

    def plain(q, k, v):
        s = (q @ k.transpose(-1, -2)) * scale
        s = (s if changed is None else changed(s)).masked_fill(~seen, -math.inf)
        p = torch.where(some[..., None], torch.softmax(torch.where(some[..., None], s, 0.0), -1), 0.0)
        return p @ v, torch.logsumexp(s, -1)

    def results(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out, lse = function(*leaves)
        sent = (out * dout.to(dtype)).sum() + (lse[some] * dlse[some].to(lse.dtype)).sum()
        return out.detach(), lse.detach(), *torch.autograd.grad(sent, leaves)

    want = results(oracle, torch.float64)
    # In float16 plain PyTorch's scores overflow here: ours must be as good as if they did not.
    base = want if probe.dtype == torch.float64 else results(plain, SINGLE)
    rows = [(a[some], b[some]) if x == "lse" else (a, b) for x, a, b in zip(TENSORS, base, want, strict=False)]
    limits = [allowed(a, b, probe.dtype) if b.numel() else 0.0 for a, b in rows]
    # What no query sees must not be read, and what comes back through the lse of a row without a key must not count.
    for x in inputs[1:3]:
        x[:, :, : probe.hidden] = math.nan
        x[:, :, n - probe.hidden :] = math.nan
    dlse[~some] = math.inf
    options |= {"scale": probe.scale, "mask": mask, "score": score, **features}
    return Ready(inputs, (dout, dlse), options, some, want, limits, zeros)


def hold(condition, message):
    """Assert, without the explanations of pytest: writing tensors out would take a quarter of the time."""
    if not condition:
        raise AssertionError(message)


@contextlib.contextmanager
def guarded():
    """Allocate memory filled with NaN between guards, and see at the end that the guards stand."""
    whole = []

    def wrap(allocate):
        def allocated(*arguments, **options):
            x = allocate(*arguments, **options)
            if not x.numel() or not x.is_floating_point():
                return x
            extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            buffer = torch.full((2 * ROOM + extent,), GUARD, dtype=x.dtype, device=x.device)
            whole.append((buffer, extent))
            buffer[ROOM : ROOM + extent] = math.nan
            return buffer[ROOM:].as_strided(x.shape, x.stride())

        return allocated

    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield
    for buffer, extent in whole:
        hold((buffer[:ROOM] == GUARD).all(), "something was stored before a tensor")
        hold((buffer[ROOM + extent :] == GUARD).all(), "something was stored past a tensor")


@contextlib.contextmanager
def set_up(probe):
    """Set tile sizes and the copy engine as a probe wants them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(tiles, "tile_for", return_value=tiles.Tile(*probe.tile, 4, 1)))
        if probe.descriptors:
            stack.enter_context(mock.patch.object(tiles, "DESCRIPTOR_FROM", 0))
            stack.enter_context(mock.patch.object(tiles, "describable", return_value=True))
        yield


@functools.cache
def forward_of(name):
    """Return leaves, out and lse of a probe, for mistakes that only the backward pass can see."""
    return forward(name)


def forward(name):
    case = ready(name)
    leaves = [x.detach().requires_grad_() for x in case.inputs]
    with set_up(PROBES[name]), guarded():
        more = dict(zip(("bias", "sinks"), leaves[3:], strict=False))
        return leaves, flash_attention(*leaves[:3], **more, **case.options, return_lse=True)


def run(name, forward=forward, grads=TENSORS[2:]):
    """Run a probe; AssertionError: a result is wrong.

    Args:
        name: key of PROBES. forward: `forward`, or `forward_of` where it need not run again.
        grads: the gradients to ask for.
    """
    case = ready(name)
    for x in case.zeros:
        x.data.zero_()
    with complaints():
        leaves, got = forward(name)
        compare(case, dict(zip(TENSORS, got, strict=False)))
        if PROBES[name].backward:
            with set_up(PROBES[name]), guarded():
                asked = {x: leaf for x, leaf in zip(TENSORS[2:], leaves, strict=False) if x in grads}
                computed = torch.autograd.grad(got, list(asked.values()), case.sent, retain_graph=True)
            compare(case, dict(zip(asked, computed, strict=True)))


@contextlib.contextmanager
def complaints():
    """Take NumPy's complaint of a NaN or an overflow, which the interpreter wraps, for a finding; a crash is none."""
    try:
        yield
    except Exception as problem:
        first = problem
        while not isinstance(first, RuntimeWarning) and first.__cause__ is not None:
            first = first.__cause__
        if isinstance(first, RuntimeWarning):
            raise AssertionError(str(first)) from problem
        raise


def compare(case, got):
    """Hold results, a dict, against what is right."""
    hold(not any(map(torch.Tensor.any, case.zeros)), "an index was outside the lengths")
    for name, x in got.items():
        exact, limit = case.want[TENSORS.index(name)], case.limits[TENSORS.index(name)]
        if name in ("out", "lse", "dq"):
            empty = x[~case.some]
            hold((empty == (-math.inf if name == "lse" else 0)).all(), f"{name} of a row without a key")
            x, exact = x[case.some], exact[case.some]
        if x.numel():
            off = error(x, exact)
            hold(off <= limit, f"{name} is {off:.1e} off")


# What a mistake is about tells which probe to begin with; that saves time and decides nothing.
BEGIN = {
    "score_aux, CAUSAL": "a score and a mask",
    "LOG2_E, ACCURATE": "a score and a mask",
    "group": "grouped heads",
    "softcap": "features",
    "UNIT) - less": "a window of the op",
    "t * t": "features",
    "thinned(p, dropout, b, h, i, j)": "features",
    "thinned(dp, dropout, b, h, i, j) -": "features",
    "alibi": "features",
    "slope": "features",
    "tl.abs(": "features",
    "i + seqlen_k - seqlen_q).to": "features",
    "bias[": "features",
    "to(s.dtype)": "features",
    "sinks": "features",
    "l_i + 1.0": "features",
    "j) - delta": "features",
    "left)": "a window of the op",
    "- left": "a window of the op",
    "right": "a window of the op",
    "+ left": "a window of the op",
    "less": "a score and a mask",
    "SCORE(": "a score and a mask",
    "GRAD(": "a score and a mask",
    "first_m + BLOCK_M": "a window, more queries",
    "tl.minimum(end": "a window",
    "aux": "a score and a mask",
    "scale > 0": "a large negative scale",
    "s * qk_scale -": "a large negative scale",
    "LOG2_E -": "a score and a mask",
    "m_safe = ": "rows without a key",
    "0.0, dlse)": "rows without a key",
    "1e30": "rows without a key",
    "l_safe = ": "rows without a key",
    "tl.max(s": "rows without a key",
    "if FOLD": "large scores",
    "s * scale": "a large negative scale",
    "HEAD_DIM, WIDE": "one row in the last tile",
    "DELTA_ROWS": "one row in the last tile",
    "bounds": "a window",
    "lo_full or": "a window",
    "tl.range(0": "a window",
    "hi_full = 0": "a mask without bounds",
    "MASK": "a score and a mask",
    "score": "a score and a mask",
    "- 1)": "a score and a mask",
    "x.load": "descriptors",
    "out_dtype=ACC).to": "16 bits",
    "zero_": "no query",
    "b = ": "layouts",
    "h = ": "layouts",
    "pid_bh": "layouts",
    "stride": "layouts",
    "hi = seqlen": "one row in the last tile",
    "seen = j": "one row in the last tile",
    "j < seqlen_k": "one row in the last tile",
    "% tiles_m": "one row in the last tile",
    "- 2 +": "the diagonal at the border of a tile",
    "+ 2 +": "the diagonal at the border of a tile",
    'float("inf")': "scores far from 0",
}


GRADS = {
    "backward._dq_kernel": ("dq",),
    "backward._dkdv_kernel": ("dk", "dv"),
    "bias._bias_gradient_kernel": ("dbias",),
    "mods.query_range": ("dk", "dv"),
}


def backward_only(mutant):
    module, function = mutant.where.split(".")
    return module in ("backward", "bias") or function in ("query_range", "hook_gradient", "changed_gradient")


def found(mutant):
    """Return the first probe that fails and what it says, or None."""
    begin = next((probe for word, probe in BEGIN.items() if word in mutant.old + mutant.new), None)
    # What a kernel does not compute it cannot get wrong.
    grads = GRADS.get(mutant.where, TENSORS[2:])
    options = {"forward": forward_of if backward_only(mutant) else forward, "grads": grads}
    for name in sorted(PROBES, key=lambda name: name != begin):
        try:
            run(name, **options)
        except AssertionError as problem:
            return name, str(problem)
    return None


# --- what only a GPU shows ------------------------------------------------------------------------------------------


def far(shape, strides):
    """Return float16 data with NaN around it, so far that an offset which has lost its upper bits still lands there."""
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    buffer = torch.full((2**31 + extent + ROOM,), math.nan, dtype=HALF, device=DEVICE)
    return buffer[2**31 :].as_strided(shape, strides).copy_(torch.randn(shape, device=DEVICE))


# Shape and strides of k: what has to be multiplied in 64 bits.
FAR = {
    "columns": ((1, 1, 64, 16), (0, 0, 1, 2**27 + 2**24)),
    "rows": ((1, 1, 128, 16), (0, 0, 2**24 + 2**20, 1)),
    "tiles": ((1, 1, 400, 16), (0, 0, 2**23 - 8, 1)),
    "batches": ((3, 1, 64, 16), (2**30 + 2**20, 0, 16, 1)),
    "heads": ((1, 3, 64, 16), (0, 2**30 + 2**20, 16, 1)),
}


def run_far(name):
    shape, strides = FAR[name]
    k = far(shape, strides)
    q, v = torch.randn(shape, dtype=HALF, device=DEVICE), torch.randn(shape, dtype=HALF, device=DEVICE)
    with mock.patch.object(tiles, "tile_for", return_value=tiles.Tile(64, 128, 4, 1)):
        assert error(flash_attention(q, k, v), flash_attention(q, k.contiguous(), v).double()) <= 1e-2


def run_single():
    q, k, v = (torch.randn(1, 2, 300, 64, device=DEVICE) for _ in range(3))
    assert error(flash_attention(q, k, v), reference.attention(q, k, v)) <= 1e-5


def found_on_a_gpu():
    for probe in (run_single, *(functools.partial(run_far, name) for name in FAR)):
        try:
            probe()
        except AssertionError:
            return probe
    return None


# --- tests ----------------------------------------------------------------------------------------------------------


def named(mutants):
    return [pytest.param(mutant, id=f"{mutant.where}: {mutant.name}") for mutant in mutants]


interpreted = pytest.mark.skipif(ON_GPU, reason="these probes compute in float64, which only the interpreter does")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


@interpreted
@pytest.mark.parametrize("name", PROBES)
def test_the_kernels_as_they_are_pass(name):
    run(name)


@interpreted
@pytest.mark.parametrize("mutant", named(m for m in MUTANTS if m.seen == "cpu"))
def test_a_mistake_is_found(mutant, record_property):
    with applied(mutant):
        finding = found(mutant)
    record_property("mutant", (mutant.where, finding is not None))
    assert finding, f"survived: {mutant.says}"


@interpreted
def test_no_mistake_is_left_behind():
    run("causal")
    run("layouts")


@pytest.mark.gpu
@needs_gpu
def test_the_compiled_kernels_as_they_are_pass():
    assert found_on_a_gpu() is None


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("mutant", named(m for m in MUTANTS if m.seen == "gpu"))
def test_a_mistake_of_compiled_code_is_found(mutant, record_property):
    with applied(mutant):
        finding = found_on_a_gpu()
    record_property("mutant", (mutant.where, finding is not None))
    assert finding, f"survived: {mutant.says}"


def test_each_mistake_fits_its_function():
    times = {m: sum(line.count(m.old) for line in source_of(m.where).splitlines()) for m in MUTANTS}
    assert [f"{m.old!r} stands {n} times in {m.where}" for m, n in times.items() if n != 1] == []


def test_names_tell_mistakes_apart():
    assert len({(m.where, m.name) for m in MUTANTS}) == len({(m.where, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)
