// The chat page: what is shown, and the wires between the parts.

import { answer, answerAgain, goOn, isAnswering, isWriting, readAll, saveAll, shorten, statusOf, stop, watch, wireAnswers } from "./answers.js";
import { models } from "./api.js";
import { hasFiles, putFiles, takeFiles, wireAttachments } from "./attach.js";
import { add, assign, newConversation, show } from "./conversation.js";
import { byId, el, toast } from "./dom.js";
import { nudgeEngine, startEngine, stopEngine } from "./engine.js";
import { forgetMessages, grow, showMessages, updateTurn } from "./messages.js";
import { openSettings, remembered, wireSettings, wireTheme } from "./settings.js";
import { showSidebar, wireSidebar } from "./sidebar.js";
import { allConversations, deleteConversation, openStore, putConversation } from "./store.js";

const STARTERS = ["Tell me a short story.", "Explain how you work.", "What is 17 plus 25?"];

const conversations = new Map();
let current = null;
let draft; // the system prompt of the chat that is not begun yet; undefined: that of all chats
let offered = new Map(); // models: name -> n_ctx or null
let model = remembered("model") ?? "";
let follow = true; // the newest text is kept in sight

const narrow = matchMedia("(max-width: 860px)");
const middle = matchMedia("(max-width: 1180px)");

const actions = {
  isRunning: isWriting,
  status: statusOf,
  namesModels: () => offered.size > 1,
  edit(node, text) {
    const conversation = current;
    answer(conversation, () => ask(conversation, node.parent, text, node.files));
  },
  retry(node) {
    const conversation = current;
    const isEmpty = node.error && !node.text && conversation.head === node.id;
    if (isEmpty) answerAgain(conversation, node);
    else answer(conversation, () => conversation.nodes[node.parent]);
    byId("input").focus({ preventScroll: true });
  },
  goOn(node) {
    goOn(current, node);
    byId("input").focus({ preventScroll: true });
  },
  shorten(node, summary) {
    shorten(current, node, summary);
    byId("input").focus({ preventScroll: true });
  },
  readAll(owner) {
    readAll(current, owner);
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
  isRunning: isAnswering,
  open(id) {
    open(conversations.get(id));
    closeSide();
    if (!narrow.matches) byId("input").focus();
  },
  rename(id, title) {
    const conversation = conversations.get(id);
    if (title !== conversation.title) {
      assign(conversation, "title", title);
      changed(conversation);
    } else draw();
  },
  async remove(id) {
    const conversation = conversations.get(id);
    stop(id);
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

/** Writes a conversation down and shows what has changed; null: nothing is to be written. */
async function changed(conversation) {
  draw();
  if (!conversation || !conversations.has(conversation.id)) return;
  try {
    if (!(await putConversation(conversation, isAnswering(conversation.id)))) took(conversation.id, null);
  } catch {
    toast("This browser could not save the conversation: its storage may be full.");
  }
}

/** Another tab has written a conversation, or deleted it (null). */
function took(id, conversation) {
  if (conversation) conversations.set(id, conversation);
  else conversations.delete(id);
  if (current?.id === id) current = conversation;
  draw();
}

function draw() {
  showSidebar([...conversations.values()], current?.id, listActions);
  showMessages(current, actions);
  const title = current?.title || "New chat";
  byId("title").textContent = title;
  document.title = current ? `${title} – PowerInfer` : "PowerInfer";
  byId("own-prompt").hidden = (current ? current.system : draft) === undefined;
  const running = current !== null && isAnswering(current.id);
  const hadFocus = document.activeElement === byId("send") || document.activeElement === byId("stop");
  byId("send").hidden = running;
  byId("stop").hidden = !running;
  if (hadFocus) byId("input").focus();
  readyToSend();
  scroll();
}

function readyToSend() {
  byId("send").disabled = !byId("input").value.trim() && !hasFiles();
}

function open(conversation) {
  if (conversation !== current) forgetMessages();
  current = conversation;
  draft = undefined;
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

function ask(conversation, parent, text, files) {
  const question = add(conversation, parent, "user", text);
  if (files?.length) {
    question.files = files;
    if (!conversation.title) assign(conversation, "title", files[0].name);
  }
  return question;
}

/** Sends what was written; it is put back if another tab answers in this conversation. */
async function send(text, files = []) {
  if (current === null) {
    const conversation = newConversation();
    if (draft !== undefined) assign(conversation, "system", draft);
    conversations.set(conversation.id, conversation);
    open(conversation);
  }
  const conversation = current;
  if (await answer(conversation, () => ask(conversation, conversation.head, text, files))) return;
  const input = byId("input");
  input.value = input.value ? `${text}\n\n${input.value}` : text;
  grow(input);
  putFiles(files);
}

/** Shows in the dot whether the server was heard. */
function online(ok, busy = false) {
  byId("dot").className = `dot ${ok ? (busy ? "busy" : "ok") : "off"}`;
  byId("dot-text").textContent = ok ? "Server is there" : "Server does not answer";
}

async function connect() {
  try {
    offered = await models();
    const names = [...offered.keys()];
    const select = byId("model-select");
    model = offered.has(model) ? model : (names[0] ?? "");
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
  else if (current && isAnswering(current.id)) stop(current.id);
  else return false;
  return true;
}

function wire() {
  const input = byId("input");
  const compose = byId("compose");
  compose.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if ((!text && !hasFiles()) || (current && isAnswering(current.id))) return;
    input.value = "";
    grow(input);
    send(text, takeFiles());
    input.focus();
  });
  input.addEventListener("input", () => {
    grow(input);
    readyToSend();
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    compose.requestSubmit();
  });
  byId("stop").addEventListener("click", () => stop(current.id));
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
  byId("model-select").addEventListener("change", (event) => {
    model = event.target.value;
    remembered("model", model);
  });
  byId("settings-open").addEventListener("click", () => openSettings());
  byId("own-prompt").addEventListener("click", () => openSettings("set-chat"));
  new ResizeObserver(scroll).observe(byId("messages"));
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
  addEventListener("pagehide", () => saveAll(conversations));
  wireTheme();
  const own = {
    get: () => (current ? current.system : draft),
    set(text) {
      if (!current) draft = text;
      else if (current.system !== text) {
        assign(current, "system", text);
        changed(current);
      }
    },
  };
  wireSettings(() => {
    toast("Saved.");
    connect();
    draw();
  }, own);
  wireAttachments(() => offered.get(model) ?? null, readyToSend);
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
        stop(id);
        conversations.delete(id);
        await deleteConversation(id);
      }
      open(null);
    },
  });
  const hooks = {
    changed,
    drawTurn(conversation, node) {
      updateTurn(conversation, node);
      scroll();
    },
    isShown: (conversation) => current === conversation,
    began(conversation) {
      if (current === conversation) follow = true;
      changed(conversation);
      nudgeEngine();
    },
    ended(error) {
      if (!error) online(true);
      else if (error.kind === "offline") online(false);
      nudgeEngine();
    },
    model: () => ({ name: model, nCtx: offered.get(model) ?? null }),
  };
  wireAnswers(hooks, (id) => conversations.get(id), took);
}

async function start() {
  wire();
  showPanel("side", wanted("side"));
  showPanel("engine", wanted("engine"));
  if (!(await openStore())) toast("This browser keeps no data for the page: conversations last until the tab is closed.");
  for (const conversation of await allConversations()) {
    conversations.set(conversation.id, conversation);
    watch(conversation);
  }
  current = conversations.get(location.hash.slice(1)) ?? null;
  draw();
  if (!narrow.matches) byId("input").focus();
  connect();
}

start();
