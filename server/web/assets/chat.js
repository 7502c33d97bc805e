// The chat: the history is sent whole with each request; responses are streamed.
//
//   Composer → send → ask → stream → AssistantMessage.add per event → .draw now and then → history → store

import { AssistantMessage, toolMessage, userMessage } from "./message.js";
import { call, events } from "./api.js";
import { Composer, textOf } from "./composer.js";
import { showConversations } from "./conversations.js";
import { announce, button, element, find, markRunning, setUpSettings } from "./dom.js";
import { parseJson } from "./exchange.js";
import { deleteConversations, loadConversation, saveConversation, session } from "./store.js";

const PATH = "v1/chat/completions";
const CURRENT = "onequeue-conversation"; // in the session: the id of the one on the screen
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
// Sent for a model that has no sampling settings: at a temperature of 1 a small one writes nonsense.
const SAMPLING = { temperature: 0.7, top_p: 0.95 };
const WEATHER = JSON.stringify([{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}], null, 2);
const WITH_TOOL = { text: "What is the weather in Paris?", tools: WEATHER };
const TOY = [{ text: "What is the capital of France?" }, { text: "Count from 3 to 7." }, WITH_TOOL];
const EXAMPLES = [
  { text: "Explain in three sentences how a queue works." },
  { text: "Compare tea and coffee in a table." },
  WITH_TOOL,
];
const NEAR_END_PX = 80; // a reader further up is not scrolled down
const MIN_PAUSE_MS = 16; // between two drawings
const PAUSE_SHARE = 4; // of the time that a drawing took: a long text does not occupy the browser

export function startChat(section, ready, models) {
  const chat = new Chat(section, models);
  chat.welcome(ready.chat_model);
  chat.open(session[CURRENT]);
}

// The log is the history: an element in it has its message in the API's form, which `node.message` is. One
// without a message is an answer that streams or was refused, and the last one.
class Chat {
  constructor(section, models) {
    this.section = section;
    this.models = models;
    this.id = null; // of the conversation, once it has a message
    this.edited = null; // the element of the message that is edited
    this.abort = null; // an AbortController while a response streams
    this.log = find(".log", section);
    this.form = find("form", section);
    this.settings = this.form.elements;
    this.fields = [...this.settings].filter(({ name }) => name);
    this.composer = new Composer(this.form);
    this.settings.model.append(...models.map(({ id }) => element("option", { value: id }, id)));
    this.settings.model.parentElement.hidden = models.length < 2;
    this.showModel();
    setUpSettings(this.form);
    this.form.onsubmit = event => {
      event.preventDefault();
      this.send();
    };
    this.settings.model.onchange = () => this.showModel();
    this.button("stop").onclick = () => this.abort?.abort();
    this.button("new").onclick = () => this.clear();
    this.button("conversations").onclick = () => showConversations(
      id => this.open(id), ids => ids.includes(this.id) && this.clear());
    this.button("cancel-edit").onclick = () => this.endEdit();
    document.addEventListener("keydown", event => {
      if (event.key !== "Escape" || !this.section.checkVisibility() || find("dialog[open]")) return;
      if (this.abort) this.abort.abort();
      else this.endEdit();
    });
    this.section.addEventListener("shown", () => {
      if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) this.composer.text.focus();
    });
  }

  // Shows which files the chosen model takes, and its sampling parameters.
  showModel() {
    const model = this.models.find(({ id }) => id === this.settings.model.value);
    this.composer.take(model?.input_modalities ?? []);
    const { configured, ...defaults } = model?.sampling_defaults ?? {};
    this.sampling = configured === false ? SAMPLING : {};
    for (const name of Object.keys(SAMPLING)) {
      const [value, whose] = name in this.sampling ? [SAMPLING[name], "page"] : [defaults[name], "model"];
      this.settings[name].placeholder = value === undefined ? "model default" : `${value} (${whose})`;
    }
  }

  // Reads the sampling parameters of models that have been loaded since the page was.
  async learnSampling() {
    if (this.models.every(model => model.sampling_defaults)) return;
    const { data } = await (await call("v1/models")).json();
    for (const model of this.models) Object.assign(model, data.find(({ id }) => id === model.id));
    this.showModel();
  }

  welcome(model) {
    const isToy = model === "demo";
    find(".about", this.section).textContent = isToy ? "A toy model that knows one page of facts." : model;
    find(".examples", this.section).append(...(isToy ? TOY : EXAMPLES).map(({ text, tools }) => button(text, () => {
      if (tools) this.settings.tools.value = tools;
      this.composer.write(text);
      this.send();
    }, { class: "example" })));
  }

  button(action) {
    return find(`[data-action=${action}]`, this.section);
  }

  // ── the history ──

  get history() {
    return [...this.log.children].filter(({ message }) => message);
  }

  get messages() {
    return this.history.map(({ message }) => message);
  }

  show(message) {
    if (message.role === "assistant") {
      const answer = this.addAnswer();
      answer.show(message);
      this.keep(answer, message);
      return;
    }
    const node = message.role === "user" ? userMessage(message, () => this.edit(node)) : toolMessage(this.callOf(message), message);
    node.message = message;
    this.append(node);
  }

  addAnswer() {
    const answer = new AssistantMessage(() => this.regenerate(answer.element));
    this.append(answer.element);
    return answer;
  }

  append(node) {
    this.keepAtEnd(() => this.log.append(node));
    this.showTitle();
  }

  // Makes an answer part of the history. The results of its calls can be sent while it is the last message.
  keep(answer, message) {
    answer.element.message = message;
    if (message.tool_calls) {
      answer.element.append(resultsForm(message.tool_calls, results => this.ask(null, results)));
    }
  }

  callOf({ tool_call_id: id }) {
    const calls = this.messages.flatMap(message => message.tool_calls ?? []);
    return calls.find(other => other.id === id)?.function.name ?? "The tool";
  }

  // ── the conversation ──

  async save() {
    const messages = this.messages;
    if (!messages.length) return this.id && deleteConversations([this.id]).catch(() => {});
    this.id ??= `${Date.now()}-${Math.random()}`;
    session[CURRENT] = this.id;
    const title = textOf(messages[0].content).slice(0, 80) || "Images";
    const settings = Object.fromEntries(this.fields.map(({ name, value }) => [name, value]));
    const isKept = await saveConversation({ id: this.id, title, messages, settings }).catch(() => true);
    if (!isKept) find(".notice", this.form).textContent = "This conversation is too large to be kept.";
  }

  async open(id) {
    const conversation = id && await loadConversation(id).catch(() => null);
    if (!conversation || this.abort) return;
    this.clear();
    for (const field of this.fields) field.value = conversation.settings[field.name] ?? "";
    this.showModel();
    this.id = id;
    session[CURRENT] = id;
    conversation.messages.forEach(message => this.show(message));
    scrollToEnd();
  }

  clear() {
    this.abort?.abort();
    this.id = null;
    delete session[CURRENT];
    if (this.settings.tools.value === WEATHER) this.settings.tools.value = ""; // an example's
    this.endEdit();
    this.log.replaceChildren();
    this.showTitle();
    this.composer.text.focus();
  }

  showTitle() {
    find(".title", this.section).textContent = textOf(this.messages[0]?.content);
  }

  // ── a message ──

  edit(node) {
    if (this.abort) return;
    this.draft ??= this.composer.read();
    this.edited = node;
    this.composer.write(node.message.content);
    this.button("cancel-edit").hidden = false;
    this.composer.text.focus();
  }

  endEdit() {
    if (this.edited) this.composer.write(this.draft);
    this.edited = this.draft = null;
    this.button("cancel-edit").hidden = true;
  }

  send() {
    const content = this.composer.read();
    if (this.abort || !content) return;
    const edited = this.edited;
    this.endEdit();
    const hidesAnswers = matchMedia("(max-width: 34rem)").matches && !find(".settings", this.form).hidden;
    if (hidesAnswers) this.button("settings").click();
    if (!edited) this.composer.write("");
    const last = this.history.at(-1);
    const unanswered = last?.message.role === "user" ? last : null;
    this.ask(edited ?? unanswered, [{ role: "user", content }], () => this.send(), () => {
      if (edited) this.edit(edited);
      if (edited) this.composer.write(content);
      else this.composer.putBack(content);
    });
  }

  regenerate(node) {
    if (!this.abort) this.ask(node, []);
  }

  // Returns the API's request for the next message. Throws if the tools are not valid JSON.
  request() {
    const { model, system, reasoning_effort: effort, tools } = this.settings;
    const content = system.value.trim();
    const body = {
      model: model.value || undefined,
      messages: content ? [{ role: "system", content }, ...this.messages] : this.messages,
      stream: true,
      stream_options: { include_usage: true },
      ...this.sampling,
    };
    for (const name of NUMBERS) if (this.settings[name].value) body[name] = Number(this.settings[name].value);
    if (effort.value) body.reasoning_effort = effort.value;
    if (tools.value.trim()) body.tools = parseJson(tools.value, "the tools are");
    return { path: PATH, body };
  }

  // Replaces the history from an element on by messages, and streams an answer. If the request is refused,
  // the history is as before, and a button calls `retry`.
  async ask(from, messages, retry = () => this.ask(from, messages), whenRefused = () => {}) {
    const before = this.history;
    const end = before.indexOf(from);
    const kept = end < 0 ? before : before.slice(0, end);
    for (const node of [...this.log.children]) if (!kept.includes(node)) node.remove();
    messages.forEach(message => this.show(message));
    const answer = this.addAnswer();
    this.setStreaming(true);
    scrollToEnd();
    this.save();
    let failed = null;
    try {
      const request = this.request();
      answer.addExchange(request);
      await this.stream(request, answer);
    } catch (error) {
      if (error.name === "AbortError") answer.finishReason = "stopped";
      else failed = error;
    }
    this.setStreaming(false);
    const isRefused = failed && !answer.firstAt;
    this.keepAtEnd(() => answer.end(failed, isRefused ? retry : () => this.regenerate(answer.element)));
    if (isRefused) {
      this.log.replaceChildren(...before);
      whenRefused();
      this.append(answer.element);
    } else {
      const message = answer.whole(failed || answer.finishReason === "stopped");
      if (message) this.keepAtEnd(() => this.keep(answer, message));
      this.learnSampling().catch(() => {});
    }
    this.save();
  }

  async stream(request, answer) {
    const response = await call(request.path, { body: request.body, signal: this.abort.signal });
    let [timer, pause] = [0, MIN_PAUSE_MS];
    const draw = () => {
      const started = performance.now();
      this.keepAtEnd(() => answer.draw());
      pause = Math.max(MIN_PAUSE_MS, PAUSE_SHARE * (performance.now() - started));
      timer = 0;
    };
    try {
      for await (const event of events(response)) {
        answer.add(event);
        timer ||= setTimeout(draw, pause);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  // Changes the log; a view at its end stays there.
  keepAtEnd(change) {
    const page = document.documentElement;
    const atEnd = page.scrollHeight - page.clientHeight - page.scrollTop < NEAR_END_PX;
    change();
    if (atEnd) scrollToEnd();
  }

  setStreaming(streaming) {
    const hadFocus = document.activeElement === this.button("stop");
    this.abort = streaming ? new AbortController() : null;
    this.button("send").hidden = streaming;
    this.button("stop").hidden = !streaming;
    for (const action of ["new", "conversations"]) this.button(action).disabled = streaming;
    markRunning(this.section, streaming);
    if (hadFocus) this.composer.text.focus(); // the stop button is hidden now
    if (streaming) announce("Answering. Escape stops.");
  }
}

function scrollToEnd() {
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

// Returns a form for the results of the called functions; `submit` gets them as API messages.
function resultsForm(calls, submit) {
  const form = element("form", { class: "results" },
    calls.map(({ function: { name } }, n) => element("label", {}, `${name} returns`,
      element("input", { name: `result-${n}`, required: true, autocomplete: "off", placeholder: "22 degrees, sunny" }))),
    element("button", {}, "Send result"));
  form.onsubmit = event => {
    event.preventDefault();
    submit(calls.map(({ id }, n) => ({
      role: "tool", tool_call_id: id, content: form.elements[`result-${n}`].value,
    })));
  };
  return form;
}
