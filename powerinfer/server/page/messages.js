// The messages of the conversation that is shown. Each turn keeps its element while its text grows.

import { byId, copyButton, el, iconButton } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { path, siblings } from "./conversation.js";

const FINISHES = {
  length: "Cut at the longest answer that is allowed.",
  stopped: "Stopped.",
  content_filter: "Held back by the server.",
};

const parts = new Map(); // a turn's id -> its elements

/** Shows a conversation (null: none). actions: edit(node, text), retry(node), choose(node), settings(); isRunning(node). */
export function showMessages(conversation, actions) {
  const turns = conversation ? path(conversation) : [];
  byId("welcome").hidden = turns.length > 0;
  const kept = new Set(turns.map((node) => node.id));
  for (const id of parts.keys()) if (!kept.has(id)) parts.delete(id);
  const items = turns.map((node) => {
    if (!parts.has(node.id)) parts.set(node.id, turnElements(node));
    updateTurn(conversation, node, actions);
    return parts.get(node.id).item;
  });
  const list = byId("messages");
  if (items.length !== list.children.length || items.some((item, k) => item !== list.children[k])) list.replaceChildren(...items);
}

export function forgetMessages() {
  parts.clear();
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
    thoughts,
    body,
    note,
    foot,
  );
  return { item, body, foot, note, thoughts, thought };
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
export function updateTurn(conversation, node, actions) {
  const part = parts.get(node.id);
  if (!part || part.editing) return;
  const running = actions.isRunning(node);
  part.item.classList.toggle("running", running);
  part.item.setAttribute("aria-busy", String(running));
  if (node.role === "user") part.body.textContent = node.text;
  else {
    const { thought, answer } = split(node);
    part.thoughts.hidden = !thought.trim();
    if (thought) renderMarkdown(part.thought, thought.trim());
    renderMarkdown(part.body, answer);
    part.body.classList.toggle("waiting", running && !answer);
  }
  const state = JSON.stringify([running, node.error, node.finish, node.stats, siblings(conversation, node).map((other) => other.id)]);
  if (part.state === state) return; // buttons stay, and with them the focus
  part.state = state;
  if (part.note) note(part, node, actions);
  foot(part, conversation, node, actions, running);
}

function note({ note: box }, node, actions) {
  const text = node.error?.message ?? FINISHES[node.finish] ?? "";
  box.hidden = !text;
  box.classList.toggle("error", Boolean(node.error));
  box.replaceChildren(el("span", {}, text));
  if (!node.error) return;
  if (node.error.kind === "key") {
    box.append(el("button", { type: "button", class: "button", on: { click: () => actions.settings("set-key") } }, "Enter a key"));
  }
  const retry = el("button", { type: "button", class: "button", on: { click: () => actions.retry(node) } }, "Try again");
  box.append(retry);
  const wait = node.error.retryAfter ? Math.ceil((node.error.at + node.error.retryAfter * 1000 - Date.now()) / 1000) : 0;
  if (wait > 0) countdown(retry, wait);
}

/** Says on the button how long the server asked to wait; pressing it earlier is allowed. */
function countdown(button, seconds) {
  if (seconds > 0) {
    button.textContent = `Try again (in ${seconds} s)`;
    setTimeout(() => button.isConnected && countdown(button, seconds - 1), 1000);
  } else button.textContent = "Try again";
}

function foot(part, conversation, node, actions, running) {
  const { foot: box } = part;
  box.replaceChildren();
  if (running) return;
  const others = siblings(conversation, node);
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
    buttons.append(iconButton("edit", "Edit the message", () => edit(part, conversation, node, actions)));
    buttons.append(copyButton("Copy the message", () => node.text));
  } else {
    if (node.text) buttons.append(copyButton("Copy the answer", () => split(node).answer));
    if (!node.error) buttons.append(iconButton("retry", "Answer again", () => actions.retry(node)));
  }
  box.append(buttons);
  if (node.stats?.tokens) {
    const { tokens, seconds } = node.stats;
    const speed = seconds > 0.02 && tokens > 1 ? ` · ${(tokens / seconds).toFixed(tokens / seconds < 10 ? 1 : 0)} tokens/s` : "";
    box.append(el("span", { class: "stats" }, `${tokens} token${tokens === 1 ? "" : "s"}${speed}`));
  }
}

/** Turns a message into a field with its text; sending it begins a new branch, the old one stays. */
function edit(part, conversation, node, actions) {
  const field = el("textarea", { class: "field", rows: "1", "aria-label": "Edit the message", dir: "auto" });
  const leave = (focus) => {
    part.editing = false;
    part.state = null;
    part.item.classList.remove("editing");
    form.remove();
    part.body.hidden = false;
    part.foot.hidden = false;
    updateTurn(conversation, node, actions);
    if (focus) part.foot.querySelector("[aria-label='Edit the message']")?.focus();
  };
  const send = () => {
    const text = field.value.trim();
    if (!text) return;
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

/** Makes a text field as high as its text; its style sheet says how high at most. */
export function grow(field) {
  field.style.setProperty("height", "auto");
  field.style.setProperty("height", `${field.scrollHeight + 2}px`);
}
