// Requests to the server: with the key, which is asked for when the server wants one; errors as
// the server words them; server-sent events.

import { element, find } from "./dom.js";

const KEPT_AS = "onequeue-key"; // in this tab's own storage
const listeners = [];
let asking = null; // one dialog for all requests that wait for a key

export class ServerError extends Error {
  constructor(status, error) {
    super(error.message + (error.param && !error.message.startsWith(error.param) ? ` (${error.param})` : ""));
    this.title = `${status} · ${error.code ?? error.type}`;
  }
}

// A response that is fine, or a ServerError. `body` is JSON's value, a file or a form.
export async function call(path, { body, media, signal } = {}) {
  const wrapped = body === undefined || body instanceof Blob || body instanceof FormData;
  for (;;) {
    const headers = {};
    if (hasKey()) headers.authorization = `Bearer ${sessionStorage.getItem(KEPT_AS)}`;
    if (body !== undefined && !(body instanceof FormData)) {
      headers["content-type"] = media ?? (wrapped ? body.type : "application/json");
    }
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: wrapped ? body : JSON.stringify(body),
      headers, signal,
    }).catch(error => {
      if (error.name === "AbortError") throw error;
      throw new Error("the server cannot be reached");
    });
    if (response.ok) return response;
    const { error } = await response.json().catch(
      () => ({ error: { message: response.statusText, code: "http_error" } }));
    if (response.status !== 401) throw new ServerError(response.status, error);
    asking ??= askForKey(hasKey() ? "The server does not know this key." : "")
      .finally(() => { asking = null; });
    if (!await asking) throw new ServerError(401, error);
  }
}

// The JSON of each event, until the stream says [DONE].
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue; // a comment keeps the connection alive
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new ServerError("broken off", event.error);
      yield event;
    }
  }
}

// What the server's own clock says of a request: {queue: seconds, model: seconds, …}.
export function timings(response) {
  const found = (response.headers.get("server-timing") ?? "").matchAll(/(\w+);dur=([\d.]+)/g);
  return Object.fromEntries([...found].map(([, name, ms]) => [name, ms / 1000]));
}

// ── the key ──

export function hasKey() {
  return sessionStorage.getItem(KEPT_AS) !== null;
}

export function forgetKey() {
  sessionStorage.removeItem(KEPT_AS);
  listeners.forEach(listener => listener());
}

export function whenKeyChanges(listener) {
  listeners.push(listener);
}

// Whether one was given.
function askForKey(reason) {
  const dialog = find("#key");
  const form = find("form", dialog);
  find(".reason", dialog).replaceChildren(element("span", {}, reason));
  form.reset();
  return new Promise(resolve => {
    form.onsubmit = event => {
      event.preventDefault();
      sessionStorage.setItem(KEPT_AS, form.elements.key.value.trim());
      listeners.forEach(listener => listener());
      dialog.close("given");
    };
    find("[data-action=cancel]", dialog).onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue === "given");
    dialog.returnValue = "";
    dialog.showModal();
  });
}
