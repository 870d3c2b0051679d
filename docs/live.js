// Explorers that stand in a page are light or dark as the page is.
const told = () => {
  const theme = document.body.getAttribute("data-md-color-scheme") === "slate" ? "dark" : "light";
  for (const frame of document.querySelectorAll("iframe.live")) frame.contentWindow.postMessage({ attnforge: { theme } }, "*");
};
for (const frame of document.querySelectorAll("iframe.live")) frame.addEventListener("load", told);
new MutationObserver(told).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
told();
// Drawings and formulas that are wider than the screen say so, and keys can scroll them.
const wide = () => {
  for (const part of document.querySelectorAll(".md-typeset p:has(> img), .md-typeset .formula")) {
    const more = part.classList.toggle("more", part.scrollWidth > part.clientWidth + 1);
    if (more) part.tabIndex = 0; else part.removeAttribute("tabindex");
  }
};
addEventListener("load", wide);
addEventListener("resize", wide);
wide();
