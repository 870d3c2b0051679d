// The residual stream, everything drawn again when something changes, and the beginning of it all.

function buildStream() {
  const pick = make("select", { id: "layer", onchange: () => { now.after = pick.selectedIndex; update(); } },
    make("option", { textContent: "the input" }),
    ...scene.layers.map((layer, i) => make("option",
      { textContent: `${layer.groups.length ? `layer ${layerNumbers.indexOf(i) + 1}` : "an affine map"} (${layer.names.length} column${layer.names.length === 1 ? "" : "s"})`,
      selected: i + 1 === now.after })));
  byId("after").append(make("label", {}, "after", pick));
}
function drawStream(states) {
  const { state, columns } = states[now.after], names = now.after ? scene.layers[now.after - 1].names : scene.columns,
    rows = state.length / columns;
  const live = names.map((_, c) => c).filter((c) => columns <= COLUMNS
    || Array.from({ length: rows }, (_, r) => state[r * columns + c]).some((v) => v !== 0));
  const some = live.slice(0, COLUMNS), most = Math.max(1e-300, ...state.map(Math.abs)), first = scene.registers;
  const label = (r) => (r < first ? `register ${r}` : tokenProgram
    ? `${r - first}: ${r - first < now.point.length ? plainValue(words[now.point[r - first]]) : "padding"}`
    : rows - first > 1 ? `token ${r - first}` : "value");
  const down = rows === 1; // one token: a list reads better than a row
  const cell = (r, c) => { const v = state[r * columns + c], w = Math.sqrt(Math.abs(v) / most) || 0;
    return make("td", { className: `${v < 0 ? "minus" : ""} ${deepness(w)}`, style: `--w: ${w.toFixed(3)}`,
    textContent: show(v, 4), title: `${names[c]}: ${show(v, 9)}` }); };
  const table = make("table", { className: "cells" });
  if (down) table.append(make("tbody", {}, ...some.map((c) => make("tr", {},
    make("th", { scope: "row", textContent: names[c], style: "text-align: left; white-space: normal" }), cell(0, c)))));
  else {
    table.append(make("thead", {}, make("tr", {}, make("th", { scope: "col", textContent: "row" }),
      ...some.map((c) => make("th", { scope: "col", className: "tall", textContent: shortened(names[c]), title: names[c] })))),
      make("tbody", {}, ...Array.from({ length: Math.min(rows, ROWS) },
        (_, r) => make("tr", {}, make("th", { scope: "row", textContent: label(r) }),
        ...some.map((c) => cell(r, c))))));
  }
  const cut = some.length < names.length || rows > ROWS;
  byId("columns").replaceChildren(scroller("the residual stream", table),
    cut ? make("p", { className: "quiet",
      textContent: `${some.length} of ${names.length} columns (zeros left out first) and ${Math.min(rows, ROWS)} of ${rows} rows.` })
      : "");
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
  if (parent !== window) parent.postMessage({ attnforge: { point: [...now.point],
    output: Array.from(seen.found.output) } }, "*");
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
  const heads = scene.units.reduce((sum, unit) => sum + unit.heads.length, 0),
    plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
  byId("about").textContent = `An attention-only network that runs in this page: ${plural(layerNumbers.length, "layer")}, ${plural(heads, "head")}, ${plural(scene.weightCount, "weight")}, ${scene.handed || scene.dtype}. ${scene.kind === "exact" ? "Exact by proof." : scene.bound !== null ? `${scene.word}: off by at most ${scene.boundText}${sized}.` : "Measured, not certified."}`;
  if (scene.handed) say(`Numbers enter and leave in ${scene.handed}; the heads are evaluated in ${scene.dtype}, and what they give is rounded once.`);
  say(scene.dtype === "float32"
    ? "The weights are those of the file, and every sum, product, quotient and exponential is rounded to float32, as the network’s own are: an exponential below −104 is 0."
    : "The weights are those of the file, and the arithmetic is that of doubles, which is the network’s own.",
    ` Sums of up to 16 terms are made one after the other, longer ones in halves${scene.rows ? "" : "; PyTorch may add in another order, which the certificate allows"}. The target is evaluated in doubles. Switching heads off or warming them leaves what is certified: the bound is for the network as built.`);
  say(`${carried ? `One pass takes about ${Math.round(network.cost).toLocaleString("en")} multiplications. ` : ""}Up to ${FOLLOWS.toExponential(0)} the page follows a slider, up to ${RUNS.toExponential(0)} it runs when the slider rests, without curves from ${SWEEPS.toExponential(0)} on; beyond that it shows the structure only. A hunt looks at up to ${HUNTED.toLocaleString("en")} points, fewer for large networks, and can be stopped.`);
  if (scene.certificate) byId("words").append(make("pre", { tabIndex: 0 },
    make("code", { textContent: scene.certificate })));
  if (network.cost > RUNS) {
    const why = carried ? `takes ${network.cost.toExponential(1)} multiplications a pass, more than the ${RUNS.toExponential(0)} that a page can follow`
      : `has ${plural(scene.numbers, "weight")}, more than the ${scene.mostNumbers.toLocaleString("en")} that a page carries`;
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
root.classList.toggle("framed", parent !== window);
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
buildWhich();
buildWorst();
buildProgram();
buildGrid();
buildChange();
buildAxes();
buildStream();
update();
sweep();
let wide = innerWidth, turned = 0; // a telephone's bars come and go as it scrolls: that changes the height alone
addEventListener("resize", () => {
  if (innerWidth === wide) return;
  wide = innerWidth;
  clearTimeout(turned);
  turned = setTimeout(() => { update(); sweep(); }, 150);
});

// A notebook or a page that shows this one in a frame may move it, and make it light or dark.
function isPoint(given) {
  if (!Array.isArray(given) || !given.every(Number.isFinite)) return false;
  return tokenProgram ? given.length > 0 && given.length <= scene.tokens
    && given.every((i) => Number.isInteger(i) && i >= 0 && i < words.length) : given.length === scene.inputs.length;
}
addEventListener("message", (event) => {
  const { go: given = null, theme = "" } = (event.source === parent && event.data?.attnforge) || {};
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  if (isPoint(given) && given.join() !== now.point.join()) go(tokenProgram ? given
    : given.map((x, i) => rounded(i, x)));
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
