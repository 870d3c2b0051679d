// Network, target and error along one input, or over two.

function buildAxes() {
  if (tokenProgram) { document.querySelectorAll("[data-numbers]").forEach((node) => { node.hidden = true; }); return; }
  const pick = (id, label, names, chosenAt, set) => {
    const select = make("select", { id, onchange: () => { set(select.selectedIndex); drawCurves(); } },
      ...names.map((name, i) => make("option", { textContent: name, selected: i === chosenAt })));
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
  if (network.cost > SWEEPS) { byId("curves").replaceChildren(tooSlow()); return; }
  if (now.y >= 0 && now.y !== now.x) { drawMaps(); return; }
  const { lo, hi, name } = scene.inputs[now.x], count = affordable(DRAWN);
  function* work() {
    const xs = [], net = [], meant = [];
    let left = 0; // points that a norm's certificate does not speak of
    for (let i = 0; i < count; i += 1) {
      const point = at(lo + (i / (count - 1)) * (hi - lo)), seen = compare(point);
      if (seen.outside) { left += 1; yield; continue; }
      xs.push(point[now.x]);
      net.push(seen.values[now.drawn]);
      if (seen.meant) meant.push(seen.meant[now.drawn]);
      yield;
    }
    return { xs, net, meant, left };
  }
  job("curves", work(), ({ xs, net, meant, left }) => {
    if (!xs.length) {
      byId("curves").replaceChildren(make("p", { className: "quiet", id: "curves-note",
        textContent: "No row along this line has a variance for which the norm is certified." }));
      return;
    }
    const all = [...net, ...meant].filter(Number.isFinite), here = now.point[now.x], width = widthOf("curves");
    const low = Math.min(...all), high = Math.max(...all), pad = 0.06 * (high - low || 1),
      out = scene.outputs[now.drawn];
    const colour = { net: "var(--net)", goal: "color-mix(in srgb, var(--goal) 60%, var(--surface))" };
    const parts = [make("div", { className: "legend" },
      make("span", {}, make("i", { style: `color: ${colour.net}` }), "network"), meant.length
      ? make("span", {}, make("i", { style: `color: ${colour.goal}; border-top-width: 8px` }), "target") : ""),
      panel({ width, height: 260, x: [lo, hi], y: [low - pad, high + pad],
        label: `${out} along ${name}: network${meant.length ? " and target" : ""}`, xName: meant.length ? "" : name,
        yName: out.length < 40 ? out : "output",
        draw: (sx, sy, frame) => [curve(xs, meant, sx, sy, colour.goal, 8), curve(xs, net, sx, sy, colour.net, 2.5),
          upright(here, sx, frame)] })];
    if (meant.length) {
      const error = net.map((v, i) => v - meant[i]), size = Math.max(...error.filter(Number.isFinite).map(Math.abs), 0),
        bound = scene.relative ? 0 : scene.bound ?? 0, most = 1.15 * Math.max(size, bound) || 1;
      parts.push(panel({ width, height: 170, x: [lo, hi], y: [-most, most], xName: name, yName: "network − target",
        label: `The difference along ${name}, at most ${show(size, 4)}${bound ? `; the bound is ${scene.boundText}` : ""}`,
        draw: (sx, sy, frame) => [
          ...(bound ? [svg("rect", { x: frame.left, width: frame.right - frame.left, y: sy(bound),
            height: Math.max(1, sy(-bound) - sy(bound)), fill: "var(--band)" })] : []),
          curve(xs, error, sx, sy, "var(--miss)", 2), upright(here, sx, frame)] }),
      make("p", { className: "quiet", id: "curves-note",
        textContent: `At ${xs.length} points${left ? ` (the other ${left} have a variance outside, where nothing is certified)` : ""} the difference is at most ${show(size, 4)}${bound ? `; the band is the certified bound, ${scene.boundText}` : ""}. The other inputs are where the sliders are.` }));
    }
    byId("curves").replaceChildren(...parts);
  });
}
function drawMaps() {
  const [X, Y] = [scene.inputs[now.x], scene.inputs[now.y]],
    n = Math.max(5, Math.min(MAPPED, Math.floor(Math.sqrt(affordable(MAPPED ** 2)))));
  function* work() {
    const net = [], error = [];
    for (let i = 0; i < n * n; i += 1) {
      const point = at(X.lo + ((i % n) / (n - 1)) * (X.hi - X.lo),
        Y.lo + (Math.floor(i / n) / (n - 1)) * (Y.hi - Y.lo)), seen = compare(point);
      net.push(seen.values[now.drawn]);
      if (seen.meant) error.push(Math.abs(seen.values[now.drawn] - seen.meant[now.drawn]));
      yield;
    }
    return { net, error };
  }
  job("curves", work(), ({ net, error }) => {
    const map = (title, values, lo, hi) => {
      const canvas = heatMap(values, n, lo, hi,
        `${title} over ${X.name} and ${Y.name}, from ${show(Math.min(...values), 4)} to ${show(Math.max(...values), 4)}`);
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect(), u = (event.clientX - box.left) / box.width,
          v = 1 - (event.clientY - box.top) / box.height;
        go(at(X.lo + u * (X.hi - X.lo), Y.lo + v * (Y.hi - Y.lo)));
      });
      const mark = make("i", { className: "mark", "aria-hidden": "true" }), share = (v, { lo, hi }) => (v - lo) / (hi - lo || 1);
      mark.style.left = `${100 * share(now.point[now.x], X)}%`;
      mark.style.bottom = `${100 * share(now.point[now.y], Y)}%`;
      return make("div", {}, make("h3", { textContent: title }), make("div", { className: "map" }, canvas, mark),
        make("div", { className: "scale" }, show(lo, 4), make("i"), show(hi, 4)));
    };
    const parts = [map(`network: ${scene.outputs[now.drawn]}`, net, Math.min(...net), Math.max(...net))];
    const most = Math.max(...error), held = scene.bound && !scene.relative && most <= scene.bound;
    if (error.length) parts.push(map(held ? "error, up to the certified bound" : "error", error, 0, held ? scene.bound
      : most));
    byId("curves").replaceChildren(make("div", { className: "maps" }, ...parts),
      make("p", { className: "quiet", id: "curves-note",
      textContent: `${X.name} from ${show(X.lo, 4)} to ${show(X.hi, 4)} to the right, ${Y.name} from ${show(Y.lo, 4)} to ${show(Y.hi, 4)} upwards, ${n} by ${n} points${error.length ? `; the largest difference is ${show(Math.max(...error), 4)}` : ""}. The ring is where the sliders are; a click goes there.` }));
  });
}
