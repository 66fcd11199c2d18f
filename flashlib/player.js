// The step player. player.py writes this function into each player and calls it with the numbers of the trace, as
// texts; it hides the table of all steps and puts controls and pictures in front of it.
(function (data) {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const ICONS = {
    first: "M2 2h2v12H2zM14 2v12L5 8z", back: "M12 2v12L3 8z", next: "M4 2v12l9-6z",
    play: "M3 1v14l11-7z", pause: "M3 2h4v12H3zM9 2h4v12H9z"
  };
  const root = document.currentScript && document.currentScript.closest(".flash-player");
  if (!root) return;
  const steps = data.steps, end = steps.length - 1;
  const tilesI = 1 + Math.max(...steps.map(s => s.i)), tilesJ = 1 + Math.max(...steps.map(s => s.j));
  let now = 0, offset = data.offset, timer = null;

  // --- tools ---

  function node(parent, tag, attributes = {}, text) {
    const svg = tag === "svg" || parent.namespaceURI === SVG;
    const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return parent.appendChild(made);
  }

  function picture(box, width, height, label) {
    box.textContent = "";
    return node(box, "svg", {
      class: "fp-picture", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label
    });
  }

  function hatch(svg, colour) {
    // Several players on a page must not share an id.
    const id = "fp-hatch-" + (window.flashPlayerIds = (window.flashPlayerIds || 0) + 1);
    const made = node(node(svg, "defs"), "pattern", {
      id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"
    });
    node(made, "rect", { width: 2, height: 6, style: `fill:${colour}` });
    return `fill:url(#${id})`;
  }

  const range = ([first, stop]) => first === stop - 1 ? `${first}` : `${first} to ${stop - 1}`;

  function listOf(values) {
    const rest = values.length > data.columns ? `, … (${values.length} values)` : "";
    return values.slice(0, data.columns).join(", ") + rest;
  }

  // How strong a number is shown: 0 for the least of all, 1 for the greatest.
  function scale(rows) {
    const all = rows.flat().map(Number).filter(Number.isFinite);
    const low = Math.min(...all), high = Math.max(...all);
    return x => high > low ? (x - low) / (high - low) : 0.5;
  }
  const shades = { s: scale(steps.flatMap(s => s.s || [])), q: scale(data.q), k: scale(data.k), v: scale(data.v) };

  // --- pictures ---

  // A tile of numbers as shades, with the numbers written in where they fit. Masked scores are hatched.
  function heat(box, rows, shade, { label, first, keys, watch, wide, room }) {
    const n = rows.length, columns = rows[0].length, written = columns <= data.columns && n <= 16;
    const w = written ? wide : Math.max(3, Math.min(12, room / columns));
    const h = written ? 22 : Math.max(3, Math.min(12, 160 / n));
    const left = 26, top = keys === undefined ? 0 : 16, width = left + w * columns + 2;
    const svg = picture(box, width, top + h * n + 2, label), masked = hatch(svg, "var(--soft)");
    const write = (x, y, anchor, text, soft) =>
      node(svg, "text", { x, y, "text-anchor": anchor, class: soft ? "fp-soft" : "" }, text);
    rows.forEach((row, r) => {
      const y = top + r * h;
      row.forEach((text, c) => {
        const seen = Number.isFinite(Number(text)), x = left + c * w;
        const style = seen ? `fill-opacity:${(0.08 + 0.92 * shade(Number(text))).toFixed(3)}` : masked;
        const kind = written ? "fp-cell fp-written" : "fp-cell";
        node(node(svg, "rect", { class: kind, x, y, width: w, height: h, style }), "title", {}, text);
        if (written && seen) write(x + w / 2, y + h / 2 + 4, "middle", text);
      });
      if (written || r === 0 || r === n - 1) write(left - 5, y + h / 2 + 4, "end", first + r, true);
      if (watch !== undefined) node(svg, "rect", { "data-row": r, x: 0, y, width, height: h, fill: "transparent" });
    });
    if (keys !== undefined) {
      rows[0].forEach((_, c) => {
        if (written || c === 0 || c === columns - 1) write(left + c * w + w / 2, 11, "middle", keys + c, true);
      });
    }
    if (watch !== undefined) {
      node(svg, "rect", { class: "fp-now", x: left, y: top + watch * h, width: w * columns, height: h, rx: 2 });
    }
  }

  // All tiles of S, with a strip for each tile of Q, of K and V, and of out. Returns what show() changes.
  function drawMap(box) {
    const size = Math.max(10, Math.min(40, Math.floor(200 / Math.max(tilesI, tilesJ)))), edge = 34;
    const right = edge + tilesJ * size, inner = size - 4;
    const svg = picture(node(box, "div"), right + 30, edge + tilesI * size + 2,
      `The tiles of S: ${tilesI} query tiles down, ${tilesJ} key tiles across`);
    const partly = hatch(svg, "var(--part)");
    const strip = (x, y, width, height) => node(svg, "rect", { class: "fp-strip", x, y, width, height, rx: 2 });
    node(svg, "text", { x: edge, y: 10, class: "fp-soft" }, "K, V tiles");
    node(svg, "text", { x: 0, y: edge + 11, class: "fp-soft" }, "Q");
    node(svg, "text", { x: right + 6, y: edge - 6, class: "fp-soft" }, "out");
    const across = Array.from({ length: tilesJ }, (_, j) => edge + j * size);
    const down = Array.from({ length: tilesI }, (_, i) => edge + i * size);
    const map = {
      k: across.map(x => strip(x + 2, edge - 16, inner, 9)),
      q: down.map(y => strip(edge - 16, y + 2, 9, inner)),
      out: down.map(y => strip(right + 8, y + 2, 9, inner)),
      tiles: steps.map((s, index) => {
        const tile = node(svg, "rect", {
          class: "fp-" + s.kind, "data-step": index, style: s.kind === "diagonal" ? partly : "",
          x: across[s.j] + 2, y: down[s.i] + 2, width: inner, height: inner, rx: 2
        });
        node(tile, "title", {},
          `step ${index + 1}: queries ${range(s.rows)}, keys ${range(s.keys)}, ${data.kinds[s.kind]}`);
        return tile;
      }),
      now: node(svg, "rect", { class: "fp-now", width: size, height: size, rx: 3 }),
      place(s) { map.now.setAttribute("x", across[s.j]); map.now.setAttribute("y", down[s.i]); }
    };
    svg.addEventListener("click", event => {
      if (event.target.hasAttribute("data-step")) go(Number(event.target.getAttribute("data-step")));
    });
    const legend = node(box, "div", { class: "fp-legend" });
    for (const [kind, name] of [...Object.entries(data.kinds), ["now", "now"]]) {
      if (kind !== "now" && !steps.some(s => s.kind === kind)) continue;
      const entry = node(legend, "span"), key = node(entry, "svg", { width: 14, height: 14, "aria-hidden": "true" });
      const style = kind === "diagonal" ? partly : "";
      node(key, "rect", { class: "fp-" + kind, x: 2, y: 2, width: 10, height: 10, style });
      entry.append(name);
    }
    return map;
  }

  // --- the parts, from top to bottom ---

  root.classList.add("fp-moving");
  root.tabIndex = 0;
  // JupyterLab would take the arrow keys for its own cells.
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  const live = document.createElement("div");
  root.prepend(live);

  const bar = node(live, "div", { class: "fp-bar" });
  function button(name, label, act) {
    const made = node(bar, "button", { type: "button", class: `fp-${name}`, "aria-label": label, title: label });
    node(node(made, "svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }), "path", { d: ICONS[name] });
    made.addEventListener("click", act);
    return made;
  }
  button("first", "First step (Home)", () => go(0));
  button("back", "Step back (left arrow)", () => go(now - 1));
  const play = button("play", "Play (space)", toggle);
  button("next", "Step forward (right arrow)", () => go(now + 1));
  const slider = node(bar, "input", { type: "range", min: 0, max: end, step: 1, value: 0, "aria-label": "Step" });
  slider.addEventListener("input", () => go(Number(slider.value)));
  const count = node(bar, "span", { class: "fp-count", "data-fp": "count" });
  const status = node(live, "p", { class: "fp-status", role: "status", "aria-live": "polite", "data-fp": "status" });

  const columns = node(live, "div", { class: "fp-columns" }), left = node(columns, "div"), right = node(columns, "div");
  node(left, "p", { class: "fp-title" }, "All tiles of S");
  const map = drawMap(left);
  const bytes = node(left, "p", { class: "fp-title", "data-fp": "bytes" });
  const meter = node(node(left, "div", { class: "fp-meter", "aria-hidden": "true" }), "div");

  const scoreTitle = node(right, "p", { class: "fp-title" });
  const score = node(right, "div", { class: "fp-scroll", "data-fp": "score" });
  const watch = row => { offset = row; show(); };
  score.addEventListener("click", event => {
    if (event.target.hasAttribute("data-row")) watch(Number(event.target.getAttribute("data-row")));
  });
  const label = node(node(right, "p", { class: "fp-title" }), "label", {}, "State of row ");
  const select = node(label, "select", { "aria-label": "State of row" });
  select.addEventListener("change", () => watch(Number(select.value)));
  const table = node(node(right, "div", { class: "fp-scroll" }), "table", { class: "fp-state" });
  const head = node(node(table, "thead"), "tr"), body = node(table, "tbody");
  for (const text of ["", "before", "after this tile"]) node(head, "th", { scope: "col" }, text);
  const state = ["m", "l", "acc"].map(name => {
    const line = node(body, "tr");
    node(line, "th", { scope: "row" }, name);
    return [node(line, "td"), node(line, "td", { "data-fp": name })];
  });
  const note = node(right, "p", { class: "fp-note", "data-fp": "note" });

  const loads = node(live, "div", { class: "fp-three" });
  const inputs = ["q", "k", "v"].map(name => {
    const box = node(loads, "div");
    return [name, node(box, "p", { class: "fp-title" }), node(box, "div", { class: "fp-scroll" })];
  });
  const list = node(live, "button", { class: "fp-list", type: "button", "aria-expanded": false });
  list.textContent = "All steps as a table";
  list.addEventListener("click", () => list.setAttribute("aria-expanded", root.classList.toggle("fp-listed")));

  // --- what one step shows ---

  function noteOf(s, row) {
    const q = s.rows[0] + row, lines = [];
    if (s.kind === "empty") lines.push("The state stays as it was.");
    else if (s.after[0][row] === "-inf") lines.push(`All scores of row ${q} are masked: its state stays as it was.`);
    else {
      lines.push(`alpha = exp(m before − m after) = ${s.alpha[row]} rescales what was there.`);
      if (s.p) lines.push(`p = exp(s − m after) = ${listOf(s.p[row])}.`);
    }
    if (s.last && data.lse[q] === "-inf") lines.push(`Row ${q} has seen no key: out = 0, lse = -inf.`);
    else if (s.last) {
      lines.push(`Last tile of these queries: out = acc / l = ${listOf(data.out[q])}.`);
      lines.push(`lse = m + log l = ${data.lse[q]}.`);
    }
    return lines.join("\n");
  }

  function show() {
    const s = steps[now], skipped = s.kind === "empty";
    const rows = s.rows[1] - s.rows[0], row = Math.min(offset, rows - 1), place = `step ${now + 1} of ${steps.length}`;
    slider.value = now;
    slider.setAttribute("aria-valuetext", place);
    count.textContent = place;
    status.textContent = `Queries ${range(s.rows)} meet keys ${range(s.keys)}: ` + {
      empty: "every score is masked, so the tile is skipped and no key or value is loaded.",
      full: "a full tile, no score is masked.",
      diagonal: "a partly masked tile, tested score by score."
    }[s.kind];

    map.place(s);
    map.tiles.forEach((tile, index) => tile.setAttribute("fill-opacity", index <= now ? 1 : 0.16));
    map.k.forEach((strip, j) => strip.classList.toggle("fp-on", j === s.j && !skipped));
    map.q.forEach((strip, i) => strip.classList.toggle("fp-on", i === s.i));
    steps.forEach((t, index) => { if (t.last) map.out[t.i].classList.toggle("fp-done", index <= now); });
    bytes.textContent = "Bytes loaded and stored so far: " +
      [s.bytes, steps[end].bytes].map(x => x.toLocaleString("en-US")).join(" of ");
    meter.style.width = `${100 * s.bytes / steps[end].bytes}%`;

    scoreTitle.textContent = skipped ? "Score tile: skipped" : "Score tile (stronger is higher)";
    if (skipped) score.replaceChildren();
    else heat(score, s.s, shades.s, {
      label: `Scores of queries ${range(s.rows)} and keys ${range(s.keys)}`,
      first: s.rows[0], keys: s.keys[0], watch: row, wide: 42, room: 300
    });
    select.replaceChildren();
    for (let r = 0; r < rows; r++) node(select, "option", { value: r }, s.rows[0] + r);
    select.value = row;
    const empty = ["-inf", "0", s.after[2][row].map(() => "0")];
    const before = s.prev === null ? empty : steps[s.prev].after.map(part => part[row]);
    state.forEach((cells, part) => {
      [before[part], s.after[part][row]].forEach((value, when) => {
        cells[when].textContent = Array.isArray(value) ? listOf(value) : value;
      });
    });
    note.textContent = noteOf(s, row);

    for (const [name, title, box] of inputs) {
      const span = name === "q" ? s.rows : s.keys, loaded = name === "q" || !skipped;
      title.textContent = `${name.toUpperCase()} tile: ` + (loaded ? `rows ${range(span)}` : "not loaded");
      if (!loaded) box.replaceChildren();
      else heat(box, data[name].slice(...span), shades[name], {
        label: title.textContent, first: span[0], wide: 34, room: 220
      });
    }
  }

  // --- moving ---

  function go(to) {
    now = Math.max(0, Math.min(end, to));
    if (timer !== null && now === end) toggle();
    show();
  }

  function toggle() {
    if (timer !== null) {
      clearInterval(timer);
      timer = null;
    } else {
      if (now === end) go(0);
      // A notebook may clear this output while it plays.
      timer = setInterval(() => root.isConnected ? go(now + 1) : clearInterval(timer), 900);
    }
    const playing = timer !== null;
    play.title = playing ? "Pause (space)" : "Play (space)";
    play.setAttribute("aria-label", play.title);
    play.querySelector("path").setAttribute("d", playing ? ICONS.pause : ICONS.play);
    // A screen reader that is told every step would never catch up.
    status.setAttribute("aria-live", playing ? "off" : "polite");
  }

  root.addEventListener("keydown", event => {
    // The list of rows and the wide table need their own arrow keys.
    if (event.ctrlKey || event.altKey || event.metaKey || event.target === select) return;
    if (event.target.closest(".fp-static") || (event.key === " " && event.target.tagName === "BUTTON")) return;
    const act = {
      ArrowRight: () => go(now + 1), ArrowLeft: () => go(now - 1), Home: () => go(0), End: () => go(end), " ": toggle
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    event.stopPropagation();
  });
  show();
})
