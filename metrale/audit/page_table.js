// SPDX-License-Identifier: MIT OR Apache-2.0
// The table: searching, sorting, and the rows that are on the screen.

const RECORDS = [
  { key: "seq", name: "#", width: "72px", number: true, show: (i) => number(r.seq[i]) },
  { key: "nbytes", name: "Bytes", width: "120px", number: true, show: (i) => number(r.nbytes[i]) },
  { key: "kind", name: "Kind", width: "76px", words: true, show: (i) => text(r.kind[i]) },
  { key: "tag", name: "Tag", width: "minmax(130px, 1.2fr)", words: true, show: (i) => text(r.tag[i]), swatch: true },
  {
    key: "site",
    name: "Call site",
    width: "minmax(200px, 2fr)",
    words: true,
    show: (i) => site(r.site[i]),
    code: true,
    full: (i) => text(r.site[i]),
  },
  { key: "time", name: "Born after", width: "92px", number: true, show: (i) => time(r.time[i]) },
  {
    key: "life",
    name: "Lived",
    width: "92px",
    number: true,
    show: (i) => (r.freedSeq[i] && !r.leaked[i] ? time(life(i)) : "–"),
  },
  {
    key: "freedAt",
    name: "Freed at",
    width: "minmax(180px, 1.6fr)",
    words: true,
    show: (i) => (r.leaked[i] ? "leaked" : site(r.freedAt[i])),
    code: true,
    full: (i) => text(r.freedAt[i]),
  },
];
const GROUPS = [
  {
    key: 0,
    name: "Name",
    width: "minmax(240px, 3fr)",
    words: true,
    show: (g) => site(g[0]),
    code: true,
    full: (g) => text(g[0]),
  },
  { key: 1, name: "Count", width: "90px", number: true },
  { key: 3, name: "Most at once", width: "140px", number: true },
  { key: 4, name: "At the peak", width: "140px", number: true },
  { key: 2, name: "In all", width: "150px", number: true },
  { key: 5, name: "Leaked", width: "80px", number: true, bad: true },
  { key: 6, name: "Leaked bytes", width: "130px", number: true, bad: true },
];
const TABS = [
  ["records", "Allocations"],
  ["tag", "By tag"],
  ["site", "By call site"],
  ["file", "By file"],
  ["kind", "By kind"],
];
const FILTERS = [
  ["all", "All"],
  ["leaked", "Leaked"],
  ["peak", "At the peak"],
];
const life = (i) => (r.freedSeq[i] && !r.leaked[i] ? r.freedTime[i] - r.time[i] : Infinity);
const columns = () => (tab === "records" ? RECORDS : GROUPS);

let ranks = null;
function rank() {
  // of the texts, so that sorting compares numbers
  if (!ranks) {
    const byWord = [...lower.keys()].sort((x, y) => (lower[x] < lower[y] ? -1 : lower[x] > lower[y] ? 1 : 0));
    ranks = new Float64Array(lower.length);
    byWord.forEach((place, at) => {
      ranks[place] = at;
    });
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
    if (ok) {
      found.push(i);
      bytes += r.nbytes[i];
    }
  }
  if (tab === "records") {
    shown = found;
    $("count").textContent =
      `${number(found.length)} of ${number(n)} records, ${exactly(bytes)}`;
  } else {
    shown = b.groups[tab].filter((g) => terms.every((term) => lower[g[0]].includes(term)));
    $("count").textContent = `${number(shown.length)} of ${number(b.groups[tab].length)} names`;
  }
  sort();
  repaint();
}

function sort() {
  const column = columns().find(({ key }) => key === sortBy),
    of = rank();
  const raw =
    tab !== "records"
      ? (g) => g[sortBy]
      : sortBy === "life"
        ? life
        : sortBy === "freedAt"
          ? (i) => (r.leaked[i] ? -2 : r.freedAt[i])
          : (i) => r[sortBy][i];
  const keys = new Map(shown.map((item) => [item, column.words ? of(raw(item)) : raw(item)]));
  const sign = down ? -1 : 1;
  const tie = tab === "records" ? (x, y) => x - y : (x, y) => y[3] - x[3];
  shown.sort((x, y) => {
    const p = keys.get(x),
      q = keys.get(y);
    return p === q ? tie(x, y) : p < q ? -sign : sign;
  });
  head();
  $("table").scrollTop = 0;
  rows();
}

function head() {
  $("head").style.gridTemplateColumns = columns()
    .map(({ width }) => width)
    .join(" ");
  $("head").replaceChildren(
    ...columns().map((column) => {
      const on = column.key === sortBy;
      const button = make("button", {
        className: column.number ? "number" : "",
        textContent: `${column.name}${on ? (down ? " ↓" : " ↑") : ""}`,
      });
      button.setAttribute("role", "columnheader");
      button.setAttribute("aria-sort", on ? (down ? "descending" : "ascending") : "none");
      button.onclick = () => {
        down = on ? !down : !!column.number;
        sortBy = column.key;
        sort();
      };
      return button;
    }),
  );
}

function rows() {
  const box = $("table"),
    inside = box.clientHeight - 32,
    full = shown.length * ROW;
  const pixels = Math.min(full, MOST_PIXELS),
    place = $("rows");
  place.style.height = `${pixels}px`;
  // Where the rows are more than fit in an element, scrolling moves faster than the rows are high.
  const part = pixels > inside ? Math.min(box.scrollTop / (pixels - inside), 1) : 0;
  const offset = part * Math.max(full - inside, 0),
    shift = part * Math.max(pixels - inside, 0) - offset;
  const first = Math.max(Math.floor(offset / ROW) - 4, 0),
    last = Math.min(Math.ceil((offset + inside) / ROW) + 4, shown.length);
  const list = [];
  for (let k = first; k < last; k++) list.push(row(shown[k], k * ROW + shift));
  if (!shown.length) list.push(make("p", { className: "empty quiet", textContent: "Nothing matches." }));
  place.replaceChildren(...list);
}

function row(item, y) {
  const line = make("div", { className: item === selected ? "row selected" : "row" });
  line.setAttribute("role", "row");
  line.style.top = `${y}px`;
  line.style.gridTemplateColumns = columns()
    .map(({ width }) => width)
    .join(" ");
  for (const column of columns()) {
    const word = column.show ? column.show(item) : number(item[column.key]);
    const cell = make("div", {
      className: `${column.number ? "number" : ""} ${column.code ? "code" : ""}`,
      title: column.full ? column.full(item) : word,
    });
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
    const width = view.x1 - view.x0,
      height = view.y1 - view.y0,
      bottom = r.offset[i],
      high = r.nbytes[i];
    const outX = end[i] < view.x0 || begin > view.x1,
      outY = bottom + high < view.y0 || bottom > view.y1;
    look(
      outX ? begin - width / 3 : view.x0,
      outX ? begin + (width * 2) / 3 : view.x1,
      outY ? bottom - height / 3 : view.y0,
      outY ? bottom + (height * 2) / 3 : view.y1,
    );
  }
  if (i >= 0 && !show) {
    if (tab !== "records") setTab("records");
    const at = shown.indexOf(i),
      box = $("table"),
      inside = box.clientHeight - 32;
    if (at >= 0) {
      const full = shown.length * ROW,
        pixels = Math.min(full, MOST_PIXELS);
      const part = full > inside ? Math.max(at * ROW - inside / 2, 0) / (full - inside) : 0;
      box.scrollTop = part * (pixels - inside);
    }
  }
  rows();
  repaint();
}

function setSearch(word) {
  $("search").value = word;
  search();
}
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
