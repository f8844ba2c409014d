// Text files that go with the next message: picked, dropped or pasted. They are read here and sent as text.

import { byId, el, icon, iconButton, toast } from "./dom.js";

const CHARS_PER_TOKEN = 4; // a rough upper bound for prose: what has more letters does not fit for certain
const UNKNOWN = 100_000; // characters, where the server does not say how much its model reads
const MAX_FILES = 20;

let files = []; // {name, text}
let nCtx = () => null;
let changed = () => {};

const inWords = (n) => n.toLocaleString("en");

/** How long a file is, in words. */
export const sizeOf = ({ text }) => `${inWords(text.length)} character${text.length === 1 ? "" : "s"}`;

/** Text out of bytes, or null where they are none: UTF-8, or UTF-16 with its mark. */
function decoded(bytes) {
  const [a, b] = bytes;
  const kind = a === 0xff && b === 0xfe ? "utf-16le" : a === 0xfe && b === 0xff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(kind, { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text.replace(/\r\n?/g, "\n");
  } catch {
    return null;
  }
}

async function attach(list) {
  const most = nCtx() ? nCtx() * CHARS_PER_TOKEN : UNKNOWN;
  const limit = nCtx() ? `the model reads at most about ${inWords(most)} (${inWords(nCtx())} tokens)` : `at most ${inWords(most)} are sent`;
  for (const file of list) {
    const refuse = (why) => toast(`${file.name} was not attached: ${why}.`);
    if (files.length >= MAX_FILES) return refuse(`${MAX_FILES} files are the most that one message takes`);
    const room = most - files.reduce((sum, { text }) => sum + text.length, 0);
    if (file.size > 4 * most) return refuse(`it has ${inWords(file.size)} bytes, ${limit}`); // no letter has more than 4
    let bytes;
    try {
      bytes = new Uint8Array(await file.arrayBuffer());
    } catch {
      return refuse("it cannot be read");
    }
    const text = decoded(bytes);
    if (text === null) return refuse("it is not a text file");
    if (!text.trim()) return refuse("it is empty");
    if (text.length > room) return refuse(`with it there would be ${inWords(most - room + text.length)} characters, ${limit}`);
    files.push({ name: file.name.slice(0, 255), text });
    show();
  }
}

function show() {
  byId("files").replaceChildren(
    ...files.map((file) =>
      el(
        "li",
        { class: "file", title: sizeOf(file) },
        icon("file"),
        el("span", { class: "file-name", dir: "auto" }, file.name),
        iconButton("close", `Remove ${file.name}`, () => {
          files = files.filter((other) => other !== file);
          show();
          byId("input").focus();
        }),
      ),
    ),
  );
  byId("files").hidden = !files.length;
  changed();
}

export const hasFiles = () => files.length > 0;

/** The files that are attached, which then are no longer. */
export function takeFiles() {
  const taken = files;
  putFiles([]);
  return taken;
}

export function putFiles(list) {
  files = list;
  show();
}

/** Wires the button, dropping and pasting. context(): n_ctx of the model or null; listener(): called after a change. */
export function wireAttachments(context, listener) {
  nCtx = context;
  changed = listener;
  byId("attach").addEventListener("click", () => byId("attach-file").click());
  byId("attach-file").addEventListener("change", async (event) => {
    const picked = [...event.target.files];
    event.target.value = "";
    await attach(picked);
    byId("input").focus();
  });
  byId("input").addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    // Programs that copy text also put a picture of it there.
    if (!pasted.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    attach(pasted);
  });
  // Anywhere in the page: a file that is dropped beside would otherwise replace it.
  const isDrop = (event) => event.dataTransfer?.types.includes("Files") && !document.querySelector("dialog[open]");
  let leaving = null;
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    byId("drop").hidden = !isDrop(event);
    clearTimeout(leaving); // these events stop coming when the pointer leaves the window
    leaving = setTimeout(() => (byId("drop").hidden = true), 300);
  });
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    byId("drop").hidden = true;
    if (isDrop(event)) attach([...event.dataTransfer.files]);
    byId("input").focus();
  });
}
