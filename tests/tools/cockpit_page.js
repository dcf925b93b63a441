"use strict";
// Runs the scripts of a saved report with as much of a browser as they use, and tells what was drawn.
// Usage: node cockpit_page.js REPORT.html
const fs = require("fs");
const vm = require("vm");

const page = fs.readFileSync(process.argv[2], "utf8");
const byId = {};
for (const [, id, text] of page.matchAll(/<script type="application\/json" id="([^"]*)">([^]*?)<\/script>/g))
  byId[id] = { textContent: text };
const code = page.match(/<script>([^]*?)<\/script>/)[1];
const filled = new Map();

class Element {
  constructor(tag) {
    Object.assign(this, { tag, children: [], style: {}, attributes: {}, textContent: "" });
    if (tag === "canvas") this.clientWidth = 800;
  }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  setAttribute(name, value) { this.attributes[name] = value; }
  getBoundingClientRect() { return { left: 0, top: 0, width: 800, height: 190 }; }
  getContext() {
    const pen = { fillText() {}, beginPath() {}, moveTo() {}, lineTo() {}, stroke() {}, fill() {} };
    pen.canvas = this;
    pen.measureText = (text) => ({ width: 6 * text.length });
    pen.arc = (x, y) => {
      if (!(x >= 0 && x <= this.width && y >= 0 && y <= this.height)) throw new Error(`a dot outside: ${[x, y]}`);
      this.dots = (this.dots || 0) + 1;
    };
    pen.fillRect = (x, y, w, h) => {
      if (!(x >= 0 && h >= 0 && y >= -1e-6)) throw new Error(`drawn outside: ${[x, y, w, h]}`);
      filled.set(pen.fillStyle, (filled.get(pen.fillStyle) || 0) + h * w);
    };
    return pen;
  }
  find(tag) { return this.children.flatMap((c) => (c.find ? [...(c.tag === tag ? [c] : []), ...c.find(tag)] : [])); }
  get text() { return this.textContent + this.children.map((c) => (c.find ? c.text : c)).join(" "); }
}

const root = new Element("div");
byId.cockpit = root;
const world = { document: { createElement: (tag) => new Element(tag), getElementById: (id) => byId[id] } };
world.window = { addEventListener() {}, devicePixelRatio: 1 };
world.getComputedStyle = () => ({ color: "#1c1c1c" });
const start = process.cpuUsage();
vm.runInNewContext(code + "\nthis.api = { stacks, totals, alive, byRegion, byCategory, verdict, undominated, spans };", world);
const opened = process.cpuUsage(start).user / 1e3;

const record = JSON.parse(byId["cockpit-data"].textContent);
const charts = root.find("canvas").filter((canvas) => canvas.className !== "map");
const choices = record.choices.map((_, i) => JSON.parse(byId[`cockpit-choice-${i}`].textContent));
const sides = [...(record.plain ? [record.plain.columns] : []), choices[record.start].columns];
const peaks = sides.map((side) =>
  Math.max(0, ...world.api.totals(world.api.stacks(side, side.category, record.categories.length, false))));
// Every op is hovered, clicked and stepped to once; every heading pressed; every choice made.
for (const canvas of charts) {
  for (const clientX of [0, 400, 799]) canvas.onmousemove({ clientX, pageX: 0, pageY: 0 });
  canvas.onclick({ clientX: 400 });
  canvas.onkeydown({ key: "ArrowRight", preventDefault() {} });
}
const drawn = Object.fromEntries(filled);
const tip = root.find("div").find((e) => e.id === "tip").textContent;
const [by, device] = root.find("select");
by.value = "region";
by.onchange();
const regions = root.find("span").filter((e) => e.className === "key").map((e) => e.text.trim());
device.value = "h200";
device.onchange();
const tables = root.find("table");
const kept = tables[tables.length - 1];
const firsts = [];
for (const column of [0, 0, 4]) {
  const buttons = root.find("table").pop().find("button");
  buttons[column].onclick();
  firsts.push(root.find("table").pop().find("tbody")[0].children.map((row) => row.children[column].text));
}
const kinds = root.find("table").pop().find("tbody")[0].children.map((row) => row.children.map((cell) => cell.text));
const blocks = sides.map((side) => world.api.spans(side, choices[record.start].columns, record.words).map((s) => s.name));
const said = () => root.find("span").filter((e) => ["yes", "no"].includes(e.className)).map((e) => e.text);
const fits = said();
// The slider is moved over all policies; the last chart, the verdict and the table follow.
const slider = root.find("input").find((e) => e.type === "range");
const switched = [];
for (let i = 0; slider && i < record.choices.length; i++) {
  slider.value = i;
  slider.oninput();
  const titles = root.find("h2").map((e) => e.text);
  const rows = root.find("tr").filter((e) => e.className === "chosen").map((e) => e.text);
  switched.push({ title: titles.find((t) => t.startsWith(`${record.choices[i].label}: at most`)), fits: said(), rows });
}
const map = root.find("canvas").find((canvas) => canvas.className === "map");
if (map) {
  map.onclick({ clientX: 0, clientY: 0 });
  map.onmousemove({ clientX: 0, clientY: 0, pageX: 0, pageY: 0 });
}
console.log(JSON.stringify({ peaks, drawn, tip, regions, firsts, kinds, blocks, fits, opened, switched, rows: kept.find("tr").length }));
