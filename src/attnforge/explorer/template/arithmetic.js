// The network, from its stored weights, in the arithmetic of its dtype. For float32 every product, sum, quotient and
// exponential is rounded to float32 before anything else sees it, so that what vanishes in the network vanishes here:
// exp(-104) is 0. Sums of up to 16 terms go one after the other, longer ones are halved; certificates allow any order.

const last = (list) => list[list.length - 1];
const hasOwn = (table, name) => Object.prototype.hasOwnProperty.call(table, name);

// Numbers as stored, little-endian, which is what browsers run on.
function decodeNumbers(text, kind) {
  return new kind(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

// The nearest bfloat16, ties to even: the upper half of a float32.
const oneFloat = new Float32Array(1), oneWord = new Uint32Array(oneFloat.buffer);
function toBfloat16(x) {
  oneFloat[0] = x;
  if (Number.isFinite(oneFloat[0])) oneWord[0] = (oneWord[0] + 0x7fff + ((oneWord[0] >>> 16) & 1)) & 0xffff0000;
  return oneFloat[0];
}

function makeNetwork(scene) {
  const round = scene.dtype === "float32" ? Math.fround : (x) => x;
  const handed = scene.handed === "bfloat16" ? toBfloat16 : round; // what goes in and what comes out
  const kind = scene.dtype === "float32" ? Float32Array : Float64Array;
  const numbers = decodeNumbers(scene.weights, kind), places = decodeNumbers(scene.places, Uint32Array);
  const size = (shape) => shape.reduce((a, b) => a * b, 1);
  function table(ref) { // of a table that is mostly zeros only the other numbers are in the page
    if (!ref) return null;
    if (ref.kept === undefined) return { data: numbers.subarray(ref.at, ref.at + size(ref.shape)), shape: ref.shape };
    const data = new kind(size(ref.shape));
    for (let i = 0; i < ref.kept; i += 1) data[places[ref.places + i]] = numbers[ref.at + i];
    return { data, shape: ref.shape };
  }

  // The nonzero entries of a matrix (rows, columns) by column: zeros add nothing, exactly.
  function sparse(data, start, rows, columns) {
    const from = new Int32Array(columns + 1), row = [], value = [];
    for (let c = 0; c < columns; c += 1) {
      for (let r = 0; r < rows; r += 1) {
        const v = data[start + r * columns + c];
        if (v !== 0) { row.push(r); value.push(v); }
      }
      from[c + 1] = row.length;
    }
    return { from, row: Int32Array.from(row), value: Float64Array.from(value), columns };
  }
  // Long sums are halved: one term after the other, rounding would grow with the width of a row.
  const LONG = 16;
  function part(state, at, matrix, from, to) {
    if (to - from > LONG) {
      const half = (from + to) >> 1;
      return round(part(state, at, matrix, from, half) + part(state, at, matrix, half, to));
    }
    let sum = 0;
    for (let e = from; e < to; e += 1) sum = round(sum + round(state[at + matrix.row[e]] * matrix.value[e]));
    return sum;
  }
  const times = (state, at, matrix, column) => part(state, at, matrix, matrix.from[column], matrix.from[column + 1]);
  function inner(q, keys, at, from, to) {
    if (to - from > LONG) {
      const half = (from + to) >> 1;
      return round(inner(q, keys, at, from, half) + inner(q, keys, at, half, to));
    }
    let sum = 0;
    for (let k = from; k < to; k += 1) if (q[k] !== 0) sum = round(sum + round(q[k] * keys[at + k]));
    return sum;
  }

  const perHead = (ref, heads) => {
    const found = table(ref);
    if (!found) return null;
    const [first, ...rest] = found.shape, step = size(rest);
    return Array.from({ length: heads }, (_, h) => ({ data: found.data, at: first === 1 ? 0 : h * step, shape: rest }));
  };
  const maps = (ref, heads) => perHead(ref, heads)?.map((m) => sparse(m.data, m.at, m.shape[0], m.shape[1])) ?? null;

  const layers = scene.layers.map((layer) => ({
    width: layer.names.length,
    residual: layer.residual,
    S: layer.S ? sparse(table(layer.S).data, 0, layer.S.shape[0], layer.S.shape[1]) : null,
    s: table(layer.s)?.data ?? null,
    groups: layer.groups.map((group) => {
      const t = group.tables, n = group.heads;
      return {
        scope: group.scope, causal: group.causal, heads: n, keys: group.keys, values: group.values, slots: group.slots,
        W_Q: maps(t.W_Q, n), b_Q: perHead(t.b_Q, n), W_K: maps(t.W_K, n), b_K: perHead(t.b_K, n),
        W_V: maps(t.W_V, n), b_V: perHead(t.b_V, n), M_K: perHead(t.M_K, n), M_V: perHead(t.M_V, n),
          W_O: maps(t.W_O, n),
      };
    }),
  }));

  // state W + b of one head for row `at` of the state, into `out` from `to` on.
  function project(state, at, W, b, width, out, to) {
    for (let k = 0; k < width; k += 1) {
      const sum = W ? times(state, at, W, k) : 0;
      out[to + k] = b ? (W ? round(sum + b.data[b.at + k]) : b.data[b.at + k]) : sum;
    }
  }

  // One head over all rows: adds to `out`; `watch` gets weights, logits and queries.
  function attend(group, h, state, rows, columns, out, width, heat, watch) {
    const { keys, values, slots, scope } = group;
    const W_K = group.W_K?.[h], b_K = group.b_K?.[h], W_V = group.W_V?.[h], b_V = group.b_V?.[h];
    const M_K = group.M_K?.[h], M_V = group.M_V?.[h], W_O = group.W_O[h];
    const seen = scope === "tokens" ? rows : scope === "self" ? 1 : 0;
    const tokenKeys = seen ? new Float64Array(rows * keys) : null, tokenValues = seen ? new Float64Array(rows * values)
      : null;
    for (let r = 0; seen && r < rows; r += 1) {
      project(state, r * columns, W_K, b_K, keys, tokenKeys, r * keys);
      project(state, r * columns, W_V, b_V, values, tokenValues, r * values);
    }
    const q = new Float64Array(keys), logits = new Float64Array(seen + slots), weights = new Float64Array(seen + slots);
    const read = new Float64Array(values);
    for (let r = 0; r < rows; r += 1) {
      project(state, r * columns, group.W_Q[h], group.b_Q?.[h], keys, q, 0);
      const visible = scope === "tokens" && group.causal ? r + 1 : seen;
      let most = -Infinity;
      for (let j = 0; j < seen + slots; j += 1) {
        if (j >= visible && j < seen) { logits[j] = -Infinity; continue; }
        const from = j < seen ? tokenKeys : M_K.data;
        const at = j < seen ? (scope === "self" ? r : j) * keys : M_K.at + (j - seen) * keys;
        let sum = inner(q, from, at, 0, keys);
        if (heat !== 1) sum = round(sum * heat);
        logits[j] = sum;
        if (sum > most) most = sum;
      }
      let total = 0;
      for (let j = 0; j < seen + slots; j += 1) {
        weights[j] = round(Math.exp(round(logits[j] - most)));
        total = round(total + weights[j]);
      }
      for (let j = 0; j < seen + slots; j += 1) weights[j] = round(weights[j] / total);
      for (let v = 0; v < values; v += 1) {
        let sum = 0;
        for (let j = 0; j < seen; j += 1) {
          if (weights[j] !== 0) sum = round(sum + round(weights[j] * tokenValues[(scope === "self" ? r
            : j) * values + v]));
        }
        let memory = 0;
        for (let j = 0; j < slots; j += 1) {
          if (weights[seen + j] !== 0) memory = round(memory + round(weights[seen + j] * M_V.data[M_V.at + j * values + v]));
        }
        read[v] = slots ? (seen ? round(sum + memory) : memory) : sum;
      }
      for (let c = 0; c < width; c += 1) {
        for (let e = W_O.from[c]; e < W_O.from[c + 1]; e += 1) {
          out[r * width + c] = round(out[r * width + c] + round(read[W_O.row[e]] * W_O.value[e]));
        }
      }
      if (watch) {
        watch.weights.push(Float64Array.from(weights));
        watch.logits.push(Float64Array.from(logits));
        watch.queries.push(Float64Array.from(q));
      }
    }
  }

  // All layers. `change` is { off: Set of "layer.group.head", heat: Map of the same to a factor of the logits,
  // watch: one of them, states: whether to keep the state after each layer }.
  function run(start, rows, change = {}) {
    let state = start, columns = scene.columns.length;
    const kept = change.states ? [{ state, columns }] : null;
    let watched = null;
    layers.forEach((layer, number) => {
      const { width } = layer, out = new Float64Array(rows * width), part = new Float64Array(rows * width);
      let any = false;
      const add = () => {
        for (let i = 0; i < out.length; i += 1) out[i] = any ? round(out[i] + part[i]) : part[i];
        any = true;
      };
      layer.groups.forEach((group, g) => {
        part.fill(0);
        for (let h = 0; h < group.heads; h += 1) {
          const name = `${number}.${g}.${h}`;
          const watch = change.watch === name ? { weights: [], logits: [], queries: [], state, columns } : null;
          const silent = change.off?.has(name);
          if (watch) watched = watch;
          if (!silent || watch) {
            const into = silent ? new Float64Array(part.length) : part;
            attend(group, h, state, rows, columns, into, width, change.heat?.get(name) ?? 1, watch);
          }
        }
        add();
      });
      if (layer.S) {
        for (let r = 0; r < rows; r += 1) for (let c = 0; c < width; c += 1) part[r * width + c] = times(state,
          r * columns, layer.S, c);
        add();
      }
      if (layer.residual) { part.set(state); add(); }
      if (layer.s) {
        for (let r = 0; r < rows; r += 1) for (let c = 0; c < width; c += 1) part[r * width + c] = layer.s[c];
        add();
      }
      state = out;
      columns = width;
      kept?.push({ state, columns });
    });
    return { state, columns, states: kept, watched };
  }

  // How points and sequences enter. A sequence is a list of places in the vocabulary.
  const beside = table(scene.constants), embed = table(scene.embed), positions = table(scene.positions);
  const E = embed ? sparse(transposed(embed), 0, embed.shape[1], embed.shape[0]) : null;
  function transposed({ data, shape: [rows, columns] }) {
    const out = new Float64Array(data.length);
    for (let r = 0; r < rows; r += 1) for (let c = 0; c < columns; c += 1) out[c * rows + r] = data[r * columns + c];
    return out;
  }
  function enter(point) {
    const tokens = scene.vocabulary ? (embed ? scene.tokens : point.length) : scene.tokens, { width } = scene;
    const rows = new Float64Array(tokens * width);
    if (scene.vocabulary) {
      point.forEach((place, t) => { rows[t * width + place] = 1; rows[t * width + width - 1] = 1; });
    } else {
      for (let i = 0; i < rows.length; i += 1) rows[i] = handed(point[i]);
    }
    const columns = scene.columns.length, first = scene.registers, state = new Float64Array((first + tokens) * columns);
    if (embed) {
      state.set(positions.data.subarray(0, first * columns));
      for (let t = 0; t < tokens; t += 1) {
        for (let c = 0; c < columns; c += 1) {
          const at = (first + t) * columns + c;
          state[at] = round(times(rows, t * width, E, c) + positions.data[at]);
        }
      }
    } else {
      const extra = columns - width;
      for (let t = 0; t < tokens; t += 1) {
        state.set(rows.subarray(t * width, (t + 1) * width), t * columns);
        if (extra) state.set(beside.data.subarray(t * extra, (t + 1) * extra), t * columns + width);
      }
    }
    return { state, rows: first + tokens };
  }
  function forward(point, change) {
    const { state, rows } = enter(point), found = run(state, rows, change);
    const kept = scene.firstRow ? 1 : scene.vocabulary ? point.length : scene.tokens;
    const from = scene.registers * found.columns;
    const output = found.state.subarray(from, from + kept * found.columns);
    return { ...found, output: scene.handed ? output.map(handed) : output };
  }

  // Multiplications of one pass: what decides whether the page follows a slider.
  function cost(rows) {
    const count = (list) => (list ? list.reduce((sum, m) => sum + m.value.length, 0) : 0);
    let sum = 0;
    for (const layer of layers) {
      sum += rows * (layer.S ? layer.S.value.length : 0);
      for (const g of layer.groups) {
        const seen = g.scope === "tokens" ? rows : g.scope === "self" ? 1 : 0;
        sum += rows * (count(g.W_Q) + count(g.W_K) + count(g.W_V) + count(g.W_O));
        sum += rows * g.heads * (seen + g.slots) * (g.keys + g.values + 8); // an exponential and a division are worth 8
      }
    }
    return sum;
  }
  return { forward, layers, round, handed, cost: cost(scene.registers + scene.tokens) };
}
