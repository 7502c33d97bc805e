// OpenAI's Node SDK and the Responses API.

import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import {
  Place, QUESTION, RESULT, SAMPLED, THINK, WEATHER, check, checkBoth, demo, tiny,
} from "./common.mjs";

const FACT = "What is the capital of France?";
const form = { text: { format: zodTextFormat(Place, "place") }, max_output_tokens: 300 };
const argumentsOf = ({ parameters }, call) => parameters.parse(JSON.parse(call.arguments));

await check("create", async () => {
  const { responses } = demo.client;
  const first = await responses.create({ model: demo.model, input: FACT });
  const after = { previous_response_id: first.id };
  const then = await responses.create({ model: demo.model, input: "And of Japan?", ...after });
  const again = await responses.retrieve(first.id);
  await responses.delete(first.id);
  const gone = await responses.retrieve(first.id).catch((error) => error.status);
  return { texts: [first.output_text, then.output_text, again.output_text], gone };
});

await checkBoth("parse", async ({ client, model }) => {
  const asked = { model, input: QUESTION, ...form, ...SAMPLED };
  const { output_parsed, output_text } = await client.responses.parse(asked);
  return { parsed: output_parsed, content: output_text };
});

await checkBoth("stream", async ({ client, model }) => {
  const stream = client.responses.stream({ model, input: QUESTION, ...form, ...SAMPLED });
  let text = "";
  let deltas = 0;
  const types = new Set();
  for await (const event of stream) {
    types.add(event.type);
    if (event.type === "response.output_text.delta") {
      text += event.delta;
      deltas += 1;
    }
  }
  const final = await stream.finalResponse();
  const { output_parsed: parsed, output_text: content } = final;
  return { text, deltas, types: [...types], parsed, content };
});

for (const stored of [true, false]) {
  await check(`tools ${stored}`, async () => {
    const asked = { model: demo.model, tools: [zodResponsesFunction(WEATHER)], store: stored };
    const input = [{ role: "user", content: QUESTION }];
    const first = await demo.client.responses.parse({ ...asked, input });
    const [call] = first.output;
    const output = JSON.stringify(RESULT);
    const result = { type: "function_call_output", call_id: call.call_id, output };
    const next = stored
      ? { input: [result], previous_response_id: first.id }
      : { input: [...input, ...first.output, result] };
    const stream = demo.client.responses.stream({ ...asked, ...next });
    const final = await stream.finalResponse();
    return { called: [argumentsOf(WEATHER, call)], content: final.output_text };
  });
}

await check("reasoning", async () => {
  const asked = { model: tiny.model, input: "hi", ...form, ...SAMPLED, ...THINK };
  const { output, output_parsed, usage } = await tiny.client.responses.parse(asked);
  let told = "";
  for await (const event of await tiny.client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.reasoning_text.delta") told += event.delta;
  }
  return {
    told,
    types: output.map((item) => item.type),
    reasoning: output[0].content[0].text,
    parsed: output_parsed,
    tokens: usage.output_tokens_details.reasoning_tokens,
  };
});

await check("background", async () => {
  const { responses } = demo.client;
  let polled = await responses.create({ model: demo.model, input: FACT, background: true });
  const begun = polled.status;
  while (["queued", "in_progress"].includes(polled.status)) {
    polled = await responses.retrieve(polled.id);
  }
  return { begun, ended: polled.status, content: polled.output_text };
});

await check("cancelled", async () => {
  const { responses } = demo.client;
  const asked = { model: demo.model, input: "hi", background: true, ignore_eos: true };
  const { id } = await responses.create({ ...asked, temperature: 1.5 });
  const cancelled = await responses.cancel(id);
  return { status: [cancelled.status, (await responses.retrieve(id)).status] };
});
