// Requests of the server's pages.

// Behind a proxy, the server's path is known only to the browser.
const BASE = new URL(".", location.href);
// Several servers behind one proxy share the storage of the browser.
const PREFIX = "lmx-lab " + BASE.pathname;
const POLL_MS = 4000;
const TIMEOUT_MS = 8000;
// A read may return hundreds of events; other work of the page must not wait for all of them.
const SLICE_MS = 12;
const UNREACHABLE = "The server cannot be reached: it was stopped or is restarting, or this device has no network connection.";
const LOST = "The connection was lost before the answer was complete.";

/** Values that are stored in the browser; if it stores nothing, they are kept until the page is closed. */
const kept = {
  values: {},
  get(name) {
    try {
      return localStorage.getItem(PREFIX + name) ?? this.values[name] ?? null;
    } catch {
      return this.values[name] ?? null;
    }
  },
  set(name, value) {
    this.values[name] = value;
    try {
      localStorage.setItem(PREFIX + name, value);
    } catch {
      // The storage is full or turned off.
    }
  },
};

/** Send a request with the key. Rejects with an Error whose `status` is 0 if there is no response. */
const fetchWithKey = async (path, options = {}) => {
  const key = kept.get("key");
  const headers = { ...options.headers, ...(key ? { Authorization: "Bearer " + key } : {}) };
  try {
    return await fetch(new URL(path, BASE), { cache: "no-store", ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : Object.assign(Error(UNREACHABLE), { status: 0 });
  }
};

/** Send a request. Rejects with an Error whose `status` is that of the response, or 0 without a response. */
const request = async (path, options) => {
  const response = await fetchWithKey(path, options);
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw Object.assign(Error(body?.error?.message ?? "The server responded with the status " + response.status + "."),
    { status: response.status, body });
};

const getJson = async (path) => {
  const stopped = new AbortController();
  const timer = setTimeout(() => stopped.abort(), TIMEOUT_MS);
  try {
    return await (await request(path, { signal: stopped.signal })).json();
  } catch (error) {
    throw error.name === "AbortError" ? Object.assign(Error(UNREACHABLE), { status: 0 }) : error;
  } finally {
    clearTimeout(timer);
  }
};

/** Yield the data of each server-sent event of a stream; comments are skipped. */
async function* eventsOf(body) {
  const reader = body.getReader(), decoder = new TextDecoder();
  let rest = "", began = performance.now();
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : Error(LOST);
    });
    if (done) return;
    const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ")) yield block.slice(6);
      if (performance.now() - began > SLICE_MS) {
        await new Promise((resume) => setTimeout(resume));
        began = performance.now();
      }
    }
  }
}

/** Stream an answer: calls `receive` with each chunk, and returns the headers of the response when it is complete. */
const streamAnswer = async (body, signal, receive) => {
  const response = await request("v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
  });
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return response.headers;
    const chunk = JSON.parse(data);
    if (chunk.error) throw Error(chunk.error.message);
    receive(chunk);
  }
  throw Error(LOST);
};
