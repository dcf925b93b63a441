"use strict";
// Runs the scripts of a saved report with as much of a browser as they use, and tells what was drawn.
// Usage: node cockpit_page.js REPORT.html
const fs = require("fs");
const vm = require("vm");

const page = fs.readFileSync(process.argv[2], "utf8");
const data = page.match(/<script type="application\/json" id="cockpit-data">([^]*?)<\/script>/)[1];
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
    const pen = { fillText() {} };
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
const byId = { cockpit: root, "cockpit-data": { textContent: data } };
const world = { document: { createElement: (tag) => new Element(tag), getElementById: (id) => byId[id] } };
world.window = { addEventListener() {}, devicePixelRatio: 1 };
const start = process.cpuUsage();
vm.runInNewContext(code + "\nthis.api = { stacks, totals, alive, byRegion, byCategory, verdict };", world);
const opened = process.cpuUsage(start).user / 1e3;

const record = JSON.parse(data);
const charts = root.find("canvas");
const sides = record.plain ? [record.plain, record.now] : [record.now];
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
const [device, by] = root.find("select");
by.value = "region";
by.onchange();
const regions = root.find("span").filter((e) => e.className === "key").map((e) => e.text.trim());
device.value = "h200";
device.onchange();
const tables = root.find("table");
const kept = tables[tables.length - 1];
const firsts = [];
for (const column of [0, 0, 3]) {
  const buttons = root.find("table").pop().find("button");
  buttons[column].onclick();
  firsts.push(root.find("table").pop().find("tbody")[0].children.map((row) => row.children[column].text));
}
const fits = root.find("span").filter((e) => ["yes", "no"].includes(e.className)).map((e) => e.text);
console.log(JSON.stringify({ peaks, drawn, tip, regions, firsts, fits, opened, rows: kept.find("tr").length }));
