// Embeddings and rerank: texts, one per line. A table has their cosine similarities; bars, their relevance
// to a query.

import { chooseModel, element, find, setUpText, showOnSubmit } from "./dom.js";
import { ask } from "./exchange.js";
import { bars } from "./results.js";

const MAX_TEXTS = 24; // of a table
const SENTENCES = [
  "The capital of France is Paris.",
  "What is the capital of France?",
  "A cow says moo.",
  "The cow is a farm animal.",
  "Bread is made from flour.",
];
const QUERY = "What does a panda eat?";
const DOCUMENTS = [
  "The giant panda lives almost entirely on bamboo.",
  "Red pandas sleep in trees during the day.",
  "A panda is a bear of the mountains of China.",
  "Bread is made from flour, water and salt.",
];

export function startEmbeddings(section, ready, models) {
  const model = chooseModel(section, models);
  start(section, SENTENCES, input => {
    if (input.length < 2 || input.length > MAX_TEXTS) throw new Error(`2 to ${MAX_TEXTS} texts can be compared`);
    return ask({ path: "v1/embeddings", body: { model: model()?.id, input } },
      ({ data }) => [element("div", { class: "scroll" }, table(input, data.map(({ embedding }) => embedding)))],
      ({ data: [{ embedding }] }) => [`${embedding.length} dimensions`]);
  });
}

export function startRerank(section, ready, models) {
  const model = chooseModel(section, models);
  const query = find("[name=query]", section);
  query.value = QUERY;
  start(section, DOCUMENTS, documents => {
    const body = { model: model()?.id, query: query.value, documents };
    return ask({ path: "v1/rerank", body }, ({ results }) => {
      const scores = results.map(({ index, relevance_score: score }) => ({ label: documents[index], score }));
      return bars(scores, { figure: score => score.toFixed(3) });
    });
  });
}

// Shows what `work` makes of the texts.
function start(section, example, work) {
  const text = find("textarea", section);
  text.value = example.join("\n");
  setUpText(text, true);
  showOnSubmit(section, () => work(text.value.split("\n").map(line => line.trim()).filter(Boolean)));
}

function table(texts, vectors) {
  const numbers = texts.map((text, n) => element("th", { scope: "col", title: text }, `${n + 1}`));
  const rows = texts.map((text, row) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: "number" }, `${row + 1}`), ` ${text}`),
    vectors.map((vector, column) => cell(cosine(vectors[row], vector), row === column))));
  return element("table", { class: "heat" },
    element("caption", { class: "visually-hidden" }, "Cosine similarity of each pair of texts"),
    element("thead", {}, element("tr", {}, element("td", {}), numbers)),
    element("tbody", {}, rows));
}

function cell(similarity, same) {
  return element("td", { "--share": Math.max(0, similarity), class: same ? "same" : "" }, similarity.toFixed(2));
}

function cosine(one, other) {
  const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
}
