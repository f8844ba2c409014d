// The numbers with which answers are chosen, as the server takes them (schemas.py), and their fields in the settings.

import { el } from "./dom.js";

const LARGEST = 2 ** 31 - 1;

/** name, label, least, most; whole numbers where `whole`. What is left empty is the server's choice. */
const number = (name, label, min, max, whole = false, hint = "server's default") => ({ name, label, min, max, whole, hint });

export const BASIC = [
  number("temperature", "Temperature", 0, 100),
  number("top_p", "Top p", 0, 1),
  number("max_tokens", "Longest answer, tokens", 1, 1_000_000, true),
  number("seed", "Seed", 0, 2 ** 32 - 1, true, "another each time"),
];

export const GROUPS = [
  {
    title: "Which tokens may be chosen",
    fields: [
      number("top_k", "Top k", -1, LARGEST, true),
      number("min_p", "Min p", 0, 1),
      number("typical_p", "Typical p", 0, 1),
      number("top_n_sigma", "Top n sigma", -1, 1000),
      number("min_tokens", "Shortest answer, tokens", 0, LARGEST, true),
    ],
  },
  {
    title: "Penalties for repeating",
    fields: [
      number("repeat_penalty", "Repeat penalty", 0.001, 100),
      number("penalty_last_n", "Over the last tokens", -1, LARGEST, true),
      number("presence_penalty", "Presence penalty", -2, 2),
      number("frequency_penalty", "Frequency penalty", -2, 2),
    ],
  },
  {
    title: "DRY: against repeated phrases",
    fields: [
      number("dry_multiplier", "DRY multiplier", 0, 100),
      number("dry_base", "DRY base", 1, 100),
      number("dry_allowed_length", "DRY allowed length", 1, LARGEST, true),
      number("dry_penalty_last_n", "DRY over the last tokens", -1, LARGEST, true),
    ],
  },
  {
    title: "XTC: leaving out the likeliest",
    fields: [number("xtc_probability", "XTC probability", 0, 1), number("xtc_threshold", "XTC threshold", 0, 1)],
  },
  {
    title: "Dynamic temperature",
    fields: [number("dynatemp_range", "Range", 0, 100), number("dynatemp_exponent", "Exponent", 0, 100)],
  },
  {
    title: "Mirostat",
    fields: [
      number("mirostat_mode", "Mirostat mode", 0, 2, true, "0 is off; 1 or 2"),
      number("mirostat_tau", "Mirostat tau", 0, 100),
      number("mirostat_eta", "Mirostat eta", 0, 100),
    ],
  },
];

/** Lists of texts, one a line; \n, \t and \\ are a line break, a tab and a backslash. */
export const LISTS = [
  { name: "stop", label: "Texts that end an answer", most: 64, longest: 1000 },
  { name: "dry_sequence_breakers", label: "Texts that break a phrase for DRY", most: 16, longest: 64 },
];

export const NUMBERS = [...BASIC, ...GROUPS.flatMap((group) => group.fields)];

const ESCAPES = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
const lineOf = (text) => text.replace(/[\\\n\t]/g, (char) => Object.keys(ESCAPES).find((key) => ESCAPES[key] === char));
const linesOf = (texts) => texts.map(lineOf).join("\n");
const textsOf = (lines) => lines.split("\n").filter(Boolean).map((line) => line.replace(/\\[nt\\]/g, (mark) => ESCAPES[mark]));

const input = ({ name, label, min, max, whole, hint }) =>
  el(
    "div",
    {},
    el("label", { class: "label", for: `set-${name}` }, label),
    el("input", {
      class: "field", id: `set-${name}`, type: "number", min, max, step: whole ? "1" : "any", inputmode: min < 0 ? "text" : whole ? "numeric" : "decimal", placeholder: hint,
    }),
  );

/** Puts the fields into the dialog: the usual ones, and the others where they are folded. */
export function buildFields(basic, more) {
  basic.append(...BASIC.map(input));
  for (const { title, fields } of GROUPS) {
    more.append(el("fieldset", {}, el("legend", {}, title), el("div", { class: "pairs" }, ...fields.map(input))));
  }
  for (const { name, label } of LISTS) {
    more.append(
      el("label", { class: "label", for: `set-${name}` }, label),
      el("textarea", { class: "field", id: `set-${name}`, rows: "2", spellcheck: "false", placeholder: "one a line, \\n for a line break" }),
    );
  }
}

const isList = (value, { most, longest }) =>
  Array.isArray(value) && value.length > 0 && value.length <= most && value.every((text) => typeof text === "string" && text && text.length <= longest);

/** What of stored data is sound: a number or null for each name, a list or null. */
export function sound(stored) {
  const result = {};
  for (const { name, min, max } of NUMBERS) {
    const value = stored?.[name];
    result[name] = Number.isFinite(value) && value >= min && value <= max ? value : null;
  }
  for (const list of LISTS) result[list.name] = isList(stored?.[list.name], list) ? stored[list.name] : null;
  return result;
}

/** Shows values in the fields. */
export function fillFields(values) {
  for (const { name } of NUMBERS) document.getElementById(`set-${name}`).value = values[name] ?? "";
  for (const { name } of LISTS) document.getElementById(`set-${name}`).value = linesOf(values[name] ?? []);
}

/** Reads the fields: {values}, or {field, message} of the first that is wrong. */
export function readFields() {
  const values = {};
  for (const { name, label, min, max, whole } of NUMBERS) {
    const field = document.getElementById(`set-${name}`);
    const ok = field.validity.valid;
    field.setAttribute("aria-invalid", String(!ok));
    if (!ok) return { field, message: `${label} must be ${whole ? "a whole number" : "a number"} from ${min} to ${max}.` };
    values[name] = field.value === "" ? null : field.valueAsNumber;
  }
  for (const list of LISTS) {
    const field = document.getElementById(`set-${list.name}`);
    const texts = textsOf(field.value);
    const ok = !texts.length || isList(texts, list);
    field.setAttribute("aria-invalid", String(!ok));
    if (!ok) return { field, message: `${list.label}: at most ${list.most} lines of ${list.longest} letters each.` };
    values[list.name] = texts.length ? texts : null;
  }
  return { values };
}
