// The chat: a conversation that is kept here and sent whole each time, answers as they come.
//
//   send → ask → stream → Answer.add, an event each → Answer.draw, once a frame → the conversation

import { Answer } from "./answer.js";
import { call, events } from "./api.js";
import { announce, element, find, growing, sendingOnEnter, unfolding } from "./dom.js";
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
const NEAR_END_PX = 80; // whoever reads further up is left there

const seesImages = model => model?.input_modalities?.includes("image");

export function startChat(section, ready, models) {
  new Chat(section, models);
}

class Chat {
  constructor(section, models) {
    this.section = section;
    this.messages = []; // as the API has them, without the system prompt
    this.pictures = []; // {name, url} of the message that is being written
    this.stopping = null; // an AbortController while an answer comes
    this.log = find(".log", section);
    this.form = find("form", section);
    this.text = find("#chat-text", section);
    this.settings = this.form.elements;
    this.fit = growing(this.text);
    this.listen();
    this.listModels(models.filter(each => each.serves === "generation"));
    this.listExamples();
  }

  listen() {
    sendingOnEnter(this.text, this.form);
    unfolding(this.form);
    this.form.onsubmit = event => {
      event.preventDefault();
      this.send();
    };
    this.button("stop").onclick = () => this.stopping?.abort();
    this.button("clear").onclick = () => this.clear();
    document.addEventListener("keydown", event => {
      if (event.key === "Escape" && !this.section.hidden) this.stopping?.abort();
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
    this.settings.model.replaceChildren(...models.map(each => element("option", { value: each.id }, each.id)));
    this.settings.model.parentElement.hidden = models.length < 2;
    const choose = () => {
      const model = models.find(each => each.id === this.settings.model.value);
      find(".picture", this.form).hidden = !seesImages(model);
    };
    this.settings.model.onchange = choose;
    choose();
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

  // ── a message on its way out ──

  async attach(files) {
    if (find(".picture", this.form).hidden) return;
    for (const file of files.filter(each => each.type.startsWith("image/"))) {
      this.pictures.push({ name: file.name, url: await dataUrl(file) });
    }
    this.showPictures();
  }

  showPictures() {
    const place = find(".attached", this.form);
    place.hidden = !this.pictures.length;
    place.replaceChildren(...this.pictures.map(picture => element("button", {
      type: "button", class: "quiet", "aria-label": `Remove ${picture.name}`,
      onclick: () => {
        this.pictures = this.pictures.filter(each => each !== picture);
        this.showPictures();
      },
    }, element("img", { src: picture.url, alt: "" }), "×")));
  }

  send() {
    const text = this.text.value.trim();
    if (this.stopping || !(text || this.pictures.length)) return;
    let content = text;
    if (this.pictures.length) {
      content = this.pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
      if (text) content.push({ type: "text", text });
    }
    this.log.append(element("article", { class: "user", "aria-label": "You" },
      ...this.pictures.map(({ name, url }) => element("img", { src: url, alt: name })),
      element("p", {}, text)));
    for (const open of this.log.querySelectorAll(".failure button, .results")) open.remove();
    if (this.messages.at(-1)?.role === "user") this.messages.pop(); // it got no answer
    this.messages.push({ role: "user", content });
    this.pictures = [];
    this.showPictures();
    this.text.value = "";
    this.fit();
    this.ask();
  }

  // The API's request for the next message. Throws where the tools are no JSON.
  request() {
    const { model, system, temperature, max_tokens: most, reasoning_effort: effort, tools } = this.settings;
    const before = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    const body = {
      model: model.value || undefined,
      messages: [...before, ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
    };
    if (temperature.value) body.temperature = Number(temperature.value);
    if (most.value) body.max_tokens = Number(most.value);
    if (effort.value) body.reasoning_effort = effort.value;
    if (tools.value.trim()) body.tools = parsed(tools.value);
    return { path: PATH, body };
  }

  async ask() {
    find(".welcome", this.section).hidden = true;
    const answer = new Answer();
    this.log.append(answer.shown);
    this.show(true);
    toTheEnd();
    try {
      const request = this.request();
      answer.offer(request);
      await this.stream(request, answer);
    } catch (error) {
      if (error.name !== "AbortError") {
        this.following(() => answer.fail(error, () => {
          answer.shown.remove();
          this.ask();
        }));
        return;
      }
      answer.finishReason = "stopped";
    } finally {
      this.show(false);
    }
    this.following(() => answer.end());
    this.keep(answer);
    announce(`Answer: ${answer.message.content || "none"}`);
  }

  async stream(request, answer) {
    const response = await call(request.path, { body: request.body, signal: this.stopping.signal });
    let drawing = 0;
    for await (const event of events(response)) {
      answer.add(event);
      drawing ||= requestAnimationFrame(() => {
        drawing = 0;
        this.following(() => answer.draw());
      });
    }
    cancelAnimationFrame(drawing);
  }

  // What was said goes on; an answer that was stopped before a word leaves no trace.
  keep(answer) {
    const { content, reasoning_content: thoughts, tool_calls: calls } = answer.message;
    const called = answer.finishReason !== "stopped" && calls;
    if (!content && !called) return;
    const message = { role: "assistant", content: content || null };
    if (thoughts) message.reasoning_content = thoughts;
    if (called) message.tool_calls = calls;
    this.messages.push(message);
    if (called) {
      this.following(() => this.log.append(resultsForm(calls, results => {
        this.messages.push(...results);
        this.ask();
      })));
    }
  }

  // Does something to the log; whoever looks at its end goes on doing so.
  following(change) {
    const page = document.documentElement;
    const atEnd = page.scrollHeight - page.clientHeight - page.scrollTop < NEAR_END_PX;
    change();
    if (atEnd) toTheEnd();
  }

  show(answering) {
    const stopped = document.activeElement === this.button("stop");
    this.stopping = answering ? new AbortController() : null;
    this.log.setAttribute("aria-busy", answering);
    this.button("send").hidden = answering;
    this.button("stop").hidden = !answering;
    this.button("clear").hidden = answering || !this.log.children.length;
    if (stopped) this.text.focus(); // the button that had it is gone
    if (answering) announce("Answering. Escape stops.");
  }

  clear() {
    this.messages = [];
    this.log.replaceChildren();
    this.button("clear").hidden = true;
    find(".welcome", this.section).hidden = false;
    this.text.focus();
  }
}

function toTheEnd() {
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

// Asks for what the called functions return, and hands it on as the API's messages.
function resultsForm(calls, hand) {
  const form = element("form", { class: "results" },
    ...calls.map(({ function: { name } }, n) => element("label", {}, `${name} returns`,
      element("input", { name: `result-${n}`, required: true, autocomplete: "off", placeholder: "22 degrees, sunny" }))),
    element("button", {}, "Send result"));
  form.onsubmit = event => {
    event.preventDefault();
    form.remove();
    hand(calls.map(({ id }, n) => ({
      role: "tool", tool_call_id: id, content: form.elements[`result-${n}`].value,
    })));
  };
  return form;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the tools are not valid JSON: ${error.message}`);
  }
}
