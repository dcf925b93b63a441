"use strict";
// The cockpit's numbers: bytes, prices, stacks and points, of the record that the page holds.

// Okabe and Ito's palette, which colour-blind people can tell apart.
const COLOURS = ["#999999", "#0072b2", "#56b4e9", "#e69f00", "#cc79a7", "#f0e442", "#009e73", "#d55e00"];
const LABELS = {
  arguments: "arguments and weights",
  policy: "kept by policy",
  inputs: "inputs that regions keep",
  autograd: "kept by autograd",
  recomputed: "recomputed",
  other: "gradients and temporary values",
};
const MOST_ROWS = 500;
// White text stands on these, black text on the others.
const DARK = new Set(["#0072b2", "#d55e00"]);
// Sizes of a picture in pixels of the page: the room of its axes, and the height of what is drawn.
const [LEFT, HIGH, FOOT] = [64, 190, 24];

// Halves to even, as Python does: the report below the pictures must say the same.
function tenths(x) {
  const up = Math.round(10 * x);
  return (((10 * x) % 1 === 0.5 && up % 2 ? up - 1 : up) / 10).toFixed(1);
}

function bytes(n) {
  const sign = n < 0 ? "-" : "";
  let size = Math.abs(n);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (size < 1024) return sign + (unit === "B" ? size : tenths(size)) + " " + unit;
    size /= 1024;
  }
  return sign + tenths(size) + " TiB";
}

// Round numbers from 0 to `most`, about five of them. Of bytes they are round in their unit.
function ticks(most, base) {
  const unit = base === 1024 ? 1024 ** Math.max(0, Math.floor(Math.log(most) / Math.log(1024))) : 1;
  const power = 10 ** Math.floor(Math.log10(most / unit / 4));
  const step = unit * power * [1, 2, 5, 10].find((n) => most / (unit * power * n) <= 5.5);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

function tickText(n) {
  return n ? bytes(n).replace(".0 ", " ") : "0";
}

// Where the blocks of a step begin and end: [{from, end, name}], of the forward and of the backward. `named` has
// the regions of the forward, and may be another step with the same forward ops.
function spans(side, named, words) {
  const outside = words.indexOf("");
  const runs = (first, end, region) => {
    const found = [];
    for (let i = first; i < end; i++) {
      const name = region(i);
      if (name === outside || name === undefined) continue;
      const last = found[found.length - 1];
      if (last && last.word === name) last.end = i + 1;
      else found.push({ word: name, from: i, end: i + 1 });
    }
    return found;
  };
  const forward = runs(0, side.boundary, (i) => named.region[i]);
  // An op of the backward belongs to the block whose ops run again, or whose kept values go first.
  const region = new Map();
  for (let b = 0; b < side.bytes.length; b++) {
    const [made, freed] = [side.made[b], side.freed[b]];
    if (made >= side.boundary || freed <= side.boundary || freed >= side.op.length) continue;
    if (!region.has(freed)) region.set(freed, named.region[made]);
  }
  for (let i = side.boundary; i < side.op.length; i++) if (side.region[i] !== outside) region.set(i, side.region[i]);
  const backward = runs(side.boundary, side.op.length, (i) => region.get(i));
  const found = [...forward, ...backward];
  return found.map((span) => ({ ...span, name: words[span.word] }));
}

// The place where a group of a chart is thick enough for a text so many columns wide, or undefined.
function roomiest({ columns, rows }, group, wide, least) {
  let best;
  for (let x = 0; x + wide <= columns.length; x += Math.max(1, wide >> 2)) {
    let [low, high] = [0, Infinity];
    for (let i = x; i < x + wide; i += 4) {
      let below = 0;
      for (let g = 0; g < group; g++) below += rows[g][columns[i]];
      [low, high] = [Math.max(low, below), Math.min(high, below + rows[group][columns[i]])];
    }
    if (high - low >= least && (!best || high - low > best.thick)) best = { x, thick: high - low, middle: (low + high) / 2 };
  }
  return best;
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

// Rows of the table of kept values, those that differ by their region alone as one.
function keptRows(words, choice, device) {
  const side = choice.columns;
  const made = choice.kept.map(([size, category, shape, name, op]) => {
    const ms = price(side, op, device);
    const gib = size ? (ms / size) * 2 ** 30 : 0;
    const at = op < side.at.length ? words[side.at[op]] : "";
    const from = (name ? `${name}, ` : "") + (words[side.op[op]] || "");
    return [size, 1, LABELS[category], shape, ms, gib, from, words[side.region[op]] || "", at];
  });
  const held = choice.held.map(([size, why, shape, path]) => [size, 1, `${why}, lives anyway`, shape, null, null, path, "", ""]);
  const groups = new Map();
  for (const row of made) {
    const key = JSON.stringify([row[0], ...row.slice(2, 7), row[8]]);
    groups.set(key, [...(groups.get(key) || []), row]);
  }
  const one = ([first, ...more]) => {
    const names = [...new Set([first, ...more].map((row) => row[7]))];
    const region = names.length > 2 ? `${names[0]} to ${names[names.length - 1]}` : names.join(", ");
    return [first[0] * (1 + more.length), 1 + more.length, ...first.slice(2, 7), region, first[8]];
  };
  return [...[...groups.values()].map(one), ...held];
}

function sorted(rows, column, down) {
  const sign = down ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [a[column], b[column]];
    if (x === null || y === null) return x === y ? 0 : x === null ? 1 : -1;
    return sign * (x < y ? -1 : x > y ? 1 : 0);
  });
}

// Bytes of a step, and milliseconds that it recomputes, of a policy or of no remat.
function pointOf(choice, device, extra) {
  return { bytes: choice.peak + choice.arguments + extra, ms: choice.recomputed_ms[device] };
}

// Those of the points that no other one beats in both bytes and time.
function undominated(points) {
  return points
    .filter((p) => !points.some((q) => q.bytes <= p.bytes && q.ms <= p.ms && (q.bytes < p.bytes || q.ms < p.ms)))
    .sort((p, q) => p.bytes - q.bytes);
}

