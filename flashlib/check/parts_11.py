"""Kernels around the hooks that chapter 11 asks for: one tile of indices, the reader's function, one store.

Apart from `ex_11`, because that module has to be importable where there is no Triton.
"""

from flashlib.device import tl, triton


@triton.jit
def mask_kernel(seen_ptr, seqlen_q, seqlen_k, aux, MASK: tl.constexpr, TURNED: tl.constexpr, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)[:, None]
    j = tl.arange(0, SIDE)[None, :]
    inside = (i < seqlen_q) & (j < seqlen_k)
    place = i * SIDE + j
    if TURNED:
        # The kernel of dK and dV has the keys in the rows.
        i = tl.arange(0, SIDE)[None, :]
        j = tl.arange(0, SIDE)[:, None]
        inside = (i < seqlen_q) & (j < seqlen_k)
        place = i * SIDE + j
    seen = MASK(
        tl.program_id(0), tl.program_id(1), tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1),
        seqlen_q, seqlen_k, aux,
    )  # fmt: skip
    tl.store(seen_ptr + place, (inside & seen).to(tl.int8))


@triton.jit
def score_kernel(s_ptr, new_ptr, aux, SCORE: tl.constexpr, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)[:, None]
    j = tl.arange(0, SIDE)[None, :]
    h = tl.program_id(0)
    place = h * SIDE * SIDE + i * SIDE + j
    tl.store(new_ptr + place, SCORE(tl.load(s_ptr + place), tl.program_id(1), h, i, j, aux))


@triton.jit
def score_grad_kernel(ds_ptr, s_ptr, old_ptr, aux, GRAD: tl.constexpr, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)[:, None]
    j = tl.arange(0, SIDE)[None, :]
    h = tl.program_id(0)
    place = h * SIDE * SIDE + i * SIDE + j
    ds = GRAD(tl.load(ds_ptr + place), tl.load(s_ptr + place), tl.program_id(1), h, i, j, aux)
    tl.store(old_ptr + place, ds)


@triton.jit
def chunk_seen(b, h, i, j, seqlen_q, seqlen_k, aux):
    """See the keys of one's own chunk of aux[0] keys, up to one's own place."""
    at = i + seqlen_k - seqlen_q
    return (j <= at) & (j // tl.load(aux[0]) == at // tl.load(aux[0]))


@triton.jit
def chunk_queries(b, h, first, end, seqlen_q, seqlen_k, aux):
    """Serve where only the keys are asked for: nothing is skipped, nothing is full."""
    return 0, 0, 0, seqlen_q
