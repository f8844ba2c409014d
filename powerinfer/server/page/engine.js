// The live view of the engine: speed, memory, and for each layer the share of neurons that were computed and where they lie.

import { engineState } from "./api.js";
import { byId, el } from "./dom.js";
import { expertsView } from "./experts.js";

const BUSY_MS = 700;
const IDLE_MS = 3000;
const N_SAMPLES = 60;
const SVG = "http://www.w3.org/2000/svg";

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : 0);
const share = (value) => Math.min(Math.max(number(value), 0), 1);
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const speed = (value) => number(value).toFixed(number(value) < 10 ? 1 : 0);
const gib = (bytes) => `${(number(bytes) / 2 ** 30).toFixed(1)} GiB`;
const WHERE = { cpu: "on the CPU", device: "on the GPU", both: "on both" };

let timer = null;
let abort = null;
let view = null;
let samples = [];
let listener = () => {};

/** Begins to ask the server; heard(state or null, error): called after each answer. */
export function startEngine(heard) {
  listener = heard;
  if (!view) {
    view = buildView();
    byId("engine-body").replaceChildren(view.root);
  }
  stopEngine();
  poll();
}

export function stopEngine() {
  clearTimeout(timer);
  abort?.abort();
  timer = null;
}

/** Asks at once: something has begun. */
export function nudgeEngine() {
  if (timer !== null) {
    clearTimeout(timer);
    timer = setTimeout(poll, 150);
  }
}

async function poll() {
  let wait = IDLE_MS;
  const own = new AbortController();
  abort = own;
  timer = 0;
  try {
    if (!document.hidden) {
      const state = await engineState(own.signal);
      update(state);
      listener(state, null);
      if (number(state.running) > 0) wait = BUSY_MS;
    }
  } catch (error) {
    if (own.signal.aborted) return;
    view.root.classList.add("stale");
    view.said.textContent = error.message;
    view.said.hidden = false;
    listener(null, error);
  }
  if (!own.signal.aborted) timer = setTimeout(poll, wait);
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function meter(label, id) {
  const bar = el("div", { class: "meter-bar" });
  const value = el("span", { class: "meter-value" });
  const track = el("div", { class: "meter-track", role: "meter", "aria-labelledby": id, "aria-valuemin": "0", "aria-valuemax": "100" }, bar);
  const root = el("div", { class: "meter" }, el("div", { class: "meter-head" }, el("span", { id }, label), value), track);
  return {
    root,
    set(part, text) {
      bar.style.setProperty("--share", share(part));
      track.setAttribute("aria-valuenow", String(Math.round(100 * share(part))));
      track.setAttribute("aria-valuetext", text);
      value.textContent = text;
    },
  };
}

function buildView() {
  const line = svg("polyline", { fill: "none" });
  const area = svg("polygon", {});
  const spark = svg("svg", { class: "spark", viewBox: "0 0 120 36", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  const view = {
    line,
    area,
    now: el("span", { class: "now" }, "0.0"),
    prompt: el("dd", {}, "0"),
    running: el("dd", {}, "0"),
    waiting: el("dd", {}, "0"),
    kv: meter("KV cache", "meter-kv"),
    vram: meter("GPU memory", "meter-vram"),
    device: el("p", { class: "note" }),
    computed: el("strong", {}, "–"),
    sum: el("p", { class: "note" }),
    grid: el("div", { class: "heat", role: "group", "aria-label": "Layers" }),
    tip: el("p", { class: "note tip" }),
    top: el("span", {}, "100 %"),
    rows: el("tbody", {}),
    keys: el("span", { class: "key-device" }, "bar: held on the GPU"),
    said: el("p", { class: "note error-note", hidden: true }),
    cells: [],
  };
  view.heading = el("h3", {}, "Neurons computed");
  view.legend = el("div", { class: "legend" }, el("span", {}, "0 %"), el("span", { class: "ramp", "aria-hidden": "true" }), view.top, view.keys);
  view.table = el(
    "details",
    { class: "table-view" },
    el("summary", {}, "As a table"),
    el(
      "div",
      { class: "table", tabindex: "0", role: "group", "aria-label": "Layers" },
      el("table", {}, el("thead", {}, el("tr", {}, ...["Layer", "Computed", "On GPU"].map((text) => el("th", { scope: "col" }, text)))), view.rows),
    ),
  );
  view.experts = expertsView();
  view.neurons = el("section", { class: "neurons" }, view.heading, el("p", { class: "headline" }, view.computed, " of the FFN's neurons"), view.sum, view.grid, view.legend, view.tip, view.table);
  view.root = el(
    "div",
    { class: "engine-view" },
    view.said,
    el("section", { "aria-label": "Speed" }, el("p", { class: "speed" }, view.now, el("span", {}, " tokens/s")), spark, el(
      "dl",
      { class: "figures" },
      el("div", {}, el("dt", {}, "prompt tokens/s"), view.prompt),
      el("div", {}, el("dt", {}, "answering"), view.running),
      el("div", {}, el("dt", {}, "waiting"), view.waiting),
    )),
    el("section", { "aria-label": "Memory" }, view.kv.root, view.vram.root, view.device),
    view.experts.root,
    view.neurons,
  );
  return view;
}

function update(state) {
  view.root.classList.remove("stale");
  view.said.hidden = true;
  samples = [...samples, number(state.tokens_per_second)].slice(-N_SAMPLES);
  const top = Math.max(...samples, 1e-9);
  const points = samples.map((value, k) => `${((k + N_SAMPLES - samples.length) / (N_SAMPLES - 1)) * 120},${34 - (value / top) * 30}`);
  view.line.setAttribute("points", points.join(" "));
  view.area.setAttribute("points", `${points[0].split(",")[0]},36 ${points.join(" ")} 120,36`);
  view.now.textContent = speed(state.tokens_per_second);
  view.prompt.textContent = speed(state.prompt_tokens_per_second);
  view.running.textContent = String(number(state.running));
  view.waiting.textContent = String(number(state.waiting));
  const kv = share(state.kv_used);
  view.kv.set(kv, `${percent(kv)} used`);
  const { vram } = state;
  view.vram.root.hidden = !vram;
  if (vram) {
    view.vram.set(number(vram.budget_bytes) ? vram.used_bytes / vram.budget_bytes : 0, `${gib(vram.used_bytes)} of ${gib(vram.budget_bytes)}`);
    const whole = Array.isArray(state.layers) && state.layers.every((layer) => layer.where === "device");
    view.device.textContent = `${vram.device ?? "GPU"}. ${whole ? "It computes the whole model." : "The CPU computes what does not fit."}`;
  } else view.device.textContent = "No GPU in use: the whole model is computed on the CPU.";
  view.experts.update(state.experts, Boolean(vram));
  layers(state, Boolean(vram));
}

function layers(state, hasDevice) {
  const list = Array.isArray(state.layers) ? state.layers.slice(0, 512) : [];
  // Of a mixture whose experts are computed densely there is nothing more to see.
  view.neurons.hidden = list.length === 0 || (!view.experts.root.hidden && !list.some((layer) => typeof layer?.computed === "number" && layer.computed < 1));
  if (!list.length) return;
  const computed = list.map((layer) => share(layer.computed));
  const known = computed.filter((_, k) => list[k].computed !== null);
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  const highest = Math.max(...computed);
  const scale = [0.1, 0.25, 0.5, 1].find((step) => highest <= step) ?? 1;
  view.computed.textContent = highest > 0 ? percent(mean) : "–";
  const all = number(state.n_ff) * known.length;
  let sum = "";
  if (!highest) sum = "Nothing was computed yet: ask something.";
  else if (mean === 1) sum = "All of them: this model, or this mode, is computed densely.";
  else if (all) sum = `About ${Math.round(mean * all).toLocaleString()} of ${all.toLocaleString()} for the token looked at last; the silent rest is not read.`;
  view.sum.textContent = sum;
  view.top.textContent = percent(scale);
  view.keys.hidden = !hasDevice;
  if (view.cells.length !== list.length) makeCells(list.length);
  list.forEach((layer, k) => {
    const { cell, device, row } = view.cells[k];
    const text = hasDevice
      ? `Layer ${k}: ${percent(computed[k])} computed ${WHERE[layer.where] ?? ""}, ${percent(share(layer.on_device))} held on the GPU`
      : `Layer ${k}: ${percent(computed[k])} computed`;
    cell.style.setProperty("--heat", computed[k] / scale);
    device.style.setProperty("--share", share(layer.on_device));
    device.hidden = !hasDevice;
    cell.setAttribute("aria-label", text);
    if (view.shown === k) view.tip.textContent = text;
    row.children[1].textContent = percent(computed[k]);
    row.children[2].textContent = percent(share(layer.on_device));
  });
  if (view.shown === null) view.tip.textContent = "Point at a layer, or go through them with the arrow keys.";
}

/** How many layers stand in a row: few cells missing in the last one. */
function columnsFor(n) {
  if (n <= 10) return n;
  const choices = n <= 50 ? [8, 10, 9, 7] : [16, 15, 14, 13, 12];
  const missing = (columns) => Math.ceil(n / columns) * columns - n;
  return choices.reduce((best, columns) => (missing(columns) < missing(best) ? columns : best));
}

/** One cell for each layer; a single stop for the Tab key, arrows inside. */
function makeCells(n) {
  const columns = columnsFor(n);
  view.grid.style.setProperty("--columns", columns);
  view.shown = null;
  view.cells = Array.from({ length: n }, (_, k) => {
    const device = el("span", { class: "heat-device" });
    const cell = el("div", { class: "heat-cell", role: "img", tabindex: k === 0 ? "0" : "-1" }, el("span", { class: "heat-share" }), device);
    const select = () => {
      view.shown = k;
      view.tip.textContent = cell.getAttribute("aria-label");
    };
    cell.addEventListener("pointerenter", select);
    cell.addEventListener("focus", select);
    cell.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
      const next = view.cells[k + step]?.cell;
      if (!step || !next) return;
      event.preventDefault();
      cell.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
    return { cell, device, row: el("tr", {}, el("th", { scope: "row" }, String(k)), el("td"), el("td")) };
  });
  view.grid.replaceChildren(...view.cells.map(({ cell }) => cell));
  view.rows.replaceChildren(...view.cells.map(({ row }) => row));
}
