// An assistant's message while it streams in: events are added, and it is drawn once a frame.
// `message` has the form of the API's whole message.

import { element, failure, find, seconds } from "./dom.js";
import { exchange } from "./exchange.js";
import { markdown } from "./markdown.js";

export class AssistantMessage {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.finishReason = null;
    this.usage = null;
    this.envelope = {}; // the fields that all events share
    this.startedAt = performance.now();
    this.firstAt = null;
    this.reasoning = element("p", {});
    this.summary = element("summary", {}, "Thinking…");
    this.details = element("details", { class: "reasoning", hidden: true }, this.summary, this.reasoning);
    this.content = element("div", { class: "content" }, element("span", { class: "pending" }));
    this.calls = element("div", { class: "calls" });
    this.note = element("p", { class: "note" });
    this.element = element("article", { class: "assistant", "aria-label": "Answer" },
      this.details, this.content, this.calls, this.note);
  }

  addExchange(request) {
    this.element.append(exchange(request, () => this.document()));
  }

  add({ choices, usage, ...envelope }) {
    this.envelope = envelope;
    if (usage) this.usage = usage;
    if (!choices.length) return;
    this.firstAt ??= performance.now(); // some formats send a call's text later, all at once
    const [{ delta, finish_reason: reason }] = choices;
    const message = this.message;
    if (delta.content) message.content += delta.content;
    if (delta.reasoning_content) {
      message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
    }
    for (const { index, ...part } of delta.tool_calls ?? []) {
      message.tool_calls ??= [];
      const call = message.tool_calls[index];
      if (call) call.function.arguments += part.function?.arguments ?? "";
      else message.tool_calls[index] = { ...part, function: { arguments: "", ...part.function } };
    }
    if (delta.content || delta.tool_calls) this.reasonedUntil ??= performance.now();
    this.finishReason = reason ?? this.finishReason;
  }

  draw() {
    const { content, reasoning_content: reasoning, tool_calls: calls } = this.message;
    if (reasoning) {
      this.details.hidden = false;
      this.reasoning.textContent = reasoning.trim();
      if (this.reasonedUntil) {
        this.summary.textContent = `Thought for ${seconds((this.reasonedUntil - this.startedAt) / 1000)}`;
      }
    }
    if (content) this.content.replaceChildren(...markdown(content.trim()));
    if (calls && !content) this.content.replaceChildren();
    if (calls) this.calls.replaceChildren(...calls.map(callElement));
  }

  end() {
    this.reasonedUntil ??= performance.now();
    this.draw();
    find(".pending", this.content)?.remove();
    this.note.textContent = this.figures().join(" · ");
  }

  figures() {
    const reasons = { length: "cut at max tokens", stopped: "stopped" };
    const parts = [reasons[this.finishReason] ?? null];
    const writing = (performance.now() - this.firstAt) / 1000;
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens } = this.usage;
      parts.push(`${prompt} tokens in, ${tokens} out`);
      if (tokens > 1) parts.push(`${Math.round((tokens - 1) / writing).toLocaleString("en")} tokens/s`);
    }
    if (this.firstAt) parts.push(`first after ${seconds((this.firstAt - this.startedAt) / 1000)}`);
    return parts.filter(Boolean);
  }

  fail(error, retry) {
    this.draw();
    find(".pending", this.content)?.remove();
    this.note.replaceWith(failure(error, retry));
  }

  // The response as it would be without streaming.
  document() {
    const choice = { index: 0, message: this.message, finish_reason: this.finishReason };
    return { ...this.envelope, object: "chat.completion", choices: [choice], usage: this.usage };
  }
}

function callElement({ function: { name, arguments: args } }) {
  return element("div", { class: "call" },
    element("span", { class: "note" }, "calls "), element("code", {}, `${name}(${args})`));
}
