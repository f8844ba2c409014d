// The server's API: the OpenAI shapes under /v1, and /v1/engine. Errors are ApiError with a sentence for the reader.

import { apiKey } from "./settings.js";

export class ApiError extends Error {
  /** kind: "busy" (429, 503), "key" (401, 403), "offline" (no answer), "broken" (a stream that ended too early),
   * "long" (more than the model's context holds) or "refused". */
  constructor(message, kind, retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter;
  }
}

const KINDS = { 401: "key", 403: "key", 429: "busy", 503: "busy" };

function headers(more = {}) {
  const key = apiKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function errorOf(response) {
  let message = "";
  let kind = KINDS[response.status] ?? "refused";
  try {
    const body = await response.json();
    if (body?.error?.code === "context_length_exceeded") kind = "long";
    message = body?.error?.message ?? body?.detail ?? "";
  } catch {
    // Not JSON: the status alone has to do.
  }
  if (typeof message !== "string" || !message) message = `The server answered ${response.status} ${response.statusText}`.trim();
  const seconds = Number.parseFloat(response.headers.get("Retry-After") ?? "");
  return new ApiError(message, kind, Number.isFinite(seconds) ? Math.min(Math.max(seconds, 0), 600) : null);
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", "offline");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** The models that the server offers: a Map of name -> n_ctx, or null where it does not say. */
export async function models() {
  const body = await (await request("/v1/models", { headers: headers() })).json();
  const n = (model) => (Number.isSafeInteger(model.meta?.n_ctx) && model.meta.n_ctx > 0 ? model.meta.n_ctx : null);
  return new Map((Array.isArray(body?.data) ? body.data : []).map((model) => [String(model.id), n(model)]));
}

/** What the engine is doing now; see engine.js. */
export async function engineState(signal) {
  return (await request("/v1/engine", { headers: headers(), signal })).json();
}

/** The data of each server-sent event of a response, as text. Lines may end in \n or \r\n and arrive in any pieces. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Streams an answer. body: a chat completion request without `stream`. Yields {text}, {thought}, {finish}, {usage}. */
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json", Accept: "text/event-stream" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let finished = false;
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      let chunk;
      try {
        chunk = JSON.parse(data);
      } catch {
        throw new ApiError("The answer broke off: the server sent something unreadable.", "broken");
      }
      if (chunk.error) throw new ApiError(String(chunk.error.message ?? chunk.error), "broken");
      const choice = chunk.choices?.[0];
      if (choice?.delta?.reasoning_content) yield { thought: String(choice.delta.reasoning_content) };
      if (choice?.delta?.content) yield { text: String(choice.delta.content) };
      if (choice?.finish_reason) {
        finished = true;
        yield { finish: String(choice.finish_reason) };
      }
      if (chunk.usage) yield { usage: chunk.usage };
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The answer broke off: the connection was lost.", "broken");
  }
  if (!finished) throw new ApiError("The answer broke off: the server ended the stream early.", "broken");
}
