// SPDX-License-Identifier: MIT OR Apache-2.0
// The canvases and the tooltip. Blocks are painted pixel by pixel, with the index of the record beside each pixel: that
// is as fast for 100,000 blocks as for ten, and what lies under the pointer is one look-up.

function fit(canvas) {
  const ratio = window.devicePixelRatio || 1,
    box = canvas.getBoundingClientRect();
  const w = Math.max(Math.round(box.width * ratio), 1),
    h = Math.max(Math.round(box.height * ratio), 1);
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, ratio, w: box.width, h: box.height };
}

function paint() {
  const canvas = $("blocks"),
    { context, ratio, w, h } = fit(canvas);
  plot = { x: LEFT, y: TOP, w: Math.max(w - LEFT, 1), h: h - TOP - BOTTOM, ratio };
  const pw = Math.max(Math.round(plot.w * ratio), 1),
    ph = Math.round(plot.h * ratio);
  if (!picture || picture.width !== pw || picture.height !== ph) {
    picture = context.createImageData(pw, ph);
    ids = new Int32Array(pw * ph);
  }
  const pixels = new Uint32Array(picture.data.buffer);
  pixels.fill(colours.back);
  ids.fill(-1);
  const begin = axis === "time" ? r.time : r.seq;
  const sx = pw / (view.x1 - view.x0),
    sy = ph / (view.y1 - view.y0);
  for (const i of order) {
    if (end[i] < view.x0 || begin[i] > view.x1 || r.offset[i] > view.y1 || r.offset[i] + r.nbytes[i] < view.y0)
      continue;
    const xa = Math.floor((begin[i] - view.x0) * sx),
      xb = Math.max(Math.floor((end[i] - view.x0) * sx), xa + 1);
    const yb = Math.floor(ph - (r.offset[i] - view.y0) * sy);
    const ya = Math.min(Math.floor(ph - (r.offset[i] + r.nbytes[i] - view.y0) * sy), yb - 1);
    const x0 = Math.max(xa, 0),
      x1 = Math.min(xb, pw),
      y0 = Math.max(ya, 0),
      y1 = Math.min(yb, ph);
    const c = colourOf[i] < 0 ? COLOURS : colourOf[i],
      dim = !mask[i];
    const fill = dim ? colours.dim[c] : colours.full[c],
      edge = dim ? fill : colours.edge[c];
    const edged = xb - xa > 3 && yb - ya > 3;
    for (let y = y0; y < y1; y++) {
      const at = y * pw;
      pixels.fill(edged && y === ya ? edge : fill, at + x0, at + x1);
      ids.fill(i, at + x0, at + x1);
      if (edged && xb <= pw) pixels[at + xb - 1] = edge;
      if (r.leaked[i]) {
        const leak = dim ? colours.dimLeak : colours.leak;
        if (yb - ya < 4) pixels.fill(leak, at + x0, at + x1);
        else
          for (let x = x0 + ((8 - ((x0 + y) & 7)) & 7); x < x1; x += 8)
            pixels.fill(leak, at + x, at + Math.min(x + 2, x1));
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
  const rough = (to - from) / count,
    power = base ** Math.floor(Math.log(rough) / Math.log(base));
  const factors = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
  const step = power * (factors.find((f) => f * power >= rough) ?? base);
  const found = [];
  for (let v = Math.ceil(from / step) * step; v <= to; v += step) found.push(v);
  return [found, step];
}

function overlay() {
  const { context, w, h } = fit($("blocks")),
    css = colours.css;
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
    if (y < TOP + plot.h - 2 || v === 0)
      context.fillText(size(v), LEFT - 6, Math.min(Math.max(y, 8), TOP + plot.h - 4));
  }
  context.save();
  context.beginPath();
  context.rect(LEFT, TOP, plot.w, plot.h);
  context.clip();
  for (const [i, width] of [
    [hovered, 1.5],
    [selected, 2.5],
  ]) {
    if (i < 0 || !isMemory[i]) continue;
    const begin = axis === "time" ? r.time : r.seq,
      scale = plot.h / (view.y1 - view.y0);
    const y = TOP + plot.h - (r.offset[i] + r.nbytes[i] - view.y0) * scale;
    context.strokeStyle = css["--text"];
    context.lineWidth = width;
    context.strokeRect(toX(begin[i]), y, Math.max(toX(end[i]) - toX(begin[i]), 2), Math.max(r.nbytes[i] * scale, 2));
  }
  context.restore();
}

function overview() {
  const { context, w, h } = fit($("overview")),
    css = colours.css,
    width = w - LEFT,
    base = h - 6,
    height = base - 8;
  const at = axis === "time" ? b.live.time : b.live.seq,
    bytes = b.live.bytes,
    most = Math.max(b.peak_bytes, 1);
  context.clearRect(0, 0, w, h);
  const scale = width / (whole.x1 - whole.x0);
  // A column of pixels shows the most that lived in it.
  const columns = new Float64Array(Math.max(Math.ceil(width), 1));
  let live = 0,
    x = 0;
  for (let k = 0; k <= at.length; k++) {
    const to = k < at.length ? Math.min(Math.floor(at[k] * scale), columns.length - 1) : columns.length - 1;
    for (; x < to; x++) ((columns[x] = Math.max(columns[x], live)), (columns[x + 1] = live));
    if (k < at.length) {
      live = bytes[k];
      columns[x] = Math.max(columns[x], live);
    }
  }
  context.beginPath();
  context.moveTo(LEFT, base);
  columns.forEach((v, i) => {
    context.lineTo(LEFT + i, base - (v / most) * height);
    context.lineTo(LEFT + i + 1, base - (v / most) * height);
  });
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
  const from = LEFT + (view.x0 - whole.x0) * scale,
    to = LEFT + (view.x1 - whole.x0) * scale;
  if (view.x0 > whole.x0 || view.x1 < whole.x1) {
    context.globalAlpha = 0.16;
    context.fillStyle = css["--accent"];
    context.fillRect(from, 2, Math.max(to - from, 2), base - 2);
    context.globalAlpha = 1;
    context.strokeStyle = css["--accent"];
    context.strokeRect(from + 0.5, 2.5, Math.max(to - from - 1, 1), base - 3);
  }
}

const toX = (v) => LEFT + ((v - view.x0) / (view.x1 - view.x0)) * plot.w;
const fromX = (x) => view.x0 + ((x - LEFT) / plot.w) * (view.x1 - view.x0);

let waiting = 0;
function repaint() {
  waiting ||= requestAnimationFrame(() => {
    waiting = 0;
    paint();
  });
}

function look(x0, x1, y0 = view.y0, y1 = view.y1) {
  const clamp = (from, to, low, high, least) => {
    const width = Math.min(Math.max(to - from, least), high - low),
      start = Math.min(Math.max(from, low), high - width);
    return [start, start + width];
  };
  const least = axis === "time" ? 0.05 : 2;
  [view.x0, view.x1] = clamp(x0, x1, whole.x0, whole.x1, Math.min(least, whole.x1));
  [view.y0, view.y1] = clamp(y0, y1, whole.y0, whole.y1, Math.min(16, whole.y1));
  repaint();
}

function zoom(factor, x, y, bytes) {
  if (bytes) {
    const at = view.y1 - ((y - TOP) / plot.h) * (view.y1 - view.y0);
    look(view.x0, view.x1, at - (at - view.y0) * factor, at + (view.y1 - at) * factor);
  } else {
    const at = fromX(x);
    look(at - (at - view.x0) * factor, at + (view.x1 - at) * factor);
  }
}

function under(event) {
  const box = $("blocks").getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left - LEFT) * plot.ratio),
    y = Math.floor((event.clientY - box.top - TOP) * plot.ratio);
  return x < 0 || y < 0 || x >= picture.width || y >= picture.height ? -1 : ids[y * picture.width + x];
}

// ---- the tooltip

function tip(i, x, y) {
  const box = $("tip");
  box.hidden = i < 0;
  if (i < 0) return;
  const facts = [
    ["size", exactly(r.nbytes[i])],
    ["from", site(r.site[i])],
    ["born", `#${number(r.seq[i])}, after ${time(r.time[i])}`],
    [
      "freed",
      r.leaked[i] ? "never by the program" : r.freedSeq[i] ? `#${number(r.freedSeq[i])}, ${site(r.freedAt[i])}` : "not",
    ],
    ...(life(i) < Infinity ? [["lived", time(life(i))]] : []),
    ["address", `0x${r.ptr[i]}`],
    ...(r.stream[i] >= 0 ? [["stream", text(r.stream[i])]] : []),
  ];
  const title = make(
    "h3",
    {},
    `${text(r.tag[i]) || "no tag"} `,
    make("span", { className: "quiet", textContent: text(r.kind[i]) }),
  );
  if (r.leaked[i]) title.append(make("span", { className: "leaked", textContent: "  leaked" }));
  box.replaceChildren(
    title,
    make(
      "dl",
      {},
      ...facts.flatMap(([name, value]) => [make("dt", { textContent: name }), make("dd", { textContent: value })]),
    ),
  );
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(x + 16 + width > innerWidth ? x - 16 - width : x + 16, 4)}px`;
  box.style.top = `${Math.max(Math.min(y + 16, innerHeight - height - 8), 4)}px`;
}
