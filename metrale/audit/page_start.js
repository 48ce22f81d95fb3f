// SPDX-License-Identifier: MIT OR Apache-2.0
// What listens to the user, and the start.

function listen() {
  const blocks = $("blocks"),
    over = $("overview");
  let held = null,
    brush = null;
  blocks.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const box = blocks.getBoundingClientRect(),
        amount = event.deltaY || event.deltaX;
      zoom(
        Math.exp(Math.sign(amount) * Math.min(Math.abs(amount), 240) * 0.002),
        event.clientX - box.left,
        event.clientY - box.top,
        event.shiftKey,
      );
    },
    { passive: false },
  );
  blocks.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = { x: event.clientX, y: event.clientY, view: { ...view }, moved: false };
    blocks.setPointerCapture(event.pointerId);
  });
  blocks.addEventListener("pointermove", (event) => {
    if (held) {
      const dx = event.clientX - held.x,
        dy = event.clientY - held.y;
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      held.moved = true;
      blocks.classList.add("moving");
      tip(-1);
      const v = held.view,
        x = (dx / plot.w) * (v.x1 - v.x0),
        y = (dy / plot.h) * (v.y1 - v.y0);
      look(v.x0 - x, v.x1 - x, v.y0 + y, v.y1 + y);
      return;
    }
    const i = under(event);
    if (i !== hovered) {
      hovered = i;
      overlay();
    }
    tip(i, event.clientX, event.clientY);
  });
  const drop = (event) => {
    if (held && !held.moved && event.type === "pointerup") select(under(event), false);
    held = null;
    blocks.classList.remove("moving");
  };
  blocks.addEventListener("pointerup", drop);
  blocks.addEventListener("pointercancel", drop);
  blocks.addEventListener("pointerleave", () => {
    hovered = -1;
    tip(-1);
    overlay();
  });
  blocks.addEventListener("dblclick", () => look(whole.x0, whole.x1, whole.y0, whole.y1));
  blocks.addEventListener("keydown", (event) => {
    const x = LEFT + plot.w / 2,
      y = TOP + plot.h / 2,
      dx = (view.x1 - view.x0) / 8,
      dy = (view.y1 - view.y0) / 8;
    const act = {
      "+": () => zoom(0.7, x, y),
      "=": () => zoom(0.7, x, y),
      "-": () => zoom(1.4, x, y),
      ArrowLeft: () => look(view.x0 - dx, view.x1 - dx),
      ArrowRight: () => look(view.x0 + dx, view.x1 + dx),
      ArrowUp: () => look(view.x0, view.x1, view.y0 + dy, view.y1 + dy),
      ArrowDown: () => look(view.x0, view.x1, view.y0 - dy, view.y1 - dy),
      0: () => look(whole.x0, whole.x1, whole.y0, whole.y1),
    }[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
  const overX = (event) => {
    const box = over.getBoundingClientRect();
    return (
      whole.x0 +
      Math.min(Math.max((event.clientX - box.left - LEFT) / (box.width - LEFT), 0), 1) * (whole.x1 - whole.x0)
    );
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
  over.addEventListener("pointercancel", () => {
    brush = null;
  });
  $("table").addEventListener("scroll", rows);
  $("search").addEventListener("input", search);
  $("axis").addEventListener("change", () => {
    chooseAxis();
    repaint();
  });
  $("colour").addEventListener("change", () => {
    chooseColours();
    rows();
    repaint();
  });
  $("reset").addEventListener("click", () => look(whole.x0, whole.x1, whole.y0, whole.y1));
  $("backend").addEventListener("change", () => open(Number($("backend").value)));
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
  new ResizeObserver(() => {
    repaint();
    rows();
  }).observe(document.body);
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  if (b) {
    chooseColours();
    repaint();
  }
}

function start() {
  const p = data.process;
  theme(matchMedia("(prefers-color-scheme: dark)").matches);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => theme(event.matches));
  const command = p.argv.map((word, at) => (at ? word : word.split("/").pop())).join(" ");
  document.title = `${command} - GPU memory`;
  $("command").textContent = command;
  $("process").textContent =
    `pid ${p.pid}, ${p.started}, ${p.seconds.toFixed(3)} s, Python ${p.python}, metrale ${p.metrale}`;
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
  data.backends.forEach((each, at) =>
    $("backend").append(make("option", { value: at, textContent: `${at + 1}: ${each.name}` })),
  );
  $("backend-choice").hidden = data.backends.length < 2;
  open(0);
  listen();
  paint();
}

start();
