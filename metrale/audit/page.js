// SPDX-License-Identifier: MIT OR Apache-2.0
// Records are columns of arrays; a record is its index i. Blocks are painted pixel by pixel, with the index of the record
// beside each pixel: that is as fast for 100,000 blocks as for ten, and what lies under the pointer is one look-up.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const text = (place) => (place < 0 ? "" : data.strings[place]);
const lower = data.strings.map((s) => s.toLowerCase());
const LEFT = 62, BOTTOM = 20, TOP = 4, ROW = 28, COLOURS = 8;
const MOST_PIXELS = 8e6; // a higher element is more than browsers scroll exactly

let b, r, n;             // the backend, its records, their number
let isMemory, inPeak, end, order, top_;
let view, whole, axis = "time";
let shown = [], mask, selected = -1, hovered = -1;
let tab = "records", filter = "all", sortBy = "nbytes", down = true;
let colours, colourOf, ids = null, picture = null, plot = null;

// ---- words

const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
function size(bytes) {
  const unit = UNITS.find(([u]) => bytes >= u);
  if (!unit) return `${bytes} B`;
  const value = bytes / unit[0];
  return `${Number(value.toPrecision(value >= 1000 ? 4 : 3))} ${unit[1]}`;
}
const number = (v) => v.toLocaleString("en-US");
function time(us, step = us) {
  const [unit, name] = Math.abs(step) >= 1e6 ? [1e6, "s"] : Math.abs(step) >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const digits = Math.max(0, Math.min(6, 2 - Math.floor(Math.log10(Math.abs(step) / unit || 1))));
  return `${Number((us / unit).toFixed(digits))} ${name}`;
}
const span = (from, to) => (axis === "time"
  ? `${time(from, Math.max(to, 1))} to ${time(to, Math.max(to, 1))}` : `event ${number(Math.floor(from))} to ${number(Math.ceil(to))}`);
function site(place) {
  const s = text(place), cwd = `${data.process.cwd}/`;
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
  inPeak = Uint8Array.from(r.seq, (seq, i) => isMemory[i] && r.kind[i] !== pinned && seq <= b.peak_seq
    && (r.freedSeq[i] === 0 || r.freedSeq[i] > b.peak_seq));
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
  let leaked = 0, bytes = 0, allocations = 0, handles = 0;
  for (let i = 0; i < n; i++) {
    allocations += isMemory[i];
    if (r.leaked[i]) { leaked++; bytes += r.nbytes[i]; handles += !isMemory[i]; }
  }
  const peakAt = r.seq.indexOf(b.peak_seq);
  const lost = !leaked ? "nothing" : bytes ? `${size(bytes)} in ${number(leaked)}` : number(leaked);
  const share = b.total_bytes ? `${(100 * b.peak_bytes / b.total_bytes).toPrecision(2)} % of ${size(b.total_bytes)}` : "";
  $("tiles").replaceChildren(...[
    ["Peak", size(b.peak_bytes), `${share}${peakAt >= 0 ? `, after ${time(r.time[peakAt])}` : ""}`],
    ["Leaked", lost, leaked ? `${number(leaked - handles)} allocations, ${number(handles)} streams, events, graphs` : "all was given back", leaked],
    ["Allocations", number(allocations), `${number(r.seq.length - allocations)} streams, events, graphs, modules`],
    ["Device", b.name, `${b.kind}${b.forgotten ? `; ${number(b.forgotten)} records forgotten` : ""}`],
  ].map(([name, value, more, bad]) => make("div", { className: bad ? "tile bad" : "tile" },
    make("span", { className: "quiet", textContent: name }), make("b", { textContent: value, title: value }),
    make("span", { className: "quiet", textContent: more, title: more }))));
}

function chooseColours() {
  const by = $("colour").value;
  const names = b.groups[by].filter(([, , nbytes]) => nbytes > 0).slice(0, COLOURS).map(([place]) => place);
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
  const pack = (rgb, share = 1) => rgb.reduce((all, c, i) => all | (Math.round(c * share + back[i] * (1 - share)) << (8 * i)), 0xff << 24) >>> 0;
  const kinds = [...Array(COLOURS).keys()].map((i) => value(`--c${i}`)).concat([value("--other")]);
  colours = {
    full: kinds.map((c) => pack(c)), edge: kinds.map((c) => pack(c, 0.6)), dim: kinds.map((c) => pack(c, 0.16)),
    back: pack(back), leak: pack(value("--leak")), dimLeak: pack(value("--leak"), 0.25),
    css: Object.fromEntries(["--text", "--quiet", "--line", "--accent", "--area", "--leak", "--plot"].map((c) => [c, style.getPropertyValue(c)])),
  };
  const items = names.map((name, i) => {
    const word = by === "site" ? site(name) : text(name);
    const button = make("button", { title: `Search for ${text(name)}` }, swatch(i), make("span", { textContent: word }));
    button.onclick = () => setSearch(word === "-" ? "" : word);
    return button;
  });
  if (b.groups[by].length > COLOURS) items.push(make("button", { disabled: true }, swatch(-1), make("span", { textContent: "others" })));
  $("legend").replaceChildren(...items);
}

function chooseAxis() {
  axis = $("axis").value;
  const last = axis === "time" ? data.process.seconds * 1e6 : 1 + r.seq.reduce((most, seq, i) => Math.max(most, seq, r.freedSeq[i]), 0);
  const freed = axis === "time" ? r.freedTime : r.freedSeq;
  end = Float64Array.from(freed, (at, i) => (r.freedSeq[i] === 0 ? last : at));
  whole = { x0: 0, x1: Math.max(last, 1), y0: 0, y1: top_ * 1.04 };
  view = { ...whole };
}

// ---- the canvases

function fit(canvas) {
  const ratio = window.devicePixelRatio || 1, box = canvas.getBoundingClientRect();
  const w = Math.max(Math.round(box.width * ratio), 1), h = Math.max(Math.round(box.height * ratio), 1);
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, ratio, w: box.width, h: box.height };
}

function paint() {
  const canvas = $("blocks"), { context, ratio, w, h } = fit(canvas);
  plot = { x: LEFT, y: TOP, w: Math.max(w - LEFT, 1), h: h - TOP - BOTTOM, ratio };
  const pw = Math.max(Math.round(plot.w * ratio), 1), ph = Math.round(plot.h * ratio);
  if (!picture || picture.width !== pw || picture.height !== ph) {
    picture = context.createImageData(pw, ph);
    ids = new Int32Array(pw * ph);
  }
  const pixels = new Uint32Array(picture.data.buffer);
  pixels.fill(colours.back);
  ids.fill(-1);
  const begin = axis === "time" ? r.time : r.seq;
  const sx = pw / (view.x1 - view.x0), sy = ph / (view.y1 - view.y0);
  for (const i of order) {
    if (end[i] < view.x0 || begin[i] > view.x1 || r.offset[i] > view.y1 || r.offset[i] + r.nbytes[i] < view.y0) continue;
    const xa = Math.floor((begin[i] - view.x0) * sx), xb = Math.max(Math.floor((end[i] - view.x0) * sx), xa + 1);
    const yb = Math.floor(ph - (r.offset[i] - view.y0) * sy);
    const ya = Math.min(Math.floor(ph - (r.offset[i] + r.nbytes[i] - view.y0) * sy), yb - 1);
    const x0 = Math.max(xa, 0), x1 = Math.min(xb, pw), y0 = Math.max(ya, 0), y1 = Math.min(yb, ph);
    const c = colourOf[i] < 0 ? COLOURS : colourOf[i], dim = !mask[i];
    const fill = dim ? colours.dim[c] : colours.full[c], edge = dim ? fill : colours.edge[c];
    const edged = xb - xa > 3 && yb - ya > 3;
    for (let y = y0; y < y1; y++) {
      const at = y * pw;
      pixels.fill(edged && y === ya ? edge : fill, at + x0, at + x1);
      ids.fill(i, at + x0, at + x1);
      if (edged && xb <= pw) pixels[at + xb - 1] = edge;
      if (r.leaked[i]) {
        const leak = dim ? colours.dimLeak : colours.leak;
        if (yb - ya < 4) pixels.fill(leak, at + x0, at + x1);
        else for (let x = x0 + ((8 - ((x0 + y) & 7)) & 7); x < x1; x += 8) pixels.fill(leak, at + x, at + Math.min(x + 2, x1));
      }
    }
  }
  overlay();
  overview();
  const words = span(view.x0, view.x1);
  $("range").textContent = words;
  canvas.setAttribute("aria-label", `Allocations as blocks, ${words}`);
  $("reset").disabled = ["x0", "x1", "y0", "y1"].every((k) => view[k] === whole[k]);
}

function steps(from, to, count, base) {
  const rough = (to - from) / count, power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const factors = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  const step = power * (factors.find((f) => f * power >= rough) ?? base);
  const found = [];
  for (let v = Math.ceil(from / step) * step; v <= to; v += step) found.push(v);
  return [found, step];
}

function overlay() {
  const { context, w, h } = fit($("blocks")), css = colours.css;
  context.clearRect(0, 0, w, h);
  context.putImageData(picture, Math.round(LEFT * plot.ratio), Math.round(TOP * plot.ratio));
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = css["--quiet"];
  context.strokeStyle = css["--line"];
  context.lineWidth = 1;
  const [xs, stepX] = steps(view.x0, view.x1, Math.max(plot.w / 110, 1), 10);
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const v of xs) {
    const x = toX(v);
    if (x < LEFT + 12 || x > w - 24) continue;
    context.fillText(axis === "time" ? time(v, stepX) : `#${number(Math.round(v))}`, x, TOP + plot.h + 5);
  }
  const [ys] = steps(view.y0, view.y1, plot.h / 45, 1024);
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const v of ys) {
    const y = TOP + plot.h * (1 - (v - view.y0) / (view.y1 - view.y0));
    context.globalAlpha = 0.7;
    context.beginPath();
    context.moveTo(LEFT, Math.round(y) + 0.5);
    context.lineTo(w, Math.round(y) + 0.5);
    context.stroke();
    context.globalAlpha = 1;
    if (y < TOP + plot.h - 2 || v === 0) context.fillText(size(v), LEFT - 6, Math.min(Math.max(y, 8), TOP + plot.h - 4));
  }
  context.save();
  context.beginPath();
  context.rect(LEFT, TOP, plot.w, plot.h);
  context.clip();
  for (const [i, width] of [[hovered, 1.5], [selected, 2.5]]) {
    if (i < 0 || !isMemory[i]) continue;
    const begin = axis === "time" ? r.time : r.seq, scale = plot.h / (view.y1 - view.y0);
    const y = TOP + plot.h - (r.offset[i] + r.nbytes[i] - view.y0) * scale;
    context.strokeStyle = css["--text"];
    context.lineWidth = width;
    context.strokeRect(toX(begin[i]), y, Math.max(toX(end[i]) - toX(begin[i]), 2), Math.max(r.nbytes[i] * scale, 2));
  }
  context.restore();
}

function overview() {
  const { context, w, h } = fit($("overview")), css = colours.css, width = w - LEFT, base = h - 6, height = base - 8;
  const at = axis === "time" ? b.live.time : b.live.seq, bytes = b.live.bytes, most = Math.max(b.peak_bytes, 1);
  context.clearRect(0, 0, w, h);
  const scale = width / (whole.x1 - whole.x0);
  // A column of pixels shows the most that lived in it.
  const columns = new Float64Array(Math.max(Math.ceil(width), 1));
  let live = 0, x = 0;
  for (let k = 0; k <= at.length; k++) {
    const to = k < at.length ? Math.min(Math.floor(at[k] * scale), columns.length - 1) : columns.length - 1;
    for (; x < to; x++) columns[x] = Math.max(columns[x], live), columns[x + 1] = live;
    if (k < at.length) { live = bytes[k]; columns[x] = Math.max(columns[x], live); }
  }
  context.beginPath();
  context.moveTo(LEFT, base);
  columns.forEach((v, i) => { context.lineTo(LEFT + i, base - v / most * height); context.lineTo(LEFT + i + 1, base - v / most * height); });
  context.lineTo(w, base);
  context.fillStyle = css["--area"];
  context.fill();
  context.fillStyle = css["--quiet"];
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.fillText(size(b.peak_bytes), LEFT - 6, base - height + 4);
  context.fillText("0", LEFT - 6, base - 4);
  context.strokeStyle = css["--line"];
  context.strokeRect(LEFT + 0.5, base + 0.5, width, 0);
  const from = LEFT + (view.x0 - whole.x0) * scale, to = LEFT + (view.x1 - whole.x0) * scale;
  if (view.x0 > whole.x0 || view.x1 < whole.x1) {
    context.globalAlpha = 0.16;
    context.fillStyle = css["--accent"];
    context.fillRect(from, 2, Math.max(to - from, 2), base - 2);
    context.globalAlpha = 1;
    context.strokeStyle = css["--accent"];
    context.strokeRect(from + 0.5, 2.5, Math.max(to - from - 1, 1), base - 3);
  }
}

const toX = (v) => LEFT + (v - view.x0) / (view.x1 - view.x0) * plot.w;
const fromX = (x) => view.x0 + (x - LEFT) / plot.w * (view.x1 - view.x0);

let waiting = 0;
function repaint() { waiting ||= requestAnimationFrame(() => { waiting = 0; paint(); }); }

function look(x0, x1, y0 = view.y0, y1 = view.y1) {
  const clamp = (from, to, low, high, least) => {
    const width = Math.min(Math.max(to - from, least), high - low), start = Math.min(Math.max(from, low), high - width);
    return [start, start + width];
  };
  const least = axis === "time" ? 0.05 : 2;
  [view.x0, view.x1] = clamp(x0, x1, whole.x0, whole.x1, Math.min(least, whole.x1));
  [view.y0, view.y1] = clamp(y0, y1, whole.y0, whole.y1, Math.min(16, whole.y1));
  repaint();
}

function zoom(factor, x, y, bytes) {
  if (bytes) {
    const at = view.y1 - (y - TOP) / plot.h * (view.y1 - view.y0);
    look(view.x0, view.x1, at - (at - view.y0) * factor, at + (view.y1 - at) * factor);
  } else {
    const at = fromX(x);
    look(at - (at - view.x0) * factor, at + (view.x1 - at) * factor);
  }
}

function under(event) {
  const box = $("blocks").getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left - LEFT) * plot.ratio), y = Math.floor((event.clientY - box.top - TOP) * plot.ratio);
  return x < 0 || y < 0 || x >= picture.width || y >= picture.height ? -1 : ids[y * picture.width + x];
}

// ---- the tooltip

function tip(i, x, y) {
  const box = $("tip");
  box.hidden = i < 0;
  if (i < 0) return;
  const facts = [
    ["bytes", `${number(r.nbytes[i])}${r.nbytes[i] >= 1024 ? ` (${size(r.nbytes[i])})` : ""}`],
    ["from", site(r.site[i])],
    ["born", `#${number(r.seq[i])}, after ${time(r.time[i])}`],
    ["freed", r.leaked[i] ? "never by the program" : r.freedSeq[i] ? `#${number(r.freedSeq[i])}, ${site(r.freedAt[i])}` : "not"],
    ...(life(i) < Infinity ? [["lived", time(life(i))]] : []),
    ["address", `0x${r.ptr[i]}`],
    ...(r.stream[i] >= 0 ? [["stream", text(r.stream[i])]] : []),
  ];
  const title = make("h3", {}, `${text(r.tag[i]) || "no tag"} `, make("span", { className: "quiet", textContent: text(r.kind[i]) }));
  if (r.leaked[i]) title.append(make("span", { className: "leaked", textContent: "  leaked" }));
  box.replaceChildren(title, make("dl", {}, ...facts.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })])));
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(x + 16 + width > innerWidth ? x - 16 - width : x + 16, 4)}px`;
  box.style.top = `${Math.max(Math.min(y + 16, innerHeight - height - 8), 4)}px`;
}

// ---- the table

const RECORDS = [
  { key: "seq", name: "#", width: "72px", number: true, show: (i) => number(r.seq[i]) },
  { key: "nbytes", name: "Bytes", width: "120px", number: true, show: (i) => number(r.nbytes[i]) },
  { key: "kind", name: "Kind", width: "76px", words: true, show: (i) => text(r.kind[i]) },
  { key: "tag", name: "Tag", width: "minmax(130px, 1.2fr)", words: true, show: (i) => text(r.tag[i]), swatch: true },
  { key: "site", name: "Call site", width: "minmax(200px, 2fr)", words: true, show: (i) => site(r.site[i]), code: true, full: (i) => text(r.site[i]) },
  { key: "time", name: "Born after", width: "92px", number: true, show: (i) => time(r.time[i]) },
  { key: "life", name: "Lived", width: "92px", number: true, show: (i) => (r.freedSeq[i] && !r.leaked[i] ? time(life(i)) : "–") },
  { key: "freedAt", name: "Freed at", width: "minmax(180px, 1.6fr)", words: true, show: (i) => (r.leaked[i] ? "leaked" : site(r.freedAt[i])), code: true, full: (i) => text(r.freedAt[i]) },
];
const GROUPS = [
  { key: 0, name: "Name", width: "minmax(240px, 3fr)", words: true, show: (g) => site(g[0]), code: true, full: (g) => text(g[0]) },
  { key: 1, name: "Count", width: "90px", number: true },
  { key: 3, name: "Most at once", width: "140px", number: true },
  { key: 4, name: "At the peak", width: "140px", number: true },
  { key: 2, name: "In all", width: "150px", number: true },
  { key: 5, name: "Leaked", width: "80px", number: true, bad: true },
  { key: 6, name: "Leaked bytes", width: "130px", number: true, bad: true },
];
const TABS = [["records", "Allocations"], ["tag", "By tag"], ["site", "By call site"], ["file", "By file"], ["kind", "By kind"]];
const FILTERS = [["all", "All"], ["leaked", "Leaked"], ["peak", "At the peak"]];
const life = (i) => (r.freedSeq[i] && !r.leaked[i] ? r.freedTime[i] - r.time[i] : Infinity);
const columns = () => (tab === "records" ? RECORDS : GROUPS);

let ranks = null;
function rank() { // of the texts, so that sorting compares numbers
  if (!ranks) {
    const byWord = [...lower.keys()].sort((x, y) => (lower[x] < lower[y] ? -1 : lower[x] > lower[y] ? 1 : 0));
    ranks = new Float64Array(lower.length);
    byWord.forEach((place, at) => { ranks[place] = at; });
  }
  return (place) => (place < 0 ? -1 : ranks[place]);
}

function search() {
  const terms = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const keep = (i) => filter === "all" || (filter === "leaked" ? r.leaked[i] : inPeak[i]);
  const tests = terms.map((term) => {
    const hits = Uint8Array.from(lower, (word) => word.includes(term));
    const hit = (place) => place >= 0 && hits[place];
    const plain = term.replace(/,/g, "");
    if (/^#\d+$/.test(plain)) return (i) => r.seq[i] === Number(plain.slice(1));
    if (/^0x[0-9a-f]*$/.test(term)) return (i) => r.ptr[i].startsWith(term.slice(2)) || hit(r.stream[i]);
    return (i) => hit(r.tag[i]) || hit(r.site[i]) || hit(r.kind[i]) || hit(r.freedAt[i]);
  });
  const found = [];
  let bytes = 0;
  for (let i = 0; i < n; i++) {
    const ok = keep(i) && tests.every((test) => test(i));
    mask[i] = ok;
    if (ok) { found.push(i); bytes += r.nbytes[i]; }
  }
  if (tab === "records") {
    shown = found;
    $("count").textContent = `${number(found.length)} of ${number(n)} records, ${number(bytes)} bytes${bytes >= 1024 ? ` (${size(bytes)})` : ""}`;
  } else {
    shown = b.groups[tab].filter((g) => terms.every((term) => lower[g[0]].includes(term)));
    $("count").textContent = `${number(shown.length)} of ${number(b.groups[tab].length)} names`;
  }
  sort();
  repaint();
}

function sort() {
  const column = columns().find(({ key }) => key === sortBy), of = rank();
  const raw = tab !== "records" ? (g) => g[sortBy] : sortBy === "life" ? life
    : sortBy === "freedAt" ? (i) => (r.leaked[i] ? -2 : r.freedAt[i]) : (i) => r[sortBy][i];
  const keys = new Map(shown.map((item) => [item, column.words ? of(raw(item)) : raw(item)]));
  const sign = down ? -1 : 1;
  const tie = tab === "records" ? (x, y) => x - y : (x, y) => y[3] - x[3];
  shown.sort((x, y) => { const p = keys.get(x), q = keys.get(y); return p === q ? tie(x, y) : p < q ? -sign : sign; });
  head();
  $("table").scrollTop = 0;
  rows();
}

function head() {
  $("head").style.gridTemplateColumns = columns().map(({ width }) => width).join(" ");
  $("head").replaceChildren(...columns().map((column) => {
    const on = column.key === sortBy;
    const button = make("button", { className: column.number ? "number" : "", textContent: `${column.name}${on ? (down ? " ↓" : " ↑") : ""}` });
    button.setAttribute("role", "columnheader");
    button.setAttribute("aria-sort", on ? (down ? "descending" : "ascending") : "none");
    button.onclick = () => { down = on ? !down : !!column.number; sortBy = column.key; sort(); };
    return button;
  }));
}

function rows() {
  const box = $("table"), inside = box.clientHeight - 32, full = shown.length * ROW;
  const pixels = Math.min(full, MOST_PIXELS), place = $("rows");
  place.style.height = `${pixels}px`;
  // Where the rows are more than fit in an element, scrolling moves faster than the rows are high.
  const part = pixels > inside ? Math.min(box.scrollTop / (pixels - inside), 1) : 0;
  const offset = part * Math.max(full - inside, 0), shift = part * Math.max(pixels - inside, 0) - offset;
  const first = Math.max(Math.floor(offset / ROW) - 4, 0), last = Math.min(Math.ceil((offset + inside) / ROW) + 4, shown.length);
  const list = [];
  for (let k = first; k < last; k++) list.push(row(shown[k], k * ROW + shift));
  if (!shown.length) list.push(make("p", { className: "empty quiet", textContent: "Nothing matches." }));
  place.replaceChildren(...list);
}

function row(item, y) {
  const line = make("div", { className: item === selected ? "row selected" : "row" });
  line.setAttribute("role", "row");
  line.style.top = `${y}px`;
  line.style.gridTemplateColumns = columns().map(({ width }) => width).join(" ");
  for (const column of columns()) {
    const word = column.show ? column.show(item) : number(item[column.key]);
    const cell = make("div", { className: `${column.number ? "number" : ""} ${column.code ? "code" : ""}`, title: column.full ? column.full(item) : word });
    cell.setAttribute("role", "cell");
    if (column.swatch && isMemory[item]) cell.append(swatch(colourOf[item]));
    cell.append(word);
    if ((column.bad && item[column.key]) || (column.key === "freedAt" && r.leaked[item])) cell.classList.add("leaked");
    line.append(cell);
  }
  line.onclick = () => (tab === "records" ? select(item, true) : drill(item));
  return line;
}

function drill(group) {
  const word = site(group[0]);
  setTab("records");
  setSearch(word === "-" ? "" : word);
}

function select(i, show) {
  selected = i;
  if (i >= 0 && show && isMemory[i]) {
    const begin = (axis === "time" ? r.time : r.seq)[i];
    const width = view.x1 - view.x0, height = view.y1 - view.y0, bottom = r.offset[i], high = r.nbytes[i];
    const outX = end[i] < view.x0 || begin > view.x1, outY = bottom + high < view.y0 || bottom > view.y1;
    look(outX ? begin - width / 3 : view.x0, outX ? begin + width * 2 / 3 : view.x1,
      outY ? bottom - height / 3 : view.y0, outY ? bottom + height * 2 / 3 : view.y1);
  }
  if (i >= 0 && !show) {
    if (tab !== "records") setTab("records");
    const at = shown.indexOf(i), box = $("table"), inside = box.clientHeight - 32;
    if (at >= 0) {
      const full = shown.length * ROW, pixels = Math.min(full, MOST_PIXELS);
      const part = full > inside ? Math.max(at * ROW - inside / 2, 0) / (full - inside) : 0;
      box.scrollTop = part * (pixels - inside);
    }
  }
  rows();
  repaint();
}

function setSearch(word) { $("search").value = word; search(); }
function setTab(name) {
  tab = name;
  [sortBy, down] = name === "records" ? ["nbytes", true] : [3, true];
  for (const button of $("tabs").children) button.setAttribute("aria-selected", button.dataset.name === name);
  $("chips").hidden = name !== "records";
  $("chips").style.display = name === "records" ? "" : "none";
  search();
}
function setFilter(name) {
  filter = name;
  for (const button of $("chips").children) button.setAttribute("aria-pressed", button.dataset.name === name);
  search();
}

// ---- wiring

function listen() {
  const blocks = $("blocks"), over = $("overview");
  let held = null, brush = null;
  blocks.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = blocks.getBoundingClientRect(), amount = event.deltaY || event.deltaX;
    zoom(Math.exp(Math.sign(amount) * Math.min(Math.abs(amount), 240) * 0.002), event.clientX - box.left, event.clientY - box.top, event.shiftKey);
  }, { passive: false });
  blocks.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false };
    blocks.setPointerCapture(event.pointerId);
  });
  blocks.addEventListener("pointermove", (event) => {
    if (held) {
      const dx = event.clientX - held.x, dy = event.clientY - held.y;
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      held.moved = true;
      blocks.classList.add("moving");
      tip(-1);
      const v = held.view, x = dx / plot.w * (v.x1 - v.x0), y = dy / plot.h * (v.y1 - v.y0);
      look(v.x0 - x, v.x1 - x, v.y0 + y, v.y1 + y);
      return;
    }
    const i = under(event);
    if (i !== hovered) { hovered = i; overlay(); }
    tip(i, event.clientX, event.clientY);
  });
  const drop = (event) => {
    if (held && !held.moved && event.type === "pointerup") select(under(event), false);
    held = null;
    blocks.classList.remove("moving");
  };
  blocks.addEventListener("pointerup", drop);
  blocks.addEventListener("pointercancel", drop);
  blocks.addEventListener("pointerleave", () => { hovered = -1; tip(-1); overlay(); });
  blocks.addEventListener("dblclick", () => look(whole.x0, whole.x1, whole.y0, whole.y1));
  blocks.addEventListener("keydown", (event) => {
    const x = LEFT + plot.w / 2, y = TOP + plot.h / 2, dx = (view.x1 - view.x0) / 8, dy = (view.y1 - view.y0) / 8;
    const act = {
      "+": () => zoom(0.7, x, y), "=": () => zoom(0.7, x, y), "-": () => zoom(1.4, x, y),
      ArrowLeft: () => look(view.x0 - dx, view.x1 - dx), ArrowRight: () => look(view.x0 + dx, view.x1 + dx),
      ArrowUp: () => look(view.x0, view.x1, view.y0 + dy, view.y1 + dy), ArrowDown: () => look(view.x0, view.x1, view.y0 - dy, view.y1 - dy),
      0: () => look(whole.x0, whole.x1, whole.y0, whole.y1),
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  const overX = (event) => {
    const box = over.getBoundingClientRect();
    return whole.x0 + Math.min(Math.max((event.clientX - box.left - LEFT) / (box.width - LEFT), 0), 1) * (whole.x1 - whole.x0);
  };
  over.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    brush = { from: overX(event), x: event.clientX };
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", (event) => {
    if (!brush || Math.abs(event.clientX - brush.x) < 4) return;
    const to = overX(event);
    look(Math.min(brush.from, to), Math.max(brush.from, to));
  });
  over.addEventListener("pointerup", (event) => {
    if (brush && Math.abs(event.clientX - brush.x) < 4) {
      const half = (view.x1 - view.x0) / 2;
      look(brush.from - half, brush.from + half);
    }
    brush = null;
  });
  over.addEventListener("pointercancel", () => { brush = null; });
  $("table").addEventListener("scroll", rows);
  $("search").addEventListener("input", search);
  $("axis").addEventListener("change", () => { chooseAxis(); repaint(); });
  $("colour").addEventListener("change", () => { chooseColours(); rows(); repaint(); });
  $("reset").addEventListener("click", () => look(whole.x0, whole.x1, whole.y0, whole.y1));
  $("backend").addEventListener("change", () => open(Number($("backend").value)));
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
  new ResizeObserver(() => { repaint(); rows(); }).observe(document.body);
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  if (b) { chooseColours(); repaint(); }
}

function start() {
  const p = data.process;
  theme(matchMedia("(prefers-color-scheme: dark)").matches);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => theme(event.matches));
  const command = p.argv.map((word, at) => (at ? word : word.split("/").pop())).join(" ");
  document.title = `${command} - GPU memory`;
  $("command").textContent = command;
  $("process").textContent = `pid ${p.pid}, ${p.started}, ${p.seconds.toFixed(3)} s, Python ${p.python}, metrale ${p.metrale}`;
  for (const [name, word] of TABS) {
    const button = make("button", { textContent: word, onclick: () => setTab(name) });
    button.dataset.name = name;
    button.setAttribute("role", "tab");
    button.setAttribute("aria-selected", name === tab);
    $("tabs").append(button);
  }
  for (const [name, word] of FILTERS) {
    const button = make("button", { textContent: word, onclick: () => setFilter(name) });
    button.dataset.name = name;
    button.setAttribute("aria-pressed", name === filter);
    $("chips").append(button);
  }
  if (!data.backends.length) {
    for (const card of document.querySelectorAll(".card")) card.hidden = true;
    $("tiles").append(make("p", { className: "quiet", textContent: "No backend was opened." }));
    return;
  }
  data.backends.forEach((each, at) => $("backend").append(make("option", { value: at, textContent: `${at + 1}: ${each.name}` })));
  $("backend-choice").hidden = data.backends.length < 2;
  open(0);
  listen();
  paint();
}

start();
