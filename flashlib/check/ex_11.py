"""Chapter 11: a mask, the bounds of another one, a score and its derivative, each as the kernels call them."""

import numpy as np

from flashlib.check import Case, Exercise, Wrong
from flashlib.check.ex_07 import _require_kernel
from flashlib.check.ex_08 import _run_kernel, _to_device

_SETUP = "from flashlib.device import tl, triton\nfrom flashlib.mods import tanh"


def _numbers(values, dtype):
    """Return a vector where kernels run, for aux."""
    return _to_device(np.array(values), dtype)


# --- 11.1 ----------------------------------------------------------------------------------------------------------

_MASK_SOLUTION = """\
@triton.jit
def first_and_last(b, h, i, j, seqlen_q, seqlen_k, aux):
    at = i + seqlen_k - seqlen_q
    first, last = tl.load(aux[0]), tl.load(aux[1])
    return (j <= at) & ((j < first) | (j > at - last))
"""

_MASK_OTHER = """\
@triton.jit
def first_and_last(b, h, i, j, seqlen_q, seqlen_k, aux):
    behind = i - j + (seqlen_k - seqlen_q)
    near = (behind < tl.load(aux[1])) & (behind >= 0)
    start = (j < tl.load(aux[0])) & (behind >= 0)
    return near | start
"""


def _mask_cases():
    return [
        Case("as many keys as queries", 16, 16, 2, 4),
        Case("more keys than queries", 10, 16, 3, 4),
        Case("one query, 16 keys", 1, 16, 2, 5),
        Case("fewer keys than queries", 16, 9, 2, 3),
        Case("no first key, a window of one", 12, 12, 0, 1),
    ]


def _call_mask(mask, seqlen_q, seqlen_k, first, last):
    _require_kernel(mask)
    import torch

    from flashlib import device
    from flashlib.check.parts_11 import mask_kernel

    aux = _numbers([first], "int32"), _numbers([last], "int32")
    result = {}
    for name, turned in (("seen", False), ("seen_turned", True)):
        seen = torch.zeros(16, 16, dtype=torch.int8, device=device.kernel_device())
        _run_kernel(
            lambda seen=seen, turned=turned: mask_kernel[(1, 1)](
                seen, seqlen_q, seqlen_k, aux, MASK=mask, TURNED=turned, SIDE=16
            )
        )
        result[name] = seen[:seqlen_q, :seqlen_k].cpu().numpy()
    return result


_MASK = Exercise(
    id="11.1",
    title="The first keys and the last",
    level=1,
    task=(
        "Write a mask for a chat that never ends: a query sees the last `aux[1]` keys, the key of its own place "
        "included, and besides them the first `aux[0]` keys of the sequence. It never sees a later key. `aux` holds "
        "pointers to one int32 each: `tl.load(aux[0])`. The last query stands at the last key."
    ),
    name="first_and_last",
    stub="""\
@triton.jit
def first_and_last(b, h, i, j, seqlen_q, seqlen_k, aux):
    raise NotImplementedError
""",
    solution=_MASK_SOLUTION,
    cases=_mask_cases,
    also_right=(_MASK_OTHER,),
    setup=_SETUP,
    call=_call_mask,
    wrong=(
        Wrong(
            "the mask is aligned at the top left: query i is taken to stand at key i, whatever the lengths",
            edit=("at = i + seqlen_k - seqlen_q", "at = i"),
            stumble=12,
        ),
        Wrong("the offset has the wrong sign", edit=("+ seqlen_k - seqlen_q", "- seqlen_k + seqlen_q")),
        Wrong(
            "the window is one key too long: with `>=` it holds aux[1] keys besides the query's own",
            edit=("j > at - last", "j >= at - last"),
        ),
        Wrong("the window is one key too short", edit=("j > at - last", "j > at - last + 1")),
        Wrong(
            "the first keys are seen even where they are later than the query: `j <= at` must hold for both parts",
            edit=("(j <= at) & ((j < first) | (j > at - last))", "(j < first) | ((j <= at) & (j > at - last))"),
        ),
        Wrong("later keys are seen: `j <= at` is missing", edit=("(j <= at) & (", "(j >= 0) & (")),
        Wrong("a query does not see the key of its own place: `<` for `<=`", edit=("(j <= at)", "(j < at)")),
        Wrong("the first keys are forgotten: this is the window alone", edit=("(j < first) |", "(j < 0) |")),
        Wrong(
            "both conditions are asked for, `&` between them: a key must be among the first or among the last",
            edit=("(j < first) | (j > at - last)", "(j < first) & (j > at - last)"),
        ),
        Wrong("one first key too many is seen: `<=` for `<`", edit=("(j < first)", "(j <= first)")),
        Wrong(
            "aux[0] and aux[1] are exchanged",
            edit=("first, last = tl.load(aux[0]), tl.load(aux[1])", "last, first = tl.load(aux[0]), tl.load(aux[1])"),
        ),
    ),
)

# --- 11.2 ----------------------------------------------------------------------------------------------------------

_BOUNDS_SOLUTION = """\
@triton.jit
def chunk_keys(b, h, first, end, seqlen_q, seqlen_k, aux):
    shift = seqlen_k - seqlen_q
    size = tl.load(aux[0])
    chunk_of_first = (first + shift) // size * size
    chunk_of_last = (end - 1 + shift) // size * size
    return chunk_of_first, chunk_of_last, first + shift + 1, end + shift
"""

_BOUNDS_OTHER = """\
@triton.jit
def chunk_keys(b, h, first, end, seqlen_q, seqlen_k, aux):
    size = tl.load(aux[0])
    at_first = tl.maximum(first + seqlen_k - seqlen_q, 0)
    at_last = tl.maximum(end - 1 + seqlen_k - seqlen_q, 0)
    start = at_first - at_first % size
    # Queries of two chunks share no key: nothing is full.
    start_full = tl.where(at_last // size == at_first // size, start, seqlen_k)
    return start, start_full, first + seqlen_k - seqlen_q + 1, end + seqlen_k - seqlen_q
"""


def _bounds_cases():
    def case(label, seqlen_q, seqlen_k, size, block_m=8, block_n=8):
        return Case(label, seqlen_q, seqlen_k, size, block_m, block_n)

    return [
        case("chunks of 16, tiles of 8 × 8", 48, 48, 16),
        case("chunks of 20: tiles lie across their borders", 48, 48, 20),
        case("9 keys more than queries", 40, 49, 24),
        case("7 keys more than queries", 40, 47, 24),
        case("fewer keys than queries", 41, 30, 12),
        case("tiles of 16 queries by 4 keys", 48, 48, 32, 16, 4),
    ]


def _call_bounds(keys, seqlen_q, seqlen_k, size, block_m, block_n):
    _require_kernel(keys)
    from flashlib import tile_map
    from flashlib.check.parts_11 import chunk_queries, chunk_seen
    from flashlib.mods import Bounds, Mask

    mask = Mask(chunk_seen, Bounds(keys, chunk_queries), aux=[_numbers([size], "int32")])
    found = {}
    _run_kernel(lambda: found.update(tiles=tile_map.kinds(seqlen_q, seqlen_k, block_m, block_n, mask=mask)))
    return found


_BOUNDS = Exercise(
    id="11.2",
    title="Bounds of a mask of chunks",
    level=2,
    task=(
        "The keys are cut into chunks of `tl.load(aux[0])`, and a query sees its own chunk up to its own place. Write "
        "the bounds: for the queries `first` … `end - 1` of a tile return four positions of keys. No query of the tile "
        "sees a key before the first or from the fourth on; every query sees every key from the second up to, not "
        "including, the third. Make both runs as tight as they can be; the kernel rounds to tiles. The checker "
        "compares what becomes of each tile: 0 not visited, 1 tested, 2 full."
    ),
    name="chunk_keys",
    stub='''\
@triton.jit
def chunk_keys(b, h, first, end, seqlen_q, seqlen_k, aux):
    """The mask: (j <= at) & (j // size == at // size), where at = i + seqlen_k - seqlen_q."""
    raise NotImplementedError
''',
    solution=_BOUNDS_SOLUTION,
    cases=_bounds_cases,
    also_right=(_BOUNDS_OTHER,),
    setup=_SETUP,
    call=_call_bounds,
    wrong=(
        Wrong(
            "tiles are called full too early: the first query's chunk is seen by the first query, but a later query of "
            "the tile may stand in the next chunk and not see it",
            edit=("return chunk_of_first, chunk_of_last,", "return chunk_of_first, chunk_of_first,"),
        ),
        Wrong(
            "tiles are called full too far: the run of full keys ends at the place of the *first* query, the only one "
            "that does not see the keys behind it",
            edit=("first + shift + 1, end + shift", "end + shift, end + shift"),
        ),
        Wrong(
            "the bounds are aligned at the top left: shift = seqlen_k - seqlen_q is missing",
            edit=("shift = seqlen_k - seqlen_q", "shift = 0"),
            stumble=12,
        ),
        Wrong(
            "the walk begins at the chunk of the *last* query: what the first queries of the tile see is skipped",
            edit=("return chunk_of_first, chunk_of_last,", "return chunk_of_last, chunk_of_last,"),
        ),
        Wrong(
            "the result is right, but the walk begins at key 0: tiles are visited that no query of the tile sees",
            edit=("return chunk_of_first, chunk_of_last,", "return 0, chunk_of_last,"),
        ),
        Wrong(
            "the result is right, but the walk goes on to the end of the sequence",
            edit=("first + shift + 1, end + shift", "first + shift + 1, seqlen_k"),
        ),
        Wrong(
            "the walk ends one key too early: the last query's own key is lost where a tile begins with it",
            edit=("first + shift + 1, end + shift", "first + shift + 1, end - 1 + shift"),
        ),
        Wrong(
            "the walk ends where the first query's keys do: the later queries of the tile see more",
            edit=("first + shift + 1, end + shift", "first + shift + 1, first + shift + 1"),
        ),
        Wrong(
            "the result is right, but the run of full keys ends one key early: the first query sees its own key too",
            edit=("first + shift + 1, end + shift", "first + shift, end + shift"),
        ),
        Wrong(
            "the result is right, but no tile is called full: every visited tile is tested",
            edit=("return chunk_of_first, chunk_of_last, first + shift + 1,", "return chunk_of_first, 0, 0,"),
        ),
        Wrong(
            "the last query of the tile is taken to be `end`: it is end - 1",
            edit=("(end - 1 + shift) // size", "(end + shift) // size"),
        ),
    ),
)

# --- 11.3 ----------------------------------------------------------------------------------------------------------

_SCORE_SOLUTION = """\
@triton.jit
def capped_alibi(s, b, h, i, j, aux):
    cap, slope = tl.load(aux[0]), tl.load(aux[1] + h)
    return cap * tanh(s / cap, True) - slope * tl.abs(i - j)
"""

_SCORE_OTHER = """\
@triton.jit
def capped_alibi(s, b, h, i, j, aux):
    cap = tl.load(aux[0])
    x = tl.abs(s) / cap
    e = tl.exp(-2 * x)
    t = tl.where(s < 0, -1.0, 1.0) * (1 - e) / (1 + e)
    away = tl.maximum(i, j) - tl.minimum(i, j)
    return t * cap - away * tl.load(aux[1] + h)
"""


def _scores(seed, spread):
    return (spread * np.random.default_rng(seed).standard_normal((2, 16, 16))).round(2)


def _score_cases():
    large = _scores(113, 1.0)
    large[:, ::2] *= 3000
    return [
        Case("scores about as large as the cap", _scores(111, 2.0), 2.0, [0.5, 0.25]),
        Case("small scores", _scores(112, 0.1), 30.0, [1.0, 0.0]),
        Case("scores thousands of times the cap", large, 5.0, [0.125, 0.5]),
    ]


def _call_score(score, s, cap, slopes):
    _require_kernel(score)
    import torch

    from flashlib.check.parts_11 import score_kernel

    old = _to_device(s)
    new = torch.full_like(old, float("nan"))
    aux = _numbers([cap], "float32"), _numbers(slopes, "float32")
    _run_kernel(lambda: score_kernel[(len(s), 1)](old, new, aux, SCORE=score, SIDE=16))
    return {"s": new.double().cpu().numpy()}


_SCORE = Exercise(
    id="11.3",
    title="A score: softcap, then ALiBi",
    level=1,
    task=(
        "Write the score that does both: first the softcap, `cap * tanh(s / cap)`, then subtract the head's slope "
        "times the distance between `i` and `j` (as many queries as keys). `aux[0]` points to the cap, `aux[1]` to one "
        "slope for each head. `tanh(x, True)` is the library's."
    ),
    name="capped_alibi",
    stub="""\
@triton.jit
def capped_alibi(s, b, h, i, j, aux):
    raise NotImplementedError
""",
    solution=_SCORE_SOLUTION,
    cases=_score_cases,
    also_right=(_SCORE_OTHER,),
    rtol=2e-5,
    atol=2e-5,
    setup=_SETUP,
    call=_call_score,
    wrong=(
        Wrong(
            "the distance is capped too: subtract it after the tanh, or far keys all get the score -cap",
            edit=(
                "cap * tanh(s / cap, True) - slope * tl.abs(i - j)",
                "cap * tanh((s - slope * tl.abs(i - j)) / cap, True)",
            ),
        ),
        Wrong("the distance is added: far keys become more likely", edit=("- slope *", "+ slope *")),
        Wrong(
            "the distance has a sign: `i - j` is negative for keys after the query, so they gain",
            edit=("tl.abs(i - j)", "(i - j)"),
        ),
        Wrong("the result is not multiplied by cap: it lies between -1 and 1", edit=("cap * tanh", "tanh")),
        Wrong("s is not divided by cap inside the tanh", edit=("s / cap", "s")),
        Wrong("every head takes the slope of the first: h is missing in the address", edit=("aux[1] + h", "aux[1]")),
        Wrong(
            "tanh is written with e^x and e^-x: both are infinite for large x, and their quotient is NaN",
            edit=(
                "cap * tanh(s / cap, True)",
                "cap * (tl.exp(s / cap) - tl.exp(-s / cap)) / (tl.exp(s / cap) + tl.exp(-s / cap))",
            ),
        ),
        Wrong(
            "the scores are cut at ±cap, and not bent towards it",
            edit=("cap * tanh(s / cap, True)", "tl.minimum(tl.maximum(s, -cap), cap)"),
        ),
    ),
)

# --- 11.4 ----------------------------------------------------------------------------------------------------------

_GRAD_SOLUTION = """\
@triton.jit
def capped_alibi_grad(ds, s, b, h, i, j, aux):
    t = tanh(s / tl.load(aux[0]), True)
    return ds * (1 - t * t)
"""

_GRAD_OTHER = """\
@triton.jit
def capped_alibi_grad(ds, s, b, h, i, j, aux):
    # 1 - tanh² = 4 / (e^x + e^-x)², with e^-|x| in place of both.
    e = tl.exp(-2 * tl.abs(s) / tl.load(aux[0]))
    return ds * 4 * e / ((1 + e) * (1 + e))
"""


def _grad_cases():
    large = _scores(115, 1.0)
    large[:, ::2] *= 3000
    return [
        Case("scores about as large as the cap", _scores(116, 1.0), _scores(114, 2.0), 2.0, [0.5, 0.25]),
        Case("a larger cap", _scores(117, 1.0), _scores(118, 3.0), 5.0, [0.25, 0.75]),
        Case("scores thousands of times the cap", _scores(119, 1.0), large, 5.0, [0.125, 0.5]),
    ]


def _call_grad(grad, ds, s, cap, slopes):
    _require_kernel(grad)
    import torch

    from flashlib.check.parts_11 import score_grad_kernel

    new, old = _to_device(ds), _to_device(s)
    result = torch.full_like(old, float("nan"))
    aux = _numbers([cap], "float32"), _numbers(slopes, "float32")
    _run_kernel(lambda: score_grad_kernel[(len(s), 1)](new, old, result, aux, GRAD=grad, SIDE=16))
    return {"ds": result.double().cpu().numpy()}


_GRAD = Exercise(
    id="11.4",
    title="Its derivative",
    level=2,
    task=(
        "Write the derivative of 11.3: `ds` is the gradient of the new scores, `s` the *old* scores, before the cap. "
        "Return the gradient of the old scores. Where the cap has flattened a score, it is 0 and not NaN."
    ),
    name="capped_alibi_grad",
    stub="""\
@triton.jit
def capped_alibi_grad(ds, s, b, h, i, j, aux):
    raise NotImplementedError
""",
    solution=_GRAD_SOLUTION,
    cases=_grad_cases,
    also_right=(_GRAD_OTHER,),
    rtol=2e-5,
    atol=2e-5,
    setup=_SETUP,
    call=_call_grad,
    wrong=(
        Wrong("the square is missing: the derivative of tanh is 1 - tanh²", edit=("1 - t * t", "1 - t")),
        Wrong(
            "the new score is put in where the old one belongs: tanh of what already went through tanh",
            edit=("t = tanh(s / tl.load(aux[0]), True)", "t = tanh(tanh(s / tl.load(aux[0]), True), True)"),
        ),
        Wrong(
            "the new score is put in where the old one belongs, the distance subtracted from it too",
            edit=(
                "t = tanh(s / tl.load(aux[0]), True)",
                "cap = tl.load(aux[0])\n"
                "    new = cap * tanh(s / cap, True) - tl.load(aux[1] + h) * tl.abs(i - j)\n"
                "    t = tanh(new / cap, True)",
            ),
        ),
        Wrong(
            "a factor cap is left: it cancels with the 1/cap inside the tanh",
            edit=("ds * (1 - t * t)", "ds * (1 - t * t) * tl.load(aux[0])"),
        ),
        Wrong(
            "a factor 1/cap is left: it cancels with the cap in front of the tanh",
            edit=("ds * (1 - t * t)", "ds * (1 - t * t) / tl.load(aux[0])"),
        ),
        Wrong("ds is forgotten: the chain rule multiplies by it", edit=("ds * (1 - t * t)", "1 - t * t")),
        Wrong("the cap is ignored: this is the derivative of ALiBi alone, 1", edit=("ds * (1 - t * t)", "ds")),
        Wrong(
            "the distance is differentiated too: it does not depend on s",
            edit=(
                "ds * (1 - t * t)",
                "ds * (1 - t * t - tl.load(aux[1] + h) * tl.abs(i - j))",
            ),
        ),
        Wrong("s is not divided by cap inside the tanh", edit=("s / tl.load(aux[0])", "s")),
        Wrong("ds goes through the score itself, and not through its derivative", edit=("ds * (1 - t * t)", "ds * t")),
    ),
)

EXERCISES = [_MASK, _BOUNDS, _SCORE, _GRAD]
