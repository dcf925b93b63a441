// The cockpit: live bytes of one step without remat and under the policy that the slider chose. Nothing is
// loaded from elsewhere.

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// A cell, which says its column where rows are not side by side.
function cell(head, content, className = "") {
  const made = element("td", { className }, ...(content === "" ? [] : [content]));
  made.setAttribute("data-head", head);
  return made;
}

class Cockpit {
  constructor(root, data) {
    this.data = data;
    this.state = { by: "category", args: true, device: "h100", extra: 0, pinned: null, choice: data.start };
    this.large = new Map();
    this.root = root;
    this.build();
    this.stack();
  }

  // What the slider stands on, and its columns, which are read when they are asked for first.
  get summary() { return this.data.choices[this.state.choice]; }
  get choice() {
    const i = this.state.choice;
    if (!this.large.has(i))
      this.large.set(i, JSON.parse(document.getElementById(`cockpit-choice-${i}`).textContent));
    return this.large.get(i);
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
    this.detail = element("div", { className: "wide" });
    this.detail.setAttribute("aria-live", "polite");
    this.kept = element("div", { className: "wide" });
    this.charts = this.data.plain ? [this.chart(0), this.chart(1)] : [this.chart(0)];
    this.frontier = this.data.choices.length > 1 ? this.switcher() : [];
    const [slider, ...frontier] = this.frontier;
    this.root.append(
      element("h1", { textContent: `${this.data.name}: live bytes through forward and backward` }),
      ...(slider ? [slider] : []),
      ...this.charts.flatMap((chart) => [chart.title, chart.canvas]),
      this.legend,
      element("div", { className: "bar" }, element("label", {}, "stack by ", by),
        element("label", {}, args, " arguments and weights"), element("label", {}, "device ", this.device),
        element("label", {}, "optimizer and others, GiB ", extra)),
      this.fits,
      this.tip,
      this.detail,
      ...frontier,
      element("h2", { textContent: "What waits between forward and backward" }),
      this.kept,
    );
    this.order = [0, true];
    window.addEventListener("resize", () => this.draw());
  }

  chart(i) {
    const canvas = element("canvas", { tabIndex: 0 });
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
      this.pin(i, Math.max(0, Math.min(this.charts[i].side.op.length - 1, from + step)));
    };
    return { canvas, title, columns: [] };
  }

  // The frontier: a slider, the points, and a table of the policies, which all choose one.
  switcher() {
    this.slider = element("input", { type: "range", min: 0, max: this.data.choices.length - 1, step: 1 });
    this.slider.oninput = () => this.choose(Number(this.slider.value));
    this.slider.setAttribute("aria-label", "policy, from the least memory to the most");
    this.chosen = element("output", {});
    this.map = element("canvas", { className: "map" });
    this.map.setAttribute("role", "img");
    this.map.onmousemove = (event) => this.tell(this.nearest(event), event);
    this.map.onmouseleave = () => (this.tip.style.display = "none");
    this.map.onclick = (event) => this.choose(this.nearest(event));
    this.policies = element("div", { className: "wide" });
    return [
      element("div", { className: "bar" }, element("label", {}, "less memory ", this.slider, " less recomputation"), this.chosen),
      element("h2", { textContent: "The frontier: memory of the step against time of what runs again" }),
      element("div", { className: "split" }, this.map, this.policies),
    ];
  }

  choose(i) {
    if (this.state.pinned && this.state.pinned.side === this.charts.length - 1) {
      this.state.pinned = null;
      this.detail.replaceChildren();
    }
    this.set("choice", i);
  }

  set(key, value) {
    this.state[key] = value;
    this.stack();
  }

  stack() {
    const group = this.state.by === "region" ? byRegion : byCategory;
    const { plain } = this.data;
    const sides = plain ? [plain.columns, this.choice.columns] : [this.choice.columns];
    const names = plain ? [plain.label, this.summary.label] : [this.summary.label];
    this.groups = group(this.data, sides);
    this.charts.forEach((chart, i) => {
      Object.assign(chart, { side: sides[i], name: names[i] });
      chart.rows = stacks(chart.side, this.groups.of[i], this.groups.names.length, this.state.args);
      chart.total = totals(chart.rows);
    });
    // One scale for both, with room above for words.
    this.most = 1.1 * Math.max(1, ...this.charts.map((c) => c.total.reduce((a, b) => Math.max(a, b), 0)));
    this.legend.replaceChildren(...this.groups.names.map((name, i) => {
      const box = element("i", {});
      box.style.background = COLOURS[i];
      return element("span", { className: "key" }, box, name);
    }));
    this.tellFits();
    if (this.frontier.length) this.tellPolicies();
    this.tellKept();
    this.draw();
  }

  get extra() { return this.state.extra * 2 ** 30; }

  tellFits() {
    const shown = this.data.plain ? [this.data.plain, this.summary] : [this.summary];
    this.fits.replaceChildren(...shown.map((each) => {
      const used = pointOf(each, this.state.device, this.extra).bytes;
      const { fits, text } = verdict(this.data.devices[this.state.device], used);
      return element("span", { className: fits ? "yes" : "no", textContent: `${each.label}: ${bytes(used)}, ${text}` });
    }));
  }

  tellPolicies() {
    const { device, choice } = this.state;
    this.slider.value = choice;
    this.slider.setAttribute("aria-valuetext", this.summary.label);
    this.chosen.textContent = this.summary.label;
    const heads = ["policy", "step", "kept", "ms recomputed", "of the step", "fits"];
    const rows = this.data.choices.map((each, i) => {
      const { bytes: used, ms } = pointOf(each, device, this.extra);
      const share = this.data.step_ms[device] ? (100 * ms) / this.data.step_ms[device] : 0;
      const fits = used <= this.data.devices[device].memory ? "yes" : "no";
      const name = element("button", { textContent: each.label, onclick: () => this.choose(i) });
      name.setAttribute("aria-pressed", String(i === choice));
      const cells = [bytes(used), bytes(each.kept_bytes), ms.toPrecision(3), `+${share.toFixed(0)}%`, fits];
      const row = element("tr", { className: i === choice ? "chosen" : "", onclick: () => this.choose(i) },
        cell(heads[0], name), ...cells.map((text, c) => cell(heads[c + 1], text, "r")));
      return row;
    });
    this.policies.replaceChildren(element("table", {},
      element("thead", {}, element("tr", {}, ...heads.map((text, c) => element("th", { textContent: text, className: c ? "r" : "" })))),
      element("tbody", {}, ...rows)));
  }

  // Where each choice, and last the step without remat, stands on the picture of the frontier.
  places() {
    const { device } = this.state;
    const all = this.data.plain ? [...this.data.choices, this.data.plain] : this.data.choices;
    const points = all.map((each) => pointOf(each, device, this.extra));
    const right = 1.08 * Math.max(1, ...points.map((p) => p.bytes));
    const top = 1.15 * Math.max(1e-12, ...points.map((p) => p.ms));
    const { width, height } = this.map;
    const [left, foot] = [LEFT * this.ratio, 34 * this.ratio];
    const at = (p) => ({
      x: left + (p.bytes / right) * (width - left),
      y: (height - foot) * (1 - p.ms / top),
    });
    return { points, at, left, foot, right, top };
  }

  nearest(event) {
    const { points, at } = this.places();
    const box = this.map.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) * (this.map.width / box.width), (event.clientY - box.top) * (this.map.height / box.height)];
    const apart = points.slice(0, this.data.choices.length).map(at).map((p) => Math.hypot(p.x - x, p.y - y));
    return apart.indexOf(Math.min(...apart));
  }

  tell(i, event) {
    const each = this.data.choices[i];
    const { bytes: used, ms } = pointOf(each, this.state.device, this.extra);
    const away = each.host_bytes ? `, ${bytes(each.host_bytes)} on the host` : "";
    this.tip.textContent = `${each.label}\n${bytes(used)} for the step, ${bytes(each.kept_bytes)} kept${away}\n${ms.toPrecision(3)} ms recomputed`;
    Object.assign(this.tip.style, { display: "block", left: `${event.pageX + 14}px`, top: `${event.pageY + 14}px` });
  }

  get ratio() { return window.devicePixelRatio || 1; }
  // Text and axes have the colour of the page's text, which is light in dark mode.
  get ink() { return getComputedStyle(this.root).color; }

  // A canvas of so many pixels a line, ready to be drawn on.
  pen(canvas, height) {
    const size = { width: Math.round((canvas.clientWidth || 900) * this.ratio), height: Math.round(height * this.ratio) };
    Object.assign(canvas, size);
    const pen = canvas.getContext("2d");
    pen.font = `${12 * this.ratio}px system-ui, sans-serif`;
    pen.fillStyle = this.ink;
    return pen;
  }

  // Text whose middle, left or right end is at x, and which stays on the canvas.
  write(pen, text, x, y, share = 0) {
    const wide = pen.measureText(text).width;
    pen.fillText(text, Math.max(0, Math.min(x - share * wide, pen.canvas.width - wide)), y);
  }

  drawFrontier() {
    const { ratio } = this;
    const pen = this.pen(this.map, 260);
    const { points, at, left, foot, right, top } = this.places();
    const ground = this.map.height - foot;
    pen.fillRect(left, 0, ratio, ground);
    pen.fillRect(left, ground, this.map.width - left, ratio);
    for (const n of ticks(right, 1024)) {
      const { x } = at({ bytes: n, ms: 0 });
      pen.fillRect(x, ground, ratio, 4 * ratio);
      this.write(pen, tickText(n), x, ground + 16 * ratio, 0.5);
    }
    for (const ms of ticks(top, 1000)) {
      const { y } = at({ bytes: 0, ms });
      pen.fillRect(left - 4 * ratio, y, 4 * ratio, ratio);
      this.write(pen, `${Number(ms.toPrecision(3))}`, left - 7 * ratio, Math.max(10 * ratio, y + 4 * ratio), 1);
    }
    this.write(pen, "memory of the step", this.map.width, this.map.height - 4 * ratio, 1);
    this.write(pen, "ms recomputed", left + 6 * ratio, 12 * ratio);
    pen.strokeStyle = "#999999";
    pen.lineWidth = ratio;
    pen.beginPath();
    undominated(points).map(at).forEach((p, i) => (i ? pen.lineTo(p.x, p.y) : pen.moveTo(p.x, p.y)));
    pen.stroke();
    // The chosen one is on top of all others.
    points.forEach((point, i) => i !== this.state.choice && this.dot(pen, at(point), i, ratio));
    this.dot(pen, at(points[this.state.choice]), this.state.choice, ratio);
    this.map.setAttribute("aria-label", `${points.length} points; chosen: ${this.summary.label}`);
  }

  dot(pen, { x, y }, i, ratio) {
    const [chosen, plain] = [i === this.state.choice, i === this.data.choices.length];
    pen.fillStyle = plain ? this.ink : chosen ? "#d55e00" : "#0072b2";
    pen.beginPath();
    if (plain) pen.fillRect(x - 4 * ratio, y - 4 * ratio, 8 * ratio, 8 * ratio);
    else pen.arc(x, y, (chosen ? 7 : 4) * ratio, 0, 7);
    pen.fill();
    if (plain) this.write(pen, "without remat", x, y - 9 * ratio, 0.5);
    if (!chosen) return;
    // Beside the point, on the side where there is room.
    const label = this.summary.label.length > 40 ? this.summary.label.slice(0, 39) + "\u2026" : this.summary.label;
    const wide = pen.measureText(label).width;
    const beside = x + 12 * ratio + wide < this.map.width ? x + 12 * ratio : x - 12 * ratio - wide;
    pen.fillText(label, Math.max(0, beside), Math.max(26 * ratio, y - 8 * ratio));
  }

  draw() {
    if (this.frontier.length) this.drawFrontier();
    this.charts.forEach((chart, i) => {
      const { canvas, side, total } = chart;
      const pen = this.pen(canvas, HIGH + FOOT);
      chart.columns = decimated(total, side.op.length, Math.max(1, canvas.width - Math.round(LEFT * this.ratio)));
      chart.rows.forEach((_, g) => this.paint(pen, chart, g));
      this.drawAxes(pen, chart, this.spans(i));
      this.drawLabels(pen, chart);
      const peak = total.reduce((a, b) => Math.max(a, b), 0);
      chart.title.textContent = `${chart.name}: at most ${bytes(peak)}`;
      canvas.setAttribute("aria-label", `${chart.title.textContent}; arrow keys step through the ops`);
    });
    this.mark();
  }

  // The blocks of the forward and of the backward. A step without remat has the ops of the forward, not regions.
  spans(i) {
    const shown = this.charts[this.charts.length - 1].side;
    const { side } = this.charts[i];
    return spans(side, shown.boundary === side.boundary ? shown : side, this.data.words);
  }

  drawAxes(pen, { canvas, side, name }, spans) {
    const { ratio } = this;
    const [left, ground] = [Math.round(LEFT * ratio), HIGH * ratio];
    const at = (op) => left + (op / Math.max(1, side.op.length)) * (canvas.width - left);
    pen.fillStyle = this.ink;
    pen.fillRect(left, ground, canvas.width - left, ratio);
    for (const n of ticks(this.most, 1024)) {
      const y = ground * (1 - n / this.most);
      pen.fillRect(left - 4 * ratio, y, 4 * ratio, ratio);
      this.write(pen, tickText(n), left - 7 * ratio, Math.max(10 * ratio, y + 4 * ratio), 1);
    }
    pen.fillRect(Math.round(at(side.boundary)), 0, Math.max(1, ratio), ground + 4 * ratio);
    this.write(pen, "forward", left + 6 * ratio, 13 * ratio);
    this.write(pen, "backward", at(side.boundary) + 5 * ratio, 13 * ratio);
    let free = 0;
    for (const { from, end, name } of spans) {
      const [x, wide] = [at(from), pen.measureText(name).width];
      pen.fillRect(x, ground, ratio, 5 * ratio);
      // A name where it has room, and its mark in any case.
      const start = Math.max(left, (x + at(end) - wide) / 2);
      if (start < free || start + wide > canvas.width) continue;
      pen.fillText(name, start, ground + 17 * ratio);
      free = start + wide + 6 * ratio;
    }
  }

  // What an area is, written into it where it is thickest.
  drawLabels(pen, chart) {
    const [left, ground] = [Math.round(LEFT * this.ratio), HIGH * this.ratio];
    this.groups.names.forEach((name, g) => {
      const wide = pen.measureText(name).width + 8 * this.ratio;
      const spot = roomiest(chart, g, Math.ceil(wide), (15 * this.ratio * this.most) / ground);
      if (!spot) return;
      pen.fillStyle = DARK.has(COLOURS[g]) ? "#ffffff" : "#1c1c1c";
      pen.fillText(name, left + spot.x + 4 * this.ratio, ground * (1 - spot.middle / this.most) + 4 * this.ratio);
    });
  }

  paint(pen, chart, group) {
    const [left, ground] = [Math.round(LEFT * this.ratio), HIGH * this.ratio];
    pen.fillStyle = COLOURS[group];
    chart.columns.forEach((op, x) => {
      let below = 0;
      for (let g = 0; g < group; g++) below += chart.rows[g][op];
      const [bottom, top] = [below, below + chart.rows[group][op]].map((v) => ground * (1 - v / this.most));
      if (bottom - top > 0) pen.fillRect(left + x, top, 1, bottom - top);
    });
  }

  mark() {
    const pinned = this.state.pinned;
    if (!pinned) return;
    const { canvas, side } = this.charts[pinned.side];
    const left = Math.round(LEFT * this.ratio);
    const pen = canvas.getContext("2d");
    pen.fillStyle = this.ink;
    pen.fillRect(left + Math.round((pinned.op / side.op.length) * (canvas.width - left)), 0, 2, HIGH * this.ratio);
  }

  opAt(i, event) {
    const { canvas, columns } = this.charts[i];
    const box = canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT)) * columns.length);
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
      const texts = [side.shape[b], side.op[made], side.owner[b], side.at[made]].map((w) => this.data.words[w]);
      return [side.bytes[b], LABELS[this.data.categories[side.category[b]]], ms, gib, ...texts];
    });
    const columns = ["bytes", "category", "ms", "ms per GiB", "shape", "op", "region", "line"];
    this.detail.replaceChildren(
      element("h2", { textContent: `${this.charts[i].name}: ${this.describe(i, op).slice(0, 4).join("; ")}` }),
      this.table(columns, rows),
    );
    this.draw();
  }

  tellKept() {
    const columns = ["bytes", "times", "category", "shape", "ms", "ms per GiB", "from", "region", "line"];
    const rows = sorted(keptRows(this.data.words, this.choice, this.data.devices[this.state.device]), ...this.order);
    const press = (column) => {
      this.order = [column, this.order[0] === column ? !this.order[1] : column < 6];
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
      return columns[c] === "bytes" ? bytes(value) : columns[c] === "times" ? `${value}` : value.toPrecision(3);
    };
    const heads = columns.map((name, c) => {
      if (!press) return element("th", { textContent: name });
      const arrow = this.order[0] !== c ? "" : this.order[1] ? " \u25be" : " \u25b4";
      const head = element("th", {}, element("button", { textContent: name + arrow, onclick: () => press(c) }));
      head.setAttribute("aria-sort", this.order[0] !== c ? "none" : this.order[1] ? "descending" : "ascending");
      return head;
    });
    const body = rows.map((row) => element("tr", {}, ...row.map((value, c) =>
      cell(columns[c], text(value, c), typeof value === "number" ? "r" : ""))));
    return element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body));
  }
}

if (typeof document !== "undefined")
  new Cockpit(document.getElementById("cockpit"), JSON.parse(document.getElementById("cockpit-data").textContent));
