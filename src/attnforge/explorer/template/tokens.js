// What a token program means, as `attnforge.rasp.language` states it. A value is null, a number as a fraction of two
// BigInts { n, d } in lowest terms, a string, or an array of values. Two values are equal when their texts are.

const gcd = (a, b) => { while (b) [a, b] = [b, a % b]; return a < 0n ? -a : a; };
const fraction = (n, d = 1n) => { const g = gcd(n, d) * (d < 0n ? -1n : 1n); return { n: n / g, d: d / g }; };
const whole = (x) => fraction(BigInt(x));
const isNumber = (v) => v !== null && typeof v === "object" && !Array.isArray(v);

function readValue(data) {
  if (typeof data === "number") return whole(data);
  if (data !== null && typeof data === "object") {
    return data.fraction ? fraction(BigInt(data.fraction[0]), BigInt(data.fraction[1])) : data.tuple.map(readValue);
  }
  return data;
}
// As Python writes it; also the key by which values are compared.
function showValue(v) {
  if (v === null) return "None";
  if (typeof v === "string") {
    const mark = v.includes("'") && !v.includes('"') ? '"' : "'", bare = v.replace(/\\/g, "\\\\").replace(/\n/g, "\\n");
    return mark + (mark === "'" ? bare.replace(/'/g, "\\'") : bare) + mark;
  }
  if (Array.isArray(v)) return `(${v.map(showValue).join(", ")}${v.length === 1 ? "," : ""})`;
  return v.d === 1n ? `${v.n}` : `${v.n}/${v.d}`;
}
const plainValue = (v) => (typeof v === "string" ? v : showValue(v));
const toDouble = (v) => Number(v.n) / Number(v.d);

function compareValues(a, b) {
  if (isNumber(a) && isNumber(b)) { const x = a.n * b.d, y = b.n * a.d; return x < y ? -1 : x > y ? 1 : 0; }
  if (typeof a === "string" && typeof b === "string") {
    const x = [...a], y = [...b]; // by code point, as Python does
    for (let i = 0; i < Math.min(x.length, y.length); i += 1) {
      if (x[i] !== y[i]) return x[i].codePointAt(0) < y[i].codePointAt(0) ? -1 : 1;
    }
    return Math.sign(x.length - y.length);
  }
  if (Array.isArray(a) && Array.isArray(b)) {
    for (let i = 0; i < Math.min(a.length, b.length); i += 1) {
      if (showValue(a[i]) !== showValue(b[i])) return compareValues(a[i], b[i]);
    }
    return Math.sign(a.length - b.length);
  }
  throw new Error(`${showValue(a)} and ${showValue(b)} have no order`);
}
const truth = (v) => (isNumber(v) ? v.n !== 0n : v !== null && v.length > 0);
const flag = (x) => whole(x ? 1 : 0);
const floorDiv = (a, b) => { // of two numbers, towards minus infinity
  const n = a.n * b.d, d = a.d * b.n, q = n / d;
  return fraction(n % d !== 0n && (n < 0n) !== (d < 0n) ? q - 1n : q);
};
const minus = (a, b) => fraction(a.n * b.d - b.n * a.d, a.d * b.d);
const multiply = (a, b) => fraction(a.n * b.n, a.d * b.d);
const alike = (a, b) => showValue(a) === showValue(b);

const TOKEN_OPERATORS = {
  eq: (a, b) => flag(alike(a, b)), ne: (a, b) => flag(!alike(a, b)),
  lt: (a, b) => flag(compareValues(a, b) < 0), leq: (a, b) => flag(compareValues(a, b) <= 0),
  gt: (a, b) => flag(compareValues(a, b) > 0), geq: (a, b) => flag(compareValues(a, b) >= 0),
  true: () => flag(true), false: () => flag(false),
  add: (a, b) => (isNumber(a) ? fraction(a.n * b.d + b.n * a.d, a.d * b.d) : Array.isArray(a) ? [...a, ...b] : a + b),
  sub: minus, mul: multiply, div: (a, b) => fraction(a.n * b.d, a.d * b.n), floordiv: floorDiv,
  mod: (a, b) => minus(a, multiply(floorDiv(a, b), b)),
  pow: (a, b) => (b.n < 0n ? fraction(a.d ** -b.n, a.n ** -b.n) : fraction(a.n ** b.n, a.d ** b.n)),
  logical_and: (a, b) => flag(truth(a) && truth(b)), logical_or: (a, b) => flag(truth(a) || truth(b)),
  logical_not: (a) => flag(!truth(a)), neg: (a) => fraction(-a.n, a.d),
    abs: (a) => fraction(a.n < 0n ? -a.n : a.n, a.d),
  min: (a, b) => (compareValues(b, a) < 0 ? b : a), max: (a, b) => (compareValues(b, a) > 0 ? b : a),
  where: (condition, yes, no) => (truth(condition) ? yes : no),
};

function makeTokenFunction(data) {
  if (data.operator) {
    if (!hasOwn(TOKEN_OPERATORS, data.operator)) throw new Error(`no operator ${data.operator}`);
    return TOKEN_OPERATORS[data.operator];
  }
  const rows = new Map(data.table.map((row) => [row.slice(0, -1).map((v) => showValue(readValue(v))).join("\n"),
    readValue(last(row))]));
  return (...values) => {
    const key = values.map(showValue).join("\n");
    if (!rows.has(key)) throw new Error(`the table has no row for ${values.map(showValue).join(", ")}`);
    return rows.get(key);
  };
}

function aggregateOf(chosen, fallback) {
  if (!chosen.length) return fallback;
  if (chosen.every((v) => alike(v, chosen[0]))) return chosen[0];
  return TOKEN_OPERATORS.div(chosen.reduce(TOKEN_OPERATORS.add), whole(chosen.length));
}

// The program as a function of a sequence of values.
function makeTokenProgram(target) {
  const ops = target.program.map(([kind, name, children, rest]) => ({
    kind, children,
    call: rest.operator || rest.table ? makeTokenFunction(rest) : null,
    value: "value" in rest ? readValue(rest.value) : null,
  }));
  return (tokens) => {
    const n = tokens.length, each = (f) => Array.from({ length: n }, (_, i) => f(i)), found = [];
    for (const { kind, children, call, value } of ops) {
      const [a, b] = children.map((i) => found[i]), all = children.map((i) => found[i]);
      found.push({
        Tokens: () => tokens, Indices: () => each((i) => whole(i)), Constant: () => each(() => value),
        Map: () => each((i) => call(...all.map((row) => row[i]))),
        Select: () => each((q) => each((k) => truth(call(a[k], b[q])))),
        And: () => each((q) => each((k) => a[q][k] && b[q][k])), Or: () => each((q) => each((k) => a[q][k] || b[q][k])),
        Not: () => each((q) => each((k) => !a[q][k])),
        Aggregate: () => each((q) => aggregateOf(b.filter((_, k) => a[q][k]), value)),
        SelectorWidth: () => each((q) => whole(a[q].filter(Boolean).length)),
      }[kind]());
    }
    return last(found);
  };
}
