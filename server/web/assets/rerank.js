// Rerank: documents, one per line, by their relevance to a query.

import { call } from "./api.js";
import { autoGrow, element, find, showResult, submitOnEnter } from "./dom.js";
import { exchange } from "./exchange.js";
import { timingText } from "./pipeline.js";
import { bars } from "./results.js";

const PATH = "v1/rerank";
const QUERY = "What does a panda eat?";
const DOCUMENTS = [
  "The giant panda lives almost entirely on bamboo.",
  "Red pandas sleep in trees during the day.",
  "A panda is a bear of the mountains of China.",
  "Bread is made from flour, water and salt.",
];

export function startRerank(section, ready, models) {
  const form = find("form", section);
  const [query, text] = [form.elements.query, find("textarea", form)];
  const model = models.find(({ serves }) => serves === "rerank")?.id;
  query.value = QUERY;
  text.value = DOCUMENTS.join("\n");
  submitOnEnter(text, form, true);
  form.onsubmit = event => {
    event.preventDefault();
    showResult(section, () => rank(model, query.value, text.value));
  };
  section.addEventListener("shown", autoGrow(text));
}

async function rank(model, query, text) {
  const documents = text.split("\n").map(line => line.trim()).filter(Boolean);
  const body = { model, query, documents };
  const response = await call(PATH, { body });
  const answer = await response.json();
  const scores = answer.results.map(({ index, relevance_score: score }) => ({ label: documents[index], score }));
  return [...bars(scores, { figure: score => score.toFixed(3) }), element("p", { class: "note" }, timingText(response)),
    exchange({ path: PATH, body }, () => answer)];
}
