// Inputs: sliders and fields for numbers, an editable sequence for tokens.

function buildInputs() {
  const place = byId("inputs");
  if (tokenProgram) { buildSequence(place); return; }
  const list = make("div", { className: scene.inputs.length > 8 ? "long-list" : "" });
  scene.inputs.slice(0, scene.mostInputs).forEach(({ name, lo, hi }, i) => {
    const step = (hi - lo) / 1000 || 1;
    const slide = make("input", { type: "range", id: `slide${i}`, min: lo, max: hi, step, value: now.point[i],
      disabled: lo === hi });
    const field = make("input", { type: "number", id: `field${i}`, min: lo, max: hi, step: "any",
      value: exactly(now.point[i]) });
    field.setAttribute("aria-label", `${name}, exactly`);
    slide.setAttribute("aria-valuetext", `${name} = ${show(now.point[i])}`);
    slide.addEventListener("input", () => { move(i, Number(slide.value)); field.value = exactly(now.point[i]); });
    field.setAttribute("aria-describedby", "number-note");
    field.addEventListener("change", () => {
      const given = Number(field.value), readable = field.value !== "" && Number.isFinite(given);
      if (readable) { move(i, given); slide.value = now.point[i]; }
      byId("number-note").textContent = !readable
        ? `That is no number that fits: ${name} stays ${exactly(now.point[i])}.` : given < lo || given > hi
        ? `The network is for ${name} from ${show(lo, 4)} to ${show(hi, 4)}: the nearest end is taken.` : "";
      field.value = exactly(now.point[i]);
    });
    list.append(make("div", { className: `dial${name.length > 7 ? " tall" : ""}` },
      make("label", { htmlFor: `slide${i}`, textContent: name }), slide, field,
      make("span", { className: "ends", "aria-hidden": "true" }, make("span", { textContent: show(lo, 4) }),
        make("span", { textContent: show(hi, 4) }))));
  });
  place.append(list, make("p", { id: "number-note", className: "wrong small", role: "status" }));
  if (scene.inputs.length > 8) place.append(make("p", { className: "quiet",
    textContent: `${Math.min(scene.inputs.length, scene.mostInputs)} numbers: the list scrolls.` }));
  if (scene.inputs.length > scene.mostInputs) {
    place.append(make("p",
      { className: "quiet",
      textContent: `The first ${scene.mostInputs} of ${scene.inputs.length} numbers have sliders; the others stay where they are until a hunt moves them.` }));
  }
  place.append(make("p", { className: "row" }, make("button",
    { type: "button", id: "anywhere", textContent: "Somewhere else", onclick: () => go(somewhere()) })));
}
function move(i, value) {
  now.point = now.point.map((x, j) => (j === i ? rounded(i, value) : x));
  byId(`slide${i}`)?.setAttribute("aria-valuetext", `${scene.inputs[i].name} = ${show(now.point[i])}`);
  update();
}
function go(point) {
  now.point = point;
  if (!tokenProgram) byId("number-note").textContent = "";
  now.query = Math.min(now.query, (tokenProgram ? point.length : scene.tokens) - 1);
  if (tokenProgram) drawSequence();
  else point.slice(0, scene.mostInputs).forEach((x, i) => { byId(`slide${i}`).value = x;
    byId(`field${i}`).value = exactly(x); });
  update();
}
function buildSequence(place) {
  const texts = words.map(plainValue), single = texts.every((t) => [...t].length === 1);
  const typed = make("input", { type: "text", id: "typed", className: "typed", spellcheck: false,
    autocomplete: "off" });
  typed.addEventListener("change", () => {
    const blank = texts.some((text) => /\s/.test(text)); // then a space is a token, or a part of one
    const parts = single && (blank || !/\s/.test(typed.value)) ? [...typed.value] : spaced(typed.value, texts);
    const places = parts.map((part) => texts.indexOf(part)), bad = places.indexOf(-1);
    if (bad >= 0) refuse(`“${parts[bad]}” is not in the vocabulary.`);
    else if (!places.length || places.length > scene.tokens) {
      refuse(`A sequence has 1 to ${scene.tokens} tokens; this one has ${places.length}.`);
    } else go(places);
  });
  typed.setAttribute("aria-describedby", "typed-note");
  place.append(
    make("label", { htmlFor: "typed", className: "small", textContent: single
      ? "Type a sequence, or change a token below." : "Type tokens with spaces between them, or change one below." }),
    typed, make("p", { id: "typed-note", className: "wrong small", role: "alert" }),
      make("div", { id: "tokens", className: "tokens" }),
    make("div", { className: "row" },
      make("button", { type: "button", id: "longer", textContent: "+ token", onclick: () => go([...now.point, 0]) }),
      make("button", { type: "button", id: "shorter", textContent: "− token",
        onclick: () => go(now.point.slice(0, -1)) }),
      make("button", { type: "button", id: "anywhere", textContent: "Another sequence",
        onclick: () => go(somewhere()) })),
    make("p", { className: "quiet",
      textContent: `Vocabulary: ${texts.slice(0, 40).join("  ")}${texts.length > 40 ? " …" : ""}. Up to ${scene.tokens} tokens.` }));
  drawSequence();
}
// What stands between spaces; of a vocabulary whose tokens have spaces themselves, the longest token that fits.
function spaced(text, texts) {
  const pieces = text.split(/\s+/).filter(Boolean), found = [];
  const most = Math.max(...texts.map((token) => token.split(/\s+/).length));
  while (pieces.length) {
    let count = Math.min(most, pieces.length);
    while (count > 1 && !texts.includes(pieces.slice(0, count).join(" "))) count -= 1;
    found.push(pieces.splice(0, count).join(" "));
  }
  return found;
}
// Why what was typed is not the sequence on the page; nothing once there is another one.
function refuse(why) {
  byId("typed-note").textContent = why;
  byId("typed").setAttribute("aria-invalid", why !== "");
}
function drawSequence() {
  const texts = words.map(plainValue), single = texts.every((t) => [...t].length === 1),
    held = document.activeElement?.id;
  byId("typed").value = now.point.map((i) => texts[i]).join(single ? "" : " ");
  refuse("");
  byId("tokens").replaceChildren(...now.point.map((token, t) => {
    const pick = make("select", { id: `token${t}`, onchange: () => go(now.point.map((x, j) => (j === t
      ? pick.selectedIndex : x))) },
      ...texts.map((text, i) => make("option", { textContent: text, selected: i === token })));
    pick.setAttribute("aria-label", `token ${t}`);
    return pick;
  }));
  if (held?.startsWith("token")) byId(held)?.focus();
  allow("longer", now.point.length < scene.tokens, "shorter");
  allow("shorter", now.point.length > 1, "longer");
}
