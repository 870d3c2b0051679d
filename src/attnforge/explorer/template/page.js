const scene = JSON.parse(document.getElementById("scene").textContent);
const network = makeNetwork(scene);
const goal = scene.target && (scene.target.kind === "program" ? makeProgram(scene.target) : makeTokenProgram(scene.target));
const words = scene.vocabulary?.map(readValue);
const outputs = scene.target?.outputs?.map(readValue);
const decode = (p) => { const {output, columns} = network.forward(p); return p.map((_, t) => { const row = Array.from(output.slice(t*columns, (t+1)*columns)); return outputs ? showValue(outputs[row.indexOf(Math.max(...row))]) : row[0]; }); };
window.attnforge = { scene, network, goal, words, decode, show: showValue };
