// Formulas: the part of TeX that models write, as MathML nodes. Text becomes text nodes, attributes come from the tables
// here alone. A command that is not known is shown as it is written; a formula that cannot be read is none (null).

import {
  ACCENTS, ALPHABETS, ARROWS, DELIMITERS, ENVIRONMENTS, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMIT_FUNCTIONS, OPERATORS, SIZES, SPACES, inAlphabet,
} from "./tex_names.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_LENGTH = 8000;
const MAX_DEPTH = 50;

class TexError extends Error {}

function m(tag, attributes = {}, ...children) {
  const node = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

const row = (nodes) => (nodes.length === 1 ? nodes[0] : m("mrow", {}, ...nodes));
const space = (width) => m("mspace", { width: `${width}em` });
const fence = (char, form) => m("mo", { fence: "true", form, stretchy: "true" }, char);
const text = (value, attributes) => m("mtext", attributes, value.replace(/^ | $/g, "\u00a0"));

// What a minus may follow as a sign and not as an operator: nothing, or another operator that is no closing one.
const isSigned = (before) => !before || (before.localName === "mo" && !/^[)\]}⟩⌋⌉|!′]$/.test(before.textContent)) || before.localName === "mspace";

class Reader {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.depth = 0;
    this.alphabet = undefined; // of \mathbf and the like, around what is read
  }

  skip() {
    while (/\s/.test(this.source[this.at] ?? "")) this.at += 1;
  }

  /** The next token, which is left: a character, or a command with its backslash; "" at the end. */
  peek() {
    this.skip();
    const { source, at } = this;
    if (source[at] !== "\\") return at < source.length ? String.fromCodePoint(source.codePointAt(at)) : "";
    let end = at + 1;
    while (/[A-Za-z]/.test(source[end] ?? "")) end += 1;
    return source.slice(at, Math.max(end, at + 2));
  }

  next() {
    const token = this.peek();
    this.at += token.length;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new TexError();
  }

  /** What stands between braces, as it is written. */
  raw() {
    this.expect("{");
    const from = this.at;
    for (let depth = 1; this.at < this.source.length; this.at += 1) {
      const char = this.source[this.at];
      if (char === "\\") this.at += 1;
      else if (char === "{") depth += 1;
      else if (char === "}" && --depth === 0) return this.source.slice(from, this.at++);
    }
    throw new TexError();
  }

  words() {
    return this.raw().replace(/\\[,;: ]|~/g, " ").replace(/\\([{}%$&#_])/g, "$1").replace(/\s+/g, " ");
  }

  /** One argument: a group, a command with its own arguments, or a single character. */
  argument() {
    const token = this.peek();
    if (!token || /^(?:[}&^_]|\\right|\\end|\\\\)$/.test(token)) throw new TexError();
    if (/[0-9]/.test(token)) {
      this.next();
      return m("mn", {}, inAlphabet(token, this.alphabet));
    }
    if ((this.depth += 1) > MAX_DEPTH) throw new TexError();
    const nodes = this.atom(null);
    this.depth -= 1;
    return row(nodes);
  }

  /** An argument in brackets, or null. */
  optional() {
    if (this.peek() !== "[") return null;
    this.next();
    const nodes = this.row((token) => token === "]");
    this.expect("]");
    return row(nodes);
  }

  /** Atoms with their scripts up to a token at which `ends` says so (which is left) or the end. */
  row(ends) {
    if ((this.depth += 1) > MAX_DEPTH) throw new TexError();
    const nodes = [];
    for (;;) {
      const token = this.peek();
      if (!token || ends(token)) break;
      if (["}", "&", "\\\\", "\\right", "\\end", "\\middle"].includes(token)) throw new TexError();
      const style = { "\\displaystyle": "true", "\\textstyle": "false", "\\scriptstyle": "false" }[token];
      if (style) {
        this.next();
        nodes.push(m("mstyle", { displaystyle: style, scriptlevel: token === "\\scriptstyle" ? 1 : 0 }, ...this.row(ends)));
      } else nodes.push(...this.scripted(nodes.at(-1)));
    }
    this.depth -= 1;
    return nodes;
  }

  /** An atom and what stands above and below it. before: the node that it follows. */
  scripted(before) {
    const token = this.peek();
    const bare = token === "^" || token === "_" || token === "'";
    const nodes = bare ? [m("mrow")] : this.atom(before);
    const name = token.slice(1);
    let limits = token[0] === "\\" && (nodes[0]?.getAttribute("movablelimits") === "true" || /^(?:under|over)brace$/.test(name));
    const scripts = {};
    const put = (side, node) => {
      if (scripts[side]) throw new TexError();
      scripts[side] = node;
    };
    for (;;) {
      const mark = this.peek();
      if (mark === "'") {
        let primes = "";
        while (this.peek() === "'") primes += (this.next(), "′");
        const node = m("mo", { lspace: 0, rspace: 0 }, primes);
        if (this.peek() === "^") put("above", (this.next(), m("mrow", {}, node, this.argument())));
        else put("above", node);
      } else if (mark === "^" || mark === "_") {
        this.next();
        put(mark === "^" ? "above" : "below", this.argument());
      } else if (mark === "\\limits" || mark === "\\nolimits") {
        this.next();
        limits = mark === "\\limits";
      } else break;
    }
    const base = nodes.pop() ?? m("mrow");
    const { above, below } = scripts;
    const kind = limits ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    const node =
      above && below ? m(kind[0], {}, base, below, above) : below ? m(kind[1], {}, base, below) : above ? m(kind[2], {}, base, above) : base;
    nodes.push(node);
    if (token[0] === "\\" && (FUNCTIONS.has(name) || LIMIT_FUNCTIONS.has(name) || name.startsWith("operatorname"))) {
      if (before && before.localName !== "mo" && before.localName !== "mspace") nodes.unshift(space(0.1667));
      if (!/^(?:[()[\]{}^_,.;|&=+-]|\\left|\\right|\\\\|\\end|\\[,;:!]|)$/.test(this.peek())) nodes.push(space(0.1667));
    }
    return nodes;
  }

  /** One atom, as nodes. */
  atom(before) {
    const token = this.next();
    if (token === "{") {
      const nodes = this.row((end) => end === "}");
      this.expect("}");
      return [m("mrow", {}, ...nodes)];
    }
    if (token[0] === "\\") return this.command(token.slice(1), before);
    if (/[0-9]/.test(token)) {
      const more = /^[0-9]*(?:\.[0-9]+)?/.exec(this.source.slice(this.at, this.at + 200))[0];
      this.at += more.length;
      return [m("mn", {}, Array.from(token + more, (char) => inAlphabet(char, this.alphabet)).join(""))];
    }
    if (/\p{L}/u.test(token)) return [this.letter(token)];
    if (token === "~") return [space(0.25)];
    if (token === "-" || token === "+") return [m("mo", isSigned(before) ? { form: "prefix" } : {}, token === "-" ? "−" : "+")];
    if (/[()[\]]/.test(token)) return [m("mo", { stretchy: "false" }, token)];
    if (token === "|") return [m("mo", { stretchy: "false", lspace: 0, rspace: 0 }, "|")];
    if (token === "/") return [m("mo", { lspace: 0, rspace: 0 }, "/")];
    if (token === ":") return [m("mo", { lspace: "0.2222em", rspace: "0.2778em" }, ":")];
    return [m("mo", {}, { "*": "∗" }[token] ?? token)];
  }

  letter(char) {
    const upright = (this.alphabet && !this.alphabet.length) || /[Α-Ω∇]/.test(char);
    return m("mi", { mathvariant: upright ? "normal" : undefined }, inAlphabet(char, this.alphabet));
  }

  command(name, before) {
    if (LETTERS.has(name)) return [this.letter(LETTERS.get(name))];
    if (OPERATORS.has(name)) {
      const char = OPERATORS.get(name);
      return [m("mo", /[±∓]/.test(char) && isSigned(before) ? { form: "prefix" } : { stretchy: "false" }, char)];
    }
    if (LARGE.has(name)) return [m("mo", { largeop: "true", movablelimits: "true" }, LARGE.get(name))];
    if (INTEGRALS.has(name)) return [m("mo", { largeop: "true" }, INTEGRALS.get(name))];
    if (FUNCTIONS.has(name)) return [m("mi", {}, name)];
    if (LIMIT_FUNCTIONS.has(name)) return [m("mo", { movablelimits: "true", form: "prefix", lspace: 0, rspace: 0 }, LIMIT_FUNCTIONS.get(name))];
    if (SPACES.has(name)) return [space(SPACES.get(name))];
    if (ACCENTS.has(name)) return [this.accent(...ACCENTS.get(name))];
    if (ALPHABETS.has(name)) return this.within(ALPHABETS.get(name));
    if (SIZES.has(name)) {
      const size = `${SIZES.get(name)}em`;
      return [m("mo", { stretchy: "true", symmetric: "true", minsize: size, maxsize: size, lspace: 0, rspace: 0 }, this.delimiter())];
    }
    if (ARROWS.has(name)) {
      const below = this.optional();
      const arrow = m("mo", { stretchy: "true" }, ARROWS.get(name));
      const above = m("mrow", {}, space(0.4), this.argument(), space(0.4));
      return [below ? m("munderover", {}, arrow, below, above) : m("mover", {}, arrow, above)];
    }
    if (/^[{}%$&#_|]$/.test(name)) return [m("mo", { stretchy: "false", lspace: 0, rspace: 0 }, name === "|" ? "‖" : name)];
    if (DELIMITERS.has(`\\${name}`)) return [m("mo", { stretchy: "false", lspace: 0, rspace: 0 }, DELIMITERS.get(`\\${name}`))];
    return Object.hasOwn(COMMANDS, name) ? COMMANDS[name].call(this, name) : [text(`\\${name}`, { class: "tex-unknown" })];
  }

  accent(char, wide = false, side = "over") {
    const mark = m("mo", { stretchy: String(wide) }, char);
    return side === "under" ? m("munder", { accentunder: "true" }, this.argument(), mark) : m("mover", { accent: "true" }, this.argument(), mark);
  }

  /** An argument whose letters are of another alphabet. */
  within(alphabet) {
    const outer = this.alphabet;
    this.alphabet = alphabet;
    const node = this.argument();
    this.alphabet = outer;
    return [node];
  }

  delimiter() {
    const token = this.next();
    if (!DELIMITERS.has(token)) throw new TexError();
    return DELIMITERS.get(token);
  }

  /** \left ... \middle ... \right */
  fenced() {
    const nodes = [fence(this.delimiter(), "prefix")];
    for (;;) {
      nodes.push(...this.row((token) => token === "\\right" || token === "\\middle"));
      const token = this.next();
      if (!token) throw new TexError();
      const char = this.delimiter();
      nodes.push(fence(char, token === "\\right" ? "postfix" : "infix"));
      if (token === "\\right") return m("mrow", {}, ...nodes);
    }
  }

  /** Cells up to \end or a closing brace, as a table. */
  table({ columns = ["center"], display = false }, ends) {
    const style = { displaystyle: display ? "true" : undefined };
    const rows = [[]];
    for (;;) {
      while (this.peek() === "\\hline") this.next();
      const stops = (token) => token === "&" || token === "\\\\" || token === ends;
      const cell = this.row(stops);
      const k = rows.at(-1).length;
      const align = columns[k < columns.length ? k : columns.length - 1 - ((k - columns.length + 1) % Math.min(2, columns.length))];
      rows.at(-1).push(m("mtd", { class: `tex-${align}`, ...style }, ...cell));
      const token = this.peek();
      if (token === ends) break;
      if (!token) throw new TexError();
      this.next();
      if (token === "\\\\") {
        if (this.source[this.at] === "[") this.optional();
        rows.push([]);
      }
    }
    // A last row that is empty comes from a line break at the end.
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].childNodes.length) rows.pop();
    return m("mtable", style, ...rows.map((cells) => m("mtr", {}, ...cells)));
  }

  environment() {
    const name = this.raw();
    const kind = ENVIRONMENTS.get(name);
    if (!kind) throw new TexError();
    const marks = { l: "start", c: "center", r: "end" };
    const columns = kind.argument ? [...this.raw()].map((mark) => marks[mark]).filter(Boolean) : kind.columns;
    const table = this.table({ ...kind, columns: columns?.length ? columns : undefined }, "\\end");
    this.expect("\\end");
    if (this.raw() !== name) throw new TexError();
    if (kind.left === undefined) return table;
    return m("mrow", {}, fence(kind.left, "prefix"), table, fence(kind.right, "postfix"));
  }

  fraction(display) {
    const node = m("mfrac", {}, this.argument(), this.argument());
    return display === undefined ? node : m("mstyle", { displaystyle: String(display), scriptlevel: 0 }, node);
  }
}

const nothing = () => [];
const words = (className) =>
  function () {
    return [text(this.words(), className ? { class: className } : {})];
  };

/** What is not in the tables; called with the reader as `this`. */
const COMMANDS = {
  frac() { return [this.fraction()]; },
  dfrac() { return [this.fraction(true)]; },
  cfrac() { return [this.fraction(true)]; },
  tfrac() { return [this.fraction(false)]; },
  binom() {
    const node = m("mfrac", { linethickness: 0 }, this.argument(), this.argument());
    return [m("mrow", {}, fence("(", "prefix"), node, fence(")", "postfix"))];
  },
  sqrt() {
    const root = this.optional();
    const node = this.argument();
    return [root ? m("mroot", {}, node, root) : m("msqrt", {}, node)];
  },
  left() { return [this.fenced()]; },
  begin() { return [this.environment()]; },
  substack() {
    this.expect("{");
    const table = this.table({}, "}");
    this.expect("}");
    return [table];
  },
  text: words(), textrm: words(), textnormal: words(), mbox: words(), hbox: words(), textsf: words(),
  textbf: words("tex-bold"), textit: words("tex-italic"), emph: words("tex-italic"), texttt: words("tex-mono"),
  operatorname() {
    const limits = this.source[this.at] === "*";
    if (limits) this.next();
    return [m("mo", { form: "prefix", movablelimits: String(limits), lspace: 0, rspace: 0 }, this.words())];
  },
  overset() { return this.stacked("mover"); },
  stackrel() { return this.stacked("mover"); },
  underset() { return this.stacked("munder"); },
  not() {
    const [node, ...more] = this.atom(null);
    if (node?.localName !== "mo" && node?.localName !== "mi") throw new TexError();
    node.textContent = `${node.textContent}\u0338`.normalize("NFC");
    return [node, ...more];
  },
  bmod() { return [m("mo", { lspace: "0.2222em", rspace: "0.2222em" }, "mod")]; },
  mod() { return [space(0.5), m("mi", {}, "mod"), space(0.25), this.argument()]; },
  pmod() { return [space(0.5), m("mo", { stretchy: "false" }, "("), m("mi", {}, "mod"), space(0.25), this.argument(), m("mo", { stretchy: "false" }, ")")]; },
  phantom() { return [m("mphantom", {}, this.argument())]; },
  boxed() { return [m("mrow", { class: "tex-boxed" }, this.argument())]; },
  textcolor() { return this.raw(), [this.argument()]; },
  mathop() { return [this.argument()]; },
  mathrel() { return [this.argument()]; },
  mathbin() { return [this.argument()]; },
  tag() { return [space(2), text(`(${this.words()})`)]; },
  label() { return this.raw(), []; },
  nonumber: nothing, notag: nothing, limits: nothing, nolimits: nothing,
};

Reader.prototype.stacked = function (tag) {
  const script = this.argument();
  return [m(tag, {}, this.argument(), script)];
};

/** A formula as a <math> element, or null if it cannot be read. display: it stands in a line of its own. */
export function mathNode(source, display) {
  if (source.length > MAX_LENGTH) return null;
  const reader = new Reader(source.trim());
  try {
    let nodes = [];
    try {
      nodes = reader.row(() => false);
    } catch (error) {
      if (!(error instanceof TexError)) throw error;
      // Lines without an environment around them.
      Object.assign(reader, { at: 0, depth: 0, alphabet: undefined, source: `${reader.source}\\end` });
      nodes = [reader.table({ columns: ["right", "left"], display }, "\\end")];
      if (reader.at !== reader.source.length - 4) throw error;
    }
    return nodes.length ? m("math", { display: display ? "block" : "inline", alttext: source.trim() }, ...nodes) : null;
  } catch (error) {
    if (error instanceof TexError) return null;
    throw error;
  }
}
