// The explorer in a notebook: the page in a frame of its own, and the point it is at, both ways.
function render({ model, el }) {
  const frame = document.createElement("iframe");
  frame.title = "attnforge explorer";
  frame.setAttribute("sandbox", "allow-scripts");
  frame.style.cssText = `width: 100%; border: 0; height: ${model.get("height")}px`;
  frame.srcdoc = model.get("page");
  const heard = (event) => {
    if (event.source !== frame.contentWindow || !event.data?.attnforge) return;
    model.set("output", event.data.attnforge.output);
    model.set("point", event.data.attnforge.point);
    model.save_changes();
  };
  const moved = () => frame.contentWindow?.postMessage({ attnforge: { go: model.get("point") } }, "*");
  addEventListener("message", heard);
  model.on("change:point", moved);
  el.append(frame);
  return () => { removeEventListener("message", heard); model.off("change:point", moved); };
}
export default { render };
