// Where conversations live: this browser's IndexedDB, or memory where there is none (some private windows). Other tabs of
// the page hear of changes, and none overwrites what another has written.

import { merge } from "./conversation.js";

const NAME = "powerinfer";
const TABLE = "conversations";
const SILENCE_MS = 5000;

const channel = typeof BroadcastChannel === "function" ? new BroadcastChannel(NAME) : null;
let database = null;
const memory = new Map();
const known = new Set(); // conversations that were in the database: one that is missing there was deleted

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** Opens the database. Returns false where conversations last only as long as this tab. */
export async function openStore() {
  try {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    database = await done(request);
    database.onversionchange = () => database.close();
    return true;
  } catch {
    return false;
  }
}

const table = (mode) => database.transaction(TABLE, mode).objectStore(TABLE);

export async function allConversations() {
  if (!database) return [...memory.values()].map((item) => structuredClone(item));
  const all = await done(table("readonly").getAll());
  for (const { id } of all) known.add(id);
  return all;
}

export async function getConversation(id) {
  if (!database) return structuredClone(memory.get(id));
  const stored = await done(table("readonly").get(id));
  if (stored) known.add(id);
  return stored;
}

/** Writes a conversation down, together with what other tabs have written of it meanwhile; what they know more is merged
 * into it. keepHead: as in merge(). Returns false, with nothing written, if another tab has deleted it. */
export async function putConversation(conversation, keepHead = false) {
  const merged = await merging(conversation, keepHead);
  if (merged) channel?.postMessage({ id: conversation.id });
  return merged;
}

async function merging(conversation, keepHead) {
  const { id } = conversation;
  if (!database) {
    memory.set(id, structuredClone(conversation));
    return true;
  }
  // Reading and writing are one transaction: those of other tabs come before or after it.
  const place = table("readwrite");
  const stored = await done(place.get(id));
  if (!stored && known.has(id)) return false;
  if (stored) merge(conversation, stored, keepHead);
  await done(place.put(conversation));
  known.add(id);
  return true;
}

export async function deleteConversation(id) {
  known.delete(id);
  if (database) await done(table("readwrite").delete(id));
  else memory.delete(id);
  channel?.postMessage({ id, deleted: true });
}

/** Calls back with {id, deleted?, stop?} when another tab has changed a conversation, or wants its answer stopped. */
export function onOtherTabs(listener) {
  channel?.addEventListener("message", (event) => listener(event.data));
}

/** Asks the tab that is writing an answer in a conversation to stop. */
export function stopElsewhere(id) {
  channel?.postMessage({ id, stop: true });
}

const lockOf = (id) => `${NAME}.answer.${id}`;

/** Takes the right to answer in a conversation, which one tab has at a time. Returns a function that gives it back, or
 * null if another tab has it. Browsers have such locks where the page came over https or from this machine; elsewhere
 * two tabs may answer at the same time, and both answers are kept. */
export function takeTurn(id) {
  if (!navigator.locks) return Promise.resolve(() => {});
  return new Promise((resolve, reject) => {
    navigator.locks
      .request(lockOf(id), { ifAvailable: true }, (lock) => (lock ? new Promise((give) => resolve(give)) : resolve(null)))
      .catch(reject);
  });
}

/** Waits until no tab answers in a conversation; without locks, for a while in which more of the answer should come. */
export function turnIsFree(id) {
  if (!navigator.locks) return new Promise((resolve) => setTimeout(resolve, SILENCE_MS));
  return navigator.locks.request(lockOf(id), { mode: "shared" }, () => {});
}
