// The messages of a chat as elements. An assistant's message streams in: events are added, and it is drawn
// now and then. `message` has the form of the API's whole message.

import { filesOf, kindOf, textOf } from "./composer.js";
import { announce, button, copyButton, element, failure, seconds, stopwatch } from "./dom.js";
import { exchange } from "./exchange.js";
import { fileNameOf } from "./files.js";
import { MarkdownView } from "./markdown.js";
import { speakButton } from "./speak.js";

export function userMessage({ content }, edit) {
  const text = textOf(content);
  return element("article", { class: "user", "aria-label": "You" },
    element("div", { class: "bubble" },
      filesOf(content).map(url => kindOf(url) === "image" ? element("img", { src: url, alt: fileNameOf(url) }) : element("p", { class: "note" }, fileNameOf(url))),
      element("p", {}, text)),
    element("div", { class: "actions" }, copyButton(() => text), button("Edit", edit)));
}

export function toolMessage(name, { content }) {
  return element("article", { class: "call", "aria-label": "Result" }, element("span", { class: "note" }, `${name} returned `), content);
}

export class AssistantMessage {
  constructor(regenerate) {
    this.message = { role: "assistant", content: "" };
    this.finishReason = null;
    this.usage = null;
    this.envelope = {}; // the fields that all events share
    this.startedAt = performance.now();
    this.firstAt = null;
    this.reasoning = element("p", {});
    this.summary = element("summary", {}, "Reasoning…");
    this.details = element("details", { class: "reasoning", hidden: true }, this.summary, this.reasoning);
    this.content = element("div", { class: "content" });
    this.markdown = new MarkdownView(this.content);
    this.calls = element("div", { class: "calls" });
    this.waiting = stopwatch("Waiting for the first token");
    this.note = element("p", { class: "note" });
    this.actions = element("div", { class: "actions", hidden: true }, copyButton(() => this.message.content),
      speakButton(() => this.message.content, () => this.actions),
      button("Regenerate", regenerate, { class: "quiet regenerate" }));
    this.element = element("article", { class: "assistant", "aria-label": "Answer" },
      this.details, this.content, this.calls, this.waiting, this.note, this.actions);
  }

  // Shows the request, and the response as it would be without streaming.
  addExchange(request) {
    this.element.append(exchange(request, () => {
      const choice = { index: 0, message: this.message, finish_reason: this.finishReason };
      return { ...this.envelope, object: "chat.completion", choices: [choice], usage: this.usage };
    }));
  }

  add({ choices, usage, ...envelope }) {
    this.envelope = envelope;
    if (usage) this.usage = usage;
    if (!choices.length) return;
    this.firstAt ??= performance.now(); // some formats send a call's text later, all at once
    const [{ delta, finish_reason: reason }] = choices;
    const message = this.message;
    for (const name of ["content", "reasoning_content"]) {
      if (delta[name]) message[name] = (message[name] ?? "") + delta[name];
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

  // Screen readers hear each block of the answer when it is complete.
  draw(hear = announce) {
    const { content, reasoning_content: reasoning, tool_calls: calls } = this.message;
    if (content || reasoning || calls) this.waiting.remove();
    if (reasoning) {
      this.details.hidden = false;
      this.reasoning.textContent = reasoning.trim();
      if (this.reasonedUntil) {
        this.summary.textContent = `Reasoning · ${seconds((this.reasonedUntil - this.startedAt) / 1000)}`;
      }
    }
    this.markdown.draw(content ?? "").forEach(block => hear(block.textContent));
    if (calls) this.calls.replaceChildren(...calls.map(callElement));
  }

  // Draws the whole message. `error`: why it ended early; `retry` is then called by a button.
  end(error = null, retry = null) {
    this.reasonedUntil ??= performance.now();
    this.draw();
    this.waiting.remove();
    announce(this.markdown.last?.textContent ?? "");
    this.note.textContent = this.figures().join(" · ");
    this.actions.hidden = !this.firstAt;
    if (error) this.note.after(failure(error, retry));
  }

  // Shows a message of the history.
  show(message) {
    this.message = message;
    this.draw(() => {});
    this.waiting.remove();
    this.actions.hidden = false;
    this.summary.textContent = "Reasoning";
  }

  figures() {
    const reasons = { length: "cut at max tokens", stopped: "stopped" };
    const parts = [reasons[this.finishReason]];
    const writing = (performance.now() - this.firstAt) / 1000;
    if (this.usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens } = this.usage;
      parts.push(`${prompt} tokens in, ${tokens} out`);
      if (tokens > 1) parts.push(`${Math.round((tokens - 1) / writing).toLocaleString("en")} tokens/s`);
    }
    if (this.firstAt) parts.push(`first after ${seconds((this.firstAt - this.startedAt) / 1000)}`);
    return parts.filter(Boolean);
  }

  // Returns the message for the history: without calls if it is a part, and null without text and calls.
  whole(isPart) {
    const message = { ...this.message, content: this.message.content || null };
    if (isPart) delete message.tool_calls;
    return message.content || message.tool_calls ? message : null;
  }
}

function callElement({ function: { name, arguments: args } }) {
  return element("div", { class: "call" },
    element("span", { class: "note" }, "calls "), element("code", {}, `${name}(${args})`));
}
