// Files of conversations: this page's own, those of the terminal's chat, of ChatGPT and of Open WebUI. What they hold is
// not trusted: known keys alone are taken, and a tree must end.

import { newConversation, newId, path, titleOf } from "./conversation.js";

export const FORMAT = "powerinfer-conversations-1";
const TERMINAL_FORMAT = "powerinfer-chat-1"; // what `powerinfer chat` saves
const MAX_NODES = 5000;
const MAX_TEXT = 4_000_000;
const MAX_FILES = 64; // attached to one turn
export const MAX_FILE_BYTES = 300_000_000;

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, exported: new Date().toISOString(), conversations }, null, 1);
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isText = (value) => typeof value === "string" && value.length <= MAX_TEXT;
const isTime = (value) => Number.isFinite(value) && value >= 0 && value < 8.64e15;
const ofSeconds = (value) => (Number.isFinite(value) ? value * 1000 : undefined);

/** A conversation out of untrusted data: known keys only, a tree that ends; throws a sentence that says what is wrong. */
function checked(data) {
  const nodes = data?.nodes;
  if (!isObject(nodes)) throw new Error("a conversation has no turns");
  const entries = Object.entries(nodes);
  if (entries.length > MAX_NODES) throw new Error(`a conversation has more than ${MAX_NODES} turns`);
  const ids = new Map(entries.map(([id]) => [id, newId()])); // new names: nothing here can be overwritten
  const result = newConversation();
  result.title = isText(data.title) ? titleOf(data.title) : "";
  if (isText(data.system)) result.system = data.system;
  if (isTime(data.created)) result.created = data.created;
  if (isTime(data.updated)) result.updated = data.updated;
  for (const [id, node] of entries) {
    if (!["user", "assistant"].includes(node?.role)) throw new Error("a turn is neither the user's nor the assistant's");
    if (!isText(node.text)) throw new Error("a turn has no text");
    if (node.parent !== null && !ids.has(node.parent)) throw new Error("a turn follows one that is not there");
    const copy = { id: ids.get(id), parent: node.parent === null ? null : ids.get(node.parent), role: node.role, text: node.text };
    copy.time = isTime(node.time) ? node.time : result.created;
    for (const name of ["thought", "finish", "model"]) if (isText(node[name])) copy[name] = node[name];
    if (copy.role === "assistant") copy.finish ??= "stop"; // nobody is writing it
    if (Array.isArray(node.files)) copy.files = filesOf(node.files);
    if (isObject(node.context) && ids.has(node.context.from)) {
      copy.context = { from: ids.get(node.context.from) };
      if (isText(node.context.summary)) copy.context.summary = node.context.summary;
    }
    result.nodes[copy.id] = copy;
  }
  const sound = new Set(); // turns whose parents are known to lead to a beginning
  for (const node of Object.values(result.nodes)) {
    const seen = new Set();
    for (let up = node; up && !sound.has(up.id); up = result.nodes[up.parent]) {
      if (seen.has(up.id)) throw new Error("a turn follows itself");
      seen.add(up.id);
    }
    for (const id of seen) sound.add(id);
  }
  result.head = ids.get(data.head) ?? Object.keys(result.nodes).at(-1) ?? null;
  if (!result.title) result.title = titleOf(path(result)[0]?.text ?? "") || "Imported";
  return result;
}

function filesOf(files) {
  if (files.length > MAX_FILES || !files.every((file) => isText(file?.name) && isText(file.text))) {
    throw new Error("an attached file has no name or text");
  }
  return files.map(({ name, text }) => ({ name: name.slice(0, 255), text }));
}

/** The tree of another program's turns: those that are not taken (null) are left out, and what follows them follows
 * the one before. turns: a Map of name -> {parent, turn: {role, text, time?, thought?} or null}. */
function tree(turns, last) {
  const above = new Map(); // a name -> the nearest taken turn at or above it
  const find = (name) => {
    const way = [];
    let at = name;
    for (; turns.has(at) && !turns.get(at).turn && !above.has(at); at = turns.get(at).parent) {
      if (way.length > turns.size) throw new Error("a turn follows itself");
      way.push(at);
    }
    const found = above.has(at) ? above.get(at) : turns.has(at) ? at : null;
    for (const one of way) above.set(one, found);
    return found;
  };
  const nodes = [];
  for (const [name, { parent, turn }] of turns) if (turn) nodes.push([name, { ...turn, parent: find(parent) }]);
  return { nodes: Object.fromEntries(nodes), head: find(last) };
}

/** The text of a message of ChatGPT; "" for those that it does not show. */
function chatgptText(message) {
  const { content, metadata } = message;
  if (!isObject(content) || metadata?.is_visually_hidden_from_conversation === true) return "";
  if (!["text", "multimodal_text"].includes(content.content_type) || !Array.isArray(content.parts)) return "";
  const one = (part) => (typeof part === "string" ? part : isText(part?.text) ? part.text : "[a file that is not in the export]");
  return content.parts.map(one).filter(Boolean).join("\n\n");
}

function chatgptTurn(message) {
  const role = message?.author?.role;
  if (!["user", "assistant"].includes(role) || !["all", undefined, null].includes(message.recipient)) return null;
  const text = chatgptText(message);
  return text.trim() ? { role, text, time: ofSeconds(message.create_time) } : null;
}

function ofChatgpt(data) {
  const turns = new Map();
  for (const [name, node] of Object.entries(data.mapping)) {
    turns.set(name, { parent: node?.parent ?? null, turn: chatgptTurn(node?.message) });
  }
  const times = { created: ofSeconds(data.create_time), updated: ofSeconds(data.update_time) };
  return checked({ title: data.title, ...times, ...tree(turns, data.current_node) });
}

const REASONING = /^\s*<details type="reasoning"[^>]{0,200}>\s*(?:<summary>[^<]{0,200}<\/summary>)?([^]*?)<\/details>\s*/;

function webuiTurn(message) {
  if (!["user", "assistant"].includes(message?.role) || typeof message.content !== "string") return null;
  const turn = { role: message.role, text: message.content, time: ofSeconds(message.timestamp), model: message.model };
  const thoughts = message.role === "assistant" ? REASONING.exec(message.content) : null;
  if (thoughts) {
    turn.text = message.content.slice(thoughts[0].length);
    turn.thought = thoughts[1].replaceAll("&gt;", ">").replaceAll("&lt;", "<").replaceAll("&amp;", "&").replace(/^> ?/gm, "").trim();
  }
  return turn.text.trim() || turn.thought ? turn : null;
}

function ofWebui(data) {
  const { chat } = data;
  const turns = new Map();
  let last = null;
  if (isObject(chat.history?.messages)) {
    for (const [name, message] of Object.entries(chat.history.messages)) {
      turns.set(name, { parent: message?.parentId ?? null, turn: webuiTurn(message) });
    }
    last = chat.history.currentId ?? [...turns.keys()].at(-1);
  } else if (Array.isArray(chat.messages)) {
    chat.messages.forEach((message, k) => turns.set(`n${k}`, { parent: k ? `n${k - 1}` : null, turn: webuiTurn(message) }));
    last = `n${chat.messages.length - 1}`;
  } else throw new Error("a conversation has no turns");
  const times = { created: ofSeconds(data.created_at), updated: ofSeconds(data.updated_at) };
  return checked({ title: data.title ?? chat.title, system: chat.system || undefined, ...times, ...tree(turns, last) });
}

function ofTerminal(data) {
  const nodes = data.turns.map((turn, k) => [`n${k}`, { parent: k ? `n${k - 1}` : null, role: turn?.role, text: turn?.content }]);
  return checked({ nodes: Object.fromEntries(nodes), system: data.system || undefined, head: `n${data.turns.length - 1}` });
}

/** How one item of a file is read, or undefined. */
function readerOf(item) {
  if (isObject(item?.mapping)) return ofChatgpt;
  return isObject(item?.chat) ? ofWebui : undefined;
}

/** The conversations of a file: {conversations, refused: a sentence for each that is wrong, empty: how many had no turn}.
 * Throws an Error with a sentence if there is nothing to take. */
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is not a JSON file");
  }
  let items = null;
  if (data?.format === FORMAT && Array.isArray(data.conversations)) items = data.conversations.map((item) => [checked, item]);
  else if (data?.format === TERMINAL_FORMAT && Array.isArray(data.turns)) items = [[ofTerminal, data]];
  else {
    const list = Array.isArray(data) ? data : [data];
    if (list.some(readerOf)) items = list.map((item) => [readerOf(item), item]);
  }
  if (!items) throw new Error("it holds no conversations that this page knows");
  const conversations = [];
  const refused = [];
  let empty = 0;
  for (const [read, item] of items) {
    try {
      if (!read) throw new Error("a conversation has no turns");
      const conversation = read(item);
      if (read === checked || conversation.head !== null) conversations.push(conversation);
      else empty += 1;
    } catch (error) {
      refused.push(error.message);
    }
  }
  if (!conversations.length && refused.length) throw new Error(refused[0]);
  return { conversations, refused, empty };
}
