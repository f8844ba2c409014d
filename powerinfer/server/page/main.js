// The chat page: what is shown, what is being answered, and the wires between the parts.

import { ApiError, models, streamChat } from "./api.js";
import { add, messages, newConversation, path, remove, show, touch } from "./conversation.js";
import { byId, el, toast } from "./dom.js";
import { nudgeEngine, startEngine, stopEngine } from "./engine.js";
import { forgetMessages, grow, showMessages, updateTurn } from "./messages.js";
import { openSettings, sampling, systemPrompt, wireSettings, wireTheme } from "./settings.js";
import { showSidebar, wireSidebar } from "./sidebar.js";
import { speaker } from "./speaker.js";
import { allConversations, deleteConversation, getConversation, onOtherTabs, openStore, putConversation } from "./store.js";

const DRAW_MS = 50;
const SAVE_MS = 500;
const STARTERS = ["Tell me a short story.", "Explain how you work.", "What is 17 plus 25?"];

const conversations = new Map();
const runs = new Map(); // conversation id -> {node, abort}: answers that are being written, each in its own conversation
let current = null;
let model = "";
let follow = true; // the newest text is kept in sight

const narrow = matchMedia("(max-width: 860px)");
const middle = matchMedia("(max-width: 1180px)");

const actions = {
  isRunning: (node) => [...runs.values()].some((run) => run.node === node),
  edit(node, text) {
    if (runs.has(current.id)) return toast("Stop the running answer first.");
    const question = add(current, node.parent, "user", text);
    answer(current, question);
  },
  retry(node) {
    if (runs.has(current.id)) return toast("Stop the running answer first.");
    const question = current.nodes[node.parent];
    if (node.error && !node.text && !Object.values(current.nodes).some((other) => other.parent === node.id)) remove(current, node);
    answer(current, question);
    byId("input").focus({ preventScroll: true });
  },
  choose(node, step) {
    show(current, node);
    changed(current);
    const arrows = `[data-id="${node.id}"] [data-step="${step}"]:not(:disabled), [data-id="${node.id}"] [data-step]:not(:disabled)`;
    byId("messages").querySelector(arrows)?.focus({ preventScroll: true });
  },
  settings: openSettings,
};

const listActions = {
  isRunning: (id) => runs.has(id),
  open(id) {
    open(conversations.get(id));
    closeSide();
    if (!narrow.matches) byId("input").focus();
  },
  rename(id, title) {
    const conversation = conversations.get(id);
    if (title !== conversation.title) {
      conversation.title = title;
      changed(conversation);
    } else draw();
  },
  async remove(id) {
    const conversation = conversations.get(id);
    runs.get(id)?.abort.abort();
    conversations.delete(id);
    await deleteConversation(id);
    if (current?.id === id) open(null);
    draw();
    byId("search").focus();
    toast(`“${conversation.title || "New chat"}” is deleted.`, {
      label: "Undo",
      run() {
        conversations.set(id, conversation);
        changed(conversation);
        open(conversation);
      },
    });
  },
};

/** Writes a conversation down and shows what has changed. */
function changed(conversation) {
  putConversation(conversation).catch(() => toast("This browser could not save the conversation: its storage may be full."));
  draw();
}

function draw() {
  showSidebar([...conversations.values()], current?.id, listActions);
  showMessages(current, actions);
  const title = current?.title || "New chat";
  byId("title").textContent = title;
  document.title = current ? `${title} – PowerInfer` : "PowerInfer";
  const running = current !== null && runs.has(current.id);
  const hadFocus = document.activeElement === byId("send") || document.activeElement === byId("stop");
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  if (hadFocus) byId("input").focus();
  byId("send").disabled = !byId("input").value.trim();
  scroll();
}

function open(conversation) {
  if (conversation !== current) forgetMessages();
  current = conversation;
  follow = true;
  const place = conversation ? `#${conversation.id}` : location.pathname;
  if (location.hash !== (conversation ? place : "")) history.pushState(null, "", place);
  draw();
}

function scroll() {
  const box = byId("scroll");
  if (follow) box.scrollTop = box.scrollHeight;
  byId("jump").hidden = follow || box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function send(text) {
  if (current === null) {
    const conversation = newConversation();
    conversations.set(conversation.id, conversation);
    open(conversation);
  }
  const question = add(current, current.head, "user", text);
  answer(current, question);
}

/** Asks the model for the answer to a turn and writes it below as it comes. */
async function answer(conversation, question) {
  const node = add(conversation, question.id, "assistant", "");
  const abort = new AbortController();
  runs.set(conversation.id, { node, abort });
  follow = true;
  const speak = speaker();
  speak.status("Answering");
  changed(conversation);
  nudgeEngine();
  let drawn = 0;
  let timer = null;
  let saving = null;
  let first = 0;
  let usage = null;
  const show = () => {
    timer = null;
    drawn = performance.now();
    if (current === conversation) {
      updateTurn(conversation, node, actions);
      speak.text(node.text);
      scroll();
    }
  };
  const save = () => {
    saving = null;
    putConversation(conversation).catch(() => {}); // the end of the answer is saved again, and says if it cannot be
  };
  try {
    const body = { model, messages: messages(conversation, question.id, systemPrompt()), ...sampling() };
    for await (const part of streamChat(body, abort.signal)) {
      if (part.text || part.thought) first ||= performance.now();
      if (part.text) node.text += part.text;
      if (part.thought) node.thought = (node.thought ?? "") + part.thought;
      if (part.finish) node.finish = part.finish;
      if (part.usage) usage = part.usage;
      timer ??= setTimeout(show, Math.max(0, DRAW_MS - (performance.now() - drawn)));
      saving ??= setTimeout(save, SAVE_MS);
    }
    online(true);
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else {
      const { message, kind = "refused", retryAfter = null } = error instanceof ApiError ? error : new ApiError(String(error), "broken");
      node.error = { message, kind, retryAfter, at: Date.now() };
      if (kind === "offline") online(false);
    }
  }
  clearTimeout(timer);
  clearTimeout(saving);
  if (usage?.completion_tokens) node.stats = { tokens: usage.completion_tokens, seconds: (performance.now() - first) / 1000 };
  runs.delete(conversation.id);
  touch(conversation);
  if (current === conversation) {
    speak.text(node.text, true);
    speak.status(node.error ? node.error.message : node.finish === "stopped" ? "Stopped" : "The answer is complete");
  }
  if (conversations.has(conversation.id)) changed(conversation);
  nudgeEngine();
}

/** Shows in the dot whether the server was heard. */
function online(ok, busy = false) {
  byId("dot").className = `dot ${ok ? (busy ? "busy" : "ok") : "off"}`;
  byId("dot-text").textContent = ok ? "Server is there" : "Server does not answer";
}

async function connect() {
  try {
    const names = await models();
    const select = byId("model-select");
    model = names.includes(model) ? model : (names[0] ?? "");
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    select.value = model;
    select.hidden = names.length < 2;
    byId("model-name").hidden = names.length >= 2;
    byId("model-name").textContent = model || "no model";
    byId("model-name").title = model;
    online(true);
  } catch (error) {
    online(false);
    byId("model-name").textContent = error.kind === "key" ? "needs an API key" : "not connected";
    if (error.kind !== "key") setTimeout(connect, 4000);
  }
  showPanel("engine", byId("engine").hidden === false);
}

/** The two panels. They stand beside the messages where there is room; where there is none they lie over them. */
function showPanel(name, shown, byHand = false) {
  const panel = byId(name);
  const over = (name === "side" ? narrow : middle).matches;
  panel.hidden = !shown;
  const toggle = byId(`${name}-toggle`);
  toggle.setAttribute("aria-expanded", String(shown));
  if (over && shown) {
    const other = name === "side" ? "engine" : "side";
    if ((other === "side" ? narrow : middle).matches) byId(other).hidden = true;
    byId(`${other}-toggle`).setAttribute("aria-expanded", String(!byId(other).hidden));
  }
  const covered = [["side", narrow], ["engine", middle]].some(([id, query]) => query.matches && !byId(id).hidden);
  byId("backdrop").hidden = !covered;
  byId("chat").inert = covered;
  if (byHand && over) (shown ? panel.querySelector("button") : toggle).focus();
  if (name === "engine" || over) {
    if (byId("engine").hidden) stopEngine();
    else startEngine((state, error) => online(!error || error.kind !== "offline", (state?.running ?? 0) > 0));
  }
  if (byHand && !over) remember(name, shown);
}

function remember(name, shown) {
  try {
    localStorage.setItem(`powerinfer.panel.${name}`, shown ? "open" : "closed");
  } catch {
    // Then the panels are as they are at first.
  }
}

function wanted(name) {
  if ((name === "side" ? narrow : middle).matches) return false;
  try {
    return localStorage.getItem(`powerinfer.panel.${name}`) !== "closed";
  } catch {
    return true;
  }
}

const togglePanel = (name) => showPanel(name, byId(name).hidden, true);

function closeSide() {
  if (narrow.matches && !byId("side").hidden) showPanel("side", false, true);
}

function newChat() {
  closeSide();
  open(null);
  byId("input").focus();
}

/** Closes what lies on top; returns whether there was something. */
function escape() {
  const covering = ["side", "engine"].find((name) => (name === "side" ? narrow : middle).matches && !byId(name).hidden);
  if (covering) showPanel(covering, false, true);
  else if (current && runs.has(current.id)) runs.get(current.id).abort.abort();
  else return false;
  return true;
}

function wire() {
  const input = byId("input");
  const compose = byId("compose");
  compose.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text || (current && runs.has(current.id))) return;
    input.value = "";
    grow(input);
    send(text);
    input.focus();
  });
  input.addEventListener("input", () => {
    grow(input);
    byId("send").disabled = !input.value.trim();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    compose.requestSubmit();
  });
  byId("stop").addEventListener("click", () => runs.get(current.id)?.abort.abort());
  byId("new-chat").addEventListener("click", newChat);
  byId("jump").addEventListener("click", () => {
    follow = true;
    scroll();
    byId("input").focus();
  });
  byId("scroll").addEventListener("scroll", () => {
    const box = byId("scroll");
    follow = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    byId("jump").hidden = follow;
  });
  byId("starters").append(
    ...STARTERS.map((text) => el("button", { type: "button", class: "button", on: { click: () => (send(text), byId("input").focus()) } }, text)),
  );
  byId("model-select").addEventListener("change", (event) => (model = event.target.value));
  byId("settings-open").addEventListener("click", () => openSettings());
  for (const name of ["side", "engine"]) {
    byId(`${name}-toggle`).addEventListener("click", () => togglePanel(name));
    byId(`${name}-close`).addEventListener("click", () => showPanel(name, false, true));
    (name === "side" ? narrow : middle).addEventListener("change", () => showPanel(name, wanted(name)));
  }
  byId("backdrop").addEventListener("click", () => escape());
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && escape()) event.preventDefault();
    const run = { KeyN: newChat, KeyL: () => togglePanel("side"), KeyE: () => togglePanel("engine"), KeyO: () => openSettings() }[event.code];
    if (run && event.altKey && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      run();
    }
  });
  addEventListener("popstate", () => open(conversations.get(location.hash.slice(1)) ?? null));
  addEventListener("pagehide", () => {
    for (const [id] of runs) putConversation(conversations.get(id)).catch(() => {});
  });
  wireTheme();
  wireSettings(() => {
    toast("Saved.");
    connect();
  });
  wireSidebar({
    all: () => [...conversations.values()],
    changed: draw,
    async added(list) {
      for (const conversation of list) {
        conversations.set(conversation.id, conversation);
        await putConversation(conversation);
      }
      draw();
    },
    async removedAll() {
      for (const id of [...conversations.keys()]) {
        runs.get(id)?.abort.abort();
        conversations.delete(id);
        await deleteConversation(id);
      }
      open(null);
    },
  });
  onOtherTabs(async ({ id, deleted }) => {
    if (runs.has(id)) return; // this tab is writing it
    const stored = deleted ? null : await getConversation(id);
    if (stored) conversations.set(id, stored);
    else conversations.delete(id);
    if (current?.id === id) {
      forgetMessages();
      current = stored;
    }
    draw();
  });
}

async function start() {
  wire();
  showPanel("side", wanted("side"));
  showPanel("engine", wanted("engine"));
  if (!(await openStore())) toast("This browser keeps no data for the page: conversations last until the tab is closed.");
  for (const conversation of await allConversations()) {
    // An answer that a closed tab left half written.
    for (const node of path(conversation)) if (node.role === "assistant" && !node.finish && !node.error) node.finish = "stopped";
    conversations.set(conversation.id, conversation);
  }
  current = conversations.get(location.hash.slice(1)) ?? null;
  draw();
  if (!narrow.matches) byId("input").focus();
  connect();
}

start();
