// Live metrics: a card per figure with a line of the last minute, and a table of the endpoints.
//
//   poll /metrics every second while visible → prometheus.js → samples → figures → draw

import { element, find, seconds, svgElement } from "./dom.js";
import { parse } from "./prometheus.js";

const POLL_MS = 1000;
const MAX_SAMPLES = 61; // a minute
const WINDOW = 30; // samples of a rate or percentile
const INTERNAL = ["/metrics", "/ready", "/health", "/assets/{name}"];
const isRequest = labels => !INTERNAL.includes(labels.endpoint);

// `now` and `then` are samples, `over` the seconds between them; `figure` returns a number or NaN.
const CARDS = [
  {
    title: "Queue", unit: whole,
    figure: now => now.sum("queue_depth"),
    more: now => now.has("running_sequences")
      && `${now.sum("running_sequences")} running · ${now.sum("waiting_sequences")} waiting`,
  },
  {
    title: "Responses/s", unit: rounded,
    figure: (now, then, over) => now.since(then, "requests_total", isRequest) / over,
    more: (now, then, over) => `${rounded(now.since(then, "errors_total") / over)} errors/s`,
  },
  {
    title: "Latency p95", unit: seconds,
    figure: (now, then) => now.percentile("request_seconds", 0.95, then, isRequest),
    more: (now, then) => `p50 ${seconds(now.percentile("request_seconds", 0.5, then, isRequest))}`,
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
    more: (now, then, over) => `${rounded(now.since(then, "tokens_total", kind("prompt")) / over)} prompt tokens/s`,
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
  const models = { generation: ready.chat_model, pipeline: ready.task, embedding: ready.embedding_model, rerank: ready.rerank_model };
  const cards = CARDS.filter(card => !card.serves || card.serves.some(name => models[name])).map(card => new Card(card));
  find(".cards", section).append(...cards.map(card => card.element));
  const samples = [];
  let timer = 0;
  const poll = async () => {
    clearTimeout(timer);
    if (section.hidden || document.hidden) return;
    try {
      samples.push(parse(await (await fetch("metrics")).text(), performance.now() / 1000));
      samples.splice(0, samples.length - MAX_SAMPLES);
      cards.forEach(card => card.draw(samples));
      drawEndpoints(find("tbody", section), samples.at(-1));
    } catch {
      cards.forEach(card => card.setStale());
    }
    clearTimeout(timer);
    timer = setTimeout(poll, POLL_MS);
  };
  section.addEventListener("shown", poll);
  document.addEventListener("visibilitychange", poll);
}

class Card {
  constructor({ title, unit, figure, more }) {
    Object.assign(this, { unit, figure, more });
    this.value = element("strong", {}, "–");
    this.line = svgElement("path", { "vector-effect": "non-scaling-stroke" });
    this.area = svgElement("path", { class: "area" });
    this.note = element("p", { class: "note" });
    this.element = element("article", { class: "card" }, element("h3", {}, title), this.value,
      svgElement("svg", { viewBox: `0 0 ${MAX_SAMPLES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.area, this.line),
      this.note);
  }

  draw(samples) {
    const figures = samples.map((now, n) => {
      const then = samples[Math.max(0, n - WINDOW)];
      return this.figure(now, then, now.at - then.at || NaN);
    });
    const [now, then] = [samples.at(-1), samples[Math.max(0, samples.length - 1 - WINDOW)]];
    this.element.classList.remove("stale");
    this.value.textContent = this.unit(figures.at(-1));
    this.note.textContent = this.more(now, then, now.at - then.at || NaN) || "";
    this.drawLine(figures.map(figure => (Number.isFinite(figure) ? figure : 0)));
  }

  // Draws the last sample at the right edge, the largest figure near the top.
  drawLine(figures) {
    const largest = Math.max(...figures) || 1;
    const points = figures.map((figure, n) => `${MAX_SAMPLES - figures.length + n} ${19 - 17 * figure / largest}`);
    const first = MAX_SAMPLES - figures.length;
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${first} 20L${points.join("L")}L${MAX_SAMPLES - 1} 20Z`);
  }

  setStale() {
    this.element.classList.add("stale");
  }
}

function drawEndpoints(body, now) {
  const endpoints = [...new Set(now.labels("requests_total", isRequest).map(({ endpoint }) => endpoint))].sort();
  body.replaceChildren(...endpoints.map(endpoint => {
    const ofEndpoint = labels => labels.endpoint === endpoint;
    const isError = labels => ofEndpoint(labels) && !(labels.status < 400);
    const percentiles = [0.5, 0.95, 0.99].map(share => seconds(now.percentile("request_seconds", share, null, ofEndpoint)));
    const cells = [whole(now.sum("requests_total", ofEndpoint)), whole(now.sum("requests_total", isError)), ...percentiles];
    return element("tr", {}, element("th", { scope: "row" }, endpoint), ...cells.map(text => element("td", {}, text)));
  }));
}
