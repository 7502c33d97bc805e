// Embeddings: a table of the cosine similarities of texts, one text per line.

import { autoGrow, element, find, showOnSubmit, submitOnEnter } from "./dom.js";
import { ask } from "./exchange.js";

const PATH = "v1/embeddings";
const MAX_TEXTS = 24;
const EXAMPLE = [
  "The capital of France is Paris.",
  "What is the capital of France?",
  "A cow says moo.",
  "The cow is a farm animal.",
  "Bread is made from flour.",
];

export function startEmbeddings(section, ready, models) {
  const text = find("#embeddings-text", section);
  const model = models.find(({ serves }) => serves === "embedding")?.id;
  text.value = EXAMPLE.join("\n");
  submitOnEnter(text, find("form", section), true);
  showOnSubmit(section, () => compare(text.value, model));
  section.addEventListener("shown", autoGrow(text));
}

function compare(text, model) {
  const texts = text.split("\n").map(line => line.trim()).filter(Boolean);
  if (texts.length < 2 || texts.length > MAX_TEXTS) throw new Error(`2 to ${MAX_TEXTS} texts can be compared`);
  return ask({ path: PATH, body: { model, input: texts } },
    ({ data }) => [element("div", { class: "scroll" }, table(texts, data.map(({ embedding }) => embedding)))],
    ({ data: [{ embedding }] }) => [`${embedding.length} dimensions`]);
}

function table(texts, vectors) {
  const numbers = texts.map((text, n) => element("th", { scope: "col", title: text }, `${n + 1}`));
  const rows = texts.map((text, row) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: "number" }, `${row + 1}`), ` ${text}`),
    ...vectors.map((vector, column) => cell(cosine(vectors[row], vector), row === column))));
  return element("table", { class: "heat" },
    element("caption", { class: "visually-hidden" }, "Cosine similarity of each pair of texts"),
    element("thead", {}, element("tr", {}, element("td", {}), ...numbers)),
    element("tbody", {}, ...rows));
}

function cell(similarity, same) {
  return element("td", { "--share": Math.max(0, similarity), class: same ? "same" : "" }, similarity.toFixed(2));
}

function cosine(one, other) {
  const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
}
