"""Step player: watch the tiled forward move, on the reader's own arrays.

`player(trace)` turns a `tiling.Trace` into one piece of HTML that brings its own style (player.css) and script
(player.js) and loads nothing. Where scripts do not run (an untrusted notebook, a printed page) the same HTML is a plain
table of all steps.
"""

import html
import json
import math
from pathlib import Path
from string import Template

import numpy as np

_FOLDER = Path(__file__).parent
# More than this is no lesson any more, and the HTML is stored in the notebook.
MAX_STEPS = 400
MAX_NUMBERS = 60_000
# Tiles up to this many columns show their numbers; wider ones show shades only.
_MAX_COLUMNS = 8

_KINDS = {"full": "full", "diagonal": "partly masked", "empty": "skipped"}


class Player:
    """The tiled forward as a picture that steps; displays itself as the last value of a cell.

    Args:
        trace: the recorded forward, a `tiling.Trace`.
        offset: the watched row, counted from the first row of its query tile.
    """

    def __init__(self, trace, offset):
        self.trace = trace
        self.offset = offset

    def __repr__(self):
        trace = self.trace
        computed = sum(step.kind != "empty" for step in trace.steps)
        mask = "causal" if trace.causal else "no mask"
        return (
            f"Player: {trace.q.shape[0]} queries in tiles of {trace.block_m}, {trace.k.shape[0]} keys in tiles of "
            f"{trace.block_n}, {mask}; {len(trace.steps)} steps, {computed} computed, "
            f"{len(trace.steps) - computed} skipped"
        )

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": repr(self), "text/html": self.html()}

    def html(self):
        """Return the player as one HTML fragment; the same trace gives the same text."""
        data = _data(self.trace, self.offset)
        return _PAGE.substitute(
            label=html.escape(repr(self), quote=True),
            table=_table(data),
            style=(_FOLDER / "player.css").read_text(encoding="utf-8"),
            script=(_FOLDER / "player.js").read_text(encoding="utf-8").rstrip(),
            # A "<" could end the script element early or start a comment.
            data=json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c"),
        )


def player(trace, row=None):
    """Return a player for a recorded forward: play, step, scrub; tiles, scores, m, l, acc and bytes.

    Args:
        trace: `tiling.Trace`, of at most 400 steps and 60,000 numbers.
        row: the query whose state is watched, 0 to seqlen_q - 1; None for the first. In other query tiles the row at
            the same place is watched.

    Returns:
        Player: displays itself; its text form is one line without ids or addresses.

    Raises:
        ValueError: trace is no trace, has no steps or is too large; row is not a row of q.

    Source: the picture of FlashAttention-2's forward loop, arXiv 2307.08691, Algorithm 1.
    """
    names = ("q", "k", "v", "out", "lse", "block_m", "block_n", "causal", "steps")
    missing = [name for name in names if not hasattr(trace, name)]
    if missing:
        raise ValueError(f"trace must be what tiling.trace returns, got {type(trace).__name__} without {missing[0]}")
    if not 1 <= len(trace.steps) <= MAX_STEPS:
        raise ValueError(f"trace must have 1 to {MAX_STEPS} steps, got {len(trace.steps)}; take larger tiles")
    numbers = sum(2 * _size(step.s) + _size(step.acc) for step in trace.steps)
    numbers += sum(_size(array) for array in (trace.q, trace.k, trace.v, trace.out))
    if numbers > MAX_NUMBERS:
        raise ValueError(f"trace must hold at most {MAX_NUMBERS} numbers to be shown, got {numbers}; take fewer rows")
    rows = trace.q.shape[0]
    if row is None:
        row = 0
    if isinstance(row, bool) or not isinstance(row, (int, np.integer)) or not 0 <= row < rows:
        raise ValueError(f"row must be an integer from 0 to {rows - 1}, got {row!r}")
    return Player(trace, int(row) % trace.block_m)


def _size(array):
    return 0 if array is None else int(np.size(array))


# --- the numbers, formatted once: table and player show the same text ---------------------------------------------


def _number(x):
    x = float(x)
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else str(x)
    return f"{x:z.4f}" if 0.001 <= abs(x) < 1000 else f"{x:.3e}"


def _short(x):
    x = float(x)
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else str(x)
    return f"{x:z.2f}" if abs(x) < 1000 else f"{x:.0e}"


def _texts(array, form):
    array = np.asarray(array)
    return form(array) if array.ndim == 0 else [_texts(part, form) for part in array]


def _data(trace, offset):
    """Return everything that the script needs, numbers as texts."""
    steps, newest = [], {}
    last = {step.i: index for index, step in enumerate(trace.steps)}
    for index, step in enumerate(trace.steps):
        before = newest.get(step.i)
        m_before = -np.inf if before is None else np.asarray(trace.steps[before].m, dtype=np.float64)
        m = np.asarray(step.m, dtype=np.float64)
        # In a row that has seen no key yet, -inf minus -inf is not a number; the script shows neither alpha nor p then.
        with np.errstate(over="ignore", invalid="ignore"):
            alpha = np.exp(m_before - m)
            p = None if step.s is None else np.exp(np.asarray(step.s, dtype=np.float64) - m[:, None])
        steps.append(
            {
                "i": int(step.i),
                "j": int(step.j),
                "rows": [int(x) for x in step.rows],
                "keys": [int(x) for x in step.keys],
                "kind": step.kind,
                "s": None if step.s is None else _texts(step.s, _short),
                "p": None if p is None or p.shape[1] > _MAX_COLUMNS else _texts(p, _short),
                "prev": before,
                "after": [_texts(part, _number) for part in (step.m, step.l, step.acc)],
                "alpha": _texts(alpha, _number),
                "bytes": int(step.bytes_so_far),
                "last": last[step.i] == index,
            }
        )
        newest[step.i] = index
    return {
        "offset": offset,
        "q": _texts(trace.q, _short),
        "k": _texts(trace.k, _short),
        "v": _texts(trace.v, _short),
        "out": _texts(trace.out, _number),
        "lse": _texts(trace.lse, _number),
        "kinds": _KINDS,
        "columns": _MAX_COLUMNS,
        "steps": steps,
    }


def _table(data):
    """Return the table of all steps: one row a step, the state of the watched row after it."""
    head = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("step", "queries", "keys", "tile", "row", "m", "l", "acc", "bytes so far")
    )
    body = []
    for index, step in enumerate(data["steps"]):
        (first, stop), (key, key_stop) = step["rows"], step["keys"]
        offset = min(data["offset"], stop - first - 1)
        m, l, acc = (part[offset] for part in step["after"])
        shown = ", ".join(acc[:_MAX_COLUMNS]) + (", …" if len(acc) > _MAX_COLUMNS else "")
        cells = (
            f"{index + 1}",
            f"{first} to {stop - 1}",
            f"{key} to {key_stop - 1}",
            _KINDS.get(step["kind"], step["kind"]),
            f"{first + offset}",
            m,
            l,
            shown,
            f"{step['bytes']:,}",
        )
        body.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


# --- the page: what stands without a script; style and script lie beside this file ---------------------------------

_PAGE = Template(
    """<div class="flash-player" role="group" aria-label="$label">
<div class="fp-static"><p class="fp-hint">Run this cell to see it move. The steps as a table, with the state of one \
row after each:</p><div class="fp-scroll" tabindex="0" role="region" \
aria-label="All steps">$table</div></div>
<style>$style</style>
<script>$script($data);</script>
</div>"""
)
