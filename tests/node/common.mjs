// What both scripts ask for, and how they tell what they got: a line of JSON for each check.

import OpenAI from "openai";
import { z } from "zod";

export const QUESTION = "What is the weather in Paris?";
export const RESULT = { temperature: 18, condition: "sunny" };
export const THINK = { chat_template_kwargs: { thinking_begun: true }, thinking_token_budget: 6 };
export const SAMPLED = { temperature: 1, seed: 1 };

const Near = z.object({ name: z.string().max(6), km: z.number().int().min(0).max(999) });
export const Place = z.object({
  city: z.string().max(8),
  kind: z.enum(["capital", "town"]),
  near: z.array(Near).max(2),
  twin: Near.nullable(),
});
export const WEATHER = {
  name: "get_weather",
  description: "Get the current weather in a city",
  parameters: z.object({ city: z.string().max(20).describe("The city") }),
};

const clients = {};
for (const side of ["demo", "tiny"]) {
  const baseURL = process.env[`${side.toUpperCase()}_URL`];
  const client = new OpenAI({ baseURL, apiKey: "-", maxRetries: 0 });
  const [{ id }] = (await client.models.list()).data;
  clients[side] = { client, model: id };
}
export const { demo, tiny } = clients;

export async function check(name, ask) {
  let got;
  try {
    got = await ask();
  } catch (error) {
    got = { error: `${error.constructor.name}: ${error.message}`, param: error.param };
  }
  console.log(JSON.stringify({ check: name, ...got }));
}

export async function checkBoth(name, ask) {
  await check(`${name} demo`, () => ask(demo));
  await check(`${name} tiny`, () => ask(tiny));
}
