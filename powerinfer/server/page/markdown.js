// Markdown of answers, as DOM nodes. Reads the part of CommonMark and GFM that models write; HTML stays text. Pictures
// become links, since nothing is loaded from other hosts. Time is linear in the text but for bounded look-aheads.

import { copyButton, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { mathNode } from "./tex.js";

const MAX_DEPTH = 10; // nested quotes, lists and emphasis; deeper ones stay text
const MAX_LABEL = 400;
const MAX_ADDRESS = 2000;
const MAX_FORMULA = 8000;
const MAX_FORMULA_LINES = 100;

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])([ \t]+|$)/;

const indentOf = (line) => line.length - line.trimStart().length;

/** Cuts lines into blocks: {kind, lines, ...}, in order. */
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) i += 1;
    else {
      const block =
        fence(lines, i) ?? formula(lines, i) ?? heading(lines, i) ?? rule(lines, i) ?? quote(lines, i) ?? list(lines, i) ?? table(lines, i) ?? paragraph(lines, i);
      blocks.push(block);
      i = block.next;
    }
  }
  return blocks;
}

function fence(lines, i) {
  const open = FENCE.exec(lines[i]);
  if (!open) return null;
  const indent = indentOf(lines[i]);
  const content = [];
  let next = i + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    const close = line.trim();
    if (close.length >= open[1].length && indentOf(line) < 4 && close === open[1][0].repeat(close.length)) {
      next += 1;
      break;
    }
    content.push(line.slice(Math.min(indent, indentOf(line))));
  }
  return { kind: "code", language: open[2].trim().split(/[\s{]/, 1)[0], lines: content, next };
}

const CLOSES = { $$: "$$", "\\[": "\\]" };

/** A formula that has lines of its own, from $$ or \[ at the beginning of one to its partner at the end of one. */
function formula(lines, i) {
  const open = lines[i].trimStart().slice(0, 2);
  if (!Object.hasOwn(CLOSES, open)) return null;
  const close = CLOSES[open];
  const content = [];
  for (let next = i; next < Math.min(lines.length, i + MAX_FORMULA_LINES); next += 1) {
    const line = next === i ? lines[i].trimStart().slice(2) : lines[next];
    const end = line.indexOf(close);
    if (end < 0) content.push(line);
    else if (line.slice(end + 2).trim()) return null;
    else return { kind: "formula", source: [...content, line.slice(0, end)].join("\n"), lines: lines.slice(i, next + 1), next: next + 1 };
  }
  return null;
}

function heading(lines, i) {
  const marks = HEADING.exec(lines[i]);
  if (!marks) return null;
  const text = lines[i].trim().slice(marks[1].length).trim().replace(/(^|[ \t])#+$/, "").trim();
  return { kind: "heading", level: marks[1].length, lines: [text], next: i + 1 };
}

function rule(lines, i) {
  return RULE.test(lines[i]) ? { kind: "rule", lines: [], next: i + 1 } : null;
}

function quote(lines, i) {
  let next = i;
  while (next < lines.length && QUOTE.test(lines[next])) next += 1;
  if (next === i) return null;
  return { kind: "quote", lines: lines.slice(i, next).map((line) => line.replace(QUOTE, "")), next };
}

/** One list; each item is an array of lines without the marker and its indentation. */
function list(lines, i) {
  const first = ITEM.exec(lines[i]);
  if (!first) return null;
  const base = first[1].length;
  const kindOf = (mark) => (/\d/.test(mark) ? mark.at(-1) : mark);
  const items = [];
  let next = i;
  let width = 0; // where the item's own text begins
  let blank = false;
  let loose = false;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    if (!line.trim()) {
      blank = true;
      continue;
    }
    const mark = ITEM.exec(line);
    const indent = indentOf(line);
    if (mark && indent < Math.max(width, base + 2) && indent >= base && kindOf(mark[2]) === kindOf(first[2]) && !RULE.test(line)) {
      loose ||= blank && items.length > 0;
      width = indent + mark[2].length + Math.min(Math.max(mark[3].length, 1), 4);
      items.push([line.slice(indent + mark[2].length).replace(/^[ \t]{1,4}/, "")]);
    } else if (items.length && indent >= Math.min(width, base + 2)) {
      if (blank) items.at(-1).push("");
      loose ||= blank;
      items.at(-1).push(line.slice(Math.min(width, indent)));
    } else if (items.length && !blank && !starts(lines, next)) {
      items.at(-1).push(line); // a line that goes on without indentation
    } else break;
    blank = false;
  }
  const ordered = /\d/.test(first[2]);
  return { kind: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items, loose, lines: lines.slice(i, next), next };
}

/** The cells of a table's row: cut at | that is not escaped. */
function cells(line) {
  let row = line.trim();
  if (row.startsWith("|")) row = row.slice(1);
  if (row.endsWith("|") && !row.endsWith("\\|")) row = row.slice(0, -1);
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, i) {
  if (!lines[i].includes("|") || !lines[i + 1]?.includes("-")) return null;
  const head = cells(lines[i]);
  const marks = cells(lines[i + 1]);
  if (marks.length !== head.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  let next = i + 2;
  while (next < lines.length && lines[next].includes("|")) next += 1;
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  return { kind: "table", head, align, rows: lines.slice(i + 2, next).map(cells), lines: lines.slice(i, next), next };
}

/** Whether a block other than a paragraph begins in this line. */
function starts(lines, i) {
  const item = ITEM.exec(lines[i]);
  return (
    FENCE.test(lines[i]) || formula(lines, i) !== null || HEADING.test(lines[i]) || RULE.test(lines[i]) || QUOTE.test(lines[i]) ||
    (item !== null && item[3] !== "" && !/[2-9]\d*[.)]|\d{2,}/.test(item[2]))
  );
}

function paragraph(lines, i) {
  let next = i + 1;
  while (next < lines.length && lines[next].trim() && !starts(lines, next) && !table(lines, next)) next += 1;
  return { kind: "paragraph", lines: lines.slice(i, next), next };
}

/** A block's element. */
function blockNode(block, depth) {
  switch (block.kind) {
    case "code":
      return codeNode(block);
    case "formula":
      return formulaNode(block.source, true, block.lines.join("\n"));
    case "heading":
      // The page's own headings are h1 and h2: an answer's begin below them.
      return inlineInto(el(`h${Math.min(block.level + 2, 6)}`, { dir: "auto" }), block.lines[0], depth);
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, ...nodesOf(block.lines, depth + 1));
    case "list":
      return el(
        block.ordered ? "ol" : "ul",
        { start: block.ordered && block.start !== 1 ? block.start : null },
        ...block.items.map((item) => itemNode(item, block.loose, depth + 1)),
      );
    case "table":
      return tableNode(block, depth);
    default:
      return inlineInto(el("p", { dir: "auto" }), block.lines.join("\n"), depth);
  }
}

function itemNode(lines, loose, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const node = el("li", { dir: "auto", class: task ? "task" : null });
  if (task) {
    node.append(el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": task[1] === " " ? "open" : "done" }));
    lines = [lines[0].slice(4), ...lines.slice(1)];
  }
  for (const child of nodesOf(lines, depth)) {
    // An item's paragraphs have their own element only where the list is loose.
    if (!loose && child.tagName === "P") node.append(...child.childNodes);
    else node.append(child);
  }
  return node;
}

function tableNode({ head, align, rows }, depth) {
  const row = (tag, texts) =>
    el("tr", {}, ...head.map((_, k) => inlineInto(el(tag, { class: align[k], dir: "auto", scope: tag === "th" ? "col" : null }), texts[k] ?? "", depth)));
  return el(
    "div",
    { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, ...rows.map((texts) => row("td", texts)))),
  );
}

function codeNode({ language, lines }) {
  const text = lines.join("\n");
  const code = el("code", {});
  highlight(code, text, language.toLowerCase());
  return el(
    "div",
    { class: "code" },
    el("div", { class: "code-head" }, el("span", {}, language || "text"), copyButton("Copy the code", () => text, true)),
    el("pre", { tabindex: "0", role: "group", "aria-label": language ? `Code, ${language}` : "Code", dir: "ltr" }, code),
  );
}

/** A formula, or its source where it cannot be read. */
function formulaNode(source, display, written) {
  const math = mathNode(source, display) ?? el("code", { class: "tex-source" }, written.trim());
  return display ? el("div", { class: "formula", tabindex: "0", role: "group", "aria-label": "Formula", dir: "ltr" }, math) : math;
}

function nodesOf(lines, depth) {
  if (depth > MAX_DEPTH) return [el("p", { dir: "auto" }, lines.join("\n"))];
  return blocksOf(lines).map((block) => blockNode(block, depth));
}

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const WORD = /[\p{L}\p{N}_]/u;
const isSpace = (char) => char === undefined || char === "" || /\s/.test(char);

/** Whether an address may become a link: schemes that cannot run anything here. */
export function safeAddress(address) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

function linkNode(address) {
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
}

/** The end of the code span that begins at i (the index after its closing run), or -1. */
function codeEnd(text, i, dead) {
  let size = 1;
  while (text[i + size] === "`") size += 1;
  if (dead.has(size)) return { size, end: -1 };
  for (let k = i + size; k < text.length; k += 1) {
    if (text[k] !== "`") continue;
    let run = 1;
    while (text[k + run] === "`") run += 1;
    if (run === size) return { size, end: k + run };
    k += run - 1;
  }
  dead.add(size);
  return { size, end: -1 };
}

/** The formula that begins at i: {source, display, end}, or null. A dollar is one only where it cannot be a price: no
 * space inside, no letter or digit outside. */
function formulaAt(text, i, dead) {
  const open = text.startsWith("$$", i) ? "$$" : text[i] === "$" ? "$" : text.slice(i, i + 2);
  const close = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" }[open];
  if (!close || dead.has(close)) return null;
  const from = i + open.length;
  if (open === "$" && (isSpace(text[from]) || /[\p{L}\p{N}\\$]/u.test(text[i - 1] ?? " "))) return null;
  const limit = Math.min(text.length, from + MAX_FORMULA);
  for (let k = from; k < limit; k += 1) {
    if (text.startsWith(close, k) && k > from) {
      const fits = open !== "$" || (!isSpace(text[k - 1]) && text[k + 1] !== "$" && !WORD.test(text[k + 1] ?? " "));
      return fits ? { source: text.slice(from, k), display: open === "$$" || open === "\\[", end: k + close.length } : null;
    }
    if (text[k] === "\\") k += 1;
  }
  dead.add(close); // none of them closes in what is left, or too far away
  return null;
}

/** Where the emphasis that begins after `from` ends (the index of its closing mark), or -1. */
function emphasisEnd(text, from, mark, dead) {
  for (let k = from; k < text.length; k += 1) {
    const found = text[k] === "$" || text[k] === "\\" ? formulaAt(text, k, dead) : null;
    if (found) k = found.end - 1;
    else if (text[k] === "\\") k += 1;
    else if (text[k] === "`") {
      const { size, end } = codeEnd(text, k, dead);
      k = (end < 0 ? k + size : end) - 1;
    } else if (text[k] === mark[0]) {
      let run = 1;
      while (text[k + run] === mark[0]) run += 1;
      const fits = run === mark.length || (run > mark.length && run !== 2);
      const closes = k > from && !isSpace(text[k - 1]) && (mark[0] !== "_" || !WORD.test(text[k + run] ?? " "));
      if (fits && closes) return k + run - mark.length;
      k += run - 1;
    }
  }
  return -1;
}

/** The parts of a [label](address) that begins at i, or null. */
function linkParts(text, i) {
  let depth = 0;
  let close = -1;
  for (let k = i; k < Math.min(text.length, i + MAX_LABEL); k += 1) {
    if (text[k] === "\\") k += 1;
    else if (text[k] === "[") depth += 1;
    else if (text[k] === "]" && --depth === 0) {
      close = k;
      break;
    }
  }
  if (close < 0 || text[close + 1] !== "(") return null;
  depth = 0;
  for (let k = close + 1; k < Math.min(text.length, close + MAX_ADDRESS); k += 1) {
    if (text[k] === "\n") return null;
    if (text[k] === "(") depth += 1;
    else if (text[k] === ")" && --depth === 0) {
      const inside = text.slice(close + 2, k).trim();
      const address = inside.startsWith("<") ? inside.slice(1).split(">", 1)[0] : inside.split(/\s/, 1)[0];
      return { label: text.slice(i + 1, close), address, end: k + 1 };
    }
  }
  return null;
}

const MARKS = ["***", "___", "**", "__", "~~", "*", "_"];
const TAGS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };

/** Appends a text's inline markup to a node and returns the node. */
function inlineInto(node, text, depth = 0) {
  const dead = new Set(); // marks and sizes of code runs that have no end in the rest of the text
  let plain = "";
  const flush = () => {
    if (plain) node.append(plain);
    plain = "";
  };
  const add = (child, end) => {
    flush();
    node.append(child);
    return end;
  };
  let i = 0;
  while (i < text.length) {
    const char = text[i];
    const found = char === "$" || char === "\\" ? formulaAt(text, i, dead) : null;
    if (found) i = add(formulaNode(found.source, found.display, text.slice(i, found.end)), found.end);
    else if (char === "\\" && i + 1 < text.length && PUNCTUATION.test(text[i + 1])) {
      plain += text[i + 1];
      i += 2;
    } else if (char === "\n") {
      plain = plain.trimEnd();
      i = add(el("br"), i + 1);
      while (text[i] === " ") i += 1;
    } else if (char === "`") {
      const { size, end } = codeEnd(text, i, dead);
      if (end < 0) {
        plain += text.slice(i, i + size);
        i += size;
      } else {
        const content = text.slice(i + size, end - size).replaceAll("\n", " ");
        const padded = content.length > 2 && content.startsWith(" ") && content.endsWith(" ") && content.trim();
        i = add(el("code", {}, padded ? content.slice(1, -1) : content), end);
      }
    } else if (char === "[" || (char === "!" && text[i + 1] === "[")) {
      const parts = depth <= MAX_DEPTH && !dead.has("]") ? linkParts(text, char === "!" ? i + 1 : i) : null;
      const address = parts && safeAddress(parts.address);
      if (address) {
        const link = linkNode(address);
        if (char === "!") link.append(parts.label || "picture");
        else inlineInto(link, parts.label, MAX_DEPTH + 1); // no links in links
        if (!link.textContent.trim()) link.append(address);
        i = add(link, parts.end);
      } else {
        if (!parts && text.indexOf("]", i) < 0) dead.add("]");
        plain += char;
        i += 1;
      }
    } else if (char === "&") {
      const entity = /^&(?:amp|lt|gt|quot|#39|nbsp);/.exec(text.slice(i, i + 6))?.[0];
      plain += entity ? ENTITIES[entity] : char;
      i += entity ? entity.length : 1;
    } else if ((char === "h" || char === "<") && depth <= MAX_DEPTH && !WORD.test(text[i - 1] ?? " ")) {
      const bare = /^<?(https?:\/\/[^\s<>"`]+)/.exec(text.slice(i, i + MAX_ADDRESS));
      const closed = char === "h" || (bare && text[i + bare[0].length] === ">");
      let found = bare && closed ? bare[1] : "";
      if (char === "h") {
        const count = (mark) => found.split(mark).length;
        while (/[.,;:!?'*_~\]]$/.test(found) || (found.endsWith(")") && count(")") > count("("))) found = found.slice(0, -1);
      }
      const address = found && safeAddress(found);
      if (address) {
        const link = linkNode(address);
        link.append(found);
        i = add(link, i + found.length + (char === "<" ? 2 : 0));
      } else {
        plain += char;
        i += 1;
      }
    } else if (char === "*" || char === "_" || char === "~") {
      const mark = MARKS.find((candidate) => text.startsWith(candidate, i));
      const opens =
        mark && depth <= MAX_DEPTH && !dead.has(mark) && !isSpace(text[i + mark.length]) &&
        (char !== "_" || !WORD.test(text[i - 1] ?? " "));
      const end = opens ? emphasisEnd(text, i + mark.length, mark, dead) : -1;
      if (end < 0) {
        if (opens) dead.add(mark);
        let run = 1;
        while (text[i + run] === char) run += 1;
        plain += text.slice(i, i + run);
        i += run;
      } else {
        const outer = el(mark.length === 3 ? "strong" : TAGS[mark]);
        const inner = mark.length === 3 ? el("em") : outer;
        if (inner !== outer) outer.append(inner);
        inlineInto(inner, text.slice(i + mark.length, end), depth + 1);
        i = add(outer, end + mark.length);
      }
    } else {
      plain += char;
      i += 1;
    }
  }
  flush();
  return node;
}

/** Shows a text in a container. Blocks that have not changed since the last call keep their nodes: what a reader has
 * selected or focused in them stays while more arrives. */
export function renderMarkdown(container, text) {
  const lines = text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n");
  const blocks = blocksOf(lines);
  const shown = container.shownBlocks ?? [];
  const keys = blocks.map((block) => JSON.stringify([block.kind, block.lines, block.level ?? block.language ?? block.loose ?? 0]));
  const same = keys.findIndex((key, k) => key !== shown[k]);
  const keep = same < 0 ? keys.length : same;
  while (container.childNodes.length > keep) container.lastChild.remove();
  container.append(...blocks.slice(keep).map((block) => blockNode(block, 0)));
  container.shownBlocks = keys;
}
