// The page: what the reader does changes `now`, and everything is drawn again from it.

const byId = (id) => document.getElementById(id);
const scene = JSON.parse(byId("scene").textContent);

// Limits, in multiplications of one pass (a browser does about 1e8 a second) and in points.
const FOLLOWS = 2e6;      // below this the page follows a slider as it moves
const SWEEPS = 1e7;     // up to this it draws curves and sweeps temperatures unasked, a tenth of a second for a point
const RUNS = 5e7;         // up to this it runs when a slider comes to rest; beyond it does not run
const WORK = 4e9;         // of one hunt or one drawing: half a minute, in slices that leave the page alive
const SLICE = 12;         // milliseconds of such work at a time
const HUNTED = 4000;      // points of a hunt
const DRAWN = 161, MAPPED = 41, SWEPT = 24; // points of a curve, of a side of a map, and at each temperature of a sweep
const BARS = 16;          // slots that are drawn as bars
const ROWS = 40, COLUMNS = 48;  // of a matrix of weights, or of the stream, that are shown

// Weights that are too many are not in the page: there is nothing to run, and the structure is shown.
const carried = scene.numbers <= scene.mostNumbers;
if (scene.boundText) scene.boundText = plainly(scene.boundText);
const network = carried ? makeNetwork(scene) : { layers: [], round: (x) => x, handed: (x) => x, cost: Infinity };
const tokenProgram = scene.vocabulary !== null;
const words = scene.vocabulary?.map(readValue) ?? [];
// What the page compares with. A network of several programs has a target for each, and the page takes one at a time:
// `goal` is its meaning, `outputs` the values that its columns stand for, `firstColumn` where these begin.
const targets = !scene.target ? [] : (scene.target.each ?? [scene.target]).map((target) => ({ name: target.name,
  mean: tokenProgram ? makeTokenProgram(target) : makeProgram(target), values: target.outputs?.map(readValue) ?? null }));
let goal = null, outputs = null, firstColumn = 0;
function aim(number) {
  ({ mean: goal, values: outputs } = targets[number]);
  firstColumn = targets.slice(0, number).reduce((sum, { values }) => sum + (values?.length ?? 1), 0);
}
if (targets.length) aim(0);
// Where the page begins: somewhere inside, no two numbers alike, and short enough to read.
const middle = fitted(scene.inputs.map(({ lo, hi }, i) => network.handed(
  Math.min(Math.max(Number((lo + ((0.37 + 0.618 * i) % 1) * (hi - lo)).toPrecision(3)), lo), hi))), () => 0.5);
const placeOf = new Map(words.map((word, i) => [showValue(word), i]));
const families = [...new Set(scene.units.map((unit) => unit.family))];
const colourOf = (unit) => `f${families.indexOf(unit.family) % 6}`;
const layerNumbers = [...new Set(scene.units.map((unit) => unit.layer))];

const now = {
  point: tokenProgram ? scene.sequence.map((t) => placeOf.get(showValue(readValue(t))))
    : scene.start.length ? scene.start.map((x, i) => rounded(i, x)) : middle,
  off: new Set(), heat: new Map(), unit: 0, head: -1, over: [], query: 0,
    after: 1 + Math.max(-1, ...scene.units.map((unit) => unit.layer)),
  worst: null, x: 0, y: -1, drawn: 0,
};
const shownDigits = innerWidth < 420 ? 5 : scene.dtype === "float32" || innerWidth < 480 ? 7 : 12; // what fits a telephone
const sized = scene.rows ? " of the row’s largest value" : scene.relative ? " of the target’s size" : "";
const headNames = (unit, head = -1) => scene.units[unit].heads
  .filter((_, i) => head < 0 || i === head).map(([g, h]) => `${scene.units[unit].layer}.${g}.${h}`);
const chosen = () => (scene.units.length ? headNames(now.unit, now.head) : []);
const changed = () => now.off.size > 0 || now.heat.size > 0;
const change = () => ({ off: now.off, heat: now.heat });

// ---- network and target at a point

function decoded(point, found) {
  return point.map((_, t) => {
    const row = found.output.subarray(t * found.columns + firstColumn, (t + 1) * found.columns);
    if (!outputs) return row[0];
    let best = 0;
    for (let c = 1; c < outputs.length; c += 1) if (row[c] > row[best]) best = c;
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
  const each = meant?.map((v, i) => Math.abs(values[i] - v)) ?? null, row = scene.rows ? rowOf(point) : null;
  const whole = scene.relative && meant ? Math.max(...meant.map(Math.abs)) : 1;
  const scale = (i) => (row ? scene.rows.weight[i] * row.largest + scene.rows.bias[i] : whole);
  return { found, values, meant, each, outside: row?.outside ?? "", error: each
    ? Math.max(...each.map((e, i) => (Number.isNaN(e) ? Infinity : e === 0 ? 0 : e / scale(i)))) : null };
}

// ---- rows that a norm is for: those whose variance lies in an interval, which is no box

function rowOf(point) {
  const { variance: [lo, hi], offset, eps } = scene.rows, n = point.length;
  const mean = offset === null ? 0 : point.reduce((a, b) => a + b, 0) / n;
  const variance = point.reduce((a, b) => a + (b - mean) ** 2, 0) / n, deviation = Math.sqrt(variance);
  const word = offset === null ? "mean square" : "variance";
  const outside = !(variance >= lo && variance <= hi)
    ? `the ${word} of this row is ${show(variance, 4)}, outside [${show(lo, 4)}, ${show(hi, 4)}]`
    : offset !== null && Math.abs(mean) > offset * deviation
      ? `the mean of this row is more than ${show(offset, 4)} standard deviations from 0` : "";
  return { mean, variance, outside, largest: Math.max(...point.map((x) => Math.abs(x - mean))) / Math.sqrt(variance + eps) };
}
// A row next to one, with a variance inside: unchanged where it is inside already, else anywhere in the interval.
function fitted(point, share = draws) {
  if (!scene.rows || !rowOf(point).outside) return point;
  const { variance: [lo, hi] } = scene.rows, { mean, variance } = rowOf(point);
  const factor = Math.sqrt(lo * (hi / lo) ** (0.01 + 0.98 * share()) / (variance || 1));
  return point.map((x, i) => rounded(i, mean + factor * (x - mean)));
}
function rounded(i, value) {
  const { lo, hi } = scene.inputs[i];
  return network.handed(Math.min(Math.max(value, lo), hi));
}

// The shortest text that is read back as the same number of the dtype.
function exactly(x) {
  for (let digits = 1; digits < 17;
    digits += 1) if (network.handed(Number(x.toPrecision(digits))) === x) return String(Number(x.toPrecision(digits)));
  return String(x);
}

const widthOf = (id) => Math.max(260, Math.min(1000, byId(id).clientWidth || 640));
  // drawings have a letter of 12 pixels

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
  if (tokenProgram) return Array.from({ length: 1 + Math.floor(draws() * scene.tokens) },
    () => Math.floor(draws() * words.length));
  return fitted(scene.inputs.map(({ lo, hi }, i) => {
    const u = draws();
    return rounded(i, u < 0.06 ? lo : u > 0.94 ? hi : lo + draws() * (hi - lo)); // ends count: errors are large there
  }));
}
function near(point, reach) {
  if (tokenProgram) {
    const next = [...point], i = Math.floor(draws() * next.length);
    if (draws() < 0.2 && next.length < scene.tokens) next.splice(i, 0, Math.floor(draws() * words.length));
    else if (draws() < 0.2 && next.length > 1) next.splice(i, 1);
    else next[i] = Math.floor(draws() * words.length);
    return next;
  }
  return fitted(point.map((x, i) => rounded(i,
    x + reach * (draws() + draws() - 1) * (scene.inputs[i].hi - scene.inputs[i].lo))));
}
