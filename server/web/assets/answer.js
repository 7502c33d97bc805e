// An answer of the chat as it comes: its events are added, and it is drawn once a frame. `message` is
// what a whole one would hold.

import { element, failure, find, seconds } from "./dom.js";
import { exchange } from "./exchange.js";
import { markdown } from "./markdown.js";

export class Answer {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.finishReason = null;
    this.usage = null;
    this.whole = {}; // what is the same in all events
    this.begun = performance.now();
    this.firstAt = null;
    this.thoughts = element("p", {});
    this.summary = element("summary", {}, "Thinking…");
    this.thinking = element("details", { class: "thoughts", hidden: true }, this.summary, this.thoughts);
    this.content = element("div", { class: "content" }, element("span", { class: "pending" }));
    this.calls = element("div", { class: "calls" });
    this.about = element("p", { class: "note" });
    this.shown = element("article", { class: "assistant", "aria-label": "Answer" },
      this.thinking, this.content, this.calls, this.about);
  }

  offer(request) {
    this.shown.append(exchange(request, () => this.document()));
  }

  add({ choices, usage, ...whole }) {
    this.whole = whole;
    if (usage) this.usage = usage;
    if (!choices.length) return;
    this.firstAt ??= performance.now(); // a call's text comes later, all at once in some forms
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
    if (delta.content || delta.tool_calls) this.thoughtUntil ??= performance.now();
    this.finishReason = reason ?? this.finishReason;
  }

  draw() {
    const { content, reasoning_content: thoughts, tool_calls: calls } = this.message;
    if (thoughts) {
      this.thinking.hidden = false;
      this.thoughts.textContent = thoughts.trim();
      if (this.thoughtUntil) {
        this.summary.textContent = `Thought for ${seconds((this.thoughtUntil - this.begun) / 1000)}`;
      }
    }
    if (content) this.content.replaceChildren(...markdown(content.trim()));
    if (calls && !content) this.content.replaceChildren();
    if (calls) this.calls.replaceChildren(...calls.map(callShown));
  }

  end() {
    this.thoughtUntil ??= performance.now();
    this.draw();
    find(".pending", this.content)?.remove();
    this.about.textContent = this.figures().join(" · ");
  }

  figures() {
    const reasons = { length: "cut at max tokens", stopped: "stopped" };
    const made = [reasons[this.finishReason] ?? null];
    const writing = (performance.now() - this.firstAt) / 1000;
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens } = this.usage;
      made.push(`${prompt} tokens in, ${tokens} out`);
      if (tokens > 1) made.push(`${Math.round((tokens - 1) / writing).toLocaleString("en")} tokens/s`);
    }
    if (this.firstAt) made.push(`the first after ${seconds((this.firstAt - this.begun) / 1000)}`);
    return made.filter(Boolean);
  }

  fail(error, retry) {
    this.draw();
    find(".pending", this.content)?.remove();
    this.about.replaceWith(failure(error, retry));
  }

  // What the answer would be without a stream.
  document() {
    const choice = { index: 0, message: this.message, finish_reason: this.finishReason };
    return { ...this.whole, object: "chat.completion", choices: [choice], usage: this.usage };
  }
}

function callShown({ function: { name, arguments: given } }) {
  return element("div", { class: "call" },
    element("span", { class: "note" }, "calls "), element("code", {}, `${name}(${given})`));
}
