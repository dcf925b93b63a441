"use strict";
// The cockpit's numbers: bytes, prices, stacks and points, of the record that the page holds.

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
function keptRows(words, choice, device) {
  const side = choice.columns;
  const made = choice.kept.map(([size, category, shape, name, op]) => {
    const ms = price(side, op, device);
    const gib = size ? (ms / size) * 2 ** 30 : 0;
    const at = op < side.at.length ? words[side.at[op]] : "";
    return [size, LABELS[category], shape, ms, gib, name, words[side.op[op]] || "", words[side.region[op]] || "", at];
  });
  const held = choice.held.map(([size, why, shape, path]) => [size, `${why}, lives anyway`, shape, null, null, path, "", "", ""]);
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

