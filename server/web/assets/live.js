// What the server is doing, from /metrics: cards with a line of the last minute each, and a table.
//
//   poll, a second each while looked at → prometheus.js → samples → figures of each card → drawn

import { drawing, element, find, seconds } from "./dom.js";
import { parse } from "./prometheus.js";

const EVERY_MS = 1000;
const KEPT = 61; // samples: a minute
const WINDOW = 30; // samples that rates and percentiles are taken over
const OURS = ["/metrics", "/ready", "/health", "/assets/{name}"]; // not what a server is there for
const asked = labels => !OURS.includes(labels.endpoint);

// `now` and `then` are samples, `over` the seconds between them; a figure is a number or NaN.
const CARDS = [
  {
    title: "Queue", unit: whole,
    figure: now => now.sum("queue_depth"),
    more: now => now.has("running_sequences")
      && `${now.sum("running_sequences")} running · ${now.sum("waiting_sequences")} waiting`,
  },
  {
    title: "Answers/s", unit: rounded,
    figure: (now, then, over) => now.since(then, "requests_total", asked) / over,
    more: (now, then, over) => `${rounded(now.since(then, "errors_total") / over)} errors/s`,
  },
  {
    title: "Latency p95", unit: seconds,
    figure: (now, then) => now.percentile("request_seconds", 0.95, then, asked),
    more: (now, then) => `p50 ${seconds(now.percentile("request_seconds", 0.5, then, asked))}`,
  },
  {
    title: "Queue wait p95", unit: seconds,
    figure: (now, then) => now.percentile("queue_wait_seconds", 0.95, then),
    more: (now, then) => `p50 ${seconds(now.percentile("queue_wait_seconds", 0.5, then))}`,
  },
  {
    title: "Batch size", unit: rounded, serves: ["pipeline", "embedding", "rerank"],
    figure: (now, then) => now.mean("batch_size", then),
    more: now => `${rounded(now.mean("batch_size"))} since the start`,
  },
  {
    title: "Tokens/s", unit: rounded, serves: ["generation"],
    figure: (now, then, over) => now.since(then, "tokens_total", kind("output")) / over,
    more: (now, then, over) => `${rounded(now.since(then, "tokens_total", kind("prompt")) / over)} of prompts`,
  },
  {
    title: "First token p95", unit: seconds, serves: ["generation"],
    figure: (now, then) => now.percentile("time_to_first_token_seconds", 0.95, then),
    more: (now, then) => `p50 ${seconds(now.percentile("time_to_first_token_seconds", 0.5, then))}`,
  },
  {
    title: "Cache in use", unit: value => `${whole(100 * value)} %`, serves: ["generation"],
    figure: now => now.sum("kv_blocks_used") / now.sum("kv_blocks"),
    more: now => `${whole(now.sum("kv_blocks_used"))} of ${whole(now.sum("kv_blocks"))} blocks`,
  },
];

function kind(name) {
  return labels => labels.kind === name;
}

function whole(value) {
  return Number.isFinite(value) ? Math.round(value).toLocaleString("en") : "–";
}

function rounded(value) {
  if (!Number.isFinite(value)) return "–";
  return value >= 100 || Number.isInteger(value) ? whole(value) : value.toFixed(1);
}

export function startLive(section, ready) {
  const served = { generation: ready.chat_model, pipeline: ready.task, embedding: ready.embedding_model, rerank: ready.rerank_model };
  const cards = CARDS.filter(card => !card.serves || card.serves.some(name => served[name])).map(card => new Card(card));
  find(".cards", section).append(...cards.map(card => card.shown));
  const samples = [];
  let timer = 0;
  const poll = async () => {
    clearTimeout(timer);
    if (section.hidden || document.hidden) return;
    try {
      samples.push(parse(await (await fetch("metrics")).text(), performance.now() / 1000));
      samples.splice(0, samples.length - KEPT);
      cards.forEach(card => card.draw(samples));
      drawEndpoints(find("tbody", section), samples.at(-1));
    } catch {
      cards.forEach(card => card.fade());
    }
    clearTimeout(timer);
    timer = setTimeout(poll, EVERY_MS);
  };
  section.addEventListener("shown", poll);
  document.addEventListener("visibilitychange", poll);
}

class Card {
  constructor({ title, unit, figure, more }) {
    Object.assign(this, { unit, figure, more });
    this.value = element("strong", {}, "–");
    this.line = drawing("path", { "vector-effect": "non-scaling-stroke" });
    this.area = drawing("path", { class: "area" });
    this.note = element("p", { class: "note" });
    this.shown = element("article", { class: "card" }, element("h3", {}, title), this.value,
      drawing("svg", { viewBox: `0 0 ${KEPT - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line),
      this.note);
  }

  draw(samples) {
    const figures = samples.map((now, n) => {
      const then = samples[Math.max(0, n - WINDOW)];
      return this.figure(now, then, now.at - then.at || NaN);
    });
    const [now, then] = [samples.at(-1), samples[Math.max(0, samples.length - 1 - WINDOW)]];
    this.shown.classList.remove("old");
    this.value.textContent = this.unit(figures.at(-1));
    this.note.textContent = this.more(now, then, now.at - then.at || NaN) || "";
    this.drawLine(figures.map(figure => (Number.isFinite(figure) ? figure : 0)));
  }

  // The last sample at the right edge, the largest figure near the top.
  drawLine(figures) {
    const most = Math.max(...figures) || 1;
    const points = figures.map((figure, n) => `${KEPT - figures.length + n} ${19 - 17 * figure / most}`);
    const first = KEPT - figures.length;
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${first} 20L${points.join("L")}L${KEPT - 1} 20Z`);
  }

  fade() {
    this.shown.classList.add("old");
  }
}

function drawEndpoints(body, now) {
  const endpoints = [...new Set(now.labels("requests_total", asked).map(each => each.endpoint))].sort();
  body.replaceChildren(...endpoints.map(endpoint => {
    const here = labels => labels.endpoint === endpoint;
    const wrong = labels => here(labels) && !(labels.status < 400);
    const percentiles = [0.5, 0.95, 0.99].map(share => seconds(now.percentile("request_seconds", share, null, here)));
    const cells = [whole(now.sum("requests_total", here)), whole(now.sum("requests_total", wrong)), ...percentiles];
    return element("tr", {}, element("th", { scope: "row" }, endpoint), ...cells.map(each => element("td", {}, each)));
  }));
}
