// Building the page's elements. Text always becomes text nodes: nothing in this page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** The element with this id; an id that is missing is a mistake in index.html. */
export const byId = (id) => document.getElementById(id);

/** A new element. Properties: `on` holds listeners, `class` and the rest are attributes; false and null leave one out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows an icon alone; its label is spoken and shown as a tooltip. */
export function iconButton(name, label, click, attributes = {}) {
  return el(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click }, ...attributes },
    icon(name),
  );
}

/** A short message at the bottom, with an action such as Undo if one is given. */
export function toast(text, action = null) {
  const box = el("div", { class: "toast" }, el("span", {}, text));
  const remove = () => box.remove();
  if (action) {
    box.append(
      el("button", { type: "button", class: "toast-action", on: { click: () => (remove(), action.run()) } }, action.label),
    );
  }
  byId("toasts").replaceChildren(box);
  const leave = () => (box.matches(":hover, :focus-within") ? setTimeout(leave, 2000) : remove());
  setTimeout(leave, action ? 10000 : 5000);
}

/** Asks before something that cannot be undone. */
export function confirmed(title, text, yes) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  byId("confirm-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }),
  );
}

/** Puts text on the clipboard, also where the page came over plain http and the modern way is closed. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { class: "sr-only", readonly: true, "aria-hidden": "true" });
    const focused = document.activeElement;
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused?.focus?.({ preventScroll: true });
    return done;
  }
}

/** A copy button that says for a moment that it has copied. */
export function copyButton(label, text, withWords = false) {
  const words = el("span", {}, "Copy");
  const button = el(
    "button",
    { type: "button", class: withWords ? "code-copy" : "icon-button", "aria-label": label, title: label },
    icon("copy"),
    withWords ? words : null,
  );
  button.addEventListener("click", async () => {
    const done = await copyText(text());
    button.replaceChildren(icon(done ? "check" : "close"), ...(withWords ? [words] : []));
    words.textContent = done ? "Copied" : "Not copied";
    toast(done ? "Copied" : "This browser does not let the page copy");
    setTimeout(() => {
      button.replaceChildren(icon("copy"), ...(withWords ? [words] : []));
      words.textContent = "Copy";
    }, 1600);
  });
  return button;
}

/** Hands a file to the browser's downloads. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
