// The page: what the reader does changes `now`, and everything is drawn again from it.

const byId = (id) => document.getElementById(id);
const scene = JSON.parse(byId("scene").textContent);

// Limits, in multiplications of one pass (a browser does about 1e8 a second) and in points.
const FOLLOWS = 2e6;      // below this the page follows a slider as it moves
const RUNS = 5e7;         // up to this it runs when a slider comes to rest; beyond it does not run
const WORK = 4e9;         // of one hunt or one drawing: half a minute, in slices that leave the page alive
const SLICE = 12;         // milliseconds of such work at a time
const HUNTED = 4000;      // points of a hunt
const DRAWN = 161, MAPPED = 41, SWEPT = 24; // points of a curve, of a side of a map, and at each temperature of a sweep
const ROWS = 40, COLUMNS = 48;  // of a matrix of weights, or of the stream, that are shown

// Weights that are too many are not in the page: there is nothing to run, and the structure is shown.
const carried = scene.numbers <= scene.mostNumbers;
const network = carried ? makeNetwork(scene) : { layers: [], round: (x) => x, cost: Infinity };
const tokenProgram = scene.vocabulary !== null;
const goal = scene.target && (tokenProgram ? makeTokenProgram(scene.target) : makeProgram(scene.target));
const words = scene.vocabulary?.map(readValue) ?? [];
const outputs = scene.target?.outputs?.map(readValue) ?? null;
// Where the page begins: somewhere inside, no two numbers alike, and short enough to read.
const middle = scene.inputs.map(({ lo, hi }, i) => network.round(Math.min(Math.max(Number((lo + ((0.37 + 0.618 * i) % 1) * (hi - lo)).toPrecision(3)), lo), hi)));
const placeOf = new Map(words.map((word, i) => [showValue(word), i]));
const families = [...new Set(scene.units.map((unit) => unit.family))];
const colourOf = (unit) => `f${families.indexOf(unit.family) % 6}`;
const layerNumbers = [...new Set(scene.units.map((unit) => unit.layer))];

const now = {
  point: tokenProgram ? scene.sequence.map((t) => placeOf.get(showValue(readValue(t)))) : middle,
  off: new Set(), heat: new Map(), unit: 0, head: -1, over: [], query: 0, after: 1 + scene.layers.findLastIndex((layer) => layer.groups.length > 0),
  worst: null, x: 0, y: -1, drawn: 0,
};
const shownDigits = scene.dtype === "float32" ? 7 : 12;
const headNames = (unit, head = -1) => scene.units[unit].heads
  .filter((_, i) => head < 0 || i === head).map(([g, h]) => `${scene.units[unit].layer}.${g}.${h}`);
const chosen = () => (scene.units.length ? headNames(now.unit, now.head) : []);
const changed = () => now.off.size > 0 || now.heat.size > 0;
const change = () => ({ off: now.off, heat: now.heat });

// ---- network and target at a point

function decoded(point, found) {
  return point.map((_, t) => {
    const row = found.output.subarray(t * found.columns, (t + 1) * found.columns);
    if (!outputs) return row[0];
    let best = 0;
    for (let c = 1; c < row.length; c += 1) if (row[c] > row[best]) best = c;
    return outputs[best];
  });
}
function compare(point, options = change()) {
  const found = network.forward(point, options);
  if (tokenProgram) {
    const values = decoded(point, found), meant = goal(point.map((i) => words[i]));
    const each = values.map((v, t) => (outputs ? (alike(v, meant[t]) ? 0 : 1) : Math.abs(v - toDouble(meant[t]))));
    return { found, values, meant, each, error: outputs ? each.reduce((a, b) => a + b, 0) : Math.max(...each) };
  }
  const values = Array.from(found.output), meant = goal ? goal(point) : null;
  const each = meant?.map((v, i) => Math.abs(values[i] - v)) ?? null;
  const scale = scene.relative && meant ? Math.max(...meant.map(Math.abs)) : 1;
  return { found, values, meant, each, error: each ? Math.max(...each.map((e) => (Number.isNaN(e) ? Infinity : e))) / scale : null };
}
const rounded = (i, value) => {
  const { lo, hi } = scene.inputs[i];
  return network.round(Math.min(Math.max(value, lo), hi));
};

// The shortest text that is read back as the same number of the dtype.
function exactly(x) {
  for (let digits = 1; digits < 17; digits += 1) if (network.round(Number(x.toPrecision(digits))) === x) return String(Number(x.toPrecision(digits)));
  return String(x);
}

const widthOf = (id) => Math.max(260, Math.min(1000, byId(id).clientWidth || 640)); // drawings have a letter of 12 pixels

// ---- work in slices: a generator is run a few milliseconds at a time; the function that is returned stops it

function inSlices(work, done) {
  let stopped = false;
  const step = () => {
    if (stopped) return;
    const end = performance.now() + SLICE;
    let next;
    do next = work.next(); while (!next.done && performance.now() < end);
    if (next.done) done(next.value); else setTimeout(step);
  };
  setTimeout(step);
  return () => { stopped = true; };
}
const jobs = new Map(); // one of each kind at a time
function job(kind, work, done) {
  jobs.get(kind)?.();
  jobs.set(kind, inSlices(work, (value) => { jobs.delete(kind); done(value); }));
}
const affordable = (wanted) => Math.max(5, Math.min(wanted, Math.floor(WORK / network.cost)));

function random(seed) { // mulberry32: the same hunt every time the page is opened
  let a = seed;
  return () => {
    a = (a + 0x6d2b79f5) | 0;
    let t = Math.imul(a ^ (a >>> 15), 1 | a);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
const draws = random(1);
function somewhere() {
  if (tokenProgram) return Array.from({ length: 1 + Math.floor(draws() * scene.tokens) }, () => Math.floor(draws() * words.length));
  return scene.inputs.map(({ lo, hi }, i) => {
    const u = draws();
    return rounded(i, u < 0.06 ? lo : u > 0.94 ? hi : lo + draws() * (hi - lo)); // ends count: errors are large there
  });
}
function near(point, reach) {
  if (tokenProgram) {
    const next = [...point], i = Math.floor(draws() * next.length);
    if (draws() < 0.2 && next.length < scene.tokens) next.splice(i, 0, Math.floor(draws() * words.length));
    else if (draws() < 0.2 && next.length > 1) next.splice(i, 1);
    else next[i] = Math.floor(draws() * words.length);
    return next;
  }
  return point.map((x, i) => rounded(i, x + reach * (draws() + draws() - 1) * (scene.inputs[i].hi - scene.inputs[i].lo)));
}

// ---- inputs

function buildInputs() {
  const place = byId("inputs");
  if (tokenProgram) { buildSequence(place); return; }
  const list = make("div", { className: scene.inputs.length > 8 ? "long-list" : "" });
  scene.inputs.slice(0, scene.mostInputs).forEach(({ name, lo, hi }, i) => {
    const step = (hi - lo) / 1000 || 1;
    const slide = make("input", { type: "range", id: `slide${i}`, min: lo, max: hi, step, value: now.point[i], disabled: lo === hi });
    const field = make("input", { type: "number", id: `field${i}`, min: lo, max: hi, step: "any", value: exactly(now.point[i]) });
    field.setAttribute("aria-label", `${name}, exactly`);
    slide.setAttribute("aria-valuetext", `${name} = ${show(now.point[i])}`);
    slide.addEventListener("input", () => { move(i, Number(slide.value)); field.value = exactly(now.point[i]); });
    field.addEventListener("change", () => {
      if (field.value !== "" && Number.isFinite(Number(field.value))) { move(i, Number(field.value)); slide.value = now.point[i]; }
      field.value = exactly(now.point[i]);
    });
    list.append(make("div", { className: `dial${name.length > 7 ? " tall" : ""}` }, make("label", { htmlFor: `slide${i}`, textContent: name }), slide, field,
      make("span", { className: "ends", "aria-hidden": "true" }, make("span", { textContent: show(lo, 4) }), make("span", { textContent: show(hi, 4) }))));
  });
  place.append(list);
  if (scene.inputs.length > 8) place.append(make("p", { className: "quiet", textContent: `${Math.min(scene.inputs.length, scene.mostInputs)} numbers: the list scrolls.` }));
  if (scene.inputs.length > scene.mostInputs) {
    place.append(make("p", { className: "quiet", textContent: `The first ${scene.mostInputs} of ${scene.inputs.length} numbers have sliders; the others stay where they are until a hunt moves them.` }));
  }
  place.append(make("p", { className: "row" }, make("button", { type: "button", id: "anywhere", textContent: "Somewhere else", onclick: () => go(somewhere()) })));
}
function move(i, value) {
  now.point = now.point.map((x, j) => (j === i ? rounded(i, value) : x));
  byId(`slide${i}`)?.setAttribute("aria-valuetext", `${scene.inputs[i].name} = ${show(now.point[i])}`);
  update();
}
function go(point) {
  now.point = point;
  now.query = Math.min(now.query, (tokenProgram ? point.length : scene.tokens) - 1);
  if (tokenProgram) drawSequence();
  else point.slice(0, scene.mostInputs).forEach((x, i) => { byId(`slide${i}`).value = x; byId(`field${i}`).value = exactly(x); });
  update();
}
function buildSequence(place) {
  const texts = words.map(plainValue), single = texts.every((t) => [...t].length === 1);
  const typed = make("input", { type: "text", id: "typed", className: "typed", spellcheck: false, autocomplete: "off" });
  typed.addEventListener("change", () => {
    const parts = single && !typed.value.includes(" ") ? [...typed.value] : typed.value.split(/\s+/).filter(Boolean);
    const places = parts.map((part) => texts.indexOf(part)), bad = places.indexOf(-1), note = byId("typed-note");
    if (bad >= 0) note.textContent = `“${parts[bad]}” is not in the vocabulary.`;
    else if (!places.length || places.length > scene.tokens) note.textContent = `A sequence has 1 to ${scene.tokens} tokens; this one has ${places.length}.`;
    else { note.textContent = ""; go(places); }
  });
  place.append(
    make("label", { htmlFor: "typed", className: "small", textContent: single ? "Type a sequence, or change a token below." : "Type tokens with spaces between them, or change one below." }),
    typed, make("p", { id: "typed-note", className: "wrong small", role: "alert" }), make("div", { id: "tokens", className: "tokens" }),
    make("div", { className: "row" },
      make("button", { type: "button", id: "longer", textContent: "+ token", onclick: () => go([...now.point, 0]) }),
      make("button", { type: "button", id: "shorter", textContent: "− token", onclick: () => go(now.point.slice(0, -1)) }),
      make("button", { type: "button", id: "anywhere", textContent: "Another sequence", onclick: () => go(somewhere()) })),
    make("p", { className: "quiet", textContent: `Vocabulary: ${texts.slice(0, 40).join("  ")}${texts.length > 40 ? " …" : ""}. Up to ${scene.tokens} tokens.` }));
  drawSequence();
}
function drawSequence() {
  const texts = words.map(plainValue), single = texts.every((t) => [...t].length === 1), held = document.activeElement?.id;
  byId("typed").value = now.point.map((i) => texts[i]).join(single ? "" : " ");
  byId("tokens").replaceChildren(...now.point.map((token, t) => {
    const pick = make("select", { id: `token${t}`, onchange: () => go(now.point.map((x, j) => (j === t ? pick.selectedIndex : x))) },
      ...texts.map((text, i) => make("option", { textContent: text, selected: i === token })));
    pick.setAttribute("aria-label", `token ${t}`);
    return pick;
  }));
  if (held?.startsWith("token")) byId(held)?.focus();
  byId("longer").disabled = now.point.length >= scene.tokens;
  byId("shorter").disabled = now.point.length <= 1;
}

// ---- outputs

function drawOutputs(seen) {
  const head = (...names) => make("thead", {}, make("tr", {}, ...names.map(([text, kind]) => make("th", { scope: "col", textContent: text, className: kind ?? "number" }))));
  const rows = [];
  if (tokenProgram) {
    const say = (v) => (typeof v === "number" ? show(v) : isNumber(v) && !outputs ? show(toDouble(v)) : plainValue(v));
    now.point.forEach((token, t) => rows.push(make("tr", {}, make("td", { textContent: t, className: "number" }), make("td", { textContent: plainValue(words[token]) }),
      make("td", { className: "net", textContent: say(seen.values[t]) }), make("td", { className: "goal", textContent: say(seen.meant[t]) }),
      make("td", { className: seen.each[t] > (scene.bound ?? 0) ? "wrong" : "", textContent: outputs ? (seen.each[t] ? "differs" : "the same") : show(seen.each[t], 4) }))));
    byId("outputs").replaceChildren(make("div", { className: "scroller" }, make("table", { className: "plain" }, head(["at"], ["token", ""], ["network", ""], ["program", ""], ["", ""]), make("tbody", {}, ...rows))));
    return;
  }
  scene.outputs.slice(0, 16).forEach((name, i) => rows.push(make("tr", {}, make("th", { scope: "row", textContent: name }),
    make("td", { className: "number net", textContent: show(seen.values[i], shownDigits) }),
    ...(seen.meant ? [make("td", { className: "number goal", textContent: show(seen.meant[i], shownDigits) }), make("td", { className: "number", textContent: show(seen.values[i] - seen.meant[i], 5) })] : []))));
  const names = [["", ""], ["network"], ...(seen.meant ? [["target"], ["off by"]] : [])];
  byId("outputs").replaceChildren(make("div", { className: "scroller" }, make("table", { className: "plain" }, head(...names), make("tbody", {}, ...rows))),
    ...(scene.outputs.length > 16 ? [make("p", { className: "quiet", textContent: `16 of ${scene.outputs.length} outputs; the verdict is for all of them.` })] : []),
    ...(seen.meant ? [] : [make("p", { className: "quiet", textContent: scene.without })]));
}
// Whether an error that is above the bound could be the target's own rounding in doubles.
const undecided = (error, meant) => scene.dtype === "float64" && error - scene.bound < 1e-14 * (1 + Math.max(...(meant ?? [0]).map((v) => (typeof v === "number" ? Math.abs(v) : 1))));
function verdictOf(seen) {
  if (seen.error === null) return ["", ""];
  if (tokenProgram && outputs) {
    if (!seen.error) return ["held", "The network says what the program says."];
    return ["broken", `${seen.error} of ${now.point.length} positions differ${changed() ? ": heads are switched off or warmed" : ""}.`];
  }
  if (scene.bound === null) return ["", "There is no certified bound: the target was only sampled."];
  const unit = scene.relative ? " of the target’s size" : "";
  if (seen.error <= scene.bound) return ["held", `off by ${show(seen.error, 5)}${unit}: within the certified ${scene.boundText}`];
  if (!changed() && undecided(seen.error, seen.meant)) return ["", `off by ${show(seen.error, 5)}: at the edge of what the target’s own doubles can tell`];
  return ["broken", `off by ${show(seen.error, 5)}${unit}, above the certified ${scene.boundText}${changed() ? ", which is for heads as they were built" : ""}`];
}
function drawVerdict(seen) {
  const [kind, text] = verdictOf(seen), place = byId("verdict");
  place.replaceChildren();
  if (seen.error !== null && scene.bound) {
    const wide = widthOf("verdict"), lo = Math.log10(scene.bound) - 6, hi = Math.log10(scene.bound) + 3;
    const at = (v) => 10 + (Math.min(Math.max((Math.log10(v) - lo) / (hi - lo), 0), 1)) * (wide - 20);
    const mark = at(Math.max(seen.error, 1e-300));
    place.append(make("div", { className: "meter" }, svg("svg", { viewBox: `0 0 ${wide} 44`, class: "chart", role: "img", "aria-label": text },
      svg("rect", { x: 10, y: 8, width: at(scene.bound) - 10, height: 10, rx: 5, fill: "var(--band)" }),
      svg("rect", { x: 10, y: 8, width: wide - 20, height: 10, rx: 5, fill: "none", stroke: "var(--line)" }),
      svg("line", { x1: at(scene.bound), x2: at(scene.bound), y1: 3, y2: 24, stroke: "var(--held)", "stroke-width": 2 }),
      svg("text", { x: at(scene.bound), y: 39, "text-anchor": "middle" }, `bound ${scene.boundText}`),
      svg("circle", { cx: mark, cy: 13, r: 6, fill: kind === "broken" ? "var(--miss)" : "var(--net)" }))));
  }
  if (text) place.append(make("p", { className: `verdict ${kind}`, id: "verdict-text", textContent: text }));
  if (scene.remark) place.append(make("p", { className: "quiet", textContent: scene.remark }));
}
let saying = 0;
function announce(seen) { // not at every step of a slider
  clearTimeout(saying);
  saying = setTimeout(() => {
    const value = tokenProgram ? seen.values.map((v) => (typeof v === "number" ? show(v, 4) : plainValue(v))).join(" ") : scene.outputs.slice(0, 4).map((n, i) => `${n} ${show(seen.values[i], 5)}`).join(", ");
    byId("said").textContent = `Network: ${value}. ${verdictOf(seen)[1]}`;
  }, 400);
}

// ---- the worst point, and the hunt

function noteWorst(point, error) {
  if (error === null || changed() || (now.worst && error <= now.worst.error)) return false;
  now.worst = { point: [...point], error };
  return true;
}
let hunted = ""; // what came of the last hunt
function drawWorst(progress = 0) {
  const place = byId("worst");
  if (!goal) { place.replaceChildren(); return; }
  const held = document.activeElement?.id, running = jobs.has("hunt");
  const what = !now.worst ? "none yet" : outputs && !now.worst.error ? "no position was wrong" : outputs ? `${now.worst.error} wrong positions` : `${show(now.worst.error, 5)}${scene.bound ? `, ${show((100 * now.worst.error) / scene.bound, 3)}% of the bound` : ""}`;
  const where = now.worst && now.worst.error > 0 && (tokenProgram ? now.worst.point.map((i) => plainValue(words[i])).join(" ") : now.worst.point.slice(0, 6).map((x, i) => `${scene.inputs[i].name} = ${show(x, 6)}`).join(", ") + (now.worst.point.length > 6 ? ", …" : ""));
  place.replaceChildren(
    make("p", { className: "small", id: "worst-text" }, make("b", { textContent: "Worst so far: " }), what, where ? make("span", { className: "quiet", textContent: ` at ${where}` }) : null),
    make("div", { className: "row" },
      make("button", { type: "button", id: "hunt", textContent: running ? "Stop the hunt" : "Hunt for a worse point", onclick: () => (running ? stopHunt() : hunt()) }),
      make("button", { type: "button", id: "visit", textContent: "Go there", disabled: !now.worst?.error, onclick: () => go([...now.worst.point]) }),
      running ? make("progress", { max: 1, value: progress, "aria-label": "the hunt" }) : null,
      !running && hunted ? make("span", { className: "quiet", id: "hunt-text", textContent: hunted }) : null));
  if (held === "hunt" || held === "visit") byId(held)?.focus();
}
function endHunt(text) { hunted = text; drawWorst(); }
function stopHunt() { jobs.get("hunt")(); jobs.delete("hunt"); endHunt("stopped"); }
function hunt() {
  const count = affordable(HUNTED);
  function* work() {
    let shownAt = performance.now(), reach = 0.3;
    for (let i = 0; i < count; i += 1) {
      const closer = now.worst && i % 2, point = closer ? near(now.worst.point, reach) : somewhere();
      const better = noteWorst(point, compare(point, {}).error);
      if (closer) reach = better ? Math.min(0.3, 1.5 * reach) : Math.max(1e-6, 0.97 * reach);
      if (performance.now() - shownAt > 150) { shownAt = performance.now(); drawWorst(i / count); }
      yield;
    }
    return `looked at ${count.toLocaleString("en")} points`;
  }
  job("hunt", work(), endHunt);
  drawWorst();
}

// ---- program, grid and facts

function buildProgram() {
  const place = byId("program");
  scene.lines.forEach(({ text, units }, number) => {
    if (units.length) {
      const line = make("button", { type: "button", className: `line ${colourOf(scene.units[units[0]])}`, textContent: text });
      line.dataset.units = units.join(" ");
      wire(line, units);
      place.append(line);
    } else if (number === 0 && !tokenProgram) {
      place.append(make("div", { className: "line source" }, ...terms(text)));
    } else place.append(make("div", { className: "line", textContent: text || " " }));
  });
}
// A formula with the parts that heads compute as buttons, one within another.
function terms(text) {
  const kept = [...text].map((letter, i) => [letter, i]).filter(([letter]) => letter !== " ");
  const bare = kept.map(([letter]) => letter).join(""), spans = [];
  scene.units.forEach((unit, u) => {
    const label = unit.label.replaceAll(" ", ""), at = bare.indexOf(label);
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
      const term = make("span", { tabIndex: 0, className: `term ${colourOf(scene.units[span.u])}` }, ...build(span.from, span.to, within));
      term.setAttribute("role", "button");
      term.dataset.units = span.u;
      wire(term, [span.u]);
      parts.push(term);
      at = span.to;
    }
    return [...parts, text.slice(at, to)];
  };
  return build(0, text.length, spans);
}
function wire(node, units) {
  const [unit] = units, over = (event) => { event.stopPropagation(); light(units); }, away = () => light([]);
  node.addEventListener("mouseover", over);
  node.addEventListener("focus", over);
  node.addEventListener("mouseleave", away);
  node.addEventListener("blur", away);
  const pick = (event) => { event.stopPropagation(); choose(unit); };
  node.addEventListener("click", pick);
  node.addEventListener("keydown", (event) => {
    if (event.key === "a" || event.key === "Delete") { event.preventDefault(); toggle(unit); }
    else if (event.key === "Enter" && node.getAttribute("role") === "button") pick(event);
  });
}
function buildGrid() {
  const place = byId("grid"), list = make("div", { className: "layers" });
  layerNumbers.forEach((layer, i) => {
    const column = make("div", { className: "layer" }, make("h3", { textContent: `Layer ${i + 1}` }));
    const units = scene.units.map((unit, u) => [unit, u]).filter(([unit]) => unit.layer === layer);
    const draw = (some) => some.forEach(([unit, u]) => {
      const pick = make("button", { type: "button", className: "pick", id: `unit${u}` }, make("span", { className: "label", textContent: unit.label }),
        make("span", { className: "kind", textContent: `${unit.family} · ${unit.heads.length} head${unit.heads.length > 1 ? "s" : ""}` }));
      wire(pick, [u]);
      const power = make("button", { type: "button", className: "power", id: `power${u}`, onclick: () => toggle(u) }, svg("svg", { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" }, svg("path", { d: POWER })));
      power.setAttribute("aria-label", `switch ${unit.label} off`);
      const box = make("div", { className: `unit ${colourOf(unit)}` }, pick, power);
      box.dataset.units = u;
      column.append(box);
    });
    draw(units.slice(0, 16));
    if (units.length > 16) {
      const more = make("button", { type: "button", textContent: `and ${units.length - 16} more`, onclick: () => { more.remove(); draw(units.slice(16)); drawGrid(); } });
      column.append(more);
    }
    list.append(column);
  });
  place.append(scene.units.length ? list : make("p", { className: "quiet", textContent: "This network has no heads: it is an affine map." }));
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
function choose(unit) { now.unit = unit; now.head = -1; now.query = Math.min(now.query, (tokenProgram ? now.point.length : scene.tokens) - 1); update(); sweep(); }
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
  const list = (set) => { const all = [...set]; return all.length > 12 ? `${all.slice(0, 12).join(", ")} and ${all.length - 12} more` : all.join(", ") || "constants"; };
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
  const sees = { memory: "memory slots", self: "its own token and memory slots", tokens: group.causal ? "tokens up to its own" : "all tokens" }[group.scope];
  const list = make("dl", { className: "facts" });
  const add = (name, ...value) => list.append(make("dt", { textContent: name }), make("dd", {}, ...value));
  add("family", `${unit.family}, ${unit.heads.length} head${unit.heads.length > 1 ? "s" : ""}, layer ${layerNumbers.indexOf(unit.layer) + 1}`);
  if (!unit.facts.some(([name]) => name === "sees")) add("sees", `${sees}${group.slots ? `, ${group.slots} slots` : ""}`);
  for (const [name, value] of [...unit.facts, ...readsAndWrites(at)]) add(name, value);
  const hooks = unit.hooks.filter(Boolean);
  if (unit.hooks[which]) {
    const name = unit.hooks[which], copy = make("button", { type: "button", className: "copy", id: "copy", textContent: "copy", onclick: () => copyText(name, copy) });
    add("TransformerLens", make("code", { textContent: name }), copy, hooks.length > 1 ? make("span", { className: "quiet", textContent: ` and ${hooks.length - 1} more` }) : "");
  }
  place.replaceChildren(make("h3", { textContent: unit.label }), list);
}
async function copyText(text, button) {
  try { await navigator.clipboard.writeText(text); } catch { // a page opened from a file may not be let at the clipboard
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
    if (row.some((v, k) => Math.abs(v - ratio * q[k]) > 1e-5 * Math.abs(ratio * q[lead]))) return null; // of higher rank
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
  const gap = cross.length > 1 ? (cross.at(-1) - cross[0]) / (cross.length - 1) : 1;
  return { mix, lines, places: lines.map((_, i) => ((cross[i - 1] ?? cross[0] - gap) + (cross[i] ?? cross.at(-1) + gap)) / 2) };
}
function drawPattern(watched) {
  const place = byId("pattern");
  if (!scene.units.length) { place.replaceChildren(); return; }
  const unit = scene.units[now.unit], [g, h] = unit.heads[Math.max(now.head, 0)], { layer } = unit;
  const group = scene.layers[layer].groups[g], rows = watched.weights.length, first = scene.registers;
  byId("pattern-title").textContent = `Attention: ${unit.label}`;
  const label = (r) => (r < first ? `r${r}` : tokenProgram ? (r - first < now.point.length ? plainValue(words[now.point[r - first]]) : "·") : `${r - first}`);
  const query = first + now.query, parts = [];
  if (rows - first > 1) {
    const pick = make("select", { id: "query", onchange: () => { now.query = pick.selectedIndex; update(); } },
      ...Array.from({ length: rows - first }, (_, t) => make("option", { textContent: `${t}: ${label(first + t)}`, selected: t === now.query })));
    parts.push(make("div", { className: "row" }, make("label", {}, "seen from token", pick)));
  }
  const row = watched.weights[Math.min(query, rows - 1)];
  if (group.scope === "tokens") parts.push(matrix(watched, rows, label, group), peak(row, rows, label));
  else {
    const known = slotLines(layer, g, h);
    if (known && row.length > 2) {
      const from = Math.min(query, rows - 1) * watched.columns, names = columnsBefore(layer), mixed = [...known.mix];
      const z = mixed.reduce((sum, [c, ratio]) => sum + ratio * watched.state[from + c], 0);
      const name = mixed.map(([c, ratio]) => (ratio === 1 ? names[c] : `${show(ratio, 3)} ${names[c]}`)).join(" + ").replaceAll("+ -", "− ");
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
  return make("p", { className: "small", id: "pattern-note", textContent: `Largest weight: ${show(row[best], 4)} on ${best >= rows ? `memory slot ${best - rows}` : best < scene.registers ? `register ${best}` : `token ${best - scene.registers} (${label(best)})`}.` });
}
function matrix(watched, rows, label, group) {
  const count = Math.min(rows, ROWS), keys = Math.min(rows + group.slots, ROWS), name = (j) => (j < rows ? label(j) : `m${j - rows}`);
  const table = make("table", { className: "cells", id: "matrix" }), signs = [group.slots ? "m: memory slots" : "", scene.registers ? "r: registers" : ""].filter(Boolean);
  const caption = make("p", { className: "small", textContent: `Rows look at columns${signs.length ? `; ${signs.join(", ")}` : ""}.` });
  table.setAttribute("aria-label", "attention weights");
  table.append(make("thead", {}, make("tr", {}, make("th"), ...Array.from({ length: keys }, (_, j) => make("th", { scope: "col", textContent: name(j) })))));
  // A head that counts gives its tokens tiny weights, and it is their sum that matters: then shades are logarithms.
  const largest = Math.max(...watched.weights.slice(0, count).map((row) => Math.max(0, ...row.slice(0, rows)))), fine = largest > 0 && largest < 0.05;
  const depth = (w) => (!fine ? w : w > 0 ? Math.min(1, Math.max(0.1, 0.6 + Math.log10(w / largest) / 10)) : 0);
  if (fine) caption.textContent += ` Shades are logarithms: the largest weight of a token is ${show(largest, 2)}.`;
  const body = make("tbody"), note = (i, j, w) => { byId("pattern-note").textContent = `Row ${i} (${name(i)}) gives column ${j} (${name(j)}) the weight ${show(w, 5)}.`; };
  for (let i = 0; i < count; i += 1) {
    const line = make("tr", { className: i === scene.registers + now.query ? "here" : "" }, make("th", { scope: "row", textContent: name(i) }));
    for (let j = 0; j < keys; j += 1) {
      const w = watched.weights[i][j];
      const cell = make("td", { className: depth(w) > 0.55 ? "deep" : "", textContent: w > 0.995 ? "1" : w >= 0.05 ? w.toFixed(1).replace("0.", ".") : "", style: `--w: ${depth(w).toFixed(3)}`, title: show(w, 5), onmouseenter: () => note(i, j, w) });
      line.append(cell);
    }
    body.append(line);
  }
  table.append(body);
  const cut = rows > ROWS || rows + group.slots > ROWS;
  return make("div", {}, caption, make("div", { className: "scroller", tabIndex: 0 }, table), cut ? make("p", { className: "quiet", textContent: `The first ${count} rows and ${keys} columns of ${rows} by ${rows + group.slots}.` }) : "");
}
function numberLine({ lines, places }, row, z, name) {
  const inside = places.filter(Number.isFinite), lo = Math.min(...inside, z), hi = Math.max(...inside, z), pad = 0.04 * (hi - lo || 1);
  const text = `Weights of ${lines.length} slots along ${name}, which is ${show(z, 5)}`;
  const chart = panel({
    width: widthOf("pattern"), height: 220, x: [lo - pad, hi + pad], y: [0, 1], label: text, xName: name, yName: "weight",
    draw: (sx, sy, frame) => [
      ...lines.map(({ slot }, i) => { const g = svg("g"); g.append(svg("title", {}, `slot ${slot} at ${show(places[i], 5)}: ${show(row[slot], 5)}`)); g.append(svg("line", { x1: sx(places[i]), x2: sx(places[i]), y1: sy(0), y2: sy(row[slot]), stroke: "var(--net)", "stroke-width": 3, "stroke-linecap": "round" }), svg("circle", { cx: sx(places[i]), cy: sy(row[slot]), r: 4, fill: "var(--net)" })); return g; }),
      upright(z, sx, frame, "var(--goal)"), svg("path", { d: `M${sx(z) - 6} ${frame.top - 5}h12l-6 9z`, fill: "var(--goal)" }),
    ],
  });
  return make("div", {}, chart, make("p", { className: "small", id: "pattern-note", textContent: `${text}; the largest weight is ${show(Math.max(...row), 4)}.` }));
}
function bars(row, group) {
  const name = (j) => (group.scope === "self" ? (j ? `slot ${j - 1}` : "own token") : `slot ${j}`), some = [...row].slice(0, ROWS);
  const height = 22 * some.length + 12, wide = widthOf("pattern"), full = wide - 160;
  const chart = svg("svg", { viewBox: `0 0 ${wide} ${height}`, class: "chart", role: "img", "aria-label": some.map((w, j) => `${name(j)} ${show(w, 3)}`).join(", ") });
  some.forEach((w, j) => chart.append(svg("text", { x: 78, y: 22 * j + 17, "text-anchor": "end" }, name(j)), svg("rect", { x: 86, y: 22 * j + 5, width: full, height: 14, rx: 4, fill: "var(--sunken)" }),
    svg("rect", { x: 86, y: 22 * j + 5, width: full * w, height: 14, rx: 4, fill: "var(--net)" }), svg("text", { x: 94 + full, y: 22 * j + 17 }, show(w, 4))));
  return make("div", {}, chart, make("p", { className: "small", id: "pattern-note", textContent: row.length > ROWS ? `The first ${ROWS} of ${row.length} slots.` : `${row.length} slots.` }));
}

const heatText = (v) => (v === 0 ? "as built" : `logits × ${show(2 ** v, 3)}: ${show(2 ** Math.abs(v), 3)} times ${v < 0 ? "warmer" : "colder"}`);
function buildChange() {
  const place = byId("change");
  if (!scene.units.length) { place.append(make("p", { className: "quiet", textContent: "There is no head to change." })); return; }
  const slide = make("input", { type: "range", id: "heat", min: -6, max: 4, step: 0.25, value: 0 });
  slide.addEventListener("input", () => {
    const v = Number(slide.value);
    chosen().forEach((name) => (v === 0 ? now.heat.delete(name) : now.heat.set(name, network.round(2 ** v))));
    slide.setAttribute("aria-valuetext", heatText(v));
    update();
  });
  place.append(
    make("div", { className: "row" }, make("label", {}, "heads", make("select", { id: "head", onchange: (event) => { now.head = event.target.selectedIndex - 1; update(); sweep(); } })),
      make("button", { type: "button", id: "ablate", onclick: () => toggle(now.unit, now.head) }),
      make("button", { type: "button", id: "mend", textContent: "Everything as built", onclick: () => { now.off.clear(); now.heat.clear(); update(); sweep(); } })),
    make("label", { htmlFor: "heat", className: "small", textContent: "Temperature, warm to cold" }), slide,
    make("p", { className: "small", id: "heat-text" }), make("div", { id: "sweep" }));
}
function drawChange() {
  if (!scene.units.length) return;
  const { heads } = scene.units[now.unit], pick = byId("head");
  pick.parentNode.hidden = heads.length === 1;
  pick.replaceChildren(make("option", { textContent: `all ${heads.length}` }), ...(heads.length > 1 ? heads.slice(0, 64).map((_, i) => make("option", { textContent: `head ${i + 1}` })) : []));
  pick.selectedIndex = now.head + 1;
  const off = chosen().every((name) => now.off.has(name)), factor = now.heat.get(chosen()[0]) ?? 1, v = Math.log2(factor);
  byId("ablate").textContent = off ? "Switch on again" : "Switch off";
  byId("ablate").setAttribute("aria-pressed", off);
  byId("mend").disabled = !changed();
  byId("heat").value = v;
  byId("heat-text").textContent = heatText(v);
}
// The largest error over some points at each temperature of the head at hand.
function sweep() {
  const place = byId("sweep");
  if (!scene.units.length || !goal || network.cost > RUNS) return;
  const names = chosen(), count = Math.max(3, Math.min(SWEPT, Math.floor(WORK / network.cost / 41))), gen = random(7);
  const points = Array.from({ length: count }, () => (tokenProgram ? somewhere() : scene.inputs.map(({ lo, hi }, i) => rounded(i, lo + gen() * (hi - lo)))));
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
    const wrong = outputs !== null, least = wrong ? 0 : Math.floor(Math.log10(Math.max(Math.min(...ys.filter((y) => y > 0), scene.bound || Infinity), 1e-18)));
    const height = (y) => (wrong ? y : Math.log10(Math.max(y, 10 ** least)));
    const top = wrong ? Math.max(1, ...ys) : Math.ceil(Math.max(...ys.filter(Number.isFinite).map(height), scene.bound ? height(scene.bound) : -Infinity) + 0.2);
    const label = `The largest ${wrong ? "number of wrong positions" : "error"} over ${count} ${tokenProgram ? "sequences" : "points"}, from warm to cold`;
    const chart = panel({ width: widthOf("change"), height: 210, x: [-6, 4], y: [least, top], log: !wrong, label, xName: "warmer   ←   log2 of the factor   →   colder", yName: wrong ? "wrong" : "error",
      draw: (sx, sy, frame) => [
        ...(scene.bound ? [svg("rect", { x: frame.left, width: frame.right - frame.left, y: sy(height(scene.bound)), height: Math.max(0, frame.bottom - sy(height(scene.bound))), fill: "var(--band)" })] : []),
        curve(xs, ys.map(height), sx, sy, "var(--miss)"), upright(0, sx, frame)] });
    place.replaceChildren(chart, make("p", { className: "quiet", textContent: `${label}${scene.bound ? "; the band is the certified bound" : ""}.` }));
  });
}

// ---- curves

function buildAxes() {
  if (tokenProgram) { document.querySelectorAll("[data-numbers]").forEach((node) => { node.hidden = true; }); return; }
  const pick = (id, label, names, chosenAt, set) => {
    const select = make("select", { id, onchange: () => { set(select.selectedIndex); drawCurves(); } }, ...names.map((name, i) => make("option", { textContent: name, selected: i === chosenAt })));
    return make("label", {}, label, select);
  };
  const names = scene.inputs.map((input) => input.name);
  byId("axes").append(pick("axis-x", "along", names, now.x, (i) => { now.x = i; }),
    pick("axis-y", "and", ["one input only", ...names], 0, (i) => { now.y = i - 1; }),
    ...(scene.outputs.length > 1 ? [pick("axis-out", "output", scene.outputs, 0, (i) => { now.drawn = i; })] : []));
}
const at = (x, y) => now.point.map((v, i) => (i === now.x ? rounded(i, x) : i === now.y ? rounded(i, y) : v));
function drawCurves() {
  if (tokenProgram || network.cost > RUNS) return;
  if (now.y >= 0 && now.y !== now.x) { drawMaps(); return; }
  const { lo, hi, name } = scene.inputs[now.x], count = affordable(DRAWN);
  function* work() {
    const xs = [], net = [], meant = [];
    for (let i = 0; i < count; i += 1) {
      const point = at(lo + (i / (count - 1)) * (hi - lo)), seen = compare(point);
      xs.push(point[now.x]);
      net.push(seen.values[now.drawn]);
      if (seen.meant) meant.push(seen.meant[now.drawn]);
      yield;
    }
    return { xs, net, meant };
  }
  job("curves", work(), ({ xs, net, meant }) => {
    const all = [...net, ...meant].filter(Number.isFinite), here = now.point[now.x], width = widthOf("curves");
    const low = Math.min(...all), high = Math.max(...all), pad = 0.06 * (high - low || 1), out = scene.outputs[now.drawn];
    const colour = { net: "var(--net)", goal: "var(--goal)" };
    const parts = [make("div", { className: "legend" }, make("span", {}, make("i", { style: `color: ${colour.net}` }), "network"), meant.length ? make("span", {}, make("i", { style: `color: ${colour.goal}; border-top-style: dashed` }), "target") : ""),
      panel({ width, height: 260, x: [lo, hi], y: [low - pad, high + pad], label: `${out} along ${name}: network${meant.length ? " and target" : ""}`, xName: meant.length ? "" : name, yName: out.length < 40 ? out : "output",
        draw: (sx, sy, frame) => [curve(xs, net, sx, sy, colour.net, 3), curve(xs, meant, sx, sy, colour.goal, 2, "7 5"), upright(here, sx, frame)] })];
    if (meant.length) {
      const error = net.map((v, i) => v - meant[i]), size = Math.max(...error.filter(Number.isFinite).map(Math.abs), 0), bound = scene.relative ? 0 : scene.bound ?? 0, most = 1.15 * Math.max(size, bound) || 1;
      parts.push(panel({ width, height: 170, x: [lo, hi], y: [-most, most], xName: name, yName: "network − target", label: `The difference along ${name}, at most ${show(size, 4)}${bound ? `; the bound is ${scene.boundText}` : ""}`,
        draw: (sx, sy, frame) => [
          ...(bound ? [svg("rect", { x: frame.left, width: frame.right - frame.left, y: sy(bound), height: Math.max(1, sy(-bound) - sy(bound)), fill: "var(--band)" })] : []),
          curve(xs, error, sx, sy, "var(--miss)", 2), upright(here, sx, frame)] }),
      make("p", { className: "quiet", id: "curves-note", textContent: `At ${count} points the difference is at most ${show(size, 4)}${bound ? `; the band is the certified bound, ${scene.boundText}` : ""}. The other inputs are where the sliders are.` }));
    }
    byId("curves").replaceChildren(...parts);
  });
}
function drawMaps() {
  const [X, Y] = [scene.inputs[now.x], scene.inputs[now.y]], n = Math.max(5, Math.min(MAPPED, Math.floor(Math.sqrt(affordable(MAPPED ** 2)))));
  function* work() {
    const net = [], error = [];
    for (let i = 0; i < n * n; i += 1) {
      const point = at(X.lo + ((i % n) / (n - 1)) * (X.hi - X.lo), Y.lo + (Math.floor(i / n) / (n - 1)) * (Y.hi - Y.lo)), seen = compare(point);
      net.push(seen.values[now.drawn]);
      if (seen.meant) error.push(Math.abs(seen.values[now.drawn] - seen.meant[now.drawn]));
      yield;
    }
    return { net, error };
  }
  job("curves", work(), ({ net, error }) => {
    const map = (title, values, lo, hi) => {
      const canvas = heatMap(values, n, lo, hi, `${title} over ${X.name} and ${Y.name}, from ${show(Math.min(...values), 4)} to ${show(Math.max(...values), 4)}`);
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect(), u = (event.clientX - box.left) / box.width, v = 1 - (event.clientY - box.top) / box.height;
        go(at(X.lo + u * (X.hi - X.lo), Y.lo + v * (Y.hi - Y.lo)));
      });
      return make("div", {}, make("h3", { textContent: title }), canvas, make("div", { className: "scale" }, show(lo, 4), make("i"), show(hi, 4)));
    };
    const parts = [map(`network: ${scene.outputs[now.drawn]}`, net, Math.min(...net), Math.max(...net))];
    if (error.length) parts.push(map(scene.bound && !scene.relative ? "error, up to the certified bound" : "error", error, 0, scene.bound && !scene.relative ? Math.max(scene.bound, ...error) : Math.max(...error)));
    byId("curves").replaceChildren(make("div", { className: "maps" }, ...parts), make("p", { className: "quiet", id: "curves-note",
      textContent: `${X.name} to the right, ${Y.name} upwards, ${n} by ${n} points${error.length ? `; the largest difference is ${show(Math.max(...error), 4)}` : ""}. A click goes there.` }));
  });
}

// ---- the residual stream

function buildStream() {
  const pick = make("select", { id: "layer", onchange: () => { now.after = pick.selectedIndex; update(); } }, make("option", { textContent: "the input" }),
    ...scene.layers.map((layer, i) => make("option", { textContent: `${layer.groups.length ? `layer ${layerNumbers.indexOf(i) + 1}` : "an affine map"} (${layer.names.length} column${layer.names.length === 1 ? "" : "s"})`, selected: i + 1 === now.after })));
  byId("after").append(make("label", {}, "after", pick));
}
function drawStream(states) {
  const { state, columns } = states[now.after], names = now.after ? scene.layers[now.after - 1].names : scene.columns, rows = state.length / columns;
  const live = names.map((_, c) => c).filter((c) => columns <= COLUMNS || Array.from({ length: rows }, (_, r) => state[r * columns + c]).some((v) => v !== 0));
  const some = live.slice(0, COLUMNS), most = Math.max(1e-300, ...state.map(Math.abs)), first = scene.registers;
  const label = (r) => (r < first ? `register ${r}` : tokenProgram ? `${r - first}: ${r - first < now.point.length ? plainValue(words[now.point[r - first]]) : "padding"}` : rows - first > 1 ? `token ${r - first}` : "value");
  const down = rows === 1; // one token: a list reads better than a row
  const cell = (r, c) => { const v = state[r * columns + c], w = Math.sqrt(Math.abs(v) / most) || 0; return make("td", { className: `${v < 0 ? "minus" : ""} ${w > 0.7 ? "deep" : ""}`, style: `--w: ${w.toFixed(3)}`, textContent: show(v, 4), title: `${names[c]}: ${show(v, 9)}` }); };
  const table = make("table", { className: "cells" });
  if (down) table.append(make("tbody", {}, ...some.map((c) => make("tr", {}, make("th", { scope: "row", textContent: names[c], style: "text-align: left; white-space: normal" }), cell(0, c)))));
  else {
    table.append(make("thead", {}, make("tr", {}, make("th"), ...some.map((c) => make("th", { scope: "col", className: "tall", textContent: names[c], title: names[c] })))),
      make("tbody", {}, ...Array.from({ length: Math.min(rows, ROWS) }, (_, r) => make("tr", {}, make("th", { scope: "row", textContent: label(r) }), ...some.map((c) => cell(r, c))))));
  }
  const cut = some.length < names.length || rows > ROWS;
  byId("columns").replaceChildren(make("div", { className: "scroller", tabIndex: 0 }, table),
    cut ? make("p", { className: "quiet", textContent: `${some.length} of ${names.length} columns (zeros left out first) and ${Math.min(rows, ROWS)} of ${rows} rows.` }) : "");
}

// ---- everything again

let waiting = 0;
function draw() {
  const watch = scene.units.length ? headNames(now.unit, Math.max(now.head, 0))[0] : undefined;
  const seen = compare(now.point, { ...change(), watch, states: true });
  noteWorst(now.point, seen.error);
  drawOutputs(seen);
  drawVerdict(seen);
  drawWorst();
  drawGrid();
  drawFacts();
  if (seen.found.watched) drawPattern(seen.found.watched);
  drawChange();
  drawStream(seen.found.states);
  announce(seen);
  if (parent !== window) parent.postMessage({ attnforge: { point: [...now.point], output: Array.from(seen.found.output) } }, "*");
  clearTimeout(waiting);
  waiting = setTimeout(drawCurves, 60);
}
let frame = 0;
function update() {
  if (network.cost > RUNS) { drawGrid(); drawFacts(); drawChange(); return; }
  if (network.cost <= FOLLOWS) { cancelAnimationFrame(frame); frame = requestAnimationFrame(draw); return; }
  clearTimeout(frame);
  frame = setTimeout(draw, 200);
}

function buildWords() {
  const say = (...texts) => byId("words").append(make("p", {}, ...texts));
  const heads = scene.units.reduce((sum, unit) => sum + unit.heads.length, 0), plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
  byId("about").textContent = `An attention-only network that runs in this page: ${plural(layerNumbers.length, "layer")}, ${plural(heads, "head")}, ${plural(scene.numbers, "weight")}, ${scene.dtype}. ${scene.kind === "exact" ? "Exact by proof." : scene.bound !== null ? `Certified: off by at most ${scene.boundText}${scene.relative ? " of the target’s size" : ""}.` : "Measured, not certified."}`;
  say(scene.dtype === "float32" ? "The weights are those of the file, and every sum, product, quotient and exponential is rounded to float32, as the network’s own are: an exponential below −104 is 0." : "The weights are those of the file, and the arithmetic is that of doubles, which is the network’s own.",
    " Sums are made one term after the other; PyTorch may add in another order, which the certificate allows. The target is evaluated in doubles. Switching heads off or warming them leaves what is certified: the bound is for the network as built.");
  say(`${carried ? `One pass takes about ${Math.round(network.cost).toLocaleString("en")} multiplications. ` : ""}Up to ${FOLLOWS.toExponential(0)} the page follows a slider, up to ${RUNS.toExponential(0)} it runs when the slider rests, beyond that it shows the structure only. A hunt looks at up to ${HUNTED.toLocaleString("en")} points, fewer for large networks, and can be stopped.`);
  if (scene.certificate) byId("words").append(make("pre", { tabIndex: 0 }, make("code", { textContent: scene.certificate })));
  if (network.cost > RUNS) {
    const why = carried ? `takes ${network.cost.toExponential(1)} multiplications a pass, more than the ${RUNS.toExponential(0)} that a page can follow` : `has ${plural(scene.numbers, "weight")}, more than the ${scene.mostNumbers.toLocaleString("en")} that a page carries`;
    byId("trouble").hidden = false;
    byId("trouble").textContent = `This network ${why}: its structure is shown, and it does not run here.`;
    for (const id of ["try", "at-hand", "drawn", "stream"]) {
      byId(id).hidden = true;
      document.querySelector(`nav a[href="#${id}"]`).hidden = true;
    }
  }
}

// ---- light and dark

const root = document.documentElement;
try {
  const kept = localStorage.getItem("attnforge-theme");
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
} catch { /* a page opened from a file may have no storage */ }
byId("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("attnforge-theme", root.dataset.theme); } catch { /* no storage */ }
});

buildWords();
buildInputs();
buildProgram();
buildGrid();
buildChange();
buildAxes();
buildStream();
update();
sweep();
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(drawCurves, 150); });

// A notebook that shows the page in a frame may move it.
function isPoint(given) {
  if (!Array.isArray(given) || !given.every(Number.isFinite)) return false;
  return tokenProgram ? given.length > 0 && given.length <= scene.tokens && given.every((i) => Number.isInteger(i) && i >= 0 && i < words.length) : given.length === scene.inputs.length;
}
addEventListener("message", (event) => {
  const given = event.source === parent ? event.data?.attnforge?.go : null;
  if (isPoint(given) && given.join() !== now.point.join()) go(tokenProgram ? given : given.map((x, i) => rounded(i, x)));
});

// For whoever opens the console: the network and its target as functions of a point, or of a list of token numbers.
window.attnforge = {
  scene, now, words, cost: network.cost,
  forward: network.forward,
  evaluate: (data, y) => makeFunction(data)(y),
  run: (point) => Array.from(network.forward(point).output),
  target: (point) => (goal ? (tokenProgram ? goal(point.map((i) => words[i])).map(showValue) : goal(point)) : null),
  decode: (point) => decoded(point, network.forward(point)).map((v) => (typeof v === "number" ? v : showValue(v))),
};
