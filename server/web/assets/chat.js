// The chat: the history is kept here and sent whole with each request; responses are streamed.
//
//   Composer → send → respond → stream → AssistantMessage.add per event → .draw now and then → history → store

import { AssistantMessage, toolMessage, userMessage } from "./message.js";
import { call, events } from "./api.js";
import { Composer, textOf } from "./composer.js";
import { Conversations } from "./conversations.js";
import { announce, element, find, markRunning, setUpSettings } from "./dom.js";
import { parseJson } from "./exchange.js";
import { deleteConversations, loadConversation, saveConversation, session } from "./store.js";

const PATH = "v1/chat/completions";
const CURRENT = "onequeue-conversation"; // in the session: the id of the one on the screen
const SETTINGS = ["model", "system", "temperature", "top_p", "max_tokens", "reasoning_effort", "tools"];
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
  chat.open(session.get(CURRENT));
}

class Chat {
  constructor(section, models) {
    this.section = section;
    this.messages = []; // in the API's form, without the system prompt
    this.id = null; // of the conversation, once it has a message
    this.editAt = null; // index of the message that is edited
    this.abort = null; // an AbortController while a response streams
    this.log = find(".log", section); // its children have `at`, their index in `messages`, or Infinity
    this.form = find("form", section);
    this.settings = this.form.elements;
    this.composer = new Composer(this.form);
    this.conversations = new Conversations(find("#conversations"), {
      open: id => this.open(id),
      onDelete: ids => ids.includes(this.id) && this.clear(),
    });
    this.listen();
    this.models = models.filter(model => model.serves === "generation");
    this.listModels(this.models);
  }

  listen() {
    setUpSettings(this.form);
    this.form.onsubmit = event => {
      event.preventDefault();
      this.send();
    };
    this.button("stop").onclick = () => this.abort?.abort();
    this.button("new").onclick = () => this.clear();
    this.button("conversations").onclick = () => this.conversations.show();
    this.button("cancel-edit").onclick = () => this.endEdit();
    document.addEventListener("keydown", event => {
      if (event.key !== "Escape" || !this.section.checkVisibility() || find("dialog[open]")) return;
      if (this.abort) this.abort.abort();
      else if (this.editAt !== null) this.endEdit();
    });
    this.section.addEventListener("shown", () => {
      this.composer.fit();
      if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) this.composer.text.focus();
    });
  }

  listModels(models) {
    this.settings.model.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    this.settings.model.parentElement.hidden = models.length < 2;
    const onModel = () => {
      const model = models.find(({ id }) => id === this.settings.model.value);
      this.composer.takeImages(model?.input_modalities?.includes("image") ?? false);
      const { configured, ...defaults } = model?.sampling_defaults ?? {};
      this.sampling = configured === false ? SAMPLING : {};
      for (const name of Object.keys(SAMPLING)) {
        const [value, whose] = name in this.sampling ? [SAMPLING[name], "page"] : [defaults[name], "model"];
        this.settings[name].placeholder = value === undefined ? "model default" : `${value} (${whose})`;
      }
    };
    this.settings.model.onchange = onModel;
    onModel();
  }

  // Reads the sampling parameters of models that have been loaded since the page was.
  async learnSampling() {
    if (this.models.every(model => model.sampling_defaults)) return;
    const { data } = await (await call("v1/models")).json();
    for (const model of this.models) Object.assign(model, data.find(({ id }) => id === model.id));
    this.settings.model.onchange();
  }

  welcome(model) {
    const isToy = model === "demo";
    find(".about", this.section).textContent = isToy ? "A toy model that knows one page of facts." : model;
    find(".examples", this.section).append(...(isToy ? TOY : EXAMPLES).map(({ text, tools }) => element("button", {
      type: "button", class: "example",
      onclick: () => {
        if (tools) this.settings.tools.value = tools;
        this.composer.write(text);
        this.send();
      },
    }, text)));
  }

  button(action) {
    return find(`[data-action=${action}]`, this.section);
  }

  // ── the history ──

  add(message) {
    const at = this.messages.push(message) - 1;
    this.show(message, at);
  }

  show(message, at) {
    let node;
    if (message.role === "user") node = userMessage(message, () => this.edit(at));
    else if (message.role === "tool") node = toolMessage(this.callOf(message), message);
    else {
      const answer = this.newAnswer(at);
      answer.show(message);
      node = answer.element;
    }
    this.append(node, at);
    if (message.tool_calls && at === this.messages.length - 1) this.askForResults(message.tool_calls);
  }

  append(node, at) {
    this.keepAtEnd(() => this.log.append(Object.assign(node, { at })));
    this.showState();
  }

  newAnswer(at) {
    return new AssistantMessage(() => this.regenerate(at));
  }

  callOf({ tool_call_id: id }) {
    const calls = this.messages.flatMap(message => message.tool_calls ?? []);
    return calls.find(other => other.id === id)?.function.name ?? "The tool";
  }

  // Removes messages, and what is shown without being one.
  truncate(length) {
    this.messages.length = length;
    for (const node of [...this.log.children]) if (node.at >= length) node.remove();
  }

  replace(messages) {
    this.messages = [...messages];
    this.log.replaceChildren();
    messages.forEach((message, at) => this.show(message, at));
    this.showState();
  }

  // ── the conversation ──

  async save() {
    if (!this.messages.length) return this.id && deleteConversations([this.id]).catch(() => {});
    this.id ??= `${Date.now()}-${Math.random()}`;
    session.set(CURRENT, this.id);
    const title = textOf(this.messages[0]?.content).slice(0, 80) || "Images";
    const settings = Object.fromEntries(SETTINGS.map(name => [name, this.settings[name].value]));
    const isKept = await saveConversation({ id: this.id, title, messages: this.messages, settings }).catch(() => true);
    if (!isKept) find(".notice", this.form).textContent = "This conversation is too large to be kept.";
  }

  async open(id) {
    const conversation = id && await loadConversation(id).catch(() => null);
    if (!conversation || this.abort) return;
    this.clear();
    for (const name of SETTINGS) this.settings[name].value = conversation.settings[name] ?? "";
    this.settings.model.onchange();
    this.id = id;
    session.set(CURRENT, id);
    this.replace(conversation.messages);
    scrollToEnd();
  }

  clear() {
    this.abort?.abort();
    this.id = null;
    session.remove(CURRENT);
    if (this.settings.tools.value === WEATHER) this.settings.tools.value = ""; // an example's
    this.endEdit();
    this.replace([]);
    this.composer.text.focus();
  }

  showState() {
    const isEmpty = !this.log.children.length;
    find(".welcome", this.section).hidden = !isEmpty;
    this.button("new").hidden = isEmpty;
    find(".title", this.section).textContent = isEmpty ? "" : textOf(this.messages[0]?.content);
  }

  // ── a message ──

  edit(at) {
    if (this.abort) return;
    this.draft ??= this.composer.read();
    this.editAt = at;
    this.composer.write(this.messages[at].content);
    this.button("cancel-edit").hidden = false;
    this.composer.text.focus();
  }

  endEdit() {
    if (this.editAt !== null) this.composer.write(this.draft);
    this.editAt = this.draft = null;
    this.button("cancel-edit").hidden = true;
  }

  send() {
    const content = this.composer.read();
    if (this.abort || !content) return;
    const at = this.editAt;
    this.endEdit();
    const hidesAnswers = matchMedia("(max-width: 34rem)").matches && !find(".settings", this.form).hidden;
    if (hidesAnswers) this.button("settings").click();
    if (at === null) this.composer.write("");
    this.ask(() => {
      const isUnanswered = this.messages.at(-1)?.role === "user";
      this.truncate(at ?? this.messages.length - isUnanswered);
      this.add({ role: "user", content });
    }, () => this.send(), () => {
      if (at !== null) this.edit(at);
      if (at !== null) this.composer.write(content);
      else this.composer.putBack(content);
    });
  }

  regenerate(at) {
    if (!this.abort) this.ask(() => this.truncate(at), () => this.regenerate(at));
  }

  // Changes the history and asks for an answer. If the request is refused, the history is as before.
  async ask(change, retry, whenRefused = () => {}) {
    const before = [...this.messages];
    change();
    const refused = await this.respond(retry);
    if (!refused) return;
    if (this.messages.length === before.length + 1) this.truncate(before.length);
    else this.replace(before);
    whenRefused();
    this.append(refused.element, Infinity);
    this.save();
  }

  // Returns the API's request for the next message. Throws if the tools are not valid JSON.
  request() {
    const { model, system, max_tokens: maxTokens, reasoning_effort: effort, tools } = this.settings;
    const systemMessages = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    const body = {
      model: model.value || undefined,
      messages: [...systemMessages, ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
    };
    Object.assign(body, this.sampling);
    for (const name of Object.keys(SAMPLING)) {
      if (this.settings[name].value) body[name] = Number(this.settings[name].value);
    }
    if (maxTokens.value) body.max_tokens = Number(maxTokens.value);
    if (effort.value) body.reasoning_effort = effort.value;
    if (tools.value.trim()) body.tools = parseJson(tools.value, "the tools are");
    return { path: PATH, body };
  }
  // Streams an answer. Returns it if the request was refused; `retry` is what its button does then.
  async respond(retry) {
    const at = this.messages.length;
    const reply = this.newAnswer(at);
    this.truncate(at);
    this.append(reply.element, Infinity);
    this.setStreaming(true);
    scrollToEnd();
    this.save();
    let failed = null;
    try {
      const request = this.request();
      reply.addExchange(request);
      await this.stream(request, reply);
    } catch (error) {
      if (error.name === "AbortError") reply.finishReason = "stopped";
      else failed = error;
    }
    this.setStreaming(false);
    const isRefused = failed && !reply.firstAt;
    this.keepAtEnd(() => reply.end(failed, isRefused ? retry : () => this.regenerate(at)));
    if (isRefused) return reply;
    this.keep(reply, failed || reply.finishReason === "stopped");
    this.save();
    this.learnSampling().catch(() => {});
    return null;
  }

  async stream(request, reply) {
    const response = await call(request.path, { body: request.body, signal: this.abort.signal });
    let [timer, pause] = [0, MIN_PAUSE_MS];
    const draw = () => {
      const started = performance.now();
      this.keepAtEnd(() => reply.draw());
      pause = Math.max(MIN_PAUSE_MS, PAUSE_SHARE * (performance.now() - started));
      timer = 0;
    };
    try {
      for await (const event of events(response)) {
        reply.add(event);
        timer ||= setTimeout(draw, pause);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  // Adds an answer to the history: without calls if it ended early, and not at all without text.
  keep(reply, isPart) {
    const { content, reasoning_content: reasoning, tool_calls: calls } = reply.message;
    const called = !isPart && calls;
    if (!content && !called) return;
    const message = { role: "assistant", content: content || null };
    if (reasoning) message.reasoning_content = reasoning;
    if (called) message.tool_calls = calls;
    reply.element.at = this.messages.push(message) - 1;
    if (called) this.askForResults(calls);
  }

  askForResults(calls) {
    this.append(resultsForm(calls, results => {
      results.forEach(result => this.add(result));
      this.respond(() => this.respond());
    }), Infinity);
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
    form.remove();
    submit(calls.map(({ id }, n) => ({
      role: "tool", tool_call_id: id, content: form.elements[`result-${n}`].value,
    })));
  };
  return form;
}
