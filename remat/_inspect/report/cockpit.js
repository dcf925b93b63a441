"use strict";
// The cockpit: live bytes of one step, with and without remat. Nothing is loaded from elsewhere.

// Okabe and Ito's palette, which colour-blind people can tell apart.
const COLOURS = ["#999999", "#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#f0e442", "#009e73", "#d55e00"];
const LABELS = {
  arguments: "arguments and weights",
  policy: "kept by policy",
  inputs: "inputs that regions keep",
  autograd: "kept by autograd, outside of regions",
  recomputed: "recomputed",
  other: "gradients and temporary values",
};
const MOST_ROWS = 500;

// -- numbers --------------------------------------------------------------------------------------------

function bytes(n) {
  const sign = n < 0 ? "-" : "";
  let size = Math.abs(n);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return sign + (unit === "B" ? size : size.toFixed(1)) + " " + unit;
    size /= 1024;
  }
  return sign + size.toFixed(1) + " TiB";
}

// Milliseconds of one op on a device, by its roofline.
function price(side, op, device) {
  const speed = side.half[op] ? device.half : device.single;
  return 1e3 * Math.max(side.flops[op] / speed, side.moved[op] / device.bandwidth);
}

function verdict(device, used) {
  const left = device.memory - used;
  const article = "AHM".includes(device.label[0]) ? "an " : "a ";
  const said = left >= 0 ? `yes, ${bytes(left)} to spare` : `no, ${bytes(-left)} too much`;
  return { fits: left >= 0, text: `fits ${article}${device.label}: ${said}` };
}

// The groups that blocks are stacked by: names, and for each side the group of each of its blocks.
function byCategory(data, sides) {
  return { names: data.categories.map((c) => LABELS[c]), of: sides.map((side) => side.category) };
}

function byRegion(data, sides) {
  const sizes = new Map();
  for (const side of sides)
    side.owner.forEach((owner, i) => sizes.set(owner, (sizes.get(owner) || 0) + side.bytes[i]));
  const outside = data.words.indexOf("");
  const largest = [...sizes.keys()].filter((o) => o !== outside).sort((a, b) => sizes.get(b) - sizes.get(a));
  const shown = largest.slice(0, COLOURS.length - (largest.length > COLOURS.length - 2 ? 3 : 2));
  const names = [LABELS.arguments, "outside of regions", ...shown.map((o) => data.words[o])];
  if (largest.length > shown.length) names.push("other regions");
  const place = new Map([[outside, 1], ...shown.map((o, i) => [o, i + 2])]);
  const of = sides.map((s) => s.owner.map((o) => (place.has(o) ? place.get(o) : names.length - 1)));
  return { names, of };
}

// For each group its live bytes at each op.
function stacks(side, groupOf, count, withArguments) {
  const n = side.op.length;
  const rows = Array.from({ length: count }, () => new Float64Array(n + 1));
  for (let b = 0; b < side.bytes.length; b++) {
    if (side.freed[b] === side.made[b]) continue;
    const row = rows[groupOf[b]];
    row[Math.min(side.made[b], n)] += side.bytes[b];
    row[side.freed[b]] -= side.bytes[b];
  }
  for (const row of rows) for (let i = 1; i <= n; i++) row[i] += row[i - 1];
  if (withArguments) for (let i = 0; i <= n; i++) rows[0][i] += side.arguments;
  return rows;
}

function totals(rows) {
  const sum = new Float64Array(rows[0].length);
  for (const row of rows) for (let i = 0; i < sum.length; i++) sum[i] += row[i];
  return sum;
}

// For each of `width` columns the op at which most is alive: peaks stay where thousands of ops share a pixel.
function decimated(total, n, width) {
  const found = new Int32Array(width);
  for (let x = 0; x < width; x++) {
    const first = Math.floor((x * n) / width);
    const end = Math.max(first + 1, Math.floor(((x + 1) * n) / width));
    let best = first;
    for (let i = first + 1; i < Math.min(end, n); i++) if (total[i] > total[best]) best = i;
    found[x] = best;
  }
  return found;
}

function alive(side, op, most) {
  const found = [];
  for (let b = 0; b < side.bytes.length; b++) if (side.made[b] <= op && op < side.freed[b]) found.push(b);
  return found.sort((a, b) => side.bytes[b] - side.bytes[a]).slice(0, most);
}

// Rows of the table of kept values: numbers first, so that they can be sorted.
function keptRows(data, device) {
  const made = data.kept.map(([size, category, shape, name, op]) => {
    const ms = price(data.now, op, device);
    const gib = size ? (ms / size) * 2 ** 30 : 0;
    const at = op < data.now.at.length ? data.words[data.now.at[op]] : "";
    const what = data.words[data.now.op[op]] || "";
    return [size, LABELS[category], shape, ms, gib, name, what, data.words[data.now.region[op]] || "", at];
  });
  const held = data.held.map(([size, why, shape, path]) => [size, `${why}, lives anyway`, shape, null, null, path, "", "", ""]);
  return made.concat(held);
}

function sorted(rows, column, down) {
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [a[column], b[column]];
    if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
}

// -- the page -------------------------------------------------------------------------------------------

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

class Cockpit {
  constructor(root, data) {
    this.data = data;
    this.sides = data.plain ? [data.plain, data.now] : [data.now];
    this.state = { by: "category", args: true, device: "h100", extra: 0, pinned: null };
    this.root = root;
    this.build();
    this.stack();
  }

  build() {
    const devices = Object.entries(this.data.devices).filter(([, device]) => device.memory);
    const options = devices.map(([key, d]) => element("option", { value: key, textContent: d.label }));
    this.device = element("select", { onchange: () => this.set("device", this.device.value) }, ...options);
    this.device.value = this.state.device;
    const extra = element("input", { type: "number", min: 0, step: 0.5, value: 0 });
    extra.oninput = () => this.set("extra", Number(extra.value) || 0);
    const by = element("select", {}, ...["category", "region"].map((v) => element("option", { value: v, textContent: v })));
    by.onchange = () => this.set("by", by.value);
    const args = element("input", { type: "checkbox", checked: true });
    args.onchange = () => this.set("args", args.checked);
    this.fits = element("div", { className: "bar" });
    this.legend = element("div", { className: "bar" });
    this.tip = element("div", { id: "tip" });
    this.detail = element("div", {});
    this.detail.setAttribute("aria-live", "polite");
    this.kept = element("div", {});
    this.charts = this.sides.map((side, i) => this.chart(side, i));
    this.root.append(
      element("h1", { textContent: `${this.data.name}: live bytes through forward and backward` }),
      element("div", { className: "bar" }, element("label", {}, "device ", this.device),
        element("label", {}, "optimizer and others, GiB ", extra)),
      this.fits,
      element("div", { className: "bar" }, element("label", {}, "stack by ", by),
        element("label", {}, args, " arguments and weights")),
      this.legend,
      ...this.charts.flatMap((chart) => [chart.title, chart.canvas]),
      this.tip,
      this.detail,
      element("h2", { textContent: "What waits between forward and backward" }),
      this.kept,
    );
    this.order = [0, true];
    window.addEventListener("resize", () => this.draw());
  }

  chart(side, i) {
    const canvas = element("canvas", { tabIndex: 0 });
    const name = this.data.plain && i === 0 ? "without remat" : this.data.plain ? "now" : "as it is";
    const title = element("h2", {});
    canvas.setAttribute("role", "img");
    canvas.onmousemove = (event) => this.hover(i, this.opAt(i, event), event);
    canvas.onmouseleave = () => (this.tip.style.display = "none");
    canvas.onclick = (event) => this.pin(i, this.opAt(i, event));
    canvas.onkeydown = (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const from = this.state.pinned && this.state.pinned.side === i ? this.state.pinned.op : 0;
      this.pin(i, Math.max(0, Math.min(side.op.length - 1, from + step)));
    };
    return { canvas, title, name, side, columns: [] };
  }

  set(key, value) {
    this.state[key] = value;
    this.stack();
  }

  stack() {
    const group = this.state.by === "region" ? byRegion : byCategory;
    this.groups = group(this.data, this.sides);
    this.charts.forEach((chart, i) => {
      chart.rows = stacks(chart.side, this.groups.of[i], this.groups.names.length, this.state.args);
      chart.total = totals(chart.rows);
    });
    // One scale for both.
    this.most = Math.max(1, ...this.charts.map((c) => c.total.reduce((a, b) => Math.max(a, b), 0)));
    this.legend.replaceChildren(...this.groups.names.map((name, i) => {
      const box = element("i", {});
      box.style.background = COLOURS[i];
      return element("span", { className: "key" }, box, name);
    }));
    this.tellFits();
    this.tellKept();
    this.draw();
  }

  tellFits() {
    const device = this.data.devices[this.state.device];
    const used = (key, side) => this.data.peaks[key] + side.arguments + this.state.extra * 2 ** 30;
    const lines = [["now", used("now", this.data.now)]];
    if (this.data.plain) lines.unshift(["without remat", used("plain", this.data.plain)]);
    this.fits.replaceChildren(...lines.map(([name, size]) => {
      const { fits, text } = verdict(device, size);
      return element("span", { className: fits ? "yes" : "no", textContent: `${name}: ${bytes(size)}, ${text}` });
    }));
  }

  draw() {
    this.charts.forEach((chart) => {
      const { canvas, side, rows, total } = chart;
      const ratio = window.devicePixelRatio || 1;
      const [width, height] = [Math.round((canvas.clientWidth || 900) * ratio), Math.round(190 * ratio)];
      Object.assign(canvas, { width, height });
      const pen = canvas.getContext("2d");
      chart.columns = decimated(total, side.op.length, width);
      rows.forEach((_, g) => this.paint(pen, chart, g, height));
      const turn = (side.boundary / Math.max(1, side.op.length)) * width;
      pen.fillStyle = "#000000";
      pen.fillRect(Math.round(turn), 0, Math.max(1, ratio), height);
      pen.font = `${12 * ratio}px system-ui, sans-serif`;
      pen.fillText("backward", Math.min(turn + 4 * ratio, width - 60 * ratio), 14 * ratio);
      const peak = total.reduce((a, b) => Math.max(a, b), 0);
      chart.title.textContent = `${chart.name}: at most ${bytes(peak)}`;
      canvas.setAttribute("aria-label", `${chart.title.textContent}; arrow keys step through the ops`);
    });
    this.mark();
  }

  paint(pen, chart, group, height) {
    pen.fillStyle = COLOURS[group];
    chart.columns.forEach((op, x) => {
      let below = 0;
      for (let g = 0; g < group; g++) below += chart.rows[g][op];
      const [bottom, top] = [below, below + chart.rows[group][op]].map((v) => height * (1 - v / this.most));
      if (bottom - top > 0) pen.fillRect(x, top, 1, bottom - top);
    });
  }

  mark() {
    const pinned = this.state.pinned;
    if (!pinned) return;
    const { canvas, side } = this.charts[pinned.side];
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#000000";
    pen.fillRect(Math.round((pinned.op / side.op.length) * canvas.width), 0, 2, canvas.height);
  }

  opAt(i, event) {
    const { canvas, columns } = this.charts[i];
    const box = canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * columns.length);
    return columns[Math.max(0, Math.min(columns.length - 1, x))] || 0;
  }

  describe(i, op) {
    const { side, rows, total } = this.charts[i];
    const words = this.data.words;
    const where = words[side.region[op]];
    const ms = price(side, op, this.data.devices[this.state.device]);
    const lines = [
      `op ${op}, ${this.data.passes[side.pass[op]]}: ${words[side.op[op]]}`,
      `${words[side.at[op]]}${where ? `, region ${where}` : ""}`,
      `${ms.toPrecision(3)} ms on ${this.data.devices[this.state.device].label}`,
      `${bytes(total[op])} alive`,
    ];
    this.groups.names.forEach((name, g) => rows[g][op] > 0 && lines.push(`  ${bytes(rows[g][op])} ${name}`));
    return lines;
  }

  hover(i, op, event) {
    if (!this.charts[i].side.op.length) return;
    this.tip.textContent = this.describe(i, op).join("\n");
    Object.assign(this.tip.style, { display: "block", left: `${event.pageX + 14}px`, top: `${event.pageY + 14}px` });
  }

  pin(i, op) {
    if (!this.charts[i].side.op.length) return;
    this.state.pinned = { side: i, op };
    const side = this.charts[i].side;
    const device = this.data.devices[this.state.device];
    const rows = alive(side, op, 12).map((b) => {
      const made = Math.min(side.made[b], side.op.length - 1);
      const ms = price(side, made, device);
      const gib = side.bytes[b] ? (ms / side.bytes[b]) * 2 ** 30 : 0;
      const texts = [side.op[made], side.owner[b], side.at[made]].map((w) => this.data.words[w]);
      return [side.bytes[b], LABELS[this.data.categories[side.category[b]]], ms, gib, ...texts];
    });
    const columns = ["bytes", "category", "ms", "ms per GiB", "made by", "region", "line"];
    this.detail.replaceChildren(
      element("h2", { textContent: `${this.charts[i].name}: ${this.describe(i, op).slice(0, 4).join("; ")}` }),
      this.table(columns, rows),
    );
    this.draw();
  }

  tellKept() {
    const columns = ["bytes", "category", "each", "ms", "ms per GiB", "name", "op", "region", "line"];
    const rows = sorted(keptRows(this.data, this.data.devices[this.state.device]), ...this.order);
    const press = (column) => {
      this.order = [column, this.order[0] === column ? !this.order[1] : column < 5];
      this.tellKept();
    };
    const shown = rows.slice(0, MOST_ROWS);
    const more = rows.length - shown.length;
    this.kept.replaceChildren(
      element("p", { textContent: "Price: the time of the op that makes the value again, by the device's roofline. " +
        "A value of few ms per GiB is a good one to recompute." }),
      this.table(columns, shown, press),
      more > 0 ? `... and ${more} more, in the order chosen` : "",
    );
  }

  table(columns, rows, press) {
    const text = (value, c) => {
      if (value === null) return "";
      if (typeof value !== "number") return value;
      return columns[c] === "bytes" ? bytes(value) : value.toPrecision(3);
    };
    const heads = columns.map((name, c) => {
      if (!press) return element("th", { textContent: name });
      const arrow = this.order[0] !== c ? "" : this.order[1] ? " \u25be" : " \u25b4";
      const head = element("th", {}, element("button", { textContent: name + arrow, onclick: () => press(c) }));
      head.setAttribute("aria-sort", this.order[0] !== c ? "none" : this.order[1] ? "descending" : "ascending");
      return head;
    });
    const body = rows.map((row) => element("tr", {}, ...row.map((value, c) =>
      element("td", { className: typeof value === "number" ? "r" : "", textContent: text(value, c) }))));
    return element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
  }
}

if (typeof document !== "undefined")
  new Cockpit(document.getElementById("cockpit"), JSON.parse(document.getElementById("cockpit-data").textContent));
