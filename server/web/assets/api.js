// Requests to the server, with the API key: after a 401 a dialog asks for it. Errors have the server's
// message; server-sent events are parsed.

import { button, element, find } from "./dom.js";
import { session } from "./store.js";

const KEY = "onequeue-key"; // in the session
let keyDialog = null; // a promise; all requests that need a key share one dialog

export class ServerError extends Error {
  constructor(status, error) {
    super(error.message + (error.param && !error.message.startsWith(error.param) ? ` (${error.param})` : ""));
    this.title = `${status} · ${error.code ?? error.type}`;
  }
}

// Returns a successful response or throws a ServerError. `body`: a value for JSON, a file or a form.
export async function call(path, { body, signal } = {}) {
  const isRaw = body === undefined || body instanceof Blob || body instanceof FormData;
  for (;;) {
    const headers = isRaw ? {} : { "content-type": "application/json" };
    if (hasKey()) headers.authorization = `Bearer ${session[KEY]}`;
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
  return KEY in session;
}

// Offers to forget the key while there is one.
export function showForgetKey() {
  const forget = find("#forget-key");
  forget.hidden = !hasKey();
  forget.onclick = () => {
    delete session[KEY];
    showForgetKey();
  };
}

// Resolves to whether the user entered a key.
async function askForKey(reason) {
  const input = element("input", { name: "key", type: "password", autocomplete: "off", required: true });
  const dialog = element("dialog", { id: "key", "aria-labelledby": "key-title" },
    element("form", { method: "dialog" },
      element("h2", { id: "key-title" }, "An API key is needed"),
      element("p", { class: "reason" }, reason),
      element("label", {}, "API key ", input),
      element("p", { class: "note" }, "It is kept in this tab until you close it."),
      element("div", { class: "toolbar" },
        button("Cancel", () => dialog.close()), element("button", { class: "primary", value: "entered" }, "Continue"))));
  document.body.append(dialog);
  dialog.showModal();
  await new Promise(resolve => { dialog.onclose = resolve; });
  dialog.remove();
  if (!dialog.returnValue) return false;
  session[KEY] = input.value.trim();
  showForgetKey();
  return true;
}
