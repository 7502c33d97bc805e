// The vectors that OpenAI's Node SDK makes of the base64 it asks for by default.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.URL, apiKey: "-", maxRetries: 0 });
const made = await client.embeddings.create({ model: "demo", input: JSON.parse(process.env.TEXTS) });
console.log(JSON.stringify(made.data.map((each) => each.embedding)));
