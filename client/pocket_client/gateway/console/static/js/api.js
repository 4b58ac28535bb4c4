// Requests to the gateway this page came from. Addresses are relative, so that it may live below a path.
import { load, save } from "./store.js";
import { remedyOf } from "./remedies.js";

let key = load("key", "");

export const apiKey = {
  get value() {
    return key;
  },
  set value(text) {
    key = text;
    save("key", text);
  },
};

/** What went wrong, and what to do about it. `status` 0: the gateway was not reached. */
export class RequestError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
    this.remedy = remedyOf(status, code);
  }
}

function headers() {
  const all = { "Content-Type": "application/json" };
  if (key) all.Authorization = `Bearer ${key}`;
  return all;
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "The gateway cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new RequestError(response.status, error.message, error.code);
  } catch {
    return new RequestError(response.status, `The server answered ${response.status}.`);
  }
}

export async function getJson(path) {
  return (await request(path)).json();
}

/** Events of a chat completion, as objects, until the end. Throws RequestError, or AbortError. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new RequestError(502, event.error.message, event.error.code);
    yield event;
  }
  throw new RequestError(0, "The connection ended before the answer did.");
}

/** The data of each event; ours have one line of it. */
async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("data: ")) yield block.slice(6);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError(0, "The connection was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
