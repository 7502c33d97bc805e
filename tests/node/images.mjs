// Image parts as the SDK's types have them, to a tiny model that sees (SEEING_URL).

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.SEEING_URL, apiKey: "-", maxRetries: 0 });
const [{ id: model }] = (await client.models.list()).data;
const url = process.env.IMAGE;

const text = { type: "text", text: "What is it?" };
const parts = [text, { type: "image_url", image_url: { url, detail: "high" } }];
const asked = { model, messages: [{ role: "user", content: parts }], max_tokens: 8, temperature: 0 };
const whole = await client.chat.completions.create(asked);
let told = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  told += chunk.choices[0].delta.content ?? "";
}

const image = { type: "input_image", image_url: url, detail: "auto" };
const content = [{ type: "input_text", text: "What is it?" }, image];
const input = [{ role: "user", content }];
const answer = await client.responses.create({ model, input, max_output_tokens: 16, temperature: 0 });

const tokens = whole.usage.prompt_tokens;
const said = whole.choices[0].message.content;
console.log(JSON.stringify({ said, told, tokens, input: answer.usage.input_tokens }));
