// The messages of the conversation that is shown. Each turn keeps its element while its text grows. Turns far from what is
// in sight have their bare text alone, which the browser's search finds, until the reader comes near.

import { sizeOf } from "./attach.js";
import { byId, copyButton, el, icon, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { families, path, siblings } from "./conversation.js";

const NEAR = 20; // the newest turns are drawn at once
const MARGIN = "1500px 0px";

const FINISHES = {
  length: "Cut at the longest answer that is allowed.",
  full: "Cut: the model's context is full.",
  stopped: "Stopped.",
  content_filter: "Held back by the server.",
};

const parts = new Map(); // a turn's id -> its elements
let shown = { conversation: null, actions: null, below: null };
let divider = { key: "", item: null };

const near = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      const node = isIntersecting ? shown.conversation?.nodes[target.dataset.id] : null;
      if (node && parts.get(node.id)?.item === target) draw(node);
    }
  },
  { root: byId("scroll"), rootMargin: MARGIN },
);

/** Shows a conversation (null: none). actions: edit(node, text), retry(node), goOn(node), shorten(node, summary),
 * readAll(node), choose(node, step), settings(field); isRunning(node), status(node), namesModels(). */
export function showMessages(conversation, actions) {
  const turns = conversation ? path(conversation) : [];
  shown = { conversation, actions, below: conversation ? families(conversation) : null };
  byId("welcome").hidden = turns.length > 0;
  const kept = new Set(turns.map((node) => node.id));
  for (const id of parts.keys()) if (!kept.has(id)) forget(id);
  const items = turns.map((node, k) => {
    if (!parts.has(node.id)) parts.set(node.id, turnElements(node));
    const part = parts.get(node.id);
    if (part.drawn || k >= turns.length - NEAR) update(node);
    else if (part.text !== node.text) {
      part.text = part.body.textContent = node.text;
      part.item.classList.add("far");
      near.observe(part.item);
    }
    return part.item;
  });
  const owner = turns.findLast((node) => node.context);
  const first = owner ? turns.findIndex((node) => node.id === owner.context.from) : -1;
  if (first > 0) items.splice(first, 0, dividerFor(owner, actions));
  const list = byId("messages");
  let same = 0; // what stays keeps its focus and selection
  while (same < items.length && list.children[same] === items[same]) same += 1;
  while (list.children.length > same) list.lastElementChild.remove();
  list.append(...items.slice(same));
}

function forget(id) {
  near.unobserve(parts.get(id).item);
  parts.delete(id);
}

export function forgetMessages() {
  near.disconnect();
  parts.clear();
}

/** Draws a turn that had its bare text until now. */
function draw(node) {
  const part = parts.get(node.id);
  near.unobserve(part.item);
  if (!part.drawn) update(node);
}

/** What stands between the turns that the model reads no longer and those that it reads. */
function dividerFor(owner, actions) {
  const { summary } = owner.context;
  const key = `${owner.id} ${owner.context.from} ${summary ?? ""}`;
  if (divider.key === key) return divider.item;
  const text = el("div", { class: "prose" });
  if (summary) renderMarkdown(text, summary);
  const said = summary ? "The model reads a summary of the turns above." : "The model does not read the turns above.";
  const item = el(
    "li",
    { class: "cut" },
    el("span", {}, said),
    el("button", { type: "button", class: "quiet-button", on: { click: () => actions.readAll(owner) } }, "Let it read them again"),
    summary ? el("details", { class: "thoughts" }, el("summary", {}, "Summary"), text) : null,
  );
  divider = { key, item };
  return item;
}

function turnElements(node) {
  const isUser = node.role === "user";
  const body = el("div", { class: isUser ? "said" : "prose", dir: isUser ? "auto" : null });
  const foot = el("div", { class: "turn-foot" });
  const thought = el("div", { class: "prose" });
  const thoughts = isUser ? null : el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Thoughts"), thought);
  const note = isUser ? null : el("div", { class: "turn-note", hidden: true });
  const item = el(
    "li",
    { class: `turn ${node.role}`, "data-id": node.id },
    el("h3", { class: "sr-only" }, isUser ? "You" : "Answer"),
    isUser ? attached(node) : thoughts,
    body,
    note,
    foot,
  );
  return { item, body, foot, note, thoughts, thought, drawn: false };
}

/** The files of a question, folded. */
function attached({ files }) {
  if (!files?.length) return null;
  const one = (file) =>
    el(
      "details",
      { class: "attached" },
      el("summary", {}, icon("file"), el("span", { class: "file-name", dir: "auto" }, file.name), el("span", { class: "file-size" }, sizeOf(file))),
      el("pre", { tabindex: "0", role: "group", "aria-label": `File ${file.name}`, dir: "auto" }, file.text),
    );
  return el("div", { class: "attached-files" }, ...files.map(one));
}

/** Splits a leading <think> section off, which some models write into the answer itself. */
function split(node) {
  const text = node.text.trimStart();
  if (!text.startsWith("<think>")) return { thought: node.thought ?? "", answer: node.text };
  const end = text.indexOf("</think>");
  return end < 0
    ? { thought: text.slice(7), answer: "" }
    : { thought: text.slice(7, end), answer: text.slice(end + 8).trimStart() };
}

/** Brings a turn's element up to date with its data. */
export function updateTurn(conversation, node) {
  if (conversation === shown.conversation) update(node);
}

function update(node) {
  const { conversation, actions, below } = shown;
  const part = parts.get(node.id);
  if (!part || part.editing) return;
  const running = actions.isRunning(node);
  part.item.classList.toggle("running", running);
  part.item.setAttribute("aria-busy", String(running));
  const text = `${node.text}\0${node.thought ?? ""}`;
  if (!part.drawn || part.text !== text) {
    part.text = text;
    if (node.role === "user") {
      part.body.textContent = node.text;
      part.body.hidden = !node.text;
    } else {
      if (!part.drawn) part.body.replaceChildren();
      const { thought, answer } = split(node);
      part.thoughts.hidden = !thought.trim();
      if (thought) renderMarkdown(part.thought, thought.trim());
      renderMarkdown(part.body, answer);
    }
    part.drawn = true;
  }
  if (node.role === "assistant") part.body.classList.toggle("waiting", running && !split(node).answer);
  const others = siblings(below, node).map((other) => other.id);
  const isLast = conversation.head === node.id;
  const state = JSON.stringify([running, actions.status(node), node.error, node.finish, node.stats, node.model, Boolean(node.text), isLast, others]);
  if (part.state === state) return; // buttons stay, and with them the focus
  part.state = state;
  if (part.note) note(part, node, actions, running, isLast);
  foot(part, node, actions, running);
}

function note({ note: box }, node, actions, running, isLast) {
  const long = node.error?.kind === "long" ? "This is more than the model can read: " : "";
  const text = running ? actions.status(node) : node.error ? long + node.error.message : (FINISHES[node.finish] ?? "");
  box.hidden = !text;
  box.classList.toggle("error", !running && Boolean(node.error));
  box.replaceChildren(el("span", {}, text));
  if (running || !text) return;
  const button = (label, click) => {
    const made = el("button", { type: "button", class: "button", on: { click } }, label);
    box.append(made);
    return made;
  };
  const { error } = node;
  if (isLast && (error?.kind === "long" || (!error && node.finish === "full"))) {
    button("Leave out the oldest turns", () => actions.shorten(node, false));
    button("Summarise the earlier part", () => actions.shorten(node, true));
  } else if (isLast && node.text && (error || node.finish === "length" || node.finish === "stopped")) button("Continue", () => actions.goOn(node));
  if (!error) return;
  if (error.kind === "key") button("Enter a key", () => actions.settings("set-key"));
  const retry = button("Try again", () => actions.retry(node));
  const wait = error.retryAfter ? Math.ceil((error.at + error.retryAfter * 1000 - Date.now()) / 1000) : 0;
  if (wait > 0) countdown(retry, wait);
}

/** Says on the button how long the server asked to wait; pressing it earlier is allowed. */
function countdown(button, seconds) {
  if (seconds > 0) {
    button.textContent = `Try again (in ${seconds} s)`;
    setTimeout(() => button.isConnected && countdown(button, seconds - 1), 1000);
  } else button.textContent = "Try again";
}

function foot(part, node, actions, running) {
  const { foot: box } = part;
  box.replaceChildren();
  if (running) return;
  const others = siblings(shown.below, node);
  if (others.length > 1) {
    const at = others.indexOf(node);
    const what = node.role === "user" ? "question" : "answer";
    const go = (step) => () => actions.choose(others[at + step], step);
    box.append(
      el(
        "div",
        { class: "versions", role: "group", "aria-label": `Versions of this ${what}` },
        iconButton("left", `Earlier ${what}`, go(-1), { disabled: at === 0, "data-step": "-1" }),
        el("span", {}, `${at + 1} / ${others.length}`),
        iconButton("right", `Later ${what}`, go(1), { disabled: at === others.length - 1, "data-step": "1" }),
      ),
    );
  }
  const buttons = el("div", { class: "turn-buttons" });
  if (node.role === "user") {
    buttons.append(iconButton("edit", "Edit the message", () => edit(part, node, actions)));
    buttons.append(copyButton("Copy the message", () => node.text));
  } else {
    if (node.text) buttons.append(copyButton("Copy the answer", () => split(node).answer));
    if (!node.error) buttons.append(iconButton("retry", "Answer again", () => actions.retry(node)));
  }
  box.append(buttons);
  if (node.stats?.tokens) {
    const { tokens, seconds } = node.stats;
    const speed = seconds > 0.02 && tokens > 1 ? ` · ${(tokens / seconds).toFixed(tokens / seconds < 10 ? 1 : 0)} tokens/s` : "";
    const model = actions.namesModels() && node.model ? ` · ${node.model}` : "";
    box.append(el("span", { class: "stats" }, `${tokens} token${tokens === 1 ? "" : "s"}${speed}${model}`));
  }
}

/** Turns a message into a field with its text; sending it begins a new branch, the old one stays. */
function edit(part, node, actions) {
  const field = el("textarea", { class: "field", rows: "1", "aria-label": "Edit the message", dir: "auto" });
  const leave = (focus) => {
    part.editing = false;
    part.state = null;
    part.item.classList.remove("editing");
    form.remove();
    part.body.hidden = !node.text;
    part.foot.hidden = false;
    update(node);
    if (focus) part.foot.querySelector("[aria-label='Edit the message']")?.focus();
  };
  const send = () => {
    const text = field.value.trim();
    if (!text && !node.files?.length) return;
    leave(false);
    if (text === node.text) part.foot.querySelector("[aria-label='Edit the message']")?.focus();
    else actions.edit(node, text);
  };
  const form = el(
    "form",
    { class: "edit", on: { submit: (event) => (event.preventDefault(), send()) } },
    field,
    el(
      "div",
      { class: "edit-buttons" },
      el("button", { type: "button", class: "quiet-button", on: { click: () => leave(true) } }, "Cancel"),
      el("button", { type: "submit", class: "button primary" }, "Send"),
    ),
  );
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave(true);
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  field.addEventListener("input", () => grow(field));
  field.value = node.text;
  part.editing = true;
  part.item.classList.add("editing");
  part.body.hidden = true;
  part.foot.hidden = true;
  part.body.after(form);
  grow(field);
  field.focus();
}

const SIZES_ITSELF = CSS.supports("field-sizing", "content");

/** Makes a text field as high as its text where the browser does not; its style sheet says how high at most. */
export function grow(field) {
  if (SIZES_ITSELF) return;
  field.style.setProperty("height", "auto");
  field.style.setProperty("height", `${field.scrollHeight + 2}px`);
}
