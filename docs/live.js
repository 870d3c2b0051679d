// Explorers that stand in a page are light or dark as the page is.
const told = () => {
  const theme = document.body.getAttribute("data-md-color-scheme") === "slate" ? "dark" : "light";
  for (const frame of document.querySelectorAll("iframe.live")) frame.contentWindow.postMessage({ attnforge: { theme } }, "*");
};
for (const frame of document.querySelectorAll("iframe.live")) frame.addEventListener("load", told);
new MutationObserver(told).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
told();
