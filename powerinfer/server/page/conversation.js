// A conversation: a tree of turns, since an edited question or a retried answer stands beside the old one. Plain data, as
// it lies in the browser's database and in exported files:
//   {id, title, created, updated, head, nodes: {id: {id, parent, role, text, time, thought?, finish?, error?, stats?}}}
// `head` is the last turn of the branch that is shown; times are milliseconds since 1970.

export const FORMAT = "powerinfer-conversations-1";
const TERMINAL_FORMAT = "powerinfer-chat-1"; // what `powerinfer chat` saves
const MAX_NODES = 5000;
const MAX_TEXT = 4_000_000;

export const newId = () => {
  // randomUUID is missing where the page came over plain http.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
};

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, head: null, nodes: {} };
}

/** The turns of the branch that is shown, first to last. */
export function path(conversation, from = conversation.head) {
  const turns = [];
  for (let node = conversation.nodes[from]; node; node = conversation.nodes[node.parent]) turns.unshift(node);
  return turns;
}

/** The turns that may stand in this one's place, itself among them, oldest first. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent && other.role === node.role);
}

/** Adds a turn below `parent` (null: the beginning) and shows its branch. */
export function add(conversation, parent, role, text) {
  const node = { id: newId(), parent, role, text, time: Date.now() };
  conversation.nodes[node.id] = node;
  conversation.head = node.id;
  touch(conversation);
  if (!conversation.title && role === "user") conversation.title = titleOf(text);
  return node;
}

/** Takes out a turn that has nothing below it. */
export function remove(conversation, node) {
  delete conversation.nodes[node.id];
  if (conversation.head === node.id) conversation.head = node.parent;
}

/** Shows the branch through this turn, down to its newest end. */
export function show(conversation, node) {
  let last = node;
  for (;;) {
    const below = Object.values(conversation.nodes).filter((other) => other.parent === last.id);
    if (!below.length) break;
    last = below.at(-1);
  }
  conversation.head = last.id;
}

export function touch(conversation) {
  conversation.updated = Date.now();
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  const letters = Array.from(line);
  return letters.length > 60 ? `${letters.slice(0, 59).join("").trimEnd()}…` : line;
}

/** The messages that the model is shown up to this turn. Failed answers are left out, and questions that then follow
 * each other are joined, since templates want roles by turns. */
export function messages(conversation, last, system) {
  const out = system ? [{ role: "system", content: system }] : [];
  for (const { role, text } of path(conversation, last)) {
    if (!text) continue;
    if (out.at(-1)?.role === role) out.at(-1).content += `\n\n${text}`;
    else out.push({ role, content: text });
  }
  return out;
}

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, exported: new Date().toISOString(), conversations }, null, 1);
}

const isText = (value) => typeof value === "string" && value.length <= MAX_TEXT;
const isTime = (value) => Number.isFinite(value) && value >= 0 && value < 8.64e15;

/** A conversation out of untrusted data: known keys only, a tree that ends; throws a sentence that says what is wrong. */
function checked(data) {
  const nodes = data?.nodes;
  if (typeof nodes !== "object" || nodes === null) throw new Error("a conversation has no turns");
  if (Object.keys(nodes).length > MAX_NODES) throw new Error(`a conversation has more than ${MAX_NODES} turns`);
  const ids = new Map(Object.keys(nodes).map((id) => [id, newId()])); // new names: nothing here can be overwritten
  const result = newConversation();
  result.title = isText(data.title) ? titleOf(data.title) : "";
  if (isTime(data.created)) result.created = data.created;
  if (isTime(data.updated)) result.updated = data.updated;
  for (const [id, node] of Object.entries(nodes)) {
    if (!["user", "assistant"].includes(node?.role)) throw new Error("a turn is neither the user's nor the assistant's");
    if (!isText(node.text)) throw new Error("a turn has no text");
    if (node.parent !== null && !ids.has(node.parent)) throw new Error("a turn follows one that is not there");
    const copy = { id: ids.get(id), parent: node.parent === null ? null : ids.get(node.parent), role: node.role, text: node.text };
    copy.time = isTime(node.time) ? node.time : result.created;
    if (isText(node.thought)) copy.thought = node.thought;
    if (isText(node.finish)) copy.finish = node.finish;
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

/** The conversations of an exported file, or of one that `powerinfer chat` saved. Throws an Error with a sentence. */
export function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is not a JSON file");
  }
  if (data?.format === FORMAT && Array.isArray(data.conversations)) return data.conversations.map(checked);
  if (data?.format === TERMINAL_FORMAT && Array.isArray(data.turns)) {
    const nodes = Object.fromEntries(
      data.turns.map((turn, k) => [`n${k}`, { parent: k ? `n${k - 1}` : null, role: turn?.role, text: turn?.content }]),
    );
    return [checked({ nodes, head: `n${data.turns.length - 1}` })];
  }
  throw new Error("it holds no conversations that this page knows");
}
