// OpenAI's Node SDK and Chat Completions.

import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import {
  Place, QUESTION, RESULT, SAMPLED, THINK, WEATHER, check, checkBoth, demo, tiny,
} from "./common.mjs";

const user = (content) => [{ role: "user", content }];
const form = { response_format: zodResponseFormat(Place, "place"), max_tokens: 300 };
const required = { tool_choice: "required", parallel_tool_calls: false, max_tokens: 200 };

await checkBoth("parse", async ({ client, model }) => {
  const asked = { model, messages: user(QUESTION), logprobs: true, ...form, ...SAMPLED };
  const [choice] = (await client.chat.completions.parse(asked)).choices;
  const tokens = choice.logprobs.content.map((each) => each.token).join("");
  return { parsed: choice.message.parsed, content: choice.message.content, tokens };
});

await checkBoth("stream", async ({ client, model }) => {
  const stream = client.chat.completions.stream({
    model, messages: user(QUESTION), ...form, ...SAMPLED,
  });
  let text = "";
  let deltas = 0;
  let done = null;
  stream.on("content.delta", (event) => {
    text += event.delta;
    deltas += 1;
  });
  stream.on("content.done", (event) => (done = event.parsed));
  const { message } = (await stream.finalChatCompletion()).choices[0];
  return { text, deltas, done, parsed: message.parsed, content: message.content };
});

await checkBoth("stream of a call", async ({ client, model }) => {
  const tools = [zodFunction(WEATHER)];
  const asked = { model, messages: user(QUESTION), tools, ...required, ...SAMPLED };
  const stream = client.chat.completions.stream(asked);
  let text = "";
  let done = null;
  stream.on("tool_calls.function.arguments.delta", (event) => (text += event.arguments_delta));
  stream.on("tool_calls.function.arguments.done", (event) => (done = event));
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  const [call] = message.tool_calls;
  return {
    text,
    done,
    finish_reason,
    content: message.content,
    name: call.function.name,
    parsed: call.function.parsed_arguments,
  };
});

for (const stream of [false, true]) {
  await check(`runTools ${stream}`, async () => {
    const called = [];
    const run = (given) => {
      called.push(given);
      return RESULT;
    };
    const tools = [zodFunction({ ...WEATHER, function: run })];
    const asked = { model: demo.model, messages: user(QUESTION), tools, stream };
    const runner = demo.client.chat.completions.runTools(asked);
    return { called, content: await runner.finalContent() };
  });
}

await check("reasoning", async () => {
  const asked = { model: tiny.model, messages: user("hi"), ...form, ...SAMPLED, ...THINK };
  const whole = await tiny.client.chat.completions.parse(asked);
  const { message } = whole.choices[0];
  let told = "";
  for await (const chunk of await tiny.client.chat.completions.create({ ...asked, stream: true })) {
    told += chunk.choices[0].delta.reasoning_content ?? "";
  }
  return {
    told,
    reasoning: message.reasoning_content,
    parsed: message.parsed,
    tokens: whole.usage.completion_tokens_details.reasoning_tokens,
  };
});

