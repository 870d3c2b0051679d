// What the network should compute, in doubles: functions of one number, and programs of operations.

const sigmoid = (y) => (y >= 0 ? 1 / (1 + Math.exp(-y)) : Math.exp(y) / (1 + Math.exp(y)));
const softplus = (y) => Math.max(y, 0) + Math.log1p(Math.exp(-Math.abs(y)));

// erf by its series of positive terms, erfc by its continued fraction where the series would cancel.
function erfSeries(x) {
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-18 * Math.abs(sum); n += 1) {
    term *= (2 * x * x) / (2 * n + 1);
    sum += term;
  }
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}
function erfcFraction(x) {
  let t = 0;
  for (let n = 120; n > 0; n -= 1) t = n / 2 / (x + t); // 120 terms: enough from x = 2 on
  return Math.exp(-x * x) / (Math.sqrt(Math.PI) * (x + t));
}
const erf = (x) => (Math.abs(x) < 2 ? erfSeries(x) : Math.sign(x) * (1 - erfcFraction(Math.abs(x))));
const erfc = (x) => (x < 2 ? (x > -2 ? 1 - erfSeries(x) : 2 - erfcFraction(-x)) : erfcFraction(x));

const SELU_ALPHA = 1.6732632423543772, SELU_SCALE = 1.0507009873554805; // as PyTorch has them
const clamp = (y, lo, hi) => Math.min(Math.max(y, lo), hi);

const FUNCTIONS = {
  identity: (y) => y, square: (y) => y * y, cube: (y) => y * y * y, reciprocal: (y) => 1 / y,
  sqrt: Math.sqrt, rsqrt: (y) => 1 / Math.sqrt(y), exp: Math.exp, exp2: (y) => 2 ** y, expm1: Math.expm1,
  log: Math.log, log2: Math.log2, log10: Math.log10, log1p: Math.log1p, xlogx: (y) => (y > 0 ? y * Math.log(y) : 0),
  sin: Math.sin, cos: Math.cos, tan: Math.tan, asin: Math.asin, acos: Math.acos, atan: Math.atan,
  sinh: Math.sinh, cosh: Math.cosh, tanh: Math.tanh, asinh: Math.asinh, acosh: Math.acosh, atanh: Math.atanh,
  sigmoid, logsigmoid: (y) => -softplus(-y), erf, erfc,
  softplus: (y, threshold) => (threshold !== undefined && y > threshold ? y : softplus(y)),
  gelu: (y) => 0.5 * y * erfc(-Math.SQRT1_2 * y),
  gelu_tanh: (y) => y * sigmoid(2 * Math.sqrt(2 / Math.PI) * (y + 0.044715 * y * y * y)),
  quick_gelu: (y) => y * sigmoid(1.702 * y), silu: (y) => y * sigmoid(y), mish: (y) => y * Math.tanh(softplus(y)),
  relu: (y) => Math.max(y, 0), abs: Math.abs, relu6: (y) => clamp(y, 0, 6), hardtanh: (y) => clamp(y, -1, 1),
  hardsigmoid: (y) => clamp((y + 3) / 6, 0, 1), hardswish: (y) => (y * clamp(y + 3, 0, 6)) / 6,
  squared_relu: (y) => Math.max(y, 0) ** 2, softsign: (y) => y / (1 + Math.abs(y)),
  selu: (y) => SELU_SCALE * (y > 0 ? y : SELU_ALPHA * Math.expm1(y)),
  leaky_relu: (y, slope = 0.01) => (y > 0 ? y : slope * y), elu: (y, alpha = 1) => (y > 0 ? y : alpha * Math.expm1(y)),
  power: (y, p) => y ** p, shifted_log: (y, shift) => Math.log(y + shift),
  piecewise_linear: (y, xs, ys) => {
    let i = 1;
    while (i < xs.length - 1 && y > xs[i]) i += 1;
    const t = (y - xs[i - 1]) / (xs[i] - xs[i - 1]);
    return ys[i - 1] + t * (ys[i] - ys[i - 1]);
  },
  lines: (y, knots, lines) => {
    const [slope, at] = lines[knots.filter((k) => y > k).length];
    return slope * y + at;
  },
  logistic: (y, rate, high,
    low) => sigmoid(rate * y) * (high[0] * y + high[1]) + sigmoid(-rate * y) * (low[0] * y + low[1]),
};

// A function of one number from its description; its argument is moved into the closed ends of its domain first.
function makeFunction(data) {
  const lo = data.lo ?? -Infinity, hi = data.hi ?? Infinity;
  if (data.name) {
    const f = FUNCTIONS[data.name];
    if (!hasOwn(FUNCTIONS, data.name)) throw new Error(`no function ${data.name}`);
    return (y) => f(clamp(y, lo, hi), ...data.args);
  }
  const nodes = data.nodes.map(([word, ...rest]) => {
    if (word === "product") return [word, rest[0].map(([i, f]) => [i, makeFunction(f)])];
    if (word === "call") return [word, rest[0], makeFunction(rest[1])];
    return [word, ...rest];
  });
  const value = (y) => {
    const found = new Float64Array(nodes.length);
    nodes.forEach((node, i) => { found[i] = nodeValue(node, y, found); });
    return found[nodes.length - 1];
  };
  return (given) => {
    const y = clamp(given, lo, hi);
    const patch = data.patches.find((p) => Math.abs(y - p.at) < p.radius);
    return patch ? patch.terms.reduceRight((sum, c) => sum * (y - patch.at) + c, 0) : value(y);
  };
}
function nodeValue([word, a, b], y, found) {
  switch (word) {
    case "number": return a;
    case "y": return y;
    case "sum": return b.reduce((sum, [kind, i, factor]) => sum + factor * (
      kind === "expm1" ? Math.expm1(found[i]) : kind ? Math.sin(found[i] / 2) ** 2 : found[i]), a);
    case "product": return a.reduce((product, [i, f]) => product * f(found[i]), 1);
    case "log1p": return Math.log1p(a.reduce((sum, [i, c]) => sum + c * found[i], 0));
    case "call": return b(found[a]);
    default: throw new Error(`no node ${word}`);
  }
}

// A program at a flat point: every value is an array of rows, one for each token.
const softmaxOf = (row) => {
  const most = Math.max(...row), e = row.map((x) => Math.exp(x - most)), sum = e.reduce((a, b) => a + b, 0);
  return e.map((x) => x / sum);
};
const mean = (row) => row.reduce((a, b) => a + b, 0) / row.length;
const OPERATIONS = {
  constant: (op) => () => op.value,
  linear: (op) => (...parts) => parts[0].map((_, t) => op.bias.map((b, c) => parts.reduce(
    (sum, part, i) => part[t].reduce((s, x, r) => s + x * op.weights[i][r][c], sum), b))),
  mix: (op) => (x) => op.matrix.map((row) => x[0].map((_, c) => row.reduce((sum, m, t) => sum + m * x[t][c], 0))),
  apply: (op) => { const f = makeFunction(op.function); return (x) => x.map((row) => row.map((y) => f(y))); },
  product: () => (x, y) => x.map((row, t) => row.map((a, c) => a * y[t][c])),
  softmax: () => (x) => x.map(softmaxOf),
  attention: (op) => (q, k, v) => q.map((query, t) => {
    const logits = k.map((key, j) => (op.mask[t][j] === null ? -Infinity
      : op.scale * query.reduce((sum, a, i) => sum + a * key[i], 0) + op.mask[t][j]));
    const w = softmaxOf(logits);
    return v[0].map((_, c) => w.reduce((sum, a, j) => sum + a * v[j][c], 0));
  }),
  normalise: (op) => (x) => x.map((row) => {
    const middle = op.centred ? mean(row) : 0, centred = row.map((a) => a - middle);
    const scale = 1 / Math.sqrt(mean(centred.map((a) => a * a)) + op.eps);
    return centred.map((a) => a * scale);
  }),
  max_tokens: () => (x) => x.map(() => x[0].map((_, c) => Math.max(...x.map((row) => row[c])))),
};
function makeProgram(target) {
  const steps = target.ops.map((op) => (op.op === "input" ? null : OPERATIONS[op.op](op)));
  const width = target.ops[0].width;
  return (point) => {
    const found = [];
    target.ops.forEach((op, i) => {
      found.push(steps[i] ? steps[i](...op.in.map((j) => found[j]))
        : Array.from({ length: target.tokens }, (_, t) => Array.from(point.slice(t * width, (t + 1) * width))));
    });
    return found[target.output].slice(0, target.rows).flat();
  };
}
