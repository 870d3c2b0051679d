(() => {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  // A page opened from a file may have no storage; the choice then lasts as long as the page.
  const remember = (value) => { try { localStorage.setItem("attnforge-theme", value); } catch { /* no storage */ } };
  try {
    const kept = localStorage.getItem("attnforge-theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch { /* no storage */ }

  // Plots are given the page's colours: the same palette as the still figures, on whatever ground the page has.
  const plots = [];
  const colours = (isDark) => ({
    ink: isDark ? "#e6e9ee" : "#1b1f26",
    grey: isDark ? "#828a96" : "#59616e",
    soft: isDark ? "#a0a9b6" : "#59616e",
    line: isDark ? "#2c323c" : "#e1e5ea",
    cycle: isDark
      ? ["#56B4E9", "#E69F00", "#2fc79a", "#ff8a4d", "#e39cc4", "#F0E442", "#ffffff"]
      : ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"],
  });
  const paint = (isDark) => {
    const { ink, grey, soft, line, cycle } = colours(isDark);
    for (const plot of plots) {
      const change = {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink,
        "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": soft, "modebar.activecolor": ink,
      };
      if (!plot.dataset.coloured) change.colorway = cycle;
      for (const key of Object.keys(plot._fullLayout)) {
        const axes = /^scene\d*$/.test(key) ? ["x", "y", "z"].map((axis) => `${key}.${axis}axis`)
          : /^[xy]axis\d*$/.test(key) ? [key] : [];
        for (const axis of axes) {
          for (const part of ["gridcolor", "zerolinecolor", "linecolor"]) change[`${axis}.${part}`] = line;
          if (axis !== key) change[`${axis}.showbackground`] = false;
        }
      }
      Plotly.relayout(plot, change);
      // A trace may name its colour by its place in the cycle; -1 is grey, for what was not measured.
      const named = plot.data.flatMap((trace, i) => (Number.isInteger(trace.meta?.cycle) ? [i] : []));
      if (named.length) {
        const shades = named.map((i) => plot.data[i].meta.cycle).map((n) => (n < 0 ? grey : cycle[n % cycle.length]));
        Plotly.restyle(plot, { "line.color": shades, "marker.color": shades }, named);
      }
    }
  };

  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    remember(root.dataset.theme);
    paint(dark());
  });
  system.addEventListener("change", () => paint(dark()));
  addEventListener("beforeprint", () => {
    // Folded parts would be missing on paper.
    for (const part of document.querySelectorAll("details:not([open])")) { part.open = true; part.dataset.folded = ""; }
    paint(false);
  });
  addEventListener("afterprint", () => {
    for (const part of document.querySelectorAll("details[data-folded]")) { part.open = false; delete part.dataset.folded; }
    paint(dark());
  });

  for (const field of document.querySelectorAll(".filter input")) {
    const rows = [...field.closest("figure").querySelectorAll("tbody tr")];
    const count = field.parentElement.querySelector("span");
    const narrow = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
      count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    };
    field.addEventListener("input", narrow);
    narrow();
  }

  // What is wider than its frame says so: the shade alone is easily missed.
  const frames = [...document.querySelectorAll(".scroll")];
  const mark = () => frames.forEach((frame) => {
    const more = frame.classList.toggle("more", frame.scrollWidth > frame.clientWidth + 1);
    frame.classList.toggle("fits", !more);
    if (more) frame.tabIndex = 0; else frame.removeAttribute("tabindex");  // what fits needs no stop for keys
  });
  addEventListener("resize", mark);
  addEventListener("load", mark);
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", mark);

  // On a narrow screen panels stand below one another, each with its colour bar, under a legend of one name a line.
  const NARROW = 560;
  const LETTER = 8.4, LINE = 18;  // pixels of the name of an axis, which plotly cuts where it is too long
  const broken = (text, width) => text.split(" ").reduce((lines, word) => {
    const last = lines[lines.length - 1];
    if (last && (last.length + 1 + word.length) * LETTER <= width) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
    return lines;
  }, []);
  // The names of these axes in lines that fit, with room for them below; returns how much room.
  const fold = (layout, axes, width) => {
    let most = 1;
    for (const axis of axes.map((number) => layout[`xaxis${number}`])) {
      if (!axis?.title?.text) continue;
      const lines = broken(axis.title.text, width(axis));
      axis.title.text = lines.join("<br>");
      most = Math.max(most, lines.length);
    }
    if (layout.margin?.b) layout.margin.b += LINE * (most - 1);
    return LINE * (most - 1);
  };
  const stacked = (data, layout, width) => {
    const drawn = new Set(data.map((trace) => (trace.xaxis ?? "x").slice(1)));  // a grid may have a place for nothing
    const axes = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key)).map((key) => key.slice(5))
      .filter((number) => drawn.has(number));
    const more = fold(layout, axes, () => width - 80);
    const panel = 0.75 * layout.meta.row, gap = 0.26 * layout.meta.row + more;  // an axis, its name, and a title
    const total = axes.length * panel + (axes.length - 1) * gap;
    axes.forEach((number, i) => {
      const bars = data.filter((trace) => trace.colorbar && (trace.xaxis ?? "x") === `x${number}`);
      const top = 1 - (i * (panel + gap)) / total, bottom = Math.max(0, top - panel / total);
      layout[`xaxis${number}`].domain = [0, bars.length ? 0.82 : 1];
      layout[`yaxis${number}`].domain = [bottom, top];
      if (layout[`yaxis${number}`].title) layout[`yaxis${number}`].title.standoff = 6;
      for (const { colorbar } of bars) Object.assign(colorbar, { x: 0.84, y: (top + bottom) / 2, len: top - bottom });
    });
    const names = new Set(data.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => trace.name));
    layout.margin = { ...layout.margin, l: 52, r: 10, t: 52 + 21 * names.size, b: layout.margin.b };
    layout.height = total + layout.margin.t + layout.margin.b;
    layout.dragmode = false;
    layout.legend = { ...layout.legend, y: 1, orientation: "v", tracegroupgap: 0 };
  };

  // A legend of more lines than were expected gets room of its own above the titles of the panels.
  const TITLE = 34;
  const lift = (place) => {
    const legend = place.querySelector(".legend"), { margin, height } = place._fullLayout;
    if (!legend) return;
    const need = Math.ceil(legend.getBoundingClientRect().bottom - place.getBoundingClientRect().top + TITLE);
    if (need > margin.t) Plotly.relayout(place, { "margin.t": need, height: height + need - margin.t });
  };
  addEventListener("resize", () => setTimeout(() => plots.forEach(lift), 400));  // after plotly's own

  for (const place of document.querySelectorAll(".plot")) {
    const { data, layout } = JSON.parse(place.querySelector("script").textContent);
    const family = getComputedStyle(document.body).fontFamily;
    if (layout.colorway) place.dataset.coloured = "";
    if (layout.meta?.row && place.clientWidth < NARROW) stacked(data, layout, place.clientWidth);
    else if (layout.meta?.row && place.clientWidth) {
      const numbers = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key)).map((key) => key.slice(5));
      fold(layout, numbers, ({ domain = [0, 1] }) => (domain[1] - domain[0]) * (place.clientWidth - 84) + 40);
    }
    const solid = data.some((trace) => /surface|3d|volume|cone|streamtube/.test(trace.type));
    const top = layout.title ? 56 : 32;
    const margin = solid ? { l: 8, r: 8, t: top, b: 8 } : { l: 60, r: 24, t: top, b: 52 };
    const ours = { margin, height: solid ? 520 : 440 };
    Plotly.newPlot(
      place, data, { ...ours, ...layout, font: { family, size: 13, ...layout.font }, autosize: true },
      { responsive: true, displaylogo: false, displayModeBar: place.clientWidth < NARROW ? false : undefined },
    ).then(() => { if (place.clientWidth) lift(place); });
    plots.push(place);
    // Inside a folded part a plot has no width to fit; it gets one when the part opens.
    place.closest("details")?.addEventListener("toggle", () => Plotly.Plots.resize(place));
  }
  if (plots.length) paint(dark());
})();
