// Answers that are being written: asked for, continued, stopped; and what is done when a conversation is longer than the
// model's context. One tab at a time answers in a conversation.

import { ApiError, streamChat } from "./api.js";
import { add, contentOf, merge, messages, path, seen, touch, touched } from "./conversation.js";
import { toast } from "./dom.js";
import { sampling, systemPrompt } from "./settings.js";
import { speaker } from "./speaker.js";
import { getConversation, onOtherTabs, putConversation, stopElsewhere, takeTurn, turnIsFree } from "./store.js";

const DRAW_MS = 50;
const SAVE_MS = 500;
const CHARS_PER_TOKEN = 3; // until an answer has told how many tokens its prompt had
const N_CTX = 2048; // where the server does not say
const KEPT = 0.5; // share of the context that the newest turns may fill when older ones are left out
const TRIES = 6;

const runs = new Map(); // conversation id -> {node, status, abort}: answers that this tab writes, each in its own conversation
const elsewhere = new Map(); // conversation id -> the turn that another tab writes

/** What the page does about it: changed(conversation), drawTurn(conversation, node), isShown(conversation), began(),
 * ended(error or null), model() -> {name, nCtx}, and deleted(conversation). */
let page = null;

export const isAnswering = (id) => runs.has(id) || elsewhere.has(id);
export const isWriting = (node) => [...runs.values()].some((run) => run.node === node) || [...elsewhere.values()].includes(node);
export const statusOf = (node) => [...runs.values()].find((run) => run.node === node)?.status ?? "";

export function stop(id) {
  if (runs.has(id)) runs.get(id).abort.abort();
  else if (elsewhere.has(id)) stopElsewhere(id);
}

/** Saves what has come of all answers. */
export function saveAll(conversations) {
  for (const id of runs.keys()) save(conversations.get(id)).catch(() => {});
}

function save(conversation) {
  const run = runs.get(conversation.id);
  if (run?.node) touched(run.node);
  return putConversation(conversation, true);
}

/** Takes the right to answer in a conversation and has prepare() add the turn that is to be written; then work(node, run)
 * writes it. Returns false, with nothing changed, if somebody answers there already. */
async function running(conversation, prepare, work) {
  const { id } = conversation;
  if (runs.has(id)) {
    toast("Stop the running answer first.");
    return false;
  }
  const run = { node: null, status: "", abort: new AbortController() };
  runs.set(id, run);
  let give = null;
  try {
    give = await takeTurn(id);
    if (!give) {
      toast("Another tab is answering in this conversation: wait for it, or stop it.");
      return false;
    }
    const stored = await getConversation(id);
    if (stored) merge(conversation, stored); // what another tab has written the moment before
    elsewhere.delete(id);
    run.node = prepare();
    touched(run.node);
    finish(conversation, run, work, give);
    return true;
  } finally {
    if (!run.node) {
      give?.();
      runs.delete(id);
      page.changed(null);
    }
  }
}

async function finish(conversation, run, work, give) {
  const { node } = run;
  const speak = speaker(node.text.length);
  speak.status("Answering");
  page.began(conversation);
  let failed = null;
  try {
    await work(node, run, speak);
  } catch (error) {
    failed = error;
    if (error.name === "AbortError") node.finish = "stopped";
    else {
      const { message, kind, retryAfter } = error instanceof ApiError ? error : new ApiError(String(error), "broken");
      node.error = { message, kind, retryAfter, at: Date.now() };
    }
  }
  runs.delete(conversation.id);
  touch(conversation);
  touched(node);
  if (page.isShown(conversation)) {
    speak.text(node.text, true);
    speak.status(node.error ? node.error.message : node.finish === "stopped" ? "Stopped" : "The answer is complete");
  }
  try {
    await page.changed(conversation);
  } finally {
    give(); // after the end was saved: another tab reads it then
  }
  page.ended(failed);
}

/** Streams into a turn what the model says to a request. */
async function write(conversation, node, run, speak, body) {
  let drawn = 0;
  let timer = null;
  let saving = null;
  let first = 0;
  let usage = null;
  const show = () => {
    timer = null;
    drawn = performance.now();
    if (page.isShown(conversation)) {
      speak.text(node.text);
      page.drawTurn(conversation, node);
    }
  };
  const put = () => {
    saving = null;
    save(conversation).catch(() => {}); // the end of the answer is saved again, and says if it cannot be
  };
  const chars = body.messages.reduce((sum, message) => sum + message.content.length, 0);
  try {
    for await (const part of streamChat(body, run.abort.signal)) {
      if (part.text || part.thought) first ||= performance.now();
      if (part.text) node.text += part.text;
      if (part.thought) node.thought = (node.thought ?? "") + part.thought;
      if (part.finish) node.finish = part.finish;
      if (part.usage) usage = part.usage;
      timer ??= setTimeout(show, Math.max(0, DRAW_MS - (performance.now() - drawn)));
      saving ??= setTimeout(put, SAVE_MS);
    }
  } finally {
    clearTimeout(timer);
    clearTimeout(saving);
    node.model = body.model;
    if (usage?.completion_tokens) {
      const { nCtx } = page.model();
      const before = node.stats ?? { tokens: 0, seconds: 0 };
      node.stats = {
        tokens: before.tokens + usage.completion_tokens,
        seconds: before.seconds + (first ? (performance.now() - first) / 1000 : 0),
        prompt: usage.prompt_tokens,
        chars,
      };
      if (node.finish === "length" && nCtx && usage.prompt_tokens + usage.completion_tokens >= nCtx - 1) node.finish = "full";
    }
  }
}

/** The request for what follows a turn; going on: for more of it. */
function requestFor(conversation, last, goingOn = false) {
  const list = messages(conversation, last.id, systemPrompt(conversation));
  if (goingOn && last.thought) list.at(-1).reasoning_content = last.thought;
  const more = goingOn ? { continue_final_message: true, add_generation_prompt: false } : {};
  return { model: page.model().name, messages: list, ...sampling(), ...more };
}

/** Asks the model for the answer to a turn and writes it below as it comes. question(): adds or finds that turn. */
export function answer(conversation, question) {
  let asked = null;
  return running(
    conversation,
    () => add(conversation, (asked = question()).id, "assistant", ""),
    (node, run, speak) => write(conversation, node, run, speak, requestFor(conversation, asked)),
  );
}

function again(node) {
  delete node.error;
  delete node.finish;
  return node;
}

/** Writes an answer anew that has failed before anything came. */
export function answerAgain(conversation, node) {
  return running(
    conversation,
    () => again(conversation.nodes[node.id]),
    (_, run, speak) => write(conversation, node, run, speak, requestFor(conversation, conversation.nodes[node.parent])),
  );
}

/** Goes on with an answer that was cut. */
export function goOn(conversation, node) {
  return running(
    conversation,
    () => again(conversation.nodes[node.id]),
    (_, run, speak) => write(conversation, node, run, speak, requestFor(conversation, node, true)),
  );
}

/** Lets the model read no more of a conversation than it can, and writes the answer then (or goes on with it).
 * summary: what is left out is summarised by the model before. */
export function shorten(conversation, node, summary) {
  return running(
    conversation,
    () => again(conversation.nodes[node.id]),
    async (_, run, speak) => {
      const goingOn = Boolean(node.text);
      const question = conversation.nodes[node.parent];
      const say = (text) => {
        run.status = text;
        speak.status(text);
        page.drawTurn(conversation, node);
      };
      for (let k = 0, share = KEPT; ; k += 1, share *= 0.7) {
        const left = leaveOut(conversation, question, node, share);
        if (!left && k) break;
        if (left) {
          const text = summary ? await summarised(left.turns, left.summary, conversation, run, say) : left.summary;
          question.context = { from: left.from, ...(text ? { summary: text } : {}) };
          touched(question);
        }
        run.status = "";
        try {
          return await write(conversation, node, run, speak, requestFor(conversation, goingOn ? node : question, goingOn));
        } catch (error) {
          if (error.kind !== "long" || k === TRIES) throw error;
        }
      }
      throw new ApiError("The last message alone is longer than the model can read.", "refused");
    },
  );
}

/** Characters of one token in this conversation, by the last answer that counted them. */
function charsPerToken(conversation, question) {
  const stats = path(conversation, question.id).findLast((turn) => turn.stats?.prompt && turn.stats.chars)?.stats;
  return stats ? Math.min(Math.max(stats.chars / stats.prompt, 0.5), 10) : CHARS_PER_TOKEN;
}

/** What the model shall read before a question: the newest turns, from a question on, up to a share of its context.
 * Returns {from, turns, summary}: where that begins, and what is left out now; null if only the question is left. */
function leaveOut(conversation, question, answered, share) {
  const { turns, summary } = seen(conversation, question.id);
  const room = (page.model().nCtx ?? N_CTX) * share * charsPerToken(conversation, question);
  let sum = answered.text.length;
  let first = turns.length - 1;
  for (let k = turns.length - 1; k > 0; k -= 1) {
    sum += contentOf(turns[k]).length;
    if (sum > room) break;
    if (turns[k].role === "user") first = k;
  }
  if (first < 1) return null;
  return { from: turns[first].id, turns: turns.slice(0, first), summary };
}

/** The model's own summary of turns, made piece by piece where they are longer than its context. */
async function summarised(turns, before, conversation, run, say) {
  const { name, nCtx } = page.model();
  const context = nCtx ?? N_CTX;
  const text = turns.map((turn) => `${turn.role === "user" ? "User" : "Assistant"}: ${contentOf(turn)}`).join("\n\n");
  let size = Math.floor(context * 0.5 * charsPerToken(conversation, turns.at(-1)));
  let summary = before;
  for (let at = 0, tries = 0; at < text.length; ) {
    say(`Summarising the earlier part: ${Math.floor((100 * at) / text.length)} %`);
    const earlier = summary ? `This is a summary of the beginning of a conversation:\n\n${summary}\n\nThis is what followed:` : "This is a part of a conversation:";
    const content =
      `${earlier}\n\n---\n${text.slice(at, at + size)}\n---\n\nSummarise all of it in at most ${Math.min(250, Math.floor(context / 12))} words, in the language of the conversation. ` +
      "Keep names, figures, decisions and open questions. Write the summary and nothing else.";
    const { stop: _, min_tokens: __, ...chosen } = sampling();
    let said = "";
    try {
      const body = { model: name, messages: [{ role: "user", content }], ...chosen, max_tokens: Math.max(64, Math.floor(context / 4)) };
      for await (const part of streamChat(body, run.abort.signal)) said += part.text ?? "";
    } catch (error) {
      if (error.kind !== "long" || ++tries > TRIES) throw error;
      size = Math.floor(size / 2);
      continue;
    }
    said = said.replace(/^\s*<think>[^]*?(?:<\/think>|$)/, "").trim();
    if (!said) throw new ApiError("The model gave no summary.", "refused");
    summary = said;
    at += size;
  }
  return summary;
}

/** Lets the model read all turns again. */
export function readAll(conversation, question) {
  delete question.context;
  touched(question);
  page.changed(conversation);
}

/** An answer that has no end and that this tab does not write. */
const unfinished = (conversation) =>
  path(conversation).findLast((node) => node.role === "assistant" && !node.finish && !node.error && !runs.has(conversation.id));

/** Looks after an answer that another tab may be writing. When that tab is through, or gone, it counts as stopped. */
export async function watch(conversation) {
  const node = unfinished(conversation);
  if (!node) {
    elsewhere.delete(conversation.id);
    return;
  }
  if (elsewhere.get(conversation.id) === node) return;
  elsewhere.set(conversation.id, node);
  await turnIsFree(conversation.id);
  if (elsewhere.get(conversation.id) !== node) return;
  elsewhere.delete(conversation.id);
  const stored = await getConversation(conversation.id);
  if (stored) merge(conversation, stored);
  if (unfinished(conversation) === node) node.finish = "stopped"; // in this tab alone, until something is saved
  page.changed(null);
}

/** hooks: see above. find(id): the conversation; took(id, conversation or null): another tab has written or deleted it. */
export function wireAnswers(hooks, find, took) {
  page = hooks;
  onOtherTabs(async ({ id, deleted, stop: stops }) => {
    if (stops) {
      runs.get(id)?.abort.abort();
      return;
    }
    if (deleted) {
      runs.get(id)?.abort.abort();
      elsewhere.delete(id);
      took(id, null);
      return;
    }
    const stored = await getConversation(id);
    if (!stored) return;
    const own = find(id);
    if (own) merge(own, stored, runs.has(id));
    watch(own ?? stored);
    took(id, own ?? stored);
  });
}
