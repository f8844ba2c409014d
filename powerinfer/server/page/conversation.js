// A conversation: a tree of turns, since an edited question or a retried answer stands beside the old one. Plain data, as
// it lies in the browser's database and in exported files:
//   {id, title, created, updated, head, nodes: {id: node}, system?, stamps?}
//   node: {id, parent, role, text, time, version?, files?: [{name, text}], context?: {from, summary?},
//          thought?, finish?, error?, stats?, model?}
// `head` is the last turn of the branch that is shown; times are milliseconds since 1970. `system`: the chat's own system
// prompt. `context` of a question: the model is shown the turns from `from` on, and a summary of those before. `stamps`
// and `version` say which of two tabs' states is the newer one (merge).

export const newId = () => {
  // randomUUID is missing where the page came over plain http.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
};

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, head: null, nodes: {} };
}

/** Sets a field of the conversation itself: title, head or system. */
export function assign(conversation, name, value) {
  conversation[name] = value;
  conversation.stamps = { ...conversation.stamps, [name]: Date.now() };
}

/** Says that a turn has changed. */
export function touched(node) {
  node.version = (node.version ?? 0) + 1;
}

/** Takes into a conversation what another tab knows of it: turns that are missing, newer states of turns and fields.
 * Turns keep their objects. keepHead: the branch that is shown stays. */
export function merge(conversation, other, keepHead = false) {
  for (const [id, theirs] of Object.entries(other.nodes)) {
    const ours = conversation.nodes[id];
    if (!ours) conversation.nodes[id] = theirs;
    else if ((theirs.version ?? 0) > (ours.version ?? 0)) {
      for (const name of Object.keys(ours)) delete ours[name];
      Object.assign(ours, theirs);
    }
  }
  for (const name of ["title", "head", "system"]) {
    const [ours, theirs] = [conversation, other].map((one) => one.stamps?.[name] ?? 0);
    if (theirs > ours && !(name === "head" && keepHead)) {
      conversation[name] = other[name];
      conversation.stamps = { ...conversation.stamps, [name]: theirs };
    }
  }
  conversation.updated = Math.max(conversation.updated, other.updated);
}

/** The turns of the branch that is shown, first to last. */
export function path(conversation, from = conversation.head) {
  const turns = [];
  for (let node = conversation.nodes[from]; node; node = conversation.nodes[node.parent]) turns.push(node);
  return turns.reverse();
}

/** The turns below each turn (null: the beginning), oldest first. */
export function families(conversation) {
  const below = new Map();
  for (const node of Object.values(conversation.nodes)) {
    const family = below.get(node.parent);
    if (family) family.push(node);
    else below.set(node.parent, [node]);
  }
  for (const family of below.values()) family.sort((a, b) => a.time - b.time);
  return below;
}

/** The turns that may stand in this one's place, itself among them, oldest first. */
export function siblings(below, node) {
  return below.get(node.parent).filter((other) => other.role === node.role);
}

/** Adds a turn below `parent` (null: the beginning) and shows its branch. */
export function add(conversation, parent, role, text) {
  const node = { id: newId(), parent, role, text, time: Date.now(), version: 1 };
  conversation.nodes[node.id] = node;
  assign(conversation, "head", node.id);
  touch(conversation);
  if (!conversation.title && role === "user" && text) assign(conversation, "title", titleOf(text));
  return node;
}

/** Shows the branch through this turn, down to its newest end. */
export function show(conversation, node) {
  const below = families(conversation);
  let last = node;
  while (below.has(last.id)) last = below.get(last.id).at(-1);
  assign(conversation, "head", last.id);
}

export function touch(conversation) {
  conversation.updated = Date.now();
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0].replace(/\s+/g, " ");
  const letters = Array.from(line);
  return letters.length > 60 ? `${letters.slice(0, 59).join("").trimEnd()}…` : line;
}

/** A turn as the model reads it: files stand before the text, each fenced. */
export function contentOf({ text, files = [] }) {
  const parts = files.map((file) => {
    const runs = file.text.match(/`{3,}/g) ?? [];
    const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
    return `File ${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, ...(text ? [text] : [])].join("\n\n");
}

/** The turns that the model is shown up to this one, and the summary of those that are left out before. */
export function seen(conversation, last) {
  const turns = path(conversation, last);
  const context = turns.findLast((node) => node.context)?.context;
  const first = context ? turns.findIndex((node) => node.id === context.from) : 0;
  return first < 0 ? { turns, summary: "" } : { turns: turns.slice(first), summary: context?.summary ?? "" };
}

/** The messages that the model is shown up to this turn. Failed answers are left out, and questions that then follow
 * each other are joined, since templates want roles by turns. */
export function messages(conversation, last, system) {
  const out = system ? [{ role: "system", content: system }] : [];
  const { turns, summary } = seen(conversation, last);
  if (summary) out.push({ role: "user", content: `Summary of our conversation until now:\n\n${summary}` });
  for (const node of turns) {
    const content = contentOf(node);
    if (!content) continue;
    if (out.at(-1)?.role === node.role) out.at(-1).content += `\n\n${content}`;
    else out.push({ role: node.role, content });
  }
  return out;
}
