// What the reader sets: how answers are sampled, the system prompts, the API key, the colours.

import { byId } from "./dom.js";
import { buildFields, fillFields, readFields, sound } from "./sampling.js";

const PLACE = "powerinfer.settings";
const KEY_PLACE = "powerinfer.key";
const THEME_PLACE = "powerinfer.theme";

function read(storage, place) {
  try {
    return storage().getItem(place);
  } catch {
    return null; // storage may be closed to the page
  }
}

function write(storage, place, value) {
  try {
    if (value) storage().setItem(place, value);
    else storage().removeItem(place);
  } catch {
    // The setting then lasts as long as the page.
  }
}

const local = () => localStorage;
const session = () => sessionStorage;

let settings = load();
let key = read(session, KEY_PLACE) ?? read(local, KEY_PLACE) ?? "";

function load() {
  let stored = {};
  try {
    stored = JSON.parse(read(local, PLACE) ?? "{}") ?? {};
  } catch {
    // Unreadable: the defaults.
  }
  return { system: typeof stored?.system === "string" ? stored.system : "", ...sound(stored) };
}

export const apiKey = () => key;

/** The system prompt of a chat: its own, or the one of all chats. */
export const systemPrompt = (chat) => (chat?.system ?? settings.system).trim();

/** The part of a request that the settings decide; what is not set is left to the server. */
export function sampling() {
  return Object.fromEntries(Object.entries(settings).filter(([name, value]) => name !== "system" && value !== null));
}

let chat = { get: () => undefined, set: () => {} };

function fill({ system, ...values }, own) {
  byId("set-system").value = system;
  byId("set-own").checked = own !== undefined;
  byId("set-chat").value = own ?? "";
  showOwn();
  fillFields(values);
  byId("settings-error").textContent = "";
}

function showOwn() {
  byId("set-chat").hidden = !byId("set-own").checked;
}

/** Opens the dialog; focus: the id of the field to begin in. */
export function openSettings(focus = "set-system") {
  fill(settings, chat.get());
  byId("set-key").value = key;
  byId("set-remember").checked = read(local, KEY_PLACE) !== null;
  byId("settings").showModal();
  byId(focus).focus();
}

/** Reads the fields into the settings; returns false, with a sentence shown, if one is out of range. */
function save() {
  const { values, field, message } = readFields();
  if (field) {
    byId("settings-error").textContent = message;
    for (let up = field.closest("details"); up; up = up.parentElement.closest("details")) up.open = true;
    field.focus();
    return false;
  }
  settings = { system: byId("set-system").value, ...values };
  chat.set(byId("set-own").checked ? byId("set-chat").value : undefined);
  key = byId("set-key").value.trim();
  write(local, PLACE, JSON.stringify(settings));
  const remember = byId("set-remember").checked;
  write(local, KEY_PLACE, remember ? key : "");
  write(session, KEY_PLACE, remember ? "" : key);
  return true;
}

/** Wires the dialog. saved: called after a change; own: {get(), set(text)} of the system prompt of the chat that is
 * shown, undefined where it has none of its own. */
export function wireSettings(saved, own) {
  const dialog = byId("settings");
  chat = own;
  buildFields(byId("set-basic"), byId("set-more"));
  byId("set-own").addEventListener("change", () => {
    showOwn();
    if (byId("set-own").checked) {
      byId("set-chat").value ||= byId("set-system").value;
      byId("set-chat").focus();
    }
  });
  byId("settings-close").addEventListener("click", () => dialog.close());
  byId("settings-reset").addEventListener("click", () => {
    fill({ system: "" }, undefined);
    byId("set-system").focus();
  });
  byId("settings-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (save()) {
      dialog.close();
      saved();
    }
  });
}

/** A text that the page remembers in this browser; undefined reads it, "" forgets it. */
export function remembered(name, value) {
  if (value === undefined) return read(local, `powerinfer.${name}`);
  return write(local, `powerinfer.${name}`, value);
}

const THEMES = ["auto", "light", "dark"];
const THEME_NAMES = { auto: "as the system", light: "light", dark: "dark" };

/** Wires the button that goes through the colours: as the system, light, dark. */
export function wireTheme() {
  const root = document.documentElement;
  const button = byId("theme");
  const label = () => {
    const theme = root.dataset.theme ?? "auto";
    button.setAttribute("aria-label", `Colours: ${THEME_NAMES[theme]}`);
    button.title = `Colours: ${THEME_NAMES[theme]}`;
    byId("theme-icon").setAttribute("href", `#i-${theme}`);
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    write(local, THEME_PLACE, next === "auto" ? "" : next);
    label();
  });
  label();
}
