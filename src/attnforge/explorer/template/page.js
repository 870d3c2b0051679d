const scene = JSON.parse(document.getElementById("scene").textContent);
const network = makeNetwork(scene);
window.attnforge = { scene, network, goal: scene.target && (scene.target.kind === "program" ? makeProgram(scene.target) : makeTokenProgram(scene.target)) };
