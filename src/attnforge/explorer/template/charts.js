// Small drawings in SVG and on canvas, in the page's colours.

const POWER = "M10 2v8M5.2 5a7 7 0 1 0 9.6 0"; // the sign on a switch
const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && !/^(aria|role)/.test(name)) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
// An exponent as JavaScript writes it: Python puts a zero before it.
const plainly = (text) => text.replace(/e([-+])0(?=\d)/g, "e$1");
// A name that is too long without its middle: names of columns often differ at their ends.
const shortened = (name) => (name.length > 60 ? `${name.slice(0, 40)}…${name.slice(-16)}` : name);
const tooSlow = () => make("p", { className: "quiet",
  textContent: `Not drawn: one pass is more than ${SWEEPS.toExponential(0)} multiplications, and a page must not stand still.` });
// A button that can be pressed or not; where it had the focus and cannot, the focus goes to its neighbour.
function allow(id, can, neighbour) {
  const node = byId(id), held = document.activeElement === node;
  node.disabled = !can;
  if (held && !can) byId(neighbour)?.focus();
}
// A part with a name, which says so where it is wider than the screen, and which keys can scroll then.
function scroller(name, ...children) {
  const node = make("div", { className: "scroller" }, ...children),
    cue = make("p", { className: "cue", textContent: "Wider than the screen: scroll sideways.", hidden: true });
  node.setAttribute("role", "group");
  node.setAttribute("aria-label", name);
  new ResizeObserver(() => {
    cue.hidden = node.scrollWidth <= node.clientWidth + 1;
    if (cue.hidden) node.removeAttribute("tabindex"); else node.tabIndex = 0;
  }).observe(node);
  return make("div", {}, cue, node);
}
function show(x, digits = 6) {
  if (!Number.isFinite(x)) return String(x);
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-3 || size >= 1e6) return x.toExponential(Math.min(3, digits - 1)).replace("e+", "e").replace(/\.?0*e/,
    "e");
  return String(Number(x.toPrecision(digits)));
}

// Round numbers between two others, about `count` of them.
function ticks(lo, hi, count = 5) {
  const raw = (hi - lo) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) ?? raw;
  const found = [];
  for (let i = Math.ceil(lo / step); i * step <= hi + 1e-9 * step && found.length < 20; i += 1) found.push(i * step);
  return found;
}

// An interval that can be drawn: one that is a point, or nearly, is widened.
function spread([lo, hi]) {
  const size = Math.max(Math.abs(lo), Math.abs(hi));
  return hi - lo > 1e-9 * size ? [lo, hi] : [lo - (size || 1), hi + (size || 1)];
}

// A panel: axes and, over them, what `draw(x, y)` returns for the two scales.
function panel({ width = 640, height = 220, x, y, label, xName = "", yName = "", draw, log = false }) {
  const left = 64, right = 12, top = yName ? 26 : 12, bottom = xName ? 40 : 24;
  const [x0, x1] = spread(x), [y0, y1] = spread(y);
  const sx = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
  const sy = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label });
  for (const t of ticks(y0, y1, height > 150 ? 5 : 3)) {
    if (log && !Number.isInteger(t)) continue;
    node.append(svg("line", { x1: left, x2: width - right, y1: sy(t), y2: sy(t), class: "rule" }));
    const text = svg("text", { x: left - 6, y: sy(t) + 4, "text-anchor": "end" }, log ? `1e${t}` : show(t, 4));
    node.append(text);
  }
  for (const t of ticks(x0, x1, width > 400 ? 6 : 4)) {
    node.append(svg("text", { x: sx(t), y: height - bottom + 16, "text-anchor": "middle" }, show(t, 4)));
    node.append(svg("line", { x1: sx(t), x2: sx(t), y1: height - bottom, y2: height - bottom + 4, class: "axis" }));
  }
  node.append(svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }));
  if (xName) node.append(svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xName));
  if (yName) node.append(svg("text", { x: 0, y: 10, "text-anchor": "start" }, yName));
  const clip = `clip${panel.count = (panel.count ?? 0) + 1}`;
  node.append(svg("clipPath", { id: clip }, svg("rect",
    { x: left, y: top - 6, width: width - left - right, height: height - top - bottom + 12 })));
  node.append(svg("g", { "clip-path": `url(#${clip})` },
    ...draw(sx, sy, { left, right: width - right, top, bottom: height - bottom })));
  return node;
}
function curve(xs, ys, sx, sy, colour, width = 2) {
  let path = "", pen = "M";
  xs.forEach((x, i) => {
    if (Number.isFinite(ys[i])) { path += `${pen}${sx(x).toFixed(1)} ${sy(ys[i]).toFixed(1)}`; pen = "L";
      } else pen = "M";
  });
  return svg("path", { d: path, fill: "none", stroke: colour, "stroke-width": width,
    "stroke-linejoin": "round" });
}
const upright = (x, sx, frame, colour = "var(--soft)") => svg("line",
  { x1: sx(x), x2: sx(x), y1: frame.top, y2: frame.bottom, stroke: colour, "stroke-dasharray": "3 3" });

// Letters on a shade of that depth, white or black, whichever can be read: the two change over at these depths.
const deepness = (w) => (w > 0.93 ? "deep" : w > 0.645 ? "middling" : "");
// Viridis, by five of its colours.
const SHADES = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function shade(t) {
  const place = Math.min(Math.max(t, 0), 1) * (SHADES.length - 1), i = Math.min(Math.floor(place), SHADES.length - 2);
  return SHADES[i].map((a, c) => Math.round(a + (place - i) * (SHADES[i + 1][c] - a)));
}
// A square of n by n values, first row at the bottom.
function heatMap(values, n, lo, hi, label) {
  const canvas = make("canvas", { width: n, height: n, role: "img" });
  canvas.setAttribute("aria-label", label);
  const context = canvas.getContext("2d"), image = context.createImageData(n, n);
  values.forEach((v, i) => {
    const [row, column] = [n - 1 - Math.floor(i / n), i % n], at = 4 * (row * n + column);
    const [r, g, b] = Number.isFinite(v) ? shade(hi > lo ? (v - lo) / (hi - lo) : 0) : [128, 128, 128];
    image.data.set([r, g, b, 255], at);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}
