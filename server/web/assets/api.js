// Requests to the server, with the API key: after a 401 a dialog asks for it. Errors have the server's
// message; server-sent events are parsed.

import { element, find } from "./dom.js";
import { session } from "./store.js";

const STORAGE_KEY = "onequeue-key"; // of the tab
const keyListeners = [];
let keyDialog = null; // a promise; all requests that need a key share one dialog

export class ServerError extends Error {
  constructor(status, error) {
    super(error.message + (error.param && !error.message.startsWith(error.param) ? ` (${error.param})` : ""));
    this.title = `${status} · ${error.code ?? error.type}`;
  }
}

// Returns a successful response or throws a ServerError. `body`: a value for JSON, a file or a form.
export async function call(path, { body, media, signal } = {}) {
  const isRaw = body === undefined || body instanceof Blob || body instanceof FormData;
  for (;;) {
    const headers = {};
    if (hasKey()) headers.authorization = `Bearer ${session.get(STORAGE_KEY)}`;
    if (body !== undefined && !(body instanceof FormData)) {
      headers["content-type"] = media ?? (isRaw ? body.type : "application/json");
    }
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: isRaw ? body : JSON.stringify(body),
      headers, signal,
    }).catch(error => {
      if (error.name === "AbortError") throw error;
      throw new Error("the server cannot be reached");
    });
    if (response.ok) return response;
    const { error } = await response.json().catch(
      () => ({ error: { message: response.statusText, code: "http_error" } }));
    if (response.status !== 401) throw new ServerError(response.status, error);
    keyDialog ??= askForKey(hasKey() ? "The server does not accept this key." : "")
      .finally(() => { keyDialog = null; });
    if (!await keyDialog) throw new ServerError(401, error);
  }
}

// Yields the JSON of each event, until [DONE].
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
      if (event.error) throw new ServerError("interrupted", event.error);
      yield event;
    }
  }
}

// ── the key ──

export function hasKey() {
  return session.get(STORAGE_KEY) !== null;
}

export function forgetKey() {
  session.remove(STORAGE_KEY);
  keyListeners.forEach(listener => listener());
}

export function whenKeyChanges(listener) {
  keyListeners.push(listener);
}

// Resolves to whether the user entered a key.
function askForKey(reason) {
  const dialog = find("#key");
  const form = find("form", dialog);
  find(".reason", dialog).replaceChildren(element("span", {}, reason));
  form.reset();
  return new Promise(resolve => {
    form.onsubmit = event => {
      event.preventDefault();
      session.set(STORAGE_KEY, form.elements.key.value.trim());
      keyListeners.forEach(listener => listener());
      dialog.close("entered");
    };
    find("[data-action=cancel]", dialog).onclick = () => dialog.close("");
    dialog.onclose = () => resolve(dialog.returnValue === "entered");
    dialog.returnValue = "";
    dialog.showModal();
  });
}
