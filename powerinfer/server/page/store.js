// Where conversations live: this browser's IndexedDB, or memory where there is none (some private windows). Other tabs of
// the page hear of changes.

const NAME = "powerinfer";
const TABLE = "conversations";

const channel = typeof BroadcastChannel === "function" ? new BroadcastChannel(NAME) : null;
let database = null;
const memory = new Map();

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
  return database ? done(table("readonly").getAll()) : [...memory.values()].map((item) => structuredClone(item));
}

export async function getConversation(id) {
  return database ? done(table("readonly").get(id)) : structuredClone(memory.get(id));
}

export async function putConversation(conversation) {
  if (database) await done(table("readwrite").put(conversation));
  else memory.set(conversation.id, structuredClone(conversation));
  channel?.postMessage({ id: conversation.id });
}

export async function deleteConversation(id) {
  if (database) await done(table("readwrite").delete(id));
  else memory.delete(id);
  channel?.postMessage({ id, deleted: true });
}

/** Calls back with {id, deleted?} when another tab has changed a conversation. */
export function onOtherTabs(listener) {
  channel?.addEventListener("message", (event) => listener(event.data));
}
