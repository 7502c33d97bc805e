// Rerank: documents, one per line, by their relevance to a query.

import { autoGrow, find, showOnSubmit, submitOnEnter } from "./dom.js";
import { ask } from "./exchange.js";
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
  showOnSubmit(section, () => rank(model, query.value, text.value));
  section.addEventListener("shown", autoGrow(text));
}

function rank(model, query, text) {
  const documents = text.split("\n").map(line => line.trim()).filter(Boolean);
  return ask({ path: PATH, body: { model, query, documents } }, ({ results }) => {
    const scores = results.map(({ index, relevance_score: score }) => ({ label: documents[index], score }));
    return bars(scores, { figure: score => score.toFixed(3) });
  });
}
