// The list of conversations: by day, searched, renamed, exported and deleted.

import { byId, confirmed, download, el, iconButton, toast } from "./dom.js";
import { MAX_FILE_BYTES, exported, imported } from "./importing.js";

const DAY = 86_400_000;
const PAGE = 200; // conversations that are listed at first, and more at a time
let listed = PAGE;

function groupOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - DAY) return "Yesterday";
  if (time >= midnight - 7 * DAY) return "This week";
  return new Date(time).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}

/** Whether a conversation's title or one of its turns holds the words. */
function matches(conversation, words) {
  const has = (text) => text.toLowerCase().includes(words);
  const holds = (node) => has(node.text) || node.files?.some((file) => has(file.name) || has(file.text));
  return !words || has(conversation.title) || Object.values(conversation.nodes).some(holds);
}

/** Shows the list. actions: open(id), rename(id, title), remove(id); isRunning(id). */
export function showSidebar(conversations, current, actions) {
  const box = byId("conversations");
  const focused = document.activeElement?.closest?.("[data-conversation]")?.dataset.conversation;
  if (box.querySelector(".rename")) return; // a title is being written
  const words = byId("search").value.trim().toLowerCase();
  const all = conversations.filter((item) => matches(item, words)).sort((a, b) => b.updated - a.updated);
  const found = all.slice(0, listed);
  const groups = new Map();
  for (const item of found) {
    const name = groupOf(item.updated);
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(item);
  }
  box.replaceChildren(
    ...[...groups].map(([name, items]) =>
      el("section", { "aria-label": name }, el("h2", {}, name), el("ul", {}, ...items.map((item) => row(item, item.id === current, actions)))),
    ),
  );
  if (all.length > found.length) {
    const more = () => {
      listed += PAGE;
      showSidebar(conversations, current, actions);
      box.querySelectorAll(".conversation-open")[found.length]?.focus();
    };
    box.append(el("button", { type: "button", class: "quiet-button", on: { click: more } }, `Show more of ${all.length}`));
  }
  if (!found.length) {
    box.append(el("p", { class: "note" }, words ? "Nothing found." : "Your conversations will be listed here. They stay in this browser."));
  }
  for (const id of ["export-all", "delete-all"]) byId(id).disabled = conversations.length === 0;
  if (focused) box.querySelector(`[data-conversation="${focused}"] .conversation-open`)?.focus();
}

function row(item, isCurrent, actions) {
  const title = item.title || "New chat";
  const open = el(
    "button",
    { type: "button", class: "conversation-open", "aria-current": isCurrent ? "true" : null, title, on: { click: () => actions.open(item.id) } },
    el("span", { class: "conversation-title", dir: "auto" }, title),
    actions.isRunning(item.id) ? el("span", { class: "pulse" }, el("span", { class: "sr-only" }, "is being answered")) : null,
  );
  const node = el(
    "li",
    { class: `conversation${isCurrent ? " current" : ""}`, "data-conversation": item.id },
    open,
    el(
      "div",
      { class: "conversation-buttons" },
      iconButton("edit", `Rename ${title}`, () => rename(node, item, actions)),
      iconButton("export", `Export ${title}`, () => save([item], title)),
      iconButton("trash", `Delete ${title}`, () => actions.remove(item.id)),
    ),
  );
  return node;
}

function rename(node, item, actions) {
  const field = el("input", { class: "field rename", "aria-label": "Title", maxlength: "120", dir: "auto" });
  field.value = item.title;
  let over = false;
  const end = (keep) => {
    if (over) return;
    over = true;
    field.remove();
    actions.rename(item.id, keep ? field.value.trim() || item.title : item.title);
    byId("conversations").querySelector(`[data-conversation="${item.id}"] .conversation-open`)?.focus();
  };
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.stopPropagation();
    if ((event.key === "Enter" && !event.isComposing) || event.key === "Escape") end(event.key === "Enter");
  });
  node.replaceChildren(field);
  field.select();
}

function save(conversations, title) {
  const name = title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 50) || "conversation";
  download(`${name}.json`, exported(conversations));
}

/** Wires the list's own buttons. all(): the conversations; added(list), removedAll(): what happened. */
export function wireSidebar({ all, changed, added, removedAll }) {
  byId("search").addEventListener("input", changed);
  byId("export-all").addEventListener("click", () => save(all(), "powerinfer-conversations"));
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async (event) => {
    const files = [...event.target.files];
    event.target.value = "";
    const read = [];
    const refused = [];
    for (const file of files) {
      try {
        if (file.size > MAX_FILE_BYTES) throw new Error(`it is larger than ${MAX_FILE_BYTES / 1e6} MB`);
        const found = imported(await file.text());
        read.push(...found.conversations);
        refused.push(...found.refused);
      } catch (error) {
        toast(`${file.name} was not imported: ${error.message}.`);
        return;
      }
    }
    await added(read);
    const left = refused.length ? ` ${refused.length} could not be read: ${refused[0]}.` : "";
    toast(`Imported ${read.length} conversation${read.length === 1 ? "" : "s"}.${left}`);
  });
  byId("delete-all").addEventListener("click", async () => {
    const n = all().length;
    const text = `${n === 1 ? "The conversation" : `All ${n} conversations`} in this browser will be gone. Export them first if you may want them again.`;
    if (await confirmed("Delete all conversations?", text, "Delete all")) {
      await removedAll();
      toast("All conversations are deleted.");
    }
  });
}
