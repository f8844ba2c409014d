// What the reader sets: how answers are sampled, the system prompt, the API key, the colours.

import { byId } from "./dom.js";

const PLACE = "powerinfer.settings";
const KEY_PLACE = "powerinfer.key";
const THEME_PLACE = "powerinfer.theme";
export const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const NAMES = { temperature: "Temperature", top_p: "Top p", max_tokens: "The longest answer", seed: "The seed" };

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
  const result = { system: typeof stored.system === "string" ? stored.system : "" };
  for (const name of NUMBERS) result[name] = Number.isFinite(stored[name]) ? stored[name] : null;
  return result;
}

export const apiKey = () => key;
export const systemPrompt = () => settings.system.trim();

/** The part of a request that the settings decide; what is not set is left to the server. */
export function sampling() {
  return Object.fromEntries(NUMBERS.filter((name) => settings[name] !== null).map((name) => [name, settings[name]]));
}

function fill({ system, ...numbers }) {
  byId("set-system").value = system;
  for (const name of NUMBERS) byId(`set-${name}`).value = numbers[name] ?? "";
  byId("settings-error").textContent = "";
}

/** Opens the dialog; focus: the id of the field to begin in. */
export function openSettings(focus = "set-system") {
  fill(settings);
  byId("set-key").value = key;
  byId("set-remember").checked = read(local, KEY_PLACE) !== null;
  byId("settings").showModal();
  byId(focus).focus();
}

/** Reads the fields into the settings; returns false, with a sentence shown, if one is out of range. */
function save() {
  const next = { system: byId("set-system").value };
  for (const name of NUMBERS) {
    const field = byId(`set-${name}`);
    const ok = field.validity.valid;
    field.setAttribute("aria-invalid", String(!ok));
    if (!ok) {
      const whole = field.step === "1" ? "a whole number" : "a number";
      byId("settings-error").textContent = `${NAMES[name]} must be ${whole} from ${field.min} to ${field.max}.`;
      field.focus();
      return false;
    }
    next[name] = field.value === "" ? null : field.valueAsNumber;
  }
  settings = next;
  key = byId("set-key").value.trim();
  write(local, PLACE, JSON.stringify(settings));
  const remember = byId("set-remember").checked;
  write(local, KEY_PLACE, remember ? key : "");
  write(session, KEY_PLACE, remember ? "" : key);
  return true;
}

/** Wires the dialog; saved: called after a change. */
export function wireSettings(saved) {
  const dialog = byId("settings");
  byId("settings-close").addEventListener("click", () => dialog.close());
  byId("settings-reset").addEventListener("click", () => {
    fill({ system: "" });
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
