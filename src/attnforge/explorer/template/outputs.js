// Outputs beside the target, the verdict on them, the worst point so far and the hunt for a worse one.

function drawOutputs(seen) {
  const head = (...names) => make("thead", {}, make("tr", {},
    ...names.map(([text, kind]) => make("th", { scope: "col", textContent: text, className: kind ?? "number" }))));
  const rows = [];
  if (tokenProgram) {
    const say = (v) => (typeof v === "number" ? show(v) : isNumber(v) && !outputs ? show(toDouble(v)) : plainValue(v));
    now.point.forEach((token, t) => rows.push(make("tr", {}, make("td", { textContent: t, className: "number" }),
      make("td", { textContent: plainValue(words[token]) }),
      make("td", { className: "net", textContent: say(seen.values[t]) }),
        make("td", { className: "goal", textContent: say(seen.meant[t]) }),
      make("td", { className: seen.each[t] > (scene.bound ?? 0) ? "wrong" : "", textContent: outputs
        ? (seen.each[t] ? "differs" : "the same") : show(seen.each[t], 4) }))));
    byId("outputs").replaceChildren(scroller("outputs, token by token",
      make("table", { className: "plain" }, head(["at"], ["token", ""], ["network", ""], ["program", ""],
        [outputs ? "verdict" : "off by", ""]),
      make("tbody", {}, ...rows))));
    return;
  }
  scene.outputs.slice(0, 16).forEach((name, i) => rows.push(make("tr", {},
    make("th", { scope: "row", textContent: name }),
    make("td", { className: "number net", textContent: show(seen.values[i], shownDigits) }),
    ...(seen.meant ? [make("td", { className: "number goal", textContent: show(seen.meant[i], shownDigits) }),
      make("td", { className: "number", textContent: show(seen.values[i] - seen.meant[i], innerWidth < 480 ? 3 : 5) })] : []))));
  const names = [["value", ""], ["network"], ...(seen.meant ? [["target"], ["off by"]] : [])];
  byId("outputs").replaceChildren(scroller("outputs",
    make("table", { className: "plain" }, head(...names), make("tbody", {}, ...rows))),
    ...(scene.outputs.length > 16 ? [make("p", { className: "quiet",
      textContent: `16 of ${scene.outputs.length} outputs; the verdict is for all of them.` })] : []),
    ...(seen.meant ? [] : [make("p", { className: "quiet", textContent: scene.without })]));
}
// Which program of a network of several is compared; what was found of another one is no news of this.
function buildWhich() {
  if (targets.length < 2) { byId("which").hidden = true; return; }
  const pick = make("select", { id: "target", onchange: () => {
    jobs.get("hunt")?.();
    jobs.delete("hunt");
    hunted = "";
    now.worst = null;
    aim(pick.selectedIndex);
    update();
    sweep();
  } }, ...targets.map(({ name }) => make("option", { textContent: name })));
  byId("which").append(make("label", {}, "program", pick),
    make("span", { className: "quiet", textContent: `${targets.length} programs, one network: every head is there for all of them.` }));
}
// Whether an error that is above the bound could be the target's own rounding in doubles.
const undecided = (error, meant) => scene.dtype === "float64"
  && error - scene.bound < 1e-14 * (1 + Math.max(...(meant ?? [0]).map((v) => (typeof v === "number" ? Math.abs(v)
  : 1))));
function verdictOf(seen) {
  if (seen.error === null) return ["", ""];
  if (tokenProgram && outputs) {
    if (!seen.error) return ["held", "The network says what the program says."];
    return ["broken", `${seen.error} of ${now.point.length} positions differ${changed() ? ": heads are switched off or warmed" : ""}.`];
  }
  if (seen.outside) return ["", `${seen.outside}: nothing is certified there; off by ${show(seen.error, 5)}${sized}`];
  if (scene.bound === null) return ["", "There is no certified bound: the target was only sampled."];
  if (seen.error <= scene.bound) return ["held",
    `off by ${show(seen.error, 5)}${sized}: within the ${scene.word.toLowerCase()} ${scene.boundText}`];
  if (!changed() && undecided(seen.error, seen.meant)) return ["",
    `off by ${show(seen.error, 5)}: at the edge of what the target’s own doubles can tell`];
  if (!changed() && scene.apart && seen.error < 10 * scene.bound) return ["",
    `off by ${show(seen.error, 5)}${sized}: above the ${scene.word.toLowerCase()} ${scene.boundText}, by the rounding of this page`];
  return ["broken", `off by ${show(seen.error, 5)}${sized}, above the ${scene.word.toLowerCase()} ${scene.boundText}${changed() ? ", which is for heads as they were built" : ""}`];
}
function drawVerdict(seen) {
  const [kind, text] = verdictOf(seen), place = byId("verdict");
  place.replaceChildren();
  if (seen.error !== null && scene.bound && !outputs) {
    const wide = widthOf("verdict"), lo = Math.log10(scene.bound) - 6, hi = Math.log10(scene.bound) + 3;
    const at = (v) => 10 + (Math.min(Math.max((Math.log10(v) - lo) / (hi - lo), 0), 1)) * (wide - 20);
    const mark = at(Math.max(seen.error, 1e-300));
    place.append(make("div", { className: "meter" }, svg("svg",
      { viewBox: `0 0 ${wide} 44`, class: "chart", role: "img", "aria-label": text },
      svg("rect", { x: 10, y: 8, width: at(scene.bound) - 10, height: 10, rx: 5, fill: "var(--band)" }),
      svg("rect", { x: 10, y: 8, width: wide - 20, height: 10, rx: 5, fill: "none", stroke: "var(--line)" }),
      svg("line", { x1: at(scene.bound), x2: at(scene.bound), y1: 3, y2: 24, stroke: "var(--held)",
        "stroke-width": 2 }),
      svg("text", { x: at(scene.bound), y: 39, "text-anchor": "middle" }, `bound ${scene.boundText}`),
      svg("text", { x: 4, y: 39 }, show(10 ** lo, 1)), ...(wide > 400 // ten times more for each step: a scale of powers
        ? [svg("text", { x: wide - 4, y: 39, "text-anchor": "end" }, show(10 ** hi, 1))] : []),
      svg("circle", { cx: mark, cy: 13, r: 6, fill: kind === "broken" ? "var(--miss)" : "var(--net)" }))));
  }
  if (text) place.append(make("p", { className: `verdict ${kind}`, id: "verdict-text", textContent: text }));
  if (scene.remark) place.append(make("p", { className: "quiet", textContent: scene.remark }));
}
let saying = 0;
function announce(seen) { // not at every step of a slider
  clearTimeout(saying);
  saying = setTimeout(() => {
    const value = tokenProgram ? seen.values.map((v) => (typeof v === "number" ? show(v, 4) : plainValue(v))).join(" ")
      : scene.outputs.slice(0, 4).map((n, i) => `${n} ${show(seen.values[i], 5)}`).join(", ");
    byId("said").textContent = `Network: ${value}. ${verdictOf(seen)[1]}`;
  }, 400);
}

// ---- the worst point, and the hunt

function noteWorst(point, error) {
  if (error === null || changed() || (scene.rows && rowOf(point).outside) || (now.worst && error <= now.worst.error)) return false;
  now.worst = { point: [...point], error };
  return true;
}
let hunted = ""; // what came of the last hunt
// Made once and changed in place: a button that is made anew while a finger is on it never hears of the click.
function buildWorst() {
  if (!goal) return;
  byId("worst").append(make("p", { className: "small", id: "worst-text" }),
    make("div", { className: "row" },
      make("button", { type: "button", id: "hunt", onclick: () => (jobs.has("hunt") ? stopHunt() : hunt()) }),
      make("button", { type: "button", id: "visit", textContent: "Go there",
        onclick: () => go([...now.worst.point]) }),
      make("progress", { max: 1, value: 0, id: "hunting", "aria-label": "the hunt" }),
      make("span", { className: "quiet", id: "hunt-text" })));
}
function drawWorst(progress = 0) {
  if (!goal) return;
  const running = jobs.has("hunt");
  const what = !now.worst ? "none yet" : outputs && !now.worst.error ? "no position was wrong" : outputs
    ? `${now.worst.error} wrong positions`
    : `${show(now.worst.error, 5)}${scene.bound ? `, ${show((100 * now.worst.error) / scene.bound, 3)}% of the bound` : ""}`;
  const where = now.worst && now.worst.error > 0 && (tokenProgram
    ? now.worst.point.map((i) => plainValue(words[i])).join(" ")
    : now.worst.point.slice(0,
    6).map((x, i) => `${scene.inputs[i].name} = ${show(x, 6)}`).join(", ") + (now.worst.point.length > 6 ? ", …" : ""));
  byId("worst-text").replaceChildren(make("b", { textContent: "Worst so far: " }), what,
    where ? make("span", { className: "quiet", textContent: ` at ${where}` }) : "");
  const label = running ? "Stop the hunt" : "Hunt for a worse point";
  if (byId("hunt").textContent !== label) byId("hunt").textContent = label;
  allow("visit", Boolean(now.worst?.error), "hunt");
  byId("hunting").hidden = !running;
  byId("hunting").value = progress;
  byId("hunt-text").hidden = running || !hunted;
  byId("hunt-text").textContent = hunted;
}
function endHunt(text) {
  hunted = text;
  drawWorst();
  byId("said").textContent = `The hunt has ended: ${text}. ${byId("worst-text").textContent}`;
}
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
