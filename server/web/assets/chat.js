// The chat: the history is kept here and sent whole with each request; responses are streamed.
//
//   send → request → stream → AssistantMessage.add per event → .draw once a frame → history

import { AssistantMessage } from "./message.js";
import { call, events } from "./api.js";
import { announce, autoGrow, element, find, setUpSettings, submitOnEnter } from "./dom.js";
import { dataUrl } from "./files.js";

const PATH = "v1/chat/completions";
const WEATHER = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string" } },
      required: ["city"],
    },
  },
}];
const EXAMPLES = [
  { text: "What is the capital of France?" },
  { text: "Count from 3 to 7." },
  { text: "What is the weather in Paris?", tools: WEATHER },
];
const NEAR_END_PX = 80; // a reader further up is not scrolled down

const takesImages = model => model?.input_modalities?.includes("image");

export function startChat(section, ready, models) {
  new Chat(section, models);
}

class Chat {
  constructor(section, models) {
    this.section = section;
    this.messages = []; // in the API's form, without the system prompt
    this.images = []; // {name, url} of the message being written
    this.abort = null; // an AbortController while a response streams
    this.log = find(".log", section);
    this.form = find("form", section);
    this.text = find("#chat-text", section);
    this.settings = this.form.elements;
    this.fit = autoGrow(this.text);
    this.listen();
    this.listModels(models.filter(model => model.serves === "generation"));
    this.listExamples();
  }

  listen() {
    submitOnEnter(this.text, this.form);
    setUpSettings(this.form);
    this.form.onsubmit = event => {
      event.preventDefault();
      this.send();
    };
    this.button("stop").onclick = () => this.abort?.abort();
    this.button("clear").onclick = () => this.clear();
    document.addEventListener("keydown", event => {
      if (event.key === "Escape" && !this.section.hidden) this.abort?.abort();
    });
    this.section.addEventListener("shown", () => {
      this.fit();
      if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) this.text.focus();
    });
    find("input[type=file]", this.form).onchange = event => {
      this.attach([...event.target.files]);
      event.target.value = "";
    };
    this.text.addEventListener("paste", event => this.attach([...event.clipboardData.files]));
  }

  listModels(models) {
    this.settings.model.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    this.settings.model.parentElement.hidden = models.length < 2;
    const onModel = () => {
      const model = models.find(({ id }) => id === this.settings.model.value);
      find(".attach", this.form).hidden = !takesImages(model);
    };
    this.settings.model.onchange = onModel;
    onModel();
  }

  listExamples() {
    find(".examples", this.section).append(...EXAMPLES.map(({ text, tools }) => element("button", {
      type: "button", class: "example",
      onclick: () => {
        if (tools) this.settings.tools.value = JSON.stringify(tools, null, 2);
        this.text.value = text;
        this.send();
      },
    }, text)));
  }

  button(action) {
    return find(`[data-action=${action}]`, this.form);
  }

  // ── the message being written ──

  async attach(files) {
    if (find(".attach", this.form).hidden) return;
    for (const file of files.filter(({ type }) => type.startsWith("image/"))) {
      this.images.push({ name: file.name, url: await dataUrl(file) });
    }
    this.showImages();
  }

  showImages() {
    const attached = find(".attached", this.form);
    attached.hidden = !this.images.length;
    attached.replaceChildren(...this.images.map(image => element("button", {
      type: "button", class: "quiet", "aria-label": `Remove ${image.name}`,
      onclick: () => {
        this.images = this.images.filter(other => other !== image);
        this.showImages();
      },
    }, element("img", { src: image.url, alt: "" }), "×")));
  }

  send() {
    const text = this.text.value.trim();
    if (this.abort || !(text || this.images.length)) return;
    let content = text;
    if (this.images.length) {
      content = this.images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
      if (text) content.push({ type: "text", text });
    }
    this.log.append(element("article", { class: "user", "aria-label": "You" },
      ...this.images.map(({ name, url }) => element("img", { src: url, alt: name })),
      element("p", {}, text)));
    for (const outdated of this.log.querySelectorAll(".failure button, .results")) outdated.remove();
    if (this.messages.at(-1)?.role === "user") this.messages.pop(); // it has no response
    this.messages.push({ role: "user", content });
    this.images = [];
    this.showImages();
    this.text.value = "";
    this.fit();
    this.respond();
  }

  // Returns the API's request for the next message. Throws if the tools are not valid JSON.
  request() {
    const { model, system, temperature, max_tokens: maxTokens, reasoning_effort: effort, tools } = this.settings;
    const systemMessages = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    const body = {
      model: model.value || undefined,
      messages: [...systemMessages, ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
    };
    if (temperature.value) body.temperature = Number(temperature.value);
    if (maxTokens.value) body.max_tokens = Number(maxTokens.value);
    if (effort.value) body.reasoning_effort = effort.value;
    if (tools.value.trim()) body.tools = parseTools(tools.value);
    return { path: PATH, body };
  }

  async respond() {
    find(".welcome", this.section).hidden = true;
    const reply = new AssistantMessage();
    this.log.append(reply.element);
    this.setStreaming(true);
    scrollToEnd();
    try {
      const request = this.request();
      reply.addExchange(request);
      await this.stream(request, reply);
    } catch (error) {
      if (error.name !== "AbortError") {
        this.keepAtEnd(() => reply.fail(error, () => {
          reply.element.remove();
          this.respond();
        }));
        return;
      }
      reply.finishReason = "stopped";
    } finally {
      this.setStreaming(false);
    }
    this.keepAtEnd(() => reply.end());
    this.addToHistory(reply);
    announce(`Answer: ${reply.message.content || "none"}`);
  }

  async stream(request, reply) {
    const response = await call(request.path, { body: request.body, signal: this.abort.signal });
    let frame = 0;
    for await (const event of events(response)) {
      reply.add(event);
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        this.keepAtEnd(() => reply.draw());
      });
    }
    cancelAnimationFrame(frame);
  }

  // A response without text that was stopped is left out of the history.
  addToHistory(reply) {
    const { content, reasoning_content: reasoning, tool_calls: calls } = reply.message;
    const called = reply.finishReason !== "stopped" && calls;
    if (!content && !called) return;
    const message = { role: "assistant", content: content || null };
    if (reasoning) message.reasoning_content = reasoning;
    if (called) message.tool_calls = calls;
    this.messages.push(message);
    if (called) {
      this.keepAtEnd(() => this.log.append(resultsForm(calls, results => {
        this.messages.push(...results);
        this.respond();
      })));
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
    this.log.setAttribute("aria-busy", streaming);
    this.button("send").hidden = streaming;
    this.button("stop").hidden = !streaming;
    this.button("clear").hidden = streaming || !this.log.children.length;
    if (hadFocus) this.text.focus(); // the stop button is hidden now
    if (streaming) announce("Answering. Escape stops.");
  }

  clear() {
    this.messages = [];
    this.log.replaceChildren();
    this.button("clear").hidden = true;
    find(".welcome", this.section).hidden = false;
    this.text.focus();
  }
}

function scrollToEnd() {
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

// Returns a form for the results of the called functions; `submit` gets them as API messages.
function resultsForm(calls, submit) {
  const form = element("form", { class: "results" },
    ...calls.map(({ function: { name } }, n) => element("label", {}, `${name} returns`,
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

function parseTools(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the tools are not valid JSON: ${error.message}`);
  }
}
