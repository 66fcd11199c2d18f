"""Step player: watch the tiled forward move, on the reader's own arrays.

`player(trace)` turns a `tiling.Trace` into one piece of HTML that brings its own style and script and loads nothing.
Where scripts do not run (an untrusted notebook, a printed page) the same HTML is a plain table of all steps.
"""

import html
import json
import math
from string import Template

import numpy as np

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
            style=_STYLE,
            script=_SCRIPT,
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
    return f"{x:.4f}" if 0.001 <= abs(x) < 1000 else f"{x:.3e}"


def _short(x):
    x = float(x)
    if x == 0 or not math.isfinite(x):
        return "0" if x == 0 else str(x)
    return f"{x:.2f}" if abs(x) < 1000 else f"{x:.0e}"


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
        # A row that has seen no key yet keeps -inf, and -inf minus -inf is not a number.
        shift = np.where(np.isneginf(m), 0.0, m)
        with np.errstate(over="ignore", invalid="ignore"):
            alpha = np.where(np.isneginf(m), 1.0, np.exp(m_before - shift))
            p = None if step.s is None else np.exp(np.asarray(step.s, dtype=np.float64) - shift[:, None])
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
        "causal": bool(trace.causal),
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


# --- the page: what stands without a script, the style, the script that replaces it -------------------------------

_PAGE = Template(
    """<div class="flash-player" role="group" aria-label="$label">
<div class="fp-static"><p class="fp-hint">Run this cell to see it move. The steps as a table, with the state of one \
row after each:</p><div class="fp-scroll" tabindex="0" role="region" \
aria-label="All steps">$table</div></div>
<style>$style</style>
<script>$script($data);</script>
</div>"""
)

_STYLE = r"""
.flash-player {
  --bg: #ffffff; --ink: #1a1a1a; --soft: #5c5c5c; --line: #b8b8b8; --panel: #f5f6f8; --heat: #0072b2;
  --part: #b87900; --now: #a63f00; --focus: #0057b8; --strength: 0.6;
}
@media (prefers-color-scheme: dark) {
  .flash-player {
    --bg: #14181f; --ink: #f0f0f0; --soft: #b4bac4; --line: #565e6b; --panel: #1d232d; --heat: #56b4e9;
    --part: #e69f00; --now: #ff9d5c; --focus: #8ec7ff; --strength: 0.42;
  }
}
html[data-theme="light"] .flash-player, body[data-jp-theme-light="true"] .flash-player {
  --bg: #ffffff; --ink: #1a1a1a; --soft: #5c5c5c; --line: #b8b8b8; --panel: #f5f6f8; --heat: #0072b2;
  --part: #b87900; --now: #a63f00; --focus: #0057b8; --strength: 0.6;
}
html[data-theme="dark"] .flash-player, body[data-jp-theme-light="false"] .flash-player {
  --bg: #14181f; --ink: #f0f0f0; --soft: #b4bac4; --line: #565e6b; --panel: #1d232d; --heat: #56b4e9;
  --part: #e69f00; --now: #ff9d5c; --focus: #8ec7ff; --strength: 0.42;
}
.flash-player {
  box-sizing: border-box; max-width: 760px; margin: 0.5em 0; padding: 12px; border: 1px solid var(--line);
  border-radius: 8px; background: var(--bg); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; text-align: left;
}
.flash-player *, .flash-player *::before { box-sizing: border-box; }
.flash-player:focus-visible, .flash-player :focus-visible { outline: 3px solid var(--focus); outline-offset: 2px; }
.flash-player:focus-visible { outline-offset: -3px; }
.flash-player p { margin: 0 0 8px; color: var(--ink); font-size: 14px; }
.flash-player .fp-scroll { overflow-x: auto; }
.flash-player table {
  width: auto; margin: 0; border: 0; border-collapse: collapse; background: transparent; color: var(--ink);
  font-size: 12px; font-variant-numeric: tabular-nums;
}
/* JupyterLab's own rules for tables are stronger than a class. */
.flash-player tr { background: transparent !important; }
.flash-player th, .flash-player td { text-align: left !important; }
.flash-player table th, .flash-player table td {
  padding: 2px 8px 2px 0; border: 0; border-bottom: 1px solid var(--line); background: transparent; color: var(--ink);
  vertical-align: top; white-space: nowrap; max-width: none;
}
.flash-player table th { color: var(--soft); font-weight: 600; }
.flash-player .fp-bar { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; margin-bottom: 8px; }
.flash-player button, .flash-player select {
  min-width: 36px; height: 36px; margin: 0; padding: 0 8px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--panel); color: var(--ink); font: inherit; cursor: pointer;
}
.flash-player button:hover { border-color: var(--ink); }
.flash-player button svg { display: block; width: 16px; height: 16px; margin: auto; fill: var(--ink); }
.flash-player button.fp-play { min-width: 48px; background: var(--ink); border-color: var(--ink); }
.flash-player button.fp-play svg { fill: var(--bg); }
.flash-player input[type="range"] {
  flex: 1 1 120px; min-width: 80px; height: 36px; margin: 0 4px; accent-color: var(--heat);
}
.flash-player .fp-count { min-width: 6.5em; font-variant-numeric: tabular-nums; text-align: right; }
.flash-player .fp-status {
  min-height: 2.9em; padding: 6px 10px; border-left: 4px solid var(--now); background: var(--panel);
}
.flash-player .fp-columns {
  display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1.25fr); gap: 12px 20px;
}
.flash-player .fp-columns > div { min-width: 0; }
.flash-player .fp-title { margin: 8px 0 4px; color: var(--soft); font-size: 12px; font-weight: 600; }
.flash-player .fp-title:first-child { margin-top: 0; }
.flash-player svg.fp-picture { display: block; max-width: 100%; height: auto; overflow: visible; }
.flash-player svg text { fill: var(--ink); font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.flash-player svg text.fp-soft { fill: var(--soft); }
.flash-player svg .fp-cell { stroke: var(--bg); stroke-width: 1; }
.flash-player svg .fp-edge { fill: none; stroke: var(--line); stroke-width: 1; }
.flash-player svg .fp-now { fill: none; stroke: var(--now); stroke-width: 3; }
.flash-player svg .fp-skip { fill: none; stroke: var(--line); stroke-width: 1; stroke-dasharray: 2 3; }
.flash-player svg .fp-full { fill: var(--heat); stroke: var(--heat); stroke-width: 1; }
.flash-player svg .fp-half { stroke: var(--part); stroke-width: 1; }
.flash-player svg .fp-full, .flash-player svg .fp-half { transition: fill-opacity 0.15s; }
.flash-player svg .fp-strip { fill: var(--panel); stroke: var(--line); }
.flash-player svg .fp-strip.fp-on { fill: var(--now); stroke: var(--now); }
.flash-player svg .fp-strip.fp-done { fill: var(--soft); stroke: var(--soft); }
.flash-player svg [data-step], .flash-player svg [data-row] { cursor: pointer; }
.flash-player .fp-legend {
  display: flex; flex-wrap: wrap; gap: 2px 12px; margin-top: 6px; color: var(--soft); font-size: 12px;
}
.flash-player .fp-legend span { display: inline-flex; gap: 5px; align-items: center; color: var(--soft); }
.flash-player .fp-three { display: flex; flex-wrap: wrap; gap: 6px 14px; margin: 10px 0; }
.flash-player .fp-three > div { min-width: 0; max-width: 100%; }
.flash-player table.fp-state td, .flash-player table.fp-state th { font-size: 13px; white-space: normal; }
.flash-player .fp-state td:last-child { font-weight: 600; }
.flash-player .fp-note {
  min-height: 2.9em; margin: 6px 0 0; font-size: 13px; overflow-wrap: anywhere; white-space: pre-line;
}
.flash-player label { color: var(--soft); font-size: 12px; font-weight: 600; }
.flash-player .fp-meter {
  height: 10px; border: 1px solid var(--line); border-radius: 5px; background: var(--panel); overflow: hidden;
}
.flash-player .fp-meter div { height: 100%; background: var(--heat); transition: width 0.15s; }
.flash-player.fp-moving .fp-static { display: none; margin-top: 10px; }
.flash-player.fp-moving.fp-listed .fp-static { display: block; }
.flash-player.fp-moving .fp-hint { display: none; }
@media (max-width: 640px) {
  .flash-player { padding: 8px; }
  .flash-player .fp-columns { grid-template-columns: minmax(0, 1fr); }
  .flash-player input[type="range"] { order: 1; flex-basis: 100%; margin: 0; }
  .flash-player .fp-count { flex: 1; }
}
@media (prefers-reduced-motion: reduce) { .flash-player * { transition: none !important; } }
@media print {
  .flash-player { break-inside: avoid; --bg: #ffffff; --ink: #000000; --soft: #333333; --panel: #ffffff; }
  .flash-player button, .flash-player input, .flash-player label, .flash-player select { display: none !important; }
  .flash-player.fp-moving .fp-static { display: block; break-before: auto; }
}
html[data-theme="dark"] div.cell_output .text_html:has(.flash-player) { background: transparent !important; }
"""

_SCRIPT = r"""
(function (data) {
  "use strict";
  var SVG = "http://www.w3.org/2000/svg";
  var ICONS = {
    first: "M2 2h2v12H2zM14 2v12L5 8z", back: "M12 2v12L3 8z", next: "M4 2v12l9-6z",
    play: "M3 1v14l11-7z", pause: "M3 2h4v12H3zM9 2h4v12H9z"
  };

  function node(parent, tag, attributes, text) {
    var svg = tag === "svg" || parent.namespaceURI === SVG;
    var made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    Object.keys(attributes || {}).forEach(function (key) { made.setAttribute(key, attributes[key]); });
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function range(span) { return span[0] === span[1] - 1 ? "" + span[0] : span[0] + " to " + (span[1] - 1); }

  function scale(rows) {
    var low = Infinity, high = -Infinity;
    rows.forEach(function (row) {
      row.forEach(function (text) {
        var x = parseFloat(text);
        if (isFinite(x)) { low = Math.min(low, x); high = Math.max(high, x); }
      });
    });
    return function (x) { return high > low ? (x - low) / (high - low) : 0.5; };
  }

  function pattern(svg, colour) {
    window.flashPlayerIds = (window.flashPlayerIds || 0) + 1;
    var id = "fp-hatch-" + window.flashPlayerIds;
    var made = node(node(svg, "defs"), "pattern", {
      id: id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"
    });
    node(made, "rect", { width: 2, height: 6, style: "fill:" + colour });
    return "fill:url(#" + id + ")";
  }

  function write(svg, x, y, anchor, text, soft) {
    node(svg, "text", {
      x: x, y: y, "text-anchor": anchor, "pointer-events": "none", class: soft ? "fp-soft" : ""
    }, text);
  }

  // A tile of numbers as shades, with the numbers written in where they fit.
  function heat(box, rows, shade, o) {
    var n = rows.length, columns = n ? rows[0].length : 0, written = columns <= data.columns && n <= 16;
    var w = written ? o.wide : Math.max(3, Math.min(12, o.room / columns));
    var h = written ? 22 : Math.max(3, Math.min(12, 160 / n));
    var left = 26, top = o.keys ? 16 : 0, width = left + w * columns + 2, height = top + h * n + 2;
    box.textContent = "";
    var svg = node(box, "svg", {
      class: "fp-picture", viewBox: "0 0 " + width + " " + height, width: width, height: height, role: "img",
      "aria-label": o.label
    });
    var hatch = pattern(svg, "var(--soft)");
    for (var r = 0; r < n; r++) {
      for (var c = 0; c < columns; c++) {
        var text = rows[r][c], x = parseFloat(text), masked = !isFinite(x);
        var strength = masked ? 1 : (0.08 + 0.92 * shade(x)).toFixed(3);
        node(node(svg, "rect", {
          class: "fp-cell", x: left + c * w, y: top + r * h, width: w, height: h,
          style: masked ? hatch : "fill:var(--heat);fill-opacity:calc(" + strength + " * var(--strength))"
        }), "title", {}, text);
        if (written && !masked) write(svg, left + c * w + w / 2, top + r * h + h / 2 + 4, "middle", text);
      }
      var y = top + r * h;
      if (written || r === 0 || r === n - 1) write(svg, left - 5, y + h / 2 + 4, "end", o.rows[0] + r, true);
      if (o.pick) node(svg, "rect", { "data-row": r, x: 0, y: y, width: width, height: h, fill: "transparent" });
    }
    for (var k = 0; o.keys && k < columns; k++) {
      if (written || k === 0 || k === columns - 1) write(svg, left + k * w + w / 2, 11, "middle", o.keys[0] + k, true);
    }
    if (o.watch !== undefined) {
      node(svg, "rect", {
        class: "fp-now", x: left, y: top + o.watch * h, width: w * columns, height: h, rx: 2, "pointer-events": "none"
      });
    }
  }

  function start(root) {
    var steps = data.steps, now = 0, offset = data.offset, timer = null;
    var tilesI = 0, tilesJ = 0, total = steps[steps.length - 1].bytes;
    steps.forEach(function (s) { tilesI = Math.max(tilesI, s.i + 1); tilesJ = Math.max(tilesJ, s.j + 1); });
    var shadeS = scale([].concat.apply([], steps.map(function (s) { return s.s || []; })));
    var shades = { q: scale(data.q), k: scale(data.k), v: scale(data.v) };
    root.classList.add("fp-moving");
    root.tabIndex = 0;
    // JupyterLab would take the arrow keys for its own cells.
    root.setAttribute("data-lm-suppress-shortcuts", "true");
    var live = document.createElement("div");
    live.className = "fp-live";
    root.insertBefore(live, root.firstChild);

    var bar = node(live, "div", { class: "fp-bar" });
    function button(name, label, act) {
      var made = node(bar, "button", { type: "button", class: "fp-" + name, "aria-label": label, title: label });
      node(node(made, "svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }), "path", { d: ICONS[name] });
      made.addEventListener("click", act);
      return made;
    }
    button("first", "First step (Home)", function () { go(0); });
    button("back", "Step back (left arrow)", function () { go(now - 1); });
    var play = button("play", "Play (space)", toggle);
    button("next", "Step forward (right arrow)", function () { go(now + 1); });
    var slider = node(bar, "input", {
      type: "range", min: 0, max: steps.length - 1, step: 1, value: 0, "aria-label": "Step"
    });
    slider.addEventListener("input", function () { go(+slider.value); });
    var count = node(bar, "span", { class: "fp-count", "data-fp": "count" });
    var status = node(live, "p", {
      class: "fp-status", role: "status", "aria-live": "polite", "data-fp": "status"
    });

    var columns = node(live, "div", { class: "fp-columns" });
    var left = node(columns, "div"), right = node(columns, "div");
    node(left, "p", { class: "fp-title" }, "All tiles of S");
    var map = node(left, "div"), marks = drawMap(map);
    var bytes = node(left, "p", { class: "fp-title", "data-fp": "bytes" });
    var meter = node(node(left, "div", { class: "fp-meter", "aria-hidden": "true" }), "div");
    var scoreTitle = node(right, "p", { class: "fp-title" });
    var score = node(right, "div", { class: "fp-scroll", "data-fp": "score" });
    var pickRow = node(right, "p", { class: "fp-title" });
    var label = node(pickRow, "label", {}, "State of row ");
    var select = node(label, "select", { "aria-label": "Watched row" });
    select.addEventListener("change", function () { offset = +select.value; show(); });
    score.addEventListener("click", function (event) {
      var row = event.target.getAttribute && event.target.getAttribute("data-row");
      if (row !== null) { offset = +row; show(); }
    });
    var table = node(node(right, "div", { class: "fp-scroll" }), "table", { class: "fp-state" });
    var head = node(node(table, "thead"), "tr");
    ["", "before", "after this tile"].forEach(function (text) { node(head, "th", { scope: "col" }, text); });
    var cells = {}, body = node(table, "tbody");
    ["m", "l", "acc"].forEach(function (name) {
      var line = node(body, "tr");
      node(line, "th", { scope: "row" }, name);
      cells[name] = [node(line, "td"), node(line, "td", { "data-fp": name })];
    });
    var note = node(right, "p", { class: "fp-note", "data-fp": "note" });
    var loads = node(live, "div", { class: "fp-three" }), boxes = {};
    ["q", "k", "v"].forEach(function (name) {
      var box = node(loads, "div");
      boxes[name] = [
        node(box, "p", { class: "fp-title" }), node(box, "div", { class: "fp-scroll", "data-fp": name })
      ];
    });
    var list = node(node(live, "p", { class: "fp-title" }), "button", {
      type: "button", "aria-expanded": "false", class: "fp-list"
    }, "All steps as a table");
    list.addEventListener("click", function () {
      list.setAttribute("aria-expanded", String(root.classList.toggle("fp-listed")));
    });

    function drawMap(box) {
      var size = Math.max(10, Math.min(40, Math.floor(200 / Math.max(tilesI, tilesJ)))), edge = 34;
      var width = edge + tilesJ * size + 30, height = edge + tilesI * size + 2;
      var marks = { tiles: [], q: [], k: [], out: [] };
      var svg = node(box, "svg", {
        class: "fp-picture", viewBox: "0 0 " + width + " " + height, width: width, height: height, role: "img",
        "aria-label": "The tiles of S: " + tilesI + " query tiles down, " + tilesJ + " key tiles across"
      });
      var hatch = pattern(svg, "var(--part)");
      function strip(list, x, y, w, h) {
        list.push(node(svg, "rect", { class: "fp-strip", x: x, y: y, width: w, height: h, rx: 2 }));
      }
      write(svg, edge, 10, "start", "K, V tiles", true);
      write(svg, 0, edge + 11, "start", "Q", true);
      write(svg, edge + tilesJ * size + 6, edge - 6, "start", "out", true);
      for (var j = 0; j < tilesJ; j++) strip(marks.k, edge + j * size + 2, edge - 16, size - 4, 9);
      for (var i = 0; i < tilesI; i++) {
        strip(marks.q, edge - 16, edge + i * size + 2, 9, size - 4);
        strip(marks.out, edge + tilesJ * size + 8, edge + i * size + 2, 9, size - 4);
      }
      steps.forEach(function (s, index) {
        var tile = node(svg, "rect", {
          class: s.kind === "empty" ? "fp-skip" : s.kind === "full" ? "fp-full" : "fp-half", "data-step": index,
          x: edge + s.j * size + 2, y: edge + s.i * size + 2, width: size - 4, height: size - 4, rx: 2
        });
        if (s.kind === "diagonal") tile.setAttribute("style", hatch);
        node(tile, "title", {}, "step " + (index + 1) + ": queries " + range(s.rows) + ", keys " + range(s.keys) +
          ", " + data.kinds[s.kind]);
        marks.tiles.push(tile);
      });
      marks.now = node(svg, "rect", { class: "fp-now", width: size, height: size, rx: 3, "pointer-events": "none" });
      marks.place = function (s) {
        marks.now.setAttribute("x", edge + s.j * size);
        marks.now.setAttribute("y", edge + s.i * size);
      };
      svg.addEventListener("click", function (event) {
        var index = event.target.getAttribute("data-step");
        if (index !== null) go(+index);
      });
      var legend = node(box, "div", { class: "fp-legend" });
      var kinds = [["fp-full", "full"], ["fp-half", "partly masked"], ["fp-skip", "skipped"], ["fp-now", "now"]];
      kinds.forEach(function (kind) {
        if (!svg.querySelector("." + kind[0])) return;
        var entry = node(legend, "span"), key = node(entry, "svg", { width: 14, height: 14, "aria-hidden": "true" });
        var square = node(key, "rect", { class: kind[0], x: 2, y: 2, width: 10, height: 10 });
        if (kind[0] === "fp-half") square.setAttribute("style", hatch);
        entry.appendChild(document.createTextNode(kind[1]));
      });
      return marks;
    }

    function listOf(values) {
      var rest = values.length > data.columns ? ", … (" + values.length + " values)" : "";
      return values.slice(0, data.columns).join(", ") + rest;
    }

    function before(s, index, row) {
      if (s.prev !== null) return steps[s.prev].after[index][row];
      return index === 2 ? s.after[2][row].map(function () { return "0"; }) : index === 1 ? "0" : "-inf";
    }

    function noteOf(s, row) {
      var text = s.kind === "empty" ? "The state stays as it was."
        : "alpha = exp(m before − m after) = " + s.alpha[row] + " rescales what was there.";
      if (s.p) text += "\np = exp(s − m after) = " + listOf(s.p[row]) + ".";
      if (!s.last) return text;
      var q = s.rows[0] + row;
      if (data.lse[q] === "-inf") return text + "\nRow " + q + " has seen no key: out = 0, lse = -inf.";
      return text + "\nLast tile of these queries: out = acc / l = " + listOf(data.out[q]) +
        ".\nlse = m + log l = " + data.lse[q] + ".";
    }

    function show() {
      var s = steps[now], rows = s.rows[1] - s.rows[0], row = Math.min(offset, rows - 1), skipped = s.kind === "empty";
      slider.value = now;
      slider.setAttribute("aria-valuetext", "step " + (now + 1) + " of " + steps.length);
      count.textContent = "step " + (now + 1) + " of " + steps.length;
      status.textContent = "Queries " + range(s.rows) + " meet keys " + range(s.keys) + ": " + (skipped
        ? "every score is masked, so the tile is skipped and no key or value is loaded."
        : s.kind === "full" ? "a full tile, no score is masked." : "a partly masked tile, tested score by score.");
      marks.place(s);
      marks.tiles.forEach(function (tile, index) { tile.setAttribute("fill-opacity", index <= now ? 1 : 0.16); });
      marks.k.forEach(function (strip, j) {
        strip.setAttribute("class", "fp-strip" + (j === s.j && !skipped ? " fp-on" : ""));
      });
      marks.q.forEach(function (strip, i) { strip.setAttribute("class", "fp-strip" + (i === s.i ? " fp-on" : "")); });
      marks.out.forEach(function (strip, i) {
        var done = steps.some(function (t, index) { return t.i === i && t.last && index <= now; });
        strip.setAttribute("class", "fp-strip" + (done ? " fp-done" : ""));
      });
      scoreTitle.textContent = skipped ? "Score tile: skipped" : "Score tile (stronger is higher)";
      if (skipped) {
        score.textContent = "";
        node(score, "p", { class: "fp-note" }, "No key of this tile is visible to any of its queries.");
      } else {
        heat(score, s.s, shadeS, {
          wide: 42, room: 300, rows: s.rows, keys: s.keys, watch: row, pick: true,
          label: "Scores of queries " + range(s.rows) + " and keys " + range(s.keys)
        });
      }
      select.textContent = "";
      for (var r = 0; r < rows; r++) node(select, "option", { value: r }, s.rows[0] + r);
      select.value = row;
      ["m", "l", "acc"].forEach(function (name, index) {
        [before(s, index, row), s.after[index][row]].forEach(function (value, when) {
          cells[name][when].textContent = name === "acc" ? listOf(value) : value;
        });
      });
      note.textContent = noteOf(s, row);
      ["q", "k", "v"].forEach(function (name) {
        var span = name === "q" ? s.rows : s.keys, box = boxes[name], title = name.toUpperCase() + " tile";
        box[0].textContent = title + (skipped && name !== "q" ? ": not loaded" : ": rows " + range(span));
        if (skipped && name !== "q") { box[1].textContent = ""; return; }
        heat(box[1], data[name].slice(span[0], span[1]), shades[name], {
          wide: 34, room: 220, rows: span, label: title + ", rows " + range(span)
        });
      });
      bytes.textContent = "Bytes loaded and stored so far: " + s.bytes.toLocaleString("en-US") + " of " +
        total.toLocaleString("en-US");
      meter.style.width = (total ? 100 * s.bytes / total : 0) + "%";
    }

    function go(to) {
      now = Math.max(0, Math.min(steps.length - 1, to));
      if (timer !== null && now === steps.length - 1) toggle();
      show();
    }

    function toggle() {
      if (timer === null) {
        if (now === steps.length - 1) go(0);
        timer = setInterval(function () {
          // A notebook may have cleared this output while it played.
          if (!root.isConnected) { clearInterval(timer); return; }
          go(now + 1);
        }, 900);
      } else {
        clearInterval(timer);
        timer = null;
      }
      var label = timer === null ? "Play (space)" : "Pause (space)";
      play.setAttribute("aria-label", label);
      play.title = label;
      play.querySelector("path").setAttribute("d", timer === null ? ICONS.play : ICONS.pause);
      // A screen reader that is told every step would never catch up.
      status.setAttribute("aria-live", timer === null ? "polite" : "off");
    }

    root.addEventListener("keydown", function (event) {
      if (event.ctrlKey || event.altKey || event.metaKey || event.target === select) return;
      var key = event.key, done = true;
      if (key === "ArrowRight") go(now + 1);
      else if (key === "ArrowLeft") go(now - 1);
      else if (key === "Home") go(0);
      else if (key === "End") go(steps.length - 1);
      else if (key === " " && event.target.tagName !== "BUTTON") toggle();
      else done = false;
      if (done) { event.preventDefault(); event.stopPropagation(); }
    });
    show();
  }

  var me = document.currentScript && document.currentScript.closest(".flash-player");
  if (me) start(me);
})"""
