// Tells screen readers what is going on: the answer sentence by sentence as it comes, not letter by letter.

import { byId, el } from "./dom.js";

const CLEAR_MS = 15000;
const SENTENCE = /[.!?:…。！？](?=\s)|\n/g;

let clearing = null;

/** A speaker for one answer. said: how many of its letters were said before. */
export function speaker(said = 0) {
  const box = byId("spoken");
  clearTimeout(clearing);
  box.replaceChildren();
  const say = (text) => {
    const plain = text.replace(/[*_`#>|]+/g, " ").replace(/\s+/g, " ").trim();
    if (plain) box.append(el("p", {}, plain));
  };
  return {
    status(text) {
      say(text);
      clearTimeout(clearing);
      // What was said stands in the messages too: it is not left for a second reading.
      clearing = setTimeout(() => box.replaceChildren(), CLEAR_MS);
    },
    /** Says the sentences of the answer so far that were not said yet; all of it when it is complete. */
    text(whole, complete = false) {
      let end = said;
      SENTENCE.lastIndex = said;
      for (let match = SENTENCE.exec(whole); match; match = SENTENCE.exec(whole)) end = match.index + 1;
      if (complete) end = whole.length;
      if (end > said) say(whole.slice(said, end));
      said = end;
      clearTimeout(clearing);
    },
  };
}
