// The program beside the grid of heads, what is known of each, and the head at hand: its pattern and its temperature.

function buildProgram() {
  const place = byId("program");
  scene.lines.forEach(({ text, units }, number) => {
    if (units.length) {
      const line = make("button", { type: "button", className: `line ${colourOf(scene.units[units[0]])}`,
        textContent: text });
      line.dataset.units = units.join(" ");
      wire(line, units);
      place.append(line);
    } else if (number === 0 && !tokenProgram) {
      place.append(make("div", { className: "line source" }, ...terms(text)));
    } else place.append(make("div", { className: "line", textContent: text || " " }));
  });
  if (scene.lines.some(({ text }) => /%\d/.test(text))) place.append(make("p", { className: "quiet",
    textContent: `A name such as %5 is the value of the line that begins with it${scene.lines.some(({ text }) =>
      /%\d.* # /.test(text)) ? "; after # stands the same value in full" : ""}.` }));
}
// A formula with the parts that heads compute as buttons, one within another.
function terms(text) {
  const kept = [...text].map((letter, i) => [letter, i]).filter(([letter]) => letter !== " ");
  const bare = kept.map(([letter]) => letter).join(""), spans = [];
  scene.units.forEach((unit, u) => {
    const label = unit.label.replace(/ /g, ""), at = bare.indexOf(label);
    if (at >= 0 && label.length > 1) spans.push({ from: kept[at][1], to: kept[at + label.length - 1][1] + 1, u });
  });
  spans.sort((a, b) => a.from - b.from || b.to - a.to);
  const build = (from, to, inside) => {
    const parts = [];
    let at = from;
    while (inside.length) {
      const span = inside.shift();
      if (span.from < at || span.to > to) continue; // overlaps one that is drawn already
      const within = inside.filter((s) => s.from >= span.from && s.to <= span.to);
      inside = inside.filter((s) => !within.includes(s));
      parts.push(text.slice(at, span.from));
      // Buttons stand in no buttons: the first letters that are the term's own are the one for keys and readers.
      const inner = build(span.from, span.to, within), own = inner.findIndex((part) => part && typeof part === "string");
      const named = make("span", { tabIndex: 0, className: "named", textContent: inner[own] ?? "" });
      named.setAttribute("role", "button");
      named.setAttribute("aria-label", scene.units[span.u].label);
      if (own >= 0) inner[own] = named;
      const term = make("span", { className: `term ${colourOf(scene.units[span.u])}` }, ...inner);
      term.dataset.units = span.u;
      wire(term, [span.u], named);
      parts.push(term);
      at = span.to;
    }
    return [...parts, text.slice(at, to)];
  };
  return build(0, text.length, spans);
}
function wire(node, units, keyed = node) {
  const [unit] = units, over = (event) => { event.stopPropagation(); light(units); }, away = () => light([]);
  node.addEventListener("mouseover", over);
  keyed.addEventListener("focus", over);
  node.addEventListener("mouseleave", away);
  keyed.addEventListener("blur", away);
  const pick = (event) => { event.stopPropagation(); choose(unit); };
  node.addEventListener("click", pick);
  keyed.addEventListener("keydown", (event) => {
    if (event.key === "a" || event.key === "Delete") { event.preventDefault(); toggle(unit); }
    else if ((event.key === "Enter" || event.key === " ") && keyed.getAttribute("role") === "button") {
      event.preventDefault();
      pick(event);
    }
  });
}
function buildGrid() {
  const place = byId("grid"), list = make("div", { className: "layers" });
  layerNumbers.forEach((layer, i) => {
    const column = make("div", { className: "layer" }, make("h3", { textContent: `Layer ${i + 1}` }));
    const units = scene.units.map((unit, u) => [unit, u]).filter(([unit]) => unit.layer === layer);
    const draw = (some) => some.forEach(([unit, u]) => {
      const pick = make("button", { type: "button", className: "pick", id: `unit${u}` },
        make("span", { className: "label", textContent: unit.label }),
        make("span", { className: "kind",
          textContent: `${unit.family} · ${unit.heads.length} head${unit.heads.length > 1 ? "s" : ""}` }));
      wire(pick, [u]);
      const power = make("button", { type: "button", className: "power", id: `power${u}`, onclick: () => toggle(u) },
        svg("svg", { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" }, svg("path", { d: POWER })));
      power.setAttribute("aria-label", `switch ${unit.label} off`);
      const box = make("div", { className: `unit ${colourOf(unit)}` }, pick, power);
      box.dataset.units = u;
      column.append(box);
    });
    draw(units.slice(0, 16));
    if (units.length > 16) {
      const more = make("button", { type: "button", textContent: `and ${units.length - 16} more`,
        onclick: () => { more.remove(); draw(units.slice(16)); drawGrid(); } });
      column.append(more);
    }
    list.append(column);
  });
  place.append(scene.units.length ? list : make("p", { className: "quiet",
    textContent: "This network has no heads: it is an affine map." }));
}
const isOff = (unit) => headNames(unit).every((name) => now.off.has(name));
function drawGrid() {
  for (const node of document.querySelectorAll("[data-units]")) {
    const units = node.dataset.units.split(" ").map(Number);
    node.classList.toggle("lit", units.some((unit) => now.over.includes(unit)));
    if (node.classList.contains("unit")) {
      const off = isOff(units[0]);
      node.classList.toggle("chosen", units[0] === now.unit);
      node.classList.toggle("off", off);
      node.firstElementChild.setAttribute("aria-pressed", units[0] === now.unit);
      node.lastElementChild.setAttribute("aria-pressed", off);
    }
  }
}
function light(units) { now.over = units; drawGrid(); drawFacts(); }
function choose(unit) { now.unit = unit; now.head = -1;
  now.query = Math.min(now.query, (tokenProgram ? now.point.length : scene.tokens) - 1); update(); sweep(); }
function toggle(unit, head = -1) {
  const names = headNames(unit, head), off = names.every((name) => now.off.has(name));
  names.forEach((name) => (off ? now.off.delete(name) : now.off.add(name)));
  now.unit = unit;
  update();
  sweep();
}
const columnsBefore = (layer) => (layer ? scene.layers[layer - 1].names : scene.columns);
function readsAndWrites(unit) {
  if (!carried) return [];
  const { layer, heads } = scene.units[unit], before = columnsBefore(layer), after = scene.layers[layer].names;
  const reads = new Set(), writes = new Set();
  for (const [g, h] of heads) {
    const group = network.layers[layer].groups[g];
    for (const name of ["W_Q", "W_K", "W_V"]) for (const row of group[name]?.[h].row ?? []) reads.add(before[row]);
    const out = group.W_O[h];
    for (let c = 0; c < out.columns; c += 1) if (out.from[c + 1] > out.from[c]) writes.add(after[c]);
  }
  const list = (set) => { const all = [...set]; return all.length > 12
    ? `${all.slice(0, 12).join(", ")} and ${all.length - 12} more` : all.join(", ") || "constants"; };
  return [["reads", list(reads)], ["writes", list(writes)]];
}
let told = ""; // what the facts are about: drawing them again would take a button from under a finger
function drawFacts() {
  const place = byId("facts"), at = now.over[0] ?? now.unit;
  if (!scene.units.length) { place.hidden = true; return; }
  const which = at === now.unit ? Math.max(now.head, 0) : 0;
  if (`${at} ${which}` === told) return;
  told = `${at} ${which}`;
  const unit = scene.units[at], [g] = unit.heads[0];
  const group = scene.layers[unit.layer].groups[g];
  const sees = { memory: "memory slots", self: "its own token and memory slots", tokens: group.causal
    ? "tokens up to its own" : "all tokens" }[group.scope];
  const list = make("dl", { className: "facts" });
  const add = (name, ...value) => list.append(make("dt", { textContent: name }), make("dd", {}, ...value));
  add("family", `${unit.family}, ${unit.heads.length} head${unit.heads.length > 1 ? "s" : ""}, layer ${layerNumbers.indexOf(unit.layer) + 1}`);
  if (!unit.facts.some(([name]) => name === "sees")) add("sees",
    `${sees}${group.slots ? `, ${group.slots} slot${group.slots > 1 ? "s" : ""}` : ""}`);
  for (const [name, value] of [...unit.facts, ...readsAndWrites(at)]) add(name, plainly(value));
  const hooks = unit.hooks.filter(Boolean);
  if (unit.hooks[which]) {
    const name = unit.hooks[which], copy = make("button",
      { type: "button", className: "copy", id: "copy", textContent: "copy", onclick: () => copyText(name, copy) });
    add("TransformerLens", make("code", { textContent: name }), copy, hooks.length > 1
      ? make("span", { className: "quiet", textContent: ` and ${hooks.length - 1} more` }) : "");
  }
  place.replaceChildren(make("h3", { textContent: unit.label }), list);
}
async function copyText(text, button) {
  try { await navigator.clipboard.writeText(text);
    } catch { // a page opened from a file may not be let at the clipboard
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

// ---- the head at hand: its pattern, its switch, its temperature

// A head whose query is affine in one number z, a column or a combination of columns: every constant slot's logit is a
// line in z, and the slot's place is where its line is on top, between those of its neighbours.
function slotLines(layer, g, h) {
  const group = network.layers[layer].groups[g], W = group.W_Q[h];
  if (group.scope === "tokens" || (group.scope === "self" && group.W_K) || !W.row.length) return null;
  const rows = new Map();
  for (let k = 0; k < group.keys; k += 1) {
    for (let e = W.from[k]; e < W.from[k + 1]; e += 1) {
      if (!rows.has(W.row[e])) rows.set(W.row[e], new Float64Array(group.keys));
      rows.get(W.row[e])[k] = W.value[e];
    }
  }
  const [q] = rows.values(), lead = q.findIndex((v) => v !== 0), mix = new Map();
  for (const [column, row] of rows) {
    const ratio = row[lead] / q[lead];
    if (row.some((v, k) => Math.abs(v - ratio * q[k]) > 1e-5 * Math.abs(ratio * q[lead]))) return null;
      // of higher rank
    mix.set(column, ratio);
  }
  const b = (k) => (group.b_Q ? group.b_Q[h].data[group.b_Q[h].at + k] : 0);
  const keys = [], K = group.M_K?.[h];
  if (group.scope === "self") keys.push((k) => group.b_K[h].data[group.b_K[h].at + k]);
  for (let m = 0; m < group.slots; m += 1) keys.push((k) => K.data[K.at + m * group.keys + k]);
  const lines = keys.map((key, slot) => {
    let slope = 0, at = 0;
    for (let k = 0; k < group.keys; k += 1) { slope += q[k] * key(k); at += b(k) * key(k); }
    return { slot, slope, at };
  }).sort((a, c) => a.slope - c.slope);
  if (lines.length < 2 || lines.some((line, i) => i && line.slope === lines[i - 1].slope)) return null;
  const cross = lines.slice(1).map((line, i) => (lines[i].at - line.at) / (line.slope - lines[i].slope));
  if (cross.some((c, i) => !Number.isFinite(c) || (i && c < cross[i - 1]))) return null;
  const gap = cross.length > 1 ? (last(cross) - cross[0]) / (cross.length - 1) : 1;
  return { mix, lines, places: lines.map((_,
    i) => ((cross[i - 1] ?? cross[0] - gap) + (cross[i] ?? last(cross) + gap)) / 2) };
}
function drawPattern(watched) {
  const place = byId("pattern");
  if (!scene.units.length) { place.replaceChildren(); return; }
  const unit = scene.units[now.unit], [g, h] = unit.heads[Math.max(now.head, 0)], { layer } = unit;
  const group = scene.layers[layer].groups[g], rows = watched.weights.length, first = scene.registers;
  byId("pattern-title").textContent = `Attention: ${unit.label}`;
  const label = (r) => (r < first ? `r${r}` : tokenProgram
    ? (r - first < now.point.length ? plainValue(words[now.point[r - first]]) : "·") : `${r - first}`);
  const query = first + now.query, parts = [];
  if (rows - first > 1) {
    const pick = make("select", { id: "query", onchange: () => { now.query = pick.selectedIndex; update(); } },
      ...Array.from({ length: rows - first }, (_, t) => make("option",
        { textContent: `${t}: ${label(first + t)}`, selected: t === now.query })));
    parts.push(make("div", { className: "row" }, make("label", {}, "seen from token", pick)));
  }
  const row = watched.weights[Math.min(query, rows - 1)];
  if (group.scope === "tokens") parts.push(matrix(watched, rows, label, group), peak(row, rows, label));
  else {
    const known = slotLines(layer, g, h);
    if (known && row.length > 2) {
      const from = Math.min(query, rows - 1) * watched.columns, names = columnsBefore(layer), mixed = [...known.mix];
      const z = mixed.reduce((sum, [c, ratio]) => sum + ratio * watched.state[from + c], 0);
      const name = mixed.map(([c, ratio]) => (ratio === 1 ? names[c]
        : `${show(ratio, 3)} ${names[c]}`)).join(" + ").replace(/\+ -/g, "− ");
      parts.push(numberLine(known, row, z, name.length > 60 ? "its argument" : name));
    }
    else parts.push(bars(row, group));
  }
  const held = document.activeElement?.id;
  place.replaceChildren(...parts);
  if (held === "query") byId("query")?.focus();
}
function peak(row, rows, label) {
  let best = 0;
  row.forEach((w, j) => { if (w > row[best]) best = j; });
  return make("p", { className: "small", id: "pattern-note",
    textContent: `Largest weight: ${show(row[best], 4)} on ${best >= rows ? `memory slot ${best - rows}` : best < scene.registers ? `register ${best}` : `token ${best - scene.registers} (${label(best)})`}.` });
}
function matrix(watched, rows, label, group) {
  const count = Math.min(rows, ROWS), keys = Math.min(rows + group.slots, ROWS),
    name = (j) => (j < rows ? label(j) : `m${j - rows}`);
  const table = make("table", { className: "cells", id: "matrix" }),
    signs = [group.slots ? "m: memory slots" : "", scene.registers ? "r: registers" : ""].filter(Boolean);
  const caption = make("p",
    { className: "small", textContent: `Rows look at columns${signs.length ? `; ${signs.join(", ")}` : ""}.` });
  table.setAttribute("aria-label", "attention weights");
  table.append(make("thead", {}, make("tr", {}, make("th", { scope: "col", textContent: "row" }),
    ...Array.from({ length: keys }, (_, j) => make("th", { scope: "col", textContent: name(j) })))));
  // A head that counts gives its tokens tiny weights, and it is their sum that matters: then shades are logarithms.
  const largest = Math.max(...watched.weights.slice(0, count).map((row) => Math.max(0, ...row.slice(0, rows)))),
    fine = largest > 0 && largest < 0.05;
  const depth = (w) => (!fine ? w : w > 0 ? Math.min(1, Math.max(0.1, 0.6 + Math.log10(w / largest) / 10)) : 0);
  if (fine) caption.textContent += ` Shades are logarithms: the largest weight of a token is ${show(largest, 2)}.`;
  const body = make("tbody"),
    note = (i, j, w) => { byId("pattern-note").textContent = `Row ${i} (${name(i)}) gives column ${j} (${name(j)}) the weight ${show(w, 5)}.`;
    };
  for (let i = 0; i < count; i += 1) {
    const line = make("tr", { className: i === scene.registers + now.query ? "here" : "" },
      make("th", { scope: "row", textContent: name(i) }));
    for (let j = 0; j < keys; j += 1) {
      const w = watched.weights[i][j];
      const cell = make("td", { className: deepness(depth(w)), textContent: w > 0.995 ? "1" : w >= 0.05
        ? w.toFixed(1).replace("0.", ".") : "", style: `--w: ${depth(w).toFixed(3)}`, title: show(w, 5),
        onmouseenter: () => note(i, j, w) });
      line.append(cell);
    }
    body.append(line);
  }
  table.append(body);
  const cut = rows > ROWS || rows + group.slots > ROWS;
  return make("div", {}, caption, scroller("attention weights", table), cut
    ? make("p", { className: "quiet",
    textContent: `The first ${count} rows and ${keys} columns of ${rows} by ${rows + group.slots}.` }) : "");
}
function numberLine({ lines, places }, row, z, name) {
  const inside = places.filter(Number.isFinite), lo = Math.min(...inside, z), hi = Math.max(...inside, z),
    pad = 0.04 * (hi - lo || 1);
  const text = `Weights of ${lines.length} slots along ${name}, which is ${show(z, 5)}`;
  const chart = panel({
    width: widthOf("pattern"), height: 220, x: [lo - pad, hi + pad], y: [0, 1], label: text, xName: name,
      yName: "weight",
    draw: (sx, sy, frame) => [
      ...lines.map(({ slot }, i) => { const g = svg("g");
        g.append(svg("title", {}, `slot ${slot} at ${show(places[i], 5)}: ${show(row[slot], 5)}`));
        g.append(svg("line", { x1: sx(places[i]), x2: sx(places[i]), y1: sy(0), y2: sy(row[slot]), stroke: "var(--net)",
        "stroke-width": 3, "stroke-linecap": "round" }),
        svg("circle", { cx: sx(places[i]), cy: sy(row[slot]), r: 4, fill: "var(--net)" })); return g; }),
      upright(z, sx, frame, "var(--goal)"), svg("path",
        { d: `M${sx(z) - 6} ${frame.top - 5}h12l-6 9z`, fill: "var(--goal)" }),
    ],
  });
  return make("div", {}, chart, make("p", { className: "small", id: "pattern-note",
    textContent: `${text}; the largest weight is ${show(Math.max(...row), 4)}.` }));
}
function bars(row, group) {
  const name = (j) => (group.scope === "self" ? (j ? `slot ${j - 1}` : "own token") : `slot ${j}`),
    places = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, BARS).sort((a, b) => a - b), // the largest of many
    some = places.map((j) => row[j]);
  const height = 22 * some.length + 12, wide = widthOf("pattern"), full = wide - 160;
  const chart = svg("svg", { viewBox: `0 0 ${wide} ${height}`, class: "chart", role: "img",
    "aria-label": some.map((w, i) => `${name(places[i])} ${show(w, 3)}`).join(", ") });
  some.forEach((w, j) => chart.append(svg("text", { x: 78, y: 22 * j + 17, "text-anchor": "end" }, name(places[j])),
    svg("rect", { x: 86, y: 22 * j + 5, width: full, height: 14, rx: 4, fill: "var(--sunken)" }),
    svg("rect", { x: 86, y: 22 * j + 5, width: full * w, height: 14, rx: 4, fill: "var(--net)" }),
      svg("text", { x: 94 + full, y: 22 * j + 17 }, show(w, 4))));
  return make("div", {}, chart, make("p", { className: "small", id: "pattern-note", textContent: row.length > BARS
    ? `The ${BARS} largest of ${row.length} weights.` : `${row.length} slots.` }));
}

const heatText = (v) => (v === 0 ? "as built"
  : `logits × ${show(2 ** v, 3)}: ${show(2 ** Math.abs(v), 3)} times ${v < 0 ? "warmer" : "colder"}`);
function buildChange() {
  const place = byId("change");
  if (!scene.units.length) { place.append(make("p", { className: "quiet",
    textContent: "There is no head to change." })); return; }
  const slide = make("input", { type: "range", id: "heat", min: -6, max: 4, step: 0.25, value: 0 });
  slide.addEventListener("input", () => {
    const v = Number(slide.value);
    chosen().forEach((name) => (v === 0 ? now.heat.delete(name) : now.heat.set(name, network.round(2 ** v))));
    slide.setAttribute("aria-valuetext", heatText(v));
    update();
  });
  place.append(
    make("div", { className: "row" }, make("label", {}, "heads",
      make("select", { id: "head", onchange: (event) => { now.head = event.target.selectedIndex - 1; update(); sweep();
      } })),
      make("button", { type: "button", id: "ablate", onclick: () => toggle(now.unit, now.head) }),
      make("button", { type: "button", id: "mend", textContent: "Everything as built",
        onclick: () => { now.off.clear(); now.heat.clear(); update(); sweep(); } })),
    make("label", { htmlFor: "heat", className: "small", textContent: "Temperature, warm to cold" }), slide,
    make("p", { className: "small", id: "heat-text" }), make("div", { id: "sweep" }));
}
function drawChange() {
  if (!scene.units.length) return;
  const { heads } = scene.units[now.unit], pick = byId("head");
  pick.parentNode.hidden = heads.length === 1;
  pick.replaceChildren(make("option", { textContent: `all ${heads.length}` }),
    ...(heads.length > 1 ? heads.slice(0, 64).map((_, i) => make("option", { textContent: `head ${i + 1}` })) : []));
  pick.selectedIndex = now.head + 1;
  const off = chosen().every((name) => now.off.has(name)), factor = now.heat.get(chosen()[0]) ?? 1,
    v = Math.log2(factor);
  byId("ablate").textContent = off ? "Switch on again" : "Switch off";
  byId("ablate").setAttribute("aria-pressed", off);
  allow("mend", changed(), "ablate");
  byId("heat").value = v;
  follow();
  byId("heat-text").textContent = heatText(v);
}
// Where the temperature is on the drawing of the sweep, which stays as it is while the slider moves.
let follow = () => {};
function here(sx, frame) {
  const mark = svg("path", { fill: "var(--net)", id: "heat-mark" });
  follow = () => mark.setAttribute("d", `M${sx(Number(byId("heat").value)) - 6} ${frame.bottom}l6 -9l6 9z`);
  follow();
  return mark;
}
// The largest error over some points at each temperature of the head at hand.
function sweep() {
  const place = byId("sweep");
  if (!scene.units.length || !goal || network.cost > RUNS) return;
  if (network.cost > SWEEPS) { place.replaceChildren(tooSlow()); return; }
  const names = chosen(), count = Math.max(3, Math.min(SWEPT, Math.floor(WORK / network.cost / 41))), gen = random(7);
  const points = Array.from({ length: count }, () => (tokenProgram ? somewhere()
    : fitted(scene.inputs.map(({ lo, hi }, i) => rounded(i, lo + gen() * (hi - lo))), gen)));
  function* work() {
    const xs = [], ys = [];
    for (let v = -6; v <= 4; v += 0.25) {
      let worst = 0;
      for (const point of points) {
        const heat = new Map(now.heat);
        names.forEach((name) => heat.set(name, network.round(2 ** v)));
        const { error } = compare(point, { off: now.off, heat });
        worst = Math.max(worst, Number.isNaN(error) ? Infinity : error);
        yield;
      }
      xs.push(v);
      ys.push(worst);
    }
    return [xs, ys];
  }
  job("sweep", work(), ([xs, ys]) => {
    const wrong = outputs !== null, least = wrong ? 0
      : Math.floor(Math.log10(Math.max(Math.min(...ys.filter((y) => y > 0), scene.bound || Infinity), 1e-18)));
    const height = (y) => (wrong ? y : Math.log10(Math.max(y, 10 ** least)));
    const top = wrong ? Math.max(1, ...ys) : Math.ceil(Math.max(...ys.filter(Number.isFinite).map(height), scene.bound
      ? height(scene.bound) : -Infinity) + 0.2);
    const label = `The largest ${wrong ? "number of wrong positions" : "error"} over ${count} ${tokenProgram ? "sequences" : "points"}, from warm to cold`;
    const chart = panel({ width: widthOf("change"), height: 210, x: [-6, 4], y: [least, top], log: !wrong, label,
      xName: "warmer   ←   log2 of the factor   →   colder", yName: wrong ? "wrong" : "error",
      draw: (sx, sy, frame) => [
        ...(scene.bound && !wrong ? [svg("rect", { x: frame.left, width: frame.right - frame.left, y: sy(height(scene.bound)),
          height: Math.max(0, frame.bottom - sy(height(scene.bound))), fill: "var(--band)" })] : []),
        curve(xs, ys.map(height), sx, sy, "var(--miss)"), upright(0, sx, frame),
        here(sx, frame)] });
    place.replaceChildren(chart, make("p", { className: "quiet",
      textContent: `${label}${scene.bound && !wrong ? "; the band is the certified bound" : ""}.` }));
  });
}
