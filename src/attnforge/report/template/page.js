
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

  const plots = [];
  const colours = (isDark) => {
    const ink = isDark ? "#e6e9ee" : "#1b1f26", line = isDark ? "#2c323c" : "#e1e5ea";
    return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink, line };
  };
  const paint = (isDark) => {
    for (const plot of plots) {
      const { line, ...change } = colours(isDark);
      for (const key of Object.keys(plot._fullLayout || {})) {
        if (/^[xy]axis\d*$/.test(key)) {
          change[key + ".gridcolor"] = change[key + ".zerolinecolor"] = change[key + ".linecolor"] = line;
        }
        if (/^scene\d*$/.test(key)) {
          for (const axis of ["xaxis", "yaxis", "zaxis"]) change[`${key}.${axis}.gridcolor`] = line;
        }
      }
      Plotly.relayout(plot, change);
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

  for (const place of document.querySelectorAll(".plot")) {
    const { data, layout } = JSON.parse(place.querySelector("script").textContent);
    const { line, "font.color": color, ...ground } = colours(dark());
    const font = { family: getComputedStyle(document.body).fontFamily, size: 13, ...(layout.font || {}), color };
    Plotly.newPlot(place, data, { ...layout, ...ground, font, autosize: true }, { responsive: true, displaylogo: false });
    plots.push(place);
    // Inside a folded part a plot has no width to fit; it gets one when the part opens.
    place.closest("details")?.addEventListener("toggle", () => Plotly.Plots.resize(place));
  }
  if (plots.length) paint(dark());
})();
