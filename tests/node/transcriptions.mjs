// What OpenAI's Node SDK makes of transcriptions: whole, as subtitles, and streamed.

import fs from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.URL, apiKey: "-", maxRetries: 0 });
const create = (fields) =>
  client.audio.transcriptions.create({
    file: fs.createReadStream(process.env.SOUND),
    model: "demo",
    ...fields,
  });
const whole = await create({});
const verbose = await create({
  response_format: "verbose_json",
  timestamp_granularities: ["word", "segment"],
});
const srt = await create({ response_format: "srt" });
const events = [];
for await (const event of await create({ stream: true })) events.push(event);
const translated = await client.audio.translations.create({
  file: fs.createReadStream(process.env.SOUND),
  model: "demo",
});
let refused = "";
try {
  await create({ response_format: "diarized_json" });
} catch (error) {
  refused = error.param;
}
console.log(
  JSON.stringify({
    whole: whole.text,
    words: verbose.words.length,
    srt,
    deltas: events.slice(0, -1).map((each) => each.delta),
    done: events.at(-1),
    translated: translated.text,
    refused,
  }),
);
