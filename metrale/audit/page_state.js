// SPDX-License-Identifier: MIT OR Apache-2.0
// What the page shows: a backend's records, in columns of arrays; a record is its index i. The page's scripts are one.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const text = (place) => (place < 0 ? "" : data.strings[place]);
const lower = data.strings.map((s) => s.toLowerCase());
const LEFT = 62,
  BOTTOM = 20,
  TOP = 4,
  ROW = 28,
  COLOURS = 8;
const MOST_PIXELS = 8e6; // a higher element is more than browsers scroll exactly

let b, r, n; // the backend, its records, their number
let isMemory, inPeak, end, order, top_;
let view,
  whole,
  axis = "time";
let shown = [],
  mask,
  selected = -1,
  hovered = -1;
let tab = "records",
  filter = "all",
  sortBy = "nbytes",
  down = true;
let colours,
  colourOf,
  ids = null,
  picture = null,
  plot = null;

// ---- words

const UNITS = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
];
function size(bytes) {
  const unit = UNITS.find(([u]) => bytes >= u);
  if (!unit) return `${bytes} B`;
  const value = bytes / unit[0];
  return `${Number(value.toPrecision(value >= 1000 ? 4 : 3))} ${unit[1]}`;
}
const number = (v) => v.toLocaleString("en-US");
const exactly = (bytes) => `${number(bytes)} bytes${bytes >= 1024 ? ` (${size(bytes)})` : ""}`;
function time(us, step = us) {
  const [unit, name] = Math.abs(step) >= 1e6 ? [1e6, "s"] : Math.abs(step) >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(Math.abs(step) / unit || 1))));
  return `${Number((us / unit).toFixed(digits))} ${name}`;
}
const span = (from, to) =>
  axis === "time"
    ? `${time(from, Math.max(to, 1))} to ${time(to, Math.max(to, 1))}`
    : `event ${number(Math.floor(from))} to ${number(Math.ceil(to))}`;
function site(place) {
  const s = text(place),
    cwd = `${data.process.cwd}/`;
  return s.startsWith(cwd) ? s.slice(cwd.length) : s;
}
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
const swatch = (i) => make("span", { className: "swatch", style: `background:var(--${i < 0 ? "other" : `c${i}`})` });

// ---- a backend

function open(number_) {
  b = data.backends[number_];
  r = b.records;
  n = r.seq.length;
  const memory = new Set(b.memoryKinds);
  const pinned = data.strings.indexOf("pinned");
  isMemory = Uint8Array.from(r.kind, (kind) => memory.has(kind));
  inPeak = Uint8Array.from(
    r.seq,
    (seq, i) =>
      isMemory[i] && r.kind[i] !== pinned && seq <= b.peak_seq && (r.freedSeq[i] === 0 || r.freedSeq[i] > b.peak_seq),
  );
  top_ = 1;
  for (let i = 0; i < n; i++) if (isMemory[i]) top_ = Math.max(top_, r.offset[i] + r.nbytes[i]);
  order = [];
  for (let i = 0; i < n; i++) if (isMemory[i] && !r.leaked[i]) order.push(i);
  for (let i = 0; i < n; i++) if (isMemory[i] && r.leaked[i]) order.push(i); // last: never painted over
  selected = hovered = -1;
  mask = new Uint8Array(n).fill(1);
  tiles();
  chooseColours();
  chooseAxis();
  search();
}

function tiles() {
  let leaked = 0,
    bytes = 0,
    allocations = 0,
    handles = 0;
  for (let i = 0; i < n; i++) {
    allocations += isMemory[i];
    if (r.leaked[i]) {
      leaked++;
      bytes += r.nbytes[i];
      handles += !isMemory[i];
    }
  }
  const peakAt = r.seq.indexOf(b.peak_seq);
  const lost = !leaked ? "nothing" : bytes ? `${size(bytes)} in ${number(leaked)}` : number(leaked);
  const share = b.total_bytes
    ? `${((100 * b.peak_bytes) / b.total_bytes).toPrecision(2)} % of ${size(b.total_bytes)}`
    : "";
  $("tiles").replaceChildren(
    ...[
      ["Peak", size(b.peak_bytes), `${share}${peakAt >= 0 ? `, after ${time(r.time[peakAt])}` : ""}`],
      [
        "Leaked",
        lost,
        leaked
          ? `${number(leaked - handles)} allocations, ${number(handles)} streams, events, graphs`
          : "all was given back",
        leaked,
      ],
      ["Allocations", number(allocations), `${number(r.seq.length - allocations)} streams, events, graphs, modules`],
      ["Device", b.name, `${b.kind}${b.forgotten ? `; ${number(b.forgotten)} records forgotten` : ""}`],
    ].map(([name, value, more, bad]) =>
      make(
        "div",
        { className: bad ? "tile bad" : "tile" },
        make("span", { className: "quiet", textContent: name }),
        make("b", { textContent: value, title: value }),
        make("span", { className: "quiet", textContent: more, title: more }),
      ),
    ),
  );
}

function chooseColours() {
  const by = $("colour").value;
  const names = b.groups[by]
    .filter(([, , nbytes]) => nbytes > 0)
    .slice(0, COLOURS)
    .map(([place]) => place);
  const place = new Map(names.map((name, i) => [name, i]));
  const none = data.strings.indexOf("-");
  colourOf = Int8Array.from(r[by], (value) => place.get(value < 0 ? none : value) ?? -1);
  const style = getComputedStyle(document.documentElement);
  const value = (name) => {
    const hex = style.getPropertyValue(name).trim();
    const full = hex.length === 4 ? hex.replace(/[^#]/g, "$&$&") : hex;
    return [1, 3, 5].map((at) => parseInt(full.slice(at, at + 2), 16));
  };
  const back = value("--plot");
  const pack = (rgb, share = 1) =>
    rgb.reduce((all, c, i) => all | (Math.round(c * share + back[i] * (1 - share)) << (8 * i)), 0xff << 24) >>> 0;
  const kinds = [...Array(COLOURS).keys()].map((i) => value(`--c${i}`)).concat([value("--other")]);
  colours = {
    full: kinds.map((c) => pack(c)),
    edge: kinds.map((c) => pack(c, 0.6)),
    dim: kinds.map((c) => pack(c, 0.16)),
    back: pack(back),
    leak: pack(value("--leak")),
    dimLeak: pack(value("--leak"), 0.25),
    css: Object.fromEntries(
      ["--text", "--quiet", "--line", "--accent", "--area", "--leak", "--plot"].map((c) => [
        c,
        style.getPropertyValue(c),
      ]),
    ),
  };
  const items = names.map((name, i) => {
    const word = by === "site" ? site(name) : text(name);
    const button = make(
      "button",
      { title: `Search for ${text(name)}` },
      swatch(i),
      make("span", { textContent: word }),
    );
    button.onclick = () => setSearch(word === "-" ? "" : word);
    return button;
  });
  if (b.groups[by].length > COLOURS)
    items.push(make("button", { disabled: true }, swatch(-1), make("span", { textContent: "others" })));
  $("legend").replaceChildren(...items);
}

function chooseAxis() {
  axis = $("axis").value;
  const last =
    axis === "time"
      ? data.process.seconds * 1e6
      : 1 + r.seq.reduce((most, seq, i) => Math.max(most, seq, r.freedSeq[i]), 0);
  const freed = axis === "time" ? r.freedTime : r.freedSeq;
  end = Float64Array.from(freed, (at, i) => (r.freedSeq[i] === 0 ? last : at));
  whole = { x0: 0, x1: Math.max(last, 1), y0: 0, y1: top_ * 1.04 };
  view = { ...whole };
}
