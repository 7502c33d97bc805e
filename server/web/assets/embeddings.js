// Embeddings: texts, one a line, and how alike each two are: the cosine of their vectors.

import { call } from "./api.js";
import { element, find, growing, sendingOnEnter, showing } from "./dom.js";
import { exchange } from "./exchange.js";
import { figures } from "./pipeline.js";

const PATH = "v1/embeddings";
const MOST = 24; // texts in one table
const EXAMPLE = [
  "The capital of France is Paris.",
  "What is the capital of France?",
  "A cow says moo.",
  "The cow is a farm animal.",
  "Bread is made from flour.",
];

export function startEmbeddings(section, ready, models) {
  const form = find("form", section);
  const text = find("#embeddings-text", section);
  const model = models.find(each => each.serves === "embedding")?.id;
  text.value = EXAMPLE.join("\n");
  sendingOnEnter(text, form, true);
  form.onsubmit = event => {
    event.preventDefault();
    showing(section, () => compare(text.value, model));
  };
  section.addEventListener("shown", growing(text));
}

async function compare(text, model) {
  const texts = text.split("\n").map(line => line.trim()).filter(Boolean);
  if (texts.length < 2 || texts.length > MOST) throw new Error(`2 to ${MOST} texts can be compared`);
  const request = { path: PATH, body: { model, input: texts } };
  const response = await call(PATH, { body: request.body });
  const answer = await response.json();
  const vectors = answer.data.map(each => each.embedding);
  return [
    element("div", { class: "scroll" }, table(texts, vectors)),
    element("p", { class: "note" },
      [`${vectors[0].length} dimensions`, figures(response)].filter(Boolean).join(" · ")),
    exchange(request, () => answer),
  ];
}

function table(texts, vectors) {
  const numbers = texts.map((text, n) => element("th", { scope: "col", title: text }, `${n + 1}`));
  const rows = texts.map((text, row) => element("tr", {},
    element("th", { scope: "row" }, element("span", { class: "number" }, `${row + 1}`), ` ${text}`),
    ...vectors.map((vector, column) => cell(cosine(vectors[row], vector), row === column))));
  return element("table", { class: "heat" },
    element("caption", { class: "unseen" }, "How alike each two texts are, up to 1"),
    element("thead", {}, element("tr", {}, element("td", {}), ...numbers)),
    element("tbody", {}, ...rows));
}

function cell(likeness, same) {
  return element("td", { "--share": Math.max(0, likeness), class: same ? "same" : "" }, likeness.toFixed(2));
}

function cosine(one, other) {
  const dot = (a, b) => a.reduce((sum, value, n) => sum + value * b[n], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
}
