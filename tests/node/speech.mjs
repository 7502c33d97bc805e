// What OpenAI's Node SDK makes of speech: whole, streamed, and refused.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.URL, apiKey: "-", maxRetries: 0 });
const create = (fields) =>
  client.audio.speech.create({
    model: "tts",
    voice: "1",
    input: process.env.TEXT,
    response_format: "pcm",
    seed: 1,
    ...fields,
  });
const whole = await (await create({})).arrayBuffer();
let pieces = 0;
let bytes = 0;
for await (const piece of (await create({})).body) {
  pieces += 1;
  bytes += piece.length;
}
let refused = "";
try {
  await create({ voice: "alloy" });
} catch (error) {
  refused = error.param;
}
console.log(JSON.stringify({ whole: whole.byteLength, pieces, bytes, refused }));
