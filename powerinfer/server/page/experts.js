// The map of a mixture's experts: a row for each layer, a field for each expert; blue on the GPU, orange on the CPU, the stronger the more
// tokens used it of late. One canvas, since there may be ten thousand fields; arrow keys go through them, and a table has the same in short.

import { el } from "./dom.js";

const NARROWEST = 2; // a field, in pixels; a layer with more experts than fit takes several lines
const TALLEST = 14;
const HEIGHT = 300; // of the map, where that leaves fields of two pixels
const FAINT = 0.22; // what an expert on the GPU that nobody uses shows of its colour

const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : 0);
const percent = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
const gib = (bytes) => (bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);

/** What the server said, as rows of {used: shares of the tokens, there: booleans}; null: nothing that can be drawn. */
function rowsOf(experts) {
  const n = Math.min(number(experts?.n_expert), 4096);
  if (n < 1 || !Array.isArray(experts.layers) || !experts.layers.length) return null;
  return experts.layers.slice(0, 512).map((layer) => ({
    used: Array.from({ length: n }, (_, e) => Math.min(Math.max(number(layer?.used?.[e]) / 1000, 0), 1)),
    there: Array.from({ length: n }, (_, e) => layer?.on_device?.[e] === "1"),
  }));
}

/** The section; update(experts, hasDevice) draws what /v1/engine says. */
export function expertsView() {
  const canvas = el("canvas", { class: "experts-map", tabindex: "0", role: "application", "aria-roledescription": "map", "aria-describedby": "experts-tip" });
  const box = el("div", { class: "experts-box" }, canvas);
  const found = el("strong", {}, "–");
  const what = el("span", {});
  const sum = el("p", { class: "note" });
  const tip = el("p", { class: "note experts-tip", id: "experts-tip" });
  const spoken = el("p", { class: "sr-only", "aria-live": "polite" });
  const high = el("span", {});
  const gpu = el("span", { class: "legend-pair" }, el("span", { class: "ramp ramp-device", "aria-hidden": "true" }), "on the GPU");
  const cpu = el("span", { class: "legend-pair" }, el("span", { class: "ramp", "aria-hidden": "true" }), el("span", {}, "on the CPU"));
  const heads = ["Layer", "On GPU", "Most used", "By"];
  const body = el("tbody", {});
  const table = el(
    "details",
    { class: "table-view" },
    el("summary", {}, "As a table"),
    el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Experts by layer" }, el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((text) => el("th", { scope: "col" }, text)))), body)),
  );
  const root = el("section", { class: "experts", hidden: true }, el("h3", {}, "Experts"), el("p", { class: "headline" }, found, what), sum, box, el("div", { class: "legend" }, cpu, gpu, high), tip, spoken, table);
  let rows = null;
  let hasDevice = false;
  let top = 1;
  let at = null; // {layer, expert} that is pointed at
  let grid = null;

  const colour = (name) => {
    canvas.style.color = `var(${name})`;
    return getComputedStyle(canvas).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  };

  function draw() {
    const width = box.clientWidth;
    if (!rows || !width) return;
    const scale = window.devicePixelRatio || 1;
    const n = rows[0].used.length;
    const lines = Math.ceil(n / Math.max(1, Math.floor(width / NARROWEST)));
    const columns = Math.ceil(n / lines);
    const exact = (width * scale) / columns;
    const w = exact < 4 * scale ? Math.max(1, Math.floor(exact)) : exact; // narrow fields are of one width
    const h = Math.max(2, Math.floor(Math.min(TALLEST, Math.max(HEIGHT / (rows.length * lines), 2)) * scale));
    const gap = Math.min(w, h) >= 4 * scale ? Math.round(scale) : 0;
    const between = lines > 1 ? Math.round(2 * scale) : 0; // of layers
    const left = (e) => Math.round((e % columns) * w);
    const above = (layer, e) => layer * (lines * h + between) + Math.floor(e / columns) * h;
    const wide = (e) => Math.round(((e % columns) + 1) * w) - left(e) - gap;
    grid = { w: w / scale, h: h / scale, lines, columns, row: (lines * h + between) / scale };
    canvas.width = Math.round(w * columns) - gap;
    canvas.height = rows.length * (lines * h + between) - between - gap;
    canvas.style.width = `${canvas.width / scale}px`;
    canvas.style.height = `${canvas.height / scale}px`;
    const low = colour("--heat-low");
    const full = { true: colour("--device"), false: colour("--heat-high") };
    canvas.style.color = "";
    const context = canvas.getContext("2d");
    rows.forEach((row, layer) => {
      for (let e = 0; e < n; e++) {
        const part = Math.sqrt(Math.min(row.used[e] / top, 1)); // rare uses show, too
        const strong = row.there[e] ? FAINT + (1 - FAINT) * part : part;
        context.fillStyle = `rgb(${low.map((c, k) => Math.round(c + (full[row.there[e]][k] - c) * strong)).join(" ")})`;
        context.fillRect(left(e), above(layer, e), wide(e), h - gap);
      }
    });
    if (at) {
      context.strokeStyle = getComputedStyle(canvas).color;
      context.lineWidth = Math.max(1, Math.round(scale));
      context.strokeRect(left(at.expert) + 0.5, above(at.layer, at.expert) + 0.5, Math.max(wide(at.expert) - 1, 1), Math.max(h - gap - 1, 1));
    }
  }

  function words() {
    if (!at) return "Rows are layers, fields experts. Point at one, or go through them with the arrow keys.";
    const { used, there } = rows[at.layer];
    const where = hasDevice ? `, ${there[at.expert] ? "on the GPU" : "on the CPU"}` : "";
    return `Layer ${at.layer}, expert ${at.expert}${where}: used by ${percent(used[at.expert])} of the latest tokens`;
  }

  function show(next, aloud = false) {
    at = next;
    tip.textContent = words();
    if (aloud) spoken.textContent = tip.textContent;
    draw();
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!rows || !grid) return;
    const layer = Math.floor(event.offsetY / grid.row);
    const line = Math.min(Math.floor((event.offsetY - layer * grid.row) / grid.h), grid.lines - 1);
    const column = Math.floor(event.offsetX / grid.w);
    const expert = line * grid.columns + column;
    const inside = rows[layer] && column >= 0 && column < grid.columns && expert >= 0 && expert < rows[0].used.length;
    if (inside && (at?.layer !== layer || at?.expert !== expert)) show({ layer, expert });
  });
  canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && show(null));
  canvas.addEventListener("focus", () => rows && !at && canvas.matches(":focus-visible") && show({ layer: 0, expert: 0 }));
  canvas.addEventListener("blur", () => show(null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step || !rows) return;
    event.preventDefault();
    const from = at ?? { layer: 0, expert: 0 };
    const next = { layer: from.layer + step[0], expert: from.expert + step[1] };
    if (rows[next.layer] && next.expert >= 0 && next.expert < rows[0].used.length) show(next, true);
  });
  new ResizeObserver(draw).observe(box);
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  function update(experts, device) {
    rows = rowsOf(experts);
    hasDevice = device;
    root.hidden = !rows;
    if (!rows) return;
    const n = rows[0].used.length;
    if (at && !(rows[at.layer] && at.expert < n)) at = null;
    const most = Math.max(...rows.map((row) => Math.max(...row.used)));
    top = [0.05, 0.1, 0.25, 0.5, 1].find((step) => most <= step) ?? 1;
    const { device: here = 0, streamed = 0, zero_copy: read = 0, cpu: others = 0 } = experts.routes ?? {};
    const uses = number(here) + number(streamed) + number(read) + number(others);
    found.textContent = !uses ? "–" : hasDevice ? percent(number(here) / uses) : `${number(experts.n_used)} of ${n}`;
    what.textContent = hasDevice ? " of the chosen experts were on the GPU" : " experts are used by a token";
    const places = rows.reduce((total, row) => total + row.there.filter(Boolean).length, 0);
    const all = rows.filter((row) => row.there.some(Boolean) || row.used.some(Boolean)).length * n || rows.length * n;
    const copies = number(experts.copies);
    sum.textContent = !uses
      ? "None was used yet: ask something."
      : hasDevice
        ? `${places.toLocaleString()} of ${all.toLocaleString()} have a place there; ${copies.toLocaleString()} moved there since the start (${gib(number(experts.copied_bytes))}).`
        : `${n} in each layer; the CPU reads those that a token chose.`;
    gpu.hidden = !hasDevice;
    cpu.lastChild.textContent = hasDevice ? "on the CPU" : "used";
    high.textContent = `up to ${percent(top)} of the tokens`;
    canvas.setAttribute("aria-label", `Experts: ${rows.length} layers by ${n}`);
    tip.textContent = words();
    body.replaceChildren(
      ...rows.map((row, k) => {
        const best = row.used.indexOf(Math.max(...row.used));
        const cells = [hasDevice ? `${row.there.filter(Boolean).length}` : "–", row.used[best] ? `${best}` : "–", row.used[best] ? percent(row.used[best]) : "–"];
        return el("tr", {}, el("th", { scope: "row" }, String(k)), ...cells.map((text) => el("td", {}, text)));
      }),
    );
    draw();
  }
  return { root, update };
}
