// Colours of code: comments, strings, numbers and common keywords, as spans. Knows no grammar of any language.

import { el } from "./dom.js";

const MAX_LENGTH = 40000; // longer code is shown without colours

const WORDS =
  "abstract and as assert async await auto bool boolean break byte case catch char class const constexpr continue crate def default del delete do " +
  "double elif else enum except export extends extern false False final finally fn float for foreach from func function global go goto if impl " +
  "implements import in include instanceof int interface internal is lambda let long loop match mod module mut namespace new nil None nonlocal " +
  "not null nullptr operator or override package pass private protected pub public raise return self short signed static string struct super " +
  "switch template this throw throws trait true True try type typedef typename typeof undefined union unsafe unsigned use using val var virtual " +
  "void volatile when where while with yield then fi done esac echo elsif end begin";
const SQL =
  "select from where and or not insert into values update set delete create table drop alter join left right inner outer on group by order limit as " +
  "distinct having union all null primary key foreign references index view is in exists between like case when then else end";
const KEYWORDS = new Set(WORDS.split(" "));
const SQL_KEYWORDS = new Set(SQL.split(" "));

const STRING = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;
const REST = String.raw`|(?<number>\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*)|(?<word>[A-Za-z_$][\w$]*)`;
const rules = (comment, string = STRING) => new RegExp(`(?<comment>${comment})|(?<string>${string})${REST}`, "g");

const SLASHES = String.raw`\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)`;
const HASHES = String.raw`#[^\n]*`;
const C_LIKE = rules(SLASHES, `${STRING}|${"`(?:[^`\\\\]|\\\\.)*`?"}`);
const PYTHON = rules(HASHES, String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${STRING}`);
const SHELL = rules(String.raw`(?<![\w$\{])${HASHES}`);
const SQL_LIKE = rules(String.raw`--[^\n]*|\/\*[^]*?(?:\*\/|$)`);
const MARKUP = rules(String.raw`<!--[^]*?(?:-->|$)`);

const FAMILIES = [
  [C_LIKE, "c cc cpp c++ h hpp cuda cu cs csharp java js javascript jsx ts typescript tsx go golang rust rs swift kotlin kt scala php dart json json5 jsonc css scss zig"],
  [PYTHON, "python py python3"],
  [SHELL, "bash sh shell zsh console yaml yml toml ini ruby rb r perl make makefile dockerfile cmake julia"],
  [SQL_LIKE, "sql sqlite postgres postgresql mysql lua haskell"],
  [MARKUP, "html xml svg vue"],
];
const RULES = new Map(FAMILIES.flatMap(([rule, names]) => names.split(" ").map((name) => [name, rule])));

/** Fills an element with code, coloured if the language is one of those above. */
export function highlight(node, text, language) {
  const rule = RULES.get(language);
  if (!rule || text.length > MAX_LENGTH) {
    node.append(text);
    return;
  }
  let end = 0;
  for (const match of text.matchAll(rule)) {
    const { comment, string, number, word } = match.groups;
    let kind = null;
    if (comment) kind = "comment";
    else if (string) kind = "string";
    else if (number) kind = "number";
    else if (rule === SQL_LIKE ? SQL_KEYWORDS.has(word.toLowerCase()) : KEYWORDS.has(word)) kind = "keyword";
    if (!kind) continue;
    node.append(text.slice(end, match.index), el("span", { class: `t-${kind}` }, match[0]));
    end = match.index + match[0].length;
  }
  node.append(text.slice(end));
}
