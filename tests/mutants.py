"""Single-line mistakes in the attention kernels and in what they call; `test_mutants.py` proves that each one shows.

To add one, append a line to _MISTAKES under "module.function" of flashlib: a kernel, a helper that kernels call or a
function of the host.

    (name, old, new, says)

name: short. old: a piece of one line of that function, long enough to stand there once; new: what it becomes. says:
what the author of the mistake forgot or believed. What only compiled code shows goes into _COMPILED.

Then run `pytest tests/test_mutants.py -k NAME`. If it survives, either the mistake changes nothing that a user can see:
then say why in the comment below and leave it out. Or the probes of test_mutants.py are too weak: then strengthen one.
An edit of a kernel that removes an `old` fails the test that looks for it: change the mutant with the kernel.
"""

import contextlib
import functools
import importlib
import inspect
import linecache
import sys
from typing import NamedTuple
from unittest import mock

from flashlib import device

MODULES = ("tiles", "mods", "forward", "backward")


class Mutant(NamedTuple):
    """One mistake; see above."""

    where: str
    name: str
    old: str
    new: str
    says: str
    seen: str


# Mistakes that are none, because no number changes that a user can see:
#
# key_range, hi_full one smaller; query_range, hi_full = seqlen_q: a tile more is tested.
# query_range without `if end > seqlen_k`: keys past the end get some p, but a key's sums are its own and not stored.
# whole_tiles, lo_full not at least lo: a tile before lo is not visited. hi_full not at least lo_full: if it is less,
# each tile is tested either way.
# _load_delta, other=1.0: such a row has p = 0.

_MISTAKES = {
    "forward._forward_kernel": [
        ("l forgets alpha", "l_i = l_i * alpha + tl.sum(p, 1)", "l_i = l_i + tl.sum(p, 1)", "l needs no rescaling"),
        ("l of the last tile", "l_i = l_i * alpha + tl.sum(p, 1)", "l_i = tl.sum(p, 1)", "the last sum is the sum"),
        ("l over queries", "tl.sum(p, 1)", "tl.sum(p, 0)", "rows and columns mixed up"),
        ("acc forgets alpha", "acc = acc * alpha[:, None]", "acc = acc * 1.0", "out needs no rescaling"),
        ("alpha along the columns", "acc = acc * alpha[:, None]", "acc = acc * alpha[None, :]",
         "any broadcast will do"),
        ("alpha upside down", "tl.exp2(m_i - m_safe)", "tl.exp2(m_safe - m_i)", "old and new maximum swapped"),
        ("p in base e", "p = tl.exp2(", "p = tl.exp(", "one exponential forgotten"),
        ("m not updated", "m_i = m_new", "m_i = m_i", "m_new is enough"),
        ("m of the last tile", "tl.maximum(m_i, m_tile * qk_scale if FOLD else m_tile)",
         "m_tile * qk_scale if FOLD else m_tile", "each tile has its own maximum"),
        ("m over queries", "tl.max(s, 1)", "tl.max(s, 0)", "rows and columns mixed up"),
        ("m without scale", "m_tile * qk_scale if FOLD else m_tile", "m_tile", "the scale is small anyway"),
        ("no m_safe", 'm_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = m_new",
         "each row sees some key"),
        ("scaled twice", "p = tl.exp2((s * qk_scale if FOLD else s) -", "p = tl.exp2(s * qk_scale -",
         "FOLD is always true"),
        ("scale in base e", "s = s * qk_scale", "s = s * scale", "log2(e) forgotten"),
        ("score in base e", "score_aux) * LOG2_E", "score_aux)", "log2(e) forgotten after a score"),
        ("score of raw qk", "SCORE(s * scale,", "SCORE(s,", "the score is given qk instead of scale·qk"),
        ("score's i and j swapped", "b, h, i[:, None], j[None, :], score_aux",
         "b, h, j[None, :], i[:, None], score_aux", "query and key mixed up"),
        ("score's i not clamped", "i = tl.minimum(offs_m, seqlen_q - 1)", "i = offs_m",
         "a score may read past its aux"),
        ("score's j not clamped", "j = tl.minimum(offs_n, seqlen_k - 1)", "j = offs_n",
         "a score may read past its aux"),
        ("masked to zero", 's = tl.where(seen, s, float("-inf"))', "s = tl.where(seen, s, 0.0)",
         "0 is a score like others"),
        ("masked to a large number", 's = tl.where(seen, s, float("-inf"))', "s = tl.where(seen, s, -1e30)",
         "minus infinity avoided: a row without a key becomes a mean"),
        ("masked in all tiles but the last", "first_n < lo_full or first_n >= hi_full", "first_n < lo_full",
         "the diagonal and the tail are full"),
        ("masked in no tile on the left", "first_n < lo_full or first_n >= hi_full", "first_n >= hi_full",
         "masks cut on the right only"),
        ("the first partial tile is full", "first_n >= hi_full", "first_n > hi_full", "off by one tile"),
        ("the first tile skipped", "tl.range(lo, hi, BLOCK_N)", "tl.range(lo + BLOCK_N, hi, BLOCK_N)",
         "off by one tile"),
        ("no tile skipped", "tl.range(lo, hi, BLOCK_N)", "tl.range(0, hi, BLOCK_N)", "reads what no query sees"),
        ("bounds asked about no query", "tl.minimum(first_m + BLOCK_M, seqlen_q)", "first_m + BLOCK_M",
         "bounds may read past their aux"),
        ("acc starts again", "v, acc, input_precision", "v, input_precision", "the accumulator of tl.dot forgotten"),
        ("p transposed", "tl.dot(p.to(v.dtype), v, acc", "tl.dot(p.T.to(v.dtype), v, acc", "operand transposed"),
        ("scores in the inputs' precision", "s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC)",
         "s = tl.dot(q, k.T, input_precision=PRECISION, out_dtype=ACC).to(q.dtype).to(ACC)", "16 bits hold a score"),
        ("out not divided", "out = acc * (1.0 / l_safe)[:, None]", "out = acc", "the last step forgotten"),
        ("zero divided by zero", "l_safe = tl.where(l_i == 0.0, 1.0, l_i)", "l_safe = l_i", "each row sees some key"),
        ("lse in base 2", "(m_i + tl.log2(l_safe)) * LN_2", "m_i + tl.log2(l_safe)", "base 2 handed out"),
        ("lse multiplied the wrong way", "(m_i + tl.log2(l_safe)) * LN_2", "(m_i + tl.log2(l_safe)) * LOG2_E",
         "ln 2 and log2(e) swapped"),
        ("lse without m", "(m_i + tl.log2(l_safe)) * LN_2", "tl.log2(l_safe) * LN_2", "relative to the maximum"),
        ("lse stored past the end", "lse, mask=offs_m < seqlen_q", "lse, mask=offs_m >= 0", "no mask on a store"),
        ("out stored past the last column", "BLOCK_M, COLS_V, HEAD_DIM_V, WIDE)", "BLOCK_M, COLS_V, COLS_V, WIDE)",
         "columns of padding stored"),
        ("out has q's strides", "store_tile(out_ptr, stride_out", "store_tile(out_ptr, stride_q",
         "all tensors lie alike"),
        ("k has q's strides", "load_tile(k_ptr, stride_k", "load_tile(k_ptr, stride_q", "all tensors lie alike"),
        ("v has k's strides", "load_tile(v_ptr, stride_v", "load_tile(v_ptr, stride_k", "all tensors lie alike"),
        ("as many keys as queries", "b, h, first_n, seqlen_k, BLOCK_N, COLS_V",
         "b, h, first_n, seqlen_q, BLOCK_N, COLS_V", "the tail of v cut at seqlen_q"),
        ("batch of the head", "b = pid_bh // nheads", "b = pid_bh % nheads", "batch and head mixed up"),
        ("causal order off by one", "pid_m = tiles_m - 1 - pid_m", "pid_m = tiles_m - pid_m", "counting from 1"),
        ("the mask reads the score's tensors", "seqlen_q, seqlen_k, aux, CAUSAL, MASK)",
         "seqlen_q, seqlen_k, score_aux, CAUSAL, MASK)", "aux and score_aux swapped"),
    ],
    "backward._delta_kernel": [
        ("delta of dout alone", "out.to(ACC) * dout.to(ACC)", "dout.to(ACC) * dout.to(ACC)", "out forgotten"),
        ("dout has out's strides", "load_tile(dout_ptr, stride_dout", "load_tile(dout_ptr, stride_out",
         "all tensors lie alike"),
        ("dlse with the other sign", "delta -= tl.where", "delta += tl.where", "sign of the gradient of lse"),
        ("dlse ignored", 'delta -= tl.where(lse == float("-inf"), 0.0, dlse)', "delta -= 0.0",
         "lse sends nothing back"),
        ("an infinite dlse let in", 'tl.where(lse == float("-inf"), 0.0, dlse)', "dlse", "dlse is always finite"),
        ("dlse of another batch", "b.to(tl.int64) * stride_dlse[0]", "b.to(tl.int64) * stride_dlse[1]",
         "dlse is contiguous"),
        ("dlse of another row", "offs_m.to(tl.int64) * stride_dlse[2]", "offs_m.to(tl.int64)", "dlse is contiguous"),
        ("delta stored past the end", "delta, mask=offs_m < seqlen_q", "delta, mask=offs_m >= 0", "no mask on a store"),
        ("delta's second tile", "% tiles_m * BLOCK_M", "// tiles_m * BLOCK_M", "division and remainder mixed up"),
    ],
    "backward._load_lse": [
        ("lse past the end is 0", 'other=float("inf")', "other=0.0", "p = 1 in rows that are not there"),
        ("rows without a score", 'tl.where(lse == float("-inf"), float("inf"), lse) * LOG2_E', "lse * LOG2_E",
         "-inf minus -inf"),
        ("lse left in base e", 'float("inf"), lse) * LOG2_E', 'float("inf"), lse)', "log2(e) forgotten"),
    ],
    "backward._recompute_p": [
        ("score of raw qk", "SCORE(s * scale,", "SCORE(s,", "qk instead of scale·qk"),
        ("score in base e", "log_p = s * LOG2_E - lse", "log_p = s - lse", "log2(e) forgotten"),
        ("s in base e", "log_p = s * qk_scale - lse", "log_p = s * scale - lse", "log2(e) forgotten"),
        ("lse not subtracted", "log_p = s * qk_scale - lse", "log_p = s * qk_scale", "p unnormalised"),
        ("backward not masked", 'tl.where(seen, log_p, float("-inf"))', "log_p", "P is sparse anyway"),
        ("mask's i and j swapped", "visible(b, h, i, j,", "visible(b, h, j, i,", "query and key mixed up"),
        ("p in base e", "tl.exp2(log_p)", "tl.exp(log_p)", "one exponential forgotten"),
        ("score's aux and mask's", "seqlen_q, seqlen_k, aux, CAUSAL, MASK)",
         "seqlen_q, seqlen_k, score_aux, CAUSAL, MASK)", "aux and score_aux swapped"),
        ("score's i not clamped", "tl.minimum(i, seqlen_q - 1)", "i", "reads past aux"),
        ("score's j not clamped", "tl.minimum(j, seqlen_k - 1)", "j", "reads past aux"),
    ],
    "backward._score_grad": [
        ("score's gradient skipped", "ds = GRAD(ds,", "ds + GRAD(ds,", "the chain rule ends too early"),
        ("score's gradient of raw qk", "GRAD(ds, s * scale,", "GRAD(ds, s,", "qk instead of scale·qk"),
        ("score's gradient of p", "GRAD(ds, s * scale,", "GRAD(s * scale, ds,", "arguments swapped"),
        ("score's gradient, i and j", "tl.minimum(i, seqlen_q - 1), tl.minimum(j, seqlen_k - 1)",
         "tl.minimum(j, seqlen_k - 1), tl.minimum(i, seqlen_q - 1)", "query and key mixed up"),
    ],
    "backward._dkdv_kernel": [
        ("dv from ds", "dv = tl.dot(p.to(dout.dtype), dout, dv", "dv = tl.dot((p * dp).to(dout.dtype), dout, dv",
         "ds for p"),
        ("dk from p", "dk = tl.dot(ds.to(q.dtype), q, dk", "dk = tl.dot(p.to(q.dtype), q, dk", "p for ds"),
        ("dv transposed", "tl.dot(p.to(dout.dtype)", "tl.dot(p.T.to(dout.dtype)", "operand transposed"),
        ("dk transposed", "tl.dot(ds.to(q.dtype)", "tl.dot(ds.T.to(q.dtype)", "operand transposed"),
        ("delta not subtracted", "ds = p * (dp - _load_delta(delta_ptr, pid_bh, offs_m, seqlen_q)[None, :])",
         "ds = p * dp", "softmax taken for exp"),
        ("delta along the keys", "offs_m, seqlen_q)[None, :])", "offs_m, seqlen_q)[:, None])", "any broadcast will do"),
        ("lse of the first batch", "_load_lse(lse_ptr, pid_bh,", "_load_lse(lse_ptr, h,", "batch forgotten"),
        ("p forgotten in ds", "ds = p * (dp -", "ds = (dp -", "softmax's derivative without p"),
        ("scale missing in dk", "dk * scale", "dk", "the scale belongs to s only"),
        ("scale twice in dk", "dk * scale", "dk * scale * scale", "the scale given to ds and to dk"),
        ("dk starts again", "q, dk, input_precision", "q, input_precision", "the accumulator of tl.dot forgotten"),
        ("dv starts again", "dout, dv, input_precision", "dout, input_precision",
         "the accumulator of tl.dot forgotten"),
        ("masked on the right only", "first_m < lo_full or first_m >= hi_full", "first_m >= hi_full",
         "causal's side forgotten"),
        ("masked on the left only", "first_m < lo_full or first_m >= hi_full", "first_m < lo_full",
         "window's side forgotten"),
        ("the first tile of queries skipped", "tl.range(lo, hi, BLOCK_M)", "tl.range(lo + BLOCK_M, hi, BLOCK_M)",
         "off by one"),
        ("all tiles of queries read", "tl.range(lo, hi, BLOCK_M)", "tl.range(0, seqlen_q, BLOCK_M)",
         "full where nothing is seen"),
        ("keys end with the queries", "first_n, seqlen_k, BLOCK_N, COLS, HEAD_DIM, WIDE)",
         "first_n, seqlen_q, BLOCK_N, COLS, HEAD_DIM, WIDE)", "dk cut at, or stored past, seqlen_q"),
        ("dk has k's strides", "store_tile(dk_ptr, stride_dk", "store_tile(dk_ptr, stride_k", "all tensors lie alike"),
        ("dv has v's strides", "store_tile(dv_ptr, stride_dv", "store_tile(dv_ptr, stride_v", "all tensors lie alike"),
        ("dv has v's columns", "COLS_V, HEAD_DIM_V, WIDE)", "COLS_V, HEAD_DIM, WIDE)", "head_dim_v is head_dim"),
        ("v has k's strides", "load_tile(v_ptr, stride_v", "load_tile(v_ptr, stride_k", "all tensors lie alike"),
        ("dout has q's strides", "load_tile(dout_ptr, stride_dout", "load_tile(dout_ptr, stride_q",
         "all tensors lie alike"),
        ("batch of the head", "b = pid_bh // nheads", "b = pid_bh % nheads", "batch and head mixed up"),
    ],
    "backward._dq_kernel": [
        ("dq from p", "ds = _score_grad(p * (dp - delta)", "ds = _score_grad(p", "p for ds"),
        ("delta not subtracted", "p * (dp - delta)", "p * dp", "softmax taken for exp"),
        ("dq transposed", "tl.dot(ds.to(k.dtype)", "tl.dot(ds.T.to(k.dtype)", "operand transposed"),
        ("dq starts again", "k, dq, input_precision", "k, input_precision", "the accumulator of tl.dot forgotten"),
        ("scale missing in dq", "dq * scale", "dq", "the scale belongs to s only"),
        ("scale twice in dq", "dq * scale", "dq * scale * scale", "the scale given to ds and to dq"),
        ("dq has q's strides", "store_tile(dq_ptr, stride_dq", "store_tile(dq_ptr, stride_q", "all tensors lie alike"),
        ("v has k's strides", "load_tile(v_ptr, stride_v", "load_tile(v_ptr, stride_k", "all tensors lie alike"),
        ("lse of the first batch", "_load_lse(lse_ptr, pid_bh,", "_load_lse(lse_ptr, h,", "batch forgotten"),
        ("masked on the right only", "first_n < lo_full or first_n >= hi_full", "first_n >= hi_full",
         "window's side forgotten"),
        ("masked on the left only", "first_n < lo_full or first_n >= hi_full", "first_n < lo_full",
         "causal's side forgotten"),
        ("the first tile skipped", "tl.range(lo, hi, BLOCK_N)", "tl.range(lo + BLOCK_N, hi, BLOCK_N)",
         "off by one tile"),
        ("no tile skipped", "tl.range(lo, hi, BLOCK_N)", "tl.range(0, hi, BLOCK_N)", "reads what no query sees"),
        ("bounds asked about no query", "tl.minimum(first_m + BLOCK_M, seqlen_q)", "first_m + BLOCK_M",
         "bounds may read past their aux"),
        ("dq stored past the last column", "dq * scale, b, h, first_m, seqlen_q, BLOCK_M, COLS, HEAD_DIM,",
         "dq * scale, b, h, first_m, seqlen_q, BLOCK_M, COLS, COLS,", "columns of padding stored"),
    ],
    "mods.visible": [
        ("the end of the keys counts", "j < seqlen_k", "j <= seqlen_k", "off by one at the tail"),
        ("the tail counts", "seen = j < seqlen_k", "seen = j >= 0", "lengths are multiples of the tile"),
        ("causal from the top left", "j <= i + seqlen_k - seqlen_q", "j <= i", "alignment"),
        ("causal without oneself", "j <= i + seqlen_k - seqlen_q", "j < i + seqlen_k - seqlen_q", "off by one"),
        ("causal with the next", "j <= i + seqlen_k - seqlen_q", "j <= i + 1 + seqlen_k - seqlen_q", "off by one"),
        ("mask or causal", "seen & MASK(", "seen | MASK(", "and mixed up with or"),
        ("mask's b and h swapped", "MASK(b, h,", "MASK(h, b,", "batch and head mixed up"),
        ("mask's i not clamped", "tl.minimum(i, seqlen_q - 1)", "i", "a mask may read past its aux"),
        ("mask's j not clamped", "tl.minimum(j, seqlen_k - 1)", "j", "a mask may read past its aux"),
    ],
    "mods.key_range": [
        ("the diagonal is full", "first + 1 + seqlen_k - seqlen_q", "end + seqlen_k - seqlen_q",
         "the last query's keys taken for everyone's"),
        ("full one key too far", "first + 1 + seqlen_k - seqlen_q", "first + 2 + seqlen_k - seqlen_q", "off by one"),
        ("keys end with the first query's", "end + seqlen_k - seqlen_q", "first + seqlen_k - seqlen_q",
         "the first query's keys taken for everyone's"),
        ("keys end one early", "end + seqlen_k - seqlen_q", "end - 1 + seqlen_k - seqlen_q", "off by one"),
        ("the last key lost", "hi = seqlen_k", "hi = seqlen_k - 1", "off by one"),
        ("a mask without bounds is full", "hi_full = 0", "hi_full = seqlen_k", "no bounds, no test"),
        ("the first partial tile lost", "tl.maximum(lo, bounds[0])", "tl.maximum(lo, bounds[1])", "bounds mixed up"),
        ("the first bound ignored", "tl.maximum(lo, bounds[0])", "lo", "reads what no query sees"),
        ("full from the first bound", "tl.maximum(lo_full, bounds[1])", "tl.maximum(lo_full, bounds[0])",
         "bounds mixed up"),
        ("full to the last bound", "tl.minimum(hi_full, bounds[2])", "tl.minimum(hi_full, bounds[3])",
         "bounds mixed up"),
        ("the last partial tile lost", "tl.minimum(hi, bounds[3])", "tl.minimum(hi, bounds[2])", "bounds mixed up"),
        ("the last bound ignored", "tl.minimum(hi, bounds[3])", "hi", "reads what no query sees"),
    ],
    "mods.query_range": [
        ("the first query to see a key", "first + seqlen_q - seqlen_k", "end + seqlen_q - seqlen_k",
         "the last key's queries taken for everyone's"),
        ("queries begin one late", "first + seqlen_q - seqlen_k", "first + 1 + seqlen_q - seqlen_k", "off by one"),
        ("queries aligned at the top left", "first + seqlen_q - seqlen_k", "first", "alignment"),
        ("the diagonal is full, for keys", "end - 1 + seqlen_q - seqlen_k", "first + seqlen_q - seqlen_k",
         "the first key's queries taken for everyone's"),
        ("full one query too early", "end - 1 + seqlen_q - seqlen_k", "end - 2 + seqlen_q - seqlen_k", "off by one"),
        ("the last query lost", "hi = seqlen_q", "hi = seqlen_q - 1", "off by one"),
        ("a mask without bounds is full, for keys", "hi_full = 0", "hi_full = seqlen_q", "no bounds, no test"),
        ("the first partial queries lost", "tl.maximum(lo, bounds[0])", "tl.maximum(lo, bounds[1])", "bounds mixed up"),
        ("full from the first query", "tl.maximum(lo_full, bounds[1])", "tl.maximum(lo_full, bounds[0])",
         "bounds mixed up"),
        ("bounds asked about no key", "tl.minimum(end, seqlen_k)", "end", "bounds may read past their aux"),
        ("full to the last query", "if bounds[2] < seqlen_q", "if bounds[2] < 0", "the last tiles are full"),
        ("the last partial queries lost", "tl.minimum(hi, bounds[3])", "tl.minimum(hi, bounds[2])", "bounds mixed up"),
    ],
    "mods.whole_tiles": [
        ("lo rounded up", "lo // BLOCK * BLOCK", "tl.cdiv(lo, BLOCK) * BLOCK", "inwards where outwards"),
        ("lo_full rounded down", "tl.cdiv(lo_full, BLOCK) * BLOCK", "lo_full // BLOCK * BLOCK",
         "outwards where inwards"),
        ("hi_full rounded up", "tl.maximum(hi_full, 0) // BLOCK * BLOCK",
         "tl.cdiv(tl.maximum(hi_full, 0), BLOCK) * BLOCK", "outwards where inwards"),
    ],
    "tiles.load_tile": [
        ("rows not masked", "tl.arange(0, ROWS) < length", "tl.arange(0, ROWS) >= 0", "reads past the last row"),
        ("one row too many", "tl.arange(0, ROWS) < length", "tl.arange(0, ROWS) <= length", "off by one"),
        ("columns not masked", "if DIM < COLS", "if DIM > COLS", "head_dim is a power of two"),
        ("padding of ones", "other=0.0", "other=1.0", "what is masked does not matter"),
        ("descriptor's axes", "x.load([b, h, first, 0])", "x.load([b, h, 0, 0])", "the first tile every time"),
        ("descriptor of another head", "x.load([b, h, first, 0])", "x.load([b, 0, first, 0])", "heads forgotten"),
    ],
    "tiles.store_tile": [
        ("rows stored past the end", "tl.arange(0, ROWS) < length", "tl.arange(0, ROWS) >= 0", "no mask on a store"),
        ("one row stored too many", "tl.arange(0, ROWS) < length", "tl.arange(0, ROWS) <= length", "off by one"),
        ("columns stored past the end", "tl.arange(0, COLS) < DIM", "tl.arange(0, COLS) >= 0", "no mask on a store"),
    ],
    "tiles.tile_pointers": [
        ("batch's stride", "b.to(tl.int64) * stride[0]", "b.to(tl.int64) * stride[1]", "axes mixed up"),
        ("head's stride", "h.to(tl.int64) * stride[1]", "h.to(tl.int64) * stride[2]", "axes mixed up"),
        ("columns are neighbours", "col * stride[3]", "col", "the last stride is always 1"),
        ("rows are COLS apart", "row * stride[2]", "row * COLS", "tensors are contiguous"),
    ],
    "forward._forward": [
        ("FOLD for any scale", "scale > 0 and not score", "not score", "a maximum under a negative scale"),
        ("scale handed over in base e", "scale * LOG2_E.value", "scale", "log2(e) forgotten"),
        ("aux not divided", "tiles.pointers(aux[n_mask:])", "tiles.pointers(aux)", "two lists in one"),
    ],
    "backward.gradients": [
        ("dk of no query", "dk.zero_(), dv.zero_()", "dk, dv", "empty memory handed out"),
        ("delta of one tile", "-(-seqlen_q // DELTA_ROWS) * batch * nheads", "batch * nheads", "one tile is enough"),
        ("dlse dropped on the host", "out, dout, lse, dlse, delta,", "out, dout, lse, None, delta,",
         "lse sends nothing back"),
        ("scale handed to the backward in base e", "scale * LOG2_E.value", "scale", "log2(e) forgotten"),
    ],
}  # fmt: skip
_COMPILED = {
    "tiles.tile_pointers": [
        ("rows of 32 bits", "row = row.to(tl.int64)", "row = row", "WIDE for columns only"),
        ("columns of 32 bits", "col = col.to(tl.int64)", "col = col", "WIDE for rows only"),
        ("tiles of 32 bits", "tl.cast(first, tl.int64) * stride[2]", "first * stride[2]", "rows · stride fits"),
        ("batches of 32 bits", "b.to(tl.int64) * stride[0]", "b * stride[0]", "batch · stride fits"),
        ("heads of 32 bits", "h.to(tl.int64) * stride[1]", "h * stride[1]", "nheads · stride fits"),
    ],
    "tiles.wide": [
        ("wide too late", "* 256 >= 2**31", "* 16 >= 2**31", "a tile has 16 rows"),
    ],
    "tiles._constants": [
        ("one product of TF32", '"tf32x3"', '"tf32"', "TF32 is float32"),
    ],
}  # fmt: skip
MUTANTS = [
    Mutant(where, *mistake, seen)
    for seen, mistakes in (("cpu", _MISTAKES), ("gpu", _COMPILED))
    for where, some in mistakes.items()
    for mistake in some
]


def function_of(where):
    """Return the live function "module.function"."""
    module, name = where.split(".")
    return getattr(importlib.import_module(f"flashlib.{module}"), name)


def source_of(where):
    """Return the source of a function, decorators included."""
    return inspect.getsource(python_of(function_of(where)))


def python_of(function):
    """Return the Python function inside a kernel or a cached function."""
    return function.fn if is_kernel(function) else inspect.unwrap(function)


def is_kernel(x):
    """Tell whether x is a `@triton.jit` function, compiled or interpreted."""
    return hasattr(x, "fn") and hasattr(x, "run")


@contextlib.contextmanager
def applied(mutant):
    """Put the mistake into the live modules, and take it out again."""
    function = function_of(mutant.where)
    if is_kernel(function):
        # Compiled code is cached per kernel: all that may call the mutated one are made anew.
        originals = {mutant.where: function} if device.interpreting() else _kernels()
        fresh = {id(x): _rebuilt(where, mutant) for where, x in originals.items()}
        changes = [
            mock.patch.object(module, name, fresh[id(value)])
            for key, module in list(sys.modules.items())
            if key.startswith("flashlib.")
            for name, value in list(vars(module).items())
            if id(value) in fresh
        ]
    else:
        # Whoever holds the function, the table of custom ops too, then runs the mistake.
        changes = [_coded(python_of(function), python_of(_rebuilt(mutant.where, mutant)).__code__)]
    with contextlib.ExitStack() as stack:
        _forget_cached()
        stack.callback(_forget_cached)
        for change in changes:
            stack.enter_context(change)
        yield


@contextlib.contextmanager
def _coded(function, code):
    before = function.__code__
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def _kernels():
    modules = {name: importlib.import_module(f"flashlib.{name}") for name in MODULES}
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if is_kernel(value) and value.fn.__module__ == module.__name__
    }


def _rebuilt(where, mutant):
    module, name = where.split(".")
    source = source_of(where)
    if where == mutant.where:
        source = source.replace(mutant.old, mutant.new)
    file = f"<{mutant.name}: {where}>"
    # Triton reads the source of a kernel.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    made = {}
    exec(compile(source, file, "exec"), vars(importlib.import_module(f"flashlib.{module}")), made)
    return made[name]


def _forget_cached():
    for name in MODULES:
        for value in list(vars(importlib.import_module(f"flashlib.{name}")).values()):
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()
